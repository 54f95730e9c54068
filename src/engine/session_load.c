/*
 * Loading a session. The file is mapped; each section is checked against its checksum right before it is used, so that the bytes
 * are read from the disk once. Lanes, which are nearly all of it, are shared out between the group's threads. Everything goes into a
 * cache beside the live one and takes its place at the end.
 *
 * Invariants: a failure leaves the session as it was; nothing is believed because the checksum fits: sizes, tokens, positions and
 * numbers are checked as those of a hostile file.
 */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#include "base/file_map.h"
#include "base/hash.h"
#include "engine/kv_plan.h"
#include "engine/session.h"
#include "engine/session_file.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* What was read, until it replaces the live state. */
typedef struct loaded {
    int32_t *tokens; /* in the mapping */
    const float *logits;
    const void *note;
    size_t note_bytes;
    dt_session_sampler sampler;
    bool has_sampler, has_logits;
    dt_kv *kv;
} loaded;

typedef struct reader {
    const dt_session *session;
    const char *path;
    dt_file_map *map;
    const char *bytes; /* of the mapping */
    uint64_t n_bytes, at;
    dt_session_header header;
    dt_error *error;
    dt_kv_type type;  /* of the file's keys and values; not the session's where that gave way to its kv_memory */
    bool lacks_peaks; /* the session wants them, and the file has none */
    uint64_t most;    /* bytes that a cache with the file's lanes takes at most, where that is more than was planned; else 0 */
} reader;

static dt_status damaged(const reader *r, const char *what) {
    if (r->map != NULL && dt_file_map_broken(r->map)) {
        return dt_fail(r->error, DT_ERR_IO, "%s became shorter while it was read; restore a copy", r->path);
    }
    return dt_fail(r->error, DT_ERR_FORMAT, "%s is damaged (%s); delete it to start anew, or restore a copy", r->path, what);
}

static dt_status cut_short(const reader *r, uint64_t wanted) {
    if (r->map != NULL && dt_file_map_broken(r->map)) {
        return damaged(r, "it is cut short now");
    }
    return dt_fail(r->error, DT_ERR_FORMAT,
                   "%s was cut short: it has %llu of %llu bytes; delete it to start anew, or restore a copy", r->path,
                   (unsigned long long)r->n_bytes, (unsigned long long)wanted);
}

/* ---- header ---- */

static const char *type_name(uint32_t type) { return type == 1 ? "f16" : type == 2 ? "int8" : "unknown"; }

/* Is it a session file of this version, whole in length, with a header that nobody altered? */
static dt_status read_header(reader *r) {
    dt_session_header *h = &r->header;
    if (r->n_bytes < sizeof h->magic || memcmp(r->bytes, DT_SESSION_MAGIC, sizeof h->magic) != 0) {
        return dt_fail(r->error, DT_ERR_FORMAT, "%s is %s; name another file, or delete it to start anew", r->path,
                       r->n_bytes == 0 ? "empty" : "no session file");
    }
    if (r->n_bytes < sizeof *h) {
        return cut_short(r, sizeof *h);
    }
    memcpy(h, r->bytes, sizeof *h);
    if (h->version != DT_SESSION_VERSION) {
        return dt_fail(r->error, DT_ERR_ARGUMENT,
                       "%s has version %u of the session format, and this program reads version %u; name another file, or delete "
                       "it to start anew",
                       r->path, h->version, DT_SESSION_VERSION);
    }
    if (h->checksum != dt_hash_of(h, offsetof(dt_session_header, checksum)) || h->header_bytes != sizeof *h) {
        return damaged(r, "the header's checksum does not fit");
    }
    if (r->n_bytes < h->file_bytes) {
        return cut_short(r, h->file_bytes);
    }
    return r->n_bytes == h->file_bytes ? DT_OK : damaged(r, "there are bytes behind its end");
}

