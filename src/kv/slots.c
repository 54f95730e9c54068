/*
 * Memory slots in the cache: what a round evicts from a lane is merged into the lane's slots before it is dropped.
 *
 * A slot is a committed entry like any other, told from a token by its position alone: that of one of the tokens it stands for, as
 * ~position, a negative number. So it needs no place of its own, is pinned (dt_pinned), is copied, shared, moved and saved with the
 * others, and a query sees it from every later position. How merging works is policy/memory_slots.c's; here entries are read and
 * written.
 *
 * Invariants: a round leaves at most memory_slots slots in a lane that it evicts from; a failure leaves the lane as it was; what is
 * written is rounded as attention's store rounds.
 */
#include "kv/kv_internal.h"
#include "policy/memory_slots.h"

#include <math.h>

static size_t indices_bytes(int32_t n_entries) { return DT_ROUND_UP((size_t)n_entries * sizeof(int32_t), (size_t)64); }

size_t dt_kv_slots_bytes(const dt_kv_layer_params *params, int32_t n_entries) {
    const int32_t capacity = params->budget.memory_slots;
    return indices_bytes(n_entries) + (capacity > 0 ? dt_slots_bytes(capacity, params->format.dim_k, params->format.dim_v) : 0);
}

/* ---- entries as numbers ---- */

static void read_numbers(const dt_kv_format *f, void *block, int32_t entry, float *key, float *value) {
    for (int32_t d = 0; d < f->dim_k; d++) {
        const char *at = (const char *)block + dt_kv_key_offset(f, entry, d);
        key[d] = f->type_k == DT_KV_F16 ? dt_f16_to_f32(*(const uint16_t *)(const void *)at)
                                        : dt_kv_k_scale(f, block)[entry] * (float)(*(const uint8_t *)at - 128);
    }
    const char *row = (const char *)block + f->v_offset + (size_t)entry * dt_kv_value_row_bytes(f);
    for (int32_t d = 0; d < f->dim_v; d++) {
        value[d] = f->type_v == DT_KV_F16 ? dt_f16_to_f32(((const uint16_t *)(const void *)row)[d])
                                          : dt_kv_v_scale(f, block)[entry] * (float)((const int8_t *)row)[d];
    }
}

/* The scale of x[n] as signed bytes; returns its inverse, 0 where all are stored as 0. */
static float quantizer(const float *x, int32_t n, float *scale) {
    float largest = 0;
    for (int32_t i = 0; i < n; i++) {
        largest = DT_MAX(largest, fabsf(x[i]));
    }
    const bool tiny = largest <= 1e-30f;
    *scale = tiny ? 0 : largest / 127.0f;
    return tiny ? 0 : 127.0f / largest;
}

/* Means of stored numbers are within the range of stored numbers. */
static void write_numbers(const dt_kv_format *f, void *block, int32_t entry, const float *key, const float *value) {
    float inverse = f->type_k == DT_KV_INT8 ? quantizer(key, f->dim_k, &dt_kv_k_scale(f, block)[entry]) : 0;
    for (int32_t d = 0; d < f->dim_k; d++) {
        char *at = (char *)block + dt_kv_key_offset(f, entry, d);
        if (f->type_k == DT_KV_F16) {
            *(uint16_t *)(void *)at = dt_f32_to_f16(key[d]);
        } else {
            *(uint8_t *)at = (uint8_t)((int32_t)nearbyintf(key[d] * inverse) + 128);
        }
    }
    char *row = (char *)block + f->v_offset + (size_t)entry * dt_kv_value_row_bytes(f);
    inverse = f->type_v == DT_KV_INT8 ? quantizer(value, f->dim_v, &dt_kv_v_scale(f, block)[entry]) : 0;
    for (int32_t d = 0; d < f->dim_v; d++) {
        if (f->type_v == DT_KV_F16) {
            ((uint16_t *)(void *)row)[d] = dt_f32_to_f16(value[d]);
        } else {
            ((int8_t *)row)[d] = (int8_t)nearbyintf(value[d] * inverse);
        }
    }
}

static float norm(const float *x, int32_t n) {
    double squares = 0;
    for (int32_t i = 0; i < n; i++) {
        squares += (double)x[i] * (double)x[i];
    }
    return (float)sqrt(squares);
}

/* ---- slots of a lane ---- */

static void *block_of(const dt_kv_layer_state *layer, const dt_kv_lane_state *lane, int32_t entry) {
    return lane->spans[entry / layer->params.format.block_tokens].block;
}

