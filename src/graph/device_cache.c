/*
 * The device home of a cache: the memory of its layers, and what the cache asks of a home; how it works is told in device_cache.h.
 */
#include "graph/device_cache_internal.h"

#include "weights/ggml_calls.h"

#include <stdlib.h>
#include <string.h>

#define ALLOC_SLACK 1024 /* what a device may want beyond a tensor's bytes */

static atomic_llong last_generation;

void *dt_device_reserve(dt_device_cache *cache, dt_device_scratch *s, size_t bytes) {
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

dt_status dt_device_fail(const dt_device_cache *cache, const dt_device_layer *layer, const char *what, dt_error *error) {
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
    return rows * (ggml_row_size(layer->type, layer->dim_k) + ggml_row_size(layer->type, layer->dim_v) + sizeof(dt_device_row)) +
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
    dt_memory_free(cache->memory, layer->pending, (size_t)layer->capacity * (size_t)layer->n_lanes * sizeof *layer->pending);
    dt_memory_discharge(cache->memory, layer->bytes);
    layer->buffer = NULL;
    layer->context = NULL;
    layer->pending = NULL;
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

void dt_device_reset_pending(dt_device_layer *layer) {
    for (int32_t lane = 0; lane < layer->n_lanes; lane++) {
        for (int32_t i = 0; i < layer->capacity; i++) {
            dt_device_pending(layer, lane)[i] = (dt_device_row){.source = i};
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
    const size_t pending_bytes = (size_t)capacity * (size_t)layer->n_lanes * sizeof *next.pending;
    const size_t bytes = layer_bytes(layer, capacity) - pending_bytes;
    next.pending = dt_memory_alloc(cache->memory, pending_bytes);
    const bool charged = next.pending != NULL && dt_memory_charge(cache->memory, bytes);
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
        return has_room ? dt_device_fail(cache, layer, "to copy the KV cache", error) : fail_room(cache, layer, bytes, error);
    }
    next.generation = atomic_fetch_add(&last_generation, 1) + 1;
    dt_device_reset_pending(&next);
    free_layer(cache, layer);
    *layer = next;
    return DT_OK;
}

/* Room for n rows in every lane. A capacity a quarter too large shrinks: rounds free a sixteenth, so budgets don't make it swing.
 */
dt_status dt_device_reserve_rows(dt_device_cache *cache, dt_device_layer *layer, int32_t n, dt_error *error) {
    const int32_t wanted = capacity_for(n);
    return n <= layer->capacity && layer->capacity <= wanted + wanted / 4 + DT_N_KV_PAD ? DT_OK
                                                                                        : resize_layer(cache, layer, wanted, error);
}

/* ---- the home ---- */

static void home_move(dt_kv_home *home, int32_t layer_index, int32_t lane, int32_t to, int32_t from) {
    dt_device_layer *layer = &dt_device_cache_from(home)->layers[layer_index];
    dt_device_row *pending = dt_device_pending(layer, lane);
    pending[to] = pending[from];
    layer->moved = true;
}

static void home_turn(dt_kv_home *home, int32_t layer_index, int32_t lane, int32_t entry, int32_t positions) {
    dt_device_layer *layer = &dt_device_cache_from(home)->layers[layer_index];
    dt_device_pending(layer, lane)[entry].turn += positions;
    layer->moved = true;
}

static void forget_queries(dt_device_cache *cache) {
    for (int32_t i = 0; i < DT_RING; i++) {
        cache->ring_index[i] = -1;
    }
    memset(cache->observed_until, 0, (size_t)cache->decoder->hp.n_layers * sizeof *cache->observed_until);
}

static void home_clear(dt_kv_home *home) {
    dt_device_cache *cache = dt_device_cache_from(home);
    for (int32_t i = 0; i < cache->decoder->hp.n_layers; i++) {
        free_layer(cache, &cache->layers[i]);
    }
    forget_queries(cache);
}

static void home_free(dt_kv_home *home) {
    dt_device_cache *cache = dt_device_cache_from(home);
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
    dt_device_scratch *all[] = {&cache->masks, &cache->rows, &cache->positions, &cache->moves, &cache->results};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        dt_memory_free(&cache->work, all[i]->data, all[i]->bytes);
    }
    free(cache->observed_until);
    free(cache->shape.layers);
    free(cache->layers);
    free(cache);
}

static size_t home_bytes(const dt_kv_home *home) {
    const dt_device_cache *cache = dt_device_cache_from(home);
    size_t bytes = 0;
    for (int32_t i = 0; i < cache->decoder->hp.n_layers; i++) {
        const dt_device_layer *layer = &cache->layers[i];
        bytes += layer->capacity > 0 ? layer_bytes(layer, layer->capacity) : 0;
        bytes += layer->ring_bytes;
    }
    return bytes;
}

static size_t home_bytes_for(const dt_kv_home *home, int32_t n) {
    const dt_device_cache *cache = dt_device_cache_from(home);
    size_t bytes = 0;
    for (int32_t i = 0; i < cache->decoder->hp.n_layers; i++) {
        const dt_device_layer *layer = &cache->layers[i];
        bytes += layer->device >= 0 ? layer_bytes(layer, capacity_for(n)) : 0; /* the ring is for evicting */
    }
    return bytes;
}

/* Rows as the tensor holds them. */
static bool get_rows(const dt_device_layer *layer, int32_t lane, bool values, int32_t first, int32_t n, void *out) {
    const struct ggml_tensor *t = values ? layer->v : layer->k;
    const dt_device_row *pending = dt_device_pending(layer, lane) + first;
    bool done = first + n <= layer->capacity;
    for (int32_t i = 0; done && i < n; i++) {
        done = pending[i].turn == 0 || values; /* a key that a device failed to turn is none */
    }
    for (int32_t i = 0; done && i < n;) {
        int32_t run = 1; /* rows that follow each other are read at once */
        while (i + run < n && pending[i + run].source == pending[i].source + run) {
            run++;
        }
        const size_t at = (size_t)lane * t->nb[2] + (size_t)pending[i].source * t->nb[1];
        done = dt_ggml_get(t, (char *)out + (size_t)i * t->nb[1], at, (size_t)run * t->nb[1]);
        i += run;
    }
    return done;
}

static bool home_get(dt_kv_home *home, int32_t layer_index, int32_t lane, bool values, int32_t first, int32_t n, uint16_t *out) {
    const dt_device_layer *layer = &dt_device_cache_from(home)->layers[layer_index];
    return layer->type == GGML_TYPE_F16 && get_rows(layer, lane, values, first, n, out);
}

static bool home_read(dt_kv_home *home, int32_t layer_index, int32_t lane, bool values, int32_t first, int32_t n, float *out) {
    dt_device_cache *cache = dt_device_cache_from(home);
    const dt_device_layer *layer = &cache->layers[layer_index];
    const int64_t dim = values ? cache->decoder->hp.head_dim_v : cache->decoder->hp.head_dim_k;
    const int64_t stored = values ? layer->dim_v : layer->dim_k;
    const size_t row = ggml_row_size(layer->type, stored), whole = (size_t)stored * sizeof *out;
    char *rows = dt_device_reserve(cache, &cache->rows, (size_t)n * row + whole);
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

static dt_status home_reserve(dt_kv_home *home, int32_t layer_index, int32_t n, dt_error *error) {
    dt_device_cache *cache = dt_device_cache_from(home);
    dt_device_layer *layer = &cache->layers[layer_index];
    return n <= layer->capacity ? DT_OK : resize_layer(cache, layer, capacity_for(n), error); /* a longer lane may be there */
}

static bool home_put(dt_kv_home *home, int32_t layer_index, int32_t lane, bool values, int32_t first, int32_t n,
                     const uint16_t *in) {
    dt_device_cache *cache = dt_device_cache_from(home);
    dt_device_layer *layer = &cache->layers[layer_index];
    if (layer->moved || home_reserve(home, layer_index, first + n, NULL) != DT_OK) {
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
                                        .turn = home_turn,
                                        .clear = home_clear,
                                        .copy = home_copy,
                                        .free = home_free,
                                        .bytes = home_bytes,
                                        .bytes_for = home_bytes_for,
                                        .get = home_get,
                                        .read = home_read,
                                        .reserve = home_reserve,
                                        .put = home_put,
                                        .gather = dt_device_gather,
                                        .scatter = dt_device_scatter};

dt_device_cache *dt_device_cache_of(const dt_kv *kv) {
    dt_kv_home *home = dt_kv_get_home(kv);
    return home != NULL && home->ops == &home_ops ? dt_device_cache_from(home) : NULL;
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
    struct ggml_context *context = charged ? new_context(1) : NULL;
    struct ggml_tensor *ring = NULL;
    ggml_backend_buffer_t buffer = NULL;
    if (context != NULL) {
        ring = ggml_new_tensor_2d(context, GGML_TYPE_F32, (int64_t)layer->dim_k * layer->n_heads, DT_RING + 1);
        buffer = allocate(cache, layer, context, bytes);
    }
    if (buffer == NULL) { /* it may be asked for again */
        ggml_free(context);
        dt_memory_discharge(cache->memory, charged ? bytes : 0);
        return fail_room(cache, layer, bytes, error);
    }
    layer->ring_bytes = bytes;
    layer->ring_context = context;
    layer->ring_buffer = buffer;
    layer->ring = ring;
    return DT_OK;
}

dt_status dt_device_reserve_ring(dt_device_cache *cache, dt_device_layer *layer, dt_error *error) {
    return !layer->needs_ring || layer->ring != NULL ? DT_OK : new_ring(cache, layer, error);
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
    *out = NULL;
    if (cache == NULL) {
        return dt_fail_memory(error, sizeof *cache, "the KV cache");
    }
    for (int32_t i = 0; i < decoder->hp.n_layers; i++) {
        cache->layers[i] = describe_layer(decoder, &layers[i], i);
        cache->layers[i].needs_ring = cache->layers[i].device >= 0 && dt_budget_needs_mass(&layers[i].budget);
    }
    *out = &cache->home;
    return DT_OK;
}

static dt_status copy_layer(dt_device_cache *to, dt_device_layer *b, const dt_device_layer *a, bool with_content, dt_error *error) {
    *b = *a;
    b->k = b->v = b->ring = NULL;
    b->context = b->ring_context = NULL;
    b->buffer = b->ring_buffer = NULL;
    b->pending = NULL;
    b->bytes = b->ring_bytes = 0;
    b->capacity = 0;
    b->moved = false;
    if (!with_content) {
        return DT_OK;
    }
    dt_status status = a->ring != NULL ? new_ring(to, b, error) : DT_OK;
    if (status != DT_OK) {
        return status;
    }
    if (a->ring != NULL && !dt_ggml_copy(a->ring, b->ring)) {
        return dt_device_fail(to, b, "to copy queries", error);
    }
    status = a->capacity > 0 ? resize_layer(to, b, a->capacity, error) : DT_OK;
    if (status == DT_OK && a->capacity > 0) {
        memcpy(b->pending, a->pending, (size_t)a->capacity * (size_t)a->n_lanes * sizeof *a->pending);
        b->moved = a->moved;
        if (!copy_rows(a->k, b->k, a->capacity) || !copy_rows(a->v, b->v, a->capacity)) {
            status = dt_device_fail(to, b, "to copy the KV cache", error);
        }
    }
    return status;
}

static dt_status home_copy(const dt_kv_home *home, bool with_content, dt_kv_home **out, dt_error *error) {
    const dt_device_cache *from = dt_device_cache_from(home);
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
        memcpy(to->ring_index, from->ring_index, sizeof to->ring_index);
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
            bytes += dt_budget_needs_mass(&layers[i].budget) ? ring_bytes(&layer) : 0;
        }
    }
    return bytes + largest;
}
