/*
 * dt_group: computes the next tokens of one session or of many in one batch.
 *
 * A part that fails before the batch is computed (a token outside the vocabulary, no memory for its cache) is left out of it; when
 * the batch fails, all of its parts do. Invariant: when a part fails its session holds the tokens it held before.
 */
#include "engine/group.h"

#include "engine/kv_plan.h"
#include "engine/session.h"

#include <stdlib.h>
#include <string.h>

/* Attention mass is collected only when a round is near: its running mean forgets what is older than a few windows. */
#define OBSERVE_AHEAD (8 * DT_OBSERVE_WINDOW)
#define PROGRESS_INTERVAL_US 100000

/* ---- life ---- */

static const void *this_thread(void) {
    static _Thread_local char mark; /* one per thread: its address tells them apart */
    return &mark;
}

void dt_group_begin_asking(dt_group *group) { atomic_store(&group->asking, this_thread()); }

void dt_group_end_asking(dt_group *group) { atomic_store(&group->asking, NULL); }

bool dt_group_is_asking(const dt_group *group) { return atomic_load(&group->asking) == this_thread(); }

static bool should_abort(void *user) {
    dt_group *group = user;
    dt_session *s = group->syncing;
    if (!s || !s->progress) {
        return false;
    }
    const int64_t now = dt_clock_us();
    if (now - s->progress_last_us < PROGRESS_INTERVAL_US) {
        return false;
    }
    s->progress_last_us = now;
    dt_group_begin_asking(group);
    const bool wanted = s->progress(s->progress_done, s->progress_total, s->progress_user);
    dt_group_end_asking(group);
    return !wanted;
}

static dt_status group_new(const dt_model *model, const dt_group_params *params, bool is_private, dt_group **out, dt_error *error) {
    const dt_group_params defaults = {0};
    const dt_group_params *p = params ? params : &defaults;
    *out = NULL;
    if (p->n_threads < 0 || p->n_threads_batch < 0) {
        return dt_fail(error, DT_ERR_ARGUMENT, "the number of threads can't be negative");
    }
    if (p->n_threads > DT_MAX_THREADS || p->n_threads_batch > DT_MAX_THREADS) {
        return dt_fail(error, DT_ERR_ARGUMENT,
                       "%d threads are more than the %d that can compute together; 0 stands for as many as there "
                       "are cores",
                       DT_MAX(p->n_threads, p->n_threads_batch), DT_MAX_THREADS);
    }
    const bool is_ggml = dt_kernel_is_ggml(p->kernel),
               no_flash = is_ggml && p->kernel != NULL && strcmp(p->kernel, "ggml_matmul") == 0;
    const dt_attn_kernel *kernel = dt_attn_kernel_find(is_ggml ? NULL : p->kernel, error);
    if (!kernel) {
        return DT_ERR_ARGUMENT;
    }
    dt_group *g = calloc(1, sizeof *g);
    if (!g) {
        return dt_fail_memory(error, sizeof *g, "the group of sessions");
    }
    g->model = model;
    g->kernel = kernel;
    g->kernel_name = no_flash ? "ggml_matmul" : is_ggml ? "ggml" : kernel->name;
    g->most_at_once = is_ggml || model->decoder->n_devices > 1 ? DT_MAX_ELSEWHERE : INT32_MAX;
    g->is_private = is_private;
    g->n_threads = p->n_threads > 0 ? p->n_threads : DT_MIN(dt_physical_cores(), DT_MAX_THREADS);
    g->n_threads_batch = p->n_threads_batch > 0 ? p->n_threads_batch : g->n_threads;
    dt_memory_init(&g->memory);
    dt_memory_init(&g->kv_memory);
    g->kv_memory.limit = (size_t)DT_MIN(p->kv_memory, (uint64_t)SIZE_MAX);
    const dt_graph_params graph_params = {.kernel = kernel,
                                          .no_flash = no_flash,
                                          .n_threads = g->n_threads,
                                          .n_threads_batch = g->n_threads_batch,
                                          .should_abort = should_abort,
                                          .user = g};
    const dt_status status = dt_graph_new(model->decoder, &g->memory, &graph_params, &g->graph, error);
    if (status != DT_OK) {
        dt_group_free(g);
        return status;
    }
    *out = g;
    return DT_OK;
}

dt_status dt_group_new(const dt_model *model, const dt_group_params *params, dt_group **out, dt_error *error) {
    return DT_LACKS(error, model, out) ? DT_ERR_ARGUMENT : group_new(model, params, false, out, error);
}

dt_status dt_group_new_private(const dt_model *model, const dt_group_params *params, dt_group **out, dt_error *error) {
    return group_new(model, params, true, out, error);
}

