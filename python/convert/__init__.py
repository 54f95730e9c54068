"""Turns a Hugging Face folder into one GGUF file, offline: no torch, no transformers, no code from the folder.

    arguments.py    the command line
    command.py      the order of work
    checkpoint.py   which files hold which tensors; safetensors.py and pickles.py read them
    tensors.py      what a tensor is here, and the number formats
    packed.py       GPTQ and AWQ weights, repacked into ggml's blocks
    families.py     the table of model families: names, shapes, what differs
    metadata.py     config.json to GGUF keys
    tokenizer.py    vocabularies: vocabulary.py what one is, sentencepiece_vocabulary.py, byte_level.py and tiktoken_vocabulary.py
                    where it is read from, special_tokens.py start, end and chat template
    output.py       the plan of the output file and its writing
    part.py         which file may be the output, and the file in the making
    stopping.py     signals that ask to stop

Invariant: everything that can be wrong with the input is found and named before the first byte is written, and the output appears
under its name only when it is whole.
"""
