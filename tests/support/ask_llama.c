/*
 * What libllama makes of a GGUF file, for tests in Python:
 *
 *   ask_llama FILE tokens [--plain]     ids of the text on stdin, as a JSON list. The start token is added where the file says so;
 *                                       marks such as <|im_end|> are single ids, with --plain they are text
 *   ask_llama FILE logits P,P,... [N]   reads a JSON-like list of ids from stdin, prints the logits after the tokens at these ascending
 *                                       positions, one JSON list a line. Tokens are read in chunks of N (512); with N given, what
 *                                       stays in the cache of each chunk but the first is its last token, so that far positions
 *                                       cost little
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

/* Decodes in chunks and prints the wanted rows; false when libllama fails. */
static bool print_rows(oracle *o, const int32_t *tokens, int32_t n, int32_t chunk, bool forget, char *positions) {
    const int32_t n_vocab = oracle_n_vocab(o);
    float *logits = malloc((size_t)chunk * (size_t)n_vocab * sizeof *logits);
    bool ok = logits != NULL;
    char *word = strtok(positions, ",");
    for (int32_t start = 0; ok && start < n; start += chunk) {
        const int32_t end = start + chunk < n ? start + chunk : n;
        const bool wanted = word != NULL && atoi(word) < end;
        ok = oracle_decode(o, tokens + start, end - start, wanted ? logits : NULL);
        for (; ok && word != NULL && atoi(word) < end; word = strtok(NULL, ",")) {
            const float *row = logits + (size_t)(atoi(word) - start) * (size_t)n_vocab;
            putchar('[');
            for (int32_t i = 0; i < n_vocab; i++) {
                printf("%s%.9g", i > 0 ? ", " : "", (double)row[i]);
            }
            puts("]");
        }
        if (forget && start > 0) {
            oracle_remove(o, start, end - 1); /* libllama wants the position before the next one in its cache */
        }
    }
    free(logits);
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
    oracle *o = oracle_open(path, forget ? 3 * chunk + n / chunk : n + 8, false);
    if (o == NULL) {
        fprintf(stderr, "libllama does not open %s\n", path);
    }
    const bool ok = o != NULL && print_rows(o, tokens, n, chunk, forget, positions);
    oracle_close(o);
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
