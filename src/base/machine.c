/*
 * What is asked of the machine: the time, how many cores are worth a thread, how many threads can be had, large pages.
 *
 * Two hyperthreads of a core share its vector units and gain nothing from a second thread, so cores are counted, not threads; and
 * only those this process may use: its affinity mask, and a container's CPU quota (threads beyond a quota are stopped by the
 * kernel in the middle of a barrier). Whatever cannot be read counts as no restriction.
 */
#define _GNU_SOURCE /* sched_getaffinity, CPU_SET, madvise */
#include "base/base.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <sched.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

static int64_t clock_of(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

int64_t dt_clock_us(void) { return clock_of(CLOCK_MONOTONIC); }
int64_t dt_process_us(void) { return clock_of(CLOCK_PROCESS_CPUTIME_ID); }

void dt_use_large_pages(void *memory, size_t bytes) {
#if defined(MADV_HUGEPAGE)
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t begin = DT_ROUND_UP((uintptr_t)memory, page), end = ((uintptr_t)memory + bytes) / page * page;
    if (begin < end) {
        madvise((void *)begin, end - begin, MADV_HUGEPAGE);
    }
#else
    (void)memory;
    (void)bytes;
#endif
}

#if defined(__linux__)

/* The lowest-numbered thread of `cpu`'s core names the core; `cpu` itself where the kernel does not tell. */
static size_t core_of(size_t cpu) {
    char path[96];
    size_t first = cpu;
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%zu/topology/thread_siblings_list", cpu);
    FILE *file = fopen(path, "r");
    if (file != NULL) {
        if (fscanf(file, "%zu", &first) != 1 || first >= CPU_SETSIZE) {
            first = cpu;
        }
        fclose(file);
    }
    return first;
}

static int32_t allowed_cores(void) {
    cpu_set_t allowed, cores;
    CPU_ZERO(&cores);
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) { /* more processors than cpu_set_t has room for */
        return (int32_t)sysconf(_SC_NPROCESSORS_ONLN);
    }
    for (size_t cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (CPU_ISSET(cpu, &allowed)) {
            CPU_SET(core_of(cpu), &cores);
        }
    }
    return (int32_t)CPU_COUNT(&cores);
}

/* Whole cores of the container's CPU quota (cgroup v2), or INT32_MAX. */
static int32_t quota_cores(void) {
    int32_t cores = INT32_MAX;
    FILE *file = fopen("/sys/fs/cgroup/cpu.max", "r");
    if (file != NULL) {
        long long quota, period;
        if (fscanf(file, "%lld %lld", &quota, &period) == 2 && quota > 0 && period > 0 && quota / period < INT32_MAX) {
            cores = (int32_t)(quota / period);
        }
        fclose(file);
    }
    return cores;
}

int32_t dt_physical_cores(void) {
    const int32_t cores = DT_MIN(allowed_cores(), quota_cores());
    return DT_MAX(cores, 1);
}

#elif defined(__APPLE__)

int32_t dt_physical_cores(void) {
    int32_t cores = 0;
    size_t size = sizeof cores;
    if (sysctlbyname("hw.perflevel0.physicalcpu", &cores, &size, NULL, 0) != 0 || cores < 1) { /* performance cores */
        size = sizeof cores;
        if (sysctlbyname("hw.physicalcpu", &cores, &size, NULL, 0) != 0) {
            cores = 1;
        }
    }
    return DT_MAX(cores, 1);
}

#else

int32_t dt_physical_cores(void) {
    const long processors = sysconf(_SC_NPROCESSORS_ONLN);
    return processors < 1 ? 1 : (int32_t)processors;
}

#endif

static void *wait_for(void *gate) {
    free(malloc(1)); /* malloc sets something up for each thread, as it will for the others */
    pthread_mutex_lock(gate);
    pthread_mutex_unlock(gate);
    return NULL;
}

int32_t dt_startable_threads(int32_t n, size_t room) {
    void *held = mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    pthread_t *threads = held != MAP_FAILED ? calloc((size_t)n, sizeof *threads) : NULL;
    int32_t started = 0;
    if (threads != NULL) {
        pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
        pthread_mutex_lock(&gate);
        while (started < n && pthread_create(&threads[started], NULL, wait_for, &gate) == 0) {
            started++;
        }
        pthread_mutex_unlock(&gate);
        for (int32_t i = 0; i < started; i++) {
            pthread_join(threads[i], NULL);
        }
    }
    free(threads);
    if (held != MAP_FAILED) {
        munmap(held, room);
    }
    /* at a limit: half, for others may come to it too */
    return started == n ? n : started > 3 ? started / 2 : 1;
}
