/*
 * HTTP for ./deeptutor-server: libmicrohttpd with a thread per connection. A thread parses its request, gives the jobs to the
 * scheduler and waits for what comes of them, so a slow reader holds up nobody but itself.
 *
 * Invariants: a request ends when its client is gone, whatever it was waiting for, except that one who has only closed his sending
 * half still gets the answer; no body beyond the limit is kept; nothing but /health and the page is answered without the key where
 * there is one.
 */
#ifndef DT_APPS_SERVER_HTTP_H
#define DT_APPS_SERVER_HTTP_H

#include "api.h"

typedef struct dt_http dt_http;

typedef struct dt_http_params {
    const dt_api *api;
    const char *host;
    int port;            /* 0: any free one */
    const char *api_key; /* NULL: none */
    size_t body_bytes_max;
    int n_connections_max; /* a few more are told so */
} dt_http_params;

/* Fails with DT_ERR_IO where the address can't be had. */
dt_status dt_http_start(const dt_http_params *params, dt_http **out, dt_error *error);
int dt_http_port(const dt_http *http);
/* No more connections; new requests on old ones are refused with 503. */
void dt_http_quiesce(dt_http *http);
/* Waits for the threads of connections. All jobs must end without it: dt_scheduler_stop. NULL is accepted. */
void dt_http_stop(dt_http *http);

#endif
