/*
 * libllama and its `common` code behind C: vocabulary, chat templates, JSON schemas, grammars, sampling chains.
 *
 * C++ because C can't catch: whatever libllama throws ends here as a status with the reason
 * in it, and what libllama would abort on (an end token that a grammar doesn't allow, a start token that isn't there) is
 * checked before the call. Memory handed out comes from malloc, for dt_free.
 *
 * Text from files (templates, grammars, schemas, prompts) meets recursive parsers and std::regex here, so it is bounded
 * in size and nesting and worked on by a thread with a deep stack: a hostile file gives an error, not a crash.
 */
#include "text/text_shim.h"

#include "text/glm.h"

#include "ggml.h"
#include "llama.h"

#if DT_HAVE_LLAMA_COMMON
#include "chat.h"
#include "json-schema-to-grammar.h"
#include "log.h"
#endif

#include <locale.h>
#include <pthread.h>
#if defined(__APPLE__)
#include <xlocale.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <new>
#include <string>
#include <vector>

extern "C" { /* from base.h, which is for C only */
dt_status dt_fail(dt_error *error, dt_status code, const char *format, ...) __attribute__((format(printf, 3, 4)));
void dt_log(dt_log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));
}

namespace {

constexpr size_t template_bytes_max = 256 * 1024;
constexpr size_t grammar_bytes_max = 4 * 1024 * 1024;
constexpr int template_depth_max = 1000; /* counted in string literals too, so generous */
constexpr int grammar_depth_max = 10000;
constexpr int schema_depth_max = 1000;
constexpr size_t run_bytes_max = 500000; /* letters without white space, or white space, in a prompt */
constexpr size_t shallow_text_bytes = 16 * 1024;
/* reserved, not used, unless needed; measured: std::regex takes under 400 bytes for each letter of a run */
constexpr size_t parser_stack_bytes = size_t(128) * 1024 * 1024;
constexpr size_t regex_stack_bytes = run_bytes_max * 1024;

/* What libllama logs, line by line. Plain arrays: a thread_local object with a destructor ends the process where memory for its
 * registration is refused. Longer lines are cut. */
thread_local struct {
    char pending[2048]; /* a line that has not ended yet */
    size_t n_pending;
    ggml_log_level level;
    bool problem_wanted;
    char problem[1024]; /* the first error line while it is wanted */
} lines;

/* While it lives, error lines are the reason why a call returned nothing: they go into our error, not into the log as well. */
struct problem_catcher {
    problem_catcher() {
        lines.problem[0] = 0;
        lines.problem_wanted = true;
    }
    ~problem_catcher() { lines.problem_wanted = false; }
};

void end_line() {
    const bool error = lines.level == GGML_LOG_LEVEL_ERROR, wanted = error && lines.problem_wanted;
    lines.pending[lines.n_pending] = 0;
    lines.n_pending = 0;
    if (lines.pending[0] == 0) {
        return;
    }
    if (wanted && lines.problem[0] == 0) {
        std::snprintf(lines.problem, sizeof lines.problem, "%.*s", int(sizeof lines.problem - 1), lines.pending);
    }
    const bool warning = lines.level == GGML_LOG_LEVEL_WARN;
    /* A build for GPUs on a machine without one: of no interest to those who compute on the CPU, and who names the device is told. */
    const bool no_device = std::strstr(lines.pending, "failed to initialize CUDA") != nullptr;
    /* An RPC server that went away: the process ends in the same moment, and who waits for it tells why (apps/guard.c). */
    const bool lost = std::strncmp(lines.pending, "recv failed", 11) == 0 || std::strncmp(lines.pending, "send failed", 11) == 0;
    dt_log(error && !wanted && !no_device && !lost ? DT_LOG_WARN : warning ? DT_LOG_INFO : DT_LOG_DEBUG, "%s", lines.pending);
}

void log_receive(ggml_log_level level, const char *text, void *) {
    if (level != GGML_LOG_LEVEL_CONT) {
        lines.level = level;
    }
    for (; *text != 0; text++) {
        if (*text == '\n') {
            end_line();
        } else if (lines.n_pending + 1 < sizeof lines.pending) {
            lines.pending[lines.n_pending++] = *text;
        }
    }
}

std::string one_line(const std::string &text) {
    std::string out;
    for (char c : text) {
        if (c == '\n' || c == '\r' || c == '\t' || c == ' ') {
            if (!out.empty() && out.back() != ' ') {
                out += ' ';
            }
        } else {
            out += c;
        }
    }
    while (!out.empty() && (out.back() == ' ' || out.back() == '.')) {
        out.pop_back();
    }
    if (out.size() > 700) {
        out.resize(700);
        out += "...";
    }
    return out;
}

/* True where the reason given is that memory ran out: libllama catches std::bad_alloc in places and passes its name on. Its
 * template code throws a bare std::exception on, which can't be a fault of the template: that was parsed before. */
bool is_out_of_memory(const char *reason) {
    return std::strstr(reason, "bad_alloc") != nullptr || std::strcmp(reason, "std::exception") == 0;
}

/* Runs f, which returns a status, and turns what it throws into `code` with the sentence "<what>: <reason>". */
template <typename F> dt_status guarded(dt_error *error, dt_status code, const char *what, F f) noexcept {
    try {
        try {
            return f();
        } catch (const std::bad_alloc &) {
            return dt_fail(error, DT_ERR_MEMORY, "%s: out of memory", what);
        } catch (const std::exception &e) {
            if (is_out_of_memory(e.what())) {
                return dt_fail(error, DT_ERR_MEMORY, "%s: out of memory", what);
            }
            return dt_fail(error, code, "%s: %s", what, one_line(e.what()).c_str());
        }
    } catch (const std::bad_alloc &) { /* for the reason's text */
        return dt_fail(error, DT_ERR_MEMORY, "%s: out of memory", what);
    } catch (...) {
        return dt_fail(error, code, "%s: it failed without a reason", what);
    }
}

template <typename F> struct deep_call {
    F *f;
    dt_status status;
};

template <typename F> void *deep_call_run(void *context) {
    auto *call = static_cast<deep_call<F> *>(context);
    /* templates have numbers with a point, whatever locale the host program has set */
    const locale_t plain = newlocale(LC_ALL_MASK, "C", nullptr);
    if (plain != nullptr) {
        uselocale(plain);
    }
    call->status = (*call->f)();
    if (plain != nullptr) {
        uselocale(LC_GLOBAL_LOCALE);
        freelocale(plain);
    }
    return nullptr;
}

/* Runs f, which must not throw, on a thread of its own: where recursion may go deep, in the C locale. */
template <typename F> dt_status on_deep_stack(dt_error *error, size_t stack_bytes, F f) {
    deep_call<F> call = {&f, DT_OK};
    pthread_attr_t attributes;
    pthread_t thread;
    if (pthread_attr_init(&attributes) != 0) {
        return dt_fail(error, DT_ERR_MEMORY, "no memory for a thread; close other programs");
    }
    pthread_attr_setstacksize(&attributes, stack_bytes);
    const int failed = pthread_create(&thread, &attributes, deep_call_run<F>, &call);
    pthread_attr_destroy(&attributes);
    if (failed != 0) {
        return dt_fail(error, DT_ERR_MEMORY, "a thread with a stack of %zu MiB can't be started (%s); raise the limit on memory",
                       stack_bytes / (1024 * 1024), std::strerror(failed));
    }
    pthread_join(thread, nullptr);
    return call.status;
}

int bracket_depth(const char *text) {
    int depth = 0, deepest = 0;
    for (; *text != 0; text++) {
        if (std::strchr("([{", *text) != nullptr) {
            deepest = std::max(deepest, ++depth);
        } else if (std::strchr(")]}", *text) != nullptr && depth > 0) {
            depth--;
        }
    }
    return deepest;
}

dt_status check_bounds(dt_error *error, const char *what, const char *text, size_t bytes_max, int depth_max) {
    const size_t bytes = std::strlen(text);
    if (bytes > bytes_max) {
        return dt_fail(error, DT_ERR_LIMIT, "the %s has %zu bytes; at most %zu are accepted", what, bytes, bytes_max);
    }
    const int depth = bracket_depth(text);
    if (depth > depth_max) {
        return dt_fail(error, DT_ERR_LIMIT, "the %s nests brackets %d deep; at most %d are accepted", what, depth, depth_max);
    }
    return DT_OK;
}

size_t longest_run(const char *text, size_t n_bytes) {
    size_t longest = 0;
    for (size_t i = 0, begin = 0; i < n_bytes; i++) {
        const auto is_space = [](char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; };
        if (i > 0 && is_space(text[i]) != is_space(text[i - 1])) {
            begin = i;
        }
        longest = std::max(longest, i + 1 - begin);
    }
    return longest;
}

dt_status hand_out(const std::string &text, char **out, dt_error *error) {
    char *copy = static_cast<char *>(std::malloc(text.size() + 1));
    if (copy == nullptr) {
        return dt_fail(error, DT_ERR_MEMORY, "out of memory for a text of %zu bytes", text.size());
    }
    std::memcpy(copy, text.data(), text.size());
    copy[text.size()] = 0;
    *out = copy;
    return DT_OK;
}

} // namespace

