/*
 * The output file of a batch: a line for each row, and which rows an earlier run has done.
 *
 * Invariants: lines are written whole, each at once, and none is repeated; a file that holds anything but results of this input stays
 * as it is.
 */
#ifndef DT_APPS_BATCH_OUTPUT_H
#define DT_APPS_BATCH_OUTPUT_H

#include "batch_input.h"

typedef struct dt_batch_output dt_batch_output;

/* Opens it for going on: a last line that was cut off is removed, where it can be nothing else. Refuses the input itself, by
 * whatever name, and files with something else in them, and leaves them as they are. settings: a word that stands for all that the
 * results depend on, written into each line; it outlives the output. */
dt_status dt_batch_output_open(const char *path, const char *input_path, const char *settings, dt_batch_output **out,
                               dt_error *error);
void dt_batch_output_close(dt_batch_output *output);
/* Whether an earlier run has written this row's line. DT_ERR_ARGUMENT where that line is another row's: the input has changed. */
dt_status dt_batch_output_has(const dt_batch_output *output, const dt_batch_row *row, bool *out_has, dt_error *error);
/* Of an earlier run's lines: how many hold an error, and whether some were written under other settings. */
int64_t dt_batch_output_failed(const dt_batch_output *output);
bool dt_batch_output_settings_differ(const dt_batch_output *output);
/* Adds "line" and "settings" and writes; takes the object over. DT_ERR_IO also where the file was removed, replaced or changed by
 * something else since. */
dt_status dt_batch_output_write(dt_batch_output *output, const dt_batch_row *row, json_t *object, dt_error *error);
/* At the end: whether all that was written is where the file's name leads, and on its disk. */
dt_status dt_batch_output_sync(const dt_batch_output *output, dt_error *error);

#endif
