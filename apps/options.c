/*
 * Flags of all programs: tables, parser, help. See options.h.
 *
 * strtod is not used: the host's locale decides there whether 0.7 is 0.7 or 0. A flag that isn't known is refused, with
 * the nearest known one named, so that a misspelt flag never runs with a default instead.
 */
#define _POSIX_C_SOURCE 200809L /* sysconf */
#include "options.h"
#include "options_foreign.h"
#include "report.h"

#include <assert.h>
#include <stdarg.h>
#include <string.h>
#include <unistd.h>

#define N_OF(array) (sizeof(array) / sizeof(array)[0])
#define AT(member) offsetof(dt_shared_options, member)
#define NAME_MAX_BYTES 48
#define HELP_COLUMNS 80
#define HELP_INDENT 32 /* where explanations begin */

static const dt_option model_rows[] = {
    {"-m, --model", "F", DT_OPTION_TEXT, AT(model), 0, 0, "model file (GGUF), or the first of a split set"},
    {"-t, --threads", "N", DT_OPTION_INT, AT(n_threads), -1, DT_MAX_THREADS, "threads for decoding (0 or -1: physical cores)"},
    {"-tb, --threads-batch", "N", DT_OPTION_INT, AT(n_threads_batch), -1, DT_MAX_THREADS,
     "threads for reading the prompt (as --threads)"},
    {"-b, --batch-size", "N", DT_OPTION_INT, AT(n_batch), 0, INT32_MAX,
     "tokens of the prompt read at a time (0: 512; in the server 256)"},
    {"-c, --ctx-size, --context-length", "N", DT_OPTION_INT, AT(n_ctx), 0, INT32_MAX,
     "how far a token sees back, and the longest conversation unless every layer evicts within less (0: the model's own)"},
    {"--kv-type", "f16|int8", DT_OPTION_CHOICE, AT(kv_type), 0, 0, "precision of the KV cache (f16)"},
    {"--kv-memory", "SIZE", DT_OPTION_SIZE, AT(kv_memory), 0, 0,
     "bytes that the KV cache never exceeds, such as 512M or 2G; prefill, precision and budgets give way (no limit; server and "
     "batch: half of the memory)"},
    {"--no-mmap", NULL, DT_OPTION_OFF, AT(mmap), 0, 0,
     "read the whole model file into memory, where others may cut it short or its disk may fail (mapped)"},
    {"--device", "NAME", DT_OPTION_TEXT, AT(device), 0, 0,
     "where layers run: cpu, cuda, metal, vulkan, a device by name, rpc=HOST:PORT for another machine, several separated by "
     "commas; list = show them (cpu)"},
    {"-ngl, --gpu-layers, --n-gpu-layers", "N", DT_OPTION_INT, AT(n_device_layers), -1, INT32_MAX,
     "the first N layers run on the device, their cache with them; more than there are: the output too (all)"},
    {"-ts, --tensor-split", "N0,N1,...", DT_OPTION_TEXT, AT(device_split), 0, 0,
     "how many of these layers each of several devices takes, such as 3,1 (in proportion to its free memory)"},
    {"--rpc-timeout", "N", DT_OPTION_INT, AT(rpc_timeout), 1, 1000000,
     "seconds that another machine may be silent while it is waited for (600)"},
    {"--kernel", "auto|reference|reference_int16|avx2|avx512|avx512_vnni|amx_bf16|neon|ggml|ggml_matmul", DT_OPTION_CHOICE,
     AT(kernel), 0, 0, "attention kernel, for tests and comparisons (auto)"},
};

static const dt_option eviction_rows[] = {
    {"--cache-eviction", NULL, DT_OPTION_ON, AT(eviction), 0, 0, "TLC on: every layer keeps the tokens its budget allows (off)"},
    {"--no-cache-eviction", NULL, DT_OPTION_OFF, AT(eviction), 0, 0, "TLC off: nothing is evicted"},
    {"--eviction-preset", "chat|docqa|code|summary", DT_OPTION_TEXT, AT(eviction_preset), 0, 0, "named settings (chat)"},
    {"--eviction-config", "F", DT_OPTION_TEXT, AT(eviction_config), 0, 0, "settings per layer, JSON"},
    {"--max-cache-size", "N", DT_OPTION_INT, AT(max_cache_size), 1, INT32_MAX, "tokens that a layer may keep, for all layers"},
    {"--min-cache-size", "N", DT_OPTION_INT, AT(min_cache_size), 0, INT32_MAX,
     "tokens that a layer keeps at least, for all layers"},
    {"--memory-slots", "N", DT_OPTION_INT, AT(memory_slots), 0, INT32_MAX,
     "entries beside those tokens that stand for evicted ones, for all layers"},
    {"--prefill", "full|streaming", DT_OPTION_CHOICE, AT(prefill), 0, 0,
     "evict after the whole prompt is cached, or chunk by chunk in bounded memory (full)"},
};

