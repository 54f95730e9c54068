/*
 * XXH64. See hash.h. Invariant: the seed is 0 and words are read little-endian, so that a file's checksums are the same everywhere.
 */
#include "base/hash.h"

#include <string.h>

#define PRIME_1 0x9E3779B185EBCA87u
#define PRIME_2 0xC2B2AE3D27D4EB4Fu
#define PRIME_3 0x165667B19E3779F9u
#define PRIME_4 0x85EBCA77C2B2AE63u
#define PRIME_5 0x27D4EB2F165667C5u
#define STRIPE 32

static uint64_t rotate(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

static uint64_t word(const unsigned char *bytes, int n) {
    uint64_t value = 0;
    for (int i = 0; i < n; i++) { /* one load where the machine is little-endian */
        value |= (uint64_t)bytes[i] << (8 * i);
    }
    return value;
}

static uint64_t mix(uint64_t lane, uint64_t input) { return rotate(lane + input * PRIME_2, 31) * PRIME_1; }

static void add_stripe(uint64_t lanes[4], const unsigned char *bytes) {
    for (int i = 0; i < 4; i++) {
        lanes[i] = mix(lanes[i], word(bytes + 8 * i, 8));
    }
}

void dt_hash_begin(dt_hash *hash) { *hash = (dt_hash){.lanes = {PRIME_1 + PRIME_2, PRIME_2, 0, (uint64_t)0 - PRIME_1}}; }

void dt_hash_add(dt_hash *hash, const void *bytes, size_t n) {
    const unsigned char *from = bytes;
    const size_t held = (size_t)(hash->n_bytes % STRIPE);
    hash->n_bytes += n;
    if (held > 0) {
        const size_t taken = n < STRIPE - held ? n : STRIPE - held;
        memcpy(hash->rest + held, from, taken);
        if (held + taken < STRIPE) {
            return;
        }
        add_stripe(hash->lanes, hash->rest);
        from += taken;
        n -= taken;
    }
    uint64_t lanes[4];
    memcpy(lanes, hash->lanes, sizeof lanes);
    for (; n >= STRIPE; from += STRIPE, n -= STRIPE) {
        add_stripe(lanes, from);
    }
    memcpy(hash->lanes, lanes, sizeof lanes);
    if (n > 0) {
        memcpy(hash->rest, from, n);
    }
}

uint64_t dt_hash_end(const dt_hash *hash) {
    const uint64_t *lanes = hash->lanes;
    uint64_t value = PRIME_5;
    if (hash->n_bytes >= STRIPE) {
        value = rotate(lanes[0], 1) + rotate(lanes[1], 7) + rotate(lanes[2], 12) + rotate(lanes[3], 18);
        for (int i = 0; i < 4; i++) {
            value = (value ^ mix(0, lanes[i])) * PRIME_1 + PRIME_4;
        }
    }
    value += hash->n_bytes;
    const unsigned char *rest = hash->rest;
    size_t n = (size_t)(hash->n_bytes % STRIPE);
    for (; n >= 8; rest += 8, n -= 8) {
        value = rotate(value ^ mix(0, word(rest, 8)), 27) * PRIME_1 + PRIME_4;
    }
    if (n >= 4) {
        value = rotate(value ^ word(rest, 4) * PRIME_1, 23) * PRIME_2 + PRIME_3;
        rest += 4;
        n -= 4;
    }
    for (; n > 0; rest++, n--) {
        value = rotate(value ^ *rest * PRIME_5, 11) * PRIME_1;
    }
    value = (value ^ value >> 33) * PRIME_2;
    value = (value ^ value >> 29) * PRIME_3;
    return value ^ value >> 32;
}

uint64_t dt_hash_of(const void *bytes, size_t n) {
    dt_hash hash;
    dt_hash_begin(&hash);
    dt_hash_add(&hash, bytes, n);
    return dt_hash_end(&hash);
}
