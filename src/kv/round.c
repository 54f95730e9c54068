/*
 * Eviction rounds: first how many entries each lane keeps, then which ones go.
 *
 * A lane that has outgrown its own budget goes down to the low-water mark at once, so that the cost of choosing is spread over the
 * tokens until the next round. A shared budget (dt_kv_set_budgets) is dealt out anew in each round: every lane keeps what scores
 * above one threshold, within its bounds, and the threshold is the one that fills the budget. So the few lanes that look far back
 * keep much and the others little (as AdaKV, Feng et al. 2024, and KVzip, Kim et al. 2025, do over heads).
 *
 * Lanes know nothing of each other, so scoring and evicting are shared out between threads, lane by lane. A device is asked by the
 * calling thread alone.
 *
 * Positions, victims, scores and the policy's scratch lie in the cache's scratch, which is kept between rounds.
 * Memory is needed where blocks are shared with another cache, such as a snapshot of this one. All of it is got before the first
 * lane changes: a round that began with some of the lanes would deal out another budget when it is tried again.
 * Invariants: only committed, unpinned entries go; for want of memory none go; nothing takes a lane below its min_cache_size; what
 * goes doesn't depend on which thread treats a lane.
 */
#include "kv/kv_internal.h"

#include <math.h>
#include <string.h>

#define ALL INT32_MAX /* a lane that the round leaves alone */

static size_t row_bytes(int32_t n) { return DT_ROUND_UP((size_t)n * sizeof(int32_t), (size_t)64); }

/* Positions, victims, the policy's scratch. */
static size_t choice_bytes(int32_t n) { return DT_ROUND_UP(2 * row_bytes(n) + dt_policy_scratch_bytes(n), (size_t)64); }

size_t dt_kv_round_bytes(const dt_kv_layer_params *params, int32_t n) { return choice_bytes(n) + dt_kv_slots_bytes(params, n); }

/* The lane as its policy sees it; positions is filled. */
static dt_lane_view lane_entries(const dt_kv *kv, int32_t layer, int32_t lane, int32_t next_position, int32_t *positions) {
    const dt_budget own = dt_budget_of_lane(&kv->layers[layer].params.budget, lane), *budget = &own;
    dt_kv_lane_view view;
    dt_kv_lane(kv, layer, lane, &view);
    dt_kv_positions(kv, layer, lane, positions);
    return (dt_lane_view){
        .n = view.n_entries,
        .n_slots = view.n_slots,
        .position = positions,
        .recent_mass = view.recent_mass,
        .value_norm = view.value_norm,
        .peak_mass = view.peak_mass,
        .weights = budget->weights,
        .next_position = next_position,
        .sink_tokens = budget->sink_tokens,
        .recent_window = budget->recent_window,
    };
}

/* ---- lanes shared out ---- */

typedef struct lane_walk lane_walk;
struct lane_walk {
    dt_kv *kv;
    int32_t next_position, n_threads;
    bool elsewhere; /* lanes whose keys and values are elsewhere, or the others */
    /* index: of dt_kv.lanes and dt_kv.keep; scratch: the thread's own, of scratch_bytes. False ends the thread's way. */
    bool (*treat)(lane_walk *walk, int32_t layer, int32_t lane, int32_t index, int32_t thread);
    char *scratch;
    size_t scratch_bytes;
    struct shared_lane *shared; /* of keep_shared */
    dt_share shares[DT_SHARE_RANGES];
    dt_status status[DT_KV_ROUND_THREADS];
    dt_error errors[DT_KV_ROUND_THREADS];
};

/* At most so many work; not how many there are, so that what a cache takes doesn't depend on that. */
static int32_t threads_of(const dt_workers *workers) { return workers == NULL ? 1 : DT_KV_ROUND_THREADS; }

static void walk_thread(void *user, int ith, int nth) {
    lane_walk *walk = user;
    const dt_kv *kv = walk->kv;
    const int32_t n_threads = DT_MIN(nth, walk->n_threads);
    if (ith >= n_threads) {
        return;
    }
    dt_share_walk share = dt_share_begin(walk->shares, kv->n_lanes, ith, n_threads);
    bool goes_on = walk->status[ith] == DT_OK;
    for (int64_t index = dt_share_next(&share); goes_on && index < kv->n_lanes; index = dt_share_next(&share)) {
        int32_t layer = 0;
        while (index >= kv->layers[layer].lanes - kv->lanes + kv->layers[layer].params.n_lanes) {
            layer++;
        }
        if (kv->layers[layer].params.format.elsewhere == walk->elsewhere) {
            goes_on = walk->treat(walk, layer, (int32_t)(index - (kv->layers[layer].lanes - kv->lanes)), (int32_t)index, ith);
        }
    }
}

