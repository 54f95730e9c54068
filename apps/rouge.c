/*
 * ROUGE-L. See rouge.h. Words are compared by a 64-bit hash: two different ones that meet among thousands are less likely than a
 * broken memory bit. Time is the product of the two lengths, memory their sum.
 */
#include "rouge.h"

#include "utf8.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define FIRST_UNSPACED 0x2E80u
#define BROKEN UINT32_MAX

/* The character that begins at text[0], n >= 1 bytes left; BROKEN (of 1 byte) where there is none. */
static uint32_t next_character(const char *text, size_t n, size_t *out_bytes) {
    bool open;
    const size_t length = dt_character_at(text, n, &open);
    const unsigned char first = (unsigned char)text[0];
    *out_bytes = length > 0 ? length : 1;
    if (length < 2) {
        return length == 1 ? first : BROKEN;
    }
    uint32_t c = first & (0x7Fu >> length);
    for (size_t i = 1; i < length; i++) {
        c = c << 6 | ((unsigned char)text[i] & 0x3Fu);
    }
    return c;
}

static bool is_in_word(uint32_t c) {
    if (c < 0x80) {
        return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z');
    }
    const bool is_mark = c < 0xC0 || c == 0xD7 || c == 0xF7 || (c >= 0x2000 && c < 0x2070) || (c >= 0x3000 && c < 0x3040) ||
                         (c >= 0xFF00 && c < 0xFF10);
    return c != BROKEN && !is_mark;
}

/* Hashes of the words of text[n] into words (room for n), returns how many. */
static size_t split_words(const char *text, size_t n, uint64_t *words) {
    static const uint64_t start = 14695981039346656037u; /* FNV-1a */
    size_t n_words = 0, n_bytes = 0;
    uint64_t hash = start;
    bool begun = false;
    for (size_t i = 0; i <= n; i += n_bytes) {
        uint32_t c = BROKEN;
        n_bytes = 1;
        if (i < n) {
            c = next_character(text + i, n - i, &n_bytes);
        }
        c = c >= 'A' && c <= 'Z' ? c + ('a' - 'A') : c;
        const bool alone = c >= FIRST_UNSPACED, inside = is_in_word(c);
        if (begun && (alone || !inside)) {
            words[n_words++] = hash;
            hash = start;
            begun = false;
        }
        if (inside) {
            hash = (hash ^ c) * 1099511628211u;
            begun = true;
            if (alone) {
                words[n_words++] = hash;
                hash = start;
                begun = false;
            }
        }
    }
    return n_words;
}

/* row[n_b + 1], all 0 */
static size_t longest_common(const uint64_t *a, size_t n_a, const uint64_t *b, size_t n_b, size_t *row) {
    for (size_t i = 0; i < n_a; i++) {
        size_t diagonal = 0; /* row[j] of the line before */
        for (size_t j = 0; j < n_b; j++) {
            const size_t above = row[j + 1];
            row[j + 1] = a[i] == b[j] ? diagonal + 1 : above > row[j] ? above : row[j];
            diagonal = above;
        }
    }
    return row[n_b];
}

bool dt_rouge_l(const char *a, size_t n_a, const char *b, size_t n_b, double *out) {
    uint64_t *words = malloc((n_a + n_b + 1) * sizeof *words);
    size_t *row = calloc(n_b + 1, sizeof *row);
    if (words != NULL && row != NULL) {
        uint64_t *words_b = words + n_a;
        const size_t n_words = split_words(a, n_a, words), n_words_b = split_words(b, n_b, words_b);
        const size_t common = longest_common(words, n_words, words_b, n_words_b, row);
        *out = n_words + n_words_b > 0 ? 2 * (double)common / (double)(n_words + n_words_b) : 1; /* = 2PR / (P + R) */
    }
    const bool done = words != NULL && row != NULL;
    free(words);
    free(row);
    return done;
}
