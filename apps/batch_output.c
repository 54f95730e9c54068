/*
 * The results of a batch. See batch_output.h.
 */
#define _POSIX_C_SOURCE 200809L
#include "batch_output.h"
#include "batch_lines.h"
#include "fail.h"
#include "file_lock.h"
#include "json_parts.h"
#include "run.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PATH_BYTES 4096

struct dt_batch_output {
    const char *path, *settings;
    int file;
    int64_t n_failed; /* of the lines that were there */
    bool settings_differ;
    bool lacks_end; /* the last line is whole but for its end */
    off_t size;     /* bytes that it has to have */
    dt_file_lock *lock;
    json_t *done; /* row's number as text -> its id, null where it had none */
};

static const json_t *id_of(const json_t *line) {
    const json_t *id = json_object_get(line, "custom_id");
    return id != NULL ? id : json_object_get(line, "id");
}

/* Behind a value that the file may end in; NULL where none stands that JSON could have. */
static const char *skip_value(const char *at, const char *end) {
    const char *const begin = at;
    bool in_string = false;
    for (int depth = 0; at < end; at++) {
        if (in_string ? (unsigned char)*at < 0x20 : *at == 0 || strchr("{}[]\",:+-.0123456789Eaeflnrstu", *at) == NULL) {
            return NULL;
        }
        if (in_string && *at == '\\' && at + 1 < end) {
            at++;
        } else if (*at == '"') {
            in_string = !in_string;
        } else if (!in_string && depth == 0 && strchr(",}]:", *at) != NULL) {
            return at > begin ? at : NULL;
        } else if (!in_string) {
            depth += strchr("{[", *at) != NULL ? 1 : strchr("}]", *at) != NULL ? -1 : 0;
        }
    }
    return end;
}

/* Whether text[n] is an object with these keys in this order and no space between them, or the beginning of one. */
static bool begins_as(const char *const *keys, const char *text, size_t n) {
    const char *at = text, *const end = text + n;
    for (const char *const *key = keys; *key != NULL; key++) {
        char head[32];
        const size_t n_head = (size_t)snprintf(head, sizeof head, "%c\"%s\":", key == keys ? '{' : ',', *key);
        const size_t left = (size_t)(end - at);
        if (memcmp(at, head, left < n_head ? left : n_head) != 0) {
            return false;
        }
        at = left < n_head ? end : skip_value(at + n_head, end);
        if (at == NULL || at == end) {
            return at != NULL;
        }
        if (strcmp(*key, "line") == 0 && end - at == 1 && *at == '}') { /* ray_batch.py writes no settings */
            return true;
        }
    }
    return end - at == 1 && *at == '}';
}

/* Whether text[n] is a line as batch.c makes them, or the beginning of one: what lies behind the last line's end was written by a
 * run that was killed meanwhile, and not by somebody else. Stricter than for a line with its end, since what is cut is removed. */
static bool begins_result(const char *text, size_t n) {
    static const char *const forms[][8] = {{"id", "text", "finish_reason", "usage", "line", "settings"},
                                           {"id", "text", "finish_reason", "usage", "eviction", "line", "settings"},
                                           {"id", "error", "line", "settings"},
                                           {"id", "custom_id", "response", "error", "line", "settings"},
                                           {"custom_id", "response", "error", "line", "settings"}};
    for (size_t i = 0; i < sizeof forms / sizeof forms[0]; i++) {
        if (begins_as(forms[i], text, n)) {
            return true;
        }
    }
    return false;
}

/* Takes in a line that an earlier run wrote. */
static dt_status take_done(dt_batch_output *o, const json_t *object, dt_error *error) {
    char key[32];
    const json_t *id = id_of(object), *wrong = json_object_get(object, "error");
    const char *settings = json_string_value(json_object_get(object, "settings"));
    snprintf(key, sizeof key, "%lld", (long long)json_integer_value(json_object_get(object, "line")));
    o->n_failed += wrong != NULL && !json_is_null(wrong);
    o->settings_differ = o->settings_differ || (settings != NULL && strcmp(settings, o->settings) != 0);
    /* not known to be done, it would be written twice */
    return json_object_set_new(o->done, key, id != NULL ? json_deep_copy(id) : json_null()) == 0 ? DT_OK
                                                                                                 : dt_batch_no_memory(error);
}

#define ALONE_MIN (sizeof "{\"id\":" - 1) /* bytes of a cut line that tell whose it is where there is no line before it */

/* Takes in what an earlier run wrote. *out_end: where the last whole line ends; what is behind it will be cut off, so that nothing
 * but a line that was cut may be there. *out_size: bytes read. */
