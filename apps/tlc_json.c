/*
 * The live view of a cache. See tlc_json.h.
 */
#include "tlc_json.h"
#include "json_parts.h"

#include <jansson.h>
#include <string.h>

#define CELLS 128

/* counts[i]: how many of `positions`, ascending, lie in cell i of n_tokens. */
static void count_cells(const int32_t *positions, size_t n, size_t n_tokens, int64_t counts[CELLS]) {
    for (size_t i = 0; i < n; i++) {
        const size_t cell = (size_t)positions[i] * CELLS / n_tokens;
        counts[cell < CELLS ? cell : CELLS - 1]++;
    }
}

static size_t cell_begin(size_t cell, size_t n_tokens) { return (cell * n_tokens + CELLS - 1) / CELLS; }

/* Hex digits of the shares kept; cells without a position repeat their neighbour. */
static bool strip_of(const dt_session *session, int32_t layer, int32_t n_heads, size_t n_tokens, char out[CELLS + 1]) {
    int64_t counts[CELLS] = {0};
    dt_error error;
    for (int32_t head = 0; head < n_heads; head++) {
        int32_t *positions = NULL;
        size_t n = 0;
        if (dt_session_kept_positions(session, layer, head, &positions, &n, &error) != DT_OK) {
            return false;
        }
        count_cells(positions, n, n_tokens, counts);
        dt_free(positions);
    }
    char digit = 'f';
    for (size_t i = 0; i < CELLS; i++) {
        const size_t width = cell_begin(i + 1, n_tokens) - cell_begin(i, n_tokens);
        if (width > 0) {
            const int64_t all = (int64_t)width * n_heads, share = (counts[i] * 15 + all / 2) / all;
            digit = "0123456789abcdef"[share > 15 ? 15 : share];
        }
        out[i] = digit;
    }
    out[CELLS] = 0;
    return true;
}

static json_t *layer_json(const dt_session *session, int32_t layer, int32_t n_heads, size_t n_tokens, bool strips) {
    dt_layer_stats stats;
    if (dt_session_get_layer_stats(session, layer, &stats) != DT_OK) {
        return NULL;
    }
    json_t *json = json_pack("{s:s,s:i,s:i,s:f}", "policy", stats.policy, "max", (int)stats.max_cache_size, "length",
                             (int)stats.length, "mean_length", stats.mean_length);
    char strip[CELLS + 1];
    memset(strip, 'f', CELLS);
    strip[CELLS] = 0;
    if (strips && n_tokens > 0 && (stats.mean_length >= (double)n_tokens || strip_of(session, layer, n_heads, n_tokens, strip))) {
        dt_json_set(&json, "strip", json_string(strip));
    }
    return json;
}

static double per_second(int64_t n, double seconds) { return n > 0 && seconds > 0 ? (double)n / seconds : 0; }

char *dt_tlc_json(const dt_model *model, const dt_job *job, const dt_session *session, const char *phase, size_t n_read,
                  bool strips) {
    dt_session_stats stats;
    size_t n_tokens = 0;
    const dt_model_info *info = dt_model_get_info(model);
    dt_session_get_stats(session, &stats);
    dt_session_tokens(session, &n_tokens);
    const dt_choice *choice = &job->choices[0];
    const int64_t n_generated = (int64_t)choice->n_records;
    const int64_t n_computed = (int64_t)n_read - job->reused_tokens;
    json_t *json = json_pack("{s:s,s:s,s:I,s:I,s:I,s:I,s:I,s:f,s:f,s:I,s:I,s:{s:b,s:o,s:I,s:I,s:i},s:i}", "object", "tlc", "phase",
                             phase, "prompt_tokens", (json_int_t)job->n_tokens, "reused_tokens", (json_int_t)job->reused_tokens,
                             "read_tokens", (json_int_t)n_read, "generated_tokens", (json_int_t)n_generated, "n_tokens",
                             (json_int_t)n_tokens, "prefill_tps", per_second(n_computed, (double)job->read_us / 1e6), "decode_tps",
                             per_second(n_generated - 1, job->decode_ms / 1e3), "kv_bytes", (json_int_t)stats.kv_bytes,
                             "kv_bytes_full", (json_int_t)stats.kv_bytes_full, "eviction", "enabled", job->eviction != NULL, "name",
                             dt_json_text(job->eviction != NULL ? dt_eviction_name(job->eviction) : "off"), "rounds",
                             (json_int_t)stats.eviction_rounds, "evicted_tokens", (json_int_t)stats.evicted_tokens,
                             "total_cache_size", (int)stats.total_cache_size, "cells", CELLS);
    json_t *layers = json_array();
    for (int32_t i = 0; json != NULL && i < info->n_layers; i++) {
        dt_json_append(&layers, layer_json(session, i, info->n_kv_heads[i], n_tokens, strips));
    }
    if (strips) {
        dt_json_set(&json, "strip_tokens", json_integer((json_int_t)n_tokens));
    }
    dt_json_set(&json, "layers", layers);
    char *text = json != NULL ? dt_json_dump(json, JSON_COMPACT | JSON_REAL_PRECISION(6)) : NULL;
    json_decref(json);
    return text;
}
