/*
 * Conversations in memory: finding, sharing, making room. See conversations.h.
 */
#include "conversations_internal.h"
#include "report.h"
#include "utf8.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define REUSE_MIN 16      /* a shorter beginning is not worth a fork */
#define LOAD_SHARE_MIN 16 /* nor is less than 1/16 of what lies on disk worth reading all of it */
#define ENTRIES_MAX 4096
#define AWAITED_USES 4096 /* so many uses of conversations later, a request that was waiting is gone */

static dt_status no_memory(dt_error *error) { return dt_app_fail(error, DT_ERR_MEMORY, "out of memory for the conversation"); }

/* ---- entries ------------------------------------------------------------------------------------ */

static void free_entry(dt_conversation *c) {
    dt_session_free(c->session);
    free(c->key);
    free(c->text);
    free(c->tokens);
    free(c->anchors);
    free(c);
}

dt_conversation *dt_conversations_add(dt_conversations *all, const char *key) {
    if (all->n == all->capacity) {
        const size_t capacity = 2 * all->capacity + 16;
        dt_conversation **grown = realloc(all->list, capacity * sizeof(dt_conversation *));
        if (grown == NULL) {
            return NULL;
        }
        all->list = grown;
        all->capacity = capacity;
    }
    dt_conversation *c = calloc(1, sizeof *c);
    char *copy = malloc(strlen(key) + 1);
    if (c == NULL || copy == NULL) {
        free(c);
        free(copy);
        return NULL;
    }
    memcpy(copy, key, strlen(key) + 1);
    c->key = copy;
    c->id = all->next_id++;
    c->last_used = ++all->clock;
    all->list[all->n++] = c;
    return c;
}

void dt_conversations_remove(dt_conversations *all, dt_conversation *c) {
    for (size_t i = 0; i < all->n; i++) {
        if (all->list[i] == c) {
            all->list[i] = all->list[--all->n];
            break;
        }
    }
    free_entry(c);
}

dt_status dt_conversations_new(const dt_conversations_params *params, dt_conversations **out, dt_error *error) {
    dt_conversations *all = calloc(1, sizeof *all);
    if (all == NULL || pthread_mutex_init(&all->lock, NULL) != 0) {
        free(all);
        return no_memory(error);
    }
    pthread_cond_init(&all->saver_news, NULL);
    pthread_cond_init(&all->saved, NULL);
    all->params = *params;
    all->folder_lock = -1;
    const dt_model_info *info = dt_model_get_info(params->model);
    size_t n_name = 0;
    char *name = dt_repair_utf8(info->name, dt_whole_characters(info->name, strnlen(info->name, 60)), &n_name); /* for JSON */
    if (name == NULL) {
        dt_conversations_free(all, false);
        return no_memory(error);
    }
    snprintf(all->identity, sizeof all->identity, "%s %s %s %d %llu %llu", info->architecture, name, info->weight_type,
             (int)info->n_vocab, (unsigned long long)info->n_params, (unsigned long long)info->weight_bytes);
    free(name);
    if (params->folder != NULL) {
        dt_status status = dt_conversations_open_folder(all, error);
        if (status == DT_OK && strcmp(info->device, "cpu") == 0) { /* others may not be read while they compute */
            status = dt_conversations_start_saver(all, error);
        }
        if (status != DT_OK) {
            dt_conversations_free(all, false);
            return status;
        }
    }
    *out = all;
    return DT_OK;
}

void dt_conversations_free(dt_conversations *all, bool save) {
    if (all == NULL) {
        return;
    }
    dt_conversations_stop_saver(all);
    for (dt_conversation *c; save && all->folder != NULL && (c = dt_conversations_next_to_go(all, true)) != NULL;) {
        dt_conversations_save(all, c);
    }
    while (all->n > 0) {
        free_entry(all->list[--all->n]);
    }
    if (all->folder_lock >= 0) {
        close(all->folder_lock);
    }
    free(all->list);
    free(all->folder);
    pthread_cond_destroy(&all->saver_news);
    pthread_cond_destroy(&all->saved);
    pthread_mutex_destroy(&all->lock);
    free(all);
}

dt_session *dt_conversation_session(const dt_conversation *conversation) { return conversation->session; }

/* ---- room --------------------------------------------------------------------------------------- */

