/*
 * Memory slots: what an evicted token leaves behind. A lane's slots are a few entries that stand for all of its evicted tokens
 * and can still be attended to. Pure functions on plain arrays.
 *
 * An evicted token takes a free slot; when there is none, the two most alike become one. Merged entries i get weights w that sum to
 * 1, in proportion to the attention they got, and become
 *
 *   key = sum w k    value = sum w v    bias = sum w (b - log w)        (b: 0 for a token)
 *
 * That is Gibbs' inequality: for every query the logit of the merged entry is at most log sum exp of the logits it stands for, so
 * it never takes attention from others that its tokens would not have taken. It is exactly that, and so is the output, for the
 * query whose attention the weights are. Where no attention was observed weights go by the number of tokens, and the bias of equal
 * entries is the log of how many they are.
 *
 * D2O (Wan et al. 2024) and KVMerger (Wang et al. 2024) merge evicted tokens into kept ones and leave out the bias, so that n
 * tokens get the attention of one; docs/quality.md compares what was tried here.
 */
#ifndef DT_MEMORY_SLOTS_H
#define DT_MEMORY_SLOTS_H

#include "base/base.h"

/* One entry: a token on its way into the slots, or a slot. */
typedef struct dt_slot {
    float *key, *value; /* [dim_k] as it lies in the cache, rotated; [dim_v] */
    float bias;         /* added to its logit: at least 0, at most the log of the tokens it stands for */
    float mass;         /* attention it got (policy.h, recent_mass), summed over what it stands for; 0 = not observed */
    int32_t position;   /* of one of its tokens: the one attended to most */
    double weight;      /* dt_slots_add's own */
} dt_slot;

typedef struct dt_slots {
    int32_t n, capacity, dim_k, dim_v;
    dt_slot *slots; /* [capacity + 1]: the last is for the entry that is being added */
    float *cost;    /* [capacity + 1][capacity + 1] of merging two, symmetric */
} dt_slots;

/* Bytes of memory for the slots of one lane; capacity >= 1. */
size_t dt_slots_bytes(int32_t capacity, int32_t dim_k, int32_t dim_v);
/* memory: of dt_slots_bytes, 64-byte aligned, to outlive *slots. */
void dt_slots_init(dt_slots *slots, int32_t capacity, int32_t dim_k, int32_t dim_v, void *memory);
/* The entry to be added next, to be filled by the caller; then dt_slots_add takes it in. Finite numbers give finite slots. */
dt_slot *dt_slots_next(dt_slots *slots);
void dt_slots_add(dt_slots *slots);

#endif
