/*
 * Attention as the formula says it, in plain C and double precision, one (query, head) after another: the oracle that the fast
 * kernels are tested against. Nobody optimises it, and it shares nothing with them but the block format.
 *
 * Invariant: what is stored is bit for bit what every other kernel stores; what is computed differs from theirs by rounding only.
 */
#include "attn/attn_driver.h"

#include <math.h>
#include <string.h>

/* Scores of one row over the whole lane, per thread. */
size_t dt_attn_reference_scratch_bytes(const dt_kv_format *format, int32_t n_lanes, int32_t n_rep, int32_t n_query,
                                       int32_t max_entries, int32_t n_threads) {
    (void)format, (void)n_lanes, (void)n_rep, (void)n_query;
    return (size_t)n_threads * (size_t)max_entries * sizeof(double);
}

void dt_attn_reference_prepare(dt_attn_job *job) { (void)job; }

static double *thread_scores(const dt_attn_job *job, int32_t ith) {
    return (double *)job->scratch + job->scratch_bytes / sizeof(double) / (size_t)job->n_threads * (size_t)ith;
}

/* ---- store ------------------------------------------------------------------------------------------- */

static float clean(float x) { return x != x ? 0.0f : x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x; }

/* 127 / scale, or 0 where everything is stored as 0. */
static float quantizer(const float *x, int32_t n, float *scale) {
    float largest = 0.0f;
    for (int32_t i = 0; i < n; i++) {
        largest = fmaxf(largest, fabsf(clean(x[i])));
    }
    const bool tiny = largest <= 1e-30f;
    *scale = tiny ? 0.0f : largest / 127.0f;
    return tiny ? 0.0f : 127.0f / largest;
}

static int32_t quantize(float x, float inverse) { return (int32_t)nearbyintf(clean(x) * inverse); }

static void store_key(const dt_kv_format *f, void *block, int32_t entry, const float *k) {
    float inverse = 0.0f;
    if (f->type_k == DT_KV_INT8) {
        inverse = quantizer(k, f->dim_k, &dt_kv_k_scale(f, block)[entry]);
    }
    for (int32_t d = 0; d < (f->type_k == DT_KV_INT8 ? f->dim_k_padded : f->dim_k); d++) {
        char *to = (char *)block + dt_kv_key_offset(f, entry, d);
        if (f->type_k == DT_KV_F16) {
            *(uint16_t *)(void *)to = dt_f32_to_f16(clean(k[d]));
        } else {
            *(uint8_t *)to = (uint8_t)((d < f->dim_k ? quantize(k[d], inverse) : 0) + 128);
        }
    }
}

static float store_value(const dt_kv_format *f, void *block, int32_t entry, const float *v) {
    char *row = (char *)block + f->v_offset + (size_t)entry * dt_kv_value_row_bytes(f);
    float inverse = 0.0f;
    if (f->type_v == DT_KV_INT8) {
        inverse = quantizer(v, f->dim_v, &dt_kv_v_scale(f, block)[entry]);
    }
    double squares = 0.0;
    for (int32_t d = 0; d < f->dim_v_padded; d++) {
        const float x = d < f->dim_v ? clean(v[d]) : 0.0f;
        squares += (double)x * (double)x;
        if (f->type_v == DT_KV_F16) {
            ((uint16_t *)(void *)row)[d] = dt_f32_to_f16(x);
        } else {
            ((int8_t *)row)[d] = (int8_t)quantize(x, inverse);
        }
    }
    return (float)sqrt(squares);
}

void dt_attn_reference_store(dt_attn_job *job, int32_t ith, int32_t nth) {
    for (int32_t lane = ith; lane < job->n_lanes; lane += nth) {
        const dt_attn_lane *l = &job->lanes[lane];
        int32_t entry = 0;
        for (int32_t span = 0; span < l->n_spans; span++) {
            for (int32_t t = 0; t < l->spans[span].n; t++, entry++) {
                const int32_t query = entry - (l->n_entries - job->n_query);
                if (query < 0) {
                    continue;
                }
                void *block = l->spans[span].block;
                store_key(job->format, block, t, job->k + (size_t)query * job->k_token_stride + (size_t)lane * job->k_head_stride);
                const float norm = store_value(job->format, block, t,
                                               job->v + (size_t)query * job->v_token_stride + (size_t)lane * job->v_head_stride);
                dt_kv_position(job->format, block)[t] = job->positions[query];
                if (l->value_norm != NULL) {
                    l->value_norm[entry] = norm;
                }
            }
        }
    }
}

/* ---- attend and observe ------------------------------------------------------------------------------ */

static double key_number(const dt_kv_format *f, void *block, int32_t entry, int32_t d) {
    const char *at = (const char *)block + dt_kv_key_offset(f, entry, d);
    if (f->type_k == DT_KV_F16) {
        return (double)dt_f16_to_f32(*(const uint16_t *)(const void *)at);
    }
    return (double)dt_kv_k_scale(f, block)[entry] * (double)((int32_t) * (const uint8_t *)at - 128);
}

