"""The command line. Needs nothing but Python itself, so that --help is there before any package is."""

import argparse
import pathlib
import shutil
import textwrap

from command_line import Parser

from .families import FAMILIES

HELP = """Converts a Hugging Face folder to one GGUF file, offline.

{}"""
MORE_HELP = """Reads safetensors or pytorch_model*.bin (without running what a .bin may contain), config.json and the tokenizer's
files. GPTQ and AWQ checkpoints are repacked, not quantized again. Families: {}."""


def parse_arguments(args):
    more = " ".join(MORE_HELP.format(", ".join(family.architecture for family in FAMILIES)).split())
    width = min(shutil.get_terminal_size().columns, 80) - 2
    parser = Parser("convert.py", description=HELP.format(textwrap.fill(more, width)),
                    formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=width))
    parser.add_argument("--pytorch_model_path", "--model_path", metavar="DIR", required=True, type=pathlib.Path,
                        help="the Hugging Face folder")
    parser.add_argument("--model_name", metavar="NAME", help="the model's name or family, such as chatglm2-6b; config.json "
                        "decides, a contradiction is an error")
    parser.add_argument("--quantize", metavar="TYPE", default="False", help="True (Q4_K_M), False, or a type such as Q4_0, Q5_K_M, "
                        "Q8_0 (False)")
    parser.add_argument("--outtype", choices=("auto", "f16", "bf16", "f32"), default="auto",
                        help="number format of the matrices before quantizing; auto keeps F16 and BF16 and makes F32 F16 (auto)")
    parser.add_argument("-o", "--outfile", metavar="FILE", type=pathlib.Path, help="output file (models/NAME.TYPE.gguf)")
    parser.add_argument("--threads", "-t", metavar="N", type=int, default=0, help="threads for quantizing (all processors)")
    parser.add_argument("--device", choices=("cpu", "cuda", "mps"), default="cpu",
                        help="accepted; converting runs on the CPU (cpu)")
    return parser.parse_args(args)
