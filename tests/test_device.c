/*
 * Caches that are at home on a device, computed by ggml's operators (graph/device_cache.h): against the scalar reference of
 * attention, for every shape, precision and prefill; the same evictions; forks, files, rewinds and drafts on them.
 *
 * The CPU stands for the device: by kernel "ggml" (and "ggml_matmul", without fused attention), and as the device "ggml-cpu", which
 * has layers, weights and cache of its own. DT_TEST_DEVICE=vulkan (or another name) runs all of it there instead.
 */
#include "engine/engine.h"
#include "engine/session.h"
#include "support/cmocka_all.h"
#include "support/compare.h"
#include "support/fixture.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Of the logits' standard deviation. Fused attention of ggml's CPU sums values in halves; the products only round queries and
 * weights to them. INT8 has a scale for 32 numbers there, for a whole key in the reference. */
#define FUSED_TOLERANCE 4e-2
#define PRODUCTS_TOLERANCE 1.5e-2
#define INT8_TOLERANCE 2.5e-1
#define N_CTX 640

typedef struct way {
    const char *device, *kernel;
    int32_t n_layers; /* on the device; 0 = all */
} way;

static const way cpu_ways[] = {{NULL, "ggml", 0}, {NULL, "ggml_matmul", 0}, {"ggml-cpu", NULL, 0}, {"ggml-cpu,ggml-cpu", NULL, 2}};

/* The i-th way to compute elsewhere; false past the last. */
static bool get_way(size_t i, way *out) {
    const char *name = getenv("DT_TEST_DEVICE");
    const way device_ways[] = {{name, NULL, 0}, {name, "ggml_matmul", 0}, {name, NULL, 2}};
    const bool there = i < (name ? sizeof device_ways : sizeof cpu_ways) / sizeof(way);
    if (there) {
        *out = name ? device_ways[i] : cpu_ways[i];
    }
    return there;
}

static double tolerance(const way *w, dt_kv_type type) {
    const bool products = w->kernel != NULL && strcmp(w->kernel, "ggml_matmul") == 0;
    return type == DT_KV_INT8 ? INT8_TOLERANCE : products ? PRODUCTS_TOLERANCE : FUSED_TOLERANCE;
}

static tiny_model_params model_params(void) { return three_layers(N_CTX); }

static dt_model *open_on(const char *path, const way *w) {
    const dt_model_params params = {.no_extra_buffers = true, .device = w->device, .n_device_layers = w->n_layers};
    dt_model *model = NULL;
    dt_error error = {0};
    if (dt_model_open(path, &params, &model, &error) != DT_OK) {
        fail_msg("%s", error.message);
    }
    return model;
}

static dt_session_params small_params(const way *w) {
    return (dt_session_params){.n_threads = 1, .n_batch = 48, .kv_block_tokens = 16, .kernel = w ? w->kernel : "reference"};
}

/* ---- attention ---- */

/* The logits after tokens[n_first], and after each of n_steps more; free with free(). */
static float *logits_of(dt_session *s, const int32_t *tokens, int32_t n_first, int32_t n_steps, size_t n_vocab) {
    float *out = malloc((size_t)(n_steps + 1) * n_vocab * sizeof *out);
    assert_non_null(out);
    sync_tokens(s, tokens, (size_t)n_first);
    memcpy(out, dt_session_logits(s), n_vocab * sizeof *out);
    for (int32_t step = 0; step < n_steps; step++) {
        append_token(s, tokens[n_first + step]);
        memcpy(out + (size_t)(step + 1) * n_vocab, dt_session_logits(s), n_vocab * sizeof *out);
    }
    return out;
}

static void compare_shape(int32_t n_rep, int32_t head_dim, dt_kv_type type) {
    enum { N = 300, STEPS = 3 };
    tiny_model_params p = model_params();
    p.n_layers = 2;
    p.head_dim = head_dim;
    p.n_kv_heads = n_rep == 8 ? 1 : 2;
    p.n_heads = n_rep * p.n_kv_heads;
    const char *path = write_tiny(&p);
    dt_model *plain = open_on(path, &(way){0});
    const size_t n_vocab = (size_t)dt_model_get_info(plain)->n_vocab;
    int32_t tokens[N + STEPS];
    random_tokens(tokens, N + STEPS, 3, (int32_t)n_vocab, 7);
    dt_session_params here = small_params(NULL);
    here.kv_type = type;
    dt_session *a = open_session(plain, &here);
    float *want = logits_of(a, tokens, N, STEPS, n_vocab);
    dt_session_free(a);
    way w;
    for (size_t i = 0; get_way(i, &w) && i < (head_dim == 64 ? 4 : 2); i++) {
        dt_model *model = open_on(path, &w);
        dt_session_params there = small_params(&w);
        there.kv_type = type;
        dt_session *b = open_session(model, &there);
        float *got = logits_of(b, tokens, N, STEPS, n_vocab);
        double worst = 0;
        for (size_t step = 0; step <= STEPS; step++) {
            const double error = logit_error(got + step * n_vocab, want + step * n_vocab, n_vocab);
            worst = error > worst ? error : worst;
        }
        print_message("%s %s, %d query heads a key head of %d, %s: %.5f\n", w.device ? w.device : "cpu", w.kernel ? w.kernel : "",
                      n_rep, head_dim, type == DT_KV_F16 ? "f16" : "int8", worst);
        assert_true(worst <= tolerance(&w, type));
        free(got);
        dt_session_free(b);
        dt_model_close(model);
    }
    free(want);
    dt_model_close(plain);
}

static void test_shapes(void **state) {
    (void)state;
    static const int32_t reps[] = {1, 3, 4, 8}, dims[] = {64, 80, 128};
    for (size_t i = 0; i < 4; i++) {
        for (size_t j = 0; j < 3; j++) {
            compare_shape(reps[i], dims[j], DT_KV_F16);
        }
        compare_shape(reps[i], dims[i % 3], DT_KV_INT8);
    }
}

/* ---- eviction ---- */

static const char *const configs[] = {
    "{\"0-\": {\"policy\": \"local_window\", \"max_cache_size\": 40, \"min_cache_size\": 8, \"recent_window\": 8}}",
    "{\"0-\": {\"policy\": \"importance_score\", \"max_cache_size\": 40, \"min_cache_size\": 8, \"recent_window\": 8}}",
    /* lanes of different lengths, layers of different policies, one that keeps everything */
    "{\"0\": {\"policy\": \"importance_score\", \"lanes\": [30, 60], \"min_cache_size\": 8, \"recent_window\": 8},"
    " \"2\": {\"policy\": \"local_window\", \"max_cache_size\": 50, \"min_cache_size\": 8, \"recent_window\": 8, \"sink_tokens\": "
    "6}}",
    "{\"budget\": \"adaptive\", \"total_cache_size\": 120, \"layers\": {\"0-\": {\"policy\": \"importance_score\", "
    "\"max_cache_size\": 80, \"min_cache_size\": 16, \"recent_window\": 8}}}"};