struct dt_vocab {
    llama_model *model;
    const llama_vocab *vocab;
    int32_t n_tokens;
    int32_t start; /* -1 = none is put in front */
    bool has_template;
    dt_glm glm;
};

struct dt_text_chain {
    llama_sampler *sampler;
};

struct dt_text_grammar {
    llama_sampler *sampler;
    bool broken; /* libllama's state has no stack left: calling it again would abort */
};

void dt_text_route_logs(void) {
    static std::once_flag once;
    std::call_once(once, [] {
        llama_log_set(log_receive, nullptr);
        ggml_log_set(log_receive, nullptr);
#if DT_HAVE_LLAMA_COMMON
        common_log_set_verbosity_thold(-1); /* it would print to stderr, by a thread of its own */
#endif
    });
}

/* ---- vocabulary --------------------------------------------------------------------------------- */

static dt_status check_special_tokens(const char *path, const llama_vocab *vocab, dt_error *error) {
    const enum llama_vocab_type type = llama_vocab_type(vocab);
    if (type == LLAMA_VOCAB_TYPE_NONE || llama_vocab_n_tokens(vocab) < 1) {
        return dt_fail(error, DT_ERR_TOKENIZER, "%s has no tokenizer; use a GGUF file that contains one", path);
    }
    const int32_t n = llama_vocab_n_tokens(vocab);
    const bool wpm = type == LLAMA_VOCAB_TYPE_WPM;
    const struct {
        bool used;
        llama_token token;
        const char *name;
    } wanted[] = {
        {llama_vocab_get_add_bos(vocab) || wpm, llama_vocab_bos(vocab), "start token (tokenizer.ggml.bos_token_id)"},
        {llama_vocab_get_add_eos(vocab), llama_vocab_eos(vocab), "end token (tokenizer.ggml.eos_token_id)"},
        {llama_vocab_get_add_sep(vocab) || wpm, llama_vocab_sep(vocab), "separator (tokenizer.ggml.seperator_token_id)"},
    };
    for (const auto &w : wanted) {
        if (w.used && (w.token < 0 || w.token >= n)) {
            return dt_fail(error, DT_ERR_TOKENIZER, "%s wants a %s added to every text but has none; convert the model again", path,
                           w.name);
        }
    }
    return DT_OK;
}

