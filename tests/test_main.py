"""./main as a user runs it: arguments, files, pipes, signals; what comes out on stdout, on stderr and as exit code.

DT_MAIN names the program and DT_TEST_MODEL the small real model; what needs the model is skipped, and counted as such,
when it isn't there. Prompts are short and one thread is used, so that the whole file takes about a minute on two busy
cores. Invariant of every check: 0 = done, 1 = the run failed, 2 = bad usage, and a failure is one sentence on stderr.
"""
import contextlib
import fcntl
import json
import os
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest

MAIN = os.environ.get("DT_MAIN", "")
MODEL = os.environ.get("DT_TEST_MODEL", "")

pytestmark = pytest.mark.skipif(not os.access(MAIN, os.X_OK), reason="DT_MAIN names no program")
needs_model = pytest.mark.skipif(not os.path.exists(MODEL), reason="DT_TEST_MODEL names no model")

STATS_FIELDS = {
    "model": str, "arch": str, "n_layers": int, "threads": int, "kernel": str, "device": str, "kv_type": str, "prompt_tokens": int,
    "prefill_ms": float, "prefill_tps": float, "generated_tokens": int, "decode_ms": float, "decode_tps": float,
    "load_ms": float, "reused_tokens": int, "kv_bytes": int, "kv_bytes_peak": int, "kv_bytes_full": int,
    "rss_bytes_peak": int, "eviction": dict, "draft": dict, "layers": list, "generated_token_ids": list,
}


def run(*args, stdin=None, env=None, timeout=120, cwd=None):
    """Runs the program; a bytes `stdin` is piped in."""
    return subprocess.run([MAIN, *args], cwd=cwd, input=stdin, stdin=subprocess.DEVNULL if stdin is None else None, capture_output=True,
                          timeout=timeout, env=dict(os.environ, **(env or {})))


def run_model(*args, **kwargs):
    return run("-m", MODEL, "-t", "1", *args, **kwargs)


def run_stats(tmp_path, *args, **kwargs):
    """Runs with the model and returns the result and the statistics; the folder holds nothing else afterwards."""
    folder = tmp_path / "stats"
    folder.mkdir(exist_ok=True)
    result = run_model("--stats-json", str(folder / "s.json"), *args, **kwargs)
    assert result.returncode == 0, result.stderr
    assert os.listdir(folder) == ["s.json"]
    return result, json.loads((folder / "s.json").read_bytes())


def assert_fails(result, code, *fragments):
    lines = result.stderr.decode("utf-8", "replace").splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert result.returncode == code, result.stderr
    assert result.stdout == b""
    assert len(errors) == 1 and lines[-1] == errors[0], lines
    for fragment in fragments:
        assert fragment in errors[0], errors[0]


# ---- usage ---------------------------------------------------------------------------------------


def test_help_and_version():
    result = run("--help")
    text = result.stdout.decode()
    assert result.returncode == 0 and result.stderr == b""
    for flag in ("--cache-eviction", "--eviction-config", "--stats-json", "--ctx-size", "--context-length", "one final newline",
                 "--device NAME", "-ngl"):
        assert flag in " ".join(text.split())
    for line in text.splitlines():
        assert len(line) <= 80 and line == line.rstrip(), line
    assert run("--version").stdout.startswith(b"DeepTutor ")


@pytest.mark.parametrize("args, fragment", [
    (["-n", "abc"], "-n needs a whole number"),
    (["-n", "1.5"], "-n needs a whole number"),
    (["-n", "-2"], "-n must be between"),
    (["-c", "-1"], "-c must be between"),
    (["-c", "99999999999"], "-c must be between"),
    (["-b", "-1"], "-b must be between"),
    (["--temp", "0,7"], "--temp needs a number"),
    (["--temp", "nan"], "--temp needs a number"),
    (["--kv-type", "q8"], "f16|int8"),
    (["--cache-evictoin"], "did you mean --cache-eviction"),
    (["--keep", "4"], "--keep: the first tokens stay"),
    (["-ctk", "q8_0"], "--kv-type"),
    (["-md", "d.gguf"], "--draft-model FILE"),
    (["--mirostat", "2"], "--temp, --top-k"),
    (["--prompt-cache=c.bin"], "--session FILE"),
    (["-hf", "x/y"], "nothing is fetched"),
    (["--nonsense-flag"], "no flag --nonsense-flag; --help lists all"),
    (["--prefill", "streaming"], "--prefill streaming needs --cache-eviction"),
    (["--stats-json", "-"], "needs a file"),
    (["--draft-max", "4"], "--draft-max needs"),
    (["--draft-max", "0", "--draft-lookup"], "between 1"),
    (["--draft-lookup", "--draft-model", "d.gguf"], "not both"),
    (["--session", ""], "--session needs the name"),
    (["--kv-memory", "2X"], "--kv-memory needs a size"),
    (["--kv-memory", "0"], "--kv-memory needs a size"),
    (["--kv-memory", "-1M"], "--kv-memory needs a size"),
    (["-n"], "-n needs a value"),
    (["text without flag"], "is no flag"),
    (["model.gguf"], "a model is given with -m"),
    (["-f", "a.txt"], "not both"),
    (["--max-cache-size", "256"], "--max-cache-size needs --cache-eviction"),
    (["--eviction-preset", "chat"], "--eviction-preset needs --cache-eviction"),
    (["--cache-eviction", "--eviction-preset", "chat", "--eviction-config", "a"], "not both"),
    (["--cache-eviction", "--max-cache-size", "0"], "between 1"),
    (["-sys", "be brief"], "add -cnv"),
    (["--grammar", "a", "--json-schema", "{}"], "give one of"),
])
def test_bad_usage(args, fragment):
    assert_fails(run("-m", "no-such.gguf", "-p", "x", *args), 2, fragment)


def test_missing_arguments():
    assert_fails(run(), 2, "--help")
    assert run().stderr.startswith(b"usage: main -m FILE")
    assert_fails(run("-m", "x"), 2, "nothing to go on from")
    assert_fails(run("-p", "x"), 2, "-m FILE")


# ---- models that can't be opened -----------------------------------------------------------------


def gguf_string(text):
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def gguf(pairs, tensors=()):
    """A GGUF file from (key, value) pairs: str, int (uint32) or float; tensors: (name, shape), F32 zeros."""
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs))
    for key, value in pairs:
        out += gguf_string(key)
        if isinstance(value, str):
            out += struct.pack("<I", 8) + gguf_string(value)
        elif isinstance(value, float):
            out += struct.pack("<If", 6, value)
        else:
            out += struct.pack("<II", 4, value)
    offset = 0
    for name, shape in tensors:
        out += gguf_string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape) + struct.pack("<IQ", 0, offset)
        n = 4
        for dim in shape:
            n *= dim
        offset += (n + 31) // 32 * 32
    return out + bytes(-len(out) % 32) + bytes(offset)


