/*
 * The device home of a cache: keys and values of layers that run through plain ggml operators (device_attention.c), on any backend.
 *
 * What is kept, evicted, pinned, counted and scored is decided where it is for the host's layers, in kv/ and policy/: those layers
 * have lanes, positions, masses and rounds there, and blocks without keys and values (format.elsewhere). This home follows. For
 * each layer it has two tensors, keys [D, capacity, G] and values [Dv, capacity, G], F16 or Q8_0 (INT8), in the memory of the
 * layer's device; row i of a lane belongs to entry i of the lane. So the lanes of a layer differ in length, layers in everything.
 *
 *   append     rows are written by ggml_set_rows inside the batch's graph
 *   eviction   a round moves entries from a lane's tail into holes. The home only notes who came from where (source), and plays it
 *              back on the device before the next batch, all lanes of a layer in one gather and one scatter. Nothing of the cache
 *              goes through the host. F16 survives the gather's floats exactly, and so does Q8_0: the largest number of 32 is
 *              always 127 steps, so quantizing again finds the same step.
 *   slots      what is evicted from a layer with memory slots is merged by the host: an evicted token comes over once, slots in
 *              each round. They enter attention by the mask, as all biases do.
 *   context    past the context keys turn on (kv/close_up.c): noted like moves, and done by the rotation that the model itself uses.
 *   repetition sees of a lane only some blocks (dt_sequence's focus): these are gathered into a copy for the time of the batch. The
 *              largest probabilities that scores come from then are a second product beside the fused attention.
 *   attention  sees entries by a mask: causal, window, biases, focus, and the rows behind a lane's end that pad it to N_KV_PAD.
 *              One mask serves all lanes and layers of the same lengths that need nothing more.
 *   scores     the last queries stay in a ring beside the cache. Right before a round, one product over those that came since the
 *              round before (at most DT_OBSERVE_WINDOW) gives the attention mass, and one pass over the values their norms. So the
 *              fused attention stays fused; what the kernels of attn/ collect per step beyond the window is missing here. The score
 *              predict reads each key and value once.
 *
 * Invariants: rows behind a lane's end hold finite numbers (a mask can't hide NaN): memory comes zeroed; nothing is appended while
 * moves are pending; shapes of graphs change only when a padded length, a capacity or the sharing of masks does.
 */
#ifndef DT_GRAPH_DEVICE_CACHE_H
#define DT_GRAPH_DEVICE_CACHE_H

#include "graph/decoder.h"
#include "kv/kv.h"

#define DT_N_KV_PAD 256     /* what the fused kernels of GPUs want */
#define DT_RING 128         /* queries kept: the observed window, and drafts that may be taken back */
#define DT_MAX_ELSEWHERE 16 /* most sequences of a batch: each adds nodes to its graph */

typedef struct dt_device_cache dt_device_cache;

/* A home for the layers that are elsewhere. Their tensors are counted in `memory`. */
dt_status dt_device_cache_new(const dt_decoder *decoder, dt_memory *memory, const dt_kv_layer_params *layers, dt_kv_home **out,
                              dt_error *error);
/* Most bytes that it comes to when lanes of layer i never exceed longest[i] entries. */
size_t dt_device_cache_bytes_bound(const dt_decoder *decoder, const dt_kv_layer_params *layers, const int32_t *longest);
/* The cache's, or NULL. */
dt_device_cache *dt_device_cache_of(const dt_kv *kv);

/* ---- one batch ---- */

/* What a graph over this cache depends on beside its batch size. */
typedef struct dt_device_layer_shape {
    int32_t n_kv;       /* entries that attention runs over, padded; 0: not here */
    int32_t n_masks;    /* 1, or one a lane */
    int64_t generation; /* of the layer's tensors: no two ever share one */
    int64_t mask_at;    /* where its masks begin in the device's input, in halves */
    int64_t rows_at;    /* likewise its row numbers [N, G] */
    int64_t seen_at;    /* likewise the rows [n_kv, G] that attention gathers; -1: it runs over the first n_kv where they are */
    int64_t peaks_at;   /* where its peaks [n_kv, G] begin among those of the batch; -1: none are collected */
} dt_device_layer_shape;

typedef struct dt_device_shape {
    int64_t n_mask[DT_MAX_DEVICES], n_rows[DT_MAX_DEVICES], n_seen[DT_MAX_DEVICES]; /* lengths of the inputs */
    int64_t n_peaks;
    dt_device_layer_shape *layers; /* [L] */
} dt_device_shape;

typedef struct dt_device_sight {
    int32_t n_query, first_position;
    int32_t first_index;          /* in the conversation, which may be further along than positions are (dt_kv_shift) */
    int32_t focus_from, focus_to; /* dt_sequence's */
    const bool *peaks;            /* with a focus: [L] where the largest probabilities are collected; NULL: nowhere */
} dt_device_sight;

