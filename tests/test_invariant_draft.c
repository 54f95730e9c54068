/*
 * Invariant 6: with drafts the same tokens as without, with eviction on, for every draft length and at every eviction boundary; and
 * the same cache, scores included. Sampling too draws the same tokens, and its distribution is the target's.
 */
#include "engine/draft.h"
#include "engine/engine.h"
#include "support/cmocka_all.h"
#include "support/compare.h"
#include "support/fixture.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define N_CTX 512
#define N_PROMPT 48
#define N_PREDICT 70

#ifdef DT_BATCH_INVARIANT
#define SAME_BITS true
#else
#define SAME_BITS false
#endif

typedef struct fixture {
    dt_model *model, *other; /* of one vocabulary */
    int32_t n_vocab;
    int32_t prompt[N_PROMPT];
} fixture;

static tiny_model_params shape(uint64_t seed, int32_t n_layers) {
    tiny_model_params p = tiny_model_default_params();
    p.seed = seed;
    p.n_layers = n_layers;
    p.n_ctx = N_CTX;
    p.n_heads = 6;
    p.n_kv_heads = 2;
    return p;
}

static int setup(void **state) {
    fixture *f = calloc(1, sizeof *f);
    tiny_model_params target = shape(1, 3), draft = shape(2, 1);
    f->model = open_model(write_tiny(&target), true);
    f->other = open_model(write_tiny(&draft), true);
    f->n_vocab = dt_model_get_info(f->model)->n_vocab;
    random_tokens(f->prompt, N_PROMPT / 2, 3, f->n_vocab, 5);
    memcpy(f->prompt + N_PROMPT / 2, f->prompt, N_PROMPT / 2 * sizeof *f->prompt); /* something to look up */
    *state = f;
    return 0;
}

static int teardown(void **state) {
    fixture *f = *state;
    dt_model_close(f->model);
    dt_model_close(f->other);
    free(f);
    return 0;
}

/* ---- runs ---- */

typedef struct outcome {
    int32_t tokens[N_PREDICT];
    size_t n;
    dt_session *session;
    dt_session_stats stats;
    dt_generate_result result;
    int64_t stop_after; /* tokens after which the caller stops */
} outcome;

static bool collect(int32_t token, void *user) {
    outcome *o = user;
    dt_error error = {0};
    assert_true(o->n < N_PREDICT);
    o->tokens[o->n++] = token;
    assert_int_equal(dt_session_check(o->session, &error), DT_OK); /* drafts uncommitted, all else in order */
    return (int64_t)o->n != o->stop_after;
}

typedef enum draft_kind { NO_DRAFT, LOOKUP, SAME_MODEL, OTHER_MODEL, ORACLE } draft_kind;

/* Knows what comes, and errs in every `period`-th token. */
typedef struct oracle {
    int32_t tokens[N_PROMPT + N_PREDICT];
    int32_t n, period;
} oracle;

static oracle known;

static dt_status foresee(void *user, const int32_t *context, int32_t n, int32_t most, int32_t *out, int32_t *out_n,
                         dt_error *error) {
    const oracle *o = user;
    (void)context;
    (void)error;
    for (*out_n = 0; *out_n < most && n + *out_n < o->n; ++*out_n) {
        const int32_t token = o->tokens[n + *out_n];
        out[*out_n] = (n + *out_n) % o->period == 0 ? token ^ 1 : token;
    }
    return DT_OK;
}

