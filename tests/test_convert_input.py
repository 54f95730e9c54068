"""What convert.py reads: files of all forms and states. Every fault is one sentence that names the file, tensor or number, before
any output exists; a pickle that wants more than tensors is refused by name.
"""
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import zipfile

import pytest

from test_convert import (HERE, converted, families, hf, llama_logits, llama_tokens, random_ids, read_fields, refused, run_convert)
import numpy as np  # test_convert skips where it is missing


def make(tokenizers, tmp_path, name="llama2", **more):
    return families.make(name, tmp_path / "folder", tokenizers, **more)


def tensor_values(path):
    """name -> F32"""
    values = {}
    for name, tensor in read_fields(path)[1].items():
        data = tensor.data
        values[name] = hf.from_bf16(data.view(np.uint16)) if tensor.tensor_type.name == "BF16" else data.astype(np.float32)
    return values


# ---- containers ----


@pytest.mark.parametrize("container,shards", [("safetensors", 3), ("zip", 1), ("zip", 2), ("legacy", 1), ("legacy", 2)])
def test_containers_are_equal(tokenizers, tmp_path, container, shards):
    one = make(tokenizers, tmp_path, formats=lambda name: "F16" if "mlp" in name else "F32" if "norm" in name else "BF16")
    expected = converted(one.folder, tmp_path / "one.gguf", "--outtype", "bf16").read_bytes()
    (one.folder / "model.safetensors").unlink()
    again = make(tokenizers, tmp_path, formats=lambda name: "F16" if "mlp" in name else "F32" if "norm" in name else "BF16",
                 container=container, shards=shards)
    assert converted(again.folder, tmp_path / "two.gguf", "--outtype", "bf16").read_bytes() == expected


def test_shards_without_an_index(tokenizers, tmp_path, capsys):
    made = make(tokenizers, tmp_path, shards=3)
    (made.folder / "model.safetensors.index.json").unlink()
    converted(made.folder, tmp_path / "out.gguf")
    (made.folder / "model-00002-of-00003.safetensors").unlink()
    assert "lacks: model-00002-of-00003.safetensors; fetch what is missing into it\n" in refused(capsys, made.folder, tmp_path / "bad.gguf")


def test_a_transposed_tensor(tokenizers, tmp_path):
    """A view with strides, as torch.save writes it."""
    from convert.pickles import read_pickle

    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    writer = hf.Pickler({}, legacy=False)
    writer.out = bytearray(b"\x80\x02ccollections\nOrderedDict\n)R(")
    writer.text("a")
    start = len(writer.out)
    writer.tensor("0", "F32", (4, 3), 12)
    strides = bytes(writer.out[start:]).replace(b"J\x03\0\0\0J\x01\0\0\0t\x89", b"J\x01\0\0\0J\x04\0\0\0t\x89")
    writer.out[start:] = strides + b"u."
    path = tmp_path / "t.bin"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", bytes(writer.out))
        archive.writestr("archive/data/0", values.tobytes())
    tensor = read_pickle(path)["a"]
    assert np.array_equal(tensor.read(), values.T) and np.array_equal(tensor.read(1, 3), values.T[1:3])


# ---- pickles that want more ----


class Evil:
    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("function,args,name", [
    (os.system, ("touch owned",), "posix.system"), (eval, ("1",), "builtins.eval"),
    (subprocess.Popen, (["true"],), "subprocess.Popen"),
    (getattr, ("a", "upper"), "builtins.getattr"),
])
@pytest.mark.parametrize("legacy", [False, True])
def test_malicious_pickle(tokenizers, tmp_path, capsys, monkeypatch, function, args, name, legacy):
    monkeypatch.chdir(tmp_path)
    made = make(tokenizers, tmp_path)
    (made.folder / "model.safetensors").unlink()
    path = made.folder / "pytorch_model.bin"
    evil = pickle.dumps({"a": Evil(function, *args)}, protocol=2, fix_imports=False)
    if legacy:
        head = b"".join(pickle.dumps(value, protocol=2) for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}))
        path.write_bytes(head + evil)
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", evil)
    text = refused(capsys, made.folder, tmp_path / "out.gguf")
    assert f"its pickle wants {name}" in text.replace("nt.system", "posix.system") and str(path) in text
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("container", ["safetensors", "zip", "legacy"])
def test_truncated_at_many_places(tokenizers, tmp_path, capsys, container):
    made = make(tokenizers, tmp_path, container=container)
    path = next(path for path in made.folder.iterdir() if path.name.startswith(("model.", "pytorch")))
    whole = path.read_bytes()
    for n in [0, 1, 7, 9, 100, 2000, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:n])
        text = refused(capsys, made.folder, tmp_path / "out.gguf")
        assert str(path) in text, (n, text)


