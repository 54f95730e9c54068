/*
 * The AMX kernel: the sums of a block of 32 inputs for 16 tokens times 16 rows are one product of tiles of bytes; scaling and
 * adding them up, which takes longer, is the vector unit's work. The tile unit is a block ahead of it. Few tokens go the way of the
 * VNNI kernel.
 *
 * Numbers are the same to the bit: what the tile unit sums are whole numbers, what is done with them has the order of the others.
 *
 * Rows are taken in runs of BLOCKS blocks: so much of all tokens' inputs stays in the second-level cache while group after group of
 * rows is unpacked and multiplied with them. Between runs the sums lie in y.
 *
 * Packed activations of a tile of 16 tokens differ from the other kernels' (gemm_kernel.h) in the quants: int8 [16 tokens][32].
 */
#include "base/amx.h"

#if defined(DT_HAVE_AMX)

#include "gemm/gemm_avx512.h"

#define BLOCKS 64 /* of a run; a multiple of a super-block's */

static bool supported(void) { return __builtin_cpu_supports("avx512vnni") && dt_amx_ready(); }

static void pack_block(const float *from, int32_t tile, int32_t t, void *to) {
    if (tile == DT_GEMM_TILE) {
        pack_inputs_of(from, tile, t, true, to);
    } else {
        pack_inputs_of(from, tile, t, false, to);
    }
}

/* A block of a group's weights as signed bytes [8 quads][16 rows][4], and what its sums are multiplied with. */
typedef struct block {
    _Alignas(64) int8_t quants[8 * 64];
    float scale[16], minimum[16], halves[2][16];
} block;

/* Unpacks n blocks, whole super-blocks. */
INLINE void unpack(const dt_gemm_format f, const uint8_t *group, int32_t n, block *to) {
    const __m512i offset = _mm512_set1_epi8((char)f.offset);
    for (int32_t done = 0; done < n; done += f.n_blocks) {
        const uint8_t *header = group;
        group += dt_gemm_header_bytes(f);
        for (int32_t b = 0; b < f.n_blocks; b++, to++, group += dt_gemm_block_bytes(f)) {
            __m512i q[8];
            load_weights(f, group, q);
            UNROLL for (int j = 0; j < 8; j++) { _mm512_store_si512(to->quants + j * 64, _mm512_sub_epi8(q[j], offset)); }
            const block_scales s = load_scales(f, header, group + dt_gemm_quant_bytes(f));
            _mm512_store_ps(to->scale, s.scale);
            if (f.has_minimum) {
                _mm512_store_ps(to->minimum, s.minimum);
            }
            if (f.n_scales == 2) {
                _mm512_store_ps(to->halves[0], s.halves[0]);
                _mm512_store_ps(to->halves[1], s.halves[1]);
            }
        }
    }
}

/* Of two blocks, of each [half][16 tokens][16 rows]; without halves the first is all. */
typedef struct sums {
    _Alignas(64) int32_t at[2][2][DT_GEMM_TILE * DT_GEMM_ROWS];
} sums;

/* Tiles 0 to 3 are sums, 4 and 6 inputs, 5 and 7 weights; an input's row is 32 or 16 bytes long. */
#define PRODUCT(sum, x, w, inputs, weights, to)                                                                                    \
    DT_AMX_LOAD(x, inputs, DT_GEMM_BLOCK);                                                                                         \
    DT_AMX_LOAD(w, weights, 64);                                                                                                   \
    DT_AMX_ZERO(sum);                                                                                                              \
    DT_AMX_MULTIPLY_BYTES(sum, x, w);                                                                                              \
    DT_AMX_STORE(sum, to, 64)

INLINE void multiply_block(const dt_gemm_format f, const block *w, const char *inputs, const int slot, sums *to) {
    int32_t *first = to->at[slot][0], *last = to->at[slot][1];
    if (slot == 0) {
        PRODUCT(0, 4, 5, inputs, w->quants, first);
        if (f.n_scales == 2) {
            PRODUCT(1, 6, 7, inputs + 16, w->quants + 256, last);
        }
    } else {
        PRODUCT(2, 4, 5, inputs, w->quants, first);
        if (f.n_scales == 2) {
            PRODUCT(3, 6, 7, inputs + 16, w->quants + 256, last);
        }
    }
}

INLINE void add_sums(const dt_gemm_format f, const block *w, const char *inputs, const int slot, const sums *from,
                     __m512 y[DT_GEMM_TILE]) {
    const float *scale = dt_gemm_scales((void *)(uintptr_t)inputs, DT_GEMM_TILE);
    const float *input_sum = dt_gemm_sums((void *)(uintptr_t)inputs, DT_GEMM_TILE);
    const __m512 row_scale = _mm512_load_ps(w->scale), minimum = _mm512_load_ps(f.has_minimum ? w->minimum : w->scale);
    const __m512 first_half = _mm512_load_ps(w->halves[0]), last_half = _mm512_load_ps(w->halves[1]);
    UNROLL for (int t = 0; t < DT_GEMM_TILE; t++) {
        __m512 product = _mm512_cvtepi32_ps(_mm512_load_si512(from->at[slot][0] + t * DT_GEMM_ROWS));
        if (f.n_scales == 2) {
            product = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(from->at[slot][1] + t * DT_GEMM_ROWS)), last_half,
                                      _mm512_mul_ps(product, first_half));
        }
        y[t] = _mm512_fmadd_ps(product, _mm512_mul_ps(row_scale, _mm512_set1_ps(scale[t])), y[t]);
        if (f.has_minimum) {
            y[t] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(input_sum[t]), y[t]);
        }
    }
}

