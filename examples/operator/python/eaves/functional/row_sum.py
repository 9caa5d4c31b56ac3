"""row_sum for torch tensors."""

from typing import Any

import torch
from torch import Tensor

from eaves._torch.checks import check_tensor
from eaves._torch.operator import call, dispatch
from eaves._torch.registration import batch_first, refuse_lost_derivatives, register_fake, register_vmap

_forward = torch.ops.eaves.row_sum_forward.default


def row_sum(x: Tensor) -> Tensor:
    """The sum over the last axis of x: at least one axis, a floating-point dtype. Raises ValueError for any other.

    Example:
        >>> row_sum(torch.ones(2, 3))
        tensor([3., 3.])
    """
    check_tensor("row_sum", "x", x)
    if x.dim() == 0:
        raise ValueError("row_sum: x has no axes, expected at least one")
    result: Tensor = dispatch("row_sum", (x,), _RowSum, _forward, x)
    return result


class _RowSum(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        result: Tensor = call("row_sum", _forward, x)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.set_materialize_grads(False)  # a missing gradient stays missing
        ctx.shape = inputs[0].shape

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None) -> Tensor | None:
        return None if grad_out is None else grad_out.unsqueeze(-1).expand(ctx.shape)


refuse_lost_derivatives("row_sum", _forward)


@register_fake("row_sum_forward")
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:-1])


@register_vmap("row_sum_forward")
def _(info: Any, in_dims: tuple[int | None], x: Tensor) -> tuple[Tensor, int]:
    (x,) = batch_first(info, in_dims, x)
    return _forward(x), 0
