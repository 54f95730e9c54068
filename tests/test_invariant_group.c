/*
 * Many sessions in one batch: each gives what it gives alone. Tokens are those of the session alone, so that one that rounds
 * differently does not change the text; in the batch-invariant build logits and what is kept are the same to the bit.
 */
#include "engine/session.h"
#include "support/cmocka_all.h"
#include "support/compare.h"
#include "support/fixture.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define TOLERANCE 4e-3 /* as in test_invariant_engine.c */
#define N_CTX 512
#define BATCH 32
#define MOST_STEPS 64

#ifdef DT_BATCH_INVARIANT
#define SAME_BITS true
#else
#define SAME_BITS false
#endif

typedef struct fixture {
    dt_model *model;
    size_t n_vocab;
    int32_t tokens[N_CTX];
    dt_eviction *scored, *window;
} fixture;

static int setup(void **state) {
    fixture *f = calloc(1, sizeof *f);
    const tiny_model_params p = three_layers(N_CTX);
    f->model = open_model(write_tiny(&p), true);
    f->n_vocab = (size_t)dt_model_get_info(f->model)->n_vocab;
    f->scored = eviction_from_json(f->model, "{\"0-\": {\"policy\": \"importance_score\", \"max_cache_size\": 48, "
                                             "\"min_cache_size\": 8, \"recent_window\": 8}}");
    f->window = eviction_from_json(f->model, "{\"0-\": {\"policy\": \"local_window\", \"max_cache_size\": 32, "
                                             "\"min_cache_size\": 8, \"recent_window\": 8}}");
    random_tokens(f->tokens, N_CTX, 3, (int32_t)f->n_vocab, 5);
    *state = f;
    return 0;
}

static int teardown(void **state) {
    fixture *f = *state;
    dt_eviction_free(f->scored);
    dt_eviction_free(f->window);
    dt_model_close(f->model);
    free(f);
    return 0;
}

static dt_group *new_group(const fixture *f, int32_t n_threads, const char *kernel, uint64_t kv_memory) {
    const dt_group_params params = {.n_threads = n_threads, .kernel = kernel, .kv_memory = kv_memory};
    dt_group *group = NULL;
    dt_error error = {0};
    if (dt_group_new(f->model, &params, &group, &error) != DT_OK) {
        fail_msg("%s", error.message);
    }
    return group;
}

static dt_session_params params_of(dt_group *group) {
    return (dt_session_params){.n_threads = 1, .n_batch = BATCH, .kv_block_tokens = 16, .group = group};
}

static void assert_same(const float *a, const float *b, size_t n, bool bits) {
    assert_non_null(a);
    assert_true(all_finite(a, n) && all_finite(b, n));
    if (bits) {
        assert_memory_equal(a, b, n * sizeof *a);
    } else {
        assert_true(logit_error(a, b, n) <= TOLERANCE);
    }
}

/* ---- a session alone, and the same one in a group ---- */

typedef struct role {
    dt_session_params params;
    int32_t joins_at; /* step */
    const int32_t *prompt;
    int32_t n_prompt, n_decode;
    /* from the run alone */
    int32_t decoded[MOST_STEPS];
    float *logits; /* [1 + n_decode][V] */
    dt_session *alone, *together;
    int32_t n_done; /* tokens given to the one in the group */
} role;

static void run_alone(const fixture *f, role *r) {
    dt_session_params params = r->params;
    params.group = NULL;
    r->alone = open_session(f->model, &params);
    r->logits = malloc((size_t)(1 + r->n_decode) * f->n_vocab * sizeof *r->logits);
    sync_tokens(r->alone, r->prompt, (size_t)r->n_prompt);
    for (int32_t i = 0; i <= r->n_decode; i++) {
        const float *logits = dt_session_logits(r->alone);
        memcpy(r->logits + (size_t)i * f->n_vocab, logits, f->n_vocab * sizeof *logits);
        if (i < r->n_decode) {
            r->decoded[i] = argmax(logits, f->n_vocab);
            append_token(r->alone, r->decoded[i]);
        }
    }
}

static bool is_done(const role *r) { return r->n_done == r->n_prompt + r->n_decode; }

