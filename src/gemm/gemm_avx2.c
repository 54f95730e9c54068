/*
 * The AVX2 kernel: half a group, 8 rows, is one vector. Four inputs of each row are multiplied with one token's four inputs
 * as pairs of unsigned by signed bytes.
 *
 * Invariant: the products of a block are exact integers, and the floating-point operations per row and token are those of the
 * reference.
 */
#include "gemm/gemm_kernel.h"

#include <cpuid.h>
#include <immintrin.h>
#include <math.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")
#define SUMS 4     /* at a time: they, a block of weights and what is computed with them fill the 16 registers */
#define AHEAD 4096 /* bytes that are asked for before they are needed */

static bool supported(void) {
    __builtin_cpu_init();
    unsigned a, b, c = 0, d;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) != 0 &&
           (c & bit_F16C) != 0;
}

/* ---- activations ---- */

static float largest_of(const __m256 x[4]) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256 m = _mm256_setzero_ps();
    UNROLL for (int i = 0; i < 4; i++) { m = _mm256_max_ps(m, _mm256_andnot_ps(sign, x[i])); }
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

/* x - x is 0 for finite numbers and NaN for others. */
static bool all_finite(const __m256 x[4]) {
    int wrong = 0;
    UNROLL for (int i = 0; i < 4; i++) {
        wrong |= _mm256_movemask_ps(_mm256_cmp_ps(_mm256_sub_ps(x[i], x[i]), _mm256_setzero_ps(), _CMP_NEQ_UQ));
    }
    return wrong == 0;
}

static int32_t sum_of(__m256i x) {
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(two) + _mm_extract_epi32(two, 1);
}

static void pack_block(const float *from, int32_t tile, int32_t t, void *to) {
    __m256 x[4];
    UNROLL for (int i = 0; i < 4; i++) { x[i] = _mm256_loadu_ps(from + i * 8); }
    const bool finite = all_finite(x);
    UNROLL for (int i = 0; i < 4; i++) { x[i] = finite ? x[i] : _mm256_setzero_ps(); }
    const float scale = finite ? largest_of(x) / 127.0f : NAN, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256i q[4];
    UNROLL for (int i = 0; i < 4; i++) { q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(x[i], _mm256_set1_ps(inverse))); }
    int32_t quads[8];
    const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    _mm256_storeu_si256((__m256i *)quads, _mm256_permutevar8x32_epi32(bytes, order)); /* packs works within halves */
    for (int32_t j = 0; j < 8; j++) {
        ((int32_t *)to)[j * tile + t] = quads[j];
    }
    dt_gemm_put_scale(to, tile, t, scale, sum_of(_mm256_add_epi32(q[0], q[1])), sum_of(_mm256_add_epi32(q[2], q[3])));
}

/* ---- product ---- */

INLINE __m256 load_halves(const uint8_t *from) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)); }
INLINE __m256 load_bytes(const uint8_t *from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
}

/* Of 32-bit lanes. */
INLINE __m256i shift_left(__m256i x, int n) { return (__m256i)((__v8su)x << n); }
INLINE __m256i shift_right(__m256i x, int n) { return (__m256i)((__v8su)x >> n); }

/* 8 rows of a block as bytes: unsigned, or, where they are too large for that, signed. */
INLINE void load_weights(const dt_gemm_format f, const uint8_t *block, __m256i q[8]) {
    const __m256i flip = _mm256_set1_epi8(-128), low = _mm256_set1_epi8(15);
    if (f.bits == 8) {
        UNROLL for (int j = 0; j < 8; j++) { q[j] = _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)(block + j * 64)), flip); }
        return;
    }
    UNROLL for (int j = 0; j < 4; j++) {
        const __m256i both = _mm256_loadu_si256((const __m256i *)(block + j * 64));
        q[j] = _mm256_and_si256(both, low);
        q[j + 4] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
    }
    if (f.bits > 4) {
        const int n = f.bits - 4, per_piece = 8 / n;
        const __m256i mask = _mm256_set1_epi8((char)(((1 << n) - 1) << 4));
        UNROLL for (int j = 0; j < 8; j++) {
            const __m256i piece = _mm256_loadu_si256((const __m256i *)(block + 256 + j / per_piece * 64));
            const int at = j % per_piece * n; /* its bits there are bits 4 and up of the weight */
            const __m256i moved =
                at < 4 ? shift_left(piece, 4 - at) : shift_right(piece, at - 4); /* what crosses bytes is masked out */
            q[j] = _mm256_or_si256(q[j], _mm256_and_si256(moved, mask));
        }
    }
    if (f.is_lookup) {
        const __m256i values = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)dt_gemm_values));
        UNROLL for (int j = 0; j < 8; j++) { q[j] = _mm256_shuffle_epi8(_mm256_xor_si256(values, flip), q[j]); }
    }
}

