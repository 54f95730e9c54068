"""How the converter speaks: one exception whose text is a sentence for the user, and lines on stderr."""

import contextlib
import struct
import sys


class ConvertError(Exception):
    """Something is wrong with the input. The text says what, and what to do; it is shown without a traceback."""


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
    say("warning: " + text)
