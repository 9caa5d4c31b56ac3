"""Standard output of the command lines, whose reader may leave early (`| head`), and which may be a full disk."""

from __future__ import annotations

import argparse
import os
import sys

_failure: OSError | None = None


def say(text: str) -> None:
    """Prints. If that fails, this text and all later ones are lost, and the caller goes on to write its files."""
    global _failure
    try:
        print(text, flush=True)
    except OSError as error:
        _failure = error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor shall Python fail when it ends


def is_lost() -> bool:
    """Whether nothing can be shown any more."""
    return _failure is not None


def check() -> None:
    """Raises OSError if output was lost, but not if the reader of a pipe has left."""
    if _failure is not None and not isinstance(_failure, BrokenPipeError):
        raise OSError(f"standard output cannot be written: {_failure.strerror}")


class Parser(argparse.ArgumentParser):
    """Reports a help text that cannot be written."""

    def print_help(self, file: object = None) -> None:
        say(self.format_help().rstrip())
        check()
