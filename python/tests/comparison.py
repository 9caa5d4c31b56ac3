"""How far a result may be from the float64 oracle, and the oracles.

The contract is that of docs/numerics.md; testing/tolerance.h says the same for the C++ tests. Nothing here is tuned to
an implementation, and no test has a tolerance of its own.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

FLOATING_POINT = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
PROMOTED = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)

_MANTISSA_BITS = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23, torch.float64: 52}
_SMALLEST_EXPONENT = {torch.float16: -14, torch.bfloat16: -126, torch.float32: -126, torch.float64: -1022}


def unit_in_last_place(dtype: torch.dtype, value: Tensor) -> Tensor:
    """Distance between neighbouring numbers of `dtype` around `value`."""
    exponent = torch.frexp(value.nan_to_num(0.0, 0.0, 0.0)).exponent.double() - 1
    return torch.exp2(exponent.clamp(min=_SMALLEST_EXPONENT[dtype]) - _MANTISSA_BITS[dtype])


def allowed_error(dtype: torch.dtype, exact: Tensor, scale: Tensor) -> Tensor:
    """The bound on |result - exact|. `scale` is the size of the row that the result comes from.

    float32            2e-6 of the scale
    float16, bfloat16  half a unit in the last place of the exact value, and 1e-6
    float64            1e-13 of the scale: used for gradient checks, not part of the contract
    """
    if dtype == torch.float32:
        return 2e-6 * scale
    if dtype == torch.float64:
        return 1e-13 * scale
    return 0.5 * unit_in_last_place(dtype, exact) + 1e-6


class Bound(NamedTuple):
    """What a result has to be, in float64, and how far from it it may be."""

    exact: Tensor
    error: Tensor


def differences(result: Tensor, bound: Bound) -> str:
    """Empty when `result` is within the bound; otherwise where it is furthest from it, and by how much."""
    if result.shape != bound.exact.shape:
        return f"shape {tuple(result.shape)}, expected {tuple(bound.exact.shape)}"
    actual, exact = result.detach().cpu().double(), bound.exact
    unit = unit_in_last_place(result.dtype, exact)
    distance = (actual - exact).abs()
    overflows = actual.isinf() & (exact.abs() >= torch.finfo(result.dtype).max + 0.5 * unit)
    # `<=` is false for a NaN, and for an infinity whose distance to itself is NaN.
    right = (distance <= bound.error) | (actual == exact) | (actual.isnan() & exact.isnan()) | overflows
    if right.all():
        return ""
    wrong = (~right).nonzero()
    excess = (distance - bound.error)[~right].nan_to_num(math.inf, math.inf)
    index = tuple(wrong[excess.argmax()].tolist()) if exact.dim() else ()
    return (
        f"{len(wrong)} of {exact.numel()} differ, [{', '.join(map(str, index))}] most: "
        f"expected {exact[index].item():.9g}, actual {actual[index].item():.9g}, "
        f"distance {distance[index].item():.3g} = {(distance / unit)[index].item():.2f} units in the last place "
        f"of {result.dtype}, allowed {bound.error[index].item():.3g}"
    )


def assert_within(result: Tensor, bound: Bound, what: str = "") -> None:
    """Fails with index, expected, actual and distance where `result` is beyond the bound."""
    text = differences(result, bound)
    assert not text, f"{what}: {text}" if what else text


def assert_agree(actual: Tensor, expected: Tensor) -> None:
    """Two ways to one result, which may add up in another order: within what torch's own tests allow for its dtype.

    Whether the result is right, the oracles judge.
    """
    torch.testing.assert_close(actual, expected)


def assert_rounded(result: Tensor, exact: Tensor, roundings: int) -> None:
    """What torch's own operators made of several rounded numbers, the largest of them around 1."""
    allowed = roundings * 0.5 * unit_in_last_place(result.dtype, torch.tensor(1.0, dtype=torch.float64))
    assert_within(result, Bound(exact.cpu(), allowed.expand_as(exact)))


# ------------------------------------------------------------------------------------------------------------ logsumexp


class LogsumexpOracle:
    """logsumexp of `x` over `dims` and its gradient, by the formula, in float64.

    `dims` as in eaves.logsumexp: an int or several, none means all.
    """

    def __init__(self, x: Tensor, dims: int | Sequence[int], keepdim: bool = False) -> None:
        self.x = x.detach().cpu().double()
        # The backward reads lse in float32, in float64 where x is float64.
        self.lse_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        rank = max(self.x.dim(), 1)
        named = [dims] if isinstance(dims, int) else list(dims)
        self.axes = sorted(axis % rank for axis in named) or list(range(rank))
        self.kept_shape = [1 if axis in self.axes else size for axis, size in enumerate(self.x.shape)]
        self.shape = [
            1 if axis in self.axes else size
            for axis, size in enumerate(self.x.shape)
            if keepdim or axis not in self.axes
        ]
        if self.x.numel() == 0:
            largest = torch.full(self.kept_shape, -math.inf, dtype=torch.float64)
        else:
            largest = self.x.nan_to_num(-math.inf, math.inf, -math.inf).amax(self.axes, keepdim=True)
        # An infinite maximum is left out of the difference: exp of the element itself is 0, infinity or NaN, as it
        # should be.
        anchor = torch.where(largest.isfinite(), largest, torch.zeros_like(largest))
        self.lse = (self.x - anchor).exp().sum(self.axes, keepdim=True).log() + anchor
        # Next to zero, lse is the logarithm of a sum next to 1: an absolute error of 6e-8 in float32, however small it
        # is. Hence 1/16.
        self.scale = torch.maximum(self.lse.abs(), anchor.abs()).clamp(min=1 / 16)

    def forward(self, dtype: torch.dtype) -> Bound:
        """The bound on a result of `dtype`."""
        return Bound(self.lse.view(self.shape), allowed_error(dtype, self.lse, self.scale).view(self.shape))

    def backward(self, grad_out: Tensor, dtype: torch.dtype) -> Bound:
        """The bound on a gradient of `dtype`, whose upstream gradient is `grad_out`.

        The backward's own bound, and what the forward's bound on lse lets through: the gradient is g * exp(x - lse), so
        an absolute error of lse is a relative error of each gradient.
        """
        upstream = grad_out.detach().cpu().double().reshape(self.kept_shape)
        exact = upstream * (self.x - self.lse).exp()
        exact = torch.where(self.lse == -math.inf, torch.zeros_like(exact), exact)
        row_scale = exact.abs() if exact.numel() == 0 else exact.abs().amax(self.axes, keepdim=True)
        of_lse = allowed_error(self.lse_dtype, self.lse, self.scale)
        return Bound(exact, allowed_error(dtype, exact, row_scale) + exact.abs() * torch.expm1(of_lse))
