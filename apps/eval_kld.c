/*
 * deeptutor-eval kld: how far the next-token distributions after eviction are from those of the full cache.
 *
 * A chunk of the text is read as context; then its continuation is fed to the full cache and to a fork of it under each setting;
 * or, of settings that quote, a passage of the context is fed again, which only a cache that still has it can go on with. After
 * every token: Kullback-Leibler divergence KL(full || evicted) in nats, whether both find the same token likeliest, and the negative
 * log likelihood that each gives to the token that follows. Means are over tokens, then over chunks; the standard error is that of
 * the mean over chunks.
 */
#include "eval_map.h"
#include "run.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct chunk_sums {
    double kld, same, nll, nll_full, kept;
} chunk_sums;

/* What settings have in common that are measured against one pass of the full cache. */
typedef struct pass {
    double quote;
    dt_evict evict;
} pass;

typedef struct comparison {
    pass pass;
    size_t n_vocab, n;
    const int32_t *fed; /* [n + 1]: each, and the token that follows it */
    size_t first;       /* of the tokens being fed */
    float *full;        /* [n][n_vocab] log probabilities */
    chunk_sums *sums;
    int64_t progress[2];
} comparison;

/* Log probabilities in place of logits; returns the likeliest token. */
static size_t log_softmax(const float *logits, size_t n, float *out) {
    size_t best = 0;
    for (size_t i = 1; i < n; i++) {
        best = logits[i] > logits[best] ? i : best;
    }
    double sum = 0;
    for (size_t i = 0; i < n; i++) {
        sum += (double)expf(logits[i] - logits[best]);
    }
    const float shift = logits[best] + (float)log(sum);
    for (size_t i = 0; i < n; i++) {
        out[i] = logits[i] - shift;
    }
    return best;
}

static bool keep_full(size_t i, const float *logits, void *user) {
    comparison *c = user;
    log_softmax(logits, c->n_vocab, c->full + (c->first + i) * c->n_vocab);
    return !dt_interrupted;
}

static bool compare(size_t i, const float *logits, void *user) {
    comparison *c = user;
    float *full = c->full + (c->first + i) * c->n_vocab, *evicted = c->full + c->n * c->n_vocab; /* one more row, for this */
    const size_t best = log_softmax(logits, c->n_vocab, evicted);
    size_t best_full = 0;
    double kld = 0;
    for (size_t t = 0; t < c->n_vocab; t++) {
        kld += (double)(expf(full[t]) * (full[t] - evicted[t]));
        best_full = full[t] > full[best_full] ? t : best_full;
    }
    c->sums->kld += kld;
    c->sums->same += best == best_full ? 1 : 0;
    const int32_t next = c->fed[c->first + i + 1];
    c->sums->nll -= (double)evicted[next];
    c->sums->nll_full -= (double)full[next];
    return !dt_interrupted;
}

/* Feeds the continuation: token by token where eviction goes on, as serving does, else in batches. Both sides alike, since a matrix
 * product rounds differently for one token than for several: that alone would be a divergence of up to 0.007. */
static dt_status feed(dt_session *session, comparison *c, dt_logits_fn fn, dt_error *error) {
    const size_t step = c->pass.evict == DT_EVICT_ALWAYS ? 1 : c->n;
    dt_status status = DT_OK;
    for (c->first = 0; c->first < c->n && status == DT_OK; c->first += step) {
        status = dt_session_score(session, c->fed + c->first, step, fn, c, error);
    }
    return status == DT_ERR_CANCELLED ? dt_app_fail(error, status, "stopped") : status;
}

