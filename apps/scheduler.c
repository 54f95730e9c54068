/*
 * Continuous batching. See scheduler.h.
 *
 * The thread's round: cancelled replies end, waiting jobs are let in while there is room, one step is computed for all that run, every
 * reply whose prompt is read samples its next token.
 */
#define _POSIX_C_SOURCE 200809L
#include "scheduler.h"
#include "tlc_json.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define TLC_INTERVAL_US 250000
#define SHARE_MIN 64 /* tokens of common prompt that are worth waiting for */

typedef struct sequence { /* a reply in the making */
    dt_job *job;
    int32_t choice;
    dt_conversation *conversation;
    dt_session *session;
    size_t n_read; /* tokens of the prompt in the session */
    bool follows;  /* it forks off the job's first reply once the prompt is read */
    int32_t token; /* sampled, not computed yet */
    float probability;
    int32_t n_batch, n_ctx;
    int64_t n_rounds, n_evicted; /* already counted */
    int64_t last_tlc_us, tlc_rounds;
    bool over;
} sequence;

struct dt_scheduler {
    dt_scheduler_params params;
    dt_conversations *conversations;
    dt_group *group;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    /* under lock */
    dt_job *first, *last; /* waiting */
    bool stopping, cancel_all;
    dt_scheduler_stats stats;
    double mean_job_seconds;
    /* the thread's own */
    sequence *active; /* [n_active] of n_parallel, in the order of arrival */
    dt_step *steps;   /* [n_parallel] */
    size_t *stepped;  /* [n_parallel] which of the active */
    int32_t n_active;
    bool blocked; /* the first waiting job needs memory that only the end of a running one gives */
};

static int64_t now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

/* ---- ends --------------------------------------------------------------------------------------- */

static void job_is_over(dt_scheduler *s, dt_job *job, const dt_error *error) {
    const double seconds = (double)(now_us() - job->submitted_us) / 1e6;
    pthread_mutex_lock(&s->lock);
    *(error == NULL ? &s->stats.n_done : error->code == DT_ERR_CANCELLED ? &s->stats.n_cancelled : &s->stats.n_failed) += 1;
    if (error == NULL) {
        dt_histogram_add(&s->stats.job, seconds);
        s->mean_job_seconds = s->mean_job_seconds > 0 ? 0.9 * s->mean_job_seconds + 0.1 * seconds : seconds;
    }
    pthread_mutex_unlock(&s->lock);
    dt_job_finish(job, error);
}

static void end_conversation(dt_scheduler *s, sequence *q, bool keep) {
    if (q->conversation != NULL && keep && q->job->keep) {
        dt_conversations_keep(s->conversations, q->conversation, q->job, &q->job->choices[q->choice]);
    } else if (q->conversation != NULL) {
        dt_conversations_drop(s->conversations, q->conversation);
    }
    q->conversation = NULL;
    q->session = NULL;
    q->over = true;
    s->blocked = false;
}

/* All replies of a job end with this error. What was computed of its prompt is kept where the client may ask again. */
static void fail_job(dt_scheduler *s, dt_job *job, const dt_error *error) {
    for (int32_t i = 0; i < s->n_active; i++) {
        if (s->active[i].job == job && !s->active[i].over) {
            end_conversation(s, &s->active[i], error->code == DT_ERR_CANCELLED);
        }
    }
    job_is_over(s, job, error);
}

static void send_tlc(const dt_scheduler *s, sequence *q, const char *phase, bool force) {
    dt_job *job = q->job;
    const int64_t now = now_us();
    if (!job->tlc || q->choice != 0 || (!force && now - q->last_tlc_us < TLC_INTERVAL_US)) {
        return;
    }
    dt_session_stats stats;
    dt_session_get_stats(q->session, &stats);
    const bool strips = force || stats.eviction_rounds != q->tlc_rounds;
    char *text = dt_tlc_json(s->params.model, job, q->session, phase, q->n_read, strips);
    q->last_tlc_us = now;
    q->tlc_rounds = stats.eviction_rounds;
    pthread_mutex_lock(&job->lock);
    if (text != NULL) {
        free(job->tlc_json);
        job->tlc_json = text;
        job->n_tlc++;
    }
    pthread_mutex_unlock(&job->lock);
}

static void end_sequence(dt_scheduler *s, sequence *q) {
    dt_job *job = q->job;
    send_tlc(s, q, "done", true);
    end_conversation(s, q, true);
    for (int32_t i = 0; i < s->n_active; i++) {
        if (s->active[i].job == job && !s->active[i].over) {
            return;
        }
    }
    job_is_over(s, job, NULL);
}

