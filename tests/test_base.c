/*
 * base/: errors, log, counted memory, clock and cores, half precision, block layout.
 *
 * The half-precision reference here is built from ldexp and exact comparisons of neighbours, not from the code under test.
 */
#include "base/kv_format.h"
#include "base/vectors.h"

#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* ---- errors and log ---- */

static void test_fail_fills_the_error(void **state) {
    (void)state;
    dt_error error;
    assert_int_equal(dt_fail(&error, DT_ERR_IO, "%s: no such file\n", "a.gguf"), DT_ERR_IO);
    assert_int_equal(error.code, DT_ERR_IO);
    assert_string_equal(error.message, "a.gguf: no such file");
    assert_int_equal(dt_fail(&error, DT_ERR_FORMAT, "b: %s", error.message), DT_ERR_FORMAT);
    assert_string_equal(error.message, "b: a.gguf: no such file");
    dt_fail(&error, DT_ERR_ARGUMENT, "no template \x1b[2J%s", "a\nb\tc\x7f"); /* what is quoted may hold anything */
    assert_string_equal(error.message, "no template  [2Ja b c ");
    assert_int_equal(dt_fail(NULL, DT_ERR_LIMIT, "nobody listens"), DT_ERR_LIMIT);
    assert_int_equal(dt_fail_memory(&error, 4096, "scores"), DT_ERR_MEMORY);
    assert_non_null(strstr(error.message, "4096 more bytes for scores"));
}

static void test_sizes_are_told_in_their_own_unit(void **state) {
    (void)state;
    assert_string_equal(dt_size_of(0).text, "0 bytes");
    assert_string_equal(dt_size_of(30).text, "30 bytes");
    assert_string_equal(dt_size_of(1536).text, "1.5 KiB");
    assert_string_equal(dt_size_of((1 << 20) - 1024).text, "1023.0 KiB");
    assert_string_equal(dt_size_of(1 << 20).text, "1.0 MiB");
    assert_string_equal(dt_size_of(UINT64_MAX).text, "17592186044416.0 MiB");
}

static void test_fail_cuts_long_messages_at_a_character(void **state) {
    (void)state;
    dt_error error;
    char text[3000];
    for (size_t offset = 0; offset < 3; offset++) { /* a three-byte character at every offset to the cut */
        memset(text, 'x', offset);
        for (size_t i = offset; i + 3 < sizeof text; i += 3) {
            memcpy(text + i, "\xE2\x82\xAC", 4);
        }
        dt_fail(&error, DT_ERR_IO, "%s", text);
        const size_t length = strlen(error.message);
        assert_true(length >= sizeof error.message - 4 && length < sizeof error.message);
        assert_string_equal(error.message + length - 3, "...");
        assert_memory_equal(error.message + length - 6, "\xE2\x82\xAC", 3);
    }
    char exact[sizeof error.message];
    memset(exact, 'y', sizeof exact - 1);
    exact[sizeof exact - 1] = '\0';
    dt_fail(&error, DT_ERR_IO, "%s", exact);
    assert_string_equal(error.message, exact);
}

static void test_status_names(void **state) {
    (void)state;
    assert_string_equal(dt_status_name(DT_OK), "DT_OK");
    assert_string_equal(dt_status_name(DT_ERR_INTERNAL), "DT_ERR_INTERNAL");
    assert_string_equal(dt_status_name(DT_ERR_CONFIG), "DT_ERR_CONFIG");
    assert_non_null(dt_status_name((dt_status)999));
}

typedef struct heard {
    int n;
    dt_log_level level;
    char line[64];
} heard;

static void hear(dt_log_level level, const char *line, void *user) {
    heard *h = user;
    h->n++;
    h->level = level;
    strncpy(h->line, line, sizeof h->line - 1);
    if (h->n == 2) {
        dt_log_set(NULL, NULL); /* a receiver may take itself out */
    }
}

static void test_log_goes_to_the_receiver(void **state) {
    (void)state;
    heard h = {0};
    dt_log(DT_LOG_ERROR, "dropped");
    dt_log_set(hear, &h);
    dt_log(DT_LOG_WARN, "layer %d\n", 7);
    assert_int_equal(h.n, 1);
    assert_int_equal(h.level, DT_LOG_WARN);
    assert_string_equal(h.line, "layer 7");
    dt_log(DT_LOG_INFO, "second");
    dt_log(DT_LOG_INFO, "third");
    assert_int_equal(h.n, 2);
}

/* ---- memory ---- */

