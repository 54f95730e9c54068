/*
 * Log, progress bar, timings, --stats-json. See report.h.
 *
 * The programs call no setlocale, so printf writes points; jansson does so in any locale.
 */
#define _POSIX_C_SOURCE 200809L /* clock_gettime */
#define _DEFAULT_SOURCE         /* TIOCGWINSZ on glibc */
#define _DARWIN_C_SOURCE        /* TIOCGWINSZ on macOS */
#include "report.h"
#include "fail.h"
#include "json_parts.h"

#include <jansson.h>

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#define BAR_COLUMNS 80 /* where the terminal doesn't tell its width */
#define BAR_WIPE "\r\033[K"
#define BAR_DELAY_S 0.5 /* what is quicker needs no bar */

static struct {
    dt_log_level level;
    bool bar, sessions_quiet;
    bool one_terminal; /* for text and log */
    bool text_begun;   /* its last line is text, without its end */
    volatile sig_atomic_t drawn;
    double started, last;        /* seconds; started 0 = no progress yet */
    int64_t done_at_start, done; /* tokens: at the first call, after the last step */
    double stepped;              /* when the last step ended */
} report;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* lines and the bar may come from several threads */

double dt_seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

dt_size_text dt_size_text_of(uint64_t bytes) {
    dt_size_text size;
    if (bytes < 1024) {
        snprintf(size.text, sizeof size.text, "%d byte%s", (int)bytes, bytes == 1 ? "" : "s");
    } else if (bytes < 1u << 20) {
        snprintf(size.text, sizeof size.text, "%.1f KiB", (double)bytes / 1024);
    } else {
        snprintf(size.text, sizeof size.text, "%.1f MiB", (double)bytes / 1048576);
    }
    return size;
}

static void wipe_bar(void) {
    if (report.drawn) {
        fputs(BAR_WIPE, stderr);
        report.drawn = 0;
    }
}

void dt_report_abandon_bar(void) {
    if (report.drawn && write(STDERR_FILENO, BAR_WIPE, sizeof BAR_WIPE - 1) > 0) {
        report.drawn = 0;
    }
}

static size_t bar_columns(void) {
    struct winsize size;
    return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1 ? size.ws_col : BAR_COLUMNS;
}

static void print_line(dt_log_level level, const char *line) {
    if (level <= report.level) {
        pthread_mutex_lock(&lock);
        wipe_bar();
        fprintf(stderr, "%s%s%s\n", report.text_begun ? "\n" : "",
                level == DT_LOG_ERROR  ? "error: "
                : level == DT_LOG_WARN ? "warning: "
                                       : "",
                line);
        report.text_begun = false;
        pthread_mutex_unlock(&lock);
    }
}

#define N_TOLD 16
#define TOLD_AGAIN_S 60

/* Whether a line was told in the last minute or, once, before at all: programs that make many sessions would hear the same of each,
 * and a server the same of the settings of each request. Of the latest N_TOLD different ones. */
static bool is_told(const char *line, bool once) {
    static struct {
        uint64_t hash;
        double when;
    } known[N_TOLD];
    static int next;
    uint64_t hash = UINT64_C(14695981039346656037); /* FNV-1a */
    for (const char *c = line; *c != 0; c++) {
        hash = (hash ^ (unsigned char)*c) * UINT64_C(1099511628211);
    }
    const double now = dt_seconds_now();
    int at = 0;
    pthread_mutex_lock(&lock);
    while (at < N_TOLD && known[at].hash != hash) {
        at++;
    }
    const bool told = at < N_TOLD && (once || now - known[at].when < TOLD_AGAIN_S);
    if (at == N_TOLD) {
        at = next++ % N_TOLD;
    }
    if (!told) {
        known[at].hash = hash;
        known[at].when = now;
    }
    pthread_mutex_unlock(&lock);
    return told;
}

static void receive_log(dt_log_level level, const char *line, void *user) {
    (void)user;
    const bool of_settings = level == DT_LOG_INFO && report.level == DT_LOG_INFO && strncmp(line, "TLC: ", 5) == 0;
    if (of_settings && !report.sessions_quiet && is_told(line, true)) {
        return;
    }
    if (level == DT_LOG_WARN ? !is_told(line, report.sessions_quiet)
                             : level != DT_LOG_INFO || report.level != DT_LOG_INFO || !report.sessions_quiet) {
        print_line(level, line);
    }
}

int dt_print_devices(void) {
    dt_error error;
    char *text = NULL;
    if (dt_devices_describe(&text, &error) != DT_OK) {
        fprintf(stderr, "error: %s\n", error.message);
        return 1;
    }
    fputs(text, stdout);
    dt_free(text);
    return dt_report_printed(0);
}

