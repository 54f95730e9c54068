"""./main on lesser processors: what was built for this machine says which instruction sets another one lacks, and never dies of an
illegal instruction (row 39 of the public cases). Under qemu's user mode, where that is installed.
"""
import ctypes
import os
import platform
import re
import shutil
import struct
import subprocess

import pytest

from server_support import SANITIZED

MAIN = os.environ.get("DT_MAIN", "")
MAKE_MODEL = os.environ.get("DT_MAKE_MODEL", "")
QEMU = shutil.which("qemu-x86_64") or shutil.which("qemu-x86_64-static")

pytestmark = [pytest.mark.skipif(not os.access(MAIN, os.X_OK) or not os.access(MAKE_MODEL, os.X_OK),
                                 reason="DT_MAIN or DT_MAKE_MODEL names no program"),
              pytest.mark.skipif(platform.machine() != "x86_64", reason="about x86 instruction sets"),
              pytest.mark.skipif(SANITIZED, reason="no sanitizer runs in the emulator")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("processor") / "tiny.gguf")
    subprocess.run([MAKE_MODEL, path, "--layers", "2", "--embd", "64", "--heads", "4", "--kv-heads", "2", "--head-dim", "16",
                    "--ff", "128", "--vocab", "320", "--ctx", "512", "--type", "q4_0"], check=True, timeout=60)
    return path


ARGUMENTS = ("-t", "1", "-p", "abc", "-n", "6", "--temp", "0")


@pytest.mark.skipif(QEMU is None, reason="qemu-user is not installed")
@pytest.mark.parametrize("processor, lacks", [("Nehalem-v1", "AVX2"), ("Haswell-v4", "AVX-512F")])
def test_lesser_processors(model, processor, lacks):
    lesser = subprocess.run([QEMU, "-cpu", processor, MAIN, "-m", model, *ARGUMENTS], stdin=subprocess.DEVNULL, capture_output=True,
                            timeout=300)
    errors = re.findall(rb"^error: .*", lesser.stderr, re.M)
    if lesser.returncode == 0:  # ggml was built for no more than this processor has
        assert lesser.stdout == subprocess.run([MAIN, "-m", model, *ARGUMENTS], capture_output=True, timeout=120).stdout
    else:
        assert lesser.returncode == 1 and len(errors) == 1, (lesser.returncode, lesser.stderr)
        assert b"this processor lacks" in errors[0] and lacks.encode() in errors[0] and b"DT_NATIVE=OFF" in errors[0]
    version = subprocess.run([QEMU, "-cpu", processor, MAIN, "--version"], capture_output=True, timeout=60)
    assert version.returncode == 0 and version.stdout.startswith(b"DeepTutor ")


def lists_amx():
    with open("/proc/cpuinfo") as file:
        return " amx_tile" in file.read()


def refuse_arch_prctl():
    """A seccomp filter, as some containers have it: arch_prctl(ARCH_REQ_XCOMP_PERM), which asks for AMX, fails with EPERM."""
    load, equal, end = 0x20, 0x15, 0x06
    code = [(load, 0, 0, 0), (equal, 0, 3, 158), (load, 0, 0, 16), (equal, 0, 1, 0x1023), (end, 0, 0, 0x00050001),
            (end, 0, 0, 0x7FFF0000)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    libc = ctypes.CDLL(None)
    libc.prctl(38, 1, 0, 0, 0)  # no new privileges
    filters = struct.pack("HxxxxxxP", len(code), ctypes.addressof(program))
    if libc.prctl(22, 2, ctypes.c_char_p(filters)) != 0:
        os._exit(99)


@pytest.mark.skipif(not os.path.exists("/proc/cpuinfo"), reason="needs /proc")
def test_amx_refused_by_the_kernel(model):
    """Right text all the same, and where the processor lists AMX, a log line."""
    usual = subprocess.run([MAIN, "-m", model, *ARGUMENTS], capture_output=True, timeout=120)
    refused = subprocess.run([MAIN, "-m", model, *ARGUMENTS], capture_output=True, timeout=120, preexec_fn=refuse_arch_prctl)
    if refused.returncode == 99:
        pytest.skip("no seccomp filters here")
    assert refused.returncode == 0, refused.stderr
    if not lists_amx():
        assert refused.stdout == usual.stdout and b"AMX" not in refused.stderr
        pytest.skip("this processor has no AMX that could be refused")
    assert b"AMX" in refused.stderr and refused.stdout.endswith(b"\n")
