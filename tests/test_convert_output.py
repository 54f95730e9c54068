"""Where convert.py writes: no file that the user had is lost, whatever -o names and whoever else writes there; a run that is
stopped leaves nothing behind.

DT_QUANTIZE names the quantizer for the tests that need one.
"""
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from test_convert import HERE, families, hf, run_convert
import numpy as np  # test_convert skips where it is missing
from convert.command import main as convert
from convert.errors import ConvertError
from convert.part import Part

QUANTIZE = os.environ.get("DT_QUANTIZE", "")
needs_quantizer = pytest.mark.skipif(not os.access(QUANTIZE, os.X_OK), reason="DT_QUANTIZE names no program")


@pytest.fixture
def folder(tokenizers, tmp_path):
    return families.make("llama2", tmp_path / "folder", tokenizers).folder


@pytest.fixture
def large_folder(folder):
    """Large enough that a run is caught while it writes."""
    config = {**hf.read_json(folder / "config.json"), "intermediate_size": 300000}
    hf.write_json(folder / "config.json", config)
    shapes = hf.llama_names(config)
    hf.save_entries(folder, {name: ("F32", shape, bytes(4 * int(np.prod(shape)))) for name, shape in shapes.items()})
    return folder


def start(folder, out, *args, **more):
    return subprocess.Popen([sys.executable, str(HERE.parent / "convert.py"), "--pytorch_model_path", str(folder), "-o", str(out),
                             "--outtype", "bf16", *args], stderr=subprocess.PIPE, **more)


def wait_for(process, path):
    """Until something was written there: not before the file is locked."""
    deadline = time.monotonic() + 60
    while not (path.exists() and path.stat().st_size > 0) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    assert process.poll() is None and path.stat().st_size > 0


def converted(folder, out, *args):
    assert run_convert(folder, out, *args) == 0
    return out


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


# ---- the file in the making ----

ENDINGS = (".converting.part", ".quantizing", ".quantizing.quantizing.part")


def test_downloads_are_no_parts(folder, tmp_path):
    """Half of a downloaded model under the name that browsers give it: not the converter's."""
    half = tmp_path / "out.gguf.part"
    half.write_bytes(b"GGUF and so on")
    for more in ([], ["--quantize", "Q8_0"]) if os.access(QUANTIZE, os.X_OK) else ([],):
        assert convert(["--pytorch_model_path", str(folder), "-o", str(tmp_path / "out.gguf"), *more]) == 0
        assert half.read_bytes() == b"GGUF and so on"


@pytest.mark.parametrize("ending", [ENDINGS[0], *(pytest.param(ending, marks=needs_quantizer) for ending in ENDINGS[1:])])
def test_what_is_no_leftover_stays(folder, tmp_path, capsys, ending):
    out, there, target = tmp_path / "out.gguf", tmp_path / f"out.gguf{ending}", tmp_path / "target"
    more = ["--quantize", "Q8_0"] if "quantizing" in ending else []
    there.write_bytes(b"the user's own")
    assert f"{there} is there already and is no half-written model" in told(capsys, folder, out, *more)
    assert there.read_bytes() == b"the user's own"
    target.write_bytes(b"GGUF")
    for make in (lambda: there.symlink_to(target), there.mkdir, lambda: os.mkfifo(there)):
        there.rmdir() if there.is_dir() else there.unlink()
        make()
        assert f"{there} is there already" in told(capsys, folder, out, *more)
        assert os.path.lexists(there) and not out.exists()
    assert target.read_bytes() == b"GGUF"


def test_leftovers_are_cleared(folder, tmp_path):
    out = tmp_path / "out.gguf"
    expected = converted(folder, out).read_bytes()
    for left in (b"", b"GGUF" + bytes(10**6)):
        (tmp_path / f"out.gguf{ENDINGS[0]}").write_bytes(left)
        assert converted(folder, out).read_bytes() == expected
    if os.access(QUANTIZE, os.X_OK):
        (tmp_path / f"out.gguf{ENDINGS[1]}").write_bytes(b"GGUF")
        (tmp_path / f"out.gguf{ENDINGS[2]}").write_bytes(bytes(10**6))
        converted(folder, out, "--quantize", "Q8_0")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "out.gguf"]


