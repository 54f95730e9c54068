/*
 * Opening GGUF files: one file, or all parts of a split model given the first, and typed look-ups in their metadata.
 *
 * Every part goes through dt_gguf_scan before gguf.h reads it. Metadata is that of the first part; tensors of all parts are
 * gathered into one table, sorted by name.
 *
 * Invariant: libllama, which opens the same files for their vocabulary, finds the keys of a split (split.no, split.count,
 * split.tensors.count) in the types that it reads without checking.
 */
#include "weights/ggml_calls.h"
#include "weights/gguf_file.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define SPLIT_NO "split.no"
#define SPLIT_COUNT "split.count"
#define SPLIT_TENSORS "split.tensors.count"
#define SPLIT_SUFFIX_LENGTH 20 /* "-00001-of-00003.gguf" */
#define MAX_PARTS 1024

/* ---- one part ----------------------------------------------------------------------------------- */

static dt_status part_open(dt_gguf_part *part, const char *path, dt_error *error) {
    dt_status status = dt_gguf_scan(path, &part->bytes, error);
    if (status) {
        return status;
    }
    part->path = strdup(path);
    if (!part->path) {
        return dt_fail_memory(error, strlen(path) + 1, "a path");
    }
    part->meta = dt_ggml_read_metadata(path);
    if (!part->meta) {
        return dt_fail(error, DT_ERR_FORMAT,
                       "%s cannot be read as GGUF: memory ran out, or the file is damaged (the debug log says which)", path);
    }
    return DT_OK;
}

/* The value of a u16 key, or `missing`. gguf.h aborts on a wrong type, libllama on any type but u16. */
static dt_status split_key(const dt_gguf_part *part, const char *key, int32_t missing, int32_t *out, dt_error *error) {
    const int64_t id = gguf_find_key(part->meta, key);
    *out = missing;
    if (id < 0) {
        return DT_OK;
    }
    if (gguf_get_kv_type(part->meta, id) != GGUF_TYPE_UINT16) {
        return dt_fail(error, DT_ERR_FORMAT, "%s: key %s must be a u16; split the model again", part->path, key);
    }
    *out = gguf_get_val_u16(part->meta, id);
    return DT_OK;
}

/* ---- splits ------------------------------------------------------------------------------------- */

/* The length of PREFIX in PREFIX-00001-of-00003.gguf, or -1 when `path` is not of this form; *no counts from 0. */
static int split_prefix(const char *path, int32_t *no, int32_t *count) {
    const size_t length = strlen(path);
    int end = 0;
    if (length < SPLIT_SUFFIX_LENGTH) {
        return -1;
    }
    const size_t prefix = length - SPLIT_SUFFIX_LENGTH;
    if (sscanf(path + prefix, "-%5d-of-%5d.gguf%n", no, count, &end) != 2 || end != SPLIT_SUFFIX_LENGTH) {
        return -1;
    }
    *no -= 1;
    return (int)prefix;
}

/* Part `no` of `count` beside `path`, whose prefix has `prefix` bytes; free() it. NULL when out of memory. */
static char *split_path(const char *path, int prefix, int32_t no, int32_t count) {
    const size_t capacity = (size_t)prefix + 32;
    char *out = malloc(capacity);
    if (out) {
        snprintf(out, capacity, "%.*s-%05d-of-%05d.gguf", prefix, path, (int)no + 1, (int)count);
    }
    return out;
}

static const char *file_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* Checks that the file given is the first part and named so that the others can be found; *out_prefix as in split_prefix. */
static dt_status check_first_part(const dt_gguf_part *part, int32_t no, int32_t count, int *out_prefix, dt_error *error) {
    int32_t named_no = 0, named_count = 0;
    const int prefix = split_prefix(part->path, &named_no, &named_count);
    if (count > MAX_PARTS) {
        return dt_fail(error, DT_ERR_UNSUPPORTED, "%s says it is one of %d parts; at most %d are read", part->path, (int)count,
                       MAX_PARTS);
    }
    if (no != 0 && prefix >= 0 && named_no == no && named_count == count) {
        return dt_fail(error, DT_ERR_FORMAT, "%s is part %d of %d of a split model; open the first part, %.*s-00001-of-%05d.gguf",
                       part->path, (int)no + 1, (int)count, prefix, part->path, (int)count);
    }
    if (no != 0) {
        return dt_fail(error, DT_ERR_FORMAT,
                       "%s holds part %d of %d of a split model; name the parts as they were (-%05d-of-%05d.gguf for this one) and "
                       "open the first",
                       part->path, (int)no + 1, (int)count, (int)no + 1, (int)count);
    }
    if (prefix < 0 || named_no != 0 || named_count != count) {
        return dt_fail(error, DT_ERR_FORMAT,
                       "%s is the first of %d parts of a split model, but its name does not end in -00001-of-%05d.gguf, by which "
                       "the others are "
                       "found; name the parts as they were",
                       part->path, (int)count, (int)count);
    }
    *out_prefix = prefix;
    return DT_OK;
}

