/*
 * ./deeptutor-rpc-server: lends this machine's devices to programs that run elsewhere with --device rpc=HOST:PORT.
 *
 * Exit code 0: ended by SIGINT or SIGTERM; 1: it failed; 2: bad usage.
 */
#define _POSIX_C_SOURCE 200809L
#include "options.h"
#include "report.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

typedef struct rpc_server_options {
    dt_shared_options shared; /* first: the shared tables' offsets */
    const char *host, *cache;
    int64_t port;
} rpc_server_options;

#define AT(member) offsetof(rpc_server_options, member)

static const dt_option server_rows[] = {
    {"--host", "H", DT_OPTION_TEXT, AT(host), 0, 0,
     "IPv4 address of this machine to listen at; 0.0.0.0 = all of them, on trusted networks only (127.0.0.1)"},
    {"-p, --port", "N", DT_OPTION_INT, AT(port), 1, 65535, "port (50052)"},
    {"-t, --threads", "N", DT_OPTION_INT, AT(shared.n_threads), -1, DT_MAX_THREADS,
     "threads where the CPU computes (0 or -1: physical cores)"},
    {"-d, --device", "NAME", DT_OPTION_TEXT, AT(shared.device), 0, 0,
     "what is lent: cpu, cuda, metal, vulkan, a device by name, several separated by commas; list = show them (all GPUs, else the "
     "CPU)"},
    {"-c, --cache", "F", DT_OPTION_TEXT, AT(cache), 0, 0, "folder that keeps large tensors, so that a model is sent once (none)"},
};

static const dt_option_group server_group = {"Server", server_rows, sizeof server_rows / sizeof server_rows[0]};
static const dt_option_group *const groups[] = {&server_group, &dt_log_options};

static void on_signal(int signal_number) {
    (void)signal_number;
    _exit(0); /* ggml's server never returns, and has nothing to save */
}

/* ggml tells on stdout what its server does: that goes where the log goes, and nowhere when it shows warnings at most. */
static void log_what_ggml_prints(dt_log_level level) {
    const int to = level >= DT_LOG_INFO ? dup(STDERR_FILENO) : open("/dev/null", O_WRONLY);
    if (to >= 0) {
        dup2(to, STDOUT_FILENO);
        close(to);
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
}

int main(int argc, char **argv) {
    rpc_server_options o = {.host = "127.0.0.1", .port = 50052};
    int exit_code;
    dt_error error = {0};
    dt_shared_options_init(&o.shared);
    if (!dt_options_begin(groups, sizeof groups / sizeof groups[0], argc, argv, &o, "[flags]", &exit_code)) {
        return exit_code;
    }
    dt_report_init((dt_log_level)o.shared.log_level, false);
    struct sigaction action = {.sa_handler = on_signal};
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    signal(SIGPIPE, SIG_IGN); /* a client that hangs up */
    log_what_ggml_prints((dt_log_level)o.shared.log_level);
    struct in_addr address;
    if (inet_pton(AF_INET, o.host, &address) == 1 && strncmp(o.host, "127.", 4) != 0) {
        dt_report(DT_LOG_WARN,
                  "whoever reaches %s:%lld can use this machine's memory and read what is computed here, unencrypted and "
                  "without a password: on trusted networks only",
                  o.host, (long long)o.port);
    }
    dt_session_params session; /* no more threads than processors */
    dt_shared_options_session(&o.shared, &session);
    const dt_rpc_server_params params = {
        .host = o.host, .port = (int32_t)o.port, .n_threads = session.n_threads, .device = o.shared.device, .cache = o.cache};
    const dt_status status = dt_rpc_serve(&params, &error);
    dt_report(DT_LOG_ERROR, "%s", error.message);
    return status == DT_ERR_ARGUMENT || status == DT_ERR_IO ? 2 : 1; /* as the server's */
}
