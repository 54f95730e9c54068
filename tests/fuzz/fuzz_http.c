/*
 * What comes over a connection: the bytes are sent to the server as they are, in two pieces, then nothing more. It has to answer or
 * close, and be done with the request once the client is gone.
 *
 * The mutator makes the length of the body fit, most of the time.
 */
#define _GNU_SOURCE /* memmem */
#include "fuzz.h"

#include "../../apps/report.h"
#include "../../apps/server_http.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define ANSWER_MS 300 /* the client's patience, where a reply has no end */
#define DONE_MS 60000 /* the server's, under a sanitizer on a busy machine */

static dt_http *http;

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc;
    (void)argv;
    dt_error error = {0};
    const dt_http_params params = {
        .api = fuzz_api(), .host = "127.0.0.1", .port = 0, .body_bytes_max = 16384, .n_connections_max = 16};
    dt_report_init(DT_LOG_ERROR, false);
    fuzz_require(dt_http_start(&params, &http, &error) == DT_OK, "the server starts");
    return 0;
}

static int64_t milliseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static bool is_busy(void) {
    dt_scheduler_stats stats;
    dt_scheduler_get_stats(fuzz_api()->scheduler, &stats);
    return stats.n_waiting + stats.n_running > 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const int s = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)dt_http_port(http))};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    fuzz_require(s >= 0 && connect(s, (struct sockaddr *)&address, sizeof address) == 0, "the server takes connections");
    setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    const struct timeval patience = {.tv_usec = ANSWER_MS * 1000};
    setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    setsockopt(s, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    const size_t first = size / 2;
    ssize_t n = send(s, data, first, MSG_NOSIGNAL);
    if (n == (ssize_t)first) {
        n = send(s, data + first, size - first, MSG_NOSIGNAL);
    }
    shutdown(s, SHUT_WR);
    char answer[4096];
    size_t n_answer = 0;
    const int64_t begun = milliseconds();
    while (milliseconds() - begun < ANSWER_MS && (n = recv(s, answer + n_answer, sizeof answer - n_answer, 0)) > 0) {
        n_answer = n_answer + (size_t)n < sizeof answer ? n_answer + (size_t)n : 0; /* the beginning is enough */
    }
    close(s);
    while (is_busy() && milliseconds() - begun < DONE_MS) {
        usleep(200);
    }
    fuzz_require(!is_busy(), "work ends when its client is gone");
    return 0;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    fuzz_random random = {seed};
    char length[64];
    size = LLVMFuzzerMutate(data, size, max_size > 64 ? max_size - 64 : max_size);
    static const char name[] = "Content-Length: ";
    uint8_t *field = memmem(data, size, name, sizeof name - 1), *body = memmem(data, size, "\r\n\r\n", 4);
    if (field == NULL || body == NULL || body < field || fuzz_below(&random, 8) == 0) {
        return size;
    }
    uint8_t *digits = field + sizeof name - 1, *end = digits;
    while (end < body && *end != '\r') {
        end++;
    }
    const size_t n_body = size - (size_t)(body + 4 - data);
    const size_t n = (size_t)snprintf(length, sizeof length, "%zu", n_body), old = (size_t)(end - digits);
    if (size + n - old > max_size) {
        return size;
    }
    memmove(digits + n, end, size - (size_t)(end - data));
    memcpy(digits, length, n);
    return size + n - old;
}