/* Treats every lane, those that are elsewhere on the calling thread. */
static void walk_lanes(lane_walk *walk, const dt_workers *workers) {
    for (int32_t elsewhere = 0; elsewhere < 2; elsewhere++) {
        if (elsewhere != 0 && walk->kv->home == NULL) {
            continue;
        }
        walk->elsewhere = elsewhere != 0;
        for (int32_t i = 0; i < DT_SHARE_RANGES; i++) {
            dt_share_reset(&walk->shares[i]);
        }
        dt_workers_run(elsewhere != 0 || walk->n_threads == 1 ? NULL : workers, walk_thread, walk);
    }
}

/* ---- how many each lane keeps ---- */

/* Lanes over their own budget. */
static void keep_own(dt_kv *kv, bool exact) {
    for (int32_t i = 0, index = 0; i < kv->n_layers; i++) {
        const dt_kv_layer_state *layer = &kv->layers[i];
        for (int32_t j = 0; j < layer->params.n_lanes; j++, index++) {
            const dt_budget budget = dt_budget_of_lane(&layer->params.budget, j);
            const bool over = budget.policy != NULL && layer->lanes[j].n_entries - layer->lanes[j].n_slots > budget.max_cache_size;
            kv->keep[index] = !over ? ALL : exact ? budget.max_cache_size : dt_budget_low_water(&budget);
        }
    }
}

/* What a lane of a shared budget would keep at a threshold. */
typedef struct shared_lane {
    float *scores;      /* [n_free], of the entries that are not pinned */
    int32_t *positions; /* for scoring */
    int32_t n_free, n_pinned;
    int32_t least, most;
    double weight; /* 1 / lanes of the layer */
} shared_lane;

static int32_t kept_at(const shared_lane *lane, float threshold) {
    int32_t n = lane->n_pinned;
    for (int32_t i = 0; i < lane->n_free; i++) {
        n += lane->scores[i] >= threshold;
    }
    return DT_MIN(DT_MAX(n, lane->least), lane->most);
}