static const dt_option sampling_rows[] = {
    {"--temp, --temperature", "X", DT_OPTION_NUMBER, AT(temp), -1e6, 1e6, "temperature; 0 = always the likeliest token (0.8)"},
    {"--top-k", "N", DT_OPTION_INT, AT(top_k), INT32_MIN, INT32_MAX, "only the N likeliest tokens; 0 = all (40)"},
    {"--top-p", "X", DT_OPTION_NUMBER, AT(top_p), 0, 1, "only the likeliest tokens that make up X together; 1 = all (0.95)"},
    {"--min-p", "X", DT_OPTION_NUMBER, AT(min_p), 0, 1, "only tokens at least X times as likely as the likeliest (0.05)"},
    {"--repeat-penalty", "X", DT_OPTION_NUMBER, AT(repeat_penalty), 1e-6, 1e6, "penalty on the last 64 tokens; 1 = none (1)"},
    {"-s, --seed", "N", DT_OPTION_INT, AT(seed), -1, UINT32_MAX,
     "seed of the draw; -1 = another one each run, told in the log (-1)"},
    {"--grammar", "S", DT_OPTION_TEXT, AT(grammar), 0, 0, "grammar (GBNF) that the text must follow"},
    {"--grammar-file", "F", DT_OPTION_TEXT, AT(grammar_file), 0, 0, "the same, from a file"},
    {"-j, --json-schema", "S", DT_OPTION_TEXT, AT(json_schema), 0, 0, "JSON schema that the text must follow"},
    {"--ignore-eos", NULL, DT_OPTION_ON, AT(ignore_end), 0, 0, "never end by itself"},
};

static const dt_option stats_rows[] = {
    {"--stats-json", "F", DT_OPTION_TEXT, AT(stats_json), 0, 0, "write the run's numbers there, as JSON"},
};

static const dt_option output_rows[] = {
    {"--no-progress", NULL, DT_OPTION_OFF, AT(progress), 0, 0, "no progress bar (there is none unless stderr is a terminal)"},
    {"--log-level", "error|warn|info|debug", DT_OPTION_CHOICE, AT(log_level), 0, 0, "what is logged to stderr (info)"},
    {"--version", NULL, DT_OPTION_ON, AT(version), 0, 0, "print the version"},
    {"-h, --help", NULL, DT_OPTION_ON, AT(help), 0, 0, "print this text"},
};

const dt_option_group dt_model_options = {"Model and cache", model_rows, N_OF(model_rows)};
const dt_option_group dt_eviction_options = {"Cache eviction (TLC); settings need --cache-eviction, but for deeptutor-eval",
                                             eviction_rows, N_OF(eviction_rows)};
const dt_option_group dt_sampling_options = {"Sampling", sampling_rows, N_OF(sampling_rows)};
const dt_option_group dt_stats_options = {"Numbers of the run", stats_rows, N_OF(stats_rows)};
const dt_option_group dt_output_options = {"Log and help", output_rows, N_OF(output_rows)};
const dt_option_group dt_log_options = {"Log and help", output_rows + 1, N_OF(output_rows) - 1};

void dt_shared_options_init(dt_shared_options *options) {
    const dt_sampler_params sampler = dt_sampler_default_params();
    *options = (dt_shared_options){
        .min_cache_size = -1,
        .memory_slots = -1,
        .n_device_layers = -1,
        .temp = 0.8, /* as in dt_sampler_default_params, but without float's rounding */
        .top_p = 0.95,
        .min_p = 0.05,
        .repeat_penalty = 1,
        .top_k = sampler.top_k,
        .seed = -1,
        .log_level = DT_LOG_INFO,
        .mmap = true,
        .progress = true,
    };
}

/* ---- numbers ------------------------------------------------------------------------------------ */