static void test_memory_counts(void **state) {
    (void)state;
    dt_memory memory;
    dt_memory_init(&memory);
    unsigned char *a = dt_memory_alloc_zero(&memory, 1000);
    assert_non_null(a);
    assert_int_equal((uintptr_t)a % 64, 0);
    for (int i = 0; i < 1000; i++) {
        assert_int_equal(a[i], 0);
    }
    memset(a, 7, 1000);
    assert_int_equal(atomic_load(&memory.bytes), 1000);
    unsigned char *b = dt_memory_grow(&memory, a, 1000, 5000);
    assert_non_null(b);
    assert_int_equal((uintptr_t)b % 64, 0);
    assert_int_equal(b[0] + b[999], 14);
    assert_int_equal(atomic_load(&memory.bytes), 5000);
    assert_int_equal(atomic_load(&memory.bytes_peak), 6000); /* both existed at once */
    b = dt_memory_grow(&memory, b, 5000, 10);
    assert_int_equal(b[9], 7);
    unsigned char *c = dt_memory_grow(&memory, NULL, 0, 90);
    assert_int_equal(atomic_load(&memory.bytes), 100);
    dt_memory_free(&memory, b, 10);
    dt_memory_free(&memory, c, 90);
    dt_memory_free(&memory, NULL, 5);
    assert_int_equal(atomic_load(&memory.bytes), 0);
    assert_null(dt_memory_alloc(&memory, SIZE_MAX));
    assert_int_equal(atomic_load(&memory.bytes), 0);
}

static void test_memory_fails_on_request(void **state) {
    (void)state;
    dt_memory memory;
    dt_memory_init(&memory);
    atomic_store(&memory.fail_after, 2);
    char *a = dt_memory_alloc(&memory, 16), *b = dt_memory_alloc(&memory, 16);
    assert_non_null(a);
    assert_non_null(b);
    strcpy(a, "kept");
    assert_null(dt_memory_alloc(&memory, 16));
    assert_null(dt_memory_grow(&memory, a, 16, 32));
    assert_string_equal(a, "kept");
    assert_null(dt_memory_alloc_zero(&memory, 16));
    assert_int_equal(atomic_load(&memory.bytes), 32);
    assert_int_equal(atomic_load(&memory.bytes_peak), 32);
    atomic_store(&memory.fail_after, -1);
    dt_memory_free(&memory, b, 16);
    b = dt_memory_alloc(&memory, 8);
    assert_non_null(b);
    dt_memory_free(&memory, a, 16);
    dt_memory_free(&memory, b, 8);
    assert_int_equal(atomic_load(&memory.bytes), 0);
}

static void *allocate_and_free(void *memory) {
    for (int i = 0; i < 2000; i++) {
        void *pointer = dt_memory_alloc(memory, 100);
        dt_memory_free(memory, pointer, 100);
    }
    return NULL;
}

static void test_memory_is_thread_safe(void **state) {
    (void)state;
    dt_memory memory;
    dt_memory_init(&memory);
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, allocate_and_free, &memory), 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
    }
    assert_int_equal(atomic_load(&memory.bytes), 0);
    assert_true(atomic_load(&memory.bytes_peak) >= 100 && atomic_load(&memory.bytes_peak) <= 400);
}

/* ---- machine ---- */

/* Blocks of two sizes and more than a slab holds: zeroed, aligned, apart from each other, and their places are used again. */
static void test_memory_blocks(void **state) {
    (void)state;
    enum { N = 300 };
    static const size_t sizes[] = {66624, 66624, 20000, 1000};
    static char *blocks[N];
    dt_memory memory;
    dt_memory_init(&memory);
    size_t total = 0;
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < N; i++) {
            const size_t bytes = sizes[i % 4];
            if (blocks[i] == NULL) {
                blocks[i] = dt_memory_alloc_block(&memory, bytes);
                assert_non_null(blocks[i]);
                assert_true((uintptr_t)blocks[i] % 64 == 0);
                total += bytes;
                for (size_t b = 0; b < bytes; b += 7) {
                    assert_int_equal(blocks[i][b], 0);
                }
                memset(blocks[i], i % 100 + 1, bytes);
            }
        }
        assert_int_equal(atomic_load(&memory.bytes), total);
        for (int i = 0; i < N; i++) {
            for (size_t b = 0; b < sizes[i % 4]; b += 9) {
                assert_int_equal(blocks[i][b], i % 100 + 1);
            }
            if ((i * 7 + round) % 3 != 0) {
                dt_memory_free_block(&memory, blocks[i], sizes[i % 4]);
                blocks[i] = NULL;
                total -= sizes[i % 4];
            }
        }
    }
    for (int i = 0; i < N; i++) {
        dt_memory_free_block(&memory, blocks[i], sizes[i % 4]);
        blocks[i] = NULL;
    }
    assert_int_equal(atomic_load(&memory.bytes), 0);
    memory.limit = 100000;
    blocks[0] = dt_memory_alloc_block(&memory, 66624);
    assert_non_null(blocks[0]);
    assert_null(dt_memory_alloc_block(&memory, 66624));
    dt_memory_free_block(&memory, blocks[0], 66624);
}

