/*
 * Hundreds of operations in random order on sessions with all kinds of settings: extend, take back, fork, save, load, generate with
 * and without guesses, cancel, compute together in a group, give bad arguments. After each the structure is checked, and again and
 * again a session is compared with a new one that is given only what is left of the conversation: in the batch-invariant build to
 * the bit, what is kept included.
 *
 * What is promised is compared, no more: where tokens were cut off that had given attention to older ones, scores remember it
 * (snapshot.c), and the comparison waits until the session is rebuilt.
 *
 * DT_TEST_RANDOM=N runs N worlds instead of the few; DT_TEST_RANDOM_FIRST=K begins with the K-th, to repeat one.
 */
#include "engine/draft.h"
#include "engine/session.h"
#include "support/cmocka_all.h"
#include "support/compare.h"
#include "support/fixture.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MOST_OPS 400
#define MOST_TOKENS 300
#define N_CHAINS 4
#define N_FILES 2
#define N_SETTINGS 10
#define OPS_PER_WORLD 70
#define TOLERANCE 2e-2 /* in builds where rounding depends on the batch: errors of hundreds of steps add up */

#ifdef DT_BATCH_INVARIANT
#define SAME_BITS true
#else
#define SAME_BITS false
#endif

static const char *const settings[N_SETTINGS] = {
    NULL,
    "{\"0-\": {\"policy\": \"local_window\", \"max_cache_size\": 32, \"min_cache_size\": 8, \"recent_window\": 8}}",
    "{\"0-\": {\"policy\": \"importance_score\", \"max_cache_size\": 48, \"min_cache_size\": 8, \"recent_window\": 8}}",
    "{\"0-\": {\"policy\": \"importance_score\", \"max_cache_size\": 40, \"min_cache_size\": 39, \"recent_window\": 8, "
    "\"memory_slots\": 8}}",
    "{\"0\": {\"policy\": \"local_window\", \"max_cache_size\": 24, \"recent_window\": 4}, \"2\": {\"policy\": "
    "\"importance_score\", \"max_cache_size\": 40, \"min_cache_size\": 30}}",
    "{\"budget\": \"adaptive\", \"total_cache_size\": 150, \"layers\": {\"0-\": {\"policy\": \"importance_score\", "
    "\"max_cache_size\": 90, \"min_cache_size\": 16, \"recent_window\": 8}}}",
    "{\"0-\": {\"policy\": \"importance_score\", \"lanes\": [24, 60], \"min_cache_size\": 8, \"recent_window\": 8}}",
    "{\"0-\": {\"policy\": \"importance_score\", \"score\": \"reconstruct\", \"max_cache_size\": 48, \"min_cache_size\": 40, "
    "\"recent_window\": 8}}",
    "{\"0-\": {\"policy\": \"local_window\", \"max_cache_size\": 9, \"min_cache_size\": 8, \"sink_tokens\": 2, "
    "\"recent_window\": 6}}",
    "{\"0-\": {\"policy\": \"local_window\", \"max_cache_size\": 64, \"min_cache_size\": 16, \"recent_window\": 8, "
    "\"memory_slots\": 6}}",
};

typedef struct fixture {
    dt_model *models[2], *other; /* without and with sliding windows; of the same vocabulary */
    dt_eviction *evictions[2][N_SETTINGS];
    int32_t n_vocab;
    char files[N_FILES][64];
} fixture;

typedef enum op_kind { SYNC, APPEND, GENERATE, FORK } op_kind;

typedef struct op {
    op_kind kind;
    int32_t end;     /* tokens of the session afterwards */
    uint32_t seed;   /* of GENERATE */
    int32_t setting; /* of FORK */
} op;

/* What a session went through, as far as it is still part of it. */
typedef struct history {
    op ops[MOST_OPS];
    int32_t n;
    int32_t setting, first_setting;
    bool comparable;
} history;

typedef struct chain {
    dt_session *session;
    history past;
} chain;

typedef struct world {
    const fixture *f;
    uint64_t state; /* of the random numbers */
    int number;
    int which; /* model */
    dt_session_params params;
    dt_group *group;
    chain chains[N_CHAINS];
    history saved[N_FILES];
    bool has_file[N_FILES];
    const char *doing;
    int64_t n_compared, n_done;
} world;

