"""The safetensors format: an 8-byte length, a JSON header, then the tensors' bytes.

Written here because the safetensors package hands out numpy arrays, which cannot hold BF16, and does not say which tensor a
truncated file lacks. Every offset is checked against the file before a tensor is believed.
"""

import json
import math
import struct

import numpy as np

from .errors import ConvertError
from .tensors import NUMPY_TYPES, SourceTensor, file_reader

MAX_HEADER_BYTES = 100 << 20
MAX_DIMENSIONS = 8
MAX_NUMBER = 1 << 63


def read_safetensors(path):
    """The tensors of a file by name; no data is read."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = file.read(8)
        n_header = struct.unpack("<Q", length)[0] if len(length) == 8 else MAX_HEADER_BYTES + 1
        if n_header > MAX_HEADER_BYTES or 8 + n_header > size:
            raise ConvertError(f"{path} is no safetensors file, or truncated in its header; fetch it again")
        try:
            header = json.loads(file.read(n_header))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        except (ValueError, AttributeError, RecursionError):
            raise ConvertError(f"{path}: the header is not JSON; fetch the file again") from None
    return {name: _tensor(path, 8 + n_header, size, name, entry) for name, entry in entries.items()}


def _tensor(path, data, size, name, entry):
    try:
        format, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        whole = all(type(n) is int and 0 <= n < MAX_NUMBER for n in (*shape, start, end))
    except (TypeError, KeyError, ValueError):
        whole = False
    if not whole or not isinstance(format, str) or len(shape) > MAX_DIMENSIONS:
        raise ConvertError(f"{path}: the entry of tensor {name} is damaged; fetch the file again") from None
    if format not in NUMPY_TYPES:
        raise ConvertError(f"{path}: tensor {name} is stored as {format}, which is not supported; "
                           f"supported: {', '.join(NUMPY_TYPES)}")
    n_bytes = math.prod(shape) * np.dtype(NUMPY_TYPES[format]).itemsize
    if start > end or end - start != n_bytes:
        raise ConvertError(f"{path}: tensor {name} of shape {shape} should take {n_bytes} bytes, its entry says {end - start}")
    if data + end > size:
        raise ConvertError(f"{path} is truncated: tensor {name} ends at byte {data + end}, the file has {size}; fetch it again")
    return SourceTensor(name, format, shape, file_reader(path, data + start, format, shape))
