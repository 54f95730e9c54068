/*
 * Tokenizer, chat templates, grammars and samplers, alone: no weights are read.
 *
 * Two vocabularies: a handmade SentencePiece one with a start token (written by this file, so these tests always run) and
 * that of the real small model in DT_TEST_MODEL, whose tests are skipped, and counted as such, when it isn't there.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "text/text.h"

#include "gguf.h"

#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define N_TINY (3 + 256 + 6)
#define TINY_START 1
#define TINY_END 2
#define TINY_BYTE(b) (3 + (b))
#define TINY_SPACE_X (3 + 256)

static char tiny_path[64];
static dt_vocab *tiny; /* <unk> <s> </s>, 256 bytes, "▁x" "▁" "[INST]" "1" "x" "h" */
static dt_vocab *real; /* NULL without DT_TEST_MODEL */

/* ---- fixtures ----------------------------------------------------------------------------------- */

static void write_tiny_model(const char *path, bool with_template) {
    enum { UNKNOWN = 2, CONTROL = 3, NORMAL = 1, BYTE = 6 };
    static char bytes[256][8];
    const char *tokens[N_TINY] = {"<unk>", "<s>", "</s>"};
    float scores[N_TINY] = {0};
    int32_t types[N_TINY] = {UNKNOWN, CONTROL, CONTROL};
    for (int b = 0; b < 256; b++) {
        snprintf(bytes[b], sizeof bytes[b], "<0x%02X>", (unsigned)b);
        tokens[TINY_BYTE(b)] = bytes[b];
        types[TINY_BYTE(b)] = BYTE;
    }
    const char *const words[6] = {"\xE2\x96\x81x", "\xE2\x96\x81", "[INST]", "1", "x", "h"};
    for (int i = 0; i < 6; i++) {
        tokens[TINY_SPACE_X + i] = words[i];
        types[TINY_SPACE_X + i] = NORMAL;
        scores[TINY_SPACE_X + i] = (float)-i;
    }
    struct gguf_context *file = gguf_init_empty();
    gguf_set_val_str(file, "general.architecture", "llama");
    gguf_set_val_str(file, "tokenizer.ggml.model", "llama");
    gguf_set_arr_str(file, "tokenizer.ggml.tokens", tokens, N_TINY);
    gguf_set_arr_data(file, "tokenizer.ggml.scores", GGUF_TYPE_FLOAT32, scores, N_TINY);
    gguf_set_arr_data(file, "tokenizer.ggml.token_type", GGUF_TYPE_INT32, types, N_TINY);
    gguf_set_val_u32(file, "tokenizer.ggml.bos_token_id", TINY_START);
    gguf_set_val_u32(file, "tokenizer.ggml.eos_token_id", TINY_END);
    gguf_set_val_bool(file, "tokenizer.ggml.add_bos_token", true);
    if (with_template) {
        gguf_set_val_str(file, "tokenizer.chat_template",
                         "{{ bos_token }}{% for m in messages %}[INST] {{ m['content'] }}{% endfor %}");
    }
    assert_true(gguf_write_to_file(file, path, true));
    gguf_free(file);
}

static int set_up(void **state) {
    (void)state;
    dt_error error;
    snprintf(tiny_path, sizeof tiny_path, "test_text_%ld.gguf", (long)getpid());
    write_tiny_model(tiny_path, true);
    if (dt_vocab_open(tiny_path, &tiny, &error) != DT_OK) {
        fprintf(stderr, "%s\n", error.message);
        return -1;
    }
    const char *path = getenv("DT_TEST_MODEL");
    return path == NULL || access(path, R_OK) != 0 || dt_vocab_open(path, &real, &error) == DT_OK ? 0 : -1;
}

static int tear_down(void **state) {
    (void)state;
    dt_vocab_free(tiny);
    dt_vocab_free(real);
    return unlink(tiny_path);
}

static void need_real(void) {
    if (real == NULL) {
        skip();
    }
}

static size_t tokens_of(const dt_vocab *vocab, const char *text, size_t n, bool special, int32_t **out) {
    size_t count = 0;
    dt_error error;
    assert_int_equal(dt_vocab_tokenize(vocab, text, n, special, true, out, &count, &error), DT_OK);
    return count;
}

