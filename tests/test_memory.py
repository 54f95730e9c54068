"""Memory that runs out, anywhere in the programs and the libraries they are made of: a sentence and exit code 1, never a signal; a
batch has a whole line for each row that it has done, and goes on; a server answers what it can't do with an error, and goes on.

Two ways. A preloaded library (support/fail_memory.c) refuses one chosen allocation or thread, or all from there on; and a limit on
the address space, as `ulimit -v` sets it. DT_MAIN, DT_BATCH, DT_SERVER, DT_MAKE_MODEL and DT_FAIL_MEMORY name the programs, the
one that writes a tiny model and the library. DT_TEST_POINTS: more places than usual at which memory runs out.
"""
import http.client
import json
import os
import re
import resource
import signal
import subprocess
import time

import pytest

from server_support import BATCH, SERVER, make_tiny

MAIN = os.environ.get("DT_MAIN", "")
MODEL = os.environ.get("DT_TEST_MODEL", "")
MAKE_MODEL = os.environ.get("DT_MAKE_MODEL", "")
FAIL_MEMORY = os.environ.get("DT_FAIL_MEMORY", "")

pytestmark = [pytest.mark.skipif(not os.access(MAIN, os.X_OK) or not os.access(MAKE_MODEL, os.X_OK),
                                 reason="DT_MAIN or DT_MAKE_MODEL names no program"),
              pytest.mark.skipif(not os.path.exists(FAIL_MEMORY), reason="no DT_FAIL_MEMORY: not Linux, or a sanitizer's tree")]

RUNS = {
    "prompt": ["-p", "hello world", "-n", "3", "--temp", "0"],
    "eviction": ["-p", "hello world " * 20, "-n", "20", "--seed", "1", "--cache-eviction", "--max-cache-size", "32",
                 "--kv-type", "int8", "--prefill", "streaming", "-b", "64"],
    "grammar": ["-p", "x", "-n", "3", "--seed", "1", "--grammar", "root ::= [a-z]+"],
    "schema": ["-p", "x", "-n", "2", "--seed", "1", "--json-schema",
               '{"type": "object", "properties": {"a": {"type": "integer"}}}'],
    "chat": ["-cnv", "-p", "hi", "-n", "2", "--temp", "0", "--chat-template",
             "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"],
}
POINTS = int(os.environ.get("DT_TEST_POINTS", "60"))  # of each run, at which memory runs out
MIB = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("memory") / "tiny.gguf")
    subprocess.run([MAKE_MODEL, path, "--layers", "2", "--embd", "64", "--heads", "4", "--kv-heads", "2", "--head-dim", "16",
                    "--ff", "128", "--vocab", "320", "--ctx", "512", "--type", "q8_0"], check=True, timeout=60)
    return path


def run(model, arguments, environment=None, limit_bytes=None):
    def limit():
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if limit_bytes:
            resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))

    return subprocess.run([MAIN, "-m", model, "-t", "2", *arguments], stdin=subprocess.DEVNULL, capture_output=True, timeout=120,
                          env=dict(os.environ, **(environment or {})), preexec_fn=limit)


def assert_done_or_told(result, what):
    """Either it went well all the same, or one sentence says why not."""
    lines = result.stderr.decode("utf-8", "replace").splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    if result.returncode == 0:
        assert not errors, (what, lines)
    else:
        assert result.returncode == 1 and len(errors) == 1 and lines[-1] == errors[0], (what, result.returncode, lines)


