/*
 * Read bandwidth: every thread sums its own part of a buffer, pass after pass; the best pass of all threads together counts, since
 * anything else that runs can only make it look slower. The buffer is as large as what is to be compared with it: caches of hundreds of
 * megabytes exist, from which a small model is read faster than memory allows. It asks for large pages, as the library does for
 * weights.
 */
#define _GNU_SOURCE /* madvise */
#include "bandwidth.h"
#include "report.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define LEAST_BYTES ((size_t)64 << 20) /* that a pass takes far longer than starting its threads */
#define MOST_BYTES ((size_t)1 << 30)   /* beyond all caches */
#define PASSES 8
#define MAX_THREADS 256
#define LARGE_PAGE ((size_t)2 << 20)
#define STREAMS 8  /* independent sums, so that additions never wait for each other; of a cache line together */
#define AHEAD 2048 /* numbers; so far ahead one core has as many lines under way as it can, a third more than without */

typedef struct reader {
    pthread_t thread;
    const uint64_t *part;
    size_t n_bytes;
    uint64_t sum;
} reader;

static void *read_part(void *user) {
    reader *r = user;
    uint64_t sums[STREAMS] = {0};
    for (size_t i = 0; i < r->n_bytes / sizeof(uint64_t); i += STREAMS) {
        __builtin_prefetch((const void *)((uintptr_t)&r->part[i] + AHEAD * sizeof(uint64_t)));
        for (size_t s = 0; s < STREAMS; s++) {
            sums[s] += r->part[i + s];
        }
    }
    for (size_t s = 0; s < STREAMS; s++) {
        r->sum += sums[s];
    }
    return NULL;
}

/* Seconds of one pass, or 0 when a thread could not be started. */
static double one_pass(reader *readers, int32_t n) {
    const double start = dt_seconds_now();
    int32_t started = 0;
    while (started < n && pthread_create(&readers[started].thread, NULL, read_part, &readers[started]) == 0) {
        started++;
    }
    for (int32_t i = 0; i < started; i++) {
        pthread_join(readers[i].thread, NULL);
    }
    return started == n ? dt_seconds_now() - start : 0;
}

double dt_read_bandwidth(int32_t n_threads, uint64_t n_bytes) {
    const int32_t n = n_threads < 1 ? 1 : n_threads > MAX_THREADS ? MAX_THREADS : n_threads;
    const size_t all = n_bytes < LEAST_BYTES ? LEAST_BYTES : n_bytes > MOST_BYTES ? MOST_BYTES : (size_t)n_bytes;
    const size_t part_bytes = (all / (size_t)n + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE;
    reader readers[MAX_THREADS] = {0};
    bool ok = true;
    for (int32_t i = 0; i < n; i++) {
        uint64_t *part = aligned_alloc(LARGE_PAGE, part_bytes);
        ok = ok && part != NULL;
        if (part != NULL) {
#if defined(MADV_HUGEPAGE)
            madvise(part, part_bytes, MADV_HUGEPAGE);
#endif
            memset(part, i + 1, part_bytes); /* pages must exist */
        }
        readers[i].part = part;
        readers[i].n_bytes = part_bytes;
    }
    double best = 0;
    for (int pass = 0; ok && pass < PASSES; pass++) {
        const double seconds = one_pass(readers, n);
        const double rate = seconds > 0 ? (double)n * (double)part_bytes / seconds : 0;
        best = rate > best ? rate : best;
    }
    volatile uint64_t keep = 0; /* the sums must be computed */
    for (int32_t i = 0; i < n; i++) {
        keep += readers[i].sum;
        free((void *)readers[i].part);
    }
    (void)keep;
    return best;
}