dt_status dt_vocab_open(const char *path, dt_vocab **out, dt_error *error) {
    *out = nullptr;
    dt_text_route_logs();
    auto open = [&]() -> dt_status {
        const problem_catcher catcher;
        llama_model_params params = llama_model_default_params();
        params.vocab_only = true;
        params.n_gpu_layers = 0;
        llama_model *model = llama_model_load_from_file(path, params);
        if (model == nullptr && is_out_of_memory(lines.problem)) {
            return dt_fail(error, DT_ERR_MEMORY, "out of memory for the tokenizer of %s", path);
        }
        if (model == nullptr) {
            return dt_fail(error, DT_ERR_TOKENIZER, "the tokenizer in %s can't be loaded: %s", path,
                           lines.problem[0] == 0 ? "libllama gave no reason" : one_line(lines.problem).c_str());
        }
        const llama_vocab *vocab = llama_model_get_vocab(model);
        dt_status status = check_special_tokens(path, vocab, error);
        dt_vocab *made = status == DT_OK ? new (std::nothrow) dt_vocab() : nullptr;
        if (made == nullptr) {
            llama_model_free(model);
            return status != DT_OK ? status : dt_fail(error, DT_ERR_MEMORY, "out of memory for the tokenizer of %s", path);
        }
        made->model = model;
        made->vocab = vocab;
        made->n_tokens = llama_vocab_n_tokens(vocab);
        made->start = llama_vocab_get_add_bos(vocab) ? llama_vocab_bos(vocab) : -1;
        char architecture[64] = "";
        llama_model_meta_val_str(model, "general.architecture", architecture, sizeof architecture);
        dt_glm_find(vocab, architecture, &made->glm);
        made->has_template = llama_model_chat_template(model, nullptr) != nullptr || made->glm.form != DT_GLM_NONE;
        if (made->glm.form != DT_GLM_NONE) {
            made->start = made->glm.prefix[0];
        }
        *out = made;
        return DT_OK;
    };
    return guarded(error, DT_ERR_TOKENIZER, "the tokenizer can't be loaded", open);
}

