/*
 * What eviction_json.c (reads the file) needs of eviction_config.c (knows the rules).
 */
#ifndef DT_EVICTION_JSON_H
#define DT_EVICTION_JSON_H

#include "engine/eviction_config.h"

/* All layers keep everything. The name shown is "kind name". */
dt_status dt_eviction_new(int32_t n_layers, const char *kind, const char *name, dt_eviction **out, dt_error *error);
/* The request with defaults filled in; its max_cache_size must be given unless the policy is NULL. */
dt_budget dt_eviction_complete(const dt_eviction_request *request);
/* The smallest size that any lane may have. */
int32_t dt_eviction_smallest_lane(const dt_eviction_request *request);
/* Tokens that sinks, recent windows and min_cache_size of all layers keep. */
int64_t dt_eviction_least_total(const dt_budget *budgets, int32_t n_layers);
/* False when sinks and recent window alone fill a lane. */
bool dt_eviction_has_room(const dt_eviction_request *request);
/* The smallest size of a lane that leaves room beside sinks and recent window, a default window's growth counted in. */
int64_t dt_eviction_least_size(const dt_eviction_request *request);
/* "7" or "0-15" for the layers [first, end). */
void dt_eviction_range(int32_t first, int32_t end, char out[32]);

#endif
