/*
 * Random models on demand: GGUF files of any supported family, shape and weight type, that both this program and
 * libllama load. Seeded; the same options give the same bytes on every machine (own integer generator).
 *
 * Weights are scaled so that attention is peaked and logits are spread: a wrong rotation, mask, head or position changes the
 * greedy tokens at once. Every tensor has its own random stream, made from its name, so that adding biases or untying the
 * embeddings leaves the other tensors as they were.
 */
#ifndef DT_TESTS_TINY_MODEL_H
#define DT_TESTS_TINY_MODEL_H

#include "ggml.h"

#include <stdbool.h>
#include <stdint.h>

/* DEFAULT: the keys are absent. */
typedef enum tiny_rope_scaling { TINY_ROPE_DEFAULT, TINY_ROPE_NONE, TINY_ROPE_LINEAR, TINY_ROPE_YARN } tiny_rope_scaling;

typedef enum tiny_vocabulary {
    TINY_VOCABULARY_SPM,
    TINY_VOCABULARY_BPE,
    TINY_VOCABULARY_NONE,    /* of type "none": libllama loads the model, with n_vocab tokens without a text */
    TINY_VOCABULARY_MISSING, /* no key of a tokenizer; libllama refuses such a file */
    /* as those families' files have them: marks, pre-tokenizer, start and end tokens */
    TINY_VOCABULARY_CHATGLM2,
    TINY_VOCABULARY_CHATGLM3,
    TINY_VOCABULARY_GLM4,
    TINY_VOCABULARY_QWEN,
    TINY_VOCABULARY_LLAMA3
} tiny_vocabulary;

typedef struct tiny_model_params {
    const char *arch; /* "llama"; tensors and keys are those that llama.cpp's converter writes for the family */
    const char *name;
    uint64_t seed;
    int32_t n_layers, n_embd, n_heads, n_kv_heads, head_dim, n_ff, n_vocab, n_ctx;
    bool tied;   /* no output.weight: the embeddings serve */
    bool biases; /* of attention and of the feed-forward part */
    float rope_base;
    int32_t head_dim_v; /* of the values; 0: as head_dim */
    tiny_rope_scaling rope_scaling;
    float rope_factor;                 /* of linear and yarn */
    int32_t rope_original_context;     /* 0: the key is absent */
    bool rope_freqs;                   /* rope_freqs.weight as Llama 3 has it */
    int32_t window;                    /* attention.sliding_window; 0: the key is absent */
    int32_t window_period;             /* attention.sliding_window_pattern as a number; 0: the key is absent */
    int32_t n_experts, n_experts_used; /* of families that have them */
    float loudness;           /* multiplies the input of every feed-forward part, what it gives grows with the square; 0 means 1 */
    enum ggml_type type;      /* of the matrices; K types need rows of a multiple of 256 */
    enum ggml_type norm_type; /* F32; F16 and BF16 are read too */
    tiny_vocabulary vocabulary;
    const char *chat_template; /* NULL: none */
    int32_t favourite;         /* 1 + the token that is the likeliest whatever came before (by output.bias); 0: none */
    int32_t padding_rows;      /* embedding rows beyond the vocabulary; negative: rows are missing */
    int32_t n_parts;           /* 1; more: `path` ends in .gguf and becomes -00001-of-0000N.gguf */
    bool is_fast;              /* repeats random rows inside a matrix: for models of real size */
} tiny_model_params;

#define TINY_CHATML                                                                                                                \
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"          \
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

/* 2 layers, 64 wide, 4 heads of 16 on 2 KV heads, vocabulary of 320 (SPM), F32, untied; change what the test is about. */
tiny_model_params tiny_model_default_params(void);
/* Writes the model; false (and a line on stderr) when the options are impossible or the file cannot be written. */
bool tiny_model_write(const tiny_model_params *model, const char *path);
/* Path of part `part` (from 0) of a model written to `path`; the path itself for one part. */
void tiny_model_part_path(const tiny_model_params *model, const char *path, int32_t part, char *out, size_t capacity);

#endif
