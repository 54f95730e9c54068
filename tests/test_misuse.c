/*
 * What a program that uses the library may get wrong: calls from within its own functions, settings that no enum names, a text that
 * was never given, NULL. Each is an error with a sentence, and the session is what it was.
 */
#include "engine/session.h"
#include "support/cmocka_all.h"
#include "support/compare.h"
#include "support/fixture.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define N_CTX 512

typedef engine_fixture fixture;

static int setup(void **state) {
    const tiny_model_params p = three_layers(N_CTX);
    *state = open_engine_fixture(&p, N_CTX, 7);
    return 0;
}

static dt_session_params params_of(dt_group *group) {
    return (dt_session_params){.n_threads = 1, .n_batch = 16, .kv_block_tokens = 16, .group = group};
}

/* ---- from a token, progress or logits function ---- */

typedef struct caller {
    const fixture *f;
    dt_session *session, *sibling; /* of one group */
    dt_sampler *sampler;
    char path[64];
    int32_t n_calls;
} caller;

/* Everything that would change, copy or save a session of the group. */
static void try_all(caller *c) {
    dt_session *const targets[] = {c->session, c->sibling};
    dt_error error = {0};
    c->n_calls++;
    for (int i = 0; i < 2; i++) {
        dt_session *s = targets[i], *fork = NULL;
        size_t n, n_after;
        dt_session_tokens(s, &n);
        dt_sync_result result;
        dt_step step = {.session = s, .tokens = c->f->tokens, .n = 1};
        assert_int_equal(dt_session_sync(s, c->f->tokens, 9, NULL, NULL, NULL, &error), DT_ERR_ARGUMENT);
        assert_non_null(strstr(error.message, "at work"));
        assert_int_equal(dt_session_reuse(s, c->f->tokens, 9, &result, &error), DT_ERR_ARGUMENT);
        assert_int_equal(dt_session_append(s, 5, &error), DT_ERR_ARGUMENT);
        assert_int_equal(dt_session_score(s, c->f->tokens, 3, NULL, NULL, &error), DT_ERR_ARGUMENT);
        assert_int_equal(dt_session_fork(s, NULL, DT_EVICT_ALWAYS, &fork, &error), DT_ERR_ARGUMENT);
        assert_int_equal(dt_session_save(s, NULL, c->path, &error), DT_ERR_ARGUMENT);
        assert_int_equal(dt_session_load(s, NULL, c->path, &error), DT_ERR_ARGUMENT);
        assert_non_null(strstr(error.message, "at work"));
        assert_int_equal(dt_generate(s, c->sampler, 2, NULL, NULL, NULL, &error), DT_ERR_ARGUMENT);
        assert_int_equal(dt_group_step(s->group, &step, 1, &error), DT_ERR_ARGUMENT);
        dt_session_tokens(s, &n_after);
        assert_int_equal(n, n_after);
        assert_int_equal(dt_session_check(s, &error), DT_OK);
    }
}

/* Another thread is in no function of the caller's, and the sibling in no step. */
static void *save_sibling(void *user) {
    const caller *c = user;
    dt_error error = {0};
    return dt_session_save(c->sibling, NULL, c->path, &error) == DT_OK ? user : NULL;
}

static bool on_token(int32_t token, void *user) {
    (void)token;
    try_all(user);
    return true;
}

static bool on_progress(int64_t done, int64_t total, void *user) {
    (void)done;
    (void)total;
    try_all(user);
    return true;
}

static bool on_logits(size_t i, const float *logits, void *user) {
    caller *c = user;
    pthread_t saver;
    try_all(c);
    if (i == 0) {
        assert_int_equal(pthread_create(&saver, NULL, save_sibling, c), 0);
        void *saved = NULL;
        assert_int_equal(pthread_join(saver, &saved), 0);
        assert_non_null(saved);
    }
    return all_finite(logits, c->f->n_vocab);
}

