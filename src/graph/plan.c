/*
 * The decoder graph: one function for every family, driven by the hyperparameters and by which weights are there.
 *
 * Attention enters as custom operators chained through their sources: store (keys and values into the cache), attend,
 * and, where wanted, observe (attention mass). ggml puts a barrier between nodes, which is what the phases of
 * attn/attn.h need. Layers whose cache is elsewhere attend by ggml's own operators instead (device_attention.c), and what is not on
 * the CPU has no custom operators at all.
 *
 * Invariant: the graph holds nothing that changes between batches of its size; see graph.h.
 */
#include "graph/plan.h"

#include "weights/ggml_calls.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define NODES_PER_LAYER 88
#define NODES_PER_EXPERT_USED 2 /* in each layer */
#define NODES_PER_MODEL 32
#define NODES_PER_SEQUENCE 64 /* in each layer, for every sequence with a cache elsewhere beyond the first */
#define PRODUCTS_PER_LAYER 7
#define HALF_MAX 65504.0f
#define SMALLEST_SUM 6.103515625e-5f /* what the chosen experts' probabilities are divided by at least: the smallest normal half */

typedef struct builder {
    const dt_decoder *decoder;
    const dt_hparams *hp;
    struct ggml_context *ctx;
    dt_plan *plan;
    const dt_plan_params *params;
    dt_plan_segment *segment; /* that is being built */
    size_t max_nodes;         /* of a segment's graph */
} builder;

/* What products are taken of, [n_in, N]. */
typedef struct activations {
    struct ggml_tensor *x;      /* NULL: there are only packed ones */
    struct ggml_tensor *packed; /* for one product, which uses it up; NULL: to be packed */
    int64_t n_in, n;
} activations;

/* The residual stream: x, and what is still to be added to it or NULL. [E, N] */
typedef struct stream {
    struct ggml_tensor *x, *y;
} stream;

/* ---- custom operators ---- */

/* The counters that prepare resets are first used by attend, which starts after the barrier. Threads take turns at being a job's
 * first one: what is small is not dealt out evenly. */
static void op_store(struct ggml_tensor *dst, int ith, int nth, void *user) {
    dt_layer_op *op = user;
    (void)dst;
    const int64_t start = ith == 0 ? dt_clock_us() : 0;
    for (int32_t i = 0; i < op->n_jobs; i++) {
        const int turn = (ith + i) % nth;
        if (turn == 0) {
            op->jobs[i].kernel->prepare(&op->jobs[i]);
        }
        op->jobs[i].kernel->store(&op->jobs[i], turn, nth);
    }
    if (ith == 0) {
        op->attention_us += dt_clock_us() - start;
    }
}

static void op_attend(struct ggml_tensor *dst, int ith, int nth, void *user) {
    dt_layer_op *op = user;
    (void)dst;
    const int64_t start = ith == 0 ? dt_clock_us() : 0;
    for (int32_t i = 0; i < op->n_jobs; i++) {
        op->jobs[i].kernel->attend(&op->jobs[i], ith, nth);
    }
    if (ith == 0) {
        op->attention_us += dt_clock_us() - start;
    }
}

static void op_observe(struct ggml_tensor *dst, int ith, int nth, void *user) {
    dt_layer_op *op = user;
    (void)dst;
    const int64_t start = ith == 0 ? dt_clock_us() : 0;
    for (int32_t i = 0; i < op->n_jobs; i++) {
        if (op->jobs[i].mass_row) {
            op->jobs[i].kernel->observe(&op->jobs[i], ith, nth);
        }
    }
    if (ith == 0) {
        op->attention_us += dt_clock_us() - start;
    }
}

/* Where x + y of a norm lies behind the packed inputs, in bytes. */
static size_t sum_offset(int64_t n_in, int64_t n) {
    return DT_ROUND_UP(dt_gemm_input_bytes((int32_t)n_in, (int32_t)n), (size_t)64);
}

static dt_gemm_inputs inputs_of(dt_gemm_input_kind kind, const struct ggml_tensor *x, const struct ggml_tensor *y) {
    return (dt_gemm_inputs){.kind = kind,
                            .n_in = (int32_t)x->ne[0],
                            .n_tokens = (int32_t)x->ne[1],
                            .x = x->data,
                            .x_stride = x->nb[1] / sizeof(float),
                            .y = y != NULL ? y->data : NULL,
                            .y_stride = y != NULL ? y->nb[1] / sizeof(float) : 0};
}

/* Sources: x. */
static void op_pack(struct ggml_tensor *dst, int ith, int nth, void *user) {
    const dt_gemm_inputs in = inputs_of(DT_GEMM_PLAIN, dst->src[0], NULL);
    (void)user;
    dt_gemm_kernel_auto()->pack_inputs(&in, dst->data, ith, nth);
}

