/*
 * What ChatGLM2, ChatGLM3 and GLM-4 want of a tokenizer and that libllama does not know: two marks before every text, chat forms
 * for files without a template, several tokens that end a reply, and marks that are plain words.
 */
#ifndef DT_TEXT_GLM_H
#define DT_TEXT_GLM_H

#include "text/text.h"

#ifdef __cplusplus
extern "C" {
#endif

struct llama_vocab;

typedef enum dt_glm_form {
    DT_GLM_NONE,   /* another family */
    DT_GLM_ROUNDS, /* ChatGLM2: "[Round 1]\n\n问：...\n\n答：", no roles */
    DT_GLM_SPACED, /* ChatGLM3: role, newline, space, text */
    DT_GLM_LINES,  /* GLM-4: role, newline, text */
} dt_glm_form;

#define DT_GLM_MAX_MARKS 32

/* A token with a text that becomes it wherever it stands. */
typedef struct dt_glm_mark {
    const char *text; /* the vocabulary's own */
    int32_t token;
} dt_glm_mark;

typedef struct dt_glm {
    dt_glm_form form;
    int32_t prefix[2];    /* [gMASK] and sop, before every text */
    char prefix_text[32]; /* as templates write them */
    int32_t ends[2];      /* the user's and the observation's mark: the model would go on as them */
    int32_t n_ends;
    /* ChatGLM2 and 3: what is a mark in a text. sop and eop are control tokens there, which libllama finds in "philosophy" too. */
    dt_glm_mark marks[DT_GLM_MAX_MARKS];
    int32_t n_marks;
} dt_glm;

/* architecture: general.architecture of the file. */
void dt_glm_find(const struct llama_vocab *vocab, const char *architecture, dt_glm *out);
bool dt_glm_is_end(const dt_glm *glm, int32_t token);
/* The mark at the beginning of text[n_bytes], the longest of them, or NULL. */
const dt_glm_mark *dt_glm_mark_at(const dt_glm *glm, const char *text, size_t n_bytes);
/* *out: the conversation in a form, for dt_vocab_tokenize to put the prefix before; free with dt_free. */
dt_status dt_glm_render(dt_glm_form form, const dt_chat_message *messages, size_t n_messages, bool add_assistant, char **out,
                        dt_error *error);

#ifdef __cplusplus
}
#endif
#endif
