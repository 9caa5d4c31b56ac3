"""The page of a device: every table of every result file in its folder, both protocols side by side, as Markdown.

It is drawn from the files alone, so that it can be drawn again anywhere and is the same each time. What is on it is in
`stored.py` and `report.py`, its first tables in `summary.py` and `slower.py`; here is how it is laid out.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from eaves.bench import providers, published, results, slower, summary
from eaves.bench.benchmark import InvalidArgument, Operator, Table
from eaves.bench.harness import Measurement
from eaves.bench.protocol import Protocol
from eaves.bench.report import (
    PEER_TO_EAVES,
    Kind,
    MeasuredTable,
    best_peer,
    column_names,
    describe,
    has_numbers,
    number,
    picture_name,
    ratios_of,
    title,
    unsteady,
    values_of,
)
from eaves.bench.stored import PROTOCOLS, StoredFolder, StoredResult

NAME = "README.md"
_WRITER = "tools/check_docs"

_KINDS: tuple[Kind, ...] = ("speed", "memory")
_UNITS: dict[Kind, str] = {"speed": "ms", "memory": "MiB"}

_ABOUT = """\
Every number is from one process, the implementations taking turns, each with cold caches: the median of the times in
milliseconds (speed), and the peak in MiB with inputs and outputs counted (memory). Before it is timed, what each one
computes is compared with what eaves computes.

- `limit` is a plain kernel that streams the same bytes, in the same run; where an operator multiplies matrices, these
  products, whole. In memory it is the inputs and outputs alone. `eaves / limit` is 1 at the limit.
