/*
 * attn/: every kernel this machine supports against the scalar reference, over head sizes, types, masks, batch and lane shapes
 * drawn from lists with a fixed seed; and the promises that are exact: what is stored, and results that do not depend on threads
 * or batch.
 *
 * A scene owns lanes of cached entries and one batch. Outputs and mass are poisoned with NaN before every run, so what a kernel
 * does not write is seen; scratch has exactly the promised size, so that the address sanitizer sees what goes beyond.
 */
#include "attn/attn_driver.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/cmocka_all.h"

#ifndef DT_TEST_SCENES
#define DT_TEST_SCENES 220 /* fewer where an emulator runs them */
#endif

/* ---- scenes ---- */

typedef enum scene_bias { BIAS_NONE, BIAS_SOME, BIAS_HOLES, BIAS_ALL_GONE } scene_bias;
typedef enum scene_mass { MASS_NONE, MASS_ALL, MASS_LAST } scene_mass;

typedef struct scene_params {
    dt_kv_type type_k, type_v;
    int32_t dim_k, dim_v, block_tokens, n_lanes, n_rep, n_query;
    int32_t n_old; /* entries before the batch in the longest lane; lane i has a little less */
    bool ragged;   /* spans with fewer entries than fit, some with none */
    int32_t window;
    float softcap, magnitude;
    scene_bias bias;
    scene_mass mass;
    uint64_t seed;
} scene_params;

enum { MAX_LANES = 4, MAX_SPANS = 128 };

typedef struct scene {
    scene_params p;
    dt_kv_format format;
    dt_attn_job job;
    dt_attn_lane lanes[MAX_LANES];
    dt_kv_span spans[MAX_LANES][MAX_SPANS];
    float *q, *k, *v, *out, *mass;
    int32_t *positions, *mass_row;
    size_t n_out, n_mass;
    uint64_t random;
} scene;

