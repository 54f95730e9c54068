/*
 * Quantizing a GGUF file, by libllama's quantizer.
 *
 * What ggml or libllama would abort on is checked before. Invariants: the output appears under its name only when it is whole; a
 * tensor that is quantized already keeps its type, so that weights repacked from another format stay as exact as they are.
 */
#define _GNU_SOURCE /* strcasecmp, statvfs */
#include "base/open_locked.h"
#include "base/replace_file.h"
#include "weights/gguf_file.h"

#include "llama.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

/* Those that need no importance matrix. */
static const struct {
    const char *name;
    enum llama_ftype ftype;
} types[] = {
    {"Q4_0", LLAMA_FTYPE_MOSTLY_Q4_0},     {"Q4_1", LLAMA_FTYPE_MOSTLY_Q4_1},     {"Q5_0", LLAMA_FTYPE_MOSTLY_Q5_0},
    {"Q5_1", LLAMA_FTYPE_MOSTLY_Q5_1},     {"Q8_0", LLAMA_FTYPE_MOSTLY_Q8_0},     {"Q2_K", LLAMA_FTYPE_MOSTLY_Q2_K},
    {"Q3_K_S", LLAMA_FTYPE_MOSTLY_Q3_K_S}, {"Q3_K_M", LLAMA_FTYPE_MOSTLY_Q3_K_M}, {"Q3_K_L", LLAMA_FTYPE_MOSTLY_Q3_K_L},
    {"Q4_K_S", LLAMA_FTYPE_MOSTLY_Q4_K_S}, {"Q4_K_M", LLAMA_FTYPE_MOSTLY_Q4_K_M}, {"Q5_K_S", LLAMA_FTYPE_MOSTLY_Q5_K_S},
    {"Q5_K_M", LLAMA_FTYPE_MOSTLY_Q5_K_M}, {"Q6_K", LLAMA_FTYPE_MOSTLY_Q6_K},     {"IQ4_NL", LLAMA_FTYPE_MOSTLY_IQ4_NL},
    {"IQ4_XS", LLAMA_FTYPE_MOSTLY_IQ4_XS}, {"F16", LLAMA_FTYPE_MOSTLY_F16},       {"BF16", LLAMA_FTYPE_MOSTLY_BF16},
    {"F32", LLAMA_FTYPE_ALL_F32},
};
#define MAX_BUFFER ((size_t)512 << 20)  /* libllama's 8 GiB are more than small machines have */
#define CHECKED_AT_ONCE ((size_t)65536) /* numbers; whole blocks of every type */
#define N_TYPES (sizeof types / sizeof types[0])

const char *dt_quantize_type(size_t i) { return i < N_TYPES ? types[i].name : NULL; }

static bool find_type(const char *name, enum llama_ftype *out) {
    for (size_t i = 0; i < N_TYPES; i++) {
        if (strcasecmp(types[i].name, name) == 0) {
            *out = types[i].ftype;
            return true;
        }
    }
    return false;
}

/* ---- what libllama says meanwhile --------------------------------------------------------------- */

typedef struct listener {
    const dt_quantize_params *params;
    char line[512];
    char last_error[512];
    int reason; /* errno when it was said */
} listener;

/* A tensor's line begins with "[ 12/ 291] " and ends when the tensor is done. */
static void listen(enum ggml_log_level level, const char *text, void *user) {
    listener *l = user;
    if (level == GGML_LOG_LEVEL_ERROR && text[0] != '\n') {
        l->reason = errno;
        snprintf(l->last_error, sizeof l->last_error, "%s", text);
    }
    const size_t used = strlen(l->line);
    snprintf(l->line + used, sizeof l->line - used, "%s", text);
    if (strchr(text, '\n') != NULL) {
        int done = 0, total = 0;
        if (l->params->progress != NULL && sscanf(l->line, "[ %d / %d ]", &done, &total) == 2) {
            l->params->progress(done, total, l->params->progress_user);
        }
        l->line[0] = 0;
    }
}

/* ---- checks ------------------------------------------------------------------------------------- */

static dt_status check_number(const dt_gguf *gguf, const char *architecture, const char *suffix, bool required, uint32_t low,
                              uint32_t high, dt_error *error) {
    char key[128];
    uint32_t value = low;
    snprintf(key, sizeof key, "%.64s.%s", architecture, suffix);
    const dt_status status = dt_gguf_u32(gguf, key, required, &value, error);
    if (status == DT_OK && (value < low || value > high)) {
        return dt_fail(error, DT_ERR_FORMAT, "%s: %s is %u, but must be from %u to %u", dt_gguf_path(gguf), key, value, low, high);
    }
    return status;
}