- `best peer / eaves` is the best of the others by eaves: above 1 eaves is faster, or takes less memory.
- Times are unsteady whose median is more than twice the fastest: the machine was busy with something else.
- Protocol `autograd`: a backward is `torch.autograd.grad(out, inputs, grad_out)`.
- Protocol `seed`: it is `out.backward(grad_out)`, and `.grad` is never cleared, so that every call also adds its
  gradient to the one that is there, and the limit streams these bytes too."""


def draw_again(folder: str, operators: Sequence[Operator]) -> None:
    """Page and curves of a folder, from its result files."""
    stored = check(Path(folder), operators)
    if not stored.results:
        raise InvalidArgument(f'--page: "{folder}" has no result file, expected such as {_example(operators)}')
    make_picture_folders("--page", Path(folder), [result.protocol for result in stored.results])
    draw(Path(folder), operators, [result.path for result in stored.results])
    say_who_shows_it(Path(folder))


def check(folder: Path, operators: Sequence[Operator]) -> StoredFolder:
    """Reads what is there, so that a file that cannot be shown is refused before anything is measured or written."""
    stored = StoredFolder(folder, operators)
    for name, why in stored.left_out.items():
        print(f"# {name} is left out: {why}", file=sys.stderr)
    try:
        from eaves.bench import plot  # noqa: F401
    except InvalidArgument as error:  # without matplotlib there is a page all the same
        print(f"# no curves are drawn: {str(error).removeprefix('--plot: ')}", file=sys.stderr)
    return stored


def make_picture_folders(argument: str, folder: Path, protocols: Iterable[Protocol]) -> None:
    """Before minutes of measuring, so that one that cannot be made is known at once."""
    for protocol in protocols:
        results.make_folder(argument, str(folder / _picture_folder(protocol)))


def draw(folder: Path, operators: Sequence[Operator], paths: Sequence[Path]) -> None:
    """The curves of these result files, into folders that are there, then the page of all."""
    stored = StoredFolder(folder, operators)
    for result in stored.results:
        if result.path in paths:
            _draw_curves(result, operators)
    with results.AtomicFile("--page", str(folder / NAME)) as file:
        file.commit(text(stored))
    print(f"# wrote {file.path}")


def say_who_shows_it(folder: Path) -> None:
    """Where the folder is one of the repository, and README.md shows its page, a tool has to write it there."""
    root = folder.resolve().parents[min(2, len(folder.resolve().parents) - 1)]
    try:
        shown = (root / NAME).read_text(encoding="utf-8")
        is_shown = f"<!-- page: {folder.resolve().relative_to(root).as_posix()} " in shown
    except (OSError, ValueError):
        return
    if is_shown and (root / _WRITER).is_file():
        print(f"# {NAME} of the repository shows this page: {_WRITER} --write brings it up to date")


def _draw_curves(result: StoredResult, operators: Sequence[Operator]) -> None:
    try:
        from eaves.bench import plot
    except InvalidArgument:  # which check() has said
        return
    folder = result.path.parent / _picture_folder(result.protocol)
    versions = result.head["versions"]
    setting = plot.Setting(result.head["device"], versions["eaves"], versions["torch"], result.protocol)
    for path in plot.draw(result.tables, providers.known_names(operators), setting, str(folder)):
        print(f"# wrote {path}")


def _picture_folder(protocol: Protocol) -> str:
    return "plots" if protocol.name == "autograd" else f"plots/{protocol.name}"


def _example(operators: Sequence[Operator]) -> str:
    return results.file_name(operators[0].name, PROTOCOLS[0])


# ----------------------------------------------------------------------------------------------------------------- text


def text(stored: StoredFolder) -> str:
    lines = [f"# {_devices(stored)}: eaves beside its peers", ""]
    lines += ["Drawn by `python -m eaves.bench --page`, from the result files in this folder.", ""]
    lines += [*_contents(stored), "", *_files(stored), "", published.TEXT, "", _ABOUT, "", _how(stored), ""]
    lines += summary.ranges(stored)
    lines += summary.ends(stored)
    lines += slower.section(stored)
    for operator in stored.operators:
        published_lines = _tables(stored, operator, stored.published_tables(operator))
        other_lines = _tables(stored, operator, stored.other_tables(operator))
        if published_lines or other_lines:
            lines += [f"## {operator.name}", ""]
            lines += published_lines or ["None of the published rows is measured here.", ""]
        if other_lines:
            lines += [f"## {_more(operator)}", "", *other_lines]
    lines += _not_measured(stored)
    return "\n".join(lines).rstrip("\n") + "\n"


def _devices(stored: StoredFolder) -> str:
    return ", ".join(dict.fromkeys(result.head["device"] for result in stored.results))


def _more(operator: Operator) -> str:
    return f"More of {operator.name}"


def _contents(stored: StoredFolder) -> list[str]:
    lines = [f"- {_link(heading)}" for heading in (summary.RANGES, summary.ENDS, slower.HEADING, slower.AS_GOOD)]
    for operator in stored.operators:
        if any(result.operator is operator for result in stored.results):
            more = f", {_link(_more(operator))}" if stored.other_tables(operator) else ""
            lines.append(f"- {_link(operator.name)}{more}")
    return lines + [f"- {_link(_NOT_MEASURED)}"]


def _link(heading: str) -> str:
    return f"[{heading}](#{summary.anchor(heading)})"


def _files(stored: StoredFolder) -> list[str]:
    """What was measured where, when, and beside which versions."""
    lines = ["| measured | device | commit | date | versions |", "|---|---|---|---|---|"]
    for result in stored.results:
        head = result.head
        device = [head["device"]]
        device += [f"CUDA {head['cuda']}, driver {head['driver']}"] if head["cuda"] is not None else [head["cpu_level"]]
        versions = ", ".join(f"{name} {version}" for name, version in head["versions"].items())
        measured = f"[{result.operator.name}, {result.protocol.name}]({result.path.name})"
        commit = re.sub(r"^([0-9a-f]{12})[0-9a-f]*", r"\1", head["commit"])
        cells = [
            measured,
            ", ".join(device),
            f"`{commit}`",
            head["date"].replace("T", " ").replace("Z", " UTC"),
            versions,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _how(stored: StoredFolder) -> str:
    """A folder elsewhere has no documents of the repository above it."""
    is_committed = stored.folder.resolve().parts[-3:-1] == ("benchmarks", "results")
    place = "docs/performance.md"
    where = f"[{place}](../../../{place}#side-by-side-with-pytorch)" if is_committed else place
    links = ", ".join(f"[{name}]({name})" for name in stored.kernel_files)
    return f"How it is measured: {where}." + (f" From C++, without peers: {links}." if links else "")


def _tables(stored: StoredFolder, operator: Operator, tables: Sequence[Table]) -> list[str]:
    return [line for table in tables for kind in _KINDS for line in _both_protocols(stored, operator, table, kind)]


def _both_protocols(stored: StoredFolder, operator: Operator, table: Table, kind: Kind) -> Iterator[str]:
    """One table, once for each protocol, and the curves of both."""
    found = []
    for protocol in PROTOCOLS:
        result = stored.find(operator, protocol)
        measured = result.find(table) if result is not None else None
        if measured is not None and has_numbers(measured, kind):
            found.append((protocol, measured))
    if not found:
        return
    yield from (f"### {title(table, kind)}:", "")
    pictures = []
    for protocol, measured in found:
        yield from (f"Protocol {protocol.name}, {_UNITS[kind]}:", "", *markdown_table(measured, kind), "")
        yield from _notes(operator, measured, kind)
        picture = f"{_picture_folder(protocol)}/{picture_name(table, kind)}"
        if measured.table.is_curve and (stored.folder / picture).exists():
            words = f"{title(table, kind)}, protocol {protocol.name}"
            pictures.append(f'<a href="{picture}"><img src="{picture}" alt="{words}" width="49%"></a>')
    if pictures:
        yield from (*pictures, "")


def markdown_table(measured: MeasuredTable, kind: Kind) -> list[str]:
    """The columns of the printed table and, named, the best peer."""
    table = measured.table
    ratios = ratios_of(measured.providers, kind)
    descriptions = [describe(table, row) for row in table.rows]
    heads = [table.axis_name, *(["row"] if any(descriptions) else []), *column_names(measured, kind)]
    for head in ratios:
        heads += ["best peer", head] if head == PEER_TO_EAVES else [head]
    marks = ["---" if head in ("row", "best peer") else "---:" for head in heads]
    lines = [f"| {' | '.join(heads)} |", f"|{'|'.join(marks)}|"]
    for row, description, measurement in zip(table.rows, descriptions, measured.measurements):
        values = values_of(measured, kind, measurement)
        cells = [str(row.axis_value), *([description] if any(descriptions) else [])]
        cells += [number(value, 6, "-") for value in values.values()]
        for head, ratio in ratios.items():
            cells += [best_peer(values) or "-"] if head == PEER_TO_EAVES else []
            cells.append(number(ratio(values), 3, "-"))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _notes(operator: Operator, measured: MeasuredTable, kind: Kind) -> list[str]:
    """Why there is no number or no column, each reason once, and which times are those of a busy machine."""
    table = measured.table
    reasons: dict[str, list[str]] = {}
    for row, measurement in zip(table.rows, measured.measurements):
        place = " ".join(part for part in (f"{table.axis_name}={row.axis_value}", describe(table, row)) if part)
        for why in _reasons(measurement):
            reasons.setdefault(f"`-`: {why}", []).append(place)
        if kind == "speed" and (is_unsteady := unsteady(measurement)):
            reasons.setdefault(is_unsteady, []).append(place)
    lines = [
        f"- {why}" + ("" if len(places) == len(table.rows) else f" ({'; '.join(places)})")
        for why, places in reasons.items()
    ]
    for provider in operator.providers:
        lacking = list(dict.fromkeys(provider.lacks(row) for row in table.rows))
        if provider.name not in measured.providers and all(lacking):
            lines.append(f"- no column: {provider.name}: {', '.join(map(_code, lacking))}")
    return [*lines, ""] if lines else []


def _reasons(measurement: Measurement) -> list[str]:
    if measurement.skipped:
        return [_code(measurement.skipped)]
    return [f"{name}: {_code(column.skipped)}" for name, column in measurement.columns.items() if column.skipped]


def _code(words: str) -> str:
    """Somebody else's message, in which nothing shall be Markdown."""
    return f"`{words.replace('`', chr(39))}`"