static dt_status measure_setting(eval *e, const dt_session *base, size_t setting, comparison *c, eval_map *map, dt_error *error) {
    dt_session *evicted = NULL;
    dt_status status = eval_evicted_session(e, base, &e->settings[setting], &evicted, error);
    if (status == DT_OK) {
        c->sums->kept = eval_kept_share(e, evicted);
        status = eval_map_add(map, setting, base, evicted, error);
    }
    if (status == DT_OK) {
        status = feed(evicted, c, compare, error);
    }
    if (status == DT_OK) {
        eval_note_evicted(&e->settings[setting], evicted);
    }
    dt_session_free(evicted);
    const double n = (double)c->n;
    *c->sums = (chunk_sums){c->sums->kld / n, c->sums->same / n, c->sums->nll / n, c->sums->nll_full / n, c->sums->kept};
    return status;
}

static bool is_of(const eval_setting *setting, pass p) { return setting->quote == p.quote && setting->evict == p.evict; }

/* The settings of one pass. */
static dt_status measure_pass(eval *e, const dt_session *base, comparison *c, chunk_sums *sums, eval_map *map, dt_error *error) {
    dt_session *reference = NULL;
    dt_status status = dt_session_fork(base, NULL, DT_EVICT_ALWAYS, &reference, error);
    if (status == DT_OK) {
        status = feed(reference, c, keep_full, error);
    }
    dt_session_free(reference);
    for (size_t i = 0; i < e->n_settings && status == DT_OK; i++) {
        if (is_of(&e->settings[i], c->pass)) {
            c->sums = &sums[i];
            status = measure_setting(e, base, i, c, map, error);
            eval_progress(++c->progress[0], c->progress[1]);
        }
    }
    return status;
}

/* Whether an earlier setting is of the same pass. */
static bool is_measured(const eval *e, size_t setting) {
    bool any = false;
    for (size_t i = 0; i < setting; i++) {
        any = any || is_of(&e->settings[i], (pass){e->settings[setting].quote, e->settings[setting].evict});
    }
    return any;
}

/* sums: [n_settings]. A chunk is n_context + n_continuation + 1 tokens. */
static dt_status measure_chunk(eval *e, size_t index, float *full, chunk_sums *sums, eval_map *map, dt_error *error) {
    const eval_options *o = e->options;
    const size_t n_context = (size_t)o->n_context, n = (size_t)o->n_continuation, n_steps = e->n_settings + 1;
    const int32_t *text = e->text + index * (n_context + n + 1);
    comparison c = {.n_vocab = (size_t)dt_model_get_info(e->model)->n_vocab,
                    .n = n,
                    .full = full,
                    .progress = {(int64_t)(index * n_steps), o->n_chunks * (int64_t)n_steps}};
    dt_session *base = NULL;
    dt_status status = eval_base_session(e, &base, error);
    if (status == DT_OK) {
        status = dt_session_sync(base, text, n_context, eval_on_prefill, c.progress, NULL, error);
    }
    c.progress[0]++;
    for (size_t i = 0; i < e->n_settings && status == DT_OK; i++) {
        c.pass = (pass){e->settings[i].quote, e->settings[i].evict};
        c.fed = text + (c.pass.quote < 0 ? n_context : (size_t)(c.pass.quote * (double)(n_context - n - 1)));
        if (!is_measured(e, i)) {
            status = measure_pass(e, base, &c, sums, map, error);
        }
    }
    dt_session_free(base);
    return status;
}

static eval_mean mean_over_chunks(const chunk_sums *sums, size_t n_chunks, size_t stride, size_t member, double *values) {
    for (size_t i = 0; i < n_chunks; i++) {
        memcpy(&values[i], (const char *)&sums[i * stride] + member, sizeof *values);
    }
    return eval_mean_of(values, n_chunks);
}

