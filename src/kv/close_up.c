/*
 * Closing up: the tokens that were kept move together, so that a conversation can go on past the context of its model.
 *
 * Rounds leave holes between positions, and the newest token gets ever farther from the oldest ones. When the next position would
 * leave the context, the holes are taken out: the next position falls to the length of the longest lane, and the tokens of each
 * lane get the positions right before it, in their order (StreamingLLM, Xiao et al. 2024, numbers the tokens of its cache so all
 * the time); those that lie low enough, sinks first of all, stay where they are. A token that moves has its key turned by as many
 * positions, which is exact up to the rounding of what is stored; that happens once in about context - budget tokens, so it adds up
 * to little (docs/quality.md).
 *
 * A layer whose sliding window fits moves as a whole, since what it still sees lies close together anyway.
 *
 * Invariants: order in a lane and entry order stay; no position and no distance grows; what a window still sees it sees afterwards.
 * On failure (memory) nothing has changed but that what windows have passed is gone.
 */
#include "kv/kv_internal.h"

#include <math.h>
#include <stdlib.h>

typedef struct numbered {
    int32_t position, entry;
} numbered;

/* cos and sin of what a key turns by when it moves by `positions`. */
typedef struct turn {
    int32_t positions;
    float cosine[DT_KV_MAX_DIM / 2], sine[DT_KV_MAX_DIM / 2];
} turn;

static void turn_init(turn *t, const dt_kv_rope *rope, int32_t positions) {
    t->positions = positions;
    for (int32_t i = 0; i < rope->n_pairs; i++) {
        const double angle = positions * rope->frequency[i];
        t->cosine[i] = (float)cos(angle);
        t->sine[i] = (float)sin(angle);
    }
}

static void turn_key(const turn *t, const dt_kv_rope *rope, float *key) {
    for (int32_t i = 0; i < rope->n_pairs; i++) {
        float *x = rope->halves ? &key[i] : &key[2 * i], *y = rope->halves ? &key[i + rope->n_pairs] : &key[2 * i + 1];
        /* NOLINTBEGIN(clang-analyzer-core.UndefinedBinaryOperatorResult): turn_init has filled in as many */
        const float turned = *x * t->cosine[i] - *y * t->sine[i];
        *y = *x * t->sine[i] + *y * t->cosine[i];
        /* NOLINTEND(clang-analyzer-core.UndefinedBinaryOperatorResult) */
        *x = turned;
    }
}

static void move_entry(const dt_kv *kv, const dt_kv_layer_state *layer, const dt_kv_lane_state *lane, int32_t entry,
                       int32_t positions, turn *t) {
    const dt_kv_format *f = &layer->params.format;
    const dt_kv_rope *rope = &layer->params.rope;
    void *block = lane->spans[entry / f->block_tokens].block;
    const int32_t i = entry % f->block_tokens;
    dt_kv_position(f, block)[i] += dt_is_slot(dt_kv_position(f, block)[i]) ? -positions : positions;
    if (positions == 0 || rope->n_pairs == 0) {
        return;
    }
    if (f->elsewhere) {
        kv->home->ops->turn(kv->home, (int32_t)(layer - kv->layers), (int32_t)(lane - layer->lanes), entry, positions);
        return;
    }
    if (t->positions != positions) {
        turn_init(t, rope, positions);
    }
    float key[DT_KV_MAX_DIM];
    dt_kv_read_key(f, block, i, key);
    turn_key(t, rope, key);
    dt_kv_write_key(f, block, i, key);
}

static int by_position(const void *a, const void *b) {
    const int32_t x = ((const numbered *)a)->position, y = ((const numbered *)b)->position;
    return (x > y) - (x < y);
}