static dt_step next_step(const role *r) {
    if (r->n_done < r->n_prompt) {
        const int32_t n = DT_MIN(BATCH, r->n_prompt - r->n_done);
        return (dt_step){.session = r->together, .tokens = r->prompt + r->n_done, .n = n, .n_follow = r->n_prompt - r->n_done - n};
    }
    return (dt_step){.session = r->together, .tokens = r->decoded + (r->n_done - r->n_prompt), .n = 1};
}

static void check_step(const fixture *f, role *r, const dt_step *step) {
    dt_error error = {0};
    assert_int_equal(dt_session_check(r->together, &error), DT_OK);
    r->n_done += step->n;
    size_t n;
    dt_session_tokens(r->together, &n);
    assert_int_equal(n, r->n_done);
    if (r->n_done >= r->n_prompt) {
        assert_same(dt_session_logits(r->together), r->logits + (size_t)(r->n_done - r->n_prompt) * f->n_vocab, f->n_vocab,
                    SAME_BITS);
    }
}

/* Sessions join at their step and leave when they are done. */
static void run_together(const fixture *f, dt_group *group, role *roles, int32_t n_roles) {
    int32_t n_left = n_roles;
    for (int32_t at = 0; n_left > 0; at++) {
        dt_step steps[8];
        role *of[8];
        int32_t n = 0;
        for (int32_t i = 0; i < n_roles; i++) {
            role *r = &roles[i];
            if (at == r->joins_at) {
                r->params.group = group;
                r->together = open_session(f->model, &r->params);
            }
            if (at >= r->joins_at && !is_done(r)) {
                of[n] = r;
                steps[n++] = next_step(r);
            }
        }
        dt_error error = {0};
        if (dt_group_step(group, steps, (size_t)n, &error) != DT_OK) {
            fail_msg("step %d: %s", at, error.message);
        }
        for (int32_t i = 0; i < n; i++) {
            assert_int_equal(steps[i].error.code, DT_OK);
            check_step(f, of[i], &steps[i]);
        }
        for (int32_t i = 0; i < n; i++) { /* what others did has not touched the logits */
            if (is_done(of[i])) {
                check_step(f, of[i], &(dt_step){.n = 0});
                if (SAME_BITS) {
                    assert_same_kept(of[i]->alone, of[i]->together);
                }
                dt_session_stats a, b;
                dt_session_get_stats(of[i]->alone, &a);
                dt_session_get_stats(of[i]->together, &b);
                assert_int_equal(a.evicted_tokens, b.evicted_tokens);
                assert_int_equal(a.eviction_rounds, b.eviction_rounds);
                assert_int_equal(a.kv_bytes, b.kv_bytes);
                assert_int_equal(a.prefill_tokens, b.prefill_tokens);
                assert_int_equal(a.decode_tokens, b.decode_tokens);
                dt_session_free(of[i]->together);
                dt_session_free(of[i]->alone);
                free(of[i]->logits);
                n_left--;
            }
        }
    }
}

static void test_each_is_as_alone(void **state) {
    const fixture *f = *state;
    const char *const kernels[] = {NULL, "reference"};
    for (int k = 0; k < 2; k++) {
        dt_group *group = new_group(f, 2 - k, kernels[k], 0);
        role roles[] = {
            {.n_prompt = 3, .n_decode = 40},
            {.n_prompt = 97, .n_decode = 60, .params.eviction = f->scored, .params.prefill = DT_PREFILL_STREAMING},
            {.n_prompt = 130, .n_decode = 30, .params.eviction = f->scored, .joins_at = 3},
            {.n_prompt = 64, .n_decode = 50, .params.eviction = f->window, .joins_at = 5},
            {.n_prompt = 33, .n_decode = 20, .params.kv_type = DT_KV_INT8, .joins_at = 9},
            {.n_prompt = 50, .n_decode = 9, .params.eviction = f->scored, .params.evict = DT_EVICT_ONCE, .joins_at = 30},
        };
        const int32_t n_roles = sizeof roles / sizeof roles[0];
        for (int32_t i = 0; i < n_roles; i++) {
            dt_session_params params = params_of(NULL);
            params.eviction = roles[i].params.eviction;
            params.prefill = roles[i].params.prefill;
            params.kv_type = roles[i].params.kv_type;
            params.evict = roles[i].params.evict;
            params.kernel = kernels[k];
            roles[i].params = params;
            roles[i].prompt = f->tokens + 7 * i;
            run_alone(f, &roles[i]);
        }
        run_together(f, group, roles, n_roles);
        dt_group_stats stats;
        dt_group_get_stats(group, &stats);
        assert_int_equal(stats.n_sessions, 0);
        assert_int_equal(stats.kv_bytes, 0);
        assert_true(stats.kv_bytes_peak > 0);
        dt_group_free(group);
    }
}

