/*
 * What the kernels of gemm.h share: the packed layouts, and the loops over tiles of tokens and groups of rows.
 *
 * Packed weights: groups of 16 rows; for each super-block of a group (one block of 32 inputs, or 8 of them)
 *   scale    F16 [16]
 *   minimum  F16 [16]              where the type has minimums
 *   then for each of its blocks
 *     quants    low 4 bits: 4 x 64 bytes, low nibbles quad j, high nibbles quad j+4. A 64-byte piece holds 4 consecutive inputs
 *               ("quad") of each of the 16 rows. 8-bit weights: 8 x 64 bytes
 *               5th bit: 64 bytes, bit j quad j; 5th and 6th: 2 x 64 bytes, bits 2k and 2k+1 of piece v quad 4v + k
 *     scales    int8 [n_scales][16]  that multiply the super-block's: one per block, or one for each 16 inputs
 *     minimums  int8 [16]            that multiply the super-block's, where there are scales and minimums
 * Packed activations: the counters by which threads share out rows (base/share.h), then tiles of 16 or of 1 to 8 tokens (T), for
 * each block
 *   quants int8 [8 quads][T][4],  scale float [T],  sum float [T] = scale * sum of the quants,
 *   negated int32 [2][T] = minus the sum of the first 16 quants, and of all
 *
 * Invariant: formats are constants where they are used (INLINE functions called with a constant type), so no branch on them is
 * left.
 */
#ifndef DT_GEMM_KERNEL_H
#define DT_GEMM_KERNEL_H

#include "base/share.h"
#include "gemm/gemm_inputs.h"

#define DT_GEMM_TILE 16      /* most tokens of a tile */
#define DT_GEMM_SMALL_TILE 8 /* most tokens of one that is not full */
#define DT_GEMM_MAX_BLOCKS 8 /* of a super-block */

/* A weight is scale * (its block's or half block's scale) * (stored value - offset) + minimum * (its block's minimum). */
typedef struct dt_gemm_format {
    int32_t bits;     /* of a stored value: 4, 5, 6 or 8 */
    int32_t n_blocks; /* of a super-block: 1 or 8 */
    int32_t n_scales; /* of a block: 0, 1 or 2 */
    int32_t offset;
    bool has_minimum;
    bool is_lookup;     /* 4 bits stand for one of dt_gemm_values */
    int32_t file_bytes; /* of a row's super-block in ggml's layout */
} dt_gemm_format;

static const dt_gemm_format dt_gemm_formats[DT_GEMM_N_TYPES] = {
    [DT_GEMM_Q4_0] = {4, 1, 0, 8, false, false, 18},   [DT_GEMM_Q4_1] = {4, 1, 0, 0, true, false, 20},
    [DT_GEMM_Q5_0] = {5, 1, 0, 16, false, false, 22},  [DT_GEMM_Q5_1] = {5, 1, 0, 0, true, false, 24},
    [DT_GEMM_Q8_0] = {8, 1, 0, 128, false, false, 34}, [DT_GEMM_IQ4_NL] = {4, 1, 0, 128, false, true, 18},
    [DT_GEMM_Q4_K] = {4, 8, 1, 0, true, false, 144},   [DT_GEMM_Q5_K] = {5, 8, 1, 0, true, false, 176},
    [DT_GEMM_Q6_K] = {6, 8, 2, 32, false, false, 210}, [DT_GEMM_IQ4_XS] = {4, 8, 1, 128, false, true, 136},
};