int64_t dt_session_file_tokens(const char *path) {
    dt_session_header header = {.version = 0};
    const int file = path != NULL ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    const bool whole = file >= 0 && read(file, &header, sizeof header) == (ssize_t)sizeof header;
    if (file >= 0) {
        close(file);
    }
    const bool good = whole && memcmp(header.magic, DT_SESSION_MAGIC, sizeof header.magic) == 0 &&
                      header.version == DT_SESSION_VERSION &&
                      header.checksum == dt_hash_of(&header, offsetof(dt_session_header, checksum));
    return good ? header.n_tokens : 0;
}

static dt_status too_long(const reader *r) {
    return dt_fail(r->error, DT_ERR_ARGUMENT,
                   "%s holds a conversation of %u tokens, longer than the context of %d; give a larger -c, or name another file",
                   r->path, r->header.n_tokens, r->session->params.n_ctx);
}

/* Does it belong to this model, and does it fit this session? */
static dt_status check_header(reader *r) {
    const dt_session_header *h = &r->header;
    const dt_session *s = r->session;
    const dt_kv_format *format = &dt_kv_layer(s->kv, 0)->format;
    const uint32_t type_k = format->type_k == DT_KV_F16 ? 1 : 2;
    if (h->fingerprint != s->model->fingerprint || h->n_layers != (uint32_t)s->model->info.n_layers ||
        h->n_vocab != (uint32_t)s->model->info.n_vocab || h->dim_k != (uint32_t)format->dim_k ||
        h->dim_v != (uint32_t)format->dim_v) {
        const int n = h->model_name[0] != 0 ? (int)sizeof h->model_name : 0;
        return dt_fail(r->error, DT_ERR_ARGUMENT,
                       "%s belongs to another model%s%.*s (the files differ, if only in a conversion); name another session file",
                       r->path, n > 0 ? ": " : "", n, h->model_name);
    }
    const bool has_type = h->type_k == type_k && h->type_v == type_k;
    const bool gave_way = h->type_k == 1 && h->type_v == 1 && s->params.kv_type != s->asked.kv_type; /* check_limit tells */
    if (!has_type && !gave_way) {
        return dt_fail(r->error, DT_ERR_ARGUMENT, "%s holds keys and values as %s, and this run's cache is %s; give --kv-type %s",
                       r->path, type_name(h->type_k), type_name(type_k), type_name(h->type_k));
    }
    if (h->shift > h->n_tokens || (h->shift > 0 && h->whole_from < h->shift) || h->reserved != 0) {
        return damaged(r, "its header contradicts itself");
    }
    if (s->headroom > 0 ? h->n_tokens > (uint32_t)s->max_tokens : h->n_tokens - h->shift > (uint32_t)s->params.n_ctx) {
        return too_long(r);
    }
    if (h->whole_from > h->n_tokens || h->peaks_until > h->n_tokens || h->newest_dropped < -1 ||
        h->newest_dropped >= (int32_t)DT_MAX(h->n_tokens - h->shift, 1u)) {
        return damaged(r, "its header contradicts itself");
    }
    r->type = h->type_k == 1 ? DT_KV_F16 : DT_KV_INT8;
    return DT_OK;
}

/* ---- sections ---- */

typedef struct section_payload {
    const char *bytes; /* in the mapping */
    uint64_t n_bytes;  /* without padding */
    uint64_t checksum; /* that it should have */
} section_payload;

/* Hashes all of it. */
static bool is_whole(const section_payload *p) {
    return p->checksum == dt_hash_of(p->bytes, (size_t)DT_ROUND_UP(p->n_bytes, (uint64_t)8));
}

