/*
 * What came of jobs, as JSON. See api.h.
 *
 * A running job is looked at through a copy of what is new (a delta), taken under its lock, so that the scheduler's thread never
 * waits for JSON being written.
 */
#define _POSIX_C_SOURCE 200809L
#include "api_reader.h"
#include "json_parts.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* JSON that is thrown away after. NULL: out of memory. */
static char *dump(json_t *json) {
    char *text = json != NULL ? dt_json_dump(json, JSON_COMPACT | JSON_REAL_PRECISION(9)) : NULL;
    json_decref(json);
    return text;
}

#define FARTHEST_TOKEN 32 /* bytes of a prompt that its tokens may lack in one place */

/* ---- characters ---------------------------------------------------------------------------------- */

typedef struct place { /* in a text as answers show it: what is no UTF-8 is a character a byte (dt_repair_utf8) */
    size_t at, n_characters;
} place;

/* Goes on to the character of text[n] that the byte `at` is in; returns how many there are before it. */
static size_t go_to(place *p, const char *text, size_t n, size_t at) {
    while (p->at < n) {
        bool open;
        const size_t bytes = dt_character_at(text + p->at, n - p->at, &open), step = bytes > 0 ? bytes : 1;
        if (p->at + step > at) {
            break;
        }
        p->at += step;
        p->n_characters++;
    }
    return p->n_characters;
}

/* ---- deltas ------------------------------------------------------------------------------------- */

typedef struct progress { /* of a choice */
    size_t n_text, n_records;
    bool begun, finished;
    size_t n_characters,
        next_offset; /* with logprobs: shown, the prompt's included; before the first token that has still to come */
} progress;

typedef struct delta { /* of a choice: what came after what was taken before */
    char *text;
    size_t n_text, text_from;
    dt_record *records;
    dt_top *tops;
    size_t n_records;
    dt_finish finish;
    bool waits; /* not all of the prompt's tokens that are asked for have their logprobs yet */
} delta;

static void free_delta(delta *d) {
    free(d->text);
    free(d->records);
    free(d->tops);
}

/* With the job's lock held. Records whose text is not yet shown wait; those of what a stop string cut off never come. */
static bool take_delta(const dt_job *job, int32_t index, const progress *sent, bool end_token, delta *out) {
    const size_t text_from = sent->n_text, records_from = sent->n_records;
    const dt_choice *c = &job->choices[index];
    size_t n = 0;
    while (job->logprobs && records_from + n < c->n_records && c->records[records_from + n].text_end <= c->n_safe) {
        n++;
    }
    n -= n > 0 && c->ended && !end_token && records_from + n == c->n_records ? 1 : 0;
    *out = (delta){.n_text = c->n_safe - text_from,
                   .text_from = text_from,
                   .n_records = n,
                   .finish = c->finish,
                   .waits = job->score && job->n_prompt_records < job->n_tokens};
    const size_t n_top = (size_t)job->n_top;
    out->text = malloc(out->n_text + 1);
    out->records = malloc((n + 1) * sizeof *out->records);
    out->tops = malloc((n * n_top + 1) * sizeof *out->tops);
    if (out->text == NULL || out->records == NULL || out->tops == NULL) {
        free_delta(out);
        return false;
    }
    if (out->n_text > 0) {
        memcpy(out->text, c->text + text_from, out->n_text);
    }
    if (n > 0) {
        memcpy(out->records, c->records + records_from, n * sizeof *out->records);
    }
    if (n * n_top > 0) {
        memcpy(out->tops, c->tops + records_from * n_top, n * n_top * sizeof *out->tops);
    }
    return true;
}

/* ---- logprobs ----------------------------------------------------------------------------------- */

static double finite_logprob(float logprob) { return logprob > -9999.0f ? (double)logprob : -9999.0; }

static size_t bytes_of(const dt_api *api, int32_t token, char *out, size_t capacity) {
    const size_t n = dt_token_bytes(api->model, token, true, out, capacity);
    return n < capacity ? n : capacity;
}

/* A token as the completions API names it: its text, or bytes:\xNN... where that is no text; NUL is none, since no field of an object
 * may be named so. */
