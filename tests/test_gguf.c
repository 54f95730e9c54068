/*
 * Files that call themselves models: every way of being wrong gets one sentence that names the file, no way crashes.
 * Broken files are made from a tiny valid one, by hand for the known cases and by seeded mutation for the unknown.
 *
 * The mutations run in a child process: whatever our checks accept is given to libllama's vocabulary loader, which ends the
 * process when it meets what we should have refused.
 */
#include "support/cmocka_all.h"
#include "support/tiny_model.h"
#include "text/text.h"
#include "weights/weights.h"

#include "gguf.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define N_MUTATIONS 4000
#define MAX_PATH 512
#define BYTES(text) text, sizeof(text) - 1

static char folder[256];
static char *tiny_bytes; /* a valid file, SPM vocabulary */
static size_t tiny_size;

/* ---- files -------------------------------------------------------------------------------------- */

/* A path in this test's folder; four can be used at once. */
static const char *path_of(const char *name) {
    static char paths[4][MAX_PATH];
    static int next;
    next = (next + 1) % 4;
    snprintf(paths[next], MAX_PATH, "%s/%s", folder, name);
    return paths[next];
}

static char *read_file(const char *path, size_t *size) {
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    assert_int_equal(fseek(file, 0, SEEK_END), 0);
    *size = (size_t)ftell(file);
    rewind(file);
    char *bytes = malloc(*size);
    assert_non_null(bytes);
    assert_int_equal(fread(bytes, 1, *size, file), *size);
    fclose(file);
    return bytes;
}

static const char *write_file(const char *name, const void *bytes, size_t size) {
    const char *path = path_of(name);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, size, file), size);
    fclose(file);
    return path;
}

/* Opening `path` must fail with `status` and a message that has the file's name and `part` in it. */
static void assert_refused(const char *path, dt_status status, const char *part) {
    dt_gguf *gguf = NULL;
    dt_error error = {0};
    const dt_status found = dt_gguf_open(path, &gguf, &error);
    assert_null(gguf);
    const char *name = strrchr(path, '/') + 1;
    if (found != status || !strstr(error.message, part) || !strstr(error.message, name) || strchr(error.message, '\n')) {
        fail_msg("%s: status %s, message \"%s\", expected %s and \"%s\"", path, dt_status_name(found), error.message,
                 dt_status_name(status), part);
    }
}

static dt_gguf *open_valid(const char *path) {
    dt_gguf *gguf = NULL;
    dt_error error = {0};
    if (dt_gguf_open(path, &gguf, &error) != DT_OK) {
        fail_msg("%s", error.message);
    }
    return gguf;
}

/* ---- one file ----------------------------------------------------------------------------------- */

static void test_not_a_file(void **state) {
    (void)state;
    assert_refused(path_of("missing.gguf"), DT_ERR_IO, "No such file");
    assert_int_equal(mkdir(path_of("directory"), 0700), 0);
    assert_refused(path_of("directory"), DT_ERR_IO, "is a folder");
    assert_refused(write_file("empty.gguf", "", 0), DT_ERR_FORMAT, "is empty");
    assert_int_equal(mkfifo(path_of("pipe.gguf"), 0600), 0);
    assert_refused(path_of("pipe.gguf"), DT_ERR_IO, "not a regular file");
    assert_int_equal(rmdir(path_of("directory")), 0);
}

