/*
 * DeepTutor: run language models with long contexts, fast, by managing the KV cache layer by layer.
 *
 * Two nouns. A dt_model holds immutable weights, hyperparameters and the tokenizer, and may be shared by
 * any number of sessions and threads. A dt_session is one timeline: the tokens so far, a KV cache per
 * layer, the logits after the last token. A session is used by one thread at a time.
 *
 * Callers state the goal (dt_session_sync: "the conversation is now these tokens"); the session finds
 * the cheap way there. Errors are values: every function that can fail returns a dt_status and, where
 * `error` is not NULL, fills it with a sentence that says what to do. Sentences name settings by the programs' flags, which have the
 * names of the members of the structs here (--kv-memory 100K: kv_memory = 100 * 1024; -c: n_ctx, -b: n_batch, -n: the number of tokens
 * wanted). Nothing here exits, aborts or prints, but for layers on other
 * machines (dt_model_params.device, dt_rpc_serve). DT_ERR_MEMORY may come from every one, and DT_ERR_ARGUMENT where a pointer that
 * is needed is NULL (what has no status takes a first one for nothing: 0, NULL or false); other statuses are told at each.
 *
 * Ownership: what a function hands out through `T **out` is the caller's, to be freed by the function
 * named beside it, which accepts NULL. A function that fails hands out nothing; *out is NULL then or as it was, so begin with NULL.
 * Pointers returned otherwise belong to the object they came from. Strings and parameters are read during the call only.
 */
#ifndef DEEPTUTOR_H
#define DEEPTUTOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DT_VERSION "0.1.0"

/* ---- status ------------------------------------------------------------------------------------- */

/* name, text */
#define DT_STATUS_MAP(X)                                                                                                           \
    X(OK, "done")                                                                                                                  \
    X(ERR_ARGUMENT, "bad argument")                                                                                                \
    X(ERR_MEMORY, "out of memory")                                                                                                 \
    X(ERR_IO, "input or output failed")                                                                                            \
    X(ERR_FORMAT, "malformed file")                                                                                                \
    X(ERR_UNSUPPORTED, "not supported")                                                                                            \
    X(ERR_CONFIG, "bad configuration")                                                                                             \
    X(ERR_LIMIT, "limit exceeded")                                                                                                 \
    X(ERR_TOKENIZER, "tokenizer missing or failed")                                                                                \
    X(ERR_COMPUTE, "computation failed")                                                                                           \
    X(ERR_CANCELLED, "cancelled by the caller")                                                                                    \
    X(ERR_INTERNAL, "internal inconsistency")

typedef enum dt_status {
#define X(name, text) DT_##name,
    DT_STATUS_MAP(X)
#undef X
} dt_status;

typedef struct dt_error {
    dt_status code;
    char message[1024]; /* one sentence, no newline at its end */
} dt_error;

const char *dt_status_name(dt_status status); /* "DT_ERR_IO"; never NULL */
void dt_free(void *memory);                   /* what a dt_ function allocated for the caller, as it says there */

/* ---- log ---------------------------------------------------------------------------------------- */

typedef enum dt_log_level { DT_LOG_ERROR, DT_LOG_WARN, DT_LOG_INFO, DT_LOG_DEBUG } dt_log_level;
/* `line` has no newline. Called from the thread that caused the message. */
typedef void (*dt_log_fn)(dt_log_level level, const char *line, void *user);
/* Sets the process-wide receiver of log lines; NULL (the default) drops them. ggml's and libllama's own lines
 * arrive here too, one level lower than they were sent. Another thread may still be in the receiver before when this returns. */
void dt_log_set(dt_log_fn fn, void *user);

/* ---- model -------------------------------------------------------------------------------------- */

typedef struct dt_model dt_model;

typedef struct dt_model_params {
    bool no_mmap;          /* read the file into memory instead of mapping it */
    bool no_extra_buffers; /* keep weights in the file's layout (tests: same rounding for every batch size) */
    bool no_tokenizer;     /* do not load the tokenizer even where the file has one */
    /* Devices for layers and their cache, separated by commas, as dt_devices_describe lists them ("cuda", "vulkan1");
     * "rpc=HOST:PORT" is what another machine lends (docs/cluster.md), "ggml-cpu" takes the CPU like a device (tests). NULL or
     * "cpu": everything is computed by the CPU. Copied.
     *
     * A server that can't be reached is an error. One that goes away later, or is silent for longer than rpc_timeout_s, ends the
     * process: ggml's client calls abort(), in a thread of its own. Whoever has more to lose computes in a child process, as the
     * programs of DeepTutor do; files that were saved are whole. Ignore SIGPIPE there. */
    const char *device;
    int32_t n_device_layers; /* the first so many layers; beyond their number the output too; 0 = everything */
    const char
        *device_split;     /* how many layers each device takes, such as "3,1"; NULL: in proportion to its free memory. Copied. */
    int32_t rpc_timeout_s; /* how long a server may be silent while it is waited for; 0 = 600 */
} dt_model_params;

