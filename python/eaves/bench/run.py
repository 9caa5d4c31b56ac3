"""A run: finds the providers that are installed, measures table after table, prints each as it comes and writes what
was measured, into the files that are named or into the folder of the device.

What can be refused is refused before anything is measured.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from eaves import _info
from eaves._output import is_lost, say
from eaves.bench import page, results, stop, tables
from eaves.bench.benchmark import InvalidArgument, Operator, Provider, Request, Row, reason
from eaves.bench.calls import moved
from eaves.bench.device import busy_share, device_name, find_device
from eaves.bench.harness import CASE, LIMIT, Entry, Harness

_BUSY = 0.25  # half of one of two cores
_PATIENCE_S = 12.0  # of --shape: what is not compiled by then is left out


class _Part(NamedTuple):
    """One operator by one protocol: what a file of the device's folder holds."""

    operator: Operator
    protocol: str
    rows: Sequence[Row]
    providers: Sequence[Provider]
    """Those that are measured."""

    reference: Provider
    """With whose results theirs are compared."""

    before: Sequence[Entry] = ()
    """Lines of rows that were measured before, by the same programs."""


def run_bench(arguments: Namespace, operators: Sequence[Operator]) -> None:
    device = find_device(arguments.device)
    if device.type == "cuda" and not (info := _info.extension())["gpus"]:
        raise InvalidArgument(f"--device: eaves cannot use the GPU, expected cpu: {' '.join(info['missing'])}")
    if arguments.threads > 0:
        torch.set_num_threads(arguments.threads)
    parts = _parts(arguments, device)
    if arguments.shape is not None:
        _run_shape(arguments, parts[0], device)
    elif arguments.results is None:
        _run_into_files(arguments, parts, device)
    else:
        _run_into_folder(arguments, parts, operators, device)


def _parts(arguments: Namespace, device: torch.device) -> list[_Part]:
    """What is to be measured, operator by operator."""
    request = Request(arguments.sweep, device.type, arguments.dtype or "bf16", arguments.dtype is not None)
    missing: set[str] = set()
    parts = []
    for operator in arguments.operators:
        present = installed(operator.providers, device, missing)
        selected = [each for each in present if not arguments.provider or each.name in arguments.provider]
        if not selected:
            raise InvalidArgument(f"--provider: none of those that are installed knows {operator.name}")
        rows = [operator.row_of_shape(arguments.shape, request.dtype)] if arguments.shape else operator.rows(request)
        if not rows:
            say(f"# --sweep {arguments.sweep} has no rows of {operator.name}")
            continue
        parts += [_Part(operator, protocol, rows, selected, present[0]) for protocol in arguments.protocols]
    if not parts:
        raise InvalidArgument(f"--sweep: {arguments.sweep} has no rows of what is named, expected another sweep")
    if not arguments.max_bytes:
        return parts
    bytes_of = [sum(moved(part.protocol, row)) for part in parts for row in part.rows]
    left_out = sum(each > arguments.max_bytes for each in bytes_of)
    if left_out == len(bytes_of):
        raise InvalidArgument(
            f"--max-bytes: {arguments.max_bytes} leaves out every row, expected {min(bytes_of)} or more"
        )
    say(f"# --max-bytes leaves out {left_out} of {len(bytes_of)} rows")
    kept = [[row for row in part.rows if sum(moved(part.protocol, row)) <= arguments.max_bytes] for part in parts]
    return [part._replace(rows=rows) for part, rows in zip(parts, kept) if rows]


def installed(providers: Iterable[Provider], device: torch.device, said: set[str] | None = None) -> list[Provider]:
    """Those that load; of each other one line on stderr, but for those whose names are in `said` already."""
    found, said = [], set() if said is None else said
    for provider in providers:
        try:
            if provider.needs_gpu and device.type == "cpu":
                raise RuntimeError("needs a GPU")
            provider.load()
            found.append(provider)
        except Exception as error:  # whatever an import of another package may raise
            if provider.name not in said:
                print(tables.wrapped(f"# {provider.name} is left out: {reason(error)}", "#   "), file=sys.stderr)
            said.add(provider.name)
    return found


# ------------------------------------------------------------------------------------------------------------ measuring


