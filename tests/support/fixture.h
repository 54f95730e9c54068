/*
 * What the tests of the engine share: a tiny model in a temporary file, a session on it, logits token by token.
 * Functions fail the running cmocka test when something does not work.
 */
#ifndef DT_TEST_FIXTURE_H
#define DT_TEST_FIXTURE_H

#include "deeptutor.h"
#include "support/tiny_model.h"

/* Writes the model to a new temporary file and returns its path; the file goes at exit. */
const char *write_tiny(const tiny_model_params *params);
dt_model *open_model(const char *path, bool exact);
dt_session *open_session(const dt_model *model, const dt_session_params *params);
/* An eviction config from JSON text. */
dt_eviction *eviction_from_json(const dt_model *model, const char *json);
/* dt_session_sync that must succeed; returns the result. */
dt_sync_result sync_tokens(dt_session *session, const int32_t *tokens, size_t n);
void append_token(dt_session *session, int32_t token);
/* Greedy continuation by n tokens, each computed; the structure is checked after every step. */
void greedy(dt_session *session, int32_t n_vocab, int32_t *out, int32_t n);
/* Hides every entry of a full cache whose position the same lane of `evicted` no longer has: what the scalar reference computes
 * with it is what eviction is to give. */
void hide_evicted(dt_session *full, const dt_session *evicted);
/* A file's bytes, NUL-terminated; free() it. */
char *read_whole_file(const char *path, size_t *out_n);

#endif
