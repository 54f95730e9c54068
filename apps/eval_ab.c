/*
 * deeptutor-eval ab: the test to run before production. The same prompts with the same seeds, eviction off and on, and a verdict.
 *
 * Every sample is computed twice in sessions of its own, as ./main would, so that speed and memory are those of a real run; which
 * side comes first alternates. Compared are the two outputs: the same tokens or not, ROUGE-L of the texts, the share of tokens that
 * agree place by place. The input is checked to its end before anything is generated: a wrong line costs no time.
 */
#include "eval.h"
#include "json_parts.h"
#include "rouge.h"
#include "run.h"
#include "utf8.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct prompt {
    size_t line;
    int32_t *tokens;
    size_t n;
} prompt;

/* What one side made of a prompt. */
typedef struct output {
    int32_t *tokens;
    size_t n, capacity;
    char *text;
    size_t n_bytes, text_capacity;
    bool out_of_memory;
    const dt_model *model;
    double prefill_ms, decode_ms;
    int64_t decoded; /* tokens that decode_ms computed */
    uint64_t kv_bytes, kv_bytes_peak;
    double kept;
} output;

/* Means over the samples come from these; [n_samples] each. */
typedef struct scores {
    double *same, *rouge, *agreement;
} scores;

typedef struct side_sums {
    double prompt_tokens, prefill_ms, decoded, decode_ms, kv_bytes, kept;
} side_sums;

typedef struct ab_run {
    eval *e;
    char *grammar; /* of --grammar-file, or NULL */
    dt_sampler_params sampling;
    prompt *prompts;
    size_t n_prompts, n_left_out;
    scores scores;
    side_sums sums[2]; /* off, on */
    json_t *samples;
} ab_run;

/* ---- input -------------------------------------------------------------------------------------- */

static dt_status bad_line(const eval *e, size_t line, dt_error *error, const char *what) {
    return dt_app_fail(error, DT_ERR_ARGUMENT, "%.400s line %zu: %.400s", e->options->input, line, what);
}

/* What is wrong with a line's object, or NULL. */
static const char *find_fault(const json_t *row) {
    const json_t *text = json_object_get(row, "prompt"), *messages = json_object_get(row, "messages");
    const json_t *message;
    size_t i;
    if (!json_is_object(row) || (text == NULL) == (messages == NULL)) {
        return "needs either {\"prompt\": TEXT} or {\"messages\": [{\"role\": ..., \"content\": ...}]}";
    }
    if (text != NULL && (!json_is_string(text) || json_string_length(text) == 0)) {
        return "\"prompt\" must be a text that is not empty";
    }
    if (messages != NULL && (!json_is_array(messages) || json_array_size(messages) == 0)) {
        return "\"messages\" must be a list with at least one message";
    }
    json_array_foreach(messages, i, message) {
        if (!json_is_string(json_object_get(message, "role")) || !json_is_string(json_object_get(message, "content"))) {
            return "every message needs \"role\" and \"content\", both texts";
        }
    }
    return NULL;
}

