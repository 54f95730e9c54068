/*
 * Packing weights, the scalar reference, and the choice of a kernel. See gemm_kernel.h for the layouts.
 * Invariant: this file is compiled without special instruction flags.
 */
#include "gemm/gemm_kernel.h"

#include "base/amx.h"

#include <math.h>
#include <string.h>

bool dt_gemm_can_pack(dt_gemm_type type, int64_t n_in, int64_t n_out) {
    return n_in > 0 && n_out > 0 && n_in <= INT32_MAX && n_out <= INT32_MAX &&
           n_in % (DT_GEMM_BLOCK * dt_gemm_formats[type].n_blocks) == 0 && n_out % DT_GEMM_ROWS == 0;
}

size_t dt_gemm_row_bytes(dt_gemm_type type, int32_t n_in) {
    const dt_gemm_format f = dt_gemm_formats[type];
    return (size_t)(n_in / DT_GEMM_BLOCK / f.n_blocks) * (size_t)f.file_bytes;
}

size_t dt_gemm_matrix_bytes(dt_gemm_type type, int32_t n_in, int32_t n_out) {
    return (size_t)(n_out / DT_GEMM_ROWS) * dt_gemm_group_bytes(dt_gemm_formats[type], n_in);
}

size_t dt_gemm_input_bytes(int32_t n_in, int32_t n_tokens) {
    return DT_GEMM_COUNTER_BYTES + (size_t)n_tokens * (size_t)(n_in / DT_GEMM_BLOCK) * DT_GEMM_TOKEN_BYTES;
}

/* ---- packing: from ggml's layout to plain numbers, from those to ours ---- */

#define MAX_INPUTS (DT_GEMM_BLOCK * DT_GEMM_MAX_BLOCKS)

/* A row's super-block: stored values, F16 scale and minimum, what multiplies them per block (or half block). */
typedef struct super_block {
    uint8_t values[MAX_INPUTS];
    uint8_t scale[2], minimum[2];
    uint8_t scales[2 * DT_GEMM_MAX_BLOCKS], minimums[DT_GEMM_MAX_BLOCKS];
} super_block;

/* Low nibbles of n bytes, then the high ones. */
static void take_nibbles(const uint8_t *from, int32_t n, uint8_t *values) {
    for (int32_t i = 0; i < n; i++) {
        values[i] = from[i] & 15;
        values[i + n] = from[i] >> 4;
    }
}

/* Types of 32 inputs: scale, (minimum,) (32 fifth bits,) quants. */
static void take_block(dt_gemm_format f, const uint8_t *from, super_block *to) {
    memcpy(to->scale, from, 2);
    from += 2;
    if (f.has_minimum) {
        memcpy(to->minimum, from, 2);
        from += 2;
    }
    if (f.bits == 8) {
        for (int32_t i = 0; i < DT_GEMM_BLOCK; i++) {
            to->values[i] = from[i] ^ 0x80; /* value + 128 */
        }
        return;
    }
    take_nibbles(from + (f.bits == 5 ? 4 : 0), 16, to->values);
    for (int32_t j = 0; f.bits == 5 && j < 8; j++) {
        const uint32_t four = from[j / 2] >> j % 2 * 4 & 15, spread = (four * 0x00204081u & 0x01010101u) << 4; /* a bit per byte */
        uint32_t values;
        memcpy(&values, to->values + j * 4, 4);
        values |= spread;
        memcpy(to->values + j * 4, &values, 4);
    }
}

/* Q4_K and Q5_K: scale, minimum, 8 scales and 8 minimums of 6 bits in 12 bytes, (fifth bits: bit b of byte i is of input i of block
 * b,) nibbles: 32 bytes for two blocks. What is multiplied with the minimum is subtracted: its sign is turned. */
