/*
 * Writes random GGUF models (see tiny_model.h). Metadata through gguf.h, tensor data appended row block by row block, so that
 * memory stays small for models of gigabytes.
 *
 * Scales: a matrix whose input has unit variance gives an output of the standard deviation asked for. Queries and keys are
 * chosen so that attention logits have a deviation of about 2.5; each branch adds about 1 to the residual while embeddings
 * are small, so that tied models do not just repeat their last token.
 */
#include "support/tiny_model.h"

#include "gguf.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_TENSORS 4096
#define BLOCK_BYTES ((size_t)1 << 22) /* of F32 values quantized at once */
#define FAST_ROWS 64                  /* different rows of a matrix when is_fast */

typedef enum fill_kind { FILL_MATRIX, FILL_NORM, FILL_BIAS, FILL_ROPE_FACTORS, FILL_FAVOURITE } fill_kind;

/* How a family's files look; what is not said is as in llama. */
typedef struct layout {
    const char *arch;
    bool fused_qkv, qkv_bias, qk_norms, post_norms, fused_gate_up, experts;
    bool counts_gate_and_up; /* feed_forward_length says twice the width */
    int rope_divisor;        /* the share of the head that is rotated, 0 = all of it */
} layout;

static const layout layouts[] = {
    {.arch = "llama"},
    {.arch = "smollm3"},
    {.arch = "qwen", .fused_qkv = true, .qkv_bias = true, .counts_gate_and_up = true},
    {.arch = "qwen2", .qkv_bias = true},
    {.arch = "qwen3", .qk_norms = true},
    {.arch = "qwen3moe", .qk_norms = true, .experts = true},
    {.arch = "chatglm", .fused_qkv = true, .qkv_bias = true, .fused_gate_up = true, .rope_divisor = 2},
    {.arch = "glm4", .qkv_bias = true, .post_norms = true, .fused_gate_up = true, .rope_divisor = 2},
    {.arch = "gemma3", .qk_norms = true, .post_norms = true},
};

static const layout *find_layout(const char *arch) {
    for (size_t i = 0; i < sizeof layouts / sizeof layouts[0]; i++) {
        if (strcmp(layouts[i].arch, arch) == 0) {
            return &layouts[i];
        }
    }
    return NULL;
}

typedef struct planned {
    struct ggml_tensor *tensor;
    fill_kind kind;
    float deviation, centre; /* of the values */
} planned;

typedef struct plan {
    const tiny_model_params *model;
    const layout *layout;
    struct ggml_context *context;
    planned tensors[MAX_TENSORS];
    int32_t n;
} plan;

tiny_model_params tiny_model_default_params(void) {
    return (tiny_model_params){
        .arch = "llama",
        .name = "tiny",
        .seed = 1,
        .n_layers = 2,
        .n_embd = 64,
        .n_heads = 4,
        .n_kv_heads = 2,
        .head_dim = 16,
        .n_ff = 96,
        .n_vocab = 320,
        .n_ctx = 512,
        .rope_base = 10000.0f,
        .rope_factor = 1.0f,
        .type = GGML_TYPE_F32,
        .norm_type = GGML_TYPE_F32,
        .n_parts = 1,
    };
}

/* ---- random numbers ----------------------------------------------------------------------------- */

