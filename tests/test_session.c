/*
 * Forks, scoring a known text, and the repetition that reconstruct scores come from, on tiny random models.
 */
#include "engine/engine.h"
#include "support/cmocka_all.h"
#include "support/compare.h"
#include "support/fixture.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define N_CTX 512
#define TOLERANCE 1e-3 /* of the logits' standard deviation: products round differently for other batch sizes */
#define WINDOW_32 "{\"0-\": {\"policy\": \"local_window\", \"max_cache_size\": 32, \"recent_window\": 8}}"
#define SCORED_32 "{\"0-\": {\"policy\": \"importance_score\", \"max_cache_size\": 32, \"recent_window\": 8}}"
#define RECONSTRUCT_32                                                                                                             \
    "{\"0-\": {\"policy\": \"importance_score\", \"score\": \"reconstruct\", \"max_cache_size\": 32, \"recent_window\": 8}}"
#define ADAPTIVE_96                                                                                                                \
    "{\"budget\": \"adaptive\", \"total_cache_size\": 96, \"layers\": {\"0-\": {\"policy\": \"importance_score\", \"score\": "     \
    "\"reconstruct\"}}}"

typedef engine_fixture fixture;

static int setup(void **state) {
    const tiny_model_params p = three_layers(N_CTX);
    *state = open_engine_fixture(&p, N_CTX, 11);
    return 0;
}

/* NULL: the fastest, which may round products of many rows to 16 bits; "reference" computes the same for every batch size. */
static const char *kernel;

static dt_session *new_session(const fixture *f, const char *json, dt_evict evict, dt_prefill prefill) {
    dt_eviction *eviction = json != NULL ? eviction_from_json(f->model, json) : NULL;
    const dt_session_params params = {.n_threads = 2,
                                      .n_batch = 32,
                                      .kv_block_tokens = 16,
                                      .eviction = eviction,
                                      .evict = evict,
                                      .prefill = prefill,
                                      .kernel = kernel};
    dt_session *s = open_session(f->model, &params);
    dt_eviction_free(eviction);
    return s;
}

static dt_session *fork_session(const fixture *f, const dt_session *from, const char *json, dt_evict evict) {
    dt_eviction *eviction = json != NULL ? eviction_from_json(f->model, json) : NULL;
    dt_session *s = NULL;
    dt_error error = {0};
    const dt_status status = dt_session_fork(from, eviction, evict, &s, &error);
    if (status != DT_OK) {
        fail_msg("%s", error.message);
    }
    dt_eviction_free(eviction);
    return s;
}

static void assert_close(const float *a, const float *b, size_t n) {
    assert_true(a != NULL && b != NULL && all_finite(a, n) && all_finite(b, n));
    assert_true(logit_error(a, b, n) <= TOLERANCE);
}

static int32_t longest(const dt_session *s) {
    dt_layer_stats layer;
    assert_int_equal(dt_session_get_layer_stats(s, 0, &layer), DT_OK);
    return layer.length;
}

/* A fork goes on as its origin would; neither feels the other. */
static void test_forks_are_apart(void **state) {
    const fixture *f = *state;
    dt_session *base = new_session(f, SCORED_32, DT_EVICT_HELD, DT_PREFILL_FULL), *straight = new_session(f, NULL, 0, 0);
    sync_tokens(base, f->tokens, 100);
    sync_tokens(straight, f->tokens, 100);
    assert_int_equal(longest(base), 100); /* held */
    dt_session *full = fork_session(f, base, NULL, DT_EVICT_ALWAYS);
    dt_session *evicted = fork_session(f, base, WINDOW_32, DT_EVICT_ALWAYS),
               *once = fork_session(f, base, SCORED_32, DT_EVICT_ONCE);
    assert_memory_equal(dt_session_logits(full), dt_session_logits(base), f->n_vocab * sizeof(float));
    assert_true(longest(evicted) < 32);
    assert_int_equal(longest(once), 32);
    dt_session_free(base);
    for (size_t i = 100; i < 140; i++) {
        append_token(full, f->tokens[i]);
        append_token(straight, f->tokens[i]);
        append_token(evicted, f->tokens[i]);
        append_token(once, f->tokens[i]);
        assert_close(dt_session_logits(full), dt_session_logits(straight), f->n_vocab);
        assert_true(longest(evicted) <= 32);
    }
    assert_int_equal(longest(once), 72); /* it grows */
    dt_error error;
    dt_session *const all[] = {full, evicted, once, straight};
    for (size_t i = 0; i < 4; i++) {
        assert_int_equal(dt_session_check(all[i], &error), DT_OK);
        dt_session_free(all[i]);
    }
}

