"""./deeptutor-batch on a tiny random model (cases.md row 37): one line per row whatever is in the input, each once, also when it was
killed in between. Invariant of every check: a row's text is that of the same prompt given to a batch alone."""
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from server_support import BATCH, MAKE_MODEL, make_tiny

pytestmark = pytest.mark.skipif(not os.access(BATCH, os.X_OK) or not os.access(MAKE_MODEL, os.X_OK),
                                reason="DT_BATCH or DT_MAKE_MODEL names no program")

WORDS = "The quick brown fox jumps over the lazy dog while seven wizards wait. "


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny(str(tmp_path_factory.mktemp("model") / "tiny.gguf"))


def command(model, source, target, *flags):
    return [BATCH, "-m", model, "-t", "1", "-i", str(source), "-o", str(target), "--temp", "0", "-n", "8", "--chat-template", "chatml",
            "--kernel", "reference", "--ignore-eos", *flags]


def batch(*args, code=0):
    result = subprocess.run(command(*args), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    return result.stderr


def lines(path):
    text = path.read_text()
    assert text == "" or text.endswith("\n")
    rows = [json.loads(line) for line in text.splitlines()]
    assert len({row["line"] for row in rows}) == len(rows)
    return {row["line"]: row for row in rows}


def wait_for_lines(path, least):
    until = time.monotonic() + 60
    while (path.read_bytes().count(b"\n") if path.exists() else 0) < least and time.monotonic() < until:
        time.sleep(0.005)


def openai_row(name, prompt, **body):
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": prompt}], **body}}


def test_texts_with_nul(model, tmp_path):
    """Such a byte is no text, as others that are not UTF-8: its token's name is bytes:\\x00, and the run goes on behind it."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"custom_id": f"{i}", "url": "/v1/completions", "body": {
        "prompt": WORDS, "max_tokens": 200, "temperature": 3, "top_k": 0, "top_p": 1, "min_p": 0, "seed": i,
        "logprobs": 20}}) + "\n" for i in range(4)))
    for _ in range(2):
        batch(model, source, target)
    choices = [row["response"]["body"]["choices"][0] for row in lines(target).values()]
    assert len(choices) == 4 and any("bytes:\\x00" in choice["logprobs"]["tokens"] for choice in choices)
    assert any("bytes:\\x00" in tops for choice in choices for tops in choice["logprobs"]["top_logprobs"])


def test_no_row_has_a_result(model, tmp_path):
    """What is wrong with a row is a sentence of ours; where that is all there is, a script finds out, the second time too."""
    rows = {'{"id": 1, "prompt": "a\\u0000b"}': "column 30 of the row: \\u0000, the NUL character, is in no text here; leave it out",
            '{"id": 2, "prompt": "x", "seed": 99999999999999999999}': "whole ones end at 9223372036854775807",
            '{"id": 3, "prompt": "\xff"}': "not UTF-8; write the text in UTF-8", "[" * 3000 + "]" * 3000: "2048 levels are taken",
            '{"id": 5, "prompt": "x"': "the row is not a JSON object: "}
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(rows), encoding="latin-1")
    for time in ("first", "second"):
        log = batch(model, source, target, code=1)
        assert log.endswith('error: no row has a result; "error" in the output\'s lines says why\n'), (time, log)
        assert all(len(line) <= 80 for line in log.splitlines() if line.startswith("batch: ")), log
    for row, words in zip(lines(target).values(), rows.values()):
        assert words in row["error"]["message"], row
    source.write_text("\n".join(rows) + "\n" + json.dumps({"id": 6, "prompt": "x"}), encoding="latin-1")
    batch(model, source, tmp_path / "one.jsonl")
    (tmp_path / "none.jsonl").write_text("")
    batch(model, tmp_path / "none.jsonl", tmp_path / "nothing.jsonl")


def test_sessions_are_not_told(model, tmp_path):
    """A row that has less in common with the first two goes back to where it parts; whose line that is nobody could tell."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"id": i, "prompt": WORDS * n + f"{i}"} for i, n in enumerate((6, 6, 3, 3))]
    source.write_text("\n".join(json.dumps(row) for row in rows))
    log = batch(model, source, target)
    assert "session: " not in log and "4 rows done" in log, log
    assert "session: rewound" in batch(model, source, tmp_path / "again.jsonl", "--log-level", "debug")


def test_bad_rows(model, tmp_path):
    """Every kind of row: one line each, and the good ones' texts."""
    rows = [
        json.dumps(openai_row("a", "Hello")), "{bad json", "", json.dumps({"id": 5, "prompt": WORDS}) + "\r", "   ",
        json.dumps(openai_row("b", WORDS * 100)), json.dumps(openai_row("a", "again")), json.dumps({"prompt": "no id"}),
        json.dumps({**openai_row("c", "x"), "custom_id": None}), json.dumps(openai_row("d", "x", model="gpt-99")),
        json.dumps({**openai_row("e", "x"), "url": "/v1/embeddings"}), "[1]", json.dumps({"custom_id": "f"}),
        json.dumps({"id": "g", "messages": [{"role": "user", "content": "Hello"}], "n": 2}),
        json.dumps(openai_row("h", "x" * (1 << 20))), '{"id": "\udcff"}'.encode("utf-8", "surrogateescape").decode("latin-1"),
        json.dumps({"id": "last", "prompt": "no newline", "max_tokens": 3}),
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(rows))
    log = batch(model, source, target)
    out = lines(target)
    assert sorted(out) == [i + 1 for i, row in enumerate(rows) if row.strip()]
    good = {1, 4, 10, 14, 17}
    for number, line in out.items():
        assert (line.get("error") is None) == (number in good), line
    body = out[1]["response"]["body"]
    assert out[1]["custom_id"] == "a" and out[1]["response"]["status_code"] == 200
    assert body["choices"][0]["message"]["content"] == out[14]["text"][0] and out[14]["text"][0] == out[14]["text"][1]
    assert out[4]["id"] == 5 and out[4]["usage"]["completion_tokens"] == 8 and out[17]["usage"]["completion_tokens"] == 3
    for number, word in ((2, "JSON"), (6, "1024"), (7, "row 1"), (8, "id"), (9, "custom_id"), (11, "url"), (13, "body")):
        assert word in json.dumps(out[number]["error"]), out[number]
    assert "15 rows done, 10 of them" in log and all(len(line) <= 80 for line in log.splitlines() if line.startswith("batch: 15")), log
    assert out[10]["response"]["body"]["model"] == "tiny" and log.count("'gpt-99'; tiny of -m answers") == 1, log
    before = target.read_bytes()
    again = batch(model, source, target)
    assert "15 done before, 10 of them refused or failed" in again and "other settings" not in again
    assert "other settings" in batch(model, source, target, "--cache-eviction") and target.read_bytes() == before


def test_a_huge_row(model, tmp_path):
    """Row 37: 10 MB in one row: a prompt is refused, a field that nobody reads is no matter; the rows beside it don't feel it."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"id": "before", "prompt": "Hello"}, {"id": "huge", "prompt": "x" * 10_000_000},
            {"id": "padded", "prompt": "Hello", "metadata": "x" * 10_000_000}, {"id": "after", "prompt": "Hello"}]
    source.write_text("\n".join(json.dumps(row) for row in rows))
    batch(model, source, target)
    out = {row["id"]: row for row in lines(target).values()}
    assert set(out) == {row["id"] for row in rows} and "10000000 bytes" in out["huge"]["error"] and target.stat().st_size < 10_000
    assert out["before"]["text"] == out["after"]["text"] == out["padded"]["text"]


def test_around_the_context(model, tmp_path):
    """Row 24: refused with both lengths where nothing is evicted; else read, and the line and the summary tell what was let go."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lengths = (1023, 1024, 1025, 2048)
    source.write_text("\n".join(json.dumps({"id": n, "prompt": [5 + (i + n) % 7 for i in range(n)]}) for n in lengths))
    batch(model, source, target)
    for n, line in zip(lengths, sorted(lines(target).values(), key=lambda row: row["line"])):
        assert "eviction" not in line and (line.get("error") is None) == (n <= 1024), line
        assert n <= 1024 or (str(n) in line["error"] and "1024" in line["error"]), line
    target.unlink()
    log = batch(model, source, target, "--cache-eviction", "--max-cache-size", "200", "--min-cache-size", "150")
    evicted = 0
    for line in lines(target).values():
        assert line["usage"]["prompt_tokens"] == line["id"] and line["usage"]["completion_tokens"] == 8, line
        assert line["eviction"]["evicted_tokens"] >= 2 * (line["id"] - 200), line
        evicted += line["eviction"]["evicted_tokens"]
    assert f"{evicted} evicted" in log, log


def test_settings_are_told_apart(model, tmp_path):
    """The word in each line: files by what they hold, wherever they lie, and the chunk where it decides what is evicted."""
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"id": 1, "prompt": "Hello", "max_tokens": 1}))

    def word(*flags):
        target = tmp_path / "out.jsonl"
        batch(model, source, target, *flags)
        settings = lines(target)[1]["settings"]
        target.unlink()
        return settings

    config, other, grammar = tmp_path / "c.json", tmp_path / "d.json", tmp_path / "g.gbnf"
    text = '{"0-": {"policy": "local_window", "max_cache_size": %d}}'
    config.write_text(text % 200)
    other.write_text(text % 200)
    evicting = ("--cache-eviction", "--eviction-config")
    first = word(*evicting, str(config))
    assert word(*evicting, str(config)) == word(*evicting, str(other)) == first
    assert word(*evicting, str(config), "-b", "64") != first
    config.write_text(text % 201)
    assert word(*evicting, str(config)) != first
    grammar.write_text('root ::= "a"')
    first = word("--grammar-file", str(grammar))
    assert first != word()
    grammar.write_text('root ::= "b"')
    assert word("--grammar-file", str(grammar)) != first
    assert word("-b", "64") == word()  # reading in other chunks rounds differently, no more


