/*
 * --kv-memory: whatever the limit, the cache's allocator never holds more, what was foretold is true, and a limit that is too small
 * is refused with one that works (invariant 9). And torture: each allocation fails in turn, and the session stays usable.
 */
#include "engine/draft.h"
#include "engine/session.h"
#include "support/cmocka_all.h"
#include "support/compare.h"
#include "support/fixture.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define N_CTX 1024
#define CONFIG                                                                                                                     \
    "{\"0-1\": {\"policy\": \"importance_score\", \"max_cache_size\": 128, \"min_cache_size\": 32, \"recent_window\": 16},"        \
    " \"2\": {\"policy\": \"local_window\", \"max_cache_size\": 200, \"min_cache_size\": 48, \"recent_window\": 16,"               \
    " \"memory_slots\": 12}}"

#define RECONSTRUCT                                                                                                                \
    "{\"0-\": {\"policy\": \"importance_score\", \"score\": \"reconstruct\", \"max_cache_size\": 128, \"min_cache_size\": 32,"     \
    " \"recent_window\": 16}}"
#define SHARED                                                                                                                     \
    "{\"budget\": \"adaptive\", \"total_cache_size\": 300, \"layers\": {\"0-\": {\"policy\": \"importance_score\","                \
    " \"max_cache_size\": 200, \"min_cache_size\": 32, \"recent_window\": 16, \"memory_slots\": 20}}}"

typedef struct fixture {
    dt_model *model;
    dt_eviction *eviction, *reconstruct, *shared;
    int32_t tokens[N_CTX];
} fixture;

static char seen[4096]; /* log lines */

static void keep_log(dt_log_level level, const char *line, void *user) {
    (void)user;
    if (level <= DT_LOG_INFO && strlen(seen) + strlen(line) + 2 < sizeof seen) {
        strcat(strcat(seen, line), "\n");
    }
}

static int setup(void **state) {
    fixture *f = calloc(1, sizeof *f);
    tiny_model_params p = tiny_model_default_params();
    p.n_layers = 3;
    p.n_ctx = N_CTX;
    f->model = open_model(write_tiny(&p), true);
    f->eviction = eviction_from_json(f->model, CONFIG);
    f->reconstruct = eviction_from_json(f->model, RECONSTRUCT);
    f->shared = eviction_from_json(f->model, SHARED);
    random_tokens(f->tokens, N_CTX, 3, dt_model_get_info(f->model)->n_vocab, 5);
    *state = f;
    return 0;
}

static int teardown(void **state) {
    fixture *f = *state;
    dt_eviction_free(f->eviction);
    dt_eviction_free(f->reconstruct);
    dt_eviction_free(f->shared);
    dt_model_close(f->model);
    free(f);
    return 0;
}

static dt_session_params params_of(const fixture *f, bool evict) {
    return (dt_session_params){.n_threads = 1, .n_batch = 128, .kv_block_tokens = 16, .eviction = evict ? f->eviction : NULL};
}

/* Reads, rewinds, reads on and decodes to the end of the context; returns the peak. */
static uint64_t use_all(const fixture *f, dt_session *s, size_t n) {
    sync_tokens(s, f->tokens, n / 3);
    sync_tokens(s, f->tokens, n / 4);
    int32_t other = f->tokens[0] == 9 ? 10 : 9;
    sync_tokens(s, &other, 1); /* rebuilt */
    sync_tokens(s, f->tokens, n - 40);
    for (size_t i = n - 40; i < n; i++) {
        append_token(s, f->tokens[i]);
    }
    dt_session_stats stats;
    dt_session_get_stats(s, &stats);
    return stats.kv_bytes_peak;
}

static double foretold_mib(void) {
    const char *at = strstr(seen, "at most ");
    assert_non_null(at);
    return strtod(at + strlen("at most "), NULL);
}

