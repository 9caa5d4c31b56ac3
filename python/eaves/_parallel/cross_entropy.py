"""cross_entropy of logits whose classes are cut over the ranks of a group. These operators replace the extension's and
gather the rows' statistics once. The backward needs no other rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eaves._parallel.agreement import Agreement, facts_of_loss
from eaves._parallel.shard import SCHEMA, Place, ShardArguments
from eaves._parallel.statistics import STATISTICS, gather_statistics, merge, no_statistics, refuse_argmax, statistics_of
from eaves._torch.checks import accumulator_dtype
from eaves._torch.cross_entropy_rules import Backward, row_shape
from eaves._torch.operator import call
from eaves._torch.outputs import MEAN_LOGIT, empty_outputs
from eaves._torch.registration import define, parameters_of, record_of, refuse_lost_derivatives, register_fake
from eaves._torch.rows import check_classes

_OP = "cross_entropy"

_shard_forward = torch.ops.eaves.cross_entropy_shard_forward.default
_shard_backward = torch.ops.eaves.cross_entropy_backward.default
_shard_backward_in_place = torch.ops.eaves.cross_entropy_backward_in_place.default


def _forward(*arguments: Any) -> list[Tensor]:
    """The results of cross_entropy_forward, followed by the Place."""
    given, shard = _ForwardArguments(*arguments), ShardArguments.behind(arguments)
    op, logits, targets, axis, outputs = shard.op, given.logits, given.targets, given.class_axis, given.outputs
    options = (given.ignore_index, given.reduction, given.numbers)
    rows, is_soft = row_shape(logits, axis), targets.is_floating_point()
    agreement = Agreement(
        shard, targets, logits.shape[axis], lambda: {**facts_of_loss(op, given, rows), "class_dim": axis}
    )

    def statistics_at(place: Place) -> Tensor:
        if not is_soft and targets.device.type == "cpu":  # a rank without classes does not call the core
            check_classes(op, "targets", targets, place.classes, given.ignore_index)
        if place.columns == 0:
            return no_statistics(math.prod(rows), logits)
        own = _without_padding(given, place)
        computed: Tensor = call(
            op, _shard_forward, own.logits, own.targets, own.class_weight, axis, *options, place.first_class,
            place.classes, bool(outputs & MEAN_LOGIT),
        )  # fmt: skip
        return computed.flatten(0, -2)

    expected = agreement.expected()
    own = statistics_at(expected)
    place = agreement.settle()
    refuse_argmax(op, outputs, place, logits.dtype)
    if place != expected:
        own = statistics_at(place)
    gathered = statistics_of(gather_statistics(shard, own, None if is_soft else targets.reshape(-1)).wait())
    statistics = gathered.view(gathered.shape[0], *rows, STATISTICS)
    results: list[Tensor] = call(
        op, merge, statistics, None if is_soft else targets, given.row_weight, given.normalizer, *options,
        place.classes, given.class_weight is not None, outputs,
    )  # fmt: skip
    return [*results, place.tensor()]


def _without_padding(given: Any, place: Place) -> Any:
    """The arguments of a forward or a backward, with tensors that have no padding."""
    axis, targets, weight = given.class_axis, given.targets, given.class_weight
    return given._replace(
        logits=given.logits.narrow(axis, 0, place.columns),
        targets=targets.narrow(axis, 0, place.columns) if targets.is_floating_point() else targets,
        class_weight=None if weight is None else weight[: place.columns],
    )


def _of_extension(*arguments: Any) -> tuple[Any, Place]:
    """The arguments of the extension's backward, whose tensors keep their padding, and the Place."""
    *own, place_tensor = arguments
    place = Place.of(place_tensor)
    return Backward(*own, place.first_class, place.classes), place


def _backward(*arguments: Any) -> Tensor:
    given, place = _of_extension(*arguments)
    logits, axis = given.logits, given.class_axis
    if place.columns == 0:
        return torch.zeros_like(logits)
    grad: Tensor = call(_OP, _shard_backward, *_without_padding(given, place))
    if place.columns == logits.shape[axis]:
        return grad
    whole = torch.empty_like(logits)
    whole.narrow(axis, 0, place.columns).copy_(grad)
    _padding(whole, axis, place).zero_()
    return whole


def _backward_in_place(*arguments: Any) -> None:
    given, place = _of_extension(*arguments)
    if place.columns:
        call(_OP, _shard_backward_in_place, *_without_padding(given, place))
    _padding(given.logits, given.class_axis, place).zero_()


def _padding(logits: Tensor, axis: int, place: Place) -> Tensor:
    return logits.narrow(axis, place.columns, logits.shape[axis] - place.columns)


def _of_backward(overload: Any) -> str:
    return f"{parameters_of(overload).partition(', SymInt first_class')[0]}, Tensor place"


_OF_FORWARD = parameters_of(torch.ops.eaves.cross_entropy_forward_backward.default).replace("(a!)", "")

forward = define(f"cross_entropy_ranks_forward({_OF_FORWARD}, {SCHEMA}) -> Tensor[]", _forward)
backward = define(f"cross_entropy_ranks_backward({_of_backward(_shard_backward)}) -> Tensor", _backward)
backward_in_place = define(
    f"cross_entropy_ranks_backward_in_place({_of_backward(_shard_backward_in_place)}) -> ()", _backward_in_place
)
refuse_lost_derivatives(_OP, forward, backward, backward_in_place, _shard_forward, merge)
_ForwardArguments = record_of(forward)


@register_fake("cross_entropy_shard_forward")
def _(logits: Tensor, targets: Tensor, weight: Tensor | None, class_axis: int, *_: object) -> Tensor:
    return logits.new_empty([*row_shape(logits, class_axis), STATISTICS], dtype=accumulator_dtype(logits.dtype))


@register_fake("cross_entropy_merge")
def _(statistics: Tensor, *arguments: Any) -> Sequence[Tensor]:
    reduction, outputs = arguments[4], arguments[-1]
    return empty_outputs(statistics, list(statistics.shape[1:-1]), reduction, outputs)


@register_fake("cross_entropy_ranks_forward")
def _(*arguments: Any) -> list[Tensor]:
    given = _ForwardArguments(*arguments)
    rows = row_shape(given.logits, given.class_axis)
    return [*empty_outputs(given.logits, rows, given.reduction, given.outputs), Place.empty()]


@register_fake("cross_entropy_ranks_backward")
def _(grad_loss: Tensor, grad_lse: Tensor | None, grad_entropy: Tensor | None, logits: Tensor, *_: object) -> Tensor:
    return torch.empty_like(logits)
