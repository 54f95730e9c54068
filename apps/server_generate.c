/*
 * Requests that generate: waiting for the scheduler, streams, clients that are gone. See server_internal.h.
 *
 * Whether a client is gone can't be told from the end of what it sends: a half-closed connection looks the same as a closed one
 * until something is sent to it, which a closed one answers with a reset. So at the end of its input something harmless is sent: a
 * comment in a stream, an interim response (102, which clients of HTTP/1.1 have to skip) before an answer.
 */
#define _GNU_SOURCE /* POLLRDHUP */
#include "server_internal.h"

#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#ifndef POLLRDHUP
#define POLLRDHUP 0 /* elsewhere only a reset tells that a client is gone */
#endif

#define KEEP_ALIVE_MS 15000 /* a stream says something at least so often */
#define STREAM_BLOCK (16 << 10)

/* ---- waiting ------------------------------------------------------------------------------------ */

typedef struct waiter { /* how the scheduler's thread wakes a connection's */
    int ends[2];
    int socket;
    bool input_ended, gone;
} waiter;

static void wake(void *user) {
    const waiter *w = user;
    const ssize_t written = write(w->ends[1], "", 1); /* full: it is awake anyway */
    (void)written;
}

static bool waiter_open(waiter *w, struct MHD_Connection *connection) {
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
    *w = (waiter){.ends = {-1, -1}, .socket = info != NULL ? info->connect_fd : -1};
    if (pipe(w->ends) != 0) {
        w->ends[0] = w->ends[1] = -1;
        return false;
    }
    for (int i = 0; i < 2; i++) {
        fcntl(w->ends[i], F_SETFL, O_NONBLOCK);
        fcntl(w->ends[i], F_SETFD, FD_CLOEXEC);
    }
    return true;
}

static void waiter_close(waiter *w) {
    for (int i = 0; i < 2; i++) {
        if (w->ends[i] >= 0) {
            close(w->ends[i]);
        }
    }
}

typedef enum waited { WAITED_NEWS, WAITED_LONG, WAITED_INPUT_ENDED, WAITED_GONE } waited;

static waited wait_for_news(waiter *w, int timeout_ms) {
    struct pollfd set[2] = {{.fd = w->ends[0], .events = POLLIN}, {.fd = w->socket, .events = w->input_ended ? 0 : POLLRDHUP}};
    const int n = poll(set, w->gone ? 1 : 2, timeout_ms);
    if (n == 0) {
        return WAITED_LONG;
    }
    if (n > 0 && (set[0].revents & POLLIN)) {
        char bytes[256];
        while (read(w->ends[0], bytes, sizeof bytes) == (ssize_t)sizeof bytes) {
        }
    }
    if (n > 0 && !w->gone && (set[1].revents & (POLLERR | POLLHUP | POLLNVAL))) {
        w->gone = true;
        return WAITED_GONE;
    }
    if (n > 0 && !w->gone && POLLRDHUP != 0 && (set[1].revents & POLLRDHUP)) {
        w->input_ended = true;
        return WAITED_INPUT_ENDED;
    }
    return WAITED_NEWS; /* or a signal */
}

static bool job_is(dt_job *job, dt_job_state state) {
    pthread_mutex_lock(&job->lock);
    const bool is = job->state == state;
    pthread_mutex_unlock(&job->lock);
    return is;
}

static bool all_done(const dt_request *request) {
    for (size_t i = 0; i < request->n_jobs; i++) {
        if (!job_is(request->jobs[i], DT_JOB_DONE)) {
            return false;
        }
    }
    return true;
}

static bool any_running(const dt_request *request) {
    for (size_t i = 0; i < request->n_jobs; i++) {
        if (job_is(request->jobs[i], DT_JOB_RUNNING)) {
            return true;
        }
    }
    return false;
}

/* ---- generation --------------------------------------------------------------------------------- */

typedef struct work { /* what a generating request needs until its answer is sent */
    dt_http *http;
    bool http_1_0;
    dt_request request;
    waiter waiter;
    /* streams */
    dt_stream *stream;
    dt_text pending;
    size_t n_sent;
    bool ended;
} work;

/* Ends the jobs and waits until the scheduler has let go of them. */
static void abandon(work *w) {
    for (size_t i = 0; i < w->request.n_jobs; i++) {
        dt_scheduler_cancel(w->http->params.api->scheduler, w->request.jobs[i]);
    }
    w->waiter.gone = true;
    while (!all_done(&w->request)) {
        wait_for_news(&w->waiter, -1);
    }
}

/* The jobs are done, or were never submitted. */
static void free_work(work *w) {
    dt_stream_free(w->stream);
    dt_request_free(&w->request);
    waiter_close(&w->waiter);
    free(w->pending.text);
    free(w);
}

