"""The command line of `python benchmarks`. One sentence on stderr names an error.

Exit codes: 0 done, or the reader of a pipe has left; 1 the device or the system failed; 2 an argument is wrong; 130 the
run was interrupted.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from eaves import _command_line

from .benchmark import DTYPES, PROGRAM, InvalidArgument, Operator, check_names
from .calls import PROTOCOLS
from .operators import OPERATORS
from .results import RESULTS, check_file
from .run import run_bench

SUBMITTED = "build/submit"
COMMANDS = ("published", "page", "jax", "ranks", "accuracy", "doors")
"""Modules whose `main` gets a parser and the words, and returns the exit code or nothing."""

_DESCRIPTION = """\
Measures eaves side by side with PyTorch and other installed libraries. They take
turns in one process. Columns: time, peak memory with inputs and outputs, and on a
GPU the time that a call keeps Python busy (host).

Without a name the program measures every operator by both protocols, and writes
result files and pages into the device's folder. With names it prints the tables of
these operators by one protocol; with --shape it measures one operator on a shape of
your own."""

_EPILOG = f"""\
other commands (each has --help):
  {PROGRAM} published  the tables that xopes published, as they were published
  {PROGRAM} page DIR   the pages and pictures of a folder, from its files; or of
                               a file of --submit
  {PROGRAM} jax        a model's head from JAX
  {PROGRAM} ranks      a model's head cut over ranks
  {PROGRAM} accuracy   the errors of a model's head against float64
  {PROGRAM} doors      a model that trains, with libraries' losses and with eaves

lines of a table:
  limit              time: a plain kernel that streams the same bytes in the same
                     run, or for a model's head the matrix products, by
                     torch.matmul; memory: inputs and outputs alone
  best peer / eaves  above 1 eaves is faster, or takes less memory

protocols:
  autograd    a backward is torch.autograd.grad(out, inputs, grad_out)
  accumulate  a backward is out.backward(grad_out), and .grad is never cleared:
              every call adds its gradient to .grad, and so does the limit

On a GPU, short rows are measured once more "in graph": each call is captured in a
CUDA graph, and the time is the replay's.

--shape measures forward and backward of:
  logsumexp             rows=4096,n=131072
  cross_entropy         rows=4096,v=131072
  linear_cross_entropy  rows=2048,dim=768,v=50257
  linear_log_prob       rows=2048,dim=768,v=50257; with entropies
  lrpe_cosine           batch=12,length=8192,heads=12,dim=128; or grid=64x64

The device's folder below --results has <operator>_<protocol>.json (.partial.json
until its last row is measured), the pictures and the pages."""


def parse_shape(text: str, operator: Operator) -> Mapping[str, Any]:
    """A shape such as rows=2048,dim=768,v=50257 or grid=64x64."""
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
        raise InvalidArgument(f'--shape: is "{text}", expected {expected} with positive numbers for {operator.name}')
    return shape


def _described(program: str, description: str | None, epilog: str | None = None) -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    return _command_line.Parser(prog=program, description=description, epilog=epilog, formatter_class=form)


def _parser() -> argparse.ArgumentParser:
    parser = _described(PROGRAM, _DESCRIPTION, _EPILOG)
    add = parser.add_argument
    add("operators", nargs="*", metavar="operator", help="operators to measure; default: all, into a folder")
    add("--shape", metavar="KEY=N,..", help="measure one operator on this shape, see below")
    add(
        "--provider", action="append", default=[], metavar="NAME", help="measure this provider only; repeat it for more"
    )
    add("--device", choices=["cpu", "cuda"], help="default: cuda if PyTorch finds a GPU, else cpu")
    add("--sweep", choices=["quick", "published"], default="quick",
        help="quick: sizes that suit the device; published: the rows of the published tables")  # fmt: skip
    add("--protocol", choices=PROTOCOLS,
        help="how a backward is called, see below; default: autograd; both if a folder is written")  # fmt: skip
    add("--dtype", choices=DTYPES, help="type of the inputs; default: bf16, and for some rows also fp32")
    add("--repetitions", type=int, default=30, metavar="N",
        help="repetitions of each row (30); slow rows get fewer, at least 5")  # fmt: skip
    add("--warm-up-ms", type=float, default=500.0, metavar="MS",
        help="warm-up before each table, in which clocks settle (500)")  # fmt: skip
    add("--threads", type=int, default=0, metavar="N", help="number of CPU threads; default: PyTorch's number")
    add("--results", metavar="DIR", help="write results, pictures and pages below this folder; "
        f"default without an operator: {os.path.relpath(RESULTS)}")  # fmt: skip
    add("--replace", action="store_true",
        help="let result files below DIR lose rows and providers that this run does not measure")  # fmt: skip
    add("--submit", metavar="FILE", help="also write a self-test and the result files into this one file, which `page` "
        f"reads; sends nothing. Protocol: autograd. Default of --results: {SUBMITTED}")  # fmt: skip
    return parser


def parse_arguments(argv: Sequence[str], operators: Sequence[Operator]) -> argparse.Namespace:
    """The arguments, with `operators` and `protocols` filled in and `shape` parsed. `results` is None without a
    folder."""
    parsed = _parser().parse_args(argv)
    for name, low, high in (("repetitions", 1, 100000), ("warm_up_ms", 0, 60000), ("threads", 0, os.cpu_count() or 1)):
        if not low <= (value := getattr(parsed, name)) <= high:
            raise InvalidArgument(f"--{name.replace('_', '-')}: is {value}, expected {low} to {high}")
    if parsed.results == "":
        raise InvalidArgument("--results: is empty, expected the name of a folder")
    if parsed.submit is not None:
        parsed.submit = check_file("--submit", parsed.submit)
    if parsed.results is None and (parsed.submit or not parsed.operators):
        parsed.results = SUBMITTED if parsed.submit else RESULTS
    by_name = {operator.name: operator for operator in operators}
    check_names("there is no operator", parsed.operators, by_name)
    if parsed.shape is not None:
        if len(parsed.operators) != 1 or parsed.results is not None:
            raise InvalidArgument("--shape: measures one operator, expected its name, no --results and no --submit")
        parsed.shape = parse_shape(parsed.shape, by_name[parsed.operators[0]])
    parsed.operators = [by_name[name] for name in dict.fromkeys(parsed.operators or by_name)]
    known = dict.fromkeys(provider.name for operator in parsed.operators for provider in operator.providers)
    check_names("--provider: there is no provider", parsed.provider, known)
    default = PROTOCOLS[:1] if parsed.results is None or parsed.submit else PROTOCOLS
    parsed.protocols = [parsed.protocol] if parsed.protocol else default
    return parsed


def main(argv: Sequence[str] | None = None, operators: Sequence[Operator] = OPERATORS) -> int:
    """Runs a command and returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    try:
        code = 0
        if words and words[0] in COMMANDS:
            command = import_module(f".{words[0]}", __package__)
            code = command.main(_described(f"{PROGRAM} {words[0]}", command.__doc__), words[1:]) or 0
        else:
            run_bench(parse_arguments(words, operators), operators)
        _command_line.check()
        return code
    except InvalidArgument as error:
        code, sentence = 2, str(error)
    except (OSError, RuntimeError) as error:
        code, sentence = 1, str(error)
    except KeyboardInterrupt:
        code, sentence = 130, "stopped; --results keeps the finished rows in a file that ends in .partial.json"
        sentence += "; published keeps them in its result files" * ("published" in words)
    print(f"{PROGRAM}: {sentence}", file=sys.stderr)
    return code
