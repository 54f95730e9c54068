"""The Python package between threads and processes. DT_PREFIX as in test_package.py."""
import copy
import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time

import pytest
from test_package import MODEL, ROOT, deeptutor, library, pytestmark  # noqa: F401: a fixture, and what skips all of this


def open_model(path):
    import deeptutor
    return deeptutor.Model(path).info["n_vocab"]


def test_errors_and_results_go_between_processes(deeptutor, tmp_path, monkeypatch):
    """An error that can't be made again there lets the caller of a pool wait for ever."""
    missing = str(tmp_path / "none.gguf")
    with pytest.raises(deeptutor.Error) as caught:
        deeptutor.Model(missing)
    error = caught.value
    error.row = 7
    for other in (*(pickle.loads(pickle.dumps(error, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)),
                  copy.copy(error), copy.deepcopy(error)):
        assert type(other) is deeptutor.Error and str(other) == str(error) and other.args == error.args
        assert (other.status, other.row, vars(other)) == ("DT_ERR_IO", 7, vars(error))
    monkeypatch.setenv("PYTHONPATH", os.path.join(ROOT, "python") + os.pathsep + os.path.dirname(os.path.abspath(__file__)))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        with pytest.raises(deeptutor.Error, match="none.gguf"):
            pool.map_async(open_model, [missing]).get(timeout=60)
        assert pool.map_async(open_model, [MODEL]).get(timeout=60) == [49152]
    model = deeptutor.Model(MODEL)
    session = deeptutor.Session(model, threads=1)
    session.sync([1, 2])
    for result in (model.info, model.tokenize("a"), model.token_bytes(5), session.last_sync, session.stats, session.tokens,
                   session.logits()):
        assert pickle.loads(pickle.dumps(result)) == result


class Stopped:
    """Inside: a call of the library's waits until it is let go on; there, another thread may try what it likes."""

    def __init__(self, deeptutor, monkeypatch, name):
        self.entered, self.go_on, self.name, self.real = threading.Event(), threading.Event(), name, deeptutor.call
        monkeypatch.setattr(deeptutor, "call", self.call)

    def call(self, name, *arguments):
        if name == self.name:
            self.entered.set()
            assert self.go_on.wait(60)
        self.real(name, *arguments)


@pytest.mark.parametrize("name", ["dt_session_sync", "dt_session_save", "dt_session_load", "first token", "dt_sampler_sample",
                                  "dt_session_append", "dt_generate_drafted"])
def test_another_thread_waits(deeptutor, tmp_path, monkeypatch, name):
    """In every call, wherever the first is; and what that did is as if nobody had tried."""
    model = deeptutor.Model(MODEL)
    session, other, draft = (*(deeptutor.Session(model, threads=1) for _ in range(2)), deeptutor.Draft())
    path = tmp_path / "s.bin"
    tokens, settings = model.tokenize("A, b, c. A, b,"), {"n_predict": 4, "temp": 0, "ignore_end": True}
    want = list(session.generate_tokens(tokens, **settings))
    session.save(path)
    drafted = {**settings, "draft": draft}
    work = {"dt_session_sync": lambda: session.sync([1, 2]), "dt_session_save": lambda: session.save(path),
            "dt_session_load": lambda: session.load(path), "first token": lambda: list(session.generate_tokens(tokens, **drafted)),
            "dt_generate_drafted": lambda: list(session.generate_tokens(tokens, **drafted))
            }.get(name, lambda: list(session.generate_tokens(tokens, **settings)))
    if name == "first token":
        other.sync([1])
    stopped, got = Stopped(deeptutor, monkeypatch, "dt_session_sync" if name == "first token" else name), []
    thread = threading.Thread(target=lambda: got.append(work()), daemon=True)
    thread.start()
    assert stopped.entered.wait(60)
    monkeypatch.undo()
    over = []

    def ask(call):
        try:
            over.append(call() is not None or (call == session.logits and name in ("first token", "dt_generate_drafted")))
        except deeptutor.Error as error:
            over.append("generating" in str(error) or "helps another reply" in str(error))
    calls = [lambda: session.tokens, lambda: session.stats, session.logits, lambda: session.save(tmp_path / "t.bin") or True]
    if name not in ("dt_session_save", "dt_session_load"):  # else it would change what the reply goes on from
        calls += [lambda: next(session.generate_tokens("B", draft="lookup"))] if name in ("dt_sampler_sample", "dt_session_append") else []
    threads = [threading.Thread(target=ask, args=(call,), daemon=True) for call in calls]
    for other_thread in threads:
        other_thread.start()
    time.sleep(0.1)
    assert not over
    assert next(other.generate_tokens("B", n_predict=1, ignore_end=True)) is not None
    stopped.go_on.set()
    for waiting in (thread, *threads):
        waiting.join(60)
    assert len(got) == 1 and over == [True] * len(calls)
    if isinstance(got[0], list):
        assert got == [want]
    assert session.sync([1, 2, 3]) and session.tokens == [1, 2, 3]


@pytest.mark.parametrize("draft", [None, "lookup"])
def test_looks_beside_a_reply(deeptutor, draft):
    """They are right, and never what ends the reply."""
    model = deeptutor.Model(MODEL)
    session, settings = deeptutor.Session(model, threads=1), {"n_predict": 40, "temp": 0, "ignore_end": True, "draft": draft}
    tokens = model.tokenize("A, b, c. A, b,")
    want, done, seen = list(session.generate_tokens(tokens, **settings)), threading.Event(), {"looked": 0}

    def look():
        while not done.is_set():
            try:
                assert session.tokens[:len(tokens)] == tokens and session.stats["n_tokens"] >= len(tokens)
                session.logits()
                seen["looked"] += 1
            except BaseException as error:
                seen["wrong"] = error
                raise
    reply = session.generate_tokens(tokens, **settings)
    got, looking = [next(reply)], threading.Thread(target=look, daemon=True)
    looking.start()
    got += list(reply)
    done.set()
    looking.join(60)
    assert got == want and "wrong" not in seen


def test_the_log_may_look_at_the_session(deeptutor, monkeypatch):
    """It is called in the thread that is in it."""
    session, seen = deeptutor.Session(deeptutor.Model(MODEL), threads=1), []
    real = deeptutor.call

    def call(name, *arguments):
        if name in ("dt_session_sync", "dt_generate_drafted"):
            seen.append((name, session.stats["n_tokens"], session.tokens))
        real(name, *arguments)
    monkeypatch.setattr(deeptutor, "call", call)
    assert len(list(session.generate_tokens([1, 2], n_predict=2, temp=0, ignore_end=True, draft="lookup"))) == 2
    assert seen == [("dt_session_sync", 0, []), ("dt_generate_drafted", 2, [1, 2])]


def test_a_look_in_which_a_reply_is_collected(deeptutor, monkeypatch):
    """The reply's thread has its turn when the look has ended: the look can't wait for it."""
    session = deeptutor.Session(deeptutor.Model(MODEL), threads=1)
    ring = [session.generate_tokens("A", draft="lookup", temp=0, ignore_end=True)]
    next(ring[0])
    ring.append(ring)
    del ring
    done = threading.Event()

    def look():
        with session._lock:
            gc.collect()
        assert session.sync([1, 2])["computed_tokens"] == 2
        done.set()
    threading.Thread(target=look, daemon=True).start()
    assert done.wait(60)


THREADS = """
import random, sys, threading
from deeptutor import Error, Model, Session
session, done = Session(Model(sys.argv[1]), threads=1, n_batch=16), []
session.sync([1, 2, 3])
session.save(sys.argv[2])
def work(i):
    draw = random.Random(i)
    for _ in range(40):
        tokens = [draw.randrange(1, 600) for _ in range(draw.randint(1, 60))]
        try:
            draw.choice((lambda: session.sync(tokens), lambda: session.load(sys.argv[2]), lambda: session.save(sys.argv[2]),
                         lambda: list(session.generate_tokens(tokens, n_predict=3, draft=draw.choice((None, "lookup")))),
                         lambda: (session.tokens, session.stats, session.logits())))()
        except Error as error:
            assert "is generating" in str(error), error
    done.append(i)
threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(done), session.sync([5, 6, 7])["how"] in ("rebuilt", "rewound"))
"""


def test_threads_on_one_session(tmp_path):
    """In a process of its own, which they would end."""
    result = subprocess.run([sys.executable, "-c", THREADS, MODEL, str(tmp_path / "s.bin")], capture_output=True, text=True, timeout=300,
                            env=dict(os.environ, DT_LIBRARY=library(), PYTHONPATH=os.path.join(ROOT, "python")))
    assert (result.returncode, result.stdout) == (0, "4 True\n"), result.stderr[-2000:]


def test_kv_memory_is_bytes(deeptutor):
    model = deeptutor.Model(MODEL)
    for wrong, kind in (("1M", TypeError), (1e9, TypeError), (-1, ValueError), (2**64, ValueError)):
        with pytest.raises(kind, match="^kv_memory, in bytes, must be a whole number"):
            deeptutor.Session(model, kv_memory=wrong)
