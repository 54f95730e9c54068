#!/usr/bin/env python3
"""Checks ./deeptutor-eval kld against a Llama forward pass in numpy that knows nothing of our code: the StreamingLLM case.

usage: python3 python/eval/reference.py -m MODEL.gguf -f TEXT
                                        [--context 4096] [--continuation 256]
                                        [--chunks 4] [--kept 0.25,0.125]
                                        [--with numpy|kvpress]

The context is read whole; then every layer and head keeps the first 4 tokens and the newest ones, and the continuation is
teacher-forced on what is left, growing (kld --evict once --policy local_window). Weights are dequantized to float32; nothing is
rounded to half precision or bytes, so small differences to the program are expected: it computes with the file's quantized weights.
--with kvpress asks that library instead of numpy. Models of architecture llama without rope scaling. Tokens come from the tests'
ask_llama (libllama), which bash run.sh --test builds, or from --tokens, a JSON list. Where numpy or gguf is missing, .venv's Python
takes over.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from command_line import Parser  # noqa: E402
from eval.command import (ROOT, at_least_one, check_inputs, check_output, check_program, fail, go_on_in_venv,  # noqa: E402
                          run_program, stoppable, write_whole)

with stoppable():
    try:
        import gguf
        import numpy as np
    except ModuleNotFoundError as missing:
        go_on_in_venv(missing)

SINKS = 4
BLOCK = 128  # queries at a time


class KVPress:
    """The same measured with the library kvpress, where it is installed with torch (several GB): python3 -m pip install kvpress gguf."""

    def __init__(self, path):
        from kvpress import StreamingLLMPress  # first: it brings the others
        from transformers import AutoModelForCausalLM

        self.press = StreamingLLMPress
        folder, name = os.path.split(os.path.realpath(path))
        self.model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, attn_implementation="sdpa").float().eval()

    def log_probabilities(self, context, fed, n_keep):
        import torch
        from transformers import DynamicCache

        cache, at = DynamicCache(), torch.arange(len(context), len(context) + len(fed))[None]
        ratio = 1 - (n_keep + 0.5) / len(context) if n_keep < len(context) else 0.0  # it keeps the whole part of context x (1 - ratio)
        with torch.no_grad():
            with self.press(compression_ratio=ratio, n_sink=SINKS)(self.model):
                self.model.model(input_ids=torch.tensor([context.tolist()]), past_key_values=cache)
            assert cache.get_seq_length() == n_keep
            logits = self.model(input_ids=torch.tensor([fed.tolist()]), past_key_values=cache, position_ids=at).logits[0]
            return torch.log_softmax(logits.double(), -1).numpy()

    def measure(self, context, fed, keeps):
        return [self.log_probabilities(context, fed, n) for n in (len(context), *keeps)]


class Llama:
    """Rows of the residual stream through all layers, with a KV cache per layer that grows."""

    def __init__(self, path):
        reader = open_model(path)
        self.w = {t.name: gguf.dequantize(t.data, t.tensor_type).astype(np.float32) for t in reader.tensors}

        def number(key, default=None):
            field = reader.get_field("llama." + key)
            return default if field is None else field.parts[field.data[0]][0].item()
        architecture = reader.get_field("general.architecture")
        if (architecture is None or bytes(architecture.parts[-1]) != b"llama" or number("rope.scaling.factor")
                or "rope_freqs.weight" in self.w):
            fail("only architecture llama without rope scaling is computed here")
        if "token_embd.weight" not in self.w or f"blk.{number('block_count') - 1}.attn_k.weight" not in self.w:
            fail(f"{path} lacks weights; a model in parts has to be in one file here")
        self.n_layers, self.heads = number("block_count"), number("attention.head_count")
        self.kv_heads = number("attention.head_count_kv", self.heads)
        self.dim = number("attention.key_length", number("embedding_length") // self.heads)
        self.eps = number("attention.layer_norm_rms_epsilon")
        self.inverse = number("rope.freq_base", 10000.0) ** -(np.arange(0, self.dim, 2) / self.dim)
        self.out = self.w.get("output.weight", self.w["token_embd.weight"])

    def norm(self, x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * self.w[name + ".weight"]

    def rotate(self, x, positions):
        """x: (n, heads, dim); pairs of neighbours, as GGUF files of this architecture have them."""
        angles = (positions[:, None] * self.inverse[None])[:, None]
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        out = np.empty_like(x)
        out[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
        out[..., 1::2] = x[..., 1::2] * cos + x[..., 0::2] * sin
        return out

    def attend(self, q, k, v):
        """The queries' own keys are the last len(q); all before them are seen by every query. Key heads are [head][key][dim]."""
        n, group = len(q), self.heads // self.kv_heads
        out = np.empty_like(q)
        hidden = np.triu(np.full((n, n), -np.inf, np.float32), 1)
        for kv in range(self.kv_heads):
            for head in range(kv * group, (kv + 1) * group):
                scores = (q[:, head] * np.float32(self.dim ** -0.5)) @ k[kv].T
                scores[:, -n:] += hidden
                scores -= scores.max(-1, keepdims=True)
                np.exp(scores, out=scores)
                out[:, head] = scores @ v[kv] / scores.sum(-1, keepdims=True)
        return out.reshape(n, -1)

    def layer(self, x, i, positions, cache):
        """cache: (keys, values) before x, [KV head][token][dim]; returns x after the layer and the longer cache."""
        w, p, n = self.w, f"blk.{i}.", len(x)
        h = self.norm(x, p + "attn_norm")
        q, k, v = (h @ w[p + f"attn_{name}.weight"].T for name in "qkv")
        q, k = self.rotate(q.reshape(n, -1, self.dim), positions), self.rotate(k.reshape(n, -1, self.dim), positions)
        v = v.reshape(n, -1, self.dim)
        keys, values = (np.concatenate([old, new.swapaxes(0, 1)], 1) for old, new in zip(cache, (k, v)))
        x = x + self.attend(q, keys, values) @ w[p + "attn_output.weight"].T
        h = self.norm(x, p + "ffn_norm")
        gate = h @ w[p + "ffn_gate.weight"].T
        return x + (gate / (1 + np.exp(-gate)) * (h @ w[p + "ffn_up.weight"].T)) @ w[p + "ffn_down.weight"].T, (keys, values)

    def read(self, tokens, first, caches, logits=False):
        """Tokens at positions from `first` on; caches: of each layer, replaced in place."""
        x, positions = self.w["token_embd.weight"][tokens], np.arange(first, first + len(tokens))
        for i in range(self.n_layers):
            x, caches[i] = self.layer(x, i, positions, caches[i])
        if logits:
            logits = self.norm(x, "output_norm") @ self.out.T
            logits -= logits.max(-1, keepdims=True)
            return logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return None

    def measure(self, context, fed, keeps):
        """Log probabilities after each of the fed tokens: of the full cache, then for each of keeps."""
        caches = self.empty()
        for first in range(0, len(context), BLOCK):
            self.read(context[first:first + BLOCK], first, caches)
        return [self.read(fed, len(context), [cut(cache, n) for cache in caches], logits=True) for n in (len(context), *keeps)]

    def empty(self):
        none = np.empty((self.kv_heads, 0, self.dim), np.float32)
        return [(none, none)] * self.n_layers


