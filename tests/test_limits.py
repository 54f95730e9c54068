"""What ./main does at its limits: the smallest budgets, contexts that are full, runs without end, texts from strangers, other
locales, split models, signals. On tiny random models, so that hundreds of tokens take no time.

Work is counted, not timed: rounds and tokens evicted must be exactly what the budget says. The rows of public cases behind the
tests are named by their number (cases).
"""
import json
import os
import pty
import re
import resource
import signal
import subprocess
import time

import pytest

from server_support import SANITIZED
from test_main import MAIN, assert_fails, run

MAKE_MODEL = os.environ.get("DT_MAKE_MODEL", "")
N_LAYERS = 2

pytestmark = pytest.mark.skipif(not os.access(MAIN, os.X_OK) or not os.access(MAKE_MODEL, os.X_OK),
                                reason="DT_MAIN or DT_MAKE_MODEL names no program")


def make_model(path, *options):
    shape = {"--layers": N_LAYERS, "--embd": 64, "--heads": 4, "--kv-heads": 2, "--head-dim": 16, "--ff": 128, "--vocab": 320,
             "--ctx": 1024, "--type": "f16"}
    shape.update(zip(options[::2], options[1::2]))
    arguments = [str(word) for pair in shape.items() for word in pair]
    subprocess.run([MAKE_MODEL, str(path), *arguments], check=True, timeout=60)
    return str(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("limits") / "tiny.gguf")


def stats_of(model, tmp_path, *arguments, **kwargs):
    stats = tmp_path / "stats.json"
    result = run("-m", model, "-t", "1", "--temp", "0", "--stats-json", str(stats), *arguments, **kwargs)
    assert result.returncode == 0, result.stderr
    return result, json.loads(stats.read_bytes())


def budget(tmp_path, **fields):
    path = tmp_path / "eviction.json"
    path.write_text(json.dumps({"0-": dict({"policy": "local_window", "sink_tokens": 4, "recent_window": 128}, **fields)}))
    return ["--cache-eviction", "--eviction-config", str(path)]


# ---- budgets -------------------------------------------------------------------------------------


def expected_rounds(n_prompt, n_decoded, largest, low):
    """Rounds and evicted tokens of one layer, and the length it ends with."""
    rounds = evicted = length = 0
    for n in [n_prompt] + [1] * n_decoded:
        length += n
        if length > largest:
            rounds += 1
            evicted += length - low
            length = low
    return rounds, evicted, length


@pytest.mark.parametrize("policy", ["local_window", "importance_score"])
@pytest.mark.parametrize("smallest, low", [(130, 130), (135, 135), (136, 136), (0, 128)])
def test_budgets_with_hardly_any_room(model, tmp_path, policy, smallest, low):
    """Row 5: ends, each round frees at least one token, and no layer ever goes below its min."""
    _, stats = stats_of(model, tmp_path, "-p", "ab " * 20, "-n", "400", "--ignore-eos",
                        *budget(tmp_path, policy=policy, max_cache_size=136, min_cache_size=smallest, recent_window=124))
    assert stats["generated_tokens"] == 400
    rounds, evicted, length = expected_rounds(stats["prompt_tokens"], 399, 136, low)
    assert stats["eviction"]["rounds"] == N_LAYERS * rounds and stats["eviction"]["evicted_tokens"] == N_LAYERS * evicted
    assert rounds <= evicted
    for layer in stats["layers"]:
        assert layer["length"] == layer["mean_length"] == length >= smallest and layer["evicted_tokens"] == evicted


def test_a_budget_of_pinned_tokens_only(model, tmp_path):
    result = run("-m", model, "-p", "x", *budget(tmp_path, max_cache_size=132))
    assert_fails(result, 2, "132", "sink_tokens 4 and recent_window 128")


