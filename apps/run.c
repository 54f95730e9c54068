/*
 * Generation as programs do it. See run.h.
 */
#define _POSIX_C_SOURCE 200809L
#include "run.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_TEXT_BYTES ((size_t)1 << 30) /* what the tokenizer takes */

volatile sig_atomic_t dt_interrupted;

static pid_t only_from;              /* 0: anybody */
static volatile sig_atomic_t counts; /* dt_run_signals was called */

static void interrupt(int signal_number) {
    if (dt_interrupted) {
        dt_report_abandon_bar();
        _exit(128 + signal_number);
    }
    dt_interrupted = signal_number;
}

static void on_interrupt(int signal_number) {
    if (only_from == 0) {
        interrupt(signal_number);
    }
}

static void on_passed(int signal_number, siginfo_t *info, void *context) {
    (void)context;
    const int passed = signal_number == SIGUSR1 ? SIGINT : SIGTERM;
    if (info->si_pid == only_from && counts) {
        interrupt(passed);
    } else if (info->si_pid == only_from) {
        signal(passed, SIG_DFL);
        raise(passed);
    }
}

int dt_run_passed(int signal_number) { return signal_number == SIGINT ? SIGUSR1 : SIGUSR2; }

void dt_run_signals_from(pid_t parent) {
    struct sigaction action = {.sa_flags = SA_SIGINFO};
    only_from = parent;
    action.sa_sigaction = on_passed;
    sigemptyset(&action.sa_mask);
    sigaction(SIGUSR1, &action, NULL);
    sigaction(SIGUSR2, &action, NULL);
}

void dt_run_signals(void) {
    int descriptor; /* a write to a closed stdout must fail, not land in a file that got its number */
    do {
        descriptor = open("/dev/null", O_RDONLY);
    } while (descriptor >= 0 && descriptor <= STDERR_FILENO);
    if (descriptor > STDERR_FILENO) {
        close(descriptor);
    }
    counts = 1;
    struct sigaction action = {.sa_handler = on_interrupt}; /* no SA_RESTART: it ends a wait for input too */
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    struct sigaction hang_up;
    if (sigaction(SIGHUP, NULL, &hang_up) == 0 && hang_up.sa_handler != SIG_IGN) { /* ignored: nohup */
        sigaction(SIGHUP, &action, NULL);
    }
    action.sa_handler = SIG_IGN;
    sigaction(SIGPIPE, &action, NULL);
    sigaction(SIGXFSZ, &action, NULL); /* a file beyond the limit is an error of write */
}

uint64_t dt_half_of_memory(void) {
    const long pages = sysconf(_SC_PHYS_PAGES), bytes = sysconf(_SC_PAGESIZE);
    return pages > 0 && bytes > 0 ? (uint64_t)pages * (uint64_t)bytes / 2 : (uint64_t)2 << 30;
}

#define LEAST_CONVERSATION 256 /* tokens; a block of the cache */

/* The longest conversation of up to n tokens that fits into `bytes`; 0: none. */
static int64_t longest_that_fits(const dt_session *session, int64_t n, uint64_t bytes) {
    int64_t fits = 0;
    for (int64_t step = n; step > 0; step /= 2) {
        while (fits + step <= n && dt_session_kv_bound(session, fits + step, 0) <= bytes) {
            fits += step;
        }
    }
    return fits;
}

