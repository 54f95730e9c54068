/*
 * Random entries in place of computed ones, for benchmarks: a depth is reached at once, and reading it costs what reading real
 * entries costs. What an importance score makes of them means nothing.
 */
#include "kv/kv.h"

#include <stdlib.h>
#include <string.h>

static uint64_t next(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 32;
}

/* A half of magnitude 1/8 to 2, either sign. */
static uint16_t random_half(uint64_t *state) {
    const uint64_t bits = next(state);
    return (uint16_t)((bits & 0x8000u) | ((12 + (bits >> 16) % 4) << 10) | (bits & 0x3ffu));
}

static void put(dt_kv_type type, void *to, uint64_t *state) {
    if (type == DT_KV_F16) {
        *(uint16_t *)to = random_half(state);
    } else {
        *(uint8_t *)to = (uint8_t)next(state);
    }
}

static void fill_entry(const dt_kv_format *f, void *block, int32_t entry, int32_t position, uint64_t *state) {
    for (int32_t d = 0; d < f->dim_k; d++) {
        put(f->type_k, (char *)block + dt_kv_key_offset(f, entry, d), state);
    }
    char *value = (char *)block + f->v_offset + (size_t)entry * dt_kv_value_row_bytes(f);
    for (int32_t d = 0; d < f->dim_v; d++) {
        put(f->type_v, value + (size_t)d * (f->type_v == DT_KV_F16 ? 2 : 1), state);
    }
    if (f->type_k == DT_KV_INT8) {
        dt_kv_k_scale(f, block)[entry] = 0.01f;
    }
    if (f->type_v == DT_KV_INT8) {
        dt_kv_v_scale(f, block)[entry] = 0.01f;
    }
    dt_kv_position(f, block)[entry] = position;
}

/* The same for a lane whose keys or values are elsewhere. */
static bool fill_elsewhere(const dt_kv *kv, int32_t layer, int32_t lane, bool values, int32_t first, int32_t n, uint64_t *state) {
    const dt_kv_format *f = &dt_kv_layer(kv, layer)->format;
    dt_kv_home *home = dt_kv_get_home(kv);
    const size_t n_numbers = (size_t)n * (size_t)(values ? f->dim_v : f->dim_k);
    uint16_t *rows = malloc(DT_MAX(n_numbers, 1) * sizeof *rows);
    for (size_t i = 0; rows != NULL && i < n_numbers; i++) {
        rows[i] = random_half(state);
    }
    const bool done = rows != NULL && home->ops->put(home, layer, lane, values, first, n, rows);
    free(rows);
    return done;
}

bool dt_kv_fill_uncommitted(dt_kv *kv, int32_t layer, int32_t lane, int32_t first_position, uint64_t *state) {
    const dt_kv_format *f = &dt_kv_layer(kv, layer)->format;
    dt_kv_lane_view view;
    dt_kv_lane(kv, layer, lane, &view);
    if (f->elsewhere) {
        const int32_t first = view.n_entries - view.n_uncommitted; /* positions are there since they were appended */
        return fill_elsewhere(kv, layer, lane, false, first, view.n_uncommitted, state) &&
               fill_elsewhere(kv, layer, lane, true, first, view.n_uncommitted, state);
    }
    for (int32_t i = 0; i < view.n_uncommitted; i++) {
        const int32_t entry = view.n_entries - view.n_uncommitted + i;
        fill_entry(f, view.spans[entry / f->block_tokens].block, entry % f->block_tokens, first_position + i, state);
        if (view.value_norm != NULL) {
            view.value_norm[entry] = 1.0f;
        }
    }
    return true;
}
