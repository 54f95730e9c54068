#!/usr/bin/env python3
"""The measurements behind docs/quality.md: every way to evict, on the same pieces of mixed text.

    python3 bench/quality.py -m model.gguf -o DIR [--calibration model.tlc.json] [--only kld,needle,presets] [--pieces 8]
    python3 bench/quality.py -o DIR --table

One run of ./deeptutor-eval per piece of text, whose result is kept in DIR: ended at any time, the same command goes on where it
was. All settings of a run share one reading of the piece and one pass of the full cache. Texts: eight pieces each of

    prose      King James Bible (Debian's bible-kjv-text), spread over the whole
    reference  vim's options manual (vim-runtime) and the manual pages of bash, find, proc and git-config
    code       this project's src/, and four modules of Python's library
    dialogue   the PyPI package chatterbot-corpus: questions and answers, mostly technical support

None of them is what calibration learns from (docs/). Without --calibration one is made in DIR first. Tables: mean over pieces +-
standard error of the mean, and the difference to local_window of the same size, piece by piece, with its own standard error: pieces
differ more than methods do.
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
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
EVAL = ROOT / "deeptutor-eval"
GENRES = ("prose", "reference", "code", "dialogue")
CORPUS = "chatterbot-corpus==1.3.3"
PIECE_CHARS = 26000  # more than 4,353 tokens of any of the texts
LONG_CHARS = 60000  # more than 8,192
KEPT = (0.5, 0.25, 0.125)
CONTEXT, CONTINUATION = 4096, 256


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


def texts(folder):
    """Makes the pieces: {name: file}."""
    files = {"%s%d" % (genre, i): folder / ("%s%d.txt" % (genre, i)) for genre in GENRES for i in range(8)}
    files.update({"long-" + genre: folder / ("long-%s.txt" % genre) for genre in GENRES})
    if all(file.exists() for file in files.values()):
        return files
    folder.mkdir(parents=True, exist_ok=True)
    bible = subprocess.run(["bible", "-f", "-l", "1000000", "Gen1:1-Rev22:21"], capture_output=True, text=True, check=True).stdout
    options = next(pathlib.Path("/usr/share/vim").glob("vim*/doc/options.txt")).read_text(errors="replace")
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    sources = "".join(file.read_text() for file in sorted((ROOT / "src").glob("*/*.c")))
    modules = [(library / name).read_text() for name in ("argparse.py", "tarfile.py", "typing.py", "http/client.py")]
    talk = dialogue(folder)
    for genre, text in (("prose", bible), ("reference", options), ("code", sources), ("dialogue", talk)):
        files["long-" + genre].write_text(spread(text, 1, LONG_CHARS)[0])
    made = {
        "prose": spread(bible, 8, PIECE_CHARS),
        "reference": spread(options, 4, PIECE_CHARS) +
                     [spread(manual(page), 1, PIECE_CHARS)[0] for page in ("bash", "find", "proc", "git-config")],
        "code": spread(sources, 4, PIECE_CHARS) + [spread(module, 1, PIECE_CHARS)[0] for module in modules],
        "dialogue": spread(talk, 8, PIECE_CHARS),
    }
    for genre, pieces in made.items():
        for i, piece in enumerate(pieces):
            files["%s%d" % (genre, i)].write_text(piece)
    return files


# ---- settings --------------------------------------------------------------------------------------

class Settings:
    def __init__(self, n_layers, calibration):
        self.n_layers, self.calibration = n_layers, str(calibration)

    def equal(self, size, policy="importance_score", **fields):
        return {"config": {"0-": {"policy": policy, "max_cache_size": size, **fields}}}

    def shared(self, size, **fields):
        return {"config": {"budget": "adaptive", "total_cache_size": size * self.n_layers,
                           "layers": {"0-": {"policy": "importance_score", **fields}}}}

    def predict(self, size):
        return {"config": self.calibration, "max_cache_size": size}

    def main(self):
        """The four ways at three sizes, once and always; what else is compared, at one or two of them."""
        rows = []
        for evict in ("once", "always"):
            for kept in KEPT if evict == "once" else KEPT[1:]:
                size = int(CONTEXT * kept)
                for name, setting in (("window", self.equal(size, "local_window")), ("fast", self.equal(size)),
                                      ("predict", self.predict(size)), ("reconstruct", self.shared(size, score="reconstruct"))):
                    rows.append({"name": "%s %s %g" % (name, evict, kept), "evict": evict, **setting})
        size = CONTEXT // 4
        rows.append({"name": "reconstruct-equal once 0.25", "evict": "once", **self.equal(size, score="reconstruct")})
        return rows

    def presets(self):
        """At twice the deep budget of chat and code, and summary and docqa cut down so that the model's 8,192 tokens are that."""
        rows = [{"name": "%s always 0.5" % preset, "evict": "always", "preset": preset} for preset in ("chat", "code")]
        half = self.n_layers // 2
        for preset, shallow in (("docqa", "local_window"), ("summary", "importance_score")):
            small = 2048 if preset == "docqa" else 1984  # 3,072 of 6,144, as in the preset
            rows.append({"name": "%s-scaled always 0.5" % preset, "evict": "always", "config": {
                "0-%d" % (half - 1): {"policy": shallow, "max_cache_size": small},
                "%d-" % half: {"policy": "importance_score", "max_cache_size": 3968}}})
        rows.append({"name": "chat-learned always 0.5", "evict": "always", "config": self.calibration, "max_cache_size": 3072})
        rows.append({"name": "code-learned always 0.5", "evict": "always", "config": self.calibration, "max_cache_size": 4096})
        return rows

    def needles(self, context):
        rows = []
        for kept in (0.5, 0.25):
            size = int(context * kept)
            for name, setting in (("window", self.equal(size, "local_window")), ("fast", self.equal(size)),
                                  ("predict", self.predict(size)), ("reconstruct", self.shared(size, score="reconstruct"))):
                rows.append({"name": "%s once %g" % (name, kept), "evict": "once", **setting})
        return rows


