/*
 * ./deeptutor-eval: what eviction costs in quality, on any model and text.
 *
 *   kld        distance of the next-token distributions from those of the full cache, teacher-forced
 *   needle     facts hidden in a text, asked for afterwards
 *   calibrate  how much each KV head needs, as an eviction config
 *   long       whether a text far beyond the context is predicted as within it
 *   ab         prompts with eviction off and on, and a verdict
 *
 * Everything that can be refused without the model is refused before it is loaded.
 */
#define _POSIX_C_SOURCE 200809L
#include "eval.h"
#include "guard.h"
#include "json_parts.h"
#include "run.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define AT(member) offsetof(eval_options, member)
#define EXIT_REJECTED 3 /* ab: measured, and a threshold was missed */
#define N_OF(array) (sizeof(array) / sizeof(array)[0])

#define LEAST_CONTEXT 16
#define NEEDLE_ROOM 128 /* of a question and its answer */

static const dt_option text_rows[] = {
    {"-f, --file", "F", DT_OPTION_TEXT, AT(file), 0, 0, "the text, - = stdin"},
    {"--context", "N", DT_OPTION_INT, AT(n_context), LEAST_CONTEXT, 1 << 24,
     "tokens read before eviction counts (kld 4096, needle 3000, long the model's own; less where that is smaller)"},
    {"--evict", "always|once", DT_OPTION_CHOICE, AT(evict), 0, 0,
     "always: as serving does; once: after the context, down to exactly the budget, then the cache grows (always)"},
    {"--kept", "X,X", DT_OPTION_TEXT, AT(kept), 0, 0, "compare budgets of these shares of the context, a list such as 0.5,0.25"},
};
static const dt_option policy_rows[] = {
    {"--policy", "local_window|importance_score|none", DT_OPTION_TEXT, AT(policy), 0, 0,
     "this policy on every layer, of a size that is given too (instead of a preset)"},
    {"--score", "fast|reconstruct", DT_OPTION_CHOICE, AT(score), 0, 0,
     "of policy importance_score (fast); score predict comes with --eviction-config, or with a preset, once calibrated"},
    {"--budget", "equal|adaptive", DT_OPTION_CHOICE, AT(budget), 0, 0,
     "with --policy: the same for every layer, or a shared budget, dealt out by the scores (equal)"},
    {"--json", "F", DT_OPTION_TEXT, AT(json), 0, 0, "write the result there"},
};
#define SETTINGS_HELP                                                                                                              \
    "compare the settings of this file instead, on one reading: a JSON list of {\"name\", \"evict\", and \"config\" (an eviction " \
    "config) or \"preset\"; and sizes, and \"quote\", where they differ}"
