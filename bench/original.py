#!/usr/bin/env python3
"""The table that such programs are usually sold with, made honestly: one fixed prompt, 512 tokens, eviction off and on.

usage: python3 bench/original.py [--shapes llama2-7b,llama2-13b,qwen-7b,chatglm2-6b,smollm2] [-t 2] [-r 1] [--no-llama] [-o FOLDER]

For each shape: llama.cpp, then DeepTutor with TLC off, with preset docqa, and with 1,024 tokens in every layer; the prompt is
always read for real. Weights are random (made by the tests' make_model at the real shape, Q4_0) except smollm2's, for which the KL
divergence of each row stands beside its speed. Ratios against llama.cpp and against our own full cache, and for each row of ours
the speed that reading weights and cache once a token allows (at the read bandwidth of its own run) and how much of it was reached.
A prompt whose full cache does not fit the memory is shortened, and the table says so; what can't fit at all is left out.

Needs `bash run.sh --test` once (programs and make_model). Before each shape it probes for seconds and says how long it will take.
Writes FOLDER/original-tN.md and .csv (default FOLDER: bench/results/<processor>) after every shape; a shape that is in the CSV
already is measured again. What was measured of a shape when a run was broken off is kept beside the models, and the same command goes
on behind it. --shapes tiny is for trying it out: under a minute.
"""

import argparse
import csv
import fcntl
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import peers  # noqa: E402
from peers import ROOT, check_output, csv_text, parser_of, refuse, replace_file, run, say, until_ctrl_c, whole, write_file  # noqa: E402

REAL_MODEL = ROOT / "models/SmolLM2-135M-Instruct.Q4_1.gguf"
SPARE_BYTES = 2 << 30  # for the compute buffers, the program, the system


@dataclass
class Shape:
    """make: options of make_model, None for a real model. prompt, decode: tokens. kv_bytes: of a token in the F16 cache.
    kld_context: tokens of the quality rows, 0 = none."""
    make: list
    prompt: int
    kv_bytes: int
    decode: int = 512
    budget: int = 1024
    kld_context: int = 0


def random_shape(layers, embd, heads, kv_heads, ff, vocab, prompt, arch="llama", **more):
    head = embd // heads
    make = ["--layers", layers, "--embd", embd, "--heads", heads, "--kv-heads", kv_heads, "--head-dim", head, "--ff", ff, "--vocab",
            vocab, "--ctx", 32768, "--type", "q4_0", "--rope-base", 10000, "--no-tokenizer", "--arch", arch]
    return Shape(make, prompt, layers * kv_heads * 2 * head * 2, **more)


SHAPES = {
    "llama2-7b": random_shape(32, 4096, 32, 32, 11008, 32000, 8192),
    "llama2-13b": random_shape(40, 5120, 40, 40, 13824, 32000, 16384),
    "qwen-7b": random_shape(32, 4096, 32, 32, 11008, 151936, 8192, "qwen"),
    "chatglm2-6b": random_shape(28, 4096, 32, 2, 13696, 65024, 8192, "chatglm"),
    "smollm2": Shape(None, 6144, 30 * 3 * 2 * 64 * 2, kld_context=6144),
    "tiny": random_shape(4, 256, 4, 4, 512, 2048, 512, decode=32, budget=128),
}


# ---- memory and time ----

def available_bytes():
    try:
        with open("/proc/meminfo", encoding="utf-8") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None


def fit_prompt(shape, model_bytes):
    """Tokens of prompt, at most the shape's, whose full cache fits; 0: not even 2,048."""
    memory = available_bytes()
    if memory is None:
        return shape.prompt
    per_token = shape.kv_bytes * 1.04  # and what scores need beside keys and values
    room = (memory - SPARE_BYTES - model_bytes) / per_token - shape.decode
    return shape.prompt if room >= shape.prompt else int(room) // 1024 * 1024 if room >= 2048 else 0


def clock(seconds):
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


# ---- engines ----

def measure_ours(args, model, prompt, decode, flags):
    command = [args.bench, "-m", model, "-t", args.threads, "-d", prompt, "-p", 0, "-n", decode, "-r", 1, "-o", "json", *flags]
    rows = {row["test"]: row for row in json.loads(run(command, "deeptutor-bench"))["rows"]}
    return {"prompt": rows["prompt"]["tps"], "decode": rows["decode"]["tps"], "bound": rows["decode"]["bound_tps"],
            "kv_bytes": rows["decode"]["kv_bytes"], "kv_bytes_full": rows["decode"]["kv_bytes_full"],
            "eviction_share": rows["decode"]["eviction_share"]}


