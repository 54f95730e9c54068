/*
 * Storage of the KV cache: lanes of reference-counted blocks that are appended to, dropped from, cut, and shared.
 *
 * Owns every byte of the cache, all of it from one dt_memory. Refuses to know why entries go: it is told their indices.
 * Invariants: a block with more than one reference is never written; every operation first gets all the memory it needs (which
 * changes nothing that a reader can see) and only then changes content, so a failure leaves the cache as it was; blocks come
 * zeroed and are reused only for the same format, so every number in them is finite; committed entries have no order, a hole is
 * filled from the committed tail, uncommitted entries stay last and in order.
 */
#include "kv/kv_internal.h"

#include <string.h>

/* ---- blocks ---- */

static bool same_format(const dt_kv_format *a, const dt_kv_format *b) {
    return a->type_k == b->type_k && a->type_v == b->type_v && a->dim_k == b->dim_k && a->dim_v == b->dim_v &&
           a->block_tokens == b->block_tokens && a->elsewhere == b->elsewhere;
}

/* A spare block, or one that has become spare. */
static void block_free(dt_kv *kv, void *block) {
    dt_memory_free_block(kv->memory, dt_kv_head(block), dt_kv_block_bytes(&kv->layers[dt_kv_head(block)->layer]));
}

static void spare_put(dt_kv *kv, void *block) {
    void *none = NULL;
    if (!atomic_compare_exchange_strong(&kv->spare, &none, block)) {
        block_free(kv, block);
    }
}

/* NULL where there is none of the layer's format. */
static void *spare_take(dt_kv *kv, const dt_kv_layer_state *layer) {
    void *block = atomic_exchange(&kv->spare, NULL);
    if (block != NULL && !same_format(&kv->layers[dt_kv_head(block)->layer].params.format, &layer->params.format)) {
        spare_put(kv, block);
        block = NULL;
    }
    return block;
}

static void *block_new(dt_kv *kv, const dt_kv_layer_state *layer) {
    void *block = spare_take(kv, layer);
    if (block == NULL) {
        char *memory = dt_memory_alloc_block(kv->memory, dt_kv_block_bytes(layer));
        block = memory == NULL ? NULL : memory + sizeof(dt_kv_block_head);
    }
    if (block != NULL) {
        atomic_store(&dt_kv_head(block)->references, 1);
    }
    return block;
}

static void block_release(dt_kv *kv, const dt_kv_layer_state *layer, void *block) {
    if (atomic_fetch_sub(&dt_kv_head(block)->references, 1) == 1) {
        dt_kv_head(block)->layer = (int32_t)(layer - kv->layers);
        spare_put(kv, block);
    }
}

static void spare_free(dt_kv *kv) {
    void *block = atomic_exchange(&kv->spare, NULL);
    if (block != NULL) {
        block_free(kv, block);
    }
}

/* Makes the block that holds `entry` this cache's own, so that it may be written. */
static bool block_own(dt_kv *kv, const dt_kv_layer_state *layer, dt_kv_lane_state *lane, int32_t entry) {
    dt_kv_span *span = &lane->spans[entry / layer->params.format.block_tokens];
    if (atomic_load(&dt_kv_head(span->block)->references) == 1) {
        return true;
    }
    void *copy = block_new(kv, layer);
    if (copy == NULL) {
        return false;
    }
    memcpy(copy, span->block, layer->params.format.block_bytes);
    block_release(kv, layer, span->block);
    span->block = copy;
    return true;
}

/* ---- a lane's arrays ---- */

int32_t dt_kv_capacity_blocks(int32_t n) {
    int32_t step = 1;
    while (step <= n / 16) {
        step *= 2;
    }
    return n > INT32_MAX - step ? n : DT_ROUND_UP(n, step);
}

static size_t row_floats(const dt_kv_layer_state *layer, int32_t capacity_blocks) {
    return (size_t)capacity_blocks * (size_t)layer->params.format.block_tokens;
}

size_t dt_kv_array_bytes(const dt_kv_layer_state *layer, int32_t capacity_blocks, bool has_bias) {
    const size_t n_rows =
        (layer->has_mass ? 2u : 0u) + (layer->has_peak ? 1u : 0u) + (has_bias ? 1u : 0u) + (layer->params.keeps_origins ? 1u : 0u);
    return DT_ROUND_UP((size_t)capacity_blocks * sizeof(dt_kv_span), (size_t)64) +
           n_rows * row_floats(layer, capacity_blocks) * sizeof(float);
}

static void lane_free_arrays(dt_kv *kv, const dt_kv_layer_state *layer, dt_kv_lane_state *lane) {
    dt_memory_free(kv->memory, lane->arrays, dt_kv_array_bytes(layer, lane->capacity_blocks, lane->bias != NULL));
    *lane = (dt_kv_lane_state){0};
}

