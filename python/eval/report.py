#!/usr/bin/env python3
"""Turns the JSON of ./deeptutor-eval (kld, needle, ab) and of tasks.py into one page.

usage: python3 python/eval/report.py -o REPORT.html [LABEL=]RESULT.json ...
       python3 python/eval/report.py -o REPORT.html -m MODEL.gguf -f TEXT
                                     [-i PROMPTS.jsonl] [-t N]

The first form reads results, several of a kind too: lines of one plot, named by what was evicted how, or by LABEL. The second
measures first: kld and needles of a window, of importance_score and of reconstruction with a shared budget at three sizes, and with
-i an A/B test with preset docqa; the results stay in REPORT_results/, and what was measured there by the same command on the same
files is not measured again. A name that ends in .md gives Markdown, with its pictures in REPORT_files/; any other one
self-contained HTML file.
"""
import json
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from calibration import calibration_of  # noqa: E402
from command_line import Parser  # noqa: E402
from eval.command import (ROOT, at_least_one, check_folder, check_inputs, check_output, check_program, fail,  # noqa: E402
                          go_on_in_venv, run_program, stoppable, write_whole)
from eval.results import BadResult, name_series, read_result, series_of  # noqa: E402

METHODS = [
    ("window", ["--policy", "local_window"]),
    ("importance", ["--policy", "importance_score"]),
    ("reconstruct", ["--policy", "importance_score", "--score", "reconstruct", "--budget", "adaptive"]),
]


# ---- sections ----

def percent(share):
    return f"{100 * share:.3g} %"


def spread(value, error, n, form):
    """With its standard error, where more than one sample gives one."""
    return f"{value:{form}}" + (f" ± {error:{form.lstrip('+')}}" if n > 1 and error is not None else "")


def note_unevicted(results):
    """What would else look like quality kept."""
    names = sorted({f"{row['series']} ({percent(row['kept_share'])} kept)" if "kept_share" in row else row["series"]
                    for r in results for row in r["settings"] if row.get("eviction_rounds") == 0})
    if names:
        yield "text", f"Nothing was evicted in: {', '.join(names)}. The budgets held all of it, so both sides are the full cache."


def kld_blocks(results, plots):
    name_series(results)
    rows = [[row["series"], percent(row["kept_share"]), spread(row["kld"], row.get("kld_error"), len(row["chunks"]), ".4f"),
             f"{row['top1']:.3f}", f"{row['nll'] - row['nll_full']:+.4f}", str(len(row["chunks"]))]
            for r in results for row in r["settings"]]
    yield "heading", "Distance from the full cache"
    yield "text", ("After the context was evicted, the text goes on and both caches say how likely every next token is. KL "
                   "divergence in nats: 0 means nothing was lost. Top-1: how often both find the same token likeliest. ± is the "
                   "standard error of the mean over pieces.")
    yield "table", ["eviction", "kept", "KL divergence", "top-1", "NLL added", "pieces"], rows
    yield from note_unevicted(results)
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
            shares = (row.get("map") or {}).get("mass_kept", [])
            if any(share is not None for share in shares):
                kept[f"{row['series']}, {percent(row['kept_share'])}"] = shares
    figures = []
    if mass:
        figures.append((plots.layer_map(mass[0], mass[1]["context"], "attention", log=True), "Where attention goes, by layer"))
    lines = list(kept.items())
    figures += [(plots.by_layer(dict(lines[i:i + 8]), "attention kept"), "Attention to what is kept, by layer")
                for i in range(0, len(lines), 8)]  # more in one picture nobody can tell apart
    if figures:
        yield "heading", "Attention by layer"
        yield "text", ("Of the latest queries of the context, in the full cache: each layer's attention by the position it goes "
                       "to, and the share of it that goes to tokens that are still there after eviction.")
        yield "figures", figures


def kept_blocks(results, plots):
    maps, lanes = [], []
    for result in results:
        for row in result["settings"]:
            if row.get("map"):
                caption = f"{row['series']}, {percent(row['kept_share'])} kept"
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
    rows = [[row["series"], r.get("question") or "", percent(row["kept_share"]), f"{row['accuracy']:.3f}",
             f"{row['accuracy_full']:.3f}", str(len(row["samples"]))] for r in results for row in r["settings"]]
    full = max(row["accuracy_full"] for r in results for row in r["settings"])
    yield "heading", "Facts hidden in the text"
    yield "text", ("Numbers hidden at random depths and asked for, before eviction (aware) or after it: the share of answers with "
                   "every digit right.")
    yield "table", ["eviction", "question", "kept", "found", "full cache", "asked"], rows
    yield from note_unevicted(results)
    yield "figures", [(plots.against_kept(series_of(results, "accuracy"), "found", share=True, reference=full),
                       "Facts found, by what is kept")]


