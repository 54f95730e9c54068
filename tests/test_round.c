/*
 * kv/round.c: eviction rounds on small caches. Pins stay, lanes end at the low-water mark, a round allocates nothing once sizes
 * have settled, and budgets with hardly any room (cases.md, row 5) still get on.
 */
#include "support/cmocka_all.h"

#include "kv/kv.h"

#include <math.h>
#include <pthread.h>
#include <string.h>

static dt_memory memory;

static void require(dt_status status, const dt_error *error) {
    if (status != DT_OK) {
        fail_msg("%s: %s", dt_status_name(status), error->message);
    }
}

static uint32_t hash(uint32_t a, uint32_t b) {
    uint32_t h = a * 2654435761u ^ (b + 0x9E3779B9u) * 2246822519u;
    h ^= h >> 15;
    return h * 3266489917u;
}

static dt_kv *new_windowed_cache(const dt_budget *budgets, int32_t n_layers, int32_t n_lanes, const int32_t *windows) {
    dt_kv_layer_params params[4] = {0};
    for (int32_t i = 0; i < n_layers; i++) {
        params[i].n_lanes = n_lanes;
        params[i].window = windows[i];
        params[i].budget = budgets[i];
        dt_kv_format_init(&params[i].format, DT_KV_F16, DT_KV_F16, 4, 4, 16);
    }
    dt_memory_init(&memory);
    dt_kv *kv = NULL;
    dt_error error;
    require(dt_kv_new(&memory, params, n_layers, &kv, &error), &error);
    return kv;
}

static dt_kv *new_cache(const dt_budget *budgets, int32_t n_layers, int32_t n_lanes) {
    return new_windowed_cache(budgets, n_layers, n_lanes, (const int32_t[4]){0});
}

/* Appends and commits n tokens; each lane pays attention in its own way. */
static void add(dt_kv *kv, int32_t n_layers, int32_t n_lanes, int32_t *next, int32_t n) {
    dt_error error;
    require(dt_kv_append(kv, *next, n, &error), &error);
    dt_kv_commit(kv, n);
    *next += n;
    for (int32_t layer = 0; layer < n_layers; layer++) {
        for (int32_t lane = 0; lane < n_lanes && dt_kv_layer_needs_mass(kv, layer); lane++) {
            dt_kv_lane_view view;
            dt_kv_lane(kv, layer, lane, &view);
            int32_t positions[4096];
            float mass[4096];
            dt_kv_positions(kv, layer, lane, positions);
            for (int32_t i = 0; i < view.n_entries; i++) {
                const uint32_t h = hash((uint32_t)positions[i], (uint32_t)(layer * 16 + lane));
                mass[i] = (float)(h % 1000u) / 1000.0f;
                view.value_norm[i] = 1.0f + (float)(h >> 24) / 256.0f;
            }
            dt_mass_fold(view.recent_mass, mass, view.n_entries, n);
        }
    }
}

/* Sinks and recent window of all layers that evict are there, all of an unbudgeted layer is, and no lane is over its budget. */
static void require_kept(const dt_kv *kv, const dt_budget *budgets, int32_t n_layers, int32_t n_lanes, int32_t next) {
    dt_error error;
    require(dt_kv_check(kv, &error), &error);
    for (int32_t layer = 0; layer < n_layers; layer++) {
        const dt_budget *b = &budgets[layer];
        for (int32_t lane = 0; lane < n_lanes; lane++) {
            int32_t positions[4096];
            bool there[4096] = {false};
            dt_kv_lane_view view;
            dt_kv_lane(kv, layer, lane, &view);
            dt_kv_positions(kv, layer, lane, positions);
            for (int32_t i = 0; i < view.n_entries; i++) {
                there[positions[i]] = true;
            }
            assert_true(b->policy == NULL ? view.n_entries == next : view.n_entries <= b->max_cache_size);
            for (int32_t position = 0; position < next; position++) {
                if (position < b->sink_tokens || position >= next - b->recent_window) {
                    assert_true(there[position]);
                }
            }
        }
    }
}

