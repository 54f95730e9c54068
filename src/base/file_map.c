/*
 * See file_map.h.
 *
 * The handler may run at any instruction of any thread, so it takes no lock: mappings are a list whose entries are never freed, only
 * used again, and whose numbers are atomic. Invariant: an entry's range is empty unless that range is mapped by us.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* MAP_ANONYMOUS */
#endif
#include "base/file_map.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct dt_file_map {
    atomic_uintptr_t begin, end; /* whole pages; end 0: not in use */
    atomic_bool broken;
    size_t n_bytes;
    dt_file_map *next; /* never changes */
};

static _Atomic(dt_file_map *) first;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of those who add and remove */
static struct sigaction before;
static uintptr_t page_bytes;
static atomic_int n_passing;

/* The fault was not ours: what was there before decides. Where that one passes on to us again, the circle ends here. */
static void pass_on(int number, siginfo_t *info, void *context) {
    if (atomic_fetch_add(&n_passing, 1) > 32) {
        signal(number, SIG_DFL);
    } else if ((before.sa_flags & SA_SIGINFO) != 0) {
        before.sa_sigaction(number, info, context);
    } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
        before.sa_handler(number);
    } else {
        signal(number, SIG_DFL); /* the same instruction faults again, and that is the end */
    }
    atomic_fetch_sub(&n_passing, 1);
}

static void on_fault(int number, siginfo_t *info, void *context) {
    const int saved_errno = errno;
    const uintptr_t address = (uintptr_t)info->si_addr;
    for (dt_file_map *map = atomic_load(&first); map != NULL; map = map->next) {
        const uintptr_t end = atomic_load(&map->end);
        if (address < atomic_load(&map->begin) || address >= end) {
            continue;
        }
        const uintptr_t page = address / page_bytes * page_bytes;
        if (mmap((void *)page, end - page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED) {
            break;
        }
        atomic_store(&map->broken, true);
        errno = saved_errno;
        return;
    }
    pass_on(number, info, context);
    errno = saved_errno;
}

/* With the lock held. Again where somebody else has taken the signal since. */
static void install(void) {
    struct sigaction now;
    page_bytes = page_bytes > 0 ? page_bytes : (uintptr_t)sysconf(_SC_PAGESIZE);
    if (sigaction(SIGBUS, NULL, &now) == 0 && !((now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == on_fault)) {
        struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK};
        sigemptyset(&action.sa_mask);
        before = now;
        sigaction(SIGBUS, &action, NULL);
    }
}

/* An entry that nobody uses; the lock is held. */
static dt_file_map *find_free(void) {
    dt_file_map *map = atomic_load(&first);
    while (map != NULL && atomic_load(&map->end) != 0) {
        map = map->next;
    }
    return map;
}

dt_file_map *dt_file_map_open(int descriptor, size_t n_bytes) {
    void *bytes = mmap(NULL, n_bytes, PROT_READ, MAP_PRIVATE, descriptor, 0);
    if (bytes == MAP_FAILED) {
        return NULL;
    }
    pthread_mutex_lock(&lock);
    install();
    dt_file_map *map = find_free();
    const bool is_new = map == NULL;
    map = is_new ? calloc(1, sizeof *map) : map;
    if (map != NULL) {
        map->n_bytes = n_bytes;
        atomic_store(&map->broken, false);
        atomic_store(&map->begin, (uintptr_t)bytes);
        atomic_store(&map->end, ((uintptr_t)bytes + n_bytes + page_bytes - 1) / page_bytes * page_bytes);
    }
    if (map != NULL && is_new) {
        map->next = atomic_load(&first);
        atomic_store(&first, map);
    }
    pthread_mutex_unlock(&lock);
    if (map == NULL) {
        munmap(bytes, n_bytes);
        errno = ENOMEM;
    }
    return map;
}

void dt_file_map_close(dt_file_map *map) {
    if (map != NULL) {
        pthread_mutex_lock(&lock);
        void *bytes = (void *)atomic_load(&map->begin);
        const size_t n_bytes = map->n_bytes;
        atomic_store(&map->begin, UINTPTR_MAX); /* the range is empty */
        munmap(bytes, n_bytes);
        atomic_store(&map->end, 0); /* last: from here on somebody else may have the entry */
        pthread_mutex_unlock(&lock);
    }
}

const unsigned char *dt_file_map_bytes(const dt_file_map *map) { return (const unsigned char *)atomic_load(&map->begin); }

bool dt_file_map_broken(const dt_file_map *map) { return atomic_load(&map->broken); }
