/*
 * Token ids of one-turn and two-turn chats, of raw prompts, and what ends a reply, family by family (cases.md rows 14 and 15), on
 * vocabularies that have each family's marks.
 */
#include "support/cmocka_all.h"
#include "support/compare.h"
#include "support/fixture.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static dt_model *open_with(const char *arch, tiny_vocabulary vocabulary, const char *chat_template, int32_t favourite) {
    tiny_model_params p = tiny_model_default_params();
    p.arch = arch;
    p.vocabulary = vocabulary;
    p.chat_template = chat_template;
    p.favourite = favourite;
    if (strcmp(arch, "chatglm") == 0 || strcmp(arch, "glm4") == 0) {
        p.head_dim = 16;
    }
    return open_model(write_tiny(&p), false);
}

/* Tokens as text, special ones in brackets of their own: "{[gMASK]}{sop}..." so that a mark in letters shows. */
static void assert_ids(const dt_model *model, const char *text, bool add_special, const char *want) {
    int32_t *tokens = NULL;
    size_t n = 0, used = 0;
    dt_error error = {0};
    char got[1024] = "", piece[64];
    assert_int_equal(dt_tokenize(model, text, strlen(text), add_special, true, &tokens, &n, &error), DT_OK);
    for (size_t i = 0; i < n; i++) {
        const size_t plain = dt_token_bytes(model, tokens[i], false, piece, sizeof piece);
        const size_t bytes = dt_token_bytes(model, tokens[i], true, piece, sizeof piece);
        used += (size_t)snprintf(got + used, sizeof got - used, plain == 0 && bytes > 0 ? "{%.*s}" : "%.*s", (int)bytes, piece);
    }
    dt_free(tokens);
    assert_string_equal(got, want);
}

static void assert_chat(const dt_model *model, const char *const *contents, size_t n_messages, const char *want) {
    dt_chat_message messages[4];
    char *text = NULL;
    dt_error error = {0};
    for (size_t i = 0; i < n_messages; i++) {
        messages[i] = (dt_chat_message){i % 2 == 0 ? "user" : "assistant", contents[i]};
    }
    if (dt_chat_render(model, NULL, messages, n_messages, true, &text, &error) != DT_OK) {
        fail_msg("%s", error.message);
    }
    assert_ids(model, text, true, want);
    dt_free(text);
}

static const char *const turns[] = {"philosophy", "aa", "bb"};

/* SentencePiece shows its space before a text; "sop" inside a word is no mark. */
static void test_chatglm2(void **state) {
    (void)state;
    dt_model *model = open_with("chatglm", TINY_VOCABULARY_CHATGLM2, NULL, 0);
    assert_true(dt_model_get_info(model)->has_chat_template);
    assert_chat(model, turns, 1, "{[gMASK]}{sop} [Round 1]\n\n问：philosophy\n\n答：");
    assert_chat(model, turns, 3, "{[gMASK]}{sop} [Round 1]\n\n问：philosophy\n\n答：aa\n\n[Round 2]\n\n问：bb\n\n答：");
    assert_ids(model, "a sop", true, "{[gMASK]}{sop} a sop");
    assert_ids(model, "[gMASK]sopa", true, "{[gMASK]}{sop} a");
    assert_ids(model, "\n\n[Round 2]", false, "\n\n[Round 2]"); /* a continuation has no space before it */
    assert_ids(model, "", true, "{[gMASK]}{sop}");
    dt_model_close(model);
}

static void test_chatglm3(void **state) {
    (void)state;
    dt_model *model = open_with("chatglm", TINY_VOCABULARY_CHATGLM3, NULL, 0);
    assert_chat(model, turns, 1, "{[gMASK]}{sop}{<|user|>} \n philosophy{<|assistant|>}");
    assert_chat(model, turns, 3, "{[gMASK]}{sop}{<|user|>} \n philosophy{<|assistant|>} \n aa{<|user|>} \n bb{<|assistant|>}");
    assert_ids(model, "a", true, "{[gMASK]}{sop} a");
    dt_model_close(model);
}

static void test_glm4(void **state) {
    (void)state;
    static const char *const archs[] = {"glm4", "chatglm"};
    for (int i = 0; i < 2; i++) {
        dt_model *model = open_with(archs[i], TINY_VOCABULARY_GLM4, NULL, 0);
        assert_chat(model, turns, 1, "{[gMASK]}{<sop>}{<|user|>}\nphilosophy{<|assistant|>}");
        assert_ids(model, "a", true, "{[gMASK]}{<sop>}a");
        assert_ids(model, "[gMASK]<sop>a", true, "{[gMASK]}{<sop>}a");
        dt_model_close(model);
    }
    /* the file's own template counts, and its prefix is not doubled */
    dt_model *model = open_with("glm4", TINY_VOCABULARY_GLM4,
                                "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
                                "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
                                0);
    assert_chat(model, turns, 1, "{[gMASK]}{<sop>}{<|user|>}\nphilosophy{<|assistant|>}\n");
    dt_model_close(model);
}

