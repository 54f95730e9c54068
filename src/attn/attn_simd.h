/*
 * The operations of attn_driver.h written once over a native vector; attn_avx2.c, attn_avx512.c and attn_neon.c define the vector
 * and include this file, so its text is compiled once per instruction set. Not a header in the usual sense: it defines static
 * functions and DT_SIMD_OPS, the table's initialiser.
 *
 * The including file defines: vf (a vector of W floats), vi (W int32 or 4*W bytes), W, and the operations named v_*;
 * the largest register blocks: DT_SIMD_SCORE_ROWS, DT_SIMD_VALUE_ROWS by DT_SIMD_VALUE_VECTORS; DT_SIMD_SCORE_VECTORS_4, the
 * vectors of keys that 4 rows take at a time.
 *
 * Register blocks: a kernel holds R rows times G groups of keys (or N vectors of value dimensions) as accumulators, so that every
 * key or value loaded is used R times and enough independent sums are in flight to hide the latency of a multiply-add. The
 * loops over accumulators have constant bounds once inlined and vanish.
 */
#ifndef DT_ATTN_SIMD_H
#define DT_ATTN_SIMD_H

#define DT_INLINE static inline __attribute__((always_inline))
#define DT_UNROLL _Pragma("GCC unroll 32")
#define DT_VECTORS_PER_GROUP (DT_KV_GROUP / W)

/* ---- exponential ------------------------------------------------------------------------------------ */

/* exp(x) for x <= 0, relative error about 1e-7 above -87, exactly 0 below (-INFINITY included) and exactly 1 at 0; NaN stays
 * NaN. x = n ln2 + r; the polynomial is a minimax fit of exp on |r| <= ln2/2 with p(0) = 1. */
DT_INLINE vf simd_exp(vf x) {
    const vf n = v_round(v_mul(x, v_set1(1.44269504f)));
    vf r = v_fnma(n, v_set1(0.693359375f), x); /* the leading bits of ln2: n times this is exact */
    r = v_fnma(n, v_set1(-2.12194440e-4f), r);
    vf p = v_set1(0x1.70a1eap-10f);
    p = v_fma(p, r, v_set1(0x1.129264p-7f));
    p = v_fma(p, r, v_set1(0x1.555154p-5f));
    p = v_fma(p, r, v_set1(0x1.5553bcp-3f));
    p = v_fma(p, r, v_set1(0x1.000002p-1f));
    p = v_fma(p, r, v_set1(1.0f));
    p = v_fma(p, r, v_set1(1.0f));
    return v_zero_where_less(v_scale_by_power(p, n), x, v_set1(-87.0f));
}

DT_INLINE vf simd_tanh(vf x) {
    const vf t = simd_exp(v_mul(v_abs(x), v_set1(-2.0f)));
    return v_copy_sign(v_div(v_sub(v_set1(1.0f), t), v_add(v_set1(1.0f), t)), x);
}

static void simd_exponentials(float *x, int32_t n) {
    for (int32_t i = 0; i < n; i += W) {
        v_store(x + i, simd_exp(v_load(x + i)));
    }
}

/* ---- store ------------------------------------------------------------------------------------------- */

static float simd_clean(float *x, int32_t n) {
    vf sum = v_set1(0.0f);
    for (int32_t i = 0; i < n; i += W) {
        vf y = v_zero_where_nan(v_load(x + i));
        y = v_max(v_min(y, v_set1(DT_ATTN_STORED_MAX)), v_set1(-DT_ATTN_STORED_MAX));
        v_store(x + i, y);
        sum = v_fma(y, y, sum);
    }
    return sqrtf(v_sum_all(sum));
}

static void simd_to_f16(const float *x, uint16_t *out, int32_t n) {
    for (int32_t i = 0; i < n; i += W) {
        v_store_f16(out + i, v_load(x + i));
    }
}

static float simd_to_int8(const float *x, int8_t *out, int32_t n) {
    vf largest = v_set1(0.0f);
    for (int32_t i = 0; i < n; i += W) {
        largest = v_max(largest, v_abs(v_load(x + i)));
    }
    const float amax = v_max_all(largest);
    const bool tiny = amax <= DT_ATTN_INT8_TINY;
    const vf inverse = v_set1(tiny ? 0.0f : 127.0f / amax);
    for (int32_t i = 0; i < n; i += W) {
        v_store_int8(out + i, v_mul(v_load(x + i), inverse));
    }
    return tiny ? 0.0f : amax / 127.0f;
}

