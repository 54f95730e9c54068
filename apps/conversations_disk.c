/*
 * Conversations on disk: for each a session file (docs/session-format.md) and an index beside it, JSON, with what is needed to find
 * it by text and by tokens without reading the cache.
 *
 * Invariants: the session file is written first and whole, then the index, so an index may be of an earlier turn than its session;
 * what is loaded is compared with its index, and what is damaged is dropped; what another version or other settings left stays, as
 * long as the folder keeps its limit. Only files named as below are touched. One process uses a folder at a time. The files can be
 * read by their owner only.
 */
#define _DEFAULT_SOURCE /* flock, strdup, times of files */
#include "conversations_internal.h"
#include "file_lock.h"
#include "json_parts.h"
#include "report.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define PATH_BYTES 4096
#define INDEX_VERSION 1
#define INDEX_BYTES_MAX ((off_t)32 << 20) /* read as a whole; a conversation of more text stays in memory only */
#define SAVE_MIN_TOKENS 32                /* computing fewer again costs less than their file */

#define NAME_FORMAT "conversation-%016llx%s" /* id, ending */

static bool path_of(const dt_conversations *all, uint64_t id, const char *ending, char out[PATH_BYTES]) {
    const int n = snprintf(out, PATH_BYTES, "%s/" NAME_FORMAT, all->folder, (unsigned long long)id, ending);
    return n > 0 && n < PATH_BYTES;
}

/* Whether path_of gives this name with that ending, to *out_id. */
static bool is_named(const char *name, const char *ending, uint64_t *out_id) {
    char own[64];
    unsigned long long id = 0;
    if (sscanf(name, "conversation-%16llx", &id) != 1) {
        return false;
    }
    snprintf(own, sizeof own, NAME_FORMAT, id, ending);
    *out_id = id;
    return strcmp(name, own) == 0;
}

void dt_conversations_delete_files(dt_conversations *all, dt_conversation *c) {
    char path[PATH_BYTES];
    if (c->file_bytes == 0) {
        return;
    }
    static const char *const endings[] = {".json", ".session"}; /* the index first: without it the other is never opened */
    for (int i = 0; i < 2; i++) {
        if (path_of(all, c->id, endings[i], path)) {
            unlink(path);
        }
    }
    c->file_bytes = 0;
    c->n_saved = 0;
}

/* ---- index -------------------------------------------------------------------------------------- */

static json_t *numbers(const int32_t *tokens, size_t n) {
    json_t *array = json_array();
    for (size_t i = 0; i < n; i++) {
        dt_json_append(&array, json_integer(tokens[i]));
    }
    return array;
}

static const char *kv_type_of(const dt_conversations *all) { return all->params.session.kv_type == DT_KV_F16 ? "f16" : "int8"; }

static json_t *index_of(const dt_conversations *all, const dt_conversation *c) {
    json_t *anchors = json_array();
    for (size_t i = 0; i < c->n_anchors; i++) {
        dt_json_append(&anchors, json_pack("[I,I]", (json_int_t)c->anchors[i].n_text, (json_int_t)c->anchors[i].n_tokens));
    }
    json_t *index = json_pack("{s:i,s:s,s:s,s:s,s:I,s:I,s:o,s:o}", "version", INDEX_VERSION, "model", all->identity, "kv_type",
                              kv_type_of(all), "eviction", c->key, "computed", (json_int_t)c->n_computed, "whole_from",
                              (json_int_t)c->whole_from, "anchors", anchors, "tokens", numbers(c->tokens, c->n_tokens));
    if (index != NULL && c->text != NULL) {
        dt_json_set(&index, "prompt", json_stringn(c->text, c->n_prompt_text));
        dt_json_set(&index, "reply", json_stringn(c->text + c->n_prompt_text, c->n_text - c->n_prompt_text));
    }
    return index;
}

static bool write_index(const dt_conversations *all, const dt_conversation *c) {
    char path[PATH_BYTES], part[PATH_BYTES];
    json_t *index = index_of(all, c);
    bool written = index != NULL && path_of(all, c->id, ".json", path) && path_of(all, c->id, ".json.part", part);
    const int file = written ? open(part, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600) : -1;
    struct stat info;
    written = file >= 0 && json_dumpfd(index, file, JSON_COMPACT) == 0 && fstat(file, &info) == 0 &&
              info.st_size <= INDEX_BYTES_MAX && fsync(file) == 0;
    if (file >= 0) {
        written = close(file) == 0 && written;
        written = written && rename(part, path) == 0;
        if (!written) {
            unlink(part);
        }
    }
    json_decref(index);
    return written;
}

