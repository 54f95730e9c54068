/*
 * kv/: storage. Random sequences of operations on small caches are compared, entry by entry and byte by byte, with a model that is
 * nothing but an array of (position, id) per lane; the structure checker runs after every step, allocations fail at random.
 *
 * Every number that the cache stores for an entry is derived from the entry's id, so an entry that was moved wrongly, or written
 * through a block that another cache shares, shows.
 */
#include "support/cmocka_all.h"

#include "kv/kv.h"

#include <stdlib.h>
#include <string.h>

#define MAX_ENTRIES 1024
#define MAX_LANES 3
#define N_LAYERS 3
#define MAX_CACHES 3

static uint64_t seed;

static uint32_t draw(uint32_t below) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 33) % below;
}

/* ---- the model ---- */

typedef struct model_lane {
    int32_t n, position[MAX_ENTRIES];
    uint32_t id[MAX_ENTRIES];
    bool biased[MAX_ENTRIES];
} model_lane;

typedef struct model_cache {
    dt_kv *kv;
    int32_t next, n_uncommitted;
    model_lane lanes[N_LAYERS][MAX_LANES];
} model_cache;

static dt_memory memory;
static dt_kv_layer_params params[N_LAYERS];
static model_cache caches[MAX_CACHES];

static void set_up_params(void) {
    dt_kv_format_init(&params[0].format, DT_KV_F16, DT_KV_F16, 5, 7, 16);
    dt_kv_format_init(&params[1].format, DT_KV_INT8, DT_KV_INT8, 6, 20, 16);
    dt_kv_format_init(&params[2].format, DT_KV_INT8, DT_KV_F16, 8, 3, 48);
    params[0].n_lanes = 3;
    params[1].n_lanes = 2;
    params[2].n_lanes = 1;
    params[0].budget = (dt_budget){&dt_policy_importance_score, 20, 8, 2, 4, NULL, 0, NULL, 0, false};
    params[1].budget = (dt_budget){0};
    params[2].budget = (dt_budget){&dt_policy_local_window, 30, 8, 2, 4, NULL, 0, NULL, 0, false};
}

static void require(dt_status status, const dt_error *error) {
    if (status != DT_OK) {
        fail_msg("%s: %s", dt_status_name(status), error->message);
    }
}

static void require_whole(const dt_kv *kv) {
    dt_error error;
    require(dt_kv_check(kv, &error), &error);
}

/* ---- numbers derived from an id ---- */

static uint8_t byte_of(uint32_t id, int32_t what) { return (uint8_t)((id * 2654435761u + (uint32_t)what * 40503u) >> 13); }
static uint16_t half_of(uint32_t id, int32_t what) {
    return (uint16_t)((id * 2654435761u + (uint32_t)what * 40503u) >> 9 & 0x3BFF);
}
static float number_of(uint32_t id, int32_t what) { return (float)((id + (uint32_t)what * 7919u) % 10007u) + 0.5f; }

/* Writes the numbers of an entry, or (write = false) counts those that are different. */
static int32_t entry_numbers(const dt_kv_format *f, void *block, int32_t i, uint32_t id, bool write) {
    int32_t wrong = 0;
    for (int32_t dim = 0; dim < f->dim_k; dim++) {
        char *key = (char *)block + dt_kv_key_offset(f, i, dim);
        const uint16_t half = half_of(id, dim);
        const uint8_t byte = byte_of(id, dim);
        const void *expected = f->type_k == DT_KV_F16 ? (const void *)&half : &byte;
        const size_t size = f->type_k == DT_KV_F16 ? 2 : 1;
        wrong += memcmp(key, expected, size) != 0;
        if (write) {
            memcpy(key, expected, size);
        }
    }
    char *row = (char *)block + f->v_offset + (size_t)i * dt_kv_value_row_bytes(f);
    for (int32_t dim = 0; dim < f->dim_v; dim++) {
        const uint16_t half = half_of(id, 100 + dim);
        const uint8_t byte = byte_of(id, 100 + dim);
        const size_t size = f->type_v == DT_KV_F16 ? 2 : 1;
        const void *expected = f->type_v == DT_KV_F16 ? (const void *)&half : &byte;
        wrong += memcmp(row + (size_t)dim * size, expected, size) != 0;
        if (write) {
            memcpy(row + (size_t)dim * size, expected, size);
        }
    }
    float *scales[2] = {f->type_k == DT_KV_INT8 ? dt_kv_k_scale(f, block) + i : NULL,
                        f->type_v == DT_KV_INT8 ? dt_kv_v_scale(f, block) + i : NULL};
    for (int32_t s = 0; s < 2; s++) {
        wrong += scales[s] != NULL && *scales[s] != number_of(id, 200 + s);
        if (scales[s] != NULL && write) {
            *scales[s] = number_of(id, 200 + s);
        }
    }
    return wrong;
}

