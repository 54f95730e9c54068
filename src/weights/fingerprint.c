/*
 * The fingerprint of a model: what session files know their model by.
 *
 * Hashing all of a large file would take longer than loading it. Metadata holds hyperparameters, tokenizer, and names, types and
 * shapes of the tensors; a few kilobytes of each tensor tell trained weights apart. Invariant: depends on the bytes of the files
 * alone, so a copy or a renamed file has the same fingerprint.
 */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L /* pread */
#endif
#include "base/hash.h"
#include "weights/gguf_file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#define PIECE_BYTES ((uint64_t)4096)

typedef struct fingerprint {
    const dt_gguf *gguf;
    dt_hash hash;
    int file;
    int32_t part;
    dt_error *error;
} fingerprint;

static dt_status add_range(fingerprint *f, uint64_t from, uint64_t to) {
    unsigned char buffer[16384];
    while (from < to) {
        const ssize_t got = pread(f->file, buffer, (size_t)DT_MIN(to - from, sizeof buffer), (off_t)from);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            return dt_fail(f->error, DT_ERR_IO, "%s can't be read: %s", f->gguf->parts[f->part].path,
                           got == 0 ? "it has become shorter" : strerror(errno));
        }
        dt_hash_add(&f->hash, buffer, (size_t)got);
        from += (uint64_t)got;
    }
    return DT_OK;
}

static dt_status add_part(fingerprint *f) {
    const dt_gguf_part *part = &f->gguf->parts[f->part];
    f->file = open(part->path, O_RDONLY | O_CLOEXEC);
    if (f->file < 0) {
        return dt_fail(f->error, DT_ERR_IO, "%s can't be read: %s", part->path, strerror(errno));
    }
    dt_status status = add_range(f, 0, DT_MIN((uint64_t)gguf_get_data_offset(part->meta), part->bytes));
    for (int64_t i = 0; i < f->gguf->n_tensors && status == DT_OK; i++) { /* sorted by name */
        const dt_gguf_tensor *t = &f->gguf->tensors[i];
        if (t->part == f->part) {
            const uint64_t end = t->offset + t->bytes, head = DT_MIN(t->bytes, PIECE_BYTES);
            status = add_range(f, t->offset, t->offset + head);
            if (status == DT_OK && t->bytes > PIECE_BYTES) {
                status = add_range(f, end - PIECE_BYTES, end);
            }
        }
    }
    close(f->file);
    return status;
}

dt_status dt_gguf_fingerprint(const dt_gguf *gguf, uint64_t *out, dt_error *error) {
    fingerprint f = {.gguf = gguf, .error = error};
    dt_status status = DT_OK;
    dt_hash_begin(&f.hash);
    for (; f.part < gguf->n_parts && status == DT_OK; f.part++) {
        status = add_part(&f);
    }
    *out = dt_hash_end(&f.hash);
    return status;
}
