"""The divergence of two distributions over the classes, in a chunk of rows, and the gradient of the student's logits.

A divergence is a sum over the classes of f(s_v, t_v). With f' its derivative by s_v, the gradient of the student's
logit is

    s_v * (f'_v - centre),      centre = sum_u s_u * f'_u

A second pass over the logits therefore needs only numbers of the rows: both lse, and the centre. A constant in f'
cancels.

For a teacher's top K the sum has K terms, or K + 1 if the rest of both is one class. Outside of the K the gradient is
s_v times one number of the row. Such a teacher never becomes a row of V numbers.

Classes may be cut over ranks: the ranks merge each lse, and add up the sums, before anything uses them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from eaves._chunked import divergence_kernels as kernels
from eaves._chunked.distributions import (
    DivergenceSettings,
    Logits,
    Number,
    RowFactors,
    RowStatistics,
    TermsOfTopK,
    TopK,
)
from eaves._chunked.head import OverRanks, Tempering
from eaves._parallel.collectives import all_gather, all_reduce, group_of
from eaves._torch.checks import accumulator_dtype


def statistics(
    student: Logits, teacher: Logits | TopK, temperature: Number, settings: DivergenceSettings, targets: Tensor | None
) -> RowStatistics:
    """`targets` are the classes of the hard loss, [rows], int64."""
    if _have_kernels(student, teacher, settings):
        return _statistics_by_kernels(student, teacher, temperature, settings, targets)
    over_ranks = settings.over_ranks
    log_s, lse = _log_probs(student, temperature, over_ranks)
    entropy = hard_lse = hard_loss = teacher_lse = terms = None
    if settings.has_entropy:
        entropy = _summed(-_weighted_(log_s.clone(), log_s.exp()).sum(1), over_ranks)
    if isinstance(teacher, TopK):
        del log_s
        divergence, centre, terms = _terms_of_top_k(student, teacher, temperature, settings, lse)
    else:
        log_t, teacher_lse = _log_probs(teacher, temperature, over_ranks, log_s.dtype)
        of_classes, weighted, _ = DIVERGENCES[settings.divergence](log_s, log_t, settings.beta)
        divergence = _summed(of_classes, over_ranks).clamp_(min=0)
        if settings.divergence == "forward":
            # The exact -sum t. A computed sum has roundings, which would give two equal distributions a gradient.
            centre = lse.new_full(lse.shape[:1], -1.0)
        else:
            centre = _summed(weighted.sum(1), over_ranks)
        del log_s, log_t, weighted
    if settings.has_hard_loss:
        assert targets is not None
        hard_log_s, hard_lse = _log_probs(student, 1.0, over_ranks)
        places, is_here = _places(targets.unsqueeze(1), hard_log_s.shape[1], over_ranks)
        hard_loss = _summed(-_gathered(hard_log_s, places).where(is_here, 0).squeeze(1), over_ranks)
        classes = hard_log_s.shape[1] if over_ranks is None else over_ranks.place.classes
        hard_loss = hard_loss.masked_fill((targets < 0) | (targets >= classes), math.nan)
        hard_lse = _or_nan(hard_lse, hard_loss)
    return RowStatistics(divergence, lse, teacher_lse, centre, entropy, hard_lse, hard_loss, terms)


def write_gradient(
    student: Logits,
    teacher: Logits | TopK,
    temperature: Number,
    settings: DivergenceSettings,
    of_rows: RowStatistics,
    targets: Tensor | None,
    upstream: RowFactors,
    out: Tensor,
) -> None:
    """Writes the gradient of the student's `values`, rounded once to the dtype of `out`, [rows, V], which may be
    `student.values`. Rows whose upstream gradients are 0 have gradient 0 for any logits."""
    if _have_kernels(student, teacher, settings):
        return _write_gradient_by_kernels(
            student, teacher, temperature, settings, of_rows, targets, upstream, out
        )  # fmt: skip
    over_ranks = settings.over_ranks
    log_s, _ = _log_probs(student, temperature, over_ranks, lse=of_rows.lse)
    if upstream.divergence is None:
        s = log_s.exp_()
        grad = torch.zeros_like(s)
    elif isinstance(teacher, TopK):
        s, terms = log_s.exp_(), of_rows.top_k
        assert terms is not None
        grad = s * terms.outside.unsqueeze(1)
        _scatter_(grad, teacher, terms.gradient)
        grad.mul_(upstream.divergence)
    else:
        log_t, _ = _log_probs(teacher, temperature, over_ranks, log_s.dtype, of_rows.teacher_lse)
        _, grad, s = DIVERGENCES[settings.divergence](log_s, log_t, settings.beta)
        del log_t
        grad.addcmul_(s, of_rows.centre.unsqueeze(1), value=-1).mul_(upstream.divergence)
    del log_s
    if upstream.lse is not None:
        grad.add_(s.mul_(upstream.lse))
    if upstream.entropy is not None:
        assert of_rows.entropy is not None
        del s
        log_s, _ = _log_probs(student, temperature, over_ranks, lse=of_rows.lse)
        s = log_s.exp()
        grad.sub_(_weighted_(log_s.add_(of_rows.entropy.unsqueeze(1)), s).mul_(upstream.entropy))
        del log_s
    del s
    grad.mul_(_slope(student, temperature))
    if upstream.hard_loss is not None:
        assert targets is not None and of_rows.hard_loss is not None
        hard = _log_probs(student, 1.0, over_ranks, lse=of_rows.hard_lse)[0].exp_()
        # At the target p - 1, in which nothing cancels.
        places, is_here = _places(targets.unsqueeze(1), hard.shape[1], over_ranks)
        if hard.shape[1]:
            exact = torch.expm1(-of_rows.hard_loss).unsqueeze(1)
            hard.scatter_(1, places, torch.where(is_here, exact, hard.gather(1, places)))
        grad.add_(hard.mul_(_slope(student, 1.0)).mul_(upstream.hard_loss))
    out.copy_(grad)
    _clear_rows_(out, upstream)


# ------------------------------------------------------------------------------------------------------- GPU kernels


MERGED = ("forward", "reverse")  # their statistics merge over disjoint classes


def has_kernels(x: Tensor, settings: DivergenceSettings, is_top_k: bool) -> bool:
    """True if the device of x has kernels for its dtype. A divergence other than KL needs the lse of all ranks between
    two passes, and the kernels make both passes in one call."""
    is_kl = is_top_k or settings.divergence in MERGED
    return x.is_cuda and accumulator_dtype(x.dtype) == torch.float32 and (is_kl or settings.over_ranks is None)


def _have_kernels(student: Logits, teacher: Logits | TopK, settings: DivergenceSettings) -> bool:
    is_top_k = isinstance(teacher, TopK)
    is_double = not isinstance(teacher, TopK) and teacher.values.dtype == torch.float64
    return not is_double and has_kernels(student.values, settings, is_top_k)


def _statistics_by_kernels(
    student: Logits, teacher: Logits | TopK, temperature: Number, settings: DivergenceSettings, targets: Tensor | None
) -> RowStatistics:
    over_ranks, divergence, of_teacher = settings.over_ranks, (settings.divergence, settings.beta), teacher
    if isinstance(of_teacher, TopK):  # the student is its own teacher: the kernel reads each class once
        of_teacher, divergence = student, ("forward", 0.0)
    if targets is not None and over_ranks is not None:
        targets = targets - over_ranks.place.first_class
    numbers = kernels.statistics(student, of_teacher, temperature, divergence, targets)
    if over_ranks is not None:
        if targets is not None:
            kernels.mark_targets_without_mass_(numbers, targets, student.values.shape[1])
        parts = all_gather(numbers, group_of(over_ranks.shard)).wait()
        numbers = kernels.merged_parts(parts, settings.divergence == "reverse")
    found = row_statistics(numbers, settings)
    if not isinstance(teacher, TopK):
        return found
    of_top_k, centre, terms = _terms_of_top_k(student, teacher, temperature, settings, found.lse)
    return found._replace(divergence=of_top_k, centre=centre, teacher_lse=None, top_k=terms)


def row_statistics(numbers: Tensor, settings: DivergenceSettings) -> RowStatistics:
    """The record of the kernels' [rows, 10]."""
    return RowStatistics(
        divergence=numbers[:, 0],
        lse=numbers[:, 1:3],
        teacher_lse=numbers[:, 3:5],
        centre=numbers[:, 5],
        entropy=numbers[:, 6] if settings.has_entropy else None,
        hard_lse=_or_nan(numbers[:, 7:9], numbers[:, 9]) if settings.has_hard_loss else None,
        hard_loss=numbers[:, 9] if settings.has_hard_loss else None,
    )