def test_flipped_bytes_in_the_headers(tokenizers, tmp_path, capsys):
    """Any sentence will do, and a file that still reads; never a traceback."""
    for container in ("safetensors", "zip", "legacy"):
        made = families.make("llama2", tmp_path / container, tokenizers, container=container)
        path = next(path for path in made.folder.iterdir() if path.name.startswith(("model.", "pytorch")))
        whole = path.read_bytes()
        random = np.random.default_rng(5)
        for place in random.integers(0, min(len(whole), 3000), 25):
            damaged = bytearray(whole)
            damaged[place] ^= int(random.integers(1, 256))
            path.write_bytes(damaged)
            out = tmp_path / "out.gguf"
            out.unlink(missing_ok=True)
            run_convert(made.folder, out)
            assert "Traceback" not in capsys.readouterr().err


# ---- what is missing or contradicts ----


def test_everything_missing_at_once(tmp_path, capsys):
    folder = tmp_path / "empty"
    folder.mkdir()
    text = refused(capsys, folder, tmp_path / "out.gguf")
    assert "config.json" in text and "the weights" in text
    assert "is no folder" in refused(capsys, tmp_path / "nowhere", tmp_path / "out.gguf")


def test_tokenizer_and_shard_missing(tokenizers, tmp_path, capsys):
    made = make(tokenizers, tmp_path, shards=3)
    (made.folder / "tokenizer.model").unlink()
    (made.folder / "model-00003-of-00003.safetensors").unlink()
    text = refused(capsys, made.folder, tmp_path / "out.gguf")
    assert "model-00003-of-00003.safetensors" in text and "the tokenizer (tokenizer.model or tokenizer.json)" in text


def test_index_names_a_tensor_that_is_not_there(tokenizers, tmp_path, capsys):
    made = make(tokenizers, tmp_path, shards=2)
    index = made.folder / "model.safetensors.index.json"
    content = hf.read_json(index)
    content["weight_map"]["model.layers.9.ghost"] = "model-00001-of-00002.safetensors"
    hf.write_json(index, content)
    assert "model.layers.9.ghost" in refused(capsys, made.folder, tmp_path / "out.gguf")


