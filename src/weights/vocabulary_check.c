/*
 * Is a file's vocabulary one that libllama can load? libllama asserts (and so ends the process) on duplicate tokens, on byte
 * tokens that are none, on a start token that is to be added but does not exist; and it throws, with a message that reaches
 * nobody, on arrays of a wrong type or length. All of that is looked for here first.
 *
 * The rules follow llama_vocab's loader in the pinned libllama, including how it reads tokens: as C strings, empty ones
 * replaced by "[EMPTY_<id>]".
 *
 * Invariant: a file accepted here can be given to a vocab_only load, and to tokenization with start and end tokens added,
 * without an abort.
 */
#include "weights/gguf_file.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KEY "tokenizer.ggml."
#define MIN_BYTE_TOKEN 5 /* "<0x0A": libllama reads characters 3 and 4 */
#define NO_TOKEN (-1)
#define DEFAULT_BOS_SPM 1
#define DEFAULT_EOS_SPM 2
#define DEFAULT_BOS_EOS_BPE 11

typedef enum vocabulary_kind { KIND_SPM, KIND_BPE, KIND_GEMMA } vocabulary_kind;

typedef struct vocabulary {
    const dt_gguf *gguf;
    const struct gguf_context *meta;
    vocabulary_kind kind;
    const char *pre;   /* the pre-tokenizer's name, "" where the file has none */
    int64_t tokens_id; /* key of the token list */
    int64_t n_tokens;
    dt_error *error;
} vocabulary;

/* A key that libllama reads, and the only type it takes. */
typedef struct typed_key {
    const char *name;
    enum gguf_type type;
} typed_key;

static const typed_key scalar_keys[] = {
    {"general.architecture", GGUF_TYPE_STRING},
    {"general.name", GGUF_TYPE_STRING},
    {"tokenizer.chat_template", GGUF_TYPE_STRING},
    {KEY "pre", GGUF_TYPE_STRING},
    {KEY "token_type_count", GGUF_TYPE_UINT32},
    {KEY "bos_token_id", GGUF_TYPE_UINT32},
    {KEY "eos_token_id", GGUF_TYPE_UINT32},
    {KEY "eot_token_id", GGUF_TYPE_UINT32},
    {KEY "eom_token_id", GGUF_TYPE_UINT32},
    {KEY "unknown_token_id", GGUF_TYPE_UINT32},
    {KEY "seperator_token_id", GGUF_TYPE_UINT32},
    {KEY "padding_token_id", GGUF_TYPE_UINT32},
    {KEY "mask_token_id", GGUF_TYPE_UINT32},
    {KEY "fim_pre_token_id", GGUF_TYPE_UINT32},
    {KEY "fim_suf_token_id", GGUF_TYPE_UINT32},
    {KEY "fim_mid_token_id", GGUF_TYPE_UINT32},
    {KEY "fim_pad_token_id", GGUF_TYPE_UINT32},
    {KEY "fim_rep_token_id", GGUF_TYPE_UINT32},
    {KEY "fim_sep_token_id", GGUF_TYPE_UINT32},
    {KEY "prefix_token_id", GGUF_TYPE_UINT32},
    {KEY "suffix_token_id", GGUF_TYPE_UINT32},
    {KEY "middle_token_id", GGUF_TYPE_UINT32},
    {KEY "add_bos_token", GGUF_TYPE_BOOL},
    {KEY "add_eos_token", GGUF_TYPE_BOOL},
    {KEY "add_sep_token", GGUF_TYPE_BOOL},
    {KEY "add_space_prefix", GGUF_TYPE_BOOL},
    {KEY "remove_extra_whitespaces", GGUF_TYPE_BOOL},
    {KEY "normalizer.lowercase", GGUF_TYPE_BOOL},
    {KEY "normalizer.strip_accents", GGUF_TYPE_BOOL},
};

static dt_status check_scalar_types(const vocabulary *v) {
    for (size_t i = 0; i < sizeof scalar_keys / sizeof scalar_keys[0]; i++) {
        const int64_t id = gguf_find_key(v->meta, scalar_keys[i].name);
        if (id >= 0 && gguf_get_kv_type(v->meta, id) != scalar_keys[i].type) {
            return dt_fail(v->error, DT_ERR_FORMAT, "%s: key %s has type %s, not %s", dt_gguf_path(v->gguf), scalar_keys[i].name,
                           gguf_type_name(gguf_get_kv_type(v->meta, id)), gguf_type_name(scalar_keys[i].type));
        }
    }
    return DT_OK;
}

