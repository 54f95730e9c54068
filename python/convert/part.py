"""Where the output goes: what it must not replace.

Invariant: nothing that the user has is replaced but a file that -o names (or the default), and never a file of the model.
"""

import os
import stat

from .checkpoint import find_weights
from .errors import ConvertError


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
