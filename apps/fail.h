/*
 * How the programs fill an error of their own, as the library fills its.
 */
#ifndef DT_APPS_FAIL_H
#define DT_APPS_FAIL_H

#include "deeptutor.h"

/* Fills *error, with as much of the sentence as it has room for; returns code. */
dt_status dt_app_fail(dt_error *error, dt_status code, const char *format, ...) __attribute__((format(printf, 3, 4)));
#ifdef __clang_analyzer__ /* sees one file at a time: it is to know that what failed did not return DT_OK */
#define dt_app_fail(error, code, ...) (dt_app_fail(error, code, __VA_ARGS__), (code))
#endif

#endif
