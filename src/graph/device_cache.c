/*
 * The device home of a cache; how it works is told in device_cache.h.
 */
#include "graph/device_cache.h"

#include "weights/ggml_calls.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define SIDE_NODES 64      /* of a graph beside the batch's: moves, observation */
#define HALF_HIDDEN 0xfc00 /* minus infinity */
#define ROWS_ALIGNED 32    /* row numbers of a layer begin at multiples of so many: 256 bytes, what any device can bind */
#define ALLOC_SLACK 1024   /* what a device may want beyond a tensor's bytes */

typedef struct scratch {
    void *data;
    size_t bytes;
} scratch;

struct dt_device_cache {
    dt_kv_home home;
    const dt_decoder *decoder;
    dt_memory *memory;                         /* the cache's; tensors are charged there */
    dt_memory work;                            /* of scratch */
    dt_device_layer *layers;                   /* [L] */
    ggml_gallocr_t allocators[DT_MAX_DEVICES]; /* of side graphs */
    dt_device_shape shape;
    int32_t ring_position[DT_RING]; /* whose query a row of the rings holds; -1: none */
    int32_t *observed_until;        /* [L] queries before that position have been observed */
    scratch masks, rows, positions, moves, results;
};

static atomic_llong last_generation;

static dt_device_cache *cache_of(const dt_kv_home *home) { return (dt_device_cache *)(uintptr_t)home; }

static void *reserve(dt_device_cache *cache, scratch *s, size_t bytes) {
    if (bytes > s->bytes) {
        void *larger = dt_memory_alloc(&cache->work, bytes + bytes / 2);
        if (larger == NULL) {
            return NULL;
        }
        dt_memory_free(&cache->work, s->data, s->bytes);
        s->data = larger;
        s->bytes = bytes + bytes / 2;
    }
    return s->data;
}

static dt_status fail_device(const dt_device_cache *cache, const dt_device_layer *layer, const char *what, dt_error *error) {
    return dt_fail(error, DT_ERR_COMPUTE,
                   "the device %s failed %s; is it still there, with memory free? Fewer layers on it (-ngl) help",
                   dt_device_name(cache->decoder->devices[layer->device]), what);
}

/* ---- a layer's memory ---- */

/* Rows of a lane when n are needed: n rounded up to an eighth of its power of two. */
static int32_t capacity_for(int32_t n) {
    int32_t step = DT_N_KV_PAD;
    while (step <= n / 16) {
        step *= 2;
    }
    return DT_ROUND_UP(DT_MAX(n, 1), step);
}

static size_t layer_bytes(const dt_device_layer *layer, int32_t capacity) {
    const size_t rows = (size_t)capacity * (size_t)layer->n_lanes;
    return rows * (ggml_row_size(layer->type, layer->dim_k) + ggml_row_size(layer->type, layer->dim_v) + sizeof(int32_t)) +
           2 * ALLOC_SLACK;
}

static size_t ring_bytes(const dt_device_layer *layer) {
    return (size_t)layer->dim_k * (size_t)layer->n_heads * (DT_RING + 1) * sizeof(float) + ALLOC_SLACK;
}

/* Memory on the layer's device for the tensors of a context, zeroed; NULL where there is none. */
static ggml_backend_buffer_t allocate(const dt_device_cache *cache, const dt_device_layer *layer, struct ggml_context *context,
                                      size_t bytes) {
    ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(cache->decoder->devices[layer->device]);
    ggml_backend_buffer_t buffer = dt_ggml_new_buffer(type, bytes);
    size_t at = 0;
    for (struct ggml_tensor *t = ggml_get_first_tensor(context); buffer && t; t = ggml_get_next_tensor(context, t)) {
        const size_t needed = DT_ROUND_UP(ggml_backend_buft_get_alloc_size(type, t), ggml_backend_buft_get_alignment(type));
        if (at + needed > bytes ||
            ggml_backend_tensor_alloc(buffer, t, (char *)ggml_backend_buffer_get_base(buffer) + at) != GGML_STATUS_SUCCESS) {
            ggml_backend_buffer_free(buffer);
            return NULL;
        }
        at += needed;
    }
    if (buffer && !dt_ggml_clear(buffer)) {
        ggml_backend_buffer_free(buffer);
        return NULL;
    }
    return buffer;
}

static struct ggml_context *new_context(int n_tensors) {
    return ggml_init((struct ggml_init_params){.mem_size = (size_t)n_tensors * ggml_tensor_overhead(), .no_alloc = true});
}

