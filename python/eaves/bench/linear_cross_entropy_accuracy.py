"""`python -m eaves.bench.linear_cross_entropy_accuracy`: the errors of linear_cross_entropy, of eaves and of everybody
who is installed, against float64 on the same (already rounded) data. Prints a table in Markdown; --json also writes it.

Of the loss the relative error, of each gradient that of its norm, all in bfloat16: on normal numbers, the data of
--sweep seed (`seed`), whose logits have a deviation of the square root of the features, and at deviations of 1.3 (a
model that knows little) and 4.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from eaves.bench.benchmark import Inputs, InvalidArgument, Provider, Row, normal, reason
from eaves.bench.device import device_name, find_device
from eaves.bench.linear_cross_entropy import OPERATOR, WITHOUT_BIAS
from eaves.bench.providers import Availability, versions
from eaves.bench.results import AtomicFile

RESULTS = ("loss", "grad_x", "grad_weight", "grad_bias")

_GPU_SHAPE = (4096, 4096, 32768)
_CPU_SHAPE = (256, 512, 4096)

_PIECE_ROWS = 256  # of the float64 logits at a time


@dataclass(frozen=True)
class Case:
    rows: int
    features: int
    classes: int
    deviation: float | None
    """Of the logits; None: of the published data, normal weights."""

    @property
    def name(self) -> str:
        return "seed" if self.deviation is None else f"{self.deviation:g}"

    def inputs(self, device: torch.device) -> Inputs:
        """Input, weight, target, bias."""
        dtype = torch.bfloat16
        x = normal([self.rows, self.features], dtype, device, 2)
        weight = normal([self.classes, self.features], torch.float32, device, 3)
        if self.deviation is not None:
            weight *= self.deviation / self.features**0.5
        generator = torch.Generator(device).manual_seed(4)
        target = torch.randint(self.classes, (self.rows,), device=device, generator=generator)
        bias = 0.1 * normal([self.classes], torch.float32, device, 5)
        tensors = (x, weight.to(dtype), bias.to(dtype))
        x, weight, bias = (tensor.requires_grad_() for tensor in tensors)
        return Inputs((x, weight, target, bias), torch.ones((), device=device))


def exact(inputs: Inputs, with_bias: bool) -> tuple[Tensor, ...]:
    """Loss and gradients in float64."""
    x, weight, target, bias = (argument.detach() for argument in inputs.arguments)
    w = weight.double()
    loss = torch.zeros((), dtype=torch.float64, device=x.device)
    grad_x, grad_weight = torch.empty_like(x, dtype=torch.float64), torch.zeros_like(w)
    grad_bias = torch.zeros_like(bias, dtype=torch.float64)
    for first in range(0, len(x), _PIECE_ROWS):
        rows = slice(first, first + _PIECE_ROWS)
        piece = x[rows].double()
        logits = piece @ w.t() + (bias.double() if with_bias else 0.0)
        log_p = torch.log_softmax(logits, -1)
        index = torch.arange(len(piece), device=x.device)
        loss -= log_p[index, target[rows]].sum()
        gradient = log_p.exp_()
        gradient[index, target[rows]] -= 1
        gradient /= len(x)
        grad_x[rows] = gradient @ w
        grad_weight += gradient.t() @ piece
        grad_bias += gradient.sum(0)
    return loss / len(x), grad_x, grad_weight, grad_bias


def errors(provider: Provider, inputs: Inputs, expected: Sequence[Tensor], with_bias: bool) -> dict[str, float]:
    """Relative, by the names of the results; those that a provider does not have are left out."""
    row = Row(0, {}, {}, 0, 0, 1, lambda device, seed: inputs)
    arguments = inputs.arguments if with_bias else inputs.arguments[:3]
    loss = provider.forward(row)(*arguments)
    differentiable = [argument for argument in arguments if argument.requires_grad]
    found = [loss.detach(), *torch.autograd.grad(loss, differentiable)]
    return {
        name: float((actual.double() - wanted).norm() / wanted.norm())
        for name, actual, wanted in zip(RESULTS, found, expected)
    }


def measure(case: Case, providers: Sequence[Provider], device: torch.device) -> list[dict[str, object]]:
    inputs = case.inputs(device)
    expected = {with_bias: exact(inputs, with_bias) for with_bias in (False, True)}
    rows: list[dict[str, object]] = []
    for provider in providers:
        with_bias = provider.name not in WITHOUT_BIAS
        entry: dict[str, object] = {
            "op": OPERATOR.name,
            "deviation": case.name,
            "shape": {"batch": case.rows, "dim": case.features, "v": case.classes},
            "provider": provider.name,
        }
        try:
            entry |= errors(provider, inputs, expected[with_bias], with_bias)
        except Exception as error:  # somebody else's code: whatever it raises, the others go on
            entry["skipped"] = reason(error)
        rows.append(entry)
    return rows


def table(rows: Sequence[dict[str, object]]) -> str:
    """Markdown."""
    lines = [
        "| logits' deviation | implementation | loss | grad_x | grad_weight | grad_bias |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [f"{row[name]:.1e}" if name in row else str(row.get("skipped", "")) for name in RESULTS]
        lines.append(f"| {row['deviation']} | {row['provider']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code, as `python -m eaves.bench` does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="without: cuda where PyTorch sees a GPU")
    parser.add_argument("--json", metavar="FILE", help="also write the errors to this file")
    arguments = parser.parse_args(argv)
    try:
        device = find_device(arguments.device)
        with AtomicFile("--json", arguments.json) if arguments.json is not None else nullcontext() as file:
            availability = Availability(device)
            providers = availability.installed(OPERATOR.providers)
            for name, why in availability.missing.items():
                print(f"# {name} is left out: {why}", file=sys.stderr)
            shape = _CPU_SHAPE if device.type == "cpu" else _GPU_SHAPE
            cases = [Case(*shape, deviation) for deviation in (None, 1.3, 4.0)]
            rows = [row for case in cases for row in measure(case, providers, device)]
            print(table(rows))
            if file is not None:
                head = {"schema": 1, "device": device_name(device), "versions": versions(providers)}
                file.commit(json.dumps(head | {"rows": rows}, indent=1) + "\n")
        return 0
    except InvalidArgument as error:
        print(f"linear_cross_entropy_accuracy: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
