/*
 * One process at a time: a file that is read at the beginning and replaced at the end (--session) belongs to one run in between.
 *
 * The lock is a file beside it, PATH.lock, which names its holder. It is held by the system (flock), so that a run that is killed holds
 * nothing; what it left of the lock file is taken over by the next.
 */
#ifndef DT_APPS_FILE_LOCK_H
#define DT_APPS_FILE_LOCK_H

#include "deeptutor.h"

#include <stdbool.h>

typedef struct dt_file_lock dt_file_lock;

/* DT_ERR_ARGUMENT, naming the process, where another one has it; also where PATH.lock is something else, which stays as it is. *out is
 * NULL with DT_OK where the place has no locks, or takes no files: then nothing can be written there either. */
dt_status dt_file_lock_take(const char *path, dt_file_lock **out, dt_error *error);
/* Removes the lock file. NULL is accepted. */
void dt_file_lock_release(dt_file_lock *lock);
/* "process 123" from what a lock file says, or "another process". */
void dt_file_lock_holder(int descriptor, char *out, size_t capacity);
/* Whether the file is empty, or holds what dt_file_lock_sign wrote: anything else is somebody's own. */
bool dt_file_lock_is_one(int descriptor);
/* Whether the open file is that at `path` still: a lock on one that was removed keeps nobody out. */
bool dt_file_lock_is_there(int descriptor, const char *path);
/* The other half of dt_file_lock_holder: writes this process's number. */
void dt_file_lock_sign(int descriptor);

#endif