static dt_status open_other_part(dt_gguf *gguf, int32_t no, int32_t count, const char *path, dt_error *error) {
    const char *first = gguf->parts[0].path;
    dt_gguf_part *part = &gguf->parts[no];
    struct stat info;
    if (stat(path, &info) != 0) {
        return dt_fail(error, DT_ERR_IO, "part %d of %d of the model is missing: put %s beside %s", (int)no + 1, (int)count, path,
                       file_name(first));
    }
    dt_status status = part_open(part, path, error);
    int32_t own_no = 0, own_count = 0;
    if (!status) {
        status = split_key(part, SPLIT_NO, -1, &own_no, error);
    }
    if (!status) {
        status = split_key(part, SPLIT_COUNT, -1, &own_count, error);
    }
    if (status) {
        return status;
    }
    if (own_no < 0 || own_count < 0) {
        return dt_fail(error, DT_ERR_FORMAT, "%s should be part %d of %s but is not part of a split model", path, (int)no + 1,
                       first);
    }
    if (own_no != no || own_count != count) {
        return dt_fail(error, DT_ERR_FORMAT,
                       "%s holds part %d of %d, not part %d of %d as its name says; name the parts as they were", path,
                       (int)own_no + 1, (int)own_count, (int)no + 1, (int)count);
    }
    return DT_OK;
}

static dt_status open_other_parts(dt_gguf *gguf, dt_error *error) {
    int32_t no = 0, count = 0;
    int prefix = 0;
    dt_status status = split_key(&gguf->parts[0], SPLIT_NO, 0, &no, error);
    if (!status) {
        status = split_key(&gguf->parts[0], SPLIT_COUNT, 0, &count, error);
    }
    if (status || count <= 1) {
        return status;
    }
    status = check_first_part(&gguf->parts[0], no, count, &prefix, error);
    if (status) {
        return status;
    }
    dt_gguf_part *parts = realloc(gguf->parts, (size_t)count * sizeof *parts);
    if (!parts) {
        return dt_fail_memory(error, (size_t)count * sizeof *parts, "the parts of a split model");
    }
    memset(parts + 1, 0, (size_t)(count - 1) * sizeof *parts);
    gguf->parts = parts;
    gguf->n_parts = count;
    for (int32_t i = 1; i < count && !status; i++) {
        char *path = split_path(parts[0].path, prefix, i, count);
        status = path ? open_other_part(gguf, i, count, path, error) : dt_fail_memory(error, (size_t)prefix, "a path");
        free(path);
    }
    return status;
}

/* ---- the table of tensors ----------------------------------------------------------------------- */

static int compare_tensors(const void *a, const void *b) {
    const dt_gguf_tensor *x = a, *y = b;
    const int order = strcmp(x->name, y->name);
    return order ? order : (x->part > y->part) - (x->part < y->part);
}

static dt_status check_tensor_count(const dt_gguf *gguf, dt_error *error) {
    int32_t expected = 0;
    const int64_t id = gguf_find_key(gguf->parts[0].meta, SPLIT_TENSORS);
    if (gguf->n_parts == 1) {
        return DT_OK;
    }
    if (id < 0 || gguf_get_kv_type(gguf->parts[0].meta, id) != GGUF_TYPE_INT32) {
        return dt_fail(error, DT_ERR_FORMAT, "%s: key " SPLIT_TENSORS " must be an i32; split the model again",
                       gguf->parts[0].path);
    }
    expected = gguf_get_val_i32(gguf->parts[0].meta, id);
    if (gguf->n_tensors != expected) {
        return dt_fail(error, DT_ERR_FORMAT,
                       "the %d parts beside %s hold %" PRId64
                       " tensors together, not %d: one of them belongs to another split; get the parts again",
                       (int)gguf->n_parts, gguf->parts[0].path, gguf->n_tensors, (int)expected);
    }
    return DT_OK;
}

