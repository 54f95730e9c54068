/*
 * ./deeptutor-server: the model behind OpenAI's HTTP API, for many at once.
 *
 * One thread computes (scheduler.c), one per connection talks (server_http.c); this file reads the flags, puts them together and
 * waits for a signal. SIGTERM or Ctrl-C: no new connections, what waits is refused, what runs may end within --grace seconds, idle
 * conversations are saved where --session-dir names a folder, exit 0. Exit code 1: something failed; 2: bad usage.
 */
#define _POSIX_C_SOURCE 200809L
#include "guard.h"
#include "report.h"
#include "run.h"
#include "server_http.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef struct server_options {
    dt_shared_options shared; /* first: the shared tables' offsets */
    const char *host, *alias, *chat_template, *api_key, *api_key_file, *session_dir;
    int64_t port, n_parallel, n_queue, n_idle, max_tokens, max_body, disk_memory, grace;
    bool eviction_override;
} server_options;

#define AT(member) offsetof(server_options, member)

static const dt_option server_rows[] = {
    {"--host", "H", DT_OPTION_TEXT, AT(host), 0, 0, "address to listen at; 0.0.0.0 = all (127.0.0.1)"},
    {"--port", "N", DT_OPTION_INT, AT(port), 0, 65535, "port; 0 = any free one, told in the log (8080)"},
    {"--api-key", "S", DT_OPTION_TEXT, AT(api_key), 0, 0, "ask for this key; others can see it in the process list"},
    {"--api-key-file", "F", DT_OPTION_TEXT, AT(api_key_file), 0, 0, "the same, from the first line of a file"},
    {"-a, --alias", "S", DT_OPTION_TEXT, AT(alias), 0, 0, "the model's name in answers (its file's)"},
    {"--chat-template", "NAME", DT_OPTION_TEXT, AT(chat_template), 0, 0, "a built-in template, or Jinja source (the model's own)"},
    {"-np, --parallel", "N", DT_OPTION_INT, AT(n_parallel), 1, 256, "replies computed at once (8)"},
    {"--queue", "N", DT_OPTION_INT, AT(n_queue), 1, 100000, "prompts that may wait; more are answered 429 (128)"},
    {"-n, --predict, --n-predict, --max-tokens", "N", DT_OPTION_INT, AT(max_tokens), 1, INT32_MAX,
     "length of a reply where the request gives none (1024)"},
    {"--max-body", "SIZE", DT_OPTION_SIZE, AT(max_body), 0, 0, "largest request (16M)"},
    {"--grace", "N", DT_OPTION_INT, AT(grace), 0, 86400, "seconds that running replies have to end after SIGTERM (30)"},
    {"--no-eviction-override", NULL, DT_OPTION_OFF, AT(eviction_override), 0, 0, "requests can't ask for other eviction settings"},
};

static const dt_option conversation_rows[] = {
    {"--session-dir", "F", DT_OPTION_TEXT, AT(session_dir), 0, 0,
     "folder for idle conversations that --kv-memory has no room for; they are there after a restart too (none: dropped)"},
    {"--disk-memory", "SIZE", DT_OPTION_SIZE, AT(disk_memory), 0, 0,
     "the most that folder takes; least recently used ones go (8G)"},
    {"--idle", "N", DT_OPTION_INT, AT(n_idle), 0, 4096, "idle conversations kept in memory (256)"},
};

static const dt_option_group server_group = {"Server", server_rows, sizeof server_rows / sizeof server_rows[0]};
static const dt_option_group conversation_group = {
    "Conversations between requests; --kv-memory limits all caches together (half\n  of the memory)", conversation_rows,
    sizeof conversation_rows / sizeof conversation_rows[0]};
static const dt_option_group *const groups[] = {&server_group,        &conversation_group,  &dt_model_options,
                                                &dt_eviction_options, &dt_sampling_options, &dt_log_options};
#define N_GROUPS (sizeof groups / sizeof groups[0])

