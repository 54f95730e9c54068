"""Who includes whom: the arrows of CONTRIBUTING.md's table, and nothing beside them. The table is read here, so it can't say one thing
and the code another."""
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent
INCLUDE = re.compile(r'^\s*#\s*include\s+(["<])([^">]+)[">]', re.M)
FUNCTION_LINES = 80
FILE_LINES = 1200


def table(text):
    """Folder -> what it may include, as written."""
    rows = re.findall(r"^\| `((?:src|apps|include)[a-z/]*)/` \|.*\|([^|]*)\|$", text, re.M)
    return {folder: allowed.strip() for folder, allowed in rows}


def sources(root, folder):
    return sorted(path for pattern in ("*.c", "*.h", "*.cpp") for path in (root / folder).glob(pattern))


def violations(root):
    rows = table((root / "CONTRIBUTING.md").read_text())
    here = {str(path.relative_to(root)) for path in (root / "src").iterdir() if path.is_dir()}
    found = [f"{folder}/ is not in CONTRIBUTING's table" for folder in sorted(here - set(rows))]
    for folder, allowed in rows.items():
        own = folder.split("/")[-1]
        for path in sources(root, folder):
            for mark, name in INCLUDE.findall(path.read_text()):
                what = name.split("/")[0]
                if (root / "src" / what).is_dir():
                    fine = folder.startswith("src/") and (what == own or what in re.findall(r"\w+", allowed) or "everything" in allowed)
                elif name.startswith(("ggml", "gguf")):
                    fine = "ggml" in allowed or "libllama" in allowed  # whose headers include ggml's
                elif name in ("llama.h", "log.h", "json-schema-to-grammar.h") or (name == "chat.h" and folder == "src/text"):
                    fine = "libllama" in allowed
                elif name == "deeptutor.h":
                    fine = True
                else:  # the program's own, or the system's
                    fine = mark == "<" or (folder == "apps" and (path.parent / name).exists())
                if not fine:
                    found.append(f"{path.relative_to(root)} includes {name}; {folder}/ may include: {allowed or 'nothing'}")
    return found


def test_arrows():
    assert violations(ROOT) == []


def test_a_wrong_arrow_is_found(tmp_path):
    """A copy with one arrow too many of each kind."""
    (tmp_path / "CONTRIBUTING.md").write_text((ROOT / "CONTRIBUTING.md").read_text())
    wrong = {"src/policy": "kv/kv.h", "src/kv": "ggml.h", "apps": "engine/session.h", "src/attn": "llama.h", "src/base": "kv/kv.h",
             "src/gemm": "weights/weights.h", "src/extra": "base/base.h"}
    for folder in ("src/kv", "src/weights", "src/engine", *wrong):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    for folder, name in wrong.items():
        (tmp_path / folder / "x.c").write_text(f'#include "{name}"\n')
    found = violations(tmp_path)
    assert len(found) == len(wrong), found


def test_library_prints_and_exits_nowhere():
    """But for the child process that tries AMX out."""
    calls = re.compile(r"(?<![\w.>])(printf|puts|fputs|putchar|exit|_exit|abort|perror)\s*\(")
    found = [f"{path.name}: {call}" for path in sorted((ROOT / "src").rglob("*.c*")) for call in calls.findall(
        re.sub(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"", "", path.read_text(), flags=re.S))]
    assert set(found) <= {"amx.c: _exit"}


def test_scripts_find_their_folder():
    """cd "$(dirname "$0")/.." goes to another one where CDPATH names a folder that has one of that name."""
    scripts = [path for folder in (".", ".ci", "bench", "examples", "tests", "tests/support") for path in (ROOT / folder).iterdir()
               if path.suffix == ".sh" or path == ROOT / ".ci/run"]
    going = [path for path in scripts if re.search(r'^ *cd "?\$\(dirname', path.read_text(), re.M)]
    assert len(going) > 10
    assert [path.name for path in going if not re.search(r"^unset CDPATH\b.*\n *cd ", path.read_text(), re.M)] == []


def functions(path):
    """Name and lines of each function: it begins in the first column and ends with a brace there."""
    begun, name = None, ""
    for i, line in enumerate(path.read_text().splitlines()):
        if re.match(r"[A-Za-z]", line) and "(" in line:
            found = re.search(r"(\w+)\(", line)
            begun, name = i, found.group(1) if found else "?"
        elif line == "}" and begun is not None:
            yield name, i - begun + 1
            begun = None


def test_sizes():
    long = []
    for folder in ("src", "apps"):
        for path in sorted((ROOT / folder).rglob("*.[ch]*")):
            n = len(path.read_text().splitlines())
            if n > FILE_LINES:
                long.append(f"{path.relative_to(ROOT)}: {n} lines")
            long += [f"{path.relative_to(ROOT)}: {name} has {n} lines" for name, n in functions(path) if n > FUNCTION_LINES]
    assert long == []
