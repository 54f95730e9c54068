/*
 * Which tensors a decoder needs, by name and shape. Loading and checking them is weights/'s work.
 */
#include "graph/decoder.h"

#include "weights/ggml_calls.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LAYER_REQUESTS 24
#define ROUNDING 1e-6 /* a third of 3 layers is 1 */
#define DEFAULT_TIMEOUT_S 600
#define MODEL_REQUESTS (4 + DT_MAX_DEVICES)

typedef struct request_list {
    const dt_gguf *gguf;
    dt_weight_request *items;
    int32_t n;
    ggml_backend_dev_t device; /* of what is asked for now; NULL: the CPU */
} request_list;

static void name_tensor(int32_t layer, const char *name, char *out, size_t capacity) {
    if (layer < 0) {
        snprintf(out, capacity, "%s", name);
    } else {
        snprintf(out, capacity, "blk.%d.%s", layer, name);
    }
}

static bool has_tensor(const request_list *list, int32_t layer, const char *name) {
    char full[sizeof list->items->name];
    int64_t shape[4];
    name_tensor(layer, name, full, sizeof full);
    return dt_gguf_tensor_shape(list->gguf, full, shape);
}

/* Adds one request; a dimension of 0 is none. layer < 0: not of a layer. */
static dt_weight_request *ask(request_list *list, int32_t layer, const char *name, dt_weight_use use, int64_t ne0, int64_t ne1,
                              int64_t ne2, bool required, struct ggml_tensor **out) {
    dt_weight_request *r = &list->items[list->n++];
    name_tensor(layer, name, r->name, sizeof r->name);
    r->use = use;
    r->n_dims = ne2 > 0 ? 3 : ne1 > 0 ? 2 : 1;
    r->ne[0] = ne0;
    r->ne[1] = DT_MAX(ne1, 1);
    r->ne[2] = DT_MAX(ne2, 1);
    r->required = required;
    r->device = list->device;
    r->out = out;
    return r;
}

static void ask_vector(request_list *list, int32_t layer, const char *name, int64_t n, bool required, struct ggml_tensor **out) {
    ask(list, layer, name, DT_USE_ELEMENTWISE, n, 0, 0, required, out);
}

static void ask_matrix(request_list *list, int32_t layer, const char *name, int64_t n_in, int64_t n_out, dt_matrix *out) {
    ask(list, layer, name, DT_USE_MATMUL, n_in, n_out, 0, true, &out->tensor)->packed = &out->packed;
}

static void ask_experts(request_list *list, int32_t layer, const char *name, int64_t n_in, int64_t n_out, int64_t n_experts,
                        struct ggml_tensor **out) {
    ask(list, layer, name, DT_USE_MATMUL_ID, n_in, n_out, n_experts, true, out);
}

/* Queries, keys and values come from one matrix or from three, as the file has them. */
static void ask_attention(request_list *list, const dt_hparams *hp, int32_t i, dt_layer_weights *w) {
    const int64_t width = hp->n_embd;
    const int64_t q = (int64_t)hp->n_heads * hp->head_dim_k, k = (int64_t)hp->n_kv_heads[i] * hp->head_dim_k;
    const int64_t v = (int64_t)hp->n_kv_heads[i] * hp->head_dim_v, o = (int64_t)hp->n_heads * hp->head_dim_v;
    ask_vector(list, i, "attn_norm.weight", width, true, &w->attn_norm);
    if (has_tensor(list, i, "attn_qkv.weight")) {
        ask_matrix(list, i, "attn_qkv.weight", width, q + k + v, &w->wqkv);
        ask_vector(list, i, "attn_qkv.bias", q + k + v, false, &w->bqkv);
    } else {
        ask_matrix(list, i, "attn_q.weight", width, q, &w->wq);
        ask_matrix(list, i, "attn_k.weight", width, k, &w->wk);
        ask_matrix(list, i, "attn_v.weight", width, v, &w->wv);
    }
    ask_vector(list, i, "attn_q.bias", q, false, &w->bq);
    ask_vector(list, i, "attn_k.bias", k, false, &w->bk);
    ask_vector(list, i, "attn_v.bias", v, false, &w->bv);
    if (hp->arch->has_qk_norms) {
        ask_vector(list, i, "attn_q_norm.weight", hp->head_dim_k, true, &w->q_norm);
        ask_vector(list, i, "attn_k_norm.weight", hp->head_dim_k, true, &w->k_norm);
    }
    ask_matrix(list, i, "attn_output.weight", o, width, &w->wo);
    ask_vector(list, i, "attn_output.bias", width, false, &w->bo);
    if (hp->arch->has_post_norms) {
        ask_vector(list, i, "post_attention_norm.weight", width, true, &w->attn_post_norm);
    }
}