/* ---- failures ---- */

static dt_step decode(dt_session *s, const int32_t *token) { return (dt_step){.session = s, .tokens = token, .n = 1}; }

static void test_failures_stay_apart(void **state) {
    const fixture *f = *state;
    dt_group *group = new_group(f, 1, NULL, 0), *other_group = new_group(f, 1, NULL, 0);
    const dt_session_params in = params_of(group), elsewhere = params_of(other_group), alone = params_of(NULL);
    dt_session_params tight = in;
    tight.n_ctx = 33;
    dt_session *s[3], *full = open_session(f->model, &tight), *foreign = open_session(f->model, &elsewhere);
    for (int32_t i = 0; i < 3; i++) {
        s[i] = open_session(f->model, &in);
        sync_tokens(s[i], f->tokens + i, 32); /* the next token needs a new block */
    }
    sync_tokens(full, f->tokens, 33);
    const int32_t outside = (int32_t)f->n_vocab, token = f->tokens[40];
    dt_step steps[] = {decode(s[0], &token),    decode(s[1], &token), decode(s[2], &outside), decode(full, &token),
                       decode(foreign, &token), decode(s[0], &token), decode(NULL, &token)};
    const dt_status expected[] = {DT_OK,           DT_ERR_MEMORY,   DT_ERR_ARGUMENT, DT_ERR_LIMIT,
                                  DT_ERR_ARGUMENT, DT_ERR_ARGUMENT, DT_ERR_ARGUMENT};
    atomic_store(&s[1]->kv_memory->memory.fail_after, 0);
    dt_error error = {0};
    assert_int_equal(dt_group_step(group, steps, sizeof steps / sizeof steps[0], &error), DT_ERR_MEMORY);
    assert_true(error.message[0] != 0);
    atomic_store(&s[1]->kv_memory->memory.fail_after, -1);
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
        assert_int_equal(steps[i].error.code, expected[i]);
    }
    /* then all three go on, and hold what they hold alone */
    dt_step again[] = {decode(s[1], &token), decode(s[2], &token)};
    assert_int_equal(dt_group_step(group, again, 2, &error), DT_OK);
    for (int32_t i = 0; i < 3; i++) {
        dt_session *same = open_session(f->model, &alone);
        sync_tokens(same, f->tokens + i, 32);
        append_token(same, token);
        assert_same(dt_session_logits(s[i]), dt_session_logits(same), f->n_vocab, SAME_BITS);
        assert_int_equal(dt_session_check(s[i], &error), DT_OK);
        dt_session_free(same);
    }
    const tiny_model_params p = tiny_model_default_params();
    dt_model *other_model = open_model(write_tiny(&p), true);
    dt_session *wrong = NULL;
    assert_int_equal(dt_session_new(other_model, &in, &wrong, &error), DT_ERR_ARGUMENT);
    dt_model_close(other_model);
    dt_session_free(foreign);
    dt_session_free(full);
    for (int32_t i = 0; i < 3; i++) {
        dt_session_free(s[i]);
    }
    dt_group_free(other_group);
    dt_group_free(group);
}

/* The next prompt is read as its own length wants it, whatever the one before was: here chunk by chunk, for it is longer than the
 * context. */
static void test_a_prompt_given_up(void **state) {
    const fixture *f = *state;
    dt_group *group = new_group(f, 1, NULL, 0);
    dt_error error = {0};
    for (int reused = 0; reused < 2; reused++) {
        dt_session_params in = params_of(group), alone = params_of(NULL);
        in.n_ctx = alone.n_ctx = 96;
        in.n_batch = alone.n_batch = 16;
        in.eviction = alone.eviction = f->window;
        dt_session *s = open_session(f->model, &in), *same = open_session(f->model, &alone);
        dt_step step = {.session = s, .tokens = f->tokens, .n = 16, .n_follow = 10};
        assert_int_equal(dt_group_step(group, &step, 1, &error), DT_OK);
        dt_sync_result result;
        if (reused) {
            assert_int_equal(dt_session_reuse(s, f->tokens, 200, &result, &error), DT_OK);
        }
        for (int32_t at = 16; at < 200;) {
            const int32_t n = DT_MIN(16, 200 - at);
            step = (dt_step){.session = s, .tokens = f->tokens + at, .n = n, .n_follow = 200 - at - n};
            if (dt_group_step(group, &step, 1, &error) != DT_OK) {
                fail_msg("%s", error.message);
            }
            at += n;
        }
        sync_tokens(same, f->tokens, 16);
        sync_tokens(same, f->tokens, 200);
        assert_same(dt_session_logits(s), dt_session_logits(same), f->n_vocab, SAME_BITS);
        assert_same_kept(s, same);
        dt_session_free(s);
        dt_session_free(same);
    }
    dt_group_free(group);
}

