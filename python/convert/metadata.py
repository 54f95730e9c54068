"""config.json to what the rest needs: one set of names for all families, the GGUF keys, the rotation of long contexts.

Configurations leave out what equals a default of their class in transformers, so those defaults stand here. What the GGUF format
cannot say (a scaling of the rotation that no key describes) is an error: a file that forgets it is right on short texts and falls
apart on long ones.
"""

import dataclasses
import math
from typing import Optional

import numpy as np

from .errors import ConvertError, warn


@dataclasses.dataclass
class Hyperparameters:
    """Sizes in elements; `rope` is the scaling as config.json gives it, both of its spellings made one."""

    n_layers: int
    n_ctx: int
    embd: int
    ff: int
    heads: int
    kv_heads: int
    head_dim: int
    epsilon: float
    vocab: Optional[int]
    rope: dict
    rope_base: Optional[float]
    rotated: Optional[int]  # dimensions of a head that are rotated, where a key says so
    experts: int = 0
    experts_used: int = 0
    expert_ff: int = 0
    local_rope_base: Optional[float] = None
    window: Optional[int] = None  # sliding window in tokens
    writes_head_dim: bool = True  # attention.key_length and value_length

    def sizes(self, vocab):
        """The words of families.Part.shape."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {"embd": self.embd, "vocab": vocab, "q": query, "kv": key, "qkv": query + 2 * key, "head": self.head_dim,
                "ff": self.ff, "2ff": 2 * self.ff, "expert": self.experts, "expert_ff": self.expert_ff}


class _Config:
    """Lookups that remember what was missing, so that all of it is told at once."""

    def __init__(self, values):
        self.values = values
        self.missing = []

    def get(self, *names, default=None):
        return next((self.values[name] for name in names if self.values.get(name) is not None), default)

    def need(self, *names, default=None, low=1):
        value = self.get(*names, default=default)
        if value is None:
            self.missing.append(names[0])
            return 1
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 1 << 31:
            raise ConvertError(f"config.json: {names[0]} is {value!r}, but must be a whole number of at least {low}")
        return value


# What transformers assumes where config.json is silent.
DEFAULTS = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048},
    "MistralForCausalLM": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "SmolLM3ForCausalLM": {"max_position_embeddings": 32768, "rope_theta": 2000000.0},
    "Qwen2ForCausalLM": {"max_position_embeddings": 32768},
    "Qwen3ForCausalLM": {"max_position_embeddings": 32768, "head_dim": 128},
    "Qwen3MoeForCausalLM": {"max_position_embeddings": 32768},
    "gemma3": {"max_position_embeddings": 131072, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
               "sliding_window": 4096, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "vocab_size": 262208},
}


def flatten(config):
    """The text model's part of a configuration that also describes a picture model."""
    return {**config, **config["text_config"]} if isinstance(config.get("text_config"), dict) else config


def read_hyperparameters(family, config):
    values = flatten(config)
    defaults = DEFAULTS.get((config.get("architectures") or [""])[0]) or DEFAULTS.get(family.architecture, {})
    values = {**defaults, **{name: value for name, value in values.items() if value is not None or name == "sliding_window"}}
    reader = {"chatglm": _read_chatglm, "qwen": _read_qwen}.get(family.architecture, _read_common)
    found = _Config(values)
    hyper = reader(family, found)
    if found.missing:
        raise ConvertError(f"config.json lacks {', '.join(found.missing)}")
    if hyper.embd % hyper.heads and "head_dim" not in values or hyper.heads % hyper.kv_heads:
        raise ConvertError(f"config.json: {hyper.heads} heads, {hyper.kv_heads} key-value heads and a width of {hyper.embd} do not "
                           "fit together")
    _check_rope(family, hyper)
    return hyper


