/* Eviction settings as JSON text: read, overridden, described, and a session that keeps to them. */
#include "fuzz.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc;
    (void)argv;
    fuzz_model();
    return 0;
}

static void use(const dt_eviction *eviction) {
    dt_error error = {0};
    char *lines = NULL;
    dt_session *session = NULL;
    const dt_session_params params = {
        .n_ctx = 64, .n_batch = 16, .n_threads = 1, .kv_block_tokens = 16, .prefill = DT_PREFILL_STREAMING, .eviction = eviction};
    fuzz_require(dt_eviction_describe(eviction, &lines, &error) == DT_OK && lines[0] != 0, "settings can be described");
    dt_free(lines);
    dt_status status = dt_session_new(fuzz_model(), &params, &session, &error);
    if (status != DT_OK) {
        fuzz_require_told(status, &error);
        return;
    }
    int32_t tokens[48];
    for (int32_t i = 0; i < 48; i++) {
        tokens[i] = 3 + i * 7 % 250;
    }
    status = dt_session_sync(session, tokens, 48, NULL, NULL, NULL, &error);
    if (status != DT_OK) {
        fuzz_require_told(status, &error);
    }
    fuzz_require(dt_session_check(session, &error) == DT_OK, "the cache is whole after eviction");
    dt_session_free(session);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    dt_error error = {0};
    dt_eviction *eviction = NULL;
    char *text = fuzz_text(data, size);
    dt_status status = dt_eviction_from_text(fuzz_model(), "fuzz.json", text, size, &eviction, &error);
    fuzz_require((status == DT_OK) == (eviction != NULL), "settings are there where nothing failed");
    if (status != DT_OK) {
        fuzz_require_told(status, &error);
    } else {
        use(eviction);
        status = dt_eviction_override(eviction, 32, size % 3 == 0 ? -1 : (int32_t)(size % 40), &error);
        if (status == DT_OK) {
            use(eviction);
        }
        dt_eviction_free(eviction);
    }
    free(text);
    return 0;
}