static uint64_t draw(uint64_t *state) { /* splitmix64 */
    uint64_t z = (*state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}
static int32_t draw_below(uint64_t *state, int32_t n) { return (int32_t)(draw(state) % (uint64_t)n); }
static float draw_float(uint64_t *state) { return (float)((double)(draw(state) >> 11) * 0x1p-52 - 1.0); }

static float *new_floats(uint64_t *state, size_t n, float magnitude) {
    float *x = malloc(n * sizeof(float));
    assert_non_null(x);
    for (size_t i = 0; i < n; i++) {
        x[i] = draw_float(state) * magnitude;
    }
    return x;
}

static void *new_aligned(size_t bytes) {
    void *memory = aligned_alloc(64, DT_ROUND_UP(bytes, (size_t)64));
    assert_non_null(memory);
    return memory;
}

static void poison(float *x, size_t n) {
    for (size_t i = 0; i < n; i++) {
        x[i] = NAN;
    }
}

static bool is_finite_array(const float *x, size_t n) {
    bool finite = true;
    for (size_t i = 0; i < n; i++) {
        finite = finite && dt_is_finite(x[i]);
    }
    return finite;
}

/* Spans of a lane with n entries. */
static void make_spans(scene *s, int32_t lane, int32_t n) {
    const int32_t tokens = s->p.block_tokens;
    dt_attn_lane *l = &s->lanes[lane];
    l->spans = s->spans[lane];
    l->n_entries = n;
    l->n_spans = 0;
    for (int32_t left = n; left > 0;) {
        assert_true(l->n_spans < MAX_SPANS);
        int32_t take = DT_MIN(left, tokens);
        if (s->p.ragged && draw_below(&s->random, 3) == 0) {
            take = draw_below(&s->random, DT_MIN(take, tokens - 1) + 1);
        }
        dt_kv_span *span = &s->spans[lane][l->n_spans++];
        span->n = take;
        span->block = new_aligned(s->format.block_bytes);
        memset(span->block, 0, s->format.block_bytes);
        if (s->p.bias != BIAS_NONE) {
            float *bias = new_floats(&s->random, (size_t)tokens, 2.0f);
            for (int32_t t = 0; t < tokens; t++) {
                const bool gone = s->p.bias == BIAS_ALL_GONE || (s->p.bias == BIAS_HOLES && draw_below(&s->random, 3) == 0);
                bias[t] = gone ? -INFINITY : bias[t];
            }
            span->bias = bias;
        } else {
            span->bias = NULL;
        }
        left -= take;
    }
}

static const dt_attn_kernel *reference(void) { return dt_attn_kernel_find("reference", NULL); }

/* Writes a lane's old entries, as a batch of their own. */
static void fill_lane(scene *s, int32_t lane) {
    dt_attn_lane *l = &s->lanes[lane];
    const int32_t n = l->n_entries;
    float *k = new_floats(&s->random, (size_t)n * (size_t)s->p.dim_k, s->p.magnitude);
    float *v = new_floats(&s->random, (size_t)n * (size_t)s->p.dim_v, s->p.magnitude);
    int32_t *positions = malloc((size_t)n * sizeof(int32_t));
    assert_non_null(positions);
    for (int32_t i = 0; i < n; i++) {
        positions[i] = i;
    }
    for (int32_t i = 0; i < n / 8; i++) { /* committed entries have no order */
        const int32_t a = draw_below(&s->random, n), b = draw_below(&s->random, n), old = positions[a];
        positions[a] = positions[b];
        positions[b] = old;
    }
    dt_attn_job job = {.kernel = reference(),
                       .format = &s->format,
                       .n_lanes = 1,
                       .n_rep = 1,
                       .n_query = n,
                       .positions = positions,
                       .lanes = l,
                       .k = k,
                       .v = v,
                       .k_token_stride = (size_t)s->p.dim_k,
                       .v_token_stride = (size_t)s->p.dim_v};
    reference()->store(&job, 0, 1);
    free(k);
    free(v);
    free(positions);
}

static void make_batch(scene *s) {
    const scene_params *p = &s->p;
    const size_t heads = (size_t)(p->n_lanes * p->n_rep), lanes = (size_t)p->n_lanes, n = (size_t)p->n_query;
    /* strides larger than needed, of q and out laid out differently */
    const size_t dim_k = (size_t)p->dim_k, dim_v = (size_t)p->dim_v;
    s->q = new_floats(&s->random, n * heads * dim_k, p->magnitude);
    s->k = new_floats(&s->random, n * lanes * (dim_k + 1), p->magnitude);
    s->v = new_floats(&s->random, n * lanes * (dim_v + 3), p->magnitude);
    s->n_out = n * heads * dim_v;
    s->out = malloc(s->n_out * sizeof(float));
    s->positions = malloc(n * sizeof(int32_t));
    s->mass_row = malloc(n * sizeof(int32_t));
    assert_true(s->out != NULL && s->positions != NULL && s->mass_row != NULL);
    int32_t n_rows = 0;
    for (int32_t i = 0; i < p->n_query; i++) {
        s->positions[i] = p->n_old + i;
        s->mass_row[i] = p->mass == MASS_ALL || i >= p->n_query - 5 ? n_rows++ : -1;
    }
    const size_t stride = (size_t)(p->n_old + p->n_query + 3);
    s->n_mass = (size_t)n_rows * stride;
    s->mass = malloc(lanes * s->n_mass * sizeof(float));
    assert_non_null(s->mass);
    s->job = (dt_attn_job){
        .format = &s->format,
        .n_lanes = p->n_lanes,
        .n_rep = p->n_rep,
        .n_query = p->n_query,
        .scale = 1.0f / sqrtf((float)p->dim_k),
        .softcap = p->softcap,
        .window = p->window,
        .positions = s->positions,
        .lanes = s->lanes,
        .q = s->q,
        .k = s->k,
        .v = s->v,
        .out = s->out,
        .q_token_stride = dim_k,
        .q_head_stride = dim_k * n, /* heads outermost */
        .k_token_stride = (dim_k + 1) * lanes,
        .k_head_stride = dim_k + 1,
        .v_token_stride = (dim_v + 3) * lanes,
        .v_head_stride = dim_v + 3,
        .out_token_stride = dim_v * heads,
        .out_head_stride = dim_v,
        .mass_row = p->mass == MASS_NONE ? NULL : s->mass_row,
        .n_mass_rows = n_rows,
        .mass_stride = stride,
    };
}

static scene *make_scene(const scene_params *params) {
    scene *s = calloc(1, sizeof *s);
    assert_non_null(s);
    s->p = *params;
    s->random = params->seed;
    dt_kv_format_init(&s->format, params->type_k, params->type_v, params->dim_k, params->dim_v, params->block_tokens);
    make_batch(s);
    for (int32_t lane = 0; lane < params->n_lanes; lane++) {
        const int32_t n = DT_MAX(params->n_old - lane * 37, 0) + params->n_query;
        make_spans(s, lane, n);
        s->lanes[lane].value_norm = malloc((size_t)n * sizeof(float));
        s->lanes[lane].mass = s->mass + (size_t)lane * s->n_mass;
        assert_non_null(s->lanes[lane].value_norm);
        fill_lane(s, lane);
    }
    return s;
}

static void free_scene(scene *s) {
    for (int32_t lane = 0; lane < s->p.n_lanes; lane++) {
        for (int32_t i = 0; i < s->lanes[lane].n_spans; i++) {
            free(s->spans[lane][i].block);
            free((void *)(uintptr_t)s->spans[lane][i].bias);
        }
        free(s->lanes[lane].value_norm);
    }
    float *const arrays[] = {s->q, s->k, s->v, s->out, s->mass};
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) {
        free(arrays[i]);
    }
    free(s->positions);
    free(s->mass_row);
    free(s);
}

/* ---- running ---- */

enum { STORE = 1, ATTEND = 2, ALL = 3 };

/* pthread_barrier_t is optional in POSIX and missing on macOS */
typedef struct meeting {
    pthread_mutex_t mutex;
    pthread_cond_t everybody_here;
    int32_t n_expected, n_here, n_meetings;
} meeting;

