/*
 * The caches of conversations between requests: one-time caching across requests, in memory, then on disk.
 *
 * A request states its whole conversation. What of it is cached already is found twice. As text: a reply that comes back as text
 * gets the very tokens it was generated with, since tokenizing it anew may cut it differently. Then as tokens: the session that
 * shares the longest beginning is extended, or forked where the request leaves it before its end or another request is using it.
 *
 * Invariants: a session is touched by the scheduler's thread only, what is looked up as text by any thread under the lock. The
 * bytes of all caches together with what was promised to running requests never pass the ceiling: idle conversations leave memory
 * first, least recently used first. A file is whole or not there, and its index, beside it, is checked against it when it is
 * loaded.
 */
#ifndef DT_APPS_CONVERSATIONS_H
#define DT_APPS_CONVERSATIONS_H

#include "job.h"

typedef struct dt_conversations dt_conversations;

typedef struct dt_conversations_params {
    const dt_model *model;
    dt_group *group;
    dt_session_params session; /* of that group; eviction is set for each session */
    uint64_t memory_bytes;     /* ceiling of all caches together */
    const char *folder;        /* where idle conversations go; NULL: they are dropped instead */
    uint64_t disk_bytes;       /* most that the folder takes */
    int32_t n_idle_max;        /* idle conversations in memory, at most */
} dt_conversations_params;

/* Finds those that an earlier process left in the folder. */
dt_status dt_conversations_new(const dt_conversations_params *params, dt_conversations **out, dt_error *error);
/* save: idle ones go to disk first, where there is a folder. */
void dt_conversations_free(dt_conversations *all, bool save);

/* Any thread. Tokens of text[n]: those of the conversation that it continues, then what is new. *out_tokens: dt_free; *out_anchors:
 * free. add_special: the text is the whole of a prompt, so that it begins with the start token. */
dt_status dt_conversations_tokenize(dt_conversations *all, const char *text, size_t n, bool add_special, int32_t **out_tokens,
                                    size_t *out_n, dt_anchor **out_anchors, size_t *out_n_anchors, dt_error *error);

/* The scheduler's thread only, from here on. A conversation in use belongs to who took it until it is kept or dropped. */
typedef struct dt_conversation dt_conversation;
dt_session *dt_conversation_session(const dt_conversation *conversation);
/* A conversation for job->tokens; its session holds what could be reused, *result says how much. NULL in *out with DT_OK: not now,
 * for n_choices replies would pass the ceiling while others are running; DT_ERR_LIMIT where it never fits. */
dt_status dt_conversations_take(dt_conversations *all, const dt_job *job, dt_conversation **out, dt_sync_result *result,
                                dt_error *error);
/* One more reply from where `from` stands. Its memory was promised by take. */
dt_status dt_conversations_fork(dt_conversations *all, dt_conversation *from, const dt_job *job, dt_conversation **out,
                                dt_error *error);
/* After steps: notices the cache's bytes, and rounds, before which there is no going back. */
void dt_conversations_note_step(dt_conversations *all, dt_conversation *conversation);
/* Puts the least recently used idle conversation away. False: there is none. */
bool dt_conversations_give_room(dt_conversations *all);
/* The request is over: the conversation is idle until one continues it. choice: the reply, whose end the session may lack. */
void dt_conversations_keep(dt_conversations *all, dt_conversation *conversation, const dt_job *job, const dt_choice *choice);
void dt_conversations_drop(dt_conversations *all, dt_conversation *conversation);

typedef struct dt_conversations_stats {
    int64_t n_active, n_idle, n_on_disk;           /* conversations */
    uint64_t active_bytes, idle_bytes, disk_bytes; /* KV bytes, what forks share counted in each; file bytes */
    int64_t reused_tokens, prompt_tokens;          /* summed over requests */
    int64_t n_extended, n_forked, n_loaded, n_new, n_saved, n_dropped;
} dt_conversations_stats;

/* Any thread. */
void dt_conversations_get_stats(dt_conversations *all, dt_conversations_stats *out);

#endif
