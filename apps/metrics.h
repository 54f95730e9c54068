/*
 * Numbers of a server that others watch: counters and histograms, as Prometheus text (version 0.0.4).
 *
 * Invariant: numbers are written with a point whatever the locale, and none is NaN.
 */
#ifndef DT_APPS_METRICS_H
#define DT_APPS_METRICS_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DT_HISTOGRAM_BUCKETS 14

/* Seconds, in buckets from 1 ms to 60 s. */
typedef struct dt_histogram {
    int64_t counts[DT_HISTOGRAM_BUCKETS + 1]; /* the last one: above all bounds */
    int64_t n;
    double sum;
} dt_histogram;

void dt_histogram_add(dt_histogram *histogram, double seconds);

/* Text that grows; free(text). out_of_memory stays set and what follows is not added. */
typedef struct dt_text {
    char *text;
    size_t n, capacity;
    bool out_of_memory;
} dt_text;

void dt_text_add(dt_text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* type: "counter" or "gauge"; labels: "" or "{state=\"idle\"}". help NULL: another row of the metric before. */
void dt_metric_add(dt_text *text, const char *name, const char *type, const char *help, const char *labels, double value);
void dt_metric_add_histogram(dt_text *text, const char *name, const char *help, const dt_histogram *histogram);

#endif
