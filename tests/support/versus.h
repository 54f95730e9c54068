/*
 * What every kind of model has to pass: our decoder against libllama on the same file (invariant 2: logits at every position within
 * tolerance, greedy tokens equal), and eviction against the scalar reference (invariants 1 and 3).
 */
#ifndef DT_TEST_VERSUS_H
#define DT_TEST_VERSUS_H

#include "deeptutor.h"

/* A random prompt of 75 tokens, in chunks and token by token, then 40 greedy tokens; fails the test where they differ, prints how
 * far apart the two are. Equal means: within what rounding explains, which is measured by how far libllama is from itself. Returns
 * that tolerance, a share of the logits' standard deviation. */
double assert_equals_oracle(const char *name, const char *path);
/* With a cache of `kv_type`, an eviction that never happens changes no bit, and one that does equals, within the tolerance, the
 * scalar reference over the full cache with the victims hidden. The model must have room for 115 tokens. */
void assert_eviction_is_hiding(const char *name, const dt_model *model, dt_prefill prefill, dt_kv_type kv_type, const char *policy,
                               double tolerance);

#endif
