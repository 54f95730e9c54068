"""Programs that people use with such a server: the openai package, lm-evaluation-harness where it is installed, curl. On the real
small model where it is there, so that what they get can be judged."""
import json
import math
import os
import re
import shutil
import subprocess
import sys

import pytest

from server_support import MODEL, SERVER, TEXT, serving

pytestmark = pytest.mark.skipif(not os.access(SERVER, os.X_OK) or not os.path.exists(MODEL),
                                reason="DT_SERVER names no program, or DT_TEST_MODEL no model")
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


TASK = """
task: capitals
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
"""


def test_lm_eval(server, tmp_path):
    """Accuracy far above chance needs the logprobs of the prompt to be the right ones at the right places."""
    pytest.importorskip("lm_eval")
    capitals = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Russia": "Moscow", "Japan": "Tokyo", "Egypt": "Cairo",
                "England": "London", "Greece": "Athens"}
    names = list(capitals.values())
    data, folder = tmp_path / "data.jsonl", tmp_path / "tasks"
    folder.mkdir()
    data.write_text("".join(json.dumps({"question": f"The capital of {country} is the city of", "answer": 0, "choices": [
        f" {city}", f" {names[(i + 3) % 8]}", f" {names[(i + 5) % 8]}"]}) + "\n" for i, (country, city) in enumerate(capitals.items())))
    (folder / "capitals.yaml").write_text(TASK.format(data=data))
    subprocess.run([sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--tasks", "capitals", "--include_path", str(folder),
                    "--model_args", f"model={NAME},base_url=http://127.0.0.1:{server.port}/v1/completions,num_concurrent=4",
                    "--output_path", str(tmp_path / "out")], check=True, timeout=300, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    results = json.load(open(next((tmp_path / "out").rglob("*.json"))))
    assert results["results"]["capitals"]["acc,none"] >= 0.75, results["results"]


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
    script = os.path.join(os.path.dirname(TEXT), "chat.sh")
    result = subprocess.run(["bash", script, f"http://127.0.0.1:{server.port}", "Name the capital of France."], capture_output=True,
                            text=True, timeout=120)
    assert result.returncode == 0 and "Paris" in result.stdout, result.stderr


def test_examples_chat(server):
    """examples/chat_openai.py: the second turn finds the first one's cache."""
    pytest.importorskip("openai")
    script = os.path.join(os.path.dirname(TEXT), "chat_openai.py")
    result = subprocess.run([sys.executable, script, f"http://127.0.0.1:{server.port}"], capture_output=True, text=True, timeout=300,
                            input="What is the capital of France?\nAnd of Italy?\n")
    turns = re.findall(r"^\[(\d+) tokens read, (\d+) of them cached\]$", result.stdout, re.M)
    assert result.returncode == 0 and "Paris" in result.stdout and len(turns) == 2, result.stderr
    assert int(turns[1][1]) >= int(turns[0][0]) - 1
