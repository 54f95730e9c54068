"""The output file: its tensors planned beforehand, then written one after the other in pieces of bounded size.

The plan holds no weights. A tensor's pieces are made while they are written, so memory stays at one matrix of the checkpoint (where
its rows are reordered) or a few dozen MB (everywhere else), whatever the size of the model.
"""

import contextlib
import dataclasses
import os
from typing import Callable

import gguf
import numpy as np
import yaml  # which gguf brings
from gguf.gguf_writer import WriterState

from .checkpoint import load_json, shorten
from .errors import ConvertError, interpreting
from .families import IGNORED_PREFIXES, IGNORED_SUFFIXES
from .metadata import rope_factors
from .packed import PackedTensor, quantize_q8_0
from .tensors import FLOATS, convert, from_float32, to_float32

TYPES = {name: gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0")}
# general.file_type by the type of most weights
FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7}
PIECE_BYTES = 32 << 20
# general.sampling.* -> names in generation_config.json
SAMPLING = {
    "top_k": ("top_k",), "top_p": ("top_p",), "min_p": ("min_p",), "xtc_probability": ("xtc_probability",),
    "xtc_threshold": ("xtc_threshold",), "temp": ("temperature",), "penalty_last_n": ("penalty_last_n",),
    "penalty_repeat": ("penalty_repeat", "repetition_penalty"), "mirostat": ("mirostat",), "mirostat_tau": ("mirostat_tau",),
    "mirostat_eta": ("mirostat_eta",),
}


@dataclasses.dataclass
class OutputTensor:
    name: str
    shape: tuple  # numpy's order: rows first
    type: str  # key of TYPES
    pieces: Callable  # -> iterator of contiguous arrays, whose bytes in a row are the tensor

    @property
    def n_bytes(self):
        block, size = gguf.GGML_QUANT_SIZES[TYPES[self.type]]
        return int(np.prod(self.shape, dtype=np.int64)) // block * size


# ---- plan ----


def plan_tensors(family, hyper, tensors, float_type, config):
    """All tensors of the output. Checks that the checkpoint has exactly what the family names, in the right shapes."""
    tensors = _strip_names(family, tensors)
    tied = config.get("tie_word_embeddings", config.get("text_config", {}).get("tie_word_embeddings", family.ties_by_default))
    embedding = next(part for part in family.parts if part.target == "token_embd.weight")
    rows = tensors[embedding.source].shape[0] if embedding.source in tensors else 0
    sizes = hyper.sizes(rows)
    used, missing, planned = set(), [], []
    for part, source_names, target in _wanted(family, hyper):
        if part.target == "output.weight" and tied:
            used.update(source_names)
            continue
        found = [tensors[name] for name in source_names if name in tensors]
        if len(found) == len(source_names):
            used.update(source_names)
            planned.append(_plan(part, target, found, sizes, hyper, float_type))
        elif part.required or found or (part.target == "output.weight" and tied is False):
            missing += [name for name in source_names if name not in tensors]
    if missing:
        raise ConvertError(f"the checkpoint lacks tensors that {family.architecture} needs: {shorten(missing)}; fetch all of its "
                           "files again")
    extra = sorted(name for name in tensors if name not in used)
    if extra:
        raise ConvertError(f"the checkpoint has tensors that {family.architecture} does not have, so it is another model or has "
                           f"more layers than config.json says: {shorten(extra)}")
    factors = rope_factors(hyper)
    if factors is not None:
        planned.append(OutputTensor("rope_freqs.weight", factors.shape, "F32", lambda: iter([factors])))
    return planned, rows


def _strip_names(family, tensors):
    result = {}
    for name, tensor in tensors.items():
        if name.endswith(IGNORED_SUFFIXES) or name.startswith(IGNORED_PREFIXES):
            continue
        for prefix in family.prefixes:
            name = name.replace(prefix, "", 1)
        result[name] = tensor
    return result


def _wanted(family, hyper):
    """(part, names in the checkpoint, name in the output) of every tensor."""
    for part in family.parts:
        for i in range(hyper.n_layers if "{i}" in part.target else 1):
            experts = range(hyper.experts) if "{e}" in part.source else (0,)
            yield part, [part.source.format(i=i, e=e) for e in experts], part.target.format(i=i)


def _plan(part, target, sources, sizes, hyper, float_type):
    shape = tuple(sizes[word] for word in part.shape)
    for source in sources:
        if source.shape != shape:
            raise ConvertError(f"tensor {source.name}: the shape {list(shape)} was expected from config.json, found "
                               f"{list(source.shape)}")
        if source.format not in FLOATS:
            raise ConvertError(f"tensor {source.name} is stored as {source.format}; a floating-point format was expected")
    stacked = (len(sources),) + shape if "{e}" in part.source else shape
    wanted = _output_type(target, shape, sources, float_type)
    heads = None
    if part.change == "rotate":
        heads = hyper.heads if part.shape[0] == "q" else hyper.kv_heads

    def pieces():
        for source in sources:
            yield from _pieces(source, wanted, heads, part.change == "plus_one")

    return OutputTensor(target, stacked, wanted, pieces)


def _output_type(target, shape, sources, float_type):
    packed = {source.type for source in sources if isinstance(source, PackedTensor)}
    if packed:
        if len(packed) == 1 and all(isinstance(source, PackedTensor) for source in sources):
            return "Q8_0" if packed == {"requantize"} else packed.pop()
        return "Q4_1" if packed == {"Q4_0", "Q4_1"} else "Q8_0"
    if len(shape) == 1 or not target.endswith(".weight") or target.endswith(("_norm.weight", "ffn_gate_inp.weight")):
        return "F32"
    return float_type