static void meet(meeting *m) {
    pthread_mutex_lock(&m->mutex);
    const int32_t this_one = m->n_meetings;
    if (++m->n_here == m->n_expected) {
        m->n_here = 0;
        m->n_meetings++;
        pthread_cond_broadcast(&m->everybody_here);
    }
    while (m->n_meetings == this_one) {
        pthread_cond_wait(&m->everybody_here, &m->mutex);
    }
    pthread_mutex_unlock(&m->mutex);
}

typedef struct worker {
    dt_attn_job *job;
    meeting *meeting;
    int32_t ith, nth, phases;
} worker;

static void *work(void *argument) {
    const worker *w = argument;
    if ((w->phases & STORE) != 0) {
        w->job->kernel->store(w->job, w->ith, w->nth);
        meet(w->meeting);
    }
    if ((w->phases & ATTEND) != 0) {
        w->job->kernel->attend(w->job, w->ith, w->nth);
        meet(w->meeting);
        w->job->kernel->observe(w->job, w->ith, w->nth);
    }
    return NULL;
}

static void run(const dt_attn_kernel *kernel, dt_attn_job *job, int32_t n_threads, int32_t phases) {
    int32_t max_entries = 0;
    for (int32_t lane = 0; lane < job->n_lanes; lane++) {
        max_entries = DT_MAX(max_entries, job->lanes[lane].n_spans * job->format->block_tokens);
    }
    job->kernel = kernel;
    job->scratch_bytes = kernel->scratch_bytes(job->format, job->n_lanes, job->n_rep, job->n_query, max_entries);
    job->scratch = new_aligned(job->scratch_bytes);
    memset(job->scratch, 0xFF, job->scratch_bytes); /* NaN */
    job->thread_bytes = kernel->thread_bytes(job->format, max_entries);
    job->thread_scratch = new_aligned((size_t)n_threads * job->thread_bytes);
    memset(job->thread_scratch, 0xFF, (size_t)n_threads * job->thread_bytes);
    kernel->prepare(job);
    worker workers[8];
    pthread_t threads[8];
    meeting all = {.n_expected = n_threads};
    assert_true(pthread_mutex_init(&all.mutex, NULL) == 0 && pthread_cond_init(&all.everybody_here, NULL) == 0);
    for (int32_t i = 0; i < n_threads; i++) {
        workers[i] = (worker){job, &all, i, n_threads, phases};
        assert_true(i == 0 || pthread_create(&threads[i], NULL, work, &workers[i]) == 0);
    }
    work(&workers[0]);
    for (int32_t i = 1; i < n_threads; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    }
    assert_true(pthread_cond_destroy(&all.everybody_here) == 0 && pthread_mutex_destroy(&all.mutex) == 0);
    free(job->scratch);
    free(job->thread_scratch);
    job->scratch = job->thread_scratch = NULL;
}

static void run_scene(const dt_attn_kernel *kernel, scene *s, int32_t n_threads) {
    poison(s->out, s->n_out);
    poison(s->mass, (size_t)s->p.n_lanes * s->n_mass);
    run(kernel, &s->job, n_threads, ALL);
}

static float *copy_of(const float *x, size_t n) {
    float *copy = malloc(DT_MAX(n, (size_t)1) * sizeof(float));
    assert_non_null(copy);
    memcpy(copy, x, n * sizeof(float));
    return copy;
}

static const dt_attn_kernel *fast_kernel(int32_t i) {
    int32_t n;
    const dt_attn_kernel *kernels = dt_attn_kernels(&n);
    for (int32_t k = 0; k < n; k++) {
        if (kernels[k].ops != NULL && kernels[k].supported() && i-- == 0) {
            return &kernels[k];
        }
    }
    return NULL;
}

#define INT16_TOLERANCE 1e-3f /* about what rounding to the F16 of the cache did before */

/* Tiles, of many rows, round more than F32. Those in 16-bit integers have a reference of their own, which rounds alike. */
static bool in_tiles(const dt_attn_kernel *kernel, const dt_attn_job *job) {
    return kernel->int16 != NULL && job->n_query * job->n_rep > DT_ATTN_SPAN_ROWS;
}
static bool in_int16(const dt_attn_kernel *kernel, const dt_attn_job *job) {
    return kernel->split == NULL && in_tiles(kernel, job);
}

static void describe(const char *kernel, const scene_params *p) {
    print_error(
        "kernel %s: k %d v %d dim %d/%d block %d lanes %d rep %d query %d old %d ragged %d window %d softcap %g bias %d mass %d "
        "seed %llu\n",
        kernel, (int)p->type_k, (int)p->type_v, p->dim_k, p->dim_v, p->block_tokens, p->n_lanes, p->n_rep, p->n_query, p->n_old,
        (int)p->ragged, p->window, (double)p->softcap, (int)p->bias, (int)p->mass, (unsigned long long)p->seed);
}

