"""The model families: which config.json belongs to which, what their tensors are called, what shapes they have, what is changed.

A family is one entry of FAMILIES; a new one of a known shape needs nothing else (docs/models.md tells how). Names and
transformations are those of llama.cpp's converter, so that its files and ours are interchangeable.

Invariant: a family names every tensor that its models have. A tensor of the folder that no entry names is an error, as is one that
is missing: a model computed without a tensor would only look converted.
"""

import dataclasses
from typing import Optional

from .errors import ConvertError

# Shapes are tuples of these words, the first dimension first, as numpy and safetensors count:
#   embd       width of the residual stream           vocab      rows of the embedding
#   q, kv      all query heads, all key (value) heads  qkv        q + 2 kv
#   head       one head                                ff, 2ff    inner width of the feed-forward part, gate and up in one
#   expert     number of experts                       expert_ff  inner width of one


@dataclasses.dataclass(frozen=True)
class Part:
    """One tensor of the output and where it comes from. `{i}` is the layer, `{e}` the expert (a stack of them is one tensor)."""

    target: str
    source: str
    shape: tuple
    required: bool = True
    change: Optional[str] = None  # "rotate": rows of each head reordered, "plus_one": 1 is added


@dataclasses.dataclass(frozen=True)
class Family:
    architecture: str  # general.architecture of the GGUF file
    classes: tuple  # "architectures" of config.json
    hints: tuple  # words that --model_name may have in it; the longest one found decides, and may stand for several families
    parts: tuple
    tokenizers: tuple  # the files that may hold the vocabulary, the first one that is there is read
    ties_by_default: bool = False  # tie_word_embeddings where config.json is silent
    prefixes: tuple = ()  # stripped from the checkpoint's names
    scales_rope_by_table: bool = False  # llama3's scaling becomes the tensor rope_freqs.weight


EMBEDDING = Part("token_embd.weight", "model.embed_tokens.weight", ("vocab", "embd"))
OUTPUT_NORM = Part("output_norm.weight", "model.norm.weight", ("embd",))
OUTPUT = Part("output.weight", "lm_head.weight", ("vocab", "embd"), required=False)


def _layer(target, source, *shape, **more):
    return Part("blk.{i}." + target, source if source.startswith("transformer.") else "model.layers.{i}." + source, shape, **more)


def _attention(bias, rotate=False):
    """Separate query, key and value projections; bias: True, False or None (where the checkpoint has it)."""
    change = "rotate" if rotate else None
    parts = []
    for letter, width, changed in (("q", "q", change), ("k", "kv", change), ("v", "kv", None)):
        parts.append(_layer(f"attn_{letter}.weight", f"self_attn.{letter}_proj.weight", width, "embd", change=changed))
        if bias is not False:
            parts.append(_layer(f"attn_{letter}.bias", f"self_attn.{letter}_proj.bias", width, required=bool(bias), change=changed))
    parts.append(_layer("attn_output.weight", "self_attn.o_proj.weight", "embd", "q"))
    return tuple(parts)


def _norms(*names, change=None):
    return tuple(_layer(target, source, *shape, change=change) for target, source, *shape in names)


FEED_FORWARD = (
    _layer("ffn_gate.weight", "mlp.gate_proj.weight", "ff", "embd"),
    _layer("ffn_up.weight", "mlp.up_proj.weight", "ff", "embd"),
    _layer("ffn_down.weight", "mlp.down_proj.weight", "embd", "ff"),
)
EXPERTS = (
    _layer("ffn_gate_inp.weight", "mlp.gate.weight", "expert", "embd"),
    _layer("ffn_gate_exps.weight", "mlp.experts.{e}.gate_proj.weight", "expert_ff", "embd"),
    _layer("ffn_up_exps.weight", "mlp.experts.{e}.up_proj.weight", "expert_ff", "embd"),
    _layer("ffn_down_exps.weight", "mlp.experts.{e}.down_proj.weight", "embd", "expert_ff"),
)
PRE_NORMS = _norms(("attn_norm.weight", "input_layernorm.weight", "embd"),
                   ("ffn_norm.weight", "post_attention_layernorm.weight", "embd"))
HEAD_NORMS = (("attn_q_norm.weight", "self_attn.q_norm.weight", "head"), ("attn_k_norm.weight", "self_attn.k_norm.weight", "head"))

# Qwen's first generation and ChatGLM have names of their own.
QWEN_PARTS = (
    Part("token_embd.weight", "transformer.wte.weight", ("vocab", "embd")),
    Part("output_norm.weight", "transformer.ln_f.weight", ("embd",)),
    dataclasses.replace(OUTPUT, required=True),
    _layer("attn_norm.weight", "transformer.h.{i}.ln_1.weight", "embd"),
    _layer("attn_qkv.weight", "transformer.h.{i}.attn.c_attn.weight", "qkv", "embd"),
    _layer("attn_qkv.bias", "transformer.h.{i}.attn.c_attn.bias", "qkv"),
    _layer("attn_output.weight", "transformer.h.{i}.attn.c_proj.weight", "embd", "q"),
    _layer("ffn_norm.weight", "transformer.h.{i}.ln_2.weight", "embd"),
    _layer("ffn_up.weight", "transformer.h.{i}.mlp.w1.weight", "ff", "embd"),
    _layer("ffn_gate.weight", "transformer.h.{i}.mlp.w2.weight", "ff", "embd"),
    _layer("ffn_down.weight", "transformer.h.{i}.mlp.c_proj.weight", "embd", "ff"),
)
CHATGLM_LAYER = "transformer.encoder.layers.{i}."
CHATGLM_PARTS = (
    Part("token_embd.weight", "transformer.embedding.word_embeddings.weight", ("vocab", "embd")),
    Part("output_norm.weight", "transformer.encoder.final_layernorm.weight", ("embd",)),
    Part("output.weight", "transformer.output_layer.weight", ("vocab", "embd"), required=False),
    _layer("attn_norm.weight", CHATGLM_LAYER + "input_layernorm.weight", "embd"),
    _layer("attn_qkv.weight", CHATGLM_LAYER + "self_attention.query_key_value.weight", "qkv", "embd"),
    _layer("attn_qkv.bias", CHATGLM_LAYER + "self_attention.query_key_value.bias", "qkv", required=False),
    _layer("attn_output.weight", CHATGLM_LAYER + "self_attention.dense.weight", "embd", "q"),
    _layer("ffn_norm.weight", CHATGLM_LAYER + "post_attention_layernorm.weight", "embd"),
    _layer("ffn_up.weight", CHATGLM_LAYER + "mlp.dense_h_to_4h.weight", "2ff", "embd"),
    _layer("ffn_down.weight", CHATGLM_LAYER + "mlp.dense_4h_to_h.weight", "embd", "ff"),
)

