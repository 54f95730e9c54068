"""./main --session: the conversation goes on from a file, and what is computed once is not computed again (cases.md rows 9
and 11). Invariant of every check: with a session a run gives the text it gives without one.
"""
import os
import re
import signal
import subprocess
import time

import pytest

from test_main import CHAT, MAIN, MODEL, Terminal, assert_fails, needs_model, run, run_model, run_stats, start, wait_until_it_reads

pytestmark = pytest.mark.skipif(not os.access(MAIN, os.X_OK), reason="DT_MAIN names no program")

TEXT = "The quick brown fox jumps over the lazy dog. The capital of France is Paris, and the capital of Italy is"


@needs_model
@pytest.mark.parametrize("flags", [(), ("--cache-eviction", "--eviction-config", "window.json"), ("--kv-type", "int8")])
def test_same_text_as_without(tmp_path, flags):
    """Cold, again, longer, shorter, diverging at token 10, after an empty one: at temperature 0 never another text."""
    session = tmp_path / "s.bin"
    # A kernel that reads a prompt as it decodes: in others the two round differently, and near-equal tokens may change places. Only
    # windows: scores come from attention, and a file remembers that of the reply's tokens, which the next prompt takes back.
    window = tmp_path / "window.json"
    window.write_text('{"0-": {"policy": "local_window", "max_cache_size": 48, "min_cache_size": 16, "recent_window": 12}}')
    flags = tuple(str(window) if flag == "window.json" else flag for flag in flags)
    flags = (*flags, "-n", "24", "--temp", "0", "--kernel", "reference")
    diverging = TEXT.replace("dog", "cat")
    for prompt in (TEXT, TEXT, TEXT + " Rome. In Spain it is", TEXT[:60], diverging, "", TEXT):
        if prompt == "":  # this model has no start token to begin from; the file stays as it is
            before = session.read_bytes()
            assert_fails(run_model("-p", "", "--session", str(session), *flags), 2, "the prompt is empty")
            assert session.read_bytes() == before
            continue
        plain, _ = run_stats(tmp_path, "-p", prompt, *flags)
        kept, stats = run_stats(tmp_path, "-p", prompt, "--session", str(session), *flags)
        assert kept.stdout == plain.stdout, prompt
        assert re.search(rb"session: .*s\.bin: (\d+ tokens saved|nothing is new)", kept.stderr)
        assert os.listdir(tmp_path / "stats") == ["s.json"] and session.stat().st_size > 1000


@needs_model
def test_reuse(tmp_path):
    session = ("--session", str(tmp_path / "s.bin"))
    greedy = ("--temp", "0", "-n", "8")
    _, cold = run_stats(tmp_path, "-p", TEXT, *session, *greedy)
    _, again = run_stats(tmp_path, "-p", TEXT, *session, *greedy)
    assert cold["reused_tokens"] == 0 and again["reused_tokens"] == cold["prompt_tokens"] - 1
    _, longer = run_stats(tmp_path, "-p", TEXT + " Rome", *session, *greedy)
    assert longer["reused_tokens"] == cold["prompt_tokens"] and longer["prompt_tokens"] == cold["prompt_tokens"] + 1
    log, rewound = run_stats(tmp_path, "-p", TEXT.replace("dog", "cat"), *session, *greedy)
    assert 8 <= rewound["reused_tokens"] <= 10 and b"rewound to token" in log.stderr


