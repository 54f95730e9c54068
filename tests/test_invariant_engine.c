/*
 * The invariants of the engine on tiny random models (F32 weights in the file's layout). In a build with
 * DT_BATCH_INVARIANT (GGML_LLAMAFILE off) ggml's products round alike for every batch size, and "same" means
 * identical bits; else it means within TOLERANCE of the logits' standard deviation.
 */
#include "engine/engine.h"
#include "support/cmocka_all.h"
#include "support/compare.h"
#include "support/fixture.h"

#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define TOLERANCE 4e-3 /* attention in 16-bit integers: about 2e-3 between few rows and many */
#define N_CTX 512

#ifdef DT_BATCH_INVARIANT
#define SAME_BITS true
#else
#define SAME_BITS false
#endif

#define EVICT_ALL_32                                                                                                               \
    "{\"0-\": {\"policy\": \"importance_score\", \"max_cache_size\": 32, \"min_cache_size\": 8, \"recent_window\": 8}}"
#define WINDOW_32 "{\"0-\": {\"policy\": \"local_window\", \"max_cache_size\": 32, \"min_cache_size\": 8, \"recent_window\": 8}}"

typedef engine_fixture fixture;

static int setup(void **state) {
    const tiny_model_params p = three_layers(N_CTX);
    *state = open_engine_fixture(&p, N_CTX, 5);
    return 0;
}

static dt_session_params small_params(void) { return (dt_session_params){.n_threads = 2, .n_batch = 32, .kv_block_tokens = 16}; }

/* Logits after `n` tokens given at once. */
static float *logits_after(const fixture *f, const dt_session_params *params, size_t n) {
    dt_session *s = open_session(f->model, params);
    sync_tokens(s, f->tokens, n);
    float *copy = malloc(f->n_vocab * sizeof *copy);
    memcpy(copy, dt_session_logits(s), f->n_vocab * sizeof *copy);
    dt_session_free(s);
    return copy;
}

static void assert_same(const float *a, const float *b, size_t n, bool bits) {
    assert_true(all_finite(a, n));
    if (bits) {
        assert_memory_equal(a, b, n * sizeof *a);
    } else {
        assert_true(logit_error(a, b, n) <= TOLERANCE);
    }
}

/* Invariant 1. */
static void test_budget_not_reached_is_off(void **state) {
    const fixture *f = *state;
    dt_eviction *eviction = eviction_from_json(
        f->model, "{\"0-\": {\"policy\": \"importance_score\", \"max_cache_size\": 200, \"min_cache_size\": 8}}");
    for (int streaming = 0; streaming < 2; streaming++) {
        dt_session_params off = small_params(), on = small_params();
        on.eviction = eviction;
        on.prefill = streaming ? DT_PREFILL_STREAMING : DT_PREFILL_FULL;
        dt_session *a = open_session(f->model, &off), *b = open_session(f->model, &on);
        int32_t out_a[100], out_b[100];
        sync_tokens(a, f->tokens, 100);
        sync_tokens(b, f->tokens, 100);
        greedy(a, (int32_t)f->n_vocab, out_a, 100);
        greedy(b, (int32_t)f->n_vocab, out_b, 100);
        assert_memory_equal(out_a, out_b, sizeof out_a);
        assert_same(dt_session_logits(a), dt_session_logits(b), f->n_vocab, true);
        dt_session_stats stats;
        dt_session_get_stats(b, &stats);
        assert_int_equal(stats.evicted_tokens, 0);
        dt_session_free(a);
        dt_session_free(b);
    }
    dt_eviction_free(eviction);
}

/* Invariant 4. */
static void test_turn_by_turn_is_at_once(void **state) {
    const fixture *f = *state;
    const dt_session_params params = small_params();
    dt_session *turns = open_session(f->model, &params);
    const size_t ends[] = {1, 20, 21, 90, 137, 200};
    size_t before = 0;
    for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++) {
        const dt_sync_result r = sync_tokens(turns, f->tokens, ends[i]);
        assert_int_equal(r.reused_tokens, before);
        assert_int_equal(r.computed_tokens, ends[i] - before);
        before = ends[i];
    }
    assert_int_equal(sync_tokens(turns, f->tokens, 200).how, DT_SYNC_NOTHING);
    float *once = logits_after(f, &params, 200);
    assert_same(dt_session_logits(turns), once, f->n_vocab, SAME_BITS);
    free(once);
    dt_session_free(turns);
}

