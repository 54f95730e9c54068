/*
 * JSON bodies to jobs. See api.h.
 *
 * The body is parsed by jansson, which refuses what is not UTF-8, NUL characters, numbers out of range and nesting beyond 2048;
 * deeper uses of a value (grammars, templates) have bounds of their own in the library.
 */
#define _POSIX_C_SOURCE 200809L /* strdup */
#include "api.h"

#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define STOP_BYTES_MAX 256
#define MESSAGES_MAX 4096
#define NESTING_MAX 64

typedef struct reader {
    const dt_api *api;
    dt_request *request;
    const json_t *body;
    int status; /* 200 while nothing was wrong */
    dt_error *error;
} reader;

static bool refuse(reader *r, int status, const char *format, ...) __attribute__((format(printf, 3, 4)));
static bool refuse(reader *r, int status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(r->error->message, sizeof r->error->message, format, arguments);
    va_end(arguments);
    r->error->code = status == 500 ? DT_ERR_MEMORY : DT_ERR_ARGUMENT;
    r->status = status;
    return false;
}

static bool no_memory(reader *r) { return refuse(r, 500, "out of memory for the request"); }

static bool refuse_library(reader *r) {
    r->status = dt_api_status_of(r->error);
    return false;
}

int dt_api_status_of(const dt_error *error) {
    switch (error->code) {
    case DT_OK:
        return 200;
    case DT_ERR_ARGUMENT:
    case DT_ERR_LIMIT:
    case DT_ERR_CONFIG:
    case DT_ERR_FORMAT:
    case DT_ERR_UNSUPPORTED:
    case DT_ERR_TOKENIZER:
        return 400;
    case DT_ERR_CANCELLED:
        return 503;
    default:
        return 500;
    }
}

/* ---- fields ------------------------------------------------------------------------------------- */

/* The field, or NULL where it is missing or null. */
static const json_t *field(const json_t *object, const char *name) {
    const json_t *value = json_object_get(object, name);
    return json_is_null(value) ? NULL : value;
}

static bool read_number(reader *r, const char *name, double minimum, double maximum, float *out) {
    const json_t *value = field(r->body, name);
    if (value == NULL) {
        return true;
    }
    const double number = json_number_value(value);
    if (!json_is_number(value) || !(number >= minimum && number <= maximum)) {
        return refuse(r, 400, "%s must be a number from %g to %g", name, minimum, maximum);
    }
    *out = (float)number;
    return true;
}

static bool read_whole(reader *r, const json_t *object, const char *name, int64_t minimum, int64_t maximum, int64_t *out) {
    const json_t *value = field(object, name);
    if (value == NULL) {
        return true;
    }
    const double number = json_number_value(value);
    const bool whole =
        json_is_integer(value) || (json_is_real(value) && number > -1e15 && number < 1e15 && number == (double)(int64_t)number);
    const int64_t integer = json_is_integer(value) ? (int64_t)json_integer_value(value) : whole ? (int64_t)number : 0;
    if (!whole || integer < minimum || integer > maximum) {
        return refuse(r, 400, "%s must be a whole number from %lld to %lld", name, (long long)minimum, (long long)maximum);
    }
    *out = integer;
    return true;
}

static bool read_bool(reader *r, const json_t *object, const char *name, bool *out) {
    const json_t *value = field(object, name);
    if (value != NULL && !json_is_boolean(value)) {
        return refuse(r, 400, "%s must be true or false", name);
    }
    *out = value != NULL ? json_is_true(value) : *out;
    return true;
}

