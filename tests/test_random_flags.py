"""./main and ./deeptutor-batch with flags drawn at random from their own help, and values drawn from what people and scripts give.

Invariant of every check: the program ends by itself with 0, 1 or 2, says on stderr why where it is not 0, prints nothing on stdout
where the usage was wrong, and leaves the model and the texts as they were. DT_TEST_FLAGS: more runs than the few.
"""
import json
import os
import random
import re
import subprocess

import pytest

from server_support import BATCH, MAIN, MAKE_MODEL, make_tiny

pytestmark = pytest.mark.skipif(not all(os.access(p, os.X_OK) for p in (MAIN, BATCH, MAKE_MODEL)), reason="a program is not named")

RUNS = int(os.environ.get("DT_TEST_FLAGS", "40"))  # of each program
TEXT = "Once upon a time there was a cache.\n" * 12
CONFIG = {"0-": {"policy": "importance_score", "max_cache_size": 64, "min_cache_size": 32, "recent_window": 8}}
VALUES = {  # what may be right, what may not
    "N": (["0", "1", "2", "7", "64", "1000"], ["-1", "2147483647", "-2147483648", "99999999999", "1e3", "x", "", " 3"]),
    "X": (["0", "0.5", "1"], ["-1", "nan", "inf", "1e9", "x", ""]),
    "SIZE": (["1M", "1G", "1.5G"], ["0", "1", "1K", "64K", "-1", "99999999T", "x", ""]),
    "S": (["hello", "root ::= [a-z]+", '{"type": "integer"}', "{text}"], ["", "\\n\\xff", "ü", "root ::= root", "{}", '{"type": 1}']),
    "F": (["text", "config", "new", "name with spaces"], ["missing", "no/folder/file", ".", "empty", "broken", "/dev/null", ""]),
    "NAME": (["cpu", "chatml", "llama3", "{{ messages[0].content }}"], ["list", "cuda", "rpc=127.0.0.1:1", "rpc=", "{% if %}", ""]),
    "N0,N1,...": (["1"], ["1,1", "0", "-1,2", "x", ","]),
    "JOBS": (["jobs"], ["text"]),
    "RESULTS": (["results"], ["jobs", "."]),
}


def flags_of(program):
    """(name, values; none where it takes no value) of all that the help lists."""
    text = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=60, check=True).stdout
    text = text.replace("|\n      ", "|")
    found = []
    for names, value in re.findall(r"^  (-[-\w, ]*?)(?: ([^\s-]\S*))?(?:  .*)?,?$", text, re.MULTILINE):
        values = None if not value else (value.split("|"), ["x"]) if "|" in value else VALUES[value]
        found += [(name, values) for name in names.split(", ") if name not in ("-h", "--help", "--version")]
    assert len(found) > 40
    return found


def write_files(folder):
    files = {"text": TEXT, "empty": "", "config": json.dumps(CONFIG), "broken": '{"0-": {"policy": "nobody"}}', "name with spaces": TEXT,
             "jobs": "".join(json.dumps({"id": i, "prompt": TEXT[:50 * i]}) + "\n" for i in range(4))}
    for name, text in files.items():
        (folder / name).write_text(text)


def draw(chance, flags):
    given = []
    for name, values in chance.sample(flags, chance.randint(1, 6)):
        given.append(name)
        if values is not None and chance.random() < 0.98:  # else its value is missing, or what follows
            given.append(chance.choice(values[chance.random() < 0.15]))
    return given


