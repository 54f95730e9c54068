/*
 * ./main: one model, one conversation, on the command line.
 *
 * Order matters here: all that can be refused without the model (flags, files, the place for the statistics) is refused
 * before it is loaded. Exit code 0: done, also after Ctrl-C or a closed stdout; 1: the run failed, or the model can't be
 * opened; 2: bad usage, a file that the command line names and that can't be used included.
 */
#define _POSIX_C_SOURCE 200809L
#define _DEFAULT_SOURCE /* realpath on glibc */
#include "chat.h"
#include "file_lock.h"
#include "guard.h"
#include "options.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct main_options {
    dt_shared_options shared; /* first: the shared tables' offsets */
    const char *prompt, *file, *system_prompt, *chat_template, *session;
    const char *draft_model;
    int64_t n_predict, draft_max;
    bool draft_lookup;
    bool conversation, display_prompt, escape, append;
} main_options;

#define AT(member) offsetof(main_options, member)
#define DEFAULT_DRAFT 15 /* with the token before it a batch of 16, a tile of matrix products */

static const dt_option text_rows[] = {
    {"-p, --prompt", "S", DT_OPTION_TEXT, AT(prompt), 0, 0, "text to go on from; with -cnv the first message"},
    {"-f, --file", "F", DT_OPTION_TEXT, AT(file), 0, 0,
     "the same from a file, - = stdin; one final newline is dropped, other bytes stay"},
    {"-n, --predict, --n-predict", "N", DT_OPTION_INT, AT(n_predict), -1, INT32_MAX,
     "tokens to generate, in a chat per reply; -1 = to the end of the text, 0 = read only (-1)"},
    {"-e, --escape", NULL, DT_OPTION_ON, AT(escape), 0, 0,
     "in -p and -sys \\n, \\r, \\t, \\', \\\", \\\\ and \\xHH stand for what they do in C (on)"},
    {"--no-escape", NULL, DT_OPTION_OFF, AT(escape), 0, 0, "take -p and -sys as they are"},
    {"-cnv, --conversation", NULL, DT_OPTION_ON, AT(conversation), 0, 0,
     "chat with the model's template: a line is a message, \\ at its end continues it, /exit ends (off)"},
    {"-no-cnv, --no-cnv, --no-conversation", NULL, DT_OPTION_OFF, AT(conversation), 0, 0, "go on from the text, no chat"},
    {"-sys, --system-prompt", "S", DT_OPTION_TEXT, AT(system_prompt), 0, 0, "instruction at the front of a chat"},
    {"--chat-template", "NAME", DT_OPTION_TEXT, AT(chat_template), 0, 0, "a built-in template, or Jinja source (the model's own)"},
    {"--session", "F", DT_OPTION_TEXT, AT(session), 0, 0,
     "go on from the state in F where it is there, and save it there at the end; no prompt: from its last word"},
    {"--append", NULL, DT_OPTION_ON, AT(append), 0, 0, "the prompt follows what --session holds, instead of repeating it (off)"},
    {"--display-prompt", NULL, DT_OPTION_ON, AT(display_prompt), 0, 0, "print the prompt too (off)"},
    {"--no-display-prompt", NULL, DT_OPTION_OFF, AT(display_prompt), 0, 0, "print the generated text only"},
};

static const dt_option draft_rows[] = {
    {"--draft-lookup", NULL, DT_OPTION_ON, AT(draft_lookup), 0, 0,
     "guess what follows from where the last tokens stood before; for text that quotes or repeats (off)"},
    {"--draft-model", "F", DT_OPTION_TEXT, AT(draft_model), 0, 0, "let a smaller model of the same vocabulary guess"},
    {"--draft-max", "N", DT_OPTION_INT, AT(draft_max), 1, 64, "most tokens guessed at once (15)"},
};

static const dt_option_group draft_options = {"Speculative decoding; the text stays the same", draft_rows,
                                              sizeof draft_rows / sizeof draft_rows[0]};
static const dt_option_group text_options = {"Text", text_rows, sizeof text_rows / sizeof text_rows[0]};
static const dt_option_group *const groups[] = {&text_options,        &dt_model_options, &dt_eviction_options, &draft_options,
                                                &dt_sampling_options, &dt_stats_options, &dt_output_options};
