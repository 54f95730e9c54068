/*
 * Tiles of many rows with AMX's BF16 products. A BF16 has 8 bits of precision, too few for queries and keys (attn_avx512_vnni.c
 * says what it costs), so every number is the sum of two: an F16 exactly, queries and weights to 16 bits. Of the product of two
 * sums the product of the small halves is left out; the other three add up in F32. Bytes of an INT8 cache are BF16s as they are.
 * SmolLM2's logits (F32 weights) then are as near to those of the F32 kernel as with 16-bit tiles: Kullback-Leibler divergence
 * 1e-7.
 *
 * Where two numbers share 32 bits, as the instruction wants them, they are i and i + 16 of 32 dimensions (or entries), so that
 * vectors are never shuffled.
 *
 * Invariants: nothing here is called on a machine without these instructions. A row's result does not depend on the other rows.
 */
#include "attn/attn_driver.h"

#if defined(DT_HAVE_AMX)

#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))

enum { STEP = DT_ATTN_SPLIT_STEP, TILE_BYTES = DT_AMX_TILE_BYTES };

static void begin(dt_amx_table *old) {
    dt_amx_table table = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        table.rows[i] = DT_AMX_ROWS;
        table.row_bytes[i] = DT_AMX_ROW_BYTES;
    }
    dt_amx_begin(&table, old);
}

/* ---- splitting ---------------------------------------------------------------------------------------- */

#define UPPER 0xFFFF0000u /* the part of a float that is a BF16 */

/* The upper halves of a and b: lane i gets a[i] in its low half and b[i] in its high half. */
INLINE __m512i upper_pairs(__m512i a, __m512i b) {
    return _mm512_ternarylogic_epi32(_mm512_srli_epi32(a, 16), b, _mm512_set1_epi32((int)UPPER), 0xF8); /* a | (b & mask) */
}

/* x minus its upper half, which is exact. */
INLINE __m512i lower_part(__m512i x) {
    const __m512i upper = _mm512_and_si512(x, _mm512_set1_epi32((int)UPPER));
    return _mm512_castps_si512(_mm512_sub_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(upper)));
}

/* Rounds to 16 bits, half away from zero; infinities and NaN stay what they are. */
INLINE __m512i rounded(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __mmask16 finite = (__mmask16)~_mm512_fpclass_ps_mask(x, 0x99);
    return _mm512_mask_add_epi32(bits, finite, bits, _mm512_set1_epi32(0x80));
}

INLINE void split_pairs(__m512i a, __m512i b, float *out) {
    _mm512_storeu_si512(out, upper_pairs(a, b));
    _mm512_storeu_si512(out + 16, upper_pairs(lower_part(a), lower_part(b)));
}

static void split_query(const float *x, int32_t n, float *out) {
    for (int32_t i = 0; i < n; i += STEP) {
        split_pairs(rounded(_mm512_loadu_ps(x + i)), rounded(_mm512_loadu_ps(x + i + 16)), out + i);
    }
}

static void split_weights(float *w, int32_t n) {
    for (int32_t i = 0; i < n; i += STEP) {
        split_pairs(_mm512_loadu_si512(w + i), _mm512_loadu_si512(w + i + 16), w + i);
    }
}

/* ---- panels ------------------------------------------------------------------------------------------- */

INLINE __m512i load_f16(const char *p) {
    return _mm512_castps_si512(_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p)));
}
INLINE __m512i load_int8(const char *p) {
    return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p))));
}

/* Up to 32 rows of 16 numbers become a tile, of F16 two of them. */
INLINE char *split_rows(const bool f16, const char *from, size_t row_bytes, int32_t n_rows, char *to) {
    for (int32_t i = 0; i < 16; i++, from += row_bytes, to += DT_AMX_ROW_BYTES) {
        __m512i a = _mm512_setzero_si512(), b = a;
        if (i < n_rows) {
            a = f16 ? load_f16(from) : load_int8(from);
        }
        if (i + 16 < n_rows) {
            b = f16 ? load_f16(from + 16 * row_bytes) : load_int8(from + 16 * row_bytes);
        }
        _mm512_storeu_si512(to, upper_pairs(a, b));
        if (f16) {
            _mm512_storeu_si512(to + TILE_BYTES, upper_pairs(lower_part(a), lower_part(b)));
        }
    }
    return to + (f16 ? TILE_BYTES : 0);
}

/* Dimension j of four of 16 keys. */
INLINE __m512i quad_dim(__m512i quads, int j) {
    const __m512i top = (__m512i)((__v16su)quads << (24 - 8 * j));
    return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_srai_epi32(top, 24)));
}

INLINE __m512i load_quads(const char *from, bool there) {
    const __m512i flip = _mm512_set1_epi8((char)0x80);
    return there ? _mm512_xor_si512(_mm512_loadu_si512(from), flip) : _mm512_setzero_si512();
}

/* Up to 32 dimensions of 16 keys, in quads. */
static char *split_quads(const char *from, int32_t n_dims, char *to) {
    for (int32_t d = 0; d < 16; d += 4, from += 64) {
        const __m512i a = load_quads(from, d < n_dims), b = load_quads(from + 256, d + 16 < n_dims);
        for (int j = 0; j < 4; j++, to += DT_AMX_ROW_BYTES) {
            _mm512_storeu_si512(to, upper_pairs(quad_dim(a, j), quad_dim(b, j)));
        }
    }
    return to;
}