static const dt_option kld_rows[] = {
    {"--continuation", "N", DT_OPTION_INT, AT(n_continuation), 1, 1 << 20, "tokens compared after the context (256)"},
    {"--chunks", "N", DT_OPTION_INT, AT(n_chunks), 1, 4096, "pieces of the text, one after the other (4)"},
    {"--quote", "X", DT_OPTION_NUMBER, AT(quote), 0, 1,
     "what follows the context is a passage of it again, from this depth on (the text goes on)"},
    {"--settings", "F", DT_OPTION_TEXT, AT(settings), 0, 0, SETTINGS_HELP},
};
static const dt_option needle_rows[] = {
    {"--samples", "N", DT_OPTION_INT, AT(n_samples), 1, 4096, "texts with needles (20)"},
    {"--needles", "N", DT_OPTION_INT, AT(n_needles), 1, 16, "facts hidden in each text, all asked for (1)"},
    {"--question", "after|aware", DT_OPTION_CHOICE, AT(question), 0, 0,
     "asked after eviction, or part of the prompt when it happens (after)"},
    {"--form", "text|chat", DT_OPTION_CHOICE, AT(form), 0, 0, "plain text to go on from, or the model's chat template (text)"},
    {"--depth-low", "X", DT_OPTION_NUMBER, AT(depth_low), 0, 1, "needles lie no earlier in the text (0.1)"},
    {"--depth-high", "X", DT_OPTION_NUMBER, AT(depth_high), 0, 1, "nor later (0.9)"},
    {"--seed", "N", DT_OPTION_INT, AT(seed), 0, UINT32_MAX, "of cities, numbers and depths (1)"},
    {"--chat-template", "NAME", DT_OPTION_TEXT, AT(chat_template), 0, 0, "with --form chat, instead of the model's own"},
    {"--settings", "F", DT_OPTION_TEXT, AT(settings), 0, 0, SETTINGS_HELP},
};
static const dt_option calibrate_rows[] = {
    /* what is learned holds for every setting: none is chosen here but a size */
    {"-f, --file", "F", DT_OPTION_TEXT, AT(file), 0, 0, "the text, - = stdin (this project's own pages)"},
    {"--context", "N", DT_OPTION_INT, AT(n_context), LEAST_CONTEXT, 1 << 24,
     "tokens of a piece (4096, or the model's own where that is smaller)"},
    {"--kept", "X", DT_OPTION_TEXT, AT(kept), 0, 0, "budget of the config that is written, as a share of the context (0.25)"},
    {"--max-cache-size", "N", DT_OPTION_INT, AT(shared.max_cache_size), 1, INT32_MAX, "the same in tokens a layer"},
    {"--chunks", "N", DT_OPTION_INT, AT(n_chunks), 1, 4096, "pieces of the text, spread over it (4)"},
    {"-o, --output", "F", DT_OPTION_TEXT, AT(json), 0, 0,
     "the eviction config to write; beside the model, as model.tlc.json, presets find it by themselves (there)"},
};
static const dt_option ab_rows[] = {
    {"-i, --input", "F", DT_OPTION_TEXT, AT(input), 0, 0,
     "prompts, a line of JSON each: {\"prompt\": ...} or {\"messages\": [...]}; - = stdin"},
    {"--samples", "N", DT_OPTION_INT, AT(n_samples), 1, 1 << 20, "lines used, from the first on (50)"},
    {"-n, --predict, --n-predict", "N", DT_OPTION_INT, AT(n_predict), -1, 1 << 24,
     "tokens generated at most, at least 1; -1 = to the end of text (128)"},
    {"--chat-template", "NAME", DT_OPTION_TEXT, AT(chat_template), 0, 0, "for messages, instead of the model's own"},
    {"--skip-long", NULL, DT_OPTION_ON, AT(skip_long), 0, 0, "leave out prompts that exceed the context (an error)"},
    {"--min-exact", "X", DT_OPTION_NUMBER, AT(min_exact), 0, 1, "passes only if this share of the outputs is the same (no check)"},
    {"--min-rouge", "X", DT_OPTION_NUMBER, AT(min_rouge), 0, 1, "only if the mean ROUGE-L is at least this (no check)"},
    {"--min-agreement", "X", DT_OPTION_NUMBER, AT(min_agreement), 0, 1,
     "only if this share of tokens is the same, place by place (no check)"},
    {"--min-speedup", "X", DT_OPTION_NUMBER, AT(min_speedup), 0, 1e6, "only if decoding is so many times as fast (no check)"},
    {"--max-kv-share", "X", DT_OPTION_NUMBER, AT(max_kv_share), 0, 1e6,
     "only if the KV cache takes at most this share of the full one (no check)"},
};
static const dt_option_group ab_group = {"ab; exit code 3 when a check fails", ab_rows, N_OF(ab_rows)};
static const dt_option_group text_group = {"Text", text_rows, N_OF(text_rows)};
static const dt_option long_rows[] = {
    {"--times", "N", DT_OPTION_INT, AT(n_times), 2, 1 << 16, "length of the text read, as a multiple of --context (10)"},
    {"--continuation", "N", DT_OPTION_INT, AT(n_continuation), 1, 1 << 20, "tokens of a piece that is scored (256)"},
    {"--chunks", "N", DT_OPTION_INT, AT(n_chunks), 1, 4096, "pieces, spread evenly up to the end (4)"},
};
static const dt_option_group long_group = {"long", long_rows, N_OF(long_rows)};
static const dt_option_group calibrate_group = {"calibrate", calibrate_rows, N_OF(calibrate_rows)};
static const dt_option_group policy_group = {"Measurement", policy_rows, N_OF(policy_rows)};
static const dt_option_group kld_group = {"kld", kld_rows, N_OF(kld_rows)};
static const dt_option_group needle_group = {"needle", needle_rows, N_OF(needle_rows)};

