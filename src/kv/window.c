/*
 * Sliding windows: in a layer with a window, an entry that the window has passed is seen by no later query and need not stay.
 *
 * Nothing that a model computes depends on this. It saves memory, and it keeps eviction honest: in a round the passed entries go
 * before a policy is asked, so that a budget is spent on what can still be seen. Passed sinks go like all others.
 * Invariant: what a query at next_position or later sees stays; so does, outside rounds, what one up to DT_KV_REWIND_BLOCKS blocks
 * earlier sees, so that a conversation can be taken back by a reply.
 */
#include "kv/kv_internal.h"

/* The committed entries of a lane that were passed: *victims, in the cache's scratch. */
static dt_status find_passed(dt_kv *kv, int32_t layer, int32_t lane, const int32_t **victims, int32_t *n, dt_error *error) {
    dt_kv_lane_view view;
    dt_kv_lane(kv, layer, lane, &view);
    *victims = NULL;
    *n = 0;
    if (kv->layers[layer].passed <= 0 || view.n_entries == 0) {
        return DT_OK;
    }
    const size_t bytes = 2 * (size_t)view.n_entries * sizeof(int32_t);
    int32_t *positions = dt_kv_scratch(kv, bytes);
    if (positions == NULL) {
        return dt_kv_fail_memory(kv, bytes, "dropping what a sliding window has passed", error);
    }
    int32_t *passed = positions + view.n_entries;
    dt_kv_positions(kv, layer, lane, positions);
    for (int32_t i = 0; i < view.n_entries - view.n_uncommitted; i++) {
        if (positions[i] < kv->layers[layer].passed) {
            passed[(*n)++] = i;
        }
    }
    *victims = passed;
    return DT_OK;
}

/* Twice over the lanes: what takes memory, then what changes anything, for which the scratch is there then. */
dt_status dt_kv_drop_passed(dt_kv *kv, int64_t *n_dropped, dt_error *error) {
    dt_status status = DT_OK;
    *n_dropped = 0;
    for (int32_t drops = 0; drops < 2; drops++) {
        for (int32_t i = 0; i < kv->n_layers; i++) {
            for (int32_t j = 0; j < kv->layers[i].params.n_lanes && status == DT_OK; j++) {
                const int32_t *victims;
                int32_t n;
                status = find_passed(kv, i, j, &victims, &n, error);
                if (status != DT_OK || n == 0) {
                    continue;
                }
                if (drops != 0) {
                    status = dt_kv_drop(kv, i, j, victims, n, error);
                    *n_dropped += n;
                } else if (!dt_kv_prepare_drop(kv, i, j, victims, n)) {
                    status = dt_kv_fail_memory(kv, kv->layers[i].params.format.block_bytes,
                                               "dropping what a sliding window has passed", error);
                }
            }
        }
    }
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
    int32_t from = *whole_from;
    for (int32_t i = 0; i < kv->n_layers; i++) {
        const dt_kv_layer_params *params = &kv->layers[i].params;
        const int64_t rewind = (int64_t)DT_KV_REWIND_BLOCKS * params->format.block_tokens;
        const int64_t first_kept = (int64_t)next_position - rewind - params->window + 1;
        const bool is_due = params->window > 0 && dt_kv_length(kv, i) > most_entries(params);
        kv->layers[i].passed = is_due ? (int32_t)DT_MAX(first_kept, 0) : 0;
        from = kv->layers[i].passed > 0 ? DT_MAX(from, next_position - (int32_t)rewind) : from;
    }
    int64_t n = 0;
    const dt_status status = dt_kv_drop_passed(kv, &n, error);
    *whole_from = n > 0 ? from : *whole_from;
    return status;
}
