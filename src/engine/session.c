/*
 * dt_session: one timeline. Brings the cache to what the caller says the conversation is, computing only what is new, and
 * runs eviction rounds between steps.
 *
 * Invariants: tokens[0, n_tokens) are exactly the tokens the cache was built from; between calls nothing in the cache
 * is uncommitted; a rewind never goes to before the last round that evicted something, since what it took does not come back, but
 * by way of a snapshot (snapshot.c). Positions in the cache are those of the conversation until it passes the context
 * (find_headroom). A session and its forks count their cache's memory together, since they share blocks.
 */
#include "engine/eviction_config.h"
#include "engine/kv_plan.h"
#include "engine/session.h"

#include <stdlib.h>
#include <string.h>

#define DEFAULT_BATCH 512
#define DEFAULT_BLOCK 256
#define DEFAULT_SNAPSHOTS 2 /* the last reply's beginning, and the one before, where a changed question begins */
#define LEAST_CHUNK 32      /* tokens that a step can always take past the context; with room for fewer it is the end */
#define SCORE_BATCH 64      /* every row has logits there: [SCORE_BATCH][V] */

/* ---- life ---- */

static dt_status fill_defaults(dt_session *s, const dt_session_params *params, dt_error *error) {
    const dt_session_params defaults = {0};
    dt_session_params *p = &s->params;
    const dt_model_info *info = dt_model_get_info(s->model);
    *p = params ? *params : defaults;
    const struct {
        const char *name;
        int32_t value;
    } counts[] = {{"n_ctx", p->n_ctx},
                  {"n_batch", p->n_batch},
                  {"n_threads", p->n_threads},
                  {"n_threads_batch", p->n_threads_batch},
                  {"kv_block_tokens", p->kv_block_tokens},
                  {"n_expected", p->n_expected},
                  {"n_prompt", p->n_prompt}};
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        if (counts[i].value < 0) {
            return dt_fail(error, DT_ERR_ARGUMENT, "%s can't be negative, but is %d; 0 stands for the default", counts[i].name,
                           counts[i].value);
        }
    }
    if ((unsigned)p->kv_type > DT_KV_INT8 || (unsigned)p->prefill > DT_PREFILL_STREAMING || (unsigned)p->evict > DT_EVICT_HELD) {
        return dt_fail(error, DT_ERR_ARGUMENT,
                       "kv_type, prefill or evict (%d, %d, %d) is none of the values that deeptutor.h names", (int)p->kv_type,
                       (int)p->prefill, (int)p->evict);
    }
    p->n_ctx = p->n_ctx > 0 ? p->n_ctx : info->n_ctx_train;
    p->n_batch = DT_MIN(p->n_batch > 0 ? p->n_batch : DEFAULT_BATCH, p->n_ctx);
    s->asked = (dt_kv_asked){.n_batch = p->n_batch, .kv_type = p->kv_type, .prefill = p->prefill};
    p->kv_block_tokens = p->kv_block_tokens > 0 ? p->kv_block_tokens : DEFAULT_BLOCK;
    p->n_snapshots = p->n_snapshots == 0 && !p->group ? DEFAULT_SNAPSHOTS : DT_MIN(p->n_snapshots, DT_MAX_SNAPSHOTS);
    if (p->kv_block_tokens % DT_KV_GROUP != 0) {
        return dt_fail(error, DT_ERR_ARGUMENT, "a cache block of %d tokens is not a multiple of %d", p->kv_block_tokens,
                       DT_KV_GROUP);
    }
    if (p->kv_block_tokens > DT_MAX(p->n_ctx, DEFAULT_BLOCK)) {
        return dt_fail(error, DT_ERR_ARGUMENT, "a cache block of %d tokens is larger than the context of %d", p->kv_block_tokens,
                       p->n_ctx);
    }
    if (p->n_ctx > info->n_ctx_train) {
        dt_log(DT_LOG_WARN,
               "context of %d tokens is longer than the %d the model was trained with; quality will suffer beyond that", p->n_ctx,
               info->n_ctx_train);
    }
    return DT_OK;
}

static dt_status join_group(dt_session *s, dt_error *error) {
    dt_session_params *p = &s->params;
    if (!p->group) {
        const dt_group_params own = {.n_threads = p->n_threads, .n_threads_batch = p->n_threads_batch, .kernel = p->kernel};
        const dt_status status = dt_group_new_private(s->model, &own, &s->group, error);
        p->kernel = status == DT_OK ? s->group->kernel_name : NULL;
        return status;
    }
    if (p->group->model != s->model) {
        return dt_fail(error, DT_ERR_ARGUMENT, "the group is of another model than the session");
    }
    s->group = p->group;
    p->kernel = s->group->kernel_name;
    s->group->n_sessions++;
    return DT_OK;
}

int32_t dt_session_shift(const dt_session *s) { return dt_kv_shift(s->kv); }
int32_t dt_session_next_position(const dt_session *s) { return s->n_tokens - dt_kv_shift(s->kv); }

/* Where every layer evicts, or sees no more than a window, its tokens can always be moved together so that no query is farther from
 * a key than the context is long, and the conversation may go on beyond it. Positions must then be free for a chunk, and for a
 * repetition where scores need one. */
