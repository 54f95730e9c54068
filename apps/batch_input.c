/*
 * Rows in, lines out. See batch_input.h.
 */
#define _POSIX_C_SOURCE 200809L
#include "batch_input.h"
#include "file_lock.h"
#include "json_parts.h"
#include "run.h"
#include "utf8.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define ROW_BYTES_MAX ((size_t)64 << 20)
#define LINE_BYTES_MAX (16 * ROW_BYTES_MAX) /* beyond it, this is no file of lines: nobody waits for a terabyte to end */
#define PATH_BYTES 4096

static dt_status fail(dt_error *error, dt_status code, const char *format, ...) __attribute__((format(printf, 3, 4)));
static dt_status fail(dt_error *error, dt_status code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->message, sizeof error->message, format, arguments);
    va_end(arguments);
    return error->code = code;
}

static dt_status no_memory(dt_error *error) { return fail(error, DT_ERR_MEMORY, "out of memory for the jobs"); }

/* ---- lines -------------------------------------------------------------------------------------- */

static const char too_long[] = "it is too long", no_room[] = "memory is short";

typedef struct lines {
    FILE *file;
    char *line; /* the last one read, without its end; free() */
    size_t capacity;
    const char *why; /* it is not there whole: too_long or no_room; NULL: it is */
    bool has_end;    /* false: the file ended in it */
    bool endless;    /* it has more than LINE_BYTES_MAX, and was left there */
} lines;

/* Makes room for one more byte of the line. */
static bool grow_line(lines *l, size_t n) {
    if (n < l->capacity) {
        return true;
    }
    const size_t capacity = l->capacity > 0 ? 2 * l->capacity : 4096;
    char *grown = realloc(l->line, capacity);
    if (grown != NULL) {
        l->line = grown;
        l->capacity = capacity;
    }
    return grown != NULL;
}

/* Reads a line; returns its bytes, -1 at the end of the file, or where reading is to end: after a signal, and where l->endless.
 * What is beyond ROW_BYTES_MAX, or what memory has no room for, is read over, and l->why says so. Not getline, which takes as much
 * memory as a file without line ends has bytes, and where there is none ends the file. */
static ssize_t read_line(lines *l) {
    size_t n = 0;
    int c;
    l->why = NULL;
    while ((c = getc_unlocked(l->file)) != EOF && c != '\n') {
        if (l->why == NULL && n == ROW_BYTES_MAX) {
            l->why = too_long;
        } else if (l->why == NULL && !grow_line(l, n)) {
            l->why = no_room;
        }
        if (l->why == NULL) {
            l->line[n] = (char)c;
        }
        n++;
        l->endless = n > LINE_BYTES_MAX;
        if (l->endless || (n % 65536 == 0 && dt_interrupted)) {
            return -1;
        }
    }
    l->has_end = c != EOF;
    if (dt_interrupted) {
        return -1;
    }
    if (c == EOF && n == 0) {
        return -1;
    }
    while (l->why == NULL && n > 0 && l->line[n - 1] == '\r') {
        n--;
    }
    return (ssize_t)n;
}

/* Why read_line came to no end of the file. */
static dt_status reading_ended(const lines *l, const char *path, dt_error *error) {
    if (l->endless) {
        return fail(error, DT_ERR_LIMIT, "%s has a line of more than %zu bytes, so it is no file of JSON lines; name another file",
                    path, LINE_BYTES_MAX);
    }
    return fail(error, DT_ERR_CANCELLED, "interrupted while %s was read; the same command begins again", path);
}

/* ---- input -------------------------------------------------------------------------------------- */

struct dt_batch_input {
    const char *path, *each;
    bool chat;
    int64_t n_rows, number;
    int64_t n_read; /* rows given out */
    off_t size;     /* bytes, when they were counted */
    bool cut;       /* they are fewer now */
    int reason;     /* errno of reading, or 0 */
    lines lines;    /* no file: a folder */
    char **names;   /* [n_names] of the folder's files, sorted */
    size_t n_names;
    json_t *seen; /* id -> its row's number */
};

