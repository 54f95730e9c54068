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
#include <stddef.h>
#include <stdint.h>

/* How many items of a range were given out. */
typedef struct dt_share {
    atomic_int taken;
    char rest[60];
} dt_share;

/* Before a barrier that the takers are behind. */
static inline void dt_share_reset(dt_share *share) { atomic_store_explicit(&share->taken, 0, memory_order_relaxed); }

/* Threads that take part in a piece of work: run calls work(user, ith, nth) on each, with the same nth and every ith below it, and
 * returns when all are through. */
typedef struct dt_workers {
    void (*run)(void *pool, void (*work)(void *user, int ith, int nth), void *user);
    void *pool;
    int32_t n_most; /* nth is never more */
} dt_workers;

/* workers: NULL = the calling thread alone. */
static inline void dt_workers_run(const dt_workers *workers, void (*work)(void *user, int ith, int nth), void *user) {
    if (workers != NULL) {
        workers->run(workers->pool, work, user);
    } else {
        work(user, 0, 1);
    }
}

#define DT_SHARE_RANGES 16 /* there are as many ranges as threads, up to this */

/* A thread's way through n items. */
typedef struct dt_share_walk {
    dt_share *shares; /* [DT_SHARE_RANGES] */
    int64_t n;
    int32_t ith, n_ranges, turn; /* turn: ranges that it is through with */
} dt_share_walk;

static inline dt_share_walk dt_share_begin(dt_share *shares, int64_t n, int32_t ith, int32_t nth) {
    return (dt_share_walk){shares, n, ith % DT_SHARE_RANGES, nth < DT_SHARE_RANGES ? nth : DT_SHARE_RANGES, 0};
}

/* The next item; n: none is left. Before it takes from another's range it looks whether there is something. */
static inline int64_t dt_share_next(dt_share_walk *w) {
    for (; w->turn < w->n_ranges; w->turn++) {
        const int32_t range = (w->ith + w->turn) % w->n_ranges;
        const int64_t first = w->n * range / w->n_ranges, end = w->n * (range + 1) / w->n_ranges;
        atomic_int *taken = &w->shares[range].taken;
        if (w->turn > 0 && first + atomic_load_explicit(taken, memory_order_relaxed) >= end) {
            continue;
        }
        const int64_t at = first + atomic_fetch_add_explicit(taken, 1, memory_order_relaxed);
        if (at < end) {
            return at;
        }
    }
    return w->n;
}

#endif
