/*
 * The layout of a session file; docs/session-format.md describes it byte by byte. Little-endian throughout.
 *
 * A header, then sections in a fixed order: TOKS, LOGT, SMPL, NOTE, one LANE for each layer and KV head, END. A section is a head,
 * its payload padded with zeros to a multiple of 8 bytes, and the checksum of the padded payload. Invariant: every byte of a file
 * is covered by one of the checksums.
 */
#ifndef DT_ENGINE_SESSION_FILE_H
#define DT_ENGINE_SESSION_FILE_H

#include "kv/kv.h"

#include <stdint.h>

#define DT_SESSION_MAGIC "DTSESS\r\n" /* 8 bytes; a transfer as text would break it */
#define DT_SESSION_VERSION 4u         /* what is written, and read */

typedef struct dt_session_header {
    char magic[8];
    uint32_t version, header_bytes;
    uint64_t file_bytes, fingerprint;
    uint32_t n_layers, n_vocab, dim_k, dim_v, type_k, type_v; /* types: 1 = F16, 2 = INT8 */
    uint32_t n_tokens, whole_from;
    int32_t newest_dropped;   /* -1 = none */
    uint32_t peaks_until;     /* tokens before that have been repeated (score reconstruct) or foretold (predict) */
    char model_name[32];      /* for messages, zero-padded, perhaps cut */
    uint32_t shift, reserved; /* positions count from there: the next token's is n_tokens - shift; reserved 0 */
    uint64_t checksum;        /* of all before it */
} dt_session_header;
_Static_assert(sizeof(dt_session_header) == 120, "no padding");

typedef struct dt_session_section {
    char tag[4];
    uint32_t layer, lane, reserved; /* of a LANE, else 0; reserved 0 */
    uint64_t payload_bytes;         /* without padding */
    uint64_t checksum;              /* of the 24 bytes before it */
} dt_session_section;
_Static_assert(sizeof(dt_session_section) == 32, "no padding");

typedef struct dt_session_lane { /* what a LANE's payload begins with; columns of n_entries follow, dt_kv_column's order */
    uint32_t n_entries, flags;
} dt_session_lane;
#define DT_SESSION_LANE_MASS 1u /* the columns recent_mass and value_norm are there */
#define DT_SESSION_LANE_BIAS 2u
#define DT_SESSION_LANE_PEAK 4u
#define DT_SESSION_LANE_ORIGINS 8u

/* The flag that a lane with this column has; 0: every lane has it. */
static inline uint32_t dt_session_column_flag(int column) {
    switch (column) {
    case DT_KV_RECENT_MASS:
    case DT_KV_VALUE_NORM:
        return DT_SESSION_LANE_MASS;
    case DT_KV_PEAK_MASS:
        return DT_SESSION_LANE_PEAK;
    case DT_KV_BIAS:
        return DT_SESSION_LANE_BIAS;
    case DT_KV_ORIGINS:
        return DT_SESSION_LANE_ORIGINS;
    default:
        return 0;
    }
}

/* Flags of the columns that the layer's lanes have a use for; any of them may have biases. */
static inline uint32_t dt_session_layer_flags(const dt_kv *kv, int32_t layer) {
    return DT_SESSION_LANE_BIAS | (dt_kv_layer_needs_mass(kv, layer) ? DT_SESSION_LANE_MASS : 0) |
           (dt_kv_layer_needs_peak(kv, layer) ? DT_SESSION_LANE_PEAK : 0) |
           (dt_kv_layer(kv, layer)->keeps_origins ? DT_SESSION_LANE_ORIGINS : 0);
}

/* Loading draws all of them again, so that a file can't ask for more than a second or two of that; of a longer stream the place is not
 * kept. */
#define DT_SESSION_DRAWS_MAX ((uint64_t)1 << 22)
typedef struct dt_session_sampler {
    uint32_t seed, reserved;
    uint64_t n_draws;
} dt_session_sampler;

#endif
