/*
 * Sums of kept positions and of attention by layer. See eval_map.h.
 *
 * Invariant: every number of a layer is a mean over its lanes and over the pieces added.
 */
#include "eval_map.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>

struct eval_map {
    const eval *e;
    const dt_model_info *info;
    size_t n_context;
    int32_t most_lanes;
    double *kept;      /* [setting][layer][bin], positions */
    double *lanes;     /* [setting][layer][most_lanes], share */
    double *mass_kept; /* [setting][layer], share */
    double *mass;      /* [layer][bin], share; of the first setting's pieces */
    int64_t *n_mass;   /* [setting][layer], lanes whose attention was observed */
    int64_t *n_pieces; /* [setting] */
};

eval_map *eval_map_new(const eval *e) {
    eval_map *map = calloc(1, sizeof *map);
    if (map == NULL) {
        return NULL;
    }
    map->e = e;
    map->info = dt_model_get_info(e->model);
    map->n_context = (size_t)e->options->n_context;
    for (int32_t i = 0; i < map->info->n_layers; i++) {
        map->most_lanes = map->info->n_kv_heads[i] > map->most_lanes ? map->info->n_kv_heads[i] : map->most_lanes;
    }
    const size_t n_layers = (size_t)map->info->n_layers, n = e->n_settings * n_layers;
    assert(n > 0 && map->most_lanes > 0);
    map->kept = calloc(n * EVAL_MAP_BINS, sizeof *map->kept);
    map->lanes = calloc(n * (size_t)map->most_lanes, sizeof *map->lanes);
    map->mass_kept = calloc(n, sizeof *map->mass_kept);
    map->mass = calloc(n_layers * EVAL_MAP_BINS, sizeof *map->mass);
    map->n_mass = calloc(n, sizeof *map->n_mass);
    map->n_pieces = calloc(e->n_settings, sizeof *map->n_pieces);
    if (!map->kept || !map->lanes || !map->mass_kept || !map->mass || !map->n_mass || !map->n_pieces) {
        eval_map_free(map);
        return NULL;
    }
    return map;
}

void eval_map_free(eval_map *map) {
    if (map != NULL) {
        free(map->kept);
        free(map->lanes);
        free(map->mass_kept);
        free(map->mass);
        free(map->n_mass);
        free(map->n_pieces);
        free(map);
    }
}

static size_t bin_of(const eval_map *map, int32_t position) {
    const size_t bin = (size_t)position * EVAL_MAP_BINS / map->n_context;
    return bin < EVAL_MAP_BINS ? bin : EVAL_MAP_BINS - 1;
}

/* A lane's entries: positions ascending and, where attention is observed, its mass. */
typedef struct lane {
    int32_t *positions;
    float *mass; /* NULL: not observed */
    size_t n;
} lane;

static dt_status read_lane(const dt_session *session, int32_t layer, int32_t head, lane *out, dt_error *error) {
    *out = (lane){0};
    dt_status status = dt_session_kept_positions(session, layer, head, &out->positions, &out->n, error);
    if (status == DT_OK && dt_session_kept_mass(session, layer, head, &out->mass, &out->n, error) == DT_ERR_MEMORY) {
        status = DT_ERR_MEMORY;
    }
    return status;
}

static void free_lane(lane *l) {
    dt_free(l->positions);
    dt_free(l->mass);
}

/* Attention by position in the full lane, and the part of it that goes to what the evicted one has. What the running means began
 * with is the same for all entries, and among thousands there is one that got next to nothing: the smallest is taken off. */
static void add_mass(eval_map *map, size_t setting, size_t layer, lane *full, const lane *evicted) {
    double sum = 0, kept = 0;
    float smallest = full->n > 0 ? full->mass[0] : 0;
    for (size_t i = 0; i < full->n; i++) {
        smallest = full->mass[i] < smallest ? full->mass[i] : smallest;
    }
    for (size_t i = 0; i < full->n; i++) {
        full->mass[i] -= smallest;
        sum += (double)full->mass[i];
    }
    if (!(sum > 0)) {
        return;
    }
    for (size_t i = 0, j = 0; i < full->n; i++) {
        if (setting == 0) {
            map->mass[layer * EVAL_MAP_BINS + bin_of(map, full->positions[i])] += (double)full->mass[i] / sum;
        }
        if (j < evicted->n && evicted->positions[j] == full->positions[i]) {
            kept += (double)full->mass[i] / sum;
            j++;
        }
    }
    const size_t at = setting * (size_t)map->info->n_layers + layer;
    map->mass_kept[at] += kept;
    map->n_mass[at]++;
}

