/*
 * The KV cache of one session on the host: lanes of blocks. Storage is dumb: it appends, drops, shares and counts; which entries
 * go is asked of policy/ in rounds (round.c).
 *
 * A lane = (layer, KV head) has blocks of format.block_tokens entries. All blocks but the last are full. Blocks are reference
 * counted and may be shared by caches made with dt_kv_fork; a shared block is copied before it is written. What belongs to
 * the session alone (masses, value norms, biases) lies in the lane, indexed by entry.
 *
 * Invariants (dt_kv_check): positions unique in a lane; uncommitted entries are the last n_uncommitted of every lane, in order;
 * counters equal what is allocated; masses finite and not negative; every lane has the newest position (unless it was dropped).
 * Committed entries have no order: dropping fills the holes from the committed tail.
 * Memory slots are entries too, with negative positions (slots.c); sizes of budgets count without them.
 * Memory: grows block by block, on demand; nothing is allocated for the context up front.
 *
 * A layer whose format says `elsewhere` has its lanes, positions, masses and biases here like any other, and is evicted from by the
 * same rounds; its keys and values lie in the cache's home (dt_kv_home), row i of a lane there belonging to entry i here, and
 * follow what happens to the entries.
 */
#ifndef DT_KV_H
#define DT_KV_H

#include "base/kv_format.h"
#include "base/share.h"
#include "policy/policy.h"

typedef struct dt_kv dt_kv;

/* How a layer's keys are rotated: pair i, dimensions 2i and 2i + 1 or (halves) i and i + n_pairs, by frequency[i] radians per
 * position. */
typedef struct dt_kv_rope {
    int32_t n_pairs; /* 0: not rotated */
    bool halves;
    const double *frequency; /* [n_pairs], outlives the cache */
} dt_kv_rope;

/* Where keys and values lie that are not in blocks: what a cache tells it. One implementation: graph/device_cache.c. */
typedef struct dt_kv_home dt_kv_home;
typedef struct dt_kv_home_ops {
    /* Entry `from` of a lane takes the place of entry `to`; what was there is gone. Only committed entries that nothing was written
     * to since move. Cannot fail: the home notes it and does it later. */
    void (*move)(dt_kv_home *home, int32_t layer, int32_t lane, int32_t to, int32_t from);
    /* The key of an entry, which may have moved, turns on by so many positions (close_up.c). Likewise noted. */
    void (*turn)(dt_kv_home *home, int32_t layer, int32_t lane, int32_t entry, int32_t positions);
    void (*clear)(dt_kv_home *home);
    /* A home for a second cache: with the same content, or empty. */
    dt_status (*copy)(const dt_kv_home *home, bool with_content, dt_kv_home **out, dt_error *error);
    void (*free)(dt_kv_home *home);
    size_t (*bytes)(const dt_kv_home *home);
    /* bytes of a home whose lanes all grew to n entries */
    size_t (*bytes_for)(const dt_kv_home *home, int32_t n);
    /* Rows [first, first + n) of a lane's keys or values as plain halves; false when the device fails. put: of a lane of n entries.
     */
    bool (*get)(dt_kv_home *home, int32_t layer, int32_t lane, bool values, int32_t first, int32_t n, uint16_t *out);
    /* The same as floats, whatever the layer is stored as. */
    bool (*read)(dt_kv_home *home, int32_t layer, int32_t lane, bool values, int32_t first, int32_t n, float *out);
    /* Memory for rows [0, n) of every lane, where that is more than there is. */
    dt_status (*reserve)(dt_kv_home *home, int32_t layer, int32_t n, dt_error *error);
    bool (*put)(dt_kv_home *home, int32_t layer, int32_t lane, bool values, int32_t first, int32_t n, const uint16_t *in);
    /* Keys [n][dim_k] and values [n][dim_v] of any committed entries of a lane, read or written as floats; for memory slots. */
    bool (*gather)(dt_kv_home *home, int32_t layer, int32_t lane, const int32_t *entries, int32_t n, float *keys, float *values);
    bool (*scatter)(dt_kv_home *home, int32_t layer, int32_t lane, const int32_t *entries, int32_t n, const float *keys,
                    const float *values);
} dt_kv_home_ops;
struct dt_kv_home {
    const dt_kv_home_ops *ops;
};