static void assert_tokens(const dt_vocab *vocab, const char *text, bool special, const int32_t *expected, size_t n_expected) {
    int32_t *tokens;
    const size_t n = tokens_of(vocab, text, strlen(text), special, &tokens);
    assert_int_equal(n, n_expected);
    assert_memory_equal(tokens, expected, n * sizeof *tokens);
    dt_free(tokens);
}

/* The text of `tokens`, special ones included; free with free(). */
static char *text_of(const dt_vocab *vocab, const int32_t *tokens, size_t n, size_t *out_bytes) {
    char *text = malloc(n * 256 + 1);
    size_t used = 0;
    for (size_t i = 0; i < n; i++) {
        used += dt_vocab_token_bytes(vocab, tokens[i], true, text + used, 256);
    }
    text[used] = 0;
    *out_bytes = used;
    return text;
}

/* ---- vocabulary --------------------------------------------------------------------------------- */

static void test_open_errors(void **state) {
    (void)state;
    dt_error error = {0};
    dt_vocab *vocab = tiny;
    assert_int_equal(dt_vocab_open("/no such file.gguf", &vocab, &error), DT_ERR_TOKENIZER);
    assert_null(vocab);
    assert_non_null(strstr(error.message, "/no such file.gguf"));
    assert_null(strchr(error.message, '\n'));
}

static void test_start_token_never_doubled(void **state) {
    (void)state;
    assert_int_equal(dt_vocab_start(tiny), TINY_START);
    const int32_t once[] = {TINY_START, TINY_SPACE_X};
    assert_tokens(tiny, "x", true, once, 2);
    assert_tokens(tiny, "<s>x", true, once, 2);
    assert_tokens(tiny, "<s><s>x", true, once, 2);
    assert_tokens(tiny, "<s>x", false, once, 2);
    assert_tokens(tiny, "", true, once, 1);
    assert_tokens(tiny, "", false, once, 0);
    dt_error error;
    char *text;
    const dt_chat_message message = {"user", "x"};
    assert_int_equal(dt_vocab_chat_render(tiny, NULL, &message, 1, true, &text, &error), DT_OK);
    int32_t *tokens;
    const size_t n = tokens_of(tiny, text, strlen(text), true, &tokens);
    assert_true(n > 2);
    assert_int_equal(tokens[0], TINY_START);
    assert_int_not_equal(tokens[1], TINY_START);
    dt_free(tokens);
    dt_free(text);
}

static void test_any_bytes(void **state) {
    (void)state;
    const struct {
        const char *text;
        size_t n;
    } cases[] = {{"a\0b", 3},
                 {"\xFF\xFE\xFF", 3},
                 {"Gr\xFC\xDFgott", 8},
                 {"\xE2\x82", 2},
                 {"\xF0\x9F\x98\x80", 4},
                 {"\xEF\xBB\xBFtext", 7},
                 {"a\r\nb\r\n", 6},
                 {"\0", 1},
                 {"\xC0\x80\xED\xA0\x80\xF8\x88\x80\x80\x80", 10}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int32_t *tokens;
        size_t n = tokens_of(tiny, cases[i].text, cases[i].n, false, &tokens), bytes;
        char *back = text_of(tiny, tokens, n, &bytes); /* byte tokens: nothing is lost; SentencePiece adds a space in front */
        assert_int_equal(bytes, cases[i].n + 1);
        assert_memory_equal(back + 1, cases[i].text, cases[i].n);
        free(back);
        dt_free(tokens);
        if (real != NULL) {
            n = tokens_of(real, cases[i].text, cases[i].n, false, &tokens);
            assert_true(n > 0);
            dt_free(tokens);
        }
    }
}

static void test_token_bytes(void **state) {
    (void)state;
    char buffer[8] = "........";
    assert_int_equal(dt_vocab_token_bytes(tiny, TINY_START, false, buffer, 8), 0);
    assert_int_equal(dt_vocab_token_bytes(tiny, TINY_START, true, buffer, 8), 3);
    assert_memory_equal(buffer, "<s>", 3);
    assert_int_equal(dt_vocab_token_bytes(tiny, TINY_SPACE_X, true, buffer, 1), 2);
    assert_memory_equal(buffer, " s>", 3);
    assert_int_equal(dt_vocab_token_bytes(tiny, TINY_SPACE_X, true, NULL, 0), 2);
    assert_int_equal(dt_vocab_token_bytes(tiny, TINY_BYTE(0), true, buffer, 8), 1);
    assert_int_equal(dt_vocab_token_bytes(tiny, -1, true, buffer, 8), 0);
    assert_int_equal(dt_vocab_token_bytes(tiny, N_TINY, true, buffer, 8), 0);
    assert_true(dt_vocab_is_end(tiny, TINY_END));
    assert_false(dt_vocab_is_end(tiny, TINY_SPACE_X) || dt_vocab_is_end(tiny, -1) || dt_vocab_is_end(tiny, N_TINY));
}

