/*
 * The oracle: libllama computing the same file, with its KV cache in F16. Independent of
 * everything under src/ but ggml's matrix products.
 */
#ifndef DT_TEST_ORACLE_H
#define DT_TEST_ORACLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct oracle oracle;

/* NULL on failure. flash: its flash attention, which rounds otherwise: two oracles show how far apart correct answers lie. */
oracle *oracle_open(const char *path, int32_t n_ctx, bool flash);
void oracle_close(oracle *o);
int32_t oracle_n_vocab(const oracle *o);
/* Appends tokens[n] at the next positions; out (may be NULL): logits[n][n_vocab] after each. */
bool oracle_decode(oracle *o, const int32_t *tokens, int32_t n, float *out);
/* Removes positions [from, to) from the cache; positions of the rest stay. */
void oracle_remove(oracle *o, int32_t from, int32_t to);

#endif
