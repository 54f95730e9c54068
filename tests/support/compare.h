/*
 * Comparing numbers and tokens. Finiteness is required first, by bit pattern: a comparison that NaN passes proves nothing.
 */
#ifndef DT_TEST_COMPARE_H
#define DT_TEST_COMPARE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

bool all_finite(const float *values, size_t n);
int32_t argmax(const float *values, size_t n);
/* Largest |a-b| divided by the standard deviation of b; a huge number when something is not finite. */
double logit_error(const float *a, const float *b, size_t n);
/* Difference of the two largest values, divided by the standard deviation. */
double top_gap(const float *values, size_t n);
/* splitmix64, for tests that need the same numbers everywhere */
uint64_t next_random(uint64_t *state);
/* Tokens in [low, high). */
void random_tokens(int32_t *tokens, size_t n, int32_t low, int32_t high, uint64_t seed);

#endif
