"""DeepTutor from Python.

    from deeptutor import Model, Session
    model = Model("model.gguf")
    session = Session(model, eviction="chat")
    for piece in session.generate("The capital of France is", n_predict=32, temp=0):
        print(piece, end="", flush=True)
    print(session.stats["kv_bytes"])

A session keeps what was computed: a prompt that goes on from the one before costs only what is new. Errors are `Error`, with the
library's own sentence, which names settings by the programs' flags: they have the names of the parameters here (--kv-type int8:
kv_type="int8"; --kv-memory 100K: kv_memory=100 * 1024; -c: n_ctx; -b: n_batch; -n: n_predict). A session is used by one thread at a time,
in the process that made it: while one is in it, others wait. A model may be shared.
"""
import atexit
import codecs
import contextlib
import ctypes
import json
import os
import queue
import threading
import weakref

from ._library import (Error, call, dt_chat_message, dt_model_params, dt_sampler_params, dt_session_params, dt_session_stats,
                       dt_sync_result, lib, log_fn, number, path_bytes, string, switch, text_bytes, token_array, token_fn)

__all__ = ["Draft", "Error", "Model", "Session", "set_log"]
_KV_TYPES = {"f16": 0, "int8": 1}
_PREFILLS = {"full": 0, "streaming": 1}
_SYNCS = ("nothing", "extended", "rewound", "rebuilt")
_drafted = weakref.WeakSet()  # replies under way in threads
_logs = []  # every callback there was: a thread of the library may still be in an earlier one


def set_log(function):
    """function(level, line), level 0 (error) to 3 (debug); None = no log."""
    if function is not None and not callable(function):
        raise TypeError(f"the log must be a function(level, line), or None, not {function!r}")
    _logs.append(log_fn(lambda level, line, user: function(level, line.decode("utf-8", "replace"))) if function else log_fn())
    lib.dt_log_set(_logs[-1], None)


def _choice(what, choices, name):
    if not isinstance(name, str) or name not in choices:
        raise ValueError(f"{what} must be {' or '.join(choices)}, not {name!r}")
    return choices[name]


def _model(what, model):
    if not isinstance(model, Model):
        raise TypeError(f'{what} must be a Model, such as Model("model.gguf"), not {model!r}')
    return model


def _json(what, value):
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{what} can't be written as JSON: {error}") from None


class _Own:
    """Something of the library's, which this object frees: a copy would free it again."""

    def __reduce_ex__(self, _):
        raise TypeError(f"a {type(self).__name__} can't be copied or pickled; make another one")


class Model(_Own):
    """Weights and tokenizer of a GGUF file."""

    def __init__(self, path, no_mmap=False, device=None, n_device_layers=0, device_split=None, rpc_timeout_s=0):
        """With a device rpc=HOST:PORT a server that goes away ends this process (deeptutor.h, docs/cluster.md)."""
        self._handle = ctypes.c_void_p()
        params = dt_model_params(no_mmap=no_mmap, device=None if device == "" else device, n_device_layers=n_device_layers,
                                 device_split=None if device_split == "" else device_split, rpc_timeout_s=rpc_timeout_s)
        call("dt_model_open", path_bytes("path", path), params, ctypes.byref(self._handle))
        info = lib.dt_model_get_info(self._handle).contents
        self.info = {name: getattr(info, name) for name, _ in info._fields_}
        for name in ("architecture", "name", "weight_type", "device"):
            self.info[name] = self.info[name].decode("utf-8", "replace")
        for name in ("n_kv_heads", "windows"):
            self.info[name] = self.info[name][:info.n_layers]

    def __del__(self):
        if getattr(self, "_handle", None):
            lib.dt_model_close(self._handle)
            self._handle = None

    def tokenize(self, text, add_special=True, parse_special=True):
        data = text_bytes("the text", text, errors="surrogateescape")
        out, n = ctypes.POINTER(ctypes.c_int32)(), ctypes.c_size_t()
        call("dt_tokenize", self._handle, data, len(data), switch("add_special", add_special), switch("parse_special", parse_special),
             ctypes.byref(out), ctypes.byref(n))
        tokens = out[:n.value]
        lib.dt_free(out)
        return tokens

    def token_bytes(self, token, special=False):
        token, special, buffer = number("a token", token), switch("special", special), ctypes.create_string_buffer(256)
        n = lib.dt_token_bytes(self._handle, token, special, buffer, len(buffer))
        if n > len(buffer):
            buffer = ctypes.create_string_buffer(n)
            lib.dt_token_bytes(self._handle, token, special, buffer, n)
        return buffer.raw[:n]

    def is_end(self, token):
        return lib.dt_token_is_end(self._handle, number("a token", token))

    def render_chat(self, messages, template=None, add_assistant=True):
        """messages: [{"role": ..., "content": ...}]; the text that the model's template makes of them."""
        if not isinstance(messages, (list, tuple)) or \
                not all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in messages):
            raise TypeError('messages must be a list of {"role": ..., "content": ...}')
        array = (dt_chat_message * len(messages))(*[(string("role", m["role"]), string("content", m["content"])) for m in messages])
        out = ctypes.c_void_p()
        source = None if template is None or template == "" else string("template", template)
        call("dt_chat_render", self._handle, source, array, len(messages), switch("add_assistant", add_assistant), ctypes.byref(out))
        text = ctypes.string_at(out).decode("utf-8", "replace")
        lib.dt_free(out)
        return text


