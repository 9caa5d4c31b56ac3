"""A call of linear_kl_div: its arguments, checked here, and the way that it takes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eaves._arguments import reduction_of
from eaves._calls.linear_cross_entropy import with_tensors_of_linear
from eaves._chunked.divergence import DIVERGENCES, DivergenceSettings
from eaves._chunked.head import chunk_sizes
from eaves._chunked.kl_div import OP, Divergence, Settings, forward_only
from eaves._parallel.fully_shard import is_fully_sharded, with_whole_head
from eaves._torch.checks import (
    accumulator_dtype,
    check_beside,
    check_dtype_of,
    check_shape,
    explain,
    index_of,
    number_of,
    refuse_gradient,
    value_for_message,
)
from eaves._torch.head import Product, checked_head, workspace_of
from eaves._torch.operator import apply
from eaves._torch.options import CLASS_DTYPES, RANGES, normalizer_of, shape_of
from eaves._torch.outputs import MEAN, NONE
from eaves._torch.rows import counts_of, divisor_of
from eaves._torch.transforms import is_exporting, is_transforming, needs_autograd, uncompiled

_STUDENT = ("hidden", "head", "bias")
_TEACHER = ("teacher_hidden", "teacher_head", "teacher_bias")


class KlDivCall(NamedTuple):
    """The arguments of eaves.linear_kl_div, as they were passed."""

    hidden: Tensor
    head: Any  # a Tensor or a torch.nn.Linear
    bias: Tensor | None
    teacher_hidden: Tensor
    teacher_head: Any
    teacher_bias: Tensor | None
    targets: Tensor | None
    divergence: str
    beta: float
    temperature: float | None
    ignore_index: int
    reduction: str
    normalizer: Tensor | float | None
    workspace_bytes: int | None


def divergence_of(call: KlDivCall) -> Tensor:
    for names in (_STUDENT, _TEACHER):
        if isinstance(getattr(call, names[1]), torch.nn.Linear):
            call = with_tensors_of_linear(OP, call, *names[1:])
    for names in (_STUDENT, _TEACHER):
        if is_fully_sharded(getattr(call, names[1])):
            return with_whole_head(OP, divergence_of, call, names)
    hidden, head, teacher_hidden, teacher_head = call.hidden, call.head, call.teacher_hidden, call.teacher_head
    if is_exporting() or is_transforming():
        raise NotImplementedError(f"{OP}: it does not work inside of torch.export, torch.vmap and torch.func")
    student, teacher = (_product_of(call, names) for names in (_STUDENT, _TEACHER))
    rows, classes = hidden.shape[:-1], head.shape[0]
    check_shape(
        OP, "teacher_hidden", teacher_hidden, [*rows, teacher_hidden.shape[-1]], f"rows as hidden {shape_of(hidden)}"
    )
    if teacher_head.shape[0] != classes:
        raise ValueError(
            f"{OP}: teacher_head has shape {shape_of(teacher_head)}, expected [{classes}, "
            f"{teacher_hidden.shape[-1]}] (classes as head {shape_of(head)}); where one vocabulary is "
            "the other and padding, cut the larger head and its bias"
        )
    refuse_gradient(OP, "teacher_hidden", teacher_hidden)
    ignore_index = index_of(OP, "ignore_index", call.ignore_index)
    counts = None if call.targets is None else _counts(call.targets, hidden, ignore_index)
    dtype = accumulator_dtype(student.hidden.dtype)
    mode = reduction_of(OP, call.reduction)
    normalizer = call.normalizer
    if normalizer is not None:
        normalizer = normalizer_of(OP, normalizer, mode, dtype, hidden.device)
        # As the core's, which this loss does not call: of a GPU it is not known here.
        if normalizer.device.type == "cpu" and not torch.compiler.is_compiling() and normalizer.item() < 0:
            raise ValueError(f"{OP}: normalizer is {normalizer.item()}, expected a number that is not negative")
    settings = _settings(call, student, teacher)

    try:
        teacher_tensors = [None if each is None else each.detach() for each in teacher]
        tensors = (*student, *teacher_tensors, counts)
        if needs_autograd(*[each for each in student if each is not None]):
            found: Tensor = uncompiled(OP, apply)(OP, Divergence, *tensors, settings, mode)
        else:
            found = uncompiled(OP, forward_only)(*tensors, settings, mode)
    except (TypeError, RuntimeError) as error:
        explain(OP, error, head=head, teacher_head=teacher_head)
        raise
    if mode == NONE:
        return found.view(rows)
    return _mean(found, normalizer, counts, rows) if mode == MEAN else found


def _product_of(call: KlDivCall, names: tuple[str, str, str]) -> Product:
    hidden, head, bias = (getattr(call, name) for name in names)
    hidden, head, bias = checked_head(OP, hidden, head, bias, names, ("hidden", call.hidden))
    return Product(hidden.reshape(-1, hidden.shape[-1]), head, bias)


def _counts(targets: Tensor, hidden: Tensor, ignore_index: int) -> Tensor:
    """Which rows count: [rows, 1]."""
    check_beside(OP, "targets", targets, "hidden", hidden)
    check_dtype_of(OP, "targets", targets, CLASS_DTYPES, "classes")
    check_shape(OP, "targets", targets, hidden.shape[:-1], f"one per row of hidden {shape_of(hidden)}")
    return counts_of(targets, ignore_index).reshape(-1, 1)


def _settings(call: KlDivCall, student: Product, teacher: Product) -> Settings:
    divergence, temperature = call.divergence, call.temperature
    if not isinstance(divergence, str) or divergence not in DIVERGENCES:
        error = ValueError if isinstance(divergence, str) else TypeError
        raise error(f'{OP}: divergence is {divergence!r}, expected "forward", "reverse" or "jsd"')
    between = 'a number between 0 and 1, neither of them; what others have there is "forward" for 0, "reverse" for 1'
    beta = number_of(OP, "beta", call.beta, 0, 1, between)
    if divergence == "jsd" and not 0 < beta < 1:
        raise ValueError(f"{OP}: beta is {value_for_message(beta)}, expected {between}")
    divisor = 1.0 if temperature is None else number_of(OP, "temperature", temperature, *RANGES["scale"])
    limit = workspace_of(OP, call.workspace_bytes, student.hidden.device)
    rows, classes = student.hidden.shape[0], student.head.shape[0]
    # Both logits, both log-probabilities, one tensor more and a mark; of "jsd" three tensors.
    of_class = (7 if divergence == "jsd" else 5) * accumulator_dtype(student.hidden.dtype).itemsize + 1
    sizes = chunk_sizes(rows, classes, classes * of_class, limit, student, teacher)
    return Settings(DivergenceSettings(divergence, beta), divisor, *sizes)


def _mean(total: Tensor, normalizer: Tensor | None, counts: Tensor | None, rows: torch.Size) -> Tensor:
    """The sum over the rows divided by what it is divided by. Over 0 it is as in the other losses: infinite, but for
    0 / 0, which is 0; and the gradient is 0."""
    if normalizer is None and counts is None:
        return total * (1 / max(1, math.prod(rows)))
    if normalizer is not None:
        divisor = normalizer.reshape(()).to(total.dtype)
    else:
        assert counts is not None
        divisor = divisor_of(counts.flatten(), None, total.dtype)
    is_zero = divisor == 0
    mean = torch.where(is_zero, 0, total * (1 / divisor.masked_fill(is_zero, 1)))
    return torch.where(is_zero & (total.detach() != 0), math.inf, mean)
