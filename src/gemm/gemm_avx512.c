/*
 * The AVX-512 VNNI kernel: a group of 16 rows is one vector, a dot-product instruction takes four inputs of all of them at once
 * with one token's four inputs broadcast from memory.
 *
 * A tile of T tokens times 16 rows is held in T registers over the whole length of the rows; a block of weights is unpacked once for
 * the tile. Invariant: the operations per row and token are the same for every T, so results are bitwise equal.
 */
#include "gemm/gemm.h"

#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

static bool supported(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}

/* ---- activations ---- */

static void pack_block(const float *from, int32_t tile, int32_t t, char *to) {
    const __m512 a = _mm512_loadu_ps(from), b = _mm512_loadu_ps(from + 16);
    const float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
    const float scale = largest / 127.0f, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    const __m512i qa = _mm512_cvtps_epi32(_mm512_mul_ps(a, _mm512_set1_ps(inverse)));
    const __m512i qb = _mm512_cvtps_epi32(_mm512_mul_ps(b, _mm512_set1_ps(inverse)));
    const int32_t sum = _mm512_reduce_add_epi32(_mm512_add_epi32(qa, qb));
    int32_t quads[8];
    _mm_storeu_si128((__m128i *)quads, _mm512_cvtsepi32_epi8(qa));
    _mm_storeu_si128((__m128i *)(quads + 4), _mm512_cvtsepi32_epi8(qb));
    for (int32_t j = 0; j < 8; j++) {
        ((int32_t *)to)[j * tile + t] = quads[j];
    }
    float *scales = (float *)(to + (size_t)tile * DT_GEMM_BLOCK);
    scales[t] = scale;
    scales[tile + t] = scale * (float)sum;
}

static void pack_inputs(const float *x, size_t stride, int32_t n_in, int32_t n_tokens, void *packed, int32_t ith, int32_t nth) {
    const int32_t n_blocks = n_in / DT_GEMM_BLOCK;
    if (n_tokens == 1) { /* one token's blocks are shared out, not tiles */
        for (int32_t b = n_blocks * ith / nth; b < n_blocks * (ith + 1) / nth; b++) {
            pack_block(x + (size_t)b * DT_GEMM_BLOCK, 1, 0, (char *)packed + (size_t)b * DT_GEMM_TOKEN_BYTES);
        }
        return;
    }
    for (int32_t first = 0, tile; first < n_tokens; first += tile) {
        tile = dt_gemm_tile(n_tokens - first);
        if (first / DT_GEMM_TILE % nth != ith) {
            continue;
        }
        char *to = (char *)packed + (size_t)first * (size_t)n_blocks * DT_GEMM_TOKEN_BYTES;
        for (int32_t b = 0; b < n_blocks; b++, to += (size_t)tile * DT_GEMM_TOKEN_BYTES) {
            for (int32_t t = 0; t < tile; t++) {
                pack_block(x + (size_t)(first + t) * stride + (size_t)b * DT_GEMM_BLOCK, tile, t, to);
            }
        }
    }
}

/* ---- product ---- */

/* The 8 quads of a block of 16 rows as unsigned bytes, its scales and what multiplies the sums of the inputs. */
INLINE void load_weights(dt_gemm_type type, const uint8_t *block, __m512i q[8], __m512 *scale, __m512 *minimum) {
    const size_t quant_bytes = dt_gemm_quant_bytes(type);
    if (type == DT_GEMM_Q8_0) {
        UNROLL for (int j = 0; j < 8; j++) { q[j] = _mm512_loadu_si512(block + j * 64); }
    } else {
        const __m512i low = _mm512_set1_epi8(15);
        UNROLL for (int j = 0; j < 4; j++) {
            const __m512i both = _mm512_loadu_si512(block + j * 64);
            q[j] = _mm512_and_si512(both, low);
            q[j + 4] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
        }
    }
    *scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(block + quant_bytes)));
    if (type == DT_GEMM_Q4_1) {
        *minimum = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(block + quant_bytes + 32)));
    } else {
        *minimum = _mm512_mul_ps(*scale, _mm512_set1_ps(type == DT_GEMM_Q8_0 ? -128.0f : -8.0f));
    }
}

/* One group of rows times one tile of tokens. */
INLINE void group_tile(dt_gemm_type type, const uint8_t *block, int32_t n_blocks, const char *inputs, const int tile, float *y,
                       size_t stride) {
    const size_t block_bytes = dt_gemm_block_bytes(type);
    __m512 sum[DT_GEMM_TILE];
    UNROLL for (int t = 0; t < tile; t++) { sum[t] = _mm512_setzero_ps(); }
    for (int32_t b = 0; b < n_blocks; b++) {
        __m512i q[8];
        __m512 scale, minimum;
        load_weights(type, block, q, &scale, &minimum);
        const int32_t *quads = (const int32_t *)inputs;
        const float *scales = (const float *)(inputs + tile * DT_GEMM_BLOCK), *sums = scales + tile;
        if (tile == 1) {
            /* one token: the next blocks come from memory; two chains of products hide their latency */
            _mm_prefetch((const char *)block + 4096, _MM_HINT_T0);
            _mm_prefetch((const char *)block + 4096 + 64, _MM_HINT_T0);
            _mm_prefetch((const char *)block + 4096 + 128, _MM_HINT_T0);
            _mm_prefetch((const char *)block + 4096 + 192, _MM_HINT_T0);
            _mm_prefetch((const char *)block + 4096 + 256, _MM_HINT_T0);
        }
        UNROLL for (int t = 0; t < tile; t++) {
            __m512i even = _mm512_setzero_si512(), odd = _mm512_setzero_si512();
            UNROLL for (int j = 0; j < 8; j += 2) {
                even = _mm512_dpbusd_epi32(even, q[j], _mm512_set1_epi32(quads[j * tile + t]));
                odd = _mm512_dpbusd_epi32(odd, q[j + 1], _mm512_set1_epi32(quads[(j + 1) * tile + t]));
            }
            const __m512 product = _mm512_cvtepi32_ps(_mm512_add_epi32(even, odd));
            sum[t] = _mm512_fmadd_ps(product, _mm512_mul_ps(scale, _mm512_set1_ps(scales[t])), sum[t]);
            sum[t] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(sums[t]), sum[t]);
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

/* A thread's rows are one run: it reads its weights from end to end. */
static void multiply(const dt_gemm_matrix *w, const void *packed, int32_t n_tokens, float *y, size_t stride, int32_t ith,
                     int32_t nth) {
    static void (*const by_type[])(const uint8_t *, int32_t, const char *, int32_t, float *, size_t) = {
        [DT_GEMM_Q4_0] = groups_q4_0, [DT_GEMM_Q4_1] = groups_q4_1, [DT_GEMM_Q8_0] = groups_q8_0};
    const int64_t n_groups = w->n_out / DT_GEMM_ROWS;
    const int32_t n_blocks = w->n_in / DT_GEMM_BLOCK;
    const size_t group_bytes = (size_t)n_blocks * dt_gemm_block_bytes(w->type);
    for (int64_t g = n_groups * ith / nth; g < n_groups * (ith + 1) / nth; g++) {
        by_type[w->type]((const uint8_t *)w->packed + (size_t)g * group_bytes, n_blocks, packed, n_tokens, y + g * DT_GEMM_ROWS,
                         stride);
    }
}

const dt_gemm_kernel dt_gemm_avx512_vnni = {"avx512_vnni", supported, pack_inputs, multiply};