static json_t *token_name(const dt_api *api, int32_t token) {
    char bytes[256], name[16 + 4 * sizeof bytes];
    const size_t n = bytes_of(api, token, bytes, sizeof bytes);
    json_t *json = memchr(bytes, 0, n) == NULL ? json_stringn(bytes, n) : NULL; /* NULL where it is not UTF-8 */
    if (json == NULL) {
        size_t used = (size_t)snprintf(name, sizeof name, "bytes:");
        for (size_t i = 0; i < n; i++) {
            used += (size_t)snprintf(name + used, sizeof name - used, "\\x%02x", (unsigned)(unsigned char)bytes[i]);
        }
        json = json_string(name);
    }
    return json;
}

static json_t *chat_token(const dt_api *api, int32_t token, float logprob) {
    char bytes[256];
    const size_t n = bytes_of(api, token, bytes, sizeof bytes);
    json_t *list = json_array();
    for (size_t i = 0; i < n; i++) {
        dt_json_append(&list, json_integer((unsigned char)bytes[i]));
    }
    return json_pack("{s:o,s:f,s:o}", "token", dt_json_bytes(bytes, n), "logprob", finite_logprob(logprob), "bytes", list);
}

static json_t *chat_logprobs(const dt_api *api, const dt_job *job, const delta *d) {
    json_t *content = json_array();
    for (size_t i = 0; i < d->n_records; i++) {
        json_t *entry = chat_token(api, d->records[i].token, d->records[i].logprob), *tops = json_array();
        for (int32_t k = 0; k < job->n_top; k++) {
            const dt_top *top = &d->tops[i * (size_t)job->n_top + (size_t)k];
            if (top->token >= 0) {
                dt_json_append(&tops, chat_token(api, top->token, top->logprob));
            }
        }
        dt_json_set(&entry, "top_logprobs", tops);
        dt_json_append(&content, entry);
    }
    return json_pack("{s:o}", "content", content);
}

typedef struct completion_logprobs {
    json_t *tokens, *logprobs, *tops, *offsets;
} completion_logprobs;

static void add_completion_record(const dt_api *api, completion_logprobs *to, const dt_record *record, const dt_top *tops,
                                  int32_t n_top, size_t offset) {
    const bool known = !isnan(record->logprob);
    dt_json_append(&to->tokens, token_name(api, record->token));
    dt_json_append(&to->logprobs, known ? json_real(finite_logprob(record->logprob)) : json_null());
    dt_json_append(&to->offsets, json_integer((json_int_t)offset));
    json_t *object = known ? json_object() : json_null();
    if (known && n_top > 0) { /* OpenAI's lists name the token itself too, likely or not */
        json_t *name = token_name(api, record->token);
        dt_json_set(&object, json_string_value(name), json_real(finite_logprob(record->logprob)));
        json_decref(name);
    }
    for (int32_t k = n_top - 1; known && k >= 0; k--) { /* tokens of equal names: the likeliest stays */
        if (tops[k].token >= 0) {
            json_t *name = token_name(api, tops[k].token);
            dt_json_set(&object, json_string_value(name), json_real(finite_logprob(tops[k].logprob)));
            json_decref(name);
        }
    }
    dt_json_append(&to->tops, object);
}

/* Where the token's text lies in the prompt's, from *at on, which goes behind it. The tokenizer may have added a start token or a space,
 * or write some text otherwise. */
static size_t find_token(const dt_api *api, int32_t token, const char *text, size_t n, size_t *at) {
    char bytes[256];
    const size_t n_bytes = bytes_of(api, token, bytes, sizeof bytes), left = n - *at;
    const bool special = dt_token_bytes(api->model, token, false, NULL, 0) == 0;
    const bool added = n_bytes > 0 && bytes[0] == ' ' && n_bytes - 1 <= left && memcmp(text + *at, bytes + 1, n_bytes - 1) == 0;
    for (size_t skip = 0; n_bytes > 0 && skip <= (special ? 0 : FARTHEST_TOKEN) && skip + n_bytes <= left; skip++) {
        if (memcmp(text + *at + skip, bytes, n_bytes) == 0 && (skip == 0 || !added)) {
            *at += skip + n_bytes;
            return *at - n_bytes;
        }
    }
    const size_t begin = *at;
    *at += added ? n_bytes - 1 : 0;
    return begin;
}

