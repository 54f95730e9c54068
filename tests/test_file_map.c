/*
 * Mapped files that become shorter under their reader: the process lives, zeros are read, and the mapping, the weights and every step
 * computed with them say so. Each in a child process of its own: a handler that fails ends the process.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "base/file_map.h"
#include "support/cmocka_all.h"
#include "support/fixture.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define FILE_BYTES 65536

static int new_file(void) {
    char path[] = "/tmp/dt-test-map-XXXXXX";
    const int file = mkstemp(path);
    assert_true(file >= 0);
    unlink(path);
    char *bytes = malloc(FILE_BYTES);
    assert_non_null(bytes);
    memset(bytes, 'x', FILE_BYTES);
    assert_int_equal(write(file, bytes, FILE_BYTES), FILE_BYTES);
    free(bytes);
    return file;
}

static void test_truncated(void **state) {
    (void)state;
    for (int round = 0; round < 3; round++) { /* entries are used again */
        const int file = new_file();
        dt_file_map *map = dt_file_map_open(file, FILE_BYTES), *other = dt_file_map_open(file, FILE_BYTES / 2);
        assert_non_null(map);
        assert_non_null(other);
        const volatile unsigned char *bytes = dt_file_map_bytes(map);
        assert_int_equal(bytes[FILE_BYTES - 1], 'x');
        assert_int_equal(ftruncate(file, FILE_BYTES / 2), 0);
        assert_false(dt_file_map_broken(map));
        assert_int_equal(bytes[FILE_BYTES / 2 + 5000], 0);
        assert_int_equal(bytes[FILE_BYTES - 1], 0);
        assert_int_equal(bytes[FILE_BYTES / 2 - 1], 'x');
        assert_true(dt_file_map_broken(map));
        assert_false(dt_file_map_broken(other));
        dt_file_map_close(map);
        dt_file_map_close(other);
        close(file);
    }
}

static void test_faults_elsewhere(void **state) {
    (void)state;
    fflush(NULL);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) { /* somebody else's mapping: the system ends the process, as without us */
        signal(SIGBUS, SIG_DFL);
        const int file = new_file();
        dt_file_map *map = dt_file_map_open(file, FILE_BYTES);
        const volatile char *theirs = mmap(NULL, FILE_BYTES, PROT_READ, MAP_PRIVATE, file, 0);
        dt_file_map_close(map);
        if (ftruncate(file, 0) == 0) {
            _exit(theirs[100] == 'x' ? 1 : 2);
        }
        _exit(3);
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true((WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS) ||
                (WIFEXITED(status) && WEXITSTATUS(status) > 3)); /* sanitizers exit */
}

static void test_weights(void **state) {
    (void)state;
    tiny_model_params shape = three_layers(128);
    const char *path = write_tiny(&shape);
    dt_model *model = open_model(path, true), *read = NULL;
    dt_session *session = open_session(model, NULL), *other;
    dt_error error = {0};
    const dt_model_params no_mmap = {.no_mmap = true, .no_extra_buffers = true};
    const int32_t tokens[3] = {5, 6, 7}, more[4] = {5, 6, 7, 8};
    assert_int_equal(dt_model_open(path, &no_mmap, &read, &error), DT_OK);
    other = open_session(read, NULL);
    sync_tokens(session, tokens, 3);
    assert_int_equal(truncate(path, 12000), 0);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(dt_session_sync(session, more, 4, NULL, NULL, NULL, &error), DT_ERR_IO);
        assert_non_null(strstr(error.message, "became shorter"));
        assert_non_null(strstr(error.message, path));
    }
    sync_tokens(other, more, 4); /* what was read into memory stays */
    dt_session_free(session);
    dt_session_free(other);
    dt_model_close(model);
    dt_model_close(read);
    assert_int_not_equal(dt_model_open(path, NULL, &model, &error), DT_OK);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_truncated),
        cmocka_unit_test(test_faults_elsewhere),
        cmocka_unit_test(test_weights),
    };
    return cmocka_run_group_tests_name("file map", tests, NULL, NULL);
}
