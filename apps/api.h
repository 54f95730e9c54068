/*
 * OpenAI's API as data: JSON bodies to jobs, and what came of jobs to JSON. Used by the server and by batch jobs; knows no HTTP but
 * its status codes.
 *
 * Invariants: a body is accepted whole or refused with a sentence that names the field; what can't be done is refused, what is
 * unknown is ignored, as OpenAI's own servers do; JSON that goes out is valid UTF-8 whatever the model said; streamed pieces put
 * together are the text that would have come at once.
 */
#ifndef DT_APPS_API_H
#define DT_APPS_API_H

#include "options.h"
#include "scheduler.h"

typedef struct dt_api { /* what there is to serve; not changed while it is served */
    const dt_model *model;
    dt_scheduler *scheduler;
    const char *name; /* of the model, in answers; UTF-8, which a file's name need not be */
    const char *path;
    const char *chat_template; /* NULL: the model's own */
    dt_sampler_params sampling;
    int64_t max_tokens;          /* of a reply, where the request doesn't say */
    int32_t n_choices_max;       /* replies to one prompt */
    size_t n_prompts_max;        /* prompts in one request */
    const dt_eviction *eviction; /* NULL: off */
    const char *eviction_key;
    bool eviction_override; /* a request may ask for other settings */
    bool keep;              /* conversations may go on */
    const char *kv_type, *prefill;
    int32_t n_ctx;
    bool has_key;
} dt_api;

typedef enum dt_api_kind { DT_API_CHAT, DT_API_COMPLETION } dt_api_kind;

typedef struct dt_request {
    dt_api_kind kind;
    dt_job **jobs; /* [n_jobs] one per prompt */
    size_t n_jobs;
    bool stream, include_usage, echo, tlc;
    char id[48];
    int64_t created; /* Unix time */
} dt_request;

/* How a model is named in answers: its file's name without folder and ending. free(). NULL: out of memory. */
char *dt_api_model_name(const char *path);
/* Is it the name of the one there is, or its file's? */
bool dt_api_is_model(const dt_api *api, const char *name);
/* What the key of default settings is: dt_api.eviction_key. free(). NULL: out of memory. */
char *dt_api_eviction_key(const dt_eviction *eviction, const char *extra);
/* Whether what requests get where they don't say it works: sampling (its grammar) and the chat template that was named.
 * DT_ERR_ARGUMENT with what is wrong. */
dt_status dt_api_check(const dt_api *api, dt_error *error);
/* body[n]: JSON. On failure the status code of HTTP that fits, else 200; *out is then to be freed. */
int dt_api_read(const dt_api *api, dt_api_kind kind, const char *body, size_t n, dt_request *out, dt_error *error);
/* The same from JSON that was parsed already (jansson's json_t). */
int dt_api_read_json(const dt_api *api, dt_api_kind kind, const void *json, dt_request *out, dt_error *error);
/* The jobs must be done. */
void dt_request_free(dt_request *request);
/* Status code for an error of the library. */
int dt_api_status_of(const dt_error *error);
/* The error of the first job that failed, or NULL. All jobs are done. */
const dt_error *dt_request_error(const dt_request *request);

/* ---- answers; free() what is returned; NULL: out of memory ---- */

/* All jobs are done and well. */
char *dt_api_answer(const dt_api *api, const dt_request *request);
char *dt_api_error(int status, const char *message);
char *dt_api_models(const dt_api *api);
char *dt_api_props(const dt_api *api);
/* Tokens of body's "content". *out_status: 200 or another code, the answer then says why. */
char *dt_api_tokenize(const dt_api *api, const char *body, size_t n, int *out_status);
char *dt_api_tokenizer_info(const dt_api *api);
char *dt_api_detokenize(const dt_api *api, const char *body, size_t n, int *out_status);
void dt_api_metrics(const dt_api *api, dt_text *text);

/* ---- streams ---- */

typedef struct dt_stream dt_stream;
dt_stream *dt_stream_new(const dt_api *api, const dt_request *request);
void dt_stream_free(dt_stream *stream);
/* Adds what is new as server-sent events, perhaps nothing. True: that was the end. */
bool dt_stream_next(dt_stream *stream, dt_text *out);

#endif
