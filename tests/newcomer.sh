#!/usr/bin/env bash
# The newcomer's road: in a bare Debian 12, by somebody who has git and types what README.md says, letter by letter.
#
#   sudo bash tests/newcomer.sh              installs what the README names, sets up, runs the main job, runs the tests
#   sudo bash tests/newcomer.sh --no-test    without the tests
#
# The commands are taken out of README.md, so that it can't say one thing and this try another. Needs debootstrap and the network; takes
# 10 minutes on 2 idle cores, 3 GB of disk below ${TMPDIR:-/var/tmp}. What is tried is the last commit. DT_NEWCOMER_CCACHE=DIR spares
# compiling where a tree of this machine filled that ccache: the road is the same then but for ccache and ninja, which are installed too.
set -eu -o pipefail
unset CDPATH # cd would look there first
cd "$(dirname "$0")/.."
. tests/support/debian_root.sh

packages=$(tr '\n' ' ' <README.md | grep -o '`sudo apt-get update[^`]*`' | head -n 1 | tr -d '`')
main_job=$(grep -m 1 '^bash run.sh --model && ./main' README.md)
tests=$(grep -m 1 '^bash run.sh --test' README.md)
[ -n "$packages" ] && [ -n "$main_job" ] && [ -n "$tests" ] || fail "README.md has no longer the three commands that are tried here"

make_root
echo "newcomer: a user, git, and a clone"
in_root apt-get update -qq
in_root apt-get install -qq git ca-certificates >/dev/null
in_root useradd -m newcomer
git bundle create --quiet "$root/home/newcomer/deeptutor.bundle" HEAD
in_root_as newcomer 'git -c advice.detachedHead=false clone --quiet deeptutor.bundle deeptutor'

echo "newcomer: before anything is installed, run.sh says what is missing"
if in_root_as newcomer 'cd deeptutor && bash run.sh' >"$root/missing.txt" 2>&1; then
    fail "run.sh went on without a compiler"
fi
grep -q 'apt-get install .*build-essential' "$root/missing.txt" || { cat "$root/missing.txt"; fail "run.sh named no packages"; }

echo "newcomer: $packages"
in_root bash -c "${packages//sudo /}" >"$root/packages.txt" 2>&1 || { tail -n 20 "$root/packages.txt"; fail "the README's packages"; }

if [ -n "${DT_NEWCOMER_CCACHE:-}" ]; then
    in_root apt-get install -qq ccache ninja-build >/dev/null 2>&1
    mkdir "$root/ccache"
    mount --bind "$DT_NEWCOMER_CCACHE" "$root/ccache"
    environment+=(CCACHE_DIR=/ccache CCACHE_READONLY=1 CCACHE_TEMPDIR=/tmp CCACHE_NOHASHDIR=1 CCACHE_BASEDIR=/home/newcomer/deeptutor)
fi

echo "newcomer: $main_job"
in_root_as newcomer "cd deeptutor && { $main_job; } >../text.txt 2>../log.txt" ||
    { tail -n 30 "$root/home/newcomer/log.txt"; fail "the main job"; }
cd "$root/home/newcomer"
grep -q '^run.sh: ./main is ready' text.txt || fail "run.sh didn't say that ./main is ready"
grep -q '^TLC: on' log.txt || fail "nothing was said of TLC"
grep -q '^KV cache' log.txt || fail "no summary at the end"
[ "$(sed '1,/^run.sh: main job/d' text.txt | sed '1,/--cache-eviction$/d' | wc -w)" -gt 40 ] || fail "too little text came"
tail -n 12 log.txt

if [ "${1:-}" != --no-test ]; then
    echo "newcomer: $tests"
    in_root_as newcomer "cd deeptutor && $tests" >"$root/tests.txt" 2>&1 || {
        sed -n '/\*\*\*Failed/,/^ *Start /p' "$root/tests.txt" # what a failed test printed itself
        tail -n 24 "$root/tests.txt"
        fail "the tests"
    }
    grep -q '100% tests passed' "$root/tests.txt" || fail "the tests said no '100% tests passed'"
    tail -n 12 "$root/tests.txt"
fi
echo "newcomer: the README's commands work as written"
