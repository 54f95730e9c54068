/*
 * An entry's key and value as floats, whatever the block looks like: for what is merged, turned or looked at one by one. Attention
 * itself reads blocks directly.
 *
 * Invariant: what is written is rounded as attention's store rounds, and is finite where the numbers are.
 */
#include "kv/kv_internal.h"

#include <math.h>

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

void dt_kv_read_value(const dt_kv_format *f, void *block, int32_t i, float *value) {
    const char *row = value_row(f, block, i);
    for (int32_t d = 0; d < f->dim_v; d++) {
        value[d] = f->type_v == DT_KV_F16 ? dt_f16_to_f32(((const uint16_t *)(const void *)row)[d])
                                          : dt_kv_v_scale(f, block)[i] * (float)((const int8_t *)row)[d];
    }
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
