#!/usr/bin/env python3
"""Speculative decoding beside plain decoding: the same prompts, alternating, the same text checked.

usage: python3 bench/drafts.py [-m MODEL.gguf] [-t 2] [-n 160] [-r 3] [--draft-model FILE] [-o FILE] [-- FLAGS OF ./main]

Prompts that ask for what stands in them (a summary that quotes, code edits, a letter to correct) and ones that don't (stories, advice;
sampled at 0.8, since small models repeat themselves when they are greedy) lie in bench/drafts/. Each is run plain and with guesses, a
fresh process each time, in turns; the speed is that of decoding, guesses and their checking included, and the ratio that of medians.
Needs `bash run.sh --model`. Writes the table to FILE, or prints it.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from peers import ROOT, check_output, parser_of, processor_name, run, say, until_ctrl_c, whole, write_file

REPEATING = {"quotes": [], "rename": ["-cnv"], "comments": ["-cnv"], "letter": ["-cnv"]}
OTHER = {"story": ["-cnv"], "explain": ["-cnv"], "advice": ["-cnv"], "essay": ["-cnv"]}
GREEDY, SAMPLED = ["--temp", 0], ["--temp", 0.8, "--seed", 7]


def measure(args, name, flags):
    """Tokens, decoding speed, guesses."""
    with tempfile.TemporaryDirectory() as folder:
        stats = Path(folder) / "stats.json"
        run([ROOT / "main", "-m", args.model, "-t", args.threads, "-f", ROOT / "bench/drafts" / f"{name}.txt", "-n", args.tokens,
             "--stats-json", stats, *flags, *args.flags], "main")
        numbers = json.loads(stats.read_text())
    return numbers["generated_token_ids"], numbers["decode_tps"], numbers["draft"]


def compare(args, name, flags, guessing):
    plain, drafted, same, draft = [], [], True, {}
    for _ in range(args.rounds):
        tokens, speed, _ = measure(args, name, flags)
        plain.append(speed)
        others, speed, draft = measure(args, name, [*flags, *guessing])
        drafted.append(speed)
        same = same and tokens == others
    row = {"name": name, "tokens": len(tokens), "plain": statistics.median(plain), "drafted": statistics.median(drafted),
           "low": min(drafted) / max(plain), "high": max(drafted) / min(plain), "same": same, **draft}
    say(f"{name}: {row['plain']:.1f} -> {row['drafted']:.1f} tokens/s, {row['drafted'] / row['plain']:.2f}x")
    return row


def mean_ratio(rows):
    return statistics.geometric_mean(row["drafted"] / row["plain"] for row in rows)


def table(rows):
    lines = ["| prompt | tokens | plain, tokens/s | with guesses | times plain | lowest-highest | guesses right | same text |",
             "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |"]
    for row in rows:
        lines.append(f"| {row['name']} | {row['tokens']} | {row['plain']:.1f} | {row['drafted']:.1f} | "
                     f"{row['drafted'] / row['plain']:.2f} | {row['low']:.2f}-{row['high']:.2f} | "
                     f"{row['accepted']} of {row['proposed']} | {'yes' if row['same'] else 'NO'} |")
    return "\n".join(lines + [f"| mean | | | | {mean_ratio(rows):.2f} | | | |"])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("-m", "--model", default=ROOT / "models/SmolLM2-135M-Instruct.Q4_1.gguf", type=Path)
    parser.add_argument("-t", "--threads", type=whole(1), default=2)
    parser.add_argument("-n", "--tokens", type=whole(1), default=160)
    parser.add_argument("-r", "--rounds", type=whole(1), default=3)
    parser.add_argument("--draft-model")
    parser.add_argument("--draft-max", type=whole(1))
    parser.add_argument("--only", help="prompts, separated by commas")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("flags", nargs="*")
    args = parser.parse_args()

    guessing = ["--draft-model", args.draft_model] if args.draft_model else ["--draft-lookup"]
    guessing += ["--draft-max", args.draft_max] if args.draft_max else []
    only = args.only.split(",") if args.only else [*REPEATING, *OTHER]
    unknown = [name for name in only if name not in (*REPEATING, *OTHER)]
    if unknown:
        parser.error(f"there is no prompt {unknown[0]}; known: {', '.join([*REPEATING, *OTHER])}")
    if args.output:
        check_output(args.output)
    begun = time.time()
    repeating = [compare(args, name, [*flags, *GREEDY], guessing) for name, flags in REPEATING.items() if name in only]
    other = [compare(args, name, [*flags, *SAMPLED], guessing) for name, flags in OTHER.items() if name in only]
    what = " ".join(map(str, [*guessing[:1], *([Path(args.draft_model).name] if args.draft_model else []), *guessing[2:], *args.flags]))
    text = [f"## {args.model.name}, `{what}`", "",
            f"{processor_name()}, {args.threads} threads, {args.rounds} rounds, {time.strftime('%Y-%m-%d')}", ""]
    text += ["Text that repeats itself, greedy:", "", table(repeating), ""] if repeating else []
    text += ["Text that does not, sampled:", "", table(other), ""] if other else []
    say(f"{time.time() - begun:.0f} s")
    if args.output:
        write_file(args.output, "\n".join(text) + "\n", append=True)
    else:
        print("\n".join(text))
    if not all(row["same"] for row in repeating + other):
        sys.exit("a text with guesses differs from the plain one")


if __name__ == "__main__":
    until_ctrl_c(main)
