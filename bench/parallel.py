#!/usr/bin/env python3
"""Many conversations decoded at once: DeepTutor beside llama.cpp's llama-batched-bench. Same file, same threads, alternating.

usage: python3 bench/parallel.py -m MODEL.gguf [-t 2] [-d 4096] [-n 64] [-s 8] [-r 3] [--budget 1024]

Builds llama-batched-bench with its own defaults from the source that DeepTutor is built from, unpatched (into build-peers/). Needs
`bash run.sh` to have run. Each of the -s conversations holds -d tokens, then all decode -n tokens together; tokens per second are those
of all. llama.cpp reads the text once and copies it to every conversation (-pps), which saves time and does not change decoding; it is
measured with flash attention off and on, and its better one counts.
"""

import json
import statistics
import time
from pathlib import Path

from peers import ROOT, build_peer, parser_of, processor_name, run, say, until_ctrl_c, whole


def measure_llama(bench: Path, args) -> float:
    best = 0.0
    context = args.sequences * (args.depth + args.decode)
    for fa in ("off", "on"):
        out = run([bench, "-m", args.model, "-t", args.threads, "-fa", fa, "-c", context, "-pps", "-npp", args.depth,
                   "-ntg", args.decode, "-npl", args.sequences, "--output-format", "jsonl"], "llama-batched-bench")
        best = max(best, *(json.loads(line)["speed_tg"] for line in out.splitlines() if line.startswith("{")))
    return best


def measure_ours(args, flags: list) -> float:
    rows = json.loads(run([ROOT / "deeptutor-bench", "-m", args.model, "-t", args.threads, "-d", args.depth, "-n", args.decode,
                           "-r", 1, "--parallel", args.sequences, "-o", "json", *flags], "deeptutor-bench"))["rows"]
    return next(row["tps"] for row in rows if row["test"] == "decode")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-t", "--threads", type=whole(1), default=2)
    parser.add_argument("-d", "--depth", type=whole(1), default=4096)
    parser.add_argument("-n", "--decode", type=whole(1), default=64)
    parser.add_argument("-s", "--sequences", type=whole(1), default=8)
    parser.add_argument("-r", "--rounds", type=whole(1), default=3)
    parser.add_argument("--budget", type=whole(1), default=1024)
    args = parser.parse_args()

    bench = build_peer("llama-batched-bench")
    eviction = ["--cache-eviction", "--no-compare", "--max-cache-size", args.budget]
    engines = {
        "llama.cpp": lambda: measure_llama(bench, args),
        "DeepTutor": lambda: measure_ours(args, []),
        f"DeepTutor TLC {args.budget}": lambda: measure_ours(args, eviction),
        f"DeepTutor TLC {args.budget} INT8": lambda: measure_ours(args, [*eviction, "--kv-type", "int8"]),
    }
    results: dict = {name: [] for name in engines}
    for turn in range(args.rounds):
        for name, measure in engines.items():
            start = time.time()
            results[name].append(measure())
            say(f"round {turn + 1}/{args.rounds}  {name}  {results[name][-1]:.1f} tokens/s  ({time.time() - start:.0f} s)")
    print(f"{Path(args.model).name} on {processor_name()}: {args.sequences} conversations of {args.depth} tokens, {args.threads} threads\n")
    print("| engine | decoding, tokens/s | spread | times llama.cpp |\n| --- | ---: | ---: | ---: |")
    for name, samples in results.items():
        middle, peer = statistics.median(samples), statistics.median(results["llama.cpp"])
        print(f"| {name} | {middle:.1f} | {min(samples):.1f}-{max(samples):.1f} | {middle / peer:.2f} |")


if __name__ == "__main__":
    until_ctrl_c(main)
