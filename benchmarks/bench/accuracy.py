"""The errors of linear_cross_entropy, of eaves and of every library that is installed, against float64 on the same
(already rounded) data. Prints a table in Markdown.

    python benchmarks accuracy --device cpu

The error of the loss is relative, that of a gradient is relative to its norm, all in bfloat16. The data are normal
numbers as in `--sweep published` (`spread`), whose logits have a deviation of the square root of the features, and
logits of deviation 1.3 (a model that knows little) and 4.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from eaves._command_line import Parser, check, say

from . import run, tables
from .benchmark import PROGRAM, Inputs, Provider, normal, reason
from .device import find_device
from .harness import Entry
from .linear_cross_entropy import OPERATOR, WITHOUT_BIAS

RESULTS = ("loss", "grad_hidden", "grad_head", "grad_bias")


def make_inputs(rows: int, features: int, classes: int, deviation: float | None, device: torch.device) -> Inputs:
    """Input, weight, target, bias; logits of this deviation, or of normal weights."""
    x = normal([rows, features], torch.bfloat16, device, 2)
    weight = normal([classes, features], torch.float32, device, 3)
    if deviation is not None:
        weight *= deviation / features**0.5
    target = torch.randint(classes, (rows,), device=device, generator=torch.Generator(device).manual_seed(4))
    bias = 0.1 * normal([classes], torch.float32, device, 5)
    x, weight, bias = (tensor.to(torch.bfloat16).requires_grad_() for tensor in (x, weight, bias))
    return Inputs((x, weight, target, bias), torch.ones((), device=device))


def exact(inputs: Inputs, with_bias: bool) -> tuple[Tensor, ...]:
    """Loss and gradients in float64."""
    x, weight, bias = (inputs.arguments[i].detach().double().requires_grad_() for i in (0, 1, 3))
    logits = functional.linear(x, weight, bias if with_bias else None)
    loss = functional.cross_entropy(logits, inputs.arguments[2])
    return loss.detach(), *torch.autograd.grad(loss, (x, weight, bias) if with_bias else (x, weight))


def measure(name: str, inputs: Inputs, providers: Sequence[Provider]) -> list[Entry]:
    """The relative errors, by the names of the results; a provider without a bias has none for it."""
    expected = {with_bias: exact(inputs, with_bias) for with_bias in (False, True)}
    rows, features = inputs.arguments[0].shape
    shape = {"rows": rows, "dim": features, "v": len(inputs.arguments[1])}
    row = OPERATOR.row_of_shape(shape, "bf16")
    entries: list[Entry] = []
    for provider in providers:
        with_bias = provider.name not in WITHOUT_BIAS
        own = inputs if with_bias else replace(inputs, arguments=inputs.arguments[:3])
        entry: Entry = {"deviation": name, "shape": dict(row.shape), "provider": provider.name}
        try:
            loss = provider.forward(row)(*own.arguments)
            found = [loss.detach(), *torch.autograd.grad(loss, own.differentiable)]
            for each, actual, wanted in zip(RESULTS, found, expected[with_bias]):
                entry[each] = float((actual.double() - wanted).norm() / wanted.norm())
        except Exception as error:  # a provider's code: whatever it raises, the others go on
            entry["skipped"] = reason(error)
        entries.append(entry)
    return entries


def table(entries: Sequence[Entry]) -> str:
    """Markdown."""
    lines = [["classes", "logits' deviation", "implementation", *RESULTS]]
    for entry in entries:
        errors = [f"{entry[name]:.1e}" if name in entry else str(entry.get("skipped", "")) for name in RESULTS]
        lines.append([f"{entry['shape']['v']:,}", entry["deviation"], entry["provider"], *errors])
    return "\n".join(tables.markdown(lines, left=len(lines[0]))[:-1])


def main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = Parser(
        prog=f"{PROGRAM} accuracy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], help="without: cuda where PyTorch sees a GPU")
    device = find_device(parser.parse_args(argv).device)
    providers = run.installed(OPERATOR.providers, device)
    shapes = [(256, 512, 4096)] if device.type == "cpu" else [(4096, 4096, 32768), (4096, 4096, 131072)]
    entries: list[Entry] = []
    for shape in shapes:
        for name, deviation in (("spread", None), ("1.3", 1.3), ("4", 4.0)):
            entries += measure(name, make_inputs(*shape, deviation, device), providers)
    say(table(entries))
    check()
    return 0