@pytest.mark.parametrize("changes,words", [
    ({"architectures": ["FalconForCausalLM"]}, ["FalconForCausalLM", "not supported", "LlamaForCausalLM", "Qwen3MoeForCausalLM"]),
    ({"architectures": None}, ["no architecture"]),
    ({"hidden_size": None}, ["lacks hidden_size"]),
    ({"num_hidden_layers": 3}, ["lacks tensors", "model.layers.2."]),
    ({"num_hidden_layers": 0}, ["num_hidden_layers is 0"]),
    ({"intermediate_size": 97}, ["mlp.gate_proj.weight", "[97, 64] was expected", "found [96, 64]"]),
    ({"num_key_value_heads": 4}, ["self_attn.k_proj.weight", "[64, 64] was expected", "found [32, 64]"]),
    ({"rope_scaling": {"type": "ntk-by-hand", "factor": 2.0}}, ["'ntk-by-hand' is not supported", "yarn"]),
    ({"rope_scaling": {"type": "yarn"}}, ["no factor"]),
    ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
    ({"partial_rotary_factor": 1.5}, ["partial_rotary_factor is 1.5", "from 0 to 1"]),
    ({"partial_rotary_factor": float("nan")}, ["partial_rotary_factor is nan"]),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": float("nan")}}, ["embeddings nan"]),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": float("nan")}}, ["low_freq_factor nan"]),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "high_freq_factor": "4"}}, ["high_freq_factor '4'"]),
    ({"hidden_act": "relu"}, ["relu"]),
    ({"hidden_act": "\33[2J" + "x" * 100000}, ["activation \\x1b[2Jxx", "xx [...] xx", "is not supported"]),
    ({"rope_theta": 1e-320}, ["llama.rope.freq_base", "1e-320", "32 bits"]),
    ({"rms_norm_eps": 1e39}, ["layer_norm_rms_epsilon", "32 bits"]),
    ({"rope_scaling": {"type": "linear", "factor": 1e-320}}, ["no factor above zero"]),
])
def test_config_faults(tokenizers, tmp_path, capsys, changes, words):
    made = make(tokenizers, tmp_path)
    config = {**made.config, **changes}
    hf.write_json(made.folder / "config.json", {key: value for key, value in config.items() if value is not None})
    text = refused(capsys, made.folder, tmp_path / "out.gguf")
    assert all(word in text for word in words) and len(text) < 1100, text


def test_a_layer_too_many(tokenizers, tmp_path, capsys):
    made = make(tokenizers, tmp_path)
    hf.write_json(made.folder / "config.json", {**made.config, "num_hidden_layers": 1})
    assert "model.layers.1." in refused(capsys, made.folder, tmp_path / "out.gguf")


def test_broken_json(tokenizers, tmp_path, capsys):
    made = make(tokenizers, tmp_path)
    (made.folder / "config.json").write_text("{")
    assert "config.json cannot be read as JSON" in refused(capsys, made.folder, tmp_path / "out.gguf")


def test_model_name(tokenizers, tmp_path, capsys):
    made = make(tokenizers, tmp_path)
    for name in ("llama", "My-Llama-2-7B", "whatever"):
        converted(made.folder, tmp_path / f"{name}.gguf", "--model_name", name)
    assert read_fields(tmp_path / "My-Llama-2-7B.gguf")[0]["general.name"] == "My-Llama-2-7B"
    text = refused(capsys, made.folder, tmp_path / "out.gguf", "--model_name", "chatglm2-6b")
    assert "means chatglm" in text and "config.json says llama" in text


def test_chatglm_version_must_be_told(tokenizers, tmp_path, capsys):
    made = families.make("chatglm2", tmp_path / "folder", tokenizers, changes={"_name_or_path": None})
    assert "--model_name chatglm2-6b" in refused(capsys, made.folder, tmp_path / "out.gguf")
    for name, roles in (("chatglm2-6b", False), ("chatglm3-6b-32k", True)):
        converted(made.folder, tmp_path / f"{name}.gguf", "--model_name", name)
        assert ("<|user|>" in read_fields(tmp_path / f"{name}.gguf")[0]["tokenizer.ggml.tokens"]) == roles


def test_device_and_progress(tokenizers, tmp_path, capsys):
    made = make(tokenizers, tmp_path)
    converted(made.folder, tmp_path / "out.gguf", "--device", "cuda")
    text = capsys.readouterr().err
    assert "runs on the CPU" in text and "MB/s" in text


def test_not_enough_disk(tokenizers, tmp_path, capsys, monkeypatch):
    made = make(tokenizers, tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 1000))
    assert "not enough disk space" in refused(capsys, made.folder, tmp_path / "out.gguf")


# ---- heads that are tied, rows that are too many or too few ----