static dt_status check_input(const dt_gguf *gguf, dt_error *error) {
    const char *architecture = NULL;
    dt_status status = dt_gguf_string(gguf, "general.architecture", true, &architecture, error);
    if (status == DT_OK) {
        status = check_number(gguf, architecture, "block_count", true, 1, 512, error);
    }
    if (status == DT_OK) {
        status = check_number(gguf, architecture, "expert_count", false, 0, 512, error);
    }
    if (status == DT_OK) {
        uint32_t n_experts = 0;
        char key[128];
        snprintf(key, sizeof key, "%.64s.expert_count", architecture);
        status = dt_gguf_u32(gguf, key, false, &n_experts, error);
        if (status == DT_OK) {
            status = check_number(gguf, architecture, "expert_used_count", n_experts > 0, n_experts > 0, n_experts, error);
        }
    }
    return status;
}

static bool ends_in(const char *name, const char *end) {
    const size_t n = strlen(name), n_end = strlen(end);
    return n >= n_end && strcmp(name + n - n_end, end) == 0;
}

/* Whether libllama quantizes a tensor that isn't yet; of the kinds it leaves alone, those that the families here have. */
static bool is_quantizable(const dt_gguf_tensor *t) {
    return !ggml_is_quantized(t->type) && t->ne[1] > 1 && ends_in(t->name, ".weight") && !ends_in(t->name, "_norm.weight") &&
           !ends_in(t->name, "ffn_gate_inp.weight");
}

/* Refuses a model of whose matrices none is left to quantize: its copy would be the same weights under another type's name. */
static dt_status check_rest(const dt_gguf *gguf, dt_error *error) {
    uint64_t bytes[GGML_TYPE_COUNT] = {0};
    enum ggml_type most = GGML_TYPE_F32; /* of the quantized ones; F32: there is none */
    for (int64_t i = 0; i < gguf->n_tensors; i++) {
        const dt_gguf_tensor *t = &gguf->tensors[i];
        if (ggml_is_quantized(t->type)) {
            bytes[t->type] += (uint64_t)t->bytes;
            most = bytes[t->type] > bytes[most] ? t->type : most;
        } else if (is_quantizable(t)) {
            return DT_OK;
        }
    }
    if (most == GGML_TYPE_F32) {
        return DT_OK;
    }
    return dt_fail(error, DT_ERR_ARGUMENT,
                   "%s is quantized already (%s), and what that lost would not come back; give the model in F16, BF16 or F32",
                   dt_gguf_path(gguf), ggml_type_name(most));
}

/* Reads `n` numbers of a tensor from the `from`-th on, whole blocks of its type, by way of `bytes`. */
static dt_status read_numbers(const dt_gguf *gguf, const dt_gguf_tensor *t, int file, uint64_t from, size_t n, void *bytes,
                              float *out, dt_error *error) {
    const uint64_t per_block = (uint64_t)ggml_blck_size(t->type), block_bytes = ggml_type_size(t->type);
    const bool is_plain = t->type == GGML_TYPE_F32;
    const dt_status status =
        dt_gguf_read(gguf, t, file, from / per_block * block_bytes, n / per_block * block_bytes, is_plain ? out : bytes, error);
    if (status == DT_OK && !is_plain) {
        ggml_get_type_traits(t->type)->to_float(bytes, out, (int64_t)n);
    }
    return status;
}

static dt_status check_value(const dt_gguf *gguf, const dt_gguf_tensor *t, const char *type, float largest, float value,
                             dt_error *error) {
    if (!dt_is_finite(value)) {
        return dt_fail(error, DT_ERR_FORMAT,
                       "%s: tensor '%s' holds %f, which is no number that a model computes with; fetch or convert the model again",
                       gguf->parts[t->part].path, t->name, (double)value);
    }
    if (fabsf(value) > largest) {
        return dt_fail(error, DT_ERR_ARGUMENT, "%s: tensor '%s' holds %g, and %s ends at 65504; BF16 and F32 hold it",
                       gguf->parts[t->part].path, t->name, (double)value, type);
    }
    return DT_OK;
}

