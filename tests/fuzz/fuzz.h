/*
 * What the fuzz targets share. A target is a file fuzz_NAME.c that hands bytes to one of the places where DeepTutor reads what others
 * wrote, and ends the process where that place breaks a promise of its own.
 *
 * Linked with libFuzzer (-DDT_FUZZ=ON) a target looks for such bytes; linked with replay.c it is a test that goes through the
 * files under regressions/NAME and seeds/NAME and some mutations of them, the same in each run.
 */
#ifndef DT_TESTS_FUZZ_H
#define DT_TESTS_FUZZ_H

#include "deeptutor.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- what libFuzzer calls, each target's own ---- */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerInitialize(int *argc, char ***argv);
/* Optional: mutates data[size] in place and returns its new size, at most max_size. */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed);
/* Optional: writes the target's seeds into a folder, where they are made by a program rather than kept as files. Called by replay.c,
 * and by fuzz_begin where the environment names the folder (FUZZ_SEEDS). */
bool fuzz_write_seeds(const char *folder);

/* ---- what libFuzzer, or replay.c, gives ---- */

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);

/* ---- helpers ---- */

/* For LLVMFuzzerInitialize of targets that make their seeds, at its end. */
void fuzz_begin(bool (*write_seeds)(const char *folder));
/* Ends the process with a line on stderr where `kept` is false. */
void fuzz_require(bool kept, const char *promise);
/* After a failure: there is a code and one line of text. */
void fuzz_require_told(dt_status status, const dt_error *error);
/* A file in memory that holds these bytes; `which` is 0 or 1, each has one file, overwritten by the next call. */
const char *fuzz_file(int which, const void *data, size_t size);
/* The name of a file that may be written and replaced, in memory where the system has such a folder. Remove it after use. */
const char *fuzz_scratch(void);
/* data[size] as text with a NUL behind it; free() it. */
char *fuzz_text(const uint8_t *data, size_t size);
/* Where the first line that is "---" begins and what follows it; without one, everything is the first part. */
void fuzz_split(const uint8_t *data, size_t size, size_t *out_first, size_t *out_second);
/* A model of one layer with a tokenizer, opened once. */
const dt_model *fuzz_model(void);
/* What serves it: a scheduler on it, and an API that leaves requests everything. Made once. */
struct dt_api;
const struct dt_api *fuzz_api(void);
bool fuzz_write_file(const char *folder, const char *name, const void *data, size_t size);

/* Numbers for a mutator, from its seed. */
typedef struct fuzz_random {
    uint64_t state;
} fuzz_random;
uint64_t fuzz_next(fuzz_random *random);
/* Below n, which is not 0. */
size_t fuzz_below(fuzz_random *random, size_t n);
/* One that is likely to be a limit of something: 0, powers of two and their neighbours, the largest. */
uint64_t fuzz_limit(fuzz_random *random);

#endif