/* Sources: x, the norm's weight, y or none. user: epsilon. */
static void op_pack_norm(struct ggml_tensor *dst, int ith, int nth, void *user) {
    dt_gemm_inputs in = inputs_of(DT_GEMM_NORM, dst->src[0], dst->src[2]);
    in.weight = dst->src[1]->data;
    in.epsilon = *(const float *)user;
    in.sum = (float *)((char *)dst->data + sum_offset(in.n_in, in.n_tokens));
    dt_gemm_kernel_auto()->pack_inputs(&in, dst->data, ith, nth);
}

/* Sources: gate, up. */
static void op_pack_silu(struct ggml_tensor *dst, int ith, int nth, void *user) {
    const dt_gemm_inputs in = inputs_of(DT_GEMM_SILU, dst->src[0], dst->src[1]);
    (void)user;
    dt_gemm_kernel_auto()->pack_inputs(&in, dst->data, ith, nth);
}

/* user: a dt_gemm_product without tokens and results, which are dst's. */
static void op_multiply(struct ggml_tensor *dst, int ith, int nth, void *user) {
    dt_gemm_product product = *(const dt_gemm_product *)user;
    product.n_tokens = (int32_t)dst->ne[1];
    product.y = dst->data;
    product.stride = dst->nb[1] / sizeof(float);
    dt_gemm_kernel_auto()->multiply(&product, dst->src[0]->data, ith, nth);
}

/* Holds inputs to +-*user. What is not a number stays so and shows in the logits. Every thread takes rows. */
static void op_limit_values(struct ggml_tensor *dst, const struct ggml_tensor *x, int ith, int nth, void *user) {
    const float most = *(const float *)user;
    const int64_t n_rows = ggml_nrows(x), width = x->ne[0];
    for (int64_t row = ith; row < n_rows; row += nth) {
        float *values = (float *)((char *)dst->data + (size_t)row * dst->nb[1]);
        for (int64_t i = 0; i < width; i++) {
            const float low = values[i] < -most ? -most : values[i];
            values[i] = low > most ? most : low;
        }
    }
}

/* Keeps the sum of 32 inputs within a half: ggml stores it as one beside weights with a minimum. Every thread takes rows. */
static void op_limit_sums(struct ggml_tensor *dst, const struct ggml_tensor *x, int ith, int nth, void *user) {
    const int64_t n_rows = ggml_nrows(x);
    (void)user;
    for (int64_t row = ith; row < n_rows; row += nth) {
        float *block = (float *)((char *)dst->data + (size_t)row * dst->nb[1]);
        for (const float *end = block + x->ne[0]; block < end; block += 32) {
            float sum = 0.0f, largest = 0.0f;
            for (int32_t i = 0; i < 32; i++) {
                sum += block[i];
                largest = fmaxf(largest, fabsf(block[i]));
            }
            const float most = fabsf(sum) + largest / 7.0f; /* 16 roundings of a 254th */
            for (int32_t i = 0; i < 32 && most > HALF_MAX; i++) {
                block[i] *= HALF_MAX / most; /* infinite ones become NaN, which shows in the logits */
            }
        }
    }
}

/* ---- pieces ---- */

static struct ggml_tensor *norm(builder *b, struct ggml_tensor *x, struct ggml_tensor *weight) {
    return ggml_mul(b->ctx, ggml_rms_norm(b->ctx, x, b->hp->norm_eps), weight);
}

static struct ggml_tensor *add_bias(builder *b, struct ggml_tensor *x, struct ggml_tensor *bias) {
    return bias ? ggml_add(b->ctx, x, bias) : x;
}

static bool is_packed(const dt_matrix *w) { return w->packed.n_out > 0; }

static activations plain(struct ggml_tensor *x) { return (activations){.x = x, .n_in = x->ne[0], .n = x->ne[1]}; }

/* A tensor for packed inputs and more_bytes behind sum_offset. */
static struct ggml_tensor *packed(builder *b, int64_t n_in, int64_t n, size_t more_bytes, struct ggml_tensor **args, int n_args,
                                  ggml_custom_op_t op, const void *user) {
    const int64_t n_floats = (int64_t)((sum_offset(n_in, n) + more_bytes) / sizeof(float));
    return ggml_custom_4d(b->ctx, GGML_TYPE_F32, n_floats, 1, 1, 1, args, n_args, op, GGML_N_TASKS_MAX, (void *)(uintptr_t)user);
}

