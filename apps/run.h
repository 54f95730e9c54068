/*
 * One run of a program that generates text: tokens in, text to stdout as it comes, interruption, counting.
 *
 * Invariants: only whole UTF-8 characters are written, except that at the end whatever is left goes out; nothing but generated
 * text (and the prompt where asked) reaches stdout; a closed stdout or Ctrl-C ends the run without an error; the text's last
 * line is ended before anything about the reply is logged.
 */
#ifndef DT_APPS_RUN_H
#define DT_APPS_RUN_H

#include "report.h"

#include <signal.h>
#include <sys/types.h>

/* The first signal that asked to end: SIGINT (Ctrl-C), SIGTERM or SIGHUP; 0 = none. A second one wipes the bar and ends the process
 * with 128 + its number. */
extern volatile sig_atomic_t dt_interrupted;
/* Signals as above, no death by a closed pipe, and descriptors 0 to 2 are never reused for files. */
void dt_run_signals(void);
/* From now on only what this process, the parent, passes on counts: it hears of the signals too. */
void dt_run_signals_from(pid_t parent);
/* The signal by which a parent passes one on. Another one: the kernel drops a signal of which one is still waiting, and then nobody
 * could tell whose was lost. */
int dt_run_passed(int signal_number);
/* What caches may take where nobody says: half of the machine's memory, in bytes. */
uint64_t dt_half_of_memory(void);

/* For programs whose conversations share params->kv_memory bytes, before the first: tells that ceiling and what one can come to, and
 * refuses a size that holds none worth beginning (DT_ERR_LIMIT with one that does). *out_n_ctx (may be NULL): how far a conversation
 * sees back. */
dt_status dt_check_cache_memory(const dt_model *model, const dt_session_params *params, const dt_eviction *eviction,
                                int32_t *out_n_ctx, dt_error *error);

typedef struct dt_output {
    char held[4]; /* beginning of a character */
    size_t n_held;
    bool closed;     /* the reader is gone */
    int error;       /* errno of another failure to write */
    bool line_begun; /* something stands on the line */
} dt_output;

void dt_output_write(dt_output *output, const char *bytes, size_t n);
/* Lets the held bytes out and ends the line. */
void dt_output_end(dt_output *output);

typedef struct dt_run {
    const dt_model *model;
    dt_session *session;
    dt_sampler_params sampling;
    dt_sampler *sampler;
    dt_draft *draft; /* NULL = none; not owned */
    int64_t n_predict;
    dt_output output;
    int64_t prompt_tokens, reused_tokens; /* over all replies */
    int32_t *loaded;                      /* [loaded_tokens] what a session file held */
    int64_t loaded_tokens;
    int32_t *generated; /* over all replies */
    size_t n_generated, generated_capacity;
    size_t reply_first; /* of them: the last reply is generated[reply_first..] */
    size_t n_accepted;  /* tokens of the conversation that the sampler knows */
    bool out_of_memory;
    bool context_full; /* the last reply ended for lack of room */
    bool evicts;       /* there are budgets */
} dt_run;

/* run->model, session, sampling, n_predict and, where wanted, draft are set. */
dt_status dt_run_begin(dt_run *run, dt_error *error);
void dt_run_end(dt_run *run);
/* Makes the conversation tokens[n] and generates after it. */
dt_status dt_run_reply(dt_run *run, const int32_t *tokens, size_t n, dt_error *error);

/* The whole of a file, "-" = stdin; NUL-terminated, *out_n without that. Free with free(). DT_ERR_CANCELLED after Ctrl-C. */
dt_status dt_read_file(const char *path, char **out, size_t *out_n, dt_error *error);

#endif
