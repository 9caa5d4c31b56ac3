"""linear_kl_div: the KL divergence of two heads, a student's and a teacher's, in chunks of rows (head.py).

Gradients are computed in the forward, for an upstream gradient of 1, added up in float32 over the chunks, and rounded
once, in the backward, when the upstream gradient has multiplied them. Where each row has its own upstream gradient, and
in a second backward, the backward computes each chunk again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from eaves._chunked.divergence import DivergenceSettings, Logits, RowFactors, statistics, write_gradient
from eaves._chunked.head import add_gradients, counted, logits_of
from eaves._torch.checks import accumulator_dtype, given
from eaves._torch.head import Product, refuse_zero3
from eaves._torch.operator import call, gradients_of
from eaves._torch.outputs import NONE

_rescale = torch.ops.eaves.cross_entropy_rescale.default

OP = "linear_kl_div"


class Settings(NamedTuple):
    of_rows: DivergenceSettings
    temperature: float
    chunk: int  # rows
    block: int  # classes of a head, or of its gradient, that are converted at once


# ------------------------------------------------------------------------------------------------------------- the call


def _compute(
    student: Product,
    teacher: Product,
    counts: Tensor | None,
    settings: Settings,
    wanted: tuple[bool, bool, bool],
    factor: Tensor | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """The divergences of the rows, and the gradients of the student's tensors that are wanted, in the dtype of sums, of
    the rows' sum, or where there is a `factor`, [rows, 1], of its product with it."""
    dtype = accumulator_dtype(student.hidden.dtype)
    rows = student.hidden.shape[0]
    divergences = student.hidden.new_empty(rows, dtype=dtype)
    gradients = [
        student.hidden.new_zeros(each.shape, dtype=dtype) if wants and each is not None else None
        for each, wants in zip(student, wanted)
    ]
    with torch.no_grad(), torch.autocast(student.hidden.device.type, enabled=False):
        student, teacher = student.as_multiplied(), teacher.as_multiplied()
        for begin in range(0, rows, max(1, settings.chunk)):
            chunk = slice(begin, begin + settings.chunk)
            of_rows = None if counts is None else counts[chunk]
            of_student, of_teacher = (
                each._replace(hidden=counted(each.hidden[chunk], of_rows)) for each in (student, teacher)
            )
            z, teacher_z = (Logits(logits_of(each, settings.block)) for each in (of_student, of_teacher))
            found = statistics(z, teacher_z, settings.temperature, settings.of_rows, None)
            divergences[chunk] = found.divergence
            if any(wanted):
                upstream = RowFactors(1.0 if factor is None else factor[chunk])
                grad = z.values
                if gradients[2] is None and grad.dtype != of_student.hidden.dtype:
                    grad = grad.view(of_student.hidden.dtype)[:, : grad.shape[1]]
                write_gradient(
                    z, teacher_z, settings.temperature, settings.of_rows, found, None, upstream, grad
                )  # fmt: skip
                if of_rows is not None:
                    grad.masked_fill_(~of_rows, 0)
                grad_hidden, *others = gradients
                of_chunk = None if grad_hidden is None else grad_hidden[chunk]
                add_gradients(grad, of_student, (of_chunk, *others), settings.block)
                del grad
            del z, teacher_z  # before the next chunk
        if counts is not None:
            divergences.masked_fill_(~counts.squeeze(1), 0)
    return divergences, gradients


def forward_only(*arguments: Any) -> Tensor:
    """Without gradients, from the arguments of Divergence."""
    *tensors, counts, settings, mode = arguments
    divergences, _ = _compute(Product(*tensors[:3]), Product(*tensors[3:]), counts, settings, (False, False, False))
    return divergences if mode == NONE else divergences.sum()


class Divergence(torch.autograd.Function):
    """The tensors of student and teacher, which rows count, the settings and the reduction -> the divergences of the
    rows, or their sum."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, counts, ctx.settings, ctx.mode = arguments
        ctx.save_for_backward(*tensors, counts)
        wanted = (False, False, False) if ctx.mode == NONE else ctx.needs_input_grad[:3]
        divergences, computed = _compute(Product(*tensors[:3]), Product(*tensors[3:]), counts, ctx.settings, wanted)
        ctx.gradients = None if ctx.mode == NONE else computed
        ctx.dtypes = [None if each is None else each.dtype for each in tensors[:3]]
        ctx.is_of_zero3 = hasattr(tensors[1], "ds_id")
        return divergences if ctx.mode == NONE else divergences.sum()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, None  # the caller may write over them
        is_computed = gradients is not None and not torch.is_grad_enabled()
        if is_computed and not (ctx.is_of_zero3 and ctx.needs_input_grad[1]):
            return *_finished(gradients, upstream, ctx), *(None,) * 6
        *tensors, counts = ctx.saved_tensors  # once: in a checkpoint they are computed for one reading
        student, teacher = Product(*tensors[:3]), Product(*tensors[3:])
        refuse_zero3(OP, head=student.head, bias=student.bias)
        if is_computed:
            return *_finished(gradients, upstream, ctx), *(None,) * 6

        def compute() -> tuple[Tensor | None, ...]:
            factor = upstream.unsqueeze(1) if ctx.mode == NONE else None
            _, again = _compute(student, teacher, counts, ctx.settings, ctx.needs_input_grad[:3], factor)
            return _finished(again, upstream, ctx)

        return *gradients_of(OP, compute, *given(upstream, *student)), *(None,) * 6


def _finished(gradients: list[Tensor | None], upstream: Tensor, ctx: Any) -> tuple[Tensor | None, ...]:
    """Gradients from their sums, rounded once."""
    return tuple(
        None if gradient is None else _rounded(gradient, upstream, ctx.mode, dtype)
        for gradient, dtype in zip(gradients, ctx.dtypes)
    )


def _rounded(gradient: Tensor, upstream: Tensor, mode: int, dtype: torch.dtype) -> Tensor:
    if mode != NONE:
        call(OP, _rescale, gradient, upstream, -1)  # zeros of rows that do not count stay, whatever came
    return gradient.to(dtype)
