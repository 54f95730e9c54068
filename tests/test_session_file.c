/*
 * Sessions on disk: what is loaded goes on exactly as what was saved (invariant 5), and a file that is cut short, altered, or
 * someone else's is refused while the live session and the file stay as they were (cases.md rows 9 and 11).
 */
#include "base/hash.h"
#include "engine/engine.h"
#include "engine/session_file.h"
#include "support/cmocka_all.h"
#include "support/compare.h"
#include "support/fixture.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define N_CTX 512
#define EVICT_32                                                                                                                   \
    "{\"0\": {\"policy\": \"importance_score\", \"max_cache_size\": 32, \"min_cache_size\": 8, \"recent_window\": 8},"             \
    " \"1\": {\"policy\": \"local_window\", \"max_cache_size\": 40, \"min_cache_size\": 8, \"recent_window\": 8,"                  \
    " \"memory_slots\": 5}}"

#define RECONSTRUCT_32                                                                                                             \
    "{\"0-\": {\"policy\": \"importance_score\", \"score\": \"reconstruct\", \"max_cache_size\": 32, \"min_cache_size\": 8,"       \
    " \"recent_window\": 8, \"memory_slots\": 3}}"
#define SHARED_90                                                                                                                  \
    "{\"budget\": \"adaptive\", \"total_cache_size\": 90, \"layers\": {\"0-\": {\"policy\": \"importance_score\","                 \
    " \"max_cache_size\": 60, \"min_cache_size\": 12, \"recent_window\": 8, \"memory_slots\": 8}}}"

typedef struct fixture {
    dt_model *model;
    dt_eviction *eviction, *reconstruct, *shared;
    int32_t n_vocab;
    int32_t tokens[N_CTX];
    char folder[64], path[96];
} fixture;

static int setup(void **state) {
    fixture *f = calloc(1, sizeof *f);
    tiny_model_params p = tiny_model_default_params();
    p.n_layers = 3;
    p.n_ctx = N_CTX;
    f->model = open_model(write_tiny(&p), true);
    f->eviction = eviction_from_json(f->model, EVICT_32);
    f->reconstruct = eviction_from_json(f->model, RECONSTRUCT_32);
    f->shared = eviction_from_json(f->model, SHARED_90);
    f->n_vocab = dt_model_get_info(f->model)->n_vocab;
    random_tokens(f->tokens, N_CTX, 3, f->n_vocab, 5);
    snprintf(f->folder, sizeof f->folder, "/tmp/dt-session-XXXXXX");
    assert_non_null(mkdtemp(f->folder));
    snprintf(f->path, sizeof f->path, "%s/s.bin", f->folder);
    *state = f;
    return 0;
}

static int teardown(void **state) {
    fixture *f = *state;
    dt_eviction_free(f->eviction);
    dt_eviction_free(f->reconstruct);
    dt_eviction_free(f->shared);
    dt_model_close(f->model);
    unlink(f->path);
    assert_int_equal(rmdir(f->folder), 0); /* no temporary file was left behind */
    free(f);
    return 0;
}

static dt_session_params params_of(const fixture *f, bool evict, dt_kv_type type) {
    return (dt_session_params){
        .n_threads = 1, .n_batch = 32, .kv_block_tokens = 16, .kv_type = type, .eviction = evict ? f->eviction : NULL};
}

static void save(const dt_session *session, const dt_sampler *sampler, const char *path) {
    dt_error error = {0};
    if (dt_session_save(session, sampler, path, &error) != DT_OK) {
        fail_msg("%s", error.message);
    }
}

static void load(dt_session *session, dt_sampler *sampler, const char *path) {
    dt_error error = {0};
    if (dt_session_load(session, sampler, path, &error) != DT_OK || dt_session_check(session, &error) != DT_OK) {
        fail_msg("%s", error.message);
    }
}

static void write_file(const char *path, const char *bytes, size_t n) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, n, file), n);
    assert_int_equal(fclose(file), 0);
}