static int64_t chunk_past_context(const dt_session *s, const dt_budget *budgets, bool *out_repeats) {
    int64_t kept = 0;
    bool repeats = false;
    for (int32_t i = 0; i < s->model->info.n_layers; i++) {
        const dt_budget *b = &budgets[i];
        const int64_t window = s->model->info.windows[i],
                      max = b->policy != NULL ? (int64_t)b->max_cache_size + b->memory_slots : INT32_MAX;
        /* a window moves where it leaves a position free */
        const int32_t beside = DT_MAX(b->policy != NULL ? b->sink_tokens : 0, 1);
        const int64_t seen = window > 0 ? window + beside : INT32_MAX;
        kept = DT_MAX(kept, DT_MIN(seen, max));
        repeats = repeats || dt_policy_repeats(b->policy);
    }
    const int64_t room = s->params.n_ctx - kept;
    const int64_t chunk = DT_MIN(repeats ? DT_MAX(room / 2, room - DT_REPEAT_CHUNK) : room, (int64_t)s->params.n_batch);
    const bool may_move = s->params.evict == DT_EVICT_ALWAYS && dt_kv_layer(s->kv, 0)->keeps_origins &&
                          chunk >= DT_MIN(LEAST_CHUNK, s->params.n_batch);
    *out_repeats = repeats;
    return may_move ? chunk : 0;
}

bool dt_session_passes_context(const dt_session *s, const dt_budget *budgets) {
    bool repeats;
    return chunk_past_context(s, budgets, &repeats) > 0;
}

static void find_headroom(dt_session *s, const dt_budget *budgets) {
    bool repeats = false;
    const int64_t chunk = chunk_past_context(s, budgets, &repeats);
    s->chunk = chunk > 0 ? (int32_t)chunk : s->params.n_batch;
    s->headroom = (int32_t)(chunk + (repeats ? DT_MIN(chunk, DT_REPEAT_CHUNK) : 0));
    s->free_after = repeats ? s->headroom : 0;
}

void dt_session_set_limit(dt_session *s) {
    s->max_tokens = s->headroom > 0 ? INT32_MAX - s->params.n_batch
                                    : DT_MIN(s->params.n_ctx, INT32_MAX - dt_session_shift(s)) + dt_session_shift(s);
}

static dt_status new_cache(dt_session *s, const dt_budget *budgets, dt_error *error) {
    dt_kv_layer_params *layers = dt_kv_plan_layers(s->model, &s->params, budgets);
    if (!layers) {
        return dt_fail_memory(error, (size_t)s->model->info.n_layers * sizeof *layers, "the cache");
    }
    dt_status status = dt_kv_new(&s->kv_memory->memory, layers, s->model->info.n_layers, &s->kv, error);
    bool any_elsewhere = false;
    for (int32_t i = 0; i < s->model->info.n_layers; i++) {
        any_elsewhere = any_elsewhere || layers[i].format.elsewhere;
    }
    if (status == DT_OK && any_elsewhere) {
        dt_kv_home *home = NULL;
        status = dt_device_cache_new(s->model->decoder, &s->kv_memory->memory, layers, &home, error);
        dt_kv_set_home(s->kv, home);
    }
    free(layers);
    return status;
}

/* Positions that a lane which shares a budget leaves free. */
static int32_t room_when_shared(const dt_session *s, bool repeats) {
    const int32_t chunk = DT_MAX(DT_MIN(s->params.n_batch, s->params.n_ctx / 8), LEAST_CHUNK);
    return chunk + (repeats ? DT_MIN(chunk, DT_REPEAT_CHUNK) : 0); /* find_headroom */
}

/* A lane that shares a budget without a bound of its own leaves so much of the context free that the conversation can go past it.
 * Not where the budget is as large as the context: then nothing is to be evicted within it. */
static void bound_lanes(const dt_session *s, dt_budget *budgets, int32_t total) {
    const int32_t n_layers = s->model->info.n_layers, n_ctx = s->params.n_ctx;
    const int32_t n_sharing = dt_budgets_that_evict(budgets, n_layers);
    bool repeats = false;
    for (int32_t i = 0; i < n_layers; i++) {
        repeats = repeats || dt_policy_repeats(budgets[i].policy);
    }
    const int32_t room = room_when_shared(s, repeats);
    if (s->params.evict != DT_EVICT_ALWAYS || total <= 0 || n_sharing == 0 || total / n_sharing >= n_ctx - room) {
        return;
    }
    for (int32_t i = 0; i < n_layers; i++) {
        dt_budget *b = &budgets[i];
        const int32_t max = n_ctx - room - b->memory_slots;
        if (b->policy != NULL && b->max_cache_size == INT32_MAX &&
            max > DT_MAX(b->sink_tokens + b->recent_window, b->min_cache_size)) {
            b->max_cache_size = max;
            b->context_bounds = true;
        }
    }
}

static dt_status keep_asked(dt_session *s, const dt_budget *budgets, int32_t total, dt_error *error) {
    const size_t n = (size_t)s->model->info.n_layers;
    s->asked.total_cache_size = total;
    s->asked.budgets = malloc(n * sizeof *budgets);
    if (s->asked.budgets == NULL) {
        return dt_fail_memory(error, n * sizeof *budgets, "the session");
    }
    for (size_t i = 0; i < n; i++) {
        s->asked.budgets[i] = budgets[i];
        s->asked.budgets[i].lane_max = NULL;
        s->asked.budgets[i].weights = NULL;
    }
    return DT_OK;
}