def model_without_tokenizer():
    width, ffn, vocab = 64, 96, 40
    pairs = [("general.architecture", "llama"), ("llama.context_length", 128), ("llama.embedding_length", width),
             ("llama.block_count", 1), ("llama.feed_forward_length", ffn), ("llama.attention.head_count", 1),
             ("llama.attention.head_count_kv", 1), ("llama.rope.dimension_count", width), ("llama.vocab_size", vocab),
             ("llama.attention.layer_norm_rms_epsilon", 1e-5), ("tokenizer.ggml.model", "none")]
    tensors = [("token_embd.weight", (width, vocab)), ("output_norm.weight", (width,)), ("blk.0.attn_norm.weight", (width,)),
               ("blk.0.ffn_norm.weight", (width,)), ("blk.0.ffn_gate.weight", (width, ffn)), ("blk.0.ffn_up.weight", (width, ffn)),
               ("blk.0.ffn_down.weight", (ffn, width))]
    tensors += [(f"blk.0.attn_{part}.weight", (width, width)) for part in ("q", "k", "v", "output")]
    return gguf(pairs, tensors)


def test_bad_models(tmp_path):
    stats = tmp_path / "s.json"
    arguments = ("-p", "x", "-n", "1", "--stats-json", str(stats))
    (tmp_path / "text.gguf").write_text("This is no model.\n" * 100)
    (tmp_path / "empty.gguf").write_bytes(b"")
    (tmp_path / "magic.gguf").write_bytes(b"GGUF")
    (tmp_path / "arch.gguf").write_bytes(gguf([("general.architecture", "nonesuch")]))
    (tmp_path / "bare.gguf").write_bytes(gguf([("general.architecture", "llama")]))
    (tmp_path / "no_tokenizer.gguf").write_bytes(model_without_tokenizer())
    for name, fragments in {
        "missing.gguf": ("missing.gguf",), "text.gguf": ("text.gguf",), "empty.gguf": ("empty.gguf",), 
        "magic.gguf": ("magic.gguf",),
        "arch.gguf": ("nonesuch", "llama"), "bare.gguf": ("bare.gguf",), "no_tokenizer.gguf": ("tokenizer",), ".": (),
    }.items():
        assert_fails(run("-m", str(tmp_path / name), *arguments), 1, *fragments)
        assert not stats.exists()


def test_families_of_llama_cpp_flags():
    """One sentence answers for all that begin alike; a misspelt flag is told as one."""
    for flag, word in (("--dry-base", "--min-p"), ("--xtc-threshold", "--min-p"), ("--spec-ngram-size-n", "--draft-lookup"),
                       ("--spec-draft-model", "--draft-model FILE names"), ("--rope-freq-base", "file says"), ("--cpu-strict", "taskset")):
        assert_fails(run(flag, "1"), 2, f"there is no flag {flag}: ", word)
    for flag in ("--dry", "--specs", "--rope", "-spec-type", "--xtcs"):
        assert_fails(run(flag, "1"), 2, f"there is no flag {flag}; --help lists all")


def test_page_on_llama_cpp_flags():
    """What docs/troubleshooting.md says of them is what the program does."""
    page = open(os.path.join(os.path.dirname(__file__), "..", "docs", "troubleshooting.md")).read()
    rows = [row.strip("| ").split(" | ") for row in page.split("A flag of llama.cpp's")[1].split("\n\n")[0].splitlines()[3:]]
    assert len(rows) >= 10
    for there, here in rows:
        for flag in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", there):
            error = run(flag, "1").stderr.decode()
            if here.startswith("refused") or re.match("`-|`sink", here):
                assert f"there is no flag {flag}: " in error, error
                hints = re.findall(r"--?[a-z-]+|sink_tokens", here)
                assert here.startswith("refused") or any(hint in error for hint in hints), error
            else:
                assert "there is no flag" not in error, error


@needs_model
def test_llama_cpp_flags_that_change_nothing():
    """Told, unless the log is off, and the text is the same; a value belongs to its flag, the next flag doesn't."""
    plain = run_model("-p", "The capital of France is", "-n", "4", "--temp", "0")
    for flags in (("-fa", "on"), ("-fa",), ("--flash_attn=off",), ("-ub", "64"), ("--mmap", "--mlock", "--no-warmup", "--jinja")):
        same = run_model(*flags, "-p", "The capital of France is", "-n", "4", "--temp", "0")
        assert same.returncode == 0 and same.stdout == plain.stdout, same.stderr
        assert same.stderr.count(b" is not needed: ") == len([flag for flag in flags if flag[0] == "-"])
        quiet = run_model(*flags, "-p", "x", "-n", "1", "--log-level", "warn")
        assert quiet.returncode == 0 and quiet.stderr == b""
    assert b"-ngl changes nothing without --device" in run_model("-ngl", "99", "-p", "x", "-n", "1").stderr


@needs_model
def test_lines_fit_a_terminal(tmp_path):
    config = tmp_path / "e.json"
    config.write_text('{"0-9": {"policy": "importance_score", "max_cache_size": 40960, "min_cache_size": 10240, "score": "reconstruct"}, '
                      '"10-": {"policy": "local_window", "max_cache_size": 16}}')
    for flags in (("--cache-eviction", "--eviction-config", "e.json"), ("--cache-eviction", "--max-cache-size", "64"),
                  ("--kv-memory", "6M", "--session", "s.bin"), ("-ngl", "9")):
        log = run_model("-p", "word " * 200, "-n", "4", *flags, cwd=tmp_path).stderr.decode()
        assert "KV memory" in log, log
        command = f"TLC: ./deeptutor-eval calibrate -m {MODEL}"
        assert (command in log.splitlines()) == ("preset" in log), log
        for line in log.splitlines():  # but for the line of fixed fields, and a command with a path
            fields = re.fullmatch(r"TLC: layers \S+ +\w+  max \d+  min \d+  sinks 4  recent \d+  slots \d+", line)
            assert len(line) <= 80 or fields or line == command, line