static void test_real_tokens(void **state) {
    (void)state;
    need_real();
    assert_int_equal(dt_vocab_size(real), 49152);
    assert_int_equal(dt_vocab_start(real), -1); /* SmolLM2 puts none in front */
    const int32_t marks[] = {1, 2};
    assert_tokens(real, "<|im_start|><|im_end|>", true, marks, 2);
    int32_t *tokens;
    size_t n = 0, bytes;
    dt_error error;
    assert_int_equal(dt_vocab_tokenize(real, "<|im_start|>", 12, true, false, &tokens, &n, &error), DT_OK);
    assert_true(n > 1); /* text stays text unless special tokens are asked for */
    dt_free(tokens);
    const char *text = "Der Größenwahn, 大模型 и \xF0\x9F\x98\x80\r\n\tend  ";
    n = tokens_of(real, text, strlen(text), true, &tokens);
    char *back = text_of(real, tokens, n, &bytes);
    assert_string_equal(back, text);
    free(back);
    dt_free(tokens);
}

static void test_long_runs(void **state) {
    (void)state;
    const size_t n_bytes = 500000;
#if defined(__SANITIZE_THREAD__) /* which looks at every byte of each copy that grows, for ten minutes */
    const size_t n_tokenized = 20000;
#else
    const size_t n_tokenized = n_bytes;
#endif
    char *text = malloc(n_bytes + 1);
    for (int kind = 0; kind < 3; kind++) {
        memset(text, kind == 0 ? 'a' : kind == 1 ? ' ' : '\n', n_bytes);
        int32_t *tokens;
        assert_true(tokens_of(real != NULL ? real : tiny, text, n_tokenized, true, &tokens) > 0);
        dt_free(tokens);
        text[n_bytes] = text[0];
        size_t n;
        dt_error error;
        assert_int_equal(dt_vocab_tokenize(tiny, text, n_bytes + 1, true, true, &tokens, &n, &error), DT_ERR_LIMIT);
    }
    free(text);
}

/* ---- chat templates ----------------------------------------------------------------------------- */

static void assert_render(const dt_vocab *vocab, const char *name, bool open, const char *expected) {
    const dt_chat_message messages[] = {{"system", "S"}, {"user", "U"}};
    char *text;
    dt_error error;
    const dt_status status = dt_vocab_chat_render(vocab, name, messages, 2, open, &text, &error);
    if (status != DT_OK) {
        fprintf(stderr, "%s\n", error.message);
    }
    assert_int_equal(status, DT_OK);
    assert_string_equal(text, expected);
    dt_free(text);
}

static void assert_render_fails(const char *name, dt_status code, const char *fragment) {
    const dt_chat_message message = {"user", "U"};
    char *text = NULL;
    dt_error error = {0};
    assert_int_equal(dt_vocab_chat_render(tiny, name, &message, 1, true, &text, &error), code);
    assert_null(text);
    if (strstr(error.message, fragment) == NULL) {
        fprintf(stderr, "no '%s' in: %s\n", fragment, error.message);
    }
    assert_non_null(strstr(error.message, fragment));
    assert_null(strchr(error.message, '\n'));
}

