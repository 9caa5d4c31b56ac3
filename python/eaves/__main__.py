"""`python -m eaves info`: what this installation is and can do. `python -m eaves bench`: its operators, measured."""

from __future__ import annotations

import argparse
import json
import sys

from eaves import _info, _output


class _Parser(argparse.ArgumentParser):
    def print_help(self, file: object = None) -> None:
        _output.say(self.format_help().rstrip())


def main() -> int:
    if sys.argv[1:2] == ["bench"]:
        from eaves.bench.__main__ import main as bench

        return bench(sys.argv[2:])
    parser = _Parser(prog="python -m eaves", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="info|bench")
    info = commands.add_parser("info", help="versions, devices, backends, and what does not fit together")
    info.add_argument("--json", action="store_true", help="print JSON instead of text")
    commands.add_parser("bench", help="measures eaves side by side with other libraries; bench --help says how")
    arguments = parser.parse_args()
    report = _info.collect()
    _output.say(json.dumps(report, indent=2) if arguments.json else _info.text(report))
    try:
        _output.check()
    except OSError as error:
        print(f"eaves: {error}", file=sys.stderr)
        return 1
    return 0 if report["matches"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
