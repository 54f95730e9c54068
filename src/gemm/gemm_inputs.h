/*
 * What is computed on the way into a product: norms, and the gate of a feed-forward. Plain loops of a constant length that every
 * kernel compiles with its own instructions.
 * Invariant: the order of operations is fixed and none are contracted (-ffp-contract=off), so results are bitwise equal for every
 * kernel, number of tokens and number of threads.
 */
#ifndef DT_GEMM_INPUTS_H
#define DT_GEMM_INPUTS_H

#include "gemm/gemm.h"

#include <math.h>
#include <string.h>

#define DT_GEMM_STRIPES 16

/* What token t's inputs (x + y) are to be multiplied with. A DT_GEMM_STRIPES-th of the inputs is summed at a time. */
static inline float dt_gemm_norm_factor(const dt_gemm_inputs *in, int32_t t) {
    const float *x = in->x + (size_t)t * in->x_stride, *y = in->y != NULL ? in->y + (size_t)t * in->y_stride : NULL;
    double sums[DT_GEMM_STRIPES] = {0};
    for (int32_t i = 0; i < in->n_in; i += DT_GEMM_STRIPES) {
        float values[DT_GEMM_STRIPES];
        memcpy(values, x + i, sizeof values);
        for (int32_t j = 0; y != NULL && j < DT_GEMM_STRIPES; j++) {
            values[j] += y[i + j];
        }
        for (int32_t j = 0; j < DT_GEMM_STRIPES; j++) {
            sums[j] += (double)(values[j] * values[j]);
        }
    }
    double sum = 0;
    for (int32_t j = 0; j < DT_GEMM_STRIPES; j++) {
        sum += sums[j];
    }
    return 1.0f / sqrtf((float)(sum / (double)in->n_in) + in->epsilon);
}

#define DT_GEMM_LEAST_EXPONENT (-87.0f)

/* e^x for x from DT_GEMM_LEAST_EXPONENT to 0 within 2e-7, without a branch or a call: 2^(whole part) by exponent bits, the rest by its series
 * (of ln 2 the first bits apart, so that their product is exact: Cody and Waite 1980). */
static inline float dt_gemm_exponential(float x) {
    const int32_t whole = (int32_t)(x * 1.44269504f - 0.5f); /* truncation upwards of a negative number: nearest */
    const float r = x - (float)whole * 0.693359375f + (float)whole * 2.12194440e-4f;
    const float p =
        1.0f + r * (1.0f + r * (0.5f + r * (0.166666667f + r * (0.0416666667f + r * (0.00833333333f + r * 0.00138888889f)))));
    const union {
        int32_t bits;
        float value;
    } scale = {.bits = (whole + 127) * (1 << 23)};
    return p * scale.value;
}

/* The 32 inputs of block b of token t; computed ones go to values. factor: dt_gemm_norm_factor's. */
static inline const float *dt_gemm_input_block(const dt_gemm_inputs *in, int32_t t, int32_t b, float factor, float *values) {
    const size_t at = (size_t)b * DT_GEMM_BLOCK;
    const float *x = in->x + (size_t)t * in->x_stride + at;
    if (in->kind == DT_GEMM_PLAIN) {
        return x;
    }
    const float *y = in->y != NULL ? in->y + (size_t)t * in->y_stride + at : NULL;
    if (in->kind == DT_GEMM_SILU) {
        float e[DT_GEMM_BLOCK]; /* e^-|x|; the bound in a loop of its own, or compilers branch on it */
        for (int32_t i = 0; i < DT_GEMM_BLOCK; i++) {
            e[i] = -fabsf(x[i]) > DT_GEMM_LEAST_EXPONENT ? -fabsf(x[i]) : DT_GEMM_LEAST_EXPONENT;
        }
        for (int32_t i = 0; i < DT_GEMM_BLOCK; i++) {
            e[i] = dt_gemm_exponential(e[i]);
        }
        for (int32_t i = 0; i < DT_GEMM_BLOCK; i++) {
            const float over = x[i] < 0.0f ? e[i] : 1.0f;
            values[i] = x[i] * (over / (1.0f + e[i])) * y[i];
        }
        return values;
    }
    if (y == NULL) {
        memcpy(values, x, DT_GEMM_BLOCK * sizeof(float));
    } else {
        float *sum = in->sum + (size_t)t * (size_t)in->n_in + at;
        for (int32_t i = 0; i < DT_GEMM_BLOCK; i++) {
            values[i] = x[i] + y[i];
        }
        memcpy(sum, values, DT_GEMM_BLOCK * sizeof(float));
    }
    for (int32_t i = 0; i < DT_GEMM_BLOCK; i++) {
        values[i] = values[i] * factor * in->weight[at + (size_t)i];
    }
    return values;
}

#endif
