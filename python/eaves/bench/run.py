"""A run: finds out what is asked for and who is installed, measures table after table, prints each as it comes and
writes what was measured, into the files that are named or into the folder of the device.

Whatever can be refused is refused before anything is measured.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from eaves import _info
from eaves.bench import page, providers, published, results, stop
from eaves.bench.arguments import BenchArguments
from eaves.bench.benchmark import InvalidArgument, Operator, Provider, Request, Table, check_names
from eaves.bench.device import busy_share, device_name, find_device
from eaves.bench.harness import LIMIT, Harness, HarnessOptions
from eaves.bench.progress import Progress
from eaves.bench.protocol import Protocol
from eaves.bench.report import Kind, MeasuredTable, count_measured_rows, has_numbers, marks_legend, text_table
from eaves.bench.stored import StoredFolder, case_of


@dataclass(frozen=True)
class _Part:
    """One operator by one protocol: what a file of the device's folder holds."""

    operator: Operator
    protocol: Protocol
    tables: Sequence[Table]
    providers: Sequence[Provider]
    """Those that are measured."""

    reference: Provider
    """With whose results theirs are compared."""


@dataclass(frozen=True)
class _MeasuredPart:
    part: _Part
    tables: Sequence[MeasuredTable]
    is_stopped: bool
    """Rows are missing: the run was stopped in this part."""


def run_bench(arguments: BenchArguments, operators: Sequence[Operator]) -> None:
    by_name = {operator.name: operator for operator in operators}
    check_names("there is no operator", arguments.operators, by_name)
    chosen = [by_name[name] for name in dict.fromkeys(arguments.operators or by_name)]
    check_names("--provider: there is no provider", arguments.providers, providers.known_names(chosen))
    device = find_device(arguments.device)
    if device.type == "cuda" and not (info := _info.extension())["gpus"]:
        raise InvalidArgument(f"--device: eaves cannot use the GPU, expected cpu: {' '.join(info['missing'])}")
    if arguments.threads > 0:
        torch.set_num_threads(arguments.threads)
    if arguments.results is None:
        _run_into_files(arguments, chosen, operators, device)
    else:
        _run_into_folder(arguments, chosen, operators, device, Path(arguments.results))


def _run_into_files(
    arguments: BenchArguments, chosen: Sequence[Operator], operators: Sequence[Operator], device: torch.device
) -> None:
    """--json and --plot, where they are given: all tables of one protocol."""
    if arguments.plot is not None:
        from eaves.bench import plot

        results.make_folder("--plot", arguments.plot)
    (protocol,) = arguments.protocols
    with results.AtomicFile("--json", arguments.json) if arguments.json is not None else nullcontext() as json_file:
        parts = list(_measure(arguments, _parts(arguments, chosen, device), device))
        measured = [table for each in parts for table in each.tables]
        is_stopped = any(each.is_stopped for each in parts)
        rows = count_measured_rows(measured)
        if json_file is not None and (rows > 0 or not is_stopped):
            versions = providers.versions(provider for each in parts for provider in each.part.providers)
            json_file.commit(results.to_json(results.result(measured, device, protocol, versions, is_stopped)))
    if is_stopped:
        raise _stopped(rows, "above, and in no file without --json" if json_file is None else f"in {json_file.path}")
    if arguments.plot is not None:
        setting = plot.Setting(device_name(device), _info.extension()["version"], str(torch.__version__), protocol)
        for path in plot.draw(measured, providers.known_names(operators), setting, arguments.plot):
            print(f"# wrote {path}")