void dt_vocab_free(dt_vocab *vocab) {
    if (vocab != nullptr) {
        llama_model_free(vocab->model);
        delete vocab;
    }
}

int32_t dt_vocab_size(const dt_vocab *vocab) { return vocab->n_tokens; }

bool dt_vocab_has_chat_template(const dt_vocab *vocab) { return vocab->has_template; }

/* Appends the tokens of one piece of text. */
static dt_status append_tokens(const dt_vocab *vocab, const char *text, size_t n_bytes, bool add_special, bool parse_special,
                               std::vector<llama_token> *out, dt_error *error) {
    const size_t before = out->size();
    out->resize(before + n_bytes / 2 + 8);
    int32_t n = llama_tokenize(vocab->vocab, text, int32_t(n_bytes), out->data() + before, int32_t(out->size() - before),
                               add_special, parse_special);
    if (n == INT32_MIN) {
        return dt_fail(error, DT_ERR_LIMIT, "a text of %zu bytes has too many tokens; split it", n_bytes);
    }
    if (n < 0) {
        out->resize(before + size_t(-n));
        n = llama_tokenize(vocab->vocab, text, int32_t(n_bytes), out->data() + before, -n, add_special, parse_special);
    }
    if (n < 0) {
        return dt_fail(error, DT_ERR_TOKENIZER, "the text can't be tokenized");
    }
    out->resize(before + size_t(n));
    return DT_OK;
}

/* Text between marks of ChatGLM2 or 3. Where it goes on from earlier text it must not begin with the space that SentencePiece puts
 * before a text: it is tokenized behind a newline, which merges with nothing, and the newline's tokens are taken away. */
static dt_status append_glm_text(const dt_vocab *vocab, const char *text, size_t n_bytes, bool goes_on,
                                 std::vector<llama_token> *out, dt_error *error) {
    std::vector<llama_token> newline;
    if (n_bytes == 0) {
        return DT_OK;
    }
    if (!goes_on) {
        return append_tokens(vocab, text, n_bytes, false, false, out, error);
    }
    const size_t before = out->size();
    dt_status status = append_tokens(vocab, "\n", 1, false, false, &newline, error);
    if (status == DT_OK) {
        status = append_tokens(vocab, ("\n" + std::string(text, n_bytes)).c_str(), n_bytes + 1, false, false, out, error);
    }
    if (status == DT_OK) {
        out->erase(out->begin() + ptrdiff_t(before), out->begin() + ptrdiff_t(std::min(before + newline.size(), out->size())));
    }
    return status;
}

static dt_status tokenize_glm(const dt_vocab *vocab, const char *text, size_t n_bytes, bool add_special, bool parse_special,
                              std::vector<llama_token> *out, dt_error *error) {
    const dt_glm &glm = vocab->glm;
    const size_t n_prefix = std::strlen(glm.prefix_text);
    if (add_special) {
        out->assign(glm.prefix, glm.prefix + 2);
        while (parse_special && n_bytes >= n_prefix && std::memcmp(text, glm.prefix_text, n_prefix) == 0) {
            text += n_prefix; /* the text had its own: keep one */
            n_bytes -= n_prefix;
        }
    }
    if (glm.n_marks == 0) {
        return append_tokens(vocab, text, n_bytes, false, parse_special, out, error);
    }
    dt_status status = DT_OK;
    bool goes_on = !add_special;
    size_t begin = 0;
    for (size_t i = 0; status == DT_OK && i < n_bytes;) {
        const dt_glm_mark *mark = parse_special ? dt_glm_mark_at(&glm, text + i, n_bytes - i) : nullptr;
        if (mark == nullptr) {
            i++;
            continue;
        }
        status = append_glm_text(vocab, text + begin, i - begin, goes_on, out, error);
        out->push_back(mark->token);
        goes_on = false;
        i += std::strlen(mark->text);
        begin = i;
    }
    return status == DT_OK ? append_glm_text(vocab, text + begin, n_bytes - begin, goes_on, out, error) : status;
}