/* What is computed after evictions is the scalar reference over the full cache with the victims hidden, however it was evicted. */
static void evict_and_compare(dt_model *plain, dt_model *model, const way *w, const char *config, dt_prefill prefill,
                              dt_kv_type type) {
    enum { N = 200, STEPS = 12 };
    const size_t n_vocab = (size_t)dt_model_get_info(plain)->n_vocab;
    int32_t tokens[N + STEPS];
    random_tokens(tokens, N + STEPS, 3, (int32_t)n_vocab, 11);
    dt_eviction *eviction = eviction_from_json(model, config);
    dt_session_params here = small_params(NULL), there = small_params(w);
    here.kv_type = there.kv_type = type;
    there.eviction = eviction;
    there.prefill = prefill;
    dt_session *full = open_session(plain, &here), *evicted = open_session(model, &there);
    double worst = 0;
    dt_error error = {0};
    for (size_t n = 48; n < N + 48; n += 48) { /* streaming evicts between chunks: the full cache follows */
        sync_tokens(evicted, tokens, n < N ? n : N);
        sync_tokens(full, tokens, n < N ? n : N);
        hide_evicted(full, evicted);
    }
    for (int32_t i = 0; i < STEPS; i++) {
        append_token(evicted, tokens[N + i]);
        append_token(full, tokens[N + i]);
        assert_int_equal(dt_session_check(evicted, &error), DT_OK);
        const double off = logit_error(dt_session_logits(evicted), dt_session_logits(full), n_vocab);
        worst = off > worst ? off : worst;
        hide_evicted(full, evicted);
    }
    dt_session_stats stats;
    dt_session_get_stats(evicted, &stats);
    assert_true(stats.evicted_tokens > 0);
    print_message("%s %s, %s, %s: %.5f\n", w->device ? w->device : "cpu", w->kernel ? w->kernel : "",
                  prefill == DT_PREFILL_FULL ? "full" : "streaming", type == DT_KV_F16 ? "f16" : "int8", worst);
    assert_true(worst <= tolerance(w, type));
    dt_session_free(full);
    dt_session_free(evicted);
    dt_eviction_free(eviction);
}

static void test_eviction_is_hiding(void **state) {
    (void)state;
    const tiny_model_params p = model_params();
    const char *path = write_tiny(&p);
    dt_model *plain = open_on(path, &(way){0});
    way w;
    for (size_t i = 0; get_way(i, &w); i++) {
        dt_model *model = open_on(path, &w);
        for (size_t c = 0; c < sizeof configs / sizeof configs[0]; c++) {
            evict_and_compare(plain, model, &w, configs[c], c % 2 ? DT_PREFILL_STREAMING : DT_PREFILL_FULL, DT_KV_F16);
            evict_and_compare(plain, model, &w, configs[c], c % 2 ? DT_PREFILL_FULL : DT_PREFILL_STREAMING,
                              c == 1 ? DT_KV_INT8 : DT_KV_F16);
        }
        dt_model_close(model);
    }
    dt_model_close(plain);
}

/* Settings that foretell with made-up weights, the same for all layers; free with free(). */
static char *predict_config(const dt_model *model) {
    const dt_predict_shape shape = dt_session_predict_shape(model);
    const dt_model_info *info = dt_model_get_info(model);
    const size_t room = 200 + (size_t)(info->n_kv_heads[0] * dt_predict_n_weights(&shape)) * 12;
    char *text = malloc(room);
    assert_non_null(text);
    size_t at = (size_t)snprintf(text, room,
                                 "{\"0-\": {\"policy\": \"importance_score\", \"score\": \"predict\", \"max_cache_size\": 40, "
                                 "\"min_cache_size\": 8, \"recent_window\": 8, \"weights\": [");
    for (int32_t lane = 0; lane < info->n_kv_heads[0]; lane++) {
        for (int32_t i = 0; i < dt_predict_n_weights(&shape); i++) {
            at += (size_t)snprintf(text + at, room - at, "%s%.2f",
                                   i > 0      ? ","
                                   : lane > 0 ? "],["
                                              : "[",
                                   i == DT_PREDICT_DECAY ? -0.5 : 0.4 * ((i * 7 + lane * 5) % 11 - 5));
        }
    }
    snprintf(text + at, room - at, "]]}}");
    return text;
}

/* Where the kernels of the CPU have seen the last queries only, as a device does, both keep the same tokens. */
static void test_same_decisions(void **state) {
    (void)state;
    enum { N = 150 };
    const tiny_model_params p = model_params();
    const char *path = write_tiny(&p);
    dt_model *plain = open_on(path, &(way){0});
    const dt_model_info *info = dt_model_get_info(plain);
    int32_t tokens[N];
    random_tokens(tokens, N, 3, info->n_vocab, 13);
    const size_t n_configs = sizeof configs / sizeof configs[0];
    char *foretelling = predict_config(plain);
    way w;
    for (size_t i = 0; get_way(i, &w); i++) {
        dt_model *model = open_on(path, &w);
        for (size_t c = 0; c <= n_configs; c++) {
            dt_eviction *eviction = eviction_from_json(plain, c < n_configs ? configs[c] : foretelling);
            dt_session_params here = small_params(NULL), there = small_params(&w);
            here.eviction = there.eviction = eviction;
            here.n_batch = there.n_batch = N;
            dt_session *a = open_session(plain, &here), *b = open_session(model, &there);
            sync_tokens(a, tokens, N);
            sync_tokens(b, tokens, N);
            if (c % 2 == 1) { /* a fork of what was held evicts by what the other has seen */
                there.evict = DT_EVICT_HELD;
                dt_session *held = open_session(model, &there);
                dt_error error = {0};
                sync_tokens(held, tokens, N);
                dt_session_free(b);
                assert_int_equal(dt_session_fork(held, eviction, DT_EVICT_ALWAYS, &b, &error), DT_OK);
                dt_session_free(held);
            }
            assert_same_kept(a, b);
            dt_session_free(a);
            dt_session_free(b);
            dt_eviction_free(eviction);
        }
        dt_model_close(model);
    }
    free(foretelling);
    dt_model_close(plain);
}

static dt_session *repeating_session(const dt_model *model, const way *w, const char *json, int32_t n_batch, dt_evict evict) {
    dt_eviction *eviction = eviction_from_json(model, json);
    dt_session_params params = small_params(w);
    params.eviction = eviction;
    params.n_batch = n_batch;
    params.evict = evict;
    dt_session *s = open_session(model, &params);
    dt_eviction_free(eviction);
    return s;
}

