"""The command: checks before work, the two steps (convert, quantize), names that appear only when a file is whole."""

import os
import pathlib
import shutil
import subprocess
import sys
import time

from tqdm import tqdm

from . import packed
from .arguments import parse_arguments
from .checkpoint import find_weights, load_json, missing_weights, open_checkpoint
from .errors import ConvertError, interpreting, say
from .families import FAMILIES, find_family
from .metadata import read_hyperparameters, write_hyperparameters
from .output import FILE_TYPES, Writer, main_type, plan_tensors
from .part import Part, Quantized, check_outfile
from .special_tokens import SpecialTokens
from .stopping import STOPS, Stopped, caught, held
from .tokenizer import find_tokenizer, read_vocabulary, write_vocabulary

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# Bits per weight, for the check of disk space; types not listed count as the largest.
QUANTIZED_BITS = {"Q2_K": 3.4, "Q3_K": 4.4, "Q4_0": 4.7, "Q4_1": 5.2, "Q4_K": 5.0, "IQ4": 4.8, "Q5": 6.1, "Q6_K": 6.8, "Q8_0": 8.7}


def quantized_type(text):
    """The type that --quantize names, in any case of letters, or None."""
    if text.lower() in ("false", "no", "0", "none"):
        return None
    return "Q4_K_M" if text.lower() in ("true", "yes", "1") else text.upper()


def find_quantizer():
    for path in (os.environ.get("DT_QUANTIZE"), ROOT / "deeptutor-quantize", ROOT / "build" / "bin" / "deeptutor-quantize"):
        if path and os.access(path, os.X_OK):
            return str(path)
    raise ConvertError("--quantize needs the program deeptutor-quantize; build it: bash run.sh")


def check_quantized_type(quantizer, name, typed):
    known = subprocess.run([quantizer, "--list"], capture_output=True, text=True, check=False).stdout.split()
    if name not in known:
        begun = [word for word in known if word.startswith(name)]
        what = f"it is one of {', '.join(begun)}" if begun else f"known: True, False, {', '.join(known)}"
        raise ConvertError(f"--quantize {typed}: no such type; {what}")


def check_folder(folder, hint):
    """config.json; everything that is missing is named at once."""
    if not folder.is_dir():
        raise ConvertError(f"{folder} is no folder; --pytorch_model_path wants the folder with config.json and the weights")
    missing, config = missing_weights(folder), None
    if (folder / "config.json").is_file():
        config = load_json(folder / "config.json")
        with interpreting(folder / "config.json"):
            family = find_family(config, hint)
        if find_tokenizer(family, folder) is None:
            missing.append(f"the tokenizer ({' or '.join(family.tokenizers)})")
    else:
        missing.insert(0, "config.json")
    if missing:
        raise ConvertError(f"{folder} lacks: {'; '.join(missing)}; fetch what is missing into it")
    return config, family


def choose_float_type(outtype, tensors):
    """auto: that of the first matrix, as llama.cpp chooses."""
    if outtype != "auto":
        return outtype.upper()
    first = next((tensor.format for tensor in tensors.values() if len(tensor.shape) > 1), "F16")
    return first if first in ("F16", "BF16") else "F16"


def check_disk(folder, needed):
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ConvertError(f"not enough disk space in {folder}: {needed / 1e9:.1f} GB are needed for a while, {free / 1e9:.1f} GB "
                           "are free; give another place with --outfile")


def quantized_bytes(n_bytes, float_bits, name):
    bits = next((bits for prefix, bits in QUANTIZED_BITS.items() if name.startswith(prefix)), 8.7)
    return int(n_bytes * bits / float_bits)


def write_file(writer, part, n_bytes):
    started = time.monotonic()
    with part.open() as file, tqdm(total=n_bytes, unit="B", unit_scale=True, unit_divisor=1000, desc="converting",
                                   file=sys.stderr, disable=not sys.stderr.isatty()) as bar:
        writer.write(file, part.path, bar.update)
    seconds = max(time.monotonic() - started, 1e-9)
    say(f"converted: {n_bytes / 1e6:.1f} MB in {seconds:.1f} s, {n_bytes / 1e6 / seconds:.0f} MB/s")


