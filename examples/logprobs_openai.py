"""How sure the model is of each token of its answer, through the openai package (pip install openai):

    ./deeptutor-server -m models/SmolLM2-135M-Instruct.Q4_1.gguf
    python3 examples/logprobs_openai.py http://127.0.0.1:8080 "Name the capital of France."

A line per token: its probability, the token, and what it was chosen over.
"""
import math
import sys

from openai import OpenAI

client = OpenAI(base_url=(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080") + "/v1", api_key="none")
question = sys.argv[2] if len(sys.argv) > 2 else "Name the capital of France."
answer = client.chat.completions.create(model=client.models.list().data[0].id, messages=[{"role": "user", "content": question}],
                                        max_tokens=64, temperature=0, logprobs=True, top_logprobs=3)
for token in answer.choices[0].logprobs.content:
    others = ", ".join(f"{other.token!r} {math.exp(other.logprob):.0%}" for other in token.top_logprobs if other.token != token.token)
    print(f"{math.exp(token.logprob):4.0%}  {token.token!r}  over {others}")
