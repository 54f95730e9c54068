"""Being asked to stop: Ctrl-C, SIGTERM and SIGHUP become one exception, so that what was begun is cleared away on the way out.

Invariant: a signal that was ignored when the program began (nohup, a job in the background) stays ignored.
"""

import contextlib
import signal

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_held = None  # inside of held(): the signals that came


class Stopped(BaseException):
    """No Exception: no handler of errors should take it for one."""

    def __init__(self, number):
        super().__init__(number)
        self.number = number


def _stop(number, _frame):
    if _held is None:
        raise Stopped(number)
    _held.append(number)


@contextlib.contextmanager
def caught():
    """Inside, the signals raise Stopped; afterwards they do what they did before."""
    before = {number: signal.getsignal(number) for number in STOPS}
    before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    try:
        for number in before:
            signal.signal(number, _stop)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def held():
    """Inside, signals wait: for a step that must not be left between doing something and knowing that it is done."""
    global _held
    if _held is not None:
        yield
        return
    _held = []
    try:
        yield
    finally:
        came, _held = _held, None
    if came:
        raise Stopped(came[0])