dt_status eval_map_add(eval_map *map, size_t setting, const dt_session *base, const dt_session *session, dt_error *error) {
    dt_status status = DT_OK;
    for (int32_t i = 0; i < map->info->n_layers; i++) {
        const size_t at = setting * (size_t)map->info->n_layers + (size_t)i;
        const int32_t n_lanes = map->info->n_kv_heads[i];
        for (int32_t j = 0; j < n_lanes && status == DT_OK; j++) {
            lane full = {0}, evicted = {0};
            status = read_lane(base, i, j, &full, error);
            if (status == DT_OK) {
                status = read_lane(session, i, j, &evicted, error);
            }
            for (size_t k = 0; status == DT_OK && k < evicted.n; k++) {
                map->kept[at * EVAL_MAP_BINS + bin_of(map, evicted.positions[k])] += 1.0 / n_lanes;
            }
            if (status == DT_OK) {
                map->lanes[at * (size_t)map->most_lanes + (size_t)j] += (double)evicted.n / (double)map->n_context;
            }
            if (status == DT_OK && full.mass != NULL) {
                add_mass(map, setting, (size_t)i, &full, &evicted);
            }
            free_lane(&full);
            free_lane(&evicted);
        }
    }
    map->n_pieces[setting]++;
    return status;
}

/* ---- JSON --------------------------------------------------------------------------------------- */

/* values[n] / by, in four digits, which is more than a plot shows. */
static json_t *row_of(const double *values, size_t n, double by) {
    json_t *row = json_array();
    for (size_t i = 0; i < n; i++) {
        json_array_append_new(row, json_real(round(values[i] / by * 1e4) / 1e4));
    }
    return row;
}

json_t *eval_map_json(const eval_map *map, size_t setting) {
    json_t *kept = json_array(), *lanes = json_array(), *mass = json_array();
    const double n_pieces = (double)(map->n_pieces[setting] > 0 ? map->n_pieces[setting] : 1);
    double width[EVAL_MAP_BINS] = {0}; /* positions of each bin, which differ by one */
    for (size_t i = 0; i < map->n_context; i++) {
        width[bin_of(map, (int32_t)i)]++;
    }
    for (int32_t i = 0; i < map->info->n_layers; i++) {
        const size_t at = setting * (size_t)map->info->n_layers + (size_t)i;
        double shares[EVAL_MAP_BINS];
        for (size_t b = 0; b < EVAL_MAP_BINS; b++) {
            shares[b] = width[b] > 0 ? map->kept[at * EVAL_MAP_BINS + b] / width[b] : 0;
        }
        json_array_append_new(kept, row_of(shares, EVAL_MAP_BINS, n_pieces));
        json_array_append_new(lanes, row_of(map->lanes + at * (size_t)map->most_lanes, (size_t)map->info->n_kv_heads[i], n_pieces));
        json_array_append_new(mass, map->n_mass[at] > 0 ? json_real(map->mass_kept[at] / (double)map->n_mass[at]) : json_null());
    }
    return json_pack("{si so so so}", "bins", EVAL_MAP_BINS, "kept", kept, "lanes", lanes, "mass_kept", mass);
}

json_t *eval_map_mass(const eval_map *map) {
    json_t *rows = json_array();
    for (size_t i = 0; i < (size_t)map->info->n_layers; i++) {
        const double n = (double)map->n_mass[i]; /* of setting 0 */
        json_array_append_new(rows, n > 0 ? row_of(map->mass + i * EVAL_MAP_BINS, EVAL_MAP_BINS, n) : json_null());
    }
    return rows;
}
