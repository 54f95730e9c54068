/*
 * What comes of a job: text with stop strings, log probabilities. See job.h.
 */
#include "job.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

dt_job *dt_job_new(void) {
    dt_job *job = calloc(1, sizeof *job);
    if (job != NULL && pthread_mutex_init(&job->lock, NULL) != 0) {
        free(job);
        job = NULL;
    }
    return job;
}

void dt_job_free(dt_job *job) {
    if (job == NULL) {
        return;
    }
    for (int32_t i = 0; i < DT_JOB_CHOICES_MAX; i++) {
        dt_sampler_free(job->choices[i].sampler);
        free(job->choices[i].text);
        free(job->choices[i].records);
        free(job->choices[i].tops);
    }
    for (size_t i = 0; i < job->n_stops; i++) {
        free(job->stops[i]);
    }
    dt_free(job->tokens);
    free(job->text);
    free(job->anchors);
    dt_eviction_free(job->own_eviction ? (dt_eviction *)job->eviction : NULL);
    free(job->eviction_key);
    free(job->prompt_records);
    free(job->prompt_tops);
    free(job->tlc_json);
    pthread_mutex_destroy(&job->lock);
    free(job);
}

static bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

size_t dt_after_reply(const char *text, size_t n, const char *reply, size_t n_reply) {
    if (n >= n_reply && memcmp(text, reply, n_reply) == 0) {
        return n_reply;
    }
    size_t from = 0, at = 0;
    while (from < n_reply && is_space(reply[from])) {
        from++;
    }
    while (n_reply > from && is_space(reply[n_reply - 1])) {
        n_reply--;
    }
    while (at < n && is_space(text[at])) {
        at++;
    }
    return n_reply > from && n - at >= n_reply - from && memcmp(text + at, reply + from, n_reply - from) == 0 ? at + n_reply - from
                                                                                                              : SIZE_MAX;
}

/* ---- logprobs ----------------------------------------------------------------------------------- */

/* Log probability of `token` and the n_top likeliest of all, likeliest first. */
static float log_probabilities(const float *logits, int32_t n_vocab, int32_t token, dt_top *tops, int32_t n_top) {
    float maximum = logits[0];
    for (int32_t i = 1; i < n_vocab; i++) {
        maximum = logits[i] > maximum ? logits[i] : maximum;
    }
    double sum = 0;
    int32_t n = 0;
    for (int32_t i = 0; i < n_vocab; i++) {
        sum += (double)expf(logits[i] - maximum);
        if (n < n_top || (n_top > 0 && logits[i] > tops[n_top - 1].logprob)) { /* insertion: n_top is small */
            int32_t at = n < n_top ? n++ : n_top - 1;
            for (; at > 0 && tops[at - 1].logprob < logits[i]; at--) {
                tops[at] = tops[at - 1];
            }
            tops[at] = (dt_top){i, logits[i]};
        }
    }
    const float shift = maximum + (float)log(sum);
    for (int32_t i = 0; i < n; i++) {
        tops[i].logprob -= shift;
    }
    for (; n < n_top; n++) {
        tops[n] = (dt_top){-1, 0}; /* a vocabulary smaller than that */
    }
    return logits[token] - shift;
}

static bool grow_records(dt_job *job, dt_record **records, dt_top **tops, size_t capacity) {
    dt_record *grown = realloc(*records, capacity * sizeof *grown);
    if (grown == NULL) {
        return false;
    }
    *records = grown;
    if (job->n_top > 0) {
        dt_top *more = realloc(*tops, capacity * (size_t)job->n_top * sizeof *more);
        if (more == NULL) {
            return false;
        }
        *tops = more;
    }
    return true;
}

static dt_record make_record(const dt_job *job, const dt_model *model, int32_t token, const float *logits, dt_top *tops) {
    const int32_t n_vocab = dt_model_get_info(model)->n_vocab;
    return (dt_record){
        .token = token,
        .logprob = logits != NULL ? log_probabilities(logits, n_vocab, token, tops, job->n_top) : NAN,
    };
}

bool dt_job_add_prompt_record(dt_job *job, const dt_model *model, size_t i, const float *logits) {
    pthread_mutex_lock(&job->lock);
    bool fits = true;
    if (job->prompt_records == NULL) {
        fits = grow_records(job, &job->prompt_records, &job->prompt_tops, job->n_tokens);
    }
    if (fits) {
        dt_top *tops = job->n_top > 0 ? job->prompt_tops + i * (size_t)job->n_top : NULL;
        job->prompt_records[i] = make_record(job, model, job->tokens[i], logits, tops);
        job->n_prompt_records = i + 1;
    }
    pthread_mutex_unlock(&job->lock);
    return fits;
}

