"""What happens around the programs while they work: the disk is full, a file goes away under them, a signal comes at any moment, the
clock is set, another process is there already. Nothing that was there before is lost, nothing half-written is left, and a sentence
names the cause. On tiny random models.

A small disk needs root (mount); without, those tests are skipped.
"""
import contextlib
import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from server_support import serving

NAMES = ("DT_MAIN", "DT_MAKE_MODEL", "DT_BATCH", "DT_QUANTIZE", "DT_SERVER")
MAIN, MAKE_MODEL, BATCH, QUANTIZE, SERVER = (os.environ.get(name, "") for name in NAMES)
STEP_CLOCK = os.environ.get("DT_STEP_CLOCK", "")
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

pytestmark = pytest.mark.skipif(not os.access(MAIN, os.X_OK) or not os.access(MAKE_MODEL, os.X_OK),
                                reason="DT_MAIN or DT_MAKE_MODEL names no program")
needs_server = pytest.mark.skipif(not os.access(SERVER, os.X_OK), reason="DT_SERVER names no program")
PROMPT = "The quick brown fox jumps over the lazy dog. " * 12
FULL = "No space left on device"


def make(path, **shape):
    options = dict({"layers": 2, "embd": 64, "heads": 4, "kv-heads": 2, "head-dim": 16, "ff": 128, "vocab": 320, "ctx": 1024,
                    "type": "f16"}, **shape)
    subprocess.run([MAKE_MODEL, str(path), *(str(word) for name, value in options.items() for word in ("--" + name, value))],
                   check=True, timeout=60)
    return str(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make(tmp_path_factory.mktemp("faults") / "tiny.gguf")


@pytest.fixture
def small_disk(tmp_path):
    """Half a megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = os.geteuid() == 0 and subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(place)],
                                                   capture_output=True).returncode == 0
    if not mounted:
        pytest.skip("a small disk can't be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place, leave=0):
    """Takes the disk's room, but for `leave` bytes."""
    room = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
    (place / "ballast").write_bytes(bytes(max(0, room - leave)))


def run(program, *arguments, **kwargs):
    return subprocess.run([program, *map(str, arguments)], stdin=subprocess.DEVNULL, capture_output=True, timeout=120, **kwargs)


def run_main(model, *arguments, **kwargs):
    return run(MAIN, "-m", model, "-t", "1", "--temp", "0", *arguments, **kwargs)


def rows(path, n, **fields):
    with open(path, "w") as file:
        for i in range(n):
            file.write(json.dumps(dict({"id": i, "prompt": f"row {i} " * (i % 5 + 1), "max_tokens": 8}, **fields)) + "\n")
    return str(path)


def error_of(result):
    lines = [line for line in result.stderr.decode("utf-8", "replace").splitlines() if "error: " in line]
    assert lines, result.stderr
    return lines[-1]


# ---- the disk is full ----


def test_session_on_a_full_disk(model, small_disk):
    session = small_disk / "s.bin"
    assert run_main(model, "-p", "Once", "-n", "2", "--session", session).returncode == 0
    before = session.read_bytes()
    fill(small_disk, 8192)
    result = run_main(model, "-p", PROMPT, "-n", "4", "--session", session)  # known before the work
    assert result.returncode == 2 and "disk has" in error_of(result) and result.stdout == b""
    assert session.read_bytes() == before and sorted(os.listdir(small_disk)) == ["ballast", "s.bin"]
    os.remove(small_disk / "ballast")
    fill(small_disk, len(before) + 8192)
    result = run_main(model, "-p", "Once", "-n", "400", "--ignore-eos", "--session", session)
    assert result.returncode in (1, 2) and re.search(FULL + "|disk has", error_of(result))
    assert session.read_bytes() == before and sorted(os.listdir(small_disk)) == ["ballast", "s.bin"]


def test_chat_on_a_full_disk(model, small_disk):
    """A chat's length is not known before: it is told at the end, and the old file is whole."""
    session = small_disk / "s.bin"
    fill(small_disk, 16384)
    result = subprocess.run([MAIN, "-m", model, "-cnv", "--chat-template", "chatml", "--session", str(session), "-n", "100",
                             "-t", "1", "--temp", "0", "--ignore-eos"], input=b"hello\nand more\n", capture_output=True, timeout=60)
    assert result.returncode == 1 and FULL in error_of(result)
    assert os.listdir(small_disk) == ["ballast"]


def test_stats_on_a_full_disk(model, small_disk):
    fill(small_disk)
    result = run_main(model, "-p", "x", "-n", "2", "--stats-json", small_disk / "s.json")
    assert result.returncode in (1, 2) and FULL in error_of(result)
    assert os.listdir(small_disk) == ["ballast"]


def test_quantizing_onto_a_full_disk(model, small_disk, tmp_path):
    output = small_disk / "out.gguf"
    output.write_bytes(b"what was there")
    fill(small_disk, 65536)
    result = run(QUANTIZE, model, output, "Q8_0")
    assert result.returncode == 1 and FULL in error_of(result)
    assert output.read_bytes() == b"what was there" and sorted(os.listdir(small_disk)) == ["ballast", "out.gguf"]


@pytest.mark.parametrize("place, cause", [("missing/out.gguf", "No such file or directory"), ("", "no regular file"),
                                          ("link.gguf", "no regular file")])
def test_quantizing_to_no_place(model, tmp_path, place, cause):
    """Each wrong place is told as what it is."""
    os.symlink("nowhere", tmp_path / "link.gguf")
    result = run(QUANTIZE, model, tmp_path / place, "Q8_0")
    assert result.returncode in (1, 2) and cause in error_of(result) and "space" not in error_of(result)
    assert os.listdir(tmp_path) == ["link.gguf"]


@pytest.mark.parametrize("n", [4, 5])
def test_quantizing_with_few_files_open(model, tmp_path, n):
    """The limit is named, also where libllama meets it."""
    result = run("/bin/sh", "-c", f'ulimit -n {n}; exec "$0" "$@"', QUANTIZE, model, tmp_path / "out.gguf", "Q8_0")
    assert result.returncode == 1 and os.strerror(errno.EMFILE) in error_of(result), result.stderr
    assert os.listdir(tmp_path) == []


def test_batch_onto_a_full_disk(model, small_disk, tmp_path):
    """It stops with the cause; with room again, the same command goes on, and every row has one line."""
    jobs, output = rows(tmp_path / "jobs.jsonl", 40), small_disk / "out.jsonl"
    fill(small_disk, 4096)
    arguments = ("-m", model, "-i", jobs, "-o", output, "-t", "1", "-np", "2", "--temp", "0")
    result = run(BATCH, *arguments)
    assert result.returncode == 1 and FULL in error_of(result)
    os.remove(small_disk / "ballast")
    assert run(BATCH, *arguments).returncode == 0
    lines = [json.loads(line) for line in open(output)]
    assert sorted(line["line"] for line in lines) == list(range(1, 41)) and all("text" in line for line in lines)


@needs_server
def test_conversations_onto_a_full_disk(model, small_disk, tmp_path):
    """A server goes on answering; what has no room is computed again."""
    folder = small_disk / "kept"
    with serving(model, tmp_path, "--session-dir", str(folder), "--idle", "0", "-b", "64", "--kernel", "reference") as server:
        fill(small_disk)
        first = server.complete(prompt=PROMPT, max_tokens=4)
        for i in range(6):
            server.complete(prompt=f"{i} " * 60, max_tokens=2)
        assert server.complete(prompt=PROMPT, max_tokens=4)["choices"][0]["text"] == first["choices"][0]["text"]
        assert server.ask("/health")[0] == 200
    assert [name for name in os.listdir(folder) if name.endswith((".deeptutor", ".part"))] == []


@needs_server
def test_newer_conversations_on_a_full_disk(model, small_disk, tmp_path):
    """Those that were used longest ago make room for them; where they can't, they stay."""
    folder = small_disk / "kept"

    def ask(server, n, words=60):
        return server.complete(prompt=f"{n} " * words, max_tokens=2)["usage"]["prompt_tokens_details"]["cached_tokens"]

    with serving(model, tmp_path, "--session-dir", str(folder), "--idle", "0", "-b", "64", "--kernel", "reference") as server:
        ask(server, 0)
        size = sum(path.stat().st_size for path in folder.glob("conversation-*"))
        assert size > 0
        fill(small_disk, 4 * size)
        assert [ask(server, n) for n in range(1, 9)] == [0] * 8
        assert ask(server, 8) > 0 and ask(server, 0) == 0
        kept = {name: (folder / name).read_bytes() for name in os.listdir(folder)}
        ask(server, 9, 400)  # more than all of them, and what is left
        assert kept == {name: (folder / name).read_bytes() for name in os.listdir(folder)}
    assert (tmp_path / "server.log").read_bytes().count(b"is full; from now on") == 1


def test_converting_onto_a_full_disk(small_disk, tokenizers, tmp_path):
    import hf_families

    folder = tmp_path / "hf"
    folder.mkdir()
    hf_families.make("llama2", folder, tokenizers)
    fill(small_disk, 20000)
    result = run(sys.executable, os.path.join(ROOT, "convert.py"), "--pytorch_model_path", folder, "--outfile", small_disk / "o.gguf")
    assert result.returncode == 1 and "disk" in error_of(result)
    assert os.listdir(small_disk) == ["ballast"]


# ---- files that go away ----


@needs_server
def test_model_file_cut_short_under_a_server(tmp_path):
    """F32 weights are used where the file is mapped. The server lives, says what happened, and an answer is never computed from what is
    not there any more."""
    path = make(tmp_path / "m.gguf", type="f32", embd=256, heads=8, ff=512, layers=4)
    with serving(path, tmp_path, "--kernel", "reference", "-b", "64") as server:
        assert server.complete(prompt="before", max_tokens=2)["choices"]
        os.truncate(path, 20000)
        for _ in range(3):
            status, answer, _ = server.ask("/v1/completions", {"prompt": "after", "max_tokens": 2})
            assert status == 500 and "became shorter" in answer["error"]["message"], answer
        assert server.ask("/health")[0] == 200


def test_model_file_cut_short_under_main(tmp_path):
    path = make(tmp_path / "m.gguf", type="f32", embd=256, heads=8, ff=512, layers=4)
    with subprocess.Popen([MAIN, "-m", path, "-cnv", "--chat-template", "chatml", "-n", "4", "-t", "1"], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        process.stdout.read(1)
        os.truncate(path, 20000)
        _, errors = process.communicate(b"and now\n", timeout=60)
    assert process.returncode == 1 and b"became shorter" in errors


@needs_server
def test_model_file_cut_short_that_was_read(tmp_path):
    path = make(tmp_path / "m.gguf", type="f32", embd=256, heads=8, ff=512, layers=4)
    with serving(path, tmp_path, "--kernel", "reference", "-b", "64", "--no-mmap") as server:
        before = server.complete(prompt="before", max_tokens=2)["choices"]
        os.truncate(path, 20000)
        assert server.complete(prompt="before", max_tokens=2)["choices"] == before


def test_model_file_removed_under_main(model, tmp_path):
    """A file that is removed, or replaced by renaming, stays what it was for who has it open."""
    path = tmp_path / "m.gguf"
    path.write_bytes(open(model, "rb").read())
    with subprocess.Popen([MAIN, "-m", path, "-cnv", "--chat-template", "chatml", "-n", "4", "-t", "1"], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        process.stdout.read(1)
        path.unlink()
        process.communicate(b"and now\n", timeout=60)
    assert process.returncode == 0


# ---- signals ----


def leftovers(folder, *known):
    return sorted(set(os.listdir(folder)) - set(known))


@contextlib.contextmanager
def interrupted(command, after, number, **kwargs):
    process = subprocess.Popen(list(map(str, command)), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               **kwargs)
    try:
        try:
            process.wait(after)
        except subprocess.TimeoutExpired:
            process.send_signal(number)
        output, errors = process.communicate(timeout=60)
        yield process.returncode, output, errors
    finally:
        process.kill()
        process.wait()


def moments(longest, n):
    numbers = random.Random(7)
    return [numbers.random() * longest for _ in range(n)]


def took(command):
    started = time.monotonic()
    subprocess.run(list(map(str, command)), stdin=subprocess.DEVNULL, capture_output=True, timeout=120, check=True)
    return time.monotonic() - started


def test_main_interrupted_at_any_moment(model, tmp_path):
    """Exit code 0, and a session that is there is whole: the next run loads it. Before main has begun, the system's own end."""
    folder = tmp_path / "here"
    folder.mkdir()
    session = folder / "s.bin"
    command = [MAIN, "-m", model, "-t", "1", "-p", PROMPT, "-n", "150", "--ignore-eos", "--temp", "0", "--session", session]
    longest = took(command)
    for i, after in enumerate(moments(longest, 14)):
        if i % 3 == 0 and session.exists():
            session.unlink()
        with interrupted(command, after, (signal.SIGINT, signal.SIGTERM)[i % 2]) as (code, _, errors):
            assert code == 0 or (code in (-signal.SIGINT, -signal.SIGTERM) and errors == b""), (after, code, errors)
        assert leftovers(folder, "s.bin", "s.bin.old") == [], after
    result = run(*command)
    assert result.returncode == 0 and (b"tokens loaded" in result.stderr or b"tokens saved" in result.stderr)


def test_main_killed_at_any_moment(model, tmp_path):
    """kill -9: the session is the old one or the new one; what a save was making is removed by the next one."""
    session = tmp_path / "s.bin"
    command = [MAIN, "-m", model, "-t", "1", "-p", PROMPT, "-n", "100", "--ignore-eos", "--temp", "0", "--session", session]
    longest = took(command)
    for after in moments(longest, 8):
        with interrupted(command, after, signal.SIGKILL):
            pass
        assert session.exists()
    (tmp_path / "s.bin.999999999.deeptutor").write_bytes(b"of a process that is no more")
    living = tmp_path / f"s.bin.{os.getpid()}.tmp"
    living.write_bytes(b"of a process that is there")
    (tmp_path / "s.bin.notes.tmp").write_bytes(b"somebody else's")
    assert run(*command).returncode == 0
    assert leftovers(tmp_path, "s.bin", "s.bin.old", living.name, "s.bin.notes.tmp") == []
    assert living.exists() and (tmp_path / "s.bin.notes.tmp").exists()


def test_batch_interrupted_at_any_moment(model, tmp_path):
    """Stopped again and again, by signals and kill -9, the same command ends with one line for every row, each as without."""
    jobs, output, plain = rows(tmp_path / "jobs.jsonl", 60), tmp_path / "out.jsonl", tmp_path / "plain.jsonl"
    command = [BATCH, "-m", model, "-i", jobs, "-t", "1", "-np", "4", "--temp", "0", "--kernel", "reference", "-o"]
    longest = took([*command, plain])
    kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
    for i, after in enumerate(moments(longest / 3, 9)):
        with interrupted([*command, output], after, kinds[i % 3]) as (code, _, errors):
            assert code in (0, 1, -kinds[i % 3]), (code, errors)
    assert run(*command, output).returncode == 0
    assert leftovers(tmp_path, "jobs.jsonl", "out.jsonl", "plain.jsonl") == []
    texts = [{line["line"]: line["text"] for line in map(json.loads, open(path))} for path in (output, plain)]
    assert sum(1 for _ in open(output)) == 60 and texts[0] == texts[1]


def test_quantizing_interrupted_at_any_moment(tmp_path):
    folder, source = tmp_path / "here", make(tmp_path / "m.gguf", embd=256, heads=8, ff=1024, layers=6)
    folder.mkdir()
    output = folder / "out.gguf"
    output.write_bytes(b"what was there")
    command = [QUANTIZE, source, output, "Q4_K_M", "-t", "1"]
    longest = took([*command[:2], tmp_path / "whole.gguf", *command[3:]])
    whole = (tmp_path / "whole.gguf").read_bytes()
    for i, after in enumerate(moments(longest, 10)):
        number = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)[i % 3]
        with interrupted(command, after, number) as (code, _, _):
            assert code in (0, 128 + number, -number)
        assert leftovers(folder) == ["out.gguf"] and output.read_bytes() in (b"what was there", whole)


def test_converting_interrupted_at_any_moment(tokenizers, tmp_path):
    import hf_families

    folder, place = tmp_path / "hf", tmp_path / "here"
    folder.mkdir()
    hf_families.make("llama2", folder, tokenizers)
    place.mkdir()
    command = [sys.executable, os.path.join(ROOT, "convert.py"), "--pytorch_model_path", folder, "--outfile", place / "o.gguf"]
    longest = took(command)
    os.remove(place / "o.gguf")
    for i, after in enumerate(moments(longest, 6)):
        number = (signal.SIGINT, signal.SIGTERM)[i % 2]
        with interrupted(command, after, number) as (code, _, errors):
            assert code in (0, 130, 143, -number, 1), (code, errors)
        assert leftovers(place, "o.gguf") == []


@needs_server
def test_server_stopped_while_it_works(model, tmp_path):
    """SIGTERM at any moment of requests: exit code 0, and what lies in the folder is whole."""
    folder = tmp_path / "kept"
    for after in moments(0.4, 4):
        with serving(model, tmp_path, "--session-dir", str(folder), "--grace", "0", "-b", "64") as server:
            clients = [server.send({"prompt": PROMPT + str(i), "max_tokens": 100, "ignore_eos": True}) for i in range(3)]
            time.sleep(after)
            assert server.stop() == 0
            for client in clients:
                client.close()
        assert [name for name in os.listdir(folder) if name.endswith((".deeptutor", ".part"))] == []


# ---- the clock ----


@pytest.mark.skipif(not os.path.exists(STEP_CLOCK), reason="no DT_STEP_CLOCK: not Linux, or a sanitizer's tree")
def test_the_clock_is_set_all_the_time(model, tmp_path):
    """Waits have a length, not an end by the time of day; times are not negative and make no sense as dates."""
    environment = dict(os.environ, LD_PRELOAD=STEP_CLOCK)
    stats = tmp_path / "s.json"
    result = run_main(model, "-p", PROMPT, "-n", "20", "--stats-json", stats, env=environment)
    assert result.returncode == 0
    numbers = json.loads(stats.read_bytes())
    for name in ("prefill_ms", "decode_ms", "load_ms"):
        assert 0 <= numbers[name] < 600e3
    jobs, output = rows(tmp_path / "jobs.jsonl", 20), tmp_path / "out.jsonl"
    result = run(BATCH, "-m", model, "-i", jobs, "-o", output, "-t", "1", "-np", "2", env=environment)
    assert result.returncode == 0 and sum(1 for _ in open(output)) == 20


# ---- another process ----


def test_two_runs_on_one_session(model, tmp_path):
    """The second is told who has it, also through a link; when the first has ended, or was killed, it is free."""
    session = tmp_path / "s.bin"
    os.symlink("s.bin", tmp_path / "link.bin")
    command = [MAIN, "-m", model, "-t", "1", "-cnv", "--chat-template", "chatml", "-n", "2", "--session", str(session)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as first:
        first.stdin.write(b"hello\n")
        first.stdin.flush()
        first.stdout.read(1)
        for name in ("s.bin", "link.bin"):
            result = run_main(model, "-p", "x", "-n", "2", "--session", tmp_path / name)
            if name == "s.bin" or session.exists():
                assert result.returncode == 2 and f"in use by process {first.pid}" in error_of(result)
        first.kill()
    assert run_main(model, "-p", "x", "-n", "2", "--session", session).returncode == 0
    assert leftovers(tmp_path, "s.bin", "s.bin.old", "link.bin") == []


def test_what_another_run_works_on_is_not_replaced(model, tmp_path):
    """FILE.old, which a run is to keep its session's old text as."""
    session, old = tmp_path / "s.bin", tmp_path / "s.bin.old"
    for text in ("one two", "another text"):
        assert run_main(model, "-p", text, "-n", "2", "--session", session).returncode == 0
    shutil.copy(session, tmp_path / "copy")
    endless = ("-n", "1000000", "--ignore-eos", "--cache-eviction", "--max-cache-size", "64", "--min-cache-size", "32")
    shutil.copy(session, old)
    with subprocess.Popen([MAIN, "-m", model, "-t", "1", "--session", str(old), *endless], stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL) as first:
        first.stdout.read(8)
        result = run_main(model, "-p", "a third", "-n", "2", "--session", session)
        assert result.returncode == 1 and "another run is at work on it" in error_of(result)
        first.kill()
    assert session.read_bytes() == (tmp_path / "copy").read_bytes()
    assert run_main(model, "-p", "a third", "-n", "2", "--session", session).returncode == 0
    assert old.read_bytes() == (tmp_path / "copy").read_bytes()


def test_two_batches_into_one_file(model, tmp_path):
    jobs, output = rows(tmp_path / "jobs.jsonl", 400, max_tokens=50, ignore_eos=True), tmp_path / "out.jsonl"
    arguments = ("-m", model, "-i", jobs, "-o", str(output), "-t", "1")
    with subprocess.Popen([BATCH, *arguments], stderr=subprocess.DEVNULL) as first:
        while not output.exists():
            time.sleep(0.01)
        result = run(BATCH, *arguments)
        assert result.returncode == 2 and f"in use by process {first.pid}" in error_of(result)
        first.send_signal(signal.SIGINT)


@needs_server
def test_two_servers_on_one_folder(model, tmp_path):
    folder = tmp_path / "kept"
    with serving(model, tmp_path, "--session-dir", str(folder)) as server:
        result = run(SERVER, "-m", model, "--port", "0", "--session-dir", folder)
        assert result.returncode == 2 and re.search(r"in use by process \d+", error_of(result))
        assert server.ask("/health")[0] == 200


def test_two_quantizers_for_one_output(tmp_path):
    """One of them writes it; the other is told, or comes later and finds it done."""
    source, output = make(tmp_path / "m.gguf", embd=256, heads=8, ff=1024, layers=6), tmp_path / "out.gguf"
    both = [subprocess.Popen([QUANTIZE, source, output, "Q8_0", "-t", "1"], stderr=subprocess.PIPE) for _ in range(2)]
    results = [(process.communicate(timeout=60)[1], process.returncode) for process in both]
    assert 0 in [code for _, code in results]
    for errors, code in results:
        assert code == 0 or b"another process is writing" in errors
    assert leftovers(tmp_path, "m.gguf", "out.gguf") == []
    assert run_main(str(output), "-p", "x", "-n", "1").returncode == 0