def test_memory_that_holds_nothing(model, tmp_path):
    """Refused before the first row, with a size that works."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"id": 1, "prompt": "Hello"}))
    log = batch(model, source, target, "--kv-memory", "1K", code=2)
    least = re.search(r"give at least --kv-memory (\d+K)", log).group(1)
    log = batch(model, source, target, "--kv-memory", least)
    assert "1 rows done, 0 of them" in log and "not the context's" in log


def test_rows_that_fit_without_the_common_beginning(model, tmp_path):
    """A row that fits alone is computed, though not beside what the rows begin with."""
    common = [5 + i % 11 for i in range(300)]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"id": i, "prompt": common + [20 + i] * 150}) + "\n" for i in range(4)))
    batch(model, source, target)
    alone = {row["id"]: row["text"] for row in lines(target).values()}
    target.unlink()
    assert "4 rows done, 0 of them" in batch(model, source, target, "--kv-memory", "240K")
    assert {row["id"]: row["text"] for row in lines(target).values()} == alone


def test_folder(model, tmp_path):
    """--each: what rows have in common is computed once, and changes no text."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(6):
        (folder / f"{i}.txt").write_text(f"Text number {i}. " + WORDS * (1 + i % 3))
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    each = "Summarize the following text in a few words and keep to the facts: {text}\nSummary:"
    log = batch(model, folder, tmp_path / "out.jsonl", "--each", each)
    out = {row["id"]: row for row in lines(tmp_path / "out.jsonl").values()}
    assert sorted(out) == sorted(os.listdir(folder)) and "UTF-8" in out["latin.txt"]["error"]
    source = tmp_path / "one.jsonl"
    for i in range(6):
        prompt = each.replace("{text}", (folder / f"{i}.txt").read_text())
        source.write_text(json.dumps({"id": i, "messages": [{"role": "user", "content": prompt}]}))
        target = tmp_path / f"one{i}.jsonl"
        batch(model, source, target)
        assert lines(target)[1]["text"] == out[f"{i}.txt"]["text"]
    shared = int(log.split("tokens read (")[1].split()[0])
    assert shared >= 6 * 60, log