bool dt_parse_int(const char *text, int64_t *out) {
    const bool negative = text[0] == '-';
    text += text[0] == '-' || text[0] == '+' ? 1 : 0;
    if (*text == 0) {
        return false;
    }
    int64_t value = 0;
    for (; *text != 0; text++) {
        if (*text < '0' || *text > '9' || value > (INT64_MAX - 9) / 10) {
            return false;
        }
        value = value * 10 + (*text - '0');
    }
    *out = negative ? -value : value;
    return true;
}

static const char *skip_digits(const char *text, uint64_t *mantissa, int *dropped, int *n_digits) {
    for (; *text >= '0' && *text <= '9'; text++, (*n_digits)++) {
        if (*mantissa <= (UINT64_MAX - 9) / 10) {
            *mantissa = *mantissa * 10 + (uint64_t)(*text - '0');
        } else {
            (*dropped)++; /* beyond what a double holds */
        }
    }
    return text;
}

bool dt_parse_number(const char *text, double *out) {
    const bool negative = text[0] == '-';
    text += text[0] == '-' || text[0] == '+' ? 1 : 0;
    uint64_t mantissa = 0;
    int dropped = 0, n_whole = 0, n_fraction = 0, dropped_fraction = 0;
    text = skip_digits(text, &mantissa, &dropped, &n_whole);
    if (*text == '.') {
        text = skip_digits(text + 1, &mantissa, &dropped_fraction, &n_fraction);
    }
    int64_t exponent = 0;
    if ((*text == 'e' || *text == 'E') && n_whole + n_fraction > 0) {
        if (!dt_parse_int(text + 1, &exponent) || exponent > 400 || exponent < -400) {
            return false;
        }
        text = "";
    }
    if (*text != 0 || n_whole + n_fraction == 0) {
        return false;
    }
    exponent += dropped - (n_fraction - dropped_fraction);
    if (exponent > 300 || exponent < -300) {
        return false;
    }
    double power = 1, value = (double)mantissa;
    for (int64_t i = exponent < 0 ? -exponent : exponent; i > 0; i--) {
        power *= 10; /* exact up to 10^22 */
    }
    value = exponent < 0 ? value / power : value * power;
    *out = negative ? -value : value;
    return true;
}

bool dt_parse_size(const char *text, int64_t *out) {
    static const char units[] = "KMGT";
    char digits[32];
    const size_t n = strlen(text);
    if (n == 0 || n >= sizeof digits) {
        return false;
    }
    memcpy(digits, text, n + 1);
    const char last = (char)(text[n - 1] & ~32); /* in upper case */
    const char *unit = text[n - 1] >= 'A' ? strchr(units, last) : NULL;
    double number = 0, scale = 1;
    if (unit != NULL) {
        digits[n - 1] = 0;
        for (const char *u = units; u <= unit; u++) {
            scale *= 1024;
        }
    }
    if (!dt_parse_number(digits, &number) || !(number * scale >= 1) || number * scale > 9e15) {
        return false;
    }
    *out = (int64_t)(number * scale);
    return true;
}

/* ---- parser ------------------------------------------------------------------------------------- */

/* Copies the next of "a, b" (or "a|b") to out and returns what follows it, NULL at the end. */
static const char *next_word(const char *list, char separator, char out[NAME_MAX_BYTES]) {
    size_t n = 0;
    while (*list == ' ') {
        list++;
    }
    for (; *list != 0 && *list != separator; list++) {
        if (n + 1 < NAME_MAX_BYTES) {
            out[n++] = *list;
        }
    }
    out[n] = 0;
    return n == 0 ? NULL : *list == separator ? list + 1 : list;
}

static const dt_option *find_option(const dt_option_group *const *groups, size_t n_groups, const char *name) {
    char word[NAME_MAX_BYTES];
    for (size_t g = 0; g < n_groups; g++) {
        for (size_t i = 0; i < groups[g]->n_options; i++) {
            for (const char *rest = groups[g]->options[i].names; (rest = next_word(rest, ',', word)) != NULL;) {
                if (strcmp(word, name) == 0) {
                    return &groups[g]->options[i];
                }
            }
        }
    }
    return NULL;
}

static size_t edit_distance(const char *a, const char *b) {
    size_t row[NAME_MAX_BYTES + 1];
    const size_t n_a = strlen(a), n_b = strlen(b); /* n_b < NAME_MAX_BYTES: a known name */
    for (size_t j = 0; j <= n_b; j++) {
        row[j] = j;
    }
    for (size_t i = 1; i <= n_a; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= n_b; j++) {
            const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
            diagonal = row[j];
            const size_t other = (row[j] < row[j - 1] ? row[j] : row[j - 1]) + 1;
            row[j] = replaced < other ? replaced : other;
        }
    }
    return row[n_b];
}

