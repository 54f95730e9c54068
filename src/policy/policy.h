/*
 * Which entries of a lane go: pure functions on plain arrays. No storage, no ggml, no clock.
 *
 * Direction: a score says how much an entry is worth, higher = keep. Ties go to the younger entry. Pinned entries
 * (dt_pinned, the one definition) are never victims, whatever their score.
 */
#ifndef DT_POLICY_H
#define DT_POLICY_H

#include "base/base.h"

#include <float.h>

typedef struct dt_policy dt_policy;

/* More would not pay: each has the bytes of a token. */
#define DT_MAX_MEMORY_SLOTS 1024

/* Settings of one layer, after defaults were filled in (engine/eviction_config.c). */
typedef struct dt_budget {
    const dt_policy *policy; /* NULL: keeps everything */
    int32_t max_cache_size, min_cache_size, sink_tokens, recent_window;
    const int32_t
        *lane_max;        /* [lanes of the layer] where lanes differ, at most max_cache_size each; NULL: max_cache_size for all */
    int32_t memory_slots; /* entries beside max_cache_size that stand for what was evicted (memory_slots.h); 0 = none */
    const float
        *weights; /* [lanes of the layer][n_weights] of a policy that needs_weights, else NULL; whoever gave them keeps them */
    int32_t n_weights;
    bool context_bounds; /* max_cache_size is what the context leaves a lane that shares a budget: nobody asked for it */
} dt_budget;

/* The budget of one lane: its own maximum and weights in place of the layer's. */
static inline dt_budget dt_budget_of_lane(const dt_budget *budget, int32_t lane) {
    dt_budget own = *budget;
    own.max_cache_size = budget->lane_max != NULL ? budget->lane_max[lane] : budget->max_cache_size;
    own.lane_max = NULL;
    own.weights = budget->weights != NULL ? budget->weights + (size_t)lane * (size_t)budget->n_weights : NULL;
    return own;
}
/* Tokens a lane is left with after a round, which begins when it has more than max: max(min_cache_size, max - max/16). Where that
 * is max itself (min = max, or max below 16), a round frees what is beyond it, and every token brings one. */
int32_t dt_budget_low_water(const dt_budget *budget);

/* An entry's position tells what it is: a memory slot has that of one of the tokens it stands for, as a negative number. */
static inline bool dt_is_slot(int32_t position) { return position < 0; }

/* One lane as a policy sees it. Arrays have n entries, in any order; positions are unique. The masses and norms may be NULL for a
 * policy without needs_mass. */
typedef struct dt_lane_view {
    int32_t n;
    int32_t n_slots;          /* of the n: memory slots, which are pinned and beside all sizes */
    const int32_t *position;  /* below 0: a memory slot (dt_is_slot) */
    const float *recent_mass; /* attention mass per query, a running mean over about the last DT_OBSERVE_WINDOW of them */
    const float *value_norm;
    const float *peak_mass; /* largest probability that any query gave it while the text was repeated, or a prediction of that;
                               NULL without needs_peak */
    const float *weights;   /* the lane's, NULL without needs_weights */
    int32_t next_position;  /* that of the next token: the newest kept one is next_position - 1 */
    int32_t sink_tokens, recent_window;
} dt_lane_view;

/* The last queries that an importance score looks at (W). */
#define DT_OBSERVE_WINDOW 32

/* What scores that come from a repetition, or foretell it, add for an entry: the repetition brings along what it has just said, so
 * it doesn't show what heads look at while a text goes on; the attention of the last queries does. Both are probabilities, but one
 * is the most that a question may ever ask for, the other what every token does ask for, which counts DT_IN_USE times as much
 * (docs/quality.md, in serving). */
#define DT_IN_USE 60.0f
static inline float dt_in_use(const dt_lane_view *view, int32_t entry) {
    const float mass = view->recent_mass[entry];
    return mass > 0 && mass <= FLT_MAX ? DT_IN_USE * DT_MIN(mass, 1e18f) : 0;
}

bool dt_pinned(const dt_lane_view *view, int32_t entry);

struct dt_policy {
    const char *name;
    const char *score_name; /* among policies of one name; NULL where there is no choice */
    bool needs_mass;        /* wants attention mass and value norms collected */
    float recent_share;     /* of what a lane of fixed size keeps, this share is the newest, whatever their scores */
    bool needs_peak;        /* wants peak_mass: from the text repeated before a round (dt_policy_repeats), or */
    bool needs_weights;     /* from dt_predict_peak, and the weights for it */
    /* out[n]. Reads nothing but the view. NaN counts as the lowest score. */
    void (*score)(const dt_lane_view *view, float *out);
};