static void test_rounds_hold_budgets_and_pins(void **state) {
    (void)state;
    const dt_budget budgets[] = {{&dt_policy_importance_score, 40, 10, 3, 8, NULL, 0, NULL, 0, false},
                                 {0},
                                 {&dt_policy_local_window, 64, 20, 4, 16, NULL, 0, NULL, 0, false}};
    dt_kv *kv = new_cache(budgets, 3, 3);
    int32_t next = 0;
    int64_t evicted = 0, expected = 0;
    for (int32_t step = 0; step < 400; step++) {
        add(kv, 3, 3, &next, 1 + step % 3);
        const int32_t before[3] = {dt_kv_length(kv, 0), dt_kv_length(kv, 1), dt_kv_length(kv, 2)};
        dt_round_result result;
        dt_error error;
        require(dt_kv_round(kv, next, false, NULL, &result, &error), &error);
        int32_t n_rounds = 0;
        for (int32_t layer = 0; layer < 3; layer++) {
            const bool over = budgets[layer].policy != NULL && before[layer] > budgets[layer].max_cache_size;
            assert_int_equal(dt_kv_length(kv, layer), over ? dt_budget_low_water(&budgets[layer]) : before[layer]);
            n_rounds += over;
        }
        assert_int_equal(result.n_rounds, n_rounds);
        evicted += result.n_evicted;
        require_kept(kv, budgets, 3, 3, next);
    }
    for (int32_t layer = 0; layer < 3; layer++) {
        expected += next - dt_kv_length(kv, layer);
    }
    assert_int_equal(evicted, expected);
    dt_kv_free(kv);
    assert_int_equal(atomic_load(&memory.bytes), 0);
}

static void test_local_window_is_sinks_and_the_newest(void **state) {
    (void)state;
    const dt_budget budgets[] = {{&dt_policy_local_window, 48, 8, 4, 8, NULL, 0, NULL, 0, false}};
    dt_kv *kv = new_cache(budgets, 1, 2);
    int32_t next = 0, positions[64];
    add(kv, 1, 2, &next, 100);
    dt_round_result result;
    dt_error error;
    require(dt_kv_round(kv, next, false, NULL, &result, &error), &error);
    assert_int_equal(result.n_rounds, 1);
    assert_int_equal(result.n_evicted, 55);
    bool there[100] = {false};
    dt_kv_positions(kv, 0, 1, positions);
    for (int32_t i = 0; i < 45; i++) {
        there[positions[i]] = true;
    }
    for (int32_t position = 0; position < 100; position++) {
        assert_int_equal(there[position], position < 4 || position >= 59);
    }
    dt_kv_free(kv);
}

/* Lanes choose for themselves. */
static void test_lanes_differ(void **state) {
    (void)state;
    const dt_budget budgets[] = {{&dt_policy_importance_score, 48, 8, 4, 8, NULL, 0, NULL, 0, false}};
    dt_kv *kv = new_cache(budgets, 1, 2);
    int32_t next = 0, a[64], b[64];
    add(kv, 1, 2, &next, 100);
    dt_round_result result;
    dt_error error;
    require(dt_kv_round(kv, next, false, NULL, &result, &error), &error);
    dt_kv_positions(kv, 0, 0, a);
    dt_kv_positions(kv, 0, 1, b);
    int64_t sum_a = 0, sum_b = 0;
    for (int32_t i = 0; i < dt_kv_length(kv, 0); i++) {
        sum_a += (int64_t)a[i] * a[i];
        sum_b += (int64_t)b[i] * b[i];
    }
    assert_true(sum_a != sum_b);
    dt_kv_free(kv);
}