static dt_status tokenize(const dt_vocab *vocab, const char *text, size_t n_bytes, bool add_special, bool parse_special,
                          int32_t **out_tokens, size_t *out_n, dt_error *error) noexcept {
    return guarded(error, DT_ERR_TOKENIZER, "the text can't be tokenized", [&]() -> dt_status {
        std::vector<llama_token> tokens;
        const bool is_glm = vocab->glm.form != DT_GLM_NONE;
        const dt_status status = is_glm ? tokenize_glm(vocab, text, n_bytes, add_special, parse_special, &tokens, error)
                                        : append_tokens(vocab, text, n_bytes, add_special, parse_special, &tokens, error);
        if (status != DT_OK) {
            return status;
        }
        if (!is_glm && add_special && vocab->start >= 0) { /* the text had its own: keep one */
            while (tokens.size() >= 2 && tokens[0] == vocab->start && tokens[1] == vocab->start) {
                tokens.erase(tokens.begin());
            }
        }
        int32_t *copy = static_cast<int32_t *>(std::malloc((tokens.size() + 1) * sizeof(int32_t)));
        if (copy == nullptr) {
            return dt_fail(error, DT_ERR_MEMORY, "out of memory for %zu tokens", tokens.size());
        }
        std::copy(tokens.begin(), tokens.end(), copy);
        *out_tokens = copy;
        *out_n = tokens.size();
        return DT_OK;
    });
}

/* Where a character of four bytes above U+10FFFF begins, which some vocabularies can't split; n_bytes: nowhere. */
static size_t beyond_unicode(const char *text, size_t n_bytes) {
    for (size_t i = 0; i + 1 < n_bytes; i++) {
        const unsigned char c = (unsigned char)text[i], next = (unsigned char)text[i + 1];
        if ((c == 0xf4 && next >= 0x90 && next < 0xc0) || (c >= 0xf5 && c <= 0xf7 && next >= 0x80 && next < 0xc0)) {
            return i;
        }
    }
    return n_bytes;
}

dt_status dt_vocab_tokenize(const dt_vocab *vocab, const char *text, size_t n_bytes, bool add_special, bool parse_special,
                            int32_t **out_tokens, size_t *out_n, dt_error *error) {
    *out_tokens = nullptr;
    *out_n = 0;
    if (n_bytes > size_t(INT32_MAX) / 2) {
        return dt_fail(error, DT_ERR_LIMIT, "a text of %zu bytes is too long; split it into parts below 1 GiB", n_bytes);
    }
    const size_t run_bytes = longest_run(text, n_bytes);
    if (run_bytes > run_bytes_max) {
        return dt_fail(error, DT_ERR_LIMIT,
                       "the text has %zu bytes without a change between letters and white space, at most %zu are accepted; "
                       "break it up",
                       run_bytes, run_bytes_max);
    }
    auto run = [&] { return tokenize(vocab, text, n_bytes, add_special, parse_special, out_tokens, out_n, error); };
    /* some vocabularies split with std::regex, which recurses once per byte of a run of equal letters */
    const dt_status status = n_bytes > shallow_text_bytes ? on_deep_stack(error, regex_stack_bytes, run) : run();
    const size_t beyond = status == DT_ERR_TOKENIZER ? beyond_unicode(text, n_bytes) : n_bytes;
    return beyond == n_bytes
               ? status
               : dt_fail(error, status, "byte %zu of the text begins a character above U+10FFFF, which is none; take it out",
                         beyond + 1);
}

size_t dt_vocab_token_bytes(const dt_vocab *vocab, int32_t token, bool special, char *buffer, size_t capacity) {
    if (token < 0 || token >= vocab->n_tokens) {
        return 0;
    }
    size_t needed = 0;
    guarded(nullptr, DT_ERR_TOKENIZER, "", [&]() -> dt_status {
        const int32_t room = int32_t(std::min(capacity, size_t(INT32_MAX)));
        const int32_t n = llama_token_to_piece(vocab->vocab, token, buffer, room, 0, special);
        needed = size_t(n < 0 ? -n : n);
        if (n < 0 && capacity > 0) { /* libllama writes all or nothing */
            std::vector<char> whole(needed);
            llama_token_to_piece(vocab->vocab, token, whole.data(), -n, 0, special);
            std::memcpy(buffer, whole.data(), capacity);
        }
        return DT_OK;
    });
    return needed;
}

bool dt_vocab_is_end(const dt_vocab *vocab, int32_t token) {
    return token >= 0 && token < vocab->n_tokens && (llama_vocab_is_eog(vocab->vocab, token) || dt_glm_is_end(&vocab->glm, token));
}

int32_t dt_vocab_start(const dt_vocab *vocab) { return vocab->start; }