@pytest.mark.parametrize("head_dim, head_dim_v", [(16, 0), (40, 0), (80, 48), (100, 0), (40, 100)])
def test_int8_past_the_trained_length(tmp_path, head_dim, head_dim_v):
    """Row 6: head sizes that are no multiple of 32, keys unlike values, a conversation longer than the trained length."""
    path = make_model(tmp_path / "m.gguf", "--head-dim", head_dim, "--head-dim-v", head_dim_v, "--embd", 4 * head_dim, "--ctx", 256)
    results = []
    for kv_type in ("f16", "int8"):
        log, stats = stats_of(path, tmp_path, "-p", "abc " * 30, "-n", "600", "--ignore-eos", "-c", "2048", "--kv-type", kv_type,
                              "--cache-eviction", "--max-cache-size", "96", "--prefill", "streaming", "-b", "32")
        assert b"longer than the 256 the model was trained with" in log.stderr
        assert stats["generated_tokens"] == 600 and all(layer["length"] <= 96 for layer in stats["layers"])
        results.append(stats)
        # past it without -c: kept tokens move together, and their keys turn
        log, stats = stats_of(path, tmp_path, "-p", "abc " * 30, "-n", "600", "--ignore-eos", "--kv-type", kv_type,
                              "--cache-eviction", "--max-cache-size", "96", "-b", "32")
        assert b"the context of 256 is used up" in log.stderr and b"trained with" not in log.stderr
        assert stats["generated_tokens"] == 600 and all(layer["length"] <= 96 for layer in stats["layers"])
    assert results[1]["kv_bytes"] < 0.8 * results[0]["kv_bytes"]


def test_log_within_text_on_a_terminal(tmp_path):
    """A line of the log that comes while text is written begins a line of its own."""
    path = make_model(tmp_path / "m.gguf", "--ctx", 256)
    (tmp_path / "g").write_text('root ::= "a"*')
    ours, theirs = pty.openpty()
    program = subprocess.Popen([MAIN, "-m", path, "-p", "abc " * 30, "-n", "400", "--ignore-eos", "--cache-eviction", "--max-cache-size",
                                "96", "-b", "32", "--grammar-file", str(tmp_path / "g")],
                               stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs)
    os.close(theirs)
    told = b""
    while True:
        try:
            told += os.read(ours, 4096)
        except OSError:  # so a terminal ends on Linux
            break
    os.close(ours)
    assert program.wait() == 0, told
    at = told.index(b"after 256 tokens the context of 256 is used up")
    assert told[at - 3:at] == b"a\r\n" and told[told.index(b"\r\n", at):][:3] == b"\r\na"


# ---- contexts ------------------------------------------------------------------------------------


def test_a_full_context_is_never_cut_silently(model, tmp_path):
    """Row 24, eviction off and on: what doesn't fit is refused with both numbers, or the log and the statistics say what went."""
    endless = budget(tmp_path, max_cache_size=96, sink_tokens=0, recent_window=32) + ["--prefill", "streaming", "-b", "32"]
    lengths = {}
    for n in (63, 64, 65, 128):
        text = "a" * (n - 1)  # a token each, and the start token
        options = ("-m", model, "-p", text, "-n", "0", "-c", "64")
        lengths[n] = stats_of(model, tmp_path, "-p", text, "-n", "0")[1]["prompt_tokens"]
        if lengths[n] <= 64:
            assert run(*options).returncode == 0
        else:
            assert_fails(run(*options), 1, str(lengths[n]), "64")
            refused = run(*options, "--cache-eviction", "--max-cache-size", "40")
            assert_fails(refused, 1, str(lengths[n]), "64")
            works = int(re.search(rb"a max_cache_size of at most (\d+) lets", refused.stderr).group(1))
            assert run(*options, "--cache-eviction", "--max-cache-size", str(works)).returncode == 0
            assert_fails(run(*options, "--cache-eviction", "--memory-slots", "0"), 1, "a max_cache_size of at most 32 lets")  # a preset's min is 512
            assert_fails(run(*options, "--cache-eviction", "--max-cache-size", str(works + 1)), 1, f"at most {works} ")
            longer = run(*options, "--cache-eviction", "--max-cache-size", "32", "--memory-slots", "0")  # leaves room for a chunk
            assert longer.returncode == 0 and f"{lengths[n]} tokens are too many for the context of 64 at once" in longer.stderr.decode()
            assert f"of {lengths[n]} tokens" in longer.stderr.decode()  # let go, by the layers
    assert max(lengths.values()) > 64 >= min(lengths.values())
    text = "ab " * 1500  # a multiple of the trained context of 1,024
    log, stats = stats_of(model, tmp_path, "-p", text, "-n", "1", *endless)
    n = stats["prompt_tokens"]
    assert n > 2 * 1024
    for layer in stats["layers"]:
        assert layer["evicted_tokens"] == n - layer["length"] > 1024
    assert f"TLC: layers 0-1 let go {n - stats['layers'][0]['length']} of {n} tokens" in log.stderr.decode()