static void test_calls_from_the_callers_functions(void **state) {
    const fixture *f = *state;
    caller c = {.f = f};
    dt_error error = {0};
    dt_group *group = NULL;
    const dt_group_params threads = {.n_threads = 1};
    assert_int_equal(dt_group_new(f->model, &threads, &group, &error), DT_OK);
    const dt_session_params in = params_of(group), alone = params_of(NULL);
    c.session = open_session(f->model, &in);
    c.sibling = open_session(f->model, &in);
    dt_session *plain = open_session(f->model, &alone);
    snprintf(c.path, sizeof c.path, "/tmp/dt-test-misuse-%d.bin", (int)getpid());
    sync_tokens(c.sibling, f->tokens + 50, 20);
    assert_int_equal(dt_session_save(c.sibling, NULL, c.path, &error), DT_OK);
    dt_sampler_params greedy = dt_sampler_default_params();
    greedy.temp = 0;
    dt_draft *draft = NULL;
    assert_int_equal(dt_draft_from_model(f->model, f->model, &alone, 4, &draft, &error), DT_OK);

    dt_sampler *other = NULL;
    assert_int_equal(dt_sampler_new(f->model, &greedy, &c.sampler, &error), DT_OK);
    assert_int_equal(dt_sampler_new(f->model, &greedy, &other, &error), DT_OK);
    assert_int_equal(dt_session_sync(c.session, f->tokens, 40, on_progress, &c, NULL, &error), DT_OK);
    assert_int_equal(dt_session_score(c.session, f->tokens + 40, 20, on_logits, &c, &error), DT_OK);
    assert_int_equal(dt_generate_drafted(c.session, c.sampler, draft, 20, on_token, &c, NULL, &error), DT_OK);
    assert_int_equal(dt_generate_drafted(c.session, c.sampler, NULL, 20, on_token, &c, NULL, &error), DT_OK);
    assert_true(c.n_calls > 50);

    size_t n;
    sync_tokens(plain, f->tokens, 60);
    assert_int_equal(dt_generate(plain, other, 20, NULL, NULL, NULL, &error), DT_OK);
    assert_int_equal(dt_generate(plain, other, 20, NULL, NULL, NULL, &error), DT_OK);
    const int32_t *want = dt_session_tokens(plain, &n);
    assert_memory_equal(dt_session_tokens(c.session, &n), want, n * sizeof *want);
    append_token(c.session, 5); /* and afterwards all of it goes again */
    assert_int_equal(dt_session_load(c.session, NULL, c.path, &error), DT_OK);
    unlink(c.path);
    dt_sampler_free(c.sampler);
    dt_sampler_free(other);
    dt_draft_free(draft);
    dt_session_free(plain);
    dt_session_free(c.session);
    dt_session_free(c.sibling);
    dt_group_free(group);
}

/* ---- values ---- */

static void test_values_of_no_enum(void **state) {
    const fixture *f = *state;
    dt_error error = {0};
    for (int i = 0; i < 6; i++) {
        dt_session_params params = params_of(NULL);
        const int value = i % 2 == 0 ? 7 : -1;
        memcpy(i / 2 == 0   ? (void *)&params.kv_type
               : i / 2 == 1 ? (void *)&params.prefill
                            : (void *)&params.evict,
               &value, sizeof value);
        dt_session *s = NULL;
        assert_int_equal(dt_session_new(f->model, &params, &s, &error), DT_ERR_ARGUMENT);
        assert_null(s);
    }
}

static void test_large_values(void **state) {
    const fixture *f = *state;
    dt_error error = {0};
    for (int i = 0; i < 5; i++) {
        dt_session_params params = params_of(NULL);
        dt_session *s = NULL;
        *(i == 0   ? &params.n_ctx
          : i == 1 ? &params.n_batch
          : i == 2 ? &params.n_expected
          : i == 3 ? &params.n_snapshots
                   : &params.kv_block_tokens) = INT32_MAX - 15;
        const dt_status status = dt_session_new(f->model, &params, &s, &error);
        assert_int_equal(status, i == 4 ? DT_ERR_ARGUMENT : DT_OK);
        if (status == DT_OK) {
            sync_tokens(s, f->tokens, 40);
            assert_int_equal(dt_session_check(s, &error), DT_OK);
            dt_session_free(s);
        }
    }
}

