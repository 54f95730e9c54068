/*
 * Conversations. See chat.h.
 *
 * How a turn extends the one before: let `before` be the text that was rendered last turn, ending in the opening of the
 * reply. The conversation up to and with the reply, rendered now, is `before` + reply + what closes a reply; the whole
 * rendered now is that + the new turn. So what is new is the text from the end of the reply on, and only that is
 * tokenized. A template that trims replies still fits: the model's own tokens stay.
 */
#define _POSIX_C_SOURCE 200809L /* strdup */
#include "chat.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/select.h>
#include <unistd.h>

#define TERMINAL_LINE_BYTES 4096 /* what Linux keeps of a line, its end included, until it is read */
#define LINE_BYTES_MAX (64 << 20)

struct dt_chat {
    dt_run *run;
    const char *template_name;
    dt_chat_message *messages; /* contents are owned, except a system prompt's */
    size_t n_messages, capacity;
    int32_t *tokens; /* of the conversation, replies included */
    size_t n_tokens;
    char *before;                            /* what was rendered last turn, NULL at first */
    size_t n_whole_messages, n_whole_tokens; /* up to the last turn that was answered */
};

static dt_status no_memory(dt_error *error) {
    snprintf(error->message, sizeof error->message, "out of memory for the conversation");
    return error->code = DT_ERR_MEMORY;
}

static dt_status add_message(dt_chat *chat, const char *role, const char *content, dt_error *error) {
    if (chat->n_messages == chat->capacity) {
        const size_t capacity = chat->capacity * 2 + 16;
        dt_chat_message *grown = realloc(chat->messages, capacity * sizeof *grown);
        if (grown == NULL) {
            return no_memory(error);
        }
        chat->messages = grown;
        chat->capacity = capacity;
    }
    char *copy = strdup(content);
    if (copy == NULL) {
        return no_memory(error);
    }
    chat->messages[chat->n_messages++] = (dt_chat_message){role, copy};
    /* cppcheck-suppress memleak ; the message has it */
    return DT_OK;
}

/* Renders what a first turn would be, so that a bad template is known before anyone types. */
static dt_status try_template(dt_chat *chat, dt_error *error) {
    dt_status status = add_message(chat, "user", "Hello", error);
    if (status != DT_OK) {
        return status;
    }
    char *text = NULL;
    status = dt_chat_render(chat->run->model, chat->template_name, chat->messages, chat->n_messages, true, &text, error);
    dt_free(text);
    free((char *)chat->messages[--chat->n_messages].content);
    if (status == DT_ERR_FORMAT && chat->template_name != NULL) {
        status = error->code = DT_ERR_ARGUMENT;
    }
    return status;
}

dt_status dt_chat_new(dt_run *run, const char *template_name, const char *system_prompt, dt_chat **out, dt_error *error) {
    dt_chat *chat = calloc(1, sizeof *chat);
    if (chat == NULL) {
        return no_memory(error);
    }
    chat->run = run;
    chat->template_name = template_name;
    dt_status status = system_prompt != NULL ? add_message(chat, "system", system_prompt, error) : DT_OK;
    if (status == DT_OK) {
        status = try_template(chat, error);
    }
    if (status != DT_OK) {
        dt_chat_free(chat);
        return status;
    }
    *out = chat;
    return DT_OK;
}

void dt_chat_free(dt_chat *chat) {
    if (chat == NULL) {
        return;
    }
    for (size_t i = 0; i < chat->n_messages; i++) {
        free((char *)chat->messages[i].content);
    }
    free(chat->messages);
    free(chat->tokens);
    dt_free(chat->before);
    free(chat);
}

/* ---- tokens of a turn --------------------------------------------------------------------------- */

static bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

/* Where `reply` ends in `text`, with or without the white space around it; NULL when it isn't at the front. */
static const char *after_reply(const char *text, const char *reply) {
    const size_t n = strlen(reply);
    if (strncmp(text, reply, n) == 0) {
        return text + n;
    }
    size_t from = 0, to = n;
    while (from < to && is_space(reply[from])) {
        from++;
    }
    while (to > from && is_space(reply[to - 1])) {
        to--;
    }
    while (is_space(*text)) {
        text++;
    }
    return strncmp(text, reply + from, to - from) == 0 ? text + (to - from) : NULL;
}

static dt_status append_tokens(dt_chat *chat, const int32_t *tokens, size_t n, dt_error *error) {
    int32_t *grown = realloc(chat->tokens, (chat->n_tokens + n + 1) * sizeof *grown);
    if (grown == NULL) {
        return no_memory(error);
    }
    chat->tokens = grown;
    memcpy(grown + chat->n_tokens, tokens, n * sizeof *tokens);
    chat->n_tokens += n;
    return DT_OK;
}

