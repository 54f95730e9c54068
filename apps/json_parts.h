/*
 * Putting JSON together where memory may run out. What can't be added takes the whole with it: *whole becomes NULL and stays so, and
 * whoever writes it out finds that out once, at the end. So no answer and no line of a file lacks a part.
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

#endif
