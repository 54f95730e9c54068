"""./deeptutor-eval: its numbers on a tiny model, and on the real one that importance_score is worth more than a window.

DT_EVAL, DT_MAIN and DT_MAKE_MODEL name the programs; DT_TEST_MODEL the real model, without which its tests are skipped.
"""
import json
import math
import os
import pathlib
import pty
import re
import statistics
import subprocess

import pytest

EVAL, MAIN, MAKE_MODEL = (os.environ.get(name, "") for name in ("DT_EVAL", "DT_MAIN", "DT_MAKE_MODEL"))
REAL = os.environ.get("DT_TEST_MODEL", "")
TEXT = os.path.join(os.path.dirname(__file__), "..", "examples", "genesis.txt")

pytestmark = pytest.mark.skipif(not all(os.access(program, os.X_OK) for program in (EVAL, MAIN, MAKE_MODEL)),
                                reason="DT_EVAL, DT_MAIN or DT_MAKE_MODEL names no program")
needs_real = pytest.mark.skipif(not os.path.isfile(REAL), reason="DT_TEST_MODEL is not there")


def make(path, *more):
    """A model of random weights: two small layers where nothing else is said."""
    subprocess.run([MAKE_MODEL, str(path), "--layers", "2", "--embd", "64", "--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--ff",
                    "128", "--vocab", "320", "--ctx", "2048", *more], check=True, timeout=60)
    return str(path)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make(tmp_path_factory.mktemp("eval") / "tiny.gguf")


