/*
 * Matrix products with quantized weights, for x86. Without AMX prompts go 1.1 times (Q5_K) to 7 times (Q4_1) as fast as with
 * ggml's, which tiles over rows and tokens for some types only; with AMX 1.2 times (Q4_K) to 1.7 times (Q4_0, Q6_K) as fast as in
 * ggml's AMX buffers, and single tokens 1 to 3 times (Q5_K). Weights are packed once, when the model is loaded, into a layout that
 * serves one token and many alike, so no second copy is kept.
 *
 *   y[token][row] = sum over i of w[row][i] * x[token][i]
 *
 * Numbers: activations are rounded to 8 bits per block of 32 with a scale of their own, for all types (ggml rounds them per 256 for
 * the K types), so that matrices of different types share them. The product of a block is an exact integer below 2^24; per block,
 * in order, y = fma(product, weight scale * input scale, y) and, where the type has minimums, then y = fma(minimum, input sum, y).
 * Every kernel does just that, so results are bitwise equal for every kernel, number of tokens and number of threads.
 *
 * Inputs that are not finite make their block's scale NaN, and so the results: rounding must not hide that something overflowed.
 *
 * What comes before a product is computed while its inputs are packed (dt_gemm_input_kind), and matrices that share their inputs
 * are multiplied together: threads wait for each other once for all, which a small model does as long as it computes.
 *
 * Calling: pack_inputs by all threads, a barrier, one multiply by all threads, a barrier. The layouts are in gemm_kernel.h.
 */
#ifndef DT_GEMM_H
#define DT_GEMM_H

#include "base/base.h"

#define DT_GEMM_ROWS 16
#define DT_GEMM_BLOCK 32

/* ggml's types that can be packed: X(name). */
#define DT_GEMM_TYPES(X) X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) X(IQ4_NL) X(Q4_K) X(Q5_K) X(Q6_K) X(IQ4_XS)

#define DT_GEMM_ENUM(name) DT_GEMM_##name,
typedef enum dt_gemm_type { DT_GEMM_TYPES(DT_GEMM_ENUM) DT_GEMM_N_TYPES } dt_gemm_type;
#undef DT_GEMM_ENUM

typedef struct dt_gemm_matrix {
    dt_gemm_type type;
    int32_t n_in, n_out; /* multiples of 32 (of 256 for K types and IQ4_XS) and of 16 */
    const void *packed;
} dt_gemm_matrix;

typedef enum dt_gemm_input_kind {
    DT_GEMM_PLAIN, /* x */
    DT_GEMM_NORM,  /* x, or x + y, divided by the root of the mean of its squares, times weight (RMSNorm) */
    DT_GEMM_SILU   /* x / (1 + e^-x) * y (SwiGLU, Shazeer 2020) */
} dt_gemm_input_kind;

/* What is packed. Rows are tokens, strides in floats. */
typedef struct dt_gemm_inputs {
    dt_gemm_input_kind kind;
    int32_t n_in, n_tokens;
    const float *x, *y; /* [n_tokens][n_in]; y may be NULL with DT_GEMM_NORM, and is not read with DT_GEMM_PLAIN */
    size_t x_stride, y_stride;
    const float *weight; /* [n_in] of the norm */
    float epsilon;       /* is added to the mean */
    float *sum; /* [n_tokens][n_in] x + y of the norm, where there is a y; no other thread's part may be read before a barrier */
} dt_gemm_inputs;

#define DT_GEMM_MAX_MATRICES 3

/* Matrices with the same inputs: y[token] is the rows of all, one after the other. */
typedef struct dt_gemm_product {
    const dt_gemm_matrix *matrices[DT_GEMM_MAX_MATRICES];
    int32_t n_matrices, n_tokens;
    float *y;
    size_t stride; /* of a token, in floats */
} dt_gemm_product;

typedef struct dt_gemm_kernel {
    const char *name;
    bool has_amx;
    bool (*supported)(void);
    /* Every thread packs some tiles. */
    void (*pack_inputs)(const dt_gemm_inputs *in, void *packed, int32_t ith, int32_t nth);
    /* Every thread computes some rows; `packed` counts what is given out. */
    void (*multiply)(const dt_gemm_product *p, void *packed, int32_t ith, int32_t nth);
} dt_gemm_kernel;

/* The fastest kernel this machine supports, or NULL: then ggml's own products are the better choice. */
const dt_gemm_kernel *dt_gemm_kernel_auto(void);
/* All kernels compiled in, *n of them, supported here or not; the last is the scalar reference. */
const dt_gemm_kernel *const *dt_gemm_kernels(int32_t *n);

/* True when a matrix of this shape can be packed. */
bool dt_gemm_can_pack(dt_gemm_type type, int64_t n_in, int64_t n_out);
/* Bytes of a row in ggml's layout, and of the packed matrix: 0 to 2.8 % more than in ggml's layout. */
size_t dt_gemm_row_bytes(dt_gemm_type type, int32_t n_in);
size_t dt_gemm_matrix_bytes(dt_gemm_type type, int32_t n_in, int32_t n_out);
size_t dt_gemm_input_bytes(int32_t n_in, int32_t n_tokens);
/* Packs rows [first_row, first_row + 16) from ggml's layout. */
void dt_gemm_pack_rows(const dt_gemm_matrix *w, void *packed, int32_t first_row, const void *rows);

#endif
