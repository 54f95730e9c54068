/*
 * Command-line flags, shared by the programs: a table per group of flags, one parser, one help text.
 *
 * Invariants: a value is accepted whole or refused with a sentence; numbers are read the same in every locale; nothing is
 * printed here. A program's options begin with dt_shared_options, so that the shared tables' offsets fit it.
 */
#ifndef DT_APPS_OPTIONS_H
#define DT_APPS_OPTIONS_H

#include "deeptutor.h"

#include <stdio.h>

typedef enum dt_option_kind {
    DT_OPTION_ON,     /* bool */
    DT_OPTION_OFF,    /* bool */
    DT_OPTION_INT,    /* int64_t */
    DT_OPTION_NUMBER, /* double */
    DT_OPTION_SIZE,   /* int64_t, bytes: "800K", "1.5G" */
    DT_OPTION_TEXT,   /* const char *, points into argv; one of the words of `value` where that lists some */
    DT_OPTION_CHOICE  /* int64_t, index into the words of `value` */
} dt_option_kind;

typedef struct dt_option {
    const char *names; /* "-n, --n-predict" */
    const char *value; /* "N", or a choice's words "full|streaming"; NULL for ON and OFF */
    dt_option_kind kind;
    size_t offset;           /* of the member, whose type is given above */
    double minimum, maximum; /* INT and NUMBER */
    const char *help;
} dt_option;

typedef struct dt_option_group {
    const char *title;
    const dt_option *options;
    size_t n_options;
} dt_option_group;

#define DT_OPTION_NOTES 16 /* told at most */

typedef struct dt_shared_options {
    /* model and session */
    const char *model;
    int64_t n_threads, n_threads_batch, n_batch, n_ctx;
    int64_t kv_type, prefill, kernel; /* choices */
    const char *device;               /* NULL: not given; "list" */
    int64_t n_device_layers;          /* -1: not given */
    const char *device_split;         /* NULL: not given */
    int64_t rpc_timeout;              /* seconds; 0: not given */
    int64_t kv_memory;                /* bytes; 0: not given */
    bool mmap;
    /* eviction */
    bool eviction;
    const char *eviction_config, *eviction_preset;
    int64_t max_cache_size, min_cache_size, memory_slots; /* 0, -1, -1: not given */
    /* sampling */
    double temp, top_p, min_p, repeat_penalty;
    int64_t top_k, seed;
    const char *grammar, *grammar_file, *json_schema;
    bool ignore_end;
    /* output */
    const char *stats_json;
    int64_t log_level; /* dt_log_level */
    bool progress, version, help;
    /* what to tell about flags that were given and change nothing */
    struct dt_option_note {
        const char *flag, *sentence;
    } notes[DT_OPTION_NOTES];
    size_t n_notes;
} dt_shared_options;

extern const dt_option_group dt_model_options, dt_eviction_options, dt_sampling_options, dt_stats_options, dt_output_options;
extern const dt_option_group dt_log_options; /* in place of dt_output_options in programs that draw no bar */

void dt_shared_options_init(dt_shared_options *options);

/* Fills *options, which begins with dt_shared_options, from argv. Returns false with a sentence in message. */
bool dt_options_parse(const dt_option_group *const *groups, size_t n_groups, int argc, char **argv, void *options, char *message,
                      size_t capacity);
void dt_options_help(FILE *file, const dt_option_group *const *groups, size_t n_groups);

/* Whole-string numbers, with a point whatever the locale. False when `text` is none or doesn't fit. */
bool dt_parse_int(const char *text, int64_t *out);
bool dt_parse_number(const char *text, double *out);
/* Bytes, or a number with K, M, G or T behind it (times 1024...), above 0. */
bool dt_parse_size(const char *text, int64_t *out);

/* Flags that don't go together: false with a sentence. */
bool dt_shared_options_check(const dt_shared_options *options, char *message, size_t capacity);
/* Tells the notes on stderr, unless --log-level says no. */
void dt_options_tell_notes(const dt_shared_options *options);
/* --device list was given. */
bool dt_wants_devices(const dt_shared_options *options);
/* A program's name in its usage line: how it was called, without the folder. */
const char *dt_program_name(int argc, char *const *argv);
/* What programs do first with their command line: --help, --version, --device list, flags that are none, and no flag at all where
 * `arguments` begins with one that is needed. True to go on; else the program ends with *out_exit. options begins with
 * dt_shared_options, initialized; the usage is "PROGRAM ARGUMENTS". */
bool dt_options_begin(const dt_option_group *const *groups, size_t n_groups, int argc, char **argv, void *options,
                      const char *arguments, int *out_exit);
/* For dt_model_open: devices, layers, mapping. */
void dt_shared_options_model(const dt_shared_options *options, dt_model_params *out);
/* What the flags mean to the library. grammar: the text of --grammar-file, or NULL. *out_eviction is NULL when it is off. */
void dt_shared_options_sampler(const dt_shared_options *options, const char *grammar, dt_sampler_params *out);
void dt_shared_options_session(const dt_shared_options *options, dt_session_params *out);
/* The sizes and slots alone, for settings made otherwise. */
dt_status dt_shared_options_sizes(const dt_shared_options *options, dt_eviction *eviction, dt_error *error);
dt_status dt_shared_options_eviction(const dt_shared_options *options, const dt_model *model, dt_eviction **out_eviction,
                                     dt_error *error);
/* The word of a choice: "f16", "full"... */
const char *dt_kv_type_word(int64_t choice);
const char *dt_prefill_word(int64_t choice);

#endif