static dt_status check_tensor(const dt_gguf *gguf, const dt_gguf_tensor *t, int file, const char *type, float largest, void *bytes,
                              float *numbers, dt_error *error) {
    uint64_t left = (uint64_t)t->ne[0] * (uint64_t)t->ne[1] * (uint64_t)t->ne[2] * (uint64_t)t->ne[3], from = 0;
    dt_status status = DT_OK;
    while (left > 0 && status == DT_OK) {
        const size_t n = left < CHECKED_AT_ONCE ? (size_t)left : CHECKED_AT_ONCE;
        status = read_numbers(gguf, t, file, from, n, bytes, numbers, error);
        for (size_t i = 0; i < n && status == DT_OK; i++) {
            status = check_value(gguf, t, type, largest, numbers[i], error);
        }
        from += n;
        left -= n;
    }
    return status;
}

/* Refuses what libllama ends at, with a line that ggml prints: infinite numbers and those that are none, and numbers past what halves
 * hold, which F16 and the scales of quantized blocks are. */
static dt_status check_numbers(const dt_gguf *gguf, const dt_quantize_params *params, enum llama_ftype ftype, dt_error *error) {
    const float halves = ftype == LLAMA_FTYPE_ALL_F32 || ftype == LLAMA_FTYPE_MOSTLY_BF16 ? INFINITY : 65504.0f;
    float *numbers = malloc(2 * CHECKED_AT_ONCE * sizeof *numbers); /* no type takes more bytes than F32 */
    dt_status status = numbers != NULL ? DT_OK : dt_fail_memory(error, 2 * CHECKED_AT_ONCE * sizeof *numbers, "a tensor's numbers");
    for (int32_t part = 0; part < gguf->n_parts && status == DT_OK; part++) {
        const int file = open(gguf->parts[part].path, O_RDONLY | O_CLOEXEC);
        if (file < 0) {
            status = dt_fail(error, DT_ERR_IO, "cannot open %s: %s", gguf->parts[part].path, strerror(errno));
        }
        for (int64_t i = 0; i < gguf->n_tensors && status == DT_OK; i++) {
            const dt_gguf_tensor *t = &gguf->tensors[i];
            if (t->part != part || (t->type != GGML_TYPE_F32 && ggml_get_type_traits(t->type)->to_float == NULL)) {
                continue;
            }
            if (params->progress != NULL) {
                params->progress(0, gguf->n_tensors, params->progress_user);
            }
            status = check_tensor(gguf, t, file, params->type, is_quantizable(t) ? halves : INFINITY, numbers + CHECKED_AT_ONCE,
                                  numbers, error);
        }
        if (file >= 0) {
            close(file);
        }
    }
    free(numbers);
    return status;
}

static bool is_same_file(const char *a, const char *b) {
    struct stat of_a, of_b;
    return stat(a, &of_a) == 0 && stat(b, &of_b) == 0 && of_a.st_dev == of_b.st_dev && of_a.st_ino == of_b.st_ino;
}

/* ---- the work ----------------------------------------------------------------------------------- */

/* Patterns that keep the type of each tensor that is quantized already; the last one has a NULL pattern. *out_names holds their
 * memory. NULL when there is none, or no memory (*out_failed). */
static struct llama_model_tensor_override *keep_quantized(const dt_gguf *gguf, char **out_names, bool *out_failed) {
    int64_t n = 0;
    for (int64_t i = 0; i < gguf->n_tensors; i++) {
        n += ggml_is_quantized(gguf->tensors[i].type);
    }
    *out_names = NULL;
    *out_failed = false;
    if (n == 0) {
        return NULL;
    }
    const size_t name_bytes = 2 * GGML_MAX_NAME + 3; /* each character escaped, ^ and $ */
    struct llama_model_tensor_override *keep = calloc((size_t)n + 1, sizeof *keep);
    char *name = *out_names = calloc((size_t)n, name_bytes);
    if (keep == NULL || name == NULL) {
        free(keep);
        free(name);
        *out_names = NULL;
        *out_failed = true;
        return NULL;
    }
    n = 0;
    for (int64_t i = 0; i < gguf->n_tensors; i++) {
        if (!ggml_is_quantized(gguf->tensors[i].type)) {
            continue;
        }
        char *to = name;
        *to++ = '^';
        for (const char *from = gguf->tensors[i].name; *from != 0; from++) {
            if (strchr(".[](){}*+?|^$\\", *from) != NULL) {
                *to++ = '\\';
            }
            *to++ = *from;
        }
        *to = '$';
        keep[n].pattern = name;
        keep[n++].type = gguf->tensors[i].type;
        name += name_bytes;
    }
    return keep;
}

