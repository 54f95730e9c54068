/*
 * Policy importance_score: tokens stay by how much attention they get, and how much they would change the output.
 *
 *   score = (pooled recent + TOTAL_SHARE * total) * (value norm / its mean) ^ 1/2
 *
 * - recent: what the last queries attend to is what the next ones need (SnapKV, Li et al. 2024). Pooled by maximum over the
 *   neighbours within POOL_REACH positions, as SnapKV does, so that a kept token keeps the few around it that give it meaning.
 *   Sinks lend nothing to their neighbours: their mass says nothing about content.
 * - total: tokens attended to for long ("heavy hitters": H2O, Zhang et al. 2023), as a smaller part. A mean per query, so that
 * early tokens gain nothing from having been there longer (dt_mass_fold); H2O's plain sum freezes the cache at its beginning.
 * - value norm: attention to a token whose value is small moves nothing (VATP, Guo et al. 2024). The square root, since the norm
 *   says less than the attention does.
 *
 * recent and total are divided by their mean over the lane, so that the parts weigh the same for any number of heads and entries.
 * Pure function of the view. Invariant: finite for all inputs; input that is not a finite positive number counts as 0.
 */
#include "policy/policy.h"

#include <math.h>
#include <string.h>

#define POOL_REACH 3 /* a kernel of 7 */
#define TOTAL_SHARE 0.25f

static float amount(float value) { return dt_is_finite(value) && value > 0 ? value : 0; }

/* 1 / mean of the amounts, 0 where there are none: what follows is then 0 as well. */
static double inverse_mean(const float *values, int32_t n) {
    double sum = 0;
    for (int32_t i = 0; i < n; i++) {
        sum += (double)amount(values[i]);
    }
    return sum > 0 ? n / sum : 0;
}

/* Entries as position << 32 | index, ascending, in `from` or `to`: whichever is returned. Bytewise radix sort: linear, stable. */
static uint64_t *sort_by_position(const dt_lane_view *view, uint64_t *from, uint64_t *to) {
    uint32_t highest = 0;
    for (int32_t i = 0; i < view->n; i++) {
        from[i] = (uint64_t)(uint32_t)view->position[i] << 32 | (uint32_t)i;
        highest = DT_MAX(highest, (uint32_t)view->position[i]);
    }
    for (int shift = 32; shift < 64 && (highest >> (shift - 32)) != 0; shift += 8) {
        int32_t start[256] = {0};
        for (int32_t i = 0; i < view->n; i++) {
            start[from[i] >> shift & 255]++;
        }
        for (int32_t digit = 0, sum = 0; digit < 256; digit++) {
            const int32_t count = start[digit];
            start[digit] = sum;
            sum += count;
        }
        for (int32_t i = 0; i < view->n; i++) {
            to[start[from[i] >> shift & 255]++] = from[i];
        }
        uint64_t *const sorted = to;
        to = from;
        from = sorted;
    }
    return from;
}

static void score(const dt_lane_view *view, float *out, void *scratch) {
    const int32_t n = view->n;
    const uint64_t *order = sort_by_position(view, scratch, (uint64_t *)scratch + n);
    const double recent_unit = inverse_mean(view->recent_mass, n), total_unit = inverse_mean(view->total_mass, n);
    const double norm_unit = inverse_mean(view->value_norm, n);
    int32_t first = 0; /* of the neighbours */
    for (int32_t i = 0; i < n; i++) {
        const int32_t entry = (int32_t)(order[i] & 0xFFFFFFFFu), position = view->position[entry];
        while (view->position[order[first] & 0xFFFFFFFFu] < position - POOL_REACH) {
            first++;
        }
        float pooled = amount(view->recent_mass[entry]);
        for (int32_t j = first; j < n && (int64_t)(order[j] >> 32) <= (int64_t)position + POOL_REACH; j++) {
            if ((int64_t)(order[j] >> 32) >= view->sink_tokens) {
                pooled = DT_MAX(pooled, amount(view->recent_mass[order[j] & 0xFFFFFFFFu]));
            }
        }
        const double attention =
            (double)pooled * recent_unit + (double)TOTAL_SHARE * (double)amount(view->total_mass[entry]) * total_unit;
        out[entry] = (float)DT_MIN(attention * sqrt((double)amount(view->value_norm[entry]) * norm_unit), 1e30);
    }
}

const dt_policy dt_policy_importance_score = {.name = "importance_score", .needs_mass = true, .score = score};
