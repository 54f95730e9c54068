/*
 * Transport: the server's life, requests and routes. See server_http.h; what generates is in server_generate.c.
 */
#define _GNU_SOURCE /* strdup */
#include "fail.h"
#include "report.h"
#include "server_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define IDLE_SECONDS 120   /* a connection without a request is closed then */
#define CROWDED_SECONDS 5  /* and one that is only there to be told that there are too many */
#define N_CROWDED 64       /* so many of those; any more are closed without a word */
#define UNREAD_MS 300000   /* one that takes nothing of an answer, too */
#define LAST_WORDS_MS 5000 /* for answers that are on their way when the server stops */
#define BACKLOG 512
#define IGNORED_BYTES_MAX ((size_t)64 << 20) /* of a body that is too large already; then the connection is closed */
#define STACK_BYTES ((size_t)1 << 20)

/* ---- answers ------------------------------------------------------------------------------------ */

enum MHD_Result dt_http_send_response(struct MHD_Connection *connection, int status, struct MHD_Response *response,
                                      const char *type) {
    if (response == NULL) {
        return MHD_NO;
    }
    if (type != NULL) {
        MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, type);
    }
    const enum MHD_Result result = MHD_queue_response(connection, (unsigned)status, response);
    MHD_destroy_response(response);
    return result;
}

/* NULL where memory is short. Takes the text over. */
static struct MHD_Response *text_response(char *text) {
    struct MHD_Response *response =
        text != NULL ? MHD_create_response_from_buffer(strlen(text), text, MHD_RESPMEM_MUST_FREE) : NULL;
    if (response == NULL) {
        free(text);
    }
    return response;
}

enum MHD_Result dt_http_send_text(struct MHD_Connection *connection, int status, char *text, const char *type) {
    return dt_http_send_response(connection, status, text_response(text), type);
}

enum MHD_Result dt_http_send_json(struct MHD_Connection *connection, int status, char *text) {
    return dt_http_send_text(connection, status, text, "application/json");
}

enum MHD_Result dt_http_send_error(struct MHD_Connection *connection, int status, const char *message) {
    return dt_http_send_json(connection, status, dt_api_error(status, message));
}

enum MHD_Result dt_http_send_wait(struct MHD_Connection *connection, int status, const char *message, int32_t seconds,
                                  bool closes) {
    char number[16];
    struct MHD_Response *response = text_response(dt_api_error(status, message));
    if (response == NULL) {
        return MHD_NO;
    }
    snprintf(number, sizeof number, "%d", (int)seconds);
    MHD_add_response_header(response, MHD_HTTP_HEADER_RETRY_AFTER, number);
    if (closes) {
        MHD_add_response_header(response, MHD_HTTP_HEADER_CONNECTION, "close");
    }
    return dt_http_send_response(connection, status, response, "application/json");
}

/* ---- paths -------------------------------------------------------------------------------------- */

static enum MHD_Result answer_chat(dt_exchange *e) { return dt_http_generate(e, DT_API_CHAT); }
static enum MHD_Result answer_completions(dt_exchange *e) { return dt_http_generate(e, DT_API_COMPLETION); }

static enum MHD_Result answer_models(dt_exchange *e) {
    return dt_http_send_json(e->connection, 200, dt_api_models(e->http->params.api));
}
static enum MHD_Result answer_props(dt_exchange *e) {
    return dt_http_send_json(e->connection, 200, dt_api_props(e->http->params.api));
}

static enum MHD_Result answer_tokenizer_info(dt_exchange *e) {
    return dt_http_send_json(e->connection, 200, dt_api_tokenizer_info(e->http->params.api));
}

static enum MHD_Result answer_health(dt_exchange *e) {
    const bool stopping = atomic_load(&e->http->stopping);
    char *text = strdup(stopping ? "{\"status\":\"stopping\"}" : "{\"status\":\"ok\"}");
    return dt_http_send_json(e->connection, stopping ? 503 : 200, text);
}

