/*
 * A file that is replaced as a whole: written beside the old one, flushed to the disk, then renamed over it. Whoever reads the
 * path sees the old bytes or the new ones, also after a crash or a kill in the middle.
 *
 * Where the path is a symbolic link, what it points to is replaced and the link stays. The name of the file in the making is the
 * target's with ".<process>.deeptutor" behind; it is left over only by a process that was killed, until
 * the same target is written again.
 */
#ifndef DT_BASE_REPLACE_FILE_H
#define DT_BASE_REPLACE_FILE_H

#include "base/base.h"

typedef struct dt_replace_file dt_replace_file;

/* Creates the file in the making. Fails when the target exists and is no regular file or may not be written. */
dt_status dt_replace_begin(const char *path, dt_replace_file **out, dt_error *error);
/* Buffered. After a failure all later calls fail too. */
dt_status dt_replace_write(dt_replace_file *file, const void *bytes, size_t n, dt_error *error);
/* Overwrites n bytes at `offset`, which were written before. */
dt_status dt_replace_patch(dt_replace_file *file, uint64_t offset, const void *bytes, size_t n, dt_error *error);
/* Puts the new file in place, or, on failure, removes it. Frees `file` in both cases. */
dt_status dt_replace_commit(dt_replace_file *file, dt_error *error);
/* Removes the file in the making and frees `file`. NULL is accepted. */
void dt_replace_abandon(dt_replace_file *file);

/* Whether a file of n_bytes could be put at `path` now: the folder takes new files, the target may be replaced, the disk has room
 * (an old file of the same name stays until the new one is whole). Leaves nothing behind. */
dt_status dt_replace_check(const char *path, uint64_t n_bytes, dt_error *error);

#endif