/* text: what is shown, the prompt's n_echo bytes in front of the delta's. Offsets count characters, as OpenAI's do. */
static json_t *completion_logprobs_json(const dt_api *api, const dt_job *job, const delta *d, const char *text, size_t n_echo,
                                        bool with_prompt, progress *sent) {
    completion_logprobs to = {json_array(), json_array(), json_array(), json_array()};
    const size_t n_top = (size_t)job->n_top, n = n_echo + d->n_text;
    size_t at = 0;
    place p = {.n_characters = sent->n_characters};
    for (size_t i = 0; with_prompt && i < job->n_prompt_records; i++) {
        const dt_top *tops = n_top > 0 ? job->prompt_tops + i * n_top : NULL;
        const size_t begin = find_token(api, job->prompt_records[i].token, text, n_echo, &at);
        add_completion_record(api, &to, &job->prompt_records[i], tops, job->n_top, go_to(&p, text, n, begin));
    }
    size_t offset = sent->begun ? sent->next_offset : go_to(&p, text, n, n_echo);
    for (size_t i = 0; i < d->n_records; i++) {
        add_completion_record(api, &to, &d->records[i], d->tops + i * n_top, job->n_top, offset);
        offset = go_to(&p, text, n, n_echo + d->records[i].text_end - d->text_from);
    }
    sent->next_offset = offset;
    sent->n_characters = go_to(&p, text, n, n);
    return json_pack("{s:o,s:o,s:o,s:o}", "tokens", to.tokens, "token_logprobs", to.logprobs, "top_logprobs", to.tops,
                     "text_offset", to.offsets);
}

/* ---- whole answers ------------------------------------------------------------------------------ */

static json_t *finish_json(dt_finish finish) {
    return finish == DT_FINISH_NONE ? json_null() : json_string(finish == DT_FINISH_STOP ? "stop" : "length");
}

static json_t *usage_json(const dt_request *request) {
    int64_t n_prompt = 0, n_generated = 0, n_cached = 0;
    for (size_t i = 0; i < request->n_jobs; i++) {
        const dt_job *job = request->jobs[i];
        n_prompt += (int64_t)job->n_tokens;
        n_cached += job->reused_tokens;
        for (int32_t c = 0; c < job->n_choices; c++) {
            n_generated += (int64_t)job->choices[c].n_records;
        }
    }
    return json_pack("{s:I,s:I,s:I,s:{s:I}}", "prompt_tokens", (json_int_t)n_prompt, "completion_tokens", (json_int_t)n_generated,
                     "total_tokens", (json_int_t)n_prompt + (json_int_t)n_generated, "prompt_tokens_details", "cached_tokens",
                     (json_int_t)n_cached);
}

static json_t *head(const dt_api *api, const dt_request *request, bool chunk) {
    const char *object = request->kind == DT_API_COMPLETION ? "text_completion"
                         : chunk                            ? "chat.completion.chunk"
                                                            : "chat.completion";
    return json_pack("{s:s,s:s,s:I,s:s}", "id", request->id, "object", object, "created", (json_int_t)request->created, "model",
                     api->name);
}

/* What was evicted, where something was: nothing is let go silently. */
static void add_eviction(json_t **json, const dt_request *request) {
    int64_t evicted = 0;
    for (size_t i = 0; i < request->n_jobs; i++) {
        evicted += request->jobs[i]->evicted_tokens;
    }
    const dt_eviction *eviction = request->jobs[0]->eviction;
    if (eviction != NULL) {
        dt_json_set(
            json, "eviction",
            json_pack("{s:o,s:I}", "name", dt_json_text(dt_eviction_name(eviction)), "evicted_tokens", (json_int_t)evicted));
    }
}

/* Bytes of the prompt as text. */
static size_t prompt_length(const dt_api *api, const dt_job *job) {
    char bytes[256];
    size_t n = 0;
    for (size_t i = 0; job->text == NULL && i < job->n_tokens; i++) {
        n += bytes_of(api, job->tokens[i], bytes, sizeof bytes);
    }
    return job->text != NULL ? job->n_text : n;
}

