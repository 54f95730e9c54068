/*
 * Files mapped for reading, by a process that outlives what happens to them.
 *
 * Where a mapped file becomes shorter, or its disk fails, the page that is read is not there any more, and the system ends the
 * process (SIGBUS): a server, for a file that somebody copied over. Here such a page, and all behind it, reads as zeros instead, and
 * the mapping says so from then on: whoever has used its bytes looks at dt_file_map_broken before believing what came of them.
 *
 * Opening a mapping installs a handler for SIGBUS; faults elsewhere go on to the one that was there before.
 */
#ifndef DT_BASE_FILE_MAP_H
#define DT_BASE_FILE_MAP_H

#include "base/base.h"

typedef struct dt_file_map dt_file_map;

/* The first n_bytes > 0 of an open file, which may be closed then. NULL: errno says why. */
dt_file_map *dt_file_map_open(int descriptor, size_t n_bytes);
/* NULL is accepted. */
void dt_file_map_close(dt_file_map *map);
const unsigned char *dt_file_map_bytes(const dt_file_map *map);
bool dt_file_map_broken(const dt_file_map *map);

#endif
