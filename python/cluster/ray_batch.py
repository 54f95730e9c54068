#!/usr/bin/env python3
"""The jobs of ./deeptutor-batch over a Ray cluster: one engine per worker, the same files, the same lines.

    pip install ray . && python python/cluster/ray_batch.py -m /shared/model.gguf -i jobs.jsonl -o results.jsonl --workers 8

The model's path must be good on every machine. Rows go to whichever worker is free; a worker that is lost is started again by Ray, and
its row with it. Every result is written as a line when it is there, and the same command goes on where one was stopped. What a row may
hold here: messages or prompt, max_tokens, temperature, top_p, top_k, min_p, repeat_penalty, repeat_last_n, seed, stop, ignore_eos,
json_schema, grammar, response_format.

Invariant: each row of the input has one line in the output, which carries its number as "line", however often workers or this program
were lost.
"""
import argparse
import json
import os
import sys
import time

SAMPLING = {"temperature": "temp", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "seed": "seed", "grammar": "grammar",
            "repeat_penalty": "repeat_penalty", "repeat_last_n": "repeat_last_n", "ignore_eos": "ignore_end"}
# what ./deeptutor-batch takes of each; beyond that the library would take a number for something else
NUMBERS = {"temperature": (0, 100), "top_p": (0, 1), "min_p": (0, 1), "repeat_penalty": (0.01, 100)}
WHOLE_NUMBERS = {"top_k": (-2**31, 2**31 - 1), "repeat_last_n": (-1, 2**31 - 1), "seed": (-2**63, 2**63 - 1), "max_tokens": (0, 2**31 - 1),
                 "max_completion_tokens": (0, 2**31 - 1)}
REFUSED = ("tools", "functions", "logit_bias", "logprobs", "echo", "suffix", "audio", "prediction", "images", "frequency_penalty",
           "presence_penalty", "eviction")


class BadRow(Exception):
    """Why a row can't be computed."""


# ---- rows -----------------------------------------------------------------------------------------


def read_row(number, text):
    """A row as {"line", "form", "id", "body", "chat"}, or with "error"."""
    row = {"line": number, "form": "openai", "id": None}
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        return {**row, "error": f"the row is not JSON: {error}"}
    if not isinstance(data, dict):
        return {**row, "error": "the row is not a JSON object"}
    if "body" in data or "custom_id" in data:
        url = data.get("url", "/v1/chat/completions")
        row.update(form="openai", id=data.get("custom_id"), body=data.get("body"), chat=url == "/v1/chat/completions")
        if not isinstance(row["body"], dict):
            row["error"] = "the row has no body"
        elif url not in ("/v1/chat/completions", "/v1/completions"):
            row["error"] = f"url must be /v1/chat/completions or /v1/completions, not {url}"
        elif not isinstance(row["id"], str):
            row["error"] = "custom_id is missing, or no string"
    else:
        row.update(form="short", id=data.get("id"), body=data, chat="messages" in data)
        if "messages" not in data and "prompt" not in data:
            row["error"] = "the row has neither a body, nor a prompt, nor messages"
        elif row["id"] is None:
            row["error"] = "id is missing"
    return row


def read_rows(path):
    seen = {}
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            row = read_row(number, line.lstrip(b"\xef\xbb\xbf").strip().decode("utf-8", "surrogateescape"))
            key = json.dumps(row["id"])
            if row["id"] is not None and key in seen:
                row["error"] = f"its id is that of row {seen[key]}; give each row its own"
            seen.setdefault(key, number)
            yield row


def answer_line(row, answer):
    """The line of ./deeptutor-batch for a row: answer is {"text", "finish_reason", "usage"} or {"error"}."""
    if "error" in answer:
        message = answer["error"].encode("utf-8", "replace").decode()
        if row["form"] == "short":
            return {"id": row["id"], "error": message, "line": row["line"]}
        return {"custom_id": row["id"], "response": None, "error": {"code": "400", "message": message}, "line": row["line"]}
    if row["form"] == "short":
        return {"id": row["id"], **answer, "line": row["line"]}
    choice = {"index": 0, "logprobs": None, "finish_reason": answer["finish_reason"]}
    if row["chat"]:
        choice["message"] = {"role": "assistant", "content": answer["text"]}
    else:
        choice["text"] = answer["text"]
    body = {"object": "chat.completion" if row["chat"] else "text_completion", "choices": [choice], "usage": answer["usage"]}
    return {"id": f"batch-{row['line']}", "custom_id": row["id"],
            "response": {"status_code": 200, "request_id": f"batch-{row['line']}", "body": body}, "error": None, "line": row["line"]}