@needs_model
def test_calibration_beside_what_a_link_leads_to(tmp_path):
    """Where none lies beside the link."""
    (tmp_path / "real").mkdir()
    shutil.copy(MODEL, tmp_path / "real/m.gguf")
    (tmp_path / "link.gguf").symlink_to("real/m.gguf")
    for name in (None, "real/m.tlc.json", "link.tlc.json"):  # what is no calibration is named in a warning
        if name:
            (tmp_path / name).write_text("[]")
        log = run("-m", "link.gguf", "-p", "x", "-n", "1", "--cache-eviction", cwd=tmp_path).stderr.decode()
        assert ("not calibrated" in log) == (name is None) and (name is None or name in log), log


@needs_model
def test_truncated_model(tmp_path):
    size = os.path.getsize(MODEL)
    with open(MODEL, "rb") as source:
        data = source.read()
    for keep in (40, 5000, 1000000, size // 2, size - 1):
        path = tmp_path / "cut.gguf"
        path.write_bytes(data[:keep])
        assert_fails(run("-m", str(path), "-p", "x", "-n", "1"), 1, "cut.gguf")


# ---- files of the run ----------------------------------------------------------------------------


def test_stats_file_is_checked_before_the_model(tmp_path):
    missing = str(tmp_path / "no such folder" / "s.json")
    assert_fails(run("-m", "no-such.gguf", "-p", "x", "--stats-json", missing), 2, missing, "can't be written")
    assert_fails(run("-m", "no-such.gguf", "-p", "x", "--stats-json", str(tmp_path)), 2, "can't be written")
    old = tmp_path / "old.json"
    old.write_text("old")
    assert_fails(run("-m", "no-such.gguf", "-p", "x", "--stats-json", str(old)), 1, "no-such.gguf")
    assert old.read_text() == "old" and os.listdir(tmp_path) == ["old.json"]


def test_unreadable_files(tmp_path):
    missing = str(tmp_path / "missing.txt")
    assert_fails(run("-m", "no-such.gguf", "-f", missing), 2, missing, "can't be read")
    assert_fails(run("-m", "no-such.gguf", "-f", str(tmp_path)), 2, "can't be read")
    assert_fails(run("-m", "no-such.gguf", "-p", "x", "--grammar-file", missing), 2, missing, "can't be read")


@needs_model
def test_stats(tmp_path):
    for locale in ("C", "de_DE.UTF-8"):
        result, stats = run_stats(tmp_path, "-p", "The capital of France is", "-n", "8", "--temp", "0.7", "--seed", "1",
                                  env={"LC_ALL": locale})
        assert set(STATS_FIELDS) <= set(stats)
        for name, kind in STATS_FIELDS.items():
            assert isinstance(stats[name], kind), name
        assert stats["model"] == MODEL and stats["arch"] == "llama" and stats["n_layers"] == 30 and stats["device"] == "cpu"
        assert stats["threads"] == 1 and stats["prompt_tokens"] == 5 and stats["reused_tokens"] == 0
        assert stats["generated_tokens"] == len(stats["generated_token_ids"]) <= 8
        assert stats["prefill_ms"] > 0 and stats["prefill_tps"] > 0 and stats["load_ms"] > 0
        assert 0 < stats["kv_bytes"] <= stats["kv_bytes_peak"] and stats["rss_bytes_peak"] > 10 << 20
        assert stats["eviction"] == {"enabled": False, "rounds": 0, "evicted_tokens": 0, "ms": stats["eviction"]["ms"],
                                     "total_cache_size": 0}
        assert [layer["layer"] for layer in stats["layers"]] == list(range(30))
        for layer in stats["layers"]:
            assert set(layer) == {"layer", "policy", "max_cache_size", "length", "mean_length", "slots_used", "evicted_tokens"}
            assert layer["evicted_tokens"] == 0
            assert layer["policy"] == "none" and layer["length"] == layer["mean_length"] >= 5
        assert result.stdout.endswith(b"\n")
        assert "TLC: off" in result.stderr.decode()
        raw = (tmp_path / "stats" / "s.json").read_text()
        assert re.search(r'"prefill_ms": \d+\.\d{1,3},', raw) and not re.search(r"\d\.\d{4}", raw)  # no digits of noise
    again = run_model("-p", "x", "-n", "1", "--stats-json", "/dev/null")
    assert again.returncode == 0 and os.path.exists("/dev/null") and not os.path.isfile("/dev/null")


@needs_model
def test_odd_paths(tmp_path):
    for name in (b"with a space", "Модель 模型 ü".encode(), b"not utf-8 \xff\xfe"):
        folder = os.path.join(os.fsencode(tmp_path), name)
        os.mkdir(folder)
        model, prompt, stats, config = (os.path.join(folder, name + end) for end in (b".gguf", b".txt", b".json", b".config.json"))
        os.symlink(os.path.abspath(MODEL), model)
        with open(prompt, "wb") as file:
            file.write(b"The capital of France is\n")
        with open(config, "wb") as file:
            file.write(b'{"0-": {"policy": "local_window", "max_cache_size": 256}}')
        result = run("-m", model, "-t", "1", "-f", prompt, "-n", "2", "--temp", "0", "--stats-json", stats, "--cache-eviction",
                     "--eviction-config", config)
        assert result.returncode == 0, result.stderr
        assert result.stdout == b" Paris.\n"
        with open(stats, "rb") as file:
            assert json.load(file)["prompt_tokens"] == 5
        assert sorted(os.listdir(folder)) == sorted(os.path.basename(p) for p in (model, prompt, stats, config))


# ---- prompts -------------------------------------------------------------------------------------


@needs_model
def test_prompt_file_bytes(tmp_path):
    def tokens(data):
        (tmp_path / "p.txt").write_bytes(data)
        return run_stats(tmp_path, "-f", str(tmp_path / "p.txt"), "-n", "0")[1]["prompt_tokens"]

    plain = tokens(b"one two")
    assert tokens(b"one two\n") == plain  # one final newline goes
    assert tokens(b"one two\n\n") == plain + 1  # and only one
    assert tokens(b"one two\r\n") == plain + 1  # the carriage return stays
    assert tokens(b"one\r\ntwo") > tokens(b"one\ntwo")
    assert tokens(b"\xef\xbb\xbfone two") > plain
    assert tokens(b"one\0two") > 2
    assert tokens("Grüße".encode("latin-1")) > 2
    assert tokens(b"\xff" * 50) > 0


@needs_model
def test_prompt_from_stdin_and_escapes(tmp_path):
    expected = run_stats(tmp_path, "-p", "one\\ntwo \\x41", "-n", "4", "--temp", "0")[1]
    piped = run_stats(tmp_path, "-f", "-", "-n", "4", "--temp", "0", stdin=b"one\ntwo A\n")[1]
    raw = run_stats(tmp_path, "--no-escape", "-p", "one\\ntwo \\x41", "-n", "0")[1]
    assert expected["generated_token_ids"] == piped["generated_token_ids"]
    assert expected["prompt_tokens"] == piped["prompt_tokens"] < raw["prompt_tokens"]


@needs_model
def test_special_tokens_of_a_prompt(tmp_path):
    plain = run_stats(tmp_path, "-p", "hi", "-n", "0")[1]["prompt_tokens"]
    assert run_stats(tmp_path, "-p", "<|im_start|>hi", "-n", "0")[1]["prompt_tokens"] == plain + 1


@needs_model
def test_display_prompt():
    shown = run_model("-p", "The capital of France is", "-n", "2", "--temp", "0", "--display-prompt")
    assert shown.stdout == b"The capital of France is Paris.\n"
    hidden = run_model("-p", "The capital of France is", "-n", "2", "--temp", "0", "--display-prompt", "--no-display-prompt")
    assert hidden.stdout == b" Paris.\n"


@needs_model
def test_empty_prompt(tmp_path):
    (tmp_path / "empty.txt").write_bytes(b"\n")
    assert_fails(run_model("-p", ""), 2, "empty")
    assert_fails(run_model("-f", str(tmp_path / "empty.txt")), 2, "empty")


@needs_model
def test_prompt_longer_than_the_context(tmp_path):
    text = "The quick brown fox jumps over the lazy dog. " * 8
    n = run_stats(tmp_path, "-p", text, "-n", "0")[1]["prompt_tokens"]
    assert run_model("-p", text, "-n", "0", "-c", str(n)).returncode == 0
    for context in (n - 1, n // 2, 2, 1):
        assert_fails(run_model("-p", text, "-n", "1", "-c", str(context)), 1, str(n), str(context))
    full, stats = run_stats(tmp_path, "-p", text, "-n", "-1", "-c", str(n + 5), "--ignore-eos", "--temp", "0")
    assert n + 5 <= n + stats["generated_tokens"] <= n + 6
    assert b"longest length" in full.stderr


# ---- numbers at the edges ------------------------------------------------------------------------


@needs_model
def test_edges(tmp_path):
    base = ("-p", "one two three four five six seven eight nine ten", "--temp", "0")
    expected = run_stats(tmp_path, *base, "-n", "6")[1]["generated_token_ids"]
    assert len(expected) == 6
    for extra in (["-b", "0"], ["-b", "1"], ["-b", "2"], ["-b", "100000"], ["-c", "0"], ["-t", "0"], ["-t", "-1"],
                  ["-tb", "1"], ["--kernel", "reference"]):
        assert run_stats(tmp_path, *base, "-n", "6", *extra)[1]["generated_token_ids"] == expected, extra
    stats = run_stats(tmp_path, *base, "-n", "1", "-t", "512")[1]
    assert 1 <= stats["threads"] <= max(os.cpu_count(), 1)
    result, stats = run_stats(tmp_path, *base, "-n", "0")
    assert result.stdout == b"" and stats["generated_tokens"] == 0 and stats["prefill_ms"] > 0
    assert run_stats(tmp_path, *base, "-n", "1")[1]["generated_token_ids"] == expected[:1]


# ---- sampling ------------------------------------------------------------------------------------


@needs_model
def test_seeds(tmp_path):
    base = ("-p", "Once upon a time", "-n", "12", "--temp", "1.5", "--top-k", "0")
    first, stats = run_stats(tmp_path, *base)
    seed = re.search(r"seed: (\d+)", first.stderr.decode()).group(1)
    assert run_stats(tmp_path, *base, "--seed", seed)[1]["generated_token_ids"] == stats["generated_token_ids"]
    assert run_stats(tmp_path, *base, "-s", str(int(seed) ^ 1))[1]["generated_token_ids"] != stats["generated_token_ids"]
    assert run_stats(tmp_path, *base)[1]["generated_token_ids"] != stats["generated_token_ids"]


@needs_model
def test_repeat_penalty(tmp_path):
    base = ("-p", "one one one one one one", "-n", "8", "--temp", "0")
    plain = run_stats(tmp_path, *base)[1]["generated_token_ids"]
    assert run_stats(tmp_path, *base, "--repeat-penalty", "5")[1]["generated_token_ids"] != plain


@needs_model
def test_grammar(tmp_path):
    grammar = 'root ::= ("yes" | "no") "!" [0-9]'
    (tmp_path / "g.gbnf").write_text(grammar)
    for how in (["--grammar", grammar], ["--grammar-file", str(tmp_path / "g.gbnf")]):
        result = run_model("-p", "Is the sky blue?", "-n", "20", "--seed", "3", *how)
        assert result.returncode == 0 and re.fullmatch(rb"(yes|no)![0-9]\n", result.stdout), result.stderr
    assert_fails(run_model("-p", "x", "--grammar", "root ::= ("), 2, "grammar")
    refused = run_model("-p", "x", "--grammar", 'other ::= "x"')
    assert_fails(refused, 2, "root")
    assert b"warning" not in refused.stderr  # the reason is told once


@needs_model
def test_grammar_without_a_way_out(tmp_path):
    """A run that fails late tells its numbers all the same."""
    stats = tmp_path / "s.json"
    result = run_model("-p", "x", "-n", "5", "--grammar", 'root ::= "a"', "--ignore-eos", "--stats-json", str(stats))
    assert result.returncode == 1 and result.stdout == b"a\n"
    assert re.search(rb"decode .*\nKV cache .*\nerror: .*grammar allows no token", result.stderr), result.stderr
    assert json.loads(stats.read_bytes())["generated_tokens"] == 1


@needs_model
def test_json_schema():
    schema = {"type": "object", "required": ["city", "people"],
              "properties": {"city": {"type": "string", "maxLength": 12},
                             "people": {"type": "integer", "minimum": 0, "maximum": 99}}}
    for temp in ("0", "1"):
        result = run_model("-p", "A city as JSON: ", "-n", "80", "--seed", "5", "--temp", temp, "--json-schema", json.dumps(schema))
        value = json.loads(result.stdout)
        assert set(value) == {"city", "people"} and isinstance(value["people"], int)
    assert_fails(run_model("-p", "x", "--json-schema", "{"), 2, "JSON schema")
    assert_fails(run_model("-p", "x", "--json-schema", '{"type": "nonsense"}'), 2, "JSON schema")
    digits = run_model("-p", "Three digits: ", "-n", "8", "--temp", "0", "--json-schema", '{"type": "string", "pattern": "^[0-9]{3}$"}')
    assert re.fullmatch(r'"[0-9]{3}"', digits.stdout.decode().strip()), digits
    for pattern in ("[0-9]{3}", "^(?=a)a$"):  # which the grammar could not say
        assert_fails(run_model("-p", "x", "--json-schema", json.dumps({"type": "string", "pattern": pattern})), 2, "is not supported")


@needs_model
def test_schemas_and_templates_without_end():
    """What calls itself for ever is refused in a sentence; it comes from strangers' files and requests."""
    for schema in ('{"allOf":[{"$ref":"#/allOf/0"}]}', '{"$ref":"#"}'):
        result = run_model("-p", "x", "-n", "2", "--json-schema", schema)
        assert result.returncode in (0, 2), result
    for template in ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{% for i in range(1000000000) %}x{% endfor %}",
                     '{{ "x" * 1000000000 }}'):
        result = run_model("-cnv", "-p", "hi", "-n", "2", "--chat-template", template, timeout=60)
        assert_fails(result, 2)


@needs_model
def test_stats_never_replace_what_the_run_uses(tmp_path):
    prompt = tmp_path / "p.txt"
    prompt.write_text("Once upon a time")
    (tmp_path / "link").symlink_to(prompt)
    for target in (prompt, tmp_path / "link"):
        assert_fails(run_model("-f", str(prompt), "-n", "1", "--stats-json", str(target)), 2, "another file")
    assert prompt.read_text() == "Once upon a time"
    model = tmp_path / "m.gguf"
    os.link(MODEL, model) if os.stat(MODEL).st_dev == os.stat(tmp_path).st_dev else model.write_bytes(open(MODEL, "rb").read())
    assert_fails(run("-m", str(model), "-p", "x", "-n", "1", "--stats-json", str(model)), 2, "another file")
    assert model.stat().st_size == os.stat(MODEL).st_size
    with open(tmp_path / "o.txt", "wb") as out:
        done = subprocess.run([MAIN, "-m", MODEL, "-t", "1", "-p", "x", "-n", "1", "--stats-json", "/dev/stdout"], stdout=out,
                              stderr=subprocess.PIPE, timeout=120)
    assert done.returncode == 2


@needs_model
def test_stats_into_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE)
    assert run_model("-p", "x", "-n", "1", "--stats-json", str(pipe)).returncode == 0
    assert json.loads(reader.communicate(timeout=60)[0])["generated_tokens"] == 1


