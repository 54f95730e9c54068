/*
 * --kv-memory as a promise: settings are chosen before the first token so that the cache cannot exceed it; the cache's allocator
 * enforces it besides. docs/memory.md tells users the order of what gives way:
 *
 *   1. nothing    2. streaming prefill    3. smaller prefill chunks    4. INT8, then 1 to 3 again    5. smaller budgets
 *
 * from what costs nothing to what costs most in quality. Invariant: no budget goes below its min_cache_size or its pins.
 */
#include "engine/kv_plan.h"
#include "engine/session.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#define LEAST_CHUNK 32
#define BUDGET_STEPS 256 /* budgets between the least and the full one that are tried */

bool dt_kv_plan_is_elsewhere(const dt_model *model, const dt_session_params *params, int32_t layer) {
    return model->decoder->layer_device[layer] > 0 || dt_kernel_is_ggml(params->kernel);
}

bool dt_kernel_is_ggml(const char *kernel) {
    return kernel != NULL && (strcmp(kernel, "ggml") == 0 || strcmp(kernel, "ggml_matmul") == 0);
}

dt_kv_layer_params *dt_kv_plan_layers(const dt_model *model, const dt_session_params *params, const dt_budget *budgets) {
    const dt_hparams *hp = &model->decoder->hp;
    dt_kv_layer_params *layers = calloc((size_t)hp->n_layers, sizeof *layers);
    bool may_move = true, evicts = false; /* past the context: every layer evicts or has a window */
    for (int32_t i = 0; i < hp->n_layers; i++) {
        may_move = may_move && (budgets[i].policy != NULL || hp->window[i] > 0);
        evicts = evicts || budgets[i].policy != NULL;
    }
    for (int32_t i = 0; layers && i < hp->n_layers; i++) {
        layers[i].n_lanes = hp->n_kv_heads[i];
        layers[i].budget = budgets[i];
        layers[i].window = hp->window[i];
        layers[i].keeps_origins = may_move && evicts;
        layers[i].rope = (dt_kv_rope){
            .n_pairs = hp->rope_base[i] == 0.0f ? 0 : hp->rope_dim / 2,
            .halves = hp->arch->rope_style == DT_ROPE_NEOX,
            .frequency = model->decoder->rope_frequencies + (size_t)i * (size_t)(hp->rope_dim / 2),
        };
        dt_kv_format_init(&layers[i].format, params->kv_type, params->kv_type, hp->head_dim_k, hp->head_dim_v,
                          params->kv_block_tokens);
        if (dt_kv_plan_is_elsewhere(model, params, i)) {
            dt_kv_format_move_elsewhere(&layers[i].format);
        }
    }
    return layers;
}

typedef struct plan {
    const dt_model *model;
    dt_session_params *params;
    dt_budget *budgets;              /* as they would be */
    const dt_budget *configured;     /* as they were asked for */
    int32_t total, configured_total; /* of a budget that all share; 0 = none */
    int32_t *longest;                /* [n_layers] scratch */
    int32_t repeated;                /* of them: tokens that reconstruct appends to every layer for a while */
    uint64_t bytes;                  /* of the settings weighed last */
    bool failed;                     /* out of memory */
} plan;

static int32_t expected_tokens(const dt_session_params *params) {
    return params->n_expected > 0 ? DT_MIN(params->n_expected, params->n_ctx) : params->n_ctx;
}