static int compare_names(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

static dt_status list_folder(dt_batch_input *in, dt_error *error) {
    DIR *folder = opendir(in->path);
    char path[PATH_BYTES];
    struct stat info;
    if (folder == NULL) {
        return fail(error, DT_ERR_IO, "%s can't be read: %s", in->path, strerror(errno));
    }
    bool good = true;
    for (const struct dirent *entry; good && (entry = readdir(folder)) != NULL;) {
        const int n = snprintf(path, sizeof path, "%s/%s", in->path, entry->d_name);
        if (entry->d_name[0] == '.' || n >= (int)sizeof path || stat(path, &info) != 0 || !S_ISREG(info.st_mode)) {
            continue;
        }
        char **grown = realloc(in->names, (in->n_names + 1) * sizeof(char *));
        in->names = grown != NULL ? grown : in->names;
        good = grown != NULL && (in->names[in->n_names] = strdup(entry->d_name)) != NULL;
        in->n_names += good ? 1 : 0;
    }
    closedir(folder);
    if (in->n_names > 0) {
        qsort(in->names, in->n_names, sizeof(char *), compare_names);
    }
    in->n_rows = (int64_t)in->n_names;
    return good ? DT_OK : no_memory(error);
}

static bool is_blank(const char *text, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (strchr(" \t\r\n", text[i]) == NULL || text[i] == 0) {
            return false;
        }
    }
    return true;
}

static dt_status count_lines(dt_batch_input *in, dt_error *error) {
    lines *l = &in->lines;
    for (ssize_t n; (n = read_line(l)) >= 0;) {
        in->n_rows += l->why == NULL && is_blank(l->line, (size_t)n) ? 0 : 1;
    }
    if (dt_interrupted || l->endless) {
        return reading_ended(l, in->path, error);
    }
    in->size = ftello(l->file);
    if (ferror(l->file) || fseek(l->file, 0, SEEK_SET) != 0) {
        return fail(error, DT_ERR_IO, "%s can't be read twice: %s; give a regular file", in->path, strerror(errno));
    }
    return DT_OK;
}

dt_status dt_batch_input_open(const char *path, const char *each, bool chat, dt_batch_input **out, dt_error *error) {
    struct stat info;
    if (stat(path, &info) != 0) {
        return fail(error, DT_ERR_IO, "%s can't be read: %s", path, strerror(errno));
    }
    if (S_ISDIR(info.st_mode) != (each != NULL)) {
        return fail(error, DT_ERR_ARGUMENT,
                    each != NULL ? "--each is for a folder of texts; %s is a file"
                                 : "%s is a folder; say what to do with each of its texts: --each \"Summarize: {text}\"",
                    path);
    }
    if (each == NULL && !S_ISREG(info.st_mode)) {
        return fail(error, DT_ERR_ARGUMENT, "%s is no regular file: jobs are read twice, to count them first; name a file with -i",
                    path);
    }
    dt_batch_input *in = calloc(1, sizeof *in);
    if (in == NULL) {
        return no_memory(error);
    }
    *in = (dt_batch_input){.path = path, .each = each, .chat = chat, .seen = json_object()};
    dt_status status;
    if (each != NULL) {
        status = list_folder(in, error);
    } else if ((in->lines.file = fopen(path, "rb")) == NULL) {
        status = fail(error, DT_ERR_IO, "%s can't be read: %s", path, strerror(errno));
    } else {
        status = count_lines(in, error);
    }
    if (status != DT_OK) {
        dt_batch_input_close(in);
        return status;
    }
    *out = in;
    return DT_OK;
}

void dt_batch_input_close(dt_batch_input *in) {
    if (in == NULL) {
        return;
    }
    if (in->lines.file != NULL) {
        fclose(in->lines.file);
    }
    for (size_t i = 0; i < in->n_names; i++) {
        free(in->names[i]);
    }
    free(in->names);
    free(in->lines.line);
    json_decref(in->seen);
    free(in);
}

int64_t dt_batch_input_rows(const dt_batch_input *input) { return input->n_rows; }

