/*
 * ./deeptutor-batch: many prompts from a file or a folder, many at once, each result a line in the output as soon as it is there.
 *
 * This thread reads rows, hands them to the scheduler (scheduler.h) and writes lines; a few rows more than are computed at once are
 * underway, so that none is waited for. What the first rows have in common at their beginning is computed once, before them.
 *
 * Exit code 0: every row has its line, good or bad; 1: the run failed or was interrupted, and the same command goes on, or all lines
 * are bad, so that whoever runs it in a script finds out; 2: bad usage.
 */
#define _POSIX_C_SOURCE 200809L
#include "api.h"
#include "batch_input.h"
#include "batch_output.h"
#include "guard.h"
#include "json_parts.h"
#include "report.h"
#include "run.h"

#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define SHARED_MIN 16 /* tokens that rows must have in common to compute them apart */

typedef struct batch_options {
    dt_shared_options shared; /* first: the shared tables' offsets */
    const char *input, *output, *each, *chat_template;
    int64_t n_parallel, max_tokens;
    bool chat;
} batch_options;

#define AT(member) offsetof(batch_options, member)

static const dt_option batch_rows[] = {
    {"-i, --input", "F", DT_OPTION_TEXT, AT(input), 0, 0,
     "jobs, one JSON object a line: OpenAI's {custom_id, url, body} or {id, prompt} or {id, messages}; or, with --each, a folder"},
    {"-o, --output", "F", DT_OPTION_TEXT, AT(output), 0, 0, "results, a line each; the same command goes on where one was stopped"},
    {"--each", "S", DT_OPTION_TEXT, AT(each), 0, 0,
     "what to do with each text of the folder, {text} = the text: \"Summarize: {text}\""},
    {"-no-cnv, --no-cnv, --no-conversation", NULL, DT_OPTION_OFF, AT(chat), 0, 0,
     "--each is a text to go on from, not a message in the model's chat template"},
    {"--chat-template", "NAME", DT_OPTION_TEXT, AT(chat_template), 0, 0, "a built-in template, or Jinja source (the model's own)"},
    {"-n, --predict, --n-predict, --max-tokens", "N", DT_OPTION_INT, AT(max_tokens), 1, INT32_MAX,
     "length of a reply where the row gives none (1024)"},
    {"-np, --parallel", "N", DT_OPTION_INT, AT(n_parallel), 1, 256, "replies computed at once, as far as --kv-memory allows (8)"},
};

static const dt_option_group batch_group = {"Jobs; --kv-memory limits all caches together (half of the memory)", batch_rows,
                                            sizeof batch_rows / sizeof batch_rows[0]};
static const dt_option_group *const groups[] = {&batch_group, &dt_model_options, &dt_eviction_options, &dt_sampling_options,
                                                &dt_output_options};
#define N_GROUPS (sizeof groups / sizeof groups[0])

typedef struct work { /* a row underway */
    dt_batch_row row;
    dt_request request;
    bool submitted;
} work;

typedef struct batch {
    dt_api api;
    dt_batch_input *input;
    dt_batch_output *output;
    work *underway; /* [n_underway] of n_most */
    size_t n_underway, n_most;
    bool at_end, warmed, told_model;
    int news
        [2]; /* a pipe: woken through it, this thread waits for a length of time, not until a time of day that may be set anew */
    /* counts */
    int64_t n_before, n_good, n_bad, prompt_tokens, reused_tokens, generated_tokens, evicted_tokens;
    double started;
} batch;

/* ---- waiting ------------------------------------------------------------------------------------ */

static void wake(void *user) {
    const batch *b = user;
    const ssize_t written = write(b->news[1], "", 1); /* full: it is awake anyway */
    (void)written;
}

/* Until something came of a job, or a moment is over: signals and the bar want attention. */
static void wait_for_news(const batch *b) {
    struct pollfd news = {.fd = b->news[0], .events = POLLIN};
    char bytes[256];
    if (poll(&news, 1, 200) > 0) {
        while (read(b->news[0], bytes, sizeof bytes) == (ssize_t)sizeof bytes) {
        }
    }
}

static bool is_done(const dt_request *request) {
    for (size_t i = 0; i < request->n_jobs; i++) {
        pthread_mutex_lock(&request->jobs[i]->lock);
        const bool done = request->jobs[i]->state == DT_JOB_DONE;
        pthread_mutex_unlock(&request->jobs[i]->lock);
        if (!done) {
            return false;
        }
    }
    return true;
}

