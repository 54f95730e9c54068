/*
 * Score predict: what calibration learns, against weights that were hidden in the peaks; and sessions that go by it.
 */
#include "engine/eviction_config.h"
#include "engine/session.h"
#include "support/cmocka_all.h"
#include "support/compare.h"
#include "support/fixture.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define N_TOKENS 300
#define HELD                                                                                                                       \
    "{\"budget\": \"adaptive\", \"total_cache_size\": 600, \"layers\": {\"0-\": {\"policy\": \"importance_score\", \"score\": "    \
    "\"reconstruct\"}}}"

typedef struct fixture {
    dt_model *model;
    int32_t tokens[N_TOKENS];
    char *config;
    json_t *layers; /* of the config */
} fixture;

static dt_session *new_session(const fixture *f, const char *json, dt_evict evict, dt_prefill prefill) {
    dt_eviction *eviction = eviction_from_json(f->model, json);
    const dt_session_params params = {
        .n_threads = 2, .n_batch = 64, .kv_block_tokens = 16, .eviction = eviction, .evict = evict, .prefill = prefill};
    dt_session *session = open_session(f->model, &params);
    dt_eviction_free(eviction); /* the session must not need it any more */
    return session;
}

/* Small and different for every lane. */
static double hidden_weight(int32_t lane, int32_t i) {
    return i == DT_PREDICT_BIAS ? 0.5 : i == DT_PREDICT_DECAY ? -0.3 - 0.05 * lane : 0.1 * sin(1.7 * i + lane);
}

/* In double precision and from stored entries: an oracle of its own for features and distance. split: as in dt_predict_shape. */
static double hidden_peak(const dt_session *s, int32_t layer, int32_t lane, int32_t entry, int32_t position, int32_t split) {
    const dt_predict_shape shape = dt_session_predict_shape(s->model);
    float key[DT_MAX_HEAD_DIM], value[DT_MAX_HEAD_DIM];
    assert_true(dt_kv_get_entries(s->kv, layer, lane, entry, 1, key, value));
    double sum = hidden_weight(lane, 0) + hidden_weight(lane, 1) * log((s->n_tokens - position + 64.0) / 576.0);
    for (int32_t i = 0; i < shape.dim_k / 2; i++) {
        const int32_t a = 2 * i < split ? i : 2 * i, b = 2 * i < split ? i + split / 2 : 2 * i + 1;
        sum += hidden_weight(lane, 2 + i) * hypot((double)key[a], (double)key[b]);
    }
    for (int32_t i = 0; i < shape.dim_v; i++) {
        sum += hidden_weight(lane, 2 + shape.dim_k / 2 + i) * (double)value[i];
    }
    return exp(sum);
}

static void hide_weights(dt_session *s) {
    int32_t positions[N_TOKENS];
    for (int32_t layer = 0; layer < s->model->info.n_layers; layer++) {
        for (int32_t lane = 0; lane < s->model->info.n_kv_heads[layer]; lane++) {
            dt_kv_lane_view view;
            dt_kv_lane(s->kv, layer, lane, &view);
            dt_kv_positions(s->kv, layer, lane, positions);
            for (int32_t i = 0; i < view.n_entries; i++) {
                view.peak_mass[i] = (float)hidden_peak(s, layer, lane, i, positions[i], dt_session_predict_shape(s->model).split);
            }
        }
    }
}

static int setup_family(void **state, const char *arch) {
    fixture *f = calloc(1, sizeof *f);
    tiny_model_params p = tiny_model_default_params();
    dt_error error;
    p.arch = arch;
    p.n_layers = 2;
    p.n_kv_heads = 2;
    f->model = open_model(write_tiny(&p), false);
    random_tokens(f->tokens, N_TOKENS, 3, dt_model_get_info(f->model)->n_vocab, 5);
    dt_session *session = new_session(f, HELD, DT_EVICT_HELD, DT_PREFILL_FULL);
    sync_tokens(session, f->tokens, N_TOKENS);
    hide_weights(session);
    dt_calibration *calibration = NULL;
    assert_int_equal(dt_calibration_new(f->model, &calibration, &error), DT_OK);
    assert_int_equal(dt_calibration_add(calibration, session, &error), DT_OK);
    assert_int_equal(dt_calibration_config(calibration, 96, &f->config, &error), DT_OK);
    dt_calibration_free(calibration);
    dt_session_free(session);
    json_t *config = json_loads(f->config, 0, NULL);
    f->layers = json_incref(json_object_get(config, "layers"));
    json_decref(config);
    *state = f;
    return 0;
}

