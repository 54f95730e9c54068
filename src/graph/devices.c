/*
 * Finding devices in ggml's registry. A backend that was built in but found no hardware is told apart from one that was not built
 * in. Invariant: nothing here starts a device; listing them may ask a driver.
 */
#define _POSIX_C_SOURCE 200809L /* strcasecmp */
#include "graph/devices.h"

#include "weights/ggml_calls.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define MIB 1048576.0
#define LIST_BYTES 8192

static const struct { const char *name, *registry; } aliases[] = {{"metal", "MTL"}, {"vk", "Vulkan"}};

static bool is_cpu(ggml_backend_dev_t device) { return ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU; }

const char *dt_device_name(ggml_backend_dev_t device) { return is_cpu(device) ? "ggml-cpu" : ggml_backend_dev_name(device); }

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

/* A backend of that name without any device. */
static bool is_idle_backend(const char *name) {
    for (size_t i = 0; i < ggml_backend_reg_count(); i++) {
        ggml_backend_reg_t registry = ggml_backend_reg_get(i);
        if (strcasecmp(ggml_backend_reg_name(registry), name) == 0 && ggml_backend_reg_dev_count(registry) == 0) {
            return true;
        }
    }
    return false;
}

static dt_status fail_unknown(const char *name, dt_error *error) {
    char known[512] = "cpu";
    for (size_t i = 0, at = 3; i < ggml_backend_dev_count() && at < sizeof known; i++) {
        ggml_backend_dev_t device = ggml_backend_dev_get(i);
        if (takes_layers(device)) {
            at += (size_t)snprintf(known + at, sizeof known - at, ", %s", ggml_backend_dev_name(device));
        }
    }
    if (is_idle_backend(name)) {
        return dt_fail(
            error, DT_ERR_UNSUPPORTED,
            "no %s device was found on this machine: is there one, and its driver? (--log-level debug has what that said.) "
            "Devices: %s",
            name, known);
    }
    return dt_fail(error, DT_ERR_ARGUMENT,
                   "no device '%s'; this build knows: %s. Others come with bash run.sh --cuda, --metal or --vulkan", name, known);
}

dt_status dt_devices_find(const char *spec, ggml_backend_dev_t *out, int32_t most, int32_t *n, dt_error *error) {
    *n = 0;
    if (spec == NULL || strcasecmp(spec, "cpu") == 0) {
        return DT_OK;
    }
    (void)dt_ggml_device_count(); /* fills the registry */
    while (true) {
        char name[64];
        const size_t length = strcspn(spec, ",");
        snprintf(name, sizeof name, "%.*s", (int)DT_MIN(length, sizeof name - 1), spec);
        ggml_backend_dev_t device = strcasecmp(name, "ggml-cpu") == 0 ? dt_ggml_cpu_device() : find_device(name);
        if (device == NULL) {
            return fail_unknown(name, error);
        }
        if (*n == most) {
            return dt_fail(error, DT_ERR_ARGUMENT, "more than %d devices", most);
        }
        out[(*n)++] = device;
        if (spec[length] == 0) {
            return DT_OK;
        }
        spec += length + 1;
    }
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
        at += (size_t)snprintf(text + at, LIST_BYTES - at, "%-10s %s, %.0f MiB, %.0f MiB free\n",
                               is_cpu(device) ? "cpu" : ggml_backend_dev_name(device), ggml_backend_dev_description(device),
                               (double)total / MIB, (double)available / MIB);
    }
    for (size_t i = 0; i < ggml_backend_reg_count() && at < LIST_BYTES; i++) {
        ggml_backend_reg_t registry = ggml_backend_reg_get(i);
        if (ggml_backend_reg_dev_count(registry) == 0) {
            at += (size_t)snprintf(text + at, LIST_BYTES - at, "%-10s built in, but no device was found\n",
                                   ggml_backend_reg_name(registry));
        }
    }
    *out = text;
    return DT_OK;
}
