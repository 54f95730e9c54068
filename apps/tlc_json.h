/*
 * What the cache of a conversation looks like, as JSON for the web page (docs/server.md says what is in it).
 */
#ifndef DT_APPS_TLC_JSON_H
#define DT_APPS_TLC_JSON_H

#include "job.h"

/* The scheduler's thread, which owns the session. n_read: tokens of the prompt in it. strips: with what each layer keeps, which
 * takes milliseconds. NULL: out of memory. free(). */
char *dt_tlc_json(const dt_model *model, const dt_job *job, const dt_session *session, const char *phase, size_t n_read,
                  bool strips);

#endif
