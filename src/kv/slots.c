/*
 * Memory slots in the cache: what a round evicts from a lane is merged into the lane's slots before it is dropped.
 *
 * A slot is a committed entry like any other, told from a token by its position alone: that of one of the tokens it stands for, as
 * ~position, a negative number. So it needs no place of its own, is pinned (dt_pinned), is copied, shared, moved and saved with the
 * others, and a query sees it from every later position. How merging works is policy/memory_slots.c's; here entries are read and
 * written.
 *
 * Keys and values that are elsewhere come and go in pieces: each evicted token's once, and the slots' in each round.
 *
 * Invariants: a round leaves at most memory_slots slots in a lane that it evicts from; a failure leaves the lane as it was, but for
 * that of a device while it is written to; what is written is rounded as attention's store rounds.
 */
#include "kv/kv_internal.h"
#include "policy/memory_slots.h"

#include <string.h>

#define PIECE 256 /* entries that are read from a home at once, or written to it */

static size_t indices_bytes(int32_t n_entries) { return DT_ROUND_UP((size_t)n_entries * sizeof(int32_t), (size_t)64); }

static size_t merging_bytes(const dt_kv_layer_params *params) {
    return dt_slots_bytes(params->budget.memory_slots, params->format.dim_k, params->format.dim_v);
}

static size_t piece_bytes(const dt_kv_format *f) {
    return f->elsewhere ? (size_t)PIECE * (size_t)(f->dim_k + f->dim_v) * sizeof(float) : 0;
}

size_t dt_kv_slots_bytes(const dt_kv_layer_params *params, int32_t n_entries) {
    return indices_bytes(n_entries) + (params->budget.memory_slots > 0 ? merging_bytes(params) + piece_bytes(&params->format) : 0);
}

/* ---- slots of a lane ---- */

static void *block_of(const dt_kv_layer_state *layer, const dt_kv_lane_state *lane, int32_t entry) {
    return lane->spans[entry / layer->params.format.block_tokens].block;
}

/* Key and value are there already where they are elsewhere. */
static void read_slot(const dt_kv_layer_state *layer, const dt_kv_lane_state *lane, int32_t entry, dt_slot *out) {
    const dt_kv_format *f = &layer->params.format;
    void *block = block_of(layer, lane, entry);
    const int32_t position = dt_kv_position(f, block)[entry % f->block_tokens];
    if (!f->elsewhere) {
        dt_kv_read_key(f, block, entry % f->block_tokens, out->key);
        dt_kv_read_value(f, block, entry % f->block_tokens, out->value);
    }
    out->position = dt_is_slot(position) ? ~position : position;
    out->bias = dt_is_slot(position) ? lane->bias[entry] : 0;
    out->mass = layer->has_mass ? lane->recent_mass[entry] : 0;
}