/* The prompt as text[n], for echo. */
static void copy_prompt(const dt_api *api, const dt_job *job, char *text, size_t n) {
    if (job->text != NULL) {
        memcpy(text, job->text, n);
        return;
    }
    for (size_t i = 0, at = 0; i < job->n_tokens; i++) {
        at += bytes_of(api, job->tokens[i], text + at, n - at);
    }
}

static json_t *completion_choice(const dt_api *api, const dt_request *request, const dt_job *job, const delta *d, int index,
                                 progress *sent) {
    const bool echo = request->echo && !sent->begun;
    const size_t n_echo = echo ? prompt_length(api, job) : 0;
    char *text = malloc(n_echo + d->n_text + 1);
    if (text == NULL) {
        return NULL;
    }
    if (n_echo > 0) {
        copy_prompt(api, job, text, n_echo);
    }
    memcpy(text + n_echo, d->text, d->n_text);
    json_t *logprobs = job->logprobs ? completion_logprobs_json(api, job, d, text, n_echo, echo, sent) : json_null();
    json_t *json = json_pack("{s:i,s:o,s:o,s:o}", "index", index, "text", dt_json_bytes(text, n_echo + d->n_text), "logprobs",
                             logprobs, "finish_reason", finish_json(d->finish));
    free(text);
    return json;
}

static json_t *chat_choice(const dt_api *api, const dt_job *job, const delta *d, int index) {
    return json_pack("{s:i,s:{s:s,s:o},s:o,s:o}", "index", index, "message", "role", "assistant", "content",
                     dt_json_bytes(d->text, d->n_text), "logprobs", job->logprobs ? chat_logprobs(api, job, d) : json_null(),
                     "finish_reason", finish_json(d->finish));
}

char *dt_api_answer(const dt_api *api, const dt_request *request) {
    json_t *json = head(api, request, false), *choices = json_array();
    bool good = true;
    int index = 0;
    for (size_t i = 0; good && i < request->n_jobs; i++) {
        const dt_job *job = request->jobs[i];
        for (int32_t c = 0; good && c < job->n_choices; c++, index++) {
            delta d;
            progress sent = {.begun = false};
            good = take_delta(job, c, &sent, request->kind == DT_API_COMPLETION, &d);
            if (good) {
                dt_json_append(&choices, request->kind == DT_API_CHAT ? chat_choice(api, job, &d, index)
                                                                      : completion_choice(api, request, job, &d, index, &sent));
                free_delta(&d);
            }
        }
    }
    dt_json_set(&json, "choices", choices);
    dt_json_set(&json, "usage", usage_json(request));
    add_eviction(&json, request);
    if (request->tlc && request->jobs[0]->tlc_json != NULL) {
        const char *tlc = request->jobs[0]->tlc_json;
        dt_json_set(&json, "tlc", dt_json_load(tlc, strlen(tlc), 0, NULL));
    }
    if (!good) {
        json_decref(json);
        return NULL;
    }
    return dump(json);
}

char *dt_api_error(int status, const char *message) {
    const char *type = status == 401   ? "authentication_error"
                       : status == 404 ? "not_found_error"
                       : status == 429 ? "rate_limit_error"
                       : status < 500  ? "invalid_request_error"
                                       : "server_error";
    return dump(json_pack("{s:{s:o,s:s,s:n,s:n}}", "error", "message", dt_json_text(message), "type", type, "param", "code"));
}

char *dt_api_models(const dt_api *api) {
    const dt_model_info *info = dt_model_get_info(api->model);
    return dump(json_pack("{s:s,s:[{s:s,s:s,s:i,s:s,s:{s:s,s:i,s:i,s:I,s:I,s:s}}]}", "object", "list", "data", "id", api->name,
                          "object", "model", "created", 0, "owned_by", "local", "meta", "architecture", info->architecture,
                          "n_ctx_train", (int)info->n_ctx_train, "n_vocab", (int)info->n_vocab, "n_params",
                          (json_int_t)info->n_params, "size", (json_int_t)info->weight_bytes, "weight_type", info->weight_type));
}

