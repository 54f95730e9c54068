#!/usr/bin/env bash
# On a machine with a GPU: that it computes what the CPU does, then speed at 8K and 16K tokens with TLC off and on (docs/scaling.md has
# what to expect). Under 10 minutes with a model of a few billion parameters. Wants bash run.sh --cuda (or --vulkan, --metal) before.
# usage: bash bench/gpu.sh MODEL.gguf [DEVICE]
# environment: DT_BUILD=DIR   programs and tests of another build than build/
#              DT_DEPTHS=N,N  other depths
set -eu
unset CDPATH # cd would look there first
cd "$(dirname "$0")/.."
model=${1:?usage: bash bench/gpu.sh MODEL.gguf [DEVICE]}
device=${2:-cuda}
build=${DT_BUILD:-build}
"$build/bin/main" --device list
if [ -x "$build/tests/test_device" ]; then
    DT_TEST_DEVICE=$device "$build/tests/test_device"
else
    echo "identity tests left out: bash run.sh --test builds them" >&2
fi
for eviction in "--no-cache-eviction" "--cache-eviction --eviction-preset docqa"; do
    echo "## $eviction"
    # shellcheck disable=SC2086
    "$build/bin/deeptutor-bench" -m "$model" --device "$device" -p 512 -n 64 -d "${DT_DEPTHS:-8192,16384}" -r 3 -o md $eviction
done
