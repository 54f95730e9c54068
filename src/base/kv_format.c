/*
 * The byte offsets of a cache block, from head sizes, types and tokens per block.
 *
 * Invariant: sections follow each other in the order keys, values, key scales, value scales, positions; each starts at a multiple
 * of 64 bytes and so does the next block. A section that a type does not need is empty.
 */
#include "base/kv_format.h"

#define DT_SECTION_ALIGNMENT ((size_t)64)

void dt_kv_format_init(dt_kv_format *out, dt_kv_type type_k, dt_kv_type type_v, int32_t dim_k, int32_t dim_v,
                       int32_t block_tokens) {
    const size_t tokens = (size_t)block_tokens;
    dt_kv_format format = {
        .type_k = type_k,
        .type_v = type_v,
        .dim_k = dim_k,
        .dim_v = dim_v,
        .dim_k_padded = DT_ROUND_UP(dim_k, 4),
        .dim_v_padded = DT_ROUND_UP(dim_v, 16),
        .block_tokens = block_tokens,
    };
    const size_t k_bytes = tokens / DT_KV_GROUP * dt_kv_group_bytes(&format);
    const size_t v_bytes = tokens * dt_kv_value_row_bytes(&format);
    const size_t k_scale_bytes = type_k == DT_KV_INT8 ? tokens * sizeof(float) : 0;
    const size_t v_scale_bytes = type_v == DT_KV_INT8 ? tokens * sizeof(float) : 0;
    format.v_offset = DT_ROUND_UP(k_bytes, DT_SECTION_ALIGNMENT);
    format.k_scale_offset = DT_ROUND_UP(format.v_offset + v_bytes, DT_SECTION_ALIGNMENT);
    format.v_scale_offset = DT_ROUND_UP(format.k_scale_offset + k_scale_bytes, DT_SECTION_ALIGNMENT);
    format.position_offset = DT_ROUND_UP(format.v_scale_offset + v_scale_bytes, DT_SECTION_ALIGNMENT);
    format.block_bytes = DT_ROUND_UP(format.position_offset + tokens * sizeof(int32_t), DT_SECTION_ALIGNMENT);
    *out = format;
}

void dt_kv_format_move_elsewhere(dt_kv_format *format) {
    format->elsewhere = true;
    format->v_offset = format->k_scale_offset = format->v_scale_offset = format->position_offset = 0;
    format->block_bytes = DT_ROUND_UP((size_t)format->block_tokens * sizeof(int32_t), DT_SECTION_ALIGNMENT);
}
