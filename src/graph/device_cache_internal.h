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
    int32_t ring_position[DT_RING]; /* whose query a row of the rings holds; -1: none */
    int32_t *observed_until;        /* [L] queries before that position have been observed */
    dt_device_scratch masks, rows, positions, moves, results;
};

/* At least so many bytes; NULL where there is no memory. */
void *dt_device_reserve(dt_device_cache *cache, dt_device_scratch *scratch, size_t bytes);
/* Room for n rows in every lane of a layer; nothing may be pending where it has to move. */
dt_status dt_device_reserve_rows(dt_device_cache *cache, dt_device_layer *layer, int32_t n, dt_error *error);
/* Every entry lies in its own row. */
void dt_device_reset_sources(dt_device_layer *layer);
dt_status dt_device_fail(const dt_device_cache *cache, const dt_device_layer *layer, const char *what, dt_error *error);

#endif