/* Whether who wrote `name` may have meant `known`: few letters differ, or one begins with the other (--temperature). */
static bool is_close(const char *name, const char *known, size_t distance) {
    const size_t n = strlen(name), n_known = strlen(known), shorter = n < n_known ? n : n_known;
    const bool begins_alike = shorter > 4 && strncmp(name, known, shorter) == 0;
    return begins_alike || (2 * distance < n && distance <= (n / 3 > 2 ? n / 3 : 2));
}

/* Leaves `out` alone when no known name is close. */
static void nearest_name(const dt_option_group *const *groups, size_t n_groups, const char *name, char out[NAME_MAX_BYTES]) {
    size_t best = SIZE_MAX;
    char word[NAME_MAX_BYTES];
    for (size_t g = 0; g < n_groups; g++) {
        for (size_t i = 0; i < groups[g]->n_options; i++) {
            for (const char *rest = groups[g]->options[i].names; (rest = next_word(rest, ',', word)) != NULL;) {
                const size_t distance = edit_distance(name, word);
                if (distance < best && is_close(name, word, distance)) {
                    best = distance;
                    memcpy(out, word, NAME_MAX_BYTES);
                }
            }
        }
    }
}

static bool refuse(char *message, size_t capacity, const char *format, ...) __attribute__((format(printf, 3, 4)));
static bool refuse(char *message, size_t capacity, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, capacity, format, arguments);
    va_end(arguments);
    return false;
}

static bool set_choice(const dt_option *option, const char *text, int64_t *out) {
    char word[NAME_MAX_BYTES];
    int64_t index = 0;
    for (const char *rest = option->value; (rest = next_word(rest, '|', word)) != NULL; index++) {
        if (strcmp(word, text) == 0) {
            *out = index;
            return true;
        }
    }
    return false;
}

static bool refuse_choice(const dt_option *option, const char *name, const char *text, char *message, size_t capacity) {
    return refuse(message, capacity, "%s must be one of %s, not '%.60s'", name, option->value, text);
}

static bool set_value(const dt_option *option, const char *name, const char *text, void *options, char *message, size_t capacity) {
    void *member = (char *)options + option->offset;
    double number = 0;
    int64_t whole = 0;
    assert(text != NULL || option->kind == DT_OPTION_ON || option->kind == DT_OPTION_OFF);
    switch (option->kind) {
    case DT_OPTION_ON:
    case DT_OPTION_OFF:
        *(bool *)member = option->kind == DT_OPTION_ON;
        return true;
    case DT_OPTION_TEXT:
        *(const char **)member = text;
        if (strchr(option->value, '|') != NULL) {
            return set_choice(option, text, &whole) || refuse_choice(option, name, text, message, capacity);
        }
        return text[0] != 0 || strcmp(option->value, "F") != 0 || refuse(message, capacity, "%s needs the name of a file", name);
    case DT_OPTION_CHOICE:
        return set_choice(option, text, member) || refuse_choice(option, name, text, message, capacity);
    case DT_OPTION_SIZE:
        return dt_parse_size(text, member) ||
               refuse(message, capacity, "%s needs a size such as 512M or 2G, not '%.60s'", name, text);
    case DT_OPTION_INT:
        if (!dt_parse_int(text, &whole)) {
            return refuse(message, capacity, "%s needs %s whole number, not '%.60s'", name, strchr(text, ',') != NULL ? "one" : "a",
                          text);
        }
        number = (double)whole;
        break;
    case DT_OPTION_NUMBER:
        if (!dt_parse_number(text, &number)) {
            return refuse(message, capacity, "%s needs a number such as 0.7, not '%.60s'", name, text);
        }
        break;
    }
    if (number < option->minimum || number > option->maximum) {
        return refuse(message, capacity, "%s must be between %.10g and %.10g, not %.60s", name, option->minimum, option->maximum,
                      text);
    }
    if (option->kind == DT_OPTION_INT) {
        *(int64_t *)member = whole;
    } else {
        *(double *)member = number;
    }
    return true;
}