static void free_layer(dt_device_cache *cache, dt_device_layer *layer) {
    if (layer->buffer) {
        ggml_backend_buffer_free(layer->buffer);
    }
    if (layer->context) {
        ggml_free(layer->context);
    }
    dt_memory_free(cache->memory, layer->source, (size_t)layer->capacity * (size_t)layer->n_lanes * sizeof *layer->source);
    dt_memory_discharge(cache->memory, layer->bytes);
    layer->buffer = NULL;
    layer->context = NULL;
    layer->source = NULL;
    layer->k = layer->v = NULL;
    layer->bytes = 0;
    layer->capacity = 0;
    layer->moved = false;
}

static bool copy_rows(const struct ggml_tensor *from, struct ggml_tensor *to, int64_t n) {
    struct ggml_context *views = new_context(2 * (int)from->ne[2]);
    bool done = views != NULL;
    for (int64_t lane = 0; done && n > 0 && lane < from->ne[2]; lane++) {
        struct ggml_tensor *a =
            ggml_view_2d(views, (struct ggml_tensor *)(uintptr_t)from, from->ne[0], n, from->nb[1], (size_t)lane * from->nb[2]);
        struct ggml_tensor *b = ggml_view_2d(views, to, to->ne[0], n, to->nb[1], (size_t)lane * to->nb[2]);
        done = ggml_backend_view_init(a) == GGML_STATUS_SUCCESS && ggml_backend_view_init(b) == GGML_STATUS_SUCCESS &&
               dt_ggml_copy(a, b);
    }
    ggml_free(views);
    return done;
}

static void reset_sources(dt_device_layer *layer) {
    for (int32_t lane = 0; lane < layer->n_lanes; lane++) {
        for (int32_t i = 0; i < layer->capacity; i++) {
            layer->source[(size_t)lane * (size_t)layer->capacity + (size_t)i] = i;
        }
    }
    layer->moved = false;
}

static dt_status fail_room(const dt_device_cache *cache, const dt_device_layer *layer, size_t bytes, dt_error *error) {
    if (cache->memory->limit > 0) {
        return dt_fail(error, DT_ERR_MEMORY, "the KV cache's limit of %s is reached (--kv-memory)",
                       dt_size_of(cache->memory->limit).text);
    }
    return dt_fail(error, DT_ERR_MEMORY,
                   "the device %s has no %s left for the KV cache; use --cache-eviction, --kv-type int8, a shorter context (-c) or "
                   "fewer layers on it (-ngl)",
                   dt_device_name(cache->decoder->devices[layer->device]), dt_size_of(bytes).text);
}

/* Gives a layer another capacity; its rows up to the smaller one stay. Nothing may be pending. */
static dt_status resize_layer(dt_device_cache *cache, dt_device_layer *layer, int32_t capacity, dt_error *error) {
    dt_device_layer next = *layer;
    const size_t source_bytes = (size_t)capacity * (size_t)layer->n_lanes * sizeof *next.source;
    const size_t bytes = layer_bytes(layer, capacity) - source_bytes;
    next.source = dt_memory_alloc(cache->memory, source_bytes);
    const bool charged = next.source != NULL && dt_memory_charge(cache->memory, bytes);
    next.context = charged ? new_context(2) : NULL;
    next.buffer = NULL;
    if (next.context != NULL) {
        next.k = ggml_new_tensor_3d(next.context, layer->type, layer->dim_k, capacity, layer->n_lanes);
        next.v = ggml_new_tensor_3d(next.context, layer->type, layer->dim_v, capacity, layer->n_lanes);
        next.buffer = allocate(cache, layer, next.context, bytes);
    }
    next.bytes = charged ? bytes : 0;
    next.capacity = capacity;
    const int32_t n = DT_MIN(layer->capacity, capacity);
    const bool copied = next.buffer != NULL && (n == 0 || (copy_rows(layer->k, next.k, n) && copy_rows(layer->v, next.v, n)));
    if (!copied) {
        const bool has_room = next.buffer != NULL;
        free_layer(cache, &next);
        return has_room ? fail_device(cache, layer, "to copy the KV cache", error) : fail_room(cache, layer, bytes, error);
    }
    next.generation = atomic_fetch_add(&last_generation, 1) + 1;
    reset_sources(&next);
    free_layer(cache, layer);
    *layer = next;
    return DT_OK;
}

