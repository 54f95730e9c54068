/*
 * deeptutor-eval needle: facts hidden in a text, asked for from the full cache and from the evicted one.
 *
 * Each sample takes a stretch of the haystack, puts "The special magic number for CITY is NNNNN." at seeded random depths, and asks
 * for each number with greedy decoding; all five digits must come back. `after`: the cache is evicted before any question is known,
 * and every question is put to a fork of that one evicted cache. `aware`: the question is the end of the prompt when eviction
 * happens.
 */
#include "eval.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MAX_NEEDLES 16
#define ANSWER_TOKENS 16
#define ANSWER_BYTES 256

static const char *const cities[] = {"Amsterdam", "Athens", "Bangkok",  "Berlin",  "Boston", "Cairo",   "Chicago",   "Dublin",
                                     "Geneva",    "Havana", "Helsinki", "Lisbon",  "London", "Madrid",  "Melbourne", "Moscow",
                                     "Nairobi",   "Oslo",   "Paris",    "Prague",  "Rome",   "Seattle", "Seoul",     "Shanghai",
                                     "Stockholm", "Sydney", "Tokyo",    "Toronto", "Vienna", "Warsaw",  "Zagreb",    "Zurich"};
#define N_CITIES ((int)(sizeof cities / sizeof cities[0]))

typedef struct token_list {
    int32_t *tokens;
    size_t n, capacity;
} token_list;

typedef struct needle {
    const char *city;
    int number;
    size_t at; /* token of the haystack before which it stands */
} needle;

typedef struct sample {
    needle needles[MAX_NEEDLES];
    size_t n;
} sample;

typedef struct needle_run {
    eval *e;
    uint64_t random;
    char *before, *after; /* what the chat template writes around the user's text, or "" */
    dt_sampler *sampler;
    json_t *samples; /* one array per setting */
    size_t n_asked, n_right_full, n_right[EVAL_MAX_SETTINGS];
    double kept[EVAL_MAX_SETTINGS];
} needle_run;

static uint32_t next_random(needle_run *r, uint32_t below) {
    r->random = r->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(((r->random >> 32) * below) >> 32);
}

static dt_status add_tokens(token_list *list, const int32_t *tokens, size_t n, dt_error *error) {
    if (list->n + n > list->capacity) {
        const size_t capacity = (list->n + n) * 2;
        int32_t *larger = realloc(list->tokens, capacity * sizeof *larger);
        if (larger == NULL) {
            return dt_app_fail(error, DT_ERR_MEMORY, "out of memory for %zu tokens", capacity);
        }
        list->tokens = larger;
        list->capacity = capacity;
    }
    if (n > 0) {
        memcpy(list->tokens + list->n, tokens, n * sizeof *tokens);
    }
    list->n += n;
    return DT_OK;
}

static dt_status add_text(const needle_run *r, token_list *list, const char *text, bool special, dt_error *error) {
    int32_t *tokens = NULL;
    size_t n = 0;
    dt_status status = dt_tokenize(r->e->model, text, strlen(text), list->n == 0, special, &tokens, &n, error);
    if (status == DT_OK) {
        status = add_tokens(list, tokens, n, error);
    }
    dt_free(tokens);
    return status;
}

/* ---- texts -------------------------------------------------------------------------------------- */

static void draw_needles(needle_run *r, sample *s) {
    const eval_options *o = r->e->options;
    s->n = (size_t)o->n_needles;
    for (size_t i = 0; i < s->n; i++) {
        bool taken = true;
        while (taken) {
            s->needles[i].city = cities[next_random(r, (uint32_t)N_CITIES)];
            taken = false;
            for (size_t j = 0; j < i; j++) {
                taken = taken || s->needles[j].city == s->needles[i].city;
            }
        }
        s->needles[i].number = (int)(10000 + next_random(r, 90000));
        /* spread evenly, each at a random place in its own stretch */
        const double stretch = (o->depth_high - o->depth_low) / (double)s->n;
        const double depth = o->depth_low + stretch * ((double)i + next_random(r, 1000000) * 1e-6);
        s->needles[i].at = (size_t)(depth * (double)o->n_context);
    }
}

/* The haystack with its needles, after what the template puts before the user's text. */
static dt_status write_context(needle_run *r, const sample *s, token_list *out, dt_error *error) {
    const size_t n = (size_t)r->e->options->n_context, room = r->e->n_text - n;
    const int32_t *haystack = r->e->text + (room > 0 ? next_random(r, (uint32_t)room) : 0);
    dt_status status = r->before[0] != 0 ? add_text(r, out, r->before, true, error) : DT_OK;
    size_t from = 0;
    for (size_t i = 0; i < s->n && status == DT_OK; i++) {
        char text[128];
        snprintf(text, sizeof text, " The special magic number for %s is %d. ", s->needles[i].city, s->needles[i].number);
        status = add_tokens(out, haystack + from, s->needles[i].at - from, error);
        from = s->needles[i].at;
        if (status == DT_OK) {
            status = add_text(r, out, text, false, error);
        }
    }
    return status == DT_OK ? add_tokens(out, haystack + from, n - from, error) : status;
}