static void require_equal_lane(const model_cache *c, int32_t layer, int32_t lane_index) {
    const model_lane *lane = &c->lanes[layer][lane_index];
    const dt_kv_format *f = &params[layer].format;
    dt_kv_lane_view view;
    dt_kv_lane(c->kv, layer, lane_index, &view);
    assert_int_equal(view.n_entries, lane->n);
    assert_int_equal(view.n_uncommitted, c->n_uncommitted);
    int32_t positions[MAX_ENTRIES];
    dt_kv_positions(c->kv, layer, lane_index, positions);
    static int32_t index_of[1 << 16];
    for (int32_t i = 0; i < lane->n; i++) {
        index_of[lane->position[i]] = i + 1;
    }
    for (int32_t entry = 0; entry < view.n_entries; entry++) {
        assert_in_range(positions[entry], 0, (1 << 16) - 1);
        const int32_t i = index_of[positions[entry]] - 1;
        assert_true(i >= 0);
        index_of[positions[entry]] = 0;
        const uint32_t id = lane->id[i];
        const dt_kv_span *span = &view.spans[entry / f->block_tokens];
        assert_int_equal(entry_numbers(f, span->block, entry % f->block_tokens, id, false), 0);
        assert_true((view.recent_mass != NULL) == dt_kv_layer_needs_mass(c->kv, layer));
        if (view.recent_mass != NULL) {
            assert_true(view.recent_mass[entry] == number_of(id, 300) && view.value_norm[entry] == number_of(id, 302));
        }
        const float bias = lane->biased[i] ? -number_of(id, 303) : 0.0f;
        assert_true(view.bias == NULL ? bias == 0 : view.bias[entry] == bias);
        assert_true(span->bias == (view.bias == NULL ? NULL : view.bias + entry / f->block_tokens * f->block_tokens));
    }
}

static void require_equal(const model_cache *c) {
    require_whole(c->kv);
    for (int32_t layer = 0; layer < N_LAYERS; layer++) {
        int32_t longest = 0, sum = 0;
        for (int32_t lane = 0; lane < params[layer].n_lanes; lane++) {
            require_equal_lane(c, layer, lane);
            longest = DT_MAX(longest, c->lanes[layer][lane].n);
            sum += c->lanes[layer][lane].n;
        }
        assert_int_equal(dt_kv_length(c->kv, layer), longest);
        assert_true(dt_kv_mean_length(c->kv, layer) == (double)sum / params[layer].n_lanes);
    }
}

/* ---- operations on both ---- */

static void model_cut(model_cache *c, int32_t position) {
    for (int32_t layer = 0; layer < N_LAYERS; layer++) {
        for (int32_t j = 0; j < params[layer].n_lanes; j++) {
            model_lane *lane = &c->lanes[layer][j];
            int32_t n = 0;
            for (int32_t i = 0; i < lane->n; i++) {
                if (lane->position[i] < position) {
                    lane->position[n] = lane->position[i];
                    lane->id[n] = lane->id[i];
                    lane->biased[n++] = lane->biased[i];
                }
            }
            lane->n = n;
        }
    }
    c->n_uncommitted = DT_MAX(0, c->n_uncommitted - DT_MAX(0, c->next - position));
    c->next = DT_MIN(c->next, position);
}

