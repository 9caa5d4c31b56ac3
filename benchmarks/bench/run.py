"""A run: finds the installed providers, measures row after row, prints each table when it is complete, and keeps the
rows in the folder of the device if one is named.

All refusals come before the first measurement.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from eaves import _command_line, _info
from eaves._command_line import say

from . import page, results, submission, tables
from .benchmark import InvalidArgument, Operator, Provider, Request, Row, reason
from .calls import PROTOCOLS
from .device import device_name, find_device
from .harness import CASE, LIMIT, Entry, Harness


class _Part(NamedTuple):
    """One operator by one protocol: the content of a result file."""

    operator: Operator
    protocol: str
    rows: Sequence[Row]
    providers: Sequence[Provider]
    """The measured ones."""

    reference: Provider
    """Whose results the others are compared with."""

    left_out: Mapping[str, str]
    """The reasons of the providers that do not load."""

    def file(self, entries: Sequence[Entry], device: torch.device) -> dict[str, object]:
        packages = [package for provider in self.providers for package in provider.packages]
        return results.result(entries, device, self.protocol, packages, self.left_out)


def run_bench(arguments: Namespace, operators: Sequence[Operator]) -> None:
    device = find_device(arguments.device)
    if arguments.threads > 0:
        torch.set_num_threads(arguments.threads)
    parts = _parts(arguments, device)
    folder = None if arguments.results is None else _folder(arguments, parts, operators, device)

    versions = f"eaves {_info.extension()['version']}, torch {torch.__version__}"
    say(f"# {device_name(device)}, {versions}, commit {_info.extension()['commit'][:12]}")
    if folder is not None:
        say(f"# {sum(len(part.rows) for part in parts)} rows, into {folder}")
    if folder is not None and arguments.submit:
        say("# self-test, in about a minute")
        results.write(folder / submission.SELF_TEST, submission.self_test())
    everything: list[Entry] = []
    for part in parts:
        say(f"# {part.operator.name}, protocol {part.protocol}\n")
        everything += _measure(arguments, part, device, folder)
        if folder is not None:
            if arguments.submit:  # before the page, so that an error of drawing loses no numbers
                submission.pack(folder, operators, arguments.submit)
                say(f"# wrote {arguments.submit}")
            page.draw(folder, operators)
        elif _is_lost():
            return
    for sentence in tables.summary(tables.tables(everything)):
        say(tables.wrapped(sentence))


def _is_lost() -> bool:
    """True if the output can show nothing any more."""
    return _command_line._failure is not None


def _measure(arguments: Namespace, part: _Part, device: torch.device, folder: Path | None) -> list[Entry]:
    """Measures and prints table after table. With a folder, writes the rows after each table, because a machine may go
    away without notice."""
    harness = Harness(device, part.protocol, arguments.repetitions)
    partial, whole = (results.file_name(part.operator.name, part.protocol, each) for each in (True, False))
    found: list[Entry] = []
    for declared in tables.tables(row.case | {"provider": "", "ms": None, "row": row} for row in part.rows):
        rows = [entry["row"] for case in declared.cases for entry in case.entries.values()]
        able = [each for each in part.providers if not all(each.lacks(row) for row in rows)]
        harness.timer.warm_up(arguments.warm_up_ms)
        measured: list[Entry] = []
        for row in rows if able else ():
            measured += harness.measure(row, able, part.reference)
            if folder is not None:
                results.write(folder / partial, part.file(found + measured, device))
        _say_tables(measured, "ms")
        found += measured
        if folder is None and _is_lost():
            return found
    _say_tables(found, "host_ms")
    _say_tables(found, "peak_mib")
    if folder is not None:
        results.write(folder / whole, part.file(found, device))
        (folder / partial).unlink(missing_ok=True)
        say(f"# wrote {folder / whole}")
    return found


def _say_tables(entries: Sequence[Entry], kind: tables.Kind) -> None:
    for table in tables.tables(entries):
        if kind == "ms" or table.names(kind):
            say(tables.text_table(table, kind))


# --------------------------------------------------------------------------------------------------------- preparations


def _parts(arguments: Namespace, device: torch.device) -> list[_Part]:
    request = Request(arguments.sweep, device.type, arguments.dtype or "bf16", arguments.dtype is not None)
    missing: dict[str, str] = {}
    parts = []
    for operator in arguments.operators:
        present = installed(operator.providers, device, missing)
        selected = [each for each in present if not arguments.provider or each.name in arguments.provider]
        if not selected:
            raise InvalidArgument(f"--provider: no installed provider of these names measures {operator.name}")
        rows = [operator.row_of_shape(arguments.shape, request.dtype)] if arguments.shape else operator.rows(request)
        if not rows:
            say(f"# --sweep {arguments.sweep} has no rows of {operator.name}")
            continue
        is_whole = device.type == "cuda" and arguments.sweep == "quick" and not arguments.shape
        for protocol in arguments.protocols:
            small = [row.captured() for row in rows if _is_small(row)] if is_whole and protocol == PROTOCOLS[0] else []
            absent = [each.name for each in operator.providers if each not in present]
            left_out = {name: missing[name] for name in absent if name in missing}
            parts.append(_Part(operator, protocol, [*rows, *small], selected, present[0], left_out))
    if not parts:
        raise InvalidArgument(f"--sweep: {arguments.sweep} has no rows of these operators; expected another sweep")
    return parts


def _is_small(row: Row) -> bool:
    """True for rows in which a CUDA graph may save time: few classes, or few bytes if an operator has no classes."""
    return row.shape["v"] <= 8192 if "v" in row.shape else row.read_bytes + row.write_bytes <= 128 * 2**20


def installed(
    providers: Iterable[Provider], device: torch.device, said: dict[str, str] | None = None
) -> list[Provider]:
    """The providers that load. A line on stderr says why another does not load, unless its name is in `said`, which
    gets the reason."""
    found, said = [], {} if said is None else said
    for provider in providers:
        try:
            if provider.needs_gpu and device.type == "cpu":
                raise RuntimeError("needs a GPU")
            provider.load()
            found.append(provider)
        except Exception as error:  # the import of another package may raise anything
            if provider.name not in said:
                print(f"# {provider.name} is left out: {reason(error)}", file=sys.stderr)
            said[provider.name] = reason(error)
    return found


def _folder(arguments: Namespace, parts: Sequence[_Part], operators: Sequence[Operator], device: torch.device) -> Path:
    """The device's folder, which may only hold files of this device. Without --replace a file may not lose numbers that
    this run does not measure again."""
    name = results.folder_name(device_name(device), device.type == "cuda")
    folder = results.check_folder("--results", Path(arguments.results, name))
    stored = results.read(folder, [operator.name for operator in operators])
    for content in stored.values():
        if content["device"] != device_name(device):
            raise InvalidArgument(
                f'--results: "{folder}" holds results of {content["device"]}, but this run is on '
                f"{device_name(device)}; expected another folder"
            )
    for part in parts if not arguments.replace else ():
        file = results.file_name(part.operator.name, part.protocol)
        providers = {LIMIT, *(provider.name for provider in part.providers)}
        again = [row.case for row in part.rows]
        lost = [entry for entry in stored.get(file, {"rows": []})["rows"] if entry["ms"] is not None
                and (entry["provider"] not in providers or {key: entry[key] for key in CASE} not in again)]  # fmt: skip
        if lost:
            last = f"{lost[-1]['provider']} at {lost[-1]['mode']} {lost[-1]['dtype']} {lost[-1]['shape']}"
            raise InvalidArgument(
                f'--results: "{folder / file}" would lose {len(lost)} numbers that this run does not measure, the last '
                f"of {last}; expected another folder or --replace"
            )
    return folder
