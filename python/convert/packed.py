"""GPTQ and AWQ weights, repacked into ggml's blocks without quantizing again.

Such a layer is four tensors: qweight and qzeros (small integers packed into int32), scales, and for GPTQ g_idx, the group of every
input column. A weight is scale[group, row] * (q - zero[group, row]). ggml's blocks are 32 columns of a row:

    Q4_0  F16 d, 16 bytes       value = d * (q - 8)     symmetric 4 bit: exact
    Q4_1  F16 d, F16 m, 16 bytes  value = d * q + m     with zero points: m = -scale * zero, rounded to F16
    Q8_0  F16 d, 32 int8        value = d * q           symmetric 8 bit: exact

Where the columns of a block belong to different groups (act-order), there is no such block and the layer is quantized anew to Q8_0.
Invariant: whether a layer is exact is decided from its zeros, scales and groups, which are read beforehand.
"""

import gguf
import numpy as np

from .checkpoint import load_json, shorten
from .errors import ConvertError, say, warn
from .tensors import SourceTensor, to_float32

BLOCK = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AWQ's column that nibble i of an int32 holds
SUFFIXES = (".qweight", ".qzeros", ".scales", ".g_idx")


class PackedTensor(SourceTensor):
    """Reads as an F32 weight of shape (rows, columns); `type` is the ggml type that holds it best. unpack() returns q (rows,
    columns), scales and zeros (rows, groups) and the group of each column."""

    def __init__(self, name, shape, type, unpack, error):
        super().__init__(name, "F32", shape, self._read_float)
        self.type = type  # or "requantize"
        self.unpack = unpack
        self.error = error  # the largest deviation of a weight that repacking causes

    def _read_float(self, start, stop):
        q, scales, zeros, groups = self.unpack()
        rows = slice(start, stop)
        return (q[rows].astype(np.float32) - zeros[rows][:, groups]) * scales[rows][:, groups]

    def blocks(self, type):
        """uint8 (rows, bytes of a row) in `type`, which is self.type, or Q4_1 for one of Q4_0."""
        q, scales, zeros, groups = self.unpack()
        n_rows, n_columns = q.shape
        if self.type == "requantize":
            return quantize_q8_0(self._read_float(0, n_rows))
        first = groups[::BLOCK]  # a block's group
        d = _f16_bytes(scales[:, first])
        q = q.reshape(n_rows, -1, BLOCK)
        if type == "Q8_0":
            return np.concatenate([d, (q.astype(np.int16) - 128).astype(np.int8).view(np.uint8)], axis=2).reshape(n_rows, -1)
        nibbles = q[:, :, :16] | (q[:, :, 16:] << 4)
        if type == "Q4_0":
            return np.concatenate([d, nibbles], axis=2).reshape(n_rows, -1)
        m = _f16_bytes(-scales[:, first] * zeros[:, first])
        return np.concatenate([d, m, nibbles], axis=2).reshape(n_rows, -1)


def _f16_bytes(values):
    """(rows, blocks) to uint8 (rows, blocks, 2)"""
    return np.ascontiguousarray(values, dtype="<f2").view(np.uint8).reshape(*values.shape, 2)


def quantize_q8_0(values):
    """F32 (rows, columns) to uint8 (rows, bytes of a row)."""
    return gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)


def read_settings(folder, config):
    """What config.json or the older separate files say about quantization; None for plain checkpoints."""
    settings = config.get("quantization_config")
    if not isinstance(settings, dict):
        for name, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
            if (folder / name).is_file():
                settings = dict(load_json(folder / name))
                settings.setdefault("quant_method", method)
                break
        else:
            return None
    method = str(settings.get("quant_method", "gptq")).lower()
    bits = settings.get("bits", settings.get("w_bit"))
    if method == "bitsandbytes":
        raise ConvertError("this checkpoint is quantized with bitsandbytes, whose formats have no counterpart in GGUF; convert the "
                           "original, unquantized model and use --quantize True")
    if method not in ("gptq", "awq"):
        raise ConvertError(f"this checkpoint is quantized with {method}, which is not supported; supported: gptq, awq. Convert the "
                           "original, unquantized model and use --quantize True")
    if bits not in ((4, 8) if method == "gptq" else (4,)):
        raise ConvertError(f"this checkpoint is quantized with {method} to {bits} bits; supported: "
                           f"{'4 and 8' if method == 'gptq' else '4'} bits")
    layout = str(settings.get("checkpoint_format") or settings.get("version") or method).lower()
    known = ("gptq", "gptq_v2") if method == "gptq" else ("awq", "gemm")
    if layout not in known:
        raise ConvertError(f"this {method} checkpoint is packed as {layout!r}; supported: {', '.join(known)}")
    return {"method": method, "bits": bits, "adds_one": method == "gptq" and layout != "gptq_v2"}


