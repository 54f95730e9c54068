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

#endif
