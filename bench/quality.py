#!/usr/bin/env python3
"""The measurements behind docs/quality.md: every way to evict, on the same pieces of mixed text.

    python3 bench/quality.py -m model.gguf -o DIR [--calibration model.tlc.json] [--only kld,needle,presets,parts] [--pieces 8]
    python3 bench/quality.py -m model.gguf -o DIR --table [--results bench/results/PROCESSOR/quality]

One run of ./deeptutor-eval per piece of text, whose result is kept in DIR: ended at any time, the same command goes on where it
was; what decides most comes first. All settings of a run share one reading of the piece and one pass of the full cache. Texts:
eight pieces each of

    prose      King James Bible (Debian's bible-kjv-text), spread over the whole
    reference  vim's options manual (vim-runtime) and the manual pages of bash, find, proc and git-config
    code       this project's src/, and four modules of Python's library
    dialogue   the PyPI package chatterbot-corpus: questions and answers, mostly technical support

None of them is what calibration learns from (docs/). Without --calibration one is made in DIR first. Tables: mean over pieces +-
standard error of the mean, and differences piece by piece with their own standard error: pieces differ more than methods do.
--results writes them to .md and every number to .csv.
"""
import argparse
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import time
import zipfile

from peers import Parser, check_output, processor_name, refuse, until_ctrl_c, whole, write_file

ROOT = pathlib.Path(__file__).resolve().parent.parent
EVAL = ROOT / "deeptutor-eval"
GENRES = ("prose", "reference", "code", "dialogue")
KINDS = ("kld", "needle", "presets", "parts")
SETTING = {kind: re.compile(r"\S+ (once|always|quoted) (\d+(\.\d+)?%s)" % ("|on|off" if kind == "parts" else ""))
           for kind in KINDS}  # names: method, evict, kept
CORPUS = "chatterbot-corpus==1.3.3"
PIECE_CHARS = 26000, 53000  # more than 4,353 tokens of any of the texts, and than 8,320 (dialogues less)
KEPT = (0.25, 0.125)
QUOTE = 0.2  # depth of what is quoted: outside of any window compared
SMALL = 128  # a budget where little but pins is left
NEEDLE_CONTEXT = 2000
PARTS_SIZES = (128, 256, 512)
WITHOUT = ("fast-without-values", "fast-without-window")
PREDICT_WITHOUT, RECONSTRUCT_WITHOUT = "predict-without-attention", "reconstruct-without-attention"


# ---- texts -----------------------------------------------------------------------------------------

def spread(text, n, chars):
    """n pieces of whole lines, evenly over the text."""
    pieces = []
    for i in range(n):
        at = text.index("\n", int((len(text) - chars - 200) * (i + 0.5) / n)) + 1
        pieces.append(text[at:at + chars])
    if len(pieces[-1]) < chars * 0.9:
        sys.exit("a text of %d characters is too short for pieces of %d" % (len(text), chars))
    return pieces


def manual(page):
    run = subprocess.run(["man", page], capture_output=True, text=True, env={**os.environ, "MANWIDTH": "100", "LC_ALL": "C.UTF-8"})
    if run.returncode != 0:
        sys.exit("no manual page of %s: %s" % (page, run.stderr.strip()))
    return re.sub(".\x08", "", run.stdout)


def dialogue(folder):
    """Two speakers in turn, from the corpus's lists of exchanges."""
    if not list(folder.glob("chatterbot_corpus*.whl")):
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), CORPUS], check=True)
    archive = zipfile.ZipFile(next(folder.glob("chatterbot_corpus*.whl")))
    lines = []
    for name in sorted(archive.namelist()):
        turn = -1
        for line in archive.read(name).decode().splitlines() if "/english/" in name and name.endswith(".yml") else []:
            first, more = re.match(r"\s*-\s+-\s+(.*)", line), re.match(r"\s+-\s+(.*)", line)
            if first:
                turn = 0
                lines.append("\nA: " + first[1].strip("'\""))
            elif more and turn >= 0:
                turn += 1
                lines.append("AB"[turn % 2] + ": " + more[1].strip("'\""))
    return "\n".join(lines)