/* Fields that would change the answer and that we can't follow: accepted only with a value that asks for nothing. */
static bool refuse_unsupported(reader *r) {
    static const char *const lists[] = {"tools", "functions", "logit_bias", "suffix", "audio", "prediction", "images"};
    static const char *const zeros[] = {"frequency_penalty", "presence_penalty"};
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++) {
        const json_t *value = field(r->body, lists[i]);
        const bool empty = value == NULL || (json_is_array(value) && json_array_size(value) == 0) ||
                           (json_is_object(value) && json_object_size(value) == 0) ||
                           (json_is_string(value) && json_string_length(value) == 0);
        if (!empty) {
            return refuse(r, 400, "%s is not supported here; leave it out", lists[i]);
        }
    }
    for (size_t i = 0; i < sizeof zeros / sizeof zeros[0]; i++) {
        const json_t *value = field(r->body, zeros[i]);
        if (value != NULL && (!json_is_number(value) || json_number_value(value) != 0)) {
            return refuse(r, 400, "%s is not supported here; leave it out, or use repeat_penalty", zeros[i]);
        }
    }
    return true;
}

static bool read_model(reader *r) {
    const json_t *value = field(r->body, "model");
    if (value == NULL) {
        return true;
    }
    if (!json_is_string(value)) {
        return refuse(r, 400, "model must be a string");
    }
    const char *asked = json_string_value(value), *path = r->api->path;
    const char *slash = strrchr(path, '/'), *file = slash != NULL ? slash + 1 : path;
    const char *general = dt_model_get_info(r->api->model)->name;
    return strcmp(asked, r->api->name) == 0 || strcmp(asked, file) == 0 || strcmp(asked, path) == 0 ||
           (general[0] != 0 && strcmp(asked, general) == 0) ||
           refuse(r, 404, "there is no model '%.100s' here; the one there is is '%.100s'", asked, r->api->name);
}

/* ---- sampling ----------------------------------------------------------------------------------- */

typedef struct constraints {
    char *grammar, *json_schema; /* NULL where not given; free() */
} constraints;

static bool take_schema(reader *r, const json_t *schema, constraints *out) {
    if (!json_is_object(schema)) {
        return refuse(r, 400, "a JSON schema must be an object");
    }
    free(out->json_schema);
    out->json_schema = json_dumps(schema, JSON_COMPACT);
    return out->json_schema != NULL || no_memory(r);
}

static bool read_constraints(reader *r, constraints *out) {
    const json_t *grammar = field(r->body, "grammar"), *schema = field(r->body, "json_schema");
    const json_t *format = field(r->body, "response_format"), *type = field(format, "type");
    if (grammar != NULL && !json_is_string(grammar)) {
        return refuse(r, 400, "grammar must be a string (GBNF)");
    }
    if (schema != NULL && !take_schema(r, schema, out)) {
        return false;
    }
    if (format != NULL && !json_is_string(type)) {
        return refuse(r, 400, "response_format needs a type: text, json_object or json_schema");
    }
    const char *name = json_string_value(type);
    if (name != NULL && strcmp(name, "json_schema") == 0) {
        const json_t *inner = field(format, "json_schema");
        if (!take_schema(r, field(inner, "schema") != NULL ? field(inner, "schema") : inner, out)) {
            return false;
        }
    } else if (name != NULL && strcmp(name, "json_object") == 0) {
        const json_t *any = field(format, "schema");
        free(out->json_schema);
        out->json_schema = any != NULL ? json_dumps(any, JSON_COMPACT) : strdup("{\"type\":\"object\"}");
    } else if (name != NULL && strcmp(name, "text") != 0) {
        return refuse(r, 400, "response_format.type must be text, json_object or json_schema, not '%.40s'", name);
    }
    out->grammar = grammar != NULL && json_string_length(grammar) > 0 ? strdup(json_string_value(grammar)) : NULL;
    return (out->grammar == NULL) || (out->json_schema == NULL) || refuse(r, 400, "give a grammar or a JSON schema, not both");
}