/* Gives the lane's arrays another capacity, or a row of biases; content is kept. capacity_blocks >= n_spans, > 0. */
static bool lane_resize(dt_kv *kv, const dt_kv_layer_state *layer, dt_kv_lane_state *lane, int32_t capacity_blocks, bool has_bias) {
    char *arrays = dt_memory_alloc_zero(kv->memory, dt_kv_array_bytes(layer, capacity_blocks, has_bias));
    if (arrays == NULL) {
        return false;
    }
    dt_kv_lane_state next = *lane;
    next.arrays = arrays;
    next.capacity_blocks = capacity_blocks;
    next.spans = (dt_kv_span *)arrays;
    float *row = (float *)(arrays + DT_ROUND_UP((size_t)capacity_blocks * sizeof(dt_kv_span), (size_t)64));
    const size_t stride = row_floats(layer, capacity_blocks), row_bytes = (size_t)lane->n_entries * sizeof(float);
    if (layer->has_mass) {
        next.recent_mass = row;
        next.value_norm = row + stride;
        row += 2 * stride;
    }
    if (layer->has_peak) {
        next.peak_mass = row;
        row += stride;
    }
    if (layer->params.keeps_origins) {
        next.origin = (int32_t *)(void *)row;
        row += stride;
    }
    next.bias = has_bias ? row : NULL;
    if (row_bytes > 0) {
        if (layer->params.keeps_origins) {
            memcpy(next.origin, lane->origin, row_bytes);
        }
        if (layer->has_mass) {
            memcpy(next.recent_mass, lane->recent_mass, row_bytes);
            memcpy(next.value_norm, lane->value_norm, row_bytes);
        }
        if (layer->has_peak) {
            memcpy(next.peak_mass, lane->peak_mass, row_bytes);
        }
        if (lane->bias != NULL) {
            memcpy(next.bias, lane->bias, row_bytes);
        }
    }
    for (int32_t i = 0; i < lane->n_spans; i++) {
        next.spans[i] = lane->spans[i];
        next.spans[i].bias = next.bias == NULL ? NULL : next.bias + (size_t)i * (size_t)layer->params.format.block_tokens;
    }
    dt_memory_free(kv->memory, lane->arrays, dt_kv_array_bytes(layer, lane->capacity_blocks, lane->bias != NULL));
    *lane = next;
    return true;
}

/* ---- moving and cutting entries ---- */

/* Copies a key that lies interleaved with its 16 neighbours: `count` pieces of `piece` bytes, one group row apart. */
static void key_copy(char *to, const char *from, int32_t count, size_t piece) {
    for (int32_t i = 0; i < count; i++) {
        memcpy(to + (size_t)i * DT_KV_GROUP * piece, from + (size_t)i * DT_KV_GROUP * piece, piece);
    }
}

/* The key and value of entry s of a block overwrite those of entry t of another. */
static void row_move(const dt_kv_format *f, void *to_block, int32_t t, void *from_block, int32_t s) {
    char *to_key = (char *)to_block + dt_kv_key_offset(f, t, 0);
    const char *from_key = (const char *)from_block + dt_kv_key_offset(f, s, 0);
    if (f->type_k == DT_KV_F16) {
        key_copy(to_key, from_key, f->dim_k, 2);
    } else {
        key_copy(to_key, from_key, f->dim_k_padded / 4, 4);
        dt_kv_k_scale(f, to_block)[t] = dt_kv_k_scale(f, from_block)[s];
    }
    const size_t row = dt_kv_value_row_bytes(f);
    memcpy((char *)to_block + f->v_offset + (size_t)t * row, (const char *)from_block + f->v_offset + (size_t)s * row, row);
    if (f->type_v == DT_KV_INT8) {
        dt_kv_v_scale(f, to_block)[t] = dt_kv_v_scale(f, from_block)[s];
    }
}

/* Entry `from` overwrites entry `to`, whose block must be this cache's own. */
static void entry_move(dt_kv *kv, const dt_kv_layer_state *layer, dt_kv_lane_state *lane, int32_t to, int32_t from) {
    const dt_kv_format *f = &layer->params.format;
    void *to_block = lane->spans[to / f->block_tokens].block, *from_block = lane->spans[from / f->block_tokens].block;
    const int32_t t = to % f->block_tokens, s = from % f->block_tokens;
    if (f->elsewhere) {
        kv->home->ops->move(kv->home, (int32_t)(layer - kv->layers), (int32_t)(lane - layer->lanes), to, from);
    } else {
        row_move(f, to_block, t, from_block, s);
    }
    dt_kv_position(f, to_block)[t] = dt_kv_position(f, from_block)[s];
    if (layer->has_mass) {
        lane->recent_mass[to] = lane->recent_mass[from];
        lane->value_norm[to] = lane->value_norm[from];
    }
    if (layer->has_peak) {
        lane->peak_mass[to] = lane->peak_mass[from];
    }
    if (lane->bias != NULL) {
        lane->bias[to] = lane->bias[from];
    }
    if (lane->origin != NULL) {
        lane->origin[to] = lane->origin[from];
    }
}