@pytest.mark.parametrize("program", ["main", "batch"])
def test_any_flags(program, tmp_path):
    model = make_tiny(str(tmp_path / "tiny.gguf"))
    model_bytes = (tmp_path / "tiny.gguf").read_bytes()
    binary = {"main": MAIN, "batch": BATCH}[program]
    flags = flags_of(binary)
    chance = random.Random(program)
    codes = {0: 0, 1: 0, 2: 0}
    for i in range(RUNS):
        folder = tmp_path / str(i)
        folder.mkdir()
        write_files(folder)
        base = ["-m", model, "-f", "text"] if program == "main" else ["-m", model, "-i", "jobs", "-o", "results", "--chat-template", "chatml"]
        command = [binary, *base, *draw(chance, flags), "-n", "8", "--log-level", "warn"]
        result = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
        assert result.returncode in codes, (command, result)
        assert result.returncode == 0 or result.stderr.strip(), command
        assert result.returncode != 2 or result.stdout == b"", (command, result.stdout)
        assert (tmp_path / "tiny.gguf").read_bytes() == model_bytes, command
        codes[result.returncode] += 1
    assert codes[0] >= RUNS // 10 and codes[2] >= RUNS // 10, codes


SETTINGS = {  # of caches, as sessions are saved under and gone on with
    "shared": {"budget": "adaptive", "total_cache_size": 300, "layers": {"0-": {"policy": "importance_score", "sink_tokens": 2, "recent_window": 8}}},
    "slots": {"0-": {"policy": "importance_score", "max_cache_size": 100, "min_cache_size": 10, "sink_tokens": 2, "recent_window": 4, "memory_slots": 16}},
    "again": {"0-": {"policy": "importance_score", "score": "reconstruct", "max_cache_size": 100, "min_cache_size": 10, "sink_tokens": 2, "recent_window": 4}},
}
EVICTIONS = [[], ["--cache-eviction", "--max-cache-size", "140"], ["--cache-eviction", "--max-cache-size", "300", "--prefill", "streaming"],
             *(["--cache-eviction", "--eviction-config", name] for name in SETTINGS)]


def test_sessions_under_other_settings(tmp_path):
    """What is saved under one setting goes on under another within --kv-memory, and within what the log promised, or is refused before
    it begins: then the file is as it was."""
    model = make_tiny(str(tmp_path / "tiny.gguf"))
    for name, settings in SETTINGS.items():
        (tmp_path / name).write_text(json.dumps(settings))
    chance = random.Random("sessions")
    saved = tmp_path / "s.bin"
    done = refused = 0
    for _ in range(4 * RUNS):
        saved.unlink(missing_ok=True)
        text = ["-p", "".join(chance.choice("abcdefgh ") for _ in range(chance.randint(1, 900)))]
        for turn in range(4):
            before = saved.read_bytes() if turn > 0 else b""
            limit = chance.randint(80, 400) if turn > 0 else 0
            command = [MAIN, "-m", model, *text, "-n", str(chance.randint(1, 40)), "--session", "s.bin", "--temp", "0", "--ignore-eos", "-t", "1",
                       "--stats-json", "stats.json", *chance.choice(EVICTIONS), *chance.choice([[], ["--kv-type", "int8"]]),
                       *chance.choice([[], ["-c", "1024"]]), *chance.choice([[], ["-b", "64"], ["-b", "1000"]]),
                       *([] if limit == 0 else ["--kv-memory", f"{limit}K"]), *chance.choice([[], ["--draft-lookup"]])]
            result = subprocess.run(command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
            log = result.stderr.decode()
            if result.returncode != 0:
                assert result.returncode == 2 or "context of" in log, (command, log)
                assert result.returncode != 2 or turn == 0 or saved.read_bytes() == before, command
                refused += 1
                break
            most = [float(size) * (1024 if unit == "K" else 1 << 20) for size, unit in re.findall(r"at most ([0-9.]+) ([KM])iB", log)]
            peak = json.loads((tmp_path / "stats.json").read_text())["kv_bytes_peak"]
            assert peak <= most[-1] + 64 and (limit == 0 or peak <= limit * 1024), (command, log)
            text = chance.choice([[], ["-p", " more " * chance.randint(1, 60), "--append"]])
            done += 1
    assert done > RUNS and refused > RUNS
