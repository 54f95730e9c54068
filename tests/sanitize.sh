#!/usr/bin/env bash
# The whole test suite with sanitizers in our own code; what they report fails the test that made it.
#
#   bash tests/sanitize.sh [address,undefined | thread] [PATTERN]     both trees unless named; PATTERN: of ctest -R
#
# Trees: build-address and build-thread. An hour on two cores each: pieces can be had with PATTERN, such as "end_to_end_server". Needs
# what bash run.sh --test needs.
# ggml and libllama are built without sanitizers. Should they make noise: tests/support/lsan.supp and tsan.supp, with the reason.
set -u
unset CDPATH # cd would look there first
cd "$(dirname "$0")/.."
kinds="address,undefined thread"
case ${1:-} in address* | undefined* | thread*) kinds=$1; shift ;; esac
jobs=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
result=0

for kind in $kinds; do
    tree=build-${kind%%,*}
    echo "sanitize: $kind in $tree"
    cmake -S . -B "$tree" -DDT_SANITIZE="$kind" >/dev/null && cmake --build "$tree" -j "$jobs" >"$tree/build.log" ||
        { tail -n 20 "$tree/build.log" >&2; exit 2; }
    # allocations as large as some tests ask for shall fail, not end the process
    export ASAN_OPTIONS=allocator_may_return_null=1:detect_leaks=1 UBSAN_OPTIONS=print_stacktrace=1
    export LSAN_OPTIONS=suppressions=$PWD/tests/support/lsan.supp:print_suppressions=0
    export TSAN_OPTIONS=second_deadlock_stack=1:suppressions=$PWD/tests/support/tsan.supp:print_suppressions=0
    (cd "$tree" && ctest --output-on-failure -j "$jobs" --timeout 3600 ${1:+-R "$1"}) || result=1
done
exit $result
