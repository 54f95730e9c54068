"""bench/quality.py: its tables of what is there, and what it refuses."""
import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROW = {"kept_share": 0.25, "kld": 0.5, "top1": 0.75, "nll": 2, "nll_full": 1.5}


def quality(*args, code=0):
    done = subprocess.run([sys.executable, ROOT / "bench/quality.py", "-m", "m.gguf", *map(str, args)], capture_output=True,
                          text=True, timeout=60)
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
    return done.stdout if code == 0 else done.stderr


def write(folder, *rows):
    (folder / "kld-prose0.json").write_text(json.dumps({"settings": list(rows)}))


def test_table(tmp_path):
    window, fast = {**ROW, "name": "window once 0.25"}, {**ROW, "name": "fast once 0.25", "kld": 0.25}
    write(tmp_path, window, fast)
    table, line = quality("-o", tmp_path, "--table"), "| once | 0.25 | fast | 1 | 0.2500 ± 0.0000 | 0.750 | 0.250 |"
    assert line + " 0.2500 ± 0.0000 | 1 of 1 |" in table
    write(tmp_path, fast)  # nothing to compare with
    assert line + "  |  |" in quality("-o", tmp_path, "--table")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"settings": 1}', '{"settings": [{"name": "fast once 0.25"}]}',
                                  json.dumps({"settings": [{**ROW, "name": "mine"}]}),
                                  json.dumps({"settings": [{**ROW, "name": "fast once 0.25", "kld": None}]})])
def test_broken_results(tmp_path, text):
    path = tmp_path / "kld-prose0.json"
    path.write_text(text)
    failed = quality("-o", tmp_path, "--table", code=2)
    assert failed.startswith(f"error: {path} is no whole result") and failed.count("\n") == 1


def test_what_is_refused(tmp_path):
    assert "known: kld, needle, presets, parts" in quality("-o", tmp_path, "--table", "--only", "kld,bogus", code=2)
    assert "is no folder" in quality("-o", tmp_path / "missing", "--table", code=2)
    assert "m.gguf is not there" in quality("-o", tmp_path, code=2)
    quality("-o", tmp_path, "--pieces", 9, code=2)
