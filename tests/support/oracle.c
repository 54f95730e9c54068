#include "support/oracle.h"

#include "llama.h"

#include <stdlib.h>
#include <string.h>

#define TINY_BYTES ((uint64_t)1 << 25)

struct oracle {
    struct llama_model *model;
    struct llama_context *ctx;
    int32_t position;
};

static void drop_log(enum ggml_log_level level, const char *text, void *user) {
    (void)level;
    (void)text;
    (void)user;
}

oracle *oracle_open(const char *path, int32_t n_ctx, bool flash) {
    llama_log_set(drop_log, NULL);
    oracle *o = calloc(1, sizeof *o);
    struct llama_model_params mp = llama_model_default_params();
    mp.n_gpu_layers = 0;
    o->model = llama_model_load_from_file(path, mp);
    if (o->model) {
        struct llama_context_params cp = llama_context_default_params();
        cp.n_ctx = (uint32_t)n_ctx;
        cp.n_batch = (uint32_t)n_ctx;
        cp.n_ubatch = 512;
        /* on a tiny model a second thread only waits */
        cp.n_threads = cp.n_threads_batch = llama_model_size(o->model) < TINY_BYTES ? 1 : 2;
        cp.flash_attn_type = flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
        o->ctx = llama_init_from_model(o->model, cp);
    }
    if (!o->ctx) {
        oracle_close(o);
        return NULL;
    }
    return o;
}

void oracle_close(oracle *o) {
    if (!o) {
        return;
    }
    if (o->ctx) {
        llama_free(o->ctx);
    }
    if (o->model) {
        llama_model_free(o->model);
    }
    free(o);
}

int32_t oracle_n_vocab(const oracle *o) { return llama_vocab_n_tokens(llama_model_get_vocab(o->model)); }

bool oracle_decode(oracle *o, const int32_t *tokens, int32_t n, float *out) {
    struct llama_batch batch = llama_batch_init(n, 0, 1);
    batch.n_tokens = n;
    for (int32_t i = 0; i < n; i++) {
        batch.token[i] = tokens[i];
        batch.pos[i] = o->position + i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = out != NULL || i == n - 1;
    }
    const bool ok = llama_decode(o->ctx, batch) == 0;
    const size_t n_vocab = (size_t)oracle_n_vocab(o);
    for (int32_t i = 0; ok && out && i < n; i++) {
        memcpy(out + (size_t)i * n_vocab, llama_get_logits_ith(o->ctx, i), n_vocab * sizeof *out);
    }
    o->position += n;
    llama_batch_free(batch);
    return ok;
}

void oracle_remove(oracle *o, int32_t from, int32_t to) { llama_memory_seq_rm(llama_get_memory(o->ctx), 0, from, to); }