static void test_negative_values(void **state) {
    const fixture *f = *state;
    dt_error error = {0};
    for (int i = 0; i < 6; i++) {
        dt_session_params params = params_of(NULL);
        dt_session *s = NULL;
        *(i == 0   ? &params.n_ctx
          : i == 1 ? &params.n_batch
          : i == 2 ? &params.n_threads
          : i == 3 ? &params.n_threads_batch
          : i == 4 ? &params.kv_block_tokens
                   : &params.n_expected) = -16;
        assert_int_equal(dt_session_new(f->model, &params, &s, &error), DT_ERR_ARGUMENT);
        assert_non_null(strstr(error.message, "negative"));
        assert_null(s);
    }
    for (int i = 0; i < 2; i++) {
        dt_session_params params = params_of(NULL);
        dt_session *s = NULL;
        *(i == 0 ? &params.n_threads : &params.n_threads_batch) = DT_MAX_THREADS + 1;
        assert_int_equal(dt_session_new(f->model, &params, &s, &error), DT_ERR_ARGUMENT);
        assert_non_null(strstr(error.message, "513 threads are more than the 512"));
        assert_null(s);
    }
    const dt_model_params models[] = {{.n_device_layers = -1}, {.rpc_timeout_s = -1}};
    const tiny_model_params p = three_layers(N_CTX);
    const char *path = write_tiny(&p);
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++) {
        dt_model *model = NULL;
        assert_int_equal(dt_model_open(path, &models[i], &model, &error), DT_ERR_ARGUMENT);
        assert_non_null(strstr(error.message, "negative"));
        assert_null(model);
    }
}

/* ---- NULL ---- */

/* The error names the function and what it needs. */
#define LACKING(function, name, ...)                                                                                               \
    do {                                                                                                                           \
        error.message[0] = 0;                                                                                                      \
        assert_int_equal(function(__VA_ARGS__, &error), DT_ERR_ARGUMENT);                                                          \
        assert_string_equal(error.message, #function " needs " name ", which is NULL");                                            \
    } while (0)

static void test_null_for_a_model(void **state) {
    const fixture *f = *state;
    const dt_model *m = f->model;
    const char *path = "/tmp/x";
    dt_error error = {0};
    dt_model *model = NULL;
    char *text = NULL;
    int32_t *tokens = NULL;
    size_t n = 0;
    LACKING(dt_model_open, "path", NULL, NULL, &model);
    LACKING(dt_model_open, "out", path, NULL, NULL);
    LACKING(dt_devices_describe, "out", NULL);
    LACKING(dt_check_same_vocabulary, "path", NULL, path);
    LACKING(dt_check_same_vocabulary, "draft_path", path, NULL);
    LACKING(dt_tokenize, "model", NULL, "x", 1, true, true, &tokens, &n);
    LACKING(dt_tokenize, "text", m, NULL, 1, true, true, &tokens, &n);
    LACKING(dt_tokenize, "out_tokens", m, "x", 1, true, true, NULL, &n);
    LACKING(dt_tokenize, "out_n", m, "x", 1, true, true, &tokens, NULL);
    assert_int_equal(dt_tokenize(m, NULL, 0, false, true, &tokens, &n, &error), DT_OK); /* an empty text */
    dt_free(tokens);
    const dt_chat_message whole = {.role = "user", .content = "x"}, parts[] = {{.role = "user"}, {.content = "x"}};
    LACKING(dt_chat_render, "model", NULL, "chatml", &whole, 1, true, &text);
    LACKING(dt_chat_render, "messages", m, "chatml", NULL, 1, true, &text);
    LACKING(dt_chat_render, "out", m, "chatml", &whole, 1, true, NULL);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(dt_chat_render(m, "chatml", &parts[i], 1, true, &text, &error), DT_ERR_ARGUMENT);
        assert_non_null(strstr(error.message, i == 0 ? "has no content" : "has no role"));
    }
    assert_int_equal(dt_quantize(NULL, &error), DT_ERR_ARGUMENT);
    assert_null(dt_model_get_info(NULL));
    assert_null(dt_eviction_learned_path(NULL));
    assert_int_equal(dt_token_bytes(NULL, 5, true, NULL, 0), 0);
    assert_int_equal(dt_token_start(NULL), -1);
    assert_false(dt_token_is_end(NULL, 2));
}

