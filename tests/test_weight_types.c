/*
 * Quantized weights and the cache's settings do not touch each other: weight types x cache F16 or INT8 x TLC off or on, on one tiny
 * model; with TLC off against libllama on the same file, with TLC on against the scalar reference with the victims hidden.
 */
#include "support/cmocka_all.h"
#include "support/compare.h"
#include "support/fixture.h"
#include "support/oracle.h"
#include "support/versus.h"

#include <stdlib.h>
#include <string.h>

#define N 80
/* What an INT8 cache adds, as a share of the logits' standard deviation: random models have peaked attention on small heads. */
#define INT8_TOLERANCE 0.25

static const char *write_type(const char *arch, enum ggml_type type) {
    tiny_model_params p = tiny_model_default_params();
    p.arch = arch;
    p.n_experts = strcmp(arch, "qwen3moe") == 0 ? 4 : 0;
    p.n_experts_used = p.n_experts; /* all: where rounding decides which one is chosen, no tolerance holds */
    p.n_heads = 4;
    p.n_kv_heads = 2;
    p.head_dim = 64;
    p.n_embd = 256;
    p.n_ff = 512;
    p.type = type;
    return write_tiny(&p);
}

/* TLC off, INT8 cache: libllama's logits, but for what the cache loses. */
static void check_int8(const char *name, const char *path, const dt_model *model, double tolerance) {
    const size_t n_vocab = (size_t)dt_model_get_info(model)->n_vocab;
    int32_t tokens[N];
    random_tokens(tokens, N, 3, (int32_t)n_vocab, 13);
    const dt_session_params params = {.n_threads = 1, .n_batch = 32, .kv_type = DT_KV_INT8};
    dt_session *session = open_session(model, &params);
    oracle *o = oracle_open(path, 256, false);
    assert_non_null(o);
    float *want = malloc(N * n_vocab * sizeof *want);
    assert_true(oracle_decode(o, tokens, N, want));
    double worst = 0.0;
    for (size_t n = 40; n <= N; n++) {
        sync_tokens(session, tokens, n);
        const double error = logit_error(dt_session_logits(session), want + (n - 1) * n_vocab, n_vocab);
        worst = error > worst ? error : worst;
    }
    print_message("%-24s INT8 cache: worst logit error %.4f\n", name, worst);
    assert_true(worst <= tolerance + INT8_TOLERANCE);
    free(want);
    oracle_close(o);
    dt_session_free(session);
}

static void test_matrix(void **state) {
    (void)state;
    static const struct {
        const char *name;
        enum ggml_type type;
    } types[] = {{"F16", GGML_TYPE_F16},   {"BF16", GGML_TYPE_BF16}, {"Q8_0", GGML_TYPE_Q8_0},
                 {"Q4_0", GGML_TYPE_Q4_0}, {"Q4_1", GGML_TYPE_Q4_1}, {"Q4_K", GGML_TYPE_Q4_K},
                 {"Q5_K", GGML_TYPE_Q5_K}, {"Q6_K", GGML_TYPE_Q6_K}, {"IQ4_XS", GGML_TYPE_IQ4_XS}};
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        const char *name = types[i].name, *path = write_type("qwen2", types[i].type);
        const double tolerance = assert_equals_oracle(name, path);
        dt_model *model = open_model(path, false);
        check_int8(name, path, model, tolerance);
        assert_eviction_is_hiding(name, model, DT_PREFILL_FULL, DT_KV_F16, "importance_score", tolerance);
        assert_eviction_is_hiding(name, model, DT_PREFILL_STREAMING, DT_KV_INT8, "local_window", tolerance + INT8_TOLERANCE);
        dt_model_close(model);
    }
}

/* Expert matrices have products and fast layouts of their own. */
static void test_experts(void **state) {
    (void)state;
    assert_equals_oracle("experts F16", write_type("qwen3moe", GGML_TYPE_F16));
    assert_equals_oracle("experts Q8_0", write_type("qwen3moe", GGML_TYPE_Q8_0));
    assert_equals_oracle("experts Q4_0", write_type("qwen3moe", GGML_TYPE_Q4_0));
    assert_equals_oracle("experts Q4_1", write_type("qwen3moe", GGML_TYPE_Q4_1));
    assert_equals_oracle("experts Q4_K", write_type("qwen3moe", GGML_TYPE_Q4_K));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_experts),
        cmocka_unit_test(test_matrix),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