/* ---- scores ------------------------------------------------------------------------------------------ */

#define DT_MAX_ACCUMULATORS 24

/* Address arithmetic on integers: the memory asked for is another object's. Into the second-level cache: a span of keys or values
 * does not fit the first, which can also wait for few lines at a time. */
DT_INLINE void simd_ask_for(const char *from, ptrdiff_t ahead) {
    __builtin_prefetch((const void *)((uintptr_t)from + (uintptr_t)ahead), 0, 2);
}

DT_INLINE void scores_block(const dt_attn_kind kind, const int R, const int G, const char *keys, size_t group_bytes, int32_t dim,
                            ptrdiff_t ahead, const float *q, float *s, size_t stride) {
    const int N = G * DT_VECTORS_PER_GROUP;
    vf sum[DT_MAX_ACCUMULATORS];
    DT_UNROLL
    for (int i = 0; i < R * N; i++) {
        sum[i] = v_set1(0.0f);
    }
    const int step = kind == DT_ATTN_INT8 ? 4 : 1;
    for (int32_t d = 0; d < dim; d += step) {
        vi quads[8];
        if (kind == DT_ATTN_INT8) {
            DT_UNROLL
            for (int x = 0; x < N; x++) {
                const char *at = keys + (size_t)(x / DT_VECTORS_PER_GROUP) * group_bytes + (size_t)d * DT_KV_GROUP;
                quads[x] = v_load_quads(at + x % DT_VECTORS_PER_GROUP * W * 4);
                if (x % DT_VECTORS_PER_GROUP == 0) {
                    simd_ask_for(at, ahead);
                }
            }
        }
        DT_UNROLL
        for (int j = 0; j < step; j++) {
            vf k[8];
            DT_UNROLL
            for (int x = 0; x < N; x++) {
                const char *group = keys + (size_t)(x / DT_VECTORS_PER_GROUP) * group_bytes;
                const int within = x % DT_VECTORS_PER_GROUP * W;
                if (kind == DT_ATTN_INT8) {
                    k[x] = v_quad_dim(quads[x], j);
                } else if (kind == DT_ATTN_F16) {
                    k[x] = v_load_f16((const uint16_t *)group + (size_t)d * DT_KV_GROUP + within);
                    if (within == 0) {
                        simd_ask_for(group + (size_t)d * DT_KV_GROUP * 2, ahead);
                    }
                } else {
                    k[x] = v_load((const float *)group + (size_t)d * DT_KV_GROUP + within);
                }
            }
            DT_UNROLL
            for (int r = 0; r < R; r++) {
                const vf b = v_set1(q[(size_t)(d + j) * (size_t)R + (size_t)r]);
                DT_UNROLL
                for (int x = 0; x < N; x++) {
                    sum[r * N + x] = v_fma(k[x], b, sum[r * N + x]);
                }
            }
        }
    }
    DT_UNROLL
    for (int r = 0; r < R; r++) {
        DT_UNROLL
        for (int x = 0; x < N; x++) {
            v_store(s + (size_t)r * stride + x * W, sum[r * N + x]);
        }
    }
}

/* All groups against one block of R rows, G groups at a time. */
DT_INLINE void scores_rows(const dt_attn_kind kind, const int R, const int G, const char *keys, size_t group_bytes, int32_t dim,
                           int32_t n_groups, ptrdiff_t ahead, const float *q, float *s, size_t stride) {
    int32_t g = 0;
    for (; g + G <= n_groups; g += G) {
        scores_block(kind, R, G, keys + (size_t)g * group_bytes, group_bytes, dim, ahead, q, s + g * DT_KV_GROUP, stride);
    }
    for (; g < n_groups; g++) {
        scores_block(kind, R, 1, keys + (size_t)g * group_bytes, group_bytes, dim, ahead, q, s + g * DT_KV_GROUP, stride);
    }
}

#define DT_SIMD_GROUPS(vectors) ((vectors) / DT_VECTORS_PER_GROUP > 0 ? (vectors) / DT_VECTORS_PER_GROUP : 1)

