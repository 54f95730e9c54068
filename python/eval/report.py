#!/usr/bin/env python3
"""Turns the JSON of ./deeptutor-eval (kld, needle, ab) and of tasks.py into one page.

usage: python3 python/eval/report.py -o REPORT.html [LABEL=]RESULT.json ...
       python3 python/eval/report.py -o REPORT.html -m MODEL.gguf -f TEXT [-i PROMPTS.jsonl] [-t N]

The first form reads results, several of a kind too: lines of one plot, named by what was evicted how, or by LABEL. The second
measures first: kld and needles of a window, of importance_score and of reconstruction with a shared budget at three sizes, and with
-i an A/B test with preset docqa; the results stay in REPORT_results/, and what lies there is not measured again. A name that ends
in .md gives Markdown, with its pictures in REPORT_files/; any other one self-contained HTML file.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "python"))
COMMANDS = ("kld", "needle", "ab", "tasks")
METHODS = [
    ("window", ["--policy", "local_window"]),
    ("importance", ["--policy", "importance_score"]),
    ("reconstruct", ["--policy", "importance_score", "--score", "reconstruct", "--budget", "adaptive"]),
]


def fail(text):
    sys.exit(f"error: {text}")


# ---- results ----

def read_result(argument):
    """A result with its label; "settings" always a list of rows."""
    label, _, path = argument.rpartition("=")
    if label and os.path.exists(argument):
        label, path = "", argument
    try:
        with open(path, encoding="utf-8") as file:
            result = json.load(file)
    except (OSError, ValueError) as error:
        fail(f"{path} can't be read: {error}")
    if not isinstance(result, dict) or result.get("command") not in COMMANDS:
        fail(f"{path} is no result of deeptutor-eval kld, needle or ab (their --json), nor of tasks.py")
    if result["command"] in ("kld", "needle"):
        result["settings"] = result.get("settings") or [result]
    result["label"] = label or result.get("eviction") or pathlib.Path(path).stem
    return result


def name_series(results):
    """Labels that tell results of one command apart: by the model, the cache's type, the kind of question, where they differ."""
    def differing(key, default=""):
        values = {result.get(key, default) for result in results}
        return (lambda result: [str(result.get(key, default))]) if len(values) > 1 else (lambda result: [])
    extras = [differing(key) for key in ("kv_type", "evict", "question", "prefill", "context")]
    models = {os.path.basename(result["model"]) for result in results}
    for result in results:
        parts = [part for extra in extras for part in extra(result)]
        parts += [os.path.basename(result["model"])] if len(models) > 1 else []
        result["name"] = result["label"] + (f" ({', '.join(parts)})" if parts else "")


def series_of(results, value, error=None):
    series = {}
    for result in results:
        for row in result["settings"]:
            series.setdefault(result["name"], []).append((row["kept_share"], row[value], row.get(error, 0.0)))
    return series


# ---- sections ----

def percent(share):
    return f"{100 * share:.3g} %"


def spread(value, error, n, form):
    """With its standard error, where more than one sample gives one."""
    return f"{value:{form}}" + (f" ± {error:{form.lstrip('+')}}" if n > 1 else "")


def kld_blocks(results, plots):
    name_series(results)
    rows = [[r["name"], percent(row["kept_share"]), spread(row["kld"], row["kld_error"], len(row["chunks"]), ".4f"),
             f"{row['top1']:.3f}", f"{row['nll'] - row['nll_full']:+.4f}", str(len(row["chunks"]))]
            for r in results for row in r["settings"]]
    yield "heading", "Distance from the full cache"
    yield "text", ("After the context was evicted, the text goes on and both caches say how likely every next token is. KL "
                   "divergence in nats: 0 means nothing was lost. Top-1: how often both find the same token likeliest. ± is the "
                   "standard error of the mean over pieces.")
    yield "table", ["eviction", "kept", "KL divergence", "top-1", "NLL added", "pieces"], rows
    yield "figures", [(plots.against_kept(series_of(results, "kld", "kld_error"), "KL divergence, nats", log=True),
                       "Quality lost, by what is kept"),
                      (plots.against_kept(series_of(results, "top1"), "same likeliest token", share=True),
                       "Agreement, by what is kept")]
    yield from attention_blocks(results, plots)
    yield from kept_blocks(results, plots)