typedef struct dt_kv_layer_params {
    int32_t n_lanes;
    dt_kv_format format;
    dt_budget budget;
    int32_t window; /* 0 = none; else a query at position p sees only positions > p - window */
    dt_kv_rope rope;
    bool keeps_origins; /* entries know their token's index in the conversation also when their position changes (close_up.c) */
} dt_kv_layer_params;

/* layers[n_layers] is copied. memory must outlive the cache. */
dt_status dt_kv_new(dt_memory *memory, const dt_kv_layer_params *layers, int32_t n_layers, dt_kv **out, dt_error *error);
void dt_kv_free(dt_kv *kv);
/* Gives an empty cache the home of its layers that are elsewhere, to be freed with it. */
void dt_kv_set_home(dt_kv *kv, dt_kv_home *home);
dt_kv_home *dt_kv_get_home(const dt_kv *kv); /* NULL: every layer is in blocks */
/* An empty cache with the same memory, formats and budgets. */
dt_status dt_kv_new_like(const dt_kv *kv, dt_kv **out, dt_error *error);
/* The same with keys and values of another type. It has no home: it is there to be measured. */
dt_status dt_kv_new_of_type(const dt_kv *kv, dt_kv_type type, dt_kv **out, dt_error *error);

/* Makes room for n more entries in every lane and adds them as uncommitted, positions [first_position, first_position + n);
 * their keys and values are to be written by the attention kernel's store, masses, norms and biases are 0. first_position must
 * follow the newest one, except in an empty cache. Copies a shared tail block. On failure nothing has changed. */
dt_status dt_kv_append(dt_kv *kv, int32_t first_position, int32_t n, dt_error *error);
/* Keeps the first n_keep of the uncommitted entries as committed and removes the others. */
void dt_kv_commit(dt_kv *kv, int32_t n_keep);
/* Removes every entry at position >= position, committed or not; the next one goes there. Only while all removed positions'
 * predecessors are what the caller wants: entries dropped by a round do not come back. On failure (memory) nothing has changed. */
dt_status dt_kv_truncate(dt_kv *kv, int32_t position, dt_error *error);
/* Removes victims[n] (entry indices, ascending, committed) from a lane. Fails (nothing changed) for
 * memory, and for victims that are not as said. */
dt_status dt_kv_drop(dt_kv *kv, int32_t layer, int32_t lane, const int32_t *victims, int32_t n, dt_error *error);
/* A second cache with the same content, in the same memory; blocks are shared until one side writes. */
dt_status dt_kv_fork(const dt_kv *kv, dt_kv **out, dt_error *error);
/* Other budgets from now on, one per layer, lists of lanes copied. total_cache_size > 0: shared by all layers with a policy, each
 * counted with the mean length of its lanes; the budgets' max and min are then each lane's bounds. DT_ERR_ARGUMENT where a policy
 * needs mass or peaks and the entries have no room for them. */
dt_status dt_kv_set_budgets(dt_kv *kv, const dt_budget *budgets, int32_t total_cache_size, dt_error *error);
/* Removes everything. */
void dt_kv_clear(dt_kv *kv);

/* One lane for readers. Pointers are valid until the next call that changes the cache. Masses and norms exist only where
 * dt_kv_layer_needs_mass; elsewhere they are NULL, and so no memory is spent on them. */
typedef struct dt_kv_lane_view {
    const dt_kv_span *spans;
    int32_t n_spans, n_entries, n_uncommitted;
    int32_t n_slots;                             /* of the entries: memory slots, whose positions are negative */
    float *recent_mass, *value_norm, *peak_mass; /* [n_entries] or NULL */
    const float *bias;                           /* [n_entries] or NULL = all zero */
    const int32_t *origin;                       /* [n_entries] or NULL = not kept */
} dt_kv_lane_view;