def _run_into_folder(
    arguments: BenchArguments,
    chosen: Sequence[Operator],
    operators: Sequence[Operator],
    device: torch.device,
    root: Path,
) -> None:
    """A result file as soon as its operator and protocol are measured, then its curves and the page of all files."""
    folder = root / results.folder_name(device_name(device), device.type == "cuda")
    results.make_folder("--results", str(folder))
    with results.AtomicFile("--results", str(folder / page.NAME)):
        pass  # it can be written
    stored = page.check(folder, operators)
    _check_device(stored, device_name(device))
    parts = _parts(arguments, chosen, device)
    if not arguments.replace:
        for part in parts:
            _check_replaced(stored, part, arguments.max_bytes)
    page.make_picture_folders("--results", folder, arguments.protocols)
    rows, is_stopped = 0, False
    for each in _measure(arguments, parts, device):
        part, measured_rows = each.part, count_measured_rows(each.tables)
        rows += measured_rows
        path = folder / results.file_name(part.operator.name, part.protocol, each.is_stopped)
        if measured_rows > 0 or not each.is_stopped:
            versions = providers.versions(part.providers)
            result = results.result(each.tables, device, part.protocol, versions, each.is_stopped)
            with results.AtomicFile("--results", str(path)) as file:
                file.commit(results.to_json(result))
            _say(f"# wrote {path}")
        if not each.is_stopped:
            page.draw(folder, operators, [path])
        is_stopped = each.is_stopped
    if is_stopped:
        raise _stopped(rows, f"in {folder}")
    page.say_who_shows_it(folder)


def _stopped(rows: int, place: str) -> stop.Stopped:
    if rows == 0:
        return stop.Stopped("stopped before a row was measured; nothing is written")
    return stop.Stopped(f"stopped; what was measured, {rows} row{'s' if rows > 1 else ''}, is {place}")


def _check_device(stored: StoredFolder, device: str) -> None:
    others = [other for other in stored.devices if other != device]
    if others:
        raise InvalidArgument(
            f'--results: "{stored.folder}" holds results of {", ".join(others)}, but this run is on {device}, '
            f"expected another folder"
        )


def _check_replaced(stored: StoredFolder, part: _Part, max_bytes: int) -> None:
    """A file may not lose numbers that this run does not measure again."""
    path = stored.folder / results.file_name(part.operator.name, part.protocol)
    result = stored.find(part.operator, part.protocol)
    losses = [f"what is left out of the page ({stored.left_out[path.name]})"] if path.name in stored.left_out else []
    if result is not None:
        known = {LIMIT, *(provider.name for provider in part.providers)}
        names = dict.fromkeys(name for names in result.measured.values() for name in names if name not in known)
        measured_again = {
            case_of(table, row)
            for table in part.tables
            for row in table.rows
            if not 0 < max_bytes < part.protocol.moved(row).total
        }
        rows = [case for case, names in result.measured.items() if names and case not in measured_again]
        losses += [f"the numbers of {', '.join(names)}"] if names else []
        if rows:
            last = f"{rows[-1].mode} {rows[-1].dtype} {rows[-1].words}"
            losses.append(f"{len(rows)} row{'s' if len(rows) > 1 else ''}, the last {last}")
    if losses:
        raise InvalidArgument(
            f'--results: "{path}" would lose {" and ".join(losses)}, which this run does not measure, '
            f"expected another folder or --replace"
        )


def _parts(arguments: BenchArguments, operators: Sequence[Operator], device: torch.device) -> list[_Part]:
    """What is to be measured, operator by operator."""
    availability = providers.Availability(device)
    request = Request(arguments.sweep, device, arguments.dtype or "bf16", arguments.dtype is not None)
    parts = []
    for operator in operators:
        present = availability.installed(operator.providers)
        selected = [each for each in present if not arguments.providers or each.name in arguments.providers]
        if not selected:
            raise InvalidArgument(f"--provider: none of those that are installed knows {operator.name}")
        tables = operator.tables(request)
        parts += [_Part(operator, protocol, tables, selected, present[0]) for protocol in arguments.protocols]
    for name, why in availability.missing.items():
        print(f"# {name} is left out: {why}", file=sys.stderr)
    _check_max_bytes(arguments, parts)
    return parts


def _check_max_bytes(arguments: BenchArguments, parts: Sequence[_Part]) -> None:
    moved = (part.protocol.moved(row).total for part in parts for table in part.tables for row in table.rows)
    least = min(moved, default=0)
    if 0 < arguments.max_bytes < least:
        raise InvalidArgument(f"--max-bytes: {arguments.max_bytes} leaves out every row, expected {least} or more")


