/*
 * Eviction settings: presets, defaults, overrides, and the lines that tell the user what holds.
 *
 * Owns the rules that the JSON reader (eviction_json.c) and the presets share. What was asked (requests) is kept beside what
 * follows from it (budgets), so that an override of max_cache_size gives the same as if it had been asked for at first: defaults
 * that hang on max follow it. An override either holds for all layers or changes nothing.
 */
#include "engine/eviction_json.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_MIN 512
#define DEFAULT_SINKS 4
#define DEFAULT_RECENT 128
#define SHARED_RECENT 64
#define OBSERVER_SIZE 16 /* attention is observed once a lane is about to exceed its budget: soon */

/* ---- defaults and limits ---- */

int32_t dt_eviction_smallest_lane(const dt_eviction_request *request) {
    int32_t least = request->lanes != NULL ? request->lanes[0] : request->max_cache_size;
    assert(request->lanes != NULL || request->n_lanes == 0);
    for (int32_t i = 1; i < request->n_lanes; i++) {
        least = DT_MIN(least, request->lanes[i]);
    }
    return least;
}

/* Where nobody names a recent window. Of a shared budget, the pins are a small part of what a layer has on average, but not where
 * scores come from a repetition: that brings along what stood nearest, so it doesn't show that while a text goes on most heads need
 * it, and a lane of a small budget would be left with little else than its pins (docs/quality.md, in serving). */
static int32_t default_recent(const dt_eviction_request *request, int32_t least) {
    const int32_t part = request->policy->needs_peak ? 2 : 8;
    const int32_t most = request->shared_average > 0 ? DT_MIN(SHARED_RECENT, request->shared_average / part) : DEFAULT_RECENT;
    return DT_MIN(most, least / 4);
}

dt_budget dt_eviction_complete(const dt_eviction_request *request) {
    if (request->policy == NULL) {
        return (dt_budget){0};
    }
    const int32_t least = dt_eviction_smallest_lane(request);
    int32_t max = request->n_lanes > 0 ? 0 : request->max_cache_size;
    for (int32_t i = 0; i < request->n_lanes; i++) {
        max = DT_MAX(max, request->lanes[i]);
    }
    return (dt_budget){
        .policy = request->policy,
        .max_cache_size = max,
        .min_cache_size = request->min_cache_size >= 0 ? request->min_cache_size : DT_MIN(DEFAULT_MIN, least / 2),
        .sink_tokens = request->sink_tokens >= 0 ? request->sink_tokens : DEFAULT_SINKS,
        .recent_window = request->recent_window >= 0 ? request->recent_window : default_recent(request, least),
        .lane_max = request->lanes,
        .weights = request->weights,
        .n_weights = request->n_weights,
        .memory_slots = request->memory_slots,
    };
}

bool dt_eviction_has_room(const dt_eviction_request *request) {
    const dt_budget budget = dt_eviction_complete(request);
    return budget.policy == NULL || (int64_t)budget.sink_tokens + budget.recent_window < dt_eviction_smallest_lane(request);
}

int64_t dt_eviction_least_size(const dt_eviction_request *request) {
    const int64_t sinks = dt_eviction_complete(request).sink_tokens;
    if (request->recent_window >= 0) {
        return sinks + request->recent_window + 1;
    }
    int64_t size = sinks + 1; /* the window grows with the size, by at most a quarter of it and only so far */
    while (size < INT32_MAX && size <= sinks + default_recent(request, (int32_t)size)) {
        size++;
    }
    return size;
}

void dt_eviction_range(int32_t first, int32_t end, char out[32]) {
    if (end - first == 1) {
        snprintf(out, 32, "%d", first);
    } else {
        snprintf(out, 32, "%d-%d", first, end - 1);
    }
}

/* ---- making and freeing ---- */

