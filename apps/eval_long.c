/*
 * deeptutor-eval long: whether a conversation far beyond the context still predicts as one within it.
 *
 * One session reads the text from its beginning, with streaming prefill and eviction, far past the context. Pieces of the text are
 * scored on the way, token by token. Another session, begun one context's length before the piece under the same settings, scores
 * the same piece: so the text's difficulty cancels, and what remains is what the length costs. Perplexity is compared over all
 * pieces.
 */
#include "eval.h"
#include "run.h"

#include <math.h>
#include <stdlib.h>

typedef struct piece {
    size_t at; /* tokens before it */
    double nll, nll_fresh;
} piece;

typedef struct scoring {
    size_t n_vocab;
    const int32_t *next; /* the token that follows each of the fed ones */
    double sum;
} scoring;

static bool add_nll(size_t i, const float *logits, void *user) {
    scoring *s = user;
    float largest = logits[0];
    for (size_t t = 1; t < s->n_vocab; t++) {
        largest = logits[t] > largest ? logits[t] : largest;
    }
    double sum = 0;
    for (size_t t = 0; t < s->n_vocab; t++) {
        sum += (double)expf(logits[t] - largest);
    }
    s->sum += log(sum) + (double)largest - (double)logits[s->next[i]];
    return !dt_interrupted;
}

static bool on_prefill(int64_t done, int64_t total, void *user) {
    const int64_t *progress = user;
    (void)total;
    return eval_progress(progress[0] + done, progress[1]);
}

static dt_status open_session(const eval *e, const eval_setting *setting, dt_session **out, dt_error *error) {
    dt_session_params params;
    dt_shared_options_session(&e->options->shared, &params);
    params.n_ctx = (int32_t)e->options->n_context;
    params.prefill = DT_PREFILL_STREAMING;
    params.eviction = setting->eviction;
    params.n_snapshots = -1;
    return dt_session_new(e->model, &params, out, error);
}

/* Before anything is measured: whether the settings let a conversation pass its context. */
static dt_status check_passes(const eval *e, const eval_setting *setting, dt_error *error) {
    dt_session *session = NULL;
    dt_session_stats stats;
    const dt_status status = open_session(e, setting, &session, error);
    if (status != DT_OK) {
        return status;
    }
    dt_session_get_stats(session, &stats);
    dt_session_free(session);
    return stats.n_ctx > e->options->n_context
               ? DT_OK
               : dt_app_fail(
                     error, DT_ERR_ARGUMENT,
                     "these settings leave no room to go past a context of %lld: every layer has to evict, down to a budget "
                     "(--kept, --max-cache-size) well below it",
                     (long long)e->options->n_context);
}

/* Goes on to token `to` of text, then scores n tokens from there; *nll: mean. */
static dt_status read_and_score(const eval *e, dt_session *s, const int32_t *text, size_t to, int64_t progress[2], double *nll,
                                dt_error *error) {
    const size_t n = (size_t)e->options->n_continuation;
    scoring c = {.n_vocab = (size_t)dt_model_get_info(e->model)->n_vocab, .next = text + to + 1};
    dt_sync_result result = {0};
    dt_status status = dt_session_sync(s, text, to, on_prefill, progress, &result, error);
    progress[0] += result.computed_tokens;
    if (status == DT_OK) {
        status = dt_session_score(s, text + to, n, add_nll, &c, error);
    }
    *nll = c.sum / (double)n;
    return status;
}

static dt_status measure(const eval *e, eval_setting *setting, piece *pieces, size_t n_pieces, dt_error *error) {
    const size_t context = (size_t)e->options->n_context;
    int64_t progress[] = {0, (int64_t)(pieces[n_pieces - 1].at + n_pieces * context)};
    dt_session *deep = NULL;
    dt_status status = open_session(e, setting, &deep, error);
    for (size_t i = 0; i < n_pieces && status == DT_OK; i++) {
        dt_session *fresh = NULL;
        status = read_and_score(e, deep, e->text, pieces[i].at, progress, &pieces[i].nll, error);
        status = status == DT_OK ? open_session(e, setting, &fresh, error) : status;
        if (status == DT_OK) {
            status = read_and_score(e, fresh, e->text + pieces[i].at - context, context, progress, &pieces[i].nll_fresh, error);
        }
        dt_session_free(fresh);
    }
    if (status == DT_OK) {
        eval_note_evicted(setting, deep);
    }
    dt_session_free(deep);
    return status;
}