/* ---- random numbers ---- */

static uint32_t draw(world *w, uint32_t below) {
    w->state = w->state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(w->state >> 33) % below;
}

static int32_t between(world *w, int32_t first, int32_t last) { return first + (int32_t)draw(w, (uint32_t)(last - first + 1)); }

/* Each argument is evaluated once. */
static int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }
static int32_t most_of(int32_t a, int32_t b) { return a > b ? a : b; }

static int32_t any_token(world *w) { return between(w, 3, w->f->n_vocab - 1); }

/* ---- what every session of a world is ---- */

static int setup(void **state) {
    fixture *f = calloc(1, sizeof *f);
    tiny_model_params plain = three_layers(512), windows = three_layers(512), other = three_layers(512);
    windows.arch = "gemma3";
    windows.window = 24;
    other.n_layers = 1;
    other.seed = 9;
    f->models[0] = open_model(write_tiny(&plain), true);
    f->models[1] = open_model(write_tiny(&windows), true);
    f->other = open_model(write_tiny(&other), true);
    f->n_vocab = dt_model_get_info(f->models[0])->n_vocab;
    for (int m = 0; m < 2; m++) {
        for (int i = 1; i < N_SETTINGS; i++) {
            f->evictions[m][i] = eviction_from_json(f->models[m], settings[i]);
        }
    }
    const char *folder = getenv("TMPDIR");
    for (int i = 0; i < N_FILES; i++) {
        snprintf(f->files[i], sizeof f->files[i], "%s/dt-random-%d-%d", folder ? folder : "/tmp", (int)getpid(), i);
    }
    *state = f;
    return 0;
}

static int teardown(void **state) {
    fixture *f = *state;
    for (int m = 0; m < 2; m++) {
        for (int i = 0; i < N_SETTINGS; i++) {
            dt_eviction_free(f->evictions[m][i]);
        }
        dt_model_close(f->models[m]);
    }
    dt_model_close(f->other);
    for (int i = 0; i < N_FILES; i++) {
        unlink(f->files[i]);
    }
    free(f);
    return 0;
}

static dt_session_params params_of(const world *w, int32_t setting, bool alone) {
    dt_session_params p = w->params;
    p.eviction = w->f->evictions[w->which][setting];
    p.group = alone ? NULL : w->group;
    return p;
}

static bool uses_scores(int32_t setting) { return settings[setting] != NULL && strstr(settings[setting], "importance") != NULL; }

static int32_t n_tokens_of(const dt_session *s) {
    size_t n;
    dt_session_tokens(s, &n);
    return (int32_t)n;
}

static int32_t limit_of(const chain *c) {
    dt_session_stats stats;
    dt_session_get_stats(c->session, &stats);
    return least(stats.n_ctx, MOST_TOKENS);
}

static void check(const world *w, const chain *c) {
    dt_error error = {0};
    if (c->session != NULL && dt_session_check(c->session, &error) != DT_OK) {
        fail_msg("world %d, op %d, %s: %s", w->number, (int)w->n_done, w->doing, error.message);
    }
}

static void expect_ok(const world *w, dt_status status, const dt_error *error) {
    if (status != DT_OK) {
        fail_msg("world %d, op %d, %s: %s", w->number, (int)w->n_done, w->doing, error->message);
    }
}

/* ---- histories ---- */

static void clear(history *h, int32_t setting) {
    h->n = 0;
    h->setting = h->first_setting = setting;
    h->comparable = true;
}

static void record(history *h, op o) {
    if (h->n == MOST_OPS) {
        h->comparable = false;
        return;
    }
    h->ops[h->n++] = o;
}

/* The tokens from n on are gone. */
static void cut(history *h, int32_t n) {
    while (h->n > 0 && (h->n > 1 ? h->ops[h->n - 2].end : 0) >= n && h->ops[h->n - 1].kind != FORK) {
        h->n--;
    }
    if (h->n > 0 && h->ops[h->n - 1].end > n) {
        if (h->ops[h->n - 1].kind == FORK) {
            h->comparable = false; /* to before the fork, where other settings were */
        } else {
            h->ops[h->n - 1].end = n;
        }
    }
}

/* ---- comparing ---- */

