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
/* What a session was asked for before that was fitted into its kv_memory. */
typedef struct dt_kv_asked {
    int32_t n_batch, total_cache_size;
    dt_kv_type kv_type;
    dt_prefill prefill;
    dt_budget *budgets; /* [n_layers], lists and weights left out */
} dt_kv_asked;

/* A cache that was saved, before anything of it is evicted. */
typedef struct dt_kv_held {
    const dt_kv *kv;        /* an empty one of its kind: its type of numbers may be another than the session's */
    const int32_t *entries; /* of each lane, those of a layer one after the other */
    int64_t to_come;        /* tokens that this run adds; -1: as many as it likes */
    int32_t most_slots;     /* the most memory slots that a lane has */
    bool has_bias;          /* lanes that had any keep a row of biases */
} dt_kv_held;

/* The most that the session's cache comes to when that is loaded and a chunk is read behind it; 0 where it is no more than was
 * planned for, UINT64_MAX when out of memory. */
uint64_t dt_kv_plan_excess(const dt_session *session, const dt_kv_held *held);
/* A kv_memory, in whole KiB, with which a session that was asked for the same, but for the type of numbers that `held` has, would
 * have room for it: more leaves room for larger chunks and budgets too, which then have to fit beside it. needed: more than there
 * is now, as dt_kv_plan_excess says. UINT64_MAX when out of memory. */
uint64_t dt_kv_plan_limit(const dt_session *session, const dt_kv_held *held, uint64_t needed);

#endif
