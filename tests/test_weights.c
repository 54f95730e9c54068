/*
 * Weights in memory, and the generator of tiny models that most other tests stand on.
 *
 * The generator: libllama loads what it writes, in every weight type and form, and computes finite, spread logits.
 * The loader: presence, shape and type are checked with a sentence; the data handed out is the file's, wherever it was placed;
 * a product with a placed matrix is that of the file's layout; memory does not grow beyond what the placement needs.
 */
#include "support/cmocka_all.h"
#include "support/compare.h"
#include "support/tiny_model.h"
#include "weights/weights.h"

#include "llama.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define N_PROMPT 12

static char path[256];

static void ignore_log(enum ggml_log_level level, const char *text, void *user) {
    (void)level;
    (void)text;
    (void)user;
}

/* ---- the generator ------------------------------------------------------------------------------ */

/* libllama's logits after a short prompt must be finite, spread, and those of the last token must not be its own. */
static void assert_computes(const tiny_model_params *m, const char *what) {
    assert_true(tiny_model_write(m, path));
    char first[512];
    tiny_model_part_path(m, path, 0, first, sizeof first);
    struct llama_model_params mp = llama_model_default_params();
    struct llama_model *model = llama_model_load_from_file(first, mp);
    if (!model) {
        fail_msg("libllama does not load %s", what);
    }
    struct llama_context_params cp = llama_context_default_params();
    cp.n_ctx = 64;
    cp.n_threads = cp.n_threads_batch = 1;
    struct llama_context *context = llama_init_from_model(model, cp);
    assert_non_null(context);
    int32_t tokens[N_PROMPT];
    for (int i = 0; i < N_PROMPT; i++) {
        tokens[i] = (5 + 37 * i) % 261;
    }
    assert_int_equal(llama_decode(context, llama_batch_get_one(tokens, N_PROMPT)), 0);
    const size_t n_vocab = (size_t)llama_vocab_n_tokens(llama_model_get_vocab(model));
    const float *logits = llama_get_logits_ith(context, -1);
    assert_non_null(logits);
    assert_true(all_finite(logits, n_vocab));
    double sum = 0.0, squares = 0.0;
    for (size_t i = 0; i < n_vocab; i++) {
        sum += logits[i];
        squares += (double)logits[i] * logits[i];
    }
    const double mean = sum / (double)n_vocab, deviation = sqrt(squares / (double)n_vocab - mean * mean);
    if (!(deviation > 1.0 && deviation < 10.0)) {
        fail_msg("%s: logits have a deviation of %.3f", what, deviation);
    }
    llama_free(context);
    llama_model_free(model);
    for (int32_t part = 0; part < m->n_parts; part++) {
        tiny_model_part_path(m, path, part, first, sizeof first);
        unlink(first);
    }
}

static void test_generator_types(void **state) {
    (void)state;
    static const enum ggml_type types[] = {GGML_TYPE_F32,  GGML_TYPE_F16,  GGML_TYPE_BF16, GGML_TYPE_Q4_0, GGML_TYPE_Q4_1,
                                           GGML_TYPE_Q5_0, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K};
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        tiny_model_params m = tiny_model_default_params();
        m.type = types[i];
        m.n_embd = 256;
        m.n_ff = 256;
        m.head_dim = 64;
        m.tied = i % 2 == 1;
        assert_computes(&m, ggml_type_name(types[i]));
    }
}

static void test_generator_forms(void **state) {
    (void)state;
    tiny_model_params m = tiny_model_default_params();
    m.biases = true;
    assert_computes(&m, "biases");
    m.tied = true;
    m.n_heads = 3;
    m.n_kv_heads = 1;
    m.head_dim = 80;
    assert_computes(&m, "3 heads of 80 on one, tied");
    m.rope_scaling = TINY_ROPE_LINEAR;
    m.rope_factor = 4.0f;
    assert_computes(&m, "linear rope scaling");
    m.rope_scaling = TINY_ROPE_YARN;
    m.rope_original_context = 128;
    assert_computes(&m, "YaRN");
    m.rope_scaling = TINY_ROPE_NONE;
    m.rope_freqs = true;
    assert_computes(&m, "rope factors");
    m.vocabulary = TINY_VOCABULARY_BPE;
    m.n_vocab = 1000;
    m.chat_template = TINY_CHATML;
    assert_computes(&m, "BPE vocabulary, chat template");
    m.vocabulary = TINY_VOCABULARY_NONE;
    assert_computes(&m, "no vocabulary");
    m.n_parts = 3;
    assert_computes(&m, "three parts");
}

