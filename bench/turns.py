#!/usr/bin/env python3
"""A chat of many turns with eviction on: does the k-th turn cost what the second did?

usage: python3 bench/turns.py [-m MODEL.gguf] [-t 2] [--turns 20] [-n 96] [-r 3] [--budget 512] [--words 120] [-o FILE]

Starts ./deeptutor-server and talks to it as a client does: every turn sends the whole conversation, with a message of about --words
words, and takes a reply of up to -n tokens, greedy. A turn's row: tokens of the conversation, how many of them were computed (the
others were in the cache), the time to the first token for each of those, and the speed of decoding after it; medians over rounds of
whole chats. Needs `bash run.sh --model`. Writes the table to FILE, or prints it. Standard library only.
"""

import http.client
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

from peers import ROOT, check_output, parser_of, processor_name, say, until_ctrl_c, whole, write_file

WORDS = ("river stone morning letter garden winter bridge candle market silver forest window anchor harvest thunder meadow copper lantern "
         "voyage shelter").split()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(args, port):
    command = [ROOT / "deeptutor-server", "-m", args.model, "-t", args.threads, "--port", port, "--cache-eviction", "--max-cache-size",
               args.budget, *args.flags]
    server = subprocess.Popen([str(c) for c in command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    until = time.time() + 60
    try:
        while time.time() < until and server.poll() is None:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return server
            except OSError:
                time.sleep(0.1)
    except KeyboardInterrupt:
        server.kill()
        raise
    server.kill()
    sys.exit(f"the server does not start:\n{server.communicate()[1][-2000:]}")


def turn(port, messages, n):
    """The reply, tokens of the prompt, of them cached, ms to the first token, tokens/s after it."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    begun, times, reply, usage = time.monotonic(), [], "", {}
    connection.request("POST", "/v1/chat/completions",
                       json.dumps({"messages": messages, "max_tokens": n, "temperature": 0, "stream": True,
                                   "stream_options": {"include_usage": True}}))
    response = connection.getresponse()
    for line in response:
        if line.startswith(b"data: {"):
            data = json.loads(line[6:])
            if "error" in data:
                sys.exit(data["error"]["message"])
            usage = data.get("usage") or usage
            piece = "".join(choice["delta"].get("content", "") for choice in data["choices"])
            times += [time.monotonic()] if piece else []
            reply += piece
    n_reply = usage["completion_tokens"]
    speed = (n_reply - 1) / (times[-1] - times[0]) if n_reply > 8 and times[-1] > times[0] else None
    return reply, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], (times[0] - begun) * 1e3, speed


def chat(args, port, number):
    words, messages, rows = random.Random(number), [], []
    for k in range(args.turns):
        story = " ".join(words.choice(WORDS) for _ in range(args.words))
        messages.append({"role": "user", "content": f"Chat {number}, part {k + 1}. Go on with the story, with these words: {story}."})
        reply, n_prompt, n_cached, first_ms, speed = turn(port, messages, args.tokens)
        messages.append({"role": "assistant", "content": reply})
        rows.append({"tokens": n_prompt, "computed": n_prompt - n_cached, "first": first_ms / (n_prompt - n_cached), "speed": speed})
    return rows


def median(rows, key):
    values = [row[key] for row in rows if row[key] is not None]
    return statistics.median(values) if values else float("nan")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("-m", "--model", default=ROOT / "models/SmolLM2-135M-Instruct.Q4_1.gguf", type=Path)
    parser.add_argument("-t", "--threads", type=whole(1), default=2)
    parser.add_argument("--turns", type=whole(1), default=20)
    parser.add_argument("-n", "--tokens", type=whole(1), default=96)
    parser.add_argument("-r", "--rounds", type=whole(1), default=3)
    parser.add_argument("--budget", type=whole(1), default=512)
    parser.add_argument("--words", type=whole(1), default=120)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("flags", nargs="*", help="more flags of the server, after --")
    args = parser.parse_args()

    if args.output:
        check_output(args.output)
    port = free_port()
    server = start(args, port)
    try:
        rounds = []
        for number in range(args.rounds):
            rounds.append(chat(args, port, number))
            say(f"round {number + 1}/{args.rounds}: {rounds[-1][-1]['tokens']} tokens")
    finally:
        server.terminate()
        server.communicate()
    lines = [f"## A chat of {args.turns} turns, {args.model.name}, {args.budget} tokens kept", "",
             f"{processor_name()}, {args.threads} threads, {args.rounds} rounds, {time.strftime('%Y-%m-%d')}", "",
             "| turn | tokens so far | computed | ms per computed token, to the first | decoding, tokens/s |",
             "| ---: | ---: | ---: | ---: | ---: |"]
    turns = [[rows[k] for rows in rounds] for k in range(args.turns)]
    for k, rows in enumerate(turns):
        lines.append(f"| {k + 1} | {median(rows, 'tokens'):.0f} | {median(rows, 'computed'):.0f} | {median(rows, 'first'):.3f} | "
                     f"{median(rows, 'speed'):.1f} |")
    if args.turns >= 10:
        lines += ["", f"Turn 10 decodes {median(turns[9], 'speed') / median(turns[1], 'speed'):.3f} times as fast as turn 2; once the budget "
                  f"is full, turn {args.turns} {median(turns[-1], 'speed') / median(turns[args.turns // 2], 'speed'):.3f} times as fast as "
                  f"turn {args.turns // 2 + 1}."]
    text = "\n".join(lines) + "\n\n"
    if args.output:
        write_file(args.output, text, append=True)
    else:
        print(text)


if __name__ == "__main__":
    until_ctrl_c(main)
