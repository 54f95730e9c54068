/*
 * How fast this machine reads as many bytes as a model's weights have: the bound that decoding is held against.
 */
#ifndef DT_APPS_BANDWIDTH_H
#define DT_APPS_BANDWIDTH_H

#include <stdint.h>

/* Bytes per second at which n_threads threads together read n_bytes again and again (no fewer than 64 MiB, no more than 1 GiB), the
 * best of several passes; 0 when there is no memory to measure with. Takes up to a second. */
double dt_read_bandwidth(int32_t n_threads, uint64_t n_bytes);

#endif