/* ---- lines -------------------------------------------------------------------------------------- */

static json_t *id_json(const dt_batch_row *row) { return row->id != NULL ? json_incref(row->id) : json_null(); }

static json_t *error_line(const dt_batch_row *row, int status, const char *message) {
    json_t *text = dt_json_text(message); /* it may quote the row */
    if (row->form == DT_BATCH_SHORT) {
        return json_pack("{s:o,s:o}", "id", id_json(row), "error", text);
    }
    char code[16];
    snprintf(code, sizeof code, "%d", status);
    return json_pack("{s:o,s:n,s:{s:s,s:o}}", "custom_id", id_json(row), "response", "error", "code", code, "message", text);
}

/* The short form's answer: the text, or a list of them. */
static json_t *short_line(const dt_batch_row *row, const json_t *body) {
    const json_t *choices = json_object_get(body, "choices");
    json_t *texts = json_array();
    for (size_t i = 0; i < json_array_size(choices); i++) {
        const json_t *choice = json_array_get(choices, i);
        json_t *text = row->chat ? json_object_get(json_object_get(choice, "message"), "content") : json_object_get(choice, "text");
        json_array_append(texts, text);
    }
    json_t *text = json_array_size(texts) == 1 ? json_incref(json_array_get(texts, 0)) : json_incref(texts);
    json_decref(texts);
    json_t *eviction = json_object_get(body, "eviction"); /* what was let go is told here too */
    return json_pack("{s:o,s:o,s:O,s:O,s:O*}", "id", id_json(row), "text", text, "finish_reason",
                     json_object_get(json_array_get(choices, 0), "finish_reason"), "usage", json_object_get(body, "usage"),
                     "eviction", eviction);
}

static json_t *answer_line(const batch *b, const work *w) {
    char *text = dt_api_answer(&b->api, &w->request);
    json_t *body = text != NULL ? dt_json_load(text, strlen(text), 0, NULL) : NULL, *line = NULL;
    if (body != NULL && w->row.form == DT_BATCH_SHORT) {
        line = short_line(&w->row, body);
    } else if (body != NULL) {
        line = json_pack("{s:s,s:o,s:{s:i,s:s,s:O},s:n}", "id", w->request.id, "custom_id", id_json(&w->row), "response",
                         "status_code", 200, "request_id", w->request.id, "body", body, "error");
    }
    json_decref(body);
    free(text);
    return line;
}

static dt_status write_refusal(batch *b, const dt_batch_row *row, int status, const char *message, dt_error *error) {
    b->n_bad++;
    return dt_batch_output_write(b->output, row, error_line(row, status, message), error);
}

static void count(batch *b, const dt_request *request) {
    for (size_t i = 0; i < request->n_jobs; i++) {
        const dt_job *job = request->jobs[i];
        b->prompt_tokens += (int64_t)job->n_tokens;
        b->reused_tokens += job->reused_tokens;
        b->evicted_tokens += job->evicted_tokens;
        for (int32_t c = 0; c < job->n_choices; c++) {
            b->generated_tokens += (int64_t)job->choices[c].n_records;
        }
    }
}

static dt_status write_result(batch *b, const work *w, dt_error *error) {
    const dt_error *failed = dt_request_error(&w->request);
    if (failed != NULL && failed->code == DT_ERR_CANCELLED) {
        return DT_OK; /* its line comes when the run goes on */
    }
    count(b, &w->request);
    if (failed != NULL) {
        return write_refusal(b, &w->row, dt_api_status_of(failed), failed->message, error);
    }
    b->n_good++;
    return dt_batch_output_write(b->output, &w->row, answer_line(b, w), error);
}

/* ---- rows --------------------------------------------------------------------------------------- */

static void free_work(work *w) {
    dt_batch_row_free(&w->row);
    dt_request_free(&w->request);
}

/* OpenAI's rows must name a model, and mostly one that is not here; -m has named the one that answers, and the answers say which. */
static void take_own_model(batch *b, json_t *body) {
    const char *asked = json_string_value(json_object_get(body, "model"));
    if (asked == NULL) {
        return;
    }
    if (!dt_api_is_model(&b->api, asked) && !b->told_model) {
        b->told_model = true;
        dt_report(DT_LOG_WARN, "batch: rows name another model, '%.100s'; %s of -m answers all of them", asked, b->api.name);
    }
    json_object_del(body, "model");
}

