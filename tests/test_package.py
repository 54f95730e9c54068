"""The library as other programs get it: installed, found by pkg-config and CMake, used from C and from Python.

DT_PREFIX names the folder that `cmake --install` of a tree with -DDT_SHARED=ON filled; without it all of this is skipped.
"""
import copy
import ctypes
import gc
import glob
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PREFIX = os.environ.get("DT_PREFIX", "")
MODEL = os.environ.get("DT_TEST_MODEL", "")
MAIN = os.path.join(PREFIX, "bin", "deeptutor")

pytestmark = pytest.mark.skipif(not PREFIX or not os.path.exists(MODEL), reason="DT_PREFIX or DT_TEST_MODEL names nothing")


def library():
    return glob.glob(os.path.join(PREFIX, "lib*", "**", "libdeeptutor.so"), recursive=True)[0] if PREFIX else ""


def environment():
    folder = os.path.dirname(library())
    return dict(os.environ, LD_LIBRARY_PATH=folder, PKG_CONFIG_PATH=os.path.join(folder, "pkgconfig"))


def output_of(*command, **kwargs):
    result = subprocess.run(command, capture_output=True, env=environment(), timeout=300, **kwargs)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.decode()


def check_chat(program, tmp_path):
    out = output_of(str(program), MODEL, str(tmp_path / "chat.session"))
    turns = [(int(a), int(b)) for a, b in re.findall(r"\[(\d+) reused, (\d+) computed\]", out)]
    assert len(turns) == 3 and "Paris" in out
    for (reused, computed), (before_reused, before_computed) in zip(turns[1:], turns):
        assert reused > before_reused + before_computed - 1 and computed < 40  # also after save and load


def test_example_by_pkg_config(tmp_path):
    if subprocess.run(["which", "pkg-config"], capture_output=True).returncode != 0:
        pytest.skip("pkg-config is missing")
    flags = output_of("pkg-config", "--cflags", "--libs", "deeptutor").split()
    output_of("cc", "-std=c11", os.path.join(ROOT, "examples", "chat.c"), "-o", str(tmp_path / "chat"), *flags)
    check_chat(tmp_path / "chat", tmp_path)


def test_example_by_cmake(tmp_path):
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\nproject(example C)\nfind_package(deeptutor 0.1 REQUIRED)\n"
        f"add_executable(chat {ROOT}/examples/chat.c)\ntarget_link_libraries(chat PRIVATE deeptutor::deeptutor)\n")
    output_of("cmake", "-S", str(tmp_path), "-B", str(tmp_path / "b"), f"-DCMAKE_PREFIX_PATH={PREFIX}")
    output_of("cmake", "--build", str(tmp_path / "b"))
    check_chat(tmp_path / "b" / "chat", tmp_path)


def test_links_of_the_documents_lead_somewhere():
    base = os.path.join(PREFIX, "share", "doc", "deeptutor")
    documents = glob.glob(os.path.join(base, "**", "*.md"), recursive=True)
    assert len(documents) > 20
    for path in documents:
        with open(path, encoding="utf-8") as file:
            links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", file.read()) if "://" not in link]
        lost = [link for link in links if link and not os.path.exists(os.path.join(os.path.dirname(path), link))]
        assert not lost, (path, lost)


def test_only_the_header_is_exported():
    symbols = {line.split()[-1] for line in output_of("nm", "-D", "--defined-only", library()).splitlines()}
    assert "dt_session_save" in symbols
    header = open(os.path.join(ROOT, "include", "deeptutor.h")).read()
    assert all(name in header for name in symbols), symbols


@pytest.fixture(scope="module")
def deeptutor():
    os.environ["DT_LIBRARY"] = library()
    sys.path.insert(0, os.path.join(ROOT, "python"))
    import deeptutor
    return deeptutor


