/*
 * The AVX-512 VNNI kernel (gemm_avx512.h). Compiled with its own flags; called only where `supported` says so.
 */
#include "gemm/gemm_avx512.h"

static bool supported(void) { return avx512_supported() && __builtin_cpu_supports("avx512vnni"); }

DT_GEMM_DEFINE_AVX512

const dt_gemm_kernel dt_gemm_avx512_vnni = {"avx512_vnni", false, supported, pack_inputs, multiply};