#define N_GROUPS (sizeof groups / sizeof groups[0])

/* ---- what is asked for -------------------------------------------------------------------------- */

static bool check(const main_options *o, char *message, size_t capacity) {
    const char *wrong = NULL;
    if (o->session != NULL && o->session[0] == 0) {
        wrong = "--session needs the name of a file";
    } else if (o->session != NULL && o->shared.stats_json != NULL && strcmp(o->session, o->shared.stats_json) == 0) {
        wrong = "--session and --stats-json name the same file";
    } else if (o->draft_lookup && o->draft_model != NULL) {
        wrong = "give --draft-lookup or --draft-model, not both";
    } else if (o->draft_max > 0 && !o->draft_lookup && o->draft_model == NULL) {
        wrong = "--draft-max needs --draft-lookup or --draft-model";
    } else if (o->prompt != NULL && o->file != NULL) {
        wrong = "give the prompt with -p or with -f, not both";
    } else if (o->append && (o->session == NULL || o->conversation || (o->prompt == NULL && o->file == NULL))) {
        wrong = "--append puts a prompt (-p or -f) behind what --session FILE holds; a chat goes on by itself";
    } else if (o->prompt == NULL && o->file == NULL && o->session == NULL && !o->conversation) {
        wrong = "there is nothing to go on from; give a prompt with -p or -f (-f - reads stdin), or chat with -cnv";
    } else if (!o->conversation && (o->system_prompt != NULL || o->chat_template != NULL)) {
        wrong = "-sys and --chat-template are for chats; add -cnv";
    }
    if (wrong != NULL) {
        snprintf(message, capacity, "%s", wrong);
        return false;
    }
    return dt_shared_options_check(&o->shared, message, capacity);
}

static int hex_digit(char c) {
    return c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
}

/* A copy with \n, \xHH and so on replaced; unknown ones stay. Free with free(). */
static char *copy_text(const char *text, bool escape, size_t *out_n) {
    static const char names[] = "nrt'\"\\", values[] = "\n\r\t'\"\\";
    char *copy = malloc(strlen(text) + 1), *to = copy;
    for (; copy != NULL && *text != 0; text++) {
        const char *known = escape && *text == '\\' && text[1] != 0 ? strchr(names, text[1]) : NULL;
        if (known != NULL) {
            *to++ = values[known - names];
            text++;
        } else if (escape && text[0] == '\\' && text[1] == 'x' && hex_digit(text[2]) >= 0 && hex_digit(text[3]) >= 0) {
            *to++ = (char)(hex_digit(text[2]) * 16 + hex_digit(text[3]));
            text += 3;
        } else {
            *to++ = *text;
        }
    }
    if (copy != NULL) {
        *to = 0;
        *out_n = (size_t)(to - copy);
    }
    return copy;
}

typedef struct texts {
    char *prompt, *system_prompt, *grammar; /* NULL where not given */
    size_t n_prompt;
    int32_t *tokens; /* of the prompt, where it is no chat */
    size_t n_tokens;
    int64_t n_saved; /* tokens in the session's file */
    bool goes_on;    /* from those, the prompt's behind them */
} texts;

static void texts_free(texts *t) {
    free(t->prompt);
    free(t->system_prompt);
    free(t->grammar);
    dt_free(t->tokens);
}

static dt_status texts_read(const main_options *o, texts *out, dt_error *error) {
    size_t n = 0;
    dt_status status = DT_OK;
    if (o->file != NULL) {
        status = dt_read_file(o->file, &out->prompt, &out->n_prompt, error);
        if (status == DT_OK && out->n_prompt > 0 && out->prompt[out->n_prompt - 1] == '\n') {
            out->prompt[--out->n_prompt] = 0;
        }
    } else if (o->prompt != NULL) {
        out->prompt = copy_text(o->prompt, o->escape, &out->n_prompt);
    }
    if (o->system_prompt != NULL) {
        out->system_prompt = copy_text(o->system_prompt, o->escape, &n);
    }
    if (status == DT_OK && o->shared.grammar_file != NULL) {
        status = dt_read_file(o->shared.grammar_file, &out->grammar, &n, error);
    }
    if (status == DT_OK &&
        ((o->prompt != NULL && out->prompt == NULL) || (o->system_prompt != NULL && out->system_prompt == NULL))) {
        snprintf(error->message, sizeof error->message, "out of memory for the prompt");
        status = error->code = DT_ERR_MEMORY;
    }
    if (status == DT_OK && o->conversation && out->prompt != NULL && strlen(out->prompt) != out->n_prompt) {
        snprintf(error->message, sizeof error->message,
                 "the first message holds a NUL byte, which a chat template can't take; remove it");
        status = error->code = DT_ERR_ARGUMENT;
    }
    return status;
}