/* Writes the numbers of the n new entries, as attention's store and the fold of masses would. */
static void fill_new(model_cache *c, int32_t n) {
    for (int32_t layer = 0; layer < N_LAYERS; layer++) {
        const dt_kv_format *f = &params[layer].format;
        for (int32_t j = 0; j < params[layer].n_lanes; j++) {
            model_lane *lane = &c->lanes[layer][j];
            dt_kv_lane_view view;
            dt_kv_lane(c->kv, layer, j, &view);
            assert_int_equal(view.n_entries, lane->n + n);
            for (int32_t i = 0; i < n; i++) {
                const int32_t entry = lane->n + i;
                const uint32_t id = draw(1u << 30);
                entry_numbers(f, view.spans[entry / f->block_tokens].block, entry % f->block_tokens, id, true);
                if (view.recent_mass != NULL) {
                    assert_true(view.recent_mass[entry] == 0 && view.value_norm[entry] == 0);
                    view.recent_mass[entry] = number_of(id, 300);
                    view.value_norm[entry] = number_of(id, 302);
                }
                lane->position[entry] = c->next + i;
                lane->id[entry] = id;
                lane->biased[entry] = false;
            }
            lane->n += n;
        }
    }
    c->next += n;
    c->n_uncommitted += n;
}

static dt_status append(model_cache *c, int32_t n) {
    dt_error error;
    const dt_status status = dt_kv_append(c->kv, c->next, n, &error);
    if (status == DT_OK) {
        fill_new(c, n);
    }
    return status;
}

static void commit(model_cache *c, int32_t n_keep) {
    dt_kv_commit(c->kv, n_keep);
    model_cut(c, c->next - DT_MAX(0, c->n_uncommitted - DT_MAX(n_keep, 0)));
    c->n_uncommitted = 0;
}

static dt_status truncate_at(model_cache *c, int32_t position) {
    dt_error error;
    const dt_status status = dt_kv_truncate(c->kv, position, &error);
    if (status == DT_OK) {
        model_cut(c, position);
    }
    return status;
}

static void model_remove(model_lane *lane, int32_t position) {
    for (int32_t i = 0; i < lane->n; i++) {
        if (lane->position[i] == position) {
            lane->n--;
            memmove(&lane->position[i], &lane->position[i + 1], (size_t)(lane->n - i) * sizeof lane->position[0]);
            memmove(&lane->id[i], &lane->id[i + 1], (size_t)(lane->n - i) * sizeof lane->id[0]);
            memmove(&lane->biased[i], &lane->biased[i + 1], (size_t)(lane->n - i) * sizeof lane->biased[0]);
            return;
        }
    }
    fail_msg("position %d is not in the model", position);
}

/* Drops each committed entry of a random lane with a chance of one in `odds`; the newest committed one stays. */
static dt_status drop_some(model_cache *c, uint32_t odds) {
    const int32_t layer = (int32_t)draw(N_LAYERS), lane = (int32_t)draw((uint32_t)params[layer].n_lanes);
    int32_t positions[MAX_ENTRIES], victims[MAX_ENTRIES], n = 0;
    dt_kv_positions(c->kv, layer, lane, positions);
    const int32_t n_committed = c->lanes[layer][lane].n - c->n_uncommitted;
    for (int32_t i = 0; i < n_committed; i++) {
        if (positions[i] < c->next - c->n_uncommitted - 1 && draw(odds) == 0) {
            victims[n++] = i;
        }
    }
    dt_error error;
    const dt_status status = dt_kv_drop(c->kv, layer, lane, victims, n, &error);
    for (int32_t i = 0; i < n && status == DT_OK; i++) {
        model_remove(&c->lanes[layer][lane], positions[victims[i]]);
    }
    return status;
}

