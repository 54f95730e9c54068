"""How the converter speaks: one exception whose text is a sentence for the user, and lines on stderr."""

import contextlib
import struct
import sys


HEAD, TAIL = 700, 300  # characters of a sentence that are shown where it quotes a value of any length: what is wrong, and what to do


def plain(text):
    """A sentence with what files say in it, as a terminal may have it: no control characters, no page-long values."""
    text = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    return text if len(text) <= HEAD + TAIL else f"{text[:HEAD]} [...] {text[-TAIL:]}"


class ConvertError(Exception):
    """Something is wrong with the input. The text says what, and what to do; it is shown without a traceback."""

    def __init__(self, text):
        super().__init__(plain(text))


@contextlib.contextmanager
def interpreting(what):
    """Around code that takes apart what a file of the folder says. Where a value is of another kind than it should be, Python raises
    one of many things; they all mean that the file is damaged or was made by something that we don't know."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, RuntimeError, TypeError, ValueError,
            struct.error) as error:
        raise ConvertError(f"{what} is damaged, or not of a known form ({type(error).__name__}: {str(error)[:200]}); fetch it "
                           "again") from error


def say(text):
    print(text, file=sys.stderr, flush=True)


def warn(text):
    say("warning: " + plain(text))