dt_status dt_eviction_new(int32_t n_layers, const char *kind, const char *name, dt_eviction **out, dt_error *error) {
    *out = NULL;
    if (n_layers < 1) {
        return dt_fail(error, DT_ERR_ARGUMENT, "eviction settings need a model with at least one layer, not %d", n_layers);
    }
    const size_t name_bytes = strlen(kind) + strlen(name) + 2;
    dt_eviction *eviction = calloc(1, sizeof *eviction);
    if (eviction != NULL) {
        eviction->n_layers = n_layers;
        eviction->name = malloc(name_bytes);
        eviction->requests = calloc((size_t)n_layers, sizeof *eviction->requests);
        eviction->budgets = calloc((size_t)n_layers, sizeof *eviction->budgets);
        eviction->lists = calloc((size_t)n_layers, sizeof *eviction->lists);
        eviction->windows = calloc((size_t)n_layers, sizeof *eviction->windows);
    }
    if (eviction == NULL || eviction->name == NULL || eviction->requests == NULL || eviction->budgets == NULL ||
        eviction->lists == NULL || eviction->windows == NULL) {
        dt_eviction_free(eviction);
        return dt_fail_memory(error, (size_t)n_layers * (sizeof(dt_budget) + sizeof(dt_eviction_request)), "eviction settings");
    }
    snprintf(eviction->name, name_bytes, "%s %s", kind, name);
    *out = eviction;
    return DT_OK;
}

dt_score_weights *dt_score_weights_share(dt_score_weights *weights) {
    if (weights != NULL) {
        atomic_fetch_add(&weights->references, 1);
    }
    return weights;
}

void dt_score_weights_free(dt_score_weights *weights) {
    if (weights != NULL && atomic_fetch_sub(&weights->references, 1) == 1) {
        for (int32_t i = 0; i < weights->n_layers; i++) {
            free(weights->lists[i]);
        }
        free(weights);
    }
}

void dt_eviction_free(dt_eviction *eviction) {
    if (eviction != NULL) {
        dt_score_weights_free(eviction->weights);
        free(eviction->name);
        for (int32_t i = 0; eviction->lists != NULL && i < eviction->n_layers; i++) {
            free(eviction->lists[i]);
        }
        free(eviction->lists);
        free(eviction->requests);
        free(eviction->budgets);
        free(eviction->windows);
        free(eviction);
    }
}

/* ---- sliding windows ---- */

/* A query sees itself and window - 1 tokens of the cache: with a smaller budget some of them would be evicted. */
static bool cuts_window(const dt_budget *budget, int32_t window) {
    return budget->policy != NULL && budget->max_cache_size < window - 1;
}

/* Layers that keep their window instead of evicting: where nobody asked for less, and where the text would be repeated out of the
 * window's sight, so that reconstruction would find nothing. */
static bool spares_window(const dt_eviction *eviction, const dt_budget *budget, int32_t window) {
    const bool blind = window > 0 && dt_budget_needs_peak(budget);
    return blind || (eviction->spares_windows && cuts_window(budget, window));
}

/* Behind a window no entry is seen, so none may stand for what is there. */
static void fit_slots(dt_budget *budget, int32_t window) { budget->memory_slots = window > 0 ? 0 : budget->memory_slots; }

void dt_eviction_set_windows(dt_eviction *eviction, const int32_t *windows) {
    for (int32_t i = 0; i < eviction->n_layers; i++) {
        eviction->windows[i] = windows[i];
        fit_slots(&eviction->budgets[i], windows[i]);
        if (spares_window(eviction, &eviction->budgets[i], windows[i])) {
            eviction->budgets[i] = (dt_budget){0};
        }
    }
}

/* ---- presets ---- */

typedef struct preset_row {
    const char *name;
    const dt_policy *shallow_policy, *deep_policy;
    int32_t shallow_max, deep_max, min;
    int32_t least_deep; /* deep layers at least; otherwise the second half */
} preset_row;

static const preset_row presets[] = {
    {"chat", &dt_policy_local_window, &dt_policy_importance_score, 2048, 4096, 512, 0},
    {"docqa", &dt_policy_local_window, &dt_policy_importance_score, 4096, 8192, 1024, 8},
    {"code", &dt_policy_local_window, &dt_policy_local_window, 4096, 4096, 1024, 0},
    {"summary", &dt_policy_importance_score, &dt_policy_importance_score, 3072, 6144, 512, 0},
};

