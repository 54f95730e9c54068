"""Vocabularies of sentencepiece: tokenizer.model, the same with ChatGLM's marks after it, and tokenizer.json made from one.

The merge order of a sentencepiece BPE model is the scores of its pieces, highest first. A tokenizer.json has no scores but a list
of merges; the place where a piece is first made in that list is its score here, so that the ids come out the same.
"""

import json
import re

from .checkpoint import load_json
from .errors import ConvertError, warn
from .vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, TokenTable, Vocabulary, adds_prefix_space, put_added

ADDED_SCORE = -1000.0
CHATGLM_MARKS = ["[MASK]", "[gMASK]", "[sMASK]", "sop", "eop"]
CHATGLM3_ROLES = ["<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]


def _load(path):
    try:
        from sentencepiece import SentencePieceProcessor

        model = SentencePieceProcessor()
        model.LoadFromFile(str(path))
    except (RuntimeError, OSError, TypeError):
        raise ConvertError(f"{path} is no sentencepiece model; fetch it again") from None
    return model


def _put_pieces(table, model):
    for token in range(model.vocab_size()):
        kind = (UNKNOWN if model.IsUnknown(token) else CONTROL if model.IsControl(token) else UNUSED if model.IsUnused(token)
                else BYTE if model.IsByte(token) else NORMAL)
        table.put(token, model.IdToPiece(token), kind, model.GetScore(token))


def read_model(path, folder, family):
    """tokenizer.model, then what the other files add: added_tokens.json, tokenizer_config.json, and tokenizer.json for ids that
    neither of them has."""
    table = TokenTable()
    _put_pieces(table, _load(path))
    settings = load_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    if (folder / "added_tokens.json").is_file():
        for text, token in load_json(folder / "added_tokens.json").items():
            table.put(token, text, USER_DEFINED, ADDED_SCORE)
    for token, entry in (settings.get("added_tokens_decoder") or {}).items():
        token, text = int(token), entry["content"]
        if table.types.get(token, UNUSED) not in (UNUSED, USER_DEFINED) and table.tokens[token] != text:
            warn(f"token {token} is {table.tokens[token]!r} in tokenizer.model, but {text!r} in tokenizer_config.json; the latter "
                 "counts")
        put_added(table, token, text, entry.get("special"), ADDED_SCORE)
    if (folder / "tokenizer.json").is_file():
        for entry in load_json(folder / "tokenizer.json").get("added_tokens") or []:
            if entry["id"] not in table.tokens:
                put_added(table, entry["id"], entry["content"], entry.get("special"), ADDED_SCORE)
    tokens, types, scores = table.lists()
    prefix = False if family.architecture == "gemma3" else adds_prefix_space(settings)
    return Vocabulary("llama", "default", tokens, types, scores, add_space_prefix=prefix)


def read_chatglm(path, folder, config, hint):
    """ChatGLM2 and ChatGLM3: the pieces, then marks whose ids follow from their order alone. Only ChatGLM3 has the roles."""
    model = _load(path)
    table = TokenTable()
    _put_pieces(table, model)
    for token, text in enumerate(("<unk>", "<bos>", "<eos>")):
        table.tokens[token] = text
    n_pieces = model.vocab_size()
    marks = CHATGLM_MARKS + (CHATGLM3_ROLES if _is_chatglm3(folder, config, hint) else [])
    for i, text in enumerate(marks):
        table.put(n_pieces + i, text, CONTROL)
    tokens, types, scores = table.lists()
    size = config.get("padded_vocab_size") or len(tokens)
    tokens += [f"[PAD{i}]" for i in range(len(tokens), size)]
    types += [UNUSED] * (len(tokens) - len(types))
    scores += [0.0] * (len(tokens) - len(scores))
    return Vocabulary("llama", "chatglm-spm", tokens, types, scores, add_bos=False)


def _is_chatglm3(folder, config, hint):
    """The two have the same config.json; what tells them apart is a name or a mention of the roles in the tokenizer's files."""
    for name in (hint, config.get("_name_or_path"), folder.resolve().name):
        found = re.search(r"chatglm-?([23])", (name or "").lower())
        if found:
            return found.group(1) == "3"
    for name in ("tokenizer_config.json", "special_tokens_map.json", "tokenization_chatglm.py"):
        path = folder / name
        if path.is_file() and CHATGLM3_ROLES[1] in path.read_text(encoding="utf-8", errors="replace"):
            return True
    if (folder / "tokenization_chatglm.py").is_file():
        return False
    raise ConvertError("config.json does not tell ChatGLM2 from ChatGLM3; say --model_name chatglm2-6b or --model_name chatglm3-6b")


def read_tokenizer_json(path, tokenizer, folder):
    """A tokenizer.json whose BPE model falls back to bytes, which is how sentencepiece models look there."""
    model = tokenizer["model"]
    order = {}
    for merge in model.get("merges") or []:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        order.setdefault("".join(pair), len(order))
    if not order:
        raise ConvertError(f"{path} has no merges; fetch it again")
    table = TokenTable()
    for text, token in model["vocab"].items():
        kind = (UNKNOWN if text == model.get("unk_token") else BYTE if re.fullmatch("<0x[0-9A-Fa-f]{2}>", text) else NORMAL)
        table.put(token, text, kind, -float(order[text]) if text in order else -float(len(order)) if kind == NORMAL else 0.0)
    for entry in tokenizer.get("added_tokens") or []:
        if table.types.get(entry["id"]) not in (UNKNOWN, BYTE):
            put_added(table, entry["id"], entry["content"], entry.get("special"), ADDED_SCORE)
    tokens, types, scores = table.lists()
    return Vocabulary("llama", "default", tokens, types, scores, add_space_prefix=_prepends_space(tokenizer))


def _prepends_space(tokenizer):
    text = json.dumps([tokenizer.get("normalizer"), tokenizer.get("pre_tokenizer")])
    return '"Prepend"' in text or '"prepend_scheme": "first"' in text or '"prepend_scheme": "always"' in text \
        or '"add_prefix_space": true' in text
