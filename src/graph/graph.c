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
    ggml_backend_t backends[DT_MAX_DEVICES]; /* by device; [0] is the CPU */
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
    growing_buffer logits;    /* float [n_outputs][V], where a device has computed them */
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
    ggml_backend_dev_t device = g->decoder->devices[0];
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
    g->backends[0] = dt_ggml_new_backend(device);
    if (!g->backends[0]) {
        return dt_fail(error, DT_ERR_COMPUTE, "ggml's CPU backend does not start");
    }
    struct ggml_threadpool_params params = ggml_threadpool_params_default(DT_MAX(g->params.n_threads, g->params.n_threads_batch));
    g->threadpool = threadpool_new(&params);
    if (!g->threadpool) {
        return dt_fail(error, DT_ERR_COMPUTE, "the threads for computing can't be started; use fewer with -t");
    }
    set_threadpool(g->backends[0], g->threadpool);
    set_abort(g->backends[0], abort_callback, g);
    return DT_OK;
}

static dt_status open_devices(dt_graph *g, dt_error *error) {
    for (int32_t i = 1; i < g->decoder->n_devices; i++) {
        ggml_backend_dev_t device = g->decoder->devices[i];
        g->backends[i] = device == g->decoder->devices[0] ? g->backends[0] : dt_ggml_new_backend(device);
        if (!g->backends[i]) {
            return dt_fail(error, DT_ERR_COMPUTE, "the device %s does not start", dt_device_name(device));
        }
    }
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
        status = open_devices(g, error);
    }
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
    for (int32_t i = DT_MAX_DEVICES - 1; i >= 0; i--) {
        if (graph->backends[i] && (i == 0 || graph->backends[i] != graph->backends[0])) {
            ggml_backend_free(graph->backends[i]);
        }
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
    release(graph, &graph->logits);
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

static bool is_elsewhere(const dt_kv *kv, int32_t layer) { return dt_kv_layer(kv, layer)->format.elsewhere; }

/* Whether attention mass is collected on the way. */
static bool observes(const dt_kv *kv, const dt_batch *batch, int32_t layer) {
    return batch->observe_layer && batch->observe_layer[layer] && !is_elsewhere(kv, layer);
}

static int32_t n_mass_rows(const dt_batch *batch) { return batch->observe_apart ? batch->n_observed : 1; }

/* Points every lane at the cache's content and, in observed layers, at its row of the mass buffer. */
static dt_status connect_lanes(dt_graph *g, const dt_kv *kv, const dt_batch *batch, int32_t max_entries, dt_error *error) {
    const dt_hparams *hp = &g->decoder->hp;
    size_t n_observed = 0;
    for (int32_t i = 0; batch->observe_layer && i < hp->n_layers; i++) {
        n_observed += observes(kv, batch, i) ? (size_t)hp->n_kv_heads[i] : 0;
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
        const bool observe = observes(kv, batch, i);
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
    const bool observe = observes(kv, batch, layer);
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
        if (is_elsewhere(kv, i)) {
            continue;
        }
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
        if (!is_elsewhere(kv, i)) {
            fill_job(g, kv, plan, batch, i, mass_stride(max_entries));
        }
    }
    return DT_OK;
}

static dt_device_sight sight_of(const dt_batch *batch) {
    return (dt_device_sight){
        .n_query = batch->n, .first_position = batch->first_position, .focus_from = batch->focus_from, .focus_to = batch->focus_to};
}

static dt_status set_inputs(const dt_graph *g, const dt_kv *kv, const dt_plan *plan, const dt_batch *batch, dt_error *error) {
    const size_t bytes = (size_t)batch->n * sizeof(int32_t);
    const int32_t first_output = batch->n - batch->n_outputs;
    bool done = dt_ggml_set(plan->tokens, batch->tokens, 0, bytes);
    int32_t rows[64];
    for (int32_t i = 0; done && i < batch->n_outputs; i += 64) {
        const int32_t n = DT_MIN(batch->n_outputs - i, 64);
        for (int32_t j = 0; j < n; j++) {
            rows[j] = first_output + i + j;
        }
        done = dt_ggml_set(plan->output_rows, rows, (size_t)i * sizeof rows[0], (size_t)n * sizeof rows[0]);
    }
    dt_device_cache *cache = dt_device_cache_of(kv);
    const dt_device_sight sight = sight_of(batch);
    for (int32_t i = 0; done && i < plan->n_segments; i++) {
        const dt_plan_segment *s = &plan->segments[i];
        done = s->positions == NULL || dt_ggml_set(s->positions, g->index.data, 0, bytes);
        if (done && s->masks != NULL) {
            const dt_status status = dt_device_cache_fill_inputs(cache, kv, &sight, s->device, s->masks, s->rows, s->ring, error);
            if (status != DT_OK) {
                return status;
            }
        }
    }
    return done ? DT_OK : dt_fail(error, DT_ERR_COMPUTE, "a device does not take its input");
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

/* The plan for a batch, perhaps not built for it yet. Drafts change in length from step to step: for them several are kept. */
static dt_plan *choose_plan(dt_graph *g, const dt_batch *batch, const dt_plan_params *params) {
    if (batch->n == 1) {
        return &g->decode;
    }
    if (batch->n_outputs != batch->n || batch->n > DRAFT_PLAN_TOKENS) {
        return &g->chunk;
    }
    int32_t best = 0;
    for (int32_t i = 0; i < N_DRAFT_PLANS; i++) {
        if (dt_plan_fits(&g->drafts[i], params)) {
            best = i;
            break;
        }
        best = g->draft_plan_used[i] < g->draft_plan_used[best] ? i : best;
    }
    g->draft_plan_used[best] = ++g->n_draft_batches;
    return &g->drafts[best];
}

/* Room for the batch in the cache, and the plan for it, built. */
static dt_status prepare(dt_graph *g, dt_kv *kv, const dt_batch *batch, dt_plan **out, dt_error *error) {
    dt_device_cache *cache = dt_device_cache_of(kv);
    dt_plan_params params = {.decoder = g->decoder,
                             .ops = g->ops,
                             .cache = cache,
                             .n_tokens = batch->n,
                             .n_outputs = batch->n_outputs,
                             .observe = batch->observe_layer != NULL,
                             .no_flash = g->params.no_flash};
    const dt_device_sight sight = sight_of(batch);
    dt_status status = dt_graph_settle(g, kv, error);
    if (status == DT_OK) {
        status = dt_kv_append(kv, batch->first_position, batch->n, error);
    }
    if (status == DT_OK && cache != NULL) {
        status = dt_device_cache_reserve(cache, kv, &sight, &params.shape, error);
    }
    if (status != DT_OK) {
        return status;
    }
    *out = choose_plan(g, batch, &params);
    if (!dt_plan_fits(*out, &params)) {
        status = dt_plan_build(*out, &params, error);
    }
    return status == DT_OK ? prepare_jobs(g, kv, *out, batch, error) : status;
}

static dt_status compute_segments(dt_graph *g, const dt_plan *plan, dt_error *error) {
    for (int32_t i = 0; i < plan->n_segments; i++) {
        const dt_plan_segment *s = &plan->segments[i];
        if (s->in != NULL && !dt_ggml_copy(plan->segments[i - 1].out, s->in)) {
            return dt_fail(error, DT_ERR_COMPUTE, "the device %s does not take its input",
                           dt_device_name(g->decoder->devices[s->device]));
        }
        const enum ggml_status computed = dt_ggml_compute(g->backends[s->device], s->cgraph);
        if (computed == GGML_STATUS_ABORTED || (computed == GGML_STATUS_SUCCESS && i + 1 < plan->n_segments && abort_callback(g))) {
            return dt_fail(error, DT_ERR_CANCELLED, "cancelled");
        }
        if (computed != GGML_STATUS_SUCCESS) {
            return dt_fail(error, computed == GGML_STATUS_ALLOC_FAILED ? DT_ERR_MEMORY : DT_ERR_COMPUTE,
                           "ggml could not compute the batch on %s (%s)", dt_device_name(g->decoder->devices[s->device]),
                           ggml_status_to_string(computed));
        }
    }
    return DT_OK;
}

/* The plan's own where the CPU has computed them. */
static dt_status fetch_logits(dt_graph *g, const dt_plan *plan, const float **logits, dt_error *error) {
    const size_t bytes = ggml_nbytes(plan->logits);
    if (ggml_backend_buffer_is_host(plan->logits->buffer)) {
        *logits = plan->logits->data;
        return DT_OK;
    }
    const dt_status status = reserve(g, &g->logits, bytes, "the logits", error);
    if (status != DT_OK) {
        return status;
    }
    *logits = g->logits.data;
    return dt_ggml_get(plan->logits, g->logits.data, 0, bytes) ? DT_OK
                                                               : dt_fail(error, DT_ERR_COMPUTE, "the device gave no logits");
}

dt_status dt_graph_compute(dt_graph *graph, dt_kv *kv, const dt_batch *batch, const float **logits, dt_error *error) {
    dt_plan *plan = NULL;
    dt_status status = check_tokens(graph, batch, error);
    if (status == DT_OK) {
        status = prepare(graph, kv, batch, &plan, error);
    }
    if (status == DT_OK) {
        status = set_inputs(graph, kv, plan, batch, error);
    }
    if (status != DT_OK) {
        return status;
    }
    graph->set_n_threads(graph->backends[0], batch->n == 1 ? graph->params.n_threads : graph->params.n_threads_batch);
    status = compute_segments(graph, plan, error);
    if (status == DT_OK) {
        status = fetch_logits(graph, plan, logits, error);
    }
    if (status == DT_OK && dt_device_cache_of(kv) != NULL) {
        const dt_device_sight sight = sight_of(batch);
        dt_device_cache_computed(dt_device_cache_of(kv), &sight);
    }
    return status;
}

dt_status dt_graph_settle(dt_graph *graph, const dt_kv *kv, dt_error *error) {
    dt_device_cache *cache = dt_device_cache_of(kv);
    return cache != NULL ? dt_device_cache_settle(cache, kv, graph->backends, error) : DT_OK;
}

dt_status dt_graph_observe(dt_graph *graph, const dt_kv *kv, int32_t layer, int32_t next_position, dt_observed *out,
                           dt_error *error) {
    return dt_device_cache_observe(dt_device_cache_of(kv), kv, layer, next_position, graph->backends, &out->mass, &out->norms,
                                   &out->stride, &out->n_queries, error);
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