/* The norm of the stream, to which nothing is left to be added then. only_packed: all that it is for are packed matrices. */
static activations normed(builder *b, stream *s, struct ggml_tensor *weight, bool only_packed) {
    if (!only_packed) {
        s->x = s->y ? ggml_add(b->ctx, s->y, s->x) : s->x;
        s->y = NULL;
        return plain(norm(b, s->x, weight));
    }
    const int64_t n_in = s->x->ne[0], n = s->x->ne[1];
    const size_t row_bytes = (size_t)n_in * sizeof(float), offset = sum_offset(n_in, n);
    struct ggml_tensor *args[] = {s->x, weight, s->y};
    struct ggml_tensor *y =
        packed(b, n_in, n, s->y ? row_bytes * (size_t)n : 0, args, s->y ? 3 : 2, op_pack_norm, &b->hp->norm_eps);
    s->x = s->y ? ggml_view_2d(b->ctx, y, n_in, n, row_bytes, offset) : s->x;
    s->y = NULL;
    return (activations){.packed = y, .n_in = n_in, .n = n};
}

/* Packed matrices [n_in, n_out] of the same inputs -> [sum of n_out, N] */
static struct ggml_tensor *multiply(builder *b, const dt_matrix *const *w, int32_t n_matrices, activations *a) {
    dt_gemm_product *product = &b->plan->products[b->plan->n_products++];
    int64_t n_out = 0;
    *product = (dt_gemm_product){.n_matrices = n_matrices};
    for (int32_t i = 0; i < n_matrices; i++) {
        product->matrices[i] = &w[i]->packed;
        n_out += w[i]->packed.n_out;
    }
    if (a->packed == NULL) {
        a->packed = packed(b, a->n_in, a->n, 0, &a->x, 1, op_pack, NULL);
    }
    struct ggml_tensor *y =
        ggml_custom_4d(b->ctx, GGML_TYPE_F32, n_out, a->n, 1, 1, &a->packed, 1, op_multiply, GGML_N_TASKS_MAX, product);
    a->packed = NULL;
    return y;
}

/* a [n_in, N] -> [n_out, N] */
static struct ggml_tensor *linear(builder *b, const dt_matrix *w, struct ggml_tensor *bias, activations *a) {
    return add_bias(b, is_packed(w) ? multiply(b, &w, 1, a) : ggml_mul_mat(b->ctx, w->tensor, a->x), bias);
}

/* x [D, heads, N] */
static struct ggml_tensor *rope(builder *b, struct ggml_tensor *x, int32_t layer) {
    const dt_hparams *hp = b->hp;
    if (hp->rope_base[layer] == 0.0f) {
        return x;
    }
    const int mode = hp->arch->rope_style == DT_ROPE_NEOX ? GGML_ROPE_TYPE_NEOX : 0;
    return ggml_rope_ext(b->ctx, x, b->segment->positions, b->decoder->rope_factors[b->segment->device], hp->rope_dim, mode,
                         hp->rope_ctx_orig, hp->rope_base[layer], hp->rope_freq_scale[layer], hp->rope_ext_factor,
                         hp->rope_attn_factor, hp->rope_beta_fast, hp->rope_beta_slow);
}

/* Rows [first, first + n) of x as [n, N]. */
static struct ggml_tensor *part(builder *b, struct ggml_tensor *x, int64_t first, int64_t n) {
    return ggml_view_2d(b->ctx, x, n, x->ne[1], x->nb[1], (size_t)first * sizeof(float));
}

static bool has_packed_projection(const dt_layer_weights *w) {
    return is_packed(&w->wqkv) || (is_packed(&w->wq) && is_packed(&w->wk) && is_packed(&w->wv));
}

/* Whether query, key and value come out of one product. */
static bool is_projected_once(const dt_layer_weights *w) { return w->wqkv.tensor || has_packed_projection(w); }

/* a [E, N] -> *q [H*D, N], *k [G*D, N], *v [G*Dv, N]; strided where they come out of one product. */
static void project(builder *b, activations *a, int32_t layer, struct ggml_tensor **q, struct ggml_tensor **k,
                    struct ggml_tensor **v) {
    const dt_layer_weights *w = &b->decoder->layers[layer];
    const int64_t n_q = (int64_t)b->hp->n_heads * b->hp->head_dim_k, n_k = (int64_t)b->hp->n_kv_heads[layer] * b->hp->head_dim_k;
    if (is_projected_once(w)) {
        const dt_matrix *apart[] = {&w->wq, &w->wk, &w->wv};
        struct ggml_tensor *qkv = w->wqkv.tensor ? linear(b, &w->wqkv, w->bqkv, a) : multiply(b, apart, 3, a);
        *q = add_bias(b, part(b, qkv, 0, n_q), w->bq);
        *k = add_bias(b, part(b, qkv, n_q, n_k), w->bk);
        *v = add_bias(b, part(b, qkv, n_q + n_k, qkv->ne[0] - n_q - n_k), w->bv);
    } else {
        *q = linear(b, &w->wq, w->bq, a);
        *k = linear(b, &w->wk, w->bk, a);
        *v = linear(b, &w->wv, w->bv, a);
    }
}

