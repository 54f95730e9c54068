"""Vocabularies in tiktoken's text form: lines of a token in base64 and its rank. Qwen's qwen.tiktoken, GLM-4-9B's tokenizer.model.

The form has no merges, but they follow from the ranks: a token is made last from the two parts that merging by lower ranks leaves.
"""

import base64
import binascii

from .checkpoint import load_json
from .errors import ConvertError
from .vocabulary import CONTROL, NORMAL, TokenTable, Vocabulary, put_added

QWEN_MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] + [f"<|extra_{i}|>" for i in range(205)]


def is_ranks(path):
    with open(path, "rb") as file:
        fields = file.readline(1000).split()
    try:
        return len(fields) == 2 and bool(base64.b64decode(fields[0], validate=True)) and int(fields[1]) >= 0
    except (binascii.Error, ValueError):
        return False


def read_ranks(path):
    """token bytes -> rank"""
    try:
        pairs = [line.split() for line in path.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (binascii.Error, ValueError):
        raise ConvertError(f"{path} is damaged; fetch it again") from None
    if sorted(ranks.values()) != list(range(len(ranks))) or len([t for t in ranks if len(t) == 1]) != 256:
        raise ConvertError(f"{path} is incomplete: its ranks have gaps, or bytes are missing; fetch it again")
    return ranks


def byte_characters():
    """Byte-level BPE writes each byte as a printable character: itself where it is one, else one from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{byte: chr(byte) for byte in printable}, **{byte: chr(256 + i) for i, byte in enumerate(others)}}


def split_by_rank(ranks, token, limit):
    """The parts that `token` is left in when only merges of a rank below `limit` are made."""
    parts = [token[i:i + 1] for i in range(len(token))]
    while True:
        best, place = limit, None
        for i in range(len(parts) - 1):
            rank = ranks.get(parts[i] + parts[i + 1])
            if rank is not None and rank < best:
                best, place = rank, i
        if place is None:
            return parts
        parts[place:place + 2] = [parts[place] + parts[place + 1]]


def _vocabulary(ranks, marks, pre):
    """marks: list of (id, text, special)"""
    letters = byte_characters()
    table, merges = TokenTable(), []

    def text(token):
        return "".join(letters[byte] for byte in token)

    for token, rank in sorted(ranks.items(), key=lambda pair: pair[1]):
        table.put(rank, text(token), NORMAL)
        if len(token) > 1:
            parts = split_by_rank(ranks, token, rank)
            if len(parts) != 2:
                raise ConvertError(f"token {rank} of the tokenizer is no merge of two others; the file is damaged")
            merges.append(text(parts[0]) + " " + text(parts[1]))
    for token, mark, special in marks:
        put_added(table, token, mark, special)
    tokens, types, _ = table.lists()
    return Vocabulary("gpt2", pre, tokens, types, merges=merges)


def read_qwen(path):
    ranks = read_ranks(path)
    vocabulary = _vocabulary(ranks, [(len(ranks) + i, mark, True) for i, mark in enumerate(QWEN_MARKS)], "qwen2")
    vocabulary.specials = {kind: len(ranks) for kind in ("bos", "eos", "unk")}
    assert vocabulary.types[len(ranks)] == CONTROL
    return vocabulary


def read_glm4(path, folder):
    settings = folder / "tokenizer_config.json"
    added = load_json(settings).get("added_tokens_decoder") if settings.is_file() else None
    if not added:
        raise ConvertError(f"{folder} lacks tokenizer_config.json with added_tokens_decoder, which names GLM-4's marks")
    marks = [(int(token), entry["content"], entry.get("special")) for token, entry in added.items()]
    vocabulary = _vocabulary(read_ranks(path), marks, "chatglm-bpe")
    ids = {text: token for token, text, _ in marks}
    end, user = ids.get("<|endoftext|>"), ids.get("<|user|>")
    vocabulary.specials = {"eos": end, "eot": user, "unk": end}
    vocabulary.add_bos = False
    return vocabulary
