/*
 * A decoder's hyperparameters and weights: immutable once loaded, shared by every session on the model.
 * Names of tensors are those of GGUF files; shapes in ggml's order (fastest dimension first).
 */
#ifndef DT_GRAPH_DECODER_H
#define DT_GRAPH_DECODER_H

#include "graph/arch.h"
#include "graph/devices.h"

/* The second operand of a matrix product: ggml's, or packed for our own kernels. */
typedef struct dt_matrix {
    struct ggml_tensor *tensor;
    dt_gemm_matrix packed; /* n_out = 0: tensor is to be used by ggml */
} dt_matrix;

/* What a layer does not have is NULL, a matrix's tensor too. */
typedef struct dt_layer_weights {
    struct ggml_tensor *attn_norm, *attn_post_norm;                  /* [E] */
    dt_matrix wqkv;                                                  /* [E, H*D + G*D + G*Dv], in place of the next three */
    dt_matrix wq, wk, wv;                                            /* [E, H*D], [E, G*D], [E, G*Dv] */
    struct ggml_tensor *bqkv, *bq, *bk, *bv;                         /* their biases */
    struct ggml_tensor *q_norm, *k_norm;                             /* [D] */
    dt_matrix wo;                                                    /* [H*Dv, E] */
    struct ggml_tensor *bo;                                          /* [E] */
    struct ggml_tensor *ffn_norm, *ffn_post_norm;                    /* [E] */
    dt_matrix ffn_gate, ffn_up, ffn_down;                            /* [E, F], [E, F] ([E, 2F] with the gate in it), [F, E] */
    struct ggml_tensor *ffn_gate_bias, *ffn_up_bias, *ffn_down_bias; /* [F], [F], [E] */
    dt_matrix router;                                                /* [E, X], where there are experts */
    struct ggml_tensor *gate_experts, *up_experts, *down_experts;    /* [E, F, X], [E, F, X], [F, E, X], in place of ffn_* */
} dt_layer_weights;

typedef struct dt_decoder {
    dt_hparams hp;
    ggml_backend_dev_t devices[DT_MAX_DEVICES]; /* [0] is the CPU, with our own kernels; the others run plain ggml operators */
    int32_t n_devices;
    uint8_t *layer_device;  /* [L] index into devices */
    int32_t head_device;    /* of output_norm and output; the embedding is always the CPU's */
    char device_text[1024]; /* for logs: "cpu", "CUDA0 (layers 0-15)" */
    /* To other machines, kept open from the first moment on: a server leaves a client that hangs up for the next one. NULL else. */
    ggml_backend_t connections[DT_MAX_DEVICES];
    dt_weights *weights;
    struct ggml_tensor *token_embedding;              /* [E, V], in the file's layout, for get_rows */
    struct ggml_tensor *output_norm;                  /* [E] */
    dt_matrix output;                                 /* [E, V] */
    struct ggml_tensor *output_bias;                  /* [V] or NULL */
    struct ggml_tensor *rope_factors[DT_MAX_DEVICES]; /* [rope_dim/2] or NULL */
    dt_layer_weights *layers;                         /* [L] */
    double *rope_frequencies;                         /* [L][rope_dim/2] radians per position; 0 in layers that are not rotated */
    uint64_t step_bytes;
} dt_decoder;

/* Reads hyperparameters, shares the layers out between the devices asked for, then loads the weights there. */
dt_status dt_decoder_load(const dt_gguf *gguf, const dt_model_params *params, dt_decoder **out, dt_error *error);
void dt_decoder_free(dt_decoder *decoder);
/* How far ggml's rotation turns each pair of a layer's dimensions per position: out[rope_dim/2]. factors[rope_dim/2] or NULL. */
void dt_rope_frequencies(const dt_hparams *hp, int32_t layer, const float *factors, double *out);
/* Bytes of the matrices that one token's computation reads (of experts: of those that one token uses), in the file's layout. */
uint64_t dt_decoder_step_bytes(const dt_decoder *decoder);

#endif
