"""Where convert.py writes: no file that the user had is lost, whatever -o names and whoever else writes there; a run that is stopped
leaves nothing behind.

DT_QUANTIZE names the quantizer for the tests that need one.
"""
import os
import pathlib

import pytest

from test_convert import families, run_convert
from convert.command import main as convert

QUANTIZE = os.environ.get("DT_QUANTIZE", "")
needs_quantizer = pytest.mark.skipif(not os.access(QUANTIZE, os.X_OK), reason="DT_QUANTIZE names no program")


@pytest.fixture
def folder(tokenizers, tmp_path):
    return families.make("llama2", tmp_path / "folder", tokenizers).folder


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def told(capsys, folder, out, *args):
    """The error of a run that is refused, where something lies under the output's name."""
    assert convert(["--pytorch_model_path", str(folder), "-o", str(out), *args]) == 1
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return text[text.rindex("error: "):]


# ---- what must not be replaced ----


@pytest.mark.parametrize("more", [[], pytest.param(["--quantize", "Q8_0"], marks=needs_quantizer)])
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.model", "config.json"])
def test_a_file_of_the_model_is_no_output(folder, tmp_path, capsys, monkeypatch, name, more):
    before = contents(folder)
    assert "is a file of the model" in told(capsys, folder, folder / name, *more)
    os.link(folder / name, tmp_path / "another name.gguf")
    assert "is a file of the model" in told(capsys, folder, tmp_path / "another name.gguf", *more)
    monkeypatch.chdir(folder)
    assert "is a file of the model" in told(capsys, pathlib.Path("."), pathlib.Path(name), *more)
    assert contents(folder) == before


def test_what_links_of_the_folder_lead_to_is_no_output(folder, tmp_path, capsys):
    """As in the cache that Hugging Face's tools keep."""
    blob = tmp_path / "blob"
    (folder / "model.safetensors").rename(blob)
    (folder / "model.safetensors").symlink_to(blob)
    before = blob.read_bytes()
    assert "is a file of the model" in told(capsys, folder, blob)
    assert blob.read_bytes() == before


def test_an_output_in_the_folder(folder):
    assert run_convert(folder, folder / "out.gguf") == 0
    assert run_convert(folder, folder / "out.gguf") == 0


def test_only_files_are_replaced(folder, tmp_path, capsys):
    target = tmp_path / "target.gguf"
    target.write_bytes(b"what was there")
    (tmp_path / "link").symlink_to(target)
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "place").mkdir()
    for name in ("link", "nowhere", "pipe", "place"):
        text = told(capsys, folder, tmp_path / name)
        assert "is no regular file; give the output a name of its own" in text and "converted" not in text
    assert (tmp_path / "link").is_symlink() and (tmp_path / "nowhere").is_symlink() and (tmp_path / "pipe").is_fifo()
    assert target.read_bytes() == b"what was there" and not (tmp_path / "missing").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "link", "nowhere", "pipe", "place", "target.gguf"]