static int setup(void **state) { return setup_family(state, "llama"); }
static int setup_halves(void **state) { return setup_family(state, "qwen2"); }

static int teardown(void **state) {
    fixture *f = *state;
    json_decref(f->layers);
    dt_free(f->config);
    dt_model_close(f->model);
    free(f);
    return 0;
}

static void test_calibration_finds_hidden_weights(void **state) {
    const fixture *f = *state;
    const dt_predict_shape shape = dt_session_predict_shape(f->model);
    assert_int_equal(json_object_size(f->layers), 2);
    for (int32_t layer = 0; layer < 2; layer++) {
        const json_t *lists = json_object_get(json_object_get(f->layers, layer == 0 ? "0" : "1"), "weights");
        assert_int_equal(json_array_size(lists), 2);
        for (int32_t lane = 0; lane < 2; lane++) {
            const json_t *list = json_array_get(lists, (size_t)lane);
            assert_int_equal(json_array_size(list), dt_predict_n_weights(&shape));
            for (int32_t i = 1; i < dt_predict_n_weights(&shape); i++) { /* the small ridge moves the bias a little more */
                const double weight = json_real_value(json_array_get(list, (size_t)i));
                assert_true(isfinite(weight) && fabs(weight - hidden_weight(lane, i)) <= 0.03);
            }
        }
    }
}

/* With what was learned, peaks come out as they were hidden, whether the text is read at once or in chunks with rounds between. */
static void test_sessions_foretell_peaks(void **state) {
    const fixture *f = *state;
    for (int32_t streaming = 0; streaming < 2; streaming++) {
        dt_session *s = new_session(f, f->config, streaming ? DT_EVICT_ALWAYS : DT_EVICT_HELD,
                                    streaming ? DT_PREFILL_STREAMING : DT_PREFILL_FULL);
        dt_error error;
        int32_t positions[N_TOKENS];
        sync_tokens(s, f->tokens, N_TOKENS);
        assert_int_equal(dt_session_check(s, &error), DT_OK);
        assert_int_equal(s->peaks_until == s->n_tokens, !streaming || dt_kv_room(s->kv, 0, dt_kv_shared_room(s->kv)) < 64);
        for (int32_t lane = 0; lane < 2; lane++) {
            dt_kv_lane_view view;
            dt_kv_lane(s->kv, 1, lane, &view);
            dt_kv_positions(s->kv, 1, lane, positions);
            assert_true(streaming ? view.n_entries < N_TOKENS : view.n_entries == N_TOKENS);
            for (int32_t i = 0; i < view.n_entries; i++) {
                if (positions[i] < s->peaks_until) { /* stored as if it lay 512 tokens back */
                    const double want = hidden_peak(s, 1, lane, i, s->n_tokens - 512, dt_session_predict_shape(s->model).split);
                    const double got = (double)view.peak_mass[i];
                    assert_true(isfinite(got) && fabs(log(got / want)) <= 0.05);
                }
            }
        }
        dt_session_free(s);
    }
}