static dt_status gather_tensors(dt_gguf *gguf, dt_error *error) {
    int64_t n = 0;
    for (int32_t p = 0; p < gguf->n_parts; p++) {
        n += gguf_get_n_tensors(gguf->parts[p].meta);
    }
    gguf->tensors = malloc((size_t)DT_MAX(n, 1) * sizeof *gguf->tensors);
    if (!gguf->tensors) {
        return dt_fail_memory(error, (size_t)n * sizeof *gguf->tensors, "the table of tensors");
    }
    for (int32_t p = 0; p < gguf->n_parts; p++) {
        const struct gguf_context *meta = gguf->parts[p].meta;
        for (int64_t i = 0; i < gguf_get_n_tensors(meta); i++) {
            dt_gguf_tensor *t = &gguf->tensors[gguf->n_tensors++];
            t->name = gguf_get_tensor_name(meta, i);
            t->part = p;
            t->type = gguf_get_tensor_type(meta, i);
            memcpy(t->ne, gguf_get_tensor_ne(meta, i), sizeof t->ne);
            t->offset = gguf_get_data_offset(meta) + gguf_get_tensor_offset(meta, i);
            t->bytes = gguf_get_tensor_size(meta, i);
            if (t->offset > gguf->parts[p].bytes || t->bytes > gguf->parts[p].bytes - t->offset) {
                return dt_fail(error, DT_ERR_FORMAT, "%s changed while it was read: tensor '%s' ends outside it",
                               gguf->parts[p].path, t->name);
            }
        }
    }
    qsort(gguf->tensors, (size_t)n, sizeof *gguf->tensors, compare_tensors);
    for (int64_t i = 1; i < n; i++) {
        const dt_gguf_tensor *t = &gguf->tensors[i];
        if (strcmp(t[-1].name, t->name) == 0) {
            return dt_fail(error, DT_ERR_FORMAT,
                           "tensor '%s' is in %s and again in %s: one of them belongs to another split; get the parts again",
                           t->name, gguf->parts[t[-1].part].path, gguf->parts[t->part].path);
        }
    }
    return check_tensor_count(gguf, error);
}

dt_status dt_gguf_open(const char *path, dt_gguf **out, dt_error *error) {
    dt_gguf *gguf = calloc(1, sizeof *gguf);
    *out = NULL;
    if (!gguf) {
        return dt_fail_memory(error, sizeof *gguf, "a GGUF file");
    }
    gguf->parts = calloc(1, sizeof *gguf->parts);
    if (!gguf->parts) {
        free(gguf);
        return dt_fail_memory(error, sizeof *gguf->parts, "a GGUF file");
    }
    gguf->n_parts = 1;
    dt_status status = part_open(&gguf->parts[0], path, error);
    if (!status) {
        status = open_other_parts(gguf, error);
    }
    if (!status) {
        status = gather_tensors(gguf, error);
    }
    if (status) {
        dt_gguf_free(gguf);
        return status;
    }
    *out = gguf;
    return DT_OK;
}

void dt_gguf_free(dt_gguf *gguf) {
    if (!gguf) {
        return;
    }
    for (int32_t i = 0; i < gguf->n_parts; i++) {
        free(gguf->parts[i].path);
        if (gguf->parts[i].meta) {
            gguf_free(gguf->parts[i].meta);
        }
    }
    free(gguf->parts);
    free(gguf->tensors);
    free(gguf);
}

const char *dt_gguf_path(const dt_gguf *gguf) { return gguf->parts[0].path; }

const dt_gguf_tensor *dt_gguf_find(const dt_gguf *gguf, const char *name) {
    const dt_gguf_tensor *base = gguf->tensors;
    int64_t low = 0, high = gguf->n_tensors;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        const int order = strcmp(name, base[middle].name);
        if (order == 0) {
            return &base[middle];
        }
        if (order < 0) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return NULL;
}