def run_quantizer(quantizer, source, target, name, threads):
    command = [quantizer, str(source), str(target), name] + (["-t", str(threads)] if threads > 0 else [])
    process = None
    try:
        with held():
            process = subprocess.Popen(command)
        code = process.wait()
    except BaseException:
        if process is not None:
            process.terminate()  # it removes what it wrote
            process.wait()
        raise
    if -code in STOPS or code - 128 in STOPS:  # Ctrl-C reaches it too, and maybe only it, where this process ignores it
        raise Stopped(abs(code) % 128)
    if code != 0:
        raise ConvertError(f"quantizing failed (see above); the command was: {' '.join(command)}")


def prepare(arguments, quantize_to, quantizer):
    """Everything up to the first byte of output: a writer, its size, the output's path, the number format's name, whether main can
    chat with the model."""
    folder = arguments.pytorch_model_path
    config, family = check_folder(folder, arguments.model_name)
    with interpreting(folder / "config.json"):
        settings = packed.read_settings(folder, config)
        hyper = read_hyperparameters(family, config)
    say(f"{folder}: {family.architecture}, {hyper.n_layers} layers, {len(find_weights(folder)[1])} file(s) of weights")
    tensors = open_checkpoint(folder)
    float_type = choose_float_type(arguments.outtype, tensors)
    if settings is not None:
        tensors = packed.unpack_checkpoint(tensors, settings)
    with interpreting(folder / "config.json"):
        planned, n_rows = plan_tensors(family, hyper, tensors, float_type, config)
    with interpreting(f"the tokenizer of {folder} ({', '.join(family.tokenizers)}, tokenizer_config.json)"):
        vocabulary = read_vocabulary(family, folder, config, arguments.model_name)
        vocabulary.fit(n_rows)
        specials = SpecialTokens(folder, n_rows)

    is_name = arguments.model_name and arguments.model_name.lower() not in [word for f in FAMILIES for word in f.hints]
    writer = Writer(family.architecture, planned)
    with interpreting(f"what {folder} tells of the model"):
        writer.add_general(folder, arguments.model_name if is_name else None)
        write_hyperparameters(family, hyper, n_rows, writer.add)
    writer.add("general.file_type", FILE_TYPES[main_type(planned)])
    writer.add("general.quantization_version", 2)
    with interpreting(f"the tokenizer of {folder}"):
        chats = write_vocabulary(vocabulary, specials, writer.add, writer.add_array)

    type_name = quantize_to or main_type(planned)
    name = arguments.model_name or folder.resolve().name
    outfile = arguments.outfile or pathlib.Path("models") / f"{name.replace('/', '-')}.{type_name}.gguf"
    return writer, sum(tensor.n_bytes for tensor in planned), outfile, main_type(planned), chats


def convert(arguments):
    quantize_to = quantized_type(arguments.quantize)
    quantizer = None
    if quantize_to is not None:
        quantizer = find_quantizer()
        check_quantized_type(quantizer, quantize_to, arguments.quantize)
    if arguments.device != "cpu":
        say(f"--device {arguments.device}: converting runs on the CPU all the same; it moves numbers and computes nothing")
    writer, n_bytes, outfile, type_name, chats = prepare(arguments, quantize_to, quantizer)

    check_outfile(outfile, arguments.pytorch_model_path)
    outfile.parent.mkdir(parents=True, exist_ok=True)
    bits = 32 if type_name == "F32" else 16
    check_disk(outfile.parent, n_bytes + (quantized_bytes(n_bytes, bits, quantize_to) if quantize_to else 0) + (16 << 20))
    with Part(outfile) as part:
        part.begin()
        write_file(writer, part, n_bytes)
        if quantize_to:
            with Quantized(outfile) as quantized:
                quantized.begin()
                run_quantizer(quantizer, part.path, quantized.path, quantize_to, arguments.threads)
                part.finish(quantized.path)
        else:
            part.finish(part.path)
    what = "-cnv" if chats else '-p "Once upon a time"'
    say(f"{outfile}: {outfile.stat().st_size / 1e6:.1f} MB. Run it: ./main -m {outfile} {what}")


def main(args=None):
    arguments = parse_arguments(args)
    try:
        with caught():
            convert(arguments)
    except ConvertError as error:
        say(f"error: {error}")
        return 1
    except OSError as error:
        say(f"error: {error.filename or 'reading or writing'}: {error.strerror or error}")
        return 1
    except Stopped as stopped:
        say("stopped; nothing half-written was left behind")
        return 128 + stopped.number
    return 0
