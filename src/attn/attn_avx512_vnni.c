/*
 * Tiles of many rows as 16-bit integers (AVX512_VNNI): VPDPWSSD takes two dimensions (or two entries) of 16 keys (or dimensions of
 * values) at once, twice what F32 does, and its sums are exact. dt_attn_int16_ops says what is rounded. Compiled with its own
 * flags; called only after attn.c found the instructions at run time.
 *
 * Why not BF16, which runs at the same speed: with its 8 bits queries and keys put SmolLM2's logits (F32 weights) 40 times as far
 * from libllama's as those of its own two ways of attention are apart (Kullback-Leibler divergence 9e-5 against 2.5e-6). With 16
 * bits nothing is to be seen, since that is finer than the F16 cache; and machines without BF16 gain too.
 *
 * Invariants: nothing here is called on a machine without these instructions. A row's result does not depend on the other rows.
 */
#include "attn/attn_driver.h"

#include <immintrin.h>
#include <math.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

INLINE __m512 load_f16(const char *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p)); }

INLINE void store_int16(int16_t *to, __m512 x) {
    _mm256_storeu_si256((__m256i *)(void *)to, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x)));
}

/* ---- rows -------------------------------------------------------------------------------------------- */

static float pack_query(const float *x, int16_t *out, int32_t n) {
    __m512 largest = _mm512_setzero_ps(), squares = _mm512_setzero_ps();
    for (int32_t i = 0; i < n; i += 16) {
        largest = _mm512_max_ps(largest, _mm512_abs_ps(_mm512_loadu_ps(x + i)));
    }
    const float max = _mm512_reduce_max_ps(largest), unit = max > DT_ATTN_INT16_TINY ? 1.0f / max : 0.0f;
    for (int32_t i = 0; i < n; i += 16) {
        const __m512 y = _mm512_mul_ps(_mm512_loadu_ps(x + i), _mm512_set1_ps(unit));
        squares = _mm512_fmadd_ps(y, y, squares);
    }
    float step = sqrtf(_mm512_reduce_add_ps(squares)) / DT_ATTN_INT16_NORM; /* NaN where x has one, whatever the maximum says */
    step = step < 1.0f / DT_ATTN_INT16_MAX ? 1.0f / DT_ATTN_INT16_MAX : step;
    for (int32_t i = 0; i < n; i += 16) {
        store_int16(out + i, _mm512_mul_ps(_mm512_loadu_ps(x + i), _mm512_set1_ps(unit / step)));
    }
    return max * step;
}

static float pack_weights(float *w, int32_t n, float largest_sum) {
    __m512 largest = _mm512_setzero_ps(), sum = _mm512_setzero_ps();
    for (int32_t i = 0; i < n; i += 16) {
        const __m512 x = _mm512_loadu_ps(w + i);
        largest = _mm512_max_ps(largest, x);
        sum = _mm512_add_ps(sum, x);
    }
    float step = _mm512_reduce_add_ps(sum) / largest_sum;
    const float other = _mm512_reduce_max_ps(largest) / DT_ATTN_INT16_MAX;
    step = step < other ? other : step;
    const __m512 inverse = _mm512_set1_ps(step > DT_ATTN_INT16_TINY ? 1.0f / step : 0.0f);
    int16_t *out = (int16_t *)(void *)w;
    for (int32_t i = 0; i < n; i += 16) {
        store_int16(out + i, _mm512_mul_ps(_mm512_loadu_ps(w + i), inverse));
    }
    return step;
}

/* ---- panels ------------------------------------------------------------------------------------------ */

/* Lane i gets a[i] in its low half and b[i] in its high half. */
INLINE __m512i pairs_of(__m512 a, __m512 b) {
    return _mm512_mask_blend_epi16(0xAAAAAAAAu, _mm512_cvtps_epi32(a), _mm512_slli_epi32(_mm512_cvtps_epi32(b), 16));
}