static uint64_t next_random(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Uniform in [-1, 1), exact in float; its standard deviation is 1/sqrt(3). */
static float next_uniform(uint64_t *state) { return (float)((int32_t)(next_random(state) >> 40) - (1 << 23)) / (float)(1 << 23); }

static uint64_t stream_of(uint64_t seed, const char *name) {
    uint64_t hash = 1469598103934665603u ^ seed;
    for (; *name; name++) {
        hash = (hash ^ (unsigned char)*name) * 1099511628211u;
    }
    return hash;
}

/* ---- which tensors ------------------------------------------------------------------------------ */

static void add(plan *p, fill_kind kind, enum ggml_type type, int64_t columns, int64_t rows, float deviation, const char *format,
                ...) __attribute__((format(printf, 7, 8)));

static void add(plan *p, fill_kind kind, enum ggml_type type, int64_t columns, int64_t rows, float deviation, const char *format,
                ...) {
    va_list arguments;
    char name[GGML_MAX_NAME];
    va_start(arguments, format);
    vsnprintf(name, sizeof name, format, arguments);
    va_end(arguments);
    struct ggml_tensor *tensor =
        rows == 0 ? ggml_new_tensor_1d(p->context, type, columns) : ggml_new_tensor_2d(p->context, type, columns, rows);
    ggml_set_name(tensor, name);
    p->tensors[p->n++] = (planned){.tensor = tensor, .kind = kind, .deviation = deviation, .centre = kind == FILL_NORM};
}

/* A matrix whose output has `deviation` for an input of unit deviation. */
static void add_matrix(plan *p, int64_t columns, int64_t rows, float deviation, const char *format, int layer) {
    char name[GGML_MAX_NAME];
    snprintf(name, sizeof name, format, layer);
    add(p, FILL_MATRIX, p->model->type, columns, rows, deviation / sqrtf((float)columns), "%s", name);
}

static int32_t value_dim(const tiny_model_params *m) { return m->head_dim_v > 0 ? m->head_dim_v : m->head_dim; }

static void add_vector(plan *p, fill_kind kind, int64_t n, float deviation, const char *format, int layer) {
    char name[GGML_MAX_NAME];
    snprintf(name, sizeof name, format, layer);
    add(p, kind, kind == FILL_NORM ? p->model->norm_type : GGML_TYPE_F32, n, 0, deviation, "%s", name);
}

static void add_attention(plan *p, int layer) {
    const tiny_model_params *m = p->model;
    const layout *l = p->layout;
    const int64_t q = (int64_t)m->n_heads * m->head_dim;
    const int64_t k = (int64_t)m->n_kv_heads * m->head_dim, v = (int64_t)m->n_kv_heads * value_dim(m);
    const bool has_bias = m->biases || l->qkv_bias;
    add_vector(p, FILL_NORM, m->n_embd, 0.1f, "blk.%d.attn_norm.weight", layer);
    if (l->fused_qkv) {
        add_matrix(p, m->n_embd, q + k + v, 1.5f, "blk.%d.attn_qkv.weight", layer);
    } else {
        add_matrix(p, m->n_embd, q, 1.6f, "blk.%d.attn_q.weight", layer);
        add_matrix(p, m->n_embd, k, 1.6f, "blk.%d.attn_k.weight", layer);
        add_matrix(p, m->n_embd, v, 1.0f, "blk.%d.attn_v.weight", layer);
    }
    if (has_bias && l->fused_qkv) {
        add_vector(p, FILL_BIAS, q + k + v, 0.5f, "blk.%d.attn_qkv.bias", layer);
    } else if (has_bias) {
        add_vector(p, FILL_BIAS, q, 0.5f, "blk.%d.attn_q.bias", layer);
        add_vector(p, FILL_BIAS, k, 0.5f, "blk.%d.attn_k.bias", layer);
        add_vector(p, FILL_BIAS, v, 0.5f, "blk.%d.attn_v.bias", layer);
    }
    if (l->qk_norms) {
        for (int i = 0; i < 2; i++) {
            add_vector(p, FILL_NORM, m->head_dim, 0.2f, i == 0 ? "blk.%d.attn_q_norm.weight" : "blk.%d.attn_k_norm.weight", layer);
            p->tensors[p->n - 1].centre = 1.6f; /* so that attention is peaked */
        }
    }
    add_matrix(p, (int64_t)m->n_heads * value_dim(m), m->n_embd, 1.5f, "blk.%d.attn_output.weight", layer);
    if (m->biases) {
        add_vector(p, FILL_BIAS, m->n_embd, 0.3f, "blk.%d.attn_output.bias", layer);
    }
    if (l->post_norms) {
        add_vector(p, FILL_NORM, m->n_embd, 0.1f, "blk.%d.post_attention_norm.weight", layer);
    }
}

static void add_expert_matrix(plan *p, int64_t columns, int64_t rows, float deviation, const char *format, int layer) {
    add_matrix(p, columns, rows, deviation, format, layer);
    planned *t = &p->tensors[p->n - 1];
    char name[GGML_MAX_NAME];
    snprintf(name, sizeof name, "%s", t->tensor->name);
    t->tensor = ggml_new_tensor_3d(p->context, p->model->type, columns, rows, p->model->n_experts);
    ggml_set_name(t->tensor, name);
}

static void add_feed_forward(plan *p, int layer) {
    const tiny_model_params *m = p->model;
    add_vector(p, FILL_NORM, m->n_embd, 0.1f, "blk.%d.ffn_norm.weight", layer);
    p->tensors[p->n - 1].centre = m->loudness > 0.0f ? m->loudness : 1.0f;
    if (m->n_experts > 0) {
        add(p, FILL_MATRIX, GGML_TYPE_F32, m->n_embd, m->n_experts, 2.0f / sqrtf((float)m->n_embd), "blk.%d.ffn_gate_inp.weight",
            layer);
        add_expert_matrix(p, m->n_embd, m->n_ff, 1.5f, "blk.%d.ffn_gate_exps.weight", layer);
        add_expert_matrix(p, m->n_embd, m->n_ff, 1.5f, "blk.%d.ffn_up_exps.weight", layer);
        add_expert_matrix(p, m->n_ff, m->n_embd, 1.0f, "blk.%d.ffn_down_exps.weight", layer);
    } else if (p->layout->fused_gate_up) {
        add_matrix(p, m->n_embd, 2 * m->n_ff, 1.5f, "blk.%d.ffn_up.weight", layer);
        add_matrix(p, m->n_ff, m->n_embd, 1.0f, "blk.%d.ffn_down.weight", layer);
    } else {
        add_matrix(p, m->n_embd, m->n_ff, 1.5f, "blk.%d.ffn_gate.weight", layer);
        add_matrix(p, m->n_embd, m->n_ff, 1.5f, "blk.%d.ffn_up.weight", layer);
        add_matrix(p, m->n_ff, m->n_embd, 1.0f, "blk.%d.ffn_down.weight", layer);
    }
    if (m->biases) {
        add_vector(p, FILL_BIAS, m->n_ff, 0.3f, "blk.%d.ffn_gate.bias", layer);
        add_vector(p, FILL_BIAS, m->n_ff, 0.3f, "blk.%d.ffn_up.bias", layer);
        add_vector(p, FILL_BIAS, m->n_embd, 0.3f, "blk.%d.ffn_down.bias", layer);
    }
    if (p->layout->post_norms) {
        add_vector(p, FILL_NORM, m->n_embd, 0.1f, "blk.%d.post_ffw_norm.weight", layer);
    }
}

static void add_all(plan *p) {
    const tiny_model_params *m = p->model;
    const int64_t rows = m->n_vocab + m->padding_rows;
    add_matrix(p, m->n_embd, rows, 3.0f, "token_embd.weight", 0);
    if (m->rope_freqs) {
        add(p, FILL_ROPE_FACTORS, GGML_TYPE_F32, m->head_dim / 2, 0, 0.0f, "rope_freqs.weight");
    }
    for (int32_t layer = 0; layer < m->n_layers; layer++) {
        add_attention(p, layer);
        add_feed_forward(p, layer);
    }
    add(p, FILL_NORM, m->norm_type, m->n_embd, 0, 0.1f, "output_norm.weight");
    if (!m->tied) {
        add_matrix(p, m->n_embd, rows, 3.0f, "output.weight", 0);
    }
    if (m->favourite > 0) {
        add(p, FILL_FAVOURITE, GGML_TYPE_F32, rows, 0, 0.0f, "output.bias");
    }
}

/* ---- their data --------------------------------------------------------------------------------- */

static void random_values(const planned *t, uint64_t *state, float *out, int64_t n) {
    const float range = t->deviation * sqrtf(3.0f), centre = t->centre;
    for (int64_t i = 0; i < n; i++) {
        out[i] = centre + range * next_uniform(state);
    }
}

/* Wavelengths of the slow half stretched 8 times, the middle less, the fast quarter not. */
static void rope_factor_values(float *out, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        out[i] = i < n / 4 ? 1.0f : i >= n / 2 ? 8.0f : 1.0f + 7.0f * (float)(i - n / 4) / (float)(n / 2 - n / 4);
    }
}