/* A lane holds the whole conversation; or its budget and the chunk that is being read, and with DT_PREFILL_FULL the prompt. */
static void measure_lanes(plan *p, bool evicts) {
    const int32_t n_layers = p->model->info.n_layers, n = expected_tokens(p->params);
    const int32_t n_evicting = dt_budgets_that_evict(p->budgets, n_layers), n_sharing = DT_MAX(n_evicting, 1);
    p->repeated = 0;
    for (int32_t i = 0; i < n_layers; i++) {
        p->repeated = dt_policy_repeats(p->budgets[i].policy) ? DT_MIN(p->params->n_batch, DT_REPEAT_CHUNK) : p->repeated;
    }
    const int32_t n_prompt = p->params->n_prompt > 0 ? DT_MIN(p->params->n_prompt, n) : n;
    const int32_t whole = p->params->prefill == DT_PREFILL_FULL ? n_prompt : 0; /* before anything of it is evicted */
    const bool bounded = evicts && p->params->evict == DT_EVICT_ALWAYS;
    for (int32_t i = 0; i < n_layers; i++) {
        const dt_budget *b = &p->budgets[i];
        const int64_t max = p->total > 0 ? p->total / n_sharing + p->params->kv_block_tokens : b->max_cache_size;
        const int64_t kept = DT_MIN(max, (int64_t)b->max_cache_size) + p->params->n_batch;
        const int64_t budget = b->policy && bounded ? DT_MAX(kept, (int64_t)whole) : n;
        p->longest[i] = (int32_t)DT_MIN(DT_MIN(budget, (int64_t)n) + p->repeated + b->memory_slots, (int64_t)INT32_MAX);
    }
}

/* What the cache can come to. */
static uint64_t weigh(plan *p, bool evicts) {
    dt_kv_layer_params *layers = dt_kv_plan_layers(p->model, p->params, p->budgets);
    if (!layers) {
        p->failed = true;
        return 0;
    }
    measure_lanes(p, evicts);
    p->bytes = dt_kv_bytes_bound(layers, p->model->info.n_layers, p->longest, p->total) +
               dt_device_cache_bytes_bound(p->model->decoder, layers, p->longest);
    free(layers);
    return p->bytes;
}

/* The same without eviction and what that needs beside the keys and values. */
static uint64_t weigh_full(plan *p) {
    dt_budget *const budgets = p->budgets;
    const int32_t total = p->total;
    p->budgets = calloc((size_t)p->model->info.n_layers, sizeof *budgets);
    p->total = 0;
    p->failed = p->budgets == NULL;
    const uint64_t bytes = p->failed ? 0 : weigh(p, false);
    free(p->budgets);
    p->budgets = budgets;
    p->total = total;
    return bytes;
}

static bool evicts_always(const plan *p) {
    return p->params->evict == DT_EVICT_ALWAYS && dt_budgets_that_evict(p->budgets, p->model->info.n_layers) > 0;
}

static bool fits(plan *p) { return !p->failed && weigh(p, true) <= p->params->kv_memory; }

static int32_t least_budget(const dt_budget *b) {
    return DT_MIN(b->max_cache_size, DT_MAX(b->min_cache_size, b->sink_tokens + b->recent_window + 1));
}

/* share: of BUDGET_STEPS, how much of what lies above the least budget stays. A list of sizes becomes one size. */
static void share_budgets(plan *p, int32_t share) {
    if (p->total > 0) {
        int64_t least = 0;
        for (int32_t i = 0; i < p->model->info.n_layers; i++) {
            least += p->configured[i].policy ? least_budget(&p->configured[i]) : 0;
        }
        p->total = (int32_t)(DT_MIN(least, (int64_t)p->configured_total) +
                             DT_MAX(p->configured_total - least, (int64_t)0) * share / BUDGET_STEPS);
        return;
    }
    for (int32_t i = 0; i < p->model->info.n_layers; i++) {
        const dt_budget *full = &p->configured[i];
        if (full->policy) {
            const int64_t least = least_budget(full), above = (int64_t)full->max_cache_size - least;
            p->budgets[i].max_cache_size = (int32_t)(least + above * share / BUDGET_STEPS);
            p->budgets[i].lane_max = NULL;
        }
    }
}

/* Steps 1 to 3 with one type of numbers. */
static bool choose_prefill(plan *p, dt_prefill prefill, int32_t n_batch, bool evicts) {
    p->params->prefill = prefill;
    p->params->n_batch = n_batch;
    if (fits(p)) {
        return true;
    }
    p->params->prefill = evicts ? DT_PREFILL_STREAMING : prefill;
    while (evicts && !fits(p) && p->params->n_batch > LEAST_CHUNK) {
        p->params->n_batch = DT_MAX(p->params->n_batch / 2, LEAST_CHUNK);
    }
    return evicts && fits(p);
}