@needs_model
@pytest.mark.parametrize("flags", [(), ("--cache-eviction", "--max-cache-size", "48", "--min-cache-size", "16")])
def test_goes_on_without_its_text(tmp_path, flags):
    """Parts of a text are the text: what was written last is in the file too. No cache was planned too small for what is loaded."""
    session = ("--session", str(tmp_path / "s.bin"))
    greedy = ("--temp", "0", "--ignore-eos", "--kernel", "reference", *flags)
    whole = run_model("-p", TEXT, "-n", "24", *greedy).stdout
    parts = run_model("-p", TEXT, "-n", "9", *session, *greedy).stdout[:-1]
    for n in (1, 14):
        log, stats = run_stats(tmp_path, "-n", str(n), *session, *greedy)
        parts += log.stdout[:-1]
        most = float(re.search(rb"KV memory: at most ([0-9.]+) MiB", log.stderr).group(1))
        assert stats["kv_bytes_peak"] <= (most + 0.1) * (1 << 20)
        assert stats["prompt_tokens"] == stats["reused_tokens"]
    assert parts == whole[:-1]
    said = run_model("-p", TEXT + " Rome, and that of Spain is", "-n", "8", *greedy).stdout
    assert run_model("-p", TEXT, "-n", "0", "--session", str(tmp_path / "a.bin"), *greedy).returncode == 0
    log, stats = run_stats(tmp_path, "-p", " Rome, and that of Spain is", "--append", "--session", str(tmp_path / "a.bin"), "-n", "8", *greedy)
    assert log.stdout == said and stats["prompt_tokens"] - stats["reused_tokens"] < 9
    # a block of 256 tokens of each lane takes 5.7 MiB, scores some more
    assert run_model("-n", "2", *session, "--kv-memory", "8M", *greedy).returncode == 0
    refused = run_model("-n", "2", *session, "--kv-memory", "4M", *greedy)
    assert_fails(refused, 2, "as f16, and under these settings 4.0 MiB leave room for int8 only: give --kv-memory")
    named = re.search(rb"--kv-memory (\d+K)", refused.stderr).group(1).decode()
    assert run_model("-n", "2", *session, "--kv-memory", named, *greedy).returncode == 0
    assert_fails(run_model("-n", "2", *session, "--kv-memory", "99M", "--kv-type", "int8", *greedy), 2, "cache is int8; give --kv-type f16")


@needs_model
def test_what_was_lost_before_is_told(tmp_path):
    """Also by a run that evicts nothing itself."""
    session, tight = ("--session", str(tmp_path / "s.bin")), ("--cache-eviction", "--max-cache-size", "48", "--min-cache-size", "16")
    first = run_model("-p", TEXT * 3, "-n", "4", "--temp", "0", *session, *tight).stderr
    lost = re.search(rb"TLC: layers? .* let go \d+ of|TLC: \d+ layers let go", first)
    assert lost and b"saved conversation" not in first
    for flags in ((), ("--cache-eviction", "--max-cache-size", "2048")):
        log = run_model("-n", "2", "--temp", "0", *session, *flags).stderr
        assert re.search(rb"saved conversation had let go tokens before:\nTLC: (layers? |\d+ layers)", log), log
        assert (b"nothing was evicted in this run" in log) == (flags != ())
    roomy = run_model("-p", TEXT, "-n", "2", "--session", str(tmp_path / "t.bin")).stderr
    assert b"let go" not in roomy and b"let go" not in run_model("-n", "2", "--session", str(tmp_path / "t.bin")).stderr


@needs_model
def test_nothing_to_go_on_from(tmp_path):
    assert_fails(run_model("-n", "2", "--session", str(tmp_path / "none.bin")), 2, "isn't there yet")
    assert_fails(run_model("-n", "2", "--append", "-p", "x"), 2, "--session FILE")
    (tmp_path / "empty.bin").write_bytes(b"")
    assert_fails(run_model("-n", "2", "--session", str(tmp_path / "empty.bin")), 2, "is empty")


@needs_model
def test_seeds(tmp_path):
    """A given seed reproduces a run of the same kind, without one runs differ, and the seed of the log is the one used."""
    session = tmp_path / "s.bin"
    flags = ("-p", TEXT, "-n", "24", "--temp", "1.2", "--ignore-eos", "--session", str(session))

    def again(*extra):
        result = run_model(*flags, *extra)
        assert result.returncode == 0, result.stderr
        return result.stdout, re.search(rb"seed: (\d+)", result.stderr).group(1).decode()

    again()
    first, seed = again()
    second, other = again()
    assert seed != other and first != second
    assert again("--seed", seed) == (first, seed)
    assert again("--seed", "7") == again("--seed", "7")


