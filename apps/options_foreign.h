/*
 * Flags that people know from llama.cpp and that mean nothing here, or something else: an answer for each, so that a command line
 * that worked there either works here or is told what to write instead.
 *
 * Invariant: a flag is accepted only where leaving it out changes no text and no limit; all others are refused with a hint. A name
 * that a program has itself is the program's (options.c asks here last).
 */
#ifndef DT_APPS_OPTIONS_FOREIGN_H
#define DT_APPS_OPTIONS_FOREIGN_H

#include <stdbool.h>

typedef enum dt_foreign_value {
    DT_FOREIGN_NONE,  /* takes no value */
    DT_FOREIGN_VALUE, /* takes one */
    DT_FOREIGN_SWITCH /* may be followed by on, off, auto, 0 or 1 */
} dt_foreign_value;

typedef struct dt_foreign_flag {
    const char *names; /* "-fa, --flash-attn" */
    dt_foreign_value value;
    bool accepted;
    const char *sentence; /* why it changes nothing, or what to do instead; follows "NAME: " */
} dt_foreign_flag;

/* name: as written, with its dashes. NULL: nobody knows it. */
const dt_foreign_flag *dt_find_foreign_flag(const char *name);
/* The same of llama-quantize's, which are all refused. */
const dt_foreign_flag *dt_find_quantize_flag(const char *name);
/* Whether `word` can be the value of a DT_FOREIGN_SWITCH. */
bool dt_is_switch_word(const char *word);

#endif
