/*
 * Conversations past the context, on tiny random models: what closing up does to keys and positions, that nothing grows over a
 * hundred thousand tokens, and that saving, drafts, rewinds and forks work there as before.
 */
#include "engine/session.h"
#include "support/cmocka_all.h"
#include "support/compare.h"
#include "support/fixture.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define N_CTX 128 /* trained */
#define N_TOKENS 2000
#define WINDOW "{\"0-\": {\"policy\": \"local_window\", \"max_cache_size\": 48, \"recent_window\": 16}}"
#define SCORED "{\"0-\": {\"policy\": \"importance_score\", \"max_cache_size\": 48, \"recent_window\": 16}}"
#define RECONSTRUCT                                                                                                                \
    "{\"0-\": {\"policy\": \"importance_score\", \"score\": \"reconstruct\", \"max_cache_size\": 48, \"recent_window\": 16}}"
#define SHARED                                                                                                                     \
    "{\"budget\": \"adaptive\", \"total_cache_size\": 96, \"layers\": {\"0-\": {\"policy\": \"importance_score\", \"score\": "     \
    "\"reconstruct\"}}}"
#define NO_SINKS "{\"0-\": {\"policy\": \"local_window\", \"max_cache_size\": 48, \"recent_window\": 16, \"sink_tokens\": 0}}"

typedef engine_fixture fixture;

static tiny_model_params small_model(void) {
    tiny_model_params p = tiny_model_default_params();
    p.n_ctx = N_CTX;
    return p;
}

static int setup(void **state) {
    const tiny_model_params p = small_model();
    *state = open_engine_fixture(&p, N_TOKENS, 5);
    return 0;
}

static dt_session *new_session(const dt_model *model, const char *json, dt_kv_type type, dt_prefill prefill, int32_t n_ctx) {
    dt_eviction *eviction = json != NULL ? eviction_from_json(model, json) : NULL;
    const dt_session_params params = {.n_threads = 1,
                                      .n_batch = 32,
                                      .n_ctx = n_ctx,
                                      .kv_block_tokens = 16,
                                      .kv_type = type,
                                      .prefill = prefill,
                                      .eviction = eviction,
                                      .n_snapshots = -1};
    dt_session *s = open_session(model, &params);
    dt_eviction_free(eviction);
    return s;
}

/* ---- keys ---- */

static float key_number(const dt_kv_format *f, void *block, int32_t i, int32_t d) {
    const char *at = (const char *)block + dt_kv_key_offset(f, i, d);
    return f->type_k == DT_KV_F16 ? dt_f16_to_f32(*(const uint16_t *)(const void *)at)
                                  : dt_kv_k_scale(f, block)[i] * (float)(*(const uint8_t *)at - 128);
}

/* In the first layer a key depends on nothing but its token and position: one that was turned must be what the model computes for
 * its new position. tolerance: of the key's largest number. */
static void compare_first_layer(const dt_model *model, dt_session *moved, const int32_t *tokens, int32_t layer, float tolerance) {
    dt_kv *kv = dt_session_kv(moved);
    const dt_kv_format *f = &dt_kv_layer(kv, layer)->format;
    dt_kv_lane_view view, fresh;
    dt_kv_lane(kv, layer, 1, &view);
    int32_t positions[N_CTX], origins[N_CTX], there[N_CTX];
    dt_kv_positions(kv, layer, 1, positions);
    dt_kv_origins(kv, layer, 1, origins);
    const int32_t n = moved->n_tokens - dt_kv_shift(kv);
    for (int32_t i = 0; i < n; i++) {
        there[i] = 3;
    }
    int32_t n_moved = 0;
    for (int32_t i = 0; i < view.n_entries; i++) {
        assert_true(positions[i] >= 0 && positions[i] < n);
        there[positions[i]] = tokens[origins[i]];
        n_moved += positions[i] != origins[i];
    }
    assert_true(n_moved > 16);
    dt_session *s = new_session(model, NULL, DT_KV_F16, DT_PREFILL_FULL, N_CTX);
    sync_tokens(s, there, (size_t)n);
    dt_kv_lane(dt_session_kv(s), layer, 1, &fresh);
    const dt_kv_format *g = &dt_kv_layer(dt_session_kv(s), layer)->format;
    for (int32_t i = 0; i < view.n_entries; i++) {
        float largest = 0;
        for (int32_t d = 0; d < f->dim_k; d++) {
            largest = fmaxf(largest, fabsf(key_number(g, fresh.spans[positions[i] / 16].block, positions[i] % 16, d)));
        }
        for (int32_t d = 0; d < f->dim_k; d++) {
            const float got = key_number(f, view.spans[i / 16].block, i % 16, d);
            const float want = key_number(g, fresh.spans[positions[i] / 16].block, positions[i] % 16, d);
            assert_true(dt_is_finite(got) && dt_is_finite(want));
            assert_true(fabsf(got - want) <= tolerance * largest);
        }
    }
    dt_session_free(s);
}