static bool read_sampling(reader *r, dt_sampler_params *out) {
    int64_t top_k = out->top_k, seed = -1, last_n = out->repeat_last_n;
    if (!read_number(r, "temperature", 0, 100, &out->temp) || !read_number(r, "top_p", 0, 1, &out->top_p) ||
        !read_number(r, "min_p", 0, 1, &out->min_p) || !read_number(r, "repeat_penalty", 0.01, 100, &out->repeat_penalty) ||
        !read_whole(r, r->body, "top_k", INT32_MIN, INT32_MAX, &top_k) ||
        !read_whole(r, r->body, "repeat_last_n", -1, INT32_MAX, &last_n) ||
        !read_whole(r, r->body, "seed", INT64_MIN, INT64_MAX, &seed) || !read_bool(r, r->body, "ignore_eos", &out->ignore_end)) {
        return false;
    }
    out->top_k = (int32_t)top_k;
    out->repeat_last_n = (int32_t)last_n;
    out->seed = seed == -1 ? out->seed : (uint32_t)(seed % UINT32_MAX);
    return true;
}

/* One sampler per reply, which knows the prompt where it needs to. */
static bool make_samplers(reader *r, dt_job *job, const dt_sampler_params *params) {
    for (int32_t i = 0; i < job->n_choices; i++) {
        dt_sampler_params own = *params;
        own.seed = params->seed == DT_SEED_RANDOM ? DT_SEED_RANDOM : (params->seed + (uint32_t)i) % UINT32_MAX;
        dt_sampler **sampler = &job->choices[i].sampler;
        if (dt_sampler_new(r->api->model, &own, sampler, r->error) != DT_OK) {
            return refuse_library(r);
        }
        size_t known = own.repeat_penalty == 1.0f ? 0 : own.repeat_last_n < 0 ? job->n_tokens : (size_t)own.repeat_last_n;
        known = known < job->n_tokens ? known : job->n_tokens;
        for (size_t t = job->n_tokens - known; t < job->n_tokens; t++) {
            if (dt_sampler_accept(*sampler, job->tokens[t], false, r->error) != DT_OK) {
                return refuse_library(r);
            }
        }
    }
    return true;
}

/* ---- eviction ----------------------------------------------------------------------------------- */

char *dt_api_eviction_key(const dt_eviction *eviction, const char *extra) {
    char *lines = NULL;
    dt_error error;
    if (eviction == NULL) {
        return strdup("");
    }
    if (dt_eviction_describe(eviction, &lines, &error) != DT_OK) {
        return NULL;
    }
    const size_t n = strlen(lines) + strlen(extra) + 2;
    char *key = malloc(n);
    if (key != NULL) {
        snprintf(key, n, "%s\n%s", lines, extra);
    }
    dt_free(lines);
    return key;
}

static bool make_eviction(reader *r, const json_t *object, dt_job *job, char **out_extra) {
    const json_t *preset = field(object, "preset"), *config = field(object, "config");
    int64_t most = 0, least = -1;
    if ((preset != NULL) + (config != NULL) > 1 || (preset != NULL && !json_is_string(preset)) ||
        (config != NULL && !json_is_object(config))) {
        return refuse(r, 400, "eviction takes a preset (a string) or a config (an object)");
    }
    if (!read_whole(r, object, "max_cache_size", 1, INT32_MAX, &most) ||
        !read_whole(r, object, "min_cache_size", 0, INT32_MAX, &least)) {
        return false;
    }
    dt_eviction *eviction = NULL;
    dt_status status;
    if (config != NULL) {
        char *text = *out_extra = json_dumps(config, JSON_COMPACT);
        if (text == NULL) {
            return no_memory(r);
        }
        status = dt_eviction_from_text(r->api->model, "eviction.config", text, strlen(text), &eviction, r->error);
    } else {
        status = dt_eviction_from_preset(r->api->model, preset != NULL ? json_string_value(preset) : "chat", &eviction, r->error);
    }
    if (status == DT_OK && (most > 0 || least >= 0)) {
        status = dt_eviction_override(eviction, (int32_t)most, (int32_t)least, r->error);
    }
    job->eviction = eviction;
    return status == DT_OK || refuse_library(r);
}

