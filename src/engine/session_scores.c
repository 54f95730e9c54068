/*
 * What scores need and no step has left behind: made before a round. Peaks, by having the model repeat its text (reconstruct) or
 * foretold from keys and values (predict); attention mass, where a cache lies on a device that isn't asked after every step.
 *
 * Invariant: a session's tokens, entries and logits stay what they were; nothing but rows of scores changes.
 */
#include "engine/session.h"

#include <stdlib.h>
#include <string.h>

#define PREDICTED_AT_ONCE 64

/* ---- reconstruction ---- */

/* A round is about to need peaks. */
static bool peaks_are_due(const dt_session *s) {
    bool any = false;
    for (int32_t i = 0; i < s->model->info.n_layers; i++) {
        any = any || (dt_kv_layer_needs_peak(s->kv, i) && (s->params.evict == DT_EVICT_HELD || dt_kv_exceeds(s->kv, i, 0)));
    }
    return any;
}

/* Chooses the layers whose peaks come from repetition. */
static bool choose_repeated(dt_session *s) {
    bool any = false;
    for (int32_t i = 0; i < s->model->info.n_layers; i++) {
        s->observe_layer[i] = dt_kv_layer_needs_peak(s->kv, i) && dt_policy_repeats(dt_kv_layer(s->kv, i)->budget.policy);
        any = any || s->observe_layer[i];
    }
    return any;
}

/* What was read since the last time is still there. A fork with other scores, or a file that lacks them, may have lost some of it: then
 * there is nothing to repeat, and no peaks are known. */
static bool is_whole(const dt_session *s) {
    bool whole = true;
    for (int32_t i = 0; i < s->model->info.n_layers; i++) {
        for (int32_t lane = 0; s->observe_layer[i] && lane < s->model->info.n_kv_heads[i]; lane++) {
            dt_kv_lane_view view;
            dt_kv_lane(s->kv, i, lane, &view);
            whole = whole && view.n_entries - view.n_slots >= s->n_tokens - s->peaks_until;
        }
    }
    return whole;
}

static void keep_peaks(dt_session *s, int32_t from, int32_t to) {
    for (int32_t i = 0; i < s->model->info.n_layers; i++) {
        for (int32_t lane = 0; s->observe_layer[i] && lane < s->model->info.n_kv_heads[i]; lane++) {
            dt_kv_lane_view view;
            dt_kv_lane(s->kv, i, lane, &view);
            const float *mass = dt_graph_mass(s->group->graph, 0, i, lane, 0);
            float *peak = view.peak_mass + view.n_entries - (s->n_tokens - from);
            for (int32_t j = 0; j < to - from; j++) {
                peak[j] = DT_MAX(peak[j], mass[j]);
            }
        }
    }
}

/*
 * Has the model repeat what it has read since the last time, and notes for each key the most attention it gets on the way: what is
 * needed to say the text again is what any question about it may need (KVzip, Kim et al. 2025, arXiv 2505.23416). A piece sees of
 * the cache only its own stretch and the first block, so the cost is linear in the text. The repetition leaves no trace but the
 * peaks.
 */
static dt_status reconstruct(dt_session *s, dt_error *error) {
    if (!is_whole(s)) {
        s->peaks_until = s->n_tokens;
    }
    dt_status status = s->logits && s->peaks_until < s->n_tokens ? dt_session_own_logits(s, s->logits, error) : DT_OK;
    while (status == DT_OK && s->peaks_until < s->n_tokens) {
        const int32_t from = s->peaks_until, n = DT_MIN(s->n_tokens - from, DT_MIN(s->params.n_batch, DT_REPEAT_CHUNK));
        dt_sequence sequence = {.tokens = s->tokens + from,
                                .n = n,
                                .first_position = dt_session_next_position(s),
                                .n_outputs = 1,
                                .observe_layer = s->observe_layer,
                                .n_observed = n,
                                .peak = true,
                                .focus_from = s->n_tokens - from,
                                .focus_to = s->n_tokens - from - n};
        const float *logits = NULL;
        status = dt_group_compute_one(s, &sequence, &logits, error);
        dt_kv_commit(s->kv, 0);
        if (status == DT_OK) {
            keep_peaks(s, from, from + n);
            s->peaks_until += n;
        }
    }
    return status;
}

/* ---- prediction ---- */

dt_predict_shape dt_session_predict_shape(const dt_model *model) {
    const dt_hparams *hp = &model->decoder->hp;
    return (dt_predict_shape){
        .dim_k = hp->head_dim_k, .dim_v = hp->head_dim_v, .split = hp->arch->rope_style == DT_ROPE_NEOX ? hp->rope_dim : 0};
}

/* What the threads that foretell have in common. */
typedef struct prediction {
    dt_session *session;
    dt_predict_shape shape;
    bool elsewhere; /* layers whose keys and values are on a device, or the others */
    float *work;    /* [n_threads] of PREDICTED_AT_ONCE keys, then as many values */
    int32_t n_threads;
    atomic_bool failed; /* a device gave nothing */
} prediction;

static size_t work_floats(const dt_predict_shape *shape) {
    return (size_t)PREDICTED_AT_ONCE * (size_t)(shape->dim_k + shape->dim_v);
}

