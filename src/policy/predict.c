/*
 * Policy importance_score with "score": "predict": what reconstruct would find, foretold from the entry itself, at no cost; and, as
 * there, what the last queries attend to (dt_in_use).
 *
 * How much a token is worth to those who will look back at it is largely written in its key and value, and how it is written
 * belongs to the model, not to the text: a linear function per KV head, fitted once (./deeptutor-eval calibrate,
 * engine/calibrate.c), finds most of it (KVzap, Jegou and Jeblick 2026, arXiv 2601.07891, from hidden states; the cache holds none,
 * but keys and values tell nearly as much). Of a key it sees the length of each pair of dimensions that rotates together, which
 * does not depend on the position. How far a head looks back is the last part: a power of the distance.
 *
 *   log of the peak = bias + pairs . |pairs of the key| + values . value + decay * log((distance + NEAR) / (REFERENCE + NEAR))
 *
 * All but the last term is known when the token is read, and stored as its peak, as if it were REFERENCE tokens away.
 * Pure functions. Invariant: finite and positive for all finite input.
 */
#include "base/vectors.h"
#include "policy/policy.h"

#include <math.h>

#define NEAR 64.0f
#define REFERENCE 512.0f
#define LOG_LIMIT 40.0f /* e^40 and e^-40 leave room for the decay in a float */

float dt_predict_decay_feature(int64_t distance) { return logf(((float)DT_MAX(distance, (int64_t)1) + NEAR) / (REFERENCE + NEAR)); }

DT_MANY_PROCESSORS static void find_features(const dt_predict_shape *shape, const float *key, const float *value,
                                             float *restrict out) {
    const int32_t n_pairs = shape->dim_k / 2, half = shape->split / 2;
    for (int32_t i = 0; i < half; i++) {
        out[i] = sqrtf(key[i] * key[i] + key[i + half] * key[i + half]);
    }
    for (int32_t i = half; i < n_pairs; i++) {
        out[i] = sqrtf(key[2 * i] * key[2 * i] + key[2 * i + 1] * key[2 * i + 1]);
    }
    for (int32_t i = 0; i < shape->dim_v; i++) {
        out[n_pairs + i] = value[i];
    }
}

void dt_predict_features(const dt_predict_shape *shape, const float *key, const float *value, float *out) {
    find_features(shape, key, value, out);
}

DT_MANY_PROCESSORS static float weighted_sum(const float *weights, const float *features, int32_t n) {
    dt_floats sums = {0};
    for (int32_t i = 0; i < n; i += DT_VECTOR) {
        dt_floats weight, feature;
        dt_vector_load(&weight, weights + i, n - i);
        dt_vector_load(&feature, features + i, n - i);
        sums += weight * feature;
    }
    float sum = 0;
    for (int32_t i = 0; i < DT_VECTOR; i++) {
        sum += sums[i];
    }
    return sum;
}

float dt_predict_peak(const dt_predict_shape *shape, const float *weights, const float *features) {
    const float sum =
        weights[DT_PREDICT_BIAS] + weighted_sum(weights + DT_PREDICT_FEATURES, features, dt_predict_n_features(shape));
    return dt_is_finite(sum) ? expf(DT_MIN(DT_MAX(sum, -LOG_LIMIT), LOG_LIMIT)) : 1; /* 1: nothing is known, so keep it */
}

/* What dt_predict_decay_feature gives, of DT_VECTOR entries. Memory slots count as if they were the first token: nobody asks. */
static DT_INLINED void decay_features(const dt_ints *positions, int32_t next_position, dt_floats *out) {
    const dt_ints position = *positions & (*positions > -1), distance = next_position - position;
    const dt_floats one = (dt_floats){0} + 1.0f, steps = __builtin_convertvector(distance, dt_floats);
    *out = (DT_CHOOSE(steps < one, one, steps) + NEAR) * (1 / (REFERENCE + NEAR));
    dt_logarithms(out);
}

DT_MANY_PROCESSORS static void score_without_attention(const dt_lane_view *view, float *out) {
    const float decay = view->weights != NULL ? view->weights[DT_PREDICT_DECAY] : 0;
    const dt_floats zero = {0}, most = zero + LOG_LIMIT, largest = zero + 1e18f;
    for (int32_t i = 0; i < view->n; i += DT_VECTOR) {
        dt_ints positions;
        dt_floats peak, factor;
        dt_vector_load(&positions, view->position + i, view->n - i);
        dt_vector_load(&peak, view->peak_mass + i, view->n - i);
        decay_features(&positions, view->next_position, &factor);
        factor *= decay;
        factor = DT_CHOOSE(factor < most, factor, most);
        factor = DT_CHOOSE(factor > -most, factor, -most);
        dt_exponentials(&factor);
        const dt_floats product = DT_CHOOSE(peak < largest, peak, largest) * factor;
        const dt_floats good = DT_CHOOSE((peak > zero) & (peak <= zero + FLT_MAX), product, zero);
        dt_vector_store(out + i, &good, view->n - i);
    }
}

DT_MANY_PROCESSORS static void score(const dt_lane_view *view, float *out) {
    score_without_attention(view, out);
    for (int32_t i = 0; i < view->n; i++) {
        out[i] += dt_in_use(view, i);
    }
}

const dt_policy dt_policy_predict = {.name = "importance_score",
                                     .score_name = "predict",
                                     .needs_mass = true,
                                     .needs_peak = true,
                                     .needs_weights = true,
                                     .score = score};

/* To measure what that part is worth. */
const dt_policy dt_policy_predict_without_attention = {.name = "importance_score",
                                                       .score_name = "predict-without-attention",
                                                       .needs_mass = true,
                                                       .needs_peak = true,
                                                       .needs_weights = true,
                                                       .score = score_without_attention};
