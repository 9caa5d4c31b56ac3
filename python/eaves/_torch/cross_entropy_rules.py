"""cross_entropy for the tracers and transforms of torch: fake implementations and batching rules of the operators that
_autograd/cross_entropy.py calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eaves._torch.checks import accumulator_dtype
from eaves._torch.outputs import ARGMAX, DIVISOR, MEAN, NONE, RETURNED, empty_outputs, pick
from eaves._torch.registration import batch_first, each_of_batch, register_fake, register_vmap
from eaves._torch.samples import divisors_of, reduce_samples, row_gradients

_forward = torch.ops.eaves.cross_entropy_forward.default
_backward = torch.ops.eaves.cross_entropy_backward.default

# What torch.compile and other tracers ask: shapes, strides and dtypes of the outputs.


def row_shape(logits: Tensor, axis: int) -> list[int]:
    axis %= logits.dim()
    return [size for index, size in enumerate(logits.shape) if index != axis]


@register_fake("cross_entropy_forward")
def _(logits: Tensor, *arguments: Any) -> list[Tensor]:
    _, _, _, _, class_axis, _, reduction, _, outputs = arguments
    return empty_outputs(logits, row_shape(logits, class_axis), reduction, outputs)


@register_fake("cross_entropy_forward_backward")
def _(logits: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    _, _, _, _, class_axis, _, reduction, _, outputs = arguments
    made = empty_outputs(logits, row_shape(logits, class_axis), reduction, outputs)
    dtype = accumulator_dtype(logits.dtype)
    empty = {bit: logits.new_empty(0, dtype=torch.int64 if bit == ARGMAX else dtype) for bit in RETURNED}
    return made[0], *(pick(made, outputs, bit) if outputs & bit else empty[bit] for bit in RETURNED)


@register_fake("cross_entropy_rescale")
@register_fake("cross_entropy_backward_in_place")
def _(*_: object) -> None:
    pass


@register_fake("cross_entropy_backward")
def _(grad_loss: Tensor, grad_lse: Tensor | None, grad_entropy: Tensor | None, logits: Tensor, *_: object) -> Tensor:
    return torch.empty_like(logits)


# Batching rules: the batch becomes the first axis of the rows, whose losses are then reduced for each sample.


@register_vmap("cross_entropy_forward")
def _(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[list[Tensor], list[int]]:
    logits, targets, weight, row_weight, normalizer, class_axis, ignore_index, reduction, numbers, outputs = arguments
    if in_dims[2] is not None:  # each sample has its own weights
        each = [_forward(*sample) for sample in each_of_batch(info, in_dims, *arguments)]
        stacked = [torch.stack(tensors) for tensors in zip(*each)]
        return stacked, [0] * len(stacked)
    logits, targets = batch_first(info, in_dims, logits, targets)
    if row_weight is not None:
        row_weight = batch_first(info, in_dims[3:], row_weight)[0].contiguous()
    if normalizer is not None:
        (normalizer,) = batch_first(info, in_dims[4:], normalizer)
    axis = class_axis if class_axis < 0 else class_axis - (logits.dim() - 1)
    # The divisor is the samples' own.
    results = _forward(logits, targets, weight, row_weight, None, axis, ignore_index, NONE, numbers, outputs & ~DIVISOR)
    divisors = None
    if reduction == MEAN:
        divisors = divisors_of(info.batch_size, targets, weight, row_weight, normalizer, ignore_index, results[0])
    tensors = reduce_samples(results, outputs, reduction, divisors)
    return tensors, [0] * len(tensors)


@register_vmap("cross_entropy_backward")
def _(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensor, int]:
    if in_dims[5] is not None:
        return torch.stack([_backward(*sample) for sample in each_of_batch(info, in_dims, *arguments)]), 0
    tensors, (class_axis, ignore_index, reduction, *options) = arguments[:11], arguments[11:]
    weight = tensors[5]

    def batched(index: int) -> Any:
        tensor = tensors[index]
        return None if tensor is None else batch_first(info, in_dims[index:], tensor)[0]

    def per_row(index: int) -> Any:
        tensor = batched(index)
        return None if tensor is None else tensor.contiguous()

    logits, targets, lse = batched(3), batched(4), per_row(7)
    rows = lse if lse.dim() < logits.dim() else lse[..., 0]
    grads = row_gradients(batched(0), reduction, batched(10) if reduction == MEAN else None, rows)
    axis = class_axis if class_axis < 0 else class_axis - (logits.dim() - 1)
    result = _backward(
        grads, per_row(1), per_row(2), logits, targets, weight, per_row(6), lse, per_row(8), per_row(9), None, axis,
        ignore_index, NONE, *options,
    )  # fmt: skip
    return result, 0