@pytest.mark.parametrize("saved,flags", [
    (("--cache-eviction", "--max-cache-size", "222", "--memory-slots", "6"), ("--cache-eviction", "--max-cache-size", "254")),
    (("--kv-type", "int8"), ("--cache-eviction", "--eviction-preset", "code", "--max-cache-size", "200")),
    ((), ("--cache-eviction", "--max-cache-size", "222")), ((), ())], ids=["slots", "int8", "f16", "whole"])
def test_the_memory_that_is_named_for_a_session_works(model, tmp_path, saved, flags):
    """Under a larger limit the plan gives back chunks and budgets, which have to fit beside what is loaded."""
    session, n_named = tmp_path / "s.bin", 0
    assert run("-m", model, "-p", "abcdefgh " * 60, "-n", "2", "--temp", "0", "--session", str(session), *saved).returncode == 0
    whole = session.read_bytes()
    for limit in range(40, 400, 12):
        result = run("-m", model, "--session", str(session), "-n", "200", "--temp", "0", *flags, "--kv-memory", f"{limit}K")
        named = re.search(rb"(?:loaded whole .*|int8 only:) give --kv-memory (\d+)K or more(, and --kv-type int8)?", result.stderr)
        assert session.read_bytes() == whole or result.returncode == 0, result
        if named:
            n_named += 1
            more = ("--kv-memory", f"{int(named.group(1))}K", *(("--kv-type", "int8") if named.group(2) else ()))
            again = run("-m", model, "--session", str(session), "-n", "200", "--temp", "0", *flags, *more)
            assert again.returncode == 0, again.stderr
        session.write_bytes(whole)
    assert n_named > 0


def test_a_session_longer_than_the_context(model, tmp_path):
    """Budgets that give way let it go past the context, those that were asked for don't: no limit would help, and none is named."""
    session = tmp_path / "s.bin"
    assert run("-m", model, "-p", "abcdefgh " * 48, "-n", "2", "--temp", "0", "--session", str(session)).returncode == 0
    flags = ("-m", model, "--session", str(session), "-n", "2", "--temp", "0", "--cache-eviction", "--max-cache-size", "400",
             "--min-cache-size", "10", "--memory-slots", "0")
    for limit in range(120, 400, 20):
        result = run(*flags, "-c", "300", "--kv-memory", f"{limit}K")
        assert result.returncode == 2 and b"longer than the context of 300; give a larger -c" in result.stderr, result
    assert run(*flags, "-c", "600").returncode == 0


def test_sizes_of_lanes_within_a_shared_budget(model, tmp_path):
    config = tmp_path / "lanes.json"
    config.write_text(json.dumps({"budget": "adaptive", "total_cache_size": 100000,
                                  "layers": {"0-": {"policy": "importance_score", "lanes": [20, 30]}}}))
    log, stats = stats_of(model, tmp_path, "-p", "abc " * 90, "-n", "4", "-c", "200", "--cache-eviction", "--eviction-config", str(config))
    assert b"max 20-30" in log.stderr and [layer["max_cache_size"] for layer in stats["layers"]] == [30, 30]


def test_what_the_context_bounds_is_no_setting(model, tmp_path):
    """A lane without a size of its own that shares a budget leaves the context some room, which nobody asked it for."""
    config = tmp_path / "shared.json"
    config.write_text(json.dumps({"budget": "adaptive", "total_cache_size": 80, "layers": {
        "0": {"policy": "importance_score", "max_cache_size": 60}, "1": {"policy": "importance_score", "max_cache_size": 2147483647}}}))
    log, stats = stats_of(model, tmp_path, "-p", "abc " * 90, "-n", "4", "-c", "400", "--cache-eviction", "--eviction-config", str(config))
    assert b"max any" in log.stderr and [layer["max_cache_size"] for layer in stats["layers"]] == [60, 0]
    assert stats["eviction"]["rounds"] > 0 and stats["eviction"]["total_cache_size"] == 80


