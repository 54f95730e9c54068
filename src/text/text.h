/*
 * Vocabulary, chat templates, samplers, grammars: what libllama and its `common` code are best at, behind plain C.
 * text_shim.cpp is C++: it catches exceptions and hands out C values.
 *
 * dt_sampler_free, dt_sampler_seed, dt_sampler_sample, dt_sampler_accept and dt_sampler_default_params of deeptutor.h are
 * implemented in sampler.c.
 */
#ifndef DT_TEXT_H
#define DT_TEXT_H

#ifdef __cplusplus /* base.h is for C only (<stdatomic.h>) */
#include "deeptutor.h"
extern "C" {
#else
#include "base/base.h"
#endif

typedef struct dt_vocab dt_vocab;

/* Loads only the vocabulary of a GGUF file. The caller has checked it (dt_gguf_check_vocabulary). */
dt_status dt_vocab_open(const char *path, dt_vocab **out, dt_error *error);
void dt_vocab_free(dt_vocab *vocab);
int32_t dt_vocab_size(const dt_vocab *vocab);
bool dt_vocab_has_chat_template(const dt_vocab *vocab);

/* At most one start token at the front where the model wants one, also when the text begins with one or more itself; of GLM models
 * their two marks (glm.h). There a text without add_special is taken for the continuation of another.
 * Bytes that are no UTF-8 become U+FFFD or byte tokens, as the vocabulary has it; NUL is a byte like any other. */
dt_status dt_vocab_tokenize(const dt_vocab *vocab, const char *text, size_t n_bytes, bool add_special, bool parse_special,
                            int32_t **out_tokens, size_t *out_n, dt_error *error);
/* 0 for a token that isn't in the vocabulary. */
size_t dt_vocab_token_bytes(const dt_vocab *vocab, int32_t token, bool special, char *buffer, size_t capacity);
bool dt_vocab_is_end(const dt_vocab *vocab, int32_t token);
/* The token that dt_vocab_tokenize puts in front, or -1: a vocabulary may name one (Qwen) that its model never saw. */
int32_t dt_vocab_start(const dt_vocab *vocab);
/* Without its start token where dt_vocab_tokenize adds that. */
dt_status dt_vocab_chat_render(const dt_vocab *vocab, const char *template_name, const dt_chat_message *messages, size_t n_messages,
                               bool add_assistant, char **out, dt_error *error);
/* vocab may be NULL (a model without a tokenizer); n_vocab is the number of logits, n_ctx what repeat_last_n = -1 means.
 * Logits beyond the vocabulary (padding rows) are never sampled. The vocabulary must outlive the sampler. */
dt_status dt_text_sampler_new(const dt_vocab *vocab, int32_t n_vocab, int32_t n_ctx, const dt_sampler_params *params,
                              dt_sampler **out, dt_error *error);
/* How many logits it reads. */
int32_t dt_sampler_n_logits(const dt_sampler *sampler);
/* Where a sampler is in its stream of random numbers: what a session file keeps of it. */
typedef struct dt_sampler_state {
    uint32_t seed;
    uint64_t n_draws; /* tokens drawn with that seed */
} dt_sampler_state;
dt_sampler_state dt_sampler_get_state(const dt_sampler *sampler);
/* Goes there, and forgets the tokens the sampler was told of (dt_sampler_accept); a grammar stays where it is. */
dt_status dt_sampler_set_state(dt_sampler *sampler, const dt_sampler_state *state, dt_error *error);
/* Routes ggml's and libllama's log lines into dt_log. May be called any number of times. */
void dt_text_route_logs(void);

#ifdef __cplusplus
}
#endif
#endif
