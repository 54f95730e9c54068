/*
 * What a run tells about itself: log lines, progress bar and timings on stderr, its numbers as JSON.
 *
 * Invariants: nothing here writes to stdout; the bar is drawn on a terminal only and wiped before any other line.
 */
#ifndef DT_APPS_REPORT_H
#define DT_APPS_REPORT_H

#include "stats_file.h"

/* A clock that only goes forward. */
double dt_seconds_now(void);
/* For --device list: what this build can compute on, to stdout; the exit code. */
int dt_print_devices(void);
/* Lines of `level` and above go to stderr; bar: where stderr is a terminal. Becomes the receiver of the library's log. */
void dt_report_init(dt_log_level level, bool bar);
/* Writes out what stdout still holds: a table that can't be written is no result. A reader that leaves has what it wanted. */
dt_status dt_report_flush_table(dt_error *error);
/* The same of a text that was asked for in place of a run: a help text, a version, a list. The program's exit code: exit_code, or 1
 * where it can't be written, which is told. */
int dt_report_printed(int exit_code);
/* Text has begun a line of stdout, or ended it: where that is the terminal too, the next line of the log begins a line of its own. */
void dt_report_text(bool begun);
/* Whether what the library says of its sessions is shown (it is) where no more than that is asked for. Programs that make many show
 * it of the first. */
void dt_report_sessions(bool shown);
void dt_report(dt_log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Tells the error; the exit code: 2 where something that the command line names can't be used, which showed before the work; else
 * 1. */
int dt_report_failure(const dt_error *error, bool setting_up);
/* "12.3 MiB"; below 1 MiB "12.3 KiB", below 1 KiB "30 bytes". */
typedef struct dt_size_text {
    char text[24];
} dt_size_text;
dt_size_text dt_size_text_of(uint64_t bytes);
/* "TLC: on, NAMEmore" and a line for each run of equal layers; eviction NULL: "TLC: off". */
dt_status dt_report_eviction(const dt_eviction *eviction, const char *more, dt_error *error);
/* "reading 62 %  1234 tokens  812.3 tokens/s  KV 12.3 MiB"; total <= 0: unknown. Without a session
 * "reading 62 %": done and total need not be tokens then. Draws at most ten times a second. */
void dt_report_progress(const char *what, int64_t done, int64_t total, const dt_session *session);
/* A bar of the caller's own, likewise. */
void dt_report_bar(const char *line);
/* Wipes the bar, and starts the clock of the next one. */
void dt_report_progress_end(void);
bool dt_report_has_bar(void);
/* Wipes the bar; safe in a signal handler, for a process that ends there. */
void dt_report_abandon_bar(void);

/* The numbers of a run. Token counts are summed over the turns of a chat. */
typedef struct dt_run_numbers {
    const char *model; /* as given */
    int64_t prompt_tokens, reused_tokens, generated_tokens;
    int64_t loaded_tokens; /* of a saved session */
    double load_ms;
    bool eviction;
    const int32_t *generated; /* [generated_tokens] */
} dt_run_numbers;

void dt_report_timings(const dt_run_numbers *numbers, const dt_model *model, const dt_session *session);

/* Writes the numbers to the file. */
dt_status dt_report_write_stats(dt_stats_file *file, const dt_run_numbers *numbers, const dt_model *model,
                                const dt_session *session, dt_error *error);

#endif
