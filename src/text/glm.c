/*
 * See glm.h. The forms are those of the models' own code: ChatGLM2 numbers rounds and knows no system prompt (one is put before
 * the first question), ChatGLM3 and GLM-4 write roles as marks. After the assistant's mark nothing follows: the model begins with
 * the newline.
 * Invariant: what is rendered for k messages is the beginning of what is rendered for more, so a conversation is only appended to.
 */
#include "text/glm.h"

#include "base/base.h"
#include "llama.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int32_t find_token(const struct llama_vocab *vocab, const char *text) {
    const int32_t n = llama_vocab_n_tokens(vocab);
    for (int32_t token = n - 1; token >= 0; token--) { /* marks come last */
        const char *known = llama_vocab_get_text(vocab, token);
        if (known != NULL && strcmp(known, text) == 0) {
            return token;
        }
    }
    return -1;
}

static void collect_marks(const struct llama_vocab *vocab, dt_glm *out) {
    for (int32_t token = 0; token < llama_vocab_n_tokens(vocab) && out->n_marks < DT_GLM_MAX_MARKS; token++) {
        const char *text = llama_vocab_get_text(vocab, token);
        if ((llama_vocab_get_attr(vocab, token) & LLAMA_TOKEN_ATTR_CONTROL) != 0 && text != NULL && text[0] != '\0' &&
            strcmp(text, "sop") != 0 && strcmp(text, "eop") != 0) {
            out->marks[out->n_marks++] = (dt_glm_mark){text, token};
        }
    }
}

void dt_glm_find(const struct llama_vocab *vocab, const char *architecture, dt_glm *out) {
    static const char *const ends[] = {"<|user|>", "<|observation|>"};
    *out = (dt_glm){.form = DT_GLM_NONE};
    if (strcmp(architecture, "chatglm") != 0 && strcmp(architecture, "glm4") != 0) {
        return;
    }
    const int32_t mask = find_token(vocab, "[gMASK]"), word = find_token(vocab, "sop"), bracketed = find_token(vocab, "<sop>");
    if (mask < 0 || (word < 0 && bracketed < 0)) {
        return;
    }
    const bool is_word = bracketed < 0;
    out->prefix[0] = mask;
    out->prefix[1] = is_word ? word : bracketed;
    snprintf(out->prefix_text, sizeof out->prefix_text, "[gMASK]%s", is_word ? "sop" : "<sop>");
    for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++) {
        const int32_t token = find_token(vocab, ends[i]);
        if (token >= 0) {
            out->ends[out->n_ends++] = token;
        }
    }
    out->form = !is_word ? DT_GLM_LINES : out->n_ends > 0 ? DT_GLM_SPACED : DT_GLM_ROUNDS;
    if (is_word) {
        collect_marks(vocab, out);
    }
}

bool dt_glm_is_end(const dt_glm *glm, int32_t token) {
    bool found = false;
    for (int32_t i = 0; i < glm->n_ends; i++) {
        found = found || glm->ends[i] == token;
    }
    return found;
}

const dt_glm_mark *dt_glm_mark_at(const dt_glm *glm, const char *text, size_t n_bytes) {
    const dt_glm_mark *longest = NULL;
    for (int32_t i = 0; i < glm->n_marks; i++) {
        const size_t n = strlen(glm->marks[i].text);
        if (n <= n_bytes && memcmp(text, glm->marks[i].text, n) == 0 && (longest == NULL || n > strlen(longest->text))) {
            longest = &glm->marks[i];
        }
    }
    return longest;
}

/* ---- chat ---- */

typedef struct builder {
    char *text;
    size_t n_bytes, capacity;
} builder;

static void add(builder *b, const char *text) {
    const size_t n = strlen(text);
    if (b->n_bytes + n < b->capacity) {
        memcpy(b->text + b->n_bytes, text, n + 1);
    }
    b->n_bytes += n;
}

static void render_rounds(builder *b, const dt_chat_message *messages, size_t n_messages, bool add_assistant) {
    char number[48];
    int round = 0;
    bool is_open = false; /* a round has begun and its answer is still to come */
    for (size_t i = 0; i < n_messages; i++) {
        if (strcmp(messages[i].role, "assistant") == 0) {
            add(b, is_open ? "\n\n答：" : "答：");
            add(b, messages[i].content);
            add(b, "\n\n");
            is_open = false;
            continue;
        }
        if (!is_open) {
            snprintf(number, sizeof number, "[Round %d]\n\n问：", ++round);
        }
        add(b, is_open ? "\n\n" : number);
        add(b, messages[i].content);
        is_open = true;
    }
    if (add_assistant) {
        add(b, is_open ? "\n\n答：" : "答：");
    }
}

static void render_roles(builder *b, const char *gap, const dt_chat_message *messages, size_t n_messages, bool add_assistant) {
    for (size_t i = 0; i < n_messages; i++) {
        add(b, "<|");
        add(b, messages[i].role);
        add(b, "|>");
        add(b, gap);
        add(b, messages[i].content);
    }
    if (add_assistant) {
        add(b, "<|assistant|>");
    }
}

dt_status dt_glm_render(dt_glm_form form, const dt_chat_message *messages, size_t n_messages, bool add_assistant, char **out,
                        dt_error *error) {
    *out = NULL;
    builder b = {0};
    for (int pass = 0; pass < 2; pass++) { /* counts, then writes */
        b.n_bytes = 0;
        if (form == DT_GLM_ROUNDS) {
            render_rounds(&b, messages, n_messages, add_assistant);
        } else {
            render_roles(&b, form == DT_GLM_SPACED ? "\n " : "\n", messages, n_messages, add_assistant);
        }
        if (pass == 0) {
            b.capacity = b.n_bytes + 1;
            b.text = calloc(b.capacity, 1);
            if (b.text == NULL) {
                return dt_fail_memory(error, b.capacity, "the conversation");
            }
        }
    }
    *out = b.text;
    return DT_OK;
}
