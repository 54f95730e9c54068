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
/* A tiny model and random tokens, for cmocka's group setup and teardown of one file; the same for the same arguments. */
typedef struct engine_fixture {
    dt_model *model;
    size_t n_vocab;
    int32_t *tokens;
} engine_fixture;
engine_fixture *open_engine_fixture(const tiny_model_params *params, size_t n_tokens, uint64_t seed);
int close_engine_fixture(void **state);
/* Three layers of F32 weights, three query heads to a key head: what most tests of sessions use. */
tiny_model_params three_layers(int32_t n_ctx);
/* An eviction config from JSON text. */
dt_eviction *eviction_from_json(const dt_model *model, const char *json);
/* dt_session_sync that must succeed; returns the result. */
dt_sync_result sync_tokens(dt_session *session, const int32_t *tokens, size_t n);
void append_token(dt_session *session, int32_t token);
/* Both keep the same positions in every lane. */
void assert_same_kept(const dt_session *a, const dt_session *b);
/* Greedy continuation by n tokens, each computed; the structure is checked after every step. */
void greedy(dt_session *session, int32_t n_vocab, int32_t *out, int32_t n);
/* Hides every entry of a full cache whose position the same lane of `evicted` no longer has: what the scalar reference computes
 * with it is what eviction is to give. */
void hide_evicted(dt_session *full, const dt_session *evicted);
/* A file's bytes, NUL-terminated; free() it. */
char *read_whole_file(const char *path, size_t *out_n);

#endif
