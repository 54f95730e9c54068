/*
 * Merging evicted tokens into memory slots; memory_slots.h says what merging means.
 *
 * Which two: those whose merging moves keys and values least, by Ward's criterion, m_a m_b / (m_a + m_b) * (|key_a - key_b|^2 +
 * |value_a - value_b|^2), m being the attention they got. Keys are compared and averaged as rotated: a query's logits are dot
 * products with these, so distance and mean are in the terms that attention sees.
 * Invariants: the result depends on the entries and their order only; masses are conserved; the work per entry does not grow with
 * the number of entries before it.
 */
#include "policy/memory_slots.h"

#include <math.h>
#include <string.h>

#define ALIGNED(bytes) DT_ROUND_UP((bytes), (size_t)64)
/* What a token weighs at least: decides where no attention was observed, and keeps the sums of weights above 0. */
#define LEAST_MASS 1e-12

static size_t rows_bytes(int32_t capacity, int32_t dim) { return ALIGNED((size_t)(capacity + 1) * (size_t)dim * sizeof(float)); }
static size_t slots_bytes(int32_t capacity) { return ALIGNED((size_t)(capacity + 1) * sizeof(dt_slot)); }

size_t dt_slots_bytes(int32_t capacity, int32_t dim_k, int32_t dim_v) {
    return slots_bytes(capacity) + rows_bytes(capacity, dim_k) + rows_bytes(capacity, dim_v) + rows_bytes(capacity, capacity + 1);
}

void dt_slots_init(dt_slots *slots, int32_t capacity, int32_t dim_k, int32_t dim_v, void *memory) {
    char *at = memory;
    *slots = (dt_slots){.capacity = capacity, .dim_k = dim_k, .dim_v = dim_v, .slots = memory};
    float *keys = (float *)(at += slots_bytes(capacity));
    float *values = (float *)(at += rows_bytes(capacity, dim_k));
    slots->cost = (float *)(at + rows_bytes(capacity, dim_v));
    for (int32_t i = 0; i <= capacity; i++) {
        slots->slots[i] = (dt_slot){.key = keys + (size_t)i * (size_t)dim_k, .value = values + (size_t)i * (size_t)dim_v};
    }
}

dt_slot *dt_slots_next(dt_slots *slots) { return &slots->slots[slots->n]; }

/* Eight sums, so that the loop can run in a vector register. */
static float squared_distance(const float *a, const float *b, int32_t n) {
    float sums[8] = {0}, sum = 0;
    int32_t i = 0;
    for (; i + 8 <= n; i += 8) {
        for (int32_t j = 0; j < 8; j++) {
            sums[j] += (a[i + j] - b[i + j]) * (a[i + j] - b[i + j]);
        }
    }
    for (; i < n; i++) {
        sum += (a[i] - b[i]) * (a[i] - b[i]);
    }
    return sum + (((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7])));
}

static float *cost_at(const dt_slots *s, int32_t a, int32_t b) {
    return &s->cost[(size_t)a * (size_t)(s->capacity + 1) + (size_t)b];
}

static double weight_of(const dt_slot *slot) {
    return (slot->mass > 0 ? DT_MIN(slot->mass, 1e30f) : 0) + LEAST_MASS * exp((double)slot->bias);
}

/* Of merging the last slot with each other one. */
static void find_costs(const dt_slots *s) {
    const int32_t last = s->n - 1;
    const dt_slot *a = &s->slots[last];
    for (int32_t j = 0; j < last; j++) {
        const dt_slot *b = &s->slots[j];
        const float distance = squared_distance(a->key, b->key, s->dim_k) + squared_distance(a->value, b->value, s->dim_v);
        const double cost = a->weight * b->weight / (a->weight + b->weight) * (double)distance;
        *cost_at(s, last, j) = *cost_at(s, j, last) = (float)cost;
    }
}

/* Of merging a, which is about to take b in, with each other one: what Ward's criterion gives, without looking at keys again (Lance
 * and Williams 1967). */
static void combine_costs(const dt_slots *s, int32_t a, int32_t b) {
    const double w_a = s->slots[a].weight, w_b = s->slots[b].weight, between = (double)*cost_at(s, a, b);
    for (int32_t j = 0; j < s->n; j++) {
        if (j != a && j != b) {
            const double w = s->slots[j].weight;
            const double with_a = (w_a + w) * (double)*cost_at(s, a, j), with_b = (w_b + w) * (double)*cost_at(s, b, j);
            const double cost = (with_a + with_b - w * between) / (w_a + w_b + w);
            *cost_at(s, a, j) = *cost_at(s, j, a) = (float)DT_MAX(cost, 0.0);
        }
    }
}

static void mix(float *a, const float *b, int32_t n, float w_a, float w_b) {
    for (int32_t i = 0; i < n; i++) {
        a[i] = w_a * a[i] + w_b * b[i];
    }
}

/* What a part of a mixture adds to its bias. */
static double bias_share(double weight, float bias) { return weight > 0 ? weight * ((double)bias - log(weight)) : 0; }

/* a takes b in. */
static void merge(const dt_slots *s, dt_slot *a, const dt_slot *b) {
    const double w_a = a->weight / (a->weight + b->weight), w_b = b->weight / (a->weight + b->weight);
    mix(a->key, b->key, s->dim_k, (float)w_a, (float)w_b);
    mix(a->value, b->value, s->dim_v, (float)w_a, (float)w_b);
    a->bias = (float)(bias_share(w_a, a->bias) + bias_share(w_b, b->bias));
    a->position = w_b > w_a ? b->position : a->position;
    a->mass += b->mass;
    a->weight = weight_of(a);
}

/* The last slot moves to the place of slot i; the memory of their keys and values changes hands. */
static void fill_place(dt_slots *s, int32_t i) {
    const int32_t last = s->n - 1;
    const dt_slot old = s->slots[i];
    s->slots[i] = s->slots[last];
    s->slots[last].key = old.key;
    s->slots[last].value = old.value;
    for (int32_t j = 0; j < last; j++) {
        *cost_at(s, i, j) = *cost_at(s, j, i) = *cost_at(s, last, j);
    }
}

void dt_slots_add(dt_slots *slots) {
    slots->slots[slots->n].weight = weight_of(&slots->slots[slots->n]);
    slots->n++;
    find_costs(slots);
    if (slots->n <= slots->capacity) {
        return;
    }
    int32_t a = 0, b = 1;
    float least = *cost_at(slots, a, b);
    for (int32_t i = 0; i < slots->n; i++) {
        const float *costs = cost_at(slots, i, 0);
        for (int32_t j = i + 1; j < slots->n; j++) {
            if (costs[j] < least) {
                least = costs[j];
                a = i;
                b = j;
            }
        }
    }
    combine_costs(slots, a, b);
    merge(slots, &slots->slots[a], &slots->slots[b]);
    if (b < slots->n - 1) {
        fill_place(slots, b);
    }
    slots->n--;
}
