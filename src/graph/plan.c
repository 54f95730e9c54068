/*
 * The decoder graph: one function for every family, driven by the hyperparameters and by which weights are there.
 *
 * Attention enters as custom operators chained through their sources: store (keys and values into the cache), attend,
 * and, where wanted, observe (attention mass). ggml puts a barrier between nodes, which is what the phases of
 * attn/attn.h need.
 *
 * Invariant: the graph holds nothing that changes between batches of its size; see graph.h.
 */
#include "graph/plan.h"

#include "weights/ggml_calls.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define NODES_PER_LAYER 64
#define NODES_PER_EXPERT_USED 2 /* in each layer */
#define NODES_PER_MODEL 32
#define HALF_MAX 65504.0f
#define SMALLEST_SUM 6.103515625e-5f /* what the chosen experts' probabilities are divided by at least: the smallest normal half */

typedef struct builder {
    const dt_decoder *decoder;
    const dt_hparams *hp;
    struct ggml_context *ctx;
    dt_plan *plan;
    dt_layer_op *ops;
    struct ggml_tensor *inputs, *packed_inputs; /* the activations packed last, and their packed form */
} builder;

/* ---- custom operators ---- */

/* The counters that prepare resets are first used by attend, which starts after the barrier. Threads take turns at being a job's first
 * one: what is small is not dealt out evenly. */
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

static void op_pack_inputs(struct ggml_tensor *dst, int ith, int nth, void *user) {
    const struct ggml_tensor *x = dst->src[0];
    (void)user;
    dt_gemm_kernel_auto()->pack_inputs(x->data, x->nb[1] / sizeof(float), (int32_t)x->ne[0], (int32_t)x->ne[1], dst->data, ith,
                                       nth);
}