char *dt_api_props(const dt_api *api) {
    return dump(json_pack("{s:s,s:s,s:i,s:i,s:s,s:s,s:b,s:I,s:{s:b,s:o,s:b,s:[s,s,s,s]}}", "model", api->name, "version",
                          DT_VERSION, "n_ctx", (int)api->n_ctx, "n_layers", (int)dt_model_get_info(api->model)->n_layers, "kv_type",
                          api->kv_type, "prefill", api->prefill, "api_key", api->has_key, "max_tokens", (json_int_t)api->max_tokens,
                          "eviction", "enabled", api->eviction != NULL, "name",
                          dt_json_text(api->eviction != NULL ? dt_eviction_name(api->eviction) : "off"), "override",
                          api->eviction_override, "presets", "chat", "docqa", "code", "summary"));
}

/* ---- tokens ------------------------------------------------------------------------------------- */

static const char out_of_memory[] = "out of memory for the answer";

static char *refuse_body(int status, const char *message, int *out_status) {
    *out_status = status;
    return dt_api_error(status, message);
}

static json_t *tokens_json(const dt_api *api, const json_t *body, dt_error *error) {
    const json_t *content = json_object_get(body, "content");
    content = content != NULL ? content : json_object_get(body, "prompt");
    const json_t *special = json_object_get(body, "parse_special");
    const bool add_special =
        json_is_true(json_object_get(body, "add_special")) || json_is_true(json_object_get(body, "add_special_tokens"));
    int32_t *tokens = NULL;
    size_t n = 0;
    if (dt_tokenize(api->model, json_string_value(content), json_string_length(content), add_special,
                    special == NULL || json_is_true(special), &tokens, &n, error) != DT_OK) {
        return NULL;
    }
    const bool pieces = json_is_true(json_object_get(body, "with_pieces"));
    json_t *list = json_array();
    for (size_t i = 0; i < n; i++) {
        dt_json_append(&list, pieces ? json_pack("{s:i,s:o}", "id", (int)tokens[i], "piece", token_name(api, tokens[i]))
                                     : json_integer(tokens[i]));
    }
    dt_free(tokens);
    return json_pack("{s:o}", "tokens", list);
}

char *dt_api_tokenize(const dt_api *api, const char *body, size_t n, int *out_status) {
    dt_error error = {0};
    dt_reader r = {.api = api, .status = 200, .error = &error};
    json_t *json = dt_reader_parse(&r, body, n);
    if (json == NULL) {
        return refuse_body(r.status, error.message, out_status);
    }
    const json_t *content = json_object_get(json, "content");
    if (!json_is_string(content != NULL ? content : json_object_get(json, "prompt"))) {
        json_decref(json);
        return refuse_body(400, "the body must be a JSON object with the text as \"content\"", out_status);
    }
    json_t *answer = tokens_json(api, json, &error);
    json_decref(json);
    if (answer == NULL) {
        return error.code != DT_OK ? refuse_body(dt_api_status_of(&error), error.message, out_status)
                                   : refuse_body(500, out_of_memory, out_status);
    }
    *out_status = 200;
    return dump(answer);
}

/* The text of the model's tokens in list. False: they are none; *out NULL: out of memory. */
static bool text_of_tokens(const dt_api *api, const json_t *list, json_t **out) {
    const int32_t n_vocab = dt_model_get_info(api->model)->n_vocab;
    const size_t n_tokens = json_array_size(list);
    size_t n = 0;
    *out = NULL;
    for (size_t i = 0; i < n_tokens; i++) {
        const json_t *value = json_array_get(list, i);
        const json_int_t token = json_is_integer(value) ? json_integer_value(value) : -1;
        if (token < 0 || token >= n_vocab) {
            return false;
        }
        n += dt_token_bytes(api->model, (int32_t)token, true, NULL, 0);
    }
    char *text = malloc(n + 1);
    for (size_t i = 0, at = 0; text != NULL && i < n_tokens; i++) {
        at += bytes_of(api, (int32_t)json_integer_value(json_array_get(list, i)), text + at, n - at);
    }
    *out = text != NULL ? dt_json_bytes(text, n) : NULL;
    free(text);
    return true;
}

