/*
 * The rule of pace.h. Invariant: pure arithmetic on what it is told; 1 <= n_now <= n_most.
 */
#include "graph/pace.h"

#define WINDOW_US 50000 /* steps are looked at together for so long: a few of the kernel's time slices */
#define TRIAL_US 20000  /* a trial is over sooner, since it may be slow */
#define HOLD_US 500000  /* fewer threads for so long at first, twice as long after every trial that failed */
#define LONGEST_US 8000000
#define ALMOST 0.25 /* of a core: what interrupts and short-lived programs take */

void dt_pace_start(dt_pace *pace, int32_t n_most) { *pace = (dt_pace){.n_most = n_most, .n_now = n_most, .hold_us = HOLD_US}; }

static void forget_steps(dt_pace *pace) { pace->wall_us = pace->threads_us = pace->cpu_us = 0; }

int32_t dt_pace_threads(dt_pace *pace, int64_t now_us) {
    if (pace->n_now < pace->n_most && now_us >= pace->until_us) {
        pace->n_now = pace->n_most;
        pace->trial = true;
        forget_steps(pace);
    }
    return pace->n_now;
}

void dt_pace_took(dt_pace *pace, int32_t n, int64_t now_us, int64_t wall_us, int64_t cpu_us) {
    pace->wall_us += wall_us;
    pace->threads_us += wall_us * n;
    pace->cpu_us += DT_MIN(cpu_us, wall_us * n); /* other threads of the process may have run too */
    if (pace->wall_us < (pace->trial ? TRIAL_US : WINDOW_US)) {
        return;
    }
    const double asked = (double)pace->threads_us / (double)pace->wall_us, got = (double)pace->cpu_us / (double)pace->wall_us;
    if (got + ALMOST < asked && pace->n_now > 1) {
        pace->hold_us = pace->trial ? DT_MIN(2 * pace->hold_us, LONGEST_US) : pace->hold_us;
        pace->n_now = DT_MIN(pace->n_now, DT_MAX(1, (int32_t)(got + ALMOST)));
        pace->until_us = now_us + pace->hold_us;
    } else if (pace->n_now == pace->n_most) {
        pace->hold_us = HOLD_US;
    }
    pace->trial = false;
    forget_steps(pace);
}
