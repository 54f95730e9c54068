"""The parser of the Python programs' command lines: argparse's own drops a help text that can't be written and says nothing.

Needs nothing but Python itself, so that --help is there before any package is.
"""
import argparse
import os
import sys


class Parser(argparse.ArgumentParser):
    def print_help(self, file=None):
        if file is not None:
            super().print_help(file)
            return
        try:
            if sys.stdout is None:
                raise OSError(None, "it is closed")
            sys.stdout.write(self.format_help())
            sys.stdout.flush()
        except BrokenPipeError:  # the reader has what it wanted
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes once more at the end
        except OSError as error:
            if sys.stdout is not None:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            self.exit(1, f"error: the help can't be written to stdout: {error.strerror}\n")
