/*
 * What every part needs: errors as values, the log, counted memory, the clock.
 *
 * Invariant: nothing in the library allocates cache memory or scratch except through a dt_memory, so that the
 * byte counters equal what is allocated and a test can make any single allocation fail.
 */
#ifndef DT_BASE_H
#define DT_BASE_H

#include "deeptutor.h"

#include <stdarg.h>
#include <stdatomic.h>

#if defined(__GNUC__)
#define DT_PRINTF(a, b) __attribute__((format(printf, a, b)))
#else
#define DT_PRINTF(a, b)
#endif

/* Fills *error (may be NULL) and returns `code`. */
dt_status dt_fail(dt_error *error, dt_status code, const char *format, ...) DT_PRINTF(3, 4);
/* dt_fail for a failed allocation of `bytes` for `what`. */
dt_status dt_fail_memory(dt_error *error, size_t bytes, const char *what);
#ifdef __clang_analyzer__ /* sees one file at a time: it is to know that what failed did not return DT_OK */
#define dt_fail(error, code, ...) (dt_fail(error, code, __VA_ARGS__), (code))
#define dt_fail_memory(error, bytes, what) (dt_fail_memory(error, bytes, what), DT_ERR_MEMORY)
#endif
/* How public functions begin: true, with *error telling the function and its argument, where one of these pointers is NULL. */
#define DT_LACKS(error, ...)                                                                                                       \
    dt_lacks(error, __func__, #__VA_ARGS__, (const void *const[]){__VA_ARGS__},                                                    \
             sizeof((const void *const[]){__VA_ARGS__}) / sizeof(void *))
/* names: of the n pointers, with ", " between them. */
bool dt_lacks(dt_error *error, const char *function, const char *names, const void *const *pointers, size_t n);
/* vsnprintf for messages of one line: too long ones end in "...", at a whole UTF-8 character; control characters become spaces, line
 * ends behind it go. */
void dt_format_line(char *out, size_t capacity, const char *format, va_list arguments) DT_PRINTF(3, 0);

/* "12.3 MiB"; below 1 MiB "12.3 KiB", below 1 KiB "30 bytes". */
typedef struct dt_size {
    char text[24];
} dt_size;
dt_size dt_size_of(uint64_t bytes);

void dt_log(dt_log_level level, const char *format, ...) DT_PRINTF(2, 3);

/* Counted allocator. Thread-safe. */
typedef struct dt_memory {
    atomic_size_t bytes;      /* allocated now */
    atomic_size_t bytes_peak; /* at most so far */
    atomic_llong fail_after;  /* tests: allocations left before one fails (and all later ones); -1 = never */
    size_t limit;             /* `bytes` never exceeds it: an allocation that would fails; 0 = none. Set before first use */
    struct dt_memory *parent; /* counts the same bytes too, under its own limit; NULL = none. Set before first use */
} dt_memory;

void dt_memory_init(dt_memory *memory);
/* 64-byte aligned, not zeroed; NULL on failure. bytes > 0. */
void *dt_memory_alloc(dt_memory *memory, size_t bytes);
/* Zeroed. */
void *dt_memory_alloc_zero(dt_memory *memory, size_t bytes);
/* Like realloc: keeps the first min(old, new) bytes; on failure returns NULL and leaves `pointer` valid. */
void *dt_memory_grow(dt_memory *memory, void *pointer, size_t old_bytes, size_t new_bytes);
/* Counts memory that is allocated elsewhere, a device's; false, with nothing counted, where the limit forbids it. */
bool dt_memory_charge(dt_memory *memory, size_t bytes);
void dt_memory_discharge(dt_memory *memory, size_t bytes);
/* `bytes` must be what was allocated. NULL is accepted. */
void dt_memory_free(dt_memory *memory, void *pointer, size_t bytes);

/* The same for blocks of the cache, zeroed, where the system can in large pages (block_pool.c). To be freed with
 * dt_memory_free_block. */
void *dt_memory_alloc_block(dt_memory *memory, size_t bytes);
void dt_memory_free_block(dt_memory *memory, void *block, size_t bytes);
/* What these two rest on: not counted, not zeroed. 64-byte aligned; NULL on failure. */
void *dt_block_alloc(size_t bytes);
void dt_block_free(void *block, size_t bytes);

/* Monotonic microseconds. */
int64_t dt_clock_us(void);
int64_t dt_process_us(void); /* for how long the process's threads have run, all together */
/* Physical cores this process may run on (at least 1). */
int32_t dt_physical_cores(void);

/* Asks the system to back the whole pages of this memory, not yet written, with large ones: what is read from end to end for every
 * token is then read at up to twice the speed where memory is scattered. A wish: nothing depends on it. */
/* How many of n threads can be started, found by starting them beside `room` bytes of address space; where it is not all, half of
 * those, at least 1, for others may come to the limit too. For code that ends the process where one can't be. */
int32_t dt_startable_threads(int32_t n, size_t room);
void dt_use_large_pages(void *memory, size_t bytes);

/* IEEE half <-> float, round to nearest even, scalar. */
float dt_f16_to_f32(uint16_t half);
uint16_t dt_f32_to_f16(float value);
/* True when neither infinite nor NaN, by bit pattern (works under -ffast-math). */
bool dt_is_finite(float value);

#define DT_MIN(a, b) ((a) < (b) ? (a) : (b))
#define DT_MAX(a, b) ((a) > (b) ? (a) : (b))
#define DT_ROUND_UP(n, multiple) (((n) + (multiple)-1) / (multiple) * (multiple))

#endif