def read_done(path):
    """Rows that an earlier run has done, number -> id; a last line that was cut off is removed."""
    done, end = {}, 0
    if not os.path.exists(path):
        return done
    with open(path, "rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                data = json.loads(line)
            except (ValueError, RecursionError):
                data = None
            if not isinstance(data, dict) or not isinstance(data.get("line"), int):
                raise SystemExit(f"error: {path} is there already and holds something else; name another file with -o")
            done[data["line"]] = data.get("custom_id", data.get("id"))
            end += len(line)
    os.truncate(path, end)
    return done


# ---- the engine of a worker -----------------------------------------------------------------------


def flatten(content):
    if isinstance(content, list):
        if any(not isinstance(part, dict) or not isinstance(part.get("text"), str) for part in content):
            raise BadRow("only parts of type text are supported")
        return "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise BadRow("content must be a string or a list of parts")
    return content or ""


def check_numbers(body):
    for rows, kinds, what in ((NUMBERS, (int, float), "number"), (WHOLE_NUMBERS, (int,), "whole number")):
        for name, (least, most) in rows.items():
            value = body.get(name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most):
                raise BadRow(f"{name} must be a {what} from {least} to {most}")


def seed_of(value):
    """A row's seed in the 32 bits that a sampler takes, as deeptutor-batch brings it there; -1 is a random one."""
    rest = abs(value) % (2**32 - 1)
    return -1 if value == -1 else (rest if value >= 0 else -rest) % 2**32


def sampling_of(body, defaults):
    settings = dict(defaults)
    for name, ours in SAMPLING.items():
        if body.get(name) is not None:
            settings[ours] = seed_of(body[name]) if name == "seed" else body[name]
    schema = body.get("json_schema")
    form = body.get("response_format") or {}
    if form.get("type") == "json_schema":
        schema = form.get("json_schema", {}).get("schema", form.get("json_schema"))
    elif form.get("type") == "json_object":
        schema = form.get("schema") or {"type": "object"}
    if schema is not None:
        settings["json_schema"] = json.dumps(schema)
    return settings


class Engine:
    """A model and one session on it: what rows have in common at their beginning is computed once, as long as nothing was evicted."""

    def __init__(self, path, options):
        import deeptutor

        self.deeptutor = deeptutor
        self.model = deeptutor.Model(path)
        self.options = options
        self.session = deeptutor.Session(self.model, **options["session"])

    def prompt_of(self, row):
        body = row["body"]
        for name in REFUSED:
            if body.get(name):
                raise BadRow(f"{name} is not supported here; leave it out")
        if body.get("n") not in (None, 1) or body.get("best_of") not in (None, 1):
            raise BadRow("n and best_of must be 1 here")
        if not row["chat"]:
            if not isinstance(body.get("prompt"), str):
                raise BadRow("prompt must be a string")
            return self.model.tokenize(body["prompt"])
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) and "role" in m for m in messages):
            raise BadRow("messages must be a list of messages")
        turns = [{"role": str(m["role"]), "content": flatten(m.get("content"))} for m in messages]
        return self.model.tokenize(self.model.render_chat(turns, self.options["template"]))

    def generate(self, row):
        body, text = row["body"], ""
        prompt = self.prompt_of(row)
        check_numbers(body)
        given = (body.get("max_completion_tokens"), body.get("max_tokens"))
        most = next((n for n in given if n is not None), self.options["max_tokens"])
        stops = body.get("stop") or []
        stops = [stops] if isinstance(stops, str) else stops
        n, data, finish = 0, b"", "stop"
        for token in self.session.generate_tokens(prompt, most, **sampling_of(body, self.options["sampling"])):
            n += 1
            data += self.model.token_bytes(token)
            text = data.decode("utf-8", "replace")
            found = [text.index(s) for s in stops if s and s in text]
            if found:
                text = text[:min(found)]
                break
        else:
            ended = self.session.stats["n_tokens"] >= self.session.stats["n_ctx"] or n >= most
            finish = "length" if ended else "stop"
        usage = {"prompt_tokens": len(prompt), "completion_tokens": n, "total_tokens": len(prompt) + n,
                 "prompt_tokens_details": {"cached_tokens": self.session.last_sync["reused_tokens"]}}
        return {"text": text.replace("\0", "\ufffd"), "finish_reason": finish, "usage": usage}

    def run(self, row):
        """Never fails for what a row asks: then the answer says why."""
        try:
            return self.generate(row)
        except (self.deeptutor.Error, BadRow) as error:
            return {"error": str(error)}
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            return {"error": f"the row asks for something of the wrong kind: {error}"}


# ---- the run --------------------------------------------------------------------------------------


