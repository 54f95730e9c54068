"""libdeeptutor through ctypes: the structs and functions of include/deeptutor.h that the package uses.

Invariant: every struct here has the fields of its namesake in the header, in order; tests/test_package.py compares sizes and offsets
with the compiler's.
"""
import contextlib
import ctypes
import operator
import os
import sys
from ctypes import (CFUNCTYPE, POINTER, Structure, c_bool, c_char, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_size_t,
                    c_uint32, c_uint64, c_void_p)


class Error(RuntimeError):
    """What went wrong, in the library's own sentence; `status` is its name, "DT_ERR_IO"."""

    def __init__(self, status, message):
        super().__init__(message)
        self.status = status

    def __reduce__(self):  # RuntimeError's own leaves the status out, and whoever gets it from another process can't make it again
        return type(self), (self.status, *self.args), self.__dict__


# C's type: (smallest, greatest). A signed one reads all its bits set as -1.
_RANGES = {kind: (-2**(8 * ctypes.sizeof(kind) - 1), 2**(8 * ctypes.sizeof(kind) - 1) - 1) if kind(-1).value < 0
           else (0, 2**(8 * ctypes.sizeof(kind)) - 1) for kind in (c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64)}


def number(what, value, kind=c_int32, least=None):
    """A whole number for C: ctypes would cut one that is too big to another, without a word."""
    try:
        whole = operator.index(value)
    except TypeError:
        raise TypeError(f"{what} must be a whole number, not {value!r}") from None
    lowest, most = _RANGES[kind]
    least = lowest if least is None else least
    if not least <= whole <= most:
        raise ValueError(f"{what} must be a whole number from {least} to {most}, not {whole}")
    return whole


def real(what, value):
    """A number for C's float. Whether it is a sensible one, the library says."""
    if not hasattr(value, "__float__") and not hasattr(value, "__index__"):  # float() reads numbers out of text and buffers
        raise TypeError(f"{what} must be a number, not {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{what} must be a number that a float holds; this one is too big") from None


def switch(what, value):
    """True or False: anything else counts as one of them for ctypes, and "false" as True."""
    if isinstance(value, (str, bytes)) or value not in (0, 1):
        raise TypeError(f"{what} must be True or False, not {value!r}")
    return bool(value)


@contextlib.contextmanager
def _half_characters(what, value):
    try:
        yield
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} holds {value[error.start]!r}, half of a character, which no text in UTF-8 has; remove it") from None


def text_bytes(what, value, kind="a string", errors="strict"):
    """The bytes of a str or of UTF-8, for where C is told how many they are."""
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise TypeError(f"{what} must be {kind}, not {value!r}")
    with _half_characters(what, value):
        return value.encode("utf-8", errors)


def string(what, value, kind="a string"):
    """The same where C looks for the end, and would cut it at a NUL."""
    return _whole(what, text_bytes(what, value, kind))


def path_bytes(what, value):
    if not isinstance(value, (str, bytes, os.PathLike)):
        raise TypeError(f"{what} must be the path of a file, not {value!r}")
    path = os.fspath(value)
    with _half_characters(what, path):
        return _whole(what, os.fsencode(path))


def _whole(what, data):
    if 0 in data:
        raise ValueError(f"{what} holds a NUL character, where the library would end it; remove it")
    return data


def token_array(tokens):
    if isinstance(tokens, (str, bytes, bytearray)):  # of bytes, each would count as a token
        raise TypeError("tokens must be a list of whole numbers, not text; Model.tokenize makes one of it")
    try:
        tokens = list(tokens)
    except TypeError:
        raise TypeError(f"tokens must be a list of whole numbers, as Model.tokenize gives, not {tokens!r}") from None
    return (c_int32 * len(tokens))(*[number("a token", token) for token in tokens])


class _Params(Structure):
    """Settings: however a member is set, also by the constructor, it is checked: where ctypes finds an address in what is given for a
    string (a number!), the library reads there."""

    def __setattr__(self, name, value):
        kind = dict(self._fields_).get(name)
        if kind in _RANGES:
            value = number(name, value, kind)
        elif kind is c_float:
            value = real(name, value)
        elif kind is c_bool:
            value = switch(name, value)
        elif kind is c_char_p and value is not None:
            value = string(name, value)
        super().__setattr__(name, value)


