/*
 * UTF-8. See utf8.h.
 */
#include "utf8.h"

#include <stdlib.h>
#include <string.h>

size_t dt_character_at(const char *text, size_t n, bool *out_open) {
    const unsigned char *s = (const unsigned char *)text;
    *out_open = false;
    if (s[0] < 0x80) {
        return 1;
    }
    const size_t bytes = s[0] >= 0xF0 && s[0] < 0xF5 ? 4 : s[0] >= 0xE0 && s[0] < 0xF0 ? 3 : s[0] >= 0xC2 && s[0] < 0xE0 ? 2 : 0;
    for (size_t i = 1; i < bytes; i++) {
        if (i >= n) {
            *out_open = true;
            return 0;
        }
        const unsigned char low = i > 1 ? 0x80 : s[0] == 0xE0 ? 0xA0 : s[0] == 0xF0 ? 0x90 : 0x80;
        const unsigned char high = i > 1 ? 0xBF : s[0] == 0xED ? 0x9F : s[0] == 0xF4 ? 0x8F : 0xBF;
        if (s[i] < low || s[i] > high) {
            return 0;
        }
    }
    return bytes;
}

size_t dt_whole_characters(const char *text, size_t n) {
    for (size_t back = 1; back <= 3 && back <= n; back++) {
        const unsigned char c = (unsigned char)text[n - back];
        if (c < 0x80) {
            return n;
        }
        if (c >= 0xC0) {
            bool open = false;
            dt_character_at(text + n - back, back, &open);
            return open ? n - back : n;
        }
    }
    return n;
}

char *dt_repair_utf8(const char *text, size_t n, size_t *out_n) {
    char *out = malloc(3 * n + 1);
    size_t used = 0;
    bool open = false;
    for (size_t i = 0; out != NULL && i < n;) {
        const size_t bytes = text[i] != 0 ? dt_character_at(text + i, n - i, &open) : 0;
        memcpy(out + used, bytes > 0 ? text + i : "\xEF\xBF\xBD", bytes > 0 ? bytes : 3);
        used += bytes > 0 ? bytes : 3;
        i += bytes > 0 ? bytes : 1;
    }
    if (out != NULL) {
        out[used] = 0;
        *out_n = used;
    }
    return out;
}