/* x [D*heads, N] -> [D, heads, N], each head normed where the model does that, and rotated. */
static struct ggml_tensor *heads(builder *b, struct ggml_tensor *x, struct ggml_tensor *head_norm, int64_t n_heads, int32_t layer) {
    const int64_t dim = b->hp->head_dim_k;
    x = ggml_view_3d(b->ctx, x, dim, n_heads, x->ne[1], (size_t)dim * sizeof(float), x->nb[1], 0);
    return rope(b, head_norm ? norm(b, x, head_norm) : x, layer);
}

/* Heads [first, first + n) of x [D, heads, N]. */
static struct ggml_tensor *some_heads(builder *b, struct ggml_tensor *x, int64_t first, int64_t n) {
    return ggml_view_3d(b->ctx, x, x->ne[0], n, x->ne[2], x->nb[1], x->nb[2], (size_t)first * x->nb[1]);
}

static bool is_elsewhere(const builder *b, int32_t layer) {
    return b->params->n_elsewhere > 0 && dt_device_cache_layer(b->params->elsewhere[0].cache, layer)->device >= 0;
}

/* The attention of every sequence, one after the other. q [D, H, N], k [D, G, N], v [Dv*G, N] -> [Dv*H, N] */
static struct ggml_tensor *attend_elsewhere(builder *b, int32_t layer, struct ggml_tensor *q, struct ggml_tensor *k,
                                            struct ggml_tensor *v) {
    const dt_plan_segment *s = b->segment;
    const dt_device_builder here = {
        .ctx = b->ctx, .cgraph = s->cgraph, .device = b->decoder->devices[s->device], .hp = b->hp, .no_flash = b->params->no_flash};
    struct ggml_tensor *all = NULL;
    size_t first = 0;
    for (int32_t i = 0; i < b->params->n_elsewhere; i++) {
        const dt_plan_sequence *sequence = &b->params->elsewhere[i];
        const int64_t n = sequence->n_tokens;
        struct ggml_tensor *own_q = ggml_view_3d(b->ctx, q, q->ne[0], q->ne[1], n, q->nb[1], q->nb[2], first * q->nb[2]);
        struct ggml_tensor *own_k = ggml_view_3d(b->ctx, k, k->ne[0], k->ne[1], n, k->nb[1], k->nb[2], first * k->nb[2]);
        struct ggml_tensor *own_v = ggml_view_2d(b->ctx, v, v->ne[0], n, v->nb[1], first * v->nb[1]);
        struct ggml_tensor *out =
            dt_device_attend(&here, dt_device_cache_layer(sequence->cache, layer), &sequence->shape->layers[layer], &s->inputs[i],
                             own_q, own_k, own_v, &b->plan->layers[layer].peaks);
        all = all != NULL ? ggml_concat(b->ctx, all, out, 1) : out;
        first += (size_t)n;
    }
    return all;
}

/* a [E, N] -> [Dv*H, N] */
static struct ggml_tensor *attention(builder *b, activations *a, int32_t layer) {
    const dt_hparams *hp = b->hp;
    const dt_layer_weights *w = &b->decoder->layers[layer];
    dt_plan_layer *io = &b->plan->layers[layer];
    dt_layer_op *op = &b->params->ops[layer];
    const int64_t n = a->n, n_kv_heads = hp->n_kv_heads[layer];

    struct ggml_tensor *q, *k, *v;
    project(b, a, layer, &q, &k, &v);
    if (is_projected_once(w) && !w->q_norm && !w->k_norm && !w->bq && !w->bk) { /* rotated together */
        struct ggml_tensor *both = heads(b, q, NULL, hp->n_heads + n_kv_heads, layer);
        q = some_heads(b, both, 0, hp->n_heads);
        k = some_heads(b, both, hp->n_heads, n_kv_heads);
    } else {
        q = heads(b, q, w->q_norm, hp->n_heads, layer);
        k = heads(b, k, w->k_norm, n_kv_heads, layer);
    }
    if (is_elsewhere(b, layer)) {
        *io = (dt_plan_layer){0};
        return attend_elsewhere(b, layer, q, k, v);
    }
    *io = (dt_plan_layer){.q = q, .k = k, .v = v};
    struct ggml_tensor *store_args[] = {io->k, io->v};
    struct ggml_tensor *stored = ggml_custom_4d(b->ctx, GGML_TYPE_F32, 1, 1, 1, 1, store_args, 2, op_store, GGML_N_TASKS_MAX, op);
    struct ggml_tensor *attend_args[] = {io->q, stored};
    io->out = ggml_custom_4d(b->ctx, GGML_TYPE_F32, (int64_t)hp->n_heads * hp->head_dim_v, n, 1, 1, attend_args, 2, op_attend,
                             GGML_N_TASKS_MAX, op);
    if (b->plan->observe) {
        /* reads q: as a source it keeps q's memory from being reused before */
        struct ggml_tensor *observe_args[] = {io->q, io->out};
        ggml_build_forward_expand(b->segment->cgraph, ggml_custom_4d(b->ctx, GGML_TYPE_F32, 1, 1, 1, 1, observe_args, 2, op_observe,
                                                                     GGML_N_TASKS_MAX, op));
    }
    return io->out;
}

