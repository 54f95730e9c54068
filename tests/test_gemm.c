/*
 * Packed matrix products: the scalar reference against a plain float product of what the numbers stand for, the fast kernel
 * against the reference bit by bit, for every tile size and number of threads.
 */
#include "gemm/gemm.h"
#include "support/cmocka_all.h"
#include "support/compare.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ggml.h"

static const struct {
    dt_gemm_type type;
    enum ggml_type ggml;
} types[] = {{DT_GEMM_Q4_0, GGML_TYPE_Q4_0}, {DT_GEMM_Q4_1, GGML_TYPE_Q4_1}, {DT_GEMM_Q8_0, GGML_TYPE_Q8_0}};

typedef struct product {
    int32_t n_in, n_out, n_tokens;
    float *weights; /* [n_out][n_in], as the quantized ones are */
    float *x, *y;   /* [n_tokens][n_in], [n_tokens][n_out] */
    void *packed, *inputs;
    dt_gemm_matrix matrix;
} product;

static void *aligned(size_t bytes) { return aligned_alloc(64, DT_ROUND_UP(bytes, (size_t)64)); }

static product make_product(size_t type, int32_t n_in, int32_t n_out, int32_t n_tokens, uint64_t seed) {
    product p = {.n_in = n_in, .n_out = n_out, .n_tokens = n_tokens};
    const size_t n = (size_t)n_in * (size_t)n_out, row_bytes = dt_gemm_row_bytes(types[type].type, n_in);
    assert_int_equal(row_bytes, ggml_row_size(types[type].ggml, n_in));
    p.weights = malloc(n * sizeof(float));
    p.x = malloc((size_t)n_in * (size_t)n_tokens * sizeof(float));
    p.y = malloc((size_t)n_out * (size_t)n_tokens * sizeof(float));
    for (size_t i = 0; i < n; i++) {
        p.weights[i] = (float)(next_random(&seed) % 2001) / 1000.0f - 0.8f;
    }
    for (size_t i = 0; i < (size_t)n_in * (size_t)n_tokens; i++) {
        p.x[i] = (float)(next_random(&seed) % 2001) / 500.0f - 2.0f;
    }
    char *rows = malloc(row_bytes * (size_t)n_out);
    ggml_quantize_chunk(types[type].ggml, p.weights, rows, 0, n_out, n_in, NULL);
    ggml_get_type_traits(types[type].ggml)->to_float(rows, p.weights, (int64_t)n);
    p.matrix = (dt_gemm_matrix){types[type].type, n_in, n_out, NULL};
    p.packed = aligned(dt_gemm_matrix_bytes(types[type].type, n_in, n_out));
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

static void compute(const dt_gemm_kernel *kernel, product *p, int32_t n_threads) {
    memset(p->inputs, 0xFF, dt_gemm_input_bytes(p->n_in, p->n_tokens));
    memset(p->y, 0xFF, (size_t)p->n_out * (size_t)p->n_tokens * sizeof(float)); /* NaN */
    for (int32_t i = 0; i < n_threads; i++) {
        kernel->pack_inputs(p->x, (size_t)p->n_in, p->n_in, p->n_tokens, p->inputs, i, n_threads);
    }
    for (int32_t i = 0; i < n_threads; i++) {
        kernel->multiply(&p->matrix, p->inputs, p->n_tokens, p->y, (size_t)p->n_out, i, n_threads);
    }
}

static const dt_gemm_kernel *reference(void) {
    int32_t n;
    const dt_gemm_kernel *const *kernels = dt_gemm_kernels(&n);
    return kernels[n - 1];
}

/* Rounding the inputs to 8 bits is all that separates the reference from the float product. */
static void test_reference_is_the_product(void **state) {
    (void)state;
    for (size_t type = 0; type < 3; type++) {
        product p = make_product(type, 96, 48, 19, 7 + type);
        compute(reference(), &p, 1);
        assert_true(all_finite(p.y, (size_t)p.n_out * (size_t)p.n_tokens));
        double worst = 0.0, largest = 0.0;
        for (int32_t t = 0; t < p.n_tokens; t++) {
            for (int32_t row = 0; row < p.n_out; row++) {
                double want = 0.0;
                for (int32_t i = 0; i < p.n_in; i++) {
                    want += (double)p.weights[row * p.n_in + i] * (double)p.x[t * p.n_in + i];
                }
                worst = fmax(worst, fabs(want - (double)p.y[t * p.n_out + row]));
                largest = fmax(largest, fabs(want));
            }
        }
        assert_true(worst <= 0.01 * largest);
        free_product(&p);
    }
}

static void compare_with_reference(const dt_gemm_kernel *kernel) {
    const int32_t tokens[] = {1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 64, 77};
    const int32_t shapes[][2] = {{32, 16}, {64, 48}, {576, 192}, {1536, 32}};
    for (size_t type = 0; type < 3; type++) {
        for (size_t s = 0; s < 4; s++) {
            for (size_t t = 0; t < sizeof tokens / sizeof tokens[0]; t++) {
                product p = make_product(type, shapes[s][0], shapes[s][1], tokens[t], type * 100 + s);
                const size_t bytes = (size_t)p.n_out * (size_t)p.n_tokens * sizeof(float);
                compute(reference(), &p, 1);
                float *want = malloc(bytes);
                memcpy(want, p.y, bytes);
                assert_true(all_finite(want, bytes / sizeof(float)));
                for (int32_t threads = 1; threads <= 5; threads++) {
                    compute(kernel, &p, threads);
                    assert_memory_equal(p.y, want, bytes);
                }
                free(want);
                free_product(&p);
            }
        }
    }
}

static void test_kernels_are_the_reference(void **state) {
    (void)state;
    int32_t n;
    const dt_gemm_kernel *const *kernels = dt_gemm_kernels(&n);
    for (int32_t i = 0; i < n - 1; i++) {
        if (kernels[i]->supported()) {
            compare_with_reference(kernels[i]);
        } else {
            print_message("kernel %s: not supported by this machine\n", kernels[i]->name);
        }
    }
}

/* A token's result does not depend on how many others are computed with it. */
static void test_batches_do_not_matter(void **state) {
    (void)state;
    const dt_gemm_kernel *kernel = dt_gemm_kernel_auto() ? dt_gemm_kernel_auto() : reference();
    product many = make_product(1, 128, 64, 29, 3), one = make_product(1, 128, 64, 1, 3);
    compute(kernel, &many, 2);
    for (int32_t t = 0; t < many.n_tokens; t++) {
        memcpy(one.x, many.x + t * many.n_in, (size_t)many.n_in * sizeof(float));
        memcpy(one.packed, many.packed, dt_gemm_matrix_bytes(many.matrix.type, many.n_in, many.n_out));
        compute(kernel, &one, 3);
        assert_memory_equal(one.y, many.y + t * many.n_out, (size_t)many.n_out * sizeof(float));
    }
    free_product(&many);
    free_product(&one);
}

/* An overflow upstream must not be rounded away into plausible numbers (cases.md row 17). */
static void test_what_is_not_finite_stays_so(void **state) {
    (void)state;
    int32_t n;
    const dt_gemm_kernel *const *kernels = dt_gemm_kernels(&n);
    const float wrong[] = {NAN, INFINITY, -INFINITY};
    for (int32_t k = 0; k < n; k++) {
        for (size_t type = 0; kernels[k]->supported() && type < 3; type++) {
            for (size_t i = 0; i < 3; i++) {
                product p = make_product(type, 64, 16, 3, 9);
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
    product p = make_product(1, 64, 16, 3, 1);
    memset(p.x, 0, (size_t)p.n_in * 3 * sizeof(float));
    compute(dt_gemm_kernel_auto() ? dt_gemm_kernel_auto() : reference(), &p, 1);
    for (int32_t i = 0; i < p.n_out * 3; i++) {
        assert_true(p.y[i] == 0.0f);
    }
    free_product(&p);
    assert_true(dt_gemm_can_pack(64, 16));
    assert_false(dt_gemm_can_pack(48, 16));
    assert_false(dt_gemm_can_pack(64, 24));
    assert_false(dt_gemm_can_pack(0, 16));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reference_is_the_product), cmocka_unit_test(test_kernels_are_the_reference),
        cmocka_unit_test(test_batches_do_not_matter),    cmocka_unit_test(test_what_is_not_finite_stays_so),
        cmocka_unit_test(test_zero_and_shapes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
