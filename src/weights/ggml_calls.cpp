/*
 * ggml's calls that may throw. See ggml_calls.h.
 */
#include "weights/ggml_calls.h"

#ifdef GGML_BACKEND_DL
#include <dlfcn.h>

#include <string>
#endif

/* What f returns, or `failed` where it throws. */
template <typename T, typename F> static T caught(T failed, F f) noexcept {
    try {
        return f();
    } catch (...) { /* std::bad_alloc, or what a device's driver says */
        return failed;
    }
}

struct gguf_context *dt_ggml_read_metadata(const char *path) {
    return caught<struct gguf_context *>(nullptr, [&] {
        const struct gguf_init_params params = {/* .no_alloc = */ true, /* .ctx = */ nullptr};
        return gguf_init_from_file(path, params);
    });
}

/* Backends that are libraries lie beside ggml's own, and are loaded once. ggml would also look in the current folder, where anybody
 * may have put something. */
static void load_backends() {
#ifdef GGML_BACKEND_DL
    static const bool loaded = [] {
        Dl_info here;
        if (dladdr(reinterpret_cast<void *>(&ggml_backend_load_all_from_path), &here) != 0) {
            const std::string file = here.dli_fname;
            const size_t end = file.rfind('/');
            ggml_backend_load_all_from_path(end == std::string::npos ? "." : file.substr(0, end + 1).c_str());
        }
        return true;
    }();
    (void)loaded;
#endif
}

ggml_backend_dev_t dt_ggml_cpu_device(void) {
    return caught<ggml_backend_dev_t>(nullptr, [] {
        load_backends();
        return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    });
}

ggml_backend_buffer_type_t *dt_ggml_extra_buffer_types(ggml_backend_dev_t device) {
    return caught<ggml_backend_buffer_type_t *>(nullptr, [&] {
        const auto get = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
            ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), "ggml_backend_dev_get_extra_bufts"));
        return get != nullptr ? get(device) : nullptr;
    });
}

ggml_backend_buffer_t dt_ggml_new_buffer(ggml_backend_buffer_type_t type, size_t bytes) {
    return caught<ggml_backend_buffer_t>(nullptr, [&] { return ggml_backend_buft_alloc_buffer(type, bytes); });
}

ggml_backend_buffer_t dt_ggml_wrap_memory(ggml_backend_dev_t device, void *memory, size_t bytes) {
    return caught<ggml_backend_buffer_t>(nullptr,
                                         [&] { return ggml_backend_dev_buffer_from_host_ptr(device, memory, bytes, bytes); });
}

size_t dt_ggml_device_count(void) {
    return caught<size_t>(0, [] {
        load_backends();
        return ggml_backend_dev_count();
    });
}

bool dt_ggml_set(struct ggml_tensor *tensor, const void *data, size_t offset, size_t bytes) {
    return caught(false, [&] { return ggml_backend_tensor_set(tensor, data, offset, bytes), true; });
}

bool dt_ggml_get(const struct ggml_tensor *tensor, void *data, size_t offset, size_t bytes) {
    return caught(false, [&] { return ggml_backend_tensor_get(tensor, data, offset, bytes), true; });
}

bool dt_ggml_copy(const struct ggml_tensor *from, struct ggml_tensor *to) {
    return caught(false, [&] { return ggml_backend_tensor_copy(from, to), true; });
}

bool dt_ggml_clear(ggml_backend_buffer_t buffer) {
    return caught(false, [&] { return ggml_backend_buffer_clear(buffer, 0), true; });
}

ggml_backend_t dt_ggml_new_backend(ggml_backend_dev_t device) {
    return caught<ggml_backend_t>(nullptr, [&] { return ggml_backend_dev_init(device, nullptr); });
}

bool dt_ggml_allocate_graph(ggml_gallocr_t allocator, struct ggml_cgraph *graph) {
    return caught(false, [&] { return ggml_gallocr_alloc_graph(allocator, graph); });
}

ggml_backend_reg_t dt_ggml_add_server(ggml_backend_reg_t (*add_server)(const char *endpoint), const char *endpoint) {
    return caught<ggml_backend_reg_t>(nullptr, [&] { return add_server(endpoint); });
}

void dt_ggml_serve(void (*start)(const char *, const char *, size_t, size_t, ggml_backend_dev_t *), const char *endpoint,
                   const char *cache, size_t n_threads, size_t n, ggml_backend_dev_t *devices) {
    caught(false, [&] { return start(endpoint, cache, n_threads, n, devices), true; });
}

enum ggml_status dt_ggml_compute(ggml_backend_t backend, struct ggml_cgraph *graph) {
    return caught(GGML_STATUS_ALLOC_FAILED, [&] { return ggml_backend_graph_compute(backend, graph); });
}