static void refuse(dt_batch_row *row, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void refuse(dt_batch_row *row, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(row->error, sizeof row->error, format, arguments);
    va_end(arguments);
    json_decref(row->body);
    row->body = NULL;
}

/* {"custom_id", "method", "url", "body"} */
static void read_openai(dt_batch_row *row, json_t *object) {
    const char *url = json_string_value(json_object_get(object, "url"));
    json_t *body = json_object_get(object, "body");
    row->form = DT_BATCH_OPENAI;
    row->id = json_incref(json_object_get(object, "custom_id"));
    row->body = json_incref(body);
    row->chat = url == NULL || strcmp(url, "/v1/chat/completions") == 0;
    if (!json_is_object(body)) {
        refuse(row, "the row has no body");
    } else if (!row->chat && strcmp(url, "/v1/completions") != 0) {
        refuse(row, "url must be /v1/chat/completions or /v1/completions, not %.100s", url);
    } else if (!json_is_string(row->id)) {
        refuse(row, "custom_id is missing, or no string");
    }
}

/* {"id", "prompt" or "messages", what else a body may hold} */
static void read_short(dt_batch_row *row, json_t *object) {
    row->form = DT_BATCH_SHORT;
    row->id = json_incref(json_object_get(object, "id"));
    row->body = json_copy(object);
    row->chat = json_object_get(object, "messages") != NULL;
    if (row->body == NULL || (!row->chat && json_object_get(object, "prompt") == NULL)) {
        refuse(row, "the row has neither a body, nor a prompt, nor messages");
    } else if (row->id == NULL) {
        refuse(row, "id is missing");
    }
}

static void check_repeated(dt_batch_input *in, dt_batch_row *row) {
    char *key = row->id != NULL ? dt_json_dump(row->id, JSON_ENCODE_ANY | JSON_COMPACT) : NULL;
    const json_t *before = key != NULL ? json_object_get(in->seen, key) : NULL;
    if (before != NULL) {
        refuse(row, "its id is that of row %lld", (long long)json_integer_value(before));
    } else if (row->id != NULL && (key == NULL || json_object_set_new(in->seen, key, json_integer(row->number)) != 0)) {
        refuse(row, "%s", no_room);
    }
    free(key);
}

static void parse_line(dt_batch_input *in, const char *line, size_t n, dt_batch_row *row) {
    json_error_t where;
    if (n >= 3 && memcmp(line, "\xEF\xBB\xBF", 3) == 0) {
        line += 3;
        n -= 3;
    }
    json_t *object = dt_json_load(line, n, 0, &where);
    if (object == NULL && json_error_code(&where) == json_error_out_of_memory) {
        refuse(row, "%s", no_room);
    } else if (!json_is_object(object)) {
        refuse(row, "the row is not a JSON object%s%.150s", object == NULL ? ": " : "", object == NULL ? where.text : "");
    } else if (json_object_get(object, "body") != NULL || json_object_get(object, "custom_id") != NULL) {
        read_openai(row, object);
    } else {
        read_short(row, object);
    }
    json_decref(object);
    check_repeated(in, row);
}

static bool next_line(dt_batch_input *in, dt_batch_row *row) {
    lines *l = &in->lines;
    ssize_t n;
    do {
        n = read_line(l);
        in->reason = ferror(l->file) ? errno : 0;
        in->cut = !l->has_end && !dt_interrupted && (ftello(l->file) < in->size || (n < 0 && in->n_read < in->n_rows));
        if (n < 0 || in->cut || in->reason != 0) { /* a row that was cut is none that could be refused */
            return false;
        }
        in->number++;
    } while (l->why == NULL && is_blank(l->line, (size_t)n));
    in->n_read++;
    *row = (dt_batch_row){.number = in->number};
    if (l->why != NULL) {
        refuse(row, "the row has %zd bytes, and %s; at most %zu are taken", n, l->why, ROW_BYTES_MAX);
    } else {
        parse_line(in, l->line, (size_t)n, row);
    }
    return true;
}

dt_status dt_batch_input_check(const dt_batch_input *in, dt_error *error) {
    if (in->reason != 0) {
        return fail(error, DT_ERR_IO, "%s can't be read to its end: %s", in->path, strerror(in->reason));
    }
    if (in->cut) {
        return fail(
            error, DT_ERR_IO,
            "%s was cut short while it was read: %lld of its %lld rows were there; with all of them, the same command goes on",
            in->path, (long long)in->n_read, (long long)in->n_rows);
    }
    return DT_OK;
}

/* The instruction with the text in its place. free(). */
static char *fill_in(const char *each, const char *text, size_t n) {
    const char *place = strstr(each, "{text}");
    const size_t before = place != NULL ? (size_t)(place - each) : strlen(each), after = place != NULL ? strlen(place + 6) : 0;
    char *out = malloc(before + n + after + 1);
    if (out != NULL) {
        memcpy(out, each, before);
        memcpy(out + before, text, n);
        memcpy(out + before + n, place != NULL ? place + 6 : "", after + 1);
    }
    return out;
}

static bool is_utf8(const char *text) {
    bool open = false;
    for (size_t n = strlen(text), bytes; n > 0; text += bytes, n -= bytes) {
        bytes = dt_character_at(text, n, &open);
        if (bytes == 0) {
            return false;
        }
    }
    return true;
}

static bool read_text(dt_batch_input *in, const char *name, dt_batch_row *row) {
    char path[PATH_BYTES];
    struct stat info;
    snprintf(path, sizeof path, "%s/%s", in->path, name);
    FILE *file = fopen(path, "rb");
    if (file == NULL || fstat(fileno(file), &info) != 0 || (uint64_t)info.st_size > ROW_BYTES_MAX) {
        refuse(row, "the file can't be read, or is larger than %zu bytes", ROW_BYTES_MAX);
        if (file != NULL) {
            fclose(file);
        }
        return false;
    }
    const size_t n = (size_t)info.st_size;
    char *bytes = malloc(n + 1);
    const bool whole = bytes != NULL && fread(bytes, 1, n, file) == n;
    const int reason = ferror(file) != 0 ? errno : 0;
    fclose(file);
    char *text = whole ? fill_in(in->each, bytes, n) : NULL;
    json_t *string = text != NULL ? json_string(text) : NULL;
    if (bytes != NULL && !whole) {
        refuse(row, "the file can't be read to its end: %s", reason != 0 ? strerror(reason) : "it was cut short meanwhile");
    } else if (text != NULL && memchr(bytes, 0, n) != NULL) {
        refuse(row, "the file holds a NUL byte");
    } else if (text != NULL && !is_utf8(text)) {
        refuse(row, "the file is not UTF-8");
    } else if (string == NULL) {
        refuse(row, "%s", no_room);
    } else {
        row->body = in->chat ? json_pack("{s:[{s:s,s:O}]}", "messages", "role", "user", "content", string)
                             : json_pack("{s:O}", "prompt", string);
        if (row->body == NULL) {
            refuse(row, "%s", no_room);
        }
    }
    json_decref(string);
    free(bytes);
    free(text);
    return row->body != NULL;
}

static bool next_file(dt_batch_input *in, dt_batch_row *row) {
    if ((size_t)in->number == in->n_names) {
        return false;
    }
    const char *name = in->names[in->number++];
    *row = (dt_batch_row){.number = in->number, .form = DT_BATCH_SHORT, .chat = in->chat, .id = json_string(name)};
    if (row->id == NULL) {
        refuse(row, "%s", is_utf8(name) ? no_room : "the file's name is not UTF-8");
        return true;
    }
    read_text(in, name, row);
    return true;
}

bool dt_batch_input_next(dt_batch_input *in, dt_batch_row *out) {
    return in->lines.file != NULL ? next_line(in, out) : next_file(in, out);
}

void dt_batch_row_free(dt_batch_row *row) {
    json_decref(row->id);
    json_decref(row->body);
    row->id = row->body = NULL;
}

/* ---- output ------------------------------------------------------------------------------------- */

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
    return json_object_set_new(o->done, key, id != NULL ? json_deep_copy(id) : json_null()) == 0 ? DT_OK : no_memory(error);
}