def run(*args, timeout=1200):
    return subprocess.run([EVAL, *args, "-t", "1"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout)


def measure(tmp_path, *args):
    out = tmp_path / "out.json"
    result = run(*args, "--json", str(out))
    assert result.returncode == 0, result.stderr
    numbers = json.loads(out.read_text())

    def check(value):
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else []:
            assert not isinstance(item, float) or math.isfinite(item), value
            check(item)
    check(numbers)
    return numbers


def assert_lines_up(table):
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert len(rows) > 2 and len({tuple(i for i, c in enumerate(row) if c == "|") for row in rows}) == 1, table


@pytest.mark.parametrize("evict", ["once", "always"])
def test_nothing_lost_is_no_divergence(tiny, tmp_path, evict):
    full = measure(tmp_path, "kld", "-m", tiny, "-f", TEXT, "--context", "256", "--continuation", "32", "--chunks", "2",
                   "--policy", "local_window", "--max-cache-size", "2000", "--evict", evict)
    assert full["kld"] == 0 and full["top1"] == 1 and full["kept_share"] == 1
    assert abs(full["nll"] - full["nll_full"]) <= 1e-3 and len(full["chunks"]) == 2


@pytest.mark.parametrize("command", [("kld", "--chunks", "1", "--continuation", "8"), ("needle", "--samples", "1"),
                                     ("long", "--times", "3", "--chunks", "1", "--continuation", "32")], ids=lambda c: c[0])
def test_nothing_evicted_is_told(tiny, tmp_path, command):
    """Equal sides prove nothing then; of one piece no error is known."""
    for size, told in (("100", False), *([("600", True)] if command[0] != "long" else [])):  # long refuses what can't evict
        out = tmp_path / "out.json"
        result = run(*command, "-m", tiny, "-f", TEXT, "--context", "256", "--policy", "local_window", "--max-cache-size", size,
                     "--json", str(out))
        numbers = json.loads(out.read_text())
        assert ("warning: nothing was evicted" in result.stderr) == told == (numbers["evicted_tokens"] == 0), result.stderr
        assert re.search(f"TLC: layers 0-1 .*max {size}", result.stderr) and "KV memory" not in result.stderr
        assert numbers["eviction_rounds"] > 0 or told
        assert command[0] != "kld" or (numbers["kld_error"] is None and re.search(r"\|      - \|", result.stdout)), result.stdout


def test_which_setting_evicted_nothing_is_told(tiny, tmp_path):
    out = tmp_path / "out.json"
    result = run("kld", "--chunks", "1", "--continuation", "8", "-m", tiny, "-f", TEXT, "--context", "256", "--policy", "local_window",
                 "--kept", "0.5,1", "--evict", "once", "--json", str(out))
    rows = json.loads(out.read_text())["settings"]
    assert rows[0]["evicted_tokens"] > 0 == rows[1]["eviction_rounds"] == rows[1]["evicted_tokens"]
    assert result.stderr.count("nothing was evicted") == 1 and "nothing was evicted under --kept 1: " in result.stderr, result.stderr


def test_a_name_that_is_not_utf8(tiny, tmp_path):
    path = os.fsencode(tmp_path) + b"/t\xe9.gguf"
    os.symlink(tiny, path)
    numbers = measure(tmp_path, "kld", "-m", path, "-f", TEXT, "--context", "64", "--continuation", "4", "--chunks", "1",
                      "--policy", "local_window", "--max-cache-size", "48")
    assert numbers["model"].endswith("/t\ufffd.gguf")


@pytest.mark.parametrize("extra", [[], ["--score", "reconstruct"], ["--score", "reconstruct", "--budget", "adaptive"],
                                   ["--prefill", "streaming"], ["--evict", "once", "--kv-type", "int8"]])
def test_shares(tiny, tmp_path, extra):
    rows = measure(tmp_path, "kld", "-m", tiny, "-f", TEXT, "--context", "512", "--continuation", "16", "--chunks", "2",
                   "--policy", "importance_score", "--kept", "0.5,0.125", *extra)["settings"]
    assert [row["budget_share"] for row in rows] == [0.5, 0.125]
    for row in rows:
        assert 0 < row["kept_share"] <= row["budget_share"] * 1.01 and row["kept_share"] > row["budget_share"] * 0.7, row
        assert row["kld"] > 0 and row["nll"] > 0 and 0 <= row["top1"] <= 1
    again = measure(tmp_path, "kld", "-m", tiny, "-f", TEXT, "--context", "512", "--continuation", "16", "--chunks", "2",
                    "--policy", "importance_score", "--kept", "0.5,0.125", *extra)["settings"]
    assert again == rows  # nothing is left to chance


def test_settings_share_one_reading(tiny, tmp_path):
    """What a file of settings measures is what each of them measures by itself."""
    alone = {name: measure(tmp_path, "kld", "-m", tiny, "-f", TEXT, "--context", "256", "--continuation", "16", "--chunks", "1",
                           "--kept", "0.25", *flags) for name, flags in {
        "window": ["--policy", "local_window"], "fast": ["--policy", "importance_score", "--evict", "once"],
        "shared": ["--policy", "importance_score", "--score", "reconstruct", "--budget", "adaptive", "--evict", "once"]}.items()}
    rows = [{"name": "window", "evict": "always", "config": {"0-": {"policy": "local_window", "max_cache_size": 64}}},
            {"name": "fast", "evict": "once", "config": {"0-": {"policy": "importance_score", "max_cache_size": 64}}},
            {"name": "shared", "evict": "once", "config": {"budget": "adaptive", "total_cache_size": 128, "layers": {
                "0-": {"policy": "importance_score", "score": "reconstruct"}}}},
            {"name": "preset", "evict": "always", "preset": "chat", "max_cache_size": 64}]
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps(rows))
    common = ["-m", tiny, "-f", TEXT, "--context", "256", "--settings", str(settings)]
    found = measure(tmp_path, "kld", *common, "--continuation", "16", "--chunks", "1")["settings"]
    assert [row["name"] for row in found] == ["window", "fast", "shared", "preset"]
    for row in found[:3]:
        assert abs(row["kld"] - alone[row["name"]]["kld"]) <= 1e-6 and row["kept_share"] == alone[row["name"]]["kept_share"], row
    for question in ("after", "aware"):
        asked = measure(tmp_path, "needle", *common, "--samples", "1", "--needles", "2", "--question", question)["settings"]
        assert [row["name"] for row in asked] == [row["name"] for row in found] and len(asked[3]["samples"]) == 2
    for broken, what in (({**rows[0], "evict": "never"}, "evict"), ({**rows[0], "preset": "chat"}, "preset"),
                         ({**rows[0], "config": 5}, "config"), ({**rows[3], "preset": 5}, "preset"),
                         ({**rows[3], "max_cache_sise": 5}, "max_cache_sise"), ({**rows[3], "max_cache_size": "256"}, "size"),
                         ({**rows[3], "max_cache_size": 4294967328}, "size"), ({**rows[3], "memory_slots": -1}, "size"),
                         ({**rows[0], "config": {"0-": {}}}, "window")):
        settings.write_text(json.dumps([broken]))
        result = run("kld", *common)
        assert result.returncode == 2 and what in result.stderr and broken["name"] in result.stderr, result
    settings.write_text("[]")
    assert "list" in run("kld", *common).stderr
    settings.write_text(json.dumps(rows))
    mixed = run("kld", *common, "--eviction-preset", "chat")
    assert mixed.returncode == 2 and "--settings" in mixed.stderr


