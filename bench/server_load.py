#!/usr/bin/env python3
"""Load on ./deeptutor-server: many chats at once, each turn sent with all that was said before, greedy.

usage: python3 bench/server_load.py -m MODEL.gguf [-t 2] [--chats 64] [--minutes 10] [--parallel 16] [--kv-memory 1G] [-o FILE.md]

One run, in this order: (1) `deeptutor-bench --parallel 8`; (2) the server, and one chat alone, whose times to the first token are the
unloaded ones; (3) all chats at once, while the process's memory and its own metrics are sampled each second; (4) kill -9 in the middle of
it, a restart with the same folder, and every chat goes on; (5) the benchmark again; (6) every answer checked: the whole text of each chat
is given to a server that has nothing else to do, and each token of each answer must be the likeliest one there, ties aside. What a tie is
is measured: products of matrices round differently in batches of other sizes, so also chats that were alone hold tokens that are not quite
the likeliest when their text is read as a whole. Twice the worst of those is the tolerance; an answer beyond it is asked for again alone,
and is wrong where it differs by more than that too. Prints one JSON object; with -o also writes a page. Needs `bash run.sh` to have run.
Standard library only.
"""
import argparse
import asyncio
import http.client
import json
import os
import re
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from peers import ROOT, check_output, parser_of, processor_name, refuse, run, say, until_ctrl_c, whole, write_file

WORDS = ("river stone morning letter garden winter bridge candle market silver forest window anchor harvest thunder meadow copper lantern "
         "voyage shelter").split()
REFERENCE_CHATS = 4


def size(text: str) -> int:
    return int(float(text.rstrip("KMG")) * {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1], 1))


def kv_memory(text: str) -> str:
    if not re.fullmatch(r"\d+(\.\d+)?[KMG]?", text):
        raise argparse.ArgumentTypeError(f"'{text}' is no size such as 512M or 1G")
    return text


def minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"'{text}' is no number above 0 and below 1e6")
    return value


# ---- the server ----