typedef struct dt_model_info {
    const char *architecture; /* "llama" */
    const char *name;         /* general.name or "" */
    const char *weight_type;  /* the commonest type of the matrices, "Q4_1" */
    int32_t n_layers, n_embd, n_heads, n_vocab, n_ctx_train;
    int32_t head_dim_k, head_dim_v;
    const int32_t *n_kv_heads; /* [n_layers] */
    const int32_t *windows;    /* [n_layers] sliding window in tokens, 0 = the layer sees everything */
    uint64_t n_params, weight_bytes;
    uint64_t step_weight_bytes; /* what one decode step reads of them */
    const char *device;         /* "cpu", or which layers are where: "CUDA0 (layers 0-15)" */
    bool has_tokenizer, has_chat_template;
} dt_model_info;

/* Opens a GGUF file (or the first of a split set). params may be NULL. Free with dt_model_close.
 * Fails with a named key or tensor when the file lacks something or has it in another type or shape (DT_ERR_FORMAT); else
 * DT_ERR_IO: it can't be read, or a server not be reached; DT_ERR_UNSUPPORTED: architecture, type of weights, processor or device;
 * DT_ERR_TOKENIZER; DT_ERR_ARGUMENT: no such device, or a negative number; DT_ERR_COMPUTE: a device fails. */
dt_status dt_model_open(const char *path, const dt_model_params *params, dt_model **out, dt_error *error);
/* All sessions on the model must be freed before. NULL is accepted. */
void dt_model_close(dt_model *model);
/* Valid, with all it points to, until the model is closed. */
const dt_model_info *dt_model_get_info(const dt_model *model);

/* What this build can compute on, a line each: name, what it is, memory. Free with dt_free. */
dt_status dt_devices_describe(char **out, dt_error *error);

/* Whether every server that a model's `device` names ("rpc=..."; NULL: none) answers now; the first that doesn't is an error naming
 * it: DT_ERR_IO, DT_ERR_UNSUPPORTED where it speaks another version, DT_ERR_ARGUMENT for what is no address. Starts nothing, waits
 * some seconds at most; other devices are not looked at. */
dt_status dt_devices_check(const char *device, dt_error *error);

typedef struct dt_rpc_server_params {
    const char *host;   /* IPv4 address to listen at; NULL: 127.0.0.1 */
    int32_t port;       /* 0: 50052 */
    int32_t n_threads;  /* of the CPU; <= 0: physical cores */
    const char *device; /* what is lent, as in dt_model_params; NULL: all GPUs, or where there is none the CPU */
    const char *cache;  /* folder that keeps large tensors, so that they are sent once; NULL: none */
} dt_rpc_server_params;

/* Lends devices to other machines ("rpc=HOST:PORT" there), to one client at a time; returns only on failure. There is no password
 * and no encryption, and a malformed request may end the process: for trusted networks. ggml tells on stdout who comes and goes.
 * params may be NULL. DT_ERR_ARGUMENT: no such address or device; DT_ERR_IO: the address is taken, the folder is missing, or the
 * server ended; DT_ERR_UNSUPPORTED: this build or processor can't. */
dt_status dt_rpc_serve(const dt_rpc_server_params *params, dt_error *error);

/* ---- quantizing --------------------------------------------------------------------------------- */

/* What the file in the making is called after the output: no name that browsers give what they are still fetching (.part), and half
 * of a downloaded model begins like a quantized one. */
#define DT_QUANTIZE_PART ".quantizing.part"

