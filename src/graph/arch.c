/*
 * The table of families, and reading their hyperparameters with every limit checked.
 * See arch.h for the invariant.
 */
#include "graph/arch.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Fields left out are off: rotation of pairs (2i, 2i+1), SiLU, dense. */
static const dt_arch archs[] = {
    /* Llama 2, Llama 3.x, SmolLM2, Mistral, Mixtral, and what was saved in their format */
    {.name = "llama", .rope_is_whole_head = true, .has_window = true, .experts = DT_EXPERTS_POSSIBLE},
    {.name = "smollm3", .rope_is_whole_head = true, .unrotated_period = 4},
    /* Qwen 1: fused QKV with bias */
    {.name = "qwen", .rope_style = DT_ROPE_NEOX, .counts_gate_and_up = true},
    /* Qwen 1.5, 2, 2.5 */
    {.name = "qwen2", .rope_style = DT_ROPE_NEOX, .rope_is_whole_head = true},
    {.name = "qwen3", .rope_style = DT_ROPE_NEOX, .rope_is_whole_head = true, .has_qk_norms = true},
    {.name = "qwen3moe",
     .rope_style = DT_ROPE_NEOX,
     .rope_is_whole_head = true,
     .has_qk_norms = true,
     .experts = DT_EXPERTS_ALWAYS},
    /* ChatGLM2, ChatGLM3, GLM-4-9B-chat: fused QKV with bias, half of the head rotated */
    {.name = "chatglm", .has_fused_gate_up = true},
    /* GLM-4-0414 */
    {.name = "glm4", .has_fused_gate_up = true, .has_post_norms = true},
    {.name = "gemma3",
     .rope_style = DT_ROPE_NEOX,
     .activation = DT_ACTIVATION_GELU,
     .has_qk_norms = true,
     .has_post_norms = true,
     .scales_embedding = true,
     .has_window = true,
     .window_period = 6,
     .wide_scale_layers = 62},
};
#define N_ARCHS (sizeof archs / sizeof archs[0])

static const dt_arch *find_arch(const char *name) {
    for (size_t i = 0; i < N_ARCHS; i++) {
        if (strcmp(archs[i].name, name) == 0) {
            return &archs[i];
        }
    }
    return NULL;
}

static dt_status fail_unsupported_arch(const dt_gguf *gguf, const char *name, dt_error *error) {
    char known[256] = "";
    for (size_t i = 0; i < N_ARCHS; i++) {
        const size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "", archs[i].name);
    }
    return dt_fail(error, DT_ERR_UNSUPPORTED, "%s: architecture '%s' is not supported; supported: %s", dt_gguf_path(gguf), name,
                   known);
}

/* "<architecture>.<suffix>" */
typedef struct key_name {
    char text[128];
} key_name;

static key_name key_of(const dt_hparams *hp, const char *suffix) {
    key_name key;
    snprintf(key.text, sizeof key.text, "%s.%s", hp->arch->name, suffix);
    return key;
}

#define TRY(call)                                                                                                                  \
    do {                                                                                                                           \
        const dt_status try_status = (call);                                                                                       \
        if (try_status != DT_OK) {                                                                                                 \
            return try_status;                                                                                                     \
        }                                                                                                                          \
    } while (0)

/* Reads an integer within [low, high]; *out holds the default where the key is optional. */
static dt_status read_int(const dt_gguf *gguf, const dt_hparams *hp, const char *suffix, bool required, int64_t low, int64_t high,
                          int32_t *out, dt_error *error) {
    const key_name key = key_of(hp, suffix);
    uint32_t value = (uint32_t)*out;
    TRY(dt_gguf_u32(gguf, key.text, required, &value, error));
    if ((int64_t)value < low || (int64_t)value > high) {
        return dt_fail(error, DT_ERR_FORMAT, "%s: %s is %u, but must be from %lld to %lld", dt_gguf_path(gguf), key.text, value,
                       (long long)low, (long long)high);
    }
    *out = (int32_t)value;
    return DT_OK;
}