/* Room for n rows in every lane. A capacity a quarter too large shrinks: rounds free a sixteenth, so budgets don't make it swing.
 */
static dt_status reserve_rows(dt_device_cache *cache, dt_device_layer *layer, int32_t n, dt_error *error) {
    const int32_t wanted = capacity_for(n);
    return n <= layer->capacity && layer->capacity <= wanted + wanted / 4 + DT_N_KV_PAD ? DT_OK
                                                                                        : resize_layer(cache, layer, wanted, error);
}

/* ---- the home ---- */

static void home_move(dt_kv_home *home, int32_t layer_index, int32_t lane, int32_t to, int32_t from) {
    dt_device_layer *layer = &cache_of(home)->layers[layer_index];
    int32_t *source = layer->source + (size_t)lane * (size_t)layer->capacity;
    source[to] = source[from];
    layer->moved = true;
}

static void forget_queries(dt_device_cache *cache) {
    for (int32_t i = 0; i < DT_RING; i++) {
        cache->ring_position[i] = -1;
    }
    memset(cache->observed_until, 0, (size_t)cache->decoder->hp.n_layers * sizeof *cache->observed_until);
}

static void home_clear(dt_kv_home *home) {
    dt_device_cache *cache = cache_of(home);
    for (int32_t i = 0; i < cache->decoder->hp.n_layers; i++) {
        free_layer(cache, &cache->layers[i]);
    }
    forget_queries(cache);
}

static void home_free(dt_kv_home *home) {
    dt_device_cache *cache = cache_of(home);
    if (cache->layers != NULL && cache->observed_until != NULL) {
        home_clear(home);
    }
    for (int32_t i = 0; cache->layers != NULL && i < cache->decoder->hp.n_layers; i++) {
        dt_device_layer *layer = &cache->layers[i];
        if (layer->ring_buffer) {
            ggml_backend_buffer_free(layer->ring_buffer);
        }
        if (layer->ring_context) {
            ggml_free(layer->ring_context);
        }
        dt_memory_discharge(cache->memory, layer->ring_bytes);
    }
    for (int32_t i = 0; i < DT_MAX_DEVICES; i++) {
        if (cache->allocators[i]) {
            ggml_gallocr_free(cache->allocators[i]);
        }
    }
    scratch *all[] = {&cache->masks, &cache->rows, &cache->positions, &cache->moves, &cache->results};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        dt_memory_free(&cache->work, all[i]->data, all[i]->bytes);
    }
    free(cache->observed_until);
    free(cache->shape.layers);
    free(cache->layers);
    free(cache);
}

static size_t home_bytes(const dt_kv_home *home) {
    const dt_device_cache *cache = cache_of(home);
    size_t bytes = 0;
    for (int32_t i = 0; i < cache->decoder->hp.n_layers; i++) {
        const dt_device_layer *layer = &cache->layers[i];
        bytes += layer->capacity > 0 ? layer_bytes(layer, layer->capacity) : 0;
        bytes += layer->ring_bytes;
    }
    return bytes;
}

static size_t home_bytes_for(const dt_kv_home *home, int32_t n) {
    const dt_device_cache *cache = cache_of(home);
    size_t bytes = 0;
    for (int32_t i = 0; i < cache->decoder->hp.n_layers; i++) {
        const dt_device_layer *layer = &cache->layers[i];
        bytes += layer->device >= 0 ? layer_bytes(layer, capacity_for(n)) + layer->ring_bytes : 0;
    }
    return bytes;
}

/* Rows as the tensor holds them. */
static bool get_rows(const dt_device_layer *layer, int32_t lane, bool values, int32_t first, int32_t n, void *out) {
    const struct ggml_tensor *t = values ? layer->v : layer->k;
    const int32_t *source = layer->source + (size_t)lane * (size_t)layer->capacity;
    bool done = first + n <= layer->capacity;
    for (int32_t i = 0; done && i < n;) {
        int32_t run = 1; /* rows that follow each other are read at once */
        while (i + run < n && source[first + i + run] == source[first + i] + run) {
            run++;
        }
        const size_t at = (size_t)lane * t->nb[2] + (size_t)source[first + i] * t->nb[1];
        done = dt_ggml_get(t, (char *)out + (size_t)i * t->nb[1], at, (size_t)run * t->nb[1]);
        i += run;
    }
    return done;
}

