/*
 * Devices by name: what ggml's registry has, as users write it.
 */
#ifndef DT_GRAPH_DEVICES_H
#define DT_GRAPH_DEVICES_H

#include "base/base.h"
#include "weights/weights.h"

#define DT_MAX_DEVICES 17 /* the CPU, and up to 16 others */

/* spec: NULL, "cpu" (none), or names separated by commas: a backend ("cuda": its first device), a device ("CUDA1"), any case, or
 * "rpc=HOST:PORT": all devices of another machine, which may take rpc_timeout_s for an answer. Fills out[*n]. Errors name what there
 * is, and what a backend that is there lacks. */
dt_status dt_devices_find(const char *spec, int32_t rpc_timeout_s, ggml_backend_dev_t *out, int32_t most, int32_t *n,
                          dt_error *error);
/* Those that layers go to where nobody says: all but the CPU and its helpers. */
int32_t dt_devices_of_this_machine(ggml_backend_dev_t *out, int32_t most);
/* dt_devices_describe of deeptutor.h, for when ggml's messages have been routed: backends say what they find. */
dt_status dt_devices_list(char **out, dt_error *error);

#endif