class _Sampler(_Own):
    def __init__(self, model, **settings):
        params = lib.dt_sampler_default_params()
        if settings.get("seed") == -1:  # another one each time, as for the programs
            settings["seed"] = None
        schema = settings.get("json_schema")
        if isinstance(schema, dict):
            settings["json_schema"] = _json("json_schema", schema)
        elif schema is not None:
            string("json_schema", schema, "a dict, or JSON as a string")
        known = [field for field, _ in dt_sampler_params._fields_]
        for name, value in settings.items():
            if name not in known:
                raise TypeError(f"there is no sampling setting {name}, but n_predict (how many tokens) and {', '.join(known)}")
            if value is not None:
                setattr(params, name, value)
        self.handle = ctypes.c_void_p()
        call("dt_sampler_new", model._handle, ctypes.byref(params), ctypes.byref(self.handle))

    def __del__(self):
        if getattr(self, "handle", None):
            lib.dt_sampler_free(self.handle)
            self.handle = None


class _Used(_Own):
    """What is for one thread at a time: others wait. And what a reply works on, from its first token until its generator ends: nobody else
    changes it meanwhile. The lock is C's and only ever taken by `with`, which Ctrl-C can't come between."""

    _reply = None  # what is under way of a reply that uses it
    _ending = None  # a thread in which the library is about to leave it

    def __new__(cls, *_, **__):
        made = super().__new__(cls)
        made._process = os.getpid()
        made._lock = threading.RLock()  # a callback of the library's, such as the log, may look
        return made

    @property
    def _busy(self):
        return self._reply is not None and self._reply.under_way

    def _check_process(self):
        if self._process != os.getpid():  # its threads stayed there: who waits for them waits for ever
            raise Error("DT_ERR_ARGUMENT", "this was made in the process that forked this one; make another one here, or let "
                                           'multiprocessing start new processes (its method "spawn")')

    def _let_end(self):
        ending = self._ending
        if ending and ending is not threading.current_thread():
            ending.join()
            self._ending = None

    def _change(self, act, *others):
        """act(), which changes this and the others, where no reply uses them."""
        used = (self, *others)
        while True:
            for thing in used:
                thing._check_process()
                thing._let_end()
            with self._lock, used[-1]._lock:
                for thing in used:
                    if thing._busy:
                        raise Error("DT_ERR_ARGUMENT", thing._refusal)
                if all(thing._ending is None for thing in used):  # else the collector closed a reply just now, which needs the lock to end
                    return act()


class _Reply:
    """One for all that a reply uses, so that a single step ends it, between which and the next Ctrl-C has no place."""

    under_way = True


class Draft(_Used):
    """Guesses tokens ahead, for Session.generate(draft=...): the text stays the same, and comes sooner where the guesses are right.

    model None: guesses from the conversation itself, for text that quotes or repeats. Else a smaller Model with the vocabulary of
    `target`, the model that is helped; threads are its own. What a draft has learned helps the next reply, so keep it: one per session.
    """

    _refusal = "the draft helps another reply; finish or close the generator of that first"

    def __init__(self, model=None, target=None, max_tokens=15, threads=0):
        self._models = (model, target)  # must outlive the draft
        self._handle = ctypes.c_void_p()
        max_tokens = number("max_tokens", max_tokens)
        if model is None:
            call("dt_draft_from_lookup", max_tokens, ctypes.byref(self._handle))
        else:
            if target is None:
                raise TypeError("a draft by a model needs its target, the model that is helped")
            _model("model", model)
            _model("target", target)
            params = dt_session_params(n_threads=number("threads", threads, least=0))
            call("dt_draft_from_model", target._handle, model._handle, ctypes.byref(params), max_tokens, ctypes.byref(self._handle))

    def __del__(self):
        if getattr(self, "_handle", None):
            lib.dt_draft_free(self._handle)
            self._handle = None