/* 16 keys: a step for each from its largest dimension, which bounds its norm. */
INLINE void pair_f16_group(const char *keys, int32_t dim, float bound, uint32_t *to, int32_t to_step, float *step) {
    __m512i largest = _mm512_setzero_si512(); /* magnitudes of halves are ordered like integers */
    const __m512i magnitude = _mm512_set1_epi16(0x7FFF);
    for (int32_t d = 0; d + 1 < dim; d += 2) {
        largest = _mm512_max_epu16(largest, _mm512_and_si512(_mm512_loadu_si512(keys + d * 32), magnitude));
    }
    __m256i both = _mm256_max_epu16(_mm512_castsi512_si256(largest), _mm512_extracti64x4_epi64(largest, 1));
    if (dim % 2 != 0) {
        both = _mm256_max_epu16(both, _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(const void *)(keys + (dim - 1) * 32)),
                                                       _mm512_castsi512_si256(magnitude)));
    }
    const __m512 steps = _mm512_mul_ps(_mm512_cvtph_ps(both), _mm512_set1_ps(1.0f / bound));
    const __mmask16 some = _mm512_cmp_ps_mask(steps, _mm512_setzero_ps(), _CMP_GT_OQ);
    const __m512 inverse = _mm512_maskz_div_ps(some, _mm512_set1_ps(1.0f), steps);
    _mm512_storeu_ps(step, steps);
    for (int32_t d = 0; d < dim; d += 2, to += to_step) {
        const __m512 a = load_f16(keys + d * 32), b = d + 1 < dim ? load_f16(keys + d * 32 + 32) : _mm512_setzero_ps();
        _mm512_storeu_si512(to, pairs_of(_mm512_mul_ps(a, inverse), _mm512_mul_ps(b, inverse)));
    }
}

/* Dimensions j and j + 1 of 16 keys: their bytes become the upper ones of 16 bits. */
INLINE __m512i byte_pair(__m512i quads, int j) {
    const char a = (char)j, b = (char)(j + 1);
    const __m128i order = _mm_setr_epi8(-1, a, -1, b, -1, (char)(a + 4), -1, (char)(b + 4), -1, (char)(a + 8), -1, (char)(b + 8),
                                        -1, (char)(a + 12), -1, (char)(b + 12));
    return _mm512_srai_epi16(_mm512_shuffle_epi8(quads, _mm512_broadcast_i32x4(order)), 8);
}

static void pair_keys(dt_attn_kind kind, const char *keys, int32_t dim, int32_t n_groups, uint32_t *panel, float *step) {
    const float bound = fminf(DT_ATTN_INT16_NORM / sqrtf((float)dim), DT_ATTN_INT16_MAX);
    const int32_t to_step = n_groups * DT_KV_GROUP;
    for (int32_t g = 0; g < n_groups; g++) {
        uint32_t *to = panel + g * DT_KV_GROUP;
        if (kind == DT_ATTN_F16) {
            pair_f16_group(keys + (size_t)(g * dim) * 32, dim, bound, to, to_step, step + g * DT_KV_GROUP);
            continue;
        }
        const char *quads = keys + (size_t)(g * dim) * DT_KV_GROUP;
        for (int32_t d = 0; d < dim; d += 4, to += 2 * to_step) {
            const __m512i x = _mm512_xor_si512(_mm512_loadu_si512(quads + d * DT_KV_GROUP), _mm512_set1_epi8((char)0x80));
            _mm512_storeu_si512(to, byte_pair(x, 0));
            _mm512_storeu_si512(to + to_step, byte_pair(x, 2));
        }
    }
}

/* The largest magnitude of a row of halves; n is a multiple of 16. */
INLINE float largest_half(const char *row, int32_t n) {
    const __m256i magnitude = _mm256_set1_epi16(0x7FFF);
    __m256i largest = _mm256_setzero_si256();
    for (int32_t d = 0; d < n; d += 16) {
        largest = _mm256_max_epu16(largest,
                                   _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(const void *)(row + d * 2)), magnitude));
    }
    const __m128i x = _mm_max_epu16(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
    const __m128i ones = _mm_set1_epi16(-1); /* the instruction finds a minimum */
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_xor_si128(_mm_minpos_epu16(_mm_xor_si128(x, ones)), ones)));
}

static void value_steps(const char *values, size_t row_bytes, int32_t n, int32_t n_dims, float *step) {
    for (int32_t t = 0; t < n; t++, values += row_bytes) {
        step[t] = largest_half(values, n_dims) * (1.0f / DT_ATTN_INT16_VALUE);
    }
}

