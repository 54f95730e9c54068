"""./deeptutor-server from outside, on a tiny random model: what it answers, and what it does under load and with odd clients
(cases.md rows 12, 22, 24-26, 32-36). Invariant of every check on text: the same request given alone gets the same text."""
import http.client
import json
import math
import os
import re
import signal
import socket
import struct
import subprocess
import threading
import time

import pytest

from server_support import FLAGS, MAKE_MODEL, SANITIZED, SERVER, Server, make_tiny, serving, text_of

pytestmark = pytest.mark.skipif(not os.access(SERVER, os.X_OK) or not os.access(MAKE_MODEL, os.X_OK),
                                reason="DT_SERVER or DT_MAKE_MODEL names no program")

WORDS = "The quick brown fox jumps over the lazy dog while seven wizards wait. "


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny(str(tmp_path_factory.mktemp("model") / "tiny.gguf"))


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    with serving(model, tmp_path_factory.mktemp("server"), *FLAGS) as s:
        yield s


def user(text):
    return [{"role": "user", "content": text}]


# ---- answers ----

def test_models_health_metrics(server):
    status, answer, _ = server.ask("/v1/models")
    assert status == 200 and [m["id"] for m in answer["data"]] == ["tiny"]
    assert server.ask("/health")[:2] == (200, {"status": "ok"})
    status, page, headers = server.ask("/")
    assert status == 200 and headers["Content-Type"].startswith("text/html") and b"<" in page
    status, props, _ = server.ask("/props")
    assert status == 200 and props["n_layers"] == 2 and props["eviction"]["enabled"] is False
    status, text, headers = server.ask("/metrics")
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert "refused: not let into the queue, since it was full (429)" in text.decode()
    for line in text.decode().splitlines():
        assert line.startswith("# ") or math.isfinite(float(line.rsplit(" ", 1)[1])), line


def test_tokenize(server):
    status, answer, _ = server.ask("/tokenize", {"content": "Hello there"})
    assert status == 200 and all(isinstance(t, int) for t in answer["tokens"])
    assert server.ask("/detokenize", answer)[1]["content"] == "Hello there"
    assert server.ask("/tokenize", {"text": 1})[0] == 400
    for path, body in (("/tokenize", b'{"content": "x"'), ("/detokenize", b'{"tokens": [5]')):
        assert server.ask(path, raw=body + b', "a": [[], {"b": "[{"}]}')[0] == 200
        status, answer, _ = server.ask(path, raw=body + b', "a": [' + b"[]," * 100000 + b"1]}")
        assert status == 400 and "100000 lists" in answer["error"]["message"], answer
        status, answer, _ = server.ask(path, raw=body)
        assert status == 400 and "not JSON" in answer["error"]["message"], answer
    assert server.ask("/detokenize", {"tokens": []})[1]["content"] == ""
    for tokens in ([-1], [1 << 40], ["a"], {}, "a"):
        assert server.ask("/detokenize", {"tokens": tokens})[0] == 400


def test_stream_is_the_text(server):
    """Stops that begin in mid-token, never complete, or overlap: nothing of one is sent, nothing else is lost."""
    plain = server.complete(prompt=WORDS, max_tokens=40)
    text = text_of(plain)
    assert plain["usage"]["completion_tokens"] == 40 and plain["choices"][0]["finish_reason"] == "length"
    stops = [[], ["no such text"], [text[10:13]], [text[15:16], text[15:18]], [text[20:25] + "\x01never"], [text[-3:]]]
    for stop in stops:
        cut = min([text.index(s) for s in stop if s in text], default=len(text))
        answer = server.complete(prompt=WORDS, max_tokens=40, stop=stop)
        assert text_of(answer) == text[:cut], stop
        assert answer["choices"][0]["finish_reason"] == ("stop" if cut < len(text) else "length")
        pieces = server.stream("/v1/completions", prompt=WORDS, max_tokens=40, stop=stop)
        assert "".join(text_of(p) for p in pieces) == text[:cut], stop
        assert pieces[-1]["choices"][0]["finish_reason"] == answer["choices"][0]["finish_reason"]


