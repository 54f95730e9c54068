/*
 * Every model family against libllama on the same file, over head layouts: logits within tolerance, greedy tokens equal; and the
 * invariants of caching on each of them: eviction in both prefill modes equals the scalar reference with the victims masked.
 * Models are tiny and random, laid out as each family's files are.
 */
#include "support/cmocka_all.h"
#include "support/compare.h"
#include "support/fixture.h"
#include "support/oracle.h"
#include "support/versus.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Share of the logits' standard deviation by which the fast kernels may differ from the reference, after many steps. In an INT8
 * cache a difference in the last bit may become one of a 127th. */
#define TOLERANCE 0.01
#define TOLERANCE_INT8 0.1

typedef struct heads {
    int32_t n_heads, n_kv_heads, head_dim, n_embd; /* n_embd 0: n_heads * head_dim */
} heads;

/* A family: what its files differ in from the default tiny model, and the head layouts it is tried with. */
typedef struct family {
    const char *name, *arch;
    int32_t n_layers, window, window_period, n_experts, n_experts_used;
    heads layouts[4];
} family;

static const family families[] = {
    {"qwen2", "qwen2", .n_layers = 2, .layouts = {{4, 2, 16, 0}, {14, 2, 64, 0}, {12, 2, 128, 0}, {7, 1, 80, 0}}},
    {"qwen3", "qwen3", .n_layers = 2, .layouts = {{4, 2, 16, 0}, {16, 8, 128, 512}, {6, 1, 64, 192}, {3, 3, 40, 64}}},
    {"gemma3", "gemma3", .n_layers = 7, .window = 20, .layouts = {{4, 1, 64, 160}, {4, 2, 96, 0}, {2, 2, 256, 192}}},
    {"gemma3 every second", "gemma3", .n_layers = 4, .window = 9, .window_period = 2, .layouts = {{8, 4, 32, 0}}},
    {"gemma3 no window", "gemma3", .n_layers = 2, .layouts = {{4, 1, 32, 0}}},
    {"chatglm", "chatglm", .n_layers = 2, .layouts = {{4, 2, 32, 0}, {16, 2, 64, 0}, {8, 1, 128, 0}, {3, 3, 80, 0}}},
    {"glm4", "glm4", .n_layers = 2, .layouts = {{4, 2, 32, 0}, {12, 2, 128, 256}, {8, 1, 64, 0}, {5, 5, 40, 96}}},
    {"qwen", "qwen", .n_layers = 2, .layouts = {{4, 4, 32, 0}, {2, 2, 128, 0}, {3, 3, 80, 0}}},
    {"qwen3moe", "qwen3moe", .n_layers = 2, .n_experts = 8, .n_experts_used = 3, .layouts = {{8, 2, 64, 128}, {4, 4, 32, 0}}},
    {"mixtral", "llama", .n_layers = 2, .n_experts = 4, .n_experts_used = 1, .layouts = {{8, 2, 32, 0}, {4, 1, 64, 0}}},
    {"smollm3", "smollm3", .n_layers = 5, .layouts = {{4, 1, 32, 0}, {16, 4, 128, 256}, {6, 2, 64, 0}}},
    {"llama", "llama", .n_layers = 2, .layouts = {{6, 2, 48, 0}}},
};
#define N_FAMILIES (sizeof families / sizeof families[0])

static tiny_model_params params_of(const family *f, const heads *h) {
    tiny_model_params p = tiny_model_default_params();
    p.arch = f->arch;
    p.n_layers = f->n_layers;
    p.n_heads = h->n_heads;
    p.n_kv_heads = h->n_kv_heads;
    p.head_dim = h->head_dim;
    p.n_embd = h->n_embd > 0 ? h->n_embd : h->n_heads * h->head_dim;
    p.n_ff = 160;
    p.window = f->window;
    p.window_period = f->window_period;
    p.n_experts = f->n_experts;
    p.n_experts_used = f->n_experts_used;
    p.rope_base = 100000.0f;
    return p;
}

static void test_equals_oracle(void **state) {
    (void)state;
    for (size_t f = 0; f < N_FAMILIES; f++) {
        for (size_t i = 0; i < 4 && families[f].layouts[i].n_heads > 0; i++) {
            tiny_model_params p = params_of(&families[f], &families[f].layouts[i]);
            p.tied = i % 2 == 1 && strcmp(p.arch, "qwen") != 0; /* libllama wants Qwen 1 untied */
            p.seed = 200 + 10 * f + i;
            char name[64];
            snprintf(name, sizeof name, "%s %d/%d of %d", families[f].name, p.n_heads, p.n_kv_heads, p.head_dim);
            assert_equals_oracle(name, write_tiny(&p));
        }
    }
}

/* ---- eviction ---- */