static bool pad_file(FILE *file, size_t bytes) {
    static const char zeros[GGUF_DEFAULT_ALIGNMENT];
    const size_t padding = (GGUF_DEFAULT_ALIGNMENT - bytes % GGUF_DEFAULT_ALIGNMENT) % GGUF_DEFAULT_ALIGNMENT;
    return fwrite(zeros, 1, padding, file) == padding;
}

/* Writes rows in blocks of `block_rows`; when is_fast one block of random rows is made and then repeated from varying rows on. */
static bool write_tensor(const tiny_model_params *m, const planned *t, FILE *file) {
    const int64_t columns = t->tensor->ne[0], rows = t->tensor->ne[1] * t->tensor->ne[2];
    const size_t row_bytes = ggml_row_size(t->tensor->type, columns);
    const bool repeats = m->is_fast && rows > FAST_ROWS;
    int64_t block_rows = (int64_t)(BLOCK_BYTES / ((size_t)columns * sizeof(float)));
    block_rows = repeats ? FAST_ROWS : block_rows < 1 ? 1 : block_rows > rows ? rows : block_rows;
    float *values = malloc((size_t)(block_rows * columns) * sizeof *values);
    char *data = malloc((size_t)block_rows * row_bytes);
    uint64_t state = stream_of(m->seed, t->tensor->name);
    bool is_done = values && data;
    for (int64_t row = 0; row < rows && is_done; row += block_rows) {
        const int64_t n = rows - row < block_rows ? rows - row : block_rows;
        if (row == 0 || !repeats) {
            if (t->kind == FILL_ROPE_FACTORS) {
                rope_factor_values(values, columns);
            } else if (t->kind == FILL_FAVOURITE) {
                memset(values, 0, (size_t)columns * sizeof *values);
                values[m->favourite - 1] = 1000.0f;
            } else {
                random_values(t, &state, values, n * columns);
            }
            ggml_quantize_chunk(t->tensor->type, values, data, 0, n, columns, NULL);
        }
        const int64_t first = repeats && row > 0 ? (int64_t)(next_random(&state) % (uint64_t)n) : 0;
        is_done = fwrite(data + (size_t)first * row_bytes, row_bytes, (size_t)(n - first), file) == (size_t)(n - first) &&
                  fwrite(data, row_bytes, (size_t)first, file) == (size_t)first;
    }
    free(values);
    free(data);
    return is_done && pad_file(file, row_bytes * (size_t)rows);
}

