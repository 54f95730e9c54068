/*
 * What the files of this folder share: how a cache lies in memory. Nobody outside this folder includes it.
 *
 * Invariants: every lane has one allocation for all its arrays (spans, then the float rows), resized as a whole, so that growing
 * either succeeds or changes nothing; capacities are a pure function of the number of blocks (dt_kv_capacity_blocks), so that
 * bytes can be foretold; a block's reference count lies in the 64 bytes before the block. Of what lanes have in common nothing but
 * atomics changes while one is dropped from: a round treats several at once.
 */
#ifndef DT_KV_INTERNAL_H
#define DT_KV_INTERNAL_H

#include "kv/kv.h"

#include <math.h>

/* The scale of x[n] as signed bytes, by the rule of attention's store; returns its inverse, 0 where all are stored as 0. */
static inline float dt_kv_quantizer(const float *x, int32_t n, float *scale) {
    float largest = 0;
    for (int32_t i = 0; i < n; i++) {
        largest = DT_MAX(largest, fabsf(x[i]));
    }
    const bool tiny = largest <= 1e-30f;
    *scale = tiny ? 0 : largest / 127.0f;
    return tiny ? 0 : 127.0f / largest;
}

/* Precedes every block; as large as a block's alignment. */
typedef struct dt_kv_block_head {
    _Alignas(64) atomic_int references;
    int32_t layer; /* of a spare block: whose format it has */
} dt_kv_block_head;

typedef struct dt_kv_lane_state {
    void *arrays; /* [capacity_blocks] spans, rounded up to 64 bytes, then rows of capacity_blocks * block_tokens floats */
    int32_t capacity_blocks;
    int32_t n_spans; /* blocks held */
    int32_t n_entries;
    int32_t n_slots; /* of them: memory slots */
    dt_kv_span *spans;
    float *recent_mass, *value_norm; /* NULL where the layer's policy needs none */
    float *peak_mass;                /* likewise, of a policy that needs peaks */
    float *bias;                     /* NULL until the first bias is set */
    int32_t *origin;                 /* NULL where the layer keeps none */
} dt_kv_lane_state;

typedef struct dt_kv_layer_state {
    dt_kv_layer_params params;
    bool has_mass, has_peak;
    int32_t passed;          /* what dt_kv_drop_passed drops: positions below it */
    dt_kv_lane_state *lanes; /* into dt_kv.lanes */
} dt_kv_layer_state;

struct dt_kv {
    dt_memory *memory;
    dt_kv_home *home; /* NULL, or where layers are that have format.elsewhere */
    dt_kv_layer_state *layers;
    dt_kv_lane_state *lanes; /* of all layers */
    int32_t *lane_max;       /* [n_lanes] copies of the budgets' lists */
    int32_t *keep;           /* [n_lanes] what the round at hand leaves */
    int32_t n_layers, n_lanes;
    int32_t
        total_cache_size; /* shared by the layers with a policy, each counted with its mean length; 0 = every lane has its own */
    int32_t n_uncommitted;
    int32_t next_position;     /* above every position in the cache; that of the next entry unless the cache is empty */
    int32_t shift;             /* index in the conversation of the next entry - next_position; only close_up.c raises it */
    atomic_int newest_dropped; /* highest position < next_position that was dropped from any lane; -1 = none */
    _Atomic(void *) spare;     /* one unused block with references = 0, or NULL */
    void *scratch;             /* for rounds and truncate, kept between them */
    size_t scratch_bytes;
};

static inline dt_kv_block_head *dt_kv_head(void *block) { return (dt_kv_block_head *)((char *)block - sizeof(dt_kv_block_head)); }
static inline int32_t dt_kv_blocks(const dt_kv_format *format, int32_t n_entries) {
    return n_entries / format->block_tokens + (n_entries % format->block_tokens != 0);
}

static inline size_t dt_kv_block_bytes(const dt_kv_layer_state *layer) {
    return sizeof(dt_kv_block_head) + layer->params.format.block_bytes;
}
static inline int32_t dt_kv_entry_position(const dt_kv_format *f, const dt_kv_lane_state *lane, int32_t entry) {
    return dt_kv_position(f, lane->spans[entry / f->block_tokens].block)[entry % f->block_tokens];
}
/* A lane, and its place in dt_kv.lane_max and dt_kv.keep. */
#define DT_KV_LANE_BYTES (sizeof(dt_kv_lane_state) + 2 * sizeof(int32_t))
static inline size_t dt_kv_lanes_bytes(const dt_kv *kv) { return (size_t)kv->n_lanes * DT_KV_LANE_BYTES; }
static inline size_t dt_kv_layers_bytes(const dt_kv *kv) { return (size_t)kv->n_layers * sizeof *kv->layers; }

