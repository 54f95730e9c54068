/*
 * Work on the devices beside batches: what was moved and turned is played back, entries are read and written for memory slots, and
 * attention is observed (device_cache.h).
 *
 * Each is a small graph of ggml's operators, built, run and forgotten. Invariant: it waits until the device is done, so batches find
 * the cache settled.
 */
#include "graph/device_cache_internal.h"

#include "weights/ggml_calls.h"

#include <math.h>
#include <string.h>

#define SIDE_NODES 64 /* of a graph beside the batch's */
#define PIECE 1024    /* rows of a lane that are moved at once: what a device does in one go has its limits */

/* ---- side graphs ---- */

typedef struct side_graph {
    struct ggml_context *ctx;
    struct ggml_cgraph *cgraph;
} side_graph;

static bool side_begin(side_graph *s) {
    const size_t bytes = SIDE_NODES * ggml_tensor_overhead() + ggml_graph_overhead_custom(SIDE_NODES, false);
    s->ctx = ggml_init((struct ggml_init_params){.mem_size = bytes, .no_alloc = true});
    s->cgraph = s->ctx != NULL ? ggml_new_graph_custom(s->ctx, SIDE_NODES, false) : NULL;
    return s->cgraph != NULL;
}

/* False also where the device lacks an operator: ggml would end the process. */
static bool side_allocate(dt_device_cache *cache, const side_graph *s, int32_t device) {
    for (int i = 0; i < ggml_graph_n_nodes(s->cgraph); i++) {
        if (!ggml_backend_dev_supports_op(cache->decoder->devices[device], ggml_graph_node(s->cgraph, i))) {
            return false;
        }
    }
    if (cache->allocators[device] == NULL) {
        cache->allocators[device] = ggml_gallocr_new(ggml_backend_dev_buffer_type(cache->decoder->devices[device]));
    }
    return cache->allocators[device] != NULL && dt_ggml_allocate_graph(cache->allocators[device], s->cgraph);
}

static struct ggml_tensor *side_input(const side_graph *s, enum ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2,
                                      int64_t ne3) {
    struct ggml_tensor *t = ggml_new_tensor_4d(s->ctx, type, ne0, ne1, ne2, ne3);
    ggml_set_input(t);
    return t;
}

/* ---- moves and turns ---- */

/* Of the same entries: rows to read, to write, and positions to turn by. */
typedef struct row_list {
    int64_t *to;          /* [G][n] */
    int32_t *from, *turn; /* likewise */
    int32_t n;
    bool turns; /* some turn is not 0 */
} row_list;

static bool is_pending(const dt_device_row *row, int32_t entry) { return row->source != entry || row->turn != 0; }

/* Pending entries of the lane that has most, at most PIECE. */
static int32_t count_pending(const dt_device_layer *layer, const dt_kv *kv, int32_t index) {
    int32_t most = 0;
    for (int32_t lane = 0; lane < layer->n_lanes; lane++) {
        dt_kv_lane_view view;
        dt_kv_lane(kv, index, lane, &view);
        const dt_device_row *pending = dt_device_pending(layer, lane);
        int32_t n = 0;
        for (int32_t i = 0; i < view.n_entries && n < PIECE; i++) {
            n += is_pending(&pending[i], i);
        }
        most = DT_MAX(most, n);
    }
    return most;
}

/* The first list->n pending entries of each lane; a lane that has fewer does again what the last of them asks for, or leaves row 0
 * where it is. */