dt_status dt_check_cache_memory(const dt_model *model, const dt_session_params *params, const dt_eviction *eviction,
                                int32_t *out_n_ctx, dt_error *error) {
    dt_session_params plain = *params;
    dt_group_params group_params = {.n_threads = params->n_threads, .kernel = params->kernel};
    dt_session *probe = NULL;
    plain.eviction = eviction;
    plain.kv_memory = 0; /* how much it would take, whatever there is */
    dt_status status = dt_group_new(model, &group_params, &plain.group, error);
    status = status == DT_OK ? dt_session_new(model, &plain, &probe, error) : status;
    if (status == DT_OK) {
        dt_session_stats fresh; /* what it takes before its first token is counted beside what it may come to */
        dt_session_get_stats(probe, &fresh);
        const uint64_t room = params->kv_memory > fresh.kv_bytes ? params->kv_memory - fresh.kv_bytes : 0;
        const int32_t asked = params->n_ctx > 0 ? params->n_ctx : dt_model_get_info(model)->n_ctx_train;
        const int64_t context = fresh.n_ctx < asked ? fresh.n_ctx : asked; /* one that evicts may go on for ever */
        const int64_t least = LEAST_CONVERSATION < context ? LEAST_CONVERSATION : context;
        const int64_t longest = longest_that_fits(probe, context, room);
        if (longest < least) {
            const uint64_t needed = dt_session_kv_bound(probe, least, 0) + fresh.kv_bytes;
            snprintf(error->message, sizeof error->message,
                     "%s holds no conversation: one of %lld tokens takes %s; give at least --kv-memory %lluK",
                     dt_size_text_of(params->kv_memory).text, (long long)least, dt_size_text_of(needed).text,
                     (unsigned long long)(needed + 1023) / 1024);
            status = error->code = DT_ERR_LIMIT;
        } else if (longest < context) {
            dt_report(DT_LOG_WARN, "KV memory: %s holds a conversation of %lld tokens, not the context's %lld",
                      dt_size_text_of(params->kv_memory).text, (long long)longest, (long long)context);
        } else {
            dt_report(DT_LOG_INFO, "KV memory: at most %s; a conversation of %lld tokens takes up to %s",
                      dt_size_text_of(params->kv_memory).text, (long long)context,
                      dt_size_text_of(dt_session_kv_bound(probe, context, 0) + fresh.kv_bytes).text);
        }
        if (out_n_ctx != NULL) {
            *out_n_ctx = (int32_t)context;
        }
    }
    dt_session_free(probe);
    dt_group_free(plain.group);
    return status;
}

/* ---- output ------------------------------------------------------------------------------------- */

static void write_bytes(dt_output *output, const char *bytes, size_t n) {
    if (n == 0 || output->closed || output->error != 0) {
        return;
    }
    for (size_t done = 0; done < n;) { /* not stdio, which loses text when a signal interrupts it */
        const ssize_t written = write(STDOUT_FILENO, bytes + done, n - done);
        if (written >= 0) {
            done += (size_t)written;
        } else if (errno != EINTR) {
            output->closed = errno == EPIPE || errno == EBADF;
            output->error = output->closed ? 0 : errno;
            return;
        }
    }
    output->line_begun = bytes[n - 1] != '\n';
    dt_report_text(output->line_begun);
}

/* How many bytes the character that begins with `first` has; 1 for a byte that can't begin one. */
static size_t character_bytes(unsigned char first) {
    return first >= 0xF0 && first < 0xF8 ? 4 : first >= 0xE0 && first < 0xF0 ? 3 : first >= 0xC2 && first < 0xE0 ? 2 : 1;
}

void dt_output_write(dt_output *output, const char *bytes, size_t n) {
    for (size_t i = 0, from = 0; i < n; i++) {
        const bool continues = ((unsigned char)bytes[i] & 0xC0) == 0x80;
        if (output->n_held > 0) {
            if (continues) {
                output->held[output->n_held++] = bytes[i];
                if (output->n_held < character_bytes((unsigned char)output->held[0])) {
                    continue;
                }
            }
            write_bytes(output, output->held, output->n_held); /* whole, or broken by what follows */
            output->n_held = 0;
            if (continues) {
                continue;
            }
        }
        /* a run of whole characters from here */
        for (from = i; i < n && i + character_bytes((unsigned char)bytes[i]) <= n; i++) {
        }
        write_bytes(output, bytes + from, i - from);
        if (i < n) {
            output->held[output->n_held++] = bytes[i];
        }
    }
}

