/*
 * Finding devices in ggml's registry. A backend that was built in but found no hardware is told apart from one that was not built
 * in. Other machines are in no registry: they are asked for by address (rpc.h). Invariant: nothing here starts a device; listing
 * them may ask a driver, and asks no other machine.
 */
#define _POSIX_C_SOURCE 200809L /* strcasecmp */
#include "graph/devices.h"

#include "graph/rpc.h"
#include "weights/ggml_calls.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define MIB 1048576.0
#define LIST_BYTES 8192
#define CPU_AS_DEVICE "ggml-cpu"
#define NAME_BYTES 300 /* of a device: a host's name has at most 253 */

static const struct { const char *name, *registry; } aliases[] = {{"metal", "MTL"}, {"vk", "Vulkan"}};

static bool is_cpu(ggml_backend_dev_t device) { return ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU; }

/* Devices that layers can go to: no helpers of the CPU (BLAS), not the CPU itself. */
static bool takes_layers(ggml_backend_dev_t device) {
    const enum ggml_backend_dev_type type = ggml_backend_dev_type(device);
    return type == GGML_BACKEND_DEVICE_TYPE_GPU || type == GGML_BACKEND_DEVICE_TYPE_IGPU;
}

static ggml_backend_dev_t find_device(const char *name) {
    for (size_t i = 0; i < sizeof aliases / sizeof aliases[0]; i++) {
        name = strcasecmp(name, aliases[i].name) == 0 ? aliases[i].registry : name;
    }
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        ggml_backend_dev_t device = ggml_backend_dev_get(i);
        const char *registry = ggml_backend_reg_name(ggml_backend_dev_backend_reg(device));
        if (takes_layers(device) && (strcasecmp(ggml_backend_dev_name(device), name) == 0 || strcasecmp(registry, name) == 0)) {
            return device;
        }
    }
    return NULL;
}

/* A backend of that name, or the one a device "CUDA1" would belong to, without any device. */
static bool is_idle_backend(const char *name) {
    for (size_t i = 0; i < ggml_backend_reg_count(); i++) {
        ggml_backend_reg_t registry = ggml_backend_reg_get(i);
        const size_t n = strlen(ggml_backend_reg_name(registry));
        const bool named =
            strncasecmp(ggml_backend_reg_name(registry), name, n) == 0 && name[n + strspn(name + n, "0123456789")] == '\0';
        if (named && ggml_backend_reg_dev_count(registry) == 0) {
            return true;
        }
    }
    return false;
}

static dt_status fail_unknown(const char *name, dt_error *error) {
    char known[512] = "";
    for (size_t i = 0, at = 0; i < ggml_backend_dev_count() && at < sizeof known;
         i++) { /* those of dt_devices_list, in its order */
        ggml_backend_dev_t device = ggml_backend_dev_get(i);
        if (takes_layers(device) || is_cpu(device)) {
            at += (size_t)snprintf(known + at, sizeof known - at, "%s%s", at > 0 ? ", " : "",
                                   is_cpu(device) ? "cpu, " CPU_AS_DEVICE : ggml_backend_dev_name(device));
        }
    }
    const char *rpc = ggml_backend_reg_by_name("RPC") != NULL ? ", rpc=HOST:PORT" : "";
    if (name[0] == '\0') {
        return dt_fail(error, DT_ERR_ARGUMENT, "a name is missing in the list of devices, before or after a comma");
    }
    if (strcasecmp(name, "cpu") == 0) {
        return dt_fail(error, DT_ERR_ARGUMENT,
                       "\"cpu\" stands alone: beside other devices the CPU computes the layers that -ngl N leaves to it");
    }
    if (strcasecmp(name, "list") == 0) {
        return dt_fail(error, DT_ERR_ARGUMENT, "\"list\" stands alone: --device list");
    }
    if (strcasecmp(name, "rpc") == 0) {
        return dt_fail(error, DT_ERR_ARGUMENT, "another machine is named by its address: rpc=HOST:PORT (docs/cluster.md)");
    }
    if (is_idle_backend(name)) {
        return dt_fail(
            error, DT_ERR_UNSUPPORTED,
            "no %s device was found on this machine: is there one, and its driver? (--log-level debug has what that said.) "
            "Devices: %s%s",
            name, known, rpc);
    }
    return dt_fail(error, DT_ERR_ARGUMENT,
                   "no device '%s'; this build knows: %s%s. Others come with bash run.sh --cuda, --metal or --vulkan", name, known,
                   rpc);
}

/* Takes the next of names separated by commas from *spec; false after the last. */
static bool next_name(const char **spec, char out[NAME_BYTES]) {
    if (*spec == NULL) {
        return false;
    }
    const size_t length = strcspn(*spec, ",");
    snprintf(out, NAME_BYTES, "%.*s", (int)DT_MIN(length, NAME_BYTES - 1), *spec);
    *spec = (*spec)[length] == 0 ? NULL : *spec + length + 1;
    return true;
}