dt_status dt_eviction_config_preset(int32_t n_layers, const char *name, dt_eviction **out, dt_error *error) {
    *out = NULL;
    const preset_row *found = NULL;
    for (size_t i = 0; i < sizeof presets / sizeof presets[0]; i++) {
        if (strcmp(presets[i].name, name) == 0) {
            found = &presets[i];
        }
    }
    if (found == NULL) {
        return dt_fail(error, DT_ERR_CONFIG, "there is no eviction preset \"%.64s\"; the presets are chat, docqa, code and summary",
                       name);
    }
    const dt_status status = dt_eviction_new(n_layers, "preset", name, out, error);
    if (status != DT_OK) {
        return status;
    }
    (*out)->spares_windows = true;
    const int32_t n_shallow = DT_MAX(0, DT_MIN(n_layers / 2, n_layers - found->least_deep));
    for (int32_t i = 0; i < n_layers; i++) {
        const bool deep = i >= n_shallow;
        (*out)->requests[i] = (dt_eviction_request){
            .policy = deep ? found->deep_policy : found->shallow_policy,
            .max_cache_size = deep ? found->deep_max : found->shallow_max,
            .min_cache_size = found->min,
            .sink_tokens = -1,
            .recent_window = -1,
        };
        (*out)->budgets[i] = dt_eviction_complete(&(*out)->requests[i]);
    }
    return DT_OK;
}

/* ---- overrides ---- */

static dt_status override_layer(int32_t layer, int32_t max, int32_t min, dt_eviction_request *request, dt_budget *budget,
                                dt_error *error) {
    if (max > 0 && request->shared_average > 0) {
        request->shared_average = max;
    } else if (max > 0) {
        request->max_cache_size = max;
        request->lanes = NULL; /* for all layers means for all their lanes */
        request->n_lanes = 0;
        /* with min equal to max a round could free one token only, so equal is lowered too */
        if (min < 0 && request->min_cache_size >= max) {
            request->min_cache_size = -1;
        }
    }
    if (min >= 0) {
        request->min_cache_size = min;
    }
    *budget = dt_eviction_complete(request);
    const int32_t least = dt_eviction_smallest_lane(request);
    if (budget->min_cache_size > least) {
        return dt_fail(
            error, DT_ERR_CONFIG,
            "min_cache_size %d is above the max_cache_size %d of layer %d; give a smaller one, or a larger max_cache_size",
            budget->min_cache_size, least, layer);
    }
    if (!dt_eviction_has_room(request)) {
        return dt_fail(error, DT_ERR_CONFIG,
                       "max_cache_size %d leaves no room in layer %d beside sink_tokens %d and recent_window %d; give at least "
                       "%" PRId64,
                       budget->max_cache_size, layer, budget->sink_tokens, budget->recent_window, dt_eviction_least_size(request));
    }
    return DT_OK;
}

/* One log line per run of layers whose configured min_cache_size was lowered. */
static void log_lowered(const dt_eviction *eviction, const dt_eviction_request *requests, const dt_budget *budgets) {
    for (int32_t i = 0, next; i < eviction->n_layers; i = next) {
        const int32_t before = eviction->requests[i].min_cache_size;
        next = i + 1;
        if (budgets[i].policy == NULL || requests[i].min_cache_size >= 0 || before < 0) {
            continue;
        }
        while (next < eviction->n_layers && budgets[next].policy != NULL && requests[next].min_cache_size < 0 &&
               eviction->requests[next].min_cache_size == before) {
            next++;
        }
        char range[32];
        dt_eviction_range(i, next, range);
        dt_log(DT_LOG_INFO, "TLC: max_cache_size %d lowers the min_cache_size of layer%s %s from %d to %d",
               budgets[i].max_cache_size, next - i == 1 ? "" : "s", range, before, budgets[i].min_cache_size);
    }
}

