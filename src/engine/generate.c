/*
 * The generation loop: sample, report, compute. One loop for every program, with and without drafts.
 *
 * Drafts (speculative decoding; Leviathan et al. 2023, Chen et al. 2023): the token sampled last is computed together with guesses
 * of what follows it. The sampler then draws from the logits after each token as it would have without; a guess is kept when it is
 * what was drawn. A guess is one definite token, and for such a proposal this is rejection sampling: token x is kept with its
 * probability p(x), and when it is not, what was drawn comes from p without x. So the distribution is that of plain decoding, and
 * even the tokens are, since the random numbers are used in the same order.
 *
 * Invariants: the token sampled last is reported but not computed, so nothing is computed in vain; a draft never reaches beyond the
 * next eviction round, so rounds come at the same tokens as without drafts.
 */
#include "engine/draft.h"
#include "engine/session.h"
#include "text/text.h"

typedef struct generation {
    dt_session *session;
    dt_sampler *sampler;
    int64_t n_predict;
    dt_token_fn on_token;
    void *user;
    dt_generate_result *result;
    dt_error *error;
    bool done;
    int32_t token; /* sampled last */
} generation;

/* Samples a token and reports it. */
static dt_status take(generation *g, const float *logits) {
    dt_status status = dt_sampler_sample(g->sampler, logits, &g->token, NULL, g->error);
    if (status != DT_OK) {
        return status;
    }
    /* An end token is no part of the conversation. Where a chat's template writes one, whoever reads that tells the sampler: twice, and
     * penalties would differ from those of a conversation that was saved and loaded. */
    if (dt_token_is_end(dt_session_model(g->session), g->token)) {
        g->done = true;
        g->result->why = DT_STOP_END;
        return DT_OK;
    }
    status = dt_sampler_accept(g->sampler, g->token, true, g->error);
    if (status != DT_OK) {
        return status;
    }
    g->done = true;
    g->result->n_tokens++;
    bool goes_on = true;
    if (g->on_token) {
        dt_group_begin_asking(g->session->group);
        goes_on = g->on_token(g->token, g->user);
        dt_group_end_asking(g->session->group);
    }
    if (!goes_on) {
        g->result->why = DT_STOP_CALLER;
    } else if (g->result->n_tokens != g->n_predict) {
        g->done = false;
    }
    return DT_OK;
}

/* Guesses what follows the sampled token; batch[0] is that token. *out_n: tokens of the batch. room: tokens that still fit. */
static dt_status guess(generation *g, dt_draft *draft, int64_t room, int32_t batch[DT_DRAFT_MAX_TOKENS + 1], int32_t *out_n) {
    dt_session *s = g->session;
    batch[0] = g->token;
    *out_n = 1;
    int64_t most = DT_MIN(room, (int64_t)dt_session_tokens_to_round(s)) - 1;
    if (g->n_predict > 0) {
        most = DT_MIN(most, g->n_predict - g->result->n_tokens - 1);
    }
    if (draft == NULL || most <= 0) {
        return DT_OK;
    }
    dt_status status = dt_session_reserve_tokens(s, 1, g->error);
    if (status == DT_OK) {
        const int64_t start = dt_clock_us();
        int32_t n = 0;
        s->tokens[s->n_tokens] = g->token; /* behind the conversation: the guess needs it in one piece */
        status = dt_draft_propose(draft, s->tokens, s->n_tokens + 1, (int32_t)DT_MIN(most, DT_DRAFT_MAX_TOKENS), batch + 1, &n,
                                  g->error);
        for (int32_t i = 0; i < n; i++) { /* nothing follows an end token */
            n = dt_token_is_end(dt_session_model(s), batch[1 + i]) ? i + 1 : n;
        }
        *out_n = 1 + n;
        int64_t n_read;
        double read_ms;
        dt_draft_take_reading(draft, &n_read, &read_ms);
        s->stats.draft_prefill_tokens += n_read;
        s->stats.draft_prefill_ms += read_ms;
        s->stats.decode_ms += (double)(dt_clock_us() - start) / 1000.0 - read_ms;
    }
    return status;
}

/* Computes batch[n], n > 1, and samples after each of its tokens until a guess turns out wrong. */
static dt_status verify(generation *g, dt_draft *draft, const int32_t *batch, int32_t n) {
    const float *logits = NULL;
    dt_status status = dt_session_draft(g->session, batch, n, &logits, g->error);
    if (status != DT_OK) {
        return status;
    }
    const size_t n_vocab = (size_t)dt_session_model(g->session)->info.n_vocab;
    int32_t n_keep = 0;
    bool right = true;
    while (status == DT_OK && !g->done && right && n_keep < n) {
        status = take(g, logits + (size_t)n_keep * n_vocab);
        n_keep++;
        right = n_keep < n && g->token == batch[n_keep];
    }
    dt_draft_learn(draft, n - 1, n_keep - 1);
    const dt_status kept = dt_session_keep(g->session, n_keep, g->error);
    return status != DT_OK ? status : kept;
}

dt_status dt_generate_drafted(dt_session *session, dt_sampler *sampler, dt_draft *draft, int64_t n_predict, dt_token_fn on_token,
                              void *user, dt_generate_result *result, dt_error *error) {
    dt_generate_result local = {0};
    result = result ? result : &local;
    *result = (dt_generate_result){.n_tokens = 0, .why = DT_STOP_LENGTH};
    if (DT_LACKS(error, session, sampler)) {
        return DT_ERR_ARGUMENT;
    }
    const dt_status idle = dt_session_check_idle(session, error);
    if (idle != DT_OK) {
        return idle;
    }
    if (dt_sampler_n_logits(sampler) != session->model->info.n_vocab) {
        return dt_fail(error, DT_ERR_ARGUMENT, "the sampler is of another model, with %d tokens instead of %d",
                       dt_sampler_n_logits(sampler), session->model->info.n_vocab);
    }
    if (!dt_session_logits(session)) {
        return dt_fail(error, DT_ERR_ARGUMENT, "there is nothing to continue; give the session a text first");
    }
    if (n_predict == 0) {
        return DT_OK;
    }
    generation g = {.session = session,
                    .sampler = sampler,
                    .n_predict = n_predict,
                    .on_token = on_token,
                    .user = user,
                    .result = result,
                    .error = error};
    if (draft != NULL) {
        dt_draft_begin(draft, session->n_tokens);
    }
    dt_status status = take(&g, dt_session_logits(session));
    while (status == DT_OK && !g.done) {
        const int64_t room = (int64_t)session->max_tokens - session->n_tokens;
        if (room == 0) {
            result->why = DT_STOP_CONTEXT;
            return DT_OK;
        }
        int32_t batch[DT_DRAFT_MAX_TOKENS + 1], n = 1;
        status = guess(&g, draft, room, batch, &n);
        if (status == DT_OK && n > 1) {
            status = verify(&g, draft, batch, n);
        } else if (status == DT_OK) {
            status = dt_session_append(session, g.token, error);
            status = status == DT_OK ? take(&g, dt_session_logits(session)) : status;
        }
    }
    return status;
}

dt_status dt_generate(dt_session *session, dt_sampler *sampler, int64_t n_predict, dt_token_fn on_token, void *user,
                      dt_generate_result *result, dt_error *error) {
    return DT_LACKS(error, session, sampler)
               ? DT_ERR_ARGUMENT /* by this function's name */
               : dt_generate_drafted(session, sampler, NULL, n_predict, on_token, user, result, error);
}
