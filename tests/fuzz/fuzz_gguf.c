/*
 * Model files: the reader, the check of the vocabulary, libllama's loading of it, tokenizing, the file's own chat template, and where
 * the file has weights, two tokens through the decoder.
 *
 * Most changes to such a file end at the first check of a length or an offset. So the mutator takes the file apart into keys and
 * tensors, changes one, and puts it together again with counts and offsets that fit.
 */
#include "fuzz.h"

#include "support/tiny_model.h"
#include "text/text.h"
#include "weights/gguf_file.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc;
    (void)argv;
    dt_text_route_logs();
    fuzz_begin(fuzz_write_seeds);
    return 0;
}

/* ---- the target --------------------------------------------------------------------------------- */

static void use_vocabulary(const char *path) {
    static const char text[] = "Hello <|im_start|>w\xc3\xb6rld</s> 12345 \n\n\xe4\xbd\xa0<0x0A>\xff [gMASK]";
    dt_error error = {0};
    dt_vocab *vocab = NULL;
    dt_status status = dt_vocab_open(path, &vocab, &error);
    if (status != DT_OK) {
        fuzz_require_told(status, &error);
        return;
    }
    char bytes[64];
    const int32_t n_vocab = dt_vocab_size(vocab);
    for (int32_t i = -1; i <= n_vocab; i++) {
        dt_vocab_token_bytes(vocab, i, i % 2 == 0, bytes, sizeof bytes);
        dt_vocab_is_end(vocab, i);
    }
    for (int how = 0; how < 4; how++) {
        int32_t *tokens = NULL;
        size_t n = 0;
        status = dt_vocab_tokenize(vocab, text, sizeof text - 1, how & 1, how & 2, &tokens, &n, &error);
        if (status != DT_OK) {
            fuzz_require_told(status, &error);
        }
        for (size_t i = 0; status == DT_OK && i < n; i++) {
            fuzz_require(tokens[i] >= 0 && tokens[i] < n_vocab, "tokens of a text are in the vocabulary");
        }
        dt_free(tokens);
    }
    if (dt_vocab_has_chat_template(vocab)) {
        const dt_chat_message messages[] = {{"system", "Be brief."}, {"user", "Hello"}};
        char *out = NULL;
        status = dt_vocab_chat_render(vocab, NULL, messages, 2, true, &out, &error);
        if (status != DT_OK) {
            fuzz_require_told(status, &error);
        }
        dt_free(out);
    }
    dt_vocab_free(vocab);
}

static void use_model(const char *path, bool no_mmap) {
    dt_error error = {0};
    dt_model *model = NULL;
    dt_session *session = NULL;
    const dt_model_params params = {.no_mmap = no_mmap, .no_tokenizer = true};
    dt_status status = dt_model_open(path, &params, &model, &error);
    if (status != DT_OK) {
        fuzz_require_told(status, &error);
        return;
    }
    const dt_session_params session_params = {.n_ctx = no_mmap ? 32 : 0, .n_batch = 8, .n_threads = 1, .n_threads_batch = 1};
    status = dt_session_new(model, &session_params, &session, &error);
    if (status == DT_OK) {
        const int32_t tokens[2] = {0, dt_model_get_info(model)->n_vocab - 1};
        status = dt_session_sync(session, tokens, 2, NULL, NULL, NULL, &error);
    }
    if (status != DT_OK) {
        fuzz_require_told(status, &error);
    }
    dt_session_free(session);
    dt_model_close(model);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const char *path = fuzz_file(0, data, size);
    dt_error error = {0};
    dt_gguf *gguf = NULL;
    bool has_tokenizer = false;
    dt_status status = dt_gguf_open(path, &gguf, &error);
    if (status == DT_OK) {
        status = dt_gguf_check_vocabulary(gguf, &has_tokenizer, &error);
    }
    if (status != DT_OK) {
        fuzz_require_told(status, &error);
    }
    if (has_tokenizer) {
        use_vocabulary(path);
    }
    if (gguf != NULL && gguf->n_tensors > 0) {
        use_model(path, size % 2 == 1);
    }
    dt_gguf_free(gguf);
    return 0;
}