static void take_q4_k_or_q5_k(dt_gemm_format f, const uint8_t *from, super_block *to) {
    memcpy(to->scale, from, 2);
    memcpy(to->minimum, from + 2, 2);
    to->minimum[1] ^= 0x80;
    const uint8_t *six = from + 4;
    for (int32_t b = 0; b < 4; b++) {
        to->scales[b] = six[b] & 63;
        to->minimums[b] = six[b + 4] & 63;
        to->scales[b + 4] = (uint8_t)((six[b + 8] & 15) | six[b] >> 6 << 4);
        to->minimums[b + 4] = (uint8_t)(six[b + 8] >> 4 | six[b + 4] >> 6 << 4);
    }
    const uint8_t *fifth = from + 16, *quants = f.bits == 5 ? fifth + 32 : fifth;
    for (int32_t b = 0; b < 8; b += 2) {
        take_nibbles(quants + b * 16, 32, to->values + b * DT_GEMM_BLOCK);
    }
    for (int32_t b = 0; f.bits == 5 && b < 8; b++) {
        for (int32_t i = 0; i < DT_GEMM_BLOCK; i++) {
            to->values[b * DT_GEMM_BLOCK + i] |= (uint8_t)((fifth[i] >> b & 1) << 4);
        }
    }
}

/* Q6_K: for each half of 128 inputs 64 bytes of nibbles, then for each 32 bytes whose bit pairs belong to four blocks, 16 scales,
 * scale. */
static void take_q6_k(const uint8_t *from, super_block *to) {
    for (int32_t half = 0; half < 2; half++) {
        const uint8_t *pairs = from + 128 + half * 32;
        uint8_t *values = to->values + half * 128;
        take_nibbles(from + half * 64, 64, values);
        for (int32_t b = 0; b < 4; b++) {
            for (int32_t i = 0; i < DT_GEMM_BLOCK; i++) {
                values[b * DT_GEMM_BLOCK + i] |= (uint8_t)((pairs[i] >> 2 * b & 3) << 4);
            }
        }
    }
    memcpy(to->scales, from + 192, 16);
    memcpy(to->scale, from + 208, 2);
}

/* IQ4_XS: scale, two high bits of 8 scales, their low nibbles, nibbles as in IQ4_NL. Scales are stored + 32. */
static void take_iq4_xs(const uint8_t *from, super_block *to) {
    memcpy(to->scale, from, 2);
    for (int32_t b = 0; b < 8; b++) {
        const int32_t low = from[4 + b / 2] >> b % 2 * 4 & 15, high = from[2 + b / 4] >> b % 4 * 2 & 3;
        to->scales[b] = (uint8_t)((high << 4 | low) - 32);
        take_nibbles(from + 8 + b * 16, 16, to->values + b * DT_GEMM_BLOCK);
    }
}

static void take_super_block(dt_gemm_type type, const uint8_t *from, super_block *to) {
    switch (type) {
    case DT_GEMM_Q4_K:
    case DT_GEMM_Q5_K:
        take_q4_k_or_q5_k(dt_gemm_formats[type], from, to);
        break;
    case DT_GEMM_Q6_K:
        take_q6_k(from, to);
        break;
    case DT_GEMM_IQ4_XS:
        take_iq4_xs(from, to);
        break;
    default:
        take_block(dt_gemm_formats[type], from, to);
        break;
    }
}

/* The 32 values of row r, four at a time. */
static void put_values(dt_gemm_format f, const uint8_t *values, uint8_t *to, size_t r) {
    uint32_t quads[8];
    memcpy(quads, values, sizeof quads);
    to += r * 4;
    if (f.bits == 8) {
        for (size_t j = 0; j < 8; j++) {
            memcpy(to + j * 64, &quads[j], 4);
        }
        return;
    }
    for (size_t j = 0; j < 4; j++) {
        const uint32_t both = (quads[j] & 0x0F0F0F0Fu) | (quads[j + 4] & 0x0F0F0F0Fu) << 4;
        memcpy(to + j * 64, &both, 4);
    }
    const int32_t high_bits = f.bits - 4;
    for (int32_t piece = 0; piece < high_bits; piece++) {
        uint32_t all = 0;
        for (int32_t k = 0; k < 8 / high_bits; k++) {
            all |= (quads[piece * 4 + k] >> 4 & 0x0F0F0F0Fu) << k * high_bits;
        }
        memcpy(to + (4 + piece) * 64, &all, 4);
    }
}

