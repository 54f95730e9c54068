#!/usr/bin/env python3
"""Predicts speed and cache size of a model on a device, with TLC off and on, from bytes and operations per token (docs/scaling.md).

    .venv/bin/python python/plan.py --model model.gguf --context 16384 --device 4090 --preset docqa

Decoding is bound by memory: a token reads every matrix once and every key and value that attention sees. Reading a prompt is bound by
arithmetic: two operations per weight and token, four per head, dimension and visible key. Both are shares of what the device could do
at best; the speed-up of decoding is a ratio of bytes and does not depend on the device at all.
"""
import argparse
import re
import sys

from calibration import calibration_of
from command_line import Parser

# read bandwidth in GB/s, dense half-precision TFLOPS with sums in floats, from the vendors' data sheets
DEVICES = {"a100": (1555, 312), "4090": (1008, 165), "3090": (936, 71), "m2ultra": (800, 27)}
DECODE_SHARE = 0.8   # of the bandwidth, which good kernels reach
PREFILL_SHARE = 0.4  # of the arithmetic
CHUNK = 512
LEAST_CHUNK = 32     # tokens that must fit beside the kept ones for a conversation to go past its context, as main asks
PRESETS = {"chat": (2048, 4096), "docqa": (4096, 8192), "code": (4096, 4096), "summary": (3072, 6144)}  # shallow, deep


class Refused(Exception):
    """The text says what is wrong with the file."""