static uint64_t session_bytes(const dt_session *session) {
    dt_session_stats stats;
    dt_session_get_stats(session, &stats);
    return stats.kv_bytes;
}

/* Of what a session may come to, the bytes that are allocated already and stay its own. The last block of each lane is copied when
 * it is shared; where tokens are evicted, any may be. */
static uint64_t own_bytes(const dt_session *session, bool shares, bool evicts) {
    const uint64_t now = session_bytes(session), copied = shares ? dt_session_kv_bound(session, 1, 0) : 0;
    return (shares && evicts) || copied > now ? 0 : now - copied;
}

static uint64_t growth(const dt_conversation *c) {
    const uint64_t own = own_bytes(c->session, c->shares, c->key[0] != 0);
    return c->promised_bytes > own ? c->promised_bytes - own : 0;
}

/* Bytes of all caches as they are, and as running requests may let them grow. */
static uint64_t promised_bytes(const dt_conversations *all) {
    dt_group_stats group;
    dt_group_get_stats(all->params.group, &group);
    uint64_t bytes = group.kv_bytes;
    for (size_t i = 0; i < all->n; i++) {
        const dt_conversation *c = all->list[i];
        bytes += c->in_use && c->session != NULL ? growth(c) : 0;
    }
    return bytes;
}

/* Whether `a` leaves memory before `b`: the least recently used first, those last that a request waits for. Of these, which come to
 * their turn one after the other, the one whose request came last, for the first would be needed at once. */
static bool goes_before(const dt_conversations *all, const dt_conversation *a, const dt_conversation *b) {
    const bool a_waits = a->awaited && all->clock - a->last_used < AWAITED_USES;
    const bool b_waits = b->awaited && all->clock - b->last_used < AWAITED_USES;
    return a_waits != b_waits ? b_waits : a_waits ? a->last_used > b->last_used : a->last_used < b->last_used;
}

dt_conversation *dt_conversations_next_to_go(const dt_conversations *all, bool unsaved_only) {
    dt_conversation *next = NULL;
    for (size_t i = 0; i < all->n; i++) {
        dt_conversation *c = all->list[i];
        const bool idle = c->session != NULL && !c->in_use && !c->held && !c->pinned;
        if (idle && !(unsaved_only && (c->saving || c->not_savable || dt_conversations_is_saved(c))) &&
            (next == NULL || goes_before(all, c, next))) {
            next = c;
        }
    }
    return next;
}

/* Out of memory: to disk, where that is possible. */
static void put_away(dt_conversations *all, dt_conversation *c) {
    if (all->folder != NULL && dt_conversations_save(all, c)) {
        dt_session_free(c->session);
        c->session = NULL;
        all->stats.n_saved++;
    } else {
        dt_conversations_delete_files(all, c);
        dt_conversations_remove(all, c);
        all->stats.n_dropped++;
    }
}

/* Puts idle conversations away until `bytes` more stay under the ceiling. */
static bool make_room(dt_conversations *all, uint64_t bytes) {
    const uint64_t ceiling = all->params.memory_bytes;
    while (promised_bytes(all) + bytes > ceiling) {
        dt_conversation *c = dt_conversations_next_to_go(all, false);
        if (c == NULL) {
            return false;
        }
        put_away(all, c);
    }
    return true;
}

static bool any_in_use(const dt_conversations *all) {
    for (size_t i = 0; i < all->n; i++) {
        if (all->list[i]->in_use) {
            return true;
        }
    }
    return false;
}

/* ---- as tokens ---------------------------------------------------------------------------------- */

static size_t common_tokens(const int32_t *a, size_t n_a, const int32_t *b, size_t n_b) {
    const size_t most = n_a < n_b ? n_a : n_b;
    size_t n = 0;
    while (n < most && a[n] == b[n]) {
        n++;
    }
    return n;
}

/* How much of the job's prompt this conversation would save. *out_all: the prompt continues it. */
static size_t usable_tokens(const dt_conversation *c, const dt_job *job, bool *out_all) {
    const int32_t *tokens = c->tokens;
    size_t n = c->n_computed < c->n_tokens ? c->n_computed : c->n_tokens;
    if (c->session != NULL) {
        tokens = dt_session_tokens(c->session, &n);
    } else if (c->unreadable) {
        n = 0;
    }
    size_t same = common_tokens(job->tokens, job->n_tokens, tokens, n);
    *out_all = same == n && same < job->n_tokens;
    if (!*out_all) {
        same -= same == job->n_tokens && same > 0 ? 1 : 0; /* the last token's logits have to be computed */
        same = same >= c->whole_from ? same : 0;
    }
    return same >= REUSE_MIN && (c->session != NULL || same >= n / LOAD_SHARE_MIN) ? same : 0;
}

