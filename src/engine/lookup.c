/*
 * Where the last tokens stood before, and whether to believe it. See lookup.h.
 *
 * The longer the match, the likelier the next token is the one that followed then; how likely depends on the text. So every length
 * of match has a running mean of how often it was right, learned from every token, guessed or not: a text that nothing predicts
 * costs no tries. With each right token the match grows by one, so a guess of n tokens is right up to its i-th with the product of
 * the first i means, and its length is the one that brings most tokens for what the batch costs.
 *
 * Invariant: nothing depends on time, so that a run can be repeated; tokens are only ever compared, so a context that was changed
 * costs good guesses and nothing else.
 */
#include "engine/lookup.h"

#define MAX_MATCH 32
#define STRIDE 32           /* tokens compared at once while there is no match */
#define MORE_TOKEN 0.15f    /* what a further token of a batch costs, in steps of one token: small models, short contexts */
#define LEAST_GAIN 1.05f    /* below it a guess is not worth its risk */
#define LEARNING_RATE 0.12f /* of a new observation */

/* By length of the match: 0, 1, 2, 3, 4, to 6, to 8, to 12, more. Where a text begins from. */
static const float first_means[DT_LOOKUP_CLASSES] = {0.0f, 0.1f, 0.25f, 0.45f, 0.6f, 0.7f, 0.75f, 0.85f, 0.9f};

static int32_t class_of(int32_t match) { return match <= 4 ? match : match <= 6 ? 5 : match <= 8 ? 6 : match <= 12 ? 7 : 8; }

void dt_lookup_init(dt_lookup *lookup) {
    *lookup = (dt_lookup){.n_guess = 0};
    for (int32_t i = 0; i < DT_LOOKUP_CLASSES; i++) {
        lookup->right[i] = first_means[i];
    }
}

/* Compares the last guess with what came. */
static void learn(dt_lookup *lookup, const int32_t *context, int32_t n) {
    bool right = true;
    for (int32_t i = 0; right && i < lookup->n_guess && lookup->at + i < n; i++) {
        float *mean = &lookup->right[class_of(lookup->match + i)];
        right = context[lookup->at + i] == lookup->guess[i];
        *mean += LEARNING_RATE * ((right ? 1.0f : 0.0f) - *mean);
    }
}

static bool any_equal(const int32_t *tokens, int32_t token) {
    int32_t found = 0;
    for (int32_t i = 0; i < STRIDE; i++) {
        found |= tokens[i] == token;
    }
    return found != 0;
}

/* Tokens before the last one: the most that match before some `end` < n, and the latest such end. */
static int32_t find_match(const int32_t *context, int32_t n, int32_t *out_end) {
    const int32_t last = context[n - 1];
    int32_t best = 0;
    for (int32_t end = n - 1; end > 0 && best < MAX_MATCH;) {
        const int32_t stop = DT_MAX(end - STRIDE, 0);
        if (stop > 0 && !any_equal(context + stop, last)) {
            end = stop;
        }
        for (; end > stop && best < MAX_MATCH; end--) {
            int32_t same = 0;
            while (same < DT_MIN(end, MAX_MATCH) && context[end - 1 - same] == context[n - 1 - same]) {
                same++;
            }
            if (same > best) {
                best = same;
                *out_end = end;
            }
        }
    }
    return best;
}

/* The length that brings most tokens per cost. */
static int32_t best_length(const dt_lookup *lookup, int32_t most) {
    float chance = 1.0f, tokens = 1.0f, best = LEAST_GAIN; /* without a guess: one token for one step */
    int32_t length = 0;
    for (int32_t i = 0; i < most; i++) {
        chance *= lookup->right[class_of(lookup->match + i)];
        tokens += chance;
        const float gain = tokens / (1.0f + MORE_TOKEN * (float)(i + 1));
        if (gain > best) {
            best = gain;
            length = i + 1;
        }
    }
    return length;
}

int32_t dt_lookup_guess(dt_lookup *lookup, const int32_t *context, int32_t n, int32_t most, int32_t *out) {
    int32_t end = 0;
    learn(lookup, context, n);
    lookup->at = n;
    lookup->match = find_match(context, n, &end);
    lookup->n_guess = lookup->match > 0 ? DT_DRAFT_MAX_TOKENS : 0;
    for (int32_t i = 0; i < lookup->n_guess; i++) { /* text that repeats itself goes on into the guess */
        lookup->guess[i] = end + i < n ? context[end + i] : lookup->guess[end + i - n];
    }
    const int32_t length = best_length(lookup, DT_MIN(most, lookup->n_guess));
    for (int32_t i = 0; i < length; i++) {
        out[i] = lookup->guess[i];
    }
    return length;
}
