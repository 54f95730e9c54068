/*
 * Reads an eviction config (JSON, docs/eviction-config.md) and says about every mistake in it where it is and what would be right.
 *
 * jansson gives lines only for syntax errors. For all others the line is found by counting: objects keep the order of the file, so
 * the k-th key of the parsed object is the k-th key in the text, however it is written there.
 * Invariants: nothing that the file says is ignored in silence; whole numbers only, range-checked; nothing depends on the locale.
 */
#include "engine/eviction_json.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_FILE_MIB 32 /* 80 layers of 64 KV heads have 12 MiB of weights */
#define MAX_FILE_BYTES ((size_t)MAX_FILE_MIB << 20)
#define MAX_LANES 4096
#define MAX_WEIGHTS 4096 /* of one KV head */
#define MAX_WEIGHT 1e6

enum { POLICY, MAX_SIZE, MIN_SIZE, SINKS, RECENT, SLOTS, SCORE, LANES, WEIGHTS, N_FIELDS };
static const char *const field_names[N_FIELDS] = {
    "policy", "max_cache_size", "min_cache_size", "sink_tokens", "recent_window", "memory_slots", "score", "lanes", "weights",
};
static const char *const policy_names[] = {"local_window", "importance_score", "none"};
static const char *const shared_keys[] = {"budget", "total_cache_size", "layers"};

typedef struct reader {
    const char *path; /* as shown */
    const char *text;
    size_t n_bytes;
    dt_eviction *eviction;
    int32_t *owner; /* [n_layers] which key set the layer, counted from 1; 0 = none yet */
    int32_t key;    /* that is being read, counted from 0 */
    int depth;      /* of the keys that name layers: 1, or 2 inside of "layers" */
    char key_text[80];
    int32_t first, end; /* its layers, [first, end) */
    dt_error *error;
} reader;

/* ---- where and what ---- */

/* Line of the key number `key` of the object that names layers, or of the field number `field` (-1: none) in that key's object. The
 * text is known to be valid JSON. */
static int line_of(const reader *r, int32_t key, int32_t field) {
    int line = 1, depth = 0;
    int32_t keys = -1, fields = -1;
    for (size_t i = 0; i < r->n_bytes; i++) {
        const char c = r->text[i];
        line += c == '\n';
        depth += (c == '{' || c == '[') - (c == '}' || c == ']');
        if (c != '"') {
            continue;
        }
        for (i++; i < r->n_bytes && r->text[i] != '"'; i++) {
            i += r->text[i] == '\\';
        }
        size_t after = i + 1;
        while (after < r->n_bytes && strchr(" \t\r\n", r->text[after]) != NULL) {
            after++;
        }
        if (after < r->n_bytes && r->text[after] == ':') {
            keys += depth == r->depth;
            fields += depth == r->depth + 1 && keys == key;
            if (keys == key && field < 0 && depth == r->depth) {
                return line;
            }
            if (keys == key && fields == field && depth == r->depth + 1) {
                return line;
            }
        }
    }
    return line;
}

/* Text of the file as it may stand in a message: no control characters, cut where it is long. */
static void show(const char *text, char *out, size_t capacity) {
    size_t n = strlen(text);
    const bool cut = n >= capacity;
    if (cut) {
        n = capacity - 4;
        while (n > 0 && ((unsigned char)text[n] & 0xC0) == 0x80) { /* not in the middle of a UTF-8 character */
            n--;
        }
    }
    for (size_t i = 0; i < n; i++) {
        out[i] = (unsigned char)text[i] < 0x20 || text[i] == 0x7F ? '?' : text[i];
    }
    memcpy(out + n, cut ? "..." : "", cut ? 4 : 1);
}