_NOT_MEASURED = "Not measured"


def _not_measured(stored: StoredFolder) -> list[str]:
    """Providers without a number, published rows without a time of eaves, and files and rows that are not shown."""
    lines = [f"## {_NOT_MEASURED}", ""]
    absent: dict[tuple[str, str, str], list[str]] = {}
    for each in stored.absences():
        absent.setdefault((each.operator.name, each.protocol.name, each.why), []).append(each.provider)
    for (operator, protocol, why), names in absent.items():
        lines.append(f"- {operator}, protocol {protocol}, no number of {', '.join(names)}: {_code(why)}")
    for gap in stored.gaps():
        titles = ", ".join(title(gap.table, kind) for kind in _KINDS)
        lengths = ", ".join(str(row.axis_value) for row in gap.rows)
        lines.append(f"- {titles}, protocol {gap.protocol.name}, {gap.table.axis_name} {lengths}: {_code(gap.why)}")
    for why in dict.fromkeys(stored.left_out.values()):
        names = [name for name, reason in stored.left_out.items() if reason == why]
        lines.append(f"- {', '.join(names)} {'is' if len(names) == 1 else 'are'} not shown: {why}")
    for result in stored.results:
        if result.unknown_rows:
            lines.append(f"- {result.path.name}: {result.unknown_rows} numbers of rows that the program no longer has")
    if not any(stored.gaps()):
        lines += [""] if len(lines) > 2 else []
        lines.append("Every row of the published tables is above, by both protocols.")
    return lines