/* The cache, after settings and budgets were fitted into the memory that was granted. */
static dt_status make_cache(dt_session *s, const dt_session *from, dt_error *error) {
    const int32_t n_layers = s->model->info.n_layers;
    dt_budget *budgets = calloc((size_t)n_layers, sizeof *budgets);
    if (!budgets) {
        return dt_fail_memory(error, (size_t)n_layers * sizeof *budgets, "the cache");
    }
    const dt_eviction *eviction = s->params.eviction;
    int32_t total = eviction ? dt_eviction_total(eviction) : 0;
    for (int32_t i = 0; eviction && i < n_layers; i++) {
        budgets[i] = *dt_eviction_budget(eviction, i);
    }
    bound_lanes(s, budgets, total);
    s->weights = dt_score_weights_share(eviction ? eviction->weights : NULL);
    s->params.eviction = NULL; /* the caller may free it after this */
    dt_status status = keep_asked(s, budgets, total, error);
    if (status == DT_OK && !from) {
        status = dt_kv_plan_fit(s->model, &s->params, budgets, &total, &s->kv_most, error);
    }
    if (status == DT_OK) {
        status = from ? dt_kv_fork(from->kv, &s->kv, error) : new_cache(s, budgets, error);
    }
    if (status == DT_OK) {
        status = dt_kv_set_budgets(s->kv, budgets, total, error);
        find_headroom(s, budgets);
        dt_session_set_limit(s);
    }
    free(budgets);
    return status;
}

static dt_status share_memory(dt_session *s, dt_shared_memory *with, dt_error *error) {
    if (with) {
        atomic_fetch_add(&with->references, 1);
        with->memory.limit = (size_t)DT_MIN(s->params.kv_memory, (uint64_t)SIZE_MAX); /* not that of snapshots any more */
        s->kv_memory = with;
        return DT_OK;
    }
    s->kv_memory = malloc(sizeof *s->kv_memory);
    if (!s->kv_memory) {
        return dt_fail_memory(error, sizeof *s->kv_memory, "the session");
    }
    dt_memory_init(&s->kv_memory->memory);
    s->kv_memory->memory.parent = s->group->is_private ? NULL : &s->group->kv_memory;
    s->kv_memory->memory.limit = (size_t)DT_MIN(s->params.kv_memory, (uint64_t)SIZE_MAX);
    atomic_init(&s->kv_memory->references, 1);
    return DT_OK;
}

/* from: NULL, or the session whose cache the new one begins with. */
static dt_status session_new(const dt_model *model, const dt_session_params *params, const dt_session *from, dt_session **out,
                             dt_error *error) {
    dt_session *s = calloc(1, sizeof *s);
    if (!s) {
        return dt_fail_memory(error, sizeof *s, "the session");
    }
    s->model = model;
    dt_memory_init(&s->work_memory);
    dt_status status = fill_defaults(s, params, error);
    if (status == DT_OK && s->params.eviction) {
        status = dt_eviction_check_model(s->params.eviction, &model->info, error);
    }
    if (status == DT_OK) {
        status = join_group(s, error);
    }
    if (status == DT_OK) {
        status = share_memory(s, from ? from->kv_memory : NULL, error);
    }
    if (status == DT_OK) {
        s->observe_layer = calloc((size_t)model->info.n_layers, sizeof *s->observe_layer);
        status = s->observe_layer ? DT_OK : dt_fail_memory(error, (size_t)model->info.n_layers, "the session");
    }
    if (status == DT_OK) {
        status = make_cache(s, from, error);
    }
    if (status != DT_OK) {
        dt_session_free(s);
        return status;
    }
    *out = s;
    return DT_OK;
}

dt_status dt_session_new(const dt_model *model, const dt_session_params *params, dt_session **out, dt_error *error) {
    return DT_LACKS(error, model, out) ? DT_ERR_ARGUMENT : session_new(model, params, NULL, out, error);
}

static size_t token_bytes(const dt_session *s) { return (size_t)s->token_capacity * sizeof *s->tokens; }

void dt_session_free(dt_session *session) {
    if (!session) {
        return;
    }
    dt_snapshots_drop(session, 0);
    dt_kv_free(session->kv);
    if (session->kv_memory && atomic_fetch_sub(&session->kv_memory->references, 1) == 1) {
        free(session->kv_memory);
    }
    dt_score_weights_free(session->weights);
    if (session->group && session->group->is_private) {
        dt_group_free(session->group);
    } else if (session->group) {
        session->group->n_sessions--;
    }
    free(session->asked.budgets);
    free(session->observe_layer);
    dt_memory_free(&session->work_memory, session->tokens, token_bytes(session));
    free(session->own_logits);
    free(session->note);
    free(session);
}

dt_status dt_session_check_idle(const dt_session *session, dt_error *error) {
    return !dt_group_is_asking(session->group)
               ? DT_OK
               : dt_fail(error, DT_ERR_ARGUMENT,
                         "the session, or one of its group, is at work; from a token, progress or logits function sessions may be "
                         "looked at, but not be changed, copied or saved");
}

/* ---- steps ---- */

bool dt_session_makes_room(dt_session *s, dt_status status, dt_error *error) {
    const bool again = status == DT_ERR_MEMORY && dt_snapshot_yield(s);
    if (again && error) {
        error->code = DT_OK;
    }
    return again;
}

dt_status dt_session_grow(dt_session *s, int32_t n, dt_error *error) {
    dt_status status;
    do {
        status = dt_kv_append(s->kv, dt_session_next_position(s), n, error);
    } while (dt_session_makes_room(s, status, error));
    return status;
}