char *dt_api_detokenize(const dt_api *api, const char *body, size_t n, int *out_status) {
    dt_error error = {0};
    dt_reader r = {.api = api, .status = 200, .error = &error};
    json_t *json = dt_reader_parse(&r, body, n), *list = json_object_get(json, "tokens"), *content = NULL;
    if (json == NULL) {
        return refuse_body(r.status, error.message, out_status);
    }
    const bool good = json_is_array(list) && text_of_tokens(api, list, &content);
    json_decref(json);
    if (!good) {
        return refuse_body(400, "the body must be a JSON object with a list of the model's tokens as \"tokens\"", out_status);
    }
    if (content == NULL) {
        return refuse_body(500, out_of_memory, out_status);
    }
    *out_status = 200;
    return dump(json_pack("{s:O,s:o}", "content", content, "prompt", content));
}

/* What lm-evaluation-harness asks, so that it needs no tokenizer of its own. */
char *dt_api_tokenizer_info(const dt_api *api) {
    const int32_t n_vocab = dt_model_get_info(api->model)->n_vocab, start = dt_token_start(api->model);
    int32_t end = 0;
    while (end < n_vocab && !dt_token_is_end(api->model, end)) {
        end++;
    }
    return dump(json_pack("{s:o,s:o,s:i}", "eos_token", end < n_vocab ? token_name(api, end) : json_null(), "bos_token",
                          start >= 0 ? token_name(api, start) : json_null(), "vocab_size", (int)n_vocab));
}

/* ---- metrics ------------------------------------------------------------------------------------ */

#define PROMPTS_BY_OUTCOME                                                                                                         \
    "Prompts by outcome; refused: not let into the queue, since it was full (429) or the server was stopping (503). Requests "     \
    "that "                                                                                                                        \
    "are turned away before it (401, 404, 405, 413, most 400) count nowhere."

void dt_api_metrics(const dt_api *api, dt_text *text) {
    dt_scheduler_stats s;
    dt_conversations_stats c;
    dt_scheduler_get_stats(api->scheduler, &s);
    dt_conversations_get_stats(dt_scheduler_conversations(api->scheduler), &c);
    dt_metric_add(text, "requests_total", "counter", PROMPTS_BY_OUTCOME, "{outcome=\"done\"}", (double)s.n_done);
    dt_metric_add(text, "requests_total", "", NULL, "{outcome=\"failed\"}", (double)s.n_failed);
    dt_metric_add(text, "requests_total", "", NULL, "{outcome=\"cancelled\"}", (double)s.n_cancelled);
    dt_metric_add(text, "requests_total", "", NULL, "{outcome=\"refused\"}", (double)s.n_refused);
    dt_metric_add(text, "requests_waiting", "gauge", "Prompts in the queue.", "", (double)s.n_waiting);
    dt_metric_add(text, "replies_running", "gauge", "Replies being computed.", "", (double)s.n_running);
    dt_metric_add(text, "prompt_tokens_total", "counter", "Tokens of prompts.", "", (double)s.prompt_tokens);
    dt_metric_add(text, "reused_tokens_total", "counter", "Tokens of prompts that were found in the cache.", "",
                  (double)c.reused_tokens);
    dt_metric_add(text, "reuse_rate", "gauge", "Share of prompt tokens found in the cache.", "",
                  c.prompt_tokens > 0 ? (double)c.reused_tokens / (double)c.prompt_tokens : 0);
    dt_metric_add(text, "generated_tokens_total", "counter", "Tokens generated.", "", (double)s.generated_tokens);
    dt_metric_add(text, "steps_total", "counter", "Batches computed.", "", (double)s.steps);
    dt_metric_add(text, "eviction_rounds_total", "counter", "Eviction rounds.", "", (double)s.eviction_rounds);
    dt_metric_add(text, "evicted_tokens_total", "counter", "Tokens evicted, summed over layers.", "", (double)s.evicted_tokens);
    dt_metric_add(text, "kv_bytes", "gauge", "Bytes of KV cache by state; what conversations share counts in each.",
                  "{state=\"active\"}", (double)c.active_bytes);
    dt_metric_add(text, "kv_bytes", "", NULL, "{state=\"idle\"}", (double)c.idle_bytes);
    dt_metric_add(text, "kv_bytes", "", NULL, "{state=\"disk\"}", (double)c.disk_bytes);
    dt_metric_add(text, "kv_bytes_allocated", "gauge", "Bytes of KV cache in memory, shared ones once.", "",
                  (double)s.group.kv_bytes);
    dt_metric_add(text, "kv_bytes_peak", "gauge", "The most there were.", "", (double)s.group.kv_bytes_peak);
    dt_metric_add(text, "conversations", "gauge", "Conversations by state.", "{state=\"active\"}", (double)c.n_active);
    dt_metric_add(text, "conversations", "", NULL, "{state=\"idle\"}", (double)c.n_idle);
    dt_metric_add(text, "conversations", "", NULL, "{state=\"disk\"}", (double)c.n_on_disk);
    dt_metric_add(text, "conversation_starts_total", "counter", "How prompts began.", "{from=\"extended\"}", (double)c.n_extended);
    dt_metric_add(text, "conversation_starts_total", "", NULL, "{from=\"forked\"}", (double)c.n_forked);
    dt_metric_add(text, "conversation_starts_total", "", NULL, "{from=\"disk\"}", (double)c.n_loaded);
    dt_metric_add(text, "conversation_starts_total", "", NULL, "{from=\"nothing\"}", (double)c.n_new);
    dt_metric_add(text, "conversations_saved_total", "counter", "Idle conversations put on disk.", "", (double)c.n_saved);
    dt_metric_add(text, "conversations_dropped_total", "counter", "Idle conversations given up.", "", (double)c.n_dropped);
    dt_metric_add_histogram(text, "wait_seconds", "Time in the queue.", &s.wait);
    dt_metric_add_histogram(text, "first_token_seconds", "From arrival to the first token.", &s.first_token);
    dt_metric_add_histogram(text, "token_seconds", "Between the tokens of a reply.", &s.token);
    dt_metric_add_histogram(text, "request_seconds", "From arrival to the last token.", &s.job);
}

