"""What the tests of ./deeptutor-server share: starting one, asking it, reading its metrics. Plain sockets and http.client, so that
nothing between the test and the bytes repairs anything."""
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import time

SERVER = os.environ.get("DT_SERVER", "")
BATCH = os.environ.get("DT_BATCH", "")
MAIN = os.environ.get("DT_MAIN", "")
MAKE_MODEL = os.environ.get("DT_MAKE_MODEL", "")
MODEL = os.environ.get("DT_TEST_MODEL", "")
TEXT = os.environ.get("DT_TEST_TEXT", "")
SANITIZED = "DT_SANITIZE" in os.environ  # slow, reserves terabytes of addresses, holds back what was freed
FLAGS = ("--chat-template", "chatml", "-np", "4", "--queue", "16", "-b", "64", "--kernel", "reference", "--ignore-eos", "--idle", "16")


def make_tiny(path, *extra):
    """Two layers, random weights, a byte-level tokenizer: every text is some tokens, and replies are noise that is always the same."""
    subprocess.run([MAKE_MODEL, path, "--layers", "2", "--embd", "64", "--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--ff",
                    "128", "--vocab", "320", "--ctx", "1024", "--type", "f32", "--bpe", *extra], check=True, timeout=60)
    return path


class Server:
    def __init__(self, model, *flags, log=None, check=True):
        self.log_path = log
        self.log = open(log, "wb") if log else subprocess.DEVNULL
        self.process = subprocess.Popen([SERVER, "-m", model, "--port", "0", "-t", "1", *flags], stdin=subprocess.DEVNULL,
                                        stdout=subprocess.DEVNULL, stderr=self.log)
        self.port = None
        until = time.monotonic() + 60
        while check and self.port is None:
            found = re.search(rb"listening at http://\S+:(\d+)", open(log, "rb").read())
            self.port = int(found.group(1)) if found else None
            assert self.process.poll() is None and time.monotonic() < until, open(log, "rb").read()
            time.sleep(0.02)

    def connect(self, timeout=60):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def ask(self, path, body=None, headers=(), method=None, raw=None):
        """Status, answer (parsed where it is JSON), headers."""
        connection = self.connect()
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        connection.request(method or ("GET" if data is None else "POST"), path, data, dict(headers))
        response = connection.getresponse()
        text = response.read()
        connection.close()
        kind = response.getheader("Content-Type") or ""
        return response.status, json.loads(text) if kind.startswith("application/json") else text, response.headers

    def complete(self, **body):
        status, answer, _ = self.ask("/v1/completions", {"temperature": 0, **body})
        assert status == 200, answer
        return answer

    def chat(self, messages, **body):
        status, answer, _ = self.ask("/v1/chat/completions", {"temperature": 0, "messages": messages, **body})
        assert status == 200, answer
        return answer

    def stream(self, path, **body):
        """The events of a stream, parsed, without the [DONE] that must end it."""
        connection = self.connect()
        connection.request("POST", path, json.dumps({"temperature": 0, "stream": True, **body}))
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        assert response.status == 200, text
        events = [event for event in text.split("\n\n") if event and not event.startswith(":")]
        assert events[-1] == "data: [DONE]", text[-200:]
        return [json.loads(event.split("data: ", 1)[1]) for event in events[:-1]]

    def send(self, body, path="/v1/completions"):
        """A socket on which a request has been sent."""
        data = json.dumps({"temperature": 0, **body}).encode()
        s = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        s.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(data)) + data)
        return s

    def metrics(self):
        """Name with labels -> number."""
        status, text, _ = self.ask("/metrics")
        assert status == 200
        rows = [line.rsplit(" ", 1) for line in text.decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in rows}

    def wait_idle(self, seconds=30):
        until = time.monotonic() + seconds
        while True:
            m = self.metrics()
            if m["deeptutor_replies_running"] == 0 and m["deeptutor_requests_waiting"] == 0:
                return m
            assert time.monotonic() < until, m
            time.sleep(0.02)

    def stop(self, number=signal.SIGTERM):
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(timeout=60)
        if self.log is not subprocess.DEVNULL:
            self.log.close()
        return code


@contextlib.contextmanager
def serving(model, folder, *flags):
    server = Server(model, *flags, log=os.path.join(str(folder), "server.log"))
    try:
        yield server
    finally:
        code = server.stop()
        log = open(server.log_path, "rb").read()
        assert code == 0, log
        assert b"Sanitizer" not in log, log


def text_of(answer):
    choice = answer["choices"][0]
    return choice["message"]["content"] if "message" in choice else choice["text"]
