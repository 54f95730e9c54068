/*
 * The first look at a file somebody calls a model: says what is wrong with it before gguf.h sees it.
 *
 * gguf.h allocates what lengths in the file ask for, throws C++ exceptions when that fails, and reports problems only as log
 * lines without the file's name. So the metadata is walked here first, on the mapped bytes.
 *
 * Invariant: no byte is read at or past `size`, and no count from the file is used before it was compared with the bytes that
 * are left for it.
 */
#include "base/file_map.h"
#include "weights/gguf_file.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Metadata of the largest vocabularies in use takes about 20 MB; gguf.h needs up to ten times the metadata's size. */
#define MAX_METADATA_BYTES ((uint64_t)256 << 20)
#define MAX_TENSORS ((uint64_t)1 << 18)
#define MAX_ALIGNMENT ((uint32_t)1 << 20)
#define MIN_KEY_BYTES 13    /* length, type, one byte of value */
#define MIN_TENSOR_BYTES 32 /* length, dimensions, one of them, type, offset */

typedef struct text {
    const char *bytes;
    uint64_t length;
} text;

typedef struct scan {
    const char *path;
    const unsigned char *data;
    uint64_t size; /* of the file */
    uint64_t at;
    uint32_t alignment;
    bool is_short; /* a read went past the end or the limit of metadata */
    dt_error *error;
} scan;

static uint64_t left(const scan *s) {
    return DT_MIN(s->size, MAX_METADATA_BYTES) - DT_MIN(s->at, DT_MIN(s->size, MAX_METADATA_BYTES));
}

static const unsigned char *take(scan *s, uint64_t n) {
    if (n > left(s)) {
        s->is_short = true;
        return NULL;
    }
    const unsigned char *bytes = s->data + s->at;
    s->at += n;
    return bytes;
}

/* 0 past the end; the caller looks at is_short. */
static uint32_t take_u32(scan *s) {
    uint32_t value = 0;
    const unsigned char *bytes = take(s, sizeof value);
    if (bytes) {
        memcpy(&value, bytes, sizeof value);
    }
    return value;
}

static uint64_t take_u64(scan *s) {
    uint64_t value = 0;
    const unsigned char *bytes = take(s, sizeof value);
    if (bytes) {
        memcpy(&value, bytes, sizeof value);
    }
    return value;
}

static text take_text(scan *s) {
    text t = {NULL, take_u64(s)};
    t.bytes = (const char *)take(s, t.length);
    return t;
}

static dt_status fail_short(const scan *s) {
    if (s->size > MAX_METADATA_BYTES) {
        return dt_fail(s->error, DT_ERR_FORMAT,
                       "%s is damaged: its metadata asks for more than %" PRIu64 " MiB; get the file again", s->path,
                       MAX_METADATA_BYTES >> 20);
    }
    return dt_fail(s->error, DT_ERR_FORMAT,
                   "%s is cut off inside its metadata or damaged: it has only %" PRIu64 " bytes; get the file again", s->path,
                   s->size);
}

static int compare_text(const void *a, const void *b) {
    const text *x = a, *y = b;
    const int order = memcmp(x->bytes, y->bytes, DT_MIN(x->length, y->length));
    if (order) {
        return order;
    }
    return x->length < y->length ? -1 : x->length > y->length;
}

/* Sorts `texts`; fails naming the first that occurs twice. */
static dt_status check_unique(scan *s, text *texts, uint64_t n, const char *what) {
    if (n == 0) {
        return DT_OK;
    }
    qsort(texts, (size_t)n, sizeof *texts, compare_text);
    for (uint64_t i = 1; i < n; i++) {
        if (compare_text(&texts[i - 1], &texts[i]) == 0) {
            return dt_fail(s->error, DT_ERR_FORMAT, "%s is damaged: it has two %s named '%.*s'", s->path, what,
                           (int)DT_MIN(texts[i].length, 64), texts[i].bytes);
        }
    }
    return DT_OK;
}

/* Bytes of one value of a fixed-size type, 0 for strings, arrays and unknown types. */
static uint64_t value_bytes(uint32_t type) {
    switch (type) {
    case GGUF_TYPE_UINT8:
    case GGUF_TYPE_INT8:
    case GGUF_TYPE_BOOL:
        return 1;
    case GGUF_TYPE_UINT16:
    case GGUF_TYPE_INT16:
        return 2;
    case GGUF_TYPE_UINT32:
    case GGUF_TYPE_INT32:
    case GGUF_TYPE_FLOAT32:
        return 4;
    case GGUF_TYPE_UINT64:
    case GGUF_TYPE_INT64:
    case GGUF_TYPE_FLOAT64:
        return 8;
    default:
        return 0;
    }
}