/* json_integer_value within 0 and INT32_MAX, or -1. */
static int64_t small_number(const json_t *number) {
    const json_int_t value = json_is_integer(number) ? json_integer_value(number) : -1;
    return value >= 0 && value <= INT32_MAX ? value : -1;
}

static bool read_tokens(const dt_conversations *all, dt_conversation *c, const json_t *array) {
    const int32_t n_vocab = dt_model_get_info(all->params.model)->n_vocab;
    c->n_tokens = json_array_size(array);
    c->tokens = malloc((c->n_tokens + 1) * sizeof *c->tokens);
    for (size_t i = 0; c->tokens != NULL && i < c->n_tokens; i++) {
        const int64_t token = small_number(json_array_get(array, i));
        if (token < 0 || token >= n_vocab) {
            return false;
        }
        c->tokens[i] = (int32_t)token;
    }
    return c->tokens != NULL && c->n_tokens > 0;
}

static bool read_texts(dt_conversation *c, const json_t *prompt, const json_t *reply) {
    if (prompt == NULL) {
        return true;
    }
    if (!json_is_string(prompt) || !json_is_string(reply)) {
        return false;
    }
    c->n_prompt_text = json_string_length(prompt);
    c->n_text = c->n_prompt_text + json_string_length(reply);
    c->text = malloc(c->n_text + 1);
    if (c->text == NULL) {
        return false;
    }
    memcpy(c->text, json_string_value(prompt), c->n_prompt_text);
    memcpy(c->text + c->n_prompt_text, json_string_value(reply), c->n_text - c->n_prompt_text);
    return true;
}

static bool read_anchors(dt_conversation *c, const json_t *array) {
    const size_t n = json_array_size(array);
    c->anchors = malloc((n + 1) * sizeof *c->anchors);
    for (size_t i = 0; c->anchors != NULL && i < n; i++) {
        const json_t *pair = json_array_get(array, i);
        const int64_t n_text = small_number(json_array_get(pair, 0)), n_tokens = small_number(json_array_get(pair, 1));
        if (n_text < 0 || n_tokens < 0 || (size_t)n_text > c->n_prompt_text || (size_t)n_tokens > c->n_tokens) {
            return false;
        }
        c->anchors[i] = (dt_anchor){(size_t)n_text, (size_t)n_tokens};
    }
    c->n_anchors = n;
    return c->anchors != NULL;
}

/* NULL: nothing that this wrote. Whatever lies there, a pipe is not waited for, and no more is read than was ever written. */
static json_t *load_index(const char *path) {
    struct stat info;
    const int file = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    const bool fits = file >= 0 && fstat(file, &info) == 0 && S_ISREG(info.st_mode) && info.st_size <= INDEX_BYTES_MAX;
    json_t *index = fits ? dt_json_load_fd(file, (size_t)info.st_size, 0, NULL) : NULL;
    if (file >= 0) {
        close(file);
    }
    return index;
}

static int64_t written_ns(const struct stat *info) {
#ifdef __APPLE__
    const struct timespec when = info->st_mtimespec;
#else
    const struct timespec when = info->st_mtim;
#endif
    return (int64_t)when.tv_sec * 1000000000 + when.tv_nsec;
}