def test_tied_embeddings(tokenizers, tmp_path, capsys):
    made = make(tokenizers, tmp_path)
    weights = dict(made.weights)
    config = {**made.config, "tie_word_embeddings": True}
    hf.write_json(made.folder / "config.json", config)  # with lm_head: not used, as in transformers
    tensors = read_fields(converted(made.folder, tmp_path / "a.gguf"))[1]
    assert "output.weight" not in tensors
    head = weights.pop("lm_head.weight")
    hf.save_weights(made.folder, weights)
    expected = converted(made.folder, tmp_path / "b.gguf").read_bytes()
    assert (tmp_path / "a.gguf").read_bytes() == expected
    ids = random_ids(9)
    reference = made.reference(config, weights)
    assert families.close(llama_logits(tmp_path / "b.gguf", ids, [8]), reference.logits(ids, [8]), 1e-2)
    hf.write_json(made.folder / "config.json", made.config)  # without lm_head, not tied
    assert "lm_head.weight" in refused(capsys, made.folder, tmp_path / "c.gguf")
    hf.save_weights(made.folder, {**weights, "lm_head.weight": head})
    assert "output.weight" in read_fields(converted(made.folder, tmp_path / "d.gguf"))[1]


def test_padding_rows(tokenizers, tmp_path, capsys):
    """64 rows more than config.json says: tokens that nothing is made of. Two tokens more than rows: an error with both numbers."""
    made = make(tokenizers, tmp_path, name="qwen2")
    weights = dict(made.weights)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = np.concatenate([weights[name], np.zeros((64, 64), np.float32)])
    hf.save_weights(made.folder, weights)
    fields, tensors = read_fields(converted(made.folder, tmp_path / "a.gguf"))
    assert len(fields["tokenizer.ggml.tokens"]) == 464 == tensors["token_embd.weight"].shape[1]
    assert set(fields["tokenizer.ggml.token_type"][384:]) == {5}
    assert llama_logits(tmp_path / "a.gguf", [1, 2, 3], [2]).shape == (1, 464)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][:382]
    hf.save_weights(made.folder, weights)
    text = refused(capsys, made.folder, tmp_path / "b.gguf")
    assert "384 tokens" in text and "382 rows" in text


def test_a_model_that_also_sees(tokenizers, tmp_path):
    """Gemma 3's larger models hold a picture model too, and say little in config.json."""
    made = families.make("gemma3", tmp_path / "plain", tokenizers)
    expected = read_fields(converted(made.folder, tmp_path / "plain.gguf"))
    for place in ("language_model.model.", "model.language_model."):
        folder = tmp_path / place
        folder.mkdir()
        for name in ("tokenizer.model", "tokenizer_config.json"):
            shutil.copy(made.folder / name, folder)
        text = {key: value for key, value in made.config.items()
                if key not in ("architectures", "rope_theta", "rope_local_base_freq", "max_position_embeddings", "rms_norm_eps",
                               "tie_word_embeddings", "bos_token_id", "eos_token_id")}
        hf.write_json(folder / "config.json", {
            "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
            "text_config": {**text, "rms_norm_eps": 1e-6}, "vision_config": {"hidden_size": 8},
            "bos_token_id": 2, "eos_token_id": [1, 5], "max_position_embeddings": 4096})
        weights = {name.replace("model.", place, 1): value for name, value in made.weights.items()}
        weights["vision_tower.vision_model.embeddings.weight"] = np.zeros((4, 4), np.float32)
        weights["multi_modal_projector.mm_input_projection_weight"] = np.zeros((4, 4), np.float32)
        weights["lm_head.weight"] = np.zeros((4, 4), np.float32)
        hf.save_weights(folder, weights)
        fields, tensors = read_fields(converted(folder, tmp_path / f"{place}gguf"))
        assert {key for key, value in expected[0].items() if fields.get(key) != value} <= {
            "general.name", "tokenizer.ggml.eos_token_id", "general.basename"}
        assert tensors.keys() == expected[1].keys()
        assert all(tensor.data.tobytes() == expected[1][name].data.tobytes() for name, tensor in tensors.items())


