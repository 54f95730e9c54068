/*
 * Continuous batching. See scheduler.h; what happens to a single reply is in sequence.c.
 *
 * The thread's round: cancelled replies end, waiting jobs are let in while there is room, one step is computed for all that run,
 * every reply whose prompt is read samples its next token.
 */
#define _POSIX_C_SOURCE 200809L
#include "fail.h"
#include "sequence.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SHARE_MIN 64 /* tokens of common prompt that are worth waiting for */

/* ---- beginnings --------------------------------------------------------------------------------- */

static void push_front(dt_scheduler *s, dt_job *job) {
    pthread_mutex_lock(&s->lock);
    job->next = s->first;
    s->first = job;
    s->last = s->last == NULL ? job : s->last;
    s->stats.n_waiting++;
    s->stats.n_running -= job->n_choices;
    pthread_mutex_unlock(&s->lock);
}

/* The job counts as running from here on, so that stopping gives one that has just begun its time; what hasn't begun by then is not
 * begun. *out_cancelled: it is over, and never counts. */
static dt_job *pop(dt_scheduler *s, bool *out_cancelled) {
    pthread_mutex_lock(&s->lock);
    dt_job *job = s->stopping ? NULL : s->first;
    *out_cancelled = job != NULL && atomic_load(&job->cancelled);
    if (job != NULL && !*out_cancelled && s->n_active + job->n_choices > s->params.n_parallel) {
        job = NULL;
    }
    if (job != NULL) {
        s->first = job->next;
        s->last = s->first == NULL ? NULL : s->last;
        s->stats.n_waiting--;
        s->stats.n_running += *out_cancelled ? 0 : job->n_choices;
    }
    pthread_mutex_unlock(&s->lock);
    return job;
}

/* Whether a running job is just reading a beginning that this one could share. */
static bool will_be_shared(const dt_scheduler *s, const dt_job *job) {
    for (int32_t i = 0; i < s->n_active; i++) {
        const dt_sequence *q = &s->active[i];
        if (q->over || job->score || q->job->score || q->follows || strcmp(q->job->eviction_key, job->eviction_key) != 0) {
            continue;
        }
        const size_t most = job->n_tokens < q->job->n_tokens ? job->n_tokens : q->job->n_tokens;
        size_t same = 0;
        while (same < most && job->tokens[same] == q->job->tokens[same]) {
            same++;
        }
        if (same >= q->n_read + SHARE_MIN) {
            return true;
        }
    }
    return false;
}

static dt_status start(dt_scheduler *s, dt_job *job, bool *out_started, dt_error *error) {
    dt_conversation *conversation = NULL;
    dt_sync_result reused = {0};
    const dt_status status = dt_conversations_take(s->conversations, job, &conversation, &reused, error);
    *out_started = conversation != NULL;
    if (status != DT_OK || conversation == NULL) {
        return status;
    }
    dt_session_stats stats;
    dt_session_get_stats(dt_conversation_session(conversation), &stats);
    job->admitted_us = dt_now_us();
    for (int32_t i = 0; i < job->n_choices; i++) {
        s->active[s->n_active++] = (dt_sequence){
            .job = job,
            .choice = i,
            .conversation = i == 0 ? conversation : NULL,
            .session = i == 0 ? dt_conversation_session(conversation) : NULL,
            .n_read = job->score ? 0 : (size_t)reused.reused_tokens,
            .follows = i > 0,
            .n_batch = stats.n_batch,
            .n_ctx = stats.n_ctx,
            .n_rounds = stats.eviction_rounds,
            .n_evicted = stats.evicted_tokens,
            .tlc_rounds = -1,
        };
    }
    pthread_mutex_lock(&s->lock);
    s->stats.prompt_tokens += (int64_t)job->n_tokens;
    dt_histogram_add(&s->stats.wait, (double)(job->admitted_us - job->submitted_us) / 1e6);
    pthread_mutex_unlock(&s->lock);
    pthread_mutex_lock(&job->lock);
    job->state = DT_JOB_RUNNING;
    job->reused_tokens = reused.reused_tokens;
    pthread_mutex_unlock(&job->lock);
    if (job->wake != NULL) {
        job->wake(job->wake_user);
    }
    return DT_OK;
}

