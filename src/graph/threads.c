/*
 * See threads.h. Everything CPU-specific goes through the registry, so that the backend may be a library loaded at run time.
 */
#include "graph/threads.h"

#include "ggml-cpu.h"
#include "weights/ggml_calls.h"

_Static_assert(DT_MAX_THREADS <= GGML_MAX_N_THREADS, "ggml's pool has room for them");

/* Those that there were go; they stay where new ones can't be had. */
static bool start(dt_threads *t, int32_t n) {
    struct ggml_threadpool_params params = ggml_threadpool_params_default(n);
    struct ggml_threadpool *pool = t->new_pool(&params);
    if (!pool) {
        return false;
    }
    t->set_pool(t->cpu, pool);
    if (t->pool) {
        t->free_pool(t->pool);
    }
    t->pool = pool;
    t->n_pool = n;
    return true;
}

dt_status dt_threads_open(dt_threads *t, ggml_backend_reg_t registry, ggml_backend_t cpu, int32_t n_most, dt_error *error) {
    *t = (dt_threads){.cpu = cpu, .n_most = n_most};
    t->new_pool = (struct ggml_threadpool * (*)(struct ggml_threadpool_params *))
        ggml_backend_reg_get_proc_address(registry, "ggml_threadpool_new");
    t->free_pool = (void (*)(struct ggml_threadpool *))ggml_backend_reg_get_proc_address(registry, "ggml_threadpool_free");
    t->set_pool = (void (*)(ggml_backend_t, struct ggml_threadpool *))ggml_backend_reg_get_proc_address(
        registry, "ggml_backend_cpu_set_threadpool");
    t->set_n_threads = (ggml_backend_set_n_threads_t)ggml_backend_reg_get_proc_address(registry, "ggml_backend_set_n_threads");
    if (!t->new_pool || !t->free_pool || !t->set_pool || !t->set_n_threads) {
        return dt_fail(error, DT_ERR_UNSUPPORTED,
                       "ggml's CPU backend lacks a function DeepTutor needs; build against the version in deps/README.md");
    }
    dt_pace_start(&t->pace, n_most);
    return start(t, n_most) ? DT_OK
                            : dt_fail(error, DT_ERR_COMPUTE, "the threads for computing can't be started; use fewer with -t");
}

void dt_threads_close(dt_threads *t) {
    if (t->pool) {
        t->free_pool(t->pool);
    }
}

enum ggml_status dt_threads_compute(dt_threads *t, struct ggml_cgraph *cgraph, int32_t n, bool small) {
    const int32_t wanted = small ? dt_pace_threads(&t->pace, dt_clock_us()) : t->n_most;
    if (wanted != t->n_pool && start(t, wanted)) {
        dt_log(DT_LOG_DEBUG, "threads: %d of %d", wanted, t->n_most);
    }
    n = DT_MIN(n, t->n_pool);
    t->set_n_threads(t->cpu, n);
    if (!small) {
        return dt_ggml_compute(t->cpu, cgraph);
    }
    const int64_t began = dt_clock_us();
    const enum ggml_status status = dt_ggml_compute(t->cpu, cgraph);
    dt_pace_took(&t->pace, n, began, dt_clock_us(), dt_process_us());
    return status;
}

enum ggml_status dt_threads_share(dt_threads *t, struct ggml_cgraph *cgraph) {
    t->set_n_threads(t->cpu, t->n_pool);
    return dt_ggml_compute(t->cpu, cgraph);
}
