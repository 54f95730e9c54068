"""./deeptutor-bench on a tiny random model: that it runs through, and that its JSON can be plotted.

DT_BENCH and DT_MAKE_MODEL name the program and the one that writes the model. Speeds are not judged: other programs may be
using the cores. Invariant of every check: numbers are finite before they are compared.
"""
import json
import math
import os
import subprocess

import pytest

BENCH = os.environ.get("DT_BENCH", "")
MAKE_MODEL = os.environ.get("DT_MAKE_MODEL", "")
BUDGET = 32

pytestmark = pytest.mark.skipif(not os.access(BENCH, os.X_OK) or not os.access(MAKE_MODEL, os.X_OK),
                                reason="DT_BENCH or DT_MAKE_MODEL names no program")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("bench") / "tiny.gguf")
    subprocess.run([MAKE_MODEL, path, "--layers", "2", "--embd", "64", "--heads", "4", "--kv-heads", "2", "--head-dim", "16",
                    "--ff", "128", "--vocab", "320", "--ctx", "512"], check=True, timeout=60)
    return path


def bench(*args):
    return subprocess.run([BENCH, "-t", "1", *args], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)


def test_repeats_that_go_back_need_no_context(model):
    result = bench("-m", model, "-d", "440", "-p", "64", "-n", "4", "-r", "3")
    assert result.returncode == 0 and "trained with" not in result.stderr, result.stderr


def refuse_constant(name):
    raise AssertionError(f"{name} in the output")


def test_json(model):
    result = bench("-m", model, "-d", "0,64", "-n", "4", "-p", "16", "-r", "2", "--cache-eviction", "--max-cache-size", str(BUDGET),
                   "-o", "json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout, parse_constant=refuse_constant)
    assert report["model"] == model and report["arch"] == "llama" and report["read_bandwidth"] > 0
    rows = report["rows"]
    for row in rows:
        for name, value in row.items():
            assert not isinstance(value, float) or math.isfinite(value), (name, row)
        assert 0 < row["tps_low"] <= row["tps"] <= row["tps_high"], row
        assert row["kv_bytes"] > 0 and row["kv_bytes_full"] > 0, row
        for share in ("attention_share", "eviction_share", "sampling_share"):
            assert 0 <= row[share] <= 1, row
        assert (row["step_bytes"] > 0 and row["bound_tps"] > 0) == (row["test"] == "decode"), row
    measured = {(row["eviction"], row["depth"], row["test"], row["tokens"]) for row in rows}
    assert len(measured) == len(rows)
    assert measured == {(on, depth, test, n) for on in (False, True) for depth, test, n in [
        (0, "decode", 4), (0, "prefill", 16), (64, "prompt", 64), (64, "decode", 4), (64, "prefill", 16)]}
    off, on = (next(row for row in rows if row["eviction"] == e and (row["depth"], row["test"]) == (64, "decode"))
               for e in (False, True))
    assert on["step_bytes"] < off["step_bytes"]  # an evicted cache is read faster


def test_a_name_that_is_not_utf8(model, tmp_path):
    path = os.fsencode(tmp_path) + b"/t\xe9.gguf"
    os.symlink(model, path)
    result = bench("-m", path, "-n", "1", "-p", "0", "-r", "1", "-o", "json")
    assert result.returncode == 0 and json.loads(result.stdout)["model"].endswith("/t\ufffd.gguf"), result


def test_table_fits_a_terminal(model):
    result = bench("-m", model, "-d", "0,64", "-n", "4", "-p", "16", "-r", "1", "--cache-eviction", "--max-cache-size", str(BUDGET),
                   "-c", "600")
    assert result.returncode == 0, result.stderr
    assert f"max {BUDGET} " in result.stderr  # the settings, layer by layer
    assert result.stderr.count("longer than the 512 the model was trained with") == 1, result.stderr  # of four sessions
    assert max(map(len, result.stdout.splitlines())) <= 80
    rows = [line for line in result.stdout.splitlines() if line.startswith("|")]
    assert len(rows) == 12 and len({len(row) for row in rows}) <= 2  # a header, its ruler, 10 measurements, in columns
    assert all(len(line) <= 80 for line in result.stdout.splitlines()), result.stdout


def test_no_spread_of_what_was_measured_once(model):
    """A prompt up to a depth is read once, whatever -r says."""
    result = bench("-m", model, "-d", "64", "-n", "4", "-p", "16", "-r", "3")
    cells = {row.split("|")[3].strip(): row.split("|")[5].strip() for row in result.stdout.splitlines() if row.startswith("|    64")}
    assert len(cells) == 3 and {test: spread == "" for test, spread in cells.items()} == {
        test: test.startswith("prompt") for test in cells}, result.stdout


@pytest.mark.parametrize("fill", ["prefill", "synthetic"])
def test_parallel(model, fill):
    result = bench("-m", model, "-d", "64", "-n", "4", "-r", "2", "--parallel", "3", "--fill", fill, "--cache-eviction",
                   "--max-cache-size", str(BUDGET), "-o", "json")
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout, parse_constant=refuse_constant)["rows"]
    tests = ["decode"] if fill == "synthetic" else ["prompt", "decode"]
    assert [(row["eviction"], row["test"], row["sequences"]) for row in rows] == [(on, test, 3) for on in (False, True) for test in tests]
    assert rows[-1]["step_bytes"] < rows[len(tests) - 1]["step_bytes"] and all(row["tps"] > 0 for row in rows)
    for row in rows:
        assert 0 < row["attention_share"] < 1 and (row["eviction_share"] > 0 or not row["eviction"]), row