DT_INLINE void scores_kind(const dt_attn_kind kind, const char *keys, size_t group_bytes, int32_t dim, int32_t n_groups,
                           ptrdiff_t ahead, const float *q, int32_t n_rows, float *s, size_t stride) {
    for (int32_t row = 0; row < n_rows;) {
        const int32_t rows = dt_attn_block_rows(n_rows - row, DT_SIMD_SCORE_ROWS);
        switch (rows) {
        case 1:
            scores_rows(kind, 1, DT_SIMD_GROUPS(8), keys, group_bytes, dim, n_groups, ahead, q, s, stride);
            break;
        case 2:
            scores_rows(kind, 2, DT_SIMD_GROUPS(4), keys, group_bytes, dim, n_groups, ahead, q, s, stride);
            break;
        case 4:
            scores_rows(kind, 4, DT_SIMD_GROUPS(DT_SIMD_SCORE_VECTORS_4), keys, group_bytes, dim, n_groups, ahead, q, s, stride);
            break;
#if DT_SIMD_SCORE_ROWS > 8
        case 8:
            scores_rows(kind, 8, DT_SIMD_GROUPS(2), keys, group_bytes, dim, n_groups, ahead, q, s, stride);
            break;
#endif
        default:
            scores_rows(kind, DT_SIMD_SCORE_ROWS, DT_SIMD_GROUPS(2), keys, group_bytes, dim, n_groups, ahead, q, s, stride);
            break;
        }
        row += rows;
        q += (size_t)rows * (size_t)dim;
        s += (size_t)rows * stride;
    }
}

static void simd_scores(dt_attn_kind kind, const void *keys, int32_t dim, int32_t n_groups, ptrdiff_t ahead, const float *q,
                        int32_t n_rows, float *s, size_t stride) {
    const size_t group = (size_t)dim * DT_KV_GROUP;
    switch (kind) {
    case DT_ATTN_F16:
        scores_kind(DT_ATTN_F16, keys, group * 2, dim, n_groups, ahead, q, n_rows, s, stride);
        break;
    case DT_ATTN_INT8:
        scores_kind(DT_ATTN_INT8, keys, group, dim, n_groups, ahead, q, n_rows, s, stride);
        break;
    case DT_ATTN_F32:
        scores_kind(DT_ATTN_F32, keys, group * 4, dim, n_groups, ahead, q, n_rows, s, stride);
        break;
    }
}

static void simd_convert_keys(dt_attn_kind kind, const void *keys, int32_t dim, int32_t n_groups, float *out) {
    const int32_t n = n_groups * dim * DT_KV_GROUP;
    if (kind == DT_ATTN_F16) {
        for (int32_t i = 0; i < n; i += W) {
            v_store(out + i, v_load_f16((const uint16_t *)keys + i));
        }
        return;
    }
    for (int32_t i = 0; i < n; i += 4 * DT_KV_GROUP) { /* four dimensions of a group */
        for (int32_t x = 0; x < DT_KV_GROUP; x += W) {
            const vi quads = v_load_quads((const char *)keys + i + x * 4);
            DT_UNROLL
            for (int j = 0; j < 4; j++) {
                v_store(out + i + j * DT_KV_GROUP + x, v_quad_dim(quads, j));
            }
        }
    }
}

/* ---- weights ----------------------------------------------------------------------------------------- */

/* Applies the terms to n scores; the memory beyond n, up to a whole group, becomes -INFINITY. */
DT_INLINE void simd_finish_scores(float *s, int32_t n, const dt_attn_terms *terms) {
    if (terms->k_scale != NULL || terms->softcap > 0.0f || terms->add != NULL) {
        const vf cap = v_set1(terms->softcap), inverse_cap = v_set1(terms->softcap > 0.0f ? 1.0f / terms->softcap : 0.0f);
        for (int32_t i = 0; i < n; i += W) {
            vf x = v_load(s + i);
            if (terms->k_scale != NULL) {
                x = v_mul(x, v_load(terms->k_scale + i));
            }
            if (terms->softcap > 0.0f) {
                x = v_mul(cap, simd_tanh(v_mul(x, inverse_cap)));
            }
            if (terms->add != NULL) {
                x = v_add(x, v_load(terms->add + i));
            }
            v_store(s + i, x);
        }
    }
    for (int32_t i = n; i % DT_KV_GROUP != 0; i++) {
        s[i] = -INFINITY;
    }
}

static float simd_finish(float *s, int32_t n_visible, const dt_attn_terms *terms) {
    simd_finish_scores(s, n_visible, terms);
    vf largest = v_set1(-INFINITY);
    for (int32_t i = 0; i < n_visible; i += W) {
        largest = v_max(largest, v_load(s + i));
    }
    /* A NaN in the query makes every score NaN, which a maximum may lose; the row must not pass for an empty one. */
    return n_visible > 0 && s[0] != s[0] ? s[0] : v_max_all(largest);
}

