/*
 * Looking at a session: its tokens, logits, numbers, and what each lane keeps. Changes nothing.
 */
#include "engine/session.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

int32_t dt_default_threads(void) { return dt_physical_cores(); }

const dt_model *dt_session_model(const dt_session *session) { return session->model; }

dt_kv *dt_session_kv(dt_session *session) { return session->kv; }

const float *dt_session_logits(const dt_session *session) { return session != NULL ? session->logits : NULL; }

const int32_t *dt_session_tokens(const dt_session *session, size_t *out_n) {
    *out_n = session != NULL ? (size_t)session->n_tokens : 0;
    return session != NULL ? session->tokens : NULL;
}

static uint64_t step_bytes(const dt_session *s) {
    uint64_t bytes = 0;
    for (int32_t i = 0; i < s->model->info.n_layers; i++) {
        const dt_kv_layer_params *layer = dt_kv_layer(s->kv, i);
        const uint64_t entry = dt_kv_group_bytes(&layer->format) / DT_KV_GROUP + dt_kv_value_row_bytes(&layer->format);
        bytes += (uint64_t)(dt_kv_mean_length(s->kv, i) * layer->n_lanes) * entry;
    }
    return bytes;
}

void dt_session_get_stats(const dt_session *session, dt_session_stats *out) {
    if (session == NULL) {
        *out = (dt_session_stats){.kernel = ""};
        return;
    }
    *out = session->stats;
    out->kernel = session->group->kernel_name;
    out->n_tokens = session->n_tokens;
    out->n_ctx = session->max_tokens;
    out->n_threads = session->group->n_threads;
    out->n_batch = session->chunk;
    out->kv_type = session->params.kv_type;
    out->total_cache_size = dt_kv_total_cache_size(session->kv);
    out->kv_bytes = dt_kv_bytes(session->kv);
    out->kv_bytes_peak = atomic_load(&session->kv_memory->memory.bytes_peak);
    out->kv_bytes_full = dt_kv_bytes_for(session->kv, session->n_tokens);
    out->kv_step_bytes = step_bytes(session);
}

static dt_status check_layer(const dt_session *session, int32_t layer, dt_error *error) {
    if (layer < 0 || layer >= session->model->info.n_layers) {
        return dt_fail(error, DT_ERR_ARGUMENT, "layer %d: the model has layers 0 to %d", layer, session->model->info.n_layers - 1);
    }
    return DT_OK;
}

dt_status dt_session_get_layer_stats(const dt_session *session, int32_t layer, dt_layer_stats *out) {
    if (DT_LACKS(NULL, session, out)) {
        return DT_ERR_ARGUMENT;
    }
    const dt_status status = check_layer(session, layer, NULL);
    if (status != DT_OK) {
        return status;
    }
    const dt_kv_layer_params *params = dt_kv_layer(session->kv, layer);
    const dt_budget *budget = &params->budget;
    const bool has_own = budget->policy != NULL && budget->max_cache_size < INT32_MAX && !budget->context_bounds;
    *out = (dt_layer_stats){.policy = budget->policy != NULL ? budget->policy->name : "none",
                            .max_cache_size = has_own ? budget->max_cache_size : 0};
    int64_t n_tokens = 0, n_slots = 0;
    for (int32_t lane = 0; lane < params->n_lanes; lane++) {
        dt_kv_lane_view view;
        dt_kv_lane(session->kv, layer, lane, &view);
        out->length = DT_MAX(out->length, view.n_entries - view.n_slots);
        out->slots_used = DT_MAX(out->slots_used, view.n_slots);
        n_tokens += view.n_entries - view.n_slots;
        n_slots += view.n_slots;
    }
    out->mean_length = (double)n_tokens / params->n_lanes;
    out->mean_slots = (double)n_slots / params->n_lanes;
    return DT_OK;
}

typedef struct kept_entry {
    int32_t position;
    float mass;
} kept_entry;