# ---- running ---------------------------------------------------------------------------------------

def evaluate(options, out, *args):
    """One run, unless its result is there; DIR/NAME.json appears whole."""
    if out.exists():
        return
    print("quality: %s" % out.stem, flush=True)
    partial = out.with_suffix(".partial.json")
    subprocess.run([str(EVAL), *map(str, args), "-m", options.model, "-t", str(options.threads), "--no-progress",
                    "--log-level", "error", "--json", str(partial)], check=True, stdout=subprocess.DEVNULL)
    partial.rename(out)


def calibrate(options, folder):
    path = folder / "calibration.tlc.json"
    evaluate(options, path, "calibrate")
    return path


def layers_of(calibration):
    return 1 + max(int(key.split("-")[-1]) for key in json.loads(pathlib.Path(calibration).read_text())["layers"])


def write(path, value):
    path.write_text(json.dumps(value))
    return path


def measure(options):
    folder = pathlib.Path(options.output)
    files = texts(folder / "texts")
    calibration = options.calibration or calibrate(options, folder)
    settings = Settings(layers_of(calibration), calibration)
    if "kld" in options.only:
        rows = write(folder / "kld-settings.json", settings.main())
        for i in range(options.pieces):
            for genre in GENRES:
                name = "%s%d" % (genre, i)
                evaluate(options, folder / ("kld-%s.json" % name), "kld", "-f", files[name], "--context", CONTEXT, "--continuation",
                         CONTINUATION, "--chunks", 1, "--settings", rows)
    if "presets" in options.only:
        rows = write(folder / "presets-settings.json", settings.presets())
        for genre in GENRES:
            evaluate(options, folder / ("presets-%s.json" % genre), "kld", "-f", files["long-" + genre], "--context", 7936,
                     "--continuation", 128, "--chunks", 1, "--settings", rows)
    if "needle" in options.only:
        rows = write(folder / "needle-settings.json", settings.needles(2000))
        for seed in range(1, options.samples + 1):
            for question in ("after", "aware"):
                evaluate(options, folder / ("needle-%s-%d.json" % (question, seed)), "needle",
                         "-f", files["reference%d" % (seed % 8)], "--context", 2000, "--samples", 1, "--needles", 4,
                         "--depth-low", 0.05, "--depth-high", 0.4, "--seed", seed, "--question", question, "--settings", rows)


