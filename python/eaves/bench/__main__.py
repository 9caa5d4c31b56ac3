"""The command line of `python -m eaves.bench`. It does what is asked, and says in one sentence what was wrong.

Exit codes: 0 done, or the reader of a pipe has left; 1 the device or the system failed; 2 an argument is wrong; 130 the
run was stopped.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from eaves import _output
from eaves.bench import page, stop
from eaves.bench.benchmark import DTYPES, InvalidArgument, Operator, check_names
from eaves.bench.calls import PROTOCOLS
from eaves.bench.operators import OPERATORS
from eaves.bench.run import run_bench

_PROGRAM = "python -m eaves.bench"
RESULTS = "benchmarks/results"

_DESCRIPTION = """\
Measures eaves side by side with PyTorch and whatever else is installed, in one
process, the implementations taking turns: time, peak memory with inputs and
outputs counted, and on a GPU the time that a call keeps Python busy (host).

Without the name of an operator everything is measured, by both protocols, and
kept in a folder with pages of all tables. With names only these are, by one
protocol, and what is kept is what --json and --plot name. With --shape one
operator is measured on a shape of your own."""

_EPILOG = f"""\
lines of a table:
  eaves, torch, ...  the implementations
  limit              a plain kernel that streams the same bytes in the same run;
                     of a model's head its products, by torch.matmul; of
                     memory inputs and outputs alone
  best peer / eaves  above 1 eaves is faster, or takes less memory

forward and backward:
  both in one call; of cross_entropy its logits are made anew for each call, so
  that an implementation may write the gradient over them

protocols:
  autograd    a backward is torch.autograd.grad(out, inputs, grad_out)
  accumulate  it is out.backward(grad_out) and .grad is never cleared: every
              call also adds its gradient to the one before, and the limit
              streams these bytes too. So the published measurements were made;
              --sweep published has their shapes

--shape, forward and backward of:
  logsumexp             rows=4096,n=131072
  cross_entropy         rows=4096,v=131072
  linear_cross_entropy  rows=2048,dim=768,v=50257
  linear_log_prob       rows=2048,dim=768,v=50257; with entropies
  lrpe_cosine           batch=12,length=8192,heads=12,dim=128
                        (grid=64x64 instead of length)

results, without an operator or with --results:
  {RESULTS}/<device>/, such as nvidia-a100 or intel-xeon, in the
  folder where the program is called:
  <operator>_<protocol>.json  what was measured; refused where it would lose
                              rows or providers, unless --replace is given
  plots/                      the curves; they need matplotlib
  README.md, details.md       the pages, of every result file that is there

examples:
  {_PROGRAM} linear_cross_entropy --shape rows=2048,dim=768,v=50257
  {_PROGRAM} logsumexp --provider eaves --provider torch
  {_PROGRAM} lrpe_cosine --protocol accumulate --results results
  {_PROGRAM} --page {RESULTS}/intel-xeon

a run that is stopped (Ctrl-C, SIGTERM, SIGHUP):
  What it has measured is written, without curves and pages, and one sentence
  says where. In a folder that is <operator>_<protocol>.stopped.json, which no
  page shows; the same command with --resume goes on from there. A second
  signal ends the run at once

