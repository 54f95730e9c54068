"""./deeptutor-eval ab on a tiny model: its scores against a computation here, its verdict, and what it says of wrong input."""
import json
import math
import os
import subprocess

import pytest

EVAL, MAKE_MODEL = (os.environ.get(name, "") for name in ("DT_EVAL", "DT_MAKE_MODEL"))
pytestmark = pytest.mark.skipif(not all(os.access(program, os.X_OK) for program in (EVAL, MAKE_MODEL)),
                                reason="DT_EVAL or DT_MAKE_MODEL names no program")
WORDS = "in the beginning god created the heaven and the earth and the earth was without form and void".split()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("ab") / "tiny.gguf")
    subprocess.run([MAKE_MODEL, path, "--layers", "2", "--embd", "64", "--heads", "4", "--kv-heads", "2", "--head-dim", "16",
                    "--ff", "128", "--vocab", "320", "--ctx", "512"], check=True, timeout=60)
    return path


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("ab") / "prompts.jsonl"
    rows = [{"prompt": " ".join(WORDS[i:] + WORDS[:i])} for i in range(5)]
    rows[3] = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " ".join(WORDS)}]}
    lines = [json.dumps(row) for row in rows]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join([*lines[:2], "", *lines[2:]]).encode())  # as an editor elsewhere may leave it
    return str(path)


def run(*args, text=None):
    return subprocess.run([EVAL, "ab", *args, "-t", "1"], input=text, capture_output=True, text=True, timeout=120)


def measure(tiny, prompts, tmp_path, *args, code=0):
    out = tmp_path / "ab.json"
    result = run("-m", tiny, "-i", prompts, "--json", str(out), "--chat-template", "chatml", "-n", "24", *args)
    assert result.returncode == code, result.stderr
    return json.loads(out.read_text(), parse_constant=lambda name: pytest.fail(name)), result.stdout


def words(text):
    """As apps/rouge.h says."""
    out, word = [], ""
    for c in text + " ":
        code = ord(c)
        mark = (code < 0xC0 or code in (0xD7, 0xF7, 0xFFFD) or 0x2000 <= code < 0x2070 or 0x3000 <= code < 0x3040
                or 0xFF00 <= code < 0xFF10) if code >= 0x80 else not (c.isascii() and c.isalnum())
        if code >= 0x2E80 or mark:
            out += ([word] if word else []) + ([] if mark else [c])
            word = ""
        else:
            word += c.lower() if c.isascii() else c
    return out


def rouge_l(a, b):
    a, b = words(a), words(b)
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
    common = table[len(a)][len(b)]
    if not a and not b:
        return 1.0
    precision, recall = common / max(len(a), 1), common / max(len(b), 1)
    return 2 * precision * recall / (precision + recall) if common else 0.0


def test_nothing_evicted_is_told(tiny, prompts, tmp_path):
    """Equal outputs are no proof then. Of one sample no error is known."""
    for size, told in (("500", True), ("20", False)):
        out = tmp_path / "ab.json"
        result = run("-m", tiny, "-i", prompts, "--json", str(out), "-n", "24", "--samples", "1", "--policy", "local_window",
                     "--max-cache-size", size)
        numbers = json.loads(out.read_text())
        assert ("warning: nothing was evicted" in result.stderr) == told == (numbers["evicted_tokens"] == 0), result.stderr
        assert "TLC: layers 0-1" in result.stderr and "KV memory" not in result.stderr
        assert numbers["rouge_l_error"] is numbers["token_agreement_error"] is None and "+-" not in result.stdout
        assert all(len(line) <= 80 for line in result.stdout.splitlines() if "." not in line or "|" not in line)


def test_nothing_evicted_passes(tiny, prompts, tmp_path):
    numbers, table = measure(tiny, prompts, tmp_path, "--temp", "0", "--policy", "local_window", "--max-cache-size", "500",
                             "--min-exact", "1", "--min-rouge", "1", "--min-agreement", "1", "--max-kv-share", "1.1")
    assert numbers["verdict"]["pass"] and len(numbers["verdict"]["checks"]) == 4
    assert numbers["exact_match"] == numbers["rouge_l"] == numbers["token_agreement"] == 1
    assert 1 <= numbers["kv_share"] <= 1.1  # with eviction, tokens remember where in the conversation they were
    assert [s["line"] for s in numbers["samples"]] == [1, 2, 4, 5, 6]
    assert all(s["first_difference"] is None and s["off"]["tokens"] == s["on"]["tokens"] for s in numbers["samples"])
    assert table.count("pass: ") == 4