/* The payload of the next section, which must be `tag`; only the checksum of its head has been compared. */
static dt_status find_section(reader *r, const char *tag, int32_t layer, int32_t lane, section_payload *out) {
    dt_session_section section;
    *out = (section_payload){.bytes = NULL};
    if (r->n_bytes - r->at < sizeof section) {
        return damaged(r, "a section is missing");
    }
    memcpy(&section, r->bytes + r->at, sizeof section);
    if (section.checksum != dt_hash_of(&section, offsetof(dt_session_section, checksum)) ||
        memcmp(section.tag, tag, sizeof section.tag) != 0 || section.layer != (uint32_t)layer || section.lane != (uint32_t)lane ||
        section.reserved != 0) {
        return damaged(r, "the head of a section is not what it should be");
    }
    r->at += sizeof section;
    const uint64_t left = r->n_bytes - r->at;
    if (section.payload_bytes > left || DT_ROUND_UP(section.payload_bytes, (uint64_t)8) + 8 > left) {
        return damaged(r, "a section does not fit into the file");
    }
    const uint64_t padded = DT_ROUND_UP(section.payload_bytes, (uint64_t)8);
    *out = (section_payload){.bytes = r->bytes + r->at, .n_bytes = section.payload_bytes};
    memcpy(&out->checksum, r->bytes + r->at + padded, sizeof out->checksum);
    r->at += padded + sizeof out->checksum;
    return DT_OK;
}

/* The same with the payload's checksum compared. */
static dt_status next_section(reader *r, const char *tag, int32_t layer, int32_t lane, const char **out, uint64_t *out_bytes) {
    section_payload p;
    const dt_status status = find_section(r, tag, layer, lane, &p);
    *out = p.bytes;
    *out_bytes = p.n_bytes;
    if (status == DT_OK && !is_whole(&p)) {
        char what[64];
        dt_error line = {0};
        dt_fail(&line, DT_OK, "the checksum of section %s does not fit", tag);
        memcpy(what, line.message, sizeof what - 1);
        what[sizeof what - 1] = 0;
        return damaged(r, what);
    }
    return status;
}

static dt_status read_tokens(reader *r, loaded *l) {
    const char *payload;
    uint64_t n;
    const dt_status status = next_section(r, "TOKS", 0, 0, &payload, &n);
    if (status != DT_OK) {
        return status;
    }
    if (n != (uint64_t)r->header.n_tokens * sizeof(int32_t)) {
        return damaged(r, "it has another number of tokens than its header says");
    }
    assert(payload != NULL);
    l->tokens = (int32_t *)(uintptr_t)payload;
    for (uint32_t i = 0; i < r->header.n_tokens; i++) {
        if (l->tokens[i] < 0 || l->tokens[i] >= r->session->model->info.n_vocab) {
            return damaged(r, "a token is not in the vocabulary");
        }
    }
    return DT_OK;
}

static dt_status read_logits(reader *r, loaded *l) {
    const char *payload;
    uint64_t n;
    const dt_status status = next_section(r, "LOGT", 0, 0, &payload, &n);
    if (status != DT_OK) {
        return status;
    }
    l->has_logits = n > 0;
    l->logits = (const float *)(const void *)payload;
    return n == 0 || n == (uint64_t)r->header.n_vocab * sizeof(float) ? DT_OK : damaged(r, "the logits have a wrong size");
}

static dt_status read_small_sections(reader *r, loaded *l) {
    const char *payload;
    uint64_t n;
    dt_status status = next_section(r, "SMPL", 0, 0, &payload, &n);
    if (status == DT_OK && n > 0) {
        if (n != sizeof l->sampler) {
            return damaged(r, "the sampler's state has a wrong size");
        }
        memcpy(&l->sampler, payload, sizeof l->sampler);
        if (l->sampler.n_draws > DT_SESSION_DRAWS_MAX) {
            return damaged(r, "the sampler's state makes no sense");
        }
        l->has_sampler = true;
    }
    if (status == DT_OK) {
        status = next_section(r, "NOTE", 0, 0, (const char **)&l->note, &n);
        l->note_bytes = (size_t)n;
    }
    return status;
}

/* ---- lanes ---- */

typedef struct lane_part {
    int32_t layer, lane;
    section_payload payload;
    dt_session_lane head;
    const char *wrong; /* NULL: nothing */
} lane_part;

typedef struct lane_parts {
    dt_kv *kv;
    lane_part *parts;
    int32_t n;
} lane_parts;

static bool is_in_file(const dt_session_lane *head, int column) { return (dt_session_column_flag(column) & ~head->flags) == 0; }

