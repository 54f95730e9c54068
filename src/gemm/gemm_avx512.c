/*
 * The AVX-512 VNNI kernel (gemm_avx512.h). Compiled with its own flags; called only where `supported` says so.
 */
#include "gemm/gemm_avx512.h"

static bool supported(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}

static void pack_block(const float *from, int32_t tile, int32_t t, void *to) { pack_inputs_of(from, tile, t, false, to); }

DT_GEMM_DEFINE_GROUPS
DT_GEMM_DEFINE_KERNEL(DT_GEMM_CHUNKS)

const dt_gemm_kernel dt_gemm_avx512_vnni = {"avx512_vnni", false, supported, pack_inputs, multiply};
