/*
 * The counted allocator: every byte of cache and scratch goes through here.
 *
 * Invariants: `bytes` equals what callers asked for and have not freed; `bytes_peak` is the highest value it ever had; a failed
 * allocation changes no counter, but may have moved the peak. With fail_after >= 0 a test makes one allocation, and all later ones,
 * fail.
 */
#include "base/base.h"

#include <stdlib.h>
#include <string.h>

#define DT_MEMORY_ALIGNMENT 64

void dt_memory_init(dt_memory *memory) {
    atomic_init(&memory->bytes, 0);
    atomic_init(&memory->bytes_peak, 0);
    atomic_init(&memory->fail_after, -1);
    memory->limit = 0;
    memory->parent = NULL;
}

static bool may_allocate(dt_memory *memory) {
    long long left = atomic_load(&memory->fail_after);
    while (left > 0) {
        if (atomic_compare_exchange_weak(&memory->fail_after, &left, left - 1)) {
            return true;
        }
    }
    return left < 0;
}

static void uncount(dt_memory *memory, size_t bytes) {
    for (; memory != NULL; memory = memory->parent) {
        atomic_fetch_sub(&memory->bytes, bytes);
    }
}

/* Counts the bytes before they are allocated, so that threads cannot exceed the limit together. */
static bool count(dt_memory *memory, size_t bytes) {
    size_t before = atomic_load(&memory->bytes);
    do {
        if (memory->limit > 0 && (before > memory->limit || bytes > memory->limit - before)) {
            return false;
        }
    } while (!atomic_compare_exchange_weak(&memory->bytes, &before, before + bytes));
    if (memory->parent != NULL && !count(memory->parent, bytes)) {
        atomic_fetch_sub(&memory->bytes, bytes);
        return false;
    }
    const size_t now = before + bytes;
    size_t peak = atomic_load(&memory->bytes_peak);
    while (now > peak && !atomic_compare_exchange_weak(&memory->bytes_peak, &peak, now)) {
    }
    return true;
}

void *dt_memory_alloc(dt_memory *memory, size_t bytes) {
    if (bytes > SIZE_MAX - DT_MEMORY_ALIGNMENT || !may_allocate(memory) || !count(memory, bytes)) {
        return NULL;
    }
    void *pointer = aligned_alloc(DT_MEMORY_ALIGNMENT, DT_ROUND_UP(bytes, (size_t)DT_MEMORY_ALIGNMENT));
    if (pointer == NULL) {
        uncount(memory, bytes);
    }
    return pointer;
}

void *dt_memory_alloc_zero(dt_memory *memory, size_t bytes) {
    void *pointer = dt_memory_alloc(memory, bytes);
    if (pointer != NULL) {
        memset(pointer, 0, bytes);
    }
    return pointer;
}

void *dt_memory_alloc_block(dt_memory *memory, size_t bytes) {
    if (bytes > SIZE_MAX - DT_MEMORY_ALIGNMENT || !may_allocate(memory) || !count(memory, bytes)) {
        return NULL;
    }
    void *block = dt_block_alloc(bytes);
    if (block == NULL) {
        uncount(memory, bytes);
        return NULL;
    }
    return memset(block, 0, bytes);
}

void dt_memory_free_block(dt_memory *memory, void *block, size_t bytes) {
    if (block != NULL) {
        uncount(memory, bytes);
        dt_block_free(block, bytes);
    }
}

void *dt_memory_grow(dt_memory *memory, void *pointer, size_t old_bytes, size_t new_bytes) {
    void *grown = dt_memory_alloc(memory, new_bytes);
    if (grown != NULL && pointer != NULL) {
        memcpy(grown, pointer, DT_MIN(old_bytes, new_bytes));
        dt_memory_free(memory, pointer, old_bytes);
    }
    return grown;
}

bool dt_memory_charge(dt_memory *memory, size_t bytes) { return may_allocate(memory) && count(memory, bytes); }

void dt_memory_discharge(dt_memory *memory, size_t bytes) { uncount(memory, bytes); }

void dt_memory_free(dt_memory *memory, void *pointer, size_t bytes) {
    if (pointer != NULL) {
        uncount(memory, bytes);
        free(pointer);
    }
}