static bool choose(plan *p, bool evicts) {
    const dt_session_params asked = *p->params;
    if (choose_prefill(p, asked.prefill, asked.n_batch, evicts)) {
        return true;
    }
    const uint64_t bytes = p->bytes;
    p->params->kv_type = DT_KV_INT8;
    if (choose_prefill(p, asked.prefill, asked.n_batch, evicts)) {
        return true;
    }
    if (p->bytes > bytes) { /* rows of small heads are filled up on devices */
        p->params->kv_type = asked.kv_type;
    }
    int32_t share = 0;
    for (int32_t step = BUDGET_STEPS / 2; evicts && step > 0; step /= 2) {
        share_budgets(p, share + step);
        share += fits(p) ? step : 0;
    }
    share_budgets(p, share);
    return fits(p);
}

static void log_budgets(const plan *p) {
    if (p->total != p->configured_total) {
        dt_log(DT_LOG_INFO, "KV memory: total_cache_size %d instead of %d", p->total, p->configured_total);
    }
    const int32_t n_layers = p->model->info.n_layers;
    for (int32_t i = 0, next; i < n_layers; i = next) {
        const int32_t from = p->configured[i].max_cache_size, to = p->budgets[i].max_cache_size;
        for (next = i + 1;
             next < n_layers && p->configured[next].max_cache_size == from && p->budgets[next].max_cache_size == to;) {
            next++;
        }
        if (from != to) {
            dt_log(DT_LOG_INFO, "KV memory: layers %d-%d: max_cache_size %d instead of %d", i, next - 1, to, from);
        }
    }
}

static void log_plan(const plan *p, const dt_session_params *asked, uint64_t full_bytes) {
    const uint64_t most = DT_MIN(p->bytes, p->params->kv_memory > 0 ? p->params->kv_memory : UINT64_MAX);
    const bool of_many = p->params->group != NULL && p->params->kv_memory == 0; /* a line for each would hide the others */
    dt_log(of_many ? DT_LOG_DEBUG : DT_LOG_INFO, "KV memory: at most %s; %d tokens with nothing evicted: %s", dt_size_of(most).text,
           expected_tokens(p->params), dt_size_of(full_bytes).text);
    if (p->params->prefill != asked->prefill) {
        dt_log(DT_LOG_INFO, "KV memory: prefill streaming instead of full");
    }
    if (p->params->n_batch != asked->n_batch) {
        dt_log(DT_LOG_INFO, "KV memory: prefill in chunks of %d tokens instead of %d", p->params->n_batch, asked->n_batch);
    }
    if (p->params->kv_type != asked->kv_type) {
        dt_log(DT_LOG_INFO, "KV memory: keys and values as int8 instead of f16");
    }
    log_budgets(p);
}

static dt_status refuse(const plan *p, bool evicts, dt_error *error) {
    const unsigned long long kib = (unsigned long long)(p->bytes + 1023) / 1024; /* weighed last: the most frugal settings */
    return dt_fail(
        error, DT_ERR_LIMIT, "%s is too little for the KV cache of %d tokens: the least that works is --kv-memory %lluK%s",
        dt_size_of(p->params->kv_memory).text, expected_tokens(p->params), kib,
        evicts
            ? "; fewer tokens (a shorter text, -n, or in a chat -c) or smaller budgets may need less"
            : "; fewer tokens need less (a shorter text, -n, or in a chat -c), and so may --cache-eviction where many are evicted");
}