/* What a device is told before a batch: masks F16 [n_mask], rows I64 [n_rows], ring I64 [min(n_query, DT_RING)] where a layer has
 * one, seen I32 [n_seen] where there is a focus; else NULL. */
typedef struct dt_device_inputs {
    struct ggml_tensor *masks, *rows, *ring, *seen;
} dt_device_inputs;

/* Plays pending moves and turns back. backends: by device; the cache computes with them until the next call. */
dt_status dt_device_cache_settle(dt_device_cache *cache, const dt_kv *kv, ggml_backend_t const *backends, dt_error *error);
/* After dt_kv_append: makes room on the devices, and tells the shape of the batch's graph; valid until the next call. */
dt_status dt_device_cache_reserve(dt_device_cache *cache, const dt_kv *kv, const dt_device_sight *sight,
                                  const dt_device_shape **shape, dt_error *error);
dt_status dt_device_cache_fill_inputs(dt_device_cache *cache, const dt_kv *kv, const dt_device_sight *sight, int32_t device,
                                      const dt_device_inputs *inputs, dt_error *error);
/* Which of a lane's peaks is that of the first entry of the focus. */
int32_t dt_device_cache_focus_column(const dt_kv *kv, const dt_device_sight *sight, int32_t layer, int32_t lane);
/* The batch was computed: its queries are in the ring. */
void dt_device_cache_computed(dt_device_cache *cache, const dt_device_sight *sight);

/* ---- graphs (device_attention.c) ---- */

/* What is still to be done for an entry: nothing where it lies in its own row and is not to be turned. */
typedef struct dt_device_row {
    int32_t source; /* row in which its key and value still lie */
    int32_t turn;   /* positions by which its key is to turn on */
} dt_device_row;

typedef struct dt_device_layer {
    int32_t device;       /* index into decoder->devices; -1: the layer is on the host */
    int32_t n_lanes;      /* G */
    int32_t n_heads;      /* H */
    int32_t dim_k, dim_v; /* rows; a multiple of 32 for Q8_0, filled up with zeros */
    enum ggml_type type;
    int32_t capacity;             /* rows of a lane; 0: no memory yet */
    struct ggml_tensor *k, *v;    /* [dim_k, capacity, G], [dim_v, capacity, G] */
    struct ggml_tensor *ring;     /* [dim_k * H, DT_RING + 1] F32, or NULL where no score needs it, or nothing was computed yet */
    struct ggml_context *context; /* of k and v */
    struct ggml_context *ring_context;
    ggml_backend_buffer_t buffer, ring_buffer;
    size_t bytes, ring_bytes; /* charged */
    int64_t generation;
    dt_device_row *pending; /* [G][capacity] by entry */
    bool moved;             /* some entry is pending */
    bool needs_ring;
} dt_device_layer;

const dt_device_layer *dt_device_cache_layer(const dt_device_cache *cache, int32_t layer);

/* Where a graph over one device is being built. */
typedef struct dt_device_builder {
    struct ggml_context *ctx;
    struct ggml_cgraph *cgraph;
    ggml_backend_dev_t device;
    const dt_hparams *hp;
    bool no_flash; /* by products and softmax even where the device has fused attention */
} dt_device_builder;

/* Stores the batch's keys and values and attends. q [D, H, N], k [D, G, N], v [Dv*G, N]. Returns [Dv*H, N]; *peaks: [n_kv, G],
 * where they are collected. */
struct ggml_tensor *dt_device_attend(const dt_device_builder *b, const dt_device_layer *layer, const dt_device_layer_shape *shape,
                                     const dt_device_inputs *inputs, struct ggml_tensor *q, struct ggml_tensor *k,
                                     struct ggml_tensor *v, struct ggml_tensor **peaks);

/* Attention weights [n_kv, N, n_rep, G] of q [D, N, n_rep, G] over k [D, n_kv, 1, G]. Reads b's ctx and hp only. */
struct ggml_tensor *dt_device_weights(const dt_device_builder *b, struct ggml_tensor *q, struct ggml_tensor *k,
                                      struct ggml_tensor *mask);

/* next_index: in the conversation. Attention mass that the ring's queries since the last observation gave the entries of a layer, and the norms of its values. Each
 * [G][*stride], the cache's until its next call. *n_queries = 0: there is nothing new, and no mass. */
dt_status dt_device_cache_observe(dt_device_cache *cache, const dt_kv *kv, int32_t layer, int32_t next_index,
                                  ggml_backend_t const *backends, const float **mass, const float **norms, size_t *stride,
                                  int32_t *n_queries, dt_error *error);

#endif