def texts(folder, chars):
    """Makes the pieces: {name: file}."""
    files = {"%s%d" % (genre, i): folder / ("%s%d.txt" % (genre, i)) for genre in GENRES for i in range(8)}
    if all(file.exists() for file in files.values()):
        return files
    folder.mkdir(parents=True, exist_ok=True)
    bible = subprocess.run(["bible", "-f", "-l", "1000000", "Gen1:1-Rev22:21"], capture_output=True, text=True, check=True).stdout
    options = next(pathlib.Path("/usr/share/vim").glob("vim*/doc/options.txt")).read_text(errors="replace")
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    sources = "".join(file.read_text() for file in sorted((ROOT / "src").glob("*/*.c")))
    modules = [(library / name).read_text() for name in ("argparse.py", "tarfile.py", "typing.py", "http/client.py")]
    talk = dialogue(folder)
    made = {
        "prose": spread(bible, 8, chars),
        "reference": spread(options, 4, chars) + [spread(manual(page), 1, chars)[0] for page in ("bash", "find", "proc", "git-config")],
        "code": spread(sources, 4, chars) + [spread(module, 1, chars)[0] for module in modules],
        "dialogue": spread(talk, 8, chars),
    }
    for genre, pieces in made.items():
        for i, piece in enumerate(pieces):
            files["%s%d" % (genre, i)].write_text(piece)
    return files


# ---- settings --------------------------------------------------------------------------------------

def read_calibration(path):
    """The config, what each layer learned of it, and how many layers there are."""
    try:
        config = json.loads(pathlib.Path(path).read_text())
        own = {layers: {k: entry[k] for k in ("policy", "score", "weights")} for layers, entry in config["layers"].items()}
        return config, own, 1 + max(int(layers.split("-")[-1]) for layers in own)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        refuse("%s is not what ./deeptutor-eval calibrate writes (%s: %s)" % (path, type(error).__name__, error))