static void list_pending(const dt_device_layer *layer, const dt_kv *kv, int32_t index, row_list *list) {
    const int32_t n = list->n;
    for (int32_t lane = 0; lane < layer->n_lanes; lane++) {
        const dt_device_row *pending = dt_device_pending(layer, lane);
        const size_t first = (size_t)lane * (size_t)n;
        dt_kv_lane_view view;
        dt_kv_lane(kv, index, lane, &view);
        int32_t found = 0;
        for (int32_t i = 0; i < view.n_entries && found < n; i++) {
            if (is_pending(&pending[i], i)) {
                list->from[first + (size_t)found] = pending[i].source;
                list->turn[first + (size_t)found] = pending[i].turn;
                list->to[first + (size_t)found++] = i;
                list->turns = list->turns || pending[i].turn != 0;
            }
        }
        for (; found < n; found++) {
            const size_t at = first + (size_t)found;
            list->from[at] = found > 0 ? list->from[at - 1] : 0;
            list->turn[at] = found > 0 ? list->turn[at - 1] : 0;
            list->to[at] = found > 0 ? list->to[at - 1] : 0;
        }
    }
}

static void mark_done(const dt_device_layer *layer, const row_list *list) {
    for (int32_t lane = 0; lane < layer->n_lanes; lane++) {
        dt_device_row *pending = dt_device_pending(layer, lane);
        for (int32_t i = 0; i < list->n; i++) {
            const int32_t entry = (int32_t)list->to[(size_t)lane * (size_t)list->n + (size_t)i];
            pending[entry] = (dt_device_row){.source = entry};
        }
    }
}

/* Keys [D, n, G], each turned by its number of positions [n * G], as dt_rope_frequencies says. With ext_factor ggml would also make
 * them longer (YaRN), which they are already. */
static struct ggml_tensor *turn_keys(const dt_device_cache *cache, const side_graph *s, int32_t index, struct ggml_tensor *k,
                                     struct ggml_tensor *positions) {
    const dt_hparams *hp = &cache->decoder->hp;
    const int64_t n = k->ne[1], n_lanes = k->ne[2];
    const float scale = hp->rope_freq_scale[index], length = hp->rope_ext_factor != 0.0f ? 1.0f + 0.1f * logf(1.0f / scale) : 1.0f;
    k = ggml_reshape_3d(s->ctx, k, k->ne[0], 1, n * n_lanes);
    k = ggml_rope_ext(s->ctx, k, positions, cache->decoder->rope_factors[cache->layers[index].device], hp->rope_dim,
                      hp->arch->rope_style == DT_ROPE_NEOX ? GGML_ROPE_TYPE_NEOX : 0, hp->rope_ctx_orig, hp->rope_base[index],
                      scale, hp->rope_ext_factor, 1.0f / length, hp->rope_beta_fast, hp->rope_beta_slow);
    return ggml_reshape_3d(s->ctx, k, k->ne[0], n, n_lanes);
}

/* Rows that are read are never written to: moves go from behind a lane's end to before it, turns stay in place. So it may be done
 * in pieces. */
static bool play_back(dt_device_cache *cache, int32_t index, const row_list *list) {
    const dt_device_layer *layer = &cache->layers[index];
    side_graph s = {0};
    bool done = side_begin(&s);
    if (done) {
        struct ggml_tensor *from = side_input(&s, GGML_TYPE_I32, list->n, layer->n_lanes, 1, 1);
        struct ggml_tensor *to = side_input(&s, GGML_TYPE_I64, list->n, layer->n_lanes, 1, 1);
        struct ggml_tensor *turn = list->turns ? side_input(&s, GGML_TYPE_I32, ggml_nelements(from), 1, 1, 1) : NULL;
        struct ggml_tensor *k = ggml_get_rows(s.ctx, layer->k, from), *v = ggml_get_rows(s.ctx, layer->v, from);
        k = turn != NULL ? turn_keys(cache, &s, index, k, turn) : k;
        ggml_build_forward_expand(s.cgraph, ggml_set_rows(s.ctx, layer->k, k, to));
        ggml_build_forward_expand(s.cgraph, ggml_set_rows(s.ctx, layer->v, v, to));
        done = side_allocate(cache, &s, layer->device) && dt_ggml_set(from, list->from, 0, ggml_nbytes(from)) &&
               dt_ggml_set(to, list->to, 0, ggml_nbytes(to)) &&
               (turn == NULL || dt_ggml_set(turn, list->turn, 0, ggml_nbytes(turn))) &&
               dt_ggml_compute(cache->backends[layer->device], s.cgraph) == GGML_STATUS_SUCCESS;
    }
    ggml_free(s.ctx);
    return done;
}

