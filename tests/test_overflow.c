/*
 * Activations beyond what halves hold (cases.md row 17): real GLM models have them before ffn_down. Logits stay finite at every
 * prompt length from 1 to 130, each of which takes its own way through the kernels, and are the same with every attention kernel;
 * ordinary activations are tried too. Activations inside attention are test_attn's.
 */
#include "attn/attn.h"
#include "support/cmocka_all.h"
#include "support/compare.h"
#include "support/fixture.h"

#include <stdlib.h>
#include <string.h>

#define N_LENGTHS 130

static void check_lengths(const tiny_model_params *p, bool exact, int32_t step) {
    dt_model *model = open_model(write_tiny(p), exact);
    const size_t n_vocab = (size_t)dt_model_get_info(model)->n_vocab;
    int32_t tokens[N_LENGTHS];
    random_tokens(tokens, N_LENGTHS, 3, (int32_t)n_vocab, 3);
    const char *kernels[] = {"reference",       "avx2",       "avx512", "amx_bf16",
                             "reference_int16", "avx512_vnni"}; /* each after its reference */
    float *want = malloc(n_vocab * sizeof *want);
    double worst = 0.0;
    for (int32_t n = 1; n <= N_LENGTHS; n += step) {
        for (size_t k = 0; k < sizeof kernels / sizeof kernels[0]; k++) {
            dt_error error;
            if (!dt_attn_kernel_find(kernels[k], &error)) {
                continue;
            }
            const dt_session_params sp = {.n_threads = 1, .n_batch = 512, .kernel = kernels[k]};
            dt_session *session = open_session(model, &sp);
            sync_tokens(session, tokens, (size_t)n);
            const float *got = dt_session_logits(session);
            if (!all_finite(got, n_vocab)) {
                fail_msg("%s, type %d, %d tokens, kernel %s: logits are not finite", p->arch, (int)p->type, (int)n, kernels[k]);
            }
            if (strncmp(kernels[k], "reference", 9) == 0) {
                memcpy(want, got, n_vocab * sizeof *want);
            }
            const double apart = logit_error(got, want, n_vocab);
            worst = apart > worst ? apart : worst;
            dt_session_free(session);
        }
    }
    print_message("%-8s type %d, loudness %g, %s: kernels differ by %.5f\n", p->arch, (int)p->type, (double)p->loudness,
                  exact ? "the file's layout" : "fast layouts", worst);
    /* products that round their inputs to 8 bits or to halves magnify what differs before them, the more the louder it is */
    assert_true(worst <= (p->type == GGML_TYPE_F32 ? 1e-3 : 0.25));
    free(want);
    dt_model_close(model);
}

static tiny_model_params params_of(const char *arch, enum ggml_type type, float loudness) {
    tiny_model_params p = tiny_model_default_params();
    p.arch = arch;
    p.type = type;
    p.loudness = loudness;
    p.n_embd = p.n_ff = ggml_blck_size(type) > 32 ? 256 : 64;
    p.head_dim = p.n_embd / p.n_heads;
    return p;
}

static void test_ordinary(void **state) {
    (void)state;
    const tiny_model_params p = params_of("llama", GGML_TYPE_F32, 1.0f);
    check_lengths(&p, true, 1);
}

static const char *const archs[] = {"glm4", "chatglm", "qwen2"};

/* Just beyond halves, so that the other tokens still count beside the loud ones. */
static void test_loud_halves(void **state) {
    (void)state;
    for (size_t a = 0; a < 3; a++) {
        const tiny_model_params p = params_of(archs[a], GGML_TYPE_F16, 250.0f);
        check_lengths(&p, true, 1);
    }
}

/* Far beyond, where scales of bytes overflow as well. */
static void test_loud_types(void **state) {
    (void)state;
    static const enum ggml_type types[] = {GGML_TYPE_F16,  GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0,
                                           GGML_TYPE_Q4_1, GGML_TYPE_Q5_1, GGML_TYPE_Q4_K, GGML_TYPE_Q6_K};
    for (size_t a = 0; a < 3; a++) {
        for (size_t t = 0; t < sizeof types / sizeof types[0]; t++) {
            const tiny_model_params p = params_of(archs[a], types[t], 3000.0f);
            check_lengths(&p, false, 43);
            check_lengths(&p, true, 43);
        }
    }
}

/* Beyond floats nothing helps: generation ends with a sentence, with eviction too, and nothing aborts. */
static void test_too_loud(void **state) {
    (void)state;
    /* ggml's products with quantized weights may make numbers of what is none */
    static const enum ggml_type types[] = {GGML_TYPE_F32, GGML_TYPE_BF16};
    for (size_t t = 0; t < sizeof types / sizeof types[0]; t++) {
        const tiny_model_params p = params_of("qwen2", types[t], 1e30f);
        dt_model *model = open_model(write_tiny(&p), false);
        dt_eviction *eviction = eviction_from_json(
            model, "{\"0-\": {\"policy\": \"importance_score\", \"max_cache_size\": 32, \"min_cache_size\": 8}}");
        for (int on = 0; on < 2; on++) {
            const dt_session_params sp = {.n_threads = 1, .eviction = on ? eviction : NULL};
            dt_session *session = open_session(model, &sp);
            int32_t tokens[60];
            random_tokens(tokens, 60, 3, 320, 3);
            sync_tokens(session, tokens, 60);
            assert_false(all_finite(dt_session_logits(session), 320));
            const dt_sampler_params params = dt_sampler_default_params();
            dt_sampler *sampler = NULL;
            dt_error error = {0};
            assert_int_equal(dt_sampler_new(model, &params, &sampler, &error), DT_OK);
            assert_int_equal(dt_generate(session, sampler, 5, NULL, NULL, NULL, &error), DT_ERR_COMPUTE);
            assert_non_null(strstr(error.message, "not a number"));
            dt_sampler_free(sampler);
            dt_session_free(session);
        }
        dt_eviction_free(eviction);
        dt_model_close(model);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_too_loud),
        cmocka_unit_test(test_ordinary),
        cmocka_unit_test(test_loud_halves),
        cmocka_unit_test(test_loud_types),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