/* Keeps the first n_entries and releases the blocks behind them. */
static void lane_cut(dt_kv *kv, const dt_kv_layer_state *layer, dt_kv_lane_state *lane, int32_t n_entries) {
    const dt_kv_format *f = &layer->params.format;
    const int32_t n_spans = dt_kv_blocks(f, n_entries);
    while (lane->n_spans > n_spans) {
        block_release(kv, layer, lane->spans[--lane->n_spans].block);
    }
    if (n_spans > 0) {
        lane->spans[n_spans - 1].n = n_entries - (n_spans - 1) * f->block_tokens;
    }
    lane->n_entries = n_entries;
}

/* After a deep cut: arrays more than twice as large as needed are made smaller; where memory for that is lacking they stay. */
static void lane_shrink(dt_kv *kv, const dt_kv_layer_state *layer, dt_kv_lane_state *lane) {
    const int32_t wanted = dt_kv_capacity_blocks(DT_MAX(lane->n_spans, 1));
    if (lane->capacity_blocks > 2 * wanted) {
        (void)lane_resize(kv, layer, lane, wanted, lane->bias != NULL);
    }
}

/* Makes every block own that removing victims[n] of the first n_committed entries, with n_behind entries after them, writes to. */
static bool remove_prepare(dt_kv *kv, const dt_kv_layer_state *layer, dt_kv_lane_state *lane, int32_t n_committed, int32_t n_behind,
                           const int32_t *victims, int32_t n) {
    for (int32_t i = 0; i < n && victims[i] < n_committed - n; i++) {
        if (!block_own(kv, layer, lane, victims[i])) {
            return false;
        }
    }
    for (int32_t i = 0; n > 0 && i < n_behind; i++) {
        if (!block_own(kv, layer, lane, n_committed - n + i)) {
            return false;
        }
    }
    return true;
}

static void remove_finish(dt_kv *kv, const dt_kv_layer_state *layer, dt_kv_lane_state *lane, int32_t n_committed, int32_t n_behind,
                          const int32_t *victims, int32_t n) {
    const int32_t n_left = n_committed - n;
    for (int32_t i = 0; i < n; i++) {
        lane->n_slots -= dt_is_slot(dt_kv_entry_position(&layer->params.format, lane, victims[i]));
    }
    int32_t in_tail = 0; /* first victim that lies behind n_left, where nothing has to be filled */
    while (in_tail < n && victims[in_tail] < n_left) {
        in_tail++;
    }
    int32_t filler = n_left;
    for (int32_t hole = 0, victim = in_tail; hole < in_tail; hole++, filler++) {
        while (victim < n && victims[victim] == filler) {
            filler++;
            victim++;
        }
        entry_move(kv, layer, lane, victims[hole], filler);
    }
    for (int32_t i = 0; n > 0 && i < n_behind; i++) {
        entry_move(kv, layer, lane, n_left + i, n_committed + i);
    }
    lane_cut(kv, layer, lane, n_left + n_behind);
}

/* ---- making and freeing ---- */

static dt_status check_params(const dt_kv_layer_params *layers, int32_t n_layers, int32_t *n_lanes, dt_error *error) {
    int64_t sum = 0;
    for (int32_t i = 0; i < n_layers; i++) {
        const dt_kv_format *f = &layers[i].format;
        if (layers[i].n_lanes < 1 || f->block_tokens < DT_KV_GROUP || f->block_tokens % DT_KV_GROUP != 0 || f->dim_k < 1 ||
            f->dim_v < 1 || (layers[i].budget.policy != NULL && layers[i].budget.max_cache_size < 1)) {
            return dt_fail(
                error, DT_ERR_ARGUMENT,
                "layer %d of the cache is not usable: %d KV heads of sizes %d and %d in blocks of %d tokens, max_cache_size "
                "%d; blocks must be a positive multiple of %d tokens",
                i, layers[i].n_lanes, f->dim_k, f->dim_v, f->block_tokens, layers[i].budget.max_cache_size, DT_KV_GROUP);
        }
        sum += layers[i].n_lanes;
    }
    if (n_layers < 1 || sum > INT32_MAX) {
        return dt_fail(error, DT_ERR_ARGUMENT, "a cache needs at least one layer, and %d KV heads at most", INT32_MAX);
    }
    *n_lanes = (int32_t)sum;
    return DT_OK;
}

/* The rows that an empty layer will have are those that its budget needs. */
static void take_rows(dt_kv_layer_state *layer) {
    layer->has_mass = dt_budget_needs_mass(&layer->params.budget);
    layer->has_peak = dt_budget_needs_peak(&layer->params.budget);
}

