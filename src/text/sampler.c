/*
 * Chooses the next token from logits, with llama.cpp's chain, defaults and order: repeat penalty, top_k, top_p, min_p,
 * temperature, draw; a grammar judges the drawn token first and filters the whole vocabulary only when it refuses.
 *
 * Greedy sampling without penalty and grammar, the common case of long jobs, makes no candidate list: one pass finds the
 * maximum. Invariant: logits are read, never written, and a NaN or +infinity among them ends in DT_ERR_COMPUTE, never
 * in a token.
 */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L /* clock_gettime, getpid */
#endif
#include "base/vectors.h"
#include "text/text_shim.h"

#include "llama.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define TOP_MAX 256

struct dt_sampler {
    int32_t n_logits;     /* given at each call */
    int32_t n_candidates; /* those that are tokens */
    bool no_penalty, plain_greedy;
    dt_sampler_params params; /* of the chain */
    int32_t n_ctx;
    uint32_t seed;
    uint64_t n_draws; /* from the chain */
    dt_text_chain *chain;
    dt_text_grammar *grammar; /* may be NULL */
    int32_t *banned;          /* end tokens when ignored, and what the model's file forbids */
    size_t n_banned;
    llama_token_data *candidates; /* [n_candidates]; made at first use */
};

dt_sampler_params dt_sampler_default_params(void) {
    return (dt_sampler_params){.temp = 0.8f,
                               .top_k = 40,
                               .top_p = 0.95f,
                               .min_p = 0.05f,
                               .repeat_penalty = 1.0f,
                               .repeat_last_n = 64,
                               .seed = DT_SEED_RANDOM};
}

static uint32_t draw_seed(void) {
    static atomic_uint calls;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    uint64_t x = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    x ^= (uint64_t)getpid() << 40 ^ (uint64_t)atomic_fetch_add(&calls, 1) << 20;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    const uint32_t seed = (uint32_t)(x ^ (x >> 31));
    return seed == DT_SEED_RANDOM ? 0 : seed;
}

static dt_status check_params(const dt_vocab *vocab, const dt_sampler_params *p, dt_error *error) {
    if (!dt_is_finite(p->temp) || !dt_is_finite(p->top_p) || !dt_is_finite(p->min_p) || !dt_is_finite(p->repeat_penalty)) {
        return dt_fail(error, DT_ERR_ARGUMENT, "temperature, top_p, min_p and repeat penalty must be finite numbers");
    }
    if (!(p->repeat_penalty > 0.0f) || !dt_is_finite(1.0f / p->repeat_penalty)) {
        return dt_fail(error, DT_ERR_ARGUMENT, "the repeat penalty must be above 0; 1 switches it off");
    }
    if (p->grammar != NULL && p->json_schema != NULL) {
        return dt_fail(error, DT_ERR_ARGUMENT, "give a grammar or a JSON schema, not both");
    }
    if (vocab == NULL && (p->grammar != NULL || p->json_schema != NULL || p->ignore_end)) {
        return dt_fail(error, DT_ERR_TOKENIZER,
                       "the model has no tokenizer, which grammars, JSON schemas and ignoring end tokens need");
    }
    return DT_OK;
}

static dt_status collect_banned(dt_sampler *sampler, const dt_vocab *vocab, bool ignore_end, dt_error *error) {
    int32_t n_suppressed = 0;
    const int32_t *suppressed = vocab != NULL ? dt_vocab_suppressed(vocab, &n_suppressed) : NULL;
    size_t n_end = 0;
    for (int32_t t = 0; ignore_end && t < sampler->n_candidates; t++) {
        n_end += dt_vocab_is_end(vocab, t) ? 1 : 0;
    }
    if (n_end == 0 && n_suppressed <= 0) {
        return DT_OK;
    }
    sampler->banned = malloc((n_end + (size_t)n_suppressed) * sizeof *sampler->banned);
    if (sampler->banned == NULL) {
        return dt_fail_memory(error, (n_end + (size_t)n_suppressed) * sizeof *sampler->banned, "forbidden tokens");
    }
    for (int32_t t = 0; ignore_end && t < sampler->n_candidates; t++) {
        if (dt_vocab_is_end(vocab, t)) {
            sampler->banned[sampler->n_banned++] = t;
        }
    }
    for (int32_t i = 0; i < n_suppressed; i++) {
        if (suppressed[i] >= 0 && suppressed[i] < sampler->n_candidates) {
            sampler->banned[sampler->n_banned++] = suppressed[i];
        }
    }
    return DT_OK;
}