def test_scores(tiny, prompts, tmp_path):
    numbers, table = measure(tiny, prompts, tmp_path, "--seed", "7", "--policy", "local_window", "--max-cache-size", "20",
                             "--min-rouge", "0.999", "--max-kv-share", "3", code=3)
    samples = numbers["samples"]
    assert {c["name"]: c["pass"] for c in numbers["verdict"]["checks"]} == {"rouge_l": False, "kv_share": True}
    assert not numbers["verdict"]["pass"] and "FAIL: rouge_l" in table
    assert len(samples) == 5 and any(0 < s["rouge_l"] < 1 for s in samples)
    for s in samples:
        a, b = s["off"]["tokens"], s["on"]["tokens"]
        equal = [x == y for x, y in zip(a, b)]
        assert abs(s["rouge_l"] - rouge_l(s["off"]["text"], s["on"]["text"])) <= 1e-8
        assert abs(s["token_agreement"] - sum(equal) / max(len(a), len(b))) <= 1e-8
        assert s["exact_match"] == (a == b) and s["first_difference"] == (None if a == b else (equal + [False]).index(False))
        assert 0 < s["on"]["kept_share"] < s["off"]["kept_share"] <= 1
        assert all(s[side][name] > 0 for side in ("off", "on")
                   for name in ("prefill_tps", "decode_tps", "kv_bytes", "kv_bytes_peak"))
    for name in ("exact_match", "rouge_l", "token_agreement"):
        assert abs(numbers[name] - sum(s[name] for s in samples) / 5) <= 1e-8
    spread = math.sqrt(sum((s["rouge_l"] - numbers["rouge_l"]) ** 2 for s in samples) / 4 / 5)
    assert abs(numbers["rouge_l_error"] - spread) <= 1e-8


def test_seeds(tiny, prompts, tmp_path):
    def outputs(*args):
        numbers, _ = measure(tiny, prompts, tmp_path, "--policy", "local_window", "--max-cache-size", "20", *args)
        return numbers["seed"], [(s["off"]["tokens"], s["on"]["tokens"]) for s in numbers["samples"]]
    first = outputs("--temp", "2", "--seed", "5", "--samples", "3")
    assert len(first[1]) == 3 and first == outputs("--temp", "2", "--seed", "5", "--samples", "3")
    drawn, texts = outputs("--temp", "2", "--samples", "2")
    assert (drawn, texts) == outputs("--temp", "2", "--samples", "2", "--seed", str(drawn))
    assert texts != outputs("--temp", "2", "--samples", "2", "--seed", str(drawn ^ 1))[1]


def test_no_thresholds_no_verdict(tiny, prompts, tmp_path):
    numbers, _ = measure(tiny, prompts, tmp_path, "--eviction-preset", "chat", "--samples", "1")
    assert numbers["verdict"] is None and numbers["eviction"] == "preset chat"


@pytest.mark.parametrize("line, what", [
    ("{", "line 2: is no JSON"), ("[]", "line 2: needs either"), ("{}", "line 2: needs either"),
    ('{"prompt": 3}', 'line 2: "prompt"'),
    ('{"prompt": ""}', 'line 2: "prompt"'), ('{"messages": []}', 'line 2: "messages"'),
    ('{"prompt": "x", "messages": []}', "line 2: needs either"), ('{"messages": [{"role": "user"}]}', "line 2: every message"),
    (json.dumps({"prompt": "word " * 600}), "line 2: its ")], ids=range(9))
def test_bad_lines_are_named(tiny, tmp_path, line, what):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "good"}\n' + line + "\n")
    result = run("-m", tiny, "-i", str(path), "--policy", "local_window", "--max-cache-size", "32")
    assert result.returncode == 2 and what in result.stderr and result.stdout == "", result


def test_long_ones_left_out(tiny, tmp_path):
    rows = "\n".join(json.dumps({"prompt": "word " * n}) for n in (600, 3, 700))
    result = run("-m", tiny, "-i", "-", "-n", "4", "--skip-long", "--policy", "local_window", "--max-cache-size", "32", text=rows)
    assert result.returncode == 0 and "2 prompts were too long" in result.stdout, result


def test_both_sides_end_with_the_context(tiny, prompts, tmp_path):
    """-n -1: what is evicted could go on past it for ever."""
    numbers, _ = measure(tiny, prompts, tmp_path, "-n", "-1", "-c", "160", "-b", "32", "--samples", "1", "--temp", "0", "--ignore-eos",
                         "--policy", "local_window", "--max-cache-size", "48")
    sample = numbers["samples"][0]
    assert [sample["prompt_tokens"] + len(sample[side]["tokens"]) for side in ("off", "on")] == [160, 160]


@pytest.mark.parametrize("args, what", [
    ([], "no prompts"), (["-i", os.devnull], "has no prompts"), (["-i", "missing.jsonl"], "can't be read"),
    (["-i", os.devnull, "--policy", "local_window"], "--max-cache-size"), (["-i", os.devnull, "--min-rouge", "2"], "--min-rouge"),
    (["-f", os.devnull], "-f")])
def test_mistakes(tiny, args, what):
    result = run("-m", tiny, *args)
    assert result.returncode == 2 and what in result.stderr and result.stdout == "", result
