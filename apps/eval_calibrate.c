/*
 * deeptutor-eval calibrate: learns once per model what tells that a token will be needed, and writes an eviction config with it.
 *
 * Pieces of a text are read and repeated (score reconstruct); from all of them dt_calibration learns to foretell the scores from
 * keys and values, per KV head. Later runs use that at no cost (score predict). The table shows what each head got of one shared
 * budget: a few look far back and need nearly everything, most need the first tokens and the latest ones.
 */
#include "eval.h"
#include "json_parts.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

typedef struct calibration {
    eval *e;
    dt_calibration *learned;
    double *kept; /* [all lanes] summed over pieces */
    const dt_model_info *info;
} calibration;

static dt_status measure_piece(calibration *c, int64_t index, dt_error *error) {
    const eval_options *o = c->e->options;
    int64_t progress[] = {index, o->n_chunks};
    dt_session *base = NULL, *shared = NULL;
    const size_t room = c->e->n_text - (size_t)o->n_context; /* the pieces are spread evenly over the text */
    const size_t first = o->n_chunks > 1 ? room * (size_t)index / (size_t)(o->n_chunks - 1) : 0;
    dt_status status = eval_base_session(c->e, &base, error);
    if (status == DT_OK) {
        status = dt_session_sync(base, c->e->text + first, (size_t)o->n_context, eval_on_prefill, progress, NULL, error);
    }
    if (status == DT_OK) {
        status = dt_calibration_add(c->learned, base, error);
    }
    if (status == DT_OK) {
        status = dt_session_fork(base, c->e->settings[0].eviction, DT_EVICT_ONCE, &shared, error);
    }
    double *kept = c->kept;
    for (int32_t i = 0; i < c->info->n_layers && status == DT_OK; i++) {
        for (int32_t j = 0; j < c->info->n_kv_heads[i] && status == DT_OK; j++) {
            int32_t *positions = NULL;
            size_t n = 0;
            status = dt_session_kept_positions(shared, i, j, &positions, &n, error);
            *kept++ += (double)n;
            dt_free(positions);
        }
    }
    dt_session_free(shared);
    dt_session_free(base);
    return status;
}

/* The config becomes the command's result. */
static dt_status make_config(const calibration *c, dt_error *error) {
    char *text = NULL;
    const int64_t average = eval_size_of(c->e, c->e->settings[0].kept);
    const dt_status status = dt_calibration_config(c->learned, (int32_t)average, &text, error);
    if (status != DT_OK) {
        return status;
    }
    json_decref(c->e->result);
    c->e->result = dt_json_load(text, strlen(text), 0, NULL);
    dt_free(text);
    return c->e->result != NULL ? DT_OK : dt_app_fail(error, DT_ERR_MEMORY, "out of memory");
}

/* Columns line up, also where layers have different numbers of heads. */
static void report(const calibration *c) {
    static const char title[] = "tokens kept by each KV head";
    const double *kept = c->kept;
    const int digits = snprintf(NULL, 0, "%lld", (long long)c->e->options->n_context); /* no head keeps more */
    int width = (int)sizeof title - 1;
    for (int32_t i = 0; i < c->info->n_layers; i++) {
        const int needed = c->info->n_kv_heads[i] * (digits + 1) - 1;
        width = needed > width ? needed : width;
    }
    printf("| layer | %-*s |\n| ----: | ", width, title);
    for (int i = 0; i < width; i++) {
        putchar('-');
    }
    printf(" |\n");
    for (int32_t i = 0; i < c->info->n_layers; i++) {
        int column = printf("| %5d |", i);
        const int end = column + 1 + width;
        for (int32_t j = 0; j < c->info->n_kv_heads[i]; j++) {
            column += printf(" %*.0f", digits, *kept++ / (double)c->e->options->n_chunks);
        }
        printf("%*s |\n", end - column, "");
    }
}

dt_status eval_calibrate(eval *e, dt_error *error) {
    const eval_options *o = e->options;
    const dt_model_info *info = dt_model_get_info(e->model);
    calibration c = {.e = e, .info = info};
    if (e->n_text < (size_t)(o->n_chunks * o->n_context)) { /* pieces that overlap would teach little */
        return eval_too_short(e, (size_t)o->n_chunks, (size_t)o->n_context, error);
    }
    size_t n_lanes = 0;
    for (int32_t i = 0; i < info->n_layers; i++) {
        n_lanes += (size_t)info->n_kv_heads[i];
    }
    assert(n_lanes > 0);
    c.kept = calloc(n_lanes, sizeof *c.kept);
    dt_status status =
        c.kept != NULL ? dt_calibration_new(e->model, &c.learned, error) : dt_app_fail(error, DT_ERR_MEMORY, "out of memory");
    for (int64_t i = 0; i < o->n_chunks && status == DT_OK; i++) {
        status = measure_piece(&c, i, error);
    }
    dt_report_progress_end();
    if (status == DT_OK) {
        report(&c);
        status = make_config(&c, error);
    }
    dt_calibration_free(c.learned);
    free(c.kept);
    return status;
}