const int32_t *dt_vocab_suppressed(const dt_vocab *vocab, int32_t *out_n) {
    return llama_vocab_get_suppress_tokens(vocab->vocab, out_n);
}

/* ---- chat templates ----------------------------------------------------------------------------- */

static bool is_builtin_template(const char *name, std::string *out_names) {
    std::vector<const char *> names(size_t(llama_chat_builtin_templates(nullptr, 0)));
    llama_chat_builtin_templates(names.data(), names.size());
    bool found = false;
    for (const char *known : names) {
        found = found || std::strcmp(known, name) == 0;
        *out_names += (out_names->empty() ? "" : ", ") + std::string(known);
    }
    return found;
}

static dt_status render_builtin(const char *name, const dt_chat_message *messages, size_t n_messages, bool add_assistant,
                                char **out, dt_error *error) {
    std::vector<llama_chat_message> chat(n_messages);
    size_t bytes = 256;
    for (size_t i = 0; i < n_messages; i++) {
        chat[i] = {messages[i].role, messages[i].content};
        bytes += 2 * std::strlen(messages[i].content) + 64;
    }
    if (bytes > size_t(INT32_MAX)) {
        return dt_fail(error, DT_ERR_LIMIT, "the messages have more than 1 GiB of text; shorten them");
    }
    std::vector<char> buffer(bytes);
    int32_t n = llama_chat_apply_template(name, chat.data(), n_messages, add_assistant, buffer.data(), int32_t(buffer.size()));
    if (n > int32_t(buffer.size())) {
        buffer.resize(size_t(n));
        n = llama_chat_apply_template(name, chat.data(), n_messages, add_assistant, buffer.data(), int32_t(buffer.size()));
    }
    if (n < 0) {
        return dt_fail(error, DT_ERR_UNSUPPORTED, "the model's chat template is not among the built-in ones; name one of those");
    }
    std::vector<char> again(size_t(n) + 1); // its stream leaves out what memory was refused for
    const int32_t m = llama_chat_apply_template(name, chat.data(), n_messages, add_assistant, again.data(), n + 1);
    if (m != n || std::memcmp(buffer.data(), again.data(), size_t(n)) != 0) {
        throw std::bad_alloc();
    }
    return hand_out(std::string(buffer.data(), size_t(n)), out, error);
}

#if DT_HAVE_LLAMA_COMMON
static dt_status render_jinja(const dt_vocab *vocab, const std::string &source, const dt_chat_message *messages, size_t n_messages,
                              bool add_assistant, char **out, dt_error *error) {
    const common_chat_template parsed(source, "", ""); /* throws with the reason; the call below loses it */
    (void)parsed;
    const common_chat_templates_ptr templates = common_chat_templates_init(vocab->model, source);
    common_chat_templates_inputs inputs;
    inputs.use_jinja = true;
    inputs.force_pure_content = true; /* no parser for tool calls is needed: the prompt is all */
    inputs.add_generation_prompt = add_assistant;
    for (size_t i = 0; i < n_messages; i++) {
        common_chat_msg message;
        message.role = messages[i].role;
        message.content = messages[i].content;
        inputs.messages.push_back(message);
    }
    const std::string prompt = common_chat_templates_apply(templates.get(), inputs).prompt;
    if (common_chat_templates_apply(templates.get(), inputs).prompt != prompt) { // streams leave out what memory was refused for
        throw std::bad_alloc();
    }
    return hand_out(prompt, out, error);
}
#endif

static dt_status chat_render(const dt_vocab *vocab, const char *template_name, const dt_chat_message *messages, size_t n_messages,
                             bool add_assistant, char **out, dt_error *error) {
    if (n_messages == 0) {
        return dt_fail(error, DT_ERR_ARGUMENT, "a chat needs at least one message");
    }
    const char *source = template_name;
    if (source == nullptr) {
        source = llama_model_chat_template(vocab->model, nullptr);
        if (source == nullptr && vocab->glm.form != DT_GLM_NONE) {
            return dt_glm_render(vocab->glm.form, messages, n_messages, add_assistant, out, error);
        }
        if (source == nullptr) {
            return dt_fail(error, DT_ERR_UNSUPPORTED,
                           "the model has no chat template; name one (--chat-template chatml is common), or give it a plain text "
                           "instead of messages");
        }
    } else if (std::strstr(source, "{{") == nullptr && std::strstr(source, "{%") == nullptr) {
        if (std::strcmp(source, "chatglm2") == 0) {
            return dt_glm_render(DT_GLM_ROUNDS, messages, n_messages, add_assistant, out, error);
        }
        std::string names = "chatglm2";
        if (!is_builtin_template(source, &names)) {
            return dt_fail(error, DT_ERR_ARGUMENT, "there is no chat template named %.60s; give Jinja source or one of %s", source,
                           names.c_str());
        }
        return render_builtin(source, messages, n_messages, add_assistant, out, error);
    }
#if DT_HAVE_LLAMA_COMMON
    const dt_status status = check_bounds(error, "chat template", source, template_bytes_max, template_depth_max);
    return status != DT_OK ? status : render_jinja(vocab, source, messages, n_messages, add_assistant, out, error);
#else
    return render_builtin(source, messages, n_messages, add_assistant, out, error);
#endif
}

