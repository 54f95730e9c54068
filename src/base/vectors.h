/*
 * Loops over many numbers outside the kernels of attn/ and gemm/: a vector type that the compiler maps to as many registers as the
 * processor needs for it, and functions compiled for several processors, one of which is chosen when the program starts.
 *
 * Invariant: sums are kept apart in DT_VECTOR places whatever the registers, so that processors differ by no more than products and
 * sums rounded once where another rounds twice.
 */
#ifndef DT_BASE_VECTORS_H
#define DT_BASE_VECTORS_H

#include <stdint.h>
#include <string.h>

/* Before a static function that is worth it (others get names that clang 14 doesn't find again). Not with the sanitizers, which are
 * not ready when the choice is made. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define DT_SANITIZED 1
#elif defined(__has_feature)
#define DT_SANITIZED (__has_feature(address_sanitizer) || __has_feature(thread_sanitizer))
#else
#define DT_SANITIZED 0
#endif
#if defined(__x86_64__) && defined(__GLIBC__) && !DT_SANITIZED
#define DT_MANY_PROCESSORS __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define DT_MANY_PROCESSORS
#endif
#define DT_INLINED inline __attribute__((always_inline))

#define DT_VECTOR 16
typedef float dt_floats __attribute__((vector_size(DT_VECTOR * sizeof(float))));
typedef int32_t dt_ints __attribute__((vector_size(DT_VECTOR * sizeof(float))));

/* Where mask has all bits set a, where it has none b. */
#define DT_CHOOSE(mask, a, b) ((dt_floats)(((mask) & (dt_ints)(a)) | (~(mask) & (dt_ints)(b))))

/* The first n <= DT_VECTOR numbers from memory, 4 bytes each, zeros behind them; and back. */
static DT_INLINED void dt_vector_load(void *vector, const void *from, int32_t n) {
    if (n >= DT_VECTOR) {
        memcpy(vector, from, sizeof(dt_floats));
    } else {
        memset(vector, 0, sizeof(dt_floats));
        memcpy(vector, from, (size_t)n * sizeof(float));
    }
}
static DT_INLINED void dt_vector_store(float *to, const dt_floats *vector, int32_t n) {
    if (n >= DT_VECTOR) {
        memcpy(to, vector, sizeof *vector);
    } else {
        memcpy(to, vector, (size_t)n * sizeof(float));
    }
}

/* *x = e^*x, within a hundred-thousandth, for x of -87 to 87: 2^(whole part) by exponent bits, the rest by its series. By address,
 * since how a vector is passed by value depends on the processor. */
static DT_INLINED void dt_exponentials(dt_floats *x) {
    const dt_floats y = *x * 1.44269504f, half = (dt_floats){0} + 0.5f;
    const dt_ints whole = __builtin_convertvector(y + DT_CHOOSE(y < 0, -half, half), dt_ints); /* truncation: nearest */
    const dt_floats r = (y - __builtin_convertvector(whole, dt_floats)) * 0.693147181f;
    const dt_floats p =
        1.0f + r * (1.0f + r * (0.5f + r * (0.166666667f + r * (0.0416666667f + r * (0.00833333333f + r * 0.00138888889f)))));
    *x = p * (dt_floats)((whole + 127) * (1 << 23));
}

/* *x = log *x, within 1e-6 of it or of 1, for normal x > 0: of the mantissa, brought to between 0.7 and 1.4, by the series of
 * log((1 + s) / (1 - s)), the rest by exponent bits. */
static DT_INLINED void dt_logarithms(dt_floats *x) {
    const dt_ints bits = (dt_ints)*x, mantissa = bits & 0x007FFFFF, is_large = mantissa > 0x003504F3; /* -1: above 1.4142 */
    const dt_floats m = (dt_floats)(mantissa + (127 + is_large) * (1 << 23)),
                    whole = __builtin_convertvector((bits >> 23) - 127 - is_large, dt_floats);
    const dt_floats s = (m - 1.0f) / (m + 1.0f), t = s * s;
    *x = whole * 0.693147181f + 2.0f * s * (1.0f + t * (0.333333333f + t * (0.2f + t * (0.142857143f + t * 0.111111111f))));
}

#endif
