/*
 * What each layer keeps, over positions, and how much attention that takes with it: for plots (python/eval).
 *
 * A map sums over pieces of text, so it is smooth; positions fall into MAP_BINS equal bins of the context.
 */
#ifndef DT_APPS_EVAL_MAP_H
#define DT_APPS_EVAL_MAP_H

#include "eval.h"

#define EVAL_MAP_BINS 64

typedef struct eval_map eval_map;

/* For e->n_settings settings. NULL when there is no memory. */
eval_map *eval_map_new(const eval *e);
void eval_map_free(eval_map *map);
/* What `session`, evicted under settings[i] after the context, keeps of what `base` had. */
dt_status eval_map_add(eval_map *map, size_t setting, const dt_session *base, const dt_session *session, dt_error *error);
/* {"bins", "kept": [layer][bin], share of the positions kept, mean over lanes; "lanes": [layer][lane], share kept;
 *  "mass_kept": [layer], share of the full cache's attention that goes to what is kept; null where no attention was observed} */
json_t *eval_map_json(const eval_map *map, size_t setting);
/* [layer][bin]: where the full cache's attention goes; a layer's bins sum to 1, null where none was observed. */
json_t *eval_map_mass(const eval_map *map);

#endif