static void test_any_limit_is_held(void **state) {
    const fixture *f = *state;
    dt_log_set(keep_log, NULL);
    const dt_eviction *evictions[] = {NULL, f->eviction, f->reconstruct, f->shared};
    for (size_t e = 0; e < sizeof evictions / sizeof evictions[0]; e++) {
        bool refused = false, kept = false, int8 = false;
        for (uint64_t limit = 1 << 20; limit > 4096; limit -= limit / 7) {
            dt_session_params params = params_of(f, false);
            params.eviction = evictions[e];
            params.kv_memory = limit;
            dt_session *s = NULL;
            dt_error error = {0};
            seen[0] = 0;
            const dt_status status = dt_session_new(f->model, &params, &s, &error);
            if (status != DT_OK) {
                assert_int_equal(status, DT_ERR_LIMIT);
                refused = true;
                const char *at = strstr(error.message, "--kv-memory ");
                assert_non_null(at);
                params.kv_memory = strtoull(at + strlen("--kv-memory "), NULL, 10) * 1024; /* what it says works */
                assert_true(params.kv_memory > limit);
                s = open_session(f->model, &params);
                params.kv_memory -= 2048; /* and is the smallest, to the rounding */
                dt_session *none = NULL;
                assert_int_equal(dt_session_new(f->model, &params, &none, &error), DT_ERR_LIMIT);
                params.kv_memory += 2048;
            }
            const uint64_t peak = use_all(f, s, N_CTX);
            assert_true(peak <= params.kv_memory);
            assert_true((double)peak / 1048576.0 <= foretold_mib() + 0.1);
            kept = kept || strstr(seen, "instead of") == NULL;
            int8 = int8 || strstr(seen, "int8 instead of f16") != NULL;
            dt_session_free(s);
        }
        assert_true(refused && kept && int8);
    }
    dt_log_set(NULL, NULL);
}

/* The documented order: each step is taken only when the one before is not enough. */
static void test_order(void **state) {
    const fixture *f = *state;
    static const char *const steps[] = {"prefill streaming", "in chunks of", "int8 instead", "max_cache_size"};
    int reached = 0;
    dt_log_set(keep_log, NULL);
    for (uint64_t limit = 1 << 20; limit > 4096; limit -= limit / 40) {
        dt_session_params params = params_of(f, true);
        params.kv_memory = limit;
        dt_session *s = NULL;
        seen[0] = 0;
        if (dt_session_new(f->model, &params, &s, NULL) != DT_OK) {
            break;
        }
        dt_session_free(s);
        int step = 0;
        while (step < 4 && strstr(seen, steps[step]) == NULL) {
            step++;
        }
        for (int i = 0; i < 4; i++) {
            if (strstr(seen, steps[i]) != NULL) {
                reached = i + 1 > reached ? i + 1 : reached;
            }
        }
        if (reached == 4) { /* the least is asked of everything before budgets give way */
            assert_true(strstr(seen, steps[0]) && strstr(seen, steps[1]) && strstr(seen, steps[2]));
        } else if (reached == 2) {
            assert_non_null(strstr(seen, steps[0]));
        }
    }
    dt_log_set(NULL, NULL);
    assert_int_equal(reached, 4);
}

/* A short conversation needs no concessions, though a long one would. */
static void test_expected_length(void **state) {
    const fixture *f = *state;
    dt_session_params params = params_of(f, false);
    params.kv_memory = 200000;
    params.n_expected = 150;
    dt_log_set(keep_log, NULL);
    seen[0] = 0;
    dt_session *s = open_session(f->model, &params);
    assert_null(strstr(seen, "instead of"));
    dt_log_set(NULL, NULL);
    assert_true(use_all(f, s, 150) <= 200000);
    /* beyond what was expected the promise holds, and the error says why */
    dt_error error = {0};
    assert_int_equal(dt_session_sync(s, f->tokens, N_CTX, NULL, NULL, NULL, &error), DT_ERR_MEMORY);
    assert_non_null(strstr(error.message, "--kv-memory"));
    dt_session_stats stats;
    dt_session_get_stats(s, &stats);
    assert_true(stats.kv_bytes_peak <= 200000);
    sync_tokens(s, f->tokens, 100); /* still usable */
    dt_session_free(s);
}

/* ---- torture ---- */

static char path[64];

static dt_status grow(dt_session *s, const fixture *f, dt_error *error) {
    return dt_session_sync(s, f->tokens, 300, NULL, NULL, NULL, error);
}