static void test_foreign_file(void **state) {
    (void)state;
    static const struct {
        const char *bytes;
        size_t size;
        const char *what;
    } cases[] = {
        {BYTES("PK\3\4rest of a zip"), "PyTorch"},
        {BYTES("\x10\0\0\0\0\0\0\0{\"a\":{\"dtype\":\"F32\"}}"), "safetensors"},
        {BYTES("tjgg\3\0\0\0\0\0"), "before GGUF"},
        {BYTES("version https://git-lfs.github.com/spec/v1\n"), "Git LFS"},
        {BYTES("<!DOCTYPE html><html>"), "web page"},
        {BYTES("{\"architectures\": []}"), "JSON"},
        {BYTES("\0\0\0\0\0\0\0\0\0\0\0\0"), "unfinished"},
        {BYTES("hello, I am no model"), "something else"},
        {BYTES("G"), "something else"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        assert_refused(write_file("foreign.gguf", cases[i].bytes, cases[i].size), DT_ERR_FORMAT, cases[i].what);
    }
}

static void test_version_and_byte_order(void **state) {
    (void)state;
    char *copy = malloc(tiny_size);
    assert_non_null(copy);
    memcpy(copy, tiny_bytes, tiny_size);
    copy[4] = 1;
    assert_refused(write_file("old.gguf", copy, tiny_size), DT_ERR_UNSUPPORTED, "version 1");
    copy[4] = 99;
    assert_refused(write_file("new.gguf", copy, tiny_size), DT_ERR_UNSUPPORTED, "version 99");
    memcpy(copy + 4, "\0\0\0\3", 4);
    assert_refused(write_file("big.gguf", copy, tiny_size), DT_ERR_UNSUPPORTED, "byte order");
    free(copy);
}

static void test_truncated(void **state) {
    (void)state;
    for (size_t size = 4; size < tiny_size; size += size < 64 ? 1 : 997) {
        assert_refused(write_file("short.gguf", tiny_bytes, size), DT_ERR_FORMAT, "is cut off");
    }
    char needed[64];
    snprintf(needed, sizeof needed, "needs %zu bytes but has %zu", tiny_size, tiny_size - 5);
    assert_refused(write_file("short.gguf", tiny_bytes, tiny_size - 5), DT_ERR_FORMAT, needed);
}

/* Counts and lengths far beyond the file must be refused at once, not allocated. */
static void test_absurd_counts(void **state) {
    (void)state;
    char *copy = malloc(tiny_size);
    assert_non_null(copy);
    static const size_t places[] = {8, 16, 24}; /* tensors, keys, length of the first key */
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
        for (int bits = 20; bits < 64; bits++) {
            const uint64_t absurd = (uint64_t)1 << bits;
            memcpy(copy, tiny_bytes, tiny_size);
            memcpy(copy + places[i], &absurd, sizeof absurd);
            assert_refused(write_file("absurd.gguf", copy, tiny_size), DT_ERR_FORMAT, "damaged");
        }
    }
    free(copy);
}

static void test_look_ups(void **state) {
    (void)state;
    dt_gguf *gguf = open_valid(write_file("good.gguf", tiny_bytes, tiny_size));
    dt_error error = {0};
    uint32_t u = 7, many[2] = {0, 0};
    float f = 7.0f;
    bool b = false;
    const char *s = "kept";
    assert_int_equal(dt_gguf_u32(gguf, "llama.block_count", true, &u, &error), DT_OK);
    assert_int_equal(u, 2);
    assert_int_equal(dt_gguf_u32(gguf, "llama.nothing", false, &u, &error), DT_OK);
    assert_int_equal(u, 2);
    assert_int_equal(dt_gguf_u32(gguf, "llama.nothing", true, &u, &error), DT_ERR_FORMAT);
    assert_non_null(strstr(error.message, "llama.nothing"));
    assert_int_equal(dt_gguf_u32(gguf, "general.name", false, &u, &error), DT_ERR_FORMAT);
    assert_int_equal(dt_gguf_u32(gguf, "tokenizer.ggml.scores", false, &u, &error), DT_ERR_FORMAT);
    assert_int_equal(dt_gguf_f32(gguf, "llama.rope.freq_base", true, &f, &error), DT_OK);
    assert_float_equal(f, 10000.0f, 0.0f);
    assert_int_equal(dt_gguf_f32(gguf, "llama.block_count", true, &f, &error), DT_ERR_FORMAT);
    assert_int_equal(dt_gguf_bool(gguf, "tokenizer.ggml.add_bos_token", true, &b, &error), DT_OK);
    assert_true(b);
    assert_int_equal(dt_gguf_string(gguf, "general.architecture", true, &s, &error), DT_OK);
    assert_string_equal(s, "llama");
    assert_int_equal(dt_gguf_string(gguf, "llama.block_count", true, &s, &error), DT_ERR_FORMAT);
    assert_int_equal(dt_gguf_u32_array(gguf, "llama.attention.head_count_kv", true, many, 2, &error), DT_OK); /* a scalar */
    assert_true(many[0] == 2 && many[1] == 2);
    assert_int_equal(dt_gguf_u32_array(gguf, "tokenizer.ggml.token_type", true, many, 2, &error), DT_OK); /* an array */
    assert_true(many[0] == 2 && many[1] == 3);
    assert_int_equal(dt_gguf_f32_array(gguf, "tokenizer.ggml.tokens", true, &f, 1, &error), DT_ERR_FORMAT);
    assert_int_equal(dt_gguf_array_length(gguf, "tokenizer.ggml.tokens"), 320);
    assert_int_equal(dt_gguf_array_length(gguf, "general.name"), -1);
    int64_t ne[4];
    assert_true(dt_gguf_tensor_shape(gguf, "token_embd.weight", ne));
    assert_true(ne[0] == 64 && ne[1] == 320 && ne[2] == 1 && ne[3] == 1);
    assert_false(dt_gguf_tensor_shape(gguf, "nothing.weight", ne));
    dt_gguf_free(gguf);
}

