/*
 * engine/eviction_config.c and eviction_json.c: presets, defaults, overrides, the lines shown to the user, and every error of the
 * JSON config with its file, line and key.
 */
#include "support/cmocka_all.h"

#include "engine/eviction_config.h"

#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- what was logged ---- */

static char logged[8192];

static void keep_line(dt_log_level level, const char *line, void *user) {
    (void)user;
    const size_t length = strlen(logged);
    snprintf(logged + length, sizeof logged - length, "%s %s\n",
             level == DT_LOG_WARN   ? "warn"
             : level == DT_LOG_INFO ? "info"
                                    : "?",
             line);
}

static int begin_log(void **state) {
    (void)state;
    logged[0] = '\0';
    dt_log_set(keep_line, NULL);
    return 0;
}

/* ---- helpers ---- */

static dt_eviction *preset(int32_t n_layers, const char *name) {
    dt_eviction *eviction = NULL;
    dt_error error;
    if (dt_eviction_config_preset(n_layers, name, &eviction, &error) != DT_OK) {
        fail_msg("%s", error.message);
    }
    return eviction;
}

static dt_eviction *config(int32_t n_layers, const char *text) {
    dt_eviction *eviction = NULL;
    dt_error error;
    if (dt_eviction_config_text(n_layers, "e.json", text, strlen(text), &eviction, &error) != DT_OK) {
        fail_msg("%s", error.message);
    }
    return eviction;
}

static void require_description(dt_eviction *eviction, const char *expected) {
    char *text = NULL;
    dt_error error;
    assert_int_equal(dt_eviction_describe(eviction, &text, &error), DT_OK);
    assert_string_equal(text, expected);
    dt_free(text);
}

static void require_error(int32_t n_layers, const char *text, const char *message) {
    dt_eviction *eviction = (dt_eviction *)1;
    dt_error error = {.message = ""};
    assert_int_equal(dt_eviction_config_text(n_layers, "e.json", text, strlen(text), &eviction, &error), DT_ERR_CONFIG);
    assert_null(eviction);
    assert_string_equal(error.message, message);
}

/* The error of one field in an otherwise good entry. */
static void require_field_error(const char *field, const char *message) {
    char text[1024], expected[1024];
    snprintf(text, sizeof text, "{\n \"0-3\": {\"policy\": \"local_window\", \"max_cache_size\": 1000,\n  %s}}", field);
    snprintf(expected, sizeof expected, "e.json:3: \"0-3\", %s", message);
    require_error(12, text, expected);
}

static void require_layer(const dt_eviction *eviction, int32_t layer, const char *policy, int32_t max, int32_t min, int32_t sinks,
                          int32_t recent) {
    const dt_budget *b = dt_eviction_budget(eviction, layer);
    if (policy == NULL) {
        assert_null(b->policy);
        return;
    }
    assert_non_null(b->policy);
    assert_string_equal(b->policy->name, policy);
    assert_int_equal(b->max_cache_size, max);
    assert_int_equal(b->min_cache_size, min);
    assert_int_equal(b->sink_tokens, sinks);
    assert_int_equal(b->recent_window, recent);
}

/* ---- presets ---- */

