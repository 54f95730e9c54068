/*
 * dt_model: the file, its weights and its tokenizer behind one handle; and the text functions, which are thin
 * wrappers that say so when there is no tokenizer.
 *
 * Invariant: immutable after dt_model_open, so that sessions on many threads may share it.
 */
#include "engine/engine.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static pthread_once_t logs_once = PTHREAD_ONCE_INIT;

static dt_status open_vocabulary(dt_model *model, const char *path, dt_error *error) {
    bool has_tokenizer = false;
    dt_status status = dt_gguf_check_vocabulary(model->gguf, &has_tokenizer, error);
    if (status == DT_OK && has_tokenizer) {
        status = dt_vocab_open(path, &model->vocab, error);
    }
    const int32_t rows = model->decoder->hp.n_vocab;
    if (status == DT_OK && model->vocab && dt_vocab_size(model->vocab) > rows) {
        return dt_fail(error, DT_ERR_FORMAT,
                       "%s: the tokenizer has %d tokens, but token_embd.weight only %d rows; convert the model again", path,
                       dt_vocab_size(model->vocab), rows);
    }
    return status;
}

static dt_status fill_info(dt_model *model, dt_error *error) {
    const dt_hparams *hp = &model->decoder->hp;
    dt_model_info *info = &model->info;
    info->name = "";
    const dt_status status = dt_gguf_string(model->gguf, "general.name", false, &info->name, error);
    info->architecture = hp->arch->name;
    info->weight_type = dt_weights_main_type(model->decoder->weights);
    info->n_layers = hp->n_layers;
    info->n_embd = hp->n_embd;
    info->n_heads = hp->n_heads;
    info->n_vocab = hp->n_vocab;
    info->n_ctx_train = hp->n_ctx_train;
    info->head_dim_k = hp->head_dim_k;
    info->head_dim_v = hp->head_dim_v;
    info->n_kv_heads = hp->n_kv_heads;
    info->windows = hp->window;
    info->n_params = dt_weights_n_params(model->decoder->weights);
    info->weight_bytes = dt_weights_bytes(model->decoder->weights);
    info->step_weight_bytes = dt_decoder_step_bytes(model->decoder);
    info->device = model->decoder->device_text;
    info->has_tokenizer = model->vocab != NULL;
    info->has_chat_template = model->vocab && dt_vocab_has_chat_template(model->vocab);
    return status;
}

dt_status dt_model_open(const char *path, const dt_model_params *params, dt_model **out, dt_error *error) {
    pthread_once(&logs_once, dt_text_route_logs);
    const dt_model_params defaults = {0};
    params = params ? params : &defaults;
    if (DT_LACKS(error, path, out)) {
        return DT_ERR_ARGUMENT;
    }
    if (params->n_device_layers < 0 || params->rpc_timeout_s < 0) {
        return dt_fail(error, DT_ERR_ARGUMENT, "n_device_layers and rpc_timeout_s can't be negative, but are %d and %d",
                       params->n_device_layers, params->rpc_timeout_s);
    }
    dt_status status = dt_check_processor(error);
    if (status != DT_OK) {
        return status;
    }
    dt_model *model = calloc(1, sizeof *model);
    if (!model) {
        return dt_fail_memory(error, sizeof *model, "the model");
    }
    status = dt_gguf_open(path, &model->gguf, error);
    if (status == DT_OK) {
        status = dt_decoder_load(model->gguf, params, &model->decoder, error);
    }
    if (status == DT_OK && !params->no_tokenizer) {
        status = open_vocabulary(model, path, error);
    }
    if (status == DT_OK) {
        status = fill_info(model, error);
    }
    if (status == DT_OK) {
        status = dt_gguf_fingerprint(model->gguf, &model->fingerprint, error);
    }
    if (status != DT_OK) {
        dt_model_close(model);
        return status;
    }
    *out = model;
    return DT_OK;
}

dt_status dt_devices_describe(char **out, dt_error *error) {
    if (DT_LACKS(error, out)) {
        return DT_ERR_ARGUMENT;
    }
    pthread_once(&logs_once, dt_text_route_logs);
    return dt_devices_list(out, error);
}