typedef struct dt_quantize_params {
    const char *input; /* GGUF file, or the first of a split set */
    /* Written as OUTPUT.quantizing.part, renamed when whole; a file of that name must be what a killed run left. */
    const char *output;
    const char *type;  /* "Q4_K_M", any case; dt_quantize_type lists them */
    int32_t n_threads; /* <= 0: as many as there are processors; fewer are used where so many can't be started */
    /* May be NULL. Called after each tensor, and before with n_done 0 while the input's numbers are checked. */
    void (*progress)(int64_t n_done, int64_t n_tensors, void *user);
    void *progress_user;
    /* May be NULL. 1 while OUTPUT.quantizing.part is this call's, so that a signal handler that ends the process may remove it; else 0:
     * it is nobody's, another process's or the user's. */
    volatile int *owns_part;
} dt_quantize_params;

/* The i-th type that dt_quantize knows, NULL past the last. */
const char *dt_quantize_type(size_t i);
/* Writes a quantized copy of a model. Tensors that are quantized already are copied as they are. One call at a time.
 * DT_ERR_ARGUMENT: no such type, an output that is the input or no regular file, nothing left to quantize, or numbers too large for
 * the type; DT_ERR_IO: a file can't be read or written, or libllama failed; DT_ERR_FORMAT: as dt_model_open, or numbers that are
 * infinite or none; DT_ERR_UNSUPPORTED: as dt_model_open. On failure `output` is what it was. */
dt_status dt_quantize(const dt_quantize_params *params, dt_error *error);

/* ---- text --------------------------------------------------------------------------------------- */

/* Tokenizes `n_bytes` of UTF-8. add_special: prepend the start token where the model wants one (never a second
 * one). parse_special: text such as "<|im_end|>" becomes its token. *out_tokens: [*out_n], with room for one more behind them; free
 * with dt_free. DT_ERR_TOKENIZER: the model has none, or it failed; DT_ERR_LIMIT: 1 GiB or more, or 500,000 bytes without a change
 * between letters and white space. */
dt_status dt_tokenize(const dt_model *model, const char *text, size_t n_bytes, bool add_special, bool parse_special,
                      int32_t **out_tokens, size_t *out_n, dt_error *error);
/* Bytes of one token (may be part of a UTF-8 character), special tokens as text when `special`. Writes at most
 * `capacity` bytes, no terminator; returns the length needed. buffer may be NULL where capacity is 0. 0 for what is no token, and
 * without a tokenizer. */
size_t dt_token_bytes(const dt_model *model, int32_t token, bool special, char *buffer, size_t capacity);
/* True for every token that ends generation (end of text, end of turn...); without a tokenizer for none. */
bool dt_token_is_end(const dt_model *model, int32_t token);
int32_t dt_token_start(const dt_model *model); /* or -1, also without a tokenizer */

typedef struct dt_chat_message {
    const char *role; /* "system", "user", "assistant" */
    const char *content;
} dt_chat_message;

/* Renders messages[n_messages], n_messages >= 1, with the model's own Jinja template (template_name NULL), or with the built-in
 * template of that name, or with Jinja source given there. add_assistant: end with the opening of the assistant's turn. *out: free
 * with dt_free. DT_ERR_TOKENIZER: the model has none; DT_ERR_UNSUPPORTED: it has no template of its own, or this build can't read
 * it; DT_ERR_ARGUMENT: no such name, no message; DT_ERR_LIMIT: too long or deep; DT_ERR_FORMAT: the template failed. */
dt_status dt_chat_render(const dt_model *model, const char *template_name, const dt_chat_message *messages, size_t n_messages,
                         bool add_assistant, char **out, dt_error *error);

/* ---- sampler ------------------------------------------------------------------------------------ */

typedef struct dt_sampler dt_sampler;

typedef struct dt_sampler_params {
    float temp;    /* <= 0: greedy */
    int32_t top_k; /* <= 0: all */
    float top_p, min_p;
    float repeat_penalty;    /* 1 = off */
    int32_t repeat_last_n;   /* tokens looked back on by repeat_penalty; 0 = none, -1 or more than it has = the trained context */
    uint32_t seed;           /* DT_SEED_RANDOM draws one; dt_sampler_seed tells which */
    const char *grammar;     /* GBNF with a rule "root", or NULL */
    const char *json_schema; /* JSON schema text, or NULL; not together with grammar */
    bool ignore_end;         /* never sample an end token */
} dt_sampler_params;

#define DT_SEED_RANDOM 0xFFFFFFFFu