def test_structs_are_the_headers(deeptutor, tmp_path):
    from deeptutor._library import FUNCTIONS, STRUCTS
    lines = []
    for struct in STRUCTS:
        lines.append(f'printf("{struct.__name__} %zu\\n", sizeof({struct.__name__}));')
        for name, _ in struct._fields_:
            lines.append(f'printf("{struct.__name__}.{name} %zu\\n", offsetof({struct.__name__}, {name}));')
    source = tmp_path / "sizes.c"
    source.write_text("#include <deeptutor.h>\n#include <stdio.h>\nint main(void) {\n" + "\n".join(lines) + "\nreturn 0;\n}\n")
    output_of("cc", "-I", os.path.join(ROOT, "include"), str(source), "-o", str(tmp_path / "sizes"))
    sizes = dict(line.rsplit(" ", 1) for line in output_of(str(tmp_path / "sizes")).splitlines())
    for struct in STRUCTS:
        assert ctypes.sizeof(struct) == int(sizes[struct.__name__]), struct
        for name, _ in struct._fields_:
            assert getattr(struct, name).offset == int(sizes[f"{struct.__name__}.{name}"]), (struct, name)
    header = open(os.path.join(ROOT, "include", "deeptutor.h")).read()
    for name, (_, arguments) in FUNCTIONS.items():
        parameters = re.search(rf"[ *]{name}\(([^;]*)\);", header).group(1)
        assert len(arguments) == (0 if parameters == "void" else parameters.count(",") + 1), name


def test_python_gives_mains_text(deeptutor):
    model = deeptutor.Model(MODEL)
    assert model.info["architecture"] == "llama" and len(model.info["n_kv_heads"]) == model.info["n_layers"]
    for flags, settings in (((), {}), (("--cache-eviction", "--max-cache-size", "48", "--min-cache-size", "16"),
                                       {"eviction": "chat", "max_cache_size": 48, "min_cache_size": 16})):
        session = deeptutor.Session(model, threads=1, **settings)
        text = "".join(session.generate("The capital of France is", n_predict=60, temp=0, ignore_end=True))
        want = output_of(MAIN, "-m", MODEL, "-t", "1", "-p", "The capital of France is", "-n", "60", "--temp", "0",
                         "--ignore-eos", *flags)
        assert text + "\n" == want
        assert session.stats["n_tokens"] == len(session.tokens) and session.stats["kv_bytes_peak"] > 0
        assert (session.stats["evicted_tokens"] > 0) == bool(flags)


def test_python_sessions(deeptutor, tmp_path):
    model = deeptutor.Model(MODEL)
    first = deeptutor.Session(model, threads=1)
    prompt = model.render_chat([{"role": "user", "content": "Say hello in French."}])
    tokens = model.tokenize(prompt)
    reply = list(first.generate_tokens(tokens, n_predict=8, temp=0.9, seed=3))
    assert reply == list(deeptutor.Session(model, threads=1).generate_tokens(tokens, n_predict=8, temp=0.9, seed=3))
    assert first.seed == 3
    first.save(tmp_path / "s.bin")
    second = deeptutor.Session(model, threads=1)
    second.load(tmp_path / "s.bin")
    assert second.tokens == first.tokens and second.logits() == first.logits()
    assert second.sync(first.tokens + reply[-1:]) == dict(second.last_sync, how="extended", computed_tokens=1)
    with pytest.raises(deeptutor.Error) as caught:
        deeptutor.Session(model, kv_type="int8").load(tmp_path / "s.bin")
    assert caught.value.status == "DT_ERR_ARGUMENT" and "kv-type" in str(caught.value)
    with pytest.raises(deeptutor.Error):
        deeptutor.Model(str(tmp_path / "none.gguf"))
    with pytest.raises(TypeError):
        list(second.generate("x", temperature=1))


def assert_same(session, prompt, want, got):
    """But for one place, where both tokens are nearly equally likely: products round one token and many differently. session: a new
    one, as that which wrote `want`."""
    n = next((i for i, pair in enumerate(zip(want, got)) if pair[0] != pair[1]), len(want))
    if n < len(want):
        assert list(session.generate_tokens(prompt, n_predict=n, temp=0)) == want[:n]
        session.sync(session.tokens + want[n - 1:n] if n > 0 else session.tokens)
        logits = session.logits()
        assert abs(logits[want[n]] - logits[got[n]]) < 0.2, (n, logits[want[n]], logits[got[n]])
    assert len(got) == len(want)


