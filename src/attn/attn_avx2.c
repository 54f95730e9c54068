/*
 * Attention with AVX2, FMA and F16C: 16 registers of 8 floats, so a group of 16 keys is two registers and 6 rows times one group
 * stay in registers. Compiled with its own flags; called only after attn.c found the instructions at run time.
 *
 * Invariant: nothing here is called, and no constant of it is computed, on a machine without these instructions.
 */
#include "attn/attn_driver.h"

#include <immintrin.h>
#include <math.h>

typedef __m256 vf;
typedef __m256i vi;
#define W 8
#define DT_SIMD_SCORE_ROWS 6
#define DT_SIMD_SCORE_VECTORS_4 2
#define DT_SIMD_VALUE_ROWS 6
#define DT_SIMD_VALUE_VECTORS 2

#define v_set1(x) _mm256_set1_ps(x)
#define v_load(p) _mm256_loadu_ps(p)
#define v_store(p, x) _mm256_storeu_ps(p, x)
#define v_add(a, b) _mm256_add_ps(a, b)
#define v_sub(a, b) _mm256_sub_ps(a, b)
#define v_mul(a, b) _mm256_mul_ps(a, b)
#define v_div(a, b) _mm256_div_ps(a, b)
#define v_max(a, b) _mm256_max_ps(a, b)
#define v_min(a, b) _mm256_min_ps(a, b)
#define v_fma(a, b, c) _mm256_fmadd_ps(a, b, c)
#define v_fnma(a, b, c) _mm256_fnmadd_ps(a, b, c)
#define v_abs(x) _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x)
#define v_round(x) _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define v_load_f16(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(p)))
#define v_load_int8(p) _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)(p))))

static inline vf v_copy_sign(vf magnitude, vf sign) { return _mm256_or_ps(magnitude, _mm256_and_ps(sign, _mm256_set1_ps(-0.0f))); }
/* p * 2^n for n in [-126, 127] */
static inline vf v_scale_by_power(vf p, vf n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
static inline float v_sum_all(vf x) {
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
static inline float v_max_all(vf x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
/* y, but 0 where x < limit (not where x is NaN) */
static inline vf v_zero_where_less(vf y, vf x, vf limit) { return _mm256_and_ps(_mm256_cmp_ps(x, limit, _CMP_NLT_UQ), y); }
static inline vf v_zero_where_nan(vf x) { return _mm256_and_ps(_mm256_cmp_ps(x, x, _CMP_ORD_Q), x); }
static inline void v_store_f16(uint16_t *p, vf x) {
    _mm_storeu_si128((__m128i *)(void *)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
/* |x| <= 127 but for rounding */
static inline void v_store_int8(int8_t *p, vf x) {
    const __m256i y = _mm256_cvtps_epi32(x);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
    _mm_storel_epi64((__m128i *)(void *)p, _mm_packs_epi16(words, words));
}
/* Four dimensions of 8 keys: bytes become signed. */
static inline vi v_load_quads(const char *p) {
    return _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)(const void *)p), _mm256_set1_epi8((char)0x80));
}
/* Dimension j of them times 2^24: its byte becomes the top one of an integer. */
static inline vf v_quad_dim(vi quads, int j) {
    const __m128i shuffle =
        _mm_setr_epi8(-1, -1, -1, (char)j, -1, -1, -1, (char)(j + 4), -1, -1, -1, (char)(j + 8), -1, -1, -1, (char)(j + 12));
    return _mm256_cvtepi32_ps(_mm256_shuffle_epi8(quads, _mm256_broadcastsi128_si256(shuffle)));
}

#include "attn/attn_simd.h"

const dt_attn_ops dt_attn_avx2_ops = DT_SIMD_OPS;
