/*
 * Learns the weights of score predict: how the most attention that a token gets while the text is repeated (reconstruct) follows
 * from its key, its value and its distance, per KV head, by least squares on the logarithm.
 *
 * The sums of products that least squares needs are all that is kept of the texts. Features are scaled to the same size before a
 * small ridge is added, so that it means the same for all.
 * Invariant: what was added in one order or another gives the same weights but for rounding.
 */
#include "engine/eviction_config.h"
#include "engine/session.h"

#include <assert.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>

#define SMALLEST_PEAK 1e-4 /* differences below it don't matter: such tokens go first whatever the budget */
#define RIDGE 1e-5
#define READ_AT_ONCE 256 /* entries */
#define SKIPPED 4        /* the first tokens draw attention for being first, and are kept anyway */

typedef struct lane_sums {
    double *products; /* [n][n], lower half */
    double *targets;  /* [n] */
} lane_sums;

struct dt_calibration {
    const dt_model *model;
    dt_predict_shape shape;
    int32_t n, n_lanes; /* weights of a lane; lanes of all layers */
    lane_sums *lanes;
    bool *layer_has; /* [n_layers] */
};

void dt_calibration_free(dt_calibration *c) {
    if (c == NULL) {
        return;
    }
    for (int32_t i = 0; c->lanes != NULL && i < c->n_lanes; i++) {
        free(c->lanes[i].products);
        free(c->lanes[i].targets);
    }
    free(c->lanes);
    free(c->layer_has);
    free(c);
}

dt_status dt_calibration_new(const dt_model *model, dt_calibration **out, dt_error *error) {
    if (DT_LACKS(error, model, out)) {
        return DT_ERR_ARGUMENT;
    }
    bool any = false;
    *out = NULL;
    for (int32_t i = 0; i < model->info.n_layers; i++) {
        any = any || model->info.windows[i] == 0;
    }
    if (!any) {
        return dt_fail(error, DT_ERR_UNSUPPORTED,
                       "every layer of this model has a sliding window and keeps that: there is nothing "
                       "to calibrate");
    }
    dt_calibration *c = calloc(1, sizeof *c);
    if (c == NULL) {
        return dt_fail_memory(error, sizeof *c, "the calibration");
    }
    c->model = model;
    c->shape = dt_session_predict_shape(model);
    c->n = dt_predict_n_weights(&c->shape);
    for (int32_t i = 0; i < model->info.n_layers; i++) {
        c->n_lanes += model->info.n_kv_heads[i];
    }
    const size_t n = (size_t)c->n;
    assert(c->n_lanes > 0 && model->info.n_layers > 0);
    c->lanes = calloc((size_t)c->n_lanes, sizeof *c->lanes);
    c->layer_has = calloc((size_t)model->info.n_layers, sizeof *c->layer_has);
    bool good = c->lanes != NULL && c->layer_has != NULL;
    for (int32_t i = 0; good && i < c->n_lanes; i++) {
        c->lanes[i] = (lane_sums){.products = calloc(n * n, sizeof(double)), .targets = calloc(n, sizeof(double))};
        good = c->lanes[i].products != NULL && c->lanes[i].targets != NULL;
    }
    if (!good) {
        const size_t bytes = (size_t)c->n_lanes * n * n * sizeof(double);
        dt_calibration_free(c);
        return dt_fail_memory(error, bytes, "the calibration");
    }
    *out = c;
    return DT_OK;
}

static void add_entry(const dt_calibration *c, lane_sums *sums, const float *row, double target) {
    for (int32_t i = 0; i < c->n; i++) {
        double *products = sums->products + (size_t)i * (size_t)c->n;
        const double factor = (double)row[i];
        for (int32_t j = 0; j <= i; j++) {
            products[j] += factor * (double)row[j];
        }
        sums->targets[i] += factor * target;
    }
}