def _measure(
    arguments: Namespace,
    parts: Sequence[_Part],
    device: torch.device,
    keep: Callable[[_Part, list[Entry]], None] | None = None,
) -> Iterator[tuple[_Part, list[Entry], bool]]:
    """Part after part, measured and printed, to the last or to the one in which the run is stopped; whether it is. A
    run that writes no file also ends if its tables cannot be shown. `keep` gets the entries of a part after each of
    its tables."""
    writes_files = any(each is not None for each in (arguments.json, arguments.plot, arguments.results))
    _print_heading(device)
    everything: list[Entry] = []
    is_stopped, done, all_rows = False, 0, sum(len(part.rows) for part in parts)
    for part in parts:
        say(f"# {part.operator.name}, protocol {part.protocol}\n")
        harness = Harness(device, part.protocol, arguments.repetitions)
        found: list[Entry] = []
        # Each table by itself, so that it is printed as soon as it is measured.
        for declared in tables.tables(row.case | {"provider": "", "ms": None, "row": row} for row in part.rows):
            rows = [entry["row"] for case in declared.cases for entry in case.entries.values()]
            able = [each for each in part.providers if not all(each.lacks(row) for row in rows)]
            measured: list[Entry] = []
            before = [_lines_before(part, row, able) for row in rows]
            try:
                if not all(before):
                    with stop.interruptible():
                        harness.timer.warm_up(arguments.warm_up_ms)
                for row, entries in zip(rows, before) if able else ():
                    _show_progress(f"{done} of {all_rows} rows, {row.op} {row.mode} {list(row.shape.values())}")
                    if not entries:
                        with stop.interruptible():
                            entries = harness.measure(row, able, part.reference)
                    measured += entries
                    done += 1
            except KeyboardInterrupt:
                is_stopped = True
            _show_progress("")
            found += measured
            _say_tables(measured, "ms")
            left = [entry for entry in part.before if entry not in found]
            if is_stopped:
                found += left
                break
            if keep is not None:
                keep(part, found + left)
            if is_lost() and not writes_files:
                return
        _say_tables(found, "host_ms")
        _say_tables(found, "peak_mib")
        everything += found
        yield part, found, is_stopped
        if is_stopped:
            break
    for sentence in tables.summary(tables.tables(everything)):
        say(tables.wrapped(sentence))
    for table, case in tables.slow(tables.tables(everything)):
        row = f"{table.op}, {tables.MODES[table.mode]}, {case.words}"
        say(tables.wrapped(f"slow, the limit at less than half its rate elsewhere: {row}"))


def _lines_before(part: _Part, row: Row, able: Sequence[Provider]) -> list[Entry]:
    """Those of this row, where every provider has one."""
    found = [entry for entry in part.before if {key: entry[key] for key in CASE} == row.case]
    return found if {entry["provider"] for entry in found} == {LIMIT, *(each.name for each in able)} else []


def _say_tables(entries: Sequence[Entry], kind: tables.Kind) -> None:
    for table in tables.tables(entries):
        if kind == "ms" or table.names(kind):
            say(tables.text_table(table, kind))


def _show_progress(text: str) -> None:
    """On a terminal, in a line that the next text overwrites."""
    if sys.stderr.isatty():
        print(f"\r{text[: tables.WIDTH - 1]:<{tables.WIDTH - 1}}", end="\r", file=sys.stderr, flush=True)


def _print_heading(device: torch.device) -> None:
    if device.type == "cpu" and (share := busy_share()) >= _BUSY:
        words = f"# the machine is busy: others take {100 * share:.0f} % of its cores' time; expect longer times"
        say(tables.wrapped(f"{words} than on a quiet one", "# "))
    info = _info.extension()
    versions = f"eaves {info['version']} (commit {info['commit'][:12]}), torch {torch.__version__}"
    say(tables.wrapped(f"# {device_name(device)}, {versions}", "# "))


# -------------------------------------------------------------------------------------------------------------- writing


def _run_shape(arguments: Namespace, part: _Part, device: torch.device) -> None:
    """One row in one table, and in the file of --json."""
    path = results.check_file("--json", arguments.json) if arguments.json is not None else None
    _print_heading(device)
    harness = Harness(device, part.protocol, min(arguments.repetitions, 10), _PATIENCE_S)
    (row,) = part.rows
    try:
        with stop.interruptible():
            harness.timer.warm_up(min(arguments.warm_up_ms, 200))
            measured = harness.measure(row, part.providers, part.reference)
    except KeyboardInterrupt:
        raise _stopped(0, "") from None
    if path is not None:
        results.write(path, results.result(measured, device, part.protocol, _packages([part])))
    (table,) = tables.tables(measured)
    (case,) = table.cases
    say(tables.wrapped(f"{part.operator.name}, {tables.MODES[row.mode]}: {case.words}") + "\n")
    say(tables.aligned(tables.shape_table(case)) + "\n")
    for note in tables.notes(table, "ms"):
        say(tables.wrapped(note))
    for sentence in tables.summary([table]):
        say(tables.wrapped(sentence))