static dt_status add_question(const needle_run *r, const needle *asked, token_list *out, dt_error *error) {
    char text[256];
    snprintf(text, sizeof text,
             r->e->options->form == 0 ? "\n\nThe special magic number for %s is"
                                      : "\n\nWhat is the special magic number for %s? Answer with the number only.",
             asked->city);
    dt_status status = add_text(r, out, text, false, error);
    if (status == DT_OK && r->after[0] != 0) {
        status = add_text(r, out, r->after, true, error);
    }
    return status;
}

/* What the template writes around a user's text. */
static dt_status find_template(needle_run *r, dt_error *error) {
    static const char mark[] = "HAYSTACK";
    char *text = NULL;
    if (r->e->options->form == 0) {
        r->before = calloc(1, 1);
        r->after = calloc(1, 1);
    } else {
        const dt_chat_message message = {.role = "user", .content = mark};
        const dt_status status = dt_chat_render(r->e->model, r->e->options->chat_template, &message, 1, true, &text, error);
        if (status != DT_OK) {
            return status;
        }
        char *at = strstr(text, mark);
        if (at == NULL) {
            dt_free(text);
            return dt_app_fail(error, DT_ERR_UNSUPPORTED, "the chat template does not repeat the user's text; use --form text");
        }
        *at = 0;
        r->before = strdup(text);
        r->after = strdup(at + sizeof mark - 1);
        dt_free(text);
    }
    return r->before != NULL && r->after != NULL ? DT_OK : dt_app_fail(error, DT_ERR_MEMORY, "out of memory");
}

/* ---- asking ------------------------------------------------------------------------------------- */

typedef struct answer {
    const dt_model *model;
    char text[ANSWER_BYTES];
    size_t n;
} answer;

static bool on_token(int32_t token, void *user) {
    answer *a = user;
    char bytes[64];
    const size_t n = dt_token_bytes(a->model, token, false, bytes, sizeof bytes);
    if (n <= sizeof bytes && a->n + n < sizeof a->text) {
        memcpy(a->text + a->n, bytes, n);
        a->n += n;
        a->text[a->n] = 0;
    }
    return true;
}

/* Goes on with tokens[n] in `session` and tells whether the number comes back. */
static dt_status ask(const needle_run *r, dt_session *session, const int32_t *tokens, size_t n, const needle *asked, bool *right,
                     answer *a, dt_error *error) {
    char digits[16];
    snprintf(digits, sizeof digits, "%d", asked->number);
    *a = (answer){.model = r->e->model};
    dt_status status = dt_session_sync(session, tokens, n, NULL, NULL, NULL, error);
    if (status == DT_OK) {
        status = dt_generate(session, r->sampler, ANSWER_TOKENS, on_token, a, NULL, error);
    }
    *right = status == DT_OK && strstr(a->text, digits) != NULL;
    return status;
}

static void note(needle_run *r, size_t setting, size_t index, const needle *asked, bool full, bool right, const answer *a) {
    json_t *list = json_array_get(r->samples, setting);
    json_t *text = json_string(a->text);
    json_array_append_new(list, json_pack("{sI ss si sf sb sb so}", "sample", (json_int_t)index, "city", asked->city, "number",
                                          asked->number, "depth", (double)asked->at / (double)r->e->options->n_context, "full",
                                          full, "right", right, "answer", text != NULL ? text : json_null()));
}

/* One question about the context that `base` has read. evicted[n_settings]: NULL where the question comes before eviction. */
static dt_status ask_all(needle_run *r, size_t index, const needle *asked, const token_list *context, dt_session *base,
                         dt_session *const *evicted, dt_error *error) {
    eval *e = r->e;
    token_list prompt = {0};
    dt_session *full = NULL, *fork = NULL;
    bool right_full = false;
    answer a;
    dt_status status = add_tokens(&prompt, context->tokens, context->n, error);
    if (status == DT_OK) {
        status = add_question(r, asked, &prompt, error);
    }
    if (status == DT_OK) {
        status = dt_session_fork(base, NULL, DT_EVICT_ALWAYS, &full, error);
    }
    if (status == DT_OK) {
        status = ask(r, full, prompt.tokens, prompt.n, asked, &right_full, &a, error);
    }
    r->n_right_full += right_full;
    r->n_asked++;
    dt_session *aware = NULL;
    if (status == DT_OK && e->options->question == 1) {
        status = dt_session_fork(base, e->observed, DT_EVICT_HELD, &aware, error);
        status = status == DT_OK ? dt_session_sync(aware, prompt.tokens, prompt.n, NULL, NULL, NULL, error) : status;
    }
    for (size_t i = 0; i < e->n_settings && status == DT_OK; i++) {
        bool right = false;
        status = aware != NULL ? eval_evicted_session(e, aware, &e->settings[i], &fork, error)
                               : dt_session_fork(evicted[i], e->settings[i].eviction, e->settings[i].evict, &fork, error);
        if (status == DT_OK && aware != NULL) {
            r->kept[i] += eval_kept_share(e, fork);
        }
        if (status == DT_OK) {
            status = ask(r, fork, prompt.tokens, prompt.n, asked, &right, &a, error);
        }
        if (status == DT_OK) {
            eval_note_evicted(&e->settings[i], fork);
        }
        dt_session_free(fork);
        fork = NULL;
        if (status == DT_OK) {
            r->n_right[i] += right;
            note(r, i, index, asked, right_full, right, &a);
        }
    }
    dt_session_free(aware);
    dt_session_free(full);
    free(prompt.tokens);
    return status;
}