static dt_status scan_alignment(scan *s, uint32_t type) {
    if (type != GGUF_TYPE_UINT32) {
        return dt_fail(s->error, DT_ERR_FORMAT, "%s: key general.alignment must be a u32", s->path);
    }
    const uint32_t alignment = take_u32(s);
    if (!s->is_short && (alignment == 0 || (alignment & (alignment - 1)) != 0 || alignment > MAX_ALIGNMENT)) {
        return dt_fail(s->error, DT_ERR_FORMAT, "%s: general.alignment is %" PRIu32 ", which is not a power of two up to %" PRIu32,
                       s->path, alignment, MAX_ALIGNMENT);
    }
    s->alignment = alignment;
    return s->is_short ? fail_short(s) : DT_OK;
}

static dt_status scan_key(scan *s, text *out_key) {
    const text key = take_text(s);
    uint32_t type = take_u32(s);
    uint64_t n = 1;
    if (s->is_short) {
        return fail_short(s);
    }
    if (key.length == 0) {
        return dt_fail(s->error, DT_ERR_FORMAT, "%s is damaged: it has a key without a name", s->path);
    }
    assert(key.bytes != NULL); /* it is not short */
    *out_key = key;
    if (key.length == strlen(GGUF_KEY_GENERAL_ALIGNMENT) && memcmp(key.bytes, GGUF_KEY_GENERAL_ALIGNMENT, key.length) == 0) {
        return scan_alignment(s, type);
    }
    if (type == GGUF_TYPE_ARRAY) {
        type = take_u32(s);
        n = take_u64(s);
    }
    if (type == GGUF_TYPE_STRING) {
        if (n > left(s) / sizeof(uint64_t)) {
            s->is_short = true;
        }
        for (uint64_t i = 0; i < n && !s->is_short; i++) {
            take_text(s);
        }
    } else if (value_bytes(type) != 0) {
        if (n > left(s) / value_bytes(type)) {
            s->is_short = true;
        } else {
            take(s, n * value_bytes(type));
        }
    } else if (!s->is_short) {
        return dt_fail(s->error, DT_ERR_FORMAT, "%s is damaged: key '%.*s' has a value of the unknown type %" PRIu32, s->path,
                       (int)DT_MIN(key.length, 64), key.bytes, type);
    }
    return s->is_short ? fail_short(s) : DT_OK;
}

static dt_status scan_keys(scan *s, uint64_t n) {
    if (n > left(s) / MIN_KEY_BYTES) {
        return fail_short(s);
    }
    text *keys = malloc((size_t)DT_MAX(n, 1) * sizeof *keys);
    if (!keys) {
        return dt_fail_memory(s->error, (size_t)n * sizeof *keys, "the keys of a GGUF file");
    }
    dt_status status = DT_OK;
    for (uint64_t i = 0; i < n && !status; i++) {
        status = scan_key(s, &keys[i]);
    }
    if (!status) {
        status = check_unique(s, keys, n, "keys");
    }
    free(keys);
    return status;
}

/* One tensor's shape and type; *out_bytes is the size of its data. */
static dt_status scan_shape(scan *s, const text *name, uint64_t *out_bytes) {
    const int name_length = (int)name->length;
    const uint32_t n_dims = take_u32(s);
    if (!s->is_short && (n_dims == 0 || n_dims > GGML_MAX_DIMS)) {
        return dt_fail(s->error, DT_ERR_FORMAT, "%s is damaged: tensor '%.*s' has %" PRIu32 " dimensions, not 1 to %d", s->path,
                       name_length, name->bytes, n_dims, GGML_MAX_DIMS);
    }
    uint64_t n_elements = 1, row = 0;
    for (uint32_t i = 0; i < n_dims && !s->is_short; i++) {
        const uint64_t ne = take_u64(s);
        if (s->is_short) {
            break;
        }
        if (ne == 0 || ne > (uint64_t)INT64_MAX / n_elements) {
            return dt_fail(s->error, DT_ERR_FORMAT, "%s is damaged: dimension %" PRIu32 " of tensor '%.*s' is %" PRIu64, s->path, i,
                           name_length, name->bytes, ne);
        }
        n_elements *= ne;
        row = i == 0 ? ne : row;
    }
    const uint32_t type = take_u32(s);
    if (s->is_short) {
        return fail_short(s);
    }
    /* ggml keeps the numbers of types it dropped, with a block size of 0 */
    if (type >= GGML_TYPE_COUNT || ggml_blck_size((enum ggml_type)type) <= 0) {
        return dt_fail(s->error, DT_ERR_UNSUPPORTED,
                       "%s: tensor '%.*s' has type number %" PRIu32 ", which this version does not know; quantize the model again",
                       s->path, name_length, name->bytes, type);
    }
    const uint64_t block = (uint64_t)ggml_blck_size((enum ggml_type)type);
    if (row % block != 0) {
        return dt_fail(s->error, DT_ERR_FORMAT,
                       "%s is damaged: rows of tensor '%.*s' have %" PRIu64 " elements, no multiple of %s's %" PRIu64, s->path,
                       name_length, name->bytes, row, ggml_type_name((enum ggml_type)type), block);
    }
    if (n_elements / block > (uint64_t)INT64_MAX / ggml_type_size((enum ggml_type)type)) {
        return dt_fail(s->error, DT_ERR_FORMAT, "%s is damaged: tensor '%.*s' is impossibly large", s->path, name_length,
                       name->bytes);
    }
    *out_bytes = n_elements / block * ggml_type_size((enum ggml_type)type);
    return DT_OK;
}