def test_names_that_are_not_utf8(model, tmp_path):
    """A model's name stands in answers, a text's name is its row's id: the one is mended, the other refused."""
    path = os.fsencode(tmp_path) + b"/t\xe9.gguf"
    os.symlink(model, path)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(openai_row("a", "Hello")) + "\n")
    batch(path, source, target)
    assert lines(target)[1]["response"]["body"]["model"] == "t\ufffd"
    folder = tmp_path / "texts"
    folder.mkdir()
    with open(os.fsencode(folder) + b"/\xe9.txt", "w") as file:
        file.write("Hello")
    batch(model, folder, tmp_path / "names.jsonl", "--each", "{text}", code=1)
    assert "name is not UTF-8" in lines(tmp_path / "names.jsonl")[1]["error"]


def test_what_went_in_a_shared_beginning(model, tmp_path):
    """Rows that share a long instruction say what their conversation lacks, whichever of them read it."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(5):
        (folder / f"{i}.txt").write_text(f"Text {i}.")
    log = batch(model, folder, tmp_path / "out.jsonl", "--each", WORDS * 6 + "{text}", "--cache-eviction", "--max-cache-size", "120",
                "--min-cache-size", "100")
    assert int(log.split("tokens read (")[1].split()[0]) > 4 * 300, log
    for row in lines(tmp_path / "out.jsonl").values():
        n_tokens = row["usage"]["prompt_tokens"] + row["usage"]["completion_tokens"] - 1
        assert 2 * (n_tokens - 120) <= row["eviction"]["evicted_tokens"] <= 2 * (n_tokens - 99), row


def test_results_that_are_none(model, tmp_path):
    """A file that holds something else stays as it is, with or without a line's end, on one line or on many."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"id": 1, "prompt": "Hello"}))
    for text in ("notes", "notes\n", '{"a": 1}', '{"a": 1}\n', '{\n  "a": 1\n}\n', "\n", "x" * (65 << 20), "[]", "{", '{"id"',
                 '{"weights": NaN, "note": "my own data"}', '{"a": 1} {"b": 2}', '{"line": 1, "id": 1}', '{"level":"info","line":1}\n',
                 '{"id": 1, "text": "a', '{"id":1,"prompt":"a', '{"id":1,"text":"a"}', '{"id":NaN,"text":"a', '{"id":1,"text":"a"} {"b',
                 '{"id":1,"text":"a","finish_reason":"stop","usage":{},"line":1,"settings":"a"} ', '{"id":1,"error":"a\tb',
                 '{"id":1,"text":"a","line":1'):
        target.write_text(text)
        assert "holds something else, in line 1" in batch(model, source, target, code=2), text
        assert target.read_text() == text