@needs_model
def test_chat_goes_on(tmp_path):
    """Three runs are one conversation; the second and third compute only their own turns."""
    session = ("--session", str(tmp_path / "s.bin"))
    lines = [b"My name is Bob.\n", b"What is  my name?\n", "Gr\u00fc\u00dfe \U0001F600, bye.\n".encode()]
    whole = run_model(*CHAT, "-sys", "Be brief.", stdin=b"".join(lines))
    parts = []
    for i, line in enumerate(lines):
        log, stats = run_stats(tmp_path, *CHAT, *session, *(("-sys", "Be brief.") if i < 2 else ()), stdin=line)
        parts.append(log.stdout)
        assert b"rewrote" not in log.stderr
        if i > 0:
            assert b"chat: goes on after %d messages" % (1 + 2 * i) in log.stderr
            assert stats["prompt_tokens"] - stats["reused_tokens"] < 32, stats["prompt_tokens"]
    assert b"".join(parts) == whole.stdout
    assert_fails(run_model(*CHAT, *session, "-sys", "Be verbose.", stdin=b"hi\n"), 2, "another system prompt")
    nothing = run_model(*CHAT, *session)  # no message at all: the conversation stays
    assert nothing.returncode == 0
    assert b"chat: goes on after 7 messages" in run_model(*CHAT, *session).stderr


