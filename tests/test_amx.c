/*
 * The AMX probe: true where there is no AMX, the same answer for every thread, false (and alive) where the kernel refuses.
 *
 * The refusal is made real: a child process gets a seccomp filter that turns down arch_prctl, as some containers do, and asks then.
 */
#define _GNU_SOURCE /* system call numbers */
#include "base/amx.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#if defined(__linux__) && defined(__x86_64__)
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#endif

static bool processor_lists_amx(void) {
    bool listed = false;
    FILE *file = fopen("/proc/cpuinfo", "r");
    if (file != NULL) {
        char line[8192];
        while (!listed && fgets(line, sizeof line, file) != NULL) {
            listed = strncmp(line, "flags", 5) == 0 && strstr(line, " amx_tile") != NULL && strstr(line, " amx_int8") != NULL;
        }
        fclose(file);
    }
    return listed;
}

static void *ask(void *answer) {
    *(bool *)answer = dt_amx_usable();
    return NULL;
}

/* Runs `check` in a child, where the probe has not been asked yet. */
static void assert_in_child(bool (*check)(void)) {
    fflush(NULL);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        _exit(check() ? 0 : 1);
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

#if defined(__linux__) && defined(__x86_64__)

static bool refused_by_the_kernel(void) {
    struct sock_filter program[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0), /* the system call's number */
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_arch_prctl, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const struct sock_fprog filter = {.len = sizeof program / sizeof program[0], .filter = program};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) != 0) {
        return true; /* no filters here: nothing to test */
    }
    return dt_amx_usable() == !processor_lists_amx();
}

static void test_refused(void **state) {
    (void)state;
    assert_in_child(refused_by_the_kernel);
}

#endif

static bool same_with_children_ignored(void) { /* a host that lets the kernel reap its children */
    signal(SIGCHLD, SIG_IGN);
    return dt_amx_usable() || processor_lists_amx();
}

static void test_host_that_reaps(void **state) {
    (void)state;
    assert_in_child(same_with_children_ignored);
}

static void test_no_amx_or_one_answer(void **state) {
    (void)state;
    enum { N = 4 };
    pthread_t threads[N];
    bool answers[N];
    for (int i = 0; i < N; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, ask, &answers[i]), 0);
    }
    for (int i = 0; i < N; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(answers[i], answers[0]);
    }
    if (!processor_lists_amx()) {
        assert_true(answers[0]);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
#if defined(__linux__) && defined(__x86_64__)
        cmocka_unit_test(test_refused),
#endif
        cmocka_unit_test(test_host_that_reaps),
        cmocka_unit_test(test_no_amx_or_one_answer), /* last: the children must fork before the probe was asked here */
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