static dt_status set_bias(model_cache *c) {
    const int32_t layer = (int32_t)draw(N_LAYERS), lane_index = (int32_t)draw((uint32_t)params[layer].n_lanes);
    model_lane *lane = &c->lanes[layer][lane_index];
    if (lane->n == 0) {
        return DT_OK;
    }
    const int32_t entry = (int32_t)draw((uint32_t)lane->n);
    int32_t positions[MAX_ENTRIES];
    dt_kv_positions(c->kv, layer, lane_index, positions);
    int32_t i = 0;
    while (lane->position[i] != positions[entry]) {
        i++;
    }
    dt_error error;
    const dt_status status = dt_kv_set_bias(c->kv, layer, lane_index, entry, -number_of(lane->id[i], 303), &error);
    lane->biased[i] = lane->biased[i] || status == DT_OK;
    return status;
}

/* Into a free slot, if there is one. */
static dt_status fork_cache(const model_cache *c) {
    for (int32_t i = 0; i < MAX_CACHES; i++) {
        if (caches[i].kv == NULL) {
            dt_kv *fork = NULL;
            dt_error error;
            const dt_status status = dt_kv_fork(c->kv, &fork, &error);
            assert_true((status == DT_OK) == (fork != NULL));
            if (status == DT_OK) {
                caches[i] = *c;
                caches[i].kv = fork;
            }
            return status;
        }
    }
    return DT_OK;
}

static int32_t n_alive(void) {
    int32_t n = 0;
    for (int32_t i = 0; i < MAX_CACHES; i++) {
        n += caches[i].kv != NULL;
    }
    return n;
}

static dt_status random_step(model_cache *c) {
    const uint32_t what = draw(100);
    if (what < 40) {
        return c->lanes[1][0].n > MAX_ENTRIES / 2 || c->next > 60000 ? DT_OK : append(c, (int32_t)draw(draw(4) == 0 ? 60 : 4));
    }
    if (what < 55) {
        commit(c, (int32_t)draw(2) == 0 ? c->n_uncommitted : (int32_t)draw(20));
        return DT_OK;
    }
    if (what < 75) {
        return drop_some(c, 1 + draw(12));
    }
    if (what < 82) {
        const int32_t back = (int32_t)draw(draw(5) == 0 ? 400 : 10);
        return truncate_at(c, DT_MAX(0, c->next - back));
    }
    if (what < 88) {
        return set_bias(c);
    }
    if (what < 95) {
        return fork_cache(c);
    }
    if (what < 99 && n_alive() > 1) {
        dt_kv_free(c->kv);
        c->kv = NULL;
    } else if (what == 99) {
        dt_kv_clear(c->kv);
        model_cut(c, 0);
    }
    return DT_OK;
}

static void require_all_equal(void) {
    for (int32_t i = 0; i < MAX_CACHES; i++) {
        if (caches[i].kv != NULL) {
            require_equal(&caches[i]);
            if (n_alive() == 1) { /* nothing is shared any more */
                assert_int_equal(dt_kv_bytes(caches[i].kv), atomic_load(&memory.bytes));
            }
        }
    }
}

static void run_random(uint64_t first_seed, int32_t n_steps, bool failures) {
    seed = first_seed;
    dt_memory_init(&memory);
    set_up_params();
    memset(caches, 0, sizeof caches);
    dt_error error;
    require(dt_kv_new(&memory, params, N_LAYERS, &caches[0].kv, &error), &error);
    for (int32_t step = 0; step < n_steps; step++) {
        model_cache *c = &caches[draw(MAX_CACHES)];
        if (c->kv == NULL) {
            continue;
        }
        const bool may_fail = failures && draw(3) == 0;
        atomic_store(&memory.fail_after, may_fail ? (long long)draw(6) : -1);
        const dt_status status = random_step(c);
        atomic_store(&memory.fail_after, -1);
        if (status != DT_OK && !(may_fail && status == DT_ERR_MEMORY)) {
            fail_msg("seed %d, step %d: %s", (int)first_seed, (int)step, dt_status_name(status));
        }
        require_all_equal();
    }
    for (int32_t i = 0; i < MAX_CACHES; i++) {
        dt_kv_free(caches[i].kv);
    }
    assert_int_equal(atomic_load(&memory.bytes), 0);
}

static void test_random_operations(void **state) {
    (void)state;
    for (uint64_t i = 1; i <= 6; i++) {
        run_random(i, 600, false);
    }
}