def _read_common(family, config):
    embd, heads = config.need("hidden_size"), config.need("num_attention_heads")
    head_dim = config.need("head_dim", default=max(embd // heads, 1))
    rope, base, local_base = _read_rope(config)
    hyper = Hyperparameters(
        n_layers=config.need("num_hidden_layers"), n_ctx=config.need("max_position_embeddings"), embd=embd,
        ff=config.need("intermediate_size"), heads=heads, kv_heads=config.need("num_key_value_heads", default=heads),
        head_dim=head_dim, epsilon=float(config.get("rms_norm_eps", default=1e-6)), vocab=config.get("vocab_size"), rope=rope,
        rope_base=base, rotated=None, local_rope_base=local_base)
    partial = float(config.get("partial_rotary_factor", default=rope.get("partial_rotary_factor", 0)))
    if not 0 <= partial <= 1:
        raise ConvertError(f"config.json: partial_rotary_factor is {partial}, but must be from 0 to 1")
    if family.architecture == "glm4":
        hyper.rotated = int(head_dim * (partial or 0.5))
    elif partial not in (0, 1):
        raise ConvertError(f"config.json: partial_rotary_factor {partial} is not supported for {family.architecture}")
    elif family.architecture in ("llama", "smollm3"):
        hyper.rotated = head_dim
    hyper.writes_head_dim = family.architecture in ("llama", "gemma3") or config.get("head_dim") is not None
    if family.architecture == "qwen3moe":
        hyper.experts, hyper.experts_used = config.need("num_experts"), config.need("num_experts_per_tok")
        hyper.expert_ff = config.need("moe_intermediate_size")
        if config.get("mlp_only_layers") or config.get("decoder_sparse_step", default=1) != 1:
            raise ConvertError("config.json: layers without experts (mlp_only_layers, decoder_sparse_step) are not supported")
    _read_windows(family, config, hyper)
    if config.get("hidden_act", "hidden_activation", default="silu") not in ("silu", "gelu_pytorch_tanh"):
        raise ConvertError(f"config.json: the activation {config.get('hidden_act', 'hidden_activation')} is not supported")
    return hyper


def _read_windows(family, config, hyper):
    """Sliding windows, and which layers have them, where a family's graph has one fixed pattern."""
    window, n_layers = config.values.get("sliding_window"), hyper.n_layers
    types = config.get("layer_types", default=[])
    if family.architecture == "gemma3":
        hyper.window = config.need("sliding_window")
        period = config.get("sliding_window_pattern", "_sliding_window_pattern", default=6)
        expected = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(n_layers)]
        if period != 6 or (types and types != expected):
            raise ConvertError("config.json: only Gemma 3's own order of local and global layers (every sixth global) is supported")
    elif family.architecture == "llama":
        is_mistral = "MistralForCausalLM" in config.get("architectures", default=[])
        hyper.window = window if is_mistral and isinstance(window, int) and window < hyper.n_ctx else None
    elif config.get("use_sliding_window", default=False) and window:
        warn(f"config.json asks for a sliding window of {window} tokens, which a GGUF file of {family.architecture} cannot say; "
             "all layers will attend to everything")
    if family.architecture == "smollm3":
        expected = [int((i + 1) % 4 != 0) for i in range(n_layers)]
        if config.get("no_rope_layers", default=expected) != expected or config.get("no_rope_layer_interval", default=4) != 4:
            raise ConvertError("config.json: only SmolLM3's own order of unrotated layers (every fourth) is supported")


def _read_qwen(family, config):
    embd, heads = config.need("hidden_size"), config.need("num_attention_heads")
    scale = config.get("rotary_pct", default=1.0)
    if scale != 1.0:
        raise ConvertError(f"config.json: rotary_pct {scale} is not supported for qwen")
    trained = config.get("seq_length")
    if (config.get("use_dynamic_ntk") or config.get("use_logn_attn")) and trained:
        warn(f"past {trained} tokens this model changes its rotation and attention (use_dynamic_ntk, use_logn_attn), which a GGUF "
             "file cannot say; keep contexts below that")
    return Hyperparameters(
        n_layers=config.need("num_hidden_layers"), n_ctx=config.need("max_position_embeddings", "seq_length"), embd=embd,
        ff=config.need("intermediate_size") // 2,  # config.json counts gate and up together
        heads=heads, kv_heads=heads, head_dim=max(embd // heads, 1),
        epsilon=float(config.get("layer_norm_epsilon", default=1e-6)), vocab=config.get("vocab_size"), rope={},
        rope_base=float(config.get("rotary_emb_base", default=10000.0)), rotated=None, writes_head_dim=False)


def _read_chatglm(family, config):
    embd, heads = config.need("hidden_size"), config.need("num_attention_heads")
    groups = config.need("multi_query_group_num") if config.get("multi_query_attention", default=True) else heads
    head_dim = config.need("kv_channels", default=max(embd // heads, 1))
    for name, wanted in (("rmsnorm", True), ("post_layer_norm", True), ("apply_residual_connection_post_layernorm", False),
                         ("add_bias_linear", False), ("original_rope", True)):
        if config.get(name, default=wanted) != wanted:
            raise ConvertError(f"config.json: {name} {config.get(name)} is not supported for chatglm")
    if config.get("rope_scaling"):
        raise ConvertError("config.json: rope_scaling is not supported for chatglm, which has rope_ratio")
    return Hyperparameters(
        n_layers=config.need("num_layers", "num_hidden_layers"), n_ctx=config.need("seq_length", default=embd), embd=embd,
        ff=config.need("ffn_hidden_size"), heads=heads, kv_heads=groups, head_dim=head_dim,
        epsilon=float(config.get("layernorm_epsilon", default=1e-5)), vocab=config.get("padded_vocab_size", "vocab_size"), rope={},
        rope_base=10000 * config.get("rope_ratio", default=1), rotated=head_dim // 2, writes_head_dim=False)


# ---- rotation ----

ROPE_WORDS = {"rope_type", "type", "factor", "original_max_position_embeddings", "rope_theta", "partial_rotary_factor",
              "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "attn_factor",
              "extrapolation_factor", "truncate", "finetuned"}


def _read_rope(config):
    """The scaling, the base, and the base of layers with a window; from rope_parameters (new) or rope_scaling and rope_theta."""
    saved = config.get("rope_parameters", "rope_scaling", default={})
    if not isinstance(saved, dict):
        raise ConvertError(f"config.json: rope_scaling is {saved!r}, but must be an object")
    local = saved.get("sliding_attention") or {}
    rope = dict(saved.get("full_attention", saved) or {})
    if "rope_type" not in rope and "type" in rope:
        rope["rope_type"] = rope["type"]
    if "original_max_position_embeddings" not in rope:
        original = config.get("original_max_position_embeddings", "max_position_embeddings")
        if original is not None:
            rope["original_max_position_embeddings"] = original
    if local.get("rope_type", "default") != "default":
        raise ConvertError("config.json: a scaled rotation in layers with a sliding window is not supported")
    base = float(rope.get("rope_theta") or config.get("rope_theta", default=10000.0))
    local_base = local.get("rope_theta", config.get("rope_local_base_freq"))
    return rope, base, None if local_base is None else float(local_base)


# What each scaling computes with besides its factor.
_NUMBERS = {"default": (), "linear": (), "dynamic": (), "yarn": ("original_max_position_embeddings",),
            "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")}


def _check_rope(family, hyper):
    rope, kind = hyper.rope, hyper.rope.get("rope_type", "default")
    known = ["default", "linear", "yarn", "dynamic"] + (["llama3"] if family.scales_rope_by_table else [])
    if kind not in known:
        raise ConvertError(f"config.json: the rope scaling {kind!r} is not supported for {family.architecture}; supported: "
                           f"{', '.join(known)}")
    unknown = sorted(set(rope) - ROPE_WORDS)
    if kind != "default" and unknown:
        raise ConvertError(f"config.json: the rope scaling {kind!r} has {', '.join(unknown)}, which is not supported")
    if kind in ("linear", "yarn", "llama3") and not (isinstance(rope.get("factor"), (int, float))
                                                    and _fits_f32(rope["factor"])):
        raise ConvertError(f"config.json: the rope scaling {kind!r} has no factor above zero that 32 bits can hold")
    for word in _NUMBERS[kind]:
        value = rope.get(word)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not _fits_f32(value)):
            raise ConvertError(f"config.json: the rope scaling {kind!r} has {word} {value!r}, but it must be a number above zero that 32 "
                               "bits can hold")
    for word, usual in (("beta_fast", 32), ("beta_slow", 1)):
        if kind == "yarn" and rope.get(word) not in (None, usual):
            warn(f"the rope scaling has {word} {rope[word]}; it is written, but llama.cpp computes with {usual} all the same")
    if kind == "dynamic":
        warn(f"the rope scaling 'dynamic' acts only past the trained {hyper.n_ctx} tokens, and a GGUF file cannot say it; keep "
             "contexts below that")


def rope_factors(hyper):
    """llama3's scaling as the divisors of the frequencies, one for each pair of dimensions; None for other scalings."""
    rope = hyper.rope
    if rope.get("rope_type") != "llama3":
        return None
    frequencies = hyper.rope_base ** -(np.arange(0, hyper.head_dim, 2) / hyper.head_dim)
    low, high = rope.get("low_freq_factor", 1.0), rope.get("high_freq_factor", 4.0)
    length = rope["original_max_position_embeddings"]
    factors = []
    for frequency in frequencies:
        wave = 2 * math.pi / frequency
        if wave < length / high:
            factors.append(1.0)
        elif wave > length / low:
            factors.append(rope["factor"])
        else:
            smooth = (length / wave - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


# ---- GGUF keys ----


def write_hyperparameters(family, hyper, vocab_size, add):
    """Calls add(key, value) with the architecture's keys; ints are u32, floats f32, as llama.cpp reads them."""
    arch = family.architecture

    def put(key, value):
        if isinstance(value, float) and not _fits_f32(value, zero="yarn" in key):
            raise ConvertError(f"config.json: {arch}.{key} would be {value!r}, but must be a number above zero that 32 bits can hold")
        if value is not None:
            add(f"{arch}.{key}", value)

    put("block_count", hyper.n_layers)
    put("context_length", hyper.n_ctx)
    put("embedding_length", hyper.embd)
    put("feed_forward_length", hyper.ff * 2 if arch == "qwen" else hyper.ff)
    put("attention.head_count", hyper.heads)
    put("attention.head_count_kv", None if arch == "qwen" else hyper.kv_heads)
    put("attention.layer_norm_rms_epsilon", hyper.epsilon)
    if hyper.writes_head_dim:
        put("attention.key_length", hyper.head_dim)
        put("attention.value_length", hyper.head_dim)
    put("attention.sliding_window", hyper.window)
    put("rope.dimension_count", hyper.rotated)
    put("rope.freq_base", None if hyper.rope_base is None else float(hyper.rope_base))
    put("rope.freq_base_swa", hyper.local_rope_base)
    if arch in ("llama", "smollm3"):
        put("vocab_size", vocab_size)
    if hyper.experts:
        put("expert_count", hyper.experts)
        put("expert_used_count", hyper.experts_used)
        put("expert_feed_forward_length", hyper.expert_ff)
    _write_rope_scaling(hyper.rope, put)


def _fits_f32(value, zero=False):
    """Whether it is a number above zero once llama.cpp has read it. zero: it may be that, or less."""
    with np.errstate(over="ignore", under="ignore"):
        kept = np.float32(value)
    return bool(np.isfinite(kept)) and (kept > 0 or zero)


def _write_rope_scaling(rope, put):
    kind = rope.get("rope_type")
    if kind not in ("linear", "yarn"):
        return
    put("rope.scaling.type", kind)
    put("rope.scaling.factor", float(rope["factor"]))
    if kind == "yarn":
        put("rope.scaling.original_context_length", rope["original_max_position_embeddings"])
        for key, names in (("ext_factor", ("extrapolation_factor",)), ("attn_factor", ("attention_factor", "attn_factor")),
                           ("beta_fast", ("beta_fast",)), ("beta_slow", ("beta_slow",))):
            value = next((rope[name] for name in names if rope.get(name) is not None), None)
            put("rope.scaling.yarn_" + key, None if value is None else float(value))
        asked = rope.get("attention_factor", rope.get("attn_factor"))
        if asked is not None:  # what ggml multiplies its own 0.1 ln(factor) + 1 with; yarn_attn_factor it overrides
            put("rope.scaling.attn_factor", float(asked) / (0.1 * math.log(max(rope["factor"], 1.0)) + 1.0))
