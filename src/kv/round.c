/*
 * Eviction rounds: in a layer in which a lane has outgrown its budget, every lane over it goes down to the low-water mark at once,
 * so that the cost of choosing is spread over the tokens until the next round.
 *
 * Owns no memory of its own: positions, victims and the policy's scratch lie in the cache's scratch, which is kept between rounds.
 * Invariant: only committed, unpinned entries go; a lane is either treated whole or not at all.
 */
#include "kv/kv_internal.h"

#include <math.h>

static size_t position_row_bytes(int32_t n) { return DT_ROUND_UP((size_t)n * sizeof(int32_t), (size_t)64); }

size_t dt_kv_round_bytes(int32_t n) { return 2 * position_row_bytes(n) + dt_policy_scratch_bytes(n); }

/* Evicts from one lane; *n_evicted and result->newest_evicted tell what went. */
static dt_status lane_round(dt_kv *kv, int32_t layer, int32_t lane, int32_t next_position, bool exact, int32_t *n_evicted,
                            dt_round_result *result, dt_error *error) {
    const dt_budget *budget = &kv->layers[layer].params.budget;
    dt_kv_lane_view view;
    dt_kv_lane(kv, layer, lane, &view);
    const size_t row_bytes = position_row_bytes(view.n_entries), bytes = dt_kv_round_bytes(view.n_entries);
    char *scratch = dt_kv_scratch(kv, bytes);
    if (scratch == NULL) {
        return dt_fail_memory(error, bytes, "choosing what to evict");
    }
    int32_t *positions = (int32_t *)scratch, *victims = (int32_t *)(scratch + row_bytes);
    dt_kv_positions(kv, layer, lane, positions);
    const dt_lane_view entries = {
        .n = view.n_entries,
        .position = positions,
        .recent_mass = view.recent_mass,
        .total_mass = view.total_mass,
        .value_norm = view.value_norm,
        .next_position = next_position,
        .sink_tokens = budget->sink_tokens,
        .recent_window = budget->recent_window,
    };
    const int32_t n_keep = exact ? budget->max_cache_size : dt_budget_low_water(budget);
    const int32_t n = dt_policy_choose(budget->policy, &entries, n_keep, victims, scratch + 2 * row_bytes);
    const dt_status status = dt_kv_drop(kv, layer, lane, victims, n, error);
    if (status == DT_OK) {
        *n_evicted = n;
        for (int32_t i = 0; i < n; i++) {
            result->newest_evicted = DT_MAX(result->newest_evicted, positions[victims[i]]);
        }
    }
    return status;
}

/* *evicted: tokens that went, summed over the layer's lanes. */
static dt_status layer_round(dt_kv *kv, int32_t layer, int32_t next_position, bool exact, int64_t *evicted, dt_round_result *result,
                             dt_error *error) {
    const dt_kv_layer_state *state = &kv->layers[layer];
    dt_status status = DT_OK;
    for (int32_t lane = 0; lane < state->params.n_lanes && status == DT_OK; lane++) {
        if (state->lanes[lane].n_entries > state->params.budget.max_cache_size) {
            int32_t n = 0;
            status = lane_round(kv, layer, lane, next_position, exact, &n, result, error);
            *evicted += n;
        }
    }
    return status;
}

dt_status dt_kv_round(dt_kv *kv, int32_t next_position, bool exact, dt_round_result *result, dt_error *error) {
    *result = (dt_round_result){.newest_evicted = -1};
    if (kv->n_uncommitted > 0) {
        return dt_fail(error, DT_ERR_ARGUMENT, "%d tokens are not committed yet: commit them before an eviction round",
                       kv->n_uncommitted);
    }
    double mean_evicted = 0;
    dt_status status = DT_OK;
    for (int32_t i = 0; i < kv->n_layers && status == DT_OK; i++) {
        const dt_kv_layer_params *params = &kv->layers[i].params;
        if (params->budget.policy != NULL && dt_kv_length(kv, i) > params->budget.max_cache_size) {
            int64_t evicted = 0;
            status = layer_round(kv, i, next_position, exact, &evicted, result, error);
            result->n_rounds += evicted > 0;
            mean_evicted += (double)evicted / params->n_lanes;
        }
    }
    result->n_evicted = (int64_t)llround(mean_evicted);
    return status;
}
