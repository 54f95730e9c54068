/*
 * Work on the devices beside batches: what rounds have moved is played back, and attention is observed (device_cache.h).
 *
 * Each is a small graph of ggml's operators, built, run and forgotten. Invariant: it waits until the device is done, so batches find
 * the cache settled.
 */
#include "graph/device_cache_internal.h"

#include "weights/ggml_calls.h"

#include <math.h>

#define SIDE_NODES 64 /* of a graph beside the batch's */

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

/* ---- moves ---- */

static int32_t count_moved(const int32_t *source, int32_t n) {
    int32_t n_moved = 0;
    for (int32_t i = 0; i < n; i++) {
        n_moved += source[i] != i;
    }
    return n_moved;
}

/* from and to are [G][n]; lanes that move fewer do again what their last move did, or leave row 0 where it is. */
static void list_moves(const dt_device_layer *layer, const dt_kv *kv, int32_t index, int32_t n, int32_t *from, int64_t *to) {
    for (int32_t lane = 0; lane < layer->n_lanes; lane++) {
        const int32_t *source = layer->source + (size_t)lane * (size_t)layer->capacity;
        dt_kv_lane_view view;
        dt_kv_lane(kv, index, lane, &view);
        int32_t found = 0;
        for (int32_t i = 0; i < view.n_entries; i++) {
            if (source[i] != i) {
                from[found] = source[i];
                to[found++] = i;
            }
        }
        for (; found < n; found++) {
            from[found] = found > 0 ? from[found - 1] : 0;
            to[found] = found > 0 ? to[found - 1] : 0;
        }
        from += n;
        to += n;
    }
}

static dt_status move_rows(dt_device_cache *cache, const dt_kv *kv, int32_t index, ggml_backend_t backend, dt_error *error) {
    dt_device_layer *layer = &cache->layers[index];
    int32_t n = 0;
    for (int32_t lane = 0; lane < layer->n_lanes; lane++) {
        dt_kv_lane_view view;
        dt_kv_lane(kv, index, lane, &view);
        n = DT_MAX(n, count_moved(layer->source + (size_t)lane * (size_t)layer->capacity, view.n_entries));
    }
    if (n == 0) {
        return DT_OK;
    }
    const size_t n_all = (size_t)n * (size_t)layer->n_lanes;
    int64_t *to = dt_device_reserve(cache, &cache->moves, n_all * (sizeof(int64_t) + sizeof(int32_t)));
    side_graph s = {0};
    bool done = to != NULL && side_begin(&s);
    if (done) {
        int32_t *from = (int32_t *)(to + n_all);
        list_moves(layer, kv, index, n, from, to);
        struct ggml_tensor *from_rows = side_input(&s, GGML_TYPE_I32, n, layer->n_lanes, 1, 1);
        struct ggml_tensor *to_rows = side_input(&s, GGML_TYPE_I64, n, layer->n_lanes, 1, 1);
        ggml_build_forward_expand(s.cgraph, ggml_set_rows(s.ctx, layer->k, ggml_get_rows(s.ctx, layer->k, from_rows), to_rows));
        ggml_build_forward_expand(s.cgraph, ggml_set_rows(s.ctx, layer->v, ggml_get_rows(s.ctx, layer->v, from_rows), to_rows));
        done = side_allocate(cache, &s, layer->device) && dt_ggml_set(from_rows, from, 0, n_all * sizeof *from) &&
               dt_ggml_set(to_rows, to, 0, n_all * sizeof *to) && dt_ggml_compute(backend, s.cgraph) == GGML_STATUS_SUCCESS;
    }
    ggml_free(s.ctx);
    return done ? DT_OK : dt_device_fail(cache, layer, "to compact the KV cache", error);
}

dt_status dt_device_cache_settle(dt_device_cache *cache, const dt_kv *kv, ggml_backend_t const *backends, dt_error *error) {
    dt_status status = DT_OK;
    for (int32_t i = 0; status == DT_OK && i < cache->decoder->hp.n_layers; i++) {
        dt_device_layer *layer = &cache->layers[i];
        if (layer->moved) {
            status = move_rows(cache, kv, i, backends[layer->device], error);
            if (status == DT_OK) {
                dt_device_reset_sources(layer);
            }
        }
    }
    return status;
}

/* ---- observation ---- */

/* Rows of the ring that hold the newest queries not observed yet, at most DT_OBSERVE_WINDOW, oldest first. */
static int32_t find_queries(const dt_device_cache *cache, int32_t layer, int32_t next_position, int32_t *slots) {
    const int32_t first = DT_MAX(next_position - DT_OBSERVE_WINDOW, DT_MIN(cache->observed_until[layer], next_position));
    int32_t n = 0;
    for (int32_t p = DT_MAX(first, 0); p < next_position; p++) {
        if (cache->ring_position[p % DT_RING] == p) {
            slots[n++] = p % DT_RING;
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
            const int32_t p = cache->ring_position[slots[q]];
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

dt_status dt_device_cache_observe(dt_device_cache *cache, const dt_kv *kv, int32_t layer_index, int32_t next_position,
                                  ggml_backend_t const *backends, const float **mass, const float **norms, size_t *stride,
                                  int32_t *n_queries, dt_error *error) {
    const dt_device_layer *layer = &cache->layers[layer_index];
    const int32_t n_kv = DT_ROUND_UP(dt_kv_length(kv, layer_index), DT_N_KV_PAD);
    int32_t slots[DT_OBSERVE_WINDOW];
    const int32_t n = find_queries(cache, layer_index, next_position, slots);
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
    cache->observed_until[layer_index] = next_position;
    *mass = results;
    *norms = results + n_rows;
    *stride = (size_t)n_kv;
    *n_queries = n;
    return DT_OK;
}