static void test_keys_turn_as_the_model_rotates(void **state) {
    const fixture *f = *state;
    static const struct {
        const char *arch;
        tiny_rope_scaling scaling;
        bool factors;
    } models[] = {{"llama", TINY_ROPE_DEFAULT, false}, {"llama", TINY_ROPE_LINEAR, false},  {"llama", TINY_ROPE_YARN, false},
                  {"llama", TINY_ROPE_DEFAULT, true},  {"qwen3", TINY_ROPE_DEFAULT, false}, {"chatglm", TINY_ROPE_DEFAULT, false},
                  {"glm4", TINY_ROPE_DEFAULT, false}};
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++) {
        tiny_model_params p = small_model();
        p.arch = models[i].arch;
        p.rope_scaling = models[i].scaling;
        p.rope_freqs = models[i].factors;
        p.rope_factor = 4;
        p.rope_original_context = 64;
        dt_model *model = open_model(write_tiny(&p), true);
        for (int type = 0; type < 2; type++) {
            dt_session *s = new_session(model, SCORED, type ? DT_KV_INT8 : DT_KV_F16, DT_PREFILL_STREAMING, 0);
            sync_tokens(s, f->tokens, 400);
            assert_true(dt_kv_shift(dt_session_kv(s)) > 200);
            compare_first_layer(model, s, f->tokens, 0, type ? 0.02f : 0.002f);
            dt_session_free(s);
        }
        dt_model_close(model);
    }
}

/* ---- positions ---- */

static int compare_pairs(const void *a, const void *b) {
    const int32_t *x = a, *y = b;
    return (x[0] > y[0]) - (x[0] < y[0]);
}

/* Order is kept, sinks are in their places, nothing is farther from the next token than the context. */
static void check_places(dt_session *s, int32_t n_ctx, int32_t n_sinks) {
    dt_kv *kv = dt_session_kv(s);
    const dt_model_info *info = dt_model_get_info(dt_session_model(s));
    const int32_t next = s->n_tokens - dt_kv_shift(kv);
    assert_true(next <= n_ctx);
    for (int32_t layer = 0; layer < info->n_layers; layer++) {
        for (int32_t lane = 0; lane < info->n_kv_heads[layer]; lane++) {
            int32_t positions[2 * N_CTX], origins[2 * N_CTX], pairs[2 * N_CTX][2];
            dt_kv_lane_view view;
            dt_kv_lane(kv, layer, lane, &view);
            assert_true(view.n_entries <= 2 * N_CTX);
            dt_kv_positions(kv, layer, lane, positions);
            dt_kv_origins(kv, layer, lane, origins);
            for (int32_t i = 0; i < view.n_entries; i++) {
                pairs[i][0] = origins[i];
                pairs[i][1] = positions[i];
            }
            qsort(pairs, (size_t)view.n_entries, sizeof pairs[0], compare_pairs);
            for (int32_t i = 0; i < view.n_entries; i++) {
                assert_true(i == 0 || (pairs[i][0] > pairs[i - 1][0] && pairs[i][1] > pairs[i - 1][1]));
                assert_true(i >= n_sinks || (pairs[i][0] == i && pairs[i][1] == i));
                assert_true(pairs[i][1] >= 0 && pairs[i][1] < next && pairs[i][0] < s->n_tokens);
            }
        }
    }
}