static void test_presets(void **state) {
    (void)state;
    static const struct {
        const char *name, *expected;
    } cases[] = {
        {"chat", "TLC: layers 0-15   local_window      max 2048  min 512  sinks 4  recent 128\n"
                 "TLC: layers 16-31  importance_score  max 4096  min 512  sinks 4  recent 128"},
        {"docqa", "TLC: layers 0-15   local_window      max 4096  min 1024  sinks 4  recent 128\n"
                  "TLC: layers 16-31  importance_score  max 8192  min 1024  sinks 4  recent 128"},
        {"code", "TLC: layers 0-31   local_window      max 4096  min 1024  sinks 4  recent 128"},
        {"summary", "TLC: layers 0-15   importance_score  max 3072  min 512  sinks 4  recent 128\n"
                    "TLC: layers 16-31  importance_score  max 6144  min 512  sinks 4  recent 128"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        dt_eviction *eviction = preset(32, cases[i].name);
        require_description(eviction, cases[i].expected);
        assert_true(strncmp(dt_eviction_name(eviction), "preset ", 7) == 0);
        assert_string_equal(dt_eviction_name(eviction) + 7, cases[i].name);
        dt_eviction_free(eviction);
    }
}

static int32_t n_shallow(int32_t n_layers, const char *name, int32_t shallow_max) {
    dt_eviction *eviction = preset(n_layers, name);
    int32_t n = 0;
    while (n < n_layers && dt_eviction_budget(eviction, n)->max_cache_size == shallow_max) {
        n++;
    }
    dt_eviction_free(eviction);
    return n;
}

static void test_presets_on_few_layers(void **state) {
    (void)state;
    assert_int_equal(n_shallow(1, "chat", 2048), 0);
    assert_int_equal(n_shallow(2, "chat", 2048), 1);
    assert_int_equal(n_shallow(7, "chat", 2048), 3);
    assert_int_equal(n_shallow(30, "docqa", 4096), 15);
    assert_int_equal(n_shallow(16, "docqa", 4096), 8);
    assert_int_equal(n_shallow(12, "docqa", 4096), 4); /* the last eight are deep */
    assert_int_equal(n_shallow(8, "docqa", 4096), 0);
    assert_int_equal(n_shallow(2, "docqa", 4096), 0);
}

static void test_unknown_preset(void **state) {
    (void)state;
    dt_eviction *eviction = NULL;
    dt_error error;
    assert_int_equal(dt_eviction_config_preset(12, "chatt", &eviction, &error), DT_ERR_CONFIG);
    assert_string_equal(error.message, "there is no eviction preset \"chatt\"; the presets are chat, docqa, code and summary");
    assert_null(eviction);
    assert_int_equal(dt_eviction_config_preset(0, "chat", &eviction, &error), DT_ERR_ARGUMENT);
}

/* ---- overrides ---- */

static void test_override_of_a_preset(void **state) {
    (void)state;
    dt_error error;
    dt_eviction *eviction = preset(12, "docqa");
    assert_int_equal(dt_eviction_override(eviction, 0, -1, &error), DT_OK);
    require_layer(eviction, 11, "importance_score", 8192, 1024, 4, 128);
    assert_string_equal(logged, "");
    assert_int_equal(dt_eviction_override(eviction, 1024, -1, &error), DT_OK);
    require_layer(eviction, 0, "local_window", 1024, 512, 4, 128);
    require_layer(eviction, 11, "importance_score", 1024, 512, 4, 128);
    assert_string_equal(logged, "info TLC: max_cache_size 1024 lowers the min_cache_size of layers 0-11 from 1024 to 512\n");
    assert_int_equal(dt_eviction_override(eviction, 64, -1, &error), DT_OK);
    require_layer(eviction, 0, "local_window", 64, 32, 4, 16);
    assert_int_equal(dt_eviction_override(eviction, 2000, 100, &error), DT_OK);
    require_layer(eviction, 0, "local_window", 2000, 100, 4, 128);
    dt_eviction_free(eviction);
}

static void test_override_of_a_config(void **state) {
    (void)state;
    dt_error error;
    dt_eviction *eviction = config(6, "{\"0\": {\"policy\": \"local_window\", \"max_cache_size\": 900, \"min_cache_size\": 600, "
                                      "\"sink_tokens\": 60, \"recent_window\": 100},"
                                      " \"1-4\": {\"policy\": \"importance_score\", \"max_cache_size\": 100},"
                                      " \"5\": {\"policy\": \"none\"}}");
    require_layer(eviction, 0, "local_window", 900, 600, 60, 100);
    require_layer(eviction, 1, "importance_score", 100, 50, 4, 25);
    logged[0] = '\0';
    assert_int_equal(dt_eviction_override(eviction, 400, -1, &error), DT_OK);
    require_layer(eviction, 0, "local_window", 400, 200, 60, 100);
    require_layer(eviction, 4, "importance_score", 400, 200, 4, 100);
    require_layer(eviction, 5, NULL, 0, 0, 0, 0);
    assert_string_equal(logged, "info TLC: max_cache_size 400 lowers the min_cache_size of layer 0 from 600 to 200\n");
    /* what can't hold for one layer changes none */
    assert_int_equal(dt_eviction_override(eviction, 160, -1, &error), DT_ERR_CONFIG);
    assert_string_equal(error.message, "max_cache_size 160 leaves no room in layer 0 beside sink_tokens 60 and "
                                       "recent_window 100; give at least 161");
    assert_int_equal(dt_eviction_override(eviction, 0, 401, &error), DT_ERR_CONFIG);
    assert_string_equal(error.message, "min_cache_size 401 is above the max_cache_size 400 of layer 0; give a smaller one, or a "
                                       "larger max_cache_size");
    require_layer(eviction, 0, "local_window", 400, 200, 60, 100);
    require_layer(eviction, 4, "importance_score", 400, 200, 4, 100);
    assert_int_equal(dt_eviction_override(eviction, 161, 160, &error), DT_OK);
    require_layer(eviction, 0, "local_window", 161, 160, 60, 100);
    assert_int_equal(dt_eviction_override(eviction, -1, -1, &error), DT_ERR_CONFIG);
    assert_int_equal(dt_eviction_override(eviction, 0, -2, &error), DT_ERR_CONFIG);
    logged[0] = '\0';
    assert_int_equal(dt_eviction_override(eviction, 0, 0, &error), DT_OK);
    assert_non_null(strstr(logged, "warn TLC: min_cache_size 0"));
    dt_eviction_free(eviction);
}

static void test_smallest_sizes(void **state) {
    (void)state;
    dt_error error;
    dt_eviction *eviction = preset(12, "chat");
    for (int32_t max = 1; max <= 5; max++) { /* 4 sinks and a quarter leave nothing */
        assert_int_equal(dt_eviction_override(eviction, max, -1, &error), DT_ERR_CONFIG);
    }
    assert_int_equal(dt_eviction_override(eviction, 6, -1, &error), DT_OK);
    require_layer(eviction, 0, "local_window", 6, 3, 4, 1);
    assert_int_equal(dt_eviction_override(eviction, INT32_MAX, INT32_MAX, &error), DT_OK);
    dt_eviction_free(eviction);
}

/* ---- good configs ---- */

static void test_example_of_the_documentation(void **state) {
    (void)state;
    dt_eviction *eviction =
        config(32, "{ \"0-15\":  {\"policy\": \"local_window\", \"max_cache_size\": 4096, \"min_cache_size\": 512},\n"
                   "  \"16-31\": {\"policy\": \"importance_score\", \"max_cache_size\": 8192, \"min_cache_size\": 512,"
                   " \"memory_slots\": 0} }");
    require_description(eviction, "TLC: layers 0-15   local_window      max 4096  min 512  sinks 4  recent 128\n"
                                  "TLC: layers 16-31  importance_score  max 8192  min 512  sinks 4  recent 128");
    assert_string_equal(dt_eviction_name(eviction), "config e.json");
    assert_string_equal(logged, "");
    dt_eviction_free(eviction);
}

static void test_keys(void **state) {
    (void)state;
    dt_eviction *eviction =
        config(12, "{\"7\": {\"policy\": \"local_window\", \"max_cache_size\": 100},\n"
                   " \"-3--2\": {\"policy\": \"local_window\", \"max_cache_size\": 200},\n"
                   " \"-1\": {\"policy\": \"local_window\", \"max_cache_size\": 300},\n"
                   " \"0-2\": {\"policy\": \"none\"}, \"5--6\": {\"policy\": \"importance_score\", \"max_cache_size\": 50}}");
    require_description(eviction, "TLC: layers 0-4    none              keeps everything\n"
                                  "TLC: layers 5-6    importance_score  max 50  min 25  sinks 4  recent 12\n"
                                  "TLC: layers 7      local_window      max 100  min 50  sinks 4  recent 25\n"
                                  "TLC: layers 8      none              keeps everything\n"
                                  "TLC: layers 9-10   local_window      max 200  min 100  sinks 4  recent 50\n"
                                  "TLC: layers 11     local_window      max 300  min 150  sinks 4  recent 75");
    assert_string_equal(logged, "info TLC: e.json does not name layers 3-4, 8: they evict nothing\n");
    dt_eviction_free(eviction);
    begin_log(NULL);
    eviction = config(200, "{\"100-\": {\"policy\": \"local_window\", \"max_cache_size\": 4096}}");
    require_description(eviction, "TLC: layers 0-99     none              keeps everything\n"
                                  "TLC: layers 100-199  local_window      max 4096  min 512  sinks 4  recent 128");
    dt_eviction_free(eviction);
    eviction = config(3, "\xEF\xBB\xBF{}"); /* with a byte order mark */
    require_description(eviction, "TLC: layers 0-2    none              keeps everything");
    dt_eviction_free(eviction);
}

static void test_ranges_are_cut_with_a_warning(void **state) {
    (void)state;
    dt_eviction *eviction =
        config(28, "{\"0-15\": {\"policy\": \"none\"},\n\"16-31\": {\"policy\": \"local_window\", \"max_cache_size\": 100}}");
    assert_string_equal(logged, "warn e.json:2: \"16-31\": the model has only the layers 0 to 27, so this sets layers 16-27\n");
    require_layer(eviction, 27, "local_window", 100, 50, 4, 25);
    dt_eviction_free(eviction);
    begin_log(NULL);
    eviction = config(6, "{\"-8--1\": {\"policy\": \"local_window\", \"max_cache_size\": 100}}");
    assert_string_equal(logged, "warn e.json:1: \"-8--1\": the model has only the layers 0 to 5, so this sets layers 0-5\n");
    dt_eviction_free(eviction);
}

static void test_accepted_with_a_warning(void **state) {
    (void)state;
    dt_eviction *eviction = config(2, "{\"0\": {\"policy\": \"local_window\",\n\"max_cache_size\": 100,\n\"min_cache_size\": 0},"
                                      "\"1\": {\"policy\": \"none\",\n\"max_cache_size\": 100}}");
    require_layer(eviction, 0, "local_window", 100, 0, 4, 25);
    assert_string_equal(logged,
                        "warn e.json:3: \"0\": min_cache_size 0: nothing keeps later budgets from emptying these layers but sinks "
                        "and recent window\n"
                        "warn e.json:4: \"1\": policy none keeps everything, so max_cache_size has no effect\n");
    dt_eviction_free(eviction);
}

/* ---- errors ---- */

static void test_not_json(void **state) {
    (void)state;
    const char *hint = "; right is an object such as {\"0-15\": {\"policy\": \"local_window\", \"max_cache_size\": 4096}}";
    static const struct {
        const char *text, *begin;
    } cases[] = {
        {"", "e.json:1: not valid JSON: "},
        {"hello", "e.json:1: not valid JSON: "},
        {"{\"0\": {\"policy\": \"none\"},\n}", "e.json:2: not valid JSON: "},
        {"{\"0\": {\"policy\":\n\"none\"}", "e.json:2: not valid JSON: "},
        {"{\"0\":\n\n{\"max_cache_size\": 99999999999999999999}}", "e.json:3: not valid JSON: too big integer"},
        {"{\"0\": {\"policy\": \"none\"},\n\"0\": {\"policy\": \"none\"}}", "e.json:2: not valid JSON: duplicate object key"},
        {"{\"0\": {\"policy\": \"none\",\n\"policy\": \"none\"}}", "e.json:2: not valid JSON: duplicate object key"},
        {"{\"0\": {\"policy\": \"\xFF\"}}", "e.json:1: not valid JSON: "},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        dt_eviction *eviction = NULL;
        dt_error error = {.message = ""};
        assert_int_equal(dt_eviction_config_text(12, "e.json", cases[i].text, strlen(cases[i].text), &eviction, &error),
                         DT_ERR_CONFIG);
        if (strncmp(error.message, cases[i].begin, strlen(cases[i].begin)) != 0 || strstr(error.message, hint) == NULL ||
            strchr(error.message, '\n') != NULL) {
            fail_msg("case %d: %s", (int)i, error.message);
        }
    }
    require_error(12, "[1, 2]",
                  "e.json:1: must be an object such as {\"0-15\": {\"policy\": \"local_window\", \"max_cache_size\": 4096}}, "
                  "but is a list");
}

static void test_bad_keys(void **state) {
    (void)state;
    const char *const bad[] = {"", "x", "1-x", "0..3", "1,2", "-", "--1", "1--", " 1", "1 ", "0-3-5", "all", "1.5", "+1"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char text[200], message[300];
        snprintf(text, sizeof text, "{\"0\": {\"policy\": \"none\"},\n\"%s\": {\"policy\": \"none\"}}", bad[i]);
        snprintf(message, sizeof message,
                 "e.json:2: \"%s\": does not name layers; right are \"7\", \"0-15\", \"16-\" (to the last layer) "
                 "and \"-8--1\" (the last eight)",
                 bad[i]);
        require_error(12, text, message);
    }
    require_error(12, "{\n\"12-15\": {}}", "e.json:2: \"12-15\": lies wholly outside the model, whose 12 layers are 0 to 11");
    require_error(12, "{\"12\": {}}", "e.json:1: \"12\": lies wholly outside the model, whose 12 layers are 0 to 11");
    require_error(12, "{\"16-\": {}}", "e.json:1: \"16-\": lies wholly outside the model, whose 12 layers are 0 to 11");
    require_error(12, "{\"-20--13\": {}}", "e.json:1: \"-20--13\": lies wholly outside the model, whose 12 layers are 0 to 11");
    require_error(12, "{\"99999999999999999999\": {}}",
                  "e.json:1: \"99999999999999999999\": lies wholly outside the model, whose 12 layers are 0 to 11");
    require_error(12, "{\"5-3\": {}}", "e.json:1: \"5-3\": runs backwards; write the lower layer first");
    require_error(12, "{\"-1-3\": {}}", "e.json:1: \"-1-3\": runs backwards; write the lower layer first");
    require_error(12, "{\"0-5\": {\"policy\": \"none\"},\n\n\"5-11\": {\"policy\": \"none\"}}",
                  "e.json:3: \"5-11\": sets layer 5, which the key on line 1 sets too; every layer may be set only once");
    require_error(12, "{\"\\u0030\": {\"policy\": \"none\"},\n\"0\": {\"policy\": \"none\"}}", /* the same key, written otherwise */
                  "e.json:2: not valid JSON: duplicate object key near '\"0\"'; right is an object such as {\"0-15\": {\"policy\": "
                  "\"local_window\", \"max_cache_size\": 4096}}");
    require_error(12, "{\n\"0\":\n5}",
                  "e.json:2: \"0\": must be an object such as {\"policy\": \"local_window\", \"max_cache_size\": 4096}, "
                  "but is a whole number");
}

static void test_bad_fields(void **state) {
    (void)state;
    require_field_error("\"polcy\": 1", "\"polcy\": is not a field; did you mean \"policy\"?");
    require_field_error("\"max_cache\": 1", "\"max_cache\": is not a field; did you mean \"max_cache_size\"?");
    require_field_error("\"min_cache_sise\": 1", "\"min_cache_sise\": is not a field; did you mean \"min_cache_size\"?");
    require_field_error("\"sinks\": 1", "\"sinks\": is not a field; did you mean \"sink_tokens\"?");
    require_field_error("\"budget\": 1",
                        "\"budget\": is not a field; the fields are policy, max_cache_size, min_cache_size, sink_tokens, "
                        "recent_window, memory_slots, score, lanes and weights");
    require_field_error("\"a\\nb\": 1",
                        "\"a?b\": is not a field; the fields are policy, max_cache_size, min_cache_size, sink_tokens, "
                        "recent_window, memory_slots, score, lanes and weights");
    require_field_error("\"min_cache_size\": 512.0",
                        "\"min_cache_size\": must be a whole number such as 512, but is a number with a decimal point or exponent");
    require_field_error("\"min_cache_size\": 1e3",
                        "\"min_cache_size\": must be a whole number such as 512, but is a number with a decimal point or exponent");
    require_field_error("\"min_cache_size\": \"512\"", "\"min_cache_size\": must be a whole number such as 512, but is a string");
    require_field_error("\"sink_tokens\": null", "\"sink_tokens\": must be a whole number such as 512, but is null");
    require_field_error("\"recent_window\": true", "\"recent_window\": must be a whole number such as 512, but is true or false");
    require_field_error("\"memory_slots\": [1]", "\"memory_slots\": must be a whole number such as 512, but is a list");
    require_field_error("\"memory_slots\": {}", "\"memory_slots\": must be a whole number such as 512, but is an object");
    require_field_error("\"min_cache_size\": -1", "\"min_cache_size\": must be between 0 and 2147483647, but is -1");
    require_field_error("\"recent_window\": 2147483648", "\"recent_window\": must be between 0 and 2147483647, but is 2147483648");
    require_field_error("\"min_cache_size\": 1001", "\"min_cache_size\": 1001 is above max_cache_size 1000; give at most that");
    require_field_error("\"memory_slots\": 1025", "\"memory_slots\": must be at most 1024, but is 1025");
    require_field_error("\"score\": \"slow\"", "\"score\": must be \"fast\", \"predict\" or \"reconstruct\"");
    require_field_error("\"lanes\": []",
                        "\"lanes\": must be a list of sizes, one for each KV head, such as [512, 4096], but is empty");
    require_field_error("\"lanes\": 7",
                        "\"lanes\": must be a list of sizes, one for each KV head, such as [512, 4096], but is a whole number");
    require_field_error("\"lanes\": [512, 0]", "\"lanes\": must be between 1 and 2147483647, but is 0");
    require_field_error("\"lanes\": [512, 700]", "\"lanes\": stands instead of max_cache_size; give one of them");
}

static void test_bad_policies_and_sizes(void **state) {
    (void)state;
    require_error(12, "{\"0\": {\n\"policy\": \"local_windw\", \"max_cache_size\": 100}}",
                  "e.json:2: \"0\", \"policy\": there is no policy \"local_windw\"; did you mean \"local_window\"?");
    require_error(
        12, "{\"0\": {\n\"policy\": \"h2o\", \"max_cache_size\": 100}}",
        "e.json:2: \"0\", \"policy\": there is no policy \"h2o\"; the policies are local_window, importance_score and none");
    require_error(12, "{\"0\": {\"policy\": 1}}",
                  "e.json:1: \"0\", \"policy\": must be \"local_window\", \"importance_score\" or \"none\", "
                  "but is a whole number");
    require_error(12, "{\"0\": {\"max_cache_size\": 100}}",
                  "e.json:1: \"0\": \"policy\" is missing; give \"local_window\", \"importance_score\" or \"none\"");
    require_error(
        12, "{\"0\": {\"policy\": \"local_window\"}}",
        "e.json:1: \"0\": \"max_cache_size\" is missing; policy local_window needs it, for example \"max_cache_size\": 4096");
    require_error(12, "{\"0\": {\"policy\": \"local_window\",\n\"max_cache_size\": 0}}",
                  "e.json:2: \"0\", \"max_cache_size\": must be between 1 and 2147483647, but is 0");
    require_error(12, "{\"0\": {\"policy\": \"local_window\",\n\"max_cache_size\": -5}}",
                  "e.json:2: \"0\", \"max_cache_size\": must be between 1 and 2147483647, but is -5");
    require_error(
        12, "{\"0\": {\"policy\": \"local_window\", \"recent_window\": 128,\n\"max_cache_size\": 132}}",
        "e.json:2: \"0\", \"max_cache_size\": 132 leaves no room beside sink_tokens 4 and recent_window 128; give at least 133");
    require_error(12,
                  "{\"0\": {\"policy\": \"local_window\", \"recent_window\": 2147483647, \"sink_tokens\": 2147483647,\n"
                  "\"max_cache_size\": 132}}",
                  "e.json:1: \"0\", \"recent_window\": 2147483647 leaves no room in any layer, beside sink_tokens 2147483647; give "
                  "a smaller one");
    require_error(
        12, "{\"0\": {\"policy\": \"local_window\", \"max_cache_size\": 132, \"sink_tokens\": 2147483647}}",
        "e.json:1: \"0\", \"sink_tokens\": 2147483647 leaves no room in any layer, beside recent_window 33; give a smaller one");
}

static dt_status try_size(int size, int sinks, dt_error *error) {
    char text[160];
    dt_eviction *eviction = NULL;
    const int n = snprintf(text, sizeof text,
                           "{\"0-\": {\"policy\": \"local_window\", \"max_cache_size\": %d, \"min_cache_size\": 1, "
                           "\"sink_tokens\": %d}}",
                           size, sinks);
    const dt_status status = dt_eviction_config_text(3, "e.json", text, (size_t)n, &eviction, error);
    dt_eviction_free(eviction);
    return status;
}

/* A default recent window grows with the size, so the size asked for must count that in: given, it is accepted. */
static void test_advice_is_accepted(void **state) {
    (void)state;
    for (int sinks = 1; sinks < 300; sinks += sinks < 12 ? 1 : 37) {
        dt_error error;
        int least = 0;
        assert_int_equal(try_size(1, sinks, &error), DT_ERR_CONFIG);
        const char *advice = strstr(error.message, "give at least ");
        assert_non_null(advice);
        assert_int_equal(sscanf(advice, "give at least %d", &least), 1);
        assert_int_equal(try_size(least, sinks, &error), DT_OK);
        assert_int_equal(try_size(least - 1, sinks, &error), DT_ERR_CONFIG);
    }
}

static void test_sizes_per_lane(void **state) {
    (void)state;
    dt_eviction *eviction = NULL;
    dt_error error;
    const char *text = "{\"0-1\": {\"policy\": \"importance_score\", \"lanes\": [100, 3000], \"score\": \"reconstruct\"}}";
    assert_int_equal(dt_eviction_config_text(3, "e.json", text, strlen(text), &eviction, &error), DT_OK);
    const dt_budget *budget = dt_eviction_budget(eviction, 1);
    assert_ptr_equal(budget->policy, &dt_policy_reconstruct);
    assert_int_equal(budget->max_cache_size, 3000);
    assert_int_equal(budget->min_cache_size, 50); /* defaults follow the smallest lane */
    assert_int_equal(budget->recent_window, 25);
    assert_int_equal(dt_budget_of_lane(budget, 0).max_cache_size, 100);
    assert_int_equal(dt_budget_of_lane(budget, 1).max_cache_size, 3000);
    require_description(eviction, "TLC: layers 0-1    importance_score  max 100-3000  min 50  sinks 4  recent 25\n"
                                  "TLC:               score reconstruct\nTLC: layers 2      none              keeps everything");
    assert_int_equal(dt_eviction_override(eviction, 512, -1, &error), DT_OK); /* for all layers: for all their lanes */
    assert_int_equal(dt_budget_of_lane(dt_eviction_budget(eviction, 0), 1).max_cache_size, 512);
    dt_eviction_free(eviction);
    require_error(2, "{\"0\": {\"policy\": \"local_window\", \"lanes\": [9000, 130], \"recent_window\": 128}}",
                  "e.json:1: \"0\", \"lanes\": 130 leaves no room beside sink_tokens 4 and recent_window 128; give at least 133");
    require_error(2, "{\"0\": {\"policy\": \"local_window\", \"lanes\": [9000, 130], \"min_cache_size\": 200}}",
                  "e.json:1: \"0\", \"min_cache_size\": 200 is above the smallest of lanes 130; give at most that");
}

/* Scores without a part are named in full where it is told what holds; a part that is no more is refused like any other name. */
static void test_scores_without_a_part(void **state) {
    (void)state;
    dt_eviction *eviction = NULL;
    dt_error error;
    const char *text = "{\"0\": {\"policy\": \"importance_score\", \"max_cache_size\": 512, \"score\": \"fast-without-values\"}}";
    assert_int_equal(dt_eviction_config_text(1, "e.json", text, strlen(text), &eviction, &error), DT_OK);
    assert_ptr_equal(dt_eviction_budget(eviction, 0)->policy, &dt_policy_fast_without_values);
    require_description(eviction, "TLC: layers 0      importance_score  max 512  min 256  sinks 4  recent 128\n"
                                  "TLC:               score fast-without-values");
    dt_eviction_free(eviction);
    require_field_error("\"score\": \"fast-without-pooling\"", "\"score\": must be \"fast\", \"predict\" or \"reconstruct\"");
    require_field_error("\"score\": \"\"", "\"score\": must be \"fast\", \"predict\" or \"reconstruct\"");
}

static void test_shared_budget(void **state) {
    (void)state;
    dt_eviction *eviction = NULL;
    dt_error error;
    const char *text = "{\"budget\": \"adaptive\", \"total_cache_size\": 4096,\n \"layers\": {\"0-2\": {\"policy\": "
                       "\"importance_score\"}}}";
    assert_int_equal(dt_eviction_config_text(4, "e.json", text, strlen(text), &eviction, &error), DT_OK);
    assert_int_equal(dt_eviction_total(eviction), 4096);
    require_layer(eviction, 2, "importance_score", INT32_MAX, 0, 4, 64);
    require_description(eviction, "TLC: shared budget, 4096 tokens over all layers, 1365 a layer on average\n"
                                  "TLC: layers 0-2    importance_score  max any  min 0  sinks 4  recent 64\n"
                                  "TLC: layers 3      none              keeps everything");
    dt_eviction_free(eviction);
    require_error(4, "{\"budget\": \"adaptive\", \"layers\": {}}",
                  "e.json:1: \"total_cache_size\" is missing; a shared budget needs \"budget\": \"adaptive\", "
                  "\"total_cache_size\" and \"layers\"");
    require_error(4, "{\n\"budget\": \"equal\", \"total_cache_size\": 1, \"layers\": {}}",
                  "e.json:2: \"budget\": must be \"adaptive\"; leave it out for sizes per layer");
    require_error(
        4, "{\"budget\": \"adaptive\",\n\"total_cache_size\": 1.5, \"layers\": {}}",
        "e.json:2: \"total_cache_size\": must be a whole number of tokens, summed over layers, such as 65536, and at least 8");
    require_error(4, "{\"budget\": \"adaptive\", \"total_cache_size\": 99, \"0\": {}}",
                  "e.json:1: \"0\": is not known beside \"budget\", \"total_cache_size\" and \"layers\"; layers are named in "
                  "\"layers\"");
    require_error(4,
                  "{\"budget\": \"adaptive\", \"total_cache_size\": 4096, \"layers\": {\n\"0\": {\"policy\": "
                  "\"local_window\",\n \"sinks\": 4}}}",
                  "e.json:3: \"0\", \"sinks\": is not a field; did you mean \"sink_tokens\"?");
    require_error(
        4,
        "{\"budget\": \"adaptive\", \"total_cache_size\": 100, \"layers\": {\"0-\": {\"policy\": "
        "\"importance_score\", \"recent_window\": 32}}}",
        "e.json: \"total_cache_size\" 100 is less than the 148 tokens that sinks, recent windows and min_cache_size of all "
        "layers keep");
    require_error(
        4, "{\"budget\": \"adaptive\", \"total_cache_size\": 900, \"layers\": {\"0\": {\"policy\": \"local_window\"}}}",
        "e.json: a shared budget compares scores between layers, so all that evict need policy importance_score and the same "
        "score; layer 0 differs");
    text = "{\"budget\": \"adaptive\", \"total_cache_size\": 400, \"layers\": {\"0-\": {\"policy\": \"importance_score\"}}}";
    assert_int_equal(dt_eviction_config_text(4, "e.json", text, strlen(text), &eviction, &error), DT_OK);
    assert_int_equal(dt_eviction_override(eviction, 0, 100, &error), DT_OK);
    assert_int_equal(dt_eviction_override(eviction, 0, 101, &error), DT_ERR_CONFIG);
    assert_int_equal(dt_eviction_override(eviction, 99, -1, &error), DT_ERR_CONFIG);
    assert_int_equal(dt_eviction_total(eviction), 400);
    assert_int_equal(dt_eviction_override(eviction, 200, -1, &error), DT_OK); /* a layer on average */
    assert_int_equal(dt_eviction_total(eviction), 800);
    require_layer(eviction, 0, "importance_score", INT32_MAX, 100, 4, 25);
    dt_eviction_free(eviction);
}

static void test_weights(void **state) {
    (void)state;
    dt_eviction *eviction = NULL;
    dt_error error;
    const char *text = "{\"0-1\": {\"policy\": \"importance_score\", \"score\": \"predict\", \"max_cache_size\": 512, "
                       "\"weights\": [[1, -2.5, 3e-2], [4, 5, 6]]}}";
    assert_int_equal(dt_eviction_config_text(2, "e.json", text, strlen(text), &eviction, &error), DT_OK);
    const dt_budget *budget = dt_eviction_budget(eviction, 1);
    assert_ptr_equal(budget->policy, &dt_policy_predict);
    assert_int_equal(budget->n_weights, 3);
    const dt_budget lane = dt_budget_of_lane(budget, 1);
    assert_true(budget->weights[1] == -2.5f && lane.weights[2] == 6);
    require_description(eviction, "TLC: layers 0-1    importance_score  max 512  min 256  sinks 4  recent 128\n"
                                  "TLC:               score predict");
    dt_score_weights *weights = dt_score_weights_share(eviction->weights);
    dt_eviction_free(eviction);
    assert_true(weights->lists[0][0] == 1 && weights->lists[1] == NULL); /* live on with whoever shares them */
    dt_score_weights_free(weights);
    require_error(2, "{\"0\": {\"policy\": \"importance_score\", \"score\": \"predict\", \"max_cache_size\": 512}}",
                  "e.json:1: \"0\", \"score\": predict needs the model's \"weights\"; ./deeptutor-eval calibrate -m MODEL writes "
                  "a file that has them");
    static const char *const wrong[] = {"7", "[]", "[[]]", "[[1], [1, 2]]", "[[1, \"x\"]]", "[[1e9]]", "[1]", "[[1], 2]"};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        char config[200];
        snprintf(config, sizeof config, "{\"0\": {\"policy\": \"importance_score\", \"max_cache_size\": 512, \"weights\": %s}}",
                 wrong[i]);
        require_error(2, config,
                      "e.json:1: \"0\", \"weights\": must be a list with a list of numbers, of -1e6 to 1e6, for each KV head, as "
                      "./deeptutor-eval calibrate -m MODEL writes it");
    }
}