class Server:
    """One process, from its start to its end, and what it says about itself."""
    all: list = []  # to end them where the script is ended

    def __init__(self, args, log: Path, *flags):
        self.log = log
        with open(log, "wb") as file:
            self.process = subprocess.Popen([ROOT / "deeptutor-server", "-m", args.model, "-t", str(args.threads), "--port", "0",
                                             "--chat-template", "chatml", "--temp", "0", *map(str, flags)], stdin=subprocess.DEVNULL,
                                            stdout=subprocess.DEVNULL, stderr=file)
        self.port = None
        Server.all.append(self)
        while self.port is None:
            found = re.search(r"listening at http://\S+:(\d+)", log.read_text(errors="replace"))
            self.port = int(found.group(1)) if found else None
            if self.process.poll() is not None:
                sys.exit(f"the server ended at its start:\n{log.read_text(errors='replace')}")
            time.sleep(0.02)

    def ask(self, path: str, body: dict = None):
        """Status, and the answer as JSON or text."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        return response.status, json.loads(text) if text.startswith("{") else text

    def metrics(self) -> dict:
        rows = [line.rsplit(" ", 1) for line in self.ask("/metrics")[1].splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in rows}

    def resident(self) -> int:
        """Bytes, or 0 where there is no /proc."""
        try:
            with open(f"/proc/{self.process.pid}/statm", encoding="ascii") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            return 0

    def stop(self, number=signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=120)


# ---- the clients ----

class Talk:
    """A chat from its first turn on."""

    def __init__(self, name: str, word: int):
        self.word = word
        self.messages = [{"role": "user", "content": f"Chat {name}. Tell me a story about a {WORDS[word % len(WORDS)]}."}]
        self.replies = []  # (text, whether it ended by itself)

    @staticmethod
    def of(kept: dict) -> "Talk":
        talk = Talk("", 0)
        talk.__dict__.update(kept)
        return talk

    def turn(self) -> int:
        return len(self.replies) + 1

    def go_on(self, reply: str, ended: bool) -> None:
        self.replies.append((reply, ended))
        word = WORDS[(self.word + len(self.replies)) % len(WORDS)]
        self.messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": f"Go on, and mention a {word}."}]


class Counts:
    def __init__(self):
        self.status, self.first, self.done = {}, {}, []  # done: (seconds, tokens, prompt, cached, turn)

    def add(self, status) -> None:
        self.status[status] = self.status.get(status, 0) + 1


async def ask(port: int, talk: Talk, n: int, counts: Counts) -> float:
    """One turn. Seconds to wait before the next try; 0 where there was an answer. The clients share the machine with the server, so they
    are cheap: after the first token they look at what came only five times a second, and make sense of it when all is here."""
    body = json.dumps({"messages": talk.messages, "max_tokens": n, "temperature": 0, "stream": True,
                       "stream_options": {"include_usage": True}}).encode()
    begun, first, data, loop = time.monotonic(), None, bytearray(), asyncio.get_running_loop()
    with socket.socket() as s:
        s.setblocking(False)
        await loop.sock_connect(s, ("127.0.0.1", port))
        await loop.sock_sendall(s, b"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        while piece := await loop.sock_recv(s, 1 << 18):
            data += piece
            if first is None and re.search(rb'"content":"[^"]', piece):
                first = time.monotonic() - begun
            if first is not None:
                await asyncio.sleep(0.2)
    head, _, rest = bytes(data).partition(b"\r\n\r\n")
    if not rest:
        raise ConnectionResetError
    status = int(head.split()[1])
    if status != 200:
        counts.add(status)
        found = re.search(rb"Retry-After: (\d+)", head)
        return float(found.group(1)) if found else 1
    events = [json.loads(line[6:]) for line in rest.split(b"\n") if line.startswith(b"data: {")]
    if not rest.endswith(b"data: [DONE]\n\n") or any("error" in event for event in events):
        counts.add("broken stream")
        return 1
    counts.add(200)
    choices = [choice for event in events for choice in event["choices"]]
    reply = "".join(choice["delta"].get("content", "") for choice in choices)
    usage = events[-1]["usage"]
    counts.first.setdefault(talk.turn(), []).append(first if first is not None else time.monotonic() - begun)
    counts.done.append((time.monotonic(), usage["completion_tokens"], usage["prompt_tokens"],
                        usage["prompt_tokens_details"]["cached_tokens"], talk.turn()))
    talk.go_on(reply, choices[-1]["finish_reason"] == "stop")
    return 0


async def chat(port: int, args, number: int, until: float, counts: Counts, talks: list) -> None:
    n = 0
    while time.monotonic() < until:
        n += 1
        talk = Talk(f"{number} number {n}", number)
        talks.append(talk)
        while talk.turn() <= args.turns and time.monotonic() < until:
            try:
                wait = await ask(port, talk, args.tokens, counts)
            except OSError as error:
                if time.monotonic() < until:  # else it was killed on purpose
                    counts.add(type(error).__name__)
                wait = 1
            await asyncio.sleep(wait)


async def sample(server: Server, until: float, samples: list) -> None:
    with ThreadPoolExecutor(1) as pool:
        while time.monotonic() < until:
            m = await asyncio.get_running_loop().run_in_executor(pool, server.metrics)
            samples.append((server.resident(), m))
            await asyncio.sleep(1)


async def load(server: Server, args, counts: Counts, talks: list, samples: list) -> float:
    """Seconds until the kill -9, which comes while all chats are in the middle of something."""
    begun = time.monotonic()
    until = begun + 60 * args.minutes
    tasks = [asyncio.create_task(chat(server.port, args, i, until, counts, talks)) for i in range(args.chats)]
    sampler = asyncio.create_task(sample(server, until - 1, samples))
    await sampler
    await asyncio.sleep(max(0.0, until - time.monotonic() - 0.2))
    last = server.metrics()
    samples.append((server.resident(), last))
    seconds = time.monotonic() - begun
    before = dict(counts.status)
    server.stop(signal.SIGKILL)
    await asyncio.gather(*tasks)
    counts.status = before  # what the kill cut off doesn't count
    return seconds


async def all_turns(server: Server, args, talk: Talk, counts: Counts) -> None:
    while talk.turn() <= args.turns:
        await ask(server.port, talk, args.tokens, counts)


async def resume(server: Server, talks: list, args, counts: Counts) -> None:
    """One more turn of each, as many at once as before."""
    free = asyncio.Semaphore(args.chats)

    async def go_on(talk):
        async with free:
            await ask(server.port, talk, args.tokens, counts)

    await asyncio.gather(*(go_on(talk) for talk in talks))


# ---- the answers ----

def rendered(messages: list) -> str:
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)


def gaps(server: Server, talk: Talk) -> list:
    """For each token of each reply, how far below the likeliest one it is, in nats."""
    text = rendered(talk.messages[:2 * len(talk.replies)])
    status, answer = server.ask("/v1/completions", {"prompt": text, "max_tokens": 0, "echo": True, "logprobs": 1})
    if status != 200:
        sys.exit(f"a text can't be scored: {answer}")
    scored = answer["choices"][0]["logprobs"]
    below = [None if value is None else max(top.values()) - value for value, top in zip(scored["token_logprobs"], scored["top_logprobs"])]
    result = []
    for i, (reply, ended) in enumerate(talk.replies):
        begin = len((rendered(talk.messages[:2 * i + 1]) + "<|im_start|>assistant\n").encode())
        end = begin + len(reply.encode()) + (1 if ended else 0)  # the end token too, where it was generated
        result.append([gap for gap, at in zip(below, scored["text_offset"]) if begin <= at < end])
    return result


def gap_asked_again(server: Server, talk: Talk, turn: int, n: int) -> float:
    """The same turn asked alone: 0 where the reply is the same, else how much likelier the first other token was than the reply's."""
    _, answer = server.ask("/v1/chat/completions", {"messages": talk.messages[:2 * turn + 1], "max_tokens": n, "temperature": 0,
                                                    "logprobs": True, "top_logprobs": 20})
    left = talk.replies[turn][0].encode()
    for token in answer["choices"][0]["logprobs"]["content"]:
        piece = bytes(token["bytes"])
        if not left.startswith(piece):
            fitting = [top["logprob"] for top in token["top_logprobs"] if left.startswith(bytes(top["bytes"]))]
            return token["logprob"] - max(fitting, default=-99.0)
        left = left[len(piece):]
    return 0.0