def test_parallel_shares_one_limit(model):
    """--kv-memory is that of all conversations together; where they don't fit, nothing is measured."""
    common = ("-m", model, "-d", "256", "-n", "4", "-r", "1", "--parallel", "3", "-o", "json")
    needed = json.loads(bench(*common).stdout)["rows"][-1]["kv_bytes"]
    assert bench(*common, "--kv-memory", str(3 * needed)).returncode == 0
    failed = bench(*common, "--kv-memory", str(needed // 2))
    assert failed.returncode == 1 and failed.stdout == "", failed
    alone = bench(*common[:-4], "-o", "json", "--kv-memory", str(needed // 10))  # one that can't be
    assert alone.returncode == 2 and "is too little" in alone.stderr, alone


def test_table_that_cant_be_written(model):
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    with open("/dev/full", "w") as full:
        result = subprocess.run([BENCH, "-t", "1", "-m", model, "-n", "1", "-p", "0", "-r", "1"], stdin=subprocess.DEVNULL,
                                stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert result.returncode == 1 and "error: the table can't be written" in result.stderr, result.stderr


def test_a_file_that_is_not_there(model, tmp_path):
    """Settings that the command line names are its fault; a model that can't be opened is none."""
    config = ["-m", model, "--cache-eviction", "--eviction-config", tmp_path / "none.json"]
    for code, args in ((2, config), (1, ["-m", tmp_path / "none"])):
        result = bench(*map(str, args))
        assert result.returncode == code and result.stdout == "" and "none" in result.stderr, result.stderr


@pytest.mark.parametrize("args", [["-d", "64,0"], ["-d", ""], ["-d", "0,x"], ["-d", "5,"], ["-r", "0"], ["--max-cache-size", "32"],
                                  ["-p", "0", "-n", "0"], ["--parallel", "2", "-n", "0"], ["--no-compare"],
                                  ["-d", "0,900", "-c", "512"]])
def test_bad_usage(model, args):
    result = bench("-m", model, *args)
    assert result.returncode == 2 and result.stdout == "", result.stderr
    assert result.stderr.startswith("error: ")


def test_nothing_asked_for():
    result = subprocess.run([BENCH], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2 and result.stdout == ""
    usage, error = result.stderr.splitlines()
    assert usage.startswith("usage: deeptutor-bench -m FILE") and error.startswith("error: ") and "--help" in error