static void assert_same_peaks(dt_session *a, dt_session *b) {
    const dt_model_info *info = dt_model_get_info(dt_session_model(a));
    for (int32_t layer = 0; layer < info->n_layers; layer++) {
        for (int32_t head = 0; head < info->n_kv_heads[layer]; head++) {
            dt_kv_lane_view x, y;
            dt_kv_lane(dt_session_kv(a), layer, head, &x);
            dt_kv_lane(dt_session_kv(b), layer, head, &y);
            assert_int_equal(x.n_entries, y.n_entries);
            for (int32_t e = 0; e < x.n_entries; e++) {
                assert_true(dt_is_finite(y.peak_mass[e]) && x.peak_mass[e] > 0);
                assert_true(fabsf(x.peak_mass[e] - y.peak_mass[e]) <= 2e-3f + 2e-2f * x.peak_mass[e]);
            }
        }
    }
}

/* Scores from a repetition: the same tokens stay, of what was held too; pieces of a longer text, each of which sees a part of the cache,
 * find the same peaks. */
static void test_reconstruction(void **state) {
    (void)state;
    enum { N = 150, PIECE = 40 };
    static const char *const by_repetition[] = {
        "{\"0-\": {\"policy\": \"importance_score\", \"score\": \"reconstruct\", \"max_cache_size\": 40, \"min_cache_size\": 8, "
        "\"recent_window\": 8}}",
        "{\"budget\": \"adaptive\", \"total_cache_size\": 120, \"layers\": {\"0-\": {\"policy\": \"importance_score\", "
        "\"score\": \"reconstruct\", \"max_cache_size\": 80, \"min_cache_size\": 16, \"recent_window\": 8}}}"};
    const tiny_model_params p = model_params();
    const char *path = write_tiny(&p);
    dt_model *plain = open_on(path, &(way){0});
    const size_t n_vocab = (size_t)dt_model_get_info(plain)->n_vocab;
    int32_t tokens[N + 1];
    random_tokens(tokens, N + 1, 3, (int32_t)n_vocab, 43);
    way w;
    for (size_t i = 0; get_way(i, &w); i++) {
        dt_model *model = open_on(path, &w);
        for (int c = 0; c < 2; c++) {
            dt_session *a = repeating_session(plain, NULL, by_repetition[c], N, DT_EVICT_ALWAYS);
            dt_session *b = repeating_session(model, &w, by_repetition[c], N, c == 1 ? DT_EVICT_HELD : DT_EVICT_ALWAYS);
            sync_tokens(a, tokens, N);
            sync_tokens(b, tokens, N);
            if (c == 1) {
                dt_session *held = b;
                dt_error error = {0};
                dt_eviction *eviction = eviction_from_json(model, by_repetition[c]);
                assert_int_equal(dt_session_fork(held, eviction, DT_EVICT_ALWAYS, &b, &error), DT_OK);
                dt_eviction_free(eviction);
                dt_session_free(held);
            }
            assert_same_kept(a, b);
            append_token(a, tokens[N]); /* the repetition has left no trace */
            append_token(b, tokens[N]);
            assert_true(logit_error(dt_session_logits(b), dt_session_logits(a), n_vocab) <= tolerance(&w, DT_KV_F16));
            dt_session_free(a);
            dt_session_free(b);
        }
        dt_session *a = repeating_session(plain, NULL, by_repetition[0], PIECE, DT_EVICT_HELD);
        dt_session *b = repeating_session(model, &w, by_repetition[0], PIECE, DT_EVICT_HELD);
        sync_tokens(a, tokens, N);
        sync_tokens(b, tokens, N);
        assert_same_peaks(a, b);
        dt_session_free(a);
        dt_session_free(b);
        dt_model_close(model);
    }
    dt_model_close(plain);
}

/* ---- past the context ---- */

enum { SMALL_CTX = 128 };

static dt_session *streaming_session(const dt_model *model, const way *w, const char *json, dt_kv_type type, dt_prefill prefill) {
    dt_eviction *eviction = eviction_from_json(model, json);
    dt_session_params params = small_params(w);
    params.n_batch = 32;      /* with budgets below that each round follows 32 queries, all of which a device has seen */
    params.prefill = prefill; /* what is longer than the context is always read as a stream */
    params.kv_type = type;
    params.eviction = eviction;
    dt_session *s = open_session(model, &params);
    dt_eviction_free(eviction);
    return s;
}

/* A conversation several contexts long keeps what the CPU's own kernels keep, at the same places, with keys turned alike. */
static void compare_past_the_context(const char *path, dt_model *plain, const char *json, bool by_scores) {
    enum { N = 500, STEPS = 40 };
    const size_t n_vocab = (size_t)dt_model_get_info(plain)->n_vocab;
    int32_t tokens[N + STEPS];
    random_tokens(tokens, N + STEPS, 3, (int32_t)n_vocab, 48); /* of which no two scores nearly tie in a round */
    dt_session *a = streaming_session(plain, NULL, json, DT_KV_F16, DT_PREFILL_STREAMING),
               *further = streaming_session(plain, NULL, json, DT_KV_F16, DT_PREFILL_STREAMING);
    sync_tokens(a, tokens, N);
    float *want = logits_of(further, tokens, N, STEPS, n_vocab);
    dt_session_free(further);
    way w;
    for (size_t i = 0; get_way(i, &w); i++) {
        dt_model *model = open_on(path, &w);
        for (int type = 0; type < 2; type++) {
            /* by scores bytes decide otherwise, and over fifteen rounds so may whatever rounds more than the CPU */
            const bool same = !by_scores || (type == 0 && getenv("DT_TEST_DEVICE") == NULL);
            dt_session *b =
                streaming_session(model, &w, json, type ? DT_KV_INT8 : DT_KV_F16, type ? DT_PREFILL_STREAMING : DT_PREFILL_FULL);
            dt_error error = {0};
            double worst = 0;
            sync_tokens(b, tokens, N);
            assert_true(dt_kv_shift(dt_session_kv(b)) > 300);
            assert_int_equal(dt_kv_shift(dt_session_kv(b)), dt_kv_shift(dt_session_kv(a)));
            if (same) {
                assert_same_kept(a, b);
            }
            for (int32_t t = 0; t < STEPS; t++) {
                append_token(b, tokens[N + t]);
                assert_int_equal(dt_session_check(b, &error), DT_OK);
                const double off = logit_error(dt_session_logits(b), want + (size_t)(t + 1) * n_vocab, n_vocab);
                assert_true(off < 100);
                worst = off > worst && (t == 0 || !by_scores) ? off : worst;
            }
            print_message("%s %s, past the context, %s: %.5f\n", w.device ? w.device : "cpu", w.kernel ? w.kernel : "",
                          type ? "int8" : "f16", worst);
            assert_true(!same || worst <= tolerance(&w, type ? DT_KV_INT8 : DT_KV_F16));
            dt_session_free(b);
        }
        dt_model_close(model);
    }
    free(want);
    dt_session_free(a);
}

