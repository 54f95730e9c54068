/*
 * A library to preload (LD_PRELOAD) into a program whose memory shall run out at a chosen moment: allocations and new threads are
 * counted from main on, and those after the first DT_FAIL_AFTER are refused, DT_FAIL_TIMES of them (0 = all).
 * With DT_FAIL_REPORT=FILE their number is written there at exit.
 *
 * For glibc: its allocator is also there under names that nobody overrides, so that no symbol has to be looked up while
 * memory is being handed out.
 */
#define _GNU_SOURCE /* RTLD_NEXT */
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t n, size_t bytes);
void *__libc_realloc(void *pointer, size_t bytes);
void *__libc_memalign(size_t alignment, size_t bytes);

typedef int (*main_fn)(int, char **, char **);
typedef int (*start_fn)(main_fn, int, char **, void (*)(void), void (*)(void), void (*)(void), void *);
typedef int (*thread_fn)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);

static atomic_long n_calls, n_granted = -1, n_refused_most;
static main_fn real_main;
static thread_fn real_thread_create;

static bool refused(void) {
    const long granted = atomic_load(&n_granted);
    if (granted < 0) { /* before main */
        return false;
    }
    const long call = atomic_fetch_add(&n_calls, 1), most = atomic_load(&n_refused_most);
    const bool refuse = call >= granted && (most == 0 || call < granted + most);
    if (refuse) {
        errno = ENOMEM;
    }
    return refuse;
}

void *malloc(size_t bytes) { return refused() ? NULL : __libc_malloc(bytes); }
void *calloc(size_t n, size_t bytes) { return refused() ? NULL : __libc_calloc(n, bytes); }
void *realloc(void *pointer, size_t bytes) { return refused() ? NULL : __libc_realloc(pointer, bytes); }
void *memalign(size_t alignment, size_t bytes) { return refused() ? NULL : __libc_memalign(alignment, bytes); }
void *aligned_alloc(size_t alignment, size_t bytes) { return refused() ? NULL : __libc_memalign(alignment, bytes); }

int posix_memalign(void **out, size_t alignment, size_t bytes) {
    *out = refused() ? NULL : __libc_memalign(alignment, bytes);
    return *out != NULL ? 0 : ENOMEM;
}

void *mmap(void *address, size_t bytes, int protection, int flags, int descriptor, off_t offset) {
    return refused() ? MAP_FAILED : (void *)syscall(SYS_mmap, address, bytes, protection, flags, descriptor, offset);
}

int pthread_create(pthread_t *out, const pthread_attr_t *attributes, void *(*start)(void *), void *argument) {
    return refused() ? EAGAIN : real_thread_create(out, attributes, start, argument);
}

static long number(const char *name, long missing) {
    const char *text = getenv(name);
    return text != NULL ? strtol(text, NULL, 10) : missing;
}

static void report(void) {
    const long n = atomic_load(&n_calls);
    const char *path = getenv("DT_FAIL_REPORT");
    atomic_store(&n_granted, -1);
    FILE *file = path != NULL ? fopen(path, "w") : NULL;
    if (file != NULL) {
        fprintf(file, "%ld\n", n);
        fclose(file);
    }
}

static int counted_main(int argc, char **argv, char **environment) {
    atexit(report);
    atomic_store(&n_refused_most, number("DT_FAIL_TIMES", 0));
    atomic_store(&n_granted, number("DT_FAIL_AFTER", 1L << 60));
    return real_main(argc, argv, environment);
}

int __libc_start_main(main_fn program, int argc, char **argv, void (*init)(void), void (*fini)(void), void (*linker_fini)(void),
                      void *stack_end) {
    real_main = program;
    real_thread_create = (thread_fn)dlsym(RTLD_NEXT, "pthread_create");
    const start_fn start = (start_fn)dlsym(RTLD_NEXT, "__libc_start_main");
    return start(counted_main, argc, argv, init, fini, linker_fini, stack_end);
}