/* Reads a finite number; zero is accepted only where zero_ok. */
static dt_status read_float(const dt_gguf *gguf, const dt_hparams *hp, const char *suffix, bool required, bool zero_ok, float *out,
                            dt_error *error) {
    const key_name key = key_of(hp, suffix);
    TRY(dt_gguf_f32(gguf, key.text, required, out, error));
    if (!dt_is_finite(*out) || *out < 0.0f || (*out == 0.0f && !zero_ok)) {
        return dt_fail(error, DT_ERR_FORMAT, "%s: %s is %g, but must be a finite number above zero", dt_gguf_path(gguf), key.text,
                       (double)*out);
    }
    return DT_OK;
}

static dt_status read_int_array(const dt_gguf *gguf, const dt_hparams *hp, const char *suffix, bool required, int64_t high,
                                int32_t *inout, dt_error *error) {
    const key_name key = key_of(hp, suffix);
    uint32_t values[DT_MAX_LAYERS];
    for (int32_t i = 0; i < hp->n_layers; i++) {
        values[i] = (uint32_t)inout[i];
    }
    TRY(dt_gguf_u32_array(gguf, key.text, required, values, hp->n_layers, error));
    for (int32_t i = 0; i < hp->n_layers; i++) {
        if (values[i] < 1 || (int64_t)values[i] > high) {
            return dt_fail(error, DT_ERR_FORMAT, "%s: %s is %u in layer %d, but must be from 1 to %lld", dt_gguf_path(gguf),
                           key.text, values[i], i, (long long)high);
        }
        inout[i] = (int32_t)values[i];
    }
    return DT_OK;
}

static dt_status read_sizes(const dt_gguf *gguf, dt_hparams *hp, dt_error *error) {
    TRY(read_int(gguf, hp, "block_count", true, 1, DT_MAX_LAYERS, &hp->n_layers, error));
    TRY(read_int(gguf, hp, "embedding_length", true, 1, 1 << 20, &hp->n_embd, error));
    TRY(read_int(gguf, hp, "context_length", true, 1, 1 << 30, &hp->n_ctx_train, error));
    TRY(read_int_array(gguf, hp, "feed_forward_length", true, 1 << 24, hp->n_ff, error));

    for (int32_t i = 0; i < hp->n_layers && hp->arch->counts_gate_and_up; i++) {
        hp->n_ff[i] = DT_MAX(hp->n_ff[i] / 2, 1);
    }

    int32_t heads[DT_MAX_LAYERS] = {0};
    TRY(read_int_array(gguf, hp, "attention.head_count", true, DT_MAX_HEADS, heads, error));
    hp->n_heads = heads[0];
    memcpy(hp->n_kv_heads, heads, sizeof heads);
    TRY(read_int_array(gguf, hp, "attention.head_count_kv", false, DT_MAX_HEADS, hp->n_kv_heads, error));
    for (int32_t i = 0; i < hp->n_layers; i++) {
        if (heads[i] != hp->n_heads) {
            return dt_fail(error, DT_ERR_UNSUPPORTED,
                           "%s: %s.attention.head_count differs between layers (%d and %d), which is not supported",
                           dt_gguf_path(gguf), hp->arch->name, hp->n_heads, heads[i]);
        }
        if (hp->n_heads % hp->n_kv_heads[i] != 0) {
            return dt_fail(error, DT_ERR_FORMAT, "%s: %d query heads can't share %d KV heads evenly in layer %d",
                           dt_gguf_path(gguf), hp->n_heads, hp->n_kv_heads[i], i);
        }
    }

    int64_t embedding[4];
    if (!dt_gguf_tensor_shape(gguf, "token_embd.weight", embedding)) {
        return dt_fail(error, DT_ERR_FORMAT, "%s: tensor token_embd.weight is missing", dt_gguf_path(gguf));
    }
    if (embedding[1] < 1 || embedding[1] > 1 << 24) {
        return dt_fail(error, DT_ERR_FORMAT, "%s: token_embd.weight has %lld rows, but must have from 1 to %d", dt_gguf_path(gguf),
                       (long long)embedding[1], 1 << 24);
    }
    hp->n_vocab = (int32_t)embedding[1];
    return DT_OK;
}