static enum MHD_Result answer_metrics(dt_exchange *e) {
    dt_text text = {0};
    dt_api_metrics(e->http->params.api, &text);
    if (text.out_of_memory) {
        free(text.text);
        return MHD_NO;
    }
    return dt_http_send_text(e->connection, 200, text.text, "text/plain; version=0.0.4; charset=utf-8");
}

static enum MHD_Result answer_tokenize(dt_exchange *e) {
    int status = 500;
    char *text = dt_api_tokenize(e->http->params.api, e->body != NULL ? e->body : "", e->n_body, &status);
    return dt_http_send_json(e->connection, status, text);
}

static enum MHD_Result answer_detokenize(dt_exchange *e) {
    int status = 500;
    char *text = dt_api_detokenize(e->http->params.api, e->body != NULL ? e->body : "", e->n_body, &status);
    return dt_http_send_json(e->connection, status, text);
}

static enum MHD_Result answer_page(dt_exchange *e) {
    struct MHD_Response *response =
        MHD_create_response_from_buffer(e->page->n_bytes, (void *)(uintptr_t)e->page->bytes, MHD_RESPMEM_PERSISTENT);
    if (response == NULL) {
        return MHD_NO;
    }
    MHD_add_response_header(response, "Cache-Control", "no-cache");
    MHD_add_response_header(response, "Content-Security-Policy",
                            "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'");
    MHD_add_response_header(response, "X-Content-Type-Options", "nosniff");
    return dt_http_send_response(e->connection, 200, response, e->page->type);
}

/* ---- requests ----------------------------------------------------------------------------------- */

typedef struct route {
    const char *path;
    bool post, open; /* open: without the key */
    enum MHD_Result (*answer)(dt_exchange *e);
} route;

static const route routes[] = {
    {"/v1/chat/completions", true, false, answer_chat},
    {"/v1/completions", true, false, answer_completions},
    {"/v1/models", false, false, answer_models},
    {"/tokenize", true, false, answer_tokenize},
    {"/detokenize", true, false, answer_detokenize},
    {"/tokenizer_info", false, false, answer_tokenizer_info},
    {"/health", false, true, answer_health},
    {"/metrics", false, false, answer_metrics},
    {"/props", false, true, answer_props},
};
static const route page_route = {"", false, true, answer_page};

#define TEXT_ONLY "this server generates text only: POST /v1/chat/completions or /v1/completions"

/* What llama.cpp's server answers and this one doesn't, and what stands in its place. */
static const struct {
    const char *path, *message;
} elsewhere[] = {
    {"/completion", "text is gone on from at POST /v1/completions, which takes \"n_predict\" too"},
    {"/completions", "text is gone on from at POST /v1/completions, which takes \"n_predict\" too"},
    {"/infill", "nothing is filled in between two texts here; POST /v1/completions goes on from one"},
    {"/chat/completions", "this is at POST /v1/chat/completions"},
    {"/v1/responses", "chats are answered at POST /v1/chat/completions"},
    {"/v1/messages", "chats are answered at POST /v1/chat/completions"},
    {"/apply-template", "POST /v1/chat/completions puts \"messages\" into the model's template; the text in between is not shown"},
    {"/models", "this is at GET /v1/models"},
    {"/v1/health", "this is at GET /health"},
    {"/slots", "there are no slots: a conversation is found again by its text; GET /metrics tells what runs and waits"},
    {"/lora-adapters", "adapters are not supported; merge them into the model before converting it"},
    {"/embedding", TEXT_ONLY},
    {"/embeddings", TEXT_ONLY},
    {"/v1/embeddings", TEXT_ONLY},
    {"/rerank", TEXT_ONLY},
    {"/reranking", TEXT_ONLY},
    {"/v1/rerank", TEXT_ONLY},
    {"/v1/reranking", TEXT_ONLY},
};