/* Adds n blocks of 16 rows times a tile of tokens to y, or begins it. */
INLINE void add_tile(const dt_gemm_format f, const block *w, int32_t n, const char *inputs, float *y, size_t stride, bool begin) {
    const size_t tile_bytes = DT_GEMM_TILE * DT_GEMM_TOKEN_BYTES;
    __m512 sum[DT_GEMM_TILE];
    sums between;
    UNROLL for (int t = 0; t < DT_GEMM_TILE; t++) {
        sum[t] = begin ? _mm512_setzero_ps() : _mm512_loadu_ps(y + (size_t)t * stride);
    }
    multiply_block(f, w, inputs, 0, &between);
    for (int32_t b = 0; b < n; b += 2, w += 2, inputs += 2 * tile_bytes) {
        if (b + 1 < n) {
            multiply_block(f, w + 1, inputs + tile_bytes, 1, &between);
        }
        add_sums(f, w, inputs, 0, &between, sum);
        if (b + 2 < n) {
            multiply_block(f, w + 2, inputs + 2 * tile_bytes, 0, &between);
        }
        if (b + 1 < n) {
            add_sums(f, w + 1, inputs + tile_bytes, 1, &between, sum);
        }
    }
    UNROLL for (int t = 0; t < DT_GEMM_TILE; t++) { _mm512_storeu_ps(y + (size_t)t * stride, sum[t]); }
}

/* Tiles of tokens, all of them for a run of a group. */
INLINE void groups_tiles(const dt_gemm_format f, const uint8_t *groups, int32_t n_groups, int32_t n_blocks, const char *inputs,
                         int32_t n_tokens, float *y, size_t stride) {
    const size_t group_bytes = dt_gemm_group_bytes(f, n_blocks * DT_GEMM_BLOCK);
    const size_t super_bytes = dt_gemm_group_bytes(f, f.n_blocks * DT_GEMM_BLOCK);
    const size_t tile_bytes = DT_GEMM_TILE * DT_GEMM_TOKEN_BYTES;
    block blocks[BLOCKS];
    for (int32_t done = 0; done < n_blocks; done += BLOCKS) {
        const int32_t n = DT_MIN(BLOCKS, n_blocks - done);
        for (int32_t g = 0; g < n_groups; g++) {
            unpack(f, groups + (size_t)g * group_bytes + (size_t)(done / f.n_blocks) * super_bytes, n, blocks);
            for (int32_t t = 0; t < n_tokens; t += DT_GEMM_TILE) {
                const char *from = inputs + (size_t)t / DT_GEMM_TILE * (size_t)n_blocks * tile_bytes + (size_t)done * tile_bytes;
                add_tile(f, blocks, n, from, y + (size_t)t * stride + g * DT_GEMM_ROWS, stride, done == 0);
            }
        }
    }
}

INLINE void groups_tokens(const dt_gemm_format f, const uint8_t *groups, int32_t n_groups, int32_t n_blocks, const char *inputs,
                          int32_t n_tokens, float *y, size_t stride) {
    const int32_t n_tiled = n_tokens / DT_GEMM_TILE * DT_GEMM_TILE;
    if (n_tiled > 0) {
        const uint8_t n_quads = f.n_scales == 2 ? 4 : 8;
        dt_amx_table table = {.palette = 1}, old;
        for (int i = 0; i < 8; i++) {
            table.rows[i] = i == 5 || i == 7 ? n_quads : DT_AMX_ROWS;
            table.row_bytes[i] = i == 4 || i == 6 ? n_quads * 4 : DT_AMX_ROW_BYTES;
        }
        dt_amx_begin(&table, &old);
        groups_tiles(f, groups, n_groups, n_blocks, inputs, n_tiled, y, stride);
        dt_amx_end(&old);
    }
    inputs += (size_t)n_tiled * (size_t)n_blocks * DT_GEMM_TOKEN_BYTES;
    for (int32_t g = 0; g < n_groups && n_tiled < n_tokens; g++, groups += dt_gemm_group_bytes(f, n_blocks * DT_GEMM_BLOCK)) {
        group_tokens(f, groups, n_blocks, inputs, n_tokens - n_tiled, y + (size_t)n_tiled * stride + g * DT_GEMM_ROWS, stride);
    }
}

DT_GEMM_DEFINE_KERNEL(p->n_tokens < DT_GEMM_TILE ? DT_GEMM_CHUNKS : 4)

const dt_gemm_kernel dt_gemm_amx = {"amx_int8", true, supported, pack_inputs, multiply};

#endif
