"""Result files read again: the tables that were measured, from the rows of a file and what the operators declare.

A file has no tables, only rows; which rows are a table, its title and its order are the operator's to say. The tables
of `--sweep seed` are the published ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from eaves.bench import result_file
from eaves.bench.benchmark import InvalidArgument, Operator, Provider, Request, Row, Table
from eaves.bench.harness import LIMIT, Measurement
from eaves.bench.protocol import Protocol
from eaves.bench.report import EAVES, MIB, MeasuredTable, title
from eaves.bench.results import file_name
from eaves.bench.timing import Column, Timing

PROTOCOLS = (Protocol("autograd"), Protocol("seed"))


@dataclass(frozen=True)
class StoredResult:
    """What a file holds."""

    path: Path
    operator: Operator
    protocol: Protocol
    head: Mapping[str, Any]
    """The file without its rows: device, commit, versions."""

    tables: Sequence[MeasuredTable]
    """The published ones first; of each the rows that the file has."""

    unknown_rows: int
    """Those that no table of the operator declares."""

    def find(self, table: Table) -> MeasuredTable | None:
        wanted = title(table, "speed")
        return next((each for each in self.tables if title(each.table, "speed") == wanted), None)


@dataclass(frozen=True)
class Gap:
    """Rows of a published table that have no time of eaves."""

    table: Table
    protocol: Protocol
    rows: Sequence[Row]
    why: str


@dataclass(frozen=True)
class Absence:
    """A provider of an operator without any number in a result file."""

    operator: Operator
    protocol: Protocol
    provider: str
    why: str
    could_be_there: bool
    """It runs on this device and has what some row asks for."""


class StoredFolder:
    """The result files of a device."""

    def __init__(self, folder: Path, operators: Sequence[Operator]) -> None:
        self.folder = folder
        self.operators = operators
        self.results: list[StoredResult] = []
        self.left_out: dict[str, str] = {}
        """Files by their names, and why they are not shown."""

        for operator in operators:
            for protocol in PROTOCOLS:
                path = folder / file_name(operator.name, protocol)
                if path.exists():
                    self._read(path, operator, protocol)

    def find(self, operator: Operator, protocol: Protocol) -> StoredResult | None:
        return next((each for each in self.results if each.operator is operator and each.protocol == protocol), None)

    @property
    def is_gpu(self) -> bool:
        return any(each.head["cuda"] is not None for each in self.results)

    def published_tables(self, operator: Operator) -> list[Table]:
        return operator.tables(Request("seed", _device(self.is_gpu), "bf16", has_dtype=False))

    def other_tables(self, operator: Operator) -> list[Table]:
        """Those that a file has beyond the published ones, each once."""
        published = {title(table, "speed") for table in self.published_tables(operator)}
        of_operator = [result for result in self.results if result.operator is operator]
        tables = {title(each.table, "speed"): each.table for result in of_operator for each in result.tables}
        return [table for name, table in tables.items() if name not in published]

    def main_tables(self, operator: Operator) -> list[Table]:
        """What the operator is summed up by: the published tables or, where none of them is measured, as on a CPU,
        what is."""
        published, others = self.published_tables(operator), self.other_tables(operator)
        if any(result.find(table) for result in self.results if result.operator is operator for table in published):
            return published
        return [table for table in others if table.is_curve and len(table.rows) > 1] or others or published

    def gaps(self) -> Iterator[Gap]:
        """Every published row has a time on the page or is in here."""
        for operator in self.operators:
            for protocol in PROTOCOLS:
                result = self.find(operator, protocol)
                for table in self.published_tables(operator):
                    if result is None:
                        yield Gap(table, protocol, table.rows, "there is no result file")
                        continue
                    measured = result.find(table)
                    reasons: dict[str, list[Row]] = {}
                    for row in table.rows:
                        why = _why_no_number(measured, row)
                        if why:
                            reasons.setdefault(why, []).append(row)
                    for why, rows in reasons.items():
                        yield Gap(table, protocol, rows, why)

    def absences(self) -> Iterator[Absence]:
        """Every known provider has a number in every file or is in here."""
        for result in self.results:
            measured = {name for table in result.tables for name in _measured_names(table)}
            for provider in result.operator.providers:
                if provider.name not in measured:
                    yield self._absence(result, provider)

    def _absence(self, result: StoredResult, provider: Provider) -> Absence:
        failures = [
            measurement.columns[provider.name].skipped
            for table in result.tables
            for measurement in table.measurements
            if provider.name in table.providers
        ]
        lacking = [provider.lacks(row) for table in result.tables for row in table.table.rows]
        could_be_there = True
        if failures:
            reasons = failures
        elif _device(self.is_gpu).type not in provider.device_types:
            reasons, could_be_there = [f"needs a {'CPU' if self.is_gpu else 'GPU'}"], False
        elif lacking and all(lacking):
            reasons, could_be_there = lacking, False
        else:
            reasons = ["was not installed, or was left out: the file has no row of it"]
        why = "; ".join(dict.fromkeys(reasons))
        return Absence(result.operator, result.protocol, provider.name, why, could_be_there)

    def _read(self, path: Path, operator: Operator, protocol: Protocol) -> None:
        # What an operator declares is asked for outside of this: its errors are no file's.
        try:
            result = result_file.parse(path.read_bytes())
            if result["protocol"] == protocol.name:
                result_file.check(result)
        except ValueError as error:
            raise InvalidArgument(f'"{path}" is no result file of this program: {error}') from error
        if result["protocol"] != protocol.name:
            self.left_out[path.name] = f"its protocol is {result['protocol']}"
        else:
            self.results.append(_stored(path, operator, protocol, result))


def _measured_names(measured: MeasuredTable) -> Iterator[str]:
    for measurement in measured.measurements:
        yield from (name for name, column in measurement.columns.items() if column.timing is not None)


def _device(is_gpu: bool) -> torch.device:
    """Its kind says which sizes an operator declares; it need not be there."""
    return torch.device("cuda" if is_gpu else "cpu")


def _why_no_number(measured: MeasuredTable | None, row: Row) -> str:
    """Nothing where eaves has a time."""
    if measured is not None:
        for known, measurement in zip(measured.table.rows, measured.measurements):
            if _case(known.shape, known.options) == _case(row.shape, row.options):
                column = measurement.columns.get(EAVES, Column("eaves was not measured"))
                return column.skipped
    return "the file has no such row"


def _case(shape: Mapping[str, int], options: Mapping[str, Any]) -> str:
    return json.dumps([shape, options], sort_keys=True)


_Cells = dict[str, Column]


def _stored(path: Path, operator: Operator, protocol: Protocol, result: Mapping[str, Any]) -> StoredResult:
    # By mode, dtype and case, the providers in the order of their columns.
    found: dict[tuple[str, str, str], _Cells] = {}
    for entry in result["rows"]:
        key = (entry["mode"], entry["dtype"], _case(entry["shape"], entry["options"]))
        # A case of two tables stands twice in a file: the first is the one that is shown, in both.
        found.setdefault(key, {}).setdefault(entry["provider"], _column(entry))
    tables = []
    used = set()
    for table in _declared_tables(operator, result):
        rows, cells = [], []
        for row in table.rows:
            key = (table.mode, table.dtype, _case(row.shape, row.options))
            if key in found:
                rows.append(row)
                cells.append(found[key])
                used.add(key)
        if rows:
            providers = [name for name in dict.fromkeys(name for each in cells for name in each) if name != LIMIT]
            measurements = [_measurement(providers, each) for each in cells]
            tables.append(MeasuredTable(replace(table, rows=rows), providers, measurements))
    head = {key: value for key, value in result.items() if key != "rows"}
    unknown = sum(len(cells) for key, cells in found.items() if key not in used)
    return StoredResult(path, operator, protocol, {"cuda": None} | head, tables, unknown)


def _declared_tables(operator: Operator, result: Mapping[str, Any]) -> list[Table]:
    """The published ones first, then those of the default sweep, then both of other dtypes."""
    device = _device(result["cuda"] is not None)
    requests = [Request("seed", device, "bf16", False), Request("quick", device, "bf16", False)]
    for dtype in dict.fromkeys(entry["dtype"] for entry in result["rows"]):
        requests += [Request("seed", device, dtype, True), Request("quick", device, dtype, True)]
    tables: dict[str, Table] = {}
    for request in requests:
        for table in operator.tables(request):
            tables.setdefault(title(table, "speed"), table)
    return list(tables.values())


def _column(entry: Mapping[str, Any]) -> Column:
    if entry["ms"] is None:
        return Column(entry["skipped"])
    timing = Timing(entry["ms"], entry["ms_min"], entry["ms_max"], entry["repetitions"])
    peak_mib = entry.get("peak_mib")
    return Column("", timing, entry.get("host_ms"), None if peak_mib is None else round(peak_mib * MIB))


def _measurement(providers: Sequence[str], cells: _Cells) -> Measurement:
    columns = {name: cells.get(name, Column("not measured")) for name in [*providers, LIMIT]}
    reasons = {column.skipped for column in columns.values()}
    # What left out the whole row is the same reason in all of its columns.
    is_skipped = len(reasons) == 1 and all(column.timing is None for column in columns.values())
    return Measurement(columns, reasons.pop() if is_skipped else "")
