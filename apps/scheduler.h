/*
 * The scheduler: one thread that owns all sessions and computes for all requests at once (continuous batching; Yu et al., Orca,
 * 2022). Other threads give it jobs and read what came of them.
 *
 * Invariants: jobs start in the order they came; each step brings every running reply one token and at most one chunk of prompt,
 * always of the same size, so that what others do changes no eviction; a cancelled job costs at most the step that is being
 * computed; the queue is bounded, and jobs are taken all together or not at all.
 */
#ifndef DT_APPS_SCHEDULER_H
#define DT_APPS_SCHEDULER_H

#include "conversations.h"
#include "metrics.h"

typedef struct dt_scheduler dt_scheduler;

typedef struct dt_scheduler_params {
    const dt_model *model;
    dt_session_params session; /* without group and eviction; kv_memory is the ceiling of all caches together, not 0 */
    int32_t n_parallel;        /* replies computed at once */
    int32_t n_queue;           /* jobs that may wait */
    const char *folder;        /* for idle conversations, NULL = none */
    uint64_t disk_bytes;
    int32_t n_idle_max;
} dt_scheduler_params;

dt_status dt_scheduler_new(const dt_scheduler_params *params, dt_scheduler **out, dt_error *error);
/* Takes no more jobs; cancels what waits, and after grace_ms what runs; returns when all are done. */
void dt_scheduler_stop(dt_scheduler *scheduler, int64_t grace_ms);
/* Stopped before. Saves idle conversations where there is a folder. NULL is accepted. */
void dt_scheduler_free(dt_scheduler *scheduler);
dt_conversations *dt_scheduler_conversations(dt_scheduler *scheduler);

typedef enum dt_submitted { DT_SUBMITTED, DT_SUBMIT_FULL, DT_SUBMIT_STOPPING } dt_submitted;
/* The jobs stay the caller's, who must not free them before they are done. */
dt_submitted dt_scheduler_submit(dt_scheduler *scheduler, dt_job *const *jobs, size_t n);
/* The job will be done soon, with DT_ERR_CANCELLED where it wasn't done already. */
void dt_scheduler_cancel(dt_scheduler *scheduler, dt_job *job);
/* For Retry-After: when the queue is likely to have room. */
int32_t dt_scheduler_seconds_to_wait(dt_scheduler *scheduler);

typedef struct dt_scheduler_stats {
    int64_t n_waiting, n_running;                     /* jobs; replies */
    int64_t n_done, n_failed, n_cancelled, n_refused; /* jobs; refused: not let into the queue */
    int64_t prompt_tokens, computed_tokens, generated_tokens, steps;
    int64_t eviction_rounds, evicted_tokens;
    dt_group_stats group;
    dt_histogram wait, first_token, token, job; /* seconds */
} dt_scheduler_stats;

void dt_scheduler_get_stats(dt_scheduler *scheduler, dt_scheduler_stats *out);

#endif