dt_status eval_ab_read(eval *e, dt_error *error) {
    char *text = NULL;
    size_t n = 0;
    dt_status status = dt_read_file(e->options->input, &text, &n, error);
    if (status != DT_OK) {
        return status;
    }
    e->rows = json_array();
    const char *at = n >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0 ? text + 3 : text;
    for (size_t line = 1; at < text + n && status == DT_OK && (int64_t)json_array_size(e->rows) < e->options->n_samples; line++) {
        const char *newline = memchr(at, '\n', (size_t)(text + n - at)), *end = newline != NULL ? newline : text + n;
        size_t length = (size_t)(end - at);
        while (length > 0 && strchr(" \t\r", at[length - 1]) != NULL) {
            length--;
        }
        if (length > 0) {
            json_error_t fault;
            json_t *row = dt_json_load(at, length, 0, &fault);
            const char *not_taken = row == NULL ? dt_json_not_taken(&fault) : NULL;
            const char *what = row != NULL ? find_fault(row) : not_taken != NULL ? not_taken : fault.text;
            if (row == NULL && json_error_code(&fault) == json_error_out_of_memory) {
                status = dt_app_fail(error, DT_ERR_MEMORY, "out of memory for the prompts");
            } else if (what != NULL) {
                char sentence[400];
                snprintf(sentence, sizeof sentence, "%s%s", row == NULL && not_taken == NULL ? "is no JSON object: " : "", what);
                json_decref(row);
                status = bad_line(e, line, error, sentence);
            } else if (json_array_append_new(e->rows, json_pack("{sI so}", "line", (json_int_t)line, "row", row)) != 0) {
                status = dt_app_fail(error, DT_ERR_MEMORY, "out of memory for the prompts");
            }
        }
        at = end + 1;
    }
    free(text);
    if (status == DT_OK && json_array_size(e->rows) == 0) {
        status = dt_app_fail(error, DT_ERR_ARGUMENT, "%.400s has no prompts: a line of JSON each", e->options->input);
    }
    return status;
}

static dt_status render(const ab_run *r, const json_t *messages, char **out, dt_error *error) {
    const size_t n = json_array_size(messages);
    dt_chat_message *list = calloc(n, sizeof *list);
    if (list == NULL) {
        return dt_app_fail(error, DT_ERR_MEMORY, "out of memory for %zu messages", n);
    }
    for (size_t i = 0; i < n; i++) {
        const json_t *message = json_array_get(messages, i);
        list[i].role = json_string_value(json_object_get(message, "role"));
        list[i].content = json_string_value(json_object_get(message, "content"));
    }
    const dt_status status = dt_chat_render(r->e->model, r->e->options->chat_template, list, n, true, out, error);
    free(list);
    return status;
}

static dt_status tokenize(const ab_run *r, const json_t *row, prompt *out, dt_error *error) {
    const json_t *text = json_object_get(row, "prompt");
    if (text != NULL) {
        return dt_tokenize(r->e->model, json_string_value(text), json_string_length(text), true, true, &out->tokens, &out->n,
                           error);
    }
    char *rendered = NULL;
    dt_status status = render(r, json_object_get(row, "messages"), &rendered, error);
    if (status == DT_OK) {
        status = dt_tokenize(r->e->model, rendered, strlen(rendered), true, true, &out->tokens, &out->n, error);
    }
    dt_free(rendered);
    return status;
}

static int64_t context_of(const ab_run *r) {
    const int64_t n_ctx = r->e->options->shared.n_ctx;
    return n_ctx > 0 ? n_ctx : dt_model_get_info(r->e->model)->n_ctx_train;
}

/* Tokens of all prompts; those that don't fit are an error, or left out. */
static dt_status prepare_prompts(ab_run *r, dt_error *error) {
    const eval_options *o = r->e->options;
    const size_t n = json_array_size(r->e->rows);
    const int64_t room = context_of(r);
    const int64_t to_come = o->n_predict > 0 ? o->n_predict : 1;
    r->prompts = calloc(n, sizeof *r->prompts);
    if (r->prompts == NULL) {
        return dt_app_fail(error, DT_ERR_MEMORY, "out of memory for %zu prompts", n);
    }
    for (size_t i = 0; i < n; i++) {
        const json_t *entry = json_array_get(r->e->rows, i);
        prompt *p = &r->prompts[r->n_prompts];
        p->line = (size_t)json_integer_value(json_object_get(entry, "line"));
        const dt_status status = tokenize(r, json_object_get(entry, "row"), p, error);
        if (status != DT_OK) {
            char what[512];
            snprintf(what, sizeof what, "%.500s", error->message);
            bad_line(r->e, p->line, error, what);
            return error->code = status == DT_ERR_MEMORY ? status : DT_ERR_ARGUMENT;
        }
        if (p->n == 0 || (int64_t)p->n + to_come > room) {
            char what[256];
            snprintf(what, sizeof what,
                     "its %zu tokens and the %lld to come exceed the context of %lld; give a smaller -n, or --skip-long", p->n,
                     (long long)to_come, (long long)room);
            const prompt left_out = *p;
            dt_free(p->tokens);
            *p = (prompt){0};
            if (left_out.n == 0 || !o->skip_long) {
                return bad_line(r->e, left_out.line, error, left_out.n == 0 ? "has no tokens" : what);
            }
            r->n_left_out++;
            continue;
        }
        r->n_prompts++;
    }
    return r->n_prompts > 0 ? DT_OK : dt_app_fail(error, DT_ERR_ARGUMENT, "no prompt fits the context of %lld", (long long)room);
}

