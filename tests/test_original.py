"""bench/original.py on its tiny shape, without llama.cpp: every row is there, with its ratio and its bound."""
import csv
import fcntl
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

BENCH, EVAL, MAKE_MODEL = (os.environ.get(name, "") for name in ("DT_BENCH", "DT_EVAL", "DT_MAKE_MODEL"))
ROOT = pathlib.Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(not all(os.access(program, os.X_OK) for program in (BENCH, EVAL, MAKE_MODEL)),
                                reason="DT_BENCH, DT_EVAL or DT_MAKE_MODEL names no program")


FAKE_LLAMA = """#!/usr/bin/env python3
import json, sys, time
value = {name: sys.argv[sys.argv.index(name) + 1] for name in ("-fa", "-pg", "-p", "-n")}
assert (value["-p"], value["-n"]) == ("0", "0")
open(sys.argv[0] + ".log", "a").write(" ".join(sys.argv[1:]) + "\\n")
start = time.monotonic()
for phase, slower in (("prompt", "0"), ("generation", "1")):
    print("llama-bench: benchmark 1/1: %s run 1/1" % phase, file=sys.stderr, flush=True)
    time.sleep(2 if value["-fa"] == slower else 0.2)
print(json.dumps([{"avg_ns": (time.monotonic() - start) * 1e9}]))
"""


def test_better_setting_of_llama(tmp_path):
    """Reading and decoding each with the setting that is faster in it, found on a beginning of the prompt."""
    fake = tmp_path / "llama-bench"
    fake.write_text(FAKE_LLAMA)
    fake.chmod(0o755)
    command = [sys.executable, str(ROOT / "bench/original.py"), "--shapes", "tiny", "-t", "1", "-o", tmp_path, "--llama-bench", fake,
               "--scratch", tmp_path / "models", "--bench", BENCH, "--eval", EVAL, "--make-model", MAKE_MODEL]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    with open(tmp_path / "original-t1.csv", newline="") as file:
        row = next(csv.DictReader(file))
    # of 512 tokens and 32 in 0.2 seconds each, beside those that take 2: a busy machine may be late
    assert row["engine"] == "llama.cpp" and float(row["prompt"]) > 512 / 1.9 and float(row["decode"]) > 32 / 1.9
    asked = (tmp_path / "llama-bench.log").read_text().splitlines()
    assert sorted(line.split("-fa ")[1].split("-pg ")[0][:1] + line.split("-pg ")[1].split()[0] for line in asked) == [
        "0128,16", "0256,8", "0512,32", "1128,16", "1512,1"], asked


@pytest.mark.parametrize("folder, what", [("file/results", "can't be made a folder"), ("broken", "is no table"),
                                          ("half", "is no table"), ("/proc", "can't be written"), ("taken", "can't be written")])