static dt_conversation *find_best(const dt_conversations *all, const dt_job *job, bool *out_all) {
    dt_conversation *best = NULL;
    size_t most = 0;
    *out_all = false;
    for (size_t i = 0; i < all->n; i++) {
        dt_conversation *c = all->list[i];
        bool whole = false;
        const size_t n = strcmp(c->key, job->eviction_key) == 0 ? usable_tokens(c, job, &whole) : 0;
        const bool better = n > most || (n == most && n > 0 && !c->in_use && whole && best->in_use);
        if (better) {
            best = c;
            most = n;
            *out_all = whole;
        }
    }
    return best;
}

/* A session of its own for the job: a fork of the source's, or new. */
static dt_status own_session(dt_conversations *all, const dt_job *job, dt_conversation *source, dt_session **out, dt_error *error) {
    if (source != NULL && source->session != NULL) {
        return dt_session_fork(source->session, job->eviction, DT_EVICT_ALWAYS, out, error);
    }
    dt_session_params params = all->params.session;
    params.eviction = job->eviction;
    params.prefill = job->eviction != NULL ? params.prefill : DT_PREFILL_FULL;
    return dt_session_new(all->params.model, &params, out, error);
}

static uint64_t bound_of(const dt_session *session, const dt_job *job) {
    dt_session_stats stats;
    dt_session_get_stats(session, &stats);
    const int64_t n = (int64_t)job->n_tokens + job->max_tokens;
    return dt_session_kv_bound(session, n < stats.n_ctx ? n : stats.n_ctx, (int64_t)job->n_tokens);
}

static dt_status refuse_size(const dt_conversations *all, uint64_t bytes, const dt_job *job, dt_error *error) {
    return dt_app_fail(error, DT_ERR_LIMIT,
                       "%zu tokens of prompt and up to %lld of reply may need %s of cache, above the limit of %s "
                       "for all; shorten the text, lower max_tokens%s%s, or give a larger --kv-memory, at least %lluK",
                       job->n_tokens, (long long)job->max_tokens * job->n_choices, dt_size_text_of(bytes).text,
                       dt_size_text_of(all->params.memory_bytes).text, job->n_choices > 1 ? " or n" : "",
                       job->eviction == NULL ? ", evict" : "", (unsigned long long)(bytes + 1023) / 1024);
}

/* Checks that the job fits alone, and finds room. own: bytes of it that are allocated already. *out_fits false: not beside what is
 * in memory. */
static dt_status promise(dt_conversations *all, const dt_job *job, const dt_session *session, uint64_t own, uint64_t *out_bytes,
                         bool *out_fits, dt_error *error) {
    dt_session_stats stats;
    dt_session_get_stats(session, &stats);
    if (job->n_tokens > (size_t)stats.n_ctx) {
        return dt_app_fail(error, DT_ERR_LIMIT,
                           "the prompt has %zu tokens, the context %d; shorten the text, or raise the server's -c where "
                           "the model can follow",
                           job->n_tokens, (int)stats.n_ctx);
    }
    const uint64_t bound = bound_of(session, job), total = bound * (uint64_t)(job->max_tokens > 0 ? job->n_choices : 1);
    if (total > all->params.memory_bytes) {
        return refuse_size(all, total, job, error);
    }
    *out_bytes = total;
    *out_fits = make_room(all, total > own ? total - own : 0);
    return DT_OK;
}

static void drop(dt_conversations *all, dt_conversation *c) {
    if (c->file_bytes > 0) { /* what the file holds is whole and goes on being found */
        dt_session_free(c->session);
        c->session = NULL;
        c->n_computed = c->n_saved;
        c->in_use = false;
        c->promised_bytes = 0;
    } else {
        dt_conversations_remove(all, c);
    }
}

static dt_status begin_use(dt_conversations *all, dt_conversation *c, const dt_job *job, uint64_t promised, dt_sync_result *result,
                           dt_error *error) {
    c->in_use = true;
    c->pinned = job->pin;
    c->promised_bytes = promised;
    c->last_used = ++all->clock;
    const dt_status status = dt_session_reuse(c->session, job->tokens, job->n_tokens, result, error);
    if (status == DT_OK) {
        all->stats.reused_tokens += result->reused_tokens;
        all->stats.prompt_tokens += (int64_t)job->n_tokens;
    }
    return status;
}