/* What is kept is what the policy says: the sinks and the newest tokens, by their indices in the conversation. */
static void test_original_positions_are_reported(void **state) {
    const fixture *f = *state;
    dt_session *s = new_session(f->model, WINDOW, DT_KV_F16, DT_PREFILL_STREAMING, 0);
    for (int32_t n = 100; n < N_TOKENS; n += 300) {
        int32_t *kept = NULL;
        size_t n_kept = 0;
        dt_error error = {0};
        sync_tokens(s, f->tokens, (size_t)n);
        check_places(s, N_CTX, 4);
        assert_int_equal(dt_session_kept_positions(s, 1, 1, &kept, &n_kept, &error), DT_OK);
        assert_true(n_kept <= 48 && n_kept > 40);
        for (size_t i = 0; i < n_kept; i++) {
            assert_int_equal(kept[i], i < 4 ? (int32_t)i : n - (int32_t)(n_kept - i));
        }
        dt_free(kept);
    }
    dt_session_free(s);
}

static double mean_error(const fixture *f, dt_session *a, dt_session *b) {
    double sum = 0;
    for (size_t i = 700; i < 740; i++) {
        append_token(a, f->tokens[i]);
        append_token(b, f->tokens[i]);
        assert_true(all_finite(dt_session_logits(a), f->n_vocab) && all_finite(dt_session_logits(b), f->n_vocab));
        sum += logit_error(dt_session_logits(a), dt_session_logits(b), f->n_vocab);
    }
    return sum / 40;
}

/* Without sinks nothing but rounding tells a session that closes up from one with room for all positions: for halves next to
 * nothing, for bytes no more than what they cost anyway. */
static void test_a_window_moves_without_a_trace(void **state) {
    const fixture *f = *state;
    for (int type = 0; type < 2; type++) {
        const dt_kv_type kv_type = type ? DT_KV_INT8 : DT_KV_F16;
        dt_session *s = new_session(f->model, NO_SINKS, kv_type, DT_PREFILL_STREAMING, 0);
        dt_session *wide = new_session(f->model, NO_SINKS, kv_type, DT_PREFILL_STREAMING, 1024);
        dt_session *exact = new_session(f->model, NO_SINKS, DT_KV_F16, DT_PREFILL_STREAMING, 1024);
        sync_tokens(s, f->tokens, 700);
        sync_tokens(wide, f->tokens, 700);
        sync_tokens(exact, f->tokens, 700);
        assert_int_equal(dt_kv_shift(dt_session_kv(wide)), 0);
        assert_true(dt_kv_shift(dt_session_kv(s)) >= 700 - N_CTX);
        const double allowed = type ? 2 * mean_error(f, wide, exact) : 0.01;
        dt_session_free(wide);
        wide = new_session(f->model, NO_SINKS, kv_type, DT_PREFILL_STREAMING, 1024);
        sync_tokens(wide, f->tokens, 700);
        const double error = mean_error(f, s, wide);
        assert_true(error <= allowed);
        dt_session_free(s);
        dt_session_free(wide);
        dt_session_free(exact);
    }
}