/* ---- the mutator -------------------------------------------------------------------------------- */

#define N_KEYS_MAX 256
#define N_TENSORS_MAX 256
#define PIECE_BYTES_MAX 32768

typedef struct piece { /* of the file that is taken apart */
    const uint8_t *bytes;
    size_t size;
} piece;

typedef struct tensor {
    piece name;
    uint32_t n_dims, type;
    uint64_t ne[GGML_MAX_DIMS];
    piece data; /* perhaps short of what it should be */
} tensor;

typedef struct parts {
    piece keys[N_KEYS_MAX]; /* name, type and value */
    size_t n_keys;
    tensor tensors[N_TENSORS_MAX];
    size_t n_tensors;
} parts;

typedef struct cursor {
    const uint8_t *bytes;
    size_t size, at;
    bool is_short;
} cursor;

static piece take(cursor *c, uint64_t n) {
    if (c->is_short || n > c->size - c->at) {
        c->is_short = true;
        return (piece){NULL, 0};
    }
    const piece p = {c->bytes + c->at, (size_t)n};
    c->at += (size_t)n;
    return p;
}

static uint64_t take_number(cursor *c, size_t bytes) {
    uint64_t value = 0;
    const piece p = take(c, bytes);
    if (p.bytes != NULL) {
        memcpy(&value, p.bytes, bytes);
    }
    return value;
}

static size_t scalar_bytes(uint32_t type) {
    static const uint8_t bytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    return type < sizeof bytes ? bytes[type] : 0;
}

static void skip_value(cursor *c, uint32_t type) {
    if (type == GGUF_TYPE_STRING) {
        take(c, take_number(c, 8));
    } else if (type == GGUF_TYPE_ARRAY) {
        const uint32_t inner = (uint32_t)take_number(c, 4);
        const uint64_t n = take_number(c, 8);
        c->is_short = c->is_short || n > c->size || inner == GGUF_TYPE_ARRAY;
        if (inner != GGUF_TYPE_STRING) {
            take(c, n * scalar_bytes(inner));
        }
        for (uint64_t i = 0; inner == GGUF_TYPE_STRING && i < n && !c->is_short; i++) {
            take(c, take_number(c, 8));
        }
    } else {
        take(c, scalar_bytes(type));
    }
}

static uint64_t tensor_bytes(const tensor *t) {
    const int64_t block = t->type < GGML_TYPE_COUNT ? ggml_blck_size((enum ggml_type)t->type) : 0;
    uint64_t n = 1;
    for (uint32_t i = 0; i < t->n_dims; i++) {
        n = t->ne[i] > 1u << 20 || n > 1u << 20 ? 1u << 20 : n * t->ne[i];
    }
    return block > 0 ? n / (uint64_t)block * ggml_type_size((enum ggml_type)t->type) : 0;
}

static bool take_apart(const uint8_t *data, size_t size, parts *out) {
    cursor c = {data, size, 8, size < 24};
    const uint64_t n_tensors = take_number(&c, 8), n_keys = take_number(&c, 8);
    if (c.is_short || memcmp(data, "GGUF", 4) != 0 || n_tensors > N_TENSORS_MAX || n_keys > N_KEYS_MAX) {
        return false;
    }
    out->n_keys = (size_t)n_keys;
    out->n_tensors = (size_t)n_tensors;
    for (size_t i = 0; i < n_keys && !c.is_short; i++) {
        const size_t from = c.at;
        take(&c, take_number(&c, 8));
        skip_value(&c, (uint32_t)take_number(&c, 4));
        out->keys[i] = (piece){data + from, c.at - from};
    }
    uint64_t offsets[N_TENSORS_MAX];
    for (size_t i = 0; i < n_tensors && !c.is_short; i++) {
        tensor *t = &out->tensors[i];
        t->name = take(&c, take_number(&c, 8));
        t->n_dims = (uint32_t)take_number(&c, 4);
        c.is_short = c.is_short || t->n_dims > GGML_MAX_DIMS;
        for (uint32_t k = 0; k < t->n_dims && !c.is_short; k++) {
            t->ne[k] = take_number(&c, 8);
        }
        t->type = (uint32_t)take_number(&c, 4);
        offsets[i] = take_number(&c, 8);
    }
    if (c.is_short) {
        return false;
    }
    const size_t start = (c.at + 31) / 32 * 32;
    for (size_t i = 0; i < n_tensors; i++) {
        tensor *t = &out->tensors[i];
        const size_t left = start < size && offsets[i] < size - start ? size - start - (size_t)offsets[i] : 0;
        const uint64_t bytes = tensor_bytes(t);
        t->data = (piece){data + size - left, bytes < left ? (size_t)bytes : left};
        t->data.bytes = left > 0 ? data + start + offsets[i] : data;
    }
    return true;
}

