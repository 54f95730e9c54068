/*
 * Prometheus text. See metrics.h. Numbers are printed as whole ones, or as digits around a point of our own, since printf's depends
 * on the locale.
 */
#include "metrics.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

static const double bounds[DT_HISTOGRAM_BUCKETS] = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15, 60};

void dt_histogram_add(dt_histogram *histogram, double seconds) {
    int i = 0;
    while (i < DT_HISTOGRAM_BUCKETS && !(seconds <= bounds[i])) {
        i++;
    }
    histogram->counts[i]++;
    histogram->n++;
    histogram->sum += seconds;
}

void dt_text_add(dt_text *text, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    const int n = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    if (n < 0 || text->out_of_memory) {
        text->out_of_memory = true;
        return;
    }
    if (text->capacity - text->n <= (size_t)n) {
        const size_t capacity = 2 * text->capacity + (size_t)n + 1024;
        char *grown = realloc(text->text, capacity);
        if (grown == NULL) {
            text->out_of_memory = true;
            return;
        }
        text->text = grown;
        text->capacity = capacity;
    }
    va_start(arguments, format);
    vsnprintf(text->text + text->n, text->capacity - text->n, format, arguments);
    va_end(arguments);
    text->n += (size_t)n;
}

static void add_number(dt_text *text, double value) {
    if (!(fabs(value) < 9e15)) { /* NaN too */
        value = value > 0 ? 9e15 : 0;
    }
    const double whole = trunc(value);
    const long long millionths = llround(fabs(value - whole) * 1e6);
    if (millionths == 0 || millionths == 1000000) {
        dt_text_add(text, "%lld", (long long)whole + (millionths == 0 ? 0 : value < 0 ? -1 : 1));
    } else {
        dt_text_add(text, "%s%lld.%06lld", value < 0 && whole == 0 ? "-" : "", (long long)whole, millionths);
    }
}

void dt_metric_add(dt_text *text, const char *name, const char *type, const char *help, const char *labels, double value) {
    if (help != NULL) {
        dt_text_add(text, "# HELP deeptutor_%s %s\n# TYPE deeptutor_%s %s\n", name, help, name, type);
    }
    dt_text_add(text, "deeptutor_%s%s ", name, labels);
    add_number(text, value);
    dt_text_add(text, "\n");
}

void dt_metric_add_histogram(dt_text *text, const char *name, const char *help, const dt_histogram *histogram) {
    dt_text_add(text, "# HELP deeptutor_%s %s\n# TYPE deeptutor_%s histogram\n", name, help, name);
    int64_t below = 0;
    for (int i = 0; i < DT_HISTOGRAM_BUCKETS; i++) {
        below += histogram->counts[i];
        dt_text_add(text, "deeptutor_%s_bucket{le=\"", name);
        add_number(text, bounds[i]);
        dt_text_add(text, "\"} %lld\n", (long long)below);
    }
    dt_text_add(text, "deeptutor_%s_bucket{le=\"+Inf\"} %lld\ndeeptutor_%s_sum ", name, (long long)histogram->n, name);
    add_number(text, histogram->sum);
    dt_text_add(text, "\ndeeptutor_%s_count %lld\n", name, (long long)histogram->n);
}