/* ---- the run ------------------------------------------------------------------------------------ */

static dt_status describe_eviction(const main_options *o, const dt_model *model, const dt_eviction *eviction, dt_error *error) {
    char more[96];
    snprintf(more, sizeof more, ", %d layers, KV %s, prefill %s", (int)dt_model_get_info(model)->n_layers,
             dt_kv_type_word(o->shared.kv_type), dt_prefill_word(o->shared.prefill));
    return dt_report_eviction(eviction, more, error);
}

/* ---- the session file --------------------------------------------------------------------------- */

/* Loads it where it is there. */
static dt_status load_session(const main_options *o, dt_run *run, dt_error *error) {
    struct stat info;
    if (o->session == NULL || (stat(o->session, &info) != 0 && errno == ENOENT)) {
        return DT_OK;
    }
    const double begun = 1e3 * dt_seconds_now();
    const dt_status status = dt_session_load(run->session, NULL, o->session, error);
    if (status == DT_OK) {
        size_t n = 0;
        const int32_t *tokens = dt_session_tokens(run->session, &n);
        run->loaded = malloc((n + 1) * sizeof *run->loaded);
        if (run->loaded == NULL) {
            snprintf(error->message, sizeof error->message, "out of memory for %zu tokens", n);
            return error->code = DT_ERR_MEMORY;
        }
        if (n > 0) {
            memcpy(run->loaded, tokens, n * sizeof *run->loaded);
        }
        run->loaded_tokens = (int64_t)n;
        dt_report(DT_LOG_INFO, "session: %s: %zu tokens loaded in %.1f ms", o->session, n, 1e3 * dt_seconds_now() - begun);
    }
    if (status == DT_OK && !o->conversation && dt_chat_is_in(run->session)) { /* as a text its messages would be lost */
        snprintf(error->message, sizeof error->message,
                 "%s holds a chat; add -cnv to go on with it, or name another file for this text", o->session);
        return error->code = DT_ERR_ARGUMENT;
    }
    if (status == DT_OK && o->conversation && run->loaded_tokens > 0 && !dt_chat_is_in(run->session)) {
        snprintf(error->message, sizeof error->message,
                 "%s holds a text and no chat; leave out -cnv to go on with it, or name another file for this chat", o->session);
        return error->code = DT_ERR_ARGUMENT;
    }
    return status == DT_ERR_FORMAT ? (error->code = DT_ERR_ARGUMENT) : status; /* a file that was named and can't be used */
}

/* Puts a session's file at `old`: NULL, or why it can't be. What is there may go where it is a session itself, that an earlier run
 * kept, and no run is at work on. */
static const char *keep_as(const char *real, const char *old, const char *part) {
    struct stat info;
    if (lstat(old, &info) == 0 && (!S_ISREG(info.st_mode) || dt_session_file_tokens(old) == 0)) {
        return "something else is there";
    }
    dt_error error = {0};
    dt_file_lock *lock = NULL;
    if (dt_file_lock_take(old, &lock, &error) != DT_OK) {
        return "another run is at work on it, or its .lock is no run's";
    }
    struct stat left, ours;
    if (lstat(part, &left) == 0 && stat(real, &ours) == 0 && left.st_ino == ours.st_ino && left.st_dev == ours.st_dev) {
        unlink(part); /* a killed run's: the same file under another name */
    }
    const bool linked = link(real, part) == 0;
    const bool kept =
        linked ? rename(part, old) == 0 : rename(real, old) == 0; /* some file systems have no links, and the name may be taken */
    const int reason = errno;
    if (linked) {
        unlink(part); /* rename leaves it where both names are the same file's already */
    }
    dt_file_lock_release(lock);
    return kept ? NULL : strerror(reason);
}

/* This run's text parted from the saved one: what was saved stays under another name, so that a mistaken prompt loses nothing, and
 * where it can't, this run's isn't saved. */