typedef struct command {
    const char *name;
    const dt_option_group *own, *other; /* other: what it measures on */
    const dt_option_group *policy, *eviction;
    dt_status (*run)(eval *e, dt_error *error);
    int64_t n_context, n_samples;
} command;

static const command commands[] = {
    {"kld", &kld_group, &text_group, &policy_group, &dt_eviction_options, eval_kld, 4096, 0},
    {"needle", &needle_group, &text_group, &policy_group, &dt_eviction_options, eval_needle, 3000, 20},
    {"calibrate", &calibrate_group, NULL, NULL, NULL, eval_calibrate, 4096, 0},
    {"long", &long_group, &text_group, &policy_group, &dt_eviction_options, eval_long, 0, 0},
    {"ab", &ab_group, &dt_sampling_options, &policy_group, &dt_eviction_options, eval_ab, 0, 50},
};

dt_status eval_too_short(const eval *e, size_t n_pieces, size_t n_tokens, dt_error *error) {
    if (e->n_text >= n_tokens) {
        return dt_app_fail(error, DT_ERR_ARGUMENT,
                           "%zu pieces of %zu tokens need a text of %zu; this one has %zu: give fewer --chunks, %zu", n_pieces,
                           n_tokens, n_pieces * n_tokens, e->n_text, e->n_text / n_tokens);
    }
    const size_t others = n_tokens - (size_t)e->options->n_context; /* of a piece, beside the context */
    if (e->n_text < others + 16) {
        return dt_app_fail(error, DT_ERR_ARGUMENT, "a piece needs %zu tokens, and the text has %zu: give a longer text", n_tokens,
                           e->n_text);
    }
    return dt_app_fail(error, DT_ERR_ARGUMENT,
                       "a piece needs %zu tokens, and the text has %zu: give a longer text, or --chunks 1 --context %zu", n_tokens,
                       e->n_text, e->n_text - others);
}

bool eval_progress(int64_t done, int64_t total) {
    dt_report_progress("measuring", done, total, NULL);
    return !dt_interrupted;
}

bool eval_on_prefill(int64_t done, int64_t total, void *user) {
    const int64_t *progress = user;
    return eval_progress(progress[0] * total + done, progress[1] * total);
}

void eval_print_name(const eval *e, const char *name) {
    size_t width = strlen("setting");
    for (size_t i = 0; i < e->n_settings && e->settings[i].name != NULL; i++) {
        const size_t n = strlen(e->settings[i].name);
        width = n > width ? n : width;
    }
    if (e->settings[0].name == NULL) {
        return;
    }
    fputs("| ", stdout);
    for (size_t i = 0; i < width; i++) {
        putchar(name == NULL ? '-' : *name != 0 ? *name++ : ' ');
    }
    putchar(' ');
}

void eval_set_result(eval *e, json_t *rows) {
    if (e->n_settings == 1) {
        json_object_update(e->result, json_array_get(rows, 0));
        json_decref(rows);
    } else {
        json_object_set_new(e->result, "settings", rows);
    }
}

const char *eval_evict_word(dt_evict evict) { return evict == DT_EVICT_ONCE ? "once" : "always"; }

