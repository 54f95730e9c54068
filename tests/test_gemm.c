/*
 * Packed matrix products: the scalar reference against a plain float product of what the numbers stand for, the fast kernels
 * against the reference bit by bit, for every type, tile size and number of threads, also at the ends of the numbers' ranges.
 */
#include "gemm/gemm.h"
#include "support/cmocka_all.h"
#include "support/compare.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "ggml.h"

/* How a test fills the weights: quantized random numbers; random bytes; one byte everywhere. */
enum { QUANTIZED = -2, RANDOM_BYTES = -1 };

#define MAX_THREADS 5

#define OF_TYPE(name) [DT_GEMM_##name] = GGML_TYPE_##name,
static const enum ggml_type ggml_types[] = {DT_GEMM_TYPES(OF_TYPE)};

typedef struct product {
    int32_t n_in, n_out, n_tokens;
    float *weights; /* [n_out][n_in], as the quantized ones are */
    float *x, *y;   /* [n_tokens][n_in], [n_tokens][n_out] */
    void *packed, *inputs;
    dt_gemm_matrix matrix;
} product;

static void *aligned(size_t bytes) { return aligned_alloc(64, DT_ROUND_UP(bytes, (size_t)64)); }

/* ggml's rows with every byte as `fill` says, but scale and minimum of each super-block small, finite and of either sign. */
static void fill_rows(dt_gemm_type type, uint8_t *rows, size_t n_bytes, int fill, uint64_t *seed) {
    const size_t block = ggml_type_size(ggml_types[type]), scale_at = type == DT_GEMM_Q6_K ? block - 2 : 0;
    const bool has_minimum = type == DT_GEMM_Q4_1 || type == DT_GEMM_Q5_1 || type == DT_GEMM_Q4_K || type == DT_GEMM_Q5_K;
    for (size_t i = 0; i < n_bytes; i++) {
        rows[i] = fill == RANDOM_BYTES ? (uint8_t)(next_random(seed) >> 24) : (uint8_t)fill;
    }
    for (size_t at = 0; at < n_bytes; at += block) {
        rows[at + scale_at] = (uint8_t)(next_random(seed) >> 24);
        rows[at + scale_at + 1] = (uint8_t)(next_random(seed) >> 24 & 0xAF);
        rows[at + 3] = has_minimum ? rows[at + 3] & 0xAF : rows[at + 3];
    }
}

static product make_product(dt_gemm_type type, int32_t n_in, int32_t n_out, int32_t n_tokens, int fill, uint64_t seed) {
    product p = {.n_in = n_in, .n_out = n_out, .n_tokens = n_tokens};
    const size_t n = (size_t)n_in * (size_t)n_out, row_bytes = dt_gemm_row_bytes(type, n_in);
    assert_true(dt_gemm_can_pack(type, n_in, n_out));
    assert_int_equal(row_bytes, ggml_row_size(ggml_types[type], n_in));
    p.weights = malloc(n * sizeof(float));
    p.x = malloc((size_t)n_in * (size_t)n_tokens * sizeof(float));
    p.y = malloc((size_t)n_out * (size_t)n_tokens * sizeof(float));
    for (size_t i = 0; i < n; i++) {
        p.weights[i] = (float)(next_random(&seed) % 2001) / 1000.0f - 0.8f;
    }
    for (size_t i = 0; i < (size_t)n_in * (size_t)n_tokens; i++) { /* all of one size: they round to +-127 */
        p.x[i] = (float)(next_random(&seed) % 2001) / 500.0f - 2.0f;
        p.x[i] = fill >= 0 ? (seed >> 40 & 7 ? 1.5f : -1.5f) : p.x[i];
    }
    uint8_t *rows = malloc(row_bytes * (size_t)n_out);
    if (fill == QUANTIZED) {
        ggml_quantize_chunk(ggml_types[type], p.weights, rows, 0, n_out, n_in, NULL);
    } else {
        fill_rows(type, rows, row_bytes * (size_t)n_out, fill, &seed);
    }
    ggml_get_type_traits(ggml_types[type])->to_float(rows, p.weights, (int64_t)n);
    p.matrix = (dt_gemm_matrix){type, n_in, n_out, NULL};
    p.packed = aligned(dt_gemm_matrix_bytes(type, n_in, n_out));
    for (int32_t row = 0; row < n_out; row += DT_GEMM_ROWS) {
        dt_gemm_pack_rows(&p.matrix, p.packed, row, rows + (size_t)row * row_bytes);
    }
    p.matrix.packed = p.packed;
    p.inputs = aligned(dt_gemm_input_bytes(n_in, n_tokens));
    free(rows);
    return p;
}

static void free_product(product *p) {
    free(p->weights);
    free(p->x);
    free(p->y);
    free(p->packed);
    free(p->inputs);
}