def ab_blocks(results, plots):
    name_series(results)
    yield "heading", "The same prompts, eviction off and on"
    yield "table", ["eviction", "samples", "same output", "ROUGE-L", "tokens agree", "decode speed", "KV of full", "verdict"], [
        [r["series"], str(len(r["samples"])), f"{r['exact_match']:.3f}",
         spread(r["rouge_l"], r.get("rouge_l_error"), len(r["samples"]), ".3f"), f"{r['token_agreement']:.3f}", f"{r['speedup']:.2f}x",
         percent(r["kv_share"]),
         "-" if not r.get("verdict") else "pass" if r["verdict"]["pass"] else "fail"] for r in results]
    yield from note_unevicted(results)
    checks = [[r["series"], c["name"], f"{c['value']:.4f}", f"{c['threshold']:.4f}", "pass" if c["pass"] else "fail"]
              for r in results if r.get("verdict") for c in r["verdict"]["checks"]]
    if checks:
        yield "table", ["eviction", "checked", "measured", "wanted", ""], checks
    yield "figures", [(plots.sorted_scores({r["series"]: [s["rouge_l"] for s in r["samples"]] for r in results}, "ROUGE-L"),
                       "How alike the outputs are")]
    for result in results:
        worst = sorted((s for s in result["samples"] if not s["exact_match"]), key=lambda s: s["rouge_l"])[:20]
        if not worst:
            continue
        yield "text", f"{result['series']}: the outputs that differ most."
        yield "samples", result["series"], [
            (f"line {s['line']}: ROUGE-L {s['rouge_l']:.3f}, tokens agree {s['token_agreement']:.3f}",
             [("off", s["off"]["text"]), ("on", s["on"]["text"])]) for s in worst]


def task_blocks(results, plots):
    name_series(results)
    rows, groups = [], {}
    for result in results:
        for task in result["tasks"]:
            rows.append([task["name"], task["metric"], result["series"], str(task["n"]), f"{task['score_off']:.3f}",
                         f"{task['score_on']:.3f}", spread(task["difference"], task["difference_error"], task["n"], "+.3f"),
                         percent(task["kv_share"])])
            bars = groups.setdefault(task["name"], {"off": (task["score_off"], task["score_off_error"])})
            bars[result["series"]] = (task["score_on"], task["score_on_error"])
    yield "heading", "Tasks"
    yield "table", ["task", "metric", "eviction", "samples", "off", "on", "difference", "KV of full"], rows
    yield "figures", [(plots.grouped_bars(groups, "score"), "Scores")]
    for result in results:
        for task in result["tasks"]:
            lost = sorted(task["samples"], key=lambda s: s["score_on"] - s["score_off"])[:5]
            yield "samples", task["name"], [
                (f"{task['name']} {s['sample']}: {s['score_off']:.2f} off, {s['score_on']:.2f} on ({result['series']})",
                 [("answers", "\n".join(s["answers"])), ("off", s["off"]), ("on", s["on"])]) for s in lost]


SECTIONS = {"kld": kld_blocks, "needle": needle_blocks, "ab": ab_blocks, "tasks": task_blocks}


def load_plots():
    try:
        from eval import page, plots
    except ModuleNotFoundError as error:
        go_on_in_venv(error)
    return page, plots


def make_report(path, title, results, page, plots):
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

def beside(output, ending):
    return pathlib.Path(output).with_name(pathlib.Path(output).stem + ending)