# ---- tables ----------------------------------------------------------------------------------------

def mean(values):
    m = sum(values) / len(values)
    return m, math.sqrt(sum((v - m) ** 2 for v in values) / (len(values) - 1) / len(values)) if len(values) > 1 else 0.0


def rows_of(folder, pattern):
    """{setting: {piece: row}}"""
    found = {}
    for file in sorted(folder.glob(pattern)):
        if not re.search(r"settings|partial", file.name):
            for row in json.loads(file.read_text())["settings"]:
                found.setdefault(row["name"], {})[file.stem.split("-", 1)[1]] = row
    return found


def print_kld(folder):
    found = rows_of(folder, "kld-*.json")
    if not found:
        return
    print("| evict | kept | method | KLD | top-1 | worst piece | less than the window | better on | %s |" % " | ".join(GENRES))
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |%s" % (" ---: |" * len(GENRES)))
    for name, pieces in sorted(found.items(), key=lambda item: (item[0].split()[1] == "always", -float(item[0].split()[2]))):
        method, evict, kept = name.split()
        kld = {piece: row["kld"] for piece, row in pieces.items()}
        window = {piece: row["kld"] for piece, row in found["window %s %s" % (evict, kept)].items()}
        gain = [window[piece] - kld[piece] for piece in kld]
        of_genre = [[v for piece, v in kld.items() if piece.startswith(genre)] for genre in GENRES]
        cells = ["%.4f" % mean(values)[0] if values else "" for values in of_genre]
        print("| %s | %s | %s | %.4f ± %.4f | %.3f | %.3f | %s | %s | %s |" % (
            evict, kept, method, *mean(list(kld.values())), mean([row["top1"] for row in pieces.values()])[0], max(kld.values()),
            "" if method == "window" else "%.4f ± %.4f" % mean(gain),
            "" if method == "window" else "%d of %d" % (sum(g > 0 for g in gain), len(gain)), " | ".join(cells)))
    print()


def print_presets(folder):
    found = rows_of(folder, "presets-*.json")
    if found:
        print("| preset, 7,936 tokens of context | kept | KLD | worst piece | top-1 |\n| --- | ---: | ---: | ---: | ---: |")
    for name, pieces in found.items():
        rows = pieces.values()
        print("| %s | %.3f | %.4f ± %.4f | %.4f | %.3f |" % (
            name.split()[0], mean([row["kept_share"] for row in rows])[0], *mean([row["kld"] for row in rows]),
            max(row["kld"] for row in rows), mean([row["top1"] for row in rows])[0]))
    print()


def print_needles(folder):
    for question in ("after", "aware"):
        found = rows_of(folder, "needle-%s-*.json" % question)
        if not found:
            continue
        print("| needles, %s | kept | found | of | full cache |\n| --- | ---: | ---: | ---: | ---: |" % question)
        for name, samples in sorted(found.items(), key=lambda item: -float(item[0].split()[2])):
            asked = [s for row in samples.values() for s in row["samples"]]
            print("| %s | %s | %d | %d | %d |" % (name.split()[0], name.split()[2], sum(s["right"] for s in asked), len(asked),
                                              sum(s["full"] for s in asked)))
        print()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-m", "--model")
    parser.add_argument("-o", "--output", required=True, metavar="DIR")
    parser.add_argument("--calibration", metavar="F", help="what predict goes by (made in DIR)")
    parser.add_argument("--only", default="kld,needle,presets", type=lambda text: text.split(","))
    parser.add_argument("--pieces", type=int, default=8, help="of each kind of text, at most 8")
    parser.add_argument("--samples", type=int, default=6, help="texts with four needles each")
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="print the tables of what is there, and measure nothing")
    options = parser.parse_args()
    if not options.table and options.model is None:
        parser.error("-m MODEL is missing")
    if not options.table:
        measure(options)
    print_kld(pathlib.Path(options.output))
    print_presets(pathlib.Path(options.output))
    print_needles(pathlib.Path(options.output))


if __name__ == "__main__":
    main()
