"""./main with drafts: the same text, exactly as many tokens, other vocabularies refused at once (cases.md row 13)."""
import os
import re

import pytest

from test_main import MAIN, MODEL, assert_fails, needs_model, run, run_model, run_stats

pytestmark = pytest.mark.skipif(not os.access(MAIN, os.X_OK), reason="DT_MAIN names no program")

LIST = "".join(f"{i}. The color of item {i} is red.\n" for i in range(1, 9)) + "9. The"
EVICT = ("--cache-eviction", "--max-cache-size", "96", "--min-cache-size", "32")
EXACT = ("--kernel", "reference")  # rounds one token and many alike; with others, near-equal tokens change places now and then
DRAFTS = (("--draft-lookup",), ("--draft-lookup", "--draft-max", "1"), ("--draft-lookup", "--draft-max", "16"),
          ("--draft-model", MODEL))


@needs_model
@pytest.mark.parametrize("flags", [(), EVICT, ("--temp", "0.8", "--seed", "5")])
def test_same_text(tmp_path, flags):
    flags = ("-p", LIST, "-n", "48", "--temp", "0", *flags, *EXACT)
    plain, stats = run_stats(tmp_path, *flags)
    assert stats["draft"] == {"proposed": 0, "accepted": 0, "prefill_tokens": 0, "prefill_ms": 0}
    for draft in DRAFTS:
        drafted, stats = run_stats(tmp_path, *flags, *draft)
        assert drafted.stdout == plain.stdout, draft
        assert 0 < stats["draft"]["accepted"] <= stats["draft"]["proposed"], draft
        assert (b"the smaller model has a cache of its own" in drafted.stderr) == ("--draft-model" in draft)
        assert re.search(rb"draft +\d+ of \d+ guessed tokens right", drafted.stderr)


@needs_model
def test_reading_is_not_decoding(tmp_path):
    """What the smaller model reads of a prompt is counted apart, in a chat the new part of each turn; so decoding is about as quick after
    a long prompt as after none. With the same model twice, reading it costs what the prefill did."""
    drafted, stats = run_stats(tmp_path, "-p", LIST * 6, "-n", "4", "--temp", "0", "--draft-model", MODEL)
    draft = stats["draft"]
    assert draft["prefill_tokens"] == stats["prompt_tokens"] > 400
    assert draft["prefill_ms"] > stats["prefill_ms"] / 4 and stats["decode_ms"] < draft["prefill_ms"]
    assert re.search(rb"draft +[\d.]+ ms +%d tokens .* read by the smaller model" % draft["prefill_tokens"], drafted.stderr)
    _, stats = run_stats(tmp_path, "-cnv", "-n", "8", "--temp", "0", "--draft-model", MODEL, stdin=b"Count to three.\nAnd to four.\n")
    assert 0 < stats["draft"]["prefill_tokens"] <= stats["prompt_tokens"] - stats["reused_tokens"] + 8  # of the reply
    _, stats = run_stats(tmp_path, "-p", LIST, "-n", "8", "--temp", "0", "--draft-lookup")
    assert stats["draft"]["prefill_tokens"] == stats["draft"]["prefill_ms"] == 0


@needs_model
def test_a_model_agrees_with_itself(tmp_path):
    """Beyond the end of the text nothing is guessed."""
    _, stats = run_stats(tmp_path, "-p", LIST, "-n", "48", "--temp", "0", *EXACT, "--draft-model", MODEL)
    assert stats["draft"]["accepted"] >= 0.9 * stats["draft"]["proposed"] > 0


@needs_model
def test_exactly_n_tokens(tmp_path):
    for n in ("1", "2", "4"):
        for draft in DRAFTS:
            plain = run_model("-p", LIST, "-n", n, "--temp", "0", *EXACT).stdout
            drafted, stats = run_stats(tmp_path, "-p", LIST, "-n", n, "--temp", "0", *EXACT, *draft)
            assert stats["generated_tokens"] == int(n) and drafted.stdout == plain


@needs_model
def test_ends(tmp_path):
    """The end of text, and that of a grammar, in mid-draft."""
    for flags in (("-cnv", "-p", "Say hello."), ("-p", "Numbers:", "--grammar", 'root ::= "one two one two one two one two."')):
        flags = (*flags, "-n", "64", "--temp", "0", *EXACT)
        plain = run_model(*flags).stdout
        for draft in DRAFTS:
            assert run_model(*flags, *draft).stdout == plain != b""


@needs_model
def test_other_vocabulary_is_refused_before_loading(tmp_path):
    data = bytearray(open(MODEL, "rb").read(4 << 20))
    at = data.find(b"\x05\0\0\0\0\0\0\0\xc4\xa0the")  # a token of the vocabulary, as a string of 5 bytes
    assert at > 0
    data[at + 12] ^= 1
    path = tmp_path / "draft.gguf"
    path.write_bytes(data)  # cut off in the weights: they are not reached
    os.truncate(path, os.path.getsize(MODEL))
    result = run_model("-p", "x", "-n", "1", "--draft-model", str(path))
    assert_fails(result, 2, "another vocabulary", "token ")
    assert_fails(run("-m", MODEL, "-p", "x", "--draft-model", str(tmp_path / "none.gguf")), 2, "none.gguf")