def measure_llama_with(bench, args, model, fa, prompt, decode):
    """One run that reads the prompt and goes on; --progress tells when reading ends. (-n after -d would read the prompt for itself,
    and keep a copy of its cache.)"""
    command = [bench, "-m", model, "-t", args.threads, "-fa", fa, "-r", 1, "-o", "json", "-p", 0, "-n", 0, "-pg", f"{prompt},{decode}",
               "--no-warmup", "--progress"]
    begun, told = {}, []
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace") as program:
        try:
            for line in program.stderr:
                told.append(line)
                for phase in ("prompt run", "generation run"):
                    if phase in line and "warmup" not in line:
                        begun[phase] = time.monotonic()
            rows = program.stdout.read()
        except BaseException:
            program.kill()
            raise
    if program.returncode != 0 or len(begun) != 2:
        sys.exit(f"llama-bench failed: {' '.join(map(str, command))}\n{''.join(told)[-2000:]}")
    reading = begun["generation run"] - begun["prompt run"]
    return {"prompt": prompt / reading, "decode": decode / (json.loads(rows)[0]["avg_ns"] / 1e9 - reading)}


def measure_llama(bench, args, model, prompt, decode):
    """With flash attention off or on, whichever is faster after a quarter of the prompt or 2,048 tokens: reading and decoding each with
    its own."""
    probed = min(prompt // 4, 2048)
    best = {"prompt": args.flash_attention[0], "decode": args.flash_attention[0]}
    if len(args.flash_attention) > 1:
        probes = {fa: measure_llama_with(bench, args, model, fa, probed, min(decode, 16)) for fa in args.flash_attention}
        best = {test: max(probes, key=lambda fa: probes[fa][test]) for test in best}
        for fa, values in probes.items():
            say(f"    -fa {fa} after {probed}: prompt {values['prompt']:.1f} t/s, decode {values['decode']:.2f} t/s")
    runs = {fa: measure_llama_with(bench, args, model, fa, prompt, decode if fa == best["decode"] else 1) for fa in set(best.values())}
    return {test: runs[fa][test] for test, fa in best.items()}


def eviction_rows(shape):
    return {"TLC off": [], "TLC docqa": ["--cache-eviction", "--eviction-preset", "docqa"],
            f"TLC {shape.budget:,}": ["--cache-eviction", "--max-cache-size", shape.budget]}


def measure_kld(args, model, shape):
    """KL divergence of each row of ours, with eviction as in serving; the full cache's is 0 by definition."""
    values = {"TLC off": (0.0, 1.0)}
    for name, flags in eviction_rows(shape).items():
        if flags:
            out = args.scratch / "kld.json"
            run([args.eval, "kld", "-m", model, "-t", args.threads, "-f", args.text, "--context", shape.kld_context, "--chunks",
                 1, *flags[1:], "--json", out], "deeptutor-eval")
            numbers = json.loads(out.read_text())
            values[name] = numbers["kld"], numbers["top1"]
    return values


# ---- one shape ----

def make_model(args, name, shape):
    if shape.make is None:
        return REAL_MODEL
    path = args.scratch / f"{name}.gguf"
    if not path.exists():
        say(f"{name}: writing random weights")
        part = path.with_suffix(".part.gguf")
        run([args.make_model, part, *shape.make], "make_model")
        part.rename(path)
    return path


def estimate(args, bench, model, prompt, shape, engines):
    """Seconds, from short probes: reading grows with the prompt's square where attention is what counts, so this is a floor."""
    probe = measure_ours(args, model, min(prompt, 256), 8, [])
    ours = prompt / probe["prompt"] + shape.decode / probe["decode"]
    seconds = ours * 1.5 * (engines - bool(bench))
    if bench:
        probe = measure_llama_with(bench, args, model, args.flash_attention[0], min(prompt, 256), 8)
        probes = len(args.flash_attention) / 4 if len(args.flash_attention) > 1 else 0
        seconds += (1 + probes) * prompt / probe["prompt"] * 1.5 + shape.decode / probe["decode"] * 2
    return seconds * args.rounds


def stamp(path):
    """What tells this file from another one of its name; None: there is none."""
    try:
        stat = os.stat(path)
        return [os.path.abspath(path), stat.st_size, stat.st_mtime_ns]
    except OSError:
        return None


def lock(scratch):
    """Until this process ends: two runs would remove each other's models, and measure each other. The file stays, so that all
    lock the same one."""
    path = scratch / "original.lock"
    try:
        file = open(path, "a+", encoding="utf-8")  # pylint: disable=consider-using-with
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            other = file.read().strip() or "unknown"
            refuse(f"{scratch} is in use by another original.py, process {other}; wait until it ends, or name another folder with "
                   "--scratch")
        except OSError:  # a file system without locks
            pass
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
    except OSError as error:
        refuse(f"{path} can't be written: {error.strerror}; free some space, or name another folder with --scratch")
    return file


def lock_results(folder):
    """Likewise: each run writes all rows of the table as it found it, and would take away what another has added since. The folder
    itself is locked, where nothing is to be left."""
    try:
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        refuse(f"another original.py writes its results into {folder}; wait until it ends, or name another folder with -o")
    except OSError:  # a file system without locks
        pass


class Journal:
    """What was measured of a shape, kept on disk until all of it is: hours of measuring survive a run that is broken off."""

    def __init__(self, path, what):
        """what: all that the numbers depend on; what was written for something else is of no use."""
        self.path, self.content = path, {"what": what, "prompt": None, "rows": {}}
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["what"] == what and content["prompt"] > 0 and content["rows"]:
                self.content = content
        except (OSError, ValueError, LookupError, TypeError):
            pass

    def row(self, name, measure):
        """The row of this name, measured where it is not there yet."""
        if name not in self.content["rows"]:
            self.content["rows"][name] = measure()
            try:
                replace_file(self.path, json.dumps(self.content))
            except OSError as error:  # the measurement itself is fine
                say(f"{self.path} can't be written: {error.strerror}; a run that is broken off now begins this shape anew")
        return self.content["rows"][name]


def remove(paths):
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            say(f"{path} can't be removed: {error.strerror}")


def measure_shape(args, bench, name, shape):
    """The rows, None where it can't fit; and the files that are of no use once the rows are kept elsewhere."""
    model = make_model(args, name, shape)
    rows = eviction_rows(shape)
    files = [args.bench, *([bench] if bench else []), model.with_suffix(".tlc.json"), *([model] if shape.make is None else []),
             *([args.eval, args.text] if shape.kld_context else [])]
    journal = Journal(args.scratch / f"{name}.journal",
                      [peers.processor_name(), args.threads, args.flash_attention, shape.make, shape.prompt,
                       [stamp(file) for file in files]])
    prompt = journal.content["prompt"] or fit_prompt(shape, os.path.getsize(model))
    if prompt == 0:
        say(f"{name}: left out, its weights and 2,048 tokens of cache don't fit this machine's memory")
        return None, []
    seconds = estimate(args, bench, model, prompt, shape, len(rows) + bool(bench))
    until = time.strftime("%H:%M", time.localtime(time.time() + seconds))
    say(f"{name}: prompt {prompt}{' (shortened: memory)' if prompt < shape.prompt else ''}, "
        f"{args.rounds} round{'s' * (args.rounds > 1)}, at least {clock(seconds)}, about until {until}"
        + (f"; measured already: {', '.join(journal.content['rows'])}" if journal.content["rows"] else ""))
    journal.content["prompt"] = prompt
    samples = {}
    for turn in range(args.rounds):
        engines = {**({"llama.cpp": None} if bench else {}), **rows}
        for engine, flags in engines.items():
            start = time.time()
            if flags is None:
                measure = functools.partial(measure_llama, bench, args, model, prompt, shape.decode)
            else:
                measure = functools.partial(measure_ours, args, model, prompt, shape.decode, [*flags, "--no-compare"] if flags else [])
            values = journal.row(f"{engine} {turn + 1}", measure)
            for key, value in values.items():
                samples.setdefault((engine, key), []).append(value)
            say(f"  round {turn + 1}/{args.rounds}  {engine}: prompt {values['prompt']:.1f} t/s, decode {values['decode']:.2f} "
                f"t/s  ({clock(time.time() - start)})")
    kld = journal.row("KLD", lambda: measure_kld(args, model, shape)) if shape.kld_context else {}
    result = []
    for engine in dict.fromkeys(engine for engine, _ in samples):
        row = {"shape": name, "prompt_tokens": prompt, "decode_tokens": shape.decode, "engine": engine, "rounds": args.rounds}
        for key in ("prompt", "decode", "bound", "kv_bytes", "kv_bytes_full"):
            values = samples.get((engine, key))
            row[key] = statistics.median(values) if values else None
            if key in ("prompt", "decode") and values:
                row[f"{key}_low"], row[f"{key}_high"] = min(values), max(values)
        row["kld"], row["top1"] = kld.get(engine, (None, None))
        row["shortened_from"] = shape.prompt if prompt < shape.prompt else None
        result.append(row)
    return result, [*([model] if shape.make is not None and not args.keep else []), journal.path]


# ---- results ----

FIELDS = ["shape", "engine", "prompt_tokens", "shortened_from", "decode_tokens", "rounds", "prompt", "prompt_low", "prompt_high",
          "decode", "decode_low", "decode_high", "bound", "kv_bytes", "kv_bytes_full", "kld", "top1"]


def read_rows(path):
    """Rows of an earlier run, by shape, so that shapes can be measured one at a time."""
    if not path.exists():
        return {}
    shapes, needed = {}, ("prompt_tokens", "rounds", "prompt", "decode")
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            whole = reader.fieldnames is None or {"shape", "engine", *needed} <= set(reader.fieldnames)
            for row in reader if whole else ():
                for key in FIELDS[2:]:
                    row[key] = float(row[key]) if row.get(key) or key in needed else None
                shapes.setdefault(row["shape"], []).append(row)
        whole = whole and all("TLC off" in [row["engine"] for row in rows] for rows in shapes.values())
    except (OSError, ValueError, LookupError, TypeError, csv.Error):
        whole = False
    if not whole:
        refuse(f"{path} is no table of an earlier run; move it away, or name another folder with -o")
    return shapes


def speed(row, key, digits):
    text = f"{row[key]:.{digits}f}"
    low, high = row.get(f"{key}_low"), row.get(f"{key}_high")
    return f"{text} ({low:.{digits}f}-{high:.{digits}f})" if row["rounds"] > 1 else text


def ratio(row, base, key):
    return f"{row[key] / base[key]:.2f}x" if base and base is not row and base[key] else ""


def table(shapes, args):
    lines = [f"# A fixed prompt, then 512 tokens: {peers.processor_name()}", "",
             f"{args.threads} threads; {time.strftime('%Y-%m-%d')}. Random weights (Q4_0) except smollm2; tokens per second, "
             "medians (lowest-highest where there were rounds). Bound: the decode speed that reading weights and cache once a token "
             "allows at the memory bandwidth measured in that run.", ""]
    head = ["shape", "prompt", "engine", "reading", "vs llama.cpp", "vs full", "decoding", "vs llama.cpp", "vs full", "KV MiB",
            "bound", "reached"]
    has_kld = any(row["kld"] is not None for rows in shapes.values() for row in rows)
    head += ["KLD", "top-1"] if has_kld else []
    lines += ["| " + " | ".join(head) + " |", "| --- | ---: | --- |" + " ---: |" * (len(head) - 3)]
    for rows in shapes.values():
        llama = next((row for row in rows if row["engine"] == "llama.cpp"), None)
        full = next(row for row in rows if row["engine"] == "TLC off")
        for row in rows:
            ours = row is not llama
            cells = [row["shape"], f"{row['prompt_tokens']:.0f}" + ("*" if row["shortened_from"] else ""),
                     row["engine"] if not ours else f"DeepTutor, {row['engine']}",
                     speed(row, "prompt", 1), ratio(row, llama, "prompt"), ratio(row, full, "prompt") if ours else "",
                     speed(row, "decode", 2), ratio(row, llama, "decode"), ratio(row, full, "decode") if ours else "",
                     f"{row['kv_bytes'] / 2**20:,.0f}" if row["kv_bytes"] else "", f"{row['bound']:.2f}" if row["bound"] else "",
                     f"{row['decode'] / row['bound']:.0%}" if row["bound"] else ""]
            if has_kld:
                cells += ["" if row[key] is None else f"{row[key]:.{digits}f}" for key, digits in (("kld", 4), ("top1", 3))]
            lines.append("| " + " | ".join(cells) + " |")
    if any(row["shortened_from"] for rows in shapes.values() for row in rows):
        lines += ["", "\\* shortened, so that the full cache fits this machine's memory: "
                  + ", ".join(f"{rows[0]['shape']} from {rows[0]['shortened_from']:.0f}" for rows in shapes.values()
                              if rows[0]["shortened_from"])]
    return "\n".join(lines) + "\n"


def write_results(name, shapes, args):
    rows = [[row.get(key) for key in FIELDS] for rows in shapes.values() for row in rows]
    write_file(f"{name}.csv", csv_text([FIELDS, *rows]))
    write_file(f"{name}.md", table(shapes, args))
    say(f"written: {name}.md, .csv")


def check(args, name, shapes):
    """What hours of measuring would end at."""
    for program in (args.bench, args.eval, args.make_model):
        if not os.access(program, os.X_OK):
            refuse(f"{program} is not there; run: bash run.sh --test")
    if args.llama_bench and not args.no_llama and not os.access(args.llama_bench, os.X_OK):
        refuse(f"{args.llama_bench} is not there; leave --llama-bench out, and it is built")
    if any(shape.make is None for shape in shapes) and not REAL_MODEL.exists():
        refuse(f"{REAL_MODEL} is not there; run: bash run.sh --model")
    if any(shape.kld_context for shape in shapes) and not os.access(args.text, os.R_OK):
        refuse(f"{args.text} can't be read")
    for path in (name.parent, args.scratch):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            refuse(f"{path} can't be made a folder: {error.strerror}")
    for end in ("md", "csv"):
        check_output(f"{name}.{end}")


def flash_attention(text):
    if text not in ("0", "1", "0,1", "1,0"):
        raise argparse.ArgumentTypeError(f"'{text}' is none of 0, 1 and 0,1")
    return sorted(map(int, text.split(",")))


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", default="llama2-7b,llama2-13b,qwen-7b,chatglm2-6b,smollm2")
    parser.add_argument("-t", "--threads", type=whole(1), default=2)
    parser.add_argument("-r", "--rounds", type=whole(1), default=1)
    parser.add_argument("--no-llama", action="store_true", help="leave llama.cpp out")
    parser.add_argument("--llama-bench", type=Path, help="one that is built already (built into build-peers/)")
    parser.add_argument("--flash-attention", default="0,1", type=flash_attention,
                        help="llama.cpp's -fa; of both the one that is faster on a beginning of the prompt (0,1)")
    parser.add_argument("--keep", action="store_true", help="keep the models made")
    parser.add_argument("--text", default=ROOT / "examples/genesis.txt", help="for KL divergences (examples/genesis.txt)")
    parser.add_argument("--bench", default=ROOT / "deeptutor-bench")
    parser.add_argument("--eval", default=ROOT / "deeptutor-eval")
    parser.add_argument("--make-model", default=ROOT / "build/tests/make_model")
    parser.add_argument("--scratch", type=Path, default=peers.PEERS / "models", help="where models are made (build-peers/models)")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    unknown = [name for name in args.shapes.split(",") if name not in SHAPES]
    if unknown:
        parser.error(f"there is no shape {unknown[0]}; known: {', '.join(SHAPES)}")
    folder = args.output or ROOT / "bench/results" / peers.processor_name().replace(" ", "-")
    output = folder / f"original-t{args.threads}"
    check(args, output, [SHAPES[name] for name in args.shapes.split(",")])
    held = lock(args.scratch)
    lock_results(folder)
    shapes = read_rows(Path(f"{output}.csv"))
    bench = None if args.no_llama else args.llama_bench or peers.build_peer("llama-bench")
    for name in args.shapes.split(","):
        rows, left = measure_shape(args, bench, name, SHAPES[name])
        if rows:
            shapes[name] = rows
            write_results(output, shapes, args)
            remove(left)
    if shapes:
        print(table(shapes, args))
    held.close()


if __name__ == "__main__":
    until_ctrl_c(main)