static void test_past_the_context(void **state) {
    (void)state;
    static const char *const settings[] = {
        "{\"0-\": {\"policy\": \"local_window\", \"max_cache_size\": 48, \"recent_window\": 16}}",
        "{\"0-\": {\"policy\": \"importance_score\", \"max_cache_size\": 28, \"recent_window\": 8}}",
        "{\"0-\": {\"policy\": \"importance_score\", \"score\": \"reconstruct\", \"max_cache_size\": 28, \"recent_window\": "
        "8}}",
        "{\"0-\": {\"policy\": \"local_window\", \"max_cache_size\": 28, \"recent_window\": 8, \"memory_slots\": 4}}"};
    tiny_model_params p = tiny_model_default_params();
    p.n_ctx = SMALL_CTX;
    const char *path = write_tiny(&p);
    dt_model *plain = open_on(path, &(way){0});
    for (size_t i = 0; i < sizeof settings / sizeof settings[0]; i++) { /* slots are merged by the attention that tokens got */
        compare_past_the_context(path, plain, settings[i], i > 0);
    }
    dt_model_close(plain);
}

/* Of the first layer, whose keys depend on nothing but tokens and positions. */
static void compare_keys(dt_session *a, dt_session *b, int32_t dim_k, int32_t dim_v) {
    float keys[2][SMALL_CTX], values[2][SMALL_CTX];
    assert_true(dim_k <= SMALL_CTX && dim_v <= SMALL_CTX);
    int32_t positions[2][SMALL_CTX];
    dt_kv_lane_view view;
    dt_kv_lane(dt_session_kv(a), 0, 1, &view);
    dt_kv_positions(dt_session_kv(a), 0, 1, positions[0]);
    dt_kv_positions(dt_session_kv(b), 0, 1, positions[1]);
    for (int32_t e = 0; e < view.n_entries; e++) {
        assert_int_equal(positions[0][e], positions[1][e]);
        assert_true(dt_kv_get_entries(dt_session_kv(a), 0, 1, e, 1, keys[0], values[0]));
        assert_true(dt_kv_get_entries(dt_session_kv(b), 0, 1, e, 1, keys[1], values[1]));
        float largest = 0;
        for (int32_t d = 0; d < dim_k; d++) {
            largest = fmaxf(largest, fabsf(keys[0][d]));
        }
        for (int32_t d = 0; d < dim_k; d++) {
            assert_true(dt_is_finite(keys[1][d]) && fabsf(keys[1][d] - keys[0][d]) <= 0.003f * largest);
        }
    }
}

/* Every way to rotate keys turns them on as the CPU's own code does. */
static void test_keys_turn(void **state) {
    (void)state;
    const char *window = "{\"0-\": {\"policy\": \"local_window\", \"max_cache_size\": 48, \"recent_window\": 16}}";
    const char *beside_windows = "{\"1\": {\"policy\": \"local_window\", \"max_cache_size\": 64, \"recent_window\": 16}, "
                                 "\"3\": {\"policy\": \"local_window\", \"max_cache_size\": 64, \"recent_window\": 16}}";
    static const struct {
        const char *arch;
        tiny_rope_scaling scaling;
        bool factors;
    } models[] = {{"gemma3", TINY_ROPE_DEFAULT, false}, {"llama", TINY_ROPE_LINEAR, false},  {"llama", TINY_ROPE_YARN, false},
                  {"llama", TINY_ROPE_DEFAULT, true},   {"qwen3", TINY_ROPE_DEFAULT, false}, {"chatglm", TINY_ROPE_DEFAULT, false},
                  {"glm4", TINY_ROPE_DEFAULT, false}};
    int32_t tokens[400];
    for (size_t m = 0; m < sizeof models / sizeof models[0]; m++) {
        tiny_model_params p = tiny_model_default_params();
        p.n_ctx = SMALL_CTX;
        p.arch = models[m].arch;
        p.rope_scaling = models[m].scaling;
        p.rope_freqs = models[m].factors;
        p.rope_factor = 4;
        p.rope_original_context = 64;
        if (m == 0) { /* the first layer moves as a whole, and what its window has passed goes at the same time */
            p.n_layers = 4;
            p.window = 32;
            p.window_period = 2;
        }
        const char *path = write_tiny(&p);
        dt_model *plain = open_on(path, &(way){0});
        const dt_model_info *info = dt_model_get_info(plain);
        random_tokens(tokens, 400, 3, info->n_vocab, 53);
        way w;
        for (size_t i = 0; get_way(i, &w); i++) {
            dt_model *model = open_on(path, &w);
            const char *json = m == 0 ? beside_windows : window;
            dt_session *a = streaming_session(plain, NULL, json, DT_KV_F16, DT_PREFILL_STREAMING);
            dt_session *b = streaming_session(model, &w, json, DT_KV_F16, DT_PREFILL_STREAMING);
            sync_tokens(a, tokens, 400);
            sync_tokens(b, tokens, 400);
            assert_true(dt_kv_shift(dt_session_kv(b)) > 200);
            compare_keys(a, b, info->head_dim_k, info->head_dim_v);
            dt_session_free(a);
            dt_session_free(b);
            dt_model_close(model);
        }
        dt_model_close(plain);
    }
}

/* ---- more of attention ---- */

/* Entries that stand for several tokens, and hidden ones: biases reach the device through the mask. */
static void test_biases(void **state) {
    (void)state;
    const tiny_model_params p = model_params();
    const char *path = write_tiny(&p);
    dt_model *plain = open_on(path, &(way){0});
    const dt_model_info *info = dt_model_get_info(plain);
    int32_t tokens[101];
    random_tokens(tokens, 101, 3, info->n_vocab, 17);
    way w;
    for (size_t i = 0; get_way(i, &w); i++) {
        dt_model *model = open_on(path, &w);
        const dt_session_params here = small_params(NULL), there = small_params(&w);
        dt_session *sessions[] = {open_session(plain, &here), open_session(model, &there)};
        for (int s = 0; s < 2; s++) {
            sync_tokens(sessions[s], tokens, 100);
            dt_error error = {0};
            for (int32_t e = 5; e < 90; e += 3) {
                const float bias = e % 2 ? -INFINITY : 1.5f;
                assert_int_equal(dt_kv_set_bias(dt_session_kv(sessions[s]), e % info->n_layers, e / 3 % 2, e, bias, &error), DT_OK);
            }
            append_token(sessions[s], tokens[100]);
        }
        assert_true(logit_error(dt_session_logits(sessions[1]), dt_session_logits(sessions[0]), (size_t)info->n_vocab) <=
                    tolerance(&w, DT_KV_F16));
        dt_session_free(sessions[0]);
        dt_session_free(sessions[1]);
        dt_model_close(model);
    }
    dt_model_close(plain);
}

