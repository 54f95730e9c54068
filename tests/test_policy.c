/*
 * policy/: properties that every policy in the table must have, each policy's own meaning, and the folding of attention mass.
 *
 * The property tests run on whatever dt_policies lists: a new policy is tested by adding it there.
 */
#include "support/cmocka_all.h"

#include "policy/policy.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MAX_N 700

static uint64_t seed = 1;

static uint32_t draw(uint32_t below) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 33) % below;
}

static float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* ---- lanes to choose from ---- */

typedef struct lane {
    dt_lane_view view;
    int32_t position[MAX_N];
    float recent[MAX_N], norm[MAX_N], peak[MAX_N];
} lane;

static const float weights[] = {0, -0.5f}; /* of policies that need them */

static void connect(lane *l) {
    l->view.position = l->position;
    l->view.recent_mass = l->recent;
    l->view.value_norm = l->norm;
    l->view.peak_mass = l->peak;
    l->view.weights = weights;
}

static void swap_entries(lane *l, int32_t a, int32_t b) {
    const int32_t position = l->position[a];
    l->position[a] = l->position[b];
    l->position[b] = position;
    float *rows[] = {l->recent, l->norm, l->peak};
    for (size_t i = 0; i < 3; i++) {
        const float value = rows[i][a];
        rows[i][a] = rows[i][b];
        rows[i][b] = value;
    }
}

static void shuffle(lane *l) {
    for (int32_t i = l->view.n - 1; i > 0; i--) {
        swap_entries(l, i, (int32_t)draw((uint32_t)i + 1));
    }
}

static float odd_number(void) {
    static const uint32_t bits[] = {0x7FC00000u, 0x7F800000u, 0xFF800000u, 0x7F7FFFFFu, 0xFF7FFFFFu, 0x00000001u, 0x80000000u, 0};
    return from_bits(bits[draw(8)]);
}

/* n entries with gaps between positions, shuffled; kind 0: plain numbers, 1: many equal ones, 2: NaN, infinities, extremes mixed in
 */
static void random_lane(lane *l, int32_t n, uint32_t kind) {
    connect(l);
    l->view.n = n;
    int32_t position = 0;
    for (int32_t i = 0; i < n; i++) {
        l->position[i] = position;
        position += 1 + (draw(4) == 0 ? (int32_t)draw(2000) : 0);
        float *numbers[] = {&l->recent[i], &l->norm[i], &l->peak[i]};
        for (size_t j = 0; j < 3; j++) {
            *numbers[j] = kind == 1 ? (float)draw(2) : (float)draw(1u << 20) / 4096.0f;
            *numbers[j] = kind == 2 && draw(4) == 0 ? odd_number() : *numbers[j];
        }
    }
    l->view.next_position = n == 0 ? 0 : l->position[n - 1] + 1;
    l->view.sink_tokens = (int32_t)draw(6);
    l->view.recent_window = (int32_t)draw(40);
    shuffle(l);
}

static int32_t choose(const dt_policy *policy, const lane *l, int32_t n_keep, int32_t *victims) {
    void *scratch = aligned_alloc(64, DT_ROUND_UP(dt_policy_scratch_bytes(l->view.n) + 1, (size_t)64));
    assert_non_null(scratch);
    const int32_t n = dt_policy_choose(policy, &l->view, n_keep, victims, scratch);
    free(scratch);
    return n;
}

