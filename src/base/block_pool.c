/*
 * Blocks of the KV cache in large pages. Attention reads all of them for every token, and where they are scattered over small pages
 * looking up addresses takes up to a third of that time.
 *
 * Blocks of one size share slabs, which the system may back with large pages; a slab without blocks goes back to it. Shared by the
 * process and guarded by one lock: blocks come and go seldom.
 *
 * Invariants: a block belongs to the slab that its address, rounded down, begins; the lowest free place is taken first, so that
 * what is resident stays dense; a slab's places are a bit each in `taken`. With the address sanitizer, and where there are no large
 * pages to ask for, blocks are the allocator's, and so are small ones, of which tests have many.
 */
#define _GNU_SOURCE /* MAP_ANONYMOUS, madvise */
#include "base/base.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

#define SLAB_BYTES ((size_t)8 << 20) /* several large pages, so that little is left over at the end of a slab */
#define SMALLEST ((size_t)16 << 10)
#define MAX_PLACES (SLAB_BYTES / SMALLEST)

#if defined(MADV_HUGEPAGE) && !defined(__SANITIZE_ADDRESS__)

typedef struct slab {
    _Alignas(64) struct slab *next;
    size_t block_bytes; /* a multiple of 64 */
    int32_t n_places, n_taken;
    uint64_t taken[MAX_PLACES / 64];
} slab;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static slab *slabs;

static bool is_pooled(size_t bytes) { return bytes >= SMALLEST && bytes <= SLAB_BYTES / 4; }

/* A slab's worth of zeros at a multiple of its size. */
static slab *slab_new(size_t block_bytes) {
    char *memory = mmap(NULL, 2 * SLAB_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        return NULL;
    }
    char *begin = (char *)DT_ROUND_UP((uintptr_t)memory, SLAB_BYTES), *end = begin + SLAB_BYTES;
    if (begin > memory) {
        munmap(memory, (size_t)(begin - memory));
    }
    if (end < memory + 2 * SLAB_BYTES) {
        munmap(end, (size_t)(memory + 2 * SLAB_BYTES - end));
    }
    dt_use_large_pages(begin, SLAB_BYTES);
    slab *s = (slab *)(void *)begin;
    s->block_bytes = block_bytes;
    s->n_places = (int32_t)((SLAB_BYTES - sizeof *s) / block_bytes);
    return s;
}

static void *take_place(slab *s) {
    int32_t i = 0;
    while ((s->taken[i / 64] >> (i % 64) & 1) != 0) {
        i++;
    }
    s->taken[i / 64] |= (uint64_t)1 << (i % 64);
    s->n_taken++;
    return (char *)s + sizeof *s + (size_t)i * s->block_bytes;
}

static void *pool_alloc(size_t bytes) {
    const size_t block_bytes = DT_ROUND_UP(bytes, (size_t)64);
    pthread_mutex_lock(&lock);
    slab **at = &slabs;
    while (*at != NULL && ((*at)->block_bytes != block_bytes || (*at)->n_taken == (*at)->n_places)) {
        at = &(*at)->next;
    }
    if (*at == NULL) { /* at the end: older ones are filled first */
        *at = slab_new(block_bytes);
    }
    void *block = *at != NULL ? take_place(*at) : NULL;
    pthread_mutex_unlock(&lock);
    return block;
}

static void pool_free(void *block) {
    slab *s = (slab *)((uintptr_t)block / SLAB_BYTES * SLAB_BYTES);
    pthread_mutex_lock(&lock);
    const size_t i = ((uintptr_t)block - (uintptr_t)s - sizeof *s) / s->block_bytes;
    s->taken[i / 64] &= ~((uint64_t)1 << (i % 64));
    if (--s->n_taken == 0) {
        slab **at = &slabs;
        while (*at != s) {
            at = &(*at)->next;
        }
        *at = s->next;
        munmap(s, SLAB_BYTES);
    }
    pthread_mutex_unlock(&lock);
}

#else

static bool is_pooled(size_t bytes) {
    (void)bytes;
    return false;
}
static void *pool_alloc(size_t bytes) { return malloc(bytes); }
static void pool_free(void *block) { free(block); }

#endif

void *dt_block_alloc(size_t bytes) {
    return is_pooled(bytes) ? pool_alloc(bytes) : aligned_alloc(64, DT_ROUND_UP(bytes, (size_t)64));
}

void dt_block_free(void *block, size_t bytes) {
    if (is_pooled(bytes)) {
        pool_free(block);
    } else {
        free(block);
    }
}
