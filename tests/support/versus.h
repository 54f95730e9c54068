/*
 * Our decoder against libllama on the same file (invariant 2): logits at every position within tolerance, greedy tokens equal.
 */
#ifndef DT_TEST_VERSUS_H
#define DT_TEST_VERSUS_H

/* A random prompt of 75 tokens, in chunks and token by token, then 40 greedy tokens; fails the test where they differ, prints how far
 * apart the two are. Equal means: within what rounding explains, which is measured by how far libllama is from itself. */
void assert_equals_oracle(const char *name, const char *path);

#endif