static void ask_feed_forward(request_list *list, const dt_hparams *hp, int32_t i, dt_layer_weights *w) {
    const int64_t width = hp->n_embd, ff = hp->n_ff[i];
    ask_vector(list, i, "ffn_norm.weight", width, true, &w->ffn_norm);
    if (hp->n_experts > 0) {
        ask_matrix(list, i, "ffn_gate_inp.weight", width, hp->n_experts, &w->router);
        ask_experts(list, i, "ffn_gate_exps.weight", width, ff, hp->n_experts, &w->gate_experts);
        ask_experts(list, i, "ffn_up_exps.weight", width, ff, hp->n_experts, &w->up_experts);
        ask_experts(list, i, "ffn_down_exps.weight", ff, width, hp->n_experts, &w->down_experts);
    } else if (hp->arch->has_fused_gate_up) {
        ask_matrix(list, i, "ffn_up.weight", width, 2 * ff, &w->ffn_up);
        ask_matrix(list, i, "ffn_down.weight", ff, width, &w->ffn_down);
    } else {
        ask_matrix(list, i, "ffn_gate.weight", width, ff, &w->ffn_gate);
        ask_matrix(list, i, "ffn_up.weight", width, ff, &w->ffn_up);
        ask_matrix(list, i, "ffn_down.weight", ff, width, &w->ffn_down);
        ask_vector(list, i, "ffn_gate.bias", ff, false, &w->ffn_gate_bias);
        ask_vector(list, i, "ffn_up.bias", ff, false, &w->ffn_up_bias);
        ask_vector(list, i, "ffn_down.bias", width, false, &w->ffn_down_bias);
    }
    if (hp->arch->has_post_norms) {
        ask_vector(list, i, "post_ffw_norm.weight", width, true, &w->ffn_post_norm);
    }
}

static void ask_model(request_list *list, dt_decoder *d) {
    const dt_hparams *hp = &d->hp;
    const bool tied = !has_tensor(list, -1, "output.weight");
    ask(list, -1, "token_embd.weight", DT_USE_ROWS, hp->n_embd, hp->n_vocab, 0, true, &d->token_embedding);
    list->device = d->head_device > 0 ? d->devices[d->head_device] : NULL;
    ask_vector(list, -1, "output_norm.weight", hp->n_embd, true, &d->output_norm);
    ask_matrix(list, -1, tied ? "token_embd.weight" : "output.weight", hp->n_embd, hp->n_vocab, &d->output);
    ask_vector(list, -1, "output.bias", hp->n_vocab, false, &d->output_bias);
    for (int32_t i = 0; i < d->n_devices; i++) {
        list->device = i > 0 ? d->devices[i] : NULL;
        ask_vector(list, -1, "rope_freqs.weight", hp->rope_dim / 2, false, &d->rope_factors[i]);
    }
}

/* A number such as 3 or 0.25 at *text, which moves behind it; -1: there is none. The host's locale has no say. */
static double read_share(const char **text) {
    const char *c = *text;
    double value = 0, unit = 1;
    bool fraction = false;
    for (; (*c >= '0' && *c <= '9') || (*c == '.' && !fraction); c++) {
        fraction = fraction || *c == '.';
        unit *= fraction && *c != '.' ? 0.1 : 1;
        value = *c == '.' ? value : fraction ? value + (*c - '0') * unit : value * 10 + (*c - '0');
    }
    const bool is_point = c == *text + 1 && **text == '.';
    const bool is_number = c > *text && !is_point && value <= 1e9;
    *text = c;
    return is_number ? value : -1;
}