static outcome generate(const fixture *f, const dt_session_params *params, const dt_sampler_params *sampling, draft_kind kind,
                        int32_t draft_max, int64_t n_predict, int64_t stop_after) {
    dt_error error = {0};
    outcome o = {.stop_after = stop_after};
    dt_sampler *sampler;
    dt_draft *draft = NULL;
    dt_status status = DT_OK;
    o.session = open_session(f->model, params);
    const dt_session_params plain = {.n_threads = 1, .kv_block_tokens = 16};
    if (kind == LOOKUP) {
        status = dt_draft_from_lookup(draft_max, &draft, &error);
    } else if (kind == ORACLE) {
        status = dt_draft_from_function(foresee, &known, draft_max, false, &draft, &error);
    } else if (kind != NO_DRAFT) {
        status = dt_draft_from_model(f->model, kind == SAME_MODEL ? f->model : f->other, &plain, draft_max, &draft, &error);
    }
    assert_int_equal(status, DT_OK);
    assert_int_equal(dt_sampler_new(f->model, sampling, &sampler, &error), DT_OK);
    sync_tokens(o.session, f->prompt, N_PROMPT);
    if (dt_generate_drafted(o.session, sampler, draft, n_predict, collect, &o, &o.result, &error) != DT_OK) {
        fail_msg("%s", error.message);
    }
    assert_int_equal(dt_session_check(o.session, &error), DT_OK);
    dt_session_get_stats(o.session, &o.stats);
    dt_sampler_free(sampler);
    dt_draft_free(draft);
    return o;
}

/* Everything a lane has, in its order. */
static void assert_same_cache(dt_session *a, dt_session *b, const dt_model_info *info) {
    dt_kv *x = dt_session_kv(a), *y = dt_session_kv(b);
    for (int32_t layer = 0; layer < info->n_layers; layer++) {
        for (int32_t lane = 0; lane < info->n_kv_heads[layer]; lane++) {
            dt_kv_lane_view view, other;
            dt_kv_lane(x, layer, lane, &view);
            dt_kv_lane(y, layer, lane, &other);
            assert_int_equal(view.n_entries, other.n_entries);
            for (int c = 0; c < DT_KV_N_COLUMNS; c++) {
                const size_t bytes = dt_kv_column_bytes(&dt_kv_layer(x, layer)->format, (dt_kv_column)c);
                const bool is_mass = c == DT_KV_RECENT_MASS || c == DT_KV_VALUE_NORM;
                if (bytes == 0 || c == DT_KV_BIAS || (is_mass && view.recent_mass == NULL)) {
                    continue;
                }
                const size_t n = (size_t)view.n_entries * bytes;
                void *p = malloc(n), *q = malloc(n);
                dt_kv_get_column(x, layer, lane, (dt_kv_column)c, 0, view.n_entries, p);
                dt_kv_get_column(y, layer, lane, (dt_kv_column)c, 0, view.n_entries, q);
                assert_memory_equal(p, q, n);
                free(p);
                free(q);
            }
        }
    }
}

/* Without batch-invariant products two near-equal logits may be told apart by rounding; then only what came before counts. */
static void assert_same_run(const fixture *f, const outcome *plain, const outcome *drafted) {
    size_t same = 0;
    while (same < plain->n && same < drafted->n && plain->tokens[same] == drafted->tokens[same]) {
        same++;
    }
    if (!SAME_BITS && same < plain->n && same >= 4) {
        return;
    }
    assert_int_equal(plain->n, drafted->n);
    assert_int_equal(same, plain->n);
    assert_int_equal(plain->result.why, drafted->result.why);
    assert_int_equal(plain->result.n_tokens, drafted->result.n_tokens);
    assert_int_equal(plain->stats.n_tokens, drafted->stats.n_tokens);
    assert_int_equal(plain->stats.eviction_rounds, drafted->stats.eviction_rounds);
    assert_int_equal(plain->stats.evicted_tokens, drafted->stats.evicted_tokens);
    if (SAME_BITS) {
        assert_same_cache(plain->session, drafted->session, dt_model_get_info(f->model));
        assert_memory_equal(dt_session_logits(plain->session), dt_session_logits(drafted->session),
                            (size_t)f->n_vocab * sizeof(float));
    }
}

static dt_session_params params_of(const dt_eviction *eviction) {
    return (dt_session_params){.n_threads = 1, .n_batch = 32, .kv_block_tokens = 16, .eviction = eviction};
}

