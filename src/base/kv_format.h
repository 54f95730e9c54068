/*
 * How one block of cache entries lies in memory: the contract between storage (kv/), which owns and moves
 * entries, and attention (attn/), which writes and reads them.
 *
 * A block holds block_tokens entries (a multiple of DT_KV_GROUP) of one lane = (layer, KV head):
 *
 *   keys    F16  [block_tokens/16][dim_k][16]            16 tokens side by side, so that a vector register
 *                                                        holds one dimension of 16 tokens and no horizontal
 *                                                        sum is needed
 *           INT8 [block_tokens/16][dim_k_padded/4][16][4] unsigned, value + 128 (dot products of unsigned by
 *                                                        signed bytes take four dimensions at a time)
 *   values  F16  [block_tokens][dim_v_padded]            padding is zero
 *           INT8 [block_tokens][dim_v_padded] signed
 *   k_scale, v_scale  float [block_tokens]               INT8 only: value = scale * stored
 *   position          int32 [block_tokens]
 *
 * Invariants: sections start at multiples of 64 bytes. Entries [used, block_tokens) may hold anything that was
 * zero-initialised or written as an entry before: always finite numbers, so kernels may compute on them and mask after.
 */
#ifndef DT_KV_FORMAT_H
#define DT_KV_FORMAT_H

#include "base/base.h"

#define DT_KV_GROUP 16

typedef struct dt_kv_format {
    dt_kv_type type_k, type_v;
    int32_t dim_k, dim_v;               /* head sizes */
    int32_t dim_k_padded, dim_v_padded; /* to multiples of 4 and 16 */
    int32_t block_tokens;
    bool elsewhere; /* keys, values and scales lie in a dt_kv_home (kv/kv.h): those sections are empty */
    /* byte offsets within a block's memory, and its size */
    size_t v_offset, k_scale_offset, v_scale_offset, position_offset, block_bytes;
} dt_kv_format;

/* Fills *out. block_tokens: multiple of DT_KV_GROUP. */
void dt_kv_format_init(dt_kv_format *out, dt_kv_type type_k, dt_kv_type type_v, int32_t dim_k, int32_t dim_v, int32_t block_tokens);

/* The same entries, with keys and values elsewhere: of the sections only positions stay. */
void dt_kv_format_move_elsewhere(dt_kv_format *format);

/* Byte offset of key element (entry, dim) and of an entry's value row from the block's start. */
static inline size_t dt_kv_key_offset(const dt_kv_format *f, int32_t entry, int32_t dim) {
    const size_t group = (size_t)(entry / DT_KV_GROUP), lane = (size_t)(entry % DT_KV_GROUP);
    if (f->type_k == DT_KV_F16) {
        return ((group * (size_t)f->dim_k + (size_t)dim) * DT_KV_GROUP + lane) * 2;
    }
    return (group * (size_t)(f->dim_k_padded / 4) + (size_t)(dim / 4)) * (DT_KV_GROUP * 4) + lane * 4 + (size_t)(dim % 4);
}
static inline size_t dt_kv_group_bytes(const dt_kv_format *f) { /* keys of 16 entries */
    return f->type_k == DT_KV_F16 ? (size_t)f->dim_k * DT_KV_GROUP * 2 : (size_t)f->dim_k_padded * DT_KV_GROUP;
}
static inline size_t dt_kv_value_row_bytes(const dt_kv_format *f) {
    return (size_t)f->dim_v_padded * (f->type_v == DT_KV_F16 ? 2 : 1);
}
static inline float *dt_kv_k_scale(const dt_kv_format *f, void *block) { return (float *)((char *)block + f->k_scale_offset); }
static inline float *dt_kv_v_scale(const dt_kv_format *f, void *block) { return (float *)((char *)block + f->v_scale_offset); }
static inline int32_t *dt_kv_position(const dt_kv_format *f, void *block) {
    return (int32_t *)((char *)block + f->position_offset);
}

/* A block as attention sees it. */
typedef struct dt_kv_span {
    void *block;       /* memory laid out as above */
    const float *bias; /* [block_tokens] added to the scores: log of the number of tokens an entry stands for, -INFINITY for
                          an entry that is not there; NULL = all zero */
    int32_t n;         /* entries used */
} dt_kv_span;

#endif