static bool home_get(dt_kv_home *home, int32_t layer_index, int32_t lane, bool values, int32_t first, int32_t n, uint16_t *out) {
    const dt_device_layer *layer = &cache_of(home)->layers[layer_index];
    return layer->type == GGML_TYPE_F16 && get_rows(layer, lane, values, first, n, out);
}

static bool home_read(dt_kv_home *home, int32_t layer_index, int32_t lane, bool values, int32_t first, int32_t n, float *out) {
    dt_device_cache *cache = cache_of(home);
    const dt_device_layer *layer = &cache->layers[layer_index];
    const int64_t dim = values ? cache->decoder->hp.head_dim_v : cache->decoder->hp.head_dim_k;
    const int64_t stored = values ? layer->dim_v : layer->dim_k;
    const size_t row = ggml_row_size(layer->type, stored), whole = (size_t)stored * sizeof *out;
    char *rows = reserve(cache, &cache->rows, (size_t)n * row + whole);
    if (rows == NULL || !get_rows(layer, lane, values, first, n, rows + whole)) {
        return false;
    }
    float *numbers = (float *)(void *)rows; /* of a row, which may be longer than what is asked for */
    for (int32_t i = 0; i < n; i++) {
        ggml_get_type_traits(layer->type)->to_float(rows + whole + (size_t)i * row, numbers, stored);
        memcpy(out + (int64_t)i * dim, numbers, (size_t)dim * sizeof *out);
    }
    return true;
}

static bool home_put(dt_kv_home *home, int32_t layer_index, int32_t lane, bool values, int32_t first, int32_t n,
                     const uint16_t *in) {
    dt_device_cache *cache = cache_of(home);
    dt_device_layer *layer = &cache->layers[layer_index];
    if (layer->moved || reserve_rows(cache, layer, first + n, NULL) != DT_OK) {
        return false;
    }
    struct ggml_tensor *t = values ? layer->v : layer->k;
    const size_t at = (size_t)lane * t->nb[2] + (size_t)first * t->nb[1], bytes = (size_t)n * t->nb[1];
    if (layer->type == GGML_TYPE_F16) {
        return dt_ggml_set(t, in, at, bytes);
    }
    const int64_t dim = values ? cache->decoder->hp.head_dim_v : cache->decoder->hp.head_dim_k;
    float *floats = calloc((size_t)n * (size_t)t->ne[0], sizeof *floats);
    void *rows = malloc(bytes);
    for (int32_t i = 0; floats != NULL && i < n; i++) {
        ggml_fp16_to_fp32_row(in + (int64_t)i * dim, floats + (int64_t)i * t->ne[0], dim);
    }
    const bool done = floats != NULL && rows != NULL && ggml_quantize_chunk(layer->type, floats, rows, 0, n, t->ne[0], NULL) > 0 &&
                      dt_ggml_set(t, rows, at, bytes);
    free(floats);
    free(rows);
    return done;
}

static dt_status home_copy(const dt_kv_home *home, bool with_content, dt_kv_home **out, dt_error *error);

static const dt_kv_home_ops home_ops = {.move = home_move,
                                        .clear = home_clear,
                                        .copy = home_copy,
                                        .free = home_free,
                                        .bytes = home_bytes,
                                        .bytes_for = home_bytes_for,
                                        .get = home_get,
                                        .read = home_read,
                                        .put = home_put};

dt_device_cache *dt_device_cache_of(const dt_kv *kv) {
    dt_kv_home *home = dt_kv_get_home(kv);
    return home != NULL && home->ops == &home_ops ? cache_of(home) : NULL;
}

const dt_device_layer *dt_device_cache_layer(const dt_device_cache *cache, int32_t layer) { return &cache->layers[layer]; }

/* ---- making one ---- */

static dt_device_layer describe_layer(const dt_decoder *decoder, const dt_kv_layer_params *params, int32_t i) {
    if (!params->format.elsewhere) {
        return (dt_device_layer){.device = -1};
    }
    const bool quantized = params->format.type_k == DT_KV_INT8;
    return (dt_device_layer){.device = decoder->layer_device[i],
                             .n_lanes = params->n_lanes,
                             .n_heads = decoder->hp.n_heads,
                             .dim_k = quantized ? DT_ROUND_UP(params->format.dim_k, 32) : params->format.dim_k,
                             .dim_v = quantized ? DT_ROUND_UP(params->format.dim_v, 32) : params->format.dim_v,
                             .type = quantized ? GGML_TYPE_Q8_0 : GGML_TYPE_F16};
}