int64_t dt_eviction_least_total(const dt_budget *budgets, int32_t n_layers) {
    int64_t least = 0;
    for (int32_t i = 0; i < n_layers; i++) {
        const dt_budget *b = &budgets[i];
        least += b->policy != NULL ? DT_MAX((int64_t)b->sink_tokens + b->recent_window + 1, b->min_cache_size) : 0;
    }
    return least;
}

dt_status dt_eviction_override(dt_eviction *eviction, int32_t max_cache_size, int32_t min_cache_size, dt_error *error) {
    if (DT_LACKS(error, eviction)) {
        return DT_ERR_ARGUMENT;
    }
    if (max_cache_size < 0 || min_cache_size < -1) {
        return dt_fail(error, DT_ERR_CONFIG, "%s must not be negative, but is %d",
                       max_cache_size < 0 ? "max_cache_size" : "min_cache_size",
                       max_cache_size < 0 ? max_cache_size : min_cache_size);
    }
    const size_t n = (size_t)eviction->n_layers;
    const bool spared_windows = eviction->spares_windows, shared = eviction->total_cache_size > 0;
    eviction->spares_windows = spared_windows && max_cache_size == 0;
    dt_eviction_request *requests = malloc(n * sizeof *requests);
    dt_budget *budgets = calloc(n, sizeof *budgets);
    dt_status status = DT_OK;
    if (requests == NULL || budgets == NULL) {
        status = dt_fail_memory(error, n * (sizeof *requests + sizeof *budgets), "eviction settings");
    } else {
        memcpy(requests, eviction->requests, n * sizeof *requests);
    }
    for (int32_t i = 0; i < eviction->n_layers && status == DT_OK; i++) {
        if (requests[i].policy != NULL) {
            status = override_layer(i, max_cache_size, min_cache_size, &requests[i], &budgets[i], error);
        }
        if (status == DT_OK && spares_window(eviction, &budgets[i], eviction->windows[i])) {
            budgets[i] = (dt_budget){0};
        }
        fit_slots(&budgets[i], eviction->windows[i]);
    }
    const int64_t least = dt_eviction_least_total(budgets, status == DT_OK ? eviction->n_layers : 0);
    const int64_t n_sharing = dt_budgets_that_evict(budgets, status == DT_OK ? eviction->n_layers : 0);
    const int64_t total =
        shared && max_cache_size > 0 ? DT_MIN(max_cache_size * n_sharing, (int64_t)INT32_MAX) : eviction->total_cache_size;
    if (status == DT_OK && shared && least > total) {
        status = dt_fail(error, DT_ERR_CONFIG,
                         "a budget of %" PRId64 " tokens over all layers is less than the %" PRId64
                         " that sinks, recent windows and min_cache_size keep; give a max_cache_size of %" PRId64
                         " or more, or a smaller min_cache_size",
                         total, least, (least + n_sharing - 1) / DT_MAX(n_sharing, 1));
    }
    if (status != DT_OK) {
        eviction->spares_windows = spared_windows;
        free(requests);
        free(budgets);
        return status;
    }
    log_lowered(eviction, requests, budgets);
    eviction->total_cache_size = (int32_t)total;
    if (min_cache_size == 0) {
        dt_log(DT_LOG_WARN,
               "TLC: min_cache_size 0: nothing keeps later budgets from emptying a layer but its sinks and recent window");
    }
    free(eviction->requests);
    free(eviction->budgets);
    eviction->requests = requests;
    eviction->budgets = budgets;
    return DT_OK;
}

dt_status dt_eviction_set_memory_slots(dt_eviction *eviction, int32_t n, dt_error *error) {
    if (DT_LACKS(error, eviction)) {
        return DT_ERR_ARGUMENT;
    }
    if (n < 0 || n > DT_MAX_MEMORY_SLOTS) {
        return dt_fail(error, DT_ERR_CONFIG, "memory_slots must be between 0 and %d, but is %d", DT_MAX_MEMORY_SLOTS, n);
    }
    for (int32_t i = 0; i < eviction->n_layers; i++) {
        dt_budget *budget = &eviction->budgets[i];
        eviction->requests[i].memory_slots = eviction->requests[i].policy != NULL ? n : 0;
        budget->memory_slots = budget->policy != NULL ? n : 0;
        fit_slots(budget, eviction->windows[i]);
    }
    return DT_OK;
}

