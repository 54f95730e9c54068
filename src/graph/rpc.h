/*
 * Devices of other machines: what deeptutor-rpc-server (or llama.cpp's own server of the same protocol) lends over ggml's RPC.
 */
#ifndef DT_GRAPH_RPC_H
#define DT_GRAPH_RPC_H

#include "base/base.h"
#include "ggml-backend.h"

#define DT_MAX_SERVERS 16

/* Of "rpc=HOST:PORT" what follows the sign; NULL: `name` is something else. */
const char *dt_rpc_endpoint(const char *name);
/* Greets these servers as ggml would, n <= DT_MAX_SERVERS, and hangs up: whatever stands in the way is a sentence that names one.
 * Uses sockets only. */
dt_status dt_rpc_check(const char *const *endpoints, int32_t n, dt_error *error);
/* Connects to a server that was just checked and lists its devices in out[*n]. timeout_s: how long it may leave ggml without an
 * answer. */
dt_status dt_rpc_open(const char *endpoint, int32_t timeout_s, ggml_backend_dev_t *out, int32_t most, int32_t *n, dt_error *error);

#endif
