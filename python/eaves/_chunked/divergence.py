"""The divergence of two distributions over the classes, in a chunk of rows, and the gradient of the student's logits.

A divergence is a sum over the classes of f(s_v, t_v). With f' its derivative by s_v, the gradient of the student's
logit is

    s_v * (f'_v - centre),      centre = sum_u s_u * f'_u

so that a second pass over the logits needs numbers of the rows alone: both lse, and the centre. A constant in f'
cancels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from eaves._chunked.head import Tempering
from eaves._torch.checks import accumulator_dtype

Number = Tensor | float  # a Tensor has one for each row, [rows, 1]


class Logits(NamedTuple):
    """Of a chunk, one of the two distributions. With u = values + bias its logits z are

    z = softcap * tanh(scale * u / softcap) / temperature      (no softcap: scale * u / temperature)
    """

    values: Tensor  # [rows, V], float32 or float64; a teacher's may have 16 bits
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None
    kind: str = "logits"  # of a teacher also "log_probs", whose softmax they are, and "probs", u = log(values)


class DivergenceSettings(NamedTuple):
    divergence: str  # a name in DIVERGENCES
    beta: float  # of "jsd", in ]0, 1[
    has_entropy: bool = False
    has_hard_loss: bool = False


class RowStatistics(NamedTuple):
    """Numbers of the rows, [rows], in the dtype of sums. An lse is two numbers, [rows, 2]: the largest logit, and the
    logarithm of the sum of exp(z - largest)."""

    divergence: Tensor
    lse: Tensor  # of the student
    teacher_lse: Tensor
    centre: Tensor
    entropy: Tensor | None  # of the student, in nats
    hard_lse: Tensor | None  # of the student at temperature 1
    hard_loss: Tensor | None  # the student's cross entropy of the targets at temperature 1


class RowFactors(NamedTuple):
    """The upstream gradients of each row's statistics, [rows, 1] or one number; None: there is none."""

    divergence: Number | None
    lse: Number | None = None
    entropy: Number | None = None
    hard_loss: Number | None = None


def statistics(
    student: Logits, teacher: Logits, temperature: Number, settings: DivergenceSettings, targets: Tensor | None
) -> RowStatistics:
    """`targets` are the classes of the hard loss, [rows], int64."""
    log_s, lse = _log_probs(student, temperature)
    log_t, teacher_lse = _log_probs(teacher, temperature, log_s.dtype)
    entropy = -_weighted_(log_s.clone(), log_s.exp()).sum(1) if settings.has_entropy else None
    divergence, weighted, _ = DIVERGENCES[settings.divergence](log_s, log_t, settings.beta)
    # sum t is 1 but for roundings, which would be there of two equal distributions.
    centre = lse.new_full(lse.shape[:1], -1.0) if settings.divergence == "forward" else weighted.sum(1)
    del log_s, log_t, weighted
    hard_lse = hard_loss = None
    if settings.has_hard_loss:
        assert targets is not None
        hard_log_s, hard_lse = _log_probs(student, 1.0)
        hard_loss = -hard_log_s.gather(1, targets.unsqueeze(1)).squeeze(1)
    return RowStatistics(divergence.clamp_(min=0), lse, teacher_lse, centre, entropy, hard_lse, hard_loss)


def write_gradient(
    student: Logits,
    teacher: Logits,
    temperature: Number,
    settings: DivergenceSettings,
    of_rows: RowStatistics,
    targets: Tensor | None,
    upstream: RowFactors,
    out: Tensor,
) -> None:
    """Writes the gradient of the student's `values`, rounded once to the dtype of `out`, [rows, V]. That may be the
    memory of `student.values`, of which row r of `out` lies in row r."""
    log_s, _ = _log_probs(student, temperature, lse=of_rows.lse)
    if upstream.divergence is not None:
        log_t, _ = _log_probs(teacher, temperature, log_s.dtype, of_rows.teacher_lse)
        _, grad, s = DIVERGENCES[settings.divergence](log_s, log_t, settings.beta)
        del log_s, log_t
        grad.addcmul_(s, of_rows.centre.unsqueeze(1), value=-1).mul_(upstream.divergence)
        if upstream.lse is not None:
            grad.add_(s.mul_(upstream.lse))
    else:
        grad = log_s.exp_().mul_(0.0 if upstream.lse is None else upstream.lse)
        del log_s
    if upstream.entropy is not None:
        assert of_rows.entropy is not None
        log_s, _ = _log_probs(student, temperature, lse=of_rows.lse)
        s = log_s.exp()
        grad.sub_(_weighted_(log_s.add_(of_rows.entropy.unsqueeze(1)), s).mul_(upstream.entropy))
    grad.mul_(_slope(student, temperature))
    if upstream.hard_loss is not None:
        assert targets is not None and of_rows.hard_loss is not None
        hard = _log_probs(student, 1.0, lse=of_rows.hard_lse)[0].exp_()
        # At the target p - 1, in which nothing cancels.
        hard.scatter_(1, targets.unsqueeze(1), torch.expm1(-of_rows.hard_loss).unsqueeze(1))
        grad.add_(hard.mul_(_slope(student, 1.0)).mul_(upstream.hard_loss))
    out.copy_(grad)