eval_mean eval_mean_of(const double *values, size_t n) {
    double sum = 0, squares = 0;
    for (size_t i = 0; i < n; i++) {
        sum += values[i];
    }
    const double mean = n > 0 ? sum / (double)n : 0;
    for (size_t i = 0; i < n; i++) {
        squares += (values[i] - mean) * (values[i] - mean);
    }
    return (eval_mean){.mean = mean, .error = n > 1 ? sqrt(squares / (double)(n - 1) / (double)n) : NAN};
}

eval_error_text eval_error_text_of(eval_mean mean) {
    eval_error_text out = {"-"};
    if (isfinite(mean.error)) {
        snprintf(out.text, sizeof out.text, "%.4f", mean.error);
    }
    return out;
}

json_t *eval_error_json(eval_mean mean) { return isfinite(mean.error) ? json_real(mean.error) : json_null(); }

/* ---- sessions ----------------------------------------------------------------------------------- */

static void session_params(const eval *e, dt_session_params *out) { dt_shared_options_session(&e->options->shared, out); }

dt_status eval_base_session(const eval *e, dt_session **out, dt_error *error) {
    dt_session_params params;
    session_params(e, &params);
    params.prefill = DT_PREFILL_FULL;
    params.eviction = e->observed;
    params.evict = DT_EVICT_HELD;
    return dt_session_new(e->model, &params, out, error);
}

static bool on_prefill(int64_t done, int64_t total, void *user) {
    (void)done;
    (void)total;
    (void)user;
    return !dt_interrupted;
}

dt_status eval_evicted_session(const eval *e, const dt_session *base, const eval_setting *setting, dt_session **out,
                               dt_error *error) {
    if (e->options->shared.prefill == 0) {
        return dt_session_fork(base, setting->eviction, setting->evict, out, error);
    }
    size_t n;
    const int32_t *tokens = dt_session_tokens(base, &n);
    dt_session_params params;
    session_params(e, &params);
    params.eviction = setting->eviction;
    params.evict = setting->evict;
    dt_status status = dt_session_new(e->model, &params, out, error);
    if (status == DT_OK) {
        status = dt_session_sync(*out, tokens, n, on_prefill, NULL, NULL, error);
    }
    return status;
}

void eval_note_evicted(eval_setting *setting, const dt_session *session) {
    dt_session_stats stats;
    dt_session_get_stats(session, &stats);
    setting->n_rounds += stats.eviction_rounds;
    setting->n_evicted += stats.evicted_tokens;
}

double eval_kept_share(const eval *e, const dt_session *session) {
    const dt_model_info *info = dt_model_get_info(e->model);
    double kept = 0, lanes = 0;
    size_t n;
    dt_session_tokens(session, &n);
    for (int32_t i = 0; i < info->n_layers; i++) {
        dt_layer_stats layer;
        if (dt_session_get_layer_stats(session, i, &layer) == DT_OK) {
            kept += (layer.mean_length + layer.mean_slots) * info->n_kv_heads[i];
            lanes += info->n_kv_heads[i];
        }
    }
    return n > 0 ? kept / lanes / (double)n : 0;
}

/* ---- the text ------------------------------------------------------------------------------------ */

static dt_status read_text(eval *e, dt_error *error) {
    char *bytes = NULL;
    size_t n = 0;
    if (e->options->file == NULL) {
        return dt_tokenize(e->model, eval_calibration_text, eval_calibration_bytes, false, false, &e->text, &e->n_text, error);
    }
    dt_status status = dt_read_file(e->options->file, &bytes, &n, error);
    if (status == DT_OK) {
        status = dt_tokenize(e->model, bytes, n, false, false, &e->text, &e->n_text, error);
    }
    free(bytes);
    return status;
}

/* ---- main --------------------------------------------------------------------------------------- */