def attention_blocks(results, plots):
    mass = next(((r["mass"], r) for r in results if any(r.get("mass") or [])), None)
    kept = {}
    for result in results:
        for row in result["settings"]:
            shares = row.get("map", {}).get("mass_kept", [])
            if any(share is not None for share in shares):
                kept[f"{result['name']}, {percent(row['kept_share'])}"] = shares
    figures = []
    if mass:
        figures.append((plots.layer_map(mass[0], mass[1]["context"], "attention", log=True), "Where attention goes, by layer"))
    if kept:
        chosen = dict(list(kept.items())[:8])
        figures.append((plots.by_layer(chosen, "attention kept"), "Attention to what is kept, by layer"))
    if figures:
        yield "heading", "Attention by layer"
        yield "text", ("Of the latest queries of the context, in the full cache: each layer's attention by the position it goes "
                       "to, and the share of it that goes to tokens that are still there after eviction.")
        yield "figures", figures


def kept_blocks(results, plots):
    maps, lanes = [], []
    for result in results:
        for row in result["settings"]:
            if "map" in row:
                caption = f"{result['name']}, {percent(row['kept_share'])} kept"
                maps.append((plots.layer_map(row["map"]["kept"], result["context"], "kept"), caption))
                shares = [share for layer in row["map"]["lanes"] for share in layer]
                if max(shares) - min(shares) > 0.01:
                    lanes.append((plots.lane_map(row["map"]["lanes"]), caption))
    if maps:
        yield "heading", "What each layer keeps"
        yield "text", "The share of the tokens at each position that is still there: a mean over a layer's KV heads and pieces."
        yield "figures", maps
    if lanes:
        yield "heading", "How much each KV head keeps"
        yield "text", "Where a budget is shared out: the few heads that look far back may keep nearly everything."
        yield "figures", lanes


def needle_blocks(results, plots):
    name_series(results)
    rows = [[r["name"], r.get("question", ""), percent(row["kept_share"]), f"{row['accuracy']:.3f}", f"{row['accuracy_full']:.3f}",
             str(len(row["samples"]))] for r in results for row in r["settings"]]
    full = max(row["accuracy_full"] for r in results for row in r["settings"])
    yield "heading", "Facts hidden in the text"
    yield "text", ("Numbers hidden at random depths and asked for, before eviction (aware) or after it: the share of answers with "
                   "every digit right.")
    yield "table", ["eviction", "question", "kept", "found", "full cache", "asked"], rows
    yield "figures", [(plots.against_kept(series_of(results, "accuracy"), "found", share=True, reference=full),
                       "Facts found, by what is kept")]


def ab_blocks(results, plots):
    name_series(results)
    yield "heading", "The same prompts, eviction off and on"
    yield "table", ["eviction", "samples", "same output", "ROUGE-L", "tokens agree", "decode speed", "KV of full", "verdict"], [
        [r["name"], str(len(r["samples"])), f"{r['exact_match']:.3f}",
         spread(r["rouge_l"], r["rouge_l_error"], len(r["samples"]), ".3f"), f"{r['token_agreement']:.3f}", f"{r['speedup']:.2f}x",
         percent(r["kv_share"]),
         "-" if r["verdict"] is None else "pass" if r["verdict"]["pass"] else "fail"] for r in results]
    checks = [[r["name"], c["name"], f"{c['value']:.4f}", f"{c['threshold']:.4f}", "pass" if c["pass"] else "fail"]
              for r in results if r["verdict"] for c in r["verdict"]["checks"]]
    if checks:
        yield "table", ["eviction", "checked", "measured", "wanted", ""], checks
    yield "figures", [(plots.sorted_scores({r["name"]: [s["rouge_l"] for s in r["samples"]] for r in results}, "ROUGE-L"),
                       "How alike the outputs are")]
    for result in results:
        worst = sorted((s for s in result["samples"] if not s["exact_match"]), key=lambda s: s["rouge_l"])[:20]
        if not worst:
            continue
        yield "text", f"{result['name']}: the outputs that differ most."
        yield "samples", result["name"], [
            (f"line {s['line']}: ROUGE-L {s['rouge_l']:.3f}, tokens agree {s['token_agreement']:.3f}",
             [("off", s["off"]["text"]), ("on", s["on"]["text"])]) for s in worst]


def task_blocks(results, plots):
    name_series(results)
    rows, groups = [], {}
    for result in results:
        for task in result["tasks"]:
            rows.append([task["name"], task["metric"], result["name"], str(task["n"]), f"{task['score_off']:.3f}",
                         f"{task['score_on']:.3f}", spread(task["difference"], task["difference_error"], task["n"], "+.3f"),
                         percent(task["kv_share"])])
            bars = groups.setdefault(task["name"], {"off": (task["score_off"], task["score_off_error"])})
            bars[result["name"]] = (task["score_on"], task["score_on_error"])
    yield "heading", "Tasks"
    yield "table", ["task", "metric", "eviction", "samples", "off", "on", "difference", "KV of full"], rows
    yield "figures", [(plots.grouped_bars(groups, "score"), "Scores")]
    for result in results:
        for task in result["tasks"]:
            lost = sorted(task["samples"], key=lambda s: s["score_on"] - s["score_off"])[:5]
            yield "samples", task["name"], [
                (f"{task['name']} {s['sample']}: {s['score_off']:.2f} off, {s['score_on']:.2f} on ({result['name']})",
                 [("answers", "\n".join(s["answers"])), ("off", s["off"]), ("on", s["on"])]) for s in lost]


