#include "support/versus.h"

#include "support/cmocka_all.h"
#include "support/compare.h"
#include "support/fixture.h"
#include "support/oracle.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define N_PROMPT 75
#define N_GREEDY 40
/* Share of the logits' standard deviation. libllama rounds queries and probabilities to F16 for its products, we do not. */
#define TOLERANCE 0.02
/* Products with weights of few bits round the activations too (to BF16, to 8 bits), which magnifies any earlier difference. How
 * much, the oracle shows itself: with its two ways of computing attention. We may be this many times as far from it as it is from
 * itself. */
#define OF_ITS_OWN_SPREAD 2.5

/* How far libllama's logits are from its own with flash attention, over the prompt. */
static double own_spread(const char *path, const int32_t *tokens, const float *logits, size_t n_vocab) {
    oracle *flash = oracle_open(path, 256, true);
    assert_non_null(flash);
    float *other = malloc(N_PROMPT * n_vocab * sizeof *other);
    assert_true(oracle_decode(flash, tokens, N_PROMPT, other));
    double worst = 0.0;
    for (size_t i = 0; i < N_PROMPT; i++) {
        const double error = logit_error(other + i * n_vocab, logits + i * n_vocab, n_vocab);
        worst = error > worst ? error : worst;
    }
    free(other);
    oracle_close(flash);
    return worst;
}

/* Feeds `tokens` to both, the prompt in chunks of 32 to ours, then one by one, and compares the logits at each step. */
double assert_equals_oracle(const char *name, const char *path) {
    dt_model *model = open_model(path, false);
    const size_t n_vocab = (size_t)dt_model_get_info(model)->n_vocab;
    dt_session_params sp = {.n_ctx = 256, .n_batch = 32, .n_threads = 2, .kv_block_tokens = 16};
    dt_session *session = open_session(model, &sp);
    oracle *o = oracle_open(path, 256, false);
    assert_non_null(o);

    int32_t tokens[N_PROMPT + N_GREEDY];
    random_tokens(tokens, N_PROMPT, 3, (int32_t)n_vocab, 7);
    float *want = malloc(N_PROMPT * n_vocab * sizeof *want);
    assert_true(oracle_decode(o, tokens, N_PROMPT, want));
    sync_tokens(session, tokens, 40);
    double worst = 0.0;
    for (size_t i = 39;; i++) {
        const double error = logit_error(dt_session_logits(session), want + i * n_vocab, n_vocab);
        worst = error > worst ? error : worst;
        if (i + 1 == N_PROMPT) {
            break;
        }
        append_token(session, tokens[i + 1]);
    }
    /* greedy: equal tokens, but where the oracle itself hesitates within the tolerance; both go on with the oracle's token */
    const double spread = own_spread(path, tokens, want, n_vocab), tolerance = TOLERANCE + OF_ITS_OWN_SPREAD * spread;
    float *last = malloc(n_vocab * sizeof *last);
    memcpy(last, want + (N_PROMPT - 1) * n_vocab, n_vocab * sizeof *last);
    int32_t same = 0;
    for (int32_t i = 0; i < N_GREEDY; i++) {
        const int32_t theirs = argmax(last, n_vocab);
        const bool equal = argmax(dt_session_logits(session), n_vocab) == theirs;
        assert_true(equal || top_gap(last, n_vocab) <= 2 * tolerance);
        same += equal;
        append_token(session, theirs);
        assert_true(oracle_decode(o, &theirs, 1, last));
        const double error = logit_error(dt_session_logits(session), last, n_vocab);
        worst = error > worst ? error : worst;
    }
    print_message("%-24s worst logit error %.4f (libllama's own spread %.4f), %d of %d greedy tokens equal\n", name, worst, spread,
                  same, N_GREEDY);
    assert_true(worst <= tolerance);
    free(last);
    free(want);
    oracle_close(o);
    dt_session_free(session);
    dt_model_close(model);
    return tolerance;
}

void assert_eviction_is_hiding(const char *name, const dt_model *model, dt_prefill prefill, dt_kv_type kv_type, const char *policy,
                               double tolerance) {
    enum { N = 110, STEPS = 5 };
    const size_t n_vocab = (size_t)dt_model_get_info(model)->n_vocab;
    int32_t tokens[N + STEPS];
    random_tokens(tokens, N + STEPS, 3, (int32_t)n_vocab, 5);
    char json[256];
    double worst[2] = {0.0, 0.0};
    for (int reached = 0; reached < 2; reached++) {
        snprintf(json, sizeof json, "{\"0-\": {\"policy\": \"%s\", \"max_cache_size\": %d, \"min_cache_size\": 8}}", policy,
                 reached ? 48 : 200);
        dt_eviction *eviction = eviction_from_json(model, json);
        dt_session_params on = {.n_threads = 1, .n_batch = 32, .kv_block_tokens = 16, .kv_type = kv_type, .prefill = prefill};
        dt_session_params off = on;
        on.eviction = eviction;
        off.kernel = reached ? "reference" : NULL;
        off.prefill = DT_PREFILL_FULL;
        dt_session *evicted = open_session(model, &on), *full = open_session(model, &off);
        /* streaming evicts between chunks: the full cache follows chunk by chunk, and loses the same entries before the next one */
        for (size_t n = 32; n < N + 32; n += 32) {
            sync_tokens(evicted, tokens, n < N ? n : N);
            sync_tokens(full, tokens, n < N ? n : N);
            hide_evicted(full, evicted);
        }
        for (int32_t i = 0; i < STEPS; i++) {
            append_token(evicted, tokens[N + i]);
            append_token(full, tokens[N + i]);
            hide_evicted(full, evicted);
            const double error = logit_error(dt_session_logits(evicted), dt_session_logits(full), n_vocab);
            worst[reached] = error > worst[reached] ? error : worst[reached];
        }
        dt_session_stats stats;
        dt_session_get_stats(evicted, &stats);
        if ((stats.evicted_tokens > 0) != (reached != 0)) {
            fail_msg("%s: %d tokens evicted", name, (int)stats.evicted_tokens);
        }
        dt_session_free(evicted);
        dt_session_free(full);
        dt_eviction_free(eviction);
    }
    print_message("%-20s %s %s, %s: %.5f from the same without eviction, %.5f from the reference with victims hidden\n", name,
                  kv_type == DT_KV_F16 ? "F16" : "INT8", policy, prefill == DT_PREFILL_FULL ? "full" : "streaming", worst[0],
                  worst[1]);
    assert_true(worst[0] == 0.0);
    assert_true(worst[1] <= tolerance);
}