/* Sliding windows, and what they have passed being dropped; head norms and norms after come along in this family. */
static void test_windows(void **state) {
    (void)state;
    tiny_model_params p = model_params();
    p.arch = "gemma3";
    p.n_layers = 4;
    p.window = 64;
    const char *path = write_tiny(&p);
    dt_model *plain = open_on(path, &(way){0});
    const size_t n_vocab = (size_t)dt_model_get_info(plain)->n_vocab;
    int32_t tokens[420];
    random_tokens(tokens, 420, 3, (int32_t)n_vocab, 19);
    way w;
    for (size_t i = 0; get_way(i, &w); i++) {
        dt_model *model = open_on(path, &w);
        const dt_session_params here = small_params(NULL), there = small_params(&w);
        dt_session *a = open_session(plain, &here), *b = open_session(model, &there);
        for (size_t n = 40; n <= 400; n += 90) {
            sync_tokens(a, tokens, n);
            sync_tokens(b, tokens, n);
            assert_true(logit_error(dt_session_logits(b), dt_session_logits(a), n_vocab) <= tolerance(&w, DT_KV_F16));
        }
        for (size_t n = 400; n < 420; n++) {
            append_token(a, tokens[n]);
            append_token(b, tokens[n]);
            assert_true(logit_error(dt_session_logits(b), dt_session_logits(a), n_vocab) <= tolerance(&w, DT_KV_F16));
        }
        dt_session_free(a);
        dt_session_free(b);
        dt_model_close(model);
    }
    dt_model_close(plain);
}

/* ---- sessions ---- */

static void save_and_load(const dt_session *from, dt_session *to) {
    char path[] = "/tmp/dt_test_device_XXXXXX";
    const int file = mkstemp(path);
    dt_error error = {0};
    assert_true(file >= 0);
    close(file);
    if (dt_session_save(from, NULL, path, &error) != DT_OK || dt_session_load(to, NULL, path, &error) != DT_OK) {
        unlink(path);
        fail_msg("%s", error.message);
    }
    unlink(path);
}

/* A fork, a file loaded on the device or by the CPU's own kernels, and a rewind go on as the session does. */
static void test_forks_files_and_rewinds(void **state) {
    (void)state;
    enum { N = 130, MORE = 20 };
    const tiny_model_params p = model_params();
    const char *path = write_tiny(&p);
    dt_model *plain = open_on(path, &(way){0});
    const size_t n_vocab = (size_t)dt_model_get_info(plain)->n_vocab;
    int32_t tokens[N + MORE];
    random_tokens(tokens, N + MORE, 3, (int32_t)n_vocab, 23);
    way w;
    for (size_t i = 0; get_way(i, &w); i++) {
        dt_model *model = open_on(path, &w);
        dt_eviction *eviction = eviction_from_json(model, configs[0]);
        dt_session_params here = small_params(NULL), there = small_params(&w);
        there.eviction = here.eviction = eviction;
        dt_session *session = open_session(model, &there), *fork, *loaded = open_session(model, &there);
        dt_session *on_host = open_session(plain, &here);
        dt_error error = {0};
        sync_tokens(session, tokens, N);
        assert_int_equal(dt_session_fork(session, eviction, DT_EVICT_ALWAYS, &fork, &error), DT_OK);
        save_and_load(session, loaded);
        save_and_load(session, on_host);
        for (int32_t t = N; t < N + MORE; t++) {
            dt_session *all[] = {session, fork, loaded, on_host};
            for (int s = 0; s < 4; s++) {
                append_token(all[s], tokens[t]);
                assert_int_equal(dt_session_check(all[s], &error), DT_OK);
            }
            assert_memory_equal(dt_session_logits(fork), dt_session_logits(session), n_vocab * sizeof(float));
            /* entries of a loaded lane may lie in another order */
            assert_true(logit_error(dt_session_logits(loaded), dt_session_logits(session), n_vocab) <= 1e-4);
            assert_true(logit_error(dt_session_logits(on_host), dt_session_logits(session), n_vocab) <= tolerance(&w, DT_KV_F16));
        }
        dt_session_free(session);
        dt_session_free(loaded);
        dt_session_free(on_host);
        sync_tokens(fork, tokens, 7); /* to before the first round */
        assert_true(dt_session_logits(fork) != NULL);
        dt_session_free(fork);
        there.eviction = NULL;
        session = open_session(model, &there);
        sync_tokens(session, tokens, N);
        float *want = malloc(n_vocab * sizeof *want);
        memcpy(want, dt_session_logits(session), n_vocab * sizeof *want);
        int32_t other[N + MORE];
        memcpy(other, tokens, sizeof other);
        other[60] ^= 1;
        sync_tokens(session, other, N + MORE);
        assert_int_equal(sync_tokens(session, tokens, N).how, DT_SYNC_REWOUND);
        assert_true(logit_error(dt_session_logits(session), want, n_vocab) <= 1e-3); /* other batch sizes */
        free(want);
        dt_session_free(session);
        dt_eviction_free(eviction);
        dt_model_close(model);
    }
    dt_model_close(plain);
}

/* INT8 has a scale per entry in files, which is what the CPU's own kernels have: on a device it is rounded once more, and only the first
 * time. */
static void test_files_of_bytes(void **state) {
    (void)state;
    enum { N = 130, MORE = 12 };
    const tiny_model_params p = model_params();
    const char *path = write_tiny(&p);
    dt_model *plain = open_on(path, &(way){0});
    const size_t n_vocab = (size_t)dt_model_get_info(plain)->n_vocab;
    int32_t tokens[N + MORE];
    random_tokens(tokens, N + MORE, 3, (int32_t)n_vocab, 59);
    way w;
    for (size_t i = 0; get_way(i, &w); i++) {
        dt_model *model = open_on(path, &w);
        dt_eviction *eviction = eviction_from_json(model, configs[0]);
        dt_session_params here = small_params(NULL), there = small_params(&w);
        there.eviction = here.eviction = eviction;
        there.kv_type = here.kv_type = DT_KV_INT8;
        dt_session *session = open_session(model, &there), *loaded = open_session(model, &there);
        dt_session *again = open_session(model, &there), *on_host = open_session(plain, &here), *back = open_session(model, &there);
        dt_error error = {0};
        sync_tokens(session, tokens, N);
        save_and_load(session, loaded);
        save_and_load(loaded, again);
        save_and_load(session, on_host);
        save_and_load(on_host, back);
        double worst = 0;
        for (int32_t t = N; t < N + MORE; t++) {
            dt_session *all[] = {session, loaded, again, on_host, back};
            for (int s = 0; s < 5; s++) {
                append_token(all[s], tokens[t]);
                assert_int_equal(dt_session_check(all[s], &error), DT_OK);
                const double off = logit_error(dt_session_logits(all[s]), dt_session_logits(session), n_vocab);
                worst = off > worst ? off : worst;
            }
            assert_true(logit_error(dt_session_logits(again), dt_session_logits(loaded), n_vocab) <= 0.02);
            assert_true(logit_error(dt_session_logits(back), dt_session_logits(loaded), n_vocab) <= 0.02);
        }
        print_message("%s %s, int8 from a file: %.5f\n", w.device ? w.device : "cpu", w.kernel ? w.kernel : "", worst);
        assert_true(worst <= INT8_TOLERANCE);
        dt_session *all[] = {session, loaded, again, on_host, back};
        for (int s = 0; s < 5; s++) {
            dt_session_free(all[s]);
        }
        dt_eviction_free(eviction);
        dt_model_close(model);
    }
    dt_model_close(plain);
}