static int compare_int(const void *a, const void *b) {
    const int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

/* The victims' positions, ascending. */
static int32_t choose_positions(const dt_policy *policy, const lane *l, int32_t n_keep, int32_t *positions) {
    int32_t victims[MAX_N];
    const int32_t n = choose(policy, l, n_keep, victims);
    for (int32_t i = 0; i < n; i++) {
        positions[i] = l->position[victims[i]];
    }
    qsort(positions, (size_t)n, sizeof *positions, compare_int);
    return n;
}

/* ---- properties ---- */

static void require_properties(const dt_policy *policy, lane *l, int32_t n_keep) {
    int32_t victims[MAX_N], n_pinned = 0;
    for (int32_t i = 0; i < l->view.n; i++) {
        n_pinned += dt_pinned(&l->view, i);
    }
    const int32_t n = choose(policy, l, n_keep, victims);
    const int32_t wanted = DT_MIN(l->view.n - DT_MAX(n_keep, 0), l->view.n - n_pinned);
    assert_int_equal(n, DT_MAX(wanted, 0));
    for (int32_t i = 0; i < n; i++) {
        assert_in_range(victims[i], 0, l->view.n - 1);
        assert_true(i == 0 || victims[i] > victims[i - 1]);
        assert_false(dt_pinned(&l->view, victims[i]));
    }
    int32_t again[MAX_N];
    assert_int_equal(choose(policy, l, n_keep, again), n);
    assert_memory_equal(again, victims, (size_t)n * sizeof *victims);
    int32_t positions[MAX_N], shuffled[MAX_N];
    assert_int_equal(choose_positions(policy, l, n_keep, positions), n);
    shuffle(l);
    assert_int_equal(choose_positions(policy, l, n_keep, shuffled), n);
    assert_memory_equal(shuffled, positions, (size_t)n * sizeof *positions);
}

static void test_properties_of_every_policy(void **state) {
    (void)state;
    static lane l;
    int32_t n_policies;
    const dt_policy *const *all = dt_policies(&n_policies);
    assert_true(n_policies >= 2);
    for (int32_t p = 0; p < n_policies; p++) {
        for (int32_t round = 0; round < 300; round++) {
            const int32_t n = round < 30 ? round / 10 : (int32_t)draw(round % 10 == 0 ? MAX_N : 60);
            random_lane(&l, n, (uint32_t)round % 3);
            require_properties(all[p], &l, (int32_t)draw((uint32_t)n + 3) - 1);
        }
    }
}

static void test_everything_pinned(void **state) {
    (void)state;
    static lane l;
    int32_t n_policies, victims[MAX_N];
    const dt_policy *const *all = dt_policies(&n_policies);
    for (int32_t p = 0; p < n_policies; p++) {
        random_lane(&l, 50, 0);
        l.view.sink_tokens = INT32_MAX;
        assert_int_equal(choose(all[p], &l, 0, victims), 0);
        l.view.sink_tokens = 0;
        l.view.recent_window = INT32_MAX;
        assert_int_equal(choose(all[p], &l, 0, victims), 0);
        l.view.recent_window = 0;
        assert_int_equal(choose(all[p], &l, 0, victims), 50);
    }
}

static void test_scores_are_finite(void **state) {
    (void)state;
    static lane l;
    int32_t n_policies;
    const dt_policy *const *all = dt_policies(&n_policies);
    for (int32_t p = 0; p < n_policies; p++) {
        for (int32_t round = 0; round < 200; round++) {
            random_lane(&l, 1 + (int32_t)draw(100), 2);
            if (round % 4 == 0) { /* nothing but odd numbers */
                for (int32_t i = 0; i < l.view.n; i++) {
                    l.recent[i] = odd_number();
                    l.norm[i] = odd_number();
                    l.peak[i] = odd_number();
                }
            }
            float scores[MAX_N];
            all[p]->score(&l.view, scores);
            for (int32_t i = 0; i < l.view.n; i++) {
                assert_true(dt_is_finite(scores[i]));
            }
        }
    }
}

/* The choice equals that of sorting everything. */
static void test_choice_equals_a_full_sort(void **state) {
    (void)state;
    static lane l;
    int32_t n_policies;
    const dt_policy *const *all = dt_policies(&n_policies);
    for (int32_t p = 0; p < n_policies; p++) {
        for (int32_t round = 0; round < 60; round++) {
            random_lane(&l, 1 + (int32_t)draw(150), (uint32_t)round % 2);
            float scores[MAX_N];
            all[p]->score(&l.view, scores);
            const int32_t n_keep = (int32_t)draw((uint32_t)l.view.n);
            int32_t victims[MAX_N];
            const int32_t n = choose(all[p], &l, n_keep, victims);
            bool is_victim[MAX_N] = {false};
            l.view.recent_window = dt_policy_recent_window(all[p], &l.view, n_keep);
            for (int32_t i = 0; i < n; i++) {
                is_victim[victims[i]] = true;
            }
            for (int32_t kept = 0; kept < l.view.n; kept++) {
                for (int32_t i = 0; i < n && !is_victim[kept] && !dt_pinned(&l.view, kept); i++) {
                    const int32_t gone = victims[i];
                    assert_true(scores[gone] < scores[kept] ||
                                (scores[gone] == scores[kept] && l.position[gone] < l.position[kept]));
                }
            }
        }
    }
}

/* Of scores that are no numbers, no policy may have any; should one come, its entry goes first and the rest is not disturbed. */
static void score_with_gaps(const dt_lane_view *view, float *out) {
    for (int32_t i = 0; i < view->n; i++) {
        out[i] = view->position[i] % 10 == 0 ? from_bits(0x7FC00000u) : -(float)view->position[i];
    }
}

static void test_nan_is_the_lowest_score(void **state) {
    (void)state;
    static lane l;
    random_lane(&l, 50, 0);
    for (int32_t i = 0; i < 50; i++) {
        l.position[i] = (i * 7) % 50;
    }
    l.view.next_position = 50;
    l.view.sink_tokens = l.view.recent_window = 0;
    const dt_policy policy = {.name = "gaps", .score = score_with_gaps};
    const int32_t expected[] = {0, 10, 20, 30, 40, 48, 49};
    int32_t positions[MAX_N];
    assert_int_equal(choose_positions(&policy, &l, 43, positions), 7);
    assert_memory_equal(positions, expected, sizeof expected);
}

/* ---- table, budgets, pins ---- */

static void test_table(void **state) {
    (void)state;
    assert_ptr_equal(dt_policy_find("local_window", NULL), &dt_policy_local_window);
    assert_ptr_equal(dt_policy_find("importance_score", NULL), &dt_policy_importance_score);
    assert_ptr_equal(dt_policy_find("importance_score", "fast"), &dt_policy_importance_score);
    assert_ptr_equal(dt_policy_find("importance_score", "fast-without-values"), &dt_policy_fast_without_values);
    assert_null(dt_policy_find("importance_score", "fast-without"));
    assert_null(dt_policy_find("none", NULL));
    assert_null(dt_policy_find("", NULL));
    assert_false(dt_policy_local_window.needs_mass);
    assert_true(dt_policy_importance_score.needs_mass);
}

static int32_t low_water(int32_t max, int32_t min) {
    const dt_budget budget = {.policy = &dt_policy_local_window, .max_cache_size = max, .min_cache_size = min};
    return dt_budget_low_water(&budget);
}

static void test_low_water(void **state) {
    (void)state;
    assert_int_equal(low_water(4096, 512), 3840);
    assert_int_equal(low_water(1024, 1000), 1000);
    assert_int_equal(low_water(136, 130), 130);
    assert_int_equal(low_water(136, 135), 135);
    assert_int_equal(low_water(136, 136), 136);
    assert_int_equal(low_water(8, 0), 8);
    assert_int_equal(low_water(1, 0), 1);
    assert_int_equal(low_water(INT32_MAX, 0), INT32_MAX - INT32_MAX / 16);
}

static void test_pins(void **state) {
    (void)state;
    const int32_t position[] = {0, 3, 4, 89, 90, 99};
    const dt_lane_view view = {.n = 6, .position = position, .next_position = 100, .sink_tokens = 4, .recent_window = 10};
    const bool pinned[] = {true, true, false, false, true, true};
    for (int32_t i = 0; i < 6; i++) {
        assert_int_equal(dt_pinned(&view, i), pinned[i]);
    }
}

/* ---- local_window ---- */

static void test_local_window_keeps_sinks_and_the_newest(void **state) {
    (void)state;
    static lane l;
    random_lane(&l, 100, 0);
    for (int32_t i = 0; i < 100; i++) {
        l.position[i] = 99 - i;
    }
    l.view.next_position = 100;
    l.view.sink_tokens = 4;
    l.view.recent_window = 8;
    int32_t positions[MAX_N];
    assert_int_equal(choose_positions(&dt_policy_local_window, &l, 30, positions), 70);
    for (int32_t i = 0; i < 70; i++) {
        assert_int_equal(positions[i], 4 + i);
    }
}

static void test_local_window_far_out(void **state) {
    (void)state;
    static lane l; /* positions that a float can't tell apart */
    random_lane(&l, 40, 0);
    for (int32_t i = 0; i < 40; i++) {
        l.position[i] = (1 << 30) + (i * 7) % 40;
    }
    l.view.next_position = (1 << 30) + 40;
    l.view.recent_window = 2;
    int32_t positions[MAX_N];
    assert_int_equal(choose_positions(&dt_policy_local_window, &l, 10, positions), 30);
    for (int32_t i = 0; i < 30; i++) {
        assert_int_equal(positions[i], (1 << 30) + i);
    }
}

/* ---- importance_score ---- */

/* 200 equal entries at positions 0..199 with 4 sinks. */
static void flat_lane(lane *l) {
    connect(l);
    l->view.n = 200;
    l->view.next_position = 200;
    l->view.sink_tokens = 4;
    l->view.recent_window = 20;
    for (int32_t i = 0; i < 200; i++) {
        l->position[i] = i;
        l->recent[i] = 0.01f;
        l->norm[i] = 1.0f;
    }
}

static bool evicted(const lane *l, int32_t n_keep, int32_t position) {
    int32_t positions[MAX_N];
    const int32_t n = choose_positions(&dt_policy_importance_score, l, n_keep, positions);
    return bsearch(&position, positions, (size_t)n, sizeof position, compare_int) != NULL;
}

static void test_importance_score_keeps_what_is_attended_to(void **state) {
    (void)state;
    static lane l;
    flat_lane(&l);
    l.recent[50] = 0.2f;
    l.recent[100] = 0.5f;
    const int32_t n_keep = 24 + 8; /* the pins and eight more */
    assert_false(evicted(&l, n_keep, 50) || evicted(&l, n_keep, 100));
    assert_true(evicted(&l, n_keep, 49) && evicted(&l, n_keep, 51) && evicted(&l, n_keep, 99) && evicted(&l, n_keep, 101));
    assert_false(evicted(&l, n_keep, 0) || evicted(&l, n_keep, 3) || evicted(&l, n_keep, 180) || evicted(&l, n_keep, 199));
}

static void test_importance_score_weighs_value_norms(void **state) {
    (void)state;
    static lane l;
    flat_lane(&l);
    l.norm[60] = 3.0f;
    l.norm[61] = 0.0f;
    assert_false(evicted(&l, 24 + 1, 60));
    assert_true(evicted(&l, 199, 61));
}

static void test_importance_score_leaves_the_newest_alone(void **state) {
    (void)state;
    static lane l;
    flat_lane(&l);
    for (int32_t i = 4; i < 150; i++) {
        l.recent[i] = 1.0f;
    }
    for (int32_t position = 150; position < 200; position++) { /* five eighths of what is kept beside the sinks, and no more */
        assert_int_equal(evicted(&l, 4 + 64, position), position < 200 - 40);
    }
}

static void test_importance_score_survives_heavy_sinks(void **state) {
    (void)state;
    static lane l;
    flat_lane(&l);
    l.recent[3] = 100.0f;
    l.recent[50] = 0.011f;
    assert_false(evicted(&l, 24 + 1, 50));
}

/* ---- reconstruct ---- */

static void test_reconstruct_keeps_the_peaks(void **state) {
    (void)state;
    static lane l;
    flat_lane(&l);
    for (int32_t i = 0; i < 200; i++) {
        l.peak[i] = i % 10 == 5 ? 0.9f : 0.001f * (float)(i % 7);
    }
    int32_t positions[MAX_N];
    const int32_t n = choose_positions(&dt_policy_reconstruct, &l, 24 + 18, positions);
    for (int32_t i = 0; i < n; i++) {
        assert_int_not_equal(positions[i] % 10, 5);
    }
}

/* ---- predict ---- */

/* Rotating a key's pairs, as positions do, changes no feature; and the sum is what a plain loop in double precision gives. */
static void check_prediction(int32_t dim_k, int32_t dim_v, int32_t split) {
    const dt_predict_shape shape = {.dim_k = dim_k, .dim_v = dim_v, .split = split};
    const int32_t n_features = dim_k / 2 + dim_v;
    float key[64], turned[64], value[40], features[72], again[72], lane_weights[74];
    double want = 0;
    for (int32_t i = 0; i < n_features + 2; i++) {
        lane_weights[i] = (float)draw(2000) / 1000 - 1;
        key[i % dim_k] = turned[i % dim_k] = (float)draw(2000) / 1000 - 1;
        value[i % dim_v] = (float)draw(2000) / 1000 - 1;
    }
    for (int32_t i = 0; i < dim_k / 2; i++) {
        const int32_t a = 2 * i < split ? i : 2 * i, b = 2 * i < split ? i + split / 2 : 2 * i + 1;
        const float angle = (float)draw(6000) / 1000;
        turned[a] = key[a] * cosf(angle) - key[b] * sinf(angle);
        turned[b] = key[a] * sinf(angle) + key[b] * cosf(angle);
        want += (double)lane_weights[2 + i] * hypot((double)key[a], (double)key[b]);
    }
    for (int32_t i = 0; i < dim_v; i++) {
        want += (double)lane_weights[2 + dim_k / 2 + i] * (double)value[i];
    }
    assert_int_equal(dt_predict_n_features(&shape), n_features);
    dt_predict_features(&shape, key, value, features);
    dt_predict_features(&shape, turned, value, again);
    for (int32_t i = 0; i < n_features; i++) {
        assert_true(dt_is_finite(again[i]) && fabsf(again[i] - features[i]) <= 1e-5f);
    }
    const float peak = dt_predict_peak(&shape, lane_weights, features);
    assert_true(dt_is_finite(peak) && fabs(log((double)peak) - want - (double)lane_weights[0]) <= 1e-4);
    lane_weights[0] = 1e9f; /* stays a number that can be counted with */
    assert_true(dt_is_finite(dt_predict_peak(&shape, lane_weights, features)));
    features[3] = NAN;
    assert_true(dt_predict_peak(&shape, lane_weights, features) == 1);
}

static void test_predict_is_blind_to_the_rotation(void **state) {
    (void)state;
    for (int32_t part = 0; part <= 2; part++) { /* pairs side by side; a part in halves; all in halves */
        check_prediction(12, 5, 6 * part);
        check_prediction(64, 40, 32 * part);
    }
}

static void test_predict_decays_with_distance(void **state) {
    (void)state;
    static lane l;
    flat_lane(&l);
    float scores[MAX_N];
    const float decays[][2] = {{0, 0}, {0, -1}, {0, 0.5f}};
    for (int32_t i = 0; i < l.view.n; i++) {
        l.peak[i] = 0.25f;
        l.recent[i] = 0;
    }
    for (size_t k = 0; k < 3; k++) {
        l.view.weights = decays[k];
        dt_policy_predict.score(&l.view, scores);
        for (int32_t i = 0; i < l.view.n; i++) {
            const double distance = l.view.next_position - l.position[i];
            const double want = 0.25 * pow((distance + 64) / 576, (double)decays[k][1]);
            assert_true(dt_is_finite(scores[i]) && fabs((double)scores[i] / want - 1) <= 1e-4);
        }
    }
}

/* What the last queries attend to is added to the peak, in both scores that have one; what is no amount counts as nothing. */
static void test_peaks_and_what_is_in_use(void **state) {
    (void)state;
    static const dt_policy *const policies[] = {&dt_policy_reconstruct, &dt_policy_predict},
                                  *const bare[] = {&dt_policy_reconstruct_without_attention, &dt_policy_predict_without_attention};
    static const float none[] = {0, 0};
    for (size_t k = 0; k < 2; k++) {
        static lane l;
        float scores[MAX_N];
        flat_lane(&l);
        l.view.weights = none;
        for (int32_t i = 0; i < l.view.n; i++) {
            l.peak[i] = 0.01f * (float)(i % 7);
            l.recent[i] = 0.001f * (float)(i % 5);
        }
        l.recent[3] = NAN;
        l.recent[4] = -1;
        policies[k]->score(&l.view, scores);
        for (int32_t i = 0; i < l.view.n; i++) {
            const float want = 0.01f * (float)(i % 7) + (i == 3 || i == 4 ? 0 : DT_IN_USE * 0.001f * (float)(i % 5));
            assert_true(fabsf(scores[i] - want) <= 1e-5f);
        }
        assert_true(policies[k]->needs_mass && policies[k]->needs_peak);
        bare[k]->score(&l.view, scores);
        for (int32_t i = 0; i < l.view.n; i++) {
            assert_true(fabsf(scores[i] - 0.01f * (float)(i % 7)) <= 1e-5f);
        }
    }
}

/* Each part moves the score of the entries that differ in it, and of no others; without it nothing moves. */
static void test_importance_score_without_a_part(void **state) {
    (void)state;
    static lane l;
    float with[MAX_N], without[MAX_N];
    flat_lane(&l);
    l.recent[50] *= 1.2f;
    l.norm[90] = 4.0f;
    dt_policy_importance_score.score(&l.view, with);
    assert_true(with[50] > with[60] * 1.1f && with[90] > with[60] * 1.9f);
    dt_policy_fast_without_values.score(&l.view, without);
    assert_true(without[90] == without[60] && without[50] > without[60] * 1.1f);
    dt_policy_fast_without_window.score(&l.view, without);
    assert_memory_equal(with, without, (size_t)l.view.n * sizeof *with);
    assert_int_equal(dt_policy_recent_window(&dt_policy_importance_score, &l.view, 84), 50);
    assert_int_equal(dt_policy_recent_window(&dt_policy_fast_without_window, &l.view, 84), 20);
}

static void test_importance_score_counts_odd_numbers_as_nothing(void **state) {
    (void)state;
    static lane odd, zero;
    flat_lane(&odd);
    flat_lane(&zero);
    for (int32_t i = 0; i < 8; i++) {
        float *rows[2][2] = {{odd.recent, odd.norm}, {zero.recent, zero.norm}};
        static const uint32_t bits[] = {0x7FC00000u, 0x7F800000u, 0xFF800000u, 0xC0000000u};
        for (int32_t row = 0; row < 2; row++) {
            rows[0][row][60 + 10 * i + row] = from_bits(bits[i % 4]);
            rows[1][row][60 + 10 * i + row] = 0;
        }
    }
    float odd_scores[MAX_N], zero_scores[MAX_N];
    dt_policy_importance_score.score(&odd.view, odd_scores);
    dt_policy_importance_score.score(&zero.view, zero_scores);
    for (int32_t i = 0; i < 200; i++) {
        assert_true(dt_is_finite(odd_scores[i]) && odd_scores[i] == zero_scores[i]);
    }
}

static void test_importance_score_without_mass_is_a_window(void **state) {
    (void)state;
    static lane l;
    flat_lane(&l);
    memset(l.recent, 0, sizeof l.recent);
    int32_t importance[MAX_N], window[MAX_N];
    const int32_t n = choose_positions(&dt_policy_importance_score, &l, 77, importance);
    assert_int_equal(choose_positions(&dt_policy_local_window, &l, 77, window), n);
    assert_memory_equal(importance, window, (size_t)n * sizeof *window);
}

/* ---- folding ---- */

static void require_close(float a, float b) {
    assert_true(dt_is_finite(a) && dt_is_finite(b));
    assert_true(fabsf(a - b) <= 1e-5f * (fabsf(a) + fabsf(b)));
}

static void test_fold_does_not_depend_on_batches(void **state) {
    (void)state;
    float one[20], many[20], mass[20], sum[20];
    for (int32_t i = 0; i < 20; i++) {
        one[i] = many[i] = 0.5f + (float)i;
        mass[i] = (float)draw(1000) / 1000.0f;
        sum[i] = 12 * mass[i];
    }
    for (int32_t query = 0; query < 12; query++) {
        dt_mass_fold(one, mass, 20, 1);
    }
    dt_mass_fold(many, sum, 20, 12);
    for (int32_t i = 0; i < 20; i++) {
        require_close(one[i], many[i]);
    }
}

static void test_fold_forgets_and_stays_bounded(void **state) {
    (void)state;
    float mean[2] = {0, 0};
    const float first[2] = {3, 0}, then[2] = {0, 3};
    for (int32_t query = 0; query < 100000; query++) {
        dt_mass_fold(mean, first, 2, 1);
    }
    require_close(mean[0], 3);
    dt_mass_fold(mean, then, 2, 0); /* no queries: nothing */
    require_close(mean[0], 3);
    for (int32_t query = 0; query < DT_OBSERVE_WINDOW; query++) {
        dt_mass_fold(mean, then, 2, 1);
    }
    require_close(mean[0], 3 * expf(-1));
    require_close(mean[0] + mean[1], 3); /* all mass of a query is accounted for */
    for (int32_t query = 0; query < 12 * DT_OBSERVE_WINDOW; query++) {
        dt_mass_fold(mean, then, 2, 1);
    }
    assert_true(mean[0] < 3 * 1e-4f && mean[1] > 2.9f);
}

/* A token that comes late and gets as much attention as the others is worth as much as they are. */
static void test_fold_does_not_favour_early_tokens(void **state) {
    (void)state;
    float mean[64] = {0}, mass[64];
    for (int32_t n = 40; n <= 64; n++) { /* one more token a step */
        for (int32_t i = 0; i < n; i++) {
            mass[i] = 0.125f;
        }
        dt_mass_fold(mean, mass, n, 1);
    }
    for (int32_t i = 0; i < 64; i++) {
        require_close(mean[i], 0.125f);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_properties_of_every_policy),
        cmocka_unit_test(test_everything_pinned),
        cmocka_unit_test(test_scores_are_finite),
        cmocka_unit_test(test_choice_equals_a_full_sort),
        cmocka_unit_test(test_nan_is_the_lowest_score),
        cmocka_unit_test(test_table),
        cmocka_unit_test(test_low_water),
        cmocka_unit_test(test_pins),
        cmocka_unit_test(test_local_window_keeps_sinks_and_the_newest),
        cmocka_unit_test(test_local_window_far_out),
        cmocka_unit_test(test_importance_score_keeps_what_is_attended_to),
        cmocka_unit_test(test_importance_score_weighs_value_norms),
        cmocka_unit_test(test_importance_score_leaves_the_newest_alone),
        cmocka_unit_test(test_importance_score_survives_heavy_sinks),
        cmocka_unit_test(test_reconstruct_keeps_the_peaks),
        cmocka_unit_test(test_predict_is_blind_to_the_rotation),
        cmocka_unit_test(test_predict_decays_with_distance),
        cmocka_unit_test(test_peaks_and_what_is_in_use),
        cmocka_unit_test(test_importance_score_without_a_part),
        cmocka_unit_test(test_importance_score_counts_odd_numbers_as_nothing),
        cmocka_unit_test(test_importance_score_without_mass_is_a_window),
        cmocka_unit_test(test_fold_does_not_depend_on_batches),
        cmocka_unit_test(test_fold_forgets_and_stays_bounded),
        cmocka_unit_test(test_fold_does_not_favour_early_tokens),
    };
    return cmocka_run_group_tests_name("policy", tests, NULL, NULL);
}