#define ALONE_MIN (sizeof "{\"id\":" - 1) /* bytes of a cut line that tell whose it is where there is no line before it */

/* Takes in what an earlier run wrote. *out_end: where the last whole line ends; what is behind it will be cut off, so that nothing
 * but a line that was cut may be there. *out_size: bytes read. */
static dt_status read_done(dt_batch_output *o, off_t *out_end, off_t *out_size, dt_error *error) {
    lines l = {.file = fopen(o->path, "rb")};
    dt_status status = DT_OK;
    *out_end = *out_size = 0;
    if (l.file == NULL) {
        return errno == ENOENT ? DT_OK : fail(error, DT_ERR_IO, "%s can't be read: %s", o->path, strerror(errno));
    }
    int64_t number = 1;
    for (ssize_t n; status == DT_OK && (n = read_line(&l)) >= 0; number++) {
        json_error_t where = {.line = 0};
        json_t *object = l.why == NULL && n > 0 ? dt_json_load(l.line, (size_t)n, 0, &where) : NULL;
        const bool whole = json_is_integer(json_object_get(object, "line")) && id_of(object) != NULL;
        *out_size = ftello(l.file);
        if (l.why == no_room || json_error_code(&where) == json_error_out_of_memory) {
            status = no_memory(error);
        } else if (whole && (l.has_end || begins_result(l.line, (size_t)n))) {
            status = take_done(o, object, error);
            o->lacks_end = !l.has_end;
            *out_end = *out_size;
        } else if (object != NULL || l.has_end || l.why != NULL || !begins_result(l.line, (size_t)n) ||
                   (number == 1 && (size_t)n < ALONE_MIN)) {
            status = fail(error, DT_ERR_ARGUMENT,
                          "%s is there already and holds something else, in line %lld; name another file with -o", o->path,
                          (long long)number);
        }
        json_decref(object);
    }
    if (status == DT_OK && (dt_interrupted || l.endless)) {
        status = reading_ended(&l, o->path, error);
    } else if (status == DT_OK && ferror(l.file)) {
        status = fail(error, DT_ERR_IO, "%s can't be read: %s", o->path, strerror(errno));
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
            return fail(error, DT_ERR_IO, "%s can't be written: %s", o->path, strerror(errno));
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
        return fail(error, DT_ERR_IO, "%s can't be written: %s", o->path, strerror(errno));
    }
    if (info.st_size != size) {
        return fail(error, DT_ERR_ARGUMENT, "%s was written to by something else while it was read; end that, or name another file",
                    o->path);
    }
    if (size > end && ftruncate(o->file, end) != 0) {
        return fail(error, DT_ERR_IO, "%s can't be written: %s", o->path, strerror(errno));
    }
    o->size = end;
    return o->lacks_end ? write_all(o, "\n", 1, error) : DT_OK;
}

