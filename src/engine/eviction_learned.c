/*
 * Presets that go by what calibration learned about the model (calibrate.c): the file lies beside the model, so that whoever has
 * calibrated once profits without a flag.
 *
 * Invariant: a preset is whole with or without it, and in total keeps as many tokens.
 */
#define _DEFAULT_SOURCE /* realpath on glibc */
#include "engine/engine.h"
#include "engine/eviction_json.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

char *dt_eviction_learned_path(const char *model_path) {
    static const char ending[] = ".gguf", learned[] = ".tlc.json";
    if (model_path == NULL) {
        return NULL;
    }
    size_t n = strlen(model_path);
    n -= n > sizeof ending - 1 && strcmp(model_path + n - (sizeof ending - 1), ending) == 0 ? sizeof ending - 1 : 0;
    char *out = malloc(n + sizeof learned);
    if (out != NULL) {
        memcpy(out, model_path, n);
        memcpy(out + n, learned, sizeof learned);
    }
    return out;
}

static bool is_there(const char *path) {
    struct stat info;
    return path != NULL && stat(path, &info) == 0 && S_ISREG(info.st_mode) && access(path, R_OK) == 0;
}

char *dt_eviction_learned_file(const char *model_path) {
    char *path = dt_eviction_learned_path(model_path);
    if (!is_there(path)) {
        char *real = model_path != NULL ? realpath(model_path, NULL) : NULL;
        free(path);
        path = dt_eviction_learned_path(real);
        free(real);
    }
    if (!is_there(path)) {
        free(path);
        path = NULL;
    }
    return path;
}

static bool has_all_weights(const dt_eviction *learned, const int32_t *windows) {
    bool all = true;
    for (int32_t i = 0; i < learned->n_layers; i++) {
        all = all && (learned->requests[i].weights != NULL || windows[i] > 0);
    }
    return all;
}

/* The preset's layers go by score predict and share out the sum of their sizes; layers with a window keep that. */
static void learn(dt_eviction *preset, const dt_eviction *learned) {
    int64_t total = 0;
    int32_t n = 0;
    for (int32_t i = 0; i < preset->n_layers; i++) {
        if (learned->requests[i].weights == NULL) {
            preset->requests[i] = (dt_eviction_request){0};
        } else if (preset->requests[i].policy != NULL) {
            total += preset->requests[i].max_cache_size;
            n++;
        }
    }
    for (int32_t i = 0; i < preset->n_layers; i++) {
        if (preset->requests[i].policy != NULL) {
            assert(n > 0);
            preset->requests[i] = (dt_eviction_request){.policy = &dt_policy_predict,
                                                        .max_cache_size = INT32_MAX,
                                                        .sink_tokens = -1,
                                                        .recent_window = -1,
                                                        .weights = learned->requests[i].weights,
                                                        .n_weight_lanes = learned->requests[i].n_weight_lanes,
                                                        .n_weights = learned->requests[i].n_weights,
                                                        .shared_average = (int32_t)(total / n)};
        }
        preset->budgets[i] = dt_eviction_complete(&preset->requests[i]);
    }
    preset->total_cache_size = (int32_t)total;
    preset->weights = dt_score_weights_share(learned->weights);
}

/* A file that is not of this model, or can't be read, is no reason to fail: a preset works without. */
void dt_eviction_learn(dt_eviction *preset, const dt_model *model) {
    const dt_model_info *info = dt_model_get_info(model);
    char *path = dt_eviction_learned_file(dt_gguf_path(model->gguf));
    if (path == NULL) {
        return;
    }
    dt_eviction *learned = NULL;
    dt_error why = {0};
    if (dt_eviction_from_file(model, path, &learned, &why) != DT_OK) {
        dt_log(DT_LOG_WARN, "TLC: %s; the preset goes by its own scores", why.message);
    } else if (!has_all_weights(learned, info->windows)) {
        dt_log(DT_LOG_WARN,
               "TLC: %s lacks weights; the preset goes by its own scores. ./deeptutor-eval calibrate -m MODEL writes it anew",
               path);
    } else {
        dt_log(DT_LOG_INFO, "TLC: calibrated: %s", path);
        learn(preset, learned);
    }
    dt_eviction_free(learned);
    free(path);
}