/* ---- vocabularies ------------------------------------------------------------------------------- */

enum { TYPE_NORMAL = 1, TYPE_UNKNOWN = 2, TYPE_CONTROL = 3, TYPE_BYTE = 6 };

/* What vocabularies differ in. Ids count from the first special token; -1: the key is absent. */
typedef struct vocabulary_kind {
    const char *pre;
    const char *special[12]; /* in front */
    const char *marks[12];   /* behind all else */
    int32_t bos, eos, add_bos;
    bool is_spm;
} vocabulary_kind;

#define CHATGLM_MARKS "[MASK]", "[gMASK]", "[sMASK]", "sop", "eop"
#define GLM_ROLES "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"

static const vocabulary_kind vocabulary_kinds[] = {
    [TINY_VOCABULARY_SPM] = {"default", {"<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"}, {0}, 1, 2, 1, true},
    [TINY_VOCABULARY_BPE] = {"smollm", {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}, {0}, 0, 0, 0, false},
    [TINY_VOCABULARY_CHATGLM2] = {"chatglm-spm", {"<unk>", "<s>", "</s>"}, {CHATGLM_MARKS}, 1, 2, 0, true},
    [TINY_VOCABULARY_CHATGLM3] = {"chatglm-spm", {"<unk>", "<s>", "</s>"}, {CHATGLM_MARKS, GLM_ROLES}, 1, 2, 0, true},
    [TINY_VOCABULARY_GLM4] =
        {"glm4", {"<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", GLM_ROLES}, {0}, -1, 0, -1, false},
    [TINY_VOCABULARY_QWEN] = {"qwen2", {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}, {0}, -1, 2, -1, false},
    [TINY_VOCABULARY_LLAMA3] = {"llama-bpe",
                                {"<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"},
                                {0},
                                0,
                                4,
                                -1,
                                false},
};

typedef struct vocabulary {
    char **tokens;
    int32_t *types;
    float *scores;
    int32_t n, capacity;
} vocabulary;

static bool push(vocabulary *v, const char *text, int32_t type) {
    if (v->n == v->capacity) {
        return false;
    }
    v->tokens[v->n] = strdup(text);
    v->types[v->n] = type;
    v->scores[v->n] = type == TYPE_NORMAL ? -(float)v->n : 0.0f;
    return v->tokens[v->n++] != NULL;
}

/* Word number i of an endless list without repetition in which every word's beginning stands before it: aa, ab, ... zz, then
 * three letters, and so on. */
