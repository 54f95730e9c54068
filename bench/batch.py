#!/usr/bin/env python3
"""Summaries of real texts of 4,000 to 6,000 tokens: ./deeptutor-batch beside llama.cpp's server. Same file, threads and parallelism.

usage: python3 bench/batch.py -m MODEL.gguf [-t 2] [--texts 50] [--piece 10] [--parallel 8] [-n 100] [--budget 1024] [-o FILE.md]
       python3 bench/batch.py ... --only 0-10 --engine "llama.cpp"     one piece of one engine; without both: all, engines alternating
       python3 bench/batch.py ... --page                               the table of what was measured so far

The texts are pieces of the King James Bible (Debian's bible-kjv-text) and of vim's documentation, or of the files of --sources. Builds
llama-server with its own defaults from the source that DeepTutor is built from, unpatched (into build-peers/). Every text gets the same
instruction and exactly -n tokens of reply, greedy. llama.cpp's seconds are those from the first request to the last answer, --parallel
requests at a time, its flash attention as --flash-attention says; DeepTutor's are those of the whole process, its start included. What was measured is
kept in build-peers/batch-NAME.jsonl, and measured again where asked for again; the last time counts. Needs `bash run.sh` to have run.
"""
import argparse
import concurrent.futures
import http.client
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from peers import PEERS, ROOT, build_peer, check_output, parser_of, processor_name, run, say, until_ctrl_c, whole, write_file

INSTRUCTION = "Summarize the following text in a few sentences.\n\n"
LEAST, MOST = 4000, 6000  # tokens of a text
TLC, STREAMING = "DeepTutor TLC {budget}", "DeepTutor TLC {budget} streaming"