dt_status dt_kv_plan_fit(const dt_model *model, dt_session_params *params, dt_budget *budgets, int32_t *total_cache_size,
                         uint64_t *most, dt_error *error) {
    const int32_t n_layers = model->info.n_layers;
    const dt_session_params asked = *params;
    dt_budget *configured = calloc((size_t)n_layers, sizeof *configured);
    plan p = {.model = model,
              .params = params,
              .budgets = budgets,
              .configured = configured,
              .total = *total_cache_size,
              .configured_total = *total_cache_size};
    p.longest = calloc((size_t)n_layers, sizeof *p.longest);
    dt_status status = DT_OK;
    const bool evicts = evicts_always(&p);
    for (int32_t i = 0; configured && i < n_layers; i++) {
        configured[i] = budgets[i];
    }
    if (configured && p.longest) {
        const uint64_t full_bytes = weigh_full(&p);
        weigh(&p, true);
        if (params->kv_memory > 0 && !choose(&p, evicts) && !p.failed) {
            status = refuse(&p, evicts, error);
        } else if (!p.failed) {
            log_plan(&p, &asked, full_bytes);
        }
    }
    if (!configured || !p.longest || p.failed) {
        status = dt_fail_memory(error, (size_t)n_layers * sizeof *configured, "the cache");
    }
    *total_cache_size = p.total;
    *most = params->kv_memory > 0 ? DT_MIN(p.bytes, params->kv_memory) : p.bytes;
    free(configured);
    free(p.longest);
    return status;
}

/* The plan of a session that is there, for its own number of tokens or another; false: out of memory. free_plan. */
static bool plan_of(const dt_session *session, dt_session_params *params, plan *out) {
    const int32_t n_layers = session->model->info.n_layers;
    *out = (plan){.model = session->model, .params = params, .total = dt_kv_total_cache_size(session->kv)};
    out->budgets = calloc((size_t)n_layers, sizeof *out->budgets);
    out->longest = calloc((size_t)n_layers, sizeof *out->longest);
    for (int32_t i = 0; out->budgets != NULL && i < n_layers; i++) {
        out->budgets[i] = dt_kv_layer(session->kv, i)->budget;
    }
    if (out->budgets != NULL && out->longest != NULL) {
        measure_lanes(out, true);
    }
    return out->budgets != NULL && out->longest != NULL;
}

static void free_plan(plan *p) {
    free(p->budgets);
    free(p->longest);
}

/* lengths: of each lane, those of a layer one after the other. longest: [n_layers] scratch. */
static uint64_t bound_of(const dt_session *session, plan *p, const dt_kv *kv, const int32_t *lengths, bool has_bias) {
    dt_session_params params = session->params;
    params.kv_type = dt_kv_layer(kv, 0)->format.type_k;
    dt_kv_layer_params *layers = dt_kv_plan_layers(session->model, &params, p->budgets);
    if (layers == NULL) {
        return UINT64_MAX;
    }
    for (int32_t i = 0, lane = 0; i < session->model->info.n_layers; i++) {
        p->longest[i] = 0;
        for (int32_t j = 0; j < layers[i].n_lanes; j++, lane++) {
            p->longest[i] = DT_MAX(p->longest[i], lengths[lane]);
        }
    }
    const uint64_t bytes =
        dt_kv_bytes_most(kv, lengths, has_bias) + dt_device_cache_bytes_bound(session->model->decoder, layers, p->longest);
    free(layers);
    return bytes;
}

static int32_t *new_lengths(const dt_hparams *hp) {
    size_t n_lanes = 0;
    for (int32_t i = 0; i < hp->n_layers; i++) {
        n_lanes += (size_t)hp->n_kv_heads[i];
    }
    assert(n_lanes > 0);
    return calloc(n_lanes, sizeof(int32_t));
}

