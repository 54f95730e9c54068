/*
 * Looking at a cache: lanes, positions, lengths, and the room that budgets leave. Changes nothing.
 */
#include "kv/kv_internal.h"

#include <math.h>
#include <string.h>

void dt_kv_lane(const dt_kv *kv, int32_t layer, int32_t lane_index, dt_kv_lane_view *out) {
    const dt_kv_lane_state *lane = &kv->layers[layer].lanes[lane_index];
    *out = (dt_kv_lane_view){
        .spans = lane->spans,
        .n_spans = lane->n_spans,
        .n_entries = lane->n_entries,
        .n_slots = lane->n_slots,
        .n_uncommitted = kv->n_uncommitted,
        .recent_mass = lane->recent_mass,
        .value_norm = lane->value_norm,
        .peak_mass = lane->peak_mass,
        .bias = lane->bias,
        .origin = lane->origin,
    };
}

void dt_kv_positions(const dt_kv *kv, int32_t layer_index, int32_t lane_index, int32_t *positions) {
    const dt_kv_layer_state *layer = &kv->layers[layer_index];
    const dt_kv_lane_state *lane = &layer->lanes[lane_index];
    for (int32_t i = 0; i < lane->n_spans; i++) {
        const dt_kv_span *span = &lane->spans[i];
        memcpy(positions, dt_kv_position(&layer->params.format, span->block), (size_t)span->n * sizeof *positions);
        positions += span->n;
    }
}

void dt_kv_origins(const dt_kv *kv, int32_t layer, int32_t lane_index, int32_t *origins) {
    const dt_kv_lane_state *lane = &kv->layers[layer].lanes[lane_index];
    if (lane->origin != NULL) {
        const dt_kv_format *f = &kv->layers[layer].params.format;
        for (int32_t i = 0; i < lane->n_entries; i++) {
            const int32_t position = dt_kv_entry_position(f, lane, i);
            origins[i] = dt_is_slot(position) ? position : lane->origin[i];
        }
    } else {
        dt_kv_positions(kv, layer, lane_index, origins);
    }
}

int32_t dt_kv_shift(const dt_kv *kv) { return kv->shift; }

int32_t dt_kv_length(const dt_kv *kv, int32_t layer_index) {
    const dt_kv_layer_state *layer = &kv->layers[layer_index];
    int32_t longest = 0;
    for (int32_t j = 0; j < layer->params.n_lanes; j++) {
        longest = DT_MAX(longest, layer->lanes[j].n_entries);
    }
    return longest;
}

int32_t dt_kv_blocks_of(const dt_kv *kv, int32_t layer) {
    return dt_kv_blocks(&kv->layers[layer].params.format, dt_kv_length(kv, layer));
}

double dt_kv_mean_length(const dt_kv *kv, int32_t layer_index) {
    const dt_kv_layer_state *layer = &kv->layers[layer_index];
    int64_t sum = 0;
    for (int32_t j = 0; j < layer->params.n_lanes; j++) {
        sum += layer->lanes[j].n_entries;
    }
    return (double)sum / layer->params.n_lanes;
}

const dt_kv_layer_params *dt_kv_layer(const dt_kv *kv, int32_t layer) { return &kv->layers[layer].params; }

double dt_kv_shared_length(const dt_kv *kv) {
    double total = 0;
    for (int32_t i = 0; i < kv->n_layers; i++) {
        const dt_kv_layer_state *layer = &kv->layers[i];
        int64_t n_slots = 0;
        for (int32_t j = 0; j < layer->params.n_lanes; j++) {
            n_slots += layer->lanes[j].n_slots;
        }
        total += layer->params.budget.policy != NULL ? dt_kv_mean_length(kv, i) - (double)n_slots / layer->params.n_lanes : 0;
    }
    return total;
}

int32_t dt_kv_layers_that_evict(const dt_kv *kv) {
    int32_t n = 0;
    for (int32_t i = 0; i < kv->n_layers; i++) {
        n += kv->layers[i].params.budget.policy != NULL;
    }
    return n;
}

int64_t dt_kv_shared_room(const dt_kv *kv) {
    const int32_t n_sharing = kv->total_cache_size > 0 ? dt_kv_layers_that_evict(kv) : 0;
    return n_sharing > 0 ? (int64_t)floor((kv->total_cache_size - dt_kv_shared_length(kv)) / n_sharing) : INT64_MAX;
}

int64_t dt_kv_room(const dt_kv *kv, int32_t layer_index, int64_t shared_room) {
    const dt_kv_layer_state *layer = &kv->layers[layer_index];
    int64_t room = shared_room;
    if (layer->params.budget.policy == NULL) {
        return INT64_MAX;
    }
    for (int32_t j = 0; j < layer->params.n_lanes; j++) {
        const int64_t max = dt_budget_of_lane(&layer->params.budget, j).max_cache_size;
        room = DT_MIN(room, max - (layer->lanes[j].n_entries - layer->lanes[j].n_slots));
    }
    return room;
}

bool dt_kv_exceeds(const dt_kv *kv, int32_t layer, int64_t n_more) { return n_more > dt_kv_room(kv, layer, dt_kv_shared_room(kv)); }

bool dt_kv_has_masses(const dt_kv *kv) {
    bool any = false;
    for (int32_t i = 0; i < kv->n_layers; i++) {
        const dt_kv_layer_state *layer = &kv->layers[i];
        for (int32_t j = 0; layer->has_mass && j < layer->params.n_lanes; j++) {
            const dt_kv_lane_state *lane = &layer->lanes[j];
            for (int32_t entry = 0; !any && entry < lane->n_entries; entry++) {
                any = lane->recent_mass[entry] > 0;
            }
        }
    }
    return any;
}

bool dt_kv_layer_needs_mass(const dt_kv *kv, int32_t layer) {
    return kv->layers[layer].has_mass && dt_budget_needs_mass(&kv->layers[layer].params.budget);
}

bool dt_kv_layer_needs_peak(const dt_kv *kv, int32_t layer) {
    return kv->layers[layer].has_peak && dt_budget_needs_peak(&kv->layers[layer].params.budget);
}

int32_t dt_kv_total_cache_size(const dt_kv *kv) { return kv->total_cache_size; }