/* work: for READ_AT_ONCE keys, then as many values. False when a device does not give them. */
static bool add_lane(const dt_calibration *c, const dt_session *s, int32_t layer, int32_t lane, lane_sums *sums, int32_t *positions,
                     float *work) {
    float row[DT_PREDICT_FEATURES + 2 * DT_MAX_HEAD_DIM], *keys = work, *values = work + READ_AT_ONCE * c->shape.dim_k;
    dt_kv_lane_view view;
    dt_kv_lane(s->kv, layer, lane, &view);
    dt_kv_positions(s->kv, layer, lane, positions);
    for (int32_t i = 0; i < view.n_entries; i++) {
        const int32_t at = i % READ_AT_ONCE, n = DT_MIN(READ_AT_ONCE, view.n_entries - i);
        if (at == 0 && !dt_kv_get_entries(s->kv, layer, lane, i, n, keys, values)) {
            return false;
        }
        if (positions[i] < SKIPPED) {
            continue;
        }
        row[DT_PREDICT_BIAS] = 1;
        row[DT_PREDICT_DECAY] = dt_predict_decay_feature((int64_t)s->n_tokens - positions[i]);
        dt_predict_features(&c->shape, keys + (int64_t)at * c->shape.dim_k, values + (int64_t)at * c->shape.dim_v,
                            row + DT_PREDICT_FEATURES);
        add_entry(c, sums, row, log((double)view.peak_mass[i] + SMALLEST_PEAK));
    }
    return true;
}

dt_status dt_calibration_add(dt_calibration *calibration, const dt_session *session, dt_error *error) {
    if (DT_LACKS(error, calibration, session)) {
        return DT_ERR_ARGUMENT;
    }
    dt_calibration *c = calibration;
    if (session->model != c->model || session->whole_from > 0 || session->peaks_until < session->n_tokens) {
        return dt_fail(error, DT_ERR_ARGUMENT, "calibration needs a session of its model with score reconstruct and DT_EVICT_HELD");
    }
    if (session->n_tokens <= SKIPPED) {
        return dt_fail(error, DT_ERR_ARGUMENT, "nothing can be learned from a text of %d tokens; it must have more than %d",
                       session->n_tokens, SKIPPED);
    }
    const dt_model_info *info = &c->model->info;
    const size_t positions_bytes = (size_t)session->n_tokens * sizeof(int32_t);
    const size_t work_bytes = (size_t)READ_AT_ONCE * (size_t)(c->shape.dim_k + c->shape.dim_v) * sizeof(float);
    int32_t *positions = malloc(positions_bytes);
    float *work = malloc(work_bytes);
    bool done = true;
    if (positions == NULL || work == NULL) {
        free(positions);
        free(work);
        return dt_fail_memory(error, positions_bytes + work_bytes, "the calibration");
    }
    for (int32_t i = 0, first = 0; i < info->n_layers; first += info->n_kv_heads[i], i++) {
        c->layer_has[i] = dt_kv_layer_needs_peak(session->kv, i);
        for (int32_t lane = 0; done && c->layer_has[i] && lane < info->n_kv_heads[i]; lane++) {
            done = add_lane(c, session, i, lane, &c->lanes[first + lane], positions, work);
        }
    }
    free(positions);
    free(work);
    return done ? DT_OK : dt_fail(error, DT_ERR_COMPUTE, "the device did not give keys and values for the calibration");
}

/* ---- solving ---- */

/* Solves a x = b for a symmetric positive definite a[n][n] of which the lower half is given and becomes its Cholesky factor; x
 * replaces b. */
static void solve(double *a, double *b, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        for (int32_t j = 0; j <= i; j++) {
            double sum = a[(size_t)i * (size_t)n + (size_t)j];
            for (int32_t k = 0; k < j; k++) {
                sum -= a[(size_t)i * (size_t)n + (size_t)k] * a[(size_t)j * (size_t)n + (size_t)k];
            }
            a[(size_t)i * (size_t)n + (size_t)j] = i == j ? sqrt(DT_MAX(sum, 1e-12)) : sum / a[(size_t)j * (size_t)n + (size_t)j];
        }
    }
    for (int32_t i = 0; i < n; i++) {
        for (int32_t k = 0; k < i; k++) {
            b[i] -= a[(size_t)i * (size_t)n + (size_t)k] * b[k];
        }
        b[i] /= a[(size_t)i * (size_t)n + (size_t)i];
    }
    for (int32_t i = n - 1; i >= 0; i--) {
        for (int32_t k = i + 1; k < n; k++) {
            b[i] -= a[(size_t)k * (size_t)n + (size_t)i] * b[k];
        }
        b[i] /= a[(size_t)i * (size_t)n + (size_t)i];
    }
}