/* A loaded session gives the tokens and the very logits of the one that was saved, from the first step on. */
static void assert_goes_on_alike(dt_session *a, dt_session *b, const fixture *f) {
    int32_t out_a[60], out_b[60];
    assert_memory_equal(dt_session_logits(a), dt_session_logits(b), (size_t)f->n_vocab * sizeof(float));
    greedy(a, f->n_vocab, out_a, 60);
    greedy(b, f->n_vocab, out_b, 60);
    assert_memory_equal(out_a, out_b, sizeof out_a);
    assert_memory_equal(dt_session_logits(a), dt_session_logits(b), (size_t)f->n_vocab * sizeof(float));
}

static void test_loaded_goes_on_as_saved(void **state) {
    const fixture *f = *state;
    const dt_eviction *evictions[] = {NULL, f->eviction, f->reconstruct, f->shared};
    for (size_t e = 0; e < sizeof evictions / sizeof evictions[0]; e++) {
        for (int type = DT_KV_F16; type <= DT_KV_INT8; type++) {
            dt_session_params params = params_of(f, false, (dt_kv_type)type);
            params.eviction = evictions[e];
            dt_session *saved = open_session(f->model, &params);
            dt_session *loaded = open_session(f->model, &params);
            params.kv_block_tokens = 64; /* a file knows nothing of blocks */
            dt_session *other = open_session(f->model, &params);
            sync_tokens(saved, f->tokens, 77);
            int32_t out[30];
            greedy(saved, f->n_vocab, out, 30);
            save(saved, NULL, f->path);
            load(loaded, NULL, f->path);
            size_t n_saved, n_loaded;
            const int32_t *a = dt_session_tokens(saved, &n_saved), *b = dt_session_tokens(loaded, &n_loaded);
            assert_int_equal(n_saved, n_loaded);
            assert_memory_equal(a, b, n_saved * sizeof *a);
            /* saved again it is the same file, so everything was loaded */
            size_t n_first, n_second;
            char *first = read_whole_file(f->path, &n_first);
            load(other, NULL, f->path);
            save(other, NULL, f->path);
            char *second = read_whole_file(f->path, &n_second);
            assert_int_equal(n_first, n_second);
            assert_memory_equal(first, second, n_first);
            free(first);
            free(second);
            assert_goes_on_alike(saved, loaded, f);
            dt_session_free(saved);
            dt_session_free(loaded);
            dt_session_free(other);
        }
    }
}

/* Nothing is computed again: the same tokens need no work, more of them only their own. */
static void test_what_was_loaded_is_reused(void **state) {
    const fixture *f = *state;
    for (int evict = 0; evict < 2; evict++) {
        const dt_session_params params = params_of(f, evict, DT_KV_F16);
        dt_session *saved = open_session(f->model, &params), *loaded = open_session(f->model, &params);
        sync_tokens(saved, f->tokens, 100);
        save(saved, NULL, f->path);
        load(loaded, NULL, f->path);
        dt_sync_result r = sync_tokens(loaded, f->tokens, 100);
        assert_int_equal(r.how, DT_SYNC_NOTHING);
        assert_int_equal(r.reused_tokens, 100);
        r = sync_tokens(loaded, f->tokens, 120);
        assert_int_equal(r.how, DT_SYNC_EXTENDED);
        assert_int_equal(r.computed_tokens, 20);
        sync_tokens(saved, f->tokens, 120);
        assert_goes_on_alike(saved, loaded, f);
        /* a rewind knows from the file how far it may go */
        load(loaded, NULL, f->path);
        r = sync_tokens(loaded, f->tokens, 50);
        assert_int_equal(r.how, evict ? DT_SYNC_REBUILT : DT_SYNC_REWOUND);
        dt_session_free(saved);
        dt_session_free(loaded);
    }
}

