"""The tables, in the layout of the published measurements: a title, column heads, one row per length with an index
before it. eaves' column is the first, then its peers, the limit, and two ratios. Formatting only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from eaves.bench.benchmark import Row, Table
from eaves.bench.harness import LIMIT, Measurement
from eaves.bench.timing import USUAL_FACTOR, Column, Timing

Kind = Literal["speed", "memory", "host"]

EAVES = "eaves"
MIB = 1024.0 * 1024.0


@dataclass
class MeasuredTable:
    """A table and what was measured of it, row by row."""

    table: Table
    providers: Sequence[str]
    """The names of the columns, in order, without `limit`."""

    measurements: list[Measurement] = field(default_factory=list)


def value_of(kind: Kind, column: Column) -> float | None:
    """The number of a cell: milliseconds, MiB."""
    if kind == "speed":
        return column.timing.median_ms if column.timing else None
    if kind == "host":
        return column.host_ms
    return column.peak_bytes / MIB if column.peak_bytes is not None else None


def count_measured_rows(tables: Iterable[MeasuredTable]) -> int:
    """Those that were not left out."""
    return sum(not measurement.skipped for table in tables for measurement in table.measurements)


def has_numbers(measured: MeasuredTable, kind: Kind) -> bool:
    """Of at least one provider in one row."""
    return any(
        value_of(kind, measurement.columns[name]) is not None
        for measurement in measured.measurements
        for name in measured.providers
    )


def title(table: Table, kind: Kind) -> str:
    return f"{table.title_op or table.op}-{kind}-{table.mode}-{table.title_suffix}"


def picture_name(table: Table, kind: Kind) -> str:
    """Of the file that has the curves: the title, without a plus, which some places allow in no file's name."""
    return f"{title(table, kind).replace('+', '-')}.png"


def column_names(measured: MeasuredTable, kind: Kind) -> list[str]:
    """Whose numbers a table shows, in order. Nobody enqueues the limit from Python for its own sake, so it has no
    column among the costs of the host."""
    return [*measured.providers] if kind == "host" else [*measured.providers, LIMIT]


Values = dict[str, "float | None"]
"""What stands in a row, by the names of the columns."""


def values_of(measured: MeasuredTable, kind: Kind, measurement: Measurement) -> Values:
    return {name: value_of(kind, measurement.columns[name]) for name in column_names(measured, kind)}


def is_peer(name: str) -> bool:
    """Whether this is one of the others: eaves-memory is eaves too."""
    return name.split("-")[0] != EAVES and name != LIMIT


def best_peer(values: Values) -> str | None:
    """Who of the others has the least."""
    numbers = {name: value for name, value in values.items() if is_peer(name) and value is not None}
    return min(numbers, key=lambda name: numbers[name], default=None)


def text_table(measured: MeasuredTable, kind: Kind, run: Sequence[MeasuredTable] = ()) -> str:
    """Title, heads and rows, each ended by a newline. Rows that a busy machine slowed down are marked, by what the
    limits of the run so far have reached."""
    table = measured.table
    ratios = ratios_of(measured.providers, kind)
    lines = [[table.axis_name, *column_names(measured, kind), *ratios]]
    notes = [""]
    for row, measurement in zip(table.rows, measured.measurements):
        line = [f"{row.axis_value}.0"]
        note = [describe(table, row)]
        if measurement.skipped:
            note.append(measurement.skipped)
        else:
            values = values_of(measured, kind, measurement)
            line += [number(value, 6) for value in values.values()]
            line += [number(ratio(values), 3) for ratio in ratios.values()]
            note += [f"{name}: {column.skipped}" for name, column in measurement.columns.items() if column.skipped]
            if kind == "speed":
                is_slow = _is_slow(table, row, measurement, run)
                note.append(_fastest("slow", measurement, lambda _: True) if is_slow else unsteady(measurement))
        lines.append(line)
        notes.append("; ".join(part for part in note if part))
    return f"{title(table, kind)}:\n{_aligned(lines, notes)}"


EAVES_TO_LIMIT = "eaves / limit"
PEER_TO_EAVES = "best peer / eaves"