MODEL = (EMBEDDING, OUTPUT_NORM, OUTPUT)
GEMMA_PARTS = (
    EMBEDDING, OUTPUT,
    dataclasses.replace(OUTPUT_NORM, change="plus_one"),
    *_norms(("attn_norm.weight", "input_layernorm.weight", "embd"),
            ("post_attention_norm.weight", "post_attention_layernorm.weight", "embd"),
            ("ffn_norm.weight", "pre_feedforward_layernorm.weight", "embd"),
            ("post_ffw_norm.weight", "post_feedforward_layernorm.weight", "embd"), *HEAD_NORMS, change="plus_one"),
    *_attention(bias=False), *FEED_FORWARD,
)
GLM4_PARTS = (
    *MODEL, *PRE_NORMS,
    *_norms(("post_attention_norm.weight", "post_self_attn_layernorm.weight", "embd"),
            ("post_ffw_norm.weight", "post_mlp_layernorm.weight", "embd")),
    *_attention(bias=None),
    _layer("ffn_up.weight", "mlp.gate_up_proj.weight", "2ff", "embd"), FEED_FORWARD[2],
)

BPE = ("tokenizer.json",)
SPM_OR_BPE = ("tokenizer.model", "tokenizer.json")
FAMILIES = (
    Family("llama", ("LlamaForCausalLM", "LLaMAForCausalLM", "MistralForCausalLM"), ("llama", "mistral", "smollm"),
           (*MODEL, *PRE_NORMS, *_attention(bias=None, rotate=True), *FEED_FORWARD), SPM_OR_BPE, scales_rope_by_table=True),
    Family("smollm3", ("SmolLM3ForCausalLM",), ("smollm3", "smollm"),
           (*MODEL, *PRE_NORMS, *_attention(bias=None, rotate=True), *FEED_FORWARD), SPM_OR_BPE, ties_by_default=True),
    Family("qwen", ("QWenLMHeadModel",), ("qwen",), QWEN_PARTS, ("qwen.tiktoken",)),
    Family("qwen2", ("Qwen2ForCausalLM",), ("qwen2", "qwen1.5", "qwen"),
           (*MODEL, *PRE_NORMS, *_attention(bias=True), *FEED_FORWARD), BPE),
    Family("qwen3", ("Qwen3ForCausalLM",), ("qwen3", "qwen"),
           (*MODEL, *PRE_NORMS, *_norms(*HEAD_NORMS), *_attention(bias=None), *FEED_FORWARD), BPE),
    Family("qwen3moe", ("Qwen3MoeForCausalLM",), ("qwen3moe", "qwen3-moe", "qwen3", "qwen"),
           (*MODEL, *PRE_NORMS, *_norms(*HEAD_NORMS), *_attention(bias=None), *EXPERTS), BPE),
    Family("chatglm", ("ChatGLMModel", "ChatGLMForConditionalGeneration"), ("chatglm", "glm-4", "glm4", "glm"), CHATGLM_PARTS,
           SPM_OR_BPE),
    Family("glm4", ("Glm4ForCausalLM",), ("glm-4", "glm4", "glm-z1", "glm"), GLM4_PARTS, BPE),
    Family("gemma3", ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), ("gemma3", "gemma-3", "gemma"), GEMMA_PARTS,
           SPM_OR_BPE, ties_by_default=True, prefixes=("language_model.",)),
)

# Buffers that some versions saved and nobody needs, and the parts of models that also see pictures.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".rotary_pos_emb.inv_freq", ".attention.masked_bias", ".attention.bias",
                    ".attn.masked_bias")
IGNORED_PREFIXES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def find_family(config, hint):
    """The family that config.json names; a --model_name that says another one is an error."""
    classes = config.get("architectures") or []
    family = next((f for f in FAMILIES for name in classes if name in f.classes), None)
    if family is None:
        known = ", ".join(sorted(name for f in FAMILIES for name in f.classes))
        named = ", ".join(map(str, classes)) or "no architecture"
        raise ConvertError(f"config.json names {named}, which is not supported; supported: {known}")
    hinted = hinted_families(hint)
    if hinted and family not in hinted:
        raise ConvertError(f"--model_name {hint} means {' or '.join(f.architecture for f in hinted)}, but config.json says "
                           f"{family.architecture} ({classes[0]}); give the right folder, or leave --model_name out")
    return family


def hinted_families(hint):
    """The families that a name may speak of; none where it has no word that is known."""
    text = (hint or "").lower()
    longest = max((word for family in FAMILIES for word in family.hints if word in text), key=len, default=None)
    return [family for family in FAMILIES if longest in family.hints]
