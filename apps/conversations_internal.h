/*
 * What conversations.c (finding, sharing, memory) and conversations_disk.c (files) share.
 */
#ifndef DT_APPS_CONVERSATIONS_INTERNAL_H
#define DT_APPS_CONVERSATIONS_INTERNAL_H

#include "conversations.h"

struct dt_conversation {
    uint64_t id;
    char *key; /* of its eviction settings */
    /* The text of the last prompt, and of the reply behind it as the client got it; their tokens, end tokens left out. NULL: no
     * text */
    char *text;
    size_t n_text, n_prompt_text;
    int32_t *tokens;
    size_t n_tokens;
    dt_anchor *anchors; /* of the prompt's text, ascending */
    size_t n_anchors;
    dt_session *session; /* NULL: on disk only */
    size_t n_computed;   /* tokens of the session */
    size_t whole_from;   /* it can go back to here */
    int64_t n_rounds;
    bool in_use, pinned;
    bool shares;             /* blocks with another session: what is written into those is copied first */
    uint64_t promised_bytes; /* while in use: what its cache may come to */
    uint64_t kv_bytes;       /* when it was last idle */
    uint64_t file_bytes;     /* 0: not on disk */
    size_t n_saved;          /* tokens in the file */
    int64_t last_used;
};

struct dt_conversations {
    dt_conversations_params params;
    char *folder;       /* own copy, or NULL */
    int folder_lock;    /* descriptor, -1 = none */
    char identity[256]; /* of the model: token ids mean nothing with another */
    pthread_mutex_t lock;
    dt_conversation **list; /* [n] in no order */
    size_t n, capacity;
    uint64_t next_id;
    int64_t clock; /* counts uses */
    dt_conversations_stats stats;
};

/* All of this with the lock held. ---- conversations.c ---- */
dt_status dt_conversations_fail(dt_error *error, dt_status code, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* A new entry; NULL when memory is short. key is copied. */
dt_conversation *dt_conversations_add(dt_conversations *all, const char *key);
/* Frees the session and the entry, its files excepted. */
void dt_conversations_remove(dt_conversations *all, dt_conversation *c);

/* ---- conversations_disk.c ---- */
/* Creates and locks the folder, and lists what lies there. */
dt_status dt_conversations_open_folder(dt_conversations *all, dt_error *error);
/* Writes an idle conversation out, if its file is not up to date, and makes the folder keep its limit. False: it couldn't be. */
bool dt_conversations_save(dt_conversations *all, dt_conversation *c);
/* Puts what the file holds into `session`. */
dt_status dt_conversations_load(dt_conversations *all, const dt_conversation *c, dt_session *session, dt_error *error);
void dt_conversations_delete_files(dt_conversations *all, dt_conversation *c);

#endif
