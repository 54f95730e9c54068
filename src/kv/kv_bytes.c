/*
 * What a cache takes in memory: now, for so many tokens, and at most.
 *
 * Invariant: a bound is never below what dt_memory counts, temporary copies included; settings are chosen by it (engine/kv_plan.c).
 */
#include "kv/kv_internal.h"

size_t dt_kv_bytes(const dt_kv *kv) {
    size_t bytes = sizeof *kv + dt_kv_layers_bytes(kv) + dt_kv_lanes_bytes(kv) + kv->scratch_bytes;
    void *spare = atomic_load(&kv->spare);
    bytes += spare == NULL ? 0 : dt_kv_block_bytes(&kv->layers[dt_kv_head(spare)->layer]);
    bytes += kv->home == NULL ? 0 : kv->home->ops->bytes(kv->home);
    for (int32_t i = 0; i < kv->n_layers; i++) {
        const dt_kv_layer_state *layer = &kv->layers[i];
        for (int32_t j = 0; j < layer->params.n_lanes; j++) {
            const dt_kv_lane_state *lane = &layer->lanes[j];
            bytes += (size_t)lane->n_spans * dt_kv_block_bytes(layer);
            bytes += dt_kv_array_bytes(layer, lane->capacity_blocks, lane->bias != NULL);
        }
    }
    return bytes;
}

size_t dt_kv_bytes_for(const dt_kv *kv, int32_t n) {
    size_t bytes = sizeof *kv + dt_kv_layers_bytes(kv) + dt_kv_lanes_bytes(kv);
    bytes += kv->home == NULL ? 0 : kv->home->ops->bytes_for(kv->home, n);
    for (int32_t i = 0; i < kv->n_layers; i++) {
        dt_kv_layer_state layer = kv->layers[i];
        layer.has_mass = layer.has_peak = layer.params.keeps_origins = false; /* they are for evicting */
        const int32_t blocks = dt_kv_blocks(&layer.params.format, n);
        bytes += (size_t)layer.params.n_lanes * ((size_t)blocks * dt_kv_block_bytes(&layer) +
                                                 dt_kv_array_bytes(&layer, blocks == 0 ? 0 : dt_kv_capacity_blocks(blocks), false));
    }
    return bytes;
}

/* The sum so far, and what is taken only once. */
typedef struct bytes_bound {
    size_t bytes, arrays, block, scratch, n_entries;
    int32_t n_lanes;
} bytes_bound;

/* Adds n lanes of this length. */
static void bound_lanes(bytes_bound *b, const dt_kv_layer_state *layer, int32_t n_lanes, int32_t length, bool has_bias) {
    const int32_t blocks = dt_kv_blocks(&layer->params.format, length);
    const dt_budget *budget = &layer->params.budget;
    const size_t lane_arrays =
        dt_kv_array_bytes(layer, dt_kv_capacity_blocks(DT_MAX(blocks, 1)), has_bias || budget->memory_slots > 0);
    const size_t scratch =
        budget->policy != NULL ? DT_KV_ROUND_THREADS * dt_kv_round_bytes(&layer->params, length) : (size_t)length * sizeof(int32_t);
    b->bytes += (size_t)n_lanes * (DT_KV_LANE_BYTES + (size_t)blocks * dt_kv_block_bytes(layer) + lane_arrays);
    b->n_lanes += n_lanes;
    b->n_entries += (size_t)n_lanes * (size_t)length;
    b->arrays = DT_MAX(b->arrays, lane_arrays);            /* of a lane, twice while they are resized */
    b->block = DT_MAX(b->block, dt_kv_block_bytes(layer)); /* the spare one */
    b->scratch = DT_MAX(b->scratch, scratch);
}

static size_t bound_end(const bytes_bound *b, int32_t n_layers, int32_t total_cache_size) {
    const size_t shared = total_cache_size > 0 ? dt_kv_shared_bytes(b->n_lanes, b->n_entries) : 0;
    return sizeof(dt_kv) + (size_t)n_layers * sizeof(dt_kv_layer_state) + b->bytes + DT_KV_ROUND_THREADS * b->arrays + b->block +
           2 * DT_MAX(b->scratch, shared); /* twice while it grows */
}

size_t dt_kv_bytes_bound(const dt_kv_layer_params *layers, int32_t n_layers, const int32_t *longest, int32_t total_cache_size) {
    bytes_bound bound = {0};
    for (int32_t i = 0; i < n_layers; i++) {
        const dt_kv_layer_state layer = {.params = layers[i],
                                         .has_mass = dt_budget_needs_mass(&layers[i].budget),
                                         .has_peak = dt_budget_needs_peak(&layers[i].budget)};
        bound_lanes(&bound, &layer, layers[i].n_lanes, longest[i], false);
    }
    return bound_end(&bound, n_layers, total_cache_size);
}

size_t dt_kv_bytes_most(const dt_kv *kv, const int32_t *lengths, bool has_bias) {
    bytes_bound bound = {0};
    for (int32_t i = 0; i < kv->n_layers; i++) {
        for (int32_t j = 0; j < kv->layers[i].params.n_lanes; j++) {
            bound_lanes(&bound, &kv->layers[i], 1, *lengths++, has_bias);
        }
    }
    return bound_end(&bound, kv->n_layers, kv->total_cache_size);
}