static size_t array_bytes(size_t capacity) { return capacity * (sizeof(dt_part) + sizeof(dt_sequence) + sizeof(int32_t)); }

void dt_group_free(dt_group *group) {
    if (!group) {
        return;
    }
    dt_graph_free(group->graph);
    dt_memory_free(&group->memory, group->parts, array_bytes(group->capacity));
    free(group);
}

void dt_group_get_stats(const dt_group *group, dt_group_stats *out) {
    if (group == NULL) {
        *out = (dt_group_stats){0};
        return;
    }
    *out = (dt_group_stats){.n_sessions = group->n_sessions,
                            .n_threads = group->n_threads,
                            .kv_bytes = atomic_load(&group->kv_memory.bytes),
                            .kv_bytes_peak = atomic_load(&group->kv_memory.bytes_peak),
                            .n_steps = group->n_steps,
                            .n_tokens = group->n_tokens};
}

/* One allocation for all arrays; their content is lost. */
static dt_status reserve(dt_group *g, size_t n, dt_error *error) {
    if (n <= g->capacity) {
        return DT_OK;
    }
    const size_t capacity = n + n / 2;
    char *arrays = dt_memory_alloc(&g->memory, array_bytes(capacity));
    if (!arrays) {
        return dt_fail_memory(error, array_bytes(capacity), "the group of sessions");
    }
    dt_memory_free(&g->memory, g->parts, array_bytes(g->capacity));
    g->capacity = capacity;
    g->parts = (dt_part *)arrays;
    g->sequences = (dt_sequence *)(g->parts + capacity);
    g->part_of = (int32_t *)(g->sequences + capacity);
    return DT_OK;
}

/* ---- computing ---- */

bool dt_session_choose_observed(dt_session *s, int32_t n, int64_t n_follow) {
    bool any = false;
    const bool late = s->streams || n_follow < OBSERVE_AHEAD;
    const int64_t shared_room = dt_kv_shared_room(s->kv);
    for (int32_t i = 0; i < s->model->info.n_layers; i++) {
        s->observe_layer[i] = late && dt_kv_layer_needs_mass(s->kv, i) && !dt_kv_layer(s->kv, i)->format.elsewhere &&
                              dt_session_observes(s, i, n + n_follow, shared_room);
        any = any || s->observe_layer[i];
    }
    return any;
}

bool dt_session_observes(const dt_session *s, int32_t layer, int64_t n_more, int64_t shared_room) {
    return n_more + OBSERVE_AHEAD > dt_kv_room(s->kv, layer, shared_room);
}

typedef struct batch {
    dt_group *group;
    const dt_part *parts;
    int32_t n; /* sequences */
} batch;

/* A thread's lanes of those that were observed. */
static void fold_masses(void *user, int ith, int nth) {
    const batch *b = user;
    const dt_group *g = b->group;
    int turn = 0;
    for (int32_t number = 0; number < b->n; number++) {
        const dt_part *part = &b->parts[g->part_of[number]];
        const dt_session *s = part->session;
        for (int32_t i = 0; g->sequences[number].observe_layer && i < s->model->info.n_layers; i++) {
            for (int32_t lane = 0; s->observe_layer[i] && lane < s->model->info.n_kv_heads[i]; lane++) {
                if (turn++ % nth == ith) {
                    dt_kv_lane_view view;
                    dt_kv_lane(s->kv, i, lane, &view);
                    dt_mass_fold(view.recent_mass, dt_graph_mass(g->graph, number, i, lane, 0), view.n_entries,
                                 g->sequences[number].n_observed);
                }
            }
        }
    }
}

/* Takes the computed entries into the caches, and into scores what attention they and others got. */
static void commit(dt_group *g, const dt_part *parts, int32_t n) {
    bool observed = false;
    for (int32_t i = 0; i < n; i++) {
        dt_kv_commit(g->sequences[i].kv, g->sequences[i].n);
        observed = observed || g->sequences[i].observe_layer;
    }
    if (observed) {
        batch b = {.group = g, .parts = parts, .n = n};
        const dt_workers workers = dt_graph_workers(g->graph);
        dt_workers_run(&workers, fold_masses, &b);
    }
}

static dt_status check_tokens(const dt_session *s, const int32_t *tokens, int32_t n, dt_error *error) {
    for (int32_t i = 0; i < n; i++) {
        if (tokens[i] < 0 || tokens[i] >= s->model->info.n_vocab) {
            return dt_fail(error, DT_ERR_ARGUMENT, "token %d is not in the model's vocabulary of %d", tokens[i],
                           s->model->info.n_vocab);
        }
    }
    return DT_OK;
}

