"""Which token ids start, end and pad a text, which of them the tokenizer adds by itself, and the chat template.

The rules are those of llama.cpp's converter: the post-processor of tokenizer.json tells what is added, tokenizer_config.json names
the tokens by text, config.json by id, and the first answer counts.
"""

from .checkpoint import load_json

KINDS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
# GGUF's key where it differs from the kind's name
KEYS = {"unk": "unknown", "sep": "seperator", "pad": "padding"}


class SpecialTokens:
    def __init__(self, folder, n_vocab):
        self.n_vocab = n_vocab
        self.kinds = list(KINDS)
        self.ids = {}
        self.adds = {}
        self.chat_template = None
        tokenizer = _read(folder / "tokenizer.json")
        settings = _read(folder / "tokenizer_config.json")
        has_settings = bool(settings)
        self._read_post_processor(tokenizer.get("post_processor") or {}, settings)
        if has_settings:
            self._read_settings(tokenizer.get("added_tokens") or [], settings)
            self.chat_template = _chat_template(folder, settings)
        config = _read(folder / "config.json")
        for kind in self.kinds:
            value = config.get(kind + "_token_id")
            if value is None and isinstance(config.get("text_config"), dict):
                value = config["text_config"].get(kind + "_token_id")
            self.set(kind, value)

    def set(self, kind, token):
        """The first value counts; lists (several end tokens) and ids that no token has are passed over."""
        if type(token) is int and 0 <= token < self.n_vocab:
            self.ids.setdefault(kind, token)

    def _read_settings(self, added_tokens, settings):
        ids = {}
        for token in added_tokens:
            ids.setdefault(token.get("content"), token.get("id"))
        for kind in self.kinds:
            if isinstance(settings.get(f"add_{kind}_token"), bool):
                self.adds.setdefault(kind, settings[f"add_{kind}_token"])
            self.set(kind, ids.get(_text(settings.get(kind + "_token"))))

    def _read_post_processor(self, processor, settings):
        for step in processor.get("processors") or [processor]:
            if step.get("type") == "ByteLevel":
                self.adds.setdefault("bos", False)
                self.adds.setdefault("eos", False)
            elif step.get("type") == "TemplateProcessing":
                self._read_template(step, settings)

    def _read_template(self, step, settings):
        single = step.get("single") or []
        first = _special(single[0]) if len(single) > 1 else None
        last = _special(single[-1]) if len(single) > 1 else None
        bos, cls, eos = (_text(settings.get(kind + "_token")) for kind in ("bos", "cls", "eos"))
        if first:
            if not bos and first != cls:
                settings["bos_token"] = bos = first
            if not cls and first != bos:
                settings["cls_token"] = cls = first
            self.adds["bos"] = first in (bos, cls)
        if last:
            if last != eos and settings:  # what is called the end is then the end of a turn
                self.kinds.append("eot")
                settings["eot_token"], settings["eos_token"] = eos, last
            self.adds["eos"] = True
        pair = list(step.get("pair") or [])
        if first and pair and _special(pair[0]) == first:
            pair = pair[1:]
        if last and pair and _special(pair[-1]) == last:
            pair = pair[:-1]
        sequences = [item.get("Sequence", {}).get("id") for item in pair]
        if len(pair) > 2 and sequences[0] == "A" and sequences[-1] == "B":
            between = {_special(item) for item in pair[1:-1]}
            known = {_text(settings.get("sep_token")), eos} - {None}
            self.adds["sep"] = bool(between & known) and (not last or len(pair) == 4)

    def write(self, add):
        for kind, token in self.ids.items():
            add(f"tokenizer.ggml.{KEYS.get(kind, kind)}_token_id", token)
        for kind, value in self.adds.items():
            if kind in ("bos", "eos", "sep"):
                add(f"tokenizer.ggml.add_{kind}_token", value)


def _read(path):
    return load_json(path) if path.is_file() else {}


def _text(entry):
    return entry.get("content") if isinstance(entry, dict) else entry


def _special(item):
    return item.get("SpecialToken", {}).get("id")


def _chat_template(folder, settings):
    """A string, a list of {name, template}, or None."""
    if settings.get("chat_template") is not None:
        template = settings["chat_template"]
        return template if isinstance(template, (str, list)) else None
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
        if more:
            named = [{"name": path.stem, "template": path.read_text(encoding="utf-8")} for path in more]
            return [{"name": "default", "template": template}] + named
        return template
    return _read(folder / "chat_template.json").get("chat_template")