/* The devices of one name. */
static dt_status find_named(const char *name, int32_t rpc_timeout_s, ggml_backend_dev_t *out, int32_t most, int32_t *n,
                            dt_error *error) {
    if (most <= 0) {
        return dt_fail(error, DT_ERR_ARGUMENT, "more than %d devices", DT_MAX_DEVICES - 1);
    }
    if (dt_rpc_endpoint(name) != NULL) {
        return dt_rpc_open(dt_rpc_endpoint(name), rpc_timeout_s, out, most, n, error);
    }
    out[0] = strcasecmp(name, CPU_AS_DEVICE) == 0 ? dt_ggml_cpu_device() : find_device(name);
    *n = 1;
    return out[0] != NULL ? DT_OK : fail_unknown(name, error);
}

dt_status dt_devices_find(const char *spec, int32_t rpc_timeout_s, ggml_backend_dev_t *out, int32_t most, int32_t *n,
                          dt_error *error) {
    char name[NAME_BYTES];
    *n = 0;
    if (spec == NULL || strcasecmp(spec, "cpu") == 0) {
        return DT_OK;
    }
    (void)dt_ggml_device_count(); /* fills the registry */
    dt_status status = dt_devices_check(spec, error);
    while (status == DT_OK && next_name(&spec, name)) {
        int32_t n_here = 0;
        status = find_named(name, rpc_timeout_s, out + *n, most - *n, &n_here, error);
        *n += n_here;
    }
    return status;
}

dt_status dt_devices_check(const char *device, dt_error *error) {
    char names[DT_MAX_SERVERS][NAME_BYTES], name[NAME_BYTES];
    const char *endpoints[DT_MAX_SERVERS];
    int32_t n = 0;
    while (next_name(&device, name)) {
        if (dt_rpc_endpoint(name) == NULL) {
            continue;
        }
        if (n == DT_MAX_SERVERS) {
            return dt_fail(error, DT_ERR_ARGUMENT, "more than %d RPC servers", DT_MAX_SERVERS);
        }
        memcpy(names[n], name, sizeof name);
        endpoints[n] = dt_rpc_endpoint(names[n]);
        for (int32_t i = 0; i < n; i++) {
            if (strcasecmp(endpoints[i], endpoints[n]) == 0) {
                return dt_fail(error, DT_ERR_ARGUMENT, "the RPC server %s is named twice", endpoints[n]);
            }
        }
        n++;
    }
    return dt_rpc_check(endpoints, n, error);
}

int32_t dt_devices_of_this_machine(ggml_backend_dev_t *out, int32_t most) {
    int32_t n = 0;
    for (size_t i = 0, n_all = dt_ggml_device_count(); i < n_all && n < most; i++) {
        ggml_backend_dev_t device = ggml_backend_dev_get(i);
        if (takes_layers(device)) {
            out[n++] = device;
        }
    }
    return n;
}

dt_status dt_devices_list(char **out, dt_error *error) {
    char *text = malloc(LIST_BYTES);
    if (text == NULL) {
        return dt_fail_memory(error, LIST_BYTES, "the list of devices");
    }
    size_t at = 0;
    for (size_t i = 0, n = dt_ggml_device_count(); i < n && at < LIST_BYTES; i++) {
        ggml_backend_dev_t device = ggml_backend_dev_get(i);
        size_t available = 0, total = 0;
        if (!takes_layers(device) && !is_cpu(device)) {
            continue;
        }
        ggml_backend_dev_memory(device, &available, &total);
        at += (size_t)snprintf(
            text + at, LIST_BYTES - at, "%-14s %s, %.0f MiB, %.0f MiB free\n%s",
            is_cpu(device) ? "cpu" : ggml_backend_dev_name(device), ggml_backend_dev_description(device), (double)total / MIB,
            (double)available / MIB,
            is_cpu(device) ? CPU_AS_DEVICE "       the same, taken like a GPU: ggml's operators only (for tests)\n" : "");
    }
    for (size_t i = 0; i < ggml_backend_reg_count() && at < LIST_BYTES; i++) {
        ggml_backend_reg_t registry = ggml_backend_reg_get(i);
        if (strcmp(ggml_backend_reg_name(registry), "RPC") == 0) {
            at += (size_t)snprintf(text + at, LIST_BYTES - at, "%-14s another machine that runs deeptutor-rpc-server\n",
                                   "rpc=HOST:PORT");
        } else if (ggml_backend_reg_dev_count(registry) == 0) {
            at += (size_t)snprintf(text + at, LIST_BYTES - at, "%-14s built in, but no device was found\n",
                                   ggml_backend_reg_name(registry));
        }
    }
    *out = text;
    return DT_OK;
}
