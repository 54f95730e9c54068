"""What ./deeptutor-server keeps between requests where memory, the folder or its files are not as one would like. Invariant: a request
that fits alone is answered, with the text that it gets alone."""
import os
import re
import shutil
import subprocess
import time

import pytest

from server_support import FLAGS, MAKE_MODEL, SERVER, make_tiny, serving, text_of

pytestmark = pytest.mark.skipif(not os.access(SERVER, os.X_OK) or not os.access(MAKE_MODEL, os.X_OK),
                                reason="DT_SERVER or DT_MAKE_MODEL names no program")

ON_DISK = 'deeptutor_conversations{state="disk"}'


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny(str(tmp_path_factory.mktemp("model") / "tiny.gguf"))


def noise(n, seed=0):
    return [5 + (i * i + 7 * i + seed * (i + 3)) % 97 for i in range(n)]


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


# ---- memory ----

@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("common", [20, 100, 450])
def test_beside_what_it_begins_like(model, tmp_path, common, folder):
    """A conversation of 60 % of the memory, and another of that size that shares its beginning: the first one makes room."""
    first, second = noise(500), noise(500)[:common] + [7] * (500 - common)
    with serving(model, tmp_path, *FLAGS) as server:
        alone = text_of(server.complete(prompt=second, max_tokens=8))
    flags = ("--session-dir", str(tmp_path / "kept")) if folder else ()
    with serving(model, tmp_path, *FLAGS, "--kv-memory", "240K", *flags) as server:
        server.complete(prompt=first, max_tokens=8)
        answer = server.complete(prompt=second, max_tokens=8)
        assert text_of(answer) == alone
        assert not folder or common < 500 // 16 or cached(answer) >= common, answer["usage"]
        m = server.metrics()
        assert m["deeptutor_kv_bytes_peak"] <= 240 << 10 and m['deeptutor_requests_total{outcome="failed"}'] == 0, m


def test_every_size_after_every_other(model, tmp_path):
    """Memory full of idle conversations of all sizes, none too large: whatever comes next finds room."""
    with serving(model, tmp_path, *FLAGS, "--kv-memory", "160K") as server:
        for i in range(60):
            n = 1 + (i * 189) % 450
            assert server.complete(prompt=noise(n, i % 3), max_tokens=4)["usage"]["completion_tokens"] == 4
        assert server.metrics()["deeptutor_kv_bytes_peak"] <= 160 << 10


def test_replies_longer_than_the_context(model, tmp_path):
    """Where every layer evicts, a reply takes what the budgets let it, however long it may become; and no more than its prompt before."""
    flags = (*FLAGS, "--cache-eviction", "--max-cache-size", "64", "--memory-slots", "0")
    with serving(model, tmp_path, *flags, "--kv-memory", "1M") as server:
        endless = server.send({"prompt": noise(10), "max_tokens": 1000000, "ignore_eos": True, "stream": True})
        assert b" 200 " in endless.recv(64)
        endless.close()
    for n, limit in ((10, 180), (300, 260)):
        with serving(model, tmp_path, *flags, "--kv-memory", f"{limit}K") as server:
            answer = server.complete(prompt=noise(n), max_tokens=3000, ignore_eos=True)
            assert answer["usage"]["completion_tokens"] == 3000 and server.metrics()["deeptutor_kv_bytes_peak"] <= limit << 10
            status, answer, _ = server.ask("/v1/completions", {"prompt": noise(900), "max_tokens": 3})
            assert status == 400 and "evict" not in answer["error"]["message"], answer
            least = re.search(r"at least (\d+K)$", answer["error"]["message"]).group(1)
        with serving(model, tmp_path, *flags, "--kv-memory", least) as server:
            server.complete(prompt=noise(900), max_tokens=3)


def test_choices_that_write_nothing(model, tmp_path):
    with serving(model, tmp_path, *FLAGS, "--kv-memory", "160K") as server:
        assert len(server.complete(prompt=noise(400), max_tokens=0, n=4)["choices"]) == 4
        status, answer, _ = server.ask("/v1/completions", {"prompt": noise(400), "max_tokens": 9, "n": 4})
        assert status == 400 and "lower max_tokens or n, evict, or" in answer["error"]["message"], answer


def test_stopped_in_the_middle(model, tmp_path):
    """Replies that --grace does not wait for end with a sentence about the server, not about the client."""
    with serving(model, tmp_path, *FLAGS, "--grace", "0") as server:
        running = server.send({"prompt": noise(10), "max_tokens": 1000, "stream": True, "ignore_eos": True})
        assert running.recv(1)
        server.process.terminate()
        said = b""
        while piece := running.recv(1 << 16):
            said += piece
        assert b"the server stopped before the reply was done" in said
        server.process.wait(timeout=60)