static dt_sampler_params greedy_sampling(void) {
    dt_sampler_params p = dt_sampler_default_params();
    p.temp = 0;
    p.ignore_end = true;
    return p;
}

/* ---- tests ---- */

static void test_every_draft_length(void **state) {
    const fixture *f = *state;
    const char *configs[] = {
        NULL, "{\"0-\": {\"policy\": \"importance_score\", \"max_cache_size\": 24, \"min_cache_size\": 8, \"recent_window\": 4}}",
        "{\"0-\": {\"policy\": \"local_window\", \"max_cache_size\": 17, \"min_cache_size\": 16, \"recent_window\": 4}}",
        "{\"0\": {\"policy\": \"importance_score\", \"max_cache_size\": 40, \"min_cache_size\": 20, \"recent_window\": 8},"
        " \"1\": {\"policy\": \"local_window\", \"max_cache_size\": 33, \"min_cache_size\": 8, \"recent_window\": 8, "
        "\"memory_slots\": 3},"
        " \"2\": {\"policy\": \"importance_score\", \"max_cache_size\": 90, \"min_cache_size\": 50}}"};
    /* a random model repeats nothing that could be looked up: a grammar makes it, but for one letter in five */
    const dt_sampler_params free_text = greedy_sampling();
    dt_sampler_params repeating = greedy_sampling();
    repeating.grammar = "root ::= (\"abcd\" [u-z])+";
    for (size_t c = 0; c < sizeof configs / sizeof configs[0]; c++) {
        dt_eviction *eviction = configs[c] != NULL ? eviction_from_json(f->model, configs[c]) : NULL;
        const dt_session_params params = params_of(eviction);
        for (draft_kind kind = LOOKUP; kind <= OTHER_MODEL; kind++) {
            const dt_sampler_params sampling = kind == LOOKUP ? repeating : free_text;
            outcome plain = generate(f, &params, &sampling, NO_DRAFT, 0, N_PREDICT, -1);
            int64_t accepted = 0, proposed = 0;
            for (int32_t draft_max = 1; draft_max <= 16; draft_max++) {
                outcome drafted = generate(f, &params, &sampling, kind, draft_max, N_PREDICT, -1);
                assert_same_run(f, &plain, &drafted);
                accepted += drafted.stats.draft_accepted;
                proposed += drafted.stats.draft_proposed;
                dt_session_free(drafted.session);
            }
            dt_session_free(plain.session);
            print_message("config %zu, draft %d: %d of %d accepted\n", c, (int)kind, (int)accepted, (int)proposed);
            assert_true(kind == OTHER_MODEL || proposed > 0);
            if (kind == SAME_MODEL && configs[c] == NULL) {
                assert_true(accepted >= proposed * 95 / 100); /* the target agrees with itself */
            }
        }
        dt_eviction_free(eviction);
    }
}

