/*
 * What a body says beside its prompts: sampling, constraints, eviction, length, stops, logprobs. See api_reader.h.
 */
#define _POSIX_C_SOURCE 200809L /* strdup */
#include "api_reader.h"
#include "json_parts.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STOP_BYTES_MAX 256
#define CONSTRAINT_BYTES_MAX ((size_t)4 << 20) /* of all replies; of one the library takes as much */

/* Fields that would change the answer and that we can't follow: accepted only with a value that asks for nothing. */
bool dt_reader_refuse_unsupported(dt_reader *r) {
    static const char *const lists[] = {"tools", "functions", "logit_bias", "suffix", "audio", "prediction", "images"};
    static const char *const zeros[] = {"frequency_penalty", "presence_penalty"};
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++) {
        const json_t *value = dt_reader_field(r->body, lists[i]);
        const bool empty = value == NULL || (json_is_array(value) && json_array_size(value) == 0) ||
                           (json_is_object(value) && json_object_size(value) == 0) ||
                           (json_is_string(value) && json_string_length(value) == 0);
        if (!empty) {
            return dt_reader_refuse(r, 400, "%s is not supported here; leave it out", lists[i]);
        }
    }
    const json_t *choice = dt_reader_field(r->body, "tool_choice");
    const char *word = json_string_value(choice); /* NULL: an object, which names a tool */
    if (choice != NULL && (word == NULL || (strcmp(word, "none") != 0 && strcmp(word, "auto") != 0))) {
        return dt_reader_refuse(r, 400, "tool_choice asks for tools, which are not supported here; leave it out");
    }
    for (size_t i = 0; i < sizeof zeros / sizeof zeros[0]; i++) {
        const json_t *value = dt_reader_field(r->body, zeros[i]);
        if (value != NULL && (!json_is_number(value) || json_number_value(value) != 0)) {
            return dt_reader_refuse(r, 400, "%s is not supported here; leave it out, or use repeat_penalty", zeros[i]);
        }
    }
    return true;
}

static const char *file_of(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash != NULL ? slash + 1 : path;
}

char *dt_api_model_name(const char *path) {
    const char *file = file_of(path);
    size_t n = 0;
    char *name = dt_repair_utf8(file, strlen(file), &n);
    if (name != NULL && n > 5 && strcmp(name + n - 5, ".gguf") == 0) {
        name[n - 5] = 0;
    }
    return name;
}

bool dt_api_is_model(const dt_api *api, const char *name) {
    const char *general = dt_model_get_info(api->model)->name;
    return strcmp(name, api->name) == 0 || strcmp(name, file_of(api->path)) == 0 || strcmp(name, api->path) == 0 ||
           (general[0] != 0 && strcmp(name, general) == 0);
}

bool dt_reader_model(dt_reader *r) {
    const json_t *value = dt_reader_field(r->body, "model");
    if (value == NULL) {
        return true;
    }
    if (!json_is_string(value)) {
        return dt_reader_refuse(r, 400, "model must be a string");
    }
    const char *asked = json_string_value(value);
    return dt_api_is_model(r->api, asked) ||
           dt_reader_refuse(r, 404, "there is no model '%.100s' here; the one there is is '%.100s'", asked, r->api->name);
}

/* ---- sampling ----------------------------------------------------------------------------------- */

static bool read_choices(dt_reader *r, int64_t *out) {
    if (!dt_reader_whole(r, r->body, "n", 1, DT_JOB_CHOICES_MAX, out)) {
        return false;
    }
    return *out <= r->api->n_choices_max ||
           dt_reader_refuse(r, 400, "n is %lld, but at most %d replies are computed at once here; ask for fewer", (long long)*out,
                            (int)r->api->n_choices_max);
}

static bool take_text(dt_reader *r, const char *text, char **out) {
    free(*out);
    *out = strdup(text);
    return *out != NULL || dt_reader_no_memory(r);
}

static bool take_schema(dt_reader *r, const json_t *schema, dt_constraints *out) {
    if (!json_is_object(schema)) {
        return dt_reader_refuse(r, 400, "a JSON schema must be an object");
    }
    free(out->json_schema);
    out->json_schema = dt_json_dump(schema, JSON_COMPACT);
    return out->json_schema != NULL || dt_reader_no_memory(r);
}

