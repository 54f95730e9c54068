/*
 * Attention as the formula says it, in plain C and double precision, one (query, head) after another: the oracle that the fast
 * kernels are tested against. Nobody optimises it, and it shares nothing with them but the block format.
 *
 * Invariant: what is stored is bit for bit what every other kernel stores; what is computed differs from theirs by rounding only.
 *
 * The second reference, "reference_int16", rounds what tiles in 16-bit integers round (dt_attn_int16_ops) and nothing else.
 */
#include "attn/attn_driver.h"

#include <math.h>
#include <string.h>

size_t dt_attn_reference_scratch_bytes(const dt_kv_format *format, int32_t n_lanes, int32_t n_rep, int32_t n_query,
                                       int32_t max_entries) {
    (void)format, (void)n_lanes, (void)n_rep, (void)n_query, (void)max_entries;
    return 0;
}

/* Scores of one row over the whole lane. */
size_t dt_attn_reference_thread_bytes(const dt_kv_format *format, int32_t max_entries) {
    (void)format;
    return DT_ROUND_UP((size_t)max_entries * sizeof(double), (size_t)64);
}

void dt_attn_reference_prepare(dt_attn_job *job) { (void)job; }

static double *thread_scores(const dt_attn_job *job, int32_t ith) {
    return (double *)(void *)(job->thread_scratch + job->thread_bytes * (size_t)ith);
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

static float scaled_query(const dt_attn_job *job, float q) {
    const float scaled = q * job->scale;
    return scaled > 1e30f ? 1e30f : scaled < -1e30f ? -1e30f : scaled;
}

/* From the dot product s. */
static double finish_score(const dt_attn_job *job, double s, int32_t query, const dt_kv_span *span, int32_t t) {
    if (job->window > 0 && dt_kv_position(job->format, span->block)[t] <= job->positions[query] - job->window) {
        return -INFINITY;
    }
    if (job->softcap > 0.0f) {
        s = (double)job->softcap * tanh(s / (double)job->softcap);
    }
    return span->bias != NULL ? s + (double)span->bias[t] : s;
}

static double score(const dt_attn_job *job, const float *q, int32_t query, const dt_kv_span *span, int32_t t) {
    double s = 0.0;
    for (int32_t d = 0; d < job->format->dim_k; d++) {
        s += (double)scaled_query(job, q[d]) * key_number(job->format, span->block, t, d);
    }
    return finish_score(job, s, query, span, t);
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

/* ---- the second reference ---------------------------------------------------------------------------- */

/* Rounds x[n], times the inverse of a step, to integers below 2^22; in float, so that ties fall as they do in the fast kernel.
 * Adding 1.5 * 2^23 leaves no room for a fraction, which is quicker than nearbyintf. */
static void to_integers(double *x, int32_t n, float inverse) {
    for (int32_t i = 0; i < n; i++) {
        x[i] = (double)((float)x[i] * inverse + 0x1.8p23f - 0x1.8p23f);
    }
}

static double largest_of(const double *x, int32_t n) {
    double largest = 0.0;
    for (int32_t i = 0; i < n; i++) {
        largest = fabs(x[i]) > largest ? fabs(x[i]) : largest;
    }
    return largest;
}

static double query_integers(const dt_attn_job *job, const float *q, double *out) {
    double squares = 0.0;
    for (int32_t d = 0; d < job->format->dim_k; d++) {
        out[d] = (double)scaled_query(job, q[d]);
        squares += out[d] * out[d];
    }
    const double largest = largest_of(out, job->format->dim_k);
    const double step = fmax(largest / (double)DT_ATTN_INT16_MAX, sqrt(squares) / (double)DT_ATTN_INT16_NORM);
    to_integers(out, job->format->dim_k, largest > (double)DT_ATTN_INT16_TINY ? (float)(1.0 / step) : 0.0f);
    return squares != squares ? squares : step;
}

/* x[n]: numbers of the cache, which become integers up to bound, but for those of an INT8 cache, whose step is given. */
static double cached_integers(double *x, int32_t n, float bound, const float *int8_step) {
    const float largest = (float)largest_of(x, n), step = int8_step != NULL ? *int8_step : largest * (1.0f / bound);
    to_integers(x, n, step == 0.0f ? 0.0f : 1.0f / step);
    return (double)step;
}

static double key_integers(const dt_kv_format *f, void *block, int32_t t, double *out) {
    for (int32_t d = 0; d < f->dim_k; d++) {
        out[d] = key_number(f, block, t, d);
    }
    const float bound = fminf(DT_ATTN_INT16_NORM / sqrtf((float)f->dim_k), DT_ATTN_INT16_MAX);
    return cached_integers(out, f->dim_k, bound, f->type_k == DT_KV_INT8 ? &dt_kv_k_scale(f, block)[t] : NULL);
}

static double value_integers(const dt_kv_format *f, void *block, int32_t t, double *out) {
    for (int32_t d = 0; d < f->dim_v; d++) {
        out[d] = value_number(f, block, t, d);
    }
    return cached_integers(out, f->dim_v, DT_ATTN_INT16_VALUE, f->type_v == DT_KV_INT8 ? &dt_kv_v_scale(f, block)[t] : NULL);
}

/* The first n entries of a span for one row, with room for as many numbers in w. Adds exp(maximum - *max) times the weighted sum of
 * the values to out[dim_v] and of the weights to *sum, after both were brought down to the new maximum. */
static void span_int16(const dt_attn_job *job, const dt_kv_span *span, int32_t n, int32_t query, const double *q, double q_step,
                       double *w, double *max, double *sum, double *out) {
    const dt_kv_format *f = job->format;
    double x[DT_ATTN_MAX_DIM], span_max = -INFINITY, scaled_sum = 0.0;
    for (int32_t t = 0; t < n; t++) {
        const double k_step = key_integers(f, span->block, t, x);
        double s = 0.0;
        for (int32_t d = 0; d < f->dim_k; d++) {
            s += q[d] * x[d];
        }
        w[t] = finish_score(job, s * q_step * k_step, query, span, t);
        span_max = w[t] > span_max || w[t] != w[t] ? w[t] : span_max;
    }
    if (span_max == -INFINITY) {
        return;
    }
    const double new_max = span_max < *max ? *max : span_max, old = exp(*max - new_max), new = exp(span_max - new_max);
    *max = new_max;
    *sum *= old;
    for (int32_t t = 0; t < n; t++) {
        w[t] = exp(w[t] - span_max);
        *sum += w[t] * new;
        w[t] *= value_integers(f, span->block, t, x);
        scaled_sum += w[t];
    }
    const double largest_sum = (double)DT_ATTN_INT16_SUM / (f->type_v == DT_KV_INT8 ? 127.0 : (double)DT_ATTN_INT16_VALUE);
    const double step = fmax(largest_of(w, n) / (double)DT_ATTN_INT16_MAX, scaled_sum / largest_sum);
    to_integers(w, n, step > (double)DT_ATTN_INT16_TINY ? (float)(1.0 / step) : 0.0f);
    for (int32_t d = 0; d < f->dim_v; d++) {
        out[d] *= old;
    }
    for (int32_t t = 0; t < n; t++) {
        value_integers(f, span->block, t, x);
        for (int32_t d = 0; d < f->dim_v; d++) {
            out[d] += w[t] * step * x[d] * new;
        }
    }
}

void dt_attn_reference_attend_int16(dt_attn_job *job, int32_t ith, int32_t nth) {
    if (job->n_query * job->n_rep <= DT_ATTN_SPAN_ROWS) {
        dt_attn_reference_attend(job, ith, nth);
        return;
    }
    const int32_t n_heads = job->n_lanes * job->n_rep;
    for (int32_t row = ith; row < job->n_query * n_heads; row += nth) {
        const int32_t query = row / n_heads, head = row % n_heads;
        const dt_attn_lane *l = &job->lanes[head / job->n_rep];
        double q[DT_ATTN_MAX_DIM], out[DT_ATTN_MAX_DIM] = {0}, max = -INFINITY, sum = 0.0;
        const float *from = job->q + (size_t)query * job->q_token_stride + (size_t)head * job->q_head_stride;
        const double q_step = query_integers(job, from, q);
        int32_t left = l->n_entries - job->n_query + query + 1;
        for (int32_t span = 0; span < l->n_spans && left > 0; left -= l->spans[span++].n) {
            span_int16(job, &l->spans[span], DT_MIN(left, l->spans[span].n), query, q, q_step, thread_scores(job, ith), &max, &sum,
                       out);
        }
        float *to = job->out + (size_t)query * job->out_token_stride + (size_t)head * job->out_head_stride;
        for (int32_t d = 0; d < job->format->dim_v; d++) {
            to[d] = sum == 0.0 ? 0.0f : (float)(out[d] / sum);
        }
    }
}