static void test_random_operations_with_failing_allocations(void **state) {
    (void)state;
    for (uint64_t i = 101; i <= 106; i++) {
        run_random(i, 600, true);
    }
}

/* ---- single facts ---- */

static void begin(model_cache **c) {
    seed = 7;
    dt_memory_init(&memory);
    set_up_params();
    memset(caches, 0, sizeof caches);
    dt_error error;
    require(dt_kv_new(&memory, params, N_LAYERS, &caches[0].kv, &error), &error);
    *c = &caches[0];
}

static void finish(void) {
    for (int32_t i = 0; i < MAX_CACHES; i++) {
        dt_kv_free(caches[i].kv);
    }
    assert_int_equal(atomic_load(&memory.bytes), 0);
}

/* Runs `step` with 0, 1, 2... allocations allowed until it succeeds; before that nothing may change. */
static int32_t fail_until_success(model_cache *c, dt_status (*step)(model_cache *)) {
    for (int32_t allowed = 0;; allowed++) {
        assert_true(allowed < 1000);
        atomic_store(&memory.fail_after, allowed);
        const dt_status status = step(c);
        atomic_store(&memory.fail_after, -1);
        require_all_equal();
        if (status == DT_OK) {
            return allowed;
        }
        assert_int_equal(status, DT_ERR_MEMORY);
    }
}

static dt_status step_append_50(model_cache *c) { return append(c, 50); }
static dt_status step_append_1(model_cache *c) { return append(c, 1); }
static dt_status step_truncate_20(model_cache *c) { return truncate_at(c, 20); }
static dt_status step_drop_half(model_cache *c) {
    seed = 11; /* the same lane and victims in every try */
    return drop_some(c, 2);
}
static dt_status step_bias(model_cache *c) {
    seed = 12;
    return set_bias(c);
}

static void test_every_allocation_may_fail(void **state) {
    (void)state;
    model_cache *c;
    begin(&c);
    assert_true(fail_until_success(c, step_append_50) > 0);
    commit(c, 50);
    assert_true(fail_until_success(c, step_bias) > 0);
    assert_true(fail_until_success(c, step_append_1) >= 0);
    commit(c, 1);
    for (int32_t allowed = 0; caches[1].kv == NULL; allowed++) {
        atomic_store(&memory.fail_after, allowed);
        (void)fork_cache(c);
        atomic_store(&memory.fail_after, -1);
        require_all_equal();
    }
    assert_true(fail_until_success(c, step_drop_half) > 0); /* shared blocks have to be copied */
    assert_true(fail_until_success(&caches[1], step_append_1) > 0);
    commit(&caches[1], 1);
    assert_true(fail_until_success(&caches[1], step_truncate_20) >= 0);
    finish();
    dt_memory_init(&memory);
    for (int32_t allowed = 0;; allowed++) {
        dt_error error;
        atomic_store(&memory.fail_after, allowed);
        const dt_status status = dt_kv_new(&memory, params, N_LAYERS, &caches[0].kv, &error);
        assert_true((status == DT_OK) == (caches[0].kv != NULL));
        if (status == DT_OK) {
            break;
        }
        assert_int_equal(atomic_load(&memory.bytes), 0);
    }
    caches[1].kv = caches[2].kv = NULL;
    finish();
}

static void test_bytes_are_foretold(void **state) {
    (void)state;
    model_cache *c;
    begin(&c);
    dt_kv *evicting = c->kv;
    for (int32_t i = 0; i < N_LAYERS; i++) {
        params[i].budget = (dt_budget){0};
        params[i].keeps_origins = false;
    }
    dt_error error;
    require(dt_kv_new(&memory, params, N_LAYERS, &c->kv, &error), &error);
    const size_t other = dt_kv_bytes(evicting);
    for (int32_t n = 0; n < MAX_ENTRIES / 2;) {
        assert_int_equal(dt_kv_bytes(c->kv), dt_kv_bytes_for(c->kv, n));
        assert_int_equal(dt_kv_bytes(c->kv), dt_kv_bytes_for(evicting, n)); /* what evicting needs beside is none of it */
        assert_int_equal(dt_kv_bytes(c->kv) + other, atomic_load(&memory.bytes));
        const int32_t more = 1 + (int32_t)draw(9);
        assert_int_equal(append(c, more), DT_OK);
        commit(c, more);
        n += more;
    }
    dt_kv_free(evicting);
    const size_t empty = dt_kv_bytes_for(c->kv, 0);
    dt_kv_clear(c->kv);
    assert_int_equal(dt_kv_bytes(c->kv), empty);
    finish();
}

