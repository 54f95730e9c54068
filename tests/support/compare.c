#include "support/compare.h"

#include <math.h>
#include <string.h>

bool all_finite(const float *values, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        if ((bits & 0x7f800000u) == 0x7f800000u) {
            return false;
        }
    }
    return true;
}

int32_t argmax(const float *values, size_t n) {
    size_t best = 0;
    for (size_t i = 1; i < n; i++) {
        best = values[i] > values[best] ? i : best;
    }
    return (int32_t)best;
}

static double deviation(const float *values, size_t n) {
    double sum = 0.0, squares = 0.0;
    for (size_t i = 0; i < n; i++) {
        sum += (double)values[i];
        squares += (double)values[i] * (double)values[i];
    }
    const double mean = sum / (double)n;
    return sqrt(fmax(squares / (double)n - mean * mean, 1e-30));
}

double logit_error(const float *a, const float *b, size_t n) {
    if (!all_finite(a, n) || !all_finite(b, n)) {
        return 1e30;
    }
    double worst = 0.0;
    for (size_t i = 0; i < n; i++) {
        worst = fmax(worst, fabs((double)a[i] - (double)b[i]));
    }
    return worst / deviation(b, n);
}

double top_gap(const float *values, size_t n) {
    float first = -INFINITY, second = -INFINITY;
    for (size_t i = 0; i < n; i++) {
        if (values[i] > first) {
            second = first;
            first = values[i];
        } else if (values[i] > second) {
            second = values[i];
        }
    }
    return (double)(first - second) / deviation(values, n);
}

uint64_t next_random(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

void random_tokens(int32_t *tokens, size_t n, int32_t low, int32_t high, uint64_t seed) {
    for (size_t i = 0; i < n; i++) {
        tokens[i] = low + (int32_t)(next_random(&seed) % (uint64_t)(high - low));
    }
}