static void test_lines_in_odd_texts(void **state) {
    (void)state;
    require_error(
        12, "\n\n{ \"0\" : { \"policy\" : \"none\" } ,\r\n \"1\"\n : {\n \"policy\": \"none\",\n\"x{\\\"y:\" \n: [{\"a\": 1}] } }",
        "e.json:7: \"1\", \"x{\"y:\": is not a field; the fields are policy, max_cache_size, min_cache_size, sink_tokens, "
        "recent_window, memory_slots, score, lanes and weights");
}

/* ---- files ---- */

static void write_file(const char *path, const char *text, size_t n) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, n, file), n);
    assert_int_equal(fclose(file), 0);
}

static void test_files(void **state) {
    (void)state;
    const char *path = "eviction config \xD0\xB6.json", *text = "{\"0-\": {\"policy\": \"local_window\", \"max_cache_size\": 100}}";
    dt_eviction *eviction = NULL;
    dt_error error;
    write_file(path, text, strlen(text));
    assert_int_equal(dt_eviction_config_file(4, path, &eviction, &error), DT_OK);
    require_layer(eviction, 3, "local_window", 100, 50, 4, 25);
    dt_eviction_free(eviction);
    char *large = malloc((32 << 20) + 1);
    assert_non_null(large);
    memset(large, ' ', (32 << 20) + 1);
    memcpy(large, text, strlen(text));
    write_file(path, large, 32 << 20);
    assert_int_equal(dt_eviction_config_file(4, path, &eviction, &error), DT_OK);
    dt_eviction_free(eviction);
    write_file(path, large, (32 << 20) + 1);
    assert_int_equal(dt_eviction_config_file(4, path, &eviction, &error), DT_ERR_CONFIG);
    assert_non_null(strstr(error.message, "larger than 32 MiB"));
    free(large);
    assert_int_equal(remove(path), 0);
    assert_int_equal(dt_eviction_config_file(4, path, &eviction, &error), DT_ERR_IO);
    assert_non_null(strstr(error.message, "can't be read: No such file"));
    assert_int_equal(dt_eviction_config_file(4, ".", &eviction, &error), DT_ERR_IO);
    assert_null(eviction);
}

