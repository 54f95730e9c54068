#include "support/real_model.h"

#include "support/cmocka_all.h"
#include "support/compare.h"
#include "support/fixture.h"
#include "support/oracle.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define N_CTX 2560
/* On 4-bit weights, which round activations to 8 bits, libllama's two ways of computing attention differ by about a third of the
 * logits' standard deviation at the worst of 49,152 tokens. We may be so many times as far from it as it is from itself. */
#define OF_ITS_OWN_SPREAD 2.0

typedef struct fixture {
    dt_model *model;
    const char *path;
    size_t n_vocab, n_tokens;
    int32_t *tokens;
} fixture;

static const char *model_path;

static int setup(void **state) {
    const char *path = model_path, *text_path = getenv("DT_TEST_TEXT");
    if (!path || access(path, R_OK) != 0 || !text_path) {
        *state = NULL;
        return 0;
    }
    fixture *f = calloc(1, sizeof *f);
    f->path = path;
    f->model = open_model(path, false);
    f->n_vocab = (size_t)dt_model_get_info(f->model)->n_vocab;
    size_t n_bytes;
    char *text = read_whole_file(text_path, &n_bytes);
    dt_error error = {0};
    assert_int_equal(dt_tokenize(f->model, text, n_bytes, true, false, &f->tokens, &f->n_tokens, &error), DT_OK);
    assert_true(f->n_tokens > N_CTX);
    free(text);
    *state = f;
    return 0;
}

static int teardown(void **state) {
    fixture *f = *state;
    if (f) {
        dt_free(f->tokens);
        dt_model_close(f->model);
        free(f);
    }
    return 0;
}

/* Two oracles that took the same path as the session: with flash attention and without. */
typedef struct oracles {
    oracle *plain, *flash;
} oracles;

static oracles open_oracles(const fixture *f, int32_t n_prompt) {
    const oracles o = {oracle_open(f->path, N_CTX, false), oracle_open(f->path, N_CTX, true)};
    assert_non_null(o.plain);
    assert_non_null(o.flash);
    assert_true(oracle_decode(o.plain, f->tokens, n_prompt, NULL));
    assert_true(oracle_decode(o.flash, f->tokens, n_prompt, NULL));
    return o;
}

static void close_oracles(oracles o) {
    oracle_close(o.plain);
    oracle_close(o.flash);
}

/* All continue greedily with the plain oracle's token, so that one near tie does not end the comparison. */
static void follow(const fixture *f, dt_session *session, oracles o, int32_t token, int32_t n_steps) {
    float *want = malloc(2 * f->n_vocab * sizeof *want), *other = want + f->n_vocab;
    double worst = 0.0, spread = 0.0, widest_tie = 0.0;
    int32_t same = 0, own_same = 0;
    for (int32_t i = 0; i < n_steps; i++) {
        append_token(session, token);
        assert_true(oracle_decode(o.plain, &token, 1, want));
        assert_true(oracle_decode(o.flash, &token, 1, other));
        const double error = logit_error(dt_session_logits(session), want, f->n_vocab), own = logit_error(other, want, f->n_vocab);
        worst = error > worst ? error : worst;
        spread = own > spread ? own : spread;
        token = argmax(want, f->n_vocab);
        const bool equal = argmax(dt_session_logits(session), f->n_vocab) == token;
        const double gap = top_gap(want, f->n_vocab);
        widest_tie = !equal && gap > widest_tie ? gap : widest_tie;
        same += equal;
        own_same += argmax(other, f->n_vocab) == token;
    }
    print_message("worst logit error %.3f (libllama's own spread %.3f), %d of %d greedy tokens equal (libllama's own: %d)\n", worst,
                  spread, same, n_steps, own_same);
    assert_true(worst <= OF_ITS_OWN_SPREAD * spread);
    assert_true(widest_tie <= OF_ITS_OWN_SPREAD * spread);
    assert_true(same + n_steps / 10 >= own_same); /* ties fall differently in a tenth of the steps more, at the most */
    free(want);
}

/* Invariant 2. */
static void test_off_is_llama(void **state) {
    const fixture *f = *state;
    if (!f) {
        skip();
        return;
    }
    enum { N = 1500 };
    const dt_session_params params = {.n_threads = 2, .n_ctx = N_CTX};
    dt_session *session = open_session(f->model, &params);
    const oracles o = open_oracles(f, N);
    sync_tokens(session, f->tokens, N);
    follow(f, session, o, f->tokens[N], 48);
    close_oracles(o);
    dt_session_free(session);
}

