/*
 * The AVX-512 VNNI kernel: a group of 16 rows is one vector, a dot-product instruction takes four inputs of all of them at once
 * with one token's four inputs broadcast from memory.
 *
 * A tile of T tokens times 16 rows is held in T registers over the whole length of the rows; a block of weights is unpacked once for
 * the tile. Invariant: the operations per row and token are the same for every T, so results are bitwise equal.
 */
#include "gemm/gemm.h"

#include <immintrin.h>
#include <math.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define NOT_FINITE 0x99 /* quiet and signalling NaN, both infinities */
#define AHEAD 4096      /* bytes that are asked for before they are needed */

static bool supported(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}

/* ---- activations ---- */

static void pack_block(const float *from, int32_t tile, int32_t t, void *to) {
    __m512 a = _mm512_loadu_ps(from), b = _mm512_loadu_ps(from + 16);
    const bool finite = (_mm512_fpclass_ps_mask(a, NOT_FINITE) | _mm512_fpclass_ps_mask(b, NOT_FINITE)) == 0;
    if (!finite) {
        a = b = _mm512_setzero_ps();
    }
    const float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
    const float scale = finite ? largest / 127.0f : NAN, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    const __m512i qa = _mm512_cvtps_epi32(_mm512_mul_ps(a, _mm512_set1_ps(inverse)));
    const __m512i qb = _mm512_cvtps_epi32(_mm512_mul_ps(b, _mm512_set1_ps(inverse)));
    const int32_t total = _mm512_reduce_add_epi32(_mm512_add_epi32(qa, qb));
    int32_t quads[8];
    _mm_storeu_si128((__m128i *)quads, _mm512_cvtsepi32_epi8(qa));
    _mm_storeu_si128((__m128i *)(quads + 4), _mm512_cvtsepi32_epi8(qb));
    for (int32_t j = 0; j < 8; j++) {
        ((int32_t *)to)[j * tile + t] = quads[j];
    }
    dt_gemm_scales(to, tile)[t] = scale;
    dt_gemm_totals(to, tile)[t] = total;
    dt_gemm_sums(to, tile)[t] = scale * (float)total;
}

static void pack_inputs(const float *x, size_t stride, int32_t n_in, int32_t n_tokens, void *packed, int32_t ith, int32_t nth) {
    dt_gemm_pack_all(pack_block, x, stride, n_in, n_tokens, packed, ith, nth);
}

/* ---- product ---- */

/* The 8 quads of a block of 16 rows as unsigned bytes. */
INLINE void load_weights(dt_gemm_type type, const uint8_t *block, __m512i q[8]) {
    if (type == DT_GEMM_Q8_0) {
        UNROLL for (int j = 0; j < 8; j++) { q[j] = _mm512_loadu_si512(block + j * 64); }
        return;
    }
    const __m512i low = _mm512_set1_epi8(15);
    UNROLL for (int j = 0; j < 4; j++) {
        const __m512i both = _mm512_loadu_si512(block + j * 64);
        q[j] = _mm512_and_si512(both, low);
        q[j + 4] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
    }
}

/* What the products of unsigned weights are too large by: the offset of the weights times the sum of the inputs. */
INLINE __m512i excess(dt_gemm_type type, int32_t total) {
    return _mm512_slli_epi32(_mm512_set1_epi32(total), type == DT_GEMM_Q8_0 ? 7 : 3);
}

/* One group of rows times one tile of tokens. */
INLINE void group_tile(dt_gemm_type type, const uint8_t *block, int32_t n_blocks, const char *inputs, const int tile, float *y,
                       size_t stride) {
    const size_t block_bytes = dt_gemm_block_bytes(type), quant_bytes = dt_gemm_quant_bytes(type);
    __m512 sum[DT_GEMM_TILE];
    UNROLL for (int t = 0; t < tile; t++) { sum[t] = _mm512_setzero_ps(); }
    for (int32_t b = 0; b < n_blocks; b++) {
        __m512i q[8];
        load_weights(type, block, q);
        const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(block + quant_bytes)));
        const __m512 minimum = type == DT_GEMM_Q4_1
                                   ? _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(block + quant_bytes + 32)))
                                   : _mm512_setzero_ps();
        const int32_t *quads = (const int32_t *)inputs, *totals = dt_gemm_totals((void *)inputs, tile);
        const float *scales = dt_gemm_scales((void *)inputs, tile), *sums = dt_gemm_sums((void *)inputs, tile);
        if (tile == 1) { /* one token: the weights come from memory */
            for (size_t line = 0; line < block_bytes; line += 64) {
                _mm_prefetch((const char *)block + AHEAD + line, _MM_HINT_T0);
            }
        }
        UNROLL for (int t = 0; t < tile; t++) {
            __m512i even = _mm512_setzero_si512(), odd = _mm512_setzero_si512(); /* two chains hide their latency */
            UNROLL for (int j = 0; j < 8; j += 2) {
                even = _mm512_dpbusd_epi32(even, q[j], _mm512_set1_epi32(quads[j * tile + t]));
                odd = _mm512_dpbusd_epi32(odd, q[j + 1], _mm512_set1_epi32(quads[(j + 1) * tile + t]));
            }
            __m512i product = _mm512_add_epi32(even, odd);
            if (type != DT_GEMM_Q4_1) {
                product = _mm512_sub_epi32(product, excess(type, totals[t]));
            }
            sum[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(product), _mm512_mul_ps(scale, _mm512_set1_ps(scales[t])), sum[t]);
            if (type == DT_GEMM_Q4_1) {
                sum[t] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(sums[t]), sum[t]);
            }
        }
        block += block_bytes;
        inputs += (size_t)tile * DT_GEMM_TOKEN_BYTES;
    }
    UNROLL for (int t = 0; t < tile; t++) { _mm512_storeu_ps(y + (size_t)t * stride, sum[t]); }
}

INLINE void group_tokens(dt_gemm_type type, const uint8_t *group, int32_t n_blocks, const char *inputs, int32_t n_tokens, float *y,
                         size_t stride) {
    const size_t token_bytes = (size_t)n_blocks * DT_GEMM_TOKEN_BYTES;
    for (int32_t first = 0, tile; first < n_tokens; first += tile) {
        tile = dt_gemm_tile(n_tokens - first);
        const char *from = inputs + (size_t)first * token_bytes;
        float *to = y + (size_t)first * stride;
        switch (tile) {
        case 16:
            group_tile(type, group, n_blocks, from, 16, to, stride);
            break;
        case 8:
            group_tile(type, group, n_blocks, from, 8, to, stride);
            break;
        case 4:
            group_tile(type, group, n_blocks, from, 4, to, stride);
            break;
        case 2:
            group_tile(type, group, n_blocks, from, 2, to, stride);
            break;
        default:
            group_tile(type, group, n_blocks, from, 1, to, stride);
            break;
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

const dt_gemm_kernel dt_gemm_avx512_vnni = {"avx512_vnni", supported, pack_inputs, multiply};