def test_python_drafts(deeptutor):
    """The same tokens as without, also when the caller stops on the way and goes on."""
    model = deeptutor.Model(MODEL)
    prompt = "".join(f"{i}. The color of item {i} is red.\n" for i in range(1, 9)) + "9. The"
    eviction = {"eviction": "chat", "max_cache_size": 96, "min_cache_size": 32}
    for settings in ({}, eviction):
        want = list(deeptutor.Session(model, threads=1, **settings).generate_tokens(prompt, n_predict=40, temp=0))
        for draft in ("lookup", deeptutor.Draft(max_tokens=4), deeptutor.Draft(model, target=model, threads=1)):
            session = deeptutor.Session(model, threads=1, **settings)
            got = list(session.generate_tokens(prompt, n_predict=40, draft=draft, temp=0))
            assert_same(deeptutor.Session(model, threads=1, **settings), prompt, want, got)
            assert 0 < session.stats["draft_accepted"] <= session.stats["draft_proposed"]
    session, draft, tokens = deeptutor.Session(model, threads=1), deeptutor.Draft(), []
    whole = list(deeptutor.Session(model, threads=1).generate_tokens(prompt, n_predict=40, temp=0))
    for token in session.generate_tokens(prompt, draft=draft, temp=0):
        tokens.append(token)
        if len(tokens) == 7:
            break
    assert len(tokens) == 7 and session.stats["n_tokens"] == len(model.tokenize(prompt)) + 6
    rest = list(session.generate_tokens(model.tokenize(prompt) + tokens, n_predict=33, draft=draft, temp=0))
    assert_same(deeptutor.Session(model, threads=1), prompt, whole, tokens + rest)
    assert session.last_sync["computed_tokens"] == 1
    assert "".join(session.generate("A, b, c. A, b,", n_predict=6, draft=draft, temp=0))
    with pytest.raises(deeptutor.Error) as caught:
        deeptutor.Draft(max_tokens=0)
    assert caught.value.status == "DT_ERR_ARGUMENT"
    with pytest.raises(TypeError):
        deeptutor.Draft(model)
    with pytest.raises(TypeError, match="a Draft or"):
        next(session.generate("A", draft="model"))
    for wrong in ({"kv_type": "q8_0"}, {"prefill": "fast"}):
        with pytest.raises(ValueError, match="must be .* or "):
            deeptutor.Session(model, **wrong)


@pytest.mark.parametrize("wrong", [ValueError, SystemExit])
def test_python_drafts_tell_every_error(deeptutor, monkeypatch, wrong):
    """One that only the reply's own thread saw would let the caller wait for ever."""
    def call(name, *arguments):
        raise wrong("on purpose")
    session = deeptutor.Session(deeptutor.Model(MODEL), threads=1)
    reply, real = session.generate_tokens("A", n_predict=4, draft="lookup", temp=0), deeptutor.call
    monkeypatch.setattr(deeptutor, "call", lambda name, *rest: (call if name == "dt_generate_drafted" else real)(name, *rest))
    caught = []
    thread = threading.Thread(target=lambda: caught.append(pytest.raises(wrong, next, reply)), daemon=True)
    thread.start()
    thread.join(60)
    assert caught
    monkeypatch.undo()
    assert len(list(session.generate_tokens("A", n_predict=4, draft="lookup", temp=0, ignore_end=True))) == 4


def test_python_refuses_what_would_be_lost(deeptutor):
    """Settings that change nothing, and strings that C would end early."""
    model = deeptutor.Model(MODEL)
    for wrong in ({"max_cache_size": 512}, {"min_cache_size": 0}, {"prefill": "streaming"}):
        with pytest.raises(ValueError, match="without eviction"):
            deeptutor.Session(model, **wrong)
    session = deeptutor.Session(model, eviction="chat", max_cache_size=512, prefill="streaming")
    for call in (lambda: deeptutor.Model(MODEL + "\0"), lambda: deeptutor.Model(MODEL, device="cpu\0"),
                 lambda: deeptutor.Model(MODEL, device_split="1\0"), lambda: deeptutor.Session(model, eviction="chat\0"),
                 lambda: model.render_chat([{"role": "user", "content": "a\0b"}]),
                 lambda: model.render_chat([{"role": "user", "content": "a"}], template="chatml\0"),
                 lambda: next(session.generate("A", grammar='root ::= "a"\0')), lambda: session.save(MODEL + "\0.session")):
        with pytest.raises(ValueError, match="NUL"):
            call()