def test_beyond_f16(tokenizers, tmp_path, capsys):
    made = make(tokenizers, tmp_path, formats="F32")
    made.weights["lm_head.weight"][3, 3] = 1e6
    hf.save_weights(made.folder, made.weights, "F32")
    text = refused(capsys, made.folder, tmp_path / "a.gguf", "--outtype", "f16")
    assert "lm_head.weight" in text and "--outtype bf16" in text
    converted(made.folder, tmp_path / "b.gguf", "--outtype", "bf16")


@pytest.mark.parametrize("formats,outtype,wanted", [("BF16", "auto", "BF16"), ("F16", "auto", "F16"), ("F32", "auto", "F16"),
                                                    ("F32", "bf16", "BF16"), ("BF16", "f32", "F32"), ("BF16", "f16", "F16")])
def test_number_formats(tokenizers, tmp_path, formats, outtype, wanted):
    made = make(tokenizers, tmp_path, formats=formats)
    path = converted(made.folder, tmp_path / "out.gguf", "--outtype", outtype)
    tensors, values = read_fields(path)[1], tensor_values(path)
    assert tensors["blk.0.ffn_up.weight"].tensor_type.name == wanted and tensors["blk.0.attn_norm.weight"].tensor_type.name == "F32"
    source = made.weights["model.layers.0.mlp.up_proj.weight"]
    rounded = {"F32": source, "F16": source.astype(np.float16).astype(np.float32),
               "BF16": hf.from_bf16(hf.to_bf16(source))}[wanted].reshape(-1)
    assert np.array_equal(values["blk.0.ffn_up.weight"].reshape(-1), rounded)


# ---- tokenizers in other forms ----


def test_sentencepiece_as_tokenizer_json(tokenizers, tmp_path):
    """Llama 2 and Gemma saved with tokenizer.json only: the same ids as with tokenizer.model."""
    for name, prepend in (("llama2", True), ("gemma3", False)):
        made = families.make(name, tmp_path / name, tokenizers)
        expected = llama_tokens(converted(made.folder, tmp_path / f"{name}-a.gguf"), hf.SAMPLE)
        model = made.folder / "tokenizer.model"
        hf.write_json(made.folder / "tokenizer.json", hf.byte_fallback_json(model, prepend))
        model.unlink()
        path = converted(made.folder, tmp_path / f"{name}-b.gguf")
        assert read_fields(path)[0]["tokenizer.ggml.model"] == "llama"
        assert llama_tokens(path, hf.SAMPLE) == expected
        from tokenizers import Tokenizer
        start = 2 if name == "gemma3" else 1
        ids = Tokenizer.from_file(str(made.folder / "tokenizer.json")).encode(hf.SAMPLE, add_special_tokens=False).ids
        assert expected == [start] + ids


def test_both_tokenizers_and_added_tokens(tokenizers, tmp_path):
    made = families.make("llama2", tmp_path / "folder", tokenizers, changes={"vocab_size": 364})
    weights = hf.random_weights(hf.llama_names(made.config), 1)
    hf.save_weights(made.folder, weights)
    tokenizer = hf.byte_fallback_json(made.folder / "tokenizer.model", True, marks=["<|one|>", "<|two|>"])
    hf.write_json(made.folder / "tokenizer.json", tokenizer)
    settings = hf.read_json(made.folder / "tokenizer_config.json")
    settings["added_tokens_decoder"] = {"361": hf.token(361, "<|two|>", True), "362": hf.token(362, "plain", False)}
    hf.write_json(made.folder / "tokenizer_config.json", settings)
    path = converted(made.folder, tmp_path / "out.gguf")
    fields, _ = read_fields(path)
    assert fields["tokenizer.ggml.tokens"][360:] == ["<|one|>", "<|two|>", "plain", "[PAD363]"]
    assert fields["tokenizer.ggml.token_type"][360:] == [3, 3, 4, 5]
    assert llama_tokens(path, "<|one|>plain")[-2:] == [360, 362]