static dt_status read_done(dt_batch_output *o, off_t *out_end, off_t *out_size, dt_error *error) {
    dt_batch_lines l = {.file = fopen(o->path, "rb")};
    dt_status status = DT_OK;
    *out_end = *out_size = 0;
    if (l.file == NULL) {
        return errno == ENOENT ? DT_OK : dt_app_fail(error, DT_ERR_IO, "%s can't be read: %s", o->path, strerror(errno));
    }
    int64_t number = 1;
    for (ssize_t n; status == DT_OK && (n = dt_batch_read_line(&l)) >= 0; number++) {
        json_error_t where = {.line = 0};
        json_t *object = l.why == NULL && n > 0 ? dt_json_load(l.line, (size_t)n, 0, &where) : NULL;
        const bool whole = json_is_integer(json_object_get(object, "line")) && id_of(object) != NULL;
        *out_size = ftello(l.file);
        if (l.why == dt_batch_no_room || json_error_code(&where) == json_error_out_of_memory) {
            status = dt_batch_no_memory(error);
        } else if (whole && (l.has_end || begins_result(l.line, (size_t)n))) {
            status = take_done(o, object, error);
            o->lacks_end = !l.has_end;
            *out_end = *out_size;
        } else if (object != NULL || l.has_end || l.why != NULL || !begins_result(l.line, (size_t)n) ||
                   (number == 1 && (size_t)n < ALONE_MIN)) {
            status = dt_app_fail(error, DT_ERR_ARGUMENT,
                                 "%s is there already and holds something else, in line %lld; name another file with -o", o->path,
                                 (long long)number);
        }
        json_decref(object);
    }
    if (status == DT_OK && (dt_interrupted || l.endless)) {
        status = dt_batch_reading_ended(&l, o->path, error);
    } else if (status == DT_OK && ferror(l.file)) {
        status = dt_app_fail(error, DT_ERR_IO, "%s can't be read: %s", o->path, strerror(errno));
    }
    free(l.line);
    fclose(l.file);
    return status;
}

/* The folder that a file lies in, as stat sees it. */
static bool folder_of(const char *path, struct stat *out) {
    char folder[PATH_BYTES];
    const char *slash = strrchr(path, '/');
    const size_t n = slash != NULL ? (size_t)(slash - path) : 0;
    if (n >= sizeof folder) {
        return false;
    }
    memcpy(folder, path, n);
    folder[n] = 0;
    return stat(slash == NULL ? "." : n == 0 ? "/" : folder, out) == 0;
}

static bool same_file(const struct stat *a, const struct stat *b) { return a->st_dev == b->st_dev && a->st_ino == b->st_ino; }

static dt_status write_all(dt_batch_output *o, const char *text, size_t n, dt_error *error) {
    for (size_t done = 0; done < n;) {
        const ssize_t written = write(o->file, text + done, n - done);
        if (written < 0 && errno != EINTR) {
            return dt_app_fail(error, DT_ERR_IO, "%s can't be written: %s", o->path, strerror(errno));
        }
        done += written > 0 ? (size_t)written : 0;
        o->size += written > 0 ? written : 0;
    }
    return DT_OK;
}

