/*
 * Devices of other machines: what deeptutor-rpc-server (or llama.cpp's own server of the same protocol) lends over ggml's RPC.
 */
#ifndef DT_GRAPH_RPC_H
#define DT_GRAPH_RPC_H

#include "base/base.h"
#include "ggml-backend.h"

/* Of "rpc=HOST:PORT" what follows the sign; NULL: `name` is something else. */
const char *dt_rpc_endpoint(const char *name);
/* Greets the server as ggml would, and hangs up: whatever stands in the way is a sentence that names it. Uses sockets only. */
dt_status dt_rpc_check(const char *endpoint, dt_error *error);
/* Connects and lists the server's devices in out[*n]. timeout_s: how long it may leave ggml without an answer. */
dt_status dt_rpc_open(const char *endpoint, int32_t timeout_s, ggml_backend_dev_t *out, int32_t most, int32_t *n, dt_error *error);

#endif
