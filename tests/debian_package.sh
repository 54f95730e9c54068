#!/usr/bin/env bash
# A Debian package on a machine that isn't the one it was built on: installed in a bare Debian 12, where no compiler is, it runs the main
# job; then on processors older than this one, under an emulator; then it goes without a trace.
#
#   sudo bash tests/debian_package.sh build-package/deeptutor_0.1.0_amd64.deb
#
# Needs debootstrap, the network, and the small model (bash run.sh --model; DT_TEST_MODEL names another); qemu-user for the processors.
set -eu -o pipefail
package=$(realpath "${1:?usage: sudo bash tests/debian_package.sh FILE.deb}")
unset CDPATH # cd would look there first
cd "$(dirname "$0")/.."
. tests/support/debian_root.sh
model=${DT_TEST_MODEL:-models/SmolLM2-135M-Instruct.Q4_1.gguf}
[ -f "$model" ] || fail "$model is not there: bash run.sh --model"

make_root
cp "$package" "$root/deeptutor.deb"
cp "$model" "$root/model.gguf"
echo "package: $(dpkg-deb -f "$package" Package Version Architecture Depends | tr '\n' ' ')"
in_root apt-get update -qq || skip "no packages can be had in the new root"
in_root apt-get install -qq ./deeptutor.deb >"$root/install.txt" 2>&1 || { tail -n 20 "$root/install.txt"; fail "it can't be installed"; }
in_root dpkg -L deeptutor >"$root/files.txt"
for file in bin/deeptutor bin/deeptutor-server share/man/man1/deeptutor.1.gz share/bash-completion/completions/deeptutor \
    share/doc/deeptutor/copyright share/doc/deeptutor/changelog.gz share/doc/deeptutor/sbom.cdx.json include/deeptutor.h; do
    grep -q "^/usr/$file$" "$root/files.txt" || fail "it has no /usr/$file"
done
version=$(dpkg-deb -f "$package" Version)
for program in deeptutor deeptutor-bench deeptutor-eval deeptutor-quantize deeptutor-server deeptutor-batch; do
    [ "$(in_root $program --version)" = "DeepTutor $version" ] || fail "$program --version"
done

echo "package: the main job"
in_root deeptutor -m /model.gguf -f /usr/share/doc/deeptutor/examples/genesis.txt -n 128 --temp 0 --cache-eviction \
    >"$root/text.txt" 2>"$root/log.txt" || { tail -n 20 "$root/log.txt"; fail "the main job"; }
[ "$(wc -w <"$root/text.txt")" -gt 40 ] || fail "too little text came"
grep -E '^(prefill|decode|eviction|KV cache)' "$root/log.txt"

if command -v qemu-x86_64 >/dev/null && [ "$(dpkg-deb -f "$package" Architecture)" = amd64 ]; then
    echo "package: an older processor with AVX2 (Haswell, 2013), and one without (Nehalem, 2008)"
    qemu-x86_64 -L "$root" -cpu Haswell "$root/usr/bin/deeptutor" -m "$root/model.gguf" -p "The capital of France is" -n 4 --temp 0 -t 1 \
        >"$root/haswell.txt" 2>"$root/haswell.log" || { tail -n 5 "$root/haswell.log"; fail "it doesn't run on Haswell"; }
    grep -q Paris "$root/haswell.txt" || fail "another text on Haswell"
    ! qemu-x86_64 -L "$root" -cpu Nehalem "$root/usr/bin/deeptutor" -m "$root/model.gguf" -p x -n 1 2>"$root/nehalem.log" || fail "it ran"
    grep -q '^error: .*instructions that this processor lacks: .*AVX2' "$root/nehalem.log" || { cat "$root/nehalem.log"; fail "no sentence"; }
else
    echo "package: qemu-user is missing; other processors were not tried"
fi

in_root apt-get remove -qq deeptutor >/dev/null 2>&1
while read -r file; do
    [ -d "$root$file" ] || [ ! -e "$root$file" ] || fail "$file is left behind"
done <"$root/files.txt"
[ ! -e "$root/usr/share/doc/deeptutor" ] || fail "/usr/share/doc/deeptutor is left behind"
echo "package: installs, runs and goes"