dt_status dt_report_eviction(const dt_eviction *eviction, const char *more, dt_error *error) {
    if (eviction == NULL) {
        dt_report(DT_LOG_INFO, "TLC: off");
        return DT_OK;
    }
    char *lines = NULL;
    const dt_status status = dt_eviction_describe(eviction, &lines, error);
    if (status != DT_OK) {
        return status;
    }
    dt_report(DT_LOG_INFO, "TLC: on, %s%s", dt_eviction_name(eviction), more);
    for (char *line = lines; *line != 0;) {
        const size_t n = strcspn(line, "\n");
        dt_report(DT_LOG_INFO, "%.*s", (int)n, line);
        line += n + (line[n] == '\n');
    }
    dt_free(lines);
    return DT_OK;
}

void dt_report_init(dt_log_level level, bool bar) {
    report.level = level;
    report.one_terminal = isatty(STDOUT_FILENO) && isatty(STDERR_FILENO);
    report.bar = bar && level >= DT_LOG_INFO && isatty(STDERR_FILENO);
    dt_log_set(receive_log, NULL);
}

dt_status dt_report_flush_table(dt_error *error) {
    if (fflush(stdout) == 0 || errno == EPIPE) {
        return DT_OK;
    }
    snprintf(error->message, sizeof error->message, "the table can't be written to stdout: %s", strerror(errno));
    return error->code = DT_ERR_IO;
}

int dt_report_printed(int exit_code) {
    const bool written = fflush(stdout) == 0 && ferror(stdout) == 0; /* a long text may have failed before its end */
    if (written || errno == EPIPE) {
        return exit_code;
    }
    fprintf(stderr, "error: what was asked for can't be written to stdout: %s\n", strerror(errno));
    return 1;
}

void dt_report_text(bool begun) {
    pthread_mutex_lock(&lock);
    report.text_begun = begun && report.one_terminal;
    pthread_mutex_unlock(&lock);
}

void dt_report_sessions(bool shown) { report.sessions_quiet = !shown; }

void dt_report(dt_log_level level, const char *format, ...) {
    char line[2048];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    print_line(level, line);
}

int dt_report_failure(const dt_error *error, bool setting_up) {
    dt_report(DT_LOG_ERROR, "%s", error->message);
    const dt_status s = error->code;
    return setting_up && (s == DT_ERR_ARGUMENT || s == DT_ERR_CONFIG || s == DT_ERR_IO || s == DT_ERR_LIMIT) ? 2 : 1;
}

static void draw_bar(const char *line) {
    const size_t n = strlen(line), room = bar_columns() - 1; /* a full line would wrap, and then stay */
    pthread_mutex_lock(&lock);
    fprintf(stderr, "\r%.*s\033[K", (int)(n < room ? n : room), line);
    fflush(stderr);
    report.drawn = 1;
    pthread_mutex_unlock(&lock);
}

bool dt_report_has_bar(void) { return report.bar; }

void dt_report_progress(const char *what, int64_t done, int64_t total, const dt_session *session) {
    if (!report.bar) {
        return;
    }
    const double now = dt_seconds_now();
    if (report.started == 0) {
        report.started = report.stepped = now;
        report.done_at_start = report.done = done;
    }
    if (done != report.done) {
        report.done = done;
        report.stepped = now;
    }
    if (now - report.started < BAR_DELAY_S || now - report.last < 0.1) {
        return;
    }
    report.last = now;
    char percent[32] = "", numbers[128] = "", line[256];
    if (total > 0) {
        snprintf(percent, sizeof percent, " %3d %%", (int)(100 * done / total));
    }
    if (session != NULL && report.stepped > report.started) { /* the rate's clock stands still between steps, as the count does */
        dt_session_stats stats;
        dt_session_get_stats(session, &stats);
        snprintf(numbers, sizeof numbers, "  %lld tokens  %.1f tokens/s  KV %s", (long long)done,
                 (double)(done - report.done_at_start) / (report.stepped - report.started), dt_size_text_of(stats.kv_bytes).text);
    }
    snprintf(line, sizeof line, "%s%s%s", what, percent, numbers);
    draw_bar(line);
}

void dt_report_bar(const char *line) {
    const double now = dt_seconds_now();
    if (report.bar && now - report.last >= 0.1) {
        report.last = now;
        draw_bar(line);
    }
}

void dt_report_progress_end(void) {
    wipe_bar();
    report.started = report.last = 0;
}

static double per_second(int64_t n, double ms) { return n > 0 && ms > 0 ? (double)n * 1000.0 / ms : 0; }

/* Tokens of the conversation that a layer no longer has, the mean of its lanes. */
static int64_t tokens_let_go(const dt_session *session, const dt_layer_stats *layer) {
    dt_session_stats s;
    dt_session_get_stats(session, &s);
    return llround((double)s.n_tokens - layer->mean_length);
}