INLINE __m512i load_int8(const char *p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p)); }

static void pair_values(dt_attn_kind kind, const char *values, size_t row_bytes, const float *step, int32_t n, int32_t n_vectors,
                        uint32_t *panel) {
    for (int32_t t = 0; t < n; t += 2, values += 2 * row_bytes) {
        const __m512 inverse_a = _mm512_set1_ps(step[t] > 0.0f ? 1.0f / step[t] : 0.0f);
        const __m512 inverse_b = _mm512_set1_ps(step[t + 1] > 0.0f ? 1.0f / step[t + 1] : 0.0f);
        for (int32_t x = 0; x < n_vectors; x++, panel += 16) {
            const char *a = values + x * (kind == DT_ATTN_F16 ? 32 : 16), *b = a + row_bytes;
            if (kind == DT_ATTN_F16) {
                _mm512_storeu_si512(panel, pairs_of(_mm512_mul_ps(load_f16(a), inverse_a), _mm512_mul_ps(load_f16(b), inverse_b)));
            } else {
                _mm512_storeu_si512(panel, _mm512_mask_blend_epi16(0xAAAAAAAAu, load_int8(a), _mm512_slli_epi32(load_int8(b), 16)));
            }
        }
    }
}

/* ---- product ----------------------------------------------------------------------------------------- */

typedef int32_t v16 __attribute__((vector_size(64))); /* with __m512i gcc keeps a copy of every sum in memory */

/* DT_ATTN_INT16_ROWS rows times N vectors stay in registers. */
INLINE void multiply_block(const int N, const bool with_column_step, const uint32_t *a, size_t a_stride, const float *row_step,
                           const uint32_t *panel, const float *column_step, int32_t n_pairs, float *c, size_t c_stride) {
    v16 sum[DT_ATTN_INT16_ROWS * DT_ATTN_INT16_VECTORS];
    UNROLL for (int i = 0; i < DT_ATTN_INT16_ROWS * N; i++) { sum[i] = (v16){0}; }
    for (int32_t p = 0; p < n_pairs; p++, panel += N * 16) {
        __m512i b[DT_ATTN_INT16_VECTORS];
        UNROLL for (int x = 0; x < N; x++) { b[x] = _mm512_loadu_si512(panel + x * 16); }
        UNROLL for (int r = 0; r < DT_ATTN_INT16_ROWS; r++) {
            const __m512i row = _mm512_set1_epi32((int32_t)a[(size_t)r * a_stride + (size_t)p]);
            UNROLL for (int x = 0; x < N; x++) { sum[r * N + x] = (v16)_mm512_dpwssd_epi32((__m512i)sum[r * N + x], row, b[x]); }
        }
    }
    UNROLL for (int r = 0; r < DT_ATTN_INT16_ROWS; r++) {
        const __m512 step = _mm512_set1_ps(row_step[r]);
        UNROLL for (int x = 0; x < N; x++) {
            float *to = c + (size_t)r * c_stride + x * 16;
            const __m512 y = _mm512_cvtepi32_ps((__m512i)sum[r * N + x]);
            if (with_column_step) {
                _mm512_storeu_ps(to, _mm512_mul_ps(y, _mm512_mul_ps(step, _mm512_loadu_ps(column_step + x * 16))));
            } else {
                _mm512_storeu_ps(to, _mm512_fmadd_ps(y, step, _mm512_loadu_ps(to)));
            }
        }
    }
}

INLINE void multiply_rows(const int N, const bool with_column_step, const uint32_t *a, size_t a_stride, const float *row_step,
                          const uint32_t *panel, const float *column_step, int32_t n_pairs, int32_t n_rows, float *c,
                          size_t c_stride) {
    for (int32_t r = 0; r < n_rows; r += DT_ATTN_INT16_ROWS) {
        multiply_block(N, with_column_step, a, a_stride, row_step + r, panel, column_step, n_pairs, c, c_stride);
        a += DT_ATTN_INT16_ROWS * a_stride;
        c += DT_ATTN_INT16_ROWS * c_stride;
    }
}

