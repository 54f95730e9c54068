"""What the commands of this folder share: how they refuse, which Python runs them, how they run programs and write files.

Invariant: what was asked wrongly is refused in one sentence, with exit code 2, before anything is measured or written.
"""
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def fail(text, code=2):
    print(f"error: {text}", file=sys.stderr)
    sys.exit(code)


def go_on_in_venv(error):
    """Where a package is missing here but .venv may have it, .venv's Python begins anew with the same arguments."""
    python = ROOT / ".venv/bin/python"
    if python.exists() and pathlib.Path(sys.prefix).resolve() != (ROOT / ".venv").resolve():
        os.execv(python, [str(python), *sys.argv])
    fail(f"the Python package {error.name} is missing: {sys.executable} -m pip install {error.name}"
         + ("" if python.exists() else ", or bash run.sh --test, which makes .venv"))


def check_program(path, how):
    if not (os.path.isfile(path) and os.access(path, os.X_OK)):
        fail(f"{path} is not there; build it with: {how}")


def check_inputs(paths):
    for path in paths:
        try:
            open(path, "rb").close()
        except OSError as error:
            fail(f"{path} can't be read: {error.strerror}")


def check_output(path, inputs):
    """That a file can be written there when all is measured, and that it is none of those read."""
    path = pathlib.Path(path)
    if path.is_dir():
        fail(f"{path} is a folder; name a file in it")
    if not path.parent.is_dir():
        fail(f"{path.parent} is no folder")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        fail(f"nothing can be written to {path.parent}")
    for source in inputs:
        if path.exists() and os.path.exists(source) and os.path.samefile(path, source):
            fail(f"{path} is read, so it can't be written to; give the output another name")


def check_folder(path):
    if path.exists() and not path.is_dir():
        fail(f"{path} is needed as a folder; move that file away")


def run_program(command, codes=(0,), **more):
    """Its messages go where ours go. What it refuses was asked wrongly of us too."""
    done = subprocess.run([str(part) for part in command], stdin=subprocess.DEVNULL, **more)
    if done.returncode not in codes:
        fail(f"{command[0]} {command[1]} ended with {done.returncode}; its own message is above",
             2 if done.returncode == 2 else 1)


def write_whole(path, text):
    """Whole or not at all. Half a surrogate pair, which JSON can name and UTF-8 can't, is written as JSON names it."""
    part = pathlib.Path(f"{path}.part")
    try:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        fail(f"{path} can't be written: {error.strerror}", 1)