/* Invariant 7. */
static void test_threads_and_chunks_do_not_matter(void **state) {
    const fixture *f = *state;
    dt_session_params params = small_params();
    float *want = logits_after(f, &params, 150);
    const int32_t chunks[] = {1, 2, 7, 64, 512};
    for (size_t i = 0; i < sizeof chunks / sizeof chunks[0]; i++) {
        for (int32_t threads = 1; threads <= 3; threads++) {
            params = small_params();
            params.n_batch = chunks[i];
            params.n_threads = threads;
            float *got = logits_after(f, &params, 150);
            assert_same(got, want, f->n_vocab, SAME_BITS);
            free(got);
        }
    }
    free(want);
}

/* Invariant 7 where the processor is wanted by others, so that the number of threads changes from step to step (graph/pace.h). */
static void test_a_busy_processor_does_not_matter(void **state) {
    const fixture *f = *state;
    enum { N_STEPS = 400, N_BUSY = 6 };
    static int32_t out[2][N_STEPS];
    float *logits[2];
    pid_t busy[N_BUSY];
    for (int i = 0; i < 2; i++) {
        dt_session_params params = small_params();
        params.n_threads = i == 0 ? 1 : 3;
        for (int b = 0; i == 1 && b < N_BUSY; b++) {
            busy[b] = fork();
            if (busy[b] == 0) {
                alarm(60); /* whatever becomes of the test */
                for (volatile unsigned n = 0;; n++) {
                }
            }
        }
        dt_session *s = open_session(f->model, &params);
        sync_tokens(s, f->tokens, 32);
        greedy(s, (int32_t)f->n_vocab, out[i], N_STEPS);
        logits[i] = malloc(f->n_vocab * sizeof(float));
        memcpy(logits[i], dt_session_logits(s), f->n_vocab * sizeof(float));
        dt_session_free(s);
    }
    for (int b = 0; b < N_BUSY; b++) {
        if (busy[b] > 0) {
            kill(busy[b], SIGKILL);
            waitpid(busy[b], NULL, 0);
        }
    }
    assert_memory_equal(out[0], out[1], sizeof out[0]);
    assert_same(logits[0], logits[1], f->n_vocab, true);
    free(logits[0]);
    free(logits[1]);
}

static void test_kernels_agree(void **state) {
    const fixture *f = *state;
    dt_session_params params = small_params();
    params.kernel = "reference";
    float *want = logits_after(f, &params, 150);
    int32_t n;
    const dt_attn_kernel *kernels = dt_attn_kernels(&n);
    for (int32_t i = 0; i < n; i++) {
        if (!kernels[i].supported()) {
            print_message("kernel %s: not supported by this machine\n", kernels[i].name);
            continue;
        }
        params.kernel = kernels[i].name;
        float *got = logits_after(f, &params, 150);
        assert_same(got, want, f->n_vocab, false);
        free(got);
    }
    free(want);
}

/* Invariant 3: evicted = full cache with the victims masked, per lane, in the scalar reference. */
static void test_eviction_is_masking(void **state) {
    const fixture *f = *state;
    const char *configs[] = {
        EVICT_ALL_32, WINDOW_32,
        "{\"0\": {\"policy\": \"local_window\", \"max_cache_size\": 24}, \"2\": {\"policy\": \"importance_score\", "
        "\"max_cache_size\": 40, \"min_cache_size\": 30}}"};
    for (size_t c = 0; c < sizeof configs / sizeof configs[0]; c++) {
        dt_eviction *eviction = eviction_from_json(f->model, configs[c]);
        dt_session_params on = small_params(), off = small_params();
        on.eviction = eviction;
        off.kernel = "reference";
        dt_session *evicted = open_session(f->model, &on), *full = open_session(f->model, &off);
        sync_tokens(evicted, f->tokens, 120);
        sync_tokens(full, f->tokens, 120);
        dt_session_stats stats;
        dt_session_get_stats(evicted, &stats);
        assert_true(stats.evicted_tokens > 0);
        hide_evicted(full, evicted);
        append_token(evicted, f->tokens[120]);
        append_token(full, f->tokens[120]);
        assert_same(dt_session_logits(evicted), dt_session_logits(full), f->n_vocab, false);
        dt_session_free(evicted);
        dt_session_free(full);
        dt_eviction_free(eviction);
    }
}

