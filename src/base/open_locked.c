/* See open_locked.h. */
#define _GNU_SOURCE /* flock */
#include "base/open_locked.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

static bool is_named(int file, const char *path) {
    struct stat ours, there;
    return fstat(file, &ours) == 0 && lstat(path, &there) == 0 && ours.st_dev == there.st_dev && ours.st_ino == there.st_ino;
}

int dt_open_locked(const char *path, int flags, bool *locked) {
    for (;;) {
        const int file = open(path, flags | O_CLOEXEC | O_NOFOLLOW, 0666);
        if (file < 0) {
            return -1;
        }
        *locked = flock(file, LOCK_EX | LOCK_NB) == 0;
        const bool taken = !*locked && errno == EWOULDBLOCK;
        if (!taken && is_named(file, path)) {
            return file;
        }
        close(file);
        if (taken) {
            errno = EWOULDBLOCK;
            return -1;
        }
    }
}