static void test_a_fork_needs_the_scores(void **state) {
    const fixture *f = *state;
    dt_session *base = new_session(f, NULL, DT_EVICT_ALWAYS, DT_PREFILL_FULL), *fork = NULL;
    dt_eviction *eviction = eviction_from_json(f->model, SCORED_32);
    dt_error error;
    sync_tokens(base, f->tokens, 50);
    assert_int_equal(dt_session_fork(base, eviction, DT_EVICT_ALWAYS, &fork, &error), DT_ERR_ARGUMENT);
    dt_session_free(base);

    /* one that could have had them, and whose text was read while nothing was collected: rebuilt, or new */
    for (int rebuilt = 0; rebuilt < 2; rebuilt++) {
        base = new_session(f, SCORED_32, DT_EVICT_ALWAYS, DT_PREFILL_FULL);
        if (rebuilt) {
            sync_tokens(base, f->tokens, 50);
        }
        dt_session *window = fork_session(f, base, WINDOW_32, DT_EVICT_ALWAYS), *back = NULL;
        if (rebuilt) {
            assert_int_equal(dt_session_fork(window, eviction, DT_EVICT_ALWAYS, &back, &error), DT_OK); /* base's are still there */
            dt_session_free(back);
        }
        assert_int_equal(sync_tokens(window, f->tokens + 60, 50).how, rebuilt ? DT_SYNC_REBUILT : DT_SYNC_EXTENDED);
        assert_int_equal(dt_session_check(window, &error), DT_OK);
        assert_int_equal(dt_session_fork(window, eviction, DT_EVICT_ALWAYS, &back, &error), DT_ERR_ARGUMENT);
        assert_non_null(strstr(error.message, "was not collected"));
        dt_session_free(window);
        dt_session_free(base);
    }

    /* where there is no text yet nothing is missing */
    base = new_session(f, NULL, DT_EVICT_ALWAYS, DT_PREFILL_FULL);
    assert_int_equal(dt_session_fork(base, eviction, DT_EVICT_ALWAYS, &fork, &error), DT_OK);
    sync_tokens(fork, f->tokens, 50);
    assert_int_equal(dt_session_check(fork, &error), DT_OK);
    dt_session_free(fork);
    dt_session_free(base);
    dt_eviction_free(eviction);
}

typedef struct rows {
    float *logits; /* [n][n_vocab] */
    size_t n_vocab, n;
} rows;

static bool keep_row(size_t i, const float *logits, void *user) {
    rows *r = user;
    assert_int_equal(i, r->n);
    memcpy(r->logits + i * r->n_vocab, logits, r->n_vocab * sizeof(float));
    r->n++;
    return true;
}

