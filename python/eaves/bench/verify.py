"""Is a provider computing the same thing? A loose comparison with eaves before anything is timed.

It finds a wrong axis, a missing factor, a gradient that is not there, or one that has only its largest elements.
Accuracy is another question, and the tests of eaves answer it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eaves.bench.benchmark import Forward, Inputs, Mode

# Of the largest value expected, and in all of the sum of the absolute values. A result of about 12 that is rounded to
# bfloat16 is off by up to 0.03, and so is the factor exp(x - out) of a gradient that is computed from it.
_TOLERANCE = {torch.bfloat16: 0.1, torch.float16: 0.02, torch.float32: 1e-3, torch.float64: 1e-6}

# Compared piece by piece, so that the differences need little memory beside tensors of gigabytes.
_PIECE_ELEMENTS = 2**24


@dataclass(frozen=True)
class Results:
    provider: str
    tensors: dict[str, Tensor]
    """out and, where the mode has a backward, the gradients by the place of their argument."""


def results(provider: str, mode: Mode, forward: Forward, inputs: Inputs, in_place: bool = False) -> Results:
    """What a provider computes of one set of inputs, which it may overwrite only in place: there it gets copies."""
    if in_place:
        inputs = inputs.remade()
    out = forward(*inputs.arguments)
    tensors = {"out": out.detach()}
    if mode != "fwd":
        gradients = torch.autograd.grad(out, inputs.differentiable, inputs.grad_out)
        tensors |= {f"gradient {i}": gradient for i, gradient in enumerate(gradients)}
    return Results(provider, tensors)


def difference(actual: Results, expected: Results, tolerance: float | None = None) -> str:
    """What is wrong with the results, in one line; nothing where they agree."""
    if tolerance is None:
        # Of the coarsest dtype: a peer may round what eaves does not, and then its gradients have the error of its out.
        dtypes = {tensor.dtype for each in (actual, expected) for tensor in each.tensors.values()}
        tolerance = max(_TOLERANCE.get(dtype, 0.0) for dtype in dtypes)  # integers have to be equal
    for name, wanted in expected.tensors.items():
        found = actual.tensors[name]
        if found.shape != wanted.shape:
            return f"wrong result: {name} is {list(found.shape)}, {expected.provider}'s is {list(wanted.shape)}"
        sizes = _sizes(found, wanted)
        if not sizes.off <= tolerance * sizes.largest:  # so written, NaN is a difference
            return (
                f"wrong result: {name} is off by {sizes.off:.3g} from {expected.provider}'s, "
                f"at most {sizes.largest:.3g} large"
            )
        # The gradient of a loss has one large element in each row, and half of its sum in the many small ones.
        if not sizes.sum_off <= tolerance * sizes.sum:
            return (
                f"wrong result: {name} is off by {sizes.sum_off:.3g} from {expected.provider}'s in all, "
                f"which is {sizes.sum:.3g} in all"
            )
    return ""


class _Sizes(NamedTuple):
    """Of absolute values: what was wanted, and how far what was found is off."""

    largest: float
    off: float
    sum: float
    sum_off: float


def _sizes(found: Tensor, wanted: Tensor) -> _Sizes:
    largest, off, total, total_off = torch.zeros(4, dtype=torch.float64, device=wanted.device).unbind()
    found, wanted = found.reshape(-1), wanted.reshape(-1)
    for begin in range(0, wanted.numel(), _PIECE_ELEMENTS):
        piece = slice(begin, begin + _PIECE_ELEMENTS)
        exact = wanted[piece].double()
        difference = (found[piece].double() - exact).abs_()
        exact = exact.abs_()
        largest, off = torch.maximum(largest, exact.max()), torch.maximum(off, difference.max())
        total, total_off = total + exact.sum(), total_off + difference.sum()
    return _Sizes(float(largest), float(off), float(total), float(total_off))