/* Where the kept tokens would not become fewer nothing is touched, also not what windows have passed: it may be taken back to. */
static void test_closing_up_for_nothing_drops_nothing(void **state) {
    const fixture *f = *state;
    tiny_model_params p = small_model();
    p.arch = "gemma3";
    p.window = 32;
    p.window_period = 2;
    dt_model *model = open_model(write_tiny(&p), true);
    dt_session *s =
        new_session(model, "{\"1\": {\"policy\": \"local_window\", \"max_cache_size\": 64}}", DT_KV_F16, DT_PREFILL_FULL, N_CTX);
    sync_tokens(s, f->tokens, 60);
    dt_error error;
    const int32_t length = dt_kv_length(s->kv, 0);
    assert_int_equal(length, 60);
    assert_int_equal(dt_kv_close_up(s->kv, N_CTX - 32, &error), DT_OK);
    assert_int_equal(dt_kv_shift(s->kv), 0);
    assert_int_equal(dt_kv_length(s->kv, 0), length);
    dt_session_free(s);
    dt_model_close(model);
}

/* A layer's window in place of a budget; the other layers evict. */
static void test_windows_move_as_a_whole(void **state) {
    const fixture *f = *state;
    tiny_model_params p = small_model();
    p.arch = "gemma3";
    p.n_layers = 4;
    p.window = 32;
    p.window_period = 2;
    dt_model *model = open_model(write_tiny(&p), true);
    const char *global =
        "{\"1\": {\"policy\": \"local_window\", \"max_cache_size\": 64, \"recent_window\": 16, \"sink_tokens\": 0},"
        " \"3\": {\"policy\": \"importance_score\", \"max_cache_size\": 64, \"recent_window\": 16}}";
    dt_session *s = new_session(model, global, DT_KV_F16, DT_PREFILL_STREAMING, 0);
    sync_tokens(s, f->tokens, 500);
    assert_true(dt_kv_shift(dt_session_kv(s)) > 300);
    check_places(s, N_CTX, 0);
    compare_first_layer(model, s, f->tokens, 0, 0.002f);
    for (size_t i = 500; i < 700; i++) {
        append_token(s, f->tokens[i]);
        check_places(s, N_CTX, 0);
    }
    dt_session_free(s);
    /* a window that nearly fills the context: what is left of it is less than a batch */
    p.window = 80;
    dt_model *wide = open_model(write_tiny(&p), true);
    dt_eviction *eviction = eviction_from_json(wide, global);
    const dt_session_params params = {.n_threads = 1,
                                      .n_batch = 64,
                                      .kv_block_tokens = 16,
                                      .prefill = DT_PREFILL_STREAMING,
                                      .eviction = eviction,
                                      .n_snapshots = -1};
    s = open_session(wide, &params);
    for (size_t n = 100; n <= 700; n += 100) {
        sync_tokens(s, f->tokens, n);
        check_places(s, N_CTX, 0);
    }
    dt_session_free(s);
    dt_eviction_free(eviction);
    dt_model_close(wide);
    /* with only a part of the global layers evicting, the context is the end */
    s = new_session(model, "{\"1\": {\"policy\": \"local_window\", \"max_cache_size\": 64}}", DT_KV_F16, DT_PREFILL_STREAMING, 0);
    dt_error error = {0};
    assert_int_equal(dt_session_sync(s, f->tokens, N_CTX + 1, NULL, NULL, NULL, &error), DT_ERR_LIMIT);
    dt_session_free(s);
    dt_model_close(model);
}

/* ---- a hundred thousand tokens ---- */

static size_t allocated(dt_session *s) { return (size_t)atomic_load(&s->kv_memory->memory.bytes); }

/* Entries that a decode step's attention reads. */
static int64_t work_of(dt_session *s) {
    int64_t sum = 0;
    for (int32_t layer = 0; layer < dt_model_get_info(dt_session_model(s))->n_layers; layer++) {
        sum += dt_kv_length(dt_session_kv(s), layer);
    }
    return sum;
}