def test_merges_as_strings_and_pairs(tokenizers, tmp_path):
    made = make(tokenizers, tmp_path, name="qwen2")
    tokenizer = hf.read_json(made.folder / "tokenizer.json")
    assert isinstance(tokenizer["model"]["merges"][0], list)
    expected = converted(made.folder, tmp_path / "a.gguf").read_bytes()
    tokenizer["model"]["merges"] = [" ".join(pair) for pair in tokenizer["model"]["merges"]]
    hf.write_json(made.folder / "tokenizer.json", tokenizer)
    assert converted(made.folder, tmp_path / "b.gguf").read_bytes() == expected
    (made.folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(tokenizer["model"]["merges"]) + "\n", encoding="utf-8")
    tokenizer["model"]["merges"] = []
    hf.write_json(made.folder / "tokenizer.json", tokenizer)
    assert converted(made.folder, tmp_path / "c.gguf").read_bytes() == expected


def test_unknown_split_rule(tokenizers, tmp_path, capsys):
    made = make(tokenizers, tmp_path, name="qwen2")
    tokenizer = hf.read_json(made.folder / "tokenizer.json")
    tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": "\\w+|\\W+"}
    hf.write_json(made.folder / "tokenizer.json", tokenizer)
    assert "\\w+|\\W+" in refused(capsys, made.folder, tmp_path / "out.gguf")


def test_bytes_that_are_said_to_fall_back(tokenizers, tmp_path):
    """byte_fallback says nothing where bytes are split first; taken at its word, the model could read no text."""
    made = make(tokenizers, tmp_path, name="qwen2")
    expected = converted(made.folder, tmp_path / "a.gguf").read_bytes()
    tokenizer = hf.read_json(made.folder / "tokenizer.json")
    tokenizer["model"]["byte_fallback"] = True
    hf.write_json(made.folder / "tokenizer.json", tokenizer)
    assert converted(made.folder, tmp_path / "b.gguf").read_bytes() == expected


@pytest.mark.parametrize("value,wanted", [(True, True), (1, True), (0, False), (None, None)])
def test_prefix_space_as_a_number(tokenizers, tmp_path, value, wanted):
    made = make(tokenizers, tmp_path, name="llama2")
    settings = hf.read_json(made.folder / "tokenizer_config.json")
    hf.write_json(made.folder / "tokenizer_config.json", {**settings, "add_prefix_space": value})
    path = converted(made.folder, tmp_path / "out.gguf")
    assert read_fields(path)[0].get("tokenizer.ggml.add_space_prefix") is wanted
    assert llama_tokens(path, "ab")


def test_a_zero_byte_in_a_token(tokenizers, tmp_path, capsys):
    made = make(tokenizers, tmp_path, name="llama2")
    settings = hf.read_json(made.folder / "tokenizer_config.json")
    settings["added_tokens_decoder"] = {"360": hf.token(360, "a\0b", False)}
    hf.write_json(made.folder / "tokenizer_config.json", settings)
    assert "token 360, 'a\\x00b', has a zero byte" in refused(capsys, made.folder, tmp_path / "out.gguf")


def test_damaged_ranks(tokenizers, tmp_path, capsys):
    made = make(tokenizers, tmp_path, name="qwen1")
    path = made.folder / "qwen.tiktoken"
    lines = path.read_text().splitlines(keepends=True)
    for bad in (lines[:100] + lines[101:], lines[:200], ["#\n"] + lines, lines[:-1] + ["!!!! 5\n"]):
        path.write_text("".join(bad))
        assert str(path) in refused(capsys, made.folder, tmp_path / "out.gguf")


# ---- a run that is stopped ----