static dt_status new_ring(dt_device_cache *cache, dt_device_layer *layer, dt_error *error) {
    const size_t bytes = ring_bytes(layer);
    const bool charged = dt_memory_charge(cache->memory, bytes);
    layer->ring_bytes = charged ? bytes : 0;
    layer->ring_context = charged ? new_context(1) : NULL;
    if (layer->ring_context != NULL) {
        layer->ring = ggml_new_tensor_2d(layer->ring_context, GGML_TYPE_F32, (int64_t)layer->dim_k * layer->n_heads, DT_RING + 1);
        layer->ring_buffer = allocate(cache, layer, layer->ring_context, bytes);
    }
    return layer->ring_buffer ? DT_OK : fail_room(cache, layer, bytes, error);
}

static dt_device_cache *new_empty(const dt_decoder *decoder, dt_memory *memory) {
    const size_t n_layers = (size_t)decoder->hp.n_layers;
    dt_device_cache *cache = calloc(1, sizeof *cache);
    if (cache == NULL) {
        return NULL;
    }
    cache->home.ops = &home_ops;
    cache->decoder = decoder;
    cache->memory = memory;
    dt_memory_init(&cache->work);
    cache->layers = calloc(n_layers, sizeof *cache->layers);
    cache->observed_until = calloc(n_layers, sizeof *cache->observed_until);
    cache->shape.layers = calloc(n_layers, sizeof *cache->shape.layers);
    if (cache->layers == NULL || cache->observed_until == NULL || cache->shape.layers == NULL) {
        home_free(&cache->home);
        return NULL;
    }
    for (size_t i = 0; i < n_layers; i++) {
        cache->layers[i].device = -1;
    }
    forget_queries(cache);
    return cache;
}

dt_status dt_device_cache_new(const dt_decoder *decoder, dt_memory *memory, const dt_kv_layer_params *layers, dt_kv_home **out,
                              dt_error *error) {
    dt_device_cache *cache = new_empty(decoder, memory);
    dt_status status = cache != NULL ? DT_OK : dt_fail_memory(error, sizeof *cache, "the KV cache");
    for (int32_t i = 0; status == DT_OK && i < decoder->hp.n_layers; i++) {
        cache->layers[i] = describe_layer(decoder, &layers[i], i);
        const dt_policy *policy = layers[i].budget.policy;
        if (cache->layers[i].device >= 0 && dt_policy_repeats(policy)) {
            status = dt_fail(
                error, DT_ERR_UNSUPPORTED,
                "layer %d is computed by %s, where the score \"%s\" can't be collected; use \"fast\" or \"predict\", or leave "
                "the layer to the CPU's own kernels",
                i, dt_device_name(decoder->devices[cache->layers[i].device]), policy->score_name);
        } else if (cache->layers[i].device >= 0 && policy != NULL && policy->needs_mass) {
            status = new_ring(cache, &cache->layers[i], error);
        }
    }
    if (status != DT_OK && cache != NULL) {
        home_free(&cache->home);
        return status;
    }
    *out = &cache->home;
    return status;
}

static dt_status copy_layer(dt_device_cache *to, dt_device_layer *b, const dt_device_layer *a, bool with_content, dt_error *error) {
    *b = *a;
    b->k = b->v = b->ring = NULL;
    b->context = b->ring_context = NULL;
    b->buffer = b->ring_buffer = NULL;
    b->source = NULL;
    b->bytes = b->ring_bytes = 0;
    b->capacity = 0;
    b->moved = false;
    dt_status status = a->ring != NULL ? new_ring(to, b, error) : DT_OK;
    if (status != DT_OK || !with_content) {
        return status;
    }
    if (a->ring != NULL && !dt_ggml_copy(a->ring, b->ring)) {
        return fail_device(to, b, "to copy queries", error);
    }
    status = a->capacity > 0 ? resize_layer(to, b, a->capacity, error) : DT_OK;
    if (status == DT_OK && a->capacity > 0) {
        memcpy(b->source, a->source, (size_t)a->capacity * (size_t)a->n_lanes * sizeof *a->source);
        b->moved = a->moved;
        if (!copy_rows(a->k, b->k, a->capacity) || !copy_rows(a->v, b->v, a->capacity)) {
            status = fail_device(to, b, "to copy the KV cache", error);
        }
    }
    return status;
}

