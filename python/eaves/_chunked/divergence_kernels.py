"""The passes of divergence.py over the logits of a chunk by kernels, see src/ops/divergence/divergence.h."""

from __future__ import annotations

from torch import Tensor

from eaves._chunked.distributions import Logits, Number, RowFactors, RowStatistics
from eaves._torch.chunked_rules import divergence_backward, divergence_forward
from eaves._torch.operator import call

_DIVERGENCES = ("forward", "reverse", "jsd", "total_variation")  # numbers of the enumeration


def statistics(
    student: Logits, teacher: Logits, temperature: Number, divergence: tuple[str, float], targets: Tensor | None
) -> Tensor:
    """[rows, 10], the statistics of RowStatistics in their order. `divergence`: its name and beta."""
    arguments = _arguments(student, teacher, temperature, divergence, targets)
    found: Tensor = call("linear_kl_div", divergence_forward, *arguments)
    return found


def write_gradient(
    student: Logits,
    teacher: Logits,
    temperature: Number,
    divergence: tuple[str, float],
    of_rows: RowStatistics,
    targets: Tensor | None,
    upstream: RowFactors,
    out: Tensor,
) -> None:
    teacher_lse = of_rows.lse if of_rows.teacher_lse is None else of_rows.teacher_lse
    numbers = of_rows.lse, teacher_lse, of_rows.centre, of_rows.entropy, of_rows.hard_lse, of_rows.hard_loss
    factors = [_of_rows(each, out) for each in upstream]
    arguments = _arguments(student, teacher, temperature, divergence, targets)
    tensors, constants = [tensor for tensor, _ in factors], [constant for _, constant in factors]
    call("linear_kl_div", divergence_backward, out, *arguments, *numbers, *tensors, constants)


def _arguments(
    student: Logits, teacher: Logits, temperature: Number, divergence: tuple[str, float], targets: Tensor | None
) -> tuple[object, ...]:
    """The arguments of both operators."""
    logits: list[Tensor | None] = []
    for each in (student, teacher):
        values = each.values if each.values.stride(1) == 1 else each.values.contiguous()
        logits += [values, None if each.bias is None else each.bias.float().contiguous()]
    (name, beta), (of_rows, constant) = divergence, _of_rows(temperature, student.values)
    heads = [number for each in (student, teacher) for number in (each.scale, each.softcap or 0.0)]
    which = _DIVERGENCES.index(name)
    return *logits, of_rows, targets, which, teacher.kind == "probs", [*heads, constant, beta]


def _of_rows(number: Number | None, values: Tensor) -> tuple[Tensor | None, float]:
    """One for each of the rows of `values`, or one for all."""
    if isinstance(number, Tensor):
        return number.float().expand(values.shape[0], 1)[:, 0], 0.0
    return None, number or 0.0
