/*
 * Replies in the making. See sequence.h.
 */
#define _POSIX_C_SOURCE 200809L
#include "sequence.h"
#include "tlc_json.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define TLC_INTERVAL_US 250000

int64_t dt_now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

/* ---- ends --------------------------------------------------------------------------------------- */

void dt_sequence_job_is_over(dt_scheduler *s, dt_job *job, const dt_error *error) {
    const double seconds = (double)(dt_now_us() - job->submitted_us) / 1e6;
    pthread_mutex_lock(&s->lock);
    *(error == NULL ? &s->stats.n_done : error->code == DT_ERR_CANCELLED ? &s->stats.n_cancelled : &s->stats.n_failed) += 1;
    if (error == NULL) {
        dt_histogram_add(&s->stats.job, seconds);
        s->mean_job_seconds = s->mean_job_seconds > 0 ? 0.9 * s->mean_job_seconds + 0.1 * seconds : seconds;
    }
    pthread_mutex_unlock(&s->lock);
    dt_job_finish(job, error);
}

static void end_conversation(dt_scheduler *s, dt_sequence *q, bool keep) {
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

void dt_sequence_fail_job(dt_scheduler *s, dt_job *job, const dt_error *error) {
    for (int32_t i = 0; i < s->n_active; i++) {
        if (s->active[i].job == job && !s->active[i].over) {
            end_conversation(s, &s->active[i], error->code == DT_ERR_CANCELLED);
        }
    }
    dt_sequence_job_is_over(s, job, error);
}

static void send_tlc(const dt_scheduler *s, dt_sequence *q, const char *phase, bool force) {
    dt_job *job = q->job;
    const int64_t now = dt_now_us();
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
        job->tlc_ended = strcmp(phase, "done") == 0;
    }
    pthread_mutex_unlock(&job->lock);
}

static void end_sequence(dt_scheduler *s, dt_sequence *q) {
    dt_job *job = q->job;
    send_tlc(s, q, "done", true);
    end_conversation(s, q, true);
    for (int32_t i = 0; i < s->n_active; i++) {
        if (s->active[i].job == job && !s->active[i].over) {
            return;
        }
    }
    dt_sequence_job_is_over(s, job, NULL);
}

void dt_sequence_remove_ended(dt_scheduler *s) {
    int32_t n = 0;
    for (int32_t i = 0; i < s->n_active; i++) {
        if (!s->active[i].over) {
            s->active[n++] = s->active[i];
        }
    }
    s->n_active = n;
}

/* ---- tokens ------------------------------------------------------------------------------------- */

static dt_status out_of_memory(dt_error *error) {
    snprintf(error->message, sizeof error->message, "out of memory for the reply");
    return error->code = DT_ERR_MEMORY;
}

/* Samples what comes after the session's last token. */
static dt_status sample(dt_scheduler *s, dt_sequence *q, dt_error *error) {
    dt_choice *choice = &q->job->choices[q->choice];
    const float *logits = dt_session_logits(q->session);
    if (logits == NULL) {
        snprintf(error->message, sizeof error->message, "the session has no logits");
        return error->code = DT_ERR_INTERNAL;
    }
    dt_status status = dt_sampler_sample(choice->sampler, logits, &q->token, NULL, error);
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
        dt_histogram_add(&s->stats.first_token, (double)(dt_now_us() - job->submitted_us) / 1e6);
    } else {
        dt_histogram_add(&s->stats.token, step_seconds);
    }
    pthread_mutex_unlock(&s->lock);
}

/* The other replies of a job begin where its prompt ends. */
static dt_status branch_choices(dt_scheduler *s, const dt_sequence *q, dt_error *error) {
    dt_status status = DT_OK;
    for (int32_t i = 0; status == DT_OK && i < s->n_active; i++) {
        dt_sequence *other = &s->active[i];
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

/* Tokens of the conversation that the cache lacks, summed over layers, mean of lanes: also those that went in an earlier turn, or in a
 * beginning that it shares with others. */
static int64_t n_lacking(const dt_session *session, int32_t n_tokens) {
    dt_layer_stats layer;
    double n = 0;
    for (int32_t i = 0; dt_session_get_layer_stats(session, i, &layer) == DT_OK; i++) {
        n += strcmp(layer.policy, "none") != 0 ? n_tokens - layer.mean_length : 0;
    }
    return llround(n);
}

/* Rounds that the last step brought. */
static void note_rounds(dt_scheduler *s, dt_sequence *q) {
    dt_session_stats stats;
    dt_session_get_stats(q->session, &stats);
    dt_conversations_note_step(s->conversations, q->conversation);
    const int64_t lacking = n_lacking(q->session, stats.n_tokens);
    const int64_t rounds = stats.eviction_rounds - q->n_rounds, evicted = stats.evicted_tokens - q->n_evicted;
    if (rounds > 0) {
        pthread_mutex_lock(&s->lock);
        s->stats.eviction_rounds += rounds;
        s->stats.evicted_tokens += evicted;
        pthread_mutex_unlock(&s->lock);
    }
    if (lacking != q->n_lacking) {
        pthread_mutex_lock(&q->job->lock);
        q->job->evicted_tokens += lacking - q->n_lacking;
        pthread_mutex_unlock(&q->job->lock);
    }
    q->n_lacking = lacking;
    q->n_rounds = stats.eviction_rounds;
    q->n_evicted = stats.evicted_tokens;
}

/* After a step of this dt_sequence: n_read tokens of the prompt are in the session, and perhaps some of the reply. */
void dt_sequence_after_step(dt_scheduler *s, dt_sequence *q, double seconds) {
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
            dt_sequence *other = &s->active[i];
            if (other->job == job && other->follows) {
                dt_job_finish_choice(job, other->choice, DT_FINISH_LENGTH);
                other->over = true;
            }
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
        dt_sequence_fail_job(s, job, &error);
        return;
    }
    for (int32_t i = 0; first && i < s->n_active; i++) { /* forks may have ended with their first token */
        dt_sequence *other = &s->active[i];
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

dt_status dt_sequence_score_piece(dt_scheduler *s, dt_sequence *q, dt_error *error) {
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
