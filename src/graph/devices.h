/*
 * Devices by name: what ggml's registry has, as users write it.
 */
#ifndef DT_GRAPH_DEVICES_H
#define DT_GRAPH_DEVICES_H

#include "base/base.h"
#include "ggml-backend.h"

#define DT_MAX_DEVICES 17 /* the CPU, and up to 16 others */

/* spec: NULL, "cpu" (none), or names separated by commas: a backend ("cuda": its first device), or a device ("CUDA1"), any case.
 * Fills out[*n]. Errors name what there is, and what a backend that is there lacks. */
dt_status dt_devices_find(const char *spec, ggml_backend_dev_t *out, int32_t most, int32_t *n, dt_error *error);
const char *dt_device_name(ggml_backend_dev_t device);
/* dt_devices_describe of deeptutor.h, for when ggml's messages have been routed: backends say what they find. */
dt_status dt_devices_list(char **out, dt_error *error);

#endif
