/*
 * What a batch sees of caches on devices: the shape of its graph, masks, and the rows that its tokens go to (device_cache.h).
 */
#include "graph/device_cache_internal.h"

#include "weights/ggml_calls.h"

#include <string.h>

#define ROWS_ALIGNED 32 /* row numbers of a layer begin at multiples of so many: 256 bytes, what any device can bind */

/* ---- what a batch sees ---- */

/* What a layer's queries see of a lane, where that is more than what comes before them. */
typedef struct lane_sight {
    int32_t n_committed, n_kv;
    const int32_t *positions; /* [entries]; NULL: not needed */
    const float *bias;        /* [entries]; NULL: none */
    int32_t window;           /* 0: none, or out of reach */
    const int32_t *seen;      /* [n_seen] entries, of which the columns of the mask are; NULL: of all, in order */
    int32_t n_seen;
} lane_sight;

/* With a focus a batch sees of a lane only the first block, the blocks of its focus, and what its own block and it are in: as
 * dt_sequence says. The entries, ascending, into out, which may be NULL; returns how many. *column: where the focus begins. */
static int32_t find_seen(const dt_kv *kv, const dt_device_sight *sight, int32_t layer, int32_t lane, int32_t *out,
                         int32_t *column) {
    const int32_t block = dt_kv_layer(kv, layer)->format.block_tokens;
    dt_kv_lane_view view;
    dt_kv_lane(kv, layer, lane, &view);
    const int32_t n_committed = view.n_entries - view.n_uncommitted, first = DT_MAX(n_committed - sight->focus_from, 0);
    const int32_t focus_first = first / block * block, focus_end = DT_ROUND_UP(DT_MAX(n_committed - sight->focus_to, 0), block);
    const int32_t batch_first = n_committed / block * block;
    int32_t n = 0;
    *column = 0;
    for (int32_t e = 0; e < view.n_entries; e++) {
        *column = e == first ? n : *column;
        if (e < block || (e >= focus_first && e < focus_end) || e >= batch_first) {
            if (out != NULL) {
                out[n] = e;
            }
            n++;
        }
    }
    return n;
}

int32_t dt_device_cache_focus_column(const dt_kv *kv, const dt_device_sight *sight, int32_t layer, int32_t lane) {
    int32_t column;
    (void)find_seen(kv, sight, layer, lane, NULL, &column);
    return column;
}

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

/* With a focus attention runs over what is seen, gathered: its cost does not depend on the length of the cache. */
static void focus_layer(dt_device_shape *s, const dt_kv *kv, const dt_device_sight *sight, int32_t layer, int32_t device) {
    dt_device_layer_shape *own = &s->layers[layer];
    const int32_t n_lanes = dt_kv_layer(kv, layer)->n_lanes;
    own->seen_at = own->peaks_at = -1;
    if (sight->focus_from == 0) {
        return;
    }
    int32_t most = 0, column;
    for (int32_t lane = 0; lane < n_lanes; lane++) {
        most = DT_MAX(most, find_seen(kv, sight, layer, lane, NULL, &column));
    }
    own->n_kv = DT_ROUND_UP(most, DT_N_KV_PAD);
    own->seen_at = s->n_seen[device];
    s->n_seen[device] += (int64_t)own->n_kv * n_lanes; /* N_KV_PAD is aligned enough for any device */
    if (sight->peaks != NULL && sight->peaks[layer]) {
        own->peaks_at = s->n_peaks;
        s->n_peaks += (int64_t)own->n_kv * n_lanes;
    }
}

