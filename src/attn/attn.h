/*
 * Attention over lanes of cached keys and values, on the CPU, on plain pointers. Includes nothing but base.
 *
 * A job is one layer of one sequence: every KV head ("lane") has its own spans of entries, lanes may differ in length;
 * n_rep query heads share a lane and are computed together, so that each key and value is read once. The last
 * n_query entries of every lane are the batch's own tokens, in order: query i sees all older entries and those of
 * queries 0..i (causal by index, since committed entries have no order).
 *
 * Numbers: per row (query, head) and span of entries: scores in dimension order, the span's maximum, exponentials,
 * their sum and the weighted sum of values; spans are then merged in order. Every path of a kernel (one query or many) does
 * exactly that, so a row's result does not depend on how many rows are computed together nor on the number of threads.
 * Kernels with integer operations round more where that is faster (attn_driver.h); theirs does not depend on the number of
 * threads either, but differs between few rows and many, so the batch-invariant build does not choose them by itself.
 * The online softmax over blocks follows FlashAttention (Dao et al. 2022) and Milakov & Gimelshein 2018; spans computed
 * apart and merged are Flash-Decoding (Dao et al. 2023).
 *
 * Calling: each phase is called by every thread with (ith, nth), with a barrier between phases (graph/ makes
 * them ggml nodes): store -> attend -> observe. prepare is called once, by one thread, before attend; it may run while other
 * threads store. Jobs of a batch's sequences go through a phase together, without barriers between them; a thread is in one job at
 * a time.
 */
#ifndef DT_ATTN_H
#define DT_ATTN_H

#include "base/kv_format.h"

#define DT_ATTN_MAX_DIM 1024 /* largest head size, padded */

typedef struct dt_attn_lane {
    const dt_kv_span *spans;
    int32_t n_spans;
    int32_t n_entries; /* sum of spans[i].n, the batch's own included */
    float *mass;       /* [n_mass_rows][mass_stride] or NULL; see dt_attn_job.mass_row */
    float *value_norm; /* [n_entries] of the lane: store writes the norms of the new values at its end; may be NULL */
} dt_attn_lane;

typedef struct dt_attn_kernel dt_attn_kernel;

typedef struct dt_attn_job {
    const dt_attn_kernel *kernel; /* whose functions are called */
    const dt_kv_format *format;
    int32_t n_lanes, n_rep, n_query; /* KV heads, query heads per KV head, tokens in the batch (1 to n_entries of any lane) */
    float scale;                     /* multiplies q.k (usually 1/sqrt(dim_k)) */
    float softcap;                   /* 0 = none; else s = softcap * tanh(s / softcap) */
    int32_t window;                  /* 0 = none; else query at position p sees positions > p - window only */
    const int32_t *positions;        /* [n_query] original positions of the batch's tokens */
    dt_attn_lane *lanes;             /* [n_lanes] */
    /* [n_query][heads][dim], strides in floats; heads = n_lanes * n_rep for q and out, n_lanes for k and v;
     * query head h belongs to lane h / n_rep */
    const float *q, *k, *v;
    float *out;
    size_t q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride;
    size_t out_token_stride, out_head_stride;
    /* Attention mass: lane.mass[mass_row[i]][t] += sum over the lane's query heads of the probability that query i gives entry t
     * (rows are zeroed by the job itself). mass_row[i] = -1: query i is not observed. Entry order = span order. NULL = none */
    const int32_t *mass_row;
    int32_t n_mass_rows;
    size_t mass_stride; /* floats, >= n_entries of every lane */
    bool mass_peak;     /* the largest probability of all instead of their sum */
    /* The kernel's scratch_bytes, private to this job from prepare to the last phase, 64-byte aligned; may be NULL where that is 0
     */
    void *scratch;
    size_t scratch_bytes;
    /* A thread's own, thread_bytes for each, 64-byte aligned: holds nothing from one call of a phase to the next, so that jobs of
     * several sequences share it. */
    char *thread_scratch;
    size_t thread_bytes;
} dt_attn_job;

struct dt_attn_kernel {
    const char *name;
    bool (*supported)(void);               /* by this machine, at run time */
    const struct dt_attn_ops *ops;         /* private to attn/ (attn_driver.h); NULL for the references */
    const struct dt_attn_int16_ops *int16; /* NULL: everything is computed in F32 */
    const struct dt_attn_split_ops *split; /* of many rows, instead of int16's; may be NULL */
    /* Enough for every job up to these sizes; a multiple of 64. max_entries: the longest lane with every span counted as full
     * (n_spans * block_tokens). */
    size_t (*scratch_bytes)(const dt_kv_format *format, int32_t n_lanes, int32_t n_rep, int32_t n_query, int32_t max_entries);
    size_t (*thread_bytes)(const dt_kv_format *format, int32_t max_entries);
    void (*prepare)(dt_attn_job *job);
    /* Writes the batch's keys and values as the last n_query entries of every lane, with their positions and value norms.
     * What is stored is finite: numbers are held to +-65504, NaN becomes 0. */
    void (*store)(dt_attn_job *job, int32_t ith, int32_t nth);
    /* Writes job->out. A row that sees no entry gives zeros. Finite inputs give finite outputs. */
    void (*attend)(dt_attn_job *job, int32_t ith, int32_t nth);
    /* Fills the mass where attend has not done so on the way. Must be called whenever mass_row is not NULL. */
    void (*observe)(dt_attn_job *job, int32_t ith, int32_t nth);
};

/* name: "auto" (or NULL) = the fastest this machine supports. NULL with *error filled when unknown or unsupported here;
 * the message lists what would work. */
const dt_attn_kernel *dt_attn_kernel_find(const char *name, dt_error *error);
/* All kernels compiled in, *n of them, supported here or not; fastest first. */
const dt_attn_kernel *dt_attn_kernels(int32_t *n);

#endif