static dt_status read_attention(const dt_gguf *gguf, dt_hparams *hp, dt_error *error) {
    hp->head_dim_k = hp->head_dim_v = DT_MAX(hp->n_embd / hp->n_heads, 1);
    TRY(read_int(gguf, hp, "attention.key_length", false, 2, DT_MAX_HEAD_DIM, &hp->head_dim_k, error));
    TRY(read_int(gguf, hp, "attention.value_length", false, 1, DT_MAX_HEAD_DIM, &hp->head_dim_v, error));
    TRY(read_float(gguf, hp, "attention.layer_norm_rms_epsilon", true, true, &hp->norm_eps, error));
    float scale = 0.0f;
    TRY(read_float(gguf, hp, "attention.scale", false, true, &scale, error));
    const bool is_wide = hp->arch->wide_scale_layers > 0 && hp->n_layers == hp->arch->wide_scale_layers;
    const int32_t scaled_dim = is_wide ? hp->n_embd / hp->n_heads : hp->head_dim_k;
    hp->attention_scale = scale > 0.0f ? scale : 1.0f / sqrtf((float)DT_MAX(scaled_dim, 1));
    hp->embedding_scale = hp->arch->scales_embedding ? sqrtf((float)hp->n_embd) : 1.0f;
    return read_float(gguf, hp, "final_logit_softcapping", false, true, &hp->logit_softcap, error);
}

/* A mixture of experts; n_ff becomes the width of one of them. */
static dt_status read_experts(const dt_gguf *gguf, dt_hparams *hp, dt_error *error) {
    const dt_experts experts = hp->arch->experts;
    TRY(read_int(gguf, hp, "expert_count", experts == DT_EXPERTS_ALWAYS, 0, DT_MAX_EXPERTS, &hp->n_experts, error));
    if (hp->n_experts > 0 && experts == DT_EXPERTS_NONE) {
        return dt_fail(error, DT_ERR_UNSUPPORTED,
                       "%s: a mixture of %d experts is not supported in architecture '%s'; use a dense model", dt_gguf_path(gguf),
                       hp->n_experts, hp->arch->name);
    }
    if (hp->n_experts == 0 && experts == DT_EXPERTS_ALWAYS) {
        return dt_fail(error, DT_ERR_FORMAT, "%s: %s.expert_count is 0, but must be from 1 to %d", dt_gguf_path(gguf),
                       hp->arch->name, DT_MAX_EXPERTS);
    }
    if (hp->n_experts == 0) {
        return DT_OK;
    }
    TRY(read_int(gguf, hp, "expert_used_count", true, 1, hp->n_experts, &hp->n_experts_used, error));
    if (experts == DT_EXPERTS_ALWAYS) {
        for (int32_t i = 0; i < hp->n_layers; i++) {
            hp->n_ff[i] = DT_MAX(hp->n_ff[i] / hp->n_experts_used, 1);
        }
        TRY(read_int_array(gguf, hp, "expert_feed_forward_length", false, 1 << 24, hp->n_ff, error));
    }
    return DT_OK;
}

/* Which layers see only the last tokens. attention.sliding_window_pattern: a period as in dt_arch, or a flag per layer. */
static dt_status read_windows(const dt_gguf *gguf, dt_hparams *hp, dt_error *error) {
    int32_t window = 0, period = hp->arch->window_period;
    if (!hp->arch->has_window) {
        return DT_OK;
    }
    TRY(read_int(gguf, hp, "attention.sliding_window", false, 0, INT32_MAX, &window, error));
    const key_name pattern = key_of(hp, "attention.sliding_window_pattern");
    const bool has_flags = dt_gguf_array_length(gguf, pattern.text) >= 0;
    uint32_t flags[DT_MAX_LAYERS];
    if (has_flags) {
        TRY(dt_gguf_u32_array(gguf, pattern.text, true, flags, hp->n_layers, error));
    } else {
        TRY(read_int(gguf, hp, "attention.sliding_window_pattern", false, 0, DT_MAX_LAYERS, &period, error));
    }
    for (int32_t i = 0; i < hp->n_layers; i++) {
        const bool is_local = has_flags ? flags[i] != 0 : period == 0 || i % period < period - 1;
        hp->window[i] = is_local ? window : 0;
    }
    return DT_OK;
}

/* ggml_rope_ext applies 0.1*ln(factor)+1 to the attention by itself when ext_factor is not 0, which is YaRN's own value: nothing
 * is left for attn_factor but what the file asks for. */
