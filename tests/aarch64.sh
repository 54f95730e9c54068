#!/usr/bin/env bash
# The attention kernels on 64-bit ARM, cross-compiled and run under qemu-user, and a check that all of src/ and apps/ compiles there.
#
#   bash tests/aarch64.sh [BUILD-FOLDER]       (build-aarch64)
#
# Needs gcc-aarch64-linux-gnu, g++-aarch64-linux-gnu, qemu-user and, the first time, apt with an arm64 mirror: cmocka for arm64 is
# unpacked into the build folder, nothing is installed. Headers of ggml and libllama come from the unpacked source of the normal
# build; without one, what includes them is left out and said so. Exit code 77: something needed is missing, named on stderr.
set -eu
unset CDPATH # cd would look there first
cd "$(dirname "$0")/.."
build=${1:-build-aarch64}
cc=aarch64-linux-gnu-gcc cxx=aarch64-linux-gnu-g++
for tool in $cc $cxx qemu-aarch64; do
    command -v $tool >/dev/null || { echo "aarch64: $tool is missing (Debian: gcc-aarch64-linux-gnu g++-aarch64-linux-gnu qemu-user)" >&2; exit 77; }
done
mkdir -p "$build/objects"
build=$(cd "$build" && pwd)
root=$build/root libraries=$build/root/usr/lib/aarch64-linux-gnu

if [ ! -e "$libraries/libcmocka.so" ]; then
    mkdir -p "$build/apt/lists/partial" "$build/apt/archives/partial"
    options="-qq -o APT::Architectures=$(dpkg --print-architecture),arm64 -o Dir::State::Lists=$build/apt/lists -o Dir::Cache=$build/apt -o APT::Sandbox::User=$(id -un)"
    (cd "$build/apt" && apt-get $options update && apt-get $options download libcmocka-dev:arm64 libcmocka0:arm64) >"$build/apt.log" 2>&1 ||
        { echo "aarch64: no libcmocka-dev:arm64 to be had, see $build/apt.log" >&2; exit 77; }
    for package in "$build"/apt/*.deb; do dpkg -x "$package" "$root"; done
fi

flags="-std=gnu11 -O2 -Wall -Wextra -Wconversion -Wshadow -Werror -DDT_HAVE_NEON=1 -Isrc -Iinclude"
objects=""
for source in src/base/*.c src/attn/*.c; do
    case $source in *_avx*) continue ;; esac
    object=$build/objects/$(basename "$source" .c).o
    $cc $flags -c "$source" -o "$object"
    objects="$objects $object"
done

# what needs the headers of ggml, libllama and jansson (whose headers are the same on every 64-bit Linux)
ggml=$(ls -d deps/cache/llama.cpp-*/ "${DT_CACHE:-/nonexistent}"/llama.cpp-*/ 2>/dev/null | head -n 1)
mkdir -p "$build/include"
for header in jansson.h jansson_config.h; do
    found=$(find /usr/include -name $header | head -n 1)
    [ -z "$found" ] || cp "$found" "$build/include/"
done
if [ -n "$ggml" ] && [ -e "$build/include/jansson.h" ]; then
    for source in src/*/*.c apps/*.c; do
        case $source in *_avx* | src/base/* | src/attn/*) continue ;; esac
        $cc $flags -isystem "$ggml/ggml/include" -isystem "$ggml/include" -isystem "$build/include" -fsyntax-only "$source"
    done
    $cxx -std=c++17 -Wall -Wextra -DDT_HAVE_LLAMA_COMMON=0 -Isrc -Iinclude -isystem "$ggml/ggml/include" -isystem "$ggml/include" \
        -fsyntax-only src/text/text_shim.cpp
    echo "aarch64: all of src/ and apps/ compiles"
else
    echo "aarch64: no source of ggml or no jansson here: only src/base and src/attn compiled"
fi

# an emulator is slow: fewer scenes
$cc -std=gnu11 -O2 -DDT_TEST_SCENES=40 -Isrc -Iinclude -Itests -isystem "$root/usr/include" tests/test_attn.c $objects \
    -o "$build/test_attn" -L"$libraries" -Wl,-rpath-link,"$libraries" -lcmocka -lm -lpthread
qemu-aarch64 -L /usr/aarch64-linux-gnu -E LD_LIBRARY_PATH="$libraries" "$build/test_attn"