static void op_multiply(struct ggml_tensor *dst, int ith, int nth, void *user) {
    dt_gemm_kernel_auto()->multiply(user, dst->src[0]->data, (int32_t)dst->ne[1], dst->data, dst->nb[1] / sizeof(float), ith, nth);
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

/* Several matrices are multiplied with the same x, one after the other: it is packed once. */
static struct ggml_tensor *pack_inputs(builder *b, struct ggml_tensor *x) {
    if (b->inputs != x) {
        const size_t bytes = dt_gemm_input_bytes((int32_t)x->ne[0], (int32_t)x->ne[1]);
        b->inputs = x;
        b->packed_inputs =
            ggml_custom_4d(b->ctx, GGML_TYPE_I8, (int64_t)bytes, 1, 1, 1, &x, 1, op_pack_inputs, GGML_N_TASKS_MAX, NULL);
    }
    return b->packed_inputs;
}

static struct ggml_tensor *add_bias(builder *b, struct ggml_tensor *x, struct ggml_tensor *bias) {
    return bias ? ggml_add(b->ctx, x, bias) : x;
}

/* x [n_in, N] -> [n_out, N] */
static struct ggml_tensor *linear(builder *b, const dt_matrix *w, struct ggml_tensor *bias, struct ggml_tensor *x) {
    struct ggml_tensor *y;
    if (w->packed.n_out > 0) {
        struct ggml_tensor *packed = pack_inputs(b, x);
        y = ggml_custom_4d(b->ctx, GGML_TYPE_F32, w->packed.n_out, x->ne[1], 1, 1, &packed, 1, op_multiply, GGML_N_TASKS_MAX,
                           (void *)&w->packed);
    } else {
        y = ggml_mul_mat(b->ctx, w->tensor, x);
    }
    return add_bias(b, y, bias);
}

/* x [D, heads, N] */
static struct ggml_tensor *rope(builder *b, struct ggml_tensor *x, int32_t layer) {
    const dt_hparams *hp = b->hp;
    if (hp->rope_base[layer] == 0.0f) {
        return x;
    }
    const int mode = hp->arch->rope_style == DT_ROPE_NEOX ? GGML_ROPE_TYPE_NEOX : 0;
    return ggml_rope_ext(b->ctx, x, b->plan->positions, b->decoder->rope_factors, hp->rope_dim, mode, hp->rope_ctx_orig,
                         hp->rope_base[layer], hp->rope_freq_scale[layer], hp->rope_ext_factor, hp->rope_attn_factor,
                         hp->rope_beta_fast, hp->rope_beta_slow);
}

/* Rows [first, first + n) of x as [n, N]. */
static struct ggml_tensor *part(builder *b, struct ggml_tensor *x, int64_t first, int64_t n) {
    return ggml_view_2d(b->ctx, x, n, x->ne[1], x->nb[1], (size_t)first * sizeof(float));
}

/* x [E, N] -> *q [H*D, N], *k [G*D, N], *v [G*Dv, N]; strided where they come from one matrix. */
static void project(builder *b, struct ggml_tensor *x, int32_t layer, struct ggml_tensor **q, struct ggml_tensor **k,
                    struct ggml_tensor **v) {
    const dt_layer_weights *w = &b->decoder->layers[layer];
    const int64_t n_q = (int64_t)b->hp->n_heads * b->hp->head_dim_k, n_k = (int64_t)b->hp->n_kv_heads[layer] * b->hp->head_dim_k;
    if (w->wqkv.tensor) {
        struct ggml_tensor *qkv = linear(b, &w->wqkv, w->bqkv, x);
        *q = add_bias(b, part(b, qkv, 0, n_q), w->bq);
        *k = add_bias(b, part(b, qkv, n_q, n_k), w->bk);
        *v = add_bias(b, part(b, qkv, n_q + n_k, qkv->ne[0] - n_q - n_k), w->bv);
    } else {
        *q = linear(b, &w->wq, w->bq, x);
        *k = linear(b, &w->wk, w->bk, x);
        *v = linear(b, &w->wv, w->bv, x);
    }
}

/* x [D*heads, N] -> [D, heads, N], each head normed where the model does that, and rotated. */
static struct ggml_tensor *heads(builder *b, struct ggml_tensor *x, struct ggml_tensor *head_norm, int64_t n_heads, int32_t layer) {
    const int64_t dim = b->hp->head_dim_k;
    x = ggml_view_3d(b->ctx, x, dim, n_heads, x->ne[1], (size_t)dim * sizeof(float), x->nb[1], 0);
    return rope(b, head_norm ? norm(b, x, head_norm) : x, layer);
}

/* x [E, N] -> [Dv*H, N] */
static struct ggml_tensor *attention(builder *b, struct ggml_tensor *x, int32_t layer) {
    const dt_hparams *hp = b->hp;
    const dt_layer_weights *w = &b->decoder->layers[layer];
    dt_plan_layer *io = &b->plan->layers[layer];
    const int64_t n = x->ne[1];

    struct ggml_tensor *q, *k;
    project(b, x, layer, &q, &k, &io->v);
    io->q = heads(b, q, w->q_norm, hp->n_heads, layer);
    io->k = heads(b, k, w->k_norm, hp->n_kv_heads[layer], layer);

    struct ggml_tensor *store_args[] = {io->k, io->v};
    struct ggml_tensor *stored =
        ggml_custom_4d(b->ctx, GGML_TYPE_F32, 1, 1, 1, 1, store_args, 2, op_store, GGML_N_TASKS_MAX, &b->ops[layer]);
    struct ggml_tensor *attend_args[] = {io->q, stored};
    io->out = ggml_custom_4d(b->ctx, GGML_TYPE_F32, (int64_t)hp->n_heads * hp->head_dim_v, n, 1, 1, attend_args, 2, op_attend,
                             GGML_N_TASKS_MAX, &b->ops[layer]);
    if (b->plan->observe) {
        /* reads q: as a source it keeps q's memory from being reused before */
        struct ggml_tensor *observe_args[] = {io->q, io->out};
        ggml_build_forward_expand(b->plan->cgraph, ggml_custom_4d(b->ctx, GGML_TYPE_F32, 1, 1, 1, 1, observe_args, 2, op_observe,
                                                                  GGML_N_TASKS_MAX, &b->ops[layer]));
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
    const dt_layer_weights *w = &b->decoder->layers[layer];
    const int64_t n = x->ne[1], n_experts = b->hp->n_experts, n_used = b->hp->n_experts_used;
    struct ggml_tensor *probabilities = ggml_soft_max(b->ctx, linear(b, &w->router, NULL, x));
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

/* Gated feed-forward: down(act(gate x) * up x). */
static struct ggml_tensor *feed_forward(builder *b, struct ggml_tensor *x, int32_t layer) {
    const dt_layer_weights *w = &b->decoder->layers[layer];
    if (w->router.tensor) {
        return mixture(b, x, layer);
    }
    struct ggml_tensor *up = linear(b, &w->ffn_up, w->ffn_up_bias, x), *gated;
    if (w->ffn_gate.tensor) {
        gated = gate(b, linear(b, &w->ffn_gate, w->ffn_gate_bias, x), up);
    } else {
        const int64_t width = up->ne[0] / 2;
        gated = gate(b, part(b, up, 0, width), part(b, up, width, width));
    }
    return linear(b, &w->ffn_down, w->ffn_down_bias, limit(b, w->ffn_down.tensor, gated));
}

static struct ggml_tensor *softcap(builder *b, struct ggml_tensor *x, float cap) {
    return ggml_scale(b->ctx, ggml_tanh(b->ctx, ggml_scale(b->ctx, x, 1.0f / cap)), cap);
}

static struct ggml_tensor *input(builder *b, int64_t n, const char *name) {
    struct ggml_tensor *t = ggml_new_tensor_1d(b->ctx, GGML_TYPE_I32, n);
    ggml_set_input(t);
    ggml_set_name(t, name);
    return t;
}

static void build(builder *b) {
    const dt_hparams *hp = b->hp;
    dt_plan *plan = b->plan;
    plan->tokens = input(b, plan->n_tokens, "tokens");
    plan->positions = input(b, plan->n_tokens, "positions");
    plan->output_rows = input(b, plan->n_outputs, "output_rows");

    struct ggml_tensor *x = ggml_get_rows(b->ctx, b->decoder->token_embedding, plan->tokens);
    if (hp->embedding_scale != 1.0f) {
        x = ggml_scale(b->ctx, x, hp->embedding_scale);
    }
    for (int32_t i = 0; i < hp->n_layers; i++) {
        const dt_layer_weights *w = &b->decoder->layers[i];
        struct ggml_tensor *y = attention(b, norm(b, x, w->attn_norm), i);
        if (i == hp->n_layers - 1 && plan->n_outputs < plan->n_tokens) {
            /* after the last attention only the wanted rows matter */
            y = ggml_get_rows(b->ctx, y, plan->output_rows);
            x = ggml_get_rows(b->ctx, x, plan->output_rows);
        }
        y = linear(b, &w->wo, w->bo, y);
        x = ggml_add(b->ctx, w->attn_post_norm ? norm(b, y, w->attn_post_norm) : y, x);
        y = feed_forward(b, norm(b, x, w->ffn_norm), i);
        x = ggml_add(b->ctx, w->ffn_post_norm ? norm(b, y, w->ffn_post_norm) : y, x);
    }
    struct ggml_tensor *logits = linear(b, &b->decoder->output, b->decoder->output_bias, norm(b, x, b->decoder->output_norm));
    if (hp->logit_softcap > 0.0f) {
        logits = softcap(b, logits, hp->logit_softcap);
    }
    ggml_set_output(logits);
    plan->logits = logits;
    /* with every row wanted, nothing reads output_rows: expand it too, so that it has memory */
    ggml_build_forward_expand(plan->cgraph, plan->output_rows);
    ggml_build_forward_expand(plan->cgraph, logits);
}

dt_status dt_plan_build(dt_plan *plan, const dt_decoder *decoder, dt_layer_op *ops, int32_t n_tokens, int32_t n_outputs,
                        bool observe, dt_error *error) {
    const size_t n_layers = (size_t)decoder->hp.n_layers;
    const size_t layer_nodes = NODES_PER_LAYER + NODES_PER_EXPERT_USED * (size_t)decoder->hp.n_experts_used;
    const size_t max_nodes = n_layers * layer_nodes + NODES_PER_MODEL;
    plan->n_tokens = 0;
    ggml_free(plan->ctx);
    plan->ctx = NULL;
    if (!plan->arena) {
        plan->arena_bytes = max_nodes * ggml_tensor_overhead() + ggml_graph_overhead_custom(max_nodes, false);
        plan->arena = malloc(plan->arena_bytes);
        plan->layers = calloc(n_layers, sizeof *plan->layers);
        plan->allocator = ggml_gallocr_new(ggml_backend_dev_buffer_type(decoder->device));
        if (!plan->arena || !plan->layers || !plan->allocator) {
            return dt_fail_memory(error, plan->arena_bytes, "the compute graph");
        }
    }
    plan->ctx = ggml_init((struct ggml_init_params){.mem_size = plan->arena_bytes, .mem_buffer = plan->arena, .no_alloc = true});
    if (!plan->ctx) {
        return dt_fail_memory(error, plan->arena_bytes, "the compute graph");
    }
    plan->cgraph = ggml_new_graph_custom(plan->ctx, max_nodes, false);
    plan->n_tokens = n_tokens;
    plan->n_outputs = n_outputs;
    plan->observe = observe;
    builder b = {.decoder = decoder, .hp = &decoder->hp, .ctx = plan->ctx, .plan = plan, .ops = ops};
    build(&b);
    if (!dt_ggml_allocate_graph(plan->allocator, plan->cgraph)) {
        plan->n_tokens = 0;
        return dt_fail(error, DT_ERR_MEMORY, "not enough memory to compute %d tokens at once; use a smaller batch size", n_tokens);
    }
    return DT_OK;
}

void dt_plan_free(dt_plan *plan) {
    ggml_free(plan->ctx);
    if (plan->allocator) {
        ggml_gallocr_free(plan->allocator);
    }
    free(plan->layers);
    free(plan->arena);
    memset(plan, 0, sizeof *plan);
}
