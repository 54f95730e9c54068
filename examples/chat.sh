#!/usr/bin/env bash
# One question to ./deeptutor-server, the answer as it comes: bash examples/chat.sh http://127.0.0.1:8080 "Name the capital of France."
# API_KEY in the environment is sent as the key. Needs curl and python3 (which puts the question into JSON, and the pieces of the answer,
# or what the server says against it, on the terminal).
set -euo pipefail
url=${1:-http://127.0.0.1:8080}
url=${url%/}
question=${2:-Name the capital of France.}
body=$(python3 -c 'import json, sys
print(json.dumps({"messages": [{"role": "user", "content": sys.argv[1]}], "stream": True, "max_tokens": 256}))' "$question")
curl --silent --show-error --fail-with-body --no-buffer "$url/v1/chat/completions" -H "Content-Type: application/json" \
    ${API_KEY:+-H "Authorization: Bearer $API_KEY"} -d "$body" |
    python3 -c 'import json, sys
for line in sys.stdin:
    if line.startswith(("data: {", "{")):
        piece = json.loads(line.removeprefix("data: "))
        if "error" in piece:
            sys.exit("error: " + piece["error"]["message"])
        for choice in piece["choices"]:
            print(choice["delta"].get("content", ""), end="", flush=True)
print()'
