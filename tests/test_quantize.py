"""./deeptutor-quantize and convert.py --quantize: the types that come out, what stays as it is, and what is refused.

The numbers are libllama's; that they are right is checked by how far the logits move.
"""
import os
import signal
import subprocess
import sys
import time

import pytest

from test_convert import (HERE, converted, families, hf, llama_logits, random_ids, read_fields, refused)
import numpy as np  # test_convert skips where it is missing

QUANTIZE = os.environ.get("DT_QUANTIZE", "")
pytestmark = pytest.mark.skipif(not os.access(QUANTIZE, os.X_OK), reason="DT_QUANTIZE names no program")
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 1}


def quantize(*args, **more):
    return subprocess.run([QUANTIZE, *map(str, args)], stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=120, **more)


@pytest.fixture(scope="module")
def wide(tokenizers, tmp_path_factory):
    """A model whose rows are whole K-quant blocks."""
    base = tmp_path_factory.mktemp("wide")
    made = families.make("llama2", base / "folder", tokenizers)
    made.config.update(WIDE)
    hf.write_json(made.folder / "config.json", made.config)
    made.weights = hf.save_weights(made.folder, hf.random_weights(hf.llama_names(made.config), 4))
    return made, converted(made.folder, base / "wide.gguf")


def types(path):
    return {name: tensor.tensor_type.name for name, tensor in read_fields(path)[1].items()}


@pytest.mark.parametrize("name,expected,file_type,tolerance", [
    ("Q8_0", "Q8_0", 7, 0.05), ("q4_0", "Q4_0", 2, 0.5), ("Q4_1", "Q4_1", 3, 0.5),
    ("Q4_K_M", "Q4_K", 15, 0.5), ("Q6_K", "Q6_K", 18, 0.1),
    ("IQ4_XS", "IQ4_XS", 30, 0.5), ("BF16", "BF16", 32, 0.01),
])
def test_types(wide, tmp_path, name, expected, file_type, tolerance):
    made, path = wide
    out = tmp_path / "out.gguf"
    result = quantize(path, out, name, "-t", 2)
    assert result.returncode == 0 and result.stdout == "" and "MB/s" in result.stderr, result.stderr
    assert types(out)["blk.0.ffn_gate.weight"] == expected and read_fields(out)[0]["general.file_type"] == file_type
    ids = random_ids(20)
    assert families.close(llama_logits(out, ids, [19]), made.logits(ids, [19]), tolerance)
    assert [p.name for p in tmp_path.iterdir()] == ["out.gguf"]


def test_nothing_left_to_quantize(wide, tmp_path):
    """A copy under another type's name would look like more (or less) than it is. What is partly quantized:
    test_quantize_touches_only_the_rest."""
    once, twice = tmp_path / "once.gguf", tmp_path / "twice.gguf"
    assert quantize(wide[1], once, "Q4_0").returncode == 0
    for name in ("Q8_0", "Q4_0", "F16"):
        result = quantize(once, twice, name)
        assert result.returncode == 2 and "quantized already (q" in result.stderr and "F16, BF16 or F32" in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["once.gguf"]


def test_convert_true_is_q4_k_m(wide, tmp_path):
    made, path = wide
    expected = tmp_path / "expected.gguf"
    assert quantize(path, expected, "Q4_K_M").returncode == 0
    for word in ("True", "Q4_K_M", "q4_k_m"):
        out = converted(made.folder, tmp_path / f"{word}.gguf", "--quantize", word, "--threads", "2")
        assert out.read_bytes() == expected.read_bytes()


def test_convert_refuses_a_type(wide, tmp_path, capsys):
    text = refused(capsys, wide[0].folder, tmp_path / "out.gguf", "--quantize", "Q9")
    assert "Q9" in text and "Q4_K_M" in text
    text = refused(capsys, wide[0].folder, tmp_path / "out.gguf", "--quantize", "q4")
    assert "--quantize q4: no such type; it is one of Q4_0, Q4_1, Q4_K_S, Q4_K_M\n" in text


def test_convert_needs_the_program(wide, tmp_path, capsys, monkeypatch):
    from convert import command

    monkeypatch.delenv("DT_QUANTIZE")
    monkeypatch.setattr(command, "ROOT", tmp_path)
    assert "bash run.sh" in refused(capsys, wide[0].folder, tmp_path / "out.gguf", "--quantize", "True")


@pytest.mark.parametrize("args", [["IN", "OUT"], ["IN", "OUT", "Q9"], ["IN", "OUT", "Q4_0", "more"],
                                  ["IN", "OUT", "Q4_0", "-t", "x"], ["IN", "OUT", "Q4_0", "-t", "513"], ["IN", "OUT", "Q4_0", "-t", ""],
                                  ["IN", "OUT", "Q4_0", "-t", " 2"], ["IN", "OUT", "Q4_0", "-t"], ["IN", "OUT", "Q4_0", "-t", "-1"],
                                  ["IN", "OUT", "Q4_0", "--what"], ["IN", "IN", "Q4_0"], []])