/* Splits "--flag=value", and writes --some_flag as --some-flag, as llama.cpp does. Returns the value or NULL. */
static const char *split_flag(const char *argument, char name[NAME_MAX_BYTES]) {
    const bool is_long = argument[0] == '-' && argument[1] == '-';
    size_t n = 0;
    for (; argument[n] != 0 && n + 1 < NAME_MAX_BYTES && !(is_long && argument[n] == '='); n++) {
        name[n] = is_long && argument[n] == '_' ? '-' : argument[n];
    }
    name[n] = 0;
    return is_long && argument[n] == '=' ? argument + n + 1 : NULL;
}

static void add_note(dt_shared_options *options, const char *flag, const char *sentence) {
    if (options->n_notes < DT_OPTION_NOTES) {
        options->notes[options->n_notes++] = (struct dt_option_note){flag, sentence};
    }
}

static bool has_foreign_value(const dt_foreign_flag *flag, const char *next) {
    return flag->value == DT_FOREIGN_VALUE || (flag->value == DT_FOREIGN_SWITCH && dt_is_switch_word(next));
}

void dt_options_tell_notes(const dt_shared_options *o) {
    for (size_t i = 0; i < o->n_notes && o->log_level >= DT_LOG_INFO; i++) {
        fprintf(stderr, "%s is not needed: %s\n", o->notes[i].flag, o->notes[i].sentence);
    }
    if (o->n_device_layers > 0 && o->device == NULL && o->log_level >= DT_LOG_INFO) {
        fputs("-ngl changes nothing without --device; --device list shows what there is\n", stderr);
    }
}

bool dt_options_parse(const dt_option_group *const *groups, size_t n_groups, int argc, char **argv, void *options, char *message,
                      size_t capacity) {
    for (int i = 1; i < argc; i++) {
        char name[NAME_MAX_BYTES], nearest[NAME_MAX_BYTES] = "";
        const char *text = split_flag(argv[i], name);
        if (name[0] != '-' || name[1] == 0) {
            const size_t n = strlen(argv[i]);
            return refuse(message, capacity, "'%.60s' is no flag; %s", argv[i],
                          n > 5 && strcmp(argv[i] + n - 5, ".gguf") == 0      ? "a model is given with -m"
                          : find_option(groups, n_groups, "--prompt") != NULL ? "a prompt is given with -p, and put into quotes"
                                                                              : "--help lists all");
        }
        const dt_option *option = find_option(groups, n_groups, name);
        const dt_foreign_flag *foreign = option == NULL ? dt_find_foreign_flag(name) : NULL;
        if (foreign != NULL) {
            if (!foreign->accepted) {
                return refuse(message, capacity, "there is no flag %s: %s", name, foreign->sentence);
            }
            add_note(options, argv[i], foreign->sentence);
            i += text == NULL && i + 1 < argc && has_foreign_value(foreign, argv[i + 1]);
            continue;
        }
        if (option == NULL) {
            nearest_name(groups, n_groups, name, nearest);
            return nearest[0] != 0
                       ? refuse(message, capacity, "there is no flag %s; did you mean %s? (--help lists all)", name, nearest)
                       : refuse(message, capacity, "there is no flag %s; --help lists all", name);
        }
        const bool takes_value = option->value != NULL;
        if (!takes_value && text != NULL) {
            return refuse(message, capacity, "%s takes no value", name);
        }
        if (takes_value && text == NULL) {
            if (i + 1 >= argc) {
                return refuse(message, capacity, "%s needs a value (%s)", name, option->value);
            }
            text = argv[++i];
        }
        if (!set_value(option, name, text, options, message, capacity)) {
            return false;
        }
    }
    return true;
}

/* Words from column HELP_INDENT on, in lines that end before HELP_COLUMNS. */
static void print_wrapped(FILE *file, const char *text) {
    int column = HELP_INDENT;
    while (*text != 0) {
        const int n = (int)strcspn(text, " ");
        if (column > HELP_INDENT && column + 1 + n >= HELP_COLUMNS) {
            fprintf(file, "\n%*s", HELP_INDENT, "");
            column = HELP_INDENT;
        }
        column += fprintf(file, "%s%.*s", column > HELP_INDENT ? " " : "", n, text);
        text += n + (text[n] == ' ' ? 1 : 0);
    }
    fputc('\n', file);
}