void dt_output_end(dt_output *output) {
    write_bytes(output, output->held, output->n_held);
    output->n_held = 0;
    write_bytes(output, "\n", 1);
    output->line_begun = false;
    dt_report_text(false);
}

/* ---- generation --------------------------------------------------------------------------------- */

static dt_status renew_sampler(dt_run *run, dt_error *error) {
    dt_sampler_free(run->sampler);
    run->sampler = NULL;
    run->n_accepted = 0;
    return dt_sampler_new(run->model, &run->sampling, &run->sampler, error);
}

dt_status dt_run_begin(dt_run *run, dt_error *error) {
    const dt_status status = renew_sampler(run, error);
    if (status == DT_OK) {
        run->sampling.seed = dt_sampler_seed(run->sampler);
    }
    return status;
}

void dt_run_end(dt_run *run) {
    dt_sampler_free(run->sampler);
    free(run->generated);
    free(run->loaded);
}

static bool on_prefill(int64_t done, int64_t total, void *user) {
    const dt_run *run = user;
    if (dt_interrupted) {
        return false;
    }
    dt_report_progress("reading", done, total, run->session);
    return true;
}

static bool keep_token(dt_run *run, int32_t token) {
    if (run->n_generated == run->generated_capacity) {
        const size_t capacity = run->generated_capacity * 2 + 256;
        int32_t *grown = realloc(run->generated, capacity * sizeof *grown);
        if (grown == NULL) {
            return false;
        }
        run->generated = grown;
        run->generated_capacity = capacity;
    }
    run->generated[run->n_generated++] = token;
    return true;
}

static bool on_token(int32_t token, void *user) {
    dt_run *run = user;
    char bytes[1024];
    if (!keep_token(run, token)) {
        run->out_of_memory = true;
        return false;
    }
    const size_t n = dt_token_bytes(run->model, token, false, bytes, sizeof bytes);
    dt_output_write(&run->output, bytes, n < sizeof bytes ? n : sizeof bytes);
    if (dt_report_has_bar() && !isatty(STDOUT_FILENO)) {
        dt_report_progress("writing", (int64_t)(run->n_generated - run->reply_first), run->n_predict, run->session);
    }
    return !dt_interrupted && !run->output.closed && run->output.error == 0;
}

static dt_status tell_sampler(dt_run *run, const int32_t *tokens, size_t n, dt_error *error) {
    for (; run->n_accepted < n; run->n_accepted++) {
        const dt_status status = dt_sampler_accept(run->sampler, tokens[run->n_accepted], false, error);
        if (status != DT_OK) {
            return status;
        }
    }
    return DT_OK;
}

/* Reads the conversation and generates; *out_asked: it came to generating. */
static dt_status read_and_generate(dt_run *run, const int32_t *tokens, size_t n, bool *out_asked, dt_error *error) {
    dt_sync_result synced = {0};
    dt_status status = dt_session_sync(run->session, tokens, n, on_prefill, run, &synced, error);
    dt_report_progress_end();
    run->prompt_tokens += synced.reused_tokens + synced.computed_tokens;
    run->reused_tokens += synced.reused_tokens;
    if (status == DT_ERR_CANCELLED && dt_interrupted) {
        return DT_OK;
    }
    if (status != DT_OK || run->n_predict == 0 || dt_interrupted) {
        return status;
    }
    *out_asked = true;
    dt_generate_result result = {0};
    status = dt_generate_drafted(run->session, run->sampler, run->draft, run->n_predict, on_token, run, &result, error);
    dt_report_progress_end();
    run->n_accepted += run->n_generated - run->reply_first;
    run->context_full = result.why == DT_STOP_CONTEXT;
    return status;
}