static void test_templates(void **state) {
    (void)state;
    assert_true(dt_vocab_has_chat_template(tiny));
#if DT_HAVE_LLAMA_COMMON
    assert_render(tiny, NULL, true, "[INST] S[INST] U");
#endif
    assert_render(tiny, "chatml", true, "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n");
    assert_render(tiny, "chatml", false, "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n");
#if DT_HAVE_LLAMA_COMMON
    assert_render(tiny,
                  "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}",
                  true, "s:S;u:U;a:");
    assert_render_fails("{{ raise_exception('roles must alternate') }}", DT_ERR_FORMAT, "roles must alternate");
    assert_render_fails("{% for m in messages %}", DT_ERR_FORMAT, "template failed: ");
    assert_render_fails("{{ 1 + }}", DT_ERR_FORMAT, "template failed: ");
    char *deep = malloc(400001);
    memset(deep, '(', 400000);
    deep[400000] = 0;
    memcpy(deep, "{{", 2);
    assert_render_fails(deep, DT_ERR_LIMIT, "400000 bytes");
    deep[5000] = 0;
    assert_render_fails(deep, DT_ERR_LIMIT, "deep");
    deep[990] = 0;
    assert_render_fails(deep, DT_ERR_FORMAT, "template failed: ");
    for (int i = 2; i + 4 < 250000; i += 4) {
        memcpy(deep + i, "not ", 5);
    }
    assert_render_fails(deep, DT_ERR_FORMAT, "template failed: "); /* deep without brackets: must not overflow the stack */
    free(deep);
#endif
    assert_render_fails("no-such-template", DT_ERR_ARGUMENT, "chatml");
    char *text;
    dt_error error;
    assert_int_equal(dt_vocab_chat_render(tiny, NULL, NULL, 0, true, &text, &error), DT_ERR_ARGUMENT);
}

/* A host program that has set a locale with commas (cases.md row 23). */
static void test_templates_in_a_german_host(void **state) {
    (void)state;
#if DT_HAVE_LLAMA_COMMON
    if (setlocale(LC_ALL, "de_DE.UTF-8") == NULL) {
        skip();
    }
    char number[16];
    snprintf(number, sizeof number, "%.1f", 0.5);
    assert_string_equal(number, "0,5");
    assert_render(tiny, "{{ 0.5 + 0.25 }} {{ '2.5' | float }} {{ 1.5 | string }}", true, "0.75 2.5 1.5");
    setlocale(LC_ALL, "C");
#endif
}

static void test_real_template(void **state) {
    (void)state;
    need_real();
    assert_true(dt_vocab_has_chat_template(real));
    const char *expected = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n";
    assert_render(real, NULL, true, expected);
    int32_t *tokens;
    const size_t n = tokens_of(real, expected, strlen(expected), true, &tokens);
    assert_int_equal(tokens[0], 1); /* role marks are single ids, the first one not doubled */
    assert_int_not_equal(tokens[1], 1);
    size_t marks = 0;
    for (size_t i = 0; i < n; i++) {
        marks += tokens[i] == 1 ? 1 : 0;
    }
    assert_int_equal(marks, 3);
    dt_free(tokens);
}

static void test_no_template(void **state) {
    (void)state;
    char path[80];
    snprintf(path, sizeof path, "test_text_%ld_b.gguf", (long)getpid());
    write_tiny_model(path, false);
    dt_vocab *vocab;
    dt_error error;
    assert_int_equal(dt_vocab_open(path, &vocab, &error), DT_OK);
    assert_false(dt_vocab_has_chat_template(vocab));
    const dt_chat_message message = {"user", "U"};
    char *text;
    assert_int_equal(dt_vocab_chat_render(vocab, NULL, &message, 1, true, &text, &error), DT_ERR_UNSUPPORTED);
    dt_vocab_free(vocab);
    unlink(path);
}

/* ---- sampler ------------------------------------------------------------------------------------ */

static dt_sampler *sampler_with(const dt_vocab *vocab, int32_t n, dt_sampler_params params) {
    dt_sampler *sampler;
    dt_error error;
    const dt_status status = dt_text_sampler_new(vocab, n, 512, &params, &sampler, &error);
    if (status != DT_OK) {
        fprintf(stderr, "%s\n", error.message);
    }
    assert_int_equal(status, DT_OK);
    return sampler;
}

static int32_t sample(dt_sampler *sampler, const float *logits, float *probability) {
    int32_t token = -1;
    dt_error error;
    const dt_status status = dt_sampler_sample(sampler, logits, &token, probability, &error);
    if (status != DT_OK) {
        fprintf(stderr, "%s\n", error.message);
    }
    assert_int_equal(status, DT_OK);
    return token;
}

