/*
 * Connecting to RPC servers. ggml's client ends its process when a server can't be reached, speaks another version or goes away
 * later; so each server is greeted here first, by a connection of our own. What comes later nobody can catch in the same process:
 * programs compute in a child (apps/guard.c), and deeptutor.h tells library users.
 *
 * Invariant: ggml is asked to connect only right after a server has answered with a version that it understands. All servers of a
 * list are greeted before the first is left, so that one under two names is found out: it talks to one client at a time.
 */
#define _POSIX_C_SOURCE 200112L /* getaddrinfo */
#define _DARWIN_C_SOURCE        /* SO_NOSIGPIPE */
#include "graph/rpc.h"

#include "ggml-rpc.h"
#include "weights/ggml_calls.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#define CONNECT_MS 5000
#define GREETING_S 5  /* a server talks to one client at a time: the one before may still be leaving */
#define HELLO 14      /* the command that all versions share */
#define CAPS_BYTES 24 /* what transports a side has beside TCP: none */

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0
#endif

const char *dt_rpc_endpoint(const char *name) { return strncasecmp(name, "rpc=", 4) == 0 ? name + 4 : NULL; }

/* ---- the greeting ---- */

static dt_status split_endpoint(const char *endpoint, char *host, size_t capacity, char port[6], dt_error *error) {
    const size_t n = strcspn(endpoint, ":");
    const char *digits = endpoint[n] == ':' ? endpoint + n + 1 : "";
    int value = 0;
    for (const char *c = digits; *c != 0 && value <= 65535; c++) {
        value = *c >= '0' && *c <= '9' ? value * 10 + (*c - '0') : 65536;
    }
    if (n == 0 || n >= capacity || value < 1 || value > 65535) {
        return dt_fail(error, DT_ERR_ARGUMENT,
                       "'rpc=%s' is no server: give name or IPv4 address and port, such as rpc=192.168.1.20:50052", endpoint);
    }
    memcpy(host, endpoint, n);
    host[n] = 0;
    snprintf(port, 6, "%d", value);
    return DT_OK;
}

/* 0, or the reason as an errno; waits CONNECT_MS at most. */
static int connect_within(int descriptor, const struct addrinfo *address) {
    const int flags = fcntl(descriptor, F_GETFL);
    int reason = 0;
    socklen_t n = sizeof reason;
    if (flags < 0 || fcntl(descriptor, F_SETFL, flags | O_NONBLOCK) != 0) {
        return errno;
    }
    if (connect(descriptor, address->ai_addr, address->ai_addrlen) != 0) {
        struct pollfd wait = {.fd = descriptor, .events = POLLOUT};
        if (errno != EINPROGRESS && errno != EINTR) {
            return errno;
        }
        const int ready = poll(&wait, 1, CONNECT_MS);
        if (ready <= 0) {
            return ready == 0 ? ETIMEDOUT : errno;
        }
        if (getsockopt(descriptor, SOL_SOCKET, SO_ERROR, &reason, &n) != 0 || reason != 0) {
            return reason != 0 ? reason : errno;
        }
    }
    return fcntl(descriptor, F_SETFL, flags) == 0 ? 0 : errno;
}

static bool receive(int descriptor, void *out, size_t n) {
    for (size_t done = 0; done < n;) {
        const ssize_t got = recv(descriptor, (char *)out + done, n - done, 0);
        if (got == 0) {
            errno = ECONNRESET;
        }
        if (got == 0 || (got < 0 && errno != EINTR)) {
            return false;
        }
        done += got > 0 ? (size_t)got : 0;
    }
    return true;
}

