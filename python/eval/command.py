"""What the commands of this folder share: how they refuse and stop, which Python runs them, how they run programs and write files.

Invariant: what was asked wrongly is refused in one sentence, with exit code 2, before anything is measured or written. Nothing is
replaced but the regular file that an output's name leads to.
"""
import argparse
import contextlib
import errno
import os
import pathlib
import stat
import subprocess
import sys

from convert.stopping import STOPS, Stopped, caught, held

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def fail(text, code=2):
    print(f"error: {text}", file=sys.stderr)
    sys.exit(code)


@contextlib.contextmanager
def stoppable():
    """Inside, Ctrl-C and its like end the program with one line, once what was begun is cleared away. So does a full disk."""
    try:
        with caught():
            yield
    except Stopped as stopped:
        print("stopped", file=sys.stderr)
        sys.exit(128 + stopped.number)
    except OSError as error:
        fail(f"{error.filename or 'reading or writing'}: {error.strerror or error}", 1)


def go_on_in_venv(error, is_made_with=True):
    """Where a package is missing here but .venv may have it, .venv's Python begins anew with the same arguments. is_made_with:
    run.sh --test puts the package there."""
    python = ROOT / ".venv/bin/python"
    if python.exists() and pathlib.Path(sys.prefix).resolve() != (ROOT / ".venv").resolve():
        os.execv(python, [str(python), *sys.argv])
    fail(f"the Python package {error.name} is missing: {sys.executable} -m pip install {error.name}"
         + ("" if python.exists() or not is_made_with else ", or bash run.sh --test, which makes .venv"))


def at_least_one(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def check_program(path, how):
    if not (os.path.isfile(path) and os.access(path, os.X_OK)):
        fail(f"{path} is not there; build it with: {how}")


def check_inputs(paths):
    for path in paths:
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe may have nobody who writes, and is read only once
                fail(f"{path} is no regular file; give one")
            open(path, "rb").close()
        except OSError as error:
            fail(f"{path} can't be read: {error.strerror}")


def part_of(target):
    """A file in the making, which is made only where there is none. TARGET.part would be a name that others use too."""
    return f"{target}.{os.getpid()}.deeptutor"


def check_output(path, inputs):
    """That a file can be written there when all is measured, that it is none of those read, and not where the table goes."""
    target, there = pathlib.Path(os.path.realpath(path)), None
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            there = os.stat(path)
        if there and stat.S_ISDIR(there.st_mode):
            fail(f"{path} is a folder; name a file in it")
        if there and not stat.S_ISREG(there.st_mode):
            fail(f"{path} is no regular file; name one for the output")
        if not target.parent.is_dir():
            fail(f"{target.parent if os.path.islink(path) else pathlib.Path(path).parent} is no folder")
        if there and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        with held():
            open(part_of(target), "xb").close()
            os.unlink(part_of(target))
    except OSError as error:
        fail(f"{path} can't be written: {error.strerror}")
    for source in inputs:
        if there and os.path.exists(source) and os.path.samestat(there, os.stat(source)):
            fail(f"{path} is read, so it can't be written to; give the output another name")
    with contextlib.suppress(OSError):  # closed
        if there and os.path.samestat(there, os.fstat(1)):
            fail(f"{path} is where stdout goes; give the output another name")


def check_folder(path):
    if os.path.lexists(path) and not path.is_dir():
        fail(f"{path} is needed as a folder; move that file away")


def run_program(command, text=None, source="", **more):
    """Its messages go where ours go. What it refuses was asked wrongly of us too. It ends when we are stopped. Text: for its stdin,
    which stands for the file `source`."""
    process = None
    try:
        with held():
            process = subprocess.Popen([str(part) for part in command],
                                       stdin=subprocess.DEVNULL if text is None else subprocess.PIPE, **more)
        process.communicate(text)
    except BaseException:
        if process is not None:
            process.terminate()
            process.wait()
        raise
    code = process.returncode
    if -code in STOPS:
        raise Stopped(-code)
    if code != 0:
        where = f", where - is {source}" if source else ""
        fail(f"{command[0]} {command[1]} ended with {code}; its own message is above{where}", 2 if code == 2 else 1)


@contextlib.contextmanager
def replacing(path):
    """A binary file that takes the place of `path` at the end, whole and on its disk, or is gone. Links are followed; a file
    that is replaced leaves its mode."""
    target, made = os.path.realpath(path), False
    part = part_of(target)
    if os.path.exists(target) and not os.path.isfile(target):
        raise FileExistsError(errno.EEXIST, "it is no regular file", str(path))
    try:
        with held():
            file = open(part, "xb")
            made = True
        with file:
            with contextlib.suppress(OSError):  # none is there; or a file system without modes
                os.fchmod(file.fileno(), stat.S_IMODE(os.stat(target).st_mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    except BaseException:
        if made:
            pathlib.Path(part).unlink(missing_ok=True)
        raise


def write_whole(path, content):
    """Whole or not at all. Half a surrogate pair, which JSON can name and UTF-8 can't, is written as JSON names it."""
    try:
        with replacing(path) as file:
            file.write(content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace"))
    except OSError as error:
        fail(f"{path} can't be written: {error.strerror}", 1)
