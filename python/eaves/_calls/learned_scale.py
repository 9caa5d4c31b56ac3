"""A scale of the logits that is a tensor and has a gradient.

The gradient needs no kernel. For logits s (W x + b), ds = (<x, dx> + <b, db>) / s. A call in 16 bits passes the value
of s on and divides by it; any other call takes s x and s b in the place of x and b, and reads no value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eaves._torch.checks import accumulator_dtype, check_beside, is_distributed, name_of, number_of
from eaves._torch.options import RANGES, RESULT_DTYPES, shape_of
from eaves._torch.transforms import is_exporting


def _times(x: Tensor, scale: Tensor) -> Tensor:
    product = x * scale
    # torch.compile of PyTorch 2.11 takes the result of a `to` that changes nothing for a tensor without a gradient. An
    # integer tensor stays one, and the call refuses it.
    return product if product.dtype == x.dtype else product.to(x.dtype)


class _Scaled(torch.autograd.Function):
    """x, s -> s x. With the value of s the result is x, because the call multiplies by that value."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scale: Tensor, value: float | None) -> Tensor:
        return _times(x, scale) if value is None else x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float | None], output: Tensor) -> None:
        x, scale, ctx.value = inputs
        ctx.save_for_backward(x, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, scale = ctx.saved_tensors
        grad_x, grad_scale = None, None
        if ctx.needs_input_grad[0]:
            grad_x = grad * scale if ctx.value is None else grad
        if ctx.needs_input_grad[1]:
            # Rows that do not count may hold anything, NaN for instance.
            products = (x.to(accumulator_dtype(x.dtype)) * grad).masked_fill(grad == 0, 0)
            grad_scale = (products.sum() / (1 if ctx.value is None else ctx.value)).to(scale.dtype)
        return grad_x, grad_scale, None


def _scaled(x: Tensor, scale: Tensor, value: float | None) -> Tensor:
    if is_exporting():  # a program would keep only the forward of the Function
        return _times(x, scale)
    return _Scaled.apply(x, scale, value)  # type: ignore[no-untyped-call,no-any-return]


def reads_value(call: Any) -> bool:
    """Whether a call with a tensor as its scale needs the scale's value. A call in 16 bits does, because s x would be
    rounded once more."""
    return call.hidden.dtype in (torch.float16, torch.bfloat16)


def with_learned_scale(call: Any) -> Any:
    """A call of linear_cross_entropy with a number or None in the place of its scale, which is a tensor."""
    op, hidden, bias, scale = call.op, call.hidden, call.bias, call.scale
    if call.group is not None or is_distributed(call.head):
        raise NotImplementedError(
            f"{op}: scale is a tensor, expected a number over ranks; multiply input by a learned scale"
        )
    check_beside(op, "scale", scale, "hidden", hidden)
    if not scale.is_floating_point() or scale.numel() != 1:
        found = f"shape {shape_of(scale)} and dtype {name_of(scale.dtype)}"
        raise ValueError(f"{op}: scale has {found}, expected one floating-point number")
    value, scale = None, scale.reshape(())
    if reads_value(call):
        if is_exporting():
            raise NotImplementedError(
                f"{op}: scale is a tensor, but a call in {name_of(hidden.dtype)} reads its value, and torch.export "
                "does not know it; pass input in float32, or multiply input by scale"
            )
        if hidden.is_cuda and torch.cuda.is_current_stream_capturing():
            raise NotImplementedError(
                f"{op}: scale is a tensor, but a call in {name_of(hidden.dtype)} waits for its value, and a CUDA "
                "graph cannot wait; pass input in float32, or multiply input by scale"
            )
        value = number_of(op, "scale", scale.item(), *RANGES["scale"])
    elif bias is not None and bias.dtype in RESULT_DTYPES:
        bias = bias.to(hidden.dtype)
    hidden, bias = (None if each is None else _scaled(each, scale, value) for each in (hidden, bias))
    return call._replace(hidden=hidden, bias=bias, scale=value)
