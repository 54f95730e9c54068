#!/usr/bin/env bash
# A build whose backends are libraries (-DDT_BACKENDS_LOADABLE=ON): programs start without them, find those that lie beside ggml also
# after the installed tree was moved, never load one from the current folder, and compute what the other build does. Builds in
# build-loadable/. DT_LOADABLE_OPTIONS="-DDT_VULKAN=ON" puts a backend beside the CPU's.
set -eu
unset CDPATH # cd would look there first
cd "$(dirname "$0")/.."
tree=build-loadable
# shellcheck disable=SC2086
cmake -S . -B $tree -DDT_BACKENDS_LOADABLE=ON ${DT_LOADABLE_OPTIONS:-} >/dev/null
cmake --build $tree --target programs test_device make_model -j "${DT_JOBS:-2}"
$tree/tests/test_device

fail() {
    echo "loadable: $*" >&2
    exit 1
}
temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT
cmake --install $tree --prefix "$temporary/first" >/dev/null
mv "$temporary/first" "$temporary/moved"
program=$temporary/moved/bin/deeptutor
libraries=$(dirname "$(find "$temporary/moved" -name 'libggml-base.so*' | head -n 1)")
ldd "$program" | grep -q "libggml.so.* => $temporary/moved" || fail "the moved program does not find its own ggml"
if ldd "$program" | grep -qE 'libvulkan|libcuda|libcublas'; then
    fail "the program itself wants a device's libraries"
fi
"$program" --device list >"$temporary/list" 2>"$temporary/errors" || fail "--device list failed"
grep -q '^cpu ' "$temporary/list" || fail "no CPU in the list"
[ ! -s "$temporary/errors" ] || fail "--device list says something on stderr"
$tree/tests/make_model "$temporary/tiny.gguf" --layers 2 --embd 64 --heads 4 --kv-heads 2 --head-dim 16 --ff 128 --vocab 320 --ctx 256
"$program" -m "$temporary/tiny.gguf" -p abc -n 4 --temp 0 >/dev/null 2>&1 || fail "the moved program does not compute"
mkdir "$temporary/elsewhere"
mv "$libraries"/libggml-cpu*.so "$temporary/elsewhere"
if (cd "$temporary/elsewhere" && "$program" -m "$temporary/tiny.gguf" -p abc -n 4) >/dev/null 2>"$temporary/errors"; then
    fail "a backend of the current folder was loaded"
fi
grep -q "CPU backend" "$temporary/errors" || fail "without the CPU's backend it is not said what is missing"
echo "loadable: passed; devices: $(tr '\n' ';' <"$temporary/list")"