/* Draws go on where they were, repeat penalty included. */
static void test_sampler_goes_on(void **state) {
    const fixture *f = *state;
    const dt_session_params params = params_of(f, true, DT_KV_F16);
    dt_sampler_params sampling = dt_sampler_default_params();
    sampling.temp = 1.5f;
    sampling.repeat_penalty = 1.3f;
    sampling.seed = 11;
    dt_session *saved = open_session(f->model, &params), *loaded = open_session(f->model, &params);
    dt_sampler *a, *b;
    dt_error error = {0};
    assert_int_equal(dt_sampler_new(f->model, &sampling, &a, &error), DT_OK);
    sampling.seed = 99;
    assert_int_equal(dt_sampler_new(f->model, &sampling, &b, &error), DT_OK);
    sync_tokens(saved, f->tokens, 40);
    for (int32_t i = 0; i < 40; i++) {
        assert_int_equal(dt_sampler_accept(a, f->tokens[i], false, &error), DT_OK);
    }
    for (int half = 0; half < 2; half++) {
        for (int i = 0; i < 40; i++) {
            int32_t token;
            float probability;
            assert_int_equal(dt_sampler_sample(a, dt_session_logits(saved), &token, &probability, &error), DT_OK);
            assert_int_equal(dt_sampler_accept(a, token, true, &error), DT_OK);
            assert_int_equal(dt_session_append(saved, token, &error), DT_OK);
            if (half == 1) {
                int32_t other;
                assert_int_equal(dt_sampler_sample(b, dt_session_logits(loaded), &other, &probability, &error), DT_OK);
                assert_int_equal(other, token);
                assert_int_equal(dt_sampler_accept(b, other, true, &error), DT_OK);
                assert_int_equal(dt_session_append(loaded, other, &error), DT_OK);
            }
        }
        if (half == 0) {
            save(saved, a, f->path);
            load(loaded, b, f->path);
            assert_int_equal(dt_sampler_seed(b), 11);
        }
    }
    dt_sampler_free(a);
    dt_sampler_free(b);
    dt_session_free(saved);
    dt_session_free(loaded);
}

static void test_note_and_biases_and_an_empty_session(void **state) {
    const fixture *f = *state;
    const dt_session_params params = params_of(f, false, DT_KV_F16);
    dt_session *saved = open_session(f->model, &params), *loaded = open_session(f->model, &params);
    dt_error error = {0};
    size_t n = 99;
    save(saved, NULL, f->path); /* nothing in it */
    load(loaded, NULL, f->path);
    assert_null(dt_session_note(loaded, &n));
    assert_int_equal(n, 0);
    assert_null(dt_session_logits(loaded));
    sync_tokens(loaded, f->tokens, 30);
    sync_tokens(saved, f->tokens, 30);
    assert_goes_on_alike(saved, loaded, f);

    assert_int_equal(dt_session_set_note(saved, "ab\0c", 4, &error), DT_OK);
    assert_int_equal(dt_kv_set_bias(dt_session_kv(saved), 1, 0, 7, 1.5f, &error), DT_OK);
    assert_int_equal(dt_kv_set_bias(dt_session_kv(saved), 1, 0, 9, -INFINITY, &error), DT_OK);
    save(saved, NULL, f->path);
    load(loaded, NULL, f->path);
    assert_memory_equal(dt_session_note(loaded, &n), "ab\0c", 4);
    assert_int_equal(n, 4);
    assert_goes_on_alike(saved, loaded, f);
    dt_session_free(saved);
    dt_session_free(loaded);
}

/* A prompt prepared without eviction serves a session with it: the scores begin from what the file has. */
static void test_other_budgets(void **state) {
    const fixture *f = *state;
    dt_session_params params = params_of(f, false, DT_KV_F16);
    dt_session *saved = open_session(f->model, &params);
    params.eviction = f->eviction;
    dt_session *loaded = open_session(f->model, &params);
    sync_tokens(saved, f->tokens, 100);
    save(saved, NULL, f->path);
    load(loaded, NULL, f->path);
    dt_kv_lane_view view;
    dt_kv_lane(dt_session_kv(loaded), 0, 0, &view);
    for (int32_t i = 0; i < view.n_entries; i++) {
        assert_true(dt_is_finite(view.value_norm[i]) && view.value_norm[i] > 0);
    }
    sync_tokens(loaded, f->tokens, 120);
    dt_layer_stats stats;
    dt_session_get_layer_stats(loaded, 0, &stats);
    assert_true(stats.length <= 32);
    /* and the other way round */
    save(loaded, NULL, f->path);
    load(saved, NULL, f->path);
    sync_tokens(saved, f->tokens, 130);
    dt_session_free(saved);
    dt_session_free(loaded);
    /* peaks that the file lacks are made by repeating, where all tokens are there, or begin at zero */
    for (int evict = 0; evict < 2; evict++) {
        params = params_of(f, evict, DT_KV_F16);
        saved = open_session(f->model, &params);
        params.eviction = f->reconstruct;
        loaded = open_session(f->model, &params);
        sync_tokens(saved, f->tokens, 100);
        save(saved, NULL, f->path);
        load(loaded, NULL, f->path);
        sync_tokens(loaded, f->tokens, 120);
        if (!evict) {
            dt_session *whole = open_session(f->model, &params);
            sync_tokens(whole, f->tokens, 100);
            save(whole, NULL, f->path);
            load(saved, NULL, f->path);
            dt_session_free(whole);
        }
        dt_session_free(saved);
        dt_session_free(loaded);
    }
}