/* Guesses that are mostly right, so that drafts meet a round at each of their tokens: budgets one apart, each draft length. */
static void test_every_boundary(void **state) {
    const fixture *f = *state;
    const dt_sampler_params sampling = greedy_sampling();
    const char *own =
        "{\"0-1\": {\"policy\": \"importance_score\", \"max_cache_size\": %d, \"min_cache_size\": %d, \"recent_window\": 8},"
        " \"2\": {\"policy\": \"%s\", \"max_cache_size\": %d, \"min_cache_size\": 8, \"recent_window\": 8}}";
    const char *shared =
        "{\"budget\": \"adaptive\", \"total_cache_size\": %d, \"layers\": {\"0-\": {\"policy\": \"importance_score\","
        " \"max_cache_size\": %d, \"min_cache_size\": 8, \"recent_window\": 8}}}";
    for (int32_t max = 60; max < 77; max++) {
        char config[256];
        if (max % 5 == 0) {
            snprintf(config, sizeof config, shared, 3 * max - 10, max + 20);
        } else {
            snprintf(config, sizeof config, own, max, max - 20, max % 2 ? "local_window" : "importance_score", max + 3);
        }
        dt_eviction *eviction = eviction_from_json(f->model, config);
        const dt_session_params params = params_of(eviction);
        outcome plain = generate(f, &params, &sampling, NO_DRAFT, 0, N_PREDICT, -1);
        assert_true(plain.stats.eviction_rounds > 3);
        memcpy(known.tokens, f->prompt, sizeof f->prompt);
        memcpy(known.tokens + N_PROMPT, plain.tokens, sizeof plain.tokens);
        known.n = N_PROMPT + N_PREDICT;
        for (int32_t draft_max = 1; draft_max <= 16; draft_max++) {
            known.period = 5 + (max + draft_max) % 19;
            outcome drafted = generate(f, &params, &sampling, ORACLE, draft_max, N_PREDICT, -1);
            assert_same_run(f, &plain, &drafted);
            assert_true(!SAME_BITS || drafted.stats.draft_accepted > 10);
            dt_session_free(drafted.session);
        }
        dt_session_free(plain.session);
        dt_eviction_free(eviction);
    }
}

/* What a sliding window has passed leaves the cache at the same tokens as without drafts. */
static void test_sliding_windows(void **state) {
    const fixture *f = *state;
    tiny_model_params p = shape(1, 3);
    p.window = 16;
    p.window_period = 2;
    fixture windowed = *f;
    windowed.model = open_model(write_tiny(&p), true);
    const dt_session_params params = params_of(NULL);
    const dt_sampler_params sampling = greedy_sampling();
    outcome plain = generate(&windowed, &params, &sampling, NO_DRAFT, 0, N_PREDICT, -1);
    memcpy(known.tokens, f->prompt, sizeof f->prompt);
    memcpy(known.tokens + N_PROMPT, plain.tokens, sizeof plain.tokens);
    known.n = N_PROMPT + N_PREDICT;
    for (int32_t draft_max = 1; draft_max <= 16; draft_max++) {
        known.period = 5 + draft_max;
        outcome drafted = generate(&windowed, &params, &sampling, ORACLE, draft_max, N_PREDICT, -1);
        assert_same_run(&windowed, &plain, &drafted);
        dt_session_free(drafted.session);
    }
    dt_session_free(plain.session);
    dt_model_close(windowed.model);
}

/* The model's own end, in mid-draft: nothing comes after it. */
static void test_end_token_in_mid_draft(void **state) {
    const fixture *f = *state;
    const dt_session_params params = params_of(NULL);
    dt_sampler_params sampling = greedy_sampling();
    sampling.ignore_end = false;
    outcome plain = generate(f, &params, &sampling, NO_DRAFT, 0, N_PREDICT, -1);
    assert_int_equal(plain.result.why, DT_STOP_END); /* after a few tokens, as this model happens to be */
    for (int32_t draft_max = 1; draft_max <= 16; draft_max++) {
        outcome drafted = generate(f, &params, &sampling, SAME_MODEL, draft_max, N_PREDICT, -1);
        assert_same_run(f, &plain, &drafted);
        dt_session_free(drafted.session);
    }
    dt_session_free(plain.session);
    sampling.grammar = "root ::= \"abcabcabcabcabcabcabcabc\""; /* a grammar's end */
    plain = generate(f, &params, &sampling, NO_DRAFT, 0, N_PREDICT, -1);
    assert_int_equal(plain.result.why, DT_STOP_END);
    for (int32_t draft_max = 1; draft_max <= 16; draft_max++) {
        outcome drafted = generate(f, &params, &sampling, LOOKUP, draft_max, N_PREDICT, -1);
        assert_same_run(f, &plain, &drafted);
        assert_true(drafted.stats.draft_accepted > 0);
        dt_session_free(drafted.session);
    }
    dt_session_free(plain.session);
}