/* "path:line: "key": what", or with a field "path:line: "key", "field": what". field: its number in the key's object, -1 = none. */
static dt_status fail_at(const reader *r, int32_t field, const char *field_name, const char *format, ...) DT_PRINTF(4, 5);
static dt_status fail_at(const reader *r, int32_t field, const char *field_name, const char *format, ...) {
    char what[512], shown[80];
    va_list arguments;
    va_start(arguments, format);
    dt_format_line(what, sizeof what, format, arguments);
    va_end(arguments);
    const int line = line_of(r, r->key, field);
    if (field < 0) {
        return dt_fail(r->error, DT_ERR_CONFIG, "%s:%d: \"%s\": %s", r->path, line, r->key_text, what);
    }
    show(field_name, shown, sizeof shown);
    return dt_fail(r->error, DT_ERR_CONFIG, "%s:%d: \"%s\", \"%s\": %s", r->path, line, r->key_text, shown, what);
}

static void warn_at(const reader *r, int32_t field, const char *format, ...) DT_PRINTF(3, 4);
static void warn_at(const reader *r, int32_t field, const char *format, ...) {
    char what[512];
    va_list arguments;
    va_start(arguments, format);
    dt_format_line(what, sizeof what, format, arguments);
    va_end(arguments);
    dt_log(DT_LOG_WARN, "%s:%d: \"%s\": %s", r->path, line_of(r, r->key, field), r->key_text, what);
}

static const char *type_name(const json_t *value) {
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        return "an object";
    case JSON_ARRAY:
        return "a list";
    case JSON_STRING:
        return "a string";
    case JSON_INTEGER:
        return "a whole number";
    case JSON_REAL:
        return "a number with a decimal point or exponent";
    case JSON_TRUE:
    case JSON_FALSE:
        return "true or false";
    case JSON_NULL:
        return "null";
    }
    return "of an unknown type";
}

/* Letters to insert, delete or replace to make one of the other; names longer than 31 count as far away. */
static size_t edit_distance(const char *a, const char *b) {
    const size_t n = strlen(a), m = strlen(b);
    if (n > 31 || m > 31) {
        return SIZE_MAX;
    }
    size_t row[32];
    for (size_t j = 0; j <= m; j++) {
        row[j] = j;
    }
    for (size_t i = 1; i <= n; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= m; j++) {
            const size_t replaced = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            row[j] = DT_MIN(replaced, DT_MIN(row[j], row[j - 1]) + 1);
        }
    }
    return row[m];
}

/* The name that was probably meant, or NULL: one with few letters different, else the one that begins most alike. */
static const char *nearest(const char *name, const char *const *names, size_t n) {
    const char *closest = NULL, *alike = NULL;
    size_t least = 4, longest = 3;
    for (size_t i = 0; i < n; i++) {
        const size_t distance = edit_distance(name, names[i]);
        size_t same = 0;
        while (name[same] != '\0' && name[same] == names[i][same]) {
            same++;
        }
        if (distance < least && distance < strlen(names[i]) / 2 + 1) {
            least = distance;
            closest = names[i];
        }
        if (same > longest) {
            longest = same;
            alike = names[i];
        }
    }
    return closest != NULL ? closest : alike;
}

/* ---- fields ---- */

static dt_status read_number(const reader *r, int32_t field, const char *name, const json_t *value, int32_t least, int32_t *out) {
    if (!json_is_integer(value)) {
        return fail_at(r, field, name, "must be a whole number such as 512, but is %s", type_name(value));
    }
    const json_int_t number = json_integer_value(value);
    if (number < least || number > INT32_MAX) {
        return fail_at(r, field, name, "must be between %" PRId32 " and %" PRId32 ", but is %" JSON_INTEGER_FORMAT, least,
                       INT32_MAX, number);
    }
    *out = (int32_t)number;
    return DT_OK;
}