static dt_status append_text(dt_chat *chat, const char *text, size_t n_bytes, bool first, dt_error *error) {
    int32_t *tokens = NULL;
    size_t n = 0;
    dt_status status = dt_tokenize(chat->run->model, text, n_bytes, first, true, &tokens, &n, error);
    if (status == DT_OK) {
        status = append_tokens(chat, tokens, n, error);
    }
    dt_free(tokens);
    return status;
}

/* The template rewrote history: everything is tokenized again, and the session reuses what is still the same. */
static dt_status retokenize(dt_chat *chat, const char *whole, dt_error *error) {
    int32_t *old = chat->tokens;
    const size_t n_old = chat->n_tokens;
    chat->tokens = NULL;
    chat->n_tokens = 0;
    const dt_status status = append_text(chat, whole, strlen(whole), true, error);
    size_t same = 0;
    while (status == DT_OK && same < n_old && same < chat->n_tokens && old[same] == chat->tokens[same]) {
        same++;
    }
    free(old);
    if (status == DT_OK && same < n_old) {
        dt_report(DT_LOG_INFO, "chat: the template rewrote the conversation from token %zu on; what follows is computed again",
                  same);
    }
    return status;
}

static dt_status extend_tokens(dt_chat *chat, const char *whole, dt_error *error) {
    if (chat->before == NULL) {
        return append_text(chat, whole, strlen(whole), true, error);
    }
    char *past = NULL; /* all but the new message */
    const dt_status status =
        dt_chat_render(chat->run->model, chat->template_name, chat->messages, chat->n_messages - 1, false, &past, error);
    if (status != DT_OK) {
        return status;
    }
    const size_t n_before = strlen(chat->before), n_past = strlen(past);
    const char *reply = chat->messages[chat->n_messages - 2].content;
    const char *end = NULL;
    if (strncmp(past, chat->before, n_before) == 0 && strncmp(whole, past, n_past) == 0) {
        end = after_reply(past + n_before, reply);
    }
    const size_t from = end != NULL ? (size_t)(end - past) : 0;
    dt_free(past);
    return end != NULL ? append_text(chat, whole + from, strlen(whole + from), false, error) : retokenize(chat, whole, error);
}

/* ---- turns -------------------------------------------------------------------------------------- */

/* The reply as text for the template: special tokens, NUL bytes and a character cut in the middle are left out. */
static dt_status keep_reply(dt_chat *chat, dt_error *error) {
    const dt_run *run = chat->run;
    const size_t first = run->reply_first, n_tokens = run->n_generated - first;
    size_t n_bytes = 0, used = 0;
    for (size_t i = 0; i < n_tokens; i++) {
        n_bytes += dt_token_bytes(run->model, run->generated[first + i], false, NULL, 0);
    }
    char *text = malloc(n_bytes + 1);
    if (text == NULL) {
        return no_memory(error);
    }
    for (size_t i = 0; i < n_tokens; i++) {
        used += dt_token_bytes(run->model, run->generated[first + i], false, text + used, n_bytes - used);
    }
    size_t kept = 0;
    for (size_t i = 0; i < used; i++) {
        if (text[i] != 0) {
            text[kept++] = text[i];
        }
    }
    size_t start = kept; /* of the last character */
    while (start > 0 && kept - start < 3 && ((unsigned char)text[start - 1] & 0xC0) == 0x80) {
        start--;
    }
    if (start > 0 && (unsigned char)text[start - 1] >= 0xC0) {
        const unsigned char lead = (unsigned char)text[start - 1];
        const size_t needed = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
        kept = kept - start + 1 < needed ? start - 1 : kept;
    }
    text[kept] = 0;
    dt_status status = add_message(chat, "assistant", text, error);
    free(text);
    if (status == DT_OK && n_tokens > 0) {
        status = append_tokens(chat, run->generated + first, n_tokens, error);
    }
    return status;
}