/* ---- telling ---- */

static bool same_budget(const dt_budget *a, const dt_budget *b) {
    return a->policy == b->policy && a->max_cache_size == b->max_cache_size && a->min_cache_size == b->min_cache_size &&
           a->sink_tokens == b->sink_tokens && a->recent_window == b->recent_window && a->lane_max == b->lane_max &&
           (a->weights == NULL) == (b->weights == NULL) && a->memory_slots == b->memory_slots;
}

/* First layer after the run of equal layers that begins at `first`. */
static int32_t run_end(const dt_eviction *eviction, int32_t first) {
    int32_t end = first + 1;
    while (end < eviction->n_layers && same_budget(&eviction->budgets[first], &eviction->budgets[end]) &&
           eviction->windows[first] == eviction->windows[end]) {
        end++;
    }
    return end;
}

static int describe_run(const dt_budget *b, int32_t n_lanes, int32_t window, const char *range, int width, char *out,
                        size_t capacity) {
    char what[64] = "", score[40] = "", slots[24] = "", more[160] = "";
    if (b->policy == NULL) {
        snprintf(what, sizeof what, window > 0 ? "keeps its window of %d" : "keeps everything", window);
        return snprintf(out, capacity, "TLC: layers %-*s  %-16s  %s\n", width, range, "none", what);
    }
    char max[48] = "any";
    if (b->lane_max != NULL) {
        int32_t least = INT32_MAX;
        for (int32_t i = 0; i < n_lanes; i++) {
            least = DT_MIN(least, b->lane_max[i]);
        }
        snprintf(max, sizeof max, "%d-%d", least, b->max_cache_size);
    } else if (b->max_cache_size < INT32_MAX) {
        snprintf(max, sizeof max, "%d", b->max_cache_size);
    }
    if (window > 0) {
        snprintf(what, sizeof what, "  window %d%s", window, cuts_window(b, window) ? ", evicted from inside too" : "");
    }
    if (b->policy->score_name != NULL && b->policy != &dt_policy_importance_score) {
        snprintf(score, sizeof score, "  score %s", b->policy->score_name);
    }
    if (b->memory_slots > 0) {
        snprintf(slots, sizeof slots, "  slots %d", b->memory_slots);
    }
    if (score[0] != 0 || slots[0] != 0 ||
        what[0] != 0) { /* in a line of its own, below the policy: the first one fills a terminal */
        snprintf(more, sizeof more, "TLC:        %-*s%s%s%s\n", width, "", score, slots, what);
    }
    return snprintf(out, capacity, "TLC: layers %-*s  %-16s  max %s  min %d  sinks %d  recent %d\n%s", width, range,
                    b->policy->name, max, b->min_cache_size, b->sink_tokens, b->recent_window, more);
}

dt_status dt_eviction_describe(const dt_eviction *eviction, char **out, dt_error *error) {
    if (DT_LACKS(error, eviction, out)) {
        return DT_ERR_ARGUMENT;
    }
    *out = NULL;
    char range[32];
    int32_t n_runs = 0;
    int width = 5;
    for (int32_t i = 0, end; i < eviction->n_layers; i = end, n_runs++) {
        end = run_end(eviction, i);
        dt_eviction_range(i, end, range);
        width = DT_MAX(width, (int)strlen(range));
    }
    const size_t line_bytes = 256, bytes = (size_t)(n_runs + 1) * line_bytes;
    char *text = malloc(bytes);
    if (text == NULL) {
        return dt_fail_memory(error, bytes, "the eviction settings' text");
    }
    size_t length = 0;
    if (eviction->total_cache_size > 0) {
        const int32_t n_sharing = dt_budgets_that_evict(eviction->budgets, eviction->n_layers);
        length = (size_t)snprintf(text, bytes, "TLC: shared budget, %d tokens over all layers, %d a layer on average\n",
                                  eviction->total_cache_size, eviction->total_cache_size / DT_MAX(n_sharing, 1));
    }
    for (int32_t i = 0, end; i < eviction->n_layers; i = end) {
        end = run_end(eviction, i);
        dt_eviction_range(i, end, range);
        length += (size_t)describe_run(&eviction->budgets[i], eviction->requests[i].n_lanes, eviction->windows[i], range, width,
                                       text + length, bytes - length);
    }
    text[length - 1] = '\0'; /* lines are joined by newlines, not ended by them */
    *out = text;
    return DT_OK;
}

