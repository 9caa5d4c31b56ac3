"""linear_cross_entropy for the tracers and transforms of torch: fake implementations and batching rules of the
operators that _autograd/linear_cross_entropy.py calls."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from eaves._torch.checks import accumulator_dtype
from eaves._torch.outputs import DIVISOR, NONE, empty_outputs
from eaves._torch.registration import of_each, record_of, register_fake, register_vmap
from eaves._torch.samples import divisors_of, in_one, reduce_samples, row_gradients

_forward = torch.ops.eaves.linear_cross_entropy_forward.default
_backward = torch.ops.eaves.linear_cross_entropy_backward.default

# The gradients that a call computes, as the bits of python/csrc/linear_cross_entropy.cpp, in the order in which the
# extension returns them.
OF_HIDDEN, OF_HEAD, OF_BIAS = GRADIENTS = (1, 2, 4)
WIDE_HEAD = 8  # an option, not a gradient: the head's gradient has the dtype of the loss

Forward, Backward = record_of(_forward), record_of(_backward)
_ForwardBackward = record_of(torch.ops.eaves.linear_cross_entropy_forward_backward.default)

# The tensors among the arguments of a call, and its options, in the order of all operators.
TENSORS = slice(Forward._fields.index("ignore_index"))
OPTIONS = slice(TENSORS.stop, Forward._fields.index("outputs"))
options_of = attrgetter(*Forward._fields[OPTIONS])


def in_places(computed: Sequence[Tensor], bits: int) -> list[Tensor | None]:
    """The three gradients in their order, None for a gradient that `bits` does not name. `computed` has only the named
    ones."""
    remaining = iter(computed)
    return [next(remaining) if bits & bit else None for bit in GRADIENTS]


# Fake implementations: tracers such as torch.compile ask for the shapes, strides and dtypes of the outputs.


def empty_gradients(given: Any) -> list[Tensor]:
    hidden, head, gradients = given.hidden, given.head, given.gradients
    made = []
    if gradients & OF_HIDDEN:
        made.append(torch.empty_like(hidden))
    if gradients & OF_HEAD:
        dtype = accumulator_dtype(hidden.dtype) if gradients & WIDE_HEAD else head.dtype
        made.append(head.new_empty(head.shape, dtype=dtype))
    if gradients & OF_BIAS:
        made.append(empty_bias_gradient(hidden, given.bias))
    return made


def empty_bias_gradient(hidden: Tensor, bias: Tensor | None) -> Tensor:
    dtype = accumulator_dtype(hidden.dtype)
    if bias is None:
        return hidden.new_empty(0, dtype=dtype)
    return bias.new_empty(bias.shape, dtype=hidden.dtype if bias.dtype == hidden.dtype else dtype)


def empty_backward(given: Any) -> tuple[Tensor, ...]:
    """The three gradients. A gradient that is not computed has no elements."""
    made = in_places(empty_gradients(given), given.gradients)
    return tuple(given.hidden.new_empty(0) if each is None else each for each in made)


@register_fake("linear_cross_entropy_forward")
def _(*arguments: Any) -> list[Tensor]:
    given = Forward(*arguments)
    return empty_outputs(given.hidden, list(given.hidden.shape[:-1]), given.reduction, given.outputs)


@register_fake("linear_cross_entropy_forward_backward")
def _(*arguments: Any) -> list[Tensor]:
    given = _ForwardBackward(*arguments)
    made = empty_outputs(given.hidden, list(given.hidden.shape[:-1]), given.reduction, given.outputs)
    return made + empty_gradients(given)


@register_fake("linear_cross_entropy_backward")
def _(*arguments: Any) -> tuple[Tensor, ...]:
    return empty_backward(Backward(*arguments))


@register_fake("linear_cross_entropy_backward_kept")
def _(kept: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return empty_backward(Backward(*arguments))


@register_fake("linear_cross_entropy_backward_accumulate")
def _(grad_head: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    given = Backward(*arguments[: len(Backward._fields)])  # without `kept`
    grad_hidden = torch.empty_like(given.hidden) if given.gradients & OF_HIDDEN else given.hidden.new_empty(0)
    grad_bias = empty_bias_gradient(given.hidden, given.bias)
    return grad_hidden, grad_bias if given.gradients & OF_BIAS else grad_bias.new_empty(0)


@register_fake("linear_cross_entropy_rescale")
def _(*_: Any) -> None:
    pass


# Batching rules: if only the rows have a batch, it becomes their first axis, and their losses are reduced for each
# sample. If each sample has its own head, or its own gradient of the head, each sample takes a call.


def _have_own_head(axes: Any) -> bool:
    return any(axis is not None for axis in (axes.head, axes.bias, axes.class_weight))


def _in_one(info: Any, given: Any, axes: Any) -> Any:
    """in_one, with contiguous probabilities, so that their rows have one stride."""
    of_all = in_one(info, given, axes)
    targets = of_all.targets
    return of_all._replace(targets=targets.contiguous() if targets.is_floating_point() else targets)


@register_vmap("linear_cross_entropy_forward")
def _(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[list[Tensor], list[int]]:
    given, axes = Forward(*arguments), Forward(*in_dims)
    if _have_own_head(axes):
        return of_each(_forward, info, in_dims, *arguments)
    of_all = _in_one(info, given, axes)
    results = _forward(*of_all._replace(normalizer=None, reduction=NONE, outputs=given.outputs & ~DIVISOR))
    reduced = reduce_samples(list(results), given.outputs, given.reduction, divisors_of(of_all, results[0]))
    return reduced, [0] * len(reduced)


@register_vmap("linear_cross_entropy_backward")
def _(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    given, axes = Backward(*arguments), Backward(*in_dims)
    if given.gradients & (OF_HEAD | OF_BIAS) or _have_own_head(axes):
        return of_each(_backward, info, in_dims, *arguments)
    of_all = _in_one(info, given, axes)
    changed = of_all._replace(grad_loss=row_gradients(of_all), divisor=None, reduction=NONE)
    grad_hidden, *absent = _backward(*changed)
    return (grad_hidden, *(each.expand(info.batch_size, 0) for each in absent)), (0, 0, 0)
