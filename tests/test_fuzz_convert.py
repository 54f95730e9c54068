"""The readers of checkpoints on what fuzzing found (fuzz/regressions), and on a few thousand mutations, the same in each run."""
import pathlib
import sys

import pytest

FOLDER = pathlib.Path(__file__).resolve().parent / "fuzz"
sys.path.insert(0, str(FOLDER))


@pytest.mark.parametrize("name", ["pickle", "safetensors"])
def test_nothing_but_a_refusal(name, tmp_path, monkeypatch):
    import fuzz_convert

    monkeypatch.chdir(tmp_path)  # where a finding is left
    assert fuzz_convert.replay(name, [FOLDER / "regressions" / name], 1500, tmp_path) > 0


def test_a_key_nested_without_end(tmp_path):
    """Its hash would be computed by as many calls within calls as the file asks for."""
    from convert.errors import ConvertError
    from convert.pickles import read_pickle
    import fuzz_convert

    path = tmp_path / "deep.bin"
    path.write_bytes(fuzz_convert.legacy(b"\x80\x02})" + b"\x85" * 3000000 + b"Ns.", []))
    with pytest.raises(ConvertError, match="a key that is no name"):
        read_pickle(path)
