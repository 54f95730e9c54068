/*
 * A job: a prompt, how to go on from it, and what came of it so far. The unit that the scheduler works on; a request of a client is
 * one job or, with several prompts, several.
 *
 * Invariants: what is asked for does not change once the job is submitted. What came of it is written by the scheduler's thread and
 * read by others under `lock`; text only grows, and nothing at or past n_safe is shown before the choice has finished, so that a
 * stop string never leaks and a character is never cut.
 */
#ifndef DT_APPS_JOB_H
#define DT_APPS_JOB_H

#include "deeptutor.h"
#include "utf8.h"

#include <pthread.h>
#include <stdatomic.h>

#define DT_JOB_TOP_MAX 20     /* alternatives per token */
#define DT_JOB_CHOICES_MAX 16 /* replies to one prompt */
#define DT_JOB_STOPS_MAX 16

/* The beginning of a text whose tokens are known to be those of a conversation: text[0, n_text) is tokens[0, n_tokens). */
typedef struct dt_anchor {
    size_t n_text, n_tokens;
} dt_anchor;

typedef enum dt_finish { DT_FINISH_NONE, DT_FINISH_STOP, DT_FINISH_LENGTH, DT_FINISH_ERROR } dt_finish;
typedef enum dt_job_state { DT_JOB_WAITING, DT_JOB_RUNNING, DT_JOB_DONE } dt_job_state;

typedef struct dt_top {
    int32_t token;
    float logprob;
} dt_top;

typedef struct dt_record { /* a token of the prompt or of a reply */
    int32_t token;
    float logprob;   /* NaN: there is none */
    size_t text_end; /* where its bytes end in the text */
} dt_record;

typedef struct dt_choice {
    dt_sampler *sampler;
    char *text; /* [n_text] bytes as generated, not terminated */
    size_t n_text, n_safe, text_capacity;
    dt_record *records; /* [n_records], an end token included */
    dt_top *tops;       /* [n_records][job->n_top], likeliest first */
    size_t n_records, record_capacity;
    bool ended; /* by an end token */
    dt_finish finish;
} dt_choice;

typedef struct dt_job {
    /* what is asked for */
    int32_t *tokens; /* [n_tokens] the prompt */
    size_t n_tokens;
    char *text; /* [n_text] the prompt as text, where it was one; for finding the conversation again */
    size_t n_text;
    dt_anchor *anchors; /* [n_anchors] of that text */
    size_t n_anchors;
    dt_choice choices[DT_JOB_CHOICES_MAX];
    int32_t n_choices;
    int64_t max_tokens;
    char *stops[DT_JOB_STOPS_MAX];
    size_t n_stops;
    const dt_eviction *eviction; /* NULL: nothing is evicted */
    char *eviction_key;          /* the same for the same settings */
    bool own_eviction;           /* eviction is freed with the job */
    bool logprobs;               /* of the replies */
    int32_t n_top;
    bool score; /* logprobs of the prompt as well */
    bool tlc;
    bool keep;                /* the conversation may go on: keep its cache */
    bool pin;                 /* others will begin with this prompt: its cache is never extended, and the last to leave memory */
    void (*wake)(void *user); /* something came of it; called by the scheduler's thread, must not take the lock */
    void *wake_user;

    /* what came of it, under lock */
    pthread_mutex_t lock;
    dt_job_state state;
    bool tlc_ended; /* tlc_json is the last one */
    dt_error error; /* code DT_OK while nothing failed */
    dt_record *prompt_records;
    dt_top *prompt_tops; /* [n_tokens][n_top] */
    size_t n_prompt_records;
    int64_t reused_tokens, evicted_tokens;
    char *tlc_json; /* the newest */
    int64_t n_tlc;

    /* the scheduler's own */
    atomic_bool cancelled;
    int64_t submitted_us, admitted_us, first_token_us, read_us; /* read_us: spent on reading the prompt */
    double decode_ms;
    struct dt_job *next;
} dt_job;

/* A job with nothing in it. NULL when memory is short. */
dt_job *dt_job_new(void);
/* Not while the scheduler has it. NULL is accepted. */
void dt_job_free(dt_job *job);

/* The scheduler's side. Each takes the lock; false: out of memory. */
/* Adds a token to a reply. logits[n_vocab] are those it was drawn from; NULL where no logprobs are wanted. Finds stop strings:
 * then, or when max_tokens are reached, the choice is finished. */
bool dt_job_add_token(dt_job *job, int32_t choice, const dt_model *model, int32_t token, const float *logits);
/* Adds the record of prompt token i, drawn from logits (NULL: the first one). */
bool dt_job_add_prompt_record(dt_job *job, const dt_model *model, size_t i, const float *logits);
void dt_job_finish_choice(dt_job *job, int32_t choice, dt_finish finish);
/* The whole job is over; wakes whoever waits. error NULL: it went well. */
void dt_job_finish(dt_job *job, const dt_error *error);

/* A text after which `reply` continues, white space around it aside: where it ends in text[n]; SIZE_MAX where it isn't at the
 * front. */
size_t dt_after_reply(const char *text, size_t n, const char *reply, size_t n_reply);

#endif