def planned(args):
    """(name, flags, files read). Presets read what calibration wrote beside the model, where it did."""
    for name, flags in METHODS:
        common = [*flags, "--kept", args.kept, "--evict", "once"]
        yield (f"kld-{name}", ["kld", "-f", args.file, "--context", str(args.context), "--chunks", str(args.chunks), *common],
               [args.file])
        yield (f"needle-{name}", ["needle", "-f", args.file, "--context", str(args.context // 2), "--samples", str(args.samples),
                                  *common], [args.file])
    if args.input:
        learned = calibration_of(args.model)
        yield ("ab", ["ab", "-i", args.input, "--temp", "0", "--eviction-preset", "docqa"],
               [args.input, *([learned] if learned else [])])


def request_of(command, files):
    """What a result is a result of. Another file in a file's place has another size or time."""
    stamps = [[os.path.abspath(file), os.stat(file).st_size, os.stat(file).st_mtime_ns] for file in files]
    return {"command": command, "files": stamps}


def is_answer(path, request):
    try:
        return json.loads(path.read_text(encoding="utf-8"))["request"] == request
    except (OSError, ValueError, LookupError, TypeError):  # not there, cut short, or made by another program
        return False


def measure(args):
    """Runs what was not measured by the same request; the result files, each with its "request"."""
    folder = beside(args.output, "_results")
    folder.mkdir(exist_ok=True)
    runs, paths = list(planned(args)), []
    for i, (name, flags, files) in enumerate(runs):
        path = folder / f"{name}.json"
        paths.append(path)
        command = [args.program, flags[0], "-m", args.model, *flags[1:], *(["-t", str(args.threads)] if args.threads else [])]
        request = request_of(command, [args.model, *files])
        if is_answer(path, request):
            print(f"{path} is there already", file=sys.stderr)
            continue
        print(f"{i + 1}/{len(runs)} {name}", file=sys.stderr)
        run_program([*command, "--json", path])
        result = json.loads(path.read_text(encoding="utf-8"))
        write_whole(path, json.dumps({**result, "request": request}, indent=1) + "\n")
    return paths


def split_label(argument):
    """[LABEL=]FILE"""
    label, _, path = argument.rpartition("=")
    return ("", argument) if label and os.path.exists(argument) else (label, path)


def check(args, given):
    inputs = [path for path in (args.model, args.file, args.input) if path]
    read = [*inputs, *(path for _, path in given)]
    check_output(args.output, read)
    check_inputs(read)
    written = []
    if args.model:
        check_program(args.program, "bash run.sh")
        folder = beside(args.output, "_results")
        check_folder(folder)
        written += [folder / f"{name}.json" for name, _, _ in planned(args)]
    if args.output.endswith(".md"):
        folder = beside(args.output, "_files")
        check_folder(folder)
        written += folder.glob("[0-9][0-9]*.png")  # those there; how many there will be, the results tell
    for path in written:
        if path.parent.is_dir():
            check_output(path, inputs)


def main(argv=None):
    parser = Parser(usage=__doc__.split("\n\n")[1][len("usage: "):],
                    description=__doc__.split("\n\n")[2])
    parser.add_argument("results", nargs="*", metavar="[LABEL=]RESULT.json")
    parser.add_argument("-o", "--output", required=True, help="REPORT.html or REPORT.md")
    parser.add_argument("--title", default="What eviction costs")
    parser.add_argument("-m", "--model", help="measure this model first")
    parser.add_argument("-f", "--file", help="on this text")
    parser.add_argument("-i", "--input", help="and these prompts, for the A/B test")
    parser.add_argument("-t", "--threads", type=int, default=0)
    parser.add_argument("--kept", default="0.5,0.25,0.125", help="shares of the context (0.5,0.25,0.125)")
    parser.add_argument("--context", type=at_least_one, default=4096, help="of kld, tokens; half of it for needles (4096)")
    parser.add_argument("--chunks", type=at_least_one, default=4, help="pieces of the text for kld (4)")
    parser.add_argument("--samples", type=at_least_one, default=16, help="texts with needles (16)")
    parser.add_argument("--program", default=str(ROOT / "deeptutor-eval"), help="(./deeptutor-eval)")
    args = parser.parse_args(argv)
    if bool(args.model) != bool(args.file) or (args.input and not args.model):
        parser.error("to measure, give a model with -m and a text with -f")
    if not args.results and not args.model:
        parser.error("there are no results to report on")
    given = [split_label(argument) for argument in args.results]
    check(args, given)
    try:
        results = [read_result(path, label) for label, path in given]
        page, plots = load_plots()  # before measuring, as another Python may begin anew
        results += [read_result(path) for path in (measure(args) if args.model else [])]
    except BadResult as error:
        fail(error)
    make_report(args.output, args.title, results, page, plots)
    print(f"{args.output} is written", file=sys.stderr)


if __name__ == "__main__":
    with stoppable():
        main()
