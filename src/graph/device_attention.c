/*
 * Attention of a layer whose cache is at home on a device, in plain ggml operators: what any backend computes. See device_cache.h.
 *
 * A layer's lanes enter as ggml's fourth dimension, not as heads: queries [D, N, n_rep, G], keys [D, n_kv, 1, G], mask [n_kv, N, 1,
 * G or 1]. So one mask serves the query heads that share a lane, and lanes of different length or content need no copy per head.
 * Invariant: the graph holds nothing that changes from batch to batch but through its inputs and the cache's tensors.
 */
#include "graph/device_cache.h"

#define POOLED_ROWS 8

/* x [D, n, m] -> [dim, n, m], filled up with zeros */
static struct ggml_tensor *pad_rows(struct ggml_context *ctx, struct ggml_tensor *x, int64_t dim) {
    return x->ne[0] == dim ? x : ggml_pad(ctx, ggml_cont(ctx, x), (int)(dim - x->ne[0]), 0, 0, 0);
}

/* Writes x [dim, G, N] to the batch's rows of a tensor of the cache; returns that tensor as it is afterwards. */
static struct ggml_tensor *store(struct ggml_context *ctx, struct ggml_tensor *cache, struct ggml_tensor *x,
                                 struct ggml_tensor *rows) {
    return ggml_set_rows(ctx, cache, ggml_permute(ctx, pad_rows(ctx, x, cache->ne[0]), 0, 2, 1, 3), rows);
}

/* The first n rows of every lane of a [dim, capacity, G] as [dim, n, 1, G] */
static struct ggml_tensor *lanes(struct ggml_context *ctx, struct ggml_tensor *cache, int64_t n) {
    return ggml_view_4d(ctx, cache, cache->ne[0], n, 1, cache->ne[2], cache->nb[1], cache->nb[2], cache->nb[2], 0);
}

/* The rows of each lane that are seen, [dim, n, 1, G], in halves. */
static struct ggml_tensor *gather(struct ggml_context *ctx, struct ggml_tensor *cache, struct ggml_tensor *seen) {
    struct ggml_tensor *rows = ggml_cast(ctx, ggml_get_rows(ctx, cache, seen), GGML_TYPE_F16);
    return ggml_reshape_4d(ctx, rows, rows->ne[0], rows->ne[1], 1, rows->ne[2]);
}

/* The largest weight that any of a lane's queries gives an entry: [n_kv, 1, G]. In steps of a few rows, which lie in a cache together
 * and give a device more to do at once; zeros fill up the last ones. */
static struct ggml_tensor *find_peaks(const dt_device_builder *b, struct ggml_tensor *q, struct ggml_tensor *k,
                                      struct ggml_tensor *mask) {
    struct ggml_tensor *x = dt_device_weights(b, q, k, mask);
    x = ggml_reshape_3d(b->ctx, x, x->ne[0], x->ne[1] * x->ne[2], x->ne[3]);
    do {
        const int n = (int)DT_MIN(x->ne[1], (int64_t)POOLED_ROWS), n_lacking = (int)(DT_ROUND_UP(x->ne[1], n) - x->ne[1]);
        x = n_lacking > 0 ? ggml_pad(b->ctx, x, 0, n_lacking, 0, 0) : x;
        x = ggml_pool_2d(b->ctx, x, GGML_OP_POOL_MAX, 1, n, 1, n, 0, 0);
    } while (x->ne[1] > 1);
    return x;
}

/* Without fused attention: [dim_v, N, n_rep, G]. Values are turned on their side each time, which costs a copy of them. */
static struct ggml_tensor *attend_by_products(const dt_device_builder *b, struct ggml_tensor *q, struct ggml_tensor *k,
                                              struct ggml_tensor *v, struct ggml_tensor *mask) {
    struct ggml_tensor *weights = dt_device_weights(b, q, k, mask);
    if (v->type != GGML_TYPE_F16) {
        v = ggml_cast(b->ctx, v, GGML_TYPE_F32);
    }
    struct ggml_tensor *out = ggml_mul_mat(b->ctx, ggml_cont(b->ctx, ggml_transpose(b->ctx, v)), weights);
    (void)ggml_prec_set_acc(out, GGML_PREC_F32); /* sums over the whole context, which devices may else keep in halves */
    return out;
}