const dt_budget *dt_eviction_budget(const dt_eviction *eviction, int32_t layer) { return &eviction->budgets[layer]; }

int32_t dt_eviction_total(const dt_eviction *eviction) { return eviction->total_cache_size; }

const char *dt_eviction_name(const dt_eviction *eviction) { return eviction != NULL ? eviction->name : ""; }

/* ---- the public functions ---- */

/* Weights must be those of the model's heads. */
static dt_status check_weights(const dt_eviction *eviction, const dt_model_info *info, int32_t layer, dt_error *error) {
    const dt_eviction_request *request = &eviction->requests[layer];
    const dt_predict_shape shape = {.dim_k = info->head_dim_k, .dim_v = info->head_dim_v};
    const int32_t n_weights = dt_predict_n_weights(&shape), n_lanes = info->n_kv_heads[layer];
    if (request->n_weight_lanes == n_lanes && request->n_weights == n_weights) {
        return DT_OK;
    }
    return dt_fail(error, DT_ERR_CONFIG,
                   "%s: \"weights\" of layer %d has %d lists of %d numbers, but this model's layer has %d KV heads, with %d "
                   "numbers each: calibrate for this model",
                   eviction->name, layer, request->n_weight_lanes, request->n_weights, n_lanes, n_weights);
}

/* A list of sizes must have one for each KV head of its layers. */
static dt_status check_layers(const dt_eviction *eviction, const dt_model_info *info, dt_error *error) {
    dt_status status = DT_OK;
    for (int32_t i = 0; status == DT_OK && i < info->n_layers; i++) {
        const dt_eviction_request *request = &eviction->requests[i];
        if (request->lanes != NULL && request->n_lanes != info->n_kv_heads[i]) {
            status = dt_fail(error, DT_ERR_CONFIG, "%s: \"lanes\" of layer %d lists %d sizes, but the layer has %d KV heads",
                             eviction->name, i, request->n_lanes, info->n_kv_heads[i]);
        } else if (request->weights != NULL) {
            status = check_weights(eviction, info, i, error);
        }
    }
    return status;
}

dt_status dt_eviction_check_model(const dt_eviction *eviction, const dt_model_info *info, dt_error *error) {
    if (eviction->n_layers == info->n_layers && check_layers(eviction, info, NULL) == DT_OK) {
        return DT_OK;
    }
    return dt_fail(error, DT_ERR_ARGUMENT,
                   "the eviction settings (%s) were made for another model; make them for the session's own", eviction->name);
}

/* The last step of all three: windows are respected. */
static dt_status finish(dt_status status, const dt_model_info *info, dt_eviction **out, dt_error *error) {
    status = status == DT_OK ? check_layers(*out, info, error) : status;
    if (status == DT_OK) {
        dt_eviction_set_windows(*out, info->windows);
    } else {
        dt_eviction_free(*out);
        *out = NULL;
    }
    return status;
}

dt_status dt_eviction_from_preset(const dt_model *model, const char *preset, dt_eviction **out, dt_error *error) {
    if (DT_LACKS(error, model, preset, out)) {
        return DT_ERR_ARGUMENT;
    }
    const dt_model_info *info = dt_model_get_info(model);
    const dt_status status = dt_eviction_config_preset(info->n_layers, preset, out, error);
    if (status == DT_OK) {
        dt_eviction_learn(*out, model);
    }
    return finish(status, info, out, error);
}