/* Products of the first and of the last 16 inputs of a block for 8 rows, or, where that is shorter, of all in sums[0] and 0 in
 * sums[1]. quads: those of one token, `tile` apart, as are the negated totals. */
INLINE void block_sums(const dt_gemm_format f, const __m256i q[8], const int32_t *quads, int tile, const int32_t *negated,
                       __m256i sums[2]) {
    const __m256i ones = _mm256_set1_epi16(1);
    const int fit = dt_gemm_quads_in_16_bits(f);
    sums[0] = sums[1] = _mm256_setzero_si256();
    if (fit > 1 && f.offset != 0) { /* what they will be too large by */
        const int log2_offset = __builtin_ctz((unsigned)f.offset);
        sums[0] = shift_left(_mm256_set1_epi32(negated[tile]), log2_offset);
        if (f.n_scales == 2) {
            const __m256i all = sums[0];
            sums[0] = shift_left(_mm256_set1_epi32(negated[0]), log2_offset);
            sums[1] = _mm256_sub_epi32(all, sums[0]);
        }
    }
    UNROLL for (int j = 0; j < 8; j += fit) {
        __m256i pairs = _mm256_setzero_si256();
        UNROLL for (int k = j; k < j + fit; k++) {
            const __m256i x = _mm256_set1_epi32(quads[k * tile]);
            pairs = _mm256_add_epi16(pairs, fit > 1 ? _mm256_maddubs_epi16(q[k], x)
                                                    : _mm256_maddubs_epi16(_mm256_abs_epi8(q[k]), _mm256_sign_epi8(x, q[k])));
        }
        __m256i *sum = &sums[f.n_scales == 2 ? j / 4 : 0];
        *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(pairs, ones));
    }
}

/* What the sums of a block of 8 rows are multiplied with. */
typedef struct block_scales {
    __m256 scale, minimum;
    __m256 halves[2]; /* n_scales == 2: of the first and the last 16 inputs, besides `scale` */
} block_scales;

/* header, bytes: the super-block's scales and the block's, of the first of the rows. */
INLINE block_scales load_scales(const dt_gemm_format f, const uint8_t *header, const uint8_t *bytes) {
    block_scales s = {.scale = load_halves(header)};
    s.minimum = f.has_minimum ? load_halves(header + 32) : s.scale;
    if (f.n_scales == 1) {
        s.scale = _mm256_mul_ps(s.scale, load_bytes(bytes));
    } else if (f.n_scales == 2) {
        s.halves[0] = load_bytes(bytes);
        s.halves[1] = load_bytes(bytes + DT_GEMM_ROWS);
    }
    if (f.n_scales > 0 && f.has_minimum) {
        s.minimum = _mm256_mul_ps(s.minimum, load_bytes(bytes + f.n_scales * DT_GEMM_ROWS));
    }
    return s;
}

/* Adds the product of a block with token t of a tile to y. */
INLINE __m256 add_block(const dt_gemm_format f, const __m256i q[8], const block_scales *s, const char *inputs, int tile, int t,
                        __m256 y) {
    __m256i sums[2];
    block_sums(f, q, (const int32_t *)inputs + t, tile, dt_gemm_negated((void *)inputs, tile) + t, sums);
    __m256 product = _mm256_cvtepi32_ps(sums[0]);
    if (f.n_scales == 2) {
        product = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[1]), s->halves[1], _mm256_mul_ps(product, s->halves[0]));
    }
    y = _mm256_fmadd_ps(product, _mm256_mul_ps(s->scale, _mm256_set1_ps(dt_gemm_scales((void *)inputs, tile)[t])), y);
    return f.has_minimum ? _mm256_fmadd_ps(s->minimum, _mm256_set1_ps(dt_gemm_sums((void *)inputs, tile)[t]), y) : y;
}

