/*
 * Bodies of requests: the first byte says of which kind, the rest is JSON. A body that is accepted is not computed (fuzz_http.c does
 * that); what it asks for has to lie within the limits.
 */
#include "fuzz.h"

#include "../../apps/api.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc;
    (void)argv;
    fuzz_api();
    return 0;
}

static void read_request(dt_api_kind kind, const char *body, size_t n) {
    const dt_api *api = fuzz_api();
    dt_request request;
    dt_error error = {0};
    const int status = dt_api_read(api, kind, body, n, &request, &error);
    if (status != 200) {
        fuzz_require(status >= 400 && status < 600 && error.message[0] != 0, "a refused body is told why");
        char *answer = dt_api_error(status, error.message);
        json_t *json = answer != NULL ? json_loads(answer, 0, NULL) : NULL;
        fuzz_require(json != NULL, "a refusal is JSON");
        json_decref(json);
        free(answer);
        return;
    }
    fuzz_require(request.n_jobs > 0 && request.n_jobs <= api->n_prompts_max, "an accepted body is at least one job");
    for (size_t i = 0; i < request.n_jobs; i++) {
        const dt_job *job = request.jobs[i];
        fuzz_require(job->n_tokens > 0 && job->max_tokens >= 0 && job->n_choices >= 1 && job->n_choices <= api->n_choices_max &&
                         job->eviction_key != NULL,
                     "a job is one that can be computed");
        for (size_t t = 0; t < job->n_tokens; t++) {
            fuzz_require(job->tokens[t] >= 0 && job->tokens[t] < dt_model_get_info(api->model)->n_vocab,
                         "a prompt's tokens are in the vocabulary");
        }
    }
    dt_request_free(&request);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size == 0) {
        return 0;
    }
    const dt_api *api = fuzz_api();
    const char *body = (const char *)data + 1;
    int status = 0;
    char *answer = NULL;
    switch (data[0] % 4) {
    case 0:
        read_request(DT_API_CHAT, body, size - 1);
        return 0;
    case 1:
        read_request(DT_API_COMPLETION, body, size - 1);
        return 0;
    case 2:
        answer = dt_api_tokenize(api, body, size - 1, &status);
        break;
    default:
        answer = dt_api_detokenize(api, body, size - 1, &status);
    }
    json_t *json = answer != NULL ? json_loads(answer, JSON_DECODE_ANY, NULL) : NULL;
    fuzz_require(json != NULL && status >= 200 && status < 600, "every answer is JSON");
    json_decref(json);
    free(answer);
    return 0;
}