def test_sizes_beside_a_config(tiny, tmp_path):
    """They override what the config says, as flags do, whether it is a file or stands there."""
    config, settings = tmp_path / "e.json", tmp_path / "settings.json"
    text = {"0-": {"policy": "local_window", "max_cache_size": 200}}
    config.write_text(json.dumps(text))
    settings.write_text(json.dumps([
        {"name": "file", "evict": "once", "config": str(config), "max_cache_size": 64, "memory_slots": 8},
        {"name": "object", "evict": "once", "config": text, "max_cache_size": 64, "memory_slots": 8},
        {"name": "inside", "evict": "once", "config": {"0-": {**text["0-"], "max_cache_size": 64, "memory_slots": 8}}}]))
    rows = measure(tmp_path, "kld", "-m", tiny, "-f", TEXT, "--context", "256", "--continuation", "16", "--chunks", "1",
                   "--settings", str(settings))["settings"]
    assert rows[0]["kept_share"] == pytest.approx(72 / 256)
    assert [{**row, "name": ""} for row in rows] == [{**rows[0], "name": ""}] * 3 and rows[0]["evict"] == "once"
    flags = measure(tmp_path, "kld", "-m", tiny, "-f", TEXT, "--context", "256", "--continuation", "16", "--chunks", "1", "--evict",
                    "once", "--policy", "local_window", "--max-cache-size", "64", "--memory-slots", "8")
    assert (flags["kld"], flags["kept_share"]) == (rows[0]["kld"], rows[0]["kept_share"])


def test_settings_without_a_repetition(tiny, tmp_path):
    """Where no score asks for a repetition none is made, which changes no number."""
    config = tmp_path / "learned.json"
    assert run("calibrate", "-m", tiny, "-f", TEXT, "--context", "512", "--chunks", "1", "-o", str(config)).returncode == 0
    rows = [{"name": "window", "evict": "once", "config": {"0-": {"policy": "local_window", "max_cache_size": 64}}},
            {"name": "fast", "evict": "once", "config": {"0-": {"policy": "importance_score", "max_cache_size": 64}}},
            {"name": "predict", "evict": "once", "config": str(config), "max_cache_size": 64},
            {"name": "reconstruct", "evict": "once", "config": {"0-": {"policy": "importance_score", "score": "reconstruct",
                                                                       "max_cache_size": 64}}}]
    learned = json.loads(config.read_text())
    for layer in learned["layers"].values():
        layer["score"] = "fast"  # weights that its score does not use
    rows[1]["config"] = {**learned, "total_cache_size": 128}
    found, settings = [], tmp_path / "settings.json"
    for n in (2, 3, 4):
        settings.write_text(json.dumps(rows[:n]))
        found.append(measure(tmp_path, "kld", "-m", tiny, "-f", TEXT, "--context", "256", "--continuation", "16", "--chunks", "1",
                             "--settings", str(settings))["settings"])
    for shorter, longer in zip(found, found[1:]):
        assert [row["kld"] for row in longer[:len(shorter)]] == pytest.approx([row["kld"] for row in shorter], rel=1e-6)
        assert [row["kept_share"] for row in longer[:len(shorter)]] == [row["kept_share"] for row in shorter]


def test_quotations(tiny, tmp_path):
    """What follows is the passage itself: the same as a text that goes on with it; settings with and without share one reading."""
    common = ["kld", "-m", tiny, "--context", "256", "--continuation", "16", "--chunks", "1", "--policy", "local_window", "--kept", "0.25"]
    quoted = measure(tmp_path, *common, "-f", TEXT, "--quote", "0.2")
    plain = measure(tmp_path, *common, "-f", TEXT)
    assert quoted["kld"] > 0 and quoted["nll_full"] != plain["nll_full"] and quoted["kept_share"] == plain["kept_share"]
    config = {"0-": {"policy": "local_window", "max_cache_size": 64}}
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps([{"name": "plain", "evict": "always", "config": config},
                                    {"name": "quoted", "evict": "always", "quote": 0.2, "config": config}]))
    rows = measure(tmp_path, *common[:-4], "-f", TEXT, "--settings", str(settings))["settings"]
    assert [row["kld"] for row in rows] == [plain["kld"], quoted["kld"]]
    assert [row["nll_full"] for row in rows] == [plain["nll_full"], quoted["nll_full"]]
    settings.write_text(json.dumps([{"name": "quoted", "evict": "always", "quote": 2, "config": config}]))
    wrong = run(*common[:-4], "-f", TEXT, "--settings", str(settings))
    assert wrong.returncode == 2 and "depth from 0 to 1" in wrong.stderr
    long = run(*common[:3], "-f", TEXT, "--context", "32", "--continuation", "32", "--chunks", "1", *common[-4:], "--quote", "0.5")
    assert long.returncode == 2 and "longer --context" in long.stderr, long.stderr