static dt_status rebuild(dt_session *s, const fixture *f, dt_error *error) {
    return dt_session_sync(s, f->tokens + 7, 100, NULL, NULL, NULL, error);
}

static dt_status decode(dt_session *s, const fixture *f, dt_error *error) {
    dt_status status = DT_OK;
    for (int32_t i = 120; i < 220 && status == DT_OK; i++) {
        status = dt_session_append(s, f->tokens[i], error);
    }
    return status;
}

static dt_status decode_drafted(dt_session *s, const fixture *f, dt_error *error) {
    dt_draft *draft = NULL;
    dt_sampler *sampler = NULL;
    dt_sampler_params sampling = dt_sampler_default_params();
    sampling.temp = 0;
    sampling.ignore_end = true;
    sampling.grammar = "root ::= (\"abc\")+"; /* something to guess */
    assert_int_equal(dt_draft_from_lookup(8, &draft, error), DT_OK);
    assert_int_equal(dt_sampler_new(f->model, &sampling, &sampler, error), DT_OK);
    const dt_status status = dt_generate_drafted(s, sampler, draft, 100, NULL, NULL, NULL, error);
    dt_sampler_free(sampler);
    dt_draft_free(draft);
    return status;
}

static dt_status load(dt_session *s, const fixture *f, dt_error *error) {
    (void)f;
    return dt_session_load(s, NULL, path, error);
}

static dt_status fork_and_grow(dt_session *s, const fixture *f, dt_error *error) {
    dt_session *fork = NULL;
    dt_status status = dt_session_fork(s, NULL, DT_EVICT_ALWAYS, &fork, error);
    if (status == DT_OK) {
        status = dt_session_sync(fork, f->tokens, 140, NULL, NULL, NULL, error);
        dt_error broken = {0};
        assert_int_equal(dt_session_check(fork, &broken), DT_OK);
    }
    dt_session_free(fork);
    return status;
}

static void test_each_allocation_fails_in_turn(void **state) {
    const fixture *f = *state;
    dt_status (*const jobs[])(dt_session *, const fixture *, dt_error *) = {grow,           rebuild, decode,
                                                                            decode_drafted, load,    fork_and_grow};
    snprintf(path, sizeof path, "/tmp/dt-torture-%d.bin", (int)getpid());
    for (size_t job = 0; job < sizeof jobs / sizeof jobs[0]; job++) {
        for (int which = 0; which < 3; which++) { /* the cache's memory, the session's, the graph's */
            long long n = 0;
            dt_status status = DT_ERR_MEMORY;
            for (; status != DT_OK; n += n < 30 ? 1 : 5) {
                const dt_session_params params = params_of(f, true);
                dt_session *s = open_session(f->model, &params);
                sync_tokens(s, f->tokens, 120);
                dt_error error = {0};
                if (job == 4 && n == 0) {
                    assert_int_equal(dt_session_save(s, NULL, path, &error), DT_OK);
                }
                dt_memory *memory = which == 0 ? &s->kv_memory->memory : which == 1 ? &s->work_memory : &s->group->memory;
                atomic_store(&memory->fail_after, n);
                status = jobs[job](s, f, &error);
                atomic_store(&memory->fail_after, -1);
                if (status != DT_OK && status != DT_ERR_MEMORY) {
                    fail_msg("job %zu, allocation %lld: %s", job, n, error.message);
                }
                assert_int_equal(dt_session_check(s, &error), DT_OK);
                /* what it says it holds is what it holds: it goes on from there */
                size_t n_tokens;
                const int32_t *tokens = dt_session_tokens(s, &n_tokens);
                int32_t copy[N_CTX];
                assert_true(n_tokens < N_CTX);
                memcpy(copy, tokens, n_tokens * sizeof *copy);
                copy[n_tokens] = 5;
                const dt_sync_result r = sync_tokens(s, copy, n_tokens + 1);
                assert_int_equal(r.reused_tokens, n_tokens);
                dt_session_free(s);
            }
            print_message("job %zu, memory %d: %lld allocations\n", job, which, n);
        }
    }
    unlink(path);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_any_limit_is_held),
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_expected_length),
        cmocka_unit_test(test_each_allocation_fails_in_turn),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