typedef struct writer {
    uint8_t *bytes;
    size_t size, capacity;
} writer;

static void put(writer *w, const void *bytes, size_t n) {
    n = n < w->capacity - w->size ? n : w->capacity - w->size;
    if (n > 0 && bytes != NULL) {
        memcpy(w->bytes + w->size, bytes, n);
    } else if (n > 0) {
        memset(w->bytes + w->size, 0, n);
    }
    w->size += n;
}

static void put_number(writer *w, uint64_t value, size_t bytes) { put(w, &value, bytes); }

static size_t put_together(const parts *p, uint32_t version, uint8_t *out, size_t capacity) {
    writer w = {out, 0, capacity};
    put(&w, "GGUF", 4);
    put_number(&w, version, 4);
    put_number(&w, p->n_tensors, 8);
    put_number(&w, p->n_keys, 8);
    for (size_t i = 0; i < p->n_keys; i++) {
        put(&w, p->keys[i].bytes, p->keys[i].size);
    }
    uint64_t offset = 0;
    for (size_t i = 0; i < p->n_tensors; i++) {
        const tensor *t = &p->tensors[i];
        put_number(&w, t->name.size, 8);
        put(&w, t->name.bytes, t->name.size);
        put_number(&w, t->n_dims, 4);
        for (uint32_t k = 0; k < t->n_dims; k++) {
            put_number(&w, t->ne[k], 8);
        }
        put_number(&w, t->type, 4);
        put_number(&w, offset, 8);
        offset += (tensor_bytes(t) + 31) / 32 * 32;
    }
    put(&w, NULL, (32 - w.size % 32) % 32);
    for (size_t i = 0; i < p->n_tensors; i++) {
        const tensor *t = &p->tensors[i];
        const uint64_t wanted = tensor_bytes(t);
        const size_t have = t->data.size < wanted ? t->data.size : (size_t)wanted;
        put(&w, t->data.bytes, have);
        put(&w, NULL, (size_t)((wanted + 31) / 32 * 32 - have));
    }
    return w.size;
}