/* The server's settings, or those that the request asks for. */
static bool read_eviction(reader *r, dt_job *job) {
    const json_t *object = field(r->body, "eviction");
    bool enabled = true;
    if (object == NULL) {
        job->eviction = r->api->eviction;
        job->eviction_key = strdup(r->api->eviction_key);
        return job->eviction_key != NULL || no_memory(r);
    }
    if (!r->api->eviction_override) {
        return refuse(r, 400, "this server does not let requests change eviction");
    }
    if (!json_is_object(object)) {
        return refuse(r, 400, "eviction must be an object such as {\"preset\": \"docqa\"} or {\"enabled\": false}");
    }
    if (!read_bool(r, object, "enabled", &enabled)) {
        return false;
    }
    char *extra = NULL;
    job->own_eviction = true;
    const bool made = !enabled || make_eviction(r, object, job, &extra);
    if (made) {
        job->eviction_key = dt_api_eviction_key(job->eviction, extra != NULL ? extra : "");
    }
    free(extra);
    return made && (job->eviction_key != NULL || no_memory(r));
}

/* ---- jobs --------------------------------------------------------------------------------------- */

static bool read_stops(reader *r, dt_job *job) {
    const json_t *stop = field(r->body, "stop");
    const size_t n = json_is_array(stop) ? json_array_size(stop) : stop != NULL ? 1 : 0;
    if (n > DT_JOB_STOPS_MAX) {
        return refuse(r, 400, "stop may hold at most %d strings", DT_JOB_STOPS_MAX);
    }
    for (size_t i = 0; i < n; i++) {
        const json_t *text = json_is_array(stop) ? json_array_get(stop, i) : stop;
        if (!json_is_string(text) || json_string_length(text) > STOP_BYTES_MAX) {
            return refuse(r, 400, "stop must be a string or a list of strings of at most %d bytes", STOP_BYTES_MAX);
        }
        if (json_string_length(text) > 0) {
            job->stops[job->n_stops] = strdup(json_string_value(text));
            if (job->stops[job->n_stops] == NULL) {
                return no_memory(r);
            }
            job->n_stops++;
        }
    }
    return true;
}

/* Chat: logprobs is a switch, top_logprobs a number. Completions: logprobs is that number. */
static bool read_logprobs(reader *r, dt_job *job) {
    const json_t *value = field(r->body, "logprobs");
    int64_t n_top = 0;
    if (json_is_boolean(value) || value == NULL) {
        job->logprobs = json_is_true(value);
        if (!read_whole(r, r->body, "top_logprobs", 0, DT_JOB_TOP_MAX, &n_top)) {
            return false;
        }
        if (n_top > 0 && !job->logprobs) {
            return refuse(r, 400, "top_logprobs needs logprobs: true");
        }
    } else if (r->request->kind == DT_API_CHAT) {
        return refuse(r, 400, "logprobs must be true or false; top_logprobs says how many");
    } else if (!read_whole(r, r->body, "logprobs", 0, DT_JOB_TOP_MAX, &n_top)) {
        return false;
    } else {
        job->logprobs = true;
    }
    job->n_top = (int32_t)n_top;
    job->score = job->logprobs && r->request->echo;
    return true;
}

static bool read_length(reader *r, dt_job *job) {
    int64_t n = r->api->max_tokens, n_choices = 1, best_of = -1;
    const char *name = field(r->body, "max_completion_tokens") != NULL ? "max_completion_tokens" : "max_tokens";
    if (!read_whole(r, r->body, name, 0, INT32_MAX, &n) || !read_whole(r, r->body, "n", 1, r->api->n_choices_max, &n_choices) ||
        !read_whole(r, r->body, "best_of", 1, INT32_MAX, &best_of)) {
        return false;
    }
    if (best_of > 0 && best_of != n_choices) {
        return refuse(r, 400, "best_of is not supported here; leave it out, or ask for that many with n");
    }
    job->max_tokens = n;
    job->n_choices = (int32_t)n_choices;
    return true;
}

