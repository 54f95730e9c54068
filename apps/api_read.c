/*
 * JSON bodies to jobs. See api.h.
 *
 * Brackets are counted before a body is parsed, which bounds the stack and the memory that it can take. The parser, jansson, refuses
 * what is not UTF-8, NUL characters and numbers out of range. Grammars and templates have bounds of their own in the library.
 */
#define _POSIX_C_SOURCE 200809L /* strdup */
#include "api_reader.h"
#include "json_parts.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MESSAGES_MAX 4096
#define NESTING_MAX 64
#define BRACKETS_MAX 100000 /* a list or an object takes hundreds of bytes, for two of the body */

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

/* ---- jobs --------------------------------------------------------------------------------------- */

/* Adds the job for a prompt, its tokens given, or its text to be tokenized; takes them over. */
static bool add_job(dt_reader *r, int32_t *tokens, size_t n_tokens, char *text, const dt_sampler_params *sampling) {
    dt_request *request = r->request;
    dt_job *job = dt_job_new();
    if (job == NULL) {
        dt_free(tokens);
        free(text);
        return dt_reader_no_memory(r);
    }
    request->jobs[request->n_jobs++] = job;
    job->tokens = tokens;
    job->n_tokens = n_tokens;
    job->text = text;
    if (text != NULL) {
        job->n_text = strlen(text);
        if (dt_conversations_tokenize(dt_scheduler_conversations(r->api->scheduler), text, job->n_text, true, &job->tokens,
                                      &job->n_tokens, &job->anchors, &job->n_anchors, r->error) != DT_OK) {
            return dt_reader_refuse_library(r);
        }
    }
    if (job->n_tokens == 0) { /* something to begin from */
        if (dt_token_start(r->api->model) < 0) {
            return dt_reader_refuse(r, 400,
                                    "the prompt is empty and this model has no start token to begin from; give it some text");
        }
        dt_free(job->tokens);
        job->tokens = malloc(sizeof *job->tokens);
        if (job->tokens == NULL) {
            return dt_reader_no_memory(r);
        }
        job->tokens[job->n_tokens++] = dt_token_start(r->api->model);
    }
    job->tlc = request->tlc;
    return dt_reader_settings(r, job, sampling);
}

/* ---- prompts ------------------------------------------------------------------------------------ */

/* The text of a message: a string, null, or a list of parts of text. free(). NULL: refused. */
static char *content_of(dt_reader *r, const json_t *message, size_t index) {
    const json_t *content = dt_reader_field(message, "content");
    if (content == NULL || json_is_string(content)) {
        char *text = strdup(content != NULL ? json_string_value(content) : "");
        if (text == NULL) {
            dt_reader_no_memory(r);
        }
        return text;
    }
    dt_text text = {0};
    dt_text_add(&text, "%s", "");
    for (size_t i = 0; i < json_array_size(content); i++) {
        const json_t *part = json_array_get(content, i), *type = dt_reader_field(part, "type"),
                     *piece = dt_reader_field(part, "text");
        const bool is_text =
            json_is_string(piece) && (type == NULL || (json_is_string(type) && strcmp(json_string_value(type), "text") == 0));
        if (!is_text) {
            free(text.text);
            dt_reader_refuse(r, 400, "messages[%zu].content[%zu]: only parts of type text are supported", index, i);
            return NULL;
        }
        dt_text_add(&text, "%s", json_string_value(piece));
    }
    if (!json_is_array(content)) {
        free(text.text);
        dt_reader_refuse(r, 400, "messages[%zu].content must be a string or a list of parts", index);
        return NULL;
    }
    if (text.out_of_memory) {
        free(text.text);
        dt_reader_no_memory(r);
        return NULL;
    }
    return text.text;
}

