"""cross_entropy of logits whose classes are cut over the ranks of a group: the operators that take the place of the
extension's, with one gather of the rows' statistics between them. The backward needs no other rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eaves._parallel.agreement import Agreement, digest, dtypes, facts_of_target
from eaves._parallel.shard import SCHEMA, Place, ShardArguments
from eaves._parallel.statistics import (
    STATISTICS,
    gather_statistics,
    merge,
    no_statistics,
    refuse_argmax,
    statistics_of,
)
from eaves._torch.checks import accumulator_dtype
from eaves._torch.cross_entropy_rules import row_shape
from eaves._torch.operator import call
from eaves._torch.options import NUMBERS_IN_WORDS
from eaves._torch.outputs import MEAN_LOGIT, REDUCTION_NAMES, empty_outputs
from eaves._torch.registration import define, refuse_lost_derivatives, register_fake
from eaves._torch.rows import check_classes

_OP = "cross_entropy"

_shard_forward = torch.ops.eaves.cross_entropy_shard_forward.default
_shard_backward = torch.ops.eaves.cross_entropy_backward.default
_shard_backward_in_place = torch.ops.eaves.cross_entropy_backward_in_place.default

# Behind the tensors, as in the schemas below.
_OPTIONS = "int class_axis, SymInt ignore_index, int reduction, float[] numbers"


class _Forward(NamedTuple):
    """The arguments of the forward, in the order of the schema, but for the shard's."""

    logits: Tensor
    target: Tensor
    weight: Tensor | None
    row_weight: Tensor | None
    normalizer: Tensor | None
    axis: int
    ignore_index: int
    mode: int
    numbers: Any
    outputs: int


def _forward(*arguments: Any) -> list[Tensor]:
    """As cross_entropy_forward, and behind that the Place."""
    given = _Forward(*arguments[: len(_Forward._fields)])
    shard = ShardArguments(*arguments[len(given) :])
    op = shard.op
    logits, target, weight, row_weight, normalizer, axis, ignore_index, mode, numbers, outputs = given
    columns, rows, is_soft = logits.shape[axis], row_shape(logits, axis), target.is_floating_point()
    all_rows = math.prod(rows)
    agreement = Agreement(
        shard, target, columns,
        lambda: {
            **facts_of_target(op, target, rows),
            "row_weight": digest(row_weight),
            "normalizer": digest(normalizer),
            **dtypes(op, logits=logits, class_weight=weight, row_weight=row_weight, normalizer=normalizer),
            "class_dim": axis,
            "ignore_index": ignore_index,
            "reduction": REDUCTION_NAMES[mode],
            NUMBERS_IN_WORDS: list(numbers),
            "which outputs are computed": outputs,
        },
    )  # fmt: skip

    def statistics_at(place: Place) -> Tensor:
        if not is_soft and target.device.type == "cpu":  # here, because a rank without classes does not call the core
            check_classes(op, "targets", target, place.classes, ignore_index)
        if place.columns == 0:
            return no_statistics(all_rows, logits)
        computed: Tensor = call(
            op, _shard_forward, *_usable(logits, weight, place, axis, target), axis, ignore_index, mode, numbers,
            place.first_class, place.classes, bool(outputs & MEAN_LOGIT),
        )  # fmt: skip
        return computed.flatten(0, -2)

    expected = agreement.expected()
    own = statistics_at(expected)
    place = agreement.settle()
    refuse_argmax(op, outputs, place, logits.dtype)
    if place != expected:
        own = statistics_at(place)
    gathered = statistics_of(gather_statistics(shard, own, None if is_soft else target.reshape(-1)).wait())
    statistics = gathered.view(gathered.shape[0], *rows, STATISTICS)
    results: list[Tensor] = call(
        op, merge, statistics, None if is_soft else target, row_weight, normalizer, ignore_index, mode, numbers,
        place.classes, weight is not None, outputs,
    )  # fmt: skip
    return [*results, place.tensor()]