void dt_kv_lane(const dt_kv *kv, int32_t layer, int32_t lane, dt_kv_lane_view *out);
/* Sets an entry's bias, which is added to its logits. Allocates the lane's bias array when first needed. */
dt_status dt_kv_set_bias(dt_kv *kv, int32_t layer, int32_t lane, int32_t entry, float bias, dt_error *error);
/* positions[n_entries] of a lane, in entry order. */
void dt_kv_positions(const dt_kv *kv, int32_t layer, int32_t lane, int32_t *positions);
/* The tokens' indices in the conversation likewise; where they are not kept, and for memory slots, positions. */
void dt_kv_origins(const dt_kv *kv, int32_t layer, int32_t lane, int32_t *origins);
int32_t dt_kv_length(const dt_kv *kv, int32_t layer); /* longest lane */
/* Entries that every lane can grow by before a shared budget is exceeded; INT64_MAX where there is none. Looks at every lane. */
int64_t dt_kv_shared_room(const dt_kv *kv);
/* The same before a round comes in this layer; below 0: it is due. shared_room: dt_kv_shared_room, asked for once for all layers. */
int64_t dt_kv_room(const dt_kv *kv, int32_t layer, int64_t shared_room);
/* Whether one would come if every lane grew by n_more. */
bool dt_kv_exceeds(const dt_kv *kv, int32_t layer, int64_t n_more);
/* Most blocks that a lane of the layer has. */
int32_t dt_kv_blocks_of(const dt_kv *kv, int32_t layer);
double dt_kv_mean_length(const dt_kv *kv, int32_t layer);
const dt_kv_layer_params *dt_kv_layer(const dt_kv *kv, int32_t layer);
/* Bytes of all blocks this cache refers to (shared ones counted in full, a spare one included) plus its own arrays and its home. */
size_t dt_kv_bytes(const dt_kv *kv);
/* dt_kv_bytes of a cache that evicts nothing, with n entries in each lane. */
size_t dt_kv_bytes_for(const dt_kv *kv, int32_t n);

/* The most bytes a cache ever has allocated whose lanes of layer i never exceed longest[i] entries: also in the middle of growing,
 * of rounds and of cuts. Forks come on top, and biases but for those of memory slots. */
size_t dt_kv_bytes_bound(const dt_kv_layer_params *layers, int32_t n_layers, const int32_t *longest, int32_t total_cache_size);
/* The same for a cache that is there, with a length for each lane, those of a layer one after the other. has_bias: they bring memory
 * slots along that their budgets have none of. */
size_t dt_kv_bytes_most(const dt_kv *kv, const int32_t *lengths, bool has_bias);
int32_t dt_kv_total_cache_size(const dt_kv *kv); /* as in dt_kv_set_budgets */
int32_t dt_kv_layers_that_evict(const dt_kv *kv);

/* ---- plain columns, for files (plain.c) ---- */

typedef enum dt_kv_column {
    DT_KV_POSITIONS, /* int32 */
    DT_KV_ORIGINS,   /* int32, where the lane keeps them */
    DT_KV_K_SCALES,  /* float, INT8 only */
    DT_KV_V_SCALES,
    DT_KV_RECENT_MASS, /* float, where dt_kv_layer_needs_mass */
    DT_KV_VALUE_NORM,
    DT_KV_PEAK_MASS, /* float, where dt_kv_layer_needs_peak */
    DT_KV_BIAS,      /* float, where the lane has biases */
    DT_KV_KEYS,      /* [dim_k] halves or signed bytes */
    DT_KV_VALUES,    /* [dim_v] likewise */
    DT_KV_N_COLUMNS
} dt_kv_column;

/* Bytes of one entry in a column; 0: the format has no such column. */
size_t dt_kv_column_bytes(const dt_kv_format *format, dt_kv_column column);
/* Entries [first, first + n) of a column that is there. False when a device that holds them fails, or memory. INT8 keys and values
 * that are elsewhere have finer scales there: they are rounded to one per entry. */
bool dt_kv_get_column(const dt_kv *kv, int32_t layer, int32_t lane, dt_kv_column column, int32_t first, int32_t n, void *out);
/* Entries [first, first + n) in floats: keys[n][dim_k], rotated as they are stored, and values[n][dim_v]. False when a device that
 * holds them fails, or memory. */