@pytest.mark.parametrize("question", ["after", "aware"])
def test_needles(tiny, tmp_path, question):
    numbers = measure(tmp_path, "needle", "-m", tiny, "-f", TEXT, "--context", "300", "--samples", "2", "--needles", "2",
                      "--question", question, "--policy", "local_window", "--kept", "0.5")
    assert len(numbers["samples"]) == 4 and 0 <= numbers["accuracy"] <= 1 and 0.3 < numbers["kept_share"] <= 0.51
    assert len({(s["sample"], s["city"]) for s in numbers["samples"]}) == 4


def test_what_was_learned_is_a_config(tiny, tmp_path):
    config = tmp_path / "tiny.tlc.json"
    result = run("calibrate", "-m", tiny, "-f", TEXT, "--context", "512", "--chunks", "2", "--kept", "0.4", "-o", str(config))
    assert result.returncode == 0, result.stderr
    learned = json.loads(config.read_text())
    assert learned["total_cache_size"] == 2 * 204 and sorted(learned["layers"]) == ["0", "1"]
    for layer in learned["layers"].values():
        assert layer["score"] == "predict" and [len(lane) for lane in layer["weights"]] == [2 + 8 + 16] * 2
        assert all(math.isfinite(weight) for lane in layer["weights"] for weight in lane)
    stats = tmp_path / "stats.json"
    for size in ([], ["--max-cache-size", "100"]):
        result = subprocess.run([MAIN, "-m", tiny, "-p", "word " * 300, "-n", "4", "-t", "1", "--cache-eviction", *size,
                                 "--eviction-config", str(config), "--stats-json", str(stats)], stdin=subprocess.DEVNULL,
                                capture_output=True, timeout=120)
        assert result.returncode == 0, result.stderr
        assert b"score predict" in result.stderr
        numbers = json.loads(stats.read_text())
        lengths = [layer["mean_length"] for layer in numbers["layers"]]
        assert numbers["prompt_tokens"] > 250 and sum(lengths) <= 2 * (int(size[1]) if size else 204)


@pytest.mark.parametrize("where", [[], ["--kernel", "ggml"], ["--device", "ggml-cpu"]])
def test_presets_go_by_what_was_learned(tiny, tmp_path, where):
    """calibrate needs no more than the model; a preset then finds the file beside it. Also with layers on a device."""
    model = tmp_path / "model.gguf"
    model.write_bytes(open(tiny, "rb").read())
    result = run("calibrate", "-m", str(model), "--context", "512", "--chunks", "1", *where)
    assert_lines_up(result.stdout)
    assert result.returncode == 0 and (tmp_path / "model.tlc.json").is_file(), result.stderr
    result = subprocess.run([MAIN, "-m", str(model), "-p", "word " * 300, "-n", "4", "-t", "1", "--cache-eviction",
                             "--max-cache-size", "64", *where], stdin=subprocess.DEVNULL, capture_output=True, timeout=120)
    assert result.returncode == 0 and b"score predict" in result.stderr and b"model.tlc.json" in result.stderr, result.stderr