def test_folders_that_are_refused(tmp_path, folder, what):
    """Before anything is measured."""
    (tmp_path / "file").write_text("")
    (tmp_path / "taken/original-t1.md").mkdir(parents=True)
    for name, text in (("broken", "shape,engine\ntiny,TLC off\n"), ("half", "shape,engine,prompt_tokens,rounds,prompt,decode\n"
                                                                      "tiny,TLC docqa,512,1,1,1\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "original-t1.csv").write_text(text)
    command = [sys.executable, ROOT / "bench/original.py", "--shapes", "tiny", "--no-llama", "-t", "1", "-o", tmp_path / folder,
               "--scratch", tmp_path / "models", "--bench", sys.executable, "--eval", EVAL, "--make-model", MAKE_MODEL]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and what in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_tiny_shape(tmp_path):
    command = [sys.executable, str(ROOT / "bench/original.py"), "--shapes", "tiny", "--no-llama", "-t", "1", "-o", tmp_path,
               "--scratch", tmp_path / "models", "--bench", BENCH, "--eval", EVAL, "--make-model", MAKE_MODEL]
    (tmp_path / "original-t1.csv").write_text("shape,engine,prompt_tokens,rounds,prompt,decode\ntiny,TLC off,512,1,1,1\n")
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)  # an earlier row is replaced
    assert done.returncode == 0, done.stderr
    with open(tmp_path / "original-t1.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["engine"] for row in rows] == ["TLC off", "TLC docqa", "TLC 128"]
    for row in rows:
        assert float(row["prompt_tokens"]) == 512 and not row["shortened_from"]
        for key in ("prompt", "decode", "bound"):
            assert 0 < float(row[key]) < float("inf"), row
    assert float(rows[2]["kv_bytes"]) < float(rows[0]["kv_bytes"])
    table = (tmp_path / "original-t1.md").read_text()
    assert table in done.stdout and table.count("DeepTutor, TLC") == 3
    assert os.listdir(tmp_path / "models") == ["original.lock"]


def test_a_run_that_was_broken_off(tmp_path):
    """The next one measures what is missing."""
    program, log = tmp_path / "bench", tmp_path / "log"
    program.write_text(f"""#!/bin/sh
echo "$*" >> {log}
case "$*" in *docqa*) [ -e {tmp_path}/once ] || {{ touch {tmp_path}/once; exit 1; }};; esac
exec {BENCH} "$@"
""")
    program.chmod(0o755)
    command = [sys.executable, str(ROOT / "bench/original.py"), "--shapes", "tiny", "--no-llama", "-t", "1", "-o", tmp_path / "out",
               "--scratch", tmp_path / "models", "--bench", program, "--eval", EVAL, "--make-model", MAKE_MODEL]
    first, second = (subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300) for _ in range(2))
    assert first.returncode != 0 and second.returncode == 0, (first.stderr, second.stderr)
    assert "measured already: TLC off 1" in second.stderr
    asked = [line for line in log.read_text().splitlines() if "-n 32" in line]  # not the probes
    assert [("docqa" in line, "--max-cache-size" in line) for line in asked] == [
        (False, False), (True, False), (True, False), (False, True)], asked
    assert os.listdir(tmp_path / "models") == ["original.lock"]
    with open(tmp_path / "out/original-t1.csv", newline="") as file:
        assert [row["engine"] for row in csv.DictReader(file)] == ["TLC off", "TLC docqa", "TLC 128"]


def start(tmp_path, *more, script="original.py", **how):
    command = [sys.executable, ROOT / "bench" / script, *more]
    if script == "original.py":
        command += ["--shapes", "tiny", "-o", tmp_path / "out", "--scratch", tmp_path / "models", "--eval", EVAL, "--make-model",
                    MAKE_MODEL]
    return subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how)


def program(tmp_path, script):
    path = tmp_path / "program"
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(0o755)
    return path


def test_results_that_cant_be_written(tmp_path):
    """One sentence, and nothing measured is lost: the next run writes it. A journal that can't be written stops nothing."""
    bench = program(tmp_path, f"""[ -e {tmp_path}/free ] || mkdir -p {tmp_path}/out/original-t1.md
case "$*" in *docqa*) echo >> {tmp_path}/log;; esac
exec {BENCH} "$@"
""")
    first = start(tmp_path, "--no-llama", "-t", 1, "--bench", bench)
    stderr = first.communicate(timeout=300)[1]
    assert first.returncode == 1 and "original-t1.md can't be written: Is a directory" in stderr, stderr
    assert "Traceback" not in stderr, stderr
    assert sorted(os.listdir(tmp_path / "models")) == ["original.lock", "tiny.gguf", "tiny.journal"]
    assert sorted(os.listdir(tmp_path / "out")) == ["original-t1.csv", "original-t1.md"]
    (tmp_path / "free").touch()
    (tmp_path / "out/original-t1.md").rmdir()
    second = start(tmp_path, "--no-llama", "-t", 1, "--bench", bench)
    assert second.communicate(timeout=300)[1] and second.returncode == 0 and len((tmp_path / "log").read_text()) == 1
    assert os.listdir(tmp_path / "models") == ["original.lock"]
    (tmp_path / "models/tiny.journal").mkdir()
    third = start(tmp_path, "--no-llama", "-t", 1, "--bench", bench)
    stderr = third.communicate(timeout=300)[1]
    assert "begins this shape anew" in stderr and "Traceback" not in stderr and third.returncode == 0, stderr