static uint64_t column_bytes(const dt_kv *kv, const lane_part *part, int column) {
    const dt_kv_format *format = &dt_kv_layer(kv, part->layer)->format;
    return is_in_file(&part->head, column) ? (uint64_t)part->head.n_entries * dt_kv_column_bytes(format, (dt_kv_column)column) : 0;
}

/* The cache may want masses that the file has not, or the other way round. */
static bool is_wanted(const dt_kv *kv, int32_t layer, int column) {
    return (dt_session_column_flag(column) & ~dt_session_layer_flags(kv, layer)) == 0;
}

/* Finds the lane. Its content is still to be checked: only sizes are believed, and those fit each other. */
static dt_status find_lane(reader *r, const dt_kv *kv, lane_part *part) {
    dt_status status = find_section(r, "LANE", part->layer, part->lane, &part->payload);
    if (status != DT_OK) {
        return status;
    }
    if (part->payload.n_bytes < sizeof part->head) {
        return damaged(r, "a lane is too short");
    }
    memcpy(&part->head, part->payload.bytes, sizeof part->head);
    const uint32_t known = DT_SESSION_LANE_MASS | DT_SESSION_LANE_BIAS | DT_SESSION_LANE_PEAK | DT_SESSION_LANE_ORIGINS;
    if (part->head.n_entries > r->header.n_tokens || (part->head.flags & ~known) != 0) {
        return damaged(r, "a lane has more entries than there are tokens");
    }
    uint64_t bytes = sizeof part->head;
    for (int c = 0; c < DT_KV_N_COLUMNS; c++) {
        bytes += column_bytes(kv, part, c);
    }
    if (bytes != part->payload.n_bytes) {
        return damaged(r, "a lane has another size than its entries");
    }
    const bool wants_peak = dt_kv_layer_needs_peak(kv, part->layer), has_peak = is_in_file(&part->head, DT_KV_PEAK_MASS);
    if (wants_peak && has_peak && part->head.n_entries < r->header.n_tokens - r->header.peaks_until) {
        return damaged(r, "tokens that are still to be repeated are missing");
    }
    r->lacks_peaks = r->lacks_peaks || (wants_peak && !has_peak);
    return DT_OK;
}

/* As the file has them: what it says is still to be checked. */
static int32_t count_slots(const lane_part *part) {
    const char *positions = part->payload.bytes + sizeof part->head; /* the first column */
    int32_t n = 0;
    for (uint32_t i = 0; i < part->head.n_entries; i++) {
        int32_t position;
        memcpy(&position, positions + (size_t)i * sizeof position, sizeof position);
        n += dt_is_slot(position);
    }
    return n;
}