/* llama.cpp's defaults. */
dt_sampler_params dt_sampler_default_params(void);
/* Works on models without a tokenizer as long as neither grammar, json_schema nor ignore_end is asked for (DT_ERR_TOKENIZER).
 * DT_ERR_ARGUMENT: a number is out of range, or grammar or schema can't be used; DT_ERR_LIMIT: it has more than 4 MiB, or nests too
 * deep; DT_ERR_UNSUPPORTED: a build without schemas. Free with dt_sampler_free before the model is closed. */
dt_status dt_sampler_new(const dt_model *model, const dt_sampler_params *params, dt_sampler **out, dt_error *error);
void dt_sampler_free(dt_sampler *sampler);
uint32_t dt_sampler_seed(const dt_sampler *sampler);
/* Draws a token from logits[n_vocab] (not modified). *out_probability (may be NULL): softmax probability of that token under
 * the unmodified logits. Fails with DT_ERR_COMPUTE when a logit is NaN, DT_ERR_ARGUMENT when no token is allowed. */
dt_status dt_sampler_sample(dt_sampler *sampler, const float *logits, int32_t *out_token, float *out_probability, dt_error *error);
/* Tells the sampler that `token` is now part of the text (repeat penalty, grammar when from_model). DT_ERR_ARGUMENT: it is not in
 * the vocabulary, or does not fit the grammar here. */
dt_status dt_sampler_accept(dt_sampler *sampler, int32_t token, bool from_model, dt_error *error);

/* ---- eviction ----------------------------------------------------------------------------------- */

typedef struct dt_eviction dt_eviction; /* settings per layer, fitted to one model */

/* preset: chat, docqa, code, summary. Where model.tlc.json lies beside model.gguf it goes by that, which calibration wrote. This
 * and the two below: DT_ERR_CONFIG for what the settings say, DT_ERR_IO for a file that can't be read; free with dt_eviction_free,
 * also before the sessions made with it. */
dt_status dt_eviction_from_preset(const dt_model *model, const char *preset, dt_eviction **out, dt_error *error);
/* Where that file belongs for a model's path. dt_free; NULL when memory is short. */
char *dt_eviction_learned_path(const char *model_path);
/* The one that presets go by: it lies there or, where the path is a link, beside the model itself. dt_free; NULL: there is none. */
char *dt_eviction_learned_file(const char *model_path);
/* JSON as docs/eviction-config.md describes; errors name file, line, key and what would be right. */
dt_status dt_eviction_from_file(const dt_model *model, const char *path, dt_eviction **out, dt_error *error);
/* The same from text[n_bytes]; `name` stands for the file in errors and in dt_eviction_name. */
dt_status dt_eviction_from_text(const dt_model *model, const char *name, const char *text, size_t n_bytes, dt_eviction **out,
                                dt_error *error);
void dt_eviction_free(dt_eviction *eviction);
const char *dt_eviction_name(const dt_eviction *eviction); /* for the log: "preset docqa", "config eviction.json" */
/* Overrides max and/or min, in tokens of a lane, for every layer that evicts; 0 (max) or -1 (min) = leave. DT_ERR_CONFIG, with
 * nothing changed, where they leave no room. */
dt_status dt_eviction_override(dt_eviction *eviction, int32_t max_cache_size, int32_t min_cache_size, dt_error *error);
/* Memory slots of every layer that evicts and has no sliding window: entries, beside max_cache_size, that stand for evicted tokens;
 * 0 to 1024, else DT_ERR_CONFIG. */
dt_status dt_eviction_set_memory_slots(dt_eviction *eviction, int32_t n, dt_error *error);
/* Settings for a session of DT_EVICT_HELD that is to collect what all of settings[n], n >= 1, need: forks of it may go on under each
 * of them, all of one model (else DT_ERR_ARGUMENT). Attention is observed in every layer. For no other session: budgets are tiny.
 * Free with dt_eviction_free. */
dt_status dt_eviction_observe(const dt_eviction *const *settings, size_t n, dt_eviction **out, dt_error *error);
/* The "TLC: layers a-b ..." lines, joined by newlines. Free with dt_free. */
dt_status dt_eviction_describe(const dt_eviction *eviction, char **out, dt_error *error);

/* ---- session ------------------------------------------------------------------------------------ */

typedef struct dt_session dt_session;
typedef struct dt_group dt_group; /* of sessions that compute together; see below */

