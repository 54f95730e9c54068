/*
 * Eviction settings: which policy and which sizes each layer has, from a preset or a JSON file, with overrides.
 *
 * Functions here know a model only by its number of layers, so that they can be tested without one; the public functions of
 * deeptutor.h wrap them. Invariant of a dt_eviction: every layer's budget is complete (defaults filled in) and possible:
 * 0 <= min <= max and sinks + recent < max, for each lane's max, or policy NULL.
 */
#ifndef DT_EVICTION_CONFIG_H
#define DT_EVICTION_CONFIG_H

#include "policy/policy.h"

/* What was asked for a layer, before defaults; -1 = not given. */
typedef struct dt_eviction_request {
    const dt_policy *policy; /* NULL: keeps everything */
    int32_t max_cache_size, min_cache_size, sink_tokens, recent_window;
    int32_t memory_slots; /* 0 = none */
    const int32_t *lanes; /* [n_lanes] instead of max_cache_size, the settings' own; NULL = not given */
    int32_t n_lanes;
    const float
        *weights; /* [n_weight_lanes][n_weights] of score predict, kept by the settings' dt_score_weights; NULL = not given */
    int32_t n_weight_lanes, n_weights;
    int32_t shared_average; /* tokens a layer has on average of a budget shared by all; 0 = it has its own */
} dt_eviction_request;

/* Weights of score predict, which settings and the sessions made with them share. */
typedef struct dt_score_weights {
    atomic_int references;
    int32_t n_layers;
    float *lists[]; /* [n_layers] each at the first layer it is for; NULL elsewhere */
} dt_score_weights;

/* Both take NULL too. */
dt_score_weights *dt_score_weights_share(dt_score_weights *weights);
void dt_score_weights_free(dt_score_weights *weights);

struct dt_eviction {
    int32_t n_layers;
    char *name;                    /* for the log: "preset docqa", "config eviction.json" */
    dt_eviction_request *requests; /* [n_layers] */
    dt_budget *budgets;            /* [n_layers] */
    int32_t **lists;               /* [n_layers] the lists of lanes, each at the first layer it is for; NULL elsewhere */
    dt_score_weights *weights;     /* NULL where no layer has any */
    int32_t total_cache_size;      /* shared by the layers that evict, see dt_kv_set_budgets; 0 = each lane has its own */
    int32_t *windows;              /* [n_layers] the model's sliding windows in tokens, 0 = none */
    bool spares_windows;           /* nobody named a size: no layer gives up what its window still sees */
};

dt_status dt_eviction_config_preset(int32_t n_layers, const char *name, dt_eviction **out, dt_error *error);
dt_status dt_eviction_config_file(int32_t n_layers, const char *path, dt_eviction **out, dt_error *error);
/* text[n_bytes] as if read from the file `path`. */
dt_status dt_eviction_config_text(int32_t n_layers, const char *path, const char *text, size_t n_bytes, dt_eviction **out,
                                  dt_error *error);
/* Tells the model's sliding windows [n_layers]. A preset then keeps a window whole that is longer than its max_cache_size; sizes
 * that a user named hold all the same, and dt_eviction_describe says what that means. */
void dt_eviction_set_windows(dt_eviction *eviction, const int32_t *windows);
/* Changes a preset to go by what was learned about the model, where a file of that lies beside it (model.gguf, model.tlc.json). */
void dt_eviction_learn(dt_eviction *preset, const dt_model *model);
/* DT_ERR_ARGUMENT where it was made for a model of other layers. */
dt_status dt_eviction_check_model(const dt_eviction *eviction, const dt_model_info *info, dt_error *error);
const dt_budget *dt_eviction_budget(const dt_eviction *eviction, int32_t layer);
int32_t dt_eviction_total(const dt_eviction *eviction);

#endif
