/*
 * Session files. A checksum covers every byte of one, so nearly every change ends there; whoever means harm recomputes it. The mutator
 * changes header, sections and what is in them, and then makes sizes and checksums fit.
 *
 * What loads must be a session like any other: whole, going on by a token, and the same when saved and loaded again.
 */
#include "fuzz.h"

#include "base/hash.h"
#include "engine/session_file.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define N_TOKENS 40

enum { PLAIN, INT8, WINDOW, SCORES, PEAKS, N_KINDS }; /* what the file is loaded into */

static const char *const settings[N_KINDS] = {
    NULL, NULL, "{\"0-\": {\"policy\": \"local_window\", \"max_cache_size\": 24, \"min_cache_size\": 8, \"recent_window\": 8}}",
    "{\"0-\": {\"policy\": \"importance_score\", \"max_cache_size\": 24, \"min_cache_size\": 8, \"recent_window\": 8, "
    "\"memory_slots\": 4}}",
    "{\"0-\": {\"policy\": \"importance_score\", \"score\": \"reconstruct\", \"max_cache_size\": 48, \"min_cache_size\": 8, "
    "\"recent_window\": 8}}"};

static dt_session *sessions[N_KINDS];
static dt_sampler *sampler;

static dt_session *new_session(int kind) {
    dt_error error = {0};
    dt_eviction *eviction = NULL;
    dt_session *session = NULL;
    dt_session_params params = {.n_ctx = 128, .n_batch = 16, .n_threads = 1, .kv_block_tokens = 16, .n_snapshots = -1};
    params.kv_type = kind == INT8 ? DT_KV_INT8 : DT_KV_F16;
    dt_status status = DT_OK;
    if (settings[kind] != NULL) {
        status = dt_eviction_from_text(fuzz_model(), "fuzz", settings[kind], strlen(settings[kind]), &eviction, &error);
        params.eviction = eviction;
    }
    status = status == DT_OK ? dt_session_new(fuzz_model(), &params, &session, &error) : status;
    if (status != DT_OK) {
        fprintf(stderr, "fuzz: %s\n", error.message);
    }
    fuzz_require(status == DT_OK, "a session can be had");
    dt_eviction_free(eviction);
    return session;
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc;
    (void)argv;
    dt_error error = {0};
    dt_sampler_params params = dt_sampler_default_params();
    params.seed = 1;
    for (int i = 0; i < N_KINDS; i++) {
        sessions[i] = new_session(i);
    }
    fuzz_require(dt_sampler_new(fuzz_model(), &params, &sampler, &error) == DT_OK, "a sampler can be had");
    fuzz_begin(fuzz_write_seeds);
    return 0;
}

/* ---- the target --------------------------------------------------------------------------------- */

static void try_session(dt_session *session, const char *path) {
    dt_error error = {0};
    dt_status status = dt_session_load(session, sampler, path, &error);
    if (status != DT_OK) {
        fuzz_require_told(status, &error);
        return;
    }
    fuzz_require(dt_session_check(session, &error) == DT_OK, "a loaded cache is whole");
    size_t n = 0, n_note = 0;
    dt_session_tokens(session, &n);
    dt_session_note(session, &n_note);
    const int32_t token = 5;
    if (n > 0) {
        status = dt_session_append(session, token, &error);
    } else {
        status = dt_session_sync(session, &token, 1, NULL, NULL, NULL, &error);
    }
    if (status != DT_OK) {
        fuzz_require_told(status, &error); /* the context may be full, a value not a number */
        return;
    }
    fuzz_require(dt_session_check(session, &error) == DT_OK, "a loaded session goes on");
    const char *saved = fuzz_scratch();
    status = dt_session_save(session, sampler, saved, &error);
    fuzz_require(status == DT_OK, "a loaded session is saved");
    status = dt_session_load(session, sampler, saved, &error);
    if (status != DT_OK) {
        fprintf(stderr, "fuzz: %s\n", error.message);
    }
    fuzz_require(status == DT_OK, "what was saved is loaded again");
    remove(saved);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const char *path = fuzz_file(0, data, size);
    for (int i = 0; i < N_KINDS; i++) {
        try_session(sessions[i], path);
    }
    return 0;
}

/* ---- the mutator -------------------------------------------------------------------------------- */

#define N_SECTIONS_MAX 64
#define FILE_BYTES_MAX ((size_t)1 << 20)

typedef struct piece {
    dt_session_section head;
    const uint8_t *payload;
    size_t size;
} piece;

static size_t take_apart(const uint8_t *data, size_t size, dt_session_header *header, piece *out) {
    size_t n = 0, at = sizeof *header;
    if (size < sizeof *header) {
        return 0;
    }
    memcpy(header, data, sizeof *header);
    while (n < N_SECTIONS_MAX && size - at >= sizeof(dt_session_section)) {
        piece *p = &out[n];
        memcpy(&p->head, data + at, sizeof p->head);
        at += sizeof p->head;
        if (p->head.payload_bytes > size - at) {
            return 0;
        }
        p->payload = data + at;
        p->size = (size_t)p->head.payload_bytes;
        const size_t padded = (p->size + 7) / 8 * 8 + 8;
        at = padded > size - at ? size : at + padded;
        n++;
    }
    return n;
}