/* Every number finite and within `tolerance` of the reference. */
static void compare(const char *kernel, const scene *s, const char *what, const float *x, const float *expected, size_t n,
                    float tolerance) {
    float worst = 0.0f;
    bool good = is_finite_array(x, n);
    for (size_t i = 0; good && i < n; i++) {
        const float error = fabsf(x[i] - expected[i]);
        worst = error > worst ? error : worst;
    }
    if (!good || !(worst <= tolerance)) {
        describe(kernel, &s->p);
        fail_msg("%s: %s", what, good ? "differs from the reference" : "not finite");
    }
}

/* ---- against the reference ---- */

/* wanted_sum: of every row; negative where rows differ */
static void check_mass(const char *kernel, const scene *s, const float *expected, float tolerance, double wanted_sum) {
    for (int32_t lane = 0; lane < s->p.n_lanes; lane++) {
        for (int32_t row = 0; row < s->job.n_mass_rows; row++) {
            const size_t at = (size_t)lane * s->n_mass + (size_t)row * s->job.mass_stride, n = (size_t)s->lanes[lane].n_entries;
            compare(kernel, s, "mass", s->mass + at, expected + at, n, tolerance);
            double sum = 0.0;
            for (size_t t = 0; t < n; t++) {
                sum += (double)s->mass[at + t];
            }
            assert_true(wanted_sum < 0.0 || fabs(sum - wanted_sum) <= 1e-4 * (double)s->p.n_rep);
        }
    }
}

static void check_scene(const scene_params *params, int32_t n_threads) {
    scene *s = make_scene(params);
    const size_t n_mass = (size_t)params->n_lanes * s->n_mass;
    const float unit = params->magnitude * (params->softcap > 0.0f ? 2.0f : 1.0f);
    run_scene(reference(), s, 1);
    float *out = copy_of(s->out, s->n_out), *mass = copy_of(s->mass, n_mass);
    assert_true(is_finite_array(out, s->n_out));
    if (params->n_query * params->n_rep > DT_ATTN_SPAN_ROWS) { /* else it is the same code */
        run_scene(dt_attn_kernel_find("reference_int16", NULL), s, 1);
        compare("reference_int16", s, "out", s->out, out, s->n_out, INT16_TOLERANCE * unit);
    }
    float *out_int16 = copy_of(s->out, s->n_out);
    for (int32_t i = 0; fast_kernel(i) != NULL; i++) {
        const dt_attn_kernel *kernel = fast_kernel(i);
        const bool int16 = in_int16(kernel, &s->job);
        run_scene(kernel, s, n_threads);
        const bool bytes =
            kernel->int16 != NULL && (params->type_k == DT_KV_INT8 || params->type_v == DT_KV_INT8 || in_tiles(kernel, &s->job));
        compare(kernel->name, s, "out", s->out, int16 ? out_int16 : out, s->n_out, (int16 || bytes ? 1e-4f : 2e-5f) * unit);
        if (params->mass != MASS_NONE) {
            /* holes may leave a query nothing to see */
            const double n_rep = (double)params->n_rep;
            check_mass(kernel->name, s, mass,
                       (int16   ? INT16_TOLERANCE
                        : bytes ? 1e-4f
                                : 2e-5f) *
                           (float)params->n_rep,
                       params->bias == BIAS_HOLES      ? -1.0
                       : params->bias == BIAS_ALL_GONE ? 0.0
                                                       : n_rep);
        }
    }
    free(out_int16);
    free(out);
    free(mass);
    free_scene(s);
}

#define PICK(state, ...)                                                                                                           \
    ((const int32_t[]){__VA_ARGS__}[draw_below(state, (int32_t)(sizeof((const int32_t[]){__VA_ARGS__}) / sizeof(int32_t)))])

static scene_params draw_params(uint64_t *state) {
    scene_params p = {.magnitude = 2.0f};
    p.type_k = (dt_kv_type)draw_below(state, 2);
    p.type_v = (dt_kv_type)draw_below(state, 2);
    p.dim_k = PICK(state, 40, 64, 64, 80, 96, 100, 128, 256, 6);
    p.dim_v = draw_below(state, 2) == 0 ? p.dim_k : PICK(state, 16, 40, 64, 72, 80, 96, 112, 128, 256);
    p.n_lanes = PICK(state, 1, 2, 3);
    p.n_rep = PICK(state, 1, 2, 3, 4, 5, 7, 8, 16);
    p.n_query = PICK(state, 1, 1, 1, 2, 3, 5, 7, 12, 33, 64);
    p.n_old = PICK(state, 0, 1, 15, 16, 17, 100, 255, 256, 257, 400, 700);
    p.block_tokens = PICK(state, 16, 256, 256, 64);
    p.ragged = draw_below(state, 3) == 0;
    p.window = PICK(state, 0, 0, 1, 20, 300);
    p.softcap = draw_below(state, 4) == 0 ? 3.0f : 0.0f;
    p.bias = (scene_bias)PICK(state, BIAS_NONE, BIAS_NONE, BIAS_SOME, BIAS_HOLES);
    p.mass = (scene_mass)draw_below(state, 3);
    p.seed = draw(state);
    while (p.n_query * p.n_rep * p.n_lanes > 400) { /* the reference is slow */
        p.n_rep = DT_MAX(p.n_rep / 2, 1);
        p.n_lanes = DT_MAX(p.n_lanes - 1, 1);
    }
    return p;
}