static void write_slot(const dt_kv_layer_state *layer, const dt_kv_lane_state *lane, int32_t entry, const dt_slot *slot) {
    const dt_kv_format *f = &layer->params.format;
    void *block = block_of(layer, lane, entry);
    if (!f->elsewhere) {
        dt_kv_write_key(f, block, entry % f->block_tokens, slot->key);
        dt_kv_write_value(f, block, entry % f->block_tokens, slot->value);
    }
    dt_kv_position(f, block)[entry % f->block_tokens] = ~slot->position;
    lane->bias[entry] = slot->bias;
    if (layer->has_mass) {
        lane->recent_mass[entry] = slot->mass;
        lane->value_norm[entry] = dt_kv_norm(slot->value, f->dim_v);
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
    bool done = (n_written == 0 || dt_kv_own_biases(kv, layer, lane)) &&
                dt_kv_prepare_drop(kv, layer, lane, entries + n_written, n - n_written);
    for (int32_t i = 0; i < n_written && done; i++) {
        done = dt_kv_own_entry(kv, layer, lane, entries[i]);
    }
    return done;
}

/* ---- merging ---- */

typedef struct absorption {
    dt_kv *kv;
    int32_t layer, lane;
    const int32_t *entries; /* [n] victims and slots, ascending */
    int32_t n, n_slots;     /* the first n_slots of them become the slots */
    dt_slots slots;
    float *keys, *values; /* [PIECE] of a lane that is elsewhere */
} absorption;

/* Merges all of them; nothing has changed in the cache yet. *newest: of their positions. */
static bool merge_entries(absorption *a, int32_t *newest) {
    const dt_kv_layer_state *layer = &a->kv->layers[a->layer];
    const dt_kv_format *f = &layer->params.format;
    const dt_kv_home *home = a->kv->home;
    for (int32_t i = 0; i < a->n && a->n_slots > 0; i++) {
        dt_slot *slot = dt_slots_next(&a->slots);
        if (f->elsewhere) {
            const int32_t at = i % PIECE, n = DT_MIN(PIECE, a->n - i);
            if (at == 0 && !home->ops->gather(a->kv->home, a->layer, a->lane, a->entries + i, n, a->keys, a->values)) {
                return false;
            }
            memcpy(slot->key, a->keys + (size_t)at * (size_t)f->dim_k, (size_t)f->dim_k * sizeof(float));
            memcpy(slot->value, a->values + (size_t)at * (size_t)f->dim_v, (size_t)f->dim_v * sizeof(float));
        }
        read_slot(layer, &layer->lanes[a->lane], a->entries[i], slot);
        *newest = DT_MAX(*newest, slot->position);
        dt_slots_add(&a->slots);
    }
    return true;
}

/* Writes keys and values of the slots of a lane that is elsewhere. */
static bool scatter_slots(const absorption *a) {
    const dt_kv_format *f = &a->kv->layers[a->layer].params.format;
    bool done = true;
    for (int32_t first = 0; first < a->n_slots && done; first += PIECE) {
        const int32_t n = DT_MIN(PIECE, a->n_slots - first);
        for (int32_t i = 0; i < n; i++) {
            const dt_slot *slot = &a->slots.slots[first + i];
            memcpy(a->keys + (size_t)i * (size_t)f->dim_k, slot->key, (size_t)f->dim_k * sizeof(float));
            memcpy(a->values + (size_t)i * (size_t)f->dim_v, slot->value, (size_t)f->dim_v * sizeof(float));
        }
        done = a->kv->home->ops->scatter(a->kv->home, a->layer, a->lane, a->entries + first, n, a->keys, a->values);
    }
    return done;
}

/* What goes, at the scratch's beginning. */
static absorption begin_absorption(dt_kv *kv, int32_t layer_index, int32_t lane_index, const int32_t *victims, int32_t n,
                                   void *scratch) {
    const dt_kv_layer_state *layer = &kv->layers[layer_index];
    const dt_kv_lane_state *lane = &layer->lanes[lane_index];
    int32_t *entries = scratch;
    absorption a = {.kv = kv, .layer = layer_index, .lane = lane_index, .entries = entries};
    a.n = find_merged(layer, lane, lane->n_entries - kv->n_uncommitted, victims, n, entries);
    a.n_slots = DT_MIN(layer->params.budget.memory_slots, a.n);
    return a;
}

/* Nothing is merged into slots, and none are there. */
static bool has_no_slots(const dt_kv *kv, int32_t layer, int32_t lane) {
    return kv->layers[layer].params.budget.memory_slots == 0 && kv->layers[layer].lanes[lane].n_slots == 0;
}

bool dt_kv_absorb_is_ready(const dt_kv *kv, int32_t layer, int32_t lane) {
    const bool has_biases = kv->layers[layer].params.budget.memory_slots == 0 || kv->layers[layer].lanes[lane].bias != NULL;
    return has_biases && !dt_kv_shares_blocks(kv, layer, lane);
}

bool dt_kv_prepare_absorb(dt_kv *kv, int32_t layer, int32_t lane, const int32_t *victims, int32_t n, void *scratch) {
    if (n == 0 || has_no_slots(kv, layer, lane)) {
        return dt_kv_prepare_drop(kv, layer, lane, victims, n);
    }
    const absorption a = begin_absorption(kv, layer, lane, victims, n, scratch);
    return prepare(kv, layer, lane, a.entries, a.n_slots, a.n);
}

dt_status dt_kv_absorb(dt_kv *kv, int32_t layer_index, int32_t lane_index, const int32_t *victims, int32_t n, void *scratch,
                       dt_error *error) {
    const dt_kv_layer_state *layer = &kv->layers[layer_index];
    dt_kv_lane_state *lane = &layer->lanes[lane_index];
    const dt_kv_format *f = &layer->params.format;
    const int32_t capacity = layer->params.budget.memory_slots;
    if (n == 0 || has_no_slots(kv, layer_index, lane_index)) {
        return dt_kv_drop(kv, layer_index, lane_index, victims, n, error);
    }
    absorption a = begin_absorption(kv, layer_index, lane_index, victims, n, scratch);
    const int32_t *entries = a.entries;
    if (!prepare(kv, layer_index, lane_index, entries, a.n_slots, a.n)) {
        return dt_kv_fail_memory(kv, f->block_bytes, "memory slots", error);
    }
    int32_t newest = -1, n_tokens_written = 0;
    if (a.n_slots > 0) {
        char *memory = (char *)scratch + indices_bytes(lane->n_entries);
        dt_slots_init(&a.slots, capacity, f->dim_k, f->dim_v, memory);
        a.keys = (float *)(void *)(memory + merging_bytes(&layer->params));
        a.values = a.keys + (size_t)PIECE * (size_t)f->dim_k;
    }
    if (!merge_entries(&a, &newest) || (f->elsewhere && !scatter_slots(&a))) {
        return dt_fail(error, DT_ERR_COMPUTE, "the device did not give or take keys and values for the memory slots of layer %d",
                       layer_index);
    }
    for (int32_t i = 0; i < a.n_slots; i++) {
        const int32_t *position = dt_kv_position(f, block_of(layer, lane, entries[i]));
        n_tokens_written += !dt_is_slot(position[entries[i] % f->block_tokens]);
        write_slot(layer, lane, entries[i], &a.slots.slots[i]);
    }
    lane->n_slots += n_tokens_written;
    const dt_status status = dt_kv_drop(kv, layer_index, lane_index, entries + a.n_slots, a.n - a.n_slots, error);
    dt_kv_note_dropped(kv, newest);
    return status;
}
