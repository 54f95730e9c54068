/*
 * An entry's key and value as floats, whatever the block looks like: for what is merged, turned or looked at one by one. Attention
 * itself reads blocks directly.
 *
 * Invariant: what is written is rounded as attention's store rounds, and is finite where the numbers are.
 */
#include "base/vectors.h"
#include "kv/kv_internal.h"

#include <math.h>
#include <string.h>

#define MOST_OF_A_HALF 65504.0f

static char *value_row(const dt_kv_format *f, void *block, int32_t i) {
    return (char *)block + f->v_offset + (size_t)i * dt_kv_value_row_bytes(f);
}

static uint16_t to_half(float x) { return dt_f32_to_f16(fminf(fmaxf(x, -MOST_OF_A_HALF), MOST_OF_A_HALF)); }

void dt_kv_read_key(const dt_kv_format *f, void *block, int32_t i, float *key) {
    for (int32_t d = 0; d < f->dim_k; d++) {
        const char *at = (const char *)block + dt_kv_key_offset(f, i, d);
        key[d] = f->type_k == DT_KV_F16 ? dt_f16_to_f32(*(const uint16_t *)(const void *)at)
                                        : dt_kv_k_scale(f, block)[i] * (float)(*(const uint8_t *)at - 128);
    }
}

static DT_INLINED float value_at(const dt_kv_format *f, void *block, const char *row, int32_t i, int32_t d) {
    return f->type_v == DT_KV_F16 ? dt_f16_to_f32(((const uint16_t *)(const void *)row)[d])
                                  : dt_kv_v_scale(f, block)[i] * (float)((const int8_t *)row)[d];
}

void dt_kv_read_value(const dt_kv_format *f, void *block, int32_t i, float *value) {
    const char *row = value_row(f, block, i);
    for (int32_t d = 0; d < f->dim_v; d++) {
        value[d] = value_at(f, block, row, i, d);
    }
}

/* Halves that are numbers, as what is stored is. */
static DT_INLINED void widen(const uint16_t *halves, dt_floats *out) {
    typedef uint16_t halves_vector __attribute__((vector_size(DT_VECTOR * sizeof(uint16_t))));
    halves_vector packed;
    memcpy(&packed, halves, sizeof packed);
    const dt_ints half = __builtin_convertvector(packed, dt_ints), magnitude = (half & 0x7FFF) << 13;
    const dt_ints smallest = (dt_ints){0} + (113 << 23); /* 2^-14: below it a half has no leading 1 */
    const dt_floats normal = (dt_floats)(magnitude + (112 << 23));
    const dt_floats subnormal = (dt_floats)(magnitude + smallest) - (dt_floats)smallest;
    const dt_floats size = DT_CHOOSE((half & 0x7C00) != 0, normal, subnormal);
    *out = DT_CHOOSE((half & 0x8000) != 0, -size, size);
}

/* One dimension of the keys of 16 entries from `first` on, which begin a group. */
static DT_INLINED void read_across(const dt_kv_format *f, void *block, int32_t first, int32_t d, float *out) {
    const char *at = (const char *)block + dt_kv_key_offset(f, first, d);
    dt_floats keys = {0};
    if (f->type_k == DT_KV_F16) {
        widen((const uint16_t *)(const void *)at, &keys);
    } else {
        for (int32_t e = 0; e < DT_KV_GROUP; e++) {
            keys[e] = dt_kv_k_scale(f, block)[first + e] * (float)(((const uint8_t *)at)[4 * e] - 128);
        }
    }
    memcpy(out, &keys, sizeof keys);
}

DT_MANY_PROCESSORS static void read_entries(const dt_kv_format *f, void *block, int32_t i, int32_t n, float *keys, float *values) {
    _Static_assert(DT_KV_GROUP == DT_VECTOR, "a vector is a dimension of a group");
    for (int32_t done = 0; done < n;) {
        const int32_t at = (i + done) % DT_KV_GROUP, count = DT_MIN(DT_KV_GROUP - at, n - done);
        for (int32_t d = 0; d < f->dim_k; d++) {
            float across[DT_KV_GROUP];
            read_across(f, block, i + done - at, d, across);
            for (int32_t e = 0; e < count; e++) {
                keys[(size_t)(done + e) * (size_t)f->dim_k + (size_t)d] = across[at + e];
            }
        }
        done += count;
    }
    for (int32_t e = 0; e < n; e++) {
        const char *row = value_row(f, block, i + e);
        float *value = values + (size_t)e * (size_t)f->dim_v;
        int32_t d = 0;
        for (; f->type_v == DT_KV_F16 && d + DT_VECTOR <= f->dim_v; d += DT_VECTOR) {
            dt_floats numbers;
            widen((const uint16_t *)(const void *)row + d, &numbers);
            memcpy(value + d, &numbers, sizeof numbers);
        }
        for (; d < f->dim_v; d++) {
            value[d] = value_at(f, block, row, i + e, d);
        }
    }
}

void dt_kv_read_entries(const dt_kv_format *f, void *block, int32_t i, int32_t n, float *keys, float *values) {
    read_entries(f, block, i, n, keys, values);
}

void dt_kv_write_key(const dt_kv_format *f, void *block, int32_t i, const float *key) {
    const float inverse = f->type_k == DT_KV_INT8 ? dt_kv_quantizer(key, f->dim_k, &dt_kv_k_scale(f, block)[i]) : 0;
    for (int32_t d = 0; d < f->dim_k; d++) {
        char *at = (char *)block + dt_kv_key_offset(f, i, d);
        if (f->type_k == DT_KV_F16) {
            *(uint16_t *)(void *)at = to_half(key[d]);
        } else {
            *(uint8_t *)at = (uint8_t)((int32_t)nearbyintf(key[d] * inverse) + 128);
        }
    }
}

void dt_kv_write_value(const dt_kv_format *f, void *block, int32_t i, const float *value) {
    char *row = value_row(f, block, i);
    const float inverse = f->type_v == DT_KV_INT8 ? dt_kv_quantizer(value, f->dim_v, &dt_kv_v_scale(f, block)[i]) : 0;
    for (int32_t d = 0; d < f->dim_v; d++) {
        if (f->type_v == DT_KV_F16) {
            ((uint16_t *)(void *)row)[d] = to_half(value[d]);
        } else {
            ((int8_t *)row)[d] = (int8_t)nearbyintf(value[d] * inverse);
        }
    }
}

float dt_kv_norm(const float *x, int32_t n) {
    double squares = 0;
    for (int32_t i = 0; i < n; i++) {
        squares += (double)x[i] * (double)x[i];
    }
    return (float)sqrt(squares);
}
