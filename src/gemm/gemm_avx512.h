/*
 * The arithmetic of the AVX-512 kernels, which gemm_amx.c does for few tokens too: a group of 16 rows is one vector, four inputs of
 * all of them are multiplied at once with one token's four inputs broadcast from memory. Where the file is compiled with VNNI that
 * is one instruction, elsewhere it is done by pairs, as in gemm_avx2.c.
 *
 * A tile of T tokens times 16 rows is held in T registers over the whole length of the rows; a block of weights is unpacked once
 * for the tile. Invariant: the operations per row and token are the same for every T, so results are bitwise equal.
 */
#ifndef DT_GEMM_AVX512_H
#define DT_GEMM_AVX512_H

#include "gemm/gemm_kernel.h"

#include <immintrin.h>
#include <math.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define NOT_FINITE 0x99 /* quiet and signalling NaN, both infinities */
/* Bytes that are asked for before they are needed: into the second cache, which has more requests under way than the first, and
 * from there into the first. Measured on a Xeon with AMX: AHEAD of more than a page costs models of 1B and 7B a tenth of their
 * speed, SOON of half as much a twentieth. */
#define AHEAD 3072
#define SOON 1024

INLINE bool avx512_supported(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq");
}

/* ---- activations ---- */

/* Of 16 signed bytes. */
INLINE int32_t sum_of(__m128i bytes) {
    const __m128i sums = _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8((char)0x80)), _mm_setzero_si128());
    return _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 2) - 16 * 128;
}

/* Packs 32 inputs of token t of a tile. by_token: its quads lie one after the other, not `tile` apart. */
INLINE void pack_inputs_of(const float *from, int32_t tile, int32_t t, const bool by_token, void *to) {
    __m512 a = _mm512_loadu_ps(from), b = _mm512_loadu_ps(from + 16);
    const bool finite = (_mm512_fpclass_ps_mask(a, NOT_FINITE) | _mm512_fpclass_ps_mask(b, NOT_FINITE)) == 0;
    if (!finite) {
        a = b = _mm512_setzero_ps();
    }
    const float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
    const float scale = finite ? largest / 127.0f : NAN, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    const __m128i first = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(a, _mm512_set1_ps(inverse))));
    const __m128i last = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(b, _mm512_set1_ps(inverse))));
    int32_t quads[8] = {0}, *own = by_token ? (int32_t *)to + t * 8 : quads;
    _mm_storeu_si128((__m128i *)own, first);
    _mm_storeu_si128((__m128i *)(own + 4), last);
    for (int32_t j = 0; !by_token && j < 8; j++) {
        ((int32_t *)to)[j * tile + t] = quads[j];
    }
    dt_gemm_put_scale(to, tile, t, scale, sum_of(first), sum_of(last));
}

/* ---- product ---- */

/* Of 32-bit lanes. An operator, since the intrinsic takes no parameter as a constant without optimization. */
INLINE __m512i shift_left(__m512i x, int n) { return (__m512i)((__v16su)x << n); }
INLINE __m512i shift_right(__m512i x, int n) { return (__m512i)((__v16su)x >> n); }

#ifdef __AVX512VNNI__
#define SIGNED_WEIGHTS(f) false
#else
#define SIGNED_WEIGHTS(f) (dt_gemm_quads_in_16_bits(f) == 1)
#endif

/* The 8 quads of a block of 16 rows as bytes: unsigned, but where pairs of products would be too large for 16 bits. */
INLINE void load_weights(const dt_gemm_format f, const uint8_t *block, __m512i q[8]) {
    const __m512i flip = SIGNED_WEIGHTS(f) ? _mm512_set1_epi8(-128) : _mm512_setzero_si512();
    if (f.bits == 8) {
        UNROLL for (int j = 0; j < 8; j++) { q[j] = _mm512_xor_si512(_mm512_loadu_si512(block + j * 64), flip); }
        return;
    }
    const __m512i low = _mm512_set1_epi8(15);
    UNROLL for (int j = 0; j < 4; j++) {
        const __m512i both = _mm512_loadu_si512(block + j * 64);
        q[j] = _mm512_and_si512(both, low);
        q[j + 4] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
    }
    if (f.bits > 4) {
        const int n = f.bits - 4, per_piece = 8 / n;
        const __m512i mask = _mm512_set1_epi8((char)(((1 << n) - 1) << 4));
        UNROLL for (int j = 0; j < 8; j++) {
            const __m512i piece = _mm512_loadu_si512(block + 256 + j / per_piece * 64);
            const int at = j % per_piece * n; /* its bits there are bits 4 and up of the weight */
            const __m512i moved =
                at < 4 ? shift_left(piece, 4 - at) : shift_right(piece, at - 4); /* what crosses bytes is masked out */
            q[j] = _mm512_ternarylogic_epi32(q[j], moved, mask, 0xF8);           /* q | (moved & mask) */
        }
    }
    if (f.is_lookup) {
        const __m512i values = _mm512_xor_si512(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)dt_gemm_values)), flip);
        UNROLL for (int j = 0; j < 8; j++) { q[j] = _mm512_shuffle_epi8(values, q[j]); }
    }
}

