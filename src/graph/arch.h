/*
 * What a model family is: a descriptor of its constant traits, and the hyperparameters read from one file.
 *
 * The decoder graph (plan.c) is one function driven by these two structs; a new family is a row in arch.c's table plus
 * whatever truly differs. Traits that are numbers are numbers here (rope base and window per layer, partial
 * rotation, softcaps, scales: neutral values switch them off), so that the graph needs no branch per family.
 *
 * Dimension letters used in graph/: E width, H query heads, G KV heads, D head size, F feed-forward width, X experts,
 * V vocabulary, N tokens in the batch, L layers.
 *
 * Invariant: after dt_hparams_read every number is within the limits below and consistent with the others, so nothing after it
 * needs to check again.
 */
#ifndef DT_GRAPH_ARCH_H
#define DT_GRAPH_ARCH_H

#include "weights/weights.h"

#define DT_MAX_LAYERS 512
#define DT_MAX_HEADS 1024
#define DT_MAX_EXPERTS 1024
#define DT_MAX_HEAD_DIM 1024 /* what attention takes: DT_ATTN_MAX_DIM */

typedef enum dt_rope_style { DT_ROPE_NORM, DT_ROPE_NEOX } dt_rope_style;             /* pairs (2i, 2i+1), or (i, i + n/2) */
typedef enum dt_activation { DT_ACTIVATION_SILU, DT_ACTIVATION_GELU } dt_activation; /* of the gated feed-forward */

typedef enum dt_experts { DT_EXPERTS_NONE, DT_EXPERTS_POSSIBLE, DT_EXPERTS_ALWAYS } dt_experts;

/* One family. What a file can tell (which tensors are there, fused or apart, with biases or without) is not repeated here. */
typedef struct dt_arch {
    const char *name; /* general.architecture */
    dt_rope_style rope_style;
    dt_activation activation;
    dt_experts experts;
    bool rope_is_whole_head;   /* a rotation of only a part of the head is an error in this family's files */
    bool has_qk_norms;         /* RMS norm of each head's query and key before the rotation */
    bool has_post_norms;       /* RMS norm of what attention and feed-forward give, before it is added */
    bool has_fused_gate_up;    /* ffn_up holds the gate's rows, then those of up */
    bool counts_gate_and_up;   /* feed_forward_length is the width of both together */
    bool scales_embedding;     /* by sqrt(E) */
    bool has_window;           /* attention.sliding_window counts; other families' files may name one that was never used */
    int32_t window_period;     /* each so-many-th layer is global, where the file doesn't say which; 0 = none is */
    int32_t unrotated_period;  /* each so-many-th layer goes without rotation; 0 = none does */
    int32_t wide_scale_layers; /* models of so many layers scale attention by E/H, not by the head size */
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
    float rope_ext_factor, rope_attn_factor, rope_beta_fast, rope_beta_slow;
    int32_t n_experts, n_experts_used; /* 0 = the feed-forward part is dense; else n_ff is one expert's width */
    /* per layer */
    int32_t n_kv_heads[DT_MAX_LAYERS], n_ff[DT_MAX_LAYERS];
    float rope_base[DT_MAX_LAYERS]; /* 0 = not rotated */
    float rope_freq_scale[DT_MAX_LAYERS];
    int32_t window[DT_MAX_LAYERS]; /* sliding window in tokens; 0 = none */
} dt_hparams;

/* Finds the family and reads its hyperparameters. */
dt_status dt_hparams_read(const dt_gguf *gguf, dt_hparams *out, dt_error *error);

#endif