/* ---- refusals ---- */

/* The load must fail with `status` and change nothing. */
static void assert_refused(dt_session *live, const fixture *f, dt_status status, const char *fragment) {
    dt_error error = {0};
    size_t n_before, n_after;
    dt_session_tokens(live, &n_before);
    const float *logits = dt_session_logits(live);
    const dt_status got = dt_session_load(live, NULL, f->path, &error);
    if (got != status || strstr(error.message, fragment) == NULL) {
        fail_msg("status %s: %s", dt_status_name(got), error.message);
    }
    dt_session_tokens(live, &n_after);
    assert_int_equal(n_before, n_after);
    assert_ptr_equal(dt_session_logits(live), logits);
    assert_int_equal(dt_session_check(live, &error), DT_OK);
}

typedef struct damage {
    const fixture *f;
    dt_session *live, *twin; /* alike; only `live` meets damaged files */
    char *bytes;
    size_t n;
} damage;

static damage begin_damage(const fixture *f, bool evict) {
    const dt_session_params params = params_of(f, evict, DT_KV_F16);
    damage d = {.f = f, .live = open_session(f->model, &params), .twin = open_session(f->model, &params)};
    dt_session *saved = open_session(f->model, &params);
    sync_tokens(saved, f->tokens + 50, 60);
    dt_error error = {0};
    assert_int_equal(dt_session_set_note(saved, "a note", 6, &error), DT_OK);
    dt_sampler *sampler;
    const dt_sampler_params sampling = dt_sampler_default_params();
    assert_int_equal(dt_sampler_new(f->model, &sampling, &sampler, &error), DT_OK);
    save(saved, sampler, f->path);
    dt_sampler_free(sampler);
    dt_session_free(saved);
    d.bytes = read_whole_file(f->path, &d.n);
    sync_tokens(d.live, f->tokens, 45);
    sync_tokens(d.twin, f->tokens, 45);
    return d;
}

static void end_damage(damage *d) {
    assert_goes_on_alike(d->live, d->twin, d->f);
    write_file(d->f->path, d->bytes, d->n);
    load(d->live, NULL, d->f->path); /* the whole file is fine */
    dt_session_free(d->live);
    dt_session_free(d->twin);
    free(d->bytes);
}

static void test_files_cut_short(void **state) {
    damage d = begin_damage(*state, true);
    for (size_t n = 0; n < d.n; n += n < 256 ? 1 : 512) {
        write_file(d.f->path, d.bytes, n);
        assert_refused(d.live, d.f, DT_ERR_FORMAT, d.f->path);
    }
    for (size_t n = d.n; n % 4096 != 0; n--) { /* to the last 4 KB step, byte by byte */
        write_file(d.f->path, d.bytes, n - 1);
        assert_refused(d.live, d.f, DT_ERR_FORMAT, "cut short");
        n -= n % 4096 > 64 ? 61 : 0;
    }
    char *longer = calloc(1, d.n + 8);
    memcpy(longer, d.bytes, d.n);
    write_file(d.f->path, longer, d.n + 8);
    free(longer);
    assert_refused(d.live, d.f, DT_ERR_FORMAT, "behind its end");
    end_damage(&d);
}

