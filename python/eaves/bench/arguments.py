"""The command line of `python -m eaves.bench`: what may be asked for, and what contradicts itself."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

from eaves.bench import published
from eaves.bench.benchmark import DTYPES, InvalidArgument
from eaves.bench.protocol import Protocol

_PROGRAM = "python -m eaves.bench"

RESULTS = "benchmarks/results"

_DESCRIPTION = f"""\
Measures eaves side by side with PyTorch and whatever else is installed, in one process, the implementations taking
turns. Prints tables in the form of the published ones: milliseconds (speed), peak MiB with inputs and outputs counted
(memory) and, on a GPU, the milliseconds that a call keeps Python busy (host).

{published.TEXT}

Without the name of an operator everything is measured, by both protocols, and kept in a folder with a page of all
tables. With names only these are, by one protocol, and what is kept is what --json and --plot name."""

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
             that is there. The limit streams these bytes too: of the gradient two more reads and one more write

results, without an operator or with --results:
  {RESULTS}/<device>/, such as nvidia-h200 or amd-epyc, in the folder where the program is called:
  <operator>_<protocol>.json   what was measured; replaced as soon as that operator is measured by that protocol, and
                               refused before where it would lose rows or providers, unless --replace is given
  plots/, plots/seed/          the curves, by protocol; they need matplotlib
  README.md                    the page: every table of every result file that is there, and what is missing

examples:
  {_PROGRAM} logsumexp --dtype bf16 --max-bytes 1G --json result.json --plot plots
  {_PROGRAM} --sweep seed --results build/results
  {_PROGRAM} lrpe_cosine --protocol seed --results build/results
  {_PROGRAM} --page {RESULTS}/nvidia-h200

a run that is stopped (Ctrl-C, SIGTERM, SIGHUP):
  What it has measured is written, without curves and page, and one sentence says where. In a folder that is
  <operator>_<protocol>.stopped.json, which no page shows. A second signal ends the run at once

exit codes: 0 done; 1 the device or the system failed; 2 an argument is wrong; 130 the run was stopped"""


@dataclass(frozen=True)
class BenchArguments:
    """The command line."""

    operators: Sequence[str]
    providers: Sequence[str]
    device: Literal["cpu", "cuda"] | None
    sweep: Literal["quick", "seed"]
    protocols: Sequence[Protocol]
    dtype: str | None
    max_bytes: int
    repetitions: int
    warm_up_ms: float
    threads: int
    json: str | None
    plot: str | None
    results: str | None
    """Where the folders of the devices are; None: no folder is written."""

    replace: bool
    """Result files may lose rows and providers that are not measured again."""

    page: str | None
    """The folder that is drawn again; None: something is measured."""


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
    add("operators", nargs="*", metavar="operator", help="what to measure; without any: everything, into a folder")
    add("--provider", action="append", default=[], metavar="NAME", help="only this one; repeat it for more")
    add("--device", choices=["cpu", "cuda"], help="without: cuda where PyTorch sees a GPU")
    add("--sweep", choices=["quick", "seed"], default="quick",
        help="quick: lengths that suit the device; seed: the rows of the published tables, no others")  # fmt: skip
    add("--protocol", choices=["autograd", "seed"],
        help="what a backward is, see below; without: autograd, and both where a folder is written")  # fmt: skip
    add("--dtype", type=parse_dtype, metavar="DTYPE",
        help=f"{', '.join(DTYPES)}, or PyTorch's names of them; without: bf16, and fp32 where it differs")  # fmt: skip
    add("--max-bytes", type=parse_bytes, default=0, metavar="BYTES",
        help="leave out rows that read and write more, such as 64M or 2G")  # fmt: skip
    add("--repetitions", type=int, default=30, metavar="N", help="of each row (30); slow rows get fewer, at least 5")
    add("--warm-up-ms", type=float, default=500.0, metavar="MS", help="before each table, until clocks settle (500)")
    add("--threads", type=int, default=0, metavar="N", help="CPU threads of everybody; without: PyTorch's number")
    add("--json", metavar="FILE", help="also write the results to this file")
    add("--plot", metavar="DIR", help="also draw time and memory into PNG files in this folder; needs matplotlib")
    add("--results", metavar="DIR",
        help=f"keep results and page in the device's folder below this one; without operators: {RESULTS}")  # fmt: skip
    add("--replace", action="store_true",
        help="let result files there lose rows and providers that this run does not measure")  # fmt: skip
    add("--page", metavar="DIR",
        help="measure nothing: draw page and curves of this folder again, from its result files")  # fmt: skip
    parsed = parser.parse_args(argv)
    _check_page(parser, parsed)
    results = _results(parsed)
    if parsed.replace and results is None:
        raise InvalidArgument("--replace: is for the result files of a folder, expected --results beside it")
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
        protocols=[Protocol(name) for name in _protocols(parsed.protocol, results)],
        dtype=parsed.dtype,
        max_bytes=parsed.max_bytes,
        repetitions=parsed.repetitions,
        warm_up_ms=parsed.warm_up_ms,
        threads=parsed.threads,
        json=parsed.json,
        plot=parsed.plot,
        results=results,
        replace=parsed.replace,
        page=parsed.page,
    )


def _check_page(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> None:
    """Who draws again measures nothing, so there is nothing to be said about measuring."""
    if parsed.page is None:
        return
    if not parsed.page:
        raise InvalidArgument("--page: is empty, expected the name of a folder")
    for name, value in vars(parsed).items():
        if name != "page" and value not in (parser.get_default(name), []):
            what = f"the operator {value[0]}" if name == "operators" else f"--{name.replace('_', '-')}"
            raise InvalidArgument(f"--page: measures nothing, expected nothing beside it, but there is {what}")


def _results(parsed: argparse.Namespace) -> str | None:
    if parsed.results == "":
        raise InvalidArgument("--results: is empty, expected the name of a folder")
    for option, value in (("--json", parsed.json), ("--plot", parsed.plot)):
        if value is not None and parsed.results is not None:
            raise InvalidArgument(f"{option}: the folder of --results has what it writes, expected one of the two")
        if value is not None and not parsed.operators:
            raise InvalidArgument(
                f"{option}: expected the names of the operators beside it; without any, --results names a folder"
            )
    found: str | None = parsed.results
    return RESULTS if found is None and not parsed.operators and parsed.page is None else found


def _protocols(name: Literal["autograd", "seed"] | None, results: str | None) -> list[Literal["autograd", "seed"]]:
    if name is not None:
        return [name]
    return ["autograd"] if results is None else ["autograd", "seed"]