typedef enum dt_kv_type { DT_KV_F16, DT_KV_INT8 } dt_kv_type;
typedef enum dt_prefill { DT_PREFILL_FULL, DT_PREFILL_STREAMING } dt_prefill;
/* When a session evicts: whenever a budget is exceeded; once, after the first sync, down to exactly the budgets, and never again;
 * or not at all: it collects what scores need, for forks that evict. */
typedef enum dt_evict { DT_EVICT_ALWAYS, DT_EVICT_ONCE, DT_EVICT_HELD } dt_evict;

#define DT_MAX_THREADS 512 /* of a session, a group, a quantizer, an RPC server: what ggml allows; more is DT_ERR_ARGUMENT */

typedef struct dt_session_params {
    int32_t n_ctx;     /* farthest that a token sees back; 0 = the model's own. The longest conversation too, unless every layer
                          evicts or has a window: then kept tokens move together (docs/memory.md) and it may go on */
    int32_t n_batch;   /* prefill chunk in tokens; 0 = 512 */
    int32_t n_threads; /* decode threads; 0 = physical cores */
    int32_t n_threads_batch; /* prefill threads; 0 = n_threads */
    dt_kv_type kv_type;
    dt_prefill prefill;
    const char *kernel; /* of attention: "amx_bf16", "avx512_vnni", "avx512", "avx2", "neon", "reference"... (unknown ones are
                           refused with the list); NULL = "auto", the fastest that this machine has. "ggml": by ggml's operators, as
                           devices do; "ggml_matmul": without its fused attention */
    const dt_eviction *eviction; /* NULL = nothing is evicted; copied */
    dt_evict evict;              /* DT_EVICT_ALWAYS = 0 */
    int32_t kv_block_tokens;     /* tokens per cache block, multiple of 16; 0 = 256 (tests: 16) */
    uint64_t kv_memory; /* bytes the cache never exceeds; 0 = no limit. Settings give way (docs/memory.md), or DT_ERR_LIMIT */
    int32_t n_expected; /* the most tokens the conversation will have, for kv_memory; 0 = n_ctx */
    int32_t n_prompt;   /* the most of them that are read at once, which DT_PREFILL_FULL keeps whole until then; 0 = all */
    /* States kept to go back to where eviction has taken what a rewind needs, one for the end of each of the last syncs, while they
     * fit into the memory that the cache was said to take; 0 = 2 (in a group none), below 0 = none */
    int32_t n_snapshots;
    dt_group *group; /* whose threads, kernel and scratch it uses, of the same model; NULL = it has its own */
} dt_session_params;

/* Called between prefill chunks and decode steps; returning false cancels (DT_ERR_CANCELLED, the session stays usable). What holds
 * for dt_token_fn holds for it, and for dt_logits_fn. */
typedef bool (*dt_progress_fn)(int64_t done_tokens, int64_t total_tokens, void *user);

typedef struct dt_sync_result {
    enum { DT_SYNC_NOTHING, DT_SYNC_EXTENDED, DT_SYNC_REWOUND, DT_SYNC_REBUILT } how;
    int64_t reused_tokens, computed_tokens;
    double prefill_ms;
} dt_sync_result;

typedef struct dt_layer_stats {
    const char *policy;     /* "none" where the layer keeps everything */
    int32_t max_cache_size; /* 0: none of its own, it keeps everything or shares a budget with other layers */
    int32_t length;         /* of the lane that has most */
    double mean_length;
    int32_t slots_used; /* memory slots, beside the length; of the lane that has most */
    double mean_slots;  /* over its lanes */
} dt_layer_stats;

typedef struct dt_session_stats {
    const char *kernel;
    int32_t n_tokens;
    int32_t n_ctx; /* the most tokens the conversation may have: about 2^31 where it may go on past the parameter of this name */
    int32_t n_threads, n_batch;
    dt_kv_type kv_type; /* as the cache holds them: INT8 too where kv_memory left no room for F16 */
    /* Tokens that all layers with eviction share, summed over them, as kv_memory left it; 0: each has its own. */
    int32_t total_cache_size;
    uint64_t kv_bytes, kv_bytes_peak, kv_bytes_full; /* allocated now, at most, and what full caching would need now */
    uint64_t kv_step_bytes;                          /* keys and values that one decode step reads */
    int64_t prefill_tokens, decode_tokens, eviction_rounds, evicted_tokens; /* evicted: summed over layers, mean of lanes */
    double prefill_ms, decode_ms;                                           /* eviction included */
    double eviction_ms, attention_ms;
    int64_t draft_proposed, draft_accepted; /* tokens */
    int64_t draft_prefill_tokens;           /* that a draft model read before its first guess for a reply, */
    double draft_prefill_ms;                /* and the time that took, which is in no other number */
} dt_session_stats;