def unpack_checkpoint(tensors, settings):
    """Replaces the packed tensors of a checkpoint by PackedTensors named as the weight. Says what is not exact."""
    layers = sorted(name[: -len(".qweight")] for name in tensors if name.endswith(".qweight"))
    if not layers:
        raise ConvertError(f"config.json says that the checkpoint is quantized with {settings['method']}, but no tensor is packed")
    result = {name: tensor for name, tensor in tensors.items() if not name.endswith(SUFFIXES)}
    for layer in layers:
        result[layer + ".weight"] = _open_layer(layer, tensors, settings)
    packed = [result[layer + ".weight"] for layer in layers]
    anew = [tensor.name for tensor in packed if tensor.type == "requantize"]
    if anew:
        warn(f"quantized anew to Q8_0, because a block of 32 columns has several scales, or no block has its zero points "
             f"(act-order, 8 bit with zero points): {shorten(anew)}")
    counts = {kind: sum(tensor.type == kind for tensor in packed) for kind in ("Q4_0", "Q4_1", "Q8_0")}
    error = max(tensor.error for tensor in packed)
    say(f"{settings['method']}, {settings['bits']} bits, repacked: "
        + ", ".join(f"{n} tensors to {kind}" for kind, n in counts.items() if n)
        + (f"; largest deviation of a weight {error:.3g}" if error else "; exact"))
    return result


def _open_layer(layer, tensors, settings):
    def part(suffix):
        if layer + suffix not in tensors:
            raise ConvertError(f"the quantized layer {layer} lacks {layer + suffix}; fetch the checkpoint again")
        return tensors[layer + suffix]

    bits = settings["bits"]
    per_word = 32 // bits
    qweight, qzeros, scales = part(".qweight"), part(".qzeros"), part(".scales")
    is_gptq = settings["method"] == "gptq"
    if len(qweight.shape) != 2 or qweight.format != "I32" or qzeros.format != "I32":
        raise ConvertError(f"{layer}.qweight is {qweight.format} of shape {list(qweight.shape)}, but must be a matrix of I32")
    n_columns = qweight.shape[0] * (per_word if is_gptq else 1)
    n_rows = qweight.shape[1] * (1 if is_gptq else per_word)
    n_groups = scales.shape[0]
    _expect(layer + ".scales", scales.shape, (n_groups, n_rows))
    _expect(layer + ".qzeros", qzeros.shape, (n_groups, n_rows // per_word))
    if n_columns % BLOCK:
        raise ConvertError(f"{layer}: {n_columns} columns are no whole blocks of {BLOCK}")
    groups = np.arange(n_columns) // -(-n_columns // n_groups)
    if is_gptq and layer + ".g_idx" in tensors:
        _expect(layer + ".g_idx", tensors[layer + ".g_idx"].shape, (n_columns,))
        groups = tensors[layer + ".g_idx"].read().astype(np.int64)
        if groups.min() < 0 or groups.max() >= n_groups:
            raise ConvertError(f"{layer}.g_idx names group {groups.max()}, but scales has {n_groups}")
    order = None if is_gptq else AWQ_ORDER

    def read_scales():
        """scales and zeros, both (rows, groups); read anew each time, since those of all layers together are large"""
        zeros = _unpack_words(qzeros.read(), bits, order).astype(np.float32) + (1 if settings["adds_one"] else 0)
        return to_float32(scales.read(), scales.format).T, zeros.T

    def unpack():
        words = qweight.read()
        q = _unpack_words(words.T, bits, None) if is_gptq else _unpack_words(words, bits, order).T
        return np.ascontiguousarray(q), *read_scales(), groups

    scale_values, zero_values = read_scales()
    kind = _choose_type(bits, zero_values, groups)
    deviation = _deviation(layer, kind, bits, scale_values, zero_values)
    return PackedTensor(layer + ".weight", (n_rows, n_columns), kind, unpack, deviation)


def _choose_type(bits, zeros, groups):
    if (groups.reshape(-1, BLOCK) != groups[::BLOCK, None]).any():
        return "requantize"
    symmetric = bool((zeros == 1 << (bits - 1)).all())
    if bits == 8:
        return "Q8_0" if symmetric else "requantize"
    return "Q4_0" if symmetric else "Q4_1"


def _deviation(layer, kind, bits, scales, zeros):
    """The largest difference between a weight and its block's value, from rounding d and m to F16."""
    if kind == "requantize":
        return 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        d = np.abs(scales.astype(np.float16).astype(np.float32) - scales) * ((1 << bits) - 1)
        m = -scales * zeros
        m = np.abs(m.astype(np.float16).astype(np.float32) - m) if kind == "Q4_1" else 0
    worst = float((d + m).max())
    if not np.isfinite(worst):
        raise ConvertError(f"{layer}.scales holds values beyond F16's range; the checkpoint is damaged")
    return worst


def _unpack_words(words, bits, order):
    """int32 (n, k) to uint8 (n, k * 32 / bits), the lowest bits first, or in AWQ's order."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    values = (np.ascontiguousarray(words).view(np.uint32)[:, :, None] >> shifts) & np.uint32((1 << bits) - 1)
    values = values.astype(np.uint8)
    if order is not None:
        values = values[:, :, np.argsort(order)]
    return values.reshape(words.shape[0], -1)


def _expect(name, found, wanted):
    if tuple(found) != tuple(wanted):
        raise ConvertError(f"{name} has the shape {list(found)}, but {list(wanted)} was expected")