bool dt_gguf_tensor_shape(const dt_gguf *gguf, const char *name, int64_t ne[4]) {
    const dt_gguf_tensor *tensor = dt_gguf_find(gguf, name);
    if (tensor) {
        memcpy(ne, tensor->ne, sizeof tensor->ne);
    }
    return tensor != NULL;
}

/* ---- look-ups ----------------------------------------------------------------------------------- */

static dt_status fail_type(const dt_gguf *gguf, int64_t id, const char *wanted, dt_error *error) {
    const struct gguf_context *meta = gguf->parts[0].meta;
    const enum gguf_type type = gguf_get_kv_type(meta, id);
    return dt_fail(error, DT_ERR_FORMAT, "%s: key %s is %s%s, not %s", dt_gguf_path(gguf), gguf_get_key(meta, id),
                   type == GGUF_TYPE_ARRAY ? "an array of " : "of type ",
                   gguf_type_name(type == GGUF_TYPE_ARRAY ? gguf_get_arr_type(meta, id) : type), wanted);
}

/* Element i of a value or array whose elements have `type`, into *out; false when it is not what the look-up wants. */
typedef bool (*read_fn)(enum gguf_type type, const void *data, int64_t i, void *out);

/* What u32 can hold. */
static bool read_u32(enum gguf_type type, const void *data, int64_t i, void *out) {
    int64_t value = -1;
    switch (type) {
    case GGUF_TYPE_UINT8:
        value = ((const uint8_t *)data)[i];
        break;
    case GGUF_TYPE_INT8:
        value = ((const int8_t *)data)[i]; /* NOLINT(bugprone-signed-char-misuse,cert-str34-c): a number */
        break;
    case GGUF_TYPE_UINT16:
        value = ((const uint16_t *)data)[i];
        break;
    case GGUF_TYPE_INT16:
        value = ((const int16_t *)data)[i];
        break;
    case GGUF_TYPE_UINT32:
        value = ((const uint32_t *)data)[i];
        break;
    case GGUF_TYPE_INT32:
        value = ((const int32_t *)data)[i];
        break;
    case GGUF_TYPE_UINT64:
        value = ((const uint64_t *)data)[i] > UINT32_MAX ? -1 : (int64_t)((const uint64_t *)data)[i];
        break;
    case GGUF_TYPE_INT64:
        value = ((const int64_t *)data)[i];
        break;
    default:
        break;
    }
    if (value < 0 || value > UINT32_MAX) {
        return false;
    }
    *(uint32_t *)out = (uint32_t)value;
    return true;
}

/* Arrays of flags count as 0 and 1. */
static bool read_u32_or_bool(enum gguf_type type, const void *data, int64_t i, void *out) {
    if (type != GGUF_TYPE_BOOL) {
        return read_u32(type, data, i, out);
    }
    *(uint32_t *)out = ((const int8_t *)data)[i] != 0;
    return true;
}

static bool read_f32(enum gguf_type type, const void *data, int64_t i, void *out) {
    float *value = out;
    if (type == GGUF_TYPE_FLOAT32) {
        *value = ((const float *)data)[i];
    } else if (type == GGUF_TYPE_FLOAT64) {
        *value = (float)((const double *)data)[i];
    } else {
        return false;
    }
    return dt_is_finite(*value);
}

static bool read_bool(enum gguf_type type, const void *data, int64_t i, void *out) {
    *(bool *)out = type == GGUF_TYPE_BOOL && ((const int8_t *)data)[i] != 0;
    return type == GGUF_TYPE_BOOL;
}

/* *id: of the key in the first part, -1 when it is missing and not required. */
static dt_status find_key(const dt_gguf *gguf, const char *key, bool required, int64_t *id, dt_error *error) {
    *id = gguf_find_key(gguf->parts[0].meta, key);
    if (*id < 0 && required) {
        return dt_fail(error, DT_ERR_FORMAT, "%s lacks the key %s; convert the model again", dt_gguf_path(gguf), key);
    }
    return DT_OK;
}

