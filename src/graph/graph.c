/*
 * Runs plans: the CPU backend and its threads, the attention jobs, and the scratch they share.
 * Invariant: see graph.h. Scratch and mass buffers only grow, in steps, so decoding allocates nothing.
 */
#include "graph/graph.h"

#include "ggml-cpu.h"
#include "graph/plan.h"
#include "weights/ggml_calls.h"

#include <stdlib.h>
#include <string.h>

#define N_DRAFT_PLANS 6
#define DRAFT_PLAN_TOKENS 32 /* most tokens of a batch for which a plan is kept beside others */

typedef struct growing_buffer {
    void *data;
    size_t bytes;
} growing_buffer;

struct dt_graph {
    const dt_decoder *decoder;
    dt_memory *memory;
    dt_graph_params params;
    ggml_backend_t backend;
    struct ggml_threadpool *threadpool;
    ggml_backend_set_n_threads_t set_n_threads;
    void (*free_threadpool)(struct ggml_threadpool *);
    dt_plan decode, chunk;         /* one token; any other number */
    dt_plan drafts[N_DRAFT_PLANS]; /* a few tokens, with logits after each; the one not used for longest is rebuilt */
    int64_t draft_plan_used[N_DRAFT_PLANS], n_draft_batches;
    dt_layer_op *ops;     /* [L] */
    dt_attn_lane **lanes; /* [L][G], into lane_storage */
    dt_attn_lane *lane_storage;
    size_t n_lanes;           /* over all layers */
    growing_buffer scratch;   /* attention's; layers run one after the other */
    growing_buffer mass;      /* [lanes of observed layers][stride] */
    growing_buffer spans;     /* of lanes that see only a focus */
    int32_t *focus_column;    /* [n_lanes] in mass: the focus's first entry */
    growing_buffer mass_rows; /* int32 [N]: 0 for observed queries, -1 else */
    growing_buffer index;     /* int32 [N]: positions of the batch */
};

/* Contents are lost. Grows by half again, so that a slowly growing need allocates rarely. */
static dt_status reserve(dt_graph *g, growing_buffer *b, size_t bytes, const char *what, dt_error *error) {
    if (bytes <= b->bytes) {
        return DT_OK;
    }
    const size_t wanted = bytes + bytes / 2;
    void *data = dt_memory_alloc(g->memory, wanted);
    if (!data) {
        return dt_fail_memory(error, wanted, what);
    }
    dt_memory_free(g->memory, b->data, b->bytes);
    b->data = data;
    b->bytes = wanted;
    return DT_OK;
}

static void release(dt_graph *g, growing_buffer *b) {
    dt_memory_free(g->memory, b->data, b->bytes);
    b->data = NULL;
    b->bytes = 0;
}

/* ---- backend ---- */

static bool abort_callback(void *user) {
    dt_graph *g = user;
    return g->params.should_abort && g->params.should_abort(g->params.user);
}