static int compare_entries(const void *a, const void *b) {
    const int32_t x = ((const kept_entry *)a)->position, y = ((const kept_entry *)b)->position;
    return (x > y) - (x < y);
}

/* What a lane keeps, by position; *out_observed: whether it has masses. *out: free with free(). */
static dt_status sorted_entries(const dt_session *session, int32_t layer, int32_t kv_head, kept_entry **out, size_t *out_n,
                                bool *out_observed, dt_error *error) {
    const dt_status status = check_layer(session, layer, error);
    if (status != DT_OK) {
        return status;
    }
    if (kv_head < 0 || kv_head >= session->model->info.n_kv_heads[layer]) {
        return dt_fail(error, DT_ERR_ARGUMENT, "KV head %d: layer %d has heads 0 to %d", kv_head, layer,
                       session->model->info.n_kv_heads[layer] - 1);
    }
    dt_kv_lane_view view;
    dt_kv_lane(session->kv, layer, kv_head, &view);
    const size_t n = (size_t)view.n_entries;
    kept_entry *entries = malloc(DT_MAX(n, 1) * sizeof *entries);
    int32_t *positions = malloc(DT_MAX(n, 1) * sizeof *positions);
    if (!entries || !positions) {
        free(entries);
        free(positions);
        return dt_fail_memory(error, n * (sizeof *entries + sizeof *positions), "the positions");
    }
    dt_kv_origins(session->kv, layer, kv_head, positions);
    size_t n_tokens = 0;
    for (size_t i = 0; i < n; i++) {
        if (!dt_is_slot(positions[i])) {
            entries[n_tokens++] = (kept_entry){positions[i], view.recent_mass ? view.recent_mass[i] : 0};
        }
    }
    free(positions);
    qsort(entries, n_tokens, sizeof *entries, compare_entries);
    *out_observed = view.recent_mass != NULL;
    *out = entries;
    *out_n = n_tokens;
    return DT_OK;
}

/* Closes up one member of each entry, in place. */
static void *take_column(kept_entry *entries, size_t n, size_t offset) {
    _Static_assert(sizeof(int32_t) == sizeof(float), "columns of one width");
    char *out = (char *)entries;
    for (size_t i = 0; i < n; i++) {
        memmove(out + i * sizeof(int32_t), (const char *)&entries[i] + offset, sizeof(int32_t));
    }
    return out;
}

dt_status dt_session_kept_positions(const dt_session *session, int32_t layer, int32_t kv_head, int32_t **out, size_t *out_n,
                                    dt_error *error) {
    kept_entry *entries = NULL;
    bool is_observed;
    if (DT_LACKS(error, session, out, out_n)) {
        return DT_ERR_ARGUMENT;
    }
    const dt_status status = sorted_entries(session, layer, kv_head, &entries, out_n, &is_observed, error);
    if (status == DT_OK) {
        *out = take_column(entries, *out_n, offsetof(kept_entry, position));
    }
    return status;
}

dt_status dt_session_kept_mass(const dt_session *session, int32_t layer, int32_t kv_head, float **out, size_t *out_n,
                               dt_error *error) {
    kept_entry *entries = NULL;
    bool is_observed;
    if (DT_LACKS(error, session, out, out_n)) {
        return DT_ERR_ARGUMENT;
    }
    const dt_status status = sorted_entries(session, layer, kv_head, &entries, out_n, &is_observed, error);
    if (status != DT_OK) {
        return status;
    }
    if (!is_observed) {
        free(entries);
        return dt_fail(error, DT_ERR_ARGUMENT, "layer %d: its policy observes no attention", layer);
    }
    *out = take_column(entries, *out_n, offsetof(kept_entry, mass));
    return DT_OK;
}

dt_status dt_session_check(const dt_session *session, dt_error *error) {
    return DT_LACKS(error, session) ? DT_ERR_ARGUMENT : dt_kv_check(session->kv, error);
}