def test_lines_that_were_cut(model, tmp_path):
    """At whatever byte, alone (from its first key on) or behind another; a whole line whose end alone is gone keeps what it says."""
    source, target, plain = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    for row in ({"id": 1, "prompt": "Hello"}, {"id": [{"\\\"": "\u00e9"}], "prompt": 5}, openai_row("a", "Hello"), openai_row("b", 5)):
        source.write_text(json.dumps(row))
        code = int(row.get("prompt") == 5 or row.get("custom_id") == "b")  # refused, and the only one
        batch(model, source, plain, code=code)
        whole = plain.read_bytes()
        plain.unlink()
        first = b'{"id":0,"error":"no","line":7}\n'
        for before, begin in ((b"", 6), (first, 0)):
            for n in {*range(begin, 14), *range(14, len(whole), len(whole) // 8), len(whole) - 2}:
                target.write_bytes(before + whole[:n])
                batch(model, source, target, code=code)
                line, again = json.loads(whole), lines(target)
                for each in (line, again[1]) if line.get("response") else ():
                    del each["id"], each["response"]["request_id"], each["response"]["body"]["id"], each["response"]["body"]["created"]
                assert again[1] == line and len(again) == 1 + bool(before) and target.read_bytes().startswith(before)
        kept = whole.replace(b"}\n", b"}")
        target.write_bytes(kept)
        assert "1 done before" in batch(model, source, target, code=code)
        assert target.read_bytes() == kept + b"\n"


def test_files_that_ray_batch_refuses(model, tmp_path):
    """In a sentence, before Ray (which an empty module stands for) is started."""
    program = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "python", "cluster", "ray_batch.py")
    (tmp_path / "ray.py").write_text("")
    (tmp_path / "in.jsonl").write_text(json.dumps({"id": 1, "prompt": "Hello"}))
    (tmp_path / "folder").mkdir()
    other = tmp_path / "out.jsonl"
    for held in ("not JSON\n", "\udcff\n", "[" * 100000 + "\n", "[]\n"):
        other.write_bytes(held.encode("utf-8", "surrogateescape"))
        for source, target, sentence in (("in.jsonl", "out.jsonl", "holds something else"), ("none", "new", "none can't be used"),
                                         ("in.jsonl", "folder", "folder can't be used")):
            result = subprocess.run([sys.executable, program, "-m", model, "-i", str(tmp_path / source), "-o", str(tmp_path / target)],
                                    env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=60)
            assert result.returncode == 1 and result.stderr.startswith("error: ") and sentence in result.stderr, result.stderr
            assert result.stderr.count("\n") == 1 and not (tmp_path / "new").exists()
        assert other.read_bytes() == held.encode("utf-8", "surrogateescape")


def test_killed_in_between(model, tmp_path):
    """kill -9, a line cut off, and again: no row is lost or repeated."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"id": i, "prompt": f"Row {i}: " + WORDS, "max_tokens": 30}) + "\n" for i in range(40)))
    for least in (5, 15):
        process = subprocess.Popen(command(model, source, target), stderr=subprocess.DEVNULL)
        wait_for_lines(target, least)
        process.send_signal(signal.SIGKILL)
        process.wait()
        with open(target, "ab") as f:
            f.write(b'{"id":"cut')
    batch(model, source, target)
    out = lines(target)
    assert sorted(out) == list(range(1, 41)) and all(out[i + 1]["id"] == i and out[i + 1]["text"] for i in range(40))
    whole = tmp_path / "whole.jsonl"
    batch(model, source, whole)
    assert {k: v["text"] for k, v in lines(whole).items()} == {k: v["text"] for k, v in out.items()}


@pytest.mark.parametrize("change, sentence", [
    (lambda path: path.unlink(), "removed or replaced"), (lambda path: path.rename(path.with_name("mine")), "removed or replaced"),
    (lambda path: path.write_bytes(b""), "cut short"), (lambda path: os.truncate(path, path.stat().st_size - 9), "cut short"),
    (lambda path: path.open("a").write("note\n"), "written to by something else")])
def test_results_that_change_meanwhile(model, tmp_path, change, sentence):
    """Told, with exit code 1, and nothing is written behind a line that was cut; the same command computes what is lacking."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"id": i, "prompt": f"Row {i}: " + WORDS, "max_tokens": 60}) + "\n" for i in range(60)))
    process = subprocess.Popen(command(model, source, target), stderr=subprocess.PIPE, text=True)
    wait_for_lines(target, 3)
    process.send_signal(signal.SIGSTOP)
    change(target)
    process.send_signal(signal.SIGCONT)
    log = process.communicate(timeout=60)[1]
    assert process.returncode == 1 and sentence in log and log.count("error: ") == 1, log
    if "written" not in sentence:
        batch(model, source, target)
        assert sorted(lines(target)) == list(range(1, 61))


def test_results_that_are_removed_at_the_end(model, tmp_path):
    """With nothing left to write."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"id": 1, "prompt": WORDS, "max_tokens": 1000}) + "\n" + "\n" * (40 << 20))
    batch(model, source, target)
    process = subprocess.Popen(command(model, source, target), stderr=subprocess.PIPE, text=True)
    until, opened = time.monotonic() + 60, f"/proc/{process.pid}/fd"
    while time.monotonic() < until and process.poll() is None:
        if str(target.resolve()) in [os.path.realpath(os.path.join(opened, name)) for name in os.listdir(opened)]:
            break
    time.sleep(0.05)  # it has counted the rows, reads what is done, and will read the rows again
    process.send_signal(signal.SIGSTOP)
    target.unlink()
    process.send_signal(signal.SIGCONT)
    assert "removed or replaced" in process.communicate(timeout=60)[1] and process.returncode == 1


@pytest.mark.parametrize("size", [200_000, 200_010, 0])
def test_rows_that_are_cut_off_meanwhile(model, tmp_path, size):
    """Rows that were counted and then couldn't be read are an error, and one that was cut is not refused for that."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = "".join(json.dumps({"id": i, "prompt": f"Row {i}"}).ljust(3999) + "\n" for i in range(1, 101))
    source.write_text(rows)
    process = subprocess.Popen(command(model, source, target), stderr=subprocess.PIPE, text=True)
    wait_for_lines(target, 1)
    os.truncate(source, size)
    log = process.communicate(timeout=60)[1]
    assert process.returncode == 1 and re.search(r"cut short while it was read: \d+ of its 100 rows", log), log
    assert not any("error" in row for row in lines(target).values())
    source.write_text(rows)
    batch(model, source, target)
    assert sorted(lines(target)) == list(range(1, 101))


def test_interrupted(model, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"id": i, "prompt": f"Row {i}: " + WORDS, "max_tokens": 60}) + "\n" for i in range(60)))
    process = subprocess.Popen(command(model, source, target), stderr=subprocess.PIPE, text=True)
    wait_for_lines(target, 3)
    process.send_signal(signal.SIGTERM)
    log = process.communicate(timeout=60)[1]
    assert process.returncode == 1 and "the same command goes on" in log
    assert all(row.get("text") for row in lines(target).values())