def test_chat_stream(server):
    messages = user("Tell me something")
    whole = server.chat(messages, max_tokens=20)
    pieces = server.stream("/v1/chat/completions", messages=messages, max_tokens=20, stream_options={"include_usage": True})
    assert pieces[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(p["choices"][0]["delta"].get("content", "") for p in pieces[:-1]) == text_of(whole)
    assert pieces[-1]["choices"] == [] and pieces[-1]["usage"]["completion_tokens"] == 20
    assert pieces[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]


@pytest.mark.parametrize("shape", [
    {"content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}, {"content": "Hello", "name": "me"}])
def test_content_shapes(server, shape):
    plain = server.chat(user("Hello"), max_tokens=8)
    for role in ("user", "system", "developer", "assistant"):
        reference = server.chat([{"role": role, "content": "Hello"}], max_tokens=8)
        answer = server.chat([{"role": role, **shape}], max_tokens=8, stop=None, seed=None, tools=[], metadata={"a": 1}, unknown=2)
        assert text_of(answer) == text_of(reference)
        assert answer["usage"]["prompt_tokens"] == reference["usage"]["prompt_tokens"]
    assert text_of(server.chat([{"role": "user", "content": None}], max_tokens=2)) is not None
    assert plain["usage"]["prompt_tokens"] > 0


def test_choices_and_seeds(server):
    body = dict(prompt=WORDS, max_tokens=12, temperature=1.0, top_k=0, n=3, seed=7)
    answer = server.complete(**body)
    texts = [c["text"] for c in answer["choices"]]
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2] and len(set(texts)) == 3
    assert [c["text"] for c in server.complete(**body)["choices"]] == texts
    assert server.complete(**{**body, "n": 1})["choices"][0]["text"] == texts[0]
    assert server.complete(**{**body, "seed": 8})["choices"][0]["text"] == texts[1]
    for seed in (-2, -1 << 32, (1 << 63) - 1):  # whatever number it is, it names one text
        drawn = [text_of(server.complete(**{**body, "n": 1, "seed": seed})) for _ in range(2)]
        assert drawn[0] == drawn[1], seed
    streamed = ["", "", ""]
    for piece in server.stream("/v1/completions", **body):
        streamed[piece["choices"][0]["index"]] += piece["choices"][0]["text"]
    assert streamed == texts


def test_many_prompts(server):
    prompts = ["One", "Two " + WORDS, "Three"]
    alone = [text_of(server.complete(prompt=p, max_tokens=6)) for p in prompts]
    answer = server.complete(prompt=prompts, max_tokens=6)
    assert [c["text"] for c in answer["choices"]] == alone
    tokens = [server.ask("/tokenize", {"content": p, "add_special": True})[1]["tokens"] for p in prompts]
    assert [c["text"] for c in server.complete(prompt=tokens, max_tokens=6)["choices"]] == alone
    assert text_of(server.complete(prompt=tokens[1], max_tokens=6)) == alone[1]


def test_logprobs(server):
    answer = server.complete(prompt=WORDS, max_tokens=5, logprobs=3)
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == 5
    for token, value, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"]):
        assert math.isfinite(value) and value <= 0 and value == max(top.values()) and top[token] == value
    chat = server.chat(user("Hi"), max_tokens=5, logprobs=True, top_logprobs=2)
    content = chat["choices"][0]["logprobs"]["content"]
    assert [e["logprob"] == e["top_logprobs"][0]["logprob"] for e in content] == [True] * len(content)
    assert len(content) == chat["usage"]["completion_tokens"]
    pieces = server.stream("/v1/chat/completions", messages=user("Hi"), max_tokens=5, logprobs=True, top_logprobs=2)
    streamed = [e for p in pieces for e in (p["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [(e["token"], e["bytes"]) for e in streamed] == [(e["token"], e["bytes"]) for e in content]
    assert all(abs(a["logprob"] - b["logprob"]) < 1e-3 for a, b in zip(streamed, content))


def test_echo(server):
    """Logprobs of the prompt: the first null, the others those that the same tokens get when they are generated."""
    for n in (0, 1):
        answer = server.complete(prompt="Seven wizards", max_tokens=n, echo=True, logprobs=2)
        choice, prompt_tokens = answer["choices"][0], answer["usage"]["prompt_tokens"]
        logprobs = choice["logprobs"]
        assert choice["text"].startswith("Seven wizards") and len(logprobs["tokens"]) == prompt_tokens + n
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        assert all(math.isfinite(x) and x <= 0 for x in logprobs["token_logprobs"][1:])
    generated = server.complete(prompt="Seven wizards", max_tokens=6, logprobs=1)["choices"][0]
    tokens = server.ask("/tokenize", {"content": "Seven wizards", "add_special": True})[1]["tokens"]
    whole = server.complete(prompt="Seven wizards", max_tokens=6)
    ids = server.ask("/tokenize", {"content": "Seven wizards" + text_of(whole), "add_special": True})[1]["tokens"]
    scored = server.complete(prompt=ids, max_tokens=0, echo=True, logprobs=1)["choices"][0]["logprobs"]
    if ids[:len(tokens)] == tokens and len(ids) == len(tokens) + 6:
        for a, b in zip(scored["token_logprobs"][len(tokens):], generated["logprobs"]["token_logprobs"]):
            assert abs(a - b) < 1e-3


def test_streamed_echo(server):
    """The pieces' logprobs and offsets, put together, are those that come at once."""
    for prompt in ("Seven wizards", "\u6f22\u5b57 \u00e9 ok", [5, 6, 7, 8]):
        body = dict(prompt=prompt, max_tokens=6, echo=True, logprobs=1)
        whole = server.complete(**body)["choices"][0]
        pieces = [piece["choices"][0] for piece in server.stream("/v1/completions", **body)]
        assert "".join(piece["text"] for piece in pieces) == whole["text"]
        for name in ("tokens", "text_offset"):
            assert sum((piece["logprobs"][name] for piece in pieces), []) == whole["logprobs"][name], name
        for token, offset in zip(whole["logprobs"]["tokens"], whole["logprobs"]["text_offset"]):  # in characters
            assert whole["text"][offset:].startswith(token) or not token.isascii() or token.startswith(("<", "bytes:")), (token, offset)
            assert offset < len(whole["text"]) or token.startswith("<")


@pytest.mark.parametrize("vocabulary", [(), ("--bpe",)], ids=["spm", "bpe"])
def test_offsets_of_an_echo(tmp_path, vocabulary):
    """In characters of the text, whatever the tokenizer adds to it: a start token, a space in front."""
    model = make_tiny(str(tmp_path / "tiny.gguf"), "--vocab", "600", *vocabulary)
    with serving(model, tmp_path, *FLAGS) as server:
        for prompt in ("hello \u00e9 x", "\u6f22h> h"):
            choice = server.complete(prompt=prompt, max_tokens=3, echo=True, logprobs=1, temperature=0)["choices"][0]
            text, tokens, offsets = choice["text"], choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
            assert offsets == sorted(offsets) and offsets[-1] < len(text) and offsets[-3] == len(prompt)
            for token, offset in list(zip(tokens, offsets))[:-3]:
                in_character = token.startswith("bytes:") and not text[offset].isascii()
                assert (text[offset:].startswith((token, token.lstrip(" "))) or (token == "<s>" and offset == 0)
                        or in_character), (tokens, offsets)
            n_bytes = sum(len(character.encode()) for character in prompt if not character.isascii())
            assert sum(token.startswith("bytes:") for token in tokens[:-3]) == n_bytes


def test_no_tokens_of_several_replies(server):
    body = dict(prompt="Seven wizards", max_tokens=0, n=3)
    whole = server.complete(**body)["choices"]
    pieces = [piece["choices"][0] for piece in server.stream("/v1/completions", **body)]
    for choices in (whole, pieces):
        assert sorted((c["index"], c["text"], c["finish_reason"]) for c in choices) == [(i, "", "length") for i in range(3)]


def test_json_schema(server):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
    answer = server.chat(user("Give me JSON"), max_tokens=60, ignore_eos=False,
                         response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert answer["choices"][0]["finish_reason"] == "stop" and set(json.loads(text_of(answer))) == {"a"}
    answer = server.complete(prompt="x", max_tokens=20, ignore_eos=False, grammar='root ::= "yes" | "no"')
    assert text_of(answer) in ("yes", "no") and answer["choices"][0]["finish_reason"] == "stop"
    # a grammar in which too many ways are open at once is the request's fault
    status, answer, _ = server.ask("/v1/completions", {"prompt": "x", "max_tokens": 3, "json_schema": {
        "type": "string", "pattern": "^" + "a?" * 500 + "$"}})
    assert status == 400 and "grammar" in answer["error"]["message"], answer


# ---- bodies that must be refused ----

@pytest.mark.parametrize("body,word", [
    ({}, "messages"), ({"messages": []}, "messages"), ({"messages": "hi"}, "messages"), ({"messages": [1]}, "messages[0]"),
    ({"messages": [{"role": "king", "content": ""}]}, "role"), ({"messages": [{"role": "user", "content": 3}]}, "content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "text"),
    ({"messages": user("x"), "temperature": -1}, "temperature"), ({"messages": user("x"), "temperature": "hot"}, "temperature"),
    ({"messages": user("x"), "max_tokens": -1}, "max_tokens"), ({"messages": user("x"), "max_tokens": 1.5}, "max_tokens"),
    ({"messages": user("x"), "n": 0}, "n must"), ({"messages": user("x"), "n": 99}, "n must"),
    ({"messages": user("x"), "n": 5}, "at most 4 replies are computed at once here"),
    ({"messages": user("x"), "stop": [1]}, "stop"), ({"messages": user("x"), "stop": ["a"] * 17}, "stop"),
    ({"messages": user("x"), "stop": "x" * 300}, "stop"), ({"messages": user("x"), "tools": [{}]}, "tools"),
    ({"messages": user("x"), "tool_choice": "required"}, "tool_choice"), ({"messages": user("x"), "tool_choice": {}}, "tool_choice"),
    ({"messages": user("x"), "logit_bias": {"1": 2}}, "logit_bias"), ({"messages": user("x"), "presence_penalty": 1}, "presence"),
    ({"messages": user("x"), "top_logprobs": 3}, "logprobs"), ({"messages": user("x"), "logprobs": 3}, "logprobs"),
    ({"messages": user("x"), "grammar": "root ::= ("}, "grammar"), ({"messages": user("x"), "stream": "yes"}, "stream"),
    ({"messages": user("x"), "response_format": {"type": "xml"}}, "response_format"),
    ({"messages": user("x"), "response_format": {"type": "json_object", "schema": True}}, "schema must be an object"),
    ({"messages": user("x"), "n": 4, "grammar": 'root ::= "a"\n' + "#" * (2 << 20)}, "too long for 4 replies"),
    ({"messages": user("x"), "eviction": {"preset": "nonesuch"}}, "nonesuch"), ({"messages": user("x"), "eviction": 3}, "eviction"),
    ({"messages": user("x"), "eviction": {"presets": "docqa"}}, '"presets"; it takes enabled, preset'),
    ({"messages": user("x"), "eviction": {"max_cache_size": 1}}, "max_cache_size 1 leaves no room"),
    ({"messages": user("x"), "eviction": {"max_cache_size": 200, "min_cache_size": 900}}, "min_cache_size 900 is above"),
    ({"messages": user("x"), "eviction": {"config": {"0-99": {"policy": "no"}}}}, "policy"),
    ({"messages": user(WORDS * 100)}, "1024"),
])
def test_refused(server, body, word):
    status, answer, _ = server.ask("/v1/chat/completions", body)
    assert status == 400 and word in answer["error"]["message"], answer
    assert answer["error"]["type"] == "invalid_request_error" and "\n" not in answer["error"]["message"]
    assert "--" not in answer["error"]["message"]  # clients know fields, not flags


@pytest.mark.parametrize("raw", [
    b"", b"{", b"[]", b"nul", b'{"prompt": "\xff"}', b'{"prompt": "a\\u0000b"}', b'{"prompt": "\\ud800"}', b"[" * 100000,
    b'{"a":' * 5000 + b"1" + b"}" * 5000, b'{"max_tokens": 1e999, "prompt": "x"}', b'{"max_tokens": ' + b"9" * 400 + b', "prompt": "x"}',
    b'{"prompt": "x", "temperature": NaN}', b'{"prompt": [[]]}', b'{"prompt": [99999999]}', b'{"prompt": [-1]}', b'{"prompt": []}',
    b'{"prompt": {"a": 1}}', b'{"prompt": "x", "json_schema": ' + b'{"items":' * 60 + b"1" + b"}" * 60 + b"}",
    b'{"prompt": "x", "suffix": "y"}', b'{"prompt": "x", "logprobs": 99}', b'{"prompt": "x", "best_of": 3}',
    pytest.param(b'{"prompt": "x", "max_tokens": 1, "a": [' + b"[]," * 100000 + b"1]}", id="lists"),
    pytest.param(b'{"prompt": ["x", "y"], "max_tokens": 1, "n": 2, "grammar": "root ::= [a]\\n' + b"#" * (2 << 20) + b'"}', id="grammars"),
])
def test_hostile_bodies(server, raw):
    status, answer, _ = server.ask("/v1/completions", raw=raw)
    if raw == b'{"prompt": [[]]}':  # as an empty text: there is a start token to begin from, or there is none
        assert status in (200, 400)
    else:
        assert status == 400 and len(answer["error"]["message"]) > 10, answer
    assert server.ask("/health")[0] == 200


@pytest.mark.parametrize("raw,words", [
    (b'{"prompt": "a\\u0000b"}', "line 1, column 21 of the body: \\u0000, the NUL character, is in no text here; leave it out"),
    (b'{"prompt": "x",\n "a\\u0000b": 1}', "line 2, column 11 of the body: \\u0000, the NUL character, is in no text here"),
    (b'{"prompt": "x", "max_tokens": 99999999999999999999}', "whole ones end at 9223372036854775807"),
    (b'{"prompt": "x", "seed": -99999999999999999999}', "whole ones end at 9223372036854775807"),
    (b'{"prompt": "x", "temperature": 1e999}', "others at 1.79e308"),
    (b'{"prompt": "\xff"}', "not UTF-8; write the text in UTF-8"), (b'{"prompt": "\xc0\x80"}', "not UTF-8; write the text in UTF-8"),
    (b'{"prompt": "\\ud800"}', "half of a pair"), (b"[" * 65 + b"]" * 65, "nests more than 64 levels"),
])
def test_json_that_is_not_taken(server, raw, words):
    """A sentence of ours, that says where it is and what to do, instead of the parser's."""
    for path in ("/v1/completions", "/tokenize"):
        status, answer, _ = server.ask(path, raw=raw)
        assert status == 400 and words in answer["error"]["message"], answer
        assert "not JSON" not in answer["error"]["message"] and "near" not in answer["error"]["message"], answer


def test_a_key_twice(server):
    """The last one counts, as in the JSON readers of clients."""
    status, answer, _ = server.ask("/v1/completions", raw=b'{"prompt": "x", "max_tokens": 1, "temperature": 0, "max_tokens": 2}')
    assert status == 200 and answer["usage"]["completion_tokens"] == 2


def test_n_predict(server):
    """llama.cpp's name for max_tokens, where neither of OpenAI's is there."""
    for fields, n in (({"n_predict": 3}, 3), ({"n_predict": 3, "max_tokens": 2}, 2)):
        _, answer, _ = server.ask("/v1/completions", {"prompt": "x", "temperature": 0, "ignore_eos": True, **fields})
        assert answer["usage"]["completion_tokens"] == n


def test_the_token_itself_is_among_the_likeliest(server):
    """Of completions, as OpenAI's lists: one more where it isn't."""
    _, answer, _ = server.ask("/v1/completions", {"prompt": "x", "max_tokens": 24, "ignore_eos": True, "logprobs": 1, "temperature": 3,
                                                  "top_k": 0, "top_p": 1, "min_p": 0, "seed": 1})
    logprobs = answer["choices"][0]["logprobs"]
    assert {len(tops) for tops in logprobs["top_logprobs"]} >= {2}
    for token, logprob, tops in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"]):
        assert tops[token] == logprob and len(tops) <= 2


@pytest.mark.parametrize("path", [b"/%00", b"/%00abc", b"/health%00", b"/v1/models%00x?y=1"])
def test_nul_in_a_path(server, path):
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as s:
        s.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = s.makefile("rb").read()
    assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 404", b"HTTP/1.0 400")), answer[:200]
    assert server.ask("/health?a=%00")[0] == 200 and server.ask("/he%61lth")[0] == 200


def test_paths_and_methods(server):
    assert server.ask("/nonesuch")[0] == 404 and server.ask("/v1/completions")[0] == 405
    assert server.ask("/health", {}, method="POST")[0] == 405
    for path, instead in {"/completion": "/v1/completions", "/slots": "/metrics", "/slots/0?action=save": "/metrics",
                          "/v1/embeddings": "/v1/completions", "/infill": "/v1/completions", "/rerank": "text only",
                          "/apply-template": "/v1/chat/completions", "/slotsx": "docs/server.md"}.items():
        status, answer, _ = server.ask(path, {"prompt": "x"}, method="POST")
        assert status == 404 and instead in answer["error"]["message"] and answer["error"]["type"] == "not_found_error", answer
    status, answer, _ = server.ask("/v1/completions", {"prompt": "x", "model": "gpt-99"})
    assert status == 404 and "gpt-99" in answer["error"]["message"]
    assert server.ask("/v1/completions", {"prompt": "x", "model": "tiny", "max_tokens": 1})[0] == 200


def test_limits(server):
    """At the context's end, beyond it, and nothing to generate; the next request works (rows 24-26)."""
    tokens = [5] * 1024
    assert server.complete(prompt=tokens[:1023], max_tokens=9)["choices"][0]["finish_reason"] == "length"
    assert server.complete(prompt=tokens, max_tokens=1)["usage"]["completion_tokens"] == 1
    status, answer, _ = server.ask("/v1/completions", {"prompt": tokens + [5], "max_tokens": 1})
    assert status == 400 and "1025" in answer["error"]["message"] and "1024" in answer["error"]["message"]
    empty = server.complete(prompt="some text", max_tokens=0)
    assert text_of(empty) == "" and empty["choices"][0]["finish_reason"] == "length" and empty["usage"]["completion_tokens"] == 0
    assert server.complete(prompt="some text", max_tokens=3)["usage"]["completion_tokens"] == 3
    assert server.ask("/v1/completions", {"prompt": "", "max_tokens": 2})[0] in (200, 400)


# ---- conversations ----

def test_turns_compute_only_what_is_new(server):
    """Row 12: replies sent back as received, and as an application would trim them. Noise is the hard case: its text, tokenized again,
    gives other tokens than it was generated with."""
    for trim in (False, True):
        messages, retokenized = [{"role": "system", "content": "Be brief. " + str(trim) + WORDS * 4}], 0
        for turn in range(5):
            content = f"Question {turn}:  two  spaces,\nnewline, \U0001F600 and code();"
            messages.append({"role": "user", "content": content})
            answer = server.chat(messages, max_tokens=40, repeat_penalty=1.3)
            usage, reply = answer["usage"], text_of(answer)
            new = f"<|im_end|>\n<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
            n_new = len(server.ask("/tokenize", {"content": new})[1]["tokens"])
            computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
            assert turn == 0 or computed <= n_new + 3, (turn, computed, n_new)
            retokenized += len(server.ask("/tokenize", {"content": reply})[1]["tokens"]) != 40
            messages.append({"role": "assistant", "content": reply.strip() if trim else reply})
        assert retokenized > 0  # else the test shows nothing


def test_a_template_that_rewrites_history(tmp_path):
    """Row 12: twelve turns whose replies lose their thinking when the next turn is rendered: one rewind a turn, to where the reply began,
    named in the log, and no token before that is computed again. Without thinking nothing is."""
    template = ("{% for m in messages %}<|im_start|>{{ m.role }}\n"
                "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}<|im_end|>\n{% endfor %}"
                "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    model = make_tiny(str(tmp_path / "tiny.gguf"), "--ctx", "4096")
    with serving(model, tmp_path, "--chat-template", template, "-b", "64", "--kernel", "reference") as server:
        for reply in ("<think>hm, so what</think>Well.", "Well."):
            grammar = 'root ::= "' + reply + '"'
            messages, before = user(reply), os.path.getsize(server.log_path)
            for turn in range(12):
                answer = server.chat(messages, max_tokens=100, grammar=grammar)
                assert text_of(answer) == reply and answer["choices"][0]["finish_reason"] == "stop"
                usage = answer["usage"]
                new = f"Well.<|im_end|>\n<|im_start|>user\nTurn {turn}.<|im_end|>\n<|im_start|>assistant\n"
                computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
                n_new = len(server.ask("/tokenize", {"content": new})[1]["tokens"])
                assert turn == 0 or computed <= n_new + 3, (turn, computed, n_new)
                messages += [{"role": "assistant", "content": reply}, *user(f"Turn {turn}.")]
            with open(server.log_path, "rb") as log:
                log.seek(before)
                rewinds = [int(at) for at in re.findall(rb"session: rewound to token (\d+) of \d+", log.read())]
            assert len(rewinds) == (11 if "think" in reply else 0) and sorted(set(rewinds)) == rewinds, rewinds


def test_shared_beginning(server):
    """Conversations that begin alike share what they have in common, and don't disturb each other."""
    system = {"role": "system", "content": "Common instruction. " + WORDS * 6}
    first = server.chat([system, *user("Alpha")], max_tokens=10)
    second = server.chat([system, *user("Beta, rather")], max_tokens=10)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    again = server.chat([system, *user("Alpha")], max_tokens=10)
    assert text_of(again) == text_of(first)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == again["usage"]["prompt_tokens"] - 1


def test_eviction_of_a_request(server):
    """A budget that is never reached changes nothing; one that is says so."""
    prompt = WORDS * 10
    plain = server.complete(prompt=prompt, max_tokens=20)
    wide = server.complete(prompt=prompt, max_tokens=20, eviction={"preset": "docqa"})
    assert text_of(wide) == text_of(plain) and wide["eviction"] == {"name": "preset docqa", "evicted_tokens": 0}
    narrow = server.complete(prompt=prompt, max_tokens=20, eviction={"preset": "chat", "max_cache_size": 160, "min_cache_size": 100},
                             tlc=True)
    assert narrow["eviction"]["evicted_tokens"] > 0
    tlc = narrow["tlc"]
    assert tlc["phase"] == "done" and len(tlc["layers"]) == 2 and tlc["kv_bytes"] < tlc["kv_bytes_full"]
    for layer in tlc["layers"]:
        assert layer["max"] == 160 and 0 < layer["length"] <= 160 and len(layer["strip"]) == 128
        assert layer["strip"][0] > "0" and layer["strip"][-1] == "f" and "0" in layer["strip"]
        kept = sum(int(c, 16) for c in layer["strip"]) / 15 / 128
        assert abs(kept - layer["mean_length"] / tlc["strip_tokens"]) < 0.1
    config = {"0-1": {"policy": "local_window", "max_cache_size": 144, "min_cache_size": 100, "recent_window": 64}}
    assert server.complete(prompt=prompt, max_tokens=4, eviction={"config": config})["eviction"]["evicted_tokens"] > 0


def test_settings_are_told_once(model, tmp_path):
    """What the library says of settings that every request asks for, not with every request; of others, once more."""
    with serving(model, tmp_path, *FLAGS) as server:
        for size in (300, 300, 300, 280, 300):
            server.complete(prompt="x", max_tokens=1, eviction={"preset": "chat", "max_cache_size": size})
        log = open(server.log_path).read()
    assert log.count("TLC: max_cache_size 300 lowers") == 1 and log.count("TLC: max_cache_size 280 lowers") == 1, log


def test_tlc_events(server):
    events = server.stream("/v1/chat/completions", messages=user(WORDS * 8), max_tokens=16, tlc=True)
    tlc = [e for e in events if e.get("object") == "tlc"]
    assert tlc[0]["phase"] in ("prefill", "decode") and tlc[-1]["phase"] == "done"
    assert events[-1] is tlc[-1] and events[-2]["choices"][0]["finish_reason"] == "length"  # it counts all of the text
    assert all("strip" in layer for layer in tlc[-1]["layers"]) and tlc[-1]["generated_tokens"] == 16
    assert not any(e.get("object") == "tlc" for e in server.stream("/v1/chat/completions", messages=user("x"), max_tokens=4))


# ---- load and odd clients ----

def test_together_as_alone(server):
    """Row 35: answers of parallel users don't mix."""
    bodies = [dict(prompt=f"Secret {i}: " + WORDS * (1 + 2 * (i % 4)) + f"word{i}", max_tokens=12) for i in range(12)]
    alone = [text_of(server.complete(**b)) for b in bodies]
    results = [None] * len(bodies)

    def work(i):
        results[i] = server.complete(**bodies[i])

    for _ in range(2):
        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(bodies))]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert [text_of(r) for r in results] == alone


def test_together_as_alone_while_memory_is_short(model, tmp_path):
    """Row 35: 16 conversations with words of their own, room for four: they go to disk and come back while others are computed, and
    every answer is that of the same conversation alone. Some clients hang up first, and ask again."""
    flags = (*FLAGS, "--queue", "64", "-np", "4")
    turns = [f"Secret {i}, word{i}. " + WORDS * (1 + i % 5) for i in range(16)]

    def talk(server, i, out):
        text = ""
        for turn in range(3):
            text += (turns[i] if turn == 0 else f" And {turn}?")
            if (i + turn) % 5 == 0:
                server.send({"prompt": text, "max_tokens": 30, "stream": True}).close()
            text += text_of(server.complete(prompt=text, max_tokens=10))
        out[i] = text

    alone, together = {}, {}
    with serving(model, tmp_path, *flags) as server:
        for i in range(16):
            talk(server, i, alone)
    with serving(model, tmp_path, *flags, "--kv-memory", "1200K", "--session-dir", str(tmp_path / "sessions")) as server:
        threads = [threading.Thread(target=talk, args=(server, i, together)) for i in range(16)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        m = server.metrics()
        assert m["deeptutor_kv_bytes_peak"] <= 1200 << 10 and m['deeptutor_conversation_starts_total{from="disk"}'] > 0, m
    assert together == alone


def test_past_the_context(model, tmp_path):
    """Rows 24 and 25: where every layer evicts, a prompt of twice the context is read, and the answer tells how many tokens went; without
    max_tokens it ends at the server's own limit."""
    with serving(model, tmp_path, *FLAGS, "--max-tokens", "24", "--cache-eviction", "--max-cache-size", "200", "--min-cache-size",
                 "150") as server:
        for n in (1023, 1024, 1025, 2048):
            answer = server.complete(prompt=[5 + i % 7 for i in range(n)], ignore_eos=True)
            assert answer["usage"]["prompt_tokens"] == n and answer["usage"]["completion_tokens"] == 24
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["eviction"]["evicted_tokens"] >= 2 * (n - 200), answer["eviction"]


def test_instructions_of_four_conversations(model, tmp_path):
    """Row 4: a system prompt as long as the sinks is whole in every layer, turn after turn, in each of four conversations at once."""
    config = {"0-": {"policy": "importance_score", "max_cache_size": 200, "min_cache_size": 150, "recent_window": 32, "sink_tokens": 60}}
    last = {}

    def talk(server, i):
        messages = [{"role": "system", "content": f"Answer {i}: " + "be brief, " * 5}]
        for turn in range(8):
            messages.append({"role": "user", "content": f"Question {turn} of {i}? " + WORDS})
            answer = server.chat(messages, max_tokens=16, eviction={"config": config}, tlc=True)
            messages.append({"role": "assistant", "content": text_of(answer)})
        last[i] = answer

    with serving(model, tmp_path, *FLAGS, "-np", "4") as server:
        threads = [threading.Thread(target=talk, args=(server, i)) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    for i in range(4):
        assert last[i]["eviction"]["evicted_tokens"] > 0
        tlc = last[i]["tlc"]
        whole = 60 * 128 // tlc["strip_tokens"]  # cells that hold nothing but sinks
        assert whole > 2 and all(layer["strip"][:whole] == "f" * whole for layer in tlc["layers"]), tlc


def test_queue_is_bounded(server):
    """More than run and may wait at once: those beyond are told when to come again, and none hangs."""
    sockets = [server.send({"prompt": f"{i}", "max_tokens": 200}) for i in range(40)]
    answers = []
    for s in sockets:
        response = http.client.HTTPResponse(s)
        response.begin()
        answers.append((response.status, json.loads(response.read()), response.getheader("Retry-After")))
        s.close()
    refused = [a for a in answers if a[0] == 429]
    assert {a[0] for a in answers} == {200, 429} and len(refused) <= 24, [a[0] for a in answers]
    for _, answer, seconds in refused:
        assert answer["error"]["type"] == "rate_limit_error" and 1 <= int(seconds) <= 60
    server.wait_idle()
    assert server.ask("/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["close", "reset", "after_one"])
def test_hang_up(server, how, stream):
    """Row 32: a client that is gone frees its work: so much of it that it can't be done before."""
    before = server.metrics()
    for _ in range(3):
        s = server.send({"prompt": WORDS * 3, "max_tokens": 800, "n": 4, "ignore_eos": True, "stream": stream})
        if how == "after_one" and stream:
            s.recv(1)
        else:
            time.sleep(0.1)
        if how == "reset":
            s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        s.close()
    cancelled, until = 'deeptutor_requests_total{outcome="cancelled"}', time.monotonic() + 30
    after = server.wait_idle()
    while after[cancelled] - before[cancelled] < 3 and time.monotonic() < until:  # the last may not have been waiting yet
        after = server.wait_idle()
    more = {name: after[name] - before[name] for name in after}
    assert more[cancelled] == 3, more
    assert more["deeptutor_generated_tokens_total"] < 3 * 4 * 800, more


def test_hang_up_in_the_queue(server):
    """What waits behind others and loses its client never starts, and those that run aren't disturbed."""
    before = server.metrics()
    running = [server.send({"prompt": f"{i}", "max_tokens": 900, "ignore_eos": True, "stream": True}) for i in range(4)]
    for s in running:
        assert s.recv(1)
    waiting = [server.send({"prompt": f"waits {i}", "max_tokens": 5, "stream": i % 2 == 0}) for i in range(10)]
    until = time.monotonic() + 30
    while server.metrics()["deeptutor_requests_waiting"] < 10 and time.monotonic() < until:
        time.sleep(0.005)
    for s in waiting:
        s.close()
    while server.metrics()["deeptutor_requests_waiting"] > 0 and time.monotonic() < until:
        time.sleep(0.005)
    still = server.metrics()["deeptutor_replies_running"]
    for s in running:
        s.close()
    after = server.wait_idle()
    more = {name: after[name] - before[name] for name in after}
    assert still == 4 and more["deeptutor_prompt_tokens_total"] == 4, (still, more)
    assert more['deeptutor_requests_total{outcome="cancelled"}'] == 14, more


@pytest.mark.parametrize("stream", [False, True])
def test_half_close(server, stream):
    """Who only closes his sending half still gets the answer."""
    whole = server.complete(prompt=WORDS, max_tokens=300, ignore_eos=True)
    s = server.send({"prompt": WORDS, "max_tokens": 300, "ignore_eos": True, "stream": stream})
    s.shutdown(socket.SHUT_WR)
    data = b""
    while piece := s.recv(1 << 16):
        data += piece
    s.close()
    assert b" 200 OK" in data
    if stream:
        assert b"data: [DONE]" in data
    else:
        assert json.loads(data[data.rindex(b"\r\n\r\n") + 4:])["choices"] == whole["choices"]


def test_slow_reader(server):
    slow = server.send({"prompt": "x", "max_tokens": 800, "ignore_eos": True, "stream": True})
    assert slow.recv(1)
    quick = server.complete(prompt="quick", max_tokens=8)
    assert quick["usage"]["completion_tokens"] == 8
    slow.close()
    server.wait_idle()


def test_slow_readers_in_a_row(server):
    """Row 32: fifty clients, one after the other, take a byte now and then of a long answer and go: none leaves anything behind."""
    def seconds():
        begun = time.monotonic()
        server.complete(prompt="quick", max_tokens=8)
        return time.monotonic() - begun

    before, first = server.metrics(), min(seconds() for _ in range(3))
    for i in range(50):
        slow = server.send({"prompt": f"slow {i}", "max_tokens": 900, "ignore_eos": True, "stream": True, "n": 4})
        for _ in range(3):
            assert slow.recv(1)
            time.sleep(0.005)
        slow.close()
    after = server.wait_idle()
    cancelled, until = 'deeptutor_requests_total{outcome="cancelled"}', time.monotonic() + 30
    while after[cancelled] - before[cancelled] < 50 and time.monotonic() < until:
        after = server.wait_idle()
    assert after[cancelled] - before[cancelled] == 50 and after["deeptutor_conversations{state=\"active\"}"] == 0, after
    assert min(seconds() for _ in range(3)) < 3 * first + 0.2


def process_status(pid):
    """KiB of memory that is the process's own, in memory or swapped out, and seconds of processor time so far."""
    with open(f"/proc/{pid}/status") as f:
        kib = sum(int(line.split()[1]) for line in f if line.startswith(("RssAnon", "VmSwap")))
    with open(f"/proc/{pid}/stat") as f:
        fields = f.read().rsplit(")", 1)[1].split()
    return kib, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_no_growth(server):
    """Row 34: 2,000 unique prompts with logprobs, errors and hang-ups mixed in; memory and the work per request stay what they were."""
    pid = server.process.pid
    if not os.path.exists(f"/proc/{pid}/status"):
        pytest.skip("needs /proc")
    seen = []
    for i in range(2000):
        if i % 10 < 7:
            server.complete(prompt=f"unique {i}", max_tokens=2, logprobs=2, echo=i % 2 == 0)
        elif i % 10 < 9:
            assert server.ask("/v1/completions", raw=b"{" + b"x" * (i % 100))[0] == 400
        else:
            server.send({"prompt": f"gone {i}", "max_tokens": 50}).close()
        if i % 100 == 99:
            server.wait_idle()
            seen.append(process_status(pid))
    memory = [kib for kib, _ in seen]
    # under 1 KiB a request; idle conversations, of which 16 are kept, come and go
    assert SANITIZED or max(memory[2:]) - memory[1] < 1700, memory
    work = [after - before for (_, before), (_, after) in zip(seen, seen[1:])]
    assert sum(work[-5:]) < 1.5 * sum(work[1:6]) + 0.1, work


# ---- limits of memory, restart, stop ----

def test_memory_ceiling(model, tmp_path):
    """Conversations beyond the ceiling go to disk and come back; after a kill -9 what is on disk is found again."""
    folder = tmp_path / "sessions"
    flags = (*FLAGS, "-np", "8", "--queue", "64", "--kv-memory", "600K", "--session-dir", str(folder))
    prompts = [f"Conversation number {i}. " + WORDS * 6 for i in range(12)]
    server = Server(model, *flags, log=str(tmp_path / "first.log"))
    texts = [text_of(server.complete(prompt=p, max_tokens=10)) for p in prompts]
    m = server.metrics()
    assert m["deeptutor_kv_bytes_peak"] <= 600 << 10 and m['deeptutor_conversations{state="disk"}'] > 0, m
    for p, text in zip(prompts, texts):
        again = server.complete(prompt=p + text + " and then", max_tokens=4)
        usage = again["usage"]
        assert usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] < 40, usage
    assert server.metrics()["deeptutor_kv_bytes_peak"] <= 600 << 10
    # many at once that share their beginning: what is copied when they part is under the ceiling too
    threads = [threading.Thread(target=server.complete, kwargs=dict(prompt=WORDS * 3 + f"{i} " * 8, max_tokens=30)) for i in range(32)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    m = server.metrics()
    assert m['deeptutor_requests_total{outcome="failed"}'] == 0 and m["deeptutor_kv_bytes_peak"] <= 600 << 10, m
    status, answer, _ = server.ask("/v1/completions", {"prompt": WORDS * 4, "max_tokens": 700, "n": 4})
    assert status == 400 and "--kv-memory" in answer["error"]["message"]
    second = subprocess.run([SERVER, "-m", model, "--port", "0", *flags], capture_output=True, timeout=60)
    assert second.returncode == 2 and f"in use by process {server.process.pid}".encode() in second.stderr
    server.stop(signal.SIGKILL)
    with serving(model, tmp_path, *flags) as server:
        on_disk = server.metrics()['deeptutor_conversations{state="disk"}']
        assert on_disk > 0
        hits = 0
        for p, text in zip(prompts, texts):
            usage = server.complete(prompt=p + text + " and then", max_tokens=4)["usage"]
            hits += usage["prompt_tokens_details"]["cached_tokens"] > 100
        assert hits >= min(on_disk, 6), (hits, on_disk)


def test_disk_ceiling(model, tmp_path):
    """A folder that holds three conversations: the ones that are gone on with stay whole while others are put there and thrown out."""
    folder = tmp_path / "sessions"
    flags = (*FLAGS, "--kv-memory", "300K", "--session-dir", str(folder), "--disk-memory", "400K")
    prompts = [f"Conversation number {i}. " + WORDS * 6 for i in range(4)]
    with serving(model, tmp_path, *flags) as server:
        texts = [text_of(server.complete(prompt=p, max_tokens=10)) for p in prompts]
        alone = [text_of(server.complete(prompt=p + text + " and then", max_tokens=4))
                 for p, text in zip(prompts, texts)]
        for _ in range(3):
            for i in range(4):
                assert text_of(server.complete(prompt=prompts[i] + texts[i] + " and then", max_tokens=4)) == alone[i]
                assert sum(f.stat().st_size for f in folder.glob("*.session")) <= 400 << 10
        m = server.metrics()
        assert m['deeptutor_conversation_starts_total{from="disk"}'] > 0 and m["deeptutor_conversations_dropped_total"] > 0, m


def test_little_of_a_long_one_on_disk(model, tmp_path):
    """A short request that begins as a long conversation on disk does: others make room for loading it, and it stays to be gone on with."""
    long, other = [5 + i % 11 for i in range(900)], [6 + i % 13 for i in range(700)]
    with serving(model, tmp_path, *FLAGS, "--kv-memory", "400K", "--session-dir", str(tmp_path / "sessions")) as server:
        server.complete(prompt=long, max_tokens=2)
        server.complete(prompt=other, max_tokens=2)
        assert server.metrics()['deeptutor_conversations{state="disk"}'] == 1
        assert server.complete(prompt=long[:100] + [7] * 20, max_tokens=2)["usage"]["prompt_tokens_details"]["cached_tokens"] == 100
        again = server.complete(prompt=long + [9] * 5, max_tokens=2)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 900, again["usage"]
    assert b"can't be used" not in (tmp_path / "server.log").read_bytes()


def test_index_of_an_earlier_turn(model, tmp_path):
    """What a kill between writing a session and its index leaves: the turn can be asked again, from the cache."""
    folder = tmp_path / "sessions"
    flags = (*FLAGS, "--session-dir", str(folder))
    prompt = "A conversation. " + WORDS * 6
    with serving(model, tmp_path, *flags) as server:
        text = text_of(server.complete(prompt=prompt, max_tokens=10))
    (index,) = folder.glob("*.json")
    earlier = index.read_bytes()
    again = prompt + text + " and then"
    with serving(model, tmp_path, *flags) as server:
        expected = text_of(server.complete(prompt=again, max_tokens=30))
    assert [p.name for p in folder.glob("*.json")] == [index.name] and index.read_bytes() != earlier
    index.write_bytes(earlier)
    with serving(model, tmp_path, *flags) as server:
        for more in ("", ", once more"):
            answer = server.complete(prompt=again + more, max_tokens=30)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 400, answer["usage"]
            assert more or text_of(answer) == expected
    assert b"can't be used" not in (tmp_path / "server.log").read_bytes()


def test_index_that_nobody_wrote(model, tmp_path):
    """A pipe is not waited for, and what is larger than any index is not taken into memory; neither is touched."""
    folder = tmp_path / "sessions"
    folder.mkdir()
    os.mkfifo(folder / "conversation-0000000000000001.json")
    large = folder / "conversation-0000000000000002.json"
    large.write_text('{"tokens":[' + "1," * (20 << 20) + "1]}")
    with serving(model, tmp_path, *FLAGS, "--session-dir", str(folder)) as server:
        status = open(f"/proc/{server.process.pid}/status").read()
        assert int(re.search(r"VmHWM:\s*(\d+) kB", status).group(1)) < 400 << 10
        server.complete(prompt=WORDS, max_tokens=4)
    assert large.stat().st_size > 40 << 20 and len(list(folder.iterdir())) > 2


def test_stop(model, tmp_path):
    """SIGTERM: running replies end, waiting ones are refused, idle conversations are saved, exit 0."""
    server = Server(model, *FLAGS, "-np", "1", "--session-dir", str(tmp_path / "s"), log=str(tmp_path / "log"))
    server.complete(prompt=WORDS * 3, max_tokens=3)
    running = server.send({"prompt": "x", "max_tokens": 600, "ignore_eos": True})
    until = time.monotonic() + 30
    while server.metrics()["deeptutor_replies_running"] == 0 and time.monotonic() < until:
        time.sleep(0.01)
    waiting = server.send({"prompt": "y", "max_tokens": 5})
    while server.metrics()["deeptutor_requests_waiting"] == 0 and time.monotonic() < until:
        time.sleep(0.01)
    server.process.send_signal(signal.SIGTERM)
    assert b" 503 " in waiting.recv(4096)
    data = b""
    while piece := running.recv(1 << 16):
        data += piece
    assert b" 200 OK" in data and b'"completion_tokens":600' in data
    assert server.process.wait(timeout=60) == 0
    assert len([f for f in os.listdir(tmp_path / "s") if f.endswith(".session")]) >= 1


def test_stop_in_a_first_step(tmp_path):
    """What an idle server has just begun has its time too: a prompt that is read in one long step."""
    model = make_tiny(str(tmp_path / "slow.gguf"), "--layers", "4")
    server = Server(model, *FLAGS, "-b", "1024", log=str(tmp_path / "log"))
    running = server.send({"prompt": [5 + i % 11 for i in range(1000)], "max_tokens": 2})
    until = time.monotonic() + 30
    while server.metrics()["deeptutor_prompt_tokens_total"] == 0 and time.monotonic() < until:
        time.sleep(0.002)
    assert server.metrics()["deeptutor_steps_total"] == 0  # else the test shows nothing
    server.process.send_signal(signal.SIGTERM)
    data = b""
    while piece := running.recv(1 << 16):
        data += piece
    assert b" 200 OK" in data and b'"completion_tokens":2' in data, data
    assert server.process.wait(timeout=60) == 0


def test_too_many_connections(model, tmp_path):
    """Who comes when all places are taken by connections that say nothing is told so, and served as soon as they go."""
    with serving(model, tmp_path, *FLAGS, "-np", "1", "--queue", "1") as server:
        idle = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(66)]
        assert server.ask("/health")[0] == 503  # the 67th
        status, answer, headers = server.ask("/v1/completions", {"prompt": "x", "max_tokens": 1})
        assert status == 503 and "too many connections" in answer["error"]["message"] and headers["Retry-After"]
        for s in idle:
            s.close()
        until = time.monotonic() + 30
        while (status := server.ask("/health")[0]) != 200 and time.monotonic() < until:
            time.sleep(0.05)
        assert status == 200 and server.complete(prompt="x", max_tokens=1)


def test_stop_lets_answers_go(model, tmp_path):
    """The last bytes of an answer that ends the server's work arrive: a long one, read late."""
    server = Server(model, *FLAGS, "-np", "1", log=str(tmp_path / "log"))
    running = server.send({"prompt": WORDS * 12, "max_tokens": 60, "logprobs": 5, "echo": True})
    running.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    until = time.monotonic() + 30
    while server.metrics()["deeptutor_replies_running"] == 0 and time.monotonic() < until:
        time.sleep(0.002)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    data = b""
    while piece := running.recv(1 << 12):
        data += piece
    head, body = data.split(b"\r\n\r\n", 1)
    assert b" 200 OK" in head and len(body) == int(re.search(rb"Content-Length: (\d+)", head).group(1)) > 1 << 16, data[-300:]
    assert server.process.wait(timeout=60) == 0


def test_names_that_are_not_utf8(model, tmp_path):
    """Of the model's file and of the one with settings: answers hold them all the same, and a client may ask for the one it was told."""
    folder = os.fsencode(tmp_path)
    path, config = folder + b"/t\xe9.gguf", folder + b"/e\xe9.json"
    os.symlink(model, path)
    with open(config, "w") as file:
        json.dump({"0-": {"policy": "local_window", "max_cache_size": 64, "min_cache_size": 16, "recent_window": 12}}, file)
    with serving(path, tmp_path, *FLAGS, "--cache-eviction", "--eviction-config", config) as server:
        name = server.ask("/v1/models")[1]["data"][0]["id"]
        assert name == "t\ufffd" and server.ask("/props")[1]["model"] == name
        answer = server.complete(prompt=WORDS, max_tokens=1, model=name, tlc=True)
        assert answer["model"] == name
        for told in (answer["eviction"]["name"], answer["tlc"]["eviction"]["name"], server.ask("/props")[1]["eviction"]["name"]):
            assert told.endswith("e\ufffd.json")
        assert [p["model"] for p in server.stream("/v1/completions", prompt="x", max_tokens=1)][0] == name
    with serving(model, tmp_path, *FLAGS, "--alias", b"a\xe9") as server:
        assert server.ask("/v1/models")[1]["data"][0]["id"] == "a\ufffd"


def test_no_override(model, tmp_path):
    with serving(model, tmp_path, *FLAGS, "--no-eviction-override") as server:
        status, answer, _ = server.ask("/v1/completions", {"prompt": "x", "eviction": {"preset": "chat"}})
        assert status == 400 and "eviction" in answer["error"]["message"]
        assert server.ask("/v1/completions", {"prompt": "x", "max_tokens": 1, "eviction": None})[0] == 200


def test_key_and_body(model, tmp_path):
    key = tmp_path / "key"
    key.write_text("s3cret\n")
    with serving(model, tmp_path, *FLAGS, "--api-key-file", str(key), "--max-body", "20K") as server:
        assert server.ask("/health")[0] == 200 and server.ask("/")[0] == 200
        for headers in ({}, {"Authorization": "Bearer s3cre"}, {"Authorization": "Bearer s3cret2"}, {"Authorization": "s3cret"},
                        {"Authorization": "Bearer "}):
            assert server.ask("/v1/models", headers=headers)[0] == 401
            assert server.ask("/v1/completions", {"prompt": "x"}, headers=headers)[0] == 401
        good = {"Authorization": "Bearer s3cret"}
        assert server.ask("/v1/models", headers=good)[0] == 200
        assert server.ask("/v1/completions", {"prompt": "x", "max_tokens": 1}, headers=good)[0] == 200
        assert server.ask("/v1/completions", {"prompt": "x" * 30000}, headers=good)[0] == 413
        assert server.ask("/v1/models", headers={"Authorization": "bearer s3cret"})[0] == 200
        for length in (2**63 - 2, 2**63, 2**64 - 2):  # however many digits
            with socket.create_connection(("127.0.0.1", server.port), timeout=30) as peer:
                peer.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer s3cret\r\nContent-Length: %d\r\n\r\n" % length)
                assert peer.recv(100).startswith((b"HTTP/1.1 413", b"HTTP/1.1 400"))
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as peer:  # a body without end is not read for ever
            peer.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer s3cret\r\nTransfer-Encoding: chunked\r\n\r\n")
            with pytest.raises(OSError):
                for _ in range(200):
                    peer.sendall(b"100000\r\n" + b"x" * (1 << 20) + b"\r\n")
        assert server.ask("/health")[0] == 200
    key.write_bytes(b"ab\0cd\n")
    result = subprocess.run([SERVER, "-m", model, "--api-key-file", str(key)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2 and "NUL" in result.stderr


@pytest.mark.parametrize("flags,word", [
    (("--port", "99999"), "--port"), (("--port", "-1"), "--port"), (("-np", "0"), "-np"), (("--api-key", ""), "--api-key"),
    (("--host", "no such host"), "--host"), (("--kv-memory", "x"), "--kv-memory"), (("--nonesuch",), "--nonesuch"),
    (("--prefill", "streaming"), "--cache-eviction"), (("--kv-memory", "20K"), "--kv-memory"),
    # what no request could be answered with
    (("--grammar", "x"), "grammar"), (("-j", "{"), "JSON schema"), (("--chat-template", "nosuch"), "chat template"),
    (("--chat-template", "{%"), "chat template"), (("--alias", ""), "--alias")])
def test_bad_usage(model, flags, word):
    result = subprocess.run([SERVER, "-m", model, *flags], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2 and result.stderr.splitlines()[-1].startswith("error: ") and word in result.stderr
    assert result.stdout == ""


# ---- starting ----

def test_memory_that_holds_nothing(model, tmp_path):
    """A server that would refuse everything doesn't start; the size that it names serves a short text, and the log tells how long one
    may get."""
    def start(size):
        return [SERVER, "-m", model, "--port", "0", "-t", "1", *FLAGS, "--kv-memory", size]
    refused = subprocess.run(start("1K"), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2 and "holds no conversation" in refused.stderr
    least = re.search(r"give at least --kv-memory (\d+K)", refused.stderr).group(1)
    with serving(model, tmp_path, *FLAGS, "--kv-memory", least) as s:
        longest = int(re.search(rb"holds a conversation of (\d+) tokens, not", open(s.log_path, "rb").read()).group(1))
        assert s.complete(prompt=[5] * (longest - 4), max_tokens=4)["usage"]["completion_tokens"] == 4
    with serving(model, tmp_path, *FLAGS) as s:
        log = open(s.log_path, "rb").read()
        assert re.search(rb"KV memory: at most [0-9.]+ MiB; a conversation of \d+ tokens takes up to [0-9.]+ KiB", log), log
        assert log.count(b"KV memory:") == 1, log
