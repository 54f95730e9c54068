/* Two turns of a chat, kept in a file, gone on with in another session that computes nothing twice:
 *   cc chat.c -o chat $(pkg-config --cflags --libs deeptutor) && ./chat model.gguf chat.session */
#include <deeptutor.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static dt_error error;
static dt_model *model;
static int32_t tokens[8192]; /* of the conversation; the replies as they were generated */
static size_t n_tokens;

static void check(dt_status status) {
    if (status != DT_OK) {
        fprintf(stderr, "%s\n", error.message);
        exit(1);
    }
}

static bool print_token(int32_t token, void *user) {
    char text[256];
    const size_t n = dt_token_bytes(model, token, false, text, sizeof text);
    fwrite(text, 1, n < sizeof text ? n : sizeof text, stdout);
    tokens[n_tokens++] = token;
    return n_tokens + 64 < sizeof tokens / sizeof tokens[0] && !user;
}

static void turn(dt_session *session, dt_sampler *sampler, const char *question) {
    char prompt[1024]; /* the marks of ChatML; dt_chat_render knows every model's own */
    int32_t *new_tokens;
    size_t n;
    dt_sync_result synced;
    snprintf(prompt, sizeof prompt, "%s<|im_start|>user\n%s<|im_end|>\n<|im_start|>assistant\n", n_tokens > 0 ? "<|im_end|>\n" : "",
             question);
    check(dt_tokenize(model, prompt, strlen(prompt), n_tokens == 0, true, &new_tokens, &n, &error));
    memcpy(tokens + n_tokens, new_tokens, n * sizeof *tokens);
    n_tokens += n;
    dt_free(new_tokens);
    check(dt_session_sync(session, tokens, n_tokens, NULL, NULL, &synced, &error));
    printf("[%lld reused, %lld computed] ", (long long)synced.reused_tokens, (long long)synced.computed_tokens);
    check(dt_generate(session, sampler, 48, print_token, NULL, NULL, &error));
    printf("\n");
}

int main(int argc, char **argv) {
    dt_session *first, *second;
    dt_sampler *sampler;
    const dt_sampler_params sampling = {.temp = 0, .repeat_penalty = 1};
    check(dt_model_open(argc > 1 ? argv[1] : "model.gguf", NULL, &model, &error));
    const char *path = argc > 2 ? argv[2] : "chat.session";
    check(dt_sampler_new(model, &sampling, &sampler, &error));
    check(dt_session_new(model, NULL, &first, &error));
    turn(first, sampler, "What is the capital of France?");
    turn(first, sampler, "And of Italy?");
    check(dt_session_save(first, NULL, path, &error));
    check(dt_session_new(model, NULL, &second, &error));
    check(dt_session_load(second, NULL, path, &error));
    turn(second, sampler, "Which of the two is older?");
    return 0; /* the system frees the rest */
}