/* act(x) * up */
static struct ggml_tensor *gate(builder *b, struct ggml_tensor *x, struct ggml_tensor *up) {
    return b->hp->arch->activation == DT_ACTIVATION_GELU ? ggml_geglu_split(b->ctx, x, up) : ggml_swiglu_split(b->ctx, x, up);
}

/*
 * Holds the inputs of ffn_down to what ggml's product with weights of this type can take: it turns them into halves, or into
 * bytes with a scale (and a sum) in halves. Products of gate and up are the one place where real models exceed that (GLM-4), and
 * infinities there become NaN everywhere. Our own packed products have their scales in floats.
 */
static struct ggml_tensor *limit(builder *b, const struct ggml_tensor *weight, struct ggml_tensor *x) {
    if (b->segment->device > 0) { /* no custom operators there: the range of halves for all, which sums of 32 rarely exceed then */
        return ggml_is_quantized(weight->type) || weight->type == GGML_TYPE_F16 ? ggml_clamp(b->ctx, x, -HALF_MAX, HALF_MAX) : x;
    }
    static const float half_max = HALF_MAX, bytes_max = 120.0f * HALF_MAX; /* the scale is a 127th of the largest */
    switch (weight->type) {
    case GGML_TYPE_F16:
        return ggml_map_custom1_inplace(b->ctx, x, op_limit_values, GGML_N_TASKS_MAX, (void *)&half_max);
    case GGML_TYPE_Q4_0:
    case GGML_TYPE_Q5_0:
    case GGML_TYPE_Q8_0:
    case GGML_TYPE_IQ4_NL:
    case GGML_TYPE_MXFP4:
        return ggml_map_custom1_inplace(b->ctx, x, op_limit_values, GGML_N_TASKS_MAX, (void *)&bytes_max);
    case GGML_TYPE_Q4_1:
    case GGML_TYPE_Q5_1:
        return ggml_map_custom1_inplace(b->ctx, x, op_limit_sums, GGML_N_TASKS_MAX, NULL);
    default:
        return x;
    }
}

/* Experts chosen by token: sum of their feed-forwards, weighted by the router's probabilities made to sum to 1 over the chosen.
 * Mixtral (Jiang et al. 2024); routing as in Shazeer et al. 2017. x [E, N] -> [E, N] */
static struct ggml_tensor *mixture(builder *b, struct ggml_tensor *x, int32_t layer) {
    assert(x != NULL);
    const dt_layer_weights *w = &b->decoder->layers[layer];
    const int64_t n = x->ne[1], n_experts = b->hp->n_experts, n_used = b->hp->n_experts_used;
    activations a = plain(x);
    struct ggml_tensor *probabilities = ggml_soft_max(b->ctx, linear(b, &w->router, NULL, &a));
    struct ggml_tensor *chosen = ggml_argsort_top_k(b->ctx, probabilities, (int)n_used); /* [used, N] */
    struct ggml_tensor *share =
        ggml_get_rows(b->ctx, ggml_reshape_3d(b->ctx, probabilities, 1, n_experts, n), chosen); /* [1, used, N] */
    share = ggml_reshape_2d(b->ctx, share, n_used, n);
    share = ggml_div(b->ctx, share, ggml_clamp(b->ctx, ggml_sum_rows(b->ctx, share), SMALLEST_SUM, INFINITY));

    struct ggml_tensor *rows = ggml_reshape_3d(b->ctx, x, x->ne[0], 1, n);
    struct ggml_tensor *up = ggml_mul_mat_id(b->ctx, w->up_experts, rows, chosen); /* [F, used, N] */
    struct ggml_tensor *gated = gate(b, ggml_mul_mat_id(b->ctx, w->gate_experts, rows, chosen), up);
    struct ggml_tensor *each =
        ggml_mul_mat_id(b->ctx, w->down_experts, limit(b, w->down_experts, gated), chosen); /* [E, used, N] */
    each = ggml_mul(b->ctx, each, ggml_reshape_3d(b->ctx, share, 1, n_used, n));
    struct ggml_tensor *sum = NULL;
    for (int64_t i = 0; i < n_used; i++) {
        struct ggml_tensor *one = ggml_view_2d(b->ctx, each, each->ne[0], n, each->nb[2], (size_t)i * each->nb[1]);
        sum = sum ? ggml_add(b->ctx, sum, one) : ggml_cont(b->ctx, one);
    }
    return sum;
}