dt_status dt_text_sampler_new(const dt_vocab *vocab, int32_t n_vocab, int32_t n_ctx, const dt_sampler_params *params,
                              dt_sampler **out, dt_error *error) {
    *out = NULL;
    dt_status status = check_params(vocab, params, error);
    if (status != DT_OK) {
        return status;
    }
    dt_sampler *sampler = calloc(1, sizeof *sampler);
    if (sampler == NULL) {
        return dt_fail_memory(error, sizeof *sampler, "a sampler");
    }
    sampler->n_logits = n_vocab;
    sampler->n_candidates = vocab != NULL ? DT_MIN(n_vocab, dt_vocab_size(vocab)) : n_vocab;
    const bool penalty_off = params->repeat_penalty == 1.0f || params->repeat_last_n == 0;
    sampler->no_penalty = penalty_off;
    sampler->plain_greedy = params->temp <= 0.0f && penalty_off;
    sampler->params = *params;
    sampler->params.grammar = sampler->params.json_schema = NULL; /* the caller's memory, used only now */
    sampler->n_ctx = n_ctx;
    sampler->seed = params->seed == DT_SEED_RANDOM ? draw_seed() : params->seed;
    status = collect_banned(sampler, vocab, params->ignore_end, error);
    if (status == DT_OK) {
        status = dt_text_chain_new(n_vocab, n_ctx, params, sampler->seed, &sampler->chain, error);
    }
    if (status == DT_OK && (params->grammar != NULL || params->json_schema != NULL)) {
        status = dt_text_grammar_new(vocab, params->grammar, params->json_schema, &sampler->grammar, error);
    }
    if (status != DT_OK) {
        dt_sampler_free(sampler);
        return status;
    }
    *out = sampler;
    return DT_OK;
}

void dt_sampler_free(dt_sampler *sampler) {
    if (sampler == NULL) {
        return;
    }
    dt_text_chain_free(sampler->chain);
    dt_text_grammar_free(sampler->grammar);
    free(sampler->banned);
    free(sampler->candidates);
    free(sampler);
}

uint32_t dt_sampler_seed(const dt_sampler *sampler) { return sampler != NULL ? sampler->seed : 0; }

int32_t dt_sampler_n_logits(const dt_sampler *sampler) { return sampler->n_logits; }

dt_sampler_state dt_sampler_get_state(const dt_sampler *sampler) {
    return (dt_sampler_state){.seed = sampler->seed, .n_draws = sampler->n_draws};
}

dt_status dt_sampler_set_state(dt_sampler *sampler, const dt_sampler_state *state, dt_error *error) {
    dt_text_chain *chain = NULL;
    dt_status status = dt_text_chain_new(sampler->n_logits, sampler->n_ctx, &sampler->params, state->seed, &chain, error);
    if (status == DT_OK && sampler->params.temp > 0.0f) {
        status = dt_text_chain_skip(chain, state->n_draws, error);
    }
    if (status != DT_OK) {
        dt_text_chain_free(chain);
        return status;
    }
    dt_text_chain_free(sampler->chain);
    sampler->chain = chain;
    sampler->seed = state->seed;
    sampler->n_draws = state->n_draws;
    return DT_OK;
}

/* ---- passes over a whole vocabulary, of which there are three for each token ---- */

/* The largest of n numbers; false when one is NaN or +infinity. */
DT_MANY_PROCESSORS static bool find_maximum(const float *x, int32_t n, float *out) {
    dt_floats best = (dt_floats){0} - INFINITY;
    dt_ints good = (dt_ints){0} - 1;
    int32_t i = 0;
    for (; i + DT_VECTOR <= n; i += DT_VECTOR) {
        dt_floats values;
        memcpy(&values, x + i, sizeof values);
        const dt_ints larger = values > best;
        best = DT_CHOOSE(larger, values, best);
        good &= values <= FLT_MAX;
    }
    float maximum = -INFINITY;
    bool all_good = true;
    for (; i < n; i++) {
        maximum = x[i] > maximum ? x[i] : maximum;
        all_good = all_good && x[i] <= FLT_MAX;
    }
    for (int j = 0; j < DT_VECTOR; j++) {
        maximum = best[j] > maximum ? best[j] : maximum;
        all_good = all_good && good[j] != 0;
    }
    *out = maximum;
    return all_good;
}

