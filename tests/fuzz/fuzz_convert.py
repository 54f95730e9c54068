"""The readers of checkpoints that come from others: pickles of PyTorch (restricted) and safetensors.

    fuzz_convert.py pickle|safetensors [libFuzzer's flags] FOLDER...     with atheris
    fuzz_convert.py pickle|safetensors -mutations=N FILE-OR-FOLDER...    without: the files, then N mutations, the same each time

Bytes are written to a file and read as convert.py does it. They may be refused, with a ConvertError; nothing else may come of them, and
what was accepted must be readable without taking more memory than the file gives reason for.
"""
import pathlib
import pickle
import random
import struct
import sys
import tempfile
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "python"))
MAX_ELEMENTS = 1 << 16


def target_of(name, folder):
    from convert.errors import ConvertError
    from convert.pickles import read_pickle
    from convert.safetensors import read_safetensors

    path = pathlib.Path(folder) / ("fuzz.bin" if name == "pickle" else "fuzz.safetensors")
    reader = read_pickle if name == "pickle" else read_safetensors

    def run(data):
        path.write_bytes(data)
        try:
            tensors = reader(path)
            for tensor in tensors.values():
                assert tensor.n_elements >= 0
                if tensor.n_elements <= MAX_ELEMENTS and (not tensor.shape or tensor.shape[0] > 0):
                    values = tensor.read()
                    assert values.size == tensor.n_elements
        except ConvertError as error:
            assert str(error)

    return run


# ---- seeds ----


def legacy(state, storages):
    import io

    out = io.BytesIO()
    for part in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True, "protocol_version": 1001}):
        pickle.dump(part, out, protocol=2)
    out.write(state)
    pickle.dump([key for key, _ in storages], out, protocol=2)
    for _, data in storages:
        out.write(struct.pack("<q", len(data) // 4) + data)
    return out.getvalue()


def _state_pickle():
    """A dictionary with one tensor of 2 x 3 and one transposed, as torch writes it, put together by opcodes."""
    def text(s):
        return b"X" + struct.pack("<I", len(s)) + s.encode()

    def tensor(shape, strides):
        storage = (b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x06tQ")
        return (b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00" + bytes([75, shape[0], 75, shape[1]]) + b"\x86"
                + bytes([75, strides[0], 75, strides[1]]) + b"\x86\x89ccollections\nOrderedDict\n)RtR")

    return (b"\x80\x02ccollections\nOrderedDict\n)Rq\x00(" + text("a.weight") + tensor((2, 3), (3, 1)) + text("b.weight")
            + tensor((3, 2), (1, 3)) + b"u.")


def seeds(name):
    if name == "safetensors":
        header = (b'{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},'
                  b'"b":{"dtype":"BF16","shape":[2],"data_offsets":[24,28]},"c":{"dtype":"U8","shape":[],"data_offsets":[28,29]}}')
        return [struct.pack("<Q", len(header)) + header + bytes(range(29))]
    data = struct.pack("<6f", *range(6))
    with tempfile.TemporaryDirectory() as folder:
        zipped = pathlib.Path(folder) / "zip"
        with zipfile.ZipFile(zipped, "w") as archive:
            archive.writestr("archive/data.pkl", _state_pickle())
            archive.writestr("archive/byteorder", "little")
            archive.writestr("archive/data/0", data)
        return [zipped.read_bytes(), legacy(_state_pickle(), [("0", data)])]


# ---- without atheris ----


def mutate(data, numbers):
    data = bytearray(data)
    for _ in range(numbers.randint(1, 4)):
        at = numbers.randrange(len(data) + 1)
        kind = numbers.randrange(5)
        if kind == 0 and data:
            data[at % len(data)] = numbers.randrange(256)
        elif kind == 1:
            data[at:at + 4] = struct.pack("<I", numbers.choice((0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)))
        elif kind == 2:
            del data[at:at + numbers.randint(1, 8)]
        elif kind == 3:
            data[at:at] = bytes(numbers.choice(b"()[]{}.0123456789tRQqrhj\x80\x85\x86\x87\x88\x89-,\":") for _ in range(3))
        else:
            start = numbers.randrange(len(data) + 1)
            data[at:at] = data[start:start + numbers.randint(1, 32)]
    return bytes(data)


def files_in(paths):
    for path in map(pathlib.Path, paths):
        if path.is_dir():
            yield from sorted(item for item in path.iterdir() if item.is_file())
        elif path.is_file():
            yield path


def replay(name, paths, n_mutations, folder):
    run = target_of(name, folder)
    inputs = seeds(name) + [path.read_bytes() for path in files_in(paths)]
    for data in inputs:
        run(data)
    numbers = random.Random(1)
    for i in range(n_mutations):
        data = mutate(numbers.choice(inputs), numbers)
        try:
            run(data)
        except Exception:
            pathlib.Path(f"crash-{name}-{i}.bin").write_bytes(data)
            raise
    return len(inputs)


def main():
    name, arguments = sys.argv[1], sys.argv[2:]
    n_mutations = [int(word.split("=")[1]) for word in arguments if word.startswith("-mutations=")]
    with tempfile.TemporaryDirectory() as folder:
        if n_mutations:
            print(replay(name, [word for word in arguments if not word.startswith("-")], n_mutations[0], folder), "files")
            return
        import atheris

        corpus = pathlib.Path(folder) / "seeds"
        corpus.mkdir()
        for i, data in enumerate(seeds(name)):
            (corpus / str(i)).write_bytes(data)
        with atheris.instrument_imports(include=["convert", "zipfile", "json", "pickle"]):
            run = target_of(name, folder)
        atheris.Setup([sys.argv[0], *arguments, str(corpus)], run)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
