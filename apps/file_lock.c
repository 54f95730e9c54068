/*
 * See file_lock.h. Invariant: who holds the lock of the file that PATH.lock names now, holds the lock of PATH: a lock on one that was
 * removed meanwhile is given back and another try made.
 */
#define _GNU_SOURCE /* flock, realpath */
#include "file_lock.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

struct dt_file_lock {
    int descriptor;
    char path[]; /* of the lock file */
};

void dt_file_lock_holder(int descriptor, char *out, size_t capacity) {
    char text[32] = "";
    const ssize_t n = pread(descriptor, text, sizeof text - 1, 0);
    const long pid = n > 0 ? strtol(text, NULL, 10) : 0;
    if (pid > 0) {
        snprintf(out, capacity, "process %ld", pid);
    } else {
        snprintf(out, capacity, "another process");
    }
}

void dt_file_lock_sign(int descriptor) {
    char text[32];
    const int n = snprintf(text, sizeof text, "%ld\n", (long)getpid());
    const bool signed_here = ftruncate(descriptor, 0) == 0 && pwrite(descriptor, text, (size_t)n, 0) == n;
    (void)signed_here; /* on a full disk it goes without a name */
}

bool dt_file_lock_is_one(int descriptor) {
    char text[32] = "";
    char *end = text;
    struct stat info;
    const ssize_t n = pread(descriptor, text, sizeof text - 1, 0);
    const long pid = n > 0 ? strtol(text, &end, 10) : 0;
    const bool is_signed = n > 1 && pid > 0 && text[0] >= '1' && text[0] <= '9' && end == text + n - 1 && *end == '\n';
    return fstat(descriptor, &info) == 0 && S_ISREG(info.st_mode) && info.st_size == n && (n == 0 || is_signed);
}

bool dt_file_lock_is_there(int descriptor, const char *path) {
    struct stat ours, there;
    return fstat(descriptor, &ours) == 0 && stat(path, &there) == 0 && ours.st_dev == there.st_dev && ours.st_ino == there.st_ino;
}

/* Frees the lock. */
static dt_status fail_foreign(dt_file_lock *lock, const char *why, dt_error *error) {
    snprintf(error->message, sizeof error->message,
             "%.600s is no lock file of this program (%s), and another process may be at work; rename it, or name another file",
             lock->path, why);
    free(lock);
    return error->code = DT_ERR_ARGUMENT;
}

dt_status dt_file_lock_take(const char *path, dt_file_lock **out, dt_error *error) {
    char *real = realpath(path, NULL); /* a link and what it points to have one lock */
    const char *target = real != NULL ? real : path;
    const size_t capacity = strlen(target) + sizeof ".lock";
    dt_file_lock *lock = malloc(sizeof *lock + capacity);
    *out = NULL;
    if (lock == NULL) {
        free(real);
        snprintf(error->message, sizeof error->message, "out of memory for a lock");
        return error->code = DT_ERR_MEMORY;
    }
    snprintf(lock->path, capacity, "%s.lock", target);
    free(real);
    for (;;) {
        lock->descriptor = open(lock->path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
        struct stat info;
        if (lock->descriptor < 0 && lstat(lock->path, &info) != 0) { /* no place for files */
            free(lock);
            return DT_OK;
        }
        if (lock->descriptor < 0) {
            return fail_foreign(lock, strerror(errno), error);
        }
        if (flock(lock->descriptor, LOCK_EX | LOCK_NB) != 0) {
            break;
        }
        const bool is_there = dt_file_lock_is_there(lock->descriptor, lock->path);
        if (is_there && dt_file_lock_is_one(lock->descriptor)) {
            dt_file_lock_sign(lock->descriptor);
            *out = lock;
            return DT_OK;
        }
        close(lock->descriptor);
        if (is_there) {
            return fail_foreign(lock, "it holds something else", error);
        }
    }
    const bool taken = errno == EWOULDBLOCK;
    char holder[64];
    dt_file_lock_holder(lock->descriptor, holder, sizeof holder);
    close(lock->descriptor);
    free(lock);
    if (taken) {
        snprintf(error->message, sizeof error->message, "%s is in use by %s; wait until that ends, or name another file", path,
                 holder);
        return error->code = DT_ERR_ARGUMENT;
    }
    return DT_OK;
}

void dt_file_lock_release(dt_file_lock *lock) {
    if (lock != NULL) {
        unlink(lock->path); /* while it is held: nobody else's is removed */
        close(lock->descriptor);
        free(lock);
    }
}