/* What each of n devices takes of the layers, in any unit: as asked for, else the memory it has free, else all the same. */
static dt_status read_shares(const dt_decoder *d, const dt_model_params *params, int32_t n, double *shares, dt_error *error) {
    const char *c = params->device_split;
    double sum = 0;
    bool all_told = true;
    if (c != NULL) {
        int32_t found = 0;
        bool good = true;
        while (good) {
            const double share = read_share(&c);
            good = share >= 0 && found < n;
            if (good) {
                shares[found++] = share;
                sum += share;
            }
            if (*c != ',' && *c != '/') {
                break;
            }
            c++;
        }
        return good && *c == 0 && found == n && sum > 0
                   ? DT_OK
                   : dt_fail(error, DT_ERR_ARGUMENT,
                             "'%s' does not share layers between %d device%s; give a number for each, such as %s",
                             params->device_split, n, n == 1 ? "" : "s",
                             n == 1   ? "1"
                             : n == 2 ? "3,1"
                                      : "3,1,1");
    }
    for (int32_t i = 0; i < n; i++) {
        size_t available = 0, total = 0;
        ggml_backend_dev_memory(d->devices[1 + i], &available, &total);
        shares[i] = (double)available;
        all_told = all_told && available > 0;
    }
    for (int32_t i = 0; i < n && !all_told; i++) {
        shares[i] = 1;
    }
    return DT_OK;
}

/* The first so many layers go to the devices; what comes after the layers goes along where all do. */
static dt_status share_layers(dt_decoder *d, const dt_model_params *params, dt_error *error) {
    const int32_t n_layers = d->hp.n_layers;
    double shares[DT_MAX_DEVICES] = {0}, sum = 0, before = 0;
    const int32_t timeout_s = params->rpc_timeout_s > 0 ? params->rpc_timeout_s : DEFAULT_TIMEOUT_S;
    dt_status status = dt_devices_find(params->device, timeout_s, &d->devices[1], DT_MAX_DEVICES - 1, &d->n_devices, error);
    for (int32_t i = 1; status == DT_OK && i <= d->n_devices; i++) {
        d->connections[i] = dt_device_is_remote(d->devices[i]) ? dt_ggml_new_backend(d->devices[i]) : NULL;
    }
    if (status == DT_OK && d->n_devices == 0 && params->device_split != NULL) {
        status = dt_fail(error, DT_ERR_ARGUMENT,
                         "there is no device to share layers with; leave --tensor-split out, or name others with --device");
    }
    if (status == DT_OK && d->n_devices > 0) {
        status = read_shares(d, params, d->n_devices, shares, error);
    }
    if (status != DT_OK) {
        return status;
    }
    for (int32_t i = 0; i < d->n_devices; i++) {
        sum += shares[i];
    }
    const int32_t n = d->n_devices, wanted = params->n_device_layers > 0 ? params->n_device_layers : INT32_MAX;
    const int32_t n_given = n > 0 ? DT_MIN(wanted, n_layers) : 0;
    snprintf(d->device_text, sizeof d->device_text, "cpu");
    for (int32_t i = 0, at = 0; i < n; i++) {
        const int32_t first = (int32_t)(n_given * (before / sum) + ROUNDING);
        const int32_t end = i + 1 < n ? (int32_t)(n_given * ((before + shares[i]) / sum) + ROUNDING) : n_given;
        before += shares[i];
        memset(d->layer_device + first, 1 + i, (size_t)(end - first));
        if (end > first && at < (int32_t)sizeof d->device_text) {
            at += snprintf(d->device_text + at, sizeof d->device_text - (size_t)at, "%s%s (layers %d-%d)", at > 0 ? ", " : "",
                           dt_device_name(d->devices[1 + i]), first, end - 1);
        }
    }
    d->head_device = n_given == n_layers && wanted > n_layers ? n : 0;
    d->n_devices = 1 + n;
    return DT_OK;
}

