/*
 * Conversations as text: the tokens of a prompt, those of an earlier conversation as far as the prompt continues it.
 */
#include "conversations_internal.h"

#include <stdlib.h>
#include <string.h>

static size_t common_bytes(const char *a, size_t n_a, const char *b, size_t n_b) {
    const size_t most = n_a < n_b ? n_a : n_b;
    size_t n = 0;
    while (n < most && a[n] == b[n]) {
        n++;
    }
    return n;
}

/* The longest beginning of text[n] whose tokens this conversation knows. */
static dt_anchor known_beginning(const dt_conversation *c, const char *text, size_t n) {
    dt_anchor best = {0, 0};
    const size_t same = common_bytes(text, n, c->text, c->n_prompt_text);
    if (same == c->n_prompt_text) {
        const size_t end = dt_after_reply(text + same, n - same, c->text + same, c->n_text - same);
        if (end != SIZE_MAX) {
            return (dt_anchor){same + end, c->n_tokens};
        }
    }
    for (size_t i = 0; i < c->n_anchors && c->anchors[i].n_text <= same; i++) {
        best = c->anchors[i];
    }
    return best;
}

typedef struct beginning {
    int32_t *tokens; /* room for n more */
    dt_anchor *anchors;
    size_t n_text, n_tokens, n_anchors;
} beginning;

static void free_beginning(beginning *b) {
    free(b->tokens);
    free(b->anchors);
    *b = (beginning){NULL, NULL, 0, 0, 0};
}

/* Copies what the best conversation knows; nothing where none does, or where memory is short. */
static beginning find_beginning(dt_conversations *all, const char *text, size_t n) {
    beginning b = {NULL, NULL, 0, 0, 0};
    dt_conversation *best = NULL;
    dt_anchor longest = {0, 0};
    pthread_mutex_lock(&all->lock);
    for (size_t i = 0; i < all->n; i++) {
        const dt_anchor here = all->list[i]->text != NULL ? known_beginning(all->list[i], text, n) : longest;
        if (here.n_text > longest.n_text) {
            longest = here;
            best = all->list[i];
        }
    }
    if (best != NULL) {
        best->last_used = ++all->clock; /* it is about to be gone on with: others go to disk before it, while the request waits */
        best->awaited = true;
        b.tokens = malloc((longest.n_tokens + 1) * sizeof *b.tokens);
        b.anchors = malloc((best->n_anchors + 1) * sizeof *b.anchors);
    }
    if (b.tokens != NULL && b.anchors != NULL) {
        memcpy(b.tokens, best->tokens, longest.n_tokens * sizeof *b.tokens);
        while (b.n_anchors < best->n_anchors && best->anchors[b.n_anchors].n_text < longest.n_text) {
            b.anchors[b.n_anchors] = best->anchors[b.n_anchors];
            b.n_anchors++;
        }
        b.anchors[b.n_anchors++] = longest;
        b.n_text = longest.n_text;
        b.n_tokens = longest.n_tokens;
    }
    pthread_mutex_unlock(&all->lock);
    return b;
}

/* Some tokenizers put a space before any text they are given; then what follows has to be tokenized with what comes before it. */
static bool begins_as_text(const dt_model *model, const char *text, size_t n, const int32_t *tokens, size_t n_tokens) {
    char bytes[512];
    if (n == 0 || n_tokens == 0) {
        return n == 0;
    }
    const size_t length = dt_token_bytes(model, tokens[0], true, bytes, sizeof bytes);
    return length <= sizeof bytes && length <= n && memcmp(bytes, text, length) == 0;
}

dt_status dt_conversations_tokenize(dt_conversations *all, const char *text, size_t n, bool add_special, int32_t **out_tokens,
                                    size_t *out_n, dt_anchor **out_anchors, size_t *out_n_anchors, dt_error *error) {
    const dt_model *model = all->params.model;
    beginning b = find_beginning(all, text, n);
    int32_t *more = NULL;
    size_t n_more = 0;
    dt_status status = DT_OK;
    if (b.n_tokens > 0) {
        status = dt_tokenize(model, text + b.n_text, n - b.n_text, false, true, &more, &n_more, error);
        if (status == DT_OK && !begins_as_text(model, text + b.n_text, n - b.n_text, more, n_more)) {
            free_beginning(&b);
            dt_free(more);
            more = NULL;
        }
    }
    if (status == DT_OK && b.n_tokens == 0) {
        status = dt_tokenize(model, text, n, add_special, true, &more, &n_more, error);
    }
    int32_t *tokens = status == DT_OK ? realloc(b.tokens, (b.n_tokens + n_more + 1) * sizeof *tokens) : NULL;
    if (tokens == NULL) {
        free_beginning(&b);
        dt_free(more);
        return status != DT_OK ? status : dt_app_fail(error, DT_ERR_MEMORY, "out of memory for the prompt");
    }
    if (n_more > 0) {
        memcpy(tokens + b.n_tokens, more, n_more * sizeof *tokens);
    }
    dt_free(more);
    *out_tokens = tokens;
    *out_n = b.n_tokens + n_more;
    *out_anchors = b.anchors;
    *out_n_anchors = b.n_anchors;
    return DT_OK;
}
