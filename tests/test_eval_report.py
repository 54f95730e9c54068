"""python/eval on a tiny model: pages from real results, task files, and kld against a model written in numpy."""
import html.parser
import json
import os
import pathlib
import re
import subprocess
import sys

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
    assert done.returncode == code, done.stderr
    return done


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


def test_what_is_no_result(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("{}")
    assert "no result" in python("report.py", "-o", tmp_path / "r.html", path, code=1).stderr
    assert "can't be read" in python("report.py", "-o", tmp_path / "r.html", tmp_path / "missing.json", code=1).stderr
    python("report.py", "-o", tmp_path / "r.html", code=2)


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
    python("tasks.py", "-m", tiny, "-i", ruler, "-i", longbench, "-o", out, "-n", 8, "--program", EVAL, "--policy", "local_window",
           "--max-cache-size", 40, "-t", 1)
    result = json.loads(out.read_text())
    found = [(task["name"], task["metric"], task["n"]) for task in result["tasks"]]
    assert found == [("niah", "contains", 2), ("qa", "contains_any", 1)]
    for task in result["tasks"]:
        for side in ("off", "on"):
            scores = [s[f"score_{side}"] for s in task["samples"]]
            assert scores == [float(any(a in s[side].lower() for a in s["answers"])) for s in task["samples"]]
            assert abs(task[f"score_{side}"] - sum(scores) / len(scores)) < 1e-12
        assert task["kv_share"] <= 1
    ruler.write_text('{"input": "x"}')
    assert "line 1" in python("tasks.py", "-m", tiny, "-i", ruler, "-o", out, "--program", EVAL, code=1).stderr
    pytest.importorskip("matplotlib")
    python("report.py", "-o", tmp_path / "r.html", out)
    Page((tmp_path / "r.html").read_text())


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
