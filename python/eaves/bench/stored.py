"""Result files read again: the tables that were measured, from the rows of a file and what the operators declare.

A file has no tables, only rows; which rows are a table, its title and its order are the operator's to say. The tables
of `--sweep seed` are the published ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from eaves.bench import result_file
from eaves.bench.benchmark import InvalidArgument, Operator, Provider, Request, Row, Table
from eaves.bench.harness import LIMIT, Measurement
from eaves.bench.protocol import Protocol
from eaves.bench.report import EAVES, MIB, MeasuredTable, title
from eaves.bench.results import file_name, folder_name, without_threads
from eaves.bench.timing import Column, Timing

_STOPPED = "the run was stopped"

PROTOCOLS = (Protocol("autograd"), Protocol("seed"))


class Case(NamedTuple):
    """What a row of a file and a row of a table have in common."""

    mode: str
    dtype: str
    values: str
    """Shape and options, as JSON."""

    @property
    def words(self) -> str:
        shape, options = json.loads(self.values)
        return ", ".join(f"{key} {value}" for key, value in (shape | options).items())


def case_of(table: Table, row: Row) -> Case:
    return Case(table.mode, table.dtype, _values(row.shape, row.options))


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

    measured: Mapping[Case, Sequence[str]]
    """Of each row the providers that have a number."""

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
                stopped = folder / file_name(operator.name, protocol, is_stopped=True)
                if stopped.exists():
                    self.left_out[stopped.name] = _STOPPED
        self.devices = list(dict.fromkeys(result.head["device"] for result in self.results))
        """Of all files, also of those that are left out below."""

        self._leave_out_other_devices()
        self.kernel_files = list(self._find_kernel_files())
        """The names of those that the C++ program wrote on this device."""

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

    def _leave_out_other_devices(self) -> None:
        """The folder is that of the device whose name it has or, where none has, of whose files are the most."""
        if len(self.devices) < 2:
            return

        def belongs(device: str) -> tuple[bool, int]:
            of_device = [result for result in self.results if result.head["device"] == device]
            is_gpu = of_device[0].head["cuda"] is not None
            return folder_name(device, is_gpu) == self.folder.resolve().name, len(of_device)

        own = max(self.devices, key=belongs)
        for result in self.results:
            if result.head["device"] != own:
                self.left_out[result.path.name] = f"its device is {result.head['device']}, the others' {own}"
        self.results = [result for result in self.results if result.head["device"] == own]

    def _find_kernel_files(self) -> Iterator[str]:
        own = {without_threads(result.head["device"]) for result in self.results}  # C++ has threads of its own
        for path in sorted(self.folder.glob("*.json")):
            content = path.read_bytes()
            if b'"protocol": "kernel"' not in content or path.name in self.left_out:
                continue
            try:
                result = result_file.parse(content)
            except ValueError as error:
                self.left_out[path.name] = f"{error}"
                continue
            device = str(result.get("device"))
            if result.get("stopped"):
                self.left_out[path.name] = _STOPPED
            elif own and without_threads(device) not in own:
                self.left_out[path.name] = f"its device is {device}, the others' {self.results[0].head['device']}"
            else:
                yield path.name

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
        elif result.get("stopped"):
            self.left_out[path.name] = _STOPPED
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
            if _values(known.shape, known.options) == _values(row.shape, row.options):
                column = measurement.columns.get(EAVES, Column("eaves was not measured"))
                return column.skipped
    return "the file has no such row"


def _values(shape: Mapping[str, int], options: Mapping[str, Any]) -> str:
    return json.dumps([shape, options], sort_keys=True)


_Cells = dict[str, Column]


def _stored(path: Path, operator: Operator, protocol: Protocol, result: Mapping[str, Any]) -> StoredResult:
    # The providers in the order of their columns.
    found: dict[Case, _Cells] = {}
    for entry in result["rows"]:
        key = Case(entry["mode"], entry["dtype"], _values(entry["shape"], entry["options"]))
        # A case of two tables stands twice in a file: the first is the one that is shown, in both.
        found.setdefault(key, {}).setdefault(entry["provider"], _column(entry))
    tables = []
    used = set()
    for table in _declared_tables(operator, result):
        rows, cells = [], []
        for row in table.rows:
            key = case_of(table, row)
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
    measured = {
        key: [name for name, column in cells.items() if column.timing is not None] for key, cells in found.items()
    }
    return StoredResult(path, operator, protocol, {"cuda": None} | head, tables, unknown, measured)


def _declared_tables(operator: Operator, result: Mapping[str, Any]) -> list[Table]:
    """The published ones first, then those of the default sweep, then both of other dtypes."""
    device = _device(result.get("cuda") is not None)
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