dt_status dt_batch_output_open(const char *path, const char *input_path, const char *settings, dt_batch_output **out,
                               dt_error *error) {
    struct stat in, there, folder;
    if (stat(path, &there) == 0 && !S_ISREG(there.st_mode)) {
        return fail(error, DT_ERR_ARGUMENT,
                    "%s is no regular file: results are written to a file, from which a run that was broken off goes on; name one "
                    "with -o",
                    path);
    }
    if (stat(input_path, &in) == 0 && ((stat(path, &there) == 0 && same_file(&in, &there)) ||
                                       (S_ISDIR(in.st_mode) && folder_of(path, &folder) && same_file(&in, &folder)))) {
        return fail(error, DT_ERR_ARGUMENT, "-o names the input, or a file in it; the results need a place of their own");
    }
    dt_batch_output *o = calloc(1, sizeof *o);
    if (o == NULL) {
        return no_memory(error);
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
        return fail(error, DT_ERR_ARGUMENT,
                    "%s holds the results of another input: its line for row %lld has another id; name another file with -o",
                    o->path, (long long)row->number);
    }
    return DT_OK;
}

static dt_status check_kept(const dt_batch_output *o, dt_error *error) {
    struct stat ours, there;
    if (fstat(o->file, &ours) != 0) {
        return fail(error, DT_ERR_IO, "%s can't be looked at: %s", o->path, strerror(errno));
    }
    if (stat(o->path, &there) != 0 || !same_file(&ours, &there)) {
        return fail(error, DT_ERR_IO,
                    "%s was removed or replaced while results were written to it, and those are no longer there; the same command "
                    "computes what it lacks",
                    o->path);
    }
    if (ours.st_size != o->size) {
        return fail(error, DT_ERR_IO,
                    "%s was %s by something else while results were written to it; the same command computes what it lacks",
                    o->path, ours.st_size < o->size ? "cut short" : "written to");
    }
    return DT_OK;
}

dt_status dt_batch_output_sync(const dt_batch_output *o, dt_error *error) {
    if (fsync(o->file) != 0 && errno != EINVAL && errno != EINTR) { /* EINVAL: the place knows of no such thing */
        return fail(error, DT_ERR_IO, "%s can't be written: %s", o->path, strerror(errno));
    }
    return check_kept(o, error);
}

dt_status dt_batch_output_write(dt_batch_output *o, const dt_batch_row *row, json_t *object, dt_error *error) {
    if (object != NULL) {
        dt_json_set(&object, "line", json_integer(row->number));
        dt_json_set(&object, "settings", json_string(o->settings));
    }
    char *text = object != NULL ? dt_json_dump(object, JSON_COMPACT | JSON_REAL_PRECISION(9)) : NULL;
    json_decref(object);
    if (text == NULL) {
        return no_memory(error);
    }
    const size_t n = strlen(text) + 1;
    text[n - 1] = '\n';                      /* in place of the terminator: the line goes out in one write */
    dt_status status = check_kept(o, error); /* before: what is cut in a line must not get another behind it */
    status = status == DT_OK ? write_all(o, text, n, error) : status;
    free(text);
    return status;
}
