"""`python -m eaves info` describes this installation. `python -m eaves bench` times an operator beside PyTorch."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import eaves
from eaves import _command_line, _info

try:
    from eaves import _bench
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    _bench = None  # type: ignore[assignment] # eaves.jax alone


def main() -> int:
    try:
        return _main()
    except KeyboardInterrupt:
        return 130
    except (ImportError, OSError, MemoryError) as error:
        print(f"eaves: {error}", file=sys.stderr)
        return 1


def _main() -> int:
    program = "eaves" if Path(sys.argv[0]).name == "eaves" else "python -m eaves"
    parser = _command_line.Parser(prog=program, description=__doc__)
    parser.add_argument("--version", action="version", version=eaves.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="info|bench")
    info = commands.add_parser(
        "info", help="print versions, devices and backends, and name parts that do not fit together"
    )
    form = info.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON instead of text")
    form.add_argument(
        "--self-test",
        action="store_true",
        help="also compare every kernel of the CPU and of each kind of GPU with slow loops in float64, in a minute; "
        "exit code 1 if a result differs. The report is for an issue",
    )
    if _bench is not None:
        bench = commands.add_parser(
            "bench",
            help="measure an operator beside PyTorch and torch.compile, on a shape of your own",
            description="Measure an operator beside PyTorch and torch.compile, on a shape of your own.",
            epilog=_bench.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        _bench.add_arguments(bench)
    arguments = parser.parse_args()
    if arguments.command == "bench":
        if wrong := _bench.run(arguments):
            bench.error(wrong)
        _command_line.check()
        return 0
    report = _info.collect()
    _command_line.say(json.dumps(report, indent=2) if arguments.json else _info.text(report))
    differing = 0
    if arguments.self_test:
        lines, differing = _info.self_test()
        _command_line.say("\n" + lines.rstrip("\n"))
    _command_line.check()
    return 0 if report["matches"] and not differing else 1


if __name__ == "__main__":
    raise SystemExit(main())
