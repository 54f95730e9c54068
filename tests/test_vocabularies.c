/*
 * Vocabularies of the kinds that families have (cases.md row 15): byte pairs as in Llama 3 (a start token, added once), as in Qwen2
 * (none, though the file may name one) and as in SmolLM2; and what a chat of one turn becomes with each family's own template. Role
 * marks are single ids, a start token stands at the front once or never, whether the text brings one along or not.
 *
 * Files hold the vocabulary alone: 256 bytes and the special tokens of the family.
 */
#include "support/cmocka_all.h"

#include "text/text.h"

#include "gguf.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define N_BYTES 256
#define MAX_SPECIAL 8

typedef struct kind {
    const char *name, *pre;
    const char *special[MAX_SPECIAL]; /* ids from N_BYTES on */
    int32_t bos, eos;                 /* indices into special; bos -1: not named */
    int add_bos;                      /* 1, 0; -1: the file doesn't say */
    bool starts;                      /* what must come of it */
    const char *chat_template;
} kind;

/* Shortened from the families' own. */
static const kind kinds[] = {
    {"Llama 3",
     "llama-bpe",
     {"<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"},
     0,
     4,
     -1,
     true,
     "{% for m in messages %}{% set content = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] + "
     "'<|eot_id|>' "
     "%}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if "
     "add_generation_prompt "
     "%}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"},
    {"Llama 3, template without start",
     "llama-bpe",
     {"<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"},
     0,
     4,
     1,
     true,
     "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>{% endfor %}"
     "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"},
    {"Qwen2",
     "qwen2",
     {"<|endoftext|>", "<|im_start|>", "<|im_end|>"},
     0,
     2,
     0,
     false,
     "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
     "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"},
    {"Qwen2, nothing said",
     "qwen2",
     {"<|endoftext|>", "<|im_start|>", "<|im_end|>"},
     -1,
     2,
     -1,
     false,
     "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
     "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"},
    {"SmolLM2",
     "smollm",
     {"<|endoftext|>", "<|im_start|>", "<|im_end|>"},
     1,
     2,
     0,
     false,
     "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
     "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"},
};
#define N_KINDS (sizeof kinds / sizeof kinds[0])

/* The character that stands for a byte in byte-level vocabularies: itself where it is printable, else one from U+0100 on. */
static void byte_text(int byte, char out[4]) {
    int code = byte, n_before = 0;
    for (int b = 0; b <= byte; b++) {
        const bool printable = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
        code = printable ? byte : 256 + n_before;
        n_before += !printable;
    }
    if (code < 0x80) {
        snprintf(out, 4, "%c", code);
    } else {
        snprintf(out, 4, "%c%c", (char)(0xC0 | code >> 6), (char)(0x80 | (code & 0x3F)));
    }
}

static dt_vocab *open_kind(const kind *k) {
    enum { NORMAL = 1, CONTROL = 3 };
    static char bytes[N_BYTES][4];
    const char *tokens[N_BYTES + MAX_SPECIAL];
    int32_t types[N_BYTES + MAX_SPECIAL];
    size_t n = 0;
    for (; n < N_BYTES; n++) {
        byte_text((int)n, bytes[n]);
        tokens[n] = bytes[n];
        types[n] = NORMAL;
    }
    for (int i = 0; i < MAX_SPECIAL && k->special[i]; i++, n++) {
        tokens[n] = k->special[i];
        types[n] = CONTROL;
    }
    const char *merges[] = {"h i"}; /* libllama asks for at least the key; "hi" is no token, so it never applies */
    struct gguf_context *file = gguf_init_empty();
    gguf_set_val_str(file, "general.architecture", "llama");
    gguf_set_val_str(file, "tokenizer.ggml.model", "gpt2");
    gguf_set_val_str(file, "tokenizer.ggml.pre", k->pre);
    gguf_set_arr_str(file, "tokenizer.ggml.tokens", tokens, n);
    gguf_set_arr_data(file, "tokenizer.ggml.token_type", GGUF_TYPE_INT32, types, n);
    gguf_set_arr_str(file, "tokenizer.ggml.merges", merges, 1);
    if (k->bos >= 0) {
        gguf_set_val_u32(file, "tokenizer.ggml.bos_token_id", (uint32_t)(N_BYTES + k->bos));
    }
    gguf_set_val_u32(file, "tokenizer.ggml.eos_token_id", (uint32_t)(N_BYTES + k->eos));
    if (k->add_bos >= 0) {
        gguf_set_val_bool(file, "tokenizer.ggml.add_bos_token", k->add_bos != 0);
    }
    gguf_set_val_str(file, "tokenizer.chat_template", k->chat_template);
    char path[64];
    snprintf(path, sizeof path, "test_vocabularies_%ld.gguf", (long)getpid());
    assert_true(gguf_write_to_file(file, path, true));
    gguf_free(file);
    dt_vocab *vocab = NULL;
    dt_error error = {0};
    const dt_status status = dt_vocab_open(path, &vocab, &error);
    unlink(path);
    if (status != DT_OK) {
        fail_msg("%s: %s", k->name, error.message);
    }
    return vocab;
}