/* ---- memory ---- */

static uint64_t bytes_of(const dt_group *group) {
    dt_group_stats stats;
    dt_group_get_stats(group, &stats);
    return stats.kv_bytes;
}

/* A prefix read once, saved, loaded, and continued by many. */
static void test_forks_share_a_prefix(void **state) {
    const fixture *f = *state;
    enum { N_FORKS = 5, N_PREFIX = 150 };
    char path[64];
    snprintf(path, sizeof path, "/tmp/dt-test-group-%d.bin", (int)getpid());
    dt_group *group = new_group(f, 1, NULL, 0);
    const dt_session_params in = params_of(group), alone = params_of(NULL);
    dt_error error = {0};
    dt_session *writer = open_session(f->model, &alone);
    sync_tokens(writer, f->tokens, N_PREFIX);
    assert_int_equal(dt_session_save(writer, NULL, path, &error), DT_OK);
    dt_session_free(writer);
    dt_session *prefix = open_session(f->model, &in), *forks[N_FORKS];
    assert_int_equal(dt_session_load(prefix, NULL, path, &error), DT_OK);
    unlink(path);

    const uint64_t one = bytes_of(group);
    for (int32_t i = 0; i < N_FORKS; i++) {
        assert_int_equal(dt_session_fork(prefix, i == 0 ? f->window : NULL, DT_EVICT_ALWAYS, &forks[i], &error), DT_OK);
        assert_same(dt_session_logits(forks[i]), dt_session_logits(prefix), f->n_vocab, true);
    }
    assert_true(bytes_of(group) < 2 * one);
    for (int32_t at = 0; at < 20; at++) {
        dt_step steps[N_FORKS];
        for (int32_t i = 0; i < N_FORKS; i++) {
            steps[i] = decode(forks[i], &f->tokens[200 + 20 * i + at]);
        }
        assert_int_equal(dt_group_step(group, steps, N_FORKS, &error), DT_OK);
        if (at == 0) {
            dt_session_free(prefix);
            assert_true(bytes_of(group) < 3 * one);
        }
    }
    for (int32_t i = 0; i < N_FORKS; i++) {
        int32_t text[N_PREFIX + 20];
        memcpy(text, f->tokens, N_PREFIX * sizeof *text);
        memcpy(text + N_PREFIX, f->tokens + 200 + 20 * i, 20 * sizeof *text);
        dt_session *same = open_session(f->model, &alone), *evicted = NULL;
        sync_tokens(same, text, N_PREFIX);
        assert_int_equal(dt_session_fork(same, i == 0 ? f->window : NULL, DT_EVICT_ALWAYS, &evicted, &error), DT_OK);
        for (int32_t at = 0; at < 20; at++) {
            append_token(evicted, text[N_PREFIX + at]);
        }
        assert_same(dt_session_logits(forks[i]), dt_session_logits(evicted), f->n_vocab, SAME_BITS);
        assert_int_equal(dt_session_check(forks[i], &error), DT_OK);
        dt_session_free(evicted);
        dt_session_free(same);
    }
    for (int32_t i = 0; i < N_FORKS; i++) {
        dt_session_free(forks[i]);
    }
    assert_int_equal(bytes_of(group), 0);
    dt_group_free(group);
}

