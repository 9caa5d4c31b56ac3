"""`python -m eaves info`: what this installation is and can do. (The benchmark is `python -m eaves.bench`.)"""

from __future__ import annotations

import argparse
import json

from eaves import _info


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m eaves", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="info")
    info = commands.add_parser("info", help="versions, devices, backends, and what does not fit together")
    info.add_argument("--json", action="store_true", help="print JSON instead of text")
    arguments = parser.parse_args()
    report = _info.collect()
    print(json.dumps(report, indent=2) if arguments.json else _info.text(report))
    return 0 if report["matches"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
