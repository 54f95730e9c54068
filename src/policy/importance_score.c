/*
 * Policy importance_score, score "fast": tokens stay by how much attention they get, and how much they would change the output.
 *
 *   score = (mass / its mean) * (value norm / its mean) ^ 1/2
 *
 * - mass: what the last queries attend to is what the next ones need (SnapKV, Li et al. 2024). Not pooled over neighbours as SnapKV
 *   does: on text that goes on (deeptutor-eval kld) pooling over 3 or 7 tokens was worse at every budget from 48 to 512. What was
 *   attended to for long ("heavy hitters": H2O, Zhang et al. 2023) was worth nothing besides (docs/quality.md).
 * - value norm: attention to a token whose value is small moves nothing (VATP, Guo et al. 2024). The square root, since the norm
 *   says less than the attention does.
 *
 * RECENT_SHARE of what a lane keeps are its newest tokens whatever they score: attention so far says little about tokens that few
 * queries have seen. Without that the policy was worse than local_window at many budgets.
 * Divided by means over the lane, so that lanes of any size and number of heads compare.
 * Pure function of the view. Invariant: finite for all inputs; input that is not a finite positive number counts as 0.
 */
#include "policy/policy.h"

#include <math.h>

#define RECENT_SHARE 0.625f

static float amount(float value) { return dt_is_finite(value) && value > 0 ? value : 0; }

/* 1 / mean of the amounts, 0 where there are none: what follows is then 0 as well. */
static double inverse_mean(const float *values, int32_t n) {
    double sum = 0;
    for (int32_t i = 0; i < n; i++) {
        sum += (double)amount(values[i]);
    }
    return sum > 0 ? n / sum : 0;
}

static void score_parts(const dt_lane_view *view, bool values, float *out) {
    const int32_t n = view->n;
    const double mass_unit = inverse_mean(view->recent_mass, n), norm_unit = inverse_mean(view->value_norm, n);
    for (int32_t i = 0; i < n; i++) {
        const double attention = (double)amount(view->recent_mass[i]) * mass_unit;
        const double weight = values ? sqrt((double)amount(view->value_norm[i]) * norm_unit) : 1;
        out[i] = (float)DT_MIN(attention * weight, 1e30);
    }
}

static void score(const dt_lane_view *view, float *out) { score_parts(view, true, out); }
static void score_without_values(const dt_lane_view *view, float *out) { score_parts(view, false, out); }

const dt_policy dt_policy_importance_score = {
    .name = "importance_score", .score_name = "fast", .recent_share = RECENT_SHARE, .needs_mass = true, .score = score};

/* Without one of its parts each, to measure what that is worth (bench/quality.py). */
const dt_policy dt_policy_fast_without_values = {.name = "importance_score",
                                                 .score_name = "fast-without-values",
                                                 .recent_share = RECENT_SHARE,
                                                 .needs_mass = true,
                                                 .score = score_without_values};
const dt_policy dt_policy_fast_without_window = {
    .name = "importance_score", .score_name = "fast-without-window", .needs_mass = true, .score = score};