int32_t dt_default_threads(void); /* what 0 threads stands for */
/* An empty conversation. params may be NULL. Free with dt_session_free, before its group and its model. DT_ERR_ARGUMENT: a member
 * is out of range, unknown, or of another model; DT_ERR_LIMIT: kv_memory holds none; DT_ERR_UNSUPPORTED, DT_ERR_COMPUTE: threads or
 * a device don't start. */
dt_status dt_session_new(const dt_model *model, const dt_session_params *params, dt_session **out, dt_error *error);
void dt_session_free(dt_session *session);
/* A second session with the same conversation, logits included; cached keys and values are shared until either side changes them.
 * It is in the same group, and goes on under `eviction` (NULL = nothing is evicted) and `evict`; what that makes due is evicted at
 * once. Scores are those that `from` collected, but score predict foretells its own: a policy that needs them where `from` had none
 * for its text is DT_ERR_ARGUMENT. Either may be freed first. */
dt_status dt_session_fork(const dt_session *from, const dt_eviction *eviction, dt_evict evict, dt_session **out, dt_error *error);
/* Makes the conversation equal to tokens[n], n >= 1, computing only what is new: extends it, rewinds into the part that is still
 * whole, or rebuilds. progress and result may be NULL. On failure the session holds the tokens that were computed so far.
 * This and those that follow, to dt_session_score: DT_ERR_LIMIT: more tokens than the context takes; DT_ERR_ARGUMENT: none, one
 * that is not in the vocabulary, or a call from within a dt_token_fn and such; DT_ERR_COMPUTE: a device fails; DT_ERR_IO: the
 * model's file was cut short; DT_ERR_CANCELLED. */
dt_status dt_session_sync(dt_session *session, const int32_t *tokens, size_t n, dt_progress_fn progress, void *user,
                          dt_sync_result *result, dt_error *error);
/* The first half of it: takes the conversation back to what it shares with tokens[n] and computes nothing. What is missing, tokens
 * [result->reused_tokens, n), is to be appended; where nothing is, the logits are there. result may not be NULL. */
dt_status dt_session_reuse(dt_session *session, const int32_t *tokens, size_t n, dt_sync_result *result, dt_error *error);
/* One decode step: appends `token`. */
dt_status dt_session_append(dt_session *session, int32_t token, dt_error *error);
/* Called with logits[n_vocab], those after the i-th of the scored tokens. Returning false stops. */
typedef bool (*dt_logits_fn)(size_t i, const float *logits, void *user);
/* Appends a known text, with the logits after each of its tokens. Evicts as decoding it token by token would; where nothing can be
 * evicted it computes many tokens at once. Stopped by fn it is DT_ERR_CANCELLED, with more tokens appended than fn saw. */
dt_status dt_session_score(dt_session *session, const int32_t *tokens, size_t n, dt_logits_fn fn, void *user, dt_error *error);
/* For benchmarks: n made-up tokens with random keys and values, evicted as real ones would be, in a new session (else
 * DT_ERR_ARGUMENT). No logits yet. */
dt_status dt_session_fill_random(dt_session *session, int64_t n, dt_error *error);
/* logits[n_vocab] after the last token; NULL before the first. Valid until the next call on the session. */
const float *dt_session_logits(const dt_session *session);
/* The tokens so far, *out_n of them; NULL may stand for none. Valid until the session changes. */
const int32_t *dt_session_tokens(const dt_session *session, size_t *out_n);
/* Strings in these are never freed. DT_ERR_ARGUMENT: there is no such layer. */
void dt_session_get_stats(const dt_session *session, dt_session_stats *out);
dt_status dt_session_get_layer_stats(const dt_session *session, int32_t layer, dt_layer_stats *out);
/* Original positions of the tokens that lane (layer, kv_head) keeps, ascending, memory slots left out: (*out)[*out_n], free with
 * dt_free. DT_ERR_ARGUMENT: there is no such lane. */
dt_status dt_session_kept_positions(const dt_session *session, int32_t layer, int32_t kv_head, int32_t **out, size_t *out_n,
                                    dt_error *error);