@pytest.mark.parametrize("name", sorted(RUNS))
def test_every_kind_of_allocation_may_fail(model, tmp_path, name):
    report = tmp_path / "count"
    environment = {"LD_PRELOAD": FAIL_MEMORY, "DT_FAIL_REPORT": str(report)}
    assert run(model, RUNS[name], environment).returncode == 0
    total = int(report.read_text())
    assert total > 500
    stride = max(1, total // POINTS)
    failed = 0
    for first in range(0, total, stride):
        for times, at in ((0, first), (1, first + stride // 2)):
            result = run(model, RUNS[name], dict(environment, DT_FAIL_AFTER=str(at), DT_FAIL_TIMES=str(times)))
            assert_done_or_told(result, (name, at, times))
            failed += result.returncode != 0
    assert failed > POINTS // 2


def sweep(model, arguments, sizes):
    """Runs with less address space each time; the last size must be enough, and the first too little."""
    codes = []
    for mebibytes in sizes:
        result = run(model, arguments, limit_bytes=mebibytes * MIB)
        if not codes and (result.returncode == 127 or result.returncode < 0):
            continue  # the system could not even start it
        assert_done_or_told(result, mebibytes)
        codes.append(result.returncode)
    assert 1 in codes and codes[-1] == 0, codes


@pytest.mark.parametrize("name, most", [("prompt", 300), ("chat", 460)])
def test_little_address_space(model, name, most):
    sweep(model, RUNS[name], [*range(8, 80, 4), *range(80, most, 24), most])


@pytest.mark.skipif(not os.path.exists(MODEL), reason="DT_TEST_MODEL names no model")
def test_little_address_space_for_a_real_model():
    sweep(MODEL, ["-p", "The capital of France is", "-n", "3", "--temp", "0"], [*range(20, 100, 16), *range(100, 420, 24), 900])


# ---- batch ----

LIVES = POINTS // 3  # of a batch or a server, which live longer

@pytest.fixture(scope="module")
def talking_model(tmp_path_factory):
    return make_tiny(str(tmp_path_factory.mktemp("memory") / "talking.gguf"))


def limit_cores():
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def run_batch(model, source, target, environment=None):
    return subprocess.run([BATCH, "-m", model, "-t", "1", "-i", str(source), "-o", str(target), "--temp", "0", "-n", "4", "-np", "2",
                           "--chat-template", "chatml", "--kernel", "reference", "--ignore-eos", "--cache-eviction",
                           "--max-cache-size", "64"], stdin=subprocess.DEVNULL, capture_output=True, timeout=120,
                          env=dict(os.environ, **(environment or {})), preexec_fn=limit_cores)


@pytest.mark.skipif(not os.access(BATCH, os.X_OK), reason="DT_BATCH names no program")
def test_batch(talking_model, tmp_path):
    source, target, report = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "count"
    rows = [{"id": "a", "prompt": "one two three " * 20}, {"id": "b", "messages": [{"role": "user", "content": "hello"}], "n": 2},
            {"id": "c", "prompt": "x", "logprobs": 3, "stop": ["q"]}, {"id": "d", "prompt": 5}, {"id": "e", "prompt": "last"}]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = {"LD_PRELOAD": FAIL_MEMORY, "DT_FAIL_REPORT": str(report)}
    assert run_batch(talking_model, source, target, environment).returncode == 0
    expected = {row["line"]: row for row in map(json.loads, target.read_text().splitlines())}
    assert len(expected) == len(rows)
    total, failed = int(report.read_text()), 0
    for at in range(0, total, max(1, total // LIVES)):
        for times in (0, 1, 20):
            target.unlink(missing_ok=True)
            result = run_batch(talking_model, source, target, dict(environment, DT_FAIL_AFTER=str(at), DT_FAIL_TIMES=str(times)))
            lines = result.stderr.decode("utf-8", "replace").splitlines()
            assert result.returncode in (0, 1) and (result.returncode == 0 or any(line.startswith("error: ") for line in lines)), (
                at, times, result.returncode, lines)
            failed += result.returncode
            text = target.read_text() if target.exists() else ""
            assert not text or text.endswith("\n"), (at, times, text[-200:])
            done = {row["line"]: row for row in map(json.loads, text.splitlines())}
            assert result.returncode == 1 or len(done) == len(rows), (at, times)
            for line, row in done.items():
                assert row == expected[line] or "error" in row, (at, times, row)
    assert failed > LIVES // 4


# ---- server ----

REQUESTS = [("/v1/completions", {"prompt": "one two three " * 20, "max_tokens": 3, "logprobs": 2, "echo": True}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "n": 2}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "again"}], "max_tokens": 3, "stream": True}),
            ("/v1/completions", {"prompt": "x", "max_tokens": 3, "response_format": {"type": "json_object"}}),
            ("/tokenize", {"content": "some words"}), ("/props", None), ("/metrics", None), ("/v1/models", None)]


class Starved:
    """A server whose memory runs out; None in `port`: it ended before it listened."""

    def __init__(self, model, folder, environment):
        self.log = folder / "log"
        self.process = subprocess.Popen(
            [SERVER, "-m", model, "--port", "0", "-t", "1", "-np", "2", "--chat-template", "chatml", "--kernel", "reference",
             "--ignore-eos", "--cache-eviction", "--max-cache-size", "64", "--session-dir", str(folder / "kept"), "--idle", "1"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=open(self.log, "wb"), preexec_fn=limit_cores,
            env=dict(os.environ, **environment))
        self.port, until = None, time.monotonic() + 60
        while self.port is None and self.process.poll() is None:
            assert time.monotonic() < until, self.log.read_bytes()
            found = re.search(rb"listening at http://\S+:(\d+)", self.log.read_bytes())
            self.port = int(found.group(1)) if found else None
            time.sleep(0.005)

    def ask(self, path, body):
        """Status and bytes, or None where the connection was dropped, as libmicrohttpd does when it has no memory itself."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            return response.status, response.getheader("Content-Type") or "", response.read()
        except (http.client.HTTPException, ConnectionError):
            return None
        finally:
            connection.close()

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)


def assert_answered(answer, body, what):
    status, kind, text = answer
    assert status in (200, 400, 404, 500, 503), (what, status, text)
    if kind.startswith("application/json"):
        parsed = json.loads(text)
        assert status == 200 or parsed["error"]["message"], (what, text)
        if status == 200 and body is not None and "max_tokens" in body:  # nothing of it is left out
            assert len(parsed["choices"]) == body.get("n", 1) and parsed["usage"]["completion_tokens"] == 3 * body.get("n", 1), text
            for choice in parsed["choices"]:
                assert not body.get("echo") or choice["text"].startswith(body["prompt"]), (what, text)
                assert not body.get("logprobs") or len(choice["logprobs"]["tokens"]) > 3, (what, text)
    elif kind.startswith("text/event-stream"):
        events = [event for event in text.decode().split("\n\n") if event and not event.startswith(":")]
        assert all(event == "data: [DONE]" or json.loads(event.split("data: ", 1)[1]) for event in events), (what, text)


@pytest.mark.skipif(not os.access(SERVER, os.X_OK), reason="DT_SERVER names no program")
def test_server(talking_model, tmp_path):
    report = tmp_path / "count"
    environment = {"LD_PRELOAD": FAIL_MEMORY, "DT_FAIL_REPORT": str(report)}

    def use(server, more, what):
        for path, body in REQUESTS:
            answer = server.ask(path, body)
            if answer is not None:
                assert_answered(answer, body, (what, path))
            assert server.process.poll() is None, (what, path, server.log.read_bytes())
        answer, tries = None, 0
        while more.get("DT_FAIL_TIMES") != "0" and (answer is None or answer[0] != 200):  # memory is there again, sooner or later
            answer, tries = server.ask("/v1/completions", {"prompt": "x", "max_tokens": 2}), tries + 1
            assert tries < 30, (what, answer)

    def life(more, what):
        """Starts it, asks everything, ends it: whether it came to listen."""
        server = Starved(talking_model, tmp_path, dict(environment, **more))
        try:
            if server.port is not None:
                use(server, more, what)
            code, log = server.stop(), server.log.read_text(errors="replace")
        finally:
            server.process.kill()
        assert code == 0 if server.port is not None else code in (1, 2) and "error: " in log, (what, code, log)
        return server.port is not None

    server = Starved(talking_model, tmp_path, environment)
    assert server.stop() == 0
    start = int(report.read_text())
    assert life({}, "all there")
    total, served = int(report.read_text()), 0
    points = [*range(0, start, max(1, start * 4 // LIVES)), *range(start, total, max(1, (total - start) * 4 // (3 * LIVES)))]
    for i, at in enumerate(points):
        times = (1, 0, 12)[i % 3]
        served += life({"DT_FAIL_AFTER": str(at), "DT_FAIL_TIMES": str(times)}, (at, times))
    assert served > len(points) // 3