def test_python_refuses_numbers_that_c_would_cut(deeptutor):
    model = deeptutor.Model(MODEL)
    session = deeptutor.Session(model, threads=1)
    session.sync([1, 2])
    def new(**wrong):
        return lambda: deeptutor.Session(model, **wrong)
    def reply(prompt="A", **wrong):
        return lambda: list(session.generate(prompt, **dict({"n_predict": 1}, **wrong)))
    for call in (new(kv_memory=-1), new(kv_memory=2**64 + 600000), new(n_ctx=2**32 + 16), new(n_batch=2**32 + 16),
                 new(threads=2**32 + 1), new(eviction="chat", max_cache_size=-5), new(max_cache_size=-5),
                 new(eviction="chat", min_cache_size=-2), new(eviction="chat", max_cache_size=2**32 + 512),
                 lambda: deeptutor.Model(MODEL, n_device_layers=2**32), lambda: deeptutor.Model(MODEL, rpc_timeout_s=2**32 + 9),
                 lambda: deeptutor.Draft(max_tokens=2**32 + 5),
                 lambda: deeptutor.Draft(model, target=model, threads=2**32 + 1), lambda: session.sync([2**32 + 7]),
                 lambda: model.token_bytes(2**32 + 7), lambda: model.is_end(-2**31 - 1), reply(prompt=[2**32 + 7]),
                 reply(n_predict=2**64 + 3), reply(n_predict=2**64 + 3, draft="lookup"), reply(seed=2**40), reply(seed=-2),
                 reply(top_k=2**32 + 1), reply(repeat_last_n=-2**40)):
        with pytest.raises(ValueError, match="must be a whole number from .* to .*, not "):
            call()
    for call in (new(n_ctx=16.5), new(kv_memory=1e9), new(eviction="chat", max_cache_size=512.5), new(threads=None),
                 lambda: deeptutor.Draft(max_tokens=2.5), lambda: session.sync([1.5]), lambda: model.is_end("a"),
                 reply(prompt=[1.0]), reply(n_predict=2.5), reply(n_predict=2.5, draft="lookup"), reply(seed=1.5)):
        with pytest.raises(TypeError, match="must be a whole number, not "):
            call()
    assert session.tokens == [1, 2]
    assert len(list(session.generate_tokens("A", n_predict=2, seed=-1, ignore_end=True))) == 2
    assert session.seed != 2**32 - 1  # one that was drawn


def test_python_refuses_other_kinds(deeptutor):
    """A number where the library takes a string is an address for ctypes: the process would end."""
    model = deeptutor.Model(MODEL)
    session = deeptutor.Session(model, threads=1)
    session.sync([1, 2])
    def reply(prompt="A", **wrong):
        return lambda: list(session.generate(prompt, n_predict=1, **wrong))
    chat = [{"role": "user", "content": "a"}]
    for sentence, *calls in (
            ("must be a string, not ", *(reply(grammar=wrong) for wrong in (5, True, 1.5, {"a": 1})),
             lambda: deeptutor.Model(MODEL, device=5), lambda: deeptutor.Model(MODEL, device_split=1.0),
             lambda: model.tokenize(5), lambda: model.render_chat(chat, template=7),
             lambda: model.render_chat([{"role": "user", "content": None}])),
            ("json_schema must be a dict, or JSON as a string, not ", *(reply(json_schema=wrong) for wrong in (5, True, ["a"]))),
            ("json_schema can't be written as JSON: ", reply(json_schema={"type": object()})),
            ("must be a number, not ", reply(temp="0"), reply(top_p=b"1"), reply(min_p={}), reply(min_p=memoryview(b"1")), reply(repeat_penalty=[1])),
            ("must be True or False, not ", reply(ignore_end="false"), reply(ignore_end=2), lambda: deeptutor.Model(MODEL, no_mmap="no"),
             lambda: model.tokenize("a", add_special="no"), lambda: model.token_bytes(1, special="no"),
             lambda: model.render_chat(chat, add_assistant="no")),
            ("must be the path of a file, not ", lambda: deeptutor.Model(5), lambda: session.save(None), lambda: session.load(True)),
            ("must be a Model, such as ", lambda: deeptutor.Session(MODEL), lambda: deeptutor.Draft(MODEL, target=model),
             lambda: deeptutor.Draft(model, target=MODEL)),
            ("tokens must be a list of whole numbers", lambda: session.sync("ab"), lambda: session.sync(b"ab"), lambda: session.sync(5)),
            ("prompt must be text or tokens, not ", reply(prompt=None), reply(prompt=5)),
            ("Model.render_chat makes a text of messages", reply(prompt=chat)),
            ("messages must be a list of ", lambda: model.render_chat("hello"), lambda: model.render_chat([{"role": "user"}])),
            ("eviction must be None, a preset's name or a dict", lambda: deeptutor.Session(model, eviction=5)),
            ("the log must be a function", lambda: deeptutor.set_log("warn"))):
        for call in calls:
            with pytest.raises(TypeError, match=sentence):
                call()
    for sentence, call in (("kv_type must be f16 or int8", lambda: deeptutor.Session(model, kv_type=["f16"])),
                           ("a float holds", reply(temp=10**400)), ("half of a character", reply(grammar="\ud800")), ("half of a character", lambda: session.save("\ud800")),
                           ("can't be written as JSON", reply(json_schema={"minimum": float("nan")})), ("NUL", reply(grammar=b"a\0")),
                           ("-1 for all until the end", lambda: list(session.generate("A", n_predict=-7)))):
        with pytest.raises(ValueError, match=sentence):
            call()
    assert session.tokens == [1, 2]


