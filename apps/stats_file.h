/*
 * A file for numbers that are known at the end of a run.
 *
 * Invariants: it is whole or as it was before; that it can be written is known before the model is loaded; it never takes the place of
 * what the run reads.
 */
#ifndef DT_APPS_STATS_FILE_H
#define DT_APPS_STATS_FILE_H

#include "deeptutor.h"

typedef struct dt_stats_file dt_stats_file;
/* Makes sure that `path` can be written, without touching it yet, and that it is neither one of the n_inputs files that the run
 * reads (NULL among them is skipped) nor where stdout goes. */
dt_status dt_stats_file_open(const char *path, const char *const *inputs, size_t n_inputs, dt_stats_file **out, dt_error *error);
/* The same of one input that is found out about later. path: NULL where nothing is written. */
dt_status dt_stats_file_check_input(const char *path, const char *input, dt_error *error);
/* Writes the text and a newline, then puts it in place at once. */
dt_status dt_stats_file_write_text(dt_stats_file *file, const char *text, dt_error *error);
/* NULL is accepted. */
void dt_stats_file_free(dt_stats_file *file);

#endif
