/*
 * UTF-8 in what models write, which may be cut anywhere and may be none.
 *
 * Invariant: a character is what RFC 3629 allows: the shortest form, no surrogate, at most U+10FFFF.
 */
#ifndef DT_APPS_UTF8_H
#define DT_APPS_UTF8_H

#include <stdbool.h>
#include <stddef.h>

/* Bytes of the valid character at the front of text[n], n > 0; 0 where there is none. *out_open: it may become one with more
 * bytes. */
size_t dt_character_at(const char *text, size_t n, bool *out_open);
/* Text with everything that is not UTF-8, and NUL, which many can't read in JSON, replaced by U+FFFD; *out_n its bytes, a 0 behind
 * them. NULL: out of memory. free(). */
char *dt_repair_utf8(const char *text, size_t n, size_t *out_n);
/* Where text[n] has to be cut so that no character that may still be completed is. */
size_t dt_whole_characters(const char *text, size_t n);

#endif
