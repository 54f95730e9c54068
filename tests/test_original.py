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
