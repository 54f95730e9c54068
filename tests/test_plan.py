"""python/plan.py: bytes counted by hand for a tiny model, and a sentence for every wrong input. DT_MAKE_MODEL writes the model."""
import os
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SHAPE = {"layers": 4, "heads": 4, "kv-heads": 2, "head-dim": 16, "embd": 64, "ff": 128, "vocab": 320, "ctx": 256}


def plan(*arguments):
    return subprocess.run([sys.executable, os.path.join(ROOT, "python/plan.py"), *map(str, arguments)], capture_output=True, text=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("plan") / "tiny.gguf")
    flags = [part for name, value in SHAPE.items() for part in (f"--{name}", str(value))]
    subprocess.run([os.environ["DT_MAKE_MODEL"], path, *flags, "--no-tokenizer"], check=True, capture_output=True)
    return path


@pytest.mark.skipif("DT_MAKE_MODEL" not in os.environ, reason="DT_MAKE_MODEL names no program")
def test_bytes(model):
    result = plan("--model", model, "--context", 65536, "--bandwidth", 10, "--tflops", 1, "--max-cache-size", 16384)
    assert result.returncode == 0, result.stderr
    assert "trained for 256 tokens" in result.stderr
    assert plan("--model", model, "--context", 256, "--device", "4090").stderr == ""
    assert plan("--model", model, "--context", 256, "--device", "A100").returncode == 0
    alone = plan("--model", model, "--context", 256, "--bandwidth", 10).stdout
    assert "decoding" in alone and "TFLOPS" not in alone and "prompt" not in alone
    rows = {line[:24].strip(): [float(x) for x in line[24:].split()] for line in result.stdout.splitlines()[2:]}
    per_token = SHAPE["layers"] * SHAPE["kv-heads"] * 2 * SHAPE["head-dim"] * 2  # keys and values in two bytes
    assert rows["KV cache, MiB"] == [pytest.approx(65536 * per_token / 2**20, abs=0.06),
                                     pytest.approx(16384 * per_token / 2**20, abs=0.06), 0.25]
    off, on, ratio = rows["read per token, MiB"]
    assert off - on == pytest.approx((65536 - 16384) * per_token / 2**20, abs=0.11)
    speed_off, speed_on, faster = rows["decoding, tokens/s"]
    assert speed_off == pytest.approx(10e9 * 0.8 / (off * 2**20), rel=0.01)
    assert faster == pytest.approx(speed_on / speed_off, rel=0.01) and faster == pytest.approx(1 / ratio, rel=0.02)


@pytest.mark.skipif("DT_MAKE_MODEL" not in os.environ, reason="DT_MAKE_MODEL names no program")
def test_wrong_inputs_are_told(model, tmp_path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(open(model, "rb").read()[:2000])
    here = ["--model", model, "--context", 100]
    for arguments, word in ((["--model", tmp_path / "none.gguf", "--context", 9, "--device", "4090"], "none.gguf"),
                            (["--model", cut, "--context", 9, "--device", "4090"], "not a whole GGUF model"),
                            (["--model", __file__, "--context", 9, "--device", "4090"], "not a whole GGUF model"),
                            (["--model", model, "--context", 0, "--device", "4090"], "--context"),
                            ([*here, "--bandwidth", "nan", "--tflops", 1], "--bandwidth"), ([*here, "--tflops", 9], "--bandwidth"),
                            ([*here, "--device", "h100"], "give --bandwidth and --tflops"),
                            ([*here, "--device", "4090", "--max-cache-size", -4], "--max-cache-size"),
                            ([*here, "--device", "4090", "--max-cache-size", 9, "--preset", "chat"], "--preset")):
        result = plan(*arguments)
        assert result.returncode in (1, 2) and word in result.stderr and "Traceback" not in result.stderr, (arguments, result.stderr)