static bool read_message(dt_reader *r, const json_t *message, size_t index, dt_chat_message *out) {
    static const char *const roles[] = {"system", "user", "assistant", "tool"};
    const json_t *role = dt_reader_field(message, "role"), *calls = dt_reader_field(message, "tool_calls");
    if (!json_is_object(message) || !json_is_string(role)) {
        return dt_reader_refuse(r, 400, "messages[%zu] must be an object with a role and a content", index);
    }
    if (json_array_size(calls) > 0 || dt_reader_field(message, "function_call") != NULL) {
        return dt_reader_refuse(r, 400, "messages[%zu]: tool calls are not supported here", index);
    }
    const char *name = json_string_value(role);
    name = strcmp(name, "developer") == 0 ? "system" : name;
    for (size_t i = 0; i < sizeof roles / sizeof roles[0] && out->role == NULL; i++) {
        out->role = strcmp(roles[i], name) == 0 ? roles[i] : NULL;
    }
    if (out->role == NULL) {
        return dt_reader_refuse(r, 400, "messages[%zu].role must be system, developer, user, assistant or tool, not '%.40s'", index,
                                name);
    }
    out->content = content_of(r, message, index);
    return out->content != NULL;
}

/* The conversation as the model's template renders it. free(). */
static bool render(dt_reader *r, char **out) {
    const json_t *list = dt_reader_field(r->body, "messages");
    const size_t n = json_array_size(list);
    if (!json_is_array(list) || n == 0 || n > MESSAGES_MAX) {
        return dt_reader_refuse(r, 400, "messages must be a list of 1 to %d messages", MESSAGES_MAX);
    }
    dt_chat_message *messages = calloc(n, sizeof *messages);
    bool good = messages != NULL || dt_reader_no_memory(r);
    for (size_t i = 0; good && i < n; i++) {
        good = read_message(r, json_array_get(list, i), i, &messages[i]);
    }
    char *text = NULL;
    if (good && dt_chat_render(r->api->model, r->api->chat_template, messages, n, true, &text, r->error) != DT_OK) {
        good = dt_reader_refuse_library(r);
        r->status = r->status == 500 ? 500 : 400;
    }
    *out = good ? strdup(text) : NULL;
    dt_free(text);
    for (size_t i = 0; messages != NULL && i < n; i++) {
        free((char *)messages[i].content);
    }
    free(messages);
    return good && (*out != NULL || dt_reader_no_memory(r));
}

static bool add_chat(dt_reader *r, const dt_sampler_params *sampling) {
    char *text = NULL;
    r->request->jobs = calloc(1, sizeof(dt_job *));
    if (r->request->jobs == NULL) {
        return dt_reader_no_memory(r);
    }
    return dt_reader_constraint_fits(r, sampling, 1) && render(r, &text) && add_job(r, NULL, 0, text, sampling);
}

static bool add_token_prompt(dt_reader *r, const json_t *list, const dt_sampler_params *sampling) {
    const size_t n = json_array_size(list);
    const int32_t n_vocab = dt_model_get_info(r->api->model)->n_vocab;
    int32_t *tokens = malloc((n + 1) * sizeof *tokens);
    if (tokens == NULL) {
        return dt_reader_no_memory(r);
    }
    for (size_t i = 0; i < n; i++) {
        const json_t *value = json_array_get(list, i);
        const json_int_t token = json_is_integer(value) ? json_integer_value(value) : -1;
        if (token < 0 || token >= n_vocab) {
            free(tokens);
            return dt_reader_refuse(r, 400, "a prompt of tokens must be a list of whole numbers from 0 to %d", (int)n_vocab - 1);
        }
        tokens[i] = (int32_t)token;
    }
    return add_job(r, tokens, n, NULL, sampling);
}

static bool add_prompt(dt_reader *r, const json_t *prompt, const dt_sampler_params *sampling) {
    if (json_is_string(prompt)) {
        char *text = strdup(json_string_value(prompt));
        return text != NULL ? add_job(r, NULL, 0, text, sampling) : dt_reader_no_memory(r);
    }
    return json_is_array(prompt) ? add_token_prompt(r, prompt, sampling)
                                 : dt_reader_refuse(r, 400, "prompt must be a string, a list of tokens, or a list of those");
}