/* Whether a layer's text is repeated before its rounds; NULL = it keeps everything. */
static inline bool dt_policy_repeats(const dt_policy *policy) {
    return policy != NULL && policy->needs_peak && !policy->needs_weights;
}
/* Whether attention mass is to be collected: memory slots weigh what they merge by the attention it got. */
static inline bool dt_budget_needs_mass(const dt_budget *budget) {
    return budget->policy != NULL && (budget->policy->needs_mass || budget->memory_slots > 0);
}
/* Whether peaks are to be kept. */
static inline bool dt_budget_needs_peak(const dt_budget *budget) { return budget->policy != NULL && budget->policy->needs_peak; }
/* Whether peaks are foretold, by weights that were learned. */
static inline bool dt_budget_needs_weights(const dt_budget *budget) {
    return budget->policy != NULL && budget->policy->needs_weights;
}
/* How many of n layers evict: those have a part in a budget that is shared. */
static inline int32_t dt_budgets_that_evict(const dt_budget *budgets, int32_t n) {
    int32_t n_evicting = 0;
    for (int32_t i = 0; i < n; i++) {
        n_evicting += budgets[i].policy != NULL;
    }
    return n_evicting;
}
/* NULL when there is none of that name. score_name: NULL = the name's first. */
const dt_policy *dt_policy_find(const char *name, const char *score_name);
const dt_policy *const *dt_policies(int32_t *n);

/* Folds the attention mass of newly committed queries into a lane's running mean (recent_mass). mass[n]: sum over `n_queries` query
 * rows. Entries new since the last fold have a mean of 0. */
void dt_mass_fold(float *mean, const float *mass, int32_t n, int32_t n_queries);

/* The recent window that holds when n_keep entries are to stay: the view's, or what the policy's recent_share asks for. */
int32_t dt_policy_recent_window(const dt_policy *policy, const dt_lane_view *view, int32_t n_keep);
/* Bytes of scratch dt_policy_choose needs for n entries; to be 64-byte aligned. */
size_t dt_policy_scratch_bytes(int32_t n);
/* Chooses victims so that n_keep entries stay, or fewer victims where pins forbid it. victims[n]: their indices, ascending.
 * Returns how many. */
int32_t dt_policy_choose(const dt_policy *policy, const dt_lane_view *view, int32_t n_keep, int32_t *victims, void *scratch);

/* ---- predict.c: a token's peak, foretold from its key and value ---- */

/* What an entry looks like. Keys are rotated in pairs: of the first `split` dimensions i goes with i + split/2, of the others (all,
 * where split is 0) 2i with 2i + 1. */
typedef struct dt_predict_shape {
    int32_t dim_k, dim_v, split;
} dt_predict_shape;

/* A lane's weights: these two, then one per feature. */
enum { DT_PREDICT_BIAS, DT_PREDICT_DECAY, DT_PREDICT_FEATURES };
static inline int32_t dt_predict_n_features(const dt_predict_shape *shape) { return shape->dim_k / 2 + shape->dim_v; }
static inline int32_t dt_predict_n_weights(const dt_predict_shape *shape) {
    return DT_PREDICT_FEATURES + dt_predict_n_features(shape);
}
/* key[dim_k] as rotated, value[dim_v] -> out[n_features]. */
void dt_predict_features(const dt_predict_shape *shape, const float *key, const float *value, float *out);
/* What the weight DT_PREDICT_DECAY multiplies, for a token that lies `distance` >= 1 tokens back. */
float dt_predict_decay_feature(int64_t distance);
/* The peak of an entry with these features, but for the decay with distance. */
float dt_predict_peak(const dt_predict_shape *shape, const float *weights, const float *features);

/* The policies, one file each; use dt_policy_find. */
extern const dt_policy dt_policy_local_window, dt_policy_importance_score, dt_policy_reconstruct, dt_policy_predict;
/* Without one of their parts, to measure what it is worth. */
extern const dt_policy dt_policy_fast_without_window, dt_policy_fast_without_values, dt_policy_reconstruct_without_attention,
    dt_policy_predict_without_attention;

#endif