dt_status dt_chat_turn(dt_chat *chat, const char *text, dt_error *error) {
    dt_status status = add_message(chat, "user", text, error);
    if (status != DT_OK) {
        return status;
    }
    char *whole = NULL;
    status = dt_chat_render(chat->run->model, chat->template_name, chat->messages, chat->n_messages, true, &whole, error);
    if (status == DT_OK) {
        status = extend_tokens(chat, whole, error);
    }
    if (status == DT_OK) {
        status = dt_run_reply(chat->run, chat->tokens, chat->n_tokens, error);
        if (status == DT_ERR_LIMIT && chat->before != NULL) { /* a first message that doesn't fit is a failure */
            dt_report(DT_LOG_WARN, "the conversation has outgrown its context and ends here (%s); -c sets a larger one",
                      error->message);
            chat->run->context_full = true;
            dt_free(whole);
            return DT_OK;
        }
    }
    if (status != DT_OK) {
        dt_free(whole);
        return status;
    }
    dt_free(chat->before);
    chat->before = whole;
    status = keep_reply(chat, error);
    if (status == DT_OK) {
        chat->n_whole_messages = chat->n_messages;
        chat->n_whole_tokens = chat->n_tokens;
    }
    return status;
}

/* ---- between runs ------------------------------------------------------------------------------- */

/*
 * The note in a session file: NOTE_MAGIC, then whole numbers of 4 bytes and bytes as docs/session-format.md says. It is read as if
 * it came from anyone: every length is checked against what is left.
 */
#define NOTE_MAGIC "DTCHAT1\n"

static const char *const roles[] = {"system", "user", "assistant"};
#define N_ROLES (sizeof roles / sizeof roles[0])

static void put_number(char **to, size_t value) {
    const uint32_t number = (uint32_t)value;
    memcpy(*to, &number, sizeof number);
    *to += sizeof number;
}

static void put_text(char **to, const char *text) {
    const size_t n = strlen(text);
    put_number(to, n);
    memcpy(*to, text, n);
    *to += n;
}

dt_status dt_chat_note(const dt_chat *chat, dt_error *error) {
    if (chat->before == NULL || chat->n_whole_messages == 0) {
        return dt_session_set_note(chat->run->session, NULL, 0, error);
    }
    const size_t n_messages = chat->n_whole_messages, n_tokens = chat->n_whole_tokens;
    size_t n = sizeof NOTE_MAGIC + 3 * sizeof(uint32_t) + strlen(chat->before) + n_tokens * sizeof(int32_t);
    for (size_t i = 0; i < n_messages; i++) {
        n += 2 * sizeof(uint32_t) + strlen(chat->messages[i].content);
    }
    char *note = malloc(n), *to = note;
    if (note == NULL) {
        return no_memory(error);
    }
    memcpy(to, NOTE_MAGIC, strlen(NOTE_MAGIC));
    to += strlen(NOTE_MAGIC);
    put_number(&to, n_messages);
    for (size_t i = 0; i < n_messages; i++) {
        size_t role = 0;
        while (role + 1 < N_ROLES && strcmp(roles[role], chat->messages[i].role) != 0) {
            role++;
        }
        put_number(&to, role);
        put_text(&to, chat->messages[i].content);
    }
    put_text(&to, chat->before);
    put_number(&to, n_tokens);
    memcpy(to, chat->tokens, n_tokens * sizeof *chat->tokens);
    to += n_tokens * sizeof *chat->tokens;
    const dt_status status = dt_session_set_note(chat->run->session, note, (size_t)(to - note), error);
    free(note);
    return status;
}

typedef struct note {
    const char *at;
    size_t left;
} note;

static bool get_number(note *from, size_t *out) {
    uint32_t number;
    if (from->left < sizeof number) {
        return false;
    }
    memcpy(&number, from->at, sizeof number);
    from->at += sizeof number;
    from->left -= sizeof number;
    *out = number;
    return true;
}

/* A copy, to be freed with dt_free or free; NULL when it is not whole, or with the error set: out of memory. */
static char *get_text(note *from, dt_error *error) {
    size_t n;
    if (!get_number(from, &n) || n > from->left || memchr(from->at, 0, n) != NULL) {
        return NULL;
    }
    char *text = malloc(n + 1);
    if (text != NULL) {
        memcpy(text, from->at, n);
        text[n] = 0;
        from->at += n;
        from->left -= n;
    } else {
        no_memory(error);
    }
    return text;
}

