/*
 * The list of attention kernels, and which of them this machine can run.
 *
 * Invariant: this file is compiled without special instruction flags, so asking whether a kernel is supported is safe everywhere.
 * The build defines DT_HAVE_X where it compiles attn_x.c.
 */
#include "attn/attn.h"

#include "attn/attn_driver.h"

#include <stdio.h>
#include <string.h>

#if defined(DT_HAVE_AVX2) || defined(DT_HAVE_AVX512)
#include <cpuid.h>
#endif

#if defined(DT_HAVE_AVX512)
static bool avx512_supported(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma");
}
#endif

#if defined(DT_HAVE_AVX512_VNNI)
static bool avx512_vnni_supported(void) { return avx512_supported() && __builtin_cpu_supports("avx512vnni"); }
#endif

#if defined(DT_HAVE_AVX512_VNNI) && defined(DT_HAVE_AMX)
static bool amx_bf16_supported(void) { return avx512_vnni_supported() && dt_amx_ready(); }
#endif

#if defined(DT_HAVE_AVX2)
static bool avx2_supported(void) {
    unsigned a, b, c = 0, d;
    __builtin_cpu_init(); /* knows whether the system saves the wide registers; has no name for F16C in every compiler */
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) != 0 &&
           (c & bit_F16C) != 0;
}
#endif

#if defined(DT_BATCH_INVARIANT)
enum { BATCH_INVARIANT = true };
#else
enum { BATCH_INVARIANT = false };
#endif

static bool always_supported(void) { return true; }

#define DRIVER_PHASES                                                                                                              \
    .scratch_bytes = dt_attn_driver_scratch_bytes, .prepare = dt_attn_driver_prepare, .store = dt_attn_driver_store,               \
    .attend = dt_attn_driver_attend, .observe = dt_attn_driver_observe
#define DRIVER .thread_bytes = dt_attn_driver_thread_bytes, DRIVER_PHASES
#define REFERENCE                                                                                                                  \
    .supported = always_supported, .scratch_bytes = dt_attn_reference_scratch_bytes,                                               \
    .thread_bytes = dt_attn_reference_thread_bytes, .prepare = dt_attn_reference_prepare, .store = dt_attn_reference_store,        \
    .observe = dt_attn_reference_observe

/* Fastest first: "auto" takes the first that is supported; in the batch-invariant build, of those without 16-bit tiles. */
static const dt_attn_kernel kernels[] = {
#if defined(DT_HAVE_AVX512_VNNI) && defined(DT_HAVE_AMX)
    {.name = "amx_bf16",
     .supported = amx_bf16_supported,
     .ops = &dt_attn_avx512_ops,
     .int16 = &dt_attn_avx512_int16,
     .split = &dt_attn_amx_split,
     .thread_bytes = dt_attn_driver_thread_bytes_split,
     DRIVER_PHASES},
#endif
#if defined(DT_HAVE_AVX512_VNNI)
    {.name = "avx512_vnni", .supported = avx512_vnni_supported, .ops = &dt_attn_avx512_ops, .int16 = &dt_attn_avx512_int16, DRIVER},
#endif
#if defined(DT_HAVE_AVX512)
    {.name = "avx512", .supported = avx512_supported, .ops = &dt_attn_avx512_ops, DRIVER},
#endif
#if defined(DT_HAVE_AVX2)
    {.name = "avx2", .supported = avx2_supported, .ops = &dt_attn_avx2_ops, DRIVER},
#endif
#if defined(DT_HAVE_NEON)
    {.name = "neon", .supported = always_supported, .ops = &dt_attn_neon_ops, DRIVER},
#endif
    {.name = "reference", .attend = dt_attn_reference_attend, REFERENCE},
    {.name = "reference_int16", .attend = dt_attn_reference_attend_int16, REFERENCE},
};
enum { N_KERNELS = sizeof kernels / sizeof kernels[0] };

const dt_attn_kernel *dt_attn_kernels(int32_t *n) {
    *n = N_KERNELS;
    return kernels;
}

const dt_attn_kernel *dt_attn_kernel_find(const char *name, dt_error *error) {
    const bool automatic = name == NULL || strcmp(name, "auto") == 0;
    bool known = false;
    char usable[128] = "auto";
    for (int32_t i = 0; i < N_KERNELS; i++) {
        const bool supported = kernels[i].supported(), named = !automatic && strcmp(name, kernels[i].name) == 0;
        if (supported && (named || (automatic && (!BATCH_INVARIANT || kernels[i].int16 == NULL)))) {
            return &kernels[i];
        }
        known = known || named;
        if (supported) {
            const size_t used = strlen(usable);
            (void)snprintf(usable + used, sizeof usable - used, ", %s", kernels[i].name);
        }
    }
    if (known) {
        dt_fail(error, DT_ERR_UNSUPPORTED,
                "this machine lacks the instructions of attention kernel '%s'; use one of: %s, ggml, ggml_matmul", name, usable);
    } else {
        dt_fail(error, DT_ERR_ARGUMENT, "unknown attention kernel '%s'; use one of: %s, ggml, ggml_matmul", name, usable);
    }
    return NULL;
}
