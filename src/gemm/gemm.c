/*
 * Packing weights, the scalar reference, and the choice of a kernel. See gemm.h for the layouts.
 * Invariant: this file is compiled without special instruction flags.
 */
#include "gemm/gemm.h"

#include <math.h>
#include <string.h>

bool dt_gemm_can_pack(int64_t n_in, int64_t n_out) {
    return n_in > 0 && n_out > 0 && n_in <= INT32_MAX && n_out <= INT32_MAX && n_in % DT_GEMM_BLOCK == 0 &&
           n_out % DT_GEMM_ROWS == 0;
}

/* ggml's block of 32: scale, (minimum,) quants. */
static size_t source_block_bytes(dt_gemm_type type) { return type == DT_GEMM_Q4_0 ? 18 : type == DT_GEMM_Q4_1 ? 20 : 34; }

size_t dt_gemm_row_bytes(dt_gemm_type type, int32_t n_in) { return (size_t)(n_in / DT_GEMM_BLOCK) * source_block_bytes(type); }

size_t dt_gemm_matrix_bytes(dt_gemm_type type, int32_t n_in, int32_t n_out) {
    return (size_t)(n_out / DT_GEMM_ROWS) * (size_t)(n_in / DT_GEMM_BLOCK) * dt_gemm_block_bytes(type);
}

size_t dt_gemm_input_bytes(int32_t n_in, int32_t n_tokens) {
    return (size_t)n_tokens * (size_t)(n_in / DT_GEMM_BLOCK) * DT_GEMM_TOKEN_BYTES;
}

/* A byte of ggml's 4-bit blocks holds inputs i and i + 16, which is what a byte of quads j and j + 4 holds here: four bytes move
 * as they are. Signed bytes become unsigned by flipping the highest bit. */
void dt_gemm_pack_rows(const dt_gemm_matrix *w, void *packed, int32_t first_row, const void *rows) {
    const size_t n_blocks = (size_t)(w->n_in / DT_GEMM_BLOCK), quant_bytes = dt_gemm_quant_bytes(w->type);
    const size_t block_bytes = dt_gemm_block_bytes(w->type), source_bytes = source_block_bytes(w->type);
    const uint32_t flip = w->type == DT_GEMM_Q8_0 ? 0x80808080u : 0;
    uint8_t *to = (uint8_t *)packed + (size_t)(first_row / DT_GEMM_ROWS) * n_blocks * block_bytes;
    for (size_t b = 0; b < n_blocks; b++, to += block_bytes) {
        for (size_t r = 0; r < DT_GEMM_ROWS; r++) {
            const uint8_t *from = (const uint8_t *)rows + (r * n_blocks + b) * source_bytes;
            memcpy(to + quant_bytes + r * 2, from, 2);
            if (w->type == DT_GEMM_Q4_1) {
                memcpy(to + quant_bytes + 32 + r * 2, from + 2, 2);
            }
            from += w->type == DT_GEMM_Q4_1 ? 4 : 2;
            for (size_t quad = 0; quad < quant_bytes / 64; quad++) {
                uint32_t four;
                memcpy(&four, from + quad * 4, 4);
                four ^= flip;
                memcpy(to + quad * 64 + r * 4, &four, 4);
            }
        }
    }
}

/* ---- reference ---- */

static bool reference_supported(void) { return true; }

static void reference_pack_block(const float *from, int32_t tile, int32_t t, void *to) {
    float largest = 0.0f;
    bool finite = true;
    for (int32_t i = 0; i < DT_GEMM_BLOCK; i++) {
        largest = fmaxf(largest, fabsf(from[i]));
        finite = finite && dt_is_finite(from[i]);
    }
    const float scale = finite ? largest / 127.0f : NAN, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    int32_t total = 0;
    for (int32_t i = 0; i < DT_GEMM_BLOCK; i++) {
        const int32_t q = finite ? (int32_t)nearbyintf(from[i] * inverse) : 0;
        ((int8_t *)to)[(i / 4 * tile + t) * 4 + i % 4] = (int8_t)q;
        total += q;
    }
    dt_gemm_scales(to, tile)[t] = scale;
    dt_gemm_totals(to, tile)[t] = total;
    dt_gemm_sums(to, tile)[t] = scale * (float)total;
}