static void put_super_block(dt_gemm_format f, const super_block *from, uint8_t *to, size_t r) {
    memcpy(to + r * 2, from->scale, 2);
    if (f.has_minimum) {
        memcpy(to + 32 + r * 2, from->minimum, 2);
    }
    to += dt_gemm_header_bytes(f);
    for (int32_t b = 0; b < f.n_blocks; b++, to += dt_gemm_block_bytes(f)) {
        put_values(f, from->values + b * DT_GEMM_BLOCK, to, r);
        uint8_t *bytes = to + dt_gemm_quant_bytes(f) + r;
        for (int32_t s = 0; s < f.n_scales; s++) {
            bytes[s * DT_GEMM_ROWS] = from->scales[b * f.n_scales + s];
        }
        if (f.n_scales > 0 && f.has_minimum) {
            bytes[f.n_scales * DT_GEMM_ROWS] = from->minimums[b];
        }
    }
}

void dt_gemm_pack_rows(const dt_gemm_matrix *w, void *packed, int32_t first_row, const void *rows) {
    const dt_gemm_format f = dt_gemm_formats[w->type];
    const size_t n_supers = (size_t)(w->n_in / DT_GEMM_BLOCK / f.n_blocks), group_bytes = dt_gemm_group_bytes(f, w->n_in);
    uint8_t *group = (uint8_t *)packed + (size_t)(first_row / DT_GEMM_ROWS) * group_bytes;
    for (size_t s = 0; s < n_supers; s++) {
        for (size_t r = 0; r < DT_GEMM_ROWS; r++) {
            super_block plain;
            take_super_block(w->type, (const uint8_t *)rows + (r * n_supers + s) * (size_t)f.file_bytes, &plain);
            put_super_block(f, &plain, group + s * (group_bytes / n_supers), r);
        }
    }
}

/* ---- reference ---- */

static bool supported(void) { return true; }

static void pack_block(const float *from, int32_t tile, int32_t t, void *to) {
    float largest = 0.0f;
    bool finite = true;
    for (int32_t i = 0; i < DT_GEMM_BLOCK; i++) {
        largest = fmaxf(largest, fabsf(from[i]));
        finite = finite && dt_is_finite(from[i]);
    }
    const float scale = finite ? largest / 127.0f : NAN, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    int32_t totals[2] = {0, 0};
    for (int32_t i = 0; i < DT_GEMM_BLOCK; i++) {
        const int32_t q = finite ? (int32_t)nearbyintf(from[i] * inverse) : 0;
        ((int8_t *)to)[(i / 4 * tile + t) * 4 + i % 4] = (int8_t)q;
        totals[i / 16] += q;
    }
    dt_gemm_put_scale(to, tile, t, scale, totals[0], totals[1]);
}

static float half_at(const uint8_t *from) {
    uint16_t half;
    memcpy(&half, from, 2);
    return dt_f16_to_f32(half);
}

/* Weight (r, i) of a packed block as the integer that its scale multiplies. */
static int32_t weight_at(dt_gemm_format f, const uint8_t *block, int32_t r, int32_t i) {
    const int32_t quad = i / 4, at = r * 4 + i % 4;
    if (f.bits == 8) {
        return block[quad * 64 + at] - f.offset;
    }
    int32_t value = block[quad % 4 * 64 + at] >> quad / 4 * 4 & 15;
    if (f.bits == 5) {
        value |= (block[256 + at] >> quad & 1) << 4;
    } else if (f.bits == 6) {
        value |= (block[256 + quad / 4 * 64 + at] >> quad % 4 * 2 & 3) << 4;
    }
    return (f.is_lookup ? dt_gemm_values[value] : value) - f.offset;
}