/* The attention that each of them gets, in the same order: a running mean over about the last 32 queries observed, summed over the
 * query heads that share the lane; it begins with the same amount for all. DT_ERR_ARGUMENT where the layer's policy observes none,
 * too. (*out)[*out_n]: free with dt_free. */
dt_status dt_session_kept_mass(const dt_session *session, int32_t layer, int32_t kv_head, float **out, size_t *out_n,
                               dt_error *error);
/* The whole structure of the cache, for tests; DT_ERR_INTERNAL where it contradicts itself. */
dt_status dt_session_check(const dt_session *session, dt_error *error);

/* Learns, once per model, to foretell the scores of reconstruct (docs/eviction-config.md, score predict). Free with
 * dt_calibration_free, before the model is closed. */
typedef struct dt_calibration dt_calibration;
/* DT_ERR_UNSUPPORTED: every layer has a sliding window. */
dt_status dt_calibration_new(const dt_model *model, dt_calibration **out, dt_error *error);
/* Adds what the session found out about its text, of more than 4 tokens: one of this model, of DT_EVICT_HELD with score reconstruct
 * (else DT_ERR_ARGUMENT). DT_ERR_COMPUTE: a device fails. */
dt_status dt_calibration_add(dt_calibration *calibration, const dt_session *session, dt_error *error);
/* An eviction config, JSON, with what was learned, and a shared budget of so many tokens on average for each layer that has learned:
 * those with a sliding window don't. DT_ERR_ARGUMENT: fewer than 1, or nothing was added. *out: free with dt_free. */
dt_status dt_calibration_config(const dt_calibration *calibration, int32_t average_cache_size, char **out, dt_error *error);
void dt_calibration_free(dt_calibration *calibration);

/* ---- many sessions at once ---------------------------------------------------------------------- */

typedef struct dt_group_params {
    int32_t n_threads, n_threads_batch; /* as in dt_session_params; steps of more than one token use the second */
    const char *kernel;
    uint64_t kv_memory; /* bytes that the caches of all its sessions never exceed together; 0 = no limit */
} dt_group_params;

typedef struct dt_group_stats {
    int32_t n_sessions, n_threads;
    uint64_t kv_bytes, kv_bytes_peak; /* of all caches, what forks share counted once */
    int64_t n_steps, n_tokens;        /* computed */
} dt_group_stats;

typedef struct dt_step {
    dt_session *session;
    const int32_t *tokens; /* [n] appended to it: one to decode, or up to the session's n_batch of a prompt */
    int32_t n, n_follow;   /* n_follow: tokens of the prompt that later steps bring, 0 when decoding */
    dt_error error;        /* out: code DT_OK, or why this step failed; what the session holds, dt_session_tokens tells then */
} dt_step;

/* params may be NULL. A group and its sessions are used by one thread at a time; sessions are freed before their group, and that
 * before the model. Only dt_session_save may run in another thread beside a step or a call on another session of the group, where
 * the model is on the CPU: of a session that is in none and that nobody else uses, forks or frees meanwhile. Free with
 * dt_group_free. Errors are those of dt_session_new. */
dt_status dt_group_new(const dt_model *model, const dt_group_params *params, dt_group **out, dt_error *error);
void dt_group_free(dt_group *group);
void dt_group_get_stats(const dt_group *group, dt_group_stats *out);
/* Computes steps of different sessions in one batch, which reads the weights once for all, and evicts from each as
 * dt_session_append or, with prompts, dt_session_sync would. Sessions may come and go between steps. Each keeps its logits until
 * its own next call or step. One that fails doesn't disturb the others: DT_OK when all were done, else status and sentence of the
 * first that was not, as dt_session_sync has them. */
dt_status dt_group_step(dt_group *group, dt_step *steps, size_t n_steps, dt_error *error);
/* The most bytes a session's cache can come to while its conversation grows to n_tokens, of which n_prompt are read at once before the
 * others come one by one (0 = all); what forks share is counted in each. UINT64_MAX where memory is too short to tell. */
uint64_t dt_session_kv_bound(const dt_session *session, int64_t n_tokens, int64_t n_prompt);

/* ---- sessions on disk (docs/session-format.md) -------------------------------------------------- */

/* Replaces `path`, or what it links to, as a whole, so that a killed save loses nothing. sampler (may be NULL): its place in its
 * random numbers is kept. DT_ERR_IO; DT_ERR_COMPUTE: a device fails; DT_ERR_ARGUMENT: from within a dt_token_fn and such. */
