/*
 * Can this processor run what ggml was compiled to? A program built with -march=native and taken to another machine would die
 * with SIGILL on its first matrix product; so before anything of ggml-cpu runs, the instruction sets that its flags allowed are
 * looked up.
 *
 * AMX is left out: it has a probe of its own (base/amx.c) and ggml works without it.
 */
#include "weights/processor.h"
#include "weights/weights.h"

#include <stdio.h>
#include <string.h>

#if defined(__x86_64__) || defined(__i386__)

#include <cpuid.h>

#define DT_ROW(macro, name, leaf, sub_leaf, reg, bit) {name, leaf, sub_leaf, reg, bit},

static const struct {
    const char *name;
    unsigned leaf, sub_leaf;
    int reg, bit;
} sets[] = {DT_INSTRUCTION_SETS(DT_ROW)};

/* AVX's registers are of use only where the system saves them. */
static bool system_saves(const char *name) {
    unsigned a, b, c, d, low, high;
    const unsigned os_saves = 1u << 27;
    if (strncmp(name, "AVX", 3) != 0 && strcmp(name, "FMA") != 0 && strcmp(name, "F16C") != 0) {
        return true;
    }
    if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & os_saves) == 0) {
        return false;
    }
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    const unsigned avx = 0x6, avx512 = 0xE6, needed = strncmp(name, "AVX-512", 7) == 0 ? avx512 : avx;
    return (low & needed) == needed;
}

static bool processor_has(size_t set) {
    unsigned registers[4] = {0};
    return __get_cpuid_count(sets[set].leaf, sets[set].sub_leaf, &registers[DT_EAX], &registers[DT_EBX], &registers[DT_ECX],
                             &registers[DT_EDX]) != 0 &&
           (registers[sets[set].reg] >> sets[set].bit & 1) != 0 && system_saves(sets[set].name);
}

dt_status dt_check_processor(dt_error *error) {
    char missing[400] = "";
    for (size_t i = 0; i < sizeof sets / sizeof sets[0]; i++) {
        if (strcmp(dt_built_for[i], "1") == 0 && !processor_has(i)) {
            const size_t n = strlen(missing);
            snprintf(missing + n, sizeof missing - n, "%s%s", n > 0 ? ", " : "", sets[i].name);
        }
    }
    if (missing[0] == 0) {
        return DT_OK;
    }
    return dt_fail(
        error, DT_ERR_UNSUPPORTED,
        "this program was built for instructions that this processor lacks: %s; build it on this machine (bash run.sh), or "
        "for any processor with AVX2 (cmake -DDT_NATIVE=OFF)",
        missing);
}

#else

dt_status dt_check_processor(dt_error *error) {
    (void)error;
    return DT_OK;
}

#endif