/* Exactly n tokens, whatever was drafted beyond them; and the caller's stop in mid-draft leaves what plain decoding leaves. */
static void test_ends_in_mid_draft(void **state) {
    const fixture *f = *state;
    dt_eviction *eviction = eviction_from_json(
        f->model,
        "{\"0-\": {\"policy\": \"importance_score\", \"max_cache_size\": 30, \"min_cache_size\": 8, \"recent_window\": 4}}");
    const dt_session_params params = params_of(eviction);
    const dt_sampler_params sampling = greedy_sampling();
    for (int64_t n = 1; n <= 12; n++) {
        for (int by_caller = 0; by_caller < 2; by_caller++) {
            outcome plain = generate(f, &params, &sampling, NO_DRAFT, 0, by_caller ? -1 : n, by_caller ? n : -1);
            assert_int_equal(plain.n, n);
            outcome drafted = generate(f, &params, &sampling, SAME_MODEL, 16, by_caller ? -1 : n, by_caller ? n : -1);
            assert_same_run(f, &plain, &drafted);
            dt_session_free(plain.session);
            dt_session_free(drafted.session);
        }
    }
    dt_eviction_free(eviction);
}

static void test_context_ends_in_mid_draft(void **state) {
    const fixture *f = *state;
    dt_session_params params = params_of(NULL);
    params.n_ctx = N_PROMPT + 13;
    const dt_sampler_params sampling = greedy_sampling();
    outcome plain = generate(f, &params, &sampling, NO_DRAFT, 0, N_PREDICT, -1);
    outcome drafted = generate(f, &params, &sampling, SAME_MODEL, 16, N_PREDICT, -1);
    assert_int_equal(plain.result.why, DT_STOP_CONTEXT);
    assert_same_run(f, &plain, &drafted);
    dt_session_free(plain.session);
    dt_session_free(drafted.session);
}

/* Past the context the kept tokens move together between steps, at the same tokens with drafts as without. */
static void test_past_the_context(void **state) {
    const fixture *f = *state;
    dt_eviction *eviction = eviction_from_json(
        f->model,
        "{\"0-\": {\"policy\": \"importance_score\", \"max_cache_size\": 30, \"min_cache_size\": 8, \"recent_window\": 4}}");
    dt_session_params params = params_of(eviction);
    params.n_ctx = 64;
    const dt_sampler_params sampling = greedy_sampling();
    const int32_t lengths[] = {1, 5, 16};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        outcome plain = generate(f, &params, &sampling, NO_DRAFT, 0, N_PREDICT, -1);
        outcome drafted = generate(f, &params, &sampling, SAME_MODEL, lengths[i], N_PREDICT, -1);
        assert_true(dt_kv_shift(dt_session_kv(plain.session)) > 0);
        assert_same_run(f, &plain, &drafted);
        dt_session_free(plain.session);
        dt_session_free(drafted.session);
    }
    dt_eviction_free(eviction);
}

/* Sampling uses its random numbers in the same order: with a seed even the tokens are the same. */
static void test_sampling_draws_the_same(void **state) {
    const fixture *f = *state;
    dt_eviction *eviction = eviction_from_json(
        f->model,
        "{\"0-\": {\"policy\": \"importance_score\", \"max_cache_size\": 30, \"min_cache_size\": 8, \"recent_window\": 4}}");
    const dt_session_params params = params_of(eviction);
    dt_sampler_params sampling = dt_sampler_default_params();
    sampling.temp = 0.6f;
    sampling.repeat_penalty = 1.1f;
    for (uint32_t seed = 1; seed <= 5; seed++) {
        sampling.seed = seed;
        outcome plain = generate(f, &params, &sampling, NO_DRAFT, 0, N_PREDICT, -1);
        outcome drafted = generate(f, &params, &sampling, SAME_MODEL, 8, N_PREDICT, -1);
        assert_same_run(f, &plain, &drafted);
        dt_session_free(plain.session);
        dt_session_free(drafted.session);
    }
    dt_eviction_free(eviction);
}

