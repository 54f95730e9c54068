/*
 * Matrix products with 4- and 8-bit weights: what ggml has no fast x86 kernel for (measured on AVX-512 without AMX, Q4_1: ggml
 * dots one row with one token at a time, and most of a prompt's time went there). Weights are packed once, when the model is
 * loaded, into a layout that serves one token and many alike, so no second copy is kept.
 *
 *   y[token][row] = sum over i of w[row][i] * x[token][i]
 *
 * Numbers: activations are rounded to 8 bits per block of 32 with a scale of their own, as ggml does for these types; the
 * product of a block is an exact integer; per block, in order, y = fma(product, weight scale * input scale, y) and for Q4_1 then
 * y = fma(minimum, input sum, y). Every kernel does just that, so results are bitwise equal for every kernel, number of tokens and
 * number of threads.
 *
 * Packed weights: groups of DT_GEMM_ROWS rows, for each block of 32 inputs
 *   quants   Q4: 4 x 64 bytes, low nibbles quad j, high nibbles quad j+4; Q8_0: 8 x 64 bytes, value + 128. A 64-byte piece holds
 *            4 consecutive inputs ("quad") of each of the 16 rows
 *   scale    F16 [16]
 *   minimum  F16 [16]   Q4_1 only
 * Packed activations: tiles of 16, 8, 4, 2 or 1 tokens (T), for each block
 *   quants int8 [8 quads][T][4],  scale float [T],  total int32 [T] = sum of the quants,  sum float [T] = scale * total
 *
 * Inputs that are not finite make their block's scale NaN, and so the results: rounding must not hide that something overflowed.
 *
 * Calling: pack_inputs by all threads, a barrier, multiply by all threads.
 */
#ifndef DT_GEMM_H
#define DT_GEMM_H

#include "base/base.h"

#define DT_GEMM_ROWS 16
#define DT_GEMM_BLOCK 32
#define DT_GEMM_TILE 16 /* most tokens of a tile */

typedef enum dt_gemm_type { DT_GEMM_Q4_0, DT_GEMM_Q4_1, DT_GEMM_Q8_0 } dt_gemm_type;

typedef struct dt_gemm_matrix {
    dt_gemm_type type;
    int32_t n_in, n_out; /* multiples of 32 and 16 */
    const void *packed;  /* 64-byte aligned */
} dt_gemm_matrix;

typedef struct dt_gemm_kernel {
    const char *name;
    bool (*supported)(void);
    /* x: [n_tokens][n_in], stride in floats. Every thread packs some tiles. */
    void (*pack_inputs)(const float *x, size_t stride, int32_t n_in, int32_t n_tokens, void *packed, int32_t ith, int32_t nth);
    /* y: [n_tokens][n_out], stride in floats. Every thread computes some rows. */
    void (*multiply)(const dt_gemm_matrix *w, const void *packed, int32_t n_tokens, float *y, size_t stride, int32_t ith,
                     int32_t nth);
} dt_gemm_kernel;

/* The fastest kernel this machine supports, or NULL: then ggml's own products are the better choice. */
const dt_gemm_kernel *dt_gemm_kernel_auto(void);
/* All kernels compiled in, *n of them, supported here or not; the last is the scalar reference. */
const dt_gemm_kernel *const *dt_gemm_kernels(int32_t *n);

/* True when a matrix of this shape can be packed. */
bool dt_gemm_can_pack(int64_t n_in, int64_t n_out);
/* Bytes of a row in ggml's layout (blocks of 32 inputs), and of the packed matrix. */
size_t dt_gemm_row_bytes(dt_gemm_type type, int32_t n_in);
size_t dt_gemm_matrix_bytes(dt_gemm_type type, int32_t n_in, int32_t n_out);
size_t dt_gemm_input_bytes(int32_t n_in, int32_t n_tokens);
/* Packs rows [first_row, first_row + 16) from ggml's layout. */
void dt_gemm_pack_rows(const dt_gemm_matrix *w, void *packed, int32_t first_row, const void *rows);