dt_status dt_session_slide(dt_session *s, dt_error *error) {
    int32_t whole_from = s->whole_from - dt_session_shift(s);
    dt_status status;
    do {
        status = dt_kv_slide(s->kv, dt_session_next_position(s), &whole_from, error);
    } while (dt_session_makes_room(s, status, error));
    s->whole_from = whole_from + dt_session_shift(s);
    return status;
}

dt_status dt_session_reserve_tokens(dt_session *s, int32_t n_more, dt_error *error) {
    const int32_t n = s->n_tokens + n_more;
    if (n <= s->token_capacity) {
        return DT_OK;
    }
    const int32_t capacity = (int32_t)DT_MIN((int64_t)n + n / 2 + DEFAULT_BATCH, (int64_t)INT32_MAX);
    int32_t *tokens = dt_memory_grow(&s->work_memory, s->tokens, token_bytes(s), (size_t)capacity * sizeof *tokens);
    if (!tokens) {
        return dt_fail_memory(error, (size_t)capacity * sizeof *tokens, "the tokens");
    }
    s->tokens = tokens;
    s->token_capacity = capacity;
    return DT_OK;
}

/* A step of this session alone. *logits (may be NULL): after the last n_outputs of its tokens, the graph's. */
static dt_status step(dt_session *s, const int32_t *tokens, int32_t n, int32_t n_outputs, int64_t n_follow, const float **logits,
                      dt_error *error) {
    dt_part part = {.session = s, .tokens = tokens, .n = n, .n_outputs = n_outputs, .n_follow = n_follow, .error = error};
    dt_group_compute(s->group, &part, 1);
    if (logits) {
        *logits = part.logits;
    }
    return part.status;
}

dt_status dt_session_own_logits(dt_session *s, const float *logits, dt_error *error) {
    const size_t bytes = (size_t)s->model->info.n_vocab * sizeof *s->own_logits;
    if (!s->own_logits) {
        s->own_logits = malloc(bytes);
    }
    if (!s->own_logits) {
        return dt_fail_memory(error, bytes, "the logits");
    }
    if (logits != s->own_logits) {
        memcpy(s->own_logits, logits, bytes);
    }
    s->logits = s->own_logits;
    return DT_OK;
}

dt_status dt_session_set_logits(dt_session *s, const float *logits, dt_error *error) {
    s->logits = logits;
    return s->group->is_private ? DT_OK : dt_session_own_logits(s, logits, error);
}

/* ---- past the context ---- */

dt_status dt_session_close_up(dt_session *s, int64_t n, dt_error *error) {
    if (s->headroom == 0 || dt_session_next_position(s) + n <= s->params.n_ctx) {
        return DT_OK;
    }
    const int32_t before = dt_session_shift(s);
    dt_status status = dt_session_observe_elsewhere(s, true, error); /* while queries and keys are where they were */
    if (status != DT_OK) {
        return status;
    }
    do {
        status = dt_kv_close_up(s->kv, s->params.n_ctx - s->headroom, error);
    } while (dt_session_makes_room(s, status, error));
    if (status != DT_OK || dt_session_shift(s) > before) { /* also where it failed half way, behind what windows have passed */
        s->whole_from = s->n_tokens;
    }
    if (status == DT_OK && dt_session_shift(s) > before) {
        dt_log(before == 0 ? DT_LOG_INFO : DT_LOG_DEBUG,
               "after %d tokens the context of %d is used up; those that were kept move together into its first %d", s->n_tokens,
               s->params.n_ctx, dt_session_next_position(s));
    }
    return status == DT_OK ? dt_graph_settle(s->group->graph, s->kv, error) : status;
}

/* ---- rounds ---- */

/* What is due: peaks where scores come from them, then a round. */
dt_status dt_session_evict(dt_session *s, dt_error *error) {
    const int64_t start = dt_clock_us();
    const dt_workers workers = dt_graph_workers(s->group->graph);
    dt_status status = dt_graph_settle(s->group->graph, s->kv, error); /* a round may read what is elsewhere */
    status = status == DT_OK ? dt_session_make_peaks(s, error) : status;
    if (status == DT_OK && s->params.evict != DT_EVICT_HELD && !s->evicted_once) {
        status = dt_session_observe_elsewhere(s, false, error);
    }
    if (status == DT_OK && s->params.evict != DT_EVICT_HELD && !s->evicted_once) {
        do {
            dt_round_result result;
            status = dt_kv_round(s->kv, dt_session_next_position(s), s->params.evict == DT_EVICT_ONCE, &workers, &result, error);
            if (result.has_dropped) {
                s->whole_from = s->n_tokens;
            }
            s->stats.eviction_rounds += result.n_rounds;
            s->stats.evicted_tokens += result.n_evicted;
        } while (dt_session_makes_room(s, status, error));
    }
    status = status == DT_OK ? dt_session_close_up(s, s->free_after, error) : status;
    s->stats.eviction_ms += (double)(dt_clock_us() - start) / 1000.0;
    return status;
}

/* ---- drafts ---- */

static bool may_evict(const dt_session *s) {
    bool any = false;
    for (int32_t i = 0; i < s->model->info.n_layers; i++) {
        any = any || dt_kv_layer(s->kv, i)->budget.policy != NULL;
    }
    return any && s->params.evict != DT_EVICT_HELD && !s->evicted_once;
}