dt_status dt_session_save(const dt_session *session, const dt_sampler *sampler, const char *path, dt_error *error);
/* Makes the session what it was when saved, under its own settings (budgets, threads). sampler (may be NULL): goes to where the
 * saved one was, if one was saved, and knows the session's tokens. Refused, with nothing changed: files of another model, cache
 * type or version, or longer than the context (DT_ERR_ARGUMENT), cut short or altered ones (DT_ERR_FORMAT), missing ones
 * (DT_ERR_IO), those whose cache, which is loaded whole, is larger than kv_memory allows (DT_ERR_LIMIT, with a size that works). */
dt_status dt_session_load(dt_session *session, dt_sampler *sampler, const char *path, dt_error *error);
/* Tokens of the conversation in a session file, as its header says; 0 where there is none that this version reads. */
int64_t dt_session_file_tokens(const char *path);
/* Whether a session of n_tokens could be saved at `path`, as far as can be known before; else DT_ERR_IO. session NULL: looks at the
 * place only. */
dt_status dt_session_check_save(const dt_session *session, const char *path, int64_t n_tokens, dt_error *error);
/* Bytes of the application's own that are saved and loaded with the session, such as a chat's messages; copied. n 0: none. */
dt_status dt_session_set_note(dt_session *session, const void *bytes, size_t n, dt_error *error);
/* [*out_n], NULL where there is none; valid until the next dt_session_set_note or dt_session_load. */
const void *dt_session_note(const dt_session *session, size_t *out_n);

/* ---- generation --------------------------------------------------------------------------------- */

/* Called for every token of the output, end tokens excepted. Returning false stops after this token. It may
 * look at sessions; those of the group it must not change, copy, save (DT_ERR_ARGUMENT) or free. */
typedef bool (*dt_token_fn)(int32_t token, void *user);

typedef struct dt_generate_result {
    int64_t n_tokens;
    enum { DT_STOP_LENGTH, DT_STOP_END, DT_STOP_CALLER, DT_STOP_CONTEXT } why;
} dt_generate_result;

/* Samples up to n_predict tokens (-1: until an end token) after what sync left. The last one sampled (an end token included) is not
 * computed: whoever goes on gives it to dt_session_sync together with what follows. The sampler is told of each token
 * (dt_sampler_accept), but of no end token: it is told that where the text that goes on has it. on_token and result may be NULL;
 * result counts the tokens told, also on failure. DT_ERR_ARGUMENT: there are no logits yet, or the sampler is for another number of
 * tokens; else as sampling and dt_session_append. */
dt_status dt_generate(dt_session *session, dt_sampler *sampler, int64_t n_predict, dt_token_fn on_token, void *user,
                      dt_generate_result *result, dt_error *error);

typedef struct dt_draft dt_draft; /* guesses the next tokens (speculative decoding); one per session; free with dt_draft_free */

/* Guesses what followed the last tokens where they stood before in the context (prompt lookup decoding, Saxena 2023). max_tokens of
 * both: 1 to 64 at a time, else DT_ERR_ARGUMENT. */
dt_status dt_draft_from_lookup(int32_t max_tokens, dt_draft **out, dt_error *error);
/* Lets a smaller model guess, in a session made with `params` (may be NULL), with the errors of that; the model must outlive the
 * draft. Another vocabulary is DT_ERR_ARGUMENT naming the first token that differs; DT_ERR_TOKENIZER: only one of the models has
 * a tokenizer. */
dt_status dt_draft_from_model(const dt_model *target, const dt_model *model, const dt_session_params *params, int32_t max_tokens,
                              dt_draft **out, dt_error *error);
void dt_draft_free(dt_draft *draft);
/* The same check on files, before any weights are loaded; their own errors are those of dt_model_open. */
dt_status dt_check_same_vocabulary(const char *path, const char *draft_path, dt_error *error);
/* dt_generate with guesses (draft may be NULL), which are computed along and kept where the sampler draws the same. The tokens are
 * those of dt_generate, up to rounding; eviction and scores see only what was kept. */
dt_status dt_generate_drafted(dt_session *session, dt_sampler *sampler, dt_draft *draft, int64_t n_predict, dt_token_fn on_token,
                              void *user, dt_generate_result *result, dt_error *error);

#ifdef __cplusplus
}
#endif
#endif
