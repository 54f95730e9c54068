/*
 * Snapshots: going back to where eviction has taken what a rewind needs. The oracle is a session that never went further.
 */
#include "engine/session.h"
#include "support/cmocka_all.h"
#include "support/compare.h"
#include "support/fixture.h"

#include <stdlib.h>
#include <string.h>

#define N_CTX 512
#define N_PROMPT 120
#define N_REPLY 60
#define SCORED "{\"0-\": {\"policy\": \"importance_score\", \"max_cache_size\": 48, \"recent_window\": 16}}"

#define SHARED                                                                                                                     \
    "{\"budget\": \"adaptive\", \"total_cache_size\": 100, \"layers\": {\"0-\": {\"policy\": \"importance_score\", "               \
    "\"sink_tokens\": 2, \"recent_window\": 8, \"min_cache_size\": 12}}}"

typedef engine_fixture fixture;

static int setup(void **state) {
    tiny_model_params p = tiny_model_default_params();
    p.n_ctx = N_CTX;
    *state = open_engine_fixture(&p, N_CTX, 5);
    return 0;
}

static dt_session *new_session_of(const fixture *f, const dt_session_params *given, const char *json) {
    dt_eviction *eviction = eviction_from_json(f->model, json);
    dt_session_params params = *given;
    params.n_threads = 1;
    params.n_batch = 32;
    params.kv_block_tokens = 16;
    params.eviction = eviction;
    dt_session *s = open_session(f->model, &params);
    dt_eviction_free(eviction);
    return s;
}

static dt_session *new_session(const fixture *f, const dt_session_params *given) { return new_session_of(f, given, SCORED); }

/* The conversation after `n` tokens and a reply of the session's own. */
static size_t answer(const fixture *f, dt_session *s, int32_t *conversation, size_t n) {
    greedy(s, (int32_t)f->n_vocab, conversation + n, N_REPLY);
    return n + N_REPLY;
}

static void assert_same_state(const fixture *f, dt_session *a, dt_session *b) {
    int32_t x[N_REPLY], y[N_REPLY];
    assert_memory_equal(dt_session_logits(a), dt_session_logits(b), f->n_vocab * sizeof(float));
    greedy(a, (int32_t)f->n_vocab, x, N_REPLY);
    greedy(b, (int32_t)f->n_vocab, y, N_REPLY);
    assert_memory_equal(x, y, sizeof x);
    assert_memory_equal(dt_session_logits(a), dt_session_logits(b), f->n_vocab * sizeof(float));
}

/* The same question again, as often as one likes: nothing is computed, and the reply is that of the first time. */
static void test_another_reply(void **state) {
    const fixture *f = *state;
    for (int past = 0; past < 2; past++) { /* the context */
        const dt_session_params params = {.n_ctx = past ? 150 : 0};
        dt_session *s = new_session(f, &params), *fresh = new_session(f, &params);
        int32_t conversation[N_CTX];
        memcpy(conversation, f->tokens, sizeof conversation);
        sync_tokens(s, conversation, N_PROMPT);
        for (int again = 0; again < 3; again++) {
            answer(f, s, conversation, N_PROMPT);
            assert_true(s->whole_from > N_PROMPT);
            const dt_sync_result r = sync_tokens(s, conversation, N_PROMPT);
            assert_int_equal(r.how, DT_SYNC_REWOUND);
            assert_int_equal(r.reused_tokens, N_PROMPT);
            assert_int_equal(r.computed_tokens, 0);
        }
        sync_tokens(fresh, f->tokens, N_PROMPT);
        assert_same_state(f, s, fresh);
        assert_int_equal(dt_kv_shift(s->kv) > 0, past);
        dt_session_free(s);
        dt_session_free(fresh);
    }
}

static void assert_same_scores(const fixture *f, dt_session *a, dt_session *b) {
    const dt_model_info *info = dt_model_get_info(f->model);
    for (int32_t layer = 0; layer < info->n_layers; layer++) {
        for (int32_t lane = 0; lane < info->n_kv_heads[layer]; lane++) {
            dt_kv_lane_view x, y;
            dt_kv_lane(a->kv, layer, lane, &x);
            dt_kv_lane(b->kv, layer, lane, &y);
            assert_int_equal(x.n_entries, y.n_entries);
            const size_t bytes = (size_t)x.n_entries * sizeof(float);
            assert_memory_equal(x.recent_mass, y.recent_mass, bytes);
            assert_memory_equal(x.value_norm, y.value_norm, bytes);
        }
    }
}

/* Nothing was evicted, so that the tokens could just be cut off: the attention that they gave must be gone too. Back to where the
 * reply began, and to a few tokens behind. */
