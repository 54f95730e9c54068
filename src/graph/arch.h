/*
 * What a model family is: a descriptor of its constant traits, and the hyperparameters read from one file.
 *
 * The decoder graph (build.c) is one function driven by these two structs; a new family is a row in arch.c's table plus
 * whatever truly differs. Traits that are numbers are numbers here (rope base and window per layer, partial
 * rotation, softcaps, scales: neutral values switch them off), so that the graph needs no branch per family.
 *
 * Dimension letters used in graph/: E width, H query heads, G KV heads, D head size, F feed-forward width, V vocabulary,
 * N tokens in the batch, L layers.
 *
 * Invariant: after dt_hparams_read every number is within the limits below and consistent with the others, so nothing after it
 * needs to check again.
 */
#ifndef DT_GRAPH_ARCH_H
#define DT_GRAPH_ARCH_H

#include "weights/weights.h"

#define DT_MAX_LAYERS 512
#define DT_MAX_HEADS 1024
#define DT_MAX_HEAD_DIM 1024 /* what attention takes: DT_ATTN_MAX_DIM */

typedef enum dt_rope_style { DT_ROPE_NORM, DT_ROPE_NEOX } dt_rope_style;             /* pairs (2i, 2i+1), or (i, i + n/2) */
typedef enum dt_activation { DT_ACTIVATION_SILU, DT_ACTIVATION_GELU } dt_activation; /* of the gated feed-forward */

/* One family. */
typedef struct dt_arch {
    const char *name; /* general.architecture */
    dt_rope_style rope_style;
    dt_activation activation;
    bool rope_is_whole_head; /* a rotation of only a part of the head is an error in this family's files */
} dt_arch;

typedef struct dt_hparams {
    const dt_arch *arch;
    int32_t n_layers, n_embd, n_heads, n_vocab, n_ctx_train;
    int32_t head_dim_k, head_dim_v;
    float norm_eps;
    float attention_scale;                  /* multiplies q.k */
    float attention_softcap, logit_softcap; /* 0 = none */
    float embedding_scale;                  /* 1 = none */
    /* rope; scaling types "linear" and "yarn" (Peng et al. 2023) as ggml_rope_ext takes them */
    int32_t rope_dim, rope_ctx_orig;
    float rope_freq_scale, rope_ext_factor, rope_attn_factor, rope_beta_fast, rope_beta_slow;
    /* per layer */
    int32_t n_kv_heads[DT_MAX_LAYERS], n_ff[DT_MAX_LAYERS];
    float rope_base[DT_MAX_LAYERS];
    int32_t window[DT_MAX_LAYERS]; /* sliding window in tokens; 0 = none */
} dt_hparams;

/* Finds the family and reads its hyperparameters. */
dt_status dt_hparams_read(const dt_gguf *gguf, dt_hparams *out, dt_error *error);

#endif