/* ---- one side ----------------------------------------------------------------------------------- */

/* Room for n elements more; false when there is no memory. */
static bool grow(void **array, size_t n, size_t *capacity, size_t size) {
    if (n <= *capacity) {
        return true;
    }
    void *larger = realloc(*array, n * 2 * size);
    if (larger != NULL) {
        *array = larger;
        *capacity = n * 2;
    }
    return larger != NULL;
}

static bool on_token(int32_t token, void *user) {
    output *out = user;
    const size_t n_bytes = dt_token_bytes(out->model, token, false, NULL, 0);
    void *tokens = out->tokens, *text = out->text;
    out->out_of_memory = !grow(&tokens, out->n + 1, &out->capacity, sizeof *out->tokens) ||
                         !grow(&text, out->n_bytes + n_bytes + 1, &out->text_capacity, 1);
    out->tokens = tokens;
    out->text = text;
    if (!out->out_of_memory) {
        out->tokens[out->n++] = token;
        dt_token_bytes(out->model, token, false, out->text + out->n_bytes, n_bytes);
        out->n_bytes += n_bytes;
    }
    return !out->out_of_memory && !dt_interrupted;
}

static dt_status generate(const ab_run *r, const prompt *p, dt_session *session, uint32_t seed, output *out, dt_error *error) {
    dt_sampler *sampler = NULL;
    dt_sampler_params sampling = r->sampling;
    sampling.seed = seed;
    dt_status status = dt_sampler_new(r->e->model, &sampling, &sampler, error);
    for (size_t i = 0; i < p->n && status == DT_OK; i++) {
        status = dt_sampler_accept(sampler, p->tokens[i], false, error);
    }
    if (status == DT_OK) { /* both sides up to the context, though the evicting one could go on past it */
        const int64_t n_predict = r->e->options->n_predict, room = context_of(r) - (int64_t)p->n;
        status = dt_generate(session, sampler, n_predict < 0 ? room : n_predict, on_token, out, NULL, error);
    }
    dt_sampler_free(sampler);
    if (status == DT_OK && out->out_of_memory) {
        status = dt_app_fail(error, DT_ERR_MEMORY, "out of memory for the output");
    }
    return status == DT_OK && dt_interrupted ? dt_app_fail(error, DT_ERR_CANCELLED, "stopped") : status;
}

static dt_status run_side(ab_run *r, size_t index, bool on, output *out, dt_error *error) {
    const prompt *p = &r->prompts[index];
    int64_t progress[] = {(int64_t)(index * 2), (int64_t)(r->n_prompts * 2)};
    dt_session *session = NULL;
    dt_session_params params;
    dt_sync_result read;
    dt_shared_options_session(&r->e->options->shared, &params);
    params.eviction = on ? r->e->settings[0].eviction : NULL;
    params.prefill = on ? params.prefill : DT_PREFILL_FULL;
    dt_status status = dt_session_new(r->e->model, &params, &session, error);
    if (status == DT_OK) {
        status = dt_session_sync(session, p->tokens, p->n, eval_on_prefill, progress, &read, error);
    }
    if (status == DT_OK) {
        /* a different draw for every sample, the same for both sides; never the value that stands for a random one */
        status = generate(r, p, session, (uint32_t)((r->sampling.seed + (uint64_t)index) % DT_SEED_RANDOM), out, error);
    }
    if (status == DT_OK) {
        dt_session_stats stats;
        dt_session_get_stats(session, &stats);
        out->prefill_ms = read.prefill_ms;
        out->decode_ms = stats.decode_ms;
        out->decoded = stats.decode_tokens;
        out->kv_bytes = stats.kv_bytes;
        out->kv_bytes_peak = stats.kv_bytes_peak;
        out->kept = eval_kept_share(r->e, session);
        eval_note_evicted(&r->e->settings[0], session);
    }
    dt_session_free(session);
    return status;
}