static dt_status keep_replaced(const char *path, int64_t n_tokens, dt_error *error) {
    char *real = realpath(path, NULL); /* saving follows links too */
    const size_t capacity = (real != NULL ? strlen(real) : 0) + sizeof ".old.part";
    char *old = real != NULL ? malloc(capacity) : NULL, *part = old != NULL ? malloc(capacity) : NULL;
    const char *why = strerror(errno);
    if (part != NULL) {
        snprintf(old, capacity, "%s.old", real);
        snprintf(part, capacity, "%s.old.part", real);
        why = keep_as(real, old, part);
    }
    if (why == NULL) {
        dt_report(DT_LOG_WARN, "session: this text parts from the saved one of %lld tokens, which is replaced; it stays as %s",
                  (long long)n_tokens, old);
    } else {
        snprintf(
            error->message, sizeof error->message,
            "%.400s holds another text of %lld tokens, which can't be kept as %.400s (%s), so it stays and this one is not saved; "
            "move one of the two, or name another file",
            path, (long long)n_tokens, part != NULL ? old : "FILE.old", why);
        error->code = DT_ERR_IO;
    }
    free(real);
    free(old);
    free(part);
    return why == NULL ? DT_OK : DT_ERR_IO;
}

/* Tokens at the front of the conversation that were loaded. */
static int64_t shared_with_loaded(const dt_run *run) {
    size_t n = 0;
    const int32_t *tokens = dt_session_tokens(run->session, &n);
    int64_t same = 0;
    while (same < run->loaded_tokens && (size_t)same < n && tokens[same] == run->loaded[same]) {
        same++;
    }
    return same;
}

/* What was computed, also when the run was interrupted or failed. chat may be NULL. */
static dt_status save_session(const main_options *o, const dt_run *run, const dt_chat *chat, dt_error *error) {
    size_t n = 0;
    dt_session_tokens(run->session, &n);
    if (o->session == NULL || n == 0) {
        return DT_OK;
    }
    const double begun = 1e3 * dt_seconds_now();
    const int64_t same = shared_with_loaded(run);
    dt_status status = DT_OK;
    if (same > 0 && same == run->loaded_tokens && (size_t)same == n) { /* saved anew, it would have this run's settings */
        dt_report(DT_LOG_INFO, "session: %s: nothing is new, so it stays as it is", o->session);
        return DT_OK;
    }
    /* The last token may have been computed anew, or be missing where the run ended before. A chat has all its messages still, however
     * its template writes them now. */
    if (chat == NULL && same + 1 < run->loaded_tokens) {
        status = keep_replaced(o->session, run->loaded_tokens, error);
    }
    if (status == DT_OK) {
        status = chat != NULL ? dt_chat_note(chat, error) : dt_session_set_note(run->session, NULL, 0, error);
    }
    if (status == DT_OK) {
        status = dt_session_save(run->session, run->sampler, o->session, error);
    }
    if (status == DT_OK) {
        dt_report(DT_LOG_INFO, "session: %s: %zu tokens saved in %.1f ms", o->session, n, 1e3 * dt_seconds_now() - begun);
    }
    return status;
}

/* The prompt's tokens; none where there is nothing to begin from. Behind a saved text no token marks a beginning. */
static dt_status tokenize_prompt(const dt_model *model, texts *t, dt_error *error) {
    if (t->prompt == NULL) {
        return DT_OK;
    }
    const dt_status status = dt_tokenize(model, t->prompt, t->n_prompt, !t->goes_on, true, &t->tokens, &t->n_tokens, error);
    if (status == DT_OK && t->n_tokens == 0 && !t->goes_on && dt_token_start(model) >= 0) {
        t->tokens[t->n_tokens++] = dt_token_start(model);
    }
    return status;
}

/* What was loaded, and the prompt behind it. Free with free(). */
static dt_status join_saved(const dt_session *session, const texts *t, int32_t **out, size_t *out_n, dt_error *error) {
    size_t n = 0;
    const int32_t *saved = dt_session_tokens(session, &n);
    *out_n = n + t->n_tokens;
    *out = malloc((*out_n + 1) * sizeof **out);
    if (*out == NULL) {
        snprintf(error->message, sizeof error->message, "out of memory for %zu tokens", *out_n);
        return error->code = DT_ERR_MEMORY;
    }
    memcpy(*out, saved, n * sizeof **out);
    if (t->n_tokens > 0) {
        memcpy(*out + n, t->tokens, t->n_tokens * sizeof **out);
    }
    return DT_OK;
}