def test_a_scratch_folder_in_use(tmp_path):
    (tmp_path / "models").mkdir()
    with open(tmp_path / "models/original.lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        print("4711", file=other, flush=True)
        run = start(tmp_path, "--no-llama", "-t", 1, "--bench", BENCH)
        stderr = run.communicate(timeout=300)[1]
    assert run.returncode == 2 and "original.py, process 4711" in stderr and stderr.count("\n") == 1, stderr


def test_a_folder_of_results_in_use(tmp_path):
    """By a run that makes its models elsewhere."""
    (tmp_path / "out").mkdir()
    other = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    run = start(tmp_path, "--no-llama", "-t", 1, "--bench", BENCH)
    stderr = run.communicate(timeout=300)[1]
    os.close(other)
    assert run.returncode == 2 and f"results into {tmp_path / 'out'}" in stderr and stderr.count("\n") == 1, stderr
    assert os.listdir(tmp_path / "out") == []


def test_the_journal_knows_its_model(tmp_path):
    """Other bytes under the same name, or something newly learned about them, are another model."""
    sys.path.insert(0, str(ROOT / "bench"))
    import original
    model, learned = tmp_path / "a.gguf", tmp_path / "a.tlc.json"
    model.write_text("1")
    seen = []
    for change in (lambda: None, lambda: model.write_text("22"), lambda: os.utime(model, (1, 1)), lambda: learned.write_text("{}")):
        change()
        seen.append([original.stamp(model), original.stamp(learned)])
    assert all(a != b for a, b in zip(seen, seen[1:])) and seen[0][1] is None


@pytest.mark.parametrize("script, flags", [
    ("original.py", ["-r", 0]), ("original.py", ["-r", -1]), ("original.py", ["-t", 0]),
    ("original.py", ["--flash-attention", "x"]),
    ("peers.py", ["-m", "m", "-r", 0]), ("peers.py", ["-m", "m", "-d", "0,x"]), ("peers.py", ["-m", "m", "-n", 0]),
    ("parallel.py", ["-m", "m", "-s", 0]), ("drafts.py", ["-r", 0]), ("turns.py", ["--turns", -1]),
    ("batch.py", ["-m", "m", "--only", "x"]),
    ("batch.py", ["-m", "m", "--piece", 0]), ("quality.py", ["-m", "m", "-o", "o", "--context", 9000]),
    ("server_load.py", ["-m", "m", "--chats", 0]), ("server_load.py", ["-m", "m", "--minutes", "nan"]),
    ("server_load.py", ["-m", "m", "--kv-memory", "x"])])
def test_numbers_that_are_refused(tmp_path, script, flags):
    run = start(tmp_path, *flags, script=script)
    stderr = run.communicate(timeout=60)[1]
    assert "invalid" not in stderr and run.returncode == 2 and f"'{str(flags[-1]).split(',')[-1]}' is no" in stderr, stderr


def stopped_by_ctrl_c(tmp_path, run):
    """Sent to the script alone, as a supervisor does: the program that runs ends too."""
    until = time.monotonic() + 60
    while not (tmp_path / "pid").exists() and time.monotonic() < until:
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    stderr = run.communicate(timeout=60)[1]
    assert run.returncode == 130 and stderr.splitlines()[-1] == "stopped" and "Traceback" not in stderr, stderr
    pid = (tmp_path / "pid").read_text().strip()
    stat = pathlib.Path(f"/proc/{pid}/stat")
    until = time.monotonic() + 10
    while stat.exists() and stat.read_text().rsplit(") ")[-1][0] != "Z" and time.monotonic() < until:
        time.sleep(0.05)
    assert time.monotonic() < until, f"process {pid} goes on"


def busy(tmp_path):
    return program(tmp_path, f"echo $$ > {tmp_path}/pid.part; mv {tmp_path}/pid.part {tmp_path}/pid; exec sleep 300\n")


@pytest.mark.parametrize("llama", [False, True])
def test_ctrl_c(tmp_path, llama):
    flags = ["--llama-bench", busy(tmp_path), "--bench", BENCH] if llama else ["--no-llama", "--bench", busy(tmp_path)]
    stopped_by_ctrl_c(tmp_path, start(tmp_path, "-t", 1, *flags))


@pytest.mark.parametrize("script, program_name", [("turns", "deeptutor-server"), ("server_load", "deeptutor-server"),
                                                  ("batch", "deeptutor-server"), ("drafts", "main")])
def test_ctrl_c_elsewhere(tmp_path, script, program_name):
    """With programs of another folder: the scripts take them from their own."""
    busy(tmp_path).rename(tmp_path / program_name)
    (tmp_path / "texts").mkdir()
    code = (f"import sys, pathlib; sys.path.insert(0, {str(ROOT / 'bench')!r}); import peers, {script} as script; "
            "script.ROOT = script.PEERS = pathlib.Path(sys.argv.pop(1)); peers.until_ctrl_c(script.main)")
    flags = {"server_load": ["--depth", "-1"], "batch": ["--sources", tmp_path / "texts"]}.get(script, [])
    stopped_by_ctrl_c(tmp_path, subprocess.Popen(list(map(str, [sys.executable, "-c", code, tmp_path, "-m", "m", *flags])),
                                                 stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))


@pytest.mark.parametrize("script", ["batch", "drafts", "original", "parallel", "peers", "quality", "server_load", "turns"])
def test_help_fits_a_terminal(script):
    done = subprocess.run([sys.executable, str(ROOT / f"bench/{script}.py"), "--help"], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "COLUMNS": "80"})
    assert done.returncode == 0 and done.stdout.startswith("usage: "), done
    assert all(len(line) <= 80 for line in done.stdout.splitlines()), done.stdout


