/* See json_parts.h. */
#include "json_parts.h"
#include "utf8.h"

#include <stdlib.h>
#include <string.h>

static void keep_if(json_t **whole, bool added) {
    if (!added) {
        json_decref(*whole);
        *whole = NULL;
    }
}

void dt_json_set(json_t **whole, const char *key, json_t *part) { keep_if(whole, json_object_set_new(*whole, key, part) == 0); }

void dt_json_append(json_t **whole, json_t *part) { keep_if(whole, json_array_append_new(*whole, part) == 0); }

json_t *dt_json_bytes(const char *text, size_t n) {
    size_t n_valid = 0;
    char *valid = dt_repair_utf8(text, n, &n_valid);
    json_t *json = valid != NULL ? json_stringn(valid, n_valid) : NULL;
    free(valid);
    return json;
}

char *dt_json_dump(const json_t *json, size_t flags) {
    const size_t n = json != NULL ? json_dumpb(json, NULL, 0, flags) : 0;
    char *text = n > 0 ? malloc(n + 1) : NULL;
    if (text != NULL && json_dumpb(json, text, n, flags) != n) {
        free(text);
        return NULL;
    }
    if (text != NULL) {
        text[n] = 0;
    }
    return text;
}

json_t *dt_json_text(const char *text) { return dt_json_bytes(text, strlen(text)); }