static void test_a_deep_cut_gives_memory_back(void **state) {
    (void)state;
    model_cache *c;
    begin(&c);
    assert_int_equal(append(c, 500), DT_OK);
    commit(c, 500);
    assert_int_equal(truncate_at(c, 10), DT_OK);
    const size_t spare = 64 + DT_MAX(params[0].format.block_bytes, params[2].format.block_bytes);
    const size_t scratch = 500 * sizeof(int32_t);
    assert_true(dt_kv_bytes(c->kv) <= dt_kv_bytes_for(c->kv, 10) + spare + scratch);
    require_all_equal();
    finish();
}

static void test_unchanged_blocks_stay_shared(void **state) {
    (void)state;
    model_cache *c;
    begin(&c);
    assert_int_equal(append(c, 96), DT_OK); /* whole blocks in every layer */
    commit(c, 96);
    const size_t before = atomic_load(&memory.bytes);
    assert_int_equal(fork_cache(c), DT_OK);
    const size_t fork_arrays = atomic_load(&memory.bytes) - before;
    assert_true(fork_arrays < before / 2);
    dt_kv_lane_view a, b;
    dt_kv_lane(caches[0].kv, 0, 0, &a);
    dt_kv_lane(caches[1].kv, 0, 0, &b);
    assert_ptr_equal(a.spans[0].block, b.spans[0].block);
    const int32_t victims[] = {20, 40};
    dt_error error;
    require(dt_kv_drop(caches[1].kv, 0, 0, victims, 2, &error), &error);
    model_remove(&caches[1].lanes[0][0], 20);
    model_remove(&caches[1].lanes[0][0], 40);
    require_all_equal();
    dt_kv_lane(caches[1].kv, 0, 0, &b);
    assert_ptr_equal(a.spans[0].block, b.spans[0].block);
    assert_ptr_not_equal(a.spans[1].block, b.spans[1].block);
    assert_ptr_not_equal(a.spans[2].block, b.spans[2].block);
    assert_ptr_equal(a.spans[3].block, b.spans[3].block);
    finish();
}