static bool read_note(dt_chat *chat, note *from, dt_error *error) {
    size_t n_messages, n_tokens, role;
    if (!get_number(from, &n_messages)) {
        return false;
    }
    for (size_t i = 0; i < n_messages; i++) {
        char *content = get_number(from, &role) && role < N_ROLES ? get_text(from, error) : NULL;
        const bool added = content != NULL && add_message(chat, roles[role], content, error) == DT_OK;
        free(content);
        if (!added) {
            return false;
        }
    }
    chat->before = get_text(from, error);
    if (chat->before == NULL || !get_number(from, &n_tokens) || from->left != n_tokens * sizeof(int32_t)) {
        return false;
    }
    int32_t *tokens = malloc(from->left + 1); /* the note is not aligned */
    if (tokens == NULL) {
        no_memory(error);
        return false;
    }
    memcpy(tokens, from->at, from->left);
    const bool added = append_tokens(chat, tokens, n_tokens, error) == DT_OK;
    free(tokens);
    const size_t n = chat->n_messages;
    chat->n_whole_messages = n;
    chat->n_whole_tokens = n_tokens;
    return added && n >= 2 && strcmp(chat->messages[n - 1].role, "assistant") == 0;
}

bool dt_chat_is_in(const dt_session *session) {
    size_t n = 0;
    const char *bytes = dt_session_note(session, &n);
    return n >= strlen(NOTE_MAGIC) && memcmp(bytes, NOTE_MAGIC, strlen(NOTE_MAGIC)) == 0;
}

dt_status dt_chat_resume(dt_chat *chat, const char *system_prompt, dt_error *error) {
    note from;
    from.at = dt_session_note(chat->run->session, &from.left);
    if (!dt_chat_is_in(chat->run->session)) {
        return DT_OK;
    }
    from.at += strlen(NOTE_MAGIC);
    from.left -= strlen(NOTE_MAGIC);
    while (chat->n_messages > 0) {
        free((char *)chat->messages[--chat->n_messages].content);
    }
    error->code = DT_OK;
    if (!read_note(chat, &from, error)) {
        if (error->code == DT_ERR_MEMORY) {
            return error->code;
        }
        snprintf(error->message, sizeof error->message, "the chat in the session file is damaged; name another file");
        return error->code = DT_ERR_FORMAT;
    }
    const dt_chat_message *first = &chat->messages[0];
    if (system_prompt != NULL && (strcmp(first->role, "system") != 0 || strcmp(first->content, system_prompt) != 0)) {
        snprintf(error->message, sizeof error->message,
                 "the session file holds a chat with another system prompt; leave out -sys to go on with it, or name another file");
        return error->code = DT_ERR_ARGUMENT;
    }
    dt_report(DT_LOG_INFO, "chat: goes on after %zu messages", chat->n_messages);
    return DT_OK;
}

/* ---- input -------------------------------------------------------------------------------------- */

typedef struct input {
    bool terminal;
    char *line; /* not terminated */
    size_t line_capacity;
    char *message; /* its lines joined */
    size_t n, capacity;
} input;

static void on_continue(int signal_number) { (void)signal_number; } /* its only effect is to end a wait for input */

static void begin_input(input *in) {
    in->terminal = isatty(STDIN_FILENO);
    if (in->terminal) {
        struct sigaction action = {.sa_handler = on_continue};
        sigemptyset(&action.sa_mask);
        sigaction(SIGCONT, &action, NULL);
        dt_report(DT_LOG_INFO, "chat: /exit or Ctrl-D ends it, Ctrl-C stops a reply, \\ continues a line");
        dt_report(DT_LOG_INFO, "chat: a line of more than %d bytes goes in with -f FILE", TERMINAL_LINE_BYTES - 1);
    }
}

/* Waits until a terminal has a line. False with errno EINTR when a signal came, however short before the wait: signals are let in
 * by the wait alone. */
static bool wait_for_line(void) {
    sigset_t signals, before;
    sigemptyset(&signals);
    static const int numbers[] = {SIGINT, SIGTERM, SIGHUP, SIGCONT};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        sigaddset(&signals, numbers[i]);
    }
    sigprocmask(SIG_BLOCK, &signals, &before);
    fd_set set;
    FD_ZERO(&set);
    FD_SET(STDIN_FILENO, &set);
    errno = EINTR;
    const bool there = !dt_interrupted && pselect(STDIN_FILENO + 1, &set, NULL, NULL, NULL, &before) > 0;
    const int reason = there ? 0 : errno;
    sigprocmask(SIG_SETMASK, &before, NULL);
    errno = reason;
    return there;
}

/* getline, but lines end at LINE_BYTES_MAX: -1 with errno EFBIG. A terminal gives one line at a time, so none is buffered here. */
static ssize_t get_line(input *in) {
    size_t n = 0;
    if (in->terminal && !wait_for_line()) {
        return -1;
    }
    for (int c = 0; c != '\n' && (c = getc(stdin)) != EOF;) {
        if (n == LINE_BYTES_MAX) {
            errno = EFBIG;
            return -1;
        }
        if (n == in->line_capacity) {
            const size_t capacity = 2 * in->line_capacity + 256;
            char *grown = realloc(in->line, capacity);
            if (grown == NULL) {
                return -1;
            }
            in->line = grown;
            in->line_capacity = capacity;
        }
        in->line[n++] = (char)c;
    }
    return n > 0 && errno != EINTR ? (ssize_t)n : -1;
}