static dt_sampler *sampler_of(const world *w, uint32_t seed) {
    dt_sampler_params p = dt_sampler_default_params();
    dt_sampler *sampler = NULL;
    dt_error error = {0};
    p.temp = seed % 2 == 0 ? 0.0f : 0.9f;
    p.seed = seed;
    p.ignore_end = true;
    p.repeat_penalty = seed % 3 == 0 ? 1.2f : 1.0f;
    expect_ok(w, dt_sampler_new(w->f->models[w->which], &p, &sampler, &error), &error);
    return sampler;
}

static void generate(const world *w, dt_session *s, uint32_t seed, dt_draft *draft, int32_t n) {
    dt_sampler *sampler = sampler_of(w, seed);
    dt_error error = {0};
    expect_ok(w, dt_generate_drafted(s, sampler, draft, n, NULL, NULL, NULL, &error), &error);
    dt_sampler_free(sampler);
}

/* A new session that goes through what is left. NULL: where it would be forked it lacks scores, which the other has from before it was
 * rebuilt. */
static dt_session *replay(const world *w, const history *h, const int32_t *tokens) {
    const dt_session_params params = params_of(w, h->first_setting, true);
    dt_session *s = open_session(w->f->models[w->which], &params);
    dt_error error = {0};
    for (int32_t i = 0; i < h->n; i++) {
        const op *o = &h->ops[i];
        if (o->kind == SYNC) {
            sync_tokens(s, tokens, (size_t)o->end);
        } else if (o->kind == APPEND) {
            for (int32_t j = n_tokens_of(s); j < o->end; j++) {
                append_token(s, tokens[j]);
            }
        } else if (o->kind == GENERATE) {
            generate(w, s, o->seed, NULL, o->end - n_tokens_of(s) + 1);
        } else {
            dt_session *fork = NULL;
            const dt_status status = dt_session_fork(s, w->f->evictions[w->which][o->setting], DT_EVICT_ALWAYS, &fork, &error);
            dt_session_free(s);
            if (status == DT_ERR_ARGUMENT) {
                return NULL;
            }
            expect_ok(w, status, &error);
            s = fork;
        }
    }
    return s;
}

/* Positions of a lane that a later token sees: what a sliding window has passed stays for as long as it happens to. *n_all_passed grows
 * by what does. */
static int32_t *seen_positions(const world *w, const dt_session *s, int32_t layer, int32_t head, size_t *n, size_t *n_all_passed) {
    const int32_t window = dt_model_get_info(dt_session_model(s))->windows[layer], first = n_tokens_of(s) - window + 1;
    int32_t *kept;
    size_t n_passed = 0;
    dt_error error = {0};
    expect_ok(w, dt_session_kept_positions(s, layer, head, &kept, n, &error), &error);
    while (window > 0 && n_passed < *n && kept[n_passed] < first) {
        n_passed++;
    }
    *n -= n_passed;
    *n_all_passed += n_passed;
    memmove(kept, kept + n_passed, *n * sizeof *kept);
    return kept;
}

/* False where they differ in what windows have passed: the rest then lies in other blocks, and is summed in another order. */
static bool compare_kept(const world *w, const dt_session *a, const dt_session *b) {
    size_t n_passed_a = 0, n_passed_b = 0;
    const dt_model_info *info = dt_model_get_info(dt_session_model(a));
    for (int32_t layer = 0; layer < info->n_layers; layer++) {
        for (int32_t head = 0; head < info->n_kv_heads[layer]; head++) {
            size_t n_a, n_b;
            int32_t *kept_a = seen_positions(w, a, layer, head, &n_a, &n_passed_a);
            int32_t *kept_b = seen_positions(w, b, layer, head, &n_b, &n_passed_b);
            if (n_a != n_b || memcmp(kept_a, kept_b, n_a * sizeof *kept_a) != 0) {
                fail_msg("world %d, op %d, %s: layer %d, head %d keeps other tokens (%zu and %zu) than a new session", w->number,
                         (int)w->n_done, w->doing, layer, head, n_a, n_b);
            }
            dt_free(kept_a);
            dt_free(kept_b);
        }
    }
    return n_passed_a == n_passed_b;
}

