/*
 * A lane as plain columns, one row an entry in entry order: what session files hold, whatever the blocks look like.
 *
 * Keys are [n][dim_k] and values [n][dim_v], both as IEEE halves or as signed bytes with a scale per entry; nothing of
 * interleaving, padding, block size or of a home elsewhere shows. Invariant: dt_kv_put_column lets no number into the cache that is
 * not finite.
 */
#include "kv/kv_internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static bool has_scale(const dt_kv_format *f, dt_kv_column column) {
    return (column == DT_KV_K_SCALES ? f->type_k : f->type_v) == DT_KV_INT8;
}

size_t dt_kv_column_bytes(const dt_kv_format *f, dt_kv_column column) {
    switch (column) {
    case DT_KV_KEYS:
        return (size_t)f->dim_k * (f->type_k == DT_KV_F16 ? 2 : 1);
    case DT_KV_VALUES:
        return (size_t)f->dim_v * (f->type_v == DT_KV_F16 ? 2 : 1);
    case DT_KV_K_SCALES:
    case DT_KV_V_SCALES:
        return has_scale(f, column) ? sizeof(float) : 0;
    default:
        return sizeof(float);
    }
}

/* A lane's row of numbers of four bytes, or NULL. */
static void *row_of(const dt_kv_lane_state *lane, dt_kv_column column) {
    return column == DT_KV_ORIGINS       ? (void *)lane->origin
           : column == DT_KV_RECENT_MASS ? (void *)lane->recent_mass
           : column == DT_KV_VALUE_NORM  ? (void *)lane->value_norm
           : column == DT_KV_PEAK_MASS   ? (void *)lane->peak_mass
           : column == DT_KV_BIAS        ? (void *)lane->bias
                                         : NULL;
}

/* Where entry i of a block has its position, its scale, or its value row. */
static char *in_block(const dt_kv_format *f, void *block, dt_kv_column column, int32_t i) {
    return column == DT_KV_POSITIONS  ? (char *)(dt_kv_position(f, block) + i)
           : column == DT_KV_K_SCALES ? (char *)(dt_kv_k_scale(f, block) + i)
           : column == DT_KV_V_SCALES ? (char *)(dt_kv_v_scale(f, block) + i)
                                      : (char *)block + f->v_offset + (size_t)i * dt_kv_value_row_bytes(f);
}

static void get_key(const dt_kv_format *f, const void *block, int32_t entry, char *out) {
    for (int32_t d = 0; d < f->dim_k; d++) {
        const char *from = (const char *)block + dt_kv_key_offset(f, entry, d);
        if (f->type_k == DT_KV_F16) {
            memcpy(out + 2 * (size_t)d, from, 2);
        } else {
            out[d] = (char)(*from ^ 0x80); /* value + 128 -> value */
        }
    }
}

static void put_key(const dt_kv_format *f, void *block, int32_t entry, const char *in) {
    for (int32_t d = 0; d < f->dim_k; d++) {
        char *to = (char *)block + dt_kv_key_offset(f, entry, d);
        if (f->type_k == DT_KV_F16) {
            memcpy(to, in + 2 * (size_t)d, 2);
        } else {
            *to = (char)(in[d] ^ 0x80);
        }
    }
    for (int32_t d = f->dim_k; f->type_k == DT_KV_INT8 && d < f->dim_k_padded; d++) {
        ((char *)block)[dt_kv_key_offset(f, entry, d)] = (char)0x80;
    }
}

/* Keys of 16 entries, which are a group: in units of two bytes, or of four INT8 dimensions, what lies in a row comes to lie in a
 * column. False where that does not fit, or the processor would not like the place in the file. */
static bool put_key_group(const dt_kv_format *f, void *block, int32_t entry, const char *in) {
    char *to = (char *)block + dt_kv_key_offset(f, entry, 0);
    if (f->type_k == DT_KV_F16 && (uintptr_t)in % sizeof(uint16_t) == 0) {
        const uint16_t *rows = (const uint16_t *)(const void *)in;
        uint16_t *columns = (uint16_t *)(void *)to;
        for (int32_t d = 0; d < f->dim_k; d++) {
            for (int32_t i = 0; i < DT_KV_GROUP; i++) {
                columns[d * DT_KV_GROUP + i] = rows[i * f->dim_k + d];
            }
        }
        return true;
    }
    if (f->type_k == DT_KV_INT8 && f->dim_k == f->dim_k_padded && f->dim_k % 4 == 0 && (uintptr_t)in % sizeof(uint32_t) == 0) {
        const uint32_t *rows = (const uint32_t *)(const void *)in;
        uint32_t *columns = (uint32_t *)(void *)to;
        const int32_t n = f->dim_k / 4;
        for (int32_t d = 0; d < n; d++) {
            for (int32_t i = 0; i < DT_KV_GROUP; i++) {
                columns[d * DT_KV_GROUP + i] = rows[i * n + d] ^ 0x80808080u;
            }
        }
        return true;
    }
    return false;
}

