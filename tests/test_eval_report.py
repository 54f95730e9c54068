"""python/eval on a tiny model: pages from real results, task files, kld against a model written in numpy; and what it refuses."""
import html.parser
import importlib.util
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

EVAL, MAKE_MODEL, ASK_LLAMA = (os.environ.get(name, "") for name in ("DT_EVAL", "DT_MAKE_MODEL", "DT_ASK_LLAMA"))
ROOT = pathlib.Path(__file__).resolve().parent.parent
TEXT = str(ROOT / "examples/genesis.txt")
needs_programs = pytest.mark.skipif(not all(os.access(program, os.X_OK) for program in (EVAL, MAKE_MODEL, ASK_LLAMA)),
                                    reason="DT_EVAL, DT_MAKE_MODEL or DT_ASK_LLAMA names no program")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("report") / "tiny.gguf")
    subprocess.run([MAKE_MODEL, path, "--layers", "3", "--embd", "64", "--heads", "4", "--kv-heads", "2", "--head-dim", "16",
                    "--ff", "128", "--vocab", "320", "--ctx", "2048", "--type", "f32"], check=True, timeout=60)
    return path


def python(script, *args, code=0):
    done = subprocess.run([sys.executable, str(ROOT / "python/eval" / script), *map(str, args)], stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
    return done


KLD = {"command": "kld", "model": "m.gguf", "eviction": "local_window", "kv_type": "f16", "prefill": "exact", "context": 64,
       "evict": "always", "kept_share": 0.5, "kld": 0.1, "kld_error": 0, "top1": 0.9, "nll": 2.1, "nll_full": 2, "chunks": [{}]}
AB = {"command": "ab", "model": "m.gguf", "exact_match": 1, "rouge_l": 1, "rouge_l_error": 0, "token_agreement": 1, "speedup": 1,
      "kv_share": 1, "verdict": None, "samples": [{"line": 1, "exact_match": True, "rouge_l": 1, "token_agreement": 1,
                                                   "off": {"text": "a"}, "on": {"text": "a"}}]}


def write(path, value):
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


class Page(html.parser.HTMLParser):
    """Open tags, ids, references; fails on tags that do not match."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.references, self.outside = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "br", "img"):
            self.open.append(tag)
        for name, value in attributes:
            self.ids += [value] if name == "id" else []
            self.references += re.findall(r"^#(.+)|url\(#([^)]+)\)", value or "") if name != "xmlns" else []
            self.outside += [value] if name in ("href", "src", "xlink:href") and not value.startswith(("#", "data:")) else []

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@needs_programs
def test_pages(tiny, tmp_path):
    pytest.importorskip("matplotlib")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": "in the beginning " * n}) for n in range(3, 7)) + "\n")
    page = tmp_path / "report.html"
    python("report.py", "-o", page, "-m", tiny, "-f", TEXT, "-i", prompts, "--context", 512, "--chunks", 2, "--samples", 2,
           "--kept", "0.5,0.25", "-t", 1, "--program", EVAL)
    results = sorted((tmp_path / "report_results").iterdir())
    assert [path.name for path in results] == ["ab.json", *[f"{command}-{method}.json" for command in ("kld", "needle")
                                                            for method in ("importance", "reconstruct", "window")]]
    text = page.read_text()
    parsed = Page(text)
    assert len(set(parsed.ids)) == len(parsed.ids) and parsed.outside == []
    assert {a or b for a, b in parsed.references} <= set(parsed.ids)
    assert "#1a2b3c" not in text.lower() and "#bac9d8" not in text.lower()  # the frame's colours are the page's
    kld = {path.stem: json.loads(path.read_text()) for path in results if path.name.startswith("kld")}
    for name, result in kld.items():
        for row in result["settings"]:
            assert f"{row['kld']:.4f}" in text
            check_map(row, result)
    window = kld["kld-window"]["settings"][0]["map"]["kept"][0]  # 4 sinks, then the newest half
    assert window[40:] == [1.0] * 24 and window[1:31] == [0.0] * 30 and window[0] == 0.5

    markdown = tmp_path / "report.md"
    python("report.py", "-o", markdown, *[f"method {i}={path}" for i, path in enumerate(results)])
    pictures = re.findall(r"\]\((\S+\.png)\)", markdown.read_text())
    assert len(pictures) == len(set(pictures)) == text.count("<figure>") and "method 1" in markdown.read_text()
    assert all((tmp_path / name).read_bytes()[:4] == b"\x89PNG" for name in pictures)


def check_map(row, result):
    n_bins = row["map"]["bins"]
    assert len(row["map"]["kept"]) == len(row["map"]["lanes"]) == len(row["map"]["mass_kept"]) == len(result["mass"]) == 3
    for kept, lanes, mass_kept, mass in zip(row["map"]["kept"], row["map"]["lanes"], row["map"]["mass_kept"], result["mass"]):
        assert len(kept) == n_bins and all(0 <= share <= 1 for share in kept)
        assert abs(sum(kept) / n_bins - sum(lanes) / len(lanes)) < 0.01  # the map and the lanes count the same entries
        assert len(mass) == n_bins and abs(sum(mass) - 1) < 0.01 and 0 < mass_kept <= 1.0001
    lanes = [share for layer in row["map"]["lanes"] for share in layer]
    assert abs(sum(lanes) / len(lanes) - row["kept_share"]) < 0.002


FAKE_EVAL = """#!/usr/bin/env python3
import json, sys
open(sys.argv[0] + ".log", "a").write(sys.argv[1] + chr(10))
row = {"command": sys.argv[1], "accuracy": 1, "accuracy_full": 1, "samples": [], **json.loads('%s')}
open(sys.argv[sys.argv.index("--json") + 1], "w").write(json.dumps(row))
"""


def test_results_are_of_what_was_asked(tmp_path):
    """Measured once for the same model, text and flags; anew for any other."""
    pytest.importorskip("matplotlib")
    program = write(tmp_path / "eval", FAKE_EVAL % json.dumps({key: KLD[key] for key in KLD if key != "command"}))
    program.chmod(0o755)
    model, text, log = write(tmp_path / "m.gguf", "x"), write(tmp_path / "t.txt", "one"), tmp_path / "eval.log"

    def measured(*more, code=0):
        log.write_text("")
        done = python("report.py", "-o", tmp_path / "r.html", "-m", model, "-f", text, "--program", program, *more, code=code)
        n = len(log.read_text().splitlines())
        assert code or done.stderr.count("is there already") == 6 - n, done.stderr
        return n
    assert [measured(), measured(), measured("--kept", "0.5"), measured("--kept", "0.5")] == [6, 0, 6, 0]
    write(text, "another")
    write(tmp_path / "r_results/kld-window.json", "{")
    assert [measured("--kept", "0.5"), measured("--kept", "0.5")] == [6, 0]
    write(tmp_path / "r_results/kld-window.json", "{")
    assert measured("--kept", "0.5") == 1
    model.unlink()
    assert measured(code=2) == 0


def test_named_settings(tmp_path):
    """A line for each name, with how it evicts; a result that does not say so claims nothing."""
    pytest.importorskip("matplotlib")
    row = {key: KLD[key] for key in ("kept_share", "kld", "kld_error", "top1", "nll", "nll_full", "chunks")}
    head = {key: KLD[key] for key in KLD if key not in row}
    new = write(tmp_path / "new.json", {**head, "eviction": "settings s.json", "settings": [
        {**row, "name": "wide", "evict": "once"}, {**row, "name": "wide", "evict": "once", "kept_share": 0.25},
        {**row, "name": "far", "evict": "always"}]})
    old = write(tmp_path / "old.json", {**head, "settings": [{**row, "name": "a"}, {**row, "name": "b"}]})
    plain, page = write(tmp_path / "plain.json", KLD), tmp_path / "r.md"

    def series(*results):
        python("report.py", "-o", page, *results)
        return re.findall(r"^\| (.*?) \| \d", page.read_text(), re.M)
    assert series(new) == ["wide (once)", "wide (once)", "far (always)"]
    assert series(old) == ["a", "b"]
    assert series(f"mine={new}", old, plain)[2:] == ["mine: far (always)", "old: a", "old: b", "local_window (always)"]
    write(plain, {**KLD, "name": "alone"})
    assert series(plain) == ["alone"]


def test_many_settings_and_nothing_lost(tmp_path):
    """No warnings of the plotting library, whatever is on a line: KL divergence 0 has no logarithm."""
    pytest.importorskip("matplotlib")
    rows = [{**KLD, "name": f"setting {i}", "kld": i / 10} for i in range(64)]
    for result in (KLD, {**KLD, "kld": 0}, {**KLD, "kld": -1e-7}, {**KLD, "kept_share": 0}, {**KLD, "settings": rows}):
        path = tmp_path / "r.html"
        assert python("report.py", "-o", path, write(tmp_path / "x.json", result)).stderr == f"{path} is written\n"


def test_nothing_evicted_and_no_error(tmp_path):
    """What held all of the text is named, and an error that nobody knows is none."""
    pytest.importorskip("matplotlib")
    page = tmp_path / "r.md"
    for result, number in (({**KLD, "kld_error": None}, "0.1000 |"), ({**AB, "rouge_l_error": None}, "1.000 |")):
        for n_rounds in (0, 7):
            python("report.py", "-o", page, write(tmp_path / "x.json", {**result, "eviction_rounds": n_rounds}))
            assert ("Nothing was evicted in: " in page.read_text()) == (n_rounds == 0) and number in page.read_text()


def test_no_line_is_left_out(tmp_path):
    """Nine settings that each tell their attention: two pictures."""
    pytest.importorskip("matplotlib")
    page = tmp_path / "r.md"
    shown = {"kept": [[1.0, 0.5]], "lanes": [[0.5]], "mass_kept": [0.9]}
    rows = [{**KLD, "name": f"setting {i}", "kept_share": (i + 1) / 10, "map": shown} for i in range(9)]

    def pictures(rows):
        python("report.py", "-o", page, write(tmp_path / "x.json", {**KLD, "settings": rows}))
        return page.read_text().count("Attention to what is kept, by layer")
    assert pictures(rows) == 2 * pictures(rows[:8]) > 0


@pytest.mark.parametrize("value, what", [
    ("", "can't be read"), ('{"command": "kld"', "can't be read"), ({}, "is no result"), ([], "is no result"),
    ({**KLD, "model": None}, ": model is"), ({**KLD, "kld": None}, ": kld is"), ({**KLD, "kld": float("nan")}, ": kld is"),
    ({key: KLD[key] for key in KLD if key != "chunks"}, ": chunks is"), ({**KLD, "settings": "x"}, ": settings is"),
    ({**KLD, "settings": []}, ": settings is"), ({**KLD, "settings": [{**KLD, "top1": "1"}]}, ": settings[0].top1 is"),
    ({**KLD, "map": {"kept": [[1]], "lanes": [1]}}, ": map.lanes[0] is"), ({**AB, "exact_match": None}, ": exact_match is"),
    *(({**KLD, "mass": [[number, 0.5]]}, ": mass[0][0] is") for number in (10**30, -2**64, 2**64)),
    ({**KLD, "settings": [{**KLD, "map": {"kept": [[10**30]], "lanes": [[0.5]], "mass_kept": [1]}}]}, ": settings[0].map.kept[0][0] is"),
    ({**KLD, "map": {"kept": [[0.5]], "lanes": [[10**30]], "mass_kept": [1]}}, ": map.lanes[0][0] is"), ({**KLD, "kld": 10**400}, ": kld is"),
    ({**AB, "samples": [{**AB["samples"][0], "on": {}}]}, ": samples[0].on.text is"),
    ({"command": "tasks", "model": "m", "tasks": [{}]}, ": tasks[0].name is")])
def test_what_is_no_result(tmp_path, value, what):
    path = write(tmp_path / "x.json", value)
    failed = python("report.py", "-o", tmp_path / "r.html", path, code=2)
    assert failed.stderr.startswith(f"error: {path} ") and what in failed.stderr and failed.stderr.count("\n") == 1
    assert not (tmp_path / "r.html").exists()


def test_what_is_no_report(tmp_path):
    assert "can't be read" in python("report.py", "-o", tmp_path / "r.html", tmp_path / "missing.json", code=2).stderr
    python("report.py", "-o", tmp_path / "r.html", code=2)
    assert "at least 1" in python("report.py", "-o", tmp_path / "r.html", "-m", TEXT, "-f", TEXT, "--samples", "0", code=2).stderr


@pytest.mark.parametrize("command, what", [
    ("report.py -o {0}/x.json {0}/x.json", "is read"), ("report.py -o {0}/link.json new={0}/x.json", "is read"),
    ("report.py -o {0}/t.jsonl -m {0}/x.json -f {0}/t.jsonl", "is read"), ("report.py -o {0} {0}/x.json", "is a folder"),
    ("report.py -o {0}/missing/r.html {0}/x.json", "is no folder"),
    ("report.py -o {0}/r.html -m {0}/x.json -f {0}/t.jsonl", "r_results is needed as a folder"),
    ("report.py -o {0}/s.md {0}/x.json", "s_files is needed as a folder"),
    ("tasks.py -m {0}/x.json -i {0}/t.jsonl -o {0}/t.jsonl", "is read"),
    ("tasks.py -m {0}/x.json -i {0}/t.jsonl -o {0}/missing/x.json", "is no folder"),
    ("tasks.py -m {0}/x.json -i {0}/t.jsonl -o {0}/r_results --eviction-config={0}/r_results", "is read"),
    ("tasks.py -m {0}/missing.gguf -i {0}/t.jsonl -o {0}/y.json", "missing.gguf can't be read"),
    ("tasks.py -m {0}/x.json -i {0}/t.jsonl -o {0}/y.json --min-exact 1", "--min-exact checks nothing"),
    ("tasks.py -m {0}/x.json -i {0}/t.jsonl -o {0}/y.json --max-kv-share=1", "--max-kv-share checks nothing"),
    ("report.py -o {0}/y.html {0}/fifo", "is no regular file"), ("report.py -o {0}/y.html new={0}/fifo", "is no regular file"),
    ("report.py -o {0}/y.html -m {0}/x.json -f {0}/fifo", "is no regular file"),
    ("tasks.py -m {0}/x.json -i {0}/fifo -o {0}/y.json", "is no regular file"),
    ("report.py -o {0}/fifo {0}/x.json", "is no regular file"), ("report.py -o {0}/fifolink {0}/x.json", "is no regular file"),
    ("tasks.py -m {0}/x.json -i {0}/t.jsonl -o {0}/fifo", "is no regular file"),
    ("report.py -o {0}/circle {0}/x.json", "circle can't be written"),
    ("report.py -o {0}/p.md {0}/x.json", "01.png is a folder"),
    ("report.py -o {0}/p.html -m {0}/x.json -f {0}/t.jsonl", "kld-window.json is a folder"),
    ("report.py -o {0}/n.md {0}/x.json", "n_files is needed as a folder")])
def test_outputs_that_are_refused(tmp_path, command, what):
    """Before anything is measured, and nothing is written."""
    for name in ("x.json", "t.jsonl", "r_results", "s_files"):
        write(tmp_path / name, KLD)
    for name, target in (("link.json", "x.json"), ("fifolink", "fifo"), ("circle", "circle"), ("n_files", "nothing")):
        (tmp_path / name).symlink_to(target)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "p_files/01.png").mkdir(parents=True)
    (tmp_path / "p_results/kld-window.json").mkdir(parents=True)
    before = {path.name: path.is_file() and path.read_text() for path in tmp_path.iterdir()}
    measures = ["--program", sys.executable] if "-m " in command else []  # would end with another message
    failed = python(*command.format(tmp_path).split(), *measures, code=2)
    assert what in failed.stderr and failed.stderr.count("\n") == 1, failed.stderr
    assert {path.name: path.is_file() and path.read_text() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("flags", ["-n 0", "-n -2", "--predict 0", "--samples 0", "--samples -3", "--samples x"])
def test_numbers_of_tasks(tmp_path, flags):
    failed = python("tasks.py", "-m", TEXT, "-i", TEXT, "-o", tmp_path / "x.json", *flags.split(), code=2)
    assert "no whole number of at least 1" in failed.stderr


def test_what_an_output_replaces(tmp_path):
    """The file that a link leads to, there already or not; its mode stays, and so do other files."""
    from eval.command import write_whole

    old, own = write(tmp_path / "old.json", "old"), write(tmp_path / "link.json.part", "own")
    old.chmod(0o600)
    for name, target in (("link.json", "old.json"), ("new link.json", "new.json")):
        (tmp_path / name).symlink_to(target)
        write_whole(tmp_path / name, name)
        assert (tmp_path / name).is_symlink() and (tmp_path / target).read_text() == name
    write(tmp_path / "plain", "")
    assert old.stat().st_mode & 0o777 == 0o600 and own.read_text() == "own"
    assert (tmp_path / "new.json").stat().st_mode == (tmp_path / "plain").stat().st_mode  # as umask says
    with pytest.raises(SystemExit):
        write_whole(tmp_path, "no file")
    assert len(list(tmp_path.iterdir())) == 6


def test_an_output_where_the_table_goes(tmp_path):
    path = tmp_path / "x.json"
    with open(path, "w") as file:
        done = subprocess.run([sys.executable, ROOT / "python/eval/tasks.py", "-m", TEXT, "-i", TEXT, "-o", path, "--program",
                               sys.executable], stdout=file, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2 and "where stdout goes" in done.stderr and path.read_text() == "", done


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("command", ["tasks.py -i {0}/t.jsonl -o {0}/out", "report.py -f {1} -o {0}/out",
                                     "reference.py -f {1} --context 8 --continuation 4 --chunks 1 --tokens {0}/ids"])
def test_stopped(tmp_path, request, command, how):
    """One line; what was started is ended, and nothing stays in the folder for temporary files."""
    pytest.importorskip("gguf" if "reference" in command else "matplotlib" if "report" in command else "json")
    if "reference" in command and not all(os.access(program, os.X_OK) for program in (EVAL, MAKE_MODEL, ASK_LLAMA)):
        pytest.skip("DT_MAKE_MODEL names no program")
    model = request.getfixturevalue("tiny") if "reference" in command else TEXT
    program = write(tmp_path / "program", '#!/bin/sh\necho $$ > "$0.new" && mv "$0.new" "$0.pid"\nexec sleep 100\n')
    program.chmod(0o755)
    write(tmp_path / "t.jsonl", {"input": "x", "outputs": ["x"]})
    write(tmp_path / "ids", [1] * 16)
    (tmp_path / "tmp").mkdir()
    script, *arguments = command.format(tmp_path, TEXT).split()
    process = subprocess.Popen([sys.executable, ROOT / "python/eval" / script, *arguments, "-m", model, "--program", program],
                               stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "TMPDIR": str(tmp_path / "tmp")})
    pid = tmp_path / "program.pid"
    deadline = time.monotonic() + 60
    while not pid.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(how)
    told = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + how and told.endswith("stopped\n") and "Traceback" not in told, told
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    assert list((tmp_path / "tmp").iterdir()) == [] and not (tmp_path / "out").exists()


def test_what_the_reference_needs(tmp_path):
    pytest.importorskip("gguf")
    model = write(tmp_path / "m.gguf", "no model")
    common = ["reference.py", "-m", model, "-f", model, "--program", sys.executable]
    assert "run.sh --test" in python(*common, "--ask-llama", tmp_path / "missing", code=2).stderr
    assert "not a whole GGUF model" in python(*common, "--ask-llama", sys.executable, code=2).stderr
    assert "is no folder" in python(*common, "--ask-llama", sys.executable, "--json", tmp_path / "missing/x.json", code=2).stderr
    for flags, what in (("--kept x", "'x' is no list of shares"), ("--kept 0.5,2", "no list of shares"),
                        ("--chunks 0", "at least 1"), ("--context x", "at least 1")):
        assert what in python(*common, *flags.split(), code=2).stderr
    os.mkfifo(tmp_path / "fifo")
    assert "no regular" in python(*common, "--ask-llama", sys.executable, "--json", tmp_path / "fifo", code=2).stderr


@pytest.mark.parametrize("script", ["report.py", "reference.py"])
def test_python_without_packages(tmp_path, script):
    """.venv's takes over where there is one; else a sentence."""
    arguments = ["-o", tmp_path / "r.html", write(tmp_path / "x.json", KLD)] if script == "report.py" else ["--help"]
    done = subprocess.run([sys.executable, "-I", "-S", ROOT / "python/eval" / script, *arguments], capture_output=True, text=True,
                          timeout=300)
    assert (done.returncode == 0) if (ROOT / ".venv/bin/python").exists() else (
        done.returncode == 2 and "run.sh --test" in done.stderr), done
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("low,high", [(0, 1), (0.9, 1), (0.98, 1.0), (0.125, 0.131), (0.9999, 1.0)])
def test_percents_of_an_axis_differ(low, high):
    pytest.importorskip("matplotlib")
    from eval import plots

    figure, axis = plots.plt.subplots()
    axis.set_ylim(low, high)
    axis.yaxis.set_major_formatter(plots.Percent())
    figure.canvas.draw()
    labels = [label.get_text() for label in axis.get_yticklabels()]
    plots.plt.close(figure)
    assert len(set(labels)) == len(labels) and all(label.endswith(" %") for label in labels)
    assert ("." in labels[0]) == (high - low < 0.05), labels


def test_metrics():
    from eval.metrics import METRICS

    cases = [("f1", "The cat sat.", ["a cat"], 2 * 1 / 3), ("f1", "nothing", ["cat", "nothing at all"], 2 * 1 / 4),
             ("f1", "", ["cat"], 0), ("f1", "北京", ["在北京"], 2 * 2 / 5), ("rouge_l", "b d", ["a b c d"], 2 * 2 / 5),
             ("exact", "The  Cat!", ["cat"], 1), ("exact", "cats", ["cat"], 0),
             ("contains", "It is 12345, sir", ["12345", "678"], 0.5),
             ("contains_any", "It is 12345, sir", ["12345", "678"], 1)]
    for metric, output, answers, expected in cases:
        assert abs(METRICS[metric](output, answers) - expected) <= 1e-12, (metric, output)


@needs_programs
def test_tasks(tiny, tmp_path):
    ruler, longbench, out = tmp_path / "niah.jsonl", tmp_path / "qa.jsonl", tmp_path / "tasks.json"
    ruler.write_text("\n".join(json.dumps({"index": i, "input": "the number is 7 " * 20, "outputs": ["7"]}) for i in range(2)))
    longbench.write_text(json.dumps({"context": "the earth was without form " * 10, "input": "what?", "answers": ["earth"],
                                     "dataset": "trec"}) + "\n\n")
    ruler.write_text("\n" + ruler.read_text().replace("\n", "\n \n"))
    python("tasks.py", "-m", tiny, "-i", ruler, "-i", longbench, "-o", out, "-n", 8, "--program", EVAL, "--policy", "local_window",
           "--max-cache-size", 40, "-t", 1)
    result = json.loads(out.read_text())
    found = [(task["name"], task["metric"], task["n"]) for task in result["tasks"]]
    assert found == [("niah", "contains", 2), ("qa", "contains_any", 1)]
    assert [s["sample"] for s in result["tasks"][0]["samples"]] == [2, 4]  # the lines of the file
    for task in result["tasks"]:
        for side in ("off", "on"):
            scores = [s[f"score_{side}"] for s in task["samples"]]
            assert scores == [float(any(a in s[side].lower() for a in s["answers"])) for s in task["samples"]]
            assert abs(task[f"score_{side}"] - sum(scores) / len(scores)) < 1e-12
        assert task["kv_share"] <= 1
    before = result["tasks"][0]["samples"][0]["answers"]
    longbench.write_text("\n" + json.dumps({"context": "word " * 900, "input": "what?", "answers": ["earth"]}))
    failed = python("tasks.py", "-m", tiny, "-i", ruler, "-i", longbench, "-o", out, "-n", 8, "--program", EVAL, "--policy",
                    "local_window", "--max-cache-size", 40, "-t", 1, "-c", 700, code=2)
    assert "- line 2: its" in failed.stderr and f"where - is {longbench}\n" in failed.stderr and "/tmp/tmp" not in failed.stderr
    kept = json.loads(out.read_text())["tasks"]
    assert [task["name"] for task in kept] == ["niah"] and kept[0]["samples"][0]["answers"] == before
    ruler.write_text('{"input": "x"}')
    assert "line 1" in python("tasks.py", "-m", tiny, "-i", ruler, "-o", out, "--program", EVAL, code=2).stderr
    pytest.importorskip("matplotlib")
    python("report.py", "-o", tmp_path / "r.html", out)
    Page((tmp_path / "r.html").read_text())


@needs_programs
def test_tokens_of_the_reference(tiny, tmp_path):
    pytest.importorskip("gguf")
    common = ["reference.py", "-m", tiny, "-f", TEXT, "--context", 8, "--continuation", 4, "--chunks", 1, "--program", EVAL,
              "--tokens"]
    for ids, what in (([320] * 16, "holds 320, and"), ([-1] * 16, "holds -1, and"), ([1.5], "no JSON list"),
                      ("123", "no JSON list"), ([True], "no JSON list"), ([1] * 5, "the text has 5")):
        assert what in python(*common, write(tmp_path / "ids", json.dumps(ids)), code=2).stderr, ids


@pytest.mark.skipif((ROOT / ".venv").exists(), reason="a .venv is there, which takes over")
def test_what_kvpress_needs():
    """run.sh --test does not install it."""
    pytest.importorskip("gguf")
    if importlib.util.find_spec("kvpress"):
        pytest.skip("kvpress is there")
    told = python("reference.py", "-m", TEXT, "-f", TEXT, "--program", sys.executable, "--ask-llama", sys.executable, "--with",
                  "kvpress", code=2).stderr
    assert "-m pip install kvpress" in told and "run.sh" not in told


@needs_programs
def test_kld_of_a_window_against_numpy(tiny, tmp_path):
    """StreamingLLM: 4 sinks and the newest tokens, compressed once. Another program, other arithmetic, the same numbers."""
    pytest.importorskip("gguf")
    np = pytest.importorskip("numpy")
    out = tmp_path / "both.json"
    text = tmp_path / "text.txt"
    text.write_text(pathlib.Path(TEXT).read_text()[:3000])
    python("reference.py", "-m", tiny, "-f", text, "--context", 400, "--continuation", 32, "--chunks", 2, "--kept", "0.5,0.125",
           "--program", EVAL, "--ask-llama", ASK_LLAMA, "--json", out)
    both = json.loads(out.read_text())
    theirs, ours = np.array(both["theirs"]), np.array(both["ours"])
    assert theirs.shape == ours.shape == (2, 2, 4) and np.isfinite(theirs).all() and np.isfinite(ours).all()
    assert (theirs[..., 0] > 0.01).all()
    assert (np.abs(ours[..., 0] / theirs[..., 0] - 1) <= 0.03).all(), both  # the cache is F16 there
    assert (np.abs(ours[..., 2:] - theirs[..., 2:]) <= 0.01).all(), both