/* Reads rows until one is to be computed: the new last of underway. */
static dt_status take_row(batch *b, dt_error *error) {
    work *w = &b->underway[b->n_underway];
    while (!b->at_end && !dt_interrupted) {
        *w = (work){.submitted = false};
        if (!dt_batch_input_next(b->input, &w->row)) {
            b->at_end = !dt_interrupted;
            return DT_OK;
        }
        bool has = false;
        dt_error why = {0};
        dt_status status = dt_batch_output_has(b->output, &w->row, &has, error);
        if (status == DT_OK && has) {
            b->n_before++;
        } else if (status == DT_OK && w->row.body == NULL) {
            status = write_refusal(b, &w->row, 400, w->row.error, error);
        } else if (status == DT_OK) {
            take_own_model(b, w->row.body);
            const int code =
                dt_api_read_json(&b->api, w->row.chat ? DT_API_CHAT : DT_API_COMPLETION, w->row.body, &w->request, &why);
            json_decref(w->row.body); /* the jobs know all of it */
            w->row.body = NULL;
            if (code == 200) {
                b->n_underway++;
                return DT_OK;
            }
            status = write_refusal(b, &w->row, code, why.message, error);
        }
        free_work(w);
        if (status != DT_OK) {
            return status;
        }
    }
    return DT_OK;
}

static void submit(batch *b, work *w) {
    for (size_t i = 0; i < w->request.n_jobs; i++) {
        w->request.jobs[i]->wake = wake;
        w->request.jobs[i]->wake_user = b;
    }
    w->submitted = dt_scheduler_submit(b->api.scheduler, w->request.jobs, w->request.n_jobs) == DT_SUBMITTED;
}

static dt_status write_done(batch *b, dt_error *error) {
    dt_status status = DT_OK;
    size_t n = 0;
    for (size_t i = 0; i < b->n_underway; i++) {
        work *w = &b->underway[i];
        if (status == DT_OK && w->submitted && is_done(&w->request)) {
            status = write_result(b, w, error);
            free_work(w);
        } else {
            b->underway[n++] = *w;
        }
    }
    b->n_underway = n;
    return status;
}

/* ---- the common beginning ----------------------------------------------------------------------- */

/* What two rows have in common, computed once and kept for all that begin so. */
static dt_status compute_shared(batch *b, dt_error *error) {
    b->warmed = true;
    if (b->n_underway < 2) {
        return DT_OK;
    }
    const dt_job *first = b->underway[0].request.jobs[0], *second = b->underway[1].request.jobs[0];
    size_t n = 0;
    while (n + 1 < first->n_tokens && n + 1 < second->n_tokens && first->tokens[n] == second->tokens[n]) {
        n++;
    }
    if (n < SHARED_MIN || strcmp(first->eviction_key, second->eviction_key) != 0) {
        return DT_OK;
    }
    dt_job *job = dt_job_new();
    dt_sampler_params plain = dt_sampler_default_params();
    if (job == NULL || (job->tokens = malloc(n * sizeof *job->tokens)) == NULL ||
        (job->eviction_key = strdup(first->eviction_key)) == NULL ||
        dt_sampler_new(b->api.model, &plain, &job->choices[0].sampler, error) != DT_OK) {
        dt_job_free(job);
        return DT_OK; /* it goes without */
    }
    memcpy(job->tokens, first->tokens, n * sizeof *job->tokens);
    job->n_tokens = n;
    job->n_choices = 1;
    job->eviction = first->eviction;
    job->keep = job->pin = true;
    work shared = {.request = {.jobs = &job, .n_jobs = 1}};
    submit(b, &shared);
    while (shared.submitted && !is_done(&shared.request) && !dt_interrupted) {
        wait_for_news(b);
    }
    if (shared.submitted && !is_done(&shared.request)) {
        dt_scheduler_cancel(b->api.scheduler, job);
        while (!is_done(&shared.request)) {
            wait_for_news(b);
        }
    }
    dt_report(DT_LOG_DEBUG, "batch: the rows begin with %zu tokens in common", n);
    dt_job_free(job);
    return DT_OK;
}

/* ---- the run ------------------------------------------------------------------------------------ */

