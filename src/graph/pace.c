/*
 * The rule of pace.h. Invariant: pure arithmetic on what it is told; 1 <= n_now <= n_most.
 */
#include "graph/pace.h"

#define WINDOW_US 80000     /* steps are looked at together for so long: many of the kernel's ticks */
#define LONGEST_GAP_US 5000 /* between two of them: what else the program did is not counted */
#define SHORT_WINDOWS 3     /* so many in a row mean that cores are missing: threads that woke may share one for a while */
#define SHORT_TRIALS 2
#define HOLD_US 500000 /* fewer threads for so long at first, twice as long after every trial that failed */
#define LONGEST_US 8000000

void dt_pace_start(dt_pace *pace, int32_t n_most) { *pace = (dt_pace){.n_most = n_most, .n_now = n_most, .hold_us = HOLD_US}; }

int32_t dt_pace_threads(dt_pace *pace, int64_t now_us) {
    if (pace->n_now < pace->n_most && now_us >= pace->until_us) {
        pace->n_now = pace->n_most;
        pace->trial = true;
        pace->is_open = false;
        pace->n_short = 0;
    }
    return pace->n_now;
}

static void open_window(dt_pace *pace, int64_t now_us, int64_t cpu_us) {
    pace->is_open = true;
    pace->from_us = now_us;
    pace->from_cpu_us = cpu_us;
    pace->threads_us = 0;
}

/* Cores that may be missing without anybody having taken them: the kernel counts the time of a thread that runs elsewhere at its ticks
 * only, up to 10 ms apart, and interrupts and short-lived programs take some. */
static double tolerance(int32_t n) { return 0.25 + 0.02 * n; }

void dt_pace_took(dt_pace *pace, int32_t n, int64_t began_us, int64_t ended_us, int64_t cpu_us) {
    const bool follows = pace->is_open && began_us - pace->last_us <= LONGEST_GAP_US;
    pace->last_us = ended_us;
    if (!follows) {
        open_window(pace, ended_us, cpu_us);
        return;
    }
    pace->threads_us += (ended_us - began_us) * n;
    const int64_t wall_us = ended_us - pace->from_us;
    if (wall_us < WINDOW_US) {
        return;
    }
    const double asked = (double)pace->threads_us / (double)wall_us, got = (double)(cpu_us - pace->from_cpu_us) / (double)wall_us;
    pace->n_short = pace->n_now > 1 && got + tolerance(pace->n_now) < asked ? pace->n_short + 1 : 0;
    open_window(pace, ended_us, cpu_us);
    if (pace->n_short == (pace->trial ? SHORT_TRIALS : SHORT_WINDOWS)) {
        pace->hold_us = pace->trial ? DT_MIN(2 * pace->hold_us, LONGEST_US) : pace->hold_us;
        pace->n_now = DT_MIN(pace->n_now - 1, DT_MAX(1, (int32_t)(got + tolerance(pace->n_now))));
        pace->until_us = ended_us + pace->hold_us;
        pace->n_short = 0;
        pace->trial = false;
    } else if (pace->n_short == 0) {
        pace->hold_us = pace->n_now == pace->n_most ? HOLD_US : pace->hold_us;
        pace->trial = false;
    }
}
