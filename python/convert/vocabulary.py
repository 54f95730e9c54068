"""A model's vocabulary as GGUF stores it, and the choice of the file to read it from.

Two kinds exist: "llama" (sentencepiece: pieces with scores, spaces as U+2581, unknown characters as bytes) and "gpt2" (byte-level BPE:
merges, bytes as printable characters, a named rule that splits text beforehand). The vocabulary always has as many tokens as the
embedding has rows: missing ones become unused tokens, which are never produced by tokenizing.
"""

import dataclasses
from typing import Optional

from .errors import ConvertError, warn

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
        self.tokens[token], self.types[token], self.scores[token] = text, kind, score

    def lists(self):
        """tokens, types, scores; gaps are unused."""
        ids = range(max(self.tokens, default=-1) + 1)
        return ([self.tokens.get(i, f"[PAD{i}]") for i in ids], [self.types.get(i, UNUSED) for i in ids],
                [self.scores.get(i, -10000.0) for i in ids])


def looks_special(text):
    """Marks that some models forgot to call special."""
    return (text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]") or (text.startswith("<|") and text.endswith("|>"))
            or (text.startswith("<｜") and text.endswith("｜>")) or (text.startswith("<unused") and text.endswith(">")))


def put_added(table, token, text, special, score=0.0):
    if special or looks_special(text):
        table.put(token, text, CONTROL, score)
    else:
        table.put(token, text.replace("\u2581", " "), USER_DEFINED, score)


def find_tokenizer(family, folder):
    """The file to read, or None."""
    names = {"chatglm": ("tokenizer.model", "tokenizer.json")}
    for kind in family.tokenizers:
        for name in names.get(kind, (kind,)):
            if (folder / name).is_file():
                return folder / name
    return None


def read_vocabulary(family, folder, config, hint):
    from . import byte_level, sentencepiece_vocabulary, tiktoken_vocabulary

    path = find_tokenizer(family, folder)
    if path is None:
        raise ConvertError(f"{folder} has no tokenizer: {' or '.join(family.tokenizers)} is needed")
    if path.name == "qwen.tiktoken":
        return tiktoken_vocabulary.read_qwen(path)
    if path.name == "tokenizer.json":
        return byte_level.read_tokenizer_json(family, path, folder)
    if family.architecture == "chatglm":
        if tiktoken_vocabulary.is_ranks(path):
            return tiktoken_vocabulary.read_glm4(path, folder)
        return sentencepiece_vocabulary.read_chatglm(path, folder, config, hint)
    return sentencepiece_vocabulary.read_model(path, folder, family)


def write_vocabulary(vocabulary, specials, add, add_array):
    """add(key, value) and add_array(key, values) as in output.py; `specials` is a SpecialTokens."""
    prefix = "tokenizer.ggml."
    add(prefix + "model", vocabulary.model)
    add(prefix + "pre", vocabulary.pre)
    add_array(prefix + "tokens", vocabulary.tokens)
    if vocabulary.scores is not None:
        add_array(prefix + "scores", vocabulary.scores)
    add_array(prefix + "token_type", vocabulary.types)
    if vocabulary.merges is not None:
        if not vocabulary.merges:
            raise ConvertError("the tokenizer has no merges; tokenizer.json or merges.txt is incomplete")
        add_array(prefix + "merges", vocabulary.merges)
    if vocabulary.add_space_prefix is not None:
        add(prefix + "add_space_prefix", vocabulary.add_space_prefix)
    if vocabulary.add_bos is not None:
        specials.adds["bos"] = vocabulary.add_bos
    for kind, token in vocabulary.specials.items():
        specials.set(kind, token)
    specials.write(add)
    _write_chat_template(specials.chat_template, add, add_array)


def _write_chat_template(template, add, add_array):
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        others = sorted(name for name, text in named.items() if name and name != "default" and isinstance(text, str))
        for name in others:
            safe = "".join(c if c.isascii() and c.isalnum() else "_" for c in name)
            add("tokenizer.chat_template." + safe, named[name])
        if others:
            add_array("tokenizer.chat_templates", others)
        template = named.get("default")
    if isinstance(template, str):
        add("tokenizer.chat_template", template)


def warn_differing(token, first, second, where):
    warn(f"token {token} is {first!r} in the tokenizer, but {second!r} in {where}; {where} counts")
