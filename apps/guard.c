/*
 * The process that waits for the one that computes. See guard.h.
 */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#define _POSIX_C_SOURCE 200809L
#define _DARWIN_C_SOURCE
#include "guard.h"
#include "report.h"
#include "run.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif

#define DEFAULT_TIMEOUT_S 600 /* the library's */
#define RETRY_S 2             /* between two looks whether the servers are back */

static const int forwarded[] = {SIGINT, SIGTERM, SIGHUP};
#define N_FORWARDED (sizeof forwarded / sizeof forwarded[0])

static volatile sig_atomic_t child, asked_to_end;
static atomic_bool *ready; /* shared by parent and child; NULL: nobody is guarded */

void dt_guard_ready(void) {
    if (ready != NULL) {
        atomic_store(ready, true);
    }
}

static bool names_servers(const dt_shared_options *o) {
    bool found = false;
    for (const char *name = o->device; name != NULL && o->n_device_layers != 0; name = strchr(name, ',')) {
        name += name[0] == ',';
        found = found || strncasecmp(name, "rpc=", 4) == 0;
    }
    return found;
}

static void forward(int signal_number) {
    asked_to_end = signal_number;
    if (child > 0) {
        kill((pid_t)child, dt_run_passed(signal_number));
    }
}

/* The child's beginning: signals as they were, but only the parent's count; no end without the parent's. */
static void become_child(pid_t parent, const struct sigaction before[]) {
    for (size_t i = 0; i < N_FORWARDED; i++) {
        sigaction(forwarded[i], &before[i], NULL);
    }
    dt_run_signals_from(parent);
    signal(SIGPIPE, SIG_IGN); /* what is written to a lost server */
    const struct rlimit none = {0, 0};
    setrlimit(RLIMIT_CORE, &none);
#ifdef __linux__
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) {
        _exit(1);
    }
#endif
}

/* Runs the work in a child, to its end; false: it can't be started. */
static bool run_child(int (*work)(void *user), void *user, int *out_status) {
    struct sigaction action = {.sa_handler = forward}, before[N_FORWARDED];
    sigset_t all, old;
    const pid_t parent = getpid();
    sigemptyset(&action.sa_mask);
    sigfillset(&all);
    fflush(NULL);
    sigprocmask(SIG_BLOCK, &all, &old); /* none comes between the fork and knowing the child */
    for (size_t i = 0; i < N_FORWARDED; i++) {
        sigaction(forwarded[i], NULL, &before[i]);
        if (before[i].sa_handler != SIG_IGN) {
            sigaction(forwarded[i], &action, NULL);
        }
    }
    const pid_t pid = fork();
    if (pid == 0) {
        become_child(parent, before);
        sigprocmask(SIG_SETMASK, &old, NULL);
        exit(work(user));
    }
    child = pid;
    sigprocmask(SIG_SETMASK, &old, NULL);
    while (pid > 0 && waitpid(pid, out_status, 0) < 0 && errno == EINTR) {
    }
    child = 0;
    return pid > 0;
}

static void report_loss(const dt_shared_options *o) {
    dt_error error = {0};
    if (isatty(STDERR_FILENO)) {
        fputc('\n', stderr); /* text or a bar may stand on the line */
    }
    const struct timespec pause = {.tv_nsec = 200 * 1000 * 1000};
    nanosleep(&pause, NULL); /* a server that is just ending may take one more connection, only to hang up on it */
    if (dt_devices_check(o->device, &error) == DT_OK) {
        snprintf(error.message, sizeof error.message,
                 "a server of %s ended the connection, or was silent for %lld s; what it printed may tell why", o->device,
                 (long long)(o->rpc_timeout > 0 ? o->rpc_timeout : DEFAULT_TIMEOUT_S));
    }
    dt_report(DT_LOG_ERROR, "what was being computed is lost, files saved before are intact: %s", error.message);
}

/* Until all servers answer; false: a signal came first. */
static bool wait_for_servers(const dt_shared_options *o) {
    dt_report(DT_LOG_INFO, "waiting for %s; then the model is loaded again", o->device);
    while (!asked_to_end && dt_devices_check(o->device, NULL) != DT_OK) {
        const struct timespec pause = {.tv_sec = RETRY_S};
        nanosleep(&pause, NULL); /* a signal ends it */
    }
    return !asked_to_end;
}

/* Ends as the child did, for whoever waits for this process. */
static int die_alike(int signal_number) {
    signal(signal_number, SIG_DFL);
    raise(signal_number);
    return 128 + signal_number;
}

int dt_run_guarded(const dt_shared_options *o, bool restart, int (*work)(void *user), void *user) {
    if (!names_servers(o)) {
        return work(user);
    }
    void *shared = mmap(NULL, sizeof *ready, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ready = shared != MAP_FAILED ? shared : NULL;
    int status = 0;
    do {
        if (ready == NULL || !run_child(work, user, &status)) {
            dt_report(DT_LOG_ERROR, "no process can be started to compute in: %s", strerror(errno));
            return 1;
        }
        if (WIFEXITED(status)) {
            return WEXITSTATUS(status);
        }
        if (WTERMSIG(status) != SIGABRT) {
            return die_alike(WTERMSIG(status));
        }
        report_loss(o);
        if (!restart || !atomic_exchange(ready, false)) {
            return 1;
        }
    } while (wait_for_servers(o));
    return 0;
}