dt_status dt_eviction_from_text(const dt_model *model, const char *name, const char *text, size_t n_bytes, dt_eviction **out,
                                dt_error *error) {
    text = n_bytes > 0 ? text : "";
    if (DT_LACKS(error, model, name, text, out)) {
        return DT_ERR_ARGUMENT;
    }
    const dt_model_info *info = dt_model_get_info(model);
    return finish(dt_eviction_config_text(info->n_layers, name, text, n_bytes, out, error), info, out, error);
}

dt_status dt_eviction_from_file(const dt_model *model, const char *path, dt_eviction **out, dt_error *error) {
    if (DT_LACKS(error, model, path, out)) {
        return DT_ERR_ARGUMENT;
    }
    const dt_model_info *info = dt_model_get_info(model);
    return finish(dt_eviction_config_file(info->n_layers, path, out, error), info, out, error);
}

/* ---- what several settings need ---- */

/* A layer's policy that has all collected which the settings' own ask for; of those that foretell it is the first's, whose weights
 * are at hand. */
static const dt_policy *observing_policy(const dt_eviction *const *settings, size_t n, const dt_eviction *first, int32_t layer) {
    const dt_policy *policy = &dt_policy_importance_score;
    for (size_t i = 0; i < n; i++) {
        const dt_budget *own = &settings[i]->budgets[layer], *theirs = &first->budgets[layer];
        if (dt_budget_needs_peak(own)) {
            const bool known = dt_budget_needs_weights(own) && dt_budget_needs_weights(theirs);
            policy = known && policy != &dt_policy_reconstruct ? theirs->policy : &dt_policy_reconstruct;
        }
    }
    return policy;
}

static bool foretells_anywhere(const dt_eviction *eviction) {
    bool any = false;
    for (int32_t i = 0; i < eviction->n_layers; i++) {
        any = any || dt_budget_needs_weights(&eviction->budgets[i]);
    }
    return any;
}

dt_status dt_eviction_observe(const dt_eviction *const *settings, size_t n, dt_eviction **out, dt_error *error) {
    if (DT_LACKS(error, out)) {
        return DT_ERR_ARGUMENT;
    }
    *out = NULL;
    if (n == 0) {
        return dt_fail(error, DT_ERR_ARGUMENT, "there are no eviction settings to observe attention for");
    }
    if (DT_LACKS(error, settings)) {
        return DT_ERR_ARGUMENT;
    }
    const dt_eviction *foretold = NULL;
    for (size_t i = 0; i < n; i++) {
        if (settings[i] == NULL) {
            return dt_fail(error, DT_ERR_ARGUMENT, "settings[%zu] of those to observe attention for is NULL", i);
        }
        if (settings[i]->n_layers != settings[0]->n_layers) {
            return dt_fail(error, DT_ERR_ARGUMENT, "eviction settings for %d and for %d layers are of different models",
                           settings[0]->n_layers, settings[i]->n_layers);
        }
        foretold = foretold == NULL && foretells_anywhere(settings[i]) ? settings[i] : foretold;
    }
    foretold = foretold == NULL ? settings[0] : foretold;
    const dt_status status = dt_eviction_new(settings[0]->n_layers, "settings", "that only observe", out, error);
    for (int32_t i = 0; status == DT_OK && i < settings[0]->n_layers; i++) {
        dt_eviction_request *request = &(*out)->requests[i];
        *request = (dt_eviction_request){.policy = observing_policy(settings, n, foretold, i),
                                         .max_cache_size = OBSERVER_SIZE,
                                         .min_cache_size = OBSERVER_SIZE,
                                         .sink_tokens = -1,
                                         .recent_window = -1};
        if (request->policy->needs_weights) {
            request->weights = foretold->requests[i].weights;
            request->n_weight_lanes = foretold->requests[i].n_weight_lanes;
            request->n_weights = foretold->requests[i].n_weights;
        }
        (*out)->budgets[i] = dt_eviction_complete(request);
    }
    if (status == DT_OK) {
        (*out)->weights = dt_score_weights_share(foretold->weights);
        dt_eviction_set_windows(*out, settings[0]->windows);
    }
    return status;
}