/* Invariant 8: limits hold and pins stay after every step, eviction running all the time. */
static void test_limits_hold_after_every_step(void **state) {
    const fixture *f = *state;
    const char *configs[] = {EVICT_ALL_32, WINDOW_32};
    const dt_model_info *info = dt_model_get_info(f->model);
    for (size_t c = 0; c < 4; c++) {
        dt_eviction *eviction = eviction_from_json(f->model, configs[c % 2]);
        dt_session_params params = small_params();
        params.eviction = eviction;
        params.prefill = c < 2 ? DT_PREFILL_FULL : DT_PREFILL_STREAMING;
        dt_session *s = open_session(f->model, &params);
        sync_tokens(s, f->tokens, 50);
        for (int32_t i = 50; i < 250; i++) {
            append_token(s, f->tokens[i]);
            for (int32_t layer = 0; layer < info->n_layers; layer++) {
                dt_error error = {0};
                int32_t *kept;
                size_t n;
                assert_int_equal(dt_session_kept_positions(s, layer, 0, &kept, &n, &error), DT_OK);
                assert_true(n <= 32 && n >= 8);
                for (int32_t pin = 0; pin < 4; pin++) { /* sinks */
                    assert_int_equal(kept[pin], pin);
                }
                for (int32_t pin = 0; pin < 8; pin++) { /* recent window */
                    assert_int_equal(kept[n - 1 - (size_t)pin], i - pin);
                }
                dt_free(kept);
            }
        }
        dt_session_free(s);
        dt_eviction_free(eviction);
    }
}

/* A system prompt as long as the sinks is whole in every lane after 30 turns (cases.md row 4). */
static void test_sinks_keep_a_system_prompt(void **state) {
    const fixture *f = *state;
    enum { SYSTEM = 60, TURN = 12, TURNS = 30 };
    const char *configs[] = {"{\"0-\": {\"policy\": \"importance_score\", \"max_cache_size\": 100, \"sink_tokens\": 60}}",
                             "{\"0-\": {\"policy\": \"local_window\", \"max_cache_size\": 100, \"sink_tokens\": 60}}"};
    const dt_model_info *info = dt_model_get_info(f->model);
    for (size_t c = 0; c < 4; c++) {
        dt_eviction *eviction = eviction_from_json(f->model, configs[c % 2]);
        dt_session_params params = small_params();
        params.eviction = eviction;
        params.prefill = c < 2 ? DT_PREFILL_FULL : DT_PREFILL_STREAMING;
        dt_session *s = open_session(f->model, &params);
        for (size_t turn = 0; turn <= TURNS; turn++) {
            const dt_sync_result r = sync_tokens(s, f->tokens, SYSTEM + turn * TURN);
            assert_int_equal(r.computed_tokens, turn == 0 ? SYSTEM : TURN);
        }
        for (int32_t layer = 0; layer < info->n_layers; layer++) {
            for (int32_t head = 0; head < info->n_kv_heads[layer]; head++) {
                dt_error error = {0};
                int32_t *kept;
                size_t n;
                assert_int_equal(dt_session_kept_positions(s, layer, head, &kept, &n, &error), DT_OK);
                assert_true(n <= 100);
                for (int32_t i = 0; i < SYSTEM; i++) {
                    assert_int_equal(kept[i], i);
                }
                dt_free(kept);
            }
        }
        dt_session_free(s);
        dt_eviction_free(eviction);
    }
}

typedef struct bound_check {
    dt_session *session;
    int32_t most;
    int64_t done;
} bound_check;

