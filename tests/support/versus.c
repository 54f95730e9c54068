#include "support/versus.h"

#include "support/cmocka_all.h"
#include "support/compare.h"
#include "support/fixture.h"
#include "support/oracle.h"

#include <stdlib.h>
#include <string.h>

#define N_PROMPT 75
#define N_GREEDY 40
/* Share of the logits' standard deviation. libllama rounds queries and probabilities to F16 for its products, we do not. */
#define TOLERANCE 0.02
/* Products with weights of few bits round the activations too (to BF16, to 8 bits), which magnifies any earlier difference. How much,
 * the oracle shows itself: with its two ways of computing attention. We may be this many times as far from it as it is from itself. */
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
void assert_equals_oracle(const char *name, const char *path) {
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
}