class dt_error(Structure):
    _fields_ = [("code", c_int), ("message", c_char * 1024)]


class dt_model_params(_Params):
    _fields_ = [("no_mmap", c_bool), ("no_extra_buffers", c_bool), ("no_tokenizer", c_bool), ("device", c_char_p),
                ("n_device_layers", c_int32), ("device_split", c_char_p), ("rpc_timeout_s", c_int32)]


class dt_model_info(Structure):
    _fields_ = [("architecture", c_char_p), ("name", c_char_p), ("weight_type", c_char_p), ("n_layers", c_int32),
                ("n_embd", c_int32), ("n_heads", c_int32), ("n_vocab", c_int32), ("n_ctx_train", c_int32),
                ("head_dim_k", c_int32), ("head_dim_v", c_int32), ("n_kv_heads", POINTER(c_int32)), ("windows", POINTER(c_int32)),
                ("n_params", c_uint64),
                ("weight_bytes", c_uint64), ("step_weight_bytes", c_uint64), ("device", c_char_p),
                ("has_tokenizer", c_bool), ("has_chat_template", c_bool)]


class dt_chat_message(Structure):
    _fields_ = [("role", c_char_p), ("content", c_char_p)]


class dt_sampler_params(_Params):
    _fields_ = [("temp", c_float), ("top_k", c_int32), ("top_p", c_float), ("min_p", c_float), ("repeat_penalty", c_float),
                ("repeat_last_n", c_int32), ("seed", c_uint32), ("grammar", c_char_p), ("json_schema", c_char_p),
                ("ignore_end", c_bool)]


class dt_session_params(_Params):
    _fields_ = [("n_ctx", c_int32), ("n_batch", c_int32), ("n_threads", c_int32), ("n_threads_batch", c_int32), ("kv_type", c_int),
                ("prefill", c_int), ("kernel", c_char_p), ("eviction", c_void_p), ("evict", c_int), ("kv_block_tokens", c_int32),
                ("kv_memory", c_uint64), ("n_expected", c_int32), ("n_prompt", c_int32), ("n_snapshots", c_int32),
                ("group", c_void_p)]


class dt_sync_result(Structure):
    _fields_ = [("how", c_int), ("reused_tokens", c_int64), ("computed_tokens", c_int64), ("prefill_ms", c_double)]


class dt_session_stats(Structure):
    _fields_ = [("kernel", c_char_p), ("n_tokens", c_int32), ("n_ctx", c_int32), ("n_threads", c_int32), ("n_batch", c_int32),
                ("kv_type", c_int), ("total_cache_size", c_int32), ("kv_bytes", c_uint64), ("kv_bytes_peak", c_uint64), ("kv_bytes_full", c_uint64), ("kv_step_bytes", c_uint64),
                ("prefill_tokens", c_int64),
                ("decode_tokens", c_int64), ("eviction_rounds", c_int64), ("evicted_tokens", c_int64), ("prefill_ms", c_double),
                ("decode_ms", c_double), ("eviction_ms", c_double), ("attention_ms", c_double), ("draft_proposed", c_int64),
                ("draft_accepted", c_int64), ("draft_prefill_tokens", c_int64), ("draft_prefill_ms", c_double)]


class dt_generate_result(Structure):
    _fields_ = [("n_tokens", c_int64), ("why", c_int)]


STRUCTS = (dt_error, dt_model_params, dt_model_info, dt_chat_message, dt_sampler_params, dt_session_params, dt_sync_result,
           dt_session_stats, dt_generate_result)
log_fn = CFUNCTYPE(None, c_int, c_char_p, c_void_p)
token_fn = CFUNCTYPE(c_bool, c_int32, c_void_p)
tokens_p, out_p, error_p = POINTER(c_int32), POINTER(c_void_p), POINTER(dt_error)