/* Scoring gives what appending token by token gives, evicting or not. */
static void test_scoring_is_appending(void **state) {
    const fixture *f = *state;
    kernel = "reference";
    const char *const settings[] = {NULL, SCORED_32, RECONSTRUCT_32};
    for (size_t k = 0; k < 3; k++) {
        dt_session *a = new_session(f, settings[k], DT_EVICT_ALWAYS, DT_PREFILL_FULL);
        dt_session *b = new_session(f, settings[k], DT_EVICT_ALWAYS, DT_PREFILL_FULL);
        sync_tokens(a, f->tokens, 60);
        sync_tokens(b, f->tokens, 60);
        rows r = {.logits = malloc(90 * f->n_vocab * sizeof(float)), .n_vocab = f->n_vocab};
        dt_error error;
        assert_int_equal(dt_session_score(a, f->tokens + 60, 90, keep_row, &r, &error), DT_OK);
        assert_int_equal(r.n, 90);
        for (size_t i = 0; i < 90; i++) {
            append_token(b, f->tokens[60 + i]);
            assert_close(r.logits + i * f->n_vocab, dt_session_logits(b), f->n_vocab);
        }
        if (settings[k] == NULL) { /* nothing is evicted: the context is the end */
            assert_int_equal(dt_session_score(a, f->tokens, N_CTX, keep_row, &r, &error), DT_ERR_LIMIT);
        }
        free(r.logits);
        dt_session_free(a);
        dt_session_free(b);
    }
    kernel = NULL;
}

/* ---- reconstruct ---- */

static float *peaks_of(dt_session *s, int32_t layer, int32_t lane, size_t n) {
    dt_kv_lane_view view;
    dt_kv_lane(dt_session_kv(s), layer, lane, &view);
    assert_int_equal(view.n_entries, n);
    float *peaks = malloc(n * sizeof *peaks);
    memcpy(peaks, view.peak_mass, n * sizeof *peaks);
    return peaks;
}

/* The repetition leaves nothing behind but peaks, and those are probabilities. */
static void test_repeating_leaves_no_trace(void **state) {
    const fixture *f = *state;
    dt_session *held = new_session(f, RECONSTRUCT_32, DT_EVICT_HELD, DT_PREFILL_FULL), *plain = new_session(f, NULL, 0, 0);
    sync_tokens(held, f->tokens, 150);
    sync_tokens(plain, f->tokens, 150);
    assert_memory_equal(dt_session_logits(held), dt_session_logits(plain), f->n_vocab * sizeof(float));
    for (int32_t layer = 0; layer < 3; layer++) {
        for (int32_t lane = 0; lane < 2; lane++) {
            float *peaks = peaks_of(held, layer, lane, 150);
            for (size_t i = 0; i < 150; i++) {
                assert_true(peaks[i] > 0 && peaks[i] <= 1.0001f);
            }
            free(peaks);
        }
    }
    dt_session *full = fork_session(f, held, NULL, DT_EVICT_ALWAYS);
    for (size_t i = 150; i < 170; i++) {
        append_token(full, f->tokens[i]);
        append_token(plain, f->tokens[i]);
        assert_close(dt_session_logits(full), dt_session_logits(plain), f->n_vocab);
    }
    dt_session_free(full);
    dt_session_free(held);
    dt_session_free(plain);
}

/* The peaks are the largest attention that queries give which say the text again: computed here from a session that reads the text
 * twice, with the mass of one query at a time. */
static void test_peaks_are_the_most_attention_of_a_second_reading(void **state) {
    const fixture *f = *state;
    kernel = "reference";
    enum { N = 32 }; /* one piece, which sees all of it */
    int32_t twice[2 * N];
    memcpy(twice, f->tokens, sizeof twice / 2);
    memcpy(twice + N, f->tokens, sizeof twice / 2);
    dt_session *held = new_session(f, RECONSTRUCT_32, DT_EVICT_HELD, DT_PREFILL_FULL);
    sync_tokens(held, f->tokens, N);
    float *peaks = peaks_of(held, 1, 1, N), most[N] = {0};
    dt_session *reader = new_session(f, SCORED_32, DT_EVICT_HELD, DT_PREFILL_FULL);
    sync_tokens(reader, twice, N);
    for (size_t i = N; i < 2 * N; i++) {
        dt_kv_lane_view before, after;
        float was[2 * N];
        dt_kv_lane(dt_session_kv(reader), 1, 1, &before);
        memcpy(was, before.recent_mass, N * sizeof(float));
        append_token(reader, twice[i]);
        dt_kv_lane(dt_session_kv(reader), 1, 1, &after);
        const float keep = expf(-1.0f / DT_OBSERVE_WINDOW);
        for (size_t j = 0; j < N; j++) { /* the sum of three query heads: at least the largest of them, at most three times it */
            most[j] = DT_MAX(most[j], (after.recent_mass[j] - was[j] * keep) / (1 - keep));
        }
    }
    for (size_t j = 0; j < N; j++) {
        assert_true(peaks[j] <= most[j] * 1.01f + 1e-4f && peaks[j] >= most[j] / 3 * 0.99f - 1e-4f);
    }
    free(peaks);
    dt_session_free(held);
    dt_session_free(reader);
    kernel = NULL;
}