def test_bad_usage(wide, tmp_path, args):
    places = {"IN": wide[1], "OUT": tmp_path / "out.gguf"}
    result = quantize(*[places.get(word, word) for word in args])
    assert result.returncode == 2 and result.stdout == "" and (result.stderr.startswith("error: ") or not args)
    assert wide[1].exists() and not list(tmp_path.iterdir())


def test_flags_of_llama_quantize(wide, tmp_path):
    for flag, word in (("--allow-requantize", "F16, BF16 or F32"), ("--leave-output-tensor", "TYPE"), ("--pure", "TYPE"),
                       ("--imatrix", "llama-quantize"), ("--output-tensor-type", "TYPE"), ("--token-embedding-type", "TYPE"),
                       ("--keep-split", "one file")):
        result = quantize(flag, wide[1], tmp_path / "out.gguf", "Q4_0")
        assert result.returncode == 2 and f"there is no flag {flag}: " in result.stderr and word in result.stderr, result.stderr


def test_files_that_are_no_model(wide, tmp_path):
    out = tmp_path / "out.gguf"
    whole = wide[1].read_bytes()
    bad = tmp_path / "bad.gguf"
    random = np.random.default_rng(8)
    inputs = [b"", b"GGUF", whole[:1000], whole[: len(whole) // 2], whole[:-1]]
    for _ in range(20):
        damaged = bytearray(whole)
        damaged[int(random.integers(0, 3000))] ^= int(random.integers(1, 256))
        inputs.append(damaged)
    for content in inputs:
        bad.write_bytes(content)
        result = quantize(bad, out, "Q4_0")
        assert result.returncode in (0, 1), (result.returncode, result.stderr)
        assert result.returncode == 0 or (result.stderr.startswith("error: ") and not out.exists())
        out.unlink(missing_ok=True)
    assert quantize(tmp_path / "nowhere.gguf", out, "Q4_0").returncode == 1
    assert quantize(wide[1], tmp_path / "no" / "folder.gguf", "Q4_0").returncode == 1


@pytest.mark.parametrize("value,name,words", [
    (float("nan"), "Q4_0", "holds nan"), (float("inf"), "F32", "holds inf"), (float("-inf"), "Q8_0", "holds -inf"),
    (7e4, "F16", "holds 70000, and F16 ends at 65504; BF16 and F32 hold it"), (-1e9, "Q4_K_M", "holds -1e+09, and Q4_K_M"),
    (7e4, "BF16", None), (7e4, "F32", None), (65504.0, "Q4_0", None)])
def test_numbers_that_no_type_keeps(wide, tmp_path, value, name, words):
    """ggml would print a line of its own and libllama a sentence without a next step."""
    source, out = converted(wide[0].folder, tmp_path / "in.gguf", "--outtype", "f32"), tmp_path / "out.gguf"
    with open(source, "r+b") as file:  # the converter would refuse it too
        file.seek(read_fields(source)[1]["blk.0.ffn_up.weight"].data_offset + 4 * 100_000)
        file.write(np.float32(value).tobytes())
    result = quantize(source, out, name)
    assert (result.returncode == 0) == (words is None) == out.exists(), result.stderr
    if words is not None:
        assert result.stderr.startswith(f"error: {source}: tensor 'blk.0.ffn_up.weight' {words}") and result.stderr.count("\n") == 1


def test_no_space(wide, tmp_path):
    """A limit on the size of files; tests/test_faults.py has a full disk. Each is told as what it is."""
    import resource

    out = tmp_path / "out.gguf"
    result = quantize(wide[1], out, "Q8_0", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)))
    assert result.returncode == 1 and "File too large" in result.stderr and not list(tmp_path.iterdir())


def make_model(folder, *sizes):
    if not os.environ.get("DT_MAKE_MODEL"):
        pytest.skip("DT_MAKE_MODEL names no program")
    path = folder / "source.gguf"
    subprocess.run([os.environ["DT_MAKE_MODEL"], str(path), *map(str, sizes)], check=True, timeout=300)
    return path


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Seconds of work for one thread."""
    return make_model(tmp_path_factory.mktemp("large"), "--layers", 4, "--embd", 1024, "--heads", 8, "--kv-heads", 8,
                      "--head-dim", 128, "--ff", 4096, "--vocab", 4000, "--type", "f16")


def start(*args, **more):
    """A run that writes already: out.gguf.quantizing.part, in the output's folder, has something in it."""
    process = subprocess.Popen([QUANTIZE, *map(str, args)], stderr=subprocess.PIPE, **more)
    part, deadline = args[1].parent / "out.gguf.quantizing.part", time.monotonic() + 30
    while not (part.exists() and part.stat().st_size > 0) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    return process