bool dt_reader_constraints(dt_reader *r, dt_constraints *out) {
    const json_t *grammar = dt_reader_field(r->body, "grammar"), *schema = dt_reader_field(r->body, "json_schema");
    const json_t *format = dt_reader_field(r->body, "response_format"), *type = dt_reader_field(format, "type");
    if (grammar != NULL && !json_is_string(grammar)) {
        return dt_reader_refuse(r, 400, "grammar must be a string (GBNF)");
    }
    if (schema != NULL && !take_schema(r, schema, out)) {
        return false;
    }
    if (format != NULL && !json_is_string(type)) {
        return dt_reader_refuse(r, 400, "response_format needs a type: text, json_object or json_schema");
    }
    const char *name = json_string_value(type);
    if (name != NULL && strcmp(name, "json_schema") == 0) {
        const json_t *inner = dt_reader_field(format, "json_schema");
        if (!take_schema(r, dt_reader_field(inner, "schema") != NULL ? dt_reader_field(inner, "schema") : inner, out)) {
            return false;
        }
    } else if (name != NULL && strcmp(name, "json_object") == 0) {
        const json_t *given = dt_reader_field(format, "schema");
        if (given != NULL ? !take_schema(r, given, out) : !take_text(r, "{\"type\":\"object\"}", &out->json_schema)) {
            return false;
        }
    } else if (name != NULL && strcmp(name, "text") != 0) {
        return dt_reader_refuse(r, 400, "response_format.type must be text, json_object or json_schema, not '%.40s'", name);
    }
    if (json_string_length(grammar) > 0 && !take_text(r, json_string_value(grammar), &out->grammar)) {
        return false;
    }
    return (out->grammar == NULL) || (out->json_schema == NULL) ||
           dt_reader_refuse(r, 400, "give a grammar or a JSON schema, not both");
}

bool dt_reader_constraint_fits(dt_reader *r, const dt_sampler_params *sampling, size_t n_prompts) {
    const char *constraint = sampling->grammar != NULL ? sampling->grammar : sampling->json_schema;
    const size_t n = constraint != NULL ? strlen(constraint) : 0;
    int64_t n_choices = 1;
    if (!read_choices(r, &n_choices)) {
        return false;
    }
    const size_t n_replies = n_prompts * (size_t)n_choices;
    return n_replies <= 1 || n <= CONSTRAINT_BYTES_MAX / n_replies ||
           dt_reader_refuse(
               r, 400,
               "a grammar or JSON schema of %zu bytes is too long for %zu replies at once, each of which takes as much "
               "again; ask for at most %zu, or for a shorter one",
               n, n_replies, CONSTRAINT_BYTES_MAX / n > 0 ? CONSTRAINT_BYTES_MAX / n : 1);
}

bool dt_reader_sampling(dt_reader *r, dt_sampler_params *out) {
    int64_t top_k = out->top_k, seed = -1, last_n = out->repeat_last_n;
    if (!dt_reader_number(r, "temperature", 0, 100, &out->temp) || !dt_reader_number(r, "top_p", 0, 1, &out->top_p) ||
        !dt_reader_number(r, "min_p", 0, 1, &out->min_p) ||
        !dt_reader_number(r, "repeat_penalty", 0.01, 100, &out->repeat_penalty) ||
        !dt_reader_whole(r, r->body, "top_k", INT32_MIN, INT32_MAX, &top_k) ||
        !dt_reader_whole(r, r->body, "repeat_last_n", -1, INT32_MAX, &last_n) ||
        !dt_reader_whole(r, r->body, "seed", INT64_MIN, INT64_MAX, &seed) ||
        !dt_reader_bool(r, r->body, "ignore_eos", &out->ignore_end)) {
        return false;
    }
    out->top_k = (int32_t)top_k;
    out->repeat_last_n = (int32_t)last_n;
    if (seed != -1) { /* -1 alone is DT_SEED_RANDOM */
        const int64_t rest = seed % (int64_t)UINT32_MAX;
        out->seed = (uint32_t)(rest < 0 ? rest + (int64_t)UINT32_MAX : rest);
    }
    return true;
}