static void test_every_flipped_byte_is_found(void **state) {
    damage d = begin_damage(*state, true);
    FILE *file = fopen(d.f->path, "r+b");
    assert_non_null(file);
    setvbuf(file, NULL, _IONBF, 0);
    /* every byte of the header and of the small sections, then a few of every lane */
    for (size_t at = 0; at < d.n; at += at < 1024 || at + 200 > d.n ? 1 : 41) {
        const char flipped = (char)(d.bytes[at] ^ (1 << at % 8));
        fseek(file, (long)at, SEEK_SET);
        assert_int_equal(fwrite(&flipped, 1, 1, file), 1);
        assert_refused(d.live, d.f, at >= 8 && at < 12 ? DT_ERR_ARGUMENT : DT_ERR_FORMAT, d.f->path);
        fseek(file, (long)at, SEEK_SET);
        assert_int_equal(fwrite(d.bytes + at, 1, 1, file), 1);
    }
    fclose(file);
    end_damage(&d);
}

static void fix_checksums(char *bytes, size_t n) {
    dt_session_header header;
    memcpy(&header, bytes, sizeof header);
    header.checksum = dt_hash_of(&header, offsetof(dt_session_header, checksum));
    memcpy(bytes, &header, sizeof header);
    for (size_t at = sizeof header; at < n;) {
        dt_session_section section;
        memcpy(&section, bytes + at, sizeof section);
        section.checksum = dt_hash_of(&section, offsetof(dt_session_section, checksum));
        memcpy(bytes + at, &section, sizeof section);
        const size_t padded = ((size_t)section.payload_bytes + 7) / 8 * 8;
        at += sizeof section;
        if (padded > n - at) {
            return;
        }
        const uint64_t checksum = dt_hash_of(bytes + at, padded);
        memcpy(bytes + at + padded, &checksum, sizeof checksum);
        at += padded + sizeof checksum;
    }
}

/* Offset of the payload of a section; LANE: of the first one. */
static size_t find_section(const char *bytes, size_t n, const char *tag) {
    for (size_t at = sizeof(dt_session_header); at < n;) {
        dt_session_section section;
        memcpy(&section, bytes + at, sizeof section);
        if (memcmp(section.tag, tag, 4) == 0) {
            return at + sizeof section;
        }
        at += sizeof section + ((size_t)section.payload_bytes + 7) / 8 * 8 + sizeof(uint64_t);
    }
    fail_msg("there is no section %s", tag);
    return 0;
}

/* Checksums that fit prove nothing: someone may have made them. */
static void test_hostile_files(void **state) {
    damage d = begin_damage(*state, true);
    const size_t lane = find_section(d.bytes, d.n, "LANE"), tokens = find_section(d.bytes, d.n, "TOKS");
    dt_session_lane head;
    memcpy(&head, d.bytes + lane, sizeof head);
    const size_t columns = lane + sizeof head, n = head.n_entries, first_key = columns + n * 3 * 4;
    const struct {
        size_t at;
        uint32_t value;
    } changes[] = {
        {lane, 0xFFFFFFFFu},                                     /* entries */
        {lane, head.n_entries - 1},                              /* entries that do not fill the section */
        {lane, 1u << 30},                                        /* a size that overflows */
        {lane + 4, 0xFFu},                                       /* flags */
        {lane + 4, 0},                                           /* masses that are not announced */
        {columns, 0xFFFFFFFFu},                                  /* position -1 */
        {columns, 60},                                           /* beyond the tokens */
        {columns + 4, 59},                                       /* twice */
        {columns + n * 4, 0x7FC00000u},                          /* a mass that is NaN */
        {columns + n * 4, 0xBF800000u},                          /* or negative */
        {columns + n * 8, 0xBF800000u},                          /* a value's length below 0 */
        {first_key, 0x7E007E00u},                                /* keys that are NaN */
        {first_key + 16 * 2 * n, 0x7C00u},                       /* values that are infinite */
        {tokens, 1u << 20},                                      /* a token */
        {offsetof(dt_session_header, n_tokens), 61},             /* more than there are */
        {offsetof(dt_session_header, n_tokens), 0xFFFFFFFFu},    /* */
        {offsetof(dt_session_header, whole_from), 61},           /* */
        {offsetof(dt_session_header, newest_dropped), 60},       /* */
        {tokens - sizeof(dt_session_section) + 16, 0xFFFFFFF0u}, /* payload bytes */
        {tokens - sizeof(dt_session_section) + 20, 0xFFFFFFFFu}, /* payload bytes, upper half */
        {lane - sizeof(dt_session_section) + 4, 1},              /* another layer */
        {find_section(d.bytes, d.n, "SMPL") + 12, 0xFFFFFFFFu},  /* draws without end */
    };
    char *bytes = malloc(d.n);
    for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
        memcpy(bytes, d.bytes, d.n);
        memcpy(bytes + changes[i].at, &changes[i].value, sizeof changes[i].value);
        fix_checksums(bytes, d.n);
        write_file(d.f->path, bytes, d.n);
        dt_error error = {0};
        if (dt_session_load(d.live, NULL, d.f->path, &error) != DT_ERR_FORMAT && error.code != DT_ERR_ARGUMENT) {
            fail_msg("change %zu: %s", i, error.message);
        }
    }
    free(bytes);
    end_damage(&d);
}

