/*
 * Memory slots. The algebra of policy/memory_slots.c against attention as the formula says it: merging equal entries changes
 * nothing, a slot is exact for the query whose attention it was weighed by and never takes too much for any other, masses are
 * conserved. And slots in the cache: rounds, budgets, bytes, forks and cuts, with the structure checked after every step.
 */
#include "support/cmocka_all.h"

#include "kv/kv.h"
#include "policy/memory_slots.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define DIM_K 6 /* one not a multiple of eight, */
#define DIM_V 9 /* the other with eight and a rest */
#define MOST 200

static uint64_t seed = 1;

static uint32_t draw(uint32_t below) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 33) % below;
}

static float number(void) { return (float)draw(4001) / 1000.0f - 2.0f; }

static void require(dt_status status, const dt_error *error) {
    if (status != DT_OK) {
        fail_msg("%s: %s", dt_status_name(status), error->message);
    }
}

static void require_close(double a, double b, double tolerance) {
    assert_true(dt_is_finite((float)a) && dt_is_finite((float)b));
    if (!(fabs(a - b) <= tolerance)) {
        fail_msg("%.9g is not %.9g", a, b);
    }
}

/* ---- the algebra -------------------------------------------------------------------------------- */

typedef struct entry {
    float key[DIM_K], value[DIM_V], bias, mass;
} entry;

typedef struct sums { /* what attention is made of */
    double log_mass, out[DIM_V];
} sums;

static sums attend(const entry *entries, int32_t n, const float *query) {
    sums s = {0};
    double logits[MOST], most = -INFINITY, total = 0;
    for (int32_t i = 0; i < n; i++) {
        logits[i] = (double)entries[i].bias;
        for (int32_t d = 0; d < DIM_K; d++) {
            logits[i] += (double)query[d] * (double)entries[i].key[d];
        }
        most = DT_MAX(most, logits[i]);
    }
    for (int32_t i = 0; i < n; i++) {
        const double p = exp(logits[i] - most);
        total += p;
        for (int32_t d = 0; d < DIM_V; d++) {
            s.out[d] += p * (double)entries[i].value[d];
        }
    }
    for (int32_t d = 0; d < DIM_V; d++) {
        s.out[d] /= total;
    }
    s.log_mass = most + log(total);
    return s;
}

/* Merges entries[n] into at most `capacity` and returns those in out; the number of them. */
static int32_t merged(const entry *entries, int32_t n, int32_t capacity, entry *out) {
    dt_slots slots;
    void *memory = aligned_alloc(64, dt_slots_bytes(capacity, DIM_K, DIM_V));
    dt_slots_init(&slots, capacity, DIM_K, DIM_V, memory);
    for (int32_t i = 0; i < n; i++) {
        dt_slot *next = dt_slots_next(&slots);
        memcpy(next->key, entries[i].key, sizeof entries[i].key);
        memcpy(next->value, entries[i].value, sizeof entries[i].value);
        next->bias = entries[i].bias;
        next->mass = entries[i].mass;
        next->position = i;
        dt_slots_add(&slots);
        assert_true(slots.n <= capacity);
    }
    bool seen[MOST] = {false};
    for (int32_t i = 0; i < slots.n; i++) {
        const dt_slot *slot = &slots.slots[i];
        out[i] = (entry){.bias = slot->bias, .mass = slot->mass};
        memcpy(out[i].key, slot->key, sizeof out[i].key);
        memcpy(out[i].value, slot->value, sizeof out[i].value);
        assert_true(slot->position >= 0 && slot->position < n && !seen[slot->position]);
        seen[slot->position] = true;
    }
    free(memory);
    return slots.n;
}

static void random_entries(entry *entries, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        entries[i] = (entry){0};
        for (int32_t d = 0; d < DIM_K; d++) {
            entries[i].key[d] = number();
        }
        for (int32_t d = 0; d < DIM_V; d++) {
            entries[i].value[d] = number();
        }
    }
}

static void random_query(float *query) {
    for (int32_t d = 0; d < DIM_K; d++) {
        query[d] = number();
    }
}

