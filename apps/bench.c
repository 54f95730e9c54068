/*
 * ./deeptutor-bench: speed by context depth.
 *
 * For every depth, with TLC off and, where asked for, on: reading the whole prompt up to there, reading n_prompt tokens on top
 * of it, and decoding. A repeat goes back to the depth where that is possible (nothing evicted) and goes on from where it is
 * where it is not (an evicted cache stays at its size). Rows hold the median and the extremes of the repeats; the bytes that a
 * decode step has to read over the bandwidth measured at the start give the bound. With --parallel, several conversations of the
 * depth are decoded in one batch, and tokens per second are those of all.
 *
 * Invariant: nothing of a measurement is printed before it is whole; stdout holds the table and nothing else.
 */
#define _POSIX_C_SOURCE 200809L
#include "bandwidth.h"
#include "fail.h"
#include "guard.h"
#include "json_parts.h"
#include "options.h"
#include "report.h"

#include <stdlib.h>
#include <string.h>

#define MAX_DEPTHS 32
#define MAX_REPEATS 64
#define MAX_ROWS (MAX_DEPTHS * 6)
#define MAX_PARALLEL 256

typedef struct bench_options {
    dt_shared_options shared; /* first: the shared tables' offsets */
    int64_t n_prompt, n_decode, repeats, output, fill, parallel;
    const char *depths;
    bool compare;
} bench_options;

#define AT(member) offsetof(bench_options, member)

static const dt_option bench_rows[] = {
    {"-p, --n-prompt", "N", DT_OPTION_INT, AT(n_prompt), 0, 1 << 20, "tokens read on top of each depth; 0 = skip (512)"},
    {"-n, --n-gen", "N", DT_OPTION_INT, AT(n_decode), 0, 1 << 20, "tokens decoded at each depth; 0 = skip (64)"},
    {"-d, --n-depth", "N,N", DT_OPTION_TEXT, AT(depths), 0, 0, "depths, in tokens, ascending (0)"},
    {"-r, --repetitions", "N", DT_OPTION_INT, AT(repeats), 1, MAX_REPEATS, "repeats of each measurement (3)"},
    {"-o, --output", "md|csv|json", DT_OPTION_CHOICE, AT(output), 0, 0, "what is written to stdout (md)"},
    {"--fill", "prefill|synthetic", DT_OPTION_CHOICE, AT(fill), 0, 0,
     "how a depth is reached: by reading tokens, or by random keys and values, which takes no time but evicts at random (prefill)"},
    {"--parallel", "N", DT_OPTION_INT, AT(parallel), 1, MAX_PARALLEL,
     "conversations decoded in one batch, each at the depth; with more than one -p is left out (1)"},
    {"--no-compare", NULL, DT_OPTION_OFF, AT(compare), 0, 0, "with --cache-eviction: leave out the rows with TLC off"},
};
static const dt_option_group bench_group = {"Benchmark", bench_rows, sizeof bench_rows / sizeof bench_rows[0]};
static const dt_option_group *const groups[] = {&bench_group, &dt_model_options, &dt_eviction_options, &dt_output_options};
#define N_GROUPS (sizeof groups / sizeof groups[0])

typedef struct bench_row {
    const char *what; /* "prompt", "prefill", "decode" */
    bool eviction, synthetic;
    int64_t depth, n_tokens, n_sequences;
    double median, low, high; /* tokens per second */
    size_t n_samples;         /* of which they are; a long prompt is read once, however often the rest is repeated */
    uint64_t kv_bytes, kv_bytes_full, step_bytes;
    double bound;                         /* tokens per second that reading step_bytes allows; 0 = not a decode row */
    double attention, evicting, sampling; /* shares of the time */
} bench_row;

typedef struct bench {
    const bench_options *options;
    dt_model *model;
    dt_eviction *eviction;
    double bandwidth;
    int64_t depths[MAX_DEPTHS];
    size_t n_depths;
    int32_t *tokens; /* random, as many as the longest context */
    size_t n_tokens;
    bench_row rows[MAX_ROWS];
    size_t n_rows;
} bench;

/* ---- what is asked for -------------------------------------------------------------------------- */

