"""Results in one file, so that a user can send them: the self-test and the result files of a device's folder, by their
names. `python benchmarks --submit` writes the file, `python benchmarks page` writes the folder again. Nothing is sent.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from eaves import _info

from . import results
from .benchmark import PROGRAM, InvalidArgument, Operator

SELF_TEST = "self_test.txt"


def self_test() -> str:
    """The report of `python -m eaves info --self-test`. Refuses to measure kernels that compute wrong results."""
    lines, differing = _info.self_test()
    if differing:
        raise RuntimeError(
            f"--submit: {differing} lines of the self-test differ, so nothing is measured; "
            "`python -m eaves info --self-test` prints them for an issue"
        )
    return f"{_info.text(_info.collect())}\n\n{lines.rstrip()}\n"


def pack(folder: Path, operators: Sequence[Operator], path: Path) -> None:
    """Writes the folder's result files of this build and its self-test into one file."""
    found = results.read(folder, [operator.name for operator in operators])
    names = [name for name, content in found.items() if content["commit"] == _info.extension()["commit"]]
    files = {name: json.loads((folder / name).read_bytes()) for name in names}
    results.write(path, {"submission": 1, "files": {SELF_TEST: (folder / SELF_TEST).read_text(), **files}})


def unpack(path: Path, into: str | Path, operators: Sequence[Operator]) -> Path:
    """Writes the files into the folder of their device below `into`. Returns this folder. A folder that holds other
    results is refused, because a page has one machine and one build."""
    names = results.file_names(operator.name for operator in operators)
    try:
        files = json.loads(path.read_bytes())["files"]
        report = files.pop(SELF_TEST)
        if not isinstance(report, str) or not files or not files.keys() <= {*names}:
            raise ValueError(f"it holds {', '.join([SELF_TEST, *files])}")
        report.encode()
        texts = {name: results.text_of(content) for name, content in files.items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else error
        raise InvalidArgument(f'"{path}" was not written by {PROGRAM} --submit: {why}') from error
    found = results.checked({name: text.encode() for name, text in texts.items()}, path)
    if len({content["commit"] for content in found.values()}) > 1:
        raise InvalidArgument(f'"{path}" holds results of several commits, expected the results of one build')
    head = next(iter(found.values()))
    folder = Path(into, results.folder_name(head["device"], head["cuda"] is not None))
    stored = results.read(results.check_folder("--results", folder), [operator.name for operator in operators])
    if any(found.get(name) != content for name, content in stored.items()):
        raise InvalidArgument(f'--results: "{folder}" holds other results, expected another folder')
    for name, text in {SELF_TEST: report, **texts}.items():
        results.write(folder / name, text)
    return folder