def test_a_place_left_in_the_queue(model, tmp_path):
    """A request that needs the memory of one that runs waits; when its client is gone, those behind it are let in at once."""
    with serving(model, tmp_path, *FLAGS, "--kv-memory", "400K") as server:
        running = server.send({"prompt": noise(10), "max_tokens": 1000, "stream": True})
        assert running.recv(1)
        large = server.send({"prompt": noise(900, 1), "max_tokens": 4})
        until = time.monotonic() + 30
        while server.metrics()["deeptutor_requests_waiting"] == 0 and time.monotonic() < until:
            time.sleep(0.002)
        time.sleep(0.05)  # it has been tried
        large.close()
        assert server.complete(prompt=noise(10, 2), max_tokens=1)["usage"]["completion_tokens"] == 1
        m = server.metrics()
        while m["deeptutor_replies_running"] != 1 and time.monotonic() < until:  # the one just answered is still counted for a moment
            m = server.metrics()
        assert m["deeptutor_replies_running"] == 1 and m['deeptutor_requests_total{outcome="cancelled"}'] == 1, m
        running.close()
        begun = time.monotonic()
        assert server.stop() == 0 and time.monotonic() - begun < 20  # nobody waits for the end of what is cancelled: --grace is 30


# ---- the folder ----

def test_tokens_behind_a_text(model, tmp_path):
    """A conversation that began as text and went on as tokens is found again after a restart."""
    folder, text = tmp_path / "kept", "Seven wizards wait for a quick brown fox. " * 3
    flags = (*FLAGS, "--session-dir", str(folder))
    with serving(model, tmp_path, *flags) as server:
        for more in ("And then?", " And what then?"):
            text += more
            text += text_of(server.complete(prompt=text, max_tokens=6))
        ids = server.ask("/tokenize", {"content": text + " So be it.", "add_special": True})[1]["tokens"]
        server.complete(prompt=ids, max_tokens=4)
        server.complete(prompt=ids + [9] * 4, max_tokens=4)
    n = len(list(folder.glob("*.json")))
    assert n > 0
    with serving(model, tmp_path, *flags) as server:
        assert server.metrics()[ON_DISK] == n
        assert cached(server.complete(prompt=ids + [9] * 8, max_tokens=1)) >= len(ids)


def test_a_folder_that_is_removed(model, tmp_path):
    """It is made anew at the next save, and what was in it is computed again; where that can't be, the log says why."""
    folder = tmp_path / "place/kept"
    folder.parent.mkdir()
    log = tmp_path / "server.log"
    with serving(model, tmp_path, *FLAGS, "--idle", "0", "--session-dir", str(folder)) as server:
        server.complete(prompt=noise(200, 1), max_tokens=4)
        shutil.rmtree(folder)
        server.complete(prompt=noise(200, 2), max_tokens=4)
        assert server.metrics()[ON_DISK] == 1 and len(list(folder.glob("*.session"))) == 1 and (folder / "lock").exists()
        assert cached(server.complete(prompt=noise(200, 1) + [9], max_tokens=4)) == 0
        assert cached(server.complete(prompt=noise(200, 2) + [9], max_tokens=4)) >= 200
        second = subprocess.run([SERVER, "-m", model, "--port", "0", "--session-dir", str(folder)], capture_output=True, timeout=60)
        assert second.returncode == 2 and b"in use by process" in second.stderr
        shutil.rmtree(folder.parent)
        server.complete(prompt=noise(200, 3), max_tokens=4)
        assert server.ask("/health")[0] == 200 and not folder.parent.exists()
    told = log.read_bytes()
    assert told.count(b"it is made anew") == 1 and b"kept can't be made: No such file or directory" in told, told


def test_a_folder_that_another_server_took(model, tmp_path):
    """What was removed and begun anew by another server is that one's; when it has ended, nothing of it is overwritten."""
    folder = tmp_path / "kept"
    flags = (*FLAGS, "--idle", "0", "--session-dir", str(folder))
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    with serving(model, tmp_path / "first", *flags) as first:
        log = tmp_path / "first" / "server.log"
        first.complete(prompt=noise(200, 1), max_tokens=4)
        shutil.rmtree(folder)
        with serving(model, tmp_path / "second", *flags) as second:
            second.complete(prompt=noise(200, 2), max_tokens=4)
            theirs = {path.name: path.read_bytes() for path in folder.glob("conversation-*")}
            first.complete(prompt=noise(200, 3), max_tokens=4)
            assert {path.name: path.read_bytes() for path in folder.glob("conversation-*")} == theirs and len(theirs) == 2
            assert b"is in use by process" in log.read_bytes()
        theirs = {path.name: path.read_bytes() for path in folder.glob("conversation-*")}
        first.complete(prompt=noise(200, 4), max_tokens=4)
        now = {path.name: path.read_bytes() for path in folder.glob("conversation-*")}
        assert now.items() > theirs.items(), (sorted(now), sorted(theirs))