static void remove_ended(dt_scheduler *s) {
    int32_t n = 0;
    for (int32_t i = 0; i < s->n_active; i++) {
        if (!s->active[i].over) {
            s->active[n++] = s->active[i];
        }
    }
    s->n_active = n;
}

/* ---- beginnings --------------------------------------------------------------------------------- */

static void push_front(dt_scheduler *s, dt_job *job) {
    pthread_mutex_lock(&s->lock);
    job->next = s->first;
    s->first = job;
    s->last = s->last == NULL ? job : s->last;
    s->stats.n_waiting++;
    pthread_mutex_unlock(&s->lock);
}

static dt_job *pop(dt_scheduler *s) {
    pthread_mutex_lock(&s->lock);
    dt_job *job = s->first;
    if (job != NULL && !atomic_load(&job->cancelled) && s->n_active + job->n_choices > s->params.n_parallel) {
        job = NULL;
    }
    if (job != NULL) {
        s->first = job->next;
        s->last = s->first == NULL ? NULL : s->last;
        s->stats.n_waiting--;
    }
    pthread_mutex_unlock(&s->lock);
    return job;
}

/* Whether a running job is just reading a beginning that this one could share. */
static bool will_be_shared(const dt_scheduler *s, const dt_job *job) {
    for (int32_t i = 0; i < s->n_active; i++) {
        const sequence *q = &s->active[i];
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
    job->admitted_us = now_us();
    for (int32_t i = 0; i < job->n_choices; i++) {
        s->active[s->n_active++] = (sequence){
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
    job->reused_tokens = job->read_tokens = reused.reused_tokens;
    pthread_mutex_unlock(&job->lock);
    if (job->wake != NULL) {
        job->wake(job->wake_user);
    }
    return DT_OK;
}

static void admit(dt_scheduler *s) {
    dt_job *job;
    while (!s->blocked && (job = pop(s)) != NULL) {
        dt_error error = {.code = DT_ERR_CANCELLED, .message = "cancelled"};
        bool started = false;
        if (atomic_load(&job->cancelled)) {
            job_is_over(s, job, &error);
        } else if (will_be_shared(s, job)) {
            push_front(s, job);
            return;
        } else if (start(s, job, &started, &error) != DT_OK) {
            job_is_over(s, job, &error);
        } else if (!started) {
            push_front(s, job);
            s->blocked = true;
        }
    }
}

/* ---- tokens ------------------------------------------------------------------------------------- */

static dt_status out_of_memory(dt_error *error) {
    snprintf(error->message, sizeof error->message, "out of memory for the reply");
    return error->code = DT_ERR_MEMORY;
}

/* Samples what comes after the session's last token. */
static dt_status sample(dt_scheduler *s, sequence *q, dt_error *error) {
    dt_choice *choice = &q->job->choices[q->choice];
    const float *logits = dt_session_logits(q->session);
    if (logits == NULL) {
        snprintf(error->message, sizeof error->message, "the session has no logits");
        return error->code = DT_ERR_INTERNAL;
    }
    dt_status status = dt_sampler_sample(choice->sampler, logits, &q->token, &q->probability, error);
    if (status == DT_OK) {
        status = dt_sampler_accept(choice->sampler, q->token, true, error);
    }
    if (status == DT_OK && !dt_job_add_token(q->job, q->choice, s->params.model, q->token, logits)) {
        status = out_of_memory(error);
    }
    if (status != DT_OK) {
        return status;
    }
    size_t n = 0;
    dt_session_tokens(q->session, &n);
    if (choice->finish == DT_FINISH_NONE && n >= (size_t)q->n_ctx) {
        dt_job_finish_choice(q->job, q->choice, DT_FINISH_LENGTH); /* no room for the token */
    }
    return DT_OK;
}

static void count_token(dt_scheduler *s, dt_job *job, double step_seconds, bool first) {
    pthread_mutex_lock(&s->lock);
    s->stats.generated_tokens++;
    if (first) {
        dt_histogram_add(&s->stats.first_token, (double)(now_us() - job->submitted_us) / 1e6);
    } else {
        dt_histogram_add(&s->stats.token, step_seconds);
    }
    pthread_mutex_unlock(&s->lock);
}

/* The other replies of a job begin where its prompt ends. */
static dt_status branch_choices(dt_scheduler *s, const sequence *q, dt_error *error) {
    dt_status status = DT_OK;
    for (int32_t i = 0; status == DT_OK && i < s->n_active; i++) {
        sequence *other = &s->active[i];
        if (other->job == q->job && other->follows && !other->over) {
            status = dt_conversations_fork(s->conversations, q->conversation, q->job, &other->conversation, error);
            if (status == DT_OK) {
                other->session = dt_conversation_session(other->conversation);
                other->follows = false;
                other->n_read = q->n_read;
                other->n_rounds = other->n_evicted = 0;
                status = sample(s, other, error);
                count_token(s, q->job, 0, true);
            }
        }
    }
    return status;
}

/* Rounds that the last step brought. */
static void note_rounds(dt_scheduler *s, sequence *q) {
    dt_session_stats stats;
    dt_session_get_stats(q->session, &stats);
    dt_conversations_note_step(s->conversations, q->conversation);
    const int64_t rounds = stats.eviction_rounds - q->n_rounds, evicted = stats.evicted_tokens - q->n_evicted;
    if (rounds > 0) {
        pthread_mutex_lock(&s->lock);
        s->stats.eviction_rounds += rounds;
        s->stats.evicted_tokens += evicted;
        pthread_mutex_unlock(&s->lock);
        pthread_mutex_lock(&q->job->lock);
        q->job->evicted_tokens += evicted;
        pthread_mutex_unlock(&q->job->lock);
    }
    q->n_rounds = stats.eviction_rounds;
    q->n_evicted = stats.evicted_tokens;
}

/* After a step of this sequence: n_read tokens of the prompt are in the session, and perhaps some of the reply. */
static void after_step(dt_scheduler *s, sequence *q, double seconds) {
    dt_job *job = q->job;
    dt_error error = {0};
    dt_status status = DT_OK;
    note_rounds(s, q);
    const bool reading = q->n_read < job->n_tokens;
    const bool first = !reading && job->choices[q->choice].n_records == 0;
    if (!first && !reading) {
        job->decode_ms += seconds * 1e3;
    } else {
        job->read_us += (int64_t)(seconds * 1e6);
    }
    send_tlc(s, q, reading ? "prefill" : "decode", q->last_tlc_us == 0);
    if (!reading && job->max_tokens == 0) {
        for (int32_t i = 0; i < s->n_active; i++) {
            s->active[i].over = s->active[i].over || (s->active[i].job == job && s->active[i].follows);
        }
        dt_job_finish_choice(job, q->choice, DT_FINISH_LENGTH);
    } else if (!reading) {
        status = first ? branch_choices(s, q, &error) : DT_OK;
        if (status == DT_OK) {
            status = sample(s, q, &error);
            count_token(s, job, seconds, first);
        }
    }
    if (status != DT_OK) {
        fail_job(s, job, &error);
        return;
    }
    if (reading) {
        pthread_mutex_lock(&job->lock);
        job->read_tokens = (int64_t)q->n_read;
        pthread_mutex_unlock(&job->lock);
    }
    for (int32_t i = 0; first && i < s->n_active; i++) { /* forks may have ended with their first token */
        sequence *other = &s->active[i];
        if (other != q && other->job == job && !other->over && job->choices[other->choice].finish != DT_FINISH_NONE) {
            end_sequence(s, other);
        }
    }
    if (job->choices[q->choice].finish != DT_FINISH_NONE) {
        end_sequence(s, q);
    } else if (job->wake != NULL && (!reading || job->tlc)) {
        job->wake(job->wake_user);
    }
}

/* ---- scoring ------------------------------------------------------------------------------------ */

typedef struct scoring {
    dt_scheduler *scheduler;
    dt_job *job;
    size_t first;
    bool out_of_memory;
} scoring;

static bool on_logits(size_t i, const float *logits, void *user) {
    scoring *sc = user;
    const size_t next = sc->first + i + 1;
    if (next < sc->job->n_tokens && !dt_job_add_prompt_record(sc->job, sc->scheduler->params.model, next, logits)) {
        sc->out_of_memory = true;
    }
    return !sc->out_of_memory;
}

/* Reads one more piece of a prompt whose tokens' probabilities are asked for. */
static dt_status score_piece(dt_scheduler *s, sequence *q, dt_error *error) {
    dt_job *job = q->job;
    scoring sc = {.scheduler = s, .job = job, .first = q->n_read};
    const size_t left = job->n_tokens - q->n_read, n = q->n_read == 0 ? 1 : left < (size_t)q->n_batch ? left : (size_t)q->n_batch;
    dt_status status;
    if (q->n_read == 0) { /* the first token has no probability */
        status = dt_session_sync(q->session, job->tokens, 1, NULL, NULL, NULL, error);
        sc.out_of_memory = !dt_job_add_prompt_record(job, s->params.model, 0, NULL);
        if (status == DT_OK) {
            on_logits(0, dt_session_logits(q->session), &sc);
        }
    } else {
        status = dt_session_score(q->session, job->tokens + q->n_read, n, on_logits, &sc, error);
    }
    if (sc.out_of_memory) {
        return out_of_memory(error);
    }
    q->n_read += status == DT_OK ? n : 0;
    return status;
}

/* ---- the thread --------------------------------------------------------------------------------- */

/* Which sequences compute in this step, and what. */
static size_t plan_step(dt_scheduler *s) {
    size_t n = 0;
    int32_t room = -1; /* tokens of prompts; the first one always gets its chunk */
    for (int32_t i = 0; i < s->n_active; i++) {
        const sequence *q = &s->active[i];
        const dt_job *job = q->job;
        if (q->follows || q->over || (job->score && q->n_read < job->n_tokens)) {
            continue;
        }
        dt_step step = {.session = q->session, .tokens = &q->token, .n = 1, .probability = q->probability};
        if (q->n_read < job->n_tokens) {
            const size_t left = job->n_tokens - q->n_read;
            const int32_t chunk = left < (size_t)q->n_batch ? (int32_t)left : q->n_batch;
            room = room < 0 ? q->n_batch : room;
            if (chunk > room) {
                continue;
            }
            room -= chunk;
            step = (dt_step){.session = q->session,
                             .tokens = job->tokens + q->n_read,
                             .n = chunk,
                             .n_follow = (int32_t)(left - (size_t)chunk),
                             .probability = 1.0f};
        }
        s->stepped[n] = (size_t)i;
        s->steps[n++] = step;
    }
    return n;
}

static void step_all(dt_scheduler *s) {
    const int64_t begun = now_us();
    const size_t n = plan_step(s);
    int64_t n_tokens = 0;
    if (n > 0) {
        dt_group_step(s->group, s->steps, n, NULL);
    }
    const double seconds = (double)(now_us() - begun) / 1e6;
    for (size_t i = 0; i < n; i++) {
        sequence *q = &s->active[s->stepped[i]];
        const dt_step *step = &s->steps[i];
        if (q->over) {
            continue; /* another reply of its job failed */
        }
        if (step->error.code != DT_OK) {
            fail_job(s, q->job, &step->error);
            continue;
        }
        n_tokens += step->n;
        q->n_read += q->n_read < q->job->n_tokens ? (size_t)step->n : 0;
        after_step(s, q, seconds);
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
        sequence *q = &s->active[i];
        if (!q->over && !q->follows && q->n_read == q->job->n_tokens && q->job->choices[q->choice].n_records == 0) {
            after_step(s, q, 0);
        }
    }
}

static void score_one(dt_scheduler *s) {
    for (int32_t i = 0; i < s->n_active; i++) {
        sequence *q = &s->active[i];
        if (!q->over && q->job->score && !q->follows && q->n_read < q->job->n_tokens) {
            dt_error error = {0};
            const int64_t begun = now_us();
            if (score_piece(s, q, &error) != DT_OK) {
                fail_job(s, q->job, &error);
            } else {
                after_step(s, q, (double)(now_us() - begun) / 1e6);
            }
            return; /* one piece a round: replies go on in between */
        }
    }
}

static void end_cancelled(dt_scheduler *s, bool all) {
    const dt_error error = {.code = DT_ERR_CANCELLED, .message = "cancelled"};
    for (int32_t i = 0; i < s->n_active; i++) {
        dt_job *job = s->active[i].job;
        if (!s->active[i].over && (all || atomic_load(&job->cancelled))) {
            fail_job(s, job, &error);
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
    while (ended != NULL) {
        dt_job *next = ended->next;
        job_is_over(s, ended, all ? &stopping : &cancelled);
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
        remove_ended(s);
        if (stopping && s->n_active == 0) {
            return NULL;
        }
        admit(s);
        begin_whole(s);
        remove_ended(s);
        step_all(s);
        score_one(s);
        remove_ended(s);
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
            jobs[i]->submitted_us = now_us();
            jobs[i]->next = NULL;
            *(s->last != NULL ? &s->last->next : &s->first) = jobs[i];
            s->last = jobs[i];
        }
        s->stats.n_waiting += (int64_t)n;
        pthread_cond_signal(&s->changed);
    } else {
        s->stats.n_refused++;
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

dt_status dt_scheduler_new(const dt_scheduler_params *params, dt_scheduler **out, dt_error *error) {
    dt_scheduler *s = calloc(1, sizeof *s);
    if (s == NULL) {
        return out_of_memory(error);
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
                           : out_of_memory(error);
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
    if (status == DT_OK && pthread_create(&s->thread, NULL, run, s) != 0) {
        status = out_of_memory(error);
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
    const int64_t until = now_us() + grace_ms * 1000;
    pthread_mutex_lock(&s->lock);
    s->stopping = true;
    pthread_cond_signal(&s->changed);
    while (s->stats.n_running > 0 && now_us() < until) {
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
