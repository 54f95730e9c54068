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
#include "policy/policy.h"

#include <math.h>

#define NEAR 64.0f
#define REFERENCE 512.0f
#define LOG_LIMIT 40.0f /* e^40 and e^-40 leave room for the decay in a float */

float dt_predict_decay_feature(int64_t distance) { return logf(((float)DT_MAX(distance, (int64_t)1) + NEAR) / (REFERENCE + NEAR)); }

void dt_predict_features(const dt_predict_shape *shape, const float *key, const float *value, float *restrict out) {
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

float dt_predict_peak(const dt_predict_shape *shape, const float *weights, const float *features) {
    float sum = 0;
    for (int32_t i = 0; i < dt_predict_n_features(shape); i++) {
        sum += weights[DT_PREDICT_FEATURES + i] * features[i];
    }
    sum += weights[DT_PREDICT_BIAS];
    return dt_is_finite(sum) ? expf(DT_MIN(DT_MAX(sum, -LOG_LIMIT), LOG_LIMIT)) : 1; /* 1: nothing is known, so keep it */
}

static void score_without_attention(const dt_lane_view *view, float *out) {
    const float decay = view->weights != NULL ? view->weights[DT_PREDICT_DECAY] : 0;
    for (int32_t i = 0; i < view->n; i++) {
        const float peak = view->peak_mass[i];
        const float log_change = decay * dt_predict_decay_feature((int64_t)view->next_position - view->position[i]);
        const bool is_good = dt_is_finite(peak) && peak > 0;
        out[i] = is_good ? DT_MIN(peak, 1e18f) * expf(DT_MIN(DT_MAX(log_change, -LOG_LIMIT), LOG_LIMIT)) : 0;
    }
}

static void score(const dt_lane_view *view, float *out) {
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
