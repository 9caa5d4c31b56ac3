"""Kernels for the passes of divergence.py over the logits of a chunk (src/ops/divergence/divergence.h)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from eaves._chunked.distributions import Logits, Number, RowFactors, RowStatistics
from eaves._torch.chunked_rules import divergence_backward, divergence_forward
from eaves._torch.operator import call

_DIVERGENCES = ("forward", "reverse", "jsd", "total_variation")  # in the order of the C++ enumeration


def statistics(
    student: Logits, teacher: Logits, temperature: Number, divergence: tuple[str, float], targets: Tensor | None
) -> Tensor:
    """[rows, 10]: the fields of RowStatistics in their order. `divergence` is its name and beta."""
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


def mark_targets_without_mass_(part: Tensor, targets: Tensor, classes: int) -> None:
    """Makes the hard loss inf for a target in a part whose logits are all -inf. The kernel writes NaN there, which
    would mean that the part does not have the target. `part`: [rows, 10]."""
    has_target = (targets >= 0) & (targets < classes)
    part[:, 9].masked_fill_(has_target & (part[:, 8] == -math.inf), math.inf)


def merged_parts(parts: Tensor, is_reverse: bool) -> Tensor:
    """[parts, rows, 10] -> [rows, 10]. For mixtures of disjoint distributions, a KL divergence is the mean of the
    parts' divergences plus the divergence of the parts' masses; an entropy likewise."""
    divergence, *lses, centre, entropy, hard_largest, hard_log_sum, hard_loss = parts.unbind(-1)

    def merged(largest: Tensor, log_sum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The lse of all parts, and the logarithm of each part's mass."""
        of_all = largest.amax(0)
        log_sum_of_all = torch.logsumexp(largest - of_all + log_sum, 0)
        return of_all, log_sum_of_all, (largest - of_all) + (log_sum - log_sum_of_all)

    def mean(numbers: Tensor, log_p: Tensor) -> Tensor:
        p = log_p.exp()
        return (numbers * p).masked_fill_(p == 0, 0).sum(0)

    (*lse, log_s), (*teacher_lse, log_t) = merged(*lses[:2]), merged(*lses[2:])
    *hard_lse, log_hard = merged(hard_largest, hard_log_sum)
    log_p, log_q = (log_s, log_t) if is_reverse else (log_t, log_s)
    # The kernel's divergence is inf - inf in a part without mass of q.
    divergence = mean((divergence + (log_p - log_q)).masked_fill_(log_q == -math.inf, math.inf), log_p)
    entropy = mean(entropy - log_s, log_s)
    # One part has the target, the other parts have NaN.
    hard_loss = hard_loss - log_hard
    hard_loss = hard_loss.masked_fill(hard_loss.isnan(), -math.inf).amax(0)
    hard_loss = hard_loss.masked_fill(hard_loss == -math.inf, math.nan)
    centre = divergence if is_reverse else centre[0]
    numbers = (divergence.clamp(min=0), *lse, *teacher_lse, centre, entropy, *hard_lse, hard_loss)
    return torch.stack(numbers, -1)


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
    """A number for each row of `values` and 0.0, or None and one number for all rows."""
    if isinstance(number, Tensor):
        return number.float().expand(values.shape[0], 1)[:, 0], 0.0
    return None, number or 0.0