/* Finds an array whose elements have one of two types (twice the same where there is one), with at least `min` elements. */
static dt_status find_array(const vocabulary *v, const char *key, enum gguf_type type, enum gguf_type other_type, bool required,
                            int64_t min, int64_t *out_id) {
    *out_id = gguf_find_key(v->meta, key);
    if (*out_id < 0 && required) {
        return dt_fail(v->error, DT_ERR_FORMAT, "%s has a tokenizer without the key %s; convert the model again",
                       dt_gguf_path(v->gguf), key);
    }
    if (*out_id < 0) {
        return DT_OK;
    }
    const bool is_array = gguf_get_kv_type(v->meta, *out_id) == GGUF_TYPE_ARRAY;
    const enum gguf_type found = is_array ? gguf_get_arr_type(v->meta, *out_id) : GGUF_TYPE_COUNT;
    if (found != type && found != other_type) {
        return dt_fail(v->error, DT_ERR_FORMAT, "%s: key %s is not an array of %s", dt_gguf_path(v->gguf), key,
                       gguf_type_name(type));
    }
    const int64_t n = (int64_t)gguf_get_arr_n(v->meta, *out_id);
    if (n < min) {
        return dt_fail(v->error, DT_ERR_FORMAT, "%s: key %s has %" PRId64 " elements for a vocabulary of %" PRId64 " tokens",
                       dt_gguf_path(v->gguf), key, n, min);
    }
    return DT_OK;
}

/* ---- tokens ------------------------------------------------------------------------------------- */

/* A token's text as libllama stores it; `buffer` serves for empty ones. */
static const char *token_text(const vocabulary *v, int64_t token, char buffer[32]) {
    const char *text = gguf_get_arr_str(v->meta, v->tokens_id, (size_t)token);
    if (text[0] != '\0') {
        return text;
    }
    snprintf(buffer, 32, "[EMPTY_%" PRId64 "]", token);
    return buffer;
}

static uint64_t hash_text(const char *text) {
    uint64_t hash = 1469598103934665603u;
    for (; *text; text++) {
        hash = (hash ^ (unsigned char)*text) * 1099511628211u;
    }
    return hash ^ (hash >> 32);
}

static dt_status check_unique_tokens(const vocabulary *v) {
    size_t capacity = 64;
    while (capacity < 2 * (size_t)v->n_tokens) {
        capacity *= 2;
    }
    int32_t *slots = malloc(capacity * sizeof *slots); /* open addressing; token + 1, 0 = free */
    if (!slots) {
        return dt_fail_memory(v->error, capacity * sizeof *slots, "checking the vocabulary");
    }
    memset(slots, 0, capacity * sizeof *slots);
    dt_status status = DT_OK;
    for (int64_t token = 0; token < v->n_tokens && !status; token++) {
        char buffer[32], other_buffer[32];
        const char *text = token_text(v, token, buffer);
        size_t at = (size_t)hash_text(text) & (capacity - 1);
        while (slots[at] != 0 && !status) {
            if (strcmp(token_text(v, slots[at] - 1, other_buffer), text) == 0) {
                status = dt_fail(v->error, DT_ERR_FORMAT,
                                 "%s: tokens %d and %" PRId64 " of the vocabulary are both '%.40s'; convert the model again",
                                 dt_gguf_path(v->gguf), (int)slots[at] - 1, token, text);
            }
            at = (at + 1) & (capacity - 1);
        }
        slots[at] = (int32_t)token + 1;
    }
    free(slots);
    return status;
}

static dt_status check_token_types(const vocabulary *v) {
    enum { TYPE_BYTE = 6 }; /* of GGUF's token types */
    int64_t id;
    const dt_status status = find_array(v, KEY "token_type", GGUF_TYPE_INT32, GGUF_TYPE_INT32, false, v->n_tokens, &id);
    if (status || id < 0) {
        return status;
    }
    const int32_t *types = gguf_get_arr_data(v->meta, id);
    for (int64_t token = 0; token < v->n_tokens; token++) {
        char buffer[32];
        if (types[token] != TYPE_BYTE) {
            continue;
        }
        const char *text = token_text(v, token, buffer);
        if (strlen(text) < MIN_BYTE_TOKEN) {
            return dt_fail(v->error, DT_ERR_FORMAT, "%s: token %" PRId64 " is marked as a byte but is '%s', not like <0x0A>",
                           dt_gguf_path(v->gguf), token, text);
        }
    }
    return DT_OK;
}

static dt_status check_tokens(vocabulary *v) {
    int64_t id;
    dt_status status = find_array(v, KEY "tokens", GGUF_TYPE_STRING, GGUF_TYPE_STRING, true, 1, &v->tokens_id);
    if (status) {
        return status;
    }
    v->n_tokens = (int64_t)gguf_get_arr_n(v->meta, v->tokens_id);
    if (v->n_tokens > INT32_MAX / 2) {
        return dt_fail(v->error, DT_ERR_FORMAT, "%s has an impossibly large vocabulary", dt_gguf_path(v->gguf));
    }
    status = find_array(v, KEY "scores", GGUF_TYPE_FLOAT32, GGUF_TYPE_INT32, false, v->n_tokens, &id);
    if (!status) {
        status = check_token_types(v);
    }
    /* kimi-k2 is the one byte-pair vocabulary without merges */
    const bool needs_merges = v->kind == KIND_GEMMA || (v->kind == KIND_BPE && strcmp(v->pre, "kimi-k2") != 0);
    if (!status && v->kind != KIND_SPM) {
        status = find_array(v, KEY "merges", GGUF_TYPE_STRING, GGUF_TYPE_STRING, needs_merges, 0, &id);
    }
    if (!status) {
        status = find_array(v, KEY "suppress_tokens", GGUF_TYPE_INT32, GGUF_TYPE_INT32, false, 0, &id);
    }
    return status ? status : check_unique_tokens(v);
}