static void compare(world *w, const chain *c) {
    const history *h = &c->past;
    if (!h->comparable || h->n == 0 || (!SAME_BITS && h->setting != 0)) {
        return;
    }
    size_t n, n_again;
    const int32_t *tokens = dt_session_tokens(c->session, &n);
    assert_int_equal(n, h->ops[h->n - 1].end);
    dt_session *again = replay(w, h, tokens);
    if (again == NULL) {
        return;
    }
    const int32_t *tokens_again = dt_session_tokens(again, &n_again);
    assert_int_equal(n, n_again);
    assert_memory_equal(tokens, tokens_again, n * sizeof *tokens);
    const bool same_blocks = compare_kept(w, c->session, again);
    const float *logits = dt_session_logits(c->session), *logits_again = dt_session_logits(again);
    assert_non_null(logits);
    const size_t n_vocab = (size_t)w->f->n_vocab;
    const bool same = SAME_BITS && same_blocks
                          ? memcmp(logits, logits_again, n_vocab * sizeof *logits) == 0
                          : all_finite(logits, n_vocab) && logit_error(logits, logits_again, n_vocab) <= TOLERANCE;
    if (!same) {
        fail_msg("world %d, op %d, %s: other logits (%g) than a new session", w->number, (int)w->n_done, w->doing,
                 (double)logit_error(logits, logits_again, n_vocab));
    }
    dt_session_free(again);
    w->n_compared++;
}

/* ---- operations ---- */

static void open_chain(world *w, chain *c) {
    const int32_t setting = between(w, 0, N_SETTINGS - 1);
    const dt_session_params params = params_of(w, setting, false);
    c->session = open_session(w->f->models[w->which], &params);
    clear(&c->past, setting);
}

static void close_chain(chain *c) {
    dt_session_free(c->session);
    c->session = NULL;
}

/* The session is told that the conversation is its first `keep` tokens and n_new others, by one of the ways there are. */
static void go_to(world *w, chain *c, int32_t keep, int32_t n_new) {
    int32_t tokens[MOST_TOKENS + 1];
    size_t n_old;
    const int32_t *old = dt_session_tokens(c->session, &n_old);
    for (int32_t i = 0; i < keep + n_new; i++) {
        tokens[i] = i < keep ? old[i] : any_token(w);
    }
    const int32_t n = keep + n_new;
    int32_t same = 0;
    while (same < n && same < (int32_t)n_old && tokens[same] == old[same]) {
        same++;
    }
    same -= same == n && same < (int32_t)n_old && !dt_snapshot_at(c->session, n) ? 1 : 0;
    const bool near = dt_snapshot_is_near(c->session, same);
    dt_sync_result result;
    dt_error error = {0};
    bool other_chunks = false; /* than dt_session_sync's, of which scores see the last tokens */
    dt_status status;
    if (w->group != NULL && draw(w, 2) == 0) {
        status = dt_session_reuse(c->session, tokens, (size_t)n, &result, &error);
        for (int32_t at = (int32_t)result.reused_tokens; status == DT_OK && at < n;) {
            dt_session_stats stats;
            dt_session_get_stats(c->session, &stats);
            const int32_t chunk = least(n - at, stats.n_batch);
            other_chunks = other_chunks || stats.n_batch < least(w->params.n_batch, w->params.n_ctx);
            dt_step step = {.session = c->session, .tokens = tokens + at, .n = chunk, .n_follow = n - at - chunk};
            expect_ok(w, dt_group_step(w->group, &step, 1, &error), &error);
            at += chunk;
        }
    } else {
        status = dt_session_sync(c->session, tokens, (size_t)n, NULL, NULL, &result, &error);
    }
    if (status == DT_ERR_LIMIT && n > w->params.n_ctx) { /* it would have to begin anew, and gets that far by eviction only */
        assert_int_equal(n_tokens_of(c->session), n_old);
        return;
    }
    expect_ok(w, status, &error);
    if (result.how == DT_SYNC_REBUILT) {
        clear(&c->past, c->past.setting);
    } else if (result.how == DT_SYNC_REWOUND) {
        cut(&c->past, (int32_t)result.reused_tokens);
        c->past.comparable = c->past.comparable && (near || !uses_scores(c->past.setting));
    }
    c->past.comparable = c->past.comparable && !(other_chunks && uses_scores(c->past.setting));
    if (result.how != DT_SYNC_NOTHING && n > result.reused_tokens) {
        record(&c->past, (op){.kind = SYNC, .end = n});
    }
}

