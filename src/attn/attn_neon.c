/*
 * Attention with NEON on 64-bit ARM: 32 registers of 4 floats, so a group of 16 keys is four registers and 6 rows times one group
 * stay in registers. NEON and its conversions of halves are part of every such processor, so no flags and no question at run time.
 *
 * Invariant: what is stored is bit for bit what the other kernels store: conversions round to nearest even.
 */
#include "attn/attn_driver.h"

#include <arm_neon.h>
#include <math.h>
#include <string.h>

typedef float32x4_t vf;
typedef int32x4_t vi;
#define W 4
#define DT_SIMD_SCORE_ROWS 6
#define DT_SIMD_SCORE_VECTORS_4 4
#define DT_SIMD_VALUE_ROWS 6
#define DT_SIMD_VALUE_VECTORS 4

#define v_set1(x) vdupq_n_f32(x)
#define v_load(p) vld1q_f32(p)
#define v_store(p, x) vst1q_f32(p, x)
#define v_add(a, b) vaddq_f32(a, b)
#define v_sub(a, b) vsubq_f32(a, b)
#define v_mul(a, b) vmulq_f32(a, b)
#define v_div(a, b) vdivq_f32(a, b)
#define v_max(a, b) vmaxq_f32(a, b)
#define v_min(a, b) vminq_f32(a, b)
#define v_fma(a, b, c) vfmaq_f32(c, a, b)
#define v_fnma(a, b, c) vfmsq_f32(c, a, b)
#define v_abs(x) vabsq_f32(x)
#define v_round(x) vrndnq_f32(x)
#define v_sum_all(x) vaddvq_f32(x)
#define v_max_all(x) vmaxvq_f32(x)
#define v_load_f16(p) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)))

static inline vf v_load_int8(const int8_t *p) {
    int32_t four;
    memcpy(&four, p, 4);
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four))))));
}
static inline vf v_copy_sign(vf magnitude, vf sign) { return vbslq_f32(vdupq_n_u32(0x80000000u), sign, magnitude); }
/* p * 2^n for n in [-126, 127] */
static inline vf v_scale_by_power(vf p, vf n) {
    return vmulq_f32(p, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23)));
}
/* y, but 0 where x < limit (not where x is NaN) */
static inline vf v_zero_where_less(vf y, vf x, vf limit) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(y), vcltq_f32(x, limit)));
}
static inline vf v_zero_where_nan(vf x) { return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x), vceqq_f32(x, x))); }
static inline void v_store_f16(uint16_t *p, vf x) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
/* |x| <= 127 but for rounding */
static inline void v_store_int8(int8_t *p, vf x) {
    const int16x4_t words = vqmovn_s32(vcvtnq_s32_f32(x));
    const int32_t four = vget_lane_s32(vreinterpret_s32_s8(vqmovn_s16(vcombine_s16(words, words))), 0);
    memcpy(p, &four, 4);
}
/* Four dimensions of 4 keys: bytes become signed. */
static inline vi v_load_quads(const char *p) {
    return vreinterpretq_s32_u8(veorq_u8(vld1q_u8((const uint8_t *)p), vdupq_n_u8(0x80)));
}
/* Dimension j of them times 2^24: its byte becomes the top one of an integer. */
static inline vf v_quad_dim(vi quads, int j) {
    return vcvtq_f32_s32(vandq_s32(vshlq_s32(quads, vdupq_n_s32(24 - 8 * j)), vdupq_n_s32((int32_t)0xFF000000u)));
}

#include "attn/attn_simd.h"

const dt_attn_ops dt_attn_neon_ops = DT_SIMD_OPS;
