"""The shared parts of the benchmarks of a model's head: its tensors, and the matrix products that limit it.

Bytes do not limit an operator that multiplies matrices. Its column `limit` is the whole matrix products alone, by
torch.matmul into existing memory, on the data of the call. The speed of a product depends on its data, through the
power that it draws, so the products take the gradient of the row.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .benchmark import DTYPES, Inputs, Mode, Row, normal

DENSE_DEVIATION = 1.3
"""The deviation of the logits of data "dense"."""

_PIECE_ROWS = 256  # rows of the float32 gradient of the logits at a time


class Shape(NamedTuple):
    rows: int
    features: int
    classes: int

    def __str__(self) -> str:
        return "x".join(map(str, self))


def parse_shape(text: str) -> Shape:
    """A shape such as 512x64x1024."""
    sizes = [int(size) if size.isdecimal() else 0 for size in text.split("x")]
    if len(sizes) != 3 or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f'is "{text}", expected rows, features and classes such as 512x64x1024')
    return Shape(*sizes)


def head_tensors(
    batch: int, features: int, classes: int, dtype: torch.dtype, device: torch.device, seed: int, is_dense: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [batch, features], head [classes, features], and a class for each row. The numbers are normal;
    dense logits get smaller hidden states."""
    generator = torch.Generator(device).manual_seed(seed + 2)
    hidden = normal([batch, features], dtype, device, seed)
    head = normal([classes, features], dtype, device, seed + 1)
    if is_dense:
        hidden *= DENSE_DEVIATION / features**0.5
    return hidden, head, torch.randint(classes, (batch,), device=device, generator=generator)


def trained_tensors(
    batch: int, features: int, classes: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """head_tensors() with logits like a language model's late in its training. Classes have frequencies by Zipf and
    Mandelbrot, and nearly half of them belong to languages foreign to the text; they share directions of few
    dimensions. Each row has its own sharpness. Targets are drawn from the softmax, which has an entropy of 1.4 to 1.8
    nats."""
    generator = torch.Generator(device).manual_seed(6)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    rank = min(48, features - 1)
    place = torch.arange(classes, device=device)
    is_foreign = (torch.rand(classes, device=device, generator=generator) < 0.45) & (place >= 600)
    base = -1.05 * torch.log(place + 8.0) - 1.5 * (place / classes) ** 2 - 6.0 * is_foreign
    cluster = torch.randint(400, (classes,), device=device, generator=generator)
    direction = 0.75 * random(400, rank)[cluster] + 0.66 * random(classes, rank)
    context = 2.4 * 1.6 / rank**0.5 * random(batch, rank)
    sharpness = 1.7 * torch.exp(0.35 * random(batch, 1))
    axes = torch.linalg.qr(random(features, rank + 1)).Q.t()
    hidden = torch.cat([sharpness, sharpness * context], 1) @ axes
    head = torch.cat([base.unsqueeze(1), direction], 1) @ axes
    hidden, head = hidden.to(dtype), head.to(dtype)
    target = torch.multinomial(torch.softmax(hidden @ head.t(), -1, dtype=torch.float32), 1, generator=generator)
    return hidden, head, target.squeeze(1)


def products(
    mode: Mode, logits_gradient: Callable[[Tensor, Inputs, slice], Tensor]
) -> Callable[[Inputs], Callable[[], object]]:
    """The products of a mode. A forward has the product of the logits; a backward has one product with the gradient of
    the logits for each of its gradients. `logits_gradient` computes some rows of that gradient from these rows of the
    logits."""

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


def head_row(
    op: str,
    mode: Mode,
    dtype_name: str,
    shape: Shape,
    out_shape: Sequence[int],
    options: Mapping[str, Any],
    logits_gradient: Callable[[Tensor, Inputs, slice], Tensor],
) -> Row:
    """A row with the output `out_shape`. A scalar has the upstream gradient 1, like a loss in training, but a random
    one in a backward alone. With the option "frozen_head" the head has no gradient. The data are "dense" unless the
    options say "spread" or "trained"."""
    dtype = DTYPES[dtype_name]
    result_dtype = torch.promote_types(dtype, torch.float32)
    rows, features, classes = shape
    is_frozen, data = "frozen_head" in options, options.get("data")
    hidden_bytes, head_bytes = (count * features * dtype.itemsize for count in (rows, classes))
    gradient_bytes = 0 if mode == "fwd" else hidden_bytes + (0 if is_frozen else head_bytes)

    def make_inputs(device: torch.device, seed: int) -> Inputs:
        if data == "trained":
            hidden, head, classes_of_rows = trained_tensors(*shape, dtype, device)
        else:
            hidden, head, classes_of_rows = head_tensors(*shape, dtype, device, seed, data != "spread")
        hidden.requires_grad_(mode != "fwd")
        head.requires_grad_(mode != "fwd" and not is_frozen)
        is_one = not out_shape and mode != "bwd"
        one = torch.ones((), dtype=result_dtype, device=device)
        return Inputs(
            (hidden, head, classes_of_rows), one if is_one else normal(out_shape, result_dtype, device, seed + 3)
        )

    return Row(
        *(op, mode, dtype_name, {"batch": rows, "dim": features, "v": classes}),
        hidden_bytes + head_bytes + rows * torch.int64.itemsize,
        gradient_bytes + math.prod(out_shape) * result_dtype.itemsize,
        gradient_bytes,
        make_inputs=make_inputs,
        options=options,
        flops=2 * ({"fwd": 1, "bwd": 2, "fwd+bwd": 3}[mode] - is_frozen) * math.prod(shape),
        make_limit=products(mode, logits_gradient),
    )
