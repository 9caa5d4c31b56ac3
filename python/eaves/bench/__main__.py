"""`python -m eaves.bench`: does what the command line says, and says in one sentence what was wrong.

Exit codes: 0 done; 1 the device or the system failed; 2 an argument is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from eaves.bench import page
from eaves.bench.arguments import parse_arguments
from eaves.bench.benchmark import InvalidArgument, Operator
from eaves.bench.operators import OPERATORS
from eaves.bench.run import run_bench


def main(argv: Sequence[str] | None = None, operators: Sequence[Operator] = OPERATORS) -> int:
    """Returns the exit code; one sentence on stderr says what was wrong."""
    try:
        arguments = parse_arguments(argv)
        if arguments.page is not None:
            page.draw_again(arguments.page, operators)
        else:
            run_bench(arguments, operators)
        return 0
    except InvalidArgument as error:
        print(f"eaves.bench: {error}", file=sys.stderr)
        return 2
    except (OSError, RuntimeError) as error:
        print(f"eaves.bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("eaves.bench: interrupted", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
