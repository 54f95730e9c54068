/*
 * Snapshots: earlier states of a conversation, to go back to where eviction has taken what a rewind would need.
 *
 * One is taken at the end of every sync, which is where a reply begins: who asks for another reply, changes the last question, or
 * has a template that rewrites the last turn goes back to it instead of reading everything again. It shares its blocks with the
 * live cache until a side changes them, so it costs little until the next round, and at most what the cache itself takes.
 *
 * Where the tokens are still there they can be cut off instead, but what attention they gave to older ones is part of those scores. So
 * a snapshot is gone back to also then, when few tokens follow it: the session is then what one is that never went further. Without
 * one the scores begin anew (session.c, rewind_to).
 *
 * Invariants: a snapshot's tokens are the first ones of the session's. Snapshots never make the cache's memory exceed what the
 * session was said to take at most: while there are any the allocator's limit is that, and the oldest goes when an allocation
 * fails. A session that shares its memory with forks takes none, since those could not make room; nor does a fork, which was not said
 * to take anything.
 */
#include "engine/session.h"

#include <stdlib.h>
#include <string.h>

static void snapshot_free(dt_snapshot *snapshot) {
    dt_kv_free(snapshot->kv);
    free(snapshot->logits);
    *snapshot = (dt_snapshot){0};
}

static void set_memory_limit(dt_session *s) {
    dt_memory *memory = &s->kv_memory->memory;
    memory->limit = (size_t)(s->n_snapshots > 0 ? s->kv_most : s->params.kv_memory);
}

/* Takes the i-th out of the list. */
static dt_snapshot take_out(dt_session *s, int32_t i) {
    const dt_snapshot taken = s->snapshots[i];
    s->n_snapshots--;
    memmove(s->snapshots + i, s->snapshots + i + 1, (size_t)(s->n_snapshots - i) * sizeof *s->snapshots);
    if (s->n_snapshots == 0) {
        set_memory_limit(s);
    }
    return taken;
}

bool dt_snapshot_yield(dt_session *s) {
    if (s->n_snapshots == 0) {
        return false;
    }
    dt_snapshot oldest = take_out(s, 0);
    dt_log(DT_LOG_DEBUG, "session: the snapshot of %d tokens made room", oldest.n_tokens);
    snapshot_free(&oldest);
    return true;
}

void dt_snapshots_drop(dt_session *s, int32_t n_tokens) {
    while (s->n_snapshots > 0 && s->snapshots[s->n_snapshots - 1].n_tokens > n_tokens) {
        dt_snapshot newest = take_out(s, s->n_snapshots - 1);
        snapshot_free(&newest);
    }
}

/* Is there anything that a later step could take away? */
static bool may_lose(const dt_session *s) {
    bool loses = false, elsewhere = false; /* a device's cache would be copied whole */
    for (int32_t i = 0; i < s->model->info.n_layers; i++) {
        const dt_kv_layer_params *layer = dt_kv_layer(s->kv, i);
        loses = loses || layer->budget.policy != NULL || layer->window > 0;
        elsewhere = elsewhere || layer->format.elsewhere;
    }
    return loses && !elsewhere;
}

void dt_snapshot_take(dt_session *s) {
    const int32_t most = s->params.n_snapshots;
    if (most <= 0 || s->kv_most == 0 || s->params.evict != DT_EVICT_ALWAYS || s->logits == NULL || !may_lose(s) ||
        atomic_load(&s->kv_memory->references) > 1) {
        return;
    }
    dt_snapshots_drop(s, s->n_tokens - 1);
    if (s->n_snapshots == most) {
        dt_snapshot_yield(s);
    }
    const size_t n_vocab = (size_t)s->model->info.n_vocab;
    dt_snapshot taken = {.n_tokens = s->n_tokens, .whole_from = s->whole_from, .peaks_until = s->peaks_until};
    taken.logits = malloc(n_vocab * sizeof *taken.logits);
    if (taken.logits != NULL) {
        do {
            s->kv_memory->memory.limit = (size_t)s->kv_most; /* giving up the last one lifts it */
            (void)dt_kv_fork(s->kv, &taken.kv, NULL);
        } while (taken.kv == NULL && dt_snapshot_yield(s));
    }
    if (taken.kv != NULL) {
        memcpy(taken.logits, s->logits, n_vocab * sizeof *taken.logits);
        s->snapshots[s->n_snapshots++] = taken;
    } else {
        snapshot_free(&taken);
    }
    set_memory_limit(s);
}

/* The newest that is no longer than n_tokens and lacks few of them; -1: none. */
static int32_t nearest(const dt_session *s, int32_t n_tokens) {
    int32_t i = s->n_snapshots - 1;
    while (i >= 0 && s->snapshots[i].n_tokens > n_tokens) {
        i--;
    }
    return i >= 0 && n_tokens - s->snapshots[i].n_tokens <= DT_REPLAYED_TOKENS ? i : -1;
}

bool dt_snapshot_is_near(const dt_session *s, int32_t n_tokens) { return nearest(s, n_tokens) >= 0; }

bool dt_snapshot_restore(dt_session *s, int32_t n_tokens) {
    int32_t best = nearest(s, n_tokens);
    if (best < 0) {
        best = s->n_snapshots - 1;
        while (best >= 0 && s->snapshots[best].n_tokens > n_tokens && s->snapshots[best].whole_from > n_tokens) {
            best--;
        }
    }
    if (best < 0) {
        return false;
    }
    dt_snapshot to = take_out(s, best);
    dt_kv_free(s->kv);
    free(s->own_logits);
    s->kv = to.kv;
    s->n_tokens = to.n_tokens;
    s->whole_from = to.whole_from;
    s->peaks_until = to.peaks_until;
    s->logits = s->own_logits = to.logits;
    dt_snapshots_drop(s, s->n_tokens);
    dt_session_set_limit(s);
    return true;
}

bool dt_snapshot_at(const dt_session *s, int32_t n_tokens) {
    bool found = false;
    for (int32_t i = 0; i < s->n_snapshots; i++) {
        found = found || s->snapshots[i].n_tokens == n_tokens;
    }
    return found;
}
