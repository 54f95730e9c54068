/*
 * Saving a session. The file is written section by section, checksums on the way, and takes its place only when all of it is on
 * the disk. Reads the session, changes nothing. See session_file.h for the layout.
 */
#include "base/hash.h"
#include "base/replace_file.h"
#include "engine/session.h"
#include "engine/session_file.h"

#include <stdlib.h>
#include <string.h>

#define CHUNK_ENTRIES 256

typedef struct writer {
    dt_replace_file *file;
    dt_hash hash; /* of the section's payload */
    dt_error *error;
    dt_status status; /* the first failure; later calls do nothing */
    uint64_t n_bytes;
} writer;

static void put(writer *w, const void *bytes, size_t n) {
    if (w->status == DT_OK && n > 0) {
        w->status = dt_replace_write(w->file, bytes, n, w->error);
        dt_hash_add(&w->hash, bytes, n);
        w->n_bytes += n;
    }
}

static void begin_section(writer *w, const char *tag, int32_t layer, int32_t lane, uint64_t payload_bytes) {
    dt_session_section section = {.layer = (uint32_t)layer, .lane = (uint32_t)lane, .payload_bytes = payload_bytes};
    memcpy(section.tag, tag, sizeof section.tag);
    section.checksum = dt_hash_of(&section, offsetof(dt_session_section, checksum));
    put(w, &section, sizeof section);
    dt_hash_begin(&w->hash);
}

static void end_section(writer *w) {
    static const char zeros[8];
    put(w, zeros, (size_t)(-w->n_bytes % 8));
    const uint64_t checksum = dt_hash_end(&w->hash);
    put(w, &checksum, sizeof checksum);
}

static void put_section(writer *w, const char *tag, const void *bytes, size_t n) {
    begin_section(w, tag, 0, 0, n);
    put(w, bytes, n);
    end_section(w);
}

static uint32_t flags_of(const dt_kv_lane_view *view) {
    return (view->recent_mass != NULL ? DT_SESSION_LANE_MASS : 0) | (view->peak_mass != NULL ? DT_SESSION_LANE_PEAK : 0) |
           (view->bias != NULL ? DT_SESSION_LANE_BIAS : 0) | (view->origin != NULL ? DT_SESSION_LANE_ORIGINS : 0);
}

static bool has_column(const dt_kv_lane_view *view, int column) { return (dt_session_column_flag(column) & ~flags_of(view)) == 0; }

static uint64_t lane_bytes(const dt_kv_format *format, const dt_kv_lane_view *view) {
    uint64_t bytes = sizeof(dt_session_lane);
    for (int c = 0; c < DT_KV_N_COLUMNS; c++) {
        bytes += has_column(view, c) ? (uint64_t)view->n_entries * dt_kv_column_bytes(format, (dt_kv_column)c) : 0;
    }
    return bytes;
}

static void put_lane(writer *w, const dt_kv *kv, int32_t layer, int32_t lane, void *buffer) {
    const dt_kv_format *format = &dt_kv_layer(kv, layer)->format;
    dt_kv_lane_view view;
    dt_kv_lane(kv, layer, lane, &view);
    const dt_session_lane head = {.n_entries = (uint32_t)view.n_entries, .flags = flags_of(&view)};
    begin_section(w, "LANE", layer, lane, lane_bytes(format, &view));
    put(w, &head, sizeof head);
    for (int c = 0; c < DT_KV_N_COLUMNS; c++) {
        const size_t bytes = dt_kv_column_bytes(format, (dt_kv_column)c);
        for (int32_t i = 0; bytes > 0 && has_column(&view, c) && i < view.n_entries; i += CHUNK_ENTRIES) {
            const int32_t n = DT_MIN(view.n_entries - i, CHUNK_ENTRIES);
            if (w->status == DT_OK && !dt_kv_get_column(kv, layer, lane, (dt_kv_column)c, i, n, buffer)) {
                w->status =
                    dt_fail(w->error, DT_ERR_COMPUTE, "the device did not give back the keys and values of layer %d", layer);
            }
            put(w, buffer, (size_t)n * bytes);
        }
    }
    end_section(w);
}

static dt_session_header make_header(const dt_session *s) {
    const dt_kv_format *format = &dt_kv_layer(s->kv, 0)->format;
    const dt_model_info *info = &s->model->info;
    dt_session_header h = {.version = DT_SESSION_VERSION,
                           .header_bytes = sizeof h,
                           .fingerprint = s->model->fingerprint,
                           .n_layers = (uint32_t)info->n_layers,
                           .n_vocab = (uint32_t)info->n_vocab,
                           .dim_k = (uint32_t)format->dim_k,
                           .dim_v = (uint32_t)format->dim_v,
                           .type_k = format->type_k == DT_KV_F16 ? 1 : 2,
                           .type_v = format->type_v == DT_KV_F16 ? 1 : 2,
                           .n_tokens = (uint32_t)s->n_tokens,
                           .whole_from = (uint32_t)s->whole_from,
                           .newest_dropped = dt_kv_newest_dropped(s->kv),
                           .peaks_until = (uint32_t)s->peaks_until,
                           .shift = (uint32_t)dt_kv_shift(s->kv)};
    memcpy(h.magic, DT_SESSION_MAGIC, sizeof h.magic);
    memcpy(h.model_name, info->name, DT_MIN(strlen(info->name), sizeof h.model_name - 1));
    return h;
}