static dt_status measure_sample(needle_run *r, size_t index, dt_error *error) {
    eval *e = r->e;
    sample s;
    token_list context = {0};
    dt_session *base = NULL, *evicted[EVAL_MAX_SETTINGS] = {0};
    draw_needles(r, &s);
    const int64_t n_steps = (int64_t)s.n + 1;
    int64_t progress[] = {(int64_t)index * n_steps, e->options->n_samples * n_steps};
    dt_status status = write_context(r, &s, &context, error);
    if (status == DT_OK) {
        status = eval_base_session(e, &base, error);
    }
    if (status == DT_OK) {
        status = dt_session_sync(base, context.tokens, context.n, eval_on_prefill, progress, NULL, error);
    }
    for (size_t i = 0; i < e->n_settings && status == DT_OK && e->options->question == 0; i++) {
        status = eval_evicted_session(e, base, &e->settings[i], &evicted[i], error);
        if (status == DT_OK) {
            r->kept[i] += eval_kept_share(e, evicted[i]) * (double)s.n; /* counted once per question */
            eval_note_evicted(&e->settings[i], evicted[i]);
        }
    }
    for (size_t i = 0; i < s.n && status == DT_OK; i++) {
        status = ask_all(r, index, &s.needles[i], &context, base, evicted, error);
        if (status == DT_OK && !eval_progress(progress[0] + (int64_t)i + 2, progress[1])) {
            status = dt_app_fail(error, DT_ERR_CANCELLED, "stopped");
        }
    }
    for (size_t i = 0; i < e->n_settings; i++) {
        dt_session_free(evicted[i]);
    }
    dt_session_free(base);
    free(context.tokens);
    return status;
}

static void report(needle_run *r) {
    eval *e = r->e;
    const double n = (double)r->n_asked;
    json_t *rows = json_array();
    eval_print_name(e, "setting");
    puts("|   kept | found |  of | full cache | accuracy |");
    eval_print_name(e, NULL);
    puts("| -----: | ----: | --: | ---------: | -------: |");
    for (size_t i = 0; i < e->n_settings; i++) {
        const double share = (double)r->n_right[i] / n;
        eval_print_name(e, e->settings[i].name);
        printf("| %6.4f | %5zu | %3zu | %10zu | %8.3f |\n", r->kept[i] / n, r->n_right[i], r->n_asked, r->n_right_full, share);
        const char *name = e->settings[i].name;
        json_array_append_new(rows, json_pack("{ss* sf sf sf sf sO}", "name", name, "budget_share", e->settings[i].kept, "accuracy",
                                              share, "accuracy_full", (double)r->n_right_full / n, "kept_share", r->kept[i] / n,
                                              "samples", json_array_get(r->samples, i)));
    }
    eval_set_result(e, rows);
}

dt_status eval_needle(eval *e, dt_error *error) {
    const size_t n = (size_t)e->options->n_context;
    if (e->n_text < n) {
        return dt_app_fail(error, DT_ERR_ARGUMENT, "a context of %zu tokens needs a longer text: this one has %zu", n, e->n_text);
    }
    needle_run r = {.e = e, .random = (uint64_t)e->options->seed * 2 + 1, .samples = json_array()};
    for (size_t i = 0; i < e->n_settings; i++) {
        json_array_append_new(r.samples, json_array());
    }
    dt_sampler_params params = dt_sampler_default_params();
    params.temp = 0;
    dt_status status = find_template(&r, error);
    if (status == DT_OK) {
        status = dt_sampler_new(e->model, &params, &r.sampler, error);
    }
    if (status == DT_OK) {
        status = eval_tell_settings(e, error);
    }
    for (size_t i = 0; i < (size_t)e->options->n_samples && status == DT_OK; i++) {
        status = measure_sample(&r, i, error);
    }
    dt_report_progress_end();
    if (status == DT_OK) {
        report(&r);
    }
    dt_sampler_free(r.sampler);
    json_decref(r.samples);
    free(r.before);
    free(r.after);
    return status;
}
