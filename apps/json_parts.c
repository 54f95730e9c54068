/* See json_parts.h. */
#include "json_parts.h"

#include <stdbool.h>

static void keep_if(json_t **whole, bool added) {
    if (!added) {
        json_decref(*whole);
        *whole = NULL;
    }
}

void dt_json_set(json_t **whole, const char *key, json_t *part) { keep_if(whole, json_object_set_new(*whole, key, part) == 0); }

void dt_json_append(json_t **whole, json_t *part) { keep_if(whole, json_array_append_new(*whole, part) == 0); }