bool dt_kv_get_entries(const dt_kv *kv, int32_t layer, int32_t lane, int32_t first, int32_t n, float *keys, float *values);
/* Gives an empty lane n committed entries, whose columns are all to be put next. The cache is consistent once that is done for
 * every lane and dt_kv_restore_end was called; after a failure it can only be cleared or freed. */
dt_status dt_kv_restore_lane(dt_kv *kv, int32_t layer, int32_t lane, int32_t n, bool has_bias, dt_error *error);
/* All entries of a column; false when a key or value is not finite, or a device does not take it. scales: the entries' [n], which
 * INT8 keys and values that are elsewhere need, and nobody else. */
bool dt_kv_put_column(dt_kv *kv, int32_t layer, int32_t lane, dt_kv_column column, const void *in, const void *scales);
/* Value norms from the values, for a layer that needs them where a file has none. */
void dt_kv_make_norms(dt_kv *kv, int32_t layer, int32_t lane);
void dt_kv_restore_end(dt_kv *kv, int32_t next_position, int32_t newest_dropped, int32_t shift);
int32_t dt_kv_newest_dropped(const dt_kv *kv);

/* ---- rounds (round.c) ---- */

typedef struct dt_round_result {
    bool has_dropped;  /* something went, evicted or passed by a window: what is before next_position is no longer whole */
    int32_t n_rounds;  /* layers in which something was evicted */
    int64_t n_evicted; /* tokens, summed over layers, mean over a layer's lanes, rounded */
} dt_round_result;

/* Lanes over their budget go down to the low-water mark, or, when `exact`, to max_cache_size. A shared budget that is exceeded goes
 * down by the same share, each lane keeping what scores above a threshold common to all. What goes is merged into memory slots
 * where the layer has them. What a layer's window has passed goes before any policy is asked, and is not counted. Nothing may be
 * uncommitted. On failure for memory nothing was evicted, so that the round can be tried again; on a device's, lanes not yet treated
 * stay over budget. The cache is consistent and *result tells what went.
 * workers (NULL: the calling thread alone) treat several lanes at once; what goes doesn't depend on how many they are. */
dt_status dt_kv_round(dt_kv *kv, int32_t next_position, bool exact, const dt_workers *workers, dt_round_result *result,
                      dt_error *error);

/* ---- sliding windows (window.c) ---- */

/* Blocks of tokens that a conversation can be taken back by, in layers with a window, without being computed again. */
#define DT_KV_REWIND_BLOCKS 4

/* Drops what the layers' windows have passed, once it is worth it; to be called after every commit. *whole_from is raised to the
 * lowest position that dt_kv_truncate may then still go to. On failure (memory) nothing has changed. */
dt_status dt_kv_slide(dt_kv *kv, int32_t next_position, int32_t *whole_from, dt_error *error);
/* Tokens that can be added before it has something to drop. */
int64_t dt_kv_slide_room(const dt_kv *kv);

/* ---- past the context (close_up.c) ---- */

/* Takes the holes out of every lane's positions, so that the next position falls as far as the longest lane allows; keys turn
 * along. limit: positions that may stay occupied; layers whose window fits move as a whole. Nothing may be uncommitted, and
 * dt_kv_truncate can't go back behind it. On failure (memory) nothing has moved. */
dt_status dt_kv_close_up(dt_kv *kv, int32_t limit, dt_error *error);
/* By how much it has fallen since the cache was empty: the next token's index is its position + shift. */
int32_t dt_kv_shift(const dt_kv *kv);

/* Whether any entry has attention mass, and takes it from all but memory slots, as if none had been observed. */
bool dt_kv_has_masses(const dt_kv *kv);
void dt_kv_forget_masses(dt_kv *kv);
/* True when the layer's policy needs attention mass, and entries have room for it. */
bool dt_kv_layer_needs_mass(const dt_kv *kv, int32_t layer);
bool dt_kv_layer_needs_peak(const dt_kv *kv, int32_t layer);

dt_status dt_kv_check(const dt_kv *kv, dt_error *error);

/* Writes random keys, values and the positions from first_position on into a lane's uncommitted entries (synthetic.c).
 * False when memory or a device fails. */
bool dt_kv_fill_uncommitted(dt_kv *kv, int32_t layer, int32_t lane, int32_t first_position, uint64_t *state);

#endif