static void format_time(double seconds, char out[32]) {
    const int64_t s = (int64_t)(seconds + 0.5);
    if (s >= 3600) {
        snprintf(out, 32, "%lldh%02lldm", (long long)(s / 3600), (long long)(s / 60 % 60));
    } else {
        snprintf(out, 32, "%lldm%02llds", (long long)(s / 60), (long long)(s % 60));
    }
}

static void show_progress(const batch *b) {
    char line[160], left[32] = "?";
    const int64_t all = dt_batch_input_rows(b->input), here = b->n_good + b->n_bad, done = b->n_before + here;
    const double seconds = dt_seconds_now() - b->started;
    dt_scheduler_stats stats;
    dt_scheduler_get_stats(b->api.scheduler, &stats);
    if (here > 0) {
        format_time(seconds / (double)here * (double)(all - done), left);
    }
    snprintf(line, sizeof line, "%lld/%lld rows  %lld %%  %.0f tokens/s  KV %.0f MiB  %s left", (long long)done, (long long)all,
             (long long)(all > 0 ? 100 * done / all : 100), (double)(stats.computed_tokens) / (seconds > 0 ? seconds : 1),
             (double)stats.group.kv_bytes / 1048576, left);
    dt_report_bar(line);
}

static void summarize(const batch *b) {
    const double seconds = dt_seconds_now() - b->started;
    char time[32];
    format_time(seconds, time);
    dt_report_progress_end();
    dt_report(DT_LOG_INFO, "batch: %lld rows done, %lld of them refused or failed%s", (long long)b->n_good + (long long)b->n_bad,
              (long long)b->n_bad, b->n_bad > 0 ? "; \"error\" says why" : "");
    if (b->n_before > 0) {
        dt_report(DT_LOG_INFO, "batch: %lld done before, %lld of them refused or failed", (long long)b->n_before,
                  (long long)dt_batch_output_failed(b->output));
    }
    dt_report(DT_LOG_INFO, "batch: %lld tokens read (%lld shared), %lld written, %lld evicted", (long long)b->prompt_tokens,
              (long long)b->reused_tokens, (long long)b->generated_tokens, (long long)b->evicted_tokens);
    const double n_computed = (double)(b->prompt_tokens - b->reused_tokens + b->generated_tokens);
    if (n_computed > 0) {
        dt_report(DT_LOG_INFO, "batch: %s, %.1f tokens/s", time, n_computed / (seconds > 0 ? seconds : 1));
    }
}

static dt_status run_rows(batch *b, dt_error *error) {
    dt_status status = DT_OK;
    while (status == DT_OK && !dt_interrupted && !(b->at_end && b->n_underway == 0)) {
        while (status == DT_OK && !b->at_end && !dt_interrupted && b->n_underway < b->n_most) {
            status = take_row(b, error);
        }
        if (status == DT_OK && !b->warmed) {
            status = compute_shared(b, error);
        }
        for (size_t i = 0; i < b->n_underway; i++) {
            if (!b->underway[i].submitted) {
                submit(b, &b->underway[i]);
            }
        }
        if (status == DT_OK) {
            status = write_done(b, error);
        }
        if (status == DT_OK && b->n_underway > 0 && (b->at_end || b->n_underway == b->n_most)) {
            wait_for_news(b);
        }
        show_progress(b);
    }
    return status == DT_OK && b->at_end && !dt_interrupted ? dt_batch_input_check(b->input, error) : status;
}

/* The scheduler stops, and what was done by then gets its line. */
static int finish(batch *b, dt_status status, dt_error *error) {
    dt_scheduler_stop(b->api.scheduler, 0);
    if (status == DT_OK) {
        status = write_done(b, error);
    }
    if (status == DT_OK) {
        status = dt_batch_output_sync(b->output, error);
    }
    for (size_t i = 0; i < b->n_underway; i++) {
        free_work(&b->underway[i]);
    }
    summarize(b);
    if (status != DT_OK) {
        dt_report(DT_LOG_ERROR, "%s", error->message);
        return error->code == DT_ERR_ARGUMENT ? 2 : 1;
    }
    if (dt_interrupted) {
        dt_report(DT_LOG_INFO, "interrupted; the same command goes on");
        return 1;
    }
    if (b->n_good == 0 && b->n_bad + b->n_before > 0 && b->n_before <= dt_batch_output_failed(b->output)) {
        dt_report(DT_LOG_ERROR, "no row has a result; \"error\" in the output's lines says why");
        return 1;
    }
    return 0;
}