/* The limit that is in the way is named, a session's own before that of its group. n_tokens: that the cache has. */
static dt_status fail_memory(const dt_memory *memory, int32_t n_tokens, size_t bytes, const char *what, dt_error *error) {
    if (memory->limit > 0) {
        return dt_fail(error, DT_ERR_MEMORY, "the KV cache's limit of %s is reached after %d tokens (--kv-memory); raise it",
                       dt_size_of(memory->limit).text, n_tokens);
    }
    if (memory->parent != NULL && memory->parent->limit > 0) {
        return dt_fail(error, DT_ERR_MEMORY,
                       "the limit of %s for the KV caches of all sessions is reached, for this one after %d tokens; wait until "
                       "others end, or raise it",
                       dt_size_of(memory->parent->limit).text, n_tokens);
    }
    return dt_fail_memory(error, bytes, what);
}

static bool layer_is_empty(const dt_kv *kv, int32_t layer) {
    bool empty = true;
    for (int32_t j = 0; j < kv->layers[layer].params.n_lanes; j++) {
        empty = empty && kv->layers[layer].lanes[j].arrays == NULL;
    }
    return empty;
}

/* The list of lanes is copied beside the layer's lanes. */
static void take_budget(dt_kv *kv, int32_t layer, const dt_budget *budget) {
    dt_kv_layer_params *params = &kv->layers[layer].params;
    params->budget = *budget;
    if (budget->lane_max != NULL) {
        int32_t *copy = kv->lane_max + (kv->layers[layer].lanes - kv->lanes);
        memmove(copy, budget->lane_max, (size_t)params->n_lanes * sizeof *copy);
        params->budget.lane_max = copy;
    }
}

dt_status dt_kv_new(dt_memory *memory, const dt_kv_layer_params *layers, int32_t n_layers, dt_kv **out, dt_error *error) {
    *out = NULL;
    int32_t n_lanes = 0;
    const dt_status status = check_params(layers, n_layers, &n_lanes, error);
    if (status != DT_OK) {
        return status;
    }
    dt_kv *kv = dt_memory_alloc_zero(memory, sizeof *kv);
    if (kv == NULL) {
        return fail_memory(memory, 0, sizeof *kv, "the KV cache", error);
    }
    kv->memory = memory;
    kv->n_layers = n_layers;
    kv->n_lanes = n_lanes;
    kv->newest_dropped = -1;
    kv->layers = dt_memory_alloc_zero(memory, dt_kv_layers_bytes(kv));
    kv->lanes = dt_memory_alloc_zero(memory, dt_kv_lanes_bytes(kv));
    if (kv->layers == NULL || kv->lanes == NULL) {
        const size_t bytes = dt_kv_layers_bytes(kv) + dt_kv_lanes_bytes(kv);
        dt_kv_free(kv);
        return fail_memory(memory, 0, bytes, "the KV cache", error);
    }
    kv->lane_max = (int32_t *)(kv->lanes + kv->n_lanes);
    kv->keep = kv->lane_max + kv->n_lanes;
    dt_kv_lane_state *lane = kv->lanes;
    for (int32_t i = 0; i < n_layers; i++) {
        kv->layers[i] = (dt_kv_layer_state){.params = layers[i],
                                            .has_mass = dt_budget_needs_mass(&layers[i].budget),
                                            .has_peak = dt_budget_needs_peak(&layers[i].budget),
                                            .lanes = lane};
        take_budget(kv, i, &layers[i].budget);
        lane += layers[i].n_lanes;
    }
    *out = kv;
    return DT_OK;
}

void dt_kv_clear(dt_kv *kv) {
    for (int32_t i = 0; i < kv->n_layers; i++) {
        dt_kv_layer_state *layer = &kv->layers[i];
        for (int32_t j = 0; j < layer->params.n_lanes; j++) {
            lane_cut(kv, layer, &layer->lanes[j], 0);
            lane_free_arrays(kv, layer, &layer->lanes[j]);
        }
        take_rows(layer); /* what an earlier budget had is gone */
    }
    spare_free(kv);
    if (kv->home != NULL) {
        kv->home->ops->clear(kv->home);
    }
    dt_memory_free(kv->memory, kv->scratch, kv->scratch_bytes);
    kv->scratch = NULL;
    kv->scratch_bytes = 0;
    kv->n_uncommitted = 0;
    kv->next_position = kv->shift = 0;
    kv->newest_dropped = -1;
}

void dt_kv_free(dt_kv *kv) {
    if (kv == NULL) {
        return;
    }
    if (kv->layers != NULL && kv->lanes != NULL) {
        dt_kv_clear(kv);
    }
    if (kv->home != NULL) {
        kv->home->ops->free(kv->home);
    }
    dt_memory_free(kv->memory, kv->layers, dt_kv_layers_bytes(kv));
    dt_memory_free(kv->memory, kv->lanes, dt_kv_lanes_bytes(kv));
    dt_memory_free(kv->memory, kv, sizeof *kv);
}