static void admit(dt_scheduler *s) {
    dt_job *job;
    bool was_cancelled;
    while (!s->blocked && (job = pop(s, &was_cancelled)) != NULL) {
        dt_error error = {.code = DT_ERR_CANCELLED, .message = "cancelled"};
        bool started = false;
        if (was_cancelled) {
            dt_sequence_job_is_over(s, job, &error);
        } else if (will_be_shared(s, job)) {
            push_front(s, job);
            return;
        } else if (start(s, job, &started, &error) != DT_OK) {
            dt_sequence_job_is_over(s, job, &error);
        } else if (!started) {
            push_front(s, job);
            s->blocked = true;
        }
    }
}

/* ---- the thread --------------------------------------------------------------------------------- */

/* Which sequences compute in this step, and what. */
static size_t plan_step(dt_scheduler *s) {
    size_t n = 0;
    int32_t room = -1; /* tokens of prompts; the first one always gets its chunk */
    for (int32_t i = 0; i < s->n_active; i++) {
        const dt_sequence *q = &s->active[i];
        const dt_job *job = q->job;
        if (q->follows || q->over || (job->score && q->n_read < job->n_tokens)) {
            continue;
        }
        dt_step step = {.session = q->session, .tokens = &q->token, .n = 1};
        if (q->n_read < job->n_tokens) {
            const size_t left = job->n_tokens - q->n_read;
            const int32_t chunk = left < (size_t)q->n_batch ? (int32_t)left : q->n_batch;
            room = room < 0 ? q->n_batch : room;
            if (chunk > room) {
                continue;
            }
            room -= chunk;
            step = (dt_step){
                .session = q->session, .tokens = job->tokens + q->n_read, .n = chunk, .n_follow = (int32_t)(left - (size_t)chunk)};
        }
        s->stepped[n] = (size_t)i;
        s->steps[n++] = step;
    }
    return n;
}

/* Nothing of the failed step is in the session. */
static bool is_as_before(const dt_sequence *q) {
    const dt_choice *choice = &q->job->choices[q->choice];
    const size_t n_replied = choice->n_records > 0 ? choice->n_records - 1 : 0;
    size_t n = 0;
    dt_session_tokens(q->session, &n);
    return n == (q->n_read < q->job->n_tokens ? q->n_read : q->job->n_tokens + n_replied);
}

static void step_all(dt_scheduler *s) {
    const int64_t begun = dt_now_us();
    const size_t n = plan_step(s);
    size_t n_stalled = 0, stalled = 0;
    int64_t n_tokens = 0;
    if (n > 0) {
        dt_group_step(s->group, s->steps, n, NULL);
    }
    const double seconds = (double)(dt_now_us() - begun) / 1e6;
    for (size_t i = 0; i < n; i++) {
        dt_sequence *q = &s->active[s->stepped[i]];
        const dt_step *step = &s->steps[i];
        if (q->over) {
            continue; /* another reply of its job failed */
        }
        if (step->error.code == DT_ERR_MEMORY && is_as_before(q) && (n > 1 || dt_conversations_give_room(s->conversations))) {
            stalled = i; /* the same again in the next round, or when another has ended */
            n_stalled++;
            continue;
        }
        if (step->error.code != DT_OK) {
            dt_sequence_fail_job(s, q->job, &step->error);
            continue;
        }
        n_tokens += step->n;
        q->n_read += q->n_read < q->job->n_tokens ? (size_t)step->n : 0;
        dt_sequence_after_step(s, q, seconds);
    }
    if (n_stalled > 0 && n_stalled == n && n > 1 && !dt_conversations_give_room(s->conversations)) {
        dt_sequence_fail_job(s, s->active[s->stepped[stalled]].job, &s->steps[stalled].error); /* the youngest makes room */
    }
    pthread_mutex_lock(&s->lock);
    s->stats.steps += n > 0 ? 1 : 0;
    s->stats.computed_tokens += n_tokens;
    dt_group_get_stats(s->group, &s->stats.group);
    pthread_mutex_unlock(&s->lock);
}

/* A job whose prompt was cached as a whole, logits included, has nothing to compute before its first token. */
static void begin_whole(dt_scheduler *s) {
    for (int32_t i = 0; i < s->n_active; i++) {
        dt_sequence *q = &s->active[i];
        if (!q->over && !q->follows && q->n_read == q->job->n_tokens && q->job->choices[q->choice].n_records == 0) {
            dt_sequence_after_step(s, q, 0);
        }
    }
}

