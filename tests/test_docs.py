"""What is written in two places says the same in both: the READMEs, the list of dependencies, the picture of speed, links."""
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "deps/README.md"])


def written_by(script, *arguments):
    return subprocess.run([sys.executable, str(ROOT / script), *arguments], capture_output=True, text=True, timeout=60, check=True).stdout


def test_both_readmes_are_in_step():
    """The same headings in the same order, the same commands to the letter, flags, links and numbers; sentences are the translator's."""
    english, chinese = (ROOT / "README.md").read_text(), (ROOT / "README.zh.md").read_text()
    for text in (english, chinese):
        assert len(text.splitlines()) <= 200
    headings = [[len(mark) for mark in re.findall(r"^(#+) ", re.sub(r"```.*?```", "", text, flags=re.S), re.M)]
                for text in (english, chinese)]
    assert headings[0] == headings[1]
    assert re.findall(r"```.*?```", english, re.S) == re.findall(r"```.*?```", chinese, re.S)
    documents = [set(re.findall(r"\]\(((?:docs|deps|bench|[A-Z])[^)#]*)", text)) - {"README.md", "README.zh.md"}
                 for text in (english, chinese)]
    assert documents[0] == documents[1]
    pieces = [set(re.findall(r"(?<![\w`])--?[a-z][a-z-]+", text)) for text in (english, chinese)]
    assert pieces[0] - {"-fa"} <= pieces[1], pieces[0] - pieces[1]
    spans = [{"".join(span.split()) for span in re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.S))}
             for text in (english, chinese)]
    assert spans[0] - spans[1] <= {"./deeptutor-evalcalibrate"}  # of a paragraph that the translation leaves to the original
    tables = [re.findall(r"[0-9]+", row) for text in (english, chinese) for row in re.findall(r"^\| .*\|$", text, re.M)[2:6]]
    assert tables[:4] == tables[4:]


def test_examples_of_eval_have_their_files():
    """All that they read is in the repository, fetched by bash run.sh --model, or made by a line above."""
    git = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True)
    tracked = set(git.stdout.splitlines())  # not what somebody who followed the page left there
    files = {"models/SmolLM2-135M-Instruct.Q4_1.gguf"}
    for page in ("docs/quality.md", "docs/eviction-config.md"):
        for line in "".join(re.findall(r"^```\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)).splitlines():
            if line.startswith("./deeptutor-eval "):
                for path in re.findall(r" (?:-m|-f|-i|--eviction-config) (\S+)", line):
                    assert path in files or path in tracked or (git.returncode and (ROOT / path).exists()), f"{page}: {line}"
                files |= {"model.tlc.json"} if " calibrate " in line else set()
            elif line.startswith("python3 python/eval/report.py "):
                for path in re.findall(r" (?:-m |-f |-i )?(\S+\.(?:jsonl?|gguf|txt))", line):
                    assert path in files or path in tracked, f"{page}: {line}"
            files |= set(re.findall(r"(?:>|^ln -s \S+ |--json )(\S+)", line))


def test_links_lead_somewhere():
    for page in PAGES:
        text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.S)
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)]*))?\)", text):
            path = (page.parent / target).resolve() if target else page
            assert path.exists(), f"{page.name}: {target}"
            if anchor and path.suffix == ".md":
                titles = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
                assert anchor in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}, f"{page.name}: #{anchor}"


def test_list_of_dependencies():
    """python3 deps/sbom.py >deps/sbom.cdx.json"""
    text = (ROOT / "deps/sbom.cdx.json").read_text()
    assert text == written_by("deps/sbom.py")
    bom = json.loads(text)
    names = {component["name"] for component in bom["components"]}
    assert {"llama.cpp", "ggml", "jansson", "libmicrohttpd", "numpy"} <= names
    for component in bom["components"]:
        assert component["licenses"] and (component["scope"] == "required" or component["description"]), component


def test_picture_of_speed():
    """python3 bench/figure.py bench/results/MACHINE/MODEL.csv >docs/speed.svg; and the README quotes what it shows."""
    table = next((ROOT / "bench/results").glob("AMD-EPYC-family-26*/SmolLM2*.csv"))
    picture = written_by("bench/figure.py", str(table))
    assert (ROOT / "docs/speed.svg").read_text() == picture
    shown = dict(re.findall(r">([^<>]+): (\d+)</text>", picture))
    row = re.search(r"^\| decoding \|(.*)\|$", (ROOT / "README.md").read_text(), re.M).group(1)
    assert [int(cell) for cell in row.split("|")][:4] == [int(shown[name]) for name in (
        "llama.cpp", "OpenVINO GenAI", "DeepTutor, TLC off", "DeepTutor, TLC 1024")]


def test_version_has_its_changes():
    version = re.search(r'#define DT_VERSION "(.*)"', (ROOT / "include/deeptutor.h").read_text()).group(1)
    assert re.search(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(), re.M).group(1) == version
    for path in ("CMakeLists.txt", "pyproject.toml", "setup.py"):
        assert version not in (ROOT / path).read_text()


@pytest.mark.parametrize("script", ["convert.py", "python/plan.py", "python/eval/report.py", "python/eval/tasks.py",
                                    "python/eval/reference.py"])
def test_help_of_scripts_fits_a_terminal(script):
    result = subprocess.run([sys.executable, str(ROOT / script), "--help"], capture_output=True, text=True, timeout=60,
                            env=dict(os.environ, COLUMNS="80"))
    assert result.returncode == 0, result.stderr
    assert re.match(r"usage: \S", result.stdout) and all(len(line) <= 80 for line in result.stdout.splitlines()), result.stdout