/* Lanes of one layer may differ in length: those that are not over their budget are left alone. */
static void test_lanes_within_budget_are_left_alone(void **state) {
    (void)state;
    const dt_budget budgets[] = {{&dt_policy_local_window, 48, 8, 4, 8, NULL, 0, NULL, 0, false}};
    dt_kv *kv = new_cache(budgets, 1, 3);
    int32_t next = 0;
    add(kv, 1, 3, &next, 50);
    const int32_t victims[] = {10, 11, 12};
    dt_error error;
    require(dt_kv_drop(kv, 0, 0, victims, 2, &error), &error); /* now 48, at its budget */
    require(dt_kv_drop(kv, 0, 1, victims, 3, &error), &error);
    dt_round_result result;
    require(dt_kv_round(kv, next, false, NULL, &result, &error), &error);
    const int32_t expected[] = {48, 47, 45};
    for (int32_t lane = 0; lane < 3; lane++) {
        dt_kv_lane_view view;
        dt_kv_lane(kv, 0, lane, &view);
        assert_int_equal(view.n_entries, expected[lane]);
    }
    assert_int_equal(result.n_rounds, 1);
    assert_int_equal(result.n_evicted, 2); /* 5 tokens over 3 lanes */
    assert_int_equal(dt_kv_length(kv, 0), 48);
    dt_kv_free(kv);
}

static void run_tight(int32_t max, int32_t min, const dt_policy *policy) {
    const dt_budget budgets[] = {{policy, max, min, 4, 128, NULL, 0, NULL, 0, false}};
    dt_kv *kv = new_cache(budgets, 1, 1);
    int32_t next = 0;
    dt_round_result result;
    dt_error error;
    for (int32_t step = 0; step < 400; step++) {
        add(kv, 1, 1, &next, 1);
        const int32_t before = dt_kv_length(kv, 0);
        require(dt_kv_round(kv, next, false, NULL, &result, &error), &error);
        assert_true(before <= max || dt_kv_length(kv, 0) < before);
        require_kept(kv, budgets, 1, 1, next);
    }
    dt_kv_free(kv);
}

static void test_tight_budgets_get_on(void **state) {
    (void)state;
    run_tight(136, 130, &dt_policy_local_window);
    run_tight(136, 135, &dt_policy_importance_score);
    run_tight(136, 136, &dt_policy_importance_score);
    run_tight(133, 132, &dt_policy_local_window);
}

/* A budget that pins alone exceed is refused by the settings; storage must bear it all the same, and not report rounds. */
static void test_nothing_to_evict(void **state) {
    (void)state;
    const dt_budget budgets[] = {{&dt_policy_local_window, 20, 8, 4, 100, NULL, 0, NULL, 0, false}};
    dt_kv *kv = new_cache(budgets, 1, 1);
    int32_t next = 0;
    add(kv, 1, 1, &next, 60);
    dt_round_result result;
    dt_error error;
    require(dt_kv_round(kv, next, false, NULL, &result, &error), &error);
    assert_int_equal(result.n_rounds, 0);
    assert_int_equal(result.n_evicted, 0);
    assert_int_equal(dt_kv_length(kv, 0), 60);
    dt_kv_free(kv);
}

static void test_uncommitted_tokens_forbid_a_round(void **state) {
    (void)state;
    const dt_budget budgets[] = {{&dt_policy_local_window, 20, 8, 4, 4, NULL, 0, NULL, 0, false}};
    dt_kv *kv = new_cache(budgets, 1, 1);
    int32_t next = 0;
    add(kv, 1, 1, &next, 30);
    dt_error error;
    require(dt_kv_append(kv, next, 2, &error), &error);
    dt_round_result result;
    assert_int_equal(dt_kv_round(kv, next + 2, false, NULL, &result, &error), DT_ERR_ARGUMENT);
    assert_int_equal(dt_kv_length(kv, 0), 32);
    dt_kv_free(kv);
}