/* ---- keys and values that are elsewhere ---- */

static bool is_elsewhere(const dt_kv_format *f, dt_kv_column column) {
    return f->elsewhere && (column == DT_KV_KEYS || column == DT_KV_VALUES || column == DT_KV_K_SCALES || column == DT_KV_V_SCALES);
}

static bool get_elsewhere(const dt_kv *kv, int32_t layer, int32_t lane, dt_kv_column column, int32_t first, int32_t n, void *out) {
    const dt_kv_format *f = &kv->layers[layer].params.format;
    const bool values = column == DT_KV_VALUES || column == DT_KV_V_SCALES;
    if ((values ? f->type_v : f->type_k) == DT_KV_F16) {
        return kv->home->ops->get(kv->home, layer, lane, values, first, n, out);
    }
    const int32_t dim = values ? f->dim_v : f->dim_k;
    float *numbers = malloc((size_t)n * (size_t)dim * sizeof *numbers);
    const bool done = numbers != NULL && kv->home->ops->read(kv->home, layer, lane, values, first, n, numbers);
    for (int32_t i = 0; done && i < n; i++) {
        const float *row = numbers + (int64_t)i * dim;
        float scale;
        const float inverse = dt_kv_quantizer(row, dim, &scale);
        if (column == DT_KV_K_SCALES || column == DT_KV_V_SCALES) {
            memcpy((float *)out + i, &scale, sizeof scale);
            continue;
        }
        for (int32_t d = 0; d < dim; d++) {
            ((int8_t *)out)[(int64_t)i * dim + d] = (int8_t)nearbyintf(row[d] * inverse);
        }
    }
    free(numbers);
    return done;
}

static bool put_elsewhere(const dt_kv *kv, int32_t layer, int32_t lane, bool values, const void *in, const void *scales) {
    const dt_kv_format *f = &kv->layers[layer].params.format;
    const int32_t n = kv->layers[layer].lanes[lane].n_entries, dim = values ? f->dim_v : f->dim_k;
    if ((values ? f->type_v : f->type_k) == DT_KV_F16) {
        return kv->home->ops->put(kv->home, layer, lane, values, 0, n, in);
    }
    uint16_t *halves = malloc(DT_MAX((size_t)n * (size_t)dim, 1) * sizeof *halves);
    bool done = halves != NULL && scales != NULL;
    for (int32_t i = 0; done && i < n; i++) {
        float scale;
        memcpy(&scale, (const char *)scales + (size_t)i * sizeof scale, sizeof scale);
        done = dt_is_finite(scale) && scale >= 0;
        for (int32_t d = 0; done && d < dim; d++) {
            const float x = scale * (float)((const int8_t *)in)[(int64_t)i * dim + d];
            halves[(int64_t)i * dim + d] = dt_f32_to_f16(fminf(fmaxf(x, -65504.0f), 65504.0f));
        }
    }
    done = done && kv->home->ops->put(kv->home, layer, lane, values, 0, n, halves);
    free(halves);
    return done;
}

/* ---- columns ---- */

bool dt_kv_get_column(const dt_kv *kv, int32_t layer, int32_t lane_index, dt_kv_column column, int32_t first, int32_t n,
                      void *out) {
    const dt_kv_format *f = &kv->layers[layer].params.format;
    const dt_kv_lane_state *lane = &kv->layers[layer].lanes[lane_index];
    const size_t bytes = dt_kv_column_bytes(f, column);
    const char *row = row_of(lane, column);
    if (row != NULL) {
        memcpy(out, row + (size_t)first * bytes, (size_t)n * bytes);
        return true;
    }
    if (is_elsewhere(f, column)) {
        return get_elsewhere(kv, layer, lane_index, column, first, n, out);
    }
    char *to = out;
    for (int32_t entry = first; entry < first + n; entry++, to += bytes) {
        void *block = lane->spans[entry / f->block_tokens].block;
        if (column == DT_KV_KEYS) {
            get_key(f, block, entry % f->block_tokens, to);
        } else {
            memcpy(to, in_block(f, block, column, entry % f->block_tokens), bytes);
        }
    }
    return true;
}