@pytest.mark.parametrize("args, what", [
    (["kld"], "no model"), (["kld", "-m", "M"], "no text"), (["kld", "-m", "M", "-f", TEXT, "--policy", "local_window"], "budget"),
    (["kld", "-m", "M", "-f", TEXT, "--kept", "2", "--policy", "local_window"], "shares"),
    (["kld", "-m", "M", "-f", TEXT, "--policy", "fast", "--kept", "0.5"],
     "error: --policy must be one of local_window|importance_score|none, not 'fast'"),
    (["kld", "-m", "M", "-f", TEXT, "--chunks", "4000", "--context", "1000"], "fewer"), (["needle", "-m", "M", "-f", TEXT, "--depth-low", "0.9",
                                                                    "--depth-high", "0.1"], "above"),
    (["kld", "-m", "M", "-f", TEXT, "--kept", ""], "shares"), (["kld", "-m", "M", "-f", TEXT, "--kept", "0.0001"], "less than one token"),
    (["kld", "-m", "M", "-f", TEXT, "--score", "reconstruct", "--kept", "0.5"], "--policy"),
    (["kld", "-m", "M", "-f", TEXT, "--budget", "adaptive"], "--policy"), (["kld", "-m", "M", "-f", TEXT, "--json", "-"], "stdout"),
    (["calibrate", "-m", "M", "--eviction-preset", "chat"], "no flag --eviction-preset"), (["calibrate", "-m", "M", "--policy", "x"], "--policy"),
    (["calibrate", "-m", "M", "--kept", "0.5,0.25"], "a single share"), (["calibrate", "-m", "M", "--memory-slots", "4"], "no flag --memory-slots"),
    (["kld", "-m", "M", "-f", TEXT, "--kept", "0.5", "--max-cache-size", "20"], "one of them"),
    (["needle", "-m", "M", "-f", TEXT, "--chat-template", "chatml"], "--form chat"),
    (["kld", "-m", "M", "-f", TEXT, "--settings", "x", "--evict", "once"], "--evict"), (["long", "-m", "M", "-f", TEXT, "-c", "512"], "-c"),
    (["ab", "-m", "M", "-i", TEXT, "-n", "0", "--max-cache-size", "32"], "at least 1"),
    (["kld", "-m", "M", "-f", TEXT, "--kept", "0.5", "--kv-memory", "1M"], "--kv-memory"),
    (["kld", "-m", "M", "-f", TEXT, "--kept", "0.5", "--policy", "none"], "leave --kept out"),
    (["kld", "-m", "M", "-f", TEXT, "--context", "2030", "--continuation", "30", "--policy", "local_window", "--max-cache-size", "40"],
     "smaller --context or --continuation"),
    (["ab", "-m", "M", "-i", TEXT, "--settings", "x"], "--settings")])
def test_mistakes(tiny, args, what):
    result = run(*[tiny if a == "M" else a for a in args])
    assert result.returncode == 2 and what in result.stderr and result.stdout == "", result
    assert len(result.stderr.strip().splitlines()) <= 3


@needs_real
def test_scores_beat_a_window(tmp_path):
    """cases.md row 3: at no budget worse than local_window of equal size, and worse smoothly as the budget shrinks."""
    budgets, context = [32, 48, 64, 128, 512, 600], 2400
    shares = ",".join(f"{(n + 0.5) / context:.6f}" for n in budgets)
    kld = {}
    for policy in ("local_window", "importance_score"):
        rows = measure(tmp_path, "kld", "-m", REAL, "-f", TEXT, "--context", str(context), "--continuation", "128", "--chunks", "2",
                       "--policy", policy, "--kept", shares)["settings"]
        kld[policy] = [row["kld"] for row in rows]
    for n, window, score in zip(budgets, kld["local_window"], kld["importance_score"]):
        assert score <= window * 1.05, (n, kld)
    assert sum(kld["importance_score"]) < 0.95 * sum(kld["local_window"]), kld
    for smaller, larger in zip(kld["importance_score"], kld["importance_score"][1:]):
        assert larger <= smaller * 1.05, kld


@needs_real
def test_what_was_learned_finds_what_is_quoted(tmp_path):
    """A shared budget by score predict keeps what is far back as well as what is near; a window and equal budgets do not."""
    learned = tmp_path / "learned.json"
    result = run("calibrate", "-m", REAL, "--context", "1024", "--chunks", "1", "-o", str(learned), timeout=600)
    assert result.returncode == 0, result.stderr
    size, context = 192, 768
    equal = {"policy": "importance_score", "max_cache_size": size}
    ways = {"window": {"config": {"0-": {"policy": "local_window", "max_cache_size": size}}}, "fast": {"config": {"0-": equal}},
            "predict": {"config": str(learned), "max_cache_size": size}}
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps([{"name": way + what, "evict": "once", **more, **setting} for way, setting in ways.items()
                                    for what, more in (("", {}), (" quoted", {"quote": 0.2}))]))
    rows = measure(tmp_path, "kld", "-m", REAL, "-f", TEXT, "--context", str(context), "--continuation", "48", "--chunks", "1",
                   "--settings", str(settings))["settings"]
    kld = {row["name"]: row["kld"] for row in rows}
    for row in rows:
        assert row["kept_share"] <= (size + 0.5) / context, row
    for other in ("window", "fast"):
        assert kld["predict"] < 0.8 * kld[other] and kld["predict quoted"] < 0.3 * kld[other + " quoted"], kld