/* A fork that goes by weights, of a session that has repeated its text, has the peaks of a session that went by them all along. */
static void test_a_fork_foretells_anew(void **state) {
    const fixture *f = *state;
    dt_error error;
    dt_session *repeated = new_session(f, HELD, DT_EVICT_HELD, DT_PREFILL_FULL), *fork = NULL;
    dt_session *fresh = new_session(f, f->config, DT_EVICT_HELD, DT_PREFILL_FULL);
    sync_tokens(repeated, f->tokens, N_TOKENS);
    sync_tokens(fresh, f->tokens, N_TOKENS);
    dt_eviction *learned = eviction_from_json(f->model, f->config);
    assert_int_equal(dt_session_fork(repeated, learned, DT_EVICT_HELD, &fork, &error), DT_OK);
    dt_eviction_free(learned);
    dt_kv_lane_view other, own, want;
    dt_kv_lane(repeated->kv, 1, 0, &other);
    dt_kv_lane(fork->kv, 1, 0, &own);
    dt_kv_lane(fresh->kv, 1, 0, &want);
    int32_t n_changed = 0;
    for (int32_t i = 0; i < N_TOKENS; i++) {
        assert_true(fabsf(own.peak_mass[i] - want.peak_mass[i]) <= 1e-3f * want.peak_mass[i]);
        n_changed += own.peak_mass[i] != other.peak_mass[i];
    }
    assert_true(n_changed > N_TOKENS / 2);
    dt_session_free(fork);
    dt_session_free(fresh);
    dt_session_free(repeated);
}

/* Of one session under settings that only observe, forks go on as forks of a session that read the text under theirs. */
static void test_one_session_observes_for_several(void **state) {
    const fixture *f = *state;
    enum { N_SETTINGS = 4, REPEATED = 3 };
    const char *configs[N_SETTINGS] = {
        "{\"0-\": {\"policy\": \"local_window\", \"max_cache_size\": 64, \"memory_slots\": 8}}",
        "{\"0\": {\"policy\": \"none\"}, \"1\": {\"policy\": \"importance_score\", \"max_cache_size\": 64}}", f->config,
        "{\"0\": {\"policy\": \"local_window\", \"max_cache_size\": 64}, \"1\": {\"policy\": \"importance_score\", \"score\": "
        "\"reconstruct\", \"max_cache_size\": 64}}"};
    dt_eviction *settings[N_SETTINGS], *observe = NULL;
    dt_error error;
    for (size_t i = 0; i < N_SETTINGS; i++) {
        settings[i] = eviction_from_json(f->model, configs[i]);
    }
    for (size_t n = 1; n <= N_SETTINGS; n++) {
        assert_int_equal(dt_eviction_observe((const dt_eviction *const *)settings, n, &observe, &error), DT_OK);
        const bool foretells = n > 2, repeats = n > REPEATED;
        assert_ptr_equal(dt_eviction_budget(observe, 0)->policy, foretells ? &dt_policy_predict : &dt_policy_importance_score);
        assert_ptr_equal(dt_eviction_budget(observe, 1)->policy, repeats     ? &dt_policy_reconstruct
                                                                 : foretells ? &dt_policy_predict
                                                                             : &dt_policy_importance_score);
        const dt_session_params params = {
            .n_threads = 2, .n_batch = 64, .kv_block_tokens = 16, .eviction = observe, .evict = DT_EVICT_HELD};
        dt_session *base = open_session(f->model, &params);
        dt_eviction_free(observe);
        sync_tokens(base, f->tokens, N_TOKENS);
        assert_true(dt_kv_mean_length(base->kv, 1) == N_TOKENS);
        for (size_t i = 0; i < n; i++) {
            dt_session *own = new_session(f, configs[i], DT_EVICT_HELD, DT_PREFILL_FULL), *of_own = NULL, *of_base = NULL;
            sync_tokens(own, f->tokens, N_TOKENS);
            assert_int_equal(dt_session_fork(own, settings[i], DT_EVICT_ONCE, &of_own, &error), DT_OK);
            assert_int_equal(dt_session_fork(base, settings[i], DT_EVICT_ONCE, &of_base, &error), DT_OK);
            assert_same_kept(of_own, of_base);
            dt_session_free(of_own);
            dt_session_free(of_base);
            dt_session_free(own);
        }
        dt_session_free(base);
    }
    for (size_t i = 0; i < N_SETTINGS; i++) {
        dt_eviction_free(settings[i]);
    }
    assert_int_equal(dt_eviction_observe(NULL, 0, &observe, &error), DT_ERR_ARGUMENT);
}

static void write_file(const char *path, const char *text) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, strlen(text), file), strlen(text));
    fclose(file);
}