/* The third token's distribution, conditional on nothing: drafted and plain counts from independent seeds come from one
 * distribution. Two samples, chi-squared over the commonest tokens; seeds are fixed, so the outcome is too. */
static void test_sampling_keeps_the_distribution(void **state) {
    const fixture *f = *state;
    enum { RUNS = 600, AT = 2 };
    const dt_session_params params = params_of(NULL);
    dt_sampler_params sampling = dt_sampler_default_params();
    sampling.temp = 1.0f;
    sampling.top_k = 6;
    int32_t *counts = calloc((size_t)f->n_vocab * 2, sizeof *counts);
    int64_t accepted = 0, rejected = 0;
    for (int drafted = 0; drafted < 2; drafted++) {
        for (uint32_t run = 0; run < RUNS; run++) {
            sampling.seed = 1000 + run + (drafted ? RUNS : 0);
            outcome o = generate(f, &params, &sampling, drafted ? SAME_MODEL : NO_DRAFT, 4, AT + 2, -1);
            if (o.n > AT) { /* else an end token came before */
                counts[(size_t)drafted * (size_t)f->n_vocab + (size_t)o.tokens[AT]]++;
            }
            accepted += o.stats.draft_accepted;
            rejected += o.stats.draft_proposed - o.stats.draft_accepted;
            dt_session_free(o.session);
        }
    }
    assert_true(accepted > 50 && rejected > 50); /* both ways are taken */
    double chi = 0, rest[2] = {0};
    int cells = 0;
    for (int32_t t = 0; t < f->n_vocab; t++) {
        const double a = counts[t], b = counts[(size_t)f->n_vocab + (size_t)t];
        if (a + b >= 20) {
            chi += (a - b) * (a - b) / (a + b);
            cells++;
        } else {
            rest[0] += a;
            rest[1] += b;
        }
    }
    if (rest[0] + rest[1] > 0) {
        chi += (rest[0] - rest[1]) * (rest[0] - rest[1]) / (rest[0] + rest[1]);
        cells++;
    }
    print_message("chi-squared %.1f over %d cells\n", chi, cells);
    assert_true(cells >= 5);
    assert_true(chi <= cells + 4 * sqrt(2.0 * cells)); /* mean + 4 standard deviations */
    free(counts);
}

/* A draft model that would say its end token for ever says it once. */
static void test_no_guess_beyond_the_end(void **state) {
    const fixture *f = *state;
    dt_error error = {0};
    dt_draft *draft;
    int32_t end = 0, out[DT_DRAFT_MAX_TOKENS], n;
    while (!dt_token_is_end(f->model, end)) {
        end++;
    }
    tiny_model_params p = shape(2, 1);
    p.favourite = 1 + end;
    dt_model *ending = open_model(write_tiny(&p), true);
    const dt_session_params params = {.n_threads = 1, .kv_block_tokens = 16};
    assert_int_equal(dt_draft_from_model(f->model, ending, &params, 16, &draft, &error), DT_OK);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(dt_draft_propose(draft, f->prompt, N_PROMPT, 16, out, &n, &error), DT_OK);
        assert_int_equal(n, 1);
        assert_int_equal(out[0], end);
        dt_draft_learn(draft, 1, 1);
    }
    dt_draft_free(draft);
    dt_model_close(ending);
}