/* One index; a file that isn't ours or no longer fits is left alone. last_used: when the session was written, for now. */
static void read_index(dt_conversations *all, uint64_t id) {
    char path[PATH_BYTES];
    struct stat info;
    json_t *index = path_of(all, id, ".json", path) ? load_index(path) : NULL;
    const char *identity = json_string_value(json_object_get(index, "model"));
    const char *key = json_string_value(json_object_get(index, "eviction"));
    const char *kv_type = json_string_value(json_object_get(index, "kv_type"));
    const int64_t computed = small_number(json_object_get(index, "computed"));
    const int64_t whole_from = small_number(json_object_get(index, "whole_from"));
    const bool ours = identity != NULL && key != NULL && strcmp(identity, all->identity) == 0 && computed > 0 && whole_from >= 0 &&
                      small_number(json_object_get(index, "version")) == INDEX_VERSION;
    dt_conversation *c = NULL;
    if (ours && path_of(all, id, ".session", path) && stat(path, &info) == 0 && S_ISREG(info.st_mode)) {
        c = dt_conversations_add(all, key);
    }
    if (c != NULL) {
        c->id = id;
        c->n_computed = c->n_saved = (size_t)computed;
        c->whole_from = (size_t)whole_from;
        c->file_bytes = (uint64_t)info.st_size;
        c->last_used = written_ns(&info);
        c->unreadable = (kv_type != NULL && strcmp(kv_type, kv_type_of(all)) != 0) || dt_session_file_tokens(path) == 0;
        if (!read_tokens(all, c, json_object_get(index, "tokens")) ||
            !read_texts(c, json_object_get(index, "prompt"), json_object_get(index, "reply")) ||
            !read_anchors(c, json_object_get(index, "anchors"))) {
            dt_conversations_remove(all, c);
        }
    }
    json_decref(index);
}

/* ---- folder ------------------------------------------------------------------------------------- */

static uint64_t disk_bytes(const dt_conversations *all) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < all->n; i++) {
        bytes += all->list[i]->file_bytes;
    }
    return bytes;
}

/* Bytes that the folder's disk has left. */
static uint64_t free_bytes(const dt_conversations *all) {
    struct statvfs disk;
    return statvfs(all->folder, &disk) == 0 ? (uint64_t)disk.f_bavail * disk.f_frsize : UINT64_MAX;
}

/* The least recently used whose files may go for c's (NULL: for nobody's); *out_bytes: of the files of all these. */
static dt_conversation *oldest_on_disk(const dt_conversations *all, const dt_conversation *c, uint64_t *out_bytes) {
    dt_conversation *oldest = NULL;
    *out_bytes = 0;
    for (size_t i = 0; i < all->n; i++) {
        dt_conversation *other = all->list[i];
        const bool may_go =
            other->file_bytes > 0 && other != c && !other->held && !other->saving && (c == NULL || other->last_used < c->last_used);
        oldest = may_go && (oldest == NULL || other->last_used < oldest->last_used) ? other : oldest;
        *out_bytes += may_go ? other->file_bytes : 0;
    }
    return oldest;
}

/* Deletes files, those that were used longest ago first, until the folder keeps its limit with so many bytes of c in it (NULL: as
 * it is), and, where they are yet to be written, the disk has room for them. What was used after c stays, and so does everything
 * where the disk would have no room even then. False: what stays leaves no room within the limit. */
static bool limit_folder(dt_conversations *all, const dt_conversation *c, uint64_t bytes) {
    const uint64_t own = c != NULL ? c->file_bytes : 0, limit = all->params.disk_bytes;
    if (bytes > limit) {
        return false; /* alone it is too large: nothing that goes would help */
    }
    /* asked once: some file systems give back later what was deleted */
    uint64_t room = c != NULL && !dt_conversations_is_saved(c) ? free_bytes(all) : UINT64_MAX;
    for (;;) {
        uint64_t may_go = 0;
        dt_conversation *oldest = oldest_on_disk(all, c, &may_go);
        const uint64_t others = disk_bytes(all) - own;
        const bool over = others + bytes > limit, full = bytes > room && bytes - room <= may_go;
        if (over && others > may_go && others - may_go + bytes > limit) {
            return false;
        }
        if (oldest == NULL || !(over || full)) {
            return true;
        }
        if (!over && !all->told_full) {
            all->told_full = true;
            dt_report(DT_LOG_WARN, "the disk of %s is full; from now on conversations there that were used longest ago make room",
                      all->folder);
        }
        room += oldest->file_bytes <= UINT64_MAX - room ? oldest->file_bytes : 0;
        dt_conversations_delete_files(all, oldest);
        if (oldest->session == NULL) {
            dt_conversations_remove(all, oldest);
            all->stats.n_dropped++;
        }
    }
}

/* An index, or the file that takes the place of a session, that was being written: named just so. */
static bool is_in_the_making(const char *name) {
    char own[96];
    uint64_t id = 0;
    unsigned long long number = 0;
    long pid = 0;
    if (is_named(name, ".json.part", &id)) {
        return true;
    }
    if (sscanf(name, "conversation-%16llx.session.%9ld", &number, &pid) != 2) {
        return false;
    }
    snprintf(own, sizeof own, NAME_FORMAT ".%ld.deeptutor", number, ".session", pid);
    return strcmp(name, own) == 0;
}