static void test_the_locale_does_not_matter(void **state) {
    (void)state;
    if (setlocale(LC_ALL, "de_DE.UTF-8") == NULL && setlocale(LC_ALL, "fr_FR.UTF-8") == NULL) {
        skip();
    }
    require_field_error("\"min_cache_size\": 0.5",
                        "\"min_cache_size\": must be a whole number such as 512, but is a number with a decimal point or exponent");
    setlocale(LC_ALL, "C");
}

/* Every text that a few wrong bytes make of a good one is refused or accepted, and never more than that. */
static void test_mutations(void **state) {
    (void)state;
    const char *good = "{ \"0-5\":  {\"policy\": \"local_window\", \"max_cache_size\": 4096, \"min_cache_size\": 512},\n"
                       "  \"-6-\": {\"policy\": \"importance_score\", \"max_cache_size\": 8192, \"sink_tokens\": 5} }";
    const size_t n = strlen(good);
    const char bytes[] = "{}[]\":,-0129 \n\\xe.\xC3";
    char text[512];
    uint32_t random = 1;
    for (int32_t round = 0; round < 20000; round++) {
        memcpy(text, good, n);
        size_t length = n;
        for (int32_t i = 0; i <= round % 3; i++) {
            random = random * 1664525u + 1013904223u;
            text[(random >> 8) % n] = bytes[(random >> 20) % (sizeof bytes - 1)];
        }
        length = round % 7 == 0 ? (random >> 4) % n : n;
        dt_eviction *eviction = NULL;
        dt_error error = {.message = ""};
        const dt_status status = dt_eviction_config_text(12, "e.json", text, length, &eviction, &error);
        assert_true((status == DT_OK) == (eviction != NULL));
        assert_true(status == DT_OK || (status == DT_ERR_CONFIG && strncmp(error.message, "e.json:", 7) == 0));
        for (int32_t layer = 0; eviction != NULL && layer < 12; layer++) {
            const dt_budget *b = dt_eviction_budget(eviction, layer);
            assert_true(b->policy == NULL || (b->min_cache_size >= 0 && b->min_cache_size <= b->max_cache_size &&
                                              (int64_t)b->sink_tokens + b->recent_window < b->max_cache_size));
        }
        dt_eviction_free(eviction);
        logged[0] = '\0';
    }
}

