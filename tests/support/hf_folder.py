"""Tiny Hugging Face folders with seeded random weights, in the true layout of each family: config.json, tensor names, shapes,
tokenizer files. Written without the converter's own tables, so that both can be wrong only independently.

A folder is described by a Folder; `save` writes it. `weights` stays at hand as F32 arrays, rounded to what the file holds.
"""
import base64
import json
import os
import pathlib
import struct
import zipfile

import numpy as np

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEXT = pathlib.Path(os.environ.get("DT_TEST_TEXT", ""))
SAMPLE = ("In the beginning God created the heaven and the earth.\n\n  And the earth was without form, and void; 1234 days, it's "
          "3.14!\n我想在 Москве 🚀 ½\tthe end  ")


# ---- tokenizers ----


def corpus():
    return TEXT.read_text(encoding="utf-8")[:40000].splitlines()


def train_byte_level(rule, size, marks, start=None, ignore_merges=False):
    """A tokenizer.json as a dictionary. rule: a regex, or "digits" or "gpt2"; marks get the last ids."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if rule == "gpt2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif rule == "digits":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(rule), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    if rule == QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(vocab_size=size - len(marks), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens(marks)
    if start is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{start} $A", pair=f"{start} $A {start} $B", special_tokens=[(start, tokenizer.token_to_id(start))])
    return json.loads(tokenizer.to_str())


def train_sentencepiece(path, size, gemma=False):
    """tokenizer.model with byte fallback."""
    import io

    import sentencepiece

    model = io.BytesIO()
    more = {"user_defined_symbols": ["<start_of_turn>", "<end_of_turn>"], "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3,
            "add_dummy_prefix": False} if gemma else {}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()[:400]), model_writer=model, vocab_size=size, model_type="bpe", byte_fallback=True,
        character_coverage=0.9995, normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2, **more)
    path.write_bytes(model.getvalue())


def byte_fallback_json(model_path, prepend, marks=()):
    """What transformers writes as tokenizer.json for a sentencepiece BPE model."""
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(str(model_path))
    pieces = [model.IdToPiece(i) for i in range(model.vocab_size())]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = []
    for piece, i in vocab.items():
        if model.IsControl(i) or model.IsByte(i) or model.IsUnknown(i):
            continue
        for k in range(1, len(piece)):
            if piece[:k] in vocab and piece[k:] in vocab:
                merges.append((-model.GetScore(i), vocab[piece[:k]], vocab[piece[k:]], [piece[:k], piece[k:]]))
    merges.sort(key=lambda merge: merge[:3])
    steps = [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    if prepend:
        steps.insert(0, {"type": "Prepend", "prepend": "▁"})
    added = [token(i, pieces[i], True) for i in range(len(pieces)) if model.IsControl(i) or model.IsUnknown(i)]
    added += [token(len(pieces) + i, text, True) for i, text in enumerate(marks)]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": steps}, "pre_tokenizer": None,
        "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                                                                    {"Sequence": {"id": "A", "type_id": 0}}],
                           "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
                           "special_tokens": {"<s>": {"id": "<s>", "ids": [vocab.get("<s>", 0)], "tokens": ["<s>"]}}},
        "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                                                     {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False, "vocab": vocab,
                  "merges": [merge[3] for merge in merges]},
    }


def token(i, text, special):
    return {"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": special}


def ranks_of(tokenizer_json):
    """The byte-level vocabulary without its marks in tiktoken's form."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(b): b for b in printable}
    letters.update({chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in printable)})
    added = {entry["content"] for entry in tokenizer_json["added_tokens"]}
    vocab = sorted((i, text) for text, i in tokenizer_json["model"]["vocab"].items() if text not in added)
    return "".join(f"{base64.b64encode(bytes(letters[c] for c in text)).decode()} {i}\n" for i, text in vocab)


# ---- weights ----


