"""One tiny folder of every family: `make(name, folder, tokenizers)` writes it and returns what tests compare with."""
import copy
import dataclasses
import shutil

import hf_folder as hf
import hf_reference as reference
import numpy as np

GLM_MARKS = ["<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>",
             "<|observation|>"]
QWEN_MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = ("{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
          "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


class Tokenizers:
    """Each is trained once and copied."""

    def __init__(self, folder):
        self.folder = folder
        self.made = {}

    def byte_level(self, rule, size, marks, start=None, ignore_merges=False):
        key = (rule, size, tuple(marks), start)
        if key not in self.made:
            self.made[key] = hf.train_byte_level(rule, size, marks, start, ignore_merges)
        return copy.deepcopy(self.made[key])

    def sentencepiece(self, size, gemma=False):
        path = self.folder / f"{size}-{gemma}.model"
        if not path.exists():
            hf.train_sentencepiece(path, size, gemma)
        return path


@dataclasses.dataclass
class Made:
    folder: object
    config: dict
    weights: dict  # F32, rounded as the file holds them
    reference: type
    architecture: str

    def logits(self, ids, positions, *chunk):
        return self.reference(self.config, self.weights).logits(ids, positions, *chunk)


def base_config(cls, model_type, **more):
    return {"architectures": [cls], "model_type": model_type, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
            "num_key_value_heads": 2, "num_hidden_layers": 2, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0, "hidden_act": "silu", "vocab_size": 384, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            **more}


def save_bpe(folder, tokenizer, settings):
    hf.write_json(folder / "tokenizer.json", tokenizer)
    decoder = {str(entry["id"]): {key: value for key, value in entry.items() if key != "id"} for entry in tokenizer["added_tokens"]}
    hf.write_json(folder / "tokenizer_config.json", {"added_tokens_decoder": decoder, **settings})


def llama2(folder, tokenizers):
    config = base_config("LlamaForCausalLM", "llama", vocab_size=360, bos_token_id=1, eos_token_id=2)
    shutil.copy(tokenizers.sentencepiece(360), folder / "tokenizer.model")
    hf.write_json(folder / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True,
                                                     "add_eos_token": False, "tokenizer_class": "LlamaTokenizer"})
    return config, hf.llama_names(config), reference.Reference, "llama"