/* Adds the job for a prompt, its tokens given, or its text to be tokenized; takes them over. */
static bool add_job(reader *r, int32_t *tokens, size_t n_tokens, char *text, const dt_sampler_params *sampling) {
    dt_request *request = r->request;
    dt_job *job = dt_job_new();
    if (job == NULL) {
        dt_free(tokens);
        free(text);
        return no_memory(r);
    }
    request->jobs[request->n_jobs++] = job;
    job->tokens = tokens;
    job->n_tokens = n_tokens;
    job->text = text;
    if (text != NULL) {
        job->n_text = strlen(text);
        if (dt_conversations_tokenize(dt_scheduler_conversations(r->api->scheduler), text, job->n_text, true, &job->tokens,
                                      &job->n_tokens, &job->anchors, &job->n_anchors, r->error) != DT_OK) {
            return refuse_library(r);
        }
    }
    if (job->n_tokens == 0) { /* something to begin from */
        if (dt_token_start(r->api->model) < 0) {
            return refuse(r, 400, "the prompt is empty and this model has no start token to begin from; give it some text");
        }
        dt_free(job->tokens);
        job->tokens = malloc(sizeof *job->tokens);
        if (job->tokens == NULL) {
            return no_memory(r);
        }
        job->tokens[job->n_tokens++] = dt_token_start(r->api->model);
    }
    job->tlc = request->tlc;
    if (!read_length(r, job) || !read_stops(r, job) || !read_logprobs(r, job) || !read_eviction(r, job)) {
        return false;
    }
    job->keep = r->api->keep && !job->score;
    return make_samplers(r, job, sampling);
}

/* ---- prompts ------------------------------------------------------------------------------------ */

/* The text of a message: a string, null, or a list of parts of text. free(). NULL: refused. */
static char *content_of(reader *r, const json_t *message, size_t index) {
    const json_t *content = field(message, "content");
    if (content == NULL || json_is_string(content)) {
        char *text = strdup(content != NULL ? json_string_value(content) : "");
        return text != NULL || no_memory(r) ? text : NULL;
    }
    dt_text text = {0};
    dt_text_add(&text, "%s", "");
    for (size_t i = 0; i < json_array_size(content); i++) {
        const json_t *part = json_array_get(content, i), *type = field(part, "type"), *piece = field(part, "text");
        const bool is_text =
            json_is_string(piece) && (type == NULL || (json_is_string(type) && strcmp(json_string_value(type), "text") == 0));
        if (!is_text) {
            free(text.text);
            refuse(r, 400, "messages[%zu].content[%zu]: only parts of type text are supported", index, i);
            return NULL;
        }
        dt_text_add(&text, "%s", json_string_value(piece));
    }
    if (!json_is_array(content)) {
        free(text.text);
        refuse(r, 400, "messages[%zu].content must be a string or a list of parts", index);
        return NULL;
    }
    if (text.out_of_memory) {
        free(text.text);
        no_memory(r);
        return NULL;
    }
    return text.text;
}

static bool read_message(reader *r, const json_t *message, size_t index, dt_chat_message *out) {
    static const char *const roles[] = {"system", "user", "assistant", "tool"};
    const json_t *role = field(message, "role"), *calls = field(message, "tool_calls");
    if (!json_is_object(message) || !json_is_string(role)) {
        return refuse(r, 400, "messages[%zu] must be an object with a role and a content", index);
    }
    if (json_array_size(calls) > 0 || field(message, "function_call") != NULL) {
        return refuse(r, 400, "messages[%zu]: tool calls are not supported here", index);
    }
    const char *name = json_string_value(role);
    name = strcmp(name, "developer") == 0 ? "system" : name;
    for (size_t i = 0; i < sizeof roles / sizeof roles[0] && out->role == NULL; i++) {
        out->role = strcmp(roles[i], name) == 0 ? roles[i] : NULL;
    }
    if (out->role == NULL) {
        return refuse(r, 400, "messages[%zu].role must be system, developer, user, assistant or tool, not '%.40s'", index, name);
    }
    out->content = content_of(r, message, index);
    return out->content != NULL;
}