static void test_scores_forget_what_is_taken_back(void **state) {
    const fixture *f = *state;
    for (int32_t more = 0; more <= 8; more += 4) {
        const dt_session_params params = {.n_ctx = 0};
        dt_session *s = new_session(f, &params), *fresh = new_session(f, &params);
        int32_t conversation[N_CTX];
        memcpy(conversation, f->tokens, sizeof conversation);
        sync_tokens(s, conversation, 30); /* 48 fit */
        for (int32_t i = 30; i < 45; i++) {
            assert_int_equal(dt_session_append(s, conversation[i], NULL), DT_OK);
        }
        assert_int_equal(s->whole_from, 0);
        for (int32_t i = 30 + more; i < 60; i++) {
            conversation[i] = conversation[i] == 5 ? 6 : 5;
        }
        const dt_sync_result r = sync_tokens(s, conversation, 30 + (size_t)more + (more > 0 ? 2 : 0));
        assert_int_equal(r.how, DT_SYNC_REWOUND);
        assert_int_equal(r.reused_tokens, 30);
        sync_tokens(fresh, conversation, 30);
        if (more > 0) {
            sync_tokens(fresh, conversation, 32 + (size_t)more);
        }
        assert_same_scores(f, s, fresh);
        assert_same_state(f, s, fresh);
        assert_same_scores(f, s, fresh);
        dt_session_free(s);
        dt_session_free(fresh);
    }
}

/* The same without snapshots, as in a server, where the text that is taken back may be another's: nothing of it is left. More tokens than
 * are read again have been observed before, so that the scores are not those of the whole text, but they are the same after any. */
static void test_scores_begin_anew(void **state) {
    const fixture *f = *state;
    dt_eviction *eviction = eviction_from_json(f->model, "{\"0-\": {\"policy\": \"importance_score\", \"max_cache_size\": 200}}");
    for (int32_t shared = 40; shared <= 160; shared += 60) {
        dt_session *forks[2] = {NULL};
        for (int i = 0; i < 2; i++) {
            const dt_session_params params = {
                .n_threads = 1, .n_batch = 32, .kv_block_tokens = 16, .n_snapshots = -1, .eviction = eviction};
            dt_session *other = open_session(f->model, &params);
            dt_error error;
            int32_t conversation[N_CTX];
            memcpy(conversation, f->tokens, sizeof conversation);
            sync_tokens(other, conversation, (size_t)shared);
            for (int32_t j = shared; j < shared + 35; j++) {
                assert_int_equal(dt_session_append(other, conversation[j + i * 100], NULL), DT_OK);
            }
            assert_int_equal(other->whole_from, 0);
            assert_int_equal(dt_session_fork(other, eviction, DT_EVICT_ALWAYS, &forks[i], &error), DT_OK);
            memcpy(conversation + shared, f->tokens + 300, 100 * sizeof *conversation);
            conversation[shared] = 7;
            const dt_sync_result r = sync_tokens(forks[i], conversation, (size_t)shared + 5);
            assert_int_equal(r.reused_tokens, shared > DT_REPLAYED_TOKENS ? shared - DT_REPLAYED_TOKENS : 0);
            assert_int_equal(dt_session_check(forks[i], &error), DT_OK);
            dt_session_free(other);
        }
        assert_same_scores(f, forks[0], forks[1]);
        assert_same_state(f, forks[0], forks[1]); /* over a round */
        assert_same_scores(f, forks[0], forks[1]);
        dt_session_free(forks[0]);
        dt_session_free(forks[1]);
    }
    dt_eviction_free(eviction);
}

/* A template that writes the last reply differently, then a changed earlier question. */
static void test_a_rewritten_turn(void **state) {
    const fixture *f = *state;
    const dt_session_params params = {.n_ctx = 0};
    dt_session *s = new_session(f, &params), *fresh = new_session(f, &params);
    int32_t conversation[N_CTX];
    memcpy(conversation, f->tokens, sizeof conversation);
    sync_tokens(s, conversation, N_PROMPT);
    size_t n = answer(f, s, conversation, N_PROMPT);
    sync_tokens(s, conversation, n + 30); /* the next question */
    answer(f, s, conversation, n + 30);
    assert_int_equal(s->n_snapshots, 2);

    memcpy(conversation + N_PROMPT + 3, f->tokens + 300, 40 * sizeof *conversation);
    conversation[N_PROMPT + 3] = conversation[N_PROMPT + 3] == 5 ? 6 : 5;
    dt_sync_result r = sync_tokens(s, conversation, N_PROMPT + 43);
    assert_int_equal(r.how, DT_SYNC_REWOUND);
    assert_true(r.reused_tokens >= N_PROMPT && r.reused_tokens <= N_PROMPT + 3);
    assert_int_equal(s->n_snapshots, 1);
    sync_tokens(fresh, f->tokens, N_PROMPT);
    sync_tokens(fresh, conversation, N_PROMPT + 43);
    assert_same_state(f, s, fresh);

    conversation[2] = conversation[2] == 5 ? 6 : 5; /* before every snapshot */
    r = sync_tokens(s, conversation, N_PROMPT);
    assert_int_equal(r.how, DT_SYNC_REBUILT);
    assert_int_equal(s->n_snapshots, 1);
    dt_session_free(s);
    dt_session_free(fresh);
}

