/*
 * Runs plans: the CPU backend and its threads, the attention jobs, and the scratch they share.
 * Invariant: see graph.h. Scratch and mass buffers only grow, in steps, so decoding allocates nothing.
 */
#include "graph/graph.h"

#include "graph/plan.h"
#include "graph/threads.h"
#include "weights/ggml_calls.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#define N_PLANS 8
#define SMALL_PLAN_TOKENS 64 /* most tokens of a batch for which a plan is kept beside others */

typedef struct growing_buffer {
    void *data;
    size_t bytes;
} growing_buffer;

/* Where a sequence's share of the buffers begins. */
typedef struct share {
    size_t token, output; /* in the batch */
    size_t scratch, mass, span;
    size_t mass_stride;
} share;

struct dt_graph {
    const dt_decoder *decoder;
    dt_memory *memory;
    dt_graph_params params;
    ggml_backend_t backends[DT_MAX_DEVICES]; /* by device; [0] is the CPU */
    dt_threads threads;
    dt_plan plans[N_PLANS], large; /* few tokens; any other number */
    int64_t plan_used[N_PLANS], n_small_batches;
    dt_layer_op *ops;              /* [L] */
    int32_t *first_lane;           /* [L] */
    size_t n_lanes;                /* of a sequence, over all layers */
    growing_buffer share;          /* share [S], S sequences in the batch */
    growing_buffer jobs;           /* dt_attn_job [L][S] */
    growing_buffer lanes;          /* dt_attn_lane [S][n_lanes] */
    growing_buffer focus_column;   /* int32 [S][n_lanes] in mass: the focus's first entry */
    growing_buffer spans;          /* of lanes that see only a focus */
    growing_buffer scratch;        /* attention's, of each sequence; layers run one after the other */
    growing_buffer thread_scratch; /* of each thread */
    growing_buffer mass;           /* of each sequence: [lanes of observed layers][rows][stride] */
    growing_buffer mass_rows;      /* int32 [N]: 0 or more for observed queries, -1 else */
    growing_buffer index;          /* int32 [N]: positions of the batch */
    growing_buffer peaks;          /* float, of caches elsewhere: [lanes of layers with peaks][n_kv] */
    growing_buffer logits;         /* float [n_outputs][V], where a device has computed them */
    struct ggml_context *work_ctx; /* of a graph of one node, which calls work */
    struct ggml_cgraph *work_graph;
    void (*work)(void *user, int ith, int nth);
    void *work_user;
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
    return !g->work && g->params.should_abort && g->params.should_abort(g->params.user);
}

static int32_t most_threads(const dt_graph *g) { return DT_MAX(g->params.n_threads, g->params.n_threads_batch); }

/* Everything CPU-specific goes through the registry, so that the backend may be a library loaded at run time. */
static dt_status open_backend(dt_graph *g, dt_error *error) {
    ggml_backend_dev_t device = g->decoder->devices[0];
    ggml_backend_reg_t registry = ggml_backend_dev_backend_reg(device);
    const ggml_backend_set_abort_callback_t set_abort =
        (ggml_backend_set_abort_callback_t)ggml_backend_reg_get_proc_address(registry, "ggml_backend_set_abort_callback");
    if (!set_abort) {
        return dt_fail(error, DT_ERR_UNSUPPORTED,
                       "ggml's CPU backend lacks a function DeepTutor needs; build against the version in deps/README.md");
    }
    g->backends[0] = dt_ggml_new_backend(device);
    if (!g->backends[0]) {
        return dt_fail(error, DT_ERR_COMPUTE, "ggml's CPU backend does not start");
    }
    const dt_status status = dt_threads_open(&g->threads, registry, g->backends[0], most_threads(g), error);
    if (status != DT_OK) {
        return status;
    }
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
    const size_t n_layers = (size_t)hp->n_layers;
    assert(hp->n_layers > 0);
    g->ops = calloc(n_layers, sizeof *g->ops);
    g->first_lane = calloc(n_layers, sizeof *g->first_lane);
    if (!g->ops || !g->first_lane) {
        return dt_fail_memory(error, n_layers * sizeof *g->ops, "the attention jobs");
    }
    for (size_t i = 0; i < n_layers; i++) {
        g->first_lane[i] = (int32_t)g->n_lanes;
        g->n_lanes += (size_t)hp->n_kv_heads[i];
    }
    return DT_OK;
}