def llama_names(config, biases=(), head_norms=False, experts=0, gemma=False, fused_ff=False, post_norms=False):
    """name -> shape of the layout that most families share."""
    embd, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or embd // heads
    kv = config.get("num_key_value_heads", heads) * head
    ff, vocab = config["intermediate_size"], config["vocab_size"]
    shapes = {"model.embed_tokens.weight": (vocab, embd), "model.norm.weight": (embd,)}
    if not config.get("tie_word_embeddings", gemma):
        shapes["lm_head.weight"] = (vocab, embd)
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        norms = ["input_layernorm", "post_attention_layernorm"]
        if gemma:
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        if post_norms:
            norms += ["post_self_attn_layernorm", "post_mlp_layernorm"]
        shapes.update({f"{p}{norm}.weight": (embd,) for norm in norms})
        if head_norms:
            shapes.update({p + "self_attn.q_norm.weight": (head,), p + "self_attn.k_norm.weight": (head,)})
        for letter, rows in (("q", heads * head), ("k", kv), ("v", kv)):
            shapes[f"{p}self_attn.{letter}_proj.weight"] = (rows, embd)
            if letter in biases:
                shapes[f"{p}self_attn.{letter}_proj.bias"] = (rows,)
        shapes[p + "self_attn.o_proj.weight"] = (embd, heads * head)
        if experts:
            shapes[p + "mlp.gate.weight"] = (experts, embd)
            width = config["moe_intermediate_size"]
            for e in range(experts):
                shapes[f"{p}mlp.experts.{e}.gate_proj.weight"] = (width, embd)
                shapes[f"{p}mlp.experts.{e}.up_proj.weight"] = (width, embd)
                shapes[f"{p}mlp.experts.{e}.down_proj.weight"] = (embd, width)
        elif fused_ff:
            shapes[p + "mlp.gate_up_proj.weight"] = (2 * ff, embd)
            shapes[p + "mlp.down_proj.weight"] = (embd, ff)
        else:
            shapes[p + "mlp.gate_proj.weight"] = shapes[p + "mlp.up_proj.weight"] = (ff, embd)
            shapes[p + "mlp.down_proj.weight"] = (embd, ff)
    return shapes


def qwen1_names(config):
    embd, ff, vocab = config["hidden_size"], config["intermediate_size"] // 2, config["vocab_size"]
    shapes = {"transformer.wte.weight": (vocab, embd), "transformer.ln_f.weight": (embd,), "lm_head.weight": (vocab, embd)}
    for i in range(config["num_hidden_layers"]):
        p = f"transformer.h.{i}."
        shapes.update({
            p + "ln_1.weight": (embd,), p + "ln_2.weight": (embd,), p + "attn.c_attn.weight": (3 * embd, embd),
            p + "attn.c_attn.bias": (3 * embd,), p + "attn.c_proj.weight": (embd, embd), p + "mlp.w1.weight": (ff, embd),
            p + "mlp.w2.weight": (ff, embd), p + "mlp.c_proj.weight": (embd, ff)})
    return shapes


def chatglm_names(config):
    embd, ff, vocab = config["hidden_size"], config["ffn_hidden_size"], config["padded_vocab_size"]
    qkv = embd + 2 * config["multi_query_group_num"] * config["kv_channels"]
    shapes = {"transformer.embedding.word_embeddings.weight": (vocab, embd),
              "transformer.encoder.final_layernorm.weight": (embd,), "transformer.output_layer.weight": (vocab, embd)}
    for i in range(config["num_layers"]):
        p = f"transformer.encoder.layers.{i}."
        shapes.update({
            p + "input_layernorm.weight": (embd,), p + "post_attention_layernorm.weight": (embd,),
            p + "self_attention.query_key_value.weight": (qkv, embd), p + "self_attention.query_key_value.bias": (qkv,),
            p + "self_attention.dense.weight": (embd, embd), p + "mlp.dense_h_to_4h.weight": (2 * ff, embd),
            p + "mlp.dense_4h_to_h.weight": (embd, ff)})
    return shapes


def random_weights(shapes, seed, norm_mean=1.0):
    random = np.random.default_rng(seed)
    weights = {}
    for name, shape in shapes.items():
        is_norm = len(shape) == 1 and ("norm" in name or "ln_" in name)
        scale = 0.1 if len(shape) == 1 else 1 / np.sqrt(shape[-1])
        weights[name] = (random.standard_normal(shape) * scale + (norm_mean if is_norm else 0)).astype(np.float32)
    return weights


# ---- files ----