static bool halves_are_finite(const char *halves, size_t n_bytes) {
    unsigned bad = 0;
    for (size_t i = 0; i < n_bytes; i += 2) {
        uint16_t half;
        memcpy(&half, halves + i, sizeof half);
        bad |= (half & 0x7c00u) == 0x7c00u;
    }
    return bad == 0;
}

bool dt_kv_put_column(dt_kv *kv, int32_t layer, int32_t lane_index, dt_kv_column column, const void *in, const void *scales) {
    const dt_kv_format *f = &kv->layers[layer].params.format;
    dt_kv_lane_state *lane = &kv->layers[layer].lanes[lane_index];
    const size_t bytes = dt_kv_column_bytes(f, column);
    const bool is_half = (column == DT_KV_KEYS && f->type_k == DT_KV_F16) || (column == DT_KV_VALUES && f->type_v == DT_KV_F16);
    if (is_half && !halves_are_finite(in, (size_t)lane->n_entries * bytes)) {
        return false;
    }
    void *row = row_of(lane, column);
    if (row != NULL) { /* dt_kv_check judges these */
        memcpy(row, in, (size_t)lane->n_entries * bytes);
        return true;
    }
    if (is_elsewhere(f, column)) {
        const bool is_scale = column == DT_KV_K_SCALES || column == DT_KV_V_SCALES; /* comes again with the numbers */
        return is_scale || put_elsewhere(kv, layer, lane_index, column == DT_KV_VALUES, in, scales);
    }
    const char *from = in;
    for (int32_t entry = 0; entry < lane->n_entries; entry++, from += bytes) {
        void *block = lane->spans[entry / f->block_tokens].block;
        if (column == DT_KV_KEYS && entry % DT_KV_GROUP == 0 && entry + DT_KV_GROUP <= lane->n_entries &&
            put_key_group(f, block, entry % f->block_tokens, from)) {
            entry += DT_KV_GROUP - 1;
            from += (DT_KV_GROUP - 1) * bytes;
        } else if (column == DT_KV_KEYS) {
            put_key(f, block, entry % f->block_tokens, from);
        } else {
            memcpy(in_block(f, block, column, entry % f->block_tokens), from, bytes);
        }
        if (column == DT_KV_POSITIONS && lane->origin != NULL) {
            memcpy(&lane->origin[entry], from, bytes); /* until told better */
        }
        if (column == DT_KV_POSITIONS) {
            lane->n_slots += dt_is_slot(dt_kv_position(f, block)[entry % f->block_tokens]);
        }
    }
    return true;
}

bool dt_kv_get_entries(const dt_kv *kv, int32_t layer, int32_t lane, int32_t first, int32_t n, float *keys, float *values) {
    const dt_kv_format *f = &kv->layers[layer].params.format;
    if (f->elsewhere) {
        return kv->home->ops->read(kv->home, layer, lane, false, first, n, keys) &&
               kv->home->ops->read(kv->home, layer, lane, true, first, n, values);
    }
    for (int32_t i = 0; i < n;) {
        const int32_t at = (first + i) % f->block_tokens, count = DT_MIN(f->block_tokens - at, n - i);
        void *block = kv->layers[layer].lanes[lane].spans[(first + i) / f->block_tokens].block;
        dt_kv_read_entries(f, block, at, count, keys + (int64_t)i * f->dim_k, values + (int64_t)i * f->dim_v);
        i += count;
    }
    return true;
}

void dt_kv_make_norms(dt_kv *kv, int32_t layer, int32_t lane_index) {
    const dt_kv_format *f = &kv->layers[layer].params.format;
    dt_kv_lane_state *lane = &kv->layers[layer].lanes[lane_index];
    for (int32_t entry = 0; !f->elsewhere && entry < lane->n_entries; entry++) { /* elsewhere they are made before each round */
        float value[DT_KV_MAX_DIM];
        dt_kv_read_value(f, lane->spans[entry / f->block_tokens].block, entry % f->block_tokens, value);
        lane->value_norm[entry] = dt_kv_norm(value, f->dim_v);
    }
}