/* Names and value of an option, a long list of choices in several lines; returns the column it ends in. */
static int print_names(FILE *file, const dt_option *option) {
    int column = fprintf(file, "  %s%s", option->names, option->value != NULL ? " " : "");
    for (const char *word = option->value; word != NULL && *word != 0;) {
        const int n = (int)strcspn(word, "|"), length = n + (word[n] == '|');
        if (column + length > HELP_COLUMNS) {
            column = fprintf(file, "\n      ") - 1;
        }
        column += fprintf(file, "%.*s", length, word);
        word += length;
    }
    return column;
}

void dt_options_help(FILE *file, const dt_option_group *const *groups, size_t n_groups) {
    for (size_t g = 0; g < n_groups; g++) {
        fprintf(file, "\n%s\n", groups[g]->title);
        for (size_t i = 0; i < groups[g]->n_options; i++) {
            const dt_option *option = &groups[g]->options[i];
            const int n = print_names(file, option);
            const bool below = n + 1 >= HELP_INDENT;
            fprintf(file, "%s%*s", below ? "\n" : "", below ? HELP_INDENT : HELP_INDENT - n, "");
            print_wrapped(file, option->help);
        }
    }
}

/* ---- meaning ------------------------------------------------------------------------------------ */

/* A flag that was given and means nothing without eviction; NULL: there is none. */
static const char *flag_of_eviction(const dt_shared_options *o) {
    return o->eviction_preset != NULL   ? "--eviction-preset"
           : o->eviction_config != NULL ? "--eviction-config"
           : o->max_cache_size > 0      ? "--max-cache-size"
           : o->min_cache_size >= 0     ? "--min-cache-size"
           : o->memory_slots >= 0       ? "--memory-slots"
           : o->prefill != 0            ? "--prefill streaming"
                                        : NULL;
}

bool dt_shared_options_check(const dt_shared_options *o, char *message, size_t capacity) {
    if (o->model == NULL || o->model[0] == 0) {
        return refuse(message, capacity, "no model was named; give one with -m FILE");
    }
    if (!o->eviction && flag_of_eviction(o) != NULL) {
        return refuse(message, capacity, "%s needs --cache-eviction", flag_of_eviction(o));
    }
    if (o->eviction_config != NULL && o->eviction_preset != NULL) {
        return refuse(message, capacity, "give --eviction-preset or --eviction-config, not both");
    }
    if (o->device_split != NULL && o->device == NULL) {
        return refuse(message, capacity, "--tensor-split needs --device");
    }
    if ((o->grammar != NULL) + (o->grammar_file != NULL) + (o->json_schema != NULL) > 1) {
        return refuse(message, capacity, "give one of --grammar, --grammar-file and --json-schema");
    }
    if (o->stats_json != NULL && strcmp(o->stats_json, "-") == 0) {
        return refuse(message, capacity, "--stats-json needs a file; stdout is for the text");
    }
    return true;
}

const char *dt_program_name(int argc, char *const *argv) {
    const char *name = argc > 0 ? argv[0] : "deeptutor", *slash = strrchr(name, '/');
    return slash != NULL ? slash + 1 : name;
}

bool dt_options_begin(const dt_option_group *const *groups, size_t n_groups, int argc, char **argv, void *options,
                      const char *arguments, int *out_exit) {
    char message[512];
    const dt_shared_options *shared = options;
    if (argc < 2 && arguments[0] != '[') {
        fprintf(stderr, "usage: %s %s\nerror: nothing was asked for; --help lists all flags\n", dt_program_name(argc, argv),
                arguments);
        *out_exit = 2;
        return false;
    }
    const bool parsed = dt_options_parse(groups, n_groups, argc, argv, options, message, sizeof message);
    *out_exit = 0;
    if (shared->help) {
        printf("usage: %s %s\n", dt_program_name(argc, argv), arguments);
        dt_options_help(stdout, groups, n_groups);
        *out_exit = dt_report_printed(0);
    } else if (shared->version) {
        printf("DeepTutor %s\n", DT_VERSION);
        *out_exit = dt_report_printed(0);
    } else if (!parsed) {
        fprintf(stderr, "error: %s\n", message);
        *out_exit = 2;
    } else if (dt_wants_devices(shared)) {
        *out_exit = dt_print_devices();
    } else {
        dt_options_tell_notes(shared);
        return true;
    }
    return false;
}

bool dt_wants_devices(const dt_shared_options *o) { return o->device != NULL && strcmp(o->device, "list") == 0; }