/* ---- comparing ---------------------------------------------------------------------------------- */

static double per_second(double n, double ms) { return ms > 0 ? n * 1e3 / ms : 0; }

static void add_sums(side_sums *sums, const prompt *p, const output *out) {
    sums->prompt_tokens += (double)p->n;
    sums->prefill_ms += out->prefill_ms;
    sums->decoded += (double)out->decoded;
    sums->decode_ms += out->decode_ms;
    sums->kv_bytes += (double)out->kv_bytes;
    sums->kept += out->kept;
}

static json_t *side_json(const prompt *p, const output *out) {
    size_t n_text;
    char *text = dt_repair_utf8(out->text != NULL ? out->text : "", out->n_bytes, &n_text);
    json_t *tokens = json_array();
    for (size_t i = 0; i < out->n; i++) {
        json_array_append_new(tokens, json_integer(out->tokens[i]));
    }
    json_t *side =
        json_pack("{ss? so sf sf sI sI sf}", "text", text, "tokens", tokens, "prefill_tps",
                  per_second((double)p->n, out->prefill_ms), "decode_tps", per_second((double)out->decoded, out->decode_ms),
                  "kv_bytes", (json_int_t)out->kv_bytes, "kv_bytes_peak", (json_int_t)out->kv_bytes_peak, "kept_share", out->kept);
    free(text);
    return side;
}

/* sides: off, on */
static dt_status compare(ab_run *r, size_t index, const output sides[2], dt_error *error) {
    const prompt *p = &r->prompts[index];
    const size_t shorter = sides[0].n < sides[1].n ? sides[0].n : sides[1].n, longer = sides[0].n + sides[1].n - shorter;
    size_t n_equal = 0, first = 0;
    double rouge = 0;
    for (size_t i = 0; i < shorter; i++) {
        n_equal += sides[0].tokens[i] == sides[1].tokens[i];
    }
    while (first < shorter && sides[0].tokens[first] == sides[1].tokens[first]) {
        first++;
    }
    if (!dt_rouge_l(sides[0].text, sides[0].n_bytes, sides[1].text, sides[1].n_bytes, &rouge)) {
        return dt_app_fail(error, DT_ERR_MEMORY, "out of memory for the words of the outputs");
    }
    const bool same = first == longer;
    const double agreement = longer > 0 ? (double)n_equal / (double)longer : 1;
    r->scores.same[index] = same;
    r->scores.rouge[index] = rouge;
    r->scores.agreement[index] = agreement;
    for (int on = 0; on < 2; on++) {
        add_sums(&r->sums[on], p, &sides[on]);
    }
    printf("| %4zu | %6zu | %-4s | %7.3f | %5.3f | %7.1f | %6.1f | %7.1f | %5.1f |\n", p->line, p->n, same ? "yes" : "no", rouge,
           agreement, per_second((double)sides[0].decoded, sides[0].decode_ms),
           per_second((double)sides[1].decoded, sides[1].decode_ms), (double)sides[0].kv_bytes / 1048576.0,
           (double)sides[1].kv_bytes / 1048576.0);
    json_t *difference = same ? json_null() : json_integer((json_int_t)first);
    json_array_append_new(r->samples,
                          json_pack("{sI sI sb sf sf so so so}", "line", (json_int_t)p->line, "prompt_tokens", (json_int_t)p->n,
                                    "exact_match", same, "rouge_l", rouge, "token_agreement", agreement, "first_difference",
                                    difference, "off", side_json(p, &sides[0]), "on", side_json(p, &sides[1])));
    return DT_OK;
}