static void move_lane(const dt_kv *kv, const dt_kv_layer_state *layer, const dt_kv_lane_state *lane, bool whole, int32_t next,
                      int32_t new_next, numbered *entries) {
    const dt_kv_format *f = &layer->params.format;
    turn t = {0};
    for (int32_t i = 0; i < lane->n_entries; i++) {
        const int32_t position = dt_kv_position(f, lane->spans[i / f->block_tokens].block)[i % f->block_tokens];
        entries[i].position = dt_is_slot(position) ? ~position : position; /* a slot moves as one of its tokens would */
        entries[i].entry = i;
    }
    if (!whole) {
        qsort(entries, (size_t)lane->n_entries, sizeof *entries, by_position);
    }
    int32_t limit = new_next - 1; /* highest free position */
    for (int32_t i = lane->n_entries - 1; i >= 0; i--) {
        const int32_t from = entries[i].position, to = whole ? from - next + new_next : DT_MIN(from, limit);
        move_entry(kv, layer, lane, entries[i].entry, to - from, &t);
        limit = to - 1;
    }
}

/* What moves as a whole must not land among the sinks. */
static int32_t whole_length(const dt_kv_layer_params *params) {
    return params->window + (params->budget.policy != NULL ? params->budget.sink_tokens : 0);
}

/* The layer's window fits into `limit` positions. */
static bool moves_whole(const dt_kv_layer_params *params, int32_t limit) {
    return params->window > 0 && params->window < limit && whole_length(params) <= limit;
}

/* The lowest next position that the layer leaves room for. */
static int32_t closed_length(const dt_kv *kv, int32_t layer, int32_t limit) {
    const dt_kv_layer_params *params = &kv->layers[layer].params;
    return moves_whole(params, limit) ? whole_length(params) : dt_kv_length(kv, layer);
}

/* What windows have passed goes, and every block becomes this cache's own. */
static dt_status prepare(dt_kv *kv, int32_t limit, dt_error *error) {
    int64_t n = 0;
    for (int32_t i = 0; i < kv->n_layers; i++) {
        const dt_kv_layer_params *params = &kv->layers[i].params;
        kv->layers[i].passed = moves_whole(params, limit) ? DT_MAX(kv->next_position - params->window + 1, 0) : 0;
    }
    const dt_status status = dt_kv_drop_passed(kv, &n, error);
    for (int32_t i = 0; i < kv->n_layers && status == DT_OK; i++) {
        const dt_kv_layer_params *params = &kv->layers[i].params;
        for (int32_t j = 0; j < params->n_lanes; j++) {
            for (int32_t entry = 0; entry < kv->layers[i].lanes[j].n_entries; entry += params->format.block_tokens) {
                if (!dt_kv_own_entry(kv, i, j, entry)) {
                    return dt_kv_fail_memory(kv, params->format.block_bytes, "moving the tokens of a shared KV cache", error);
                }
            }
        }
    }
    return status;
}

dt_status dt_kv_close_up(dt_kv *kv, int32_t limit, dt_error *error) {
    const int32_t next = kv->next_position;
    int32_t longest = 1, new_next = 0;
    if (kv->n_uncommitted > 0) {
        return dt_fail(error, DT_ERR_ARGUMENT, "%d tokens are not committed yet: commit them before moving others",
                       kv->n_uncommitted);
    }
    for (int32_t i = 0; i < kv->n_layers; i++) {
        longest = DT_MAX(longest, dt_kv_length(kv, i));
        new_next = DT_MAX(new_next, closed_length(kv, i, limit));
    }
    if (new_next >= next) { /* before anything is dropped: what stays in place may be taken back */
        return DT_OK;
    }
    const dt_status status = prepare(kv, limit, error);
    const size_t bytes = (size_t)longest * sizeof(numbered);
    numbered *entries = status == DT_OK ? dt_kv_scratch(kv, bytes) : NULL;
    if (status != DT_OK || entries == NULL) {
        return status != DT_OK ? status : dt_kv_fail_memory(kv, bytes, "moving the cache's tokens", error);
    }
    for (int32_t i = 0; i < kv->n_layers; i++) {
        const dt_kv_layer_state *layer = &kv->layers[i];
        for (int32_t j = 0; j < layer->params.n_lanes; j++) {
            move_lane(kv, layer, &layer->lanes[j], moves_whole(&layer->params, limit), next, new_next, entries);
        }
    }
    kv->shift += next - new_next;
    kv->next_position = new_next;
    kv->newest_dropped = kv->newest_dropped == next - 1 ? new_next - 1 : DT_MIN(kv->newest_dropped, new_next - 2);
    return DT_OK;
}
