/*
 * The rows of a batch. See batch_input.h.
 */
#define _POSIX_C_SOURCE 200809L
#include "batch_input.h"
#include "batch_lines.h"
#include "fail.h"
#include "json_parts.h"
#include "run.h"
#include "utf8.h"

#include <dirent.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define PATH_BYTES 4096

struct dt_batch_input {
    const char *path, *each;
    bool chat;
    int64_t n_rows, number;
    int64_t n_read;       /* rows given out */
    off_t size;           /* bytes, when they were counted */
    bool cut;             /* they are fewer now */
    int reason;           /* errno of reading, or 0 */
    dt_batch_lines lines; /* no file: a folder */
    char **names;         /* [n_names] of the folder's files, sorted */
    size_t n_names;
    json_t *seen; /* id -> its row's number */
};

static int compare_names(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

static dt_status list_folder(dt_batch_input *in, dt_error *error) {
    DIR *folder = opendir(in->path);
    char path[PATH_BYTES];
    struct stat info;
    if (folder == NULL) {
        return dt_app_fail(error, DT_ERR_IO, "%s can't be read: %s", in->path, strerror(errno));
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
    return good ? DT_OK : dt_batch_no_memory(error);
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
    dt_batch_lines *l = &in->lines;
    for (ssize_t n; (n = dt_batch_read_line(l)) >= 0;) {
        in->n_rows += l->why == NULL && is_blank(l->line, (size_t)n) ? 0 : 1;
    }
    if (dt_interrupted || l->endless) {
        return dt_batch_reading_ended(l, in->path, error);
    }
    in->size = ftello(l->file);
    if (ferror(l->file) || fseek(l->file, 0, SEEK_SET) != 0) {
        return dt_app_fail(error, DT_ERR_IO, "%s can't be read twice: %s; give a regular file", in->path, strerror(errno));
    }
    return DT_OK;
}

dt_status dt_batch_input_open(const char *path, const char *each, bool chat, dt_batch_input **out, dt_error *error) {
    struct stat info;
    if (stat(path, &info) != 0) {
        if (strcmp(path, "-") == 0) {
            return dt_app_fail(error, DT_ERR_ARGUMENT,
                               "jobs are read twice, to count them first, so not from stdin; name a file with -i");
        }
        return dt_app_fail(error, DT_ERR_IO, "%s can't be read: %s", path, strerror(errno));
    }
    if (S_ISDIR(info.st_mode) != (each != NULL)) {
        return dt_app_fail(error, DT_ERR_ARGUMENT,
                           each != NULL ? "--each is for a folder of texts; %s is a file"
                                        : "%s is a folder; say what to do with each of its texts: --each \"Summarize: {text}\"",
                           path);
    }
    if (each == NULL && !S_ISREG(info.st_mode)) {
        return dt_app_fail(error, DT_ERR_ARGUMENT,
                           "%s is no regular file: jobs are read twice, to count them first; name a file with -i", path);
    }
    dt_batch_input *in = calloc(1, sizeof *in);
    if (in == NULL) {
        return dt_batch_no_memory(error);
    }
    *in = (dt_batch_input){.path = path, .each = each, .chat = chat, .seen = json_object()};
    dt_status status;
    if (each != NULL) {
        status = list_folder(in, error);
    } else if ((in->lines.file = fopen(path, "rb")) == NULL) {
        status = dt_app_fail(error, DT_ERR_IO, "%s can't be read: %s", path, strerror(errno));
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
        refuse(row, "its id is that of row %lld; give each row its own", (long long)json_integer_value(before));
    } else if (row->id != NULL && (key == NULL || json_object_set_new(in->seen, key, json_integer(row->number)) != 0)) {
        refuse(row, "%s", dt_batch_no_room);
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
        refuse(row, "%s", dt_batch_no_room);
    } else if (object == NULL && dt_json_not_taken(&where) != NULL) {
        refuse(row, "column %d of the row: %s", where.column, dt_json_not_taken(&where));
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
    dt_batch_lines *l = &in->lines;
    ssize_t n;
    do {
        n = dt_batch_read_line(l);
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
        refuse(row, "the row has %zd bytes, and %s; at most %zu are taken", n, l->why, DT_BATCH_ROW_BYTES_MAX);
    } else {
        parse_line(in, l->line, (size_t)n, row);
    }
    return true;
}

dt_status dt_batch_input_check(const dt_batch_input *in, dt_error *error) {
    if (in->reason != 0) {
        return dt_app_fail(error, DT_ERR_IO, "%s can't be read to its end: %s", in->path, strerror(in->reason));
    }
    if (in->cut) {
        return dt_app_fail(
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
    if (file == NULL || fstat(fileno(file), &info) != 0 || (uint64_t)info.st_size > DT_BATCH_ROW_BYTES_MAX) {
        refuse(row, "the file can't be read, or is larger than %zu bytes", DT_BATCH_ROW_BYTES_MAX);
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
        refuse(row, "%s", dt_batch_no_room);
    } else {
        row->body = in->chat ? json_pack("{s:[{s:s,s:O}]}", "messages", "role", "user", "content", string)
                             : json_pack("{s:O}", "prompt", string);
        if (row->body == NULL) {
            refuse(row, "%s", dt_batch_no_room);
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
        refuse(row, "%s", is_utf8(name) ? dt_batch_no_room : "the file's name is not UTF-8");
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
