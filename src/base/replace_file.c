/*
 * Replacing a file as a whole. See replace_file.h.
 *
 * Order of a commit: bytes to the disk (fsync), then the name (rename), then the folder's entry (fsync of the folder). Invariant:
 * before the rename the target has not been touched; a failure removes the file in the making.
 *
 * A file in the making is locked (flock) by who makes it. What a killed process left of one has a lock that nobody holds, and in its
 * name a process that is no more: the next one who writes the same target removes it.
 */
#define _GNU_SOURCE /* realpath, fsync */
#include "base/replace_file.h"

#include "base/open_locked.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define BUFFER_BYTES ((size_t)1 << 18)
#define TRIES 3 /* a file in the making that another process is just removing */

struct dt_replace_file {
    char *path;      /* the target, links followed */
    char *temporary; /* the file in the making */
    int descriptor;
    bool failed;
    char *buffer;
    size_t n_buffered;
    uint64_t n_written; /* buffered bytes included */
};

static dt_status cannot_write(dt_error *error, const char *path, int reason) {
    return dt_fail(error, DT_ERR_IO, "%s can't be written: %s", path, strerror(reason));
}

static void release(dt_replace_file *file) {
    free(file->path);
    free(file->temporary);
    free(file->buffer);
    free(file);
}

void dt_replace_abandon(dt_replace_file *file) {
    if (file != NULL) {
        if (file->descriptor >= 0) {
            close(file->descriptor);
            unlink(file->temporary);
        }
        release(file);
    }
}

/* `path` with links followed. A link that points nowhere is refused by the caller's open. */
static char *resolve(const char *path) {
    char *real = realpath(path, NULL);
    return real != NULL || errno != ENOENT ? real : strdup(path);
}

/* ---- what killed processes left ---- */

/* Removes `path`, a file in the making of process `pid`, where it is nobody's any more; while its lock is held, so that it is not
 * another one's by then. Our own number counts: in containers every process may have the same. */
static void remove_if_abandoned(const char *path, long pid) {
    if (pid != (long)getpid() && (kill((pid_t)pid, 0) == 0 || errno != ESRCH)) {
        return;
    }
    bool locked = false;
    const int descriptor = dt_open_locked(path, O_RDONLY | O_NONBLOCK, &locked);
    if (descriptor >= 0) {
        if (locked) {
            unlink(path);
        }
        close(descriptor);
    }
}

/* Removes files in the making of `target` that are nobody's. */
static void remove_abandoned(const char *target) {
    const char *slash = strrchr(target, '/'), *name = slash != NULL ? slash + 1 : target;
    const size_t n_folder = (size_t)(name - target), n_name = strlen(name);
    char *path = malloc(n_folder + n_name + 64);
    if (path == NULL) {
        return;
    }
    memcpy(path, target, n_folder);
    memcpy(path + n_folder, n_folder > 0 ? "" : ".", n_folder > 0 ? 1 : 2);
    DIR *folder = opendir(path);
    for (const struct dirent *entry; folder != NULL && (entry = readdir(folder)) != NULL;) {
        long pid = 0;
        int end = 0;
        if (strncmp(entry->d_name, name, n_name) == 0 && sscanf(entry->d_name + n_name, ".%9ld.deeptutor%n", &pid, &end) == 1 &&
            end > 0 && entry->d_name[n_name + (size_t)end] == 0 && pid > 0) {
            memcpy(path + n_folder, name, n_name);
            snprintf(path + n_folder + n_name, 64, ".%ld.deeptutor", pid);
            remove_if_abandoned(path, pid);
        }
    }
    if (folder != NULL) {
        closedir(folder);
    }
    free(path);
}

dt_status dt_replace_begin(const char *path, dt_replace_file **out, dt_error *error) {
    *out = NULL;
    if (path[0] == 0) {
        return dt_fail(error, DT_ERR_IO, "a file that has no name can't be written");
    }
    dt_replace_file *file = calloc(1, sizeof *file);
    if (file == NULL) {
        return dt_fail_memory(error, sizeof *file, "writing a file");
    }
    file->descriptor = -1;
    file->path = resolve(path);
    const size_t capacity = file->path != NULL ? strlen(file->path) + 32 : 0;
    file->temporary = file->path != NULL ? malloc(capacity) : NULL;
    file->buffer = malloc(BUFFER_BYTES);
    if (file->temporary == NULL || file->buffer == NULL) {
        const dt_status status = file->path == NULL ? cannot_write(error, path, errno) : dt_fail_memory(error, capacity, path);
        release(file);
        return status;
    }
    snprintf(file->temporary, capacity, "%s.%ld.deeptutor", file->path, (long)getpid());
    struct stat info;
    const bool exists = stat(file->path, &info) == 0;
    int reason = 0;
    if (exists && !S_ISREG(info.st_mode)) {
        reason = S_ISDIR(info.st_mode) ? EISDIR : EEXIST;
    } else if (exists && access(file->path, W_OK) != 0) {
        reason = errno;
    } else {
        bool locked = false; /* where the file system has no locks, nothing is cleaned up */
        for (int i = 0; i < TRIES && file->descriptor < 0; i++) {
            remove_abandoned(file->path);
            file->descriptor = dt_open_locked(file->temporary, O_WRONLY | O_CREAT | O_EXCL, &locked);
            reason = errno;
        }
    }
    if (file->descriptor < 0) {
        const dt_status status = reason == EEXIST && exists && !S_ISREG(info.st_mode)
                                     ? dt_fail(error, DT_ERR_IO, "%s can't be written: it is no regular file", path)
                                     : cannot_write(error, path, reason);
        release(file);
        return status;
    }
    if (exists) {
        (void)fchmod(file->descriptor, info.st_mode & 07777); /* the new file is as readable as the old one; no harm if not */
    }
    *out = file;
    return DT_OK;
}