void dt_kv_set_home(dt_kv *kv, dt_kv_home *home) { kv->home = home; }

dt_kv_home *dt_kv_get_home(const dt_kv *kv) { return kv->home; }

static void change_type(dt_kv_format *format, dt_kv_type type) {
    const bool elsewhere = format->elsewhere;
    dt_kv_format_init(format, type, type, format->dim_k, format->dim_v, format->block_tokens);
    if (elsewhere) {
        dt_kv_format_move_elsewhere(format);
    }
}

/* type: NULL = as they are. */
static dt_status new_like(const dt_kv *kv, const dt_kv_type *type, bool with_content, dt_kv **out, dt_error *error) {
    *out = NULL;
    dt_kv_layer_params *params = dt_memory_alloc(kv->memory, (size_t)kv->n_layers * sizeof *params);
    if (params == NULL) {
        return dt_kv_fail_memory(kv, (size_t)kv->n_layers * sizeof *params, "another KV cache", error);
    }
    for (int32_t i = 0; i < kv->n_layers; i++) {
        params[i] = kv->layers[i].params;
        if (type != NULL) {
            change_type(&params[i].format, *type);
        }
    }
    dt_status status = dt_kv_new(kv->memory, params, kv->n_layers, out, error);
    dt_memory_free(kv->memory, params, (size_t)kv->n_layers * sizeof *params);
    if (status == DT_OK && kv->home != NULL && type == NULL) {
        status = kv->home->ops->copy(kv->home, with_content, &(*out)->home, error);
    }
    if (status == DT_OK) {
        (*out)->total_cache_size = kv->total_cache_size;
    } else {
        dt_kv_free(*out);
        *out = NULL;
    }
    return status;
}

dt_status dt_kv_new_like(const dt_kv *kv, dt_kv **out, dt_error *error) { return new_like(kv, NULL, false, out, error); }

dt_status dt_kv_new_of_type(const dt_kv *kv, dt_kv_type type, dt_kv **out, dt_error *error) {
    return new_like(kv, &type, false, out, error);
}

dt_status dt_kv_fork(const dt_kv *kv, dt_kv **out, dt_error *error) {
    dt_kv *fork = NULL;
    const dt_status status = new_like(kv, NULL, true, &fork, error);
    *out = NULL;
    if (status != DT_OK) {
        return status;
    }
    for (int32_t i = 0; i < kv->n_layers; i++) {
        const dt_kv_layer_state *layer = &kv->layers[i];
        fork->layers[i].has_mass = layer->has_mass; /* which a later budget may not need */
        fork->layers[i].has_peak = layer->has_peak;
        for (int32_t j = 0; j < layer->params.n_lanes; j++) {
            const dt_kv_lane_state *from = &layer->lanes[j];
            dt_kv_lane_state *to = &fork->layers[i].lanes[j];
            if (from->arrays == NULL) {
                continue;
            }
            /* the resize takes a borrowed view of the source and leaves it as it is: it has no arrays of its own to free */
            *to = *from;
            to->arrays = NULL;
            if (!lane_resize(fork, layer, to, from->capacity_blocks, from->bias != NULL)) {
                *to = (dt_kv_lane_state){0};
                dt_kv_free(fork);
                return dt_kv_fail_memory(kv, dt_kv_array_bytes(layer, from->capacity_blocks, from->bias != NULL),
                                         "a fork of the KV cache", error);
            }
            for (int32_t span = 0; span < to->n_spans; span++) {
                atomic_fetch_add(&dt_kv_head(to->spans[span].block)->references, 1);
            }
        }
    }
    fork->n_uncommitted = kv->n_uncommitted;
    fork->next_position = kv->next_position;
    fork->newest_dropped = kv->newest_dropped;
    fork->shift = kv->shift;
    *out = fork;
    return DT_OK;
}

dt_status dt_kv_set_budgets(dt_kv *kv, const dt_budget *budgets, int32_t total_cache_size, dt_error *error) {
    for (int32_t i = 0; i < kv->n_layers; i++) {
        const bool lacks_mass = dt_budget_needs_mass(&budgets[i]) && !kv->layers[i].has_mass;
        const bool lacks_peak = dt_budget_needs_peak(&budgets[i]) && !kv->layers[i].has_peak;
        if ((lacks_mass || lacks_peak) && !layer_is_empty(kv, i)) {
            const bool for_slots = !budgets[i].policy->needs_mass && lacks_mass;
            return dt_fail(error, DT_ERR_ARGUMENT,
                           "%s%s needs to know the attention that layer %d's tokens got, and it was not collected there",
                           for_slots ? "memory_slots with policy " : "policy ", budgets[i].policy->name, i);
        }
    }
    for (int32_t i = 0; i < kv->n_layers; i++) {
        take_budget(kv, i, &budgets[i]);
        if (layer_is_empty(kv, i)) { /* nothing was collected, and nothing is missing */
            take_rows(&kv->layers[i]);
        }
    }
    kv->total_cache_size = total_cache_size;
    return DT_OK;
}