def test_ids_that_are_no_strings(model, tmp_path):
    """They come back as they were, so that the next run knows them."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    ids = [1733180000.25, 1733180000.75, 1.23456789012345, [0.1 + 0.2], {"a": 1e-9}, 7, True]
    source.write_text("\n".join(json.dumps({"id": name, "prompt": "x", "max_tokens": 2}) for name in ids))
    for _ in range(2):
        batch(model, source, target)
        assert [line["id"] for _, line in sorted(lines(target).items())] == ids


def test_what_is_no_file(model, tmp_path):
    """Refused before anything is read from it or waits for it: pipes, devices, folders, on either side."""
    source, target, pipe = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "pipe"
    source.write_text(json.dumps({"id": 1, "prompt": "x"}))
    os.mkfifo(pipe)
    for place in (pipe, "/dev/full", "/dev/null", "/dev/stdout", tmp_path):
        assert f"{place} is no regular file: results are written" in batch(model, source, place, code=2)
    for place in (pipe, "/dev/zero", "/dev/null"):
        assert f"{place} is no regular file: jobs are read twice" in batch(model, place, target, code=2)
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "pipe"]


@pytest.mark.parametrize("side", ["input", "output"])
def test_a_file_of_one_endless_line(model, tmp_path, side):
    """64 GiB of nothing: Ctrl-C ends reading it at once, and else it ends by itself, long before the file does."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"id": 1, "prompt": "x"}))
    long = source if side == "input" else target
    long.touch()
    os.truncate(long, 1 << 36)
    process = subprocess.Popen(command(model, source, target), stderr=subprocess.PIPE, text=True)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    begun = time.monotonic()
    log = process.communicate(timeout=60)[1]
    assert time.monotonic() - begun < 5 and (process.returncode, "interrupted while" in log) in ((1, True), (-2, False)), log
    assert "more than 1073741824 bytes" in batch(model, source, target, code=2)
    assert long.stat().st_size == 1 << 36 and (side == "output" or not target.exists())


