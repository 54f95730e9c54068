/*
 * Between the shared driver (attn_driver.c), which knows lanes, spans, masks, threads and merging, and the instruction sets
 * (attn_avx2.c, attn_avx512.c, attn_neon.c), which know vectors: a table of small operations on plain arrays.
 *
 * Invariant of every operation here: what it computes for one row does not depend on the other rows of the call, nor on how
 * many entries beyond the row's last visible one the call covers. Sums run in index order with fused multiply-add. Bitwise
 * equal results for every batch size and thread count rest on that.
 */
#ifndef DT_ATTN_DRIVER_H
#define DT_ATTN_DRIVER_H

#include "attn/attn.h"
#include "base/amx.h"

/* How the numbers of keys or values lie: as in the cache (dt_kv_format.h), or unpacked to floats by convert_keys/convert_values. */
typedef enum dt_attn_kind { DT_ATTN_F16 = DT_KV_F16, DT_ATTN_INT8 = DT_KV_INT8, DT_ATTN_F32 } dt_attn_kind;

/* Keys and values beyond this are clamped when stored, the largest finite half. */
#define DT_ATTN_STORED_MAX 65504.0f
/* Scaled queries beyond this are clamped, so that no score overflows: 1e30 * 65504 * 1024 dimensions is still finite. */
#define DT_ATTN_QUERY_MAX 1e30f
/* A row of stored bytes has scale = largest magnitude / 127; below this magnitude it is stored as zeros. */
#define DT_ATTN_INT8_TINY 1e-30f
/* INT8 keys are multiplied as integers shifted left by 24 bits (that takes one shuffle); packed queries make up for it. */
#define DT_ATTN_INT8_KEY_UNIT 0x1p-24f
/* Rows that a block operation may compute beyond those asked for: packed queries, scores and outputs have room for them. */
#define DT_ATTN_SLACK_ROWS 4

/* What turns dot products into scores, per entry of a span; each may be absent. */
typedef struct dt_attn_terms {
    const float *k_scale; /* multiplies first */
    float softcap;        /* then s = softcap * tanh(s / softcap); 0 = none */
    const float *add;     /* then added: bias, and -INFINITY where the row must not look */
} dt_attn_terms;

typedef struct dt_attn_ops {
    int32_t score_block; /* most rows that share a block of packed queries; smaller blocks have a power of two of rows */

    /* ---- store: n is a multiple of 16 ---- */
    /* Clamps to +-DT_ATTN_STORED_MAX, NaN to 0; returns the L2 norm of the result. */
    float (*clean)(float *x, int32_t n);
    void (*to_f16)(const float *x, uint16_t *out, int32_t n);
    /* Returns the scale. */
    float (*to_int8)(const float *x, int8_t *out, int32_t n);

    /* ---- attend ---- */
    /* Keys of n_groups groups to floats [group][dim][16]; INT8 keys come out in DT_ATTN_INT8_KEY_UNIT's inverse. */
    void (*convert_keys)(dt_attn_kind kind, const void *keys, int32_t dim, int32_t n_groups, float *out);
    /* s[row * stride + entry] = q . k. q: blocks of rows, [dim][rows of the block] each (dt_attn_block_rows). For INT8, dim
     * is the padded one. While a key is read, the memory `ahead` bytes further on is asked for (not for DT_ATTN_F32). */
    void (*scores)(dt_attn_kind kind, const void *keys, int32_t dim, int32_t n_groups, ptrdiff_t ahead, const float *q,
                   int32_t n_rows, float *s, size_t stride);
    /* One row: the terms are applied to scores s[n_visible]. Rounds n_visible up to 16 within the row's memory. Returns the
     * maximum, -INFINITY where nothing is visible. */
    float (*finish)(float *s, int32_t n_visible, const dt_attn_terms *terms);
    /* Finished scores become weights exp(s - max), zero in [n_visible, n_total); both round up to 16. Returns the sum of the
     * weights. keep, where not NULL, gets a copy of the weights; v_scale, where not NULL, multiplies them in s afterwards. */
    float (*weights)(float *s, int32_t n_visible, int32_t n_total, float max, const float *v_scale, float *keep);
    /* Values of n entries, n_dims (multiple of 16) of each, to floats [entry][n_dims]. */
    void (*convert_values)(dt_attn_kind kind, const void *values, size_t row_bytes, int32_t n, int32_t n_dims, float *out);
    /* o[row * o_stride + dim] += sum over entries of w[row * w_stride + entry] * value, in entry order. ahead: as in scores. */
    void (*values)(dt_attn_kind kind, const void *values, size_t row_bytes, ptrdiff_t ahead, int32_t n, int32_t n_dims,
                   const float *w, size_t w_stride, int32_t n_rows, float *o, size_t o_stride);
    /* x[i] = exp(x[i]) for x <= 0; n is a multiple of 16. */
    void (*exponentials)(float *x, int32_t n);
    /* o = o * a + add * b; n is a multiple of 16. */
    void (*merge)(float *o, float a, const float *add, float b, int32_t n);

    /* ---- observe: any n ---- */
    /* mass[i] += sum over rows of w[row * w_stride + i] * factor[row] */
    void (*add_mass)(float *mass, const float *w, size_t w_stride, const float *factor, int32_t n_rows, int32_t n);
} dt_attn_ops;