static bool parse_depths(const char *text, bench *b, char *message, size_t capacity) {
    char number[32];
    int64_t last = -1;
    while (*text != 0) {
        const size_t n = strcspn(text, ",");
        int64_t depth = -1;
        if (n > 0 && n < sizeof number && b->n_depths < MAX_DEPTHS) {
            memcpy(number, text, n);
            number[n] = 0;
            if (dt_parse_int(number, &depth) && depth > last && depth <= 1 << 24) {
                b->depths[b->n_depths++] = last = depth;
                text += n + (text[n] == ',' && text[n + 1] != 0); /* an end without a number is told */
                continue;
            }
        }
        snprintf(message, capacity, "-d needs at most %d ascending numbers, such as 0,4096,8192, not '%.60s'", MAX_DEPTHS,
                 b->options->depths);
        return false;
    }
    if (b->n_depths == 0) {
        snprintf(message, capacity, "-d needs at least one depth");
        return false;
    }
    return true;
}

/* What could only end in a table without rows, or after measuring for nothing. */
static bool check_amounts(const bench_options *o, const bench *b, char *message, size_t capacity) {
    const int64_t deepest = b->depths[b->n_depths - 1], more = o->n_prompt > o->n_decode ? o->n_prompt : o->n_decode;
    if (o->n_decode == 0 && (o->parallel > 1 || (o->n_prompt == 0 && deepest == 0))) {
        snprintf(message, capacity, "there is nothing to measure; give %s", o->parallel > 1 ? "-n" : "-n, -p or a depth with -d");
        return false;
    }
    if (!o->compare && !o->shared.eviction) {
        snprintf(message, capacity, "--no-compare leaves out what --cache-eviction is compared with; give that too");
        return false;
    }
    if (o->compare && o->shared.n_ctx > 0 && deepest + more > o->shared.n_ctx) {
        snprintf(message, capacity, "a depth of %lld and %lld tokens more don't fit into a context of %lld (-c)",
                 (long long)deepest, (long long)more, (long long)o->shared.n_ctx);
        return false;
    }
    return true;
}

/* Room for the deepest context and all repeats on top of it: where tokens are evicted there is no going back. */
static size_t longest_context(const bench *b) {
    const bench_options *o = b->options;
    return (size_t)(b->depths[b->n_depths - 1] + (o->n_prompt + o->n_decode + 1) * (o->repeats + 1));
}

/* Each repeat goes back to the depth. */
static int32_t longest_whole_context(const bench *b) {
    const bench_options *o = b->options;
    return (int32_t)(b->depths[b->n_depths - 1] + (o->n_prompt > o->n_decode ? o->n_prompt : o->n_decode) + 1);
}

static dt_status make_tokens(bench *b, dt_error *error) {
    b->n_tokens = longest_context(b);
    b->tokens = malloc(b->n_tokens * sizeof *b->tokens);
    if (b->tokens == NULL) {
        snprintf(error->message, sizeof error->message, "out of memory for %zu tokens", b->n_tokens);
        return error->code = DT_ERR_MEMORY;
    }
    uint64_t state = 42; /* the same text each run */
    const uint64_t n_vocab = (uint64_t)dt_model_get_info(b->model)->n_vocab;
    for (size_t i = 0; i < b->n_tokens; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        b->tokens[i] = (int32_t)((state >> 33) % n_vocab);
    }
    return DT_OK;
}

/* ---- measuring ---------------------------------------------------------------------------------- */

typedef struct samples {
    double tps[MAX_REPEATS];
    size_t n;
    int64_t n_tokens;
    double total_ms, attention_ms, eviction_ms, sampling_ms;
} samples;

