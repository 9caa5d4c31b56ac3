"""The errors of linear_cross_entropy, of eaves and of every library that is installed, against float64 on the same
(already rounded) data. Prints a table in Markdown.

    python benchmarks accuracy --device cpu

The error of the loss is relative, that of a gradient is relative to its norm, all in bfloat16. The data are normal
numbers as in `--sweep published` (`spread`), whose logits have a deviation of the square root of the features, and
logits of deviation 1.3 (a model that knows little) and 4.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import replace

import torch

from eaves._command_line import say

from . import run, tables, verify
from .benchmark import Inputs, Provider, normal, reason
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


def measure(name: str, inputs: Inputs, providers: Sequence[Provider]) -> list[Entry]:
    """The relative errors, by the names of the results; a provider without a bias has none for it."""
    rows, features = inputs.arguments[0].shape
    row = OPERATOR.row_of_shape({"rows": rows, "dim": features, "v": len(inputs.arguments[1])}, "bf16")
    exact = [each.detach().double().requires_grad_() if each.requires_grad else each for each in inputs.arguments]
    formula = next(each for each in OPERATOR.providers if each.name == "torch").forward(row)
    expected = {count: verify.results(row, formula, Inputs(tuple(exact[:count]), inputs.grad_out.double()))
                for count in (3, 4)}  # fmt: skip
    entries: list[Entry] = []
    for provider in providers:
        count = 3 if provider.name in WITHOUT_BIAS else 4
        entry: Entry = {"deviation": name, "shape": dict(row.shape), "provider": provider.name}
        try:
            found = verify.results(row, provider.forward(row), replace(inputs, arguments=inputs.arguments[:count]))
            for each, (result, wanted) in zip(RESULTS, expected[count].items()):
                entry[each] = float((found[result].double() - wanted).norm() / wanted.norm())
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


def main(parser: ArgumentParser, argv: Sequence[str]) -> None:
    parser.add_argument("--device", choices=["cpu", "cuda"], help="without: cuda where PyTorch sees a GPU")
    device = find_device(parser.parse_args(argv).device)
    providers = run.installed(OPERATOR.providers, device)
    shapes = [(256, 512, 4096)] if device.type == "cpu" else [(4096, 4096, 32768), (4096, 4096, 131072)]
    entries: list[Entry] = []
    for shape in shapes:
        for name, deviation in (("spread", None), ("1.3", 1.3), ("4", 4.0)):
            entries += measure(name, make_inputs(*shape, deviation, device), providers)
    say(table(entries))