static void test_settled_rounds_allocate_nothing(void **state) {
    (void)state;
    const dt_budget budgets[] = {{&dt_policy_importance_score, 40, 10, 3, 8, NULL, 0, NULL, 0, false},
                                 {&dt_policy_local_window, 64, 20, 4, 16, NULL, 0, NULL, 0, false}};
    dt_kv *kv = new_cache(budgets, 2, 2);
    int32_t next = 0, n_rounds = 0;
    size_t settled_bytes = 0;
    for (int32_t step = 0; step < 300; step++) {
        add(kv, 2, 2, &next, 1);
        const bool settled = step >= 150;
        atomic_store(&memory.fail_after, settled ? 0 : -1);
        dt_round_result result;
        dt_error error;
        require(dt_kv_round(kv, next, false, NULL, &result, &error), &error);
        atomic_store(&memory.fail_after, -1);
        n_rounds += settled ? result.n_rounds : 0;
        settled_bytes = step == 149 ? atomic_load(&memory.bytes_peak) : settled_bytes;
    }
    assert_true(n_rounds > 10);
    assert_int_equal(atomic_load(&memory.bytes_peak), settled_bytes); /* memory is flat from then on */
    dt_kv_free(kv);
}

/* After prefill of any length a lane never holds more than budget + one chunk. */
static void test_streaming_memory_is_bounded(void **state) {
    (void)state;
    const dt_budget budgets[] = {{&dt_policy_importance_score, 64, 16, 4, 16, NULL, 0, NULL, 0, false}};
    dt_kv *kv = new_cache(budgets, 1, 2);
    int32_t next = 0;
    while (next < 3000) {
        add(kv, 1, 2, &next, 50);
        assert_true(dt_kv_length(kv, 0) <= 64 + 50);
        dt_round_result result;
        dt_error error;
        require(dt_kv_round(kv, next, false, NULL, &result, &error), &error);
    }
    const size_t scratch = 8 * (64 + 50) + dt_policy_scratch_bytes(64 + 50) + 256, spare = 64 + 1024;
    assert_true(atomic_load(&memory.bytes_peak) <= dt_kv_bytes_for(kv, 64 + 50) * 2 + scratch + spare);
    assert_true(dt_kv_bytes(kv) <= dt_kv_bytes_for(kv, 64 + 50) + scratch + spare);
    dt_kv_free(kv);
}

static void test_a_round_beyond_the_limit_names_it(void **state) {
    (void)state;
    const dt_budget budgets[] = {{&dt_policy_importance_score, 40, 10, 3, 8, NULL, 0, NULL, 0, false}};
    dt_kv *kv = new_cache(budgets, 1, 1);
    int32_t next = 0;
    add(kv, 1, 1, &next, 200);
    memory.limit = atomic_load(&memory.bytes);
    dt_round_result result;
    dt_error error;
    assert_int_equal(dt_kv_round(kv, next, false, NULL, &result, &error), DT_ERR_MEMORY);
    memory.limit = 0;
    assert_non_null(strstr(error.message, "is reached after 200 tokens (--kv-memory)"));
    dt_kv_free(kv);
}

/* ---- rounds on several threads ---- */

enum { N_WORKERS = 6 }; /* more than a round takes */

typedef struct worker {
    pthread_t thread;
    void (*work)(void *user, int ith, int nth);
    void *user;
    int ith;
} worker;

static void *run_worker(void *of) {
    const worker *w = of;
    w->work(w->user, w->ith, N_WORKERS);
    return NULL;
}

static void run_workers(void *pool, void (*work)(void *user, int ith, int nth), void *user) {
    worker workers[N_WORKERS];
    ++*(int *)pool;
    for (int i = 0; i < N_WORKERS; i++) {
        workers[i] = (worker){.work = work, .user = user, .ith = i};
        assert_int_equal(pthread_create(&workers[i].thread, NULL, run_worker, &workers[i]), 0);
    }
    for (int i = 0; i < N_WORKERS; i++) {
        pthread_join(workers[i].thread, NULL);
    }
}

