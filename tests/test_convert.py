"""convert.py on tiny Hugging Face folders of every family: the converted file in libllama gives the logits that a numpy model
computes from the folder's own weights, and the token ids that the folder's own tokenizer gives.

DT_ASK_LLAMA, DT_QUANTIZE and DT_MAIN name programs of the build. Invariant: numbers are finite before they are compared.
"""
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
ASK = os.environ.get("DT_ASK_LLAMA", "")
MAIN = os.environ.get("DT_MAIN", "")
PACKAGES = ("numpy", "gguf", "safetensors", "sentencepiece", "tokenizers", "tqdm")

pytestmark = pytest.mark.skipif(not os.access(ASK, os.X_OK), reason="DT_ASK_LLAMA names no program")
for package in PACKAGES:
    pytest.importorskip(package)

import gguf  # noqa: E402
import numpy as np  # noqa: E402
import hf_families as families  # noqa: E402
import hf_folder as hf  # noqa: E402
from convert.command import main as convert  # noqa: E402


def run_convert(folder, out, *args):
    """Exit code; the output is a file only where it is 0."""
    code = convert(["--pytorch_model_path", str(folder), "-o", str(out), *args])
    assert (code == 0) == out.exists()
    left = [path.name for path in out.parent.iterdir() if path.name.endswith(".part")]
    assert not left
    return code


def converted(folder, out, *args):
    assert run_convert(folder, out, *args) == 0
    return out


def refused(capsys, folder, out, *args):
    """The error's text."""
    assert run_convert(folder, out, *args) == 1
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return text[text.rindex("error: "):]