static void test_wrong_use_is_refused(void **state) {
    (void)state;
    model_cache *c;
    begin(&c);
    assert_int_equal(append(c, 20), DT_OK);
    commit(c, 17);
    dt_error error;
    assert_int_equal(dt_kv_append(c->kv, 18, 1, &error), DT_ERR_ARGUMENT);
    assert_string_equal(error.message, "tokens must be appended at position 17, the next one, not at 18");
    assert_int_equal(dt_kv_append(c->kv, 16, 1, &error), DT_ERR_ARGUMENT);
    assert_int_equal(dt_kv_append(c->kv, INT32_MAX, 1, &error), DT_ERR_LIMIT);
    assert_int_equal(dt_kv_append(c->kv, -1, 1, &error), DT_ERR_LIMIT);
    const int32_t descending[] = {5, 4}, twice[] = {3, 3}, outside[] = {17}, negative[] = {-1};
    assert_int_equal(dt_kv_drop(c->kv, 0, 0, descending, 2, &error), DT_ERR_ARGUMENT);
    assert_int_equal(dt_kv_drop(c->kv, 0, 0, twice, 2, &error), DT_ERR_ARGUMENT);
    assert_int_equal(dt_kv_drop(c->kv, 0, 0, outside, 1, &error), DT_ERR_ARGUMENT);
    assert_int_equal(dt_kv_drop(c->kv, 0, 0, negative, 1, &error), DT_ERR_ARGUMENT);
    assert_int_equal(append(c, 1), DT_OK);
    assert_int_equal(dt_kv_drop(c->kv, 0, 0, outside, 1, &error), DT_ERR_ARGUMENT); /* there, but not committed */
    const uint32_t nan_bits = 0x7FC00000u, infinity_bits = 0x7F800000u;
    float nan_value, infinity;
    memcpy(&nan_value, &nan_bits, sizeof nan_value);
    memcpy(&infinity, &infinity_bits, sizeof infinity);
    assert_int_equal(dt_kv_set_bias(c->kv, 0, 0, 0, nan_value, &error), DT_ERR_ARGUMENT);
    assert_int_equal(dt_kv_set_bias(c->kv, 0, 0, 0, infinity, &error), DT_ERR_ARGUMENT);
    assert_int_equal(dt_kv_set_bias(c->kv, 0, 0, 18, 1.0f, &error), DT_ERR_ARGUMENT);
    require_all_equal();
    dt_kv *none = NULL;
    dt_kv_layer_params bad = params[0];
    bad.format.block_tokens = 24;
    assert_int_equal(dt_kv_new(&memory, &bad, 1, &none, &error), DT_ERR_ARGUMENT);
    bad = params[0];
    bad.n_lanes = 0;
    assert_int_equal(dt_kv_new(&memory, &bad, 1, &none, &error), DT_ERR_ARGUMENT);
    assert_int_equal(dt_kv_new(&memory, params, 0, &none, &error), DT_ERR_ARGUMENT);
    assert_null(none);
    finish();
}

static void test_the_checker_sees_damage(void **state) {
    (void)state;
    model_cache *c;
    begin(&c);
    assert_int_equal(append(c, 40), DT_OK);
    commit(c, 38);
    assert_int_equal(append(c, 2), DT_OK);
    dt_error error;
    dt_kv_lane_view view;
    dt_kv_lane(c->kv, 0, 1, &view);
    int32_t *position = dt_kv_position(&params[0].format, view.spans[0].block);
    position[3] = 4;
    assert_int_equal(dt_kv_check(c->kv, &error), DT_ERR_INTERNAL);
    assert_string_equal(error.message, "KV cache, layer 0, KV head 1: position 4 is there twice");
    position[3] = 39;
    assert_int_equal(dt_kv_check(c->kv, &error), DT_ERR_INTERNAL);
    position[3] = 3;
    require_whole(c->kv);
    view.recent_mass[2] = -1;
    assert_int_equal(dt_kv_check(c->kv, &error), DT_ERR_INTERNAL);
    const uint32_t nan_bits = 0x7FC00000u;
    memcpy(&view.recent_mass[2], &nan_bits, sizeof nan_bits);
    assert_int_equal(dt_kv_check(c->kv, &error), DT_ERR_INTERNAL);
    view.recent_mass[2] = 0;
    require_whole(c->kv);
    finish();
}

static void test_positions_may_start_anywhere_in_an_empty_cache(void **state) {
    (void)state;
    model_cache *c;
    begin(&c);
    c->next = 1000;
    assert_int_equal(append(c, 5), DT_OK);
    commit(c, 0);
    assert_int_equal(append(c, 5), DT_OK);
    commit(c, 5);
    require_all_equal();
    assert_int_equal(truncate_at(c, 3), DT_OK);
    require_all_equal();
    assert_int_equal(append(c, 1), DT_OK);
    require_all_equal();
    finish();
}

/* ---- entries as floats ---- */