static dt_status home_copy(const dt_kv_home *home, bool with_content, dt_kv_home **out, dt_error *error) {
    const dt_device_cache *from = cache_of(home);
    dt_device_cache *to = new_empty(from->decoder, from->memory);
    dt_status status = to != NULL ? DT_OK : dt_fail_memory(error, sizeof *to, "another KV cache");
    for (int32_t i = 0; status == DT_OK && i < from->decoder->hp.n_layers; i++) {
        status = from->layers[i].device >= 0 ? copy_layer(to, &to->layers[i], &from->layers[i], with_content, error) : DT_OK;
    }
    if (status != DT_OK) {
        if (to != NULL) {
            home_free(&to->home);
        }
        return status;
    }
    if (with_content) {
        memcpy(to->ring_position, from->ring_position, sizeof to->ring_position);
        memcpy(to->observed_until, from->observed_until, (size_t)from->decoder->hp.n_layers * sizeof *to->observed_until);
    }
    *out = &to->home;
    return DT_OK;
}

size_t dt_device_cache_bytes_bound(const dt_decoder *decoder, const dt_kv_layer_params *layers, const int32_t *longest) {
    size_t bytes = 0, largest = 0;
    for (int32_t i = 0; i < decoder->hp.n_layers; i++) {
        const dt_device_layer layer = describe_layer(decoder, &layers[i], i);
        if (layer.device >= 0) {
            const size_t own = layer_bytes(&layer, capacity_for(DT_ROUND_UP(longest[i], DT_N_KV_PAD)));
            bytes += own;
            largest = DT_MAX(largest, own); /* twice while it grows */
            bytes += layers[i].budget.policy != NULL && layers[i].budget.policy->needs_mass ? ring_bytes(&layer) : 0;
        }
    }
    return bytes + largest;
}

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
    int64_t *to = reserve(cache, &cache->moves, n_all * (sizeof(int64_t) + sizeof(int32_t)));
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
    return done ? DT_OK : fail_device(cache, layer, "to compact the KV cache", error);
}

dt_status dt_device_cache_settle(dt_device_cache *cache, const dt_kv *kv, ggml_backend_t const *backends, dt_error *error) {
    dt_status status = DT_OK;
    for (int32_t i = 0; status == DT_OK && i < cache->decoder->hp.n_layers; i++) {
        dt_device_layer *layer = &cache->layers[i];
        if (layer->moved) {
            status = move_rows(cache, kv, i, backends[layer->device], error);
            if (status == DT_OK) {
                reset_sources(layer);
            }
        }
    }
    return status;
}

/* ---- what a batch sees ---- */

/* What a layer's queries see, where that is more than what comes before them. */
typedef struct lane_sight {
    int32_t n_committed, n_kv;
    const int32_t *positions; /* NULL: not needed */
    const float *bias;        /* NULL: none */
    int32_t window;           /* 0: none, or out of reach */
    /* With a focus (first_block > 0) of the committed entries only these are seen: up to first_block, [focus_first, focus_end),
     * from batch_first on. */
    int32_t first_block, focus_first, focus_end, batch_first;
} lane_sight;

static bool window_matters(const dt_kv_layer_params *params, const dt_device_sight *sight) {
    return params->window > 0 && sight->first_position + sight->n_query - 1 >= params->window;
}

static bool is_plain(const dt_kv *kv, int32_t layer, const dt_device_sight *sight) {
    const dt_kv_layer_params *params = dt_kv_layer(kv, layer);
    bool plain = sight->focus_from == 0 && !window_matters(params, sight);
    for (int32_t lane = 0; plain && lane < params->n_lanes; lane++) {
        dt_kv_lane_view view;
        dt_kv_lane(kv, layer, lane, &view);
        plain = view.bias == NULL;
    }
    return plain;
}

static bool same_lengths(const dt_kv *kv, int32_t layer) { return dt_kv_mean_length(kv, layer) == (double)dt_kv_length(kv, layer); }