def test_files_of_other_settings(model, tmp_path):
    """What another --kv-type or version left, or what can't be read, is told of, stays, and comes back with its settings."""
    folder, prompt = tmp_path / "kept", noise(200)
    flags = (*FLAGS, "--session-dir", str(folder))
    log = tmp_path / "server.log"
    with serving(model, tmp_path, *flags) as server:
        server.complete(prompt=prompt, max_tokens=4)
    (session,) = folder.glob("*.session")
    kept = session.read_bytes()
    for other in ((), ("--kv-type", "int8"), ("-c", "128")):
        session.write_bytes(kept if other else kept[:8] + bytes([3]) + kept[9:])  # version 3
        before = session.read_bytes()
        with serving(model, tmp_path, *flags, *other) as server:
            for i in range(3):
                short = prompt[:100] + [200 + i] * 10 if "-c" in other else prompt + [9] * i
                assert i > 0 or cached(server.complete(prompt=short, max_tokens=4)) == 0
        assert session.read_bytes() == before
        told = log.read_bytes().count(b"can't be gone on with") + log.read_bytes().count(b"left alone until the next start")
        assert told == 1, log.read_bytes()
        for path in folder.glob("conversation-*"):
            if path.stem != session.stem:
                path.unlink()
    session.write_bytes(kept)
    with serving(model, tmp_path, *flags) as server:
        assert cached(server.complete(prompt=prompt + [9] * 4, max_tokens=4)) >= 200
    assert b"left alone" not in log.read_bytes() and b"can't be" not in log.read_bytes()


def test_damaged_and_missing_files(model, tmp_path):
    """Those are dropped, and the conversation is computed anew."""
    folder = tmp_path / "kept"
    flags = (*FLAGS, "--session-dir", str(folder))
    with serving(model, tmp_path, *flags) as server:
        for seed in (1, 2):
            server.complete(prompt=noise(200, seed), max_tokens=4)
    with serving(model, tmp_path, *flags) as server:
        assert server.metrics()[ON_DISK] == 2
        first, second = sorted(folder.glob("*.session"))
        first.write_bytes(first.read_bytes()[:-100])
        second.unlink()
        for seed in (1, 2):
            assert cached(server.complete(prompt=noise(200, seed) + [9], max_tokens=4)) == 0
        assert server.metrics()[ON_DISK] == 0
    assert (tmp_path / "server.log").read_bytes().count(b"can't be used and is dropped") == 2


def test_order_of_use_after_a_restart(model, tmp_path):
    """Those that were used last stay when the folder has to shrink."""
    folder = tmp_path / "kept"
    with serving(model, tmp_path, *FLAGS, "--session-dir", str(folder)) as server:
        for seed in range(4):
            server.complete(prompt=noise(200, seed + 1), max_tokens=4)
    sessions = sorted(folder.glob("*.session"))
    assert len(sessions) == 4
    size = sessions[0].stat().st_size
    for newest in range(4):
        copy = tmp_path / f"copy{newest}"
        shutil.copytree(folder, copy)
        for i, session in enumerate(sessions):
            at = 1_700_000_000 * 10**9 + (50 if i == newest else i) * 10**7
            os.utime(copy / session.name, ns=(at, at))
        with serving(model, tmp_path, *FLAGS, "--session-dir", str(copy), "--disk-memory", f"{size * 3 // 2048}K") as server:
            assert server.metrics()[ON_DISK] == 1
            assert [path.name for path in copy.glob("*.session")] == [sessions[newest].name]


def test_files_without_an_index(model, tmp_path):
    """A session that no index names is removed, what is not the program's own is left."""
    folder = tmp_path / "kept"
    folder.mkdir()
    orphan = folder / "conversation-00000000000000aa.session"
    others = [folder / name for name in ("conversation-aa.session", "conversation-00000000000000ab.session.bak", "mine.session",
                                         "conversation-00000000000000AC.session", "conversation-00000000000000ad.json")]
    for path in (orphan, *others):
        path.write_bytes(b"x")
    with serving(model, tmp_path, *FLAGS, "--session-dir", str(folder)) as server:
        server.complete(prompt=noise(100), max_tokens=2)
    assert not orphan.exists() and all(path.read_bytes() == b"x" for path in others)
    assert not any(re.fullmatch(r"conversation-0{14}aa\..*", path.name) for path in folder.iterdir())


def test_somebodys_own_files(model, tmp_path):
    """What a killed server leaves goes; what only looks a little like it stays, and so does a `lock` of somebody's own."""
    left = ["conversation-00000000000000d0.json.part", "conversation-00000000000000d1.session.99999999.deeptutor",
            "conversation-00000000000000d2.session"]  # the last without its index
    others = ["conversation-about-dogs.tmp", "conversation-draft-with-bob.tmp", "conversation-2024-notes.part", "conversation-7.part",
              "conversation-00000000000000d3.session.deeptutor", "conversation-00000000000000d4.json", "notes.json.part"]
    for name in left + others:
        (tmp_path / name).write_text("text")
    with serving(model, tmp_path, *FLAGS, "--session-dir", str(tmp_path)) as server:
        server.complete(prompt=noise(100), max_tokens=4)
    assert not set(left) & set(os.listdir(tmp_path)) and all((tmp_path / name).read_text() == "text" for name in others)
    lock = tmp_path / "lock"
    lock.write_text("my own")
    done = subprocess.run([SERVER, "-m", model, "--port", "0", *FLAGS, "--session-dir", str(tmp_path)], capture_output=True, timeout=60)
    assert done.returncode == 2 and f"{lock} is no lock file of this program".encode() in done.stderr and lock.read_text() == "my own"