/* ---- streams ------------------------------------------------------------------------------------ */

struct dt_stream {
    const dt_api *api;
    const dt_request *request;
    progress *sent; /* [n_jobs][n_choices] */
    int64_t *n_tlc; /* [n_jobs] */
};

dt_stream *dt_stream_new(const dt_api *api, const dt_request *request) {
    dt_stream *stream = calloc(1, sizeof *stream);
    if (stream != NULL) {
        stream->api = api;
        stream->request = request;
        stream->sent = calloc(request->n_jobs * (size_t)request->jobs[0]->n_choices, sizeof *stream->sent);
        stream->n_tlc = calloc(request->n_jobs, sizeof *stream->n_tlc);
    }
    if (stream != NULL && (stream->sent == NULL || stream->n_tlc == NULL)) {
        dt_stream_free(stream);
        stream = NULL;
    }
    return stream;
}

void dt_stream_free(dt_stream *stream) {
    if (stream != NULL) {
        free(stream->sent);
        free(stream->n_tlc);
        free(stream);
    }
}

static void add_event(dt_text *out, json_t *json) {
    char *text = dump(json);
    if (text == NULL) {
        out->out_of_memory = true;
        return;
    }
    dt_text_add(out, "data: %s\n\n", text);
    free(text);
}

static void add_chunk(const dt_stream *stream, dt_text *out, json_t *choice) {
    json_t *json = head(stream->api, stream->request, true);
    dt_json_set(&json, "choices", json_pack("[o]", choice));
    if (stream->request->include_usage) {
        dt_json_set(&json, "usage", json_null());
    }
    add_event(out, json);
}

/* The last one. */
static void add_usage(const dt_stream *stream, dt_text *out) {
    json_t *json = head(stream->api, stream->request, true);
    dt_json_set(&json, "choices", json_array());
    dt_json_set(&json, "usage", usage_json(stream->request));
    add_eviction(&json, stream->request);
    add_event(out, json);
}