static dt_status settle_layer(dt_device_cache *cache, const dt_kv *kv, int32_t index, dt_error *error) {
    dt_device_layer *layer = &cache->layers[index];
    for (int32_t n; (n = count_pending(layer, kv, index)) > 0;) {
        const size_t n_all = (size_t)n * (size_t)layer->n_lanes;
        row_list list = {.n = n};
        list.to = dt_device_reserve(cache, &cache->moves, n_all * (sizeof *list.to + sizeof *list.from + sizeof *list.turn));
        if (list.to == NULL) {
            return dt_fail_memory(error, n_all * sizeof *list.to, "compacting the KV cache");
        }
        list.from = (int32_t *)(list.to + n_all);
        list.turn = list.from + n_all;
        list_pending(layer, kv, index, &list);
        if (!play_back(cache, index, &list)) {
            return dt_device_fail(cache, layer, "to compact the KV cache", error);
        }
        mark_done(layer, &list);
    }
    dt_device_reset_pending(layer);
    return DT_OK;
}

dt_status dt_device_cache_settle(dt_device_cache *cache, const dt_kv *kv, ggml_backend_t const *backends, dt_error *error) {
    dt_status status = DT_OK;
    cache->backends = backends;
    for (int32_t i = 0; status == DT_OK && i < cache->decoder->hp.n_layers; i++) {
        status = cache->layers[i].moved ? settle_layer(cache, kv, i, error) : DT_OK;
    }
    return status;
}

/* ---- some entries ---- */

/* Where the entries lie, counted over all lanes; false when a key is still to be turned. */
static bool find_rows(const dt_device_layer *layer, int32_t lane, const int32_t *entries, int32_t n, int64_t *out) {
    const dt_device_row *pending = dt_device_pending(layer, lane);
    bool found = true;
    for (int32_t i = 0; i < n; i++) {
        found = found && pending[entries[i]].turn == 0;
        out[i] = (int64_t)lane * layer->capacity + pending[entries[i]].source;
    }
    return found;
}

/* All lanes' rows below each other. */
static struct ggml_tensor *every_row(const side_graph *s, struct ggml_tensor *t) {
    return ggml_reshape_2d(s->ctx, t, t->ne[0], t->ne[1] * t->ne[2]);
}

/* Rows of the first `dim` of `stored` numbers. */
static void copy_numbers(float *to, int64_t to_stride, const float *from, int64_t from_stride, int64_t dim, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        memcpy(to + i * to_stride, from + i * from_stride, (size_t)dim * sizeof *to);
    }
}