static void extend(world *w, chain *c) {
    const int32_t n = n_tokens_of(c->session), room = limit_of(c) - n;
    if (room > 0) {
        go_to(w, c, n, between(w, 1, least(room, draw(w, 3) == 0 ? 150 : 30)));
    }
}

static void take_back(world *w, chain *c) {
    const int32_t n = n_tokens_of(c->session);
    if (n < 2) {
        return;
    }
    const int32_t keep = draw(w, 4) == 0 ? between(w, 0, n) : between(w, most_of(0, n - 20), n);
    const int32_t room = limit_of(c) - keep;
    const int32_t n_new = least(room, between(w, keep == 0 ? 1 : 0, 20));
    if (keep + n_new > 0) {
        go_to(w, c, keep, n_new);
    }
}

static void append(world *w, chain *c) {
    const int32_t n = n_tokens_of(c->session), more = least(between(w, 1, 6), limit_of(c) - n);
    dt_error error = {0};
    for (int32_t i = 0; i < more; i++) {
        expect_ok(w, dt_session_append(c->session, any_token(w), &error), &error);
        record(&c->past, (op){.kind = APPEND, .end = n + i + 1});
    }
}

static bool look(size_t i, const float *logits, void *user) {
    (void)user;
    (void)i;
    return all_finite(logits, 4);
}

static void score(world *w, chain *c) {
    const int32_t n = n_tokens_of(c->session), more = least(between(w, 1, 20), limit_of(c) - n);
    int32_t tokens[20];
    dt_error error = {0};
    for (int32_t i = 0; i < more; i++) {
        tokens[i] = any_token(w);
    }
    if (more > 0) {
        expect_ok(w, dt_session_score(c->session, tokens, (size_t)more, look, NULL, &error), &error);
        record(&c->past, (op){.kind = APPEND, .end = n + more});
    }
}

static void reply(world *w, chain *c) {
    const int32_t n = n_tokens_of(c->session), more = least(between(w, 1, 40), limit_of(c) - n);
    if (dt_session_logits(c->session) == NULL || more < 1) {
        return;
    }
    dt_draft *draft = NULL;
    dt_error error = {0};
    const uint32_t kind = draw(w, 4);
    const int32_t most = between(w, 1, 16);
    const dt_session_params params = {.n_threads = 1, .kv_block_tokens = 16, .n_ctx = between(w, 16, 512)};
    if (kind == 1) {
        expect_ok(w, dt_draft_from_lookup(most, &draft, &error), &error);
    } else if (kind > 1) {
        const dt_model *model = kind == 2 ? w->f->models[w->which] : w->f->other;
        expect_ok(w, dt_draft_from_model(w->f->models[w->which], model, &params, most, &draft, &error), &error);
    }
    const uint32_t seed = draw(w, 1000);
    generate(w, c->session, seed, draft, more);
    dt_draft_free(draft);
    if (n_tokens_of(c->session) > n) {
        record(&c->past, (op){.kind = GENERATE, .end = n_tokens_of(c->session), .seed = seed});
    }
}

static void fork_chain(world *w, chain *c) {
    chain *to = &w->chains[draw(w, N_CHAINS)];
    dt_error error = {0};
    const int32_t setting = draw(w, 3) == 0 ? between(w, 0, N_SETTINGS - 1) : c->past.setting;
    if (to == c) {
        return;
    }
    close_chain(to);
    const dt_status status = dt_session_fork(c->session, w->f->evictions[w->which][setting], DT_EVICT_ALWAYS, &to->session, &error);
    if (status != DT_OK) {
        to->session = NULL;
        assert_int_equal(status, DT_ERR_ARGUMENT); /* scores that were not collected */
        assert_int_not_equal(setting, c->past.setting);
        return;
    }
    to->past = c->past;
    to->past.setting = setting;
    if (n_tokens_of(c->session) == 0) {
        clear(&to->past, setting);
    } else if (setting != c->past.setting) {
        record(&to->past, (op){.kind = FORK, .end = n_tokens_of(c->session), .setting = setting});
    }
}

static void save(world *w, chain *c) {
    const int i = (int)draw(w, N_FILES);
    dt_error error = {0};
    expect_ok(w, dt_session_save(c->session, NULL, w->f->files[i], &error), &error);
    w->saved[i] = c->past;
    w->has_file[i] = true;
}