static dt_status measure_sample(ab_run *r, size_t index, dt_error *error) {
    output sides[2] = {{.model = r->e->model}, {.model = r->e->model}};
    dt_status status = DT_OK;
    for (size_t turn = 0; turn < 2 && status == DT_OK; turn++) {
        const bool on = (turn + index) % 2 == 1;
        status = run_side(r, index, on, &sides[on], error);
    }
    if (status == DT_OK) {
        dt_report_progress_end();
        status = compare(r, index, sides, error);
    }
    for (int on = 0; on < 2; on++) {
        free(sides[on].tokens);
        free(sides[on].text);
    }
    return status;
}

/* ---- verdict ------------------------------------------------------------------------------------ */

typedef struct verdict {
    json_t *checks;
    bool failed;
} verdict;

/* A threshold below 0 was not given. */
static void check(verdict *v, const char *name, const char *flag, double value, double threshold, bool at_most) {
    if (threshold < 0) {
        return;
    }
    const bool good = at_most ? value <= threshold : value >= threshold; /* NaN is not */
    v->failed = v->failed || !good;
    printf("%s: %s %.4f, %s %.4f\n", good ? "pass" : "FAIL", name, value, flag, threshold);
    json_array_append_new(v->checks,
                          json_pack("{ss sf sf sb}", "name", name, "value", value, "threshold", threshold, "pass", good));
}

static json_t *side_summary(const side_sums *s, double n) {
    return json_pack("{sf sf sf sf}", "prefill_tps", per_second(s->prompt_tokens, s->prefill_ms), "decode_tps",
                     per_second(s->decoded, s->decode_ms), "kv_bytes", s->kv_bytes / n, "kept_share", s->kept / n);
}

/* A mean with its error, where one is known. */
static eval_error_text with_error(eval_mean mean) {
    eval_error_text out;
    if (isfinite(mean.error)) {
        snprintf(out.text, sizeof out.text, "%.4f +- %.4f", mean.mean, mean.error);
    } else {
        snprintf(out.text, sizeof out.text, "%.4f", mean.mean);
    }
    return out;
}

