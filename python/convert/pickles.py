"""PyTorch's .bin files, in the zip form and in the older one, read without torch and without trusting them.

A pickle is a program that may call any function. The unpickler here knows the few names that a file of plain tensors uses and maps
them to its own inert stand-ins; any other name is refused, and the message says which it was. So is any operation that such a file
has no use for: Python's own unpickler can be made to take all memory (an index into its memo) or all stack (a key nested a hundred
thousand deep) by a file of a few bytes. Data is read from the file when it is asked for, from offsets that were checked against the
file's size.
"""

import math
import pickle
import struct
import zipfile

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
MAX_DIMENSIONS = 8
# What files of tensors consist of, protocols 0 to 4.
OPERATIONS = """PROTO STOP FRAME MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT
    BINFLOAT STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
    EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT DICT SETITEM SETITEMS GET BINGET LONG_BINGET PUT BINPUT LONG_BINPUT MEMOIZE GLOBAL
    STACK_GLOBAL REDUCE BUILD PERSID BINPERSID""".split()


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
    if not fine or len(shape) != len(strides) or len(shape) > MAX_DIMENSIONS:
        raise pickle.UnpicklingError("a damaged tensor description")
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides)) if 0 not in shape else 0
    if last >= max(storage.n_elements, 1) or math.prod(shape) > storage.n_elements:  # strides of 0 repeat elements without end
        raise pickle.UnpicklingError("a tensor that reaches beyond its storage")
    return _View(storage, offset, tuple(shape), tuple(strides))


def _rebuild_parameter(data, *_unused):
    return data


def _new_dictionary():
    return {}


GLOBALS = {
    ("collections", "OrderedDict"): _new_dictionary,
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
}
GLOBALS.update({("torch", name): _StorageType(name) for name in STORAGE_FORMATS})


class _Unpickler(pickle._Unpickler):  # the one in Python: its operations can be chosen, and its memo is a dictionary
    dispatch = {code: pickle._Unpickler.dispatch[code] for code in (getattr(pickle, name)[0] for name in OPERATIONS)}

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
            if kind == "storage" and isinstance(storage_type, _StorageType) and type(n_elements) is int and n_elements >= 0 and \
                    isinstance(key, (str, int)):
                return _Storage(str(key), storage_type.format, n_elements)
        except (TypeError, ValueError):
            pass
        raise pickle.UnpicklingError("something else than a tensor's storage")

    def set_items(self, target, items):
        if type(target) is not dict or not all(isinstance(key, (str, int)) for key in items[::2]):
            raise pickle.UnpicklingError("a key that is no name")
        target.update(zip(items[::2], items[1::2]))

    def load_setitem(self):
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items(self.stack[-1], [key, value])

    def load_setitems(self):
        items = self.pop_mark()
        self.set_items(self.stack[-1], items)

    def load_dict(self):
        items = self.pop_mark()
        self.stack.append({})
        self.set_items(self.stack[-1], items)

    def load_build(self):  # the state of a dictionary: versions of its layers
        self.stack.pop()

    def load_append(self):
        self.append_to([self.stack.pop()])

    def load_appends(self):
        self.append_to(self.pop_mark())

    def append_to(self, items):
        if type(self.stack[-1]) is not list:
            raise pickle.UnpicklingError("an element of what is no list")
        self.stack[-1].extend(items)

    dispatch.update({pickle.SETITEM[0]: load_setitem, pickle.SETITEMS[0]: load_setitems, pickle.DICT[0]: load_dict,
                     pickle.BUILD[0]: load_build, pickle.APPEND[0]: load_append, pickle.APPENDS[0]: load_appends})


def _load(file, path):
    try:
        return _Unpickler(file, path).load()
    except KeyError as error:
        raise pickle.UnpicklingError(f"an operation or a reference ({error}) that files of tensors do not have") from None


def read_pickle(path):
    """The tensors of a .bin file by name; no data is read."""
    try:
        state, find_data = _read_zip(path) if zipfile.is_zipfile(path) else _read_legacy(path)
        if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
            state = state["state_dict"]
        if not isinstance(state, dict):
            raise ConvertError(f"{path} holds no dictionary of tensors")
        return {name: _tensor(path, name, view, find_data) for name, view in state.items() if isinstance(view, _View)}
    except ConvertError:
        raise
    except PermissionError as error:
        raise ConvertError(f"{path} cannot be read: {error.strerror}") from None
    except Exception as error:  # a damaged zip file or pickle can raise anything
        raise ConvertError(f"{path}: damaged, or no file of tensors ({error or type(error).__name__}); fetch it again") from None


def _read_zip(path):
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        pickles = [name for name in entries if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ConvertError(f"{path}: a zip file without data.pkl is no PyTorch checkpoint")
        folder = pickles[0][: -len("data.pkl")]
        for name in (pickles[0], folder + "byteorder"):  # torch compresses nothing; what is compressed may unfold without end
            if name in entries and entries[name].compress_type != zipfile.ZIP_STORED:
                raise ConvertError(f"{path}: {name} is compressed, which a PyTorch checkpoint never is")
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
    formats, waiting, seen = {}, [state], set()
    while waiting:
        item = waiting.pop()
        if isinstance(item, _View):
            formats[item.storage.key] = item.storage.format
        elif isinstance(item, dict) and id(item) not in seen:  # one may contain itself
            seen.add(id(item))
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
