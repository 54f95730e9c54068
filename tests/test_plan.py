"""python/plan.py: bytes counted by hand for a tiny model, and a sentence for every wrong input. DT_MAKE_MODEL writes the model."""
import os
import shutil
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SHAPE = {"layers": 4, "heads": 4, "kv-heads": 2, "head-dim": 16, "embd": 64, "ff": 128, "vocab": 320, "ctx": 32768}


def plan(*arguments):
    return subprocess.run([sys.executable, os.path.join(ROOT, "python/plan.py"), *map(str, arguments)], capture_output=True, text=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("plan") / "tiny.gguf")
    flags = [part for name, value in SHAPE.items() for part in (f"--{name}", str(value))]
    for more in ([], ["--parts", "4"]):  # of which the parts are tiny-0000N-of-00004.gguf, beside the whole one
        subprocess.run([os.environ["DT_MAKE_MODEL"], path, *flags, "--no-tokenizer", *more], check=True, capture_output=True)
    return path


def rows_of(result):
    return {line[:24].strip(): line[24:].split() for line in result.stdout.splitlines()[2:]}


@pytest.mark.skipif("DT_MAKE_MODEL" not in os.environ, reason="DT_MAKE_MODEL names no program")
def test_bytes(model):
    result = plan("-m", model, "--context", 65536, "--bandwidth", 10, "--tflops", 1, "--max-cache-size", 16384)
    assert result.returncode == 0, result.stderr
    assert plan("--model", model, "--context", 256, "--device", "4090").stderr == ""
    assert plan("--model", model, "--context", 256, "--device", "A100").returncode == 0
    alone = plan("--model", model, "--context", 256, "--bandwidth", 10).stdout
    assert "decoding" in alone and "TFLOPS" not in alone and "prompt" not in alone
    rows = {name: [float(x) for x in cells if x != "-"] for name, cells in rows_of(result).items()}
    per_token = SHAPE["layers"] * SHAPE["kv-heads"] * 2 * SHAPE["head-dim"] * 2  # keys and values in two bytes
    assert rows["KV cache, MiB"] == [pytest.approx(65536 * per_token / 2**20, abs=0.06),
                                     pytest.approx(16384 * per_token / 2**20, abs=0.06), 0.25]
    off, on, ratio = rows["read per token, MiB"]
    assert off - on == pytest.approx((65536 - 16384) * per_token / 2**20, abs=0.11)
    assert rows["decoding, tokens/s"] == [pytest.approx(10e9 * 0.8 / (on * 2**20), rel=0.01)]
    rows = rows_of(plan("-m", model, "--context", 256, "--bandwidth", 10, "--max-cache-size", 64))
    off, on, ratio = map(float, rows["read per token, MiB"])
    speed_off, speed_on, faster = map(float, rows["decoding, tokens/s"])
    assert speed_off == pytest.approx(10e9 * 0.8 / (off * 2**20), rel=0.2)
    assert faster == pytest.approx(speed_on / speed_off, rel=0.01) and faster == pytest.approx(1 / ratio, rel=0.02)


@pytest.mark.skipif("DT_MAKE_MODEL" not in os.environ, reason="DT_MAKE_MODEL names no program")
def test_no_speed_of_a_run_that_there_is_not(model):
    """Longer than trained: with TLC off, and with budgets that leave no room for a chunk."""
    flags = ["-m", model, "--bandwidth", 10, "--tflops", 1, "--max-cache-size", 32736, "--context"]
    within, beyond = plan(*flags, 32768), plan(*flags, 32769)
    assert within.stderr == "" and "trained for 32768 tokens" in beyond.stderr and "with TLC off there is no such run" in beyond.stderr
    for name, cells in rows_of(within).items():
        assert len(cells) == 3 and "-" not in cells
        if "MiB" in name:
            assert len(rows_of(beyond)[name]) == 3
        else:
            assert rows_of(beyond)[name][0] == "-" and len(rows_of(beyond)[name]) == 2
    flags[flags.index(32736)] = 32737
    within, beyond = plan(*flags, 32768), plan(*flags, 32769)
    assert within.stderr == "" and "-" not in rows_of(within)["decoding, tokens/s"]
    assert "--max-cache-size 16384" in beyond.stderr and beyond.returncode == 0
    for name, cells in rows_of(beyond).items():
        assert (len(cells) == 3) if "MiB" in name else (cells == ["-", "-"])


@pytest.mark.skipif("DT_MAKE_MODEL" not in os.environ, reason="DT_MAKE_MODEL names no program")
def test_calibrated_budgets_are_shared(model, tmp_path):
    """As main has it, also for a link to a model elsewhere; --max-cache-size is for every layer all the same."""
    shutil.copy(model, tmp_path / "calibrated.gguf")
    (tmp_path / "calibrated.tlc.json").write_text("{}")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "link.gguf").symlink_to(tmp_path / "calibrated.gguf")
    flags = ["--context", 32768, "--bandwidth", 10]
    plain = plan("-m", model, *flags, "--preset", "chat")  # 2048 tokens in two layers, 4096 in two
    for path in (tmp_path / "calibrated.gguf", tmp_path / "links" / "link.gguf"):
        result = plan("-m", path, *flags, "--preset", "chat")
        assert f"shared out by {tmp_path / 'calibrated.tlc.json'}, 3072 a layer on average" in result.stderr
        assert result.stdout == plain.stdout
        result = plan("-m", path, *flags, "--max-cache-size", 512)
        assert result.stderr == "" and result.stdout == plan("-m", model, *flags, "--max-cache-size", 512).stdout


@pytest.mark.skipif("DT_MAKE_MODEL" not in os.environ, reason="DT_MAKE_MODEL names no program")
def test_all_parts_are_counted(model, tmp_path):
    flags = ["--context", 200, "--bandwidth", 10, "--tflops", 1, "--max-cache-size", 64]
    first, second, third, fourth = (model.replace(".gguf", f"-0000{i}-of-00004.gguf") for i in range(1, 5))
    whole, parts = plan("-m", model, *flags), plan("-m", first, *flags)
    assert whole.returncode == 0 and (parts.returncode, parts.stdout, parts.stderr) == (0, whole.stdout, "")
    here = {i: str(tmp_path / f"x-0000{i}-of-00004.gguf") for i in range(1, 5)}
    for i, path in ((1, first), (2, second), (4, fourth)):
        shutil.copy(path, here[i])
    shutil.copy(first, tmp_path / "renamed.gguf")

    def refused(path, *words):
        result = plan("-m", path, *flags)
        assert result.returncode == 1 and result.stdout == "" and result.stderr.count("\n") == 1, result
        assert all(word in result.stderr for word in words), result.stderr
    refused(here[2], "is part 2 of 4", f"name the first, {here[1]}")
    refused(here[1], f"{here[3]} is missing")
    refused(tmp_path / "renamed.gguf", "does not end in -00001-of-00004.gguf")
    shutil.copy(second, here[3])
    refused(here[1], f"{here[3]} does not say that it is part 3")
    shutil.copy(model, here[3])
    refused(here[1], f"{here[3]} does not say that it is part 3")


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