/* Jobs with up to so many rows per lane go by span, always with the operations above; larger ones go by tile. */
#define DT_ATTN_SPAN_ROWS 48

/* Tiles in 16-bit integers: number = step * integer, rounded to nearest even; sums of products are exact, in 32 bits.
 *   queries (times the scale)         a step per row: their norm is at most DT_ATTN_INT16_NORM
 *   F16 keys                          a step per key: their largest dimension is DT_ATTN_INT16_NORM / sqrt(dim); |q.k| <= |q||k|
 *   F16 values                        a step per entry: their largest dimension is DT_ATTN_INT16_VALUE
 *   weights (times the values' step)  a step per row and span: their sum is at most DT_ATTN_INT16_SUM / the largest value
 * Integers are within DT_ATTN_INT16_MAX. Bytes of an INT8 cache stay what they are, with their scale as the step. Pairs: two
 * integers, the first in the low half: two dimensions of a query or key, the weights or values of two entries. A panel is up to
 * DT_ATTN_INT16_VECTORS vectors of 16 keys or dimensions of values, [pairs][vectors][16]. */
#define DT_ATTN_INT16_ROWS 6
#define DT_ATTN_INT16_VECTORS 4
#define DT_ATTN_INT16_MAX 32767.0f
#define DT_ATTN_INT16_NORM 46000.0f /* its square, with rounding of 1024 dimensions, is below 2^31 */
#define DT_ATTN_INT16_VALUE 8191.0f /* one value is then as precise as an F16; the bits are worth more in the weights */
#define DT_ATTN_INT16_SUM 2.1e9f
#define DT_ATTN_INT16_TINY 1e-30f /* queries and steps of weights below become zeros */

/* Few rows over an INT8 cache: queries have up to DT_ATTN_BYTES_QUERY steps and weights (times the values' scale, per row and span)
 * up to DT_ATTN_BYTES_WEIGHT, each in two bytes that are multiplied one after the other. */
#define DT_ATTN_BYTES_QUERY 16256.0f  /* = 128 * high + low; sums of 1024 dimensions stay below 2^31 */
#define DT_ATTN_BYTES_WEIGHT 65535.0f /* = 256 * high + low; sums of 256 entries stay below 2^31 */

typedef struct dt_attn_byte_query {
    const int8_t *high, *low; /* [dim_k_padded] */
    int32_t sum;              /* of the integers */
    float step;
} dt_attn_byte_query;

typedef struct dt_attn_int16_ops {
    /* Both return the step; n is a multiple of 16. Weights stay in their memory; largest_sum in units of the step. */
    float (*pack_query)(const float *x, int16_t *out, int32_t n);
    float (*pack_weights)(float *w, int32_t n, float largest_sum);
    /* n_groups groups of keys, at most DT_ATTN_INT16_VECTORS, become a panel of pairs of dimensions; step [n_groups * 16], of F16
     * only. */
    void (*pair_keys)(dt_attn_kind kind, const char *keys, int32_t dim, int32_t n_groups, uint32_t *panel, float *step);
    /* Steps of n F16 values. */
    void (*value_steps)(const char *values, size_t row_bytes, int32_t n, int32_t n_dims, float *step);
    /* n values (even), n_vectors * 16 dimensions of each, become a panel of pairs of entries. */
    void (*pair_values)(dt_attn_kind kind, const char *values, size_t row_bytes, const float *step, int32_t n, int32_t n_vectors,
                        uint32_t *panel);
    /* y = row_step[row] * sum over pairs of a[row * a_stride + pair] . panel[pair][column]; c[row * c_stride + column] becomes
     * column_step[column] * y or, where column_step is NULL, grows by y. n_rows rounds up to DT_ATTN_INT16_ROWS. */
    void (*multiply)(const uint32_t *a, size_t a_stride, const float *row_step, const uint32_t *panel, const float *column_step,
                     int32_t n_pairs, int32_t n_vectors, int32_t n_rows, float *c, size_t c_stride);

    /* ---- few rows over an INT8 cache; n is a multiple of 16, ahead as in dt_attn_ops ---- */
    /* Return the step. Weights stay in their memory: per 16 of them 16 high bytes, then 16 low ones. */
    float (*pack_query_bytes)(const float *x, int8_t *high, int8_t *low, int32_t n, int32_t *sum);
    float (*pack_weights_bytes)(float *w, int32_t n);
    /* s[row * stride + entry] = q . k */
    void (*score_bytes)(const char *keys, int32_t dim, int32_t n_groups, ptrdiff_t ahead, const dt_attn_byte_query *q,
                        int32_t n_rows, const float *k_scale, float *s, size_t stride);
    /* o[row * o_stride + dim] += step[row] * sum over n entries, at most 256, of their weights times values */
    void (*value_bytes)(const char *values, size_t row_bytes, ptrdiff_t ahead, int32_t n, int32_t n_dims, const char *w,
                        size_t w_bytes, const float *step, int32_t n_rows, float *o, size_t o_stride);
} dt_attn_int16_ops;

