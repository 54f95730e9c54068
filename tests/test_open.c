/*
 * Opening models through the public interface: what is refused, with which sentence, and padding rows.
 */
#include "attn/attn.h"
#include "support/cmocka_all.h"
#include "support/compare.h"
#include "support/fixture.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void assert_refused(const char *path, dt_status want, const char *part) {
    dt_model *model = NULL;
    dt_error error = {0};
    assert_int_equal(dt_model_open(path, NULL, &model, &error), want);
    if (!strstr(error.message, part)) {
        fail_msg("'%s' does not contain '%s'", error.message, part);
    }
    assert_null(model);
}

static void test_missing_and_foreign_files(void **state) {
    (void)state;
    assert_refused("/nowhere/model.gguf", DT_ERR_IO, "/nowhere/model.gguf");
    assert_refused("/tmp", DT_ERR_IO, "/tmp");
}

/* Rows of padding load and are never sampled; missing rows are an error with both numbers (cases.md row 28). */
static void test_padding_and_missing_rows(void **state) {
    (void)state;
    tiny_model_params p = tiny_model_default_params();
    p.padding_rows = 64;
    dt_model *model = open_model(write_tiny(&p), false);
    const dt_model_info *info = dt_model_get_info(model);
    assert_int_equal(info->n_vocab, p.n_vocab + 64);
    dt_sampler_params sp = dt_sampler_default_params();
    sp.temp = 0.0f;
    dt_sampler *sampler = NULL;
    dt_error error = {0};
    assert_int_equal(dt_sampler_new(model, &sp, &sampler, &error), DT_OK);
    float *logits = calloc((size_t)info->n_vocab, sizeof *logits);
    logits[info->n_vocab - 1] = 9.0f;
    logits[17] = 1.0f;
    int32_t token;
    float probability;
    assert_int_equal(dt_sampler_sample(sampler, logits, &token, &probability, &error), DT_OK);
    assert_int_equal(token, 17);
    free(logits);
    dt_sampler_free(sampler);
    dt_model_close(model);

    p.padding_rows = -2;
    char number[32];
    snprintf(number, sizeof number, "%d rows", p.n_vocab - 2);
    assert_refused(write_tiny(&p), DT_ERR_FORMAT, number);
    snprintf(number, sizeof number, "%d tokens", p.n_vocab);
    assert_refused(write_tiny(&p), DT_ERR_FORMAT, number);
}

static void test_model_without_tokenizer(void **state) {
    (void)state;
    tiny_model_params p = tiny_model_default_params();
    p.vocabulary = TINY_VOCABULARY_NONE;
    dt_model *model = open_model(write_tiny(&p), false);
    assert_false(dt_model_get_info(model)->has_tokenizer);
    int32_t *tokens;
    size_t n;
    dt_error error = {0};
    assert_int_equal(dt_tokenize(model, "a", 1, true, false, &tokens, &n, &error), DT_ERR_TOKENIZER);
    assert_non_null(strstr(error.message, "no tokenizer"));
    assert_int_equal(dt_token_start(model), -1);
    const dt_session_params sp = {.n_threads = 1};
    dt_session *session = open_session(model, &sp);
    const int32_t given[] = {1, 2, 3};
    sync_tokens(session, given, 3);
    assert_true(all_finite(dt_session_logits(session), (size_t)dt_model_get_info(model)->n_vocab));
    dt_session_free(session);
    dt_model_close(model);
}

/* Prompts of every length take every way through the kernels: finite, and as the reference says (cases.md row 17; activations
 * beyond F16 are test_attn's). */
static void test_every_prompt_length(void **state) {
    (void)state;
    tiny_model_params p = tiny_model_default_params();
    dt_model *model = open_model(write_tiny(&p), true);
    const size_t n_vocab = (size_t)dt_model_get_info(model)->n_vocab;
    int32_t tokens[130];
    random_tokens(tokens, 130, 3, (int32_t)n_vocab, 3);
    for (size_t n = 1; n <= 130; n++) {
        float *want = NULL;
        const char *kernels[] = {"reference",       "avx2",       "avx512", "amx_bf16",
                                 "reference_int16", "avx512_vnni"}; /* each after its own */
        for (size_t k = 0; k < sizeof kernels / sizeof kernels[0]; k++) {
            dt_error error;
            if (dt_attn_kernel_find(kernels[k], &error) == NULL) {
                continue;
            }
            const dt_session_params sp = {.n_threads = 2, .n_batch = 512, .kernel = kernels[k]};
            dt_session *session = open_session(model, &sp);
            sync_tokens(session, tokens, n);
            const float *got = dt_session_logits(session);
            assert_true(all_finite(got, n_vocab));
            if (strncmp(kernels[k], "reference", 9) == 0) {
                free(want);
                want = malloc(n_vocab * sizeof *want);
                memcpy(want, got, n_vocab * sizeof *want);
            } else {
                /* no reference rounds as tiles in pairs of BF16 do */
                assert_true(logit_error(got, want, n_vocab) <= (strcmp(kernels[k], "amx_bf16") == 0 ? 5e-3 : 1e-3));
            }
            dt_session_free(session);
        }
        free(want);
    }
    dt_model_close(model);
}

/* Keys and values of unequal length, which libllama's llama graph can't do: the fast kernels against the reference, F16 and INT8
 * (cases.md row 6). */
static void test_keys_unlike_values(void **state) {
    (void)state;
    static const int32_t dims[][2] = {{80, 48}, {40, 100}, {16, 64}};
    enum { N = 70 };
    for (size_t i = 0; i < sizeof dims / sizeof dims[0]; i++) {
        tiny_model_params p = tiny_model_default_params();
        p.head_dim = dims[i][0];
        p.head_dim_v = dims[i][1];
        dt_model *model = open_model(write_tiny(&p), true);
        const size_t n_vocab = (size_t)dt_model_get_info(model)->n_vocab;
        assert_int_equal(dt_model_get_info(model)->head_dim_v, p.head_dim_v);
        int32_t tokens[N];
        random_tokens(tokens, N, 3, (int32_t)n_vocab, 5);
        for (int type = 0; type < 2; type++) {
            dt_session_params sp = {.n_threads = 2, .n_batch = 32, .kv_type = type ? DT_KV_INT8 : DT_KV_F16, .kernel = "auto"};
            dt_session *fast = open_session(model, &sp);
            dt_session_stats stats;
            dt_session_get_stats(fast, &stats); /* the reference that rounds as the fast one does */
            const double tolerance = strcmp(stats.kernel, "amx_bf16") == 0 ? 5e-3 : 1e-3; /* no reference rounds as it does */
            sp.kernel = strcmp(stats.kernel, "avx512_vnni") == 0 ? "reference_int16" : "reference";
            dt_session *reference = open_session(model, &sp);
            sync_tokens(reference, tokens, N - 1); /* in chunks, and one token more */
            sync_tokens(fast, tokens, N - 1);
            append_token(reference, tokens[N - 1]);
            append_token(fast, tokens[N - 1]);
            assert_true(logit_error(dt_session_logits(fast), dt_session_logits(reference), n_vocab) <= tolerance);
            dt_session_free(reference);
            dt_session_free(fast);
        }
        dt_model_close(model);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_missing_and_foreign_files), cmocka_unit_test(test_padding_and_missing_rows),
        cmocka_unit_test(test_model_without_tokenizer),   cmocka_unit_test(test_every_prompt_length),
        cmocka_unit_test(test_keys_unlike_values),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