/* Everything CPU-specific goes through the registry, so that the backend may be a library loaded at run time. */
static dt_status open_backend(dt_graph *g, dt_error *error) {
    ggml_backend_dev_t device = g->decoder->device;
    ggml_backend_reg_t registry = ggml_backend_dev_backend_reg(device);
    typedef struct ggml_threadpool *(*threadpool_new_fn)(struct ggml_threadpool_params *);
    typedef void (*set_threadpool_fn)(ggml_backend_t, struct ggml_threadpool *);
    const threadpool_new_fn threadpool_new = (threadpool_new_fn)ggml_backend_reg_get_proc_address(registry, "ggml_threadpool_new");
    const set_threadpool_fn set_threadpool =
        (set_threadpool_fn)ggml_backend_reg_get_proc_address(registry, "ggml_backend_cpu_set_threadpool");
    const ggml_backend_set_abort_callback_t set_abort =
        (ggml_backend_set_abort_callback_t)ggml_backend_reg_get_proc_address(registry, "ggml_backend_set_abort_callback");
    g->free_threadpool = (void (*)(struct ggml_threadpool *))ggml_backend_reg_get_proc_address(registry, "ggml_threadpool_free");
    g->set_n_threads = (ggml_backend_set_n_threads_t)ggml_backend_reg_get_proc_address(registry, "ggml_backend_set_n_threads");
    if (!threadpool_new || !set_threadpool || !set_abort || !g->free_threadpool || !g->set_n_threads) {
        return dt_fail(error, DT_ERR_UNSUPPORTED,
                       "ggml's CPU backend lacks a function DeepTutor needs; build against the version in deps/README.md");
    }
    g->backend = dt_ggml_new_backend(device);
    if (!g->backend) {
        return dt_fail(error, DT_ERR_COMPUTE, "ggml's CPU backend does not start");
    }
    struct ggml_threadpool_params params = ggml_threadpool_params_default(DT_MAX(g->params.n_threads, g->params.n_threads_batch));
    g->threadpool = threadpool_new(&params);
    if (!g->threadpool) {
        return dt_fail(error, DT_ERR_COMPUTE, "the threads for computing can't be started; use fewer with -t");
    }
    set_threadpool(g->backend, g->threadpool);
    set_abort(g->backend, abort_callback, g);
    return DT_OK;
}

static dt_status allocate_ops(dt_graph *g, dt_error *error) {
    const dt_hparams *hp = &g->decoder->hp;
    const size_t n_layers = (size_t)DT_MAX(hp->n_layers, 0);
    for (size_t i = 0; i < n_layers; i++) {
        g->n_lanes += (size_t)hp->n_kv_heads[i];
    }
    g->ops = calloc(n_layers, sizeof *g->ops);
    g->lanes = calloc(n_layers, sizeof *g->lanes);
    g->lane_storage = calloc(g->n_lanes, sizeof *g->lane_storage);
    g->focus_column = calloc(g->n_lanes, sizeof *g->focus_column);
    if (!g->ops || !g->lanes || !g->lane_storage || !g->focus_column) {
        return dt_fail_memory(error, g->n_lanes * sizeof *g->lane_storage, "the attention jobs");
    }
    dt_attn_lane *next = g->lane_storage;
    for (size_t i = 0; i < n_layers; i++) {
        g->lanes[i] = next;
        next += hp->n_kv_heads[i];
    }
    return DT_OK;
}

dt_status dt_graph_new(const dt_decoder *decoder, dt_memory *memory, const dt_graph_params *params, dt_graph **out,
                       dt_error *error) {
    dt_graph *g = calloc(1, sizeof *g);
    if (!g) {
        return dt_fail_memory(error, sizeof *g, "the compute graph");
    }
    g->decoder = decoder;
    g->memory = memory;
    g->params = *params;
    dt_status status = open_backend(g, error);
    if (status == DT_OK) {
        status = allocate_ops(g, error);
    }
    if (status != DT_OK) {
        dt_graph_free(g);
        return status;
    }
    *out = g;
    return DT_OK;
}

void dt_graph_free(dt_graph *graph) {
    if (!graph) {
        return;
    }
    dt_plan_free(&graph->decode);
    dt_plan_free(&graph->chunk);
    for (int32_t i = 0; i < N_DRAFT_PLANS; i++) {
        dt_plan_free(&graph->drafts[i]);
    }
    if (graph->backend) {
        ggml_backend_free(graph->backend);
    }
    if (graph->threadpool) {
        graph->free_threadpool(graph->threadpool);
    }
    release(graph, &graph->scratch);
    release(graph, &graph->mass);
    release(graph, &graph->spans);
    free(graph->focus_column);
    release(graph, &graph->mass_rows);
    release(graph, &graph->index);
    free(graph->lane_storage);
    free(graph->lanes);
    free(graph->ops);
    free(graph);
}

/* ---- one batch ---- */

static size_t mass_stride(int32_t max_entries) { return DT_ROUND_UP((size_t)max_entries, 64); }

