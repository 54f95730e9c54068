/*
 * What the files of the device home share: device_cache.c (memory of the layers, what the cache in kv/ asks of a home),
 * device_side.c (work on the devices beside batches) and device_sight.c (what a batch is told). Nobody else includes it.
 */
#ifndef DT_GRAPH_DEVICE_CACHE_INTERNAL_H
#define DT_GRAPH_DEVICE_CACHE_INTERNAL_H

#include "graph/device_cache.h"

#define DT_HALF_HIDDEN 0xfc00 /* minus infinity */

/* Memory that grows and is kept; what it holds is lost when it grows. */
typedef struct dt_device_scratch {
    void *data;
    size_t bytes;
} dt_device_scratch;

struct dt_device_cache {
    dt_kv_home home;
    const dt_decoder *decoder;
    dt_memory *memory;                         /* the cache's; tensors are charged there */
    dt_memory work;                            /* of scratch */
    dt_device_layer *layers;                   /* [L] */
    ggml_gallocr_t allocators[DT_MAX_DEVICES]; /* of side graphs */
    dt_device_shape shape;
    ggml_backend_t const *backends; /* by device; NULL before the first batch */
    int32_t ring_index[DT_RING];    /* whose query a row of the rings holds, by its index in the conversation; -1: none */
    int32_t *observed_until;        /* [L] queries before that index have been observed */
    dt_device_scratch masks, rows, positions, moves, results;
};

static inline dt_device_cache *dt_device_cache_from(const dt_kv_home *home) { return (dt_device_cache *)(uintptr_t)home; }
/* A lane's row of what is pending. */
static inline dt_device_row *dt_device_pending(const dt_device_layer *layer, int32_t lane) {
    return layer->pending + (size_t)lane * (size_t)layer->capacity;
}
/* At least so many bytes; NULL where there is no memory. */
void *dt_device_reserve(dt_device_cache *cache, dt_device_scratch *scratch, size_t bytes);
/* Room for n rows in every lane of a layer; nothing may be pending where it has to move. */
dt_status dt_device_reserve_rows(dt_device_cache *cache, dt_device_layer *layer, int32_t n, dt_error *error);
/* The layer's ring, where it needs one. Not before something is computed: a session that is loaded is there beside the one that it
 * replaces, and a limit has room for one ring. */
dt_status dt_device_reserve_ring(dt_device_cache *cache, dt_device_layer *layer, dt_error *error);
/* Nothing is pending any more. */
void dt_device_reset_pending(dt_device_layer *layer);
/* dt_kv_home_ops' (device_side.c). */
bool dt_device_gather(dt_kv_home *home, int32_t layer, int32_t lane, const int32_t *entries, int32_t n, float *keys, float *values);
bool dt_device_scatter(dt_kv_home *home, int32_t layer, int32_t lane, const int32_t *entries, int32_t n, const float *keys,
                       const float *values);
dt_status dt_device_fail(const dt_device_cache *cache, const dt_device_layer *layer, const char *what, dt_error *error);

#endif
