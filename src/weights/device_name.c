/*
 * What a device is called in messages. ggml numbers other machines (RPC0, RPC1...), which tells a user nothing; he knows their
 * addresses.
 */
#include "weights/weights.h"

#include <string.h>

bool dt_device_is_remote(ggml_backend_dev_t device) {
    return strcmp(ggml_backend_reg_name(ggml_backend_dev_backend_reg(device)), "RPC") == 0;
}

const char *dt_device_name(ggml_backend_dev_t device) {
    return ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU ? "ggml-cpu"
           : dt_device_is_remote(device)                                 ? ggml_backend_dev_description(device)
                                                                         : ggml_backend_dev_name(device);
}