/* Opens it for writing behind what read_done took in. */
static dt_status open_behind(dt_batch_output *o, off_t end, off_t size, dt_error *error) {
    struct stat info;
    o->file = open(o->path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (o->file < 0 || fstat(o->file, &info) != 0) {
        return dt_app_fail(error, DT_ERR_IO, "%s can't be written: %s", o->path, strerror(errno));
    }
    if (info.st_size != size) {
        return dt_app_fail(error, DT_ERR_ARGUMENT,
                           "%s was written to by something else while it was read; end that, or name another file", o->path);
    }
    if (size > end && ftruncate(o->file, end) != 0) {
        return dt_app_fail(error, DT_ERR_IO, "%s can't be written: %s", o->path, strerror(errno));
    }
    o->size = end;
    return o->lacks_end ? write_all(o, "\n", 1, error) : DT_OK;
}

dt_status dt_batch_output_open(const char *path, const char *input_path, const char *settings, dt_batch_output **out,
                               dt_error *error) {
    struct stat in, there, folder;
    if (stat(path, &there) == 0 && !S_ISREG(there.st_mode)) {
        return dt_app_fail(
            error, DT_ERR_ARGUMENT,
            "%s is no regular file: results are written to a file, from which a run that was broken off goes on; name one "
            "with -o",
            path);
    }
    if (stat(input_path, &in) == 0 && ((stat(path, &there) == 0 && same_file(&in, &there)) ||
                                       (S_ISDIR(in.st_mode) && folder_of(path, &folder) && same_file(&in, &folder)))) {
        return dt_app_fail(error, DT_ERR_ARGUMENT, "-o names the input, or a file in it; the results need a place of their own");
    }
    dt_batch_output *o = calloc(1, sizeof *o);
    if (o == NULL) {
        return dt_batch_no_memory(error);
    }
    *o = (dt_batch_output){.path = path, .settings = settings, .file = -1, .done = json_object()};
    off_t end = 0, size = 0;
    /* two that go on from the same lines would write each row twice */
    dt_status status = dt_file_lock_take(path, &o->lock, error);
    if (status == DT_OK) {
        status = read_done(o, &end, &size, error);
    }
    if (status == DT_OK) {
        status = open_behind(o, end, size, error);
    }
    if (status != DT_OK) {
        dt_batch_output_close(o);
        return status;
    }
    *out = o;
    return DT_OK;
}

void dt_batch_output_close(dt_batch_output *o) {
    if (o != NULL) {
        if (o->file >= 0) {
            close(o->file);
        }
        dt_file_lock_release(o->lock);
        json_decref(o->done);
        free(o);
    }
}

int64_t dt_batch_output_failed(const dt_batch_output *o) { return o->n_failed; }
bool dt_batch_output_settings_differ(const dt_batch_output *o) { return o->settings_differ; }

dt_status dt_batch_output_has(const dt_batch_output *o, const dt_batch_row *row, bool *out_has, dt_error *error) {
    char key[32];
    snprintf(key, sizeof key, "%lld", (long long)row->number);
    const json_t *id = json_object_get(o->done, key);
    *out_has = id != NULL;
    if (id != NULL && !(row->id == NULL ? json_is_null(id) : json_equal(id, row->id) == 1)) {
        return dt_app_fail(error, DT_ERR_ARGUMENT,
                           "%s holds the results of another input: its line for row %lld has another id; name another file with -o",
                           o->path, (long long)row->number);
    }
    return DT_OK;
}

static dt_status check_kept(const dt_batch_output *o, dt_error *error) {
    struct stat ours, there;
    if (fstat(o->file, &ours) != 0) {
        return dt_app_fail(error, DT_ERR_IO, "%s can't be looked at: %s", o->path, strerror(errno));
    }
    if (stat(o->path, &there) != 0 || !same_file(&ours, &there)) {
        return dt_app_fail(
            error, DT_ERR_IO,
            "%s was removed or replaced while results were written to it, and those are no longer there; the same command "
            "computes what it lacks",
            o->path);
    }
    if (ours.st_size != o->size) {
        return dt_app_fail(error, DT_ERR_IO,
                           "%s was %s by something else while results were written to it; the same command computes what it lacks",
                           o->path, ours.st_size < o->size ? "cut short" : "written to");
    }
    return DT_OK;
}

dt_status dt_batch_output_sync(const dt_batch_output *o, dt_error *error) {
    if (fsync(o->file) != 0 && errno != EINVAL && errno != EINTR) { /* EINVAL: the place knows of no such thing */
        return dt_app_fail(error, DT_ERR_IO, "%s can't be written: %s", o->path, strerror(errno));
    }
    return check_kept(o, error);
}

/* Where the file was cut between the look at it and the write, the line of n bytes stands behind a part of another, and both would
 * be read as something else. */
static void take_back(dt_batch_output *o, off_t n) {
    struct stat ours;
    if (fstat(o->file, &ours) == 0 && ours.st_size < o->size && ours.st_size >= n && ftruncate(o->file, ours.st_size - n) == 0) {
        o->size = ours.st_size - n;
    }
}

dt_status dt_batch_output_write(dt_batch_output *o, const dt_batch_row *row, json_t *object, dt_error *error) {
    if (object != NULL) {
        dt_json_set(&object, "line", json_integer(row->number));
        dt_json_set(&object, "settings", json_string(o->settings));
    }
    /* an id with a real number in it comes back as it was given, since the next run looks it up */
    const size_t digits = row->id == NULL || json_is_string(row->id) || json_is_integer(row->id) ? 9 : 17;
    char *text = object != NULL ? dt_json_dump(object, JSON_COMPACT | JSON_REAL_PRECISION(digits)) : NULL;
    json_decref(object);
    if (text == NULL) {
        return dt_batch_no_memory(error);
    }
    const size_t n = strlen(text) + 1;
    text[n - 1] = '\n';                      /* in place of the terminator: the line goes out in one write */
    dt_status status = check_kept(o, error); /* before: what is cut in a line must not get another behind it */
    status = status == DT_OK ? write_all(o, text, n, error) : status;
    free(text);
    if (status == DT_OK) {
        status = check_kept(o, error);
        take_back(o, (off_t)n);
    }
    return status;
}
