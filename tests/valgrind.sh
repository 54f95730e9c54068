#!/usr/bin/env bash
# The main job under valgrind: no memory error, nothing lost.
#
#   bash tests/valgrind.sh [MODEL]      models/SmolLM2-135M-Instruct.Q4_1.gguf unless named; where there is none, a tiny one alone
#
# valgrind knows no AVX-512, so the tree build-valgrind is compiled for any machine with AVX2, and our kernels, which are chosen at run
# time, ask what valgrind's processor has. Exit code 77: valgrind is missing.
set -eu
unset CDPATH # cd would look there first
cd "$(dirname "$0")/.."
command -v valgrind >/dev/null || { echo "valgrind: it is missing: sudo apt-get install valgrind" >&2; exit 77; }
model=${1:-models/SmolLM2-135M-Instruct.Q4_1.gguf}
tree=build-valgrind
cmake -S . -B $tree -DDT_NATIVE=OFF >/dev/null
cmake --build $tree -j "$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)" --target main make_model >$tree/build.log ||
    { tail -n 20 $tree/build.log >&2; exit 2; }
$tree/tests/make_model $tree/tiny.gguf --layers 2 --embd 64 --heads 4 --kv-heads 2 --head-dim 16 --ff 128 --vocab 320 --ctx 1024 \
    --type q8_0 --bpe

check() {
    echo "valgrind: ./main $*"
    valgrind --quiet --error-exitcode=9 --leak-check=full --show-leak-kinds=definite,indirect,possible --errors-for-leak-kinds=definite \
        --log-fd=9 $tree/bin/main -t 2 --temp 0 --no-progress "$@" 9>&2 >$tree/output.txt 2>$tree/messages.txt ||
        { result=$?; [ $result = 9 ] || cat $tree/messages.txt >&2; exit $result; }
}

head -c 600 examples/genesis.txt >$tree/text.txt
for kernel in auto reference; do
    check -m $tree/tiny.gguf -f $tree/text.txt -n 24 --kernel $kernel --cache-eviction --max-cache-size 96 --memory-slots 8
done
rm -f $tree/session
check -m $tree/tiny.gguf -f $tree/text.txt -n 24 --cache-eviction --max-cache-size 96 --kv-type int8 --prefill streaming -b 64 \
    --session $tree/session
check -m $tree/tiny.gguf -p " and then" --append -n 8 --cache-eviction --max-cache-size 96 --kv-type int8 --session $tree/session
if [ -f "$model" ]; then
    check -m "$model" -f $tree/text.txt -n 4 --cache-eviction --max-cache-size 96
fi
echo "valgrind: clean"