INLINE __m512 load_halves(const uint8_t *from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from)); }
INLINE __m512 load_bytes(const uint8_t *from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
}

/* What the sums of a block of 16 rows are multiplied with. */
typedef struct block_scales {
    __m512 scale, minimum;
    __m512 halves[2]; /* n_scales == 2: of the first and the last 16 inputs, besides `scale` */
} block_scales;

/* header, bytes: the super-block's scales and the block's. */
INLINE block_scales load_scales(const dt_gemm_format f, const uint8_t *header, const uint8_t *bytes) {
    block_scales s = {.scale = load_halves(header)};
    s.minimum = f.has_minimum ? load_halves(header + 32) : s.scale;
    if (f.n_scales == 1) {
        s.scale = _mm512_mul_ps(s.scale, load_bytes(bytes));
    } else if (f.n_scales == 2) {
        s.halves[0] = load_bytes(bytes);
        s.halves[1] = load_bytes(bytes + DT_GEMM_ROWS);
    }
    if (f.n_scales > 0 && f.has_minimum) {
        s.minimum = _mm512_mul_ps(s.minimum, load_bytes(bytes + f.n_scales * DT_GEMM_ROWS));
    }
    return s;
}

/* Adds the products of 8 quads with one token's, which lie `tile` apart: those of the first 16 inputs to sums[0] and of the last to
 * sums[1], or, where the format needs them in one, as is best. */
INLINE void add_products(const dt_gemm_format f, const __m512i q[8], const int32_t *quads, int tile, __m512i sums[2]) {
#ifdef __AVX512VNNI__
    (void)f;
    UNROLL for (int j = 0; j < 4; j++) {
        sums[0] = _mm512_dpbusd_epi32(sums[0], q[j], _mm512_set1_epi32(quads[j * tile]));
        sums[1] = _mm512_dpbusd_epi32(sums[1], q[j + 4], _mm512_set1_epi32(quads[(j + 4) * tile]));
    }
#else
    const int fit = dt_gemm_quads_in_16_bits(f);
    UNROLL for (int j = 0; j < 8; j += fit) {
        __m512i pairs = _mm512_setzero_si512();
        UNROLL for (int k = j; k < j + fit; k++) {
            const __m512i x = _mm512_set1_epi32(quads[k * tile]);
            const __m512i signs_moved =
                SIGNED_WEIGHTS(f) ? _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(q[k]), _mm512_setzero_si512(), x) : x;
            pairs = _mm512_add_epi16(pairs, _mm512_maddubs_epi16(SIGNED_WEIGHTS(f) ? _mm512_abs_epi8(q[k]) : q[k], signs_moved));
        }
        sums[j / 4] = _mm512_add_epi32(sums[j / 4], _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
    }
#endif
}

/* Adds the product of a block with token t of a tile to y. The sums of the first and of the last 16 inputs begin with what they
 * will be too large by, where the weights are unsigned. */