static void test_files_of_others(void **state) {
    const fixture *f = *state;
    dt_session_params params = params_of(f, false, DT_KV_F16);
    dt_session *live = open_session(f->model, &params);
    sync_tokens(live, f->tokens, 60);
    save(live, NULL, f->path);

    tiny_model_params p = tiny_model_default_params();
    p.n_layers = 3;
    p.n_ctx = N_CTX;
    p.seed++; /* a fine-tune: other weights, the same shape */
    p.name = "another";
    dt_model *other = open_model(write_tiny(&p), true);
    dt_session *session = open_session(other, &params);
    assert_refused(session, f, DT_ERR_ARGUMENT, "belongs to another model");
    dt_session_free(session);
    dt_model_close(other);

    params.kv_type = DT_KV_INT8;
    session = open_session(f->model, &params);
    assert_refused(session, f, DT_ERR_ARGUMENT, "give --kv-type f16");
    dt_session_free(session);

    params = params_of(f, false, DT_KV_F16);
    params.n_ctx = 59;
    session = open_session(f->model, &params);
    assert_refused(session, f, DT_ERR_ARGUMENT, "60 tokens");
    dt_session_free(session);

    write_file(f->path, "This is a letter, no session.\n", 30);
    assert_refused(live, f, DT_ERR_FORMAT, "no session file");
    unlink(f->path);
    assert_refused(live, f, DT_ERR_IO, "No such file");
    assert_int_equal(mkfifo(f->path, 0600), 0);
    assert_refused(live, f, DT_ERR_IO, "no regular file");
    unlink(f->path);
    dt_session_free(live);
}

/* ---- saving ---- */

static void test_places_that_cannot_be_written(void **state) {
    const fixture *f = *state;
    const dt_session_params params = params_of(f, false, DT_KV_F16);
    dt_session *s = open_session(f->model, &params);
    sync_tokens(s, f->tokens, 60);
    dt_error error = {0};
    const char *bad[] = {"/no such folder/s.bin", f->folder, "/dev/null", ""};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        assert_int_equal(dt_session_check_save(s, bad[i], 60, &error), DT_ERR_IO);
        assert_int_equal(dt_session_check_save(NULL, bad[i], 0, &error), DT_ERR_IO);
        assert_int_equal(dt_session_save(s, NULL, bad[i], &error), DT_ERR_IO);
        assert_non_null(strstr(error.message, "written"));
    }
    assert_int_equal(dt_session_check_save(s, f->path, 60, &error), DT_OK);
    assert_int_equal(access(f->path, F_OK), -1); /* nothing is left there */
    assert_int_equal(dt_session_check_save(s, f->path, (int64_t)1 << 40, &error), DT_ERR_IO);
    assert_non_null(strstr(error.message, "MiB"));
    dt_session_free(s);
}

