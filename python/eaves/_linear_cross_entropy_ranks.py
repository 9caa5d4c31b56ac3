"""linear_cross_entropy whose head is cut over the ranks of a group, by classes: the operators that take the place of
the extension's, in chunks of rows (_head_chunks.py), with torch.distributed between them.

Of a chunk each rank computes the logits of its classes and the rows' statistics. These are gathered and merged in the
order of the ranks, so that all ranks have the same numbers. Then each computes the gradients of its logits, of its part
of the head, and its part of the gradient of input, which is summed over the ranks while the next chunk is computed.

Under sequence parallelism each rank has a part of the rows. A chunk then has the same rows of each part, so that the
sum of its gradients can be scattered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eaves._head_chunks import Head, add_gradients, cut, logits_of, of_rows, workspace_of
from eaves._linear_cross_entropy_rules import (
    OF_BIAS,
    OF_INPUT,
    OF_WEIGHT,
    WIDE_WEIGHT,
    BackwardTensors,
    ForwardTensors,
    Options,
    by_name,
    empty_bias_gradient,
    empty_gradients,
    in_places,
)
from eaves._loss import LSE, MEAN, MEAN_LOGIT, NONE, REDUCTION_NAMES, SUM, TARGET_MASS, empty_outputs
from eaves._operator import accumulator_dtype, call, define, refuse_lost_derivatives, register_fake
from eaves._ranks import (
    SCHEMA,
    STATISTICS,
    Place,
    Shard,
    Underway,
    agreed_place,
    all_gather,
    all_reduce,
    check_targets,
    dtypes,
    gather_statistics,
    group_of,
    merged,
    no_statistics,
    reduce_scatter,
    size_of,
    statistics_of,
)

_OP = "linear_cross_entropy"

_statistics = torch.ops.eaves.cross_entropy_shard_forward.default
_backward_in_place = torch.ops.eaves.cross_entropy_backward_in_place.default


class _Rows(NamedTuple):
    """Numbers of rows: of a call, in the shape of its target; of a job, [parts, rows of each]; of a chunk, [rows]."""

    target: Tensor
    row_weight: Tensor | None
    grad_loss: Tensor | None = None  # None where it is one number
    grad_lse: Tensor | None = None
    grad_entropy: Tensor | None = None
    lse: Tensor | None = None
    entropy: Tensor | None = None
    target_mass: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> _Rows:
        return _Rows(*[None if each is None else function(each) for each in self])  # type: ignore[arg-type]

    def of(self, chunk: slice) -> _Rows:
        return self.map(lambda each: each[:, chunk].reshape(-1))


class _Upstream(NamedTuple):
    """What the gradient of the loss is multiplied by, beside what _Rows has of each row."""

    grad_loss: Tensor
    divisor: Tensor | None
    mode: int
    factor: Tensor | None = None  # of the products, where it is no factor of what they multiply: in float16


class _Job:
    """What forward and backward share: the tensors as they are multiplied, and how the rows are cut."""

    def __init__(self, tensors: Any, options: Options, shard: Shard, place: Place, kept: Tensor | None, rows: _Rows):
        self.options, self.shard, self.place, self.kept = options, shard, place, kept
        self.ranks = size_of(shard)
        self.parts = self.ranks if shard.sequence_parallel else 1  # of the rows
        x, usable = tensors.input.reshape(-1, tensors.input.shape[-1]), place.columns
        self.x = x if kept is None else x[kept]
        bias = None if tensors.linear_bias is None else tensors.linear_bias[:usable]
        self.head = Head(self.x, tensors.linear_weight[:usable], bias)
        sums = accumulator_dtype(x.dtype)
        self.class_weight = None if tensors.weight is None else tensors.weight[:usable].to(sums)
        rows = rows.map(lambda each: each.reshape(self.parts, x.shape[0]))
        self.rows = rows if kept is None else rows.map(lambda each: each[:, kept])

    def chunks(self, logits_at_once: int) -> tuple[list[slice], int]:
        """Of the rows of each part, the same on all ranks; and how many classes are converted at once."""
        sums = accumulator_dtype(self.x.dtype).itemsize
        of_class = sums
        if self.x.dtype.itemsize == 2:  # the gradient as it is multiplied, which on the CPU is in float32 again
            of_class += self.x.dtype.itemsize if self.x.is_cuda else self.x.dtype.itemsize + sums
        of_row = logits_at_once * of_class * self.place.most + 3 * sums * self.x.shape[1]
        limit = workspace_of(_OP, self.options.workspace_limit or None, self.x.device)
        size, block = cut(self.parts * self.x.shape[0], self.place.most, of_row, limit, self.head)
        size = math.ceil(max(1, size) / self.parts)
        return [slice(begin, begin + size) for begin in range(0, self.x.shape[0], size)], block

    def inputs(self, chunks: Sequence[slice]) -> Iterator[tuple[slice, Tensor, _Rows]]:
        """Chunks, their rows of input from all parts, and what belongs to them. Those of the next are on their way
        meanwhile."""
        ahead = None
        for index, chunk in enumerate(chunks):
            x = ahead or self._gathered(chunk)
            ahead = self._gathered(chunks[index + 1]) if index + 1 < len(chunks) else None
            yield chunk, x.wait().flatten(0, 1), self.rows.of(chunk)

    def _gathered(self, chunk: slice) -> Underway:
        own = self.x[chunk]
        return Underway(own[None], None) if self.parts == 1 else all_gather(own, group_of(self.shard))

    def multiplied(self, x: Tensor, rows: _Rows) -> Head:
        """With the rows of a chunk; 0 in place of those that are ignored, unless they were left out."""
        if self.kept is None:
            x = of_rows(x, slice(None), (rows.target.to(torch.int64) != self.options.ignore_index).unsqueeze(1))
        return self.head._replace(input=x)

    def logits(self, x: Tensor, rows: _Rows, block: int) -> Tensor:
        if self.place.columns == 0:
            return x.new_empty((x.shape[0], 0), dtype=accumulator_dtype(x.dtype))
        return logits_of(self.multiplied(x, rows), block)

    def statistics(self, z: Tensor, rows: _Rows, outputs: int) -> Tensor:
        if self.place.columns == 0:
            return no_statistics(z.shape[0], z)
        result: Tensor = call(
            _OP, _statistics, z, rows.target, self.class_weight, -1, self.options.ignore_index, NONE,
            self.options.numbers, self.place.first_class, self.place.classes, bool(outputs & MEAN_LOGIT),
        )  # fmt: skip
        return result

    def merged(
        self, statistics: Tensor, rows: _Rows, normalizer: Tensor | None, mode: int, outputs: int
    ) -> list[Tensor]:
        options = (self.options.ignore_index, mode, self.options.numbers)
        has_weight = self.class_weight is not None
        return merged(
            _OP, statistics, rows.target, rows.row_weight, normalizer, options, self.place, has_weight, outputs
        )


class _Gradients:
    """Those of a call, which chunks add to."""

    def __init__(self, job: _Job, tensors: Any, bits: int, grad_weight: Tensor | None = None):
        x, weight, bias = tensors.input, tensors.linear_weight, tensors.linear_bias
        self.job, self.shape, self.sums = job, x.shape, accumulator_dtype(x.dtype)
        self.input = x.new_empty(job.x.shape) if bits & OF_INPUT else None
        self.weight, self.bias = grad_weight, None
        if bits & OF_WEIGHT:
            self.weight = weight.new_zeros(weight.shape, dtype=self.sums if bits & WIDE_WEIGHT else None)
        if bits & OF_BIAS:
            self.bias = bias.new_zeros(bias.shape, dtype=self.sums)
            self.bias_dtype = empty_bias_gradient(x, bias).dtype
        self.underway: list[tuple[Tensor, Underway]] = []

    def add(self, z: Tensor, chunk: slice, x: Tensor, rows: _Rows, upstream: _Upstream, block: int) -> None:
        """From the logits of a chunk, over which their gradient is written."""
        job, place, options = self.job, self.job.place, self.job.options
        of_input = None if self.input is None else x.new_zeros(x.shape, dtype=self.sums)
        if place.columns:
            call(
                _OP, _backward_in_place, upstream.grad_loss if rows.grad_loss is None else rows.grad_loss,
                rows.grad_lse, rows.grad_entropy, z, rows.target, job.class_weight, rows.row_weight, rows.lse,
                rows.entropy, rows.target_mass, upstream.divisor, -1, options.ignore_index, upstream.mode,
                options.numbers, place.first_class, place.classes,
            )  # fmt: skip
            weight, bias = (None if each is None else each[: place.columns] for each in (self.weight, self.bias))
            add_gradients(z, job.multiplied(x, rows), of_input, weight, bias, block, upstream.factor)
        if of_input is not None:
            self._sum_over_ranks(chunk, of_input)

    def _sum_over_ranks(self, chunk: slice, part: Tensor) -> None:
        assert self.input is not None
        shard, own = self.job.shard, self.input[chunk]
        if not shard.reduce_input_grad:
            own.copy_(part)
            return
        part = part.to(shard.reduce_dtype or own.dtype)
        if shard.sequence_parallel:
            total = reduce_scatter(part.view(self.job.parts, *own.shape), group_of(shard))
        else:
            total = all_reduce(own.copy_(part) if part.dtype == own.dtype else part, group_of(shard))
        self.underway.append((own, total))
        self._wait(1)

    def _wait(self, remaining: int) -> None:
        while len(self.underway) > remaining:
            own, underway = self.underway.pop(0)
            total = underway.wait()
            if total is not own:
                own.copy_(total)

    def finished(self) -> list[Tensor | None]:
        """Of input, weight and bias."""
        self._wait(0)
        of_input = self.input
        if of_input is not None and self.job.kept is not None:
            rows = of_input.new_zeros(math.prod(self.shape[:-1]), self.shape[-1])
            of_input = rows.index_copy_(0, self.job.kept, of_input)
        return [
            None if of_input is None else of_input.view(self.shape),
            self.weight,
            None if self.bias is None else self.bias.to(self.bias_dtype),
        ]


def _kept_rows(tensors: Any, options: Options, shard: Shard) -> Tensor | None:
    """Where rows that are ignored are left out, those that are not. Under sequence parallelism parts would become
    unequal."""
    target = tensors.target
    skips = not target.is_cuda or (options.skip_ignored and not torch.cuda.is_current_stream_capturing())
    if not skips or shard.sequence_parallel:
        return None
    counts = target.reshape(-1).to(torch.int64) != options.ignore_index
    kept = counts.nonzero().squeeze(1)
    return None if kept.shape[0] == counts.shape[0] else kept


# ---------------------------------------------------------------------------------------------------------- the forward


def _forward(*arguments: Any) -> list[Tensor]:
    """As linear_cross_entropy_forward and _forward_backward, and behind that the Place."""
    tensors, options, (outputs, gradients, *of_shard) = by_name(ForwardTensors, arguments)
    shard = Shard(*of_shard)
    kept = _kept_rows(tensors, options, shard)
    facts = _facts(tensors, options, kept, outputs, gradients)
    place = agreed_place(_OP, shard, tensors.linear_weight.shape[0], tensors.input.device, facts)
    check_targets(_OP, tensors.target, place.classes, options.ignore_index)
    rows = _Rows(tensors.target, tensors.row_weight)
    job = _Job(tensors, options, shard, place, kept, rows)
    computed = _Gradients(job, tensors, gradients)
    upstream = _upstream_of_forward(job, tensors.normalizer) if gradients else None
    sums = accumulator_dtype(tensors.input.dtype)
    statistics = tensors.input.new_zeros((job.ranks, *job.rows.target.shape, STATISTICS), dtype=sums)

    def finish(gathering: Underway, z: Tensor | None, chunk: slice, x: Tensor, of_chunk: _Rows) -> None:
        found = statistics_of(_OP, gathering.wait())
        places = statistics[:, :, chunk]
        places.copy_(found.view(places.shape))
        if z is None or upstream is None:
            return
        bits = LSE | TARGET_MASS
        loss, *numbers = job.merged(found, of_chunk, None, NONE, bits)
        of_chunk = of_chunk._replace(
            lse=numbers[0], target_mass=numbers[1], grad_loss=torch.ones_like(loss) if upstream.mode == NONE else None
        )
        computed.add(z, chunk, x, of_chunk, upstream, block)

    chunks, block = job.chunks(logits_at_once=2 if gradients else 1)
    before: tuple[Any, ...] = ()  # a chunk whose statistics are on their way while the logits of the next are computed
    for chunk, x, of_chunk in job.inputs(chunks):
        z = job.logits(x, of_chunk, block)
        gathering = gather_statistics(shard, job.statistics(z, of_chunk, outputs), of_chunk.target)
        if before:
            finish(*before)
        before = (gathering, z if gradients else None, chunk, x, of_chunk)
        del z
    if before:
        finish(*before)
        before = ()

    if kept is not None:
        all_rows = statistics.new_zeros(job.ranks, tensors.target.numel(), STATISTICS)
        statistics = all_rows.index_copy_(1, kept, statistics.flatten(1, 2))
    statistics = statistics.view(job.ranks, *tensors.target.shape, STATISTICS)
    results = job.merged(statistics, rows, tensors.normalizer, options.reduction, outputs)
    return [*results, *[each for each in computed.finished() if each is not None], place.tensor()]


def _facts(
    tensors: ForwardTensors, options: Options, kept: Tensor | None, outputs: int, gradients: int
) -> dict[str, object]:
    return {
        "whether input requires a gradient": tensors.input.requires_grad,
        "the shape of input": list(tensors.input.shape),
        "the shape of target": list(tensors.target.shape),
        "how many rows count": None if kept is None else kept.shape[0],
        "the sum of target": None if tensors.target.is_cuda else int(tensors.target.sum()),
        **dtypes(
            input=tensors.input, linear_weight=tensors.linear_weight, weight=tensors.weight,
            row_weight=tensors.row_weight, normalizer=tensors.normalizer,
        ),
        "ignore_index": options.ignore_index,
        "reduction": REDUCTION_NAMES[options.reduction],
        "label_smoothing, scale, softcap and z_loss": list(options.numbers),
        "workspace_bytes": options.workspace_limit,
        "which outputs are computed": outputs,
        "which gradients are computed": gradients,
    }  # fmt: skip


def _upstream_of_forward(job: _Job, normalizer: Tensor | None) -> _Upstream:
    """For an upstream gradient of 1."""
    mode, rows = job.options.reduction, job.rows
    sums = accumulator_dtype(job.x.dtype)
    one = job.x.new_ones((), dtype=sums)
    if mode != MEAN or normalizer is not None:
        return _Upstream(one, normalizer, mode)
    counts = rows.target.to(torch.int64) != job.options.ignore_index
    weights = counts.to(sums) if rows.row_weight is None else rows.row_weight.masked_fill(~counts, 0)
    if job.class_weight is not None:
        weights = weights * _weights_of_targets(job, job.class_weight)
    return _Upstream(one, weights.sum(dtype=torch.float64).to(sums), mode)


def _weights_of_targets(job: _Job, class_weight: Tensor) -> Tensor:
    """Those that this rank does not have are 0, so that their sum over the ranks is exact."""
    sums, places = accumulator_dtype(job.x.dtype), job.rows.target.to(torch.int64) - job.place.first_class
    of_targets = places.new_zeros(places.shape, dtype=sums)
    if job.place.columns:
        own = (places >= 0) & (places < job.place.columns)
        of_targets = torch.where(own, class_weight[places.clamp(0, job.place.columns - 1)], 0)
    return all_reduce(of_targets, group_of(job.shard)).wait()


# --------------------------------------------------------------------------------------------------------- the backward


def _backward_of(arguments: Sequence[Any], grad_weight: Tensor | None = None) -> list[Tensor | None]:
    """The gradients in their places."""
    tensors, options, (bits, place, *of_shard) = by_name(BackwardTensors, arguments)
    shard, place = Shard(*of_shard), Place.of(place)
    is_per_row = options.reduction == NONE
    rows = _Rows(
        tensors.target,
        tensors.row_weight,
        tensors.grad_loss if is_per_row else None,
        *(tensors.grad_lse, tensors.grad_entropy, tensors.lse),
        None if tensors.grad_entropy is None else tensors.entropy,
        tensors.target_mass,
    )
    job = _Job(tensors, options, shard, place, _kept_rows(tensors, options, shard), rows)
    upstream = _Upstream(tensors.grad_loss, tensors.divisor, options.reduction)
    is_one_factor = not is_per_row and tensors.grad_lse is None and tensors.grad_entropy is None
    if tensors.input.dtype == torch.float16 and is_one_factor:
        factor = tensors.grad_loss.to(torch.float32)
        if tensors.divisor is not None:
            factor = torch.where(tensors.divisor == 0, 0, factor / tensors.divisor)
        upstream = _Upstream(torch.ones_like(factor), None, SUM, factor)
    computed = _Gradients(job, tensors, bits, grad_weight)
    chunks, block = job.chunks(logits_at_once=1)
    for chunk, x, of_chunk in job.inputs(chunks):
        computed.add(job.logits(x, of_chunk, block), chunk, x, of_chunk, upstream, block)
    return computed.finished()


def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    like: Tensor = by_name(BackwardTensors, arguments)[0].input
    computed = _backward_of(arguments)
    return tuple(like.new_empty(0) if each is None else each for each in computed)


def _backward_accumulate(grad_weight: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    tensors = by_name(BackwardTensors, arguments)[0]
    of_input, _, of_bias = _backward_of(arguments, grad_weight)
    nothing = tensors.input.new_empty(0), empty_bias_gradient(tensors.input, None)
    return nothing[0] if of_input is None else of_input, nothing[1] if of_bias is None else of_bias


# -------------------------------------------------------------------------------------------------------- the operators

_INPUTS = "Tensor input, Tensor linear_weight, Tensor? linear_bias, Tensor target, Tensor? weight, Tensor? row_weight"
_OPTIONS = "SymInt ignore_index, int reduction, float[] numbers, bool skip_ignored, SymInt workspace_limit"
_OF_BACKWARD = (
    f"Tensor grad_loss, Tensor? grad_lse, Tensor? grad_entropy, {_INPUTS}, Tensor lse, Tensor? entropy, "
    f"Tensor? target_mass, Tensor? divisor, {_OPTIONS}, int gradients, Tensor place, {SCHEMA}"
)

forward = define(
    f"linear_cross_entropy_ranks_forward({_INPUTS}, Tensor? normalizer, {_OPTIONS}, int outputs, int gradients, "
    f"{SCHEMA}) -> Tensor[]",
    _forward,
)
backward = define(f"linear_cross_entropy_ranks_backward({_OF_BACKWARD}) -> (Tensor, Tensor, Tensor)", _backward)
backward_accumulate = define(
    f"linear_cross_entropy_ranks_backward_accumulate(Tensor(a!) grad_weight, {_OF_BACKWARD}) -> (Tensor, Tensor)",
    _backward_accumulate,
)
refuse_lost_derivatives(_OP, forward, backward, backward_accumulate)


@register_fake("linear_cross_entropy_ranks_forward")
def _(*arguments: Any) -> list[Tensor]:
    tensors, options, (outputs, gradients, *_) = by_name(ForwardTensors, arguments)
    made = empty_outputs(tensors.input, list(tensors.target.shape), options.reduction, outputs)
    place = torch.empty(len(Place._fields), dtype=torch.int64, device="cpu")
    return [*made, *empty_gradients(tensors, gradients), place]


@register_fake("linear_cross_entropy_ranks_backward")
def _(*arguments: Any) -> tuple[Tensor, ...]:
    tensors, _, (gradients, *_) = by_name(BackwardTensors, arguments)
    made = in_places(empty_gradients(tensors, gradients), gradients)
    return tuple(tensors.input.new_empty(0) if each is None else each for each in made)
