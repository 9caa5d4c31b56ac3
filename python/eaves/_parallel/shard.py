"""The arguments that name a rank's piece of a vocabulary, and the piece that the ranks agree on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from eaves._torch.checks import accumulator_dtype, check_bool, index_of, name_of, said
from eaves._torch.options import shape_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Shard(NamedTuple):
    """A rank's piece of a vocabulary, for the argument `group` of a loss, if the group alone does not say enough.

    Args:
        group: the torch.distributed.ProcessGroup whose ranks share the vocabulary. None: the mesh axis over which a
            DTensor cuts its classes.
        first_class: the first class of this rank. None: the pieces follow each other in the order of ranks.
        sequence_parallel: for a head: whether hidden states are this rank's part of the rows, along the first axis, of
            the same size on each rank. Targets and row weights have all rows. The gradient of hidden states has this
            rank's rows.
        reduce_input_grad: for a head: whether the gradient of the hidden states is summed over the ranks. False: each
            rank gets its own part of the sum.
        reduce_dtype: for a head: the dtype that computes and sums the parts, either the dtype of the hidden states or
            the dtype of the loss. None: the dtype of the hidden states, but float32 for float16.
    """

    group: ProcessGroup | None = None
    first_class: int | None = None
    sequence_parallel: bool = False
    reduce_input_grad: bool = True
    reduce_dtype: torch.dtype | None = None


class ShardArguments(NamedTuple):
    """A Shard in the form that the operators take."""

    op: str  # the function that the user called, for errors
    group: str  # the group's name
    ranks: int
    first_class: int  # -1: the pieces follow each other in the order of ranks
    classes: int  # -1: the sum over all shards
    sequence_parallel: bool = False
    reduce_input_grad: bool = True
    reduce_dtype: torch.dtype | None = None

    @staticmethod
    def behind(arguments: Sequence[Any]) -> ShardArguments:
        """The last arguments of an operator over ranks."""
        return ShardArguments(*arguments[-len(ShardArguments._fields) :])


# ShardArguments as the last arguments of operators.
SCHEMA = (
    "str function, str group, int ranks, SymInt first_class, SymInt classes, bool sequence_parallel, "
    "bool reduce_input_grad, ScalarType? reduce_dtype"
)


class Place(NamedTuple):
    """The classes of a rank, without padding."""

    first_class: int
    classes: int  # of all ranks
    columns: int  # of this rank
    most: int  # the most columns that a rank has

    def tensor(self) -> Tensor:
        """The record for the backward as a tensor, because a compiled call keeps only tensors."""
        return torch.tensor(self, dtype=torch.int64)

    @staticmethod
    def of(tensor: Tensor) -> Place:
        return Place(*tensor.tolist())

    @staticmethod
    def empty() -> Tensor:
        """A tensor of this shape for a fake implementation."""
        return torch.empty(len(Place._fields), dtype=torch.int64, device="cpu")


def shape_of_rows(shard: ShardArguments, hidden: Tensor) -> tuple[int, ...]:
    """The shape of the rows of all ranks, which targets have: hidden states without their features."""
    rows = tuple(hidden.shape[:-1])
    if not shard.sequence_parallel:
        return rows
    if not rows:
        raise ValueError(
            said(shard.op, "`hidden` has no axis but its features, expected a first axis that sequence_parallel cuts")
        )
    return (rows[0] * shard.ranks, *rows[1:])


def dtype_of_parts(shard: ShardArguments, dtype: torch.dtype) -> torch.dtype:
    """The dtype that computes and sums the ranks' parts of the gradient of an input."""
    if not shard.reduce_input_grad:
        return dtype
    # A part of float16 may be infinite although the sum is finite.
    return shard.reduce_dtype or (torch.float32 if dtype == torch.float16 else dtype)


def check_reduce_dtype(op: str, shard: ShardArguments, dtype: torch.dtype) -> None:
    """`dtype` is the dtype of the hidden states."""
    allowed = (dtype, accumulator_dtype(dtype))
    if shard.reduce_dtype is not None and shard.reduce_dtype not in allowed:
        names = " or ".join(dict.fromkeys(map(name_of, allowed)))
        raise ValueError(
            f"{op}: reduce_dtype is {name_of(shard.reduce_dtype)}, expected {names} for input in {name_of(dtype)}"
        )


def without_padding(op: str, classes: int, *tensors: Any) -> list[Any]:
    """The first `classes` of each tensor, as views. The first axis has the classes, followed by padding."""
    total = index_of(op, "classes", classes)
    for each in tensors:
        if isinstance(each, Tensor) and not 1 <= total <= (each.shape[0] if each.dim() else 0):
            raise ValueError(f"{op}: classes is {total}, expected 1 to the number of classes in {shape_of(each)}")
    return [each[:total] if isinstance(each, Tensor) else each for each in tensors]


def shard_of(group: object) -> Shard:
    """The argument `group` as a Shard."""
    return group if isinstance(group, Shard) else Shard(group)  # type: ignore[arg-type]  # with_agreement checks it


def shard_of_range(op: str, group: ProcessGroup, first: int, end: int, head: Tensor) -> Shard:
    """The Shard of a rank with the classes [first, end), which are the rows of its piece of the head."""
    if end - first != head.shape[0]:
        raise NotImplementedError(
            f"{op}: this rank has {end - first} classes, but its piece of the head has {head.shape[0]} rows; eaves "
            "does not support a padded piece"
        )
    return Shard(group, first)


def shard_arguments(op: str, group: ProcessGroup, shard: Shard, classes: int | None) -> ShardArguments:
    """The checked arguments of a Shard and the number of classes."""
    _, first_class, sequence_parallel, reduce_input_grad, reduce_dtype = shard
    first = -1 if first_class is None else index_of(op, "first_class", first_class)
    total = -1 if classes is None else index_of(op, "classes", classes)
    if (first_class is not None and first < 0) or (classes is not None and total < 1):
        raise ValueError(
            f"{op}: first_class is {first_class} and classes is {classes}, expected first_class from 0 and "
            "classes from 1"
        )
    check_bool(op, "sequence_parallel", sequence_parallel)
    check_bool(op, "reduce_input_grad", reduce_input_grad)
    if sequence_parallel and not reduce_input_grad:
        raise ValueError(
            f"{op}: reduce_input_grad is False, but sequence_parallel gives each rank the whole gradient of its "
            "rows; expected True"
        )
    if reduce_dtype is not None and not isinstance(reduce_dtype, torch.dtype):
        raise TypeError(f"{op}: reduce_dtype is {reduce_dtype!r}, expected a torch.dtype or None")
    if reduce_dtype is not None and not reduce_input_grad:
        raise ValueError(f"{op}: reduce_dtype is given, but reduce_input_grad=False adds up nothing; leave it out")
    return ShardArguments(
        op, group.group_name, group.size(), first, total, sequence_parallel, reduce_input_grad, reduce_dtype
    )
