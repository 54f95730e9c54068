"""Families from outside. README and docs/models.md name what the program names as supported.

./main -cnv on tiny models whose likeliest token is always a mark that ends a turn (cases.md row 14): nothing of it is printed, every
turn ends at once, and a turn computes no more than what is new.

DT_MAIN and DT_MAKE_MODEL name the program and the one that writes the models. Token ids are those of tests/support/tiny_model.c.
"""
import json
import os
import pathlib
import re
import subprocess

import pytest

MAIN = os.environ.get("DT_MAIN", "")
MAKE_MODEL = os.environ.get("DT_MAKE_MODEL", "")

pytestmark = pytest.mark.skipif(not os.access(MAIN, os.X_OK) or not os.access(MAKE_MODEL, os.X_OK),
                                reason="DT_MAIN or DT_MAKE_MODEL names no program")


ROOT = pathlib.Path(__file__).resolve().parent.parent


def test_documents_name_what_is_supported(tmp_path):
    path = tmp_path / "other.gguf"
    subprocess.run([MAKE_MODEL, path, "--layers", "1", "--embd", "64", "--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--ff",
                    "64", "--vocab", "320", "--ctx", "64", "--type", "f32", "--name", "x"], check=True, timeout=60)
    path.write_bytes(path.read_bytes().replace(b"llama", b"other"))
    result = subprocess.run([MAIN, "-m", path, "-p", "a"], capture_output=True, timeout=60)
    assert result.returncode == 1
    message = result.stderr.decode()
    assert "architecture 'other' is not supported" in message
    supported = re.search(r"supported: ([a-z0-9, ]+)", message).group(1).split(", ")
    assert len(supported) >= 9
    decoder = (ROOT / "docs" / "models.md").read_text(encoding="utf-8").split("\n## ")[1]
    table = re.findall(r"^\| `(\w+)` \|", decoder, re.MULTILINE)
    assert table == supported
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = re.search(r"of the architectures (.*?);", readme, re.DOTALL).group(1)
    assert sorted(re.findall(r"`(\w+)`", listed)) == sorted(supported)


def chat(tmp_path, arch, vocabulary, favourite, messages):
    model, stats = tmp_path / "tiny.gguf", tmp_path / "s.json"
    subprocess.run([MAKE_MODEL, model, "--arch", arch, "--vocabulary", vocabulary, "--favourite", str(favourite), "--layers", "2",
                    "--embd", "64", "--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--ff", "128", "--vocab", "320", "--ctx",
                    "512", "--type", "f32"], check=True, timeout=60)
    result = subprocess.run([MAIN, "-m", model, "-t", "1", "-cnv", "--temp", "0", "-n", "12", "--stats-json", stats],
                            input=messages, capture_output=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result, json.loads(stats.read_bytes())


@pytest.mark.parametrize("arch,vocabulary,ends,other", [
    ("chatglm", "chatglm2", [2], 315),  # </s>; eop
    ("chatglm", "chatglm3", [317, 319, 2], 318),  # <|user|>, <|observation|>, </s>; <|assistant|>
    ("chatglm", "glm4", [7, 9, 0], 8),
    ("glm4", "glm4", [7, 9, 0], 8),
])
def test_end_tokens(tmp_path, arch, vocabulary, ends, other):
    for token in ends:
        result, stats = chat(tmp_path, arch, vocabulary, token, b"aa\nbb\ncc\n")
        assert result.stdout.strip() == b"" and stats["generated_tokens"] == 0
        assert b"rewrote" not in result.stderr  # each turn's tokens extend those of the turn before
    result, stats = chat(tmp_path, arch, vocabulary, other, b"aa\nbb\n")
    assert stats["generated_tokens"] == 24
    assert b"rewrote" not in result.stderr