static float simd_weights(float *s, int32_t n_visible, int32_t n_total, float max, const float *v_scale, float *keep) {
    const int32_t n_computed = DT_ROUND_UP(n_visible, DT_KV_GROUP), n_padded = DT_ROUND_UP(n_total, DT_KV_GROUP);
    int32_t i = 0;
    vf total = v_set1(0.0f);
    if (max != -INFINITY) {
        const vf shift = v_set1(max);
        for (; i < n_computed; i += W) {
            vf w = simd_exp(v_sub(v_load(s + i), shift));
            total = v_add(total, w);
            if (keep != NULL) {
                v_store(keep + i, w);
            }
            if (v_scale != NULL) {
                w = v_mul(w, v_load(v_scale + i));
            }
            v_store(s + i, w);
        }
    }
    for (; i < n_padded; i += W) {
        v_store(s + i, v_set1(0.0f));
        if (keep != NULL) {
            v_store(keep + i, v_set1(0.0f));
        }
    }
    return v_sum_all(total);
}

static void simd_add_mass(float *mass, const float *w, size_t w_stride, const float *factor, int32_t n_rows, int32_t n) {
    int32_t i = 0;
    for (; i + W <= n; i += W) {
        vf sum = v_load(mass + i);
        for (int32_t r = 0; r < n_rows; r++) {
            sum = v_fma(v_load(w + (size_t)r * w_stride + i), v_set1(factor[r]), sum);
        }
        v_store(mass + i, sum);
    }
    for (; i < n; i++) {
        for (int32_t r = 0; r < n_rows; r++) {
            mass[i] += w[(size_t)r * w_stride + (size_t)i] * factor[r];
        }
    }
}

/* ---- values ------------------------------------------------------------------------------------------ */

DT_INLINE vf load_value(const dt_attn_kind kind, const char *row, int32_t dim) {
    return kind == DT_ATTN_F16    ? v_load_f16((const uint16_t *)row + dim)
           : kind == DT_ATTN_INT8 ? v_load_int8((const int8_t *)row + dim)
                                  : v_load((const float *)row + dim);
}

/* R rows times N vectors of dimensions, over n entries. */
DT_INLINE void values_block(const dt_attn_kind kind, const int R, const int N, const char *values, size_t row_bytes,
                            ptrdiff_t ahead, int32_t n, const float *w, size_t w_stride, float *o, size_t o_stride) {
    vf sum[DT_MAX_ACCUMULATORS];
    DT_UNROLL
    for (int i = 0; i < R * N; i++) {
        sum[i] = v_load(o + (size_t)(i / N) * o_stride + i % N * W);
    }
    for (int32_t t = 0; t < n; t++) {
        const char *row = values + (size_t)t * row_bytes;
        vf v[8];
        DT_UNROLL
        for (int x = 0; x < N; x++) {
            v[x] = load_value(kind, row, x * W);
        }
        if (kind != DT_ATTN_F32) {
            const int vector_bytes = W * (kind == DT_ATTN_F16 ? 2 : 1);
            DT_UNROLL
            for (int x = 0; x < N; x++) {
                if (x * vector_bytes % 64 == 0) {
                    simd_ask_for(row + x * vector_bytes, ahead);
                }
            }
        }
        DT_UNROLL
        for (int r = 0; r < R; r++) {
            const vf b = v_set1(w[(size_t)r * w_stride + (size_t)t]);
            DT_UNROLL
            for (int x = 0; x < N; x++) {
                sum[r * N + x] = v_fma(v[x], b, sum[r * N + x]);
            }
        }
    }
    DT_UNROLL
    for (int i = 0; i < R * N; i++) {
        v_store(o + (size_t)(i / N) * o_stride + i % N * W, sum[i]);
    }
}