static int compare_doubles(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* stats: of the conversation, or sums over all that were measured together. */
static void add_row(bench *b, const char *what, bool eviction, int64_t depth, samples *s, const dt_session_stats *stats,
                    int64_t n_sequences) {
    qsort(s->tps, s->n, sizeof s->tps[0], compare_doubles);
    const double middle = s->n % 2 == 1 ? s->tps[s->n / 2] : (s->tps[s->n / 2 - 1] + s->tps[s->n / 2]) / 2;
    const bool decode = strcmp(what, "decode") == 0;
    bench_row *row = &b->rows[b->n_rows++];
    *row = (bench_row){
        .what = what,
        .eviction = eviction,
        .synthetic = b->options->fill == 1 && depth > 0,
        .depth = depth,
        .n_tokens = s->n_tokens,
        .n_sequences = n_sequences,
        .median = middle,
        .low = s->tps[0],
        .high = s->tps[s->n - 1],
        .n_samples = s->n,
        .kv_bytes = stats->kv_bytes,
        .kv_bytes_full = stats->kv_bytes_full,
        .attention = s->attention_ms / s->total_ms,
        .evicting = s->eviction_ms / s->total_ms,
        .sampling = s->sampling_ms / s->total_ms,
    };
    if (decode) {
        row->step_bytes = dt_model_get_info(b->model)->step_weight_bytes + stats->kv_step_bytes;
        row->bound = b->bandwidth / (double)row->step_bytes * (double)n_sequences;
    }
}

static void add_row_of(bench *b, const char *what, bool eviction, int64_t depth, samples *s, const dt_session *session) {
    dt_session_stats stats;
    dt_session_get_stats(session, &stats);
    add_row(b, what, eviction, depth, s, &stats, 1);
}

typedef struct reading {
    const char *what;
    const dt_session *session;
} reading;

static bool show_progress(int64_t done, int64_t total, void *user) {
    const reading *r = user;
    dt_report_progress(r->what, done, total, r->session);
    return true;
}

/* Adds the session's times since `before` to the samples. */
static void add_times(samples *s, const dt_session *session, const dt_session_stats *before, double ms) {
    dt_session_stats now;
    dt_session_get_stats(session, &now);
    s->total_ms += ms;
    s->attention_ms += now.attention_ms - before->attention_ms;
    s->eviction_ms += now.eviction_ms - before->eviction_ms;
}

/* The conversation becomes the first n of the bench's tokens. */
static dt_status read_tokens(const bench *b, dt_session *session, int64_t n, samples *s, dt_error *error) {
    dt_session_stats before;
    dt_session_get_stats(session, &before);
    reading r = {.what = "reading", .session = session};
    dt_sync_result result;
    const dt_status status = dt_session_sync(session, b->tokens, (size_t)n, show_progress, &r, &result, error);
    dt_report_progress_end();
    if (status == DT_OK && s != NULL) {
        add_times(s, session, &before, result.prefill_ms);
        s->tps[s->n++] = (double)result.computed_tokens * 1000.0 / result.prefill_ms;
        s->n_tokens = result.computed_tokens;
    }
    return status;
}

static int64_t context_now(const dt_session *session) {
    size_t n;
    dt_session_tokens(session, &n);
    return (int64_t)n;
}

/* Back to `depth` tokens where nothing was evicted; where something was, on from where it is. */
static dt_status return_to(const bench *b, dt_session *session, int64_t depth, bool eviction, dt_error *error) {
    return eviction || depth == 0 ? DT_OK : read_tokens(b, session, depth, NULL, error);
}

static dt_status measure_prefill(bench *b, dt_session *session, int64_t depth, bool eviction, dt_error *error) {
    samples s = {0};
    dt_status status = DT_OK;
    for (int64_t i = 0; status == DT_OK && i < b->options->repeats; i++) {
        if (depth == 0) {
            /* a conversation that begins otherwise: nothing is reused */
            b->tokens[0] = b->tokens[0] == 1 ? 2 : 1;
            status = read_tokens(b, session, b->options->n_prompt, &s, error);
            continue;
        }
        const int64_t from = eviction ? context_now(session) : depth;
        status = return_to(b, session, depth, eviction, error);
        if (status == DT_OK) {
            status = read_tokens(b, session, from + b->options->n_prompt, &s, error);
        }
    }
    if (status == DT_OK) {
        add_row_of(b, "prefill", eviction, depth, &s, session);
    }
    return status;
}

static dt_status decode_once(const bench *b, dt_session *session, dt_sampler *sampler, samples *s, dt_error *error) {
    dt_session_stats before;
    dt_session_get_stats(session, &before);
    const double start = 1e3 * dt_seconds_now();
    double sampling_ms = 0;
    dt_status status = DT_OK;
    for (int64_t i = 0; status == DT_OK && i < b->options->n_decode; i++) {
        int32_t token;
        const double sampling = 1e3 * dt_seconds_now();
        status = dt_sampler_sample(sampler, dt_session_logits(session), &token, NULL, error);
        sampling_ms += 1e3 * dt_seconds_now() - sampling;
        if (status == DT_OK) {
            /* the bench's own token, so that the next repeat finds the same text */
            status = dt_session_append(session, b->tokens[context_now(session)], error);
        }
    }
    const double ms = 1e3 * dt_seconds_now() - start;
    if (status == DT_OK) {
        add_times(s, session, &before, ms);
        s->sampling_ms += sampling_ms;
        s->tps[s->n++] = (double)b->options->n_decode * 1000.0 / ms;
        s->n_tokens = b->options->n_decode;
    }
    return status;
}

static dt_status measure_decode(bench *b, dt_session *session, int64_t depth, bool eviction, dt_error *error) {
    dt_sampler_params params = dt_sampler_default_params();
    params.temp = 0;
    dt_sampler *sampler = NULL;
    samples s = {0};
    dt_status status = dt_sampler_new(b->model, &params, &sampler, error);
    for (int64_t i = 0; status == DT_OK && i < b->options->repeats; i++) {
        status = depth == 0 ? read_tokens(b, session, 1, NULL, error) : return_to(b, session, depth, eviction, error);
        if (status == DT_OK) {
            status = decode_once(b, session, sampler, &s, error);
        }
    }
    dt_sampler_free(sampler);
    if (status == DT_OK) {
        add_row_of(b, "decode", eviction, depth, &s, session);
    }
    return status;
}

static dt_status measure_depth(bench *b, dt_session *session, int64_t depth, bool eviction, dt_error *error) {
    dt_status status = DT_OK;
    if (depth > 0 && b->options->fill == 1) {
        status = dt_session_fill_random(session, depth, error);
        if (status == DT_OK) { /* a decode step needs logits to begin with */
            memcpy(b->tokens, dt_session_tokens(session, &(size_t){0}), (size_t)depth * sizeof *b->tokens);
            status = dt_session_append(session, b->tokens[depth], error);
        }
    } else if (depth > 0) {
        samples s = {0};
        status = read_tokens(b, session, depth, &s, error);
        if (status == DT_OK) {
            add_row_of(b, "prompt", eviction, depth, &s, session);
        }
    }
    if (status == DT_OK && b->options->n_decode > 0) {
        status = measure_decode(b, session, depth, eviction, error);
    }
    if (status == DT_OK && b->options->n_prompt > 0) {
        status = measure_prefill(b, session, depth, eviction, error);
    }
    return status;
}

/* ---- several at once ---- */

typedef struct crowd {
    dt_group *group;
    dt_session *sessions[MAX_PARALLEL];
    dt_step steps[MAX_PARALLEL];
    size_t n;
} crowd;

static dt_session_stats crowd_stats(const crowd *c) {
    dt_session_stats sum = {0}, one = {0};
    dt_group_stats group;
    for (size_t i = 0; i < c->n; i++) {
        dt_session_get_stats(c->sessions[i], &one);
        sum.kv_bytes_full += one.kv_bytes_full;
        sum.kv_step_bytes += one.kv_step_bytes;
        sum.eviction_ms += one.eviction_ms;
    }
    dt_group_get_stats(c->group, &group);
    sum.kv_bytes = group.kv_bytes;
    sum.attention_ms = one.attention_ms; /* of the batches, which each of them was part of */
    return sum;
}

static dt_status fill_crowd(bench *b, crowd *c, int64_t depth, bool eviction, dt_error *error) {
    samples s = {.n = 1, .n_tokens = depth};
    const double start = 1e3 * dt_seconds_now();
    dt_status status = DT_OK;
    for (size_t i = 0; status == DT_OK && i < c->n; i++) {
        b->tokens[0] = (int32_t)i; /* another conversation each */
        if (depth > 0 && b->options->fill == 1) {
            status = dt_session_fill_random(c->sessions[i], depth, error);
        } else {
            samples one = {0};
            status = read_tokens(b, c->sessions[i], depth > 0 ? depth : 1, &one, error);
            s.attention_ms += one.attention_ms;
            s.eviction_ms += one.eviction_ms;
        }
    }
    if (status == DT_OK && depth > 0 && b->options->fill == 0) {
        s.total_ms = 1e3 * dt_seconds_now() - start;
        s.tps[0] = (double)c->n * (double)depth * 1000.0 / s.total_ms;
        const dt_session_stats stats = crowd_stats(c);
        add_row(b, "prompt", eviction, depth, &s, &stats, (int64_t)c->n);
    }
    return status;
}

static dt_status decode_crowd(const bench *b, crowd *c, dt_sampler *sampler, samples *s, dt_error *error) {
    const dt_session_stats before = crowd_stats(c);
    const double start = 1e3 * dt_seconds_now();
    dt_status status = DT_OK;
    for (int64_t at = 0; status == DT_OK && at < b->options->n_decode; at++) {
        const double sampling = 1e3 * dt_seconds_now();
        for (size_t i = 0; i < c->n; i++) {
            int32_t token;
            const float *logits = dt_session_logits(c->sessions[i]);
            if (logits != NULL && status == DT_OK) { /* there are none after random filling */
                status = dt_sampler_sample(sampler, logits, &token, NULL, error);
            }
            c->steps[i] = (dt_step){.session = c->sessions[i], .tokens = &b->tokens[context_now(c->sessions[i])], .n = 1};
        }
        s->sampling_ms += 1e3 * dt_seconds_now() - sampling;
        status = status == DT_OK ? dt_group_step(c->group, c->steps, c->n, error) : status;
    }
    const dt_session_stats now = crowd_stats(c);
    const double ms = 1e3 * dt_seconds_now() - start;
    s->total_ms += ms;
    s->attention_ms += now.attention_ms - before.attention_ms;
    s->eviction_ms += now.eviction_ms - before.eviction_ms;
    s->tps[s->n++] = (double)b->options->n_decode * (double)c->n * 1000.0 / ms;
    s->n_tokens = b->options->n_decode;
    return status;
}

/* Conversations go on from where they are: what a repeat adds is little beside the depth. */
static dt_status measure_crowd(bench *b, crowd *c, int64_t depth, bool eviction, dt_error *error) {
    dt_sampler_params params = dt_sampler_default_params();
    params.temp = 0;
    dt_sampler *sampler = NULL;
    samples s = {0};
    dt_status status = dt_sampler_new(b->model, &params, &sampler, error);
    status = status == DT_OK ? fill_crowd(b, c, depth, eviction, error) : status;
    for (int64_t i = 0; status == DT_OK && i < b->options->repeats && b->options->n_decode > 0; i++) {
        status = decode_crowd(b, c, sampler, &s, error);
    }
    dt_sampler_free(sampler);
    if (status == DT_OK && s.n > 0) {
        const dt_session_stats stats = crowd_stats(c);
        add_row(b, "decode", eviction, depth, &s, &stats, (int64_t)c->n);
    }
    return status;
}

static dt_status measure_parallel(bench *b, const dt_session_params *params, int64_t depth, bool eviction, dt_error *error) {
    static crowd c;
    c = (crowd){.group = NULL};
    dt_session_params in_group = *params;
    const dt_group_params group = {.n_threads = params->n_threads,
                                   .n_threads_batch = params->n_threads_batch,
                                   .kernel = params->kernel,
                                   .kv_memory = params->kv_memory};
    dt_status status = dt_group_new(b->model, &group, &c.group, error);
    in_group.group = c.group;
    in_group.kv_memory = 0; /* the limit is that of all together */
    for (; status == DT_OK && c.n < (size_t)b->options->parallel; c.n += status == DT_OK) {
        status = dt_session_new(b->model, &in_group, &c.sessions[c.n], error);
    }
    status = status == DT_OK ? measure_crowd(b, &c, depth, eviction, error) : status;
    for (size_t i = 0; i < c.n; i++) {
        dt_session_free(c.sessions[i]);
    }
    dt_group_free(c.group);
    return status;
}

/* ---- all ---- */

static dt_status measure_all(bench *b, dt_error *error) {
    dt_status status = DT_OK;
    for (int on = b->eviction != NULL && !b->options->compare; status == DT_OK && on <= (b->eviction != NULL); on++) {
        for (size_t i = 0; status == DT_OK && i < b->n_depths; i++) {
            dt_session_params params;
            dt_session *session = NULL;
            dt_shared_options_session(&b->options->shared, &params);
            params.n_ctx = params.n_ctx > 0 ? params.n_ctx : on ? (int32_t)b->n_tokens : longest_whole_context(b);
            params.eviction = on ? b->eviction : NULL;
            params.n_snapshots = -1;
            if (b->options->parallel > 1) {
                status = measure_parallel(b, &params, b->depths[i], on != 0, error);
                continue;
            }
            dt_report_sessions(b->options->shared.kv_memory > 0); /* what else it tells of memory, the table does */
            status = dt_session_new(b->model, &params, &session, error);
            dt_report_sessions(false); /* that they are rewound for each repeat */
            if (status == DT_OK) {
                status = measure_depth(b, session, b->depths[i], on != 0, error);
            }
            dt_session_free(session);
        }
    }
    return status;
}

/* ---- telling ------------------------------------------------------------------------------------ */

/* The length of the name, "decode 64x2". */
static int name_test(const bench_row *r, char *out, size_t capacity) {
    return r->n_sequences > 1 ? snprintf(out, capacity, "%s %lldx%lld", r->what, (long long)r->n_tokens, (long long)r->n_sequences)
                              : snprintf(out, capacity, "%s %lld", r->what, (long long)r->n_tokens);
}

/* Eighty columns wide for all but the longest numbers; what has no room is in the CSV and the JSON. */
static void print_markdown(const bench *b) {
    const dt_model_info *info = dt_model_get_info(b->model);
    printf("%s %s, %d layers, %.2f GB of weights; read bandwidth %.1f GB/s\n%s\n", info->architecture, info->weight_type,
           info->n_layers, (double)info->weight_bytes / 1e9, b->bandwidth / 1e9,
           b->options->fill == 1 ? "depths filled at random\n" : "");
    int width = 13; /* of the column that may need more room, and of the line beneath its name */
    char test[64];
    for (size_t i = 0; i < b->n_rows; i++) {
        const int length = name_test(&b->rows[i], test, sizeof test);
        width = length > width ? length : width;
    }
    printf("| depth | TLC | %-*s |     t/s |   +- | KV MiB | attn | evict | bound |\n", width, "test");
    printf("| ----: | --- | %.*s | ------: | ---: | -----: | ---: | ----: | ----: |\n", width,
           "----------------------------------------------------------------");
    for (size_t i = 0; i < b->n_rows; i++) {
        const bench_row *r = &b->rows[i];
        char bound[16] = "", spread[16] = "";
        name_test(r, test, sizeof test);
        if (r->bound > 0) {
            snprintf(bound, sizeof bound, "%.0f %%", r->median / r->bound * 100);
        }
        if (r->n_samples > 1) {
            snprintf(spread, sizeof spread, "%.0f %%", (r->high - r->low) / r->median * 50);
        }
        printf("| %5lld | %-3s | %-*s | %7.*f | %4s | %6.1f | %2.0f %% | %3.*f %% | %5s |\n", (long long)r->depth,
               r->eviction ? "on" : "off", width, test, r->median < 1e5 ? 1 : 0, r->median, spread, (double)r->kv_bytes / 1048576.0,
               r->attention * 100, r->evicting < 0.0995 ? 1 : 0, r->evicting * 100, bound);
    }
    printf("\nt/s: median, +- half of what lies between slowest and fastest, empty where it\n"
           "was measured once, as the prompt up to a depth is; attn, evict: shares of the\n"
           "time; bound: how much of the speed at which the machine reads weights and cache;\n"
           "-o csv has more.\n");
}

static void print_csv(const bench *b) {
    printf(
        "depth,fill,eviction,test,tokens,tps,tps_low,tps_high,kv_bytes,kv_bytes_full,attention_share,eviction_share,sampling_share,"
        "step_bytes,bound_tps,read_bandwidth,sequences\n");
    for (size_t i = 0; i < b->n_rows; i++) {
        const bench_row *r = &b->rows[i];
        printf("%lld,%s,%s,%s,%lld,%.2f,%.2f,%.2f,%llu,%llu,%.4f,%.4f,%.4f,%llu,%.2f,%.0f,%lld\n", (long long)r->depth,
               r->synthetic ? "synthetic" : "prefill", r->eviction ? "on" : "off", r->what, (long long)r->n_tokens, r->median,
               r->low, r->high, (unsigned long long)r->kv_bytes, (unsigned long long)r->kv_bytes_full, r->attention, r->evicting,
               r->sampling, (unsigned long long)r->step_bytes, r->bound, b->bandwidth, (long long)r->n_sequences);
    }
}

static json_t *row_json(const bench_row *r) {
    return json_pack("{sI ss sb ss sI sI sf sf sf sI sI sf sf sf sI sf}", "depth", (json_int_t)r->depth, "fill",
                     r->synthetic ? "synthetic" : "prefill", "eviction", r->eviction, "test", r->what, "tokens",
                     (json_int_t)r->n_tokens, "sequences", (json_int_t)r->n_sequences, "tps", r->median, "tps_low", r->low,
                     "tps_high", r->high, "kv_bytes", (json_int_t)r->kv_bytes, "kv_bytes_full", (json_int_t)r->kv_bytes_full,
                     "attention_share", r->attention, "eviction_share", r->evicting, "sampling_share", r->sampling, "step_bytes",
                     (json_int_t)r->step_bytes, "bound_tps", r->bound);
}

/* False: out of memory. */
static bool print_json(const bench *b) {
    const dt_model_info *info = dt_model_get_info(b->model);
    json_t *rows = json_array();
    for (size_t i = 0; i < b->n_rows; i++) {
        dt_json_append(&rows, row_json(&b->rows[i]));
    }
    json_t *all =
        json_pack("{so ss ss sI sf so}", "model", dt_json_text(b->options->shared.model), "arch", info->architecture, "weight_type",
                  info->weight_type, "weight_bytes", (json_int_t)info->weight_bytes, "read_bandwidth", b->bandwidth, "rows", rows);
    char *text = dt_json_dump(all, JSON_INDENT(2));
    json_decref(all);
    if (text != NULL) {
        printf("%s\n", text);
    }
    free(text);
    return text != NULL;
}

static int run(void *user) {
    bench *b = user;
    const bench_options *o = b->options;
    dt_error error = {0};
    dt_model_params model_params;
    dt_shared_options_model(&o->shared, &model_params);
    model_params.no_tokenizer = true;
    bool measuring = false;
    dt_status status = dt_model_open(o->shared.model, &model_params, &b->model, &error);
    if (status == DT_OK) {
        status = dt_shared_options_eviction(&o->shared, b->model, &b->eviction, &error);
    }
    if (status == DT_OK && b->eviction != NULL) {
        status = dt_report_eviction(b->eviction, "", &error);
    }
    if (status == DT_OK) {
        status = make_tokens(b, &error);
    }
    if (status == DT_OK) {
        dt_session_params params;
        dt_shared_options_session(&o->shared, &params);
        b->bandwidth = dt_read_bandwidth(params.n_threads > 0 ? params.n_threads : dt_default_threads(),
                                         dt_model_get_info(b->model)->step_weight_bytes);
        measuring = true;
        status = measure_all(b, &error);
    }
    if (status == DT_OK) {
        if (o->output == 2 && !print_json(b)) {
            status = dt_app_fail(&error, DT_ERR_MEMORY, "out of memory for the table");
        } else if (o->output != 2) {
            (o->output == 0 ? print_markdown : print_csv)(b);
        }
        const dt_status written = dt_report_flush_table(&error);
        status = written != DT_OK ? written : status;
    }
    /* a session's settings are looked at when it is made, for each depth */
    const bool usage =
        b->model != NULL && (!measuring || status == DT_ERR_ARGUMENT || status == DT_ERR_CONFIG || status == DT_ERR_LIMIT);
    const int exit_code = status == DT_OK ? 0 : dt_report_failure(&error, usage);
    free(b->tokens);
    dt_eviction_free(b->eviction);
    dt_model_close(b->model);
    return exit_code;
}

int main(int argc, char **argv) {
    char message[512];
    static bench b;
    static bench_options o = {.n_prompt = 512, .n_decode = 64, .repeats = 3, .depths = "0", .parallel = 1, .compare = true};
    dt_shared_options_init(&o.shared);
    b.options = &o;
    int exit_code;
    if (!dt_options_begin(groups, N_GROUPS, argc, argv, &o, "-m FILE [-d 0,4096,8192] [flags]", &exit_code)) {
        return exit_code;
    }
    if (!dt_shared_options_check(&o.shared, message, sizeof message) || !parse_depths(o.depths, &b, message, sizeof message) ||
        !check_amounts(&o, &b, message, sizeof message)) {
        fprintf(stderr, "error: %s\n", message);
        return 2;
    }
    dt_report_init((dt_log_level)o.shared.log_level, o.shared.progress);
    return dt_run_guarded(&o.shared, false, run, &b);
}