def test_a_stopped_run_leaves_nothing(tokenizers, tmp_path):
    """Stopped while it writes; the tensor is large enough to be caught at it."""
    made = make(tokenizers, tmp_path)
    config = {**made.config, "intermediate_size": 300000}
    hf.write_json(made.folder / "config.json", config)
    entries = {name: ("F32", shape, bytes(4 * int(np.prod(shape)))) for name, shape in hf.llama_names(config).items()}
    hf.save_entries(made.folder, entries)
    out = tmp_path / "place" / "out.gguf"
    process = subprocess.Popen([sys.executable, str(HERE.parent / "convert.py"), "--pytorch_model_path", str(made.folder), "-o",
                                str(out), "--outtype", "bf16"], stderr=subprocess.PIPE)
    part = out.with_name("out.gguf.converting.part")
    deadline = time.monotonic() + 60
    while not part.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    assert process.returncode == 143 and not list(out.parent.iterdir())


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="the peak is read from /proc")
def test_memory_is_bounded(tokenizers, tmp_path):
    """Three matrices of 150 MB; what the process needs is far less than one of them and the interpreter with its packages."""
    made = make(tokenizers, tmp_path)
    config = {**made.config, "intermediate_size": 600000, "num_hidden_layers": 1}
    hf.write_json(made.folder / "config.json", config)
    entries = {name: ("F32", shape, bytes(4 * int(np.prod(shape)))) for name, shape in hf.llama_names(config).items()}
    hf.save_entries(made.folder, entries)
    code = ("import sys; sys.path.insert(0, sys.argv[1]); from convert.command import main; main(sys.argv[2:]); "
            "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])")
    result = subprocess.run([sys.executable, "-c", code, str(HERE.parent / "python"), "--pytorch_model_path", str(made.folder),
                             "-o", str(tmp_path / "out.gguf"), "--outtype", "bf16"], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 250_000


def nodes(value, path=()):
    """Paths to everything in a JSON value; of lists, the first two."""
    yield path
    if isinstance(value, dict):
        children = value.items()
    else:
        children = list(enumerate(value))[:2] if isinstance(value, list) else []
    for key, child in children:
        yield from nodes(child, path + (key,))


@pytest.mark.parametrize("name", ["qwen2", "gemma3", "glm4_chat"])
def test_values_of_another_kind(tokenizers, tmp_path, capsys, name):
    """Somewhere in a JSON file stands what should not stand there, or README.md or the vocabulary is damaged. Any sentence will do, and
    a file that still reads; never a traceback."""
    made = make(tokenizers, tmp_path, name)
    random = np.random.default_rng(7)
    wrong = [None, -1, 0, "", [], {}, 1e30, "x" * 3000, True, [None], {"a": 1}, "\ud800"]
    for path in sorted(made.folder.glob("*")):
        whole = path.read_bytes()
        for _ in range(20 if path.suffix in (".json", ".md", ".model") else 0):
            if path.suffix == ".json":
                value = json.loads(whole)
                *way, last = ("value", *list(nodes(value))[random.integers(len(list(nodes(value))))])
                root = place = {"value": value}
                for key in way:
                    place = place[key]
                place[last] = wrong[random.integers(len(wrong))]
                path.write_text(json.dumps(root["value"]))
            else:
                damaged = bytearray(whole)
                damaged[random.integers(min(len(whole), 3000))] ^= int(random.integers(1, 256))
                path.write_bytes(damaged)
            out = tmp_path / "out.gguf"
            out.unlink(missing_ok=True)
            run_convert(made.folder, out)
            text = capsys.readouterr().err
            assert "Traceback" not in text and max(map(len, text.splitlines())) < 1100
        path.write_bytes(whole)


def test_kill_9(tokenizers, tmp_path):
    """What is under the final name is what was there before, whenever the kill comes; the next run goes well and clears away."""
    made = make(tokenizers, tmp_path)
    out = tmp_path / "out.gguf"
    expected = converted(made.folder, out).read_bytes()
    out.write_bytes(b"old")
    command = [sys.executable, str(HERE.parent / "convert.py"), "--pytorch_model_path", str(made.folder), "-o", str(out)]
    for delay in (0.05, 0.4, 0.6, 0.7, 0.8, 0.9):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        time.sleep(delay)
        process.kill()
        process.wait()
        assert out.read_bytes() in (b"old", expected)
    assert converted(made.folder, out).read_bytes() == expected