/* ---- append, commit, truncate, drop ---- */

/* Room for n more entries behind the lane's last one, in blocks that may be written. */
static bool lane_reserve(dt_kv *kv, const dt_kv_layer_state *layer, dt_kv_lane_state *lane, int32_t n) {
    const dt_kv_format *f = &layer->params.format;
    const int32_t needed = dt_kv_blocks(f, lane->n_entries + n);
    if (needed > lane->capacity_blocks && !lane_resize(kv, layer, lane, dt_kv_capacity_blocks(needed), lane->bias != NULL)) {
        return false;
    }
    if (lane->n_entries % f->block_tokens != 0 && !block_own(kv, layer, lane, lane->n_entries - 1)) {
        return false;
    }
    while (lane->n_spans < needed) {
        void *block = block_new(kv, layer);
        if (block == NULL) {
            return false;
        }
        const float *bias = lane->bias == NULL ? NULL : lane->bias + row_floats(layer, lane->n_spans);
        lane->spans[lane->n_spans++] = (dt_kv_span){.block = block, .bias = bias, .n = 0};
    }
    return true;
}

static void lane_extend(const dt_kv_layer_state *layer, dt_kv_lane_state *lane, int32_t first_position, int32_t shift, int32_t n) {
    const dt_kv_format *f = &layer->params.format;
    for (int32_t i = 0; i < n; i++) {
        const int32_t entry = lane->n_entries + i;
        dt_kv_span *span = &lane->spans[entry / f->block_tokens];
        dt_kv_position(f, span->block)[entry % f->block_tokens] = first_position + i;
        span->n = entry % f->block_tokens + 1;
        if (lane->origin != NULL) {
            lane->origin[entry] = first_position + shift + i;
        }
    }
    const size_t bytes = (size_t)n * sizeof(float);
    if (layer->has_mass) {
        memset(lane->recent_mass + lane->n_entries, 0, bytes);
        memset(lane->value_norm + lane->n_entries, 0, bytes);
    }
    if (layer->has_peak) {
        memset(lane->peak_mass + lane->n_entries, 0, bytes);
    }
    if (lane->bias != NULL) {
        memset(lane->bias + lane->n_entries, 0, bytes);
    }
    lane->n_entries += n;
}

static bool is_empty(const dt_kv *kv) {
    for (int32_t i = 0; i < kv->n_lanes; i++) {
        if (kv->lanes[i].n_entries > 0) {
            return false;
        }
    }
    return true;
}

static void undo_reserve(dt_kv *kv) {
    for (int32_t i = 0; i < kv->n_layers; i++) {
        for (int32_t j = 0; j < kv->layers[i].params.n_lanes; j++) {
            lane_cut(kv, &kv->layers[i], &kv->layers[i].lanes[j], kv->layers[i].lanes[j].n_entries);
        }
    }
}

dt_status dt_kv_fail_memory(const dt_kv *kv, size_t bytes, const char *what, dt_error *error) {
    return fail_memory(kv->memory, kv->next_position, bytes, what, error);
}

dt_status dt_kv_append(dt_kv *kv, int32_t first_position, int32_t n, dt_error *error) {
    if (n < 0 || first_position < 0 || first_position > INT32_MAX - kv->shift - n) {
        return dt_fail(error, DT_ERR_LIMIT, "%d tokens from position %d on do not fit: positions go from 0 to %d", n,
                       first_position, INT32_MAX - 1);
    }
    if (first_position != kv->next_position && !is_empty(kv)) {
        return dt_fail(error, DT_ERR_ARGUMENT, "tokens must be appended at position %d, the next one, not at %d", kv->next_position,
                       first_position);
    }
    for (int32_t i = 0; i < kv->n_layers; i++) {
        const dt_kv_layer_state *layer = &kv->layers[i];
        for (int32_t j = 0; j < layer->params.n_lanes; j++) {
            if (!lane_reserve(kv, layer, &layer->lanes[j], n)) {
                undo_reserve(kv);
                return dt_kv_fail_memory(kv, dt_kv_block_bytes(layer), "the KV cache", error);
            }
        }
    }
    for (int32_t i = 0; i < kv->n_layers && n > 0; i++) {
        for (int32_t j = 0; j < kv->layers[i].params.n_lanes; j++) {
            lane_extend(&kv->layers[i], &kv->layers[i].lanes[j], first_position, kv->shift, n);
        }
    }
    kv->n_uncommitted += n;
    kv->next_position = first_position + n;
    return DT_OK;
}