/* The part's place in the batch; its tokens are in the session's cache then, uncommitted. */
static dt_status begin(dt_part *part, dt_sequence *sequence) {
    dt_session *s = part->session;
    dt_status status = check_tokens(s, part->tokens, part->n, part->error);
    if (status == DT_OK) {
        status = dt_session_reserve_tokens(s, part->n, part->error);
    }
    if (status == DT_OK) {
        status = dt_session_close_up(s, part->n, part->error);
    }
    if (status != DT_OK) {
        return status;
    }
    s->logits = NULL;
    *sequence = (dt_sequence){.kv = s->kv,
                              .tokens = part->tokens,
                              .n = part->n,
                              .first_position = dt_session_next_position(s),
                              .n_outputs = part->n_outputs,
                              .observe_layer = dt_session_choose_observed(s, part->n, part->n_follow) ? s->observe_layer : NULL,
                              .n_observed = DT_MIN(part->n, DT_OBSERVE_WINDOW)};
    status = dt_graph_settle(s->group->graph, s->kv, part->error);
    return status == DT_OK ? dt_session_grow(s, part->n, part->error) : status;
}

/* Takes the computed tokens into the session. */
static dt_status finish(dt_part *part) {
    dt_session *s = part->session;
    memcpy(s->tokens + s->n_tokens, part->tokens, (size_t)part->n * sizeof *part->tokens);
    s->n_tokens += part->n;
    const dt_status slid = dt_session_slide(s, part->error);
    const size_t last = (size_t)(part->n_outputs - 1) * (size_t)s->model->info.n_vocab;
    return slid == DT_OK ? dt_session_set_logits(s, part->logits + last, part->error) : slid;
}

/* dt_graph_compute; *attention_us: spent there. */
static dt_status compute(dt_group *g, const dt_sequence *sequences, int32_t n, const float **logits, int64_t *attention_us,
                         dt_error *error) {
    const int64_t before = dt_graph_attention_us(g->graph);
    const dt_status status = dt_graph_compute(g->graph, sequences, n, logits, error);
    *attention_us = dt_graph_attention_us(g->graph) - before;
    g->n_steps++;
    for (int32_t i = 0; i < n; i++) {
        g->n_tokens += sequences[i].n;
    }
    return status;
}

static void fail_part(dt_part *part, dt_status status, const dt_error *why) {
    part->status = status;
    if (part->error) {
        *part->error = *why;
    }
}

/* Returns what became of the batch; parts that did not get into it say so themselves. */
static dt_status compute_parts(dt_group *g, dt_part *parts, int32_t n_parts) {
    dt_error error = {0};
    dt_status status = reserve(g, (size_t)n_parts, &error);
    int32_t n = 0;
    for (int32_t i = 0; i < n_parts && status == DT_OK; i++) {
        parts[i].status = begin(&parts[i], &g->sequences[n]);
        g->part_of[n] = i;
        n += parts[i].status == DT_OK;
    }
    const float *logits = NULL;
    int64_t attention_us = 0;
    if (status == DT_OK && n > 0) {
        status = compute(g, g->sequences, n, &logits, &attention_us, &error);
    }
    if (status == DT_OK) {
        commit(g, parts, n);
    }
    for (int32_t i = 0; i < n_parts && status != DT_OK; i++) {
        if (parts[i].status == DT_OK) {
            fail_part(&parts[i], status, &error);
        }
    }
    for (int32_t i = 0; i < n; i++) {
        dt_part *part = &parts[g->part_of[i]];
        part->session->stats.attention_ms += (double)attention_us / 1000.0;
        part->logits = logits;
        if (status != DT_OK) {
            dt_kv_commit(part->session->kv, 0);
        } else {
            part->status = finish(part);
            logits += (size_t)part->n_outputs * (size_t)g->model->info.n_vocab;
        }
    }
    return status;
}

void dt_group_compute(dt_group *g, dt_part *parts, int32_t n_parts) {
    for (int32_t i = 0, n; i < n_parts; i += n) {
        n = DT_MIN(g->most_at_once, n_parts - i);
        const dt_status status = compute_parts(g, parts + i, n);
        /* room on a device is made for a whole batch: where one has none, the others go on without it */
        for (int32_t j = i; status == DT_ERR_MEMORY && n > 1 && g->most_at_once < INT32_MAX && j < i + n; j++) {
            if (parts[j].error) {
                *parts[j].error = (dt_error){.code = DT_OK};
            }
            (void)compute_parts(g, parts + j, 1);
        }
    }
}