static dt_status read_rope(const dt_gguf *gguf, dt_hparams *hp, dt_error *error) {
    hp->rope_dim = hp->head_dim_k;
    TRY(read_int(gguf, hp, "rope.dimension_count", false, 2, hp->head_dim_k, &hp->rope_dim, error));
    if (hp->rope_dim % 2 != 0 || (hp->arch->rope_is_whole_head && hp->rope_dim != hp->head_dim_k)) {
        return dt_fail(error, DT_ERR_FORMAT, "%s: %s.rope.dimension_count is %d, but the head size is %d", dt_gguf_path(gguf),
                       hp->arch->name, hp->rope_dim, hp->head_dim_k);
    }
    const key_name sections = key_of(hp, "rope.dimension_sections");
    if (dt_gguf_has_key(gguf, sections.text)) {
        return dt_fail(error, DT_ERR_UNSUPPORTED, "%s: %s: a rotation by image positions is not supported; use a text model",
                       dt_gguf_path(gguf), sections.text);
    }
    float base = 10000.0f;
    TRY(read_float(gguf, hp, "rope.freq_base", false, false, &base, error));
    float local_base = 10000.0f; /* of layers with a window, in families whose other layers are global */
    TRY(read_float(gguf, hp, "rope.freq_base_swa", false, false, &local_base, error));

    const char *type = "linear";
    const key_name type_key = key_of(hp, "rope.scaling.type");
    TRY(dt_gguf_string(gguf, type_key.text, false, &type, error));
    const bool none = strcmp(type, "none") == 0, yarn = strcmp(type, "yarn") == 0;
    if (!none && !yarn && strcmp(type, "linear") != 0) {
        return dt_fail(error, DT_ERR_UNSUPPORTED, "%s: %s is '%s', which is not supported; supported: none, linear, yarn",
                       dt_gguf_path(gguf), type_key.text, type);
    }
    float factor = 0.0f;
    TRY(read_float(gguf, hp, "rope.scale_linear", false, true, &factor, error)); /* the key's old name */
    TRY(read_float(gguf, hp, "rope.scaling.factor", false, true, &factor, error));
    const float freq_scale = none || factor == 0.0f ? 1.0f : 1.0f / factor;
    for (int32_t i = 0; i < hp->n_layers; i++) {
        const bool is_local = hp->window[i] > 0 && hp->arch->window_period > 0;
        const bool is_rotated = hp->arch->unrotated_period == 0 || (i + 1) % hp->arch->unrotated_period != 0;
        hp->rope_base[i] = !is_rotated ? 0.0f : is_local ? local_base : base;
        hp->rope_freq_scale[i] = is_local ? 1.0f : freq_scale;
    }

    hp->rope_ctx_orig = hp->n_ctx_train;
    TRY(read_int(gguf, hp, "rope.scaling.original_context_length", false, 1, 1 << 30, &hp->rope_ctx_orig, error));
    hp->rope_attn_factor = 1.0f;
    TRY(read_float(gguf, hp, "rope.scaling.attn_factor", false, false, &hp->rope_attn_factor, error));
    hp->rope_ext_factor = yarn ? 1.0f : 0.0f;
    hp->rope_beta_fast = 32.0f;
    hp->rope_beta_slow = 1.0f;
    TRY(read_float(gguf, hp, "rope.scaling.yarn_ext_factor", false, true, &hp->rope_ext_factor, error));
    TRY(read_float(gguf, hp, "rope.scaling.yarn_beta_fast", false, true, &hp->rope_beta_fast, error));
    TRY(read_float(gguf, hp, "rope.scaling.yarn_beta_slow", false, true, &hp->rope_beta_slow, error));
    return DT_OK;
}

dt_status dt_hparams_read(const dt_gguf *gguf, dt_hparams *out, dt_error *error) {
    memset(out, 0, sizeof *out);
    const char *name = NULL;
    TRY(dt_gguf_string(gguf, "general.architecture", true, &name, error));
    out->arch = find_arch(name);
    if (!out->arch) {
        return fail_unsupported_arch(gguf, name, error);
    }
    TRY(read_sizes(gguf, out, error));
    TRY(read_attention(gguf, out, error));
    TRY(read_experts(gguf, out, error));
    TRY(read_windows(gguf, out, error));
    return read_rope(gguf, out, error);
}