static bool check(const server_options *o, char *message, size_t capacity) {
    const char *wrong = NULL;
    if (o->api_key != NULL && o->api_key_file != NULL) {
        wrong = "give --api-key or --api-key-file, not both";
    } else if (o->api_key != NULL && o->api_key[0] == 0) {
        wrong = "--api-key needs a key of at least one character";
    } else if (o->alias != NULL && o->alias[0] == 0) {
        wrong = "--alias needs a name of at least one character";
    }
    if (wrong != NULL) {
        snprintf(message, capacity, "%s", wrong);
        return false;
    }
    return dt_shared_options_check(&o->shared, message, capacity);
}

/* First line of the file. */
static dt_status read_key(const char *path, char **out, dt_error *error) {
    size_t n = 0;
    const dt_status status = dt_read_file(path, out, &n, error);
    if (status == DT_OK) {
        const char *newline = memchr(*out, '\n', n), *nul = memchr(*out, 0, n);
        if (nul != NULL && (newline == NULL || nul < newline)) {
            snprintf(error->message, sizeof error->message,
                     "%s holds a NUL character, which no client can send; write the key as text", path);
            return error->code = DT_ERR_ARGUMENT;
        }
        (*out)[strcspn(*out, "\r\n")] = 0;
        if ((*out)[0] == 0) {
            snprintf(error->message, sizeof error->message, "%s holds no key in its first line", path);
            return error->code = DT_ERR_ARGUMENT;
        }
    }
    return status;
}

/* Serves until a signal comes. */
static int serve(const server_options *o, const dt_api *api, const char *key, dt_scheduler *scheduler) {
    dt_error error = {0};
    dt_http *http = NULL;
    const dt_http_params params = {.api = api,
                                   .host = o->host,
                                   .port = (int)o->port,
                                   .api_key = key,
                                   .body_bytes_max = (size_t)o->max_body,
                                   .n_connections_max = (int)(o->n_queue + o->n_parallel + 64)};
    if (dt_http_start(&params, &http, &error) != DT_OK) {
        dt_scheduler_stop(scheduler, 0);
        return dt_report_failure(&error, true);
    }
    const bool v6 = strchr(o->host, ':') != NULL;
    dt_report(DT_LOG_INFO, "listening at http://%s%s%s:%d", v6 ? "[" : "", o->host, v6 ? "]" : "", dt_http_port(http));
    dt_guard_ready();
    while (!dt_interrupted) {
        const struct timespec pause = {.tv_nsec = 100 * 1000 * 1000};
        nanosleep(&pause, NULL); /* a signal ends it */
    }
    dt_report(DT_LOG_INFO, "stopping: running replies have %lld s to end", (long long)o->grace);
    dt_http_quiesce(http);
    dt_scheduler_stop(scheduler, o->grace * 1000);
    dt_http_stop(http);
    return 0;
}