static float number_of(uint32_t bits) {
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static double total_at(const shared_lane *lanes, int32_t n_lanes, float threshold) {
    double total = 0;
    for (int32_t i = 0; i < n_lanes; i++) {
        total += kept_at(&lanes[i], threshold) * lanes[i].weight;
    }
    return total;
}

/* The lowest threshold at which no more than `total` entries stay, as bits: numbers from 0 to infinity are ordered as these are. */
static uint32_t find_threshold(const shared_lane *lanes, int32_t n_lanes, double total) {
    uint32_t low = 0, high = 0x7F800000u; /* 0 keeps everything, infinity the pinned ones */
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (total_at(lanes, n_lanes, number_of(middle)) > total) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

/* Entries that each lane keeps. Where many scores are equal, the next lower threshold keeps far too many and this one too few:
 * every lane then takes the same share of the difference. */
static void fill_lanes(const shared_lane *lanes, int32_t n_lanes, double total, int32_t *keep) {
    const uint32_t bits = find_threshold(lanes, n_lanes, total);
    const float above = number_of(bits), below = number_of(bits > 0 ? bits - 1 : 0);
    const double kept = total_at(lanes, n_lanes, above), more = total_at(lanes, n_lanes, below) - kept;
    const double share = more > 0 ? DT_MIN(DT_MAX(total - kept, 0.0) / more, 1.0) : 0;
    for (int32_t i = 0; i < n_lanes; i++) {
        const int32_t least = kept_at(&lanes[i], above);
        keep[i] = least + (int32_t)(share * (kept_at(&lanes[i], below) - least));
    }
}

/* The lanes, all scores, and as many positions; the walk's task. */
size_t dt_kv_shared_bytes(int32_t n_lanes, size_t n_entries) {
    return DT_ROUND_UP((size_t)n_lanes * sizeof(shared_lane), (size_t)64) + 2 * DT_ROUND_UP(n_entries * sizeof(float), (size_t)64);
}

/* Scores a lane's entries; scores[n_free] are those of entries that are not pinned, negative ones and NaN as 0. A lane that keeps
 * everything has none, and no part in the budget. */
static bool score_lane(lane_walk *walk, int32_t layer, int32_t lane, int32_t index, int32_t thread) {
    (void)thread;
    const dt_kv *kv = walk->kv;
    const dt_budget budget = dt_budget_of_lane(&kv->layers[layer].params.budget, lane);
    const int32_t n = kv->layers[layer].lanes[lane].n_entries;
    shared_lane *out = &walk->shared[index];
    if (budget.policy == NULL) {
        return true;
    }
    float *scores = out->scores;
    const dt_lane_view entries = lane_entries(kv, layer, lane, walk->next_position, out->positions);
    budget.policy->score(&entries, scores);
    for (int32_t i = 0; i < n; i++) {
        if (!dt_pinned(&entries, i)) {
            scores[out->n_free++] = scores[i] > 0 ? scores[i] : 0;
        }
    }
    out->n_pinned = n - entries.n_slots - out->n_free;
    out->least = DT_MIN(budget.min_cache_size, n - entries.n_slots);
    out->most = DT_MIN(budget.max_cache_size, n - entries.n_slots);
    out->weight = 1.0 / kv->layers[layer].params.n_lanes;
    return true;
}

static dt_status keep_shared(dt_kv *kv, int32_t next_position, double total, const dt_workers *workers, dt_error *error) {
    size_t n_entries = 0;
    for (int32_t i = 0; i < kv->n_lanes; i++) {
        n_entries += (size_t)kv->lanes[i].n_entries;
    }
    const size_t bytes = dt_kv_shared_bytes(kv->n_lanes, n_entries);
    char *memory = dt_kv_scratch(kv, bytes);
    if (memory == NULL) {
        return dt_kv_fail_memory(kv, bytes, "sharing out the KV cache", error);
    }
    shared_lane *lanes = (shared_lane *)memory;
    float *scores = (float *)(memory + DT_ROUND_UP((size_t)kv->n_lanes * sizeof(shared_lane), (size_t)64));
    int32_t *positions = (int32_t *)(void *)((char *)scores + DT_ROUND_UP(n_entries * sizeof(float), (size_t)64));
    for (int32_t i = 0; i < kv->n_lanes; i++) {
        lanes[i] = (shared_lane){.scores = scores, .positions = positions};
        scores += kv->lanes[i].n_entries;
        positions += kv->lanes[i].n_entries;
    }
    lane_walk walk = {
        .kv = kv, .next_position = next_position, .n_threads = threads_of(workers), .treat = score_lane, .shared = lanes};
    walk_lanes(&walk, workers);
    fill_lanes(lanes, kv->n_lanes, total, kv->keep);
    for (int32_t i = 0, index = 0; i < kv->n_layers; i++) {
        for (int32_t j = 0; j < kv->layers[i].params.n_lanes; j++, index++) {
            kv->keep[index] = kv->layers[i].params.budget.policy != NULL ? kv->keep[index] : ALL;
        }
    }
    return DT_OK;
}

/* ---- the round ---- */

/* In layers that are due, what their window has passed goes first, so that a budget is spent on what can still be seen. */
static dt_status drop_passed(dt_kv *kv, int32_t next_position, dt_round_result *result, dt_error *error) {
    int64_t n = 0;
    for (int32_t i = 0; i < kv->n_layers; i++) {
        const dt_kv_layer_params *params = &kv->layers[i].params;
        const bool is_due = params->window > 0 && dt_kv_exceeds(kv, i, 0); /* all lanes or none */
        kv->layers[i].passed = is_due ? DT_MAX(next_position - params->window + 1, 0) : 0;
    }
    const dt_status status = dt_kv_drop_passed(kv, &n, error);
    result->has_dropped = n > 0;
    return status;
}

/* What goes from a lane so that keep[index] entries stay. */
typedef struct choice {
    int32_t *victims; /* [n] */
    int32_t n;
    void *scratch; /* for merging them */
} choice;

static choice choose(const lane_walk *walk, int32_t layer, int32_t lane, int32_t index, int32_t thread) {
    const dt_kv_lane_state *state = &walk->kv->layers[layer].lanes[lane];
    const dt_policy *policy = walk->kv->layers[layer].params.budget.policy;
    const int32_t n_entries = state->n_entries, n_keep = walk->kv->keep[index];
    char *scratch = walk->scratch + (size_t)thread * walk->scratch_bytes;
    const size_t row = row_bytes(n_entries);
    choice c = {.victims = (int32_t *)(void *)(scratch + row), .scratch = scratch + choice_bytes(n_entries)};
    if (n_entries - state->n_slots > n_keep) {
        const dt_lane_view entries = lane_entries(walk->kv, layer, lane, walk->next_position, (int32_t *)(void *)scratch);
        c.n = dt_policy_choose(policy, &entries, n_keep, c.victims, scratch + 2 * row);
    }
    return c;
}

/* Everything that evicting from the lane takes memory for. */
static bool prepare_lane(lane_walk *walk, int32_t layer, int32_t lane, int32_t index, int32_t thread) {
    dt_kv *kv = walk->kv;
    if (kv->keep[index] == ALL || dt_kv_absorb_is_ready(kv, layer, lane)) {
        return true;
    }
    const choice c = choose(walk, layer, lane, index, thread);
    if (!dt_kv_prepare_absorb(kv, layer, lane, c.victims, c.n, c.scratch)) {
        walk->status[thread] = dt_kv_fail_memory(kv, kv->layers[layer].params.format.block_bytes, "evicting from a shared KV cache",
                                                 &walk->errors[thread]);
    }
    return walk->status[thread] == DT_OK;
}

/* Evicts from the lane; keep[index] becomes ~ how many went: below 0, where it was not before. */
static bool evict_lane(lane_walk *walk, int32_t layer, int32_t lane, int32_t index, int32_t thread) {
    dt_kv *kv = walk->kv;
    const choice c = choose(walk, layer, lane, index, thread);
    kv->keep[index] = ~0;
    if (c.n == 0) {
        return true;
    }
    walk->status[thread] = dt_kv_absorb(kv, layer, lane, c.victims, c.n, c.scratch, &walk->errors[thread]);
    kv->keep[index] = walk->status[thread] == DT_OK ? ~c.n : ~0;
    return walk->status[thread] == DT_OK;
}

static dt_status walk_status(const lane_walk *walk, dt_error *error) {
    for (int32_t i = 0; i < walk->n_threads; i++) {
        if (walk->status[i] != DT_OK) {
            if (error != NULL) {
                *error = walk->errors[i];
            }
            return walk->status[i];
        }
    }
    return DT_OK;
}

/* Evicts from the lanes that have more than keep[index] says, and counts what went. */
static dt_status evict_lanes(dt_kv *kv, int32_t next_position, const dt_workers *workers, dt_round_result *result,
                             dt_error *error) {
    int32_t n_due = 0;
    size_t scratch_bytes = 0;
    for (int32_t i = 0, index = 0; i < kv->n_layers; i++) {
        for (int32_t j = 0; j < kv->layers[i].params.n_lanes; j++, index++) {
            const dt_kv_lane_state *lane = &kv->layers[i].lanes[j];
            if (lane->n_entries - lane->n_slots > kv->keep[index]) {
                n_due++;
                scratch_bytes = DT_MAX(scratch_bytes, dt_kv_round_bytes(&kv->layers[i].params, lane->n_entries));
            }
        }
    }
    const int32_t n_threads = DT_MIN(threads_of(workers), n_due);
    const size_t bytes = (size_t)n_threads * scratch_bytes;
    char *scratch = n_due > 0 ? dt_kv_scratch(kv, bytes) : NULL;
    if (scratch == NULL) {
        return n_due == 0 ? DT_OK : dt_kv_fail_memory(kv, bytes, "choosing what to evict", error);
    }
    lane_walk walk = {.kv = kv,
                      .next_position = next_position,
                      .n_threads = n_threads,
                      .treat = prepare_lane,
                      .scratch = scratch,
                      .scratch_bytes = scratch_bytes};
    walk_lanes(&walk, NULL); /* on one thread: whether there is room doesn't depend on which lane asks first */
    const dt_status status = walk_status(&walk, error);
    if (status != DT_OK) {
        return status;
    }
    walk.treat = evict_lane;
    walk_lanes(&walk, workers);
    double mean_evicted = 0;
    for (int32_t i = 0, index = 0; i < kv->n_layers; i++) {
        const int32_t n_lanes = kv->layers[i].params.n_lanes;
        int64_t evicted = 0;
        for (int32_t j = 0; j < n_lanes; j++, index++) {
            evicted += kv->keep[index] < 0 ? ~kv->keep[index] : 0; /* else the lane was not come to */
        }
        result->has_dropped = result->has_dropped || evicted > 0;
        result->n_rounds += evicted > 0;
        mean_evicted += (double)evicted / n_lanes;
    }
    result->n_evicted = (int64_t)llround(mean_evicted);
    return walk_status(&walk, error);
}

dt_status dt_kv_round(dt_kv *kv, int32_t next_position, bool exact, const dt_workers *workers, dt_round_result *result,
                      dt_error *error) {
    *result = (dt_round_result){0};
    if (kv->n_uncommitted > 0) {
        return dt_fail(error, DT_ERR_ARGUMENT, "%d tokens are not committed yet: commit them before an eviction round",
                       kv->n_uncommitted);
    }
    dt_status status = drop_passed(kv, next_position, result, error);
    const double total = kv->total_cache_size;
    if (status != DT_OK) {
        return status;
    }
    if (total > 0 && dt_kv_shared_length(kv) > total) {
        status = keep_shared(kv, next_position, exact ? total : floor(total - total / 16), workers, error);
    } else {
        keep_own(kv, exact);
    }
    return status == DT_OK ? evict_lanes(kv, next_position, workers, result, error) : status;
}