/* Tokens of a text as ./main reads it: special tokens parsed, a start token where the model has one. */
static size_t tokens_of(const dt_vocab *vocab, const char *text, int32_t **out) {
    size_t n = 0;
    dt_error error;
    assert_int_equal(dt_vocab_tokenize(vocab, text, strlen(text), true, true, out, &n, &error), DT_OK);
    return n;
}

static void expect_tokens(const kind *k, const dt_vocab *vocab, const char *text, const int32_t *want, size_t n_want) {
    int32_t *tokens;
    const size_t n = tokens_of(vocab, text, &tokens);
    if (n != n_want || memcmp(tokens, want, n * sizeof *tokens) != 0) {
        fail_msg("%s: '%s' has %zu tokens, the first of them %d; %zu expected", k->name, text, n, n > 0 ? (int)tokens[0] : -1,
                 n_want);
    }
    dt_free(tokens);
}

static void test_start_tokens(void **state) {
    (void)state;
    for (size_t i = 0; i < N_KINDS; i++) {
        const kind *k = &kinds[i];
        dt_vocab *vocab = open_kind(k);
        assert_int_equal(dt_vocab_start(vocab), k->starts ? N_BYTES + k->bos : -1);
        const int32_t hi[] = {N_BYTES + DT_MAX(k->bos, 0), 'h', 'i'};
        expect_tokens(k, vocab, "hi", k->starts ? hi : hi + 1, k->starts ? 3 : 2);
        char text[64]; /* with a start token of its own: as it is, never a second one */
        snprintf(text, sizeof text, "%shi", k->special[DT_MAX(k->bos, 0)]);
        expect_tokens(k, vocab, text, hi, 3);
        expect_tokens(k, vocab, "", hi, k->starts ? 1 : 0);
        dt_vocab_free(vocab);
    }
}

static void test_chats_of_one_turn(void **state) {
    (void)state;
#if DT_HAVE_LLAMA_COMMON
    for (size_t i = 0; i < N_KINDS; i++) {
        const kind *k = &kinds[i];
        dt_vocab *vocab = open_kind(k);
        const dt_chat_message message = {"user", "x"};
        char *text = NULL;
        dt_error error = {0};
        if (dt_vocab_chat_render(vocab, NULL, &message, 1, true, &text, &error) != DT_OK) {
            fail_msg("%s: %s", k->name, error.message);
        }
        const bool llama3 = k->starts;
        const int32_t open = N_BYTES + (llama3 ? 2 : 1), header_end = N_BYTES + 3, close = N_BYTES + (llama3 ? 4 : 2);
        int32_t want[64];
        size_t n = 0;
        static const char *const roles[] = {"user", "assistant"};
        if (llama3) {
            want[n++] = N_BYTES + k->bos;
        }
        for (int turn = 0; turn < 2; turn++) {
            want[n++] = open;
            for (const char *c = roles[turn]; *c; c++) {
                want[n++] = *c;
            }
            if (llama3) {
                want[n++] = header_end;
                want[n++] = '\n';
            }
            want[n++] = '\n';
            if (turn == 0) {
                want[n++] = 'x';
                want[n++] = close;
            }
            if (turn == 0 && !llama3) {
                want[n++] = '\n';
            }
        }
        expect_tokens(k, vocab, text, want, n);
        assert_true(dt_vocab_is_end(vocab, close));
        assert_int_equal(dt_vocab_token_bytes(vocab, open, false, NULL, 0), 0); /* no mark is ever printed */
        dt_free(text);
        dt_vocab_free(vocab);
    }
#endif
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_start_tokens),
        cmocka_unit_test(test_chats_of_one_turn),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