@pytest.mark.parametrize("ends", ["exit 1", "exit 130", "kill -INT $PPID; exit 1"])
def test_run_sh(tmp_path, ends):
    """In its own folder whatever CDPATH says; Ctrl-C while it learns about the model ends it, another failure there doesn't."""
    here, other, tools = (tmp_path / name for name in ("dt", "other/dt", "tools"))
    for folder in (here / "models", here / "python", here / "build/bin", other, tools):
        folder.mkdir(parents=True)
    (here / "run.sh").write_bytes((ROOT / "run.sh").read_bytes())
    (here / "python/fetch_model.py").touch()
    (here / "build/CMakeCache.txt").touch()
    cmake = 'echo cmake version 3.30; [ "$1" != -S ] || echo -- Fetching $(seq 60)'
    for name, script in (("cc", "cat >/dev/null"), ("c++", ""), ("cmake", cmake), ("make", ""), ("python3", "")):
        (tools / name).write_text(f"#!/bin/sh\n{script}\n")
        (tools / name).chmod(0o755)
    (here / "build/bin/deeptutor-eval").write_text(f"#!/bin/sh\n{ends}\n")
    (here / "build/bin/deeptutor-eval").chmod(0o755)
    env = {**os.environ, "CDPATH": str(tmp_path / "other"), "PATH": f"{tools}:{os.environ['PATH']}", "CC": "cc", "CXX": "c++"}
    done = subprocess.run(["bash", "dt/run.sh", "--model"], cwd=tmp_path, capture_output=True, text=True, timeout=60,
                          stdin=subprocess.DEVNULL, env=env)
    assert "learning what" in done.stdout and os.listdir(other) == [], done
    assert all(len(line) <= 80 for line in done.stdout.splitlines()), done.stdout
    assert (done.returncode, "main job" in done.stdout) == ((0, True) if ends == "exit 1" else (130, False)), done