# ---- eviction ------------------------------------------------------------------------------------

STORY = "Long ago a king had three sons. The eldest was strong, the second was clever and the youngest was kind. " * 12


@needs_model
def test_eviction_on_and_off(tmp_path):
    base = ("-p", STORY, "-n", "12", "--temp", "0")
    plain = run_stats(tmp_path, *base, "--no-cache-eviction")[1]
    log, roomy = run_stats(tmp_path, *base, "--cache-eviction", "--max-cache-size", "2048")
    lines = log.stderr.decode()
    assert roomy["generated_token_ids"] == plain["generated_token_ids"]
    assert roomy["eviction"]["enabled"] and roomy["eviction"]["evicted_tokens"] == 0
    assert "budget not reached: nothing was evicted" in lines
    assert "TLC: on, preset chat, 30 layers, KV f16, prefill full" in lines
    assert re.search(r"TLC: layers 0-14 +local_window +max 2048", lines)
    for prefill in ("full", "streaming"):
        log, tight = run_stats(tmp_path, *base, "--cache-eviction", "--eviction-preset", "summary", "--max-cache-size", "96",
                               "--min-cache-size", "64", "--prefill", prefill, "-b", "64", "--kv-type", "int8")
        lines = log.stderr.decode()
        assert f"preset summary, 30 layers, KV int8, prefill {prefill}" in lines and "not reached" not in lines
        assert re.search(r"eviction .*\d layer rounds? ", lines)
        assert tight["eviction"]["rounds"] > 0 and tight["eviction"]["evicted_tokens"] > 0 and tight["eviction"]["ms"] >= 0
        assert all(layer["length"] <= 96 + 1 and layer["max_cache_size"] == 96 for layer in tight["layers"])
        assert tight["kv_bytes"] < plain["kv_bytes"]
    assert tight["kv_bytes_peak"] < plain["kv_bytes_peak"]  # streaming never held the whole prompt


