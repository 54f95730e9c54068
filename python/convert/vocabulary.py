"""A model's vocabulary as GGUF stores it.

Two kinds exist: "llama" (sentencepiece: pieces with scores, spaces as U+2581, unknown characters as bytes) and "gpt2" (byte-level
BPE: merges, bytes as printable characters, a named rule that splits text beforehand). The vocabulary always has as many tokens as
the embedding has rows: missing ones become unused tokens, which are never produced by tokenizing.
"""

import dataclasses
from typing import Optional

from .errors import ConvertError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type


@dataclasses.dataclass
class Vocabulary:
    model: str  # "llama" or "gpt2"
    pre: str  # the rule that splits text before merging; "default" for sentencepiece
    tokens: list  # str
    types: list
    scores: Optional[list] = None
    merges: Optional[list] = None  # "left right"
    add_space_prefix: Optional[bool] = None
    specials: dict = dataclasses.field(default_factory=dict)  # kind -> id that the family fixes, unless the folder says one
    add_bos: Optional[bool] = None  # where the family fixes it

    @property
    def n_used(self):
        """Tokens up to the last one that is not padding."""
        return max((i + 1 for i, kind in enumerate(self.types) if kind != UNUSED), default=0)

    def fit(self, n_rows):
        """Pads to the rows of the embedding; refuses tokens that have no row."""
        if self.n_used > n_rows:
            raise ConvertError(f"the tokenizer has {self.n_used} tokens, but the embedding only {n_rows} rows; tokens were added "
                               "without resizing the model, or the tokenizer is another model's")
        del self.tokens[n_rows:], self.types[n_rows:]
        for i in range(len(self.tokens), n_rows):
            self.tokens.append(f"[PAD{i}]")
            self.types.append(UNUSED)
        if self.scores is not None:
            del self.scores[n_rows:]
            self.scores += [-10000.0] * (n_rows - len(self.scores))


class TokenTable:
    """Tokens under construction, by id."""

    def __init__(self):
        self.tokens, self.types, self.scores = {}, {}, {}

    def put(self, token, text, kind, score=0.0):
        if type(token) is not int or not 0 <= token < 1 << 24 or not isinstance(text, str):
            raise ConvertError(f"the tokenizer has a token {text!r} of id {token!r}; its files are damaged")
        if "\0" in text:
            raise ConvertError(f"the tokenizer's token {token}, {text!r}, has a zero byte, which no GGUF file can hold; if it was added, "
                               "take it out of the tokenizer's files")
        self.tokens[token], self.types[token], self.scores[token] = text, kind, score

    def lists(self):
        """tokens, types, scores; gaps are unused."""
        ids = range(max(self.tokens, default=-1) + 1)
        return ([self.tokens.get(i, f"[PAD{i}]") for i in ids], [self.types.get(i, UNUSED) for i in ids],
                [self.scores.get(i, -10000.0) for i in ids])


def adds_prefix_space(settings):
    """As Python reads tokenizer_config.json, where a 1 is as true as true; None where it says nothing. GGUF has only true and false."""
    value = settings.get("add_prefix_space")
    return None if value is None else bool(value)


def looks_special(text):
    """Marks that some models forgot to call special."""
    return (text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]") or (text.startswith("<|") and text.endswith("|>"))
            or (text.startswith("<｜") and text.endswith("｜>")) or (text.startswith("<unused") and text.endswith(">")))


def put_added(table, token, text, special, score=0.0):
    if special or looks_special(text):
        table.put(token, text, CONTROL, score)
    else:
        table.put(token, text.replace("\u2581", " "), USER_DEFINED, score)