static dt_eviction *chat_preset(const fixture *f) {
    dt_eviction *eviction = NULL;
    dt_error error;
    assert_int_equal(dt_eviction_from_preset(f->model, "chat", &eviction, &error), DT_OK);
    return eviction;
}

/* `text` with a list of sizes before every score. free() */
static char *with_lanes(const char *text, int32_t n_lanes) {
    char *out = calloc(1, 40 * strlen(text)), list[128] = "";
    assert_non_null(out);
    assert_in_range(n_lanes, 1, 8);
    for (int32_t i = 0; i < n_lanes; i++) {
        snprintf(list + strlen(list), sizeof list - strlen(list), "%s%d", i > 0 ? ", " : "", 200 + i);
    }
    for (const char *at; (at = strstr(text, "\"score\"")) != NULL; text = at + 1) {
        sprintf(out + strlen(out), "%.*s\"lanes\": [%s], \"", (int)(at - text), text, list);
    }
    strcat(out, text);
    return out;
}

/* A preset goes by the file beside the model, with the tokens it has in total; without one, or with a wrong one, as ever. */
static void test_presets_find_what_was_learned(void **state) {
    const fixture *f = *state;
    char path[512];
    const char *model_path = dt_gguf_path(f->model->gguf);
    snprintf(path, sizeof path, "%.*s.tlc.json", (int)(strlen(model_path) - strlen(".gguf")), model_path);
    dt_eviction *plain = chat_preset(f);
    assert_int_equal(dt_eviction_total(plain), 0);
    assert_ptr_equal(dt_eviction_budget(plain, 0)->policy, &dt_policy_local_window);
    write_file(path, f->config);
    dt_eviction *learned = chat_preset(f);
    assert_int_equal(dt_eviction_total(learned), 2048 + 4096);
    for (int32_t i = 0; i < 2; i++) {
        assert_ptr_equal(dt_eviction_budget(learned, i)->policy, &dt_policy_predict);
        assert_int_equal(dt_eviction_budget(learned, i)->recent_window, 64);
    }
    dt_error error;
    assert_int_equal(dt_eviction_override(learned, 48, -1, &error), DT_OK);
    assert_int_equal(dt_eviction_total(learned), 2 * 48);
    const dt_session_params params = {.n_threads = 2, .eviction = learned};
    dt_session *s = open_session(f->model, &params);
    sync_tokens(s, f->tokens, N_TOKENS);
    assert_true(dt_kv_mean_length(s->kv, 0) + dt_kv_mean_length(s->kv, 1) <= 2 * 48);
    dt_session_free(s);
    dt_eviction_free(learned);
    char *sized = with_lanes(f->config, dt_model_get_info(f->model)->n_kv_heads[0]); /* of a file only the weights count */
    write_file(path, sized);
    dt_eviction *by_weights = chat_preset(f);
    assert_int_equal(dt_eviction_total(by_weights), 2048 + 4096);
    assert_null(dt_eviction_budget(by_weights, 0)->lane_max);
    dt_eviction_free(by_weights);
    free(sized);
    write_file(path, "{\"0\": {\"policy\": \"importance_score\", \"score\": \"predict\", \"max_cache_size\": 64, \"weights\": "
                     "[[1, 2, 3], [1, 2, 3]]}}"); /* of another model */
    dt_eviction *wrong = chat_preset(f);
    write_file(path, "{\"0-\": {\"policy\": \"local_window\", \"max_cache_size\": 64}}");
    dt_eviction *other = chat_preset(f);
    remove(path);
    assert_int_equal(dt_eviction_total(wrong) + dt_eviction_total(other), 0);
    assert_int_equal(dt_eviction_budget(other, 0)->max_cache_size, 2048);
    dt_eviction_free(plain);
    dt_eviction_free(wrong);
    dt_eviction_free(other);
}