@needs_model
def test_small_budgets_end(tmp_path):
    """max just above sinks + recent, min next to it: every round frees something and the run ends."""
    for smallest in (130, 135):
        config = tmp_path / "e.json"
        config.write_text(json.dumps({"0-": {"policy": "local_window", "max_cache_size": 136, "min_cache_size": smallest,
                                             "sink_tokens": 4, "recent_window": 128}}))
        stats = run_stats(tmp_path, "-p", STORY[:600], "-n", "60", "--ignore-eos", "--temp", "0", "--cache-eviction",
                          "--eviction-config", str(config))[1]
        assert stats["generated_tokens"] == 60 and stats["eviction"]["rounds"] > 0
        assert all(layer["length"] <= 137 for layer in stats["layers"])


@needs_model
@pytest.mark.parametrize("text, fragments", [
    ('{"0-": {"policy": "local_window", "max_cache_size": 132, "sink_tokens": 4, "recent_window": 128}}', ["132"]),
    ('{"0-": {"policy": "nonsense", "max_cache_size": 512}}', ["nonsense", "local_window"]),
    ('{"0-": ', ["e.json"]),
    ('{"0-": {"policy": "local_window", "max_cache_size": 0}}', ["max_cache_size"]),
])
def test_bad_eviction_configs(tmp_path, text, fragments):
    (tmp_path / "e.json").write_text(text)
    assert_fails(run_model("-p", "x", "--cache-eviction", "--eviction-config", str(tmp_path / "e.json")), 2, *fragments)


@needs_model
def test_bad_eviction_flags(tmp_path):
    assert_fails(run_model("-p", "x", "--cache-eviction", "--eviction-preset", "nonsense"), 2, "nonsense", "docqa")
    assert_fails(run_model("-p", "x", "--cache-eviction", "--eviction-config", str(tmp_path / "missing.json")), 2, "missing.json")
    assert_fails(run_model("-p", "x", "--cache-eviction", "--max-cache-size", "1"), 2)
    assert_fails(run_model("-p", "x", "--cache-eviction", "--memory-slots", "2000"), 2, "memory_slots", "1024")
    assert_fails(run_model("-p", "x", "--memory-slots", "8"), 2, "--cache-eviction")
    assert_fails(run_model("-p", "x", "--cache-eviction", "--max-cache-size", "64", "--min-cache-size", "65"), 2, "65")