def test_python_neither_copies_nor_forks(deeptutor):
    """A copy would free the library's object again; a child has none of its threads."""
    model = deeptutor.Model(MODEL)
    session, draft = deeptutor.Session(model, threads=2), deeptutor.Draft()
    for thing in (model, session, draft):
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="can't be copied or pickled; make another one"):
                copied(thing)
    with pytest.raises(AttributeError):
        session.model = None
    session.sync([1, 2, 3])
    replies = [deeptutor.Session(model, threads=2).generate_tokens("A", n_predict=4, ignore_end=True, draft=draft)
               for draft in (None, "lookup")]
    for reply in replies:
        next(reply)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        refused = 0
        for call in (lambda: session.sync([1, 2, 3, 4]), *(lambda reply=reply: next(reply) for reply in replies)):
            try:
                call()
            except deeptutor.Error as error:
                refused += "forked" in str(error)
        own = deeptutor.Session(model, threads=2)
        own.sync([1, 2, 3])
        os._exit(0 if refused == 3 and own.tokens == [1, 2, 3] else 1)
    assert os.waitpid(child, 0)[1] == 0
    session.sync([1, 2, 3, 4])
    assert [len(list(reply)) for reply in replies] == [3, 3]


def test_python_takes_a_schema_as_a_dict(deeptutor):
    model = deeptutor.Model(MODEL)
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}
    replies = ["".join(deeptutor.Session(model, threads=1).generate(prompt, n_predict=40, temp=0, json_schema=form))
               for prompt, form in (("A city as JSON:", schema), ("A city as JSON:", json.dumps(schema)), (b"A city as JSON:", schema))]
    assert list(json.loads(replies[0])) == ["city"] and replies[1:] == replies[:1] * 2


@pytest.mark.parametrize("draft", [None, "lookup", "own"])
def test_python_a_session_that_generates_is_not_changed(deeptutor, tmp_path, draft):
    """Its reply would go on with another text. It can be looked at, and is free however the generator ends."""
    model = deeptutor.Model(MODEL)
    session, other = (deeptutor.Session(model, threads=1) for _ in range(2))
    settings = {"n_predict": 12, "temp": 0, "ignore_end": True, "draft": deeptutor.Draft() if draft == "own" else draft}
    prompt = "A, b, c. A, b,"
    tokens = model.tokenize(prompt)
    want = list(session.generate_tokens(tokens, **settings))
    session.save(tmp_path / "s.bin")
    reply, got = session.generate_tokens(prompt, **settings), []
    for token in reply:
        got.append(token)
        for change in (lambda: session.sync([1]), lambda: session.save(tmp_path / "t.bin"),
                       lambda: session.load(tmp_path / "s.bin"), lambda: next(session.generate_tokens("B", n_predict=2)),
                       lambda: next(session.generate("B", draft="lookup"))):
            with pytest.raises(deeptutor.Error, match="the session is generating; finish or close the generator first") as caught:
                change()
            assert caught.value.status == "DT_ERR_ARGUMENT"
        assert session.tokens[:len(tokens)] == tokens and session.stats["n_tokens"] == len(session.tokens)
        session.logits()  # with a draft it may be None here
        if draft == "own":
            with pytest.raises(deeptutor.Error, match="the draft helps another reply"):
                next(other.generate_tokens("B", **settings))
        assert next(other.generate_tokens("B", n_predict=1, ignore_end=True)) is not None
    assert got == want
    for generate in (session.generate_tokens, session.generate):
        for end in ("close", "forget", "collect", "throw"):
            reply = generate(prompt, **settings)
            next(reply)
            if end == "close":
                reply.close()
            elif end == "throw":
                with pytest.raises(KeyError):
                    reply.throw(KeyError())
            elif end == "collect":
                ring = [reply]
                ring.append(ring)
                del ring
            del reply
            if end == "collect":
                gc.collect()
            assert list(session.generate_tokens(prompt, **settings)) == want
    with pytest.raises(deeptutor.Error):  # none was begun
        list(session.generate_tokens(prompt, temp=float("nan"), draft=settings["draft"]))
    assert session.sync(tokens)


