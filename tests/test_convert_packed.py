"""GPTQ and AWQ checkpoints: every repacked weight against the checkpoint's own value, unpacked number by number in the test."""
import pytest

from test_convert import (converted, families, hf, llama_logits, random_ids, read_fields, refused)
import numpy as np  # test_convert skips where it is missing
import hf_packed

CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
PARTS = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}


def make(tokenizers, folder, method, settings, version=1, left=(), family="llama2", act_order_in=(), **layer_settings):
    """A folder whose projections are packed, but for those in `left`. Returns what was made and the layers."""
    made = families.make(family, folder, tokenizers)
    made.config.update(CONFIG)
    made.config["quantization_config"] = {"quant_method": method, "bits": layer_settings.get("bits", 4), **settings}
    weights = hf.random_weights(hf.llama_names(made.config, biases="qkv" if family == "qwen2" else ()), 6)
    random = np.random.default_rng(7)
    layers = {}
    for part in PARTS:
        name = f"model.layers.0.{part}"
        if part not in left:
            rows, columns = weights.pop(name + ".weight").shape
            layers[name] = hf_packed.Layer(rows, columns, random, act_order=part in act_order_in, **layer_settings)
    entries = {}
    for name, values in weights.items():
        data, made.weights[name] = hf.encode(values, "F16")
        entries[name] = ("F16", values.shape, data)
    made.weights = {name: value for name, value in made.weights.items() if name in weights}
    for name, layer in layers.items():
        entries.update(hf_packed.entries_of(name, layer.gptq(version) if method == "gptq" else layer.awq()))
        made.weights[name + ".weight"] = layer.weight()
    hf.save_entries(made.folder, entries)
    hf.write_json(made.folder / "config.json", made.config)
    return made, layers


