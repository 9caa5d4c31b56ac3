"""cross_entropy for the tracers and transforms of torch: fake implementations and batching rules of the operators that
_autograd/cross_entropy.py calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eaves._torch.checks import accumulator_dtype
from eaves._torch.outputs import ARGMAX, DIVISOR, NONE, RETURNED, empty_outputs, pick
from eaves._torch.registration import of_each, record_of, register_fake, register_vmap
from eaves._torch.samples import divisors_of, in_one, reduce_samples, row_gradients

_forward = torch.ops.eaves.cross_entropy_forward.default
_backward = torch.ops.eaves.cross_entropy_backward.default

Forward, Backward = record_of(_forward), record_of(_backward)

# Fake implementations: tracers such as torch.compile ask for the shapes, strides and dtypes of the outputs.


def row_shape(logits: Tensor, axis: int) -> list[int]:
    axis %= logits.dim()
    return [size for index, size in enumerate(logits.shape) if index != axis]


@register_fake("cross_entropy_forward")
def _(*arguments: Any) -> list[Tensor]:
    given = Forward(*arguments)
    return empty_outputs(given.logits, row_shape(given.logits, given.class_axis), given.reduction, given.outputs)


@register_fake("cross_entropy_forward_backward")
def _(*arguments: Any) -> tuple[Tensor, ...]:
    given = Forward(*arguments)  # it takes the arguments of the forward
    logits, outputs = given.logits, given.outputs
    made = empty_outputs(logits, row_shape(logits, given.class_axis), given.reduction, outputs)
    dtype = accumulator_dtype(logits.dtype)
    empty = {bit: logits.new_empty(0, dtype=torch.int64 if bit == ARGMAX else dtype) for bit in RETURNED}
    return made[0], *(pick(made, outputs, bit) if outputs & bit else empty[bit] for bit in RETURNED)


@register_fake("cross_entropy_rescale")
@register_fake("cross_entropy_backward_in_place")
def _(*_: object) -> None:
    pass


@register_fake("cross_entropy_backward")
def _(*arguments: Any) -> Tensor:
    return torch.empty_like(Backward(*arguments).logits)


# Batching rules: the batch becomes the first axis of the rows. The losses of the rows are then reduced for each sample.


def _in_one(info: Any, given: Any, axes: Any) -> Any:
    """in_one, with the class axis counted from the end, because the batch is a new first axis."""
    of_all, axis = in_one(info, given, axes), given.class_axis
    return of_all._replace(class_axis=axis if axis < 0 else axis - (of_all.logits.dim() - 1))


@register_vmap("cross_entropy_forward")
def _(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[list[Tensor], list[int]]:
    given, axes = Forward(*arguments), Forward(*in_dims)
    if axes.class_weight is not None:  # each sample has its own weights
        return of_each(_forward, info, in_dims, *arguments)
    of_all = _in_one(info, given, axes)
    # Each sample has its own divisor.
    results = _forward(*of_all._replace(normalizer=None, reduction=NONE, outputs=given.outputs & ~DIVISOR))
    tensors = reduce_samples(results, given.outputs, given.reduction, divisors_of(of_all, results[0]))
    return tensors, [0] * len(tensors)


@register_vmap("cross_entropy_backward")
def _(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensor, int]:
    given, axes = Backward(*arguments), Backward(*in_dims)
    if axes.class_weight is not None:
        return of_each(_backward, info, in_dims, *arguments)
    of_all = _in_one(info, given, axes)
    return _backward(*of_all._replace(grad_loss=row_gradients(of_all), divisor=None, reduction=NONE)), 0