dt_status dt_device_cache_reserve(dt_device_cache *cache, const dt_kv *kv, const dt_device_sight *sight,
                                  const dt_device_shape **shape, dt_error *error) {
    dt_device_shape *s = &cache->shape;
    memset(s->n_mask, 0, sizeof s->n_mask);
    memset(s->n_rows, 0, sizeof s->n_rows);
    memset(s->n_seen, 0, sizeof s->n_seen);
    s->n_peaks = 0;
    for (int32_t i = 0; i < cache->decoder->hp.n_layers; i++) {
        dt_device_layer *layer = &cache->layers[i];
        dt_device_layer_shape *own = &s->layers[i];
        *own = (dt_device_layer_shape){0};
        if (layer->device < 0) {
            continue;
        }
        const int32_t d = layer->device, length = dt_kv_length(kv, i);
        own->n_kv = DT_ROUND_UP(length, DT_N_KV_PAD);
        dt_status status = dt_device_reserve_rows(cache, layer, own->n_kv, error);
        status = status == DT_OK ? dt_device_reserve_ring(cache, layer, error) : status;
        if (status != DT_OK) {
            return status;
        }
        focus_layer(s, kv, sight, i, d);
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

static uint16_t mask_of(const lane_sight *l, int32_t entry, int32_t position) {
    const bool passed = l->window > 0 && l->positions[entry] <= position - l->window;
    return passed ? DT_HALF_HIDDEN : l->bias != NULL ? dt_f32_to_f16(l->bias[entry]) : 0;
}

/* One query's row of a mask. index: which of the batch's it is. */
static void fill_row(const lane_sight *l, int32_t index, int32_t position, uint16_t *row) {
    const int32_t n_visible = l->n_committed + index + 1;
    int32_t n = n_visible;
    if (l->seen != NULL) {
        for (n = 0; n < l->n_seen && l->seen[n] < n_visible; n++) {
            row[n] = mask_of(l, l->seen[n], position);
        }
    } else if (l->window > 0 || l->bias != NULL) {
        for (int32_t e = 0; e < n; e++) {
            row[e] = mask_of(l, e, position);
        }
    } else {
        memset(row, 0, (size_t)n * sizeof *row);
    }
    for (; n < l->n_kv; n++) {
        row[n] = DT_HALF_HIDDEN;
    }
}

static dt_status see_lane(dt_device_cache *cache, const dt_kv *kv, const dt_device_sight *sight, int32_t layer, int32_t lane,
                          lane_sight *out, dt_error *error) {
    const dt_kv_layer_params *params = dt_kv_layer(kv, layer);
    dt_kv_lane_view view;
    dt_kv_lane(kv, layer, lane, &view);
    *out = (lane_sight){.n_committed = view.n_entries - view.n_uncommitted,
                        .n_kv = cache->shape.layers[layer].n_kv,
                        .bias = view.bias,
                        .window = window_matters(params, sight) ? params->window : 0};
    if (out->window == 0 && sight->focus_from == 0) {
        return DT_OK;
    }
    const size_t bytes = 2 * (size_t)view.n_entries * sizeof(int32_t);
    int32_t *positions = dt_device_reserve(cache, &cache->positions, bytes), column;
    if (positions == NULL) {
        return dt_fail_memory(error, bytes, "a mask");
    }
    int32_t *seen = positions + view.n_entries;
    dt_kv_positions(kv, layer, lane, positions);
    out->positions = positions;
    if (sight->focus_from > 0) {
        out->seen = seen;
        out->n_seen = find_seen(kv, sight, layer, lane, seen, &column);
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

/* out is zeroed: what pads a lane's list is its first row, which the mask hides there. */
static void fill_seen(const dt_device_cache *cache, const dt_kv *kv, const dt_device_sight *sight, int32_t device, int32_t *out) {
    for (int32_t i = 0; i < cache->decoder->hp.n_layers; i++) {
        const dt_device_layer_shape *own = &cache->shape.layers[i];
        for (int32_t lane = 0; cache->layers[i].device == device && lane < cache->layers[i].n_lanes; lane++) {
            int32_t column;
            (void)find_seen(kv, sight, i, lane, out + own->seen_at + (int64_t)lane * own->n_kv, &column);
        }
    }
}

/* Queries of a repetition are no part of the text: they go to a row that nobody reads. */
static int64_t ring_row(const dt_device_sight *sight, int32_t query) {
    return sight->focus_from > 0 ? DT_RING : (sight->first_index + query) % DT_RING;
}

static dt_status set_masks(dt_device_cache *cache, const dt_kv *kv, const dt_device_sight *sight, int32_t device,
                           struct ggml_tensor *masks, bool *done, dt_error *error) {
    const size_t bytes = (size_t)cache->shape.n_mask[device] * sizeof(uint16_t);
    uint16_t *halves = dt_device_reserve(cache, &cache->masks, bytes);
    if (halves == NULL) {
        return dt_fail_memory(error, bytes, "what the device is told");
    }
    const dt_status status = fill_masks(cache, kv, sight, device, halves, error);
    *done = status == DT_OK && dt_ggml_set(masks, halves, 0, bytes);
    return status;
}

/* One after the other, in the same scratch. */
static bool set_rows(dt_device_cache *cache, const dt_kv *kv, const dt_device_sight *sight, int32_t device,
                     const dt_device_inputs *inputs) {
    const size_t row_bytes = (size_t)cache->shape.n_rows[device] * sizeof(int64_t);
    const size_t seen_bytes = (size_t)cache->shape.n_seen[device] * sizeof(int32_t);
    void *numbers = dt_device_reserve(cache, &cache->rows, DT_MAX(row_bytes, seen_bytes));
    if (numbers == NULL) {
        return false;
    }
    memset(numbers, 0, row_bytes);
    fill_rows(cache, kv, sight, device, numbers);
    bool done = dt_ggml_set(inputs->rows, numbers, 0, row_bytes);
    if (done && inputs->seen != NULL) {
        memset(numbers, 0, seen_bytes);
        fill_seen(cache, kv, sight, device, numbers);
        done = dt_ggml_set(inputs->seen, numbers, 0, seen_bytes);
    }
    return done;
}

dt_status dt_device_cache_fill_inputs(dt_device_cache *cache, const dt_kv *kv, const dt_device_sight *sight, int32_t device,
                                      const dt_device_inputs *inputs, dt_error *error) {
    bool done = true;
    const dt_status status = set_masks(cache, kv, sight, device, inputs->masks, &done, error);
    if (status != DT_OK) {
        return status;
    }
    done = done && set_rows(cache, kv, sight, device, inputs);
    if (done && inputs->ring != NULL) {
        int64_t kept[DT_RING];
        const int32_t n = DT_MIN(sight->n_query, DT_RING);
        for (int32_t i = 0; i < n; i++) {
            kept[i] = ring_row(sight, sight->n_query - n + i);
        }
        done = dt_ggml_set(inputs->ring, kept, 0, (size_t)n * sizeof kept[0]);
    }
    return done ? DT_OK
                : dt_fail(error, DT_ERR_COMPUTE, "the device %s does not take its input",
                          dt_device_name(cache->decoder->devices[device]));
}

void dt_device_cache_computed(dt_device_cache *cache, const dt_device_sight *sight) {
    for (int32_t i = DT_MAX(sight->n_query - DT_RING, 0); sight->focus_from == 0 && i < sight->n_query; i++) {
        cache->ring_index[ring_row(sight, i)] = sight->first_index + i;
    }
}
