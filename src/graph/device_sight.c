/*
 * What a batch sees of caches on devices: the shape of its graph, masks, and the rows that its tokens go to (device_cache.h).
 */
#include "graph/device_cache_internal.h"

#include "weights/ggml_calls.h"

#include <string.h>

#define ROWS_ALIGNED 32 /* row numbers of a layer begin at multiples of so many: 256 bytes, what any device can bind */

/* ---- what a batch sees ---- */

/* What a layer's queries see, where that is more than what comes before them. */
typedef struct lane_sight {
    int32_t n_committed, n_kv;
    const int32_t *positions; /* NULL: not needed */
    const float *bias;        /* NULL: none */
    int32_t window;           /* 0: none, or out of reach */
    /* With a focus (first_block > 0) of the committed entries only these are seen: up to first_block, [focus_first, focus_end),
     * from batch_first on. */
    int32_t first_block, focus_first, focus_end, batch_first;
} lane_sight;

static bool window_matters(const dt_kv_layer_params *params, const dt_device_sight *sight) {
    return params->window > 0 && sight->first_position + sight->n_query - 1 >= params->window;
}

static bool is_plain(const dt_kv *kv, int32_t layer, const dt_device_sight *sight) {
    const dt_kv_layer_params *params = dt_kv_layer(kv, layer);
    bool plain = sight->focus_from == 0 && !window_matters(params, sight);
    for (int32_t lane = 0; plain && lane < params->n_lanes; lane++) {
        dt_kv_lane_view view;
        dt_kv_lane(kv, layer, lane, &view);
        plain = view.bias == NULL;
    }
    return plain;
}

static bool same_lengths(const dt_kv *kv, int32_t layer) { return dt_kv_mean_length(kv, layer) == (double)dt_kv_length(kv, layer); }

dt_status dt_device_cache_reserve(dt_device_cache *cache, const dt_kv *kv, const dt_device_sight *sight,
                                  const dt_device_shape **shape, dt_error *error) {
    dt_device_shape *s = &cache->shape;
    memset(s->n_mask, 0, sizeof s->n_mask);
    memset(s->n_rows, 0, sizeof s->n_rows);
    for (int32_t i = 0; i < cache->decoder->hp.n_layers; i++) {
        dt_device_layer *layer = &cache->layers[i];
        dt_device_layer_shape *own = &s->layers[i];
        *own = (dt_device_layer_shape){0};
        if (layer->device < 0) {
            continue;
        }
        const int32_t d = layer->device, length = dt_kv_length(kv, i);
        own->n_kv = DT_ROUND_UP(length, DT_N_KV_PAD);
        const dt_status status = dt_device_reserve_rows(cache, layer, own->n_kv, error);
        if (status != DT_OK) {
            return status;
        }
        own->generation = layer->generation;
        own->rows_at = s->n_rows[d];
        s->n_rows[d] += DT_ROUND_UP((int64_t)sight->n_query * layer->n_lanes, ROWS_ALIGNED);
        const bool shares = is_plain(kv, i, sight) && same_lengths(kv, i);
        own->n_masks = shares ? 1 : layer->n_lanes;
        own->mask_at = -1;
        for (int32_t j = 0; shares && j < i && own->mask_at < 0; j++) {
            if (cache->layers[j].device == d && s->layers[j].n_masks == 1 && dt_kv_length(kv, j) == length && same_lengths(kv, j) &&
                is_plain(kv, j, sight)) {
                own->mask_at = s->layers[j].mask_at;
            }
        }
        if (own->mask_at < 0) {
            own->mask_at = s->n_mask[d];
            s->n_mask[d] += (int64_t)own->n_kv * sight->n_query * own->n_masks;
        }
    }
    *shape = s;
    return DT_OK;
}

/* One query's row of a mask. index: which of the batch's it is. */
static void fill_row(const lane_sight *l, int32_t index, int32_t position, uint16_t *row) {
    const int32_t n_visible = l->n_committed + index + 1;
    memset(row, 0, (size_t)n_visible * sizeof *row);
    for (int32_t e = n_visible; e < l->n_kv; e++) {
        row[e] = DT_HALF_HIDDEN;
    }
    for (int32_t e = 0; l->bias != NULL && e < n_visible; e++) {
        row[e] = dt_f32_to_f16(l->bias[e]);
    }
    for (int32_t e = 0; l->window > 0 && e < n_visible; e++) {
        row[e] = l->positions[e] > position - l->window ? row[e] : DT_HALF_HIDDEN;
    }
    for (int32_t e = l->first_block; l->first_block > 0 && e < l->n_committed; e++) {
        row[e] = (e >= l->focus_first && e < l->focus_end) || e >= l->batch_first ? row[e] : DT_HALF_HIDDEN;
    }
}

