/*
 * A reply in the making: what happens to it after each step. Between scheduler.c, which decides what is computed, and job.h, where
 * what came of it is read. All of this belongs to the scheduler's thread.
 */
#ifndef DT_APPS_SEQUENCE_H
#define DT_APPS_SEQUENCE_H

#include "scheduler.h"

typedef struct dt_sequence { /* a reply in the making */
    dt_job *job;
    int32_t choice;
    dt_conversation *conversation;
    dt_session *session;
    size_t n_read; /* tokens of the prompt in the session */
    bool follows;  /* it forks off the job's first reply once the prompt is read */
    int32_t token; /* sampled, not computed yet */
    int32_t n_batch, n_ctx;
    int64_t n_rounds, n_evicted, n_lacking; /* already counted */
    int64_t last_tlc_us, tlc_rounds;
    bool over;
} dt_sequence;

struct dt_scheduler {
    dt_scheduler_params params;
    dt_conversations *conversations;
    dt_group *group;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    /* under lock */
    dt_job *first, *last; /* waiting */
    bool stopping, cancel_all;
    dt_scheduler_stats stats;
    double mean_job_seconds;
    /* the thread's own */
    dt_sequence *active; /* [n_active] of n_parallel, in the order of arrival */
    dt_step *steps;      /* [n_parallel] */
    size_t *stepped;     /* [n_parallel] which of the active */
    int32_t n_active;
    bool blocked; /* the first waiting job needs memory that only the end of a running one gives */
};

int64_t dt_now_us(void); /* monotonic */
/* The job is over, well or not: counts it and wakes whoever waits. */
void dt_sequence_job_is_over(dt_scheduler *s, dt_job *job, const dt_error *error);
/* All replies of a job end with this error. What was computed for one that was cancelled is kept, since the client may ask again.
 */
void dt_sequence_fail_job(dt_scheduler *s, dt_job *job, const dt_error *error);
void dt_sequence_remove_ended(dt_scheduler *s);
/* After a step that took `seconds`: n_read tokens of the prompt are in the session, and perhaps some of the reply. Samples. */
void dt_sequence_after_step(dt_scheduler *s, dt_sequence *q, double seconds);
/* Reads one more piece of a prompt whose tokens' probabilities are asked for. */
dt_status dt_sequence_score_piece(dt_scheduler *s, dt_sequence *q, dt_error *error);

#endif