/* Tiles in pairs of BF16 (attn_amx.c): a number is a high half plus a low one. Rows are queries, or weights (times the values'
 * scales of an INT8 cache): per DT_ATTN_SPLIT_STEP numbers 64 bytes of high halves, then 64 of low ones. A panel is 16 keys, or
 * dimensions of values, after the other, of each the steps' tiles: high, and for F16 low. */
#define DT_ATTN_SPLIT_STEP 32
#define DT_ATTN_SPLIT_ROWS 32 /* multiplied together */

/* c[row][column] = a . b for DT_ATTN_SPLIT_ROWS rows, all of which may be read and written. */
typedef struct dt_attn_split_product {
    const char *a;
    size_t a_bytes; /* from row to row */
    const char *b;
    bool exact;                 /* b has no low halves */
    int32_t n_steps, n_columns; /* of DT_ATTN_SPLIT_STEP numbers; of 16 columns */
    int32_t b_steps;            /* that a column of the panel has, at least n_steps */
    float *c;
    size_t c_stride;
    int32_t column, step; /* what comes next; 0 at first */
} dt_attn_split_product;

typedef struct dt_attn_split_ops {
    /* The thread's tiles are configured for what follows, and given back as they were. */
    void (*begin)(dt_amx_table *old);
    void (*end)(const dt_amx_table *old);
    /* n is a multiple of DT_ATTN_SPLIT_STEP. Weights are split in place, and what is lost is cut off, not rounded. */
    void (*split_query)(const float *x, int32_t n, float *out);
    void (*split_weights)(float *w, int32_t n);
    void (*key_panel)(dt_attn_kind kind, const char *keys, int32_t dim, int32_t n_groups, char *panel);
    /* n and n_dims are multiples of 16. */
    void (*value_panel)(dt_attn_kind kind, const char *values, size_t row_bytes, int32_t n, int32_t n_dims, char *panel);
    /* Does a part of the product: a step of two columns; false when all is done. Between parts the thread may compute anything but
     * another product. */
    bool (*advance)(dt_attn_split_product *product);
} dt_attn_split_ops;

/* Rows of the next block when n rows are left: the largest block, or the next power of two (computing up to
 * DT_ATTN_SLACK_ROWS rows that nobody reads). */
static inline int32_t dt_attn_block_rows(int32_t n, int32_t largest) {
    int32_t rows = 1;
    while (rows < n && rows < largest) {
        rows *= 2;
    }
    return DT_MIN(rows, largest);
}

size_t dt_attn_driver_scratch_bytes(const dt_kv_format *format, int32_t n_lanes, int32_t n_rep, int32_t n_query,
                                    int32_t max_entries);
size_t dt_attn_driver_thread_bytes(const dt_kv_format *format, int32_t max_entries);
size_t dt_attn_driver_thread_bytes_split(const dt_kv_format *format, int32_t max_entries); /* of kernels with dt_attn_split_ops */
void dt_attn_driver_prepare(dt_attn_job *job);
void dt_attn_driver_store(dt_attn_job *job, int32_t ith, int32_t nth);
void dt_attn_driver_attend(dt_attn_job *job, int32_t ith, int32_t nth);
void dt_attn_driver_observe(dt_attn_job *job, int32_t ith, int32_t nth);

#if defined(DT_HAVE_AVX2)
extern const dt_attn_ops dt_attn_avx2_ops;
#endif
#if defined(DT_HAVE_AVX512)
extern const dt_attn_ops dt_attn_avx512_ops;
#endif
#if defined(DT_HAVE_NEON)
extern const dt_attn_ops dt_attn_neon_ops;
#endif
#if defined(DT_HAVE_AVX512_VNNI)
extern const dt_attn_int16_ops dt_attn_avx512_int16;
#endif
#if defined(DT_HAVE_AVX512_VNNI) && defined(DT_HAVE_AMX)
extern const dt_attn_split_ops dt_attn_amx_split;
#endif

/* The references share nothing with the driver (attn_reference.c). */
size_t dt_attn_reference_scratch_bytes(const dt_kv_format *format, int32_t n_lanes, int32_t n_rep, int32_t n_query,
                                       int32_t max_entries);
size_t dt_attn_reference_thread_bytes(const dt_kv_format *format, int32_t max_entries);
void dt_attn_reference_prepare(dt_attn_job *job);
void dt_attn_reference_store(dt_attn_job *job, int32_t ith, int32_t nth);
void dt_attn_reference_attend(dt_attn_job *job, int32_t ith, int32_t nth);
void dt_attn_reference_attend_int16(dt_attn_job *job, int32_t ith, int32_t nth);
void dt_attn_reference_observe(dt_attn_job *job, int32_t ith, int32_t nth);

#endif
