/*
 * Flags: numbers, choices, refusals. The parser is the programs' own, compiled into this test.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "../apps/options.h"

#include <locale.h>
#include <math.h>
#include <string.h>
#include <unistd.h>

static const dt_option_group *const groups[] = {&dt_model_options, &dt_eviction_options, &dt_sampling_options, &dt_stats_options,
                                                &dt_output_options};

/* Parses a NULL-terminated list of arguments. */
static bool parse(dt_shared_options *options, char message[512], ...) {
    char *argv[32] = {"main"};
    int argc = 1;
    va_list arguments;
    va_start(arguments, message);
    while ((argv[argc] = va_arg(arguments, char *)) != NULL) {
        argc++;
    }
    va_end(arguments);
    dt_shared_options_init(options);
    message[0] = 0;
    return dt_options_parse(groups, sizeof groups / sizeof groups[0], argc, argv, options, message, 512);
}

static void test_numbers(void **state) {
    (void)state;
    const struct {
        const char *text;
        double value;
    } good[] = {{"0", 0},         {"0.7", 0.7},        {".5", 0.5},    {"5.", 5},
                {"-1.25", -1.25}, {"+3", 3},           {"1e-3", 1e-3}, {"2.5E2", 250},
                {"1e22", 1e22},   {"0.95", 0.95},      {"00012", 12},  {"123456789012", 123456789012.0},
                {"0.1", 0.1},     {"3.14159", 3.14159}};
    for (int local = 0; local < 2; local++) {
        for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
            double value = -77;
            assert_true(dt_parse_number(good[i].text, &value));
            assert_true(isfinite(value) && value == good[i].value);
        }
        setlocale(LC_ALL, "de_DE.UTF-8"); /* where it is installed */
    }
    setlocale(LC_ALL, "C");
    const char *const bad[] = {"",    "-",   ".",  "e5", "1e",    "abc", "0,7",   "0x10",
                               "nan", "inf", "1 ", " 1", "1e999", "--1", "1.2.3", "1e5.5"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        double value;
        assert_false(dt_parse_number(bad[i], &value));
    }
}

static void test_integers(void **state) {
    (void)state;
    int64_t value = 0;
    assert_true(dt_parse_int("-1", &value) && value == -1);
    assert_true(dt_parse_int("4294967295", &value) && value == 4294967295);
    const char *const bad[] = {"", "-", "1.5", "1e3", "12a", " 1", "0x1", "99999999999999999999"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        assert_false(dt_parse_int(bad[i], &value));
    }
}

static void test_flags(void **state) {
    (void)state;
    dt_shared_options o;
    char message[512];
    assert_true(parse(&o, message, "-m", "a b.gguf", "-t", "2", "--temp", "0.7", "-c", "8192", "--cache-eviction", "--kv-type",
                      "int8", NULL));
    assert_string_equal(o.model, "a b.gguf");
    assert_int_equal(o.n_threads, 2);
    assert_int_equal(o.n_ctx, 8192);
    assert_int_equal(o.kv_type, 1);
    assert_true(o.eviction && o.temp == 0.7 && o.seed == -1 && o.progress);
    assert_true(parse(&o, message, "--context-length", "100", "--cache-eviction", "--no-cache-eviction", "--no-progress", NULL));
    assert_true(o.n_ctx == 100 && !o.eviction && !o.progress); /* the last one counts */
    assert_true(parse(&o, message, "--top_k=5", "--ctx_size", "7", "--seed=4294967295", "--grammar", "-x", NULL));
    assert_true(o.top_k == 5 && o.n_ctx == 7 && o.seed == 4294967295);
    assert_string_equal(o.grammar, "-x"); /* a value may begin with a dash */
}