/* The conversation goes on where it is. */
static dt_status extend(dt_conversations *all, dt_conversation *c, const dt_job *job, dt_conversation **out, dt_sync_result *result,
                        dt_error *error) {
    uint64_t bytes = 0;
    bool fits = false;
    dt_status status = promise(all, job, c->session, own_bytes(c->session, c->shares, c->key[0] != 0), &bytes, &fits, error);
    if (status != DT_OK || !fits) {
        return status;
    }
    status = begin_use(all, c, job, bytes, result, error);
    if (status != DT_OK) {
        drop(all, c);
        return status;
    }
    all->stats.n_extended++;
    *out = c;
    return DT_OK;
}

/* The entry that a session made for the job belongs to: that of the file which was loaded, or a new one. */
static dt_conversation *entry_for(dt_conversations *all, dt_conversation *source, bool loaded, bool whole, const dt_job *job) {
    if (loaded && whole) {
        return source;
    }
    dt_conversation *c = dt_conversations_add(all, job->eviction_key);
    if (c != NULL && source != NULL) {
        c->whole_from = source->whole_from;
    }
    return c;
}

/* Puts what the source's file holds into the session. *out_source: NULL where that can't be used, and the session begins anew. The
 * file goes only where it is damaged: under other settings, or when more files may be open, it is as good as before. */
static dt_status load_source(dt_conversations *all, dt_conversation *source, dt_session *session, dt_conversation **out_source,
                             dt_error *error) {
    const dt_status status = dt_conversations_load(all, source, session, error);
    *out_source = status == DT_OK ? source : NULL;
    if (status == DT_ERR_MEMORY) {
        return any_in_use(all) ? status : DT_OK;
    }
    if (status == DT_ERR_FORMAT) {
        dt_report(DT_LOG_WARN, "a conversation on disk can't be used and is dropped: %s", error->message);
        dt_conversations_delete_files(all, source);
        dt_conversations_remove(all, source);
    } else if (status != DT_OK) {
        dt_report(DT_LOG_WARN, "a conversation on disk can't be read, and is left alone until the next start: %s", error->message);
        source->unreadable = true;
    }
    return DT_OK;
}

/* A session of its own: forked from source, loaded from its file, or new. */
static dt_status branch(dt_conversations *all, dt_conversation *source, bool whole, const dt_job *job, dt_conversation **out,
                        dt_sync_result *result, dt_error *error) {
    dt_session *session = NULL;
    uint64_t bytes = 0;
    bool fits = false;
    const bool load = source != NULL && source->session == NULL, fork = source != NULL && !load;
    dt_status status = own_session(all, job, source, &session, error);
    if (status == DT_OK) {
        status = promise(all, job, session, fork ? 0 : session_bytes(session), &bytes, &fits, error);
    }
    if (status == DT_OK && fits && load) { /* the file may hold more than the job will; where that finds no room it goes without */
        const uint64_t saved = dt_session_kv_bound(session, (int64_t)source->n_computed, 0);
        (void)make_room(all, saved > bytes ? saved : bytes);
        status = load_source(all, source, session, &source, error);
    }
    if (status != DT_OK || !fits) {
        dt_session_free(session);
        return status;
    }
    dt_conversation *c = entry_for(all, source, load && source != NULL, whole, job);
    if (c == NULL) {
        dt_session_free(session);
        return no_memory(error);
    }
    c->session = session;
    c->n_rounds = 0; /* this session's */
    c->shares = fork;
    if (fork) {
        source->shares = true;
    }
    int64_t *counter = source == NULL ? &all->stats.n_new : load ? &all->stats.n_loaded : &all->stats.n_forked;
    status = begin_use(all, c, job, bytes, result, error);
    if (status != DT_OK) {
        drop(all, c);
        return status;
    }
    *counter += 1;
    *out = c;
    return DT_OK;
}

/* One try: NULL in *out with DT_OK or DT_ERR_MEMORY where there is no room beside what is in memory. The conversation that the job
 * continues stays held. */
