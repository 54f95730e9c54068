#!/usr/bin/env bash
# Scores a small task through ./deeptutor-server with lm-evaluation-harness (pip install "lm-eval[api]"):
#   bash examples/lm_eval.sh http://127.0.0.1:8080 [folder for the results]
# A task of yours: its YAML file beside examples/lm_eval/capitals.yaml, its name after --tasks.
set -euo pipefail
url=${1:-http://127.0.0.1:8080}
output=$(realpath -m "${2:-build-lm_eval}")
unset CDPATH # cd would look there first
cd "$(dirname "$0")/.."
command -v lm_eval >/dev/null || { echo 'lm_eval.sh: lm_eval is missing: pip install "lm-eval[api]"' >&2; exit 2; }
models=$(curl --silent --show-error --fail-with-body "$url/v1/models")
model=$(python3 -c 'import json, sys; print(json.load(sys.stdin)["data"][0]["id"])' <<<"$models")
# the data lies here, so nothing is asked of the network
HF_HUB_OFFLINE=1 lm_eval run --model local-completions --tasks capitals --include_path examples/lm_eval \
    --model_args "model=$model,base_url=$url/v1/completions,num_concurrent=4" --output_path "$output"