/* Keys and values as bytes tell nearly the same, and those that lie elsewhere than in blocks. */
static void test_bytes_foretell_alike(void **state) {
    const fixture *f = *state;
    enum { N_WAYS = 4 };
    dt_session *sessions[N_WAYS];
    dt_kv_lane_view views[N_WAYS];
    for (int32_t i = 0; i < N_WAYS; i++) {
        dt_eviction *eviction = eviction_from_json(f->model, f->config);
        const dt_session_params params = {.n_threads = 2,
                                          .eviction = eviction,
                                          .evict = DT_EVICT_HELD,
                                          .kv_type = i % 2 == 0 ? DT_KV_F16 : DT_KV_INT8,
                                          .kernel = i < 2 ? NULL : "ggml"};
        sessions[i] = open_session(f->model, &params);
        dt_eviction_free(eviction);
        sync_tokens(sessions[i], f->tokens, N_TOKENS);
        dt_kv_lane(sessions[i]->kv, 0, 1, &views[i]);
    }
    for (int32_t way = 0; way < N_WAYS; way++) {
        for (int32_t i = 0; i < N_TOKENS; i++) {
            const double whole = (double)views[0].peak_mass[i], got = (double)views[way].peak_mass[i];
            assert_true(isfinite(whole) && whole > 0 && isfinite(got) && fabs(log(got / whole)) <= 0.05);
        }
    }
    for (int32_t way = 0; way < N_WAYS; way++) {
        dt_session_free(sessions[way]);
    }
}

static void test_wrong_sessions_and_weights(void **state) {
    const fixture *f = *state;
    dt_error error;
    dt_calibration *calibration = NULL;
    assert_int_equal(dt_calibration_new(f->model, &calibration, &error), DT_OK);
    char *config = NULL;
    assert_int_equal(dt_calibration_config(calibration, 96, &config, &error), DT_ERR_ARGUMENT); /* nothing was added */
    assert_non_null(strstr(error.message, "dt_calibration_add"));
    dt_session *held = new_session(f, HELD, DT_EVICT_HELD, DT_PREFILL_FULL);
    assert_int_equal(dt_calibration_add(calibration, held, &error), DT_ERR_ARGUMENT);
    assert_non_null(strstr(error.message, "a text of 0 tokens"));
    sync_tokens(held, f->tokens, 100);
    assert_int_equal(dt_calibration_add(calibration, held, &error), DT_OK);
    for (int32_t size = -1; size < 1; size++) {
        assert_int_equal(dt_calibration_config(calibration, size, &config, &error), DT_ERR_ARGUMENT);
        assert_non_null(strstr(error.message, "average_cache_size must be at least 1"));
    }
    assert_null(config);
    dt_session_free(held);
    dt_session *evicted = new_session(f, HELD, DT_EVICT_ONCE, DT_PREFILL_FULL);
    sync_tokens(evicted, f->tokens, 100);
    append_token(evicted, 4); /* not repeated */
    assert_int_equal(dt_calibration_add(calibration, evicted, &error), DT_ERR_ARGUMENT);
    dt_session_free(evicted);
    dt_calibration_free(calibration);
    const char *text = "{\"0\": {\"policy\": \"importance_score\", \"score\": \"predict\", \"max_cache_size\": 64, \"weights\": "
                       "[[1, 2, 3], [1, 2, 3]]}}";
    dt_eviction *eviction = NULL;
    assert_int_equal(dt_eviction_from_text(f->model, "e.json", text, strlen(text), &eviction, &error), DT_ERR_CONFIG);
    assert_non_null(strstr(error.message, "2 lists of 3 numbers, but this model's layer has 2 KV heads"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_calibration_finds_hidden_weights, setup, teardown),
        cmocka_unit_test_setup_teardown(test_calibration_finds_hidden_weights, setup_halves, teardown),
        cmocka_unit_test_setup_teardown(test_sessions_foretell_peaks, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_fork_foretells_anew, setup, teardown),
        cmocka_unit_test_setup_teardown(test_one_session_observes_for_several, setup, teardown),
        cmocka_unit_test_setup_teardown(test_presets_find_what_was_learned, setup, teardown),
        cmocka_unit_test_setup_teardown(test_bytes_foretell_alike, setup_halves, teardown),
        cmocka_unit_test_setup_teardown(test_wrong_sessions_and_weights, setup, teardown),
    };
    return cmocka_run_group_tests_name("calibrate", tests, NULL, NULL);
}
