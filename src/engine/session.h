/*
 * The insides of a session, for the files of engine/ that make, grow and store one.
 */
#ifndef DT_ENGINE_SESSION_H
#define DT_ENGINE_SESSION_H

#include "engine/group.h"
#include "engine/eviction_config.h"
#include "engine/kv_plan.h"

/* Tokens that are rather computed again than left with the scores of a text that was taken back. */
#define DT_REPLAYED_TOKENS 64
/* Tokens that reconstruct repeats at a time, at most. */
#define DT_REPEAT_CHUNK 512

/* A cache's memory, counted together with that of its forks. */
typedef struct dt_shared_memory {
    dt_memory memory;
    atomic_int references;
} dt_shared_memory;

#define DT_MAX_SNAPSHOTS 16

/* A state of the session that it can go back to (snapshot.c). */
typedef struct dt_snapshot {
    dt_kv *kv;
    float *logits; /* [V] */
    int32_t n_tokens, whole_from, peaks_until;
} dt_snapshot;

struct dt_session {
    const dt_model *model;
    dt_session_params params; /* with defaults filled in */
    dt_group *group;
    dt_shared_memory *kv_memory;
    dt_memory work_memory;
    dt_kv *kv;
    int32_t *tokens; /* [token_capacity], grows */
    int32_t n_tokens, token_capacity;
    int32_t max_tokens;  /* longest conversation */
    int32_t headroom;    /* > 0: the conversation may pass the context; positions that closing up leaves free */
    int32_t free_after;  /* of them, those that are free after every step: for the repetition before a round */
    int32_t chunk;       /* of them: for a step */
    bool streams;        /* the text that is being read is evicted from chunk by chunk */
    int32_t whole_from;  /* a rewind to at least this position is possible */
    bool evicted_once;   /* DT_EVICT_ONCE has had its turn */
    int32_t peaks_until; /* tokens before that have been repeated (reconstruct), or foretold (predict) */
    const float *logits; /* after the last token; NULL when not computed */
    float *own_logits; /* [V] where they are not the graph's: in a shared group, of a fork, a loaded session, after a repetition */
    dt_snapshot snapshots[DT_MAX_SNAPSHOTS]; /* [n_snapshots], oldest and shortest first */
    int32_t n_snapshots;
    uint64_t kv_most; /* what the cache was said to take at most */
    dt_kv_asked asked;
    void *note; /* the application's, saved with the session */
    size_t note_bytes;
    dt_score_weights *weights; /* that the budgets refer to, or NULL */
    bool *observe_layer;       /* [L] */
    const float *draft_logits; /* [n_draft][V] while tokens are drafted */
    int32_t n_draft;           /* uncommitted tokens; 0 between calls from outside */
    bool is_draft;             /* it serves another session's drafts: its rewinds are no news */
    int64_t n_to_come;         /* tokens of a prompt that the last step left to later ones */
    int64_t last_step;         /* the group's n_calls when it was last in a step */
    dt_session_stats stats;
    /* the sync in progress */
    dt_progress_fn progress;
    void *progress_user;
    int64_t progress_done, progress_total, progress_last_us;
};

/* Sets max_tokens anew after the cache was exchanged or emptied. */
void dt_session_set_limit(dt_session *session);
/* Whether a conversation under budgets[n_layers] goes on beyond n_ctx. */
bool dt_session_passes_context(const dt_session *session, const dt_budget *budgets);
/* DT_ERR_ARGUMENT inside a function of the caller's (dt_group_is_asking). */
dt_status dt_session_check_idle(const dt_session *session, dt_error *error);
/* By how much positions in the cache are behind indices in the conversation, and that of the next token. */
int32_t dt_session_shift(const dt_session *session);
int32_t dt_session_next_position(const dt_session *session);
/* After a failure: true when a snapshot made room and it is worth another try; *error (may be NULL) tells of none then. */
bool dt_session_makes_room(dt_session *session, dt_status status, dt_error *error);
/* Adds n uncommitted entries to the cache. */
dt_status dt_session_grow(dt_session *session, int32_t n, dt_error *error);
/* How n more tokens will be read: as was asked for, or, where the context has no room for all of them at once, evicted from chunk
 * by chunk (streams). */
