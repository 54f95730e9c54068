"""Where the output goes: what it must not replace, and the file in the making, under a name that only the converter uses.

Two runs for one output would write into each other, so this file is opened without following links and locked, as
src/base/open_locked.c does it, and stays locked until the output is there. OUT.part would be no name of our own: browsers
download under it, and half of a downloaded model begins like one that is half converted.

Invariant: nothing that the user has is replaced but an older output; what is written, renamed or removed is the file that is
locked.
"""

import contextlib
import errno
import fcntl
import os
import stat

from .checkpoint import find_weights
from .errors import ConvertError
from .stopping import held

# How files begin that a killed run left: not written yet; ours; those of deeptutor-quantize, whose header is zeros until the end.
LEFTOVERS = (b"", b"GGUF", bytes(4))


def check_outfile(outfile, folder):
    """Refuses an output that would replace something else than an older output: a device, a pipe, a folder, a link, a file of the
    model."""
    try:
        there = os.lstat(outfile)
    except FileNotFoundError:
        return
    if not stat.S_ISREG(there.st_mode):
        raise ConvertError(f"{outfile} is no regular file; give the output a name of its own")
    if any(os.path.samestat(there, file) for file in _files_of_model(folder)):
        raise ConvertError(f"{outfile} is a file of the model that is converted; give the output another name")


def _files_of_model(folder):
    """What stat says of all files in the folder, older outputs aside, and of the weights, which an index may have elsewhere."""
    paths = [path for path in folder.rglob("*") if path.suffix != ".gguf"] + find_weights(folder)[1]
    return [path.stat() for path in paths if path.is_file()]


class Part:
    """The file in the making: from begin() on it is there, empty and locked; the end of the `with` removes it."""

    def __init__(self, outfile):
        self.outfile = outfile
        self.path = outfile.with_name(outfile.name + ".converting.part")
        self.descriptor = None

    def begin(self):
        with held():
            self.descriptor = _take_over(self.path, self.outfile, os.O_CREAT)
        os.ftruncate(self.descriptor, 0)

    def open(self):
        """A file object of its own, which may be closed; the lock stays."""
        return os.fdopen(os.dup(self.descriptor), "wb")

    def finish(self, whole):
        """Gives `whole`, this file or one made of it, the output's name."""
        if not _is_named(self.descriptor, self.path):
            raise ConvertError(f"{self.path} was removed or replaced by another program while it was written; run this again")
        with held():
            os.replace(whole, self.outfile)
            self._remove()

    def _remove(self):
        if self.descriptor is not None:
            _remove(self.descriptor, self.path)
            self.descriptor = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with held():
            self._remove()


class Quantized:
    """Where deeptutor-quantize writes, and the file in the making that it locks itself. To be used under the lock of a Part; both
    are removed before (begin) and after (the end of the `with`), if a killed run left them."""

    def __init__(self, outfile):
        self.outfile = outfile
        self.path = outfile.with_name(outfile.name + ".quantizing")

    def begin(self):
        for path in (self.path.with_name(self.path.name + ".quantizing.part"), self.path):
            with held(), contextlib.suppress(FileNotFoundError):
                _remove(_take_over(path, self.outfile, 0), path)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(ConvertError):  # another's; the error that is under way says more
            self.begin()


def _take_over(path, outfile, flags):
    """A descriptor of the file, new or left behind, locked."""
    refusal = ConvertError(f"{path} is there already and is no half-written model; rename it, or give the output another name")
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o666)
        except OSError as error:
            raise refusal if error.errno in (errno.ELOOP, errno.EISDIR) else error from None  # a link, a folder
        try:
            if not _lock(descriptor):
                raise ConvertError(f"another process is writing {outfile}; wait until it ends, or give the output another name")
            if not _is_named(descriptor, path):  # whoever had the lock has removed or renamed it
                os.close(descriptor)
                continue
            if not stat.S_ISREG(os.fstat(descriptor).st_mode) or os.pread(descriptor, 4, 0) not in LEFTOVERS:
                raise refusal
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


def _lock(descriptor):
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno != errno.EWOULDBLOCK  # else: a file system without locks
    return True


def _is_named(descriptor, path):
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _remove(descriptor, path):
    """Under its lock, if the name is still its own; then the lock goes."""
    if _is_named(descriptor, path):
        path.unlink()
    os.close(descriptor)