static bool add_completions(dt_reader *r, const dt_sampler_params *sampling) {
    const json_t *prompt = dt_reader_field(r->body, "prompt"), *first = json_array_get(prompt, 0);
    const bool many = json_is_array(prompt) && (json_is_string(first) || json_is_array(first));
    const size_t n = many ? json_array_size(prompt) : 1;
    if (json_is_array(prompt) && json_array_size(prompt) == 0) {
        return dt_reader_refuse(r, 400, "prompt is an empty list; give at least one prompt");
    }
    if (n > r->api->n_prompts_max) {
        return dt_reader_refuse(r, 400, "prompt holds %zu prompts; at most %zu are taken at once", n, r->api->n_prompts_max);
    }
    if (!dt_reader_constraint_fits(r, sampling, n)) {
        return false;
    }
    r->request->jobs = calloc(n, sizeof(dt_job *));
    if (r->request->jobs == NULL) {
        return dt_reader_no_memory(r);
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

static bool read_request(dt_reader *r) {
    dt_request *request = r->request;
    dt_sampler_params sampling = r->api->sampling;
    dt_constraints wanted = {0};
    const json_t *options = dt_reader_field(r->body, "stream_options");
    bool good = json_is_object(r->body) || dt_reader_refuse(r, 400, "the body must be a JSON object");
    good =
        good && dt_reader_model(r) && dt_reader_refuse_unsupported(r) && dt_reader_bool(r, r->body, "stream", &request->stream) &&
        dt_reader_bool(r, options, "include_usage", &request->include_usage) && dt_reader_bool(r, r->body, "tlc", &request->tlc) &&
        (request->kind == DT_API_CHAT || dt_reader_bool(r, r->body, "echo", &request->echo)) && dt_reader_sampling(r, &sampling) &&
        dt_reader_constraints(r, &wanted);
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
    dt_reader r = {.api = api, .request = out, .body = json, .status = 200, .error = error};
    name_request(out);
    if (!read_request(&r)) {
        dt_request_free(out);
        *out = (dt_request){.kind = kind};
    }
    return r.status;
}

/* Counts brackets, strings aside. */
static bool check_brackets(dt_reader *r, const char *text, size_t n) {
    int depth = 0, n_opened = 0;
    bool in_string = false;
    for (size_t i = 0; i < n; i++) {
        const char c = text[i];
        if (in_string) {
            in_string = c != '"';
            i += c == '\\' ? 1 : 0;
        } else {
            const bool opens = c == '[' || c == '{';
            in_string = c == '"';
            n_opened += opens ? 1 : 0;
            depth += opens ? 1 : c == ']' || c == '}' ? -1 : 0;
        }
        if (depth > NESTING_MAX) {
            return dt_reader_refuse(r, 400, "the body nests more than %d levels deep", NESTING_MAX);
        }
        if (n_opened > BRACKETS_MAX) {
            return dt_reader_refuse(r, 400, "the body holds more than %d lists and objects; split it", BRACKETS_MAX);
        }
    }
    return true;
}

json_t *dt_reader_parse(dt_reader *r, const char *body, size_t n) {
    json_error_t where;
    if (!check_brackets(r, body, n)) {
        return NULL;
    }
    json_t *json = dt_json_load(body, n, 0, &where);
    if (json == NULL && json_error_code(&where) == json_error_out_of_memory) {
        dt_reader_no_memory(r);
    } else if (json == NULL && dt_json_not_taken(&where) != NULL) {
        dt_reader_refuse(r, 400, "line %d, column %d of the body: %s", where.line, where.column, dt_json_not_taken(&where));
    } else if (json == NULL) {
        size_t n_reason = 0;
        char *reason = dt_repair_utf8(where.text, strlen(where.text), &n_reason); /* it quotes the body */
        dt_reader_refuse(r, 400, "the body is not JSON: line %d, column %d: %.200s", where.line, where.column,
                         reason != NULL ? reason : "");
        free(reason);
    }
    return json;
}

int dt_api_read(const dt_api *api, dt_api_kind kind, const char *body, size_t n, dt_request *out, dt_error *error) {
    dt_reader r = {.api = api, .status = 200, .error = error};
    *out = (dt_request){.kind = kind};
    json_t *json = dt_reader_parse(&r, body, n);
    const int status = json != NULL ? dt_api_read_json(api, kind, json, out, error) : r.status;
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