static void test_generator_repeats_itself(void **state) {
    (void)state;
    char again[300];
    snprintf(again, sizeof again, "%s.again", path);
    tiny_model_params m = tiny_model_default_params();
    assert_true(tiny_model_write(&m, path));
    assert_true(tiny_model_write(&m, again));
    FILE *a = fopen(path, "rb"), *b = fopen(again, "rb");
    assert_true(a && b);
    int c;
    do {
        c = fgetc(a);
        assert_int_equal(c, fgetc(b));
    } while (c != EOF);
    fclose(a);
    fclose(b);
    unlink(again);
}

/* ---- the loader --------------------------------------------------------------------------------- */

typedef struct loaded {
    dt_gguf *gguf;
    dt_weights *weights;
    struct ggml_tensor *rows, *output, *norm, *down, *missing;
} loaded;

static ggml_backend_dev_t cpu(void) { return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU); }

static dt_weight_request request_of(const char *name, dt_weight_use use, int64_t ne0, int64_t ne1, struct ggml_tensor **out) {
    dt_weight_request r = {.use = use, .n_dims = ne1 ? 2 : 1, .ne = {ne0, ne1, 0}, .required = true, .out = out};
    snprintf(r.name, sizeof r.name, "%s", name);
    return r;
}

/* Loads the generator's model of one layer from `path`: some tensors into l, the rest to satisfy the loader. `down`, where not
 * NULL, asks for blk.0.ffn_down in our own layout. */
static dt_status load_packed(const tiny_model_params *m, const dt_model_params *params, loaded *l, dt_gemm_matrix *down,
                             dt_error *error) {
    static struct ggml_tensor *others[16];
    const int64_t e = m->n_embd, f = m->n_ff, q = m->n_heads * m->head_dim, kv = m->n_kv_heads * m->head_dim, v = m->n_vocab;
    dt_weight_request requests[] = {
        request_of("token_embd.weight", DT_USE_ROWS, e, v, &l->rows),
        request_of(m->tied ? "token_embd.weight" : "output.weight", DT_USE_MATMUL, e, v, &l->output),
        request_of("output_norm.weight", DT_USE_ELEMENTWISE, e, 0, &l->norm),
        request_of("blk.0.ffn_down.weight", DT_USE_MATMUL, f, e, &l->down),
        request_of("blk.0.nothing.weight", DT_USE_MATMUL, e, e, &l->missing),
        request_of("blk.0.attn_norm.weight", DT_USE_ELEMENTWISE, e, 0, &others[0]),
        request_of("blk.0.ffn_norm.weight", DT_USE_ELEMENTWISE, e, 0, &others[1]),
        request_of("blk.0.attn_q.weight", DT_USE_MATMUL, e, q, &others[2]),
        request_of("blk.0.attn_k.weight", DT_USE_MATMUL, e, kv, &others[3]),
        request_of("blk.0.attn_v.weight", DT_USE_MATMUL, e, kv, &others[4]),
        request_of("blk.0.attn_output.weight", DT_USE_MATMUL, q, e, &others[5]),
        request_of("blk.0.ffn_gate.weight", DT_USE_MATMUL, e, f, &others[6]),
        request_of("blk.0.ffn_up.weight", DT_USE_MATMUL, e, f, &others[7]),
    };
    requests[3].packed = down;
    requests[4].required = false;
    char first[512];
    tiny_model_part_path(m, path, 0, first, sizeof first);
    memset(l, 0, sizeof *l);
    dt_status status = dt_gguf_open(first, &l->gguf, error);
    if (!status) {
        status =
            dt_weights_load(l->gguf, cpu(), params, requests, (int32_t)(sizeof requests / sizeof requests[0]), &l->weights, error);
    }
    return status;
}

static dt_status load(const tiny_model_params *m, const dt_model_params *params, loaded *l, dt_error *error) {
    return load_packed(m, params, l, NULL, error);
}

static void unload(loaded *l) {
    dt_weights_free(l->weights);
    dt_gguf_free(l->gguf);
}

static tiny_model_params one_layer(enum ggml_type type) {
    tiny_model_params m = tiny_model_default_params();
    m.n_layers = 1;
    m.type = type;
    m.n_embd = 256;
    m.n_ff = 512;
    m.head_dim = 64;
    return m;
}

