"""Standard output of the command lines, whose reader may leave early (`| head`), and which may be a full disk."""

from __future__ import annotations

import argparse
import os
import sys

_failure: OSError | None = None


def say(text: str) -> None:
    """Prints. Where that fails, the text and all that follows is lost, so that what writes files goes on to do so."""
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
    """Raises what has failed; that a reader has left is no failure."""
    if _failure is not None and not isinstance(_failure, BrokenPipeError):
        raise OSError(f"standard output cannot be written: {_failure.strerror}")


class Parser(argparse.ArgumentParser):
    """One whose help says where it cannot be written."""

    def print_help(self, file: object = None) -> None:
        say(self.format_help().rstrip())
        check()