static dt_status try_to_take(dt_conversations *all, const dt_job *job, dt_conversation **out, dt_sync_result *result,
                             dt_error *error) {
    bool whole = false;
    dt_conversation *best = job->score ? NULL : find_best(all, job, &whole); /* scoring needs logits after every token */
    if (best != NULL) {
        best->held = true; /* making room may drop entries, and while the saver is waited for others may too */
        dt_conversations_wait_saved(all, best);
    }
    const bool in_place = best != NULL && whole && best->session != NULL && !best->in_use && !best->pinned;
    return in_place ? extend(all, best, job, out, result, error) : branch(all, best, whole, job, out, result, error);
}

static void release_held(dt_conversations *all) {
    for (size_t i = 0; i < all->n; i++) {
        all->list[i]->held = false;
    }
}

/* After a try that found no room. What the job continues, and what is pinned, goes only when nothing runs whose end could be waited
 * for: a job that fits alone is never refused. False: nothing can go. */
static bool put_one_away(dt_conversations *all) {
    dt_conversation *c = dt_conversations_next_to_go(all, false);
    if (c == NULL && !any_in_use(all)) {
        release_held(all);
        for (size_t i = 0; c == NULL && i < all->n; i++) {
            c = all->list[i]->session != NULL ? all->list[i] : NULL;
        }
    }
    if (c != NULL) {
        put_away(all, c);
    }
    return c != NULL;
}

dt_status dt_conversations_take(dt_conversations *all, const dt_job *job, dt_conversation **out, dt_sync_result *result,
                                dt_error *error) {
    dt_status status;
    *out = NULL;
    pthread_mutex_lock(&all->lock);
    do {
        status = try_to_take(all, job, out, result, error);
    } while (*out == NULL && (status == DT_OK || status == DT_ERR_MEMORY) && put_one_away(all));
    release_held(all);
    if (*out == NULL && (status == DT_OK || status == DT_ERR_MEMORY)) { /* when another has ended there is room */
        status = any_in_use(all) ? DT_OK : no_memory(error);
    }
    pthread_mutex_unlock(&all->lock);
    return status;
}

dt_status dt_conversations_fork(dt_conversations *all, dt_conversation *from, const dt_job *job, dt_conversation **out,
                                dt_error *error) {
    dt_session *session = NULL;
    const dt_status status = dt_session_fork(from->session, job->eviction, DT_EVICT_ALWAYS, &session, error);
    if (status != DT_OK) {
        return status;
    }
    pthread_mutex_lock(&all->lock);
    dt_conversation *c = dt_conversations_add(all, from->key);
    if (c != NULL) {
        c->session = session;
        c->in_use = true;
        c->shares = from->shares = true;
        c->promised_bytes = bound_of(session, job);
        from->promised_bytes -= from->promised_bytes > c->promised_bytes ? c->promised_bytes : 0;
        c->whole_from = from->whole_from;
        *out = c;
    }
    pthread_mutex_unlock(&all->lock);
    if (c == NULL) {
        dt_session_free(session);
        return no_memory(error);
    }
    return DT_OK;
}

void dt_conversations_note_step(dt_conversations *all, dt_conversation *conversation) {
    dt_session_stats stats;
    dt_session_get_stats(conversation->session, &stats);
    pthread_mutex_lock(&all->lock);
    conversation->kv_bytes = stats.kv_bytes;
    conversation->shares = conversation->shares && conversation->key[0] != 0; /* what it wrote into is its own now */
    if (stats.eviction_rounds != conversation->n_rounds) {
        conversation->n_rounds = stats.eviction_rounds;
        conversation->whole_from = (size_t)stats.n_tokens;
    }
    pthread_mutex_unlock(&all->lock);
}

/* ---- between requests --------------------------------------------------------------------------- */