static int64_t given_tokens(const texts *t) { return (int64_t)t->n_tokens + (t->goes_on ? t->n_saved : 0); }

/* What is read before the reply begins; 0: nobody knows. */
static int32_t prompt_tokens(const main_options *o, const texts *t) {
    const int64_t n = given_tokens(t);
    return o->conversation || n >= INT32_MAX ? 0 : (int32_t)(n > t->n_saved ? n : t->n_saved);
}

/* How long the conversation gets: with a saved one, at least as long as that for the moment; 0: nobody knows. */
static int32_t expected_tokens(const main_options *o, const texts *t) {
    const int64_t n = given_tokens(t) + o->n_predict;
    const bool known = !o->conversation && o->n_predict >= 0 && n < INT32_MAX;
    return !known ? 0 : (int32_t)(n > t->n_saved ? n : t->n_saved);
}

/* A reply's last token is shown but not computed, since nothing may come after it. Something does where the text is saved to go on
 * from. n_given: tokens before the reply. */
static dt_status compute_last(const dt_run *run, size_t n_given, dt_error *error) {
    size_t n = 0;
    dt_session_tokens(run->session, &n);
    const size_t n_reply = run->n_generated - run->reply_first;
    if (n_reply == 0 || n + 1 != n_given + n_reply || run->context_full ||
        dt_token_is_end(run->model, run->generated[run->n_generated - 1])) {
        return DT_OK;
    }
    return dt_session_append(run->session, run->generated[run->n_generated - 1], error);
}

/* Nothing can follow what was loaded: its last word, which is not in the file, would be told again. */
static bool is_full(const dt_run *run) {
    dt_session_stats stats;
    dt_session_get_stats(run->session, &stats);
    return stats.n_tokens >= stats.n_ctx;
}

static dt_status complete(const main_options *o, dt_run *run, const texts *t, int *out_exit, dt_error *error) {
    if (t->n_tokens == 0 && !t->goes_on) {
        dt_report(DT_LOG_ERROR, "the prompt is empty and this model has no start token to begin from; give it some text");
        *out_exit = 2;
        return DT_OK;
    }
    if (t->goes_on && o->n_predict != 0 && is_full(run)) {
        dt_report(DT_LOG_ERROR, "%s holds the longest conversation that this context has room for; a larger -c goes on with it",
                  o->session);
        *out_exit = 2;
        return DT_OK;
    }
    if (o->display_prompt && t->prompt != NULL) {
        dt_output_write(&run->output, t->prompt, t->n_prompt);
    }
    int32_t *joined = NULL;
    size_t n = t->n_tokens;
    dt_status status = t->goes_on ? join_saved(run->session, t, &joined, &n, error) : DT_OK;
    if (status == DT_OK && o->session != NULL) { /* that it will not fit on the disk is told before the work, not after it */
        const int64_t n_total = (int64_t)n + (o->n_predict > 0 ? o->n_predict : 0);
        status = dt_session_check_save(run->session, o->session, n_total, error);
        *out_exit = status != DT_OK ? dt_report_failure(error, true) : 0;
    }
    if (status == DT_OK) {
        status = dt_run_reply(run, joined != NULL ? joined : t->tokens, n, error);
    }
    if (status == DT_OK && *out_exit == 0 && o->session != NULL) {
        status = compute_last(run, n, error);
    }
    free(joined);
    return status;
}

/* Timings to the log, numbers to the file. */
static dt_status tell_numbers(const main_options *o, const dt_run *run, dt_stats_file *stats, double load_ms, dt_error *error) {
    const dt_run_numbers numbers = {
        .model = o->shared.model,
        .prompt_tokens = run->prompt_tokens,
        .reused_tokens = run->reused_tokens,
        .loaded_tokens = run->loaded_tokens,
        .generated_tokens = (int64_t)run->n_generated,
        .load_ms = load_ms,
        .eviction = o->shared.eviction,
        .generated = run->generated,
    };
    dt_report_timings(&numbers, run->model, run->session);
    return stats != NULL ? dt_report_write_stats(stats, &numbers, run->model, run->session, error) : DT_OK;
}

