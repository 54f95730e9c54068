/*
 * What conversations.c (finding, sharing, memory) and conversations_disk.c (files) share.
 */
#ifndef DT_APPS_CONVERSATIONS_INTERNAL_H
#define DT_APPS_CONVERSATIONS_INTERNAL_H

#include "conversations.h"
#include "fail.h"

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
    bool awaited;     /* since last_used a request waits that continues it */
    bool held;        /* what is going on needs the entry: it stays, and so do its files */
    bool unreadable;  /* its file is there, but is none for these settings, or couldn't be read: it stays and is not tried again */
    bool saving;      /* the thread that writes ahead reads its session and its texts: nobody else touches them or its files */
    bool not_savable; /* its file couldn't be written as it is now; not tried again ahead of need */
    bool shares;      /* blocks with another session: what is written into those is copied first */
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
    bool told_full;     /* that the disk has no room for more */
    char identity[256]; /* of the model: token ids mean nothing with another */
    pthread_mutex_t lock;
    dt_conversation **list; /* [n] in no order */
    size_t n, capacity;
    uint64_t next_id;
    int64_t clock; /* counts uses */
    dt_conversations_stats stats;
    /* the thread that writes idle conversations ahead of need */
    pthread_t saver;
    pthread_cond_t saver_news, saved; /* something may be to save; something was */
    bool has_saver, saver_stops;
    uint64_t kv_bytes; /* of all caches, when one was last kept: the group's own number belongs to the scheduler's thread */
};

/* All of this with the lock held. ---- conversations.c ---- */
/* A new entry; NULL when memory is short. key is copied. */
dt_conversation *dt_conversations_add(dt_conversations *all, const char *key);
/* Frees the session and the entry, its files excepted. */
void dt_conversations_remove(dt_conversations *all, dt_conversation *c);
/* The idle conversation in memory that leaves it next, or NULL; those that are held or pinned stay. unsaved_only: of those whose file
 * lacks something and can be written. */
dt_conversation *dt_conversations_next_to_go(const dt_conversations *all, bool unsaved_only);

/* ---- conversations_disk.c ---- */
/* Creates and locks the folder, and lists what lies there. */
dt_status dt_conversations_open_folder(dt_conversations *all, dt_error *error);
/* Writes an idle conversation out, if its file is not up to date, and makes the folder keep its limit; what the saver is writing is
 * waited for. False: it couldn't be. */
bool dt_conversations_save(dt_conversations *all, dt_conversation *c);
/* Puts what the file holds into `session`. */
dt_status dt_conversations_load(dt_conversations *all, dt_conversation *c, dt_session *session, dt_error *error);
void dt_conversations_delete_files(dt_conversations *all, dt_conversation *c);
/* Waits, with the lock released, while the saver has this one. */
void dt_conversations_wait_saved(dt_conversations *all, const dt_conversation *c);
bool dt_conversations_is_saved(const dt_conversation *c);
/* A thread that writes the least recently used ones before their memory is needed, so that making room is quick. */
dt_status dt_conversations_start_saver(dt_conversations *all, dt_error *error);
/* Without the lock. */
void dt_conversations_stop_saver(dt_conversations *all);

#endif