static dt_status read_policy(const reader *r, int32_t field, const json_t *value, const dt_policy **out) {
    const size_t n = sizeof policy_names / sizeof policy_names[0];
    if (!json_is_string(value)) {
        return fail_at(r, field, "policy", "must be \"local_window\", \"importance_score\" or \"none\", but is %s",
                       type_name(value));
    }
    const char *name = json_string_value(value);
    *out = dt_policy_find(name, NULL);
    if (*out == NULL && strcmp(name, "none") != 0) {
        char shown[80];
        show(name, shown, sizeof shown);
        const char *meant = nearest(name, policy_names, n);
        if (meant != NULL) {
            return fail_at(r, field, "policy", "there is no policy \"%s\"; did you mean \"%s\"?", shown, meant);
        }
        return fail_at(r, field, "policy", "there is no policy \"%s\"; the policies are local_window, importance_score and none",
                       shown);
    }
    return DT_OK;
}

/* The sizes become the settings' own. */
static dt_status read_lanes(const reader *r, int32_t field, const json_t *value, dt_eviction_request *request) {
    const size_t n = json_array_size(value); /* 0 for what is no list */
    if (n < 1 || n > MAX_LANES) {
        return fail_at(r, field, "lanes", "must be a list of sizes, one for each KV head, such as [512, 4096], but is %s",
                       json_is_array(value) && n == 0 ? "empty"
                       : json_is_array(value)         ? "longer than any"
                                                      : type_name(value));
    }
    int32_t **list = &r->eviction->lists[r->first];
    free(*list);
    *list = malloc(n * sizeof **list);
    if (*list == NULL) {
        return dt_fail_memory(r->error, n * sizeof **list, "eviction settings");
    }
    dt_status status = DT_OK;
    for (size_t i = 0; i < n && status == DT_OK; i++) {
        status = read_number(r, field, "lanes", json_array_get(value, i), 1, &(*list)[i]);
    }
    request->lanes = *list;
    request->n_lanes = (int32_t)n;
    return status;
}

/* One list of numbers for each KV head, all of the same length; they become the settings' own. */
static dt_status read_weights(const reader *r, int32_t field, const json_t *value, dt_eviction_request *request) {
    static const char what[] =
        "must be a list with a list of numbers, of -1e6 to 1e6, for each KV head, as ./deeptutor-eval calibrate -m MODEL writes it";
    const size_t n_lanes = json_array_size(value), n = json_array_size(json_array_get(value, 0));
    if (n_lanes < 1 || n_lanes > MAX_LANES || n < 1 || n > MAX_WEIGHTS) {
        return fail_at(r, field, "weights", "%s", what);
    }
    dt_score_weights **all = &r->eviction->weights;
    if (*all == NULL) {
        *all = calloc(1, sizeof **all + (size_t)r->eviction->n_layers * sizeof(float *));
        if (*all != NULL) {
            atomic_init(&(*all)->references, 1);
            (*all)->n_layers = r->eviction->n_layers;
        }
    }
    float *list = *all != NULL ? malloc(n_lanes * n * sizeof *list) : NULL;
    if (list == NULL) {
        return dt_fail_memory(r->error, n_lanes * n * sizeof *list, "eviction settings");
    }
    free((*all)->lists[r->first]);
    (*all)->lists[r->first] = list;
    for (size_t i = 0; i < n_lanes; i++) {
        const json_t *lane = json_array_get(value, i);
        for (size_t j = 0; j < n; j++) {
            const json_t *number = json_array_get(lane, j);
            const double weight = json_number_value(number);
            if (json_array_size(lane) != n || !json_is_number(number) || !(weight >= -MAX_WEIGHT && weight <= MAX_WEIGHT)) {
                return fail_at(r, field, "weights", "%s", what);
            }
            list[i * n + j] = (float)weight;
        }
    }
    request->weights = list;
    request->n_weight_lanes = (int32_t)n_lanes;
    request->n_weights = (int32_t)n;
    return DT_OK;
}

/* Which of the scores of the policy; that may stand before or behind it, so it is only checked here. */
static dt_status read_score(const reader *r, int32_t field, const json_t *value) {
    const char *name = json_is_string(value) ? json_string_value(value) : "";
    if (dt_policy_find(dt_policy_importance_score.name, name) == NULL) {
        return fail_at(r, field, "score", "must be \"fast\", \"predict\" or \"reconstruct\"");
    }
    return DT_OK;
}

