/*
 * The threads that compute on the CPU: a pool of ggml's, which small steps make smaller where other programs want the processor.
 *
 * Invariant: as many threads wait in the pool as the last step could use, since one without a part in a step would spin until the
 * next. Used by one thread at a time.
 */
#ifndef DT_THREADS_H
#define DT_THREADS_H

#include "graph/pace.h"

#include "ggml-backend.h"

struct ggml_threadpool;
struct ggml_threadpool_params;

typedef struct dt_threads {
    ggml_backend_t cpu;
    int32_t n_most, n_pool; /* at most, now */
    dt_pace pace;
    struct ggml_threadpool *pool;
    struct ggml_threadpool *(*new_pool)(struct ggml_threadpool_params *);
    void (*free_pool)(struct ggml_threadpool *);
    void (*set_pool)(ggml_backend_t, struct ggml_threadpool *);
    ggml_backend_set_n_threads_t set_n_threads;
} dt_threads;

/* Starts n_most threads for the backend `cpu` of `registry`. */
dt_status dt_threads_open(dt_threads *t, ggml_backend_reg_t registry, ggml_backend_t cpu, int32_t n_most, dt_error *error);
/* After the backend was freed; all zeros are accepted. */
void dt_threads_close(dt_threads *t);
/* Computes with at most n of them. A small step takes as many threads as there are cores for; a large one, in which threads rarely
 * meet, gets more of a busy processor with all. */
enum ggml_status dt_threads_compute(dt_threads *t, struct ggml_cgraph *cgraph, int32_t n, bool small);
/* Computes with those that wait in the pool; none is started, none ends. */
enum ggml_status dt_threads_share(dt_threads *t, struct ggml_cgraph *cgraph);

#endif