static dt_status begin(const batch_options *o, const dt_model *model, const char *grammar, batch *b, dt_eviction **out_eviction,
                       dt_error *error) {
    dt_scheduler_params params = {.model = model, .n_parallel = (int32_t)o->n_parallel, .n_idle_max = 16};
    dt_shared_options_session(&o->shared, &params.session);
    dt_shared_options_sampler(&o->shared, grammar, &b->api.sampling);
    params.session.kv_memory = o->shared.kv_memory > 0 ? params.session.kv_memory : dt_half_of_memory();
    b->n_most = (size_t)o->n_parallel + 2;
    params.n_queue = (int32_t)b->n_most * 64;
    b->underway = calloc(b->n_most + 1, sizeof *b->underway);
    if (pipe(b->news) != 0) {
        b->news[0] = b->news[1] = -1;
        snprintf(error->message, sizeof error->message, "no pipe can be had; raise the limit on open files");
        return error->code = DT_ERR_LIMIT;
    }
    for (int i = 0; i < 2; i++) {
        fcntl(b->news[i], F_SETFL, O_NONBLOCK);
        fcntl(b->news[i], F_SETFD, FD_CLOEXEC);
    }
    dt_status status = dt_api_check(&b->api, error);
    if (status == DT_OK) {
        status = dt_shared_options_eviction(&o->shared, model, out_eviction, error);
    }
    if (status == DT_OK) {
        b->api.eviction = *out_eviction;
        b->api.eviction_key = dt_api_eviction_key(*out_eviction, "");
        if (b->api.name == NULL || b->api.eviction_key == NULL || b->underway == NULL) {
            snprintf(error->message, sizeof error->message, "out of memory for the jobs");
            status = error->code = DT_ERR_MEMORY;
        }
    }
    if (status == DT_OK) {
        status = dt_check_cache_memory(model, &params.session, *out_eviction, NULL, error);
    }
    if (status == DT_OK) {
        status = dt_report_eviction(*out_eviction, "", error);
    }
    return status == DT_OK ? dt_scheduler_new(&params, &b->api.scheduler, error) : status;
}

static int with_model(const batch_options *o, const dt_model *model, const char *grammar, dt_batch_input *input,
                      dt_batch_output *output) {
    dt_error error = {0};
    dt_eviction *eviction = NULL;
    batch b = {.input = input, .output = output, .news = {-1, -1}, .started = dt_seconds_now()};
    b.api = (dt_api){.model = model,
                     .name = dt_api_model_name(o->shared.model),
                     .path = o->shared.model,
                     .chat_template = o->chat_template,
                     .max_tokens = o->max_tokens,
                     .n_choices_max = (int32_t)(o->n_parallel < DT_JOB_CHOICES_MAX ? o->n_parallel : DT_JOB_CHOICES_MAX),
                     .n_prompts_max = 64,
                     .eviction_override = true};
    dt_status status = begin(o, model, grammar, &b, &eviction, &error);
    int exit_code;
    if (status == DT_OK) {
        dt_report_sessions(false); /* whose of many rows they are, their lines don't say */
        status = run_rows(&b, &error);
        exit_code = finish(&b, status, &error);
    } else {
        exit_code = dt_report_failure(&error, true);
    }
    dt_scheduler_free(b.api.scheduler);
    dt_eviction_free(eviction);
    free((char *)b.api.name);
    free((char *)b.api.eviction_key);
    free(b.underway);
    for (int i = 0; i < 2; i++) {
        if (b.news[i] >= 0) {
            close(b.news[i]);
        }
    }
    return exit_code;
}

static uint64_t hash_bytes(uint64_t hash, const void *bytes, size_t n) { /* FNV-1a */
    for (size_t i = 0; i < n; i++) {
        hash = (hash ^ ((const unsigned char *)bytes)[i]) * 1099511628211u;
    }
    return hash;
}

/* Stands for what results depend on: another model, other flags, or other text in the files that they name, another word. config,
 * grammar: what those files hold, or NULL. */
