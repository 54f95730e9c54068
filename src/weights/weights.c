/*
 * Weights in memory: each tensor the graph asks for is checked, then either used where the file's mapping has it, or copied
 * into a buffer: the CPU's fast layouts ("extra buffer types" of ggml: repacked, AMX) for matrices, a plain one for what is
 * converted, not aligned, or read without mmap. What is for another device goes from the mapping straight into its memory.
 *
 * Peak memory stays near the file's size: tensors are copied one by one and the mapped pages of a copied tensor are dropped
 * from the process at once. Only a matrix that is also used row by row (tied embeddings) may exist twice.
 *
 * Invariant: nothing is handed to ggml before it was checked, and no buffer is asked of ggml that the machine cannot give
 * (ggml may abort on a failed allocation).
 */
#define _GNU_SOURCE /* madvise */
#include "base/amx.h"
#include "base/file_map.h"
#include "weights/ggml_calls.h"
#include "weights/gguf_file.h"

#include <assert.h>
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_EXTRA_TYPES 8
#define MAX_DEVICE_BUFFERS 128 /* devices bound the size of one buffer */
#define PROBE_TOKENS 32        /* batch of the matrix product by which a layout is asked whether it takes a tensor */
#define MIB (1024.0 * 1024.0)

/* One tensor in memory; requests for the same tensor in the same home share it. */
typedef struct placement {
    const dt_gguf_tensor *source;
    struct ggml_tensor *tensor;
    int32_t home; /* index into homes[]; HOME_MAPPED */
} placement;

enum {
    HOME_MAPPED,
    HOME_PLAIN,
    HOME_PACKED,
    HOME_FIRST_EXTRA,
    MAX_HOMES = HOME_FIRST_EXTRA + MAX_EXTRA_TYPES + MAX_DEVICE_BUFFERS
};

/* Where tensors go: the mapping, a plain buffer, our own layout for matrix products, one of ggml's fast layouts, a device. */
typedef struct home {
    ggml_backend_dev_t device;       /* NULL for those of the CPU */
    size_t planned;                  /* of a device: what its tensors take at most */
    ggml_backend_buffer_type_t type; /* NULL for the mapping */
    ggml_backend_buffer_t buffer;    /* NULL while nothing is placed there, and for the mapping */
    size_t bytes;
} home;

/* One part of the model while it is read. */
typedef struct open_part {
    int file;         /* -1 when closed */
    dt_file_map *map; /* NULL where the file is read instead */
    const unsigned char *mapping;
    char *path;
    ggml_backend_buffer_t buffer; /* ggml's view of the mapping */
} open_part;

struct dt_weights {
    struct ggml_context *context;
    placement *placements;
    int32_t n_placements;
    home homes[MAX_HOMES];
    int32_t n_homes, first_device_home;
    open_part *parts;
    int32_t n_parts;
    uint64_t bytes, n_params;
    char main_type[32];
};

/* What the steps of loading share. */
typedef struct loader {
    const dt_gguf *gguf;
    ggml_backend_dev_t device;
    dt_model_params params;
    dt_weights *weights;
    dt_error *error;
} loader;

/* ---- checks ------------------------------------------------------------------------------------- */

static const char *part_path(const loader *l, const dt_gguf_tensor *t) { return l->gguf->parts[t->part].path; }

static void format_shape(const int64_t *ne, int n_dims, char *out, size_t capacity) {
    size_t at = 0;
    out[0] = '\0';
    for (int i = 0; i < n_dims && at + 24 < capacity; i++) {
        at += (size_t)snprintf(out + at, capacity - at, "%s%" PRId64, i ? " x " : "", ne[i]);
    }
}

static int count_dims(const int64_t *ne) {
    int n = GGML_MAX_DIMS;
    while (n > 1 && ne[n - 1] == 1) {
        n--;
    }
    return n;
}

static dt_status check_shape(const loader *l, const dt_weight_request *request, const dt_gguf_tensor *t) {
    bool is_right = true;
    for (int i = 0; i < GGML_MAX_DIMS; i++) {
        is_right = is_right && t->ne[i] == (i < DT_MIN(request->n_dims, 3) ? request->ne[i] : 1);
    }
    if (is_right) {
        return DT_OK;
    }
    char found[96], wanted[96];
    format_shape(t->ne, DT_MAX(count_dims(t->ne), request->n_dims), found, sizeof found);
    format_shape(request->ne, request->n_dims, wanted, sizeof wanted);
    return dt_fail(l->error, DT_ERR_FORMAT, "%s: tensor '%s' is %s, but the model's keys call for %s", part_path(l, t), t->name,
                   found, wanted);
}