bool dt_device_gather(dt_kv_home *home, int32_t layer_index, int32_t lane, const int32_t *entries, int32_t n, float *keys,
                      float *values) {
    dt_device_cache *cache = dt_device_cache_from(home);
    const dt_device_layer *layer = &cache->layers[layer_index];
    int64_t *at = dt_device_reserve(cache, &cache->moves, (size_t)n * (sizeof(int64_t) + sizeof(int32_t)));
    float *numbers =
        dt_device_reserve(cache, &cache->results, (size_t)n * (size_t)DT_MAX(layer->dim_k, layer->dim_v) * sizeof(float));
    side_graph s = {0};
    bool done =
        cache->backends != NULL && at != NULL && numbers != NULL && find_rows(layer, lane, entries, n, at) && side_begin(&s);
    if (done) {
        int32_t *rows = (int32_t *)(at + n);
        for (int32_t i = 0; i < n; i++) {
            rows[i] = (int32_t)at[i];
        }
        struct ggml_tensor *from = side_input(&s, GGML_TYPE_I32, n, 1, 1, 1);
        struct ggml_tensor *k = ggml_get_rows(s.ctx, every_row(&s, layer->k), from);
        struct ggml_tensor *v = ggml_get_rows(s.ctx, every_row(&s, layer->v), from);
        ggml_set_output(k);
        ggml_set_output(v);
        ggml_build_forward_expand(s.cgraph, k);
        ggml_build_forward_expand(s.cgraph, v);
        done = side_allocate(cache, &s, layer->device) && dt_ggml_set(from, rows, 0, ggml_nbytes(from)) &&
               dt_ggml_compute(cache->backends[layer->device], s.cgraph) == GGML_STATUS_SUCCESS &&
               dt_ggml_get(k, numbers, 0, ggml_nbytes(k));
        if (done) {
            const int32_t dim = cache->decoder->hp.head_dim_k;
            copy_numbers(keys, dim, numbers, layer->dim_k, dim, n);
            done = dt_ggml_get(v, numbers, 0, ggml_nbytes(v));
        }
        if (done) {
            const int32_t dim = cache->decoder->hp.head_dim_v;
            copy_numbers(values, dim, numbers, layer->dim_v, dim, n);
        }
    }
    ggml_free(s.ctx);
    return done;
}

bool dt_device_scatter(dt_kv_home *home, int32_t layer_index, int32_t lane, const int32_t *entries, int32_t n, const float *keys,
                       const float *values) {
    dt_device_cache *cache = dt_device_cache_from(home);
    const dt_device_layer *layer = &cache->layers[layer_index];
    const dt_hparams *hp = &cache->decoder->hp;
    int64_t *rows = dt_device_reserve(cache, &cache->moves, (size_t)n * sizeof *rows);
    const size_t n_keys = (size_t)n * (size_t)layer->dim_k, n_values = (size_t)n * (size_t)layer->dim_v;
    float *numbers = dt_device_reserve(cache, &cache->results, (n_keys + n_values) * sizeof *numbers);
    side_graph s = {0};
    bool done =
        cache->backends != NULL && rows != NULL && numbers != NULL && find_rows(layer, lane, entries, n, rows) && side_begin(&s);
    if (done) {
        memset(numbers, 0, (n_keys + n_values) * sizeof *numbers);
        copy_numbers(numbers, layer->dim_k, keys, hp->head_dim_k, hp->head_dim_k, n);
        copy_numbers(numbers + n_keys, layer->dim_v, values, hp->head_dim_v, hp->head_dim_v, n);
        struct ggml_tensor *to = side_input(&s, GGML_TYPE_I64, n, 1, 1, 1);
        struct ggml_tensor *k = side_input(&s, GGML_TYPE_F32, layer->dim_k, n, 1, 1);
        struct ggml_tensor *v = side_input(&s, GGML_TYPE_F32, layer->dim_v, n, 1, 1);
        ggml_build_forward_expand(s.cgraph, ggml_set_rows(s.ctx, every_row(&s, layer->k), k, to));
        ggml_build_forward_expand(s.cgraph, ggml_set_rows(s.ctx, every_row(&s, layer->v), v, to));
        done = side_allocate(cache, &s, layer->device) && dt_ggml_set(to, rows, 0, ggml_nbytes(to)) &&
               dt_ggml_set(k, numbers, 0, ggml_nbytes(k)) && dt_ggml_set(v, numbers + n_keys, 0, ggml_nbytes(v)) &&
               dt_ggml_compute(cache->backends[layer->device], s.cgraph) == GGML_STATUS_SUCCESS;
    }
    ggml_free(s.ctx);
    return done;
}

/* ---- observation ---- */

/* Rows of the ring that hold the newest queries not observed yet, at most DT_OBSERVE_WINDOW, oldest first. */
static int32_t find_queries(const dt_device_cache *cache, int32_t layer, int32_t next_index, int32_t *slots) {
    const int32_t first = DT_MAX(next_index - DT_OBSERVE_WINDOW, DT_MIN(cache->observed_until[layer], next_index));
    int32_t n = 0;
    for (int32_t i = DT_MAX(first, 0); i < next_index; i++) {
        if (cache->ring_index[i % DT_RING] == i) {
            slots[n++] = i % DT_RING;
        }
    }
    return n;
}

