/*
 * How many threads compute while other programs want the processor too.
 *
 * Threads meet after every operation, hundreds of times a token. One that isn't running holds all others up until the kernel gives it
 * a core again, milliseconds later: with a core too few, two threads are several times slower than one. So a graph takes as many
 * threads as it got cores, and tries again from time to time whether there are more.
 *
 * Invariant: what is computed doesn't depend on it, because no result depends on the number of threads.
 */
#ifndef DT_PACE_H
#define DT_PACE_H

#include "base/base.h"

typedef struct dt_pace {
    int32_t n_most, n_now;        /* threads: asked for by the user, taken now */
    bool trial;                   /* all are being tried again */
    int32_t n_short;              /* windows in a row, the last ones, in which cores were missing */
    bool is_open;                 /* the window in which steps are looked at together, */
    int64_t from_us, from_cpu_us; /* the clocks at its beginning, */
    int64_t threads_us, last_us;  /* the time of its steps x their threads, and when the last of all steps ended */
    int64_t until_us, hold_us;    /* n_now < n_most: until then; for so long */
} dt_pace;

void dt_pace_start(dt_pace *pace, int32_t n_most);
/* Threads for a step that begins at now_us, at most. */
int32_t dt_pace_threads(dt_pace *pace, int64_t now_us);
/* A step with n threads has ended. cpu_us: for how long the process's threads had run by then, since it was started: differences over
 * single steps say little (tolerance in pace.c). */
void dt_pace_took(dt_pace *pace, int32_t n, int64_t began_us, int64_t ended_us, int64_t cpu_us);

#endif