static bool write_all(int descriptor, const char *bytes, size_t n) {
    while (n > 0) {
        const ssize_t written = write(descriptor, bytes, n);
        if (written < 0 && errno != EINTR) {
            return false;
        }
        bytes += written > 0 ? written : 0;
        n -= written > 0 ? (size_t)written : 0;
    }
    return true;
}

static bool flush(dt_replace_file *file) {
    const bool done = !file->failed && write_all(file->descriptor, file->buffer, file->n_buffered);
    file->n_buffered = 0;
    file->failed = !done;
    return done;
}

dt_status dt_replace_write(dt_replace_file *file, const void *bytes, size_t n, dt_error *error) {
    const char *from = bytes;
    file->n_written += n;
    while (n > 0) {
        const size_t taken = DT_MIN(n, BUFFER_BYTES - file->n_buffered);
        memcpy(file->buffer + file->n_buffered, from, taken);
        file->n_buffered += taken;
        from += taken;
        n -= taken;
        if (file->n_buffered == BUFFER_BYTES && !flush(file)) {
            return cannot_write(error, file->path, errno);
        }
    }
    return DT_OK;
}

dt_status dt_replace_patch(dt_replace_file *file, uint64_t offset, const void *bytes, size_t n, dt_error *error) {
    const bool done = flush(file) && lseek(file->descriptor, (off_t)offset, SEEK_SET) >= 0 &&
                      write_all(file->descriptor, bytes, n) && lseek(file->descriptor, 0, SEEK_END) >= 0;
    file->failed = !done;
    return done ? DT_OK : cannot_write(error, file->path, errno);
}

/* Makes the rename itself last. Some file systems refuse to sync a folder; then there is nothing more to do. */
static void sync_folder(const char *path) {
    const char *slash = strrchr(path, '/');
    char *folder = slash != NULL ? strdup(path) : strdup(".");
    if (folder != NULL) {
        if (slash != NULL) {
            folder[slash - path + (slash == path ? 1 : 0)] = 0;
        }
        const int descriptor = open(folder, O_RDONLY | O_CLOEXEC);
        if (descriptor >= 0) {
            (void)fsync(descriptor);
            close(descriptor);
        }
        free(folder);
    }
}

dt_status dt_replace_commit(dt_replace_file *file, dt_error *error) {
    errno = EIO;
    bool done = flush(file) && fsync(file->descriptor) == 0;
    int reason = errno;
    if (close(file->descriptor) != 0 && done) {
        done = false;
        reason = errno;
    }
    if (done && rename(file->temporary, file->path) != 0) {
        done = false;
        reason = errno;
    }
    dt_status status = DT_OK;
    if (done) {
        sync_folder(file->path);
    } else {
        unlink(file->temporary);
        status = cannot_write(error, file->path, reason);
    }
    release(file);
    return status;
}

static dt_status check_room(const dt_replace_file *file, const char *path, uint64_t n_bytes, dt_error *error) {
    struct statvfs disk;
    struct rlimit limit;
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && n_bytes > (uint64_t)limit.rlim_cur) {
        return dt_fail(error, DT_ERR_IO, "%s can't be written: it would take about %s, more than this process may write", path,
                       dt_size_of(n_bytes).text);
    }
    if (fstatvfs(file->descriptor, &disk) == 0 && n_bytes > (uint64_t)disk.f_bavail * disk.f_frsize) {
        return dt_fail(error, DT_ERR_IO, "%s can't be written: it would take about %s, and its disk has %s left", path,
                       dt_size_of(n_bytes).text, dt_size_of((uint64_t)disk.f_bavail * disk.f_frsize).text);
    }
    return DT_OK;
}

dt_status dt_replace_check(const char *path, uint64_t n_bytes, dt_error *error) {
    dt_replace_file *file = NULL;
    dt_status status = dt_replace_begin(path, &file, error);
    if (status == DT_OK) {
        status = check_room(file, path, n_bytes, error);
    }
    dt_replace_abandon(file);
    return status;
}