def figures(found: list) -> dict:
    """Of gaps by chat, answer and token."""
    answers = [answer for chat_ in found for answer in chat_]
    tokens = [gap for answer in answers for gap in answer]
    share = sum(gap > 0 for gap in tokens) / max(1, len(tokens))
    return {"answers": len(answers), "tokens": len(tokens), "share_not_likeliest": round(share, 4),
            "worst_gap_nats": round(max(tokens, default=0.0), 3)}


def check_answers(args, talks: list, folder: Path) -> dict:
    server = Server(args, folder / "check.log", "-np", 1, "--idle", 0)
    alone_talks = []
    for i in range(REFERENCE_CHATS):
        alone_talks.append(Talk(f"{i} alone", i))
        asyncio.run(all_turns(server, args, alone_talks[-1], Counts()))
    reference = [gaps(server, talk) for talk in alone_talks]
    tolerance = 2 * figures(reference)["worst_gap_nats"]
    found, again, wrong = [], 0, []
    for talk in talks:
        found.append(gaps(server, talk) if talk.replies else [])
        for turn, answer in enumerate(found[-1]):
            if max(answer, default=0.0) > tolerance:
                again += 1
                gap = gap_asked_again(server, talk, turn, args.tokens)
                if gap > tolerance:
                    wrong.append({"gap": round(gap, 3), "messages": talk.messages[:2 * turn + 2]})
    server.stop()
    return {"alone": figures(reference), "loaded": figures(found), "tolerance_nats": tolerance, "asked_again": again, "wrong": wrong}


# ---- the whole ----

def benchmark(args) -> float:
    rows = json.loads(run([ROOT / "deeptutor-bench", "-m", args.model, "-t", args.threads, "-d", args.depth, "-n", 64, "-p", 0, "-r", 3,
                           "--parallel", 8, "-o", "json"], "deeptutor-bench"))["rows"]
    return next(row["tps"] for row in rows if row["test"] == "decode")


def spread(samples: list) -> list:
    """Median and 95th percentile."""
    return [round(statistics.median(samples), 3), round(sorted(samples)[int(len(samples) * 0.95)], 3)] if samples else []


def restart(args, folder: Path, flags: list, talks: list) -> dict:
    server = Server(args, folder / "restarted.log", *flags)
    m = server.metrics()
    on_disk = m['deeptutor_conversations{state="disk"}']
    going = [talk for talk in talks if talk.replies][-4 * args.chats:]
    counts = Counts()
    asyncio.run(resume(server, going, args, counts))
    after = server.metrics()
    dropped = (folder / "restarted.log").read_text(errors="replace").count("can't be used")
    code = server.stop()
    return {"on_disk": on_disk, "chats_gone_on": len(going), "status": counts.status,
            "opened": after['deeptutor_conversation_starts_total{from="disk"}'],
            "found_their_cache": sum(1 for done in counts.done if done[3] > done[2] / 2), "unusable": dropped, "exit": code}


