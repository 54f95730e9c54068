"""./main --kv-memory: the promise held in a real run, what the log says of it, and refusals."""
import os
import re
import resource
import subprocess

import pytest

from server_support import SANITIZED
from test_main import MAIN, MODEL, assert_fails, needs_model, run_model, run_stats

pytestmark = pytest.mark.skipif(not os.access(MAIN, os.X_OK), reason="DT_MAIN names no program")

TEXT = "word and another one " * 200
EVICT = ("--cache-eviction", "--max-cache-size", "512", "--min-cache-size", "64")


@needs_model
def test_promise(tmp_path):
    wholes = set()
    for limit, flags in ((64 << 20, EVICT), (16 << 20, EVICT), (10 << 20, EVICT), (32 << 20, ())):
        log, stats = run_stats(tmp_path, "-p", TEXT, "-n", "8", "--temp", "0", "--kv-memory", str(limit), *flags)
        most, full = re.search(rb"KV memory: at most ([0-9.]+) MiB; \d+ tokens with nothing evicted: ([0-9.]+) MiB", log.stderr).groups()
        assert stats["kv_bytes_peak"] <= limit
        assert stats["kv_bytes_peak"] <= (float(most) + 0.1) * (1 << 20)
        wholes.add(full)
        assert stats["kv_type"] == ("int8" if b"as int8" in log.stderr else "f16")
        if b"as int8" not in log.stderr:
            assert abs(stats["kv_bytes_full"] / (1 << 20) - float(full)) < 0.2
        assert stats["generated_tokens"] == 8
    assert len(wholes) == 1  # what eviction needs beside keys and values is no part of it


@needs_model
def test_too_little(tmp_path):
    result = run_model("-p", TEXT, "-n", "8", "--kv-memory", "1M", *EVICT)
    assert_fails(result, 2, "--kv-memory", "K")
    least = re.search(rb"--kv-memory (\d+)K", result.stderr).group(1).decode() + "K"
    _, stats = run_stats(tmp_path, "-p", TEXT, "-n", "8", "--kv-memory", least, *EVICT)
    assert stats["kv_bytes_peak"] <= int(least[:-1]) * 1024
    assert_fails(run_model("-p", TEXT, "-n", "8", "--kv-memory", "1M"), 2, "--cache-eviction")
    assert_fails(run_model("-p", TEXT, "-n", "8", "--kv-memory", "30"), 2, "30 bytes is too little")
    assert_fails(run_model("-p", TEXT, "-n", "8", "--kv-memory", "1"), 2, "1 byte is too little")
    assert_fails(run_model("-p", TEXT, "-n", "8", "--kv-memory", "300K"), 2, "300.0 KiB is too little")


@needs_model
@pytest.mark.skipif(not os.path.exists("/proc/self/statm") or SANITIZED,
                    reason="Linux counts mapped memory in RLIMIT_DATA, others may not; a sanitizer takes all there is")
def test_a_process_with_little_memory():
    """What the system grants beside the cache is found by trying, for a prompt of the same chunks but no cache to speak of; with
    --kv-memory on top of it a long text goes well, and without fails in a sentence."""
    granted, slack, cache = 8 << 20, 24 << 20, 12 << 20  # slack: the cache's blocks come in pieces of 8 MiB, threads have stacks

    def run_in(limit, *flags):
        def hold():
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

        return subprocess.run([MAIN, "-m", MODEL, "-t", "1", "-n", "4", "--temp", "0", "-b", "64", *flags], stdin=subprocess.DEVNULL,
                              capture_output=True, timeout=120, preexec_fn=hold)

    while run_in(granted, "-p", "word and another one " * 20).returncode != 0:
        granted += 8 << 20
        assert granted < 1 << 30
    long = ("-p", "word and another one " * 700, *EVICT)
    held = run_in(granted + slack + cache, *long, "--kv-memory", str(cache))
    assert held.returncode == 0, held.stderr
    assert_fails(run_in(granted + slack + cache, *long), 1, "memory")


@needs_model
def test_a_chat_goes_on_under_the_limit_it_was_saved_under(tmp_path):
    """Also where a chunk beside what is there would pass the context: chunks are shorter there."""
    flags = ("-cnv", "-n", "8", "--ignore-eos", "--temp", "0", "-c", "512", "--cache-eviction", "--max-cache-size", "128",
             "--min-cache-size", "64", "--kv-memory", "15M", "--session", str(tmp_path / "s.bin"))
    for message in (b"hi\n", b"word " * 700 + b"\n"):
        result = run_model(*flags, stdin=message)
        assert result.returncode == 0 and b"tokens saved" in result.stderr, result.stderr
