"""PyTorch's .bin files, in the zip form and in the older one, read without torch and without trusting them.

A pickle is a program that may call any function. The unpickler here knows the few names that a file of plain tensors uses and maps
them to its own inert stand-ins; any other name is refused, and the message says which it was. Data is read from the file when it is
asked for, from offsets that were checked against the file's size.
"""

import collections
import pickle
import struct
import zipfile
import zlib

import numpy as np

from .errors import ConvertError
from .tensors import NUMPY_TYPES, SourceTensor, file_reader

STORAGE_FORMATS = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001


class _StorageType:
    def __init__(self, name):
        self.format = STORAGE_FORMATS[name]


class _Storage:
    def __init__(self, key, format, n_elements):
        self.key = key
        self.format = format
        self.n_elements = n_elements


class _View:
    """A tensor as the pickle describes it: a window on a storage, in elements."""

    def __init__(self, storage, offset, shape, strides):
        self.storage = storage
        self.offset = offset
        self.shape = shape
        self.strides = strides


def _rebuild_tensor(storage, offset, shape, strides, *_unused):
    fine = isinstance(storage, _Storage) and all(type(n) is int and n >= 0 for n in (offset, *shape, *strides))
    if not fine or len(shape) != len(strides):
        raise pickle.UnpicklingError("a damaged tensor description")
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides)) if 0 not in shape else 0
    if last >= max(storage.n_elements, 1):
        raise pickle.UnpicklingError("a tensor that reaches beyond its storage")
    return _View(storage, offset, tuple(shape), tuple(strides))


def _rebuild_parameter(data, *_unused):
    return data


GLOBALS = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
}
GLOBALS.update({("torch", name): _StorageType(name) for name in STORAGE_FORMATS})


class _Unpickler(pickle.Unpickler):
    def __init__(self, file, path):
        super().__init__(file, encoding="utf-8")
        self.path = path

    def find_class(self, module, name):
        if (module, name) not in GLOBALS:
            raise ConvertError(f"{self.path} is refused: its pickle wants {module}.{name}, and only tensors are allowed. "
                               "Use a checkpoint in safetensors form, or one from a source that you trust")
        return GLOBALS[module, name]

    def persistent_load(self, saved):
        try:
            kind, storage_type, key, _location, n_elements = saved[:5]
            if kind == "storage" and isinstance(storage_type, _StorageType) and type(n_elements) is int:
                return _Storage(str(key), storage_type.format, n_elements)
        except (TypeError, ValueError):
            pass
        raise pickle.UnpicklingError("something else than a tensor's storage")


def _load(file, path):
    try:
        return _Unpickler(file, path).load()
    except ConvertError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise ConvertError(f"{path}: damaged, or no file of tensors ({error}); fetch it again") from None


def read_pickle(path):
    """The tensors of a .bin file by name; no data is read."""
    try:
        state, find_data = _read_zip(path) if zipfile.is_zipfile(path) else _read_legacy(path)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, UnicodeError, ValueError, zlib.error) as error:
        raise ConvertError(f"{path}: damaged ({error}); fetch it again") from None
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict):
        raise ConvertError(f"{path} holds no dictionary of tensors")
    return {name: _tensor(path, name, view, find_data) for name, view in state.items() if isinstance(view, _View)}


def _read_zip(path):
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        pickles = [name for name in entries if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ConvertError(f"{path}: a zip file without data.pkl is no PyTorch checkpoint")
        folder = pickles[0][: -len("data.pkl")]
        if folder + "byteorder" in entries and archive.read(folder + "byteorder") != b"little":
            raise ConvertError(f"{path} was written on a big-endian machine, which is not supported")
        with archive.open(pickles[0]) as file:
            state = _load(file, path)

    def find_data(key):
        entry = entries.get(folder + "data/" + key)
        if entry is None or entry.compress_type != zipfile.ZIP_STORED:
            raise ConvertError(f"{path}: the data of storage {key} is missing or compressed; fetch the file again")
        with open(path, "rb") as file:  # the local header's lengths may differ from those of the directory
            file.seek(entry.header_offset)
            header = file.read(30)
        if len(header) != 30 or header[:4] != b"PK\x03\x04":
            raise ConvertError(f"{path}: damaged zip file; fetch it again")
        return entry.header_offset + 30 + sum(struct.unpack("<HH", header[26:30])), entry.file_size

    return state, find_data


def _read_legacy(path):
    size = path.stat().st_size
    places = {}
    with open(path, "rb") as file:
        if file.read(2)[:1] != b"\x80":
            raise ConvertError(f"{path} is no PyTorch checkpoint, or truncated; fetch it again")
        file.seek(0)
        if _load(file, path) != LEGACY_MAGIC or _load(file, path) != LEGACY_PROTOCOL:
            raise ConvertError(f"{path} is no PyTorch checkpoint of a known form")
        system = _load(file, path)
        if not isinstance(system, dict) or not system.get("little_endian", True):
            raise ConvertError(f"{path} was written on a big-endian machine, which is not supported")
        state = _load(file, path)
        keys = _load(file, path)
        formats = _storage_formats(state)
        for key in keys if isinstance(keys, list) else []:
            count = file.read(8)
            if len(count) != 8 or str(key) not in formats:
                raise ConvertError(f"{path} is truncated; fetch it again")
            n_bytes = struct.unpack("<q", count)[0] * np.dtype(NUMPY_TYPES[formats[str(key)]]).itemsize
            if n_bytes < 0 or file.tell() + n_bytes > size:
                raise ConvertError(f"{path} is truncated: storage {key} ends beyond the file's {size} bytes; fetch it again")
            places[str(key)] = (file.tell(), n_bytes)
            file.seek(n_bytes, 1)

    def find_data(key):
        if key not in places:
            raise ConvertError(f"{path}: the data of storage {key} is missing; fetch the file again")
        return places[key]

    return state, find_data


def _storage_formats(state):
    """key -> format of all storages that a state dictionary's tensors use."""
    formats, waiting = {}, [state]
    while waiting:
        item = waiting.pop()
        if isinstance(item, _View):
            formats[item.storage.key] = item.storage.format
        elif isinstance(item, dict):
            waiting.extend(item.values())
    return formats


def _tensor(path, name, view, find_data):
    storage = view.storage
    item_bytes = np.dtype(NUMPY_TYPES[storage.format]).itemsize
    place, n_bytes = find_data(storage.key)
    if place + n_bytes > path.stat().st_size or storage.n_elements * item_bytes > n_bytes:
        raise ConvertError(f"{path} is truncated: tensor {name} ends beyond the file; fetch it again")
    start = place + view.offset * item_bytes
    in_order, step = True, 1
    for n, stride in zip(reversed(view.shape), reversed(view.strides)):
        in_order = in_order and (n == 1 or stride == step)
        step *= n
    if in_order:
        return SourceTensor(name, storage.format, view.shape, file_reader(path, start, storage.format, view.shape))

    def read(first, stop):  # transposed or the like: the storage is read whole
        data = file_reader(path, place, storage.format, (storage.n_elements,))(0, storage.n_elements)
        strides = [step * item_bytes for step in view.strides]
        window = np.lib.stride_tricks.as_strided(data[view.offset:], view.shape, strides, writeable=False)
        return np.ascontiguousarray(window[first:stop])

    return SourceTensor(name, storage.format, view.shape, read)
