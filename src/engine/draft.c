/*
 * Guessing tokens ahead. See draft.h.
 *
 * How long a draft model's guess is depends on how the last ones went, never on time, so that a run can be repeated. Guesses that
 * fail one after the other come ever more rarely: text that nothing predicts costs little. Lookup (lookup.c) decides that by itself.
 * Invariant: a draft model's session always holds a prefix of the context plus its own guesses; dt_session_sync takes those back
 * that were wrong.
 */
#include "engine/draft.h"
#include "engine/lookup.h"
#include "engine/session.h"
#include "graph/device_cache.h"

#include <stdlib.h>
#include <string.h>

_Static_assert(DT_OBSERVE_WINDOW + DT_DRAFT_MAX_TOKENS + 1 <= DT_RING,
               "a draft that is taken back leaves the observed queries there");

#define FIRST_LENGTH 4
#define MAX_PAUSE 64           /* steps without a guess, after many wrong ones */
#define LEAST_PROBABILITY 0.4f /* a draft model that is less sure of a token stops before it */

struct dt_draft {
    dt_draft_fn fn;
    void *user;
    bool adaptive;
    int32_t max_tokens, length; /* of a guess: at most; now */
    int32_t n_misses, pause;    /* guesses wrong at once, in a row; steps to go without one */
    dt_lookup lookup;
    dt_session *session; /* the draft model's; NULL for lookup */
    dt_sampler *greedy;
    int32_t n_given;     /* tokens before the reply, while they have not been read; else 0 */
    int64_t read_tokens; /* of those, since the last dt_draft_take_reading; and the time that took */
    double read_ms;
};

dt_status dt_draft_from_function(dt_draft_fn fn, void *user, int32_t max_tokens, bool adaptive, dt_draft **out, dt_error *error) {
    *out = NULL;
    if (max_tokens < 1 || max_tokens > DT_DRAFT_MAX_TOKENS) {
        return dt_fail(error, DT_ERR_ARGUMENT, "a draft has 1 to %d tokens, not %d", DT_DRAFT_MAX_TOKENS, max_tokens);
    }
    dt_draft *draft = calloc(1, sizeof *draft);
    if (draft == NULL) {
        return dt_fail_memory(error, sizeof *draft, "the draft");
    }
    *draft = (dt_draft){.fn = fn, .user = user, .adaptive = adaptive, .max_tokens = max_tokens};
    draft->length = adaptive ? DT_MIN(max_tokens, FIRST_LENGTH) : max_tokens;
    *out = draft;
    return DT_OK;
}

void dt_draft_free(dt_draft *draft) {
    if (draft != NULL) {
        dt_sampler_free(draft->greedy);
        dt_session_free(draft->session);
        free(draft);
    }
}

/* ---- lookup ---- */

static dt_status look_up(void *user, const int32_t *context, int32_t n, int32_t most, int32_t *out, int32_t *out_n,
                         dt_error *error) {
    (void)error;
    *out_n = dt_lookup_guess(user, context, n, most, out);
    return DT_OK;
}

dt_status dt_draft_from_lookup(int32_t max_tokens, dt_draft **out, dt_error *error) {
    if (DT_LACKS(error, out)) {
        return DT_ERR_ARGUMENT;
    }
    const dt_status status = dt_draft_from_function(look_up, NULL, max_tokens, false, out, error); /* it learns by itself */
    if (status == DT_OK) {
        (*out)->user = &(*out)->lookup;
        dt_lookup_init(&(*out)->lookup);
    }
    return status;
}

/* ---- a smaller model ---- */

/* Reads the text that the reply follows, apart from what was generated since, so that each is counted where it belongs. */
static dt_status read_given(dt_draft *draft, const int32_t *context, int32_t n, dt_error *error) {
    const int32_t n_given = draft->n_given;
    draft->n_given = 0;
    if (n_given <= 0 || n_given > n) {
        return DT_OK;
    }
    dt_sync_result read = {0};
    const dt_status status = dt_session_sync(draft->session, context, (size_t)n_given, NULL, NULL, &read, error);
    draft->read_tokens += read.computed_tokens;
    draft->read_ms += read.prefill_ms;
    return status;
}

static dt_status ask_model(void *user, const int32_t *context, int32_t n, int32_t most, int32_t *out, int32_t *out_n,
                           dt_error *error) {
    dt_draft *draft = user;
    dt_session *s = draft->session;
    if (n + most > s->max_tokens) {
        return DT_OK; /* the draft model's context is full */
    }
    dt_status status = read_given(draft, context, n, error);
    status = status == DT_OK ? dt_session_sync(s, context, (size_t)n, NULL, NULL, NULL, error) : status;
    while (status == DT_OK && *out_n < most) {
        float probability;
        status = dt_sampler_sample(draft->greedy, dt_session_logits(s), &out[*out_n], &probability, error);
        if (status != DT_OK || probability < LEAST_PROBABILITY) {
            break;
        }
        ++*out_n;
        if (dt_token_is_end(s->model, out[*out_n - 1])) {
            break; /* nothing follows it */
        }
        if (*out_n < most) {
            status = dt_session_append(s, out[*out_n - 1], error);
        }
    }
    return status;
}

dt_status dt_draft_from_model(const dt_model *target, const dt_model *model, const dt_session_params *params, int32_t max_tokens,
                              dt_draft **out, dt_error *error) {
    if (DT_LACKS(error, target, model, out)) {
        return DT_ERR_ARGUMENT;
    }
    dt_status status = dt_model_same_vocabulary(target, model, error);
    if (status == DT_OK) {
        status = dt_draft_from_function(ask_model, NULL, max_tokens, true, out, error);
    }
    if (status != DT_OK) {
        return status;
    }
    dt_sampler_params greedy = dt_sampler_default_params();
    greedy.temp = 0;
    status = dt_session_new(model, params, &(*out)->session, error);
    if (status == DT_OK) {
        (*out)->user = *out;
        (*out)->session->is_draft = true;
        status = dt_sampler_new(model, &greedy, &(*out)->greedy, error);
    }
    if (status != DT_OK) {
        dt_draft_free(*out);
        *out = NULL;
    }
    return status;
}

/* ---- how often, and how long ---- */

void dt_draft_begin(dt_draft *draft, int32_t n_given) { draft->n_given = n_given; }

void dt_draft_take_reading(dt_draft *draft, int64_t *out_n_tokens, double *out_ms) {
    *out_n_tokens = draft->read_tokens;
    *out_ms = draft->read_ms;
    draft->read_tokens = 0;
    draft->read_ms = 0;
}

dt_status dt_draft_propose(dt_draft *draft, const int32_t *context, int32_t n, int32_t most, int32_t *out, int32_t *out_n,
                           dt_error *error) {
    *out_n = 0;
    most = DT_MIN(most, draft->length);
    if (most <= 0) {
        return DT_OK;
    }
    if (draft->pause > 0) {
        draft->pause--;
        return DT_OK;
    }
    return draft->fn(draft->user, context, n, most, out, out_n, error);
}

void dt_draft_learn(dt_draft *draft, int32_t n_proposed, int32_t n_accepted) {
    if (!draft->adaptive) {
        return;
    }
    if (n_accepted == n_proposed) {
        draft->length = DT_MIN(2 * draft->length, draft->max_tokens);
    } else {
        draft->length = DT_MIN(n_accepted + 1, draft->max_tokens);
    }
    draft->n_misses = n_accepted > 0 ? 0 : draft->n_misses + 1;
    draft->pause = draft->n_misses < 2 ? 0 : DT_MIN(1 << DT_MIN(draft->n_misses, 16), MAX_PAUSE);
}
