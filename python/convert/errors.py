"""How the converter speaks: one exception whose text is a sentence for the user, and lines on stderr."""

import sys


class ConvertError(Exception):
    """Something is wrong with the input. The text says what, and what to do; it is shown without a traceback."""


def say(text):
    print(text, file=sys.stderr, flush=True)


def warn(text):
    say("warning: " + text)