static dt_status read_field(const reader *r, int32_t field, const char *name, const json_t *value, int32_t at[N_FIELDS],
                            dt_eviction_request *request) {
    int32_t which = 0;
    while (which < N_FIELDS && strcmp(field_names[which], name) != 0) {
        which++;
    }
    if (which < N_FIELDS) {
        at[which] = field;
    }
    dt_status status = DT_OK;
    switch (which) {
    case POLICY:
        return read_policy(r, field, value, &request->policy);
    case MAX_SIZE:
        return read_number(r, field, name, value, 1, &request->max_cache_size);
    case MIN_SIZE:
        return read_number(r, field, name, value, 0, &request->min_cache_size);
    case SINKS:
        return read_number(r, field, name, value, 0, &request->sink_tokens);
    case RECENT:
        return read_number(r, field, name, value, 0, &request->recent_window);
    case SLOTS:
        status = read_number(r, field, name, value, 0, &request->memory_slots);
        if (status == DT_OK && request->memory_slots > DT_MAX_MEMORY_SLOTS) {
            return fail_at(r, field, name, "must be at most %d, but is %" PRId32, DT_MAX_MEMORY_SLOTS, request->memory_slots);
        }
        return status;
    case SCORE:
        return read_score(r, field, value);
    case LANES:
        return read_lanes(r, field, value, request);
    case WEIGHTS:
        return read_weights(r, field, value, request);
    default:
        break;
    }
    const char *meant = nearest(name, field_names, N_FIELDS);
    if (meant != NULL) {
        return fail_at(r, field, name, "is not a field; did you mean \"%s\"?", meant);
    }
    return fail_at(
        r, field, name,
        "is not a field; the fields are policy, max_cache_size, min_cache_size, sink_tokens, recent_window, memory_slots, score, "
        "lanes and weights");
}

/* What the fields of one key say together. at: their numbers, -1 = not given. */
static dt_status check_request(const reader *r, const int32_t at[N_FIELDS], const dt_eviction_request *request) {
    if (at[POLICY] < 0) {
        return fail_at(r, -1, NULL, "\"policy\" is missing; give \"local_window\", \"importance_score\" or \"none\"");
    }
    if (request->policy == NULL) {
        for (int32_t i = MAX_SIZE; i < N_FIELDS; i++) {
            if (at[i] >= 0 && i != SLOTS) {
                warn_at(r, at[i], "policy none keeps everything, so %s has no effect", field_names[i]);
            }
        }
        return DT_OK;
    }
    if (at[MAX_SIZE] >= 0 && at[LANES] >= 0) {
        return fail_at(r, at[LANES], field_names[LANES], "stands instead of max_cache_size; give one of them");
    }
    if (at[SCORE] >= 0 && request->policy->score_name == NULL) {
        warn_at(r, at[SCORE], "policy %s has no choice of scores, so score has no effect", request->policy->name);
    }
    if (request->policy->needs_weights && at[WEIGHTS] < 0) {
        return fail_at(r, at[SCORE], field_names[SCORE],
                       "predict needs the model's \"weights\"; ./deeptutor-eval calibrate -m MODEL writes a file that has them");
    }
    if (at[MAX_SIZE] < 0 && at[LANES] < 0) {
        return fail_at(r, -1, NULL, "\"max_cache_size\" is missing; policy %s needs it, for example \"max_cache_size\": 4096",
                       request->policy->name);
    }
    const dt_budget budget = dt_eviction_complete(request);
    const int32_t least = dt_eviction_smallest_lane(request), sizes = at[LANES] >= 0 ? LANES : MAX_SIZE;
    if (budget.min_cache_size > least) {
        return fail_at(r, at[MIN_SIZE], field_names[MIN_SIZE], "%d is above %s%s %d; give at most that", budget.min_cache_size,
                       sizes == LANES ? "the smallest of " : "", field_names[sizes], least);
    }
    if (dt_eviction_least_size(request) > INT32_MAX) {
        const bool window = at[RECENT] >= 0 && budget.recent_window >= budget.sink_tokens;
        const int32_t field = window ? RECENT : SINKS, other = window ? SINKS : RECENT;
        return fail_at(r, at[field], field_names[field], "%d leaves no room in any layer, beside %s %d; give a smaller one",
                       window ? budget.recent_window : budget.sink_tokens, field_names[other],
                       window ? budget.sink_tokens : budget.recent_window);
    }
    if (!dt_eviction_has_room(request)) {
        return fail_at(r, at[sizes], field_names[sizes],
                       "%d leaves no room beside sink_tokens %d and recent_window %d; give at least %" PRId64, least,
                       budget.sink_tokens, budget.recent_window, dt_eviction_least_size(request));
    }
    if (request->min_cache_size == 0 && at[MIN_SIZE] >= 0) {
        warn_at(r, at[MIN_SIZE],
                "min_cache_size 0: nothing keeps later budgets from emptying these layers but sinks and recent window");
    }
    return DT_OK;
}