/* The conversation as the model's template renders it. free(). */
static bool render(reader *r, char **out) {
    const json_t *list = field(r->body, "messages");
    const size_t n = json_array_size(list);
    if (!json_is_array(list) || n == 0 || n > MESSAGES_MAX) {
        return refuse(r, 400, "messages must be a list of 1 to %d messages", MESSAGES_MAX);
    }
    dt_chat_message *messages = calloc(n, sizeof *messages);
    bool good = messages != NULL || no_memory(r);
    for (size_t i = 0; good && i < n; i++) {
        good = read_message(r, json_array_get(list, i), i, &messages[i]);
    }
    char *text = NULL;
    if (good && dt_chat_render(r->api->model, r->api->chat_template, messages, n, true, &text, r->error) != DT_OK) {
        good = refuse_library(r);
        r->status = r->status == 500 ? 500 : 400;
    }
    *out = good ? strdup(text) : NULL;
    dt_free(text);
    for (size_t i = 0; messages != NULL && i < n; i++) {
        free((char *)messages[i].content);
    }
    free(messages);
    return good && (*out != NULL || no_memory(r));
}

static bool add_chat(reader *r, const dt_sampler_params *sampling) {
    char *text = NULL;
    r->request->jobs = calloc(1, sizeof(dt_job *));
    return r->request->jobs != NULL ? render(r, &text) && add_job(r, NULL, 0, text, sampling) : no_memory(r);
}

static bool add_token_prompt(reader *r, const json_t *list, const dt_sampler_params *sampling) {
    const size_t n = json_array_size(list);
    const int32_t n_vocab = dt_model_get_info(r->api->model)->n_vocab;
    int32_t *tokens = malloc((n + 1) * sizeof *tokens);
    if (tokens == NULL) {
        return no_memory(r);
    }
    for (size_t i = 0; i < n; i++) {
        const json_t *value = json_array_get(list, i);
        const json_int_t token = json_is_integer(value) ? json_integer_value(value) : -1;
        if (token < 0 || token >= n_vocab) {
            free(tokens);
            return refuse(r, 400, "a prompt of tokens must be a list of whole numbers from 0 to %d", (int)n_vocab - 1);
        }
        tokens[i] = (int32_t)token;
    }
    return add_job(r, tokens, n, NULL, sampling);
}

static bool add_prompt(reader *r, const json_t *prompt, const dt_sampler_params *sampling) {
    if (json_is_string(prompt)) {
        char *text = strdup(json_string_value(prompt));
        return text != NULL ? add_job(r, NULL, 0, text, sampling) : no_memory(r);
    }
    return json_is_array(prompt) ? add_token_prompt(r, prompt, sampling)
                                 : refuse(r, 400, "prompt must be a string, a list of tokens, or a list of those");
}

static bool add_completions(reader *r, const dt_sampler_params *sampling) {
    const json_t *prompt = field(r->body, "prompt"), *first = json_array_get(prompt, 0);
    const bool many = json_is_array(prompt) && (json_is_string(first) || json_is_array(first));
    const size_t n = many ? json_array_size(prompt) : 1;
    if (json_is_array(prompt) && json_array_size(prompt) == 0) {
        return refuse(r, 400, "prompt is an empty list; give at least one prompt");
    }
    if (n > r->api->n_prompts_max) {
        return refuse(r, 400, "prompt holds %zu prompts; at most %zu are taken at once", n, r->api->n_prompts_max);
    }
    r->request->jobs = calloc(n, sizeof(dt_job *));
    if (r->request->jobs == NULL) {
        return no_memory(r);
    }
    for (size_t i = 0; i < n; i++) {
        if (!add_prompt(r, many ? json_array_get(prompt, i) : prompt, sampling)) {
            return false;
        }
    }
    return true;
}

/* ---- the whole ---------------------------------------------------------------------------------- */

static void name_request(dt_request *request) {
    static atomic_uint counter;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    request->created = (int64_t)now.tv_sec;
    snprintf(request->id, sizeof request->id, "%s-%llx%05lx%04x", request->kind == DT_API_CHAT ? "chatcmpl" : "cmpl",
             (unsigned long long)now.tv_sec, (unsigned long)now.tv_nsec / 1000, atomic_fetch_add(&counter, 1) & 0xFFFF);
}

