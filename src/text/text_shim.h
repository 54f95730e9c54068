/*
 * The seam between sampler.c and libllama: every call that could throw goes through here, and comes back as a status.
 * Invariant: no exception and no abort of libllama's grammar code crosses this line; a grammar that refused a token is
 * never asked again without being told so (libllama asserts there).
 */
#ifndef DT_TEXT_SHIM_H
#define DT_TEXT_SHIM_H

#include "text/text.h"

#ifdef __cplusplus
extern "C" {
#endif

struct llama_token_data_array;

typedef struct dt_text_chain dt_text_chain;     /* penalties, or the whole sampling chain */
typedef struct dt_text_grammar dt_text_grammar; /* where in a grammar the text is */

/* Repeat penalty alone when greedy, else penalties, top_k, top_p, min_p, temperature, draw. */
dt_status dt_text_chain_new(int32_t n_vocab, int32_t n_ctx, const dt_sampler_params *params, uint32_t seed, dt_text_chain **out,
                            dt_error *error);
void dt_text_chain_free(dt_text_chain *chain);
dt_status dt_text_chain_apply(dt_text_chain *chain, struct llama_token_data_array *candidates, dt_error *error);
/* The draws after this are those after n_draws uses of the chain, which draws (temp > 0). */
dt_status dt_text_chain_skip(dt_text_chain *chain, uint64_t n_draws, dt_error *error);
dt_status dt_text_chain_accept(dt_text_chain *chain, int32_t token, dt_error *error);

/* Exactly one of gbnf and json_schema is given. */
dt_status dt_text_grammar_new(const dt_vocab *vocab, const char *gbnf, const char *json_schema, dt_text_grammar **out,
                              dt_error *error);
void dt_text_grammar_free(dt_text_grammar *grammar);
/* Sets the logits of forbidden candidates to -INFINITY. */
dt_status dt_text_grammar_apply(dt_text_grammar *grammar, struct llama_token_data_array *candidates, dt_error *error);
dt_status dt_text_grammar_accept(dt_text_grammar *grammar, int32_t token, dt_error *error);

/* Tokens that the model's own file forbids to sample. */
const int32_t *dt_vocab_suppressed(const dt_vocab *vocab, int32_t *out_n);

#ifdef __cplusplus
}
#endif
#endif