static void test_eviction(void **state) {
    (void)state;
    for (size_t f = 0; f < N_FAMILIES; f++) {
        tiny_model_params p = params_of(&families[f], &families[f].layouts[0]);
        p.seed = 300 + f;
        dt_model *model = open_model(write_tiny(&p), true);
        assert_eviction_is_hiding(families[f].name, model, DT_PREFILL_FULL, DT_KV_F16, "importance_score", TOLERANCE);
        assert_eviction_is_hiding(families[f].name, model, DT_PREFILL_STREAMING, DT_KV_F16, "local_window", TOLERANCE);
        assert_eviction_is_hiding(families[f].name, model, DT_PREFILL_FULL, DT_KV_INT8, "local_window", TOLERANCE_INT8);
        assert_eviction_is_hiding(families[f].name, model, DT_PREFILL_STREAMING, DT_KV_INT8, "importance_score", TOLERANCE_INT8);
        dt_model_close(model);
    }
}

/* ---- sliding windows (cases.md row 8) ---- */

enum { WINDOW = 64, TURN = 20, TURNS = 27, LOCAL_LAYER = 0, GLOBAL_LAYER = 2 };

static const char *write_windowed(void) {
    const family f = {"windows", "gemma3", .n_layers = 3, .window = WINDOW, .window_period = 3};
    const heads h = {4, 2, 32, 0};
    tiny_model_params p = params_of(&f, &h);
    p.n_ctx = 1024;
    return write_tiny(&p);
}

static int32_t length_of(const dt_session *session, int32_t layer) {
    dt_layer_stats stats;
    assert_int_equal(dt_session_get_layer_stats(session, layer, &stats), DT_OK);
    return stats.length;
}

/* Many turns: as libllama has it, with a local layer's memory bounded; and the last turn again computes no more than that turn. */
static void test_window_memory(void **state) {
    (void)state;
    const char *path = write_windowed();
    dt_model *model = open_model(path, true);
    const size_t n_vocab = (size_t)dt_model_get_info(model)->n_vocab;
    const dt_session_params params = {.n_threads = 1, .kv_block_tokens = 16};
    dt_session *session = open_session(model, &params);
    oracle *o = oracle_open(path, 1024, false);
    assert_non_null(o);
    int32_t tokens[TURN * TURNS];
    random_tokens(tokens, TURN * TURNS, 3, (int32_t)n_vocab, 21);
    float *want = malloc(TURN * n_vocab * sizeof *want), *before = malloc(n_vocab * sizeof *before);
    for (size_t n = TURN; n <= TURN * TURNS; n += TURN) {
        assert_int_equal(sync_tokens(session, tokens, n).computed_tokens, TURN);
        assert_true(oracle_decode(o, tokens + n - TURN, TURN, want));
        const double error = logit_error(dt_session_logits(session), want + (TURN - 1) * n_vocab, n_vocab);
        assert_true(error <= 2 * TOLERANCE);
        assert_true(length_of(session, LOCAL_LAYER) <= WINDOW + (4 + 1) * 16 + TURN);
        assert_int_equal(length_of(session, GLOBAL_LAYER), n);
    }
    memcpy(before, dt_session_logits(session), n_vocab * sizeof *before);
    tokens[TURN * (TURNS - 1)] ^= 1; /* another last turn, then the same once more */
    dt_sync_result r = sync_tokens(session, tokens, TURN * TURNS);
    assert_int_equal(r.reused_tokens, TURN * (TURNS - 1));
    tokens[TURN * (TURNS - 1)] ^= 1;
    r = sync_tokens(session, tokens, TURN * TURNS);
    assert_int_equal(r.how, DT_SYNC_REWOUND);
    assert_int_equal(r.reused_tokens, TURN * (TURNS - 1));
    assert_true(logit_error(dt_session_logits(session), before, n_vocab) <= TOLERANCE); /* entries may lie in another order */
    tokens[TURN] ^= 1; /* further back than the local layers remember */
    r = sync_tokens(session, tokens, TURN * TURNS);
    assert_int_equal(r.how, DT_SYNC_REBUILT);
    free(before);
    free(want);
    oracle_close(o);
    dt_session_free(session);
    dt_model_close(model);
}

/* Budgets below, at and above the window: what a window still sees goes only where the budget is below it, and what is computed is
 * always the reference's with the victims hidden. */