/* weight x input, by the CPU backend. */
static void multiply(struct ggml_tensor *weight, const float *input, int64_t n_tokens, float *out) {
    struct ggml_context *context = ggml_init((struct ggml_init_params){
        .mem_size = ggml_tensor_overhead() * 16 + ggml_graph_overhead(), .mem_buffer = NULL, .no_alloc = true});
    struct ggml_tensor *x = ggml_new_tensor_2d(context, GGML_TYPE_F32, weight->ne[0], n_tokens);
    struct ggml_tensor *y = ggml_mul_mat(context, weight, x);
    struct ggml_cgraph *graph = ggml_new_graph(context);
    ggml_build_forward_expand(graph, y);
    ggml_backend_t backend = ggml_backend_dev_init(cpu(), NULL);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(context, backend);
    ggml_backend_tensor_set(x, input, 0, ggml_nbytes(x));
    assert_int_equal(ggml_backend_graph_compute(backend, graph), GGML_STATUS_SUCCESS);
    ggml_backend_tensor_get(y, out, 0, ggml_nbytes(y));
    ggml_backend_buffer_free(buffer);
    ggml_backend_free(backend);
    ggml_free(context);
}

static void assert_same_product(struct ggml_tensor *a, struct ggml_tensor *b) {
    enum { N_TOKENS = 5 };
    const int64_t columns = a->ne[0], rows = a->ne[1];
    float *input = malloc((size_t)(N_TOKENS * columns) * sizeof *input);
    float *out[2] = {malloc((size_t)(N_TOKENS * rows) * sizeof(float)), malloc((size_t)(N_TOKENS * rows) * sizeof(float))};
    for (int64_t i = 0; i < N_TOKENS * columns; i++) {
        input[i] = sinf((float)i * 0.37f);
    }
    multiply(a, input, N_TOKENS, out[0]);
    multiply(b, input, N_TOKENS, out[1]);
    assert_true(all_finite(out[0], (size_t)(N_TOKENS * rows)));
    assert_true(all_finite(out[1], (size_t)(N_TOKENS * rows)));
    for (int64_t i = 0; i < N_TOKENS * rows; i++) {
        assert_true(fabsf(out[0][i] - out[1][i]) <= 0.05f);
    }
    free(input);
    free(out[0]);
    free(out[1]);
}

/* Whatever the placement, products agree and rows and norms are the file's bytes. */
static void test_placements_agree(void **state) {
    (void)state;
    static const enum ggml_type types[] = {GGML_TYPE_F32,  GGML_TYPE_F16,  GGML_TYPE_Q4_0,
                                           GGML_TYPE_Q4_1, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K};
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        tiny_model_params m = one_layer(types[i]);
        m.tied = i % 2 == 0;
        m.n_parts = i == 2 ? 3 : 1;
        assert_true(tiny_model_write(&m, path));
        const dt_model_params plain = {.no_extra_buffers = true}, read = {.no_mmap = true};
        loaded mapped, fast, copied;
        dt_error error = {0};
        assert_int_equal(load(&m, &plain, &mapped, &error), DT_OK);
        assert_int_equal(load(&m, NULL, &fast, &error), DT_OK);
        assert_int_equal(load(&m, &read, &copied, &error), DT_OK);
        assert_null(mapped.missing);
        assert_memory_equal(mapped.rows->data, copied.rows->data, ggml_nbytes(mapped.rows));
        assert_memory_equal(mapped.norm->data, fast.norm->data, ggml_nbytes(mapped.norm));
        assert_true(ggml_backend_buffer_is_host(fast.rows->buffer));
        if (m.tied) { /* one tensor where the file's layout serves both */
            assert_ptr_equal(mapped.rows, mapped.output);
        }
        assert_same_product(mapped.down, fast.down);
        assert_same_product(mapped.output, fast.output);
        assert_same_product(mapped.output, copied.output);
        assert_int_equal(dt_weights_bytes(fast.weights), dt_weights_bytes(mapped.weights));
        assert_string_equal(dt_weights_main_type(fast.weights),
                            types[i] == GGML_TYPE_Q4_0 ? "Q4_0" : dt_weights_main_type(mapped.weights));
        unload(&mapped);
        unload(&fast);
        unload(&copied);
        for (int32_t part = 0; part < m.n_parts; part++) {
            char part_path[512];
            tiny_model_part_path(&m, path, part, part_path, sizeof part_path);
            unlink(part_path);
        }
    }
}