/* A path below one of these counts as that one: /slots/0. */
static const char *what_is_instead(const char *path) {
    for (size_t i = 0; i < sizeof elsewhere / sizeof elsewhere[0]; i++) {
        const size_t n = strlen(elsewhere[i].path);
        if (strncmp(elsewhere[i].path, path, n) == 0 && (path[n] == 0 || path[n] == '/')) {
            return elsewhere[i].message;
        }
    }
    return "there is nothing at this path; docs/server.md lists those that there are";
}

static void find_route(dt_exchange *e, const char *path) {
    for (size_t i = 0; i < sizeof routes / sizeof routes[0]; i++) {
        if (strcmp(routes[i].path, path) == 0) {
            e->route = &routes[i];
        }
    }
    for (size_t i = 0; i < dt_page_n_files; i++) {
        if (strcmp(dt_page_files[i].path, path) == 0) {
            e->page = &dt_page_files[i];
            e->route = &page_route;
        }
    }
}

/* In a time that tells nothing of where they differ. */
static bool same_key(const char *given, const char *key) {
    const size_t n_given = strlen(given), n_key = strlen(key);
    volatile unsigned char difference = n_given == n_key ? 0 : 1;
    for (size_t i = 0; i < n_given; i++) {
        difference = (unsigned char)(difference | (given[i] ^ key[n_key > 0 ? i % n_key : 0]));
    }
    return difference == 0;
}

static bool has_key(const dt_exchange *e) {
    const char *key = e->http->params.api_key;
    const char *given = MHD_lookup_connection_value(e->connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_AUTHORIZATION);
    return key == NULL || (given != NULL && strncasecmp(given, "Bearer ", 7) == 0 && same_key(given + 7, key));
}

/* libmicrohttpd ends a decoded path at its first NUL: /health%00x would be /health. So it is looked at before that; on_request comes
 * next in the same thread, as each connection has its own. */
static _Thread_local bool path_has_nul;

static void *on_target(void *user, const char *uri, struct MHD_Connection *connection) {
    (void)user;
    (void)connection;
    const char *nul = strstr(uri, "%00");
    path_has_nul = nul != NULL && (size_t)(nul - uri) < strcspn(uri, "?");
    return NULL;
}

/* What can be refused before the body came. 0: nothing. */
static int refuse_early(dt_exchange *e, const char *path, const char *method, const char **out_message) {
    const bool get = strcmp(method, "GET") == 0 || strcmp(method, "HEAD") == 0;
    const char *length = MHD_lookup_connection_value(e->connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_CONTENT_LENGTH);
    int64_t n = 0;
    if (path_has_nul) {
        *out_message = "the path holds a NUL character; leave it out";
        return 400;
    }
    if (e->route == NULL) {
        *out_message = what_is_instead(path);
        return 404;
    }
    if (!e->route->open && !has_key(e)) {
        *out_message = "the API key is missing or wrong; send it as Authorization: Bearer KEY";
        return 401;
    }
    if (e->route->post ? strcmp(method, "POST") != 0 : !get) {
        *out_message = e->route->post ? "this path takes POST" : "this path takes GET";
        return 405;
    }
    e->too_large = length != NULL && (!dt_parse_int(length, &n) || n > (int64_t)e->http->params.body_bytes_max);
    if (e->too_large) {
        *out_message = "the body is larger than this server takes (--max-body)";
        return 413;
    }
    return 0;
}

/* False: it has no end. */
static bool add_body(dt_exchange *e, const char *bytes, size_t n) {
    if (e->no_memory || e->too_large || n > e->http->params.body_bytes_max - e->n_body) {
        e->too_large = e->too_large || !e->no_memory;
        e->n_ignored += n;
        return e->n_ignored <= IGNORED_BYTES_MAX;
    }
    if (e->body_capacity - e->n_body < n) {
        const size_t capacity = 2 * e->body_capacity + n;
        char *grown = realloc(e->body, capacity);
        if (grown == NULL) {
            e->no_memory = true;
            return true;
        }
        e->body = grown;
        e->body_capacity = capacity;
    }
    memcpy(e->body + e->n_body, bytes, n);
    e->n_body += n;
    return true;
}