static void reference_pack_inputs(const float *x, size_t stride, int32_t n_in, int32_t n_tokens, void *packed, int32_t ith,
                                  int32_t nth) {
    dt_gemm_pack_all(reference_pack_block, x, stride, n_in, n_tokens, packed, ith, nth);
}

static float half_at(const uint8_t *from) {
    uint16_t half;
    memcpy(&half, from, 2);
    return dt_f16_to_f32(half);
}

/* Weight (r, i) of a packed block as the integer that its scale multiplies. */
static int32_t weight_at(dt_gemm_type type, const uint8_t *block, int32_t r, int32_t i) {
    const int32_t quad = i / 4, at = r * 4 + i % 4;
    if (type == DT_GEMM_Q8_0) {
        return block[quad * 64 + at] - 128;
    }
    return (block[quad % 4 * 64 + at] >> (quad < 4 ? 0 : 4) & 15) - (type == DT_GEMM_Q4_0 ? 8 : 0);
}

static float reference_product(const dt_gemm_matrix *w, int32_t row, const char *inputs, int32_t tile, int32_t t) {
    const int32_t n_blocks = w->n_in / DT_GEMM_BLOCK, r = row % DT_GEMM_ROWS;
    const size_t quant_bytes = dt_gemm_quant_bytes(w->type), block_bytes = dt_gemm_block_bytes(w->type);
    const uint8_t *block = (const uint8_t *)w->packed + (size_t)(row / DT_GEMM_ROWS) * (size_t)n_blocks * block_bytes;
    float y = 0.0f;
    for (int32_t b = 0; b < n_blocks; b++, block += block_bytes, inputs += (size_t)tile * DT_GEMM_TOKEN_BYTES) {
        int32_t product = 0;
        for (int32_t i = 0; i < DT_GEMM_BLOCK; i++) {
            product += weight_at(w->type, block, r, i) * ((const int8_t *)inputs)[(i / 4 * tile + t) * 4 + i % 4];
        }
        y = fmaf((float)product, half_at(block + quant_bytes + r * 2) * dt_gemm_scales((void *)inputs, tile)[t], y);
        if (w->type == DT_GEMM_Q4_1) {
            y = fmaf(half_at(block + quant_bytes + 32 + r * 2), dt_gemm_sums((void *)inputs, tile)[t], y);
        }
    }
    return y;
}

static void reference_multiply(const dt_gemm_matrix *w, const void *packed, int32_t n_tokens, float *y, size_t stride, int32_t ith,
                               int32_t nth) {
    const size_t token_bytes = (size_t)(w->n_in / DT_GEMM_BLOCK) * DT_GEMM_TOKEN_BYTES;
    for (int32_t first = 0, tile; first < n_tokens; first += tile) {
        tile = dt_gemm_tile(n_tokens - first);
        for (int32_t row = ith; row < w->n_out; row += nth) {
            for (int32_t t = 0; t < tile; t++) {
                y[(size_t)(first + t) * stride + (size_t)row] =
                    reference_product(w, row, (const char *)packed + (size_t)first * token_bytes, tile, t);
            }
        }
    }
}

static const dt_gemm_kernel reference_kernel = {"reference", reference_supported, reference_pack_inputs, reference_multiply};

/* ---- choice ---- */

#if defined(DT_HAVE_AVX512)
extern const dt_gemm_kernel dt_gemm_avx512_vnni;
#endif
#if defined(DT_HAVE_AVX2)
extern const dt_gemm_kernel dt_gemm_avx2;
#endif

/* Fastest first, the reference last. */
static const dt_gemm_kernel *const kernels[] = {
#if defined(DT_HAVE_AVX512)
    &dt_gemm_avx512_vnni,
#endif
#if defined(DT_HAVE_AVX2)
    &dt_gemm_avx2,
#endif
    &reference_kernel,
};

const dt_gemm_kernel *const *dt_gemm_kernels(int32_t *n) {
    *n = (int32_t)(sizeof kernels / sizeof kernels[0]);
    return kernels;
}

const dt_gemm_kernel *dt_gemm_kernel_auto(void) {
    const dt_gemm_kernel *const *kernel = kernels;
    while (!(*kernel)->supported()) {
        kernel++;
    }
    return *kernel == &reference_kernel ? NULL : *kernel;
}