/* A matrix in our own layout: described as what the file holds, and its product is that of the file's layout. */
static void test_packed_matrices(void **state) {
    (void)state;
    enum { IN = 512, OUT = 256, N_TOKENS = 5 };
    const dt_gemm_kernel *kernel = dt_gemm_kernel_auto();
    static const enum ggml_type types[] = {GGML_TYPE_F32,  GGML_TYPE_Q4_0, GGML_TYPE_Q4_1,   GGML_TYPE_Q5_0,
                                           GGML_TYPE_Q5_1, GGML_TYPE_Q8_0, GGML_TYPE_IQ4_NL, GGML_TYPE_Q4_K,
                                           GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_IQ4_XS};
    float *x = malloc(N_TOKENS * IN * sizeof *x), *want = malloc(N_TOKENS * OUT * sizeof *want);
    float *y = malloc(N_TOKENS * OUT * sizeof *y);
    void *inputs = aligned_alloc(64, DT_ROUND_UP(dt_gemm_input_bytes(IN, N_TOKENS), (size_t)64));
    for (int64_t i = 0; i < N_TOKENS * IN; i++) {
        x[i] = sinf((float)i * 0.37f);
    }
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        const tiny_model_params m = one_layer(types[i]);
        const dt_model_params plain = {.no_extra_buffers = true};
        loaded file, fast;
        dt_gemm_matrix matrix;
        dt_error error = {0};
        assert_true(tiny_model_write(&m, path));
        assert_int_equal(load_packed(&m, &plain, &file, &matrix, &error), DT_OK);
        assert_int_equal(matrix.n_out, 0);
        assert_int_equal(load_packed(&m, NULL, &fast, &matrix, &error), DT_OK);
        if (types[i] == GGML_TYPE_F32 || !kernel || strcmp(ggml_backend_buffer_name(fast.down->buffer), "AMX") == 0) {
            assert_int_equal(matrix.n_out, 0);
        } else {
            assert_int_equal(matrix.n_in, IN);
            assert_int_equal(matrix.n_out, OUT);
            assert_ptr_equal(matrix.packed, fast.down->data);
            const dt_gemm_inputs from = {.n_in = IN, .n_tokens = N_TOKENS, .x = x, .x_stride = IN};
            const dt_gemm_product product = {{&matrix}, 1, N_TOKENS, y, OUT};
            kernel->pack_inputs(&from, inputs, 0, 1);
            kernel->multiply(&product, inputs, 0, 1);
            multiply(file.down, x, N_TOKENS, want);
            assert_true(all_finite(y, N_TOKENS * OUT));
            for (int64_t at = 0; at < N_TOKENS * OUT; at++) {
                assert_true(fabsf(y[at] - want[at]) <= 0.05f);
            }
        }
        unload(&file);
        unload(&fast);
    }
    free(x);
    free(want);
    free(y);
    free(inputs);
}

/* On a CPU with fast layouts for Q4_0 (any with AVX2 or dot products) they are used, and tied embeddings then exist twice. */
static void test_fast_layouts_are_used(void **state) {
    (void)state;
    const ggml_backend_dev_get_extra_bufts_t get_types = (ggml_backend_dev_get_extra_bufts_t)ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(cpu()), "ggml_backend_dev_get_extra_bufts");
    if (!get_types || !*get_types(cpu())) {
        skip();
    }
    tiny_model_params m = one_layer(GGML_TYPE_Q4_0);
    m.tied = true;
    assert_true(tiny_model_write(&m, path));
    loaded l;
    dt_error error = {0};
    assert_int_equal(load(&m, NULL, &l, &error), DT_OK);
    assert_false(ggml_backend_buffer_is_host(l.down->buffer) &&
                 strcmp(ggml_backend_buffer_name(l.down->buffer), "CPU_Mapped") == 0);
    assert_ptr_not_equal(l.rows, l.output);
    assert_string_equal(dt_weights_main_type(l.weights), "Q4_0");
    unload(&l);
}

static void test_half_precision_norms(void **state) {
    (void)state;
    tiny_model_params m = one_layer(GGML_TYPE_F32);
    float values[2][256];
    dt_error error = {0};
    loaded l;
    for (int i = 0; i < 2; i++) {
        m.norm_type = i == 0 ? GGML_TYPE_F32 : GGML_TYPE_F16;
        assert_true(tiny_model_write(&m, path));
        assert_int_equal(load(&m, NULL, &l, &error), DT_OK);
        assert_int_equal(l.norm->type, GGML_TYPE_F32);
        memcpy(values[i], l.norm->data, sizeof values[i]);
        unload(&l);
    }
    assert_true(all_finite(values[1], 256));
    for (int i = 0; i < 256; i++) {
        assert_true(fabsf(values[0][i] - values[1][i]) <= 1e-3f);
    }
}