static void test_clock_and_cores(void **state) {
    (void)state;
    const int64_t before = dt_clock_us();
    int64_t now = before;
    while (now - before < 2000) {
        const int64_t next = dt_clock_us();
        assert_true(next >= now);
        now = next;
    }
    assert_true(dt_physical_cores() >= 1);
    assert_true(dt_physical_cores() <= 65536);
}

/* ---- half precision ---- */

static double half_value(unsigned half) { /* of a finite half, from the format's definition */
    const int exponent = (int)(half >> 10) & 31, fraction = (int)half & 1023;
    const double magnitude = exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, exponent - 25);
    return (half & 0x8000u) != 0 ? -magnitude : magnitude;
}

static void test_f16_every_half(void **state) {
    (void)state;
    for (unsigned half = 0; half <= 0xFFFF; half++) {
        const float value = dt_f16_to_f32((uint16_t)half);
        if ((half & 0x7C00u) != 0x7C00u) {
            assert_true(dt_is_finite(value));
            assert_true((double)value == half_value(half));
            assert_int_equal(dt_f32_to_f16(value), half);
        } else if ((half & 0x3FFu) == 0) {
            assert_true(isinf(value) && (value < 0) == (half > 0x7FFF));
            assert_false(dt_is_finite(value));
            assert_int_equal(dt_f32_to_f16(value), half);
        } else {
            assert_true(isnan(value));
            assert_false(dt_is_finite(value));
            assert_int_equal(dt_f32_to_f16(value) & 0x7E00, 0x7E00);
        }
    }
}

static void test_f16_rounds_to_nearest_even(void **state) {
    (void)state;
    for (unsigned half = 0; half < 0x7C00; half++) {
        const double low = half_value(half);
        const double high = half == 0x7BFF ? 65536 : half_value(half + 1); /* past the largest: as if the exponent went on */
        const float middle = (float)((low + high) / 2);                    /* exact: 11 bits and one more */
        const unsigned even = half + (half & 1);
        assert_int_equal(dt_f32_to_f16(middle), even);
        assert_int_equal(dt_f32_to_f16(nextafterf(middle, 0)), half);
        assert_int_equal(dt_f32_to_f16(nextafterf(middle, INFINITY)), half + 1);
        assert_int_equal(dt_f32_to_f16(-middle), 0x8000u | even);
    }
    assert_int_equal(dt_f32_to_f16(1e30f), 0x7C00);
    assert_int_equal(dt_f32_to_f16(-1e30f), 0xFC00);
    assert_int_equal(dt_f32_to_f16(1e-30f), 0);
    assert_int_equal(dt_f32_to_f16(-0.0f), 0x8000);
}

static void test_is_finite(void **state) {
    (void)state;
    assert_true(dt_is_finite(0) && dt_is_finite(-1.5f) && dt_is_finite(3.4e38f) && dt_is_finite(1e-45f));
    assert_false(dt_is_finite(INFINITY) || dt_is_finite(-INFINITY) || dt_is_finite(NAN) || dt_is_finite(-NAN));
}

/* ---- vectors ---- */

static void test_exponentials_and_logarithms(void **state) {
    (void)state;
    for (float from = -87; from <= 87; from += 0.0131f) {
        dt_floats x, y;
        for (int32_t i = 0; i < DT_VECTOR; i++) {
            x[i] = i == 0 ? from : from * (float)(i * i) / 256.0f; /* some close to 0 */
            y[i] = expf(x[i]);
        }
        dt_floats e = x, l = y;
        dt_exponentials(&e);
        dt_logarithms(&l);
        for (int32_t i = 0; i < DT_VECTOR; i++) {
            const double want = exp((double)x[i]), log_want = log((double)y[i]);
            assert_true(dt_is_finite(e[i]) && fabs((double)e[i] / want - 1) <= 1e-5);
            assert_true(dt_is_finite(l[i]) && fabs((double)l[i] - log_want) <= 1e-6 * DT_MAX(fabs(log_want), 1.0));
        }
    }
    dt_floats one = (dt_floats){0} + 1.0f, zero = {0};
    dt_exponentials(&zero);
    dt_logarithms(&one);
    assert_true(zero[0] == 1 && one[0] == 0);
}

