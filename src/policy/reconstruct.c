/*
 * Policy importance_score with "score": "reconstruct": tokens stay by the most attention that any query gave them while the model
 * said its text again (KVzip, Kim et al. 2025, arXiv 2505.23416; how that is done: engine/session_scores.c).
 *
 * What is needed to repeat the text is what a question about it may need, whatever the question. The largest probability, not a
 * sum: a token that one query depends on wholly is worth more than one that all glance at. Being probabilities, scores of different
 * lanes compare, so that a shared budget finds the few lanes that look far back. What the last queries attend to is added, without
 * which a small cache does badly while the text goes on (dt_in_use). Pure function of the view. Invariant: finite for all inputs;
 * input that is not a finite positive number counts as 0.
 */
#include "policy/policy.h"

static void score_without_attention(const dt_lane_view *view, float *out) {
    for (int32_t i = 0; i < view->n; i++) {
        const float peak = view->peak_mass[i];
        out[i] = dt_is_finite(peak) && peak > 0 ? DT_MIN(peak, 1e18f) : 0;
    }
}

static void score(const dt_lane_view *view, float *out) {
    score_without_attention(view, out);
    for (int32_t i = 0; i < view->n; i++) {
        out[i] += dt_in_use(view, i);
    }
}

const dt_policy dt_policy_reconstruct = {
    .name = "importance_score", .score_name = "reconstruct", .needs_mass = true, .needs_peak = true, .score = score};

/* To measure what that part is worth. */
const dt_policy dt_policy_reconstruct_without_attention = {.name = "importance_score",
                                                           .score_name = "reconstruct-without-attention",
                                                           .needs_mass = true,
                                                           .needs_peak = true,
                                                           .score = score_without_attention};
