/*
 * Work that others can end: with layers on other machines (--device rpc=...) a program computes in a child process, since ggml's
 * RPC client ends its process when a server goes away. The parent waits, and makes one sentence of such an end.
 *
 * Invariants: without such a device nothing is forked. The parent holds no model and starts no thread, so that it may fork again.
 * Signals reach the child through the parent only, each once; exit codes and other deaths pass through. A child never outlives its
 * parent (on Linux).
 */
#ifndef DT_APPS_GUARD_H
#define DT_APPS_GUARD_H

#include "options.h"

/* Runs work(user) and returns its exit code; 1 where a server was lost. restart: then the work begins again as soon as all servers
 * answer, if it had called dt_guard_ready; a signal ends the waiting with 0. */
int dt_run_guarded(const dt_shared_options *options, bool restart, int (*work)(void *user), void *user);
/* The work has come so far that it is worth beginning again. */
void dt_guard_ready(void);

#endif
