/*
 * Matrix products with 4- and 8-bit weights: what ggml has no fast x86 kernel for (measured on AVX-512 without AMX, Q4_1: ggml
 * dots one row with one token at a time, and most of a prompt's time went there). Weights are packed once, when the model is
 * loaded, into a layout that serves one token and many alike, so no second copy is kept.
 *
 *   y[token][row] = sum over i of w[row][i] * x[token][i]
 *
 * Numbers: activations are rounded to 8 bits per block of 32 with a scale of their own, as ggml does for these types; the
 * products of a block are exact integers; blocks are added in order in F32. A row's result does not depend on the number of
 * tokens nor threads.
 *
 * Packed weights: groups of DT_GEMM_ROWS rows, for each block of 32 inputs
 *   quants   Q4: 4 x 64 bytes, low nibbles quad j, high nibbles quad j+4; Q8_0: 8 x 64 bytes, value + 128. A 64-byte piece holds
 *            4 consecutive inputs ("quad") of each of the 16 rows
 *   scale    F16 [16]
 *   minimum  F16 [16]   Q4_1 only
 * Packed activations: tiles of 16, 8, 4, 2 or 1 tokens (T), for each block
 *   quants int8 [8 quads][T][4],  scale float [T],  sum float [T] = scale * sum of the quants
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
/* The scalar reference, supported everywhere. */
const dt_gemm_kernel *dt_gemm_kernel_reference(void);

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
#define DT_GEMM_TOKEN_BYTES (DT_GEMM_BLOCK + 2 * sizeof(float))

#endif