/* What contradicts, or would be ignored. */
static const char *check_eviction(const eval_options *o, const command *c) {
    const dt_shared_options *shared = &o->shared;
    const bool named = shared->eviction_preset != NULL || shared->eviction_config != NULL;
    if (o->policy != NULL && named) {
        return "--policy stands instead of --eviction-preset and --eviction-config; give one of them";
    }
    if (o->policy == NULL && (o->score >= 0 || o->budget >= 0)) {
        return "--score and --budget are of a --policy, such as importance_score; give one";
    }
    if (o->kept != NULL && shared->max_cache_size > 0) {
        return "--kept and --max-cache-size both say how much is kept; give one of them";
    }
    if (o->policy != NULL && strcmp(o->policy, "none") != 0 && o->kept == NULL && shared->max_cache_size == 0) {
        return c->run == eval_ab ? "--policy needs a budget: --max-cache-size N"
                                 : "--policy needs a budget: --kept 0.25, or --max-cache-size N";
    }
    if (o->settings != NULL && (o->policy != NULL || o->kept != NULL || o->evict != 0 || shared->prefill != 0 || named)) {
        return "a file of --settings stands instead of --policy, --kept, --evict, --eviction-config, --eviction-preset and "
               "--prefill streaming; leave them out";
    }
    if (o->policy != NULL && strcmp(o->policy, "none") == 0 && o->kept != NULL) {
        return "--policy none keeps all; leave --kept out";
    }
    if (shared->kv_memory > 0) {
        return "--kv-memory fits each side of a comparison for itself, so that they would differ in more than eviction; leave it "
               "out, and give a shorter --context where memory is short";
    }
    if (c->run == eval_calibrate && o->kept != NULL && strchr(o->kept, ',') != NULL) {
        return "calibrate writes one config: give --kept a single share";
    }
    return NULL;
}

static const char *check(const eval_options *o, const command *c) {
    if (c->run == eval_ab && o->input == NULL) {
        return "there are no prompts to compare on; give them with -i FILE";
    }
    if (c->run == eval_ab && o->n_predict == 0) {
        return "with -n 0 nothing would be written that could be compared; give at least 1";
    }
    if (c->run != eval_ab && c->run != eval_calibrate && o->file == NULL) {
        return "there is no text to measure on; give one with -f FILE";
    }
    if (c->run == eval_long && o->evict != 0) {
        return "long evicts as serving does: leave out --evict";
    }
    if (c->run == eval_long && o->shared.n_ctx > 0) {
        return "long reads in a context of --context tokens: give that in place of -c";
    }
    if (c->run == eval_needle && o->chat_template != NULL && o->form == 0) {
        return "--chat-template is for --form chat";
    }
    if (o->json != NULL && strcmp(o->json, "-") == 0) {
        return "the result needs a file; stdout is for the table";
    }
    if (o->depth_low > o->depth_high) {
        return "--depth-low is above --depth-high";
    }
    return check_eviction(o, c);
}

/* What was evicted how, in words, for reports. */
static void describe(const eval *e, char *out, size_t capacity) {
    const eval_options *o = e->options;
    if (o->settings != NULL) {
        snprintf(out, capacity, "settings %.200s", o->settings);
    } else if (o->policy == NULL) {
        snprintf(out, capacity, "%.200s", dt_eviction_name(e->settings[0].eviction));
    } else {
        snprintf(out, capacity, "%.40s%s%s", o->policy, o->score == 1 ? ", reconstruct" : "",
                 o->budget == 1 ? ", shared budget" : "");
    }
}

static json_t *begin_result(const eval *e, const command *c) {
    char label[256];
    describe(e, label, sizeof label);
    json_t *result = json_pack("{ss so so ss ss}", "command", c->name, "model", dt_json_text(e->options->shared.model), "eviction",
                               dt_json_text(label), "kv_type", dt_kv_type_word(e->options->shared.kv_type), "prefill",
                               dt_prefill_word(e->options->shared.prefill));
    if (c->run != eval_ab) {
        json_object_update_new(result, json_pack("{sI ss}", "context", (json_int_t)e->options->n_context, "evict",
                                                 eval_evict_word(e->options->evict == 0 ? DT_EVICT_ALWAYS : DT_EVICT_ONCE)));
    }
    if (c->run == eval_needle) {
        json_object_set_new(result, "question", json_string(e->options->question == 0 ? "after" : "aware"));
    }
    return result;
}