static uint32_t random_next(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static void random_logits(float *logits, int n, uint32_t seed) {
    for (int i = 0; i < n; i++) {
        logits[i] = (float)(random_next(&seed) % 20000) / 1000.0f - 10.0f;
    }
}

static void test_greedy_and_probability(void **state) {
    (void)state;
    dt_sampler_params params = dt_sampler_default_params();
    params.temp = 0;
    for (int n = 1; n < 100; n += 7) {
        float logits[100];
        random_logits(logits, n, (uint32_t)n);
        logits[n / 2] = -INFINITY;
        logits[n - 1] = 3.0f; /* a tie or not: the first one wins */
        int32_t best = 0;
        double sum = 0;
        for (int i = 0; i < n; i++) {
            best = logits[i] > logits[best] ? i : best;
        }
        for (int i = 0; i < n; i++) {
            sum += exp((double)logits[i] - (double)logits[best]);
        }
        dt_sampler *sampler = sampler_with(NULL, n, params);
        float probability = -1;
        assert_int_equal(sample(sampler, logits, &probability), best);
        assert_true(dt_is_finite(probability) && fabs((double)probability - 1.0 / sum) <= 1e-5);
        dt_sampler_free(sampler);
    }
}

static void test_same_seed_same_tokens(void **state) {
    (void)state;
    float logits[1000];
    dt_sampler_params params = dt_sampler_default_params();
    params.temp = 1.5f;
    dt_sampler *first = sampler_with(NULL, 1000, params);
    params.seed = dt_sampler_seed(first);
    assert_int_not_equal(params.seed, DT_SEED_RANDOM);
    dt_sampler *second = sampler_with(NULL, 1000, params);
    assert_int_equal(dt_sampler_seed(second), params.seed);
    params.seed++;
    dt_sampler *other = sampler_with(NULL, 1000, params);
    int different = 0;
    for (uint32_t i = 0; i < 50; i++) {
        random_logits(logits, 1000, i);
        float p = -1, naive = 0;
        const int32_t token = sample(first, logits, &p);
        assert_int_equal(token, sample(second, logits, NULL));
        different += token != sample(other, logits, NULL);
        for (int j = 0; j < 1000; j++) {
            naive += expf(logits[j] - logits[token]);
        }
        assert_true(dt_is_finite(p) && fabsf(p * naive - 1.0f) <= 1e-3f);
    }
    assert_true(different > 0);
    dt_sampler_free(first);
    dt_sampler_free(second);
    dt_sampler_free(other);
}

static void test_filters(void **state) {
    (void)state;
    const float logits[6] = {1.0f, 5.0f, 4.9f, -2.0f, 4.8f, 0.0f};
    const struct {
        int32_t top_k;
        float top_p, min_p;
        unsigned expected; /* bit set of tokens that may come */
    } cases[] = {{1, 1, 0, 2}, {2, 1, 0, 6}, {0, 0.1f, 0, 2}, {0, 1, 0.9f, 6}, {3, 1, 0, 22}, {0, 0.999f, 0.5f, 22}};
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        dt_sampler_params params = dt_sampler_default_params();
        params.top_k = cases[c].top_k;
        params.top_p = cases[c].top_p;
        params.min_p = cases[c].min_p;
        params.temp = 1;
        params.seed = 7;
        dt_sampler *sampler = sampler_with(NULL, 6, params);
        unsigned seen = 0;
        for (int i = 0; i < 300; i++) {
            seen |= 1u << sample(sampler, logits, NULL);
        }
        assert_int_equal(seen, cases[c].expected);
        dt_sampler_free(sampler);
    }
}

static void test_repeat_penalty(void **state) {
    (void)state;
    const float logits[4] = {2.0f, 3.0f, 2.5f, -1.0f};
    dt_sampler_params params = dt_sampler_default_params();
    params.temp = 0;
    params.repeat_penalty = 2.0f;
    dt_error error;
    dt_sampler *sampler = sampler_with(NULL, 4, params);
    assert_int_equal(sample(sampler, logits, NULL), 1);
    assert_int_equal(dt_sampler_accept(sampler, 1, true, &error), DT_OK);
    assert_int_equal(sample(sampler, logits, NULL), 2);
    assert_int_equal(dt_sampler_accept(sampler, 2, false, &error), DT_OK); /* prompt tokens count too */
    assert_int_equal(sample(sampler, logits, NULL), 0);
    assert_int_equal(dt_sampler_accept(sampler, 4, true, &error), DT_ERR_ARGUMENT);
    assert_int_equal(dt_sampler_accept(sampler, -1, true, &error), DT_ERR_ARGUMENT);
    dt_sampler_free(sampler);
}