static void load(world *w, chain *c) {
    const int i = (int)draw(w, N_FILES);
    dt_error error = {0};
    if (!w->has_file[i]) {
        return;
    }
    const int32_t setting = c->past.setting, n = n_tokens_of(c->session);
    const dt_status status = dt_session_load(c->session, NULL, w->f->files[i], &error);
    if (status == DT_ERR_ARGUMENT) { /* longer than a context that can't be passed */
        assert_int_equal(n, n_tokens_of(c->session));
        assert_int_not_equal(setting, w->saved[i].setting);
        return;
    }
    expect_ok(w, status, &error);
    c->past = w->saved[i];
    c->past.comparable = c->past.comparable && setting == c->past.setting;
    c->past.setting = setting;
}

static bool stop_at_once(int64_t done, int64_t total, void *user) {
    (void)done;
    (void)total;
    (void)user;
    return false;
}

static void cancel(world *w, chain *c) {
    int32_t tokens[MOST_TOKENS];
    const int32_t n = n_tokens_of(c->session), room = limit_of(c) - n;
    size_t n_old;
    dt_error error = {0};
    const int32_t *old = dt_session_tokens(c->session, &n_old);
    for (int32_t i = 0; i < n; i++) {
        tokens[i] = old[i];
    }
    for (int32_t i = n; i < n + room; i++) {
        tokens[i] = any_token(w);
    }
    if (room > w->params.n_batch) {
        const dt_status status = dt_session_sync(c->session, tokens, (size_t)(n + room), stop_at_once, NULL, NULL, &error);
        assert_int_equal(status, DT_ERR_CANCELLED);
        record(&c->past, (op){.kind = SYNC, .end = n_tokens_of(c->session)});
        c->past.comparable = c->past.comparable && c->past.setting == 0; /* a round may be due that only the next sync brings */
    }
}

static void misuse(world *w, chain *c) {
    int32_t tokens[MOST_TOKENS + 600];
    const int32_t n = n_tokens_of(c->session);
    size_t n_old;
    dt_error error = {0};
    if (n > 0) {
        memcpy(tokens, dt_session_tokens(c->session, &n_old), (size_t)n * sizeof *tokens);
    }
    tokens[n] = w->f->n_vocab + between(w, 0, 3);
    const dt_status status = dt_session_append(c->session, draw(w, 2) == 0 ? -1 : tokens[n], &error);
    assert_true(status == DT_ERR_ARGUMENT || (status == DT_ERR_LIMIT && n >= limit_of(c)));
    assert_int_equal(n, n_tokens_of(c->session));
    assert_int_equal(dt_session_sync(c->session, tokens, 0, NULL, NULL, NULL, &error), DT_ERR_ARGUMENT);
    if (n < limit_of(c)) {
        assert_int_not_equal(dt_session_sync(c->session, tokens, (size_t)n + 1, NULL, NULL, NULL, &error), DT_OK);
    }
    assert_int_equal(n, n_tokens_of(c->session));
    assert_int_not_equal(dt_session_load(c->session, NULL, "/dev/null", &error), DT_OK);
    assert_int_equal(n, n_tokens_of(c->session));
}

/* Each session of a group a token, or the last of them a prompt that is given up in the middle. */
static void together(world *w, chain *c) {
    dt_step steps[N_CHAINS];
    chain *whose[N_CHAINS];
    int32_t tokens[N_CHAINS], prompt[64], n = 0;
    dt_error error = {0};
    if (w->group == NULL) {
        return;
    }
    for (int i = 0; i < N_CHAINS; i++) {
        chain *each = &w->chains[i];
        if (each->session != NULL && n_tokens_of(each->session) < limit_of(each) && each != c) {
            tokens[n] = any_token(w);
            whose[n] = each;
            steps[n] = (dt_step){.session = each->session, .tokens = &tokens[n], .n = 1};
            n++;
        }
    }
    dt_session_stats stats;
    dt_session_get_stats(c->session, &stats);
    const int32_t chunk = least(least(stats.n_batch, 64), limit_of(c) - stats.n_tokens - 10);
    if (chunk > 0) {
        for (int32_t i = 0; i < chunk; i++) {
            prompt[i] = any_token(w);
        }
        whose[n] = c;
        steps[n++] = (dt_step){.session = c->session, .tokens = prompt, .n = chunk, .n_follow = 10};
    }
    expect_ok(w, dt_group_step(w->group, steps, (size_t)n, &error), &error);
    for (int32_t i = 0; i < n; i++) {
        const bool decoded = steps[i].n_follow == 0;
        record(&whose[i]->past, (op){.kind = decoded ? APPEND : SYNC, .end = n_tokens_of(whose[i]->session)});
        whose[i]->past.comparable = whose[i]->past.comparable && (decoded || whose[i]->past.setting == 0);
        check(w, whose[i]);
    }
}

