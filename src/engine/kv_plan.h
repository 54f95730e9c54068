/*
 * How much memory a session's cache can come to, and how its settings give way when that is more than was granted.
 */
#ifndef DT_ENGINE_KV_PLAN_H
#define DT_ENGINE_KV_PLAN_H

#include "engine/engine.h"

/* A layer's cache is elsewhere than on the host where the layer is, or where ggml's operators were asked for. */
bool dt_kv_plan_is_elsewhere(const dt_model *model, const dt_session_params *params, int32_t layer);
/* True for the kernels that are ggml's operators. */
bool dt_kernel_is_ggml(const char *kernel);
/* What dt_kv_new takes, for these settings and budgets[n_layers]. Free with free(); NULL when out of memory. */
dt_kv_layer_params *dt_kv_plan_layers(const dt_model *model, const dt_session_params *params, const dt_budget *budgets);
/* Fits kv_type, prefill, n_batch of *params, budgets[n_layers] and a shared total (0 = none) into params->kv_memory (0: changes
 * nothing), and logs what the cache will take at most. DT_ERR_LIMIT with the smallest size that works. params is filled in, n_ctx
 * and n_batch above 0. *most: bytes that the cache takes at most. */
dt_status dt_kv_plan_fit(const dt_model *model, dt_session_params *params, dt_budget *budgets, int32_t *total_cache_size,
                         uint64_t *most, dt_error *error);
/* Memory slots of a cache that was saved: the most that a lane has; lanes that had any keep a row of biases. */
typedef struct dt_kv_slots_held {
    int32_t most;
    bool has_bias;
} dt_kv_slots_held;

/* The most that the session's cache comes to when lanes of these lengths are loaded, those of a layer one after the other; 0 where
 * that is no more than was planned for, UINT64_MAX when out of memory. lengths: with what is appended before the next round, but for
 * what reconstruct repeats, which is added. */
uint64_t dt_kv_plan_excess(const dt_session *session, int32_t *lengths, dt_kv_slots_held slots);

#endif