static void test_other_vocabularies(void **state) {
    const fixture *f = *state;
    dt_error error = {0};
    dt_draft *draft = NULL;
    tiny_model_params p = shape(3, 1);
    p.n_vocab += 8;
    const char *path = write_tiny(&p);
    dt_model *larger = open_model(path, true);
    assert_int_equal(dt_draft_from_model(f->model, larger, NULL, 4, &draft, &error), DT_ERR_ARGUMENT);
    assert_non_null(strstr(error.message, "token 320 is"));
    dt_model_close(larger);

    /* the same file, but nobody can tell what its tokens mean */
    const dt_model_params bare = {.no_tokenizer = true};
    dt_model *unknown = NULL;
    p = shape(3, 1);
    assert_int_equal(dt_model_open(write_tiny(&p), &bare, &unknown, &error), DT_OK);
    assert_int_equal(dt_draft_from_model(f->model, unknown, NULL, 4, &draft, &error), DT_ERR_TOKENIZER);
    assert_int_equal(dt_draft_from_model(unknown, f->model, NULL, 4, &draft, &error), DT_ERR_TOKENIZER);
    assert_non_null(strstr(error.message, "has no tokenizer"));
    assert_null(draft);
    assert_int_equal(dt_draft_from_model(unknown, unknown, NULL, 4, &draft, &error), DT_OK);
    dt_draft_free(draft);
    draft = NULL;
    dt_model_close(unknown);

    /* one token's text changed, in the file */
    size_t n;
    p = shape(1, 3);
    const char *same = write_tiny(&p), *changed = write_tiny(&p);
    assert_int_equal(dt_check_same_vocabulary(same, changed, &error), DT_OK);
    char *bytes = read_whole_file(changed, &n);
    char text[16] = "\xe2\x96\x81"; /* as the file writes a space */
    assert_int_equal(dt_token_bytes(f->model, 300, true, text + 2, sizeof text - 2), 2);
    text[2] = '\x81';
    const size_t n_text = 4;
    int found = 0;
    for (size_t i = 8; i + n_text < n; i++) {
        uint64_t length;
        memcpy(&length, bytes + i - 8, sizeof length);
        if (length == n_text && memcmp(bytes + i, text, n_text) == 0) {
            bytes[i + n_text - 1] = '~';
            found++;
        }
    }
    assert_int_equal(found, 1);
    FILE *file = fopen(changed, "wb");
    assert_int_equal(fwrite(bytes, 1, n, file), n);
    fclose(file);
    free(bytes);
    assert_int_equal(dt_check_same_vocabulary(same, changed, &error), DT_ERR_ARGUMENT);
    assert_non_null(strstr(error.message, "token 300 is"));
    assert_int_equal(dt_draft_from_lookup(0, &draft, &error), DT_ERR_ARGUMENT);
}

/* A lookup of what `text` says next, before each of its tokens from `from` on; returns how many tokens it guessed, *right: how many of
 * those came. */
static int32_t look_up_all(dt_draft *draft, const int32_t *text, int32_t from, int32_t n, int32_t *right) {
    dt_error error = {0};
    int32_t out[DT_DRAFT_MAX_TOKENS], n_out, guessed = 0;
    *right = 0;
    for (int32_t i = from; i < n; i++) {
        assert_int_equal(dt_draft_propose(draft, text, i, 16, out, &n_out, &error), DT_OK);
        int32_t same = 0;
        while (same < n_out && i + same < n && out[same] == text[i + same]) {
            same++;
        }
        guessed += n_out;
        *right += same;
        dt_draft_learn(draft, n_out, same);
    }
    return guessed;
}

/* What is foretold, and how far: the longer match wins, a period goes on into the guess, and the length follows from how often
 * such guesses were right. */
