#include "support/fixture.h"

#include "engine/engine.h"
#include "support/cmocka_all.h"
#include "support/compare.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_TEMPORARY 512
static char temporary[MAX_TEMPORARY][256];
static int n_temporary;

static void remove_temporary(void) {
    for (int i = 0; i < n_temporary; i++) {
        unlink(temporary[i]);
    }
}

static const char *new_temporary(const char *suffix) {
    assert_true(n_temporary < MAX_TEMPORARY);
    if (n_temporary == 0) {
        atexit(remove_temporary);
    }
    const char *folder = getenv("TMPDIR");
    snprintf(temporary[n_temporary], sizeof temporary[0], "%s/dt-test-%d-%d%s", folder ? folder : "/tmp", (int)getpid(),
             n_temporary, suffix);
    return temporary[n_temporary++];
}

const char *write_tiny(const tiny_model_params *params) {
    const char *path = new_temporary(".gguf");
    assert_true(tiny_model_write(params, path));
    return path;
}

dt_model *open_model(const char *path, bool exact) {
    dt_error error = {0};
    dt_model *model = NULL;
    const dt_model_params params = {.no_extra_buffers = exact};
    if (dt_model_open(path, &params, &model, &error) != DT_OK) {
        fail_msg("%s", error.message);
    }
    return model;
}

dt_session *open_session(const dt_model *model, const dt_session_params *params) {
    dt_error error = {0};
    dt_session *session = NULL;
    if (dt_session_new(model, params, &session, &error) != DT_OK) {
        fail_msg("%s", error.message);
    }
    return session;
}

engine_fixture *open_engine_fixture(const tiny_model_params *params, size_t n_tokens, uint64_t seed) {
    engine_fixture *f = calloc(1, sizeof *f);
    f->model = open_model(write_tiny(params), true);
    f->n_vocab = (size_t)dt_model_get_info(f->model)->n_vocab;
    f->tokens = calloc(n_tokens, sizeof *f->tokens);
    random_tokens(f->tokens, n_tokens, 3, (int32_t)f->n_vocab, seed);
    return f;
}

int close_engine_fixture(void **state) {
    engine_fixture *f = *state;
    dt_model_close(f->model);
    free(f->tokens);
    free(f);
    return 0;
}

tiny_model_params three_layers(int32_t n_ctx) {
    tiny_model_params p = tiny_model_default_params();
    p.type = GGML_TYPE_F32;
    p.n_layers = 3;
    p.n_ctx = n_ctx;
    p.n_heads = 6;
    p.n_kv_heads = 2;
    return p;
}

dt_eviction *eviction_from_json(const dt_model *model, const char *json) {
    const char *path = new_temporary(".json");
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(json, 1, strlen(json), file), strlen(json));
    fclose(file);
    dt_error error = {0};
    dt_eviction *eviction = NULL;
    if (dt_eviction_from_file(model, path, &eviction, &error) != DT_OK) {
        fail_msg("%s", error.message);
    }
    return eviction;
}

static void check_structure(const dt_session *session) {
    dt_error error = {0};
    if (dt_session_check(session, &error) != DT_OK) {
        fail_msg("%s", error.message);
    }
}

void assert_same_kept(const dt_session *a, const dt_session *b) {
    const dt_model_info *info = dt_model_get_info(dt_session_model(a));
    for (int32_t layer = 0; layer < info->n_layers; layer++) {
        for (int32_t head = 0; head < info->n_kv_heads[layer]; head++) {
            int32_t *kept_a, *kept_b;
            size_t n_a, n_b;
            dt_error error = {0};
            assert_int_equal(dt_session_kept_positions(a, layer, head, &kept_a, &n_a, &error), DT_OK);
            assert_int_equal(dt_session_kept_positions(b, layer, head, &kept_b, &n_b, &error), DT_OK);
            assert_int_equal(n_a, n_b);
            assert_memory_equal(kept_a, kept_b, n_a * sizeof *kept_a);
            dt_free(kept_a);
            dt_free(kept_b);
        }
    }
}

dt_sync_result sync_tokens(dt_session *session, const int32_t *tokens, size_t n) {
    dt_error error = {0};
    dt_sync_result result;
    if (dt_session_sync(session, tokens, n, NULL, NULL, &result, &error) != DT_OK) {
        fail_msg("%s", error.message);
    }
    check_structure(session);
    return result;
}

void append_token(dt_session *session, int32_t token) {
    dt_error error = {0};
    if (dt_session_append(session, token, &error) != DT_OK) {
        fail_msg("%s", error.message);
    }
    check_structure(session);
}

void greedy(dt_session *session, int32_t n_vocab, int32_t *out, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        const float *logits = dt_session_logits(session);
        assert_non_null(logits);
        assert_true(all_finite(logits, (size_t)n_vocab));
        out[i] = argmax(logits, (size_t)n_vocab);
        append_token(session, out[i]);
    }
}

void hide_evicted(dt_session *full, const dt_session *evicted) {
    const dt_model_info *info = dt_model_get_info(dt_session_model(full));
    dt_error error = {0};
    dt_kv *kv = dt_session_kv(full);
    for (int32_t layer = 0; layer < info->n_layers; layer++) {
        for (int32_t head = 0; head < info->n_kv_heads[layer]; head++) {
            int32_t *kept;
            size_t n_kept;
            assert_int_equal(dt_session_kept_positions(evicted, layer, head, &kept, &n_kept, &error), DT_OK);
            dt_kv_lane_view view;
            dt_kv_lane(kv, layer, head, &view);
            int32_t *positions = malloc((size_t)view.n_entries * sizeof *positions);
            dt_kv_positions(kv, layer, head, positions);
            const int32_t n_entries = view.n_entries;
            for (int32_t e = 0; e < n_entries; e++) {
                bool found = false;
                for (size_t k = 0; k < n_kept; k++) {
                    found = found || kept[k] == positions[e];
                }
                if (!found) {
                    assert_int_equal(dt_kv_set_bias(kv, layer, head, e, -INFINITY, &error), DT_OK);
                }
            }
            free(positions);
            dt_free(kept);
        }
    }
}

char *read_whole_file(const char *path, size_t *out_n) {
    FILE *file = fopen(path, "rb");
    if (!file) {
        fail_msg("%s can't be read", path);
        return NULL;
    }
    fseek(file, 0, SEEK_END);
    const long size = ftell(file);
    rewind(file);
    char *bytes = malloc((size_t)size + 1);
    assert_int_equal(fread(bytes, 1, (size_t)size, file), (size_t)size);
    fclose(file);
    bytes[size] = '\0';
    *out_n = (size_t)size;
    return bytes;
}
