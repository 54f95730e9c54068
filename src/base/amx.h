/*
 * AMX, x86's matrix unit: whether it may be used, and its instructions as statements of assembly.
 *
 * Assembly, not intrinsics: gcc 12's _tile_loadconfig names 8 of the table's 64 bytes as read, and the stores of the others are
 * dropped (GCC PR target/114098). Every statement here that touches memory says so.
 *
 * Invariant: whoever computes with tiles gives the thread its old configuration back (dt_amx_begin, dt_amx_end): ggml configures
 * a thread's tiles once and relies on that from then on. Contents of tiles are lost.
 */
#ifndef DT_AMX_H
#define DT_AMX_H

#include "base/base.h"

/* False when the CPU lists AMX but a small probe in a child process failed (kernel or hypervisor refuses it, or the code dies).
 * The answer is kept for the process. True where there is no AMX to refuse. */
bool dt_amx_usable(void);
/* True when tiles of bytes and of BF16 can be multiplied by this process: listed, tried (dt_amx_usable), and allowed by the
 * kernel, which was asked now. The answer is kept. */
bool dt_amx_ready(void);

/* Shapes of the eight tiles; palette 1, as the instruction manual lays it out. All zero: no tiles. */
typedef struct dt_amx_table {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} dt_amx_table;

#if defined(__x86_64__) && defined(__linux__) && defined(__has_include)
#if __has_include(<amxint8intrin.h>) /* the compiler, and so the assembler, knows AMX */
#define DT_HAVE_AMX 1
#endif
#endif

#if defined(DT_HAVE_AMX)

enum { DT_AMX_ROWS = 16, DT_AMX_ROW_BYTES = 64, DT_AMX_TILE_BYTES = DT_AMX_ROWS * DT_AMX_ROW_BYTES };

static inline void dt_amx_begin(const dt_amx_table *table, dt_amx_table *old) {
    __asm__ volatile("sttilecfg %0\n\tldtilecfg %1" : "=m"(*old) : "m"(*table) : "memory");
}

static inline void dt_amx_end(const dt_amx_table *old) { __asm__ volatile("ldtilecfg %0" : : "m"(*old) : "memory"); }

/* tile: a number between 0 and 7, as it stands in the source. Strides in bytes. */
#define DT_AMX_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile : : : "memory")
#define DT_AMX_LOAD(tile, from, stride)                                                                                            \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(from), "r"((int64_t)(stride)) : "memory")
#define DT_AMX_STORE(tile, to, stride)                                                                                             \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(to), "r"((int64_t)(stride)) : "memory")
/* sum(m, n) += sum over k of a(m, k) * b(k, n). Signed bytes: a is [m][k], b is [k/4][n][k%4]. */
#define DT_AMX_MULTIPLY_BYTES(sum, a, b) __asm__ volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #sum : : : "memory")
/* The same in BF16, b is [k/2][n][k%2]; sums are floats. */
#define DT_AMX_MULTIPLY_BF16(sum, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sum : : : "memory")

#endif

#endif