static int generate(const main_options *o, const texts *t, dt_run *run, dt_stats_file *stats, double load_ms) {
    dt_error error = {0}, error_of_numbers = {0};
    dt_chat *chat = NULL;
    dt_status status = dt_run_begin(run, &error), status_of_numbers = DT_OK;
    if (status == DT_OK) {
        status = load_session(o, run, &error);
    }
    if (status == DT_OK && o->conversation) {
        status = dt_chat_new(run, o->chat_template, t->system_prompt, &chat, &error);
    }
    if (status == DT_OK && chat != NULL) {
        status = dt_chat_resume(chat, t->system_prompt, &error);
    }
    if (status != DT_OK) {
        dt_chat_free(chat);
        return dt_report_failure(&error, true);
    }
    if (run->sampling.temp > 0) {
        dt_report(DT_LOG_INFO, "seed: %u", (unsigned)run->sampling.seed);
    }
    int exit_code = 0;
    status =
        chat != NULL ? dt_chat_loop(chat, t->n_prompt > 0 ? t->prompt : NULL, &error) : complete(o, run, t, &exit_code, &error);
    if (exit_code != 0) {
        dt_chat_free(chat);
        return exit_code;
    }
    dt_error error_of_saving = {0};
    const dt_status status_of_saving = save_session(o, run, chat, &error_of_saving);
    dt_chat_free(chat);
    if (status == DT_OK || run->n_generated > 0) { /* a run that fails late has numbers too */
        status_of_numbers = tell_numbers(o, run, stats, load_ms, &error_of_numbers);
    }
    if (status_of_saving != DT_OK) { /* told even where something else failed before: it loses the conversation */
        exit_code = dt_report_failure(&error_of_saving, false);
    }
    return status != DT_OK              ? dt_report_failure(&error, false)
           : status_of_numbers != DT_OK ? dt_report_failure(&error_of_numbers, false)
                                        : exit_code;
}

/* ---- drafts ------------------------------------------------------------------------------------- */

static dt_status open_draft(const main_options *o, const texts *t, dt_run *run, dt_model **out_model, dt_error *error) {
    const int32_t most = o->draft_max > 0 ? (int32_t)o->draft_max : DEFAULT_DRAFT;
    const int32_t expected = expected_tokens(o, t);
    if (o->draft_lookup) {
        return dt_draft_from_lookup(most, &run->draft, error);
    }
    if (o->draft_model == NULL) {
        return DT_OK;
    }
    dt_shared_options plain = o->shared; /* the draft model sees all of the conversation, as far as its own context goes */
    plain.kv_type = plain.prefill = plain.n_ctx = plain.kv_memory = 0;
    dt_session_params params;
    dt_shared_options_session(&plain, &params);
    params.n_expected = expected > 0 && expected < INT32_MAX - most ? expected + most : 0;
    dt_model_params model_params;
    dt_shared_options_model(&o->shared, &model_params);
    dt_status status = dt_model_open(o->draft_model, &model_params, out_model, error);
    if (status == DT_OK) {
        dt_report(DT_LOG_INFO, "draft: the smaller model has a cache of its own, beside that above:");
        status = dt_draft_from_model(run->model, *out_model, &params, most, &run->draft, error);
    }
    return status;
}

static int with_model(const main_options *o, texts *t, dt_model *model, dt_stats_file *stats, double begun) {
    dt_error error = {0};
    if (!dt_model_get_info(model)->has_tokenizer) {
        dt_report(DT_LOG_ERROR, "%s has no tokenizer, so it can't read a text; use a GGUF file that contains one", o->shared.model);
        return 1;
    }
    dt_eviction *eviction = NULL;
    dt_model *draft_model = NULL;
    dt_session_params params;
    dt_run run = {.model = model, .n_predict = o->n_predict};
    dt_status status = dt_shared_options_eviction(&o->shared, model, &eviction, &error);
    if (status == DT_OK) {
        status = describe_eviction(o, model, eviction, &error);
    }
    if (status == DT_OK && !o->conversation) {
        status = tokenize_prompt(model, t, &error);
    }
    if (status == DT_OK) {
        dt_shared_options_session(&o->shared, &params);
        params.eviction = eviction;
        run.evicts = eviction != NULL;
        params.n_snapshots = o->conversation ? 0 : -1; /* nothing is gone back to */
        params.n_expected = expected_tokens(o, t);
        params.n_prompt = prompt_tokens(o, t);
        status = dt_session_new(model, &params, &run.session, &error);
    }
    if (status == DT_OK) {
        status = open_draft(o, t, &run, &draft_model, &error);
    }
    int exit_code = status == DT_OK ? 0 : dt_report_failure(&error, true);
    if (exit_code == 0) {
        dt_shared_options_sampler(&o->shared, t->grammar, &run.sampling);
        exit_code = generate(o, t, &run, stats, 1e3 * dt_seconds_now() - begun);
    }
    dt_run_end(&run);
    dt_draft_free(run.draft);
    dt_model_close(draft_model);
    dt_session_free(run.session);
    dt_eviction_free(eviction);
    return exit_code;
}