static void word_text(int32_t i, char out[16]) {
    int length = 2;
    int64_t count = 26 * 26, left = i;
    while (left >= count) {
        left -= count;
        count *= 26;
        length++;
    }
    out[length] = '\0';
    for (int k = length - 1; k >= 0; k--) {
        out[k] = (char)('a' + left % 26);
        left /= 26;
    }
}

static bool push_special(vocabulary *v, const char *const texts[12]) {
    bool fits = true;
    for (int i = 0; i < 12 && texts[i]; i++) {
        fits = push(v, texts[i], strcmp(texts[i], "<unk>") == 0 ? TYPE_UNKNOWN : TYPE_CONTROL) && fits;
    }
    return fits;
}

static bool fill_spm(vocabulary *v) {
    char text[32];
    bool fits = true;
    for (int i = 0; i < 256; i++) {
        snprintf(text, sizeof text, "<0x%02X>", i);
        fits = push(v, text, TYPE_BYTE) && fits;
    }
    fits = push(v, "\xe2\x96\x81", TYPE_NORMAL) && fits;
    for (int i = 0; i < 26 && v->n < v->capacity; i++) {
        snprintf(text, sizeof text, "%c", 'a' + i);
        push(v, text, TYPE_NORMAL);
    }
    for (int i = 0; i < 26 && v->n < v->capacity; i++) {
        snprintf(text, sizeof text, "\xe2\x96\x81%c", 'a' + i);
        push(v, text, TYPE_NORMAL);
    }
    for (int32_t i = 0; v->n < v->capacity; i++) {
        word_text(i, text);
        push(v, text, TYPE_NORMAL);
    }
    return fits;
}

