/*
 * Runs a decoder over a batch of tokens of one or more sequences, each with a KV cache of its own: the only big user of ggml.
 *
 * Attention is computed sequence by sequence; all else, and so the reading of the weights, is shared by the whole batch. The ggml
 * graph of a batch size is built and allocated once and reused as long as batches keep that size, so a decode step builds nothing:
 * lengths, pointers and positions that change from step to step live in the attention jobs that the graph's custom operators point
 * to.
 *
 * Invariant: a sequence's tokens are appended to its cache, uncommitted, before dt_graph_compute, and are so after it, whether it
 * succeeds or fails; the caller commits or takes them back. With layers whose cache is elsewhere, a batch has at most
 * DT_MAX_ELSEWHERE sequences, and dt_graph_settle was called before their tokens were appended.
 */
#ifndef DT_GRAPH_H
#define DT_GRAPH_H

#include "attn/attn.h"
#include "graph/decoder.h"
#include "kv/kv.h"

typedef struct dt_graph dt_graph;

typedef struct dt_graph_params {
    const dt_attn_kernel *kernel;       /* of layers whose cache is in blocks */
    bool no_flash;                      /* elsewhere: no fused attention */
    int32_t n_threads, n_threads_batch; /* for one token, for more */
    /* Called now and then by the computing thread while a batch runs; true stops it. May be NULL. */
    bool (*should_abort)(void *user);
    void *user;
} dt_graph_params;

/* decoder and memory must outlive the graph. */
dt_status dt_graph_new(const dt_decoder *decoder, dt_memory *memory, const dt_graph_params *params, dt_graph **out,
                       dt_error *error);
void dt_graph_free(dt_graph *graph);

/* One sequence's part of a batch. */
typedef struct dt_sequence {
    dt_kv *kv;             /* has the tokens as its uncommitted entries */
    const int32_t *tokens; /* [n] of the vocabulary */
    int32_t n, first_position;
    int32_t n_outputs;         /* logits wanted for the last n_outputs tokens, >= 1 */
    const bool *observe_layer; /* [L]: collect attention mass there; NULL = nowhere */
    int32_t n_observed;        /* of the last n_observed queries */
    bool observe_apart;        /* a row of mass for each of them; else one row, their sum */
    bool peak;                 /* the largest probability of all instead of the sum */
    /* Where focus_from > 0, queries see of the cache only its first block, the focus = the committed entries from the
     * focus_from-last to before the focus_to-last (rounded outwards to blocks), and the batch itself. */
    int32_t focus_from, focus_to;
} dt_sequence;

/* *logits: [sum of n_outputs][V], sequence by sequence, the graph's own until its next call. DT_ERR_CANCELLED when should_abort
 * said so. */
dt_status dt_graph_compute(dt_graph *graph, const dt_sequence *sequences, int32_t n_sequences, const float **logits,
                           dt_error *error);

/* Attention mass that the observed queries of one of the last batch's sequences gave to each entry of a lane, or of its focus;
 * entry order as in the cache before it is committed. row: which of the observed queries when they were observed apart, else 0.
 * NULL where the layer was not observed, or is elsewhere (dt_graph_observe), where there are only peaks of a focus, and only of a
 * batch of one sequence. */
const float *dt_graph_mass(const dt_graph *graph, int32_t sequence, int32_t layer, int32_t lane, int32_t row);

/* The graph's threads, for work between its computations. */
dt_workers dt_graph_workers(dt_graph *graph);

/* Plays on devices what rounds have moved and keys are to turn by; to be called before entries are appended, and before rounds that
 * read entries there, which the graph's backends then do. */
dt_status dt_graph_settle(dt_graph *graph, const dt_kv *kv, dt_error *error);

/* For a layer whose cache is elsewhere, before a round: how much attention the newest queries that were not told yet gave its
 * entries, at most DT_OBSERVE_WINDOW of them, and the norms of its values. next_index: the next token's in the conversation. Lane l's
 * begin at l * stride; the cache's until its next batch. */
typedef struct dt_observed {
    const float *mass, *norms;
    size_t stride;
    int32_t n_queries; /* 0: none came since the last time, and there is no mass */
} dt_observed;
dt_status dt_graph_observe(dt_graph *graph, const dt_kv *kv, int32_t layer, int32_t next_index, dt_observed *out, dt_error *error);

/* Microseconds that the first thread has spent in attention (storing and observing included), since the graph was made. */
int64_t dt_graph_attention_us(const dt_graph *graph);

#endif