static bool note_longest(int64_t done, int64_t total, void *user) {
    bound_check *b = user;
    (void)total;
    if (done == b->done) { /* in the middle of a slow chunk, whose tokens are in the cache already */
        return true;
    }
    b->done = done;
    dt_layer_stats stats;
    dt_session_get_layer_stats(b->session, 0, &stats);
    b->most = stats.length > b->most ? stats.length : b->most;
    return true;
}

/* Invariant 9: bytes at the peak are those of budget + one chunk, whatever the prompt's length. */
static void test_streaming_prefill_is_bounded(void **state) {
    const fixture *f = *state;
    dt_eviction *eviction = eviction_from_json(f->model, EVICT_ALL_32);
    uint64_t peaks[2];
    for (int i = 0; i < 2; i++) {
        dt_session_params params = small_params();
        params.eviction = eviction;
        params.prefill = DT_PREFILL_STREAMING;
        bound_check check = {.session = open_session(f->model, &params)};
        dt_error error = {0};
        assert_int_equal(dt_session_sync(check.session, f->tokens, i ? 500 : 100, note_longest, &check, NULL, &error), DT_OK);
        assert_true(check.most <= 32);
        dt_session_stats stats;
        dt_session_get_stats(check.session, &stats);
        peaks[i] = stats.kv_bytes_peak;
        assert_true(stats.kv_bytes_full > stats.kv_bytes);
        dt_session_free(check.session);
    }
    assert_true(peaks[1] <= peaks[0]);
    dt_eviction_free(eviction);
}

/* Where every layer evicts, a conversation may be longer than the context; without sinks it equals a session with a longer one, but
 * for the rounding of keys that were moved. */
static void test_eviction_lifts_the_limit(void **state) {
    const fixture *f = *state;
    const char *without_sinks =
        "{\"0-\": {\"policy\": \"local_window\", \"max_cache_size\": 32, \"min_cache_size\": 8, \"sink_tokens\": 0}}";
    for (int sinks = 0; sinks < 2; sinks++) {
        dt_eviction *eviction = eviction_from_json(f->model, sinks ? WINDOW_32 : without_sinks);
        dt_session_params params = small_params();
        params.eviction = eviction;
        params.prefill = DT_PREFILL_STREAMING;
        params.n_ctx = 100;
        dt_session *s = open_session(f->model, &params);
        sync_tokens(s, f->tokens, 400);
        params.n_ctx = N_CTX;
        float *want = logits_after(f, &params, 400);
        assert_true(all_finite(dt_session_logits(s), f->n_vocab));
        assert_true(sinks || logit_error(dt_session_logits(s), want, f->n_vocab) <= 0.01);
        free(want);
        dt_session_free(s);
        dt_eviction_free(eviction);
    }
}

static void test_rewind_and_rebuild(void **state) {
    const fixture *f = *state;
    dt_session_params params = small_params();
    float *want = logits_after(f, &params, 60);
    dt_session *s = open_session(f->model, &params);
    int32_t other[100];
    memcpy(other, f->tokens, sizeof other);
    other[40] = other[40] == 5 ? 6 : 5;
    sync_tokens(s, other, 100);
    dt_sync_result r = sync_tokens(s, f->tokens, 60);
    assert_int_equal(r.how, DT_SYNC_REWOUND);
    assert_int_equal(r.reused_tokens, 40);
    assert_same(dt_session_logits(s), want, f->n_vocab, SAME_BITS);
    /* a shorter prefix of what is there */
    float *shorter = logits_after(f, &params, 33);
    r = sync_tokens(s, f->tokens, 33);
    assert_int_equal(r.reused_tokens, 32);
    assert_same(dt_session_logits(s), shorter, f->n_vocab, SAME_BITS);
    free(shorter);
    dt_session_free(s);

    /* after a round, what lies before it can only be built again */
    dt_eviction *eviction = eviction_from_json(f->model, WINDOW_32);
    params.eviction = eviction;
    s = open_session(f->model, &params);
    sync_tokens(s, f->tokens, 100);
    r = sync_tokens(s, other, 60);
    assert_int_equal(r.how, DT_SYNC_REBUILT);
    assert_int_equal(r.reused_tokens, 0);
    r = sync_tokens(s, other, 70);
    assert_int_equal(r.how, DT_SYNC_EXTENDED);
    dt_session_free(s);
    dt_eviction_free(eviction);
    free(want);
}