class Model:
    """What of a GGUF model speed depends on. readers: of its parts; what it is, the first says."""

    def __init__(self, readers):
        reader, tensors = readers[0], [t for part in readers for t in part.tensors]
        arch = self.value(reader, "general.architecture")

        def key(name, default=None):
            return self.value(reader, f"{arch}.{name}", default)
        self.layers, self.heads = int(key("block_count")), int(key("attention.head_count"))
        self.context = int(key("context_length", 0))
        kv_heads = key("attention.head_count_kv", self.heads)
        self.kv_heads = [int(n) for n in kv_heads] if isinstance(kv_heads, list) else [int(kv_heads)] * self.layers
        self.dim_k = int(key("attention.key_length", int(key("embedding_length")) // self.heads))
        self.dim_v = int(key("attention.value_length", self.dim_k))
        experts, used = int(key("expert_count", 0)), int(key("expert_used_count", 0))
        tied = all(t.name != "output.weight" for t in tensors)
        self.step_bytes = self.step_weights = 0.0
        for t in tensors:
            if len(t.shape) < 2 or (t.name == "token_embd.weight" and not tied):
                continue
            share = used / experts if experts and "_exps" in t.name else 1.0
            self.step_bytes += share * float(t.n_bytes)
            self.step_weights += share * float(t.n_elements)

    @staticmethod
    def value(reader, name, default=None):
        field = reader.fields.get(name)
        return default if field is None else field.contents()


def split_of(reader):
    """(which part of a split model this is, from 0, of how many)"""
    return int(Model.value(reader, "split.no", 0)), int(Model.value(reader, "split.count", 1))


def read_parts(path, read):
    """Readers of the file, or of all parts of the split model of which it is the first."""
    first = read(path)
    no, count = split_of(first)
    if count <= 1:
        return [first]
    last = f"-of-{count:05d}.gguf"
    if no != 0:
        start = re.sub(r"-\d{5}-of-\d{5}\.gguf$", "", path)
        raise Refused(f"is part {no + 1} of {count} of a split model; name the first, {start}-00001{last}")
    if not path.endswith("-00001" + last):
        raise Refused(f"is the first of {count} parts of a split model, but its name does not end in -00001{last}, by which the others "
                      "are found; name the parts as they were")
    readers, start = [first], path[:-len("-00001" + last)]
    for i in range(1, count):
        part = f"{start}-{i + 1:05d}{last}"
        try:
            readers.append(read(part))
        except FileNotFoundError:
            raise Refused(f"is the first of {count} parts of a split model, and {part} is missing; put it beside the first") from None
        if split_of(readers[-1]) != (i, count):
            raise Refused(f"is the first of {count} parts of a split model, but {part} does not say that it is part {i + 1} of them; "
                          "fetch or split the model again")
    return readers


def read_model(path):
    """Ends the program with a sentence where there is no model to read."""
    try:
        import gguf
    except ImportError:
        sys.exit("plan.py: Python's package gguf is missing: pip install -r requirements.txt, or use .venv, which bash run.sh --test makes")
    try:
        return Model(read_parts(path, gguf.GGUFReader))
    except Refused as error:
        sys.exit(f"plan.py: {path} {error}")
    except OSError as error:
        sys.exit(f"plan.py: {error.filename or path}: {error.strerror or error}")
    except Exception as error:  # the package raises whatever it stumbles over in a broken file
        sys.exit(f"plan.py: {path} is not a whole GGUF model: {type(error).__name__}: {error}")


def positive(text, kind=float):
    value = kind(text)
    if not 0 < value < 1e12:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0 and below 1e12")
    return value


def tokens(text):
    return positive(text, int)


def device(name):
    if name.lower() not in DEVICES:
        raise argparse.ArgumentTypeError(f"no data sheet of {name} is known here, only of {', '.join(sorted(DEVICES))}; in place of "
                                         "--device give --bandwidth and --tflops, from its own")
    return name.lower()


def budgets(model, args):
    """Tokens that each layer keeps: where calibration shares a preset's out, their average."""
    if args.max_cache_size:
        return [args.max_cache_size] * model.layers
    kept = preset_budgets(model, args)
    learned = calibration_of(args.model)
    if learned is None:
        return kept
    average = sum(kept) // model.layers
    print(f"plan.py: the preset's tokens are shared out by {learned}, {average} a layer on average", file=sys.stderr)
    return [average] * model.layers


def preset_budgets(model, args):
    """The same as the preset has it, without what was learned."""
    shallow, deep = PRESETS[args.preset]
    n_shallow = model.layers // 2
    if args.preset == "docqa":
        n_shallow = max(min(n_shallow, model.layers - 8), 0)
    return [shallow] * n_shallow + [deep] * (model.layers - n_shallow)


def kv_bytes(model, lengths, number_bytes):
    return sum(n * heads * (model.dim_k + model.dim_v) * number_bytes for n, heads in zip(lengths, model.kv_heads))


def attention_operations(model, context, most):
    """Of reading a prompt of `context` tokens, when a layer never has more than most[i] of them."""
    total = 0.0
    for limit in most:
        seen = context * context / 2 if limit >= context else limit * limit / 2 + (context - limit) * limit
        total += 2.0 * model.heads * (model.dim_k + model.dim_v) * seen
    return total


def predict(model, args, limits):
    bandwidth, tflops = args.bandwidth * 1e9 * DECODE_SHARE, (args.tflops or 0) * 1e12 * PREFILL_SHARE
    kept = [min(args.context, n) for n in limits]
    cache = kv_bytes(model, kept, args.number_bytes)
    operations = 2.0 * model.step_weights * args.context + attention_operations(model, args.context, [n + CHUNK for n in limits])
    return {"kv_mib": cache / 2**20, "decode": bandwidth / (model.step_bytes + cache), "prefill": args.context * tflops / operations,
            "step_mib": (model.step_bytes + cache) / 2**20}


def main():
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("-m", "--model", required=True, help="GGUF file; of a split model, the first")
    parser.add_argument("--context", type=tokens, required=True, metavar="N", help="tokens in the conversation")
    parser.add_argument("--device", type=device, metavar="NAME",
                        help=f"one whose data sheet is known: {', '.join(sorted(DEVICES))}")
    parser.add_argument("--bandwidth", type=positive, metavar="GB/S",
                        help="what the device reads a second, in place of the data sheet's (deeptutor-bench measures this machine's)")
    parser.add_argument("--tflops", type=positive, metavar="N", help="its dense half-precision TFLOPS, likewise; without them "
                        "reading a prompt is left out")
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument("--preset", choices=sorted(PRESETS), default="docqa", help="budgets with TLC on (docqa)")
    limit.add_argument("--max-cache-size", type=tokens, metavar="N", help="instead: tokens that every layer keeps")
    parser.add_argument("--kv-type", choices=("f16", "int8"), default="f16", help="numbers of the cache (f16)")
    args = parser.parse_args()
    if args.device:
        args.bandwidth, args.tflops = args.bandwidth or DEVICES[args.device][0], args.tflops or DEVICES[args.device][1]
    if not args.bandwidth:
        parser.error("name a --device, or give --bandwidth (and --tflops)")
    args.number_bytes = 2.0 if args.kv_type == "f16" else 1.06
    model = read_model(args.model)
    too_long = 0 < model.context < args.context
    kept = budgets(model, args)
    too_large = too_long and max(kept) + LEAST_CHUNK > model.context
    if too_large:
        print(f"plan.py: this model was trained for {model.context} tokens, and longer conversations need budgets that leave room in "
              f"them, such as --max-cache-size {max(model.context // 2, 1)} (docs/memory.md), so neither with TLC nor without is there "
              "such a run, and only sizes are shown", file=sys.stderr)
    elif too_long:
        print(f"plan.py: this model was trained for {model.context} tokens; longer conversations need TLC in every layer "
              "(docs/memory.md), so with TLC off there is no such run, and only its size is shown", file=sys.stderr)
    off, on = predict(model, args, [args.context] * model.layers), predict(model, args, kept)
    arithmetic = f", {args.tflops:g} TFLOPS x {PREFILL_SHARE}" if args.tflops else ""
    print(f"{args.context} tokens, {args.bandwidth:.0f} GB/s x {DECODE_SHARE}{arithmetic}")
    print(f"{'':24}{'TLC off':>12}{'TLC on':>12}{'ratio':>8}")
    for name, title, ratio in (("kv_mib", "KV cache, MiB", on["kv_mib"] / off["kv_mib"]),
                               ("step_mib", "read per token, MiB", on["step_mib"] / off["step_mib"]),
                               ("decode", "decoding, tokens/s", on["decode"] / off["decode"]),
                               *([("prefill", "reading a prompt, t/s", on["prefill"] / off["prefill"])] if args.tflops else [])):
        if too_long and name in ("decode", "prefill"):
            print(f"{title:24}{'-':>12}" + (f"{'-':>12}" if too_large else f"{on[name]:12.1f}"))
        else:
            print(f"{title:24}{off[name]:12.1f}{on[name]:12.1f}{ratio:8.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
