"""Converts a Hugging Face folder to GGUF, offline: python convert.py --pytorch_model_path DIR --quantize True

The work is in python/convert/. Where the packages of requirements.txt are missing here but .venv has them, .venv's Python takes
over.
"""

import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "python"))

if __name__ == "__main__":
    from convert.arguments import parse_arguments
    parse_arguments(sys.argv[1:])  # --help needs no packages, and a wrong flag no .venv
    try:
        from convert.command import main
    except ModuleNotFoundError as error:
        venv = ROOT / ".venv" / "bin" / "python"
        if not venv.exists() or pathlib.Path(sys.prefix).resolve() == (ROOT / ".venv").resolve():
            sys.exit(f"error: the Python package {error.name} is missing, perhaps others too; install what is needed, and run this "
                     f"again: python3 -m venv {ROOT / '.venv'} && {venv} -m pip install -r {ROOT / 'requirements.txt'}")
        os.execv(str(venv), [str(venv), *sys.argv])
    except KeyboardInterrupt:  # the packages take a second; main has its own
        sys.exit(130)
    sys.exit(main())