static void op_work(struct ggml_tensor *dst, int ith, int nth, void *user) {
    const dt_graph *g = user;
    (void)dst;
    g->work(g->work_user, ith, nth);
}

static dt_status open_work(dt_graph *g, dt_error *error) {
    const size_t bytes = 2 * ggml_tensor_overhead() + ggml_graph_overhead_custom(1, false) + 1024;
    g->work_ctx = ggml_init((struct ggml_init_params){.mem_size = bytes});
    if (!g->work_ctx) {
        return dt_fail_memory(error, bytes, "the compute graph");
    }
    g->work_graph = ggml_new_graph_custom(g->work_ctx, 1, false);
    ggml_build_forward_expand(g->work_graph,
                              ggml_custom_4d(g->work_ctx, GGML_TYPE_F32, 1, 1, 1, 1, NULL, 0, op_work, GGML_N_TASKS_MAX, g));
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
    if (status == DT_OK) {
        status = open_work(g, error);
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
    dt_plan_free(&graph->large);
    for (int32_t i = 0; i < N_PLANS; i++) {
        dt_plan_free(&graph->plans[i]);
    }
    for (int32_t i = DT_MAX_DEVICES - 1; i >= 0; i--) {
        if (graph->backends[i] && (i == 0 || graph->backends[i] != graph->backends[0])) {
            ggml_backend_free(graph->backends[i]);
        }
    }
    dt_threads_close(&graph->threads);
    release(graph, &graph->share);
    release(graph, &graph->jobs);
    release(graph, &graph->lanes);
    release(graph, &graph->focus_column);
    release(graph, &graph->spans);
    release(graph, &graph->scratch);
    release(graph, &graph->thread_scratch);
    release(graph, &graph->mass);
    release(graph, &graph->mass_rows);
    release(graph, &graph->index);
    release(graph, &graph->peaks);
    release(graph, &graph->logits);
    ggml_free(graph->work_ctx);
    free(graph->first_lane);
    free(graph->ops);
    free(graph);
}

/* ---- one batch ---- */

static size_t mass_stride(int32_t max_entries) { return DT_ROUND_UP((size_t)max_entries, 64); }

/* The spans that a focused sequence sees of a lane, into out; *column: where among their entries the focus begins. */
static int32_t focus_spans(const dt_kv_lane_view *view, const dt_sequence *seq, int32_t block_tokens, dt_kv_span *out,
                           int32_t *n_entries, int32_t *column) {
    const int32_t n_committed = view->n_entries - view->n_uncommitted;
    const int32_t first = DT_MAX(n_committed - seq->focus_from, 0) / block_tokens;
    const int32_t end = DT_MAX(n_committed - seq->focus_to, 0);
    int32_t n = 0;
    *n_entries = 0;
    for (int32_t i = 0; i < view->n_spans; i++) {
        const int32_t begin_entry = i * block_tokens, end_entry = begin_entry + block_tokens;
        const bool in_focus = i >= first && begin_entry < end;
        const bool in_batch = end_entry > n_committed;
        if (i == first) {
            *column = *n_entries + DT_MAX(n_committed - seq->focus_from, 0) - first * block_tokens;
        }
        if (i == 0 || in_focus || in_batch) {
            out[n++] = view->spans[i];
            *n_entries += view->spans[i].n;
        }
    }
    return n;
}

static bool is_elsewhere(const dt_kv *kv, int32_t layer) { return dt_kv_layer(kv, layer)->format.elsewhere; }

static dt_device_sight sight_of(const dt_sequence *seq) {
    return (dt_device_sight){.n_query = seq->n,
                             .first_position = seq->first_position,
                             .first_index = seq->first_position + dt_kv_shift(seq->kv),
                             .focus_from = seq->focus_from,
                             .focus_to = seq->focus_to,
                             .peaks = seq->peak ? seq->observe_layer : NULL};
}

/* Whether attention mass is collected on the way. */
static bool observes(const dt_sequence *seq, int32_t layer) {
    return seq->observe_layer && seq->observe_layer[layer] && !is_elsewhere(seq->kv, layer);
}

static int32_t n_mass_rows(const dt_sequence *seq) { return seq->observe_apart ? seq->n_observed : 1; }

/* Deals out the buffers; *whole: where they end. *thread_bytes: what a thread needs. */
static void deal_out(const dt_graph *g, const dt_sequence *sequences, int32_t n_sequences, share *out, share *whole,
                     size_t *thread_bytes) {
    const dt_hparams *hp = &g->decoder->hp;
    const dt_attn_kernel *kernel = g->params.kernel;
    *whole = (share){.token = 0};
    *thread_bytes = 0;
    for (int32_t s = 0; s < n_sequences; s++) {
        const dt_sequence *seq = &sequences[s];
        size_t scratch = 0, n_observed = 0;
        int32_t max_entries = 0;
        out[s] = *whole;
        for (int32_t i = 0; i < hp->n_layers; i++) {
            const int32_t length = dt_kv_length(seq->kv, i), n_lanes = hp->n_kv_heads[i];
            const dt_kv_format *format = &dt_kv_layer(seq->kv, i)->format;
            if (format->elsewhere) {
                continue;
            }
            const size_t bytes = kernel->scratch_bytes(format, n_lanes, hp->n_heads / n_lanes, seq->n, length);
            scratch = DT_MAX(scratch, bytes);
            *thread_bytes = DT_MAX(*thread_bytes, kernel->thread_bytes(format, length));
            max_entries = DT_MAX(max_entries, length);
            n_observed += observes(seq, i) ? (size_t)n_lanes : 0;
            whole->span += seq->focus_from > 0 ? (size_t)dt_kv_blocks_of(seq->kv, i) * (size_t)n_lanes : 0;
        }
        out[s].mass_stride = mass_stride(max_entries);
        whole->token += (size_t)seq->n;
        whole->output += (size_t)seq->n_outputs;
        whole->scratch += scratch;
        whole->mass += n_observed * out[s].mass_stride * (size_t)n_mass_rows(seq);
    }
}

/* Of a layer that is elsewhere, where the peaks of the batch will lie. */
static void connect_peaks(dt_graph *g, const dt_sequence *seq, const dt_device_layer_shape *shape, int32_t layer, dt_attn_lane *to,
                          int32_t *column) {
    const dt_device_sight sight = sight_of(seq);
    for (int32_t lane = 0; shape->peaks_at >= 0 && lane < g->decoder->hp.n_kv_heads[layer]; lane++) {
        to[lane].mass = (float *)g->peaks.data + shape->peaks_at + (int64_t)lane * shape->n_kv;
        column[lane] = dt_device_cache_focus_column(seq->kv, &sight, layer, lane);
    }
}

/* Points every lane at the cache's content and, in observed layers, at its rows of the mass buffer. */
static void connect_lanes(dt_graph *g, const dt_plan *plan, const dt_sequence *seq, int32_t number) {
    const dt_hparams *hp = &g->decoder->hp;
    const share *from = (share *)g->share.data + number;
    dt_attn_lane *to = (dt_attn_lane *)g->lanes.data + (size_t)number * g->n_lanes;
    int32_t *column = (int32_t *)g->focus_column.data + (size_t)number * g->n_lanes;
    float *mass = (float *)g->mass.data + from->mass;
    dt_kv_span *spans = (dt_kv_span *)g->spans.data + from->span;
    for (int32_t i = 0; i < hp->n_layers; i++) {
        const bool observe = observes(seq, i);
        dt_attn_lane *first = to;
        int32_t *first_column = column;
        for (int32_t lane = 0; lane < hp->n_kv_heads[i]; lane++, to++, column++) {
            dt_kv_lane_view view;
            dt_kv_lane(seq->kv, i, lane, &view);
            *to = (dt_attn_lane){.spans = view.spans,
                                 .n_spans = view.n_spans,
                                 .n_entries = view.n_entries,
                                 .mass = observe ? mass : NULL,
                                 .value_norm = view.value_norm};
            *column = 0;
            mass += observe ? from->mass_stride * (size_t)n_mass_rows(seq) : 0;
            if (seq->focus_from > 0 && !is_elsewhere(seq->kv, i)) {
                to->spans = spans;
                to->n_spans = focus_spans(&view, seq, dt_kv_layer(seq->kv, i)->format.block_tokens, spans, &to->n_entries, column);
                to->value_norm = NULL; /* indexed by all of the lane's entries; those of the batch will not stay */
                spans += to->n_spans;
            }
        }
        if (is_elsewhere(seq->kv, i)) {
            connect_peaks(g, seq, &plan->shapes[(size_t)number * (size_t)hp->n_layers + (size_t)i], i, first, first_column);
        }
    }
}

static dt_attn_job make_job(const dt_graph *g, const dt_plan_layer *io, const dt_sequence *seq, int32_t number, int32_t layer) {
    const dt_hparams *hp = &g->decoder->hp;
    const share *at = (const share *)g->share.data + number;
    const size_t f = sizeof(float), first = at->token;
    const bool observe = observes(seq, layer);
    dt_attn_job job = {
        .kernel = g->params.kernel,
        .format = &dt_kv_layer(seq->kv, layer)->format,
        .n_lanes = hp->n_kv_heads[layer],
        .n_rep = hp->n_heads / hp->n_kv_heads[layer],
        .n_query = seq->n,
        .scale = hp->attention_scale,
        .softcap = hp->attention_softcap,
        .window = hp->window[layer],
        .positions = (const int32_t *)g->index.data + first,
        .lanes = (dt_attn_lane *)g->lanes.data + (size_t)number * g->n_lanes + g->first_lane[layer],
        .q_token_stride = io->q->nb[2] / f,
        .q_head_stride = io->q->nb[1] / f,
        .k_token_stride = io->k->nb[2] / f,
        .k_head_stride = io->k->nb[1] / f,
        .v_token_stride = io->v->nb[1] / f,
        .v_head_stride = (size_t)hp->head_dim_v,
        .out_token_stride = io->out->nb[1] / f,
        .out_head_stride = (size_t)hp->head_dim_v,
        .mass_row = observe ? (const int32_t *)g->mass_rows.data + first : NULL,
        .n_mass_rows = observe ? n_mass_rows(seq) : 0,
        .mass_stride = at->mass_stride,
        .mass_peak = seq->peak,
        .scratch = (char *)g->scratch.data + at->scratch,
        .thread_scratch = g->thread_scratch.data,
        .thread_bytes = g->thread_scratch.bytes / (size_t)most_threads(g) / 64 * 64,
    };
    job.q = (const float *)io->q->data + first * job.q_token_stride;
    job.k = (const float *)io->k->data + first * job.k_token_stride;
    job.v = (const float *)io->v->data + first * job.v_token_stride;
    job.out = (float *)io->out->data + first * job.out_token_stride;
    job.scratch_bytes = (number + 1 < g->ops[layer].n_jobs ? at[1].scratch : g->scratch.bytes) - at->scratch;
    return job;
}

static dt_status prepare_jobs(dt_graph *g, const dt_plan *plan, const dt_sequence *sequences, int32_t n_sequences, size_t n_peaks,
                              dt_error *error) {
    const size_t n = (size_t)n_sequences, n_layers = (size_t)g->decoder->hp.n_layers;
    dt_status status = reserve(g, &g->share, n * sizeof(share), "the attention jobs", error);
    if (status != DT_OK) {
        return status;
    }
    share whole;
    size_t thread_bytes;
    deal_out(g, sequences, n_sequences, g->share.data, &whole, &thread_bytes);
    const struct {
        growing_buffer *buffer;
        size_t bytes;
        const char *what;
    } needs[] = {
        {&g->jobs, n_layers * n * sizeof(dt_attn_job), "the attention jobs"},
        {&g->lanes, n * g->n_lanes * sizeof(dt_attn_lane), "the attention jobs"},
        {&g->focus_column, n * g->n_lanes * sizeof(int32_t), "the attention jobs"},
        {&g->spans, whole.span * sizeof(dt_kv_span), "attention spans"},
        {&g->scratch, whole.scratch, "attention scratch"},
        {&g->thread_scratch, thread_bytes * (size_t)most_threads(g), "attention scratch"},
        {&g->mass, whole.mass * sizeof(float), "attention mass"},
        {&g->mass_rows, whole.token * sizeof(int32_t), "attention mass"},
        {&g->index, whole.token * sizeof(int32_t), "positions"},
        {&g->peaks, n_peaks * sizeof(float), "attention peaks"},
    };
    for (size_t i = 0; status == DT_OK && i < sizeof needs / sizeof needs[0]; i++) {
        status = reserve(g, needs[i].buffer, DT_MAX(needs[i].bytes, 1), needs[i].what, error);
    }
    if (status != DT_OK) {
        return status;
    }
    int32_t *mass_rows = g->mass_rows.data, *positions = g->index.data;
    for (int32_t s = 0; s < n_sequences; s++) {
        const dt_sequence *seq = &sequences[s];
        connect_lanes(g, plan, seq, s);
        for (int32_t i = 0; i < seq->n; i++) {
            const int32_t observed = i - (seq->n - seq->n_observed);
            *mass_rows++ = observed < 0 ? -1 : seq->observe_apart ? observed : 0;
            *positions++ = seq->first_position + i;
        }
    }
    for (size_t i = 0; i < n_layers; i++) {
        g->ops[i].jobs = (dt_attn_job *)g->jobs.data + i * n;
        g->ops[i].n_jobs = n_sequences;
        for (int32_t s = 0; s < n_sequences && !is_elsewhere(sequences[s].kv, (int32_t)i); s++) {
            g->ops[i].jobs[s] = make_job(g, &plan->layers[i], &sequences[s], s, (int32_t)i);
        }
    }
    return DT_OK;
}

static dt_status fail_input(const dt_graph *g, int32_t device, dt_error *error) {
    return dt_fail(error, DT_ERR_COMPUTE, "the device %s does not take its input", dt_device_name(g->decoder->devices[device]));
}

/* What segments are told: positions, and of a cache that is elsewhere where it is to be written and what is seen of it. */
static dt_status set_segment_inputs(const dt_graph *g, const dt_plan *plan, const dt_sequence *sequences, dt_error *error) {
    for (int32_t i = 0; i < plan->n_segments; i++) {
        const dt_plan_segment *s = &plan->segments[i];
        if (s->positions != NULL && !dt_ggml_set(s->positions, g->index.data, 0, ggml_nbytes(s->positions))) {
            return fail_input(g, s->device, error);
        }
        for (int32_t j = 0; j < plan->n_elsewhere && s->inputs[j].masks != NULL; j++) {
            const dt_kv *kv = sequences[j].kv;
            const dt_device_sight sight = sight_of(&sequences[j]);
            const dt_status status =
                dt_device_cache_fill_inputs(dt_device_cache_of(kv), kv, &sight, s->device, &s->inputs[j], error);
            if (status != DT_OK) {
                return status;
            }
        }
    }
    return DT_OK;
}

static dt_status set_inputs(const dt_graph *g, const dt_plan *plan, const dt_sequence *sequences, int32_t n_sequences,
                            dt_error *error) {
    for (int32_t s = 0; s < n_sequences; s++) {
        const dt_sequence *seq = &sequences[s];
        const share *at = (const share *)g->share.data + s;
        const size_t size = sizeof(int32_t);
        bool done = dt_ggml_set(plan->tokens, seq->tokens, at->token * size, (size_t)seq->n * size);
        for (int32_t i = 0; done && i < seq->n_outputs; i++) {
            const int32_t row = (int32_t)at->token + seq->n - seq->n_outputs + i;
            done = dt_ggml_set(plan->output_rows, &row, (at->output + (size_t)i) * size, size);
        }
        if (!done) {
            return fail_input(g, plan->segments[plan->n_segments - 1].device, error);
        }
    }
    return set_segment_inputs(g, plan, sequences, error);
}

static dt_plan_params params_of(const dt_graph *g, const dt_sequence *sequences, int32_t n_sequences) {
    dt_plan_params params = {.decoder = g->decoder, .ops = g->ops, .no_flash = g->params.no_flash};
    for (int32_t s = 0; s < n_sequences; s++) {
        params.n_tokens += sequences[s].n;
        params.n_outputs += sequences[s].n_outputs;
        params.observe = params.observe || sequences[s].observe_layer;
    }
    return params;
}

/* The plan for a batch, perhaps not built for it yet. Small batches change in size from step to step, with drafts and with
 * sequences that come and go: for them several are kept, and the one not used for longest is rebuilt. */
static dt_plan *choose_plan(dt_graph *g, const dt_plan_params *params) {
    if (params->n_tokens > SMALL_PLAN_TOKENS) {
        return &g->large;
    }
    int32_t best = 0;
    for (int32_t i = 0; i < N_PLANS; i++) {
        if (dt_plan_fits(&g->plans[i], params)) {
            best = i;
            break;
        }
        best = g->plan_used[i] < g->plan_used[best] ? i : best;
    }
    g->plan_used[best] = ++g->n_small_batches;
    return &g->plans[best];
}

static dt_status compute_segments(dt_graph *g, const dt_plan *plan, dt_error *error) {
    const int32_t n_threads = plan->n_tokens == 1 ? g->params.n_threads : g->params.n_threads_batch;
    for (int32_t i = 0; i < plan->n_segments; i++) {
        const dt_plan_segment *s = &plan->segments[i];
        if (s->in != NULL && !dt_ggml_copy(plan->segments[i - 1].out, s->in)) {
            return fail_input(g, s->device, error);
        }
        const enum ggml_status computed =
            g->backends[s->device] == g->backends[0]
                ? dt_threads_compute(&g->threads, s->cgraph, n_threads, plan->n_tokens <= SMALL_PLAN_TOKENS)
                : dt_ggml_compute(g->backends[s->device], s->cgraph);
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

/* The peaks that devices have found; a model that overflowed has none. */
static dt_status fetch_peaks(const dt_graph *g, const dt_plan *plan, dt_error *error) {
    for (int32_t i = 0; plan->n_elsewhere > 0 && i < g->decoder->hp.n_layers; i++) {
        const struct ggml_tensor *t = plan->layers[i].peaks;
        float *to = t != NULL ? (float *)g->peaks.data + plan->shapes[i].peaks_at : NULL;
        if (t != NULL && !dt_ggml_get(t, to, 0, ggml_nbytes(t))) {
            return dt_fail(error, DT_ERR_COMPUTE, "the device did not tell what layer %d attends to", i);
        }
        for (int64_t e = 0; t != NULL && e < ggml_nelements(t); e++) {
            to[e] = dt_is_finite(to[e]) ? to[e] : 0;
        }
    }
    return DT_OK;
}

/* Room in caches that are elsewhere; out tells the graph of them. */
static dt_status reserve_elsewhere(const dt_sequence *sequences, int32_t n_sequences, dt_plan_sequence *out, dt_error *error) {
    dt_status status =
        n_sequences <= DT_MAX_ELSEWHERE
            ? DT_OK
            : dt_fail(error, DT_ERR_INTERNAL, "more than %d sequences at once have caches on devices", DT_MAX_ELSEWHERE);
    for (int32_t i = 0; status == DT_OK && i < n_sequences; i++) {
        dt_device_cache *cache = dt_device_cache_of(sequences[i].kv);
        const dt_device_sight sight = sight_of(&sequences[i]);
        out[i] = (dt_plan_sequence){.cache = cache, .n_tokens = sequences[i].n};
        status = dt_device_cache_reserve(cache, sequences[i].kv, &sight, &out[i].shape, error);
    }
    return status;
}

/* The batch's plan, built and with its jobs filled in. */
static dt_status prepare(dt_graph *g, const dt_sequence *sequences, int32_t n_sequences, dt_plan **out, dt_error *error) {
    dt_plan_params params = params_of(g, sequences, n_sequences);
    dt_plan_sequence elsewhere[DT_MAX_ELSEWHERE];
    dt_status status = DT_OK;
    if (dt_device_cache_of(sequences[0].kv) != NULL) { /* all sequences of a graph have their layers in the same places */
        status = reserve_elsewhere(sequences, n_sequences, elsewhere, error);
        params.elsewhere = elsewhere;
        params.n_elsewhere = n_sequences;
    }
    if (status != DT_OK) {
        return status;
    }
    *out = choose_plan(g, &params);
    if (!dt_plan_fits(*out, &params)) {
        status = dt_plan_build(*out, &params, error);
    }
    const size_t n_peaks = params.n_elsewhere > 0 ? (size_t)params.elsewhere[0].shape->n_peaks : 0;
    return status == DT_OK ? prepare_jobs(g, *out, sequences, n_sequences, n_peaks, error) : status;
}

dt_status dt_graph_compute(dt_graph *graph, const dt_sequence *sequences, int32_t n_sequences, const float **logits,
                           dt_error *error) {
    dt_plan *plan = NULL;
    dt_status status = prepare(graph, sequences, n_sequences, &plan, error);
    if (status == DT_OK) {
        status = set_inputs(graph, plan, sequences, n_sequences, error);
    }
    if (status != DT_OK) {
        return status;
    }
    status = compute_segments(graph, plan, error);
    if (status == DT_OK) {
        status = dt_weights_check(graph->decoder->weights, error);
    }
    if (status == DT_OK) {
        status = fetch_logits(graph, plan, logits, error);
    }
    if (status == DT_OK) {
        status = fetch_peaks(graph, plan, error);
    }
    for (int32_t i = 0; status == DT_OK && i < plan->n_elsewhere; i++) {
        const dt_device_sight sight = sight_of(&sequences[i]);
        dt_device_cache_computed(dt_device_cache_of(sequences[i].kv), &sight);
    }
    return status;
}

dt_status dt_graph_settle(dt_graph *graph, const dt_kv *kv, dt_error *error) {
    dt_device_cache *cache = dt_device_cache_of(kv);
    return cache != NULL ? dt_device_cache_settle(cache, kv, graph->backends, error) : DT_OK;
}

dt_status dt_graph_observe(dt_graph *graph, const dt_kv *kv, int32_t layer, int32_t next_index, dt_observed *out, dt_error *error) {
    return dt_device_cache_observe(dt_device_cache_of(kv), kv, layer, next_index, graph->backends, &out->mass, &out->norms,
                                   &out->stride, &out->n_queries, error);
}

const float *dt_graph_mass(const dt_graph *graph, int32_t sequence, int32_t layer, int32_t lane, int32_t row) {
    const size_t index = (size_t)sequence * graph->n_lanes + (size_t)(graph->first_lane[layer] + lane);
    const float *mass = ((const dt_attn_lane *)graph->lanes.data)[index].mass;
    const size_t column = (size_t)((const int32_t *)graph->focus_column.data)[index];
    const size_t before = row > 0 ? (size_t)row * graph->ops[layer].jobs[sequence].mass_stride : 0;
    return mass ? mass + before + column : NULL;
}

/* Calls work as ggml's operators are called. */
static void run_workers(void *pool, void (*work)(void *user, int ith, int nth), void *user) {
    dt_graph *graph = pool;
    graph->work = work;
    graph->work_user = user;
    if (dt_threads_share(&graph->threads, graph->work_graph) != GGML_STATUS_SUCCESS) { /* no memory: nothing was started */
        work(user, 0, 1);
    }
    graph->work = NULL;
}

dt_workers dt_graph_workers(dt_graph *graph) {
    return (dt_workers){.run = run_workers, .pool = graph, .n_most = most_threads(graph)};
}

int64_t dt_graph_attention_us(const dt_graph *graph) {
    int64_t sum = 0;
    for (int32_t i = 0; i < graph->decoder->hp.n_layers; i++) {
        sum += graph->ops[i].attention_us;
    }
    return sum;
}