/* The layer after a run of layers from `first` on that let go equally many tokens, *n; `first` where there is none. */
static int32_t run_of_layers(const dt_session *session, int32_t first, int64_t *n) {
    dt_layer_stats layer;
    int32_t next = first;
    while (dt_session_get_layer_stats(session, next, &layer) == DT_OK && (next == first || tokens_let_go(session, &layer) == *n)) {
        *n = tokens_let_go(session, &layer);
        next++;
    }
    return next;
}

#define MOST_RUNS 4 /* that have a line each */

/* A line for each run of layers that let go equally many tokens; where nearly each let go another number, one for all. */
static void report_let_go(const dt_session *session, int32_t n_tokens) {
    int64_t n = 0, least = INT64_MAX, most = 0;
    int32_t n_runs = 0, end = 0;
    for (int32_t next; (next = run_of_layers(session, end, &n)) > end; end = next, n_runs++) {
        least = n < least ? n : least;
        most = n > most ? n : most;
    }
    if (n_runs > MOST_RUNS) {
        dt_report(DT_LOG_INFO, "TLC: %d layers let go %lld to %lld of %d tokens (--stats-json tells each)", (int)end,
                  (long long)least, (long long)most, (int)n_tokens);
        return;
    }
    for (int32_t first = 0, next; (next = run_of_layers(session, first, &n)) > first; first = next) {
        if (next == first + 1) {
            dt_report(DT_LOG_INFO, "TLC: layer %d let go %lld of %d tokens", (int)first, (long long)n, (int)n_tokens);
        } else {
            dt_report(DT_LOG_INFO, "TLC: layers %d-%d let go %lld of %d tokens", (int)first, (int)next - 1, (long long)n,
                      (int)n_tokens);
        }
    }
}

/* Whether a layer lacks tokens, also those that an earlier run let go; what lies behind a layer's own window is no loss. */
static bool lacks_tokens(const dt_model *model, const dt_session *session) {
    const int32_t *windows = dt_model_get_info(model)->windows;
    dt_layer_stats layer;
    bool lacks = false;
    for (int32_t i = 0; dt_session_get_layer_stats(session, i, &layer) == DT_OK; i++) {
        lacks = lacks || (windows[i] == 0 && tokens_let_go(session, &layer) > 0);
    }
    return lacks;
}

void dt_report_timings(const dt_run_numbers *numbers, const dt_model *model, const dt_session *session) {
    dt_session_stats s;
    dt_session_get_stats(session, &s);
    dt_report(DT_LOG_INFO, "load     %10.1f ms", numbers->load_ms);
    dt_report(DT_LOG_INFO, "prefill  %10.1f ms  %7lld tokens  %9.1f tokens/s  (%lld reused)", s.prefill_ms,
              (long long)s.prefill_tokens, per_second(s.prefill_tokens, s.prefill_ms), (long long)numbers->reused_tokens);
    dt_report(DT_LOG_INFO, "decode   %10.1f ms  %7lld tokens  %9.1f tokens/s", s.decode_ms, (long long)s.decode_tokens,
              per_second(s.decode_tokens, s.decode_ms));
    if (s.draft_prefill_tokens > 0) {
        dt_report(DT_LOG_INFO, "draft    %10.1f ms  %7lld tokens  %9.1f tokens/s  read by the smaller model", s.draft_prefill_ms,
                  (long long)s.draft_prefill_tokens, per_second(s.draft_prefill_tokens, s.draft_prefill_ms));
    }
    if (s.draft_proposed > 0) {
        dt_report(DT_LOG_INFO, "draft    %10lld of %lld guessed tokens right", (long long)s.draft_accepted,
                  (long long)s.draft_proposed);
    }
    if (numbers->eviction) {
        dt_report(DT_LOG_INFO, "eviction %10.1f ms  %7lld layer round%s  %lld tokens evicted", s.eviction_ms,
                  (long long)s.eviction_rounds, s.eviction_rounds == 1 ? "" : "s", (long long)s.evicted_tokens);
        if (s.eviction_rounds == 0) {
            dt_report(DT_LOG_INFO, "TLC: budget not reached: nothing was evicted%s",
                      numbers->loaded_tokens > 0 ? " in this run" : "");
        }
    }
    if (s.eviction_rounds > 0) {
        report_let_go(session, s.n_tokens);
    } else if (numbers->loaded_tokens > 0 && lacks_tokens(model, session)) {
        dt_report(DT_LOG_INFO, "TLC: the saved conversation had let go tokens before:");
        report_let_go(session, s.n_tokens);
    }
    dt_report(DT_LOG_INFO, "KV cache %14s now  %s peak  %s with all %d tokens", dt_size_text_of(s.kv_bytes).text,
              dt_size_text_of(s.kv_bytes_peak).text, dt_size_text_of(s.kv_bytes_full).text, (int)s.n_tokens);
}

/* ---- numbers as JSON ---------------------------------------------------------------------------- */