/* Nothing grows, nothing drifts: memory, attention work, counters; reading and writing take turns, as in a chat. */
static void run_long(const fixture *f, const char *json, dt_kv_type type, dt_prefill prefill, int32_t n_total) {
    dt_session *s = new_session(f->model, json, type, prefill, 0);
    int32_t *tokens = malloc((size_t)n_total * sizeof *tokens);
    size_t bytes = 0;
    int64_t work = 0;
    dt_error error = {0};
    for (int32_t turn = 0, n = 0; n < n_total; turn++) {
        const int32_t n_read = DT_MIN(turn % 3 == 0 ? 300 : 40, n_total - n), n_written = DT_MIN(20, n_total - n - n_read);
        for (int32_t i = 0; i < n_read; i++) {
            tokens[n + i] = f->tokens[(n + i) * 7 % N_TOKENS];
        }
        dt_sync_result result;
        assert_int_equal(dt_session_sync(s, tokens, (size_t)(n + n_read), NULL, NULL, &result, &error), DT_OK);
        assert_int_equal(result.computed_tokens, n_read);
        n += n_read;
        for (int32_t i = 0; i < n_written; i++, n++) {
            tokens[n] = argmax(dt_session_logits(s), f->n_vocab);
            assert_int_equal(dt_session_append(s, tokens[n], &error), DT_OK);
            assert_true(work_of(s) <= 2 * 48);
        }
        assert_true(all_finite(dt_session_logits(s), f->n_vocab));
        if (turn % 16 == 0) {
            assert_int_equal(dt_session_check(s, &error), DT_OK);
            check_places(s, N_CTX, 4);
        }
        if (n < 2000) {
            bytes = DT_MAX(bytes, allocated(s));
            work = DT_MAX(work, work_of(s));
        } else {
            assert_true(allocated(s) <= bytes && work_of(s) <= work);
        }
    }
    dt_session_stats stats;
    dt_session_get_stats(s, &stats);
    assert_int_equal(stats.n_tokens, n_total);
    assert_int_equal(stats.prefill_tokens + stats.decode_tokens, n_total);
    int64_t kept = 0;
    for (int32_t layer = 0; layer < 2; layer++) {
        kept += (int64_t)lround(dt_kv_mean_length(dt_session_kv(s), layer));
    }
    assert_true(llabs(stats.evicted_tokens + kept - 2 * (int64_t)n_total) <= 1); /* every token is kept or was evicted */
    free(tokens);
    dt_session_free(s);
}

static void test_a_hundred_thousand_tokens(void **state) {
    const fixture *f = *state;
    const char *asked = getenv("DT_TEST_LONG");
    const int32_t n = asked != NULL ? atoi(asked) : 12000;
    run_long(f, SCORED, DT_KV_F16, DT_PREFILL_STREAMING, asked != NULL ? n : 100000);
    run_long(f, SCORED, DT_KV_INT8, DT_PREFILL_FULL, n);
    run_long(f, WINDOW, DT_KV_F16, DT_PREFILL_FULL, n);
    run_long(f, RECONSTRUCT, DT_KV_F16, DT_PREFILL_STREAMING, n / 4);
}

/* ---- the rest of a session's life there ---- */

static void compare_greedy(const fixture *f, dt_session *a, dt_session *b, int32_t n) {
    int32_t *x = malloc((size_t)n * sizeof *x), *y = malloc((size_t)n * sizeof *y);
    greedy(a, (int32_t)f->n_vocab, x, n);
    greedy(b, (int32_t)f->n_vocab, y, n);
    assert_memory_equal(x, y, (size_t)n * sizeof *x);
    assert_memory_equal(dt_session_logits(a), dt_session_logits(b), f->n_vocab * sizeof(float));
    free(x);
    free(y);
}