/* ---- keys ---- */

/* A decimal number with an optional minus; far beyond any model's layers it stays there. Returns NULL when there is none. */
static const char *parse_layer(const char *text, int64_t *out) {
    const bool negative = *text == '-';
    text += negative;
    if (*text < '0' || *text > '9') {
        return NULL;
    }
    int64_t value = 0;
    for (; *text >= '0' && *text <= '9'; text++) {
        value = DT_MIN(value * 10 + (*text - '0'), INT32_MAX);
    }
    *out = negative ? -value : value;
    return text;
}

/* "7", "0-15", "16-", "-8--1": first and last layer as written; open: "to the last layer". */
static bool parse_range(const char *text, int64_t *first, int64_t *last, bool *open) {
    text = parse_layer(text, first);
    *last = *first;
    *open = false;
    if (text == NULL || *text == '\0') {
        return text != NULL;
    }
    if (*text != '-') {
        return false;
    }
    *open = text[1] == '\0';
    if (*open) {
        return true;
    }
    text = parse_layer(text + 1, last);
    return text != NULL && *text == '\0';
}

static dt_status read_key(reader *r, const char *key) {
    const int32_t n = r->eviction->n_layers;
    int64_t first = 0, last = 0;
    bool open = false;
    if (!parse_range(key, &first, &last, &open)) {
        return fail_at(
            r, -1, NULL,
            "does not name layers; right are \"7\", \"0-15\", \"16-\" (to the last layer) and \"-8--1\" (the last eight)");
    }
    first += first < 0 ? n : 0;
    last = open ? n - 1 : last + (last < 0 ? n : 0);
    if (first >= n || last < 0) {
        return fail_at(r, -1, NULL, "lies wholly outside the model, whose %d layers are 0 to %d", n, n - 1);
    }
    if (first > last) {
        return fail_at(r, -1, NULL, "runs backwards; write the lower layer first");
    }
    r->first = (int32_t)DT_MAX(first, 0);
    r->end = (int32_t)DT_MIN(last, n - 1) + 1;
    if (first < 0 || last >= n) {
        char range[32];
        dt_eviction_range(r->first, r->end, range);
        warn_at(r, -1, "the model has only the layers 0 to %d, so this sets layer%s %s", n - 1, r->end - r->first == 1 ? "" : "s",
                range);
    }
    for (int32_t layer = r->first; layer < r->end; layer++) {
        if (r->owner[layer] > 0) {
            return fail_at(r, -1, NULL, "sets layer %d, which the key on line %d sets too; every layer may be set only once", layer,
                           line_of(r, r->owner[layer] - 1, -1));
        }
        r->owner[layer] = r->key + 1;
    }
    return DT_OK;
}