static void require_equal_lanes(const dt_kv *a, const dt_kv *b, int32_t layer, int32_t lane) {
    dt_kv_lane_view view[2];
    int32_t positions[2][4096];
    dt_kv_lane(a, layer, lane, &view[0]);
    dt_kv_lane(b, layer, lane, &view[1]);
    assert_int_equal(view[0].n_entries, view[1].n_entries);
    assert_int_equal(view[0].n_slots, view[1].n_slots);
    const size_t n = (size_t)view[0].n_entries;
    dt_kv_positions(a, layer, lane, positions[0]);
    dt_kv_positions(b, layer, lane, positions[1]);
    assert_memory_equal(positions[0], positions[1], n * sizeof(int32_t));
    assert_true((view[0].recent_mass != NULL) == (view[1].recent_mass != NULL));
    if (view[0].recent_mass != NULL) {
        assert_memory_equal(view[0].recent_mass, view[1].recent_mass, n * sizeof(float));
    }
    if (view[0].n_slots > 0) {
        assert_memory_equal(view[0].bias, view[1].bias, n * sizeof(float));
    }
}

/* One conversation, a cache whose rounds are done by one thread and one whose rounds are shared out: they stay alike, with slots, a
 * layer that keeps everything, blocks that a fork shares, and budgets of their own or a shared one. */
static void test_threads_change_nothing(void **state) {
    (void)state;
    for (int32_t total = 0; total <= 150; total += 150) {
        const dt_budget budgets[] = {{&dt_policy_importance_score, 60, 10, 3, 8, NULL, 0, NULL, 0, false},
                                     {0},
                                     {&dt_policy_local_window, 64, 20, 4, 16, NULL, 0, NULL, 0, false},
                                     {&dt_policy_importance_score, 50, 10, 3, 8, NULL, 5, NULL, 0, false}};
        int n_runs = 0;
        const dt_workers workers = {.run = run_workers, .pool = &n_runs, .n_most = N_WORKERS};
        dt_error error;
        dt_kv *kv = new_cache(budgets, 4, 5), *other = NULL;
        require(dt_kv_set_budgets(kv, budgets, total, &error), &error);
        int32_t next = 0;
        add(kv, 4, 5, &next, 40);
        require(dt_kv_fork(kv, &other, &error), &error);
        for (int32_t step = 0; step < 100; step++) {
            int32_t other_next = next;
            add(kv, 4, 5, &next, 1 + step % 13);
            add(other, 4, 5, &other_next, 1 + step % 13);
            dt_round_result result[2];
            require(dt_kv_round(kv, next, false, NULL, &result[0], &error), &error);
            require(dt_kv_round(other, next, false, &workers, &result[1], &error), &error);
            assert_memory_equal(&result[0].n_rounds, &result[1].n_rounds, sizeof result[0].n_rounds);
            assert_true(result[0].n_evicted == result[1].n_evicted && result[0].has_dropped == result[1].has_dropped);
            assert_int_equal(dt_kv_newest_dropped(kv), dt_kv_newest_dropped(other));
            require(dt_kv_check(other, &error), &error);
            for (int32_t layer = 0; layer < 4; layer++) {
                for (int32_t lane = 0; lane < 5; lane++) {
                    require_equal_lanes(kv, other, layer, lane);
                }
            }
        }
        assert_true(n_runs > 10);
        dt_kv_free(kv);
        dt_kv_free(other);
        assert_int_equal(atomic_load(&memory.bytes), 0);
    }
}

static void require_equal(const dt_kv *a, const dt_kv *b, int32_t n_layers, int32_t n_lanes) {
    for (int32_t layer = 0; layer < n_layers; layer++) {
        for (int32_t lane = 0; lane < n_lanes; lane++) {
            require_equal_lanes(a, b, layer, lane);
        }
    }
}