static void test_random_scenes(void **state) {
    (void)state;
    uint64_t random = 1;
    for (int32_t i = 0; i < DT_TEST_SCENES; i++) {
        const scene_params p = draw_params(&random);
        check_scene(&p, 1 + i % 3);
    }
}

static const scene_params plain = {.type_k = DT_KV_F16,
                                   .type_v = DT_KV_F16,
                                   .dim_k = 64,
                                   .dim_v = 64,
                                   .block_tokens = 256,
                                   .n_lanes = 2,
                                   .n_rep = 3,
                                   .n_query = 1,
                                   .n_old = 600,
                                   .magnitude = 2.0f,
                                   .mass = MASS_ALL,
                                   .seed = 7};

static void test_every_head_size(void **state) {
    (void)state;
    static const int32_t dims[] = {2, 16, 40, 64, 80, 96, 100, 102, 128, 192, 256};
    static const int32_t reps[] = {1, 3, 4, 8};
    scene_params p = plain;
    for (size_t i = 0; i < sizeof dims / sizeof dims[0]; i++) {
        for (size_t r = 0; r < 4; r++) {
            for (int32_t types = 0; types < 4; types++) {
                p.type_k = (dt_kv_type)(types & 1);
                p.type_v = (dt_kv_type)(types >> 1);
                p.dim_k = dims[i];
                p.dim_v = dims[(i + r) % (sizeof dims / sizeof dims[0])];
                p.n_rep = reps[r];
                p.n_query = types == 3 ? 17 : 1; /* 17 to 136 rows: by span with and without kept weights, by tile */
                p.n_old = 150;
                check_scene(&p, 2);
            }
        }
    }
}

/* With AMX tiles grow with the rows there are. */
static void test_large_tiles(void **state) {
    (void)state;
    if (dt_attn_kernel_find("amx_bf16", NULL) == NULL) {
        print_message("kernel amx_bf16: not supported by this machine\n");
        skip();
    }
    scene_params p = plain;
    p.n_lanes = 2;
    p.n_query = 700;
    p.n_old = 40;
    p.dim_k = p.dim_v = 24;
    p.mass = MASS_LAST;
    for (int32_t i = 0; i < 2; i++) {
        p.type_k = p.type_v = i == 0 ? DT_KV_F16 : DT_KV_INT8;
        p.window = i == 0 ? 0 : 100;
        p.ragged = i == 1;
        check_scene(&p, 1);
    }
}

static void test_masked_rows_are_zero(void **state) {
    (void)state;
    static const int32_t queries[] = {1, 9, 40};
    for (size_t i = 0; i < 3; i++) {
        scene_params p = plain;
        p.n_query = queries[i];
        p.bias = BIAS_ALL_GONE;
        check_scene(&p, 2);
        scene *s = make_scene(&p);
        for (int32_t k = 0; fast_kernel(k) != NULL; k++) {
            run_scene(fast_kernel(k), s, 1);
            for (size_t o = 0; o < s->n_out; o++) {
                assert_true(s->out[o] == 0.0f);
            }
        }
        free_scene(s);
    }
}

/* ---- store ---- */

/* Awkward numbers in the batch: beyond half precision, not numbers, ties, subnormals, rows of zeros. */
static void spoil(scene *s) {
    const size_t n_k = (size_t)(s->p.n_query * s->p.n_lanes * (s->p.dim_k + 1)),
                 n_v = (size_t)(s->p.n_query * s->p.n_lanes * (s->p.dim_v + 3));
    const float awkward[] = {NAN,    -NAN,    INFINITY, -INFINITY, 65504.0f,   65519.0f,   65520.0f, -1e30f, 3.4e38f,
                             1e-45f, -1e-40f, 6e-8f,    2.98e-8f,  0x1.002p0f, 0x1.006p0f, -0.0f,    6.1e-5f};
    for (size_t i = 0; i < n_k / 4; i++) {
        s->k[draw(&s->random) % n_k] = awkward[i % (sizeof awkward / sizeof awkward[0])];
        s->v[draw(&s->random) % n_v] = awkward[(i + 5) % (sizeof awkward / sizeof awkward[0])];
    }
    for (int32_t d = 0; d < s->p.dim_k; d++) {
        s->k[d] = d % 2 == 0 ? 0.0f : 1e-38f;
    }
}