def test_interrupted_over_rows_that_are_done(model, tmp_path):
    """Reading rows that have their lines heeds signals too."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("{}\n" * 300_000)
    process = subprocess.Popen(command(model, source, target), stderr=subprocess.PIPE, text=True)
    wait_for_lines(target, 3)
    process.send_signal(signal.SIGTERM)
    log = process.communicate(timeout=60)[1]
    assert process.returncode == 1 and "the same command goes on" in log and 3 <= len(lines(target)) < 300_000, log


def test_refused(model, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"id": 1, "prompt": "x"}) + "\n")
    link = tmp_path / "link.jsonl"
    link.symlink_to(source)
    hard = tmp_path / "hard.jsonl"
    os.link(source, hard)
    other = tmp_path / "other.jsonl"
    other.write_text('{"something": "else"}\n')
    folder = tmp_path / "folder"
    folder.mkdir()
    for args, word in [((source, source), "-o"), ((source, link), "-o"), ((link, source), "-o"), ((source, hard), "-o"),
                       ((source, other), "something else"), ((tmp_path / "none", tmp_path / "o"), "can't be read"),
                       ((folder, tmp_path / "o"), "--each"), ((folder, folder / "o", "--each", "x {text}"), "-o"),
                       ((source, tmp_path / "o", "--each", "x {text}"), "folder"), ((folder, tmp_path / "o", "--each", "x"), "{text}")]:
        before = source.read_bytes()
        assert word in batch(model, *args, code=2), args
        assert source.read_bytes() == before and not (tmp_path / "o").exists()
    assert other.read_text() == '{"something": "else"}\n'
    good = tmp_path / "good.jsonl"
    batch(model, source, good)
    source.write_text(json.dumps({"id": 2, "prompt": "x"}) + "\n")
    assert "another input" in batch(model, source, good, code=2)
