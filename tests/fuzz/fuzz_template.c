/* Chat templates, which come with model files: the text up to a line "---" is the template, the rest what the user says. */
#include "fuzz.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc;
    (void)argv;
    fuzz_model();
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    size_t first, second;
    fuzz_split(data, size, &first, &second);
    char *source = fuzz_text(data, first), *said = fuzz_text(data + second, size - second), *out = NULL;
    const dt_chat_message messages[] = {{"system", "Be brief."}, {"user", said}, {"assistant", "Yes."}, {"user", said}};
    dt_error error = {0};
    const dt_status status = dt_chat_render(fuzz_model(), source, messages, 1 + size % 4, size % 2 == 0, &out, &error);
    fuzz_require((status == DT_OK) == (out != NULL), "a text is there where nothing failed");
    if (status != DT_OK) {
        fuzz_require_told(status, &error);
    }
    dt_free(out);
    free(source);
    free(said);
    return 0;
}