/* A request with nothing given. In a budget shared by all, total tokens, a lane has no bound but what is pinned; how many layers share
 * it, and so what each has on average, is known at the end (share_total). */
static dt_eviction_request shared_request(int32_t total, int32_t n_layers) {
    const dt_eviction_request own = {.max_cache_size = -1, .min_cache_size = -1, .sink_tokens = -1, .recent_window = -1};
    const dt_eviction_request shared = {.max_cache_size = INT32_MAX,
                                        .min_cache_size = 0,
                                        .sink_tokens = -1,
                                        .recent_window = -1,
                                        .shared_average = DT_MAX(total / n_layers, 1)};
    return total <= 0 ? own : shared;
}

static dt_status read_entry(reader *r, const char *key, json_t *value) {
    show(key, r->key_text, sizeof r->key_text);
    dt_status status = read_key(r, key);
    if (status != DT_OK) {
        return status;
    }
    if (!json_is_object(value)) {
        return fail_at(r, -1, NULL, "must be an object such as {\"policy\": \"local_window\", \"max_cache_size\": 4096}, but is %s",
                       type_name(value));
    }
    dt_eviction_request request = shared_request(r->eviction->total_cache_size, r->eviction->n_layers);
    int32_t at[N_FIELDS], field = 0;
    for (int32_t i = 0; i < N_FIELDS; i++) {
        at[i] = -1;
    }
    const char *name;
    json_t *field_value;
    json_object_foreach(value, name, field_value) {
        status = read_field(r, field++, name, field_value, at, &request);
        if (status != DT_OK) {
            return status;
        }
    }
    if (at[SCORE] >= 0 && request.policy != NULL && request.policy->score_name != NULL) {
        request.policy = dt_policy_find(request.policy->name, json_string_value(json_object_get(value, field_names[SCORE])));
    }
    if (r->eviction->total_cache_size > 0 && request.policy != NULL) {
        at[MAX_SIZE] = at[MAX_SIZE] < 0 && at[LANES] < 0 ? 0 : at[MAX_SIZE]; /* not given: no bound */
    }
    status = check_request(r, at, &request);
    for (int32_t layer = r->first; layer < r->end && status == DT_OK; layer++) {
        r->eviction->requests[layer] = request;
        r->eviction->budgets[layer] = dt_eviction_complete(&request);
    }
    return status;
}

static void log_unnamed(const reader *r) {
    char list[512] = "";
    size_t length = 0;
    for (int32_t layer = 0, end; layer < r->eviction->n_layers; layer = end) {
        end = layer + 1;
        if (r->owner[layer] > 0) {
            continue;
        }
        while (end < r->eviction->n_layers && r->owner[end] == 0) {
            end++;
        }
        char range[32];
        dt_eviction_range(layer, end, range);
        const size_t more = strlen(range) + 2;
        if (length + more + sizeof ", ..." > sizeof list) {
            memcpy(list + length, ", ...", sizeof ", ...");
            break;
        }
        length += (size_t)snprintf(list + length, sizeof list - length, "%s%s", length == 0 ? "" : ", ", range);
    }
    if (list[0] != '\0') {
        const bool several = strpbrk(list, "-,") != NULL;
        dt_log(DT_LOG_INFO, "TLC: %s does not name layer%s %s: %s nothing", r->path, several ? "s" : "", list,
               several ? "they evict" : "it evicts");
    }
}

/* ---- the file ---- */