/* *data_bytes: where the data of the tensors so far ends, padded, from the start of the data; *data_end: the same unpadded. */
static dt_status scan_tensor(scan *s, text *out_name, uint64_t *data_bytes, uint64_t *data_end) {
    const text name = take_text(s);
    if (s->is_short) {
        return fail_short(s);
    }
    if (name.length == 0 || name.length >= GGML_MAX_NAME) {
        return dt_fail(s->error, DT_ERR_FORMAT, "%s is damaged: a tensor's name has %" PRIu64 " bytes, not 1 to %d", s->path,
                       name.length, GGML_MAX_NAME - 1);
    }
    uint64_t bytes = 0;
    const dt_status status = scan_shape(s, &name, &bytes);
    if (status) {
        return status;
    }
    const uint64_t offset = take_u64(s);
    if (s->is_short) {
        return fail_short(s);
    }
    if (offset != *data_bytes) {
        return dt_fail(s->error, DT_ERR_FORMAT, "%s is damaged: tensor '%.*s' begins at %" PRIu64 " of the data, not at %" PRIu64,
                       s->path, (int)name.length, name.bytes, offset, *data_bytes);
    }
    if (bytes > (uint64_t)INT64_MAX - s->alignment - offset) {
        return dt_fail(s->error, DT_ERR_FORMAT, "%s is damaged: tensor '%.*s' is impossibly large", s->path, (int)name.length,
                       name.bytes);
    }
    *data_end = offset + bytes;
    *data_bytes = DT_ROUND_UP(*data_end, (uint64_t)s->alignment);
    *out_name = name;
    return DT_OK;
}

static dt_status scan_tensors(scan *s, uint64_t n) {
    if (n > left(s) / MIN_TENSOR_BYTES || n > MAX_TENSORS) {
        return fail_short(s);
    }
    text *names = malloc((size_t)DT_MAX(n, 1) * sizeof *names);
    if (!names) {
        return dt_fail_memory(s->error, (size_t)n * sizeof *names, "the tensor names of a GGUF file");
    }
    dt_status status = DT_OK;
    uint64_t data_bytes = 0, data_end = 0;
    for (uint64_t i = 0; i < n && !status; i++) {
        status = scan_tensor(s, &names[i], &data_bytes, &data_end);
    }
    if (!status) {
        status = check_unique(s, names, n, "tensors");
    }
    free(names);
    if (status || n == 0) {
        return status;
    }
    const uint64_t data_at = DT_ROUND_UP(s->at, (uint64_t)s->alignment);
    if (data_end > (uint64_t)INT64_MAX - data_at || data_at + data_end > s->size) {
        return dt_fail(s->error, DT_ERR_FORMAT, "%s is cut off: it needs %" PRIu64 " bytes but has %" PRIu64 "; get the file again",
                       s->path, data_at + data_end, s->size);
    }
    /* a further file behind the data: what `cat part1 part2` makes */
    const uint64_t next_file[2] = {data_at + data_end, data_at + data_bytes};
    for (int i = 0; i < 2; i++) {
        if (next_file[i] + 4 <= s->size && memcmp(s->data + next_file[i], GGUF_MAGIC, 4) == 0) {
            return dt_fail(
                s->error, DT_ERR_FORMAT,
                "%s is several GGUF files one after another; leave the parts of a split model as they are (-00001-of-0000N.gguf "
                "and so on, in one folder) and open the first",
                s->path);
        }
    }
    return DT_OK;
}