/* What lies between the first block and the stretch that is repeated is out of sight: in the first layer, where keys depend on
 * nothing but token and position, it changes no peak. */
static void test_a_stretch_sees_itself_and_the_first_block(void **state) {
    const fixture *f = *state;
    enum { N = 160, FROM = 96 };
    int32_t other[N];
    memcpy(other, f->tokens, sizeof other);
    for (size_t i = 16; i < 64; i++) {
        other[i] = f->tokens[i + 200];
    }
    dt_session *a = new_session(f, RECONSTRUCT_32, DT_EVICT_HELD, DT_PREFILL_STREAMING);
    dt_session *b = new_session(f, RECONSTRUCT_32, DT_EVICT_HELD, DT_PREFILL_STREAMING);
    sync_tokens(a, f->tokens, N);
    sync_tokens(b, other, N);
    float *first_a = peaks_of(a, 0, 0, N), *first_b = peaks_of(b, 0, 0, N);
    float *second_a = peaks_of(a, 1, 0, N), *second_b = peaks_of(b, 1, 0, N);
    assert_memory_equal(first_a + FROM, first_b + FROM, (N - FROM) * sizeof(float));
    assert_memory_not_equal(first_a + 16, first_b + 16, 48 * sizeof(float));
    assert_memory_not_equal(second_a + FROM, second_b + FROM, (N - FROM) * sizeof(float));
    free(first_a);
    free(first_b);
    free(second_a);
    free(second_b);
    dt_session_free(a);
    dt_session_free(b);
}

/* Rounds with repetition, equal and shared budgets, both prefills, then decoding: the structure holds and budgets are kept. */
static void test_rounds_with_repetition(void **state) {
    const fixture *f = *state;
    const char *const settings[] = {RECONSTRUCT_32, ADAPTIVE_96};
    for (size_t k = 0; k < 4; k++) {
        dt_session *s = new_session(f, settings[k % 2], DT_EVICT_ALWAYS, k < 2 ? DT_PREFILL_FULL : DT_PREFILL_STREAMING);
        dt_error error;
        sync_tokens(s, f->tokens, 200);
        for (size_t i = 200; i < 300; i++) {
            append_token(s, f->tokens[i]);
            assert_int_equal(dt_session_check(s, &error), DT_OK);
            double total = 0;
            for (int32_t layer = 0; layer < 3; layer++) {
                dt_layer_stats stats;
                assert_int_equal(dt_session_get_layer_stats(s, layer, &stats), DT_OK);
                total += stats.mean_length;
            }
            assert_true(total <= 96 && total > 48);
            assert_true(all_finite(dt_session_logits(s), f->n_vocab));
        }
        dt_session_free(s);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forks_are_apart),
        cmocka_unit_test(test_a_fork_needs_the_scores),
        cmocka_unit_test(test_scoring_is_appending),
        cmocka_unit_test(test_repeating_leaves_no_trace),
        cmocka_unit_test(test_peaks_are_the_most_attention_of_a_second_reading),
        cmocka_unit_test(test_a_stretch_sees_itself_and_the_first_block),
        cmocka_unit_test(test_rounds_with_repetition),
    };
    return cmocka_run_group_tests_name("session", tests, setup, close_engine_fixture);
}