static void test_store_is_bitwise_the_same(void **state) {
    (void)state;
    for (int32_t round = 0; round < 24; round++) {
        scene_params p = plain;
        p.type_k = (dt_kv_type)(round & 1);
        p.type_v = (dt_kv_type)(round >> 1 & 1);
        p.dim_k = round < 12 ? 64 : 102;
        p.dim_v = round < 12 ? 40 : 128;
        p.n_query = (const int32_t[]){1, 5, 50}[round % 3];
        p.block_tokens = round % 2 == 0 ? 16 : 256;
        p.ragged = true;
        p.seed = (uint64_t)round;
        scene *expected = make_scene(&p), *s = make_scene(&p);
        spoil(expected);
        run(reference(), &expected->job, 2, STORE);
        for (int32_t k = 0; fast_kernel(k) != NULL; k++) {
            spoil(s);
            memcpy(s->k, expected->k, (size_t)(p.n_query * p.n_lanes * (p.dim_k + 1)) * sizeof(float));
            memcpy(s->v, expected->v, (size_t)(p.n_query * p.n_lanes * (p.dim_v + 3)) * sizeof(float));
            run(fast_kernel(k), &s->job, 1 + round % 3, STORE);
            for (int32_t lane = 0; lane < p.n_lanes; lane++) {
                for (int32_t i = 0; i < s->lanes[lane].n_spans; i++) {
                    assert_memory_equal(s->spans[lane][i].block, expected->spans[lane][i].block, s->format.block_bytes);
                    memset(s->spans[lane][i].block, 0, s->format.block_bytes);
                }
                for (int32_t t = 0; t < s->lanes[lane].n_entries; t++) {
                    const float norm = s->lanes[lane].value_norm[t], wanted = expected->lanes[lane].value_norm[t];
                    const bool new = t >= s->lanes[lane].n_entries - p.n_query;
                    assert_true(!new || (dt_is_finite(norm) && fabsf(norm - wanted) <= 1e-5f * wanted));
                }
                fill_lane(s, lane); /* other old entries than before, so the next kernel starts from the expected ones */
                for (int32_t i = 0; i < s->lanes[lane].n_spans; i++) {
                    memcpy(s->spans[lane][i].block, expected->spans[lane][i].block, s->format.block_bytes);
                }
            }
        }
        free_scene(expected);
        free_scene(s);
    }
}

static void test_stored_numbers_are_close(void **state) {
    (void)state;
    for (int32_t types = 0; types < 2; types++) {
        scene_params p = plain;
        p.type_k = p.type_v = (dt_kv_type)types;
        p.n_query = 40;
        p.n_lanes = 1;
        scene *s = make_scene(&p);
        const dt_attn_kernel *kernel = dt_attn_kernel_find("auto", NULL);
        run(kernel, &s->job, 1, STORE);
        for (int32_t i = 0; i < p.n_query; i++) {
            const int32_t entry = s->lanes[0].n_entries - p.n_query + i, t = entry % p.block_tokens;
            char *block = s->spans[0][entry / p.block_tokens].block;
            assert_int_equal(dt_kv_position(&s->format, block)[t], s->positions[i]);
            for (int32_t d = 0; d < p.dim_k; d++) {
                const char *key = block + dt_kv_key_offset(&s->format, t, d);
                const char *row = block + s->format.v_offset + (size_t)t * dt_kv_value_row_bytes(&s->format);
                const float k = types == 0 ? dt_f16_to_f32(*(const uint16_t *)(const void *)key)
                                           : dt_kv_k_scale(&s->format, block)[t] * (float)(*(const uint8_t *)key - 128);
                const float v = types == 0 ? dt_f16_to_f32(((const uint16_t *)(const void *)row)[d])
                                           : dt_kv_v_scale(&s->format, block)[t] * (float)((const int8_t *)row)[d];
                const float bound = types == 0 ? 0x1p-11f * 2.0f : 2.0f / 254.0f * 1.001f;
                assert_true(fabsf(k - s->k[(size_t)i * s->job.k_token_stride + (size_t)d]) <= bound);
                assert_true(fabsf(v - s->v[(size_t)i * s->job.v_token_stride + (size_t)d]) <= bound);
            }
        }
        free_scene(s);
    }
}

/* ---- exact promises ---- */

static void test_threads_do_not_matter(void **state) {
    (void)state;
    uint64_t random = 99;
    for (int32_t round = 0; round < 40; round++) {
        const scene_params p = draw_params(&random);
        scene *s = make_scene(&p);
        const size_t n_mass = (size_t)p.n_lanes * s->n_mass;
        for (int32_t k = 0; fast_kernel(k) != NULL; k++) {
            run_scene(fast_kernel(k), s, 1);
            float *out = copy_of(s->out, s->n_out), *mass = copy_of(s->mass, n_mass);
            for (int32_t n_threads = 2; n_threads <= 3; n_threads++) {
                run_scene(fast_kernel(k), s, n_threads);
                if (memcmp(out, s->out, s->n_out * sizeof(float)) != 0 || memcmp(mass, s->mass, n_mass * sizeof(float)) != 0) {
                    describe(fast_kernel(k)->name, &p);
                    fail_msg("%d threads give other numbers than one", n_threads);
                }
            }
            free(out);
            free(mass);
        }
        free_scene(s);
    }
}