static dt_status check_type(const loader *l, const dt_weight_request *request, const dt_gguf_tensor *t) {
    const bool is_float = t->type == GGML_TYPE_F32 || t->type == GGML_TYPE_F16 || t->type == GGML_TYPE_BF16;
    if (request->use == DT_USE_ELEMENTWISE && !is_float) {
        return dt_fail(l->error, DT_ERR_FORMAT, "%s: tensor '%s' has type %s, but must be f32, f16 or bf16", part_path(l, t),
                       t->name, ggml_type_name(t->type));
    }
    /* the types with a conversion to float are those that ggml can multiply with and take rows of */
    if (t->type != GGML_TYPE_F32 && !ggml_get_type_traits(t->type)->to_float) {
        return dt_fail(l->error, DT_ERR_UNSUPPORTED,
                       "%s: tensor '%s' has type %s, which cannot be computed with; quantize the model again", part_path(l, t),
                       t->name, ggml_type_name(t->type));
    }
    return DT_OK;
}

/* A tensor of the decoder that the graph does not know would silently change what the model computes. */
static dt_status check_unused(const loader *l, const bool *is_used) {
    const dt_gguf_tensor *first = NULL;
    int64_t n_unknown = 0;
    for (int64_t i = 0; i < l->gguf->n_tensors; i++) {
        const dt_gguf_tensor *t = &l->gguf->tensors[i];
        if (is_used[i]) {
            continue;
        }
        if (strncmp(t->name, "blk.", 4) != 0 && strncmp(t->name, "output", 6) != 0) {
            dt_log(DT_LOG_DEBUG, "weights: tensor '%s' is not used", t->name);
            continue;
        }
        first = first ? first : t;
        n_unknown++;
    }
    if (!first) {
        return DT_OK;
    }
    char more[64] = "";
    if (n_unknown > 1) {
        snprintf(more, sizeof more, " and %" PRId64 " more", n_unknown - 1);
    }
    return dt_fail(l->error, DT_ERR_UNSUPPORTED, "%s has tensors that this program does not know how to compute with: '%s'%s",
                   part_path(l, first), first->name, more);
}

/* ---- planning ----------------------------------------------------------------------------------- */

/* True when the device computes `request`'s operation on a tensor like `t` held in a buffer of that type. */
static bool layout_takes(ggml_backend_dev_t device, ggml_backend_buffer_type_t type, const dt_weight_request *request,
                         const dt_gguf_tensor *t) {
    const struct ggml_init_params params = {.mem_size = 8 * ggml_tensor_overhead(), .mem_buffer = NULL, .no_alloc = true};
    struct ggml_context *context = ggml_init(params);
    ggml_backend_buffer_t buffer = dt_ggml_new_buffer(type, 0);
    bool is_taken = false;
    if (context && buffer) {
        struct ggml_tensor *weight = ggml_new_tensor(context, t->type, GGML_MAX_DIMS, t->ne), *op;
        if (request->use == DT_USE_MATMUL_ID) {
            struct ggml_tensor *input = ggml_new_tensor_3d(context, GGML_TYPE_F32, t->ne[0], 1, PROBE_TOKENS);
            op = ggml_mul_mat_id(context, weight, input, ggml_new_tensor_2d(context, GGML_TYPE_I32, 1, PROBE_TOKENS));
        } else {
            op = ggml_mul_mat(context, weight,
                              ggml_new_tensor_4d(context, GGML_TYPE_F32, t->ne[0], PROBE_TOKENS, t->ne[2], t->ne[3]));
        }
        weight->buffer = buffer;
        is_taken = ggml_backend_dev_supports_op(device, op);
    }
    if (buffer) {
        ggml_backend_buffer_free(buffer);
    }
    if (context) {
        ggml_free(context);
    }
    return is_taken;
}

/* Lists the homes of this machine in weights->homes, fast layouts in the device's order of preference. */
static void list_homes(loader *l) {
    dt_weights *w = l->weights;
    w->homes[HOME_PLAIN].type = w->homes[HOME_PACKED].type = ggml_backend_dev_buffer_type(l->device);
    w->n_homes = w->first_device_home = HOME_FIRST_EXTRA;
    if (l->params.no_extra_buffers) {
        return;
    }
    ggml_backend_buffer_type_t *types = dt_ggml_extra_buffer_types(l->device);
    for (; types && *types && w->n_homes < HOME_FIRST_EXTRA + MAX_EXTRA_TYPES; types++) {
        if (strcmp(ggml_backend_buft_name(*types), "AMX") == 0 && !dt_amx_usable()) {
            dt_log(DT_LOG_INFO, "weights: AMX is listed by this CPU but does not work; it is left out");
        } else {
            w->homes[w->n_homes++].type = *types;
        }
    }
    w->first_device_home = w->n_homes;
}

