"""`./main --device`: the list, what is unknown, and layers given away (to the CPU by ggml's operators, as a device would take them).

DT_MAIN names the program; DT_TEST_MODEL the real model.
"""
from test_main import assert_fails, needs_model, run, run_model, run_stats


def test_list():
    result = run("--device", "list")
    assert result.returncode == 0 and result.stdout.startswith(b"cpu ") and result.stderr == b""


@needs_model
def test_unknown_device():
    assert_fails(run_model("-p", "x", "-n", "1", "--device", "toaster"), 1, "toaster", "cpu")


@needs_model
def test_layers_elsewhere(tmp_path):
    stats = [run_stats(tmp_path, "-p", "In the beginning God created the heaven", "-n", "4", "--temp", "0", *flags)[1]
             for flags in ((), ("--device", "ggml-cpu", "-ngl", "3"), ("--device", "ggml-cpu", "-ngl", "0"))]
    devices = [s["device"] for s in stats]
    assert devices == ["cpu", "ggml-cpu (layers 0-2)", "cpu"]
    tokens = [s["generated_token_ids"] for s in stats]
    assert tokens[1][:2] == tokens[0][:2] and tokens[2] == tokens[0]
