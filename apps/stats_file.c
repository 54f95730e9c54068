/*
 * The file that a run's numbers go to. See stats_file.h.
 *
 * It is written under another name in the same folder and renamed over the target, unless the target is no regular file (/dev/null).
 */
#define _POSIX_C_SOURCE 200809L /* getpid */
#define _DEFAULT_SOURCE         /* realpath, strdup on glibc */
#include "stats_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_LINKS 40 /* the kernel's own limit */

struct dt_stats_file {
    char *path;      /* where it shall be, links followed */
    char *temporary; /* NULL: written in place, since the target is no regular file */
    mode_t mode;     /* of the file that is there; 0: none is */
};

/* Where writing to `path` would go: links followed, also one whose target is yet to be made. NULL with errno set when they lead
 * round in a circle or memory runs out. */
static char *real_path(const char *path) {
    char *at = strdup(path);
    for (int links = 0; at != NULL && links < MAX_LINKS; links++) {
        char target[4096], *real = realpath(at, NULL);
        const ssize_t n = real == NULL ? readlink(at, target, sizeof target) : -1;
        if (real != NULL) {
            free(at);
            return real;
        }
        if (n <= 0 || (size_t)n == sizeof target) {
            return at;
        }
        const char *slash = strrchr(at, '/');
        const int n_folder = target[0] != '/' && slash != NULL ? (int)(slash - at) + 1 : 0; /* a link counts from its folder */
        const size_t capacity = (size_t)n_folder + (size_t)n + 1;
        char *next = malloc(capacity);
        if (next != NULL) {
            snprintf(next, capacity, "%.*s%.*s", n_folder, at, (int)n, target);
        }
        free(at);
        at = next;
    }
    if (at != NULL) {
        free(at);
        errno = ELOOP;
    }
    return NULL;
}

static dt_status cannot_write(dt_error *error, const char *path, int reason) {
    snprintf(error->message, sizeof error->message, "%s can't be written: %s; name another file for the numbers", path,
             strerror(reason));
    return error->code = reason == ENOMEM ? DT_ERR_MEMORY : DT_ERR_IO;
}

static bool is_same_file(const struct stat *target, const struct stat *other) {
    return S_ISREG(other->st_mode) && target->st_dev == other->st_dev && target->st_ino == other->st_ino;
}

/* The file, or another part of a model that it is the first part of: NAME-00001-of-00003.gguf. */
static bool is_of_input(const struct stat *target, const char *input) {
    struct stat other;
    bool any = stat(input, &other) == 0 && is_same_file(target, &other);
    const size_t n = strlen(input), ending = sizeof "00001-of-00003.gguf" - 1;
    int first = 0, n_parts = 0, length = 0;
    if (n > ending && sscanf(input + n - ending, "%5d-of-%5d.gguf%n", &first, &n_parts, &length) == 2 && length == (int)ending) {
        char *part = malloc(n + 32);
        for (int i = 1; i <= n_parts && part != NULL && !any; i++) {
            snprintf(part, n + 32, "%.*s%05d-of-%05d.gguf", (int)(n - ending), input, i, n_parts);
            any = stat(part, &other) == 0 && is_same_file(target, &other);
        }
        any = any || part == NULL;
        free(part);
    }
    return any;
}

static bool is_taken(const struct stat *target, const char *const *inputs, size_t n_inputs) {
    struct stat other;
    bool taken = fstat(STDOUT_FILENO, &other) == 0 && is_same_file(target, &other);
    for (size_t i = 0; i < n_inputs; i++) {
        taken = taken || (inputs[i] != NULL && is_of_input(target, inputs[i]));
    }
    return taken;
}

/* Replacing what the run reads, or what it has just written, would lose it. */
static dt_status refuse_taken(const char *path, dt_error *error) {
    snprintf(error->message, sizeof error->message, "%s is also read or written by this run; name another file for the numbers",
             path);
    return error->code = DT_ERR_ARGUMENT;
}

dt_status dt_stats_file_check_input(const char *path, const char *input, dt_error *error) {
    struct stat target;
    return path != NULL && stat(path, &target) == 0 && is_taken(&target, &input, 1) ? refuse_taken(path, error) : DT_OK;
}

dt_status dt_stats_file_open(const char *path, const char *const *inputs, size_t n_inputs, dt_stats_file **out, dt_error *error) {
    *out = NULL;
    dt_stats_file *file = calloc(1, sizeof *file);
    if (file == NULL || (file->path = real_path(path)) == NULL) {
        const int reason = errno;
        free(file);
        return cannot_write(error, path, reason);
    }
    struct stat info;
    const bool exists = stat(file->path, &info) == 0;
    file->mode = exists ? info.st_mode : 0;
    if (exists && is_taken(&info, inputs, n_inputs)) {
        dt_stats_file_free(file);
        return refuse_taken(path, error);
    }
    int descriptor = -1;
    if (exists && !S_ISREG(info.st_mode)) {
        errno = S_ISDIR(info.st_mode) ? EISDIR : 0;
        /* not opened: the reader of a pipe would take that for the end */
        if (errno == 0 && access(file->path, W_OK) == 0) {
            *out = file;
            return DT_OK;
        }
    } else {
        const size_t capacity = strlen(file->path) + 32;
        file->temporary = malloc(capacity);
        if (file->temporary != NULL) {
            snprintf(file->temporary, capacity, "%s.%ld.tmp", file->path, (long)getpid());
            descriptor =
                exists && access(file->path, W_OK) != 0 ? -1 : open(file->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        }
    }
    if (descriptor < 0) {
        const dt_status status = cannot_write(error, path, errno);
        dt_stats_file_free(file);
        return status;
    }
    close(descriptor);
    if (file->temporary != NULL) {
        unlink(file->temporary); /* nothing stays behind if the run is killed */
    }
    *out = file;
    return DT_OK;
}

void dt_stats_file_free(dt_stats_file *file) {
    if (file != NULL) {
        free(file->path);
        free(file->temporary);
        free(file);
    }
}

/* Writes the file, or replaces it by one that is whole and on its disk. */
static bool write_all(const dt_stats_file *file, const char *text) {
    const char *target = file->temporary != NULL ? file->temporary : file->path;
    const int how = file->temporary != NULL ? O_CREAT | O_EXCL : O_TRUNC;
    const int descriptor = open(target, O_WRONLY | O_CLOEXEC | how, 0666);
    FILE *stream = descriptor >= 0 ? fdopen(descriptor, "wb") : NULL;
    if (stream == NULL) {
        if (descriptor >= 0) {
            close(descriptor);
        }
        return false;
    }
    if (file->temporary != NULL && file->mode != 0) {
        (void)fchmod(descriptor, file->mode & 07777); /* as readable as the old one; no harm if not */
    }
    bool done = fwrite(text, 1, strlen(text), stream) == strlen(text) && fputc('\n', stream) != EOF && fflush(stream) == 0 &&
                (file->temporary == NULL || fsync(descriptor) == 0);
    int reason = errno;
    if (fclose(stream) != 0 && done) {
        done = false;
        reason = errno;
    }
    if (done && file->temporary != NULL && rename(file->temporary, file->path) != 0) {
        done = false;
        reason = errno;
    }
    if (!done && file->temporary != NULL) {
        unlink(file->temporary);
    }
    errno = reason;
    return done;
}

dt_status dt_stats_file_write_text(dt_stats_file *file, const char *text, dt_error *error) {
    return write_all(file, text) ? DT_OK : cannot_write(error, file->path, errno);
}