#define MOST_SHOWN 4 /* settings that are told layer by layer */

dt_status eval_tell_settings(const eval *e, dt_error *error) {
    dt_status status = DT_OK;
    if (e->n_settings > MOST_SHOWN) {
        dt_report(DT_LOG_INFO, "TLC: on, %zu settings", e->n_settings);
        return DT_OK;
    }
    for (size_t i = 0; i < e->n_settings && status == DT_OK; i++) {
        const eval_setting *setting = &e->settings[i];
        char more[160] = "";
        if (setting->name != NULL) {
            snprintf(more, sizeof more, " (%.140s)", setting->name);
        } else if (setting->kept > 0) {
            snprintf(more, sizeof more, ", kept %g", setting->kept);
        }
        status = dt_report_eviction(setting->eviction, more, error);
    }
    return status;
}

/* Equal sides prove nothing about eviction, and pass every check. */
static void tell_evicted(const eval *e) {
    const char *policy = e->options->policy;
    const bool wanted = policy == NULL || strcmp(policy, "none") != 0;
    for (size_t i = 0; i < e->n_settings; i++) {
        const eval_setting *setting = &e->settings[i];
        json_t *row = e->n_settings > 1 ? json_array_get(json_object_get(e->result, "settings"), i) : e->result;
        char which[160] = "";
        json_object_set_new(row, "eviction_rounds", json_integer(setting->n_rounds));
        json_object_set_new(row, "evicted_tokens", json_integer(setting->n_evicted));
        if (setting->name != NULL) {
            snprintf(which, sizeof which, " under \"%.140s\"", setting->name);
        } else if (setting->kept > 0) {
            snprintf(which, sizeof which, " under --kept %g", setting->kept);
        }
        if (setting->n_rounds == 0 && wanted) {
            dt_report(DT_LOG_WARN, "nothing was evicted%s: the budgets hold all of it, so both sides are the full cache; give %s",
                      which,
                      e->options->input != NULL ? "longer prompts, or a smaller --max-cache-size"
                                                : "a longer --context, or a smaller --kept or --max-cache-size");
        }
    }
}

static int64_t context_of(const eval *e) {
    return e->options->shared.n_ctx > 0 ? e->options->shared.n_ctx : dt_model_get_info(e->model)->n_ctx_train;
}

/* What nobody named is as much as the model has room for, up to the command's own number (0 = no bound). */
static void choose_context(const eval *e, eval_options *o, const command *c) {
    const int64_t behind = c->run == eval_kld ? o->n_continuation + 1 : c->run == eval_needle ? NEEDLE_ROOM : 0;
    const int64_t most = context_of(e) - behind > LEAST_CONTEXT ? context_of(e) - behind : LEAST_CONTEXT;
    if (o->n_context == 0) {
        o->n_context = c->n_context == 0 || c->n_context > most ? most : c->n_context;
    }
}

/* Once the text is known to be long enough. */
static dt_status check_context(const eval *e, const command *c, bool chosen, dt_error *error) {
    const int64_t n = e->options->n_context, n_ctx = context_of(e);
    if (c->run == eval_long || (size_t)n > e->n_text) {
        return DT_OK;
    }
    if (n > n_ctx) {
        return dt_app_fail(error, DT_ERR_LIMIT,
                           "pieces of %lld tokens don't fit into the context of %lld; give a smaller --context", (long long)n,
                           (long long)n_ctx);
    }
    if (c->run == eval_kld && n + e->options->n_continuation > n_ctx) {
        return dt_app_fail(error, DT_ERR_LIMIT,
                           "the full cache that is compared with can't pass the context of %lld: %lld tokens and %lld more don't "
                           "fit; give a smaller --context or --continuation",
                           (long long)n_ctx, (long long)n, (long long)e->options->n_continuation);
    }
    if (chosen && n < c->n_context) {
        dt_report(DT_LOG_INFO, "--context %lld, which the model's %lld leave room for", (long long)n, (long long)n_ctx);
    }
    return DT_OK;
}