/* ---- splits ------------------------------------------------------------------------------------- */

static void write_split(const char *name, int32_t n_parts, int32_t n_layers) {
    tiny_model_params m = tiny_model_default_params();
    m.n_parts = n_parts;
    m.n_layers = n_layers;
    assert_true(tiny_model_write(&m, path_of(name)));
}

static void copy_file(const char *from, const char *to) {
    size_t size;
    char *bytes = read_file(path_of(from), &size);
    write_file(to, bytes, size);
    free(bytes);
}

static void test_split(void **state) {
    (void)state;
    write_split("s.gguf", 3, 2);
    dt_gguf *gguf = open_valid(path_of("s-00001-of-00003.gguf"));
    int64_t ne[4];
    assert_true(dt_gguf_tensor_shape(gguf, "token_embd.weight", ne)); /* in part 1 */
    assert_true(dt_gguf_tensor_shape(gguf, "output.weight", ne));     /* in part 3 */
    assert_true(dt_gguf_has_key(gguf, "llama.block_count"));
    dt_gguf_free(gguf);
}

static void test_split_mistakes(void **state) {
    (void)state;
    size_t sizes[3];
    char *parts[3];
    write_split("m.gguf", 3, 2);
    write_split("other.gguf", 3, 3);
    write_split("pair.gguf", 2, 2);
    for (int i = 0; i < 3; i++) {
        char name[64];
        snprintf(name, sizeof name, "m-%05d-of-00003.gguf", i + 1);
        parts[i] = read_file(path_of(name), &sizes[i]);
    }

    /* part 2 given */
    assert_refused(path_of("m-00002-of-00003.gguf"), DT_ERR_FORMAT, "open the first part");
    assert_refused(path_of("m-00002-of-00003.gguf"), DT_ERR_FORMAT, "m-00001-of-00003.gguf");

    /* renamed */
    assert_refused(write_file("renamed.gguf", parts[0], sizes[0]), DT_ERR_FORMAT, "does not end in -00001-of-00003.gguf");
    assert_refused(write_file("renamed2.gguf", parts[1], sizes[1]), DT_ERR_FORMAT, "holds part 2 of 3");
    write_file("x-00001-of-00003.gguf", parts[1], sizes[1]);
    assert_refused(path_of("x-00001-of-00003.gguf"), DT_ERR_FORMAT, "holds part 2 of 3");

    /* joined with cat */
    char *joined = malloc(sizes[0] + sizes[1] + sizes[2]);
    assert_non_null(joined);
    memcpy(joined, parts[0], sizes[0]);
    memcpy(joined + sizes[0], parts[1], sizes[1]);
    memcpy(joined + sizes[0] + sizes[1], parts[2], sizes[2]);
    assert_refused(write_file("joined.gguf", joined, sizes[0] + sizes[1] + sizes[2]), DT_ERR_FORMAT, "one after another");
    free(joined);

    /* one missing: the message names it */
    assert_int_equal(unlink(path_of("m-00003-of-00003.gguf")), 0);
    dt_gguf *gguf = NULL;
    dt_error error = {0};
    assert_int_equal(dt_gguf_open(path_of("m-00001-of-00003.gguf"), &gguf, &error), DT_ERR_IO);
    assert_non_null(strstr(error.message, "part 3 of 3 of the model is missing"));
    assert_non_null(strstr(error.message, "m-00003-of-00003.gguf"));

    /* swapped, from another split, from a split into another number, no part at all */
    copy_file("m-00002-of-00003.gguf", "m-00003-of-00003.gguf");
    assert_int_equal(dt_gguf_open(path_of("m-00001-of-00003.gguf"), &gguf, &error), DT_ERR_FORMAT);
    assert_non_null(strstr(error.message, "holds part 2 of 3, not part 3 of 3"));
    copy_file("other-00003-of-00003.gguf", "m-00003-of-00003.gguf");
    assert_int_equal(dt_gguf_open(path_of("m-00001-of-00003.gguf"), &gguf, &error), DT_ERR_FORMAT);
    assert_non_null(strstr(error.message, "another split"));
    copy_file("pair-00002-of-00002.gguf", "m-00003-of-00003.gguf");
    assert_int_equal(dt_gguf_open(path_of("m-00001-of-00003.gguf"), &gguf, &error), DT_ERR_FORMAT);
    assert_non_null(strstr(error.message, "holds part 2 of 2"));
    write_file("m-00003-of-00003.gguf", tiny_bytes, tiny_size);
    assert_int_equal(dt_gguf_open(path_of("m-00001-of-00003.gguf"), &gguf, &error), DT_ERR_FORMAT);
    assert_non_null(strstr(error.message, "is not part of a split model"));
    for (int i = 0; i < 3; i++) {
        free(parts[i]);
    }
}

