"""Layers on other machines: two ./deeptutor-rpc-server on loopback, tiny random models (docs/cluster.md).

Invariants of every check: what is computed there is what is computed here, token for token; a server that can't be used or goes
away is one sentence that names it, and exit code 1; a session file that was there before is what it was.
"""
import http.client
import json
import os
import signal
import socket
import struct
import subprocess
import threading
import time

import pytest

from server_support import BATCH, MAIN, MAKE_MODEL, SERVER, Server, make_tiny
from wire import Wire

RPC_SERVER, BENCH, EVAL = (os.environ.get(name, "") for name in ("DT_RPC_SERVER", "DT_BENCH", "DT_EVAL"))
pytestmark = [pytest.mark.skipif(not all(os.access(p, os.X_OK) for p in (RPC_SERVER, MAIN, MAKE_MODEL)),
                                 reason="DT_RPC_SERVER, DT_MAIN or DT_MAKE_MODEL names no program"),
              pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="needs Linux's /proc")]

TEXT = "The quick brown fox jumps over the lazy dog while seven wizards wait. " * 6
WINDOW = {"0-3": {"policy": "local_window", "max_cache_size": 96, "min_cache_size": 32}}
SCORED = {"0-1": WINDOW["0-3"], "2-3": {"policy": "importance_score", "max_cache_size": 128, "min_cache_size": 32}}


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as s:
        return s.getsockname()[1]