/* A preset spares a sliding window longer than its budget; sizes that a user named hold, and the description says so. */
static void test_windows(void **state) {
    (void)state;
    const int32_t windows[] = {4096, 4096, 0, 512};
    dt_error error;
    dt_eviction *eviction = preset(4, "chat");
    dt_eviction_set_windows(eviction, windows);
    require_description(eviction, "TLC: layers 0-1    none              keeps its window of 4096\n"
                                  "TLC: layers 2      importance_score  max 4096  min 512  sinks 4  recent 128\n"
                                  "TLC: layers 3      importance_score  max 4096  min 512  sinks 4  recent 128\n"
                                  "TLC:               window 512");
    assert_null(dt_eviction_budget(eviction, 0)->policy);
    assert_int_equal(dt_eviction_override(eviction, 0, 100, &error), DT_OK); /* names no size of the cache */
    assert_null(dt_eviction_budget(eviction, 0)->policy);
    assert_int_equal(dt_eviction_override(eviction, 1000, -1, &error), DT_OK);
    require_description(eviction, "TLC: layers 0-1    local_window      max 1000  min 100  sinks 4  recent 128\n"
                                  "TLC:               window 4096, evicted from inside too\n"
                                  "TLC: layers 2      importance_score  max 1000  min 100  sinks 4  recent 128\n"
                                  "TLC: layers 3      importance_score  max 1000  min 100  sinks 4  recent 128\n"
                                  "TLC:               window 512");
    dt_eviction_free(eviction);

    eviction = config(4, "{\"0-2\": {\"policy\": \"local_window\", \"max_cache_size\": 4094}}");
    dt_eviction_set_windows(eviction, windows);
    require_description(eviction, "TLC: layers 0-1    local_window      max 4094  min 512  sinks 4  recent 128\n"
                                  "TLC:               window 4096, evicted from inside too\n"
                                  "TLC: layers 2      local_window      max 4094  min 512  sinks 4  recent 128\n"
                                  "TLC: layers 3      none              keeps its window of 512");
    dt_eviction_free(eviction);
}