/* A key with another value, in `buffer`. */
static piece change_key(piece key, uint8_t *buffer, fuzz_random *random) {
    uint64_t n_name = 0, n = 0;
    uint32_t type = 0;
    memcpy(&n_name, key.bytes, 8);
    const size_t head = 8 + (size_t)n_name + 4;
    memcpy(&type, key.bytes + head - 4, 4);
    writer w = {buffer, 0, PIECE_BYTES_MAX};
    size_t value = head + (type == GGUF_TYPE_STRING ? 8 : type == GGUF_TYPE_ARRAY ? 12 : 0);
    if (key.size > PIECE_BYTES_MAX - 64 || fuzz_below(random, 8) == 0) { /* a number of any type */
        put(&w, key.bytes, head - 4);
        put_number(&w, fuzz_below(random, 13), 4);
        put_number(&w, fuzz_limit(random), 8);
        uint32_t now;
        memcpy(&now, buffer + head - 4, 4);
        return (piece){buffer, now == GGUF_TYPE_STRING || now == GGUF_TYPE_ARRAY ? w.size : head + scalar_bytes(now)};
    }
    if (fuzz_below(random, 16) == 0) { /* the name, of the same length */
        put(&w, key.bytes, key.size);
        if (n_name > 0) {
            buffer[8 + fuzz_below(random, (size_t)n_name)] = (uint8_t)fuzz_next(random);
        }
        return (piece){buffer, key.size};
    }
    put(&w, key.bytes, key.size);
    if (type == GGUF_TYPE_STRING) {
        w.size = value + LLVMFuzzerMutate(buffer + value, key.size - value, key.size - value + 64);
        n = w.size - value;
        memcpy(buffer + head, &n, 8);
    } else if (type == GGUF_TYPE_ARRAY) {
        uint32_t inner;
        memcpy(&inner, buffer + head, 4);
        memcpy(&n, buffer + head + 4, 8);
        if (inner == GGUF_TYPE_STRING && n > 0) { /* one of the texts */
            size_t at = value;
            uint64_t length = 0;
            for (uint64_t i = fuzz_below(random, (size_t)n) + 1; i > 0; i--) {
                at += i == 0 ? 0 : (size_t)length;
                memcpy(&length, buffer + at, 8);
                at += 8;
            }
            const size_t behind = at + (size_t)length;
            uint8_t text[512];
            if (length < sizeof text - 32) {
                memcpy(text, buffer + at, (size_t)length);
                const size_t now = LLVMFuzzerMutate(text, (size_t)length, (size_t)length + 16);
                memmove(buffer + at + now, buffer + behind, key.size - behind);
                memcpy(buffer + at, text, now);
                memcpy(buffer + at - 8, &(uint64_t){now}, 8);
                w.size = key.size - (size_t)length + now;
            }
        } else if (fuzz_below(random, 3) == 0) { /* fewer */
            n = n > 0 ? fuzz_below(random, (size_t)n) : 0;
            memcpy(buffer + head + 4, &n, 8);
            w.size = value + (size_t)n * scalar_bytes(inner);
        } else if (n > 0 && scalar_bytes(inner) > 0) {
            const uint64_t limit = fuzz_limit(random);
            memcpy(buffer + value + fuzz_below(random, (size_t)n) * scalar_bytes(inner), &limit, scalar_bytes(inner));
        }
    } else if (fuzz_below(random, 2) == 0) {
        put_number(&w, 0, 0);
        const uint64_t limit = fuzz_limit(random);
        memcpy(buffer + head, &limit, scalar_bytes(type));
    } else if (key.size > head) {
        LLVMFuzzerMutate(buffer + head, key.size - head, key.size - head);
    }
    return (piece){buffer, w.size};
}

static void change_tensor(tensor *t, fuzz_random *random) {
    switch (fuzz_below(random, 4)) {
    case 0:
        t->type = (uint32_t)fuzz_below(random, GGML_TYPE_COUNT + 1);
        break;
    case 1:
        t->n_dims = (uint32_t)(1 + fuzz_below(random, GGML_MAX_DIMS));
        for (uint32_t i = 0; i < t->n_dims; i++) {
            t->ne[i] = t->ne[i] > 0 ? t->ne[i] : 1;
        }
        break;
    default: {
        const uint32_t i = (uint32_t)fuzz_below(random, t->n_dims > 0 ? t->n_dims : 1);
        t->ne[i] = fuzz_below(random, 2) == 0 ? fuzz_limit(random) : t->ne[i] + fuzz_below(random, 3) - 1;
    }
    }
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    static parts p;
    static uint8_t changed[2 * PIECE_BYTES_MAX], copy[1 << 20];
    fuzz_random random = {seed};
    memset(&p, 0, sizeof p);
    if (size > sizeof copy || fuzz_below(&random, 8) == 0) {
        return LLVMFuzzerMutate(data, size, max_size);
    }
    memcpy(copy, data, size);
    if (!take_apart(copy, size, &p)) {
        return LLVMFuzzerMutate(data, size, max_size);
    }
    const size_t what = fuzz_below(&random, 16), key = fuzz_below(&random, p.n_keys + 1),
                 tensor_index = fuzz_below(&random, p.n_tensors + 1);
    if (what == 0 && key < p.n_keys) {
        p.keys[key] = p.keys[--p.n_keys];
    } else if (what == 1 && key < p.n_keys && p.n_keys < N_KEYS_MAX) {
        p.keys[p.n_keys++] = p.keys[key];
    } else if (what == 2 && tensor_index < p.n_tensors) {
        p.tensors[tensor_index] = p.tensors[--p.n_tensors];
    } else if (what == 3) { /* a vocabulary alone: small, and quickly read */
        p.n_tensors = 0;
    } else if (what < 7 && tensor_index < p.n_tensors) {
        change_tensor(&p.tensors[tensor_index], &random);
    } else if (key < p.n_keys && p.keys[key].size > 12) {
        p.keys[key] = change_key(p.keys[key], changed, &random);
    }
    return put_together(&p, 2 + (uint32_t)fuzz_below(&random, 2), data, max_size);
}

