/*
 * What a batch has to do: the rows of a JSON Lines file, or the texts of a folder.
 *
 * Invariants: every row has a number that stays its own as long as the input stays the same, and its line in the output carries it;
 * a row that can't be read is a row still.
 */
#ifndef DT_APPS_BATCH_INPUT_H
#define DT_APPS_BATCH_INPUT_H

#include "deeptutor.h"

#include <jansson.h>

typedef struct dt_batch_input dt_batch_input;

typedef enum dt_batch_form { DT_BATCH_OPENAI, DT_BATCH_SHORT } dt_batch_form;

typedef struct dt_batch_row {
    int64_t number; /* from 1: the line, or the place of the file in the folder by name */
    dt_batch_form form;
    json_t *id;      /* custom_id or id; NULL: it has none */
    json_t *body;    /* of the request; NULL: error says why not */
    bool chat;       /* the request is for chat completions */
    char error[256]; /* "" */
} dt_batch_row;

/* path: a file, or a folder where `each` is given: the request's text, {text} in it stands for the file's. chat: it is a message.
 */
dt_status dt_batch_input_open(const char *path, const char *each, bool chat, dt_batch_input **out, dt_error *error);
void dt_batch_input_close(dt_batch_input *input);
/* Rows there are, empty lines left out. */
int64_t dt_batch_input_rows(const dt_batch_input *input);
/* The next one; false at the end. Its JSON is to be released with dt_batch_row_free. */
bool dt_batch_input_next(dt_batch_input *input, dt_batch_row *out);
/* After the last one: whether that was the end. DT_ERR_IO where rows that were counted couldn't be read. */
dt_status dt_batch_input_check(const dt_batch_input *input, dt_error *error);
void dt_batch_row_free(dt_batch_row *row);

#endif