def interleave(values, heads):
    """Rows of a head as ggml's llama graph wants them: row 2i is row i, row 2i + 1 is row i + half."""
    out = np.empty_like(values)
    size = len(values) // heads
    for h in range(heads):
        for i in range(size // 2):
            out[h * size + 2 * i], out[h * size + 2 * i + 1] = values[h * size + i], values[h * size + size // 2 + i]
    return out


def check(made, layers, path, wanted, worst=0.0):
    """All layers have the type `wanted` (or a dictionary by part); values deviate by at most `worst(layer)` or a number."""
    tensors = read_fields(path)[1]
    for name, layer in layers.items():
        part = name.split("model.layers.0.")[1]
        tensor = tensors[f"blk.0.{PARTS[part]}.weight"]
        type = wanted[part] if isinstance(wanted, dict) else wanted
        assert tensor.tensor_type.name == type, name
        values = hf_packed.from_blocks(tensor.data.tobytes(), type, layer.q.shape)
        expected = layer.weight()
        if part in ("self_attn.q_proj", "self_attn.k_proj") and made.architecture == "llama":
            expected = interleave(expected, CONFIG["num_attention_heads" if "q_proj" in part else "num_key_value_heads"])
        assert np.isfinite(values).all()
        assert np.abs(values - expected).max() <= (worst(layer) if callable(worst) else worst), name


def half_unit(layer):
    """Half a unit in the last place of the largest F16 that -scale x zero needs."""
    m = layer.scale.astype(np.float64) * layer.zero
    return float(np.spacing(m.astype(np.float16)).astype(np.float64).max()) / 2


@pytest.mark.parametrize("group", [32, 128, -1])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_4_bit(tokenizers, tmp_path, capsys, group, version, symmetric):
    settings = {"group_size": group, "desc_act": False, "sym": symmetric}
    if version == 2:
        settings["checkpoint_format"] = "gptq_v2"
    made, layers = make(tokenizers, tmp_path / "f", "gptq", settings, version, group=group, symmetric=symmetric)
    path = converted(made.folder, tmp_path / "out.gguf")
    check(made, layers, path, "Q4_0" if symmetric else "Q4_1", 0.0 if symmetric else half_unit)
    text = capsys.readouterr().err
    assert ("exact" if symmetric else "largest deviation") in text
    assert read_fields(path)[0]["general.file_type"] == (2 if symmetric else 3)
    ids = random_ids(12)
    assert families.close(llama_logits(path, ids, [11]), made.logits(ids, [11]), 8e-2)  # ggml rounds activations to 8 bits


@pytest.mark.parametrize("zero", [1, 2, 4, 16])
def test_zero_points_that_fit_are_exact(tokenizers, tmp_path, capsys, zero):
    """A power of two only moves the exponent. 16 is what a stored 15 means in GPTQ's first version."""
    made, layers = make(tokenizers, tmp_path / "f", "gptq", {"group_size": 32}, group=32, zero_of=zero)
    check(made, layers, converted(made.folder, tmp_path / "out.gguf"), "Q4_1", 0.0)
    assert "exact" in capsys.readouterr().err


def test_the_reported_deviation_is_the_largest(tokenizers, tmp_path, capsys):
    made, layers = make(tokenizers, tmp_path / "f", "gptq", {"group_size": 32}, group=32, symmetric=False)
    path = converted(made.folder, tmp_path / "out.gguf")
    text = capsys.readouterr().err
    reported = float(text.split("largest deviation of a weight ")[1].split()[0])
    tensors = read_fields(path)[1]
    found = 0
    for name, layer in layers.items():
        target = PARTS[name.split("model.layers.0.")[1]]
        if target not in ("attn_q", "attn_k"):  # whose rows are reordered
            values = hf_packed.from_blocks(tensors[f"blk.0.{target}.weight"].data.tobytes(), "Q4_1", layer.q.shape)
            found = max(found, np.abs(values - layer.weight()).max())
    assert 0 < found <= reported * 1.01


@pytest.mark.parametrize("group", [32, 128])
def test_gptq_8_bit(tokenizers, tmp_path, group):
    made, layers = make(tokenizers, tmp_path / "f", "gptq", {"group_size": group}, group=group, bits=8)
    path = converted(made.folder, tmp_path / "out.gguf")
    check(made, layers, path, "Q8_0", 0.0)


def test_gptq_8_bit_with_zero_points(tokenizers, tmp_path, capsys):
    made, layers = make(tokenizers, tmp_path / "f", "gptq", {"group_size": 32}, group=32, bits=8, symmetric=False)
    path = converted(made.folder, tmp_path / "out.gguf")
    check(made, layers, path, "Q8_0", lambda layer: np.abs(layer.weight()).max() / 127 * 0.56)
    assert "quantized anew" in capsys.readouterr().err


def test_act_order(tokenizers, tmp_path, capsys):
    """Columns of a group not adjacent: quantized anew, and the tensors named; the others stay exact."""
    made, layers = make(tokenizers, tmp_path / "f", "gptq", {"group_size": 32, "desc_act": True}, group=32,
                        act_order_in=("mlp.down_proj", "self_attn.q_proj"))
    path = converted(made.folder, tmp_path / "out.gguf")
    text = capsys.readouterr().err
    warning = next(line for line in text.splitlines() if line.startswith("warning: "))
    assert "mlp.down_proj" in warning and "self_attn.q_proj" in warning and "mlp.up_proj" not in warning
    anew = {part: layers.pop(f"model.layers.0.{part}") for part in ("mlp.down_proj", "self_attn.q_proj")}
    check(made, layers, path, "Q4_0", 0.0)
    check(made, {f"model.layers.0.{part}": layer for part, layer in anew.items()}, path, "Q8_0",
          lambda layer: np.abs(layer.weight()).max() / 127 * 0.56)


def test_act_order_in_whole_blocks(tokenizers, tmp_path, capsys):
    """Groups in another order, but each block of 32 columns within one: exact."""
    made, layers = make(tokenizers, tmp_path / "f", "gptq", {"group_size": 64, "desc_act": True}, group=64)
    entries = {}
    for name, layer in layers.items():
        n = layer.q.shape[1] // 32
        layer.group = np.repeat(np.random.default_rng(1).permutation(np.arange(n) // 2), 32)
        entries.update(hf_packed.entries_of(name, layer.gptq()))
    entries.update({name: ("F16", value.shape, value.astype(np.float16).tobytes()) for name, value in made.weights.items()
                    if name[: -len(".weight")] not in layers})
    hf.save_entries(made.folder, entries)
    check(made, layers, converted(made.folder, tmp_path / "out.gguf"), "Q4_0", 0.0)
    assert "warning" not in capsys.readouterr().err


def test_without_g_idx_and_with_the_old_settings_file(tokenizers, tmp_path):
    made, layers = make(tokenizers, tmp_path / "f", "gptq", {"group_size": 32}, group=32, symmetric=False)
    expected = converted(made.folder, tmp_path / "a.gguf").read_bytes()
    config = dict(made.config)
    hf.write_json(made.folder / "quantize_config.json", config.pop("quantization_config"))
    hf.write_json(made.folder / "config.json", config)
    entries = {name: ("F16", value.shape, value.astype(np.float16).tobytes()) for name, value in made.weights.items()
               if name[: -len(".weight")] not in layers}
    for name, layer in layers.items():
        tensors = layer.gptq()
        del tensors["g_idx"]
        entries.update(hf_packed.entries_of(name, tensors))
    hf.save_entries(made.folder, entries)
    assert converted(made.folder, tmp_path / "b.gguf").read_bytes() == expected


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("family", ["llama2", "qwen2"])
def test_awq(tokenizers, tmp_path, symmetric, family):
    settings = {"group_size": 64, "zero_point": True, "version": "gemm"}
    made, layers = make(tokenizers, tmp_path / "f", "awq", settings, group=64, symmetric=symmetric, family=family)
    path = converted(made.folder, tmp_path / "out.gguf")
    check(made, layers, path, "Q4_0" if symmetric else "Q4_1", 0.0 if symmetric else half_unit)
    ids = random_ids(12)
    assert families.close(llama_logits(path, ids, [11]), made.logits(ids, [11]), 8e-2)  # ggml rounds activations to 8 bits


def test_a_layer_left_as_it_was(tokenizers, tmp_path):
    made, layers = make(tokenizers, tmp_path / "f", "gptq", {"group_size": 32}, group=32, left=("mlp.down_proj",))
    path = converted(made.folder, tmp_path / "out.gguf")
    check(made, layers, path, "Q4_0", 0.0)
    assert read_fields(path)[1]["blk.0.ffn_down.weight"].tensor_type.name == "F16"


def test_experts_of_both_kinds(tokenizers, tmp_path):
    """A stack of experts has one type: where some have zero points, all become Q4_1, exactly."""
    made = families.make("qwen3moe", tmp_path / "f", tokenizers)
    made.config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    hf.write_json(made.folder / "config.json", made.config)
    random, entries, layers = np.random.default_rng(2), {}, {}
    for name, values in made.weights.items():
        if ".experts." in name:
            layer = hf_packed.Layer(*values.shape, random, zero_of=4 if ".experts.1." in name else 8)
            layers[name] = layer
            entries.update(hf_packed.entries_of(name[: -len(".weight")], layer.gptq()))
        else:
            entries[name] = ("F16", values.shape, values.astype(np.float16).tobytes())
    hf.save_entries(made.folder, entries)
    tensor = read_fields(converted(made.folder, tmp_path / "out.gguf"))[1]["blk.1.ffn_up_exps.weight"]
    expected = np.stack([layers[f"model.layers.1.mlp.experts.{e}.up_proj.weight"].weight() for e in range(4)])
    assert tensor.tensor_type.name == "Q4_1"
    assert np.array_equal(hf_packed.from_blocks(tensor.data.tobytes(), "Q4_1", expected.shape), expected)


def test_quantize_touches_only_the_rest(tokenizers, tmp_path):
    made, layers = make(tokenizers, tmp_path / "f", "gptq", {"group_size": 32}, group=32)
    path = converted(made.folder, tmp_path / "out.gguf", "--quantize", "Q8_0")
    check(made, layers, path, "Q4_0", 0.0)
    assert read_fields(path)[1]["token_embd.weight"].tensor_type.name == "Q8_0"


@pytest.mark.parametrize("settings,words", [
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ["bitsandbytes", "original"]),
    ({"quant_method": "gptq", "bits": 3}, ["3 bits"]),
    ({"quant_method": "gptq", "bits": 2}, ["2 bits"]),
    ({"quant_method": "awq", "bits": 8}, ["8 bits"]),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, ["'marlin'", "gptq_v2"]),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, ["'gemv'", "gemm"]),
    ({"quant_method": "hqq", "bits": 4}, ["hqq", "not supported"]),
    ({"quant_method": "fp8"}, ["fp8", "not supported"]),
    ({"quant_method": "gptq", "bits": 4}, ["no tensor is packed"]),
])
def test_refused(tokenizers, tmp_path, capsys, settings, words):
    made = families.make("llama2", tmp_path / "f", tokenizers)
    hf.write_json(made.folder / "config.json", {**made.config, "quantization_config": settings})
    text = refused(capsys, made.folder, tmp_path / "out.gguf")
    assert all(word in text for word in words), text


def test_damaged_layers(tokenizers, tmp_path, capsys):
    made, layers = make(tokenizers, tmp_path / "f", "gptq", {"group_size": 32}, group=32)
    rest = {name: ("F16", value.shape, value.astype(np.float16).tobytes()) for name, value in made.weights.items()
            if name[: -len(".weight")] not in layers}
    name = "model.layers.0.mlp.up_proj"

    def text_with(change):
        entries = dict(rest)
        for key, layer in layers.items():
            tensors = layer.gptq()
            if key == name:
                change(tensors)
            entries.update(hf_packed.entries_of(key, tensors))
        hf.save_entries(made.folder, entries)
        return refused(capsys, made.folder, tmp_path / "out.gguf")

    assert f"{name}.qzeros" in text_with(lambda tensors: tensors.pop("qzeros"))
    assert f"{name}.qzeros has the shape" in text_with(lambda tensors: tensors.update(qzeros=tensors["qzeros"][:1]))
    assert f"{name}.g_idx names group 99" in text_with(lambda tensors: tensors.update(g_idx=tensors["g_idx"] + 95 + 1))
    assert "shape" in text_with(lambda tensors: tensors.update(qweight=tensors["qweight"][:, :8].copy()))