static void assert_load_fails(const tiny_model_params *asked, const char *a, const char *b) {
    loaded l;
    dt_error error = {0};
    const dt_status status = load(asked, NULL, &l, &error);
    if (status == DT_OK || !strstr(error.message, a) || !strstr(error.message, b) || !strstr(error.message, path)) {
        fail_msg("%s: \"%s\", expected \"%s\" and \"%s\"", dt_status_name(status), error.message, a, b);
    }
    assert_null(l.weights);
    assert_null(l.rows);
    unload(&l);
}

static void test_refusals(void **state) {
    (void)state;
    const tiny_model_params m = one_layer(GGML_TYPE_F32);
    assert_true(tiny_model_write(&m, path));
    tiny_model_params other = m;
    other.n_ff = 768;
    assert_load_fails(&other, "'blk.0.ffn_down.weight' is 512 x 256", "768 x 256");
    other = m;
    other.n_vocab = 300; /* padding rows: the shape asked for decides */
    assert_load_fails(&other, "'token_embd.weight' is 256 x 320", "256 x 300");
    other = m;
    other.tied = true; /* output.weight is there, but nobody asks for it */
    assert_load_fails(&other, "'output.weight'", "does not know");
    other = m;
    other.n_layers = 2;
    assert_true(tiny_model_write(&other, path));
    assert_load_fails(&m, "'blk.1.", "and 8 more");
    other = m;
    other.tied = true;
    assert_true(tiny_model_write(&other, path));
    assert_load_fails(&m, "lacks the tensor", "'output.weight'");
    other = m;
    other.norm_type = GGML_TYPE_Q8_0;
    assert_true(tiny_model_write(&other, path));
    assert_load_fails(&m, "norm.weight' has type q8_0", "must be f32");
}

/* Seen from outside: loading takes the file's size, tied embeddings once more, and little else. Without dropping the pages of
 * copied tensors it would be twice the file. */
static void test_peak_memory(void **state) {
    (void)state;
    tiny_model_params m = one_layer(GGML_TYPE_Q4_0);
    m.tied = m.is_fast = true;
    m.n_embd = 2048;
    m.n_heads = 32;
    m.n_ff = 8192;
    m.n_vocab = 8000;
    assert_true(tiny_model_write(&m, path));
    struct stat info;
    assert_int_equal(stat(path, &info), 0);
    const long embeddings = (long)ggml_row_size(m.type, m.n_embd) * m.n_vocab, slack = 12 << 20;
    const pid_t child = fork(); /* starts with a fresh peak */
    assert_true(child >= 0);
    if (child == 0) {
        struct rusage before, after;
        loaded l;
        dt_error error;
        getrusage(RUSAGE_SELF, &before);
        if (load(&m, NULL, &l, &error) != DT_OK) {
            _exit(2);
        }
        getrusage(RUSAGE_SELF, &after);
        _exit((after.ru_maxrss - before.ru_maxrss) * 1024 <= (long)info.st_size + embeddings + slack ? 0 : 1);
    }
    int status = -1;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
}

/* A file that shrinks between the look at its metadata and the loading is an error, not a crash. */
static void test_file_changes(void **state) {
    (void)state;
    const tiny_model_params m = one_layer(GGML_TYPE_F32);
    assert_true(tiny_model_write(&m, path));
    struct ggml_tensor *norm = NULL;
    dt_weights *weights = NULL;
    dt_gguf *gguf = NULL;
    dt_error error = {0};
    const dt_weight_request request = request_of("output_norm.weight", DT_USE_ELEMENTWISE, 256, 0, &norm);
    assert_int_equal(dt_gguf_open(path, &gguf, &error), DT_OK);
    assert_int_equal(truncate(path, 5000), 0);
    assert_int_not_equal(dt_weights_load(gguf, cpu(), NULL, &request, 1, &weights, &error), DT_OK);
    assert_null(weights);
    dt_gguf_free(gguf);
}

static int set_up(void **state) {
    (void)state;
    const char *base = getenv("TMPDIR");
    snprintf(path, sizeof path, "%s/dt-weights-%ld.gguf", base ? base : "/tmp", (long)getpid());
    llama_log_set(ignore_log, NULL);
    ggml_log_set(ignore_log, NULL);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    unlink(path);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_generator_types),
        cmocka_unit_test(test_generator_forms),
        cmocka_unit_test(test_generator_repeats_itself),
        cmocka_unit_test(test_placements_agree),
        cmocka_unit_test(test_packed_matrices),
        cmocka_unit_test(test_fast_layouts_are_used),
        cmocka_unit_test(test_half_precision_norms),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_peak_memory),
        cmocka_unit_test(test_file_changes),
    };
    return cmocka_run_group_tests_name("weights", tests, set_up, tear_down);
}
