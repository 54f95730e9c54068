/*
 * The programs' own errors. See fail.h.
 */
#include "fail.h"

#include <stdarg.h>
#include <stdio.h>

#undef dt_app_fail

dt_status dt_app_fail(dt_error *error, dt_status code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->message, sizeof error->message, format, arguments);
    va_end(arguments);
    return error->code = code;
}