/* From a file or a flag; layers with a sliding window have none. */
static void test_memory_slots(void **state) {
    (void)state;
    const int32_t windows[] = {0, 0, 512, 0};
    dt_error error;
    dt_eviction *eviction = config(4, "{\"0-2\": {\"policy\": \"local_window\", \"max_cache_size\": 1000, \"memory_slots\": 16}}");
    dt_eviction_set_windows(eviction, windows);
    require_description(eviction, "TLC: layers 0-1    local_window      max 1000  min 500  sinks 4  recent 128\n"
                                  "TLC:               slots 16\n"
                                  "TLC: layers 2      local_window      max 1000  min 500  sinks 4  recent 128\n"
                                  "TLC:               window 512\n"
                                  "TLC: layers 3      none              keeps everything");
    assert_int_equal(dt_eviction_set_memory_slots(eviction, 1025, &error), DT_ERR_CONFIG);
    assert_string_equal(error.message, "memory_slots must be between 0 and 1024, but is 1025");
    assert_int_equal(dt_eviction_set_memory_slots(eviction, -1, &error), DT_ERR_CONFIG);
    assert_int_equal(dt_eviction_set_memory_slots(eviction, 8, &error), DT_OK);
    assert_int_equal(dt_eviction_override(eviction, 600, -1, &error), DT_OK); /* one flag doesn't undo the other */
    require_description(eviction, "TLC: layers 0-1    local_window      max 600  min 300  sinks 4  recent 128\n"
                                  "TLC:               slots 8\n"
                                  "TLC: layers 2      local_window      max 600  min 300  sinks 4  recent 128\n"
                                  "TLC:               window 512\n"
                                  "TLC: layers 3      none              keeps everything");
    dt_eviction_free(eviction);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_windows, begin_log),
        cmocka_unit_test_setup(test_memory_slots, begin_log),
        cmocka_unit_test_setup(test_presets, begin_log),
        cmocka_unit_test_setup(test_presets_on_few_layers, begin_log),
        cmocka_unit_test_setup(test_unknown_preset, begin_log),
        cmocka_unit_test_setup(test_override_of_a_preset, begin_log),
        cmocka_unit_test_setup(test_override_of_a_config, begin_log),
        cmocka_unit_test_setup(test_smallest_sizes, begin_log),
        cmocka_unit_test_setup(test_example_of_the_documentation, begin_log),
        cmocka_unit_test_setup(test_keys, begin_log),
        cmocka_unit_test_setup(test_ranges_are_cut_with_a_warning, begin_log),
        cmocka_unit_test_setup(test_accepted_with_a_warning, begin_log),
        cmocka_unit_test_setup(test_not_json, begin_log),
        cmocka_unit_test_setup(test_bad_keys, begin_log),
        cmocka_unit_test_setup(test_bad_fields, begin_log),
        cmocka_unit_test_setup(test_bad_policies_and_sizes, begin_log),
        cmocka_unit_test_setup(test_advice_is_accepted, begin_log),
        cmocka_unit_test_setup(test_sizes_per_lane, begin_log),
        cmocka_unit_test_setup(test_scores_without_a_part, begin_log),
        cmocka_unit_test_setup(test_shared_budget, begin_log),
        cmocka_unit_test_setup(test_weights, begin_log),
        cmocka_unit_test_setup(test_lines_in_odd_texts, begin_log),
        cmocka_unit_test_setup(test_files, begin_log),
        cmocka_unit_test_setup(test_the_locale_does_not_matter, begin_log),
        cmocka_unit_test_setup(test_mutations, begin_log),
    };
    return cmocka_run_group_tests_name("eviction_config", tests, NULL, NULL);
}
