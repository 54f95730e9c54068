/*
 * Opening models through the public interface: what is refused, with which sentence, and padding rows.
 */
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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_missing_and_foreign_files),
        cmocka_unit_test(test_padding_and_missing_rows),
        cmocka_unit_test(test_model_without_tokenizer),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