static void test_refusals(void **state) {
    (void)state;
    const struct {
        const char *flag, *value, *fragment;
    } cases[] = {
        {"--temperatur", "1", "did you mean --temp"},
        {"--cache-evicton", NULL, "did you mean --cache-eviction?"},
        {"--stats", "f", "did you mean --stats-json?"},
        {"--draft-max", "4", "there is no flag --draft-max; --help lists all"},
        {"--nonsense", NULL, "there is no flag --nonsense; --help lists all"},
        {"-x", NULL, "there is no flag -x; --help lists all"},
        {"prompt", NULL, "is no flag"},
        {"-", NULL, "is no flag"},
        {"-t", "abc", "-t needs a whole number, not 'abc'"},
        {"-t", "1.5", "whole number"},
        {"-t", "", "whole number"},
        {"-t", "-2", "between -1 and 512"},
        {"-t", "513", "between -1 and 512"},
        {"-tb", "100000", "between -1 and 512"},
        {"-c", "-1", "between 0"},
        {"-c", "99999999999", "between 0"},
        {"--temp", "0,7", "number such as 0.7"},
        {"--top-p", "1.5", "between 0 and 1"},
        {"--max-cache-size", "0", "between 1"},
        {"--kv-type", "f32", "one of f16|int8"},
        {"--kernel", "AVX2", "one of auto|reference|reference_int16|avx2|avx512|avx512_vnni|amx_bf16|neon"},
        {"-m", NULL, "-m needs a value"},
        {"--cache-eviction=1", NULL, "takes no value"},
        {"--eviction-preset", "fast", "--eviction-preset must be one of chat|docqa|code|summary, not 'fast'"},
        {"-np", "1", "there is no flag -np: --parallel N of ./deeptutor-server"},
        {"-p", "8080", "--port N is where ./deeptutor-server listens"},
        {"--prompt", "x", "-i FILE holds the rows of ./deeptutor-batch"},
        {"-gan", "2", "docs/memory.md"},
        {"--grp-attn-w", "512", "docs/memory.md"},
        {"--override-kv", "a=int:1", "gguf-set-metadata"},
        {"--check-tensors", NULL, "checksum"},
        {"--no-repack", NULL, "packed anew"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        dt_shared_options o;
        char message[512];
        assert_false(parse(&o, message, cases[i].flag, cases[i].value, NULL));
        if (strstr(message, cases[i].fragment) == NULL) {
            print_error("no '%s' in: %s\n", cases[i].fragment, message);
        }
        assert_non_null(strstr(message, cases[i].fragment));
        assert_null(strchr(message, '\n'));
    }
    /* a value belongs to its flag here too */
    dt_shared_options known;
    char none[512];
    assert_true(parse(&known, none, "-dt", "0.1", "-kvu", "--swa-full", "--offline", "--penalize-nl", "-t", "2", NULL));
    assert_true(known.n_notes == 5 && known.n_threads == 2);
    char long_name[5000];
    memset(long_name, '-', sizeof long_name - 1);
    long_name[sizeof long_name - 1] = 0;
    dt_shared_options o;
    char message[512];
    assert_false(parse(&o, message, long_name, NULL));
}

static void test_combinations(void **state) {
    (void)state;
    dt_shared_options o;
    char message[512];
    assert_true(parse(&o, message, "-t", "1", NULL) && !dt_shared_options_check(&o, message, sizeof message));
    assert_non_null(strstr(message, "-m FILE"));
    const char *const need_eviction[][2] = {{"--eviction-preset", "chat"}, {"--eviction-config", "a"}, {"--max-cache-size", "9"},
                                            {"--min-cache-size", "0"},     {"--memory-slots", "2"},    {"--prefill", "streaming"}};
    for (size_t i = 0; i < sizeof need_eviction / sizeof need_eviction[0]; i++) {
        assert_true(parse(&o, message, "-m", "a", need_eviction[i][0], need_eviction[i][1], NULL));
        assert_false(dt_shared_options_check(&o, message, sizeof message));
        assert_non_null(strstr(message, " needs --cache-eviction")); /* the flag that was given, and no other */
        assert_true(strncmp(message, need_eviction[i][0], strlen(need_eviction[i][0])) == 0);
        assert_true(parse(&o, message, "-m", "a", need_eviction[i][0], need_eviction[i][1], "--cache-eviction", NULL));
        assert_true(dt_shared_options_check(&o, message, sizeof message));
    }
    assert_true(parse(&o, message, "-m", "a", "--cache-eviction", "--eviction-preset", "chat", "--eviction-config", "a", NULL));
    assert_false(dt_shared_options_check(&o, message, sizeof message));
    assert_true(parse(&o, message, "-m", "a", "--grammar", "x", "--json-schema", "{}", NULL));
    assert_false(dt_shared_options_check(&o, message, sizeof message));
    assert_true(parse(&o, message, "-m", "a", "--stats-json", "-", NULL));
    assert_false(dt_shared_options_check(&o, message, sizeof message));
    assert_true(parse(&o, message, "-m", "a", "--prefill", "full", NULL) && dt_shared_options_check(&o, message, sizeof message));
}

static void test_help_columns(void **state) {
    (void)state;
    char line[512];
    FILE *file = tmpfile();
    assert_non_null(file);
    dt_options_help(file, groups, sizeof groups / sizeof groups[0]);
    rewind(file);
    int n_lines = 0;
    for (; fgets(line, sizeof line, file) != NULL; n_lines++) {
        const size_t n = strcspn(line, "\n");
        assert_true(n <= 80 && (n == 0 || line[n - 1] != ' '));
    }
    assert_true(n_lines > 40);
    fclose(file);
}

static void test_meaning(void **state) {
    (void)state;
    dt_shared_options o;
    char message[512];
    assert_true(parse(&o, message, "-t", "512", "-tb", "-1", "--prefill", "streaming", "--kernel", "reference", NULL));
    dt_session_params session;
    dt_shared_options_session(&o, &session);
    assert_true(session.n_threads >= 1 && session.n_threads <= sysconf(_SC_NPROCESSORS_ONLN));
    assert_int_equal(session.n_threads_batch, 0);
    assert_int_equal(session.prefill, DT_PREFILL_STREAMING);
    assert_string_equal(session.kernel, "reference");
    dt_sampler_params sampler;
    const dt_sampler_params defaults = dt_sampler_default_params();
    dt_shared_options_sampler(&o, NULL, &sampler);
    assert_true(sampler.temp == defaults.temp && sampler.top_p == defaults.top_p && sampler.min_p == defaults.min_p);
    assert_true(sampler.top_k == defaults.top_k && sampler.seed == DT_SEED_RANDOM &&
                sampler.repeat_penalty == defaults.repeat_penalty);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_numbers),      cmocka_unit_test(test_integers),     cmocka_unit_test(test_flags),
        cmocka_unit_test(test_refusals),     cmocka_unit_test(test_combinations), cmocka_unit_test(test_meaning),
        cmocka_unit_test(test_help_columns),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