/* A buffer of the request's device with room for `t`, a new one where the last is full; -1 when there are too many. */
static int32_t device_home(dt_weights *w, const dt_weight_request *request, const dt_gguf_tensor *t) {
    ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(request->device);
    const size_t most = ggml_backend_buft_get_max_size(type), slack = 65536; /* rows padded, starts aligned */
    const size_t bytes = (size_t)t->bytes * (request->use == DT_USE_ELEMENTWISE ? 2 : 1) + slack;
    int32_t h = w->n_homes - 1;
    while (h >= w->first_device_home && w->homes[h].device != request->device) {
        h--;
    }
    if (h < w->first_device_home || w->homes[h].planned > most - DT_MIN(bytes, most)) {
        if (w->n_homes == MAX_HOMES) {
            return -1;
        }
        h = w->n_homes++;
        w->homes[h] = (home){.device = request->device, .type = type};
    }
    w->homes[h].planned += bytes;
    return h;
}

/* Our layout's name of a type, or -1. */
static int packed_type(enum ggml_type type) {
#define OF_TYPE(name) [GGML_TYPE_##name] = DT_GEMM_##name + 1,
    static const int types[GGML_TYPE_COUNT] = {DT_GEMM_TYPES(OF_TYPE)};
#undef OF_TYPE
    return types[type] - 1;
}

static bool can_pack(const loader *l, const dt_weight_request *request, const dt_gguf_tensor *t) {
    return request->packed && !l->params.no_extra_buffers && dt_gemm_kernel_auto() && packed_type(t->type) >= 0 &&
           dt_gemm_can_pack((dt_gemm_type)packed_type(t->type), t->ne[0], t->ne[1]);
}

/* On the CPU our layout, unless ggml has AMX where our kernel has not; then what else ggml has, in its order. */
static int32_t choose_home(const loader *l, const dt_weight_request *request, const dt_gguf_tensor *t) {
    if (request->device) {
        return device_home(l->weights, request, t);
    }
    if (request->use == DT_USE_MATMUL || request->use == DT_USE_MATMUL_ID) {
        int32_t best = -1;
        for (int32_t h = HOME_FIRST_EXTRA; h < l->weights->first_device_home && best < 0; h++) {
            best = layout_takes(l->device, l->weights->homes[h].type, request, t) ? h : -1;
        }
        const bool is_amx = best >= 0 && strcmp(ggml_backend_buft_name(l->weights->homes[best].type), "AMX") == 0;
        if (can_pack(l, request, t) && (!is_amx || dt_gemm_kernel_auto()->has_amx)) {
            return HOME_PACKED;
        }
        if (best >= 0) {
            return best;
        }
    }
    const bool is_converted = request->use == DT_USE_ELEMENTWISE && t->type != GGML_TYPE_F32;
    const bool is_aligned = t->offset % ggml_backend_buft_get_alignment(l->weights->homes[HOME_PLAIN].type) == 0;
    return l->params.no_mmap || is_converted || !is_aligned ? HOME_PLAIN : HOME_MAPPED;
}

/* What a tensor that can be packed is in our layout; where its bytes will lie comes later. */
static dt_gemm_matrix packed_matrix(const dt_gguf_tensor *t) {
    return (dt_gemm_matrix){(dt_gemm_type)packed_type(t->type), (int32_t)t->ne[0], (int32_t)t->ne[1], NULL};
}

static int64_t packed_bytes(const dt_gguf_tensor *t) {
    const dt_gemm_matrix m = packed_matrix(t);
    return (int64_t)dt_gemm_matrix_bytes(m.type, m.n_in, m.n_out);
}

/* Finds or adds the placement of `t` in `home` with `type`. Capacity for one per request was allocated. */
static placement *place(dt_weights *w, const dt_gguf_tensor *t, int32_t home_index, enum ggml_type type) {
    for (int32_t i = 0; i < w->n_placements; i++) {
        placement *p = &w->placements[i];
        if (p->source == t && p->home == home_index && p->tensor->type == type) {
            return p;
        }
    }
    struct ggml_tensor *tensor = home_index == HOME_PACKED ? ggml_new_tensor_1d(w->context, type, packed_bytes(t))
                                                           : ggml_new_tensor(w->context, type, GGML_MAX_DIMS, t->ne);
    ggml_set_name(tensor, t->name);
    placement *p = &w->placements[w->n_placements++];
    *p = (placement){.source = t, .tensor = tensor, .home = home_index};
    return p;
}