void dt_model_close(dt_model *model) {
    if (!model) {
        return;
    }
    dt_vocab_free(model->vocab);
    dt_decoder_free(model->decoder);
    dt_gguf_free(model->gguf);
    free(model);
}

const dt_model_info *dt_model_get_info(const dt_model *model) { return model != NULL ? &model->info : NULL; }

/* ---- vocabularies ---- */

/* A token's text for a message, quoted, with what can't be printed left out. */
static const char *show_token(const dt_vocab *vocab, int32_t token, char *out, size_t capacity) {
    if (token >= dt_vocab_size(vocab)) {
        return "missing";
    }
    char bytes[48];
    const size_t n = DT_MIN(dt_vocab_token_bytes(vocab, token, true, bytes, sizeof bytes), sizeof bytes);
    size_t used = 0;
    out[used++] = '"';
    /* cppcheck-suppress knownConditionTrueFalse ; it takes the token for empty */
    for (size_t i = 0; i < n && used + 2 < capacity; i++) {
        out[used++] = bytes[i] >= ' ' && bytes[i] <= '~' ? bytes[i] : '?';
    }
    out[used++] = '"';
    out[used] = 0;
    return out;
}

static bool same_token(const dt_vocab *a, const dt_vocab *b, int32_t token) {
    char text_a[512], text_b[512];
    const size_t n_a = dt_vocab_token_bytes(a, token, true, text_a, sizeof text_a);
    const size_t n_b = dt_vocab_token_bytes(b, token, true, text_b, sizeof text_b);
    return n_a == n_b && memcmp(text_a, text_b, DT_MIN(n_a, sizeof text_a)) == 0 &&
           dt_vocab_is_end(a, token) == dt_vocab_is_end(b, token);
}

static dt_status compare_vocabularies(const dt_vocab *a, const dt_vocab *b, const char *name_a, const char *name_b,
                                      dt_error *error) {
    const int32_t n_a = dt_vocab_size(a), n_b = dt_vocab_size(b);
    int32_t token = 0;
    while (token < DT_MIN(n_a, n_b) && same_token(a, b, token)) {
        token++;
    }
    if (token == n_a && token == n_b) {
        return DT_OK;
    }
    char shown_a[64], shown_b[64];
    return dt_fail(
        error, DT_ERR_ARGUMENT,
        "%s has another vocabulary than %s, so it can't draft for it: token %d is %s there and %s here; use a draft model of "
        "the same family",
        name_b, name_a, token, show_token(b, token, shown_b, sizeof shown_b), show_token(a, token, shown_a, sizeof shown_a));
}

/* Token numbers of a model whose vocabulary is unknown may mean anything to one that has a tokenizer. */
static dt_status fail_no_tokenizer_to_compare(const dt_model *without, const dt_model *with, dt_error *error) {
    return dt_fail(error, DT_ERR_TOKENIZER,
                   "%s has no tokenizer, so it can't be told whether its tokens are those of %s; both need one, or neither",
                   dt_gguf_path(without->gguf), dt_gguf_path(with->gguf));
}

dt_status dt_model_same_vocabulary(const dt_model *model, const dt_model *other, dt_error *error) {
    if (!model->vocab != !other->vocab) {
        return fail_no_tokenizer_to_compare(model->vocab ? other : model, model->vocab ? model : other, error);
    }
    if (model->info.n_vocab != other->info.n_vocab && !model->vocab) {
        return dt_fail(error, DT_ERR_ARGUMENT, "%s has %d tokens and %s has %d", dt_gguf_path(other->gguf), other->info.n_vocab,
                       dt_gguf_path(model->gguf), model->info.n_vocab);
    }
    if (!model->vocab) {
        return DT_OK; /* nothing else to compare */
    }
    return compare_vocabularies(model->vocab, other->vocab, dt_gguf_path(model->gguf), dt_gguf_path(other->gguf), error);
}