def _pieces(source, wanted, heads, plus_one):
    if isinstance(source, PackedTensor):
        exact = wanted == source.type or (source.type, wanted) == ("Q4_0", "Q4_1") or source.type == "requantize"
        yield reorder_rows(source.blocks(wanted) if exact else quantize_q8_0(source.read()), heads)
        return
    row_bytes = 4 * (source.n_elements // source.shape[0])
    step = source.shape[0] if heads else max(1, PIECE_BYTES // max(row_bytes, 1))
    for start in range(0, source.shape[0], step):
        values = reorder_rows(source.read(start, start + step), heads)
        if plus_one:
            result = from_float32(to_float32(values, source.format) + np.float32(1), wanted)
        elif wanted == "Q8_0":
            result = quantize_q8_0(to_float32(values, source.format))
        else:
            result = convert(values, source.format, wanted)
        if wanted != source.format and wanted in ("F16", "F32") and not np.isfinite(result).all():
            raise ConvertError(f"tensor {source.name} holds values that {wanted} cannot (infinite, not a number, or beyond its "
                               "range); try --outtype bf16")
        yield np.ascontiguousarray(result)


def reorder_rows(values, heads):
    """Hugging Face rotates dimension i of a head with i + half, ggml's llama graph with its neighbour: the rows of every head are
    interleaved. Rows may be anything: numbers, or the bytes of blocks."""
    if heads is None:
        return values
    n_rows, rest = values.shape[0], values.shape[1:]
    return np.ascontiguousarray(values.reshape(heads, 2, n_rows // heads // 2, *rest).swapaxes(1, 2)).reshape(values.shape)


def main_type(planned):
    """The type that most bytes of matrices would have, weighed by elements."""
    weights = {}
    for tensor in planned:
        if len(tensor.shape) > 1:
            weights[tensor.type] = weights.get(tensor.type, 0) + int(np.prod(tensor.shape, dtype=np.int64))
    return max(weights, key=weights.get) if weights else "F32"


# ---- writing ----


class Writer:
    """gguf's writer, which knows the format, fed with tensors piece by piece."""

    def __init__(self, architecture, planned):
        self.writer = gguf.GGUFWriter(path=None, arch=architecture)
        self.planned = planned
        for tensor in planned:
            self.writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.n_bytes, TYPES[tensor.type])

    def add(self, key, value):
        if isinstance(value, bool):
            self.writer.add_bool(key, value)
        elif isinstance(value, int):
            self.writer.add_uint32(key, value)
        elif isinstance(value, float):
            self.writer.add_float32(key, value)
        else:
            self.writer.add_string(key, value)

    def add_array(self, key, values):
        self.writer.add_array(key, values)

    def add_general(self, folder, name):
        """general.*: what the model card, generation_config.json and the folder's name tell."""
        total, shared, expert, n_experts = self.writer.get_total_parameter_count()
        try:
            metadata = gguf.Metadata.load(None, folder, name, total)
        except yaml.YAMLError as error:
            raise ConvertError(f"{folder / 'README.md'}: the YAML at its head is damaged ({str(error).splitlines()[0]}); mend it, or "
                               "remove the file") from error
        metadata.name = metadata.name or folder.name
        if metadata.size_label is None and total > 0:
            metadata.size_label = gguf.size_label(total, shared, expert, n_experts)
        self.writer.add_type(gguf.GGUFType.MODEL)
        for field in vars(metadata):  # what versions of gguf disagree about
            if field.startswith("sampling_"):
                setattr(metadata, field, None)
        metadata.set_gguf_meta_model(self.writer)
        if (folder / "generation_config.json").is_file():
            self._add_sampling(load_json(folder / "generation_config.json"))

    def _add_sampling(self, settings):
        for key, names in SAMPLING.items():
            value = next((settings[name] for name in names if settings.get(name) is not None), None)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e38:
                continue
            if key in ("top_k", "penalty_last_n", "mirostat"):
                self.writer.add_int32("general.sampling." + key, int(value))
            else:
                self.writer.add_float32("general.sampling." + key, float(value))

    def write(self, file, path, progress):
        """Into an open, empty file, which is closed; path: what messages call it. progress(n): called with the bytes that each
        piece added."""
        writer = self.writer
        writer.fout, writer.state = [file], WriterState.EMPTY  # by name it would open whatever has the name by then
        with interpreting("what the folder tells of the model (config.json, generation_config.json, README.md, tokenizer files)"):
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
        try:
            self._pad(file)
            for tensor in self.planned:
                start = file.tell()
                for piece in tensor.pieces():
                    file.write(piece.reshape(-1).view(np.uint8))  # not tofile, whose error does not say why
                    progress(piece.nbytes)
                if file.tell() - start != tensor.n_bytes:
                    raise ConvertError(f"tensor {tensor.name} came out with {file.tell() - start} bytes instead of {tensor.n_bytes}"
                                       "; please report this")
                self._pad(file)
            file.flush()
            os.fsync(file.fileno())
        except OSError as error:
            error.filename = error.filename or str(path)
            raise
        finally:
            with contextlib.suppress(OSError):  # what the disk did not take, told above
                writer.close()

    def _pad(self, file):
        file.write(bytes(-file.tell() % self.writer.data_alignment))