/* Settings were fitted into the memory for a conversation that begins here; one that is longer already shows only now. */
static dt_status check_limit(reader *r, const lane_parts *all) {
    const dt_session *s = r->session;
    const int64_t n_tokens = r->header.n_tokens, n_expected = s->params.n_expected;
    assert(all->n > 0);
    int32_t *entries = malloc((size_t)all->n * sizeof *entries);
    dt_kv_held held = {
        .kv = all->kv, .entries = entries, .to_come = n_expected > 0 ? DT_MAX(n_expected - n_tokens, (int64_t)0) : -1};
    for (int32_t i = 0; entries != NULL && i < all->n; i++) {
        entries[i] = (int32_t)all->parts[i].head.n_entries;
        held.has_bias = held.has_bias || is_in_file(&all->parts[i].head, DT_KV_BIAS);
        held.most_slots = DT_MAX(held.most_slots, held.has_bias ? count_slots(&all->parts[i]) : 0);
    }
    r->most = entries != NULL ? dt_kv_plan_excess(s, &held) : UINT64_MAX;
    const bool same_type = r->type == s->params.kv_type;
    const bool fits = r->most != UINT64_MAX && same_type && (s->params.kv_memory == 0 || r->most <= s->params.kv_memory);
    const uint64_t needed = same_type ? r->most : DT_MAX(r->most, s->params.kv_memory + 1);
    /* under any limit that gives these budgets back */
    const bool never = n_tokens - r->header.shift > s->params.n_ctx && !dt_session_passes_context(s, s->asked.budgets);
    const uint64_t works = fits || never || r->most == UINT64_MAX ? 0 : dt_kv_plan_limit(s, &held, needed);
    free(entries);
    if (fits || never) {
        return fits ? DT_OK : too_long(r);
    }
    if (r->most == UINT64_MAX || works == UINT64_MAX) {
        return dt_fail_memory(r->error, (size_t)all->n * sizeof *entries, "loading the session");
    }
    if (!same_type) {
        return dt_fail(
            r->error, DT_ERR_LIMIT,
            "%s holds keys and values as %s, and under these settings %s leave room for %s only: give --kv-memory %lluK or "
            "more%s",
            r->path, type_name(r->header.type_k), dt_size_of(s->params.kv_memory).text, type_name(r->type == DT_KV_F16 ? 2 : 1),
            (unsigned long long)works / 1024,
            dt_budgets_that_evict(s->asked.budgets, s->model->info.n_layers) > 0 ? ", or smaller budgets" : "");
    }
    return dt_fail(r->error, DT_ERR_LIMIT,
                   "%s is too little for what %s holds, which is loaded whole before anything is evicted: give "
                   "--kv-memory %lluK or more%s",
                   dt_size_of(s->params.kv_memory).text, r->path, (unsigned long long)works / 1024,
                   s->params.kv_type != s->asked.kv_type ? ", and --kv-type int8, which it is kept in" : "");
}

/* Checks the lane and puts its columns, in file order, into the cache. */
static const char *read_lane(dt_kv *kv, const lane_part *part) {
    if (!is_whole(&part->payload)) {
        return "the checksum of section LANE does not fit";
    }
    const char *at = part->payload.bytes + sizeof part->head, *columns[DT_KV_N_COLUMNS] = {0};
    for (int c = 0; c < DT_KV_N_COLUMNS; c++) {
        const uint64_t bytes = column_bytes(kv, part, c);
        const char *scales = c == DT_KV_KEYS ? columns[DT_KV_K_SCALES] : c == DT_KV_VALUES ? columns[DT_KV_V_SCALES] : NULL;
        columns[c] = bytes > 0 ? at : NULL;
        if (bytes > 0 && is_wanted(kv, part->layer, c) &&
            !dt_kv_put_column(kv, part->layer, part->lane, (dt_kv_column)c, at, scales)) {
            return "a key or a value is not a number";
        }
        at += bytes;
    }
    if (dt_kv_layer_needs_mass(kv, part->layer) && !is_in_file(&part->head, DT_KV_RECENT_MASS)) {
        dt_kv_make_norms(kv, part->layer, part->lane);
    }
    return NULL;
}

/* A thread's lanes. */
static void read_some(void *user, int ith, int nth) {
    const lane_parts *all = user;
    for (int32_t i = ith; i < all->n; i += nth) {
        all->parts[i].wrong = read_lane(all->kv, &all->parts[i]);
    }
}

static dt_status read_parts(reader *r, lane_parts *all) {
    const dt_model_info *info = &r->session->model->info;
    dt_status status = DT_OK;
    for (int32_t layer = 0; layer < info->n_layers; layer++) {
        for (int32_t lane = 0; lane < info->n_kv_heads[layer] && status == DT_OK; lane++) {
            lane_part *part = &all->parts[all->n++];
            *part = (lane_part){.layer = layer, .lane = lane};
            status = find_lane(r, all->kv, part);
        }
    }
    if (status == DT_OK) {
        status = check_limit(r, all);
    }
    for (int32_t i = 0; i < all->n && status == DT_OK; i++) {
        const lane_part *part = &all->parts[i];
        status = dt_kv_restore_lane(all->kv, part->layer, part->lane, (int32_t)part->head.n_entries,
                                    is_in_file(&part->head, DT_KV_BIAS), r->error);
    }
    if (status != DT_OK) {
        return status;
    }
    if (dt_kv_get_home(all->kv) != NULL) { /* a device takes them one by one */
        read_some(all, 0, 1);
    } else {
        const dt_workers workers = dt_graph_workers(r->session->group->graph);
        dt_workers_run(&workers, read_some, all);
    }
    for (int32_t i = 0; i < all->n; i++) {
        if (all->parts[i].wrong != NULL) {
            return damaged(r, all->parts[i].wrong);
        }
    }
    return DT_OK;
}