static int by_last_use(const void *a, const void *b) {
    const int64_t x = (*(dt_conversation *const *)a)->last_used, y = (*(dt_conversation *const *)b)->last_used;
    return x < y ? -1 : x > y;
}

/* New conversations get numbers behind that of the file: it is not overwritten. False: it is named like none. */
static bool pass_number(dt_conversations *all, const char *name) {
    unsigned long long number = 0;
    if (sscanf(name, "conversation-%16llx", &number) != 1) {
        return false;
    }
    all->next_id = number >= all->next_id ? number + 1 : all->next_id;
    return true;
}

/* What the folder holds. A session without an index is what a kill between writing the two, or deleting them, leaves: nobody finds it
 * again. */
static void list_folder(dt_conversations *all, DIR *folder) {
    char path[PATH_BYTES];
    for (const struct dirent *entry; (entry = readdir(folder)) != NULL;) {
        const char *name = entry->d_name;
        uint64_t id = 0;
        if (is_named(name, ".json", &id)) {
            read_index(all, id);
        }
        if (!pass_number(all, name)) {
            continue; /* others are left alone */
        }
        if (is_in_the_making(name) ||
            (is_named(name, ".session", &id) && path_of(all, id, ".json", path) && access(path, F_OK) != 0 && errno == ENOENT)) {
            unlinkat(dirfd(folder), name, 0); /* a killed server's: the folder is ours alone */
        }
    }
}

/* Those that were found, in the order of their use, and a word on those that can't be gone on with. */
static void sort_found(dt_conversations *all) {
    int64_t n_unreadable = 0;
    if (all->n > 1) {
        qsort(all->list, all->n, sizeof(dt_conversation *), by_last_use);
    }
    for (size_t i = 0; i < all->n; i++) {
        all->list[i]->last_used = ++all->clock;
        n_unreadable += all->list[i]->unreadable ? 1 : 0;
    }
    if (n_unreadable > 0) {
        dt_report(
            DT_LOG_WARN,
            "%lld conversations in %s are of another version or --kv-type, or damaged; they stay while --disk-memory has room, "
            "but can't be gone on with",
            (long long)n_unreadable, all->folder);
    }
}

/* Makes the folder where it isn't there, and locks it. *out_lock: descriptor, to be closed also on failure where it is >= 0. */
static dt_status lock_folder(const char *name, int *out_lock, dt_error *error) {
    char path[PATH_BYTES];
    if (snprintf(path, sizeof path, "%s/lock", name) >= (int)sizeof path) {
        return dt_app_fail(error, DT_ERR_MEMORY, "the name of the folder for conversations is too long");
    }
    if (mkdir(name, 0700) != 0 && errno != EEXIST) {
        return dt_app_fail(error, DT_ERR_IO, "the folder for conversations %s can't be made: %s", name, strerror(errno));
    }
    *out_lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
    if (*out_lock < 0) {
        return dt_app_fail(error, DT_ERR_IO, "the folder for conversations %s can't be written: %s", name, strerror(errno));
    }
    if (flock(*out_lock, LOCK_EX | LOCK_NB) != 0) {
        char holder[64];
        dt_file_lock_holder(*out_lock, holder, sizeof holder);
        return dt_app_fail(error, DT_ERR_IO, "the folder for conversations %s is in use by %s; name another one", name, holder);
    }
    if (!dt_file_lock_is_one(*out_lock)) {
        return dt_app_fail(error, DT_ERR_IO, "%s is no lock file of this program; rename it, or name another folder", path);
    }
    dt_file_lock_sign(*out_lock);
    return DT_OK;
}

dt_status dt_conversations_open_folder(dt_conversations *all, dt_error *error) {
    const char *name = all->params.folder;
    all->folder = strdup(name);
    if (all->folder == NULL) {
        return dt_app_fail(error, DT_ERR_MEMORY, "out of memory for the name of the folder for conversations");
    }
    const dt_status status = lock_folder(name, &all->folder_lock, error);
    if (status != DT_OK) {
        return status;
    }
    all->next_id = 1;
    DIR *folder = opendir(name);
    if (folder != NULL) {
        list_folder(all, folder);
        closedir(folder);
    }
    sort_found(all);
    limit_folder(all, NULL, 0);
    return DT_OK;
}