int32_t dt_session_tokens_to_round(const dt_session *s) {
    int64_t most = dt_kv_slide_room(s->kv) + 1;
    const int64_t shared_room = dt_kv_shared_room(s->kv);
    for (int32_t i = 0; may_evict(s) && i < s->model->info.n_layers; i++) {
        const int64_t room = dt_kv_room(s->kv, i, shared_room);
        most = room < most ? room + 1 : most;
    }
    if (s->headroom > 0) {
        most = DT_MIN(most, (int64_t)s->params.n_ctx - dt_session_next_position(s) - DT_MAX(s->free_after - 1, 0));
    }
    return (int32_t)DT_MIN(DT_MAX(most, 1), (int64_t)INT32_MAX);
}

dt_status dt_session_draft(dt_session *s, const int32_t *tokens, int32_t n, const float **logits, dt_error *error) {
    const int64_t start = dt_clock_us();
    const dt_status reserved = dt_session_reserve_tokens(s, n, error);
    if (reserved != DT_OK) {
        return reserved;
    }
    dt_sequence sequence = {.tokens = tokens,
                            .n = n,
                            .first_position = dt_session_next_position(s),
                            .n_outputs = n,
                            .observe_layer = dt_session_choose_observed(s, n, 0) ? s->observe_layer : NULL,
                            .n_observed = n,
                            .observe_apart = true};
    s->logits = NULL;
    const dt_status status = dt_group_compute_one(s, &sequence, logits, error);
    if (status == DT_OK) {
        memmove(s->tokens + s->n_tokens, tokens, (size_t)n * sizeof *tokens);
        s->draft_logits = *logits;
        s->n_draft = n;
    }
    s->stats.decode_ms += (double)(dt_clock_us() - start) / 1000.0;
    return status;
}

/* As fold_masses after each of the first n_keep tokens of the draft: with what the lane had then, where it was observed then. */
static void fold_kept(dt_session *s, int32_t n_keep) {
    const int64_t shared_room = dt_kv_shared_room(s->kv);
    for (int32_t i = 0; i < s->model->info.n_layers; i++) {
        for (int32_t lane = 0; s->observe_layer[i] && lane < s->model->info.n_kv_heads[i]; lane++) {
            dt_kv_lane_view view;
            dt_kv_lane(s->kv, i, lane, &view);
            for (int32_t t = 0; t < n_keep; t++) {
                if (dt_session_observes(s, i, (int64_t)t + 1 - s->n_draft, shared_room)) {
                    dt_mass_fold(view.recent_mass, dt_graph_mass(s->group->graph, 0, i, lane, t),
                                 view.n_entries - s->n_draft + t + 1, 1);
                }
            }
        }
    }
}

dt_status dt_session_keep(dt_session *s, int32_t n_keep, dt_error *error) {
    const int64_t start = dt_clock_us();
    fold_kept(s, n_keep);
    dt_kv_commit(s->kv, n_keep);
    s->n_tokens += n_keep;
    s->stats.draft_proposed += s->n_draft - 1;
    s->stats.draft_accepted += DT_MAX(n_keep - 1, 0);
    s->stats.decode_tokens += n_keep;
    s->n_draft = 0;
    dt_status status = dt_session_slide(s, error);
    if (status == DT_OK && n_keep > 0) {
        status = dt_session_set_logits(s, s->draft_logits + (size_t)(n_keep - 1) * (size_t)s->model->info.n_vocab, error);
    }
    if (status == DT_OK) {
        status = dt_session_evict(s, error);
    }
    s->stats.decode_ms += (double)(dt_clock_us() - start) / 1000.0;
    return status;
}

/* ---- forks ---- */

/* False where the peaks that `from` has are not those that the session's weights foretell. */
static bool foretells_alike(const dt_session *s, const dt_session *from) {
    bool alike = true;
    for (int32_t i = 0; i < s->model->info.n_layers; i++) {
        const dt_budget *own = &dt_kv_layer(s->kv, i)->budget, *other = &dt_kv_layer(from->kv, i)->budget;
        const size_t bytes = (size_t)s->model->info.n_kv_heads[i] * (size_t)own->n_weights * sizeof *own->weights;
        const bool foretells = dt_budget_needs_weights(own);
        alike = alike && (!foretells || (own->policy == other->policy && own->n_weights == other->n_weights &&
                                         memcmp(own->weights, other->weights, bytes) == 0));
    }
    return alike;
}

static dt_status copy_conversation(dt_session *s, const dt_session *from, dt_error *error) {
    const dt_status status = dt_session_reserve_tokens(s, from->n_tokens, error);
    if (status != DT_OK) {
        return status;
    }
    if (from->logits) {
        const dt_status copied = dt_session_own_logits(s, from->logits, error);
        if (copied != DT_OK) {
            return copied;
        }
    }
    if (from->n_tokens > 0) {
        memcpy(s->tokens, from->tokens, (size_t)from->n_tokens * sizeof *s->tokens);
    }
    s->n_tokens = from->n_tokens;
    s->whole_from = from->whole_from;
    s->peaks_until = foretells_alike(s, from) ? from->peaks_until : 0;
    return DT_OK;
}