/* A long conversation: what is counted is what is there, limits hold, nothing grows; then drafts that are taken back. */
static void test_long_run_and_drafts(void **state) {
    (void)state;
    const tiny_model_params p = model_params();
    const char *path = write_tiny(&p);
    way w;
    for (size_t i = 0; get_way(i, &w); i++) {
        dt_model *model = open_on(path, &w);
        const dt_model_info *info = dt_model_get_info(model);
        dt_eviction *eviction = eviction_from_json(model, configs[1]);
        dt_session_params params = small_params(&w);
        params.eviction = eviction;
        params.prefill = DT_PREFILL_STREAMING;
        params.kv_memory = 64u << 20;
        dt_session *session = open_session(model, &params);
        int32_t tokens[300];
        random_tokens(tokens, 300, 3, info->n_vocab, 29);
        sync_tokens(session, tokens, 300);
        dt_session_stats stats;
        dt_session_get_stats(session, &stats);
        const uint64_t before = stats.kv_bytes;
        dt_draft *draft = NULL;
        dt_sampler *sampler = NULL;
        dt_sampler_params greedy_params = dt_sampler_default_params();
        greedy_params.temp = 0;
        greedy_params.ignore_end = false;
        dt_error error = {0};
        assert_int_equal(dt_draft_from_lookup(8, &draft, &error), DT_OK);
        assert_int_equal(dt_sampler_new(model, &greedy_params, &sampler, &error), DT_OK);
        dt_generate_result result;
        assert_int_equal(dt_generate_drafted(session, sampler, draft, 120, NULL, NULL, &result, &error), DT_OK);
        assert_int_equal(dt_session_check(session, &error), DT_OK);
        dt_session_get_stats(session, &stats);
        assert_true(stats.kv_bytes <= before + before / 8 && stats.kv_bytes_peak <= params.kv_memory);
        for (int32_t layer = 0; layer < info->n_layers; layer++) {
            dt_layer_stats of_layer;
            assert_int_equal(dt_session_get_layer_stats(session, layer, &of_layer), DT_OK);
            assert_true(of_layer.length <= 40);
        }
        dt_draft_free(draft);
        dt_sampler_free(sampler);
        dt_session_free(session);
        dt_eviction_free(eviction);
        dt_model_close(model);
    }
}

/* Sessions of a group, more than go into one batch, are what they are alone but for the rounding of larger batches: read in chunks
 * of different sizes, decoded beside others that read, evicted from, one freed on the way. */
static void test_group(void **state) {
    (void)state;
    enum { N = 70, STEPS = 12, SESSIONS = DT_MAX_ELSEWHERE + 2 };
    const tiny_model_params p = model_params();
    const char *path = write_tiny(&p);
    way w;
    for (size_t i = 0; get_way(i, &w); i++) {
        dt_model *model = open_on(path, &w);
        const int32_t n_vocab = dt_model_get_info(model)->n_vocab;
        dt_eviction *eviction = eviction_from_json(model, configs[0]);
        dt_group *group = NULL;
        dt_error error = {0};
        const dt_group_params group_params = {.n_threads = 1, .kernel = w.kernel};
        assert_int_equal(dt_group_new(model, &group_params, &group, &error), DT_OK);
        dt_session *alone[SESSIONS], *together[SESSIONS];
        int32_t tokens[SESSIONS][N + STEPS], n_read[SESSIONS];
        dt_step steps[SESSIONS];
        for (int s = 0; s < SESSIONS; s++) {
            dt_session_params params = small_params(&w);
            params.n_batch = N;
            params.eviction = eviction;
            alone[s] = open_session(model, &params);
            params.group = group;
            together[s] = open_session(model, &params);
            random_tokens(tokens[s], N + STEPS, 3, n_vocab, 37 + (uint64_t)s);
            n_read[s] = N - 2 * s;
            sync_tokens(alone[s], tokens[s], (size_t)n_read[s]);
            steps[s] = (dt_step){.session = together[s], .tokens = tokens[s], .n = n_read[s]};
        }
        assert_int_equal(dt_group_step(group, steps, 3, &error), DT_OK);
        assert_int_equal(dt_group_step(group, steps + 3, SESSIONS - 3, &error), DT_OK);
        double worst = 0;
        for (int32_t t = 0; t < STEPS; t++) {
            const int n = SESSIONS - (t > 6); /* the last one goes */
            if (t == 7) {
                dt_session_free(together[n]);
                dt_session_free(alone[n]);
            }
            for (int s = 0; s < n; s++) {
                append_token(alone[s], tokens[s][n_read[s] + t]);
                steps[s] = (dt_step){.session = together[s], .tokens = tokens[s] + n_read[s] + t, .n = 1};
            }
            assert_int_equal(dt_group_step(group, steps, (size_t)n, &error), DT_OK);
            for (int s = 0; s < n; s++) {
                const double off = logit_error(dt_session_logits(together[s]), dt_session_logits(alone[s]), (size_t)n_vocab);
                worst = off > worst ? off : worst;
                assert_int_equal(dt_session_check(together[s], &error), DT_OK);
            }
        }
        print_message("%s %s, group: %.5f\n", w.device ? w.device : "cpu", w.kernel ? w.kernel : "", worst);
        assert_true(worst <= tolerance(&w, DT_KV_F16));
        for (int s = 0; s < SESSIONS - 1; s++) {
            dt_session_free(alone[s]);
            dt_session_free(together[s]);
        }
        dt_group_free(group);
        dt_eviction_free(eviction);
        dt_model_close(model);
    }
}