/* The spans that a focused batch sees of a lane, into out; *column: where among their entries the focus begins. */
static int32_t focus_spans(const dt_kv_lane_view *view, const dt_batch *batch, int32_t block_tokens, dt_kv_span *out,
                           int32_t *n_entries, int32_t *column) {
    const int32_t n_committed = view->n_entries - view->n_uncommitted;
    const int32_t first = DT_MAX(n_committed - batch->focus_from, 0) / block_tokens;
    const int32_t end = DT_MAX(n_committed - batch->focus_to, 0);
    int32_t n = 0;
    *n_entries = 0;
    for (int32_t i = 0; i < view->n_spans; i++) {
        const int32_t begin_entry = i * block_tokens, end_entry = begin_entry + block_tokens;
        const bool in_focus = i >= first && begin_entry < end;
        const bool in_batch = end_entry > n_committed;
        if (i == first) {
            *column = *n_entries + DT_MAX(n_committed - batch->focus_from, 0) - first * block_tokens;
        }
        if (i == 0 || in_focus || in_batch) {
            out[n++] = view->spans[i];
            *n_entries += view->spans[i].n;
        }
    }
    return n;
}

static int32_t n_mass_rows(const dt_batch *batch) { return batch->observe_apart ? batch->n_observed : 1; }

/* Points every lane at the cache's content and, in observed layers, at its row of the mass buffer. */
static dt_status connect_lanes(dt_graph *g, const dt_kv *kv, const dt_batch *batch, int32_t max_entries, dt_error *error) {
    const dt_hparams *hp = &g->decoder->hp;
    size_t n_observed = 0;
    for (int32_t i = 0; batch->observe_layer && i < hp->n_layers; i++) {
        n_observed += batch->observe_layer[i] ? (size_t)hp->n_kv_heads[i] : 0;
    }
    const size_t lane_floats = mass_stride(max_entries) * (size_t)n_mass_rows(batch);
    if (n_observed > 0) {
        const dt_status status = reserve(g, &g->mass, n_observed * lane_floats * sizeof(float), "attention mass", error);
        if (status != DT_OK) {
            return status;
        }
    }
    float *mass = g->mass.data;
    const bool focused = batch->focus_from > 0;
    if (focused) {
        size_t n_spans = 0;
        for (int32_t i = 0; i < hp->n_layers; i++) {
            n_spans += (size_t)dt_kv_blocks_of(kv, i) * (size_t)hp->n_kv_heads[i];
        }
        const dt_status status = reserve(g, &g->spans, n_spans * sizeof(dt_kv_span), "attention spans", error);
        if (status != DT_OK) {
            return status;
        }
    }
    dt_kv_span *spans = g->spans.data;
    for (int32_t i = 0; i < hp->n_layers; i++) {
        const bool observe = batch->observe_layer && batch->observe_layer[i];
        for (int32_t lane = 0; lane < hp->n_kv_heads[i]; lane++) {
            dt_kv_lane_view view;
            dt_kv_lane(kv, i, lane, &view);
            g->lanes[i][lane] = (dt_attn_lane){.spans = view.spans,
                                               .n_spans = view.n_spans,
                                               .n_entries = view.n_entries,
                                               .mass = observe ? mass : NULL,
                                               .value_norm = view.value_norm};
            mass = observe ? mass + lane_floats : mass;
            if (focused) {
                dt_attn_lane *to = &g->lanes[i][lane];
                to->spans = spans;
                to->n_spans = focus_spans(&view, batch, dt_kv_layer(kv, i)->format.block_tokens, spans, &to->n_entries,
                                          &g->focus_column[to - g->lane_storage]);
                to->value_norm = NULL; /* indexed by all of the lane's entries; those of the batch will not stay */
                spans += to->n_spans;
            } else {
                g->focus_column[&g->lanes[i][lane] - g->lane_storage] = 0;
            }
        }
    }
    return DT_OK;
}