static void report(const eval *e, const eval_setting *setting, const piece *pieces, size_t n_pieces, json_t *rows) {
    double nll = 0, fresh = 0;
    json_t *list = json_array();
    char title[48];
    const int width = snprintf(title, sizeof title, "begun %lld before", (long long)e->options->n_context);
    printf("| tokens before |    NLL | %s |\n| ------------: | -----: | %.*s: |\n", title, width - 1,
           "-----------------------------------------------");
    for (size_t i = 0; i < n_pieces; i++) {
        const piece *p = &pieces[i];
        printf("| %13zu | %6.4f | %*.4f |\n", p->at, p->nll, width, p->nll_fresh);
        json_array_append_new(list, json_pack("{sI sf sf}", "tokens", (json_int_t)p->at, "nll", p->nll, "nll_fresh", p->nll_fresh));
        nll += p->nll / (double)n_pieces;
        fresh += p->nll_fresh / (double)n_pieces;
    }
    printf("perplexity %.3f, begun %lld tokens before each piece %.3f: %+.2f %%\n", exp(nll), (long long)e->options->n_context,
           exp(fresh), 100 * expm1(nll - fresh));
    json_array_append_new(rows, json_pack("{sf sf sf sf so}", "budget_share", setting->kept, "nll", nll, "nll_fresh", fresh,
                                          "excess", expm1(nll - fresh), "pieces", list));
}

dt_status eval_long(eval *e, dt_error *error) {
    const eval_options *o = e->options;
    const size_t context = (size_t)o->n_context, n_pieces = (size_t)o->n_chunks, n = (size_t)o->n_continuation;
    const size_t times = (size_t)o->n_times, last = context * times, step = last > context ? (last - context) / n_pieces : 0;
    if (e->n_text < 2 * context + n + 1) {
        return dt_app_fail(
            error, DT_ERR_ARGUMENT,
            "the text has %zu tokens, less than two contexts of %zu and a piece of %zu: give a longer one, or a smaller "
            "--context or --continuation",
            e->n_text, context, n);
    }
    if (step < n) {
        return dt_app_fail(error, DT_ERR_ARGUMENT,
                           "%zu pieces of %zu tokens don't fit between %zu and %zu tokens: give fewer or shorter ones (--chunks, "
                           "--continuation), or more --times",
                           n_pieces, n, context, last);
    }
    if (e->n_text < last + n + 1) {
        return dt_app_fail(error, DT_ERR_ARGUMENT,
                           "%zu pieces of %zu tokens up to %zu times a context of %zu need a text of %zu tokens; this one has %zu: "
                           "give fewer --times",
                           n_pieces, n, times, context, last + n + 1, e->n_text);
    }
    piece *pieces = calloc(n_pieces, sizeof *pieces);
    if (pieces == NULL) {
        return dt_app_fail(error, DT_ERR_MEMORY, "out of memory");
    }
    dt_status status = DT_OK;
    json_t *rows = json_array();
    for (size_t i = 0; i < e->n_settings && status == DT_OK; i++) {
        status = check_passes(e, &e->settings[i], error);
    }
    if (status == DT_OK) {
        status = eval_tell_settings(e, error);
    }
    for (size_t i = 0; i < e->n_settings && status == DT_OK; i++) {
        for (size_t j = 0; j < n_pieces; j++) {
            pieces[j].at = last - (n_pieces - 1 - j) * step;
        }
        status = measure(e, &e->settings[i], pieces, n_pieces, error);
        dt_report_progress_end();
        if (status == DT_OK) {
            report(e, &e->settings[i], pieces, n_pieces, rows);
        }
    }
    free(pieces);
    if (status == DT_OK) {
        eval_set_result(e, rows);
    } else {
        json_decref(rows);
    }
    return status;
}