/* Masks of the observed queries, [G][n][n_kv]. A query that sees nothing of a lane any more looks at what is behind its end. */
static dt_status fill_observed(dt_device_cache *cache, const dt_kv *kv, int32_t layer, int32_t n_kv, const int32_t *slots,
                               int32_t n, uint16_t *out, dt_error *error) {
    const dt_kv_layer_params *params = dt_kv_layer(kv, layer);
    for (int32_t lane = 0; lane < params->n_lanes; lane++) {
        dt_kv_lane_view view;
        dt_kv_lane(kv, layer, lane, &view);
        int32_t *positions = dt_device_reserve(cache, &cache->positions, (size_t)n_kv * sizeof *positions);
        if (positions == NULL) {
            return dt_fail_memory(error, (size_t)n_kv * sizeof *positions, "a mask");
        }
        dt_kv_positions(kv, layer, lane, positions);
        for (int32_t q = 0; q < n; q++, out += n_kv) {
            const int32_t p = cache->ring_index[slots[q]] - dt_kv_shift(kv);
            bool sees = false;
            for (int32_t e = 0; e < n_kv; e++) {
                const bool visible =
                    e < view.n_entries && positions[e] <= p && (params->window == 0 || positions[e] > p - params->window);
                out[e] = !visible ? DT_HALF_HIDDEN : view.bias != NULL ? dt_f32_to_f16(view.bias[e]) : 0;
                sees = sees || visible;
            }
            out[n_kv - 1] = sees ? out[n_kv - 1] : 0;
        }
    }
    return DT_OK;
}

/* Sum over the rows of each lane: x [n_kv, n, n_rep, G] -> [1, n_kv, G] */
static struct ggml_tensor *sum_queries(struct ggml_context *ctx, struct ggml_tensor *x) {
    x = ggml_reshape_3d(ctx, x, x->ne[0], x->ne[1] * x->ne[2], x->ne[3]);
    return ggml_sum_rows(ctx, ggml_cont(ctx, ggml_transpose(ctx, x)));
}

typedef struct observation {
    struct ggml_tensor *all_rows, *slots, *mask; /* inputs */
    struct ggml_tensor *mass, *squares;          /* [1, n_kv, G] */
} observation;

static void build_observation(const dt_device_cache *cache, const side_graph *s, const dt_device_layer *layer, int32_t n_kv,
                              int32_t n_queries, observation *out) {
    struct ggml_context *ctx = s->ctx;
    out->all_rows = side_input(s, GGML_TYPE_I32, n_kv, layer->n_lanes, 1, 1);
    out->squares = ggml_sum_rows(ctx, ggml_sqr(ctx, ggml_get_rows(ctx, layer->v, out->all_rows)));
    ggml_set_output(out->squares);
    ggml_build_forward_expand(s->cgraph, out->squares);
    if (n_queries == 0) {
        return;
    }
    const int64_t n_rep = layer->n_heads / layer->n_lanes;
    out->slots = side_input(s, GGML_TYPE_I32, n_queries, 1, 1, 1);
    out->mask = side_input(s, GGML_TYPE_F16, n_kv, n_queries, 1, layer->n_lanes);
    struct ggml_tensor *q = ggml_get_rows(ctx, layer->ring, out->slots);
    q = ggml_reshape_4d(ctx, q, layer->dim_k, n_rep, layer->n_lanes, n_queries);
    q = ggml_cont(ctx, ggml_permute(ctx, q, 0, 2, 3, 1)); /* [D, n, n_rep, G] */
    struct ggml_tensor *k =
        ggml_view_4d(ctx, layer->k, layer->dim_k, n_kv, 1, layer->n_lanes, layer->k->nb[1], layer->k->nb[2], layer->k->nb[2], 0);
    const dt_device_builder b = {.ctx = ctx, .cgraph = s->cgraph, .hp = &cache->decoder->hp};
    out->mass = sum_queries(ctx, dt_device_weights(&b, q, k, out->mask));
    ggml_set_output(out->mass);
    ggml_build_forward_expand(s->cgraph, out->mass);
}

