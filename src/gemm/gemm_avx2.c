/*
 * The AVX2 kernel: half a group, 8 rows, is one vector. Four inputs of each row are multiplied with one token's four inputs
 * as pairs of unsigned by signed bytes.
 *
 * Sums of pairs are 16 bits wide: with 4-bit weights a whole block fits (8 * 2 * 15 * 127 < 2^15), with 8-bit weights not even one
 * pair of unsigned bytes does, so there the weights' sign is moved to the inputs and every pair is widened at once. Invariant: the
 * products of a block are exact integers, and the floating-point operations per row and token are those of the reference.
 */
#include "gemm/gemm.h"

#include <cpuid.h>
#include <immintrin.h>
#include <math.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")
#define TOKENS 4 /* at a time: their sums, a block of weights and what is computed with them fill the 16 registers */

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

static void pack_block(const float *from, int32_t tile, int32_t t, void *to) {
    __m256 x[4];
    UNROLL for (int i = 0; i < 4; i++) { x[i] = _mm256_loadu_ps(from + i * 8); }
    const bool finite = all_finite(x);
    UNROLL for (int i = 0; i < 4; i++) { x[i] = finite ? x[i] : _mm256_setzero_ps(); }
    const float scale = finite ? largest_of(x) / 127.0f : NAN, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256i q[4], sum = _mm256_setzero_si256();
    UNROLL for (int i = 0; i < 4; i++) {
        q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(x[i], _mm256_set1_ps(inverse)));
        sum = _mm256_add_epi32(sum, q[i]);
    }
    int32_t quads[8], sums[8], total = 0;
    const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    _mm256_storeu_si256((__m256i *)quads, _mm256_permutevar8x32_epi32(bytes, order)); /* packs works within halves */
    _mm256_storeu_si256((__m256i *)sums, sum);
    for (int32_t j = 0; j < 8; j++) {
        ((int32_t *)to)[j * tile + t] = quads[j];
        total += sums[j];
    }
    dt_gemm_scales(to, tile)[t] = scale;
    dt_gemm_totals(to, tile)[t] = total;
    dt_gemm_sums(to, tile)[t] = scale * (float)total;
}

static void pack_inputs(const float *x, size_t stride, int32_t n_in, int32_t n_tokens, void *packed, int32_t ith, int32_t nth) {
    dt_gemm_pack_all(pack_block, x, stride, n_in, n_tokens, packed, ith, nth);
}

/* ---- product ---- */

INLINE __m256 load_halves(const uint8_t *from) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)); }

/* 8 rows of a block as bytes: unsigned 4-bit weights, or signed 8-bit ones. */
INLINE void load_weights(dt_gemm_type type, const uint8_t *block, __m256i q[8]) {
    if (type == DT_GEMM_Q8_0) {
        const __m256i flip = _mm256_set1_epi8(-128);
        UNROLL for (int j = 0; j < 8; j++) { q[j] = _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)(block + j * 64)), flip); }
        return;
    }
    const __m256i low = _mm256_set1_epi8(15);
    UNROLL for (int j = 0; j < 4; j++) {
        const __m256i both = _mm256_loadu_si256((const __m256i *)(block + j * 64));
        q[j] = _mm256_and_si256(both, low);
        q[j + 4] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
    }
}

/* Product of a block's 32 inputs, for 8 rows. quads: those of one token, `tile` apart. */
INLINE __m256i block_product(dt_gemm_type type, const __m256i q[8], const int32_t *quads, int tile, int32_t total) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sum = _mm256_setzero_si256();
    UNROLL for (int j = 0; j < 8; j++) {
        const __m256i x = _mm256_set1_epi32(quads[j * tile]);
        if (type == DT_GEMM_Q8_0) {
            const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(q[j]), _mm256_sign_epi8(x, q[j]));
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
        } else {
            sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(q[j], x));
        }
    }
    if (type == DT_GEMM_Q8_0) {
        return sum;
    }
    sum = _mm256_madd_epi16(sum, ones);
    return type == DT_GEMM_Q4_0 ? _mm256_sub_epi32(sum, _mm256_set1_epi32(8 * total)) : sum;
}

