/*
 * deeptutor-eval calibrate: measures once per model how much of a long text each KV head needs, and writes an eviction config with a
 * size for every head.
 *
 * A few heads look far back and need nearly everything, most need the first tokens and the latest ones (DuoAttention, Xiao et al.
 * 2024; KVzip's head-level budgets). Which ones they are belongs to the model, hardly to the text. So: read pieces of the text, share
 * one budget out over all heads by their reconstruction scores, and take the mean of what each head got. Later runs use the sizes at
 * no cost.
 */
#include "eval.h"

#include <stdlib.h>

#define SINKS 4
#define RECENT 64
#define SMALLEST (SINKS + RECENT + 28) /* tokens of a head that needs next to nothing; a round then frees 6 of 96 */

typedef struct calibration {
    eval *e;
    int64_t average; /* max_cache_size */
    double *kept;    /* [all lanes] summed over pieces */
    int32_t n_layers;
    const int32_t *n_kv_heads;
} calibration;

static bool on_prefill(int64_t done, int64_t total, void *user) {
    (void)done;
    (void)total;
    return eval_progress(((int64_t *)user)[0], ((int64_t *)user)[1], NULL);
}

static dt_status measure_piece(calibration *c, int64_t index, dt_error *error) {
    const eval_options *o = c->e->options;
    int64_t progress[] = {index, o->n_chunks};
    dt_session *base = NULL, *shared = NULL;
    dt_status status = eval_base_session(c->e, &base, error);
    if (status == DT_OK) {
        status = dt_session_sync(base, c->e->text + index * o->n_context, (size_t)o->n_context, on_prefill, progress, NULL, error);
    }
    if (status == DT_OK) {
        status = dt_session_fork(base, c->e->settings[0].eviction, DT_EVICT_ONCE, &shared, error);
    }
    double *kept = c->kept;
    for (int32_t i = 0; i < c->n_layers && status == DT_OK; i++) {
        for (int32_t j = 0; j < c->n_kv_heads[i] && status == DT_OK; j++) {
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

static void write_config(const calibration *c) {
    const double *kept = c->kept;
    json_t *config = json_object();
    for (int32_t i = 0; i < c->n_layers; i++) {
        json_t *lanes = json_array();
        for (int32_t j = 0; j < c->n_kv_heads[i]; j++) {
            const double mean = *kept++ / (double)c->e->options->n_chunks;
            json_array_append_new(lanes, json_integer(mean > SMALLEST ? (json_int_t)(mean + 0.5) : SMALLEST));
        }
        char key[16];
        snprintf(key, sizeof key, "%d", i);
        json_object_set_new(config, key,
                            json_pack("{ss so si si}", "policy", "importance_score", "lanes", lanes, "sink_tokens", SINKS,
                                      "recent_window", RECENT));
    }
    json_decref(c->e->result);
    c->e->result = config;
}

static void report(const calibration *c) {
    const double *kept = c->kept;
    printf("| layer | tokens kept by each KV head |\n| ---: | --- |\n");
    for (int32_t i = 0; i < c->n_layers; i++) {
        printf("| %d |", i);
        for (int32_t j = 0; j < c->n_kv_heads[i]; j++) {
            printf(" %.0f", *kept++ / (double)c->e->options->n_chunks);
        }
        printf(" |\n");
    }
}

dt_status eval_calibrate(eval *e, dt_error *error) {
    const eval_options *o = e->options;
    const dt_model_info *info = dt_model_get_info(e->model);
    calibration c = {.e = e, .n_layers = info->n_layers, .n_kv_heads = info->n_kv_heads};
    if (e->n_text < (size_t)(o->n_chunks * o->n_context)) {
        return eval_fail(error, DT_ERR_ARGUMENT,
                         "%lld pieces of %lld tokens need a text of %lld; this one has %zu: give fewer --chunks",
                         (long long)o->n_chunks, (long long)o->n_context, (long long)(o->n_chunks * o->n_context), e->n_text);
    }
    size_t n_lanes = 0;
    for (int32_t i = 0; i < info->n_layers; i++) {
        n_lanes += (size_t)info->n_kv_heads[i];
    }
    c.kept = calloc(n_lanes, sizeof *c.kept);
    dt_status status = c.kept != NULL ? DT_OK : eval_fail(error, DT_ERR_MEMORY, "out of memory");
    for (int64_t i = 0; i < o->n_chunks && status == DT_OK; i++) {
        status = measure_piece(&c, i, error);
    }
    dt_report_progress_end();
    if (status == DT_OK) {
        report(&c);
        write_config(&c);
    }
    free(c.kept);
    return status;
}