static dt_status run(eval *e, eval_options *o, const command *c, dt_stats_file *file, dt_error *error) {
    dt_status status = c->run == eval_ab ? eval_ab_read(e, error) : DT_OK;
    if (status == DT_OK) {
        dt_model_params model_params;
        dt_shared_options_model(&e->options->shared, &model_params);
        status = dt_model_open(e->options->shared.model, &model_params, &e->model, error);
        e->unopened = status != DT_OK;
    }
    const bool chosen = o->n_context == 0;
    if (status == DT_OK && c->run != eval_ab) {
        choose_context(e, o, c);
    }
    if (status == DT_OK) {
        status = eval_make_settings(e, error);
        dt_report_sessions(false); /* what they tell of themselves is no part of a comparison */
    }
    if (status == DT_OK && c->run != eval_ab) {
        status = read_text(e, error);
        status = status == DT_OK ? check_context(e, c, chosen, error) : status;
    }
    if (status == DT_OK) {
        e->result = begin_result(e, c);
        e->measuring = true;
        status = e->result != NULL ? c->run(e, error) : dt_app_fail(error, DT_ERR_MEMORY, "out of memory");
    }
    dt_report_progress_end();
    if (status == DT_OK && c->run != eval_calibrate) {
        tell_evicted(e);
    }
    if (status == DT_OK && file != NULL) {
        char *text = dt_json_dump(e->result, (c->run == eval_calibrate ? JSON_COMPACT : JSON_INDENT(2)) | JSON_REAL_PRECISION(9));
        status = text != NULL ? dt_stats_file_write_text(file, text, error) : dt_app_fail(error, DT_ERR_MEMORY, "out of memory");
        free(text);
    }
    status = status == DT_OK ? dt_report_flush_table(error) : status;
    for (size_t i = 0; i < e->n_settings; i++) {
        dt_eviction_free(e->settings[i].eviction);
        free(e->settings[i].name);
    }
    dt_eviction_free(e->observed);
    json_decref(e->result);
    json_decref(e->rows);
    dt_free(e->text);
    dt_model_close(e->model);
    return status;
}

static void print_usage(FILE *file, const char *program) {
    fprintf(file,
            "usage: %s COMMAND -m FILE -f TEXT [flags]\n"
            "       %s calibrate -m FILE [flags]\n"
            "       %s ab -m FILE -i PROMPTS.jsonl [flags]\n"
            "COMMAND --help lists the flags. Commands:\n"
            "  kld        how far next-token distributions after eviction are from those of\n"
            "             the full cache\n"
            "  needle     facts hidden in the text, asked for from the evicted and the full\n"
            "             cache\n"
            "  calibrate  measures how much each KV head needs, writes an eviction config\n"
            "  long       perplexity of a text far beyond the context, against that within it\n"
            "  ab         answers to the same prompts with eviction off and on, compared\n",
            program, program, program);
}

static const command *find_command(const char *name) {
    for (size_t i = 0; name != NULL && i < N_OF(commands); i++) {
        if (strcmp(commands[i].name, name) == 0) {
            return &commands[i];
        }
    }
    return NULL;
}

static eval_options default_options(const command *c) {
    eval_options o = {.n_context = 0, /* choose_context */
                      .n_continuation = 256,
                      .n_chunks = 4,
                      .n_samples = c->n_samples,
                      .n_predict = 128,
                      .min_exact = -1,
                      .min_rouge = -1,
                      .min_agreement = -1,
                      .min_speedup = -1,
                      .max_kv_share = -1,
                      .n_needles = 1,
                      .n_times = 10,
                      .depth_low = 0.1,
                      .depth_high = 0.9,
                      .quote = -1,
                      .score = -1,
                      .budget = -1,
                      .seed = 1};
    dt_shared_options_init(&o.shared);
    return o;
}

