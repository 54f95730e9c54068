/*
 * Files that are replaced as a whole, and what killed processes left of such.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "base/open_locked.h"
#include "base/replace_file.h"
#include "support/cmocka_all.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define TURNS 3000

typedef struct place {
    char folder[64], target[128];
} place;

static int make_place(void **state) {
    place *p = calloc(1, sizeof *p);
    strcpy(p->folder, "/tmp/dt-test-replace-XXXXXX");
    *state = p;
    if (p == NULL || mkdtemp(p->folder) == NULL) {
        return -1;
    }
    snprintf(p->target, sizeof p->target, "%s/target", p->folder);
    return 0;
}

static int remove_place(void **state) {
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", ((place *)*state)->folder);
    const int code = system(command);
    free(*state);
    return code;
}

/* PLACE/target + ending. */
static const char *path_of(const place *p, const char *ending) {
    static char path[8][256];
    static int next;
    next = (next + 1) % 8;
    snprintf(path[next], sizeof path[next], "%s%s", p->target, ending);
    return path[next];
}

static const char *temporary_of(const place *p, long pid) {
    char ending[32];
    snprintf(ending, sizeof ending, ".%ld.deeptutor", pid);
    return path_of(p, ending);
}

static void write_text(const char *path, const char *text) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

static bool holds(const char *path, const char *text) {
    char bytes[64] = "";
    FILE *file = fopen(path, "rb");
    const size_t n = file != NULL ? fread(bytes, 1, sizeof bytes - 1, file) : 0;
    if (file != NULL) {
        fclose(file);
    }
    return file != NULL && n == strlen(text) && memcmp(bytes, text, n) == 0;
}

static void replace(const place *p, const char *text) {
    dt_error error = {0};
    dt_replace_file *file = NULL;
    if (dt_replace_begin(p->target, &file, &error) != DT_OK || dt_replace_write(file, text, strlen(text), &error) != DT_OK ||
        dt_replace_commit(file, &error) != DT_OK) {
        fail_msg("%s", error.message);
    }
}

static void test_as_a_whole(void **state) {
    const place *p = *state;
    dt_error error = {0};
    dt_replace_file *file = NULL;
    replace(p, "first");
    assert_true(holds(p->target, "first"));
    assert_int_equal(dt_replace_begin(p->target, &file, &error), DT_OK);
    assert_int_equal(dt_replace_write(file, "second", 6, &error), DT_OK);
    assert_true(holds(p->target, "first"));
    dt_replace_abandon(file);
    assert_true(holds(p->target, "first"));
    assert_int_not_equal(access(temporary_of(p, getpid()), F_OK), 0);
    assert_int_equal(dt_replace_check(p->target, 10, &error), DT_OK);
    assert_int_equal(dt_replace_check(p->target, UINT64_MAX / 2, &error), DT_ERR_IO);
    assert_int_equal(dt_replace_check(path_of(p, "/inside"), 10, &error), DT_ERR_IO);
    assert_true(holds(p->target, "first"));
}

/* A process that is no more. */
static long dead_process(void) {
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        _exit(0);
    }
    assert_int_equal(waitpid(child, NULL, 0), child);
    return child;
}

static void test_what_was_left(void **state) {
    const place *p = *state;
    const char *const dead = temporary_of(p, dead_process()), *const own = temporary_of(p, getpid());
    const char *const alive = temporary_of(p, getppid()), *const other = path_of(p, ".notes.deeptutor");
    const char *const longer = path_of(p, "-more.99999.deeptutor"), *const no_number = path_of(p, "..deeptutor");
    const char *const somebodys = path_of(p, ".2024.tmp");
    const char *const all[] = {dead, own, alive, other, longer, no_number, somebodys};
    for (int i = 0; i < 7; i++) {
        write_text(all[i], "left");
    }
    replace(p, "new");
    assert_true(holds(p->target, "new"));
    for (int i = 0; i < 7; i++) {
        assert_int_equal(access(all[i], F_OK) == 0, i >= 2);
    }
}

static void test_what_is_still_made(void **state) {
    const place *p = *state;
    dt_error error = {0};
    dt_replace_file *file = NULL, *second = NULL;
    const char *const elsewhere =
        temporary_of(p, dead_process()); /* of another machine: locked, though nobody here has its number */
    write_text(elsewhere, "left");
    const int held = open(elsewhere, O_RDWR);
    assert_int_equal(flock(held, LOCK_EX), 0);
    assert_int_equal(dt_replace_begin(p->target, &file, &error), DT_OK);
    assert_int_equal(access(elsewhere, F_OK), 0);
    assert_int_equal(dt_replace_begin(p->target, &second, &error), DT_ERR_IO); /* two at once in one process */
    assert_int_equal(dt_replace_write(file, "first", 5, &error), DT_OK);
    assert_int_equal(dt_replace_commit(file, &error), DT_OK);
    assert_true(holds(p->target, "first"));
    close(held);
    replace(p, "second");
    assert_int_not_equal(access(elsewhere, F_OK), 0);
}

/* Takes a lock file, is alone, and removes it with the lock: what two at once would do. */
static int take_turns(const place *p) {
    const char *const path = path_of(p, ".lock"), *const inside = path_of(p, ".inside");
    for (int done = 0; done < TURNS;) {
        bool locked = false;
        const int file = dt_open_locked(path, O_RDWR | O_CREAT, &locked);
        if (file < 0 && errno != EWOULDBLOCK) {
            return 1;
        }
        if (file >= 0) {
            const int alone = open(inside, O_WRONLY | O_CREAT | O_EXCL, 0600);
            if (!locked || alone < 0 || close(alone) != 0 || unlink(inside) != 0 || unlink(path) != 0) {
                return 1;
            }
            close(file);
            done++;
        }
    }
    return 0;
}

static void test_one_at_a_time(void **state) {
    const place *p = *state;
    pid_t children[3];
    for (int i = 0; i < 3; i++) {
        children[i] = fork();
        assert_true(children[i] >= 0);
        if (children[i] == 0) {
            _exit(take_turns(p));
        }
    }
    for (int i = 0; i < 3; i++) {
        int status = -1;
        assert_int_equal(waitpid(children[i], &status, 0), children[i]);
        assert_int_equal(status, 0);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_as_a_whole, make_place, remove_place),
        cmocka_unit_test_setup_teardown(test_what_was_left, make_place, remove_place),
        cmocka_unit_test_setup_teardown(test_what_is_still_made, make_place, remove_place),
        cmocka_unit_test_setup_teardown(test_one_at_a_time, make_place, remove_place),
    };
    return cmocka_run_group_tests_name("replace file", tests, NULL, NULL);
}
