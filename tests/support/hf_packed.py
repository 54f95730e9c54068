"""GPTQ and AWQ layers made from seeds, packed as AutoGPTQ and AutoAWQ pack them, and unpacked again value for value.

Packing and unpacking are loops over single numbers, written after the formats' descriptions and not after the converter.
"""
import numpy as np

AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # nibble of an int32 in which column j of eight lies


def words(values, bits, places=None):
    """(n, k) small integers to int32 (n, k * bits / 32), packed along the second dimension."""
    per_word = 32 // bits
    out = np.zeros((values.shape[0], values.shape[1] // per_word), np.uint64)
    for j in range(per_word):
        place = j if places is None else places[j]
        out |= values[:, j::per_word].astype(np.uint64) << np.uint64(place * bits)
    return out.astype(np.uint32).view(np.int32)


class Layer:
    """q (rows, columns), zero and scale (groups, rows), group of each column."""

    def __init__(self, rows, columns, random, bits=4, group=32, symmetric=True, act_order=False, zero_of=None):
        self.bits = bits
        group = columns if group == -1 else group
        n_groups = columns // group
        self.q = random.integers(0, 1 << bits, (rows, columns))
        self.scale = (random.uniform(0.5, 1.5, (n_groups, rows)) * 0.2 / (1 << bits)).astype(np.float16)
        self.zero = np.full((n_groups, rows), 1 << (bits - 1)) if symmetric else random.integers(1, 1 << bits, (n_groups, rows))
        if zero_of is not None:
            self.zero[:] = zero_of
        self.group = np.arange(columns) // group
        if act_order:
            self.group = random.permutation(self.group)

    def weight(self):
        """(rows, columns), F64, exact"""
        scale, zero = self.scale.astype(np.float64)[self.group].T, self.zero[self.group].T
        return scale * (self.q - zero)

    def gptq(self, version=1):
        """Tensors by suffix."""
        stored = self.zero - (1 if version == 1 else 0)
        return {"qweight": words(self.q, self.bits).T.copy(), "qzeros": words(stored, self.bits), "scales": self.scale,
                "g_idx": self.group.astype(np.int32)}

    def awq(self):
        return {"qweight": words(self.q.T.copy(), 4, AWQ_PLACES), "qzeros": words(self.zero, 4, AWQ_PLACES), "scales": self.scale}


def entries_of(name, tensors):
    formats = {np.dtype(np.int32): "I32", np.dtype(np.float16): "F16", np.dtype(np.float32): "F32"}
    return {f"{name}.{suffix}": (formats[value.dtype], value.shape, np.ascontiguousarray(value).tobytes())
            for suffix, value in tensors.items()}


def from_blocks(data, type, shape):
    """The values of ggml's blocks, one number after the other, F64."""
    data = np.frombuffer(data, np.uint8)
    out = np.empty(int(np.prod(shape)))
    n_bytes = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[type]
    for b, block in enumerate(data.reshape(-1, n_bytes)):
        d = float(block[:2].view(np.float16)[0])
        m = float(block[2:4].view(np.float16)[0]) if type == "Q4_1" else 0.0
        rest = block[4 if type == "Q4_1" else 2:]
        for j in range(32):
            if type == "Q8_0":
                q = int(rest[j].view(np.int8))
            else:
                q = int(rest[j % 16]) >> (4 if j >= 16 else 0) & 15
                q -= 8 if type == "Q4_0" else 0
            out[b * 32 + j] = d * q + m
    return out.reshape(shape)