dt_status dt_device_cache_reserve(dt_device_cache *cache, const dt_kv *kv, const dt_device_sight *sight,
                                  const dt_device_shape **shape, dt_error *error) {
    dt_device_shape *s = &cache->shape;
    memset(s->n_mask, 0, sizeof s->n_mask);
    memset(s->n_rows, 0, sizeof s->n_rows);
    for (int32_t i = 0; i < cache->decoder->hp.n_layers; i++) {
        dt_device_layer *layer = &cache->layers[i];
        dt_device_layer_shape *own = &s->layers[i];
        *own = (dt_device_layer_shape){0};
        if (layer->device < 0) {
            continue;
        }
        const int32_t d = layer->device, length = dt_kv_length(kv, i);
        own->n_kv = DT_ROUND_UP(length, DT_N_KV_PAD);
        const dt_status status = reserve_rows(cache, layer, own->n_kv, error);
        if (status != DT_OK) {
            return status;
        }
        own->generation = layer->generation;
        own->rows_at = s->n_rows[d];
        s->n_rows[d] += DT_ROUND_UP((int64_t)sight->n_query * layer->n_lanes, ROWS_ALIGNED);
        const bool shares = is_plain(kv, i, sight) && same_lengths(kv, i);
        own->n_masks = shares ? 1 : layer->n_lanes;
        own->mask_at = -1;
        for (int32_t j = 0; shares && j < i && own->mask_at < 0; j++) {
            if (cache->layers[j].device == d && s->layers[j].n_masks == 1 && dt_kv_length(kv, j) == length && same_lengths(kv, j) &&
                is_plain(kv, j, sight)) {
                own->mask_at = s->layers[j].mask_at;
            }
        }
        if (own->mask_at < 0) {
            own->mask_at = s->n_mask[d];
            s->n_mask[d] += (int64_t)own->n_kv * sight->n_query * own->n_masks;
        }
    }
    *shape = s;
    return DT_OK;
}

/* One query's row of a mask. index: which of the batch's it is. */
static void fill_row(const lane_sight *l, int32_t index, int32_t position, uint16_t *row) {
    const int32_t n_visible = l->n_committed + index + 1;
    memset(row, 0, (size_t)n_visible * sizeof *row);
    for (int32_t e = n_visible; e < l->n_kv; e++) {
        row[e] = HALF_HIDDEN;
    }
    for (int32_t e = 0; l->bias != NULL && e < n_visible; e++) {
        row[e] = dt_f32_to_f16(l->bias[e]);
    }
    for (int32_t e = 0; l->window > 0 && e < n_visible; e++) {
        row[e] = l->positions[e] > position - l->window ? row[e] : HALF_HIDDEN;
    }
    for (int32_t e = l->first_block; l->first_block > 0 && e < l->n_committed; e++) {
        row[e] = (e >= l->focus_first && e < l->focus_end) || e >= l->batch_first ? row[e] : HALF_HIDDEN;
    }
}

static dt_status see_lane(dt_device_cache *cache, const dt_kv *kv, const dt_device_sight *sight, int32_t layer, int32_t lane,
                          lane_sight *out, dt_error *error) {
    const dt_kv_layer_params *params = dt_kv_layer(kv, layer);
    const int32_t block = params->format.block_tokens;
    dt_kv_lane_view view;
    dt_kv_lane(kv, layer, lane, &view);
    *out = (lane_sight){.n_committed = view.n_entries - view.n_uncommitted,
                        .n_kv = cache->shape.layers[layer].n_kv,
                        .bias = view.bias,
                        .window = window_matters(params, sight) ? params->window : 0};
    if (sight->focus_from > 0) { /* rounded outwards to blocks, as dt_batch says */
        out->first_block = block;
        out->focus_first = DT_MAX(out->n_committed - sight->focus_from, 0) / block * block;
        out->focus_end = DT_ROUND_UP(DT_MAX(out->n_committed - sight->focus_to, 0), block);
        out->batch_first = out->n_committed / block * block;
    }
    if (out->window > 0) {
        int32_t *positions = reserve(cache, &cache->positions, (size_t)view.n_entries * sizeof *positions);
        if (positions == NULL) {
            return dt_fail_memory(error, (size_t)view.n_entries * sizeof *positions, "a mask");
        }
        dt_kv_positions(kv, layer, lane, positions);
        out->positions = positions;
    }
    return DT_OK;
}

static dt_status fill_masks(dt_device_cache *cache, const dt_kv *kv, const dt_device_sight *sight, int32_t device, uint16_t *out,
                            dt_error *error) {
    int64_t filled = 0; /* masks come in order; one that a later layer shares is there already */
    for (int32_t i = 0; i < cache->decoder->hp.n_layers; i++) {
        const dt_device_layer_shape *own = &cache->shape.layers[i];
        for (int32_t m = 0; cache->layers[i].device == device && own->mask_at == filled && m < own->n_masks; m++) {
            lane_sight lane;
            const dt_status status = see_lane(cache, kv, sight, i, m, &lane, error);
            if (status != DT_OK) {
                return status;
            }
            for (int32_t q = 0; q < sight->n_query; q++) {
                fill_row(&lane, q, sight->first_position + q, out + own->mask_at + ((int64_t)m * sight->n_query + q) * own->n_kv);
            }
        }
        if (cache->layers[i].device == device && own->mask_at == filled) {
            filled += (int64_t)own->n_kv * sight->n_query * own->n_masks;
        }
    }
    return DT_OK;
}

