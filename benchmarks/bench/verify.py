"""Checks that a provider computes the same function: a loose comparison with eaves before anything is timed.

It finds a wrong axis, a missing factor, a missing gradient, or a gradient that has only its largest elements. It does
not judge accuracy; the tests of eaves do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .benchmark import Forward, Inputs, Row

# Relative to the largest expected value, and to the sum of the absolute values. A result of about 12 rounded to
# bfloat16 is off by up to 0.03, and so is the factor exp(x - out) of a gradient that is computed from it.
_TOLERANCE = {torch.bfloat16: 0.1, torch.float16: 0.02, torch.float32: 1e-3, torch.float64: 1e-6}

# Tensors are compared piece by piece, because whole differences of gigabytes need too much memory.
_PIECE_ELEMENTS = 2**24

Results = dict[str, Tensor]
"""out and, where the mode has a backward, the gradients by the place of their argument."""


def results(row: Row, forward: Forward, inputs: Inputs) -> Results:
    """The results of a provider for one set of inputs. An in-place call gets copies, because it may overwrite them."""
    if row.in_place:
        inputs = inputs.remade()
    out = forward(*inputs.arguments)
    tensors = {"out": out.detach()}
    if row.mode != "fwd":
        gradients = torch.autograd.grad(out, inputs.differentiable, inputs.grad_out)
        tensors |= {f"gradient {i}": gradient for i, gradient in enumerate(gradients)}
    return tensors


def difference(actual: Results, expected: Results, tolerance: float | None = None) -> str:
    """The difference of the results, in one line; nothing if they agree."""
    if tolerance is None:
        # The tolerance of the coarsest dtype: a peer may round when eaves does not, and its gradients then have that
        # error.
        dtypes = {tensor.dtype for each in (actual, expected) for tensor in each.values()}
        tolerance = max(_TOLERANCE.get(dtype, 0.0) for dtype in dtypes)  # integers have to be equal
    for name, wanted in expected.items():
        found = actual[name]
        if found.shape != wanted.shape:
            return f"wrong result: {name} has shape {list(found.shape)}, expected {list(wanted.shape)} (as from eaves)"
        largest, off, total, total_off = _sizes(found.reshape(-1), wanted.reshape(-1))
        if not off <= tolerance * largest:  # in this form NaN is a difference
            return f"wrong result: {name} differs from eaves by {off:.3g}, its largest element is {largest:.3g}"
        # The gradient of a loss has one large element in each row, and half of its sum in the many small ones.
        if not total_off <= tolerance * total:
            return f"wrong result: {name} differs from eaves by {total_off:.3g} in sum, its sum is {total:.3g}"
    return ""


def _sizes(found: Tensor, wanted: Tensor) -> list[float]:
    """The largest absolute value wanted, the largest difference, and the sums of both."""
    sizes = torch.zeros(4, dtype=torch.float64, device=wanted.device)
    for begin in range(0, wanted.numel(), _PIECE_ELEMENTS):
        piece = slice(begin, begin + _PIECE_ELEMENTS)
        exact = wanted[piece].double()
        off = (found[piece].double() - exact).abs_()
        exact = exact.abs_()
        sizes[:2] = torch.maximum(sizes[:2], torch.stack([exact.max(), off.max()]))
        sizes[2:] += torch.stack([exact.sum(), off.sum()])
    return sizes.tolist()