static int with_model(const server_options *o, const dt_model *model, const char *grammar, const char *key) {
    dt_error error = {0};
    dt_eviction *eviction = NULL;
    dt_scheduler *scheduler = NULL;
    dt_scheduler_params params = {.model = model,
                                  .n_parallel = (int32_t)o->n_parallel,
                                  .n_queue = (int32_t)o->n_queue,
                                  .folder = o->session_dir,
                                  .disk_bytes = (uint64_t)o->disk_memory,
                                  .n_idle_max = (int32_t)o->n_idle};
    dt_api api = {.model = model,
                  .path = o->shared.model,
                  .chat_template = o->chat_template,
                  .max_tokens = o->max_tokens,
                  .n_choices_max = (int32_t)(o->n_parallel < DT_JOB_CHOICES_MAX ? o->n_parallel : DT_JOB_CHOICES_MAX),
                  .n_prompts_max = (size_t)o->n_queue,
                  .eviction_override = o->eviction_override,
                  .keep = true,
                  .kv_type = dt_kv_type_word(o->shared.kv_type),
                  .prefill = dt_prefill_word(o->shared.prefill),
                  .has_key = key != NULL};
    dt_shared_options_session(&o->shared, &params.session);
    dt_shared_options_sampler(&o->shared, grammar, &api.sampling);
    params.session.n_batch = o->shared.n_batch > 0 ? params.session.n_batch : 256; /* others wait while a chunk is read */
    params.session.kv_memory = o->shared.kv_memory > 0 ? params.session.kv_memory : dt_half_of_memory();
    dt_status status = dt_api_check(&api, &error);
    if (status == DT_OK) {
        status = dt_shared_options_eviction(&o->shared, model, &eviction, &error);
    }
    if (status == DT_OK) {
        status = dt_check_cache_memory(model, &params.session, eviction, &api.n_ctx, &error);
    }
    if (status == DT_OK) {
        status = dt_scheduler_new(&params, &scheduler, &error);
    }
    size_t n = 0;
    char *name = o->alias != NULL ? dt_repair_utf8(o->alias, strlen(o->alias), &n) : dt_api_model_name(o->shared.model);
    char *eviction_key = dt_api_eviction_key(eviction, "");
    int exit_code = 1;
    if (status != DT_OK) {
        exit_code = dt_report_failure(&error, true);
    } else if (name != NULL && eviction_key != NULL) {
        (void)dt_report_eviction(eviction, "", NULL); /* a line that is missing for lack of memory stops no server */
        api.name = name;
        api.scheduler = scheduler;
        api.eviction = eviction;
        api.eviction_key = eviction_key;
        exit_code = serve(o, &api, key, scheduler);
    } else {
        dt_report(DT_LOG_ERROR, "out of memory for the server's settings");
        dt_scheduler_stop(scheduler, 0);
    }
    dt_scheduler_free(scheduler);
    dt_eviction_free(eviction);
    free(eviction_key);
    free(name);
    return exit_code;
}

static int run_all(void *user) {
    const server_options *o = user;
    dt_error error = {0};
    dt_model_params model_params;
    dt_shared_options_model(&o->shared, &model_params);
    dt_model *model = NULL;
    char *grammar = NULL, *key = NULL;
    size_t n = 0;
    dt_status status = o->shared.grammar_file != NULL ? dt_read_file(o->shared.grammar_file, &grammar, &n, &error) : DT_OK;
    if (status == DT_OK && o->api_key_file != NULL) {
        status = read_key(o->api_key_file, &key, &error);
    }
    int exit_code = 0;
    if (status != DT_OK) {
        exit_code = dt_report_failure(&error, true);
    } else if (dt_model_open(o->shared.model, &model_params, &model, &error) != DT_OK) {
        exit_code = dt_report_failure(&error, false);
    } else if (!dt_model_get_info(model)->has_tokenizer) {
        dt_report(DT_LOG_ERROR, "%s has no tokenizer, so it can't read a text; use a GGUF file that contains one", o->shared.model);
        exit_code = 1;
    } else {
        exit_code = with_model(o, model, grammar, key != NULL ? key : o->api_key);
    }
    dt_model_close(model);
    free(grammar);
    free(key);
    return exit_code;
}

int main(int argc, char **argv) {
    char message[512];
    int exit_code;
    server_options o = {.host = "127.0.0.1",
                        .port = 8080,
                        .n_parallel = 8,
                        .n_queue = 128,
                        .n_idle = 256,
                        .max_tokens = 1024,
                        .max_body = 16 << 20,
                        .disk_memory = (int64_t)8 << 30,
                        .grace = 30,
                        .eviction_override = true};
    dt_shared_options_init(&o.shared);
    dt_run_signals();
    umask(077); /* what was said is nobody else's to read, in whatever folder it is kept */
    if (!dt_options_begin(groups, N_GROUPS, argc, argv, &o, "-m FILE [flags]", &exit_code)) {
        return exit_code;
    }
    if (!check(&o, message, sizeof message)) {
        fprintf(stderr, "error: %s\n", message);
        return 2;
    }
    dt_report_init((dt_log_level)o.shared.log_level, false);
    return dt_run_guarded(&o.shared, true, run_all, &o);
}