/* Adds e^x of numbers x <= 0, those below -87 as that, to *sum within 1e-6. */
static DT_INLINED void add_exponentials(const dt_floats *of, dt_floats *sum) {
    const dt_floats least = (dt_floats){0} - 87.0f;
    dt_floats x = DT_CHOOSE(*of > least, *of, least);
    dt_exponentials(&x);
    *sum += x;
}

DT_MANY_PROCESSORS static float probability_of(const float *logits, int32_t n, float maximum, int32_t token) {
    dt_floats sum = {0};
    int32_t i = 0;
    for (; i + DT_VECTOR <= n; i += DT_VECTOR) {
        dt_floats values;
        memcpy(&values, logits + i, sizeof values);
        values -= maximum;
        add_exponentials(&values, &sum);
    }
    double total = 0;
    for (; i < n; i++) {
        total += exp((double)(logits[i] - maximum));
    }
    for (int j = 0; j < DT_VECTOR; j++) {
        total += (double)sum[j];
    }
    return (float)(exp((double)(logits[token] - maximum)) / total);
}

static bool is_banned(const dt_sampler *sampler, int32_t token) {
    for (size_t i = 0; i < sampler->n_banned; i++) {
        if (sampler->banned[i] == token) {
            return true;
        }
    }
    return false;
}

static dt_status fill_candidates(dt_sampler *sampler, const float *logits, llama_token_data_array *out, dt_error *error) {
    const size_t n = (size_t)sampler->n_candidates;
    if (sampler->candidates == NULL) {
        sampler->candidates = malloc(n * sizeof *sampler->candidates);
        if (sampler->candidates == NULL) {
            return dt_fail_memory(error, n * sizeof *sampler->candidates, "sampling candidates");
        }
    }
    for (size_t i = 0; i < n; i++) {
        sampler->candidates[i] = (llama_token_data){(llama_token)i, logits[i], 0.0f};
    }
    for (size_t i = 0; i < sampler->n_banned; i++) {
        sampler->candidates[sampler->banned[i]].logit = -INFINITY;
    }
    *out = (llama_token_data_array){sampler->candidates, n, -1, false};
    return DT_OK;
}

/* Only the top_k likeliest, which the chain would choose first: most of a draw's time goes into the list of all. Needs top_k in
 * [1, TOP_MAX] and no penalty. Of equal ones the first tokens are taken. */
static dt_status fill_top(dt_sampler *sampler, const float *logits, llama_token_data_array *out, dt_error *error) {
    if (sampler->candidates == NULL) {
        sampler->candidates = malloc((size_t)sampler->n_candidates * sizeof *sampler->candidates);
        if (sampler->candidates == NULL) {
            return dt_fail_memory(error, (size_t)sampler->n_candidates * sizeof *sampler->candidates, "sampling candidates");
        }
    }
    const int32_t most = DT_MIN(sampler->params.top_k, sampler->n_candidates);
    float least = -INFINITY; /* of those taken, once there are enough */
    int32_t n = 0;
    for (int32_t i = 0; i < sampler->n_candidates; i++) {
        if (!(logits[i] > least) || is_banned(sampler, i)) {
            continue;
        }
        int32_t at = n < most ? n++ : most - 1;
        for (; at > 0 && sampler->candidates[at - 1].logit < logits[i]; at--) {
            sampler->candidates[at] = sampler->candidates[at - 1];
        }
        sampler->candidates[at] = (llama_token_data){i, logits[i], 0.0f};
        least = n == most ? sampler->candidates[n - 1].logit : least;
    }
    *out = (llama_token_data_array){sampler->candidates, (size_t)n, -1, true};
    return DT_OK;
}

