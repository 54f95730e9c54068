/*
 * The log: one process-wide receiver, none by default.
 *
 * Invariants: receiver and its `user` pointer always change together; the receiver runs outside the lock, so that it may log or
 * replace itself.
 */
#include "base/base.h"

#include <pthread.h>

static pthread_mutex_t receiver_lock = PTHREAD_MUTEX_INITIALIZER;
static dt_log_fn receiver;
static void *receiver_user;

void dt_log_set(dt_log_fn fn, void *user) {
    pthread_mutex_lock(&receiver_lock);
    receiver = fn;
    receiver_user = user;
    pthread_mutex_unlock(&receiver_lock);
}

void dt_log(dt_log_level level, const char *format, ...) {
    pthread_mutex_lock(&receiver_lock);
    const dt_log_fn fn = receiver;
    void *const user = receiver_user;
    pthread_mutex_unlock(&receiver_lock);
    if (fn == NULL) {
        return;
    }
    char line[4096];
    va_list arguments;
    va_start(arguments, format);
    dt_format_line(line, sizeof line, format, arguments);
    va_end(arguments);
    fn(level, line, user);
}