def to_bf16(values):
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def encode(values, format):
    """(bytes, values as the file holds them)"""
    if format == "BF16":
        bits = to_bf16(values)
        return bits.tobytes(), from_bf16(bits).reshape(values.shape)
    array = np.ascontiguousarray(values, dtype={"F16": np.float16, "F32": np.float32, "I32": np.int32, "I64": np.int64}[format])
    return array.tobytes(), array.astype(np.float32) if format == "F16" else array


def save_safetensors(path, entries):
    """entries: name -> (format, shape, bytes)"""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, (format, shape, data) in entries.items():
        header[name] = {"dtype": format, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in entries.values()))


class Pickler:
    """Writes what torch.save writes for a dictionary of tensors, opcode by opcode, in protocol 2."""

    STORAGES = {"BF16": "BFloat16Storage", "F16": "HalfStorage", "F32": "FloatStorage", "I32": "IntStorage", "I64": "LongStorage"}
    SIZES = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I64": 8}

    def __init__(self, entries, legacy):
        self.out = bytearray(b"\x80\x02")
        self.legacy = legacy
        self.out += b"ccollections\nOrderedDict\n)R("
        for key, (name, (format, shape, data)) in enumerate(entries.items()):
            self.text(name)
            self.tensor(str(key), format, shape, len(data) // self.SIZES[format])
        self.out += b"u."

    def text(self, text):
        data = text.encode()
        self.out += b"X" + struct.pack("<I", len(data)) + data

    def integer(self, n):
        self.out += b"J" + struct.pack("<i", n)

    def tensor(self, key, format, shape, n):
        self.out += b"ctorch._utils\n_rebuild_tensor_v2\n(("
        self.text("storage")
        self.out += b"ctorch\n" + self.STORAGES[format].encode() + b"\n"
        self.text(key)
        self.text("cpu")
        self.integer(n)
        self.out += (b"N" if self.legacy else b"") + b"tQ"
        self.integer(0)
        strides = [int(np.prod(shape[i + 1:], dtype=np.int64)) for i in range(len(shape))]
        for values in (shape, strides):
            self.out += b"("
            for value in values:
                self.integer(value)
            self.out += b"t"
        self.out += b"\x89ccollections\nOrderedDict\n)RtR"


def save_bin(path, entries, legacy=False):
    import pickle

    state = bytes(Pickler(entries, legacy).out)
    if legacy:
        with open(path, "wb") as file:
            for value in (0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}):
                pickle.dump(value, file, protocol=2)
            file.write(state)
            pickle.dump([str(key) for key in range(len(entries))], file, protocol=2)
            for format, _, data in entries.values():
                file.write(struct.pack("<q", len(data) // Pickler.SIZES[format]) + data)
        return
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", state)
        archive.writestr("archive/byteorder", "little")
        for key, (_, _, data) in enumerate(entries.values()):
            archive.writestr(f"archive/data/{key}", data)
        archive.writestr("archive/version", "3\n")


def save_weights(folder, weights, formats="BF16", container="safetensors", shards=1):
    """formats: one for all, or name -> format. Returns the weights as F32, as the files hold them."""
    entries, held = {}, {}
    for name, values in weights.items():
        format = formats if isinstance(formats, str) else formats(name)
        data, held[name] = encode(values, format)
        entries[name] = (format, values.shape, data)
    save_entries(folder, entries, container, shards)
    return held


def save_entries(folder, entries, container="safetensors", shards=1):
    stem, ending = ("model", ".safetensors") if container == "safetensors" else ("pytorch_model", ".bin")

    def save(path, part):
        if container == "safetensors":
            save_safetensors(path, part)
        else:
            save_bin(path, part, legacy=container == "legacy")

    if shards == 1:
        save(folder / (stem + ending), entries)
        return
    names, weight_map = list(entries), {}
    for i in range(shards):
        file = f"{stem}-{i + 1:05}-of-{shards:05}{ending}"
        part = {name: entries[name] for name in names[i::shards]}
        weight_map.update({name: file for name in part})
        save(folder / file, part)
    write_json(folder / f"{stem}{ending}.index.json", {"metadata": {}, "weight_map": weight_map})


def write_json(path, value):
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))
