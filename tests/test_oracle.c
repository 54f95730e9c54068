/*
 * Our decoder against libllama on the same file: logits at every position within tolerance, greedy tokens equal (invariant 2), and
 * local_window against libllama after the middle was removed from its cache (invariant 3).
 * Models are tiny and random, over head layouts, weight types, ropes and biases.
 */
#include "support/cmocka_all.h"
#include "support/compare.h"
#include "support/fixture.h"
#include "support/oracle.h"
#include "support/versus.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* As in support/versus.c. */
#define TOLERANCE 0.02

static tiny_model_params base_params(void) {
    tiny_model_params p = tiny_model_default_params();
    p.n_layers = 2;
    p.n_ctx = 512;
    return p;
}

static void test_head_layouts(void **state) {
    (void)state;
    static const struct {
        int32_t heads, kv_heads, dim;
    } layouts[] = {{3, 1, 64}, {9, 3, 64},   {4, 4, 80}, {8, 2, 96}, {8, 1, 128},
                   {5, 5, 64}, {12, 3, 128}, {7, 1, 80}, {6, 2, 40}, {4, 1, 100}};
    for (size_t i = 0; i < sizeof layouts / sizeof layouts[0]; i++) {
        tiny_model_params p = base_params();
        p.n_heads = layouts[i].heads;
        p.n_kv_heads = layouts[i].kv_heads;
        p.head_dim = layouts[i].dim;
        p.n_embd = layouts[i].heads * layouts[i].dim;
        p.tied = i % 2 == 0;
        p.seed = 100 + i;
        char name[64];
        snprintf(name, sizeof name, "heads %d/%d of %d", p.n_heads, p.n_kv_heads, p.head_dim);
        assert_equals_oracle(name, write_tiny(&p));
    }
}

static void test_weight_types(void **state) {
    (void)state;
    static const struct {
        const char *name;
        enum ggml_type type;
    } types[] = {{"F32", GGML_TYPE_F32},       {"F16", GGML_TYPE_F16},   {"BF16", GGML_TYPE_BF16}, {"Q4_0", GGML_TYPE_Q4_0},
                 {"Q4_1", GGML_TYPE_Q4_1},     {"Q5_0", GGML_TYPE_Q5_0}, {"Q5_1", GGML_TYPE_Q5_1}, {"Q8_0", GGML_TYPE_Q8_0},
                 {"IQ4_NL", GGML_TYPE_IQ4_NL}, {"Q4_K", GGML_TYPE_Q4_K}, {"Q5_K", GGML_TYPE_Q5_K}, {"Q6_K", GGML_TYPE_Q6_K},
                 {"IQ4_XS", GGML_TYPE_IQ4_XS}};
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        for (int tied = 0; tied < 2; tied++) {
            tiny_model_params p = base_params();
            p.n_heads = 4;
            p.n_kv_heads = 2;
            p.head_dim = 64;
            p.n_embd = 256;
            p.n_ff = 512;
            p.type = types[i].type;
            p.tied = tied != 0;
            char name[64];
            snprintf(name, sizeof name, "%s %s", types[i].name, tied ? "tied" : "untied");
            assert_equals_oracle(name, write_tiny(&p));
        }
    }
}

static void test_biases_and_ropes(void **state) {
    (void)state;
    tiny_model_params p = base_params();
    p.biases = true;
    assert_equals_oracle("biases", write_tiny(&p));
    p = base_params();
    p.rope_scaling = TINY_ROPE_LINEAR;
    p.rope_factor = 4.0f;
    assert_equals_oracle("linear rope scaling", write_tiny(&p));
    p = base_params();
    p.rope_scaling = TINY_ROPE_YARN;
    p.rope_factor = 4.0f;
    p.rope_original_context = 128;
    assert_equals_oracle("YaRN rope scaling", write_tiny(&p));
    p = base_params();
    p.rope_freqs = true;
    p.rope_base = 500000.0f;
    assert_equals_oracle("llama 3 rope factors", write_tiny(&p));
}

/* Ours evicts by local_window; the oracle gets the whole prompt and then loses the same middle. */
static void test_local_window_is_removing_the_middle(void **state) {
    (void)state;
    enum { N = 150, MAX = 64, LOW = 60, SINKS = 4, STEPS = 3 };
    tiny_model_params p = base_params();
    p.type = GGML_TYPE_F32;
    const char *path = write_tiny(&p);
    dt_model *model = open_model(path, false);
    const size_t n_vocab = (size_t)dt_model_get_info(model)->n_vocab;
    dt_eviction *eviction =
        eviction_from_json(model, "{\"0-\": {\"policy\": \"local_window\", \"max_cache_size\": 64, \"min_cache_size\": 8,"
                                  " \"sink_tokens\": 4, \"recent_window\": 16}}");
    dt_session_params sp = {.n_threads = 2, .n_batch = 64, .eviction = eviction, .kv_block_tokens = 16};
    dt_session *session = open_session(model, &sp);
    oracle *o = oracle_open(path, 512, false);
    assert_non_null(o);

    int32_t tokens[N + STEPS];
    random_tokens(tokens, N + STEPS, 3, (int32_t)n_vocab, 11);
    float *last = malloc(n_vocab * sizeof *last);
    sync_tokens(session, tokens, N);
    assert_true(oracle_decode(o, tokens, N, NULL));
    dt_layer_stats stats;
    dt_session_get_layer_stats(session, 0, &stats);
    assert_int_equal(stats.length, LOW);
    oracle_remove(o, SINKS, N - (LOW - SINKS));
    for (int32_t i = 0; i < STEPS; i++) {
        append_token(session, tokens[N + i]);
        assert_true(oracle_decode(o, &tokens[N + i], 1, last));
        const double error = logit_error(dt_session_logits(session), last, n_vocab);
        print_message("local_window step %d: logit error %.5f\n", i, error);
        assert_true(error <= TOLERANCE);
    }
    free(last);
    oracle_close(o);
    dt_session_free(session);
    dt_eviction_free(eviction);
    dt_model_close(model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_head_layouts),
        cmocka_unit_test(test_weight_types),
        cmocka_unit_test(test_biases_and_ropes),
        cmocka_unit_test(test_local_window_is_removing_the_middle),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