/* input: [n_kv * G] row numbers, then the masks; output: [G][n_kv] mass, then squares of norms */
static bool run_observation(dt_device_cache *cache, const side_graph *s, const dt_device_layer *layer, const observation *o,
                            const int32_t *slots, const int32_t *all_rows, const uint16_t *mask, ggml_backend_t backend,
                            float *mass, float *squares) {
    bool done = side_allocate(cache, s, layer->device) && dt_ggml_set(o->all_rows, all_rows, 0, ggml_nbytes(o->all_rows));
    if (done && o->mass != NULL) {
        done = dt_ggml_set(o->slots, slots, 0, ggml_nbytes(o->slots)) && dt_ggml_set(o->mask, mask, 0, ggml_nbytes(o->mask));
    }
    done = done && dt_ggml_compute(backend, s->cgraph) == GGML_STATUS_SUCCESS;
    done = done && dt_ggml_get(o->squares, squares, 0, ggml_nbytes(o->squares));
    return done && (o->mass == NULL || dt_ggml_get(o->mass, mass, 0, ggml_nbytes(o->mass)));
}

dt_status dt_device_cache_observe(dt_device_cache *cache, const dt_kv *kv, int32_t layer_index, int32_t next_index,
                                  ggml_backend_t const *backends, const float **mass, const float **norms, size_t *stride,
                                  int32_t *n_queries, dt_error *error) {
    const dt_device_layer *layer = &cache->layers[layer_index];
    const int32_t n_kv = DT_ROUND_UP(dt_kv_length(kv, layer_index), DT_N_KV_PAD);
    int32_t slots[DT_OBSERVE_WINDOW];
    const int32_t n = find_queries(cache, layer_index, next_index, slots);
    dt_status status = dt_device_cache_settle(cache, kv, backends, error);
    if (status != DT_OK) {
        return status;
    }
    const size_t n_rows = (size_t)n_kv * (size_t)layer->n_lanes;
    float *results = dt_device_reserve(cache, &cache->results, 2 * n_rows * sizeof *results);
    int32_t *all_rows = dt_device_reserve(cache, &cache->rows, n_rows * sizeof *all_rows);
    uint16_t *mask = dt_device_reserve(cache, &cache->masks, n_rows * (size_t)DT_MAX(n, 1) * sizeof *mask);
    if (results == NULL || all_rows == NULL || mask == NULL) {
        return dt_fail_memory(error, n_rows * (2 * sizeof *results + (size_t)n * sizeof *mask), "observing attention");
    }
    for (size_t i = 0; i < n_rows; i++) {
        all_rows[i] = (int32_t)(i % (size_t)n_kv);
    }
    status = fill_observed(cache, kv, layer_index, n_kv, slots, n, mask, error);
    if (status != DT_OK) {
        return status;
    }
    side_graph s = {0};
    observation o = {0};
    bool done = side_begin(&s);
    if (done) {
        build_observation(cache, &s, layer, n_kv, n, &o);
        done = run_observation(cache, &s, layer, &o, slots, all_rows, mask, backends[layer->device], results, results + n_rows);
    }
    ggml_free(s.ctx);
    if (!done) {
        return dt_device_fail(cache, layer, "to observe attention", error);
    }
    for (size_t i = 0; i < n_rows; i++) {
        results[n_rows + i] = sqrtf(results[n_rows + i]);
    }
    cache->observed_until[layer_index] = next_index;
    *mass = results;
    *norms = results + n_rows;
    *stride = (size_t)n_kv;
    *n_queries = n;
    return DT_OK;
}