def llama_logits(path, ids, positions, *chunk):
    result = subprocess.run([ASK, str(path), "logits", ",".join(map(str, positions)), *map(str, chunk)], input=str(list(ids)),
                            capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return np.array([json.loads(line) for line in result.stdout.splitlines()])


def llama_tokens(path, text, *flags):
    result = subprocess.run([ASK, str(path), "tokens", *flags], input=text.encode(), capture_output=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def read_fields(path):
    """key -> value, and the tensors by name"""
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    return fields, {tensor.name: tensor for tensor in reader.tensors}


def random_ids(n, low=3, high=300, seed=3):
    return [int(i) for i in np.random.default_rng(seed).integers(low, high, n)]


@pytest.fixture(scope="session")
def all_families(tokenizers, tmp_path_factory):
    """name -> (what was made, the converted file); made when first asked for."""
    base, done = tmp_path_factory.mktemp("families"), {}

    def get(name):
        if name not in done:
            made = families.make(name, base / name, tokenizers)
            done[name] = made, converted(made.folder, base / f"{name}.gguf", "--outtype", "f32")
        return done[name]

    return get


# ---- families ----


@pytest.mark.parametrize("name", families.FAMILIES)
def test_logits(all_families, name):
    made, path = all_families(name)
    positions = [0, 5, 20] if name == "mistral" else [0, 10, 59]  # libllama gives Llama files no window
    ids = random_ids(60)
    fields, _ = read_fields(path)
    assert fields["general.architecture"] == made.architecture
    assert families.close(llama_logits(path, ids, positions), made.logits(ids, positions), 5e-3)


def test_a_window_is_written(all_families):
    made, path = all_families("mistral")
    fields, _ = read_fields(path)
    assert fields["llama.attention.sliding_window"] == made.config["sliding_window"]
    fields, _ = read_fields(all_families("llama2")[1])
    assert "llama.attention.sliding_window" not in fields


@pytest.mark.skipif(not os.access(MAIN, os.X_OK), reason="DT_MAIN names no program")
@pytest.mark.parametrize("name", ["llama2", "llama3", "smollm2"])
def test_main_generates(all_families, tmp_path, name):
    made, path = all_families(name)
    stats = tmp_path / "stats.json"
    result = subprocess.run([MAIN, "-m", str(path), "-p", "And God said", "-n", "4", "--temp", "0", "-t", "1", "--ignore-eos",
                             "--stats-json", str(stats)], capture_output=True, timeout=300)
    assert result.returncode == 0, result.stderr
    ids = llama_tokens(path, "And God said")
    for token in hf.read_json(stats)["generated_token_ids"]:
        logits = made.logits(ids, [len(ids) - 1])[0]
        assert logits[token] > logits.max() - 1e-2 * np.abs(logits).max()
        ids.append(token)


# ---- tokenizers ----


def source_ids(made, text):
    """What the folder's own tokenizer makes of a text, and the start token that libllama puts before it."""
    from tokenizers import Tokenizer
    import sentencepiece

    if (made.folder / "tokenizer.json").exists():
        return Tokenizer.from_file(str(made.folder / "tokenizer.json")).encode(text).ids
    if (made.folder / "tokenizer.model").exists():
        model = sentencepiece.SentencePieceProcessor(str(made.folder / "tokenizer.model"))
        start = [] if made.architecture == "chatglm" else [model.bos_id()]
        return start + model.EncodeAsIds(text)
    raise AssertionError("no tokenizer")


@pytest.mark.parametrize("name", [name for name in families.FAMILIES if name not in ("qwen1", "glm4_chat")])
@pytest.mark.parametrize("text", [hf.SAMPLE, "", " a", "\n\n\tx  y"])
def test_token_ids(all_families, name, text):
    made, path = all_families(name)
    assert llama_tokens(path, text, "--plain") == source_ids(made, text)


@pytest.mark.parametrize("name,rule,marks", [("qwen1", hf.QWEN2, families.QWEN_MARKS),
                                             ("glm4_chat", hf.LLAMA3, families.GLM_MARKS)])
def test_token_ids_of_ranks(all_families, tokenizers, name, rule, marks):
    """tiktoken's form has no merges; the tokenizer that the ranks were taken from has."""
    from tokenizers import Tokenizer

    made, path = all_families(name)
    source = Tokenizer.from_str(json.dumps(tokenizers.byte_level(rule, 384, marks)))
    assert llama_tokens(path, hf.SAMPLE) == source.encode(hf.SAMPLE).ids


@pytest.mark.parametrize("name,text,wanted", [
    ("llama3", "<|start_header_id|>a", [380, 382, None]), ("qwen2", "<|im_start|>a<|im_end|>", [382, None, 383]),
    ("qwen1", "<|im_start|>a<|im_end|>", [382, None, 383]), ("smollm2", "<|im_start|>a<|im_end|>", [382, None, 383]),
    ("glm4", "[gMASK]<sop><|user|>", [376, 378, 381]), ("glm4_chat", "[gMASK]<sop><|user|>", [376, 378, 381]),
    ("gemma3", "<start_of_turn>a<end_of_turn>", [2, 4, None, 5]), ("chatglm3", "[gMASK]sop<|user|>", [361, 363, 366]),
    ("chatglm2", "[gMASK]sop", [361, 363]),
])
def test_marks_are_single_ids(all_families, name, text, wanted):
    """One start token where the model has one, none for Qwen and GLM; role marks whole."""
    ids = llama_tokens(all_families(name)[1], text)
    assert len(ids) == len(wanted) and all(b is None or a == b for a, b in zip(ids, wanted)), ids


def test_chatglm2_has_no_roles(all_families):
    fields, _ = read_fields(all_families("chatglm2")[1])
    assert "<|user|>" not in fields["tokenizer.ggml.tokens"] and fields["tokenizer.ggml.tokens"][365] == "[PAD365]"
    assert fields["tokenizer.ggml.tokens"][364] == "eop"


def test_what_is_told_about_a_model(all_families):
    fields, _ = read_fields(all_families("qwen2")[1])
    sampling = {key[len("general.sampling."):]: value for key, value in fields.items() if key.startswith("general.sampling.")}
    assert sampling.keys() == {"top_k", "top_p", "temp", "penalty_repeat"} and sampling["top_k"] == 20
    assert fields["general.license"] == "apache-2.0" and fields["general.languages"] == ["en"] and fields["general.type"] == "model"


@pytest.mark.parametrize("name,flag", [("smollm2", "-cnv"), ("chatglm2", "-cnv"), ("llama2", '-p "Once upon a time"')])
def test_the_command_that_is_told_works(all_families, tmp_path, capsys, name, flag):
    """A chat needs a template."""
    converted(all_families(name)[0].folder, tmp_path / "m.gguf")
    assert capsys.readouterr().err.endswith(f"Run it: ./main -m {tmp_path / 'm.gguf'} {flag}\n")
    if os.access(MAIN, os.X_OK):
        result = subprocess.run([MAIN, "-m", str(tmp_path / "m.gguf"), "-cnv", "-n", "1"], input=b"a\n", capture_output=True,
                                timeout=300)
        assert (result.returncode == 0) == (flag == "-cnv"), result.stderr


def test_help_needs_no_packages():
    """Of a Python that has none, in lines for a terminal."""
    def told(*arguments):
        return subprocess.run([sys.executable, "-I", "-S", str(HERE.parent / "convert.py"), *arguments], capture_output=True, text=True,
                              timeout=60, env={**os.environ, "COLUMNS": "200"})
    result = told("--help")
    assert result.returncode == 0 and result.stdout.startswith("usage: convert.py") and "--quantize" in result.stdout, result
    assert all(len(line) <= 80 for line in result.stdout.splitlines()), result.stdout
    assert told("--wrong").returncode == 2


def test_packages_that_a_linked_venv_lacks_too(tmp_path):
    """It isn't started for ever."""
    project = tmp_path / "project"
    (project / "python").mkdir(parents=True)
    shutil.copy(HERE.parent / "convert.py", project)
    shutil.copy(HERE.parent / "python/command_line.py", project / "python")
    shutil.copytree(HERE.parent / "python/convert", project / "python/convert")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "elsewhere")], check=True, timeout=120)
    (project / ".venv").symlink_to(tmp_path / "elsewhere")
    result = subprocess.run([sys.executable, "-I", "-S", str(project / "convert.py"), "--model_path", str(tmp_path)], timeout=60,
                            capture_output=True, text=True)
    assert result.returncode == 1 and "is missing, perhaps others too" in result.stderr, result