dt_status dt_session_fork(const dt_session *from, const dt_eviction *eviction, dt_evict evict, dt_session **out, dt_error *error) {
    if (DT_LACKS(error, from, out)) {
        return DT_ERR_ARGUMENT;
    }
    dt_session_params params = from->params;
    const dt_status idle = dt_session_check_idle(from, error);
    if (idle != DT_OK) {
        return idle;
    }
    params.eviction = eviction;
    params.evict = evict;
    params.kernel = from->group->kernel_name; /* the caller's text may be gone */
    dt_session *s = NULL;
    dt_status status = session_new(from->model, &params, from, &s, error);
    if (status == DT_OK) {
        status = copy_conversation(s, from, error);
    }
    if (status == DT_OK && s->n_tokens > 0) {
        status = dt_session_evict(s, error);
        s->evicted_once = evict == DT_EVICT_ONCE;
    }
    if (status != DT_OK) {
        dt_session_free(s);
        return status;
    }
    *out = s;
    return DT_OK;
}

/* ---- sync ---- */

static size_t common_prefix(const dt_session *s, const int32_t *tokens, size_t n) {
    const size_t most = DT_MIN(n, (size_t)s->n_tokens);
    size_t same = 0;
    while (same < most && s->tokens[same] == tokens[same]) {
        same++;
    }
    return same;
}

/* The largest max_cache_size with which the conversation may pass its context (find_headroom, bound_lanes), where layers evict that
 * have a larger one now; 0: there is none. */
static int64_t passing_budget(const dt_session *s) {
    const int32_t n_layers = s->model->info.n_layers, n_ctx = s->params.n_ctx;
    const bool shares = dt_kv_total_cache_size(s->kv) > 0;
    int32_t slots = 0, least = 1, window = 0;
    bool repeats = false;
    for (int32_t i = 0; i < n_layers; i++) {
        const dt_budget *b = &dt_kv_layer(s->kv, i)->budget;
        if (b->policy == NULL) {
            window = DT_MAX(window, s->model->info.windows[i]);
        } else {
            slots = DT_MAX(slots, b->memory_slots);
            /* a smaller size of its own takes a layer's recent_window and min_cache_size down with it */
            least = DT_MAX(least, b->sink_tokens + (shares ? DT_MAX(b->recent_window, b->min_cache_size - b->sink_tokens) : 1));
            repeats = repeats || dt_policy_repeats(b->policy);
        }
    }
    int32_t room = shares ? room_when_shared(s, repeats) : (repeats ? 2 : 1) * DT_MIN(LEAST_CHUNK, s->params.n_batch);
    const int64_t most = (int64_t)n_ctx - room - slots;
    if (window >= n_ctx - room || most < least || (shares && most == least)) {
        return 0;
    }
    return shares ? n_ctx - room - 1 : most; /* a shared one is that of the mean lane, without slots */
}

/* What to do where a conversation may not pass its context. */
static dt_status fail_at_context(const dt_session *s, const char *what, int32_t most, dt_error *error) {
    const bool always = s->params.evict == DT_EVICT_ALWAYS, every_layer = dt_kv_layer(s->kv, 0)->keeps_origins;
    const int64_t budget = always && every_layer && may_evict(s) ? passing_budget(s) : 0;
    char advice[160] = "shorten the text";
    if (budget > 0) {
        snprintf(advice, sizeof advice, "a max_cache_size of at most %lld lets the conversation go past it; else shorten the text",
                 (long long)budget);
    } else if (always && !every_layer && may_evict(s)) {
        snprintf(advice, sizeof advice, "let every layer evict and the conversation goes past it, shorten the text");
    } else if (always && !may_evict(s)) {
        snprintf(advice, sizeof advice, "shorten the text, let layers evict (--cache-eviction with --max-cache-size %d)",
                 s->params.n_ctx / 2);
    }
    return dt_fail(error, DT_ERR_LIMIT,
                   "%s don't fit into a context of %d (-c); %s, or raise the context length where the model can follow (it was "
                   "trained with %d)",
                   what, most, advice, s->model->info.n_ctx_train);
}

static dt_status fail_too_long(const dt_session *s, size_t n, int32_t most, dt_error *error) {
    char what[64];
    snprintf(what, sizeof what, "%zu tokens", n);
    return fail_at_context(s, what, most, error);
}

/* Takes the session back to its first `position` tokens, or to fewer: to a snapshot, or to nothing, when that part is no longer
 * whole. n: tokens that it shall have. */
static dt_status rewind_to(dt_session *s, int32_t position, size_t n, dt_sync_result *result, dt_error *error) {
    const int32_t n_before = s->n_tokens, whole_from = s->whole_from;
    result->how = DT_SYNC_REWOUND;
    const bool restored = (position < s->whole_from || dt_snapshot_is_near(s, position)) && dt_snapshot_restore(s, position);
    if (position < s->whole_from && !restored) {
        if (s->headroom == 0 && n > (size_t)s->params.n_ctx) { /* it has moved on past the context, where it can't get again */
            return fail_too_long(s, n, s->params.n_ctx, error);
        }
        dt_log(
            DT_LOG_INFO,
            "session: rebuilt, 0 tokens reused: the conversation changed at token %d, before token %d, up to which the cache is no "
            "longer whole",
            position, whole_from);
        dt_snapshots_drop(s, 0);
        dt_kv_clear(s->kv);
        s->logits = NULL;
        s->n_tokens = 0;
        s->whole_from = 0;
        s->peaks_until = 0;
        s->evicted_once = false;
        dt_session_set_limit(s);
        result->how = DT_SYNC_REBUILT;
        return DT_OK;
    }
    if (position < s->n_tokens) {
        /* What is taken back may be another's text (a server's conversations share beginnings), and has given attention: scores begin
         * anew, with that of the last tokens that stay. */
        const bool scored = dt_kv_has_masses(s->kv);
        position = scored ? DT_MAX(s->whole_from, position - DT_REPLAYED_TOKENS) : position;
        dt_status status;
        do {
            status = dt_kv_truncate(s->kv, position - dt_session_shift(s), error);
        } while (dt_session_makes_room(s, status, error));
        if (status != DT_OK) {
            return status;
        }
        if (scored) {
            dt_kv_forget_masses(s->kv);
        }
        s->n_tokens = position;
        s->logits = NULL;
        s->peaks_until = DT_MIN(s->peaks_until, s->n_tokens);
        dt_snapshots_drop(s, position);
    }
    dt_log(s->is_draft ? DT_LOG_DEBUG : DT_LOG_INFO, "session: rewound to token %d of %d%s, %d tokens reused", s->n_tokens,
           n_before, restored ? " by a snapshot" : "", s->n_tokens);
    return DT_OK;
}

