/* Until the library computes many sessions at once: the same interface, one session after another. */
#ifndef DT_MANY_SHIM_H
#define DT_MANY_SHIM_H
#include "deeptutor.h"
#include <stdlib.h>
#include <string.h>
typedef struct dt_group { int unused; } dt_group;
typedef struct dt_group_params { int32_t n_threads, n_threads_batch; const char *kernel; uint64_t kv_memory; } dt_group_params;
typedef struct dt_step { dt_session *session; const int32_t *tokens; int32_t n; int32_t n_follow; float probability; dt_error error; } dt_step;
typedef struct dt_group_stats { int32_t n_sessions, n_threads; uint64_t kv_bytes, kv_bytes_peak; int64_t steps, tokens; } dt_group_stats;
static inline dt_status dt_group_new(const dt_model *m, const dt_group_params *p, dt_group **out, dt_error *e) { (void)m; (void)p; (void)e; *out = calloc(1, sizeof **out); return DT_OK; }
static inline void dt_group_free(dt_group *g) { free(g); }
static inline dt_status dt_session_reuse(dt_session *s, const int32_t *tokens, size_t n, dt_sync_result *r, dt_error *e) {
    size_t have, k = 0; const int32_t *t = dt_session_tokens(s, &have);
    while (k < have && k < n && t[k] == tokens[k]) k++;
    if (k == n && (k < have || !dt_session_logits(s))) k = n - 1;
    memset(r, 0, sizeof *r);
    if (k < have && k > 0) { dt_status st = dt_session_sync(s, tokens, k, NULL, NULL, r, e); if (st) return st; }
    r->reused_tokens = (int64_t)k; return DT_OK;
}
static inline dt_status dt_group_step(dt_group *g, dt_step *steps, size_t n, dt_error *e) {
    (void)g; (void)e;
    for (size_t i = 0; i < n; i++) {
        dt_step *s = &steps[i]; size_t have; const int32_t *t = dt_session_tokens(s->session, &have);
        s->error.code = DT_OK;
        if (s->n == 1 && s->n_follow == 0 && have > 0) { dt_session_append(s->session, s->tokens[0], s->probability, &s->error); continue; }
        int32_t *all = malloc((have + (size_t)s->n) * sizeof *all);
        if (have) memcpy(all, t, have * sizeof *all);
        memcpy(all + have, s->tokens, (size_t)s->n * sizeof *all);
        dt_session_sync(s->session, all, have + (size_t)s->n, NULL, NULL, NULL, &s->error);
        free(all);
    }
    return DT_OK;
}
static inline void dt_group_get_stats(const dt_group *g, dt_group_stats *o) { (void)g; memset(o, 0, sizeof *o); }
static inline uint64_t dt_session_kv_bound(const dt_session *s, int64_t n) { (void)s; return (uint64_t)n * 1000; }
#define DT_SESSION_N_BATCH(stats, params) ((params).n_batch > 0 ? (params).n_batch : 512)
#define DT_SESSION_SET_GROUP(params, g) (void)(g)
#endif