typedef struct action {
    const char *name;
    void (*run)(world *, chain *);
    int share;
} action;

static const action actions[] = {{"extend", extend, 5}, {"take back", take_back, 6}, {"append", append, 4},    {"score", score, 2},
                                 {"reply", reply, 6},   {"fork", fork_chain, 4},     {"save", save, 2},        {"load", load, 2},
                                 {"cancel", cancel, 1}, {"misuse", misuse, 1},       {"together", together, 3}};

static const action *any_action(world *w) {
    int total = 0;
    for (size_t i = 0; i < sizeof actions / sizeof actions[0]; i++) {
        total += actions[i].share;
    }
    int at = (int)draw(w, (uint32_t)total);
    size_t i = 0;
    while (at >= actions[i].share) {
        at -= actions[i++].share;
    }
    return &actions[i];
}

static int64_t run_world(const fixture *f, int number) {
    world w = {.f = f, .number = number, .state = (uint64_t)number * 7919 + 17};
    static const int32_t contexts[] = {96, 160, 512}, batches[] = {1, 7, 16, 32, 64, 512};
    dt_error error = {0};
    for (int i = 0; i < 8; i++) {
        draw(&w, 2);
    }
    w.which = draw(&w, 3) == 0;
    w.params = (dt_session_params){
        .n_ctx = contexts[draw(&w, 3)],
        .n_batch = batches[draw(&w, 6)],
        .n_threads = 1, /* more spin where the processors are busy; that they change nothing is tested elsewhere */
        .kv_type = draw(&w, 3) == 0 ? DT_KV_INT8 : DT_KV_F16,
        .prefill = draw(&w, 2) == 0 ? DT_PREFILL_FULL : DT_PREFILL_STREAMING,
        .kv_block_tokens = draw(&w, 2) == 0 ? 16 : 48,
        .n_snapshots = draw(&w, 3) == 0 ? -1 : (int32_t)draw(&w, 5)};
    const dt_group_params group = {.n_threads = w.params.n_threads};
    if (draw(&w, 3) == 0) {
        expect_ok(&w, dt_group_new(f->models[w.which], &group, &w.group, &error), &error);
    }
    for (int i = 0; i < OPS_PER_WORLD; i++) {
        chain *c = &w.chains[draw(&w, N_CHAINS)];
        if (c->session == NULL || draw(&w, 40) == 0) {
            close_chain(c);
            open_chain(&w, c);
        }
        const action *a = any_action(&w);
        w.doing = a->name;
        w.n_done = i;
        if (getenv("DT_TEST_RANDOM_SHOW")) {
            printf("%d.%d %s chain %d setting %d tokens %d\n", number, i, a->name, (int)(c - w.chains), c->past.setting,
                   n_tokens_of(c->session));
        }
        a->run(&w, c);
        for (int j = 0; j < N_CHAINS; j++) {
            check(&w, &w.chains[j]);
        }
        if (draw(&w, 2) == 0) {
            compare(&w, c);
        }
    }
    for (int i = 0; i < N_CHAINS; i++) {
        close_chain(&w.chains[i]);
    }
    dt_group_free(w.group);
    return w.n_compared;
}

static void test_any_order(void **state) {
    const char *n_text = getenv("DT_TEST_RANDOM"), *first_text = getenv("DT_TEST_RANDOM_FIRST");
    const int n = n_text ? atoi(n_text) : 12, first = first_text ? atoi(first_text) : 0;
    int64_t n_compared = 0;
    for (int i = first; i < first + n; i++) {
        n_compared += run_world(*state, i);
    }
    print_message("%d operations, %d sessions compared\n", n * OPS_PER_WORLD, (int)n_compared);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_any_order)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
