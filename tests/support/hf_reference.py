"""The families computed in numpy from a Hugging Face folder's own weights, by the conventions of transformers and of the models'
own code: an oracle for names, orders of rows, norms and rotations that knows nothing of GGUF.

Float64 throughout. One layer at a time over all positions; only the logits asked for are computed.
"""
import math

import numpy as np


def rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def silu(x):
    return x / (1 + np.exp(-x))


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def frequencies(dim, base, scaling, n_ctx):
    """(inverse frequencies, factor on cos and sin) as in transformers' modeling_rope_utils."""
    inverse = 1 / base ** (np.arange(0, dim, 2) / dim)
    kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
    if kind == "default":
        return inverse, 1.0
    factor = scaling["factor"]
    if kind == "linear":
        return inverse / factor, 1.0
    original = scaling.get("original_max_position_embeddings", n_ctx)
    if kind == "llama3":
        low, high = original / scaling["low_freq_factor"], original / scaling["high_freq_factor"]
        wave = 2 * math.pi / inverse
        smooth = (original / wave - scaling["low_freq_factor"]) / (scaling["high_freq_factor"] - scaling["low_freq_factor"])
        mixed = (1 - smooth) * inverse / factor + smooth * inverse
        return np.where(wave > low, inverse / factor, np.where(wave < high, inverse, mixed)), 1.0
    assert kind == "yarn"
    attention = scaling.get("attention_factor") or 0.1 * math.log(factor) + 1

    def dimension(rotations):
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    first = max(math.floor(dimension(scaling.get("beta_fast") or 32)), 0)
    last = min(math.ceil(dimension(scaling.get("beta_slow") or 1)), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - first) / max(last - first, 0.001), 0, 1)
    return inverse / factor * ramp + inverse * (1 - ramp), attention