@needs_real
def test_no_loops(tmp_path):
    """Distinct tokens of 64, the median of five texts for each budget: now and then a model this small repeats itself with all its
    cache too. About half are distinct with eviction and without; a window without sinks comes to 0.15 at the smaller budgets."""
    stats, config, text = (tmp_path / name for name in ("stats.json", "config.json", "text.txt"))
    for budget in (48, 64, 128, 512):
        config.write_text(json.dumps({"0-": {"policy": "importance_score", "max_cache_size": budget}}))
        shares = []
        for n in (6000, 7000, 8000, 9000, 10000):
            text.write_text(pathlib.Path(TEXT).read_text()[:n])
            result = subprocess.run([MAIN, "-m", REAL, "-f", str(text), "-n", "64", "--temp", "0", "-t", "1", "--cache-eviction",
                                     "--prefill", "streaming", "--eviction-config", str(config), "--stats-json", str(stats)],
                                    stdin=subprocess.DEVNULL, capture_output=True, timeout=300)
            assert result.returncode == 0, result.stderr
            tokens = json.loads(stats.read_text())["generated_token_ids"]
            shares.append(len(set(tokens)) / len(tokens))
        assert statistics.median(shares) >= 0.3, (budget, shares)


@needs_real
def test_reconstruction_finds_what_a_window_lost(tmp_path):
    """Needles in the first 40 % of a text of which a quarter is kept, asked for afterwards."""
    common = ["needle", "-m", REAL, "-f", TEXT, "--context", "1200", "--samples", "4", "--depth-high", "0.4", "--evict", "once",
              "--kept", "0.25"]
    window = measure(tmp_path, *common, "--policy", "local_window")
    scored = measure(tmp_path, *common, "--policy", "importance_score", "--score", "reconstruct", "--budget", "adaptive")
    assert scored["accuracy_full"] == 1 and window["accuracy"] == 0
    assert scored["kept_share"] <= 0.2501 and scored["accuracy"] >= 0.75, scored


def test_long_past_the_context(tiny, tmp_path):
    """Both sessions have read the same last tokens, and a window without sinks keeps nothing else."""
    config = tmp_path / "e.json"
    config.write_text('{"0-": {"policy": "local_window", "max_cache_size": 48, "recent_window": 16, "sink_tokens": 0}}')
    found = measure(tmp_path, "long", "-m", tiny, "-f", TEXT, "--context", "128", "--times", "6", "--continuation", "16",
                    "--chunks", "2", "-b", "32", "--eviction-config", str(config))
    assert [piece["tokens"] for piece in found["pieces"]] == [448, 768]
    assert 0 < found["nll"] < 20 and abs(found["nll"] - found["nll_fresh"]) <= 0.03 * found["nll"]
    table = run("long", "-m", tiny, "-f", TEXT, "--context", "128", "--times", "4", "--continuation", "16", "--chunks", "2",
                "--eviction-config", str(config))
    assert table.returncode == 0, table.stderr
    assert_lines_up(table.stdout)
    failed = run("long", "-m", tiny, "-f", TEXT, "--context", "128", "--times", "60000", "--policy", "local_window",
                 "--max-cache-size", "48")
    assert failed.returncode == 2 and "give fewer --times" in failed.stderr
    few = run("long", "-m", tiny, "-f", TEXT, "--context", "128", "--times", "2", "--chunks", "9", "--policy", "local_window",
              "--max-cache-size", "48")
    assert few.returncode == 2 and "more --times" in few.stderr and "fewer --times" not in few.stderr
    large = run("long", "-m", tiny, "-f", TEXT, "--context", "128", "--times", "4", "--continuation", "16", "--chunks", "2", "--policy",
                "local_window", "--kept", "0.25,1")
    assert large.returncode == 2 and "well below" in large.stderr and large.stdout == ""