static double value_number(const dt_kv_format *f, void *block, int32_t entry, int32_t d) {
    const char *row = (const char *)block + f->v_offset + (size_t)entry * dt_kv_value_row_bytes(f);
    if (f->type_v == DT_KV_F16) {
        return (double)dt_f16_to_f32(((const uint16_t *)(const void *)row)[d]);
    }
    return (double)dt_kv_v_scale(f, block)[entry] * (double)((const int8_t *)row)[d];
}

static double score(const dt_attn_job *job, const float *q, int32_t query, const dt_kv_span *span, int32_t t) {
    const dt_kv_format *f = job->format;
    if (job->window > 0 && dt_kv_position(f, span->block)[t] <= job->positions[query] - job->window) {
        return -INFINITY;
    }
    double s = 0.0;
    for (int32_t d = 0; d < f->dim_k; d++) {
        const float scaled = q[d] * job->scale;
        s += (double)(scaled > 1e30f ? 1e30f : scaled < -1e30f ? -1e30f : scaled) * key_number(f, span->block, t, d);
    }
    if (job->softcap > 0.0f) {
        s = (double)job->softcap * tanh(s / (double)job->softcap);
    }
    return span->bias != NULL ? s + (double)span->bias[t] : s;
}

/* Probabilities p[visible] of one row; returns how many entries there are before its causal limit. */
static int32_t probabilities(const dt_attn_job *job, int32_t lane, int32_t query, int32_t head, double *p) {
    const dt_attn_lane *l = &job->lanes[lane];
    const float *q = job->q + (size_t)query * job->q_token_stride + (size_t)head * job->q_head_stride;
    const int32_t visible = l->n_entries - job->n_query + query + 1;
    double max = -INFINITY, sum = 0.0;
    int32_t entry = 0;
    for (int32_t span = 0; span < l->n_spans; span++) {
        for (int32_t t = 0; t < l->spans[span].n && entry < visible; t++, entry++) {
            p[entry] = score(job, q, query, &l->spans[span], t);
            max = p[entry] > max || p[entry] != p[entry] ? p[entry] : max;
        }
    }
    for (int32_t e = 0; e < visible; e++) {
        p[e] = max == -INFINITY ? 0.0 : exp(p[e] - max);
        sum += p[e];
    }
    for (int32_t e = 0; e < visible && sum != 0.0; e++) {
        p[e] /= sum;
    }
    return visible;
}

void dt_attn_reference_attend(dt_attn_job *job, int32_t ith, int32_t nth) {
    const dt_kv_format *f = job->format;
    const int32_t n_heads = job->n_lanes * job->n_rep;
    double *p = thread_scores(job, ith);
    for (int32_t row = ith; row < job->n_query * n_heads; row += nth) {
        const int32_t query = row / n_heads, head = row % n_heads, lane = head / job->n_rep;
        const dt_attn_lane *l = &job->lanes[lane];
        const int32_t visible = probabilities(job, lane, query, head, p);
        float *out = job->out + (size_t)query * job->out_token_stride + (size_t)head * job->out_head_stride;
        for (int32_t d = 0; d < f->dim_v; d++) {
            double sum = 0.0;
            int32_t entry = 0;
            for (int32_t span = 0; span < l->n_spans; span++) {
                for (int32_t t = 0; t < l->spans[span].n && entry < visible; t++, entry++) {
                    sum += p[entry] * value_number(f, l->spans[span].block, t, d);
                }
            }
            out[d] = (float)sum;
        }
    }
}

void dt_attn_reference_observe(dt_attn_job *job, int32_t ith, int32_t nth) {
    if (job->mass_row == NULL) {
        return;
    }
    double *p = thread_scores(job, ith);
    for (int32_t lane = ith; lane < job->n_lanes; lane += nth) {
        const dt_attn_lane *l = &job->lanes[lane];
        if (l->mass == NULL) {
            continue;
        }
        for (int32_t row = 0; row < job->n_mass_rows; row++) {
            memset(l->mass + (size_t)row * job->mass_stride, 0, (size_t)l->n_entries * sizeof(float));
        }
        for (int32_t query = 0; query < job->n_query; query++) {
            for (int32_t rep = 0; job->mass_row[query] >= 0 && rep < job->n_rep; rep++) {
                float *mass = l->mass + (size_t)job->mass_row[query] * job->mass_stride;
                const int32_t visible = probabilities(job, lane, query, lane * job->n_rep + rep, p);
                for (int32_t e = 0; e < visible; e++) {
                    mass[e] = job->mass_peak ? fmaxf(mass[e], (float)p[e]) : mass[e] + (float)p[e];
                }
            }
        }
    }
}