static dt_status read_lanes(reader *r, loaded *l) {
    const dt_model_info *info = &r->session->model->info;
    size_t n_lanes = 0;
    for (int32_t layer = 0; layer < info->n_layers; layer++) {
        n_lanes += (size_t)info->n_kv_heads[layer];
    }
    assert(n_lanes > 0);
    lane_parts all = {.parts = malloc(n_lanes * sizeof *all.parts)};
    if (all.parts == NULL) {
        return dt_fail_memory(r->error, n_lanes * sizeof *all.parts, "loading the session");
    }
    const dt_kv *kv = r->session->kv;
    dt_status status = r->type == r->session->params.kv_type ? dt_kv_new_like(kv, &l->kv, r->error)
                                                             : dt_kv_new_of_type(kv, r->type, &l->kv, r->error);
    all.kv = l->kv;
    status = status == DT_OK ? read_parts(r, &all) : status;
    free(all.parts);
    const char *payload = NULL;
    uint64_t n = 0;
    if (status == DT_OK) {
        status = next_section(r, "END ", 0, 0, &payload, &n);
    }
    if (status == DT_OK && r->at != r->n_bytes) {
        status = damaged(r, "there are bytes behind its end");
    }
    if (status == DT_OK) {
        dt_kv_restore_end(l->kv, (int32_t)(r->header.n_tokens - r->header.shift), r->header.newest_dropped,
                          (int32_t)r->header.shift);
        dt_error found = {0};
        if (dt_kv_check(l->kv, &found) == DT_ERR_INTERNAL) { /* a bad position or score */
            found.message[200] = 0;
            status = damaged(r, found.message);
        }
    }
    return status;
}

/* ---- taking over ---- */

/* Everything that can fail first; then the live state is replaced. */
static dt_status take_over(dt_session *s, reader *r, loaded *l, dt_sampler *sampler) {
    const int32_t n_tokens = (int32_t)r->header.n_tokens;
    const size_t logit_bytes = (size_t)r->header.n_vocab * sizeof(float);
    const size_t token_bytes = (size_t)n_tokens * sizeof *l->tokens;
    float *logits = l->has_logits ? malloc(logit_bytes) : NULL;
    void *note = l->note_bytes > 0 ? malloc(l->note_bytes) : NULL;
    int32_t *tokens = malloc(DT_MAX(token_bytes, 1));
    dt_status status = DT_OK;
    if ((l->has_logits && logits == NULL) || (l->note_bytes > 0 && note == NULL) || tokens == NULL) {
        status = dt_fail_memory(r->error, logit_bytes + l->note_bytes + token_bytes, "the session");
    } else {
        memcpy(tokens, l->tokens, token_bytes);
        if (logits != NULL) {
            memcpy(logits, l->logits, logit_bytes);
        }
        if (note != NULL) {
            memcpy(note, l->note, l->note_bytes);
        }
        if (dt_file_map_broken(r->map)) { /* nothing of it is looked at from here on */
            status = cut_short(r, r->n_bytes);
        }
    }
    if (status == DT_OK) {
        status = dt_session_reserve_tokens(s, DT_MAX(n_tokens - s->n_tokens, 0), r->error);
    }
    if (status == DT_OK && sampler != NULL && l->has_sampler) {
        const dt_sampler_state state = {.seed = l->sampler.seed, .n_draws = l->sampler.n_draws};
        status = dt_sampler_set_state(sampler, &state, r->error);
        for (int32_t i = 0; i < n_tokens && status == DT_OK; i++) {
            status = dt_sampler_accept(sampler, tokens[i], false, r->error);
        }
    }
    if (status != DT_OK) {
        free(logits);
        free(note);
        free(tokens);
        return status;
    }
    if (n_tokens > 0) {
        memcpy(s->tokens, tokens, token_bytes);
    }
    free(tokens);
    dt_snapshots_drop(s, 0);
    free(s->own_logits);
    free(s->note);
    dt_kv_free(s->kv);
    s->kv = l->kv;
    l->kv = NULL;
    s->n_tokens = n_tokens;
    dt_session_set_limit(s);
    s->whole_from = (int32_t)r->header.whole_from;
    /* what is still whole can be repeated; of the rest nothing is known */
    const bool whole = r->header.newest_dropped < 0;
    s->peaks_until = !r->lacks_peaks ? (int32_t)r->header.peaks_until : whole ? 0 : n_tokens;
    s->logits = s->own_logits = logits;
    s->note = note;
    s->note_bytes = l->note_bytes;
    s->n_to_come = 0;
    s->evicted_once = false;
    return DT_OK;
}