#define DT_KV_MAX_DIM 1024 /* of a key or a value: what models are checked against */

/* ---- entry.c: entry i of a block as floats, key[dim_k] rotated as it is stored, value[dim_v] ---- */

void dt_kv_read_key(const dt_kv_format *f, void *block, int32_t i, float *key);
void dt_kv_read_value(const dt_kv_format *f, void *block, int32_t i, float *value);
/* Entries [i, i + n) of a block: keys[n][dim_k], values[n][dim_v]. */
void dt_kv_read_entries(const dt_kv_format *f, void *block, int32_t i, int32_t n, float *keys, float *values);
void dt_kv_write_key(const dt_kv_format *f, void *block, int32_t i, const float *key);
void dt_kv_write_value(const dt_kv_format *f, void *block, int32_t i, const float *value);
float dt_kv_norm(const float *x, int32_t n);

/* Blocks that a lane's arrays have room for when n are needed: n rounded up to eighths of its power of two. */
int32_t dt_kv_capacity_blocks(int32_t n);
/* Bytes of a lane's arrays. */
size_t dt_kv_array_bytes(const dt_kv_layer_state *layer, int32_t capacity_blocks, bool has_bias);
/* Lanes that a round treats at once, at most. */
#define DT_KV_ROUND_THREADS 4
/* Scratch that a round over a lane of n entries takes for each thread (round.c). */
size_t dt_kv_round_bytes(const dt_kv_layer_params *params, int32_t n);
/* And what sharing out a budget takes before it, over all entries of all lanes. */
size_t dt_kv_shared_bytes(int32_t n_lanes, size_t n_entries);
/* Mean lengths of the layers with a policy, summed. */
double dt_kv_shared_length(const dt_kv *kv);
/* There is no room for so many bytes: the machine has none, or what was promised (--kv-memory) is used up. */
dt_status dt_kv_fail_memory(const dt_kv *kv, size_t bytes, const char *what, dt_error *error);
/* At least `bytes` of scratch, valid until the next call; NULL on failure. */
void *dt_kv_scratch(dt_kv *kv, size_t bytes);

/* A token at this position was dropped, or merged into a slot. Lanes may say so at the same time. */
static inline void dt_kv_note_dropped(dt_kv *kv, int32_t position) {
    int newest = atomic_load(&kv->newest_dropped);
    while (position > newest && !atomic_compare_exchange_weak(&kv->newest_dropped, &newest, position)) {
    }
}

/* Makes every block own that dropping victims[n] writes to; dt_kv_drop then can't fail. False: memory. What was made own stays so,
 * which nobody can see. */
bool dt_kv_prepare_drop(dt_kv *kv, int32_t layer, int32_t lane, const int32_t *victims, int32_t n);
/* Some of the lane's blocks belong to another cache too. */
bool dt_kv_shares_blocks(const dt_kv *kv, int32_t layer, int32_t lane);
/* Makes the block own that holds an entry. */
bool dt_kv_own_entry(dt_kv *kv, int32_t layer, int32_t lane, int32_t entry);
/* Gives the lane a row of biases. */
bool dt_kv_own_biases(dt_kv *kv, int32_t layer, int32_t lane);

/* Drops victims[n], committed tokens, after merging them into the lane's memory slots (slots.c). scratch: dt_kv_slots_bytes,
 * 64-byte aligned. Once prepared with the same victims it needs no more memory; is_ready: it needs none whatever they are. */
bool dt_kv_absorb_is_ready(const dt_kv *kv, int32_t layer, int32_t lane);
bool dt_kv_prepare_absorb(dt_kv *kv, int32_t layer, int32_t lane, const int32_t *victims, int32_t n, void *scratch);
dt_status dt_kv_absorb(dt_kv *kv, int32_t layer, int32_t lane, const int32_t *victims, int32_t n, void *scratch, dt_error *error);
size_t dt_kv_slots_bytes(const dt_kv_layer_params *params, int32_t n_entries);

/* Drops the committed entries of every layer's lanes at positions below `passed`, which is set for all before; *n_dropped: of all
 * lanes (window.c). On failure (memory) nothing has changed. */
dt_status dt_kv_drop_passed(dt_kv *kv, int64_t *n_dropped, dt_error *error);

#endif