typedef struct worker {
    pthread_t thread;
    const dt_gemm_kernel *kernel;
    product *p;
    int32_t ith, nth;
} worker;

static void *pack(void *user) {
    const worker *w = user;
    w->kernel->pack_inputs(w->p->x, (size_t)w->p->n_in, w->p->n_in, w->p->n_tokens, w->p->inputs, w->ith, w->nth);
    return NULL;
}

static void *multiply(void *user) {
    const worker *w = user;
    w->kernel->multiply(&w->p->matrix, w->p->inputs, w->p->n_tokens, w->p->y, (size_t)w->p->n_out, w->ith, w->nth);
    return NULL;
}

static void run(void *(*step)(void *), const dt_gemm_kernel *kernel, product *p, int32_t n_threads) {
    worker workers[MAX_THREADS];
    for (int32_t i = 0; i < n_threads; i++) {
        workers[i] = (worker){.kernel = kernel, .p = p, .ith = i, .nth = n_threads};
        assert_int_equal(pthread_create(&workers[i].thread, NULL, step, &workers[i]), 0);
    }
    for (int32_t i = 0; i < n_threads; i++) {
        pthread_join(workers[i].thread, NULL);
    }
}

/* Two products with the same packed inputs, as those of query and key: nothing may be left over from the first. */
static void compute(const dt_gemm_kernel *kernel, product *p, int32_t n_threads) {
    memset(p->inputs, 0xFF, dt_gemm_input_bytes(p->n_in, p->n_tokens));
    run(pack, kernel, p, n_threads);
    for (int i = 0; i < 2; i++) {
        memset(p->y, 0xFF, (size_t)p->n_out * (size_t)p->n_tokens * sizeof(float)); /* NaN */
        run(multiply, kernel, p, n_threads);
    }
}

static const dt_gemm_kernel *reference(void) {
    int32_t n;
    const dt_gemm_kernel *const *kernels = dt_gemm_kernels(&n);
    return kernels[n - 1];
}

static void assert_is_the_product(const product *p) {
    for (int32_t t = 0; t < p->n_tokens; t++) {
        const float *x = p->x + t * p->n_in;
        double largest = 0.0;
        for (int32_t i = 0; i < p->n_in; i++) {
            largest = fmax(largest, fabs((double)x[i]));
        }
        for (int32_t row = 0; row < p->n_out; row++) {
            const float *w = p->weights + row * p->n_in;
            double want = 0.0, squares = 0.0, sizes = 0.0;
            for (int32_t i = 0; i < p->n_in; i++) {
                want += (double)w[i] * (double)x[i];
                squares += (double)w[i] * (double)w[i];
                sizes += fabs((double)w[i] * (double)x[i]);
            }
            const double noise = sqrt(squares / 12.0) * largest / 127.0;
            assert_true(fabs(want - (double)p->y[t * p->n_out + row]) <= 6.0 * noise + 1e-6 * sizes);
        }
    }
}

/* Rounding the inputs to 8 bits is all that separates the reference from the float product: six standard deviations of that. */
static void test_reference_is_the_product(void **state) {
    (void)state;
    for (dt_gemm_type type = 0; type < DT_GEMM_N_TYPES; type++) {
        for (int fill = QUANTIZED; fill <= RANDOM_BYTES; fill++) {
            product p = make_product(type, 768, 32, 19, fill, 7 + type);
            compute(reference(), &p, 1);
            assert_true(all_finite(p.y, (size_t)p.n_out * (size_t)p.n_tokens));
            assert_is_the_product(&p);
            free_product(&p);
        }
    }
}

/* Packed weights are read instead of the file's for every token: they must not be much larger. */
static void test_packed_size(void **state) {
    (void)state;
    for (dt_gemm_type type = 0; type < DT_GEMM_N_TYPES; type++) {
        const size_t file = 32 * dt_gemm_row_bytes(type, 2048), packed = dt_gemm_matrix_bytes(type, 2048, 32);
        assert_true(packed >= file && packed * 100 <= file * 103);
    }
}

static void compare_with_reference(const dt_gemm_kernel *kernel, product *p) {
    const size_t bytes = (size_t)p->n_out * (size_t)p->n_tokens * sizeof(float);
    compute(reference(), p, 1);
    float *want = malloc(bytes);
    memcpy(want, p->y, bytes);
    assert_true(all_finite(want, bytes / sizeof(float)));
    for (int32_t threads = 1; threads <= MAX_THREADS; threads++) {
        compute(kernel, p, threads);
        assert_memory_equal(p->y, want, bytes);
    }
    free(want);
    free_product(p);
}