/* Invariant 3 on the real model. */
static void test_local_window_is_removing_the_middle(void **state) {
    const fixture *f = *state;
    if (!f) {
        skip();
        return;
    }
    enum { N = 1500, LOW = 480 };
    dt_eviction *eviction =
        eviction_from_json(f->model, "{\"0-\": {\"policy\": \"local_window\", \"max_cache_size\": 512, \"min_cache_size\": 256}}");
    const dt_session_params params = {.n_threads = 2, .n_ctx = N_CTX, .eviction = eviction};
    dt_session *session = open_session(f->model, &params);
    const oracles o = open_oracles(f, N);
    sync_tokens(session, f->tokens, N);
    oracle_remove(o.plain, 4, N - (LOW - 4));
    oracle_remove(o.flash, 4, N - (LOW - 4));
    follow(f, session, o, f->tokens[N], 24); /* fewer steps than tokens to the next round */
    close_oracles(o);
    dt_session_free(session);
    dt_eviction_free(eviction);
}

/* Invariant 1 on the real model, both prefill modes. */
static void test_budget_not_reached_is_off(void **state) {
    const fixture *f = *state;
    if (!f) {
        skip();
        return;
    }
    dt_eviction *eviction = eviction_from_json(f->model, "{\"0-\": {\"policy\": \"importance_score\", \"max_cache_size\": 1000}}");
    dt_session_params params = {.n_threads = 2, .n_ctx = N_CTX};
    dt_session *off = open_session(f->model, &params);
    params.eviction = eviction;
    params.prefill = DT_PREFILL_STREAMING;
    dt_session *on = open_session(f->model, &params);
    int32_t out_off[32], out_on[32];
    sync_tokens(off, f->tokens, 900);
    sync_tokens(on, f->tokens, 900);
    greedy(off, (int32_t)f->n_vocab, out_off, 32);
    greedy(on, (int32_t)f->n_vocab, out_on, 32);
    assert_memory_equal(out_off, out_on, sizeof out_off);
    dt_session_free(off);
    dt_session_free(on);
    dt_eviction_free(eviction);
}

/* Kullback-Leibler divergence of the next-token distributions of two rows of logits. */
static double divergence(const float *p_logits, const float *q_logits, size_t n) {
    double p_sum = 0, q_sum = 0, sum = 0;
    const double p_max = (double)p_logits[argmax(p_logits, n)], q_max = (double)q_logits[argmax(q_logits, n)];
    for (size_t i = 0; i < n; i++) {
        p_sum += exp((double)p_logits[i] - p_max);
        q_sum += exp((double)q_logits[i] - q_max);
    }
    for (size_t i = 0; i < n; i++) {
        const double p = (double)p_logits[i] - p_max - log(p_sum), q = (double)q_logits[i] - q_max - log(q_sum);
        sum += exp(p) * (p - q);
    }
    return sum;
}

/* What the last tokens' distributions of two sessions differ by, over the tokens that follow the n that both have read. */
static double mean_divergence(const fixture *f, dt_session *a, dt_session *b, size_t n, size_t n_steps) {
    double sum = 0;
    for (size_t i = 0; i < n_steps; i++) {
        const float *want = dt_session_logits(a), *got = dt_session_logits(b);
        assert_true(all_finite(want, f->n_vocab) && all_finite(got, f->n_vocab));
        sum += divergence(want, got, f->n_vocab);
        append_token(a, f->tokens[n + i]);
        append_token(b, f->tokens[n + i]);
    }
    return sum / (double)n_steps;
}

/*
 * An INT8 cache, with eviction in both, keeps the distributions (cases.md row 6). local_window: both keep the same tokens. What is
 * little depends on the model: other rounding of an F16 cache alone costs 0.004 on SmolLM2 and 0.014 to 0.04 on Gemma 3 270M, by
 * the kernel, where libllama is 0.02 from itself; so that is the measure, besides what INT8 may cost where rounding costs nothing.
 */
static void test_int8_changes_little(void **state) {
    const fixture *f = *state;
    if (!f) {
        skip();
        return;
    }
    enum { N = 700, STEPS = 64 };
    dt_eviction *eviction = eviction_from_json(f->model, "{\"0-\": {\"policy\": \"local_window\", \"max_cache_size\": 256}}");
    const dt_session_params f16 = {.n_threads = 2, .n_ctx = N_CTX, .eviction = eviction};
    dt_session_params reference = f16, int8 = f16;
    reference.kernel = "reference";
    int8.kv_type = DT_KV_INT8;
    double cost[2];
    const dt_session_params *const others[] = {&reference, &int8};
    for (int i = 0; i < 2; i++) {
        dt_session *a = open_session(f->model, &f16), *b = open_session(f->model, others[i]);
        sync_tokens(a, f->tokens, N);
        sync_tokens(b, f->tokens, N);
        cost[i] = mean_divergence(f, a, b, N, STEPS);
        dt_session_free(a);
        dt_session_free(b);
    }
    print_message("mean KL divergence from F16: %.5f by rounding, %.5f by INT8\n", cost[0], cost[1]);
    assert_true(cost[1] > 0);
    assert_true(cost[1] <= 0.01 + 3 * cost[0]);
    dt_eviction_free(eviction);
}

int run_real_model_tests(const char *path) {
    model_path = path;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_off_is_llama),
        cmocka_unit_test(test_local_window_is_removing_the_middle),
        cmocka_unit_test(test_budget_not_reached_is_off),
        cmocka_unit_test(test_int8_changes_little),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
