"""The losses of a batch of samples (torch.vmap), from one call without a reduction."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from eaves._torch.outputs import DIVISOR, NONE, POSITIONS, Z_LOSS, pick
from eaves._torch.rows import counts_of, divisor_of

# ------------------------------------------------------------------------------------------------ samples of torch.vmap


def divisors_of(
    samples: int,
    targets: Tensor,
    weight: Tensor | None,
    row_weight: Tensor | None,
    normalizer: Tensor | None,
    ignore_index: int,
    rows: Tensor,
) -> Tensor:
    """The divisor of each sample's mean; `targets` has the samples as its first axis, and so have `row_weight`
    and `rows`, one number for each row in the dtype of the divisors."""
    if normalizer is not None:
        return normalizer.reshape(samples).clone()
    weights = torch.ones_like(rows) if row_weight is None else row_weight
    if targets.is_floating_point():  # with probabilities no row is ignored
        return divisor_of(_matrix(weights), None, rows.dtype)
    counts = counts_of(targets, ignore_index) & (weights != 0)
    if weight is not None:
        classes = torch.where(counts, targets, 0).clamp(0, max(weight.shape[0] - 1, 0))
        weights = weights * weight.to(rows.dtype)[classes]
    return divisor_of(_matrix(weights), _matrix(counts), rows.dtype)


def _matrix(rows: Tensor) -> Tensor:
    return rows.reshape(rows.shape[0], math.prod(rows.shape[1:]))


def _sums(rows: Tensor) -> Tensor:
    """The sum of each sample's rows, in float64 as the core's."""
    return _matrix(rows).sum(1, dtype=torch.float64).to(rows.dtype)


def _quotient(numbers: Tensor, divisors: Tensor) -> Tensor:
    """Without rows that count, a mean is 0."""
    return torch.where(divisors == 0, torch.zeros_like(numbers), numbers / divisors)


def reduce_samples(tensors: list[Tensor], outputs: int, mode: int, divisors: Tensor | None) -> list[Tensor]:
    """The results of a call with reduction "none" for all samples at once, each sample's losses reduced.

    `outputs` are those of the call that was asked for; the one for all has no divisor. `divisors` are there with the
    mean.
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


def row_gradients(grad_loss: Tensor, mode: int, divisor: Tensor | None, rows: Tensor) -> Tensor:
    """dL/d(loss) of each row, from that of each sample's reduced loss. `rows` has the samples as its first axis."""
    if mode == NONE:
        return grad_loss
    samples = rows.shape[0]
    grads = grad_loss.reshape(samples)
    if divisor is not None:
        grads = _quotient(grads, divisor.reshape(samples))
    return grads.reshape([samples] + [1] * (rows.dim() - 1)).expand(rows.shape)
