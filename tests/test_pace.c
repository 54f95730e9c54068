/*
 * How many threads a step takes: all while the processor is free, as many as it got cores where it is not, all again once others are
 * gone; trials become rare. Time is the test's own.
 */
#include "graph/pace.h"
#include "support/cmocka_all.h"

/* A machine with so many cores left for us; steps of 5 ms for whoever gets all it asks for. */
typedef struct machine {
    double cores;
    int64_t now_us;
} machine;

/* Lets steps run for some time; how much of it, in percent, all threads were taken. */
static int32_t run(dt_pace *pace, machine *m, int64_t us) {
    const int64_t end = m->now_us + us;
    int64_t all_us = 0;
    while (m->now_us < end) {
        const int32_t n = dt_pace_threads(pace, m->now_us);
        assert_in_range(n, 1, pace->n_most);
        const double got = m->cores < n ? m->cores : n;
        const int64_t wall_us = got < n ? 40000 : 5000; /* threads that don't run hold up the others */
        m->now_us += wall_us;
        all_us += n == pace->n_most ? wall_us : 0;
        dt_pace_took(pace, n, m->now_us, wall_us, (int64_t)((double)wall_us * got));
    }
    return (int32_t)(all_us * 100 / us);
}

static void test_a_free_processor(void **state) {
    (void)state;
    for (int32_t n = 1; n <= 16; n++) {
        dt_pace pace;
        machine m = {.cores = 64};
        dt_pace_start(&pace, n);
        assert_int_equal(run(&pace, &m, 1000000), 100);
        assert_int_equal(dt_pace_threads(&pace, m.now_us), n);
    }
}

static void test_others_take_cores(void **state) {
    (void)state;
    static const struct {
        int32_t n;
        double cores;
        int32_t expected;
    } cases[] = {{2, 1.3, 1}, {2, 1.9, 2}, {2, 0.3, 1}, {8, 7.9, 8}, {8, 7.4, 7}, {8, 5.0, 5}, {4, 0.5, 1}, {1, 0.2, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        dt_pace pace;
        machine m = {.cores = cases[i].cores};
        dt_pace_start(&pace, cases[i].n);
        run(&pace, &m, 200000);
        assert_int_equal(dt_pace_threads(&pace, m.now_us), cases[i].expected);
        const int32_t share = run(&pace, &m, 60000000); /* a minute: nearly all of it with the right number */
        if (cases[i].expected < cases[i].n) {
            assert_true(share <= 3);
        }
    }
}

static void test_others_go_away(void **state) {
    (void)state;
    dt_pace pace;
    machine m = {.cores = 1};
    dt_pace_start(&pace, 4);
    run(&pace, &m, 300000);
    assert_int_equal(dt_pace_threads(&pace, m.now_us), 1);
    m.cores = 8;
    run(&pace, &m, 1000000); /* the first trial comes after half a second */
    assert_int_equal(dt_pace_threads(&pace, m.now_us), 4);
    m.cores = 1;
    run(&pace, &m, 60000000);
    m.cores = 8;
    run(&pace, &m, 9000000); /* the longest wait for a trial is 8 s */
    assert_int_equal(dt_pace_threads(&pace, m.now_us), 4);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_free_processor),
        cmocka_unit_test(test_others_take_cores),
        cmocka_unit_test(test_others_go_away),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