/* Why it went wrong, from what libllama said and what the system says. */
static dt_status tell_failure(const dt_quantize_params *params, const char *temporary, listener *l, dt_error *error) {
    struct statvfs disk;
    const bool is_full = l->reason == ENOSPC || l->reason == EDQUOT || (statvfs(temporary, &disk) == 0 && disk.f_bavail == 0);
    if (is_full || l->reason == EFBIG) {
        return dt_fail(error, DT_ERR_IO, "%s can't be written: %s", params->output, strerror(is_full ? ENOSPC : EFBIG));
    }
    l->last_error[strcspn(l->last_error, "\n")] = 0;
    if (strstr(l->last_error, "bad_alloc") != NULL || strstr(l->last_error, strerror(ENOMEM)) != NULL ||
        strstr(l->last_error, strerror(EAGAIN)) != NULL) { /* the last one: of a thread */
        return dt_fail(error, DT_ERR_MEMORY, "out of memory while %s was quantized; close other programs, or use fewer threads",
                       params->input);
    }
    if (l->reason == EMFILE || l->reason == ENFILE) { /* libllama says at most "iostream error" */
        return dt_fail(error, DT_ERR_IO, "%s could not be quantized: %s; raise the limit (ulimit -n)", params->input,
                       strerror(l->reason));
    }
    return dt_fail(error, DT_ERR_IO, "%s could not be quantized to %s: %s", params->input, params->type,
                   l->last_error[0] != 0 ? l->last_error : "no reason given");
}

/* ---- threads ------------------------------------------------------------------------------------ */

/* Bytes that libllama needs while its threads run: the mapped input, one tensor's buffers and what they grow from, the rest. */
static size_t room_for(const dt_gguf *gguf) {
    uint64_t room = (uint64_t)64 << 20, most = 0;
    for (int32_t i = 0; i < gguf->n_parts; i++) {
        room += gguf->parts[i].bytes;
    }
    for (int64_t i = 0; i < gguf->n_tensors; i++) {
        const dt_gguf_tensor *t = &gguf->tensors[i];
        const uint64_t bytes = (uint64_t)t->ne[0] * (uint64_t)t->ne[1] * (uint64_t)t->ne[2] * 2 * sizeof(float);
        most = bytes > most ? bytes : most;
    }
    room += 2 * (most < MAX_BUFFER ? most : MAX_BUFFER);
    return room < SIZE_MAX ? (size_t)room : SIZE_MAX;
}

static dt_status run_quantizer(const dt_quantize_params *params, enum llama_ftype ftype, const dt_gguf *gguf, const char *temporary,
                               dt_error *error) {
    char *names = NULL;
    bool failed = false;
    struct llama_model_tensor_override *keep = keep_quantized(gguf, &names, &failed);
    if (failed) {
        return dt_fail_memory(error, (size_t)gguf->n_tensors * GGML_MAX_NAME, "the names of the tensors");
    }
    struct llama_model_quantize_params quantize = llama_model_quantize_default_params();
    const int32_t n_processors = DT_MIN((int32_t)sysconf(_SC_NPROCESSORS_ONLN), DT_MAX_THREADS);
    const int32_t n_threads = params->n_threads > 0 ? params->n_threads : n_processors;
    /* where a thread can't be started, libllama ends the process; with a single one it starts none */
    quantize.nthread = n_threads > 1 ? dt_startable_threads(n_threads, room_for(gguf)) : 1;
    quantize.ftype = ftype;
    quantize.tt_overrides = keep;
    quantize.max_buf_size = MAX_BUFFER;

    listener l = {.params = params};
    errno = 0;
    ggml_log_callback log;
    void *log_user;
    llama_log_get(&log, &log_user);
    llama_log_set(listen, &l);
    const uint32_t result = llama_model_quantize(params->input, temporary, &quantize);
    llama_log_set(log, log_user);
    free(keep);
    free(names);
    return result == 0 ? DT_OK : tell_failure(params, temporary, &l, error);
}

static void set_owner(const dt_quantize_params *params, int owns) {
    if (params->owns_part != NULL) {
        *params->owns_part = owns;
    }
}

/* Whether the file is empty or begins as what a killed run leaves: libllama writes zeros where the metadata goes, and the metadata
 * last, before the file goes to the disk and gets its name. */
static bool is_left_over(int file) {
    char head[256];
    const ssize_t n = pread(file, head, sizeof head, 0);
    if (n >= 4 && memcmp(head, "GGUF", 4) == 0) {
        return true;
    }
    for (ssize_t i = 0; i < n; i++) {
        if (head[i] != 0) {
            return false;
        }
    }
    return n >= 0;
}