static void settings_word(const batch_options *o, const char *config, const char *grammar, char out[17]) {
    const dt_shared_options *s = &o->shared;
    const char *const texts[] = {s->model,       config,  s->eviction_preset, s->grammar, grammar,
                                 s->json_schema, o->each, o->chat_template};
    const double numbers[] = {(double)s->n_ctx,
                              (double)s->kv_type,
                              (double)s->prefill,
                              s->eviction,
                              s->eviction ? (double)s->n_batch
                                          : 0, /* text that is read streaming is evicted from after each chunk */
                              (double)s->max_cache_size,
                              (double)s->min_cache_size,
                              (double)s->memory_slots,
                              s->temp,
                              s->top_p,
                              s->min_p,
                              s->repeat_penalty,
                              (double)s->top_k,
                              (double)s->seed,
                              s->ignore_end,
                              (double)o->max_tokens,
                              o->chat};
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        const size_t n = texts[i] != NULL ? strlen(texts[i]) : SIZE_MAX; /* where one ends and whether it is there counts too */
        hash = hash_bytes(hash_bytes(hash, texts[i], texts[i] != NULL ? n : 0), &n, sizeof n);
    }
    hash = hash_bytes(hash, numbers, sizeof numbers);
    snprintf(out, 17, "%016llx", (unsigned long long)hash);
}

/* A pipe can be read once, and not here. */
static bool is_regular(const char *path) {
    struct stat info;
    return path != NULL && stat(path, &info) == 0 && S_ISREG(info.st_mode);
}

static int run_all(void *user) {
    const batch_options *o = user;
    char settings[17];
    dt_error error = {0};
    dt_model_params model_params;
    dt_shared_options_model(&o->shared, &model_params);
    dt_model *model = NULL;
    dt_batch_input *input = NULL;
    dt_batch_output *output = NULL;
    char *grammar = NULL, *config = NULL;
    size_t n = 0;
    dt_status status = o->shared.grammar_file != NULL ? dt_read_file(o->shared.grammar_file, &grammar, &n, &error) : DT_OK;
    if (status == DT_OK && is_regular(o->shared.eviction_config)) {
        status = dt_read_file(o->shared.eviction_config, &config, &n, &error);
    }
    settings_word(o, config != NULL ? config : o->shared.eviction_config, grammar, settings);
    if (status == DT_OK) {
        status = dt_batch_input_open(o->input, o->each, o->chat, &input, &error);
    }
    if (status == DT_OK) {
        status = dt_batch_output_open(o->output, o->input, settings, &output, &error);
    }
    if (status == DT_OK && dt_batch_output_settings_differ(output)) {
        dt_report(DT_LOG_WARN,
                  "batch: %s was begun with another model or other settings; the lines that are there stay as they are; "
                  "to compute all rows with these, name another file with -o",
                  o->output);
    }
    int exit_code;
    if (status != DT_OK) {
        exit_code = dt_report_failure(&error, true);
    } else if (dt_model_open(o->shared.model, &model_params, &model, &error) != DT_OK) {
        exit_code = dt_report_failure(&error, false);
    } else if (!dt_model_get_info(model)->has_tokenizer) {
        dt_report(DT_LOG_ERROR, "%s has no tokenizer, so it can't read a text; use a GGUF file that contains one", o->shared.model);
        exit_code = 1;
    } else {
        exit_code = with_model(o, model, grammar, input, output);
    }
    dt_model_close(model);
    dt_batch_input_close(input);
    dt_batch_output_close(output);
    free(grammar);
    free(config);
    return exit_code;
}

static bool check(const batch_options *o, char *message, size_t capacity) {
    const char *wrong = o->input == NULL ? "no jobs were named; give them with -i FILE, or -i FOLDER --each \"Summarize: {text}\""
                        : o->output == NULL ? "no place for the results was named; give one with -o FILE"
                        : o->each != NULL && strstr(o->each, "{text}") == NULL ? "--each needs {text} where the text is to be put"
                                                                               : NULL;
    if (wrong != NULL) {
        snprintf(message, capacity, "%s", wrong);
        return false;
    }
    return dt_shared_options_check(&o->shared, message, capacity);
}

int main(int argc, char **argv) {
    char message[512];
    int exit_code;
    batch_options o = {.n_parallel = 8, .max_tokens = 1024, .chat = true};
    dt_shared_options_init(&o.shared);
    dt_run_signals();
    if (!dt_options_begin(groups, N_GROUPS, argc, argv, &o, "-m FILE -i JOBS -o RESULTS [flags]", &exit_code)) {
        return exit_code;
    }
    if (!check(&o, message, sizeof message)) {
        fprintf(stderr, "error: %s\n", message);
        return 2;
    }
    dt_report_init((dt_log_level)o.shared.log_level, o.shared.progress);
    return dt_run_guarded(&o.shared, false, run_all, &o);
}