static void fill_rows(const dt_device_cache *cache, const dt_kv *kv, const dt_device_sight *sight, int32_t device, int64_t *out) {
    for (int32_t i = 0; i < cache->decoder->hp.n_layers; i++) {
        for (int32_t lane = 0; cache->layers[i].device == device && lane < cache->layers[i].n_lanes; lane++) {
            dt_kv_lane_view view;
            dt_kv_lane(kv, i, lane, &view);
            int64_t *row = out + cache->shape.layers[i].rows_at + (int64_t)lane * sight->n_query;
            for (int32_t q = 0; q < sight->n_query; q++) {
                row[q] = view.n_entries - sight->n_query + q;
            }
        }
    }
}

/* Queries of a repetition are no part of the text: they go to a row that nobody reads. */
static int64_t ring_row(const dt_device_sight *sight, int32_t query) {
    return sight->focus_from > 0 ? DT_RING : (sight->first_position + query) % DT_RING;
}

dt_status dt_device_cache_fill_inputs(dt_device_cache *cache, const dt_kv *kv, const dt_device_sight *sight, int32_t device,
                                      struct ggml_tensor *masks, struct ggml_tensor *rows, struct ggml_tensor *ring,
                                      dt_error *error) {
    const size_t mask_bytes = (size_t)cache->shape.n_mask[device] * sizeof(uint16_t);
    const size_t rows_bytes = (size_t)cache->shape.n_rows[device] * sizeof(int64_t);
    uint16_t *halves = masks != NULL ? reserve(cache, &cache->masks, mask_bytes) : NULL;
    int64_t *numbers = rows != NULL ? reserve(cache, &cache->rows, rows_bytes) : NULL;
    if ((masks != NULL && halves == NULL) || (rows != NULL && numbers == NULL)) {
        return dt_fail_memory(error, mask_bytes + rows_bytes, "what the device is told");
    }
    bool done = true;
    if (masks != NULL) {
        const dt_status status = fill_masks(cache, kv, sight, device, halves, error);
        if (status != DT_OK) {
            return status;
        }
        done = dt_ggml_set(masks, halves, 0, mask_bytes);
    }
    if (rows != NULL) {
        memset(numbers, 0, rows_bytes);
        fill_rows(cache, kv, sight, device, numbers);
        done = done && dt_ggml_set(rows, numbers, 0, rows_bytes);
    }
    if (ring != NULL) {
        int64_t kept[DT_RING];
        const int32_t n = DT_MIN(sight->n_query, DT_RING);
        for (int32_t i = 0; i < n; i++) {
            kept[i] = ring_row(sight, sight->n_query - n + i);
        }
        done = done && dt_ggml_set(ring, kept, 0, (size_t)n * sizeof kept[0]);
    }
    return done ? DT_OK
                : dt_fail(error, DT_ERR_COMPUTE, "the device %s does not take its input",
                          dt_device_name(cache->decoder->devices[device]));
}

void dt_device_cache_computed(dt_device_cache *cache, const dt_device_sight *sight) {
    for (int32_t i = DT_MAX(sight->n_query - DT_RING, 0); sight->focus_from == 0 && i < sight->n_query; i++) {
        cache->ring_position[ring_row(sight, i)] = sight->first_position + i;
    }
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
        int32_t *positions = reserve(cache, &cache->positions, (size_t)n_kv * sizeof *positions);
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
                out[e] = !visible ? HALF_HIDDEN : view.bias != NULL ? dt_f32_to_f16(view.bias[e]) : 0;
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
    float *results = reserve(cache, &cache->results, 2 * n_rows * sizeof *results);
    int32_t *all_rows = reserve(cache, &cache->rows, n_rows * sizeof *all_rows);
    uint16_t *mask = reserve(cache, &cache->masks, n_rows * (size_t)DT_MAX(n, 1) * sizeof *mask);
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
        return fail_device(cache, layer, "to observe attention", error);
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
