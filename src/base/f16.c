/*
 * IEEE half precision, one number at a time: the definition that every vector path is tested against.
 *
 * Rounding is to nearest, ties to even, also into the subnormal range and up to infinity; NaN stays NaN (quiet, sign kept).
 */
#include "base/base.h"

#include <string.h>

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

float dt_f16_to_f32(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    const uint32_t exponent = (half >> 10) & 0x1Fu, fraction = half & 0x3FFu;
    if (exponent == 0x1F) {
        return float_of(sign | 0x7F800000u | (fraction << 13));
    }
    if (exponent == 0) { /* zero or subnormal: fraction * 2^-24, exact in a float */
        const float magnitude = (float)fraction * 0x1p-24f;
        return sign != 0 ? -magnitude : magnitude;
    }
    return float_of(sign | ((exponent + 127 - 15) << 23) | (fraction << 13));
}

uint16_t dt_f32_to_f16(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) {
        return (uint16_t)(sign | 0x7E00u);
    }
    if (magnitude >= 0x477FF000u) { /* 65520, halfway between the largest half and the next power of two: rounds to infinity */
        return (uint16_t)(sign | 0x7C00u);
    }
    uint32_t kept, rest, halfway;
    if (magnitude >= 0x38800000u) { /* 2^-14, the smallest normal half */
        kept = (magnitude - ((127u - 15u) << 23)) >> 13;
        rest = magnitude & 0x1FFFu;
        halfway = 0x1000u;
    } else if (magnitude >= 0x33000000u) {               /* 2^-25: half of the smallest subnormal */
        const uint32_t shift = 126u - (magnitude >> 23); /* of the 24-bit significand, so that one unit is 2^-24 */
        const uint32_t significand = (magnitude & 0x7FFFFFu) | 0x800000u;
        kept = significand >> shift;
        rest = significand & ((1u << shift) - 1u);
        halfway = 1u << (shift - 1u);
    } else {
        return (uint16_t)sign;
    }
    if (rest > halfway || (rest == halfway && (kept & 1u) != 0)) {
        kept++; /* a carry out of the fraction raises the exponent, which is what rounding up means */
    }
    return (uint16_t)(sign | kept);
}

bool dt_is_finite(float value) { return (bits_of(value) & 0x7F800000u) != 0x7F800000u; }