static void test_none_when_none_are_wanted(void **state) {
    const fixture *f = *state;
    const dt_session_params params = {.n_snapshots = -1};
    dt_session *s = new_session(f, &params);
    int32_t conversation[N_CTX];
    memcpy(conversation, f->tokens, sizeof conversation);
    sync_tokens(s, conversation, N_PROMPT);
    answer(f, s, conversation, N_PROMPT);
    assert_int_equal(s->n_snapshots, 0);
    assert_int_equal(sync_tokens(s, conversation, N_PROMPT).how, DT_SYNC_REBUILT);
    dt_session_free(s);
}

/* What the log said before the first token, and --kv-memory, hold with snapshots too; with little room they go and the replies
 * stay. */
static void test_they_make_room(void **state) {
    const fixture *f = *state;
    for (int i = 0; i < 6; i++) {
        static int32_t replies[3][4 * N_REPLY];
        const int kind = i % 3;
        const char *json = i < 3 ? SCORED : SHARED;
        dt_session_params params = {.prefill = DT_PREFILL_STREAMING, .n_snapshots = kind == 0 ? -1 : 4};
        dt_session *s = new_session_of(f, &params, json);
        const uint64_t most = s->kv_most;
        if (kind == 2) { /* just enough for the cache */
            dt_session_free(s);
            params.kv_memory = most;
            s = new_session_of(f, &params, json);
            assert_int_equal(s->params.n_batch, 32);
        }
        int32_t conversation[N_CTX];
        memcpy(conversation, f->tokens, sizeof conversation);
        size_t n = 40;
        for (int turn = 0; turn < 4; turn++) {
            const dt_sync_result r = sync_tokens(s, conversation, n);
            assert_true(turn == 0 || r.computed_tokens == 30);
            n = answer(f, s, conversation, n);
            memcpy(replies[kind] + turn * N_REPLY, conversation + n - N_REPLY, N_REPLY * sizeof **replies);
            n += 30;
            assert_true(atomic_load(&s->kv_memory->memory.bytes_peak) <= most);
        }
        while (dt_snapshot_yield(s)) {
        }
        assert_int_equal(s->kv_memory->memory.limit, kind == 2 ? most : 0);
        assert_int_equal(atomic_load(&s->kv_memory->memory.bytes), dt_kv_bytes(s->kv)); /* nothing is left behind */
        dt_session_free(s);
        assert_memory_equal(replies[0], replies[kind], sizeof replies[0]);
    }
}

/* Every allocation of the cache fails in turn while snapshots are held: they go, or the call fails, and the session goes on. */
static void test_failing_allocations(void **state) {
    const fixture *f = *state;
    const dt_session_params params = {.n_ctx = 0};
    int32_t conversation[N_CTX], want[N_REPLY];
    memcpy(conversation, f->tokens, sizeof conversation);
    for (long long left = 0, done = 0; done == 0; left += 1 + left / 8) {
        dt_session *s = new_session(f, &params);
        dt_error error = {0};
        sync_tokens(s, conversation, N_PROMPT);
        answer(f, s, conversation, N_PROMPT);
        atomic_store(&s->kv_memory->memory.fail_after, left);
        const dt_status status = dt_session_sync(s, conversation, N_PROMPT + 20, NULL, NULL, NULL, &error);
        assert_true(status == DT_OK || status == DT_ERR_MEMORY);
        assert_int_equal(dt_session_check(s, &error), DT_OK);
        done = atomic_load(&s->kv_memory->memory.fail_after) > 0;
        atomic_store(&s->kv_memory->memory.fail_after, -1);
        sync_tokens(s, conversation, N_PROMPT + 20);
        greedy(s, (int32_t)f->n_vocab, want, N_REPLY);
        dt_session_free(s);
    }
}

/* A session that shares memory with a fork keeps its hands off the fork's limit. */
static void test_forks_are_not_limited(void **state) {
    const fixture *f = *state;
    const dt_session_params params = {.prefill = DT_PREFILL_STREAMING};
    dt_session *s = new_session(f, &params), *fork = NULL;
    dt_error error = {0};
    sync_tokens(s, f->tokens, N_PROMPT);
    assert_true(s->kv_memory->memory.limit > 0);
    assert_int_equal(dt_session_fork(s, NULL, DT_EVICT_ALWAYS, &fork, &error), DT_OK);
    assert_int_equal(s->kv_memory->memory.limit, 0);
    sync_tokens(fork, f->tokens, 400);
    sync_tokens(s, f->tokens, 200);
    assert_int_equal(s->kv_memory->memory.limit, 0);
    dt_session_free(fork);
    dt_session_free(s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_another_reply),
        cmocka_unit_test(test_scores_forget_what_is_taken_back),
        cmocka_unit_test(test_scores_begin_anew),
        cmocka_unit_test(test_a_rewritten_turn),
        cmocka_unit_test(test_none_when_none_are_wanted),
        cmocka_unit_test(test_they_make_room),
        cmocka_unit_test(test_failing_allocations),
        cmocka_unit_test(test_forks_are_not_limited),
    };
    return cmocka_run_group_tests_name("snapshot", tests, setup, close_engine_fixture);
}