def _usable(
    logits: Tensor, weight: Tensor | None, place: Place, axis: int, target: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Without the classes of padding."""
    return (
        logits.narrow(axis, 0, place.columns),
        target.narrow(axis, 0, place.columns) if target.is_floating_point() else target,
        None if weight is None else weight[: place.columns],
    )


class _Backward(NamedTuple):
    """The arguments of a backward, in the order of the schema."""

    grad_loss: Tensor
    grad_lse: Tensor | None
    grad_entropy: Tensor | None
    logits: Tensor
    target: Tensor
    weight: Tensor | None
    row_weight: Tensor | None
    lse: Tensor
    entropy: Tensor | None
    target_mass: Tensor | None
    divisor: Tensor | None
    axis: int
    ignore_index: int
    mode: int
    numbers: Any

    def of_shard(self, place: Place) -> tuple[Any, ...]:
        """Those of the extension."""
        logits, target, weight = _usable(self.logits, self.weight, place, self.axis, self.target)
        return *self._replace(logits=logits, target=target, weight=weight), place.first_class, place.classes


def _backward(*arguments: Any) -> Tensor:
    *own, place_tensor = arguments
    given, place = _Backward(*own), Place.of(place_tensor)
    logits, axis = given.logits, given.axis
    if place.columns == 0:
        return torch.zeros_like(logits)
    grad: Tensor = call(_OP, _shard_backward, *given.of_shard(place))
    if place.columns == logits.shape[axis]:
        return grad
    whole = torch.empty_like(logits)
    whole.narrow(axis, 0, place.columns).copy_(grad)
    _padding(whole, axis, place).zero_()
    return whole


def _backward_in_place(*arguments: Any) -> None:
    *own, place_tensor = arguments
    given, place = _Backward(*own), Place.of(place_tensor)
    if place.columns:
        call(_OP, _shard_backward_in_place, *given.of_shard(place))
    _padding(given.logits, given.axis, place).zero_()


def _padding(logits: Tensor, axis: int, place: Place) -> Tensor:
    return logits.narrow(axis, place.columns, logits.shape[axis] - place.columns)


_LOGITS = "Tensor targets, Tensor? class_weight, Tensor? row_weight"
_OF_BACKWARD = (
    f"logits, {_LOGITS}, Tensor lse, Tensor? entropy, Tensor? target_mass, Tensor? divisor, {_OPTIONS}, Tensor place"
)
_UPSTREAM = "Tensor grad_loss, Tensor? grad_lse, Tensor? grad_entropy"

forward = define(
    f"cross_entropy_ranks_forward(Tensor logits, {_LOGITS}, Tensor? normalizer, {_OPTIONS}, int outputs, {SCHEMA}) "
    "-> Tensor[]",
    _forward,
)
backward = define(f"cross_entropy_ranks_backward({_UPSTREAM}, Tensor {_OF_BACKWARD}) -> Tensor", _backward)
backward_in_place = define(
    f"cross_entropy_ranks_backward_in_place({_UPSTREAM}, Tensor(a!) {_OF_BACKWARD}) -> ()", _backward_in_place
)
refuse_lost_derivatives(_OP, forward, backward, backward_in_place, _shard_forward, merge)


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


@register_fake("cross_entropy_ranks_forward")
def _(logits: Tensor, target: Tensor, *arguments: Any) -> list[Tensor]:
    _, _, _, axis, _, mode, _, outputs, *_ = arguments
    place = torch.empty(len(Place._fields), dtype=torch.int64, device="cpu")
    return [*empty_outputs(logits, list(row_shape(logits, axis)), mode, outputs), place]


@register_fake("cross_entropy_ranks_backward")
def _(grad_loss: Tensor, grad_lse: Tensor | None, grad_entropy: Tensor | None, logits: Tensor, *_: object) -> Tensor:
    return torch.empty_like(logits)