class Settings:
    def __init__(self, calibration, context):
        self.calibration, self.context = str(calibration), context
        self.learned, self.own, self.n_layers = read_calibration(calibration)

    def equal(self, size, policy="importance_score", **fields):
        return {"config": {"0-": {"policy": policy, "max_cache_size": size, **fields}}}

    def shared(self, size, **fields):
        return {"config": {"budget": "adaptive", "total_cache_size": size * self.n_layers,
                           "layers": {"0-": {"policy": "importance_score", **fields}}}}

    def predict(self, size):
        return {"config": self.calibration, "max_cache_size": size}

    def ways(self, size):
        return {"window": self.equal(size, "local_window"), "fast": self.equal(size), "predict": self.predict(size),
                "reconstruct": self.shared(size, score="reconstruct")}

    def alone(self, size):
        """Score predict with the same size for every head."""
        return {"config": {layers: {**entry, "max_cache_size": size} for layers, entry in self.own.items()}}

    def main(self, serving):
        """The four ways compressed once, also where the text goes on with a quotation, and shared budgets beside equal ones; and as
        serving does."""
        rows = []
        for kept in KEPT:
            size = int(self.context * kept)
            for name, more in (("once", {}), ("quoted", {"quote": QUOTE})):
                for way, setting in self.ways(size).items():
                    rows.append({"name": "%s %s %g" % (way, name, kept), "evict": "once", **more, **setting})
            rows.append({"name": "predict-equal once %g" % kept, "evict": "once", **self.alone(size)})
            rows.append({"name": "reconstruct-equal once %g" % kept, "evict": "once", **self.equal(size, score="reconstruct")})
            rows.append({"name": "%s once %g" % (RECONSTRUCT_WITHOUT, kept), "evict": "once",
                         **self.shared(size, score=RECONSTRUCT_WITHOUT)})
        for size in (*(int(self.context * kept) for kept in KEPT), SMALL) if serving else ():
            for way, setting in list(self.ways(size).items())[:3 if size == SMALL else 4]:
                rows.append({"name": "%s always %g" % (way, size / self.context), "evict": "always", **setting})
        return rows

    def presets(self):
        """The presets cut down so that the context is twice their deep budget; and what they are once a calibration is there."""
        deep, half = self.context // 2, self.n_layers // 2

        def halves(shallow, policy, deep_policy="importance_score"):
            return {"config": {"0-%d" % (half - 1): {"policy": policy, "max_cache_size": shallow},
                               "%d-" % half: {"policy": deep_policy, "max_cache_size": deep}}}
        rows = {"chat": halves(deep // 2, "local_window"), "code": halves(deep, "local_window", "local_window"),
                "summary": halves(deep // 2, "importance_score"), "chat-learned": self.predict(deep * 3 // 4),
                "code-learned": self.predict(deep)}
        return [{"name": "%s always 0.5" % name, "evict": "always", **row} for name, row in rows.items()]

    def needles(self, context):
        return [{"name": "%s once %g" % (way, kept), "evict": "once", **setting}
                for kept in (0.5, 0.25, 0.125) for way, setting in self.ways(int(context * kept)).items()
                if kept > 0.2 or way in ("predict", "reconstruct")]

    def parts(self):
        """The scores fast and predict, and without each of their parts."""
        layers = {layers: {**entry, "score": PREDICT_WITHOUT} for layers, entry in self.learned["layers"].items()}
        config = {**self.learned, "layers": layers}
        return [{"name": "%s always %d" % (score, size), "evict": "always", **self.equal(size, score=score)}
                for size in PARTS_SIZES for score in ("fast",) + WITHOUT] + [
                {"name": "%s always %d" % (score, size), "evict": "always", **self.predict(size), "config": source}
                for size in PARTS_SIZES for score, source in (("predict", self.calibration), (PREDICT_WITHOUT, config))]

    def slots(self):
        """With slots, and without at equal bytes: a token has 12 bytes more with slots under a window, 4 under a score (of 264)."""
        rows = []
        for way, size, slots, instead in (("window", 256, 16, 285), ("window", 512, 16, 552), ("fast", 256, 16, 276),
                                          ("fast", 512, 64, 585), ("predict", 512, 16, 536)):
            for n, tokens, name in ((slots, size, "on"), (0, instead, "off")):
                setting = dict(self.ways(tokens)[way])
                if way == "predict":
                    setting["memory_slots"] = n
                else:
                    setting["config"]["0-"]["memory_slots"] = n
                rows.append({"name": "%s-%d+%d always %s" % (way, size, slots, name), "evict": "always", **setting})
        return rows


# ---- running ---------------------------------------------------------------------------------------

def evaluate(options, out, *args):
    """One run, unless its result is there; DIR/NAME.json appears whole."""
    if out.exists():
        return
    print("quality: %s %s" % (time.strftime("%H:%M:%S"), out.stem), flush=True)
    partial = out.with_suffix(".partial-%d.json" % os.getpid())
    try:
        done = subprocess.run([str(EVAL), *map(str, args), "-m", options.model, "-t", str(options.threads), "--no-progress",
                               "--log-level", "error", "--json", str(partial)], stdout=subprocess.DEVNULL)
        if done.returncode != 0:
            sys.exit("deeptutor-eval %s ended with %d; its own message is above" % (args[0], done.returncode))
        partial.rename(out)
    finally:
        partial.unlink(missing_ok=True)


def calibrate(options, folder):
    path = folder / "calibration.tlc.json"
    evaluate(options, path, "calibrate", "--chunks", 2)
    return path


def runs(options, folder, files):
    """(turn, kind, name, arguments): in every turn a piece of each kind of text, and what else is measured a few times less."""
    def compare(kind, file):
        return ("kld", "-f", file, "--context", options.context, "--continuation", options.continuation, "--chunks", 1,
                "--settings", folder / ("%s-settings.json" % kind))

    for i in range(options.pieces):
        for genre in GENRES:
            file = files["%s%d" % (genre, i)]
            yield i, "kld", "%s%d" % (genre, i), compare("kld" if i < options.serving else "once", file)
            yield i + 0.5, "presets", "%s%d" % (genre, i), compare("presets", file)
            yield i + 0.75, "parts", "%s%d" % (genre, i), compare("parts", file)
    for seed in range(1, options.samples + 1):
        for question in ("after", "aware"):
            yield (seed - 1) // 2, "needle", "%s-%d" % (question, seed), (
                "needle", "-f", files["reference%d" % (seed % 8)], "--context", NEEDLE_CONTEXT, "--samples", 1, "--needles", 2,
                "--depth-low", 0.05, "--depth-high", 0.4, "--seed", seed, "--question", question,
                "--settings", folder / "needle-settings.json")


def measure(options):
    folder = pathlib.Path(options.output)
    for path in (options.model, EVAL, *([options.calibration] if options.calibration else [])):
        if not os.path.isfile(path):
            refuse("%s is not there%s" % (path, "; build it with: bash run.sh" if path == EVAL else ""))
    if folder.exists() and not folder.is_dir():
        refuse("%s is no folder" % folder)
    files = texts(folder / "texts", PIECE_CHARS[options.context > 4096])
    settings = Settings(pathlib.Path(options.calibration or calibrate(options, folder)).resolve(), options.context)
    for kind, rows in (("kld", settings.main(True)), ("once", settings.main(False)), ("presets", settings.presets()),
                       ("needle", settings.needles(NEEDLE_CONTEXT)), ("parts", settings.parts() + settings.slots())):
        (folder / ("%s-settings.json" % kind)).write_text(json.dumps(rows))
    for _, kind, name, args in sorted(runs(options, folder, files), key=lambda run: run[0]):
        if kind in options.only:
            evaluate(options, folder / ("%s-%s.json" % (kind, name)), *args)


# ---- tables ----------------------------------------------------------------------------------------

def mean(values):
    m = sum(values) / len(values)
    return m, math.sqrt(sum((v - m) ** 2 for v in values) / (len(values) - 1) / len(values)) if len(values) > 1 else 0.0


def read_rows(file, kind):
    """The rows of a result, with all that the tables need."""
    try:
        rows = json.loads(file.read_text())["settings"]
        for row in rows:
            numbers = [s[k] for s in row["samples"] for k in ("right", "full")] if kind == "needle" else [
                row[k] for k in ("kept_share", "kld", "top1")]
            if not SETTING[kind].fullmatch(row["name"]) or not all(isinstance(number, (int, float)) for number in numbers):
                raise ValueError("setting %s" % row["name"])
        return rows
    except (OSError, ValueError, LookupError, TypeError) as error:
        refuse("%s is no whole result of this comparison (%s: %s); remove it, and without --table it is measured again" % (
            file, type(error).__name__, error))


def rows_of(folder, name):
    """{setting: {piece: row}}"""
    found = {}
    for file in sorted(folder.glob("%s-*.json" % name)):
        if not re.search(r"settings|partial", file.name):
            for row in read_rows(file, name.split("-")[0]):
                found.setdefault(row["name"], {})[file.stem.split("-", 1)[1]] = row
    return found


def klds(pieces):
    return {piece: row["kld"] for piece, row in pieces.items()}


def order(item):
    _, evict, kept = item[0].split()
    return ("once", "always", "quoted").index(evict), -float(kept)


def kld_table(folder, options):
    found = rows_of(folder, "kld")
    if not found:
        return []
    lines = ["## Divergence", "",
             "%d tokens, then %d. once: compressed once, the text goes on; always: as serving does; quoted: compressed once, "
             "then a passage from depth %g again." % (options.context, options.continuation, QUOTE), "",
             "| evict | kept | method | pieces | KLD | top-1 | worst piece | less than the window | better on | %s |" % (
                 " | ".join(GENRES)),
             "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |%s" % (" ---: |" * len(GENRES))]
    for name, pieces in sorted(found.items(), key=order):
        method, evict, kept = name.split()
        kld, window = klds(pieces), klds(found.get("window %s %s" % (evict, kept), {}))
        gain = [] if method == "window" else [window[piece] - kld[piece] for piece in kld if piece in window]
        of_genre = [[v for piece, v in kld.items() if piece.startswith(genre)] for genre in GENRES]
        cells = ["%.4f" % mean(values)[0] if values else "" for values in of_genre]
        lines.append("| %s | %s | %s | %d | %.4f ± %.4f | %.3f | %.3f | %s | %s | %s |" % (
            evict, kept, method, len(kld), *mean(list(kld.values())), mean([row["top1"] for row in pieces.values()])[0],
            max(kld.values()),
            "%.4f ± %.4f" % mean(gain) if gain else "",
            "%d of %d" % (sum(g > 0 for g in gain), len(gain)) if gain else "", " | ".join(cells)))
    return lines + [""]


def pairs_table(found, title, pairs):
    """Differences piece by piece: below 0 the first is better."""
    lines = ["## " + title, "", "| | against | KLD | KLD | difference | better on |", "| --- | --- | ---: | ---: | ---: | ---: |"]
    for a, b in pairs:
        if a in found and b in found:
            first, second = klds(found[a]), klds(found[b])
            both = sorted(set(first) & set(second))
            if not both:
                continue
            differences = [first[piece] - second[piece] for piece in both]
            lines.append("| %s | %s | %.4f | %.4f | %+.4f ± %.4f | %d of %d |" % (
                a, b, mean([first[piece] for piece in both])[0], mean([second[piece] for piece in both])[0], *mean(differences),
                sum(d < 0 for d in differences), len(both)))
    return lines + [""] if len(lines) > 4 else []


def comparisons(folder):
    found, parts = rows_of(folder, "kld"), rows_of(folder, "parts")
    for name in ("fast", "predict", PREDICT_WITHOUT) + WITHOUT:
        of_size = [klds(parts.get("%s always %d" % (name, size), {})) for size in PARTS_SIZES]
        parts[name + " always, mean of these"] = {
            piece: {"kld": mean([kld[piece] for kld in of_size])[0]} for piece in set.intersection(*map(set, of_size))}
    return (pairs_table(found, "A shared budget against equal ones", [
        ("%s once %s" % (way, kept), "%s-equal once %s" % (way, kept)) for way in ("predict", "reconstruct") for kept in KEPT]) +
        pairs_table(found, "Score reconstruct, and without a part", [
            ("reconstruct once %s" % kept, "%s once %s" % (RECONSTRUCT_WITHOUT, kept)) for kept in KEPT]) +
        pairs_table(parts, "Scores, and without each of their parts", [
            ("%s always%s" % (name.split("-")[0], size), "%s always%s" % (name, size)) for name in WITHOUT + (PREDICT_WITHOUT,)
            for size in [" %d" % size for size in PARTS_SIZES] + [", mean of these"]]) +
        pairs_table(parts, "Memory slots, at equal bytes", [
            (name, name[:-2] + "off") for name in parts if name.endswith(" on")]))


def presets_table(folder):
    found = rows_of(folder, "presets")
    lines = ["## Presets", "", "| preset | kept | KLD | worst piece | top-1 |",
             "| --- | ---: | ---: | ---: | ---: |"]
    for name, pieces in found.items():
        rows = pieces.values()
        lines.append("| %s | %.3f | %.4f ± %.4f | %.4f | %.3f |" % (
            name.split()[0], mean([row["kept_share"] for row in rows])[0], *mean([row["kld"] for row in rows]),
            max(row["kld"] for row in rows), mean([row["top1"] for row in rows])[0]))
    return lines + [""] if found else []


def needles_table(folder):
    lines = []
    for question in ("after", "aware"):
        found = rows_of(folder, "needle-%s" % question)
        if not found:
            continue
        lines += ["## Needles, asked %s" % ("after eviction" if question == "after" else "in the prompt"), "",
                  "| kept | method | found | of | full cache |",
                  "| ---: | --- | ---: | ---: | ---: |"]
        for name, samples in sorted(found.items(), key=order):
            asked = [s for row in samples.values() for s in row["samples"]]
            lines.append("| %s | %s | %d | %d | %d |" % (name.split()[2], name.split()[0], sum(s["right"] for s in asked),
                                                       len(asked), sum(s["full"] for s in asked)))
        lines.append("")
    return lines


def write_results(options, lines):
    folder, path = pathlib.Path(options.output), pathlib.Path(options.results)
    head = ["# Quality", "", "`python3 bench/quality.py -m %s -o DIR --context %d --continuation %d`, %s, %s. docs/quality.md says what "
            "the columns mean." % (pathlib.Path(options.model).name, options.context, options.continuation, processor_name(),
                                   time.strftime("%Y-%m-%d")), ""]
    write_file(path.with_suffix(".md"), "\n".join(head + lines).rstrip() + "\n")
    rows = ["kind,setting,piece,kept_share,kld,top1,nll,nll_full,right,asked"]
    for kind in ("kld", "parts", "presets", "needle"):
        for name, pieces in rows_of(folder, kind).items():
            for piece, row in pieces.items():
                samples = row.get("samples", [])
                cells = ["%.5f" % row[k] if k in row else "" for k in ("kept_share", "kld", "top1", "nll", "nll_full")]
                cells += [str(sum(s["right"] for s in samples)), str(len(samples))] if samples else ["", ""]
                rows.append(",".join([kind, name, piece] + cells))
    write_file(path.with_suffix(".csv"), "\n".join(rows) + "\n")


def kinds(text):
    unknown = [kind for kind in text.split(",") if kind not in KINDS]
    if unknown:
        raise argparse.ArgumentTypeError("there is no '%s'; known: %s" % (unknown[0], ", ".join(KINDS)))
    return text.split(",")


def main():
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-o", "--output", required=True, metavar="DIR")
    parser.add_argument("--calibration", metavar="F", help="what predict goes by (made in DIR)")
    parser.add_argument("--only", default=",".join(KINDS), type=kinds)
    parser.add_argument("--pieces", type=int, default=8, choices=range(1, 9), metavar="N", help="of each kind of text, at most 8")
    parser.add_argument("--serving", type=whole(0), default=2,
                        help="of these, compared as serving does too, token by token: slow (2)")
    parser.add_argument("--context", type=whole(1, 8064), default=2048,
                        help="tokens read, at most 8064, where presets are as large as they are; a DIR of its own for each (2048)")
    parser.add_argument("--continuation", type=whole(1), default=128, help="tokens compared after them (128)")
    parser.add_argument("--samples", type=whole(0), default=16, help="texts with needles")
    parser.add_argument("-t", "--threads", type=whole(1), default=1)
    parser.add_argument("--table", action="store_true", help="print the tables of what is there, and measure nothing")
    parser.add_argument("--results", metavar="F", help="write them to F.md and F.csv")
    options = parser.parse_args()
    folder = pathlib.Path(options.output)
    if options.results and not (pathlib.Path(options.results).parent.is_dir() or not pathlib.Path(options.results).parent.exists()):
        refuse("%s is no folder" % pathlib.Path(options.results).parent)
    for end in (".md", ".csv") if options.results else ():
        check_output(pathlib.Path(options.results).with_suffix(end))
    if not options.table:
        measure(options)
    elif not folder.is_dir():
        refuse("%s is no folder" % folder)
    lines = kld_table(folder, options) + needles_table(folder) + presets_table(folder) + comparisons(folder)
    print("\n".join(lines))
    if options.results:
        write_results(options, lines)


if __name__ == "__main__":
    until_ctrl_c(main)
