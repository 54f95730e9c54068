/*
 * What reading a batch's rows (batch_input.c) and its results (batch_output.c) share: lines of any length from any file.
 *
 * Invariant: no file, however broken or endless, takes more memory than a row may have, or time that a signal doesn't end.
 */
#ifndef DT_APPS_BATCH_LINES_H
#define DT_APPS_BATCH_LINES_H

#include "deeptutor.h"

#include <stdio.h>
#include <sys/types.h>

#define DT_BATCH_ROW_BYTES_MAX ((size_t)64 << 20)

typedef struct dt_batch_lines {
    FILE *file;
    char *line; /* the last one read, without its end; free() */
    size_t capacity;
    const char *why; /* it is not there whole: too long, or dt_batch_no_room; NULL: it is */
    bool has_end;    /* false: the file ended in it */
    bool endless;    /* it is too long for any row, and was left there */
} dt_batch_lines;

extern const char dt_batch_no_room[]; /* "memory is short" */

/* Reads a line; returns its bytes, -1 at the end of the file, or where reading is to end: after a signal, and where l->endless. What
 * is beyond DT_BATCH_ROW_BYTES_MAX, or what memory has no room for, is read over, and l->why says so. */
ssize_t dt_batch_read_line(dt_batch_lines *l);
/* Why dt_batch_read_line came to no end of the file. */
dt_status dt_batch_reading_ended(const dt_batch_lines *l, const char *path, dt_error *error);

dt_status dt_batch_no_memory(dt_error *error);

#endif