/* Every entry is there several times, observed or not: the output is that of all of them, the bias the log of how many they were.
 */
static void test_equal_entries_change_nothing(void **state) {
    (void)state;
    for (int32_t observed = 0; observed < 2; observed++) {
        entry kinds[4], all[MOST], out[4];
        int32_t count[4] = {0};
        random_entries(kinds, 4);
        for (int32_t i = 0; i < MOST; i++) {
            const uint32_t kind = i < 4 ? (uint32_t)i : draw(4);
            all[i] = kinds[kind];
            all[i].mass = observed ? 0.01f * (float)(kind + 1) : 0;
            count[kind]++;
        }
        assert_int_equal(merged(all, MOST, 4, out), 4);
        for (int32_t i = 0; i < 4; i++) {
            int32_t kind = 0;
            while (fabsf(out[i].key[0] - kinds[kind].key[0]) > 1e-4f) {
                assert_true(++kind < 4);
            }
            require_close((double)out[i].bias, log(count[kind]), 1e-3);
        }
        for (int32_t i = 0; i < 50; i++) {
            float query[DIM_K];
            random_query(query);
            const sums before = attend(all, MOST, query), after = attend(out, 4, query);
            require_close(after.log_mass, before.log_mass, 1e-3);
            for (int32_t d = 0; d < DIM_V; d++) {
                require_close(after.out[d], before.out[d], 1e-3);
            }
        }
    }
}

/* One slot for all, weighed by one query's attention: for this query nothing changes, and no query gives it too much. */
static void test_exact_for_its_query_and_never_too_much(void **state) {
    (void)state;
    for (int32_t round = 0; round < 20; round++) {
        entry all[MOST], out[1];
        float query[DIM_K];
        random_entries(all, MOST);
        random_query(query);
        const sums before = attend(all, MOST, query);
        for (int32_t i = 0; i < MOST; i++) {
            const sums alone = attend(&all[i], 1, query);
            all[i].mass = (float)exp(alone.log_mass - before.log_mass);
        }
        assert_int_equal(merged(all, MOST, 1, out), 1);
        const sums after = attend(out, 1, query);
        require_close(after.log_mass, before.log_mass, 1e-3);
        for (int32_t d = 0; d < DIM_V; d++) {
            require_close(after.out[d], before.out[d], 1e-3);
        }
        for (int32_t i = 0; i < 50; i++) {
            random_query(query);
            assert_true(attend(out, 1, query).log_mass <= attend(all, MOST, query).log_mass + 1e-3);
        }
    }
}

/* In any number of slots, merged in one go or with slots merged again: masses are conserved, tokens are not counted twice. */
static void test_masses_are_conserved(void **state) {
    (void)state;
    for (int32_t capacity = 1; capacity <= 20; capacity += 3) {
        entry all[MOST], some[2 * MOST], out[MOST], again[MOST];
        random_entries(all, MOST);
        double mass = 0;
        for (int32_t i = 0; i < MOST; i++) {
            all[i].mass = (float)draw(1000) / 1e5f;
            mass += (double)all[i].mass;
        }
        const int32_t half = merged(all, MOST / 2, capacity, some);
        memcpy(some + half, all + MOST / 2, MOST / 2 * sizeof *all);
        const int32_t n = merged(some, half + MOST / 2, capacity, out);
        double out_mass = 0, count = 0;
        for (int32_t i = 0; i < n; i++) {
            out_mass += (double)out[i].mass;
            count += exp((double)out[i].bias);
            assert_true(out[i].bias > -1e-4f);
        }
        require_close(out_mass, mass, 1e-4);
        assert_true(count <= MOST + 0.1);
        assert_int_equal(merged(some, half + MOST / 2, capacity, again), n);
        assert_memory_equal(again, out, (size_t)n * sizeof *out);
    }
}

