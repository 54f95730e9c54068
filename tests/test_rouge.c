/*
 * ROUGE-L on texts whose longest common subsequence is plain to see, in several scripts, and on broken bytes. tests/test_eval_ab.py
 * compares it with a computation in Python.
 */
#include "../apps/rouge.h"
#include "../apps/utf8.h"
#include "support/cmocka_all.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static double score(const char *a, const char *b) {
    double forth = -1, back = -1;
    assert_true(dt_rouge_l(a, strlen(a), b, strlen(b), &forth));
    assert_true(dt_rouge_l(b, strlen(b), a, strlen(a), &back));
    assert_true(isfinite(forth) && forth == back);
    return forth;
}

static void assert_score(const char *a, const char *b, double expected) { assert_true(fabs(score(a, b) - expected) <= 1e-12); }

static void test_words(void **state) {
    (void)state;
    assert_score("the cat sat on the mat", "The cat, sat: ON the mat!", 1);
    assert_score("police killed the gunman", "police kill the gunman", 0.75); /* Lin 2004, section 3 */
    assert_score("police killed the gunman", "the gunman kill police", 0.5);
    assert_score("a b c d", "b d", 2.0 * 2 / 6);
    assert_score("don't", "don t", 1);
    assert_score("one", "two", 0);
    assert_score("x1", "x", 0);
}

static void test_no_words(void **state) {
    (void)state;
    assert_score("", "", 1);
    assert_score("", "word", 0);
    assert_score("...", "!", 1);
}

static void test_scripts(void **state) {
    (void)state;
    assert_score("北京是首都", "北京，是大首都。", 2.0 * 5 / 11);
    assert_score("naïve café", "naïve cafe", 0.5);
    assert_score("глокая куздра", "куздра", 2.0 * 1 / 3);
    assert_score("abc中def", "中 def", 2.0 * 2 / 5);
}

static void test_broken_bytes(void **state) {
    (void)state;
    assert_score("ab\xFF"
                 "cd",
                 "ab cd", 1);
    assert_score("ab\xE4\xB8", "ab", 1);         /* cut short */
    assert_score("ab\xC0\xAF", "ab", 1);         /* overlong */
    assert_score("ab\xED\xA0\x80 x", "ab x", 1); /* a surrogate */
    size_t n;
    char *valid = dt_repair_utf8("a\xFF\xE4\xB8\xAD\xE4\xB8\0b", 9, &n);
    assert_non_null(valid);
    assert_string_equal(valid, "a\xEF\xBF\xBD\xE4\xB8\xAD\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"
                               "b");
    free(valid);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_words), cmocka_unit_test(test_no_words),
                                       cmocka_unit_test(test_scripts), cmocka_unit_test(test_broken_bytes)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