static json_t *json_number(double value) { return json_real(isfinite(value) ? round(value * 1000.0) / 1000.0 : 0); }

static int64_t rss_bytes_peak(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
#if defined(__APPLE__)
    return (int64_t)usage.ru_maxrss;
#else
    return (int64_t)usage.ru_maxrss * 1024;
#endif
}

static json_t *json_layers(const dt_session *session, int32_t n_layers) {
    json_t *list = json_array();
    for (int32_t i = 0; i < n_layers; i++) {
        dt_layer_stats layer;
        if (dt_session_get_layer_stats(session, i, &layer) == DT_OK) {
            dt_json_append(&list, json_pack("{s:i, s:s, s:i, s:i, s:o, s:i, s:I}", "layer", (int)i, "policy", layer.policy,
                                            "max_cache_size", (int)layer.max_cache_size, "length", (int)layer.length, "mean_length",
                                            json_number(layer.mean_length), "slots_used", (int)layer.slots_used, "evicted_tokens",
                                            (json_int_t)tokens_let_go(session, &layer)));
        }
    }
    return list;
}

static json_t *json_stats(const dt_run_numbers *numbers, const dt_model *model, const dt_session *session) {
    const dt_model_info *info = dt_model_get_info(model);
    dt_session_stats s;
    dt_session_get_stats(session, &s);
    json_t *tokens = json_array();
    for (int64_t i = 0; i < numbers->generated_tokens; i++) {
        dt_json_append(&tokens, json_integer(numbers->generated[i]));
    }
    json_t *root = json_object();
    dt_json_set(&root, "model", dt_json_text(numbers->model));
    dt_json_set(&root, "arch", dt_json_text(info->architecture));
    dt_json_set(&root, "n_layers", json_integer(info->n_layers));
    dt_json_set(&root, "threads", json_integer(s.n_threads));
    dt_json_set(&root, "kernel", dt_json_text(s.kernel));
    dt_json_set(&root, "device", dt_json_text(info->device));
    dt_json_set(&root, "kv_type", dt_json_text(s.kv_type == DT_KV_F16 ? "f16" : "int8"));
    dt_json_set(&root, "prompt_tokens", json_integer(numbers->prompt_tokens));
    dt_json_set(&root, "prefill_ms", json_number(s.prefill_ms));
    dt_json_set(&root, "prefill_tps", json_number(per_second(s.prefill_tokens, s.prefill_ms)));
    dt_json_set(&root, "generated_tokens", json_integer(numbers->generated_tokens));
    dt_json_set(&root, "decode_ms", json_number(s.decode_ms));
    dt_json_set(&root, "decode_tps", json_number(per_second(s.decode_tokens, s.decode_ms)));
    dt_json_set(&root, "load_ms", json_number(numbers->load_ms));
    dt_json_set(&root, "reused_tokens", json_integer(numbers->reused_tokens));
    dt_json_set(&root, "kv_bytes", json_integer((json_int_t)s.kv_bytes));
    dt_json_set(&root, "kv_bytes_peak", json_integer((json_int_t)s.kv_bytes_peak));
    dt_json_set(&root, "kv_bytes_full", json_integer((json_int_t)s.kv_bytes_full));
    dt_json_set(&root, "rss_bytes_peak", json_integer(rss_bytes_peak()));
    dt_json_set(&root, "eviction",
                json_pack("{s:b, s:I, s:I, s:o, s:i}", "enabled", (int)numbers->eviction, "rounds", (json_int_t)s.eviction_rounds,
                          "evicted_tokens", (json_int_t)s.evicted_tokens, "ms", json_number(s.eviction_ms), "total_cache_size",
                          (int)s.total_cache_size));
    dt_json_set(&root, "draft",
                json_pack("{s:I, s:I, s:I, s:o}", "proposed", (json_int_t)s.draft_proposed, "accepted",
                          (json_int_t)s.draft_accepted, "prefill_tokens", (json_int_t)s.draft_prefill_tokens, "prefill_ms",
                          json_number(s.draft_prefill_ms)));
    dt_json_set(&root, "layers", json_layers(session, info->n_layers));
    dt_json_set(&root, "generated_token_ids", tokens);
    return root;
}

dt_status dt_report_write_stats(dt_stats_file *file, const dt_run_numbers *numbers, const dt_model *model,
                                const dt_session *session, dt_error *error) {
    json_t *root = json_stats(numbers, model, session);
    char *text = dt_json_dump(root, JSON_INDENT(2) | JSON_REAL_PRECISION(15)); /* 17 digits would show what rounding left over */
    json_decref(root);
    if (text == NULL) {
        return dt_app_fail(error, DT_ERR_MEMORY, "out of memory for the numbers of the run");
    }
    const dt_status status = dt_stats_file_write_text(file, text, error);
    free(text);
    return status;
}
