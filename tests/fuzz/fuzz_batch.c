/*
 * A batch's files: job lines up to a line "---", then what an earlier run is said to have written. Each row is read as a request, and
 * a line is written for it.
 */
#include "fuzz.h"

#include "../../apps/api.h"
#include "../../apps/batch_output.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc;
    (void)argv;
    fuzz_api();
    return 0;
}

static void read_row(const dt_batch_row *row) {
    dt_request request;
    dt_error error = {0};
    if (row->body == NULL) {
        fuzz_require(row->error[0] != 0, "a row that can't be read says why");
    } else if (dt_api_read_json(fuzz_api(), row->chat ? DT_API_CHAT : DT_API_COMPLETION, row->body, &request, &error) == 200) {
        dt_request_free(&request);
    } else {
        fuzz_require(error.message[0] != 0, "a refused row is told why");
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    size_t first, second;
    fuzz_split(data, size, &first, &second);
    const char *jobs = fuzz_file(0, data, first), *results = fuzz_file(1, data + second, size - second);
    dt_error error = {0};
    dt_batch_input *input = NULL;
    dt_batch_output *output = NULL;
    dt_status status = dt_batch_input_open(jobs, NULL, true, &input, &error);
    if (status == DT_OK) {
        status = dt_batch_output_open(results, jobs, "settings", &output, &error);
    }
    int64_t n = 0;
    dt_batch_row row;
    while (status == DT_OK && dt_batch_input_next(input, &row)) {
        bool has = false;
        n++;
        read_row(&row);
        status = dt_batch_output_has(output, &row, &has, &error);
        if (status == DT_OK && !has) {
            json_t *line = json_pack("{s:O?}", "id", row.id);
            status = dt_batch_output_write(output, &row, line, &error);
        }
        dt_batch_row_free(&row);
    }
    if (status != DT_OK) {
        fuzz_require(error.message[0] != 0 && error.code == status, "a failure is told");
    } else {
        fuzz_require(n == dt_batch_input_rows(input), "as many rows are read as were counted");
    }
    dt_batch_input_close(input);
    dt_batch_output_close(output);
    return 0;
}
