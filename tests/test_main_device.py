"""`./main --device`: the list, what is unknown, and layers given away (to the CPU by ggml's operators, as a device would take them).

DT_MAIN names the program; DT_TEST_MODEL the real model, DT_MAKE_MODEL the program that writes a random one.
"""
import json
import os
import subprocess

import pytest

from test_main import assert_fails, needs_model, run, run_model, run_stats

MAKE_MODEL = os.environ.get("DT_MAKE_MODEL", "")


def test_list():
    result = run("--device", "list")
    assert result.returncode == 0 and result.stdout.startswith(b"cpu ") and result.stderr == b""


@needs_model
def test_unknown_device():
    """It is answered with the names that the list has."""
    names = [line.split(b" ")[0].decode() for line in run("--device", "list").stdout.splitlines() if b"no device was found" not in line]
    assert names[:2] == ["cpu", "ggml-cpu"]
    assert_fails(run_model("-p", "x", "-n", "1", "--device", "toaster"), 1, "toaster", f"this build knows: {', '.join(names)}. ")


@needs_model
def test_layers_elsewhere(tmp_path):
    stats = [run_stats(tmp_path, "-p", "In the beginning God created the heaven", "-n", "4", "--temp", "0", *flags)[1]
             for flags in ((), ("--device", "ggml-cpu", "-ngl", "3"), ("--device", "ggml-cpu", "-ngl", "0"))]
    devices = [s["device"] for s in stats]
    assert devices == ["cpu", "ggml-cpu (layers 0-2)", "cpu"]
    whole, evicting = [run_stats(tmp_path, "-p", "In the beginning God created the heaven", "-n", "4", "--device", "ggml-cpu", *flags)[1]
                       for flags in ((), ("--cache-eviction", "--max-cache-size", "64"))]
    assert whole["kv_bytes_full"] == evicting["kv_bytes_full"]  # with nothing evicted there are no scores either
    tokens = [s["generated_token_ids"] for s in stats]
    assert tokens[1][:2] == tokens[0][:2] and tokens[2] == tokens[0]


@pytest.mark.skipif(not os.access(MAKE_MODEL, os.X_OK), reason="DT_MAKE_MODEL names no program")
@pytest.mark.parametrize("flags", [("--memory-slots", "4"), ("--kv-type", "int8")])
def test_a_long_conversation_elsewhere(tmp_path, flags):
    """Past the context, saved, and gone on from there: with the device and without it."""
    model, session, stats = tmp_path / "m.gguf", tmp_path / "s", tmp_path / "s.json"
    subprocess.run([MAKE_MODEL, str(model), "--layers", "2", "--embd", "64", "--heads", "4", "--kv-heads", "2", "--head-dim", "16",
                    "--ff", "128", "--vocab", "320", "--ctx", "256"], check=True)
    common = ("-m", str(model), "-t", "1", "-p", "a word ", "--temp", "0", "--cache-eviction",
              "--max-cache-size", "64", "--session", str(session), "--ignore-eos", "--stats-json", str(stats), *flags)
    for n, where in ((400, ("--device", "ggml-cpu")), (10, ("--device", "ggml-cpu", "--append")), (10, ("--append",))):
        result = run(*common, "-n", str(n), *where)
        assert result.returncode == 0, result.stderr
        numbers = json.loads(stats.read_text())
        assert max(layer["length"] for layer in numbers["layers"]) <= 64
    assert numbers["reused_tokens"] > 256
