"""Which file of a folder the vocabulary comes from, and the tokenizer's GGUF keys."""

from . import byte_level, sentencepiece_vocabulary, tiktoken_vocabulary
from .errors import ConvertError


def find_tokenizer(family, folder):
    """The file to read, or None."""
    return next((folder / name for name in family.tokenizers if (folder / name).is_file()), None)


def read_vocabulary(family, folder, config, hint):
    path = find_tokenizer(family, folder)
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
    """add(key, value) and add_array(key, values) as in output.py; `specials` is a SpecialTokens. Says whether chats have a template."""
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
    has_template = _write_chat_template(specials.chat_template, add, add_array)
    return has_template or "[gMASK]" in vocabulary.tokens or b"[gMASK]" in vocabulary.tokens  # GLM's is known by its tokens


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
    return isinstance(template, str)