@needs_model
def test_memory_slots(tmp_path):
    result, stats = run_stats(tmp_path, "-p", STORY[:2000], "-n", "40", "--ignore-eos", "--temp", "0", "--cache-eviction",
                              "--max-cache-size", "200", "--memory-slots", "8")
    assert "slots 8" in result.stderr.decode()
    assert all(layer["slots_used"] == 8 and layer["length"] <= 200 for layer in stats["layers"])


# ---- log -----------------------------------------------------------------------------------------


@needs_model
def test_log_levels():
    quiet = run_model("-p", "The capital of France is", "-n", "2", "--temp", "0", "--log-level", "error")
    assert quiet.stdout == b" Paris.\n" and quiet.stderr == b""
    usual = run_model("-p", "The capital of France is", "-n", "2", "--temp", "0").stderr.decode()
    for word in ("TLC: off", "load ", "prefill ", "decode ", "KV cache "):
        assert word in usual
    assert "\r" not in usual  # the bar is for terminals
    assert len(run_model("-p", "x", "-n", "1", "--log-level", "debug").stderr) > len(usual)


# ---- chat ----------------------------------------------------------------------------------------

CHAT = ("-cnv", "--temp", "0", "-n", "12")


@needs_model
def test_chat_reads_to_the_end_of_input(tmp_path):
    nothing = run_model(*CHAT)
    assert nothing.returncode == 0 and nothing.stdout == b""
    with_newline, stats = run_stats(tmp_path, *CHAT, stdin=b"hi\n")
    without, _ = run_stats(tmp_path, *CHAT, stdin=b"hi")
    dos, _ = run_stats(tmp_path, *CHAT, stdin=b"hi\r\n\r\n\n")
    first, _ = run_stats(tmp_path, *CHAT, "-p", "hi")
    assert with_newline.stdout == without.stdout == dos.stdout == first.stdout != b""
    assert b"> " not in with_newline.stdout + with_newline.stderr and stats["generated_tokens"] > 0
    ended, _ = run_stats(tmp_path, *CHAT, stdin=b"hi\n/exit\nhi again\n")
    assert ended.stdout == with_newline.stdout


@needs_model
def test_chat_lines():
    plain = run_model(*CHAT, stdin=b"hi\n").stdout
    result = run_model(*CHAT, stdin=b"  \n/help\nhi\n\t\n  /exit  \nhi again\n")
    assert result.returncode == 0 and result.stdout == plain
    assert b"no command /help; the only one is /exit" in result.stderr
    assert run_model(*CHAT, stdin=b"/etc/passwd\n").stdout != b""  # a message, as is all that is no word after a slash
    assert run_model(*CHAT, stdin=b"one\\\ntwo\n").stdout == run_model(*CHAT, "-p", "one\\ntwo").stdout
    assert run_model(*CHAT, stdin=b"one\\").stdout == run_model(*CHAT, "-p", "one\\n").stdout


@needs_model
def test_chat_fills_the_context(tmp_path):
    """Whether a reply or a message fills it: the chat ends, with its numbers and a warning."""
    result, stats = run_stats(tmp_path, "-cnv", "--temp", "0", "--ignore-eos", "-n", "-1", "-c", "48", stdin=b"hi\nmore\n")
    assert re.search(rb"warning: .*-c sets it\nload ", result.stderr), result.stderr
    assert result.stdout.endswith(b"\n") and stats["generated_tokens"] > 0
    result, stats = run_stats(tmp_path, *CHAT, "-c", "60", stdin=b"hi\n" + b"word " * 100 + b"\nmore\n")
    assert re.search(rb"warning: .*outgrown.*60.*-c sets a larger one\nload ", result.stderr), result.stderr
    assert 0 < stats["generated_tokens"] <= 12
    assert_fails(run_model(*CHAT, "-c", "60", stdin=b"word " * 100 + b"\n"), 1, "60")  # nothing to keep


@needs_model
def test_chat_computes_only_what_is_new(tmp_path):
    messages = [b"My name is Bob.", b"What is  my name?  ", "Grüße \U0001F600".encode(), b"Thanks."]
    previous = 0
    new = []
    for turns in range(1, 5):
        log, stats = run_stats(tmp_path, *CHAT, stdin=b"\n".join(messages[:turns]))
        prefilled = stats["prompt_tokens"] - stats["reused_tokens"]
        new.append(prefilled - previous)
        previous = prefilled
        assert b"rewrote" not in log.stderr
    assert all(count < 40 for count in new[1:]), new  # a turn's own tokens and the template's marks
    assert new[1] < new[0]  # without the system prompt


@needs_model
def test_chat_continues_as_the_whole_would():
    """The second reply is that to the whole conversation written out by hand (by the kernel that rounds alike for any batch)."""
    chat = (*CHAT, "-sys", "Be brief.", "--kernel", "reference")
    first = run_model(*chat, stdin=b"What is two plus two?\n").stdout
    both = run_model(*chat, stdin=b"What is two plus two?\nAnd three plus three?\n").stdout
    assert both.startswith(first)
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in
                   [("system", "Be brief."), ("user", "What is two plus two?"), ("assistant", first[:-1].decode()),
                    ("user", "And three plus three?")])
    whole = run_model("--no-escape", "-p", text + "<|im_start|>assistant\n", "-n", "12", "--temp", "0", "--kernel", "reference")
    assert first + whole.stdout == both


@needs_model
def test_chat_with_a_template_that_trims_and_one_that_rewrites(tmp_path):
    turn = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ CONTENT }}<|im_end|>\n{% endfor %}" \
           "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    stdin = b"Tell me a story.\nGo on.\n"
    log, stats = run_stats(tmp_path, *CHAT, "--chat-template", turn.replace("CONTENT", "m.content | trim"), stdin=stdin)
    assert b"rewrote" not in log.stderr
    log, rewritten = run_stats(tmp_path, *CHAT, "--chat-template", turn.replace("CONTENT", "m.content | upper"), stdin=stdin)
    assert re.search(rb"rewrote the conversation from token \d+ on", log.stderr)
    log, builtin = run_stats(tmp_path, *CHAT, "--chat-template", "chatml", stdin=stdin)
    assert builtin["prompt_tokens"] > 0


@needs_model
def test_chat_errors():
    for template, fragment in (("nonsense", "chatml"), ("{{ raise_exception('only on Sundays') }}", "only on Sundays")):
        assert_fails(run_model(*CHAT, "--chat-template", template), 2, fragment)  # before any message
    assert_fails(run_model(*CHAT, stdin=b"a\0b\n"), 1, "NUL")


