"""The gradient of cross_entropy. In place it is in in_place.py; fake implementations and batching rules are in
_torch/cross_entropy_rules.py, the operators over ranks in _parallel/cross_entropy.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from eaves._parallel import cross_entropy as ranks
from eaves._parallel.shard import ShardArguments
from eaves._torch import cross_entropy_rules  # noqa: F401  # registers them
from eaves._torch.operator import apply, binds_quickly, call, dispatch, gradients_of, run_plainly
from eaves._torch.outputs import MEAN, for_backward, in_order, keep_outputs, kept_for_backward, upstream_of
from eaves._torch.registration import give_derivative, refuse_lost_derivatives

forward = torch.ops.eaves.cross_entropy_forward.default
_backward = torch.ops.eaves.cross_entropy_backward.default

OP = "cross_entropy"
_NO_SECOND = f"{OP}: there is no second derivative; use torch.nn.functional.cross_entropy where one is needed"


# ------------------------------------------------------------------------------------------------------------ autograd


def run_forward(
    op: str, arguments: tuple[Any, ...], shard: ShardArguments | None, number_tensor: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The loss and its outputs, and of a shard its Place. `op` is the function that the user called."""
    if shard is None:
        return tuple(call(op, forward, *arguments, number_tensor=number_tensor))
    return tuple(call(op, ranks.forward, *arguments, *shard, number_tensor=number_tensor))


@binds_quickly
class CrossEntropy(torch.autograd.Function):
    """input -> the loss, and the outputs that the bits `computed` name, of which the user gets those of `wanted`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        input: Tensor,
        target: Tensor,
        weight: Tensor | None,
        row_weight: Tensor | None,
        normalizer: Tensor | None,
        axis: int,
        ignore_index: int,
        mode: int,
        numbers: Sequence[float],
        computed: int,
        wanted: int,
        number_tensor: Tensor | None,
        shard: ShardArguments | None,
        op: str,
    ) -> tuple[Tensor, ...]:
        arguments = (input, target, weight, row_weight, normalizer, axis, ignore_index, mode, numbers, computed)
        return run_forward(op, arguments, shard, number_tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.options = inputs[5:9]
        computed, wanted, number_tensor, shard, ctx.op = inputs[9:]
        place = None if shard is None else output[-1]
        ctx.save_for_backward(*inputs[:4], *keep_outputs(ctx, output, computed, wanted), number_tensor, place)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        nothing = (None,) * 13
        upstream = upstream_of(ctx, grads)
        if not upstream:
            return None, *nothing
        input, target, weight, row_weight, *saved, number_tensor, place = ctx.saved_tensors
        axis, ignore_index, mode, numbers = ctx.options
        upstream, saved = for_backward(upstream, saved, mode)
        if place is not None:
            arguments = (*upstream, input, target, weight, row_weight, *saved, *ctx.options, place)
            differentiable = [tensor for tensor in (input, *upstream) if tensor is not None]
            (grad_input,) = gradients_of(
                lambda: (call(ctx.op, ranks.backward, *arguments, number_tensor=number_tensor),), _NO_SECOND,
                differentiable,
            )  # fmt: skip
            return grad_input, *nothing
        grad_input = dispatch(
            OP, [tensor for tensor in (input, *upstream) if tensor is not None], _Gradient, _backward,
            *upstream, input, target, weight, row_weight, *saved, axis, ignore_index, mode, numbers,
            number_tensor=number_tensor,
        )  # fmt: skip
        return grad_input, *nothing


_PLAIN = (-1, -100, MEAN, ())  # class axis, ignore_index, reduction and numbers of a call without options
_KEPT_PLAINLY = kept_for_backward(0, MEAN, False)


class PlainMean(torch.autograd.Function):
    """CrossEntropy of a call without options and outside of torch.func. There is less of it to run, which small calls
    show."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, target: Tensor) -> Tensor:
        loss, lse, divisor = run_plainly(forward, input, target, None, None, None, *_PLAIN, _KEPT_PLAINLY)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, target, lse, divisor)
        result: Tensor = loss
        return result

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None) -> tuple[Tensor | None, None]:
        if grad_loss is None:
            return None, None
        input, target, lse, divisor = ctx.saved_tensors
        tensors = (grad_loss, None, None, input, target, None, None, lse, None, None, divisor)
        return dispatch(OP, (input, grad_loss), _Gradient, _backward, *tensors, *_PLAIN), None


@binds_quickly
class _Gradient(torch.autograd.Function):
    """The gradient, which has no derivative itself."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        grad_loss: Tensor,
        grad_lse: Tensor | None,
        grad_entropy: Tensor | None,
        input: Tensor,
        target: Tensor,
        weight: Tensor | None,
        row_weight: Tensor | None,
        lse: Tensor,
        entropy: Tensor | None,
        target_mass: Tensor | None,
        divisor: Tensor | None,
        axis: int,
        ignore_index: int,
        mode: int,
        numbers: Sequence[float],
        number_tensor: Tensor | None,
    ) -> Tensor:
        result: Tensor = call(
            OP, _backward, grad_loss, grad_lse, grad_entropy, input, target, weight, row_weight, lse, entropy,
            target_mass, divisor, axis, ignore_index, mode, numbers, number_tensor=number_tensor,
        )  # fmt: skip
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise NotImplementedError(_NO_SECOND)


def _differentiable(*arguments: Any, number_tensor: Tensor | None = None) -> list[Tensor]:
    """cross_entropy_forward by its autograd.Function."""
    *of_forward, wanted = arguments
    _, target, weight, mode = *of_forward[:3], of_forward[7]
    computed = kept_for_backward(wanted, mode, target.is_floating_point() or weight is not None)
    outputs = apply(OP, CrossEntropy, *of_forward, computed, wanted, number_tensor, None, OP)
    return in_order(outputs, computed, wanted)


give_derivative(OP, forward, _differentiable, "logits")
refuse_lost_derivatives(OP, _backward)