/* The round that is tried again once there is memory does what the first one would have, on a cache that shares its blocks: with
 * slots, a window, budgets of its own or a shared one, on one thread or several. No try evicts anything before. */
static void test_a_failed_round_can_be_tried_again(void **state) {
    (void)state;
    for (int i = 0; i < 8; i++) {
        const int32_t windows[] = {0, 0, (i & 4) != 0 ? 70 : 0};
        const dt_budget budgets[] = {{&dt_policy_importance_score, 40, 10, 3, 8, NULL, 4, NULL, 0, false},
                                     {&dt_policy_local_window, 64, 20, 4, 16, NULL, 0, NULL, 0, false},
                                     {&dt_policy_importance_score, 150, 12, 3, 8, NULL, 0, NULL, 0, false}};
        int n_runs = 0;
        const dt_workers workers = {.run = run_workers, .pool = &n_runs, .n_most = N_WORKERS};
        dt_error error;
        dt_kv *kv = new_windowed_cache(budgets, 3, 4, windows), *other = NULL, *before = NULL;
        require(dt_kv_set_budgets(kv, budgets, (i & 1) != 0 ? 120 : 0, &error), &error);
        int32_t next = 0, n_failed = 0;
        add(kv, 3, 4, &next, 200);
        require(dt_kv_fork(kv, &other, &error), &error);
        require(dt_kv_fork(kv, &before, &error), &error);
        dt_round_result result, other_result;
        require(dt_kv_round(other, next, false, NULL, &other_result, &error), &error);
        dt_status status = DT_ERR_MEMORY;
        for (int32_t allowed = 0; status != DT_OK; allowed++) {
            assert_true(allowed < 500);
            error.message[0] = '\0';
            atomic_store(&memory.fail_after, allowed);
            status = dt_kv_round(kv, next, false, (i & 2) != 0 ? &workers : NULL, &result, &error);
            atomic_store(&memory.fail_after, -1);
            require(dt_kv_check(kv, &error), &error);
            if (status != DT_OK) {
                assert_true(status == DT_ERR_MEMORY && strlen(error.message) > 10);
                assert_int_equal(result.n_evicted, 0);
                require_equal(kv, before, windows[2] == 0 ? 3 : 2, 4);
                n_failed++;
            }
        }
        assert_true(n_failed > 5 && (n_runs > 0) == ((i & 2) != 0));
        assert_true(result.n_evicted > 0 && result.n_evicted == other_result.n_evicted);
        assert_int_equal(result.n_rounds, other_result.n_rounds);
        require_equal(kv, other, 3, 4);
        for (int32_t layer = 0; layer < 3; layer++) {
            assert_int_equal(dt_kv_length(before, layer), 200); /* what shared the blocks is as it was */
        }
        require(dt_kv_check(before, &error), &error);
        dt_kv_free(kv);
        dt_kv_free(other);
        dt_kv_free(before);
        assert_int_equal(atomic_load(&memory.bytes), 0);
    }
}

/* ---- lanes of their own size, and a shared budget ---- */

static int32_t lane_length(const dt_kv *kv, int32_t layer, int32_t lane) {
    dt_kv_lane_view view;
    dt_kv_lane(kv, layer, lane, &view);
    return view.n_entries;
}