def write_line(file, line):
    file.write(json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
    file.flush()


def run_rows(rows, engines, file, total, quiet):
    """Gives each engine a row, and the next one when its answer is there."""
    underway, free, done, begun = {}, list(engines), 0, time.monotonic()
    for row in rows:
        if "error" in row:
            write_line(file, answer_line(row, row))
            done += 1
            continue
        while not free:
            done += collect(underway, free, file)
        engine = free.pop()
        underway[engine.run.remote(row)] = (row, engine)
        if not quiet and sys.stderr.isatty():
            left = (time.monotonic() - begun) / done * (total - done) if done else 0
            print(f"\r{done}/{total} rows  {left:.0f} s left\033[K", end="", file=sys.stderr)
    while underway:
        done += collect(underway, free, file)
    if not quiet and sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    return done


def collect(underway, free, file):
    import ray

    ready, _ = ray.wait(list(underway), num_returns=1)
    for reference in ready:
        row, engine = underway.pop(reference)
        write_line(file, answer_line(row, ray.get(reference)))
        free.append(engine)
    return len(ready)


def arguments():
    parser = argparse.ArgumentParser(description="The jobs of ./deeptutor-batch over a Ray cluster.")
    parser.add_argument("-m", "--model", required=True, help="GGUF file, at the same path on every machine")
    parser.add_argument("-i", "--input", required=True, help="jobs, one JSON object a line")
    parser.add_argument("-o", "--output", required=True, help="results, a line each")
    parser.add_argument("--address", help="of the cluster, such as auto (none: Ray on this machine)")
    parser.add_argument("--workers", type=int, default=0, help="engines (as many as the cluster has room for)")
    parser.add_argument("-t", "--threads", type=int, default=1, help="threads of each engine (1)")
    parser.add_argument("-n", "--max-tokens", type=int, default=1024, help="length of a reply where the row gives none (1024)")
    parser.add_argument("--temp", type=float, help="temperature where the row gives none (0.8)")
    parser.add_argument("--ignore-eos", action="store_true", help="never end by itself")
    parser.add_argument("--chat-template", help="a built-in template, or Jinja source (the model's own)")
    parser.add_argument("--eviction", help="preset: chat, docqa, code or summary (nothing is evicted)")
    parser.add_argument("--max-cache-size", type=int, default=0, help="tokens that a layer may keep (the preset's)")
    parser.add_argument("-c", "--ctx-size", type=int, default=0, help="longest conversation in tokens (the model's own)")
    parser.add_argument("--quiet", action="store_true", help="no progress, no summary")
    return parser.parse_args()


def main():
    options = arguments()
    try:
        import ray
    except ImportError:
        raise SystemExit("error: ray is missing; install it: pip install ray")
    try:
        if os.path.exists(options.output) and os.path.samefile(options.input, options.output):
            raise SystemExit("error: -o names the input; the results need a place of their own")
        rows = list(read_rows(options.input))
        done = read_done(options.output)
        file = open(options.output, "ab", buffering=0)
    except OSError as error:
        raise SystemExit(f"error: {error.filename} can't be used: {error.strerror}")
    for row in rows:
        if row["line"] in done and done[row["line"]] != row["id"]:
            raise SystemExit(f"error: {options.output} holds the results of another input: its line for row {row['line']} has another id")
    todo = [row for row in rows if row["line"] not in done]
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray would have workers give way to everything else on the machine
    ray.init(address=options.address, log_to_driver=not options.quiet, include_dashboard=False,
             runtime_env={"env_vars": {k: os.environ[k] for k in ("DT_LIBRARY", "PYTHONPATH") if k in os.environ}})
    workers = options.workers or max(1, int(ray.cluster_resources().get("CPU", 1)) // options.threads)
    sampling = {"temp": options.temp, "ignore_end": options.ignore_eos or None}
    settings = {"session": {"threads": options.threads, "n_ctx": options.ctx_size, "eviction": options.eviction,
                            "max_cache_size": options.max_cache_size},
                "sampling": {k: v for k, v in sampling.items() if v is not None}, "template": options.chat_template,
                "max_tokens": options.max_tokens}
    actor = ray.remote(num_cpus=options.threads, max_restarts=-1, max_task_retries=-1)(Engine)
    begun = time.monotonic()
    engines = [actor.remote(os.path.abspath(options.model), settings) for _ in range(min(workers, max(1, len(todo))))]
    with file:
        n = run_rows(todo, engines, file, len(todo), options.quiet)
    if not options.quiet:
        print(f"{n} rows done by {len(engines)} workers in {time.monotonic() - begun:.1f} s, {len(done)} done before", file=sys.stderr)
    ray.shutdown()


if __name__ == "__main__":
    main()
