#!/usr/bin/env bash
# Looks for inputs that break a promise, with libFuzzer (clang) and for Python with atheris:
#
#   bash tests/fuzz.sh [SECONDS [TARGET...]]     60 seconds for each target unless said otherwise
#
# Targets are tests/fuzz/fuzz_NAME.c by their NAME, and pickle and safetensors (tests/fuzz/fuzz_convert.py). What was reached before is
# kept in build-fuzz/corpus/NAME and gone on from. A finding lies in build-fuzz/found/NAME: mend what it shows as a kind, then keep
# the file, with a name that says what it is, under tests/fuzz/regressions/NAME, where ctest goes through it. The same file again:
#   build-fuzz/tests/fuzz/fuzz_NAME FILE
set -u
unset CDPATH # cd would look there first
cd "$(dirname "$0")/.."
seconds=${1:-60}
shift || true
targets=${*:-gguf session note eviction batch api http template grammar pickle safetensors}

if [ ! -f build-fuzz/CMakeCache.txt ]; then
    command -v clang >/dev/null || { echo "fuzz: clang is missing: sudo apt-get install clang" >&2; exit 2; }
    cmake -S . -B build-fuzz -DDT_FUZZ=ON -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ >/dev/null || exit 2
fi

found=0
for target in $targets; do
    corpus=build-fuzz/corpus/$target
    mkdir -p "$corpus" "build-fuzz/found/$target"
    given=""
    for folder in tests/fuzz/seeds/$target tests/fuzz/regressions/$target; do
        [ -d "$folder" ] && given="$given $folder"
    done
    before=$(find "build-fuzz/found/$target" -type f | wc -l)
    echo "fuzz: $target for $seconds s"
    case $target in
    pickle | safetensors)
        python=.venv/bin/python
        "$python" -c 'import atheris' 2>/dev/null || "$python" -m pip install -q --disable-pip-version-check atheris==3.0.0 || true
        "$python" tests/fuzz/fuzz_convert.py "$target" -max_total_time="$seconds" -max_len=4096 -timeout=20 -rss_limit_mb=2048 \
            -artifact_prefix="build-fuzz/found/$target/" -print_final_stats=1 "$corpus" $given
        ;;
    *)
        cmake --build build-fuzz -j "$(getconf _NPROCESSORS_ONLN)" --target "fuzz_$target" >build-fuzz/build.log 2>&1 ||
            { tail -n 20 build-fuzz/build.log >&2; exit 2; }
        case $target in # seeds that are made by the program itself, and how long an input may get
        gguf) made=1 longest=24576 ;;
        session) made=1 longest=16384 ;;
        note) made=1 longest=1024 ;;
        http) made=0 longest=2048 ;;
        *) made=0 longest=4096 ;;
        esac
        if [ $made = 1 ] && [ ! -d "build-fuzz/seeds/$target" ]; then
            mkdir -p "build-fuzz/seeds/$target"
            FUZZ_SEEDS="build-fuzz/seeds/$target" "build-fuzz/tests/fuzz/fuzz_$target" -runs=0 >/dev/null 2>&1
        fi
        [ $made = 1 ] && given="$given build-fuzz/seeds/$target"
        dictionary=tests/fuzz/dictionaries/$target
        case $target in api | batch | eviction) dictionary=tests/fuzz/dictionaries/json ;; esac
        [ -f "$dictionary" ] && dictionary="-dict=$dictionary" || dictionary=""
        leaks=1 # of threads that work on when the client is gone, LeakSanitizer sees a part only
        [ "$target" = http ] && leaks=0
        ASAN_OPTIONS=allocator_may_return_null=1:detect_stack_use_after_return=0 "build-fuzz/tests/fuzz/fuzz_$target" \
            -max_total_time="$seconds" -max_len=$longest -timeout=30 -rss_limit_mb=3072 -malloc_limit_mb=2048 \
            -detect_leaks=$leaks -artifact_prefix="build-fuzz/found/$target/" -print_final_stats=1 $dictionary "$corpus" $given
        ;;
    esac
    [ "$(find "build-fuzz/found/$target" -type f | wc -l)" -gt "$before" ] && found=1
done
[ $found = 0 ] || echo "fuzz: see build-fuzz/found"
exit $found
