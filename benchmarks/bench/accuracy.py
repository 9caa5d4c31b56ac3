"""The errors of linear_cross_entropy against float64 on the same (already rounded) data, for eaves and every installed
library. Prints a table in Markdown.

    python benchmarks accuracy --device cpu

The error of the loss is relative, the error of a gradient is relative to its norm, all in bfloat16. `classes lost` is
the share of the classes for which the error of a row of the head's gradient exceeds half of that row's norm. The data:

- `initial`: normal numbers with logits of deviation 0.02, like a new model;
- `dense`: with logits of deviation 1.3, like a model that knows little;
- `spread`: as in `--sweep published`, with logits of a deviation of the square root of the features;
- `trained`: logits like a language model's late in its training.

The rows are three times a power of two, like the 12288 of the other tables, because a mean over a power of two hides
the error of a 16-bit gradient that includes the divisor.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from eaves._command_line import say

from . import run, tables, verify
from .benchmark import Inputs, Provider, normal, reason
from .device import find_device
from .harness import Entry
from .head import DENSE_DEVIATION, head_tensors, trained_tensors
from .linear_cross_entropy import OPERATOR, WITHOUT_BIAS

RESULTS = ("loss", "grad_hidden", "grad_head", "grad_bias")
CLASSES_LOST = "classes lost"
DATA = ("initial", "dense", "spread", "trained")
DEVIATIONS = {"initial": 0.02, "dense": DENSE_DEVIATION}


def make_inputs(rows: int, features: int, classes: int, data: str, device: torch.device) -> Inputs:
    """Input, weight, target, bias."""
    if data == "trained":
        x, weight, target = trained_tensors(rows, features, classes, torch.bfloat16, device)
    else:
        x, weight, target = head_tensors(rows, features, classes, torch.float32, device, 2, False)
        weight *= DEVIATIONS.get(data, features**0.5) / features**0.5
    bias = 0.1 * normal([classes], torch.float32, device, 5)
    x, weight, bias = (tensor.to(torch.bfloat16).requires_grad_() for tensor in (x, weight, bias))
    return Inputs((x, weight, target, bias), torch.ones((), device=device))


def classes_lost(error: Tensor, wanted: Tensor) -> float:
    """The share of the rows with an error above half of their norm, or NaN."""
    return float((~(error.norm(dim=1) <= wanted.norm(dim=1) / 2)).double().mean())


def measure(data: str, inputs: Inputs, providers: Sequence[Provider]) -> list[Entry]:
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
        entry: Entry = {"data": data, "shape": dict(row.shape), "provider": provider.name}
        try:
            found = verify.results(row, provider.forward(row), replace(inputs, arguments=inputs.arguments[:count]))
            for each, (result, wanted) in zip(RESULTS, expected[count].items()):
                error = found[result].double() - wanted
                entry[each] = float(error.norm() / wanted.norm())
                if each == "grad_head":
                    entry[CLASSES_LOST] = classes_lost(error, wanted)
        except Exception as error:  # a provider may raise anything; the others go on
            entry["skipped"] = reason(error)
        entries.append(entry)
    return entries


def table(entries: Sequence[Entry]) -> str:
    """The errors as a table in Markdown."""
    lines = [["classes", "data", "implementation", *RESULTS, CLASSES_LOST]]
    for entry in entries:
        errors = [f"{entry[name]:.1e}" if name in entry else str(entry.get("skipped", "")) for name in RESULTS]
        lost = f"{entry[CLASSES_LOST]:.2%}" if CLASSES_LOST in entry else ""
        lines.append([f"{entry['shape']['v']:,}", entry["data"], entry["provider"], *errors, lost])
    return "\n".join(tables.markdown(lines, left=len(lines[0]))[:-1])


def main(parser: ArgumentParser, argv: Sequence[str]) -> None:
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if PyTorch finds a GPU, else cpu")
    device = find_device(parser.parse_args(argv).device)
    providers = run.installed(OPERATOR.providers, device)
    rows, features, vocabularies = (192, 512, (4096,)) if device.type == "cpu" else (3072, 4096, (4096, 32768, 131072))
    # torch.compile in another mode has the same errors, and takes minutes to try out products.
    providers = [each for each in providers if "max-autotune" not in each.name]
    entries: list[Entry] = []
    for classes in vocabularies:
        for data in DATA:
            entries += measure(data, make_inputs(rows, features, classes, data, device), providers)
    say(table(entries))
