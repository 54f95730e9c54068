/*
 * The main function of a target without libFuzzer: files and folders named on the command line are given to it, then mutations of
 * them. Which ones is fixed: a run that fails fails again.
 *
 *   fuzz_NAME [-mutations=N] [-seed=N] FILE-OR-FOLDER...
 *   fuzz_NAME -seeds=FOLDER      writes the target's own seeds there
 *
 * The input that is being tried lies in ./crash-fuzz_NAME.bin meanwhile, and is removed at the end; where the process is killed it
 * stays.
 */
#define _POSIX_C_SOURCE 200809L
#include "fuzz.h"

#include <dirent.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define INPUT_BYTES_MAX 65536
#define N_INPUTS_MAX 4096

#pragma weak LLVMFuzzerInitialize
#pragma weak LLVMFuzzerCustomMutator
#pragma weak fuzz_write_seeds

typedef struct input {
    uint8_t *bytes;
    size_t size;
} input;

static input inputs[N_INPUTS_MAX];
static size_t n_inputs;
static fuzz_random numbers = {1};
static char crash_path[256];

/* A few of the changes that libFuzzer makes. */
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size) {
    const size_t at = size > 0 ? fuzz_below(&numbers, size) : 0;
    const uint64_t limit = fuzz_limit(&numbers);
    const size_t n = 1 + fuzz_below(&numbers, 8);
    switch (fuzz_below(&numbers, 5)) {
    case 0: /* another byte */
        if (size > 0) {
            data[at] = (uint8_t)fuzz_next(&numbers);
        }
        return size;
    case 1: /* a number that is the limit of something */
        memcpy(data + at, &limit, size - at < n ? size - at : n);
        return size;
    case 2: { /* bytes go */
        const size_t gone = size - at < n ? size - at : n;
        memmove(data + at, data + at + gone, size - at - gone);
        return size - gone;
    }
    case 3: /* bytes come */
        if (size + n > max_size) {
            return size;
        }
        memmove(data + at + n, data + at, size - at);
        memcpy(data + at, &limit, n);
        return size + n;
    default: /* a bit */
        if (size > 0) {
            data[at] ^= (uint8_t)(1 << (limit & 7));
        }
        return size;
    }
}

static void try_one(const uint8_t *bytes, size_t size) {
    uint8_t *copy = malloc(size > 0 ? size : 1); /* of its exact size, so that a sanitizer sees what is read behind it */
    fuzz_require(copy != NULL, "memory for the input");
    if (size > 0) {
        memcpy(copy, bytes, size);
    }
    FILE *file = fopen(crash_path, "wb");
    if (file != NULL) {
        fwrite(copy, 1, size, file);
        fclose(file);
    }
    LLVMFuzzerTestOneInput(copy, size);
    free(copy);
}

static void read_file(const char *path, off_t bytes) {
    FILE *file = fopen(path, "rb");
    fuzz_require(file != NULL && n_inputs < N_INPUTS_MAX, path);
    input *in = &inputs[n_inputs++];
    in->bytes = malloc((size_t)bytes + 1);
    in->size = in->bytes != NULL ? fread(in->bytes, 1, (size_t)bytes, file) : 0;
    fclose(file);
}

static int compare_names(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

static void read_path(const char *path) {
    struct stat info;
    char *names[N_INPUTS_MAX], inside[4096];
    size_t n = 0;
    if (stat(path, &info) != 0) {
        return; /* a folder that git does not keep, being empty */
    }
    if (!S_ISDIR(info.st_mode)) {
        read_file(path, info.st_size);
        return;
    }
    DIR *folder = opendir(path);
    for (const struct dirent *entry; folder != NULL && n < N_INPUTS_MAX && (entry = readdir(folder)) != NULL;) {
        if (entry->d_name[0] != '.') {
            names[n++] = strdup(entry->d_name);
        }
    }
    if (folder != NULL) {
        closedir(folder);
    }
    qsort(names, n, sizeof names[0], compare_names);
    for (size_t i = 0; i < n; i++) {
        snprintf(inside, sizeof inside, "%s/%s", path, names[i]);
        free(names[i]);
        read_path(inside);
    }
}

static void mutate_all(long n_mutations) {
    uint8_t *buffer = malloc(INPUT_BYTES_MAX);
    fuzz_require(buffer != NULL, "memory for the input");
    for (long i = 0; i < n_mutations; i++) {
        const input *in = &inputs[fuzz_below(&numbers, n_inputs)];
        if (in->size > INPUT_BYTES_MAX) {
            continue;
        }
        memcpy(buffer, in->bytes, in->size);
        size_t size = in->size;
        for (size_t n = 1 + fuzz_below(&numbers, 4); n > 0; n--) {
            const unsigned seed = (unsigned)fuzz_next(&numbers);
            size = LLVMFuzzerCustomMutator ? LLVMFuzzerCustomMutator(buffer, size, INPUT_BYTES_MAX, seed)
                                           : LLVMFuzzerMutate(buffer, size, INPUT_BYTES_MAX);
        }
        try_one(buffer, size);
    }
    free(buffer);
}

int main(int argc, char **argv) {
    long n_mutations = 0;
    snprintf(crash_path, sizeof crash_path, "crash-%.200s.bin", basename(argv[0]));
    if (LLVMFuzzerInitialize) {
        LLVMFuzzerInitialize(&argc, &argv);
    }
    for (int i = 1; i < argc; i++) {
        if (strncmp(argv[i], "-seeds=", 7) == 0) {
            return fuzz_write_seeds == NULL || fuzz_write_seeds(argv[i] + 7) ? 0 : 1;
        }
        if (strncmp(argv[i], "-mutations=", 11) == 0) {
            n_mutations = strtol(argv[i] + 11, NULL, 10);
        } else if (strncmp(argv[i], "-seed=", 6) == 0) {
            numbers.state = strtoull(argv[i] + 6, NULL, 10);
        } else {
            read_path(argv[i]);
        }
    }
    for (size_t i = 0; i < n_inputs; i++) {
        try_one(inputs[i].bytes, inputs[i].size);
    }
    if (n_inputs > 0) {
        mutate_all(n_mutations);
    }
    printf("%s: %zu files, %ld mutations\n", argv[0], n_inputs, n_inputs > 0 ? n_mutations : 0);
    for (size_t i = 0; i < n_inputs; i++) {
        free(inputs[i].bytes);
    }
    unlink(crash_path);
    return 0;
}