static bool has_packed_feed_forward(const dt_layer_weights *w) {
    return !w->router.tensor && is_packed(&w->ffn_up) && (!w->ffn_gate.tensor || is_packed(&w->ffn_gate));
}

/* Gated feed-forward: down(act(gate a) * up a). */
static struct ggml_tensor *feed_forward(builder *b, activations *a, int32_t layer) {
    const dt_layer_weights *w = &b->decoder->layers[layer];
    if (w->router.tensor) {
        return mixture(b, a->x, layer);
    }
    struct ggml_tensor *gates, *up;
    if (w->ffn_gate.tensor && !has_packed_feed_forward(w)) {
        gates = linear(b, &w->ffn_gate, w->ffn_gate_bias, a);
        up = linear(b, &w->ffn_up, w->ffn_up_bias, a);
    } else {
        const dt_matrix *apart[] = {&w->ffn_gate, &w->ffn_up};
        struct ggml_tensor *both = w->ffn_gate.tensor ? multiply(b, apart, 2, a) : linear(b, &w->ffn_up, w->ffn_up_bias, a);
        const int64_t width = both->ne[0] / 2;
        gates = add_bias(b, part(b, both, 0, width), w->ffn_gate_bias);
        up = add_bias(b, part(b, both, width, width), w->ffn_gate.tensor ? w->ffn_up_bias : NULL);
    }
    activations gated;
    if (is_packed(&w->ffn_down) && b->hp->arch->activation == DT_ACTIVATION_SILU) {
        struct ggml_tensor *args[] = {gates, up};
        gated = (activations){.n_in = up->ne[0], .n = up->ne[1]};
        gated.packed = packed(b, gated.n_in, gated.n, 0, args, 2, op_pack_silu, NULL);
    } else {
        gated = plain(limit(b, w->ffn_down.tensor, gate(b, gates, up)));
    }
    return linear(b, &w->ffn_down, w->ffn_down_bias, &gated);
}

static struct ggml_tensor *softcap(builder *b, struct ggml_tensor *x, float cap) {
    return ggml_scale(b->ctx, ggml_tanh(b->ctx, ggml_scale(b->ctx, x, 1.0f / cap)), cap);
}

static struct ggml_tensor *input(builder *b, enum ggml_type type, int64_t n, const char *name) {
    struct ggml_tensor *t = ggml_new_tensor_1d(b->ctx, type, n);
    ggml_set_input(t);
    ggml_set_name(t, name);
    return t;
}

/* Ends the segment at x, if there is one, and begins the next; returns x as that one sees it. */
static struct ggml_tensor *begin_segment(builder *b, int32_t device, struct ggml_tensor *x) {
    dt_plan *plan = b->plan;
    if (b->segment != NULL) {
        ggml_set_output(x);
        b->segment->out = x;
        ggml_build_forward_expand(b->segment->cgraph, x);
    }
    b->segment = &plan->segments[plan->n_segments++];
    *b->segment = (dt_plan_segment){.device = device, .cgraph = ggml_new_graph_custom(b->ctx, b->max_nodes, false)};
    if (x != NULL) {
        b->segment->in = ggml_new_tensor_2d(b->ctx, GGML_TYPE_F32, x->ne[0], x->ne[1]);
        ggml_set_input(b->segment->in);
    }
    return b->segment->in;
}

/* The stream goes on at the device, if it isn't there. */
static void go_on_at(builder *b, int32_t device, stream *s) {
    if (device != b->segment->device) {
        s->x = begin_segment(b, device, s->y ? ggml_add(b->ctx, s->y, s->x) : s->x);
        s->y = NULL;
    }
}

/* What a layer of the segment needs to be told; once for all of its layers. */
static void need_inputs(builder *b, int32_t layer) {
    dt_plan_segment *s = b->segment;
    const int32_t n = b->plan->n_tokens;
    if (b->hp->rope_base[layer] != 0.0f && s->positions == NULL) {
        s->positions = input(b, GGML_TYPE_I32, n, "positions");
    }
    for (int32_t i = 0; is_elsewhere(b, layer) && i < b->params->n_elsewhere; i++) {
        const dt_plan_sequence *sequence = &b->params->elsewhere[i];
        dt_device_inputs *inputs = &s->inputs[i];
        if (inputs->masks == NULL) {
            inputs->masks = input(b, GGML_TYPE_F16, sequence->shape->n_mask[s->device], "masks");
            inputs->rows = input(b, GGML_TYPE_I64, sequence->shape->n_rows[s->device], "rows");
        }
        if (inputs->seen == NULL && sequence->shape->n_seen[s->device] > 0) {
            inputs->seen = input(b, GGML_TYPE_I32, sequence->shape->n_seen[s->device], "seen");
        }
        if (inputs->ring == NULL && dt_device_cache_layer(sequence->cache, layer)->ring != NULL) {
            inputs->ring = input(b, GGML_TYPE_I64, DT_MIN(sequence->n_tokens, DT_RING), "ring");
        }
    }
}