static void test_lanes_have_their_own_sizes(void **state) {
    (void)state;
    const int32_t sizes[] = {24, 200, 64};
    const dt_budget budgets[] = {{&dt_policy_local_window, 200, 10, 3, 8, sizes, 0, NULL, 0, false}};
    dt_kv *kv = new_cache(budgets, 1, 3), *fork = NULL;
    dt_error error;
    int32_t next = 0;
    dt_round_result result;
    add(kv, 1, 3, &next, 150);
    require(dt_kv_fork(kv, &fork, &error), &error);
    require(dt_kv_round(kv, next, false, NULL, &result, &error), &error);
    require(dt_kv_check(kv, &error), &error);
    assert_int_equal(lane_length(kv, 0, 0), 24 - 1);
    assert_int_equal(lane_length(kv, 0, 1), 150);
    assert_int_equal(lane_length(kv, 0, 2), 64 - 4);
    assert_true(dt_kv_exceeds(kv, 0, 2) && !dt_kv_exceeds(kv, 0, 1));
    require(dt_kv_round(fork, next, true, NULL, &result, &error), &error); /* a fork has them too */
    assert_int_equal(lane_length(fork, 0, 0), 24);
    assert_int_equal(lane_length(fork, 0, 2), 64);
    dt_kv_free(kv);
    dt_kv_free(fork);
    assert_int_equal(atomic_load(&memory.bytes), 0);
}

/* No attention was observed: scores are then the peaks alone. */
static void forget_attention(dt_kv *kv, int32_t n_layers, int32_t n_lanes) {
    for (int32_t layer = 0; layer < n_layers; layer++) {
        for (int32_t lane = 0; lane < n_lanes && dt_kv_layer_needs_mass(kv, layer); lane++) {
            dt_kv_lane_view view;
            dt_kv_lane(kv, layer, lane, &view);
            memset(view.recent_mass, 0, (size_t)view.n_entries * sizeof *view.recent_mass);
        }
    }
}

/* Peaks of lane l are l-th in size; entries of one lane differ. */
static void set_peaks(dt_kv *kv, int32_t n_layers, int32_t n_lanes) {
    for (int32_t layer = 0; layer < n_layers; layer++) {
        for (int32_t lane = 0; lane < n_lanes && dt_kv_layer_needs_peak(kv, layer); lane++) {
            dt_kv_lane_view view;
            dt_kv_lane(kv, layer, lane, &view);
            for (int32_t i = 0; i < view.n_entries; i++) {
                view.peak_mass[i] = (float)((lane + 1) * (lane + 1)) * (float)(i + 1) / 5000.0f;
            }
        }
    }
}

static void test_a_shared_budget_follows_the_scores(void **state) {
    (void)state;
    const dt_budget budgets[] = {{&dt_policy_reconstruct, INT32_MAX, 12, 3, 8, NULL, 0, NULL, 0, false},
                                 {0},
                                 {&dt_policy_reconstruct, 150, 12, 3, 8, NULL, 0, NULL, 0, false}};
    dt_kv *kv = new_cache(budgets, 3, 3);
    dt_error error;
    int32_t next = 0;
    dt_round_result result;
    require(dt_kv_set_budgets(kv, budgets, 160, &error), &error);
    add(kv, 3, 3, &next, 200);
    set_peaks(kv, 3, 3);
    forget_attention(kv, 3, 3);
    assert_true(dt_kv_exceeds(kv, 0, 0));
    require(dt_kv_round(kv, next, true, NULL, &result, &error), &error);
    require(dt_kv_check(kv, &error), &error);
    const double total = dt_kv_mean_length(kv, 0) + dt_kv_mean_length(kv, 2);
    assert_true(total <= 160 && total > 150); /* as much as fits, but for a threshold's ties */
    assert_int_equal(dt_kv_length(kv, 1), 200);
    for (int32_t layer = 0; layer < 3; layer += 2) {
        assert_int_equal(lane_length(kv, layer, 0), 12); /* its min */
        assert_true(lane_length(kv, layer, 1) < lane_length(kv, layer, 2));
    }
    assert_true(lane_length(kv, 2, 2) <= 150); /* its max */
    require(dt_kv_round(kv, next, true, NULL, &result, &error), &error);
    assert_int_equal(result.n_evicted, 0);
    while (!dt_kv_exceeds(kv, 0, 0)) {
        add(kv, 3, 3, &next, 1);
    }
    require(dt_kv_round(kv, next, false, NULL, &result, &error), &error);
    assert_true(dt_kv_mean_length(kv, 0) + dt_kv_mean_length(kv, 2) <= 150); /* the low-water mark of 160 */
    dt_kv_free(kv);
    assert_int_equal(atomic_load(&memory.bytes), 0);
}