static void test_null_for_settings(void **state) {
    const fixture *f = *state;
    const dt_model *m = f->model;
    dt_error error = {0};
    dt_eviction *e = NULL, *out = NULL;
    char *text = NULL;
    const dt_eviction *none[] = {NULL};
    LACKING(dt_eviction_from_preset, "model", NULL, "chat", &out);
    LACKING(dt_eviction_from_preset, "preset", m, NULL, &out);
    LACKING(dt_eviction_from_preset, "out", m, "chat", NULL);
    LACKING(dt_eviction_from_file, "path", m, NULL, &out);
    LACKING(dt_eviction_from_file, "model", NULL, "x", &out);
    LACKING(dt_eviction_from_text, "model", NULL, "e", "{}", 2, &out);
    LACKING(dt_eviction_from_text, "name", m, NULL, "{}", 2, &out);
    LACKING(dt_eviction_from_text, "text", m, "e", NULL, 2, &out);
    assert_int_equal(dt_eviction_from_preset(m, "chat", &e, &error), DT_OK);
    LACKING(dt_eviction_override, "eviction", NULL, 64, 16);
    LACKING(dt_eviction_set_memory_slots, "eviction", NULL, 0);
    LACKING(dt_eviction_observe, "settings", NULL, 1, &out);
    LACKING(dt_eviction_observe, "out", (const dt_eviction *const *)&e, 1, NULL);
    assert_int_equal(dt_eviction_observe(none, 1, &out, &error), DT_ERR_ARGUMENT);
    LACKING(dt_eviction_describe, "eviction", NULL, &text);
    LACKING(dt_eviction_describe, "out", e, NULL);
    assert_string_equal(dt_eviction_name(NULL), "");
    dt_eviction_free(e);

    dt_sampler *sampler = NULL;
    const dt_sampler_params plain = dt_sampler_default_params();
    int32_t token;
    const float logit = 0;
    LACKING(dt_sampler_new, "model", NULL, &plain, &sampler);
    LACKING(dt_sampler_new, "params", m, NULL, &sampler);
    LACKING(dt_sampler_new, "out", m, &plain, NULL);
    LACKING(dt_sampler_sample, "sampler", NULL, &logit, &token, NULL);
    LACKING(dt_sampler_accept, "sampler", NULL, 5, true);
    assert_int_equal(dt_sampler_seed(NULL), 0);
    dt_draft *draft = NULL;
    LACKING(dt_draft_from_lookup, "out", 4, NULL);
    LACKING(dt_draft_from_model, "target", NULL, m, NULL, 4, &draft);
    LACKING(dt_draft_from_model, "model", m, NULL, NULL, 4, &draft);
    dt_calibration *c = NULL;
    LACKING(dt_calibration_new, "model", NULL, &c);
    LACKING(dt_calibration_add, "calibration", NULL, NULL);
    LACKING(dt_calibration_config, "calibration", NULL, 64, &text);
}

