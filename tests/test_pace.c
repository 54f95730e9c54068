/*
 * How many threads a step takes: all while the processor is free, as many as it got cores where it is not, all again once others are
 * gone; trials become rare. Time is the test's own.
 */
#include "graph/pace.h"
#include "support/cmocka_all.h"

/* A machine with so many cores left for us; steps of 5 ms for whoever gets all it asks for. */
typedef struct machine {
    double cores;
    int64_t tick_us; /* the time of other threads than the caller's is told in whole ticks */
    int64_t gap_us;  /* after a step, in which the caller samples */
    int64_t now_us, cpu_us;
    double others_us[16];
} machine;

/* What the kernel says that the process has used so far. */
static int64_t clock_of_process(const machine *m) {
    int64_t us = m->cpu_us;
    for (int i = 0; i < 16; i++) {
        const int64_t phase = i * m->tick_us / 16;
        us += m->tick_us > 0 ? ((int64_t)m->others_us[i] + phase) / m->tick_us * m->tick_us : (int64_t)m->others_us[i];
    }
    return us;
}

/* Lets steps run for some time; how much of it, in percent, all threads were taken. */
static int32_t run(dt_pace *pace, machine *m, int64_t us) {
    const int64_t end = m->now_us + us;
    int64_t all_us = 0;
    while (m->now_us < end) {
        const int32_t n = dt_pace_threads(pace, m->now_us);
        assert_in_range(n, 1, pace->n_most);
        const double share = m->cores < n ? m->cores / n : 1;
        const int64_t wall_us = share < 1 ? 40000 : 5000; /* threads that don't run hold up the others */
        const int64_t began_us = m->now_us;
        m->now_us += wall_us;
        all_us += n == pace->n_most ? wall_us + m->gap_us : 0;
        m->cpu_us += (int64_t)((double)wall_us * share);
        for (int32_t i = 1; i < n; i++) {
            m->others_us[i - 1] += (double)wall_us * share;
        }
        dt_pace_took(pace, n, began_us, m->now_us, clock_of_process(m));
        m->now_us += m->gap_us;
        m->cpu_us += m->gap_us;
    }
    return (int32_t)(all_us * 100 / us);
}

static void test_a_free_processor(void **state) {
    (void)state;
    static const int64_t ticks[] = {0, 1000, 4000, 10000}, gaps[] = {0, 100, 700, 2000, 20000};
    for (int32_t n = 1; n <= 16; n++) {
        for (int i = 0; i < 4 * 5; i++) {
            dt_pace pace;
            machine m = {.cores = 64, .tick_us = ticks[i / 5], .gap_us = gaps[i % 5]};
            dt_pace_start(&pace, n);
            assert_true(run(&pace, &m, 3000000) >= 100);
            assert_int_equal(dt_pace_threads(&pace, m.now_us), n);
        }
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
        machine m = {.cores = cases[i].cores, .tick_us = 4000, .gap_us = 300};
        dt_pace_start(&pace, cases[i].n);
        run(&pace, &m, 700000);
        assert_int_equal(dt_pace_threads(&pace, m.now_us), cases[i].expected);
        const int32_t share = run(&pace, &m, 60000000); /* a minute: nearly all of it with the right number */
        if (cases[i].expected < cases[i].n) {
            assert_true(share <= 3);
        }
    }
}

/* Threads that woke on one core, until the kernel moves one. */
static void test_a_short_squeeze(void **state) {
    (void)state;
    dt_pace pace;
    machine m = {.cores = 64, .tick_us = 4000, .gap_us = 300};
    dt_pace_start(&pace, 2);
    for (int i = 0; i < 20; i++) {
        run(&pace, &m, 200000);
        m.cores = 1.1;
        run(&pace, &m, 100000);
        m.cores = 64;
        assert_int_equal(dt_pace_threads(&pace, m.now_us), 2);
    }
}

static void test_others_go_away(void **state) {
    (void)state;
    dt_pace pace;
    machine m = {.cores = 1, .tick_us = 4000, .gap_us = 300};
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
        cmocka_unit_test(test_a_short_squeeze),
        cmocka_unit_test(test_others_go_away),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
