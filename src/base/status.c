/*
 * Errors as values: a code and one sentence in the caller's buffer.
 *
 * Invariants: a message is one line without control characters, whatever it quotes; it is cut at a whole UTF-8 character with "..." when it does not fit, and may be
 * built from the text that the buffer held before (dt_fail(error, code, "%s: %s", file, error->message)).
 */
#include "base/base.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#undef dt_fail /* what base.h makes of them for static analysis */
#undef dt_fail_memory

const char *dt_status_name(dt_status status) {
    switch (status) {
#define X(name, text)                                                                                                              \
    case DT_##name:                                                                                                                \
        return "DT_" #name;
        DT_STATUS_MAP(X)
#undef X
    }
    return "DT_ERR_INTERNAL";
}

dt_size dt_size_of(uint64_t bytes) {
    dt_size size;
    if (bytes < 1024) {
        snprintf(size.text, sizeof size.text, "%d byte%s", (int)bytes, bytes == 1 ? "" : "s");
    } else if (bytes < 1u << 20) {
        snprintf(size.text, sizeof size.text, "%.1f KiB", (double)bytes / 1024);
    } else {
        snprintf(size.text, sizeof size.text, "%.1f MiB", (double)bytes / 1048576);
    }
    return size;
}

void dt_free(void *memory) { free(memory); }

void dt_format_line(char *out, size_t capacity, const char *format, va_list arguments) {
    const int needed = vsnprintf(out, capacity, format, arguments);
    size_t length = needed < 0 ? 0 : (size_t)needed;
    if (length >= capacity) {
        length = capacity - 4;
        while (length > 0 && ((unsigned char)out[length] & 0xC0) == 0x80) { /* in the middle of a UTF-8 character */
            length--;
        }
        memcpy(out + length, "...", 3);
        length += 3;
    }
    while (length > 0 && (out[length - 1] == '\n' || out[length - 1] == '\r')) {
        length--;
    }
    out[length] = '\0';
    for (char *c = out; *c != '\0'; c++) { /* what it quotes may come from anywhere, and goes to terminals */
        *c = (unsigned char)*c < ' ' || *c == 0x7F ? ' ' : *c;
    }
}

dt_status dt_fail(dt_error *error, dt_status code, const char *format, ...) {
    if (error != NULL) {
        char message[sizeof error->message]; /* an argument may point into error->message */
        va_list arguments;
        va_start(arguments, format);
        dt_format_line(message, sizeof message, format, arguments);
        va_end(arguments);
        error->code = code;
        memcpy(error->message, message, sizeof message);
    }
    return code;
}

bool dt_lacks(dt_error *error, const char *function, const char *names, const void *const *pointers, size_t n) {
    for (size_t i = 0; i < n; i++) {
        const size_t length = strcspn(names, ",");
        if (pointers[i] == NULL) {
            dt_fail(error, DT_ERR_ARGUMENT, "%s needs %.*s, which is NULL", function, (int)length, names);
            return true;
        }
        names += names[length] == 0 ? length : length + 2;
    }
    return false;
}

dt_status dt_fail_memory(dt_error *error, size_t bytes, const char *what) {
    return dt_fail(error, DT_ERR_MEMORY,
                   "out of memory: no room for %zu more bytes for %s; close other programs, or use a smaller context or a smaller "
                   "max_cache_size",
                   bytes, what);
}
