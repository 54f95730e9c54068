/* See json_parts.h. */
#include "json_parts.h"
#include "utf8.h"

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A text while jansson reads it. A first allocation that is refused is met from the reserve, which the lexer's buffer always fits
 * in, as it at most doubles; from then on the text is at its end, so that the buffer does not grow again. */
typedef struct reading {
    const char *text;
    size_t n, at;
    char *reserve;
    size_t n_reserve;
    bool refused;
} reading;

static _Thread_local reading *current;

static void *allocate(size_t n) {
    void *room = malloc(n);
    if (room == NULL && current != NULL && !current->refused) {
        current->refused = true;
        return n <= current->n_reserve ? current->reserve : NULL;
    }
    return room;
}

static void release(void *room) {
    if (current == NULL || room != current->reserve) {
        free(room);
    }
}

/* Before main, so that no thread sees them change. */
__attribute__((constructor)) static void take_over_allocations(void) { json_set_alloc_funcs(allocate, release); }

/* One byte at a time, so that nothing is read ahead of a refusal. */
static size_t next_byte(void *out, size_t n_room, void *data) {
    reading *r = data;
    if (r->refused || r->at == r->n || n_room == 0) {
        return 0;
    }
    *(char *)out = r->text[r->at++];
    return 1;
}

static void tell_no_memory(json_error_t *why) {
    if (why != NULL) {
        *why = (json_error_t){.line = -1, .column = -1, .text = "out of memory"};
        why->text[JSON_ERROR_TEXT_LENGTH - 1] = (char)json_error_out_of_memory; /* where json_error_code looks */
    }
}

json_t *dt_json_load(const char *text, size_t n, size_t flags, json_error_t *why) {
    if (why != NULL) {
        *why = (json_error_t){.line = -1, .column = -1};
    }
    reading r = {.text = text, .n = n, .n_reserve = n < SIZE_MAX / 4 ? 2 * n + 64 : 0};
    r.reserve = r.n_reserve > 0 ? malloc(r.n_reserve) : NULL; /* untouched memory costs nothing */
    if (r.reserve == NULL) {
        tell_no_memory(why);
        return NULL;
    }
    current = &r;
    json_t *json = json_load_callback(next_byte, &r, flags, why);
    if (r.refused) {
        json_decref(json);
        json = NULL;
        tell_no_memory(why);
    }
    current = NULL;
    free(r.reserve);
    return json;
}

json_t *dt_json_load_fd(int file, size_t n_most, size_t flags, json_error_t *why) {
    char *text = malloc(n_most + 1);
    size_t n = 0;
    ssize_t got = text != NULL ? 1 : -1;
    while (n < n_most && (got > 0 || (got < 0 && errno == EINTR && text != NULL))) {
        got = read(file, text + n, n_most - n);
        n += got > 0 ? (size_t)got : 0;
    }
    json_t *json = NULL;
    if (text == NULL) {
        tell_no_memory(why);
    } else if (got >= 0) {
        json = dt_json_load(text, n, flags, why);
    } else if (why != NULL) {
        *why = (json_error_t){.line = -1, .column = -1};
        snprintf(why->text, sizeof why->text, "%s", strerror(errno));
    }
    free(text);
    return json;
}

const char *dt_json_not_taken(const json_error_t *why) {
    switch (json_error_code(why)) {
    case json_error_null_character:
    case json_error_null_byte_in_key:
        return "\\u0000, the NUL character, is in no text here; leave it out";
    case json_error_numeric_overflow:
        return "the number is too large; whole ones end at 9223372036854775807, others at 1.79e308";
    case json_error_invalid_utf8:
        return "what stands there is not UTF-8; write the text in UTF-8";
    case json_error_stack_overflow:
        return "lists and objects nest too deep; 2048 levels are taken";
    default: /* jansson has no code for this one */
        return strncmp(why->text, "invalid Unicode", 15) == 0 ? "half of a pair of \\u escapes; write both, or the character itself"
                                                              : NULL;
    }
}

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
