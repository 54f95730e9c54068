/*
 * Which tensors a decoder needs, by name and shape. Loading and checking them is weights/'s work.
 */
#include "graph/decoder.h"

#include "weights/ggml_calls.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LAYER_REQUESTS 16
#define MODEL_REQUESTS 4

typedef struct request_list {
    dt_weight_request *items;
    int32_t n;
} request_list;

/* Adds one request; ne1 = 0: a vector. layer < 0: not of a layer. */
static void ask(request_list *list, int32_t layer, const char *name, dt_weight_use use, int64_t ne0, int64_t ne1, bool required,
                struct ggml_tensor **out, dt_gemm_matrix *packed) {
    dt_weight_request *r = &list->items[list->n++];
    if (layer < 0) {
        snprintf(r->name, sizeof r->name, "%s", name);
    } else {
        snprintf(r->name, sizeof r->name, "blk.%d.%s", layer, name);
    }
    r->use = use;
    r->n_dims = ne1 > 0 ? 2 : 1;
    r->ne[0] = ne0;
    r->ne[1] = ne1 > 0 ? ne1 : 1;
    r->ne[2] = 1;
    r->required = required;
    r->out = out;
    r->packed = packed;
}

static void ask_vector(request_list *list, int32_t layer, const char *name, int64_t n, bool required, struct ggml_tensor **out) {
    ask(list, layer, name, DT_USE_ELEMENTWISE, n, 0, required, out, NULL);
}

static void ask_matrix(request_list *list, int32_t layer, const char *name, int64_t n_in, int64_t n_out, dt_matrix *out) {
    ask(list, layer, name, DT_USE_MATMUL, n_in, n_out, true, &out->tensor, &out->packed);
}

static void ask_layer(request_list *list, const dt_hparams *hp, int32_t i, dt_layer_weights *w) {
    const int64_t width = hp->n_embd, ff = hp->n_ff[i];
    const int64_t q = (int64_t)hp->n_heads * hp->head_dim_k, k = (int64_t)hp->n_kv_heads[i] * hp->head_dim_k;
    const int64_t v = (int64_t)hp->n_kv_heads[i] * hp->head_dim_v, o = (int64_t)hp->n_heads * hp->head_dim_v;
    ask_vector(list, i, "attn_norm.weight", width, true, &w->attn_norm);
    ask_matrix(list, i, "attn_q.weight", width, q, &w->wq);
    ask_matrix(list, i, "attn_k.weight", width, k, &w->wk);
    ask_matrix(list, i, "attn_v.weight", width, v, &w->wv);
    ask_matrix(list, i, "attn_output.weight", o, width, &w->wo);
    ask_vector(list, i, "attn_q.bias", q, false, &w->bq);
    ask_vector(list, i, "attn_k.bias", k, false, &w->bk);
    ask_vector(list, i, "attn_v.bias", v, false, &w->bv);
    ask_vector(list, i, "attn_output.bias", width, false, &w->bo);
    ask_vector(list, i, "ffn_norm.weight", width, true, &w->ffn_norm);
    ask_matrix(list, i, "ffn_gate.weight", width, ff, &w->ffn_gate);
    ask_matrix(list, i, "ffn_up.weight", width, ff, &w->ffn_up);
    ask_matrix(list, i, "ffn_down.weight", ff, width, &w->ffn_down);
    ask_vector(list, i, "ffn_gate.bias", ff, false, &w->ffn_gate_bias);
    ask_vector(list, i, "ffn_up.bias", ff, false, &w->ffn_up_bias);
    ask_vector(list, i, "ffn_down.bias", width, false, &w->ffn_down_bias);
}

static void ask_model(request_list *list, const dt_gguf *gguf, dt_decoder *d) {
    const dt_hparams *hp = &d->hp;
    int64_t shape[4];
    const bool tied = !dt_gguf_tensor_shape(gguf, "output.weight", shape);
    ask(list, -1, "token_embd.weight", DT_USE_ROWS, hp->n_embd, hp->n_vocab, true, &d->token_embedding, NULL);
    ask_vector(list, -1, "output_norm.weight", hp->n_embd, true, &d->output_norm);
    ask_matrix(list, -1, tied ? "token_embd.weight" : "output.weight", hp->n_embd, hp->n_vocab, &d->output);
    ask_vector(list, -1, "rope_freqs.weight", hp->rope_dim / 2, false, &d->rope_factors);
}

dt_status dt_decoder_load(const dt_gguf *gguf, const dt_model_params *params, dt_decoder **out, dt_error *error) {
    dt_decoder *d = calloc(1, sizeof *d);
    if (!d) {
        return dt_fail_memory(error, sizeof *d, "the model");
    }
    dt_status status = dt_hparams_read(gguf, &d->hp, error);
    request_list list = {0};
    if (status == DT_OK) {
        const size_t n_layers = (size_t)d->hp.n_layers;
        d->layers = calloc(n_layers, sizeof *d->layers);
        list.items = calloc(n_layers * LAYER_REQUESTS + MODEL_REQUESTS, sizeof *list.items);
        d->device = dt_ggml_cpu_device();
        if (!d->layers || !list.items) {
            status = dt_fail_memory(error, n_layers * LAYER_REQUESTS * sizeof *list.items, "the list of tensors");
        } else if (!d->device) {
            status = dt_fail(error, DT_ERR_UNSUPPORTED,
                             "ggml's CPU backend does not start: memory ran out, or ggml was built without it (GGML_CPU=ON)");
        }
    }
    if (status == DT_OK) {
        ask_model(&list, gguf, d);
        for (int32_t i = 0; i < d->hp.n_layers; i++) {
            ask_layer(&list, &d->hp, i, &d->layers[i]);
        }
        status = dt_weights_load(gguf, d->device, params, list.items, list.n, &d->weights, error);
    }
    for (int32_t i = 0; status == DT_OK && i < list.n; i++) {
        d->step_bytes += list.items[i].use == DT_USE_MATMUL ? ggml_nbytes(*list.items[i].out) : 0;
    }
    free(list.items);
    if (status != DT_OK) {
        dt_decoder_free(d);
        return status;
    }
    *out = d;
    return DT_OK;
}

void dt_decoder_free(dt_decoder *decoder) {
    if (!decoder) {
        return;
    }
    dt_weights_free(decoder->weights);
    free(decoder->layers);
    free(decoder);
}

uint64_t dt_decoder_step_bytes(const dt_decoder *decoder) { return decoder->step_bytes; }
