"""Memory that runs out, anywhere in ./main and the libraries it is made of: a sentence and exit code 1, never a signal.

Two ways. A preloaded library (support/fail_memory.c) refuses one chosen allocation or thread, or all from there on; and a limit on
the address space, as `ulimit -v` sets it. DT_MAIN, DT_MAKE_MODEL and DT_FAIL_MEMORY name the program, the one that writes a tiny
model and the library.
"""
import os
import resource
import subprocess

import pytest

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
POINTS = 60  # of each run, at which memory runs out
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