static void test_bad_logits(void **state) {
    (void)state;
    float logits[40];
    dt_error error;
    int32_t token;
    for (int variant = 0; variant < 2; variant++) {
        dt_sampler_params params = dt_sampler_default_params();
        params.temp = variant == 0 ? 0.0f : 0.8f;
        dt_sampler *sampler = sampler_with(NULL, 40, params);
        for (int at = 0; at < 40; at++) {
            random_logits(logits, 40, 1);
            logits[at] = at % 2 == 0 ? NAN : INFINITY;
            error.message[0] = 0;
            assert_int_equal(dt_sampler_sample(sampler, logits, &token, NULL, &error), DT_ERR_COMPUTE);
            assert_true(strlen(error.message) > 20);
        }
        for (int i = 0; i < 40; i++) {
            logits[i] = -INFINITY;
        }
        assert_int_equal(dt_sampler_sample(sampler, logits, &token, NULL, &error), DT_ERR_ARGUMENT);
        logits[17] = -3.0f;
        assert_int_equal(sample(sampler, logits, NULL), 17);
        dt_sampler_free(sampler);
    }
}

static void test_bad_params(void **state) {
    (void)state;
    const dt_sampler_params good = dt_sampler_default_params();
    dt_sampler_params bad[8];
    for (int i = 0; i < 8; i++) {
        bad[i] = good;
    }
    bad[0].temp = NAN;
    bad[1].top_p = INFINITY;
    bad[2].repeat_penalty = 0;
    bad[3].repeat_penalty = -1;
    bad[4].grammar = "root ::= \"x\"";
    bad[4].json_schema = "{}";
    bad[5].grammar = bad[4].grammar; /* no vocabulary */
    bad[6].json_schema = "{}";
    bad[7].ignore_end = true;
    for (int i = 0; i < 8; i++) {
        dt_sampler *sampler = NULL;
        dt_error error = {0};
        assert_int_equal(dt_text_sampler_new(NULL, 10, 10, &bad[i], &sampler, &error), i < 5 ? DT_ERR_ARGUMENT : DT_ERR_TOKENIZER);
        assert_null(sampler);
        assert_true(error.message[0] != 0);
    }
}

/* What looks back beyond the context looks back as far as the context. */
static void test_repeat_last_n(void **state) {
    (void)state;
    const int32_t last_n[] = {1000, -1, 512, 100};
    const float logits[] = {1.0f, 0.9f, 0.0f};
    dt_error error;
    for (int i = 0; i < 4; i++) {
        dt_sampler_params params = dt_sampler_default_params();
        params.temp = 0;
        params.repeat_penalty = 2;
        params.repeat_last_n = last_n[i];
        dt_sampler *sampler = sampler_with(NULL, 3, params); /* of a model of 512 tokens */
        const int32_t n_seen = last_n[i] == 100 ? 100 : 512;
        for (int32_t t = 0; t < n_seen; t++) {
            assert_int_equal(dt_sampler_accept(sampler, t == 0 ? 0 : 2, false, &error), DT_OK);
        }
        assert_int_equal(sample(sampler, logits, NULL), 1);
        assert_int_equal(dt_sampler_accept(sampler, 2, false, &error), DT_OK);
        assert_int_equal(sample(sampler, logits, NULL), 0);
        dt_sampler_free(sampler);
    }
}

static void test_end_and_padding(void **state) {
    (void)state;
    float logits[N_TINY + 8];
    random_logits(logits, N_TINY + 8, 3);
    for (int variant = 0; variant < 2; variant++) {
        dt_sampler_params params = dt_sampler_default_params();
        params.temp = variant == 0 ? 0.0f : 0.8f;
        logits[N_TINY + 3] = 99.0f; /* a padding row */
        logits[TINY_END] = 50.0f;
        logits[TINY_SPACE_X] = 40.0f;
        dt_sampler *sampler = sampler_with(tiny, N_TINY + 8, params);
        assert_int_equal(sample(sampler, logits, NULL), TINY_END);
        dt_sampler_free(sampler);
        params.ignore_end = true;
        sampler = sampler_with(tiny, N_TINY + 8, params);
        float p = 0;
        assert_int_equal(sample(sampler, logits, &p), TINY_SPACE_X);
        assert_true(dt_is_finite(p) && fabsf(p - 4.54e-5f) <= 1e-6f); /* under the unmodified logits */
        dt_sampler_free(sampler);
    }
}