/* Halves [half, half + n_halves) of a group of rows times n tokens of a tile, from token t0 on. from_memory: the group's weights are
 * not in a cache yet. */
INLINE void group_tile(const dt_gemm_format f, const uint8_t *group, const int half, const int n_halves, int32_t n_blocks,
                       const char *inputs, int tile, int t0, const int n, bool from_memory, float *y, size_t stride) {
    __m256 sum[SUMS];
    UNROLL for (int i = 0; i < n_halves * n; i++) { sum[i] = _mm256_setzero_ps(); }
    for (int32_t left = n_blocks; left > 0; left -= f.n_blocks) {
        const uint8_t *header = group;
        group += dt_gemm_header_bytes(f);
        for (int32_t b = 0; b < f.n_blocks; b++) {
            if (from_memory) {
                for (size_t line = 0; line < dt_gemm_block_bytes(f); line += 64) {
                    _mm_prefetch((const char *)group + AHEAD + line, _MM_HINT_T0);
                }
            }
            UNROLL for (int h = 0; h < n_halves; h++) {
                const int rows = (half + h) * 8; /* from this one on */
                __m256i q[8];
                load_weights(f, group + rows * 4, q);
                const block_scales scales = load_scales(f, header + rows * 2, group + dt_gemm_quant_bytes(f) + rows);
                UNROLL for (int t = 0; t < n; t++) {
                    sum[h * n + t] = add_block(f, q, &scales, inputs, tile, t0 + t, sum[h * n + t]);
                }
            }
            group += dt_gemm_block_bytes(f);
            inputs += (size_t)tile * DT_GEMM_TOKEN_BYTES;
        }
    }
    UNROLL for (int h = 0; h < n_halves; h++) {
        UNROLL for (int t = 0; t < n; t++) { _mm256_storeu_ps(y + (size_t)(t0 + t) * stride + (half + h) * 8, sum[h * n + t]); }
    }
}

/* Half a group times a tile. */
INLINE void half_group(const dt_gemm_format f, const uint8_t *group, const int half, int32_t n_blocks, const char *inputs, int tile,
                       bool from_memory, float *y, size_t stride) {
    for (int t = 0; t < tile; t += SUMS) {
        switch (DT_MIN(tile - t, SUMS)) {
        case 1:
            group_tile(f, group, half, 1, n_blocks, inputs, tile, t, 1, from_memory && t == 0, y, stride);
            break;
        case 2:
            group_tile(f, group, half, 1, n_blocks, inputs, tile, t, 2, from_memory && t == 0, y, stride);
            break;
        case 3:
            group_tile(f, group, half, 1, n_blocks, inputs, tile, t, 3, from_memory && t == 0, y, stride);
            break;
        default:
            group_tile(f, group, half, 1, n_blocks, inputs, tile, t, SUMS, from_memory && t == 0, y, stride);
            break;
        }
    }
}

INLINE void group_tokens(const dt_gemm_format f, const uint8_t *group, int32_t n_blocks, const char *inputs, int32_t n_tokens,
                         float *y, size_t stride) {
    for (int32_t first = 0, tile; first < n_tokens; first += tile) {
        tile = dt_gemm_tile(n_tokens - first);
        const char *from = inputs + (size_t)first * (size_t)n_blocks * DT_GEMM_TOKEN_BYTES;
        float *to = y + (size_t)first * stride;
        if (tile == 1) {
            group_tile(f, group, 0, 2, n_blocks, from, 1, 0, 1, first == 0, to, stride);
        } else if (tile == 2) {
            group_tile(f, group, 0, 2, n_blocks, from, 2, 0, 2, first == 0, to, stride);
        } else {
            for (int half = 0; half < 2; half++) {
                half_group(f, group, half, n_blocks, from, tile, first == 0 && half == 0 && tile < DT_GEMM_TILE, to, stride);
            }
        }
    }
}

DT_GEMM_DEFINE_GROUPS
DT_GEMM_DEFINE_KERNEL(DT_GEMM_CHUNKS)

const dt_gemm_kernel dt_gemm_avx2 = {"avx2", false, supported, pack_inputs, multiply};
