/*
 * What the files of this folder share about an opened GGUF: the parts, and one table of the tensors of all parts.
 *
 * Invariant after dt_gguf_open: every tensor's bytes [offset, offset + bytes) lie inside its part, its type is one that ggml
 * knows, its rows are whole blocks, no dimension is below 1, and names are unique over all parts.
 */
#ifndef DT_WEIGHTS_GGUF_FILE_H
#define DT_WEIGHTS_GGUF_FILE_H

#include "gguf.h"
#include "weights/weights.h"

typedef struct dt_gguf_part {
    char *path;
    uint64_t bytes; /* of the file */
    struct gguf_context *meta;
} dt_gguf_part;

typedef struct dt_gguf_tensor {
    const char *name; /* gguf.h's memory */
    int32_t part;
    enum ggml_type type;
    int64_t ne[GGML_MAX_DIMS];
    uint64_t offset; /* from the start of the file */
    uint64_t bytes;
} dt_gguf_tensor;

struct dt_gguf {
    dt_gguf_part *parts;
    int32_t n_parts;
    dt_gguf_tensor *tensors; /* sorted by name */
    int64_t n_tensors;
};

/* NULL when there is none of that name. */
const dt_gguf_tensor *dt_gguf_find(const dt_gguf *gguf, const char *name);

/* Reads n_bytes of a tensor from its byte `at` on out of `file`, its part, opened for reading. */
dt_status dt_gguf_read(const dt_gguf *gguf, const dt_gguf_tensor *tensor, int file, uint64_t at, uint64_t n_bytes, void *out,
                       dt_error *error);

/* Reads a file's metadata byte by byte and proves that gguf.h can be let loose on it: nothing in it can make gguf.h abort or
 * allocate out of proportion. *out_bytes: the file's size. */
dt_status dt_gguf_scan(const char *path, uint64_t *out_bytes, dt_error *error);

#endif
