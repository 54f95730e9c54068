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
    dt_gemm_inputs from;
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
    p.from = (dt_gemm_inputs){DT_GEMM_PLAIN, .n_in = n_in, .n_tokens = n_tokens, .x = p.x, .x_stride = (size_t)n_in};
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
    w->kernel->pack_inputs(&w->p->from, w->p->inputs, w->ith, w->nth);
    return NULL;
}

static void *multiply(void *user) {
    const worker *w = user;
    const dt_gemm_product alone = {{&w->p->matrix}, 1, w->p->n_tokens, w->p->y, (size_t)w->p->n_out};
    w->kernel->multiply(&alone, w->p->inputs, w->ith, w->nth);
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

static void compute(const dt_gemm_kernel *kernel, product *p, int32_t n_threads) {
    memset(p->inputs, 0xFF, dt_gemm_input_bytes(p->n_in, p->n_tokens));
    run(pack, kernel, p, n_threads);
    memset(p->y, 0xFF, (size_t)p->n_out * (size_t)p->n_tokens * sizeof(float)); /* NaN */
    run(multiply, kernel, p, n_threads);
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

/* Matrices of several types and heights at once are each what it is alone, whoever computes which rows. */
static void test_several_matrices(void **state) {
    (void)state;
    int32_t n;
    const dt_gemm_kernel *const *kernels = dt_gemm_kernels(&n);
    for (int32_t k = 0; k < n; k++) {
        for (int32_t threads = 1; kernels[k]->supported() && threads <= MAX_THREADS; threads++) {
            product alone[] = {make_product(DT_GEMM_Q4_K, 512, 176, 19, QUANTIZED, 1),
                               make_product(DT_GEMM_Q6_K, 512, 16, 19, QUANTIZED, 2),
                               make_product(DT_GEMM_Q4_0, 512, 112, 19, QUANTIZED, 3)};
            const size_t stride = 176 + 16 + 112 + 3;
            float *y = calloc(19 * stride, sizeof(float));
            dt_gemm_product all = {.n_matrices = 3, .n_tokens = 19, .y = y, .stride = stride};
            for (int i = 0; i < 3; i++) {
                all.matrices[i] = &alone[i].matrix;
                memcpy(alone[i].x, alone[0].x, 512 * 19 * sizeof(float));
                compute(kernels[k], &alone[i], 1);
            }
            run(pack, kernels[k], &alone[0], threads);
            for (int32_t i = threads - 1; i >= 0; i--) { /* one after the other: the first takes all, from every range */
                kernels[k]->multiply(&all, alone[0].inputs, i, threads);
            }
            for (size_t t = 0; t < 19; t++) {
                const float *at = y + t * stride;
                for (int i = 0; i < 3; at += alone[i].n_out, i++) {
                    assert_memory_equal(at, alone[i].y + t * (size_t)alone[i].n_out, (size_t)alone[i].n_out * sizeof(float));
                }
                assert_true(at[0] == 0.0f && at[1] == 0.0f && at[2] == 0.0f);
            }
            for (int i = 0; i < 3; i++) {
                free_product(&alone[i]);
            }
            free(y);
        }
    }
}

/* The kinds of inputs in double precision. */
static void inputs_in_double(const dt_gemm_inputs *in, float *out) {
    for (int32_t t = 0; t < in->n_tokens; t++) {
        const float *x = in->x + (size_t)t * in->x_stride, *y = in->y != NULL ? in->y + (size_t)t * in->y_stride : NULL;
        double squares = 0.0;
        for (int32_t i = 0; in->kind == DT_GEMM_NORM && i < in->n_in; i++) {
            squares += pow((double)x[i] + (y != NULL ? (double)y[i] : 0.0), 2.0);
        }
        for (int32_t i = 0; i < in->n_in; i++) {
            const double v = (double)x[i], w = y != NULL ? (double)y[i] : 0.0;
            const double of_norm = (v + w) / sqrt(squares / in->n_in + (double)in->epsilon);
            *out++ = (float)(in->kind == DT_GEMM_NORM ? of_norm * (double)in->weight[i] : v / (1.0 + exp(-v)) * w);
        }
    }
}

static void check_inputs(dt_gemm_inputs from, int32_t n_threads) {
    int32_t n;
    const dt_gemm_kernel *const *kernels = dt_gemm_kernels(&n);
    product want = make_product(DT_GEMM_Q8_0, from.n_in, 16, from.n_tokens, QUANTIZED, 4);
    inputs_in_double(&from, want.x);
    compute(reference(), &want, 1);
    float *first = NULL;
    for (int32_t k = n - 1; k >= 0; k--) {
        if (!kernels[k]->supported()) {
            continue;
        }
        product p = make_product(DT_GEMM_Q8_0, from.n_in, 16, from.n_tokens, QUANTIZED, 4);
        const size_t n_y = 16 * (size_t)from.n_tokens, n_x = (size_t)from.n_in * (size_t)from.n_tokens;
        from.sum = calloc(n_x, sizeof(float));
        p.from = from;
        compute(kernels[k], &p, n_threads);
        assert_true(all_finite(p.y, n_y));
        for (size_t i = 0; i < n_y; i++) { /* an input on the edge may round to the next of 255 steps */
            assert_true(fabsf(p.y[i] - want.y[i]) <= 0.02f * fmaxf(1.0f, fabsf(want.y[i])));
        }
        for (size_t i = 0; i < n_x && from.kind == DT_GEMM_NORM && from.y != NULL; i++) {
            const size_t t = i / (size_t)from.n_in, at = i % (size_t)from.n_in;
            assert_true(from.sum[i] == from.x[t * from.x_stride + at] + from.y[t * from.y_stride + at]);
        }
        if (first == NULL) { /* the reference's */
            first = malloc(n_y * sizeof(float));
            memcpy(first, p.y, n_y * sizeof(float));
        }
        assert_memory_equal(p.y, first, n_y * sizeof(float));
        free(from.sum);
        free_product(&p);
    }
    free(first);
    free_product(&want);
}

/* Norms and gates on the way into a product are what they should be, and the same to the bit with every kernel. */
static void test_kinds_of_inputs(void **state) {
    (void)state;
    enum { WIDTH = 576, STRIDE = 600, MOST = 19 };
    float *x = malloc(MOST * STRIDE * sizeof(float)), *y = malloc(MOST * STRIDE * sizeof(float)), weight[WIDTH];
    uint64_t seed = 5;
    for (size_t i = 0; i < MOST * STRIDE; i++) {
        x[i] = (float)(next_random(&seed) % 2001) / 50.0f - 20.0f;
        y[i] = (float)(next_random(&seed) % 2001) / 500.0f - 2.0f;
        weight[i % WIDTH] = (float)(next_random(&seed) % 1000) / 500.0f;
    }
    x[7] = -200.0f; /* e^-x beyond a float */
    const int32_t n_tokens[] = {1, 3, MOST};
    for (size_t i = 0; i < 3; i++) {
        for (int32_t threads = 1; threads <= 3; threads++) {
            dt_gemm_inputs in = {.n_in = WIDTH,
                                 .n_tokens = n_tokens[i],
                                 .x = x,
                                 .y = y,
                                 .x_stride = STRIDE,
                                 .y_stride = STRIDE,
                                 .weight = weight,
                                 .epsilon = 1e-5f};
            in.kind = DT_GEMM_SILU;
            check_inputs(in, threads);
            in.kind = DT_GEMM_NORM;
            check_inputs(in, threads);
            in.y = NULL;
            check_inputs(in, threads);
        }
    }
    free(x);
    free(y);
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
        cmocka_unit_test(test_reference_is_the_product),
        cmocka_unit_test(test_packed_size),
        cmocka_unit_test(test_kernels_are_the_reference),
        cmocka_unit_test(test_batches_do_not_matter),
        cmocka_unit_test(test_what_is_not_finite_stays_so),
        cmocka_unit_test(test_zero_and_shapes),
        cmocka_unit_test(test_several_matrices),
        cmocka_unit_test(test_kinds_of_inputs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