dt_status dt_vocab_chat_render(const dt_vocab *vocab, const char *template_name, const dt_chat_message *messages, size_t n_messages,
                               bool add_assistant, char **out, dt_error *error) {
    *out = nullptr;
    return on_deep_stack(error, parser_stack_bytes, [&] {
        return guarded(error, DT_ERR_FORMAT, "the chat template failed",
                       [&] { return chat_render(vocab, template_name, messages, n_messages, add_assistant, out, error); });
    });
}

/* ---- grammar ------------------------------------------------------------------------------------ */

#if DT_HAVE_LLAMA_COMMON
static dt_status grammar_from_schema(const char *json_schema, std::string *out, dt_error *error) {
    const dt_status status = check_bounds(error, "JSON schema", json_schema, grammar_bytes_max, schema_depth_max);
    if (status != DT_OK) {
        return status;
    }
    return guarded(error, DT_ERR_ARGUMENT, "the JSON schema can't be used", [&]() -> dt_status {
        const common_json schema = common_json::parse(json_schema);
        if (!schema.is_object()) {
            return dt_fail(error, DT_ERR_ARGUMENT, "the JSON schema must be an object, for example {\"type\": \"object\"}");
        }
        *out = json_schema_to_grammar(schema);
        if (json_schema_to_grammar(schema) != *out) { // its streams leave out what memory was refused for, and say nothing
            throw std::bad_alloc();
        }
        return DT_OK;
    });
}
#else
static dt_status grammar_from_schema(const char *, std::string *, dt_error *error) {
    return dt_fail(error, DT_ERR_UNSUPPORTED,
                   "this build has no JSON schemas, since libllama came without its common code; give a grammar instead");
}
#endif

static dt_status grammar_new(const dt_vocab *vocab, const char *gbnf, const char *json_schema, dt_text_grammar **out,
                             dt_error *error) {
    std::string text;
    dt_status status = json_schema != nullptr ? grammar_from_schema(json_schema, &text, error)
                                              : check_bounds(error, "grammar", gbnf, grammar_bytes_max, grammar_depth_max);
    if (status != DT_OK) {
        return status;
    }
    if (json_schema == nullptr) {
        text = gbnf;
    }
    if (text.find_first_not_of(" \t\r\n") == std::string::npos) {
        return dt_fail(error, DT_ERR_ARGUMENT, "the grammar is empty; give at least a rule named root");
    }
    const problem_catcher catcher;
    llama_sampler *sampler = llama_sampler_init_grammar(vocab->vocab, text.c_str(), "root");
    if (sampler == nullptr && is_out_of_memory(lines.problem)) {
        return dt_fail(error, DT_ERR_MEMORY, "out of memory for the grammar");
    }
    if (sampler == nullptr) {
        return dt_fail(error, DT_ERR_ARGUMENT, "the grammar can't be used: %s",
                       lines.problem[0] == 0 ? "it doesn't parse" : one_line(lines.problem).c_str());
    }
    dt_text_grammar *made = new (std::nothrow) dt_text_grammar{sampler, false};
    if (made == nullptr) {
        llama_sampler_free(sampler);
        return dt_fail(error, DT_ERR_MEMORY, "out of memory for a grammar");
    }
    *out = made;
    return DT_OK;
}

dt_status dt_text_grammar_new(const dt_vocab *vocab, const char *gbnf, const char *json_schema, dt_text_grammar **out,
                              dt_error *error) {
    *out = nullptr;
    return on_deep_stack(error, parser_stack_bytes, [&] {
        return guarded(error, DT_ERR_ARGUMENT, "the grammar can't be used",
                       [&] { return grammar_new(vocab, gbnf, json_schema, out, error); });
    });
}

