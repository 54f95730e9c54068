#!/usr/bin/env python3
"""DeepTutor beside llama.cpp and OpenVINO GenAI: same file, same threads, same run, alternating.

usage: python3 bench/peers.py -m MODEL.gguf [-t 2] [-d 0,4096,6700] [-p 512] [-n 64] [-r 3] [--budget 1024] [--no-openvino]
                              [--no-prompt] [-o FOLDER]

Builds llama-bench with its own defaults from the source that DeepTutor is built from, without our patches, and installs OpenVINO
GenAI from PyPI (both into build-peers/), then runs rounds: in each, every engine measures every depth once, a fresh process each time.
Writes FOLDER/NAME.md, .csv and .png (default FOLDER: bench/results/<processor>): medians with the lowest and highest round.
Needs `bash run.sh` to have run. Rows: "prompt" is the speed of reading the whole prompt of that depth, "prefill" that of reading some
more tokens on top of it, "decode" that of generating there. llama.cpp is measured with flash attention off and on; its better one
counts, row by row.
"""

import argparse
import csv
import io
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))
from command_line import Parser  # noqa: E402
from eval.command import replacing  # noqa: E402

PEERS = ROOT / "build-peers"
OPENVINO = ["openvino==2026.4.0", "openvino-genai==2026.4.0.0", "openvino-tokenizers==2026.4.0.0"]


def parser_of(doc):
    """A script's --help is the text it begins with, in lines for a terminal."""
    def fill(text, indent=""):
        return textwrap.fill(text, 80, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    paragraphs = []
    for paragraph in doc.strip().split("\n\n"):
        if paragraph.startswith("usage:"):
            lines = re.sub(r"\n {9,}(?=\[|--)", " ", paragraph).split("\n")  # one that goes on
            paragraphs.append("\n".join(fill(line, " " * 14) for line in lines))
        else:
            paragraphs.append(fill(" ".join(paragraph.split())))
    return Parser(description="\n\n".join(paragraphs),
                  formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=80))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def refuse(text: str) -> None:
    """What was asked wrongly, before anything is measured."""
    say(f"error: {text}")
    sys.exit(2)


def run(command: list, what: str) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        sys.exit(f"{what} failed: {' '.join(map(str, command))}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def until_ctrl_c(main) -> None:
    """Runs it. A program that runs along with it must be ended on the way out; subprocess.run does so."""
    try:
        main()
    except KeyboardInterrupt:
        say("stopped")
        sys.exit(130)


def whole(low: int, high: int = 10**9):
    """For argparse: a whole number in this range."""
    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"'{text}' is no whole number from {low} to {high}")
        return value
    return read


def depths(text: str) -> list:
    return [whole(0)(part) for part in text.split(",")]


# ---- results: what took hours must not be lost at their end ----

def check_output(path: Path) -> None:
    """Before measuring: that write_file will work."""
    path = Path(path)
    try:
        if path.exists() and not path.is_file():  # a pipe, a terminal
            path.open("ab").close()
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent) as file:
            file.write(b"x" * 4096)
    except OSError as error:
        refuse(f"{path} can't be written: {error.strerror}; name another place")


def replace_file(path: Path, text: str) -> None:
    """The file has its old content or the new one, whole. Raises OSError."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def write_file(path: Path, text: str, append: bool = False) -> None:
    path = Path(path)
    try:
        replace_file(path, (path.read_text(encoding="utf-8") if append and path.is_file() else "") + text)
    except OSError as error:
        sys.exit(f"error: {path} can't be written: {error.strerror}")


def csv_text(rows) -> str:
    out = io.StringIO()
    csv.writer(out).writerows(rows)
    return out.getvalue()


def peer_source() -> Path:
    """The pinned llama.cpp as it was published, without the patches that our own build gets."""
    version = re.search(r"DT_LLAMA_CPP_PYTHON_VERSION ([\d.]+)", (ROOT / "cmake/dt_llama.cmake").read_text(encoding="utf-8")).group(1)
    name = f"llama_cpp_python-{version}"
    source = PEERS / f"llama.cpp-{version}"
    if not source.exists():
        archive = Path(os.environ.get("DT_CACHE") or ROOT / "deps/cache") / f"{name}.tar.gz"
        if not archive.exists():
            sys.exit(f"{archive} is not there; run: bash run.sh")
        unpacked = PEERS / f"{source.name}.part"
        shutil.rmtree(unpacked, ignore_errors=True)
        shutil.unpack_archive(archive, unpacked)
        (unpacked / name / "vendor/llama.cpp").rename(source)
        shutil.rmtree(unpacked)
        page = source / "scripts/ui-assets.cmake"
        page.parent.mkdir(exist_ok=True)
        page.write_text((ROOT / "bench/peer_no_page.cmake").read_text(encoding="utf-8"), encoding="utf-8")
    return source


def build_peer(target: str) -> Path:
    """A program of llama.cpp's."""
    source = peer_source()
    folder = PEERS / "build"
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_SERVER=ON",
               "-DLLAMA_BUILD_APP=OFF", "-DLLAMA_OPENSSL=OFF", f"-DCMAKE_PROJECT_llama.cpp_INCLUDE={ROOT / 'bench/peers.cmake'}"]
    say(f"building {target} (minutes, the first time)")
    run(["cmake", "-S", source, "-B", folder, *options], "configuring llama.cpp")
    run(["cmake", "--build", folder, "--target", target, "-j", os.cpu_count()], f"building {target}")
    return folder / "bin" / target