static dt_status read_vocabulary(const char *path, dt_vocab **out, dt_error *error) {
    dt_gguf *gguf = NULL;
    bool has_tokenizer = false;
    dt_status status = dt_gguf_open(path, &gguf, error);
    if (status == DT_OK) {
        status = dt_gguf_check_vocabulary(gguf, &has_tokenizer, error);
    }
    if (status == DT_OK) {
        status = has_tokenizer ? dt_vocab_open(path, out, error) : dt_fail(error, DT_ERR_TOKENIZER, "%s has no tokenizer", path);
    }
    dt_gguf_free(gguf);
    return status;
}

dt_status dt_check_same_vocabulary(const char *path, const char *draft_path, dt_error *error) {
    dt_vocab *a = NULL, *b = NULL;
    if (DT_LACKS(error, path, draft_path)) {
        return DT_ERR_ARGUMENT;
    }
    pthread_once(&logs_once, dt_text_route_logs);
    dt_status status = read_vocabulary(path, &a, error);
    if (status == DT_OK) {
        status = read_vocabulary(draft_path, &b, error);
    }
    if (status == DT_OK) {
        status = compare_vocabularies(a, b, path, draft_path, error);
    }
    dt_vocab_free(a);
    dt_vocab_free(b);
    return status;
}

/* ---- text ---- */

static dt_status fail_no_tokenizer(const dt_model *model, dt_error *error) {
    return dt_fail(error, DT_ERR_TOKENIZER,
                   "%s has no tokenizer, so it can't read or write text; convert the model with its tokenizer",
                   dt_gguf_path(model->gguf));
}

dt_status dt_tokenize(const dt_model *model, const char *text, size_t n_bytes, bool add_special, bool parse_special,
                      int32_t **out_tokens, size_t *out_n, dt_error *error) {
    text = n_bytes > 0 ? text : "";
    if (DT_LACKS(error, model, text, out_tokens, out_n)) {
        return DT_ERR_ARGUMENT;
    }
    if (!model->vocab) {
        return fail_no_tokenizer(model, error);
    }
    return dt_vocab_tokenize(model->vocab, text, n_bytes, add_special, parse_special, out_tokens, out_n, error);
}

size_t dt_token_bytes(const dt_model *model, int32_t token, bool special, char *buffer, size_t capacity) {
    return model && model->vocab ? dt_vocab_token_bytes(model->vocab, token, special, buffer, capacity) : 0;
}

bool dt_token_is_end(const dt_model *model, int32_t token) { return model && model->vocab && dt_vocab_is_end(model->vocab, token); }

int32_t dt_token_start(const dt_model *model) { return model && model->vocab ? dt_vocab_start(model->vocab) : -1; }

dt_status dt_chat_render(const dt_model *model, const char *template_name, const dt_chat_message *messages, size_t n_messages,
                         bool add_assistant, char **out, dt_error *error) {
    if (DT_LACKS(error, model, out) || (n_messages > 0 && DT_LACKS(error, messages))) {
        return DT_ERR_ARGUMENT;
    }
    for (size_t i = 0; i < n_messages; i++) {
        if (!messages[i].role || !messages[i].content) {
            return dt_fail(error, DT_ERR_ARGUMENT, "messages[%zu] of the chat has no %s", i, messages[i].role ? "content" : "role");
        }
    }
    if (!model->vocab) {
        return fail_no_tokenizer(model, error);
    }
    return dt_vocab_chat_render(model->vocab, template_name, messages, n_messages, add_assistant, out, error);
}

dt_status dt_sampler_new(const dt_model *model, const dt_sampler_params *params, dt_sampler **out, dt_error *error) {
    if (DT_LACKS(error, model, params, out)) {
        return DT_ERR_ARGUMENT;
    }
    const bool needs_vocab = params->grammar || params->json_schema || params->ignore_end;
    if (needs_vocab && !model->vocab) {
        return fail_no_tokenizer(model, error);
    }
    /* rows of padding beyond the vocabulary are never sampled */
    const int32_t n_vocab = model->vocab ? dt_vocab_size(model->vocab) : model->info.n_vocab;
    return dt_text_sampler_new(model->vocab, n_vocab, model->info.n_ctx_train, params, out, error);
}