class Server:
    """A server of an engine that speaks OpenAI's API and /tokenize, until the end of the block."""

    def __init__(self, command: list, log: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = log
        with open(log, "wb") as file:
            self.process = subprocess.Popen([*map(str, command), "--port", str(self.port)], stdin=subprocess.DEVNULL, stdout=file,
                                            stderr=file)

    def __enter__(self):
        try:
            return self.started()
        except BaseException:
            self.process.kill()
            raise

    def started(self):
        while True:
            if self.process.poll() is not None:
                sys.exit(f"the server ended at its start:\n{self.log.read_text(errors='replace')[-3000:]}")
            try:
                if self.ask("/health")[0] == 200:
                    return self
            except OSError:
                pass
            time.sleep(0.1)

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(timeout=60)

    def ask(self, path: str, body: dict = None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=3600)
        connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body),
                           {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        connection.close()
        return response.status, json.loads(text)


# ---- texts ----

def sources(args) -> list:
    """Long texts, each with its name."""
    if args.sources:
        return [(path.name, path.read_text(encoding="utf-8")) for path in sorted(Path(args.sources).iterdir())]
    bible = shutil.which("bible")
    vim = sorted(Path("/usr/share/vim").glob("vim*/doc/*.txt"))
    if not bible or not vim:
        sys.exit("no texts here; install bible-kjv-text and vim-runtime (Debian), or name a folder of long texts with --sources")
    books = run([bible, "-f", "-l", "1000000", "Gen1:1-Rev22:21"], "bible")
    found = [(path.name, path.read_text(encoding="utf-8", errors="replace")) for path in vim]
    return [("bible", books)] + [(name, text) for name, text in found if len(text) > 40000 and len(text.encode()) < 1.05 * len(text)]


def cut(text: str, begin: int, n_tokens: int, count) -> str:
    """About n_tokens of it, whole lines, from near `begin` on."""
    begin = text.find("\n", begin) + 1
    n_bytes = 4 * n_tokens
    for _ in range(6):
        end = text.find("\n", begin + n_bytes)
        piece = text[begin:end if end > 0 else len(text)]
        n = count(piece)
        if abs(n - n_tokens) < 100:
            break
        n_bytes = int(n_bytes * n_tokens / n)
    return piece


def write_texts(args, folder: Path) -> None:
    """Texts of lengths spread evenly between the least and the most: half of them from the first source, the rest from one each."""
    folder.mkdir(parents=True, exist_ok=True)
    found = sources(args)
    with Server([ROOT / "deeptutor-server", "-m", args.model, "-t", 1], folder.parent / "tokenize.log") as server:
        def count(text):
            return len(server.ask("/tokenize", {"content": text})[1]["tokens"])

        for i in range(args.texts):
            n_tokens = LEAST + 100 + (i * 677) % (MOST - LEAST - 200)
            name, text = found[0] if i % 2 == 0 else found[1 + i // 2 % (len(found) - 1)]
            begin = len(text) * i // args.texts if i % 2 == 0 else len(text) // 10
            piece = cut(text, begin, n_tokens, count)
            assert LEAST <= count(piece) <= MOST, (name, count(piece))
            (folder / f"{i:03d}-{Path(name).stem}.txt").write_text(piece, encoding="utf-8")


# ---- engines ----

def summarize_llama(args, texts: list, scratch: Path) -> dict:
    command = [build_peer("llama-server"), "-m", args.model, "-t", args.threads, "-tb", args.threads, "-np", args.parallel, "-c",
               (MOST + 200 + args.tokens) * args.parallel, "-fa", args.flash_attention, "-no-kvu", "--cache-ram", 0, "--host",
               "127.0.0.1"]
    with Server(command, scratch / "llama.log") as server:
        def ask(text):
            status, answer = server.ask("/v1/chat/completions", {
                "messages": [{"role": "user", "content": INSTRUCTION + text}], "max_tokens": args.tokens, "temperature": 0,
                "ignore_eos": True})
            if status != 200:
                sys.exit(f"llama-server answered {status}: {answer}")
            return answer

        start = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(args.parallel) as pool:
            try:
                answers = list(pool.map(ask, [path.read_text(encoding="utf-8") for path in texts]))
            except BaseException:
                server.process.kill()  # else the pool waits for all that was asked
                raise
        seconds = time.monotonic() - start
    return {"seconds": seconds, "prompt": sum(a["usage"]["prompt_tokens"] for a in answers),
            "generated": sum(a["usage"]["completion_tokens"] for a in answers), "sample": answers[0]["choices"][0]["message"]["content"]}


def summarize_ours(args, texts: list, scratch: Path, flags: list) -> dict:
    folder, out = scratch / "texts", scratch / "out.jsonl"
    folder.mkdir()
    for path in texts:
        (folder / path.name).symlink_to(path.resolve())
    start = time.monotonic()
    run([ROOT / "deeptutor-batch", "-m", args.model, "-t", args.threads, "-i", folder, "-o", out, "--each", INSTRUCTION + "{text}",
         "-n", args.tokens, "--temp", 0, "--ignore-eos", "--parallel", args.parallel, *flags], "deeptutor-batch")
    seconds = time.monotonic() - start
    rows = sorted(map(json.loads, out.read_text(encoding="utf-8").splitlines()), key=lambda row: row["line"])
    bad = [row for row in rows if "text" not in row]
    if bad or len(rows) != len(texts):
        sys.exit(f"{len(rows)} results for {len(texts)} texts; {bad[:1]}")
    return {"seconds": seconds, "prompt": sum(r["usage"]["prompt_tokens"] for r in rows),
            "generated": sum(r["usage"]["completion_tokens"] for r in rows), "sample": rows[0]["text"]}


def engines(args) -> dict:
    eviction = ["--cache-eviction", "--eviction-preset", "summary", "--max-cache-size", args.budget]
    return {"llama.cpp": summarize_llama,
            "DeepTutor": lambda *given: summarize_ours(*given, []),
            TLC.format(**vars(args)): lambda *given: summarize_ours(*given, eviction),
            STREAMING.format(**vars(args)): lambda *given: summarize_ours(*given, [*eviction, "--prefill", "streaming"])}


# ---- the whole ----

def measure(args, names: list, begin: int, end: int, kept: Path) -> None:
    texts = sorted((PEERS / "batch-texts").glob("*.txt"))[begin:end]
    for name in names:
        with tempfile.TemporaryDirectory(prefix="deeptutor-batch-") as scratch:
            row = engines(args)[name](args, texts, Path(scratch))
        say(f"texts {begin}-{end - 1}  {name}  {row['seconds']:.1f} s")
        write_file(kept, json.dumps({"engine": name, "begin": begin, "end": end, **row}) + "\n", append=True)


def page(args, kept: Path) -> str:
    rows = {(row["engine"], row["begin"], row["end"]): row for row in map(json.loads, kept.read_text(encoding="utf-8").splitlines())}
    pieces = [range_ for range_ in {key[1:] for key in rows} if all((name, *range_) in rows for name in engines(args))]
    if not pieces:
        sys.exit("no piece was measured with all engines")
    lines = [f"# Summaries, {Path(args.model).name} on {processor_name()}", "",
             f"{sum(end - begin for begin, end in pieces)} texts of {LEAST} to {MOST} tokens, {args.tokens} tokens of reply each, "
             f"{args.parallel} at once, {args.threads} threads, in pieces with engines alternating; llama.cpp with flash attention "
             f"{args.flash_attention}; "
             f"{time.strftime('%Y-%m-%d')}.", "", "| engine | seconds | of llama.cpp's | tokens read | generated |",
             "| --- | ---: | ---: | ---: | ---: |"]
    peer = sum(rows[("llama.cpp", *p)]["seconds"] for p in pieces)
    for name in engines(args):
        total = {field: sum(rows[(name, *p)][field] for p in pieces) for field in ("seconds", "prompt", "generated")}
        lines.append(f"| {name} | {total['seconds']:.0f} | {total['seconds'] / peer:.2f} | {total['prompt']} | {total['generated']} |")
    first = min(pieces)
    lines += ["", "How the first text's summary begins:", ""]
    lines += [f"- {name}: {' '.join(rows[(name, *first)]['sample'].split())[:300]}" for name in engines(args)]
    return "\n".join(lines) + "\n"


def piece(text: str) -> list:
    try:
        begin, end = map(whole(0), text.split("-"))
    except ValueError:
        begin = end = 0
    if begin >= end:
        raise argparse.ArgumentTypeError(f"'{text}' is no range such as 0-10")
    return [begin, end]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-t", "--threads", type=whole(1), default=2)
    parser.add_argument("-n", "--tokens", type=whole(1), default=100)
    parser.add_argument("--texts", type=whole(1), default=50)
    parser.add_argument("--piece", type=whole(1), default=10)
    parser.add_argument("--parallel", type=whole(1), default=8)
    parser.add_argument("--budget", type=whole(1), default=1024)
    parser.add_argument("--flash-attention", default="auto", choices=["on", "off", "auto"])
    parser.add_argument("--sources", help="a folder of long texts")
    parser.add_argument("--only", type=piece, help="A-B: texts A to B-1")
    parser.add_argument("--engine")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("-o", "--output")
    args = parser.parse_args()
    if args.engine and args.engine not in engines(args):
        parser.error(f"there is no engine {args.engine}; known: {', '.join(engines(args))}")
    if args.output:
        check_output(args.output)
    PEERS.mkdir(exist_ok=True)
    kept = PEERS / f"batch-{Path(args.model).stem}.jsonl"
    if len(list((PEERS / "batch-texts").glob("*.txt"))) != args.texts:
        shutil.rmtree(PEERS / "batch-texts", ignore_errors=True)
        write_texts(args, PEERS / "batch-texts")
    if not args.page:
        begin, end = args.only or (0, args.texts)
        for i in range(begin, end, args.piece):
            measure(args, [args.engine] if args.engine else list(engines(args)), i, min(i + args.piece, end), kept)
    if args.page or not (args.only or args.engine):
        text = page(args, kept)
        print(text)
        if args.output:
            write_file(args.output, text)


if __name__ == "__main__":
    until_ctrl_c(main)