/* ---- grammar ------------------------------------------------------------------------------------ */

static void assert_grammar_fails(const char *grammar, const char *schema, dt_status code, const char *fragment) {
    dt_sampler_params params = dt_sampler_default_params();
    params.grammar = grammar;
    params.json_schema = schema;
    dt_sampler *sampler = NULL;
    dt_error error = {0};
    assert_int_equal(dt_text_sampler_new(tiny, N_TINY, 512, &params, &sampler, &error), code);
    if (strstr(error.message, fragment) == NULL) {
        fprintf(stderr, "no '%s' in: %s\n", fragment, error.message);
    }
    assert_non_null(strstr(error.message, fragment));
    assert_null(strchr(error.message, '\n'));
}

static void test_grammar_errors(void **state) {
    (void)state;
    assert_grammar_fails("root ::= (", NULL, DT_ERR_ARGUMENT, "grammar can't be used");
    assert_grammar_fails("root := \"x\"", NULL, DT_ERR_ARGUMENT, "grammar can't be used");
    assert_grammar_fails("other ::= \"x\"", NULL, DT_ERR_ARGUMENT, "root");
    assert_grammar_fails("root ::= root \"x\"", NULL, DT_ERR_ARGUMENT, "left recursion");
    assert_grammar_fails("root ::= missing", NULL, DT_ERR_ARGUMENT, "grammar can't be used");
    assert_grammar_fails("", NULL, DT_ERR_ARGUMENT, "empty");
    char *deep = malloc(100001);
    memset(deep, '(', 100000);
    deep[100000] = 0;
    memcpy(deep, "root ::= ", 9);
    assert_grammar_fails(deep, NULL, DT_ERR_LIMIT, "deep");
#if DT_HAVE_LLAMA_COMMON
    assert_grammar_fails(NULL, "{\"type\": ", DT_ERR_ARGUMENT, "JSON schema can't be used");
    assert_grammar_fails(NULL, "[1]", DT_ERR_ARGUMENT, "must be an object");
    assert_grammar_fails(NULL, "{\"type\": \"nonsense\"}", DT_ERR_ARGUMENT, "JSON schema can't be used");
    memset(deep, '[', 100000);
    assert_grammar_fails(NULL, deep, DT_ERR_LIMIT, "deep");
    deep[900] = 0; /* within the limit: parsed, not crashed on */
    assert_grammar_fails(NULL, deep, DT_ERR_ARGUMENT, "JSON schema can't be used");
#endif
    free(deep);
}

/* Generates with random logits until an end token, and checks that accept agrees with sample. */
static char *generate(const dt_vocab *vocab, dt_sampler_params params, int limit) {
    const int32_t n_vocab = dt_vocab_size(vocab);
    float *logits = malloc((size_t)n_vocab * sizeof *logits);
    int32_t *tokens = malloc((size_t)limit * sizeof *tokens);
    size_t n = 0, bytes;
    dt_error error;
    dt_sampler *sampler = sampler_with(vocab, n_vocab, params);
    for (int i = 0; i < limit; i++) {
        random_logits(logits, n_vocab, (uint32_t)i + 1000);
        const int32_t token = sample(sampler, logits, NULL);
        assert_int_equal(dt_sampler_accept(sampler, token, true, &error), DT_OK);
        if (dt_vocab_is_end(vocab, token)) {
            break;
        }
        tokens[n++] = token;
    }
    dt_sampler_free(sampler);
    char *text = text_of(vocab, tokens, n, &bytes);
    free(tokens);
    free(logits);
    return text;
}

static void test_grammar_keeps_to_it(void **state) {
    (void)state;
    for (int variant = 0; variant < 2; variant++) {
        dt_sampler_params params = dt_sampler_default_params();
        params.temp = variant == 0 ? 0.0f : 1.0f;
        params.grammar = "root ::= \"x\" [0-9] \"x\"";
        char *text = generate(tiny, params, 20);
        assert_int_equal(strlen(text), 3);
        assert_true(text[0] == 'x' && text[1] >= '0' && text[1] <= '9' && text[2] == 'x');
        free(text);
    }
}