static void key_panel(dt_attn_kind kind, const char *keys, int32_t dim, int32_t n_groups, char *panel) {
    const int32_t dim_bytes = kind == DT_ATTN_F16 ? DT_KV_GROUP * 2 : DT_KV_GROUP;
    for (int32_t g = 0; g < n_groups; g++) {
        for (int32_t d = 0; d < dim; d += STEP) {
            const char *from = keys + (size_t)(g * dim + d) * (size_t)dim_bytes;
            panel =
                kind == DT_ATTN_F16 ? split_rows(true, from, (size_t)dim_bytes, dim - d, panel) : split_quads(from, dim - d, panel);
        }
    }
}

static void value_panel(dt_attn_kind kind, const char *values, size_t row_bytes, int32_t n, int32_t n_dims, char *panel) {
    for (int32_t d = 0; d < n_dims; d += 16) {
        for (int32_t t = 0; t < n; t += STEP) {
            const char *from = values + (size_t)t * row_bytes;
            panel = kind == DT_ATTN_F16 ? split_rows(true, from + d * 2, row_bytes, n - t, panel)
                                        : split_rows(false, from + d, row_bytes, n - t, panel);
        }
    }
}

/* ---- product ------------------------------------------------------------------------------------------ */

/* Tiles 0 and 1 hold the sums of the first 16 rows, 2 and 3 those of the others; 4 and 5 columns, 6 and 7 rows. Loads take nearly
 * as long as products: each is used twice at least. */
INLINE void multiply_step(const bool exact, const bool two, const char *a, size_t a_bytes, const char *b, size_t b_bytes) {
    const char *lower_a = a + DT_AMX_ROWS * a_bytes;
    DT_AMX_LOAD(6, a, a_bytes);
    DT_AMX_LOAD(7, lower_a, a_bytes);
    if (!exact) {
        DT_AMX_LOAD(4, b + TILE_BYTES, DT_AMX_ROW_BYTES);
        DT_AMX_MULTIPLY_BF16(0, 6, 4);
        DT_AMX_MULTIPLY_BF16(2, 7, 4);
        if (two) {
            DT_AMX_LOAD(5, b + b_bytes + TILE_BYTES, DT_AMX_ROW_BYTES);
            DT_AMX_MULTIPLY_BF16(1, 6, 5);
            DT_AMX_MULTIPLY_BF16(3, 7, 5);
        }
    }
    DT_AMX_LOAD(4, b, DT_AMX_ROW_BYTES);
    DT_AMX_MULTIPLY_BF16(0, 6, 4);
    DT_AMX_MULTIPLY_BF16(2, 7, 4);
    if (two) {
        DT_AMX_LOAD(5, b + b_bytes, DT_AMX_ROW_BYTES);
        DT_AMX_MULTIPLY_BF16(1, 6, 5);
        DT_AMX_MULTIPLY_BF16(3, 7, 5);
    }
    DT_AMX_LOAD(6, a + DT_AMX_ROW_BYTES, a_bytes);
    DT_AMX_MULTIPLY_BF16(0, 6, 4);
    if (two) {
        DT_AMX_MULTIPLY_BF16(1, 6, 5);
    }
    DT_AMX_LOAD(7, lower_a + DT_AMX_ROW_BYTES, a_bytes);
    DT_AMX_MULTIPLY_BF16(2, 7, 4);
    if (two) {
        DT_AMX_MULTIPLY_BF16(3, 7, 5);
    }
}

/* One or two columns. */
INLINE void advance_columns(const bool exact, const bool two, dt_attn_split_product *p) {
    const size_t tiles = exact ? TILE_BYTES : 2 * TILE_BYTES, b_bytes = (size_t)p->b_steps * tiles;
    if (p->step == 0) {
        DT_AMX_ZERO(0);
        DT_AMX_ZERO(2);
        if (two) {
            DT_AMX_ZERO(1);
            DT_AMX_ZERO(3);
        }
    }
    multiply_step(exact, two, p->a + (size_t)p->step * 2 * DT_AMX_ROW_BYTES, p->a_bytes,
                  p->b + (size_t)p->column * b_bytes + (size_t)p->step * tiles, b_bytes);
    if (++p->step == p->n_steps) {
        const size_t c_bytes = p->c_stride * sizeof(float);
        float *c = p->c + p->column * 16, *lower_c = c + DT_AMX_ROWS * p->c_stride;
        DT_AMX_STORE(0, c, c_bytes);
        DT_AMX_STORE(2, lower_c, c_bytes);
        if (two) {
            DT_AMX_STORE(1, c + 16, c_bytes);
            DT_AMX_STORE(3, lower_c + 16, c_bytes);
        }
        p->step = 0;
        p->column += 2;
    }
}

static bool advance(dt_attn_split_product *p) {
    if (p->column >= p->n_columns) {
        return false;
    }
    const bool two = p->n_columns - p->column > 1;
    if (p->exact && two) {
        advance_columns(true, true, p);
    } else if (p->exact) {
        advance_columns(true, false, p);
    } else if (two) {
        advance_columns(false, true, p);
    } else {
        advance_columns(false, false, p);
    }
    return p->column < p->n_columns;
}

const dt_attn_split_ops dt_attn_amx_split = {
    .begin = begin,
    .end = dt_amx_end,
    .split_query = split_query,
    .split_weights = split_weights,
    .key_panel = key_panel,
    .value_panel = value_panel,
    .advance = advance,
};

#endif