def _run_into_files(arguments: Namespace, parts: Sequence[_Part], device: torch.device) -> None:
    """--json and --plot, where they are given: all tables of one protocol."""
    path = results.check_file("--json", arguments.json) if arguments.json is not None else None
    if arguments.plot is not None:
        folder = results.check_folder("--plot", arguments.plot)
        from eaves.bench import plot
    measured = list(_measure(arguments, parts, device))
    entries = [entry for _, found, _ in measured for entry in found]
    is_stopped = any(stopped for *_, stopped in measured)
    rows, protocol = _count_rows(entries), parts[0].protocol
    if path is not None and (rows > 0 or not is_stopped):
        results.write(path, results.result(entries, device, protocol, _packages(parts), is_stopped))
    if is_stopped:
        raise _stopped(rows, "above, and in no file without --json" if path is None else f"in {path}")
    if arguments.plot is not None:
        where = f"{device_name(device)}, eaves {_info.extension()['version']}, torch {torch.__version__}"
        for part in parts:
            of_operator = tables.tables(entry for entry in entries if entry["op"] == part.operator.name)
            for picture in plot.draw(folder, part.operator.name, protocol, of_operator, where):
                say(f"# wrote {picture}")


def _run_into_folder(
    arguments: Namespace, parts: Sequence[_Part], operators: Sequence[Operator], device: torch.device
) -> None:
    """A result file as soon as its operator and protocol are measured, then its curves and the pages of all files."""
    name = results.folder_name(device_name(device), device.type == "cuda")
    folder = results.check_folder("--results", str(Path(arguments.results, name)))
    stored = page.Folder(folder, operators)
    for content in stored.files.values():
        if content["device"] != device_name(device):
            raise InvalidArgument(
                f'--results: "{folder}" holds results of {content["device"]}, but this run is on '
                f"{device_name(device)}, expected another folder"
            )
    for part in parts if not arguments.replace else ():
        _check_replaced(stored, part)
    if arguments.resume:
        parts = [part._replace(before=_measured_before(part, folder, device)) for part in parts]

    say(f"# {sum(len(part.rows) for part in parts)} rows, into {folder}")

    def keep(part: _Part, found: list[Entry]) -> None:
        """A machine that goes away says nothing before."""
        path = folder / results.file_name(part.operator.name, part.protocol, True)
        results.write(path, results.result(found, device, part.protocol, _packages([part]), True))

    rows = 0
    for part, found, is_stopped in _measure(arguments, parts, device, keep):
        rows += (measured := _count_rows(found))
        path = folder / results.file_name(part.operator.name, part.protocol, is_stopped)
        if measured > 0 or not is_stopped:
            results.write(path, results.result(found, device, part.protocol, _packages([part]), is_stopped))
            say(f"# wrote {path}")
        if is_stopped:
            raise _stopped(rows, f"in {folder}")
        path.with_suffix(".stopped.json").unlink(missing_ok=True)
        page.draw(folder, operators, [path.name])


def _measured_before(part: _Part, folder: Path, device: torch.device) -> list[Entry]:
    """What runs of the same programs have left of this part, in a whole file or in that of a stopped run."""
    name, stopped = (results.file_name(part.operator.name, part.protocol, each) for each in (False, True))
    return results.rows_before([folder / name, folder / stopped], device, part.protocol, _packages([part]))


def _check_replaced(stored: page.Folder, part: _Part) -> None:
    """A file may not lose numbers that this run does not measure again."""
    name = results.file_name(part.operator.name, part.protocol)
    providers = {LIMIT, *(provider.name for provider in part.providers)}
    again = [row.case for row in part.rows]
    lost = [entry for entry in stored.files.get(name, {"rows": []})["rows"] if entry["ms"] is not None
            and (entry["provider"] not in providers or {key: entry[key] for key in CASE} not in again)]  # fmt: skip
    if lost:
        last = f"{lost[-1]['provider']} at {lost[-1]['mode']} {lost[-1]['dtype']} {lost[-1]['shape']}"
        raise InvalidArgument(
            f'--results: "{stored.path / name}" would lose {len(lost)} numbers, the last of {last}, which this run '
            "does not measure, expected another folder or --replace"
        )


def _packages(parts: Sequence[_Part]) -> list[str]:
    return [package for part in parts for provider in part.providers for package in provider.packages]


def _count_rows(entries: Sequence[Entry]) -> int:
    """Those with a number."""
    return len({json.dumps([entry[key] for key in CASE]) for entry in entries if entry["ms"] is not None})


def _stopped(rows: int, place: str) -> stop.Stopped:
    if rows == 0:
        return stop.Stopped("stopped before a row was measured; nothing is written")
    return stop.Stopped(f"stopped; what was measured, {rows} row{'s' if rows > 1 else ''}, is {place}")