/* Runs the chain over all candidates, after the grammar where asked. */
static dt_status draw(dt_sampler *sampler, const float *logits, bool grammar_first, int32_t *out_token, dt_error *error) {
    llama_token_data_array list;
    const dt_sampler_params *p = &sampler->params;
    const bool top = !grammar_first && p->top_k > 0 && p->top_k <= TOP_MAX && sampler->no_penalty;
    dt_status status = top ? fill_top(sampler, logits, &list, error) : fill_candidates(sampler, logits, &list, error);
    if (status == DT_OK && grammar_first) {
        status = dt_text_grammar_apply(sampler->grammar, &list, error);
    }
    if (status != DT_OK) {
        return status;
    }
    size_t allowed = 0; /* those left go to the front: the chain's filters then can't draw a forbidden one */
    for (size_t i = 0; i < list.size; i++) {
        if (list.data[i].logit > -INFINITY) {
            list.data[allowed++] = list.data[i];
        }
    }
    if (allowed == 0) {
        return dt_fail(error, DT_ERR_ARGUMENT,
                       grammar_first ? "the grammar allows no token here that could be sampled; allow it to end"
                                     : "no token may be sampled: every one is forbidden or has probability zero");
    }
    list.size = allowed;
    sampler->n_draws++;
    status = dt_text_chain_apply(sampler->chain, &list, error);
    if (status != DT_OK) {
        return status;
    }
    if (list.selected < 0 || (size_t)list.selected >= list.size) {
        return dt_fail(error, DT_ERR_COMPUTE, "the sampler chose no token; check top_p, min_p and the temperature");
    }
    *out_token = list.data[list.selected].id;
    return DT_OK;
}

static dt_status grammar_permits(dt_sampler *sampler, int32_t token, bool *out, dt_error *error) {
    llama_token_data one = {token, 0.0f, 0.0f};
    llama_token_data_array only = {&one, 1, -1, false};
    dt_status status = dt_text_grammar_apply(sampler->grammar, &only, error);
    *out = one.logit > -INFINITY;
    return status;
}

dt_status dt_sampler_sample(dt_sampler *sampler, const float *logits, int32_t *out_token, float *out_probability, dt_error *error) {
    float maximum;
    if (DT_LACKS(error, sampler, out_token)) {
        return DT_ERR_ARGUMENT;
    }
    if (logits == NULL) {
        return dt_fail(error, DT_ERR_ARGUMENT, "there are no logits to draw from; give the session a text first");
    }
    if (!find_maximum(logits, sampler->n_candidates, &maximum)) {
        return dt_fail(error, DT_ERR_COMPUTE,
                       "the model gave a logit that is not a number; the file is damaged, or a value overflowed");
    }
    int32_t token = -1;
    if (sampler->plain_greedy && maximum > -INFINITY) {
        for (token = 0; logits[token] != maximum; token++) {
        }
        token = is_banned(sampler, token) ? -1 : token;
    }
    dt_status status = token >= 0 ? DT_OK : draw(sampler, logits, false, &token, error);
    if (status == DT_OK && sampler->grammar != NULL) {
        bool permitted = false;
        status = grammar_permits(sampler, token, &permitted, error);
        if (status == DT_OK && !permitted) {
            status = draw(sampler, logits, true, &token, error);
        }
    }
    if (status != DT_OK) {
        return status;
    }
    *out_token = token;
    if (out_probability != NULL) {
        *out_probability = probability_of(logits, sampler->n_candidates, maximum, token);
    }
    return DT_OK;
}

dt_status dt_sampler_accept(dt_sampler *sampler, int32_t token, bool from_model, dt_error *error) {
    if (DT_LACKS(error, sampler)) {
        return DT_ERR_ARGUMENT;
    }
    if (token < 0 || token >= sampler->n_logits) {
        return dt_fail(error, DT_ERR_ARGUMENT, "there is no token %d; the vocabulary has %d", token, sampler->n_logits);
    }
    if (from_model && sampler->grammar != NULL) {
        dt_status status = dt_text_grammar_accept(sampler->grammar, token, error);
        if (status != DT_OK) {
            return status;
        }
    }
    return dt_text_chain_accept(sampler->chain, token, error);
}