/* ---- special tokens ----------------------------------------------------------------------------- */

/* The id under `key`, or `fallback` where the vocabulary has a token of that number; NO_TOKEN otherwise. */
static dt_status special_token(const vocabulary *v, const char *key, int64_t fallback, int64_t *out) {
    uint32_t id = 0;
    *out = fallback < v->n_tokens ? fallback : NO_TOKEN;
    if (!dt_gguf_has_key(v->gguf, key)) {
        return DT_OK;
    }
    const dt_status status = dt_gguf_u32(v->gguf, key, true, &id, v->error);
    if (status) {
        return status;
    }
    if (id >= (uint64_t)v->n_tokens) {
        return dt_fail(v->error, DT_ERR_FORMAT, "%s: key %s is %" PRIu32 ", but the vocabulary has %" PRId64 " tokens",
                       dt_gguf_path(v->gguf), key, id, v->n_tokens);
    }
    *out = id;
    return DT_OK;
}

static dt_status check_special_tokens(const vocabulary *v) {
    const bool is_glm = strcmp(v->pre, "chatglm-bpe") == 0 || strcmp(v->pre, "glm4") == 0 || strcmp(v->pre, "glm5") == 0;
    const int64_t bpe_default = v->kind == KIND_GEMMA ? NO_TOKEN : DEFAULT_BOS_EOS_BPE;
    int64_t bos, eos, eot;
    /* which byte-pair vocabularies add a start token unasked depends on a long list of names: any may, except GLM's */
    bool add_bos = !is_glm, add_eos = false;
    dt_status status = special_token(v, KEY "bos_token_id",
                                     v->kind == KIND_SPM ? DEFAULT_BOS_SPM
                                     : is_glm            ? NO_TOKEN
                                                         : bpe_default,
                                     &bos);
    if (!status) {
        status = special_token(v, KEY "eos_token_id", v->kind == KIND_SPM ? DEFAULT_EOS_SPM : bpe_default, &eos);
    }
    if (!status) {
        status = special_token(v, KEY "eot_token_id", NO_TOKEN, &eot);
    }
    if (!status) {
        status = dt_gguf_bool(v->gguf, KEY "add_bos_token", false, &add_bos, v->error);
    }
    if (!status) {
        status = dt_gguf_bool(v->gguf, KEY "add_eos_token", false, &add_eos, v->error);
    }
    if (status) {
        return status;
    }
    if (v->kind == KIND_GEMMA || strcmp(v->pre, "gemma4") == 0 || strcmp(v->pre, "granite-embed-multi-311m") == 0) {
        add_bos = true; /* libllama overrides the key */
    }
    if ((add_bos && bos < 0) || (add_eos && eos < 0)) {
        return dt_fail(v->error, DT_ERR_FORMAT, "%s wants %s token added to every text but names none; set key %s",
                       dt_gguf_path(v->gguf), add_bos && bos < 0 ? "a start" : "an end",
                       add_bos && bos < 0 ? KEY "bos_token_id" : KEY "eos_token_id");
    }
    return DT_OK;
}

dt_status dt_gguf_check_vocabulary(const dt_gguf *gguf, bool *has_tokenizer, dt_error *error) {
    vocabulary v = {.gguf = gguf, .meta = gguf->parts[0].meta, .pre = "", .error = error};
    const char *model = "none";
    *has_tokenizer = false;
    dt_status status = dt_gguf_string(gguf, KEY "model", false, &model, error);
    if (status || strcmp(model, "none") == 0 || strcmp(model, "no_vocab") == 0) {
        return status;
    }
    if (strcmp(model, "llama") == 0) {
        v.kind = KIND_SPM;
    } else if (strcmp(model, "gpt2") == 0) {
        v.kind = KIND_BPE;
    } else if (strcmp(model, "gemma4") == 0) {
        v.kind = KIND_GEMMA;
    } else {
        return dt_fail(error, DT_ERR_UNSUPPORTED, "%s has a tokenizer of kind '%.40s'; supported are llama, gpt2 and gemma4",
                       dt_gguf_path(gguf), model);
    }
    status = dt_gguf_string(gguf, KEY "pre", false, &v.pre, error);
    if (!status) {
        status = check_scalar_types(&v);
    }
    if (!status) {
        status = check_tokens(&v);
    }
    if (!status) {
        status = check_special_tokens(&v);
    }
    *has_tokenizer = status == DT_OK;
    return status;
}
