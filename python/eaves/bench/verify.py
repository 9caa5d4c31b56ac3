"""Is a provider computing the same thing? A loose comparison with eaves before anything is timed.

It finds a wrong axis, a missing factor, a gradient that is not there. Accuracy is another question, and the tests of
eaves answer it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eaves.bench.benchmark import Forward, Inputs, Mode

# Of the largest value expected. A result of about 12 that is rounded to bfloat16 is off by up to 0.03, and so is the
# factor exp(x - out) of a gradient that is computed from it.
_TOLERANCE = {torch.bfloat16: 0.1, torch.float16: 0.02, torch.float32: 1e-3, torch.float64: 1e-6}

# Compared piece by piece, so that the differences need little memory beside tensors of gigabytes.
_PIECE_ELEMENTS = 2**24


@dataclass(frozen=True)
class Results:
    provider: str
    tensors: dict[str, Tensor]
    """out and, where the mode has a backward, the gradients by the place of their argument."""


def results(provider: str, mode: Mode, forward: Forward, inputs: Inputs) -> Results:
    """What a provider computes of one set of inputs."""
    out = forward(*inputs.arguments)
    tensors = {"out": out.detach()}
    if mode != "fwd":
        gradients = torch.autograd.grad(out, inputs.differentiable, inputs.grad_out)
        tensors |= {f"gradient {i}": gradient for i, gradient in enumerate(gradients)}
    return Results(provider, tensors)


def difference(actual: Results, expected: Results) -> str:
    """What is wrong with the results, in one line; nothing where they agree."""
    # Of the coarsest dtype: a peer may round what eaves does not, and then its gradients have the error of its out.
    dtypes = {tensor.dtype for each in (actual, expected) for tensor in each.tensors.values()}
    tolerance = max(_TOLERANCE.get(dtype, 0.0) for dtype in dtypes)  # integers have to be equal
    for name, wanted in expected.tensors.items():
        found = actual.tensors[name]
        if found.shape != wanted.shape:
            return f"wrong result: {name} is {list(found.shape)}, {expected.provider}'s is {list(wanted.shape)}"
        largest, off = _largest_and_off(found, wanted)
        if not off <= tolerance * largest:  # so written, NaN is a difference
            return f"wrong result: {name} is off by {off:.3g} from {expected.provider}'s, at most {largest:.3g} large"
    return ""


def _largest_and_off(found: Tensor, wanted: Tensor) -> tuple[float, float]:
    """The largest absolute value wanted, and the largest absolute difference."""
    largest = torch.zeros((), dtype=torch.float64, device=wanted.device)
    off = torch.zeros_like(largest)
    found, wanted = found.reshape(-1), wanted.reshape(-1)
    for begin in range(0, wanted.numel(), _PIECE_ELEMENTS):
        piece = slice(begin, begin + _PIECE_ELEMENTS)
        exact = wanted[piece].double()
        largest = torch.maximum(largest, exact.abs().max())
        off = torch.maximum(off, (found[piece].double() - exact).abs().max())
    return float(largest), float(off)
