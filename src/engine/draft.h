/*
 * Guessing tokens ahead, for speculative decoding. Guesses cost time when wrong, never correctness: generate.c verifies them.
 */
#ifndef DT_ENGINE_DRAFT_H
#define DT_ENGINE_DRAFT_H

#include "engine/engine.h"

#define DT_DRAFT_MAX_TOKENS 64

/* Guesses at most `most` tokens that follow context[n]. */
typedef dt_status (*dt_draft_fn)(void *user, const int32_t *context, int32_t n, int32_t most, int32_t *out, int32_t *out_n,
                                 dt_error *error);
/* A draft of any making; one that is not `adaptive` always guesses max_tokens. */
dt_status dt_draft_from_function(dt_draft_fn fn, void *user, int32_t max_tokens, bool adaptive, dt_draft **out, dt_error *error);

/* A reply begins after the n_given tokens of the context; what of them is yet to be read, the first guess reads. */
void dt_draft_begin(dt_draft *draft, int32_t n_given);
/* What a draft model read of given texts, which is no part of guessing, since this was last asked. */
void dt_draft_take_reading(dt_draft *draft, int64_t *out_n_tokens, double *out_ms);
/* Guesses at most `most` tokens that follow context[n] (n >= 1), into out; *out_n may be 0. */
dt_status dt_draft_propose(dt_draft *draft, const int32_t *context, int32_t n, int32_t most, int32_t *out, int32_t *out_n,
                           dt_error *error);
/* Tells how many of the guessed tokens were right, so that the next guess is longer or shorter. */
void dt_draft_learn(dt_draft *draft, int32_t n_proposed, int32_t n_accepted);

#endif