@pytest.mark.parametrize("command", [
    ["kld", "--context", "1024", "--continuation", "64", "--chunks", "5", "--kept", "0.5"],
    ["needle", "--context", "1024", "--samples", "10", "--kept", "0.5"],
    ["calibrate", "--context", "1024", "--chunks", "5", "-o", "c.json"],
    ["long", "--context", "512", "--times", "10", "--chunks", "4", "--policy", "local_window", "--kept", "0.25"]])
def test_on_a_terminal(tmp_path, command):
    """How far it is, on one line; piped, as in every other test, there is none. It comes after half a second and ten times a second
    at most, so on a machine that is through by then a larger model is taken."""
    for layers in ("4", "16", "64"):
        slow = make(tmp_path / "slow.gguf", "--layers", layers, "--embd", "512", "--heads", "8", "--head-dim", "64", "--ff", "1024")
        ours, theirs = pty.openpty()
        program = subprocess.Popen([EVAL, *command, "-m", slow, "-f", TEXT, "-t", "1"], stdin=subprocess.DEVNULL, cwd=tmp_path,
                                   stdout=subprocess.PIPE, stderr=theirs)
        os.close(theirs)
        told = b""
        while True:
            try:
                piece = os.read(ours, 4096)
            except OSError:  # so it ends on Linux
                piece = b""
            if not piece:
                break
            told += piece
        os.close(ours)
        assert b"|" in program.communicate(timeout=300)[0] and program.returncode == 0, told
        shown = [int(n) for n in re.findall(rb"measuring +(\d+) %", told)]
        assert shown == sorted(shown) and all(0 <= n <= 100 for n in shown), told
        if len(set(shown)) > 1:
            break
    assert len(set(shown)) > 1, told


def test_only_layers_that_share_count(tmp_path):
    """Those with a sliding window keep that, so a share of the context is a share of what the others keep."""
    model, settings = make(tmp_path / "g.gguf", "--arch", "gemma3", "--window", "64", "--layers", "6"), tmp_path / "c.json"
    rows = measure(tmp_path, "kld", "-m", model, "-f", TEXT, "--context", "512", "--continuation", "16", "--chunks", "1", "--policy",
                   "importance_score", "--score", "reconstruct", "--budget", "adaptive", "--kept", "0.5,0.25", "--evict", "once")
    assert 0 < rows["settings"][0]["kld"] < rows["settings"][1]["kld"]
    result = run("calibrate", "-m", model, "-f", TEXT, "--context", "256", "--chunks", "1", "-o", str(settings))
    assert result.returncode == 0, result.stderr
    learned = json.loads(settings.read_text())
    assert learned["total_cache_size"] == 64 * len(learned["layers"]) and len(learned["layers"]) == 1
    learned["total_cache_size"] = 32  # for one layer, of six
    settings.write_text(json.dumps(learned))
    small = measure(tmp_path, "kld", "-m", model, "-f", TEXT, "--context", "256", "--continuation", "16", "--chunks", "1",
                    "--eviction-config", str(settings))
    assert small["kept_share"] < 1 and small["kld"] > 0
    all_windows = make(tmp_path / "w.gguf", "--arch", "gemma3", "--window", "64", "--layers", "4")
    nothing = run("calibrate", "-m", all_windows, "-f", TEXT, "--context", "256", "--chunks", "1", "-o", str(settings))
    assert nothing.returncode != 0 and "sliding window" in nothing.stderr


