/*
 * Sharing out work between threads: each has a range of items of its own, takes them one after the other, and then helps with what
 * is left of the others'. Cores differ in speed, and in what else they have to do.
 *
 * Invariant: a counter is a cache line of its own, so that what a thread takes from its range costs nothing of another's while that
 * has work; two threads that count in one line wait for it to travel between them each time, as long as reading kilobytes.
 */
#ifndef DT_BASE_SHARE_H
#define DT_BASE_SHARE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* How many items of a range were given out. */
typedef struct dt_share {
    atomic_int taken;
    char rest[60];
} dt_share;

/* Before a barrier that the takers are behind. */
static inline void dt_share_reset(dt_share *share) { atomic_store_explicit(&share->taken, 0, memory_order_relaxed); }

/* The next item of a range of n; n or more: none is left. own: the caller's range; of others' it first looks whether there is one. */
static inline int32_t dt_share_take(dt_share *share, int32_t n, bool own) {
    if (!own && atomic_load_explicit(&share->taken, memory_order_relaxed) >= n) {
        return n;
    }
    return atomic_fetch_add_explicit(&share->taken, 1, memory_order_relaxed);
}

#endif
