"""convert.py against llama.cpp's own converter: the same folder, every key and every tensor's bytes.

Runs where torch, transformers and the pinned source distribution are; counted as skipped elsewhere, since they take several GB.
"""
import importlib.util
import os
import pathlib
import subprocess
import sys
import tarfile

import pytest

from test_convert import families, converted, read_fields
import numpy as np  # test_convert skips where it is missing

ROOT = pathlib.Path(__file__).resolve().parent.parent
NAME = "llama_cpp_python-0.3.36"
SDIST = next((path for folder in (os.environ.get("DT_CACHE"), ROOT / "deps" / "cache") if folder
              for path in [pathlib.Path(folder) / f"{NAME}.tar.gz"] if path.exists()), None)

pytestmark = [
    pytest.mark.skipif(not all(importlib.util.find_spec(name) for name in ("torch", "transformers")),
                       reason="torch and transformers are not installed"),
    pytest.mark.skipif(SDIST is None, reason=f"{NAME}.tar.gz is not in DT_CACHE or deps/cache"),
]

# What differs on purpose: Mistral's window, which llama.cpp drops; Qwen's epsilon, which llama.cpp writes under a key that it does
# not read.
ONLY_OURS = {"mistral": {"llama.attention.sliding_window"}, "qwen1": {"qwen.attention.layer_norm_rms_epsilon"}}
ONLY_THEIRS = {"qwen1": {"qwen.attention.layer_norm_epsilon"}}
PRE = {"llama2": "default", "mistral": "default", "gemma3": "default", "llama3": "llama-bpe", "smollm2": "smollm",
       "smollm3": "smaug-bpe", "qwen1": "qwen2", "qwen2": "qwen2", "qwen3": "qwen2", "qwen3moe": "qwen2", "chatglm3": "chatglm-spm",
       "glm4": "glm4"}  # chatglm2 and glm-4-9b-chat need code from their folder


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    inside = f"{NAME}/vendor/llama.cpp/"
    with tarfile.open(SDIST) as archive:
        wanted = [member for member in archive if member.name.startswith(tuple(
            inside + name for name in ("convert_hf_to_gguf.py", "conversion/", "gguf-py/gguf/")))]
        archive.extractall(folder, wanted, filter="data")
    return folder / inside


@pytest.mark.parametrize("name,outtype", [(name, "bf16") for name in PRE] + [("llama3", "f16"), ("qwen2", "f32")])
def test_equal(tokenizers, source, tmp_path, name, outtype):
    made = families.make(name, tmp_path / name, tokenizers)
    ours, theirs = tmp_path / "ours.gguf", tmp_path / "theirs.gguf"
    converted(made.folder, ours, "--outtype", outtype)
    result = subprocess.run([sys.executable, str(ROOT / "tests/support/llama_cpp_convert.py"), str(source), str(made.folder),
                             str(theirs), outtype, PRE[name]], capture_output=True, text=True, timeout=300,
                            env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert result.returncode == 0, result.stderr[-2000:]
    (a, our_tensors), (b, their_tensors) = read_fields(ours), read_fields(theirs)
    assert set(a) - set(b) == ONLY_OURS.get(name, set()) and set(b) - set(a) == ONLY_THEIRS.get(name, set())
    assert not [key for key in set(a) & set(b) if a[key] != b[key]]
    assert set(our_tensors) == set(their_tensors)
    for key, tensor in our_tensors.items():
        other = their_tensors[key]
        assert tensor.tensor_type == other.tensor_type and list(tensor.shape) == list(other.shape), key
        if key == "rope_freqs.weight":  # torch's power is off by one unit in the last place
            assert np.allclose(tensor.data, other.data, rtol=2e-7, atol=0)
        else:
            assert tensor.data.tobytes() == other.data.tobytes(), key
