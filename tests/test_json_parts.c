/*
 * JSON is read wholly or not at all wherever memory runs out, for strings and numbers of every length about those at which the
 * parser's buffer grows. The reader is compiled in here with an allocator that refuses; a sanitizer sees what is written past an end.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>

static size_t n_calls, n_granted, n_refused_most; /* after n_granted, n_refused_most are refused */

static void *refusing_malloc(size_t n) {
    const size_t call = n_calls++;
    return call >= n_granted && call - n_granted < n_refused_most ? NULL : malloc(n);
}

#define malloc refusing_malloc
#include "../apps/json_parts.c" /* NOLINT(bugprone-suspicious-include) */
#undef malloc
#include "support/cmocka_all.h"

enum { LONGEST = 140 };

static json_t *read_text(const char *text, size_t granted, size_t refused_most, json_error_t *why) {
    n_calls = 0;
    n_granted = granted;
    n_refused_most = refused_most;
    json_t *json = dt_json_load(text, strlen(text), 0, why);
    n_refused_most = 0;
    return json;
}

/* Each allocation refused in turn, alone and with all that follow. */
static void check_all_refusals(const char *text) {
    json_error_t why;
    json_t *expected = read_text(text, 0, 0, &why);
    const size_t total = n_calls;
    assert_non_null(expected);
    assert_true(total > 3);
    for (size_t granted = 0; granted < total; granted++) {
        static const size_t times[] = {1, 2, (size_t)-1};
        for (size_t i = 0; i < sizeof times / sizeof times[0]; i++) {
            json_t *json = read_text(text, granted, times[i], &why);
            assert_null(json);
            assert_int_equal(json_error_code(&why), json_error_out_of_memory);
            assert_string_equal(why.text, "out of memory");
        }
    }
    json_t *again = read_text(text, total, (size_t)-1, &why);
    assert_true(json_equal(expected, again));
    json_decref(expected);
    json_decref(again);
}

static void test_each_allocation_refused(void **state) {
    (void)state;
    for (int n = 0; n <= LONGEST; n++) {
        char text[4 * LONGEST + 80];
        snprintf(text, sizeof text, "{\"key\": [\"%0*d\", 1, null]}", n, 7);
        check_all_refusals(text);
        snprintf(text, sizeof text, "{\"%0*d\": 0.5, \"b\": {\"c\": \"\"}}", n, 7);
        check_all_refusals(text);
        snprintf(text, sizeof text, "[0.%0*d, %d]", n, 7, n);
        check_all_refusals(text);
        char wide[3 * LONGEST + 1] = "";
        for (int i = 0; i < n; i++) {
            memcpy(wide + 3 * i, "\xE2\x82\xAC", 4); /* a character of three bytes, some of which are read ahead */
        }
        snprintf(text, sizeof text, "[\"%s\"]", wide);
        check_all_refusals(text);
    }
}

static void test_reads_as_jansson_does(void **state) {
    (void)state;
    static const char *const texts[] = {"{}",
                                        "[1, 2.5e3, -7, \"\\u20ac\\n\", true, [], {\"a\": {}}]",
                                        "{\"a\": 1, \"a\": 2}",
                                        "",
                                        "5",
                                        "[1",
                                        "[\"a",
                                        "[1] x",
                                        "[1.]",
                                        "[\"\xFF\"]",
                                        "[\"\xE2\x82\"]",
                                        "{\"a\" 1}",
                                        "[\"\\u0000\"]"};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        for (size_t flags = 0; flags <= JSON_REJECT_DUPLICATES; flags += JSON_REJECT_DUPLICATES) {
            json_error_t why, expected_why;
            json_t *json = dt_json_load(texts[i], strlen(texts[i]), flags, &why);
            json_t *expected = json_loadb(texts[i], strlen(texts[i]), flags, &expected_why);
            assert_true((json == NULL) == (expected == NULL));
            if (json != NULL) {
                assert_true(json_equal(json, expected));
            } else {
                assert_int_equal(why.line, expected_why.line);
                assert_int_equal(why.column, expected_why.column);
                assert_int_equal(json_error_code(&why), json_error_code(&expected_why));
                assert_string_equal(why.text, expected_why.text);
            }
            json_decref(json);
            json_decref(expected);
        }
    }
}

static void test_files(void **state) {
    (void)state;
    FILE *file = tmpfile();
    assert_non_null(file);
    assert_true(fputs("[\"a text\", 5]", file) >= 0 && fflush(file) == 0);
    json_error_t why;
    for (size_t n_most = 0; n_most < 20; n_most++) {
        rewind(file);
        json_t *json = dt_json_load_fd(fileno(file), n_most, 0, &why);
        assert_true((json != NULL) == (n_most >= strlen("[\"a text\", 5]")));
        json_decref(json);
    }
    fclose(file);
    assert_null(dt_json_load_fd(-1, 10, 0, &why));
    assert_string_equal(why.text, strerror(EBADF));
    assert_null(dt_json_load_fd(-1, 10, 0, NULL));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_each_allocation_refused),
        cmocka_unit_test(test_reads_as_jansson_does),
        cmocka_unit_test(test_files),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
