/*
 * A plan: the ggml graph of one batch size, built and allocated. Private to graph/.
 */
#ifndef DT_GRAPH_PLAN_H
#define DT_GRAPH_PLAN_H

#include "attn/attn.h"
#include "ggml-alloc.h"
#include "graph/decoder.h"

/* What a layer's custom operators work on. The jobs, one per sequence, are refilled before every computation. */
typedef struct dt_layer_op {
    dt_attn_job *jobs;
    int32_t n_jobs;
    int64_t attention_us; /* spent here by the first thread, since the graph was made */
} dt_layer_op;

typedef struct dt_plan_layer {
    struct ggml_tensor *q, *k, *v, *out; /* [D, H, N], [D, G, N], [Dv*G, N], [Dv*H, N] */
} dt_plan_layer;

typedef struct dt_plan {
    int32_t n_tokens, n_outputs; /* 0: not built */
    bool observe;                /* has the nodes that collect attention mass */
    void *arena;                 /* memory of ctx */
    size_t arena_bytes;
    struct ggml_context *ctx;
    struct ggml_cgraph *cgraph;
    ggml_gallocr_t allocator;
    struct ggml_tensor *tokens, *positions, *output_rows; /* I32 [N], [N], [n_outputs] */
    struct ggml_tensor *logits;                           /* F32 [V, n_outputs] */
    dt_plan_layer *layers;                                /* [L] */
} dt_plan;

/* Rebuilds *plan for a batch size; it must be zeroed or built before. ops: [L], fixed addresses. */
dt_status dt_plan_build(dt_plan *plan, const dt_decoder *decoder, dt_layer_op *ops, int32_t n_tokens, int32_t n_outputs,
                        bool observe, dt_error *error);
void dt_plan_free(dt_plan *plan);

#endif