static enum MHD_Result on_request(void *user, struct MHD_Connection *connection, const char *url, const char *method,
                                  const char *version, const char *upload, size_t *n_upload, void **state) {
    dt_exchange *e = *state;
    if (e == NULL) { /* the header is here */
        const char *message = NULL;
        e = calloc(1, sizeof *e);
        if (e == NULL) {
            return MHD_NO;
        }
        *state = e;
        e->http = user;
        e->connection = connection;
        e->http_1_0 = strcmp(version, "HTTP/1.0") == 0;
        find_route(e, url);
        const union MHD_ConnectionInfo *beyond = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
        if (beyond != NULL && beyond->socket_context != NULL) {
            return dt_http_send_wait(connection, 503, "too many connections are open; close idle ones, or try again later",
                                     CROWDED_SECONDS, true);
        }
        const int status = refuse_early(e, url, method, &message);
        return status != 0 ? dt_http_send_error(connection, status, message) : MHD_YES;
    }
    if (*n_upload > 0) {
        const bool goes_on = add_body(e, upload, *n_upload);
        *n_upload = 0;
        return goes_on ? MHD_YES : MHD_NO; /* closes the connection: an answer can only follow the body's end */
    }
    if (e->too_large) {
        return dt_http_send_error(connection, 413, "the body is larger than this server takes (--max-body)");
    }
    if (e->no_memory) {
        return dt_http_send_error(connection, 503, "the server is out of memory for the body; try again later");
    }
    MHD_set_connection_option(connection, MHD_CONNECTION_OPTION_TIMEOUT, 0u); /* an answer may take long */
    atomic_fetch_add(&e->http->n_answering, e->answering ? 0 : 1);
    e->answering = true;
    return e->route->answer(e);
}

static void on_completed(void *user, struct MHD_Connection *connection, void **state, enum MHD_RequestTerminationCode code) {
    dt_exchange *e = *state;
    (void)user;
    (void)code;
    if (e != NULL) {
        atomic_fetch_sub(&e->http->n_answering, e->answering ? 1 : 0);
        MHD_set_connection_option(connection, MHD_CONNECTION_OPTION_TIMEOUT, (unsigned)IDLE_SECONDS);
        free(e->body);
        free(e);
        *state = NULL;
    }
}

