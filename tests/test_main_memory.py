"""./main --kv-memory: the promise held in a real run, what the log says of it, and refusals."""
import os
import re

import pytest

from test_main import MAIN, assert_fails, needs_model, run_model, run_stats

pytestmark = pytest.mark.skipif(not os.access(MAIN, os.X_OK), reason="DT_MAIN names no program")

TEXT = "word and another one " * 200
EVICT = ("--cache-eviction", "--max-cache-size", "512", "--min-cache-size", "64")


@needs_model
def test_promise(tmp_path):
    for limit, flags in ((64 << 20, EVICT), (16 << 20, EVICT), (10 << 20, EVICT), (32 << 20, ())):
        log, stats = run_stats(tmp_path, "-p", TEXT, "-n", "8", "--temp", "0", "--kv-memory", str(limit), *flags)
        full, most = re.search(rb"KV memory: \d+ tokens with nothing evicted would take ([0-9.]+) MiB, this run takes at most "
                               rb"([0-9.]+) MiB", log.stderr).groups()
        assert stats["kv_bytes_peak"] <= limit
        assert stats["kv_bytes_peak"] <= (float(most) + 0.1) * (1 << 20) and float(most) <= float(full)
        assert stats["generated_tokens"] == 8


@needs_model
def test_too_little(tmp_path):
    result = run_model("-p", TEXT, "-n", "8", "--kv-memory", "1M", *EVICT)
    assert_fails(result, 2, "--kv-memory", "K")
    least = re.search(rb"--kv-memory (\d+)K", result.stderr).group(1).decode() + "K"
    _, stats = run_stats(tmp_path, "-p", TEXT, "-n", "8", "--kv-memory", least, *EVICT)
    assert stats["kv_bytes_peak"] <= int(least[:-1]) * 1024
    assert_fails(run_model("-p", TEXT, "-n", "8", "--kv-memory", "1M"), 2, "--cache-eviction")