static void score_one(dt_scheduler *s) {
    for (int32_t i = 0; i < s->n_active; i++) {
        dt_sequence *q = &s->active[i];
        if (!q->over && q->job->score && !q->follows && q->n_read < q->job->n_tokens) {
            dt_error error = {0};
            const int64_t begun = dt_now_us();
            if (dt_sequence_score_piece(s, q, &error) != DT_OK) {
                dt_sequence_fail_job(s, q->job, &error);
            } else {
                dt_sequence_after_step(s, q, (double)(dt_now_us() - begun) / 1e6);
            }
            return; /* one piece a round: replies go on in between */
        }
    }
}

static void end_cancelled(dt_scheduler *s, bool all) {
    const dt_error cancelled = {.code = DT_ERR_CANCELLED, .message = "cancelled"};
    const dt_error stopped = {.code = DT_ERR_CANCELLED,
                              .message = "the server stopped before the reply was done; ask again when it is back"};
    for (int32_t i = 0; i < s->n_active; i++) {
        dt_job *job = s->active[i].job;
        if (!s->active[i].over && (all || atomic_load(&job->cancelled))) {
            dt_sequence_fail_job(s, job, all ? &stopped : &cancelled);
        }
    }
}

/* Jobs that were cancelled while they waited, or all of them. */
static void end_waiting(dt_scheduler *s, bool all) {
    const dt_error cancelled = {.code = DT_ERR_CANCELLED, .message = "cancelled"};
    const dt_error stopping = {.code = DT_ERR_CANCELLED, .message = "the server is stopping"};
    dt_job *ended = NULL;
    pthread_mutex_lock(&s->lock);
    s->last = NULL;
    for (dt_job **at = &s->first; *at != NULL;) {
        dt_job *job = *at;
        if (all || atomic_load(&job->cancelled)) {
            *at = job->next;
            job->next = ended;
            ended = job;
            s->stats.n_waiting--;
        } else {
            s->last = job;
            at = &job->next;
        }
    }
    pthread_mutex_unlock(&s->lock);
    s->blocked = s->blocked && ended == NULL; /* it may have been the one that needs the memory */
    while (ended != NULL) {
        dt_job *next = ended->next;
        dt_sequence_job_is_over(s, ended, all ? &stopping : &cancelled);
        ended = next;
    }
}

static void *run(void *user) {
    dt_scheduler *s = user;
    for (;;) {
        pthread_mutex_lock(&s->lock);
        s->stats.n_running = s->n_active;
        while (s->first == NULL && s->n_active == 0 && !s->stopping) {
            pthread_cond_wait(&s->changed, &s->lock);
        }
        const bool stopping = s->stopping, cancel_all = s->cancel_all;
        pthread_mutex_unlock(&s->lock);
        end_waiting(s, stopping);
        end_cancelled(s, cancel_all);
        dt_sequence_remove_ended(s);
        if (stopping && s->n_active == 0) {
            pthread_mutex_lock(&s->lock);
            s->stats.n_running = 0; /* dt_scheduler_stop waits for it */
            pthread_mutex_unlock(&s->lock);
            return NULL;
        }
        admit(s);
        begin_whole(s);
        dt_sequence_remove_ended(s);
        step_all(s);
        score_one(s);
        dt_sequence_remove_ended(s);
    }
}

/* ---- from other threads ------------------------------------------------------------------------- */

dt_submitted dt_scheduler_submit(dt_scheduler *s, dt_job *const *jobs, size_t n) {
    pthread_mutex_lock(&s->lock);
    const dt_submitted result = s->stopping                                                    ? DT_SUBMIT_STOPPING
                                : s->stats.n_waiting + (int64_t)n > (int64_t)s->params.n_queue ? DT_SUBMIT_FULL
                                                                                               : DT_SUBMITTED;
    if (result == DT_SUBMITTED) {
        for (size_t i = 0; i < n; i++) {
            jobs[i]->submitted_us = dt_now_us();
            jobs[i]->next = NULL;
            *(s->last != NULL ? &s->last->next : &s->first) = jobs[i];
            s->last = jobs[i];
        }
        s->stats.n_waiting += (int64_t)n;
        pthread_cond_signal(&s->changed);
    } else {
        s->stats.n_refused += (int64_t)n;
    }
    pthread_mutex_unlock(&s->lock);
    return result;
}