void dt_shared_options_model(const dt_shared_options *o, dt_model_params *out) {
    *out = (dt_model_params){.no_mmap = !o->mmap,
                             .device = o->n_device_layers == 0 ? NULL : o->device,
                             .n_device_layers = (int32_t)(o->n_device_layers > 0 ? o->n_device_layers : 0),
                             .device_split = o->n_device_layers == 0 ? NULL : o->device_split,
                             .rpc_timeout_s = (int32_t)o->rpc_timeout};
}

void dt_shared_options_sampler(const dt_shared_options *o, const char *grammar, dt_sampler_params *out) {
    *out = dt_sampler_default_params();
    out->temp = (float)o->temp;
    out->top_k = (int32_t)o->top_k;
    out->top_p = (float)o->top_p;
    out->min_p = (float)o->min_p;
    out->repeat_penalty = (float)o->repeat_penalty;
    out->seed = o->seed < 0 ? DT_SEED_RANDOM : (uint32_t)o->seed;
    out->grammar = grammar != NULL ? grammar : o->grammar;
    out->json_schema = o->json_schema;
    out->ignore_end = o->ignore_end;
}

/* More threads than processors only wait for each other. */
static int32_t sensible_threads(int64_t n) {
    const long online = sysconf(_SC_NPROCESSORS_ONLN);
    return n < 0 ? 0 : online > 0 && n > online ? (int32_t)online : (int32_t)n;
}

void dt_shared_options_session(const dt_shared_options *o, dt_session_params *out) {
    static const char *const kernels[] = {"auto", "reference", "reference_int16", "avx2", "avx512", "avx512_vnni", "amx_bf16",
                                          "neon", "ggml",      "ggml_matmul"};
    *out = (dt_session_params){
        .n_ctx = (int32_t)o->n_ctx,
        .n_batch = (int32_t)o->n_batch,
        .n_threads = sensible_threads(o->n_threads),
        .n_threads_batch = sensible_threads(o->n_threads_batch),
        .kv_type = o->kv_type == 0 ? DT_KV_F16 : DT_KV_INT8,
        .prefill = o->prefill == 0 ? DT_PREFILL_FULL : DT_PREFILL_STREAMING,
        .kernel = kernels[o->kernel],
        .kv_memory = (uint64_t)o->kv_memory,
    };
}

/* What it is worth: docs/quality.md, presets. */
static void hint_at_calibration(const char *path) {
    char *learned = dt_eviction_learned_file(path);
    if (learned == NULL) {
        dt_report(DT_LOG_INFO, "TLC: not calibrated; presets lose less after this, once for the model:");
        dt_report(DT_LOG_INFO, "TLC: ./deeptutor-eval calibrate -m %s", path);
    }
    dt_free(learned);
}

dt_status dt_shared_options_sizes(const dt_shared_options *o, dt_eviction *eviction, dt_error *error) {
    dt_status status = DT_OK;
    if (o->max_cache_size > 0 || o->min_cache_size >= 0) {
        status = dt_eviction_override(eviction, (int32_t)o->max_cache_size, (int32_t)o->min_cache_size, error);
    }
    if (status == DT_OK && o->memory_slots >= 0) {
        status = dt_eviction_set_memory_slots(eviction, (int32_t)o->memory_slots, error);
    }
    return status;
}

dt_status dt_shared_options_eviction(const dt_shared_options *o, const dt_model *model, dt_eviction **out_eviction,
                                     dt_error *error) {
    *out_eviction = NULL;
    if (!o->eviction) {
        return DT_OK;
    }
    dt_eviction *eviction = NULL;
    dt_status status =
        o->eviction_config != NULL
            ? dt_eviction_from_file(model, o->eviction_config, &eviction, error)
            : dt_eviction_from_preset(model, o->eviction_preset != NULL ? o->eviction_preset : "chat", &eviction, error);
    status = status == DT_OK ? dt_shared_options_sizes(o, eviction, error) : status;
    if (status == DT_ERR_IO) {
        status = error->code = DT_ERR_CONFIG; /* a config that can't be read is as wrong as one that can't be used */
    }
    if (status != DT_OK) {
        dt_eviction_free(eviction);
        return status;
    }
    if (o->eviction_config == NULL) {
        hint_at_calibration(o->model);
    }
    *out_eviction = eviction;
    return DT_OK;
}

const char *dt_kv_type_word(int64_t choice) { return choice == 0 ? "f16" : "int8"; }
const char *dt_prefill_word(int64_t choice) { return choice == 0 ? "full" : "streaming"; }
