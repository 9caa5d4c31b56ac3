"""The derivatives of logsumexp, its fake implementations and its batching rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eaves._torch.checks import accumulator_dtype
from eaves._torch.operator import call, dispatch, takes
from eaves._torch.registration import (
    batch_first,
    give_derivative,
    refuse_lost_derivatives,
    register_fake,
    register_vmap,
)

_forward = torch.ops.eaves.logsumexp_forward.default
_forward_lse = torch.ops.eaves.logsumexp_forward_lse.default
_backward = torch.ops.eaves.logsumexp_backward.default


def computed(x: Tensor, axes: Sequence[int], keepdim: bool, dtype: torch.dtype) -> Tensor:
    result = dispatch("logsumexp", (x,), _Logsumexp, _forward, x, axes, keepdim, dtype)
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out


@takes("x", "axes", "keepdim", "dtype")
class _Logsumexp(torch.autograd.Function):
    """x -> (out, lse). lse is two numbers, [rows..., 2]: near 1e4 one float32 is off by 5e-4, and the gradient would
    have that relative error."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return call("logsumexp", _forward_lse, *arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, ctx.axes, ctx.keepdim, _ = inputs
        _, lse = output
        ctx.set_materialize_grads(False)  # or each backward would fill a tensor of zeros for lse
        ctx.mark_non_differentiable(lse)
        ctx.save_for_backward(x, lse)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, *_: None) -> tuple[Tensor | None, None, None, None]:
        if grad_out is None:
            return None, None, None, None
        x, lse = ctx.saved_tensors
        return _gradient(grad_out, x, lse, ctx.axes, ctx.keepdim), None, None, None


def _gradient(grad_out: Tensor, x: Tensor, lse: Tensor, axes: Sequence[int], keepdim: bool) -> Tensor:
    given = (grad_out, x, lse.detach(), axes, keepdim)
    return dispatch("logsumexp", (grad_out, x), _LogsumexpGradient, _backward, *given)  # type: ignore[no-any-return]


@takes("grad_out", "x", "lse", "axes", "keepdim")
class _LogsumexpGradient(torch.autograd.Function):
    """grad_x = grad_out * p with p = exp(x - lse), differentiable in grad_out and in x (lse is a function of x).

    Second derivatives are rare, so PyTorch's operators compute them, around the one kernel that computes p.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return call("logsumexp", _backward, *arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        grad_out, x, lse, ctx.axes, ctx.keepdim = inputs
        ctx.save_for_backward(grad_out, x, lse)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_out, x, lse = ctx.saved_tensors
        p = _gradient(torch.ones_like(grad_out), x, lse, ctx.axes, ctx.keepdim)
        weighted = v.to(accumulator_dtype(x.dtype)) * p
        total = weighted.sum(tuple(ctx.axes) or None, keepdim=True)
        rows = grad_out if ctx.keepdim else grad_out.reshape(total.shape)
        grad_x = rows * (weighted - p * total)
        return total.reshape(grad_out.shape).to(grad_out.dtype), grad_x.to(x.dtype), None, None, None


def _row_shape(x: Tensor, axes: Sequence[int], keepdim: bool) -> list[int]:
    reduced = {axis % max(x.dim(), 1) for axis in axes} if axes else set(range(x.dim()))
    return [1 if axis in reduced else size for axis, size in enumerate(x.shape) if keepdim or axis not in reduced]


give_derivative("logsumexp", _forward, computed, "x")
refuse_lost_derivatives("logsumexp", _forward_lse, _backward)


# Fake implementations: tracers such as torch.compile ask for the shapes, strides and dtypes of the outputs.


@register_fake("logsumexp_forward")
def _(x: Tensor, axes: Sequence[int], keepdim: bool, dtype: torch.dtype) -> Tensor:
    return x.new_empty(_row_shape(x, axes, keepdim), dtype=dtype)


@register_fake("logsumexp_forward_lse")
def _(x: Tensor, axes: Sequence[int], keepdim: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    out = x.new_empty(_row_shape(x, axes, keepdim), dtype=dtype)
    return out, x.new_empty([*_row_shape(x, axes, False), 2], dtype=accumulator_dtype(x.dtype))


@register_fake("logsumexp_backward")
def _(grad_out: Tensor, x: Tensor, lse: Tensor, axes: Sequence[int], keepdim: bool) -> Tensor:
    return torch.empty_like(x)


# Batching rules: the batch becomes the first axis of every tensor, so that one call computes the whole batch.


def _batched_axes(x: Tensor, axes: Sequence[int]) -> tuple[Tensor, list[int]]:
    """x, whose first axis is the batch, and the `axes` of a sample as axes of x. A sample without axes gets one."""
    rank = x.dim() - 1
    if rank == 0:
        return x.unsqueeze(1), [1]
    return x, [axis % rank + 1 for axis in (axes or range(rank))]


@register_vmap("logsumexp_forward")
def _(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensor, int]:
    return _in_one(info, in_dims, _forward, *arguments), 0


@register_vmap("logsumexp_forward_lse")
def _(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    return _in_one(info, in_dims, _forward_lse, *arguments), (0, 0)


def _in_one(info: Any, in_dims: tuple[int | None, ...], overload: Any, *arguments: Any) -> Any:
    x, axes, keepdim, dtype = arguments
    (x,) = batch_first(info, in_dims, x)
    rows, batched_axes = _batched_axes(x, axes)
    return overload(rows, batched_axes, keepdim and x.dim() > 1, dtype)


@register_vmap("logsumexp_backward")
def _(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensor, int]:
    *tensors, axes, keepdim = arguments
    grad_out, x, lse = batch_first(info, in_dims, *tensors)
    rows, batched_axes = _batched_axes(x, axes)
    return _backward(grad_out, rows, lse, batched_axes, keepdim and x.dim() > 1).reshape(x.shape), 0
