"""bench/original.py on its tiny shape, without llama.cpp: every row is there, with its ratio and its bound."""
import csv
import os
import pathlib
import subprocess
import sys

import pytest

BENCH, EVAL, MAKE_MODEL = (os.environ.get(name, "") for name in ("DT_BENCH", "DT_EVAL", "DT_MAKE_MODEL"))
ROOT = pathlib.Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(not all(os.access(program, os.X_OK) for program in (BENCH, EVAL, MAKE_MODEL)),
                                reason="DT_BENCH, DT_EVAL or DT_MAKE_MODEL names no program")


FAKE_LLAMA = """#!/usr/bin/env python3
import json, sys, time
value = {name: sys.argv[sys.argv.index(name) + 1] for name in ("-fa", "-pg", "-p", "-n")}
assert (value["-p"], value["-n"]) == ("0", "0")
open(sys.argv[0] + ".log", "a").write(" ".join(sys.argv[1:]) + "\\n")
start = time.monotonic()
for phase, slower in (("prompt", "0"), ("generation", "1")):
    print("llama-bench: benchmark 1/1: %s run 1/1" % phase, file=sys.stderr, flush=True)
    time.sleep(2 if value["-fa"] == slower else 0.2)
print(json.dumps([{"avg_ns": (time.monotonic() - start) * 1e9}]))
"""


def test_better_setting_of_llama(tmp_path):
    """Reading and decoding each with the setting that is faster in it, found on a beginning of the prompt."""
    fake = tmp_path / "llama-bench"
    fake.write_text(FAKE_LLAMA)
    fake.chmod(0o755)
    command = [sys.executable, str(ROOT / "bench/original.py"), "--shapes", "tiny", "-t", "1", "-o", tmp_path, "--llama-bench", fake,
               "--scratch", tmp_path / "models", "--bench", BENCH, "--eval", EVAL, "--make-model", MAKE_MODEL]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    with open(tmp_path / "original-t1.csv", newline="") as file:
        row = next(csv.DictReader(file))
    # of 512 tokens and 32 in 0.2 seconds each, beside those that take 2: a busy machine may be late
    assert row["engine"] == "llama.cpp" and float(row["prompt"]) > 512 / 1.9 and float(row["decode"]) > 32 / 1.9
    asked = (tmp_path / "llama-bench.log").read_text().splitlines()
    assert sorted(line.split("-fa ")[1].split("-pg ")[0][:1] + line.split("-pg ")[1].split()[0] for line in asked) == [
        "0128,16", "0256,8", "0512,32", "1128,16", "1512,1"], asked


@pytest.mark.parametrize("folder, what", [("file/results", "can't be made a folder"), ("broken", "is no table"),
                                          ("half", "is no table")])
def test_folders_that_are_refused(tmp_path, folder, what):
    """Before anything is measured."""
    (tmp_path / "file").write_text("")
    for name, text in (("broken", "shape,engine\ntiny,TLC off\n"), ("half", "shape,engine,prompt_tokens,rounds,prompt,decode\n"
                                                                      "tiny,TLC docqa,512,1,1,1\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "original-t1.csv").write_text(text)
    command = [sys.executable, ROOT / "bench/original.py", "--shapes", "tiny", "--no-llama", "-t", "1", "-o", tmp_path / folder,
               "--scratch", tmp_path / "models", "--bench", sys.executable, "--eval", EVAL, "--make-model", MAKE_MODEL]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and what in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_tiny_shape(tmp_path):
    command = [sys.executable, str(ROOT / "bench/original.py"), "--shapes", "tiny", "--no-llama", "-t", "1", "-o", tmp_path,
               "--scratch", tmp_path / "models", "--bench", BENCH, "--eval", EVAL, "--make-model", MAKE_MODEL]
    (tmp_path / "original-t1.csv").write_text("shape,engine,prompt_tokens,rounds,prompt,decode\ntiny,TLC off,512,1,1,1\n")
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)  # an earlier row is replaced
    assert done.returncode == 0, done.stderr
    with open(tmp_path / "original-t1.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["engine"] for row in rows] == ["TLC off", "TLC docqa", "TLC 128"]
    for row in rows:
        assert float(row["prompt_tokens"]) == 512 and not row["shortened_from"]
        for key in ("prompt", "decode", "bound"):
            assert 0 < float(row[key]) < float("inf"), row
    assert float(rows[2]["kv_bytes"]) < float(rows[0]["kv_bytes"])
    table = (tmp_path / "original-t1.md").read_text()
    assert table in done.stdout and table.count("DeepTutor, TLC") == 3
    assert list((tmp_path / "models").iterdir()) == []


def test_a_run_that_was_broken_off(tmp_path):
    """The next one measures what is missing."""
    program, log = tmp_path / "bench", tmp_path / "log"
    program.write_text(f"""#!/bin/sh
echo "$*" >> {log}
case "$*" in *docqa*) [ -e {tmp_path}/once ] || {{ touch {tmp_path}/once; exit 1; }};; esac
exec {BENCH} "$@"
""")
    program.chmod(0o755)
    command = [sys.executable, str(ROOT / "bench/original.py"), "--shapes", "tiny", "--no-llama", "-t", "1", "-o", tmp_path / "out",
               "--scratch", tmp_path / "models", "--bench", program, "--eval", EVAL, "--make-model", MAKE_MODEL]
    first, second = (subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300) for _ in range(2))
    assert first.returncode != 0 and second.returncode == 0, (first.stderr, second.stderr)
    assert "measured already: TLC off 1" in second.stderr
    asked = [line for line in log.read_text().splitlines() if "-n 32" in line]  # not the probes
    assert [("docqa" in line, "--max-cache-size" in line) for line in asked] == [
        (False, False), (True, False), (True, False), (False, True)], asked
    assert list((tmp_path / "models").iterdir()) == []
    with open(tmp_path / "out/original-t1.csv", newline="") as file:
        assert [row["engine"] for row in csv.DictReader(file)] == ["TLC off", "TLC docqa", "TLC 128"]