/* ---- vocabularies ------------------------------------------------------------------------------- */

typedef void (*edit_fn)(struct gguf_context *meta);

/* The vocabulary check's answer to the tiny model after `edit` changed its keys. */
static dt_status check_edited(edit_fn edit, bool *has_tokenizer, dt_error *error) {
    const char *path = write_file("edited.gguf", tiny_bytes, tiny_size);
    struct gguf_context *meta = gguf_init_from_file(path, (struct gguf_init_params){.no_alloc = true, .ctx = NULL});
    assert_non_null(meta);
    const size_t data_at = gguf_get_data_offset(meta);
    edit(meta);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_true(gguf_write_to_file_ptr(meta, file, true));
    assert_int_equal(fwrite(tiny_bytes + data_at, 1, tiny_size - data_at, file), tiny_size - data_at);
    assert_int_equal(fclose(file), 0);
    gguf_free(meta);
    dt_gguf *gguf = open_valid(path);
    const dt_status status = dt_gguf_check_vocabulary(gguf, has_tokenizer, error);
    dt_gguf_free(gguf);
    return status;
}

/* Replaces the texts of two tokens. */
static void set_tokens(struct gguf_context *meta, size_t a, const char *text_a, size_t b, const char *text_b) {
    const int64_t id = gguf_find_key(meta, "tokenizer.ggml.tokens");
    const size_t n = gguf_get_arr_n(meta, id);
    char **texts = malloc(n * sizeof *texts);
    assert_non_null(texts);
    for (size_t i = 0; i < n; i++) {
        texts[i] = strdup(i == a ? text_a : i == b ? text_b : gguf_get_arr_str(meta, id, i));
    }
    gguf_set_arr_str(meta, "tokenizer.ggml.tokens", (const char **)texts, n);
    for (size_t i = 0; i < n; i++) {
        free(texts[i]);
    }
    free(texts);
}

static void edit_nothing(struct gguf_context *meta) { (void)meta; }
static void edit_no_model(struct gguf_context *meta) { gguf_remove_key(meta, "tokenizer.ggml.model"); }
static void edit_none(struct gguf_context *meta) { gguf_set_val_str(meta, "tokenizer.ggml.model", "none"); }
static void edit_t5(struct gguf_context *meta) { gguf_set_val_str(meta, "tokenizer.ggml.model", "t5"); }
static void edit_duplicate(struct gguf_context *meta) { set_tokens(meta, 300, "twice", 310, "twice"); }
static void edit_empty_twin(struct gguf_context *meta) { set_tokens(meta, 300, "", 310, "[EMPTY_300]"); }
static void edit_byte(struct gguf_context *meta) { set_tokens(meta, 20, "<", 21, "<0x1Z>"); }
static void edit_no_tokens(struct gguf_context *meta) { gguf_remove_key(meta, "tokenizer.ggml.tokens"); }
static void edit_no_merges(struct gguf_context *meta) { gguf_set_val_str(meta, "tokenizer.ggml.model", "gpt2"); }
static void edit_bos(struct gguf_context *meta) { gguf_set_val_u32(meta, "tokenizer.ggml.bos_token_id", 320); }
static void edit_bos_type(struct gguf_context *meta) { gguf_set_val_i32(meta, "tokenizer.ggml.bos_token_id", 1); }
static void edit_name(struct gguf_context *meta) { gguf_set_val_u32(meta, "general.name", 1); }

static void edit_scores(struct gguf_context *meta) {
    const float scores[2] = {0.0f, 1.0f};
    gguf_set_arr_data(meta, "tokenizer.ggml.scores", GGUF_TYPE_FLOAT32, scores, 2);
}