static void put_all(writer *w, const dt_session *s, const dt_sampler *sampler, void *buffer) {
    const dt_model_info *info = &s->model->info;
    dt_session_header header = make_header(s);
    put(w, &header, sizeof header); /* its size and checksum follow at the end */
    put_section(w, "TOKS", s->tokens, (size_t)s->n_tokens * sizeof *s->tokens);
    put_section(w, "LOGT", s->logits, s->logits != NULL ? (size_t)info->n_vocab * sizeof *s->logits : 0);
    dt_session_sampler state = {0};
    if (sampler != NULL) {
        const dt_sampler_state now = dt_sampler_get_state(sampler);
        state.seed = now.seed;
        state.n_draws = now.n_draws;
    }
    put_section(w, "SMPL", &state, sampler != NULL && state.n_draws <= DT_SESSION_DRAWS_MAX ? sizeof state : 0);
    put_section(w, "NOTE", s->note, s->note_bytes);
    for (int32_t layer = 0; layer < info->n_layers; layer++) {
        for (int32_t lane = 0; lane < info->n_kv_heads[layer]; lane++) {
            put_lane(w, s->kv, layer, lane, buffer);
        }
    }
    put_section(w, "END ", NULL, 0);
    if (w->status == DT_OK) {
        header.file_bytes = w->n_bytes;
        header.checksum = dt_hash_of(&header, offsetof(dt_session_header, checksum));
        w->status = dt_replace_patch(w->file, 0, &header, sizeof header, w->error);
    }
}

dt_status dt_session_save(const dt_session *session, const dt_sampler *sampler, const char *path, dt_error *error) {
    if (DT_LACKS(error, session, path)) {
        return DT_ERR_ARGUMENT;
    }
    const dt_status idle = dt_session_check_idle(session, error);
    if (idle != DT_OK) {
        return idle;
    }
    const dt_kv_format *format = &dt_kv_layer(session->kv, 0)->format;
    const size_t row_bytes = DT_MAX(dt_kv_column_bytes(format, DT_KV_KEYS), dt_kv_column_bytes(format, DT_KV_VALUES));
    void *buffer = malloc(CHUNK_ENTRIES * DT_MAX(row_bytes, sizeof(float)));
    if (buffer == NULL) {
        return dt_fail_memory(error, CHUNK_ENTRIES * row_bytes, "saving the session");
    }
    writer w = {.error = error};
    w.status = dt_replace_begin(path, &w.file, error);
    if (w.status == DT_OK) {
        put_all(&w, session, sampler, buffer);
        if (w.status == DT_OK) {
            w.status = dt_replace_commit(w.file, error);
        } else {
            dt_replace_abandon(w.file);
        }
    }
    free(buffer);
    return w.status;
}

dt_status dt_session_check_save(const dt_session *session, const char *path, int64_t n_tokens, dt_error *error) {
    if (DT_LACKS(error, path)) {
        return DT_ERR_ARGUMENT;
    }
    if (session == NULL) {
        return dt_replace_check(path, 0, error);
    }
    if (n_tokens < 0) {
        return dt_fail(error, DT_ERR_ARGUMENT, "a conversation of %lld tokens can't be", (long long)n_tokens);
    }
    n_tokens = DT_MIN(n_tokens, (int64_t)1 << 40); /* more fits no disk either, and the sum below stays one */
    const dt_model_info *info = &session->model->info;
    const int32_t total = dt_kv_total_cache_size(session->kv), n_sharing = dt_kv_layers_that_evict(session->kv);
    uint64_t bytes = sizeof(dt_session_header) + (uint64_t)n_tokens * sizeof(int32_t) + (uint64_t)info->n_vocab * sizeof(float);
    for (int32_t layer = 0; layer < info->n_layers; layer++) {
        const dt_kv_layer_params *params = dt_kv_layer(session->kv, layer);
        uint64_t entry_bytes = 0, n = (uint64_t)n_tokens;
        for (int c = 0; c < DT_KV_N_COLUMNS; c++) {
            const bool is_wanted = (dt_session_column_flag(c) & ~dt_session_layer_flags(session->kv, layer)) == 0;
            if (is_wanted && (c != DT_KV_BIAS || params->budget.memory_slots > 0)) {
                entry_bytes += dt_kv_column_bytes(&params->format, (dt_kv_column)c);
            }
        }
        if (params->budget.policy != NULL) {
            const int32_t max = total > 0 ? total / n_sharing + 1 : params->budget.max_cache_size;
            n = DT_MIN(n, (uint64_t)DT_MIN(max, params->budget.max_cache_size) + (uint64_t)params->budget.memory_slots);
        }
        bytes += (uint64_t)params->n_lanes * (n * entry_bytes + sizeof(dt_session_section) + 16);
    }
    return dt_replace_check(path, bytes, error);
}

/* ---- the application's note ---- */

dt_status dt_session_set_note(dt_session *session, const void *bytes, size_t n, dt_error *error) {
    if (DT_LACKS(error, session) || (n > 0 && DT_LACKS(error, bytes))) {
        return DT_ERR_ARGUMENT;
    }
    void *copy = n > 0 ? malloc(n) : NULL;
    if (n > 0 && copy == NULL) {
        return dt_fail_memory(error, n, "the session's note");
    }
    if (n > 0) {
        memcpy(copy, bytes, n);
    }
    free(session->note);
    session->note = copy;
    session->note_bytes = n;
    return DT_OK;
}

const void *dt_session_note(const dt_session *session, size_t *out_n) {
    *out_n = session != NULL ? session->note_bytes : 0;
    return session != NULL ? session->note : NULL;
}
