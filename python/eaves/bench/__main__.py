"""`python -m eaves.bench`: does what the command line says, and says in one sentence what was wrong.

Exit codes: 0 done; 1 the device or the system failed; 2 an argument is wrong; 130 the run was stopped.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress

from eaves.bench import page, stop
from eaves.bench.arguments import parse_arguments
from eaves.bench.benchmark import InvalidArgument, Operator
from eaves.bench.operators import OPERATORS
from eaves.bench.run import run_bench


def main(argv: Sequence[str] | None = None, operators: Sequence[Operator] = OPERATORS) -> int:
    """Returns the exit code; one sentence on stderr says what was wrong."""
    with stop.signals():
        try:
            arguments = parse_arguments(argv)
            if arguments.page is not None:
                _draw_again(arguments.page, operators)
            else:
                run_bench(arguments, operators)
            return 0
        except InvalidArgument as error:
            return _fail(2, error)
        except stop.Stopped as stopped:
            return _fail(stop.EXIT_CODE, stopped)
        except (OSError, RuntimeError) as error:
            return _fail(1, error)


def _draw_again(folder: str, operators: Sequence[Operator]) -> None:
    try:
        with stop.interruptible():
            page.draw_again(folder, operators)
    except KeyboardInterrupt:
        raise stop.Stopped("stopped while it drew; some of the pictures are new: draw the page again") from None


def _fail(exit_code: int, sentence: Exception) -> int:
    with suppress(OSError):  # stderr may be a pipe whose reader Ctrl-C has ended
        print(f"eaves.bench: {sentence}", file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