def cut(cache, n_keep):
    """What StreamingLLM keeps of a layer: the first tokens and the newest, n_keep in all."""
    n = cache[0].shape[1]
    rows = np.arange(n) if n <= n_keep else np.r_[:SINKS, n - (n_keep - SINKS):n]
    return tuple(part[:, rows] for part in cache)


def measure_piece(model, tokens, n_context, keeps):
    """(KLD, top-1, NLL, NLL of the full cache) for each of keeps; tokens: context, continuation, one more."""
    fed, following = tokens[n_context:-1], tokens[n_context + 1:]
    full, *others = model.measure(tokens[:n_context], fed, keeps)
    rows = []
    for evicted in others:
        place = np.arange(len(fed))
        rows.append([(np.exp(full) * (full - evicted)).sum(-1).mean(), (full.argmax(-1) == evicted.argmax(-1)).mean(),
                     -evicted[place, following].mean(), -full[place, following].mean()])
    return np.array(rows, np.float64)


def open_model(path):
    try:
        return gguf.GGUFReader(path)
    except Exception as error:  # the package raises whatever it stumbles over in a broken file
        fail(f"{path} is not a whole GGUF model: {type(error).__name__}: {error}")


def start_token(path):
    field = open_model(path).get_field("tokenizer.ggml.bos_token_id")
    return None if field is None else field.parts[field.data[0]][0].item()


def vocabulary_size(path):
    return next(int(t.shape[-1]) for t in open_model(path).tensors if t.name == "token_embd.weight")


