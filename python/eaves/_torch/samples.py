"""The losses of a batch of samples (torch.vmap), from one call without a reduction."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from eaves._torch.outputs import DIVISOR, MEAN, NONE, POSITIONS, Z_LOSS, pick
from eaves._torch.registration import batch_first
from eaves._torch.rows import counts_of, divisor_of

_OF_CLASSES = ("head", "bias", "class_weight")
_CONTIGUOUS = ("row_weight", "grad_lse", "grad_entropy", "lse", "entropy", "target_mass")


def in_one(info: Any, given: Any, axes: Any) -> Any:
    """The arguments of a loss's operator with the batch as the first axis of the rows; `axes` has the batch axis of
    each argument. Tensors of the classes have no batch."""
    changed = {}
    for name, tensor in given._asdict().items():
        if isinstance(tensor, Tensor) and name not in _OF_CLASSES:
            (whole,) = batch_first(info, (getattr(axes, name),), tensor)
            changed[name] = whole.contiguous() if name in _CONTIGUOUS else whole
    return given._replace(**changed)


def divisors_of(given: Any, rows: Tensor) -> Tensor | None:
    """The divisor of each sample's mean; None if the loss is no mean. `given` has the arguments of all samples in one.
    `rows` has one number for each row, in the dtype of the divisors, and its first axis is the samples."""
    targets, samples = given.targets, rows.shape[0]
    if given.reduction != MEAN:
        return None
    if given.normalizer is not None:
        normalizer: Tensor = given.normalizer.reshape(samples).clone()
        return normalizer
    weights = torch.ones_like(rows) if given.row_weight is None else given.row_weight
    if targets.is_floating_point():  # with probabilities no row is ignored
        return divisor_of(_matrix(weights), None, rows.dtype)
    counts = counts_of(targets, given.ignore_index) & (weights != 0)
    if given.class_weight is not None:
        classes = torch.where(counts, targets, 0).clamp(0, max(given.class_weight.shape[0] - 1, 0))
        weights = weights * given.class_weight.to(rows.dtype)[classes]
    return divisor_of(_matrix(weights), _matrix(counts), rows.dtype)


def _matrix(rows: Tensor) -> Tensor:
    return rows.reshape(rows.shape[0], math.prod(rows.shape[1:]))


def _sums(rows: Tensor) -> Tensor:
    """The sum of each sample's rows, in float64 as in the core."""
    return _matrix(rows).sum(1, dtype=torch.float64).to(rows.dtype)


def _quotient(numbers: Tensor, divisors: Tensor) -> Tensor:
    """numbers / divisors. The mean of a sample without rows that count is 0."""
    return torch.where(divisors == 0, torch.zeros_like(numbers), numbers / divisors)


def reduce_samples(tensors: list[Tensor], outputs: int, mode: int, divisors: Tensor | None) -> list[Tensor]:
    """Reduces each sample's losses in the results of one call for all samples, which has reduction "none".

    `outputs` has the bits of the call that the user made; the call for all samples has no divisor. A mean needs
    `divisors`.
    """
    if mode == NONE:
        return tensors
    z_losses = pick(tensors, outputs & ~DIVISOR, Z_LOSS)
    losses, parts = _sums(tensors[0]), None if z_losses is None else _sums(z_losses)
    if divisors is not None:
        losses = _quotient(losses, divisors)
        parts = None if parts is None else _quotient(parts, divisors)
    reduced = list(tensors)
    if outputs & DIVISOR and divisors is not None:
        reduced.insert(POSITIONS[outputs][DIVISOR], divisors)
    reduced[0] = losses
    if parts is not None:
        reduced[POSITIONS[outputs][Z_LOSS]] = parts
    return reduced


def row_gradients(given: Any) -> Tensor:
    """dL/d(loss) of each row, from dL/d(reduced loss) of each sample. `given` has the arguments of a backward for all
    samples in one."""
    grad_loss, mode, lse = given.grad_loss, given.reduction, given.lse
    rows = lse if lse.dim() < given[3].dim() else lse[..., 0]  # given[3]: logits or hidden
    if mode == NONE:
        return grad_loss  # type: ignore[no-any-return]
    samples = rows.shape[0]
    grads = grad_loss.reshape(samples)
    if mode == MEAN and given.divisor is not None:
        grads = _quotient(grads, given.divisor.reshape(samples))
    spread: Tensor = grads.reshape([samples] + [1] * (rows.dim() - 1)).expand(rows.shape)
    return spread
