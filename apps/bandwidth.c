/*
 * Read bandwidth: every thread sums its own part of a buffer far larger than the caches, pass after pass; the best pass of all
 * threads together counts, since anything else that runs can only make it look slower. The buffer asks for large pages, as the
 * library does for weights.
 */
#define _GNU_SOURCE /* madvise */
#include "bandwidth.h"
#include "report.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PART_BYTES ((size_t)192 << 20)
#define PASSES 4
#define MAX_THREADS 256
#define LARGE_PAGE ((size_t)2 << 20)
#define STREAMS 8 /* independent sums, so that additions never wait for each other */

typedef struct reader {
    pthread_t thread;
    const uint64_t *part;
    uint64_t sum;
} reader;

static void *read_part(void *user) {
    reader *r = user;
    uint64_t sums[STREAMS] = {0};
    for (size_t i = 0; i < PART_BYTES / sizeof(uint64_t); i += STREAMS) {
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

double dt_read_bandwidth(int32_t n_threads) {
    const int32_t n = n_threads < 1 ? 1 : n_threads > MAX_THREADS ? MAX_THREADS : n_threads;
    reader readers[MAX_THREADS] = {0};
    bool ok = true;
    for (int32_t i = 0; i < n; i++) {
        uint64_t *part = aligned_alloc(LARGE_PAGE, PART_BYTES);
        ok = ok && part != NULL;
        if (part != NULL) {
#if defined(MADV_HUGEPAGE)
            madvise(part, PART_BYTES, MADV_HUGEPAGE);
#endif
            memset(part, i + 1, PART_BYTES); /* pages must exist */
        }
        readers[i].part = part;
    }
    double best = 0;
    for (int pass = 0; ok && pass < PASSES; pass++) {
        const double seconds = one_pass(readers, n);
        const double rate = seconds > 0 ? (double)n * (double)PART_BYTES / seconds : 0;
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