/* Waits until all jobs are done or, for a stream, one runs. False: the client is gone, and the jobs have been ended. */
static bool wait_for_jobs(work *w) {
    while (!all_done(&w->request) && !(w->request.stream && any_running(&w->request))) {
        const waited what = wait_for_news(&w->waiter, -1);
        if (what == WAITED_INPUT_ENDED && !w->http_1_0) {
            static const char probe[] = "HTTP/1.1 102 Processing\r\n\r\n";
            const ssize_t sent = send(w->waiter.socket, probe, sizeof probe - 1, MSG_NOSIGNAL | MSG_DONTWAIT);
            (void)sent;
        }
        if (what == WAITED_GONE) {
            abandon(w);
            return false;
        }
    }
    return true;
}

static ssize_t read_stream(void *user, uint64_t position, char *buffer, size_t capacity) {
    (void)position;
    work *w = user;
    while (w->n_sent == w->pending.n) {
        if (w->ended) {
            return MHD_CONTENT_READER_END_OF_STREAM;
        }
        w->n_sent = w->pending.n = 0;
        w->ended = dt_stream_next(w->stream, &w->pending);
        if (w->pending.n == 0 && !w->ended) {
            const waited what = wait_for_news(&w->waiter, KEEP_ALIVE_MS);
            if (what == WAITED_GONE) {
                return MHD_CONTENT_READER_END_WITH_ERROR;
            }
            if (what != WAITED_NEWS) {
                dt_text_add(&w->pending, ":\n\n");
            }
        }
        if (w->pending.out_of_memory) {
            return MHD_CONTENT_READER_END_WITH_ERROR;
        }
    }
    const size_t left = w->pending.n - w->n_sent, n = left < capacity ? left : capacity;
    memcpy(buffer, w->pending.text + w->n_sent, n);
    w->n_sent += n;
    return (ssize_t)n;
}

static void end_stream(void *user) {
    work *w = user;
    abandon(w);
    free_work(w);
}

/* Takes w over. */
static enum MHD_Result send_stream(dt_exchange *e, work *w) {
    w->stream = dt_stream_new(w->http->params.api, &w->request);
    struct MHD_Response *response =
        w->stream != NULL ? MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, STREAM_BLOCK, read_stream, w, end_stream) : NULL;
    if (response == NULL) {
        end_stream(w);
        return MHD_NO;
    }
    MHD_add_response_header(response, "Cache-Control", "no-cache");
    MHD_add_response_header(response, "X-Accel-Buffering", "no");
    return dt_http_send_response(e->connection, 200, response, "text/event-stream; charset=utf-8");
}

static enum MHD_Result send_busy(const dt_exchange *e) {
    return dt_http_send_wait(e->connection, 429, "too many requests are waiting; try again after the time in Retry-After",
                             dt_scheduler_seconds_to_wait(e->http->params.api->scheduler), false);
}

/* Submits the jobs and answers. Takes w over. */
static enum MHD_Result run_jobs(dt_exchange *e, work *w) {
    dt_scheduler *scheduler = w->http->params.api->scheduler;
    for (size_t i = 0; i < w->request.n_jobs; i++) {
        w->request.jobs[i]->wake = wake;
        w->request.jobs[i]->wake_user = &w->waiter;
    }
    const dt_submitted submitted = dt_scheduler_submit(scheduler, w->request.jobs, w->request.n_jobs);
    if (submitted != DT_SUBMITTED) {
        free_work(w);
        return submitted == DT_SUBMIT_FULL ? send_busy(e) : dt_http_send_error(e->connection, 503, "the server is stopping");
    }
    if (!wait_for_jobs(w)) {
        free_work(w);
        return MHD_NO;
    }
    const bool done = all_done(&w->request);
    const dt_error *error = done ? dt_request_error(&w->request) : NULL;
    if (error == NULL && w->request.stream) {
        return send_stream(e, w);
    }
    const enum MHD_Result result = error != NULL
                                       ? dt_http_send_error(e->connection, dt_api_status_of(error), error->message)
                                       : dt_http_send_json(e->connection, 200, dt_api_answer(w->http->params.api, &w->request));
    free_work(w);
    return result;
}

enum MHD_Result dt_http_generate(dt_exchange *e, dt_api_kind kind) {
    dt_error error;
    work *w = calloc(1, sizeof *w);
    if (w == NULL) {
        return MHD_NO;
    }
    w->http = e->http;
    w->http_1_0 = e->http_1_0;
    const bool opened = waiter_open(&w->waiter, e->connection);
    const int status =
        opened ? dt_api_read(e->http->params.api, kind, e->body != NULL ? e->body : "", e->n_body, &w->request, &error) : 503;
    free(e->body); /* the jobs know all of it, and may take long */
    e->body = NULL;
    e->n_body = e->body_capacity = 0;
    if (status != 200) {
        free_work(w);
        return dt_http_send_error(e->connection, status,
                                  opened ? error.message : "too many requests at once; raise the limit on open files");
    }
    return run_jobs(e, w);
}
