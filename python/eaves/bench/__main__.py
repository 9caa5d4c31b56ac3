"""`python -m eaves.bench`: reads the command line, measures table after table and prints each as it comes.

Exit codes: 0 done; 1 the device or the system failed; 2 an argument is wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

import torch

from eaves import _info
from eaves.bench import providers, results
from eaves.bench.benchmark import DTYPES, InvalidArgument, Operator, Provider, Request, Table, check_names
from eaves.bench.device import device_name, find_device
from eaves.bench.harness import Harness, HarnessOptions
from eaves.bench.operators import OPERATORS
from eaves.bench.progress import Progress
from eaves.bench.protocol import Protocol
from eaves.bench.report import Kind, MeasuredTable, has_numbers, text_table

_PROGRAM = "python -m eaves.bench"

_DESCRIPTION = """\
Measures eaves side by side with PyTorch and whatever else is installed, in one process, the implementations taking
turns. Prints the tables of the published measurements: milliseconds (speed), peak MiB with inputs and outputs counted
(memory) and, on a GPU, the milliseconds that a call keeps Python busy (host)."""

_EPILOG = f"""\
columns:
  eaves, torch, torch.compile, ...   the implementations
  limit               a plain kernel that streams the same bytes, in the same run; of linear_cross_entropy its matrix
                      products, whole, by torch.matmul; in memory: inputs and outputs alone
  eaves / limit       1.0 is as fast as the memory
  best peer / eaves   the best of the others, divided by eaves: above 1.0 eaves is faster, or takes less memory

modes:
  fwd, bwd            forward and backward by themselves
  fwd+bwd             both in one call, whose inputs are made anew for it: who can do so writes the gradient over them

protocols:
  autograd   a backward is torch.autograd.grad(out, inputs, grad_out)
  seed       it is out.backward(grad_out) and .grad is never cleared, so every call also adds its gradient to the one
             that is there; the published tables were measured so. The limit streams these bytes too: of the gradient
             two more reads and one more write

example:
  {_PROGRAM} logsumexp --dtype bf16 --max-bytes 1G --json result.json --plot plots

exit codes: 0 done; 1 the device or the system failed; 2 an argument is wrong"""


@dataclass(frozen=True)
class BenchArguments:
    """The command line."""

    operators: Sequence[str]
    providers: Sequence[str]
    device: Literal["cpu", "cuda"] | None
    sweep: Literal["quick", "seed"]
    protocol: Protocol
    dtype: str | None
    max_bytes: int
    repetitions: int
    warm_up_ms: float
    threads: int
    json: str | None
    plot: str | None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InvalidArgument(f"{message} ({_PROGRAM} --help shows what is expected)")


def parse_bytes(text: str) -> int:
    """4096, 64M, 2G."""
    shift = 10 * (1 + "KMGT".index(text[-1])) if text[-1:] in tuple("KMGT") else 0
    digits = text[:-1] if shift else text
    if not (digits.isascii() and digits.isdigit()):
        raise argparse.ArgumentTypeError(f'is "{text}", expected a number of bytes such as 4096, 64M or 2G')
    return int(digits) << shift


def parse_dtype(text: str) -> str:
    """bf16; PyTorch's bfloat16 is the same."""
    names = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}
    if text not in DTYPES and text not in names:
        raise argparse.ArgumentTypeError(f'is "{text}", expected one of: {", ".join([*DTYPES, *names])}')
    return names.get(text, text)


