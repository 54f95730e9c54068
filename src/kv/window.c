/*
 * Sliding windows: in a layer with a window, an entry that the window has passed is seen by no later query and need not stay.
 *
 * Nothing that a model computes depends on this. It saves memory, and it keeps eviction honest: in a round the passed entries go
 * before a policy is asked, so that a budget is spent on what can still be seen. Passed sinks go like all others.
 * Invariant: what a query at next_position or later sees stays; so does, outside rounds, what one up to DT_KV_REWIND_BLOCKS blocks
 * earlier sees, so that a conversation can be taken back by a reply.
 */
#include "kv/kv_internal.h"

dt_status dt_kv_drop_passed(dt_kv *kv, int32_t layer, int32_t lane, int32_t first_kept, int32_t *n_dropped, dt_error *error) {
    dt_kv_lane_view view;
    dt_kv_lane(kv, layer, lane, &view);
    *n_dropped = 0;
    const size_t bytes = 2 * (size_t)view.n_entries * sizeof(int32_t);
    int32_t *positions = view.n_entries > 0 ? dt_kv_scratch(kv, bytes) : NULL;
    if (positions == NULL) {
        return view.n_entries == 0 ? DT_OK : dt_kv_fail_memory(kv, bytes, "dropping what a sliding window has passed", error);
    }
    int32_t *victims = positions + view.n_entries, n = 0;
    dt_kv_positions(kv, layer, lane, positions);
    for (int32_t i = 0; i < view.n_entries - view.n_uncommitted; i++) {
        if (positions[i] < first_kept) {
            victims[n++] = i;
        }
    }
    const dt_status status = n == 0 ? DT_OK : dt_kv_drop(kv, layer, lane, victims, n, error);
    *n_dropped = status == DT_OK ? n : 0;
    return status;
}

/* Entries that the lanes of a layer with a window may have before what it has passed goes. */
static int64_t most_entries(const dt_kv_layer_params *params) {
    return (int64_t)params->window + (DT_KV_REWIND_BLOCKS + 1) * (int64_t)params->format.block_tokens;
}

int64_t dt_kv_slide_room(const dt_kv *kv) {
    int64_t room = INT32_MAX;
    for (int32_t i = 0; i < kv->n_layers; i++) {
        const dt_kv_layer_params *params = &kv->layers[i].params;
        room = params->window > 0 ? DT_MIN(room, most_entries(params) - dt_kv_length(kv, i)) : room;
    }
    return room;
}

dt_status dt_kv_slide(dt_kv *kv, int32_t next_position, int32_t *whole_from, dt_error *error) {
    for (int32_t i = 0; i < kv->n_layers; i++) {
        const dt_kv_layer_params *params = &kv->layers[i].params;
        const int64_t rewind = (int64_t)DT_KV_REWIND_BLOCKS * params->format.block_tokens;
        const int64_t first_kept = (int64_t)next_position - rewind - params->window + 1;
        if (params->window == 0 || dt_kv_length(kv, i) <= most_entries(params)) {
            continue;
        }
        for (int32_t lane = 0; lane < params->n_lanes; lane++) {
            int32_t n = 0;
            const dt_status status = dt_kv_drop_passed(kv, i, lane, (int32_t)DT_MAX(first_kept, 0), &n, error);
            if (n > 0) {
                *whole_from = DT_MAX(*whole_from, next_position - (int32_t)rewind);
            }
            if (status != DT_OK) {
                return status;
            }
        }
    }
    return DT_OK;
}