/* *state: not NULL where there are too many. */
static void on_connection(void *user, struct MHD_Connection *connection, void **state, enum MHD_ConnectionNotificationCode code) {
    dt_http *http = user;
    if (code == MHD_CONNECTION_NOTIFY_CLOSED) {
        atomic_fetch_sub(&http->n_connections, 1);
        return;
    }
    if (atomic_fetch_add(&http->n_connections, 1) >= http->params.n_connections_max) {
        *state = http;
        MHD_set_connection_option(connection, MHD_CONNECTION_OPTION_TIMEOUT, (unsigned)CROWDED_SECONDS);
    }
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
    if (info != NULL) {
#ifdef TCP_USER_TIMEOUT
        const unsigned timeout_ms = UNREAD_MS;
        setsockopt(info->connect_fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout_ms, sizeof timeout_ms);
#endif
        const int on = 1;
        setsockopt(info->connect_fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    }
}

static void on_log(void *user, const char *format, va_list arguments) {
    (void)user;
    char line[512];
    vsnprintf(line, sizeof line, format, arguments);
    line[strcspn(line, "\r\n")] = 0;
    dt_report(DT_LOG_DEBUG, "http: %s", line);
}

/* ---- life --------------------------------------------------------------------------------------- */

static dt_status fail_address(const dt_http_params *p, const char *reason, dt_error *error) {
    snprintf(error->message, sizeof error->message, "can't listen at %s port %d: %s; choose others with --host and --port", p->host,
             p->port, reason);
    return error->code = DT_ERR_IO;
}

/* A listening socket; -1 with the error set. */
static int listen_at(const dt_http_params *p, int *out_port, dt_error *error) {
    char port[16];
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE}, *found = NULL;
    snprintf(port, sizeof port, "%d", p->port);
    const int code = getaddrinfo(p->host, port, &hints, &found);
    if (code != 0) {
        fail_address(p, gai_strerror(code), error);
        return -1;
    }
    const int on = 1, s = socket(found->ai_family, SOCK_STREAM, 0);
    struct sockaddr_storage bound;
    socklen_t n_bound = sizeof bound;
    bool good = s >= 0 && setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
                bind(s, found->ai_addr, found->ai_addrlen) == 0 && listen(s, BACKLOG) == 0 && fcntl(s, F_SETFD, FD_CLOEXEC) == 0 &&
                getsockname(s, (struct sockaddr *)&bound, &n_bound) == 0;
    freeaddrinfo(found);
    if (!good) {
        fail_address(p, strerror(errno), error);
        if (s >= 0) {
            close(s);
        }
        return -1;
    }
    /* NOLINTNEXTLINE(clang-analyzer-core.CallAndMessage,clang-analyzer-core.UndefinedBinaryOperatorResult): getsockname filled it in */
    *out_port = ntohs(bound.ss_family == AF_INET6 ? ((const struct sockaddr_in6 *)&bound)->sin6_port
                                                  : ((const struct sockaddr_in *)&bound)->sin_port);
    return s;
}

dt_status dt_http_start(const dt_http_params *params, dt_http **out, dt_error *error) {
    dt_http *http = calloc(1, sizeof *http);
    if (http == NULL) {
        return fail_address(params, "out of memory", error);
    }
    http->params = *params;
    const int s = listen_at(params, &http->port, error);
    if (s < 0) {
        free(http);
        return error->code;
    }
    http->daemon = MHD_start_daemon(
        MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_THREAD_PER_CONNECTION | MHD_USE_POLL | MHD_USE_ITC | MHD_USE_ERROR_LOG, 0, NULL,
        NULL, on_request, http, MHD_OPTION_EXTERNAL_LOGGER, on_log, NULL, MHD_OPTION_LISTEN_SOCKET, s, MHD_OPTION_URI_LOG_CALLBACK,
        on_target, NULL, MHD_OPTION_NOTIFY_COMPLETED, on_completed, NULL, MHD_OPTION_NOTIFY_CONNECTION, on_connection, http,
        MHD_OPTION_CONNECTION_LIMIT, (unsigned)params->n_connections_max + N_CROWDED, MHD_OPTION_CONNECTION_TIMEOUT,
        (unsigned)IDLE_SECONDS, MHD_OPTION_THREAD_STACK_SIZE, STACK_BYTES, MHD_OPTION_END);
    if (http->daemon == NULL) {
        const int reason = errno;
        close(s);
        free(http);
        return dt_app_fail(error, DT_ERR_IO, "the server's thread can't be started: %s; raise the limits on processes and memory",
                           reason != 0 ? strerror(reason) : "no reason was given");
    }
    *out = http;
    return DT_OK;
}

int dt_http_port(const dt_http *http) { return http->port; }

void dt_http_quiesce(dt_http *http) {
    atomic_store(&http->stopping, true);
    const int s = MHD_quiesce_daemon(http->daemon);
    if (s >= 0) {
        close(s);
    }
}

void dt_http_stop(dt_http *http) {
    const struct timespec pause = {.tv_nsec = 5 * 1000 * 1000};
    if (http != NULL) {
        /* the daemon cuts answers off where they are; one whose client does not read is not waited for */
        for (int ms = 0; atomic_load(&http->n_answering) > 0 && ms < LAST_WORDS_MS; ms += 5) {
            nanosleep(&pause, NULL);
        }
        MHD_stop_daemon(http->daemon);
        free(http);
    }
}
