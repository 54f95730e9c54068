/*
 * What server_http.c (requests, routes, the server's life) and server_generate.c (requests that generate) share.
 */
#ifndef DT_APPS_SERVER_INTERNAL_H
#define DT_APPS_SERVER_INTERNAL_H

#include "server_http.h"
#include "server_page.h"

#include <microhttpd.h>
#include <stdatomic.h>

struct dt_http {
    dt_http_params params;
    struct MHD_Daemon *daemon;
    int port;
    atomic_bool stopping;
    atomic_int n_connections;
    atomic_int n_answering; /* requests whose answer is not written to its end yet */
};

typedef struct dt_exchange { /* a request and its answer */
    struct dt_http *http;
    struct MHD_Connection *connection;
    char *body;
    size_t n_body, body_capacity, n_ignored;
    bool too_large, no_memory, http_1_0, answering;
    const struct route *route;
    const dt_page_file *page;
} dt_exchange;

/* ---- server_http.c: answers ---- */
/* response NULL closes the connection, as text NULL does: memory is short. Each takes what it is given over. type: of the content,
 * may be NULL. */
enum MHD_Result dt_http_send_response(struct MHD_Connection *connection, int status, struct MHD_Response *response,
                                      const char *type);
enum MHD_Result dt_http_send_text(struct MHD_Connection *connection, int status, char *text, const char *type);
enum MHD_Result dt_http_send_json(struct MHD_Connection *connection, int status, char *text);
/* As OpenAI's servers say it; the message is copied. */
enum MHD_Result dt_http_send_error(struct MHD_Connection *connection, int status, const char *message);
/* The same to a client that may come again in so many seconds. closes: its connection, behind the answer. */
enum MHD_Result dt_http_send_wait(struct MHD_Connection *connection, int status, const char *message, int32_t seconds, bool closes);

/* ---- server_generate.c ---- */
/* Reads the body, runs its jobs and answers, at once or as a stream. */
enum MHD_Result dt_http_generate(dt_exchange *e, dt_api_kind kind);

#endif
