/* Grammars and JSON schemas, which requests may bring: the first byte says which, odd for schemas. A few tokens are drawn. */
#include "fuzz.h"

#include <stdlib.h>
#include <string.h>

#define N_DRAWN 6

static float *logits;

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc;
    (void)argv;
    fuzz_random random = {3};
    const int32_t n = dt_model_get_info(fuzz_model())->n_vocab;
    logits = malloc((size_t)n * sizeof *logits);
    fuzz_require(logits != NULL, "memory for logits");
    for (int32_t i = 0; i < n; i++) {
        logits[i] = (float)fuzz_below(&random, 1000) / 100.0f;
    }
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size == 0) {
        return 0;
    }
    char *text = fuzz_text(data + 1, size - 1);
    dt_sampler_params params = dt_sampler_default_params();
    params.seed = 1;
    params.grammar = data[0] % 2 == 0 ? text : NULL;
    params.json_schema = data[0] % 2 == 0 ? NULL : text;
    dt_sampler *sampler = NULL;
    dt_error error = {0};
    dt_status status = dt_sampler_new(fuzz_model(), &params, &sampler, &error);
    for (int i = 0; i < N_DRAWN && status == DT_OK; i++) {
        int32_t token = -1;
        status = dt_sampler_sample(sampler, logits, &token, NULL, &error);
        if (status == DT_OK) {
            fuzz_require(token >= 0 && token < dt_model_get_info(fuzz_model())->n_vocab, "a token of the vocabulary is drawn");
            status = dt_sampler_accept(sampler, token, true, &error);
        }
    }
    if (status != DT_OK) {
        fuzz_require_told(status, &error);
    }
    dt_sampler_free(sampler);
    free(text);
    return 0;
}