INLINE __m512 add_block(const dt_gemm_format f, const __m512i q[8], const block_scales *s, const char *inputs, const int tile,
                        int t, __m512 y) {
    const int32_t *quads = (const int32_t *)inputs + t;
    __m512i sums[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    if (f.offset != 0 && !SIGNED_WEIGHTS(f)) {
        const int32_t *negated = dt_gemm_negated((void *)inputs, tile) + t;
        sums[0] = shift_left(_mm512_set1_epi32(negated[tile]), __builtin_ctz((unsigned)f.offset));
        if (f.n_scales == 2) {
            const __m512i all = sums[0];
            sums[0] = shift_left(_mm512_set1_epi32(negated[0]), __builtin_ctz((unsigned)f.offset));
            sums[1] = _mm512_sub_epi32(all, sums[0]);
        }
    }
    add_products(f, q, quads, tile, sums);
    const __m512 product = f.n_scales == 2 ? _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[1]), s->halves[1],
                                                             _mm512_mul_ps(_mm512_cvtepi32_ps(sums[0]), s->halves[0]))
                                           : _mm512_cvtepi32_ps(_mm512_add_epi32(sums[0], sums[1]));
    y = _mm512_fmadd_ps(product, _mm512_mul_ps(s->scale, _mm512_set1_ps(dt_gemm_scales((void *)inputs, tile)[t])), y);
    return f.has_minimum ? _mm512_fmadd_ps(s->minimum, _mm512_set1_ps(dt_gemm_sums((void *)inputs, tile)[t]), y) : y;
}

/* One group of rows times one tile of tokens. from_memory: the group's weights are not in a cache yet. */
INLINE void group_tile(const dt_gemm_format f, const uint8_t *group, int32_t n_blocks, const char *inputs, const int tile,
                       bool from_memory, float *y, size_t stride) {
    const size_t block_bytes = dt_gemm_block_bytes(f);
    __m512 sum[DT_GEMM_TILE];
    UNROLL for (int t = 0; t < tile; t++) { sum[t] = _mm512_setzero_ps(); }
    for (int32_t left = n_blocks; left > 0; left -= f.n_blocks) {
        const uint8_t *header = group;
        group += dt_gemm_header_bytes(f);
        for (int32_t b = 0; b < f.n_blocks; b++) {
            if (from_memory) {
                for (size_t line = 0; line < block_bytes; line += 64) {
                    _mm_prefetch((const char *)group + AHEAD + line, _MM_HINT_T1);
                    _mm_prefetch((const char *)group + SOON + line, _MM_HINT_T0);
                }
            }
            __m512i q[8];
            load_weights(f, group, q);
            const block_scales scales = load_scales(f, header, group + dt_gemm_quant_bytes(f));
            UNROLL for (int t = 0; t < tile; t++) { sum[t] = add_block(f, q, &scales, inputs, tile, t, sum[t]); }
            group += block_bytes;
            inputs += (size_t)tile * DT_GEMM_TOKEN_BYTES;
        }
    }
    UNROLL for (int t = 0; t < tile; t++) { _mm512_storeu_ps(y + (size_t)t * stride, sum[t]); }
}

INLINE void group_tokens(const dt_gemm_format f, const uint8_t *group, int32_t n_blocks, const char *inputs, int32_t n_tokens,
                         float *y, size_t stride) {
    for (int32_t first = 0, tile; first < n_tokens; first += tile) {
        tile = dt_gemm_tile(n_tokens - first);
        const char *from = inputs + (size_t)first * (size_t)n_blocks * DT_GEMM_TOKEN_BYTES;
        float *to = y + (size_t)first * stride;
        const bool from_memory = first == 0;
#define GROUP_TILE(n)                                                                                                              \
    case n:                                                                                                                        \
        group_tile(f, group, n_blocks, from, n, from_memory, to, stride);                                                          \
        break;
        switch (tile) {
            GROUP_TILE(1)
            GROUP_TILE(2)
            GROUP_TILE(3)
            GROUP_TILE(4)
            GROUP_TILE(5)
            GROUP_TILE(6)
            GROUP_TILE(7)
            GROUP_TILE(8)
            GROUP_TILE(16)
        default:
            break;
        }
#undef GROUP_TILE
    }
}

/* The functions of a kernel whose packed inputs are those of gemm_kernel.h. */
#define DT_GEMM_DEFINE_AVX512                                                                                                      \
    static void pack_block(const float *from, int32_t tile, int32_t t, void *to) { pack_inputs_of(from, tile, t, false, to); }     \
    DT_GEMM_DEFINE_GROUPS                                                                                                          \
    DT_GEMM_DEFINE_KERNEL(DT_GEMM_CHUNKS)

#endif