static dt_status prefill(dt_session *s, const int32_t *tokens, size_t n, dt_error *error) {
    dt_status status = DT_OK;
    while (status == DT_OK && (size_t)s->n_tokens < n) {
        const size_t left = n - (size_t)s->n_tokens;
        const int32_t chunk = (int32_t)DT_MIN(left, (size_t)(s->streams ? s->chunk : s->params.n_batch));
        status = step(s, tokens + s->n_tokens, chunk, 1, (int64_t)left - chunk, NULL, error);
        if (status == DT_OK && (s->streams || (size_t)s->n_tokens == n)) {
            status = dt_session_evict(s, error);
        }
        s->progress_done += status == DT_OK ? chunk : 0;
        if (status == DT_OK && s->progress) {
            s->progress_last_us = dt_clock_us();
            dt_group_begin_asking(s->group);
            const bool goes_on = s->progress(s->progress_done, s->progress_total, s->progress_user);
            dt_group_end_asking(s->group);
            if (!goes_on && (size_t)s->n_tokens < n) {
                status = dt_fail(error, DT_ERR_CANCELLED, "cancelled");
            }
        }
    }
    return status;
}

dt_status dt_session_check_room(const dt_session *s, int64_t n_more, dt_error *error) {
    if (n_more <= s->max_tokens - s->n_tokens) {
        return DT_OK;
    }
    char what[80];
    snprintf(what, sizeof what, "%lld more tokens after %d", (long long)n_more, s->n_tokens);
    return fail_at_context(s, what, s->max_tokens, error);
}

dt_status dt_session_reuse(dt_session *session, const int32_t *tokens, size_t n, dt_sync_result *result, dt_error *error) {
    dt_session *s = session;
    if (DT_LACKS(error, session, result) || (n > 0 && DT_LACKS(error, tokens))) {
        return DT_ERR_ARGUMENT;
    }
    *result = (dt_sync_result){.how = DT_SYNC_NOTHING};
    const dt_status idle = dt_session_check_idle(s, error);
    if (idle != DT_OK) {
        return idle;
    }
    s->n_to_come = 0;
    if (n == 0) {
        return dt_fail(error, DT_ERR_ARGUMENT, "the conversation is empty; give at least one token");
    }
    if (n > (size_t)s->max_tokens) {
        return fail_too_long(s, n, s->max_tokens, error);
    }
    size_t keep = common_prefix(s, tokens, n);
    bool back = keep < (size_t)s->n_tokens;
    if (keep == n && (back || !s->logits)) { /* the last token's logits have to be computed again, if no snapshot has them */
        const bool has_them = dt_snapshot_at(s, (int32_t)n);
        keep = has_them ? n : n - 1;
        back = true;
    }
    dt_status status = DT_OK;
    if (back) {
        status = rewind_to(s, (int32_t)keep, n, result, error);
    } else if (keep < n) {
        result->how = DT_SYNC_EXTENDED;
        dt_log(DT_LOG_DEBUG, "session: extended by %zu tokens, %zu reused", n - keep, keep);
    }
    result->reused_tokens = s->n_tokens;
    return status;
}

dt_status dt_session_begin_reading(dt_session *s, int64_t n, dt_error *error) {
    s->streams = s->params.prefill == DT_PREFILL_STREAMING;
    const dt_status status = s->streams ? DT_OK : dt_session_close_up(s, n, error);
    const int64_t at_once = dt_session_next_position(s) + n;
    if (status == DT_OK && !s->streams && s->headroom > 0 && at_once > s->params.n_ctx) {
        dt_log(DT_LOG_INFO, "%lld tokens are too many for the context of %d at once; they are read as with --prefill streaming",
               (long long)at_once, s->params.n_ctx);
        s->streams = true;
    }
    return status;
}

dt_status dt_session_sync(dt_session *session, const int32_t *tokens, size_t n, dt_progress_fn progress, void *user,
                          dt_sync_result *result, dt_error *error) {
    dt_session *s = session;
    dt_sync_result local = {0};
    if (DT_LACKS(error, session) || (n > 0 && DT_LACKS(error, tokens))) { /* by this function's name */
        return DT_ERR_ARGUMENT;
    }
    result = result ? result : &local;
    const int64_t start = dt_clock_us();
    dt_status status = dt_session_reuse(s, tokens, n, result, error);
    if (status != DT_OK) {
        return status;
    }
    s->progress = progress;
    s->progress_user = user;
    s->progress_done = 0;
    s->progress_total = (int64_t)n - s->n_tokens;
    s->progress_last_us = start;
    s->group->syncing = s;
    status = dt_session_begin_reading(s, s->progress_total, error);
    status = status == DT_OK ? prefill(s, tokens, n, error) : status;
    s->evicted_once = s->evicted_once || (status == DT_OK && s->params.evict == DT_EVICT_ONCE);
    s->group->syncing = NULL;
    s->progress = NULL;
    if (status == DT_OK && result->how != DT_SYNC_NOTHING) {
        dt_snapshot_take(s);
    }
    result->computed_tokens = s->n_tokens - result->reused_tokens;
    result->prefill_ms = (double)(dt_clock_us() - start) / 1000.0;
    s->stats.prefill_tokens += result->computed_tokens;
    s->stats.prefill_ms += result->prefill_ms;
    return status;
}

