"""Manual pages and shell completion: every flag of --help is there, and nothing else; the shells take them.

They are made when the programs are built, so what is checked is that what lies in the build's folder is what --help says now.
"""
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAMS = {"deeptutor": "DT_MAIN", "deeptutor-bench": "DT_BENCH", "deeptutor-eval": "DT_EVAL", "deeptutor-quantize": "DT_QUANTIZE",
            "deeptutor-server": "DT_SERVER", "deeptutor-batch": "DT_BATCH", "deeptutor-rpc-server": "DT_RPC_SERVER"}
COMMANDS = ("kld", "needle", "calibrate", "long", "ab")
here = [name for name, variable in PROGRAMS.items() if os.access(os.environ.get(variable, ""), os.X_OK)]

pytestmark = pytest.mark.skipif(not here, reason="DT_MAIN and the others name no programs")


def program(name):
    return os.environ[PROGRAMS[name]]


def help_texts(name):
    commands = [()] + [(word,) for word in COMMANDS if name == "deeptutor-eval"]
    return [subprocess.run([program(name), *words, "--help"], capture_output=True, text=True, timeout=60, check=True).stdout
            for words in commands]


def flags_in(text):
    """Flags that begin a line, as in --help."""
    return {flag for line in re.findall(r"^  (-\S.*?)(?:  |$)", text, re.M) for flag in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", line)}


def completed_by_zsh(flags, text):
    """Those of `flags` that a part of its file offers."""
    return {flag for flag in flags if f"'{flag}[" in text or re.search(rf"[{{,]{flag}[,}}]", text)}


@pytest.mark.parametrize("name", here)
def test_what_is_asked_for_is_written_or_not(name):
    """A full disk is told, with exit code 1; a reader that leaves early has what it wanted."""
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    asked = [["--help"], ["--version"]] + {"deeptutor-eval": [["kld", "--help"], ["calibrate", "--device", "list"]],
                                           "deeptutor-quantize": [["--list"]]}.get(name, [["--device", "list"]])
    for words in asked:
        with open("/dev/full", "w") as full:
            result = subprocess.run([program(name), *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
        sentence = "error: what was asked for can't be written to stdout: No space left on device\n"
        assert (result.returncode, result.stderr) == (1, sentence), words
        reader, writer = os.pipe()
        os.close(reader)
        result = subprocess.run([program(name), *words], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
        os.close(writer)
        assert (result.returncode, result.stderr) in ((0, ""), (-signal.SIGPIPE, "")), words


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("manual")
    for name in here:
        subprocess.run([sys.executable, str(ROOT / "python/manual.py"), name, program(name), str(folder)], check=True, timeout=120)
    return folder


@pytest.mark.parametrize("name", here)
def test_help_fits_a_terminal(name):
    for text in help_texts(name):
        for line in text.splitlines():
            assert len(line.replace(program(name), name)) <= 80 and line == line.rstrip(), line


@pytest.mark.parametrize("name", here)
def test_usage_names_the_program(name):
    """As it was called, without the folder."""
    for text in help_texts(name):
        assert text.startswith(f"usage: {os.path.basename(program(name))} "), text


@pytest.mark.parametrize("name", here)
def test_examples_fit_a_terminal(made, name):
    """They stand eleven columns in."""
    page = (made / "man" / f"{name}.1").read_text()
    examples = re.findall(r"^\.nf\n(.*?)\n\.fi$", page, re.M | re.S)
    assert examples
    for line in "\n".join(examples).replace("\\-", "-").replace("\\e", "\\").splitlines():
        assert len(line) <= 69, line


@pytest.mark.parametrize("name", here)
def test_every_flag_is_there(made, name):
    flags = set().union(*(flags_in(text) for text in help_texts(name)))
    assert len(flags) >= 6 and "--help" in flags
    page = (made / "man" / f"{name}.1").read_text()
    in_page = {flag.replace("\\-", "-") for line in re.findall(r"\n\.TP\n(\\fB.*)", page) for flag in re.findall(r"\\fB(\S+?)\\fR", line)}
    assert in_page == flags
    zsh = (made / "zsh" / f"_{name}").read_text()
    assert completed_by_zsh(flags, zsh) == flags
    for choice in re.findall(r"\|([a-z0-9_]+)", " ".join(help_texts(name)[0].split("usage")[-1].splitlines()[1:])):
        assert choice in page and choice in zsh, choice


@pytest.mark.parametrize("name", here)
def test_bash_completes(made, name):
    def complete(*words):
        function = "_" + name.replace("-", "_")
        script = (f'source "$1"; COMP_WORDS=("${{@:2}}"); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); {function}; '
                  'printf "%s\\n" "${COMPREPLY[@]}"')
        result = subprocess.run(["bash", "-c", script, "bash", str(made / "bash" / name), name, *words], capture_output=True, text=True,
                                timeout=30)
        assert result.returncode == 0 and result.stderr == "", result.stderr
        return result.stdout.split()

    flags = set().union(*(flags_in(text) for text in help_texts(name)))
    assert set(complete("x", "-")) == flags
    assert set(complete("x", "--ver")) == {"--version"}
    if name not in ("deeptutor-quantize", "deeptutor-rpc-server"):
        assert complete("x", "--kv-type", "") == ["f16", "int8"] and complete("x", "--kv-type", "i") == ["int8"]
        assert "amx_bf16" in complete("x", "--kernel", "") and "ggml_matmul" in complete("x", "--kernel", "g")
        assert complete("x", "-m", "") == []  # names of files, which bash adds
    if name == "deeptutor-eval":
        assert set(complete("")) == {*COMMANDS, "--help", "--version"}
        for command, text in zip(COMMANDS, help_texts(name)[1:]):
            assert set(complete(command, "-")) == flags_in(text), command
            own = (made / "zsh" / f"_{name}").read_text().split(f"\n{command})\n")[1].split("    ;;")[0]
            assert completed_by_zsh(flags, own) == flags_in(text), command
    if name == "deeptutor-quantize":
        types = set(subprocess.run([program(name), "--list"], capture_output=True, text=True, timeout=60, check=True).stdout.split())
        assert set(complete("in", "out", "")) == types == set(complete("-t", "2", "in", "out", "")) and "Q4_K_M" in types
        assert complete("in", "out", "Q8") == ["Q8_0"] and complete("in", "") == [] == complete("in", "out", "Q8_0", "")
        assert set(complete("in", "out", "-")) == flags and complete("in", "out", "-t", "") == []
        assert all(word in (made / kind).read_text() for word in types for kind in (f"man/{name}.1", f"zsh/_{name}"))


@pytest.mark.parametrize("name", here)
def test_readers_take_them(made, name):
    checks = {"mandoc": ["-T", "lint", "-W", "error", str(made / "man" / f"{name}.1")],
              "zsh": ["-n", str(made / "zsh" / f"_{name}")], "bash": ["-n", str(made / "bash" / name)]}
    for tool, arguments in checks.items():
        if shutil.which(tool):
            result = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=60)
            assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", here)
def test_the_build_made_them(made, name):
    """What lies in the build's folder, which is what is installed."""
    folder = pathlib.Path(program(name)).resolve().parent.parent / "manual"
    if not folder.is_dir():
        pytest.skip("the build makes no manual pages here")
    for path in ("man/" + name + ".1", "bash/" + name, "zsh/_" + name):
        assert (folder / path).read_text() == (made / path).read_text(), path
