"""tokenizer.json with byte-level BPE: the vocabulary, the merges, and which rule splits text before merging.

llama.cpp knows these rules by name. Its converter finds the name by tokenizing a text and hashing the ids; here the rule itself is
read from tokenizer.json and looked up, so that a new vocabulary with a known rule works, and an unknown rule is an error rather
than a guess: a wrong one gives other ids without a sign of it.
"""

from .checkpoint import load_json
from .errors import ConvertError
from .sentencepiece_vocabulary import read_tokenizer_json as read_byte_fallback
from .vocabulary import NORMAL, TokenTable, Vocabulary, adds_prefix_space, put_added

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + TAIL
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + TAIL
QWEN35 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
          r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
          r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
# The steps of a pre-tokenizer -> GGUF's name, where neither family nor start token matters.
RULES = {
    ("split " + QWEN2, "bytes"): "qwen2",
    ("split " + QWEN35, "bytes"): "qwen35",
    ("split " + TEKKEN, "bytes"): "tekken",
    ("digits", "bytes gpt2"): "smollm",
    ("bytes gpt2",): "gpt-2",
}


def read_tokenizer_json(family, path, folder):
    tokenizer = load_json(path)
    model = tokenizer.get("model") if isinstance(tokenizer, dict) else None
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict) or model.get("type", "BPE") != "BPE":
        raise ConvertError(f"{path} is no BPE tokenizer, which is the only kind supported")
    # where bytes are split first, no character is left to fall back from, and the vocabulary is spelled in the bytes' own characters
    if model.get("byte_fallback") and not any(step.startswith("bytes") for step in _steps(tokenizer.get("pre_tokenizer"))):
        return read_byte_fallback(path, tokenizer, folder)
    table = TokenTable()
    for text, token in model["vocab"].items():
        table.put(token, text, NORMAL)
    for entry in _added_tokens(tokenizer, folder, model["vocab"]):
        put_added(table, entry["id"], entry["content"], entry.get("special"))
    tokens, types, _ = table.lists()
    vocabulary = Vocabulary("gpt2", pre_tokenizer_name(family, path, tokenizer), tokens, types, merges=_merges(model, folder))
    _fix_specials(family, vocabulary, folder)
    return vocabulary


def _added_tokens(tokenizer, folder, vocab):
    """Those of tokenizer.json, and those that only the other files know."""
    entries = {entry["id"]: entry for entry in tokenizer.get("added_tokens") or []}
    settings = folder / "tokenizer_config.json"
    if settings.is_file():
        for token, entry in (load_json(settings).get("added_tokens_decoder") or {}).items():
            entries.setdefault(int(token), dict(entry, id=int(token)))
    if (folder / "added_tokens.json").is_file():
        for text, token in load_json(folder / "added_tokens.json").items():
            if text not in vocab:
                entries.setdefault(token, {"id": token, "content": text})
    return entries.values()


def _merges(model, folder):
    """As "left right"; a space inside a piece is written as the character that stands for the byte 32."""
    merges = model.get("merges")
    if not merges and (folder / "merges.txt").is_file():
        lines = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()
        return [" ".join(line.split()) for line in lines if len(line.split()) == 2 and not line.startswith("#version")]
    return [merge if isinstance(merge, str) else " ".join(piece.replace(" ", "\u0120") for piece in merge)
            for merge in merges or []]


def _steps(pre_tokenizer):
    """A pre-tokenizer as a tuple of words that RULES knows."""
    if not pre_tokenizer:
        return ()
    kind = pre_tokenizer.get("type")
    if kind == "Sequence":
        return tuple(word for step in pre_tokenizer.get("pretokenizers") or [] for word in _steps(step))
    if kind == "Split" and not pre_tokenizer.get("invert") and pre_tokenizer.get("behavior") == "Isolated":
        pattern = pre_tokenizer.get("pattern") or {}
        return ("split " + str(pattern.get("Regex", pattern.get("String"))),)
    if kind == "Digits" and pre_tokenizer.get("individual_digits"):
        return ("digits",)
    if kind == "ByteLevel" and not pre_tokenizer.get("add_prefix_space"):
        return ("bytes gpt2" if pre_tokenizer.get("use_regex", True) else "bytes",)
    return (str(kind),)


def pre_tokenizer_name(family, path, tokenizer):
    steps = _steps(tokenizer.get("pre_tokenizer"))
    adds_start = '"SpecialToken"' in str(tokenizer.get("post_processor")).replace("'", '"')
    if steps == ("split " + LLAMA3, "bytes"):
        if family.architecture in ("chatglm", "glm4"):
            return "glm4"
        return "llama-bpe" if adds_start else "smaug-bpe"
    name = RULES.get(steps)
    if name is None:
        raise ConvertError(f"{path} splits text by a rule that llama.cpp has no name for ({'; '.join(steps) or 'none'}); this "
                           "tokenizer is not supported")
    if name == "qwen2" and adds_start:
        return "deepseek-r1-qwen"  # the same rule, with a start token
    return name


def _fix_specials(family, vocabulary, folder):
    """What llama.cpp's converter sets for a family whatever the tokenizer's files say."""
    if family.architecture in ("chatglm", "glm4"):  # several end tokens, of which GGUF stores those of the text and of a turn
        ids = {text: token for token, text in enumerate(vocabulary.tokens)}
        end, user = ids.get("<|endoftext|>"), ids.get("<|user|>")
        vocabulary.specials = {"eos": end, "eot": user, "unk": end}
        if family.architecture == "glm4":
            vocabulary.specials["bos"] = end
        else:
            vocabulary.add_bos = False
    elif family.architecture == "llama":
        settings = folder / "tokenizer_config.json"
        vocabulary.add_space_prefix = adds_prefix_space(load_json(settings)) if settings.is_file() else None
        if len(vocabulary.tokens) == 49152:
            vocabulary.add_bos = False  # the vocabulary of SmolLM and Granite, whose first token is no start token