def _or_nan(hard_lse: Tensor, hard_loss: Tensor) -> Tensor:
    """NaN in rows without a loss: their gradient becomes NaN too, although no column of it is the target's."""
    return hard_lse.masked_fill(hard_loss.isnan().unsqueeze(1), math.nan)


def _write_gradient_by_kernels(
    student: Logits,
    teacher: Logits | TopK,
    temperature: Number,
    settings: DivergenceSettings,
    of_rows: RowStatistics,
    targets: Tensor | None,
    upstream: RowFactors,
    out: Tensor,
) -> None:
    over_ranks, divergence = settings.over_ranks, (settings.divergence, settings.beta)
    if targets is not None and over_ranks is not None:
        targets = targets - over_ranks.place.first_class
    if not settings.has_hard_loss:
        targets = None
    if not isinstance(teacher, TopK):
        kernels.write_gradient(student, teacher, temperature, divergence, of_rows, targets, upstream, out)
        return
    # Outside of the K the gradient is s_v times a number, like the gradient of an lse; the K have a gradient of their
    # own.
    others = upstream._replace(divergence=None)
    if upstream.divergence is None:
        kernels.write_gradient(student, student, temperature, divergence, of_rows, targets, others, out)
        return
    terms = of_rows.top_k
    assert terms is not None
    listed = student._replace(values=terms.u, bias=None)
    gradient = upstream.divergence * terms.gradient * _slope(listed, temperature)
    if any(each is not None for each in others):
        rest = torch.empty_like(terms.u)
        target = None
        if targets is not None:
            is_target = teacher.is_own & (teacher.columns == targets.unsqueeze(1))
            target = torch.where(is_target.any(1), is_target.to(torch.int8).argmax(1), -1)
        kernels.write_gradient(listed, listed, temperature, divergence, of_rows, target, others, rest)
        gradient += rest
    outside = upstream.divergence * terms.outside.unsqueeze(1)
    others = others._replace(lse=outside if others.lse is None else outside + others.lse)
    kernels.write_gradient(student, student, temperature, divergence, of_rows, targets, others, out)
    _scatter_(out, teacher, gradient.to(out.dtype))
    _clear_rows_(out, upstream)