static void test_null_for_a_session(void **state) {
    const fixture *f = *state;
    const dt_session_params params = params_of(NULL);
    dt_error error = {0};
    dt_session *s = open_session(f->model, &params), *other = NULL;
    dt_sync_result result;
    int32_t *positions = NULL;
    float *masses = NULL;
    size_t n = 1;
    LACKING(dt_session_new, "model", NULL, &params, &other);
    LACKING(dt_session_new, "out", f->model, &params, NULL);
    LACKING(dt_session_fork, "from", NULL, NULL, DT_EVICT_ALWAYS, &other);
    LACKING(dt_session_fork, "out", s, NULL, DT_EVICT_ALWAYS, NULL);
    assert_int_equal(dt_session_sync(NULL, f->tokens, 4, NULL, NULL, NULL, &error), DT_ERR_ARGUMENT);
    assert_int_equal(dt_session_sync(s, NULL, 4, NULL, NULL, NULL, &error), DT_ERR_ARGUMENT);
    LACKING(dt_session_reuse, "session", NULL, f->tokens, 4, &result);
    LACKING(dt_session_reuse, "tokens", s, NULL, 4, &result);
    LACKING(dt_session_reuse, "result", s, f->tokens, 4, NULL);
    LACKING(dt_session_append, "session", NULL, 5);
    LACKING(dt_session_score, "session", NULL, f->tokens, 4, on_logits, NULL);
    LACKING(dt_session_score, "tokens", s, NULL, 4, on_logits, NULL);
    assert_int_equal(dt_session_score(s, f->tokens, 4, NULL, NULL, &error), DT_ERR_ARGUMENT);
    assert_non_null(strstr(error.message, "needs fn"));
    LACKING(dt_session_fill_random, "session", NULL, 4);
    LACKING(dt_session_kept_positions, "session", NULL, 0, 0, &positions, &n);
    LACKING(dt_session_kept_positions, "out", s, 0, 0, NULL, &n);
    LACKING(dt_session_kept_mass, "out_n", s, 0, 0, &masses, NULL);
    LACKING(dt_session_check, "session", NULL);
    LACKING(dt_session_save, "session", NULL, NULL, "/tmp/x");
    LACKING(dt_session_save, "path", s, NULL, NULL);
    LACKING(dt_session_load, "session", NULL, NULL, "/tmp/x");
    LACKING(dt_session_load, "path", s, NULL, NULL);
    LACKING(dt_session_check_save, "path", NULL, NULL, 4);
    LACKING(dt_session_set_note, "session", NULL, "x", 1);
    LACKING(dt_session_set_note, "bytes", s, NULL, 1);
    assert_int_equal(dt_generate(NULL, NULL, 4, NULL, NULL, NULL, &error), DT_ERR_ARGUMENT);
    LACKING(dt_generate_drafted, "sampler", s, NULL, NULL, 4, NULL, NULL, NULL);
    dt_layer_stats layer;
    dt_session_stats stats;
    dt_group_stats of_group;
    assert_int_equal(dt_session_get_layer_stats(NULL, 0, &layer), DT_ERR_ARGUMENT);
    assert_int_equal(dt_session_get_layer_stats(s, 0, NULL), DT_ERR_ARGUMENT);
    dt_session_get_stats(NULL, &stats);
    dt_group_get_stats(NULL, &of_group);
    assert_int_equal(stats.n_tokens + of_group.n_sessions, 0);
    assert_null(dt_session_logits(NULL));
    assert_null(dt_session_tokens(NULL, &n));
    assert_null(dt_session_note(NULL, &n));
    assert_int_equal(n, 0);
    assert_int_equal(dt_session_kv_bound(NULL, 4, 0), 0);
    assert_int_equal(dt_session_file_tokens(NULL), 0);

    dt_group *group = NULL;
    LACKING(dt_group_new, "model", NULL, NULL, &group);
    LACKING(dt_group_new, "out", f->model, NULL, NULL);
    LACKING(dt_group_step, "group", NULL, NULL, 0);
    LACKING(dt_group_step, "steps", s->group, NULL, 1);
    dt_step step = {.session = s, .n = 1};
    assert_int_equal(dt_group_step(s->group, &step, 1, &error), DT_ERR_ARGUMENT);
    assert_non_null(strstr(error.message, "tokens"));
    assert_int_equal(dt_session_append(NULL, 5, NULL), DT_ERR_ARGUMENT); /* nor need there be an error */
    dt_session_free(s);
}