/* The character that stands for a byte in byte-level vocabularies, as UTF-8. */
static void byte_character(int byte, char out[8]) {
    int code = byte;
    if (!((byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae)) {
        code = 256;
        for (int b = 0; b < byte; b++) {
            code += !((b >= '!' && b <= '~') || (b >= 0xa1 && b <= 0xac) || b >= 0xae);
        }
    }
    if (code < 0x80) {
        snprintf(out, 8, "%c", code);
    } else {
        snprintf(out, 8, "%c%c", (char)(0xc0 | code >> 6), (char)(0x80 | (code & 0x3f)));
    }
}

/* Every word is the merge of its beginning and its last letter; *merges gets them in the order of their rank. */
static bool fill_bpe(vocabulary *v, char **merges, int32_t *n_merges) {
    char text[32], merge[32];
    bool fits = true;
    for (int i = 0; i < 256; i++) {
        byte_character(i, text);
        fits = push(v, text, TYPE_NORMAL) && fits;
    }
    for (int32_t i = 0; v->n < v->capacity; i++) {
        word_text(i, text);
        const size_t last = strlen(text) - 1;
        snprintf(merge, sizeof merge, "%.*s %c", (int)last, text, text[last]);
        merges[*n_merges] = strdup(merge);
        fits = merges[*n_merges] && fits;
        *n_merges += 1;
        push(v, text, TYPE_NORMAL);
    }
    return fits;
}

static bool has_tokens(const tiny_model_params *m) {
    return m->vocabulary != TINY_VOCABULARY_NONE && m->vocabulary != TINY_VOCABULARY_MISSING;
}

static bool set_vocabulary(const tiny_model_params *m, struct gguf_context *out) {
    if (m->vocabulary == TINY_VOCABULARY_NONE) {
        gguf_set_val_str(out, "tokenizer.ggml.model", "none");
    }
    if (!has_tokens(m)) {
        return true;
    }
    const vocabulary_kind *kind = &vocabulary_kinds[m->vocabulary];
    const size_t n = (size_t)m->n_vocab;
    vocabulary v = {calloc(n, sizeof(char *)), calloc(n, sizeof(int32_t)), calloc(n, sizeof(float)), 0, m->n_vocab};
    char **merges = calloc(n, sizeof(char *));
    int32_t n_merges = 0;
    for (int i = 0; i < 12 && kind->marks[i]; i++) {
        v.capacity--;
    }
    bool is_done = v.tokens && v.types && v.scores && merges && push_special(&v, kind->special);
    is_done = is_done && (kind->is_spm ? fill_spm(&v) : fill_bpe(&v, merges, &n_merges));
    v.capacity = m->n_vocab;
    is_done = is_done && push_special(&v, kind->marks);
    if (is_done) {
        gguf_set_val_str(out, "tokenizer.ggml.model", kind->is_spm ? "llama" : "gpt2");
        gguf_set_val_str(out, "tokenizer.ggml.pre", kind->pre);
        gguf_set_arr_str(out, "tokenizer.ggml.tokens", (const char **)v.tokens, n);
        gguf_set_arr_data(out, "tokenizer.ggml.token_type", GGUF_TYPE_INT32, v.types, n);
        if (kind->is_spm) {
            gguf_set_arr_data(out, "tokenizer.ggml.scores", GGUF_TYPE_FLOAT32, v.scores, n);
        } else {
            gguf_set_arr_str(out, "tokenizer.ggml.merges", (const char **)merges, (size_t)n_merges);
        }
        if (kind->bos >= 0) {
            gguf_set_val_u32(out, "tokenizer.ggml.bos_token_id", (uint32_t)kind->bos);
        }
        gguf_set_val_u32(out, "tokenizer.ggml.eos_token_id", (uint32_t)kind->eos);
        if (kind->add_bos >= 0) {
            gguf_set_val_bool(out, "tokenizer.ggml.add_bos_token", kind->add_bos != 0);
        }
        if (m->chat_template) {
            gguf_set_val_str(out, "tokenizer.chat_template", m->chat_template);
        }
    }
    for (int32_t i = 0; i < v.n; i++) {
        free(v.tokens[i]);
    }
    for (int32_t i = 0; i < n_merges; i++) {
        free(merges[i]);
    }
    free(v.tokens);
    free(v.types);
    free(v.scores);
    free(merges);
    return is_done;
}

/* ---- the file ----------------------------------------------------------------------------------- */

/* The key "<arch>.<suffix>"; the text lives until the next call. */
static const char *key(const tiny_model_params *m, const char *suffix) {
    static char text[128];
    snprintf(text, sizeof text, "%s.%s", m->arch, suffix);
    return text;
}

static void set_u32(const tiny_model_params *m, struct gguf_context *out, const char *suffix, int64_t value) {
    gguf_set_val_u32(out, key(m, suffix), (uint32_t)value);
}

static bool set_keys(const tiny_model_params *m, struct gguf_context *out) {
    const layout *l = find_layout(m->arch);
    const int32_t rope_dim = l->rope_divisor > 0 ? m->head_dim / l->rope_divisor : m->head_dim;
    gguf_set_val_str(out, "general.architecture", m->arch);
    gguf_set_val_str(out, "general.name", m->name);
    set_u32(m, out, "context_length", m->n_ctx);
    set_u32(m, out, "embedding_length", m->n_embd);
    set_u32(m, out, "block_count", m->n_layers);
    set_u32(m, out, "feed_forward_length", (l->counts_gate_and_up ? 2 : 1) * (int64_t)m->n_ff);
    set_u32(m, out, "attention.head_count", m->n_heads);
    set_u32(m, out, "attention.head_count_kv", m->n_kv_heads);
    set_u32(m, out, "attention.key_length", m->head_dim);
    set_u32(m, out, "attention.value_length", value_dim(m));
    gguf_set_val_f32(out, key(m, "attention.layer_norm_rms_epsilon"), 1e-5f);
    set_u32(m, out, "rope.dimension_count", rope_dim);
    gguf_set_val_f32(out, key(m, "rope.freq_base"), m->rope_base);
    set_u32(m, out, "vocab_size", m->n_vocab + m->padding_rows);
    if (m->window > 0) {
        set_u32(m, out, "attention.sliding_window", m->window);
    }
    if (m->window_period > 0) {
        set_u32(m, out, "attention.sliding_window_pattern", m->window_period);
    }
    if (m->n_experts > 0) {
        set_u32(m, out, "expert_count", m->n_experts);
        set_u32(m, out, "expert_used_count", m->n_experts_used);
        set_u32(m, out, "expert_feed_forward_length", m->n_ff);
    }
    if (m->rope_scaling) {
        static const char *const names[] = {[TINY_ROPE_NONE] = "none", [TINY_ROPE_LINEAR] = "linear", [TINY_ROPE_YARN] = "yarn"};
        gguf_set_val_str(out, key(m, "rope.scaling.type"), names[m->rope_scaling]);
        gguf_set_val_f32(out, key(m, "rope.scaling.factor"), m->rope_factor);
        if (m->rope_original_context) {
            set_u32(m, out, "rope.scaling.original_context_length", m->rope_original_context);
        }
    }
    return set_vocabulary(m, out);
}

void tiny_model_part_path(const tiny_model_params *model, const char *path, int32_t part, char *out, size_t capacity) {
    const size_t length = strlen(path);
    const bool has_suffix = length > 5 && strcmp(path + length - 5, ".gguf") == 0;
    if (model->n_parts <= 1) {
        snprintf(out, capacity, "%s", path);
    } else {
        snprintf(out, capacity, "%.*s-%05d-of-%05d.gguf", (int)(has_suffix ? length - 5 : length), path, (int)part + 1,
                 (int)model->n_parts);
    }
}

static bool write_part(const plan *p, const char *path, int32_t part) {
    const tiny_model_params *m = p->model;
    const int32_t n_parts = m->n_parts > 1 ? m->n_parts : 1;
    const int32_t first = p->n * part / n_parts, end = p->n * (part + 1) / n_parts;
    struct gguf_context *out = gguf_init_empty();
    bool is_done = part > 0 || set_keys(m, out);
    if (n_parts > 1) {
        gguf_set_val_u16(out, "split.no", (uint16_t)part);
        gguf_set_val_u16(out, "split.count", (uint16_t)n_parts);
        gguf_set_val_i32(out, "split.tensors.count", p->n);
    }
    for (int32_t i = first; i < end; i++) {
        gguf_add_tensor(out, p->tensors[i].tensor);
    }
    FILE *file = is_done ? fopen(path, "wb") : NULL;
    is_done = file && gguf_write_to_file_ptr(out, file, true);
    for (int32_t i = first; i < end && is_done; i++) {
        is_done = write_tensor(m, &p->tensors[i], file);
    }
    if (file) {
        is_done = fclose(file) == 0 && is_done;
    }
    gguf_free(out);
    return is_done;
}

/* What is wrong with the options, or NULL. */
static const char *find_fault(const tiny_model_params *m) {
    const int64_t block = ggml_blck_size(m->type);
    const layout *l = find_layout(m->arch);
    if (!l) {
        return "there is no layout of this architecture";
    }
    if (l->experts != (m->n_experts > 0) && strcmp(m->arch, "llama") != 0) {
        return "experts are missing, or the family has none";
    }
    if (m->n_layers < 1 || m->n_layers > 256 || m->n_embd < 1 || m->n_heads < 1 || m->n_kv_heads < 1 || m->n_ff < 1 ||
        m->n_ctx < 1) {
        return "a size is below 1 or too large";
    }
    if (m->head_dim < 2 || m->head_dim % 2 != 0) {
        return "the head size must be even";
    }
    if (m->n_embd % block != 0 || m->n_ff % block != 0 || (int64_t)m->n_heads * value_dim(m) % block != 0) {
        return "rows are no multiple of the type's block";
    }
    if (m->n_vocab + m->padding_rows < 1) {
        return "there are no embedding rows";
    }
    if (m->n_vocab < (has_tokens(m) ? 275 : 1)) {
        return "the vocabulary has fewer than 275 tokens";
    }
    return NULL;
}

bool tiny_model_write(const tiny_model_params *model, const char *path) {
    const char *fault = find_fault(model);
    if (fault) {
        fprintf(stderr, "tiny_model: %s\n", fault);
        return false;
    }
    plan *p = calloc(1, sizeof *p);
    if (!p) {
        return false;
    }
    p->model = model;
    p->layout = find_layout(model->arch);
    p->context = ggml_init(
        (struct ggml_init_params){.mem_size = MAX_TENSORS * ggml_tensor_overhead(), .mem_buffer = NULL, .no_alloc = true});
    add_all(p);
    bool is_done = true;
    for (int32_t part = 0; part < (model->n_parts > 1 ? model->n_parts : 1) && is_done; part++) {
        char part_path[4096];
        tiny_model_part_path(model, path, part, part_path, sizeof part_path);
        is_done = write_part(p, part_path, part);
        if (!is_done) {
            fprintf(stderr, "tiny_model: cannot write %s\n", part_path);
        }
    }
    ggml_free(p->context);
    free(p);
    return is_done;
}