static void multiply(const uint32_t *a, size_t a_stride, const float *row_step, const uint32_t *panel, const float *column_step,
                     int32_t n_pairs, int32_t n_vectors, int32_t n_rows, float *c, size_t c_stride) {
#define CASE(N, with)                                                                                                              \
    case 2 * (N) + (with):                                                                                                         \
        multiply_rows(N, with, a, a_stride, row_step, panel, column_step, n_pairs, n_rows, c, c_stride);                           \
        break
    switch (2 * n_vectors + (column_step != NULL)) {
        CASE(1, 0);
        CASE(1, 1);
        CASE(2, 0);
        CASE(2, 1);
        CASE(3, 0);
        CASE(3, 1);
        CASE(4, 0);
        CASE(4, 1);
    }
#undef CASE
}

/* ---- few rows over an INT8 cache --------------------------------------------------------------------- */

/* Address arithmetic on integers: the memory asked for is another object's. Into the second-level cache, as attn_simd.h says. */
INLINE void ask_for(const char *from, ptrdiff_t ahead) {
    __builtin_prefetch((const void *)((uintptr_t)from + (uintptr_t)ahead), 0, 2);
}

static float pack_query_bytes(const float *x, int8_t *high, int8_t *low, int32_t n, int32_t *sum) {
    __m512 largest = _mm512_setzero_ps(), total = _mm512_setzero_ps();
    for (int32_t i = 0; i < n; i += 16) {
        const __m512 y = _mm512_loadu_ps(x + i);
        largest = _mm512_max_ps(largest, _mm512_abs_ps(y));
        total = _mm512_add_ps(total, _mm512_mul_ps(y, _mm512_setzero_ps()));
    }
    const float max = _mm512_reduce_max_ps(largest), step = max / DT_ATTN_BYTES_QUERY;
    const __m512 inverse = _mm512_set1_ps(max > DT_ATTN_INT16_TINY ? 1.0f / step : 0.0f);
    __m512i all = _mm512_setzero_si512();
    for (int32_t i = 0; i < n; i += 16) {
        const __m512i y = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i), inverse));
        const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(y, _mm512_set1_epi32(64)), 7);
        all = _mm512_add_epi32(all, y);
        _mm_storeu_si128((__m128i *)(void *)(high + i), _mm512_cvtepi32_epi8(upper));
        _mm_storeu_si128((__m128i *)(void *)(low + i), _mm512_cvtepi32_epi8(_mm512_sub_epi32(y, _mm512_slli_epi32(upper, 7))));
    }
    *sum = _mm512_reduce_add_epi32(all);
    return step + _mm512_reduce_add_ps(total); /* NaN where x has one, whatever the maximum says */
}

/* R rows against G groups. Keys are unsigned, 128 too large. */
INLINE void score_bytes_block(const int R, const int G, const char *keys, int32_t dim, ptrdiff_t ahead, const dt_attn_byte_query *q,
                              const float *k_scale, float *s, size_t stride) {
    v16 high[12], low[12];
    UNROLL for (int i = 0; i < R * G; i++) { high[i] = low[i] = (v16){0}; }
    for (int32_t d = 0; d < dim; d += 4) {
        __m512i k[4];
        UNROLL for (int x = 0; x < G; x++) {
            const char *at = keys + (x * dim + d) * DT_KV_GROUP;
            k[x] = _mm512_loadu_si512(at);
            ask_for(at, ahead);
        }
        UNROLL for (int r = 0; r < R; r++) {
            int32_t h, l;
            memcpy(&h, q[r].high + d, 4);
            memcpy(&l, q[r].low + d, 4);
            UNROLL for (int x = 0; x < G; x++) {
                high[r * G + x] = (v16)_mm512_dpbusd_epi32((__m512i)high[r * G + x], k[x], _mm512_set1_epi32(h));
                low[r * G + x] = (v16)_mm512_dpbusd_epi32((__m512i)low[r * G + x], k[x], _mm512_set1_epi32(l));
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++) {
        const __m512i excess = _mm512_slli_epi32(_mm512_set1_epi32(q[r].sum), 7); /* wraps, as do the sums; the difference fits */
        UNROLL for (int x = 0; x < G; x++) {
            const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32((__m512i)high[r * G + x], 7), (__m512i)low[r * G + x]);
            const __m512 step = _mm512_mul_ps(_mm512_set1_ps(q[r].step), _mm512_loadu_ps(k_scale + x * 16));
            _mm512_storeu_ps(s + (size_t)r * stride + x * 16,
                             _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(sum, excess)), step));
        }
    }
}