void dt_text_grammar_free(dt_text_grammar *grammar) {
    if (grammar != nullptr) {
        llama_sampler_free(grammar->sampler);
        delete grammar;
    }
}

dt_status dt_text_grammar_apply(dt_text_grammar *grammar, llama_token_data_array *candidates, dt_error *error) {
    if (grammar->broken) {
        return dt_fail(error, DT_ERR_ARGUMENT, "the text has left the grammar; start again with a new sampler");
    }
    return guarded(error, DT_ERR_ARGUMENT, "the grammar failed", [&] {
        llama_sampler_apply(grammar->sampler, candidates);
        return DT_OK;
    });
}

dt_status dt_text_grammar_accept(dt_text_grammar *grammar, int32_t token, dt_error *error) {
    llama_token_data one = {token, 0.0f, 0.0f};
    llama_token_data_array only = {&one, 1, -1, false};
    dt_status status = dt_text_grammar_apply(grammar, &only, error);
    if (status != DT_OK) {
        return status;
    }
    if (std::isinf(one.logit)) { /* libllama throws, or aborts when it is an end token */
        return dt_fail(error, DT_ERR_ARGUMENT, "token %d does not fit the grammar at this place", token);
    }
    status = guarded(error, DT_ERR_ARGUMENT, "the grammar failed", [&] {
        llama_sampler_accept(grammar->sampler, token);
        return DT_OK;
    });
    grammar->broken = status != DT_OK;
    return status;
}

/* ---- sampling chain ----------------------------------------------------------------------------- */

dt_status dt_text_chain_new(int32_t n_vocab, int32_t n_ctx, const dt_sampler_params *params, uint32_t seed, dt_text_chain **out,
                            dt_error *error) {
    *out = nullptr;
    return guarded(error, DT_ERR_ARGUMENT, "the sampler can't be made", [&]() -> dt_status {
        llama_sampler_chain_params chain_params = llama_sampler_chain_default_params();
        chain_params.no_perf = true;
        llama_sampler *chain = llama_sampler_chain_init(chain_params);
        /* the penalty's list has room for all of them from the start, however short the text */
        const int32_t last_n = params->repeat_last_n < 0 ? n_ctx : std::min(params->repeat_last_n, n_ctx);
        llama_sampler_chain_add(chain, llama_sampler_init_penalties(n_vocab, last_n, params->repeat_penalty, 0.0f, 0.0f));
        if (params->temp > 0.0f) {
            llama_sampler_chain_add(chain, llama_sampler_init_top_k(params->top_k));
            llama_sampler_chain_add(chain, llama_sampler_init_top_p(params->top_p, 1));
            llama_sampler_chain_add(chain, llama_sampler_init_min_p(params->min_p, 1));
            llama_sampler_chain_add(chain, llama_sampler_init_temp(params->temp));
            llama_sampler_chain_add(chain, llama_sampler_init_dist(seed));
        } else {
            llama_sampler_chain_add(chain, llama_sampler_init_greedy());
        }
        *out = new dt_text_chain{chain};
        return DT_OK;
    });
}

void dt_text_chain_free(dt_text_chain *chain) {
    if (chain != nullptr) {
        llama_sampler_free(chain->sampler);
        delete chain;
    }
}

dt_status dt_text_chain_apply(dt_text_chain *chain, llama_token_data_array *candidates, dt_error *error) {
    return guarded(error, DT_ERR_COMPUTE, "sampling failed", [&] {
        llama_sampler_apply(chain->sampler, candidates);
        return DT_OK;
    });
}

dt_status dt_text_chain_skip(dt_text_chain *chain, uint64_t n_draws, dt_error *error) {
    return guarded(error, DT_ERR_COMPUTE, "sampling failed", [&] {
        /* the last one draws: each time one number off the stream, whatever there is to choose from */
        llama_sampler *draws = llama_sampler_chain_get(chain->sampler, llama_sampler_chain_n(chain->sampler) - 1);
        for (uint64_t i = 0; i < n_draws; i++) {
            llama_token_data one = {0, 0.0f, 0.0f};
            llama_token_data_array only = {&one, 1, -1, false};
            llama_sampler_apply(draws, &only);
        }
        return DT_OK;
    });
}

dt_status dt_text_chain_accept(dt_text_chain *chain, int32_t token, dt_error *error) {
    return guarded(error, DT_ERR_COMPUTE, "sampling failed", [&] {
        llama_sampler_accept(chain->sampler, token);
        return DT_OK;
    });
}