def test_nothing_is_overwritten(tiny, tmp_path):
    """What a run goes by is not where its numbers go, named or not."""
    model, learned, settings = tmp_path / "m.gguf", tmp_path / "m.tlc.json", tmp_path / "s.json"
    model.write_bytes(open(tiny, "rb").read())
    assert run("calibrate", "-m", str(model), "-f", TEXT, "--context", "256", "--chunks", "1").returncode == 0
    before = learned.read_bytes()
    common = ["kld", "-m", str(model), "-f", TEXT, "--context", "128", "--continuation", "8", "--chunks", "1"]
    settings.write_text(json.dumps([{"name": "a", "evict": "once", "config": str(learned), "max_cache_size": 64}]))
    for extra in (["--kept", "0.5"], ["--settings", str(settings)]):
        refused = run(*common, *extra, "--json", str(learned))
        assert refused.returncode == 2 and "also read" in refused.stderr, refused
    refused = subprocess.run([MAIN, "-m", str(model), "-p", "hi", "-n", "4", "--cache-eviction", "--stats-json", str(learned)],
                             stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2 and "also read" in refused.stderr and learned.read_bytes() == before
    parts = [tmp_path / f"s-0000{i}-of-00002.gguf" for i in (1, 2)]
    make(tmp_path / "s.gguf", "--parts", "2", "--ctx", "512")
    second = parts[1].read_bytes()
    for command in ([EVAL, *common[:2], str(parts[0]), *common[3:], "--kept", "0.5", "--json", str(parts[1])],
                    [MAIN, "-m", str(parts[0]), "-p", "hi", "-n", "4", "--stats-json", str(parts[1])]):
        refused = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
        assert refused.returncode == 2 and "also read" in refused.stderr and parts[1].read_bytes() == second, refused


def test_a_table_that_can_not_be_written(tiny):
    with open("/dev/full", "w") as full:
        failed = subprocess.run([EVAL, "kld", "-m", tiny, "-f", TEXT, "--context", "128", "--continuation", "8", "--chunks", "1", "-t",
                                 "1", "--kept", "0.5"], stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, text=True,
                                timeout=60)
    assert failed.returncode == 1 and "stdout" in failed.stderr


@pytest.mark.parametrize("command", ["calibrate", "kld", "needle"])
def test_models_of_short_contexts(tmp_path, command):
    """What isn't named fits the model; what is named and doesn't fit is told by its flag."""
    model = str(tmp_path / "short.gguf")
    make(model, "--ctx", "512", "--bpe")
    own = ("-o", str(tmp_path / "c.json")) if command == "calibrate" else ("--policy", "local_window", "--max-cache-size", "40")
    chosen = run(command, "-m", model, "-f", TEXT, *own, *(("--samples", "1") if command == "needle" else ("--chunks", "1")))
    assert chosen.returncode == 0 and "which the model's 512 leave room for" in chosen.stderr, chosen.stderr
    named = run(command, "-m", model, "-f", TEXT, *own, "--context", "600")
    assert named.returncode == 2 and "give a smaller --context" in named.stderr, named.stderr


def test_advice_fits(tiny, tmp_path):
    """A text that is too short for the pieces: the numbers that the refusal names work, and a context that is too long is not answered
    with fewer pieces."""
    text = tmp_path / "t.txt"
    text.write_text(open(TEXT).read()[:1500])
    common = ["-m", tiny, "-f", str(text), "--max-cache-size", "48"]
    for command in (["kld", "--continuation", "16", "--policy", "importance_score"], ["calibrate", "-o", str(tmp_path / "c.json")]):
        refused = run(*command, *common, "--context", "200", "--chunks", "4000")
        n = re.search(r"give fewer --chunks, (\d+)$", refused.stderr.strip()).group(1)
        assert refused.returncode == 2 and int(n) > 0
        assert run(*command, *common, "--context", "200", "--chunks", n).returncode == 0
        refused = run(*command, *common, "--context", "90000")
        chunks, context = re.search(r"--chunks (\d+) --context (\d+)$", refused.stderr.strip()).groups()
        assert refused.returncode == 2 and chunks == "1" and 1000 < int(context) < 90000
    refused = run("long", *common, "--context", "90000")
    assert refused.returncode == 2 and "smaller --context" in refused.stderr


def test_unknown_command(tiny):
    failed = run("perplexity", "-m", tiny)
    assert failed.returncode == 2 and failed.stdout == "" and "there is no command 'perplexity'" in failed.stderr.splitlines()[-1]


@needs_real
def test_prediction_finds_what_a_window_lost(tmp_path):
    """The same needles by what was learned from other texts, this project's own pages."""
    text, config = tmp_path / "pages.txt", tmp_path / "model.tlc.json"
    docs = os.path.join(os.path.dirname(__file__), "..", "docs")
    text.write_text("".join(open(os.path.join(docs, name)).read() for name in sorted(os.listdir(docs)) if name.endswith(".md")))
    result = run("calibrate", "-m", REAL, "-f", str(text), "--context", "1500", "--chunks", "2", "--kept", "0.25", "-o", str(config))
    assert result.returncode == 0, result.stderr
    predicted = measure(tmp_path, "needle", "-m", REAL, "-f", TEXT, "--context", "1200", "--samples", "4", "--depth-high", "0.4",
                        "--evict", "once", "--kept", "0.25", "--eviction-config", str(config))
    assert predicted["accuracy_full"] == 1 and predicted["kept_share"] <= 0.2501 and predicted["accuracy"] >= 0.75, predicted