@needs_model
def test_chat_grammar_holds_for_each_reply():
    result = run_model(*CHAT, "--grammar", 'root ::= "yes" | "no"', stdin=b"Is it day?\nIs it night?\n")
    assert result.returncode == 0 and re.fullmatch(rb"(yes|no)\n(yes|no)\n", result.stdout), result.stderr


@needs_model
def test_chat_keeps_the_system_prompt(tmp_path):
    """Many turns over a small budget: the conversation goes on, and no layer grows."""
    config = tmp_path / "e.json"
    config.write_text(json.dumps({"0-": {"policy": "importance_score", "max_cache_size": 160, "sink_tokens": 60,
                                         "recent_window": 64}}))
    system = "You are a pirate. " * 10
    stats = run_stats(tmp_path, "-cnv", "--temp", "0", "-n", "8", "-sys", system, "--cache-eviction", "--eviction-config",
                      str(config), stdin=b"Where is the gold?\n" * 12)[1]
    assert stats["eviction"]["rounds"] > 0
    assert all(layer["length"] <= 160 + 1 for layer in stats["layers"])
    assert stats["prompt_tokens"] - stats["reused_tokens"] < 600


# ---- pipes and signals ---------------------------------------------------------------------------


def start(*args, **kwargs):
    return subprocess.Popen([MAIN, "-m", MODEL, "-t", "1", *args], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, **kwargs)


def wait_until_it_reads(process, seconds=0.3):
    """And for so long. Returns what the log says by then: the last line before the prompt is read is that of the cache's memory."""
    log = b""
    while b"KV memory" not in log:
        line = process.stderr.readline()
        assert line, log
        log += line
    time.sleep(seconds)
    return log


@needs_model
def test_reader_that_leaves():
    process = start("-p", "1, 2, 3, 4,\n", "--no-escape", "-n", "-1", "--ignore-eos", "--temp", "0")
    assert process.stdout.read(5)
    process.stdout.close()
    log = process.stderr.read()
    assert process.wait(60) == 0 and b"decode " in log and b"error" not in log


@needs_model
def test_closed_stdout(tmp_path):
    command = 'exec "$0" -m "$1" -t 1 -p hello -n 50 --ignore-eos --stats-json "$2" >&-'
    result = subprocess.run(["sh", "-c", command, MAIN, MODEL, str(tmp_path / "s.json")], capture_output=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "s.json").read_bytes())["generated_tokens"] < 50
    full = subprocess.run(["sh", "-c", 'exec "$0" -m "$1" -t 1 -p hello -n 50 --ignore-eos > /dev/full', MAIN, MODEL],
                          capture_output=True, timeout=60)
    assert full.returncode == 1 and b"can't be written to stdout" in full.stderr


@needs_model
def test_interrupt_while_writing(tmp_path):
    stats = tmp_path / "s.json"
    process = start("-p", "Count: 1, 2, 3,", "-n", "-1", "--ignore-eos", "--temp", "0", "--stats-json", str(stats))
    assert process.stdout.read(5)
    process.send_signal(signal.SIGINT)
    _, log = process.communicate(timeout=60)
    assert process.returncode == 0 and b"decode " in log
    assert json.loads(stats.read_bytes())["generated_tokens"] > 0


@needs_model
def test_interrupt_while_reading(tmp_path):
    stats = tmp_path / "s.json"
    process = start("-p", "word " * 6000, "-n", "5", "-b", "32", "--kernel", "reference", "--stats-json", str(stats))
    begin = wait_until_it_reads(process)
    process.send_signal(signal.SIGINT)
    out, log = process.communicate(timeout=60)
    assert process.returncode == 0 and out == b"" and re.search(rb"\ninterrupted\nload .*\nprefill ", begin + log), log
    numbers = json.loads(stats.read_bytes())
    assert numbers["prompt_tokens"] < 6000 and numbers["prompt_tokens"] % 32 == 0 and numbers["generated_tokens"] == 0


@needs_model
def test_interrupt_while_the_reader_waits():
    """A signal in the middle of a write loses no text and is no error."""
    text = "word " * 20000  # more than a pipe holds
    process = start("-p", text, "-n", "5", "-c", "32768", "--display-prompt")
    held, before = struct.pack("i", 0), None
    while held != before or held == struct.pack("i", 0):
        before = held
        time.sleep(0.3)
        held = fcntl.ioctl(process.stdout, termios.FIONREAD, held)
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    out, log = process.communicate(timeout=60)
    assert process.returncode == 0 and b"interrupted" in log and b"error" not in log and out == text.encode() + b"\n"


@needs_model
def test_second_interrupt_quits_at_once():
    for _ in range(8):  # one that the first ended before the second came has shown nothing
        process = start("-p", "word " * 3000, "-n", "5", "-b", "4096", "--kernel", "reference")
        wait_until_it_reads(process)
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        if process.returncode != 0:
            break
    assert process.returncode == 130