/* ---- shared by the kernels ---- */

/* Bytes of one block of a group of rows, and offsets in it. */
static inline size_t dt_gemm_quant_bytes(dt_gemm_type type) { return type == DT_GEMM_Q8_0 ? 512 : 256; }
static inline size_t dt_gemm_block_bytes(dt_gemm_type type) { return dt_gemm_quant_bytes(type) + (type == DT_GEMM_Q4_1 ? 64 : 32); }
/* Tokens of the tile that begins when n are left. */
static inline int32_t dt_gemm_tile(int32_t n) {
    int32_t tile = DT_GEMM_TILE;
    while (tile > n) {
        tile /= 2;
    }
    return tile;
}
/* Bytes that one token takes per block in packed activations, whatever the tile. */
#define DT_GEMM_TOKEN_BYTES ((size_t)DT_GEMM_BLOCK + 12)

/* Where scale, total and sum of token t lie in a packed block of a tile. */
static inline float *dt_gemm_scales(void *block, int32_t tile) { return (float *)((char *)block + (size_t)tile * DT_GEMM_BLOCK); }
static inline int32_t *dt_gemm_totals(void *block, int32_t tile) { return (int32_t *)(dt_gemm_scales(block, tile) + tile); }
static inline float *dt_gemm_sums(void *block, int32_t tile) { return dt_gemm_scales(block, tile) + 2 * tile; }

/* Packs 32 inputs of token t of a tile. */
typedef void (*dt_gemm_pack_block_fn)(const float *from, int32_t tile, int32_t t, void *to);

/* pack_inputs for a kernel's pack_block. Tiles are shared out between threads; of a single token, its blocks. */
static inline void dt_gemm_pack_all(dt_gemm_pack_block_fn pack_block, const float *x, size_t stride, int32_t n_in, int32_t n_tokens,
                                    void *packed, int32_t ith, int32_t nth) {
    const int32_t n_blocks = n_in / DT_GEMM_BLOCK;
    for (int32_t first = 0, tile; first < n_tokens; first += tile) {
        tile = dt_gemm_tile(n_tokens - first);
        const bool whole = n_tokens > 1;
        if (whole && first / DT_GEMM_TILE % nth != ith) {
            continue;
        }
        const int32_t begin = whole ? 0 : n_blocks * ith / nth, end = whole ? n_blocks : n_blocks * (ith + 1) / nth;
        for (int32_t b = begin; b < end; b++) {
            char *to = (char *)packed + ((size_t)first * (size_t)n_blocks + (size_t)b * (size_t)tile) * DT_GEMM_TOKEN_BYTES;
            for (int32_t t = 0; t < tile; t++) {
                pack_block(x + (size_t)(first + t) * stride + (size_t)b * DT_GEMM_BLOCK, tile, t, to);
            }
        }
    }
}

/* One group of rows times all tokens. */
typedef void (*dt_gemm_group_fn)(const uint8_t *group, int32_t n_blocks, const char *inputs, int32_t n_tokens, float *y,
                                 size_t stride);

/* multiply for a kernel's group function. A thread's rows are one run: it reads its weights from end to end. */
static inline void dt_gemm_multiply_groups(dt_gemm_group_fn group_fn, const dt_gemm_matrix *w, const void *packed, int32_t n_tokens,
                                           float *y, size_t stride, int32_t ith, int32_t nth) {
    const int64_t n_groups = w->n_out / DT_GEMM_ROWS;
    const int32_t n_blocks = w->n_in / DT_GEMM_BLOCK;
    const size_t group_bytes = (size_t)n_blocks * dt_gemm_block_bytes(w->type);
    for (int64_t g = n_groups * ith / nth; g < n_groups * (ith + 1) / nth; g++) {
        group_fn((const uint8_t *)w->packed + (size_t)g * group_bytes, n_blocks, packed, n_tokens, y + g * DT_GEMM_ROWS, stride);
    }
}

#endif