/* 8 rows (half 0 or 1 of a group) times n tokens of a tile, from token t0 on. */
INLINE void half_tokens(dt_gemm_type type, const uint8_t *block, int half, int32_t n_blocks, const char *inputs, int tile, int t0,
                        const int n, float *y, size_t stride) {
    const size_t block_bytes = dt_gemm_block_bytes(type), quant_bytes = dt_gemm_quant_bytes(type);
    __m256 sum[TOKENS];
    UNROLL for (int t = 0; t < n; t++) { sum[t] = _mm256_setzero_ps(); }
    for (int32_t b = 0; b < n_blocks; b++, block += block_bytes, inputs += (size_t)tile * DT_GEMM_TOKEN_BYTES) {
        __m256i q[8];
        load_weights(type, block + half * 32, q);
        const __m256 scale = load_halves(block + quant_bytes + half * 16);
        const __m256 minimum = type == DT_GEMM_Q4_1 ? load_halves(block + quant_bytes + 32 + half * 16) : _mm256_setzero_ps();
        const int32_t *quads = (const int32_t *)inputs + t0, *totals = dt_gemm_totals((void *)inputs, tile) + t0;
        const float *scales = dt_gemm_scales((void *)inputs, tile) + t0, *sums = dt_gemm_sums((void *)inputs, tile) + t0;
        UNROLL for (int t = 0; t < n; t++) {
            const __m256i product = block_product(type, q, quads + t, tile, totals[t]);
            sum[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(product), _mm256_mul_ps(scale, _mm256_set1_ps(scales[t])), sum[t]);
            if (type == DT_GEMM_Q4_1) {
                sum[t] = _mm256_fmadd_ps(minimum, _mm256_set1_ps(sums[t]), sum[t]);
            }
        }
    }
    UNROLL for (int t = 0; t < n; t++) { _mm256_storeu_ps(y + (size_t)t * stride, sum[t]); }
}

INLINE void group_tokens(dt_gemm_type type, const uint8_t *group, int32_t n_blocks, const char *inputs, int32_t n_tokens, float *y,
                         size_t stride) {
    for (int32_t first = 0, tile; first < n_tokens; first += tile) {
        tile = dt_gemm_tile(n_tokens - first);
        const char *from = inputs + (size_t)first * (size_t)n_blocks * DT_GEMM_TOKEN_BYTES;
        for (int half = 0; half < 2; half++) {
            float *to = y + (size_t)first * stride + half * 8;
            for (int t = 0; t < tile; t += TOKENS) {
                float *at = to + (size_t)t * stride;
                switch (DT_MIN(tile, TOKENS)) {
                case 4:
                    half_tokens(type, group, half, n_blocks, from, tile, t, 4, at, stride);
                    break;
                case 2:
                    half_tokens(type, group, half, n_blocks, from, tile, t, 2, at, stride);
                    break;
                default:
                    half_tokens(type, group, half, n_blocks, from, 1, 0, 1, at, stride);
                    break;
                }
            }
        }
    }
}

static void groups_q4_0(const uint8_t *g, int32_t n, const char *in, int32_t tokens, float *y, size_t stride) {
    group_tokens(DT_GEMM_Q4_0, g, n, in, tokens, y, stride);
}
static void groups_q4_1(const uint8_t *g, int32_t n, const char *in, int32_t tokens, float *y, size_t stride) {
    group_tokens(DT_GEMM_Q4_1, g, n, in, tokens, y, stride);
}
static void groups_q8_0(const uint8_t *g, int32_t n, const char *in, int32_t tokens, float *y, size_t stride) {
    group_tokens(DT_GEMM_Q8_0, g, n, in, tokens, y, stride);
}

static void multiply(const dt_gemm_matrix *w, const void *packed, int32_t n_tokens, float *y, size_t stride, int32_t ith,
                     int32_t nth) {
    static const dt_gemm_group_fn by_type[] = {
        [DT_GEMM_Q4_0] = groups_q4_0, [DT_GEMM_Q4_1] = groups_q4_1, [DT_GEMM_Q8_0] = groups_q8_0};
    dt_gemm_multiply_groups(by_type[w->type], w, packed, n_tokens, y, stride, ith, nth);
}

const dt_gemm_kernel dt_gemm_avx2 = {"avx2", supported, pack_inputs, multiply};