/* One session of a batch that has no room left on its device does not hold up the others. */
static void test_group_without_room(void **state) {
    (void)state;
    enum { FEW = 8, MANY = 600, SESSIONS = 3 };
    const tiny_model_params p = model_params();
    const char *path = write_tiny(&p);
    way w;
    for (size_t i = 0; get_way(i, &w); i++) {
        dt_model *model = open_on(path, &w);
        int32_t tokens[MANY];
        random_tokens(tokens, MANY, 3, dt_model_get_info(model)->n_vocab, 41);
        uint64_t limit = 0;
        for (int32_t round = 0; round < 2; round++) { /* without a limit; with one that the second step would go past */
            const dt_group_params params = {.n_threads = 1, .kernel = w.kernel, .kv_memory = limit};
            dt_group *group = NULL;
            dt_error error = {0};
            assert_int_equal(dt_group_new(model, &params, &group, &error), DT_OK);
            dt_session *sessions[SESSIONS];
            dt_step steps[SESSIONS];
            for (int s = 0; s < SESSIONS; s++) {
                dt_session_params own = small_params(&w);
                own.group = group;
                own.n_batch = MANY;
                sessions[s] = open_session(model, &own);
                steps[s] = (dt_step){.session = sessions[s], .tokens = tokens, .n = FEW};
            }
            assert_int_equal(dt_group_step(group, steps, SESSIONS, &error), DT_OK);
            dt_group_stats before, after;
            dt_group_get_stats(group, &before);
            for (int s = 0; s < SESSIONS; s++) {
                steps[s].n = s == 1 ? MANY : 1;
            }
            const dt_status wanted = round == 0 ? DT_OK : DT_ERR_MEMORY;
            assert_int_equal(dt_group_step(group, steps, SESSIONS, &error), wanted);
            assert_int_equal(steps[1].error.code, wanted);
            for (int s = 0; s < SESSIONS; s++) {
                size_t n;
                (void)dt_session_tokens(sessions[s], &n);
                assert_true(s == 1 || steps[s].error.code == DT_OK);
                assert_int_equal(n, s != 1 ? FEW + 1 : round == 0 ? FEW + MANY : FEW);
                assert_int_equal(dt_session_check(sessions[s], &error), DT_OK);
            }
            dt_group_get_stats(group, &after);
            limit = before.kv_bytes + (after.kv_bytes - before.kv_bytes) / 2;
            for (int s = 0; s < SESSIONS; s++) {
                dt_session_free(sessions[s]);
            }
            dt_group_free(group);
        }
        dt_model_close(model);
    }
}

/* Families with other parts in a layer, on a device as a whole. */
static void test_families(void **state) {
    (void)state;
    static const char *const archs[] = {"llama", "qwen2", "qwen3", "gemma3", "chatglm", "glm4"};
    for (size_t a = 0; a < sizeof archs / sizeof archs[0]; a++) {
        tiny_model_params p = model_params();
        p.arch = archs[a];
        p.biases = strcmp(archs[a], "qwen2") == 0;
        p.n_experts = a == 0 ? 4 : 0;
        p.n_experts_used = a == 0 ? 2 : 0;
        const char *path = write_tiny(&p);
        dt_model *plain = open_on(path, &(way){0});
        const size_t n_vocab = (size_t)dt_model_get_info(plain)->n_vocab;
        int32_t tokens[60];
        random_tokens(tokens, 60, 3, (int32_t)n_vocab, 31);
        way w;
        for (size_t i = 2; get_way(i, &w); i++) {
            dt_model *model = open_on(path, &w);
            const dt_session_params here = small_params(NULL), there = small_params(&w);
            dt_session *x = open_session(plain, &here), *y = open_session(model, &there);
            sync_tokens(x, tokens, 60);
            sync_tokens(y, tokens, 60);
            assert_true(logit_error(dt_session_logits(y), dt_session_logits(x), n_vocab) <= tolerance(&w, DT_KV_F16));
            dt_session_free(x);
            dt_session_free(y);
            dt_model_close(model);
        }
        dt_model_close(plain);
    }
}

/* Whatever tokens went into which slot, a lane's slots stand for the same in all. most_off: of what the last queries give them. */
static void assert_same_slots_weigh(const dt_session *a, const dt_session *b, double most_off) {
    for (int32_t layer = 0; layer < a->model->info.n_layers; layer++) {
        for (int32_t lane = 0; lane < a->model->info.n_kv_heads[layer]; lane++) {
            const dt_session *const both[] = {a, b};
            double weight[2] = {0, 0}, mass[2] = {0, 0};
            for (int side = 0; side < 2; side++) {
                dt_kv_lane_view view;
                int32_t positions[N_CTX];
                dt_kv_lane(both[side]->kv, layer, lane, &view);
                dt_kv_positions(both[side]->kv, layer, lane, positions);
                for (int32_t e = 0; e < view.n_entries; e++) {
                    weight[side] += dt_is_slot(positions[e]) ? exp((double)view.bias[e]) : 0;
                    mass[side] += dt_is_slot(positions[e]) ? (double)view.recent_mass[e] : 0;
                }
            }
            assert_true(isfinite(weight[1]) && weight[0] > 1 && fabs(weight[1] / weight[0] - 1) <= 2e-2);
            assert_true(isfinite(mass[1]) && mass[0] > 0 && fabs(mass[1] / mass[0] - 1) <= most_off);
        }
    }
}