def _clear_rows_(gradient: Tensor, upstream: RowFactors) -> None:
    """Clears rows without an upstream gradient: a product of 0 and NaN is NaN."""
    given = [each for each in upstream if each is not None]
    if given and all(isinstance(each, Tensor) for each in given):
        has_one = torch.stack([cast("Tensor", each) != 0 for each in given]).any(0)
        gradient.masked_fill_(~has_one, 0)


# -------------------------------------------------------------------------------------------------- PyTorch's operators


def _tempering(logits: Logits, temperature: Number) -> Tempering:
    return Tempering.of(logits.scale, logits.softcap, temperature)


def _slope(logits: Logits, temperature: Number) -> Number:
    """dz/du"""
    biased = logits.values if logits.bias is None or logits.softcap is None else logits.values + logits.bias
    return _tempering(logits, temperature).slope(biased)


def _log_probs(
    logits: Logits,
    temperature: Number,
    over_ranks: OverRanks | None,
    dtype: torch.dtype | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """log softmax(z), in memory of its own, and the lse of z, which the call computes unless `lse` is given."""
    values, tempering = logits.values, _tempering(logits, temperature)
    z = values.to(dtype or accumulator_dtype(values.dtype))
    if logits.kind == "probs":
        z = z.log()
    if logits.bias is not None:
        z = z + logits.bias
    if not tempering.is_identity:
        z = tempering.apply_(z.clone() if z is values else z)
    if lse is None and over_ranks is None:
        log_probs = torch.log_softmax(z, 1)
        return log_probs, torch.cat([z.amax(1, keepdim=True), -log_probs.amax(1, keepdim=True)], 1)
    if lse is None:
        largest = z.amax(1, keepdim=True) if z.shape[1] else z.new_full((z.shape[0], 1), -math.inf)
        log_sum = (z - largest.masked_fill(largest == -math.inf, 0)).exp_().sum(1, keepdim=True).log_()
        lse = _merged(torch.cat([largest, log_sum], 1), cast("OverRanks", over_ranks))
    z = z - lse[:, :1] if z is values else z.sub_(lse[:, :1])
    return z.sub_(lse[:, 1:]), lse


def _merged(lse: Tensor, over_ranks: OverRanks) -> Tensor:
    of_ranks = all_gather(lse, group_of(over_ranks.shard)).wait()
    largest = of_ranks[..., :1].amax(0)
    return torch.cat([largest, torch.logsumexp(of_ranks[..., :1] - largest + of_ranks[..., 1:], 0)], 1)


def _summed(of_shard: Tensor, over_ranks: OverRanks | None) -> Tensor:
    return of_shard if over_ranks is None else all_reduce(of_shard.contiguous(), group_of(over_ranks.shard)).wait()


def _places(tokens: Tensor, columns: int, over_ranks: OverRanks | None) -> tuple[Tensor, Tensor]:
    """The columns of the tokens, and whether each token has one; another token gets a wrong column."""
    own = tokens if over_ranks is None else tokens - over_ranks.place.first_class
    places = own.clamp(0, max(0, columns - 1))
    return places, (places == own) & (own < columns)


def _gathered(z: Tensor, places: Tensor) -> Tensor:
    return z.gather(1, places) if z.shape[1] else z.new_zeros(places.shape)


def _weighted_(number: Tensor, p: Tensor) -> Tensor:
    """Writes p * number over number; 0 if p is 0, for any number."""
    return number.mul_(p).masked_fill_(p == 0, 0)


# Each function takes log-probabilities of student and teacher, [rows, V], and beta, and writes over both tensors. It
# returns the divergence of each row, [rows], and s * f' and s, [rows, V].


def _forward_kl(log_s: Tensor, log_t: Tensor, beta: float) -> tuple[Tensor, Tensor, Tensor]:
    t = log_t.exp()
    return _weighted_(log_t.sub_(log_s), t).sum(1), t.neg_(), log_s.exp_()


def _reverse_kl(log_s: Tensor, log_t: Tensor, beta: float) -> tuple[Tensor, Tensor, Tensor]:
    s = log_s.exp()
    weighted = _weighted_(log_s.sub_(log_t), s)
    return weighted.sum(1), weighted, s


def _jsd(log_s: Tensor, log_t: Tensor, beta: float) -> tuple[Tensor, Tensor, Tensor]:
    """With d = log t - log s and u = log m - max(log s, log t); d = 0 gives u = 0:

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


# --------------------------------------------------------------------------------------------------- a teacher's top K


def top_k_of(
    tokens: Tensor,
    log_probs: Tensor,
    temperature: Number,
    rest: str,
    columns: int,
    over_ranks: OverRanks | None,
    dtype: torch.dtype,
) -> TopK:
    """The teacher's part of the terms, for all rows at once. `tokens`: [rows, K], int64, each token at most once in a
    row; an empty place has a token below 0 or a log-probability of -inf. `columns`: of the student's logits on this
    rank. The teacher is the softmax of the log-probabilities divided by the temperature, which is 1 with "class" and
    "ignore"."""
    is_listed = (tokens >= 0) & (log_probs != -math.inf)
    log_t = log_probs.to(dtype).where(is_listed, -math.inf)
    rest_of_t = _log_rest(log_t) if rest in ("class", "ignore") else log_t.new_full((log_t.shape[0], 1), -math.inf)
    log_t = torch.cat([log_t, rest_of_t], 1)
    # A row without tokens has no mass to normalise by.
    log_t = torch.log_softmax(log_t / temperature, 1).where((log_t != -math.inf).any(1, keepdim=True), -math.inf)
    if rest not in ("class", "zero"):
        log_t = log_t[:, :-1].contiguous()
    places, is_own = _places(tokens, columns, over_ranks)
    is_own &= is_listed
    has_class = is_own if over_ranks is None else is_listed & (tokens < over_ranks.place.classes)
    first = is_own.to(torch.int8).argmax(1, keepdim=True)
    missing = torch.where(is_listed, math.nan, -math.inf).to(dtype)
    return TopK(log_t, missing, has_class, is_own, places.where(is_own, places.gather(1, first)), first, rest)


def _terms_of_top_k(
    student: Logits, teacher: TopK, temperature: Number, settings: DivergenceSettings, lse: Tensor
) -> tuple[Tensor, Tensor, TermsOfTopK]:
    """The divergence and the centre of each row, [rows], and the terms. A token that no rank has makes a row NaN."""
    log_t, of_listed = teacher.log_t, student._replace(values=_gathered(student.values, teacher.columns), bias=None)
    if student.bias is not None:
        bias = student.bias.unsqueeze(0).expand(log_t.shape[0], -1)
        of_listed = of_listed._replace(values=of_listed.values + _gathered(bias, teacher.columns))
    u, tempering = of_listed.values, _tempering(student, temperature)
    z = u if tempering.is_identity else tempering.apply_(u.clone())
    if settings.over_ranks is not None:  # one rank has the token, so the sum is exact
        z = _summed(z.where(teacher.is_own, 0), settings.over_ranks)
    log_s = (z - lse[:, :1]).sub_(lse[:, 1:])
    log_s = log_s.where(teacher.has_class, teacher.missing)
    if teacher.rest == "renormalize":
        log_s = torch.log_softmax(log_s, 1).where(teacher.missing.isnan(), -math.inf)
    elif teacher.rest != "ignore":
        log_s = torch.cat([log_s, _log_rest(log_s)], 1)
    divergence, weighted, s = DIVERGENCES[settings.divergence](log_s, log_t.clone(), settings.beta)
    if teacher.rest == "ignore":
        if settings.divergence == "reverse":
            weighted += s  # the constant in f', which cancels only if s sums to 1
    else:
        divergence.clamp_(min=0)
    centre = weighted.sum(1)
    if teacher.rest == "renormalize":
        outside = torch.zeros_like(centre)
    elif teacher.rest == "ignore":
        outside = -centre
    else:
        outside = weighted[:, -1] / s[:, -1] - centre
    gradient = torch.addcmul(weighted, s, centre.unsqueeze(1), value=-1)[:, : u.shape[1]]
    return divergence, centre, TermsOfTopK(u, outside, gradient)


def _log_rest(log_p: Tensor) -> Tensor:
    """The logarithm of the mass outside of the tokens, [rows, 1]; the mass is at least the epsilon of its dtype."""
    rest = 1 - log_p.exp().sum(1, keepdim=True)
    return rest.clamp_(min=torch.finfo(log_p.dtype).eps).log_()


def _scatter_(grad: Tensor, teacher: TopK, gradient: Tensor) -> None:
    """Writes the gradient, [rows, K], of the tokens that have a column in grad."""
    if grad.shape[1] == 0:
        return
    # A place without a column repeats the write of the row's first column, or writes the old value if there is none.
    of_first = torch.where(teacher.is_own, gradient, grad.gather(1, teacher.columns)).gather(1, teacher.first)
    grad.scatter_(1, teacher.columns, torch.where(teacher.is_own, gradient, of_first))
