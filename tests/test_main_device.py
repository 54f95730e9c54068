"""`./main --device`: the list, what is unknown, and layers given away (to the CPU by ggml's operators, as a device would take them).

DT_MAIN names the program; DT_TEST_MODEL the real model, DT_MAKE_MODEL the program that writes a random one.
"""
import json
import os
import re
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


@pytest.mark.skipif(not os.access(MAKE_MODEL, os.X_OK), reason="DT_MAKE_MODEL names no program")
@pytest.mark.parametrize("kv_type", ["f16", "int8"])
def test_heads_of_different_lengths_are_loaded_whole(tmp_path, kv_type):
    """A short head that is read after a long one leaves that as it is. The device computes what the host does, up to rounding."""
    model, session, config = tmp_path / "m.gguf", tmp_path / "s", tmp_path / "c.json"
    subprocess.run([MAKE_MODEL, str(model), "--layers", "2", "--embd", "64", "--heads", "4", "--kv-heads", "2", "--head-dim", "32",
                    "--ff", "128", "--vocab", "320", "--ctx", "4096", "--type", "f32", "--seed", "3"], check=True)
    config.write_text(json.dumps({"0-": {"policy": "importance_score", "lanes": [1500, 20]}}))
    common = ("-m", str(model), "-t", "1", "--temp", "0", "--ignore-eos", "--cache-eviction", "--eviction-config", str(config),
              "--no-display-prompt", "--kv-type", kv_type, "--session", str(session))
    assert run(*common, "-p", "the dog ran " * 300, "-n", "4").returncode == 0
    whole = session.read_bytes()
    texts = []
    for where in ((), ("--device", "ggml-cpu")):
        session.write_bytes(whole)
        result = run(*common, "-p", " a cat", "--append", "-n", "10", *where)
        assert result.returncode == 0, result.stderr
        texts.append(result.stdout)
    assert texts[0] == texts[1]


@pytest.mark.skipif(not os.access(MAKE_MODEL, os.X_OK), reason="DT_MAKE_MODEL names no program")
def test_a_loaded_session_takes_what_was_told(tmp_path):
    """It is there beside an empty one for a moment, which takes nothing yet; a limit that is too small is called that, not damage."""
    model, session, stats = tmp_path / "m.gguf", tmp_path / "s", tmp_path / "s.json"
    subprocess.run([MAKE_MODEL, str(model), "--layers", "3", "--embd", "64", "--heads", "4", "--kv-heads", "2", "--head-dim", "16",
                    "--ff", "96", "--vocab", "320", "--ctx", "512"], check=True)
    common = ("-m", str(model), "-t", "1", "--temp", "0", "--ignore-eos", "--device", "ggml-cpu", "--session", str(session),
              "--stats-json", str(stats), "-n", "20")
    assert run(*common, "-p", "the dog").returncode == 0
    whole, n_run = session.read_bytes(), 0
    for limit in (None, *range(200, 300, 7)):
        session.write_bytes(whole)
        result = run(*common, "-p", " the cat", "--append", "--cache-eviction", "--max-cache-size", "40", "--prefill", "streaming",
                     *(("--kv-memory", f"{limit}K") if limit else ()))
        said = result.stderr.decode()
        if result.returncode == 0:
            n_run += 1
            peak, most = json.loads(stats.read_text())["kv_bytes_peak"], re.search(r"at most ([0-9.]+) KiB", said).group(1)
            assert peak <= (float(most) + 0.1) * 1024, said
        else:
            assert result.returncode == 2 and "--kv-memory" in said and "damaged" not in said and session.read_bytes() == whole, said
    assert 2 < n_run < 15