class _DraftedReply:
    """The library's own loop, which calls back for every token, so it runs in a thread, which waits while the caller has the token and
    is not in the session then: that is still used by one at a time."""

    def __init__(self, session, sampler, draft, n_predict):
        self._arguments = (session, sampler, draft, n_predict)  # what the thread uses outlives it
        # threading's semaphores are Python code, which Ctrl-C leaves half done
        self._wanted, self._ready = queue.SimpleQueue(), queue.SimpleQueue()
        self._token, self._stopped, self._error = None, False, None
        self._thread = threading.Thread(target=self._work, daemon=True)

    def start(self):
        self._thread.start()
        _drafted.add(self)

    def _take(self, token, _):
        self._token = token
        session = self._arguments[0]
        session._lock.release()
        self._ready.put(None)
        self._wanted.get()
        session._lock.acquire()  # nobody but a look, which soon ends, can be in it
        return not self._stopped

    def _work(self):
        session, sampler, draft, n_predict = self._arguments
        self._wanted.get()
        try:
            if not self._stopped:
                with session._lock:
                    call("dt_generate_drafted", session._handle, sampler.handle, draft._handle, n_predict, token_fn(self._take), None,
                         None)
        except BaseException as error:  # whatever it is: the caller waits, and it is the caller's
            self._error = error
        self._token = None
        self._ready.put(None)

    def next(self):
        """None at the end."""
        self._wanted.put(None)
        self._ready.get()
        if self._error:
            raise self._error
        return self._token

    def stop(self):
        self._stopped = True
        self._wanted.put(None)
        session, _, draft, _ = self._arguments
        if not self._thread.is_alive():
            return
        session._ending = draft._ending = self._thread  # whoever claims them next waits for it
        if not session._lock._is_owned():  # else the collector of garbage found the generator there, and it needs the lock to end
            session._let_end()
            draft._let_end()


@atexit.register
def _stop_drafted():
    """While threads still run: a generator that the program leaves behind is closed when they don't any more, and would wait for ever."""
    for reply in list(_drafted):
        reply.stop()


