/*
 * A file that one process at a time may have: opened and locked as one step.
 *
 * Between opening and locking, whoever had the lock may have removed the file or given it another name. A lock on what has no
 * name any more keeps nobody away, so it is given back and another try made.
 */
#ifndef DT_BASE_OPEN_LOCKED_H
#define DT_BASE_OPEN_LOCKED_H

#include "base/base.h"

/* open(path, flags), links not followed, and the lock of the file that `path` names now, without waiting. -1 with errno: it can't be
 * opened, or (EWOULDBLOCK) another open file has the lock. *locked is false where the file system has no locks. */
int dt_open_locked(const char *path, int flags, bool *locked);

#endif
