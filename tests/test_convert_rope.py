"""What config.json says about rotations reaches the logits, far into a context: libllama on the converted file against numpy on the
folder, and the same numpy model without the scaling must be far off, or the test would prove nothing.

One layer, whose queries and keys are scaled up so that attention picks few tokens and a wrong angle shows.
"""
import pytest

from test_convert import converted, families, hf, llama_logits, random_ids, read_fields, refused
import numpy as np  # test_convert skips where it is missing

POSITIONS = [10, 3000, 20000]
CHUNK = 128  # keys between the first chunk and a position's own are left out, but for one in a chunk
TOLERANCE = 0.03
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
YARN = {"factor": 8.0, "original_max_position_embeddings": 2048}


def sharpen(made):
    for name, values in made.weights.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values *= 2.5
        elif name.endswith(("query_key_value.weight", "c_attn.weight")):
            values[: -made.config.get("multi_query_group_num", 4) * 16] *= 2.5
    made.weights = {name: value.reshape(made.weights[name].shape)
                    for name, value in hf.save_weights(made.folder, made.weights).items()}


CASES = {
    "llama3": ("llama3", {"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, {"rope_scaling": None}),
    "llama3, new name": ("llama3", {"rope_scaling": None, "rope_theta": None,
                                    "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}},
                         {"rope_parameters": {"rope_theta": 500000.0}}),
    "linear": ("llama2", {"rope_scaling": {"type": "linear", "factor": 4.0}}, {"rope_scaling": None}),
    "yarn": ("qwen2", {"rope_scaling": {"type": "yarn", **YARN}}, {"rope_scaling": None}),
    "yarn, its factor on attention": ("qwen3", {"rope_scaling": {"rope_type": "yarn", "attention_factor": 2.0, **YARN}},
                                      {"rope_scaling": {"rope_type": "yarn", **YARN}}),
    "yarn, length left out": ("llama2", {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}, "max_position_embeddings": 2048},
                              {"rope_scaling": None}),
    "base": ("qwen2", {"rope_theta": 1000000.0}, {"rope_theta": 10000.0}),
    "base, new name": ("llama2", {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
                       {"rope_parameters": {"rope_theta": 10000.0}}),
    "base of qwen": ("qwen1", {"rotary_emb_base": 1000000}, {"rotary_emb_base": 10000}),
    "ratio of glm-4-9b": ("glm4_chat", {"rope_ratio": 500}, {"rope_ratio": 1}),
    "half rotation": ("glm4", {"rope_theta": 500000.0}, {"rope_theta": 10000.0}),
}


@pytest.mark.parametrize("case", CASES)
def test_far_positions(tokenizers, tmp_path, case):
    name, changes, without = CASES[case]
    layers = "num_layers" if name == "glm4_chat" else "num_hidden_layers"
    made = families.make(name, tmp_path / "folder", tokenizers, changes={**changes, layers: 1})
    sharpen(made)
    path = converted(made.folder, tmp_path / "out.gguf", "--outtype", "f32")
    ids = random_ids(POSITIONS[-1] + 1)
    found, expected = llama_logits(path, ids, POSITIONS, CHUNK), made.logits(ids, POSITIONS, CHUNK)
    wrong = made.reference({key: value for key, value in {**made.config, **without}.items() if value is not None},
                           made.weights).logits(ids, POSITIONS, CHUNK)
    for row, position in enumerate(POSITIONS):
        assert families.close(found[row], expected[row], TOLERANCE), position
    assert not families.close(wrong[1:], expected[1:], 3 * TOLERANCE)


def test_gemma_global_and_local_layers(tokenizers, tmp_path):
    """Gemma 3's two bases, and the linear scaling of its larger models, which is for the global layers alone."""
    made = families.make("gemma3", tmp_path / "folder", tokenizers,
                         changes={"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window": 300})
    path = converted(made.folder, tmp_path / "out.gguf", "--outtype", "f32")
    ids, positions = random_ids(700), [10, 350, 699]
    assert families.close(llama_logits(path, ids, positions), made.logits(ids, positions), TOLERANCE)
    fields, _ = read_fields(path)
    assert fields["gemma3.rope.freq_base"] == 1e6 and fields["gemma3.rope.freq_base_swa"] == 1e4
    assert fields["gemma3.attention.sliding_window"] == 300 and fields["gemma3.rope.scaling.factor"] == 8


def test_gemma_in_the_new_spelling(tokenizers, tmp_path):
    made = families.make("gemma3", tmp_path / "old", tokenizers, changes={"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    expected = read_fields(converted(made.folder, tmp_path / "old.gguf"))[0]
    types = ["sliding_attention"] * 5 + ["full_attention"]
    made = families.make("gemma3", tmp_path / "new", tokenizers, changes={
        "rope_theta": None, "rope_local_base_freq": None, "layer_types": types, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}})
    found = read_fields(converted(made.folder, tmp_path / "new.gguf"))[0]
    assert {key: value for key, value in found.items() if "rope" in key} == {key: value for key, value in expected.items()
                                                                             if "rope" in key}


def test_yarn_words_are_written(tokenizers, tmp_path, capsys):
    """libllama reads neither beta for these families, which the converter says; the keys are there for those who do."""
    words = {"beta_fast": 16, "beta_slow": 2, "extrapolation_factor": 0.5, "attention_factor": 1.5}
    made = families.make("qwen2", tmp_path / "folder", tokenizers, changes={"rope_scaling": {"rope_type": "yarn", **YARN, **words}})
    fields, _ = read_fields(converted(made.folder, tmp_path / "out.gguf"))
    keys = ("beta_fast", "beta_slow", "ext_factor", "attn_factor")
    assert [fields["qwen2.rope.scaling.yarn_" + key] for key in keys] == [16, 2, 0.5, 1.5]
    assert fields["qwen2.rope.scaling.original_context_length"] == 2048 and fields["qwen2.rope.scaling.type"] == "yarn"
    assert "beta_fast 16" in capsys.readouterr().err


@pytest.mark.parametrize("name,changes,word", [
    ("qwen2", {"rope_scaling": {"type": "longrope", "factor": 4.0}}, "longrope"),
    ("qwen2", {"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, "llama3"),
    ("llama2", {"rope_scaling": {"rope_type": "yarn", "mscale": 2.0, **YARN}}, "mscale"),
    ("smollm3", {"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, "llama3"),
    ("llama2", {"rope_scaling": "yarn"}, "must be an object"),
    ("chatglm2", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_ratio"),
    ("gemma3", {"sliding_window_pattern": 4}, "every sixth"),
    ("gemma3", {"rope_local_base_freq": -1e30}, "rope.freq_base_swa"),
    ("smollm3", {"no_rope_layers": [1, 1, 1, 1, 1]}, "every fourth"),
])
def test_what_gguf_cannot_say_is_refused(tokenizers, tmp_path, capsys, name, changes, word):
    made = families.make(name, tmp_path / "folder", tokenizers, changes=changes)
    assert word in refused(capsys, made.folder, tmp_path / "out.gguf")


def test_dynamic_scaling_warns(tokenizers, tmp_path, capsys):
    made = families.make("llama2", tmp_path / "folder", tokenizers, changes={"rope_scaling": {"type": "dynamic", "factor": 2.0}})
    path = converted(made.folder, tmp_path / "out.gguf")
    assert "warning: the rope scaling 'dynamic'" in capsys.readouterr().err
    ids = random_ids(40)
    made.config.pop("rope_scaling")
    assert families.close(llama_logits(path, ids, [39]), made.logits(ids, [39]), 2e-2)
    assert np.isfinite(read_fields(path)[0]["llama.rope.freq_base"])