static void test_vectors_are_cut(void **state) {
    (void)state;
    float numbers[DT_VECTOR + 1], out[DT_VECTOR + 1];
    for (int32_t i = 0; i <= DT_VECTOR; i++) {
        numbers[i] = (float)i + 1;
        out[i] = -1;
    }
    for (int32_t n = 1; n <= DT_VECTOR + 1; n++) {
        dt_floats x;
        dt_vector_load(&x, numbers, n);
        dt_vector_store(out, &x, n);
        for (int32_t i = 0; i <= DT_VECTOR; i++) {
            assert_true(i == DT_VECTOR || x[i] == (i < n ? numbers[i] : 0));
            assert_true(out[i] == (i < DT_MIN(n, DT_VECTOR) ? numbers[i] : -1));
        }
    }
}

/* ---- block layout ---- */

static void check_format(dt_kv_type type_k, dt_kv_type type_v, int32_t dim_k, int32_t dim_v, int32_t block_tokens) {
    dt_kv_format f;
    dt_kv_format_init(&f, type_k, type_v, dim_k, dim_v, block_tokens);
    const size_t offsets[] = {0, f.v_offset, f.k_scale_offset, f.v_scale_offset, f.position_offset, f.block_bytes};
    const size_t needed[] = {
        (size_t)block_tokens / 16 * dt_kv_group_bytes(&f),
        (size_t)block_tokens * dt_kv_value_row_bytes(&f),
        type_k == DT_KV_INT8 ? 4 * (size_t)block_tokens : 0,
        type_v == DT_KV_INT8 ? 4 * (size_t)block_tokens : 0,
        4 * (size_t)block_tokens,
    };
    for (int i = 0; i < 5; i++) {
        assert_int_equal(offsets[i + 1] % 64, 0);
        assert_true(offsets[i] + needed[i] <= offsets[i + 1]);
        assert_true(offsets[i + 1] - offsets[i] < needed[i] + 64); /* nothing wasted but alignment */
    }
    assert_true(f.dim_k_padded % 4 == 0 && f.dim_k_padded >= dim_k && f.dim_k_padded < dim_k + 4);
    assert_true(f.dim_v_padded % 16 == 0 && f.dim_v_padded >= dim_v && f.dim_v_padded < dim_v + 16);

    /* every key element has a place of its own, inside the key section */
    const size_t element = type_k == DT_KV_F16 ? 2 : 1;
    unsigned char *taken = calloc(f.block_bytes, 1);
    assert_non_null(taken);
    for (int32_t entry = 0; entry < block_tokens; entry++) {
        for (int32_t dim = 0; dim < dim_k; dim++) {
            const size_t at = dt_kv_key_offset(&f, entry, dim);
            assert_true(at + element <= needed[0]);
            assert_int_equal(at % element, 0);
            assert_int_equal(taken[at]++, 0);
        }
    }
    free(taken);
}

static void test_kv_format(void **state) {
    (void)state;
    const int32_t dims[] = {1, 40, 64, 80, 96, 100, 128, 192, 256};
    for (size_t k = 0; k < sizeof dims / sizeof dims[0]; k++) {
        for (size_t v = 0; v < sizeof dims / sizeof dims[0]; v++) {
            for (int types = 0; types < 4; types++) {
                check_format(types & 1 ? DT_KV_INT8 : DT_KV_F16, types & 2 ? DT_KV_INT8 : DT_KV_F16, dims[k], dims[v], 16);
                check_format(types & 1 ? DT_KV_INT8 : DT_KV_F16, types & 2 ? DT_KV_INT8 : DT_KV_F16, dims[k], dims[v], 48);
            }
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fail_fills_the_error),
        cmocka_unit_test(test_fail_cuts_long_messages_at_a_character),
        cmocka_unit_test(test_status_names),
        cmocka_unit_test(test_log_goes_to_the_receiver),
        cmocka_unit_test(test_memory_counts),
        cmocka_unit_test(test_memory_fails_on_request),
        cmocka_unit_test(test_memory_is_thread_safe),
        cmocka_unit_test(test_memory_blocks),
        cmocka_unit_test(test_clock_and_cores),
        cmocka_unit_test(test_sizes_are_told_in_their_own_unit),
        cmocka_unit_test(test_f16_every_half),
        cmocka_unit_test(test_f16_rounds_to_nearest_even),
        cmocka_unit_test(test_is_finite),
        cmocka_unit_test(test_exponentials_and_logarithms),
        cmocka_unit_test(test_vectors_are_cut),
        cmocka_unit_test(test_kv_format),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