/* All sessions together stay below the group's limit; who meets it stops, and goes on when another has left. */
static void test_limit_of_a_group(void **state) {
    const fixture *f = *state;
    const dt_session_params alone = params_of(NULL);
    dt_session *one = open_session(f->model, &alone);
    sync_tokens(one, f->tokens, 100);
    dt_session_stats stats;
    dt_session_get_stats(one, &stats);
    dt_session_free(one);
    const uint64_t limit = 5 * stats.kv_bytes / 2;
    dt_group *group = new_group(f, 1, NULL, limit);
    const dt_session_params in = params_of(group);
    dt_session *s[3];
    dt_step steps[3];
    dt_error error = {0};
    for (int32_t i = 0; i < 3; i++) {
        s[i] = open_session(f->model, &in);
    }
    int32_t stopped = -1;
    for (int32_t at = 0; at < 100 && stopped < 0; at += 20) {
        for (int32_t i = 0; i < 3; i++) {
            steps[i] = (dt_step){.session = s[i], .tokens = f->tokens + at, .n = 20, .n_follow = 80 - at};
        }
        if (dt_group_step(group, steps, 3, &error) != DT_OK) {
            for (int32_t i = 0; i < 3; i++) {
                stopped = steps[i].error.code == DT_ERR_MEMORY ? i : stopped;
            }
        }
        dt_group_stats all;
        dt_group_get_stats(group, &all);
        assert_true(all.kv_bytes_peak <= limit);
    }
    assert_int_equal(stopped, 2);
    dt_session_free(s[0]);
    sync_tokens(s[2], f->tokens, 100);
    sync_tokens(s[1], f->tokens, 100);
    assert_same(dt_session_logits(s[2]), dt_session_logits(s[1]), f->n_vocab, SAME_BITS);
    dt_session_free(s[1]);
    dt_session_free(s[2]);
    dt_group_free(group);
}

/* Steady decoding allocates nothing but cache blocks; who joins or leaves costs no more than once per size of the batch. */
static void test_decoding_allocates_nothing(void **state) {
    const fixture *f = *state;
    dt_group *group = new_group(f, 1, NULL, 0);
    const dt_session_params in = params_of(group);
    dt_session *s[4];
    dt_error error = {0};
    for (int32_t i = 0; i < 4; i++) {
        s[i] = open_session(f->model, &in);
        sync_tokens(s[i], f->tokens, 33 + (size_t)i);
    }
    for (int32_t at = 0; at < 10; at++) {
        dt_step steps[4];
        const int32_t n = at < 5 ? 4 : 3;
        for (int32_t i = 0; i < n; i++) {
            steps[i] = decode(s[i], &f->tokens[at]);
        }
        if (at == 1) {
            atomic_store(&group->memory.fail_after, 0);
            for (int32_t i = 0; i < 4; i++) {
                atomic_store(&s[i]->kv_memory->memory.fail_after, 0);
                atomic_store(&s[i]->work_memory.fail_after, 0);
            }
        }
        if (dt_group_step(group, steps, (size_t)n, &error) != DT_OK) {
            fail_msg("step %d: %s", at, error.message);
        }
    }
    for (int32_t i = 0; i < 4; i++) {
        dt_session_free(s[i]);
    }
    dt_group_free(group);
}

static void test_bound_holds(void **state) {
    const fixture *f = *state;
    dt_group *group = new_group(f, 1, NULL, 0);
    for (int variant = 0; variant < 4; variant++) {
        dt_session_params params = params_of(group);
        params.eviction = variant == 1 ? f->scored : variant == 2 ? f->window : NULL;
        params.prefill = variant == 0 ? DT_PREFILL_FULL : DT_PREFILL_STREAMING;
        params.kv_type = variant == 3 ? DT_KV_INT8 : DT_KV_F16;
        dt_session *s = open_session(f->model, &params);
        const uint64_t few = dt_session_kv_bound(s, 100, 0), many = dt_session_kv_bound(s, 300, 0);
        assert_true(few <= many && (params.eviction || 2 * few < many));
        dt_session_stats stats;
        sync_tokens(s, f->tokens, 100);
        dt_session_get_stats(s, &stats);
        assert_true(stats.kv_bytes_peak <= few);
        sync_tokens(s, f->tokens, 280);
        for (int32_t i = 280; i < 300; i++) {
            append_token(s, f->tokens[i]);
        }
        dt_session_get_stats(s, &stats);
        assert_true(stats.kv_bytes_peak <= many);
        assert_int_equal(dt_session_kv_bound(s, 300, 0), many);
        dt_session_free(s);
    }
    dt_group_free(group);
}