def tokenize(args):
    """Token ids of the text, as the program reads it: marks are plain text, and nothing is put in front."""
    if args.tokens:
        try:
            tokens = json.loads(pathlib.Path(args.tokens).read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            tokens = None
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            fail(f"{args.tokens} is no JSON list of token ids")
        size = vocabulary_size(args.model)
        wrong = next((token for token in tokens if not 0 <= token < size), None)
        if wrong is not None:
            fail(f"{args.tokens} holds {wrong}, and {args.model} has the tokens 0 to {size - 1}; give ids of this model")
        return tokens
    with open(args.file, "rb") as file:
        done = subprocess.run([args.ask_llama, args.model, "tokens", "--plain"], stdin=file, capture_output=True, text=True)
    if done.returncode != 0:
        fail(f"{args.ask_llama} failed: {done.stderr[-500:]}", 1)
    tokens = json.loads(done.stdout)
    return tokens[1:] if tokens[:1] == [start_token(args.model)] else tokens


def measure_ours(args):
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "kld.json")
        run_program([args.program, "kld", "-m", args.model, "-f", args.file, "--context", args.context, "--continuation",
                     args.continuation, "--chunks", args.chunks, "--policy", "local_window", "--evict", "once",
                     "--kept", ",".join(map(str, args.kept)), "--json", out], stdout=subprocess.DEVNULL)
        result = json.loads(pathlib.Path(out).read_text())
    return [[[c["kld"], c["top1"], c["nll"], c["nll_full"]] for c in row["chunks"]] for row in result.get("settings", [result])]


def check(args):
    inputs = [args.model, args.file, *([args.tokens] if args.tokens else [])]
    check_inputs(inputs)
    check_program(args.program, "bash run.sh")
    if not args.tokens:
        check_program(args.ask_llama, "bash run.sh --test")
    if args.json:
        check_output(args.json, inputs)


def shares(text):
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < share <= 1 for share in found):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of shares above 0 and up to 1, such as 0.25,0.125")
    return found


def main(argv=None):
    parser = Parser(usage=__doc__.split("\n\n")[1][len("usage: "):], description=__doc__.split("\n\n")[2])
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-f", "--file", required=True)
    parser.add_argument("--context", type=at_least_one, default=4096)
    parser.add_argument("--continuation", type=at_least_one, default=256)
    parser.add_argument("--chunks", type=at_least_one, default=4)
    parser.add_argument("--kept", default="0.25,0.125", type=shares)
    parser.add_argument("--with", dest="engine", choices=["numpy", "kvpress"], default="numpy", help="what to compare with (numpy)")
    parser.add_argument("--tokens", help="the text's token ids, a JSON list")
    parser.add_argument("--ask-llama", default=str(ROOT / "build/tests/ask_llama"))
    parser.add_argument("--program", default=str(ROOT / "deeptutor-eval"))
    parser.add_argument("--json", help="write both sides' numbers there")
    args = parser.parse_args(argv)
    check(args)
    try:
        model = {"numpy": Llama, "kvpress": KVPress}[args.engine](args.model)
    except ModuleNotFoundError as error:
        go_on_in_venv(error, is_made_with=False)
    tokens, size = tokenize(args), args.context + args.continuation + 1
    if len(tokens) < size * args.chunks:
        fail(f"{args.chunks} pieces need {size * args.chunks} tokens; the text has {len(tokens)}")
    ours, pieces = np.array(measure_ours(args)), []
    for i in range(args.chunks):
        pieces.append(measure_piece(model, np.array(tokens[i * size:(i + 1) * size]), args.context,
                                    [int(share * args.context) for share in args.kept]))
        print(f"piece {i + 1} of {args.chunks}", file=sys.stderr)
    theirs = np.stack(pieces, 1)  # [kept][piece][number]
    print("| kept | piece | KLD | ours | ratio | top-1 | ours | NLL full | ours |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for share, a, b in zip(args.kept, theirs, ours):
        for name, x, y in [*((str(i + 1), a[i], b[i]) for i in range(args.chunks)), ("mean", a.mean(0), b.mean(0))]:
            print(f"| {share} | {name} | {x[0]:.4f} | {y[0]:.4f} | {y[0] / x[0]:.3f} | {x[1]:.3f} | {y[1]:.3f} "
                  f"| {x[3]:.4f} | {y[3]:.4f} |")
    if args.json:
        write_whole(args.json, json.dumps({"kept": args.kept, "theirs": theirs.tolist(), "ours": ours.tolist()}))


if __name__ == "__main__":
    with stoppable():
        main()