class RpcServer:
    def __init__(self, port=None):
        self.port = port or free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.device = "rpc=" + self.address
        self.start()

    def start(self):
        self.process = subprocess.Popen([RPC_SERVER, "-p", str(self.port), "-t", "1"], stdin=subprocess.DEVNULL,
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        until = time.monotonic() + 30
        while b"transport" not in (line := self.process.stdout.readline()):
            assert line and time.monotonic() < until, "the server does not start"
        self.clients = 0
        threading.Thread(target=self._count, args=(self.process.stdout,), daemon=True).start()
        while not is_listening(self.port):
            assert time.monotonic() < until
            time.sleep(0.02)

    def _count(self, output):
        for line in output:
            self.clients += line.startswith(b"Accepted")

    def stop(self, signal_number=signal.SIGTERM):
        self.process.send_signal(signal_number)
        return self.process.wait(timeout=30)


def is_listening(port):
    """Without disturbing the server, which talks to one client at a time."""
    with open("/proc/net/tcp") as table:
        return any(row.split()[1].endswith(":%04X" % port) and row.split()[3] == "0A" for row in table.readlines()[1:])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny(str(tmp_path_factory.mktemp("model") / "tiny.gguf"), "--layers", "4")


@pytest.fixture
def servers():
    both = [RpcServer(), RpcServer()]
    yield both
    for server in both:
        server.process.kill()
        server.process.wait()


def both_of(servers):
    return ",".join(server.device for server in servers)


def main(model, *flags, **kwargs):
    return subprocess.run([MAIN, "-m", model, "-t", "1", "--temp", "0", "--ignore-eos", *flags], stdin=subprocess.DEVNULL,
                          capture_output=True, timeout=120, **kwargs)


def stats(model, tmp_path, *flags):
    path = tmp_path / "stats.json"
    result = main(model, "--stats-json", str(path), *flags)
    assert result.returncode == 0, result.stderr
    return json.loads(path.read_text())


def assert_lost(code, log, *fragments):
    lines = log.decode().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert code == 1 and len(errors) == 1 and lines[-1] == errors[0] and b" failed (bytes" not in log, log
    for fragment in fragments:
        assert fragment in errors[0], errors[0]


# ---- the same as here ----------------------------------------------------------------------------


@pytest.mark.parametrize("config", [None, WINDOW, SCORED], ids=["off", "window", "scored"])
def test_same_tokens(model, servers, tmp_path, config):
    flags = ["-p", TEXT, "-n", "150"]
    if config:
        (tmp_path / "tlc.json").write_text(json.dumps(config))
        flags += ["--cache-eviction", "--eviction-config", str(tmp_path / "tlc.json")]
    here = stats(model, tmp_path, *flags)
    same_operators = stats(model, tmp_path, *flags, "--device", "ggml-cpu")
    there = stats(model, tmp_path, *flags, "--device", both_of(servers))
    assert there["device"] == f"{servers[0].address} (layers 0-1), {servers[1].address} (layers 2-3)"
    assert there["generated_token_ids"] == same_operators["generated_token_ids"]
    if config is not SCORED:  # where a cache is elsewhere, scores take the last 32 queries at once, each for as much
        assert there["generated_token_ids"][:100] == here["generated_token_ids"][:100]  # own kernels round otherwise: till a tie
    lengths = [[layer["length"] for layer in s["layers"]] for s in (here, same_operators, there)]
    assert lengths[0] == lengths[1] == lengths[2]
    assert there["eviction"]["evicted_tokens"] == here["eviction"]["evicted_tokens"]
    assert (here["eviction"]["rounds"] > 0) == (config is not None)


@pytest.mark.parametrize("config, flags", [
    (dict(WINDOW["0-3"], memory_slots=4), ["-n", "60"]),
    (dict(SCORED["2-3"], score="reconstruct"), ["-n", "60"]),
    (WINDOW["0-3"], ["-n", "400", "-c", "128"]),
], ids=["slots", "repeated", "past the context"])
def test_what_reads_the_cache(model, servers, tmp_path, config, flags):
    """Entries that come over to be merged, largest probabilities, keys that turn: what a device here does."""
    (tmp_path / "tlc.json").write_text(json.dumps({"0-": config}))
    flags = ["-p", TEXT, "--cache-eviction", "--eviction-config", str(tmp_path / "tlc.json"), *flags]
    here = stats(model, tmp_path, *flags, "--device", "ggml-cpu")
    there = stats(model, tmp_path, *flags, "--device", both_of(servers))
    assert there["generated_token_ids"] == here["generated_token_ids"] and here["eviction"]["rounds"] > 0


def test_how_layers_are_shared(model, servers, tmp_path):
    a, b = (server.address for server in servers)
    flags = ("-p", "Once", "-n", "8", "--device", both_of(servers))
    here = stats(model, tmp_path, "-p", "Once", "-n", "8")["generated_token_ids"]
    for more, where in ((("--tensor-split", "3,1"), f"{a} (layers 0-2), {b} (layers 3-3)"),
                        (("-ts", "0/1"), f"{b} (layers 0-3)"),
                        (("-ngl", "3", "-ts", "1,2"), f"{a} (layers 0-0), {b} (layers 1-2)"),
                        (("-ngl", "0", "-ts", "1,2"), "cpu")):
        s = stats(model, tmp_path, *flags, *more)
        assert s["device"] == where and s["generated_token_ids"] == here
    for split in ("1", "1,2,3", "0,0", "1,x", "1,,2", "1;2", ""):
        result = main(model, *flags, "--tensor-split", split)
        assert_lost(result.returncode, result.stderr, f"'{split}' does not share layers between 2 devices")
    assert main(model, "-p", "x", "-ts", "1").returncode == 2


def test_sessions_move(model, servers, tmp_path):
    """Saved there and loaded here, and the other way round."""
    whole = main(model, "-p", TEXT, "-n", "40").stdout
    for name, first, second in (("out", (), ("--device", both_of(servers))), ("home", ("--device", both_of(servers)), ())):
        session = str(tmp_path / name)
        begin = main(model, "-p", TEXT, "-n", "20", "--session", session, *first)
        assert begin.returncode == 0, begin.stderr
        text = begin.stdout[:-1].decode()
        (tmp_path / "prompt").write_bytes((TEXT + text).encode())
        s = stats(model, tmp_path, "-f", str(tmp_path / "prompt"), "-n", "20", "--session", session, *second)
        assert s["prompt_tokens"] - s["reused_tokens"] <= 3, s
        assert whole.startswith(begin.stdout[:-1]) and len(s["generated_token_ids"]) == 20
        again = main(model, "-f", str(tmp_path / "prompt"), "-n", "20")
        assert main(model, "-f", str(tmp_path / "prompt"), "-n", "20", "--session", session, *second).stdout == again.stdout


def test_stdin_passes_through(model, servers):
    command = [MAIN, "-m", model, "-t", "1", "--temp", "0", "-n", "8", "-f", "-"]
    texts = [subprocess.run([*command, *flags], input=TEXT.encode(), capture_output=True, timeout=60).stdout
             for flags in ((), ("--device", both_of(servers)))]
    assert texts[0] == texts[1] != b""


def test_what_goes_over_the_wire(model, servers):
    """A graph that is computed again is not sent again: it alone would be over 40,000 bytes a token."""
    counts = []
    for n in (50, 150):
        wires = [Wire(server.port) for server in servers]
        devices = ",".join(f"rpc=127.0.0.1:{wire.port}" for wire in wires)
        assert main(model, "-p", "Once", "-n", str(n), "--device", devices).returncode == 0
        counts.append(sum(wire.sent + wire.received for wire in wires))
        for wire in wires:
            wire.close()
    assert 320 * 4 < (counts[1] - counts[0]) / 100 < 10000


# ---- servers that can't be used ------------------------------------------------------------------


@pytest.mark.parametrize("device, fragments", [
    ("rpc=127.0.0.1:1", ("127.0.0.1:1 can't be reached", "refused")),
    ("rpc=no-such-host.invalid:50052", ("no-such-host.invalid", "does not resolve")),
    ("rpc=127.0.0.1", ("'rpc=127.0.0.1' is no server",)), ("rpc=:50052", ("is no server",)), ("rpc=h:0", ("is no server",)),
    ("rpc=h:99999", ("is no server",)), ("rpc=h:12x", ("is no server",)), ("rpc", ("rpc=HOST:PORT",)), ("rpc=", ("is no server",)),
])
def test_addresses(model, device, fragments):
    result = main(model, "-p", "x", "-n", "1", "--device", device)
    assert_lost(result.returncode, result.stderr, *fragments)


GREETING = struct.pack("<Q", 28)


@pytest.mark.parametrize("reply, hangs_up, fragment", [
    (b"HTTP/1.1 400 Bad Request\r\n\r\n", True, "is no RPC server"),
    (b"", True, "hung up when greeted"),
    (GREETING + bytes([6, 9, 0, 0]) + bytes(24), True, "protocol version 6.9"),
    (GREETING + bytes([7, 200, 0, 0]) + bytes(24), True, "protocol version 7.200"),
    (None, False, "does not answer"),
], ids=["http", "silent", "older", "newer", "hangs"])
def test_other_servers(model, reply, hangs_up, fragment):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        def answer():
            client = listener.accept()[0]
            client.sendall(reply or b"")
            if hangs_up:
                client.recv(100)
                client.close()
            else:
                time.sleep(30)

        threading.Thread(target=answer, daemon=True).start()
        address = "127.0.0.1:%d" % listener.getsockname()[1]
        result = main(model, "-p", "x", "-n", "1", "--device", "rpc=" + address)
        assert_lost(result.returncode, result.stderr, address, fragment)


def test_one_client_at_a_time(model, servers):
    with socket.create_connection(("127.0.0.1", servers[0].port)):
        result = main(model, "-p", "x", "-n", "1", "--device", servers[0].device)
        assert_lost(result.returncode, result.stderr, servers[0].address, "busy with another")
    result = main(model, "-p", "x", "-n", "1", "--device", f"{servers[0].device},{servers[0].device}")
    assert_lost(result.returncode, result.stderr, "named twice")
    result = main(model, "-p", "x", "-n", "1", "--device", f"{servers[0].device},rpc=localhost:{servers[0].port}")
    assert_lost(result.returncode, result.stderr, f"localhost:{servers[0].port}", "under another name")
    result = main(model, "-p", "x", "-n", "1", "--device", f"list,{servers[0].device}")
    assert_lost(result.returncode, result.stderr, "\"list\" stands alone")


def test_server_usage(tmp_path):
    def fails(code, fragment, *flags):
        result = subprocess.run([RPC_SERVER, *flags], capture_output=True, timeout=30)
        assert result.returncode == code and fragment in result.stderr and result.stderr.startswith(b"error: "), result.stderr

    with socket.create_server(("127.0.0.1", 0)) as taken:
        fails(2, b"can't be listened at: Address already in use; give another --host or --port", "-p", str(taken.getsockname()[1]))
    fails(2, b"error: example.invalid:50052 can't be listened at: give an IPv4 address", "--host", "example.invalid")
    fails(2, b"'10.0.0.1' is no flag; --help lists all", "10.0.0.1")
    port = str(free_port())
    fails(2, b"is no folder", "-p", port, "-c", str(tmp_path / "no"))
    fails(2, b"no device 'toaster'", "-p", port, "-d", "toaster")
    fails(2, b"between 1 and 65535", "-p", "0")


@pytest.mark.parametrize("level", ["info", "error"])
def test_what_ggml_prints_is_log(model, level):
    """ggml's server tells of clients on stdout; that is the log's."""
    port = free_port()
    process = subprocess.Popen([RPC_SERVER, "-p", str(port), "-t", "1", "--log-level", level], stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_until(lambda: is_listening(port))
    text = main(model, "-p", TEXT, "-n", "1", "--device", f"rpc=127.0.0.1:{port}")
    process.terminate()
    out, log = process.communicate(timeout=30)
    assert text.returncode == 0 and out == b""
    assert (b"Accepted client" in log) == (level == "info") and (log == b"") == (level == "error")


# ---- servers that go away ------------------------------------------------------------------------

ENDLESS = ("-n", "1000000", "--ignore-eos", "--temp", "0", "--cache-eviction", "--max-cache-size", "64", "--min-cache-size", "32")


def wait_until(condition, seconds=60):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def start_main(model, servers, *flags):
    """One that has begun to write."""
    process = subprocess.Popen([MAIN, "-m", model, "-t", "1", "-p", TEXT, *ENDLESS, "--device", both_of(servers), *flags],
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.read(20)
    return process


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_server(model, servers, tmp_path, victim):
    session = tmp_path / "s.bin"
    assert main(model, "-p", TEXT, "-n", "4", "--session", str(session), *ENDLESS[5:]).returncode == 0
    before = session.read_bytes()
    process = start_main(model, servers, "--session", str(session))
    servers[victim].stop(signal.SIGKILL)
    _, log = process.communicate(timeout=60)
    assert_lost(process.returncode, log, servers[victim].address, "can't be reached", "files saved before are intact")
    assert session.read_bytes() == before and set(os.listdir(tmp_path)) - {"s.bin.lock"} == {"s.bin"}
    servers[victim].start()  # the other one has hung up on the lost client by then
    assert main(model, "-p", TEXT, "-n", "4", "--session", str(session), "--device", both_of(servers), *ENDLESS[5:]).returncode == 0


def test_stopped_server(model, servers):
    process = start_main(model, servers, "--rpc-timeout", "2")
    servers[1].process.send_signal(signal.SIGSTOP)
    _, log = process.communicate(timeout=60)
    servers[1].process.send_signal(signal.SIGCONT)
    assert_lost(process.returncode, log, servers[1].address, "does not answer")


def test_restarted_server(model, servers):
    """One that is back before anybody looks can't be told from the others."""
    process = start_main(model, servers)
    process.send_signal(signal.SIGSTOP)  # the parent, so that it looks late
    servers[1].stop(signal.SIGKILL)
    servers[1].start()
    wait_until(lambda: not children_of(process.pid, running=True))
    process.send_signal(signal.SIGCONT)
    _, log = process.communicate(timeout=60)
    assert_lost(process.returncode, log, f"a server of {both_of(servers)} ended the connection")


def children_of(pid, running=False):
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/stat") as f:
                state, parent = f.read().rsplit(")", 1)[1].split()[:2]
        except OSError:
            continue
        if int(parent) == pid and not (running and state == "Z"):
            found.append(int(entry))
    return found


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_signals_pass_through(model, servers, tmp_path, signal_number):
    session = tmp_path / "s.bin"
    process = start_main(model, servers, "--session", str(session))
    process.send_signal(signal_number)
    _, log = process.communicate(timeout=60)
    assert process.returncode == 0 and b"tokens saved" in log and b"interrupted" in log, log
    assert session.exists()


@pytest.mark.parametrize("attempt", range(6))  # a signal that met another one on its way was lost, once in several times
def test_signals_count_once(model, servers, tmp_path, attempt):
    """Ctrl-C reaches parent and child; a second one would quit without saving."""
    session = tmp_path / "s.bin"
    process = subprocess.Popen([MAIN, "-m", model, "-t", "1", "-p", TEXT, *ENDLESS, "--device", both_of(servers), "--session",
                                str(session)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               start_new_session=True)
    assert process.stdout.read(20)
    os.killpg(process.pid, signal.SIGINT)
    _, log = process.communicate(timeout=60)
    assert process.returncode == 0 and b"tokens saved" in log, log


def test_no_child_stays(model, servers):
    process = start_main(model, servers)
    child, = children_of(process.pid)
    process.kill()
    process.communicate(timeout=60)
    wait_until(lambda: not os.path.exists(f"/proc/{child}"))
    process = start_main(model, servers)
    os.kill(children_of(process.pid)[0], signal.SIGKILL)  # as the kernel does when memory is short
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL


def batch_command(model, tmp_path):
    rows = [json.dumps({"id": str(i), "prompt": TEXT}) for i in range(2000)]
    (tmp_path / "in.jsonl").write_text("\n".join(rows) + "\n")
    return [BATCH, "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "-n", "50", "--ignore-eos",
            "--chat-template", "chatml"]


def eval_command(model, tmp_path):
    (tmp_path / "text").write_text(TEXT * 1000)
    return [EVAL, "kld", "-f", str(tmp_path / "text"), "--context", "256", "--continuation", "64", "--max-cache-size", "64",
            "--min-cache-size", "32", "--chunks", "1000"]


def bench_command(model, tmp_path):
    return [BENCH, "-p", "256", "-n", "512", "-r", "64", "-d", "0,64,128,256"]


@pytest.mark.parametrize("make", [batch_command, eval_command, bench_command])
def test_other_programs(model, servers, tmp_path, make):
    command = make(model, tmp_path)
    if not os.access(command[0], os.X_OK):
        pytest.skip("the program is missing")
    process = subprocess.Popen([*command, "-m", model, "-t", "1", "--device", both_of(servers)], stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        wait_until(lambda: servers[1].clients >= 3)  # the greeting, the list of devices, the connection that stays
    except AssertionError:
        process.kill()
        raise
    time.sleep(0.5)
    servers[1].stop(signal.SIGKILL)
    _, log = process.communicate(timeout=60)
    assert_lost(process.returncode, log, servers[1].address, "can't be reached")


@pytest.mark.skipif(not os.access(SERVER, os.X_OK), reason="DT_SERVER names no program")
def test_http_server_begins_again(model, servers, tmp_path):
    log, port = tmp_path / "log", free_port()
    server = Server(model, "--port", str(port), "--device", both_of(servers), log=str(log))
    ask = {"prompt": TEXT, "max_tokens": 8}
    try:
        text = server.complete(**ask)["choices"][0]["text"]
        servers[0].stop(signal.SIGKILL)
        with pytest.raises((OSError, http.client.HTTPException)):
            for _ in range(3):
                server.complete(**ask)
        wait_until(lambda: b"waiting for" in log.read_bytes())
        assert servers[0].address.encode() in log.read_bytes() and server.process.poll() is None
        servers[0].start()
        wait_until(lambda: log.read_bytes().count(b"listening at") == 2)
        assert server.complete(**ask)["choices"][0]["text"] == text
        servers[1].stop(signal.SIGKILL)
        with pytest.raises((OSError, http.client.HTTPException)):
            server.complete(**ask)
        wait_until(lambda: log.read_bytes().count(b"waiting for") == 2)
        server.process.send_signal(signal.SIGTERM)  # also while it waits
        assert server.process.wait(timeout=30) == 0
    finally:
        server.process.kill()
        server.process.wait()