dt_status dt_group_compute_one(dt_session *s, dt_sequence *sequence, const float **logits, dt_error *error) {
    dt_status status = check_tokens(s, sequence->tokens, sequence->n, error);
    if (status == DT_OK) {
        status = dt_graph_settle(s->group->graph, s->kv, error);
    }
    if (status == DT_OK) {
        status = dt_session_grow(s, sequence->n, error);
    }
    if (status != DT_OK) {
        return status;
    }
    int64_t attention_us;
    sequence->kv = s->kv;
    status = compute(s->group, sequence, 1, logits, &attention_us, error);
    s->stats.attention_ms += (double)attention_us / 1000.0;
    if (status != DT_OK) {
        dt_kv_commit(s->kv, 0);
    }
    return status;
}

/* ---- steps of many ---- */

/* It brings what the step before said would come. Any other step begins anew, for a prompt may be given up in the middle. */
static bool goes_on(const dt_step *step) {
    const int64_t n_to_come = step->session->n_to_come;
    return n_to_come > 0 && (int64_t)step->n + step->n_follow == n_to_come;
}

/* Also marks the session, so that it is found when it comes twice. */
static dt_status check_step(const dt_group *g, const dt_step *step, dt_error *error) {
    dt_session *s = step->session;
    if (!s || s->group != g) {
        return dt_fail(error, DT_ERR_ARGUMENT, "the session does not belong to this group");
    }
    if (s->last_step == g->n_calls) {
        return dt_fail(error, DT_ERR_ARGUMENT, "the session has two steps at once; put them into steps one after the other");
    }
    s->last_step = g->n_calls;
    if (step->tokens == NULL) {
        return dt_fail(error, DT_ERR_ARGUMENT, "a step needs tokens, which is NULL");
    }
    if (step->n < 1 || step->n > s->chunk || step->n_follow < 0) {
        return dt_fail(error, DT_ERR_ARGUMENT, "a step appends 1 to %d tokens (n_batch), not %d", s->chunk, step->n);
    }
    dt_status status = dt_session_check_idle(s, error);
    if (status == DT_OK) {
        status = dt_session_check_room(s, (int64_t)step->n + step->n_follow, error);
    }
    return status == DT_OK && !goes_on(step) ? dt_session_begin_reading(s, (int64_t)step->n + step->n_follow, error) : status;
}

/* Not the last token of a prompt whose chunks came before. */
static bool is_decode(const dt_step *step) { return step->n == 1 && step->n_follow == 0 && !goes_on(step); }

/* What append does after computing, or, while more follows, sync. */
static void end_step(dt_step *step, double ms) {
    dt_session *s = step->session;
    const double evicted_before = s->stats.eviction_ms;
    if (step->n_follow == 0 || s->streams) {
        (void)dt_session_evict(s, &step->error);
    }
    s->evicted_once = s->evicted_once || (step->error.code == DT_OK && step->n_follow == 0 && s->params.evict == DT_EVICT_ONCE);
    if (step->error.code == DT_OK && step->n_follow == 0 && !is_decode(step)) {
        dt_snapshot_take(s);
    }
    *(is_decode(step) ? &s->stats.decode_tokens : &s->stats.prefill_tokens) += step->n;
    *(is_decode(step) ? &s->stats.decode_ms : &s->stats.prefill_ms) += ms + s->stats.eviction_ms - evicted_before;
    s->n_to_come = step->n_follow;
}

dt_status dt_group_step(dt_group *group, dt_step *steps, size_t n_steps, dt_error *error) {
    const int64_t start = dt_clock_us();
    if (DT_LACKS(error, group) || (n_steps > 0 && DT_LACKS(error, steps))) {
        return DT_ERR_ARGUMENT;
    }
    if (n_steps > INT32_MAX) {
        return dt_fail(error, DT_ERR_ARGUMENT, "%zu steps at once are more than %d", n_steps, INT32_MAX);
    }
    dt_error why = {0};
    dt_status status = reserve(group, n_steps, &why);
    for (size_t i = 0; i < n_steps; i++) {
        steps[i].error = why;
    }
    if (status != DT_OK) {
        if (error) {
            *error = why;
        }
        return status;
    }
    group->n_calls++;
    int32_t n = 0;
    for (size_t i = 0; i < n_steps; i++) {
        dt_step *step = &steps[i];
        if (check_step(group, step, &step->error) == DT_OK) {
            group->parts[n] = (dt_part){.session = step->session,
                                        .tokens = step->tokens,
                                        .n = step->n,
                                        .n_outputs = 1,
                                        .n_follow = step->n_follow,
                                        .error = &step->error};
            n++;
        }
    }
    dt_group_compute(group, group->parts, n);
    const double ms = (double)(dt_clock_us() - start) / 1000.0;
    for (size_t i = 0; i < n_steps; i++) {
        if (steps[i].error.code == DT_OK) {
            end_step(&steps[i], ms);
        }
        if (steps[i].error.code != DT_OK && status == DT_OK) {
            status = steps[i].error.code;
            if (error) {
                *error = steps[i].error;
            }
        }
    }
    return status;
}