/* What one token reads of a matrix. */
static uint64_t step_bytes(const dt_hparams *hp, const dt_weight_request *request) {
    switch (request->use) {
    case DT_USE_MATMUL:
        return ggml_nbytes(*request->out);
    case DT_USE_MATMUL_ID:
        return ggml_nbytes(*request->out) / (uint64_t)hp->n_experts * (uint64_t)hp->n_experts_used;
    default:
        return 0;
    }
}

static dt_status compute_rope(dt_decoder *d, dt_error *error) {
    const size_t n_pairs = (size_t)d->hp.rope_dim / 2, n = n_pairs * (size_t)d->hp.n_layers;
    d->rope_frequencies = calloc(DT_MAX(n, 1), sizeof *d->rope_frequencies);
    float *factors = calloc(DT_MAX(n_pairs, 1), sizeof *factors);
    if (!d->rope_frequencies || !factors) {
        free(factors);
        return dt_fail_memory(error, n * sizeof *d->rope_frequencies, "the model");
    }
    struct ggml_tensor *given = NULL; /* the same on every device */
    for (int32_t i = 0; i < DT_MAX_DEVICES; i++) {
        given = d->rope_factors[i] ? d->rope_factors[i] : given;
    }
    if (given) {
        ggml_backend_tensor_get(given, factors, 0, n_pairs * sizeof *factors);
    }
    for (int32_t i = 0; i < d->hp.n_layers; i++) {
        dt_rope_frequencies(&d->hp, i, given ? factors : NULL, d->rope_frequencies + (size_t)i * n_pairs);
    }
    free(factors);
    return DT_OK;
}

dt_status dt_decoder_load(const dt_gguf *gguf, const dt_model_params *params, dt_decoder **out, dt_error *error) {
    dt_decoder *d = calloc(1, sizeof *d);
    if (!d) {
        return dt_fail_memory(error, sizeof *d, "the model");
    }
    dt_status status = dt_hparams_read(gguf, &d->hp, error);
    request_list list = {.gguf = gguf};
    if (status == DT_OK) {
        const size_t n_layers = (size_t)d->hp.n_layers;
        d->layers = calloc(n_layers, sizeof *d->layers);
        d->layer_device = calloc(n_layers, sizeof *d->layer_device);
        list.items = calloc(n_layers * LAYER_REQUESTS + MODEL_REQUESTS, sizeof *list.items);
        d->devices[0] = dt_ggml_cpu_device();
        if (!d->layers || !d->layer_device || !list.items) {
            status = dt_fail_memory(error, n_layers * LAYER_REQUESTS * sizeof *list.items, "the list of tensors");
        } else if (!d->devices[0]) {
            status = dt_fail(error, DT_ERR_UNSUPPORTED,
                             "ggml's CPU backend does not start: memory ran out, or ggml was built without it (GGML_CPU=ON)");
        }
    }
    if (status == DT_OK) {
        status = share_layers(d, params, error);
    }
    if (status == DT_OK) {
        ask_model(&list, d);
        for (int32_t i = 0; i < d->hp.n_layers; i++) {
            list.device = d->layer_device[i] > 0 ? d->devices[d->layer_device[i]] : NULL;
            ask_attention(&list, &d->hp, i, &d->layers[i]);
            ask_feed_forward(&list, &d->hp, i, &d->layers[i]);
        }
        status = dt_weights_load(gguf, d->devices[0], params, list.items, list.n, &d->weights, error);
    }
    if (status == DT_OK) {
        status = compute_rope(d, error);
    }
    for (int32_t i = 0; status == DT_OK && i < list.n; i++) {
        d->step_bytes += step_bytes(&d->hp, &list.items[i]);
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
    for (int32_t i = 0; i < DT_MAX_DEVICES; i++) {
        if (decoder->connections[i]) {
            ggml_backend_free(decoder->connections[i]);
        }
    }
    free(decoder->layers);
    free(decoder->rope_frequencies);
    free(decoder->layer_device);
    free(decoder);
}

uint64_t dt_decoder_step_bytes(const dt_decoder *decoder) { return decoder->step_bytes; }