static dt_status see_lane(dt_device_cache *cache, const dt_kv *kv, const dt_device_sight *sight, int32_t layer, int32_t lane,
                          lane_sight *out, dt_error *error) {
    const dt_kv_layer_params *params = dt_kv_layer(kv, layer);
    const int32_t block = params->format.block_tokens;
    dt_kv_lane_view view;
    dt_kv_lane(kv, layer, lane, &view);
    *out = (lane_sight){.n_committed = view.n_entries - view.n_uncommitted,
                        .n_kv = cache->shape.layers[layer].n_kv,
                        .bias = view.bias,
                        .window = window_matters(params, sight) ? params->window : 0};
    if (sight->focus_from > 0) { /* rounded outwards to blocks, as dt_batch says */
        out->first_block = block;
        out->focus_first = DT_MAX(out->n_committed - sight->focus_from, 0) / block * block;
        out->focus_end = DT_ROUND_UP(DT_MAX(out->n_committed - sight->focus_to, 0), block);
        out->batch_first = out->n_committed / block * block;
    }
    if (out->window > 0) {
        int32_t *positions = dt_device_reserve(cache, &cache->positions, (size_t)view.n_entries * sizeof *positions);
        if (positions == NULL) {
            return dt_fail_memory(error, (size_t)view.n_entries * sizeof *positions, "a mask");
        }
        dt_kv_positions(kv, layer, lane, positions);
        out->positions = positions;
    }
    return DT_OK;
}

static dt_status fill_masks(dt_device_cache *cache, const dt_kv *kv, const dt_device_sight *sight, int32_t device, uint16_t *out,
                            dt_error *error) {
    int64_t filled = 0; /* masks come in order; one that a later layer shares is there already */
    for (int32_t i = 0; i < cache->decoder->hp.n_layers; i++) {
        const dt_device_layer_shape *own = &cache->shape.layers[i];
        for (int32_t m = 0; cache->layers[i].device == device && own->mask_at == filled && m < own->n_masks; m++) {
            lane_sight lane;
            const dt_status status = see_lane(cache, kv, sight, i, m, &lane, error);
            if (status != DT_OK) {
                return status;
            }
            for (int32_t q = 0; q < sight->n_query; q++) {
                fill_row(&lane, q, sight->first_position + q, out + own->mask_at + ((int64_t)m * sight->n_query + q) * own->n_kv);
            }
        }
        if (cache->layers[i].device == device && own->mask_at == filled) {
            filled += (int64_t)own->n_kv * sight->n_query * own->n_masks;
        }
    }
    return DT_OK;
}

static void fill_rows(const dt_device_cache *cache, const dt_kv *kv, const dt_device_sight *sight, int32_t device, int64_t *out) {
    for (int32_t i = 0; i < cache->decoder->hp.n_layers; i++) {
        for (int32_t lane = 0; cache->layers[i].device == device && lane < cache->layers[i].n_lanes; lane++) {
            dt_kv_lane_view view;
            dt_kv_lane(kv, i, lane, &view);
            int64_t *row = out + cache->shape.layers[i].rows_at + (int64_t)lane * sight->n_query;
            for (int32_t q = 0; q < sight->n_query; q++) {
                row[q] = view.n_entries - sight->n_query + q;
            }
        }
    }
}

/* Queries of a repetition are no part of the text: they go to a row that nobody reads. */
static int64_t ring_row(const dt_device_sight *sight, int32_t query) {
    return sight->focus_from > 0 ? DT_RING : (sight->first_position + query) % DT_RING;
}

dt_status dt_device_cache_fill_inputs(dt_device_cache *cache, const dt_kv *kv, const dt_device_sight *sight, int32_t device,
                                      struct ggml_tensor *masks, struct ggml_tensor *rows, struct ggml_tensor *ring,
                                      dt_error *error) {
    const size_t mask_bytes = (size_t)cache->shape.n_mask[device] * sizeof(uint16_t);
    const size_t rows_bytes = (size_t)cache->shape.n_rows[device] * sizeof(int64_t);
    uint16_t *halves = masks != NULL ? dt_device_reserve(cache, &cache->masks, mask_bytes) : NULL;
    int64_t *numbers = rows != NULL ? dt_device_reserve(cache, &cache->rows, rows_bytes) : NULL;
    if ((masks != NULL && halves == NULL) || (rows != NULL && numbers == NULL)) {
        return dt_fail_memory(error, mask_bytes + rows_bytes, "what the device is told");
    }
    bool done = true;
    if (masks != NULL) {
        const dt_status status = fill_masks(cache, kv, sight, device, halves, error);
        if (status != DT_OK) {
            return status;
        }
        done = dt_ggml_set(masks, halves, 0, mask_bytes);
    }
    if (rows != NULL) {
        memset(numbers, 0, rows_bytes);
        fill_rows(cache, kv, sight, device, numbers);
        done = done && dt_ggml_set(rows, numbers, 0, rows_bytes);
    }
    if (ring != NULL) {
        int64_t kept[DT_RING];
        const int32_t n = DT_MIN(sight->n_query, DT_RING);
        for (int32_t i = 0; i < n; i++) {
            kept[i] = ring_row(sight, sight->n_query - n + i);
        }
        done = done && dt_ggml_set(ring, kept, 0, (size_t)n * sizeof kept[0]);
    }
    return done ? DT_OK
                : dt_fail(error, DT_ERR_COMPUTE, "the device %s does not take its input",
                          dt_device_name(cache->decoder->devices[device]));
}

void dt_device_cache_computed(dt_device_cache *cache, const dt_device_sight *sight) {
    for (int32_t i = DT_MAX(sight->n_query - DT_RING, 0); sight->focus_from == 0 && i < sight->n_query; i++) {
        cache->ring_position[ring_row(sight, i)] = sight->first_position + i;
    }
}
