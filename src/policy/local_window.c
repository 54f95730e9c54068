/*
 * Policy local_window: the newest tokens stay, and with them the sinks, which are pinned. This is StreamingLLM (Xiao et al. 2023,
 * "Efficient Streaming Language Models with Attention Sinks") with a window per layer, except that keys keep their original
 * positions.
 *
 * Needs no attention mass. Invariant: the score grows with the position and with nothing else.
 */
#include "policy/policy.h"

static void score(const dt_lane_view *view, float *out) {
    for (int32_t i = 0; i < view->n; i++) {
        out[i] = (float)view->position[i]; /* positions past 2^24 may round to equal scores: the younger one stays all the same */
    }
}

const dt_policy dt_policy_local_window = {.name = "local_window", .needs_mass = false, .score = score};