/* R rows, all dimensions: N vectors at a time, then what is left. */
DT_INLINE void values_rows(const dt_attn_kind kind, const int R, const int N, const char *values, size_t row_bytes, ptrdiff_t ahead,
                           int32_t n, int32_t n_dims, const float *w, size_t w_stride, float *o, size_t o_stride) {
    const int32_t element = kind == DT_ATTN_F32 ? 4 : kind == DT_ATTN_F16 ? 2 : 1;
    int32_t d = 0;
    for (; d + N * W <= n_dims; d += N * W) {
        values_block(kind, R, N, values + d * element, row_bytes, ahead, n, w, w_stride, o + d, o_stride);
    }
    const bool two = N > 2 && d + 2 * W <= n_dims;
    if (two) {
        values_block(kind, R, 2, values + d * element, row_bytes, ahead, n, w, w_stride, o + d, o_stride);
    }
    const int32_t last = W == DT_KV_GROUP ? d + (two ? 2 * W : 0) : n_dims; /* padded dimensions are a multiple of 16 */
    if (last < n_dims) {
        values_block(kind, R, 1, values + last * element, row_bytes, ahead, n, w, w_stride, o + last, o_stride);
    }
}

DT_INLINE void values_kind(const dt_attn_kind kind, const char *values, size_t row_bytes, ptrdiff_t ahead, int32_t n,
                           int32_t n_dims, const float *w, size_t w_stride, int32_t n_rows, float *o, size_t o_stride) {
    for (int32_t row = 0; row < n_rows;) {
        const int32_t rows = dt_attn_block_rows(n_rows - row, DT_SIMD_VALUE_ROWS);
        switch (rows) {
        case 1:
            values_rows(kind, 1, 4, values, row_bytes, ahead, n, n_dims, w, w_stride, o, o_stride);
            break;
        case 2:
            values_rows(kind, 2, 4, values, row_bytes, ahead, n, n_dims, w, w_stride, o, o_stride);
            break;
        case 4:
            values_rows(kind, 4, DT_SIMD_VALUE_VECTORS, values, row_bytes, ahead, n, n_dims, w, w_stride, o, o_stride);
            break;
        default:
            values_rows(kind, DT_SIMD_VALUE_ROWS, DT_SIMD_VALUE_VECTORS, values, row_bytes, ahead, n, n_dims, w, w_stride, o,
                        o_stride);
            break;
        }
        row += rows;
        w += (size_t)rows * w_stride;
        o += (size_t)rows * o_stride;
    }
}

static void simd_values(dt_attn_kind kind, const void *values, size_t row_bytes, ptrdiff_t ahead, int32_t n, int32_t n_dims,
                        const float *w, size_t w_stride, int32_t n_rows, float *o, size_t o_stride) {
    switch (kind) {
    case DT_ATTN_F16:
        values_kind(DT_ATTN_F16, values, row_bytes, ahead, n, n_dims, w, w_stride, n_rows, o, o_stride);
        break;
    case DT_ATTN_INT8:
        values_kind(DT_ATTN_INT8, values, row_bytes, ahead, n, n_dims, w, w_stride, n_rows, o, o_stride);
        break;
    case DT_ATTN_F32:
        values_kind(DT_ATTN_F32, values, row_bytes, ahead, n, n_dims, w, w_stride, n_rows, o, o_stride);
        break;
    }
}

static void simd_convert_values(dt_attn_kind kind, const void *values, size_t row_bytes, int32_t n, int32_t n_dims, float *out) {
    for (int32_t t = 0; t < n; t++) {
        const char *row = (const char *)values + (size_t)t * row_bytes;
        float *to = out + (size_t)t * (size_t)n_dims;
        for (int32_t d = 0; d < n_dims; d += W) {
            v_store(to + d, kind == DT_ATTN_F16 ? load_value(DT_ATTN_F16, row, d) : load_value(DT_ATTN_INT8, row, d));
        }
    }
}

static void simd_merge(float *o, float a, const float *add, float b, int32_t n) {
    const vf va = v_set1(a), vb = v_set1(b);
    for (int32_t i = 0; i < n; i += W) {
        v_store(o + i, v_fma(v_load(add + i), vb, v_mul(v_load(o + i), va)));
    }
}

#define DT_SIMD_OPS                                                                                                                \
    {                                                                                                                              \
        .score_block = DT_SIMD_SCORE_ROWS, .clean = simd_clean, .to_f16 = simd_to_f16, .to_int8 = simd_to_int8,                    \
        .convert_keys = simd_convert_keys, .scores = simd_scores, .finish = simd_finish, .weights = simd_weights,                  \
        .convert_values = simd_convert_values, .values = simd_values, .exponentials = simd_exponentials, .merge = simd_merge,      \
        .add_mass = simd_add_mass,                                                                                                 \
    }

#endif