# ------------------------------------------------------------------------------------------- in PyTorch's own operators


def _tempering(logits: Logits, temperature: Number) -> Tempering:
    return Tempering.of(logits.scale, logits.softcap, temperature)


def _slope(logits: Logits, temperature: Number) -> Number:
    """dz/du"""
    biased = logits.values if logits.bias is None or logits.softcap is None else logits.values + logits.bias
    return _tempering(logits, temperature).slope(biased)


def _log_probs(
    logits: Logits, temperature: Number, dtype: torch.dtype | None = None, lse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """log softmax(z), in memory of its own, and the lse of z, which is computed where it is not given."""
    z = logits.values.to(dtype or accumulator_dtype(logits.values.dtype), copy=True)
    if logits.kind == "probs":
        z.log_()
    if logits.bias is not None:
        z.add_(logits.bias)
    _tempering(logits, temperature).apply_(z)
    if lse is None:
        largest = z.amax(1, keepdim=True)
        z.sub_(largest)
        log_sum = z.exp().sum(1, keepdim=True).log_()
        lse = torch.cat([largest, log_sum], 1)
    else:
        z.sub_(lse[:, :1])
    return z.sub_(lse[:, 1:]), lse


def _weighted_(number: Tensor, p: Tensor) -> Tensor:
    """p * number in place of number; 0 where p is 0, whatever the number is."""
    return number.mul_(p).masked_fill_(p == 0, 0)


# From log-probabilities of student and teacher, [rows, V], both of which are written over, and beta: the divergence of
# each row, [rows], and s * f' and s, [rows, V].


def _forward_kl(log_s: Tensor, log_t: Tensor, beta: float) -> tuple[Tensor, Tensor, Tensor]:
    t = log_t.exp()
    return _weighted_(log_t.sub_(log_s), t).sum(1), t.neg_(), log_s.exp_()


def _reverse_kl(log_s: Tensor, log_t: Tensor, beta: float) -> tuple[Tensor, Tensor, Tensor]:
    s = log_s.exp()
    weighted = _weighted_(log_s.sub_(log_t), s)
    return weighted.sum(1), weighted, s


def _jsd(log_s: Tensor, log_t: Tensor, beta: float) -> tuple[Tensor, Tensor, Tensor]:
    """With d = log t - log s, and u = log m - max(log s, log t), which is 0 where d is:

    log m - log s = u + max(d, 0),      log m - log t = u - min(d, 0)
    """
    d = log_t - log_s
    s, t = log_s.exp_(), log_t.exp_()
    u = d.abs().neg_().expm1_().mul_(torch.full_like(d, beta).masked_fill_(d > 0, 1 - beta)).log1p_()
    of_teacher = _weighted_(d.clamp(max=0).sub_(u), t).sum(1)
    weighted = _weighted_(d.clamp_(min=0).add_(u).neg_(), s).mul_(1 - beta)
    return beta * of_teacher + weighted.sum(1), weighted, s


def _total_variation(log_s: Tensor, log_t: Tensor, beta: float) -> tuple[Tensor, Tensor, Tensor]:
    s = log_s.exp_()
    difference = torch.sub(s, log_t.exp_(), out=log_t)
    return difference.abs().sum(1).mul_(0.5), difference.sign_().mul_(s).mul_(0.5), s


DIVERGENCES: dict[str, Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]] = {
    "forward": _forward_kl,
    "reverse": _reverse_kl,
    "jsd": _jsd,
    "total_variation": _total_variation,
}
