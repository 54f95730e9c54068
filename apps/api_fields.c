/*
 * Single values of a body. See api_reader.h.
 */
#include "api_reader.h"

#include <stdarg.h>
#include <stdio.h>

bool dt_reader_refuse(dt_reader *r, int status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(r->error->message, sizeof r->error->message, format, arguments);
    va_end(arguments);
    r->error->code = status == 500 ? DT_ERR_MEMORY : DT_ERR_ARGUMENT;
    r->status = status;
    return false;
}

bool dt_reader_no_memory(dt_reader *r) { return dt_reader_refuse(r, 500, "out of memory for the request"); }

bool dt_reader_refuse_library(dt_reader *r) {
    r->status = dt_api_status_of(r->error);
    return false;
}

const json_t *dt_reader_field(const json_t *object, const char *name) {
    const json_t *value = json_object_get(object, name);
    return json_is_null(value) ? NULL : value;
}

bool dt_reader_number(dt_reader *r, const char *name, double minimum, double maximum, float *out) {
    const json_t *value = dt_reader_field(r->body, name);
    if (value == NULL) {
        return true;
    }
    const double number = json_number_value(value);
    if (!json_is_number(value) || !(number >= minimum && number <= maximum)) {
        return dt_reader_refuse(r, 400, "%s must be a number from %g to %g", name, minimum, maximum);
    }
    *out = (float)number;
    return true;
}

bool dt_reader_whole(dt_reader *r, const json_t *object, const char *name, int64_t minimum, int64_t maximum, int64_t *out) {
    const json_t *value = dt_reader_field(object, name);
    if (value == NULL) {
        return true;
    }
    const double number = json_number_value(value);
    const bool whole =
        json_is_integer(value) || (json_is_real(value) && number > -1e15 && number < 1e15 && number == (double)(int64_t)number);
    const int64_t integer = json_is_integer(value) ? (int64_t)json_integer_value(value) : whole ? (int64_t)number : 0;
    if (!whole || integer < minimum || integer > maximum) {
        return dt_reader_refuse(r, 400, "%s must be a whole number from %lld to %lld", name, (long long)minimum,
                                (long long)maximum);
    }
    *out = integer;
    return true;
}

bool dt_reader_bool(dt_reader *r, const json_t *object, const char *name, bool *out) {
    const json_t *value = dt_reader_field(object, name);
    if (value != NULL && !json_is_boolean(value)) {
        return dt_reader_refuse(r, 400, "%s must be true or false", name);
    }
    *out = value != NULL ? json_is_true(value) : *out;
    return true;
}