# name: (result, arguments). A result of c_int is a status; `call` turns it into an Error.
FUNCTIONS = {
    "dt_status_name": (c_char_p, [c_int]),
    "dt_free": (None, [c_void_p]),
    "dt_log_set": (None, [log_fn, c_void_p]),
    "dt_model_open": (c_int, [c_char_p, POINTER(dt_model_params), out_p, error_p]),
    "dt_model_close": (None, [c_void_p]),
    "dt_model_get_info": (POINTER(dt_model_info), [c_void_p]),
    "dt_tokenize": (c_int, [c_void_p, c_char_p, c_size_t, c_bool, c_bool, POINTER(tokens_p), POINTER(c_size_t), error_p]),
    "dt_token_bytes": (c_size_t, [c_void_p, c_int32, c_bool, c_char_p, c_size_t]),
    "dt_token_is_end": (c_bool, [c_void_p, c_int32]),
    "dt_chat_render": (c_int, [c_void_p, c_char_p, POINTER(dt_chat_message), c_size_t, c_bool, POINTER(c_void_p), error_p]),
    "dt_sampler_default_params": (dt_sampler_params, []),
    "dt_sampler_new": (c_int, [c_void_p, POINTER(dt_sampler_params), out_p, error_p]),
    "dt_sampler_free": (None, [c_void_p]),
    "dt_sampler_seed": (c_uint32, [c_void_p]),
    "dt_sampler_sample": (c_int, [c_void_p, POINTER(c_float), tokens_p, POINTER(c_float), error_p]),
    "dt_sampler_accept": (c_int, [c_void_p, c_int32, c_bool, error_p]),
    "dt_eviction_from_preset": (c_int, [c_void_p, c_char_p, out_p, error_p]),
    "dt_eviction_from_text": (c_int, [c_void_p, c_char_p, c_char_p, c_size_t, out_p, error_p]),
    "dt_eviction_override": (c_int, [c_void_p, c_int32, c_int32, error_p]),
    "dt_eviction_free": (None, [c_void_p]),
    "dt_session_new": (c_int, [c_void_p, POINTER(dt_session_params), out_p, error_p]),
    "dt_session_free": (None, [c_void_p]),
    "dt_session_sync": (c_int, [c_void_p, tokens_p, c_size_t, c_void_p, c_void_p, POINTER(dt_sync_result), error_p]),
    "dt_session_append": (c_int, [c_void_p, c_int32, error_p]),
    "dt_session_logits": (POINTER(c_float), [c_void_p]),
    "dt_session_tokens": (tokens_p, [c_void_p, POINTER(c_size_t)]),
    "dt_session_get_stats": (None, [c_void_p, POINTER(dt_session_stats)]),
    "dt_session_save": (c_int, [c_void_p, c_void_p, c_char_p, error_p]),
    "dt_session_load": (c_int, [c_void_p, c_void_p, c_char_p, error_p]),
    "dt_draft_from_lookup": (c_int, [c_int32, out_p, error_p]),
    "dt_draft_from_model": (c_int, [c_void_p, c_void_p, POINTER(dt_session_params), c_int32, out_p, error_p]),
    "dt_draft_free": (None, [c_void_p]),
    "dt_generate_drafted": (c_int, [c_void_p, c_void_p, c_void_p, c_int64, token_fn, c_void_p, POINTER(dt_generate_result), error_p]),
}


def _load():
    name = "libdeeptutor.dylib" if sys.platform == "darwin" else "libdeeptutor.so"
    here = os.path.join(os.path.dirname(os.path.abspath(__file__)), name)
    library = ctypes.CDLL(os.environ.get("DT_LIBRARY") or (here if os.path.exists(here) else name))
    for function, (result, arguments) in FUNCTIONS.items():
        getattr(library, function).restype = result
        getattr(library, function).argtypes = arguments
    return library


lib = _load()


def call(name, *arguments):
    """Calls a function that returns a status; its last argument, the error, is added here."""
    error = dt_error()
    if getattr(lib, name)(*arguments, ctypes.byref(error)) != 0:
        raise Error(lib.dt_status_name(error.code).decode(), error.message.decode("utf-8", "replace"))
