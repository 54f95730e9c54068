/*
 * What the subcommands of ./deeptutor-eval share: flags, the model, a text's tokens, the settings to compare, the file of results.
 *
 * Invariants: kld, needle and calibrate compare forks of one cache, so that only eviction differs (ab runs each side by itself, to
 * time it); stdout holds the result and nothing else; the JSON file is whole or not there.
 */
#ifndef DT_APPS_EVAL_H
#define DT_APPS_EVAL_H

#include "fail.h"
#include "options.h"
#include "report.h"

#include <jansson.h>

#define EVAL_MAX_SETTINGS 64

typedef struct eval_options {
    dt_shared_options shared; /* first: the shared tables' offsets */
    const char *file, *json, *policy, *kept, *settings, *input, *chat_template;
    int64_t n_context, n_continuation, n_chunks, n_samples, n_needles, n_predict, n_times;
    int64_t evict, question, form, score, budget;                          /* choices; score and budget below 0: not given */
    double depth_low, depth_high, quote;                                   /* quote below 0: not given */
    double min_exact, min_rouge, min_agreement, min_speedup, max_kv_share; /* below 0: not given */
    int64_t seed;
    bool skip_long;
} eval_options;

/* One way to evict. */
typedef struct eval_setting {
    double kept; /* share of the context; 0 = as the flags or the file say */
    dt_eviction *eviction;
    dt_evict evict;
    double quote;                /* kld: a passage from this depth of the context is what follows; below 0: the text itself */
    char *name;                  /* in a file of settings; else NULL */
    int64_t n_rounds, n_evicted; /* of layers; tokens, a mean of each layer's KV heads: in all its sessions */
} eval_setting;

typedef struct eval {
    const eval_options *options;
    const char *command;
    dt_model *model;
    int32_t *text; /* the file's tokens */
    size_t n_text;
    json_t *rows; /* ab: the lines of the input, {"line", "row"} */
    eval_setting settings[EVAL_MAX_SETTINGS];
    size_t n_settings;
    dt_eviction *observed; /* what the base session collects attention for: all settings */
    json_t *result;        /* what --json writes */
    bool unopened;         /* the model can't be opened */
    bool measuring;        /* what fails now is no bad usage */
    bool rejected;         /* a threshold was missed */
} eval;

/* This project's pages, which calibrate learns from where no text is given (cmake/dt_text.cmake). */
extern const char *const eval_calibration_text;
extern const size_t eval_calibration_bytes;

/* Each measures, prints its table and fills b->result. */
dt_status eval_kld(eval *e, dt_error *error);
dt_status eval_needle(eval *e, dt_error *error);
dt_status eval_calibrate(eval *e, dt_error *error);
dt_status eval_long(eval *e, dt_error *error);
dt_status eval_ab(eval *e, dt_error *error);

/* The settings that flags, or the file of --settings, ask for, and what is observed for them. Needs the model. */
dt_status eval_make_settings(eval *e, dt_error *error);
/* What they are, layer by layer, to the log: before the first measurement, once nothing is left to be refused. */
dt_status eval_tell_settings(const eval *e, dt_error *error);
/* Tokens that a setting of flags gives a layer; kept: as in eval_setting. */
int64_t eval_size_of(const eval *e, double kept);
/* Reads and checks the lines of ab's input; needs no model. */
dt_status eval_ab_read(eval *e, dt_error *error);

/* A session that collects what the settings' scores need and evicts nothing; forks of it are compared. Free with dt_session_free.
 */
dt_status eval_base_session(const eval *e, dt_session **out, dt_error *error);
/* The fork under settings[i], as --evict says; with streaming prefill a session that reads tokens[n] itself. */
dt_status eval_evicted_session(const eval *e, const dt_session *base, const eval_setting *setting, dt_session **out,
                               dt_error *error);
/* Counts what a session under the setting has evicted: a comparison in which nothing was is told as one. */
void eval_note_evicted(eval_setting *setting, const dt_session *session);
/* Kept entries, memory slots included, over all layers and lanes, as a share of the tokens so far. */
double eval_kept_share(const eval *e, const dt_session *session);
const char *eval_evict_word(dt_evict evict);
/* Shows progress; false after Ctrl-C. */
bool eval_progress(int64_t done, int64_t total);
/* The same while a text is read, which is one of the things to do: user is int64_t[2], how many are done, and how many there are. */
bool eval_on_prefill(int64_t done, int64_t total, void *user);
/* The beginning of a table's line, where the settings have names: one, or NULL for the line below the head. */
void eval_print_name(const eval *e, const char *name);
/* Puts the settings' rows into the result; a single one is the result. Takes rows over. */
void eval_set_result(eval *e, json_t *rows);
/* The refusal of a text that has no room for n_pieces of n_tokens each; says what would fit. */
dt_status eval_too_short(const eval *e, size_t n_pieces, size_t n_tokens, dt_error *error);

/* Mean and its standard error of n numbers; of less than two the error is unknown: NaN. */
typedef struct eval_mean {
    double mean, error;
} eval_mean;
eval_mean eval_mean_of(const double *values, size_t n);
/* The error with four decimals, and as JSON; "-" and null where it is unknown. */
typedef struct eval_error_text {
    char text[32];
} eval_error_text;
eval_error_text eval_error_text_of(eval_mean mean);
json_t *eval_error_json(eval_mean mean);

#endif
