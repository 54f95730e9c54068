/*
 * XXH64 (Collet, the specification of xxHash 0.1.1): a fast check of integrity, several gigabytes a second. It finds accidents,
 * not forgeries. Bytes may come in any pieces; the result is that of all of them in one.
 */
#ifndef DT_BASE_HASH_H
#define DT_BASE_HASH_H

#include <stddef.h>
#include <stdint.h>

typedef struct dt_hash {
    uint64_t lanes[4];
    uint64_t n_bytes;
    unsigned char rest[32]; /* the last n_bytes % 32 of them */
} dt_hash;

void dt_hash_begin(dt_hash *hash);
void dt_hash_add(dt_hash *hash, const void *bytes, size_t n);
uint64_t dt_hash_end(const dt_hash *hash);
/* All in one call. */
uint64_t dt_hash_of(const void *bytes, size_t n);

#endif