/* ---- saving ------------------------------------------------------------------------------------- */

bool dt_conversations_is_saved(const dt_conversation *c) { return c->file_bytes > 0 && c->n_saved == c->n_computed; }

/* Where there is no text, the session's tokens are those to be found by. */
static bool copy_tokens(dt_conversation *c) {
    size_t n = 0;
    const int32_t *tokens = dt_session_tokens(c->session, &n);
    int32_t *copy = c->text == NULL && n > 0 ? malloc((n + 1) * sizeof *copy) : NULL;
    if (copy != NULL) {
        memcpy(copy, tokens, n * sizeof *copy);
        free(c->tokens);
        c->tokens = copy;
        c->n_tokens = n;
    }
    return copy != NULL || c->text != NULL;
}

/* What lay in the folder that was locked before is nobody's any more, and what lies in this one is not overwritten: another server
 * may have used it in between. The next start finds what can be gone on with. */
static void forget_files(dt_conversations *all) {
    for (size_t i = all->n; i-- > 0;) {
        dt_conversation *c = all->list[i];
        if (c->file_bytes == 0 || c->held || c->saving) {
            continue;
        }
        c->file_bytes = 0;
        c->n_saved = 0;
        if (c->session == NULL) {
            dt_conversations_remove(all, c);
            all->stats.n_dropped++;
        }
    }
    DIR *folder = opendir(all->folder);
    for (const struct dirent *entry; folder != NULL && (entry = readdir(folder)) != NULL;) {
        pass_number(all, entry->d_name);
    }
    if (folder != NULL) {
        closedir(folder);
    }
}

/* Where the folder, or our lock in it, was removed under the server it is made anew. */
static bool has_folder(dt_conversations *all) {
    char path[PATH_BYTES];
    dt_error error = {0};
    int lock = -1;
    snprintf(path, sizeof path, "%s/lock", all->folder);
    if (dt_file_lock_is_there(all->folder_lock, path)) {
        return true;
    }
    if (lock_folder(all->folder, &lock, &error) != DT_OK) {
        dt_report(DT_LOG_WARN, "a conversation can't be saved: %s", error.message);
        if (lock >= 0) {
            close(lock);
        }
        return false;
    }
    dt_report(DT_LOG_WARN, "the folder for conversations %s was removed, or its lock; it is made anew", all->folder);
    close(all->folder_lock);
    all->folder_lock = lock;
    forget_files(all);
    return true;
}

/* What c's files may come to. */
static uint64_t bytes_to_write(const dt_conversations *all, const dt_conversation *c) {
    const size_t n_vocab = (size_t)dt_model_get_info(all->params.model)->n_vocab; /* logits; then tokens in both, and the text */
    return c->kv_bytes + n_vocab * sizeof(float) + 16 * c->n_computed + 2 * c->n_text;
}

/* Whether there is something to write, and c says what: then write_files has what it needs, and there is room for it. */
static bool begin_save(dt_conversations *all, dt_conversation *c) {
    size_t n = 0;
    dt_session_tokens(c->session, &n);
    c->n_computed = n;
    c->not_savable = n < SAVE_MIN_TOKENS || !copy_tokens(c) || !has_folder(all) || !limit_folder(all, c, bytes_to_write(all, c));
    return !c->not_savable;
}

/* Bytes of the session's file, 0 where it or its index couldn't be written. Reads what belongs to c alone, so the lock is not needed
 * while nobody else has it. */
static uint64_t write_files(const dt_conversations *all, const dt_conversation *c) {
    char path[PATH_BYTES];
    dt_error error = {0};
    struct stat info;
    if (!path_of(all, c->id, ".session", path)) {
        return 0;
    }
    if (dt_session_save(c->session, NULL, path, &error) != DT_OK) {
        dt_report(DT_LOG_WARN, "a conversation can't be saved: %s", error.message);
        return 0;
    }
    if (!write_index(all, c)) {
        dt_report(DT_LOG_WARN, "the index of a conversation can't be written to %s, or is larger than %d MiB", all->folder,
                  (int)(INDEX_BYTES_MAX >> 20));
        return 0;
    }
    return stat(path, &info) == 0 ? (uint64_t)info.st_size : 1;
}

