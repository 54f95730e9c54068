/*
 * What the parts of the engine share: the insides of a model and of a session.
 */
#ifndef DT_ENGINE_H
#define DT_ENGINE_H

#include "graph/device_cache.h"
#include "graph/graph.h"
#include "text/text.h"

struct dt_model {
    dt_gguf *gguf;
    dt_decoder *decoder;
    dt_vocab *vocab; /* NULL: the file has no tokenizer */
    dt_model_info info;
    uint64_t fingerprint; /* dt_gguf_fingerprint */
};

/* DT_ERR_ARGUMENT naming the first token that is not the same in both; DT_ERR_TOKENIZER: only one of them has a tokenizer. */
dt_status dt_model_same_vocabulary(const dt_model *model, const dt_model *other, dt_error *error);
/* The model a session runs on. */
const dt_model *dt_session_model(const dt_session *session);
/* Its cache, for tests that compare with masked references. */
dt_kv *dt_session_kv(dt_session *session);

#endif