static bool begins(const scan *s, const char *magic, size_t n) { return s->size >= n && memcmp(s->data, magic, n) == 0; }

static dt_status fail_foreign(const scan *s) {
    static const struct {
        const char *magic;
        size_t length;
        const char *what;
    } known[] = {
        {"PK\3\4", 4, "a zip archive (a PyTorch checkpoint?)"},
        {"\x80\2", 2, "a pickle (a PyTorch checkpoint?)"},
        {"tjgg", 4, "a ggml file from before GGUF"},
        {"fmgg", 4, "a ggml file from before GGUF"},
        {"lmgg", 4, "a ggml file from before GGUF"},
        {"version https://git-lfs", 23, "a Git LFS pointer (run `git lfs pull`)"},
        {"<!DOCTYPE", 9, "a web page (a failed download?)"},
        {"<html", 5, "a web page (a failed download?)"},
        {"\x1f\x8b", 2, "compressed by gzip"},
        {"\x28\xb5\x2f\xfd", 4, "compressed by zstd"},
        {"\0\0\0\0", 4, "empty space (an unfinished download?)"},
        {"{", 1, "a JSON file"},
    };
    const char *what = "something else; name a file that convert.py or llama.cpp's tools have made";
    uint64_t header = 0;
    if (s->size > 9) {
        memcpy(&header, s->data, sizeof header);
    }
    if (header > 1 && header < s->size && s->data[8] == '{') {
        what = "a safetensors file (convert it to GGUF)";
    } else {
        for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
            if (begins(s, known[i].magic, known[i].length)) {
                what = known[i].what;
                break;
            }
        }
    }
    return dt_fail(s->error, DT_ERR_FORMAT, "%s is not a GGUF file: it looks like %s", s->path, what);
}

static dt_status scan_file(scan *s) {
    if (!begins(s, GGUF_MAGIC, 4)) {
        return fail_foreign(s);
    }
    s->at = 4;
    const uint32_t version = take_u32(s);
    const uint64_t n_tensors = take_u64(s), n_keys = take_u64(s);
    if (s->is_short) {
        return fail_short(s);
    }
    if (version != 0 && (version & 0xffff) == 0) {
        return dt_fail(s->error, DT_ERR_UNSUPPORTED,
                       "%s was written for a machine of the other byte order; convert the model again here", s->path);
    }
    if (version < 2 || version > GGUF_VERSION) {
        return dt_fail(s->error, DT_ERR_UNSUPPORTED,
                       "%s has GGUF version %" PRIu32 "; this program reads versions 2 to %d: convert the model again", s->path,
                       version, GGUF_VERSION);
    }
    const dt_status status = scan_keys(s, n_keys);
    return status ? status : scan_tensors(s, n_tensors);
}

dt_status dt_gguf_scan(const char *path, uint64_t *out_bytes, dt_error *error) {
    const int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file < 0) {
        return dt_fail(error, DT_ERR_IO, "cannot open the model file %s: %s", path, strerror(errno));
    }
    struct stat info;
    dt_status status = DT_OK;
    dt_file_map *map = NULL;
    if (fstat(file, &info) != 0) {
        status = dt_fail(error, DT_ERR_IO, "cannot read the model file %s: %s", path, strerror(errno));
    } else if (S_ISDIR(info.st_mode)) {
        status = dt_fail(error, DT_ERR_IO, "%s is a folder; give the GGUF file in it", path);
    } else if (!S_ISREG(info.st_mode)) {
        status = dt_fail(error, DT_ERR_IO, "%s is not a regular file; give a GGUF file on disk", path);
    } else if (info.st_size == 0) {
        status = dt_fail(error, DT_ERR_FORMAT, "%s is empty; get the file again", path);
    } else if ((map = dt_file_map_open(file, (size_t)info.st_size)) == NULL) {
        status = dt_fail(error, DT_ERR_IO, "cannot map the model file %s: %s", path, strerror(errno));
    }
    close(file);
    if (status) {
        return status;
    }
    scan s = {.path = path,
              .data = dt_file_map_bytes(map),
              .size = (uint64_t)info.st_size,
              .alignment = GGUF_DEFAULT_ALIGNMENT,
              .error = error};
    status = scan_file(&s);
    if (dt_file_map_broken(map)) {
        status = dt_fail(error, DT_ERR_IO, "%s became shorter while it was read; get the file again", path);
    }
    dt_file_map_close(map);
    *out_bytes = (uint64_t)info.st_size;
    return status;
}