/* One sampler per reply, which knows the prompt where it needs to. */
static bool make_samplers(dt_reader *r, dt_job *job, const dt_sampler_params *params) {
    for (int32_t i = 0; i < job->n_choices; i++) {
        dt_sampler_params own = *params;
        own.seed = params->seed == DT_SEED_RANDOM ? DT_SEED_RANDOM : (params->seed + (uint32_t)i) % UINT32_MAX;
        dt_sampler **sampler = &job->choices[i].sampler;
        if (dt_sampler_new(r->api->model, &own, sampler, r->error) != DT_OK) {
            return dt_reader_refuse_library(r);
        }
        size_t known = own.repeat_penalty == 1.0f ? 0 : own.repeat_last_n < 0 ? job->n_tokens : (size_t)own.repeat_last_n;
        known = known < job->n_tokens ? known : job->n_tokens;
        for (size_t t = job->n_tokens - known; t < job->n_tokens; t++) {
            if (dt_sampler_accept(*sampler, job->tokens[t], false, r->error) != DT_OK) {
                return dt_reader_refuse_library(r);
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

static bool make_eviction(dt_reader *r, const json_t *object, dt_job *job, char **out_extra) {
    const json_t *preset = dt_reader_field(object, "preset"), *config = dt_reader_field(object, "config");
    int64_t most = 0, least = -1;
    if ((preset != NULL) + (config != NULL) > 1 || (preset != NULL && !json_is_string(preset)) ||
        (config != NULL && !json_is_object(config))) {
        return dt_reader_refuse(r, 400, "eviction takes a preset (a string) or a config (an object)");
    }
    if (!dt_reader_whole(r, object, "max_cache_size", 1, INT32_MAX, &most) ||
        !dt_reader_whole(r, object, "min_cache_size", 0, INT32_MAX, &least)) {
        return false;
    }
    dt_eviction *eviction = NULL;
    dt_status status;
    if (config != NULL) {
        char *text = *out_extra = dt_json_dump(config, JSON_COMPACT);
        if (text == NULL) {
            return dt_reader_no_memory(r);
        }
        status = dt_eviction_from_text(r->api->model, "eviction.config", text, strlen(text), &eviction, r->error);
    } else {
        status = dt_eviction_from_preset(r->api->model, preset != NULL ? json_string_value(preset) : "chat", &eviction, r->error);
    }
    if (status == DT_OK && (most > 0 || least >= 0)) {
        status = dt_eviction_override(eviction, (int32_t)most, (int32_t)least, r->error);
    }
    job->eviction = eviction;
    return status == DT_OK || dt_reader_refuse_library(r);
}

/* The server's settings, or those that the request asks for. */
static bool read_eviction(dt_reader *r, dt_job *job) {
    const json_t *object = dt_reader_field(r->body, "eviction");
    bool enabled = true;
    if (object == NULL) {
        job->eviction = r->api->eviction;
        job->eviction_key = strdup(r->api->eviction_key);
        return job->eviction_key != NULL || dt_reader_no_memory(r);
    }
    if (!r->api->eviction_override) {
        return dt_reader_refuse(r, 400, "this server does not let requests change eviction");
    }
    if (!json_is_object(object)) {
        return dt_reader_refuse(r, 400, "eviction must be an object such as {\"preset\": \"docqa\"} or {\"enabled\": false}");
    }
    const char *name;
    json_t *value;
    json_object_foreach((json_t *)object, name, value) { /* a slip would let go what was to be kept */
        if (strcmp(name, "enabled") != 0 && strcmp(name, "preset") != 0 && strcmp(name, "config") != 0 &&
            strcmp(name, "max_cache_size") != 0 && strcmp(name, "min_cache_size") != 0) {
            return dt_reader_refuse(
                r, 400,
                "eviction has no \"%.100s\"; it takes enabled, preset, max_cache_size, min_cache_size, and the fields of a "
                "configuration within config",
                name);
        }
    }
    if (!dt_reader_bool(r, object, "enabled", &enabled)) {
        return false;
    }
    char *extra = NULL;
    job->own_eviction = true;
    const bool made = !enabled || make_eviction(r, object, job, &extra);
    if (made) {
        job->eviction_key = dt_api_eviction_key(job->eviction, extra != NULL ? extra : "");
    }
    free(extra);
    return made && (job->eviction_key != NULL || dt_reader_no_memory(r));
}

/* ---- of a job ---------------------------------------------------------------------------------- */

static bool read_stops(dt_reader *r, dt_job *job) {
    const json_t *stop = dt_reader_field(r->body, "stop");
    const size_t n = json_is_array(stop) ? json_array_size(stop) : stop != NULL ? 1 : 0;
    if (n > DT_JOB_STOPS_MAX) {
        return dt_reader_refuse(r, 400, "stop may hold at most %d strings", DT_JOB_STOPS_MAX);
    }
    for (size_t i = 0; i < n; i++) {
        const json_t *text = json_is_array(stop) ? json_array_get(stop, i) : stop;
        if (!json_is_string(text) || json_string_length(text) > STOP_BYTES_MAX) {
            return dt_reader_refuse(r, 400, "stop must be a string or a list of strings of at most %d bytes", STOP_BYTES_MAX);
        }
        if (json_string_length(text) > 0) {
            job->stops[job->n_stops] = strdup(json_string_value(text));
            if (job->stops[job->n_stops] == NULL) {
                return dt_reader_no_memory(r);
            }
            job->n_stops++;
        }
    }
    return true;
}

/* Chat: logprobs is a switch, top_logprobs a number. Completions: logprobs is that number. */
static bool read_logprobs(dt_reader *r, dt_job *job) {
    const json_t *value = dt_reader_field(r->body, "logprobs");
    int64_t n_top = 0;
    if (json_is_boolean(value) || value == NULL) {
        job->logprobs = json_is_true(value);
        if (!dt_reader_whole(r, r->body, "top_logprobs", 0, DT_JOB_TOP_MAX, &n_top)) {
            return false;
        }
        if (n_top > 0 && !job->logprobs) {
            return dt_reader_refuse(r, 400, "top_logprobs needs logprobs: true");
        }
    } else if (r->request->kind == DT_API_CHAT) {
        return dt_reader_refuse(r, 400, "logprobs must be true or false; top_logprobs says how many");
    } else if (!dt_reader_whole(r, r->body, "logprobs", 0, DT_JOB_TOP_MAX, &n_top)) {
        return false;
    } else {
        job->logprobs = true;
    }
    job->n_top = (int32_t)n_top;
    job->score = job->logprobs && r->request->echo;
    return true;
}

static bool read_length(dt_reader *r, dt_job *job) {
    int64_t n = r->api->max_tokens, n_choices = 1, best_of = -1;
    static const char *const names[] = {"max_completion_tokens", "max_tokens", "n_predict"}; /* the last is llama.cpp's */
    const char *name = names[0];
    for (size_t i = 1; i < sizeof names / sizeof names[0] && dt_reader_field(r->body, name) == NULL; i++) {
        name = names[i];
    }
    if (!dt_reader_whole(r, r->body, name, 0, INT32_MAX, &n) || !read_choices(r, &n_choices) ||
        !dt_reader_whole(r, r->body, "best_of", 1, INT32_MAX, &best_of)) {
        return false;
    }
    if (best_of > 0 && best_of != n_choices) {
        return dt_reader_refuse(r, 400, "best_of is not supported here; leave it out, or ask for that many with n");
    }
    job->max_tokens = n;
    job->n_choices = (int32_t)n_choices;
    return true;
}

bool dt_reader_settings(dt_reader *r, dt_job *job, const dt_sampler_params *sampling) {
    if (!read_length(r, job) || !read_stops(r, job) || !read_logprobs(r, job) || !read_eviction(r, job)) {
        return false;
    }
    job->keep = r->api->keep && !job->score;
    return make_samplers(r, job, sampling);
}

dt_status dt_api_check(const dt_api *api, dt_error *error) {
    dt_sampler *sampler = NULL;
    dt_status status = dt_sampler_new(api->model, &api->sampling, &sampler, error);
    dt_sampler_free(sampler);
    if (status == DT_OK && api->chat_template != NULL) {
        const dt_chat_message hello = {.role = "user", .content = "Hello"};
        char *text = NULL;
        status = dt_chat_render(api->model, api->chat_template, &hello, 1, true, &text, error);
        dt_free(text);
        status = status == DT_ERR_FORMAT ? (error->code = DT_ERR_ARGUMENT) : status;
    }
    return status;
}