def test_characters_beyond_unicode(model):
    result = run("-m", model, "-p", b"ab\xf7\xbf\xbf\xbf", "-n", "1")
    assert result.returncode in (0, 1) and (result.returncode == 0 or b"byte 3 of the text begins a character above U+10FFFF" in result.stderr)


def test_odd_contexts(model):
    """Row 26."""
    assert_fails(run("-m", model, "-p", "abc", "-n", "1", "-c", "1"), 1, "context of 1")
    assert run("-m", model, "-p", "abc", "-n", "1", "-c", "1000000000").returncode == 0


def resident_bytes(process):
    with open(f"/proc/{process.pid}/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
def test_without_end_until_interrupted(model, tmp_path):
    """Row 25: memory stays flat, and so does the work of a token, which is the length of the lanes."""
    stats = tmp_path / "stats.json"
    endless = budget(tmp_path, max_cache_size=96, sink_tokens=0, recent_window=32) + ["--prefill", "streaming", "-b", "32"]
    process = subprocess.Popen([MAIN, "-m", model, "-t", "1", "-p", "abc", "-n", "-1", "--ignore-eos", "--seed", "1",
                                "--stats-json", str(stats), *endless],
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    held = []
    for _ in range(4):
        assert len(process.stdout.read(20000)) == 20000
        held.append(resident_bytes(process))
    process.send_signal(signal.SIGINT)
    out, log = process.communicate(timeout=60)
    assert process.returncode == 0, log
    numbers = json.loads(stats.read_bytes())
    assert numbers["generated_tokens"] > 8000  # far beyond the trained context
    assert SANITIZED or max(held[1:]) - held[0] < 2 << 20, held
    assert all(layer["length"] <= 96 for layer in numbers["layers"])
    assert numbers["kv_bytes_peak"] < 4 * numbers["kv_bytes"]


# ---- texts from strangers ------------------------------------------------------------------------

HOSTILE_TEMPLATES = [
    "{% for i in range(90000) %}x{% endfor %}",
    "{% for i in range(900) %}{% for j in range(900) %}x{% endfor %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    '{% set ns = namespace(s="x") %}{% for i in range(1000) %}{% set ns.s = ns.s + ns.s %}{% endfor %}',
    "{% set ns = namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l = ns.l + ns.l %}{% endfor %}",
    "{% set ns = namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l | tojson }}",
    '{{ ("x" * 1000000) * 1000000 }}',
    '{{ ("a" * 1000000) | replace("a", "b" * 1000000) }}',
    '{{ ("a" * 1000000).split("a") | length }}',
    '{{ "a" | indent(1000000000) }}',
    "{{ [1] | tojson(indent=1000000000) }}",
    "{% set ns = namespace() %}{% set ns.a = [ns] %}{{ ns | tojson }}",
    "{% set l = [] %}{{ l.append(l) }}{{ l }}",
]


def limit_time_and_memory():
    resource.setrlimit(resource.RLIMIT_CPU, (4, 4))  # of the processor's time: SIGXCPU, then SIGKILL
    if not SANITIZED:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@pytest.mark.parametrize("template", HOSTILE_TEMPLATES)
def test_templates_without_end(model, template):
    result = subprocess.run([MAIN, "-m", model, "-t", "1", "-cnv", "-p", "hi", "-n", "1", "--chat-template", template],
                            stdin=subprocess.DEVNULL, capture_output=True, timeout=120, preexec_fn=limit_time_and_memory)
    assert_fails(result, 2, "chat template failed")


def test_a_long_conversation_is_no_endless_template(model):
    lines = b"\n".join([b"hi"] * 60) + b"\n"
    template = "{% for m in messages %}{% if m.role == 'user' %}u {{ m.content }}{% else %}a {{ m.content }}{% endif %}{% endfor %}"
    result = run("-m", model, "-t", "1", "-cnv", "-n", "1", "--temp", "0", "--chat-template", template, stdin=lines)
    assert result.returncode == 0 and result.stdout.count(b"\n") >= 60, result.stderr


def test_grammars_say_what_is_wrong_once(model):
    for grammar, fragment in (("root ::= (", "expecting"), ("root ::= nothing", "nothing"), ("x", "expecting ::="),
                              ('other ::= "x"', "root")):
        result = run("-m", model, "-p", "x", "--grammar", grammar)
        assert_fails(result, 2, "the grammar can't be used", fragment)
        told = [line for line in result.stderr.splitlines() if not line.startswith((b"TLC: off", b"KV memory:"))]
        assert len(told) == 1, result.stderr


# ---- locales -------------------------------------------------------------------------------------


def has_german():
    listed = subprocess.run(["locale", "-a"], capture_output=True).stdout.decode().split()
    return any(name.lower() in ("de_de.utf8", "de_de.utf-8") for name in listed)


def test_a_locale_with_commas(model, tmp_path):
    """Row 23."""
    if not has_german():
        pytest.skip("the locale de_DE.UTF-8 is not installed")
    options = ("-p", "abc", "-n", "20", "--temp", "0.7", "--top-p", "0.9", "--seed", "5")
    results = [stats_of(model, tmp_path, *options, env={"LC_ALL": name}) for name in ("C", "de_DE.UTF-8")]
    assert results[0][0].stdout == results[1][0].stdout
    assert results[0][1]["generated_token_ids"] == results[1][1]["generated_token_ids"]
    assert not re.search(rb"\d,\d", results[1][0].stderr), results[1][0].stderr
    assert isinstance(results[1][1]["prefill_ms"], float)


# ---- model files ---------------------------------------------------------------------------------


def test_split_models(tmp_path):
    """Row 28: parts missing, joined, renamed, of another split, or the wrong one given."""
    whole = make_model(tmp_path / "whole.gguf")
    make_model(tmp_path / "m.gguf", "--parts", 3)
    parts = [tmp_path / f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    options = ("-t", "1", "-p", "abc", "-n", "8", "--temp", "0")
    assert run("-m", str(parts[0]), *options).stdout == run("-m", whole, *options).stdout != b""
    assert_fails(run("-m", str(parts[1]), *options), 1, "part 2 of 3", "open the first part", parts[0].name)
    joined = tmp_path / "joined.gguf"
    joined.write_bytes(b"".join(part.read_bytes() for part in parts))
    assert_fails(run("-m", str(joined), *options), 1, "joined.gguf")
    renamed = tmp_path / "renamed.gguf"
    renamed.write_bytes(parts[0].read_bytes())
    assert_fails(run("-m", str(renamed), *options), 1, "first of 3 parts", "name the parts as they were")
    third = parts[2].read_bytes()
    parts[2].write_bytes(parts[1].read_bytes())
    assert_fails(run("-m", str(parts[0]), *options), 1, parts[2].name, "part 2 of 3")
    make_model(tmp_path / "other.gguf", "--parts", 3, "--layers", 3)
    parts[2].write_bytes((tmp_path / "other-00003-of-00003.gguf").read_bytes())
    assert_fails(run("-m", str(parts[0]), *options), 1, "another split")
    parts[2].unlink()
    assert_fails(run("-m", str(parts[0]), *options), 1, "part 3 of 3", "missing", parts[2].name)
    parts[2].write_bytes(third)
    assert run("-m", str(parts[0]), *options).returncode == 0


# ---- signals and files ---------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_request_to_end_acts_as_ctrl_c(model, tmp_path, number):
    stats = tmp_path / "stats.json"
    endless = budget(tmp_path, max_cache_size=96, sink_tokens=0, recent_window=32) + ["--prefill", "streaming", "-b", "32"]
    process = subprocess.Popen([MAIN, "-m", model, "-t", "1", "-p", "abc", "-n", "-1", "--ignore-eos", "--stats-json", str(stats),
                                *endless], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))
    assert process.stdout.read(50)
    process.send_signal(number)
    _, log = process.communicate(timeout=60)
    assert process.returncode == 0 and b"interrupted\n" in log and b"decode " in log
    assert json.loads(stats.read_bytes())["generated_tokens"] > 0


def test_nohup_is_heeded(model, tmp_path):
    endless = budget(tmp_path, max_cache_size=96, sink_tokens=0, recent_window=32) + ["--prefill", "streaming", "-b", "32"]
    process = subprocess.Popen([MAIN, "-m", model, "-t", "1", "-p", "abc", "-n", "-1", "--ignore-eos", *endless],
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    assert process.stdout.read(50)
    process.send_signal(signal.SIGHUP)
    assert len(process.stdout.read(200000)) == 200000  # more than a pipe holds: it goes on
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_killed_runs_leave_nothing_behind(model, tmp_path):
    stats = tmp_path / "stats.json"
    stats.write_text("old")
    process = subprocess.Popen([MAIN, "-m", model, "-t", "1", "-p", "abc", "-n", "-1", "--ignore-eos", "--stats-json", str(stats)],
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout.read(50)
    process.kill()
    process.communicate(timeout=60)
    assert os.listdir(tmp_path) == ["stats.json"] and stats.read_text() == "old"


def test_stats_through_a_link(model, tmp_path):
    """As a shell's > does: the file that the link names is written, also when it isn't there yet; the link stays."""
    folder = tmp_path / "results"
    folder.mkdir()
    (tmp_path / "second").symlink_to("results/stats.json")
    link = tmp_path / "link"
    link.symlink_to("second")
    for mode in (0o600, 0o640):
        assert run("-m", model, "-p", "abc", "-n", "1", "--stats-json", str(link)).returncode == 0
        assert mode == 0o600 or os.stat(link).st_mode & 0o777 == 0o600  # the second one is as readable as the first was made
        os.chmod(link, mode)
        assert link.is_symlink() and json.loads((folder / "stats.json").read_bytes())["generated_tokens"] <= 1
        assert sorted(os.listdir(tmp_path)) == ["link", "results", "second"] and os.listdir(folder) == ["stats.json"]
    (tmp_path / "nowhere").symlink_to(tmp_path / "no such folder" / "stats.json")
    assert_fails(run("-m", model, "-p", "abc", "--stats-json", str(tmp_path / "nowhere")), 2, "can't be written")
    (tmp_path / "loop").symlink_to("loop")
    assert_fails(run("-m", model, "-p", "abc", "--stats-json", str(tmp_path / "loop")), 2, "can't be written")


def limit_memory():
    if not SANITIZED:
        resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="needs /dev/zero")
def test_input_without_end(model):
    """Refused in a sentence before it has taken all memory."""
    command = [MAIN, "-m", model, "-t", "1", "-n", "1"]
    result = subprocess.run([*command, "-f", "/dev/zero"], stdin=subprocess.DEVNULL, capture_output=True, timeout=120,
                            preexec_fn=limit_memory)
    assert_fails(result, 2, "/dev/zero", "1 GiB")
    with open("/dev/zero", "rb") as zeros:
        result = subprocess.run([*command, "-cnv", "--chat-template", "chatml"], stdin=zeros, capture_output=True, timeout=120,
                                preexec_fn=limit_memory)
    assert result.returncode == 1 and b"error: a message" in result.stderr and b"MiB" in result.stderr


def test_empty_file_names(model):
    for flag in ("-f", "--grammar-file", "--stats-json", "--eviction-config"):
        words = ["-p", "x"] if flag != "-f" else []
        words += ["--cache-eviction"] if flag == "--eviction-config" else []
        assert_fails(run("-m", model, "-n", "1", *words, flag, ""), 2, flag)


def test_chat_whose_reader_leaves(model):
    """Row 20."""
    process = subprocess.Popen([MAIN, "-m", model, "-t", "1", "-cnv", "--chat-template", "chatml", "-n", "40", "--ignore-eos"],
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdin.write(b"hi\n" * 50)
    process.stdin.close()
    assert process.stdout.read(10)
    process.stdout.close()
    log = process.stderr.read()
    assert process.wait(60) == 0 and b"decode " in log and b"error" not in log