def llama3(folder, tokenizers):
    config = base_config("LlamaForCausalLM", "llama", rope_theta=500000.0, tie_word_embeddings=True, bos_token_id=380,
                         eos_token_id=381, rope_scaling={"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                                         "original_max_position_embeddings": 512, "rope_type": "llama3"})
    marks = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|eot_id|>"]
    tokenizer = tokenizers.byte_level(hf.LLAMA3, 384, marks, start=marks[0], ignore_merges=True)
    save_bpe(folder, tokenizer, {"bos_token": marks[0], "eos_token": marks[1], "chat_template": "{{ bos_token }}" + CHATML,
                                 "tokenizer_class": "PreTrainedTokenizerFast"})
    return config, hf.llama_names(config), reference.Reference, "llama"


def mistral(folder, tokenizers):
    config = base_config("MistralForCausalLM", "mistral", vocab_size=360, sliding_window=24, head_dim=32, bos_token_id=1,
                         eos_token_id=2, rope_theta=1000000.0)
    shutil.copy(tokenizers.sentencepiece(360), folder / "tokenizer.model")
    return config, hf.llama_names(config), reference.Reference, "llama"


def smollm2(folder, tokenizers):
    config = base_config("LlamaForCausalLM", "llama", num_attention_heads=3, num_key_value_heads=1, hidden_size=48,
                         tie_word_embeddings=True, rope_theta=100000.0, bos_token_id=1, eos_token_id=2)
    tokenizer = tokenizers.byte_level("digits", 384, QWEN_MARKS)
    save_bpe(folder, tokenizer, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>",
                                 "add_prefix_space": False, "chat_template": CHATML, "tokenizer_class": "GPT2Tokenizer"})
    return config, hf.llama_names(config), reference.Reference, "llama"


def smollm3(folder, tokenizers):
    config = base_config("SmolLM3ForCausalLM", "smollm3", num_hidden_layers=5, rope_theta=5000000.0, tie_word_embeddings=True,
                         no_rope_layers=[1, 1, 1, 0, 1], no_rope_layer_interval=4, eos_token_id=383, pad_token_id=383,
                         bos_token_id=None)
    save_bpe(folder, tokenizers.byte_level(hf.LLAMA3, 384, QWEN_MARKS),
             {"eos_token": "<|im_end|>", "chat_template": CHATML, "tokenizer_class": "PreTrainedTokenizerFast"})
    return config, hf.llama_names(config), reference.SmolLM3, "smollm3"


def qwen1(folder, tokenizers):
    config = {"architectures": ["QWenLMHeadModel"], "model_type": "qwen", "hidden_size": 64, "intermediate_size": 192,
              "num_attention_heads": 4, "num_hidden_layers": 2, "max_position_embeddings": 4096, "layer_norm_epsilon": 1e-6,
              "rotary_emb_base": 10000, "rotary_pct": 1.0, "seq_length": 2048, "kv_channels": 16, "no_bias": True,
              "vocab_size": 640, "tie_word_embeddings": False, "tokenizer_class": "QWenTokenizer", "use_dynamic_ntk": True}
    tokenizer = tokenizers.byte_level(hf.QWEN2, 384, QWEN_MARKS)
    (folder / "qwen.tiktoken").write_text(hf.ranks_of(tokenizer))
    hf.write_json(folder / "tokenizer_config.json", {"model_max_length": 8192, "tokenizer_class": "QWenTokenizer"})
    return config, hf.qwen1_names(config), reference.Qwen1, "qwen"


def save_qwen_tokenizer(folder, tokenizers):
    save_bpe(folder, tokenizers.byte_level(hf.QWEN2, 384, QWEN_MARKS),
             {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None, "add_prefix_space": False,
              "chat_template": CHATML, "tokenizer_class": "Qwen2Tokenizer"})


def qwen2(folder, tokenizers):
    config = base_config("Qwen2ForCausalLM", "qwen2", rope_theta=1000000.0, bos_token_id=381, eos_token_id=383,
                         vocab_size=400, use_sliding_window=False, sliding_window=4096, max_window_layers=2, rms_norm_eps=1e-6)
    save_qwen_tokenizer(folder, tokenizers)
    hf.write_json(folder / "generation_config.json", {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8,
                                                      "repetition_penalty": 1.05})
    (folder / "README.md").write_text(
        "---\nlicense: apache-2.0\nlanguage:\n- en\nbase_model: Someone/Base-7B\ntags:\n- chat\n---\n# A\n")
    return config, hf.llama_names(config, biases="qkv"), reference.Reference, "qwen2"


def qwen3(folder, tokenizers):
    config = base_config("Qwen3ForCausalLM", "qwen3", rope_theta=1000000.0, head_dim=32, bos_token_id=381, eos_token_id=383,
                         tie_word_embeddings=True)
    save_qwen_tokenizer(folder, tokenizers)
    return config, hf.llama_names(config, head_norms=True), reference.Reference, "qwen3"


def qwen3moe(folder, tokenizers):
    config = base_config("Qwen3MoeForCausalLM", "qwen3_moe", rope_theta=1000000.0, head_dim=32, num_experts=4,
                         num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True, decoder_sparse_step=1,
                         mlp_only_layers=[], eos_token_id=383)
    save_qwen_tokenizer(folder, tokenizers)
    return config, hf.llama_names(config, head_norms=True, experts=4), reference.Reference, "qwen3moe"


def chatglm_config(**more):
    return {"architectures": ["ChatGLMModel"], "model_type": "chatglm", "add_bias_linear": False, "add_qkv_bias": True,
            "apply_residual_connection_post_layernorm": False, "ffn_hidden_size": 96, "hidden_size": 64, "kv_channels": 16,
            "layernorm_epsilon": 1e-5, "multi_query_attention": True, "multi_query_group_num": 2, "num_attention_heads": 4,
            "num_layers": 2, "original_rope": True, "padded_vocab_size": 384, "post_layer_norm": True, "rmsnorm": True,
            "seq_length": 4096, "tie_word_embeddings": False, "eos_token_id": 2, "pad_token_id": 0, **more}


def chatglm2(folder, tokenizers):
    config = chatglm_config(_name_or_path="THUDM/chatglm2-6b")
    shutil.copy(tokenizers.sentencepiece(360), folder / "tokenizer.model")
    hf.write_json(folder / "tokenizer_config.json", {"tokenizer_class": "ChatGLMTokenizer"})
    return config, hf.chatglm_names(config), reference.ChatGLM, "chatglm"


def chatglm3(folder, tokenizers):
    config = chatglm_config(_name_or_path="THUDM/chatglm3-6b", rope_ratio=4)
    shutil.copy(tokenizers.sentencepiece(360), folder / "tokenizer.model")
    hf.write_json(folder / "tokenizer_config.json", {"tokenizer_class": "ChatGLMTokenizer"})
    return config, hf.chatglm_names(config), reference.ChatGLM, "chatglm"


def glm4_chat(folder, tokenizers):
    """GLM-4-9B-chat: ChatGLM's layout, tokenizer.model in tiktoken's form."""
    config = chatglm_config(_name_or_path="THUDM/glm-4-9b-chat", rope_ratio=500, padded_vocab_size=400,
                            eos_token_id=[374, 381, 383], pad_token_id=374)
    tokenizer = tokenizers.byte_level(hf.LLAMA3, 384, GLM_MARKS)
    (folder / "tokenizer.model").write_text(hf.ranks_of(tokenizer))
    decoder = {str(374 + i): {key: value for key, value in hf.token(0, text, True).items() if key != "id"}
               for i, text in enumerate(GLM_MARKS)}
    hf.write_json(folder / "tokenizer_config.json", {"added_tokens_decoder": decoder, "eos_token": "<|endoftext|>",
                                                     "tokenizer_class": "ChatGLM4Tokenizer", "chat_template": "[gMASK]<sop>"})
    return config, hf.chatglm_names(config), reference.ChatGLM, "chatglm"


def glm4(folder, tokenizers):
    config = base_config("Glm4ForCausalLM", "glm4", head_dim=16, partial_rotary_factor=0.5, attention_bias=False,
                         eos_token_id=[374, 381, 383], pad_token_id=374)
    save_bpe(folder, tokenizers.byte_level(hf.LLAMA3, 384, GLM_MARKS),
             {"eos_token": "<|user|>", "pad_token": "<|endoftext|>", "chat_template": "[gMASK]<sop>",
              "tokenizer_class": "PreTrainedTokenizerFast"})
    return config, hf.llama_names(config, fused_ff=True, post_norms=True), reference.Glm4, "glm4"


def gemma3(folder, tokenizers):
    config = base_config("Gemma3ForCausalLM", "gemma3_text", num_hidden_layers=6, head_dim=32, vocab_size=400,
                         sliding_window=24, rope_theta=1000000.0, rope_local_base_freq=10000.0, query_pre_attn_scalar=32,
                         hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True, bos_token_id=2, eos_token_id=1,
                         rms_norm_eps=1e-6)
    del config["hidden_act"]
    shutil.copy(tokenizers.sentencepiece(400, gemma=True), folder / "tokenizer.model")
    hf.write_json(folder / "tokenizer_config.json", {"add_bos_token": True, "add_eos_token": False, "bos_token": "<bos>",
                                                     "eos_token": "<eos>", "tokenizer_class": "GemmaTokenizer",
                                                     "added_tokens_decoder": {str(i): hf.token(i, text, True) for i, text in (
                                                         (4, "<start_of_turn>"), (5, "<end_of_turn>"))}})
    return config, hf.llama_names(config, head_norms=True, gemma=True), reference.Gemma3, "gemma3"


FAMILIES = {f.__name__: f for f in (llama2, llama3, mistral, smollm2, smollm3, qwen1, qwen2, qwen3, qwen3moe, chatglm2, chatglm3,
                                    glm4_chat, glm4, gemma3)}


def make(name, folder, tokenizers, changes=None, formats="BF16", container="safetensors", shards=1, seed=1):
    """changes: keys of config.json to set before the weights are made (None removes one)."""
    folder.mkdir(parents=True, exist_ok=True)
    maker = FAMILIES[name]
    config, shapes, cls, architecture = maker(folder, tokenizers)
    if changes:
        config = {key: value for key, value in {**config, **changes}.items() if value is not None}
        shapes = _shapes_again(config, shapes)
    if name in ("llama2", "chatglm2"):  # a buffer that old checkpoints hold and nobody needs
        prefix = "transformer.rotary_pos_emb" if name == "chatglm2" else "model.layers.0.self_attn.rotary_emb"
        shapes[prefix + ".inv_freq"] = (8,)
    weights = hf.random_weights(shapes, seed, norm_mean=0.0 if cls.one_plus else 1.0)
    held = hf.save_weights(folder, weights, formats, container, shards)
    hf.write_json(folder / "config.json", config)
    return Made(folder, config, {key: value.reshape(weights[key].shape) for key, value in held.items()}, cls, architecture)


def _shapes_again(config, shapes):
    """Drops layers that a changed config.json no longer has."""
    n = config.get("num_hidden_layers") or config.get("num_layers")
    return {name: shape for name, shape in shapes.items()
            if not any(f".{i}." in name and ("layers." in name or ".h." in name) for i in range(n, 64))}


def close(found, wanted, tolerance):
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert np.isfinite(found).all() and np.isfinite(wanted).all()
    return float(np.abs(found - wanted).max()) <= tolerance * float(np.abs(wanted).max())
