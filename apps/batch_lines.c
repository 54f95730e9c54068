/*
 * Lines of a batch's files. See batch_lines.h.
 */
#define _POSIX_C_SOURCE 200809L
#include "batch_lines.h"
#include "fail.h"
#include "run.h"

#include <stdlib.h>

#define LINE_BYTES_MAX (16 * DT_BATCH_ROW_BYTES_MAX) /* beyond it, this is no file of lines: nobody waits for a terabyte to end */

static const char too_long[] = "it is too long";
const char dt_batch_no_room[] = "memory is short";

dt_status dt_batch_no_memory(dt_error *error) { return dt_app_fail(error, DT_ERR_MEMORY, "out of memory for the jobs"); }

/* Makes room for one more byte of the line. */
static bool grow_line(dt_batch_lines *l, size_t n) {
    if (n < l->capacity) {
        return true;
    }
    const size_t capacity = l->capacity > 0 ? 2 * l->capacity : 4096;
    char *grown = realloc(l->line, capacity);
    if (grown != NULL) {
        l->line = grown;
        l->capacity = capacity;
    }
    return grown != NULL;
}

/* Not getline, which takes as much memory as a file without line ends has bytes, and where there is none ends the file. */
ssize_t dt_batch_read_line(dt_batch_lines *l) {
    size_t n = 0;
    int c;
    l->why = NULL;
    while ((c = getc_unlocked(l->file)) != EOF && c != '\n') {
        if (l->why == NULL && n == DT_BATCH_ROW_BYTES_MAX) {
            l->why = too_long;
        } else if (l->why == NULL && !grow_line(l, n)) {
            l->why = dt_batch_no_room;
        }
        if (l->why == NULL) {
            l->line[n] = (char)c;
        }
        n++;
        l->endless = n > LINE_BYTES_MAX;
        if (l->endless || (n % 65536 == 0 && dt_interrupted)) {
            return -1;
        }
    }
    l->has_end = c != EOF;
    if (dt_interrupted) {
        return -1;
    }
    if (c == EOF && n == 0) {
        return -1;
    }
    while (l->why == NULL && n > 0 && l->line[n - 1] == '\r') {
        n--;
    }
    return (ssize_t)n;
}

dt_status dt_batch_reading_ended(const dt_batch_lines *l, const char *path, dt_error *error) {
    if (l->endless) {
        return dt_app_fail(error, DT_ERR_LIMIT,
                           "%s has a line of more than %zu bytes, so it is no file of JSON lines; name another file", path,
                           LINE_BYTES_MAX);
    }
    return dt_app_fail(error, DT_ERR_CANCELLED, "interrupted while %s was read; the same command begins again", path);
}