static struct ggml_tensor *output_rows(builder *b, struct ggml_tensor *x) {
    return b->plan->n_outputs < b->plan->n_tokens ? ggml_get_rows(b->ctx, x, b->plan->output_rows) : x;
}

static void build(builder *b) {
    const dt_hparams *hp = b->hp;
    dt_plan *plan = b->plan;
    begin_segment(b, 0, NULL);
    plan->tokens = input(b, GGML_TYPE_I32, plan->n_tokens, "tokens");
    stream s = {.x = ggml_get_rows(b->ctx, b->decoder->token_embedding, plan->tokens)};
    if (hp->embedding_scale != 1.0f) {
        s.x = ggml_scale(b->ctx, s.x, hp->embedding_scale);
    }
    for (int32_t i = 0; i < hp->n_layers; i++) {
        const dt_layer_weights *w = &b->decoder->layers[i];
        go_on_at(b, b->decoder->layer_device[i], &s);
        if (i == hp->n_layers - 1) {
            plan->output_rows = input(b, GGML_TYPE_I32, plan->n_outputs, "output_rows");
            /* with every row wanted, nothing reads it: expand it too, so that it has memory */
            ggml_build_forward_expand(b->segment->cgraph, plan->output_rows);
        }
        need_inputs(b, i);
        activations a = normed(b, &s, w->attn_norm, has_packed_projection(w));
        struct ggml_tensor *y = attention(b, &a, i);
        if (i == hp->n_layers - 1) { /* after the last attention only the wanted rows matter */
            y = output_rows(b, y);
            s.x = output_rows(b, s.x);
        }
        a = plain(y);
        y = linear(b, &w->wo, w->bo, &a);
        s.y = w->attn_post_norm ? norm(b, y, w->attn_post_norm) : y;
        a = normed(b, &s, w->ffn_norm, has_packed_feed_forward(w));
        y = feed_forward(b, &a, i);
        s.y = w->ffn_post_norm ? norm(b, y, w->ffn_post_norm) : y;
    }
    go_on_at(b, b->decoder->head_device, &s);
    activations a = normed(b, &s, b->decoder->output_norm, is_packed(&b->decoder->output));
    struct ggml_tensor *logits = linear(b, &b->decoder->output, b->decoder->output_bias, &a);
    if (hp->logit_softcap > 0.0f) {
        logits = softcap(b, logits, hp->logit_softcap);
    }
    ggml_set_output(logits);
    plan->logits = logits;
    ggml_build_forward_expand(b->segment->cgraph, logits);
}

/* Every operator must be one that its device has. */
static dt_status check_operators(const dt_decoder *decoder, const dt_plan_segment *segment, dt_error *error) {
    ggml_backend_dev_t device = decoder->devices[segment->device];
    for (int i = 0; segment->device > 0 && i < ggml_graph_n_nodes(segment->cgraph); i++) {
        const struct ggml_tensor *node = ggml_graph_node(segment->cgraph, i);
        if (!ggml_backend_dev_supports_op(device, node)) {
            return dt_fail(error, DT_ERR_UNSUPPORTED,
                           "the device %s lacks an operator that this model needs (%s of %s); use --device cpu",
                           dt_device_name(device), ggml_op_desc(node), ggml_type_name(node->type));
        }
    }
    return DT_OK;
}

static dt_status allocate_segments(dt_plan *plan, const dt_decoder *decoder, dt_error *error) {
    for (int32_t i = 0; i < plan->n_segments; i++) {
        const dt_plan_segment *segment = &plan->segments[i];
        ggml_backend_dev_t device = decoder->devices[segment->device];
        const dt_status status = check_operators(decoder, segment, error);
        if (status != DT_OK) {
            return status;
        }
        if (plan->allocators[i] == NULL) { /* a plan's segments are always the same devices */
            plan->allocators[i] = ggml_gallocr_new(ggml_backend_dev_buffer_type(device));
        }
        if (plan->allocators[i] == NULL || !dt_ggml_allocate_graph(plan->allocators[i], segment->cgraph)) {
            return dt_fail(error, DT_ERR_MEMORY, "not enough memory to compute %d tokens at once; use a smaller batch size",
                           plan->n_tokens);
        }
    }
    return DT_OK;
}