static void read_slot(const dt_kv_layer_state *layer, const dt_kv_lane_state *lane, int32_t entry, dt_slot *out) {
    const dt_kv_format *f = &layer->params.format;
    void *block = block_of(layer, lane, entry);
    const int32_t position = dt_kv_position(f, block)[entry % f->block_tokens];
    read_numbers(f, block, entry % f->block_tokens, out->key, out->value);
    out->position = dt_is_slot(position) ? ~position : position;
    out->bias = dt_is_slot(position) ? lane->bias[entry] : 0;
    out->recent_mass = layer->has_mass ? lane->recent_mass[entry] : 0;
    out->total_mass = layer->has_mass ? lane->total_mass[entry] : 0;
}

static void write_slot(const dt_kv_layer_state *layer, const dt_kv_lane_state *lane, int32_t entry, const dt_slot *slot) {
    const dt_kv_format *f = &layer->params.format;
    void *block = block_of(layer, lane, entry);
    write_numbers(f, block, entry % f->block_tokens, slot->key, slot->value);
    dt_kv_position(f, block)[entry % f->block_tokens] = ~slot->position;
    lane->bias[entry] = slot->bias;
    if (layer->has_mass) {
        lane->recent_mass[entry] = slot->recent_mass;
        lane->total_mass[entry] = slot->total_mass;
        lane->value_norm[entry] = norm(slot->value, f->dim_v);
    }
    if (layer->has_peak) {
        lane->peak_mass[entry] = 0; /* nobody scores a slot */
    }
}

/* The victims and the slots, ascending. */
static int32_t find_merged(const dt_kv_layer_state *layer, const dt_kv_lane_state *lane, int32_t n_committed,
                           const int32_t *victims, int32_t n, int32_t *out) {
    const dt_kv_format *f = &layer->params.format;
    int32_t n_found = 0, next_victim = 0;
    for (int32_t entry = 0; entry < n_committed; entry++) {
        const bool is_victim = next_victim < n && victims[next_victim] == entry;
        next_victim += is_victim;
        if (is_victim || dt_is_slot(dt_kv_position(f, block_of(layer, lane, entry))[entry % f->block_tokens])) {
            out[n_found++] = entry;
        }
    }
    return n_found;
}

/* Everything that takes memory: after it nothing can fail. */
static bool prepare(dt_kv *kv, int32_t layer, int32_t lane, const int32_t *entries, int32_t n_written, int32_t n) {
    bool done = dt_kv_own_biases(kv, layer, lane) && dt_kv_prepare_drop(kv, layer, lane, entries + n_written, n - n_written);
    for (int32_t i = 0; i < n_written && done; i++) {
        done = dt_kv_own_entry(kv, layer, lane, entries[i]);
    }
    return done;
}

dt_status dt_kv_absorb(dt_kv *kv, int32_t layer_index, int32_t lane_index, const int32_t *victims, int32_t n, void *scratch,
                       dt_error *error) {
    const dt_kv_layer_state *layer = &kv->layers[layer_index];
    dt_kv_lane_state *lane = &layer->lanes[lane_index];
    const dt_kv_format *f = &layer->params.format;
    const int32_t capacity = layer->params.budget.memory_slots;
    if (n == 0 || (capacity == 0 && lane->n_slots == 0)) {
        return dt_kv_drop(kv, layer_index, lane_index, victims, n, error);
    }
    int32_t *entries = scratch;
    const int32_t n_entries = find_merged(layer, lane, lane->n_entries - kv->n_uncommitted, victims, n, entries);
    const int32_t n_slots = DT_MIN(capacity, n_entries);
    if (n_slots > 0 && !prepare(kv, layer_index, lane_index, entries, n_slots, n_entries)) {
        return dt_fail_memory(error, f->block_bytes, "memory slots");
    }
    dt_slots slots = {0};
    int32_t newest = kv->newest_dropped, n_tokens_written = 0;
    if (n_slots > 0) {
        dt_slots_init(&slots, capacity, f->dim_k, f->dim_v, (char *)scratch + indices_bytes(lane->n_entries));
    }
    for (int32_t i = 0; i < n_entries && n_slots > 0; i++) {
        read_slot(layer, lane, entries[i], dt_slots_next(&slots));
        newest = DT_MAX(newest, dt_slots_next(&slots)->position);
        dt_slots_add(&slots);
    }
    for (int32_t i = 0; i < n_slots; i++) {
        const int32_t *position = dt_kv_position(f, block_of(layer, lane, entries[i]));
        n_tokens_written += !dt_is_slot(position[entries[i] % f->block_tokens]);
        write_slot(layer, lane, entries[i], &slots.slots[i]);
    }
    lane->n_slots += n_tokens_written;
    const dt_status status = dt_kv_drop(kv, layer_index, lane_index, entries + n_slots, n_entries - n_slots, error);
    kv->newest_dropped = DT_MAX(kv->newest_dropped, newest);
    return status;
}