class Terminal:
    """The program on a terminal of its own: stdin and stderr, and stdout unless it is a pipe."""

    def __init__(self, *args, columns=80, pipe_stdout=True):
        self.ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.seen = b""
        self.process = subprocess.Popen(
            [MAIN, "-t", "1", *args], stdin=theirs, stdout=subprocess.PIPE if pipe_stdout else theirs, stderr=theirs,
            start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
        os.close(theirs)

    def read(self):
        try:
            piece = os.read(self.ours, 4096)
        except OSError:  # the program ended
            piece = b""
        self.seen += piece
        return piece

    def wait_for(self, text, count=1, seconds=60):
        end = time.monotonic() + seconds
        while self.seen.count(text) < count:
            assert time.monotonic() < end, self.seen
            if select.select([self.ours], [], [], 0.1)[0]:
                assert self.read(), self.seen

    def type(self, text):
        os.write(self.ours, text)

    def finish(self, seconds=60):
        """Exit code; what is left on the terminal goes to `seen`, what was piped to `out`."""
        self.out = b""
        try:
            while self.read():
                pass
            if self.process.stdout:
                self.out = self.process.stdout.read()
            return self.process.wait(seconds)
        finally:
            self.close()

    def close(self):
        with contextlib.suppress(OSError):
            os.close(self.ours)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


SLOW_READING = ("-p", "word " * 120, "-n", "1", "-b", "8", "--kernel", "reference")
ONE_LONG_STEP = ("-p", "word " * 600, "-n", "0", "-b", "4096", "--kernel", "reference")


@needs_model
def test_progress_bar_on_a_terminal():
    for columns in (30, 80, 200):
        terminal = Terminal("-m", MODEL, *SLOW_READING, columns=columns)
        assert terminal.finish() == 0
        bars = re.findall(rb"\r(reading[^\r\n\033]*)", terminal.seen)
        assert bars and all(len(bar) < columns for bar in bars), terminal.seen
        if columns > 60:
            assert re.fullmatch(rb"reading +\d+ %  \d+ tokens  [0-9.]+ tokens/s  KV [0-9.]+ MiB", bars[-1]), bars
        assert not any(b" 0.0 tokens/s" in bar for bar in bars)
        assert re.search(rb"\r\033\[Kload ", terminal.seen), terminal.seen
    terminal = Terminal("-m", MODEL, *SLOW_READING, "--no-progress")
    assert terminal.finish() == 0 and b"reading" not in terminal.seen


@needs_model
def test_progress_bar_while_nothing_is_finished():
    """One long step: the share alone, for there is no rate yet."""
    terminal = Terminal("-m", MODEL, *ONE_LONG_STEP)
    terminal.wait_for(b"reading   0 %\033[K")
    terminal.type(b"\x03")
    assert terminal.finish() == 0
    assert b"tokens/s  KV" not in terminal.seen
    last = terminal.seen.rsplit(b"reading", 1)[1]
    assert re.search(rb"\r\033\[Kinterrupted\r\n", last), last


@needs_model
def test_second_interrupt_wipes_the_bar():
    terminal = Terminal("-m", MODEL, *ONE_LONG_STEP)
    terminal.wait_for(b"reading")
    for _ in range(2):
        terminal.process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    assert terminal.finish() == 130
    assert b"\033[K" in terminal.seen.rsplit(b"reading   0 %\033[K", 1)[1]


def test_prompt_typed_on_a_terminal():
    """Ctrl-C ends it at once, Ctrl-D needs to be typed once."""
    terminal = Terminal("-m", "no-such.gguf", "-f", "-")
    terminal.wait_for(b"Ctrl-D")
    terminal.type(b"one\n")
    terminal.wait_for(b"one\r\n")
    terminal.type(b"\x03")
    assert terminal.finish(10) == 0
    assert terminal.seen.endswith(b"interrupted\r\n") and b"no-such" not in terminal.seen and terminal.out == b""
    terminal = Terminal("-m", "no-such.gguf", "-f", "-")
    terminal.wait_for(b"Ctrl-D")
    terminal.type(b"one\n\x04")
    assert terminal.finish(10) == 1 and b"error: " in terminal.seen and b"no-such.gguf" in terminal.seen


@needs_model
def test_chat_on_a_terminal():
    terminal = Terminal("-m", MODEL, *CHAT, pipe_stdout=False)
    terminal.wait_for(b"\n> ")
    assert b"/exit" in terminal.seen and b"Ctrl-D" in terminal.seen and b"Ctrl-C" in terminal.seen and b"-f FILE" in terminal.seen
    time.sleep(0.5)  # it waits for input now
    terminal.process.send_signal(signal.SIGSTOP)
    time.sleep(0.2)
    terminal.process.send_signal(signal.SIGCONT)
    terminal.wait_for(b"> ", 2)  # the sign comes back
    terminal.type(b"hi\n")
    terminal.wait_for(b"> ", 3)
    reply = terminal.seen.rsplit(b"hi\r\n", 1)[1]
    assert len(reply) > 10, terminal.seen
    terminal.type(b"/quit\n")
    terminal.wait_for(b"the only one is /exit")
    terminal.wait_for(b"> ", 4)
    if sys.platform == "linux":  # others have limits of their own
        for _ in range(5):  # in pieces, which the terminal's queue holds
            terminal.type(b"x" * 1000)
            time.sleep(0.05)
        terminal.type(b"\n")
        terminal.wait_for(b"cuts lines of more than 4095 bytes")
        terminal.wait_for(b"> ", 5)
    terminal.type(b"/exit \n")
    assert terminal.finish() == 0 and b"load " in terminal.seen


@needs_model
def test_interrupt_on_a_terminal_ends_a_reply_and_then_the_chat():
    terminal = Terminal("-m", MODEL, "-cnv", "--temp", "0", "--ignore-eos", "-n", "-1", "--no-progress", pipe_stdout=False)
    terminal.wait_for(b"\n> ")
    hints = re.findall(rb"chat: [^\r\n]*", terminal.seen)
    assert hints and all(len(hint) <= 80 for hint in hints), terminal.seen
    terminal.type(b"hi\n")
    while not re.search(rb"> hi\r\n[^\r]", terminal.seen):  # a word of the reply
        assert terminal.read(), terminal.seen
    terminal.type(b"\x03")
    terminal.wait_for(b"\r\ninterrupted\r\n> ")
    terminal.type(b"\x03")
    assert terminal.finish() == 0 and b"decode " in terminal.seen


@needs_model
def test_warning_begins_a_line_on_a_terminal():
    terminal = Terminal("-m", MODEL, "-p", "one two", "-c", "8", "-n", "-1", "--ignore-eos", "--temp", "0", pipe_stdout=False)
    assert terminal.finish() == 0 and b"\r\nwarning: the text reached" in terminal.seen, terminal.seen


@needs_model
def test_interrupt_at_the_chat_prompt():
    process = subprocess.Popen([MAIN, "-m", MODEL, "-t", "1", *CHAT], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    process.stdin.write(b"hi\n")
    process.stdin.flush()
    while process.stdout.read(1) not in (b"\n", b""):
        pass
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, log = process.communicate(timeout=60)
    assert process.returncode == 0 and b"prefill " in log


@needs_model
def test_whole_characters_only(tmp_path):
    """What is piped on arrives in whole characters, though tokens cut them."""
    process = start("-p", "\U0001F600\U0001F601\U0001F602\U0001F603\U0001F604", "-n", "24", "--temp", "0", bufsize=0)
    pieces = []
    while True:
        piece = os.read(process.stdout.fileno(), 4096)
        if not piece:
            break
        pieces.append(piece)
    assert process.wait(60) == 0
    process.stderr.close()
    for piece in pieces[:-2]:
        piece.decode("utf-8")


def test_model_can_be_a_copy(tmp_path):
    """A read-only folder is enough to read from."""
    if not os.path.exists(MODEL):
        pytest.skip("DT_TEST_MODEL names no model")
    folder = tmp_path / "read only"
    folder.mkdir()
    shutil.copy(MODEL, folder / "m.gguf")
    folder.chmod(0o555)
    result = run("-m", str(folder / "m.gguf"), "-t", "1", "-p", "The capital of France is", "-n", "2", "--temp", "0")
    folder.chmod(0o755)
    assert result.stdout == b" Paris.\n"
