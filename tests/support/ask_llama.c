/*
 * What libllama makes of a GGUF file, for tests in Python:
 *
 *   ask_llama FILE tokens [--plain]     ids of the text on stdin, as a JSON list. The start token is added where the file says so;
 *                                       marks such as <|im_end|> are single ids, with --plain they are text
 *   ask_llama FILE logits P,P,...       reads a JSON-like list of ids from stdin (commas and spaces), prints the logits after the
 *                                       tokens at these positions, one JSON list a line
 */
#include "support/oracle.h"

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

static int print_logits(const char *path, char *ids, char *positions) {
    int32_t *tokens = malloc(MAX_BYTES * sizeof *tokens);
    int32_t n = 0;
    for (char *word = strtok(ids, "[], \n"); word != NULL; word = strtok(NULL, "[], \n")) {
        tokens[n++] = atoi(word);
    }
    oracle *o = oracle_open(path, n + 8, false);
    if (o == NULL) {
        fprintf(stderr, "libllama does not open %s\n", path);
        free(tokens);
        return 1;
    }
    const int32_t n_vocab = oracle_n_vocab(o);
    float *logits = malloc((size_t)n * (size_t)n_vocab * sizeof *logits);
    const bool ok = oracle_decode(o, tokens, n, logits);
    for (char *word = strtok(positions, ","); ok && word != NULL; word = strtok(NULL, ",")) {
        putchar('[');
        for (int32_t i = 0; i < n_vocab; i++) {
            printf("%s%.9g", i > 0 ? ", " : "", (double)logits[(size_t)atoi(word) * (size_t)n_vocab + (size_t)i]);
        }
        puts("]");
    }
    free(logits);
    free(tokens);
    oracle_close(o);
    return ok ? 0 : 1;
}

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: %s FILE tokens [--plain] | FILE logits P,P,...\n", argv[0]);
        return 2;
    }
    static char text[MAX_BYTES];
    const size_t n = fread(text, 1, sizeof text - 1, stdin);
    if (strcmp(argv[2], "tokens") == 0) {
        return print_tokens(argv[1], text, n, argc < 4);
    }
    return argc > 3 ? print_logits(argv[1], text, argv[3]) : 2;
}