static void edit_types(struct gguf_context *meta) {
    static const int8_t types[320] = {1};
    gguf_set_arr_data(meta, "tokenizer.ggml.token_type", GGUF_TYPE_INT8, types, 320);
}

/* Two tokens: there is no token 2 to end with. */
static void edit_no_end(struct gguf_context *meta) {
    const char *texts[2] = {"<unk>", "<s>"};
    gguf_set_arr_str(meta, "tokenizer.ggml.tokens", texts, 2);
    gguf_remove_key(meta, "tokenizer.ggml.eos_token_id");
    gguf_set_val_bool(meta, "tokenizer.ggml.add_eos_token", true);
}

static void edit_no_start(struct gguf_context *meta) {
    const char *texts[1] = {"<unk>"};
    gguf_set_arr_str(meta, "tokenizer.ggml.tokens", texts, 1);
    gguf_remove_key(meta, "tokenizer.ggml.eos_token_id");
    gguf_remove_key(meta, "tokenizer.ggml.bos_token_id");
}

static void test_vocabulary(void **state) {
    (void)state;
    static const struct {
        edit_fn edit;
        dt_status status;
        bool has_tokenizer;
        const char *part;
    } cases[] = {
        {edit_nothing, DT_OK, true, ""},
        {edit_no_model, DT_OK, false, ""},
        {edit_none, DT_OK, false, ""},
        {edit_t5, DT_ERR_UNSUPPORTED, false, "'t5'"},
        {edit_duplicate, DT_ERR_FORMAT, false, "tokens 300 and 310 of the vocabulary are both 'twice'"},
        {edit_empty_twin, DT_ERR_FORMAT, false, "'[EMPTY_300]'"},
        {edit_byte, DT_ERR_FORMAT, false, "token 20 is marked as a byte"},
        {edit_no_tokens, DT_ERR_FORMAT, false, "without the key tokenizer.ggml.tokens"},
        {edit_no_merges, DT_ERR_FORMAT, false, "without the key tokenizer.ggml.merges"},
        {edit_scores, DT_ERR_FORMAT, false, "has 2 elements for a vocabulary of 320"},
        {edit_types, DT_ERR_FORMAT, false, "tokenizer.ggml.token_type is not an array of i32"},
        {edit_bos, DT_ERR_FORMAT, false, "is 320, but the vocabulary has 320 tokens"},
        {edit_bos_type, DT_ERR_FORMAT, false, "has type i32, not u32"},
        {edit_name, DT_ERR_FORMAT, false, "general.name has type u32, not str"},
        {edit_no_end, DT_ERR_FORMAT, false, "wants an end token"},
        {edit_no_start, DT_ERR_FORMAT, false, "wants a start token"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        bool has_tokenizer = true;
        dt_error error = {0};
        const dt_status status = check_edited(cases[i].edit, &has_tokenizer, &error);
        if (status != cases[i].status || has_tokenizer != cases[i].has_tokenizer || !strstr(error.message, cases[i].part)) {
            fail_msg("case %zu: %s, \"%s\"", i, dt_status_name(status), error.message);
        }
    }
}

/* ---- mutation ----------------------------------------------------------------------------------- */

static uint64_t next_random(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* Changes a few bytes of the first `meta_size`, or cuts the file; returns the new size. Small and extreme values are frequent. */
static size_t mutate(char *bytes, size_t size, size_t meta_size, uint64_t *random) {
    static const unsigned char favourites[] = {0, 1, 2, 0x7f, 0x80, 0xff};
    const uint64_t kind = next_random(random) % 16;
    if (kind == 0) {
        return next_random(random) % size;
    }
    for (uint64_t n = 1 + next_random(random) % 3; n > 0; n--) {
        const size_t at = next_random(random) % meta_size;
        if (kind < 6) {
            bytes[at] ^= (char)(1u << next_random(random) % 8);
        } else if (kind < 12) {
            bytes[at] = (char)favourites[next_random(random) % sizeof favourites];
        } else { /* a copy of other bytes: duplicate names and tokens */
            const size_t from = next_random(random) % (meta_size - 16), to = next_random(random) % (meta_size - 16);
            memmove(bytes + to, bytes + from, 1 + next_random(random) % 16);
        }
    }
    return size;
}

/* Opens, checks, and what passed both goes to the vocabulary loader and the tokenizer. */
static int try_file(const char *path) {
    dt_gguf *gguf = NULL;
    dt_vocab *vocab = NULL;
    dt_error error = {0};
    bool has_tokenizer = false;
    int accepted = 0;
    if (dt_gguf_open(path, &gguf, &error) != DT_OK) {
        return strstr(error.message, path) ? 0 : -1;
    }
    if (dt_gguf_check_vocabulary(gguf, &has_tokenizer, &error) == DT_OK && has_tokenizer) {
        accepted = 1;
        if (dt_vocab_open(path, &vocab, &error) == DT_OK) {
            static const char text[] = "Hello,\n w\xc3\xb6rld \xff <s> abc";
            int32_t *tokens = NULL;
            size_t n = 0;
            if (dt_vocab_tokenize(vocab, text, sizeof text - 1, true, true, &tokens, &n, &error) == DT_OK) {
                dt_free(tokens);
            }
            dt_vocab_free(vocab);
        }
    }
    dt_gguf_free(gguf);
    return accepted;
}

typedef struct progress {
    int mutation, n_accepted;
} progress;

static void run_mutations(const char *name, const char *bytes, size_t size, size_t meta_size, progress *shared) {
    char *copy = malloc(size);
    char path[MAX_PATH];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    for (int i = 0; copy && i < N_MUTATIONS; i++) {
        uint64_t random = 88172645463325252u + 7919u * (uint64_t)i;
        shared->mutation = i;
        memcpy(copy, bytes, size);
        const size_t new_size = mutate(copy, size, meta_size, &random);
        FILE *file = fopen(path, "wb");
        const bool is_written = file && fwrite(copy, 1, new_size, file) == new_size && fclose(file) == 0;
        const int accepted = is_written ? try_file(path) : -1;
        if (accepted < 0) {
            _exit(2);
        }
        shared->n_accepted += accepted;
    }
    free(copy);
    _exit(copy ? 0 : 2);
}

static void mutate_model(tiny_vocabulary vocabulary, const char *name) {
    tiny_model_params m = tiny_model_default_params();
    m.vocabulary = vocabulary;
    m.n_embd = 8;
    m.n_heads = 1;
    m.n_kv_heads = 1;
    m.head_dim = 8;
    m.n_ff = 8;
    m.n_layers = 1;
    m.n_vocab = 280;
    assert_true(tiny_model_write(&m, path_of(name)));
    size_t size;
    char *bytes = read_file(path_of(name), &size);
    struct gguf_context *meta = gguf_init_from_file(path_of(name), (struct gguf_init_params){.no_alloc = true, .ctx = NULL});
    assert_non_null(meta);
    const size_t meta_size = gguf_get_data_offset(meta);
    gguf_free(meta);

    progress *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(shared, MAP_FAILED);
    fflush(NULL);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        run_mutations(name, bytes, size, meta_size, shared);
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    print_message("%s: %d of %d mutations accepted\n", name, shared->n_accepted, N_MUTATIONS);
    if (status != 0) {
        fail_msg("mutation %d of %s: wait status %d", shared->mutation, name, status);
    }
    assert_true(shared->n_accepted > N_MUTATIONS / 20); /* else the vocabulary loader was hardly tried */
    munmap(shared, sizeof *shared);
    free(bytes);
}

static void test_mutations(void **state) {
    (void)state;
    mutate_model(TINY_VOCABULARY_SPM, "mutated-spm.gguf");
    mutate_model(TINY_VOCABULARY_BPE, "mutated-bpe.gguf");
}

/* ---- set-up ------------------------------------------------------------------------------------- */

static int set_up(void **state) {
    (void)state;
    const char *base = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/dt-gguf-XXXXXX", base ? base : "/tmp");
    if (!mkdtemp(folder)) {
        return 1;
    }
    dt_text_route_logs();
    const tiny_model_params m = tiny_model_default_params();
    if (!tiny_model_write(&m, path_of("tiny.gguf"))) {
        return 1;
    }
    tiny_bytes = read_file(path_of("tiny.gguf"), &tiny_size);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    char command[MAX_PATH];
    free(tiny_bytes);
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    return system(command);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_not_a_file), cmocka_unit_test(test_foreign_file),   cmocka_unit_test(test_version_and_byte_order),
        cmocka_unit_test(test_truncated),  cmocka_unit_test(test_absurd_counts),  cmocka_unit_test(test_look_ups),
        cmocka_unit_test(test_split),      cmocka_unit_test(test_split_mistakes), cmocka_unit_test(test_vocabulary),
        cmocka_unit_test(test_mutations),
    };
    return cmocka_run_group_tests_name("gguf", tests, set_up, tear_down);
}