static dt_status read_all(reader *r, loaded *l) {
    dt_status status = read_header(r);
    status = status == DT_OK ? check_header(r) : status;
    r->at = sizeof r->header;
    status = status == DT_OK ? read_tokens(r, l) : status;
    status = status == DT_OK ? read_logits(r, l) : status;
    status = status == DT_OK ? read_small_sections(r, l) : status;
    return status == DT_OK ? read_lanes(r, l) : status;
}

/* r->bytes is NULL for an empty file. */
static dt_status map_file(reader *r, dt_error *error) {
    struct stat info;
    const int file = open(r->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe must not hang here */
    if (file < 0 || fstat(file, &info) != 0 || !S_ISREG(info.st_mode)) {
        const int reason = errno;
        const dt_status status = file < 0 ? dt_fail(error, DT_ERR_IO, "%s can't be read: %s", r->path, strerror(reason))
                                          : dt_fail(error, DT_ERR_IO, "%s can't be read: it is no regular file", r->path);
        if (file >= 0) {
            close(file);
        }
        return status;
    }
    r->n_bytes = (uint64_t)info.st_size;
    if (r->n_bytes > 0) {
#ifdef POSIX_FADV_SEQUENTIAL
        (void)posix_fadvise(file, 0, 0, POSIX_FADV_SEQUENTIAL);
#endif
        r->map = dt_file_map_open(file, (size_t)r->n_bytes);
    }
    const int reason = errno;
    close(file);
    if (r->n_bytes > 0 && r->map == NULL) {
        return dt_fail(error, DT_ERR_IO, "%s can't be read: %s", r->path, strerror(reason));
    }
    r->bytes = r->map != NULL ? (const char *)dt_file_map_bytes(r->map) : NULL;
    return DT_OK;
}

static void raise_most(dt_session *s, const reader *r) {
    if (r->most > s->kv_most) {
        s->kv_most = r->most;
        dt_log(s->params.group != NULL && s->params.kv_memory == 0 ? DT_LOG_DEBUG : DT_LOG_INFO,
               "KV memory: at most %s with what %s holds", dt_size_of(r->most).text, r->path);
    }
}

dt_status dt_session_load(dt_session *session, dt_sampler *sampler, const char *path, dt_error *error) {
    reader r = {.session = session, .path = path, .error = error};
    loaded l = {0};
    if (DT_LACKS(error, session, path)) {
        return DT_ERR_ARGUMENT;
    }
    dt_status status = dt_session_check_idle(session, error);
    if (status == DT_OK) {
        status = map_file(&r, error);
    }
    if (status != DT_OK) {
        return status;
    }
    do { /* for a moment there are two caches; the snapshots of the old one would go in any case */
        dt_kv_free(l.kv);
        l = (loaded){0};
        status = read_all(&r, &l);
    } while (dt_session_makes_room(session, status, error));
    if (status == DT_OK) {
        status = take_over(session, &r, &l, sampler);
    }
    if (status == DT_OK) {
        raise_most(session, &r);
    }
    dt_kv_free(l.kv);
    dt_file_map_close(r.map);
    return status;
}