SECTIONS = {"kld": kld_blocks, "needle": needle_blocks, "ab": ab_blocks, "tasks": task_blocks}


def make_report(path, title, results):
    try:
        from eval import page, plots
    except ModuleNotFoundError as error:
        python = ROOT / ".venv/bin/python"
        if python.exists() and pathlib.Path(sys.prefix).resolve() != (ROOT / ".venv").resolve():
            os.execv(python, [str(python), *sys.argv])
        fail(f"the Python package {error.name} is missing: python3 -m pip install matplotlib")
    models = sorted({os.path.basename(result["model"]) for result in results})
    contexts = sorted({result["context"] for result in results if "context" in result})
    blocks = [("text", "Model: " + ", ".join(models) +
               (f". Context: {' and '.join(f'{n:,}' for n in contexts)} tokens." if contexts else "."))]
    for command, section in SECTIONS.items():
        chosen = [result for result in results if result["command"] == command]
        if chosen:
            blocks.extend(section(chosen, plots))
    page.write(path, title, blocks)


# ---- measuring ----

def measure(args):
    """Runs what is not there yet; the result files."""
    program, folder = pathlib.Path(args.program), pathlib.Path(args.output).with_suffix("").with_name(
        pathlib.Path(args.output).stem + "_results")
    if not os.access(program, os.X_OK):
        fail(f"{program} is not there; build it with: bash run.sh")
    folder.mkdir(parents=True, exist_ok=True)
    runs = []
    for name, flags in METHODS:
        common = [*flags, "--kept", args.kept, "--evict", "once"]
        runs.append((f"kld-{name}", ["kld", "-f", args.file, "--context", str(args.context), "--chunks", str(args.chunks),
                                     *common]))
        runs.append((f"needle-{name}", ["needle", "-f", args.file, "--context", str(args.context // 2), "--samples",
                                        str(args.samples), *common]))
    if args.input:
        runs.append(("ab", ["ab", "-i", args.input, "--temp", "0", "--eviction-preset", "docqa"]))
    paths = []
    for i, (name, flags) in enumerate(runs):
        path = folder / f"{name}.json"
        paths.append(str(path))
        if path.exists():
            print(f"{path} is there already", file=sys.stderr)
            continue
        print(f"{i + 1}/{len(runs)} {name}", file=sys.stderr)
        threads = ["-t", str(args.threads)] if args.threads else []
        done = subprocess.run([str(program), flags[0], "-m", args.model, *flags[1:], *threads, "--json", str(path)],
                              stdin=subprocess.DEVNULL)
        if done.returncode != 0:
            fail(f"{name} ended with {done.returncode}; its own message is above")
    return paths


def main(argv=None):
    parser = argparse.ArgumentParser(usage="\n" + __doc__.split("\n\n")[1].replace("usage: ", "       "),
                                     description=__doc__.split("\n\n")[2])
    parser.add_argument("results", nargs="*", metavar="[LABEL=]RESULT.json")
    parser.add_argument("-o", "--output", required=True, help="REPORT.html or REPORT.md")
    parser.add_argument("--title", default="What eviction costs")
    parser.add_argument("-m", "--model", help="measure this model first")
    parser.add_argument("-f", "--file", help="on this text")
    parser.add_argument("-i", "--input", help="and these prompts, for the A/B test")
    parser.add_argument("-t", "--threads", type=int, default=0)
    parser.add_argument("--kept", default="0.5,0.25,0.125", help="shares of the context (0.5,0.25,0.125)")
    parser.add_argument("--context", type=int, default=4096, help="of kld, tokens; half of it for needles (4096)")
    parser.add_argument("--chunks", type=int, default=4, help="pieces of the text for kld (4)")
    parser.add_argument("--samples", type=int, default=16, help="texts with needles (16)")
    parser.add_argument("--program", default=str(ROOT / "deeptutor-eval"), help="(./deeptutor-eval)")
    args = parser.parse_args(argv)
    if bool(args.model) != bool(args.file) or (args.input and not args.model):
        parser.error("to measure, give a model with -m and a text with -f")
    if not args.results and not args.model:
        parser.error("there are no results to report on")
    folder = pathlib.Path(args.output).resolve().parent
    if not folder.is_dir():
        fail(f"{folder} is no folder")
    paths = list(args.results) + (measure(args) if args.model else [])
    make_report(args.output, args.title, [read_result(path) for path in paths])


if __name__ == "__main__":
    main()
