"""python/cluster/ray_batch.py on a Ray of two workers on this machine: the lines of ./deeptutor-batch, also when a worker is killed.
Skipped where ray, or the shared library (DT_LIBRARY), is missing."""
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from server_support import BATCH, MAKE_MODEL, make_tiny

pytest.importorskip("ray")
pytestmark = pytest.mark.skipif(not os.access(BATCH, os.X_OK) or not os.path.exists(os.environ.get("DT_LIBRARY", "")),
                                reason="DT_BATCH names no program, or DT_LIBRARY no library")
ROOT = pathlib.Path(__file__).resolve().parent.parent
WORDS = "The quick brown fox jumps over the lazy dog while seven wizards wait. "


def parent_of(pid):
    return int((pathlib.Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])


def kill_a_worker(driver):
    """One of this driver's (its child is the raylet, whose children are the workers): another Ray on this machine is not ours."""
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if b"ray::Engine" in (folder / "cmdline").read_bytes() and parent_of(parent_of(folder.name)) == driver:
                os.kill(int(folder.name), signal.SIGKILL)
                return True
        except OSError:
            pass
    return False


def test_two_workers(tmp_path):
    model = make_tiny(str(tmp_path / "tiny.gguf"))
    rows = [json.dumps({"custom_id": f"c{i}", "method": "POST", "url": "/v1/chat/completions",
                        "body": {"messages": [{"role": "user", "content": f"{i} " + WORDS}], "max_tokens": 40}}) for i in range(20)]
    rows += ["{bad", json.dumps({"id": "s", "prompt": WORDS}), json.dumps({"id": "long", "prompt": WORDS * 100}), rows[0]]
    rows += [json.dumps({"id": str(body), "prompt": WORDS, **body}) for body in (
        {"frequency_penalty": 1}, {"best_of": 2}, {"functions": [1]}, {"n": None}, {"max_tokens": 0}, {"max_tokens": "3"}, {"ignore_eos": True},
        {"temperature": -4}, {"top_p": 2}, {"seed": 1.5},
        {"repeat_penalty": 1.5, "repeat_last_n": 8})]
    (tmp_path / "in.jsonl").write_text("\n".join(rows))
    flags = ["-m", model, "-i", str(tmp_path / "in.jsonl"), "-n", "12", "--temp", "0", "--chat-template", "chatml", "--ignore-eos"]
    subprocess.run([BATCH, *flags, "-t", "1", "-o", str(tmp_path / "alone.jsonl"), "--kernel", "reference"], check=True, timeout=120)
    process = subprocess.Popen([sys.executable, str(ROOT / "python" / "cluster" / "ray_batch.py"), *flags, "-o", str(tmp_path / "ray.jsonl"),
                                "--workers", "2"], env={**os.environ, "PYTHONPATH": str(ROOT / "python")})
    killed, until = False, time.monotonic() + 120
    while process.poll() is None and time.monotonic() < until:
        out = tmp_path / "ray.jsonl"
        if not killed and out.exists() and out.read_bytes().count(b"\n") >= 4:
            killed = kill_a_worker(process.pid)
        time.sleep(0.01)
    assert process.wait(timeout=60) == 0 and killed
    alone, ray = ([json.loads(line) for line in (tmp_path / name).read_text().splitlines()] for name in ("alone.jsonl", "ray.jsonl"))
    assert sorted(row["line"] for row in ray) == sorted(row["line"] for row in alone) == list(range(1, len(rows) + 1))
    alone = {row["line"]: row for row in alone}
    for row in ray:
        other = alone[row["line"]]
        assert set(row) | {"settings"} == set(other) and bool(row["error"] if "error" in row else None) == bool(other.get("error")), (row, other)
        if row.get("response"):
            assert row["custom_id"] == other["custom_id"]
            assert row["response"]["body"]["choices"][0]["message"] == other["response"]["body"]["choices"][0]["message"]
        elif "text" in row:
            assert row["text"] == other["text"]