/* Past the context lanes hold no more than that, and with a short prompt before a long reply no more than budgets let them. */
static void test_bound_of_long_replies_holds(void **state) {
    const fixture *f = *state;
    dt_group *group = new_group(f, 1, NULL, 0);
    for (int variant = 0; variant < 4; variant++) {
        dt_session_params params = params_of(group);
        params.eviction = variant % 2 == 0 ? f->scored : f->window;
        params.prefill = variant < 2 ? DT_PREFILL_FULL : DT_PREFILL_STREAMING;
        params.n_ctx = 256;
        dt_session *s = open_session(f->model, &params);
        const uint64_t reply = dt_session_kv_bound(s, 1 << 20, 20), all = dt_session_kv_bound(s, 1 << 20, 0);
        assert_int_equal(all, dt_session_kv_bound(s, 256, 0));
        assert_true(params.prefill == DT_PREFILL_FULL ? 2 * reply < 3 * all : reply == all);
        dt_session_stats stats;
        sync_tokens(s, f->tokens, 20);
        for (int32_t i = 20; i < 400; i++) {
            append_token(s, f->tokens[i % 300]);
        }
        dt_session_get_stats(s, &stats);
        assert_true(stats.kv_bytes_peak <= reply);
        dt_session_free(s);
    }
    dt_group_free(group);
}

/* ---- one session of a group used by itself ---- */

typedef struct scored {
    const fixture *f;
    float *logits;
} scored;

static bool keep_logits(size_t i, const float *logits, void *user) {
    const scored *s = user;
    memcpy(s->logits + i * s->f->n_vocab, logits, s->f->n_vocab * sizeof *logits);
    return true;
}

static void test_other_calls_in_a_group(void **state) {
    const fixture *f = *state;
    dt_group *group = new_group(f, 1, NULL, 0);
    const dt_session_params in = params_of(group), alone = params_of(NULL);
    dt_session *a = open_session(f->model, &in), *b = open_session(f->model, &in), *c = open_session(f->model, &alone);
    dt_error error = {0};
    scored got = {f, malloc(80 * f->n_vocab * sizeof(float))}, expected = {f, malloc(80 * f->n_vocab * sizeof(float))};
    assert_int_equal(dt_session_score(a, f->tokens, 80, keep_logits, &got, &error), DT_OK);
    assert_int_equal(dt_session_score(c, f->tokens, 80, keep_logits, &expected, &error), DT_OK);
    assert_same(got.logits, expected.logits, 80 * f->n_vocab, SAME_BITS);
    sync_tokens(b, f->tokens + 9, 40);
    assert_same(dt_session_logits(a), expected.logits + 79 * f->n_vocab, f->n_vocab, SAME_BITS);
    free(got.logits);
    free(expected.logits);

    /* a conversation that changes: what is left is reused, the rest given in steps */
    int32_t text[90];
    memcpy(text, f->tokens, sizeof text);
    text[70] = text[70] == 5 ? 6 : 5;
    dt_sync_result result;
    assert_int_equal(dt_session_reuse(a, text, 90, &result, &error), DT_OK);
    assert_int_equal(result.how, DT_SYNC_REWOUND);
    assert_int_equal(result.reused_tokens, 70);
    dt_step steps[] = {{.session = a, .tokens = text + 70, .n = 20}, decode(b, &f->tokens[3])};
    assert_int_equal(dt_group_step(group, steps, 2, &error), DT_OK);
    sync_tokens(c, text, 90);
    assert_same(dt_session_logits(a), dt_session_logits(c), f->n_vocab, SAME_BITS);
    assert_int_equal(dt_session_reuse(a, text, 90, &result, &error), DT_OK);
    assert_int_equal(result.how, DT_SYNC_NOTHING);
    assert_int_equal(result.reused_tokens, 90);
    dt_session_free(a);
    dt_session_free(b);
    dt_session_free(c);
    dt_group_free(group);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_each_is_as_alone),
        cmocka_unit_test(test_failures_stay_apart),
        cmocka_unit_test(test_a_prompt_given_up),
        cmocka_unit_test(test_forks_share_a_prefix),
        cmocka_unit_test(test_limit_of_a_group),
        cmocka_unit_test(test_decoding_allocates_nothing),
        cmocka_unit_test(test_bound_holds),
        cmocka_unit_test(test_bound_of_long_replies_holds),
        cmocka_unit_test(test_other_calls_in_a_group),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
