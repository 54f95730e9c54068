"""llama.cpp's own converter on one folder: SOURCE FOLDER OUT OUTTYPE PRE. Needs torch and transformers.

Two things that it needs from outside are put in its place. It finds the name of the pre-tokenizer by hashing token ids, which a
tiny vocabulary cannot match, so the name is given (PRE). And it runs tokenizer code from the folder, which a tiny folder has not:
what that code of ChatGLM3 and Qwen answers is answered here.
"""
import pathlib
import sys
import types

source, folder, out, outtype, pre = sys.argv[1:]
sys.path[:0] = [source, str(pathlib.Path(source) / "gguf-py")]
import transformers  # noqa: E402
from conversion import base  # noqa: E402

base.TextModel.get_vocab_base_pre = lambda self, tokenizer: pre


class ChatGLM3Tokenizer:
    """What tokenization_chatglm.py of chatglm3-6b answers."""

    def __init__(self, path):
        import sentencepiece

        model = sentencepiece.SentencePieceProcessor(str(path / "tokenizer.model"))
        self.tokenizer = types.SimpleNamespace(sp_model=types.SimpleNamespace(
            vocab_size=model.vocab_size, get_score=model.GetScore, is_unknown=model.IsUnknown, is_control=model.IsControl,
            is_unused=model.IsUnused, is_byte=model.IsByte))
        self.model = model
        self.marks = ["[MASK]", "[gMASK]", "[sMASK]", "sop", "eop", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]

    def get_vocab(self):
        return {str(i): i for i in range(self.model.vocab_size() + len(self.marks))}

    def _convert_id_to_token(self, token):
        n = self.model.vocab_size()
        if n <= token < n + len(self.marks):
            return self.marks[token - n]
        return "" if token > n or token in (0, 1, 2) else self.model.IdToPiece(token)


class QwenTokenizer:
    """What tokenization_qwen.py answers."""

    def __init__(self, path):
        import base64

        lines = (path / "qwen.tiktoken").read_text().splitlines()
        self.mergeable_ranks = {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in lines}
        marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] + [f"<|extra_{i}|>" for i in range(205)]
        self.special_tokens = {mark: len(self.mergeable_ranks) + i for i, mark in enumerate(marks)}

    def get_vocab(self):
        return {**self.mergeable_ranks, **self.special_tokens}


real = transformers.AutoTokenizer.from_pretrained


def from_pretrained(path, *args, **more):
    path = pathlib.Path(path)
    if (path / "qwen.tiktoken").exists():
        return QwenTokenizer(path)
    if pre == "chatglm-spm":
        return ChatGLM3Tokenizer(path)
    more.pop("trust_remote_code", None)
    return real(path, *args, **more)


transformers.AutoTokenizer.from_pretrained = from_pretrained
sys.argv = ["convert_hf_to_gguf.py", folder, "--outfile", out, "--outtype", outtype]
import convert_hf_to_gguf  # noqa: E402

convert_hf_to_gguf.main()
