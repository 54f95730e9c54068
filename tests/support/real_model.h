/*
 * A real small model on a real long text, against libllama on the same file: logits, greedy tokens, local_window against a cache
 * whose middle was removed, budgets that are not reached.
 */
#ifndef DT_TEST_REAL_MODEL_H
#define DT_TEST_REAL_MODEL_H

/* Runs the cmocka group; its tests skip where path is NULL or missing, or DT_TEST_TEXT is. Returns the number of failures. */
int run_real_model_tests(const char *path);

#endif