dt_status dt_kv_restore_lane(dt_kv *kv, int32_t layer_index, int32_t lane_index, int32_t n, bool has_bias, dt_error *error) {
    const dt_kv_layer_state *layer = &kv->layers[layer_index];
    dt_kv_lane_state *lane = &layer->lanes[lane_index];
    if (lane->n_entries > 0 || n < 0) {
        return dt_fail(error, DT_ERR_ARGUMENT, "layer %d, KV head %d is not empty", layer_index, lane_index);
    }
    bool done = lane_reserve(kv, layer, lane, n);
    if (done && n > 0) {
        lane_extend(layer, lane, 0, 0, n);
        done = !has_bias || lane_resize(kv, layer, lane, lane->capacity_blocks, true);
    }
    if (!done) {
        return dt_kv_fail_memory(kv, dt_kv_block_bytes(layer), "the KV cache", error);
    }
    return layer->params.format.elsewhere ? kv->home->ops->reserve(kv->home, layer_index, n, error) : DT_OK;
}

void dt_kv_restore_end(dt_kv *kv, int32_t next_position, int32_t newest_dropped, int32_t shift) {
    kv->next_position = next_position;
    kv->newest_dropped = newest_dropped;
    kv->shift = shift;
}

int32_t dt_kv_newest_dropped(const dt_kv *kv) { return kv->newest_dropped; }

/* Takes the last n entries, uncommitted ones, back from every lane. */
static void cut_uncommitted(dt_kv *kv, int32_t n) {
    for (int32_t i = 0; i < kv->n_layers && n > 0; i++) {
        for (int32_t j = 0; j < kv->layers[i].params.n_lanes; j++) {
            lane_cut(kv, &kv->layers[i], &kv->layers[i].lanes[j], kv->layers[i].lanes[j].n_entries - n);
        }
    }
    kv->n_uncommitted -= n;
    kv->next_position -= n;
}

void dt_kv_commit(dt_kv *kv, int32_t n_keep) {
    const int32_t kept = DT_MIN(DT_MAX(n_keep, 0), kv->n_uncommitted);
    cut_uncommitted(kv, kv->n_uncommitted - kept);
    kv->n_uncommitted = 0;
}

/* Indices of the first n entries whose position is >= position; returns how many. */
static int32_t find_from(const dt_kv_layer_state *layer, const dt_kv_lane_state *lane, int32_t n, int32_t position, int32_t *out) {
    const dt_kv_format *f = &layer->params.format;
    int32_t found = 0;
    for (int32_t entry = 0; entry < n; entry++) {
        const int32_t p = dt_kv_entry_position(f, lane, entry);
        if ((dt_is_slot(p) ? ~p : p) >= position) {
            out[found++] = entry;
        }
    }
    return found;
}

dt_status dt_kv_truncate(dt_kv *kv, int32_t position, dt_error *error) {
    const int32_t first_uncommitted = kv->next_position - kv->n_uncommitted;
    const int32_t p = DT_MAX(position, 0);
    if (p >= first_uncommitted) {
        cut_uncommitted(kv, DT_MAX(kv->next_position - p, 0));
        return DT_OK;
    }
    int32_t longest = 0;
    for (int32_t i = 0; i < kv->n_lanes; i++) {
        longest = DT_MAX(longest, kv->lanes[i].n_entries);
    }
    const size_t bytes = (size_t)DT_MAX(longest, 1) * sizeof(int32_t);
    int32_t *victims = dt_kv_scratch(kv, bytes);
    if (victims == NULL) {
        return dt_kv_fail_memory(kv, bytes, "cutting the KV cache", error);
    }
    for (int32_t i = 0; i < kv->n_layers; i++) {
        const dt_kv_layer_state *layer = &kv->layers[i];
        for (int32_t j = 0; j < layer->params.n_lanes; j++) {
            dt_kv_lane_state *lane = &layer->lanes[j];
            const int32_t n_committed = lane->n_entries - kv->n_uncommitted;
            const int32_t n = find_from(layer, lane, n_committed, p, victims);
            if (!remove_prepare(kv, layer, lane, n_committed, 0, victims, n)) {
                return dt_kv_fail_memory(kv, dt_kv_block_bytes(layer), "cutting the KV cache", error);
            }
        }
    }
    for (int32_t i = 0; i < kv->n_layers; i++) {
        const dt_kv_layer_state *layer = &kv->layers[i];
        for (int32_t j = 0; j < layer->params.n_lanes; j++) {
            dt_kv_lane_state *lane = &layer->lanes[j];
            const int32_t n_committed = lane->n_entries - kv->n_uncommitted;
            const int32_t n = find_from(layer, lane, n_committed, p, victims);
            remove_finish(kv, layer, lane, n_committed, 0, victims, n);
            lane_shrink(kv, layer, lane);
        }
    }
    kv->n_uncommitted = 0;
    kv->next_position = p;
    kv->newest_dropped = DT_MIN(kv->newest_dropped, p - 1);
    return DT_OK;
}

