/*
 * Writes a random model of any size to disk, for measuring speed where no real one can be had:
 *
 *   make_model out.gguf --layers 16 --embd 2048 --heads 32 --kv-heads 8 --head-dim 64 --ff 8192 --vocab 128256 --ctx 131072
 *              --rope-base 500000 --type q4_0 --tied
 *
 * Takes seconds and little memory: a matrix repeats a few random rows.
 */
#include "support/tiny_model.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int usage(const char *program) {
    fprintf(
        stderr,
        "usage: %s OUT.gguf [--layers N] [--embd N] [--heads N] [--kv-heads N] [--head-dim N] [--head-dim-v N] [--ff N]\n"
        "       [--vocab N] [--ctx N] [--rope-base X] [--rope-factors] [--type f32|f16|bf16|q4_0|q4_1|q5_0|q8_0|q4_K|q6_K]\n"
        "       [--tied] [--biases] [--bpe | --no-tokenizer] [--parts N] [--seed N] [--name S]\n"
        "       [--arch llama|smollm3|qwen|qwen2|qwen3|qwen3moe|chatglm|glm4|gemma3] [--window N] [--experts N --experts-used N]\n"
        "The shape left unsaid is that of Llama 3.2 1B.\n",
        program);
    return 2;
}

static bool same_name(const char *a, const char *b) {
    for (; *a && tolower((unsigned char)*a) == tolower((unsigned char)*b); a++, b++)
        ;
    return *a == *b;
}

static bool parse_type(const char *name, enum ggml_type *out) {
    for (int t = 0; t < GGML_TYPE_COUNT; t++) {
        const char *known = ggml_type_name((enum ggml_type)t);
        if (known && ggml_blck_size((enum ggml_type)t) > 0 && same_name(name, known)) {
            *out = (enum ggml_type)t;
            return !ggml_quantize_requires_imatrix(*out);
        }
    }
    return false;
}

/* Options without a value; false when `name` is none of them. */
static bool parse_switch(tiny_model_params *m, const char *name) {
    if (strcmp(name, "--tied") == 0) {
        m->tied = true;
    } else if (strcmp(name, "--biases") == 0) {
        m->biases = true;
    } else if (strcmp(name, "--rope-factors") == 0) {
        m->rope_freqs = true;
    } else if (strcmp(name, "--bpe") == 0) {
        m->vocabulary = TINY_VOCABULARY_BPE;
    } else if (strcmp(name, "--no-tokenizer") == 0) {
        m->vocabulary = TINY_VOCABULARY_NONE;
    } else {
        return false;
    }
    return true;
}

static bool parse_vocabulary(tiny_model_params *m, const char *name) {
    static const char *const names[] = {
        [TINY_VOCABULARY_SPM] = "spm",           [TINY_VOCABULARY_BPE] = "bpe",   [TINY_VOCABULARY_CHATGLM2] = "chatglm2",
        [TINY_VOCABULARY_CHATGLM3] = "chatglm3", [TINY_VOCABULARY_GLM4] = "glm4", [TINY_VOCABULARY_QWEN] = "qwen",
        [TINY_VOCABULARY_LLAMA3] = "llama3"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (names[i] && strcmp(names[i], name) == 0) {
            m->vocabulary = (tiny_vocabulary)i;
            return true;
        }
    }
    return false;
}

static bool parse_value(tiny_model_params *m, const char *name, const char *value) {
    const struct {
        const char *name;
        int32_t *out;
    } numbers[] = {
        {"--layers", &m->n_layers},
        {"--embd", &m->n_embd},
        {"--heads", &m->n_heads},
        {"--kv-heads", &m->n_kv_heads},
        {"--head-dim", &m->head_dim},
        {"--head-dim-v", &m->head_dim_v},
        {"--ff", &m->n_ff},
        {"--vocab", &m->n_vocab},
        {"--ctx", &m->n_ctx},
        {"--parts", &m->n_parts},
        {"--window", &m->window},
        {"--experts", &m->n_experts},
        {"--experts-used", &m->n_experts_used},
    };
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        if (strcmp(name, numbers[i].name) == 0) {
            char *end;
            *numbers[i].out = (int32_t)strtol(value, &end, 10);
            return *value != '\0' && *end == '\0';
        }
    }
    if (strcmp(name, "--rope-base") == 0) {
        m->rope_base = strtof(value, NULL);
        return m->rope_base > 0.0f;
    }
    if (strcmp(name, "--seed") == 0) {
        m->seed = strtoull(value, NULL, 10);
        return true;
    }
    if (strcmp(name, "--vocabulary") == 0) {
        return parse_vocabulary(m, value);
    }
    if (strcmp(name, "--favourite") == 0) {
        m->favourite = 1 + atoi(value);
        return true;
    }
    if (strcmp(name, "--arch") == 0) {
        m->arch = value;
        return true;
    }
    if (strcmp(name, "--name") == 0) {
        m->name = value;
        return true;
    }
    return strcmp(name, "--type") == 0 && parse_type(value, &m->type);
}

int main(int argc, char **argv) {
    tiny_model_params m = tiny_model_default_params();
    m.name = "random";
    m.n_layers = 16;
    m.n_embd = 2048;
    m.n_heads = 32;
    m.n_kv_heads = 8;
    m.head_dim = 64;
    m.n_ff = 8192;
    m.n_vocab = 128256;
    m.n_ctx = 131072;
    m.rope_base = 500000.0f;
    m.type = GGML_TYPE_Q4_0;
    m.is_fast = true;
    if (argc < 2 || argv[1][0] == '-') {
        return usage(argv[0]);
    }
    for (int i = 2; i < argc; i++) {
        if (parse_switch(&m, argv[i])) {
            continue;
        }
        if (i + 1 == argc || !parse_value(&m, argv[i], argv[i + 1])) {
            fprintf(stderr, "%s: bad option or value: %s\n", argv[0], argv[i]);
            return usage(argv[0]);
        }
        i++;
    }
    return tiny_model_write(&m, argv[1]) ? 0 : 1;
}
