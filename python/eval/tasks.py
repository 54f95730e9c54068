#!/usr/bin/env python3
"""Runs task files through ./deeptutor-eval ab, eviction off and on, and scores both.

usage: python3 python/eval/tasks.py -m MODEL.gguf -i TASK.jsonl [-i ...]
                                    -o RESULT.json [options]
                                    [flags of deeptutor-eval ab]

A line is LongBench's {"context", "input", "answers"} or RULER's {"input", "outputs"}. The metric follows from the form, and for
LongBench from "dataset" (F1 where it says nothing); --metric sets it. Eviction, sampling and session flags go to the program, such
as --eviction-preset docqa, --max-cache-size 1024 or -c 8192; the draw is greedy unless --temp says otherwise. The result is written
after each task, so that it holds what was measured when a later one fails. report.py makes a page of it.
"""
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from command_line import Parser  # noqa: E402
from eval.command import (ROOT, at_least_one, check_inputs, check_output, check_program, fail, run_program,  # noqa: E402
                          stoppable, write_whole)
from eval.metrics import LONGBENCH, METRICS  # noqa: E402

QUESTION = "{context}\n\nAnswer the question from the text above, in as few words as possible.\n\nQuestion: {input}\nAnswer:"
SUMMARY = "{context}\n\nSummarize the text above in one page.\n\nSummary:"
CHECKS = ("--min-exact", "--min-rouge", "--min-agreement", "--min-speedup", "--max-kv-share")  # verdicts of ab


def read_task(path, args):
    """{line: (prompt, answers)}, the file, the task's name and metric."""
    rows, name, metric = {}, pathlib.Path(path).stem, args.metric
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{path} can't be read: {error}")
    for number, line in enumerate(lines, 1):
        if not line.strip() or (args.samples and len(rows) == args.samples):
            continue
        try:
            row = json.loads(line)
            ruler = "outputs" in row
            answers = row["outputs" if ruler else "answers"]
            answers = [str(a) for a in (answers if isinstance(answers, list) else [answers])]
            template = args.template or ("{input}" if ruler else QUESTION if row.get("input", "").strip() else SUMMARY)
            prompt = template.replace("{context}", row.get("context", "")).replace("{input}", row.get("input", ""))
            prompt += row.get("answer_prefix", "") if ruler else ""
            metric = metric or ("contains" if ruler else LONGBENCH.get(row.get("dataset", name), "f1"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            fail(f"{path} line {number}: needs context, input and answers, or input and outputs, as a JSON object "
                 f"({type(error).__name__}: {error})")
        if not answers:
            fail(f"{path} line {number}: there are no answers to compare with")
        rows[number] = prompt, answers
    if not rows:
        fail(f"{path} holds no samples")
    return rows, path, name, metric


def generate(args, rows, path, flags):
    """What deeptutor-eval ab writes for these prompts, which it reads on the lines where they are in the file."""
    lines = [""] * max(rows)
    for number, (prompt, _) in rows.items():
        lines[number - 1] = json.dumps({"messages": [{"role": "user", "content": prompt}]} if args.form == "chat" else
                                       {"prompt": prompt})
    with tempfile.TemporaryDirectory() as folder:
        result = os.path.join(folder, "result.json")
        command = [args.program, "ab", "-m", args.model, "-i", "-", "--samples", str(len(rows)), "-n", str(args.n_predict),
                   "--temp", "0", "--json", result, *flags]
        run_program(command, text="\n".join(lines).encode(), source=path, stdout=subprocess.DEVNULL)
        with open(result, encoding="utf-8") as file:
            return json.load(file)


def mean(values):
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def measure(rows, path, name, metric, args, flags):
    print(f"{name}: {len(rows)} samples, {metric}", file=sys.stderr)
    numbers = generate(args, rows, path, flags)
    samples = []
    for sample in numbers["samples"]:
        answers = rows[sample["line"]][1]
        texts = {side: sample[side]["text"] for side in ("off", "on")}
        cut = {side: text.lstrip("\n").split("\n")[0] if args.first_line else text for side, text in texts.items()}
        samples.append({"sample": sample["line"], "answers": answers, **texts, "prompt_tokens": sample["prompt_tokens"],
                        **{f"score_{side}": METRICS[metric](text, answers) for side, text in cut.items()}})
    task = {"name": name, "metric": metric, "n": len(samples), "left_out": numbers["left_out"]}
    for side in ("off", "on"):
        task[f"score_{side}"], task[f"score_{side}_error"] = mean([s[f"score_{side}"] for s in samples])
    task["difference"], task["difference_error"] = mean([s["score_on"] - s["score_off"] for s in samples])
    task.update({key: numbers[key] for key in ("rouge_l", "speedup", "kv_share")}, samples=samples)
    return task, numbers


def tokens_to_come(text):
    return -1 if text == "-1" else at_least_one(text)


def main(argv=None):
    parser = Parser(usage=__doc__.split("\n\n")[1][len("usage: "):], allow_abbrev=False,
                    description=__doc__.split("\n\n")[2])
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-i", "--input", action="append", required=True, help="a task file; may be given several times")
    parser.add_argument("-o", "--output", required=True, help="the result, JSON")
    parser.add_argument("-n", "--predict", "--n-predict", dest="n_predict", type=tokens_to_come, default=64,
                        help="tokens of an answer at most; -1 = to the end of text (64)")
    parser.add_argument("--samples", type=at_least_one, help="lines of each file (all)")
    parser.add_argument("--metric", choices=sorted(METRICS))
    parser.add_argument("--template", help="the prompt, with {context} and {input} in it")
    parser.add_argument("--form", choices=["text", "chat"], default="text", help="plain text, or the model's chat template (text)")
    parser.add_argument("--first-line", action="store_true", help="score only the first line of an answer")
    parser.add_argument("--program", default=str(ROOT / "deeptutor-eval"), help="(./deeptutor-eval)")
    args, flags = parser.parse_known_args(argv)
    check_program(args.program, "bash run.sh")
    if any(flag == "--json" or flag.startswith("--json=") for flag in flags):
        fail("the result goes where -o says; leave --json out")
    for check in CHECKS:
        if any(flag == check or flag.startswith(f"{check}=") for flag in flags):
            fail(f"{check} checks nothing here, where answers get scores; leave it out, or run deeptutor-eval ab")
    check_output(args.output, [args.model, *args.input, *(flag.rpartition("=")[2] for flag in flags)])
    check_inputs([args.model, *args.input])
    tasks, read = [], [read_task(path, args) for path in args.input]
    print("| task | metric | samples | off | on | difference | KV of full |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for one in read:
        task, numbers = measure(*one, args, flags)
        tasks.append(task)
        result = {"command": "tasks", "model": args.model, "eviction": numbers["eviction"], "kv_type": numbers["kv_type"],
                  "prefill": numbers["prefill"], "tasks": tasks}
        write_whole(args.output, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
        print(f"{args.output} holds {len(tasks)} of {len(read)} tasks", file=sys.stderr)
        print(f"| {task['name']} | {task['metric']} | {task['n']} | {task['score_off']:.3f} | {task['score_on']:.3f} "
              f"| {task['difference']:+.3f} ± {task['difference_error']:.3f} | {task['kv_share']:.2f} |", flush=True)


if __name__ == "__main__":
    with stoppable():
        main()