class Session(_Used):
    """One conversation with its KV cache.

    eviction: None (nothing is evicted), a preset's name ("chat", "docqa", "code", "summary") or a dict as in docs/eviction-config.md;
    max_cache_size and min_cache_size override it; like prefill="streaming" they need it. kv_memory: bytes that the cache never exceeds.
    While a generator of it is under way it can be looked at, but not synced, saved, loaded or asked for another reply. While a thread
    is in one of its methods, other threads wait.
    """

    _refusal = "the session is generating; finish or close the generator first"

    def __init__(self, model, n_ctx=0, n_batch=0, threads=0, kv_type="f16", prefill="full", eviction=None, max_cache_size=0,
                 min_cache_size=-1, kv_memory=0):
        self._model = _model("model", model)  # must outlive the session
        self.last_sync = None
        self.seed = None
        self._handle = ctypes.c_void_p()
        max_cache_size = number("max_cache_size", max_cache_size, least=0)
        min_cache_size = number("min_cache_size", min_cache_size, least=-1)
        if eviction is None and (max_cache_size > 0 or min_cache_size >= 0 or prefill == "streaming"):
            raise ValueError('max_cache_size, min_cache_size and prefill="streaming" change nothing without eviction; '
                             'add eviction="chat", or leave them out')
        params = dt_session_params(n_ctx=n_ctx, n_batch=n_batch, n_threads=number("threads", threads, least=0),
                                   kv_memory=number("kv_memory, in bytes,", kv_memory, ctypes.c_uint64),
                                   kv_type=_choice("kv_type", _KV_TYPES, kv_type), prefill=_choice("prefill", _PREFILLS, prefill))
        params.eviction = self._eviction(eviction, max_cache_size, min_cache_size)
        try:
            call("dt_session_new", model._handle, ctypes.byref(params), ctypes.byref(self._handle))
        finally:
            lib.dt_eviction_free(params.eviction)

    def __del__(self):
        if getattr(self, "_handle", None):
            lib.dt_session_free(self._handle)
            self._handle = None

    @property
    def model(self):
        return self._model

    def _eviction(self, eviction, max_cache_size, min_cache_size):
        if eviction is None:
            return None
        out = ctypes.c_void_p()
        if isinstance(eviction, str):
            call("dt_eviction_from_preset", self.model._handle, string("eviction", eviction), ctypes.byref(out))
        else:
            if not isinstance(eviction, dict):
                raise TypeError(f"eviction must be None, a preset's name or a dict as in docs/eviction-config.md, not {eviction!r}")
            text = _json("eviction", eviction).encode()
            call("dt_eviction_from_text", self.model._handle, b"eviction", text, len(text), ctypes.byref(out))
        if max_cache_size > 0 or min_cache_size >= 0:
            try:
                call("dt_eviction_override", out, max_cache_size, min_cache_size)
            except Error:
                lib.dt_eviction_free(out)
                raise
        return out

    def sync(self, tokens):
        """Makes the conversation equal to `tokens`, computing only what is new; says how and how much was reused."""
        result, array = dt_sync_result(), token_array(tokens)
        def act():
            call("dt_session_sync", self._handle, array, len(array), None, None, ctypes.byref(result))
            self.last_sync = {"how": _SYNCS[result.how], "reused_tokens": result.reused_tokens,
                              "computed_tokens": result.computed_tokens, "prefill_ms": result.prefill_ms}
            return self.last_sync
        return self._change(act)

    def generate_tokens(self, prompt, n_predict=-1, draft=None, **sampling):
        """Yields tokens after `prompt` (text or tokens) until an end token, n_predict of them, or the context's end.

        draft: a Draft, or "lookup" for one that lasts as long as this reply. sampling: temp, top_k, top_p, min_p, repeat_penalty,
        repeat_last_n, seed, grammar, json_schema (a dict, or JSON as a string), ignore_end."""
        if draft is not None and draft != "lookup" and not isinstance(draft, Draft):
            raise TypeError(f'draft must be a Draft or "lookup", not {draft!r}')
        n_predict = number("n_predict", n_predict, ctypes.c_int64)
        if n_predict < -1:
            raise ValueError(f"n_predict must be a number of tokens, or -1 for all until the end, not {n_predict}")
        if isinstance(prompt, (list, tuple)) and any(isinstance(message, dict) for message in prompt):
            raise TypeError("prompt must be text or tokens; Model.render_chat makes a text of messages")
        if not isinstance(prompt, (str, bytes)) and not hasattr(prompt, "__iter__"):
            raise TypeError(f"prompt must be text or tokens, not {prompt!r}")
        tokens = token_array(self.model.tokenize(prompt) if isinstance(prompt, (str, bytes)) else prompt)
        draft = Draft() if draft == "lookup" else draft
        others, reply = [draft] if draft is not None else [], _Reply()

        def begin():
            sampler = _Sampler(self.model, **sampling)
            self.seed = lib.dt_sampler_seed(sampler.handle)
            for token in tokens:
                call("dt_sampler_accept", sampler.handle, token, False)
            self.sync(tokens)
            for thing in (self, *others):
                thing._reply = reply
            return sampler
        try:
            sampler = self._change(begin, *others)
            yield from self._tokens(sampler, draft, n_predict)
        finally:  # also where the caller stops early, or Ctrl-C comes
            reply.under_way = False

    def _tokens(self, sampler, draft, n_predict):
        if draft is not None:
            reply = _DraftedReply(self, sampler, draft, n_predict)
            try:
                reply.start()
                while (token := reply.next()) is not None:
                    yield token
                    self._check_process()
            finally:
                reply.stop()
            return
        token, n = ctypes.c_int32(), 0
        while n_predict < 0 or n < n_predict:
            with self._lock:
                call("dt_sampler_sample", sampler.handle, lib.dt_session_logits(self._handle), ctypes.byref(token), None)
            call("dt_sampler_accept", sampler.handle, token.value, True)
            if self.model.is_end(token.value):
                return
            n += 1
            yield token.value
            self._check_process()
            with self._lock:
                stats = self.stats
                if n == n_predict or stats["n_tokens"] >= stats["n_ctx"]:
                    return  # the last token is not computed, as in dt_generate
                call("dt_session_append", self._handle, token.value)

    def generate(self, prompt, n_predict=-1, draft=None, **sampling):
        """generate_tokens as text, in whole characters."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        with contextlib.closing(self.generate_tokens(prompt, n_predict, draft, **sampling)) as tokens:
            for token in tokens:
                piece = decoder.decode(self.model.token_bytes(token))
                if piece:
                    yield piece
        rest = decoder.decode(b"", True)
        if rest:
            yield rest

    def logits(self):
        """After the last token, a list of n_vocab floats; None before the first, and between the tokens of a reply with a draft."""
        self._check_process()
        with self._lock:
            pointer = lib.dt_session_logits(self._handle)
            return pointer[:self.model.info["n_vocab"]] if pointer else None

    @property
    def tokens(self):
        n = ctypes.c_size_t()
        self._check_process()
        with self._lock:
            pointer = lib.dt_session_tokens(self._handle, ctypes.byref(n))
            return pointer[:n.value] if n.value else []

    @property
    def stats(self):
        stats = dt_session_stats()
        self._check_process()
        with self._lock:
            lib.dt_session_get_stats(self._handle, ctypes.byref(stats))
        numbers = {name: getattr(stats, name) for name, _ in stats._fields_}
        numbers["kernel"] = numbers["kernel"].decode()
        numbers["kv_type"] = next(name for name, value in _KV_TYPES.items() if value == numbers["kv_type"])
        return numbers

    def save(self, path):
        name = path_bytes("path", path)
        self._change(lambda: call("dt_session_save", self._handle, None, name))

    def load(self, path):
        name = path_bytes("path", path)
        self._change(lambda: call("dt_session_load", self._handle, None, name))
