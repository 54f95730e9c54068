/*
 * The whole-structure checker of the KV cache: reads everything, changes nothing, names the first thing that is wrong.
 *
 * Tests call it after every step. Its bitmap comes from plain calloc, not from the cache's dt_memory: a check must neither move the
 * peak that is reported nor be hit by an allocation failure that a test has ordered.
 */
#include "kv/kv_internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct check {
    const dt_kv *kv;
    int32_t layer, lane;
    uint8_t *seen; /* bitmap over positions */
    size_t seen_bytes;
    int32_t newest_of_all; /* highest position in any lane */
    bool shared;           /* some block has more than one reference */
    dt_error *error;
} check;

#define CHECK(c, condition, ...)                                                                                                   \
    do {                                                                                                                           \
        if (!(condition)) {                                                                                                        \
            return broken(c, __VA_ARGS__);                                                                                         \
        }                                                                                                                          \
    } while (0)

static dt_status broken(const check *c, const char *format, ...) DT_PRINTF(2, 3);
static dt_status broken(const check *c, const char *format, ...) {
    char what[256];
    va_list arguments;
    va_start(arguments, format);
    dt_format_line(what, sizeof what, format, arguments);
    va_end(arguments);
    return dt_fail(c->error, DT_ERR_INTERNAL, "KV cache, layer %d, KV head %d: %s", c->layer, c->lane, what);
}

static bool is_amount(float value) { return dt_is_finite(value) && value >= 0; }

static dt_status check_spans(check *c, const dt_kv_layer_state *layer, const dt_kv_lane_state *lane) {
    const dt_kv_format *f = &layer->params.format;
    CHECK(c, lane->n_entries >= 0 && lane->n_spans == dt_kv_blocks(f, lane->n_entries), "%d entries in %d blocks of %d",
          lane->n_entries, lane->n_spans, f->block_tokens);
    CHECK(c, lane->n_spans <= lane->capacity_blocks, "%d blocks, arrays for %d", lane->n_spans, lane->capacity_blocks);
    CHECK(c, (lane->capacity_blocks > 0) == (lane->arrays != NULL), "arrays for %d blocks are %smissing", lane->capacity_blocks,
          lane->arrays == NULL ? "" : "not ");
    CHECK(c, lane->arrays == NULL || layer->has_mass == (lane->recent_mass != NULL), "rows of masses do not fit the policy");
    CHECK(c, lane->arrays == NULL || layer->params.keeps_origins == (lane->origin != NULL), "the row of origins does not fit");
    CHECK(c, lane->arrays == NULL || layer->has_peak == (lane->peak_mass != NULL), "the row of peaks does not fit the policy");
    for (int32_t i = 0; i < lane->n_spans; i++) {
        const dt_kv_span *span = &lane->spans[i];
        const int32_t n = i + 1 < lane->n_spans ? f->block_tokens : lane->n_entries - i * f->block_tokens;
        CHECK(c, span->block != NULL && span->n == n, "block %d has %d entries, not %d", i, span->n, n);
        CHECK(c, span->bias == (lane->bias == NULL ? NULL : lane->bias + (size_t)i * (size_t)f->block_tokens),
              "block %d points to other biases", i);
        const int references = atomic_load(&dt_kv_head(span->block)->references);
        CHECK(c, references >= 1, "block %d has %d references", i, references);
        c->shared = c->shared || references > 1;
    }
    return DT_OK;
}

/* The entry counts as one token at least, and as no more than there were. */
static bool is_slot_bias(const dt_kv *kv, const dt_kv_lane_state *lane, int32_t entry) {
    return lane->bias != NULL && dt_is_finite(lane->bias[entry]) && lane->bias[entry] > -0.01f &&
           lane->bias[entry] < logf((float)kv->next_position + (float)kv->shift) + 0.01f;
}

static dt_status check_positions(check *c, const dt_kv_layer_state *layer, const dt_kv_lane_state *lane) {
    const dt_kv *kv = c->kv;
    const dt_kv_format *f = &layer->params.format;
    const int32_t n_committed = lane->n_entries - kv->n_uncommitted, first_uncommitted = kv->next_position - kv->n_uncommitted;
    CHECK(c, n_committed >= 0, "%d entries, but %d uncommitted", lane->n_entries, kv->n_uncommitted);
    memset(c->seen, 0, c->seen_bytes);
    int32_t n_slots = 0;
    for (int32_t entry = 0; entry < lane->n_entries; entry++) {
        const int32_t stored = dt_kv_position(f, lane->spans[entry / f->block_tokens].block)[entry % f->block_tokens];
        const int32_t p = dt_is_slot(stored) ? ~stored : stored; /* a slot's is that of a token it stands for */
        n_slots += dt_is_slot(stored);
        if (entry < n_committed) {
            CHECK(c, p >= 0 && p < first_uncommitted, "committed entry %d has position %d, the next one is %d", entry, p,
                  first_uncommitted);
        } else {
            CHECK(c, stored == first_uncommitted + entry - n_committed, "uncommitted entry %d has position %d", entry, stored);
        }
        CHECK(c, lane->origin == NULL || dt_is_slot(stored) || (lane->origin[entry] >= p && lane->origin[entry] <= p + kv->shift),
              "position %d came from %d, but at most %d before", p, lane->origin == NULL ? 0 : lane->origin[entry], kv->shift);
        CHECK(c, (c->seen[p / 8] >> (p % 8) & 1) == 0, "position %d is there twice", p);
        c->seen[p / 8] = (uint8_t)(c->seen[p / 8] | 1u << (p % 8));
        c->newest_of_all = DT_MAX(c->newest_of_all, stored);
        CHECK(c, !dt_is_slot(stored) || (p <= kv->newest_dropped && is_slot_bias(kv, lane, entry)),
              "memory slot %d stands for no evicted token, or its bias is not between 0 and the log of all tokens", entry);
    }
    CHECK(c, n_slots == lane->n_slots, "%d memory slots, counted as %d", n_slots, lane->n_slots);
    return DT_OK;
}