/* Whatever finite numbers come, finite ones go. */
static void test_extremes_stay_finite(void **state) {
    (void)state;
    static const float odd[] = {0, 65504, -65504, 1e-7f, -0.0f}, masses[] = {0, 1e-38f, 1e-45f, 1e30f, 3.4e38f, 1};
    for (int32_t round = 0; round < 50; round++) {
        entry all[MOST], out[MOST];
        random_entries(all, MOST);
        for (int32_t i = 0; i < MOST; i++) {
            all[i].key[draw(DIM_K)] = odd[draw(5)];
            all[i].value[draw(DIM_V)] = odd[draw(5)];
            all[i].mass = i < 2 ? masses[draw(6)] : masses[draw(4)] / 1e3f;
            all[i].bias = draw(4) == 0 ? (float)draw(10) : 0;
        }
        const int32_t n = merged(all, MOST, 1 + (int32_t)draw(8), out);
        for (int32_t i = 0; i < n; i++) {
            assert_true(dt_is_finite(out[i].bias) && out[i].bias > -1e-3f);
            for (int32_t d = 0; d < DIM_K; d++) {
                assert_true(dt_is_finite(out[i].key[d]) && fabsf(out[i].key[d]) < 65520.0f); /* what a half still holds */
            }
            for (int32_t d = 0; d < DIM_V; d++) {
                assert_true(dt_is_finite(out[i].value[d]) && fabsf(out[i].value[d]) < 65520.0f);
            }
        }
    }
}

/* ---- in the cache ------------------------------------------------------------------------------- */

#define LAYERS 2
#define LANES 2
#define MAX_SIZE 40

static dt_memory memory;

static dt_kv *new_cache(dt_kv_type type, int32_t n_slots) {
    dt_kv_layer_params params[LAYERS] = {0};
    for (int32_t i = 0; i < LAYERS; i++) {
        params[i].n_lanes = LANES;
        params[i].budget = (dt_budget){.policy = i == 0 ? &dt_policy_importance_score : &dt_policy_local_window,
                                       .max_cache_size = MAX_SIZE,
                                       .min_cache_size = 10,
                                       .sink_tokens = 3,
                                       .recent_window = 8,
                                       .memory_slots = n_slots};
        dt_kv_format_init(&params[i].format, type, type, DIM_K, DIM_V, 16);
    }
    dt_memory_init(&memory);
    dt_kv *kv = NULL;
    dt_error error;
    require(dt_kv_new(&memory, params, LAYERS, &kv, &error), &error);
    return kv;
}

/* n tokens with random keys, values and attention. */
static void add(dt_kv *kv, int32_t *next, int32_t n) {
    dt_error error;
    require(dt_kv_append(kv, *next, n, &error), &error);
    for (int32_t layer = 0; layer < LAYERS; layer++) {
        for (int32_t lane = 0; lane < LANES; lane++) {
            dt_kv_fill_uncommitted(kv, layer, lane, *next, &seed);
        }
    }
    dt_kv_commit(kv, n);
    *next += n;
    for (int32_t layer = 0; layer < LAYERS; layer++) {
        for (int32_t lane = 0; lane < LANES; lane++) {
            dt_kv_lane_view view;
            dt_kv_lane(kv, layer, lane, &view);
            assert_non_null(view.recent_mass); /* also where the policy needs none */
            float mass[1024];
            for (int32_t i = 0; i < view.n_entries; i++) {
                mass[i] = (float)draw(1000) / 1000.0f;
            }
            dt_mass_fold(view.recent_mass, mass, view.n_entries, n);
        }
    }
    require(dt_kv_check(kv, &error), &error);
}

static void evict(dt_kv *kv, int32_t next) {
    dt_round_result result;
    dt_error error;
    require(dt_kv_round(kv, next, false, NULL, &result, &error), &error);
    require(dt_kv_check(kv, &error), &error);
}

static int32_t slots_of(const dt_kv *kv, int32_t layer, int32_t lane, int32_t *n_tokens) {
    dt_kv_lane_view view;
    dt_kv_lane(kv, layer, lane, &view);
    *n_tokens = view.n_entries - view.n_slots;
    return view.n_slots;
}