/* Opens the file in the making and locks it: two runs for one output would write into each other. libllama opens it by name again. */
static dt_status begin_output(const dt_quantize_params *params, const char *temporary, int *out_file, dt_error *error) {
    bool locked;
    const int file = dt_open_locked(temporary, O_RDWR | O_CREAT, &locked);
    if (file < 0 && errno == EWOULDBLOCK) {
        return dt_fail(error, DT_ERR_IO, "another process is writing %s; wait until it ends, or give the output another name",
                       params->output);
    }
    if (file < 0) {
        return dt_fail(error, DT_ERR_IO, "%s can't be written: %s", temporary, strerror(errno));
    }
    if (!is_left_over(file)) {
        close(file);
        return dt_fail(error, DT_ERR_IO,
                       "%s is there already and is no half-written model; rename it, or give the output another name", temporary);
    }
    set_owner(params, 1);
    *out_file = file;
    return DT_OK;
}

/* The file in the making, whole, to the disk and under its name. */
static dt_status end_output(const dt_quantize_params *params, const char *temporary, int file, dt_error *error) {
    bool done = fsync(file) == 0;
    set_owner(params, 0); /* once renamed, the name is anybody's */
    done = done && rename(temporary, params->output) == 0;
    if (!done) {
        return dt_fail(error, DT_ERR_IO, "%s can't be written: %s", params->output, strerror(errno));
    }
    return DT_OK;
}

dt_status dt_quantize(const dt_quantize_params *params, dt_error *error) {
    enum llama_ftype ftype;
    if (params == NULL || params->input == NULL || params->output == NULL || params->type == NULL) {
        return dt_fail(error, DT_ERR_ARGUMENT, "dt_quantize needs an input, an output and a type");
    }
    if (params->n_threads > DT_MAX_THREADS) {
        return dt_fail(error, DT_ERR_ARGUMENT, "%d threads are more than the %d that are started at most", params->n_threads,
                       DT_MAX_THREADS);
    }
    if (!find_type(params->type, &ftype)) {
        char known[256] = "";
        for (size_t i = 0; i < N_TYPES; i++) {
            const size_t used = strlen(known);
            snprintf(known + used, sizeof known - used, "%s%s", i > 0 ? ", " : "", types[i].name);
        }
        return dt_fail(error, DT_ERR_ARGUMENT, "there is no type %.40s; known: %s", params->type, known);
    }
    if (is_same_file(params->input, params->output)) {
        return dt_fail(error, DT_ERR_ARGUMENT, "input and output are the same file, %s; give the output another name",
                       params->input);
    }
    struct stat info;
    if (lstat(params->output, &info) == 0 && !S_ISREG(info.st_mode)) { /* a device, a pipe, a folder, a link would be replaced */
        return dt_fail(error, DT_ERR_ARGUMENT, "%s is no regular file; give the output a name of its own", params->output);
    }
    dt_gguf *gguf = NULL;
    dt_status status = dt_gguf_open(params->input, &gguf, error);
    if (status == DT_OK) {
        status = check_input(gguf, error);
    }
    if (status == DT_OK) {
        status = check_rest(gguf, error);
    }
    const size_t capacity = strlen(params->output) + sizeof DT_QUANTIZE_PART;
    char *temporary = status == DT_OK ? malloc(capacity) : NULL;
    if (status == DT_OK && temporary == NULL) {
        status = dt_fail_memory(error, capacity, "a file name");
    }
    if (status == DT_OK) {
        int file = -1;
        snprintf(temporary, capacity, "%s" DT_QUANTIZE_PART, params->output);
        status = dt_replace_check(params->output, 0, error);
        if (status == DT_OK) {
            status = begin_output(params, temporary, &file, error);
        }
        if (status == DT_OK) { /* it takes as long as reading the input: what is told at once was told before */
            status = check_numbers(gguf, params, ftype, error);
        }
        if (status == DT_OK) {
            status = run_quantizer(params, ftype, gguf, temporary, error);
        }
        if (status == DT_OK) {
            status = end_output(params, temporary, file, error);
        }
        if (file >= 0) {
            set_owner(params, 0);
            if (status != DT_OK) {
                remove(temporary); /* locked: it is this run's */
            }
            close(file);
        }
    }
    free(temporary);
    dt_gguf_free(gguf);
    return status;
}