struct ggml_tensor *dt_device_weights(const dt_device_builder *b, struct ggml_tensor *q, struct ggml_tensor *k,
                                      struct ggml_tensor *mask) {
    struct ggml_tensor *scores = ggml_mul_mat(b->ctx, k, q);
    (void)ggml_prec_set_acc(scores, GGML_PREC_F32);
    float scale = b->hp->attention_scale;
    if (b->hp->attention_softcap > 0.0f) {
        scores = ggml_tanh(b->ctx, ggml_scale(b->ctx, scores, scale / b->hp->attention_softcap));
        scores = ggml_scale(b->ctx, scores, b->hp->attention_softcap);
        scale = 1.0f;
    }
    return ggml_soft_max_ext(b->ctx, scores, mask, scale, 0.0f);
}

struct ggml_tensor *dt_device_attend(const dt_device_builder *b, const dt_device_layer *layer, const dt_device_layer_shape *shape,
                                     const dt_device_inputs *inputs, struct ggml_tensor *q, struct ggml_tensor *k,
                                     struct ggml_tensor *v, struct ggml_tensor **peaks) {
    struct ggml_context *ctx = b->ctx;
    const int64_t n = q->ne[2], n_lanes = layer->n_lanes, n_rep = layer->n_heads / n_lanes, dim_v = b->hp->head_dim_v;
    struct ggml_tensor *rows =
        ggml_view_2d(ctx, inputs->rows, n, n_lanes, (size_t)n * sizeof(int64_t), (size_t)shape->rows_at * sizeof(int64_t));
    v = ggml_view_3d(ctx, v, dim_v, n_lanes, n, (size_t)dim_v * sizeof(float), v->nb[1], 0);
    struct ggml_tensor *keys = store(ctx, layer->k, k, rows), *values = store(ctx, layer->v, v, rows);
    if (shape->seen_at >= 0) {
        struct ggml_tensor *seen = ggml_view_2d(ctx, inputs->seen, shape->n_kv, n_lanes, (size_t)shape->n_kv * sizeof(int32_t),
                                                (size_t)shape->seen_at * sizeof(int32_t));
        keys = gather(ctx, keys, seen);
        values = gather(ctx, values, seen);
    } else {
        keys = lanes(ctx, keys, shape->n_kv);
        values = lanes(ctx, values, shape->n_kv);
    }
    q = pad_rows(ctx, q, layer->dim_k);
    if (layer->ring != NULL) {
        const int64_t kept = inputs->ring->ne[0];
        struct ggml_tensor *last = ggml_view_2d(ctx, q, layer->ring->ne[0], kept, q->nb[2], (size_t)(n - kept) * q->nb[2]);
        ggml_build_forward_expand(b->cgraph, ggml_set_rows(ctx, layer->ring, last, inputs->ring));
    }
    q = ggml_view_4d(ctx, q, layer->dim_k, n_rep, n_lanes, n, q->nb[1], (size_t)n_rep * q->nb[1], q->nb[2], 0);
    q = ggml_permute(ctx, q, 0, 2, 3, 1); /* [D, N, n_rep, G] */
    const size_t mask_row = (size_t)shape->n_kv * sizeof(ggml_fp16_t);
    struct ggml_tensor *mask = ggml_view_4d(ctx, inputs->masks, shape->n_kv, n, 1, shape->n_masks, mask_row, mask_row * (size_t)n,
                                            mask_row * (size_t)n, (size_t)shape->mask_at * sizeof(ggml_fp16_t));
    if (shape->peaks_at >= 0) {
        *peaks = find_peaks(b, q, keys, mask);
        ggml_set_output(*peaks);
        ggml_build_forward_expand(b->cgraph, *peaks);
    }
    struct ggml_tensor *fused =
        ggml_flash_attn_ext(ctx, q, keys, values, mask, b->hp->attention_scale, 0.0f, b->hp->attention_softcap);
    (void)ggml_prec_set_acc(fused, GGML_PREC_F32);
    struct ggml_tensor *out; /* to become [dim_v, n_rep, G, N] */
    if (!b->no_flash && ggml_backend_dev_supports_op(b->device, fused)) {
        out = ggml_permute(ctx, fused, 0, 1, 3, 2);
    } else {
        out = ggml_permute(ctx, attend_by_products(b, q, keys, values, mask), 0, 3, 1, 2);
    }
    out = ggml_view_4d(ctx, out, dim_v, n_rep, n_lanes, n, out->nb[1], out->nb[2], out->nb[3], 0);
    return ggml_cont_2d(ctx, out, dim_v * n_rep * n_lanes, n);
}