def rotate(x, positions, inverse, attention, neighbours):
    """x: (n, heads, dim); rotates the first 2 * len(inverse) dimensions, in pairs (i, i + half) or of neighbours."""
    n = 2 * len(inverse)
    angles = positions[:, None] * inverse[None]
    cos, sin = np.cos(angles)[:, None] * attention, np.sin(angles)[:, None] * attention
    out = x.copy()
    first, second = (np.s_[..., 0:n:2], np.s_[..., 1:n:2]) if neighbours else (np.s_[..., : n // 2], np.s_[..., n // 2:n])
    out[first], out[second] = x[first] * cos - x[second] * sin, x[second] * cos + x[first] * sin
    return out


def attend(q, k, v, rows, keys, scale, window=None, chunk=None):
    """q: (n, heads, dim) of the positions `rows`; k, v: (m, kv_heads, dim) of the positions `keys`. chunk: of the chunks between
    the first one and a row's own, only the last key is seen."""
    group = q.shape[1] // k.shape[1]
    out = np.empty(q.shape[:2] + v.shape[2:])
    key, row = keys[None], rows[:, None]
    hidden = key > row
    if window:
        hidden |= key <= row - window
    if chunk:
        hidden |= (key >= chunk) & (key < row // chunk * chunk) & (key % chunk != chunk - 1)
    for h in range(q.shape[1]):
        scores = q[:, h] @ k[:, h // group].T * scale
        scores[hidden] = -np.inf
        out[:, h] = softmax(scores) @ v[:, h // group]
    return out.reshape(len(rows), -1)


class Reference:
    """`logits(ids, positions)`. Families differ in the methods that a subclass replaces."""

    neighbours = False
    one_plus = False
    activation = staticmethod(silu)

    def __init__(self, config, weights):
        self.c = config
        self.w = {name: values.astype(np.float64) for name, values in weights.items()}
        self.heads = config["num_attention_heads"]
        self.n_layers = config.get("num_hidden_layers") or config.get("num_layers")
        self.eps = config.get("rms_norm_eps") or config.get("layernorm_epsilon") or config.get("layer_norm_epsilon")
        self.head = config.get("head_dim") or config.get("kv_channels") or config["hidden_size"] // self.heads
        self.kv_heads = config.get("num_key_value_heads") or config.get("multi_query_group_num") or self.heads
        self.n_ctx = config.get("max_position_embeddings") or config.get("seq_length")
        self.scale = self.head ** -0.5

    def norm(self, x, name):
        weight = self.w[name + ".weight"]
        return rms_norm(x, 1 + weight if self.one_plus else weight, self.eps)

    def linear(self, x, name):
        return x @ self.w[name + ".weight"].T + self.w.get(name + ".bias", 0)

    def rope(self, i):
        c = self.c
        scaling = c.get("rope_parameters") or c.get("rope_scaling")
        base = (scaling or {}).get("rope_theta") or c.get("rope_theta", 10000.0)
        return frequencies(self.head, base, scaling, self.n_ctx)

    def window(self, i):
        return self.c.get("sliding_window") if self.c["architectures"] == ["MistralForCausalLM"] else None

    def rotates(self, i):
        return True

    def qkv(self, x, i):
        p = f"model.layers.{i}.self_attn."
        q = self.linear(x, p + "q_proj").reshape(len(x), self.heads, self.head)
        k = self.linear(x, p + "k_proj").reshape(len(x), self.kv_heads, self.head)
        v = self.linear(x, p + "v_proj").reshape(len(x), self.kv_heads, self.head)
        if p + "q_norm.weight" in self.w:
            q, k = self.norm(q, p + "q_norm"), self.norm(k, p + "k_norm")
        return q, k, v

    def attention(self, x, i, rows, output):
        """x: all positions, self.at tells which; rows: those whose output is wanted, as indices of x."""
        q, k, v = self.qkv(x, i)
        if self.rotates(i):
            q, k = (rotate(y, self.at, *self.rope(i), self.neighbours) for y in (q, k))
        return self.linear(attend(q[rows], k, v, self.at[rows], self.at, self.scale, self.window(i), self.chunk), output)

    def feed_forward(self, x, i):
        p = f"model.layers.{i}.mlp."
        if p + "gate_up_proj.weight" in self.w:
            gate, up = np.split(self.linear(x, p + "gate_up_proj"), 2, axis=-1)
            return self.linear(self.activation(gate) * up, p + "down_proj")
        if p + "gate.weight" in self.w:
            return self.experts(x, p)
        return self.linear(self.activation(self.linear(x, p + "gate_proj")) * self.linear(x, p + "up_proj"), p + "down_proj")

    def experts(self, x, p):
        probabilities = softmax(self.linear(x, p + "gate"))
        out = np.zeros_like(x)
        for n, row in enumerate(probabilities):
            chosen = np.argsort(-row)[: self.c["num_experts_per_tok"]]
            for e in chosen:
                q = f"{p}experts.{e}."
                y = silu(self.linear(x[n], q + "gate_proj")) * self.linear(x[n], q + "up_proj")
                out[n] += row[e] / row[chosen].sum() * self.linear(y, q + "down_proj")
        return out

    def layer(self, x, i, rows):
        p = f"model.layers.{i}."
        y = x[rows] + self.attention(self.norm(x, p + "input_layernorm"), i, rows, p + "self_attn.o_proj")
        return y + self.feed_forward(self.norm(y, p + "post_attention_layernorm"), i)

    def embed(self, ids):
        return self.w["model.embed_tokens.weight"][ids]

    def output(self, x):
        x = self.norm(x, "model.norm")
        return x @ self.w.get("lm_head.weight", self.w["model.embed_tokens.weight"]).T

    def logits(self, ids, positions, chunk=None):
        """chunk: see attend; for models of one layer."""
        ids, positions = np.asarray(ids), np.asarray(positions)
        self.chunk, self.at = chunk, np.arange(len(ids))
        if chunk:  # what nobody sees need not be computed
            near = (self.at[:, None] // chunk == positions[None] // chunk).any(1)
            self.at = self.at[(self.at < chunk) | (self.at % chunk == chunk - 1) | near]
        x = self.embed(ids[self.at])
        for i in range(self.n_layers):
            rows = np.searchsorted(self.at, positions) if i == self.n_layers - 1 else np.arange(len(x))
            x = self.layer(x, i, rows)
        return self.output(x)


class SmolLM3(Reference):
    def rotates(self, i):
        return (i + 1) % 4 != 0


class Gemma3(Reference):
    one_plus = True
    activation = staticmethod(gelu_tanh)

    def embed(self, ids):
        return super().embed(ids) * math.sqrt(self.c["hidden_size"])

    def is_local(self, i):
        return (i + 1) % 6 != 0

    def window(self, i):
        return self.c["sliding_window"] if self.is_local(i) else None

    def rope(self, i):
        if self.is_local(i):
            return frequencies(self.head, self.c["rope_local_base_freq"], None, self.n_ctx)
        return frequencies(self.head, self.c["rope_theta"], self.c.get("rope_scaling"), self.n_ctx)

    def layer(self, x, i, rows):
        p = f"model.layers.{i}."
        self.scale = self.c["query_pre_attn_scalar"] ** -0.5
        y = self.attention(self.norm(x, p + "input_layernorm"), i, rows, p + "self_attn.o_proj")
        y = x[rows] + self.norm(y, p + "post_attention_layernorm")
        return y + self.norm(self.feed_forward(self.norm(y, p + "pre_feedforward_layernorm"), i), p + "post_feedforward_layernorm")


class Glm4(Reference):
    neighbours = True

    def rope(self, i):
        inverse, attention = frequencies(self.head // 2, self.c["rope_theta"], None, self.n_ctx)
        return inverse, attention

    def layer(self, x, i, rows):
        p = f"model.layers.{i}."
        y = self.attention(self.norm(x, p + "input_layernorm"), i, rows, p + "self_attn.o_proj")
        y = x[rows] + self.norm(y, p + "post_self_attn_layernorm")
        z = self.feed_forward(self.norm(y, p + "post_attention_layernorm"), i)
        return y + self.norm(z, p + "post_mlp_layernorm")


class ChatGLM(Reference):
    neighbours = True

    def rope(self, i):
        return frequencies(self.head // 2, 10000 * self.c.get("rope_ratio", 1), None, self.n_ctx)

    def qkv(self, x, i):
        y = self.linear(x, f"transformer.encoder.layers.{i}.self_attention.query_key_value")
        q, k, v = np.split(y, [self.heads * self.head, (self.heads + self.kv_heads) * self.head], axis=-1)
        return (part.reshape(len(x), -1, self.head) for part in (q, k, v))

    def layer(self, x, i, rows):
        p = f"transformer.encoder.layers.{i}."
        y = x[rows] + self.attention(self.norm(x, p + "input_layernorm"), i, rows, p + "self_attention.dense")
        gate, up = np.split(self.linear(self.norm(y, p + "post_attention_layernorm"), p + "mlp.dense_h_to_4h"), 2, axis=-1)
        return y + self.linear(silu(gate) * up, p + "mlp.dense_4h_to_h")

    def embed(self, ids):
        return self.w["transformer.embedding.word_embeddings.weight"][ids]

    def output(self, x):
        return self.linear(self.norm(x, "transformer.encoder.final_layernorm"), "transformer.output_layer")


class Qwen1(Reference):
    def rope(self, i):
        return frequencies(self.head, self.c["rotary_emb_base"], None, self.n_ctx)

    def qkv(self, x, i):
        parts = np.split(self.linear(x, f"transformer.h.{i}.attn.c_attn"), 3, axis=-1)
        return (part.reshape(len(x), self.heads, self.head) for part in parts)

    def layer(self, x, i, rows):
        p = f"transformer.h.{i}."
        y = x[rows] + self.attention(self.norm(x, p + "ln_1"), i, rows, p + "attn.c_proj")
        z = self.norm(y, p + "ln_2")
        return y + self.linear(self.linear(z, p + "mlp.w1") * silu(self.linear(z, p + "mlp.w2")), p + "mlp.c_proj")

    def embed(self, ids):
        return self.w["transformer.wte.weight"][ids]

    def output(self, x):
        return self.linear(self.norm(x, "transformer.ln_f"), "lm_head")
