/*
 * The generation loop: sample, report, append. One loop for every program.
 * Invariant: the token sampled last is reported but not computed, so nothing is computed in vain.
 */
#include "engine/engine.h"

dt_status dt_generate(dt_session *session, dt_sampler *sampler, int64_t n_predict, dt_token_fn on_token, void *user,
                      dt_generate_result *result, dt_error *error) {
    dt_generate_result local;
    result = result ? result : &local;
    *result = (dt_generate_result){.n_tokens = 0, .why = DT_STOP_LENGTH};
    if (!dt_session_logits(session)) {
        return dt_fail(error, DT_ERR_ARGUMENT, "there is nothing to continue; give the session a text first");
    }
    dt_session_stats stats;
    dt_session_get_stats(session, &stats);
    int64_t room = (int64_t)stats.n_ctx - stats.n_tokens; /* tokens that can still be computed */
    while (n_predict < 0 || result->n_tokens < n_predict) {
        int32_t token;
        float probability;
        dt_status status = dt_sampler_sample(sampler, dt_session_logits(session), &token, &probability, error);
        if (status == DT_OK) {
            status = dt_sampler_accept(sampler, token, true, error);
        }
        if (status != DT_OK) {
            return status;
        }
        if (dt_token_is_end(dt_session_model(session), token)) {
            result->why = DT_STOP_END;
            return DT_OK;
        }
        result->n_tokens++;
        if (on_token && !on_token(token, user)) {
            result->why = DT_STOP_CALLER;
            return DT_OK;
        }
        if (result->n_tokens == n_predict) {
            break;
        }
        if (room-- == 0) {
            result->why = DT_STOP_CONTEXT;
            return DT_OK;
        }
        status = dt_session_append(session, token, probability, error);
        if (status != DT_OK) {
            return status;
        }
    }
    return DT_OK;
}
