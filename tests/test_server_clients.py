"""Programs that people use with such a server, most of them as examples/ shows: the openai package, lm-evaluation-harness and wrk where
they are installed, curl. On the real small model where it is there, so that what they get can be judged."""
import json
import math
import os
import re
import shutil
import subprocess
import sys

import pytest

from server_support import MODEL, SANITIZED, SERVER, TEXT, serving

pytestmark = pytest.mark.skipif(not os.access(SERVER, os.X_OK) or not os.path.exists(MODEL),
                                reason="DT_SERVER names no program, or DT_TEST_MODEL no model")
EXAMPLES = os.path.dirname(TEXT)
NAME = os.path.basename(MODEL)[:-len(".gguf")]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(MODEL, tmp_path_factory.mktemp("server"), "-np", "4", "--temp", "0") as s:
        yield s


def test_openai(server):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    assert [m.id for m in client.models.list()] == [NAME]
    messages = [{"role": "user", "content": "Name the capital of France."}]
    whole = client.chat.completions.create(model=NAME, messages=messages, max_tokens=30, temperature=0)
    text = whole.choices[0].message.content
    assert "Paris" in text and whole.choices[0].finish_reason == "stop"
    pieces = list(client.chat.completions.create(model=NAME, messages=messages, max_tokens=30, temperature=0, stream=True,
                                                 stream_options={"include_usage": True}))
    assert "".join(p.choices[0].delta.content or "" for p in pieces if p.choices) == text
    assert pieces[-1].usage.prompt_tokens_details.cached_tokens >= whole.usage.prompt_tokens - 1
    scored = client.chat.completions.create(model=NAME, messages=messages, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3)
    for entry in scored.choices[0].logprobs.content:
        assert entry.logprob == entry.top_logprobs[0].logprob and len(entry.top_logprobs) == 3
    plain = client.completions.create(model=NAME, prompt="Paris is the capital of", max_tokens=3, temperature=0, logprobs=1)
    assert plain.choices[0].text and len(plain.choices[0].logprobs.tokens) == 3
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=NAME, messages=[])
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-99", messages=messages)


def run_example(name, *args, stdin=""):
    """What examples/NAME prints."""
    command = [sys.executable] if name.endswith(".py") else ["bash"]
    result = subprocess.run([*command, os.path.join(EXAMPLES, name), *args], input=stdin, capture_output=True, text=True, timeout=300,
                            env={**os.environ, "PATH": os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]})
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_openai_examples(server):
    pytest.importorskip("openai")
    url = f"http://127.0.0.1:{server.port}"
    chat = run_example("chat_openai.py", url, stdin="Name the capital of France.\nAnd of Italy?\n")
    told = [line for line in chat.splitlines() if line.startswith("[")]
    assert "Paris" in chat and len(told) == 2 and int(told[1].split(" tokens read, ")[1].split()[0]) > 20, chat
    lines = run_example("logprobs_openai.py", url).splitlines()
    assert any("Paris" in line and int(line.split("%")[0]) > 50 for line in lines), lines


def test_lm_eval(server, tmp_path):
    """Accuracy far above chance needs the logprobs of the prompt to be the right ones at the right places."""
    pytest.importorskip("lm_eval")
    run_example("lm_eval.sh", f"http://127.0.0.1:{server.port}", str(tmp_path / "out"))
    results = json.load(open(next((tmp_path / "out").rglob("*.json"))))
    assert results["results"]["capitals"]["acc,none"] >= 0.75, results["results"]


def test_wrk(server):
    if not shutil.which("wrk"):
        pytest.skip("no wrk")
    before = server.metrics()['deeptutor_requests_total{outcome="done"}']
    result = subprocess.run(["wrk", "-t", "1", "-c", "8", "-d", "20s" if SANITIZED else "2s", "--timeout", "60s", "-s",
                             os.path.join(EXAMPLES, "load.lua"), f"http://127.0.0.1:{server.port}"], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and "Requests/sec" in result.stdout and "Non-2xx" not in result.stdout, result.stdout + result.stderr
    assert "Socket errors" not in result.stdout
    m = server.wait_idle()  # those that wrk left in the middle end with their connections
    assert m['deeptutor_requests_total{outcome="done"}'] > before and m['deeptutor_requests_total{outcome="failed"}'] == 0


def test_echo_is_what_eval_measures(server):
    """Row 36: the prompt's logprobs are those that the library computes for the same tokens, token by token."""
    prompt = open(TEXT).read()[:400]
    answer = server.complete(prompt=prompt, max_tokens=1, echo=True, logprobs=1)
    logprobs = answer["choices"][0]["logprobs"]
    n = answer["usage"]["prompt_tokens"]
    tokens = server.ask("/tokenize", {"content": prompt, "add_special": True})[1]["tokens"]
    assert n == len(tokens) and len(logprobs["token_logprobs"]) == n + 1
    for i in (3, n // 2, n - 1):  # by another way: what comes after the tokens before it
        top = server.complete(prompt=tokens[:i], max_tokens=1, logprobs=20)["choices"][0]["logprobs"]["top_logprobs"][0]
        value, name = logprobs["token_logprobs"][i], logprobs["tokens"][i]
        assert math.isfinite(value)
        if name in top:
            assert abs(top[name] - value) < 0.2, (i, name)
        else:
            assert value <= min(top.values()) + 0.2


def test_curl(server):
    if not shutil.which("curl"):
        pytest.skip("no curl")
    assert "Paris" in run_example("chat.sh", f"http://127.0.0.1:{server.port}", "Name the capital of France.")


def test_curl_with_a_key(tmp_path, monkeypatch):
    if not shutil.which("curl"):
        pytest.skip("no curl")
    with serving(MODEL, tmp_path, "--api-key", "s3cret") as server:
        url = f"http://127.0.0.1:{server.port}"
        refused = subprocess.run(["bash", os.path.join(EXAMPLES, "chat.sh"), url], capture_output=True, text=True, timeout=60)
        assert refused.returncode != 0 and "error: the API key is missing or wrong" in refused.stderr and refused.stdout == ""
        monkeypatch.setenv("API_KEY", "s3cret")
        assert "Paris" in run_example("chat.sh", url)