/* Memory for so many nodes, and for what the plan remembers. */
static bool reserve(dt_plan *plan, const dt_plan_params *params, size_t max_nodes) {
    const dt_decoder *decoder = params->decoder;
    const size_t n_layers = (size_t)decoder->hp.n_layers;
    const size_t most_segments = decoder->n_devices > 1 ? (size_t)decoder->n_devices + 2 : 1;
    const size_t bytes = max_nodes * ggml_tensor_overhead() + most_segments * ggml_graph_overhead_custom(max_nodes, false);
    if (plan->arena_bytes < bytes) {
        free(plan->arena);
        plan->arena = malloc(bytes);
        plan->arena_bytes = plan->arena != NULL ? bytes : 0;
    }
    if (plan->layers == NULL) {
        plan->layers = calloc(n_layers, sizeof *plan->layers);
    }
    if (plan->products == NULL) {
        plan->products = calloc(n_layers * PRODUCTS_PER_LAYER + 1, sizeof *plan->products);
    }
    if (plan->shapes == NULL && params->n_elsewhere > 0) {
        plan->shapes = calloc(DT_MAX_ELSEWHERE * n_layers, sizeof *plan->shapes);
    }
    return plan->arena != NULL && plan->layers != NULL && plan->products != NULL &&
           (plan->shapes != NULL || params->n_elsewhere == 0);
}

dt_status dt_plan_build(dt_plan *plan, const dt_plan_params *params, dt_error *error) {
    const dt_decoder *decoder = params->decoder;
    const size_t n_layers = (size_t)decoder->hp.n_layers;
    const size_t layer_nodes = NODES_PER_LAYER + NODES_PER_EXPERT_USED * (size_t)decoder->hp.n_experts_used +
                               NODES_PER_SEQUENCE * (size_t)DT_MAX(params->n_elsewhere - 1, 0);
    const size_t max_nodes = n_layers * layer_nodes + NODES_PER_MODEL + 3 * (size_t)params->n_elsewhere;
    plan->n_tokens = 0;
    plan->n_segments = 0;
    plan->n_products = 0;
    ggml_free(plan->ctx);
    plan->ctx = NULL;
    if (!reserve(plan, params, max_nodes)) {
        return dt_fail_memory(error, max_nodes * ggml_tensor_overhead(), "the compute graph");
    }
    plan->ctx = ggml_init((struct ggml_init_params){.mem_size = plan->arena_bytes, .mem_buffer = plan->arena, .no_alloc = true});
    if (!plan->ctx) {
        return dt_fail_memory(error, plan->arena_bytes, "the compute graph");
    }
    plan->n_tokens = params->n_tokens;
    plan->n_outputs = params->n_outputs;
    plan->observe = params->observe;
    plan->n_elsewhere = params->n_elsewhere;
    for (int32_t i = 0; i < params->n_elsewhere; i++) {
        plan->tokens_of[i] = params->elsewhere[i].n_tokens;
        memcpy(plan->shapes + (size_t)i * n_layers, params->elsewhere[i].shape->layers, n_layers * sizeof *plan->shapes);
    }
    builder b = {.decoder = decoder, .hp = &decoder->hp, .ctx = plan->ctx, .plan = plan, .params = params, .max_nodes = max_nodes};
    build(&b);
    const dt_status status = allocate_segments(plan, decoder, error);
    if (status != DT_OK) {
        plan->n_tokens = 0;
    }
    return status;
}

bool dt_plan_fits(const dt_plan *plan, const dt_plan_params *params) {
    const size_t n_layers = (size_t)params->decoder->hp.n_layers;
    bool fits = plan->n_tokens == params->n_tokens && plan->n_outputs == params->n_outputs && plan->observe == params->observe &&
                plan->n_elsewhere == params->n_elsewhere;
    for (int32_t i = 0; fits && i < params->n_elsewhere; i++) {
        const dt_plan_sequence *sequence = &params->elsewhere[i];
        fits = plan->tokens_of[i] == sequence->n_tokens &&
               memcmp(plan->shapes + (size_t)i * n_layers, sequence->shape->layers, n_layers * sizeof *plan->shapes) == 0;
    }
    return fits;
}

void dt_plan_free(dt_plan *plan) {
    ggml_free(plan->ctx);
    for (int32_t i = 0; i < DT_MAX_SEGMENTS; i++) {
        if (plan->allocators[i]) {
            ggml_gallocr_free(plan->allocators[i]);
        }
    }
    free(plan->shapes);
    free(plan->layers);
    free(plan->products);
    free(plan->arena);
    memset(plan, 0, sizeof *plan);
}
