/*
 * The calls of ggml that allocate in C++: under ggml's C interface `new` throws when memory runs out, and C can't catch. Each
 * function here is the call of ggml that it names, except that it returns NULL (false, GGML_STATUS_ALLOC_FAILED) where that one
 * would throw.
 *
 * Invariant: C code of this library makes these calls through here only. What ggml allocates in C says so itself, since the pinned
 * source is patched (cmake/dt_patches.cmake).
 */
#ifndef DT_WEIGHTS_GGML_CALLS_H
#define DT_WEIGHTS_GGML_CALLS_H

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "gguf.h"

#ifdef __cplusplus
extern "C" {
#endif

/* gguf_init_from_file, of the metadata alone */
struct gguf_context *dt_ggml_read_metadata(const char *path);
/* ggml_backend_dev_by_type; the first call fills ggml's registry */
ggml_backend_dev_t dt_ggml_cpu_device(void);
/* the device's ggml_backend_dev_get_extra_bufts; NULL also where it has none */
ggml_backend_buffer_type_t *dt_ggml_extra_buffer_types(ggml_backend_dev_t device);
/* ggml_backend_buft_alloc_buffer */
ggml_backend_buffer_t dt_ggml_new_buffer(ggml_backend_buffer_type_t type, size_t bytes);
/* ggml_backend_dev_buffer_from_host_ptr */
ggml_backend_buffer_t dt_ggml_wrap_memory(ggml_backend_dev_t device, void *memory, size_t bytes);
/* ggml_backend_dev_count; fills ggml's registry; 0 where memory runs out */
size_t dt_ggml_device_count(void);
/* ggml_backend_tensor_set, _get and _copy; false where the device fails */
bool dt_ggml_set(struct ggml_tensor *tensor, const void *data, size_t offset, size_t bytes);
bool dt_ggml_get(const struct ggml_tensor *tensor, void *data, size_t offset, size_t bytes);
bool dt_ggml_copy(const struct ggml_tensor *from, struct ggml_tensor *to);
/* ggml_backend_buffer_clear to zeros */
bool dt_ggml_clear(ggml_backend_buffer_t buffer);
/* ggml_backend_dev_init */
ggml_backend_t dt_ggml_new_backend(ggml_backend_dev_t device);
/* ggml_gallocr_alloc_graph */
bool dt_ggml_allocate_graph(ggml_gallocr_t allocator, struct ggml_cgraph *graph);
/* ggml_backend_rpc_add_server, given as its address: a build may lack it */
ggml_backend_reg_t dt_ggml_add_server(ggml_backend_reg_t (*add_server)(const char *endpoint), const char *endpoint);
/* likewise ggml_backend_rpc_start_server; returns on failure */
void dt_ggml_serve(void (*start)(const char *, const char *, size_t, size_t, ggml_backend_dev_t *), const char *endpoint,
                   const char *cache, size_t n_threads, size_t n, ggml_backend_dev_t *devices);
/* ggml_backend_graph_compute */
enum ggml_status dt_ggml_compute(ggml_backend_t backend, struct ggml_cgraph *graph);

#ifdef __cplusplus
}
#endif
#endif