/* weights[n]; work[n * n + n]. A feature that is always 0 gets no weight. */
static void fit_lane(const dt_calibration *c, const lane_sums *sums, double *work, double *weights) {
    const int32_t n = c->n;
    double *scale = work + (size_t)n * (size_t)n;
    for (int32_t i = 0; i < n; i++) {
        const double squares = sums->products[(size_t)i * (size_t)n + (size_t)i];
        scale[i] = squares > 0 ? 1 / sqrt(squares) : 0;
    }
    for (int32_t i = 0; i < n; i++) {
        for (int32_t j = 0; j <= i; j++) {
            const size_t at = (size_t)i * (size_t)n + (size_t)j;
            work[at] = sums->products[at] * scale[i] * scale[j] + (i == j ? RIDGE + (scale[i] > 0 ? 0 : 1) : 0);
        }
        weights[i] = sums->targets[i] * scale[i];
    }
    solve(work, weights, n);
    for (int32_t i = 0; i < n; i++) {
        weights[i] *= scale[i];
    }
}

/* Five digits are more than the fit is good for, and keep the file small. */
static json_t *short_number(double x) {
    const double size = pow(10, 4 - floor(log10(DT_MAX(fabs(x), 1e-30))));
    return json_real(isfinite(x) ? round(x * size) / size : 0);
}

dt_status dt_calibration_config(const dt_calibration *calibration, int32_t average_cache_size, char **out, dt_error *error) {
    if (DT_LACKS(error, calibration, out)) {
        return DT_ERR_ARGUMENT;
    }
    const dt_calibration *c = calibration;
    bool any = false;
    for (int32_t i = 0; i < c->model->info.n_layers; i++) {
        any = any || c->layer_has[i];
    }
    *out = NULL;
    if (!any) {
        return dt_fail(error, DT_ERR_ARGUMENT, "nothing has been learned yet; dt_calibration_add comes before");
    }
    if (average_cache_size < 1) {
        return dt_fail(error, DT_ERR_ARGUMENT, "average_cache_size must be at least 1, but is %d", average_cache_size);
    }
    const dt_model_info *info = &c->model->info;
    const size_t n = (size_t)c->n, bytes = (n * n + 2 * n) * sizeof(double);
    double *work = malloc(bytes), *weights = work != NULL ? work + n * n + n : NULL;
    int64_t total = 0;
    json_t *layers = json_object();
    for (int32_t i = 0, first = 0; work != NULL && i < info->n_layers; first += info->n_kv_heads[i], i++) {
        json_t *lists = json_array();
        for (int32_t lane = 0; lane < info->n_kv_heads[i]; lane++) {
            json_t *list = json_array();
            fit_lane(c, &c->lanes[first + lane], work, weights);
            for (int32_t j = 0; j < c->n; j++) {
                json_array_append_new(list, short_number(weights[j]));
            }
            json_array_append_new(lists, list);
        }
        char key[16];
        snprintf(key, sizeof key, "%d", i);
        json_t *entry = json_pack("{ss ss so}", "policy", "importance_score", "score", "predict", "weights", lists);
        if (c->layer_has[i]) {
            json_object_set(layers, key, entry);
            total += average_cache_size;
        }
        json_decref(entry);
    }
    json_t *config =
        json_pack("{ss sI so}", "budget", "adaptive", "total_cache_size", (json_int_t)DT_MIN(total, INT32_MAX), "layers", layers);
    const size_t flags = JSON_COMPACT | JSON_REAL_PRECISION(5), length = work != NULL ? json_dumpb(config, NULL, 0, flags) : 0;
    *out = length > 0 ? calloc(length + 1, 1)
                      : NULL; /* not json_dumps: where memory ends while its text grows, it goes on without a part */
    if (*out != NULL && json_dumpb(config, *out, length, flags) != length) {
        free(*out);
        *out = NULL;
    }
    json_decref(config);
    free(work);
    return *out != NULL ? DT_OK : dt_fail_memory(error, bytes, "the calibration");
}