@pytest.mark.parametrize("more", [[], pytest.param(["--quantize", "Q8_0"], marks=needs_quantizer)])
def test_two_runs_for_one_output(folder, tmp_path, capsys, more):
    """The second is refused as long as the first works, and does not touch what the first writes."""
    out = tmp_path / "out.gguf"
    with Part(out) as part:
        part.begin()
        part.open().close()
        assert "another process is writing" in told(capsys, folder, out, *more) and part.path.read_bytes() == b""
    assert not part.path.exists()
    converted(folder, out, *more)


def test_a_part_that_was_replaced_is_not_renamed(tmp_path):
    out = tmp_path / "out.gguf"
    out.write_bytes(b"old")
    with Part(out) as part:
        part.begin()
        part.path.unlink()
        part.path.write_bytes(b"another's")
        with pytest.raises(ConvertError, match="removed or replaced by another program"):
            part.finish(part.path)
    assert out.read_bytes() == b"old" and part.path.read_bytes() == b"another's"


def test_a_run_that_was_paused(large_folder, tmp_path):
    """The first run is paused while it writes; the second one ends at once, and the first one's file is whole."""
    out = tmp_path / "out.gguf"
    first = start(large_folder, out)
    wait_for(first, out.with_name(out.name + ENDINGS[0]))
    first.send_signal(signal.SIGSTOP)
    second = start(large_folder, out)
    assert "another process is writing" in second.communicate(timeout=300)[1].decode() and second.returncode == 1
    first.send_signal(signal.SIGCONT)
    assert first.communicate(timeout=300)[1] is not None and first.returncode == 0
    assert out.stat().st_size > 10**8 and sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["out.gguf"]


# ---- a run that is stopped ----

STOPS = ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129))


def ignoring(number):
    return lambda: signal.signal(number, signal.SIG_IGN)


def files(folder):
    return sorted(path.name for path in folder.iterdir() if path.is_file())


@pytest.mark.parametrize("number,code", STOPS)
def test_stopped_while_converting(large_folder, tmp_path, number, code):
    process = start(large_folder, tmp_path / "out.gguf")
    wait_for(process, tmp_path / f"out.gguf{ENDINGS[0]}")
    process.send_signal(number)
    text = process.communicate(timeout=300)[1].decode()
    assert process.returncode == code and text.endswith("stopped; nothing half-written was left behind\n") and files(tmp_path) == []


def test_hangup_is_ignored_under_nohup(large_folder, tmp_path):
    process = start(large_folder, tmp_path / "out.gguf", preexec_fn=ignoring(signal.SIGHUP))
    wait_for(process, tmp_path / f"out.gguf{ENDINGS[0]}")
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=300)
    assert process.returncode == 0 and files(tmp_path) == ["out.gguf"]


@needs_quantizer
@pytest.mark.parametrize("whom,number,code", [("converter", signal.SIGTERM, 143), ("converter", signal.SIGHUP, 129),
                                              ("both", signal.SIGINT, 130), ("quantizer", signal.SIGINT, 130)])
def test_stopped_while_quantizing(large_folder, tmp_path, whom, number, code):
    """Ctrl-C reaches both; with SIGINT ignored, as in a script's background, only the quantizer minds it."""
    more = {"preexec_fn": ignoring(number)} if whom == "quantizer" else {}
    process = start(large_folder, tmp_path / "out.gguf", "--quantize", "Q4_K_M", "-t", "1", start_new_session=True, **more)
    wait_for(process, tmp_path / f"out.gguf{ENDINGS[2]}")
    if whom == "converter":
        process.send_signal(number)
    else:
        os.killpg(process.pid, number)
    text = process.communicate(timeout=300)[1].decode()
    assert process.returncode == code and text.endswith("stopped; nothing half-written was left behind\n") and "error" not in text
    assert files(tmp_path) == []


@needs_quantizer
def test_the_quantizer_is_killed(large_folder, tmp_path):
    process = start(large_folder, tmp_path / "out.gguf", "--quantize", "Q4_K_M", "-t", "1", start_new_session=True)
    wait_for(process, tmp_path / f"out.gguf{ENDINGS[2]}")
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.exists():
        process.kill()
        pytest.skip("children are read from /proc")
    os.kill(int(children.read_text().split()[0]), signal.SIGKILL)
    text = process.communicate(timeout=300)[1].decode()
    assert process.returncode == 1 and "quantizing failed" in text and files(tmp_path) == []