/* Reads a line without its end. -1 at the end of input, when interrupted, and with errno set when it failed. */
static ssize_t read_line(input *in, const char *sign) {
    ssize_t n;
    do { /* again after Ctrl-Z and fg */
        if (in->terminal) {
            fputs(sign, stderr);
        }
        clearerr(stdin);
        errno = 0;
        n = get_line(in);
    } while (n < 0 && errno == EINTR && !dt_interrupted);
    if (n < 0 && in->terminal) {
        fputc('\n', stderr);
    }
    if (n > 0 && in->line[n - 1] == '\n') {
        n--;
    }
    if (n > 0 && in->line[n - 1] == '\r') {
        n--;
    }
    return n;
}

/* Reads a message: a line, and those that it continues on. *out_more is false at the end of input or when interrupted. */
static dt_status read_message(input *in, bool *out_more, dt_error *error) {
    bool continues = true, cut = false;
    *out_more = false;
    in->n = 0;
    for (const char *sign = "> "; continues; sign = "  ") {
        const ssize_t got = read_line(in, sign);
        if (got < 0 && errno == EFBIG) {
            snprintf(error->message, sizeof error->message, "a message has a line of more than %d MiB; put line ends into it",
                     LINE_BYTES_MAX >> 20);
            return error->code = DT_ERR_LIMIT;
        }
        if (got < 0 && errno == ENOMEM) {
            return no_memory(error);
        }
        if (got < 0) {
            break;
        }
        *out_more = true;
        const size_t n = (size_t)got;
        if (in->n + n + 2 > in->capacity) {
            const size_t capacity = 2 * (in->n + n) + 256;
            char *grown = realloc(in->message, capacity);
            if (grown == NULL) {
                return no_memory(error);
            }
            in->message = grown;
            in->capacity = capacity;
        }
        cut = cut || (in->terminal && n >= TERMINAL_LINE_BYTES - 1);
        memcpy(in->message + in->n, in->line, n);
        in->n += n;
        continues = n > 0 && in->line[n - 1] == '\\';
        if (continues) {
            in->message[in->n - 1] = '\n';
        }
    }
    if (cut) {
        dt_report(DT_LOG_WARN, "the terminal cuts lines of more than %d bytes, so this message was not sent; use -f FILE",
                  TERMINAL_LINE_BYTES - 1);
        in->n = 0;
    }
    *out_more = *out_more && !dt_interrupted; /* what was begun when Ctrl-C came is not meant to be sent */
    if (*out_more) {
        in->message[in->n] = 0;
    }
    return DT_OK;
}

/* "/word", blanks around it aside. */
static bool is_command(const char *message, char out[32]) {
    int end = 0;
    return sscanf(message, " /%30[a-zA-Z] %n", out, &end) == 1 && end > 0 && message[end] == 0;
}

static bool is_blank(const char *message) { return message[strspn(message, " \t\n")] == 0; }

dt_status dt_chat_loop(dt_chat *chat, const char *first_message, dt_error *error) {
    input in = {0};
    char command[32];
    const dt_run *run = chat->run;
    begin_input(&in);
    dt_status status = first_message != NULL ? dt_chat_turn(chat, first_message, error) : DT_OK;
    while (status == DT_OK && !run->output.closed && !run->context_full) {
        bool more = false;
        if (dt_interrupted == SIGINT && in.terminal) {
            dt_interrupted = 0; /* it ended the reply, not the conversation */
        }
        if (!dt_interrupted) {
            status = read_message(&in, &more, error);
        }
        if (!more || status != DT_OK) {
            break;
        }
        if (strlen(in.message) != in.n) {
            snprintf(error->message, sizeof error->message,
                     "a message holds a NUL byte, which a chat template can't take; remove it");
            status = error->code = DT_ERR_ARGUMENT;
        } else if (is_command(in.message, command)) {
            if (strcmp(command, "exit") == 0) {
                break;
            }
            dt_report(DT_LOG_WARN, "there is no command /%s; the only one is /exit", command);
        } else if (!is_blank(in.message)) {
            status = dt_chat_turn(chat, in.message, error);
        }
    }
    free(in.line);
    free(in.message);
    return status;
}
