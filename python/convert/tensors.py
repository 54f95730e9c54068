"""A tensor of a checkpoint, read piece by piece, and the number formats it may have.

Numpy has no BF16, so BF16 values travel as uint16 (the upper half of an F32) together with the name of their format. A SourceTensor
holds no data: `read` fetches rows of the first dimension, so that nobody needs a whole tensor in memory who can do with less.
"""

import numpy as np

from .errors import ConvertError

# name of a format -> the numpy type that carries it, little-endian
NUMPY_TYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1", "BOOL": "u1",
}
FLOATS = ("F64", "F32", "F16", "BF16")


class SourceTensor:
    """name, format (a key of NUMPY_TYPES), shape. `reader(start, stop)` returns the rows [start, stop) of the first dimension."""

    def __init__(self, name, format, shape, reader):
        self.name = name
        self.format = format
        self.shape = tuple(shape)
        self.reader = reader

    @property
    def n_elements(self):
        return int(np.prod(self.shape, dtype=np.int64))

    def read(self, start=0, stop=None):
        if not self.shape:
            return self.reader(0, 1).reshape(())
        stop = self.shape[0] if stop is None else min(stop, self.shape[0])
        return self.reader(start, stop).reshape((stop - start,) + self.shape[1:])


def file_reader(path, offset, format, shape):
    """A reader for a tensor that lies whole and in C order at `offset` of a file. Reads, does not map: mapped pages would count as
    this process's memory."""
    numpy_type = np.dtype(NUMPY_TYPES[format])
    row = int(np.prod(shape[1:], dtype=np.int64))

    def read(start, stop):
        count = (stop - start) * row
        with open(path, "rb") as file:
            data = np.fromfile(file, numpy_type, count, offset=offset + start * row * numpy_type.itemsize)
        if data.size != count:
            raise ConvertError(f"{path} became shorter while it was read")
        return data

    return read


def to_float32(values, format):
    if format == "F32":
        return values
    if format == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def from_float32(values, format):
    """F32 to F16 or BF16, rounded to nearest even, the same bits as llama.cpp writes."""
    if format == "F32":
        return values
    if format == "F16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16)
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    not_a_number = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(not_a_number, (bits >> 16) | 64, rounded).astype(np.uint16)


def convert(values, format, wanted):
    return values if format == wanted else from_float32(to_float32(values, format), wanted)