INLINE void score_bytes_rows(const int R, const int G, const char *keys, int32_t dim, int32_t n_groups, ptrdiff_t ahead,
                             const dt_attn_byte_query *q, const float *k_scale, float *s, size_t stride) {
    int32_t g = 0;
    for (; g + G <= n_groups; g += G) {
        score_bytes_block(R, G, keys + g * dim * DT_KV_GROUP, dim, ahead, q, k_scale + g * 16, s + g * 16, stride);
    }
    for (; g < n_groups; g++) {
        score_bytes_block(R, 1, keys + g * dim * DT_KV_GROUP, dim, ahead, q, k_scale + g * 16, s + g * 16, stride);
    }
}

static void score_bytes(const char *keys, int32_t dim, int32_t n_groups, ptrdiff_t ahead, const dt_attn_byte_query *q,
                        int32_t n_rows, const float *k_scale, float *s, size_t stride) {
    for (int32_t r = 0; r < n_rows;) {
        const int32_t rows = n_rows - r == 4 ? 2 : DT_MIN(n_rows - r, 3);
        float *to = s + (size_t)r * stride;
        if (rows == 1) {
            score_bytes_rows(1, 4, keys, dim, n_groups, ahead, q + r, k_scale, to, stride);
        } else if (rows == 2) {
            score_bytes_rows(2, 4, keys, dim, n_groups, ahead, q + r, k_scale, to, stride);
        } else {
            score_bytes_rows(3, 4, keys, dim, n_groups, ahead, q + r, k_scale, to, stride);
        }
        r += rows;
    }
}

static float pack_weights_bytes(float *w, int32_t n) {
    __m512 largest = _mm512_setzero_ps(), total = _mm512_setzero_ps();
    for (int32_t i = 0; i < n; i += 16) {
        const __m512 x = _mm512_loadu_ps(w + i);
        largest = _mm512_max_ps(largest, x);
        total = _mm512_add_ps(total, _mm512_mul_ps(x, _mm512_setzero_ps()));
    }
    const float step = _mm512_reduce_max_ps(largest) / DT_ATTN_BYTES_WEIGHT;
    const __m512 inverse = _mm512_set1_ps(step > DT_ATTN_INT16_TINY ? 1.0f / step : 0.0f);
    char *out = (char *)w;
    for (int32_t i = 0; i < n; i += 16) {
        const __m512i y = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(w + i), inverse));
        _mm_storeu_si128((__m128i *)(void *)(out + i * 2), _mm512_cvtepi32_epi8(_mm512_srli_epi32(y, 8)));
        _mm_storeu_si128((__m128i *)(void *)(out + i * 2 + 16), _mm512_cvtepi32_epi8(y));
    }
    return step + _mm512_reduce_add_ps(total);
}

/* Four rows of 64 bytes become four vectors of quads: in lane l (of 128 bits) of vector j, dimensions 16l + 4j to 16l + 4j + 3. */
INLINE void quads_of(const char *values, size_t row_bytes, __mmask64 mask, __m512i quads[4]) {
    const __m512i a = _mm512_maskz_loadu_epi8(mask, values), b = _mm512_maskz_loadu_epi8(mask, values + row_bytes);
    const __m512i c = _mm512_maskz_loadu_epi8(mask, values + 2 * row_bytes),
                  d = _mm512_maskz_loadu_epi8(mask, values + 3 * row_bytes);
    const __m512i ab_low = _mm512_unpacklo_epi8(a, b), ab_high = _mm512_unpackhi_epi8(a, b);
    const __m512i cd_low = _mm512_unpacklo_epi8(c, d), cd_high = _mm512_unpackhi_epi8(c, d);
    quads[0] = _mm512_unpacklo_epi16(ab_low, cd_low);
    quads[1] = _mm512_unpackhi_epi16(ab_low, cd_low);
    quads[2] = _mm512_unpacklo_epi16(ab_high, cd_high);
    quads[3] = _mm512_unpackhi_epi16(ab_high, cd_high);
}