/* Queries [first, first + n) of the scene's batch as a batch of their own, over the entries that existed then. */
static void attend_part(const dt_attn_kernel *kernel, const scene *s, int32_t first, int32_t n, float *out) {
    static dt_kv_span spans[MAX_LANES][MAX_SPANS];
    dt_attn_lane lanes[MAX_LANES];
    for (int32_t lane = 0; lane < s->p.n_lanes; lane++) {
        lanes[lane] = s->lanes[lane];
        lanes[lane].spans = spans[lane];
        lanes[lane].n_entries = s->lanes[lane].n_entries - s->p.n_query + first + n;
        lanes[lane].n_spans = 0;
        for (int32_t left = lanes[lane].n_entries; left > 0;) {
            dt_kv_span *span = &spans[lane][lanes[lane].n_spans];
            *span = s->spans[lane][lanes[lane].n_spans++];
            span->n = DT_MIN(span->n, left);
            left -= span->n;
        }
    }
    dt_attn_job job = s->job;
    job.lanes = lanes;
    job.n_query = n;
    job.positions += first;
    job.q += (size_t)first * job.q_token_stride;
    job.out = out + (size_t)first * job.out_token_stride;
    job.mass_row = NULL;
    run(kernel, &job, 1, ATTEND);
}

static void test_batch_size_does_not_matter(void **state) {
    (void)state;
    static const int32_t sizes[] = {1, 2, 7, 16, 33};
    uint64_t random = 5;
    for (int32_t round = 0; round < 24; round++) {
        scene_params p = draw_params(&random);
        p.n_query = 64;
        p.n_rep = PICK(&random, 1, 2, 3, 4, 9);
        p.n_lanes = 1 + round % 2;
        p.mass = MASS_NONE;
        scene *s = make_scene(&p);
        for (int32_t k = 0; fast_kernel(k) != NULL; k++) {
            run_scene(fast_kernel(k), s, 1);
            float *out = copy_of(s->out, s->n_out);
            for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
                const int32_t smallest = p.n_query % sizes[i] != 0 ? p.n_query % sizes[i] : sizes[i];
                if (in_tiles(fast_kernel(k), &s->job) && smallest * p.n_rep <= DT_ATTN_SPAN_ROWS) {
                    continue; /* would go by span, in F32 */
                }
                poison(out, s->n_out);
                for (int32_t first = 0; first < p.n_query; first += sizes[i]) {
                    attend_part(fast_kernel(k), s, first, DT_MIN(sizes[i], p.n_query - first), out);
                }
                if (memcmp(out, s->out, s->n_out * sizeof(float)) != 0) {
                    describe(fast_kernel(k)->name, &p);
                    fail_msg("batches of %d give other numbers than one of 64", sizes[i]);
                }
            }
            free(out);
        }
        free_scene(s);
    }
}

/* ---- numbers at the edge ---- */

/* With one query head per lane a query's mass is its probabilities: the peak is the largest of them, to the bit. With more heads it
 * lies between the largest sum and that over the number of heads. */
static void test_peaks_are_the_largest_mass(void **state) {
    (void)state;
    static const int32_t queries[] = {1, 5, 70};
    for (int32_t i = 0; i < 6; i++) {
        scene_params p = plain;
        p.n_query = queries[i % 3];
        p.n_rep = i % 2 == 0 ? 1 : 3;
        p.type_k = p.type_v = i % 4 < 2 ? DT_KV_F16 : DT_KV_INT8;
        p.n_old = 100;
        scene *s = make_scene(&p);
        for (int32_t k = -1; k < 0 || fast_kernel(k) != NULL; k++) {
            const dt_attn_kernel *kernel = k < 0 ? reference() : fast_kernel(k);
            s->job.mass_peak = false;
            run_scene(kernel, s, 2);
            const int32_t n_rows = s->job.n_mass_rows;
            float *sums = copy_of(s->mass, (size_t)p.n_lanes * s->n_mass);
            int32_t *rows = s->mass_row, zeros[70] = {0};
            s->job.mass_peak = true;
            s->job.mass_row = zeros;
            s->job.n_mass_rows = 1;
            run_scene(kernel, s, 2);
            for (int32_t lane = 0; lane < p.n_lanes; lane++) {
                const float *peaks = s->lanes[lane].mass;
                const size_t n = (size_t)s->lanes[lane].n_entries;
                assert_true(is_finite_array(peaks, n));
                for (size_t t = 0; t < n; t++) {
                    float largest = 0.0f;
                    for (int32_t row = 0; row < n_rows; row++) {
                        largest = DT_MAX(largest, sums[(size_t)lane * s->n_mass + (size_t)row * s->job.mass_stride + t]);
                    }
                    const float share = largest / (float)p.n_rep;
                    assert_true(peaks[t] <= largest * 1.00001f + 1e-9f && peaks[t] >= share * 0.99999f - 1e-9f);
                }
            }
            s->job.mass_row = rows;
            s->job.n_mass_rows = n_rows;
            free(sums);
        }
        free_scene(s);
    }
}

