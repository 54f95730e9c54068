/*
 * What deeptutor-eval compares: the settings that flags ask for, or those of a file, which share one reading of each text.
 */
#include "eval.h"
#include "json_parts.h"
#include "run.h"

#include <stdlib.h>
#include <string.h>

/* A policy on every layer, whose size comes as an override, as --max-cache-size does: so that of a shared budget too it is what a
 * layer that evicts has on average. */
static dt_status setting_of_policy(const eval *e, const dt_shared_options *sizes, dt_eviction **out, dt_error *error) {
    const eval_options *o = e->options;
    char layers[160], text[256];
    snprintf(layers, sizeof layers, "{\"0-\": {\"policy\": \"%.32s\"%s%s}}", o->policy,
             o->score == 1 ? ", \"score\": \"reconstruct\"" : "",
             o->budget != 1 && strcmp(o->policy, "none") != 0 ? ", \"max_cache_size\": 2147483647" : "");
    const int n = o->budget != 1 ? snprintf(text, sizeof text, "%s", layers)
                                 : snprintf(text, sizeof text,
                                            "{\"budget\": \"adaptive\", \"total_cache_size\": 2147483647, \"layers\": %s}", layers);
    dt_status status = dt_eviction_from_text(e->model, "--policy", text, (size_t)n, out, error);
    return status == DT_OK ? dt_shared_options_sizes(sizes, *out, error) : status;
}

int64_t eval_size_of(const eval *e, double kept) {
    return kept > 0 ? (int64_t)(kept * (double)e->options->n_context) : e->options->shared.max_cache_size;
}

static dt_status add_setting(eval *e, double kept, dt_error *error) {
    const eval_options *o = e->options;
    eval_setting *setting = &e->settings[e->n_settings++];
    setting->kept = kept;
    setting->quote = o->quote;
    setting->evict = o->evict == 0 ? DT_EVICT_ALWAYS : DT_EVICT_ONCE;
    dt_shared_options shared = o->shared;
    shared.eviction = true;
    shared.max_cache_size = eval_size_of(e, kept);
    if (kept > 0 && shared.max_cache_size < 1) {
        return dt_app_fail(error, DT_ERR_ARGUMENT, "--kept %g of a context of %lld is less than one token; give a larger share",
                           kept, (long long)o->n_context);
    }
    return o->policy != NULL ? setting_of_policy(e, &shared, &setting->eviction, error)
                             : dt_shared_options_eviction(&shared, e->model, &setting->eviction, error);
}

static dt_status settings_of_flags(eval *e, dt_error *error) {
    const char *text = e->options->kept;
    if (text == NULL) {
        return add_setting(e, 0, error);
    }
    dt_status status = DT_OK;
    do {
        char word[32] = "";
        const size_t n = strcspn(text, ",");
        double kept = 0;
        if (n < sizeof word) {
            memcpy(word, text, n);
        }
        if (!dt_parse_number(word, &kept) || kept <= 0 || kept > 1) {
            return dt_app_fail(error, DT_ERR_ARGUMENT, "--kept needs shares above 0 and up to 1, such as 0.5,0.25, but has '%.*s'",
                               (int)n, text);
        }
        if (e->n_settings == EVAL_MAX_SETTINGS) {
            return dt_app_fail(error, DT_ERR_ARGUMENT, "--kept takes at most %d shares", EVAL_MAX_SETTINGS);
        }
        status = add_setting(e, kept, error);
        text += n;
    } while (status == DT_OK && *text++ == ',');
    return status;
}

/* ---- from a file ---- */

static dt_status bad_setting(const eval *e, const char *name, dt_error *error, const char *what) {
    return dt_app_fail(error, DT_ERR_CONFIG, "%s: setting \"%.100s\" %s", e->options->settings, name, what);
}

/* A size that stands beside "config" or "preset"; as it is where there is none. */
static bool read_size(const json_t *row, const char *key, int64_t least, int64_t *out) {
    const json_t *value = json_object_get(row, key);
    *out = value != NULL ? json_integer_value(value) : *out;
    return value == NULL || (json_is_integer(value) && *out >= least && *out <= INT32_MAX);
}