static void test_nothing_to_draw_from(void **state) {
    const fixture *f = *state;
    dt_error error = {0};
    const dt_session_params params = params_of(NULL);
    dt_session *s = open_session(f->model, &params);
    const dt_sampler_params plain = dt_sampler_default_params();
    dt_sampler *sampler = NULL;
    int32_t token;
    assert_int_equal(dt_sampler_new(f->model, &plain, &sampler, &error), DT_OK);
    assert_null(dt_session_logits(s));
    assert_int_equal(dt_sampler_sample(sampler, dt_session_logits(s), &token, NULL, &error), DT_ERR_ARGUMENT);
    assert_int_equal(dt_generate(s, sampler, 3, NULL, NULL, NULL, &error), DT_ERR_ARGUMENT);
    dt_sampler_free(sampler);
    dt_session_free(s);
}

/* It would read logits that this model doesn't have. */
static void test_sampler_of_another_model(void **state) {
    const fixture *f = *state;
    tiny_model_params larger = three_layers(N_CTX);
    larger.n_vocab = 2 * (int32_t)f->n_vocab;
    engine_fixture *other = open_engine_fixture(&larger, N_CTX, 7);
    dt_error error = {0};
    const dt_session_params params = params_of(NULL);
    const dt_sampler_params plain = dt_sampler_default_params();
    dt_session *s = open_session(f->model, &params);
    dt_sampler *sampler = NULL;
    const int32_t token = 1;
    assert_int_equal(dt_sampler_new(other->model, &plain, &sampler, &error), DT_OK);
    assert_int_equal(dt_session_sync(s, &token, 1, NULL, NULL, NULL, &error), DT_OK);
    assert_int_equal(dt_generate(s, sampler, 3, NULL, NULL, NULL, &error), DT_ERR_ARGUMENT);
    assert_non_null(strstr(error.message, "another model"));
    dt_sampler_free(sampler);
    dt_session_free(s);
    void *ended = other;
    close_engine_fixture(&ended);
}

/* Settings of a model with fewer layers, or other heads, for a session of this one. */
static void test_settings_of_another_model(void **state) {
    const fixture *f = *state;
    tiny_model_params others[] = {three_layers(N_CTX), three_layers(N_CTX)};
    others[0].n_layers = 1;
    others[1].n_heads = 8;
    others[1].n_kv_heads = 4;
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        engine_fixture *other = open_engine_fixture(&others[i], N_CTX, 7);
        static const char text[] = "{\"0-\": {\"policy\": \"local_window\", \"min_cache_size\": 16, \"lanes\": [64, 64, 64, 64]}}";
        dt_eviction *eviction = NULL;
        dt_session *session = NULL, *base = NULL;
        dt_error error = {0};
        const dt_status made = i == 0 ? dt_eviction_from_preset(other->model, "chat", &eviction, &error)
                                      : dt_eviction_from_text(other->model, "e.json", text, strlen(text), &eviction, &error);
        assert_string_equal(error.message, "");
        assert_int_equal(made, DT_OK);
        dt_session_params params = params_of(NULL);
        assert_int_equal(dt_session_new(f->model, &params, &base, &error), DT_OK);
        params.eviction = eviction;
        assert_int_equal(dt_session_new(f->model, &params, &session, &error), DT_ERR_ARGUMENT);
        assert_non_null(strstr(error.message, "another model"));
        assert_int_equal(dt_session_fork(base, eviction, DT_EVICT_ALWAYS, &session, &error), DT_ERR_ARGUMENT);
        assert_non_null(strstr(error.message, "another model"));
        dt_session_free(base);
        dt_eviction_free(eviction);
        void *ended = other;
        close_engine_fixture(&ended);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_calls_from_the_callers_functions),
        cmocka_unit_test(test_values_of_no_enum),
        cmocka_unit_test(test_large_values),
        cmocka_unit_test(test_sampler_of_another_model),
        cmocka_unit_test(test_settings_of_another_model),
        cmocka_unit_test(test_nothing_to_draw_from),
        cmocka_unit_test(test_negative_values),
        cmocka_unit_test(test_null_for_a_model),
        cmocka_unit_test(test_null_for_settings),
        cmocka_unit_test(test_null_for_a_session),
    };
    return cmocka_run_group_tests(tests, setup, close_engine_fixture);
}