/* The peaks of what was read since the last time, in one lane. */
static bool predict_lane(dt_session *s, const dt_predict_shape *shape, int32_t layer, int32_t lane, float *work) {
    const dt_budget own = dt_budget_of_lane(&dt_kv_layer(s->kv, layer)->budget, lane);
    float features[2 * DT_MAX_HEAD_DIM], *keys = work, *values = work + PREDICTED_AT_ONCE * shape->dim_k;
    dt_kv_lane_view view;
    dt_kv_lane(s->kv, layer, lane, &view);
    for (int32_t first = DT_MAX(view.n_entries - (s->n_tokens - s->peaks_until), 0); first < view.n_entries;
         first += PREDICTED_AT_ONCE) {
        const int32_t n = DT_MIN(PREDICTED_AT_ONCE, view.n_entries - first);
        if (!dt_kv_get_entries(s->kv, layer, lane, first, n, keys, values)) {
            return false;
        }
        for (int32_t j = 0; j < n; j++) {
            dt_predict_features(shape, keys + (int64_t)j * shape->dim_k, values + (int64_t)j * shape->dim_v, features);
            view.peak_mass[first + j] = dt_predict_peak(shape, own.weights, features);
        }
    }
    return true;
}

static bool foretells(const dt_session *s, int32_t layer) {
    return dt_kv_layer_needs_peak(s->kv, layer) && dt_budget_needs_weights(&dt_kv_layer(s->kv, layer)->budget);
}

/* A thread's lanes. */
static void predict_lanes(void *user, int ith, int nth) {
    prediction *p = user;
    const int32_t n_threads = DT_MIN(nth, p->n_threads);
    int32_t turn = 0;
    for (int32_t i = 0; ith < n_threads && i < p->session->model->info.n_layers; i++) {
        const bool has_part = foretells(p->session, i) && dt_kv_layer(p->session->kv, i)->format.elsewhere == p->elsewhere;
        for (int32_t lane = 0; has_part && lane < p->session->model->info.n_kv_heads[i]; lane++) {
            float *work = p->work + (size_t)ith * work_floats(&p->shape);
            if (turn++ % n_threads == ith && !predict_lane(p->session, &p->shape, i, lane, work)) {
                atomic_store(&p->failed, true);
            }
        }
    }
}

/* In all layers that foretell them; of a device, whose work is its own, the calling thread asks. */
static dt_status predict_peaks(dt_session *s, dt_error *error) {
    bool any = false;
    for (int32_t i = 0; i < s->model->info.n_layers; i++) {
        any = any || foretells(s, i);
    }
    if (!any) {
        return DT_OK;
    }
    const dt_workers workers = dt_graph_workers(s->group->graph);
    prediction p = {.session = s, .shape = dt_session_predict_shape(s->model), .n_threads = workers.n_most};
    const size_t bytes = (size_t)p.n_threads * work_floats(&p.shape) * sizeof(float);
    p.work = malloc(bytes);
    if (p.work == NULL) {
        return dt_fail_memory(error, bytes, "foretelling what will be attended to");
    }
    dt_workers_run(&workers, predict_lanes, &p);
    p.elsewhere = true;
    predict_lanes(&p, 0, 1);
    free(p.work);
    return !atomic_load(&p.failed)
               ? DT_OK
               : dt_fail(error, DT_ERR_COMPUTE, "the device did not give keys and values for the score \"predict\"");
}

dt_status dt_session_make_peaks(dt_session *s, dt_error *error) {
    if (!peaks_are_due(s)) {
        return DT_OK;
    }
    const dt_status status = predict_peaks(s, error);
    if (status != DT_OK) {
        return status;
    }
    if (choose_repeated(s)) {
        return reconstruct(s, error);
    }
    s->peaks_until = s->n_tokens;
    return DT_OK;
}

/* ---- caches on devices ---- */

dt_status dt_session_observe_elsewhere(dt_session *s, bool all, dt_error *error) {
    for (int32_t i = 0; i < s->model->info.n_layers; i++) {
        const bool is_due = all ? dt_kv_length(s->kv, i) > 0 : dt_kv_exceeds(s->kv, i, 0);
        if (!dt_kv_layer(s->kv, i)->format.elsewhere || !dt_kv_layer_needs_mass(s->kv, i) || !is_due) {
            continue;
        }
        dt_observed observed;
        const dt_status status = dt_graph_observe(s->group->graph, s->kv, i, s->n_tokens, &observed, error);
        if (status != DT_OK) {
            return status;
        }
        for (int32_t lane = 0; lane < s->model->info.n_kv_heads[i]; lane++) {
            dt_kv_lane_view view;
            dt_kv_lane(s->kv, i, lane, &view);
            const size_t at = (size_t)lane * observed.stride;
            for (int32_t e = 0; e < view.n_entries; e++) { /* a model that overflowed must not break the cache's own sums */
                view.value_norm[e] = dt_is_finite(observed.norms[at + (size_t)e]) ? observed.norms[at + (size_t)e] : 0;
            }
            dt_mass_fold(view.recent_mass, observed.mass + at, view.n_entries, observed.n_queries);
        }
    }
    return DT_OK;
}