/* Where the session's file can lie, what it holds, and whether the text goes on from there. */
static dt_status find_saved(const main_options *o, texts *t, dt_error *error) {
    const dt_status status = dt_session_check_save(NULL, o->session, 0, error);
    struct stat info;
    const bool there = stat(o->session, &info) == 0;
    t->n_saved = status == DT_OK ? dt_session_file_tokens(o->session) : 0;
    t->goes_on = !o->conversation && there && (o->append || t->prompt == NULL);
    if (status == DT_OK && !o->conversation && !there && t->prompt == NULL) {
        snprintf(error->message, sizeof error->message,
                 "there is nothing to go on from: %s isn't there yet; give the first text with -p or -f, or chat with -cnv",
                 o->session);
        return error->code = DT_ERR_ARGUMENT;
    }
    return status;
}

static int run_all(void *user) {
    const main_options *o = user;
    dt_error error = {0};
    texts t = {0};
    dt_stats_file *stats = NULL;
    dt_file_lock *lock = NULL;
    dt_model *model = NULL;
    dt_status status = texts_read(o, &t, &error);
    if (status == DT_OK && o->shared.stats_json != NULL) {
        char *learned = dt_eviction_learned_file(o->shared.model);
        const char *const inputs[] = {o->shared.model, o->file, o->shared.eviction_config, o->shared.grammar_file, o->session,
                                      o->draft_model,  learned};
        status = dt_stats_file_open(o->shared.stats_json, inputs, sizeof inputs / sizeof inputs[0], &stats, &error);
        dt_free(learned);
    }
    if (status == DT_OK && o->session != NULL) {
        status = find_saved(o, &t, &error);
        status = status == DT_OK ? dt_file_lock_take(o->session, &lock, &error) : status;
    }
    if (status == DT_OK && o->draft_model != NULL) {
        status = dt_check_same_vocabulary(o->shared.model, o->draft_model, &error);
    }
    const double begun = 1e3 * dt_seconds_now();
    dt_model_params model_params;
    dt_shared_options_model(&o->shared, &model_params);
    int exit_code = 0;
    if (status == DT_ERR_CANCELLED) {
        dt_report(DT_LOG_INFO, "interrupted");
    } else if (status != DT_OK) {
        exit_code = dt_report_failure(&error, true);
    } else if (dt_model_open(o->shared.model, &model_params, &model, &error) != DT_OK) {
        exit_code = dt_report_failure(&error, false);
    } else {
        exit_code = with_model(o, &t, model, stats, begun);
    }
    dt_model_close(model);
    dt_stats_file_free(stats);
    dt_file_lock_release(lock);
    texts_free(&t);
    return exit_code;
}

int main(int argc, char **argv) {
    char message[512];
    int exit_code;
    main_options o = {.n_predict = -1, .escape = true};
    dt_shared_options_init(&o.shared);
    dt_run_signals();
    if (!dt_options_begin(groups, N_GROUPS, argc, argv, &o, "-m FILE (-p TEXT | -f FILE | -cnv) [flags]", &exit_code)) {
        return exit_code;
    }
    if (!check(&o, message, sizeof message)) {
        fprintf(stderr, "error: %s\n", message);
        return 2;
    }
    dt_report_init((dt_log_level)o.shared.log_level, o.shared.progress);
    return dt_run_guarded(&o.shared, false, run_all, &o);
}