@pytest.mark.parametrize("script", ["convert.py", "python/plan.py", "python/eval/report.py", "bench/peers.py"])
def test_help_that_cannot_be_written(script):
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    for target, reason in (("/dev/full", "No space left"), ("&-", "closed")):
        told = subprocess.run(["sh", "-c", f'exec "$0" "$1" --help >{target}', sys.executable, str(HERE.parent / script)],
                              stderr=subprocess.PIPE, text=True, timeout=60)
        assert told.returncode == 1 and reason in told.stderr and told.stderr.startswith("error: ") and told.stderr.count("\n") == 1, told


def test_special_tokens(all_families):
    fields, _ = read_fields(all_families("llama3")[1])
    assert [fields[f"tokenizer.ggml.{kind}_token_id"] for kind in ("bos", "eos")] == [380, 381]
    assert fields["tokenizer.ggml.pre"] == "llama-bpe" and fields["tokenizer.chat_template"].startswith("{{ bos_token }}")
    fields, _ = read_fields(all_families("qwen2")[1])
    assert fields["tokenizer.ggml.eos_token_id"] == 383 and fields["tokenizer.ggml.pre"] == "qwen2"
    assert fields["tokenizer.ggml.add_bos_token"] is False
    fields, _ = read_fields(all_families("glm4")[1])
    assert [fields[f"tokenizer.ggml.{kind}_token_id"] for kind in ("eos", "eot")] == [381, 381]
    assert fields["tokenizer.ggml.pre"] == "glm4"
