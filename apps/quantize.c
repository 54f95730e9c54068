/*
 * ./deeptutor-quantize IN.gguf OUT.gguf TYPE: libllama's quantizer.
 *
 * Exit code 0: done; 1: it failed; 2: bad usage. A run that is stopped removes what it wrote. stdout stays empty but for --list.
 */
#define _POSIX_C_SOURCE 200809L
#include "options.h"
#include "options_foreign.h"
#include "report.h"

#ifdef __GLIBC__
#include <malloc.h>
#endif
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char temporary[4096];
static volatile int owns_temporary; /* else it is what another run writes, or the user's */

static void remove_temporary(void) {
    if (owns_temporary) {
        unlink(temporary);
    }
}

static void on_stop(int signal_number) {
    remove_temporary();
    _exit(128 + signal_number);
}

static void on_lost_input(int signal_number) {
    static const char message[] = "error: the input became shorter, or can't be read any more, while it was quantized\n";
    (void)signal_number;
    const ssize_t written = write(STDERR_FILENO, message, sizeof message - 1);
    (void)written;
    remove_temporary();
    _exit(1);
}

static void show_progress(int64_t n_done, int64_t n_tensors, void *user) {
    if (n_done == 0) {
        fputs("\rquantizing: reading the model \033[K", stderr);
        return;
    }
    const double started = *(const double *)user, taken = dt_seconds_now() - started;
    const double left = taken * (double)(n_tensors - n_done) / (double)n_done;
    fprintf(stderr, "\rquantizing: tensor %lld of %lld, %.0f s left \033[K", (long long)n_done, (long long)n_tensors, left);
}

static double megabytes(const char *path) {
    struct stat file;
    return stat(path, &file) == 0 ? (double)file.st_size / 1e6 : 0;
}

static int usage(FILE *file, const char *program) {
    fprintf(file, "usage: %s IN.gguf OUT.gguf TYPE [-t THREADS]\n", program);
    fputs("Writes a quantized copy of a model. Tensors that are quantized already stay as\nthey are; where all are, there is "
          "nothing to do, and that is an error.\n\n"
          "Flags\n"
          "  -t, --threads N   threads (all processors)\n"
          "  --list            print the types, one a line\n"
          "  --version         print the version\n"
          "  -h, --help        print this text\n\n"
          "Types\n",
          file);
    for (size_t i = 0; dt_quantize_type(i) != NULL; i++) {
        fprintf(file, "%s%s", i == 0 ? "  " : i % 10 == 0 ? "\n  " : " ", dt_quantize_type(i));
    }
    fputc('\n', file);
    return file == stdout ? dt_report_printed(0) : 2;
}

static int bad_usage(const char *what, const char *word) {
    fprintf(stderr, "error: %s%s; --help tells how it is used\n", what, word);
    return 2;
}

static int bad_flag(const char *name) {
    const dt_foreign_flag *foreign = dt_find_quantize_flag(name);
    if (foreign == NULL) {
        return bad_usage("there is no flag ", name);
    }
    fprintf(stderr, "error: there is no flag %s: %s\n", name, foreign->sentence);
    return 2;
}

/* Fills params; returns an exit code, or -1 to go on. */
static int parse(int argc, char **argv, dt_quantize_params *params) {
    const char *words[3] = {0};
    int n_words = 0;
    for (int i = 1; i < argc; i++) {
        const char *word = argv[i];
        if (strcmp(word, "-h") == 0 || strcmp(word, "--help") == 0) {
            return usage(stdout, dt_program_name(argc, argv));
        }
        if (strcmp(word, "--version") == 0) {
            puts("DeepTutor " DT_VERSION);
            return dt_report_printed(0);
        }
        if (strcmp(word, "--list") == 0) {
            for (size_t k = 0; dt_quantize_type(k) != NULL; k++) {
                puts(dt_quantize_type(k));
            }
            return dt_report_printed(0);
        }
        if (strcmp(word, "-t") == 0 || strcmp(word, "--threads") == 0) {
            char *end = NULL;
            const char *number = i + 1 < argc ? argv[++i] : "";
            const long n = strtol(number, &end, 10);
            if (number[0] < '0' || number[0] > '9' || *end != 0 || n > DT_MAX_THREADS) {
                char most[16];
                snprintf(most, sizeof most, "%d", DT_MAX_THREADS);
                return bad_usage("-t needs a number of threads, at most ", most);
            }
            params->n_threads = (int32_t)n;
        } else if (word[0] == '-') {
            return bad_flag(word);
        } else if (n_words == 3) {
            return bad_usage("one word too many: ", word);
        } else {
            words[n_words++] = word;
        }
    }
    if (n_words == 0) {
        return usage(stderr, dt_program_name(argc, argv));
    }
    if (n_words < 3) {
        return bad_usage("an input file, an output file and a type are needed", "");
    }
    if (words[0][0] == 0 || words[1][0] == 0) {
        return bad_usage("the name of a file is empty", "");
    }
    params->input = words[0];
    params->output = words[1];
    params->type = words[2];
    return -1;
}

int main(int argc, char **argv) {
    const double started = dt_seconds_now();
    dt_quantize_params params = {
        .progress = isatty(STDERR_FILENO) ? show_progress : NULL, .progress_user = (void *)&started, .owns_part = &owns_temporary};
    const int exit_code = parse(argc, argv, &params);
    if (exit_code >= 0) {
        return exit_code;
    }
    if ((size_t)snprintf(temporary, sizeof temporary, "%s" DT_QUANTIZE_PART, params.output) >= sizeof temporary) {
        return bad_usage("the output's name is too long", "");
    }
#ifdef __GLIBC__
    /* else each thread reserves an arena of its own, when it pleases: of a limited address space (ulimit -v) the next thread's stack
     * may then not be had any more, however many threads could be started a moment before */
    mallopt(M_ARENA_MAX, 1);
#endif
    struct sigaction action = {.sa_handler = on_stop};
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    struct sigaction hang_up;
    if (sigaction(SIGHUP, NULL, &hang_up) == 0 && hang_up.sa_handler != SIG_IGN) { /* ignored: nohup */
        sigaction(SIGHUP, &action, NULL);
    }
    action.sa_handler = on_lost_input; /* libllama maps it */
    sigaction(SIGBUS, &action, NULL);
    action.sa_handler = SIG_IGN;
    sigaction(SIGXFSZ, &action, NULL); /* a file beyond the limit is an error of write */

    dt_error error = {0};
    const dt_status status = dt_quantize(&params, &error);
    if (params.progress != NULL) {
        fputs("\r\033[K", stderr);
    }
    if (status != DT_OK) {
        fprintf(stderr, "error: %s\n", error.message);
        return status == DT_ERR_ARGUMENT ? 2 : 1;
    }
    const double taken = dt_seconds_now() - started, before = megabytes(params.input), after = megabytes(params.output);
    fprintf(stderr, "quantized: %.1f MB to %.1f MB (%s) in %.1f s, %.0f MB/s\n", before, after, params.type, taken, before / taken);
    return 0;
}