/* R rows, up to 64 dimensions (those in mask; n_dims of them), all n entries. */
INLINE void value_bytes_block(const int R, const char *values, size_t row_bytes, ptrdiff_t ahead, int32_t n, int32_t n_dims,
                              const char *w, size_t w_bytes, const float *step, float *o, size_t o_stride) {
    const __mmask64 mask = n_dims >= 64 ? ~(__mmask64)0 : ((__mmask64)1 << n_dims) - 1;
    v16 high[12], low[12];
    UNROLL for (int i = 0; i < R * 4; i++) { high[i] = low[i] = (v16){0}; }
    for (int32_t t = 0; t < n; t += 4, values += 4 * row_bytes) {
        __m512i quads[4];
        UNROLL for (size_t i = 0; i < 4; i++) { ask_for(values + i * row_bytes, ahead); }
        quads_of(values, row_bytes, mask, quads);
        UNROLL for (int r = 0; r < R; r++) {
            int32_t h, l;
            const char *at = w + (size_t)r * w_bytes + t / 16 * 32 + t % 16;
            memcpy(&h, at, 4);
            memcpy(&l, at + 16, 4);
            UNROLL for (int x = 0; x < 4; x++) {
                high[r * 4 + x] = (v16)_mm512_dpbusd_epi32((__m512i)high[r * 4 + x], _mm512_set1_epi32(h), quads[x]);
                low[r * 4 + x] = (v16)_mm512_dpbusd_epi32((__m512i)low[r * 4 + x], _mm512_set1_epi32(l), quads[x]);
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++) {
        UNROLL for (int x = 0; x < 4; x++) {
            const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32((__m512i)high[r * 4 + x], 8), (__m512i)low[r * 4 + x]);
            const __m512 y = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(step[r]));
            const __m128 lanes[4] = {_mm512_extractf32x4_ps(y, 0), _mm512_extractf32x4_ps(y, 1), _mm512_extractf32x4_ps(y, 2),
                                     _mm512_extractf32x4_ps(y, 3)};
            for (int32_t l = 0; l * 16 < n_dims; l++) {
                float *to = o + (size_t)r * o_stride + l * 16 + x * 4;
                _mm_storeu_ps(to, _mm_add_ps(_mm_loadu_ps(to), lanes[l]));
            }
        }
    }
}

static void value_bytes(const char *values, size_t row_bytes, ptrdiff_t ahead, int32_t n, int32_t n_dims, const char *w,
                        size_t w_bytes, const float *step, int32_t n_rows, float *o, size_t o_stride) {
    for (int32_t r = 0; r < n_rows;) {
        const int32_t rows = n_rows - r == 4 ? 2 : DT_MIN(n_rows - r, 3);
        for (int32_t d = 0; d < n_dims; d += 64) {
            const char *from = values + d, *weights = w + (size_t)r * w_bytes;
            float *to = o + (size_t)r * o_stride + d;
            if (rows == 1) {
                value_bytes_block(1, from, row_bytes, ahead, n, DT_MIN(n_dims - d, 64), weights, w_bytes, step + r, to, o_stride);
            } else if (rows == 2) {
                value_bytes_block(2, from, row_bytes, ahead, n, DT_MIN(n_dims - d, 64), weights, w_bytes, step + r, to, o_stride);
            } else {
                value_bytes_block(3, from, row_bytes, ahead, n, DT_MIN(n_dims - d, 64), weights, w_bytes, step + r, to, o_stride);
            }
        }
        r += rows;
    }
}

const dt_attn_int16_ops dt_attn_avx512_int16 = {
    .pack_query = pack_query,
    .pack_weights = pack_weights,
    .pair_keys = pair_keys,
    .value_steps = value_steps,
    .pair_values = pair_values,
    .multiply = multiply,
    .pack_query_bytes = pack_query_bytes,
    .score_bytes = score_bytes,
    .pack_weights_bytes = pack_weights_bytes,
    .value_bytes = value_bytes,
};