/* y plus the product of row r of a block with token t. */
static float add_block(dt_gemm_format f, const uint8_t *block, int32_t r, float scale, float minimum, const char *inputs,
                       int32_t tile, int32_t t, float y) {
    const int8_t *bytes = (const int8_t *)block + dt_gemm_quant_bytes(f) + r;
    int32_t products[2] = {0, 0};
    for (int32_t i = 0; i < DT_GEMM_BLOCK; i++) {
        products[i / 16] += weight_at(f, block, r, i) * ((const int8_t *)inputs)[(i / 4 * tile + t) * 4 + i % 4];
    }
    int32_t product = products[0] + products[1];
    if (f.n_scales == 2) {
        product = products[0] * bytes[0] + products[1] * bytes[DT_GEMM_ROWS];
    } else if (f.n_scales == 1) {
        scale *= bytes[0];
    }
    if (f.n_scales > 0 && f.has_minimum) {
        minimum *= bytes[f.n_scales * DT_GEMM_ROWS];
    }
    y = fmaf((float)product, scale * dt_gemm_scales((void *)inputs, tile)[t], y);
    return f.has_minimum ? fmaf(minimum, dt_gemm_sums((void *)inputs, tile)[t], y) : y;
}

static float row_product(dt_gemm_format f, const uint8_t *group, int32_t n_blocks, int32_t r, const char *inputs, int32_t tile,
                         int32_t t) {
    float y = 0.0f;
    for (int32_t s = 0; s < n_blocks / f.n_blocks; s++) {
        const float scale = half_at(group + r * 2), minimum = f.has_minimum ? half_at(group + 32 + r * 2) : 0.0f;
        group += dt_gemm_header_bytes(f);
        for (int32_t b = 0; b < f.n_blocks; b++) {
            y = add_block(f, group, r, scale, minimum, inputs, tile, t, y);
            group += dt_gemm_block_bytes(f);
            inputs += (size_t)tile * DT_GEMM_TOKEN_BYTES;
        }
    }
    return y;
}

static void group_tokens(dt_gemm_format f, const uint8_t *group, int32_t n_blocks, const char *inputs, int32_t n_tokens, float *y,
                         size_t stride) {
    for (int32_t first = 0, tile; first < n_tokens; first += tile) {
        tile = dt_gemm_tile(n_tokens - first);
        for (int32_t t = 0; t < tile; t++) {
            for (int32_t r = 0; r < DT_GEMM_ROWS; r++) {
                y[(size_t)(first + t) * stride + (size_t)r] = row_product(f, group, n_blocks, r, inputs, tile, t);
            }
        }
        inputs += (size_t)tile * (size_t)n_blocks * DT_GEMM_TOKEN_BYTES;
    }
}

DT_GEMM_DEFINE_GROUPS
DT_GEMM_DEFINE_KERNEL(DT_GEMM_CHUNKS)

static const dt_gemm_kernel reference = {"reference", false, supported, pack_inputs, multiply};

/* ---- choice ---- */

#if defined(DT_HAVE_AVX512) && defined(DT_HAVE_AMX)
extern const dt_gemm_kernel dt_gemm_amx;
#endif
#if defined(DT_HAVE_AVX512)
extern const dt_gemm_kernel dt_gemm_avx512_vnni, dt_gemm_avx512;
#endif
#if defined(DT_HAVE_AVX2)
extern const dt_gemm_kernel dt_gemm_avx2;
#endif

/* Fastest first, the reference last. */
static const dt_gemm_kernel *const kernels[] = {
#if defined(DT_HAVE_AVX512) && defined(DT_HAVE_AMX)
    &dt_gemm_amx,
#endif
#if defined(DT_HAVE_AVX512)
    &dt_gemm_avx512_vnni, &dt_gemm_avx512,
#endif
#if defined(DT_HAVE_AVX2)
    &dt_gemm_avx2,
#endif
    &reference,
};

const dt_gemm_kernel *const *dt_gemm_kernels(int32_t *n) {
    *n = (int32_t)(sizeof kernels / sizeof kernels[0]);
    return kernels;
}

const dt_gemm_kernel *dt_gemm_kernel_auto(void) {
    for (size_t i = 0; i < sizeof kernels / sizeof kernels[0]; i++) {
        if (kernels[i] != &reference && kernels[i]->supported()) {
            return kernels[i];
        }
    }
    return NULL;
}