static void test_saved_and_loaded(void **state) {
    const fixture *f = *state;
    char path[64];
    snprintf(path, sizeof path, "/tmp/dt-test-long-%d.bin", (int)getpid());
    dt_error error = {0};
    for (int type = 0; type < 2; type++) {
        dt_session *s = new_session(f->model, SCORED, type ? DT_KV_INT8 : DT_KV_F16, DT_PREFILL_STREAMING, 0);
        dt_session *loaded = new_session(f->model, SCORED, type ? DT_KV_INT8 : DT_KV_F16, DT_PREFILL_STREAMING, 0);
        sync_tokens(s, f->tokens, 500);
        assert_int_equal(dt_session_save(s, NULL, path, &error), DT_OK);
        assert_int_equal(dt_session_load(loaded, NULL, path, &error), DT_OK);
        assert_int_equal(dt_kv_shift(dt_session_kv(loaded)), dt_kv_shift(dt_session_kv(s)));
        check_places(loaded, N_CTX, 4);
        compare_greedy(f, s, loaded, 200);
        /* nothing is evicted from now on: what the context has room for may follow, and no more */
        dt_session *plain = new_session(f->model, NULL, type ? DT_KV_INT8 : DT_KV_F16, DT_PREFILL_FULL, 0);
        assert_int_equal(dt_session_load(plain, NULL, path, &error), DT_OK);
        const int32_t room = N_CTX - (500 - dt_kv_shift(dt_session_kv(plain)));
        assert_true(room > 0 && room < N_CTX);
        assert_int_equal(dt_session_sync(plain, f->tokens, (size_t)(500 + room + 1), NULL, NULL, NULL, &error), DT_ERR_LIMIT);
        sync_tokens(plain, f->tokens, (size_t)(500 + room));
        assert_int_equal(dt_session_append(plain, 3, &error), DT_ERR_LIMIT);
        dt_session_free(plain);
        dt_session_free(s);
        dt_session_free(loaded);
    }
    unlink(path);
}

static void test_forks_and_rewinds(void **state) {
    const fixture *f = *state;
    dt_error error = {0};
    dt_session *s = new_session(f->model, SCORED, DT_KV_F16, DT_PREFILL_STREAMING, 0), *fork = NULL;
    sync_tokens(s, f->tokens, 500);
    dt_eviction *eviction = eviction_from_json(f->model, SCORED);
    assert_int_equal(dt_session_fork(s, eviction, DT_EVICT_ALWAYS, &fork, &error), DT_OK);
    compare_greedy(f, s, fork, 150);
    dt_session_free(fork);
    /* behind the last round a rewind cuts as ever */
    const int32_t n = s->n_tokens;
    do {
        append_token(s, 5);
    } while (s->whole_from < s->n_tokens); /* a round was just now */
    append_token(s, 6);
    append_token(s, 7);
    const int32_t back = s->n_tokens - 1;
    size_t n_tokens;
    const int32_t *tokens = dt_session_tokens(s, &n_tokens);
    assert_int_equal(n_tokens, back + 1);
    int32_t *other = malloc(n_tokens * sizeof *other);
    memcpy(other, tokens, n_tokens * sizeof *other);
    other[back] = 9;
    const dt_sync_result r = sync_tokens(s, other, n_tokens);
    assert_int_equal(r.how, DT_SYNC_REWOUND);
    assert_in_range(r.reused_tokens, back - 1, back); /* scores begin anew with what came since the round */
    assert_true(back >= n);
    check_places(s, N_CTX, 4);
    free(other);
    dt_eviction_free(eviction);
    dt_session_free(s);
}

/* A shared budget that bounds no lane, as calibration writes it: a lane could take the whole context, and no token would be next. */
static void test_shared_budget_past_the_context(void **state) {
    const fixture *f = *state;
    dt_session *s = new_session(f->model, SHARED, DT_KV_F16, DT_PREFILL_FULL, 0);
    sync_tokens(s, f->tokens, 3 * N_CTX);
    for (int32_t n = 3 * N_CTX; n < 4 * N_CTX; n++) {
        append_token(s, f->tokens[n]);
    }
    check_places(s, N_CTX, 4);
    assert_true(dt_kv_shift(s->kv) > 2 * N_CTX);
    dt_session_free(s);
}