bool dt_kv_prepare_drop(dt_kv *kv, int32_t layer_index, int32_t lane_index, const int32_t *victims, int32_t n) {
    const dt_kv_layer_state *layer = &kv->layers[layer_index];
    dt_kv_lane_state *lane = &layer->lanes[lane_index];
    return remove_prepare(kv, layer, lane, lane->n_entries - kv->n_uncommitted, kv->n_uncommitted, victims, n);
}

bool dt_kv_shares_blocks(const dt_kv *kv, int32_t layer, int32_t lane_index) {
    const dt_kv_lane_state *lane = &kv->layers[layer].lanes[lane_index];
    bool shares = false;
    for (int32_t i = 0; i < lane->n_spans && !shares; i++) {
        shares = atomic_load(&dt_kv_head(lane->spans[i].block)->references) > 1;
    }
    return shares;
}

bool dt_kv_own_biases(dt_kv *kv, int32_t layer_index, int32_t lane_index) {
    const dt_kv_layer_state *layer = &kv->layers[layer_index];
    dt_kv_lane_state *lane = &layer->lanes[lane_index];
    return lane->bias != NULL || lane_resize(kv, layer, lane, lane->capacity_blocks, true);
}

bool dt_kv_own_entry(dt_kv *kv, int32_t layer, int32_t lane, int32_t entry) {
    return block_own(kv, &kv->layers[layer], &kv->layers[layer].lanes[lane], entry);
}

dt_status dt_kv_drop(dt_kv *kv, int32_t layer_index, int32_t lane_index, const int32_t *victims, int32_t n, dt_error *error) {
    const dt_kv_layer_state *layer = &kv->layers[layer_index];
    dt_kv_lane_state *lane = &layer->lanes[lane_index];
    const dt_kv_format *f = &layer->params.format;
    const int32_t n_committed = lane->n_entries - kv->n_uncommitted;
    int32_t newest = -1;
    for (int32_t i = 0; i < n; i++) {
        const int32_t victim = victims[i];
        if (victim < (i == 0 ? 0 : victims[i - 1] + 1) || victim >= n_committed) {
            return dt_fail(error, DT_ERR_ARGUMENT,
                           "victim %d of layer %d, KV head %d is not one of its %d committed entries in ascending order", victim,
                           layer_index, lane_index, n_committed);
        }
        newest = DT_MAX(newest, dt_kv_entry_position(f, lane, victim));
    }
    if (!remove_prepare(kv, layer, lane, n_committed, kv->n_uncommitted, victims, n)) {
        return dt_kv_fail_memory(kv, dt_kv_block_bytes(layer), "evicting from a shared KV cache", error);
    }
    remove_finish(kv, layer, lane, n_committed, kv->n_uncommitted, victims, n);
    lane_shrink(kv, layer, lane);
    dt_kv_note_dropped(kv, newest);
    return DT_OK;
}

/* ---- scores and biases ---- */

dt_status dt_kv_set_bias(dt_kv *kv, int32_t layer_index, int32_t lane_index, int32_t entry, float bias, dt_error *error) {
    const dt_kv_layer_state *layer = &kv->layers[layer_index];
    dt_kv_lane_state *lane = &layer->lanes[lane_index];
    if (entry < 0 || entry >= lane->n_entries || (!dt_is_finite(bias) && !(bias < 0))) {
        return dt_fail(error, DT_ERR_ARGUMENT,
                       "bias %f for entry %d of layer %d, KV head %d: it needs one of the %d entries and a number or -inf",
                       (double)bias, entry, layer_index, lane_index, lane->n_entries);
    }
    if (!dt_kv_own_biases(kv, layer_index, lane_index)) {
        return dt_kv_fail_memory(kv, dt_kv_array_bytes(layer, lane->capacity_blocks, true), "the KV cache", error);
    }
    lane->bias[entry] = bias;
    return DT_OK;
}

void dt_kv_forget_masses(dt_kv *kv) {
    for (int32_t i = 0; i < kv->n_layers; i++) {
        const dt_kv_layer_state *layer = &kv->layers[i];
        for (int32_t j = 0; layer->has_mass && j < layer->params.n_lanes; j++) {
            dt_kv_lane_state *lane = &layer->lanes[j];
            for (int32_t entry = 0; entry < lane->n_entries; entry++) {
                if (!dt_is_slot(dt_kv_entry_position(&layer->params.format, lane, entry))) {
                    lane->recent_mass[entry] = 0;
                }
            }
        }
    }
}

/* ---- scratch ---- */

void *dt_kv_scratch(dt_kv *kv, size_t bytes) {
    if (bytes > kv->scratch_bytes) {
        void *larger = dt_memory_alloc(kv->memory, bytes);
        if (larger == NULL) {
            return NULL;
        }
        dt_memory_free(kv->memory, kv->scratch, kv->scratch_bytes);
        kv->scratch = larger;
        kv->scratch_bytes = bytes;
    }
    return kv->scratch;
}
