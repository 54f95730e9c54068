/*
 * The instruction sets of x86 that ggml's code may have been built for, and where a processor lists them.
 *
 * X(macro, name, leaf, sub_leaf, register, bit): the compiler's macro, the name that users know, and the bit of CPUID.
 */
#ifndef DT_WEIGHTS_PROCESSOR_H
#define DT_WEIGHTS_PROCESSOR_H

enum { DT_EAX, DT_EBX, DT_ECX, DT_EDX };

#define DT_INSTRUCTION_SETS(X)                                                                                                     \
    X(__SSE3__, "SSE3", 1, 0, DT_ECX, 0)                                                                                           \
    X(__SSSE3__, "SSSE3", 1, 0, DT_ECX, 9)                                                                                         \
    X(__SSE4_1__, "SSE4.1", 1, 0, DT_ECX, 19)                                                                                      \
    X(__SSE4_2__, "SSE4.2", 1, 0, DT_ECX, 20)                                                                                      \
    X(__MOVBE__, "MOVBE", 1, 0, DT_ECX, 22)                                                                                        \
    X(__POPCNT__, "POPCNT", 1, 0, DT_ECX, 23)                                                                                      \
    X(__AVX__, "AVX", 1, 0, DT_ECX, 28)                                                                                            \
    X(__F16C__, "F16C", 1, 0, DT_ECX, 29)                                                                                          \
    X(__FMA__, "FMA", 1, 0, DT_ECX, 12)                                                                                            \
    X(__LZCNT__, "LZCNT", 0x80000001, 0, DT_ECX, 5)                                                                                \
    X(__BMI__, "BMI1", 7, 0, DT_EBX, 3)                                                                                            \
    X(__AVX2__, "AVX2", 7, 0, DT_EBX, 5)                                                                                           \
    X(__BMI2__, "BMI2", 7, 0, DT_EBX, 8)                                                                                           \
    X(__GFNI__, "GFNI", 7, 0, DT_ECX, 8)                                                                                           \
    X(__AVX512F__, "AVX-512F", 7, 0, DT_EBX, 16)                                                                                   \
    X(__AVX512DQ__, "AVX-512DQ", 7, 0, DT_EBX, 17)                                                                                 \
    X(__AVX512IFMA__, "AVX-512IFMA", 7, 0, DT_EBX, 21)                                                                             \
    X(__AVX512CD__, "AVX-512CD", 7, 0, DT_EBX, 28)                                                                                 \
    X(__AVX512BW__, "AVX-512BW", 7, 0, DT_EBX, 30)                                                                                 \
    X(__AVX512VL__, "AVX-512VL", 7, 0, DT_EBX, 31)                                                                                 \
    X(__AVX512VBMI__, "AVX-512VBMI", 7, 0, DT_ECX, 1)                                                                              \
    X(__AVX512VBMI2__, "AVX-512VBMI2", 7, 0, DT_ECX, 6)                                                                            \
    X(__AVX512VNNI__, "AVX-512VNNI", 7, 0, DT_ECX, 11)                                                                             \
    X(__AVX512BITALG__, "AVX-512BITALG", 7, 0, DT_ECX, 12)                                                                         \
    X(__AVX512VPOPCNTDQ__, "AVX-512VPOPCNTDQ", 7, 0, DT_ECX, 14)                                                                   \
    X(__AVX512FP16__, "AVX-512FP16", 7, 0, DT_EDX, 23)                                                                             \
    X(__AVXVNNI__, "AVX-VNNI", 7, 1, DT_EAX, 4)                                                                                    \
    X(__AVX512BF16__, "AVX-512BF16", 7, 1, DT_EAX, 5)

/* In processor_built.c, which is compiled with ggml-cpu's flags and so must hold no code: "1" for each set that they name. */
extern const char *const dt_built_for[];

#endif