static uint64_t excess_of(const dt_session *session, plan *p, const dt_kv_held *held) {
    const dt_hparams *hp = &session->model->decoder->hp;
    int32_t *lengths = new_lengths(hp);
    if (lengths == NULL) {
        return UINT64_MAX;
    }
    const int32_t n_batch = p->params->n_batch;
    const int64_t chunk = held->to_come >= 0 ? DT_MIN(held->to_come, (int64_t)n_batch) : n_batch;
    const int64_t n_ctx = DT_MIN(session->max_tokens, session->params.n_ctx); /* past it chunks leave room for what is there */
    int64_t planned = 0, wanted = 0;                                          /* of layers that share a budget */
    bool exceeds = false;
    for (int32_t i = 0, lane = 0; i < hp->n_layers; i++) {
        const int32_t n_more = DT_MAX(held->most_slots - p->budgets[i].memory_slots, 0); /* until the first round merges them */
        int64_t n = 0;
        for (int32_t j = 0; j < hp->n_kv_heads[i]; j++, lane++) {
            const int64_t most = DT_MIN(held->entries[lane] + chunk, n_ctx + p->budgets[i].memory_slots);
            lengths[lane] = (int32_t)DT_MAX(most, (int64_t)held->entries[lane]) + p->repeated;
            n += lengths[lane];
            if (held->has_bias) { /* the biases stay while lanes grow */
                lengths[lane] = DT_MAX(lengths[lane], p->longest[i] + n_more);
            }
        }
        const int64_t most = (int64_t)p->longest[i] * hp->n_kv_heads[i];
        const bool shares = p->total > 0 && p->budgets[i].policy != NULL;
        planned += shares ? most : 0;
        wanted += shares ? n : 0;
        exceeds = exceeds || (!shares && n > most) || n_more > 0 || (held->has_bias && p->budgets[i].memory_slots == 0);
    }
    const uint64_t bytes = exceeds || wanted > planned ? bound_of(session, p, held->kv, lengths, held->has_bias) : 0;
    free(lengths);
    return bytes;
}

uint64_t dt_kv_plan_excess(const dt_session *session, const dt_kv_held *held) {
    dt_session_params params = session->params;
    plan p;
    const uint64_t bytes = plan_of(session, &params, &p) ? excess_of(session, &p, held) : UINT64_MAX;
    free_plan(&p);
    return bytes;
}

uint64_t dt_kv_plan_limit(const dt_session *session, const dt_kv_held *held, uint64_t needed) {
    const dt_kv_asked *asked = &session->asked;
    const int32_t n_layers = session->model->info.n_layers;
    const dt_kv_type type = dt_kv_layer(held->kv, 0)->format.type_k;
    plan p = {.model = session->model, .configured = asked->budgets, .configured_total = asked->total_cache_size};
    p.budgets = calloc((size_t)n_layers, sizeof *p.budgets);
    p.longest = calloc((size_t)n_layers, sizeof *p.longest);
    uint64_t limit = session->params.kv_memory;
    needed = p.budgets != NULL && p.longest != NULL ? needed : UINT64_MAX;
    while (needed != UINT64_MAX && needed > limit) { /* each time with a larger one, until everything that was asked for fits */
        limit = (needed + 1023) / 1024 * 1024;
        dt_session_params params = session->params;
        params.n_batch = asked->n_batch;
        params.prefill = asked->prefill;
        params.kv_type = type;
        params.kv_memory = limit;
        p.params = &params;
        p.total = p.configured_total;
        memcpy(p.budgets, asked->budgets, (size_t)n_layers * sizeof *p.budgets);
        const bool evicts = evicts_always(&p);
        const bool fits_so = type == DT_KV_F16 ? choose_prefill(&p, params.prefill, params.n_batch, evicts) : choose(&p, evicts);
        needed = fits_so ? excess_of(session, &p, held) : p.failed ? UINT64_MAX : p.bytes;
    }
    free_plan(&p);
    return needed == UINT64_MAX ? UINT64_MAX : limit;
}

uint64_t dt_session_kv_bound(const dt_session *session, int64_t n_tokens, int64_t n_prompt) {
    if (session == NULL) {
        return 0;
    }
    const dt_hparams *hp = &session->model->decoder->hp;
    dt_session_params params = session->params;
    params.n_expected = (int32_t)DT_MIN(DT_MAX(n_tokens, 1), (int64_t)params.n_ctx); /* past the context lanes hold no more */
    params.n_prompt = (int32_t)DT_MIN(DT_MAX(n_prompt, 0), (int64_t)params.n_ctx);
    int32_t *lengths = new_lengths(hp);
    plan p;
    uint64_t bytes = UINT64_MAX;
    if (plan_of(session, &params, &p) && lengths != NULL) {
        for (int32_t i = 0, lane = 0; i < hp->n_layers; i++) {
            for (int32_t j = 0; j < hp->n_kv_heads[i]; j++) {
                lengths[lane++] = p.longest[i];
            }
        }
        bytes = bound_of(session, &p, session->kv, lengths, false);
    }
    free(lengths);
    free_plan(&p);
    return bytes;
}
