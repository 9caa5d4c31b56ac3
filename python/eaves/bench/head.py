"""What the benchmarks of a model's head share: its tensors, and the products that limit it.

What multiplies matrices is not measured by bytes: the column `limit` is the matrix products themselves, whole, by
torch.matmul into memory that is there already, on the data of the call. How fast they are depends on the data, through
the power that they draw: the gradient is that of the row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from eaves.bench.benchmark import Inputs, Mode, normal

DENSE_DEVIATION = 1.3
"""Of the logits of data "dense"."""

_PIECE_ROWS = 256  # of the gradient of the logits, in float32, at a time


def head_tensors(
    batch: int, features: int, classes: int, dtype: torch.dtype, device: torch.device, seed: int, is_dense: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [batch, features], head [classes, features], one class of each row. Normal numbers; where the
    logits shall be dense, smaller hidden states."""
    generator = torch.Generator(device).manual_seed(seed + 2)
    hidden = normal([batch, features], dtype, device, seed)
    head = normal([classes, features], dtype, device, seed + 1)
    if is_dense:
        hidden *= DENSE_DEVIATION / features**0.5
    return hidden, head, torch.randint(classes, (batch,), device=device, generator=generator)


def products(
    mode: Mode, logits_gradient: Callable[[Tensor, Inputs, slice], Tensor]
) -> Callable[[Inputs], Callable[[], object]]:
    """Those of a mode: the logits' in a forward, one with the gradient of the logits for each gradient in a backward.
    `logits_gradient` makes some rows of it, from these rows of the logits."""

    def make(inputs: Inputs) -> Callable[[], object]:
        hidden, head = (argument.detach() for argument in inputs.arguments[:2])
        is_head_trained = inputs.arguments[1].requires_grad
        classes = len(head)
        head = torch.nn.functional.pad(head, (0, 0, 0, -classes % (16 // head.itemsize)))
        logits = torch.matmul(hidden, head.t())
        gradient = torch.zeros_like(logits) if mode != "fwd" else logits
        for first in range(0, len(logits) if mode != "fwd" else 0, _PIECE_ROWS):
            rows = slice(first, first + _PIECE_ROWS)
            gradient[rows, :classes] = logits_gradient(logits[rows, :classes], inputs, rows)
        grad_hidden, grad_head = torch.empty_like(hidden), torch.empty_like(head)

        def run() -> None:
            if mode != "bwd":
                torch.matmul(hidden, head.t(), out=logits)
            if mode != "fwd":
                torch.matmul(gradient, head, out=grad_hidden)
            if is_head_trained and mode != "fwd":
                torch.matmul(gradient.t(), hidden, out=grad_head)

        return run

    return make
