"""Load on a running ./deeptutor-server: many chats at once, each turn sent with all that was said before.

    ./deeptutor-server -m models/SmolLM2-135M-Instruct.Q4_1.gguf -t 2 --temp 0 --kv-memory 2G --session-dir /tmp/chats
    python3 bench/server_load.py http://127.0.0.1:8080 --chats 64 --minutes 10 --pid $(pidof deeptutor-server)

Prints one JSON object: answers by status, tokens/s, time to the first token by turn (median and 95th percentile), the process's largest
memory, and, for replies that are other ones when their turn is asked again alone (greedy), how near a tie the first other token was.
Standard library only.
"""
import argparse
import http.client
import json
import statistics
import threading
import time
import urllib.parse

WORDS = ("river stone morning letter garden winter bridge candle market silver forest window anchor harvest thunder meadow copper lantern "
         "voyage shelter").split()


class Counts:
    def __init__(self):
        self.lock = threading.Lock()
        self.status, self.tokens, self.prompt, self.cached, self.first = {}, 0, 0, 0, {}
        self.asked = []  # (messages, reply)

    def add(self, status, turn=0, first=0.0, usage=None):
        with self.lock:
            self.status[status] = self.status.get(status, 0) + 1
            if usage:
                self.tokens += usage["completion_tokens"]
                self.prompt += usage["prompt_tokens"]
                self.cached += usage["prompt_tokens_details"]["cached_tokens"]
                self.first.setdefault(turn, []).append(first)


def ask(address, messages, n):
    """Status, reply, seconds to the first token, usage, seconds to wait."""
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=600)
    begun, first, reply, usage = time.monotonic(), None, "", None
    connection.request("POST", "/v1/chat/completions", json.dumps({"messages": messages, "max_tokens": n, "temperature": 0, "stream": True,
                                                                   "stream_options": {"include_usage": True}}))
    response = connection.getresponse()
    if response.status != 200:
        response.read()
        return response.status, "", 0, None, float(response.getheader("Retry-After") or 1)
    for line in response:
        if line.startswith(b"data: {"):
            data = json.loads(line[6:])
            if "error" in data:
                return data["error"]["message"], "", 0, None, 1
            usage = data.get("usage") or usage
            for choice in data["choices"]:
                piece = choice["delta"].get("content", "")
                first = time.monotonic() - begun if piece and first is None else first
                reply += piece
    connection.close()
    return 200, reply, first or time.monotonic() - begun, usage, 0


def chat(address, options, number, until, counts):
    talk = 0
    while time.monotonic() < until:
        talk += 1
        messages = [{"role": "user", "content": f"Chat {number} number {talk}. Tell me a story about a {WORDS[number % len(WORDS)]}."}]
        turn = 1
        while turn <= options.turns and time.monotonic() < until:
            try:
                status, reply, first, usage, wait = ask(address, messages, options.tokens)
            except OSError as error:
                counts.add(type(error).__name__)
                time.sleep(1)
                continue
            counts.add(status, turn, first, usage)
            if status != 200:
                time.sleep(wait)
                continue
            with counts.lock:
                counts.asked.append((list(messages), reply))
            messages += [{"role": "assistant", "content": reply},
                         {"role": "user", "content": f"Go on, and mention a {WORDS[(number + turn) % len(WORDS)]}."}]
            turn += 1


def margin_of_difference(address, messages, n, reply):
    """None where the same turn asked alone gives the same reply; else how much likelier (natural logarithm) the first other token was
    than the next best: near 0, rounding decided."""
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=600)
    connection.request("POST", "/v1/chat/completions", json.dumps({"messages": messages, "max_tokens": n, "temperature": 0,
                                                                   "logprobs": True, "top_logprobs": 2}))
    choice = json.loads(connection.getresponse().read())["choices"][0]
    text = ""
    for token in choice["logprobs"]["content"]:
        text += token["token"]
        if not reply.startswith(text):
            return round(token["top_logprobs"][0]["logprob"] - token["top_logprobs"][1]["logprob"], 3)
    return None


def largest_memory(pid):
    with open(f"/proc/{pid}/status") as file:
        return int(next(line for line in file if line.startswith("VmHWM")).split()[1]) * 1024


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--chats", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--check", type=int, default=20, help="replies asked for again, alone")
    parser.add_argument("--pid", type=int)
    options = parser.parse_args()
    address, counts, begun = urllib.parse.urlparse(options.url), Counts(), time.monotonic()
    threads = [threading.Thread(target=chat, args=(address, options, i, begun + 60 * options.minutes, counts)) for i in range(options.chats)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - begun
    step = max(1, len(counts.asked) // max(1, options.check))
    margins = [margin_of_difference(address, messages, options.tokens, reply) for messages, reply in counts.asked[::step][:options.check]]
    first = {turn: [round(statistics.median(t), 3), round(sorted(t)[int(len(t) * 0.95)], 3)] for turn, t in sorted(counts.first.items())}
    print(json.dumps({"seconds": round(seconds, 1), "status": {str(k): v for k, v in counts.status.items()},
                      "generated_tokens_per_second": round(counts.tokens / seconds, 1), "prompt_tokens": counts.prompt,
                      "cached_share": round(counts.cached / max(1, counts.prompt), 3), "first_token_seconds_by_turn": first,
                      "largest_memory_bytes": largest_memory(options.pid) if options.pid else None,
                      "asked_alone": len(margins), "margins_where_different": [m for m in margins if m is not None]}))


if __name__ == "__main__":
    main()
