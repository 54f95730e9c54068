/*
 * A conversation on the terminal or through a pipe: lines in, replies out, until /exit, the end of input or of the context.
 *
 * Invariant: the tokens of a turn begin with all tokens of the turn before, the reply as it was generated included, so that
 * only new ones are computed; where a template rewrites what was said, the log names the first token that differs.
 */
#ifndef DT_APPS_CHAT_H
#define DT_APPS_CHAT_H

#include "run.h"

typedef struct dt_chat dt_chat;

/* template_name and system_prompt may be NULL. The texts must live as long as the chat. A template that can't render a first
 * message is refused here, DT_ERR_ARGUMENT when it is the one named. */
dt_status dt_chat_new(dt_run *run, const char *template_name, const char *system_prompt, dt_chat **out, dt_error *error);
void dt_chat_free(dt_chat *chat);
/* Goes on with the conversation that dt_chat_note left in the session, where there is one. DT_ERR_ARGUMENT when system_prompt is
 * given and is not that conversation's. */
dt_status dt_chat_resume(dt_chat *chat, const char *system_prompt, dt_error *error);
/* Whether dt_chat_note left one there. */
bool dt_chat_is_in(const dt_session *session);
/* Leaves the conversation, up to the last turn that was answered, with the session, to be saved with it. */
dt_status dt_chat_note(const dt_chat *chat, dt_error *error);
/* One turn; the reply goes to run->output. */
dt_status dt_chat_turn(dt_chat *chat, const char *text, dt_error *error);
/* Turns until the input ends, or the conversation fills its context (a warning, no failure). first_message may be NULL. */
dt_status dt_chat_loop(dt_chat *chat, const char *first_message, dt_error *error);

#endif