/* Every finite half and byte is among them, and runs that begin and end anywhere in groups and blocks. */
static void check_reading(dt_kv_type type, int32_t dim_k, int32_t dim_v) {
    enum { N = 1000 };
    dt_kv_layer_params layer = {.n_lanes = 1};
    dt_kv_format *f = &layer.format;
    dt_kv_format_init(f, type, type, dim_k, dim_v, 48);
    dt_memory_init(&memory);
    dt_kv *kv = NULL;
    dt_error error;
    require(dt_kv_new(&memory, &layer, 1, &kv, &error), &error);
    require(dt_kv_append(kv, 0, N, &error), &error);
    dt_kv_commit(kv, N);
    dt_kv_lane_view view;
    dt_kv_lane(kv, 0, 0, &view);
    float *keys = malloc((size_t)N * (size_t)dim_k * sizeof *keys), *values = malloc((size_t)N * (size_t)dim_v * sizeof *values);
    float *want_k = malloc((size_t)N * (size_t)dim_k * sizeof *keys), *want_v = malloc((size_t)N * (size_t)dim_v * sizeof *values);
    assert_true(keys != NULL && values != NULL && want_k != NULL && want_v != NULL);
    uint32_t at = 0;
    for (int32_t entry = 0; entry < N; entry++) {
        char *block = view.spans[entry / 48].block;
        const int32_t i = entry % 48;
        for (int32_t d = 0; d < dim_k + dim_v; d++, at++) {
            const bool is_key = d < dim_k;
            const size_t width = type == DT_KV_F16 ? 2 : 1;
            char *place = is_key ? block + dt_kv_key_offset(f, i, d)
                                 : block + f->v_offset + (size_t)i * dt_kv_value_row_bytes(f) + (size_t)(d - dim_k) * width;
            float *want = is_key ? &want_k[(size_t)entry * (size_t)dim_k + (size_t)d]
                                 : &want_v[(size_t)entry * (size_t)dim_v + (size_t)(d - dim_k)];
            if (type == DT_KV_F16) {
                const uint16_t half = (uint16_t)(at % 0x7C00u | (at / 0x7C00u % 2) << 15);
                memcpy(place, &half, sizeof half);
                *want = dt_f16_to_f32(half);
            } else {
                float *scale = is_key ? &dt_kv_k_scale(f, block)[i] : &dt_kv_v_scale(f, block)[i];
                *scale = number_of((uint32_t)entry, is_key) / 64;
                *place = (char)(uint8_t)(at % 256);
                *want = *scale * (is_key ? (float)((int32_t)(at % 256) - 128) : (float)(int8_t)(uint8_t)(at % 256));
            }
        }
    }
    for (int32_t first = 0; first < N; first += 1 + (int32_t)draw(40)) {
        const int32_t n = first == 0 ? N : 1 + (int32_t)draw((uint32_t)DT_MIN(N - first, 120));
        memset(keys, 0xFF, (size_t)n * (size_t)dim_k * sizeof *keys);
        memset(values, 0xFF, (size_t)n * (size_t)dim_v * sizeof *values);
        assert_true(dt_kv_get_entries(kv, 0, 0, first, n, keys, values));
        assert_memory_equal(keys, want_k + (size_t)first * (size_t)dim_k, (size_t)n * (size_t)dim_k * sizeof *keys);
        assert_memory_equal(values, want_v + (size_t)first * (size_t)dim_v, (size_t)n * (size_t)dim_v * sizeof *values);
    }
    free(keys);
    free(values);
    free(want_k);
    free(want_v);
    dt_kv_free(kv);
}

static void test_entries_are_read_as_they_lie(void **state) {
    (void)state;
    check_reading(DT_KV_F16, 64, 64);
    check_reading(DT_KV_F16, 5, 39);
    check_reading(DT_KV_INT8, 64, 48);
    check_reading(DT_KV_INT8, 7, 20);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_operations),
        cmocka_unit_test(test_random_operations_with_failing_allocations),
        cmocka_unit_test(test_every_allocation_may_fail),
        cmocka_unit_test(test_bytes_are_foretold),
        cmocka_unit_test(test_a_deep_cut_gives_memory_back),
        cmocka_unit_test(test_unchanged_blocks_stay_shared),
        cmocka_unit_test(test_wrong_use_is_refused),
        cmocka_unit_test(test_the_checker_sees_damage),
        cmocka_unit_test(test_positions_may_start_anywhere_in_an_empty_cache),
        cmocka_unit_test(test_entries_are_read_as_they_lie),
    };
    return cmocka_run_group_tests_name("kv", tests, NULL, NULL);
}