/* Reads the value of `key`, or with n > 0 n elements of an array (a scalar fills them all), each out_bytes wide. */
static dt_status look_up(const dt_gguf *gguf, const char *key, bool required, int32_t n, const char *wanted, read_fn read,
                         size_t out_bytes, void *out, dt_error *error) {
    const struct gguf_context *meta = gguf->parts[0].meta;
    int64_t id;
    const dt_status status = find_key(gguf, key, required, &id, error);
    if (status || id < 0) {
        return status;
    }
    enum gguf_type type = gguf_get_kv_type(meta, id);
    const bool is_array = type == GGUF_TYPE_ARRAY;
    type = is_array ? gguf_get_arr_type(meta, id) : type;
    if ((is_array && n == 0) || type == GGUF_TYPE_STRING) {
        return fail_type(gguf, id, wanted, error);
    }
    if (is_array && gguf_get_arr_n(meta, id) < (size_t)n) {
        return dt_fail(error, DT_ERR_FORMAT, "%s: key %s has %zu elements where %d are needed", dt_gguf_path(gguf), key,
                       gguf_get_arr_n(meta, id), (int)n);
    }
    const void *data = is_array ? gguf_get_arr_data(meta, id) : gguf_get_val_data(meta, id);
    for (int32_t i = 0; i < DT_MAX(n, 1); i++) {
        if (!read(type, data, is_array ? i : 0, (char *)out + (size_t)i * out_bytes)) {
            return fail_type(gguf, id, wanted, error);
        }
    }
    return DT_OK;
}

dt_status dt_gguf_u32(const dt_gguf *gguf, const char *key, bool required, uint32_t *out, dt_error *error) {
    return look_up(gguf, key, required, 0, "a whole number from 0 to 4294967295", read_u32, sizeof *out, out, error);
}

dt_status dt_gguf_f32(const dt_gguf *gguf, const char *key, bool required, float *out, dt_error *error) {
    return look_up(gguf, key, required, 0, "a finite f32 number", read_f32, sizeof *out, out, error);
}

dt_status dt_gguf_bool(const dt_gguf *gguf, const char *key, bool required, bool *out, dt_error *error) {
    return look_up(gguf, key, required, 0, "a bool", read_bool, sizeof *out, out, error);
}

dt_status dt_gguf_u32_array(const dt_gguf *gguf, const char *key, bool required, uint32_t *out, int32_t n, dt_error *error) {
    return look_up(gguf, key, required, n, "whole numbers from 0 to 4294967295", read_u32_or_bool, sizeof *out, out, error);
}

dt_status dt_gguf_f32_array(const dt_gguf *gguf, const char *key, bool required, float *out, int32_t n, dt_error *error) {
    return look_up(gguf, key, required, n, "finite f32 numbers", read_f32, sizeof *out, out, error);
}

dt_status dt_gguf_string(const dt_gguf *gguf, const char *key, bool required, const char **out, dt_error *error) {
    const struct gguf_context *meta = gguf->parts[0].meta;
    int64_t id;
    const dt_status status = find_key(gguf, key, required, &id, error);
    if (status || id < 0) {
        return status;
    }
    if (gguf_get_kv_type(meta, id) != GGUF_TYPE_STRING) {
        return fail_type(gguf, id, "a string", error);
    }
    *out = gguf_get_val_str(meta, id);
    return DT_OK;
}

int64_t dt_gguf_array_length(const dt_gguf *gguf, const char *key) {
    const struct gguf_context *meta = gguf->parts[0].meta;
    const int64_t id = gguf_find_key(meta, key);
    if (id < 0 || gguf_get_kv_type(meta, id) != GGUF_TYPE_ARRAY) {
        return -1;
    }
    return (int64_t)gguf_get_arr_n(meta, id);
}

bool dt_gguf_has_key(const dt_gguf *gguf, const char *key) { return gguf_find_key(gguf->parts[0].meta, key) >= 0; }

dt_status dt_gguf_read(const dt_gguf *gguf, const dt_gguf_tensor *tensor, int file, uint64_t at, uint64_t n_bytes, void *out,
                       dt_error *error) {
    uint64_t done = 0;
    while (done < n_bytes) {
        const ssize_t n =
            pread(file, (char *)out + done, (size_t)DT_MIN(n_bytes - done, (uint64_t)1 << 30), (off_t)(tensor->offset + at + done));
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            return dt_fail(error, DT_ERR_IO, "cannot read tensor '%s' of %s: %s", tensor->name, gguf->parts[tensor->part].path,
                           n < 0 ? strerror(errno) : "the file became shorter");
        }
        done += (uint64_t)n;
    }
    return DT_OK;
}