/* One start token where the model has one, none for Qwen; role marks are single tokens. */
static void test_start_tokens(void **state) {
    (void)state;
    dt_model *qwen = open_with("qwen2", TINY_VOCABULARY_QWEN, TINY_CHATML, 0);
    assert_int_equal(dt_token_start(qwen), -1);
    assert_chat(qwen, turns, 1, "{<|im_start|>}user\nphilosophy{<|im_end|>}\n{<|im_start|>}assistant\n");
    assert_ids(qwen, "a", true, "a");
    dt_model_close(qwen);

    dt_model *llama = open_with("llama", TINY_VOCABULARY_LLAMA3,
                                "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
                                "{{ m.content }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant"
                                "<|end_header_id|>\n\n{% endif %}",
                                0);
    assert_int_equal(dt_token_start(llama), 0);
    assert_chat(llama, turns, 1,
                "{<|begin_of_text|>}{<|start_header_id|>}user{<|end_header_id|>}\n\nphilosophy{<|eot_id|>}"
                "{<|start_header_id|>}assistant{<|end_header_id|>}\n\n");
    assert_ids(llama, "a", true, "{<|begin_of_text|>}a");
    assert_ids(llama, "<|begin_of_text|>a", true, "{<|begin_of_text|>}a");
    assert_ids(llama, "<|begin_of_text|><|begin_of_text|>a", true, "{<|begin_of_text|>}a");
    dt_model_close(llama);

    dt_model *smollm = open_with("llama", TINY_VOCABULARY_BPE, TINY_CHATML, 0);
    assert_chat(smollm, turns, 1, "{<|im_start|>}user\nphilosophy{<|im_end|>}\n{<|im_start|>}assistant\n");
    dt_model_close(smollm);
}

static bool count_token(int32_t token, void *user) {
    (void)token;
    ++*(int *)user;
    return true;
}

/* The likeliest token is each of those that end a turn: nothing is reported, and the reason is its end. */
static void test_end_tokens(void **state) {
    (void)state;
    static const struct {
        const char *arch;
        tiny_vocabulary vocabulary;
        const char *ends[4];
        const char *other; /* a mark that ends nothing */
    } cases[] = {
        {"chatglm", TINY_VOCABULARY_CHATGLM2, {"</s>"}, "eop"},
        {"chatglm", TINY_VOCABULARY_CHATGLM3, {"<|user|>", "<|observation|>", "</s>"}, "<|assistant|>"},
        {"chatglm", TINY_VOCABULARY_GLM4, {"<|user|>", "<|observation|>", "<|endoftext|>"}, "<|assistant|>"},
        {"glm4", TINY_VOCABULARY_GLM4, {"<|user|>", "<|observation|>", "<|endoftext|>"}, "<|assistant|>"},
        {"qwen2", TINY_VOCABULARY_QWEN, {"<|im_end|>", "<|endoftext|>"}, "<|im_start|>"},
        {"llama", TINY_VOCABULARY_LLAMA3, {"<|eot_id|>", "<|end_of_text|>"}, "<|start_header_id|>"},
    };
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        for (int i = 0; i < 4; i++) {
            const char *mark = i < 3 ? cases[c].ends[i] : cases[c].other;
            if (!mark) {
                continue;
            }
            /* which token is it? */
            int32_t favourite = -1;
            dt_model *model = open_with(cases[c].arch, cases[c].vocabulary, NULL, 0);
            for (int32_t t = 0; t < dt_model_get_info(model)->n_vocab; t++) {
                char piece[64];
                const size_t n = dt_token_bytes(model, t, true, piece, sizeof piece);
                favourite = n == strlen(mark) && memcmp(piece, mark, n) == 0 ? t : favourite;
            }
            dt_model_close(model);
            assert_true(favourite >= 0);
            model = open_with(cases[c].arch, cases[c].vocabulary, NULL, favourite + 1);
            const dt_session_params params = {.n_threads = 1};
            dt_session *session = open_session(model, &params);
            const int32_t prompt[] = {20, 21, 22};
            sync_tokens(session, prompt, 3);
            dt_sampler_params sp = dt_sampler_default_params();
            sp.temp = 0.0f;
            dt_sampler *sampler = NULL;
            dt_error error = {0};
            assert_int_equal(dt_sampler_new(model, &sp, &sampler, &error), DT_OK);
            dt_generate_result result;
            int n_reported = 0;
            assert_int_equal(dt_generate(session, sampler, 5, count_token, &n_reported, &result, &error), DT_OK);
            assert_int_equal(n_reported, i < 3 ? 0 : 5);
            assert_int_equal(result.why, i < 3 ? DT_STOP_END : DT_STOP_LENGTH);
            dt_sampler_free(sampler);
            dt_session_free(session);
            dt_model_close(model);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_chatglm2),     cmocka_unit_test(test_chatglm3),   cmocka_unit_test(test_glm4),
        cmocka_unit_test(test_start_tokens), cmocka_unit_test(test_end_tokens),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