/* is_first: no other server has been greeted and waits for us. */
static dt_status greet(int descriptor, const char *endpoint, bool is_first, dt_error *error) {
    const struct timeval limit = {.tv_sec = GREETING_S};
    unsigned char request[1 + 8 + CAPS_BYTES] = {HELLO, CAPS_BYTES}, reply[8 + 4 + CAPS_BYTES] = {0}; /* little-endian lengths */
    setsockopt(descriptor, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(descriptor, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
#ifdef SO_NOSIGPIPE
    const int yes = 1;
    setsockopt(descriptor, SOL_SOCKET, SO_NOSIGPIPE, &yes, sizeof yes);
#endif
    static const unsigned char length[8] = {4 + CAPS_BYTES};
    const bool answered = send(descriptor, request, sizeof request, MSG_NOSIGNAL) == (ssize_t)sizeof request &&
                          receive(descriptor, reply, sizeof length);
    if (!answered && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        return dt_fail(error, DT_ERR_IO,
                       "the RPC server %s does not answer: it serves one client at a time, so it may be busy with another%s, or it "
                       "hangs",
                       endpoint, is_first ? "" : ", or be one named before it under another name");
    }
    if (!answered) {
        return dt_fail(error, DT_ERR_IO,
                       "the RPC server %s hung up when greeted: has it just ended? Or is it no RPC server at all, and the port "
                       "another one?",
                       endpoint);
    }
    const bool known = memcmp(reply, length, sizeof length) == 0 && receive(descriptor, reply + 8, sizeof reply - 8);
    if (!known) {
        return dt_fail(error, DT_ERR_UNSUPPORTED,
                       "what listens at %s is no RPC server of protocol version %d: is the port right, and does "
                       "deeptutor-rpc-server of this version run there?",
                       endpoint, RPC_PROTO_MAJOR_VERSION);
    }
    if (reply[8] != RPC_PROTO_MAJOR_VERSION || reply[9] > RPC_PROTO_MINOR_VERSION) {
        return dt_fail(error, DT_ERR_UNSUPPORTED,
                       "the RPC server %s speaks protocol version %d.%d, this program %d.%d; run deeptutor-rpc-server of the same "
                       "version there",
                       endpoint, reply[8], reply[9], RPC_PROTO_MAJOR_VERSION, RPC_PROTO_MINOR_VERSION);
    }
    return DT_OK;
}

/* *descriptor: the open connection; -1 where there is none. */
static dt_status check(const char *endpoint, bool is_first, int *descriptor, dt_error *error) {
    char host[256], port[6];
    *descriptor = -1;
    dt_status status = split_endpoint(endpoint, host, sizeof host, port, error);
    if (status != DT_OK) {
        return status;
    }
    const struct addrinfo wanted = {.ai_family = AF_INET, .ai_socktype = SOCK_STREAM}; /* as ggml */
    struct addrinfo *address = NULL;
    const int unresolved = getaddrinfo(host, port, &wanted, &address);
    if (unresolved != 0) {
        return dt_fail(error, DT_ERR_IO, "the RPC server %s can't be found: the name '%s' does not resolve to an IPv4 address (%s)",
                       endpoint, host, gai_strerror(unresolved));
    }
    *descriptor = socket(AF_INET, SOCK_STREAM, 0);
    const int reason = *descriptor >= 0 ? connect_within(*descriptor, address) : errno;
    freeaddrinfo(address);
    if (reason != 0) {
        return dt_fail(error, DT_ERR_IO,
                       "the RPC server %s can't be reached: %s; does deeptutor-rpc-server run there, and listen "
                       "at that address (--host)?",
                       endpoint, strerror(reason));
    }
    return greet(*descriptor, endpoint, is_first, error);
}

dt_status dt_rpc_check(const char *const *endpoints, int32_t n, dt_error *error) {
    int descriptors[DT_MAX_SERVERS];
    int32_t n_open = 0;
    dt_status status = DT_OK;
    while (status == DT_OK && n_open < n) {
        status = check(endpoints[n_open], n_open == 0, &descriptors[n_open], error);
        n_open++;
    }
    for (int32_t i = 0; i < n_open; i++) {
        if (descriptors[i] >= 0) {
            close(descriptors[i]);
        }
    }
    return status;
}

/* ---- ggml's client ---- */

/* What ggml says before it ends the process; else it would print it, and a backtrace, to stderr. */
static void on_abort(const char *message) {
    dt_log(strstr(message, "ggml-rpc") != NULL ? DT_LOG_DEBUG : DT_LOG_ERROR, "ggml: %s", message);
}

dt_status dt_rpc_open(const char *endpoint, int32_t timeout_s, ggml_backend_dev_t *out, int32_t most, int32_t *n, dt_error *error) {
    typedef ggml_backend_reg_t (*add_server_fn)(const char *endpoint);
    typedef void (*set_timeout_fn)(int seconds);
    ggml_backend_reg_t rpc = ggml_backend_reg_by_name("RPC");
    const add_server_fn add_server =
        rpc != NULL ? (add_server_fn)ggml_backend_reg_get_proc_address(rpc, "ggml_backend_rpc_add_server") : NULL;
    if (add_server == NULL) {
        return dt_fail(error, DT_ERR_UNSUPPORTED, "this build can't compute on other machines; build it with -DDT_RPC=ON");
    }
    const set_timeout_fn set_timeout = (set_timeout_fn)ggml_backend_reg_get_proc_address(rpc, "rpc_transport_set_timeout");
    if (set_timeout != NULL) { /* a patch of ours: others wait for ever */
        set_timeout(timeout_s);
    }
    ggml_set_abort_callback(on_abort);
    ggml_backend_reg_t server = dt_ggml_add_server(add_server, endpoint);
    const size_t n_devices = server != NULL ? ggml_backend_reg_dev_count(server) : 0;
    if (n_devices == 0 || n_devices > (size_t)most) {
        return n_devices == 0 ? dt_fail(error, DT_ERR_COMPUTE, "the RPC server %s lends no device", endpoint)
                              : dt_fail(error, DT_ERR_ARGUMENT, "more devices than can be used at once");
    }
    for (size_t i = 0; i < n_devices; i++) {
        out[i] = ggml_backend_reg_dev_get(server, i);
    }
    *n = (int32_t)n_devices;
    return DT_OK;
}