def test_stopped(large, tmp_path):
    for stop, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)):
        process = start(large, tmp_path / "out.gguf", "Q4_K_M", "-t", "1")
        process.send_signal(stop)
        process.communicate(timeout=30)
        assert process.returncode == code and not list(tmp_path.iterdir())


def test_nohup(large, tmp_path):
    ignore = {"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)}
    process = start(large, tmp_path / "out.gguf", "Q4_K_M", "-t", "1", **ignore)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.1)
    assert process.poll() is None
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 143


def test_stopping_another_run_stops_nothing_here(large, tmp_path):
    """Whoever doesn't write the file doesn't remove it, wherever the signal meets it."""
    first = start(large, tmp_path / "out.gguf", "Q4_K_M", "-t", "1")
    for wait in (0, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05):
        second = subprocess.Popen([QUANTIZE, str(large), str(tmp_path / "out.gguf"), "Q4_K_M"], stderr=subprocess.PIPE)
        time.sleep(wait)
        second.send_signal(signal.SIGTERM)
        second.communicate(timeout=30)
        assert (tmp_path / "out.gguf.quantizing.part").exists() and first.poll() is None
    first.terminate()
    first.communicate(timeout=30)
    assert first.returncode == 143 and not list(tmp_path.iterdir())


@pytest.mark.skipif(not os.path.exists(os.environ.get("DT_FAIL_MEMORY", "")), reason="not Linux, or a sanitizer's tree")
def test_little_address_space(large, tmp_path):
    """Where not all threads can be started fewer do it, and where memory runs out that is told; never is the process ended."""
    import resource

    out, results = tmp_path / "out.gguf", {}
    for extra in (2, 16, 60, 100, 130, 160, 200, 250, 300, 400, 600):
        limit = large.stat().st_size + (extra << 20)
        result = quantize(large, out, "Q8_0", "-t", 16, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))
        results[extra] = result.returncode
        assert result.returncode == 0 or (result.returncode == 1 and "memory" in result.stderr), (extra, result)
        assert [p.name for p in tmp_path.iterdir()] == (["out.gguf"] if result.returncode == 0 else []), extra
        out.unlink(missing_ok=True)
    assert results[2] == 1 and all(results[extra] == 0 for extra in (130, 200, 300, 400, 600)), results


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("tiny"), "--layers", 1, "--embd", 64, "--heads", 2, "--kv-heads", 2,
                      "--head-dim", 32, "--ff", 64, "--vocab", 320, "--type", "f16")


def test_only_files_are_replaced(tiny, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tiny)
    for name in ("pipe", "link", "."):
        result = quantize(tiny, tmp_path / name, "Q8_0")
        assert result.returncode != 0 and ("no regular file" in result.stderr or "same file" in result.stderr), (name, result)
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("content", [b"half download\n", b"\0" * 200 + b"text"], ids=["text", "zeros"])
def test_a_part_of_the_users_own_stays(tiny, tmp_path, content):
    part = tmp_path / "out.gguf.quantizing.part"
    part.write_bytes(content)
    result = quantize(tiny, tmp_path / "out.gguf", "Q8_0")
    assert result.returncode == 1 and f"{part} is there already" in result.stderr and result.stderr.count("\n") == 1
    assert part.read_bytes() == content and [p.name for p in tmp_path.iterdir()] == ["out.gguf.quantizing.part"]


def test_a_download_is_no_part(tiny, tmp_path):
    """Browsers name what they are still fetching so."""
    download = tmp_path / "out.gguf.part"
    download.write_bytes(b"GGUF\x03\0\0\0 half a model")
    assert quantize(tiny, tmp_path / "out.gguf", "Q8_0").returncode == 0
    assert download.read_bytes() == b"GGUF\x03\0\0\0 half a model"


def test_what_a_killed_run_leaves_is_taken_over(tiny, tmp_path):
    part = tmp_path / "out.gguf.quantizing.part"
    assert quantize(tiny, part, "Q8_0").returncode == 0  # whole, and killed before it was named
    for content in (part.read_bytes(), b"", b"\0" * 5000 + b"weights"):
        part.write_bytes(content)
        assert quantize(tiny, tmp_path / "out.gguf", "Q8_0").returncode == 0
        assert [p.name for p in tmp_path.iterdir()] == ["out.gguf"]


def test_help_and_list():
    assert quantize("--help").returncode == 0 and "Q4_K_M" in quantize("--list").stdout.split()
    assert quantize("--version").stdout.startswith("DeepTutor ")
    result = subprocess.run([sys.executable, str(HERE.parent / "convert.py"), "--help"],
                            capture_output=True, text=True, timeout=300)
    assert result.returncode == 0 and "--pytorch_model_path" in result.stdout
