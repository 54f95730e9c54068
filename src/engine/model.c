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
    info->n_params = dt_weights_n_params(model->decoder->weights);
    info->weight_bytes = dt_weights_bytes(model->decoder->weights);
    info->step_weight_bytes = dt_decoder_step_bytes(model->decoder);
    info->has_tokenizer = model->vocab != NULL;
    info->has_chat_template = model->vocab && dt_vocab_has_chat_template(model->vocab);
    return status;
}

dt_status dt_model_open(const char *path, const dt_model_params *params, dt_model **out, dt_error *error) {
    static pthread_once_t logs_once = PTHREAD_ONCE_INIT;
    pthread_once(&logs_once, dt_text_route_logs);
    const dt_model_params defaults = {0};
    params = params ? params : &defaults;
    if (!path || !out) {
        return dt_fail(error, DT_ERR_ARGUMENT, "dt_model_open needs a path and a place for the model");
    }
    dt_model *model = calloc(1, sizeof *model);
    if (!model) {
        return dt_fail_memory(error, sizeof *model, "the model");
    }
    dt_status status = dt_gguf_open(path, &model->gguf, error);
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

void dt_model_close(dt_model *model) {
    if (!model) {
        return;
    }
    dt_vocab_free(model->vocab);
    dt_decoder_free(model->decoder);
    dt_gguf_free(model->gguf);
    free(model);
}

const dt_model_info *dt_model_get_info(const dt_model *model) { return &model->info; }

/* ---- text ---- */

static dt_status fail_no_tokenizer(const dt_model *model, dt_error *error) {
    return dt_fail(error, DT_ERR_TOKENIZER,
                   "%s has no tokenizer, so it can't read or write text; convert the model with its tokenizer",
                   dt_gguf_path(model->gguf));
}

dt_status dt_tokenize(const dt_model *model, const char *text, size_t n_bytes, bool add_special, bool parse_special,
                      int32_t **out_tokens, size_t *out_n, dt_error *error) {
    if (!model->vocab) {
        return fail_no_tokenizer(model, error);
    }
    return dt_vocab_tokenize(model->vocab, text, n_bytes, add_special, parse_special, out_tokens, out_n, error);
}

size_t dt_token_bytes(const dt_model *model, int32_t token, bool special, char *buffer, size_t capacity) {
    return model->vocab ? dt_vocab_token_bytes(model->vocab, token, special, buffer, capacity) : 0;
}

bool dt_token_is_end(const dt_model *model, int32_t token) { return model->vocab && dt_vocab_is_end(model->vocab, token); }

int32_t dt_token_start(const dt_model *model) { return model->vocab ? dt_vocab_start(model->vocab) : -1; }

dt_status dt_chat_render(const dt_model *model, const char *template_name, const dt_chat_message *messages, size_t n_messages,
                         bool add_assistant, char **out, dt_error *error) {
    if (!model->vocab) {
        return fail_no_tokenizer(model, error);
    }
    return dt_vocab_chat_render(model->vocab, template_name, messages, n_messages, add_assistant, out, error);
}

dt_status dt_sampler_new(const dt_model *model, const dt_sampler_params *params, dt_sampler **out, dt_error *error) {
    const bool needs_vocab = params->grammar || params->json_schema || params->ignore_end;
    if (needs_vocab && !model->vocab) {
        return fail_no_tokenizer(model, error);
    }
    /* rows of padding beyond the vocabulary are never sampled */
    const int32_t n_vocab = model->vocab ? dt_vocab_size(model->vocab) : model->info.n_vocab;
    return dt_text_sampler_new(model->vocab, n_vocab, model->info.n_ctx_train, params, out, error);
}
