/*
 * A library to preload (LD_PRELOAD) into a program whose time of day shall be set anew all the time: each look at it is hours before or
 * behind the last. The monotonic clock stays as it is, and what depends on nothing else notices nothing.
 */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static atomic_uint n_looks;

static long step(void) { return (long)(atomic_fetch_add(&n_looks, 1) * 2654435761u % 200000u) - 100000; }

int clock_gettime(clockid_t clock, struct timespec *out) {
    const int result = (int)syscall(SYS_clock_gettime, clock, out);
    if (result == 0 && clock == CLOCK_REALTIME) {
        out->tv_sec += step();
    }
    return result;
}

int gettimeofday(struct timeval *restrict out, void *restrict zone) {
    const int result = (int)syscall(SYS_gettimeofday, out, zone);
    out->tv_sec += step();
    return result;
}

time_t time(time_t *out) {
    struct timeval now;
    gettimeofday(&now, NULL);
    if (out != NULL) {
        *out = now.tv_sec;
    }
    return now.tv_sec;
}
