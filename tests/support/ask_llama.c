/*
 * What libllama makes of a GGUF file, for tests in Python:
 *
 *   ask_llama FILE tokens [--plain]     ids of the text on stdin, as a JSON list. The start token is added where the file says so;
 *                                       marks such as <|im_end|> are single ids, with --plain they are text
 *   ask_llama FILE logits P,P,... [N]   reads a JSON-like list of ids from stdin, prints the logits after the tokens at these
 * ascending positions, one JSON list a line. Tokens are read in chunks of N (512); with N given, what stays in the cache of each
 * chunk but the first is its last token, so that far positions cost little
 */
#include "llama.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_BYTES (1 << 20)

static void drop_log(enum ggml_log_level level, const char *text, void *user) {
    (void)user;
    if (level == GGML_LOG_LEVEL_ERROR) {
        fputs(text, stderr);
    }
}

static int print_tokens(const char *path, const char *text, size_t n, bool parse_special) {
    llama_log_set(drop_log, NULL);
    struct llama_model_params params = llama_model_default_params();
    params.vocab_only = true;
    struct llama_model *model = llama_model_load_from_file(path, params);
    if (model == NULL) {
        return 1;
    }
    int32_t *tokens = malloc((n + 8) * sizeof *tokens);
    const int32_t count =
        llama_tokenize(llama_model_get_vocab(model), text, (int32_t)n, tokens, (int32_t)n + 8, true, parse_special);
    putchar('[');
    for (int32_t i = 0; i < count; i++) {
        printf("%s%d", i > 0 ? ", " : "", tokens[i]);
    }
    puts("]");
    free(tokens);
    llama_model_free(model);
    return count < 0;
}

typedef struct reader {
    struct llama_model *model;
    struct llama_context *ctx;
    int32_t n_vocab;
} reader;

static void reader_close(reader *r) {
    if (r->ctx != NULL) {
        llama_free(r->ctx);
    }
    if (r->model != NULL) {
        llama_model_free(r->model);
    }
}

/* One thread: the models are tiny, and a second one only waits, which takes long where the cores are busy. */
static bool reader_open(reader *r, const char *path, int32_t n_ctx, int32_t chunk) {
    llama_log_set(drop_log, NULL);
    r->model = llama_model_load_from_file(path, llama_model_default_params());
    if (r->model != NULL) {
        struct llama_context_params params = llama_context_default_params();
        params.n_ctx = (uint32_t)n_ctx;
        params.n_batch = params.n_ubatch = (uint32_t)chunk;
        params.n_threads = params.n_threads_batch = 1;
        params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
        r->ctx = llama_init_from_model(r->model, params);
        r->n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(r->model));
    }
    return r->ctx != NULL;
}

static bool decode(reader *r, const int32_t *tokens, int32_t start, int32_t end, bool all_logits) {
    struct llama_batch batch = llama_batch_init(end - start, 0, 1);
    batch.n_tokens = end - start;
    for (int32_t i = 0; i < batch.n_tokens; i++) {
        batch.token[i] = tokens[start + i];
        batch.pos[i] = start + i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = all_logits || i == batch.n_tokens - 1;
    }
    const bool ok = llama_decode(r->ctx, batch) == 0;
    llama_batch_free(batch);
    return ok;
}

static void print_row(const reader *r, int32_t i) {
    const float *row = llama_get_logits_ith(r->ctx, i);
    putchar('[');
    for (int32_t k = 0; k < r->n_vocab; k++) {
        printf("%s%.9g", k > 0 ? ", " : "", (double)row[k]);
    }
    puts("]");
}

/* Decodes in chunks and prints the wanted rows; false when libllama fails. */
static bool print_rows(reader *r, const int32_t *tokens, int32_t n, int32_t chunk, bool forget, char *positions) {
    bool ok = true;
    char *word = strtok(positions, ",");
    for (int32_t start = 0; ok && start < n; start += chunk) {
        const int32_t end = start + chunk < n ? start + chunk : n;
        ok = decode(r, tokens, start, end, word != NULL && atoi(word) < end);
        for (; ok && word != NULL && atoi(word) < end; word = strtok(NULL, ",")) {
            print_row(r, atoi(word) - start);
        }
        if (forget && start > 0) { /* libllama wants the position before the next one in its cache */
            llama_memory_seq_rm(llama_get_memory(r->ctx), 0, start, end - 1);
        }
    }
    return ok && word == NULL;
}

static int print_logits(const char *path, char *ids, char *positions, int32_t chunk) {
    int32_t *tokens = malloc(MAX_BYTES * sizeof *tokens);
    int32_t n = 0;
    for (char *word = strtok(ids, "[], \n"); word != NULL; word = strtok(NULL, "[], \n")) {
        tokens[n++] = atoi(word);
    }
    const bool forget = chunk > 0;
    chunk = forget ? chunk : 512;
    reader r = {0};
    bool ok = reader_open(&r, path, forget ? 3 * chunk + n / chunk : n + 8, chunk);
    if (!ok) {
        fprintf(stderr, "libllama does not open %s\n", path);
    }
    ok = ok && print_rows(&r, tokens, n, chunk, forget, positions);
    reader_close(&r);
    free(tokens);
    return ok ? 0 : 1;
}

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: %s FILE tokens [--plain] | FILE logits P,P,... [N]\n", argv[0]);
        return 2;
    }
    static char text[MAX_BYTES];
    const size_t n = fread(text, 1, sizeof text - 1, stdin);
    if (strcmp(argv[2], "tokens") == 0) {
        return print_tokens(argv[1], text, n, argc < 4);
    }
    return argc > 3 ? print_logits(argv[1], text, argv[3], argc > 4 ? atoi(argv[4]) : 0) : 2;
}