static dt_status plan_request(loader *l, const dt_weight_request *request, bool *is_used) {
    *request->out = NULL;
    if (request->packed) {
        *request->packed = (dt_gemm_matrix){0};
    }
    const dt_gguf_tensor *t = dt_gguf_find(l->gguf, request->name);
    if (!t && request->required) {
        return dt_fail(l->error, DT_ERR_FORMAT, "%s lacks the tensor '%s'; convert the model again", dt_gguf_path(l->gguf),
                       request->name);
    }
    if (!t) {
        return DT_OK;
    }
    dt_status status = check_shape(l, request, t);
    if (!status) {
        status = check_type(l, request, t);
    }
    if (status) {
        return status;
    }
    const int32_t home_index = choose_home(l, request, t);
    if (home_index < 0) {
        return dt_fail(l->error, DT_ERR_UNSUPPORTED,
                       "the weights do not fit into %d buffers of the device %s; give it fewer layers (-ngl)", MAX_DEVICE_BUFFERS,
                       dt_device_name(request->device));
    }
    if (request->device && (request->use == DT_USE_MATMUL || request->use == DT_USE_MATMUL_ID) &&
        !layout_takes(request->device, l->weights->homes[home_index].type, request, t)) {
        return dt_fail(
            l->error, DT_ERR_UNSUPPORTED,
            "the device %s can't compute with %s weights (tensor '%s'); quantize the model to Q8_0, Q4_0 or Q4_K_M, or leave "
            "the layer to the CPU (-ngl)",
            dt_device_name(request->device), ggml_type_name(t->type), t->name);
    }
    const enum ggml_type type = home_index == HOME_PACKED            ? GGML_TYPE_I8
                                : request->use == DT_USE_ELEMENTWISE ? GGML_TYPE_F32
                                                                     : t->type;
    *request->out = place(l->weights, t, home_index, type)->tensor;
    if (home_index == HOME_PACKED) {
        assert(request->packed != NULL); /* only those are packed that can be told */
        *request->packed = packed_matrix(t);
    }
    is_used[t - l->gguf->tensors] = true;
    return DT_OK;
}

/* Sums up what is used, each tensor once; the main type is that of most bytes in matrices. */
static void sum_up(loader *l, const bool *is_used) {
    dt_weights *w = l->weights;
    uint64_t type_bytes[GGML_TYPE_COUNT] = {0};
    enum ggml_type main_type = GGML_TYPE_F32;
    for (int64_t i = 0; i < l->gguf->n_tensors; i++) {
        const dt_gguf_tensor *t = &l->gguf->tensors[i];
        if (!is_used[i]) {
            continue;
        }
        w->bytes += t->bytes;
        w->n_params += (uint64_t)(t->ne[0] * t->ne[1] * t->ne[2] * t->ne[3]);
        if (count_dims(t->ne) > 1) {
            type_bytes[t->type] += t->bytes;
        }
        if (type_bytes[t->type] > type_bytes[main_type]) {
            main_type = t->type;
        }
    }
    snprintf(w->main_type, sizeof w->main_type, "%s", ggml_type_name(main_type));
    for (char *c = w->main_type; *c; c++) {
        *c = (char)toupper((unsigned char)*c);
    }
}

static dt_status plan(loader *l, const dt_weight_request *requests, int32_t n_requests) {
    dt_weights *w = l->weights;
    const size_t n = (size_t)DT_MAX(n_requests, 1);
    bool *is_used = calloc((size_t)DT_MAX(l->gguf->n_tensors, 1), sizeof *is_used);
    w->placements = calloc(n, sizeof *w->placements);
    w->context = ggml_init((struct ggml_init_params){.mem_size = n * ggml_tensor_overhead(), .mem_buffer = NULL, .no_alloc = true});
    dt_status status = DT_OK;
    if (!is_used || !w->placements || !w->context) {
        status = dt_fail_memory(l->error, n * sizeof *w->placements, "the table of weights");
    }
    list_homes(l);
    for (int32_t i = 0; i < n_requests && !status; i++) {
        status = plan_request(l, &requests[i], is_used);
    }
    if (!status) {
        status = check_unused(l, is_used);
    }
    if (!status) {
        sum_up(l, is_used);
    }
    free(is_used);
    return status;
}

/* ---- files -------------------------------------------------------------------------------------- */