def install_openvino() -> Path:
    python = PEERS / "venv/bin/python"
    if not python.exists():
        say("installing OpenVINO GenAI")
        run([sys.executable, "-m", "venv", PEERS / "venv"], "making a Python environment")
        run([python, "-m", "pip", "install", "-q", "matplotlib", *OPENVINO], "installing OpenVINO GenAI")
    return python


def measure_llama(bench: Path, args, depth: int) -> dict:
    best: dict = {}
    for fa in (0, 1):
        common = [bench, "-m", args.model, "-t", args.threads, "-fa", fa, "-r", 1, "-o", "json"]
        rows = json.loads(run([*common, "-p", args.prefill, "-n", args.decode, "-d", depth], "llama-bench"))
        if depth > 0 and not args.no_prompt:
            rows += [dict(row, whole=True) for row in json.loads(run([*common, "-p", depth, "-n", 0], "llama-bench"))]
        for row in rows:
            test = "prompt" if row.get("whole") else "decode" if row["n_gen"] > 0 else "prefill"
            best[test] = max(best.get(test, 0.0), row["avg_ts"])
    return best


def measure_ours(args, depth: int, eviction: list) -> dict:
    flags = ["-d", depth, "-p", args.prefill, "-n", args.decode, "-r", 1, "-o", "json", *eviction]
    rows = json.loads(run([ROOT / "deeptutor-bench", "-m", args.model, "-t", args.threads, *flags], "deeptutor-bench"))["rows"]
    result = {row["test"]: row["tps"] for row in rows}
    decode = next(row for row in rows if row["test"] == "decode")
    return {**result, "kv_bytes": decode["kv_bytes"], "bound": decode["bound_tps"]}


def measure_openvino(python: Path, args, depth: int) -> dict:
    command = [python, ROOT / "bench/peer_openvino.py", args.model, args.threads, depth, args.decode]
    speeds = json.loads(run(command, "OpenVINO GenAI").splitlines()[-1])
    return {"prompt": speeds["prefill_tps"], "decode": speeds["decode_tps"]} if depth > 0 else {"decode": speeds["decode_tps"]}


def processor_name() -> str:
    name = "unknown processor"
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            text = file.read()
        fields = dict(re.findall(r"^(model name|cpu family|model)\s*:\s*(.*)$", text, re.M))
        name = f"{fields['model name']} family {fields['cpu family']} model {fields['model']}"
        name += " AMX" if "amx_int8" in text else " AVX-512" if "avx512f" in text else ""
    except (OSError, KeyError):
        pass
    return re.sub(r"\s+", " ", name.replace("(R)", "").replace("@", "")).strip()


def summarize(samples: list) -> tuple:
    return statistics.median(samples), min(samples), max(samples)


def table(results: dict, args, title: str) -> str:
    engines = list(dict.fromkeys(engine for engine, _, _ in results))
    lines = [f"# {title}", "", f"{args.threads} threads, {args.rounds} rounds, engines alternating; {time.strftime('%Y-%m-%d')}.",
             "tokens/s: median (lowest-highest); x = times llama.cpp", "",
             "| depth | test | " + " | ".join(engines) + " |", "| ---: | --- |" + " ---: |" * len(engines)]
    for depth in args.depths:
        for test in ("prompt", "prefill", "decode"):
            cells = []
            peer = results.get(("llama.cpp", depth, test))
            for engine in engines:
                samples = results.get((engine, depth, test))
                if not samples:
                    cells.append("")
                    continue
                middle, low, high = summarize(samples)
                ratio = f" {middle / statistics.median(peer):.2f}x" if peer and engine != "llama.cpp" else ""
                cells.append(f"{middle:.1f} ({low:.1f}-{high:.1f}){ratio}")
            if any(cells):
                lines.append(f"| {depth} | {test} | " + " | ".join(cells) + " |")
    lines += ["", "KV cache and the decode speed that reading weights and cache once at the measured bandwidth would allow:", "",
              "| depth | engine | KV MiB | bound tokens/s | reached |", "| ---: | --- | ---: | ---: | ---: |"]
    for (engine, depth, test), samples in results.items():
        if test == "kv_bytes":
            bound = statistics.median(results[(engine, depth, "bound")])
            speed = statistics.median(results[(engine, depth, "decode")])
            lines.append(f"| {depth} | {engine} | {samples[-1] / 2**20:.1f} | {bound:.1f} | {speed / bound:.0%} |")
    return "\n".join(lines) + "\n"


