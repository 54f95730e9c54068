#!/usr/bin/env bash
# What can be found by reading the code of src/ and apps/ alone: nothing is run, everything found is an error.
#
#   bash tests/static.sh [cppcheck] [gcc] [clang] [tidy]     all of them unless named; tidy takes 10 minutes of a core, the others one
#
# cppcheck: what it leaves out stands, with the reason, in tests/support/cppcheck.txt; tidy: clang-tidy with .clang-tidy; gcc and clang:
# the warnings of the build as errors, -O2 so that gcc follows values. DT_STATIC_FILES=PATTERN (of grep -E): only files like that. All
# but cppcheck need build/, configured and built once (bash run.sh). Exit code 77: a tool is missing, or build/; the others were run.
set -u
unset CDPATH # cd would look there first
cd "$(dirname "$0")/.."
jobs=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
pattern=${DT_STATIC_FILES:-.}
result=0

# One line for each file of ours: its name, a tab, the command that compiles it, without compiler, -O and output.
commands() {
    python3 - "$PWD" <<'PY'
import json, re, shlex, sys
root, seen = sys.argv[1], set()
for entry in json.load(open("build/compile_commands.json")):
    name = entry["file"][len(root) + 1:] if entry["file"].startswith(root + "/") else ""
    if re.match(r"(src|apps)/", name) and name not in seen:
        seen.add(name)
        words = shlex.split(entry["command"])
        first = next(i for i, word in enumerate(words) if word.startswith("-"))
        words = [word for word in words[first:words.index("-o")] if not word.startswith("-O")]
        print(name, shlex.join(words), sep="\t")
PY
}

missing() {
    echo "static: $1" >&2
    [ $result = 1 ] || result=77
}

check_cppcheck() {
    command -v cppcheck >/dev/null || { missing "cppcheck is missing: sudo apt-get install cppcheck"; return; }
    files=$(ls src/*/*.c src/*/*.cpp apps/*.c | grep -E "$pattern")
    # shellcheck disable=SC2086
    cppcheck --quiet --error-exitcode=1 --inline-suppr --std=c11 --std=c++17 --enable=warning,style,performance,portability \
        --suppressions-list=tests/support/cppcheck.txt --template='{file}:{line}: {severity}: {message} [{id}]' -j "$jobs" \
        -Isrc -Iinclude -Iapps -D__linux__ -D__GNUC__=12 -DDT_HAVE_LLAMA_COMMON=1 $files || result=1
}

check_compiler() { # gcc or clang
    command -v "$1" >/dev/null || { missing "$1 is missing: sudo apt-get install $1"; return; }
    [ -f build/compile_commands.json ] || { missing "build/ is missing: bash run.sh"; return; }
    commands | grep -E "^[^	]*($pattern)" | while IFS='	' read -r name words; do
        case $name in *.cpp) c=$2 ;; *) c=$1 ;; esac
        printf '%s\0' "$c -O2 -Werror $words -c $PWD/$name -o /dev/null"
    done | xargs -0 -P "$jobs" -n 1 bash -c 'eval "$0"' || result=1
}

check_tidy() {
    command -v clang-tidy >/dev/null || { missing "clang-tidy is missing: sudo apt-get install clang-tidy"; return; }
    [ -f build/compile_commands.json ] || { missing "build/ is missing: bash run.sh"; return; }
    commands | cut -f 1 | grep -E "$pattern" | xargs -P "$jobs" -n 2 clang-tidy -p build --quiet >build/static.log 2>&1 || result=1
    grep -vE '^[0-9]+ warnings? (generated|treated)' build/static.log
}

for what in ${*:-cppcheck gcc clang tidy}; do
    echo "static: $what"
    case $what in
    cppcheck) check_cppcheck ;;
    gcc) check_compiler gcc g++ ;;
    clang) check_compiler clang clang++ ;;
    tidy) check_tidy ;;
    *) echo "static: there is no check $what" >&2; exit 2 ;;
    esac
done
exit $result