static void test_lookup(void **state) {
    (void)state;
    dt_draft *draft;
    dt_error error = {0};
    int32_t out[DT_DRAFT_MAX_TOKENS], n, right;
    assert_int_equal(dt_draft_from_lookup(16, &draft, &error), DT_OK);
    const int32_t nothing[] = {1, 2, 3, 4, 5, 6};
    assert_int_equal(dt_draft_propose(draft, nothing, 6, 4, out, &n, &error), DT_OK);
    assert_int_equal(n, 0);
    assert_int_equal(dt_draft_propose(draft, nothing, 1, 4, out, &n, &error), DT_OK);
    assert_int_equal(n, 0);
    const int32_t longest[] = {1, 2, 3, 4, 50, 9, 2, 3, 4, 60, 1, 2, 3, 4}; /* the longer match wins over the later one */
    assert_int_equal(dt_draft_propose(draft, longest, 14, 1, out, &n, &error), DT_OK);
    assert_int_equal(n, 1);
    assert_int_equal(out[0], 50);
    const int32_t latest[] = {2, 3, 4, 50, 9, 2, 3, 4, 60, 1, 2, 3, 4}; /* of equally long ones the later */
    assert_int_equal(dt_draft_propose(draft, latest, 13, 1, out, &n, &error), DT_OK);
    assert_int_equal(n, 1);
    assert_int_equal(out[0], 60);

    int32_t text[400], far[400];
    for (int32_t i = 0; i < 400; i++) {
        text[i] = 7 + i % 3;
    }
    look_up_all(draft, text, 3, 100, &right);
    assert_int_equal(dt_draft_propose(draft, text, 100, 9, out, &n, &error), DT_OK);
    assert_int_equal(n, 9); /* as many as there is room for */
    assert_memory_equal(out, text + 100, 9 * sizeof *out);
    assert_int_equal(dt_draft_propose(draft, text, 100, 64, out, &n, &error), DT_OK);
    assert_int_equal(n, 16);
    assert_memory_equal(out, text + 100, 16 * sizeof *out);

    random_tokens(far, 400, 3, 1000000, 11); /* a match far back, at every distance from the end of what is compared at once */
    for (int32_t at = 320; at < 390; at++) {
        dt_draft_free(draft);
        assert_int_equal(dt_draft_from_lookup(16, &draft, &error), DT_OK);
        memcpy(text, far, sizeof text);
        memcpy(text + at, far + 20, 8 * sizeof *text);
        assert_int_equal(dt_draft_propose(draft, text, at + 8, 1, out, &n, &error), DT_OK);
        assert_int_equal(n, 1);
        assert_int_equal(out[0], far[28]);
    }
    dt_draft_free(draft);
}

/* Text of few tokens in no order: everything was there before, and nothing follows from it. What was learned from guesses that were
 * not made keeps it from guessing; on text that begins to repeat itself it is back at once. */
static void test_lookup_learns(void **state) {
    (void)state;
    dt_draft *draft;
    dt_error error = {0};
    int32_t text[1200], right;
    assert_int_equal(dt_draft_from_lookup(16, &draft, &error), DT_OK);
    random_tokens(text, 1000, 3, 23, 12);
    look_up_all(draft, text, 1, 300, &right);
    const int32_t guessed = look_up_all(draft, text, 300, 1000, &right);
    print_message("in no order: %d guessed, %d right\n", (int)guessed, (int)right);
    assert_true(guessed < 40); /* each costs less than a sixth of a token */
    memcpy(text + 1000, text + 500, 200 * sizeof *text);
    const int32_t again = look_up_all(draft, text, 1000, 1200, &right);
    print_message("a repetition: %d guessed, %d right\n", (int)again, (int)right);
    assert_true(right > 1000 && right * 10 > again * 8); /* 200 tokens, each foretold several times over */
    dt_draft_free(draft);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lookup),
        cmocka_unit_test(test_lookup_learns),
        cmocka_unit_test(test_every_draft_length),
        cmocka_unit_test(test_every_boundary),
        cmocka_unit_test(test_sliding_windows),
        cmocka_unit_test(test_end_token_in_mid_draft),
        cmocka_unit_test(test_no_guess_beyond_the_end),
        cmocka_unit_test(test_ends_in_mid_draft),
        cmocka_unit_test(test_context_ends_in_mid_draft),
        cmocka_unit_test(test_past_the_context),
        cmocka_unit_test(test_sampling_draws_the_same),
        cmocka_unit_test(test_sampling_keeps_the_distribution),
        cmocka_unit_test(test_other_vocabularies),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
