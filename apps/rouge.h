/*
 * How alike two texts are: ROUGE-L (Lin 2004), the F-measure of the longest common subsequence of their words.
 *
 * Words are runs of letters and digits, ASCII letters in lower case, as the usual implementations have it; so that texts in other
 * scripts count too, letters beyond ASCII belong to words, and every character of the scripts that write without spaces (from
 * U+2E80 on: Chinese, Japanese, Korean) is a word of its own. Invariant: symmetric, between 0 and 1, and 1 for two equal texts.
 */
#ifndef DT_APPS_ROUGE_H
#define DT_APPS_ROUGE_H

#include <stdbool.h>
#include <stddef.h>

/* Texts are UTF-8; broken bytes separate words. 1 where neither has a word. False when there is no memory. */
bool dt_rouge_l(const char *a, size_t n_a, const char *b, size_t n_b, double *out);

#endif
