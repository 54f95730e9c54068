/*
 * GGUF files, checked: nothing of a file is believed before it was compared with what is needed, and every message names the
 * file and the key or tensor.
 *
 * Invariant: a ggml_tensor handed out by dt_weights has the asked shape, a type ggml can compute with, and data that lies
 * wholly inside its file.
 */
#ifndef DT_WEIGHTS_H
#define DT_WEIGHTS_H

#include "base/base.h"
#include "gemm/gemm.h"
#include "ggml-backend.h"
#include "ggml.h"

typedef struct dt_gguf dt_gguf;

/* Opens a GGUF file, or all parts of a split set given its first part; reads metadata only. */
dt_status dt_gguf_open(const char *path, dt_gguf **out, dt_error *error);
void dt_gguf_free(dt_gguf *gguf);
const char *dt_gguf_path(const dt_gguf *gguf); /* of the first part */

/* Typed lookups. When the key is missing: required -> DT_ERR_FORMAT naming it; else *out keeps what it had. A value of a wrong type
 * is an error in both cases. u32 accepts any integer type that holds 0..2^32-1, f32 also f64. String and arrays stay the file's. */
dt_status dt_gguf_u32(const dt_gguf *gguf, const char *key, bool required, uint32_t *out, dt_error *error);
dt_status dt_gguf_f32(const dt_gguf *gguf, const char *key, bool required, float *out, dt_error *error);
dt_status dt_gguf_bool(const dt_gguf *gguf, const char *key, bool required, bool *out, dt_error *error);
dt_status dt_gguf_string(const dt_gguf *gguf, const char *key, bool required, const char **out, dt_error *error);
/* A scalar fills all n; an array must have at least n elements. Bools in an array are 0 and 1. */
dt_status dt_gguf_u32_array(const dt_gguf *gguf, const char *key, bool required, uint32_t *out, int32_t n, dt_error *error);
dt_status dt_gguf_f32_array(const dt_gguf *gguf, const char *key, bool required, float *out, int32_t n, dt_error *error);
/* Number of elements of an array of any type, -1 when missing or not an array. */
int64_t dt_gguf_array_length(const dt_gguf *gguf, const char *key);
bool dt_gguf_has_key(const dt_gguf *gguf, const char *key);
/* Shape of a tensor into ne[4] (1 beyond its dimensions); false when it is not there. */
bool dt_gguf_tensor_shape(const dt_gguf *gguf, const char *name, int64_t ne[4]);
/* Tells one model from another, a fine-tune of the same shape included: a hash of all metadata and of the first and last bytes of
 * every tensor, over all parts. Not of their names. */
dt_status dt_gguf_fingerprint(const dt_gguf *gguf, uint64_t *out, dt_error *error);
/* Checks what libllama's vocabulary loader would abort on (duplicate tokens, arrays of unequal length, ids out of range...).
 * *has_tokenizer: false for a missing vocabulary or one of type "none". */
dt_status dt_gguf_check_vocabulary(const dt_gguf *gguf, bool *has_tokenizer, dt_error *error);

typedef enum dt_weight_use {
    DT_USE_MATMUL,      /* first operand of mul_mat: may be placed into the CPU's fast layouts */
    DT_USE_MATMUL_ID,   /* expert matrices */
    DT_USE_ROWS,        /* get_rows: stays in the file's layout */
    DT_USE_ELEMENTWISE, /* norms, biases, rope factors: F32 in memory; F16 and BF16 are converted */
} dt_weight_use;

typedef struct dt_weight_request {
    char name[96];
    dt_weight_use use;
    int n_dims;
    int64_t ne[3];
    bool required;
    ggml_backend_dev_t
        device;               /* NULL: where the file is mapped, or in the CPU's memory; else that device's, in the file's layout */
    struct ggml_tensor **out; /* NULL stored there when optional and missing, and when the loading fails */
    /* MATMUL only, may be NULL: where our own layout (gemm/) is the fastest, the matrix is put into that and described here; *out
     * is then the packed bytes. Else n_out is 0 here. */
    dt_gemm_matrix *packed;
} dt_weight_request;

typedef struct dt_weights dt_weights; /* owns mappings, buffers and tensors */

/* Loads the requested tensors, those without a device of their own for `cpu` (the CPU device). A name asked twice with MATMUL and
 * ROWS (tied embeddings) gets a second copy only where a fast layout wants one. Tensors of the file that nobody asked for are
 * ignored with a debug line, except where their name begins with "blk." or "output": those are an error (the architecture would be
 * computed wrong), naming them. */
dt_status dt_weights_load(const dt_gguf *gguf, ggml_backend_dev_t cpu, const dt_model_params *params,
                          const dt_weight_request *requests, int32_t n_requests, dt_weights **out, dt_error *error);
void dt_weights_free(dt_weights *weights);
/* DT_ERR_IO where a mapped file was cut short under the weights: what was computed since is wrong. */
dt_status dt_weights_check(const dt_weights *weights, dt_error *error);
uint64_t dt_weights_bytes(const dt_weights *weights); /* size of the tensors in the file's layout */
uint64_t dt_weights_n_params(const dt_weights *weights);
const char *dt_weights_main_type(const dt_weights *weights); /* the type most matrix bytes have, "Q4_1" */

/* For messages: "CUDA0", "ggml-cpu", or another machine's address. */
const char *dt_device_name(ggml_backend_dev_t device);
/* Of another machine, over RPC. */
bool dt_device_is_remote(ggml_backend_dev_t device);

/* DT_ERR_UNSUPPORTED, naming the instruction sets, where ggml was built for some that this processor lacks. To be asked before
 * anything of ggml's CPU backend runs. */
dt_status dt_check_processor(dt_error *error);

#endif
