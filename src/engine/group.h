/*
 * A group: threads, compute graph and scratch, for one session or for many of the same model.
 *
 * Every session computes through one. A session that was not put into a group has one of its own (is_private), whose logits it
 * reads in place; in a group that is shared each session gets a copy, since the graph's go with the next step.
 *
 * Invariants: used by one thread at a time; a shared group outlives its sessions; buffers only grow, so decoding allocates nothing.
 */
#ifndef DT_ENGINE_GROUP_H
#define DT_ENGINE_GROUP_H

#include "engine/engine.h"

/* One session's part of a step. */
typedef struct dt_part {
    dt_session *session;
    const int32_t *tokens;
    int32_t n, n_outputs; /* tokens, and logits after the last n_outputs >= 1 of them */
    int64_t n_follow;     /* tokens that will follow before the next round */
    dt_status status;     /* out */
    dt_error *error;      /* out; may be NULL */
    const float *logits;  /* out: [n_outputs][V], the graph's until it computes again */
} dt_part;

struct dt_group {
    const dt_model *model;
    const dt_attn_kernel *kernel;
    const char *kernel_name; /* its, or the one that is ggml's operators */
    int32_t most_at_once;    /* sequences of a batch */
    int32_t n_threads, n_threads_batch;
    bool is_private;
    dt_memory kv_memory; /* counts the caches of all sessions of a shared group */
    dt_memory memory;    /* the graph's and that of the arrays below */
    dt_graph *graph;
    _Atomic(const void *) asking; /* the thread that is in a function of the caller's; NULL = none */
    dt_session *syncing;          /* whose progress function is asked while the graph computes; NULL = none */
    dt_part *parts;               /* [capacity] of dt_group_step */
    dt_sequence *sequences;       /* [capacity] of the batch being computed */
    int32_t *part_of;             /* [capacity] whose parts they are */
    size_t capacity;
    int32_t n_sessions;
    int64_t n_steps, n_tokens; /* computed */
    int64_t n_calls;           /* of dt_group_step */
};

/* Around each call of a function of the caller's: what is being computed must not be disturbed from there. Of other threads nothing
 * is known: one may be saving a session that is in no step. */
void dt_group_begin_asking(dt_group *group);
void dt_group_end_asking(dt_group *group);
/* Whether this thread is in one of those calls. */
bool dt_group_is_asking(const dt_group *group);

/* A group for one session alone, with params' threads and kernel. */
dt_status dt_group_new_private(const dt_model *model, const dt_group_params *params, dt_group **out, dt_error *error);

/* Appends every part to its session, in one batch where it can, and folds the attention that was observed into scores. Does not
 * evict. A part that can't be computed doesn't disturb the others; each one's status tells. */
void dt_group_compute(dt_group *group, dt_part *parts, int32_t n_parts);

/* Computes a sequence of the session's, whose kv is filled in here, and leaves it uncommitted; on failure there is nothing to
 * commit. */
dt_status dt_group_compute_one(dt_session *session, dt_sequence *sequence, const float **logits, dt_error *error);

#endif
