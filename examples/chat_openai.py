"""A chat with ./deeptutor-server through the openai package (pip install openai):

    ./deeptutor-server -m models/SmolLM2-135M-Instruct.Q4_1.gguf --cache-eviction
    python3 examples/chat_openai.py http://127.0.0.1:8080

Every turn sends the whole conversation, and the server computes only what is new of it; the last line of a turn says how much.
"""
import sys

from openai import OpenAI

client = OpenAI(base_url=(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080") + "/v1", api_key="none")
model = client.models.list().data[0].id
messages = []
for line in sys.stdin:
    messages.append({"role": "user", "content": line.strip()})
    reply = ""
    for piece in client.chat.completions.create(model=model, messages=messages, stream=True, stream_options={"include_usage": True},
                                                extra_body={"eviction": {"preset": "chat"}}):
        if piece.choices:
            reply += piece.choices[0].delta.content or ""
            print(piece.choices[0].delta.content or "", end="", flush=True)
        if piece.usage:
            cached = piece.usage.prompt_tokens_details.cached_tokens
            print(f"\n[{piece.usage.prompt_tokens} tokens read, {cached} of them cached]")
    messages.append({"role": "assistant", "content": reply})