exit codes: 0 done, or the reader of a pipe has left (| head), who keeps no
file from being written; 1 the device or the system failed; 2 an argument is
wrong; 130 the run was stopped"""


class _Parser(_output.Parser):
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


def parse_shape(text: str, operator: Operator) -> Mapping[str, Any]:
    """rows=2048,dim=768,v=50257; grid=64x64."""
    parts = [part.partition("=") for part in text.split(",")]
    try:
        shape = {key: [int(size) for size in value.split("x")] if key == "grid" else int(value)
                 for key, _, value in parts}  # fmt: skip
        sizes = [size for value in shape.values() for size in (value if isinstance(value, list) else [value])]
        if min(sizes) < 1 or len(shape) < len(parts) or math.prod(sizes) >= 2**50:
            raise ValueError
    except ValueError:
        shape = {}
    if sorted(shape) not in [sorted(keys.split(",")) for keys in operator.shapes]:
        expected = " or ".join(operator.shapes).replace(",", "=..,") + "=.."
        raise InvalidArgument(f'--shape: is "{text}", expected {expected} of {operator.name}, positive numbers')
    return shape


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=_PROGRAM,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("operators", nargs="*", metavar="operator", help="what to measure; without any: everything, into a folder")
    add("--shape", metavar="KEY=N,..", help="measure one operator on this shape, see below")
    add("--provider", action="append", default=[], metavar="NAME", help="only this one; repeat it for more")
    add("--device", choices=["cpu", "cuda"], help="without: cuda where PyTorch sees a GPU")
    add("--sweep", choices=["quick", "published"], default="quick",
        help="quick: lengths that suit the device; published: their rows, no others")  # fmt: skip
    add("--protocol", choices=PROTOCOLS,
        help="what a backward is, see below; without: autograd, and both where a folder is written")  # fmt: skip
    add("--dtype", type=parse_dtype, metavar="DTYPE",
        help=f"{', '.join(DTYPES)}, or PyTorch's names of them; without: bf16, and fp32 where it differs")  # fmt: skip
    add("--max-bytes", type=parse_bytes, default=0, metavar="BYTES",
        help="leave out rows that read and write more, such as 64M or 2G")  # fmt: skip
    add("--repetitions", type=int, default=30, metavar="N", help="of each row (30); slow rows get fewer, at least 5")
    add("--warm-up-ms", type=float, default=500.0, metavar="MS", help="before each table, until clocks settle (500)")
    add("--threads", type=int, default=0, metavar="N", help="CPU threads of all; without: PyTorch's number")
    add("--json", metavar="FILE", help="also write the results to this file")
    add("--plot", metavar="DIR", help="also draw the curves into PNG files in this folder; needs matplotlib")
    add("--results", metavar="DIR",
        help=f"keep results and pages in the device's folder below this one; without operators: {RESULTS}")  # fmt: skip
    add("--replace", action="store_true",
        help="let result files there lose rows and providers that this run does not measure")  # fmt: skip
    add("--resume", action="store_true",
        help="take over the rows that the same commit and versions have in result files there")  # fmt: skip
    add("--page", metavar="DIR",
        help="measure nothing: draw pages and curves of this folder again, from its result files")  # fmt: skip
    return parser


def parse_arguments(argv: Sequence[str] | None, operators: Sequence[Operator]) -> argparse.Namespace:
    """With `operators` and `protocols` filled in, and `shape` parsed; `results` is None where no folder is written."""
    parser = _parser()
    parsed = parser.parse_args(argv)
    for name in ("page", "results"):
        if getattr(parsed, name) == "":
            raise InvalidArgument(f"--{name}: is empty, expected the name of a folder")
    given = [name for name, value in vars(parsed).items() if value not in (parser.get_default(name), [])]
    measuring = ("operators", "provider", "device", "dtype", "warm_up_ms", "threads", "repetitions", "protocol", "json")
    for alone, words, beside in (
        ("page", "measures nothing, expected nothing beside it", ()),
        ("shape", "is one row in one table", measuring),
    ):
        for name in given if alone in given else ():
            if name != alone and name not in beside:
                what = f"the operator {parsed.operators[0]}" if name == "operators" else f"--{name.replace('_', '-')}"
                raise InvalidArgument(f"--{alone}: {words}, but there is {what}")
    for name in ("json", "plot"):
        if name in given and parsed.results is not None:
            raise InvalidArgument(f"--{name}: the folder of --results has what it writes, expected one of the two")
        if name in given and not parsed.operators:
            raise InvalidArgument(
                f"--{name}: expected the names of the operators beside it; without any, --results names a folder"
            )
    if not {"operators", "page", "shape", "results"} & {*given}:
        parsed.results = RESULTS
    for name in ("replace", "resume"):
        if getattr(parsed, name) and parsed.results is None:
            raise InvalidArgument(f"--{name}: is for the result files of a folder, expected --results beside it")
    for name, low, high in (("repetitions", 1, 100000), ("warm_up_ms", 0, 60000), ("threads", 0, os.cpu_count() or 1)):
        if not low <= (value := getattr(parsed, name)) <= high:
            raise InvalidArgument(f"--{name.replace('_', '-')}: is {value}, expected {low} to {high}")
    by_name = {operator.name: operator for operator in operators}
    check_names("there is no operator", parsed.operators, by_name)
    parsed.operators = [by_name[name] for name in dict.fromkeys(parsed.operators or by_name)]
    known = dict.fromkeys(provider.name for operator in parsed.operators for provider in operator.providers)
    check_names("--provider: there is no provider", parsed.provider, known)
    if parsed.shape is not None:
        if len(parsed.operators) != 1:
            raise InvalidArgument("--shape: is of one operator, expected its name")
        parsed.shape = parse_shape(parsed.shape, parsed.operators[0])
    default = PROTOCOLS[:1] if parsed.results is None else PROTOCOLS
    parsed.protocols = [parsed.protocol] if parsed.protocol else default
    return parsed


def main(argv: Sequence[str] | None = None, operators: Sequence[Operator] = OPERATORS) -> int:
    """Returns the exit code; one sentence on stderr says what was wrong."""
    with stop.signals():
        try:
            arguments = parse_arguments(argv, operators)
            if arguments.page is not None:
                _draw_again(Path(arguments.page), operators)
            else:
                run_bench(arguments, operators)
            _output.check()
            return 0
        except InvalidArgument as error:
            return _fail(2, error)
        except stop.Stopped as stopped:
            return _fail(stop.EXIT_CODE, stopped)
        except (OSError, RuntimeError) as error:
            return _fail(1, error)


def _draw_again(folder: Path, operators: Sequence[Operator]) -> None:
    try:
        with stop.interruptible():
            page.draw(folder, operators)
    except KeyboardInterrupt:
        raise stop.Stopped("stopped while it drew; some of the pictures are new: draw the pages again") from None


def _fail(exit_code: int, sentence: Exception) -> int:
    with suppress(OSError):  # stderr may be a pipe whose reader Ctrl-C has ended
        print(f"eaves.bench: {sentence}", file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