/* What is evicted is merged into memory slots as the CPU's own kernels merge it; bytes cost no more than they do there. */
static void test_slots(void **state) {
    (void)state;
    enum { N = 150, STEPS = 40 };
    static const char *const with_slots[] = {
        "{\"0-\": {\"policy\": \"local_window\", \"max_cache_size\": 48, \"recent_window\": 8, \"memory_slots\": 8}}",
        "{\"0-\": {\"policy\": \"importance_score\", \"max_cache_size\": 48, \"recent_window\": 8, \"memory_slots\": 5}}"};
    const tiny_model_params p = model_params();
    const char *path = write_tiny(&p);
    dt_model *plain = open_on(path, &(way){0});
    const size_t n_vocab = (size_t)dt_model_get_info(plain)->n_vocab;
    int32_t tokens[N + STEPS];
    random_tokens(tokens, N + STEPS, 3, (int32_t)n_vocab, 7);
    way w;
    for (size_t i = 0; get_way(i, &w); i++) {
        dt_model *model = open_on(path, &w);
        for (int c = 0; c < 4; c++) {
            dt_eviction *eviction = eviction_from_json(plain, with_slots[c % 2]);
            dt_session_params here = small_params(NULL), there = small_params(&w);
            here.eviction = there.eviction = eviction;
            here.n_batch = there.n_batch = N;
            dt_session *a = open_session(plain, &here);
            here.kv_type = there.kv_type = c < 2 ? DT_KV_F16 : DT_KV_INT8;
            dt_session *b = open_session(model, &there), *bytes = open_session(plain, &here);
            sync_tokens(a, tokens, N);
            sync_tokens(b, tokens, N);
            sync_tokens(bytes, tokens, N);
            dt_session *same = open_session(plain, &here); /* with the slots that were merged there */
            save_and_load(b, same);
            assert_same_slots_weigh(a, b, c < 2 ? 1e-3 : 5e-3);
            double worst = 0, worst_same = 0, sum = 0, sum_bytes = 0;
            for (int32_t t = N; t < N + STEPS; t++) {
                dt_error error = {0};
                append_token(a, tokens[t]);
                append_token(b, tokens[t]);
                append_token(bytes, tokens[t]);
                append_token(same, tokens[t]);
                assert_int_equal(dt_session_check(b, &error), DT_OK);
                const double off = logit_error(dt_session_logits(b), dt_session_logits(a), n_vocab);
                const double off_same = logit_error(dt_session_logits(b), dt_session_logits(same), n_vocab);
                if (t < N + 3) { /* later rounds may merge others, after so much rounding */
                    worst = DT_MAX(worst, off);
                    worst_same = DT_MAX(worst_same, off_same);
                }
                sum += off;
                sum_bytes += logit_error(dt_session_logits(bytes), dt_session_logits(a), n_vocab);
            }
            print_message("%s %s, slots, %s: %.5f, with the same slots %.5f\n", w.device ? w.device : "cpu",
                          w.kernel ? w.kernel : "", c < 2 ? "f16" : "int8", c < 2 ? worst : sum / STEPS, worst_same);
            assert_true(worst_same <= (c < 2 ? FUSED_TOLERANCE : INT8_TOLERANCE));
            /* A GPU that multiplies in halves rounds keys so that a token may come nearer to another slot. */
            assert_true(c < 2 ? worst <= FUSED_TOLERANCE || getenv("DT_TEST_DEVICE") != NULL : sum <= 1.5 * sum_bytes);
            for (int32_t layer = 0; layer < p.n_layers; layer++) {
                dt_layer_stats stats;
                assert_int_equal(dt_session_get_layer_stats(b, layer, &stats), DT_OK);
                assert_true(stats.length <= 48 && stats.slots_used == (c % 2 ? 5 : 8));
            }
            dt_session_free(a);
            dt_session_free(b);
            dt_session_free(bytes);
            dt_session_free(same);
            dt_eviction_free(eviction);
        }
        dt_model_close(model);
    }
    dt_model_close(plain);
}

static void test_errors(void **state) {
    (void)state;
    const tiny_model_params p = model_params();
    const char *path = write_tiny(&p);
    dt_model *model = NULL;
    dt_error error = {0};
    const dt_model_params unknown = {.device = "toaster"};
    assert_int_equal(dt_model_open(path, &unknown, &model, &error), DT_ERR_ARGUMENT);
    assert_non_null(strstr(error.message, "toaster"));
    const dt_model_params cpu = {.device = "CPU"};
    assert_int_equal(dt_model_open(path, &cpu, &model, &error), DT_OK);
    assert_string_equal(dt_model_get_info(model)->device, "cpu");
    dt_model_close(model);
    const dt_model_params split = {.device = "ggml-cpu", .n_device_layers = 2};
    assert_int_equal(dt_model_open(path, &split, &model, &error), DT_OK);
    assert_string_equal(dt_model_get_info(model)->device, "ggml-cpu (layers 0-1)");
    dt_model_close(model);
    char *list = NULL;
    assert_int_equal(dt_devices_describe(&list, &error), DT_OK);
    assert_non_null(strstr(list, "cpu"));
    dt_free(list);
}

/* Which layers go where. */
static void test_shares(void **state) {
    (void)state;
    tiny_model_params p = tiny_model_default_params();
    p.n_layers = 8;
    const char *path = write_tiny(&p);
    static const struct {
        const char *device, *split, *where;
    } rows[] = {
        {"ggml-cpu,ggml-cpu", NULL, "ggml-cpu (layers 0-3), ggml-cpu (layers 4-7)"},
        {"ggml-cpu,ggml-cpu,ggml-cpu", NULL, "ggml-cpu (layers 0-1), ggml-cpu (layers 2-4), ggml-cpu (layers 5-7)"},
        {"ggml-cpu,ggml-cpu", "3,1", "ggml-cpu (layers 0-5), ggml-cpu (layers 6-7)"},
        {"ggml-cpu,ggml-cpu", "0.75/.25", "ggml-cpu (layers 0-5), ggml-cpu (layers 6-7)"},
        {"ggml-cpu,ggml-cpu", "0,5", "ggml-cpu (layers 0-7)"},
        {"ggml-cpu", "1", "ggml-cpu (layers 0-7)"},
        {"ggml-cpu,ggml-cpu", "1", NULL},
        {"ggml-cpu,ggml-cpu", "1,", NULL},
        {"ggml-cpu,ggml-cpu", "1,.", NULL},
        {"ggml-cpu,ggml-cpu", "1,1.2.3", NULL},
        {"ggml-cpu,ggml-cpu", "1,-1", NULL},
        {"ggml-cpu,ggml-cpu", "1,99999999999", NULL},
        {"ggml-cpu,ggml-cpu", "0,0", NULL},
        {NULL, "1", NULL},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const dt_model_params params = {.device = rows[i].device, .device_split = rows[i].split};
        dt_model *model = NULL;
        dt_error error = {0};
        const dt_status status = dt_model_open(path, &params, &model, &error);
        if (rows[i].where != NULL) {
            assert_int_equal(status, DT_OK);
            assert_string_equal(dt_model_get_info(model)->device, rows[i].where);
        } else {
            assert_int_equal(status, DT_ERR_ARGUMENT);
            assert_non_null(
                strstr(error.message, rows[i].device != NULL ? "does not share layers between" : "no device to share layers with"));
        }
        dt_model_close(model);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_eviction_is_hiding),
        cmocka_unit_test(test_same_decisions),
        cmocka_unit_test(test_reconstruction),
        cmocka_unit_test(test_slots),
        cmocka_unit_test(test_past_the_context),
        cmocka_unit_test(test_keys_turn),
        cmocka_unit_test(test_biases),
        cmocka_unit_test(test_windows),
        cmocka_unit_test(test_forks_files_and_rewinds),
        cmocka_unit_test(test_files_of_bytes),
        cmocka_unit_test(test_families),
        cmocka_unit_test(test_long_run_and_drafts),
        cmocka_unit_test(test_errors),
        cmocka_unit_test(test_group),
        cmocka_unit_test(test_group_without_room),
        cmocka_unit_test(test_shares),
    };
    cmocka_set_test_filter(getenv("DT_TEST_ONLY")); /* a device may take minutes for one */
    return cmocka_run_group_tests(tests, NULL, NULL);
}
