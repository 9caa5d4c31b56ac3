"""cross_entropy over a vocabulary that is cut into shards, on one device or on many: three functions, without autograd
and without communication of their own, that a torch.autograd.Function around torch.distributed is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eaves._cross_entropy import class_axis
from eaves._cross_entropy_rules import row_shape
from eaves._loss import (
    ARGMAX,
    DIVISOR,
    ENTROPY,
    LSE,
    MEAN,
    NONE,
    OF_IGNORED_ROWS,
    SPLIT_LSE,
    TARGET_MASS,
    Z_LOSS,
    check_input,
    empty_outputs,
    normalizer_of,
    numbers_of,
    pick,
    reduction_of,
    row_weight_of,
    weight_of,
)
from eaves._operator import (
    accumulator_dtype,
    call,
    check_bool,
    check_device,
    check_dtype_of,
    check_shape,
    check_tensor,
    index_of,
    refuse_lost_derivatives,
    register_fake,
)
from eaves._ranks import STATISTICS

_shard_forward = torch.ops.eaves.cross_entropy_shard_forward.default
_merge = torch.ops.eaves.cross_entropy_merge.default
_backward = torch.ops.eaves.cross_entropy_backward.default


class CrossEntropyMerged(NamedTuple):
    """The results of eaves.cross_entropy_merge: the loss, and the numbers that the gradient of each shard needs, among
    them lse_low, the rest that the rounding of lse lost."""

    loss: Tensor
    lse: Tensor
    argmax: Tensor
    entropy: Tensor
    z_loss: Tensor
    target_mass: Tensor
    divisor: Tensor | None
    lse_low: Tensor


def cross_entropy_shard(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    first_class: int,
    classes: int,
    ignore_index: int = -100,
    label_smoothing: float = 0,
    softcap: float | None = None,
    scale: float | None = None,
    class_dim: int | None = None,
) -> Tensor:
    """What eaves.cross_entropy has to know of the classes [first_class, first_class + V') of a vocabulary in shards.

    One pass over the shard's logits, without communication. Of the rows' statistics of all shards
    eaves.cross_entropy_merge makes the loss; with it eaves.cross_entropy_shard_gradient makes the gradient of each
    shard. The options have to be the same in the three.

    Args:
        input: the shard's logits, [..., V'] (or with the classes on another axis, see class_dim); any strides;
            float16, bfloat16, float32 or float64.
        target: classes of the whole vocabulary, int32 or int64: the same on every shard. Or the shard's part of
            probabilities, in the shape of input.
        weight: of the shard's classes, [V'], in the dtype of input or float32.
        first_class: the shard's first class.
        classes: V, of all shards together.
        ignore_index, label_smoothing, softcap, scale, class_dim: as in eaves.cross_entropy.

    Returns:
        [rows..., 10], float32 (float64 for a float64 input), contiguous: the largest z' of the shard, sum exp(z' - it),
        z'_t, w_t, sum u_v z'_v, sum u_v, sum exp(z' - largest) (z' - largest), the largest z and its
        class, sum exp(2 (z' - largest)); what the shard does not have of the target is 0. u_v is w_v with
        label_smoothing, with probabilities w_v times the smoothed target, else 0.

    Raises:
        ValueError, TypeError: as eaves.cross_entropy; the shard is no part of `classes`.
        NotImplementedError: input requires a gradient (there is no autograd here), or as eaves.cross_entropy.

    Example, with a torch.distributed group whose ranks have shards of equal size:

        class ShardedCrossEntropy(torch.autograd.Function):
            @staticmethod
            def forward(ctx, logits, target, rank, ranks, group):
                shard = {"first_class": rank * logits.shape[-1], "classes": ranks * logits.shape[-1]}
                own = eaves.cross_entropy_shard(logits, target, **shard)
                gathered = own.new_empty(ranks, *own.shape)
                torch.distributed.all_gather(list(gathered), own, group=group)
                merged = eaves.cross_entropy_merge(gathered, target, classes=shard["classes"])
                ctx.save_for_backward(logits, target, *merged)
                ctx.shard = shard
                return merged.loss

            @staticmethod
            def backward(ctx, grad_loss):
                logits, target, *merged = ctx.saved_tensors
                merged = eaves.CrossEntropyMerged(*merged)
                grad = eaves.cross_entropy_shard_gradient(grad_loss, logits, target, merged, **ctx.shard)
                return grad, None, None, None, None

    On one device:
        >>> import torch, eaves
        >>> logits, target = torch.tensor([[2.0, 0.0, -1.0, 0.5]]), torch.tensor([3])
        >>> parts = [eaves.cross_entropy_shard(logits[:, i : i + 2], target, first_class=i, classes=4) for i in (0, 2)]
        >>> eaves.cross_entropy_merge(torch.stack(parts), target, classes=4).loss
        tensor(1.8423)
        >>> eaves.cross_entropy(logits, target)
        tensor(1.8423)
    """
    axis, weight, ignore_index, first_class, classes = _shard_arguments(
        input, target, weight, first_class, classes, ignore_index, class_dim
    )
    numbers, number_tensor = numbers_of("cross_entropy", label_smoothing, scale, softcap)
    result: Tensor = call(
        "cross_entropy", _shard_forward, input, target, weight, axis, ignore_index, NONE, numbers,
        first_class, classes,
        number_tensor=number_tensor,
    )  # fmt: skip
    return result


def cross_entropy_merge(
    statistics: Tensor,
    target: Tensor | None,
    *,
    classes: int,
    has_weight: bool = False,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0,
    z_loss: float = 0,
    normalizer: Tensor | float | None = None,
    row_weight: Tensor | None = None,
) -> CrossEntropyMerged:
    """The loss of a vocabulary in shards, from the statistics of all of them. See eaves.cross_entropy_shard.

    Args:
        statistics: of all shards in the order of their classes, [shards, rows..., 10], contiguous.
        target: as each shard got it; None where they got probabilities, which the statistics do not say.
        classes: V, of all shards together.
        has_weight: whether the shards got weights.
        ignore_index, reduction, label_smoothing, z_loss, normalizer, row_weight: as in eaves.cross_entropy.

    Returns:
        CrossEntropyMerged(loss, lse, argmax, entropy, z_loss, target_mass, divisor, lse_low): the first five as
        eaves.cross_entropy gives them, then per row what the logits' probabilities are multiplied with, and of a mean
        what the sum was divided by. None of them has a gradient.

    Raises:
        ValueError, TypeError, NotImplementedError: as eaves.cross_entropy.

    Example:
        >>> import torch, eaves
        >>> statistics = eaves.cross_entropy_shard(torch.zeros(2, 4), torch.tensor([1, 3]), first_class=0, classes=4)
        >>> eaves.cross_entropy_merge(statistics[None], torch.tensor([1, 3]), classes=4).lse
        tensor([1.3863, 1.3863])
    """
    op = "cross_entropy"
    check_tensor(op, "statistics", statistics)
    if target is not None:
        check_tensor(op, "target", target)
        check_device(op, "target", target, "statistics", statistics)
    check_bool(op, "has_weight", has_weight)
    check_dtype_of(op, "statistics", statistics, (torch.float32, torch.float64), "as the shards wrote them")
    shards = statistics.shape[0] if statistics.dim() else 0
    rows = statistics.shape[1:-1] if target is None else target.shape
    check_shape(op, "statistics", statistics, [shards, *rows, STATISTICS], "of each shard, for each row")
    mode = reduction_of(op, reduction)
    if normalizer is not None:
        normalizer = normalizer_of(op, normalizer, mode, statistics.dtype, statistics.device)
    if row_weight is not None:
        row_weight = row_weight_of(op, row_weight, statistics, rows, statistics.dtype)
    numbers, number_tensor = numbers_of(op, label_smoothing, z_loss=z_loss)
    computed = LSE | SPLIT_LSE | ARGMAX | ENTROPY | Z_LOSS | TARGET_MASS | OF_IGNORED_ROWS
    computed |= DIVISOR if mode == MEAN else 0
    outputs = call(
        op, _merge, statistics, target, row_weight, normalizer, index_of(op, "ignore_index", ignore_index), mode,
        numbers, index_of(op, "classes", classes), has_weight, computed, number_tensor=number_tensor,
    )  # fmt: skip
    lse = outputs[1]
    others = [pick(outputs, computed, bit) for bit in (ARGMAX, ENTROPY, Z_LOSS, TARGET_MASS, DIVISOR)]
    return CrossEntropyMerged._make((outputs[0], lse[..., 0].contiguous(), *others, lse[..., 1].contiguous()))


def cross_entropy_shard_gradient(
    grad_loss: Tensor,
    input: Tensor,
    target: Tensor,
    merged: CrossEntropyMerged,
    weight: Tensor | None = None,
    *,
    first_class: int,
    classes: int,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0,
    softcap: float | None = None,
    scale: float | None = None,
    z_loss: float = 0,
    class_dim: int | None = None,
    row_weight: Tensor | None = None,
) -> Tensor:
    """The gradient of a shard's logits, from the merged loss. See eaves.cross_entropy_shard.

    Args:
        grad_loss: dL/d(merged.loss), in its shape; float32, float64 or the dtype of input.
        input, target, weight, first_class, classes, ignore_index, label_smoothing, softcap, scale, class_dim: as
            eaves.cross_entropy_shard got them.
        merged: what eaves.cross_entropy_merge gave.
        reduction, z_loss, row_weight: as eaves.cross_entropy_merge got them.

    Returns:
        dL/d(input), in its shape and dtype.

    Raises:
        ValueError, TypeError, NotImplementedError: as eaves.cross_entropy_shard.

    Example:
        >>> import torch, eaves
        >>> logits, target = torch.zeros(1, 4), torch.tensor([3])
        >>> shard = {"first_class": 0, "classes": 4}
        >>> statistics = eaves.cross_entropy_shard(logits, target, **shard)
        >>> merged = eaves.cross_entropy_merge(statistics[None], target, classes=4)
        >>> eaves.cross_entropy_shard_gradient(torch.ones(()), logits, target, merged, **shard)
        tensor([[ 0.2500,  0.2500,  0.2500, -0.7500]])
    """
    check_tensor("cross_entropy", "grad_loss", grad_loss)
    mode = reduction_of("cross_entropy", reduction)
    axis, weight, ignore_index, first_class, classes = _shard_arguments(
        input, target, weight, first_class, classes, ignore_index, class_dim
    )
    check_device("cross_entropy", "grad_loss", grad_loss, "input", input)
    for name in ("lse", "target_mass", "divisor", "lse_low"):
        if (tensor := getattr(merged, name)) is not None:
            check_device("cross_entropy", f"merged.{name}", tensor, "input", input)
    if row_weight is not None:
        dtype = accumulator_dtype(input.dtype)
        row_weight = row_weight_of("cross_entropy", row_weight, input, merged.lse.shape, dtype)
    numbers, number_tensor = numbers_of("cross_entropy", label_smoothing, scale, softcap, z_loss)
    lse = torch.stack((merged.lse, merged.lse_low), -1)
    result: Tensor = call(
        "cross_entropy", _backward, grad_loss, None, None, input, target, weight, row_weight, lse, None,
        merged.target_mass, merged.divisor if mode == MEAN else None, axis, ignore_index, mode, numbers, first_class,
        classes, number_tensor=number_tensor,
    )  # fmt: skip
    return result


def _shard_arguments(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    first_class: int,
    classes: int,
    ignore_index: int,
    class_dim: int | None,
) -> tuple[int, Tensor | None, int, int, int]:
    """The axis of the classes, and weight, ignore_index, first_class and classes as the extension takes them."""
    op = "cross_entropy"
    check_input(op, input, target, "logits")
    axis = class_axis(input, target, target.is_floating_point(), class_dim)
    if input.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            f"{op}: the functions of shards have no autograd, and input requires a gradient; call them in a "
            "torch.autograd.Function, as in the documentation of cross_entropy_shard, or under torch.no_grad()"
        )
    first, total = index_of(op, "first_class", first_class), index_of(op, "classes", classes)
    columns = input.shape[axis]
    if first < 0 or first + columns > total:
        raise ValueError(
            f"{op}: input has the classes {first} to {first} + {columns}, expected a part of {total} classes"
        )
    weight = None if weight is None else weight_of(op, weight, input, columns)
    return axis, weight, index_of(op, "ignore_index", ignore_index), first, total


refuse_lost_derivatives("cross_entropy", _shard_forward, _merge)


@register_fake("cross_entropy_shard_forward")
def _(logits: Tensor, targets: Tensor, weight: Tensor | None, class_axis: int, *_: object) -> Tensor:
    return logits.new_empty([*row_shape(logits, class_axis), STATISTICS], dtype=accumulator_dtype(logits.dtype))


@register_fake("cross_entropy_merge")
def _(
    statistics: Tensor,
    targets: Tensor | None,
    row_weight: Tensor | None,
    normalizer: Tensor | None,
    ignore_index: int,
    reduction: int,
    *numbers_and_rest: Any,
) -> Sequence[Tensor]:
    return empty_outputs(statistics, list(statistics.shape[1:-1]), reduction, numbers_and_rest[-1])
