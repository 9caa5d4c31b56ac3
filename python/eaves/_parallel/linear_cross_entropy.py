"""linear_cross_entropy with a head that is cut over the ranks of a group, by classes. These operators replace the
extension's: the extension computes a shard in chunks of rows, and this file calls torch.distributed.

Without gradients, and in the forward of "recompute", the rows' statistics are gathered once. If the forward computes
gradients, the extension calls back for each chunk, between its logits and their gradient. All ranks merge the same
statistics in the order of the ranks, so they get the same numbers. The gradient of input is a sum over the ranks: the
sum of a chunk is underway while the chunk's gradient of the head is computed.

Under sequence parallelism each rank has a part of the rows. They are gathered first, and each sum goes to the rank that
has its rows.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eaves._parallel.agreement import Agreement, PlaceChanged, digest, facts_of_loss
from eaves._parallel.collectives import Underway, all_gather, all_reduce, group_of, sum_on
from eaves._parallel.shard import SCHEMA, Place, ShardArguments, dtype_of_parts
from eaves._parallel.statistics import STATISTICS, gather_statistics, merge, refuse_argmax, statistics_of
from eaves._torch.checks import accumulator_dtype, name_in
from eaves._torch.linear_cross_entropy_rules import (
    OF_BIAS,
    OF_HEAD,
    OF_HIDDEN,
    WIDE_HEAD,
    empty_backward,
    empty_bias_gradient,
    empty_gradients,
    options_of,
)
from eaves._torch.operator import call
from eaves._torch.outputs import (
    ARGMAX,
    ENTROPY,
    LSE,
    MEAN,
    MEAN_LOGIT,
    SPLIT_LSE,
    SUM_SQ,
    TARGET_MASS,
    empty_outputs,
    pick,
)
from eaves._torch.registration import define, parameters_of, record_of, refuse_lost_derivatives, register_fake
from eaves._torch.rows import counts_of, divisor_of

_OP = "linear_cross_entropy"

_shard_forward = torch.ops.eaves.linear_cross_entropy_shard_forward.default
_shard_forward_backward = torch.ops.eaves.linear_cross_entropy_shard_forward_backward.default
_shard_backward = torch.ops.eaves.linear_cross_entropy_shard_backward.default


class _Kept(NamedTuple):
    """The rows that count, if the others are left out."""

    rows: Tensor
    on_host: Tensor


class _OfShard:
    """The state that forward and backward share: the rows of all ranks, and the classes of this rank. `given` are the
    arguments of either."""

    def __init__(self, given: Any, shard: ShardArguments, place: Place, kept: _Kept | None, outputs: int = 0):
        self.shard, self.place, self.kept = shard, place, kept
        self.rows_of_all, hidden = math.prod(_row_shape(given)), given.hidden
        if shard.sequence_parallel:
            hidden = all_gather(hidden, group_of(shard)).wait().flatten(0, 1)
        elif hidden.dim() > 2:  # the extension's chunks follow memory, the statistics follow the order of targets
            hidden = hidden.flatten(0, -2).view(hidden.shape)
        usable, targets = place.columns, given.targets
        bias, weight = (None if each is None else each[:usable] for each in (given.bias, given.class_weight))
        targets = targets[..., :usable] if targets.is_floating_point() else targets
        self.inputs = (hidden, given.head[:usable], bias, targets, weight, given.row_weight)
        merged = (bool(outputs & MEAN_LOGIT), bool(outputs & (ARGMAX | SUM_SQ)))
        self.arguments = (*options_of(given), place.first_class, place.classes, place.most, *merged)

    def rows(self, first: int, count: int) -> Tensor | slice:
        """The places of a chunk's rows among all rows."""
        return slice(first, first + count) if self.kept is None else self.kept.rows[first : first + count]

    def range(self, first: int, count: int) -> slice:
        """The same as a range, which includes rows that do not count."""
        if self.kept is None:
            return slice(first, first + count)
        kept = self.kept.on_host
        begin = 0 if first == 0 else int(kept[first])
        is_last = first + count == kept.shape[0]
        return slice(begin, self.rows_of_all if is_last else int(kept[first + count]))

    def run(self, overload: Any, *arguments: Any, callbacks: Sequence[Callable[[int, int], None] | None]) -> None:
        """Calls the operator with Python functions as its last arguments. If one of them fails, the later ones exchange
        nothing, and the error is raised at the end."""
        errors: list[BaseException] = []

        def guarded(function: Callable[[int, int], None]) -> Callable[[int, int], None]:
            def run(first: int, count: int) -> None:
                try:
                    if not errors:
                        function(first, count)
                except BaseException as error:  # Ctrl-C too, which ctypes would drop
                    errors.append(error)

            return run

        functions = [None if each is None else _CALLBACK(guarded(each)) for each in callbacks]
        # ctypes.cast() would make a cycle of references that keeps the gradients, and autograd would copy them.
        addresses = [0 if each is None else ctypes.c_void_p.from_buffer(each).value for each in functions]
        try:
            call(self.shard.op, overload, *arguments, *addresses)
        except Exception:
            if not errors:
                raise
        if errors:
            error = errors.pop()
            try:
                raise error
            finally:
                del error  # otherwise the frame and its error would keep each other alive