static void add_chat_delta(const dt_stream *stream, dt_text *out, const dt_job *job, const delta *d, int index, progress *sent) {
    if (!sent->begun) {
        add_chunk(stream, out,
                  json_pack("{s:i,s:{s:s,s:s},s:n,s:n}", "index", index, "delta", "role", "assistant", "content", "", "logprobs",
                            "finish_reason"));
        sent->begun = true;
    }
    if (d->n_text > 0 || d->n_records > 0) {
        add_chunk(stream, out,
                  json_pack("{s:i,s:{s:o},s:o,s:n}", "index", index, "delta", "content", dt_json_bytes(d->text, d->n_text),
                            "logprobs", job->logprobs ? chat_logprobs(stream->api, job, d) : json_null(), "finish_reason"));
    }
    if (d->finish != DT_FINISH_NONE && d->finish != DT_FINISH_ERROR) {
        add_chunk(stream, out,
                  json_pack("{s:i,s:{},s:n,s:o}", "index", index, "delta", "logprobs", "finish_reason", finish_json(d->finish)));
    }
}

static void add_completion_delta(const dt_stream *stream, dt_text *out, const dt_job *job, const delta *d, int index,
                                 progress *sent) {
    if (d->finish == DT_FINISH_ERROR || d->waits || (d->n_text == 0 && d->n_records == 0 && d->finish == DT_FINISH_NONE)) {
        return;
    }
    add_chunk(stream, out, completion_choice(stream->api, stream->request, job, d, index, sent));
    sent->begun = true;
}

/* What is new of one choice. True: there will be no more. */
static bool add_choice(dt_stream *stream, dt_text *out, dt_job *job, int32_t c, int index, progress *sent) {
    delta d;
    if (sent->finished) {
        return true;
    }
    pthread_mutex_lock(&job->lock);
    const bool taken = take_delta(job, c, sent, stream->request->kind == DT_API_COMPLETION, &d);
    pthread_mutex_unlock(&job->lock);
    if (!taken) {
        out->out_of_memory = true;
        return false;
    }
    (stream->request->kind == DT_API_CHAT ? add_chat_delta : add_completion_delta)(stream, out, job, &d, index, sent);
    sent->n_text += d.n_text;
    sent->n_records += d.n_records;
    sent->finished = d.finish != DT_FINISH_NONE;
    free_delta(&d);
    return sent->finished;
}

/* shown: the text of all choices, to its end. The last state of the cache counts all of it, and comes behind it. */
static void add_tlc(dt_stream *stream, dt_text *out, dt_job *job, size_t i, bool shown) {
    char *text = NULL;
    pthread_mutex_lock(&job->lock);
    if (job->n_tlc > stream->n_tlc[i] && (shown || !job->tlc_ended)) {
        stream->n_tlc[i] = job->n_tlc;
        text = strdup(job->tlc_json);
    }
    pthread_mutex_unlock(&job->lock);
    if (text != NULL) {
        dt_text_add(out, "event: tlc\ndata: %s\n\n", text);
        free(text);
    }
}

/* Nothing of a job is shown before it runs: until then it may still be refused as a whole. */
static dt_job_state state_of(dt_job *job) {
    pthread_mutex_lock(&job->lock);
    const dt_job_state state = job->state;
    pthread_mutex_unlock(&job->lock);
    return state;
}

bool dt_stream_next(dt_stream *stream, dt_text *out) {
    const dt_request *request = stream->request;
    bool all = true;
    int index = 0;
    for (size_t i = 0; i < request->n_jobs; i++) {
        dt_job *job = request->jobs[i];
        const dt_job_state state = state_of(job); /* before the rest: a job that is done has nothing new after this look */
        if (state == DT_JOB_WAITING) {
            index += job->n_choices;
            all = false;
            continue;
        }
        bool shown = true;
        for (int32_t c = 0; c < job->n_choices; c++, index++) {
            shown = add_choice(stream, out, job, c, index, &stream->sent[index]) && shown;
        }
        if (request->tlc) {
            add_tlc(stream, out, job, i, shown);
        }
        all = all && state == DT_JOB_DONE;
    }
    if (!all) {
        return false;
    }
    const dt_error *error = dt_request_error(request);
    if (error != NULL) {
        char *text = dt_api_error(dt_api_status_of(error), error->message);
        dt_text_add(out, "data: %s\n\n", text != NULL ? text : "{}");
        free(text);
        return true;
    }
    if (request->include_usage) {
        add_usage(stream, out);
    }
    dt_text_add(out, "data: [DONE]\n\n");
    return true;
}
