"""The first tables of a page: for each operator and mode how far its rows are from the limit and from the best peer,
and the times of the longest and of the shortest row.

The second stands between two markers, because README.md of the repository shows it too (tools/check_docs).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from eaves.bench.benchmark import Operator, Row, Table
from eaves.bench.harness import LIMIT, Measurement
from eaves.bench.protocol import Protocol
from eaves.bench.report import (
    EAVES,
    EAVES_TO_LIMIT,
    PEER_TO_EAVES,
    MeasuredTable,
    best_peer,
    is_peer,
    number,
    ratios_of,
    title,
    values_of,
)
from eaves.bench.stored import PROTOCOLS, StoredFolder

RANGES = "Summary"
ENDS = "The longest and the shortest rows"

_ENDS_PROTOCOL = PROTOCOLS[0]


def anchor(heading: str) -> str:
    """GitHub's, of a heading without Markdown."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@dataclass(frozen=True)
class _Cell:
    """A row and its ratios."""

    table: Table
    row: Row
    values: dict[str, float | None]
    ratios: dict[str, float | None]


def _cells(measured: MeasuredTable) -> list[_Cell]:
    ratios = ratios_of(measured.providers, "speed")

    def cell(row: Row, measurement: Measurement) -> _Cell:
        values = values_of(measured, "speed", measurement)
        return _Cell(measured.table, row, values, {head: ratio(values) for head, ratio in ratios.items()})

    return [cell(row, measurement) for row, measurement in zip(measured.table.rows, measured.measurements)]


@dataclass(frozen=True)
class _Group:
    """The main tables of an operator that have one mode and one name in their titles."""

    operator: Operator
    label: str
    mode: str
    tables: Sequence[Table]


def _groups(stored: StoredFolder) -> Iterator[_Group]:
    for operator in stored.operators:
        tables = stored.main_tables(operator)
        names = list(dict.fromkeys(table.title_op or table.op for table in tables))
        for name in names:
            of_name = [table for table in tables if (table.title_op or table.op) == name]
            for mode in dict.fromkeys(table.mode for table in of_name):
                label = name if len(names) > 1 else operator.name
                yield _Group(operator, label, mode, [table for table in of_name if table.mode == mode])


def _measured(stored: StoredFolder, operator: Operator, protocol: Protocol, tables: Sequence[Table]) -> list[_Cell]:
    result = stored.find(operator, protocol)
    found = [measured for table in tables if result and (measured := result.find(table))]
    return [cell for each in found for cell in _cells(each) if cell.values.get(EAVES) is not None]


# --------------------------------------------------------------------------------------------------------------- ranges


def ranges(stored: StoredFolder) -> list[str]:
    """One line for each group and protocol."""
    lines = [
        f"## {RANGES}",
        "",
        "Times of the published rows or, of an operator that has none here, of the others: the least and the greatest",
        "ratio, and in brackets the worst row.",
        "",
        "| operator | mode | protocol | rows | lengths | eaves / limit | best peer / eaves |",
        "|---|---|---|---:|---|---|---|",
    ]
    for group in _groups(stored):
        for protocol in PROTOCOLS:
            cells = _measured(stored, group.operator, protocol, group.tables)
            if not cells:
                lines.append(
                    f"| {group.label} | {group.mode} | {protocol.name} | 0 | [not measured](#not-measured) | - | - |"
                )
                continue
            lengths = [cell.row.axis_value for cell in cells]
            words = [group.label, group.mode, protocol.name, str(len(cells))]
            words.append(f"{cells[0].table.axis_name} {min(lengths)} to {max(lengths)}")
            words += [_range(cells, EAVES_TO_LIMIT, max), _range(cells, PEER_TO_EAVES, min)]
            lines.append(f"| {' | '.join(words)} |")
    return [*lines, ""]


def _range(cells: Sequence[_Cell], head: str, worst_of: Callable[..., _Cell]) -> str:
    known = [(cell, ratio) for cell in cells if (ratio := cell.ratios.get(head)) is not None]
    if not known:
        return "-"
    numbers = [ratio for _, ratio in known]
    worst: _Cell = worst_of((cell for cell, _ in known), key=lambda cell: cell.ratios[head])
    suffixes = list(dict.fromkeys(cell.table.title_suffix for cell in cells))
    part = _own_part(worst.table.title_suffix, suffixes)
    name = f"{worst.table.axis_name} {worst.row.axis_value}" + (f" of {part}" if part else "")
    link = f"[{name}](#{anchor(title(worst.table, 'speed'))})"
    return f"{number(min(numbers), 3)} to {number(max(numbers), 3)} ({link})"


def _own_part(suffix: str, suffixes: Sequence[str]) -> str:
    """The words that others do not begin or end with: act_none of batch12-act_none-bf16; nothing where none differs."""
    words = [each.split("-") for each in suffixes]
    own = suffix.split("-")
    for place in (0, -1):
        while all(len(each) > 1 and each[place] == own[place] for each in words):
            for each in (*words, own):
                each.pop(place)
    return "-".join(own) if len(suffixes) > 1 else ""


# ----------------------------------------------------------------------------------------------------------------- ends


def ends(stored: StoredFolder) -> list[str]:
    """Of the first table of each group the rows of the greatest and of the least length."""
    lines = [
        "| operator | mode | shape | eaves ms | limit ms | eaves / limit | best peer | best peer / eaves |",
        "|---|---|---|---:|---:|---:|---|---:|",
    ]
    for group in _groups(stored):
        cells = _measured(stored, group.operator, _ENDS_PROTOCOL, group.tables[:1])
        if cells:
            longest, shortest = (pick(cells, key=lambda cell: cell.row.axis_value) for pick in (max, min))
            lines.append(_end(group, longest))
            lines += [_end(group, shortest)] if shortest is not longest else []
    words = f"Protocol {_ENDS_PROTOCOL.name}, of each operator's first table:"
    lines += _absent_peers(stored)
    return [f"## {ENDS}", "", words, "", "<!-- summary -->", *lines, "<!-- end -->", ""]


def _absent_peers(stored: StoredFolder) -> list[str]:
    """One line: of each operator those that could stand in its rows and have no number."""
    names: dict[str, list[str]] = {}
    for each in stored.absences():
        if each.protocol == _ENDS_PROTOCOL and each.could_be_there and is_peer(each.provider):
            names.setdefault(each.operator.name, []).append(each.provider)
    of_operators = "; ".join(f"{_joined(providers)} in {operator}" for operator, providers in names.items())
    return ["", f"Not measured: {of_operators}."] if names else []


def _joined(words: Sequence[str]) -> str:
    """a, b and c"""
    return " and ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)


def _end(group: _Group, cell: _Cell) -> str:
    shape = {**cell.row.shape, **cell.row.options}
    peer = best_peer(cell.values)
    words = [group.label, group.mode, ", ".join(f"{key} {value}" for key, value in shape.items())]
    words += [number(cell.values.get(EAVES), 4, "-"), number(cell.values.get(LIMIT), 4, "-")]
    words += [number(cell.ratios.get(EAVES_TO_LIMIT), 3, "-")]
    words += [f"{peer} {number(cell.values[peer], 4)}" if peer else "-"]
    words += [number(cell.ratios.get(PEER_TO_EAVES), 3, "-")]
    return f"| {' | '.join(words)} |"