_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)


class _Gradients:
    """The gradients of a call, which the extension writes."""

    def __init__(self, call: _OfShard, given: Any, grad_head: Tensor | None = None):
        hidden, head, bias, bits = given.hidden, given.head, given.bias, given.gradients
        columns, sums = call.place.columns, accumulator_dtype(hidden.dtype)
        self.call, self.shape, self.dtype = call, hidden.shape, hidden.dtype
        self.hidden = self.head = self.bias = None
        self.accumulates = grad_head is not None
        if bits & OF_HIDDEN:
            of_rows, dtype = (*_row_shape(given), hidden.shape[-1]), dtype_of_parts(call.shard, hidden.dtype)
            self.hidden = torch.empty(of_rows, dtype=dtype, device=hidden.device)
            if not columns:
                self.hidden.zero_()
        if bits & OF_HEAD:
            self.head = head.new_empty(head.shape, dtype=sums if bits & WIDE_HEAD else None)
            self.head[columns:] = 0
        if bits & OF_BIAS:
            self.bias = bias.new_empty(bias.shape, dtype=empty_bias_gradient(hidden, bias).dtype)
            self.bias[columns:] = 0
            if self.accumulates:  # the core adds to both
                self.bias.zero_()
        self.to = grad_head if self.head is None else self.head
        self.underway: list[Underway] = []

    def written(self) -> tuple[Tensor | None, ...]:
        """The tensors that the extension writes."""
        of_classes = [None if each is None else each[: self.call.place.columns] for each in (self.to, self.bias)]
        return self.hidden, *of_classes

    def is_complete(self) -> Callable[[int, int], None] | None:
        return self._sum_over_ranks if self.hidden is not None and self.call.shard.reduce_input_grad else None

    def _sum_over_ranks(self, first: int, count: int) -> None:
        """Starts the sum over the ranks of a chunk's gradient of hidden states."""
        assert self.hidden is not None
        shard, rows = self.call.shard, self.call.range(first, count)
        part = self.hidden.view(-1, self.shape[-1])[rows]
        if not shard.sequence_parallel:
            self.underway.append(all_reduce(part, group_of(shard)))
            return
        own = self.hidden.shape[0] // shard.ranks * math.prod(self.hidden.shape[1:-1])
        for rank in range(rows.start // own, (rows.stop - 1) // own + 1):
            piece = slice(max(rows.start, rank * own) - rows.start, min(rows.stop, (rank + 1) * own) - rows.start)
            self.underway.append(sum_on(rank, part[piece], group_of(shard)))

    def finished(self) -> list[Tensor | None]:
        """The finished gradients of hidden states, head and bias."""
        for underway in self.underway:
            underway.wait()
        of_hidden = self.hidden
        if of_hidden is not None and self.call.shard.sequence_parallel:
            of_hidden = of_hidden[group_of(self.call.shard).rank() * self.shape[0] :][: self.shape[0]].clone()
        return [None if of_hidden is None else of_hidden.to(self.dtype), self.head, self.bias]


def _row_shape(given: Any) -> tuple[int, ...]:
    """The shape of all rows; under sequence parallelism hidden states have a part of them."""
    targets = given.targets
    return tuple(targets.shape[:-1] if targets.is_floating_point() else targets.shape)


def _kept_rows(given: Any) -> _Kept | None:
    """The rows that count, or None if the extension computes all rows. It leaves the other rows out on the CPU always,
    and on a GPU with skip_ignored unless a CUDA graph is captured (skips_ignored of the core)."""
    targets, row_weight = given.targets, given.row_weight
    if targets.is_floating_point() and row_weight is None:
        return None
    if targets.is_cuda and (not given.skip_ignored or torch.cuda.is_current_stream_capturing()):
        return None
    counts = torch.ones_like(targets, dtype=torch.bool) if row_weight is None else row_weight != 0
    if not targets.is_floating_point():
        counts = counts & counts_of(targets, given.ignore_index)
    counts = counts.reshape(-1)
    kept = counts.nonzero().squeeze(1)
    return None if kept.shape[0] == counts.shape[0] else _Kept(kept, kept.cpu())


# ---------------------------------------------------------------------------------------------------------- the forward


def _forward(*arguments: Any) -> list[Tensor]:
    """The results of linear_cross_entropy_forward or _forward_backward, followed by the Place."""
    given, shard = _ForwardArguments(*arguments), ShardArguments.behind(arguments)
    kept = _kept_rows(given)
    agreement = Agreement(shard, given.targets, given.head.shape[0], lambda: _facts(given, kept))
    # The first two cases exchange something before the statistics; in the third an error depends on the number of
    # classes.
    if shard.sequence_parallel or given.class_weight is not None or given.outputs & ARGMAX:
        agreement.settle()
    try:
        return _forward_at(agreement.expected(), agreement, given, shard, kept)
    except PlaceChanged:
        pass  # the results are dropped
    return _forward_at(agreement.settle(), agreement, given, shard, kept)


def _forward_at(
    place: Place, agreement: Agreement, given: Any, shard: ShardArguments, kept: _Kept | None
) -> list[Tensor]:
    outputs = given.outputs
    refuse_argmax(shard.op, outputs, place, given.hidden.dtype)
    this = _OfShard(given, shard, place, kept, outputs)
    target = None if given.targets.is_floating_point() else given.targets
    ranks, row_shape = shard.ranks, _row_shape(given)
    count = this.rows_of_all if kept is None else kept.rows.shape[0]
    sums = accumulator_dtype(given.hidden.dtype)
    own = given.hidden.new_empty((*row_shape, STATISTICS), dtype=sums)
    of_rows = own.view(-1, STATISTICS)
    computed = _Gradients(this, given)
    statistics = own.new_zeros((ranks, this.rows_of_all, STATISTICS))  # rows left out have 0, which counts for nothing
    flat_target = None if target is None else target.reshape(-1)

    gathering: list[Underway] = []

    def gather(first: int, rows: int) -> None:
        agreement.settle_as(place)
        own_rows = of_rows[first : first + rows]
        targets = None if flat_target is None else flat_target[this.rows(first, rows)]
        gathering.append(gather_statistics(shard, own_rows, targets))

    def exchanged(first: int, rows: int) -> Tensor:
        found = statistics_of(gathering.pop().wait())
        statistics[:, this.rows(first, rows)] = found
        return found

    if not given.gradients:
        call(shard.op, _shard_forward, *this.inputs, *this.arguments, own)
        gather(0, count)
        exchanged(0, count)
    else:
        gathered = own.new_zeros(ranks * own.numel())

        def finish_gather(first: int, rows: int) -> None:
            begin, size = ranks * first * STATISTICS, ranks * rows * STATISTICS
            gathered[begin : begin + size] = exchanged(first, rows).view(-1)

        normalizer = given.normalizer
        is_divided_by_weights = given.class_weight is not None and target is not None
        if given.reduction == MEAN and normalizer is None and is_divided_by_weights:
            normalizer = _divisor(this, given)
        this.run(
            _shard_forward_backward, *computed.written(), *this.inputs, normalizer, *this.arguments, ranks, own,
            gathered, callbacks=(gather, finish_gather, computed.is_complete()),
        )  # fmt: skip
    agreement.settle_as(place)  # without rows nothing was gathered
    results: list[Tensor] = call(
        shard.op, merge, statistics.view(ranks, *row_shape, STATISTICS), target, given.row_weight, given.normalizer,
        given.ignore_index, given.reduction, given.numbers, place.classes, given.class_weight is not None, outputs,
    )  # fmt: skip
    if given.row_weight is not None:
        is_nothing = given.row_weight == 0
        for bit in (LSE, ARGMAX, ENTROPY, TARGET_MASS, SUM_SQ, MEAN_LOGIT):
            if outputs & bit:
                is_split = bit == LSE and bool(outputs & SPLIT_LSE)
                pick(results, outputs, bit).masked_fill_(is_nothing.unsqueeze(-1) if is_split else is_nothing, 0)
    return [*results, *[each for each in computed.finished() if each is not None], place.tensor()]


def _facts(given: Any, kept: _Kept | None) -> dict[str, object]:
    parts = (given.hidden, given.head, given.bias)
    return {
        "which tensors require a gradient": [each is not None and each.requires_grad for each in parts],
        f"the shape of {name_in(given.function, 'hidden')}": list(given.hidden.shape),
        **facts_of_loss(given.function, given, _row_shape(given)),
        "which rows count": None if kept is None else digest(kept.on_host),
        "skip_ignored": given.skip_ignored,
        "workspace_bytes": given.workspace_limit,
        "which gradients are computed": given.gradients,
    }


def _divisor(this: _OfShard, given: Any) -> Tensor:
    """The divisor of the mean, computed before the statistics give it, for ranks that lack the weights of some
    targets."""
    sums, counts = accumulator_dtype(given.hidden.dtype), counts_of(given.targets, given.ignore_index)
    weights = _weights_of_targets(this, given.targets.to(torch.int64), given.class_weight.to(sums))
    if given.row_weight is not None:
        counts, weights = counts & (given.row_weight != 0), weights * given.row_weight
    return divisor_of(weights.flatten(), counts.flatten(), sums)


def _weights_of_targets(this: _OfShard, targets: Tensor, class_weight: Tensor) -> Tensor:
    """The class weights of the targets. Weights that this rank lacks are 0, so the sum over the ranks is exact."""
    columns, own = this.place.columns, targets - this.place.first_class
    of_targets = class_weight.new_zeros(own.shape)
    if columns:
        of_targets = torch.where((own >= 0) & (own < columns), class_weight[own.clamp(0, columns - 1)], 0)
    return all_reduce(of_targets, group_of(this.shard)).wait()


# --------------------------------------------------------------------------------------------------------- the backward


def _gradients(given: Any, grad_head: Tensor | None = None) -> list[Tensor | None]:
    """The gradients of hidden states, head and bias."""
    this = _OfShard(given, ShardArguments.behind(given), Place.of(given.place), _kept_rows(given))
    computed = _Gradients(this, given, grad_head)
    this.run(
        _shard_backward, *computed.written(), computed.accumulates, *given[:3], *this.inputs, given.lse, given.entropy,
        given.target_mass, given.divisor, *this.arguments, callbacks=(computed.is_complete(),),
    )  # fmt: skip
    return computed.finished()


def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    given = _BackwardArguments(*arguments)
    return tuple(given.hidden.new_empty(0) if each is None else each for each in _gradients(given))


def _backward_accumulate(grad_head: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    given = _BackwardArguments(*arguments)
    of_hidden, _, of_bias = _gradients(given, grad_head)
    return (
        given.hidden.new_empty(0) if of_hidden is None else of_hidden,
        empty_bias_gradient(given.hidden, None) if of_bias is None else of_bias,
    )


# -------------------------------------------------------------------------------------------------------- the operators

_OF_FORWARD = parameters_of(torch.ops.eaves.linear_cross_entropy_forward_backward.default)
_OF_BACKWARD = f"{parameters_of(torch.ops.eaves.linear_cross_entropy_backward.default)}, Tensor place"

forward = define(f"linear_cross_entropy_ranks_forward({_OF_FORWARD}, {SCHEMA}) -> Tensor[]", _forward)
backward = define(
    f"linear_cross_entropy_ranks_backward({_OF_BACKWARD}, {SCHEMA}) -> (Tensor, Tensor, Tensor)", _backward
)
backward_accumulate = define(
    f"linear_cross_entropy_ranks_backward_accumulate(Tensor(a!) grad_head, {_OF_BACKWARD}, {SCHEMA}) "
    "-> (Tensor, Tensor)",
    _backward_accumulate,
)
refuse_lost_derivatives(_OP, forward, backward, backward_accumulate)
_ForwardArguments, _BackwardArguments = record_of(forward), record_of(backward)


@register_fake("linear_cross_entropy_ranks_forward")
def _(*arguments: Any) -> list[Tensor]:
    given = _ForwardArguments(*arguments)
    made = empty_outputs(given.hidden, list(_row_shape(given)), given.reduction, given.outputs)
    return [*made, *empty_gradients(given), Place.empty()]


@register_fake("linear_cross_entropy_ranks_backward")
def _(*arguments: Any) -> tuple[Tensor, ...]:
    return empty_backward(_BackwardArguments(*arguments))