/* ---- seeds -------------------------------------------------------------------------------------- */

typedef struct seed {
    const char *name, *arch;
    tiny_vocabulary vocabulary;
    enum ggml_type type;
    int32_t n_experts;
    bool with_weights;
} seed;

static const seed seeds[] = {
    {"spm", "llama", TINY_VOCABULARY_SPM, GGML_TYPE_Q4_0, 0, false},
    {"bpe", "llama", TINY_VOCABULARY_BPE, GGML_TYPE_Q4_0, 0, false},
    {"chatglm2", "chatglm", TINY_VOCABULARY_CHATGLM2, GGML_TYPE_Q4_0, 0, false},
    {"chatglm3", "chatglm", TINY_VOCABULARY_CHATGLM3, GGML_TYPE_Q4_0, 0, false},
    {"glm4", "glm4", TINY_VOCABULARY_GLM4, GGML_TYPE_Q4_0, 0, false},
    {"qwen", "qwen2", TINY_VOCABULARY_QWEN, GGML_TYPE_Q4_0, 0, false},
    {"llama3", "llama", TINY_VOCABULARY_LLAMA3, GGML_TYPE_Q4_0, 0, false},
    {"model-llama", "llama", TINY_VOCABULARY_NONE, GGML_TYPE_Q4_0, 0, true},
    {"model-qwen", "qwen", TINY_VOCABULARY_NONE, GGML_TYPE_Q8_0, 0, true},
    {"model-qwen3", "qwen3", TINY_VOCABULARY_MISSING, GGML_TYPE_F16, 0, true},
    {"model-qwen3moe", "qwen3moe", TINY_VOCABULARY_NONE, GGML_TYPE_Q4_0, 2, true},
    {"model-chatglm", "chatglm", TINY_VOCABULARY_NONE, GGML_TYPE_Q5_0, 0, true},
    {"model-glm4", "glm4", TINY_VOCABULARY_NONE, GGML_TYPE_Q4_1, 0, true},
    {"model-gemma3", "gemma3", TINY_VOCABULARY_NONE, GGML_TYPE_BF16, 0, true},
};

static bool write_seed(const seed *s, const char *folder) {
    tiny_model_params m = tiny_model_default_params();
    m.arch = s->arch;
    m.vocabulary = s->vocabulary;
    m.type = s->type;
    m.n_layers = 1;
    m.n_embd = m.n_ff = 32;
    m.n_heads = 2;
    m.n_kv_heads = 1;
    m.n_ctx = 64;
    m.n_vocab = s->with_weights ? 16 : 285;
    m.n_experts = s->n_experts;
    m.n_experts_used = s->n_experts > 0 ? 1 : 0;
    m.chat_template = s->with_weights ? NULL : TINY_CHATML;
    m.tied = true;
    static parts p;
    static uint8_t bytes[1 << 20], out[1 << 20];
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, s->name);
    FILE *file = tiny_model_write(&m, path) ? fopen(path, "rb") : NULL;
    const size_t size = file != NULL ? fread(bytes, 1, sizeof bytes, file) : 0;
    if (file != NULL) {
        fclose(file);
    }
    if (!take_apart(bytes, size, &p)) {
        return false;
    }
    p.n_tensors = s->with_weights ? p.n_tensors : 0;
    return fuzz_write_file(folder, s->name, out, put_together(&p, 3, out, sizeof out));
}

bool fuzz_write_seeds(const char *folder) {
    bool written = true;
    for (size_t i = 0; i < sizeof seeds / sizeof seeds[0]; i++) {
        written = write_seed(&seeds[i], folder) && written;
    }
    return written;
}