PLOT = """
import json, sys
import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt
data = json.load(sys.stdin)
panels = [("decode", "decode, tokens/s"), ("prompt", "whole prompt, tokens/s"), ("kv_bytes", "KV cache, MiB")]
figure, axes = plt.subplots(1, 3, figsize=(13, 4))
for axis, (test, label) in zip(axes, panels):
    for i, engine in enumerate(data["engines"]):
        points = [(d, m / (2**20 if test == "kv_bytes" else 1)) for e, d, t, m in data["points"] if e == engine and t == test]
        if points:
            axis.plot(*zip(*sorted(points)), marker="o", color=f"C{i}", label=engine)
    axis.set_xlabel("context, tokens")
    axis.set_ylabel(label)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
figure.suptitle(data["title"], fontsize=10)
handles, labels = axes[0].get_legend_handles_labels()
figure.legend(handles, labels, loc="lower center", ncol=len(labels), frameon=False, fontsize=9)
figure.tight_layout(rect=(0, 0.07, 1, 1))
figure.savefig(data["file"], dpi=110)
"""


def output_name(args) -> Path:
    folder = Path(args.output or ROOT / "bench/results" / processor_name().replace(" ", "-"))
    return folder / (Path(args.model).stem + f"-t{args.threads}")


def write_results(results: dict, args, title: str) -> None:
    name, text = output_name(args), table(results, args, title)
    print(text, flush=True)  # first: it needs no disk
    write_file(Path(f"{name}.md"), text)
    write_file(Path(f"{name}.csv"), csv_text([
        ["engine", "depth", "test", "median", "low", "high", "rounds"],
        *([*key, *(f"{x:.2f}" for x in summarize(samples)), len(samples)] for key, samples in results.items())]))
    points = [[e, d, t, statistics.median(s)] for (e, d, t), s in results.items()]
    part = Path(f"{name}.{os.getpid()}.part.png")
    data = {"engines": list(dict.fromkeys(e for e, _, _ in results)), "points": points, "title": title, "file": str(part)}
    try:
        if subprocess.run([PEERS / "venv/bin/python", "-c", PLOT], input=json.dumps(data), text=True).returncode != 0:
            sys.exit(f"error: {name}.png can't be drawn, see above; {name}.md and .csv are there")
        part.replace(f"{name}.png")
    except OSError as error:
        sys.exit(f"error: {name}.png can't be drawn: {error.strerror}; {name}.md and .csv are there")
    finally:
        part.unlink(missing_ok=True)
    say(f"written: {name}.md, .csv, .png")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-t", "--threads", type=whole(1), default=2)
    parser.add_argument("-d", "--depths", default="0,4096,6700", type=depths)
    parser.add_argument("-p", "--prefill", type=whole(0), default=512)
    parser.add_argument("-n", "--decode", type=whole(1), default=64)
    parser.add_argument("-r", "--rounds", type=whole(1), default=3)
    parser.add_argument("--budget", type=whole(1), default=1024)
    parser.add_argument("--no-openvino", action="store_true")
    parser.add_argument("--no-prompt", action="store_true", help="leave out llama.cpp's whole prompts, which take minutes")
    parser.add_argument("-o", "--output")
    args = parser.parse_args()
    for end in ("md", "csv", "png"):
        check_output(f"{output_name(args)}.{end}")

    llama, python = build_peer("llama-bench"), install_openvino()
    eviction = ["--cache-eviction", "--no-compare", "--max-cache-size", args.budget]
    engines = {
        "llama.cpp": lambda depth: measure_llama(llama, args, depth),
        "DeepTutor": lambda depth: measure_ours(args, depth, []),
        f"DeepTutor TLC {args.budget}": lambda depth: measure_ours(args, depth, eviction),
        f"DeepTutor TLC {args.budget} streaming": lambda depth: measure_ours(args, depth, eviction + ["--prefill", "streaming"]),
        "DeepTutor INT8": lambda depth: measure_ours(args, depth, ["--kv-type", "int8"]),
    }
    if not args.no_openvino:
        engines["OpenVINO"] = lambda depth: measure_openvino(python, args, depth)
    results: dict = {}
    for turn in range(args.rounds):
        for depth in args.depths:
            for engine, measure in engines.items():
                start = time.time()
                for test, value in measure(depth).items():
                    results.setdefault((engine, depth, test), []).append(value)
                say(f"round {turn + 1}/{args.rounds}  depth {depth}  {engine}  {time.time() - start:.0f} s")
    write_results(results, args, f"{Path(args.model).name} on {processor_name()}")


if __name__ == "__main__":
    until_ctrl_c(main)