/* {"budget": "adaptive", "total_cache_size": N, "layers": {...}} but for what stands in "layers". */
static dt_status read_shared(reader *r, json_t *root) {
    const char *key;
    json_t *value;
    json_object_foreach(root, key, value) {
        show(key, r->key_text, sizeof r->key_text);
        if (strcmp(key, "budget") == 0) {
            if (!json_is_string(value) || strcmp(json_string_value(value), "adaptive") != 0) {
                return fail_at(r, -1, NULL, "must be \"adaptive\"; leave it out for sizes per layer");
            }
        } else if (strcmp(key, "total_cache_size") == 0) {
            if (!json_is_integer(value) || json_integer_value(value) < 8 || json_integer_value(value) > INT32_MAX) {
                return fail_at(r, -1, NULL, "must be a whole number of tokens, summed over layers, such as 65536, and at least 8");
            }
            r->eviction->total_cache_size = (int32_t)json_integer_value(value);
        } else if (strcmp(key, "layers") == 0) {
            if (!json_is_object(value)) {
                return fail_at(r, -1, NULL, "must be an object such as {\"0-\": {\"policy\": \"importance_score\"}}, but is %s",
                               type_name(value));
            }
        } else {
            return fail_at(r, -1, NULL,
                           "is not known beside \"budget\", \"total_cache_size\" and \"layers\"; layers are named in "
                           "\"layers\"");
        }
        r->key++;
    }
    for (size_t i = 0; i < sizeof shared_keys / sizeof shared_keys[0]; i++) {
        if (json_object_get(root, shared_keys[i]) == NULL) {
            return dt_fail(r->error, DT_ERR_CONFIG,
                           "%s:1: \"%s\" is missing; a shared budget needs \"budget\": \"adaptive\", "
                           "\"total_cache_size\" and \"layers\"",
                           r->path, shared_keys[i]);
        }
    }
    return DT_OK;
}

/* Layers that keep everything have no part in a shared budget. */
static void share_total(dt_eviction *e) {
    const int32_t n_sharing = dt_budgets_that_evict(e->budgets, e->n_layers);
    for (int32_t i = 0; n_sharing > 0 && i < e->n_layers; i++) {
        e->requests[i].shared_average = e->total_cache_size / n_sharing;
        e->budgets[i] = dt_eviction_complete(&e->requests[i]);
    }
}

/* Scores must compare between layers, and every lane must have room for its pinned tokens and one more. */
static dt_status check_total(reader *r) {
    dt_eviction *e = r->eviction;
    const dt_policy *policy = NULL;
    share_total(e);
    for (int32_t i = 0; i < e->n_layers; i++) {
        const dt_policy *own = e->budgets[i].policy;
        if (own == &dt_policy_local_window || (own != NULL && policy != NULL && own != policy)) {
            return dt_fail(r->error, DT_ERR_CONFIG,
                           "%s: a shared budget compares scores between layers, so all that evict need policy importance_score and "
                           "the same score; layer %d differs",
                           r->path, i);
        }
        policy = own != NULL ? own : policy;
    }
    const int64_t least = dt_eviction_least_total(e->budgets, e->n_layers);
    if (e->total_cache_size < least) {
        return dt_fail(r->error, DT_ERR_CONFIG,
                       "%s: \"total_cache_size\" %d is less than the %" PRId64
                       " tokens that sinks, recent windows and min_cache_size of all layers keep",
                       r->path, e->total_cache_size, least);
    }
    return DT_OK;
}

static dt_status read_root(reader *r, json_t *root) {
    if (!json_is_object(root)) {
        return dt_fail(
            r->error, DT_ERR_CONFIG,
            "%s:1: must be an object such as {\"0-15\": {\"policy\": \"local_window\", \"max_cache_size\": 4096}}, but is %s",
            r->path, type_name(root));
    }
    const bool shared = json_object_get(root, shared_keys[0]) != NULL || json_object_get(root, shared_keys[1]) != NULL ||
                        json_object_get(root, shared_keys[2]) != NULL;
    if (shared) {
        const dt_status status = read_shared(r, root);
        if (status != DT_OK) {
            return status;
        }
        root = json_object_get(root, "layers");
        r->depth = 2;
        r->key = 0;
    }
    const char *key;
    json_t *value;
    json_object_foreach(root, key, value) {
        const dt_status status = read_entry(r, key, value);
        if (status != DT_OK) {
            return status;
        }
        r->key++;
    }
    log_unnamed(r);
    return shared ? check_total(r) : DT_OK;
}