/* Sizes and checksums are made to fit, except one where `fault` says so. */
static size_t put_together(dt_session_header header, piece *pieces, size_t n, unsigned fault, uint8_t *out, size_t capacity) {
    size_t at = sizeof header;
    for (size_t i = 0; i < n; i++) {
        piece *p = &pieces[i];
        const size_t padded = (p->size + 7) / 8 * 8;
        if (at + sizeof p->head + padded + 8 > capacity) {
            break;
        }
        p->head.payload_bytes = p->size;
        p->head.checksum = dt_hash_of(&p->head, offsetof(dt_session_section, checksum)) ^ (fault == 1);
        memcpy(out + at, &p->head, sizeof p->head);
        at += sizeof p->head;
        memcpy(out + at, p->payload, p->size);
        memset(out + at + p->size, 0, padded - p->size);
        const uint64_t checksum = dt_hash_of(out + at, padded) ^ (fault == 2);
        memcpy(out + at + padded, &checksum, 8);
        at += padded + 8;
    }
    header.file_bytes = at;
    header.checksum = dt_hash_of(&header, offsetof(dt_session_header, checksum)) ^ (fault == 3);
    memcpy(out, &header, sizeof header);
    return at;
}

static void change_header(dt_session_header *h, fuzz_random *random) {
    uint32_t *const numbers[] = {&h->version,
                                 &h->n_layers,
                                 &h->n_vocab,
                                 &h->dim_k,
                                 &h->dim_v,
                                 &h->type_k,
                                 &h->type_v,
                                 &h->n_tokens,
                                 &h->whole_from,
                                 &h->peaks_until,
                                 &h->shift,
                                 &h->reserved,
                                 (uint32_t *)&h->newest_dropped};
    uint32_t *number = numbers[fuzz_below(random, sizeof numbers / sizeof numbers[0])];
    *number = fuzz_below(random, 2) == 0 ? (uint32_t)fuzz_below(random, 64) : (uint32_t)fuzz_limit(random);
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    static piece pieces[N_SECTIONS_MAX + 1];
    static uint8_t copy[FILE_BYTES_MAX], changed[FILE_BYTES_MAX + 64];
    fuzz_random random = {seed};
    dt_session_header header;
    if (size > FILE_BYTES_MAX || max_size < sizeof header) {
        return LLVMFuzzerMutate(data, size, max_size);
    }
    memcpy(copy, data, size);
    const size_t n_found = take_apart(copy, size, &header, pieces);
    if (n_found == 0 || fuzz_below(&random, 16) == 0) {
        return LLVMFuzzerMutate(data, size, max_size);
    }
    size_t n = n_found;
    const size_t i = fuzz_below(&random, n);
    piece *p = &pieces[i];
    switch (fuzz_below(&random, 12)) {
    case 0:
    case 1:
        change_header(&header, &random);
        break;
    case 2: /* gone */
        memmove(p, p + 1, (n - i - 1) * sizeof *p);
        n--;
        break;
    case 3: /* twice */
        memmove(p + 1, p, (n - i) * sizeof *p);
        n++;
        break;
    case 4: /* elsewhere in the order */
        pieces[N_SECTIONS_MAX] = *p;
        *p = pieces[n - 1];
        pieces[n - 1] = pieces[N_SECTIONS_MAX];
        break;
    case 5:
        p->head.layer = (uint32_t)fuzz_limit(&random);
        break;
    case 6: /* the numbers a payload begins with */
    case 7:
        memcpy(changed, p->payload, p->size);
        if (p->size >= 8) {
            const uint32_t number = fuzz_below(&random, 2) == 0 ? (uint32_t)fuzz_below(&random, 64) : (uint32_t)fuzz_limit(&random);
            memcpy(changed + 4 * fuzz_below(&random, 2), &number, 4);
        }
        p->payload = changed;
        break;
    default:
        memcpy(changed, p->payload, p->size);
        p->size = LLVMFuzzerMutate(changed, p->size, p->size + 32);
        p->payload = changed;
    }
    return put_together(header, pieces, n, (unsigned)fuzz_below(&random, 64), data, max_size);
}

/* ---- seeds -------------------------------------------------------------------------------------- */

bool fuzz_write_seeds(const char *folder) {
    static const char *const names[N_KINDS] = {"plain", "int8", "window", "scores", "peaks"};
    int32_t tokens[N_TOKENS];
    bool written = true;
    for (int32_t i = 0; i < N_TOKENS; i++) {
        tokens[i] = 3 + i * 7 % 250;
    }
    for (int i = 0; i < N_KINDS && written; i++) {
        dt_error error = {0};
        char path[4096];
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        written = dt_session_sync(sessions[i], tokens, i == PLAIN ? 3 : N_TOKENS, NULL, NULL, NULL, &error) == DT_OK &&
                  dt_session_set_note(sessions[i], "a note", 6, &error) == DT_OK &&
                  dt_session_save(sessions[i], sampler, path, &error) == DT_OK;
    }
    return written;
}