static void compare_all_with_reference(const dt_gemm_kernel *kernel, dt_gemm_type type) {
    const int32_t tokens[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 77};
    const int32_t shapes[][2] = {{32, 16},  {64, 48},  {256, 16},
                                 {576, 96}, {768, 48}, {2304, 16}}; /* the last: more than a run (gemm_amx.c) */
    const int fills[] = {RANDOM_BYTES, 0x00, 0xFF, 0x80, 0x7F};
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
        for (size_t t = 0; dt_gemm_can_pack(type, shapes[s][0], shapes[s][1]) && t < sizeof tokens / sizeof tokens[0]; t++) {
            product p = make_product(type, shapes[s][0], shapes[s][1], tokens[t], QUANTIZED, type * 100 + s);
            compare_with_reference(kernel, &p);
        }
    }
    for (size_t i = 0; i < sizeof fills / sizeof fills[0]; i++) {
        product p = make_product(type, 512, 32, 7, fills[i], type);
        compare_with_reference(kernel, &p);
    }
}

static void test_kernels_are_the_reference(void **state) {
    (void)state;
    int32_t n;
    const dt_gemm_kernel *const *kernels = dt_gemm_kernels(&n);
    for (int32_t i = 0; i < n - 1; i++) {
        for (dt_gemm_type type = 0; kernels[i]->supported() && type < DT_GEMM_N_TYPES; type++) {
            compare_all_with_reference(kernels[i], type);
        }
        if (!kernels[i]->supported()) {
            print_message("kernel %s: not supported by this machine\n", kernels[i]->name);
        }
    }
}

/* A token's result does not depend on how many others are computed with it. */
static void test_batches_do_not_matter(void **state) {
    (void)state;
    const dt_gemm_kernel *kernel = dt_gemm_kernel_auto() ? dt_gemm_kernel_auto() : reference();
    for (dt_gemm_type type = 0; type < DT_GEMM_N_TYPES; type++) {
        product many = make_product(type, 256, 64, 29, QUANTIZED, 3), one = make_product(type, 256, 64, 1, QUANTIZED, 3);
        compute(kernel, &many, 2);
        memcpy(one.packed, many.packed, dt_gemm_matrix_bytes(type, many.n_in, many.n_out));
        for (int32_t t = 0; t < many.n_tokens; t++) {
            memcpy(one.x, many.x + t * many.n_in, (size_t)many.n_in * sizeof(float));
            compute(kernel, &one, 3);
            assert_memory_equal(one.y, many.y + t * many.n_out, (size_t)many.n_out * sizeof(float));
        }
        free_product(&many);
        free_product(&one);
    }
}

/* An overflow upstream must not be rounded away into plausible numbers (cases.md row 17). */
static void test_what_is_not_finite_stays_so(void **state) {
    (void)state;
    int32_t n;
    const dt_gemm_kernel *const *kernels = dt_gemm_kernels(&n);
    const float wrong[] = {NAN, INFINITY, -INFINITY};
    for (int32_t k = 0; k < n; k++) {
        for (dt_gemm_type type = 0; kernels[k]->supported() && type < DT_GEMM_N_TYPES; type++) {
            for (size_t i = 0; i < 3; i++) {
                product p = make_product(type, 256, 16, 3, QUANTIZED, 9);
                p.x[p.n_in + 37] = wrong[i]; /* of the second token */
                compute(kernels[k], &p, 1);
                assert_true(all_finite(p.y, (size_t)p.n_out));
                for (int32_t row = 0; row < p.n_out; row++) {
                    assert_false(all_finite(p.y + p.n_out + row, 1));
                }
                assert_true(all_finite(p.y + 2 * p.n_out, (size_t)p.n_out));
                free_product(&p);
            }
        }
    }
}

static void test_zero_and_shapes(void **state) {
    (void)state;
    product p = make_product(DT_GEMM_Q4_1, 64, 16, 3, QUANTIZED, 1);
    memset(p.x, 0, (size_t)p.n_in * 3 * sizeof(float));
    compute(dt_gemm_kernel_auto() ? dt_gemm_kernel_auto() : reference(), &p, 1);
    for (int32_t i = 0; i < p.n_out * 3; i++) {
        assert_true(p.y[i] == 0.0f);
    }
    free_product(&p);
    assert_true(dt_gemm_can_pack(DT_GEMM_Q4_1, 64, 16));
    assert_false(dt_gemm_can_pack(DT_GEMM_Q4_1, 48, 16));
    assert_false(dt_gemm_can_pack(DT_GEMM_Q4_1, 64, 24));
    assert_false(dt_gemm_can_pack(DT_GEMM_Q4_1, 0, 16));
    assert_true(dt_gemm_can_pack(DT_GEMM_Q4_K, 512, 16));
    assert_false(dt_gemm_can_pack(DT_GEMM_Q4_K, 576, 16));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reference_is_the_product),    cmocka_unit_test(test_packed_size),
        cmocka_unit_test(test_kernels_are_the_reference),   cmocka_unit_test(test_batches_do_not_matter),
        cmocka_unit_test(test_what_is_not_finite_stays_so), cmocka_unit_test(test_zero_and_shapes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