/* The disk is full half-way: the old file stays, the new one goes. */
static void test_full_disk(void **state) {
    const fixture *f = *state;
    const dt_session_params params = params_of(f, false, DT_KV_F16);
    dt_session *s = open_session(f->model, &params);
    sync_tokens(s, f->tokens, 60);
    save(s, NULL, f->path);
    size_t n_before, n_after;
    char *before = read_whole_file(f->path, &n_before);
    sync_tokens(s, f->tokens, 200);
    const pid_t child = fork();
    if (child == 0) {
        signal(SIGXFSZ, SIG_IGN);
        const struct rlimit limit = {.rlim_cur = 40000, .rlim_max = 40000};
        setrlimit(RLIMIT_FSIZE, &limit);
        dt_error error = {0};
        const bool told = dt_session_check_save(s, f->path, 200, &error) == DT_ERR_IO;
        _exit(told && dt_session_save(s, NULL, f->path, &error) == DT_ERR_IO ? 0 : 1);
    }
    int result;
    assert_int_equal(waitpid(child, &result, 0), child);
    assert_true(WIFEXITED(result) && WEXITSTATUS(result) == 0);
    char *after = read_whole_file(f->path, &n_after);
    assert_int_equal(n_before, n_after);
    assert_memory_equal(before, after, n_before);
    free(before);
    free(after);
    dt_session_free(s);
}

/* Killed at any moment, a save leaves the old file or the new one. */
static void test_killed_saves(void **state) {
    const fixture *f = *state;
    const dt_session_params params = params_of(f, false, DT_KV_F16);
    dt_session *s = open_session(f->model, &params), *loaded = open_session(f->model, &params);
    sync_tokens(s, f->tokens, 200);
    save(s, NULL, f->path);
    for (useconds_t delay = 0; delay < 6000; delay += 300) {
        const pid_t child = fork();
        if (child == 0) {
            while (dt_session_save(s, NULL, f->path, NULL) == DT_OK) {
            }
            _exit(1);
        }
        usleep(delay);
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        load(loaded, NULL, f->path);
        char temporary[128];
        snprintf(temporary, sizeof temporary, "%s.%ld.deeptutor", f->path, (long)child);
        unlink(temporary); /* all that a killed save may leave behind */
    }
    dt_session_free(s);
    dt_session_free(loaded);
}

/* A link stays a link; permissions stay. */
static void test_links_and_permissions(void **state) {
    const fixture *f = *state;
    const dt_session_params params = params_of(f, false, DT_KV_F16);
    dt_session *s = open_session(f->model, &params);
    sync_tokens(s, f->tokens, 20);
    char link[128];
    snprintf(link, sizeof link, "%s/link", f->folder);
    save(s, NULL, f->path);
    assert_int_equal(chmod(f->path, 0640), 0);
    assert_int_equal(symlink(f->path, link), 0);
    save(s, NULL, link);
    struct stat info;
    assert_int_equal(lstat(link, &info), 0);
    assert_true(S_ISLNK(info.st_mode));
    assert_int_equal(stat(f->path, &info), 0);
    assert_int_equal(info.st_mode & 0777, 0640);
    load(s, NULL, link);
    unlink(link);
    dt_session_free(s);
}

/* Vectors of the specification's own test suite. */
static void test_hash(void **state) {
    (void)state;
    assert_true(dt_hash_of("", 0) == 0xEF46DB3751D8E999u);
    assert_true(dt_hash_of("a", 1) == 0xD24EC4F1A98C6E5Bu);
    assert_true(dt_hash_of("abc", 3) == 0x44BC2CF5AD770999u);
    const char text[] = "Nobody inspects the spammish repetition";
    assert_true(dt_hash_of(text, 39) == 0xFBCEA83C8A378BF1u);
    for (size_t cut = 0; cut <= 39; cut++) {
        dt_hash hash;
        dt_hash_begin(&hash);
        dt_hash_add(&hash, text, cut);
        dt_hash_add(&hash, text + cut, 39 - cut);
        assert_true(dt_hash_end(&hash) == 0xFBCEA83C8A378BF1u);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hash),
        cmocka_unit_test(test_loaded_goes_on_as_saved),
        cmocka_unit_test(test_what_was_loaded_is_reused),
        cmocka_unit_test(test_sampler_goes_on),
        cmocka_unit_test(test_note_and_biases_and_an_empty_session),
        cmocka_unit_test(test_other_budgets),
        cmocka_unit_test(test_files_cut_short),
        cmocka_unit_test(test_every_flipped_byte_is_found),
        cmocka_unit_test(test_hostile_files),
        cmocka_unit_test(test_files_of_others),
        cmocka_unit_test(test_places_that_cannot_be_written),
        cmocka_unit_test(test_full_disk),
        cmocka_unit_test(test_killed_saves),
        cmocka_unit_test(test_links_and_permissions),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