static void test_int8_is_close_to_f16(void **state) {
    const fixture *f = *state;
    dt_session_params params = small_params();
    float *want = logits_after(f, &params, 150);
    params.kv_type = DT_KV_INT8;
    float *got = logits_after(f, &params, 150);
    const double error = logit_error(got, want, f->n_vocab);
    print_message("INT8 cache: worst logit error %.4f standard deviations\n", error);
    assert_true(error > 0.0);
    assert_true(error <= 0.25); /* heads of 16 dimensions with peaked attention: far worse than any real model */
    free(want);
    free(got);
}

static bool stop_at_once(int64_t done, int64_t total, void *user) {
    (void)done;
    (void)total;
    (void)user;
    return false;
}

static void test_cancelling_leaves_a_usable_session(void **state) {
    const fixture *f = *state;
    const dt_session_params params = small_params();
    float *want = logits_after(f, &params, 150);
    dt_session *s = open_session(f->model, &params);
    dt_error error = {0};
    assert_int_equal(dt_session_sync(s, f->tokens, 150, stop_at_once, NULL, NULL, &error), DT_ERR_CANCELLED);
    const dt_sync_result r = sync_tokens(s, f->tokens, 150);
    assert_true(r.reused_tokens < 150);
    assert_same(dt_session_logits(s), want, f->n_vocab, SAME_BITS);
    dt_session_free(s);
    free(want);
}

/* Invariant 10, the part that a session's caller can cause. */
static void test_bad_calls_are_errors(void **state) {
    const fixture *f = *state;
    dt_session_params params = small_params();
    params.n_ctx = 40;
    dt_session *s = open_session(f->model, &params);
    dt_error error = {0};
    assert_int_equal(dt_session_sync(s, f->tokens, 41, NULL, NULL, NULL, &error), DT_ERR_LIMIT);
    assert_non_null(strstr(error.message, "41"));
    assert_non_null(strstr(error.message, "40"));
    assert_int_equal(dt_session_sync(s, f->tokens, 0, NULL, NULL, NULL, &error), DT_ERR_ARGUMENT);
    const int32_t bad[] = {3, -1}, high[] = {3, (int32_t)f->n_vocab};
    assert_int_equal(dt_session_sync(s, bad, 2, NULL, NULL, NULL, &error), DT_ERR_ARGUMENT);
    assert_int_equal(dt_session_sync(s, high, 2, NULL, NULL, NULL, &error), DT_ERR_ARGUMENT);
    sync_tokens(s, f->tokens, 40);
    assert_int_equal(dt_session_append(s, 3, &error), DT_ERR_LIMIT);
    assert_int_equal(dt_session_get_layer_stats(s, 99, &(dt_layer_stats){0}), DT_ERR_ARGUMENT);
    dt_session_free(s);
    params.kernel = "quantum";
    assert_int_equal(dt_session_new(f->model, &params, &s, &error), DT_ERR_ARGUMENT);
    assert_non_null(strstr(error.message, "reference"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_budget_not_reached_is_off),
        cmocka_unit_test(test_turn_by_turn_is_at_once),
        cmocka_unit_test(test_threads_and_chunks_do_not_matter),
        cmocka_unit_test(test_a_busy_processor_does_not_matter),
        cmocka_unit_test(test_kernels_agree),
        cmocka_unit_test(test_eviction_is_masking),
        cmocka_unit_test(test_limits_hold_after_every_step),
        cmocka_unit_test(test_sinks_keep_a_system_prompt),
        cmocka_unit_test(test_streaming_prefill_is_bounded),
        cmocka_unit_test(test_eviction_lifts_the_limit),
        cmocka_unit_test(test_rewind_and_rebuild),
        cmocka_unit_test(test_int8_is_close_to_f16),
        cmocka_unit_test(test_cancelling_leaves_a_usable_session),
        cmocka_unit_test(test_bad_calls_are_errors),
    };
    return cmocka_run_group_tests(tests, setup, close_engine_fixture);
}
