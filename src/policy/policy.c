/*
 * What all policies share: the table, the one definition of "pinned", the choice of victims, and how observed attention becomes
 * the running means that scores are made of.
 *
 * Invariants: the choice depends only on the set of (position, score), never on the order of entries: entries are compared by
 * (score, position), which is total since positions are unique; a pinned entry is never a victim; NaN is the lowest score.
 */
#include "policy/policy.h"

#include <math.h>
#include <string.h>

/* The names of the first two, and of their scores, stand in the help of deeptutor-eval too (apps/eval.c). */
static const dt_policy *const policies[] = {&dt_policy_local_window,
                                            &dt_policy_importance_score,
                                            &dt_policy_reconstruct,
                                            &dt_policy_predict,
                                            &dt_policy_fast_without_window,
                                            &dt_policy_fast_without_values,
                                            &dt_policy_reconstruct_without_attention,
                                            &dt_policy_predict_without_attention};

const dt_policy *const *dt_policies(int32_t *n) {
    *n = (int32_t)(sizeof policies / sizeof policies[0]);
    return policies;
}

const dt_policy *dt_policy_find(const char *name, const char *score_name) {
    for (size_t i = 0; i < sizeof policies / sizeof policies[0]; i++) {
        const char *score = policies[i]->score_name;
        const bool same_score = score_name == NULL || (score != NULL && strcmp(score, score_name) == 0);
        if (strcmp(policies[i]->name, name) == 0 && same_score) {
            return policies[i];
        }
    }
    return NULL;
}

int32_t dt_budget_low_water(const dt_budget *budget) {
    const int32_t max = budget->max_cache_size;
    return DT_MAX(budget->min_cache_size, max - max / 16);
}

bool dt_pinned(const dt_lane_view *view, int32_t entry) {
    const int64_t position = view->position[entry];
    return dt_is_slot(view->position[entry]) || position < view->sink_tokens ||
           position >= (int64_t)view->next_position - view->recent_window;
}

/* ---- attention mass ---- */

/* A model that overflowed gives masses that are no numbers; the means stay finite all the same. */
static inline float amount(float mass) { return mass > 0 ? mass : 0; }
/* Of an entry that was observed and got nothing for long: not 0, which would make it a new one. */
#define LEAST_MEAN 1e-30f

/*
 * Running means per query, not sums: mean' = mean * d + (mass per query) * (1 - d), d = decay ^ queries. So folding ten queries at
 * once or one by one comes to the same, and values stay below the number of query heads however long the session gets.
 *
 * A new entry begins as an average one, not at 0: a sum or a mean that begins at 0 favours what has been there for longer, which
 * freezes the cache at its beginning and lets every token go as soon as it leaves the recent window.
 */
void dt_mass_fold(float *restrict mean, const float *restrict mass, int32_t n, int32_t n_queries) {
    if (n <= 0 || n_queries <= 0) {
        return;
    }
    float sums[8] = {0}; /* independent, so that the loop can run in a vector register */
    int32_t i = 0;
    for (; i + 8 <= n; i += 8) {
        for (int32_t j = 0; j < 8; j++) {
            sums[j] += amount(mass[i + j]);
        }
    }
    float sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
    for (; i < n; i++) {
        sum += amount(mass[i]);
    }
    const float average = sum / (float)n_queries / (float)n, keep = expf(-(float)n_queries / DT_OBSERVE_WINDOW);
    const float add = (1 - keep) / (float)n_queries;
    for (i = 0; i < n; i++) {
        mean[i] = DT_MAX((mean[i] == 0 ? average : mean[i]) * keep + amount(mass[i]) * add, LEAST_MEAN);
    }
}

/* ---- choice of victims ---- */

/* Orders as (score, position) does: higher = keep, among equals the younger. */
static uint64_t keep_key(float score, int32_t position) {
    uint32_t bits = 0; /* NaN: below minus infinity, whose bits give 0x007FFFFF */
    if (!isnan(score)) {
        const float plain = score + 0.0f; /* no negative zero */
        memcpy(&bits, &plain, sizeof bits);
        bits = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
    }
    return (uint64_t)bits << 32 | (uint32_t)position;
}

static uint64_t median_of_three(uint64_t a, uint64_t b, uint64_t c) { return DT_MAX(DT_MIN(a, b), DT_MIN(DT_MAX(a, b), c)); }

/* The k-th smallest (from 0) of n distinct keys, which get reordered. The pivots' places are pseudo-random, so that no order of
 * entries that occurs in practice makes it slow; the result does not depend on them. */
static uint64_t select_key(uint64_t *keys, int32_t n, int32_t k) {
    int32_t low = 0, high = n - 1;
    uint32_t random = 2463534242u;
    while (low < high) {
        uint64_t sample[3];
        for (int32_t i = 0; i < 3; i++) {
            random = random * 1664525u + 1013904223u;
            sample[i] = keys[low + (int32_t)((random >> 8) % (uint32_t)(high - low + 1))];
        }
        const uint64_t pivot = median_of_three(sample[0], sample[1], sample[2]);
        int32_t i = low, j = high;
        while (i <= j) {
            while (keys[i] < pivot) {
                i++;
            }
            while (keys[j] > pivot) {
                j--;
            }
            if (i <= j) {
                const uint64_t swapped = keys[i];
                keys[i++] = keys[j];
                keys[j--] = swapped;
            }
        }
        if (k <= j) {
            high = j;
        } else if (k >= i) {
            low = i;
        } else {
            break;
        }
    }
    return keys[k];
}

static size_t scores_bytes(int32_t n) { return DT_ROUND_UP((size_t)n * sizeof(float), (size_t)64); }

size_t dt_policy_scratch_bytes(int32_t n) { return scores_bytes(n) + (size_t)n * sizeof(uint64_t); }

int32_t dt_policy_recent_window(const dt_policy *policy, const dt_lane_view *view, int32_t n_keep) {
    const float beside_sinks = (float)DT_MAX((int64_t)n_keep - view->sink_tokens, 0);
    return DT_MAX(view->recent_window, (int32_t)(beside_sinks * policy->recent_share));
}

int32_t dt_policy_choose(const dt_policy *policy, const dt_lane_view *view, int32_t n_keep, int32_t *victims, void *scratch) {
    dt_lane_view guarded = *view;
    guarded.recent_window = dt_policy_recent_window(policy, view, n_keep);
    view = &guarded;
    int32_t n_free = 0;
    for (int32_t i = 0; i < view->n; i++) {
        n_free += !dt_pinned(view, i);
    }
    const int32_t n_victims = DT_MIN(view->n - view->n_slots - DT_MAX(n_keep, 0), n_free);
    if (n_victims <= 0) {
        return 0;
    }
    float *scores = scratch;
    uint64_t *keys = (uint64_t *)((char *)scratch + scores_bytes(view->n));
    policy->score(view, scores);
    int32_t n_keys = 0;
    for (int32_t i = 0; i < view->n; i++) {
        if (!dt_pinned(view, i)) {
            keys[n_keys++] = keep_key(scores[i], view->position[i]);
        }
    }
    const uint64_t highest_victim = select_key(keys, n_keys, n_victims - 1);
    int32_t n = 0;
    for (int32_t i = 0; i < view->n; i++) {
        if (!dt_pinned(view, i) && keep_key(scores[i], view->position[i]) <= highest_victim) {
            victims[n++] = i;
        }
    }
    return n;
}