dt_status dt_session_begin_reading(dt_session *session, int64_t n, dt_error *error);
/* Drops what sliding windows have passed, after tokens were committed. */
dt_status dt_session_slide(dt_session *session, dt_error *error);
/* Makes room for n more positions in the context, where the conversation may pass it: what was kept moves together. */
dt_status dt_session_close_up(dt_session *session, int64_t n, dt_error *error);
/* Room for n_more tokens behind the ones there are. */
dt_status dt_session_reserve_tokens(dt_session *session, int32_t n_more, dt_error *error);
/* DT_ERR_LIMIT when n_more tokens would not fit into the context. */
dt_status dt_session_check_room(const dt_session *session, int64_t n_more, dt_error *error);
/* Logits [V] that shall stay, copied, become the session's. */
dt_status dt_session_own_logits(dt_session *session, const float *logits, dt_error *error);
/* The graph's logits after the last token become the session's. */
dt_status dt_session_set_logits(dt_session *session, const float *logits, dt_error *error);
/* Chooses the layers whose policy will want the attention of the n tokens to come: those where a round comes within n_follow
 * more. */
bool dt_session_choose_observed(dt_session *session, int32_t n, int64_t n_follow);
/* Whether a round is near once every lane of a layer has grown by n_more. shared_room: dt_kv_shared_room. */
bool dt_session_observes(const dt_session *session, int32_t layer, int64_t n_more, int64_t shared_room);
/* What is due after a step: repetition where scores come from it, then a round. */
dt_status dt_session_evict(dt_session *session, dt_error *error);

/* ---- what scores need (session_scores.c) ---- */

/* Peaks of what was read since the last time, where a round is about to need them. */
dt_status dt_session_make_peaks(dt_session *session, dt_error *error);
/* Where a cache is elsewhere, attention is told once, before a round, in the layers that it will come in, or in all: by the newest
 * queries since the last time. */
dt_status dt_session_observe_elsewhere(dt_session *session, bool all, dt_error *error);
/* How the keys and values of a layer look to score predict. */
dt_predict_shape dt_session_predict_shape(const dt_model *model);

/* ---- snapshots (snapshot.c) ---- */

/* Keeps the session's state to go back to; where that is of no use, or there is no room, it does nothing. */
void dt_snapshot_take(dt_session *session);
/* Gives up the oldest to make room; false when there is none. */
bool dt_snapshot_yield(dt_session *session);
/* Gives up those of more than n_tokens tokens; 0 = all. */
void dt_snapshots_drop(dt_session *session, int32_t n_tokens);
/* Whether one of n_tokens, or of few less, is there: scores are those of its tokens alone, which cutting off what follows can't give. */
bool dt_snapshot_is_near(const dt_session *session, int32_t n_tokens);
/* Makes the session what it was in that snapshot, or else in the longest from which the first n_tokens can be had: it is no longer
 * than that, or can still be rewound to it. Gives up that one and the longer ones. False, with nothing changed, when there is none. */
bool dt_snapshot_restore(dt_session *session, int32_t n_tokens);
/* Whether there is one of exactly n_tokens. */
bool dt_snapshot_at(const dt_session *session, int32_t n_tokens);

/* ---- drafts: several tokens computed at once, of which some may be taken back ----
 * Between dt_session_draft and dt_session_keep nothing else may be called on the session but readers. What is kept leaves the
 * session as appending those tokens one by one would. */

/* Tokens that may be drafted at once: with so many a round, or the drop of what a window
 * has passed, is due after the last one, and never before. At least 1. */
int32_t dt_session_tokens_to_round(const dt_session *session);
/* Computes tokens[n] after the ones there are, uncommitted. *logits: [n][V]. On failure there is nothing to keep. tokens may be the
 * session's own, behind its n_tokens. */
dt_status dt_session_draft(dt_session *session, const int32_t *tokens, int32_t n, const float **logits, dt_error *error);
/* Keeps the first n_keep >= 1 of them and evicts. */
dt_status dt_session_keep(dt_session *session, int32_t n_keep, dt_error *error);

#endif
