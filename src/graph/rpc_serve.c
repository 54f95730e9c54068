/*
 * Lending this machine's devices: ggml's RPC server, with what it would only mutter about checked before.
 *
 * Invariant: the server is started only where its address can be listened at.
 */
#define _POSIX_C_SOURCE 200112L
#include "graph/devices.h"
#include "graph/rpc.h"
#include "weights/ggml_calls.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define DEFAULT_PORT 50052
#define THREADS_ROOM ((size_t)1 << 20)

static dt_status check_address(const char *host, int32_t port, dt_error *error) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    const int yes = 1;
    if (port < 1 || port > 65535 || inet_pton(AF_INET, host, &address.sin_addr) != 1) {
        return dt_fail(
            error, DT_ERR_ARGUMENT,
            "%s:%d can't be listened at: give an IPv4 address of this machine in digits (0.0.0.0: all of them) and a port", host,
            port);
    }
    const int descriptor = socket(AF_INET, SOCK_STREAM, 0);
    const bool free_to_use = descriptor >= 0 && setsockopt(descriptor, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) == 0 &&
                             bind(descriptor, (struct sockaddr *)&address, sizeof address) == 0;
    const int reason = errno;
    if (descriptor >= 0) {
        close(descriptor);
    }
    return free_to_use ? DT_OK
                       : dt_fail(error, DT_ERR_IO, "%s:%d can't be listened at: %s; give another --host or --port", host, port,
                                 strerror(reason));
}

static dt_status find_lent(const char *spec, ggml_backend_dev_t *out, int32_t *n, dt_error *error) {
    dt_status status = DT_OK;
    if (spec == NULL) {
        *n = dt_devices_of_this_machine(out, DT_MAX_DEVICES);
    } else {
        status = dt_devices_find(spec, 0, out, DT_MAX_DEVICES, n, error);
    }
    if (status == DT_OK && *n == 0) {
        out[(*n)++] = dt_ggml_cpu_device();
    }
    for (int32_t i = 0; status == DT_OK && i < *n; i++) {
        if (out[i] == NULL || dt_device_is_remote(out[i])) {
            status = dt_fail(error, DT_ERR_ARGUMENT, "a server lends devices of its own machine");
        }
    }
    return status;
}

dt_status dt_rpc_serve(const dt_rpc_server_params *params, dt_error *error) {
    typedef void (*start_fn)(const char *endpoint, const char *cache, size_t n_threads, size_t n, ggml_backend_dev_t *devices);
    const dt_rpc_server_params defaults = {0};
    params = params != NULL ? params : &defaults;
    const char *host = params->host != NULL ? params->host : "127.0.0.1";
    const int32_t port = params->port != 0 ? params->port : DEFAULT_PORT;
    ggml_backend_dev_t devices[DT_MAX_DEVICES];
    int32_t n = 0;
    struct stat folder;
    char endpoint[64];
    dt_status status = dt_check_processor(error);
    if (status == DT_OK && params->n_threads > DT_MAX_THREADS) {
        status = dt_fail(error, DT_ERR_ARGUMENT, "%d threads are more than the %d that can compute together", params->n_threads,
                         DT_MAX_THREADS);
    }
    if (status == DT_OK) {
        status = check_address(host, port, error);
    }
    if (status == DT_OK && params->cache != NULL && (stat(params->cache, &folder) != 0 || !S_ISDIR(folder.st_mode))) {
        status = dt_fail(error, DT_ERR_IO, "%s is no folder; make it first", params->cache);
    }
    if (status == DT_OK) {
        status = find_lent(params->device, devices, &n, error);
    }
    const int32_t n_threads = params->n_threads > 0 ? params->n_threads : DT_MIN(dt_physical_cores(), DT_MAX_THREADS);
    if (status == DT_OK && dt_startable_threads(n_threads, THREADS_ROOM) < n_threads) { /* ggml would find out in the first graph */
        status = dt_fail(error, DT_ERR_COMPUTE, "the threads for computing can't be started; use fewer with -t");
    }
    if (status != DT_OK) {
        return status;
    }
    ggml_backend_reg_t rpc = ggml_backend_reg_by_name("RPC");
    const start_fn start = rpc != NULL ? (start_fn)ggml_backend_reg_get_proc_address(rpc, "ggml_backend_rpc_start_server") : NULL;
    if (start == NULL) {
        return dt_fail(error, DT_ERR_UNSUPPORTED, "this build can't compute for other machines; build it with -DDT_RPC=ON");
    }
    snprintf(endpoint, sizeof endpoint, "%s:%d", host, port);
    dt_ggml_serve(start, endpoint, params->cache, (size_t)n_threads, (size_t)n, devices);
    return dt_fail(error, DT_ERR_IO, "the RPC server at %s has ended; it may have said above why", endpoint);
}
