/*
 * JSON where memory may run out. Put together: what can't be added takes the whole with it, *whole becomes NULL and stays so, and
 * whoever writes it out finds that out once, at the end. Read: wholly or not at all. So no answer, no line of a file and nothing that
 * a user sent lacks a part.
 */
#ifndef DT_APPS_JSON_PARTS_H
#define DT_APPS_JSON_PARTS_H

#include <jansson.h>

/* Take over `part`; NULL: it couldn't be made. */
void dt_json_set(json_t **whole, const char *key, json_t *part);
void dt_json_append(json_t **whole, json_t *part);
/* Text that need not be UTF-8, as JSON must be: a name, a path, what a model wrote, a message that quotes one. See dt_repair_utf8.
 * NULL: out of memory. */
json_t *dt_json_text(const char *text);
json_t *dt_json_bytes(const char *text, size_t n);
/* As json_dumps, whose text lacks a quotation mark here and there where memory ran out while it grew (jansson 2.14 doesn't look
 * whether a key could be written): here its length is found first. NULL: out of memory, or json is NULL. free() */
char *dt_json_dump(const json_t *json, size_t flags);
/* As json_loadb and json_loadfd (a file of at most n_most bytes, from where it stands), which leave out a byte of the text where
 * memory ran out in a string or number, or write past its value (jansson 2.14 doesn't look whether its buffer could grow): here that
 * ends it. NULL: *why tells (why may be NULL); json_error_code(why) is json_error_out_of_memory for just that. */
json_t *dt_json_load(const char *text, size_t n, size_t flags, json_error_t *why);
json_t *dt_json_load_fd(int file, size_t n_most, size_t flags, json_error_t *why);
/* What is there at why->line and column that is not taken, though it may be JSON, and what to do about it. NULL: the text is no JSON,
 * as why->text says, which quotes it and may be cut within a character. */
const char *dt_json_not_taken(const json_error_t *why);

#endif
