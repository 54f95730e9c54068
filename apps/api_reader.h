/*
 * Reading a body field by field: what api_read.c (prompts, the whole), api_settings.c (how to go on from them), api_fields.c
 * (single values) and api_write.c (which answers some bodies at once) share.
 *
 * Invariant: the first thing that is wrong is the one that is told; after it nothing more is read. All functions that return bool
 * return false then, with the status and the sentence set.
 */
#ifndef DT_APPS_API_READER_H
#define DT_APPS_API_READER_H

#include "api.h"

#include <jansson.h>

typedef struct dt_reader {
    const dt_api *api;
    dt_request *request;
    const json_t *body;
    int status; /* 200 while nothing was wrong */
    dt_error *error;
} dt_reader;

/* ---- api_read.c ---- */
/* A body, to be released with json_decref. NULL: refused. */
json_t *dt_reader_parse(dt_reader *r, const char *body, size_t n);

/* ---- api_fields.c ---- */
/* Always false. status: of HTTP. */
bool dt_reader_refuse(dt_reader *r, int status, const char *format, ...) __attribute__((format(printf, 3, 4)));
bool dt_reader_no_memory(dt_reader *r);
/* With the error that the library has set. */
bool dt_reader_refuse_library(dt_reader *r);
/* The field, or NULL where it is missing or null. */
const json_t *dt_reader_field(const json_t *object, const char *name);
/* Each leaves *out alone where the field is missing. */
bool dt_reader_number(dt_reader *r, const char *name, double minimum, double maximum, float *out);
bool dt_reader_whole(dt_reader *r, const json_t *object, const char *name, int64_t minimum, int64_t maximum, int64_t *out);
bool dt_reader_bool(dt_reader *r, const json_t *object, const char *name, bool *out);

/* ---- api_settings.c ---- */
typedef struct dt_constraints {
    char *grammar, *json_schema; /* NULL where not given; free() */
} dt_constraints;

/* Fields of the whole request: refuses those that can't be followed, takes what says how to sample. */
bool dt_reader_refuse_unsupported(dt_reader *r);
bool dt_reader_model(dt_reader *r);
bool dt_reader_constraints(dt_reader *r, dt_constraints *out);
bool dt_reader_sampling(dt_reader *r, dt_sampler_params *out);
/* Whether grammar or schema are short enough for all replies: each has a sampler, which keeps what it has parsed of them. */
bool dt_reader_constraint_fits(dt_reader *r, const dt_sampler_params *sampling, size_t n_prompts);
/* How the job goes on from its prompt, whose tokens it holds: length, stops, logprobs, eviction, and a sampler per reply. */
bool dt_reader_settings(dt_reader *r, dt_job *job, const dt_sampler_params *sampling);

#endif