/* The 16 values of IQ4_NL and IQ4_XS, plus 128. */
static const uint8_t dt_gemm_values[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

/* For kernels that multiply pairs of unsigned by signed bytes into 16 bits: how many quads can be summed up there. With 4-bit weights
 * a whole block (8 * 2 * 15 * 127 < 2^15), with 5 bits half of it, with 6 bits a quarter. 1: with 8 bits not even one pair fits, so
 * the weights' sign is moved to the inputs and every pair is widened at once. */
static inline int dt_gemm_quads_in_16_bits(dt_gemm_format f) {
    return f.is_lookup || f.bits == 8 ? 1 : f.bits == 6 ? 2 : f.bits == 5 ? 4 : 8;
}

/* Bytes of a super-block's header, of the quants of a block, of a block. */
static inline size_t dt_gemm_header_bytes(dt_gemm_format f) { return f.has_minimum ? 64 : 32; }
static inline size_t dt_gemm_quant_bytes(dt_gemm_format f) { return (size_t)f.bits * 64; }
static inline size_t dt_gemm_block_bytes(dt_gemm_format f) {
    return dt_gemm_quant_bytes(f) + (size_t)(f.n_scales + (f.n_scales > 0 && f.has_minimum)) * DT_GEMM_ROWS;
}
/* Bytes of a group of rows. */
static inline size_t dt_gemm_group_bytes(dt_gemm_format f, int32_t n_in) {
    return (size_t)(n_in / DT_GEMM_BLOCK / f.n_blocks) * (dt_gemm_header_bytes(f) + (size_t)f.n_blocks * dt_gemm_block_bytes(f));
}

/* Tokens of the tile that begins when n are left: few tokens, as drafts bring them, are one tile, for which weights are read and
 * unpacked once. */
static inline int32_t dt_gemm_tile(int32_t n) { return n >= DT_GEMM_TILE ? DT_GEMM_TILE : DT_MIN(n, DT_GEMM_SMALL_TILE); }
/* Bytes that one token takes per block in packed activations, whatever the tile. */
#define DT_GEMM_TOKEN_BYTES ((size_t)DT_GEMM_BLOCK + 16)

/* Where scales, sums and negated totals of a packed block of a tile lie. */
static inline float *dt_gemm_scales(void *block, int32_t tile) { return (float *)((char *)block + (size_t)tile * DT_GEMM_BLOCK); }
static inline float *dt_gemm_sums(void *block, int32_t tile) { return dt_gemm_scales(block, tile) + tile; }
static inline int32_t *dt_gemm_negated(void *block, int32_t tile) { return (int32_t *)(dt_gemm_scales(block, tile) + 2 * tile); }

/* What is known of token t of a packed block besides its quants; totals of the first and last 16 of them. */
static inline void dt_gemm_put_scale(void *block, int32_t tile, int32_t t, float scale, int32_t first, int32_t last) {
    dt_gemm_scales(block, tile)[t] = scale;
    dt_gemm_sums(block, tile)[t] = scale * (float)(first + last);
    dt_gemm_negated(block, tile)[t] = -first;
    dt_gemm_negated(block, tile)[tile + t] = -first - last;
}

#define DT_GEMM_CHUNKS 32         /* for a thread, with kernels for which a group is as good as many */
#define DT_GEMM_CHUNK_BYTES 16384 /* a chunk is no smaller: giving out one takes as long as reading a few hundred bytes */
#define DT_GEMM_COUNTER_BYTES (DT_SHARE_RANGES * sizeof(dt_share))

/* Packs 32 inputs of token t of a tile. */
typedef void (*dt_gemm_pack_block_fn)(const float *from, int32_t tile, int32_t t, void *to);

/* pack_inputs for a kernel's pack_block. Tiles are shared out between threads; where there is one full tile or less, blocks. */
static inline void dt_gemm_pack_all(dt_gemm_pack_block_fn pack_block, const dt_gemm_inputs *in, void *packed, int32_t ith,
                                    int32_t nth) {
    const int32_t n_blocks = in->n_in / DT_GEMM_BLOCK, n_tokens = in->n_tokens;
    char *tiles = (char *)packed + DT_GEMM_COUNTER_BYTES;
    if (ith < DT_SHARE_RANGES) {
        dt_share_reset((dt_share *)packed + ith);
    }
    for (int32_t first = 0, tile; first < n_tokens; first += tile) {
        tile = dt_gemm_tile(n_tokens - first);
        const bool whole = n_tokens > DT_GEMM_TILE;
        if (whole && first / DT_GEMM_TILE % nth != ith) {
            continue;
        }
        const int32_t begin = whole ? 0 : n_blocks * ith / nth, end = whole ? n_blocks : n_blocks * (ith + 1) / nth;
        float factor[DT_GEMM_TILE] = {0};
        for (int32_t t = 0; in->kind == DT_GEMM_NORM && begin < end && t < tile; t++) {
            factor[t] = dt_gemm_norm_factor(in, first + t);
        }
        for (int32_t b = begin; b < end; b++) {
            char *to = tiles + ((size_t)first * (size_t)n_blocks + (size_t)b * (size_t)tile) * DT_GEMM_TOKEN_BYTES;
            for (int32_t t = 0; t < tile; t++) {
                float values[DT_GEMM_BLOCK];
                pack_block(dt_gemm_input_block(in, first + t, b, factor[t], values), tile, t, to);
            }
        }
    }
}

/* Groups of rows, one after the other in memory, times all tokens. */
typedef void (*dt_gemm_groups_fn)(const uint8_t *groups, int32_t n_groups, int32_t n_blocks, const char *inputs, int32_t n_tokens,
                                  float *y, size_t stride);

/* Groups [begin, end) of the matrices' rows taken as one list. */
static inline void dt_gemm_multiply_some(const dt_gemm_groups_fn *by_type, const dt_gemm_product *p, const void *packed,
                                         int64_t begin, int64_t end) {
    int64_t first = 0; /* group of matrix i */
    for (int32_t i = 0; i < p->n_matrices && first < end; i++) {
        const dt_gemm_matrix *w = p->matrices[i];
        const int64_t from = DT_MAX(begin, first), to = DT_MIN(end, first + w->n_out / DT_GEMM_ROWS);
        if (from < to) {
            const size_t group_bytes = dt_gemm_group_bytes(dt_gemm_formats[w->type], w->n_in);
            by_type[w->type]((const uint8_t *)w->packed + (size_t)(from - first) * group_bytes, (int32_t)(to - from),
                             w->n_in / DT_GEMM_BLOCK, (const char *)packed + DT_GEMM_COUNTER_BYTES, p->n_tokens,
                             p->y + from * DT_GEMM_ROWS, p->stride);
        }
        first += w->n_out / DT_GEMM_ROWS;
    }
}

/* multiply for a kernel's groups functions. n_chunks: about, for a thread; a chunk is what is given out at once. */
static inline void dt_gemm_multiply_groups(const dt_gemm_groups_fn *by_type, int64_t n_chunks, const dt_gemm_product *p,
                                           void *packed, int32_t ith, int32_t nth) {
    const int64_t group_bytes = (int64_t)dt_gemm_group_bytes(dt_gemm_formats[p->matrices[0]->type], p->matrices[0]->n_in);
    int64_t n_groups = 0;
    for (int32_t i = 0; i < p->n_matrices; i++) {
        n_groups += p->matrices[i]->n_out / DT_GEMM_ROWS;
    }
    const int64_t n_ranges = DT_MIN(nth, DT_SHARE_RANGES);
    const int64_t chunk = DT_MAX(DT_MAX(1, n_groups / (n_ranges * n_chunks)), DT_GEMM_CHUNK_BYTES / group_bytes);
    dt_share_walk walk = dt_share_begin(packed, (n_groups + chunk - 1) / chunk, ith, nth);
    for (int64_t at; (at = dt_share_next(&walk)) < walk.n;) {
        dt_gemm_multiply_some(by_type, p, packed, at * chunk, DT_MIN((at + 1) * chunk, n_groups));
    }
}

/* Defines groups_tokens(format, ...), which is compiled for every type, from a kernel's group_tokens for one group. */
#define DT_GEMM_DEFINE_GROUPS                                                                                                      \
    static inline __attribute__((always_inline)) void groups_tokens(const dt_gemm_format f, const uint8_t *groups,                 \
                                                                    int32_t n_groups, int32_t n_blocks, const char *inputs,        \
                                                                    int32_t n_tokens, float *y, size_t stride) {                   \
        for (int32_t g = 0; g < n_groups; g++, groups += dt_gemm_group_bytes(f, n_blocks * DT_GEMM_BLOCK)) {                       \
            group_tokens(f, groups, n_blocks, inputs, n_tokens, y + g * DT_GEMM_ROWS, stride);                                     \
        }                                                                                                                          \
    }

/* Defines pack_inputs and multiply of a kernel from its pack_block and its groups_tokens. */
#define DT_GEMM_GROUPS(name)                                                                                                       \
    static void groups_##name(const uint8_t *groups, int32_t n_groups, int32_t n_blocks, const char *inputs, int32_t n_tokens,     \
                              float *y, size_t stride) {                                                                           \
        groups_tokens(dt_gemm_formats[DT_GEMM_##name], groups, n_groups, n_blocks, inputs, n_tokens, y, stride);                   \
    }
#define DT_GEMM_GROUPS_ENTRY(name) groups_##name,
#define DT_GEMM_DEFINE_KERNEL(n_chunks)                                                                                            \
    DT_GEMM_TYPES(DT_GEMM_GROUPS)                                                                                                  \
    static void pack_inputs(const dt_gemm_inputs *in, void *packed, int32_t ith, int32_t nth) {                                    \
        dt_gemm_pack_all(pack_block, in, packed, ith, nth);                                                                        \
    }                                                                                                                              \
    static void multiply(const dt_gemm_product *p, void *packed, int32_t ith, int32_t nth) {                                       \
        static const dt_gemm_groups_fn by_type[] = {DT_GEMM_TYPES(DT_GEMM_GROUPS_ENTRY)};                                          \
        dt_gemm_multiply_groups(by_type, n_chunks, p, packed, ith, nth);                                                           \
    }

#endif