/* The command line without a command in front. */
static int without_command(int argc, char **argv) {
    const char *word = argc > 1 ? argv[1] : "";
    const bool help = strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0;
    if (strcmp(word, "--version") == 0) {
        printf("DeepTutor %s\n", DT_VERSION);
        return dt_report_printed(0);
    }
    print_usage(help ? stdout : stderr, dt_program_name(argc, argv));
    if (!help && argc > 1) {
        fprintf(stderr, "error: there is no command '%.60s'; a command comes first, flags after it\n", word);
    }
    return help ? dt_report_printed(0) : 2;
}

typedef struct request {
    eval_options *options;
    const command *command;
} request;

/* Opens the file of results, measures. The exit code. */
static int measure(void *user) {
    const request *asked = user;
    eval_options *o = asked->options;
    const command *c = asked->command;
    dt_error error = {0};
    dt_stats_file *file = NULL;
    char *learned = dt_eviction_learned_path(o->shared.model);
    const bool beside = c->run == eval_calibrate && o->json == NULL;
    o->json = beside ? learned : o->json;
    const char *inputs[] = {o->shared.model,
                            o->file,
                            o->input,
                            o->shared.eviction_config,
                            o->shared.grammar_file,
                            o->settings,
                            c->run == eval_calibrate ? NULL : learned};
    eval e = {.options = o, .command = c->name};
    dt_status status = o->json != NULL ? dt_stats_file_open(o->json, inputs, N_OF(inputs), &file, &error) : DT_OK;
    if (status == DT_OK) {
        status = run(&e, o, c, file, &error);
    }
    dt_stats_file_free(file);
    if (status == DT_OK && beside) {
        dt_report(DT_LOG_INFO, "%s is written;\n--cache-eviction with a preset goes by it from now on", learned);
    }
    dt_free(learned);
    if (status == DT_OK) {
        return e.rejected ? EXIT_REJECTED : 0;
    }
    const bool of_the_text =
        status == DT_ERR_ARGUMENT || status == DT_ERR_CONFIG || status == DT_ERR_LIMIT; /* found out when it is read */
    return dt_report_failure(&error, !e.unopened && (!e.measuring || of_the_text));
}

int main(int argc, char **argv) {
    const command *c = find_command(argc > 1 ? argv[1] : NULL);
    if (c == NULL) {
        return without_command(argc, argv);
    }
    const dt_option_group *const all[] = {c->own, c->other, c->policy, &dt_model_options, c->eviction, &dt_output_options};
    const dt_option_group *groups[N_OF(all)];
    size_t n_groups = 0;
    for (size_t i = 0; i < N_OF(all); i++) {
        if (all[i] != NULL) {
            groups[n_groups++] = all[i];
        }
    }
    char message[512];
    eval_options o = default_options(c);
    bool good = dt_options_parse(groups, n_groups, argc - 1, argv + 1, &o, message, sizeof message);
    if (o.shared.help) {
        print_usage(stdout, dt_program_name(argc, argv));
        dt_options_help(stdout, groups, n_groups);
        return dt_report_printed(0);
    }
    o.shared.eviction = true; /* that is what is measured */
    if (good && dt_wants_devices(&o.shared)) {
        return dt_print_devices();
    }
    good = good && dt_shared_options_check(&o.shared, message, sizeof message);
    if (good && check(&o, c) != NULL) {
        snprintf(message, sizeof message, "%s", check(&o, c));
        good = false;
    }
    if (!good) {
        fprintf(stderr, "error: %s\n", message);
        return 2;
    }
    if (c->run == eval_calibrate) {
        o.policy = "importance_score";
        o.score = o.budget = 1;
        o.kept = o.kept == NULL && o.shared.max_cache_size == 0 ? "0.25" : o.kept;
    }
    o.shared.prefill = c->run == eval_long ? 1 : o.shared.prefill;
    dt_options_tell_notes(&o.shared);
    dt_report_init((dt_log_level)o.shared.log_level, o.shared.progress);
    dt_run_signals();
    request asked = {&o, c};
    return dt_run_guarded(&o.shared, false, measure, &asked);
}
