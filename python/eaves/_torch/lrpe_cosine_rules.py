"""lrpe_cosine for the tracers and transforms of torch: fake implementations and batching rules of the operators that
_autograd/lrpe_cosine.py calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from eaves._torch.checks import accumulator_dtype
from eaves._torch.registration import each_of_batch, register_fake, register_vmap

_forward = torch.ops.eaves.lrpe_cosine_forward.default
_forward_lse = torch.ops.eaves.lrpe_cosine_forward_lse.default
_backward = torch.ops.eaves.lrpe_cosine_backward.default

# Fake implementations: tracers such as torch.compile ask for the shapes, strides and dtypes of the outputs.


@register_fake("lrpe_cosine_forward")
def _(x: Tensor, theta: Tensor, *_: object) -> Tensor:
    return x.new_empty([*x.shape[:-1], 2 * x.shape[-1]])


@register_fake("lrpe_cosine_forward_lse")
def _(x: Tensor, theta: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    batch, second, third, features = x.shape
    heads = second if arguments[-1] else third
    lse = x.new_empty([batch, heads, 2, features], dtype=accumulator_dtype(x.dtype))
    return x.new_empty([batch, second, third, 2 * features]), lse


@register_fake("lrpe_cosine_backward")
def _(grad_out: Tensor, x: Tensor | None, theta: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    heads_first, grad_heads_first, wants_x, wants_theta = arguments[-4:]
    batch, second, third, features = grad_out.shape
    axes = [second, third] if heads_first == grad_heads_first else [third, second]
    shape = [batch, *axes, features // 2] if wants_x else [0]
    return grad_out.new_empty(shape), theta.new_empty(theta.shape if wants_theta else 0)


# Batching rules: samples that share theta and cu_seqlens are entries of one batch. If each sample has its own theta,
# its own cu_seqlens or its own gradient of theta, each sample takes a call.


class _Fold:
    """Folds the batches of all samples into one batch, and unfolds a result."""

    def __init__(self, info: Any, batch: int) -> None:
        self.samples: int = info.batch_size
        self.batch = batch

    def __call__(self, tensor: Tensor | None, axis: int | None) -> Tensor | None:
        """Folds a tensor whose first axis is the batch."""
        if tensor is None:
            return None
        tensor = tensor.expand(self.samples, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
        return tensor.reshape(self.samples * self.batch, *tensor.shape[2:])

    def offsets(self, tensor: Tensor | None, axis: int | None) -> Tensor | None:
        if tensor is None or (axis is None and tensor.numel() == 1):
            return tensor
        if axis is None:
            return self(tensor, None)
        tensor = tensor.movedim(axis, 0)
        rows = tensor.reshape(self.samples, tensor.shape[1:].numel())  # -1 has no meaning without samples
        return rows.expand(self.samples, self.batch).reshape(-1)

    def positions(self, tensor: Tensor | None, axis: int | None) -> Tensor | None:
        if tensor is None or (axis is None and tensor.dim() == 1):
            return tensor
        if axis is None:
            return self(tensor, None)
        tensor = tensor.movedim(axis, 0)
        length = tensor.shape[-1]
        rows = tensor if tensor.dim() == 3 else tensor.unsqueeze(1)
        return rows.expand(self.samples, self.batch, length).reshape(self.samples * self.batch, length)

    def back(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(self.samples, self.batch, *tensor.shape[1:])


def _batch_of(tensor: Tensor, axis: int | None) -> int:
    """The number of batch entries of each sample."""
    return tensor.shape[0] if axis is None else tensor.movedim(axis, 0).shape[1]


def _of_each(info: Any, in_dims: Sequence[Any], overload: Any, tensors: Sequence[Any], options: Sequence[Any]) -> Any:
    """Calls the operator for each sample. Returns the stacked results and their batch axes."""
    if info.batch_size == 0:
        return _of_none(in_dims, overload, tensors, options)
    results = []
    for *sample, cu_seqlens in each_of_batch(info, tuple(in_dims[: len(tensors)]), *tensors):
        results.append(overload(*sample, None if cu_seqlens is None else cu_seqlens.contiguous(), *options))
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    return tuple(torch.stack(each) for each in zip(*results)), (0,) * len(results[0])


def _of_none(in_dims: Sequence[Any], overload: Any, tensors: Sequence[Any], options: Sequence[Any]) -> Any:
    """The results for no samples: a batch of 0 in front of the shape of one sample's result, in its dtype."""

    def sample(tensor: Tensor | None, axis: int | None) -> Tensor | None:
        if tensor is None:
            return None
        shape = [size for index, size in enumerate(tensor.shape) if axis is None or index != axis % tensor.dim()]
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    of_one = overload(*map(sample, tensors, in_dims), *options)

    def none_of(result: Tensor) -> Tensor:
        return torch.empty([0, *result.shape], dtype=result.dtype, device=tensors[0].device)

    if isinstance(of_one, Tensor):
        return none_of(of_one), 0
    return tuple(map(none_of, of_one)), (0,) * len(of_one)


def _batched_forward(overload: Any) -> Callable[..., Any]:
    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        tensors, options = arguments[:5], arguments[5:]
        x, theta, offsets, positions, cu_seqlens = tensors
        if in_dims[1] is not None or in_dims[4] is not None:
            return _of_each(info, in_dims, overload, tensors, options)
        fold = _Fold(info, _batch_of(x, in_dims[0]))
        result = overload(
            fold(x, in_dims[0]),
            theta,
            fold.offsets(offsets, in_dims[2]),
            fold.positions(positions, in_dims[3]),
            cu_seqlens,
            *options,
        )
        if isinstance(result, Tensor):
            return fold.back(result), 0
        return tuple(map(fold.back, result)), (0,) * len(result)

    return rule


register_vmap("lrpe_cosine_forward")(_batched_forward(_forward))
register_vmap("lrpe_cosine_forward_lse")(_batched_forward(_forward_lse))


@register_vmap("lrpe_cosine_backward")
def _(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
    tensors, options = arguments[:7], arguments[7:]
    grad_out, x, theta, lse, offsets, positions, cu_seqlens = tensors
    wants_theta = options[-1]
    if wants_theta or in_dims[2] is not None or in_dims[6] is not None:
        return _of_each(info, in_dims, _backward, tensors, options)
    fold = _Fold(info, _batch_of(grad_out, in_dims[0]))
    folded_lse = fold(lse, in_dims[3])
    grad_x, absent = _backward(
        fold(grad_out, in_dims[0]),
        fold(x, in_dims[1]),
        theta,
        None if folded_lse is None else folded_lse.contiguous(),
        fold.offsets(offsets, in_dims[4]),
        fold.positions(positions, in_dims[5]),
        cu_seqlens,
        *options,
    )
    return (fold.back(grad_x), absent.expand(fold.samples, 0)), (0, 0)