static void fill_job(dt_graph *g, const dt_kv *kv, const dt_plan *plan, const dt_batch *batch, int32_t layer, size_t stride) {
    const dt_hparams *hp = &g->decoder->hp;
    const dt_plan_layer *io = &plan->layers[layer];
    const size_t f = sizeof(float);
    const bool observe = batch->observe_layer && batch->observe_layer[layer];
    g->ops[layer].job = (dt_attn_job){
        .kernel = g->params.kernel,
        .format = &dt_kv_layer(kv, layer)->format,
        .n_lanes = hp->n_kv_heads[layer],
        .n_rep = hp->n_heads / hp->n_kv_heads[layer],
        .n_query = batch->n,
        .scale = hp->attention_scale,
        .softcap = hp->attention_softcap,
        .window = hp->window[layer],
        .positions = g->index.data,
        .lanes = g->lanes[layer],
        .q = io->q->data,
        .k = io->k->data,
        .v = io->v->data,
        .out = io->out->data,
        .q_token_stride = io->q->nb[2] / f,
        .q_head_stride = io->q->nb[1] / f,
        .k_token_stride = io->k->nb[2] / f,
        .k_head_stride = io->k->nb[1] / f,
        .v_token_stride = io->v->nb[1] / f,
        .v_head_stride = (size_t)hp->head_dim_v,
        .out_token_stride = io->out->nb[1] / f,
        .out_head_stride = (size_t)hp->head_dim_v,
        .mass_row = observe ? g->mass_rows.data : NULL,
        .n_mass_rows = observe ? n_mass_rows(batch) : 0,
        .mass_stride = stride,
        .mass_peak = batch->peak,
        .scratch = g->scratch.data,
        .scratch_bytes = g->scratch.bytes,
        .n_threads = DT_MAX(g->params.n_threads, g->params.n_threads_batch),
    };
}

static dt_status prepare_jobs(dt_graph *g, const dt_kv *kv, const dt_plan *plan, const dt_batch *batch, dt_error *error) {
    const dt_hparams *hp = &g->decoder->hp;
    const int32_t n_threads = DT_MAX(g->params.n_threads, g->params.n_threads_batch);
    int32_t max_entries = 0;
    size_t scratch_bytes = 1;
    for (int32_t i = 0; i < hp->n_layers; i++) {
        const int32_t length = dt_kv_length(kv, i);
        max_entries = DT_MAX(max_entries, length);
        scratch_bytes =
            DT_MAX(scratch_bytes, g->params.kernel->scratch_bytes(&dt_kv_layer(kv, i)->format, hp->n_kv_heads[i],
                                                                  hp->n_heads / hp->n_kv_heads[i], batch->n, length, n_threads));
    }
    dt_status status = reserve(g, &g->scratch, scratch_bytes, "attention scratch", error);
    if (status == DT_OK) {
        status = reserve(g, &g->mass_rows, (size_t)batch->n * sizeof(int32_t), "attention mass", error);
    }
    if (status == DT_OK) {
        status = reserve(g, &g->index, (size_t)batch->n * sizeof(int32_t), "positions", error);
    }
    if (status == DT_OK) {
        status = connect_lanes(g, kv, batch, max_entries, error);
    }
    if (status != DT_OK) {
        return status;
    }
    int32_t *mass_rows = g->mass_rows.data, *positions = g->index.data;
    for (int32_t i = 0; i < batch->n; i++) {
        const int32_t observed = i - (batch->n - batch->n_observed);
        mass_rows[i] = observed < 0 ? -1 : batch->observe_apart ? observed : 0;
        positions[i] = batch->first_position + i;
    }
    for (int32_t i = 0; i < hp->n_layers; i++) {
        fill_job(g, kv, plan, batch, i, mass_stride(max_entries));
    }
    return DT_OK;
}

static void set_inputs(const dt_graph *g, const dt_plan *plan, const dt_batch *batch) {
    const size_t bytes = (size_t)batch->n * sizeof(int32_t);
    ggml_backend_tensor_set(plan->tokens, batch->tokens, 0, bytes);
    ggml_backend_tensor_set(plan->positions, g->index.data, 0, bytes);
    for (int32_t i = 0; i < batch->n_outputs; i++) {
        const int32_t row = batch->n - batch->n_outputs + i;
        ggml_backend_tensor_set(plan->output_rows, &row, (size_t)i * sizeof row, sizeof row);
    }
}