static dt_status open_part_file(loader *l, int32_t index) {
    const dt_gguf_part *part = &l->gguf->parts[index];
    open_part *open_here = &l->weights->parts[index];
    struct stat info;
    open_here->file = open(part->path, O_RDONLY | O_CLOEXEC);
    if (open_here->file < 0 || fstat(open_here->file, &info) != 0) {
        return dt_fail(l->error, DT_ERR_IO, "cannot open the model file %s: %s", part->path, strerror(errno));
    }
    if ((uint64_t)info.st_size != part->bytes) {
        return dt_fail(l->error, DT_ERR_IO, "%s changed while it was read", part->path);
    }
    if (l->params.no_mmap) {
        return DT_OK;
    }
    open_here->path = strdup(part->path);
    open_here->map = dt_file_map_open(open_here->file, (size_t)part->bytes);
    if (!open_here->map || !open_here->path) {
        return dt_fail(l->error, DT_ERR_IO, "cannot map the model file %s: %s", part->path, strerror(errno));
    }
    open_here->mapping = dt_file_map_bytes(open_here->map);
    void *mapping = (void *)(uintptr_t)open_here->mapping; /* neither call writes */
    posix_madvise(mapping, (size_t)part->bytes, POSIX_MADV_WILLNEED);
    open_here->buffer = dt_ggml_wrap_memory(l->device, mapping, (size_t)part->bytes);
    if (!open_here->buffer) {
        return dt_fail(l->error, DT_ERR_MEMORY, "out of memory for ggml's view of the mapped model %s", part->path);
    }
    ggml_backend_buffer_set_usage(open_here->buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    return DT_OK;
}

static dt_status open_files(loader *l) {
    dt_weights *w = l->weights;
    w->parts = calloc((size_t)l->gguf->n_parts, sizeof *w->parts);
    if (!w->parts) {
        return dt_fail_memory(l->error, (size_t)l->gguf->n_parts * sizeof *w->parts, "the parts of a model");
    }
    w->n_parts = l->gguf->n_parts;
    for (int32_t i = 0; i < w->n_parts; i++) {
        w->parts[i].file = -1;
    }
    dt_status status = DT_OK;
    for (int32_t i = 0; i < w->n_parts && !status; i++) {
        status = open_part_file(l, i);
    }
    return status;
}

static void close_files(dt_weights *w) {
    for (int32_t i = 0; i < w->n_parts; i++) {
        if (w->parts[i].file >= 0) {
            close(w->parts[i].file);
        }
        w->parts[i].file = -1;
    }
}

/* ---- buffers ------------------------------------------------------------------------------------ */

/* Memory that can be taken without swapping, SIZE_MAX where the system does not tell. */
static size_t available_memory(void) {
    unsigned long long kib = 0;
    bool is_known = false;
    char line[128];
    FILE *file = fopen("/proc/meminfo", "r");
    if (!file) {
        return SIZE_MAX;
    }
    while (!is_known && fgets(line, sizeof line, file)) {
        is_known = sscanf(line, "MemAvailable: %llu kB", &kib) == 1;
    }
    fclose(file);
    return is_known ? (size_t)kib * 1024 : SIZE_MAX;
}

static size_t padded_bytes(const home *where, const struct ggml_tensor *tensor) {
    return DT_ROUND_UP(ggml_backend_buft_get_alloc_size(where->type, tensor), ggml_backend_buft_get_alignment(where->type));
}

/* What all buffers of a device need must be free there. Devices that do not know say 0. */
static dt_status check_devices(const loader *l) {
    const dt_weights *w = l->weights;
    for (int32_t h = w->first_device_home; h < w->n_homes; h++) {
        size_t needed = 0, available = 0, total = 0;
        for (int32_t i = w->first_device_home; i < w->n_homes; i++) {
            needed += w->homes[i].device == w->homes[h].device ? w->homes[i].bytes : 0;
        }
        ggml_backend_dev_memory(w->homes[h].device, &available, &total);
        if (total > 0 && needed > available) {
            return dt_fail(l->error, DT_ERR_MEMORY,
                           "the layers given to device %s need %.0f MiB there, but only %.0f MiB are free; give it fewer (-ngl)",
                           dt_device_name(w->homes[h].device), (double)needed / MIB, (double)available / MIB);
        }
    }
    return DT_OK;
}

static dt_status allocate_homes(loader *l) {
    dt_weights *w = l->weights;
    size_t total = 0;
    for (int32_t i = 0; i < w->n_placements; i++) {
        const placement *p = &w->placements[i];
        if (p->home == HOME_MAPPED) {
            w->homes[HOME_MAPPED].bytes += p->source->bytes;
            continue;
        }
        const size_t bytes = padded_bytes(&w->homes[p->home], p->tensor);
        w->homes[p->home].bytes += bytes;
        total += p->home < w->first_device_home ? bytes : 0;
    }
    const size_t available = available_memory();
    if (total > available) {
        return dt_fail(l->error, DT_ERR_MEMORY,
                       "the weights of %s need %.0f MiB of memory, but only %.0f MiB are available; close other programs or use a "
                       "smaller quantization",
                       dt_gguf_path(l->gguf), (double)total / MIB, (double)available / MIB);
    }
    const dt_status fits = check_devices(l);
    if (fits != DT_OK) {
        return fits;
    }
    for (int32_t h = HOME_MAPPED; h < w->n_homes; h++) {
        home *where = &w->homes[h];
        if (where->bytes == 0) {
            continue;
        }
        dt_log(DT_LOG_DEBUG, "weights: %.2f MiB %s", (double)where->bytes / MIB,
               h == HOME_MAPPED   ? "used where the file is mapped"
               : h == HOME_PACKED ? "packed for our own products"
                                  : ggml_backend_buft_name(where->type));
        if (h == HOME_MAPPED) {
            continue;
        }
        where->buffer = dt_ggml_new_buffer(where->type, where->bytes);
        if (!where->buffer) {
            return dt_fail_memory(l->error, where->bytes, "weights");
        }
        if (!where->device) {
            dt_use_large_pages(ggml_backend_buffer_get_base(where->buffer), where->bytes);
        }
        ggml_backend_buffer_set_usage(where->buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    }
    return DT_OK;
}

/* The mapped pages that lie wholly inside a copied tensor need not stay in memory. */
static void drop_pages(const open_part *part, const dt_gguf_tensor *t) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t begin = DT_ROUND_UP((size_t)t->offset, page), end = (size_t)(t->offset + t->bytes) / page * page;
    if (begin < end) {
        madvise((void *)(uintptr_t)(part->mapping + begin), end - begin, MADV_DONTNEED);
    }
}

static void convert_to_f32(const dt_gguf_tensor *t, const void *data, float *out) {
    const int64_t n = t->ne[0] * t->ne[1] * t->ne[2] * t->ne[3];
    if (t->type == GGML_TYPE_F16) {
        ggml_fp16_to_fp32_row(data, out, n);
    } else {
        ggml_bf16_to_fp32_row(data, out, n);
    }
}

/* Copies one tensor into its buffer, converted where that differs from the file. */
static dt_status fill(const loader *l, const placement *p) {
    const dt_gguf_tensor *t = p->source;
    const open_part *part = &l->weights->parts[t->part];
    const bool is_converted = p->tensor->type != t->type;
    const bool is_device = p->home >= l->weights->first_device_home;
    bool is_set = true;
    void *staging = NULL;
    const void *data = part->mapping ? part->mapping + t->offset : NULL;
    if (!data && p->home == HOME_PLAIN && !is_converted) {
        return dt_gguf_read(l->gguf, t, part->file, 0, t->bytes, p->tensor->data, l->error);
    }
    if (!data) {
        staging = malloc((size_t)t->bytes);
        if (!staging) {
            return dt_fail_memory(l->error, (size_t)t->bytes, "reading a tensor");
        }
        const dt_status status = dt_gguf_read(l->gguf, t, part->file, 0, t->bytes, staging, l->error);
        if (status) {
            free(staging);
            return status;
        }
        data = staging;
    }
    if (is_converted && is_device) {
        float *converted = malloc(ggml_nbytes(p->tensor));
        if (!converted) {
            free(staging);
            return dt_fail_memory(l->error, ggml_nbytes(p->tensor), "reading a tensor");
        }
        convert_to_f32(t, data, converted);
        is_set = dt_ggml_set(p->tensor, converted, 0, ggml_nbytes(p->tensor));
        free(converted);
    } else if (is_converted) {
        convert_to_f32(t, data, p->tensor->data);
    } else {
        is_set = dt_ggml_set(p->tensor, data, 0, (size_t)t->bytes);
    }
    if (part->mapping) {
        drop_pages(part, t);
    }
    free(staging);
    return is_set ? DT_OK
                  : dt_fail(l->error, DT_ERR_COMPUTE, "the device did not take tensor '%s' of %s", t->name, part_path(l, t));
}

/* ---- packing ------------------------------------------------------------------------------------ */

#define PACK_ROWS 64 /* read and packed at once; a multiple of DT_GEMM_ROWS */
#define MAX_PACK_THREADS 64

/* Work that threads share: placements one after the other, of each PACK_ROWS rows at a time. */
typedef struct packing {
    const loader *l;
    pthread_mutex_t mutex;
    int32_t placement, row; /* what is taken next */
    int32_t *rows_left;     /* [n_placements] of those not yet packed */
    dt_status status;       /* the first failure, which ends all */
    dt_error error;
} packing;

typedef struct packing_range {
    int32_t placement, row, n;
} packing_range;

static bool take_range(packing *work, packing_range *range) {
    const dt_weights *w = work->l->weights;
    pthread_mutex_lock(&work->mutex);
    while (work->placement < w->n_placements && (w->placements[work->placement].home != HOME_PACKED ||
                                                 work->row >= (int32_t)w->placements[work->placement].source->ne[1])) {
        work->placement++;
        work->row = 0;
    }
    const bool is_taken = work->placement < w->n_placements && work->status == DT_OK;
    if (is_taken) {
        const int32_t left = (int32_t)w->placements[work->placement].source->ne[1] - work->row;
        *range = (packing_range){work->placement, work->row, DT_MIN(PACK_ROWS, left)};
        work->row += range->n;
    }
    pthread_mutex_unlock(&work->mutex);
    return is_taken;
}

/* Where a placement was packed to its end, its pages of the mapping are dropped. */
static void end_range(packing *work, const packing_range *range, dt_status status, const dt_error *error) {
    const placement *p = &work->l->weights->placements[range->placement];
    const open_part *part = &work->l->weights->parts[p->source->part];
    pthread_mutex_lock(&work->mutex);
    if (status != DT_OK && work->status == DT_OK) {
        work->status = status;
        work->error = *error;
    }
    work->rows_left[range->placement] -= range->n;
    const bool is_done = work->rows_left[range->placement] == 0;
    pthread_mutex_unlock(&work->mutex);
    if (is_done && part->mapping) {
        drop_pages(part, p->source);
    }
}

static dt_status pack_range(const loader *l, const packing_range *range, void **staging, dt_error *error) {
    const placement *p = &l->weights->placements[range->placement];
    const dt_gguf_tensor *t = p->source;
    const open_part *part = &l->weights->parts[t->part];
    const dt_gemm_matrix m = packed_matrix(t);
    const size_t row_bytes = dt_gemm_row_bytes(m.type, m.n_in), at = (size_t)range->row * row_bytes;
    const char *rows = part->mapping ? (const char *)part->mapping + t->offset + at : NULL;
    if (!rows) {
        free(*staging);
        *staging = malloc((size_t)range->n * row_bytes);
        if (!*staging) {
            return dt_fail_memory(error, (size_t)range->n * row_bytes, "reading a tensor");
        }
        const dt_status status = dt_gguf_read(l->gguf, t, part->file, at, (size_t)range->n * row_bytes, *staging, error);
        if (status) {
            return status;
        }
        rows = *staging;
    }
    for (int32_t r = 0; r < range->n; r += DT_GEMM_ROWS) {
        dt_gemm_pack_rows(&m, p->tensor->data, range->row + r, rows + (size_t)r * row_bytes);
    }
    return DT_OK;
}

static void *pack_ranges(void *user) {
    packing *work = user;
    packing_range range;
    void *staging = NULL;
    while (take_range(work, &range)) {
        dt_error error = {0};
        end_range(work, &range, pack_range(work->l, &range, &staging, &error), &error);
    }
    free(staging);
    return NULL;
}

/* Packs all that goes into our own layout, on all cores; a thread that cannot be started is one less. */
static dt_status pack_all(loader *l) {
    const dt_weights *w = l->weights;
    packing work = {.l = l, .rows_left = calloc((size_t)DT_MAX(w->n_placements, 1), sizeof *work.rows_left)};
    if (!work.rows_left) {
        return dt_fail_memory(l->error, (size_t)w->n_placements * sizeof *work.rows_left, "the table of weights");
    }
    for (int32_t i = 0; i < w->n_placements; i++) {
        work.rows_left[i] = (int32_t)w->placements[i].source->ne[1];
    }
    pthread_t threads[MAX_PACK_THREADS];
    const int32_t n_wanted = w->homes[HOME_PACKED].bytes > 0 ? DT_MIN(dt_physical_cores(), MAX_PACK_THREADS) - 1 : 0;
    int32_t n_threads = 0;
    pthread_mutex_init(&work.mutex, NULL);
    while (n_threads < n_wanted && pthread_create(&threads[n_threads], NULL, pack_ranges, &work) == 0) {
        n_threads++;
    }
    pack_ranges(&work);
    for (int32_t i = 0; i < n_threads; i++) {
        pthread_join(threads[i], NULL);
    }
    pthread_mutex_destroy(&work.mutex);
    free(work.rows_left);
    if (work.status != DT_OK && l->error) {
        *l->error = work.error;
    }
    return work.status;
}

static dt_status fill_homes(loader *l) {
    dt_weights *w = l->weights;
    size_t used[MAX_HOMES] = {0};
    for (int32_t i = 0; i < w->n_placements; i++) {
        placement *p = &w->placements[i];
        home *where = &w->homes[p->home];
        const open_part *part = &w->parts[p->source->part];
        ggml_backend_buffer_t buffer = p->home == HOME_MAPPED ? part->buffer : where->buffer;
        char *address = p->home == HOME_MAPPED ? (char *)(uintptr_t)part->mapping + p->source->offset
                                               : (char *)ggml_backend_buffer_get_base(buffer) + used[p->home];
        if (ggml_backend_tensor_alloc(buffer, p->tensor, address) != GGML_STATUS_SUCCESS) {
            return dt_fail(l->error, DT_ERR_INTERNAL, "ggml does not take tensor '%s' of %s", p->source->name,
                           part_path(l, p->source));
        }
        if (p->home == HOME_MAPPED) {
            continue;
        }
        used[p->home] += padded_bytes(where, p->tensor);
        const dt_status status = p->home == HOME_PACKED ? DT_OK : fill(l, p);
        if (status) {
            return status;
        }
    }
    return pack_all(l);
}

/* ---- the public part ---------------------------------------------------------------------------- */

dt_status dt_weights_load(const dt_gguf *gguf, ggml_backend_dev_t cpu, const dt_model_params *params,
                          const dt_weight_request *requests, int32_t n_requests, dt_weights **out, dt_error *error) {
    *out = NULL;
    loader l = {.gguf = gguf, .device = cpu, .weights = calloc(1, sizeof(dt_weights)), .error = error};
    if (!l.weights) {
        return dt_fail_memory(error, sizeof(dt_weights), "the weights");
    }
    if (params) {
        l.params = *params;
    }
    dt_status status = plan(&l, requests, n_requests);
    if (!status) {
        status = open_files(&l);
    }
    if (!status) {
        status = allocate_homes(&l);
    }
    if (!status) {
        status = fill_homes(&l);
    }
    if (!status) {
        status = dt_weights_check(l.weights, error);
    }
    close_files(l.weights);
    for (int32_t i = 0; i < n_requests && !status; i++) {
        if (requests[i].packed && requests[i].packed->n_out > 0) {
            requests[i].packed->packed = (*requests[i].out)->data;
        }
    }
    if (status) {
        for (int32_t i = 0; i < n_requests; i++) {
            *requests[i].out = NULL;
        }
        dt_weights_free(l.weights);
        return status;
    }
    *out = l.weights;
    return DT_OK;
}

void dt_weights_free(dt_weights *weights) {
    if (!weights) {
        return;
    }
    close_files(weights);
    for (int32_t h = 0; h < weights->n_homes; h++) {
        if (weights->homes[h].buffer) {
            ggml_backend_buffer_free(weights->homes[h].buffer);
        }
    }
    for (int32_t i = 0; i < weights->n_parts; i++) {
        if (weights->parts[i].buffer) {
            ggml_backend_buffer_free(weights->parts[i].buffer);
        }
        dt_file_map_close(weights->parts[i].map);
        free(weights->parts[i].path);
    }
    if (weights->context) {
        ggml_free(weights->context);
    }
    free(weights->parts);
    free(weights->placements);
    free(weights);
}

dt_status dt_weights_check(const dt_weights *weights, dt_error *error) {
    for (int32_t i = 0; i < weights->n_parts; i++) {
        if (weights->parts[i].map && dt_file_map_broken(weights->parts[i].map)) {
            return dt_fail(
                error, DT_ERR_IO,
                "the model file %s became shorter, or can't be read any more, while it was in use; put it back and start "
                "again (a new file goes there under another name first, then is renamed)",
                weights->parts[i].path);
        }
    }
    return DT_OK;
}

uint64_t dt_weights_bytes(const dt_weights *weights) { return weights->bytes; }

uint64_t dt_weights_n_params(const dt_weights *weights) { return weights->n_params; }

const char *dt_weights_main_type(const dt_weights *weights) { return weights->main_type; }