/* Budgets count tokens; slots come beside them, never more than asked for, and stay when tokens go. */
static void test_rounds_fill_slots(void **state) {
    (void)state;
    for (int type = DT_KV_F16; type <= DT_KV_INT8; type++) {
        for (int32_t n_slots = 1; n_slots <= 24; n_slots += 11) {
            dt_kv *kv = new_cache((dt_kv_type)type, n_slots);
            int32_t next = 0, longest[LAYERS];
            for (int32_t step = 0; step < 120; step++) {
                add(kv, &next, 1 + step % 3);
                evict(kv, next);
                for (int32_t lane = 0; lane < LAYERS * LANES; lane++) {
                    int32_t n_tokens;
                    const int32_t used = slots_of(kv, lane / LANES, lane % LANES, &n_tokens);
                    assert_true(n_tokens <= MAX_SIZE);
                    assert_int_equal(used, next <= MAX_SIZE ? 0 : DT_MIN(n_slots, next - n_tokens));
                }
            }
            for (int32_t i = 0; i < LAYERS; i++) {
                longest[i] = MAX_SIZE + 3 + n_slots;
            }
            dt_kv_layer_params params[LAYERS] = {*dt_kv_layer(kv, 0), *dt_kv_layer(kv, 1)};
            assert_true(atomic_load(&memory.bytes_peak) <= dt_kv_bytes_bound(params, LAYERS, longest, 0));
            assert_int_equal(dt_kv_bytes(kv), atomic_load(&memory.bytes));
            dt_kv_free(kv);
            assert_int_equal(atomic_load(&memory.bytes), 0);
        }
    }
}

/* Number d of the key or value of entry `index`. */
static double number_at(const dt_kv *kv, int32_t lane, dt_kv_column column, int32_t index, int32_t d) {
    const dt_kv_format *f = &dt_kv_layer(kv, lane / LANES)->format;
    char bytes[64];
    float scale = 1;
    uint16_t half;
    dt_kv_get_column(kv, lane / LANES, lane % LANES, column, index, 1, bytes);
    if (f->type_k == DT_KV_F16) {
        memcpy(&half, bytes + 2 * d, sizeof half);
        return (double)dt_f16_to_f32(half);
    }
    dt_kv_get_column(kv, lane / LANES, lane % LANES, column == DT_KV_KEYS ? DT_KV_K_SCALES : DT_KV_V_SCALES, index, 1, &scale);
    return (double)scale * (signed char)bytes[d];
}

/* Equal keys and values in a lane: what a query gets from the cache is the same before and after the round. */
static void test_a_round_over_equal_tokens_changes_nothing(void **state) {
    (void)state;
    for (int type = DT_KV_F16; type <= DT_KV_INT8; type++) {
        dt_kv *kv = new_cache((dt_kv_type)type, 4);
        const double tolerance = type == DT_KV_F16 ? 0 : 0.0051; /* half of a step */
        int32_t next = 0;
        add(kv, &next, 90);
        for (int32_t lane = 0; lane < LAYERS * LANES; lane++) {
            dt_kv_lane_view view;
            dt_kv_lane(kv, lane / LANES, lane % LANES, &view);
            const dt_kv_format *f = &dt_kv_layer(kv, 0)->format;
            for (int32_t c = DT_KV_POSITIONS + 1; c < DT_KV_N_COLUMNS; c++) { /* the first entry's, for all */
                const bool wanted = c == DT_KV_KEYS || c == DT_KV_VALUES || c == DT_KV_K_SCALES || c == DT_KV_V_SCALES;
                const size_t bytes = dt_kv_column_bytes(f, (dt_kv_column)c);
                char column[90 * 64];
                assert_true(bytes <= 64);
                if (wanted && bytes > 0) {
                    dt_kv_get_column(kv, lane / LANES, lane % LANES, (dt_kv_column)c, 0, 1, column);
                    for (size_t i = 1; i < 90; i++) {
                        memcpy(column + i * bytes, column, bytes);
                    }
                    assert_true(dt_kv_put_column(kv, lane / LANES, lane % LANES, (dt_kv_column)c, column, NULL));
                }
            }
            for (int32_t i = 0; i < 90; i++) {
                view.recent_mass[i] = 0.01f;
            }
        }
        evict(kv, next);
        for (int32_t lane = 0; lane < LAYERS * LANES; lane++) {
            dt_kv_lane_view view;
            dt_kv_lane(kv, lane / LANES, lane % LANES, &view);
            double count = 0;
            for (int32_t i = 0; i < view.n_entries; i++) {
                count += exp((double)view.bias[i]);
                for (int32_t d = 0; d < DIM_K; d++) { /* entry 0 is a sink, which nothing has touched */
                    require_close(number_at(kv, lane, DT_KV_KEYS, i, d), number_at(kv, lane, DT_KV_KEYS, 0, d), tolerance);
                }
                for (int32_t d = 0; d < DIM_V; d++) {
                    require_close(number_at(kv, lane, DT_KV_VALUES, i, d), number_at(kv, lane, DT_KV_VALUES, 0, d), tolerance);
                }
            }
            require_close(count, 90, 0.01); /* all keys alike: each token counts once, so attention is what it was */
        }
        dt_kv_free(kv);
    }
}