/* ---- replies ------------------------------------------------------------------------------------ */

static bool append_bytes(dt_choice *c, const dt_model *model, int32_t token) {
    const size_t room = 256;
    for (size_t needed = room;;) {
        if (c->text_capacity - c->n_text < needed) {
            const size_t capacity = 2 * c->text_capacity + needed;
            char *grown = realloc(c->text, capacity);
            if (grown == NULL) {
                return false;
            }
            c->text = grown;
            c->text_capacity = capacity;
        }
        const size_t left = c->text_capacity - c->n_text, n = dt_token_bytes(model, token, false, c->text + c->n_text, left);
        if (n <= left) {
            c->n_text += n;
            return true;
        }
        needed = n;
    }
}

/* Looks for stop strings that end at or after byte `from`. Cuts the text before the first; else finds what is safe to show. */
static bool find_stop(const dt_job *job, dt_choice *c, size_t from) {
    size_t first = SIZE_MAX, held = 0;
    for (size_t s = 0; s < job->n_stops; s++) {
        const char *stop = job->stops[s];
        const size_t n = strlen(stop);
        for (size_t at = from >= n ? from - n + 1 : 0; at + n <= c->n_text && at < first; at++) {
            if (memcmp(c->text + at, stop, n) == 0) {
                first = at;
            }
        }
        for (size_t m = n - 1 < c->n_text ? n - 1 : c->n_text; m > held; m--) {
            if (memcmp(c->text + c->n_text - m, stop, m) == 0) {
                held = m;
            }
        }
    }
    if (first != SIZE_MAX) {
        c->n_text = first;
        return true;
    }
    const size_t safe = dt_whole_characters(c->text, c->n_text - held);
    c->n_safe = safe > c->n_safe ? safe : c->n_safe;
    return false;
}

static void finish_choice(dt_choice *c, dt_finish finish) {
    c->finish = finish;
    c->n_safe = c->n_text;
}

static bool add_token(dt_job *job, dt_choice *c, const dt_model *model, int32_t token, const float *logits) {
    if (c->n_records == c->record_capacity) {
        const size_t capacity = 2 * c->record_capacity + 64;
        if (!grow_records(job, &c->records, &c->tops, capacity)) {
            return false;
        }
        c->record_capacity = capacity;
    }
    dt_top *tops = job->n_top > 0 ? c->tops + c->n_records * (size_t)job->n_top : NULL;
    dt_record *record = &c->records[c->n_records];
    *record = make_record(job, model, token, logits, tops);
    c->ended = dt_token_is_end(model, token);
    const size_t before = c->n_text;
    if (!c->ended && !append_bytes(c, model, token)) {
        return false;
    }
    record->text_end = c->n_text;
    c->n_records++;
    if (c->ended || find_stop(job, c, before)) {
        finish_choice(c, DT_FINISH_STOP);
    } else if ((int64_t)c->n_records >= job->max_tokens) {
        finish_choice(c, DT_FINISH_LENGTH);
    }
    return true;
}

bool dt_job_add_token(dt_job *job, int32_t choice, const dt_model *model, int32_t token, const float *logits) {
    pthread_mutex_lock(&job->lock);
    const bool added = add_token(job, &job->choices[choice], model, token, job->logprobs ? logits : NULL);
    pthread_mutex_unlock(&job->lock);
    return added;
}

void dt_job_finish_choice(dt_job *job, int32_t choice, dt_finish finish) {
    pthread_mutex_lock(&job->lock);
    finish_choice(&job->choices[choice], finish);
    pthread_mutex_unlock(&job->lock);
}

void dt_job_finish(dt_job *job, const dt_error *error) {
    void (*wake)(void *) = job->wake;
    void *user = job->wake_user;
    pthread_mutex_lock(&job->lock);
    for (int32_t i = 0; i < job->n_choices; i++) {
        if (job->choices[i].finish == DT_FINISH_NONE) {
            finish_choice(&job->choices[i], DT_FINISH_ERROR);
        }
    }
    if (error != NULL) {
        job->error = *error;
    }
    job->state = DT_JOB_DONE;
    if (wake != NULL) { /* under the lock: once it is released the job may be freed */
        wake(user);
    }
    pthread_mutex_unlock(&job->lock);
}