static void test_window_and_budget(void **state) {
    (void)state;
    static const char *const policies[] = {"local_window", "importance_score"};
    static const int32_t budgets[] = {32, WINDOW - 1, WINDOW, 2 * WINDOW};
    dt_model *model = open_model(write_windowed(), true);
    const size_t n_vocab = (size_t)dt_model_get_info(model)->n_vocab;
    int32_t tokens[TURN * TURNS];
    random_tokens(tokens, TURN * TURNS, 3, (int32_t)n_vocab, 22);
    for (int i = 0; i < 8; i++) {
        const int32_t budget = budgets[i / 2];
        char json[256];
        snprintf(json, sizeof json, "{\"0-\": {\"policy\": \"%s\", \"max_cache_size\": %d, \"min_cache_size\": 8}}",
                 policies[i % 2], budget);
        dt_eviction *eviction = eviction_from_json(model, json);
        char *text = NULL;
        dt_error error = {0};
        assert_int_equal(dt_eviction_describe(eviction, &text, &error), DT_OK);
        assert_int_equal(strstr(text, "evicted from inside") != NULL, budget < WINDOW - 1);
        dt_free(text);
        /* small chunks: where positions for one more run short, what was kept moves together */
        dt_session_params params = {.n_threads = 1, .n_batch = 64, .kv_block_tokens = 16, .eviction = eviction};
        dt_session *session = open_session(model, &params);
        params.eviction = NULL;
        params.kernel = "reference";
        dt_session *full = open_session(model, &params);
        for (size_t n = TURN; n <= TURN * TURNS; n += TURN) {
            sync_tokens(session, tokens, n);
            sync_tokens(full, tokens, n);
            assert_true(logit_error(dt_session_logits(session), dt_session_logits(full), n_vocab) <= TOLERANCE);
            hide_evicted(full, session);
            int32_t *kept;
            size_t n_kept;
            assert_int_equal(dt_session_kept_positions(session, LOCAL_LAYER, 0, &kept, &n_kept, &error), DT_OK);
            const size_t seen = n < WINDOW - 1 ? n : WINDOW - 1; /* by the next token */
            assert_true(n_kept <= (size_t)budget);
            if (budget >= WINDOW - 1) {
                assert_true(n_kept >= seen && kept[n_kept - seen] == (int32_t)(n - seen));
            }
            dt_free(kept);
        }
        dt_session_free(full);
        dt_session_free(session);
        dt_eviction_free(eviction);
    }
    dt_model_close(model);
}

/* A window in every layer of a llama model (Mistral): libllama has none there; its cache loses by hand what the window passes. */
static void test_mistral_window(void **state) {
    (void)state;
    const family f = {"mistral", "llama", .n_layers = 3, .window = 24};
    const heads h = {8, 2, 32, 0};
    const tiny_model_params p = params_of(&f, &h);
    const char *path = write_tiny(&p);
    dt_model *model = open_model(path, true);
    const size_t n_vocab = (size_t)dt_model_get_info(model)->n_vocab;
    assert_int_equal(dt_model_get_info(model)->windows[2], 24);
    enum { N = 120 };
    int32_t tokens[N];
    random_tokens(tokens, N, 3, (int32_t)n_vocab, 23);
    const dt_session_params params = {.n_threads = 1, .n_batch = 32, .kv_block_tokens = 16};
    dt_session *session = open_session(model, &params);
    oracle *o = oracle_open(path, 256, false);
    assert_non_null(o);
    float *want = malloc(N * n_vocab * sizeof *want);
    for (int32_t i = 0; i < N; i++) {
        if (i >= 24) {
            oracle_remove(o, 0, i - 24 + 1);
        }
        assert_true(oracle_decode(o, tokens + i, 1, want + (size_t)i * n_vocab));
    }
    for (size_t n = 50; n <= N; n += n < 110 ? 30 : 1) { /* in chunks, then one by one */
        sync_tokens(session, tokens, n);
        assert_true(logit_error(dt_session_logits(session), want + (n - 1) * n_vocab, n_vocab) <= 2 * TOLERANCE);
    }
    free(want);
    oracle_close(o);
    dt_session_free(session);

    /* no query is further from a key than the window: with eviction on, the conversation may outgrow the context */
    dt_eviction *eviction = eviction_from_json(model, "{\"0-\": {\"policy\": \"local_window\", \"max_cache_size\": 100}}");
    for (int on = 0; on < 2; on++) {
        const dt_session_params longer = {
            .n_threads = 1, .n_ctx = 60, .eviction = on ? eviction : NULL, .prefill = DT_PREFILL_STREAMING};
        dt_error error = {0};
        session = open_session(model, &longer);
        assert_int_equal(dt_session_sync(session, tokens, N, NULL, NULL, NULL, &error), on ? DT_OK : DT_ERR_LIMIT);
        dt_session_free(session);
    }
    dt_eviction_free(eviction);
    dt_model_close(model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_equals_oracle),     cmocka_unit_test(test_eviction),       cmocka_unit_test(test_window_memory),
        cmocka_unit_test(test_window_and_budget), cmocka_unit_test(test_mistral_window),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