static void test_grammar_dead_ends(void **state) {
    (void)state;
    dt_error error = {0};
    int32_t token;
    float logits[N_TINY];
    random_logits(logits, N_TINY, 9);
    dt_sampler_params params = dt_sampler_default_params();
    params.grammar = "root ::= \"x\"";
    params.ignore_end = true;
    dt_sampler *sampler = sampler_with(tiny, N_TINY, params);
    assert_int_equal(dt_sampler_accept(sampler, TINY_END, true, &error), DT_ERR_ARGUMENT); /* libllama would abort */
    assert_int_equal(dt_sampler_accept(sampler, TINY_SPACE_X, true, &error), DT_ERR_ARGUMENT);
    assert_int_equal(dt_sampler_accept(sampler, TINY_BYTE('x'), true, &error), DT_OK);
    assert_int_equal(dt_sampler_sample(sampler, logits, &token, NULL, &error), DT_ERR_ARGUMENT); /* finished, but may not end */
    assert_non_null(strstr(error.message, "grammar"));
    assert_int_equal(dt_sampler_accept(sampler, TINY_END, true, &error), DT_OK);
    assert_int_equal(dt_sampler_accept(sampler, TINY_SPACE_X, false, &error), DT_OK); /* prompt tokens don't move the grammar */
    dt_sampler_free(sampler);
}

static void test_json_schema(void **state) {
    (void)state;
#if DT_HAVE_LLAMA_COMMON
    need_real();
    dt_sampler_params params = dt_sampler_default_params();
    params.seed = 5;
    params.json_schema = "{\"type\":\"object\",\"properties\":{\"name\":{\"type\":\"string\",\"maxLength\":5},"
                         "\"age\":{\"type\":\"integer\",\"minimum\":0,\"maximum\":99}},\"required\":[\"name\",\"age\"]}";
    char *text = generate(real, params, 100);
    assert_true(text[0] == '{' && text[strlen(text) - 1] == '}');
    assert_non_null(strstr(text, "\"name\""));
    assert_non_null(strstr(text, "\"age\""));
    free(text);
#else
    assert_grammar_fails(NULL, "{}", DT_ERR_UNSUPPORTED, "grammar");
#endif
}

/* ---- log ---------------------------------------------------------------------------------------- */

static int n_lines, n_broken_lines;

static void count_line(dt_log_level level, const char *line, void *user) {
    (void)level;
    (void)user;
    n_lines++;
    n_broken_lines += line[0] == 0 || strchr(line, '\n') != NULL;
}

static void test_log(void **state) {
    (void)state;
    dt_vocab *vocab;
    dt_error error;
    dt_log_set(count_line, NULL);
    assert_int_equal(dt_vocab_open(tiny_path, &vocab, &error), DT_OK);
    dt_log_set(NULL, NULL);
    dt_vocab_free(vocab);
    assert_true(n_lines > 3);
    assert_int_equal(n_broken_lines, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_open_errors),
        cmocka_unit_test(test_start_token_never_doubled),
        cmocka_unit_test(test_any_bytes),
        cmocka_unit_test(test_token_bytes),
        cmocka_unit_test(test_real_tokens),
        cmocka_unit_test(test_long_runs),
        cmocka_unit_test(test_templates),
        cmocka_unit_test(test_templates_in_a_german_host),
        cmocka_unit_test(test_real_template),
        cmocka_unit_test(test_no_template),
        cmocka_unit_test(test_greedy_and_probability),
        cmocka_unit_test(test_same_seed_same_tokens),
        cmocka_unit_test(test_filters),
        cmocka_unit_test(test_repeat_penalty),
        cmocka_unit_test(test_bad_logits),
        cmocka_unit_test(test_bad_params),
        cmocka_unit_test(test_repeat_last_n),
        cmocka_unit_test(test_end_and_padding),
        cmocka_unit_test(test_grammar_errors),
        cmocka_unit_test(test_grammar_keeps_to_it),
        cmocka_unit_test(test_grammar_dead_ends),
        cmocka_unit_test(test_json_schema),
        cmocka_unit_test(test_log),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