/* More than the context has room for is read in a stream, also where the whole was to be read first: and so is a rebuild. */
static void test_full_prefill_past_the_context(void **state) {
    const fixture *f = *state;
    dt_session *full = new_session(f->model, SCORED, DT_KV_F16, DT_PREFILL_FULL, 0);
    dt_session *streaming = new_session(f->model, SCORED, DT_KV_F16, DT_PREFILL_STREAMING, 0);
    sync_tokens(full, f->tokens, 3 * N_CTX);
    sync_tokens(streaming, f->tokens, 3 * N_CTX);
    assert_memory_equal(dt_session_logits(full), dt_session_logits(streaming), f->n_vocab * sizeof(float));
    int32_t other[3 * N_CTX];
    memcpy(other, f->tokens, sizeof other);
    other[10] = other[10] == 5 ? 6 : 5;
    const dt_sync_result r = sync_tokens(full, other, 3 * N_CTX);
    assert_int_equal(r.how, DT_SYNC_REBUILT);
    check_places(full, N_CTX, 4);
    dt_session_free(full);
    dt_session_free(streaming);
}

/* Counters near their end are refused, and the session stays what it was. */
static void test_the_last_numbers_are_refused(void **state) {
    const fixture *f = *state;
    dt_error error = {0};
    dt_session *s = new_session(f->model, SCORED, DT_KV_F16, DT_PREFILL_STREAMING, 0);
    assert_true(s->max_tokens > INT32_MAX - 1000);
    sync_tokens(s, f->tokens, 200);
    s->max_tokens = 201;
    assert_int_equal(dt_session_sync(s, f->tokens, 202, NULL, NULL, NULL, &error), DT_ERR_LIMIT);
    append_token(s, 3);
    assert_int_equal(dt_session_append(s, 3, &error), DT_ERR_LIMIT);
    assert_int_equal(dt_session_check(s, &error), DT_OK);
    dt_kv_restore_end(s->kv, s->n_tokens - dt_kv_shift(s->kv), dt_kv_newest_dropped(s->kv), INT32_MAX - N_CTX);
    assert_int_equal(dt_kv_append(s->kv, s->n_tokens, N_CTX, &error), DT_ERR_LIMIT);
    dt_session_free(s);
}

/* Nothing moves before the context is used to its last position, whether the text is read or decoded; the next token moves. */
static void test_the_context_is_used_up_first(void **state) {
    const fixture *f = *state;
    static const dt_prefill prefills[] = {DT_PREFILL_FULL, DT_PREFILL_STREAMING};
    for (int i = 0; i < 4; i++) {
        dt_session *s = new_session(f->model, i < 2 ? SCORED : WINDOW, DT_KV_F16, prefills[i % 2], N_CTX);
        sync_tokens(s, f->tokens, N_CTX / 2);
        for (int32_t n = N_CTX / 2; n < N_CTX; n++) {
            assert_int_equal(dt_session_append(s, f->tokens[n], NULL), DT_OK);
            assert_int_equal(dt_kv_shift(s->kv), 0);
        }
        assert_int_equal(dt_session_append(s, f->tokens[N_CTX], NULL), DT_OK);
        assert_true(dt_kv_shift(s->kv) > 0);
        dt_session_free(s);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_keys_turn_as_the_model_rotates),
        cmocka_unit_test(test_original_positions_are_reported),
        cmocka_unit_test(test_a_window_moves_without_a_trace),
        cmocka_unit_test(test_closing_up_for_nothing_drops_nothing),
        cmocka_unit_test(test_windows_move_as_a_whole),
        cmocka_unit_test(test_a_hundred_thousand_tokens),
        cmocka_unit_test(test_saved_and_loaded),
        cmocka_unit_test(test_forks_and_rewinds),
        cmocka_unit_test(test_the_context_is_used_up_first),
        cmocka_unit_test(test_full_prefill_past_the_context),
        cmocka_unit_test(test_shared_budget_past_the_context),
        cmocka_unit_test(test_the_last_numbers_are_refused),
    };
    return cmocka_run_group_tests_name("long", tests, setup, close_engine_fixture);
}
