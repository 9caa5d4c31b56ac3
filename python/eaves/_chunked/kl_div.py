"""linear_kl_div: the divergence of two distributions over the classes, a student's head and a teacher's, in chunks of
rows (head.py, divergence.py).

The forward computes gradients for an upstream gradient of 1 and sums them in float32 over the chunks. The backward
multiplies them by the upstream gradient and rounds once. If rows or further outputs have upstream gradients of their
own, and in a second backward, the backward computes each chunk again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eaves._chunked.distributions import (
    DivergenceSettings,
    Logits,
    Number,
    RowFactors,
    RowStatistics,
    TopK,
)
from eaves._chunked.divergence import statistics, top_k_of, write_gradient
from eaves._chunked.head import add_gradients, counted, logits_of, sum_over_ranks
from eaves._torch.checks import accumulator_dtype, given
from eaves._torch.head import Product, refuse_zero3
from eaves._torch.operator import apply, call, gradients_of
from eaves._torch.outputs import NONE
from eaves._torch.transforms import needs_autograd

_rescale = torch.ops.eaves.cross_entropy_rescale.default

OP = "linear_kl_div"


class Rows(NamedTuple):
    """One number for each row; None: all rows are alike."""

    counts: Tensor | None  # [rows, 1], bool
    kept: Tensor | None  # the indices of the rows that are computed, because the others do not count; None: all
    temperature: Tensor | None  # [rows, 1], in the dtype of sums; 1 for rows that do not count
    weight: Tensor | None  # [rows, 1], in the dtype of sums; 0 for rows that do not count
    targets: Tensor | None  # [rows], int64; 0 for rows that do not count

    def places(self, begin: int, end: int) -> Any:
        return slice(begin, end) if self.kept is None else self.kept[begin:end]


class Settings(NamedTuple):
    of_rows: DivergenceSettings
    teacher: str  # "head", "top_k", or a kind of Logits
    teacher_rest: str
    scales: tuple[float, float]  # for student and teacher
    softcaps: tuple[float | None, float | None]
    temperature: float  # if rows have no temperature of their own
    hard_weight: float | None
    mode: int  # the reduction
    chunk: int  # rows with logits at once
    group: int  # rows with a gradient of logits at once, a multiple of `chunk`
    grad_weight_out: Tensor | None


class Outputs(NamedTuple):
    """[rows], 0 for rows that do not count; the loss may be the sum of its rows."""

    loss: Tensor
    divergence: Tensor
    lse: Tensor
    teacher_lse: Tensor | None
    entropy: Tensor | None
    hard_loss: Tensor | None


def outputs_of(settings: Settings, student: Product, teacher: Sequence[Tensor | None], rows: Rows) -> Outputs:
    """`teacher`: hidden states [rows, E], head and bias; or values of each class, [rows..., V]; or the top K tokens and
    log-probabilities, [rows, K]."""
    tensors = (*student, *[*teacher, None, None][:3], *rows)
    if needs_autograd(*given(*student)):
        return Outputs(*apply(OP, _Divergence, settings, *tensors))
    return _compute(settings, tensors, (False, False, False))[0]


# ------------------------------------------------------------------------------------------------------------ the loop


def _compute(
    settings: Settings,
    tensors: Sequence[Any],
    wanted: Sequence[bool],
    upstream: RowFactors | None = None,
    grad_head: Tensor | None = None,
) -> tuple[Outputs, list[Tensor | None]]:
    """The outputs, and the wanted gradients of the student's tensors in the dtype of sums. The gradients are of the sum
    of the rows' losses, or follow from `upstream`, the gradients of the rows' statistics. `grad_head`, if given, is the
    tensor to add the gradient of the head to."""
    student, teacher, rows = Product(*tensors[:3]), tensors[3:6], Rows(*tensors[6:])
    x, dtype = student.hidden, accumulator_dtype(student.hidden.dtype)
    upstream = upstream or _of_loss(1.0, settings, rows)
    gradients = [
        x.new_zeros(each.shape, dtype=dtype) if wants and each is not None and into is None else into
        for each, wants, into in zip(student, wanted, (None, grad_head, None))
    ]
    found: list[Any] = [None] * (len(RowStatistics._fields) - 1)  # without the terms of a top K
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        student = student.as_multiplied()
        if settings.teacher == "head":
            teacher = Product(*teacher).as_multiplied()
        elif settings.teacher == "top_k":
            temperature = settings.temperature if rows.temperature is None else rows.temperature
            (tokens, log_probs, _), columns = teacher, student.head.shape[0]
            over_ranks = settings.of_rows.over_ranks
            teacher = top_k_of(tokens, log_probs, temperature, settings.teacher_rest, columns, over_ranks, dtype)
        # The gradient of a bias sums numbers that are not rounded, so it needs the gradient of the logits in full.
        is_in_place = x.dtype == dtype or gradients[2] is not None
        size = settings.chunk if is_in_place else settings.group
        for begin, end in _slices(0, x.shape[0] if rows.kept is None else rows.kept.shape[0], size):
            places = rows.places(begin, end)
            group = student._replace(hidden=counted(x[places], _part(rows.counts, places)))
            grad: Tensor | None = None
            if any(wanted) and not is_in_place:
                grad = x.new_empty((end - begin, student.head.shape[0]))
            for first, last in _slices(begin, end, settings.chunk):
                chunk, places = slice(first - begin, last - begin), rows.places(first, last)
                part, targets = group._replace(hidden=group.hidden[chunk]), _part(rows.targets, places)
                both = _distributions(settings, part, teacher, rows, places)
                of_rows = statistics(*both, settings.of_rows, targets)
                for index, numbers in enumerate(of_rows[:-1]):
                    if numbers is not None:
                        if found[index] is None:
                            found[index] = x.new_zeros((x.shape[0], *numbers.shape[1:]), dtype=dtype)
                        found[index][places] = numbers
                if any(wanted):
                    out = both[0].values if grad is None else grad[chunk]
                    factors = RowFactors(*[_counted_part(each, rows.counts, places, dtype) for each in upstream])
                    write_gradient(*both, settings.of_rows, of_rows, targets, factors, out)
                    grad = out if grad is None else grad
                    del out
                del both  # before the next chunk
            if grad is not None:
                _add_gradients(grad, group, gradients, rows.places(begin, end))
            del grad
        if gradients[0] is not None:
            gradients[0] = sum_over_ranks(gradients[0], x.dtype, settings.of_rows.over_ranks)
        return _outputs(found, settings, rows, x), gradients


def _slices(begin: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    return ((first, min(first + size, end)) for first in range(begin, end, max(1, size)))


def _part(of_rows: Any, places: Any) -> Any:
    return of_rows[places] if isinstance(of_rows, Tensor) else of_rows


def _counted_part(of_rows: Number | None, counts: Tensor | None, places: Any, dtype: torch.dtype) -> Number | None:
    """The part of `of_rows` at `places`, with 0 for rows that do not count."""
    part: Number | None = _part(of_rows, places)
    if part is None or counts is None:
        return part
    return torch.where(counts[places], part if isinstance(part, Tensor) else counts.new_full((), part, dtype=dtype), 0)


def _distributions(
    settings: Settings, student: Product, teacher: Any, rows: Rows, places: Any
) -> tuple[Logits, Logits | TopK, Number]:
    """The distributions of a chunk and their temperature. Teacher rows that do not count may hold anything: no sum has
    them."""
    (scale, teacher_scale), (softcap, teacher_softcap) = settings.scales, settings.softcaps
    z = Logits(logits_of(student._replace(bias=None)), student.bias, scale, softcap)
    of_teacher: Logits | TopK
    if settings.teacher == "head":
        product = teacher._replace(hidden=teacher.hidden[places], bias=None)
        of_teacher = Logits(logits_of(product), teacher.bias, teacher_scale, teacher_softcap)
    elif settings.teacher == "top_k":
        of_teacher = teacher.of_rows(places)
    else:
        values = _rows_of(teacher[0], places)
        of_teacher = Logits(values, None, teacher_scale, teacher_softcap, settings.teacher)
    return z, of_teacher, settings.temperature if rows.temperature is None else rows.temperature[places]


def _rows_of(values: Tensor, places: Any) -> Tensor:
    """The rows at `places` of [rows..., V]; no other row is copied."""
    if values.dim() == 2:
        found = values[places]
    else:
        indices = torch.arange(places.start, places.stop, device=values.device) if isinstance(places, slice) else places
        found = values[torch.unravel_index(indices, values.shape[:-1])]
    return found if found.stride(1) == 1 else found.contiguous()


def _add_gradients(grad: Tensor, group: Product, gradients: list[Tensor | None], places: Any) -> None:
    grad_hidden, *others = gradients
    if grad_hidden is None or isinstance(places, slice):
        add_gradients(grad, group, (None if grad_hidden is None else grad_hidden[places], *others))
        return
    of_group = grad_hidden.new_zeros(group.hidden.shape)
    add_gradients(grad, group, (of_group, *others))
    grad_hidden[places] = of_group


def _outputs(found: list[Tensor | None], settings: Settings, rows: Rows, x: Tensor) -> Outputs:
    """The outputs, from the statistics of all rows."""
    numbers = [
        x.new_zeros(x.shape[0], dtype=accumulator_dtype(x.dtype))
        if each is None
        else each.sum(1)
        if each.dim() == 2
        else each
        for each in found
    ]
    if rows.counts is not None:
        numbers = [each.masked_fill(~rows.counts.squeeze(1), 0) for each in numbers]
    divergence, lse, teacher_lse, _, entropy, _, hard_loss = numbers
    loss = divergence if settings.hard_weight is None else divergence + settings.hard_weight * hard_loss
    if rows.weight is not None:
        loss = loss * rows.weight.squeeze(1)
    has_hard_loss, has_entropy = settings.of_rows.has_hard_loss, settings.of_rows.has_entropy
    return Outputs(
        loss.clone() if settings.mode == NONE else loss.sum(), divergence, lse,
        None if settings.teacher == "top_k" else teacher_lse, entropy if has_entropy else None,
        hard_loss if has_hard_loss else None,
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------------- the gradients


def _of_loss(upstream: Number, settings: Settings, rows: Rows) -> RowFactors:
    """The upstream gradients of the rows' statistics, from the upstream gradient of each row's loss."""
    of_rows = upstream if rows.weight is None else upstream * rows.weight
    return RowFactors(of_rows, hard_loss=None if settings.hard_weight is None else settings.hard_weight * of_rows)


def _upstream_of(grads: Sequence[Tensor | None], settings: Settings, rows: Rows, count: int) -> RowFactors:
    """The same from the upstream gradients of all outputs. The loss may have one gradient for all rows."""
    of_loss, divergence, lse, _, entropy, hard_loss = (
        None if each is None else each.reshape(-1, 1).expand(count, 1) for each in grads
    )
    found = RowFactors(None) if of_loss is None else _of_loss(of_loss, settings, rows)
    return RowFactors(
        *[
            each if other is None else other if each is None else each + other
            for each, other in zip(found, (divergence, lse, entropy, hard_loss))
        ]
    )


class _Divergence(torch.autograd.Function):
    """(settings, tensors of student, teacher and rows) -> Outputs."""

    @staticmethod
    def forward(ctx: Any, settings: Settings, *tensors: Any) -> Outputs:
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        ctx.settings, is_computed = settings, settings.mode != NONE
        wanted = ctx.needs_input_grad[1:4] if is_computed else (False, False, False)
        found, computed = _compute(settings, tensors, wanted)
        ctx.gradients = computed if is_computed else None
        ctx.dtypes = [None if each is None else each.dtype for each in tensors[:3]]
        ctx.is_of_zero3 = hasattr(tensors[1], "ds_id")
        if found.teacher_lse is not None:
            ctx.mark_non_differentiable(found.teacher_lse)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        settings: Settings = ctx.settings
        out, wanted = settings.grad_weight_out, ctx.needs_input_grad[1:4]
        others = (None,) * 8
        if not given(*grads):
            return None, None, None, None, *others
        if out is not None and torch.is_grad_enabled():
            raise NotImplementedError(
                f"{OP}: with grad_weight_out the gradient has no derivative (create_graph=True); leave it out"
            )
        gradients, ctx.gradients = ctx.gradients, None  # the caller may write over them
        of_loss_alone = settings.mode != NONE and not given(*grads[1:])
        is_computed = gradients is not None and not torch.is_grad_enabled() and of_loss_alone
        if is_computed and not (ctx.is_of_zero3 and wanted[1]):
            return None, *_finished(gradients, grads[0], ctx), *others
        tensors = ctx.saved_tensors  # read once: a checkpoint computes them for one reading
        refuse_zero3(OP, head=tensors[1], bias=tensors[2])
        if is_computed:
            return None, *_finished(gradients, grads[0], ctx), *others

        def compute() -> tuple[Tensor | None, ...]:
            if of_loss_alone:  # the same bits again
                return _finished(_compute(settings, tensors, wanted)[1], grads[0], ctx)
            upstream = _upstream_of(grads, settings, Rows(*tensors[6:]), tensors[0].shape[0])
            _, again = _compute(settings, tensors, wanted, upstream, out if wanted[1] else None)
            return _finished(again, None, ctx)

        return None, *gradients_of(OP, compute, *given(*grads, *tensors[:3])), *others


def _finished(gradients: list[Tensor | None], upstream: Tensor | None, ctx: Any) -> tuple[Tensor | None, ...]:
    """The gradients: their sums, multiplied by the upstream gradient if there is one, and rounded once."""
    out = ctx.settings.grad_weight_out
    if upstream is not None:
        for each in given(*gradients):
            call(OP, _rescale, each, upstream, -1)  # zeros of rows that do not count stay 0 for any upstream gradient
    if out is not None and gradients[1] is not None:
        if upstream is not None:
            out.add_(gradients[1])
        gradients[1] = None
    return tuple(None if each is None else each.to(dtype) for each, dtype in zip(gradients, ctx.dtypes))
