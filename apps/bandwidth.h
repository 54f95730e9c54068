/*
 * How fast this machine's memory can be read: the bound that decoding is held against.
 */
#ifndef DT_APPS_BANDWIDTH_H
#define DT_APPS_BANDWIDTH_H

#include <stdint.h>

/* Bytes per second that n_threads threads read together from memory that no cache holds: the best of several passes; 0 when there
 * is no memory to measure with. Takes about half a second. */
double dt_read_bandwidth(int32_t n_threads);

#endif