/* The path as it stands in messages: a very long one would leave no room for the sentence. */
static const char *shown_path(const char *path) {
    const char *slash = strrchr(path, '/');
    return strlen(path) > 300 && slash != NULL ? slash + 1 : path;
}

/* Where memory for a long word runs out, jansson leaves out a byte of it and goes on: a number would have a digit less, a string no
 * end. So what is read once must be read again the same. */
static json_t *load_twice(const reader *r, json_error_t *out_error, bool *out_no_memory) {
    json_t *root = json_loadb(r->text, r->n_bytes, JSON_REJECT_DUPLICATES, out_error);
    json_t *again = json_loadb(r->text, r->n_bytes, JSON_REJECT_DUPLICATES, NULL);
    const bool same = root != NULL ? json_equal(root, again) : again == NULL;
    *out_no_memory = !same || (root == NULL && json_error_code(out_error) == json_error_out_of_memory);
    json_decref(again);
    if (*out_no_memory) {
        json_decref(root);
        return NULL;
    }
    return root;
}

dt_status dt_eviction_config_text(int32_t n_layers, const char *path, const char *text, size_t n_bytes, dt_eviction **out,
                                  dt_error *error) {
    *out = NULL;
    reader r = {.path = shown_path(path), .text = text, .n_bytes = n_bytes, .depth = 1, .error = error};
    if (n_bytes >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0) { /* a byte order mark, as some editors write */
        r.text += 3;
        r.n_bytes -= 3;
    }
    json_error_t json_error;
    bool no_memory;
    json_t *root = load_twice(&r, &json_error, &no_memory);
    if (no_memory) {
        return dt_fail_memory(error, r.n_bytes, "reading the eviction config");
    }
    if (root == NULL) {
        char shown[JSON_ERROR_TEXT_LENGTH];
        show(json_error.text, shown, sizeof shown);
        return dt_fail(error, DT_ERR_CONFIG,
                       "%s:%d: not valid JSON: %s; right is an object such as {\"0-15\": {\"policy\": \"local_window\", "
                       "\"max_cache_size\": 4096}}",
                       r.path, DT_MAX(json_error.line, 1), shown);
    }
    dt_status status = dt_eviction_new(n_layers, "config", path, &r.eviction, error);
    if (status == DT_OK) {
        r.owner = calloc((size_t)n_layers, sizeof *r.owner);
        status = r.owner == NULL ? dt_fail_memory(error, (size_t)n_layers * sizeof *r.owner, "eviction settings") : DT_OK;
    }
    if (status == DT_OK) {
        status = read_root(&r, root);
    }
    json_decref(root);
    free(r.owner);
    if (status != DT_OK) {
        dt_eviction_free(r.eviction);
        return status;
    }
    *out = r.eviction;
    return DT_OK;
}

dt_status dt_eviction_config_file(int32_t n_layers, const char *path, dt_eviction **out, dt_error *error) {
    *out = NULL;
    char *text = malloc(MAX_FILE_BYTES + 1);
    if (text == NULL) {
        return dt_fail_memory(error, MAX_FILE_BYTES + 1, "the eviction config");
    }
    FILE *file = fopen(path, "rb");
    const size_t n_bytes = file == NULL ? 0 : fread(text, 1, MAX_FILE_BYTES + 1, file);
    dt_status status = DT_OK;
    if (file == NULL || ferror(file)) {
        status = dt_fail(error, DT_ERR_IO, "%s: the eviction config can't be read: %s", shown_path(path), strerror(errno));
    } else if (n_bytes > MAX_FILE_BYTES) {
        status =
            dt_fail(error, DT_ERR_CONFIG, "%s: larger than %d MiB, so hardly an eviction config", shown_path(path), MAX_FILE_MIB);
    } else {
        status = dt_eviction_config_text(n_layers, path, text, n_bytes, out, error);
    }
    if (file != NULL) {
        fclose(file);
    }
    free(text);
    return status;
}