_LATER_KINDS: tuple[Kind, ...] = ("host", "memory")


def _measure(arguments: BenchArguments, parts: Sequence[_Part], device: torch.device) -> Iterator[_MeasuredPart]:
    """Part after part, measured and printed, to the last or to the one in which the run is stopped."""
    progress = Progress(sum(len(table.rows) for part in parts for table in part.tables))
    harness, protocol = None, None
    run: list[MeasuredTable] = []
    if device.type == "cpu":
        _say_if_busy()
    try:
        for part in parts:
            if harness is None or part.protocol != protocol:
                protocol = part.protocol
                _print_heading(device, protocol, [table for each in parts for table in each.tables])
                harness = Harness(
                    HarnessOptions(device, protocol, arguments.repetitions, arguments.warm_up_ms, arguments.max_bytes)
                )
            first = len(run)
            is_stopped = not _measure_part(part, harness, progress, run)
            for kind in _LATER_KINDS:
                for table in run[first:]:
                    if has_numbers(table, kind):
                        _say(text_table(table, kind))
            yield _MeasuredPart(part, run[first:], is_stopped)
            if is_stopped:
                break
    finally:
        progress.close()
    if legend := marks_legend(run):
        _say(legend)


def _measure_part(part: _Part, harness: Harness, progress: Progress, run: list[MeasuredTable]) -> bool:
    """Table after table, onto the end of `run`, the speed printed at once; False where the run is stopped."""
    for table in part.tables:
        able = [each for each in part.providers if not all(each.lacks(row) for row in table.rows)]
        if not able:
            progress.advance(len(table.rows))
            continue
        measured = MeasuredTable(table, [provider.name for provider in able])
        is_complete = _measure_table(measured, able, part.reference, harness, progress)
        progress.hide()
        if measured.measurements:
            run.append(measured)
            _say(text_table(measured, "speed", run))
        if not is_complete:
            return False
    return True


def _measure_table(
    measured: MeasuredTable, able: Sequence[Provider], reference: Provider, harness: Harness, progress: Progress
) -> bool:
    """Row after row; False where the run is stopped before the last."""
    table = measured.table
    try:
        with stop.interruptible():
            harness.warm_up()
        for row in table.rows:
            progress.show(f"{table.op} {table.mode} {table.axis_name}={row.axis_value}")
            with stop.interruptible():
                measurement = harness.measure(table.mode, row, able, reference)
            measured.measurements.append(measurement)
            progress.advance()
    except KeyboardInterrupt:
        return False
    return True


_BUSY = 0.25  # half of one of two cores


def _say_if_busy() -> None:
    share = busy_share()
    if share >= _BUSY:
        words = "of its cores' time; expect longer times than on a quiet one"
        _say(f"# the machine is busy: others take {100 * share:.0f} % {words}")


def _print_heading(device: torch.device, protocol: Protocol, tables: Sequence[Table]) -> None:
    info = _info.extension()
    print(f"# {device_name(device)}, eaves {info['version']} (commit {info['commit']}), torch {torch.__version__}")
    print("# speed in ms, median; limit: plain streaming of the same bytes, or the matrix products, in the same run")
    print("# best peer / eaves: the best of the others by eaves; above 1 eaves is faster, or takes less memory")
    print("# memory in MiB: peak with inputs and outputs counted; limit: inputs and outputs alone")
    if device.type == "cuda":
        print("# host in ms: what a call costs Python when calls are enqueued back to back without waiting")
    if protocol.name == "seed":
        print("# protocol seed: every backward adds to a .grad that is never cleared; limit streams these bytes too")
    if protocol.name == "seed" or any(table.title_op for table in tables):
        print(textwrap.indent(published.TEXT, "# "))
    print(flush=True)


def _say(text: str) -> None:
    """Prints. Ctrl-C also ends the reader of a pipe: then the text is lost, and the run goes on to write its files."""
    try:
        print(text, flush=True)
    except OSError:
        if not stop.is_wanted():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that Python does not fail again when it ends
