/*
 * Attention with AVX-512 (F, BW, VL, DQ): 32 registers of 16 floats, so a group of 16 keys is one register and 12 rows times 2
 * groups stay in registers. Compiled with its own flags; called only after attn.c found the instructions at run time.
 *
 * Invariant: nothing here is called, and no constant of it is computed, on a machine without these instructions.
 */
#include "attn/attn_driver.h"

#include <immintrin.h>
#include <math.h>

typedef __m512 vf;
typedef __m512i vi;
#define W 16
#define DT_SIMD_SCORE_ROWS 12
#define DT_SIMD_SCORE_VECTORS_4 4
#define DT_SIMD_VALUE_ROWS 6
#define DT_SIMD_VALUE_VECTORS 4

#define v_set1(x) _mm512_set1_ps(x)
#define v_load(p) _mm512_loadu_ps(p)
#define v_store(p, x) _mm512_storeu_ps(p, x)
#define v_add(a, b) _mm512_add_ps(a, b)
#define v_sub(a, b) _mm512_sub_ps(a, b)
#define v_mul(a, b) _mm512_mul_ps(a, b)
#define v_div(a, b) _mm512_div_ps(a, b)
#define v_max(a, b) _mm512_max_ps(a, b)
#define v_min(a, b) _mm512_min_ps(a, b)
#define v_fma(a, b, c) _mm512_fmadd_ps(a, b, c)
#define v_fnma(a, b, c) _mm512_fnmadd_ps(a, b, c)
#define v_abs(x) _mm512_abs_ps(x)
#define v_round(x) _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define v_scale_by_power(p, n) _mm512_scalef_ps(p, n)
#define v_sum_all(x) _mm512_reduce_add_ps(x)
#define v_max_all(x) _mm512_reduce_max_ps(x)
#define v_load_f16(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)(p)))
#define v_load_int8(p) _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)(p))))

static inline vf v_copy_sign(vf magnitude, vf sign) { return _mm512_or_ps(magnitude, _mm512_and_ps(sign, _mm512_set1_ps(-0.0f))); }
/* y, but 0 where x < limit (not where x is NaN) */
static inline vf v_zero_where_less(vf y, vf x, vf limit) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), y);
}
static inline vf v_zero_where_nan(vf x) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, x, _CMP_ORD_Q), x); }
static inline void v_store_f16(uint16_t *p, vf x) {
    _mm256_storeu_si256((__m256i *)(void *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
/* |x| <= 127 but for rounding */
static inline void v_store_int8(int8_t *p, vf x) {
    _mm_storeu_si128((__m128i *)(void *)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
}
/* Four dimensions of 16 keys: bytes become signed. */
static inline vi v_load_quads(const char *p) { return _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8((char)0x80)); }
/* Dimension j of them times 2^24: its byte becomes the top one of an integer. */
static inline vf v_quad_dim(vi quads, int j) {
    const int b = j;
    const __m128i shuffle =
        _mm_setr_epi8(-1, -1, -1, (char)b, -1, -1, -1, (char)(b + 4), -1, -1, -1, (char)(b + 8), -1, -1, -1, (char)(b + 12));
    return _mm512_cvtepi32_ps(_mm512_shuffle_epi8(quads, _mm512_broadcast_i32x4(shuffle)));
}

#include "attn/attn_simd.h"

const dt_attn_ops dt_attn_avx512_ops = DT_SIMD_OPS;
