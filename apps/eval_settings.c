/*
 * What deeptutor-eval compares: the settings that flags ask for, or those of a file, which share one reading of each text.
 */
#include "eval.h"
#include "json_parts.h"
#include "run.h"

#include <stdlib.h>
#include <string.h>

static dt_status setting_of_policy(eval *e, eval_setting *setting, int64_t max, dt_error *error) {
    char text[256], layers[160];
    const eval_options *o = e->options;
    const char *score = o->score == 0 ? "" : ", \"score\": \"reconstruct\"";
    int n = 0;
    if (o->budget == 0) {
        n = snprintf(text, sizeof text, "{\"0-\": {\"policy\": \"%.32s\", \"max_cache_size\": %lld%s}}", o->policy, (long long)max,
                     score);
    } else {
        snprintf(layers, sizeof layers, "{\"0-\": {\"policy\": \"%.32s\"%s}}", o->policy, score);
        n = snprintf(text, sizeof text, "{\"budget\": \"adaptive\", \"total_cache_size\": %lld, \"layers\": %s}",
                     (long long)max * dt_model_get_info(e->model)->n_layers, layers);
    }
    dt_status status = dt_eviction_from_text(e->model, "--policy", text, (size_t)n, &setting->eviction, error);
    if (status == DT_OK && o->shared.memory_slots >= 0) {
        status = dt_eviction_set_memory_slots(setting->eviction, (int32_t)o->shared.memory_slots, error);
    }
    return status;
}

static dt_status add_setting(eval *e, double kept, dt_error *error) {
    const eval_options *o = e->options;
    eval_setting *setting = &e->settings[e->n_settings++];
    setting->kept = kept;
    setting->quote = o->quote;
    setting->evict = o->evict == 0 ? DT_EVICT_ALWAYS : DT_EVICT_ONCE;
    const int64_t max = kept > 0 ? (int64_t)(kept * (double)o->n_context) : o->shared.max_cache_size;
    if (o->policy != NULL) {
        return setting_of_policy(e, setting, max, error);
    }
    dt_shared_options shared = o->shared;
    shared.eviction = true;
    shared.max_cache_size = max;
    return dt_shared_options_eviction(&shared, e->model, &setting->eviction, error);
}

static dt_status settings_of_flags(eval *e, dt_error *error) {
    const char *text = e->options->kept;
    if (text == NULL) {
        return add_setting(e, 0, error);
    }
    dt_status status = DT_OK;
    while (status == DT_OK && *text != 0) {
        char word[32] = "";
        const size_t n = strcspn(text, ",");
        double kept = 0;
        if (n < sizeof word) {
            memcpy(word, text, n);
        }
        if (!dt_parse_number(word, &kept) || kept <= 0 || kept > 1 || e->n_settings == EVAL_MAX_SETTINGS) {
            return eval_fail(error, DT_ERR_ARGUMENT, "--kept needs at most %d shares above 0 and up to 1, such as 0.5,0.25",
                             EVAL_MAX_SETTINGS);
        }
        status = add_setting(e, kept, error);
        text += n + (text[n] == ',');
    }
    return status;
}

/* ---- from a file ---- */

/* "config": an object, or the name of a file; or "preset". Sizes that stand beside it override as flags do. */
static dt_status read_eviction(const eval *e, const json_t *row, dt_eviction **out, dt_error *error) {
    const json_t *config = json_object_get(row, "config"), *max = json_object_get(row, "max_cache_size"),
                 *slots = json_object_get(row, "memory_slots");
    dt_shared_options shared = e->options->shared;
    shared.eviction = true;
    shared.eviction_config = json_string_value(config);
    shared.eviction_preset = json_string_value(json_object_get(row, "preset"));
    shared.max_cache_size = max != NULL ? json_integer_value(max) : shared.max_cache_size;
    shared.memory_slots = slots != NULL ? json_integer_value(slots) : shared.memory_slots;
    if (!json_is_object(config)) {
        return dt_shared_options_eviction(&shared, e->model, out, error);
    }
    char *text = dt_json_dump(config, JSON_COMPACT);
    dt_status status = text != NULL ? dt_eviction_from_text(e->model, "config", text, strlen(text), out, error)
                                    : eval_fail(error, DT_ERR_MEMORY, "out of memory");
    free(text);
    if (status == DT_OK && shared.max_cache_size > 0) {
        status = dt_eviction_override(*out, (int32_t)shared.max_cache_size, -1, error);
    }
    return status;
}

static dt_status read_setting(eval *e, const json_t *row, dt_error *error) {
    const char *name = json_string_value(json_object_get(row, "name")), *evict = json_string_value(json_object_get(row, "evict"));
    const json_t *quote = json_object_get(row, "quote");
    const bool once = evict != NULL && strcmp(evict, "once") == 0, always = evict != NULL && strcmp(evict, "always") == 0;
    if (e->n_settings == EVAL_MAX_SETTINGS) {
        return eval_fail(error, DT_ERR_CONFIG, "%s: more than %d settings", e->options->settings, EVAL_MAX_SETTINGS);
    }
    if (name == NULL || !(once || always) || (json_object_get(row, "config") != NULL) == (json_object_get(row, "preset") != NULL)) {
        return eval_fail(error, DT_ERR_CONFIG,
                         "%s: setting %zu needs a \"name\", \"evict\" (\"once\" or \"always\"), and \"config\" or \"preset\"",
                         e->options->settings, e->n_settings + 1);
    }
    if (quote != NULL && !(json_is_number(quote) && json_number_value(quote) >= 0 && json_number_value(quote) <= 1)) {
        return eval_fail(error, DT_ERR_CONFIG, "%s: \"quote\" of setting %zu must be a depth from 0 to 1", e->options->settings,
                         e->n_settings + 1);
    }
    eval_setting *setting = &e->settings[e->n_settings++];
    setting->evict = once ? DT_EVICT_ONCE : DT_EVICT_ALWAYS;
    setting->quote = quote != NULL ? json_number_value(quote) : e->options->quote;
    setting->name = strdup(name);
    return setting->name != NULL ? read_eviction(e, row, &setting->eviction, error)
                                 : eval_fail(error, DT_ERR_MEMORY, "out of memory");
}

static dt_status settings_of_file(eval *e, dt_error *error) {
    json_error_t json_error;
    json_t *rows = json_load_file(e->options->settings, JSON_REJECT_DUPLICATES, &json_error);
    dt_status status = DT_OK;
    if (rows == NULL) {
        return eval_fail(error, DT_ERR_CONFIG, "%s:%d: %s", e->options->settings, json_error.line > 0 ? json_error.line : 1,
                         json_error.text);
    }
    if (!json_is_array(rows) || json_array_size(rows) == 0) {
        status = eval_fail(error, DT_ERR_CONFIG, "%s: must be a list of settings", e->options->settings);
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
