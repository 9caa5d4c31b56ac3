"""linear_cross_entropy for the tracers and transforms of torch: fake implementations and batching rules of the
operators that _autograd/linear_cross_entropy.py calls, and the names of their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from eaves._torch.checks import accumulator_dtype
from eaves._torch.outputs import DIVISOR, MEAN, NONE, empty_outputs
from eaves._torch.registration import batch_first, each_of_batch, register_fake, register_vmap
from eaves._torch.samples import divisors_of, reduce_samples, row_gradients

_forward = torch.ops.eaves.linear_cross_entropy_forward.default
_backward = torch.ops.eaves.linear_cross_entropy_backward.default

# The gradients that a call computes, as bits; those of python/csrc/linear_cross_entropy.cpp, in the order in which the
# extension gives them.
OF_INPUT, OF_WEIGHT, OF_BIAS = GRADIENTS = (1, 2, 4)
WIDE_WEIGHT = 8  # no gradient: that of the weight in the dtype of the loss


class Options(NamedTuple):
    """What the extension takes behind the tensors, in its order."""

    ignore_index: int
    reduction: int
    numbers: Sequence[float]
    skip_ignored: bool
    workspace_limit: int


class ForwardTensors(NamedTuple):
    """The tensors in front of them; or something of each, its batch axis for instance."""

    hidden: Any
    head: Any
    bias: Any
    targets: Any
    class_weight: Any
    row_weight: Any
    normalizer: Any


class BackwardTensors(NamedTuple):
    grad_loss: Any
    grad_lse: Any
    grad_entropy: Any
    hidden: Any
    head: Any
    bias: Any
    targets: Any
    class_weight: Any
    row_weight: Any
    lse: Any
    entropy: Any
    target_mass: Any
    divisor: Any


def in_places(computed: Sequence[Tensor], bits: int) -> list[Tensor | None]:
    """The gradients that the bits name, which are all there are in `computed`, each in its place."""
    remaining = iter(computed)
    return [next(remaining) if bits & bit else None for bit in GRADIENTS]


# What torch.compile and other tracers ask: shapes, strides and dtypes of the outputs.


_Tensors = TypeVar("_Tensors", ForwardTensors, BackwardTensors)


def by_name(kind: type[_Tensors], arguments: Sequence[Any]) -> tuple[_Tensors, Options, Sequence[Any]]:
    """The tensors of an operator of the extension, the options, and what is behind them."""
    tensors = len(kind._fields)
    options = tensors + len(Options._fields)
    return kind(*arguments[:tensors]), Options(*arguments[tensors:options]), arguments[options:]


def empty_gradients(tensors: ForwardTensors | BackwardTensors, gradients: int) -> list[Tensor]:
    input, linear_weight = tensors.hidden, tensors.head
    made = []
    if gradients & OF_INPUT:
        made.append(torch.empty_like(input))
    if gradients & OF_WEIGHT:
        dtype = accumulator_dtype(input.dtype) if gradients & WIDE_WEIGHT else linear_weight.dtype
        made.append(linear_weight.new_empty(linear_weight.shape, dtype=dtype))
    if gradients & OF_BIAS:
        made.append(empty_bias_gradient(input, tensors.bias))
    return made


def empty_bias_gradient(input: Tensor, linear_bias: Tensor | None) -> Tensor:
    dtype = accumulator_dtype(input.dtype)
    if linear_bias is None:
        return input.new_empty(0, dtype=dtype)
    return linear_bias.new_empty(linear_bias.shape, dtype=input.dtype if linear_bias.dtype == input.dtype else dtype)


@register_fake("linear_cross_entropy_forward")
def _(*arguments: Any) -> list[Tensor]:
    tensors, options, (outputs,) = by_name(ForwardTensors, arguments)
    return empty_outputs(tensors.hidden, list(tensors.hidden.shape[:-1]), options.reduction, outputs)


@register_fake("linear_cross_entropy_forward_backward")
def _(*arguments: Any) -> list[Tensor]:
    tensors, options, (outputs, gradients) = by_name(ForwardTensors, arguments)
    made = empty_outputs(tensors.hidden, list(tensors.hidden.shape[:-1]), options.reduction, outputs)
    return made + empty_gradients(tensors, gradients)


@register_fake("linear_cross_entropy_backward")
def _(*arguments: Any) -> tuple[Tensor, ...]:
    tensors, _, (gradients,) = by_name(BackwardTensors, arguments)
    made = in_places(empty_gradients(tensors, gradients), gradients)
    return tuple(tensors.hidden.new_empty(0) if each is None else each for each in made)


@register_fake("linear_cross_entropy_backward_accumulate")
def _(grad_weight: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    tensors, _, (gradients,) = by_name(BackwardTensors, arguments)
    grad_input = torch.empty_like(tensors.hidden) if gradients & OF_INPUT else tensors.hidden.new_empty(0)
    grad_bias = empty_bias_gradient(tensors.hidden, tensors.bias)
    return grad_input, grad_bias if gradients & OF_BIAS else grad_bias.new_empty(0)


@register_fake("linear_cross_entropy_rescale")
def _(*_: Any) -> None:
    pass


# Batching rules: where only rows have a batch, it becomes their first axis, and their losses are reduced for each
# sample. Where each sample has its own head, or wants its own gradient of one, there is one call for each.


@register_vmap("linear_cross_entropy_forward")
def _(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[list[Tensor], list[int]]:
    tensors, options, (outputs,) = by_name(ForwardTensors, arguments)
    axes, _, _ = by_name(ForwardTensors, in_dims)
    if _have_own_head(axes):
        each = [_forward(*sample) for sample in each_of_batch(info, in_dims, *arguments)]
        stacked = [torch.stack(tensors) for tensors in zip(*each)]
        return stacked, [0] * len(stacked)
    batched = _batched(info, tensors, axes)
    target = batched.targets
    results = _forward(
        *tensors._replace(
            hidden=batched.hidden, targets=_rows_at_one_distance(target), row_weight=_per_row(batched.row_weight),
            normalizer=None,
        ),
        *options._replace(reduction=NONE), outputs & ~DIVISOR,
    )  # fmt: skip
    divisors = None
    if options.reduction == MEAN:
        divisors = divisors_of(
            info.batch_size,
            target,
            tensors.class_weight,
            batched.row_weight,
            batched.normalizer,
            options.ignore_index,
            results[0],
        )
    reduced = reduce_samples(list(results), outputs, options.reduction, divisors)
    return reduced, [0] * len(reduced)


def _have_own_head(axes: ForwardTensors | BackwardTensors) -> bool:
    return any(axis is not None for axis in (axes.head, axes.bias, axes.class_weight))


def _batched(info: Any, tensors: _Tensors, axes: _Tensors) -> _Tensors:
    """Each tensor that is there with the batch as its first axis."""
    kind = type(tensors)
    return kind(
        *(None if tensor is None else batch_first(info, (axis,), tensor)[0] for tensor, axis in zip(tensors, axes))
    )


def _per_row(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.contiguous()


def _rows_at_one_distance(target: Tensor) -> Tensor:
    return target.contiguous() if target.is_floating_point() else target


@register_vmap("linear_cross_entropy_backward")
def _(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    tensors, options, (gradients,) = by_name(BackwardTensors, arguments)
    axes, _, _ = by_name(BackwardTensors, in_dims)
    if gradients & (OF_WEIGHT | OF_BIAS) or _have_own_head(axes):
        each = [_backward(*sample) for sample in each_of_batch(info, in_dims, *arguments)]
        return tuple(torch.stack(computed) for computed in zip(*each)), (0, 0, 0)
    batched = _batched(info, tensors, axes)

    lse = _per_row(batched.lse)
    rows = lse if lse.dim() < batched.hidden.dim() else lse[..., 0]
    divisor = batched.divisor if options.reduction == MEAN else None
    grad_input, *absent = _backward(
        *tensors._replace(
            grad_loss=row_gradients(batched.grad_loss, options.reduction, divisor, rows),
            grad_lse=_per_row(batched.grad_lse),
            grad_entropy=_per_row(batched.grad_entropy),
            hidden=batched.hidden,
            targets=_rows_at_one_distance(batched.targets),
            row_weight=_per_row(batched.row_weight),
            lse=lse,
            entropy=_per_row(batched.entropy),
            target_mass=_per_row(batched.target_mass),
            divisor=None,
        ),
        *options._replace(reduction=NONE),
        gradients,
    )
    return (grad_input, *(each.expand(info.batch_size, 0) for each in absent)), (0, 0, 0)