def ratios_of(providers: Sequence[str], kind: Kind) -> dict[str, Callable[[Values], float | None]]:
    """Head and arithmetic of the last columns."""
    ratios: dict[str, Callable[[Values], float | None]] = {}
    if EAVES not in providers:
        return ratios
    if kind != "host":
        ratios[EAVES_TO_LIMIT] = lambda values: quotient(values[EAVES], values[LIMIT])
    if any(map(is_peer, providers)):
        ratios[PEER_TO_EAVES] = lambda values: quotient(values.get(best_peer(values) or ""), values[EAVES])
    return ratios


def quotient(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None


def number(value: float | None, digits: int, no_number: str = "NaN") -> str:
    return no_number if value is None else f"{value:.{digits}f}"


def describe(table: Table, row: Row) -> str:
    """Tables whose rows differ in more than the axis name the rest: "batch=16 dim=1024 axes=[1]". What is the same
    option in every row belongs to the title."""
    if table.is_curve:
        return ""

    def is_in_every_row(key: str) -> bool:
        return all(key in any_row.options and any_row.options[key] == row.options[key] for any_row in table.rows)

    shape = [f"{key}={value}" for key, value in row.shape.items() if key != table.axis_name]
    return " ".join(shape + [f"{key}={value}" for key, value in row.options.items() if not is_in_every_row(key)])


def unsteady(measurement: Measurement) -> str:
    """Whose times are those of a busy machine, with the fastest of each."""
    return _fastest("unsteady", measurement, lambda timing: timing.is_unsteady)


def _fastest(mark: str, measurement: Measurement, is_meant: Callable[[Timing], bool]) -> str:
    timings = {name: column.timing for name, column in measurement.columns.items() if column.timing}
    fastest = ", ".join(f"{name} {timing.min_ms:.3f}" for name, timing in timings.items() if is_meant(timing))
    return f"{mark}, fastest {fastest}" if fastest else ""


_COMPARED_MS = 1.0
"""Shorter limits fit between two slices of the scheduler, and depend on their size."""


def _limit_rate(measurement: Measurement) -> float:
    """Bytes or operations in a millisecond of the fastest repetition; 0 where it is not compared."""
    timing = measurement.columns[LIMIT].timing
    return measurement.limit_work / timing.min_ms if timing and timing.min_ms >= _COMPARED_MS else 0.0


def _is_slow(table: Table, row: Row, measurement: Measurement, run: Sequence[MeasuredTable]) -> bool:
    """Where not even the fastest repetition found a quiet moment: the limit is at less than half of what it has
    reached elsewhere in the run so far, where the same thing limits it, memory or products of one dtype."""

    def limited_by(table: Table, row: Row) -> str:
        return table.dtype if row.flops else "memory"

    rates = (
        _limit_rate(other)
        for each in run
        for other_row, other in zip(each.table.rows, each.measurements)
        if limited_by(each.table, other_row) == limited_by(table, row)
    )
    return 0 < USUAL_FACTOR * _limit_rate(measurement) < max(rates, default=0)


def marks_legend(run: Sequence[MeasuredTable]) -> str:
    """What the marks in the printed tables of a run mean; nothing where there is none."""
    unsteady_rows = slow_rows = 0
    for count, measured in enumerate(run, 1):
        for row, measurement in zip(measured.table.rows, measured.measurements):
            is_slow = _is_slow(measured.table, row, measurement, run[:count])  # as when the table was printed
            slow_rows += is_slow
            unsteady_rows += not is_slow and unsteady(measurement) != ""
    if slow_rows + unsteady_rows == 0:
        return ""
    return f"""\
# rows of a busy machine: {unsteady_rows} unsteady (the median is more than twice the fastest repetition), \
{slow_rows} slow
# (even in the fastest the limit was less than half as fast as elsewhere in the run until then)"""


def _aligned(lines: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """Columns right-aligned and two spaces apart, after a left-aligned index; the note of a row at its end."""
    widths = [max(len(line[i]) for line in lines if i < len(line)) for i in range(len(lines[0]))]
    index_width = len(str(max(len(lines) - 2, 0)))
    text = ""
    for number, (line, note) in enumerate(zip(lines, notes)):
        index = "" if number == 0 else str(number - 1)
        cells = "".join(f"  {cell:>{width}}" for cell, width in zip(line, widths))
        text += f"{index:<{index_width}}{cells}{'  ' + note if note else ''}\n"
    return text
