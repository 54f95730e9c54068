/*
 * Guessing from the conversation itself: what followed the last tokens when they stood there before (prompt lookup decoding, Saxena
 * 2023; how far to trust it: SuffixDecoding, Oliaro et al. 2024, lets the length of a guess grow with that of the match).
 */
#ifndef DT_ENGINE_LOOKUP_H
#define DT_ENGINE_LOOKUP_H

#include "engine/draft.h"

#define DT_LOOKUP_CLASSES 9

typedef struct dt_lookup {
    float right[DT_LOOKUP_CLASSES]; /* how often a token foretold from a match of that class came */
    /* the last guess, all of it, whatever was asked for: what comes tells for free whether it was right */
    int32_t guess[DT_DRAFT_MAX_TOKENS], n_guess;
    int32_t at, match; /* tokens that the context had; tokens that matched */
} dt_lookup;

void dt_lookup_init(dt_lookup *lookup);
/* Guesses at most `most` tokens that follow context[n], fewer where more would cost more than they bring; learns from how the
 * context went on since the last call. Returns how many. */
int32_t dt_lookup_guess(dt_lookup *lookup, const int32_t *context, int32_t n, int32_t most, int32_t *out);

#endif
