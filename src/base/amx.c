/*
 * May AMX code run here? A processor can list AMX while the kernel, a container's seccomp filter or a hypervisor refuses it, and
 * then the first tile instruction kills the process. So a child process tries first: it asks the kernel for the tile registers,
 * multiplies two small matrices and compares the numbers; the parent believes only a byte that arrives through a pipe.
 *
 * Invariants: nothing that happens to the child reaches the parent (no signal, no core file, no output); the child calls
 * async-signal-safe functions only, since other threads of the parent may hold locks at the fork. The instructions are one asm
 * statement that takes the whole tile table as its operand (amx.h says why).
 */
#define _GNU_SOURCE /* pipe2, syscall */
#include "base/amx.h"

#if defined(DT_HAVE_AMX)

#include <cpuid.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define DT_ARCH_REQ_XCOMP_PERM 0x1023
#define DT_XFEATURE_XTILEDATA 18

typedef struct byte_tile {
    int8_t at[DT_AMX_ROWS][DT_AMX_ROW_BYTES];
} byte_tile;

typedef struct sum_tile {
    int32_t at[DT_AMX_ROWS][DT_AMX_ROW_BYTES / 4];
} sum_tile;

enum { AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24, AMX_INT8 = 1 << 25 };

static bool processor_lists(unsigned features) {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & features) == features;
}

static bool ask_for_tiles(void) { return syscall(SYS_arch_prctl, DT_ARCH_REQ_XCOMP_PERM, DT_XFEATURE_XTILEDATA) == 0; }

static void multiply_tiles(const dt_amx_table *table, const byte_tile *a, const byte_tile *b, sum_tile *out) {
    const int64_t stride = DT_AMX_ROW_BYTES;
    __asm__ volatile("ldtilecfg %[table]\n\t"
                     "tileloadd (%[a],%[stride],1), %%tmm1\n\t"
                     "tileloadd (%[b],%[stride],1), %%tmm2\n\t"
                     "tilezero %%tmm0\n\t"
                     "tdpbssd %%tmm2, %%tmm1, %%tmm0\n\t"
                     "tilestored %%tmm0, (%[out],%[stride],1)\n\t"
                     "tilerelease"
                     :
                     : [table] "m"(*table), [a] "r"(a), [b] "r"(b), [out] "r"(out), [stride] "r"(stride)
                     : "memory");
}

/* True when the product of two matrices comes out right: out(m, n) = sum over k of a(m, k) * b(k/4, 4n + k%4). */
static bool tiles_compute(void) {
    dt_amx_table table;
    byte_tile a, b;
    sum_tile out;
    memset(&table, 0, sizeof table);
    table.palette = 1;
    for (int tile = 0; tile < 3; tile++) {
        table.row_bytes[tile] = DT_AMX_ROW_BYTES;
        table.rows[tile] = DT_AMX_ROWS;
    }
    for (int row = 0; row < DT_AMX_ROWS; row++) {
        for (int i = 0; i < DT_AMX_ROW_BYTES; i++) {
            a.at[row][i] = (int8_t)((row * 7 + i * 3) % 23 - 11);
            b.at[row][i] = (int8_t)((row * 5 + i * 11) % 29 - 14);
        }
    }
    memset(&out, 0, sizeof out);
    multiply_tiles(&table, &a, &b, &out);
    for (int m = 0; m < DT_AMX_ROWS; m++) {
        for (int n = 0; n < DT_AMX_ROWS; n++) {
            int32_t expected = 0;
            for (int k = 0; k < DT_AMX_ROW_BYTES; k++) {
                expected += a.at[m][k] * b.at[k / 4][4 * n + k % 4];
            }
            if (out.at[m][n] != expected) {
                return false;
            }
        }
    }
    return true;
}

_Noreturn static void run_child(int report) {
    const int fatal[] = {SIGILL, SIGSEGV, SIGBUS, SIGFPE, SIGSYS, SIGTRAP};
    for (size_t i = 0; i < sizeof fatal / sizeof fatal[0]; i++) {
        signal(fatal[i], SIG_DFL); /* the host's crash handler is not for this */
    }
    const struct rlimit no_core = {0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    if (ask_for_tiles() && tiles_compute()) {
        const char usable = 1;
        _exit(write(report, &usable, 1) == 1 ? 0 : 1);
    }
    _exit(1);
}

static bool child_succeeds(void) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) {
        return false;
    }
    const pid_t child = fork();
    if (child == 0) {
        run_child(ends[1]);
    }
    close(ends[1]);
    bool usable = false;
    if (child > 0) {
        char answer = 0;
        ssize_t n;
        do {
            n = read(ends[0], &answer, 1);
        } while (n < 0 && errno == EINTR);
        usable = n == 1 && answer == 1;
        while (waitpid(child, NULL, 0) < 0 && errno == EINTR) { /* ECHILD: the host reaps its children itself */
        }
    }
    close(ends[0]);
    return usable;
}

static pthread_once_t probe_once = PTHREAD_ONCE_INIT;
static bool probe_result;

static void probe(void) {
    probe_result = !processor_lists(AMX_TILE | AMX_INT8) || child_succeeds();
    if (!probe_result) {
        dt_log(DT_LOG_WARN,
               "AMX: the processor lists it, but a trial in a child process was refused or failed; computing without it");
    }
}

bool dt_amx_usable(void) {
    pthread_once(&probe_once, probe);
    return probe_result;
}

static pthread_once_t ready_once = PTHREAD_ONCE_INIT;
static bool ready_result;

static void get_ready(void) {
    ready_result = processor_lists(AMX_TILE | AMX_INT8 | AMX_BF16) && dt_amx_usable() && ask_for_tiles();
}

bool dt_amx_ready(void) {
    pthread_once(&ready_once, get_ready);
    return ready_result;
}

#else

bool dt_amx_usable(void) { return true; }
bool dt_amx_ready(void) { return false; }

#endif