static bool read_request(reader *r) {
    dt_request *request = r->request;
    dt_sampler_params sampling = r->api->sampling;
    constraints wanted = {0};
    const json_t *options = field(r->body, "stream_options");
    bool good = json_is_object(r->body) || refuse(r, 400, "the body must be a JSON object");
    good = good && read_model(r) && refuse_unsupported(r) && read_bool(r, r->body, "stream", &request->stream) &&
           read_bool(r, options, "include_usage", &request->include_usage) && read_bool(r, r->body, "tlc", &request->tlc) &&
           (request->kind == DT_API_CHAT || read_bool(r, r->body, "echo", &request->echo)) && read_sampling(r, &sampling) &&
           read_constraints(r, &wanted);
    if (good) {
        sampling.grammar = wanted.grammar != NULL ? wanted.grammar : wanted.json_schema != NULL ? NULL : sampling.grammar;
        sampling.json_schema = wanted.json_schema != NULL ? wanted.json_schema
                               : wanted.grammar != NULL   ? NULL
                                                          : sampling.json_schema;
        good = request->kind == DT_API_CHAT ? add_chat(r, &sampling) : add_completions(r, &sampling);
    }
    free(wanted.grammar);
    free(wanted.json_schema);
    return good;
}

int dt_api_read_json(const dt_api *api, dt_api_kind kind, const void *json, dt_request *out, dt_error *error) {
    *out = (dt_request){.kind = kind};
    *error = (dt_error){.code = DT_OK};
    reader r = {.api = api, .request = out, .body = json, .status = 200, .error = error};
    name_request(out);
    if (!read_request(&r)) {
        dt_request_free(out);
        *out = (dt_request){.kind = kind};
    }
    return r.status;
}

/* How deep brackets nest, strings aside: bounded before anything recursive sees the text. */
static bool nests_too_deep(const char *text, size_t n) {
    int depth = 0;
    bool in_string = false;
    for (size_t i = 0; i < n; i++) {
        const char c = text[i];
        if (in_string) {
            in_string = c != '"';
            i += c == '\\' ? 1 : 0;
        } else {
            in_string = c == '"';
            depth += c == '[' || c == '{' ? 1 : c == ']' || c == '}' ? -1 : 0;
        }
        if (depth > NESTING_MAX) {
            return true;
        }
    }
    return false;
}

int dt_api_read(const dt_api *api, dt_api_kind kind, const char *body, size_t n, dt_request *out, dt_error *error) {
    json_error_t where;
    reader r = {.api = api, .status = 200, .error = error};
    *out = (dt_request){.kind = kind};
    if (nests_too_deep(body, n)) {
        refuse(&r, 400, "the body nests more than %d levels deep", NESTING_MAX);
        return r.status;
    }
    json_t *json = json_loadb(body, n, 0, &where);
    if (json == NULL) {
        char *reason = NULL;
        size_t n_reason = 0;
        reason = dt_repair_utf8(where.text, strlen(where.text), &n_reason); /* it quotes the body */
        refuse(&r, 400, "the body is not JSON: line %d, column %d: %.200s", where.line, where.column, reason != NULL ? reason : "");
        free(reason);
        return r.status;
    }
    const int status = dt_api_read_json(api, kind, json, out, error);
    json_decref(json);
    return status;
}

void dt_request_free(dt_request *request) {
    for (size_t i = 0; i < request->n_jobs; i++) {
        dt_job_free(request->jobs[i]);
    }
    free(request->jobs);
    request->jobs = NULL;
    request->n_jobs = 0;
}

const dt_error *dt_request_error(const dt_request *request) {
    for (size_t i = 0; i < request->n_jobs; i++) {
        if (request->jobs[i]->error.code != DT_OK) {
            return &request->jobs[i]->error;
        }
    }
    return NULL;
}