def parse_arguments(argv: Sequence[str] | None) -> BenchArguments:
    parser = _Parser(
        prog=_PROGRAM,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("operators", nargs="*", metavar="operator", help="what to measure; without any: every operator")
    add("--provider", action="append", default=[], metavar="NAME", help="only this one; repeat it for more")
    add("--device", choices=["cpu", "cuda"], help="without: cuda where PyTorch sees a GPU")
    add("--sweep", choices=["quick", "seed"], default="quick",
        help="quick: a few minutes; seed: the lengths of the published tables, no others")  # fmt: skip
    add("--protocol", choices=["autograd", "seed"], default="autograd", help="what a backward is, see below")
    add("--dtype", type=parse_dtype, metavar="DTYPE",
        help=f"{', '.join(DTYPES)}, or PyTorch's names of them; without: bf16, and fp32 where it differs")  # fmt: skip
    add("--max-bytes", type=parse_bytes, default=0, metavar="BYTES",
        help="leave out rows that read and write more, such as 64M or 2G")  # fmt: skip
    add("--repetitions", type=int, default=30, metavar="N", help="of each row (30); slow rows get fewer, at least 5")
    add("--warm-up-ms", type=float, default=500.0, metavar="MS", help="before each table, until clocks settle (500)")
    add("--threads", type=int, default=0, metavar="N", help="CPU threads of everybody; without: PyTorch's number")
    add("--json", metavar="FILE", help="also write the results to this file")
    add("--plot", metavar="DIR", help="also draw time and memory into PNG files in this folder; needs matplotlib")
    parsed = parser.parse_args(argv)
    for option, value, low, high in (
        ("--repetitions", parsed.repetitions, 1, 100000),
        ("--warm-up-ms", parsed.warm_up_ms, 0, 60000),
        ("--threads", parsed.threads, 0, os.cpu_count() or 1),
    ):
        if not low <= value <= high:
            raise InvalidArgument(f"{option}: is {value}, expected {low} to {high}")
    return BenchArguments(
        operators=parsed.operators,
        providers=parsed.provider,
        device=parsed.device,
        sweep=parsed.sweep,
        protocol=Protocol(parsed.protocol),
        dtype=parsed.dtype,
        max_bytes=parsed.max_bytes,
        repetitions=parsed.repetitions,
        warm_up_ms=parsed.warm_up_ms,
        threads=parsed.threads,
        json=parsed.json,
        plot=parsed.plot,
    )


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
    if arguments.plot is not None:
        from eaves.bench import plot

        plot.make_folder(arguments.plot)
    json_file = results.AtomicFile("--json", arguments.json) if arguments.json is not None else None
    try:
        measured, taking_part = _measure(arguments, chosen, device)
        if json_file is not None:
            versions = providers.versions(taking_part)
            json_file.commit(results.to_json(results.result(measured, device, arguments.protocol, versions)))
    finally:
        if json_file is not None:
            json_file.discard()
    if arguments.plot is not None:
        names = providers.known_names(operators)
        setting = plot.Setting(
            device_name(device), _info.extension()["version"], str(torch.__version__), arguments.protocol
        )
        for path in plot.draw(measured, names, setting, arguments.plot):
            print(f"# wrote {path}")


def _measure(
    arguments: BenchArguments, operators: Sequence[Operator], device: torch.device
) -> tuple[list[MeasuredTable], list[Provider]]:
    """Everything measured and printed, and the providers that took part."""
    availability = providers.Availability(device)
    installed = {operator.name: availability.installed(operator.providers) for operator in operators}
    for name, why in availability.missing.items():
        print(f"# {name} is left out: {why}", file=sys.stderr)
    options = HarnessOptions(
        device, arguments.protocol, arguments.repetitions, arguments.warm_up_ms, arguments.max_bytes
    )
    request = Request(arguments.sweep, device, arguments.dtype or "bf16", arguments.dtype is not None)
    tables = {operator.name: operator.tables(request) for operator in operators}
    _check_max_bytes(arguments, [table for each in tables.values() for table in each])
    _print_heading(device, arguments.protocol)
    harness = Harness(options)
    progress = Progress(sum(len(table.rows) for each in tables.values() for table in each))
    measured: list[MeasuredTable] = []
    taking_part: list[Provider] = []
    try:
        for operator in operators:
            present = installed[operator.name]
            selected = [each for each in present if not arguments.providers or each.name in arguments.providers]
            if not selected:
                raise InvalidArgument(f"--provider: none of those that are installed knows {operator.name}")
            taking_part += selected
            first = len(measured)
            for table in tables[operator.name]:
                able = [each for each in selected if not all(each.lacks(row) for row in table.rows)]
                if not able:
                    progress.advance(len(table.rows))
                    continue
                measured.append(MeasuredTable(table, [provider.name for provider in able]))
                harness.warm_up()
                for row in table.rows:
                    progress.show(f"{table.op} {table.mode} {table.axis_name}={row.axis_value}")
                    measured[-1].measurements.append(harness.measure(table.mode, row, able, present[0]))
                    progress.advance()
                progress.hide()
                _print_table(measured[-1], "speed")
            for kind in _LATER_KINDS:
                for done in measured[first:]:
                    if has_numbers(done, kind):
                        _print_table(done, kind)
    finally:
        progress.close()
    return measured, taking_part


def _check_max_bytes(arguments: BenchArguments, tables: Sequence[Table]) -> None:
    least = min((arguments.protocol.moved(row).total for table in tables for row in table.rows), default=0)
    if 0 < arguments.max_bytes < least:
        raise InvalidArgument(f"--max-bytes: {arguments.max_bytes} leaves out every row, expected {least} or more")


_LATER_KINDS: tuple[Kind, ...] = ("host", "memory")


def _print_heading(device: torch.device, protocol: Protocol) -> None:
    info = _info.extension()
    print(f"# {device_name(device)}, eaves {info['version']} (commit {info['commit']}), torch {torch.__version__}")
    print("# speed in ms, median; limit: plain streaming of the same bytes, or the matrix products, in the same run")
    print("# best peer / eaves: the best of the others by eaves; above 1 eaves is faster, or takes less memory")
    print("# memory in MiB: peak with inputs and outputs counted; limit: inputs and outputs alone")
    if device.type == "cuda":
        print("# host in ms: what a call costs Python when calls are enqueued back to back without waiting")
    if protocol.name == "seed":
        print("# protocol seed: every backward adds to a .grad that is never cleared; limit streams these bytes too")
    print(flush=True)


def _print_table(measured: MeasuredTable, kind: Kind) -> None:
    print(text_table(measured, kind), flush=True)


def main(argv: Sequence[str] | None = None, operators: Sequence[Operator] = OPERATORS) -> int:
    """Returns the exit code; one sentence on stderr says what was wrong."""
    try:
        run_bench(parse_arguments(argv), operators)
        return 0
    except InvalidArgument as error:
        print(f"eaves.bench: {error}", file=sys.stderr)
        return 2
    except (OSError, RuntimeError) as error:
        print(f"eaves.bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("eaves.bench: interrupted", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