static dt_status check_tokens(const dt_graph *g, const dt_batch *batch, dt_error *error) {
    for (int32_t i = 0; i < batch->n; i++) {
        if (batch->tokens[i] < 0 || batch->tokens[i] >= g->decoder->hp.n_vocab) {
            return dt_fail(error, DT_ERR_ARGUMENT, "token %d is not in the model's vocabulary of %d", batch->tokens[i],
                           g->decoder->hp.n_vocab);
        }
    }
    return DT_OK;
}

static bool plan_fits(const dt_plan *plan, const dt_batch *batch) {
    return plan->n_tokens == batch->n && plan->n_outputs == batch->n_outputs && plan->observe == (batch->observe_layer != NULL);
}

/* The plan for a batch, perhaps not built for it yet. Drafts change in length from step to step: for them several are kept. */
static dt_plan *choose_plan(dt_graph *g, const dt_batch *batch) {
    if (batch->n == 1) {
        return &g->decode;
    }
    if (batch->n_outputs != batch->n || batch->n > DRAFT_PLAN_TOKENS) {
        return &g->chunk;
    }
    int32_t best = 0;
    for (int32_t i = 0; i < N_DRAFT_PLANS; i++) {
        if (plan_fits(&g->drafts[i], batch)) {
            best = i;
            break;
        }
        best = g->draft_plan_used[i] < g->draft_plan_used[best] ? i : best;
    }
    g->draft_plan_used[best] = ++g->n_draft_batches;
    return &g->drafts[best];
}

dt_status dt_graph_compute(dt_graph *graph, dt_kv *kv, const dt_batch *batch, const float **logits, dt_error *error) {
    dt_status status = check_tokens(graph, batch, error);
    if (status != DT_OK) {
        return status;
    }
    dt_plan *plan = choose_plan(graph, batch);
    if (!plan_fits(plan, batch)) {
        status = dt_plan_build(plan, graph->decoder, graph->ops, batch->n, batch->n_outputs, batch->observe_layer != NULL, error);
    }
    if (status == DT_OK) {
        status = dt_kv_append(kv, batch->first_position, batch->n, error);
    }
    if (status == DT_OK) {
        status = prepare_jobs(graph, kv, plan, batch, error);
    }
    if (status != DT_OK) {
        return status;
    }
    set_inputs(graph, plan, batch);
    graph->set_n_threads(graph->backend, batch->n == 1 ? graph->params.n_threads : graph->params.n_threads_batch);
    const enum ggml_status computed = dt_ggml_compute(graph->backend, plan->cgraph);
    if (computed == GGML_STATUS_ABORTED) {
        return dt_fail(error, DT_ERR_CANCELLED, "cancelled");
    }
    if (computed != GGML_STATUS_SUCCESS) {
        return dt_fail(error, computed == GGML_STATUS_ALLOC_FAILED ? DT_ERR_MEMORY : DT_ERR_COMPUTE,
                       "ggml could not compute the batch (%s)", ggml_status_to_string(computed));
    }
    *logits = plan->logits->data;
    return DT_OK;
}

const float *dt_graph_mass(const dt_graph *graph, int32_t layer, int32_t lane, int32_t row) {
    const dt_attn_lane *l = &graph->lanes[layer][lane];
    const size_t column = (size_t)graph->focus_column[l - graph->lane_storage];
    return l->mass ? l->mass + (size_t)row * graph->ops[layer].job.mass_stride + column : NULL;
}

int64_t dt_graph_attention_us(const dt_graph *graph) {
    int64_t sum = 0;
    for (int32_t i = 0; i < graph->decoder->hp.n_layers; i++) {
        sum += graph->ops[i].attention_us;
    }
    return sum;
}
