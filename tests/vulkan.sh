#!/usr/bin/env bash
# The tests of caches on devices, on Mesa's software Vulkan device (lavapipe): it needs no GPU. Builds in build-vulkan/; compiling
# ggml's shaders takes a while, and so does Mesa for some of them: half an hour in all. Debian: apt-get install mesa-vulkan-drivers
# libvulkan-dev glslc spirv-headers, the drivers with -t bookworm-backports (docs/devices.md says why). DT_TEST_ONLY=NAME: one test.
set -eu
unset CDPATH # cd would look there first
cd "$(dirname "$0")/.."
cmake -S . -B build-vulkan -DDT_VULKAN=ON >/dev/null
cmake --build build-vulkan --target test_device -j "${DT_JOBS:-2}"
# ggml leaves software devices out unless one is named
GGML_VK_VISIBLE_DEVICES=0 DT_TEST_DEVICE=vulkan build-vulkan/tests/test_device