def measure(args, folder: Path, talks: list) -> dict:
    flags = ["-np", args.parallel, "--queue", args.chats * 2, "--kv-memory", args.kv_memory, "--session-dir", folder / "sessions",
             *args.flags]
    bench = [] if args.depth < 0 else [benchmark(args)]
    server = Server(args, folder / "server.log", *flags)
    unloaded, counts, samples = Counts(), Counts(), []
    asyncio.run(all_turns(server, args, Talk("alone", 0), unloaded))
    base, base_m = server.resident(), server.metrics()
    say(f"{args.chats} chats for {args.minutes} minutes")
    client = resource.getrusage(resource.RUSAGE_SELF)
    seconds = asyncio.run(load(server, args, counts, talks, samples))
    used = resource.getrusage(resource.RUSAGE_SELF)
    say("killed; again")
    again = restart(args, folder, flags, talks)
    bench += [] if args.depth < 0 else [benchmark(args)]
    last = samples[-1][1]
    difference = {name: last[name] - base_m.get(name, 0) for name in last}
    n_generated, n_prompt = difference["deeptutor_generated_tokens_total"], difference["deeptutor_prompt_tokens_total"]
    n_reused = difference["deeptutor_reused_tokens_total"]
    total = sum(counts.status.values())
    return {
        "seconds": round(seconds, 1), "status": {str(k): v for k, v in counts.status.items()},
        "share_429": round(counts.status.get(429, 0) / max(1, total), 4), "chats": len(talks),
        "generated_per_second": round(n_generated / seconds, 1),
        "computed_per_second": round((n_generated + n_prompt - n_reused) / seconds, 1),
        "benchmark_8": [round(b, 1) for b in bench],
        "cached_share": round(n_reused / max(1, n_prompt), 3),
        "first_token_alone": {str(turn): round(t[0], 3) for turn, t in unloaded.first.items()},
        "first_token_loaded": {str(turn): spread(t) for turn, t in sorted(counts.first.items())},
        "queue_seconds_mean": round(difference["deeptutor_wait_seconds_sum"] / max(1, difference["deeptutor_wait_seconds_count"]), 3),
        "ceiling_bytes": size(args.kv_memory), "kv_bytes_peak": int(last["deeptutor_kv_bytes_peak"]),
        "resident_before": base, "resident_peak": max(r for r, _ in samples),
        "conversations_peak_on_disk": int(max(m['deeptutor_conversations{state="disk"}'] for _, m in samples)),
        "saved": int(difference["deeptutor_conversations_saved_total"]),
        "from_disk": int(difference['deeptutor_conversation_starts_total{from="disk"}']),
        "client_cpu_share": round((used.ru_utime + used.ru_stime - client.ru_utime - client.ru_stime) / seconds, 3),
        "restart": again}


