/* See fuzz.h. Files are memory files (memfd_create) where there are such, else temporary ones that go at exit. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* memfd_create */
#endif
#include "fuzz.h"

#include "../../apps/api.h"
#include "support/tiny_model.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define N_FILES 3 /* the last one holds the model */

void fuzz_require(bool kept, const char *promise) {
    if (!kept) {
        fprintf(stderr, "fuzz: not kept: %s\n", promise);
        abort();
    }
}

void fuzz_begin(bool (*write_seeds)(const char *folder)) {
    const char *folder = getenv("FUZZ_SEEDS");
    if (folder != NULL) {
        fuzz_require(write_seeds(folder), "seeds can be written");
    }
}

void fuzz_require_told(dt_status status, const dt_error *error) {
    fuzz_require(status == error->code, "the error's code is the status");
    const bool told =
        error->message[0] != 0 && memchr(error->message, 0, sizeof error->message) != NULL && strchr(error->message, '\n') == NULL;
    if (!told) {
        fprintf(stderr, "fuzz: %s: \"%.1023s\"\n", dt_status_name(status), error->message);
    }
    fuzz_require(told, "a failure is told in one line");
}

static char paths[N_FILES][64];
static int files[N_FILES] = {-1, -1, -1};

#ifndef __linux__
static void remove_files(void) {
    for (int i = 0; i < N_FILES; i++) {
        unlink(paths[i]);
    }
}
#endif

static void open_file(int which) {
#ifdef __linux__
    files[which] = memfd_create("fuzz", MFD_CLOEXEC);
    snprintf(paths[which], sizeof paths[which], "/proc/%d/fd/%d", (int)getpid(), files[which]);
#else
    strcpy(paths[which], "/tmp/dt-fuzz-XXXXXX");
    files[which] = mkstemp(paths[which]);
    if (which == 0) {
        atexit(remove_files);
    }
#endif
    fuzz_require(files[which] >= 0, "a file can be had");
}

const char *fuzz_file(int which, const void *data, size_t size) {
    if (files[which] < 0) {
        open_file(which);
    }
    const bool written = ftruncate(files[which], 0) == 0 && pwrite(files[which], data, size, 0) == (ssize_t)size;
    fuzz_require(written, "the file can be written");
    return paths[which];
}

const char *fuzz_scratch(void) {
    static char path[64];
    snprintf(path, sizeof path, "%s/dt-fuzz-%d", access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp", (int)getpid());
    return path;
}

char *fuzz_text(const uint8_t *data, size_t size) {
    char *text = malloc(size + 1);
    fuzz_require(text != NULL, "memory for the input");
    memcpy(text, data, size);
    text[size] = 0;
    return text;
}

void fuzz_split(const uint8_t *data, size_t size, size_t *out_first, size_t *out_second) {
    *out_first = *out_second = size;
    for (size_t i = 0; i + 4 <= size; i++) {
        if (memcmp(data + i, "---\n", 4) == 0 && (i == 0 || data[i - 1] == '\n')) {
            *out_first = i;
            *out_second = i + 4;
            return;
        }
    }
}

const dt_model *fuzz_model(void) {
    static dt_model *model;
    if (model == NULL) {
        tiny_model_params params = tiny_model_default_params();
        params.n_layers = 1;
        params.n_embd = params.n_ff = 32;
        params.n_heads = 2;
        params.n_kv_heads = 1;
        params.n_ctx = 128;
        params.chat_template = TINY_CHATML;
        dt_error error = {0};
        const char *path = fuzz_file(N_FILES - 1, "", 0);
        const bool opened = tiny_model_write(&params, path) && dt_model_open(path, NULL, &model, &error) == DT_OK;
        if (!opened) {
            fprintf(stderr, "fuzz: %s\n", error.message);
        }
        fuzz_require(opened, "the tiny model opens");
    }
    return model;
}

const dt_api *fuzz_api(void) {
    static dt_api api;
    if (api.model == NULL) {
        dt_error error = {0};
        const dt_scheduler_params params = {
            .model = fuzz_model(),
            .session = {.n_batch = 32, .n_threads = 1, .n_threads_batch = 1, .kv_block_tokens = 16, .kv_memory = 64 << 20},
            .n_parallel = 2,
            .n_queue = 8,
            .n_idle_max = 4};
        api = (dt_api){.name = "fuzz",
                       .path = "fuzz.gguf",
                       .sampling = dt_sampler_default_params(),
                       .max_tokens = 4,
                       .n_choices_max = 2,
                       .n_prompts_max = 8,
                       .eviction_key = "",
                       .eviction_override = true,
                       .keep = true,
                       .kv_type = "f16",
                       .prefill = "full",
                       .n_ctx = 128};
        const bool made = dt_scheduler_new(&params, &api.scheduler, &error) == DT_OK;
        if (!made) {
            fprintf(stderr, "fuzz: %s\n", error.message);
        }
        fuzz_require(made, "a scheduler can be had");
        api.model = params.model;
    }
    return &api;
}

bool fuzz_write_file(const char *folder, const char *name, const void *data, size_t size) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "wb");
    bool written = file != NULL && fwrite(data, 1, size, file) == size;
    if (file != NULL) {
        written = fclose(file) == 0 && written;
    }
    return written;
}

uint64_t fuzz_next(fuzz_random *random) {
    uint64_t z = random->state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

size_t fuzz_below(fuzz_random *random, size_t n) { return (size_t)(fuzz_next(random) % n); }

uint64_t fuzz_limit(fuzz_random *random) {
    const uint64_t power = (uint64_t)1 << fuzz_below(random, 64);
    switch (fuzz_below(random, 5)) {
    case 0:
        return fuzz_below(random, 16);
    case 1:
        return power - 1;
    case 2:
        return power + 1;
    case 3:
        return UINT64_MAX - fuzz_below(random, 16);
    default:
        return power;
    }
}