def test_python_waits_for_a_reply_that_its_own_thread_ends(deeptutor, monkeypatch):
    """That is where the collector of garbage may find the generator; the library is then still in the session."""
    session = deeptutor.Session(deeptutor.Model(MODEL), threads=1)
    dropped, found, threads = threading.Event(), threading.Event(), []
    def take(self, token, _):
        self._token = token
        self._ready.put(None)
        dropped.wait(60)
        gc.collect()
        threads.append(threading.current_thread())
        if self._stopped and not session._busy:
            found.set()
        time.sleep(0.3)
        return False
    monkeypatch.setattr(deeptutor._DraftedReply, "_take", take)
    ring = [session.generate_tokens("A", draft="lookup", temp=0, ignore_end=True)]
    next(ring[0])
    ring.append(ring)
    del ring
    dropped.set()
    assert found.wait(60)
    assert session.sync([1, 2])["computed_tokens"] == 2
    assert len(threads) == 1 and not threads[0].is_alive()


LEAVING = """
import gc, sys
from deeptutor import Model, Session
session = Session(Model(sys.argv[1]), threads=1)
pieces = session.generate_tokens("A, b, c. A, b,", n_predict=40, draft="lookup", temp=0)
next(pieces)
how = sys.argv[2]
if how == "cycle":  # nothing but the collector of garbage closes it
    ring = [pieces]
    ring.append(ring)
    del ring, pieces
    gc.collect()
    next(session.generate_tokens("A, b, c. A, b,", draft="lookup", temp=0))
elif how == "module":  # closed after the threads have been stopped
    sys.modules["kept"] = pieces
elif how == "error":
    raise ValueError("on purpose")
print("left")
"""


@pytest.mark.parametrize("how", ["plain", "cycle", "module", "error"])
def test_python_leaves_with_a_reply_begun(how):
    """Python 3.13 stops the other threads before it closes what is left: who waits for one then waits for ever."""
    result = subprocess.run([sys.executable, "-c", LEAVING, MODEL, how], capture_output=True, text=True, timeout=60,
                            env=dict(os.environ, DT_LIBRARY=library(), PYTHONPATH=os.path.join(ROOT, "python")))
    assert (result.returncode, result.stdout) == ((1, "") if how == "error" else (0, "left\n")), result.stderr
    assert ("on purpose" in result.stderr) if how == "error" else result.stderr == ""


def test_python_log(deeptutor):
    lines = []
    deeptutor.set_log(lambda level, line: lines.append((level, line)))
    deeptutor.Session(deeptutor.Model(MODEL), n_ctx=256)
    deeptutor.set_log(None)
    assert any("KV memory" in line for _, line in lines)


def test_python_log_is_changed_while_it_is_used(deeptutor):
    """By the receiver itself, whose callback has to outlive its call."""
    lines = []
    def first(level, line):
        deeptutor.set_log(lambda level, line: lines.append(line))
        lines.append(line)
    deeptutor.set_log(first)
    deeptutor.Session(deeptutor.Model(MODEL), n_ctx=256)
    deeptutor.set_log(None)
    assert len(lines) > 1
