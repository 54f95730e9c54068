/*
 * The AVX-512 kernel for processors without dot products of bytes (gemm_avx512.h). Compiled with its own flags; called only where
 * `supported` says so.
 */
#include "gemm/gemm_avx512.h"

static bool supported(void) { return avx512_supported(); }

DT_GEMM_DEFINE_AVX512

const dt_gemm_kernel dt_gemm_avx512 = {"avx512", false, supported, pack_inputs, multiply};