static void test_extreme_inputs_stay_finite(void **state) {
    (void)state;
    static const float magnitudes[] = {1e-38f, 1e4f, 1e6f, 1e20f, 3e38f};
    for (size_t m = 0; m < sizeof magnitudes / sizeof magnitudes[0]; m++) {
        for (int32_t round = 0; round < 8; round++) {
            scene_params p = plain;
            p.type_k = (dt_kv_type)(round & 1);
            p.type_v = (dt_kv_type)(round >> 1 & 1);
            p.n_query = round < 4 ? 1 : 30;
            p.magnitude = magnitudes[m];
            p.softcap = m % 2 == 0 ? 0.0f : 30.0f;
            p.seed = (uint64_t)round;
            scene *s = make_scene(&p);
            for (int32_t k = -1; k < 0 || fast_kernel(k) != NULL; k++) {
                const dt_attn_kernel *kernel = k < 0 ? reference() : fast_kernel(k);
                run_scene(kernel, s, 1);
                bool finite = is_finite_array(s->out, s->n_out);
                for (int32_t lane = 0; lane < p.n_lanes; lane++) {
                    for (int32_t row = 0; row < s->job.n_mass_rows; row++) {
                        finite = finite && is_finite_array(s->lanes[lane].mass + (size_t)row * s->job.mass_stride,
                                                           (size_t)s->lanes[lane].n_entries);
                    }
                }
                if (!finite) {
                    describe(kernel->name, &p);
                    fail_msg("magnitude %g gives numbers that are not finite", (double)p.magnitude);
                }
            }
            free_scene(s);
        }
    }
}

/* A broken model must be seen by whoever checks the logits: its NaN must not turn into zeros. */
static void test_nan_in_a_query_is_not_hidden(void **state) {
    (void)state;
    static const int32_t old[] = {0, 15, 300, 300}, queries[] = {2, 2, 2, 40};
    for (size_t i = 0; i < 4; i++) {
        scene_params p = plain;
        p.n_old = old[i];
        p.n_query = queries[i];
        scene *s = make_scene(&p);
        s->q[0] = NAN;
        for (int32_t k = -1; k < 0 || fast_kernel(k) != NULL; k++) {
            run_scene(k < 0 ? reference() : fast_kernel(k), s, 1);
            assert_true(s->out[0] != s->out[0]);
            assert_true(is_finite_array(s->out + p.dim_v, s->n_out - (size_t)p.dim_v));
        }
        free_scene(s);
    }
}

static void check_exponentials(const dt_attn_ops *ops) {
    float x[16];
    for (int32_t i = 0; i < 200000; i++) {
        const float at = -87.0f * (float)i / 200000.0f;
        for (int32_t j = 0; j < 16; j++) {
            x[j] = at;
        }
        ops->exponentials(x, 16);
        const double expected = exp((double)at);
        assert_true(dt_is_finite(x[0]) && fabs((double)x[0] - expected) <= 1e-6 * expected && x[0] == x[15]);
    }
    const float edge[16] = {0.0f, -0.0f, -INFINITY, -3e38f, -87.5f, -1000.0f, -1e-30f, NAN};
    memcpy(x, edge, sizeof x);
    ops->exponentials(x, 16);
    assert_true(x[0] == 1.0f && x[1] == 1.0f && x[6] == 1.0f && x[7] != x[7]);
    assert_true(x[2] == 0.0f && x[3] == 0.0f && x[4] == 0.0f && x[5] == 0.0f);
}

static void test_exponentials(void **state) {
    (void)state;
    for (int32_t k = 0; fast_kernel(k) != NULL; k++) {
        check_exponentials(fast_kernel(k)->ops);
    }
}

/* ---- the table ---- */

static void test_kernels_are_found_by_name(void **state) {
    (void)state;
    dt_error error;
    int32_t n;
    const dt_attn_kernel *kernels = dt_attn_kernels(&n);
    assert_non_null(dt_attn_kernel_find("auto", &error));
    assert_ptr_equal(dt_attn_kernel_find(NULL, &error), dt_attn_kernel_find("auto", &error));
    assert_non_null(dt_attn_kernel_find("reference", &error));
    for (int32_t i = 0; i < n; i++) {
        const dt_attn_kernel *kernel = dt_attn_kernel_find(kernels[i].name, &error);
        if (kernels[i].supported()) {
            assert_ptr_equal(kernel, &kernels[i]);
        } else {
            assert_null(kernel);
            assert_int_equal(error.code, DT_ERR_UNSUPPORTED);
        }
    }
    assert_null(dt_attn_kernel_find("sse9", &error));
    assert_int_equal(error.code, DT_ERR_ARGUMENT);
    assert_non_null(strstr(error.message, "'sse9'"));
    assert_non_null(strstr(error.message, "auto, "));
    assert_non_null(strstr(error.message, "reference"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kernels_are_found_by_name),
        cmocka_unit_test(test_exponentials),
        cmocka_unit_test(test_store_is_bitwise_the_same),
        cmocka_unit_test(test_stored_numbers_are_close),
        cmocka_unit_test(test_every_head_size),
        cmocka_unit_test(test_random_scenes),
        cmocka_unit_test(test_large_tiles),
        cmocka_unit_test(test_masked_rows_are_zero),
        cmocka_unit_test(test_threads_do_not_matter),
        cmocka_unit_test(test_batch_size_does_not_matter),
        cmocka_unit_test(test_peaks_are_the_largest_mass),
        cmocka_unit_test(test_extreme_inputs_stay_finite),
        cmocka_unit_test(test_nan_in_a_query_is_not_hidden),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
