/*
 * The note that ./main leaves in a session file: a chat's messages and tokens. A chat goes on from it, by one more message.
 */
#include "fuzz.h"

#include "../../apps/chat.h"
#include "../../apps/report.h"

#include <fcntl.h>
#include <string.h>
#include <unistd.h>

static dt_session *session;

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc;
    (void)argv;
    dt_error error = {0};
    const dt_session_params params = {
        .n_batch = 32, .n_threads = 1, .n_threads_batch = 1, .kv_block_tokens = 16, .n_snapshots = -1};
    const int null = open("/dev/null", O_WRONLY);
    fuzz_require(null >= 0 && dup2(null, STDOUT_FILENO) >= 0, "replies have a place to go");
    dt_report_init(DT_LOG_ERROR, false);
    fuzz_require(dt_session_new(fuzz_model(), &params, &session, &error) == DT_OK, "a session can be had");
    fuzz_begin(fuzz_write_seeds);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    dt_error error = {0};
    dt_chat *chat = NULL;
    dt_run run = {.model = fuzz_model(), .session = session, .sampling = dt_sampler_default_params(), .n_predict = 2};
    run.sampling.temp = 0;
    dt_status status = dt_session_set_note(session, data, size, &error);
    fuzz_require(status == DT_OK && dt_run_begin(&run, &error) == DT_OK, "a run begins");
    fuzz_require(dt_chat_new(&run, NULL, NULL, &chat, &error) == DT_OK, "a chat begins");
    status = dt_chat_resume(chat, NULL, &error);
    if (status == DT_OK) {
        status = dt_chat_turn(chat, "go on", &error);
    }
    if (status == DT_OK) {
        fuzz_require(dt_chat_note(chat, &error) == DT_OK, "the chat can be saved again");
    } else {
        fuzz_require_told(status, &error);
    }
    dt_chat_free(chat);
    dt_run_end(&run);
    return 0;
}

bool fuzz_write_seeds(const char *folder) {
    dt_error error = {0};
    dt_chat *chat = NULL;
    dt_run run = {.model = fuzz_model(), .session = session, .sampling = dt_sampler_default_params(), .n_predict = 3};
    bool good = dt_run_begin(&run, &error) == DT_OK && dt_chat_new(&run, NULL, "Be brief.", &chat, &error) == DT_OK &&
                dt_chat_turn(chat, "hello", &error) == DT_OK && dt_chat_turn(chat, "again", &error) == DT_OK &&
                dt_chat_note(chat, &error) == DT_OK;
    size_t n = 0;
    const void *note = dt_session_note(session, &n);
    good = good && n > 0 && fuzz_write_file(folder, "chat", note, n);
    dt_chat_free(chat);
    dt_run_end(&run);
    return good;
}