/* Equal scores, as of a session that was loaded without them: the budget is filled all the same, with the newest. */
static void test_a_shared_budget_of_equal_scores(void **state) {
    (void)state;
    const dt_budget budgets[] = {{&dt_policy_reconstruct, INT32_MAX, 0, 3, 8, NULL, 0, NULL, 0, false},
                                 {&dt_policy_reconstruct, INT32_MAX, 0, 3, 8, NULL, 0, NULL, 0, false}};
    dt_kv *kv = new_cache(budgets, 2, 3);
    dt_error error;
    int32_t next = 0;
    dt_round_result result;
    require(dt_kv_set_budgets(kv, budgets, 160, &error), &error);
    add(kv, 2, 3, &next, 200);
    forget_attention(kv, 2, 3);
    require(dt_kv_round(kv, next, true, NULL, &result, &error), &error);
    require(dt_kv_check(kv, &error), &error);
    for (int32_t layer = 0; layer < 2; layer++) {
        assert_int_equal(lane_length(kv, layer, 0), 80);
    }
    dt_kv_free(kv);
    assert_int_equal(atomic_load(&memory.bytes), 0);
}

static void test_budgets_need_what_was_collected(void **state) {
    (void)state;
    const dt_budget window[] = {{&dt_policy_local_window, 64, 10, 3, 8, NULL, 0, NULL, 0, false}};
    const dt_budget scored[] = {{&dt_policy_importance_score, 64, 10, 3, 8, NULL, 0, NULL, 0, false}},
                    peaks[] = {{&dt_policy_reconstruct, 64, 10, 3, 8, NULL, 0, NULL, 0, false}};
    dt_kv *kv = new_cache(window, 1, 2);
    dt_error error;
    int32_t next = 0;
    require(dt_kv_set_budgets(kv, peaks, 0, &error), &error); /* without text nothing is missing */
    require(dt_kv_set_budgets(kv, window, 0, &error), &error);
    add(kv, 1, 2, &next, 20);
    assert_int_equal(dt_kv_set_budgets(kv, scored, 0, &error), DT_ERR_ARGUMENT);
    assert_int_equal(dt_kv_set_budgets(kv, peaks, 0, &error), DT_ERR_ARGUMENT);
    require(dt_kv_set_budgets(kv, window, 0, &error), &error);
    dt_kv_free(kv);
    assert_int_equal(atomic_load(&memory.bytes), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rounds_hold_budgets_and_pins),
        cmocka_unit_test(test_local_window_is_sinks_and_the_newest),
        cmocka_unit_test(test_lanes_differ),
        cmocka_unit_test(test_lanes_within_budget_are_left_alone),
        cmocka_unit_test(test_tight_budgets_get_on),
        cmocka_unit_test(test_nothing_to_evict),
        cmocka_unit_test(test_uncommitted_tokens_forbid_a_round),
        cmocka_unit_test(test_settled_rounds_allocate_nothing),
        cmocka_unit_test(test_streaming_memory_is_bounded),
        cmocka_unit_test(test_a_round_beyond_the_limit_names_it),
        cmocka_unit_test(test_threads_change_nothing),
        cmocka_unit_test(test_a_failed_round_can_be_tried_again),
        cmocka_unit_test(test_lanes_have_their_own_sizes),
        cmocka_unit_test(test_a_shared_budget_follows_the_scores),
        cmocka_unit_test(test_a_shared_budget_of_equal_scores),
        cmocka_unit_test(test_budgets_need_what_was_collected),
    };
    return cmocka_run_group_tests_name("round", tests, NULL, NULL);
}
