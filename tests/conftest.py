"""What the Python tests share: where their helpers and the converter lie, and tokenizers that are trained once."""
import pathlib
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "support"), str(HERE.parent / "python")]


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory):
    import hf_families

    return hf_families.Tokenizers(tmp_path_factory.mktemp("tokenizers"))