@needs_model
def test_bad_session_files(tmp_path):
    good = tmp_path / "good.bin"
    assert run_model("-p", TEXT, "-n", "2", "--session", str(good)).returncode == 0
    data = good.read_bytes()
    assert b"give --kv-type f16" in run_model("-p", "x", "-n", "1", "--kv-type", "int8", "--session", str(good)).stderr
    for name, content, fragment in (
            ("empty.bin", b"", "empty"), ("text.bin", b"Dear diary,\n" * 50, "no session file"),
            ("cut.bin", data[:len(data) // 2], "cut short"), ("flip.bin", data[:5000] + bytes([data[5000] ^ 1]) + data[5001:], "damaged"),
            ("version.bin", data[:8] + b"\x09" + data[9:], "version 9"), (".", None, "can't be written")):
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        before = None if content is None else path.read_bytes()
        assert_fails(run_model("-p", TEXT, "-n", "2", "--session", str(path)), 2, fragment)
        assert content is None or path.read_bytes() == before
    assert_fails(run("-m", "no-such.gguf", "-p", "x", "--session", str(tmp_path / "no" / "s.bin")), 2, "can't be written")
    assert_fails(run("-m", "x", "-p", "x", "--session", "a", "--stats-json", "a"), 2, "the same file")
    assert_fails(run_model("-p", "x", "--session", MODEL), 2, "no session file")


@needs_model
def test_full_disk_is_told_before_the_work(tmp_path):
    command = 'ulimit -f 100; exec "$0" -m "$1" -t 1 -n 4 --session "$2" -p "$3"'
    result = subprocess.run(["sh", "-c", command, MAIN, MODEL, str(tmp_path / "s.bin"), "word " * 300], capture_output=True, timeout=60)
    assert_fails(result, 2, "can't be written", "MiB")
    assert os.listdir(tmp_path) == []


def finish(process, signal_number):
    process.send_signal(signal_number)
    out, log = process.communicate(timeout=60)
    assert process.returncode == 0, log
    return out, log


@needs_model
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_runs_are_saved(tmp_path, signal_number):
    session = tmp_path / "s.bin"
    # while reading: what was read is reused
    process = start("-p", "word " * 6000, "-n", "5", "-b", "1", "--kernel", "reference", "--session", str(session))
    wait_until_it_reads(process, 1)
    _, log = finish(process, signal_number)
    read = int(re.search(rb"(\d+) tokens saved", log).group(1))
    assert 0 < read < 6000
    _, stats = run_stats(tmp_path, "-p", "word " * 100, "-n", "1", "--session", str(session))
    assert stats["reused_tokens"] == min(read, stats["prompt_tokens"] - 1)
    # while writing
    process = start("-p", "Count: 1, 2, 3,", "-n", "-1", "--ignore-eos", "--temp", "0", "--session", str(session))
    text = process.stdout.read(5)
    out, log = finish(process, signal_number)
    text = (text + out)[:-1].decode()
    assert b"tokens saved" in log
    log, stats = run_stats(tmp_path, "-p", "Count: 1, 2, 3," + text, "-n", "1", "--temp", "0", "--session", str(session))
    assert stats["prompt_tokens"] - stats["reused_tokens"] <= 3, stats


@needs_model
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_chats_are_saved(tmp_path, signal_number):
    session = ("--session", str(tmp_path / "s.bin"))
    process = subprocess.Popen([MAIN, "-m", MODEL, "-t", "1", *CHAT, *session], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    process.stdin.write(b"hi\n")
    process.stdin.flush()
    while process.stdout.read(1) not in (b"\n", b""):
        pass
    time.sleep(0.3)
    finish(process, signal_number)
    assert b"chat: goes on after 2 messages" in run_model(*CHAT, *session).stderr


@needs_model
def test_terminated_chat_on_a_terminal_is_saved(tmp_path):
    session = tmp_path / "s.bin"
    terminal = Terminal("-m", MODEL, *CHAT, "--session", str(session))
    terminal.wait_for(b"> ")
    terminal.type(b"hi\n")
    terminal.wait_for(b"> ", 2)
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.finish() == 0 and b"tokens saved" in terminal.seen
    assert b"chat: goes on after 2 messages" in run_model(*CHAT, "--session", str(session)).stderr


# ---- one-time caching within a run (cases.md row 12) ---------------------------------------------


def chat_of(tmp_path, reply, turns, *flags):
    """A chat whose every reply is `reply`; the log and how many tokens were computed in prefill."""
    grammar = 'root ::= "' + reply.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
    log, stats = run_stats(tmp_path, "-cnv", "--temp", "0", "-n", "64", "--grammar", grammar, *flags, stdin=b"Go on.\n" * turns)
    assert log.stdout.decode() == (reply + "\n") * turns
    return log.stderr, stats["prompt_tokens"] - stats["reused_tokens"]


@needs_model
@pytest.mark.parametrize("reply", ["two  spaces,   three", "lines\n\n", " \U0001F600 in front", "```c\nint  x;\n```\n", "\tx"])
def test_replies_that_would_tokenize_otherwise(tmp_path, reply):
    """The tokens that were generated stay, whatever the reply's text would be tokenized to."""
    first = chat_of(tmp_path, reply, 1)[1]
    log, computed = chat_of(tmp_path, reply, 5)
    assert b"rewrote" not in log and b"session: re" not in log
    assert computed - first <= 4 * 16, computed  # a turn's own tokens, the template's marks and the reply's last token


@needs_model
def test_template_that_drops_thinking(tmp_path):
    """As Qwen3's: one rewind a turn, said with the first position that differs; what lies before is reused."""
    template = ("{% for m in messages %}<|im_start|>{{ m.role }}\n"
                "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}<|im_end|>\n{% endfor %}"
                "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    thinking, plain = "<think>\nhm, so what\n</think>Well.", "Well."
    flags = ("--chat-template", template)
    log, computed = chat_of(tmp_path, thinking, 5, *flags)
    assert len(re.findall(rb"the template rewrote the conversation from token \d+ on", log)) == 4
    assert len(re.findall(rb"session: rewound to token \d+ of \d+, \d+ tokens reused", log)) == 4
    first = chat_of(tmp_path, thinking, 1, *flags)[1]
    assert computed - first <= 4 * 24, computed
    log, computed = chat_of(tmp_path, plain, 5, *flags)
    assert b"rewrote" not in log and computed - first <= 4 * 16
    # what is rewritten between two runs is no other text
    session = tmp_path / "s.bin"
    for i in range(3):
        log = chat_of(tmp_path, thinking, 1, *flags, "--session", str(session))[0]
        assert (b"rewrote" in log) == (i > 0) and b"parts from the saved one" not in log and not (tmp_path / "s.bin.old").exists()
    # where something was evicted since, a snapshot leads back to the end of what was read before the reply
    log, computed = chat_of(tmp_path, thinking, 5, *flags, "--cache-eviction", "--max-cache-size", "48", "--min-cache-size", "16")
    assert len(re.findall(rb"session: rewound to token \d+ of \d+ by a snapshot, \d+ tokens reused", log)) >= 3, log
    assert b"session: rebuilt" not in log and computed - first <= 4 * 24, computed


@needs_model
def test_another_text_loses_nothing(tmp_path):
    session, old = tmp_path / "s.bin", tmp_path / "s.bin.old"
    flags = ("-n", "4", "--temp", "0", "--session", str(session))
    run_model("-p", TEXT, *flags)
    first = session.read_bytes()
    assert run_model("-p", TEXT + " Rome.", *flags).returncode == 0
    more = run_model("-p", "Once upon a time", *flags)
    assert more.returncode == 0 and f"it stays as {old}" in more.stderr.decode()
    assert old.exists() and session.read_bytes() != first
    again = run_model("-p", "Once upon a time", "-n", "4", "--temp", "0", "--session", str(old))  # the one there is can be used
    assert again.returncode == 0


@needs_model
def test_what_was_kept_goes_last(tmp_path):
    """Through a link the file that it leads to is kept, not the link; where it can't be kept it stays, and the new text isn't saved."""
    (tmp_path / "real").mkdir()
    real, link, old = tmp_path / "real" / "s.bin", tmp_path / "link.bin", tmp_path / "real" / "s.bin.old"
    link.symlink_to(real)
    flags = ("-n", "2", "--temp", "0", "--session", str(link))
    assert run_model("-p", TEXT, "-n", "2", "--temp", "0", "--session", str(real)).returncode == 0
    for text in ("Once upon a time", TEXT):  # the second time over what the first one kept
        before = real.read_bytes()
        log = run_model("-p", text, *flags).stderr.decode()
        assert f"it stays as {old}" in log and old.read_bytes() == before and link.is_symlink()
        assert sorted(os.listdir(real.parent)) == ["s.bin", "s.bin.old"] and sorted(os.listdir(tmp_path)) == ["link.bin", "real"]
    old.unlink()
    before = real.read_bytes()
    for make in (old.mkdir, lambda: old.write_text("somebody's own")):
        make()
        done = run_model("-p", "Once upon a time", *flags)
        assert done.returncode == 1 and f"can't be kept as {old} (something else is there)" in done.stderr.decode()
        assert real.read_bytes() == before and sorted(os.listdir(real.parent)) == ["s.bin", "s.bin.old"]
        if old.is_dir():
            old.rmdir()
    assert old.read_text() == "somebody's own"


@needs_model
def test_kept_without_links(tmp_path):
    """Where the file system has no hard links."""
    session = tmp_path / "s.bin"
    flags = ("-n", "2", "--temp", "0", "--session", str(session))
    assert run_model("-p", TEXT, *flags).returncode == 0
    before = session.read_bytes()
    (tmp_path / "s.bin.old.part").write_text("somebody's own")  # what no link can be made as
    log = run_model("-p", "Once upon a time", *flags).stderr.decode()
    assert f"it stays as {session}.old" in log and (tmp_path / "s.bin.old").read_bytes() == before != session.read_bytes()
    assert (tmp_path / "s.bin.old.part").read_text() == "somebody's own"
    (tmp_path / "s.bin.old.part").unlink()
    os.link(session, tmp_path / "s.bin.old.part")  # a run's that was killed
    assert run_model("-p", TEXT, *flags).returncode == 0
    assert sorted(os.listdir(tmp_path)) == ["s.bin", "s.bin.old"]


@needs_model
def test_a_chat_stays_a_chat(tmp_path):
    """Without -cnv its file is refused, whatever the text: saved as one it would have lost its messages."""
    session = tmp_path / "s.bin"
    flags = ("-n", "4", "--temp", "0", "--session", str(session))
    assert run_model("-cnv", "-p", "Hello.", *flags).returncode == 0
    chat = session.read_bytes()
    for text in ((), ("-p", "Once upon a time"), ("-p", "And", "--append")):
        assert_fails(run_model(*text, *flags), 2, "holds a chat", "-cnv", str(session))
        assert session.read_bytes() == chat and os.listdir(tmp_path) == ["s.bin"]
    assert b"goes on after 2 messages" in run_model("-cnv", "-p", "And you?", *flags).stderr


@needs_model
def test_penalties_of_a_chat_that_was_saved(tmp_path):
    """The end of a reply stands in the chat once: counted also when it was sampled, the one reply would differ."""
    flags = ("-cnv", "-n", "30", "--temp", "0", "--repeat-penalty", "1.3", "-c", "1024")
    first, rest = b"Bye\n", b"Count to 3.\nHi\n"
    whole = run_model(*flags, stdin=first + rest).stdout
    session = ("--session", str(tmp_path / "s.bin"))
    parts = [run_model(*flags, *session, stdin=lines).stdout for lines in (first, rest)]
    assert b"".join(parts).split() == whole.split() and len(whole.split()) > 30


@needs_model
def test_a_text_becomes_no_chat(tmp_path):
    session = tmp_path / "s.bin"
    flags = ("-n", "4", "--temp", "0", "--session", str(session))
    assert run_model("-p", TEXT, *flags).returncode == 0
    text = session.read_bytes()
    assert_fails(run_model("-cnv", "-p", "Hello.", *flags), 2, "holds a text", "-cnv", str(session))
    assert session.read_bytes() == text and os.listdir(tmp_path) == ["s.bin"]


@needs_model
def test_what_was_refused_replaces_nothing(tmp_path):
    """A message that has no room leaves the chat as it was: there is nothing to keep under another name."""
    session, old = tmp_path / "s.bin", tmp_path / "s.bin.old"
    flags = ("-cnv", "-c", "128", "-n", "4", "--temp", "0", "--session", str(session))
    assert run_model("-p", "Hello.", *flags).returncode == 0
    before = session.read_bytes()
    old.write_bytes(b"somebody's own")
    log = run_model("-p", "word " * 300, *flags).stderr
    assert b"outgrown" in log and b"parts from" not in log, log
    assert session.read_bytes() == before and old.read_bytes() == b"somebody's own"


@needs_model
def test_a_refused_text_leaves_the_session(tmp_path):
    """To the byte: saved under other settings it would lack what its own score from."""
    session = tmp_path / "s.bin"
    flags = ("-n", "4", "--temp", "0", "--session", str(session))
    assert run_model("-p", TEXT, "--cache-eviction", "--eviction-preset", "summary", *flags).returncode == 0
    before = session.read_bytes()
    for text in (("-p", "word " * 300, "--append"), ("-p", TEXT + "word " * 300)):
        assert_fails(run_model(*text, "-c", "128", *flags), 1, "don't fit")
        assert session.read_bytes() == before and os.listdir(tmp_path) == ["s.bin"]


@needs_model
def test_a_full_session_ends(tmp_path):
    """Its last word was told; nothing is told twice until there is room."""
    session = tmp_path / "s.bin"
    flags = ("--temp", "0", "--ignore-eos", "--session", str(session))
    assert b"longest length" in run_model("-p", TEXT, "-n", "100", "-c", "64", *flags).stderr
    full = session.read_bytes()
    for more in ((), ("-p", "more", "--append")):
        assert_fails(run_model("-n", "4", "-c", "64", *more, *flags), 2, "a larger -c")
        assert session.read_bytes() == full
    assert run_model("-n", "4", "-c", "128", *flags).returncode == 0


@needs_model
def test_a_long_session_under_eviction(tmp_path):
    """What it holds is loaded whole: with it the promise is told anew, or what would do is."""
    session = tmp_path / "s.bin"
    text = " ".join(f"The {i}th sentence of a long story." for i in range(260))
    assert run_model("-p", text, "-n", "0", "--session", str(session)).returncode == 0
    flags = ("-p", " And", "--append", "-n", "2", "--temp", "0", "--cache-eviction", "--max-cache-size", "64", "--min-cache-size", "16",
             "--prefill", "streaming", "-b", "64")
    asked = run_model("--session", str(session), *flags, "--kv-memory", "20M")
    assert_fails(asked, 2, "loaded whole", "--kv-memory")
    enough = re.search(rb"--kv-memory (\d+)K or more", asked.stderr).group(1).decode()
    for limit in ((), ("--kv-memory", f"{enough}K")):
        copy = tmp_path / "copy.bin"
        copy.write_bytes(session.read_bytes())
        log, stats = run_stats(tmp_path, "--session", str(copy), *flags, *limit)
        before, after = re.findall(rb"KV memory: at most ([0-9.]+) MiB", log.stderr)
        assert float(before) * (1 << 20) < stats["kv_bytes_peak"] <= (float(after) + 0.1) * (1 << 20)
        assert not limit or stats["kv_bytes_peak"] <= int(enough) * 1024
    for megabytes in (24, 40, 44, 48, 52, 56, 64, 72):  # around what it takes: it goes on to its end, or is refused before it begins
        copy.write_bytes(session.read_bytes())
        done = run_model("--session", str(copy), *flags, "--kv-memory", f"{megabytes}M", "--ignore-eos", "-n", "12")
        assert done.returncode == (2 if megabytes * 1024 < int(enough) else 0), done.stderr


@needs_model
@pytest.mark.parametrize("text", ["precious", "12 monkeys\n", "123", "0\n"])
def test_somebodys_own_lock_file(tmp_path, text):
    session, lock = tmp_path / "Cargo", tmp_path / "Cargo.lock"
    lock.write_text(text)
    flags = ("-p", TEXT, "-n", "2", "--temp", "0", "--session", str(session))
    assert_fails(run_model(*flags), 2, f"{lock} is no lock file of this program", "name another file")
    assert lock.read_text() == text and os.listdir(tmp_path) == ["Cargo.lock"]
    lock.write_text("99999999\n")  # a killed run's
    assert run_model(*flags).returncode == 0 and os.listdir(tmp_path) == ["Cargo"]
    lock.mkdir()
    assert_fails(run_model(*flags), 2, f"{lock} is no lock file of this program", "Is a directory")


@needs_model
def test_pipes_in_place_of_files(tmp_path):
    """Nobody waits for a writer that never comes."""
    session = tmp_path / "s.bin"
    os.mkfifo(session)
    assert_fails(run_model("-p", TEXT, "-n", "2", "--session", str(session)), 2, str(session), "no regular file")
    model = tmp_path / "m.gguf"
    model.symlink_to(MODEL)
    os.mkfifo(tmp_path / "m.tlc.json")
    done = run("-m", str(model), "-p", TEXT, "-n", "2", "--temp", "0", "--cache-eviction")
    assert done.returncode == 0, done.stderr