static void report(eval *e, const chunk_sums *sums, const eval_map *map, double *values) {
    const size_t n_chunks = (size_t)e->options->n_chunks, n = e->n_settings;
    json_t *rows = json_array();
    eval_print_name(e, "setting");
    puts("|   kept |    KLD |     +- | top-1 |    NLL | NLL full |");
    eval_print_name(e, NULL);
    puts("| -----: | -----: | -----: | ----: | -----: | -------: |");
    for (size_t s = 0; s < n; s++) {
#define MEAN(member) mean_over_chunks(sums + s, n_chunks, n, offsetof(chunk_sums, member), values)
        const eval_mean kld = MEAN(kld), same = MEAN(same), nll = MEAN(nll), full = MEAN(nll_full), kept = MEAN(kept);
#undef MEAN
        eval_print_name(e, e->settings[s].name);
        printf("| %6.4f | %6.4f | %6s | %5.3f | %6.4f | %8.4f |\n", kept.mean, kld.mean, eval_error_text_of(kld).text, same.mean,
               nll.mean, full.mean);
        json_t *chunks = json_array();
        for (size_t i = 0; i < n_chunks; i++) {
            const chunk_sums *c = &sums[i * n + s];
            json_array_append_new(chunks, json_pack("{sf sf sf sf sf}", "kld", c->kld, "top1", c->same, "nll", c->nll, "nll_full",
                                                    c->nll_full, "kept_share", c->kept));
        }
        json_array_append_new(rows, json_pack("{sf sf so sf sf sf sf so}", "budget_share", e->settings[s].kept, "kld", kld.mean,
                                              "kld_error", eval_error_json(kld), "top1", same.mean, "nll", nll.mean, "nll_full",
                                              full.mean, "kept_share", kept.mean, "chunks", chunks));
        if (e->settings[s].name != NULL) {
            json_object_set_new(json_array_get(rows, s), "name", json_string(e->settings[s].name));
            json_object_set_new(json_array_get(rows, s), "evict", json_string(eval_evict_word(e->settings[s].evict)));
        } else {
            json_object_set_new(json_array_get(rows, s), "map", eval_map_json(map, s));
        }
    }
    if (e->settings[0].name == NULL) {
        json_object_set_new(e->result, "mass", eval_map_mass(map));
    }
    eval_set_result(e, rows);
}

dt_status eval_kld(eval *e, dt_error *error) {
    const eval_options *o = e->options;
    const size_t per_chunk = (size_t)(o->n_context + o->n_continuation + 1), n_chunks = (size_t)o->n_chunks;
    if (e->n_text < per_chunk * n_chunks) {
        return eval_too_short(e, n_chunks, per_chunk, error);
    }
    for (size_t i = 0; i < e->n_settings; i++) {
        if (e->settings[i].quote >= 0 && o->n_continuation >= o->n_context) {
            return dt_app_fail(error, DT_ERR_ARGUMENT, "a quotation of %lld tokens needs a longer --context than %lld",
                               (long long)o->n_continuation + 1, (long long)o->n_context);
        }
    }
    const size_t n_vocab = (size_t)dt_model_get_info(e->model)->n_vocab;
    float *full = malloc(((size_t)o->n_continuation + 1) * n_vocab * sizeof *full);
    /* there is a setting: NOLINTNEXTLINE(clang-analyzer-optin.portability.UnixAPI) */
    chunk_sums *sums = calloc(n_chunks * e->n_settings, sizeof *sums);
    double *values = calloc(n_chunks, sizeof *values);
    eval_map *map = eval_map_new(e);
    dt_status status = full != NULL && sums != NULL && values != NULL && map != NULL
                           ? DT_OK
                           : dt_app_fail(error, DT_ERR_MEMORY,
                                         "out of memory for %lld tokens' distributions; give a smaller "
                                         "--continuation",
                                         (long long)o->n_continuation);
    if (status == DT_OK) {
        status = eval_tell_settings(e, error);
    }
    for (size_t i = 0; i < n_chunks && status == DT_OK; i++) {
        status = measure_chunk(e, i, full, sums + i * e->n_settings, map, error);
    }
    dt_report_progress_end();
    if (status == DT_OK) {
        report(e, sums, map, values);
    }
    eval_map_free(map);
    free(full);
    free(sums);
    free(values);
    return status;
}
