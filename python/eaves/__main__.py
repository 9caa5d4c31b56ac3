"""`python -m eaves info`: what this installation is and can do. `python -m eaves bench`: its operators, measured."""

from __future__ import annotations

import json
import sys

from eaves import _info, _output


def main() -> int:
    if sys.argv[1:2] == ["bench"]:
        from eaves.bench.__main__ import main as bench

        return bench(sys.argv[2:])
    try:
        return _main()
    except OSError as error:
        print(f"eaves: {error}", file=sys.stderr)
        return 1


def _main() -> int:
    parser = _output.Parser(prog="python -m eaves", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="info|bench")
    info = commands.add_parser("info", help="versions, devices, backends, and what does not fit together")
    info.add_argument("--json", action="store_true", help="print JSON instead of text")
    commands.add_parser("bench", help="measures eaves side by side with other libraries; bench --help says how")
    arguments = parser.parse_args()
    report = _info.collect()
    _output.say(json.dumps(report, indent=2) if arguments.json else _info.text(report))
    _output.check()
    return 0 if report["matches"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