/* The reply as the client got it: its tokens are those whose bytes lie in its text. */
static bool remember_reply(dt_conversation *c, const dt_job *job, const dt_choice *choice) {
    size_t n_reply = 0, n = 0;
    char *reply = dt_repair_utf8(choice->text, choice->n_text, &n_reply);
    char *text = reply != NULL ? malloc(job->n_text + n_reply + 1) : NULL;
    int32_t *tokens = malloc((job->n_tokens + choice->n_records + 1) * sizeof *tokens);
    dt_anchor *anchors = malloc((job->n_anchors + 1) * sizeof *anchors);
    if (text == NULL || tokens == NULL || anchors == NULL) {
        free(reply);
        free(text);
        free(tokens);
        free(anchors);
        return false;
    }
    memcpy(text, job->text, job->n_text);
    memcpy(text + job->n_text, reply, n_reply);
    free(reply);
    memcpy(tokens, job->tokens, job->n_tokens * sizeof *tokens);
    while (n < choice->n_records - (choice->ended ? 1 : 0) && choice->records[n].text_end <= choice->n_text) {
        tokens[job->n_tokens + n] = choice->records[n].token;
        n++;
    }
    if (job->n_anchors > 0) {
        memcpy(anchors, job->anchors, job->n_anchors * sizeof *anchors);
    }
    free(c->text);
    free(c->tokens);
    free(c->anchors);
    c->text = text;
    c->n_prompt_text = job->n_text;
    c->n_text = job->n_text + n_reply;
    c->tokens = tokens;
    c->n_tokens = job->n_tokens + n;
    c->anchors = anchors;
    c->n_anchors = job->n_anchors;
    return true;
}

static void limit_idle(dt_conversations *all) {
    int64_t n = 0;
    for (size_t i = 0; i < all->n; i++) {
        n += all->list[i]->session != NULL && !all->list[i]->in_use ? 1 : 0;
    }
    for (; n > all->params.n_idle_max; n--) {
        dt_conversation *oldest = dt_conversations_next_to_go(all, false);
        if (oldest == NULL) {
            break;
        }
        put_away(all, oldest);
    }
    while (all->n > ENTRIES_MAX) { /* they take memory for their texts */
        dt_conversation *oldest = NULL;
        for (size_t i = 0; i < all->n; i++) {
            dt_conversation *c = all->list[i];
            oldest = !c->in_use && !c->pinned && !c->saving && (oldest == NULL || c->last_used < oldest->last_used) ? c : oldest;
        }
        if (oldest == NULL) {
            break;
        }
        dt_conversations_delete_files(all, oldest);
        dt_conversations_remove(all, oldest);
    }
}

void dt_conversations_keep(dt_conversations *all, dt_conversation *conversation, const dt_job *job, const dt_choice *choice) {
    pthread_mutex_lock(&all->lock);
    dt_conversation *c = conversation;
    if (job->text != NULL && !remember_reply(c, job, choice)) {
        drop(all, c);
    } else {
        dt_session_tokens(c->session, &c->n_computed);
        if (job->text == NULL) { /* the session's own tokens serve; the text of an earlier request doesn't fit them any more */
            free(c->text);
            c->text = NULL;
            c->n_text = c->n_prompt_text = c->n_anchors = 0;
        }
        c->kv_bytes = session_bytes(c->session);
        c->promised_bytes = 0;
        c->in_use = c->not_savable = c->awaited = false;
        c->last_used = ++all->clock;
        limit_idle(all);
        dt_group_stats group;
        dt_group_get_stats(all->params.group, &group);
        all->kv_bytes = group.kv_bytes;
        pthread_cond_signal(&all->saver_news);
    }
    pthread_mutex_unlock(&all->lock);
}

bool dt_conversations_give_room(dt_conversations *all) {
    pthread_mutex_lock(&all->lock);
    dt_conversation *oldest = dt_conversations_next_to_go(all, false);
    if (oldest != NULL) {
        put_away(all, oldest);
    }
    pthread_mutex_unlock(&all->lock);
    return oldest != NULL;
}

void dt_conversations_drop(dt_conversations *all, dt_conversation *conversation) {
    pthread_mutex_lock(&all->lock);
    drop(all, conversation);
    pthread_mutex_unlock(&all->lock);
}

void dt_conversations_get_stats(dt_conversations *all, dt_conversations_stats *out) {
    pthread_mutex_lock(&all->lock);
    *out = all->stats;
    for (size_t i = 0; i < all->n; i++) {
        const dt_conversation *c = all->list[i];
        out->n_active += c->in_use ? 1 : 0;
        out->active_bytes += c->in_use ? c->kv_bytes : 0;
        out->n_idle += c->session != NULL && !c->in_use ? 1 : 0;
        out->idle_bytes += c->session != NULL && !c->in_use ? c->kv_bytes : 0;
        out->n_on_disk += c->file_bytes > 0 ? 1 : 0;
        out->disk_bytes += c->file_bytes;
    }
    pthread_mutex_unlock(&all->lock);
}