dt_status dt_run_reply(dt_run *run, const int32_t *tokens, size_t n, dt_error *error) {
    run->reply_first = run->n_generated;
    const bool constrained = run->sampling.grammar != NULL || run->sampling.json_schema != NULL;
    bool asked = false;
    dt_status status =
        constrained && run->n_accepted > 0 ? renew_sampler(run, error) : DT_OK; /* each reply follows the grammar anew */
    if (status == DT_OK) {
        status = tell_sampler(run, tokens, n, error);
    }
    if (status == DT_OK && !dt_interrupted) {
        status = read_and_generate(run, tokens, n, &asked, error);
    }
    if ((asked && status == DT_OK) || run->output.line_begun || run->output.n_held > 0) {
        dt_output_end(&run->output);
    }
    if (status == DT_OK && run->out_of_memory) {
        error->code = status = DT_ERR_MEMORY;
        snprintf(error->message, sizeof error->message, "out of memory for the generated tokens");
    }
    if (status == DT_OK && run->output.error != 0) {
        error->code = status = DT_ERR_IO;
        snprintf(error->message, sizeof error->message, "the text can't be written to stdout: %s", strerror(run->output.error));
    }
    if (status == DT_OK && run->context_full) {
        dt_report(DT_LOG_WARN, "the text reached the longest length of the conversation and ends here; -c sets it%s",
                  run->evicts ? ", and budgets that leave room in it let the text go on (docs/memory.md)" : "");
    }
    if (status == DT_OK && dt_interrupted) {
        dt_report(DT_LOG_INFO, "interrupted");
    }
    return status;
}

/* ---- files -------------------------------------------------------------------------------------- */

/* Reads to the end into *text, which grows. False with errno set; EINTR after Ctrl-C, EFBIG for what is longer than any text. One
 * empty read is the end: a terminal gives it once, for Ctrl-D. */
static bool read_all(int descriptor, char **text, size_t *out_n) {
    size_t n = 0, capacity = 0;
    while (true) {
        if (n > MAX_TEXT_BYTES) {
            errno = EFBIG;
            return false;
        }
        if (capacity - n < 4096) {
            char *grown = realloc(*text, capacity = capacity * 2 + (1 << 16));
            if (grown == NULL) {
                errno = ENOMEM;
                return false;
            }
            *text = grown;
        }
        const ssize_t got = dt_interrupted ? (errno = EINTR, -1) : read(descriptor, *text + n, capacity - n - 1);
        if (got > 0) {
            n += (size_t)got;
        } else if (got == 0) {
            (*text)[n] = 0;
            *out_n = n;
            return true;
        } else if (errno != EINTR || dt_interrupted) {
            return false;
        }
    }
}

dt_status dt_read_file(const char *path, char **out, size_t *out_n, dt_error *error) {
    const bool standard = strcmp(path, "-") == 0;
    if (standard && isatty(STDIN_FILENO)) {
        dt_report(DT_LOG_INFO, "reading the prompt from the terminal; Ctrl-D on an empty line ends it");
    }
    char *text = NULL;
    const int descriptor = standard ? STDIN_FILENO : open(path, O_RDONLY | O_CLOEXEC);
    const bool read_whole = descriptor >= 0 && read_all(descriptor, &text, out_n);
    const int reason = errno;
    if (descriptor >= 0 && !standard) {
        close(descriptor);
    }
    if (!read_whole) {
        free(text);
        if (reason == EFBIG) {
            snprintf(error->message, sizeof error->message, "%s holds more than the 1 GiB that a text may have",
                     standard ? "stdin" : path);
            return error->code = DT_ERR_LIMIT;
        }
        snprintf(error->message, sizeof error->message, "%s can't be read: %s", standard ? "stdin" : path, strerror(reason));
        return error->code = reason == EINTR ? DT_ERR_CANCELLED : reason == ENOMEM ? DT_ERR_MEMORY : DT_ERR_IO;
    }
    *out = text;
    return DT_OK;
}
