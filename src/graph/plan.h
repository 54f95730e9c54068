/*
 * A plan: the ggml graphs of one batch size, built and allocated, one for each run of layers on the same device. Private to graph/.
 */
#ifndef DT_GRAPH_PLAN_H
#define DT_GRAPH_PLAN_H

#include "attn/attn.h"
#include "ggml-alloc.h"
#include "graph/device_cache.h"

/* What a layer's custom operators work on. The jobs, one per sequence, are refilled before every computation. */
typedef struct dt_layer_op {
    dt_attn_job *jobs;
    int32_t n_jobs;
    int64_t attention_us; /* spent here by the first thread, since the graph was made */
} dt_layer_op;

typedef struct dt_plan_layer {
    struct ggml_tensor *q, *k, *v, *out; /* [D, H, N], [D, G, N], [Dv*G, N], [Dv*H, N]; NULL for layers whose cache is elsewhere */
    struct ggml_tensor *peaks;           /* of such a layer: [n_kv, G] where the batch's one sequence collects them, else NULL */
} dt_plan_layer;

#define DT_MAX_SEGMENTS (DT_MAX_DEVICES + 2)

/* A sequence whose cache is elsewhere: its attention is a part of the graph of its own. */
typedef struct dt_plan_sequence {
    const dt_device_cache *cache;
    const dt_device_shape *shape; /* of that cache */
    int32_t n_tokens;
} dt_plan_sequence;

/* Embedding, layers and output that follow each other on one device. */
typedef struct dt_plan_segment {
    int32_t device; /* index into decoder->devices */
    struct ggml_cgraph *cgraph;
    struct ggml_tensor *in, *out;              /* [E, N]: what the segment before gives; what this one does. NULL at the ends */
    struct ggml_tensor *positions;             /* I32 [N]; NULL where nothing reads them, as the next */
    dt_device_inputs inputs[DT_MAX_ELSEWHERE]; /* by sequence */
} dt_plan_segment;

typedef struct dt_plan {
    int32_t n_tokens, n_outputs; /* 0: not built */
    bool observe;                /* has the nodes that collect attention mass */
    void *arena;                 /* memory of ctx */
    size_t arena_bytes;
    struct ggml_context *ctx;
    dt_plan_segment segments[DT_MAX_SEGMENTS];
    int32_t n_segments;
    ggml_gallocr_t allocators[DT_MAX_SEGMENTS];
    struct ggml_tensor *tokens, *output_rows; /* I32 [N], [n_outputs] */
    struct ggml_tensor *logits;               /* F32 [V, n_outputs] */
    dt_plan_layer *layers;                    /* [L] */
    dt_gemm_product *products;                /* what the graph's products with packed matrices multiply */
    int32_t n_products;
    int32_t n_elsewhere; /* sequences with caches elsewhere that it was built for; of each: */
    int32_t tokens_of[DT_MAX_ELSEWHERE];
    dt_device_layer_shape *shapes; /* [DT_MAX_ELSEWHERE][L] */
} dt_plan;

typedef struct dt_plan_params {
    const dt_decoder *decoder;
    dt_layer_op *ops;                  /* [L], fixed addresses */
    const dt_plan_sequence *elsewhere; /* [n_elsewhere], the whole batch; 0: every layer is on the host */
    int32_t n_elsewhere;
    int32_t n_tokens, n_outputs;
    bool observe, no_flash;
} dt_plan_params;

/* Rebuilds *plan; it must be zeroed or built before. */
dt_status dt_plan_build(dt_plan *plan, const dt_plan_params *params, dt_error *error);
/* Whether it was built for these. */
bool dt_plan_fits(const dt_plan *plan, const dt_plan_params *params);
void dt_plan_free(dt_plan *plan);

#endif