def page(args, r: dict) -> str:
    def row(what, value):
        return f"| {what} | {value} |"

    def mib(n):
        return f"{n / 2**20:.0f} MiB"

    def turns(of):
        return {turn: of[str(turn)] for turn in (1, 2, args.turns) if of.get(str(turn))}

    answers, again, load_turns = r["answers"], r["restart"], turns(r["first_token_loaded"])
    bench = " and ".join(f"{b:.0f}" for b in r["benchmark_8"])
    lines = [
        f"# {args.chats} chats at once, {Path(args.model).name} on {processor_name()}", "",
        f"`python3 bench/server_load.py -m {Path(args.model).name} -t {args.threads} --chats {args.chats} --minutes {args.minutes:g} "
        f"--parallel {args.parallel} --kv-memory {args.kv_memory}`, {time.strftime('%Y-%m-%d')}. Chats of {args.turns} turns of at most "
        f"{args.tokens} tokens, greedy, streamed, no pause between turns; clients on the same machine.", "", "| what | |", "| --- | --- |",
        row("answers by status, in " + f"{r['seconds']:.0f} s", ", ".join(f"{k}: {v}" for k, v in r["status"].items())),
        row("answered 429", f"{r['share_429']:.1%}"),
        row("generated", f"{r['generated_per_second']:.0f} tokens/s"),
        row("generated and read", f"{r['computed_per_second']:.0f} tokens/s"),
        row(f"`deeptutor-bench --parallel 8` at {args.depth} tokens, before and after", f"{bench} tokens/s"),
        row("prompt tokens found in the cache", f"{r['cached_share']:.1%}"),
        row("caches: ceiling, peak", f"{mib(r['ceiling_bytes'])}, {mib(r['kv_bytes_peak'])}"),
        row("process: before, peak", f"{mib(r['resident_before'])}, {mib(r['resident_peak'])}"),
        row("conversations put on disk, taken up from there", f"{r['saved']}, {r['from_disk']}"),
        row("first token, one chat alone: " + ", ".join(f"turn {t}" for t in turns(r["first_token_alone"])),
            ", ".join(f"{t:.3f} s" for t in turns(r["first_token_alone"]).values())),
        row("first token, all at once (median, 95 %): " + ", ".join(f"turn {t}" for t in load_turns),
            "; ".join(f"{a:.2f} s, {b:.2f} s" for a, b in load_turns.values())),
        row("of that, waiting for a place (mean)", f"{r['queue_seconds_mean']:.2f} s"),
        row("after kill -9: conversations on disk, unusable of them", f"{again['on_disk']:.0f}, {again['unusable']}"),
        row("one more turn of each chat: found its cache there, by status",
            f"{again['found_their_cache']} of {again['chats_gone_on']}; " + ", ".join(f"{k}: {v}" for k, v in again["status"].items())),
        row("answers checked; beyond the tolerance, asked again; wrong",
            f"{answers['loaded']['answers']}; {answers['asked_again']}; {len(answers['wrong'])}"),
        row(f"tokens that are not the likeliest when read at once: chats that were alone ({answers['alone']['tokens']} tokens)",
            f"{answers['alone']['share_not_likeliest']:.2%}, worst {answers['alone']['worst_gap_nats']:.2f} nats"),
        row(f"the same of the chats under load ({answers['loaded']['tokens']} tokens)",
            f"{answers['loaded']['share_not_likeliest']:.2%}, worst {answers['loaded']['worst_gap_nats']:.2f} nats"), ""]
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-t", "--threads", type=whole(1), default=2)
    parser.add_argument("--chats", type=whole(1), default=64)
    parser.add_argument("--minutes", type=minutes, default=10)
    parser.add_argument("--turns", type=whole(1), default=12)
    parser.add_argument("--tokens", type=whole(1), default=48, help="the most a reply may have")
    parser.add_argument("--parallel", type=whole(1), default=16, help="the server's -np")
    parser.add_argument("--kv-memory", type=kv_memory, default="1G")
    parser.add_argument("--depth", type=whole(-1), default=512, help="of the benchmark; -1: without it")
    parser.add_argument("--check", type=whole(-1), default=-1,
                        help="about so many chats, whose answers are checked (all); 0: none, and no page")
    parser.add_argument("--later", metavar="FILE", help="don't check answers, keep all for --finish")
    parser.add_argument("--finish", metavar="FILE", help="only check the answers of a run that was kept")
    parser.add_argument("-o", "--output", help="also write a page")
    parser.add_argument("flags", nargs="*", help="more flags of the server, after --")
    args = parser.parse_args()
    for path in filter(None, (args.output, args.later)):
        check_output(path)
    folder, talks = Path(tempfile.mkdtemp(prefix="deeptutor-load-")), []
    try:
        if args.finish:
            try:
                kept = json.loads(Path(args.finish).read_text(encoding="utf-8"))
                result, talks = kept["result"], [Talk.of(kept_talk) for kept_talk in kept["talks"]]
            except (OSError, ValueError, LookupError, TypeError) as error:
                refuse(f"{args.finish} is not what --later writes ({type(error).__name__}: {error})")
        else:
            result = measure(args, folder, talks)
        if args.later:
            kept = {"result": result, "talks": [vars(talk) for talk in talks]}
            write_file(args.later, json.dumps(kept))
        elif args.check != 0:
            say("checking the answers")
            step = max(1, len(talks) // args.check) if args.check > 0 else 1
            result["answers"] = check_answers(args, talks[::step], folder)
            if args.output:
                write_file(args.output, page(args, result))
        print(json.dumps(result))
    finally:
        for server in Server.all:
            server.process.kill()
            server.process.wait()
        shutil.rmtree(folder)


if __name__ == "__main__":
    until_ctrl_c(main)
