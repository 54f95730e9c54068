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

typedef enum fill_kind { FILL_MATRIX, FILL_NORM, FILL_BIAS, FILL_ROPE_FACTORS } fill_kind;

typedef struct planned {
    struct ggml_tensor *tensor;
    fill_kind kind;
    float deviation; /* of the values */
} planned;

typedef struct plan {
    const tiny_model_params *model;
    struct ggml_context *context;
    planned tensors[MAX_TENSORS];
    int32_t n;
} plan;

tiny_model_params tiny_model_default_params(void) {
    return (tiny_model_params){
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
    p->tensors[p->n++] = (planned){.tensor = tensor, .kind = kind, .deviation = deviation};
}

/* A matrix whose output has `deviation` for an input of unit deviation. */
static void add_matrix(plan *p, int64_t columns, int64_t rows, float deviation, const char *format, int layer) {
    char name[GGML_MAX_NAME];
    snprintf(name, sizeof name, format, layer);
    add(p, FILL_MATRIX, p->model->type, columns, rows, deviation / sqrtf((float)columns), "%s", name);
}

static int32_t value_dim(const tiny_model_params *m) { return m->head_dim_v > 0 ? m->head_dim_v : m->head_dim; }

static void add_layer(plan *p, int32_t layer) {
    const tiny_model_params *m = p->model;
    const int64_t q = (int64_t)m->n_heads * m->head_dim, k = (int64_t)m->n_kv_heads * m->head_dim;
    const int64_t v = (int64_t)m->n_kv_heads * value_dim(m), o = (int64_t)m->n_heads * value_dim(m);
    add(p, FILL_NORM, m->norm_type, m->n_embd, 0, 0.1f, "blk.%d.attn_norm.weight", (int)layer);
    add_matrix(p, m->n_embd, q, 1.6f, "blk.%d.attn_q.weight", layer);
    add_matrix(p, m->n_embd, k, 1.6f, "blk.%d.attn_k.weight", layer);
    add_matrix(p, m->n_embd, v, 1.0f, "blk.%d.attn_v.weight", layer);
    add_matrix(p, o, m->n_embd, 1.5f, "blk.%d.attn_output.weight", layer);
    add(p, FILL_NORM, m->norm_type, m->n_embd, 0, 0.1f, "blk.%d.ffn_norm.weight", (int)layer);
    add_matrix(p, m->n_embd, m->n_ff, 1.5f, "blk.%d.ffn_gate.weight", layer);
    add_matrix(p, m->n_embd, m->n_ff, 1.5f, "blk.%d.ffn_up.weight", layer);
    add_matrix(p, m->n_ff, m->n_embd, 1.0f, "blk.%d.ffn_down.weight", layer);
    if (m->biases) {
        add(p, FILL_BIAS, GGML_TYPE_F32, q, 0, 0.5f, "blk.%d.attn_q.bias", (int)layer);
        add(p, FILL_BIAS, GGML_TYPE_F32, k, 0, 0.5f, "blk.%d.attn_k.bias", (int)layer);
        add(p, FILL_BIAS, GGML_TYPE_F32, v, 0, 0.5f, "blk.%d.attn_v.bias", (int)layer);
        add(p, FILL_BIAS, GGML_TYPE_F32, m->n_embd, 0, 0.3f, "blk.%d.attn_output.bias", (int)layer);
        add(p, FILL_BIAS, GGML_TYPE_F32, m->n_ff, 0, 0.3f, "blk.%d.ffn_gate.bias", (int)layer);
        add(p, FILL_BIAS, GGML_TYPE_F32, m->n_ff, 0, 0.3f, "blk.%d.ffn_up.bias", (int)layer);
        add(p, FILL_BIAS, GGML_TYPE_F32, m->n_embd, 0, 0.3f, "blk.%d.ffn_down.bias", (int)layer);
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
        add_layer(p, layer);
    }
    add(p, FILL_NORM, m->norm_type, m->n_embd, 0, 0.1f, "output_norm.weight");
    if (!m->tied) {
        add_matrix(p, m->n_embd, rows, 3.0f, "output.weight", 0);
    }
}

/* ---- their data --------------------------------------------------------------------------------- */

static void random_values(const planned *t, uint64_t *state, float *out, int64_t n) {
    const float range = t->deviation * sqrtf(3.0f), centre = t->kind == FILL_NORM ? 1.0f : 0.0f;
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
    const int64_t columns = t->tensor->ne[0], rows = t->tensor->ne[1];
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

static bool fill_spm(vocabulary *v) {
    static const char *const special[] = {"<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"};
    char text[32];
    bool fits = true;
    for (int i = 0; i < 5; i++) {
        fits = push(v, special[i], i == 0 ? TYPE_UNKNOWN : TYPE_CONTROL) && fits;
    }
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
    static const char *const special[] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};
    char text[32], merge[32];
    bool fits = true;
    for (int i = 0; i < 3; i++) {
        fits = push(v, special[i], TYPE_CONTROL) && fits;
    }
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

static bool set_vocabulary(const tiny_model_params *m, struct gguf_context *out) {
    if (m->vocabulary == TINY_VOCABULARY_NONE) {
        gguf_set_val_str(out, "tokenizer.ggml.model", "none");
    }
    if (m->vocabulary >= TINY_VOCABULARY_NONE) {
        return true;
    }
    const size_t n = (size_t)m->n_vocab;
    const bool is_spm = m->vocabulary == TINY_VOCABULARY_SPM;
    vocabulary v = {calloc(n, sizeof(char *)), calloc(n, sizeof(int32_t)), calloc(n, sizeof(float)), 0, m->n_vocab};
    char **merges = calloc(n, sizeof(char *));
    int32_t n_merges = 0;
    bool is_done = v.tokens && v.types && v.scores && merges && (is_spm ? fill_spm(&v) : fill_bpe(&v, merges, &n_merges));
    if (is_done) {
        gguf_set_val_str(out, "tokenizer.ggml.model", is_spm ? "llama" : "gpt2");
        gguf_set_val_str(out, "tokenizer.ggml.pre", is_spm ? "default" : "smollm");
        gguf_set_arr_str(out, "tokenizer.ggml.tokens", (const char **)v.tokens, n);
        gguf_set_arr_data(out, "tokenizer.ggml.token_type", GGUF_TYPE_INT32, v.types, n);
        if (is_spm) {
            gguf_set_arr_data(out, "tokenizer.ggml.scores", GGUF_TYPE_FLOAT32, v.scores, n);
        } else {
            gguf_set_arr_str(out, "tokenizer.ggml.merges", (const char **)merges, (size_t)n_merges);
        }
        gguf_set_val_u32(out, "tokenizer.ggml.bos_token_id", is_spm ? 1 : 0);
        gguf_set_val_u32(out, "tokenizer.ggml.eos_token_id", is_spm ? 2 : 0);
        gguf_set_val_bool(out, "tokenizer.ggml.add_bos_token", is_spm);
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

static bool set_keys(const tiny_model_params *m, struct gguf_context *out) {
    gguf_set_val_str(out, "general.architecture", "llama");
    gguf_set_val_str(out, "general.name", m->name);
    gguf_set_val_u32(out, "llama.context_length", (uint32_t)m->n_ctx);
    gguf_set_val_u32(out, "llama.embedding_length", (uint32_t)m->n_embd);
    gguf_set_val_u32(out, "llama.block_count", (uint32_t)m->n_layers);
    gguf_set_val_u32(out, "llama.feed_forward_length", (uint32_t)m->n_ff);
    gguf_set_val_u32(out, "llama.attention.head_count", (uint32_t)m->n_heads);
    gguf_set_val_u32(out, "llama.attention.head_count_kv", (uint32_t)m->n_kv_heads);
    gguf_set_val_u32(out, "llama.attention.key_length", (uint32_t)m->head_dim);
    gguf_set_val_u32(out, "llama.attention.value_length", (uint32_t)value_dim(m));
    gguf_set_val_f32(out, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    gguf_set_val_u32(out, "llama.rope.dimension_count", (uint32_t)m->head_dim);
    gguf_set_val_f32(out, "llama.rope.freq_base", m->rope_base);
    gguf_set_val_u32(out, "llama.vocab_size", (uint32_t)(m->n_vocab + m->padding_rows));
    if (m->rope_scaling) {
        static const char *const names[] = {[TINY_ROPE_NONE] = "none", [TINY_ROPE_LINEAR] = "linear", [TINY_ROPE_YARN] = "yarn"};
        gguf_set_val_str(out, "llama.rope.scaling.type", names[m->rope_scaling]);
        gguf_set_val_f32(out, "llama.rope.scaling.factor", m->rope_factor);
        if (m->rope_original_context) {
            gguf_set_val_u32(out, "llama.rope.scaling.original_context_length", (uint32_t)m->rope_original_context);
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
    if (m->n_vocab < (m->vocabulary >= TINY_VOCABULARY_NONE ? 1 : 262)) {
        return "the vocabulary has fewer than 262 tokens";
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
