"""linear_kl_div: the KL divergence of two heads, a student's and a teacher's, in chunks of rows (head.py).

Gradients are computed in the forward, for an upstream gradient of 1, added up in float32 over the chunks, and rounded
once, in the backward, when the upstream gradient has multiplied them. Where each row has its own upstream gradient, and
in a second backward, the backward computes each chunk again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eaves._chunked.head import add_gradients, counted, logits_of
from eaves._torch.checks import accumulator_dtype, given
from eaves._torch.head import Product, refuse_zero3
from eaves._torch.operator import call, gradients_of
from eaves._torch.outputs import NONE

_rescale = torch.ops.eaves.cross_entropy_rescale.default

OP = "linear_kl_div"


class Settings(NamedTuple):
    divergence: str
    beta: float
    temperature: float
    chunk: int  # rows
    block: int  # classes of a head, or of its gradient, that are converted at once


# ------------------------------------------------------------------------------------------------------ rows of a chunk
#
# From log-probabilities of student and teacher, [rows, V], both of which are written over: the divergence of each row,
# and the gradient of the student's logits divided by temperature. Of "jsd" that is one of (1 - beta) * logits.


def _forward_kl(log_s: Tensor, log_t: Tensor, settings: Settings, masks: bool) -> tuple[Tensor, Tensor]:
    t = log_t.exp()
    divergence = _weighted_(log_t.sub_(log_s), t, masks).sum(1)
    return divergence, log_s.exp_().sub_(t)


def _reverse_kl(log_s: Tensor, log_t: Tensor, settings: Settings, masks: bool) -> tuple[Tensor, Tensor]:
    s = log_s.exp()
    return _centred(log_s.sub_(log_t), s, masks)


def _jsd(log_s: Tensor, log_t: Tensor, settings: Settings, masks: bool) -> tuple[Tensor, Tensor]:
    beta = settings.beta
    log_m, other = log_t + math.log(beta), log_s + math.log1p(-beta)
    torch.logaddexp(log_m, other, out=log_m)
    t = torch.exp(log_t, out=other)
    of_teacher = _weighted_(log_t.sub_(log_m), t, masks).sum(1)
    s = torch.exp(log_s, out=other)
    of_student, grad = _centred(log_s.sub_(log_m), s, masks)
    return beta * of_teacher + (1 - beta) * of_student, grad


def _weighted_(log_ratio: Tensor, p: Tensor, masks: bool) -> Tensor:
    """p * log_ratio in place of log_ratio; 0 where p is 0. Only where a class may be masked is the ratio infinite."""
    product = log_ratio.mul_(p)
    return product.masked_fill_(p == 0, 0) if masks else product


def _centred(log_ratio: Tensor, s: Tensor, masks: bool) -> tuple[Tensor, Tensor]:
    """sum s * log_ratio, and its gradient s * (log_ratio - that sum)."""
    product = _weighted_(log_ratio, s, masks)
    total = product.sum(1)
    return total, product.addcmul_(s, total.unsqueeze(1), value=-1)


DIVERGENCES: dict[str, Callable[[Tensor, Tensor, Settings, bool], tuple[Tensor, Tensor]]] = {
    "forward": _forward_kl,
    "reverse": _reverse_kl,
    "jsd": _jsd,
}


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
    the rows' sum, or where there is a `factor`, [rows, 1], of its product with it; without _constant(settings)."""
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
            divergences[chunk], grad = _of_chunk(of_student, of_teacher, settings)
            if any(wanted):
                if factor is not None:
                    grad.mul_(factor[chunk])
                if of_rows is not None:
                    grad.masked_fill_(~of_rows, 0)
                grad_hidden, *others = gradients
                of_chunk = None if grad_hidden is None else grad_hidden[chunk]
                add_gradients(grad, of_student, (of_chunk, *others), settings.block)
            del grad  # before the next chunk
        divergences.clamp_(min=0)  # of rounding; a NaN stays
        if counts is not None:
            divergences.masked_fill_(~counts.squeeze(1), 0)
    return divergences, gradients


def _of_chunk(student: Product, teacher: Product, settings: Settings) -> tuple[Tensor, Tensor]:
    log_s = torch.log_softmax(_tempered_logits(student, settings), 1)
    log_t = torch.log_softmax(_tempered_logits(teacher, settings).to(log_s.dtype), 1)
    masks = student.bias is not None or teacher.bias is not None
    return DIVERGENCES[settings.divergence](log_s, log_t, settings, masks)


def _tempered_logits(product: Product, settings: Settings) -> Tensor:
    z = logits_of(product, settings.block)
    return z if settings.temperature == 1 else z.div_(settings.temperature)


def _constant(settings: Settings) -> float:
    """What all gradients of _compute are multiplied by."""
    return (1 - settings.beta if settings.divergence == "jsd" else 1.0) / settings.temperature


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
        scaled = upstream * _constant(ctx.settings)
        gradients, ctx.gradients = ctx.gradients, None  # the caller may write over them
        is_computed = gradients is not None and not torch.is_grad_enabled()
        if is_computed and not (ctx.is_of_zero3 and ctx.needs_input_grad[1]):
            return *_finished(gradients, scaled, ctx), *(None,) * 6
        *tensors, counts = ctx.saved_tensors  # once: in a checkpoint they are computed for one reading
        student, teacher = Product(*tensors[:3]), Product(*tensors[3:])
        refuse_zero3(OP, head=student.head, bias=student.bias)
        if is_computed:
            return *_finished(gradients, scaled, ctx), *(None,) * 6

        def compute() -> tuple[Tensor | None, ...]:
            factor = scaled.unsqueeze(1) if ctx.mode == NONE else None
            _, again = _compute(student, teacher, counts, ctx.settings, ctx.needs_input_grad[:3], factor)
            return _finished(again, scaled, ctx)

        return *gradients_of(OP, compute, *given(upstream, *student)), *(None,) * 6


def _finished(gradients: list[Tensor | None], scaled: Tensor, ctx: Any) -> tuple[Tensor | None, ...]:
    """Gradients from their sums, rounded once."""
    return tuple(
        None if gradient is None else _rounded(gradient, scaled, ctx.mode, dtype)
        for gradient, dtype in zip(gradients, ctx.dtypes)
    )


def _rounded(gradient: Tensor, scaled: Tensor, mode: int, dtype: torch.dtype) -> Tensor:
    if mode != NONE:
        call(OP, _rescale, gradient, scaled, -1)  # zeros of rows that do not count stay, whatever came
    return gradient.to(dtype)