/* "config": an object, or the name of a file; or "preset". Sizes that stand beside it override as flags do. */
static dt_status read_eviction(const eval *e, const char *name, const json_t *row, dt_eviction **out, dt_error *error) {
    const json_t *config = json_object_get(row, "config"), *preset = json_object_get(row, "preset");
    dt_shared_options shared = e->options->shared;
    shared.eviction = true;
    shared.eviction_config = json_string_value(config);
    shared.eviction_preset = json_string_value(preset);
    if (config != NULL && preset != NULL) {
        return bad_setting(e, name, error, "has \"config\" and \"preset\"; leave one of them out");
    }
    if ((config == NULL && preset == NULL) || (config != NULL && !json_is_object(config) && !json_is_string(config)) ||
        (preset != NULL && !json_is_string(preset))) {
        return bad_setting(e, name, error, "needs \"config\", an object or a file's name, or \"preset\", a name");
    }
    if (!read_size(row, "max_cache_size", 1, &shared.max_cache_size) ||
        !read_size(row, "min_cache_size", 0, &shared.min_cache_size) || !read_size(row, "memory_slots", 0, &shared.memory_slots)) {
        return bad_setting(e, name, error, "has a size that is no whole number, or out of range");
    }
    if (json_is_string(config)) {
        const dt_status taken = dt_stats_file_check_input(e->options->json, json_string_value(config), error);
        if (taken != DT_OK) {
            return taken;
        }
    }
    if (!json_is_object(config)) {
        return dt_shared_options_eviction(&shared, e->model, out, error);
    }
    char title[128], *text = dt_json_dump(config, JSON_COMPACT);
    snprintf(title, sizeof title, "setting \"%.100s\"", name);
    dt_status status = text != NULL ? dt_eviction_from_text(e->model, title, text, strlen(text), out, error)
                                    : dt_app_fail(error, DT_ERR_MEMORY, "out of memory");
    free(text);
    return status == DT_OK ? dt_shared_options_sizes(&shared, *out, error) : status;
}

static bool is_known(const char *key) {
    static const char *const known[] = {"name",           "evict",          "config",       "preset",
                                        "max_cache_size", "min_cache_size", "memory_slots", "quote"};
    bool any = false;
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        any = any || strcmp(key, known[i]) == 0;
    }
    return any;
}

static dt_status read_setting(eval *e, json_t *row, dt_error *error) {
    const char *name = json_string_value(json_object_get(row, "name")), *evict = json_string_value(json_object_get(row, "evict"));
    const json_t *quote = json_object_get(row, "quote");
    if (e->n_settings == EVAL_MAX_SETTINGS) {
        return dt_app_fail(error, DT_ERR_CONFIG, "%s: more than %d settings", e->options->settings, EVAL_MAX_SETTINGS);
    }
    if (name == NULL) {
        return dt_app_fail(error, DT_ERR_CONFIG, "%s: setting %zu has no \"name\"", e->options->settings, e->n_settings + 1);
    }
    const char *key;
    json_t *value;
    json_object_foreach(row, key, value) {
        if (!is_known(key)) {
            char what[128];
            snprintf(what, sizeof what, "has a field \"%.60s\", which is none", key);
            return bad_setting(e, name, error, what);
        }
    }
    if (evict == NULL || (strcmp(evict, "once") != 0 && strcmp(evict, "always") != 0)) {
        return bad_setting(e, name, error, "needs \"evict\", which is \"once\" or \"always\"");
    }
    if (quote != NULL && !(json_is_number(quote) && json_number_value(quote) >= 0 && json_number_value(quote) <= 1)) {
        return bad_setting(e, name, error, "has a \"quote\" that is no depth from 0 to 1");
    }
    if (quote != NULL && strcmp(e->command, "kld") != 0) {
        return bad_setting(e, name, error, "has a \"quote\", which is for kld");
    }
    eval_setting *setting = &e->settings[e->n_settings++];
    setting->evict = strcmp(evict, "once") == 0 ? DT_EVICT_ONCE : DT_EVICT_ALWAYS;
    setting->quote = quote != NULL ? json_number_value(quote) : e->options->quote;
    setting->name = strdup(name);
    return setting->name != NULL ? read_eviction(e, name, row, &setting->eviction, error)
                                 : dt_app_fail(error, DT_ERR_MEMORY, "out of memory");
}

static dt_status settings_of_file(eval *e, dt_error *error) {
    char *text = NULL;
    size_t n = 0;
    dt_status status = dt_read_file(e->options->settings, &text, &n, error);
    if (status != DT_OK) {
        return status;
    }
    json_error_t why;
    json_t *rows = dt_json_load(text, n, JSON_REJECT_DUPLICATES, &why);
    free(text);
    if (rows == NULL) {
        return json_error_code(&why) == json_error_out_of_memory
                   ? dt_app_fail(error, DT_ERR_MEMORY, "out of memory for %s", e->options->settings)
                   : dt_app_fail(error, DT_ERR_CONFIG, "%s:%d: %s", e->options->settings, why.line > 0 ? why.line : 1, why.text);
    }
    if (!json_is_array(rows) || json_array_size(rows) == 0) {
        status = dt_app_fail(error, DT_ERR_CONFIG, "%s: must be a list of settings", e->options->settings);
    }
    for (size_t i = 0; i < json_array_size(rows) && status == DT_OK; i++) {
        status = read_setting(e, json_array_get(rows, i), error);
    }
    json_decref(rows);
    return status;
}

dt_status eval_make_settings(eval *e, dt_error *error) {
    const dt_eviction *evictions[EVAL_MAX_SETTINGS];
    const dt_status status = e->options->settings != NULL ? settings_of_file(e, error) : settings_of_flags(e, error);
    for (size_t i = 0; i < e->n_settings; i++) {
        evictions[i] = e->settings[i].eviction;
    }
    return status == DT_OK ? dt_eviction_observe(evictions, e->n_settings, &e->observed, error) : status;
}