static dt_status check_numbers(const check *c, const dt_kv_layer_state *layer, const dt_kv_lane_state *lane) {
    const dt_kv_format *f = &layer->params.format;
    for (int32_t entry = 0; entry < lane->n_entries; entry++) {
        void *block = lane->spans[entry / f->block_tokens].block;
        const int32_t i = entry % f->block_tokens;
        if (layer->has_mass) {
            CHECK(c, is_amount(lane->recent_mass[entry]) && is_amount(lane->value_norm[entry]),
                  "entry %d has a mass of %f, a value norm of %f", entry, (double)lane->recent_mass[entry],
                  (double)lane->value_norm[entry]);
        }
        CHECK(c, !layer->has_peak || is_amount(lane->peak_mass[entry]), "entry %d has a peak of %f", entry,
              (double)lane->peak_mass[entry]);
        CHECK(c, lane->bias == NULL || dt_is_finite(lane->bias[entry]) || lane->bias[entry] < 0, "entry %d has a bias of %f", entry,
              (double)lane->bias[entry]);
        CHECK(c, f->elsewhere || f->type_k != DT_KV_INT8 || is_amount(dt_kv_k_scale(f, block)[i]), "entry %d has a bad key scale",
              entry);
        CHECK(c, f->elsewhere || f->type_v != DT_KV_INT8 || is_amount(dt_kv_v_scale(f, block)[i]), "entry %d has a bad value scale",
              entry);
    }
    return DT_OK;
}

/* A position that no lane ever dropped is in all of them: so is the newest, unless the cache was cut to where lanes differ. */
static dt_status check_newest(check *c) {
    if (c->newest_of_all <= c->kv->newest_dropped) {
        return DT_OK;
    }
    for (c->layer = 0; c->layer < c->kv->n_layers; c->layer++) {
        const dt_kv_layer_state *layer = &c->kv->layers[c->layer];
        const dt_kv_format *f = &layer->params.format;
        for (c->lane = 0; c->lane < layer->params.n_lanes; c->lane++) {
            const dt_kv_lane_state *lane = &layer->lanes[c->lane];
            bool found = false;
            for (int32_t entry = 0; entry < lane->n_entries && !found; entry++) {
                const int32_t *position = dt_kv_position(f, lane->spans[entry / f->block_tokens].block);
                found = position[entry % f->block_tokens] == c->newest_of_all;
            }
            CHECK(c, found, "the newest position, %d, is missing", c->newest_of_all);
        }
    }
    return DT_OK;
}

static dt_status check_lanes(check *c) {
    for (c->layer = 0; c->layer < c->kv->n_layers; c->layer++) {
        const dt_kv_layer_state *layer = &c->kv->layers[c->layer];
        for (c->lane = 0; c->lane < layer->params.n_lanes; c->lane++) {
            const dt_kv_lane_state *lane = &layer->lanes[c->lane];
            dt_status status = check_spans(c, layer, lane);
            status = status == DT_OK ? check_positions(c, layer, lane) : status;
            status = status == DT_OK ? check_numbers(c, layer, lane) : status;
            if (status != DT_OK) {
                return status;
            }
        }
    }
    return check_newest(c);
}

dt_status dt_kv_check(const dt_kv *kv, dt_error *error) {
    if (kv->shift < 0 || kv->shift > INT32_MAX - kv->next_position) {
        return dt_fail(error, DT_ERR_INTERNAL, "KV cache: next position %d, shift %d", kv->next_position, kv->shift);
    }
    if (kv->n_uncommitted < 0 || kv->next_position < kv->n_uncommitted || kv->newest_dropped >= DT_MAX(kv->next_position, 1)) {
        return dt_fail(error, DT_ERR_INTERNAL, "KV cache: next position %d, %d uncommitted, newest dropped %d", kv->next_position,
                       kv->n_uncommitted, kv->newest_dropped);
    }
    if (kv->spare != NULL && atomic_load(&dt_kv_head(kv->spare)->references) != 0) {
        return dt_fail(error, DT_ERR_INTERNAL, "KV cache: the spare block is in use");
    }
    const size_t seen_bytes = (size_t)kv->next_position / 8 + 1;
    check c = {.kv = kv, .seen = calloc(seen_bytes, 1), .seen_bytes = seen_bytes, .newest_of_all = -1, .error = error};
    if (c.seen == NULL) {
        return dt_fail_memory(error, seen_bytes, "checking the KV cache");
    }
    const dt_status status = check_lanes(&c);
    free(c.seen);
    if (status == DT_OK && !c.shared && dt_kv_bytes(kv) > atomic_load(&kv->memory->bytes)) {
        return dt_fail(error, DT_ERR_INTERNAL, "KV cache: counts %zu bytes, but only %zu are allocated", dt_kv_bytes(kv),
                       (size_t)atomic_load(&kv->memory->bytes));
    }
    return status;
}