static void report(ab_run *r) {
    eval *e = r->e;
    const eval_options *o = e->options;
    const double n = (double)r->n_prompts;
    const side_sums *off = &r->sums[0], *on = &r->sums[1];
    const eval_mean same = eval_mean_of(r->scores.same, r->n_prompts), rouge = eval_mean_of(r->scores.rouge, r->n_prompts);
    const eval_mean agreement = eval_mean_of(r->scores.agreement, r->n_prompts);
    const double speed_off = per_second(off->decoded, off->decode_ms), speed_on = per_second(on->decoded, on->decode_ms);
    const double speedup = speed_off > 0 ? speed_on / speed_off : 0;
    const double kv_share = off->kv_bytes > 0 ? on->kv_bytes / off->kv_bytes : 0;
    char seed[32] = "";
    if (r->sampling.temp > 0) {
        snprintf(seed, sizeof seed, " (seed %u)", r->sampling.seed);
    }
    printf("\n%zu sample%s%s, %.0f with the same output\nROUGE-L %s, tokens agree %s\n", r->n_prompts, r->n_prompts == 1 ? "" : "s",
           seed, same.mean * n, with_error(rouge).text, with_error(agreement).text);
    printf("decoding %.1f t/s off, %.1f on (%.2fx)\nKV cache %.1f MiB off, %.1f on (%.2f of it)\n", speed_off, speed_on, speedup,
           off->kv_bytes / n / 1048576.0, on->kv_bytes / n / 1048576.0, kv_share);
    if (r->n_left_out > 0) {
        printf("%zu prompts were too long and left out\n", r->n_left_out);
    }
    verdict v = {.checks = json_array()};
    check(&v, "exact_match", "--min-exact", same.mean, o->min_exact, false);
    check(&v, "rouge_l", "--min-rouge", rouge.mean, o->min_rouge, false);
    check(&v, "token_agreement", "--min-agreement", agreement.mean, o->min_agreement, false);
    check(&v, "speedup", "--min-speedup", speedup, o->min_speedup, false);
    check(&v, "kv_share", "--max-kv-share", kv_share, o->max_kv_share, true);
    const bool judged = json_array_size(v.checks) > 0;
    e->rejected = v.failed;
    json_object_update_new(e->result,
                           json_pack("{sI sI sf sf so sf so sf sf so so so so}", "seed", (json_int_t)r->sampling.seed, "left_out",
                                     (json_int_t)r->n_left_out, "exact_match", same.mean, "rouge_l", rouge.mean, "rouge_l_error",
                                     eval_error_json(rouge), "token_agreement", agreement.mean, "token_agreement_error",
                                     eval_error_json(agreement), "speedup", speedup, "kv_share", kv_share, "off",
                                     side_summary(off, n), "on", side_summary(on, n), "verdict",
                                     judged ? json_pack("{sb sO}", "pass", !v.failed, "checks", v.checks) : json_null(), "samples",
                                     json_incref(r->samples)));
    json_decref(v.checks);
}

/* ---- all ---------------------------------------------------------------------------------------- */

static dt_status begin(ab_run *r, dt_error *error) {
    const eval_options *o = r->e->options;
    dt_sampler *drawn = NULL;
    size_t n_bytes = 0;
    dt_status status = o->shared.grammar_file != NULL ? dt_read_file(o->shared.grammar_file, &r->grammar, &n_bytes, error) : DT_OK;
    if (status == DT_OK) {
        dt_shared_options_sampler(&o->shared, r->grammar, &r->sampling);
        status = dt_sampler_new(r->e->model, &r->sampling, &drawn, error); /* also tells what is wrong with a grammar */
    }
    if (status == DT_OK) {
        r->sampling.seed = dt_sampler_seed(drawn);
        status = prepare_prompts(r, error);
    }
    dt_sampler_free(drawn);
    r->scores.same = calloc(r->n_prompts + 1, sizeof(double));
    r->scores.rouge = calloc(r->n_prompts + 1, sizeof(double));
    r->scores.agreement = calloc(r->n_prompts + 1, sizeof(double));
    r->samples = json_array();
    if (status == DT_OK && (!r->scores.same || !r->scores.rouge || !r->scores.agreement || !r->samples)) {
        status = dt_app_fail(error, DT_ERR_MEMORY, "out of memory for the scores");
    }
    return status;
}

dt_status eval_ab(eval *e, dt_error *error) {
    ab_run r = {.e = e};
    dt_status status = begin(&r, error);
    if (status == DT_OK) {
        status = eval_tell_settings(e, error);
    }
    if (status == DT_OK) {
        puts("| line | prompt | same | ROUGE-L | agree | t/s off | t/s on | MiB off |    on |\n"
             "| ---: | -----: | ---- | ------: | ----: | ------: | -----: | ------: | ----: |");
    }
    for (size_t i = 0; i < r.n_prompts && status == DT_OK; i++) {
        status = measure_sample(&r, i, error);
    }
    dt_report_progress_end();
    if (status == DT_OK) {
        report(&r);
    }
    for (size_t i = 0; r.prompts != NULL && i < r.n_prompts; i++) {
        dt_free(r.prompts[i].tokens);
    }
    free(r.prompts);
    free(r.grammar);
    free(r.scores.same);
    free(r.scores.rouge);
    free(r.scores.agreement);
    json_decref(r.samples);
    return status;
}