void dt_scheduler_cancel(dt_scheduler *s, dt_job *job) {
    atomic_store(&job->cancelled, true);
    pthread_mutex_lock(&s->lock);
    pthread_cond_signal(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

int32_t dt_scheduler_seconds_to_wait(dt_scheduler *s) {
    pthread_mutex_lock(&s->lock);
    const double each = s->mean_job_seconds > 0 ? s->mean_job_seconds : 1;
    const double seconds = each * ((double)s->stats.n_waiting / s->params.n_parallel / 4 + 1);
    pthread_mutex_unlock(&s->lock);
    return seconds < 1 ? 1 : seconds > 60 ? 60 : (int32_t)seconds;
}

void dt_scheduler_get_stats(dt_scheduler *s, dt_scheduler_stats *out) {
    pthread_mutex_lock(&s->lock);
    *out = s->stats;
    pthread_mutex_unlock(&s->lock);
}

dt_conversations *dt_scheduler_conversations(dt_scheduler *s) { return s->conversations; }

static dt_status no_memory(dt_error *error) {
    snprintf(error->message, sizeof error->message, "out of memory for the scheduler");
    return error->code = DT_ERR_MEMORY;
}

dt_status dt_scheduler_new(const dt_scheduler_params *params, dt_scheduler **out, dt_error *error) {
    dt_scheduler *s = calloc(1, sizeof *s);
    if (s == NULL) {
        return no_memory(error);
    }
    s->params = *params;
    const size_t n = (size_t)params->n_parallel;
    s->active = calloc(n, sizeof *s->active);
    s->steps = calloc(n, sizeof *s->steps);
    s->stepped = calloc(n, sizeof *s->stepped);
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, NULL);
    const dt_group_params group = {.n_threads = params->session.n_threads,
                                   .n_threads_batch = params->session.n_threads_batch,
                                   .kernel = params->session.kernel,
                                   .kv_memory = params->session.kv_memory};
    dt_status status = s->active != NULL && s->steps != NULL && s->stepped != NULL
                           ? dt_group_new(params->model, &group, &s->group, error)
                           : no_memory(error);
    if (status == DT_OK) {
        dt_conversations_params conversations = {.model = params->model,
                                                 .group = s->group,
                                                 .session = params->session,
                                                 .memory_bytes = params->session.kv_memory,
                                                 .folder = params->folder,
                                                 .disk_bytes = params->disk_bytes,
                                                 .n_idle_max = params->n_idle_max};
        conversations.session.kv_memory = 0; /* the ceiling is that of all together */
        conversations.session.group = s->group;
        status = dt_conversations_new(&conversations, &s->conversations, error);
    }
    if (status == DT_OK) {
        const int reason = pthread_create(&s->thread, NULL, run, s);
        if (reason != 0) {
            status = dt_app_fail(error, DT_ERR_COMPUTE, "the scheduler's thread can't be started: %s; raise the limit on processes",
                                 strerror(reason));
        }
    }
    if (status != DT_OK) {
        dt_scheduler_free(s);
        return status;
    }
    *out = s;
    return DT_OK;
}

void dt_scheduler_stop(dt_scheduler *s, int64_t grace_ms) {
    const struct timespec pause = {.tv_nsec = 20 * 1000 * 1000};
    const int64_t until = dt_now_us() + grace_ms * 1000;
    pthread_mutex_lock(&s->lock);
    s->stopping = true;
    pthread_cond_signal(&s->changed);
    while (s->stats.n_running > 0 && dt_now_us() < until) {
        pthread_mutex_unlock(&s->lock);
        nanosleep(&pause, NULL);
        pthread_mutex_lock(&s->lock);
    }
    s->cancel_all = true;
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->thread, NULL);
}

void dt_scheduler_free(dt_scheduler *s) {
    if (s == NULL) {
        return;
    }
    dt_conversations_free(s->conversations, true);
    dt_group_free(s->group);
    free(s->active);
    free(s->steps);
    free(s->stepped);
    pthread_mutex_destroy(&s->lock);
    pthread_cond_destroy(&s->changed);
    free(s);
}