dt_status dt_session_append(dt_session *session, int32_t token, dt_error *error) {
    dt_session *s = session;
    if (DT_LACKS(error, session)) {
        return DT_ERR_ARGUMENT;
    }
    if (s->n_tokens >= s->max_tokens) {
        return dt_fail(error, DT_ERR_LIMIT, "the context of %d tokens is full (-c); the model was trained with %d", s->max_tokens,
                       s->model->info.n_ctx_train);
    }
    const int64_t start = dt_clock_us();
    dt_status status = dt_session_check_idle(s, error);
    if (status == DT_OK) {
        status = step(s, &token, 1, 1, 0, NULL, error);
    }
    if (status == DT_OK) {
        status = dt_session_evict(s, error);
        s->stats.decode_tokens++;
    }
    s->stats.decode_ms += (double)(dt_clock_us() - start) / 1000.0;
    return status;
}

dt_status dt_session_score(dt_session *session, const int32_t *tokens, size_t n, dt_logits_fn fn, void *user, dt_error *error) {
    dt_session *s = session;
    if (DT_LACKS(error, session) || (n > 0 && DT_LACKS(error, tokens))) {
        return DT_ERR_ARGUMENT;
    }
    if (fn == NULL) {
        return dt_fail(error, DT_ERR_ARGUMENT,
                       "dt_session_score needs fn, which is NULL; where nobody wants the logits, dt_session_sync reads the text");
    }
    if (n > (size_t)(s->max_tokens - s->n_tokens)) {
        return dt_session_check_room(s, (int64_t)DT_MIN(n, (size_t)INT64_MAX), error);
    }
    const size_t n_vocab = (size_t)s->model->info.n_vocab;
    const size_t most = may_evict(s) ? 1 : (size_t)DT_MIN(s->chunk, SCORE_BATCH);
    dt_status status = dt_session_check_idle(s, error);
    for (size_t done = 0; status == DT_OK && done < n;) {
        const int32_t chunk = (int32_t)DT_MIN(n - done, most);
        const float *logits;
        status = step(s, tokens + done, chunk, chunk, 0, &logits, error);
        for (int32_t i = 0; status == DT_OK && i < chunk; i++) {
            dt_group_begin_asking(s->group);
            const bool goes_on = fn(done + (size_t)i, logits + (size_t)i * n_vocab, user);
            dt_group_end_asking(s->group);
            if (!goes_on) {
                status = dt_fail(error, DT_ERR_CANCELLED, "cancelled");
            }
        }
        if (status == DT_OK) {
            status = dt_session_evict(s, error);
        }
        done += (size_t)chunk;
    }
    return status;
}

dt_status dt_session_fill_random(dt_session *session, int64_t n, dt_error *error) {
    if (DT_LACKS(error, session)) {
        return DT_ERR_ARGUMENT;
    }
    dt_session *s = session;
    const dt_model_info *info = &s->model->info;
    const dt_status idle = dt_session_check_idle(s, error);
    if (idle != DT_OK) {
        return idle;
    }
    if (s->n_tokens > 0 || n < 1 || n > s->max_tokens) {
        return dt_fail(error, DT_ERR_ARGUMENT, "random filling needs a new session and 1 to %d tokens", s->max_tokens);
    }
    uint64_t state = 1;
    dt_status status = DT_OK;
    while (status == DT_OK && s->n_tokens < n) {
        const int32_t chunk = (int32_t)DT_MIN(n - s->n_tokens, (int64_t)(n > s->params.n_ctx ? s->chunk : s->params.n_batch));
        status = dt_session_reserve_tokens(s, chunk, error);
        if (status == DT_OK) {
            status = dt_session_close_up(s, chunk, error);
        }
        if (status == DT_OK) {
            status = dt_graph_settle(s->group->graph, s->kv, error);
        }
        if (status == DT_OK) {
            status = dt_session_grow(s, chunk, error);
        }
        for (int32_t i = 0; status == DT_OK && i < info->n_layers; i++) {
            for (int32_t lane = 0; status == DT_OK && lane < info->n_kv_heads[i]; lane++) {
                if (!dt_kv_fill_uncommitted(s->kv, i, lane, dt_session_next_position(s), &state)) {
                    status = dt_fail(error, DT_ERR_MEMORY, "the device does not take %d random tokens", chunk);
                }
            }
        }
        if (status == DT_OK) {
            dt_kv_commit(s->kv, chunk);
            for (int32_t i = 0; i < chunk; i++) {
                s->tokens[s->n_tokens + i] = (s->n_tokens + i) % info->n_vocab;
            }
            s->n_tokens += chunk;
            if (s->params.prefill == DT_PREFILL_STREAMING || n > s->params.n_ctx || s->n_tokens == n) {
                status = dt_session_evict(s, error);
            }
        }
    }
    return status;
}
