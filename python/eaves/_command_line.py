"""The shared code of the command lines: standard output, which may be a full disk or a pipe whose reader leaves early
(`| head`), and the parser, which answers a wrong argument in one sentence."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

_failure: OSError | None = None


def say(text: str) -> None:
    """Prints. If that fails, this text and all later ones are lost, and the caller goes on."""
    global _failure
    try:
        print(text, flush=True)
    except OSError as error:
        _failure = error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise Python fails at its exit


def check() -> None:
    """Raises OSError if output was lost, but not if the reader of a pipe has left."""
    if _failure is not None and not isinstance(_failure, BrokenPipeError):
        raise OSError(f"standard output cannot be written: {_failure.strerror}")


class Parser(argparse.ArgumentParser):
    """A parser without abbreviations. It suggests the option that resembles a mistyped one, and reports a help text
    that cannot be written."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        keywords.setdefault("allow_abbrev", False)
        super().__init__(*arguments, **keywords)

    # parse_args would be too late: a command's parser would leave its unknown options to the program's parser.
    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Refuses unknown arguments, and suggests the nearest option."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            word = unknown[0].partition("=")[0]
            if not word.startswith("-"):
                self.error(f'unexpected argument "{word}"')
            known = [option for action in self._actions for option in action.option_strings]
            nearest = difflib.get_close_matches("--" + word.lstrip("-"), known, n=1)
            self.error(f"unknown option {word}" + (f"; did you mean {nearest[0]}?" if nearest else ""))
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """Ends the program with this sentence."""
        self.exit(2, f"{self.prog.removeprefix('python -m ')}: {message} (see {self.prog} --help)\n")

    def print_help(self, file: object = None) -> None:
        """Prints the help text."""
        say(self.format_help().rstrip())
        check()