static bool end_save(dt_conversations *all, dt_conversation *c, uint64_t file_bytes) {
    if (file_bytes == 0) {
        c->not_savable = true;
        c->file_bytes = c->file_bytes > 0 ? c->file_bytes : 1; /* whatever lies there is removed with it */
        c->n_saved = 0;
        return false;
    }
    c->n_saved = c->n_computed;
    c->file_bytes = file_bytes;
    limit_folder(all, c, file_bytes);
    return true;
}

void dt_conversations_wait_saved(dt_conversations *all, const dt_conversation *c) {
    while (c->saving) {
        pthread_cond_wait(&all->saved, &all->lock);
    }
}

bool dt_conversations_save(dt_conversations *all, dt_conversation *c) {
    dt_conversations_wait_saved(all, c);
    return dt_conversations_is_saved(c) || (begin_save(all, c) && end_save(all, c, write_files(all, c)));
}

/* Whether a quarter of the memory, and of the places for idle ones, can be had without writing a file. */
static bool has_room_at_once(const dt_conversations *all) {
    const uint64_t ceiling = all->params.memory_bytes;
    uint64_t bytes = ceiling > all->kv_bytes ? ceiling - all->kv_bytes : 0;
    int64_t n_unsaved = 0;
    for (size_t i = 0; i < all->n; i++) {
        const dt_conversation *c = all->list[i];
        const bool idle = c->session != NULL && !c->in_use;
        bytes += idle && dt_conversations_is_saved(c) ? c->kv_bytes : 0;
        n_unsaved += idle && !dt_conversations_is_saved(c) ? 1 : 0;
    }
    return bytes >= ceiling / 4 && n_unsaved <= all->params.n_idle_max - all->params.n_idle_max / 4;
}

static void *save_ahead(void *user) {
    dt_conversations *all = user;
    pthread_mutex_lock(&all->lock);
    while (!all->saver_stops) {
        dt_conversation *c = has_room_at_once(all) ? NULL : dt_conversations_next_to_go(all, true);
        if (c == NULL) {
            pthread_cond_wait(&all->saver_news, &all->lock);
        } else if (begin_save(all, c)) {
            c->saving = true;
            pthread_mutex_unlock(&all->lock);
            const uint64_t file_bytes = write_files(all, c);
            pthread_mutex_lock(&all->lock);
            c->saving = false;
            end_save(all, c, file_bytes);
            pthread_cond_broadcast(&all->saved);
        }
    }
    pthread_mutex_unlock(&all->lock);
    return NULL;
}

dt_status dt_conversations_start_saver(dt_conversations *all, dt_error *error) {
    all->has_saver = pthread_create(&all->saver, NULL, save_ahead, all) == 0;
    return all->has_saver ? DT_OK : dt_app_fail(error, DT_ERR_MEMORY, "no thread for saving conversations could be started");
}

void dt_conversations_stop_saver(dt_conversations *all) {
    if (all->has_saver) {
        pthread_mutex_lock(&all->lock);
        all->saver_stops = true;
        pthread_cond_signal(&all->saver_news);
        pthread_mutex_unlock(&all->lock);
        pthread_join(all->saver, NULL);
        all->has_saver = false;
    }
}

dt_status dt_conversations_load(dt_conversations *all, dt_conversation *c, dt_session *session, dt_error *error) {
    char path[PATH_BYTES];
    if (!path_of(all, c->id, ".session", path)) {
        return dt_app_fail(error, DT_ERR_IO, "its path is too long");
    }
    const dt_status status = dt_session_load(session, NULL, path, error);
    if (status == DT_ERR_IO && access(path, F_OK) != 0 && errno == ENOENT) {
        return error->code = DT_ERR_FORMAT; /* somebody deleted it: its index is of no use */
    }
    if (status != DT_OK) {
        return status;
    }
    size_t n = 0;
    const int32_t *tokens = dt_session_tokens(session, &n);
    const size_t common = n < c->n_tokens ? n : c->n_tokens;
    if (memcmp(tokens, c->tokens, common * sizeof *tokens) != 0) {
        return dt_app_fail(error, DT_ERR_FORMAT, "its index names other tokens");
    }
    if (n != c->n_saved) { /* a process was killed between writing the session and its index: as good, until it is written again */
        c->n_saved = 0;
        c->n_computed = n;
    }
    return DT_OK;
}