/* A fork's rounds leave the other side alone, also when memory runs out; other settings make fewer slots of many. */
static void test_forks(void **state) {
    (void)state;
    dt_kv *kv = new_cache(DT_KV_F16, 12), *fork = NULL;
    int32_t next = 0, n_tokens;
    dt_error error;
    add(kv, &next, 70);
    evict(kv, next);
    const size_t bytes = dt_kv_bytes(kv);
    float before[DIM_V * 200];
    dt_kv_get_column(kv, 0, 0, DT_KV_VALUES, 0, MAX_SIZE, before);
    for (int32_t refused = 0; refused < 6; refused++) {
        require(dt_kv_fork(kv, &fork, &error), &error);
        int32_t fork_next = next;
        add(fork, &fork_next, 30);
        dt_round_result result;
        atomic_store(&memory.fail_after, refused);
        const dt_status status = dt_kv_round(fork, fork_next, false, NULL, &result, &error);
        atomic_store(&memory.fail_after, -1);
        assert_true(status == DT_OK || status == DT_ERR_MEMORY);
        require(dt_kv_check(fork, &error), &error);
        dt_budget budgets[LAYERS] = {dt_kv_layer(kv, 0)->budget, dt_kv_layer(kv, 1)->budget};
        budgets[0].memory_slots = 5;
        budgets[1].memory_slots = 0;
        require(dt_kv_set_budgets(fork, budgets, 0, &error), &error);
        add(fork, &fork_next, 30);
        evict(fork, fork_next);
        assert_int_equal(slots_of(fork, 0, 1, &n_tokens), 5);
        assert_int_equal(slots_of(fork, 1, 1, &n_tokens), 0);
        dt_kv_free(fork);
        require(dt_kv_check(kv, &error), &error);
        assert_int_equal(dt_kv_bytes(kv), bytes);
        float after[DIM_V * 200];
        dt_kv_get_column(kv, 0, 0, DT_KV_VALUES, 0, MAX_SIZE, after);
        assert_memory_equal(before, after, (size_t)MAX_SIZE * DIM_V * 2);
    }
    /* a cut takes tokens back, and no slot */
    add(kv, &next, 5);
    require(dt_kv_truncate(kv, next - 5, &error), &error);
    require(dt_kv_check(kv, &error), &error);
    assert_int_equal(slots_of(kv, 0, 0, &n_tokens), 12);
    dt_kv_free(kv);
    assert_int_equal(atomic_load(&memory.bytes), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_equal_entries_change_nothing),
        cmocka_unit_test(test_exact_for_its_query_and_never_too_much),
        cmocka_unit_test(test_masses_are_conserved),
        cmocka_unit_test(test_extremes_stay_finite),
        cmocka_unit_test(test_rounds_fill_slots),
        cmocka_unit_test(test_a_round_over_equal_tokens_changes_nothing),
        cmocka_unit_test(test_forks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
