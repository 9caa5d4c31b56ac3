"""Which rows of a loss count, and the divisor of a mean over them."""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor

from eaves._torch.checks import said


def counts_of(target: Tensor, ignore_index: int) -> Tensor:
    """True for each class that is not ignored."""
    # int32 classes would be compared with the last 32 bits of ignore_index.
    return target.to(torch.int64) != ignore_index


def divisor_of(weights: Tensor, counts: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The sum of the weights over the last axis, without rows that do not count. The sum is in float64, as in the core.
    An infinite sum becomes NaN: neither the mean nor its gradient is a number then."""
    total = (weights if counts is None else weights.masked_fill(~counts, 0)).sum(-1, dtype=torch.float64).to(dtype)
    return total.masked_fill(total.isinf(), math.nan)


def has_values(tensor: Tensor) -> bool:
    """Whether the host can read the values of `tensor` without waiting for a device."""
    return tensor.device.type == "cpu" and type(tensor) in (Tensor, torch.nn.Parameter)


def are_checked(classes: Tensor) -> bool:
    """Whether the values of `classes` are checked, as in the core: always on the CPU, and on a GPU if
    EAVES_CHECK_TARGETS is neither empty nor 0."""
    return has_values(classes) or (classes.is_cuda and os.environ.get("EAVES_CHECK_TARGETS", "") not in ("", "0"))


def check_classes(op: str, name: str, target: Tensor, classes: int, ignore_index: int) -> None:
    """Raises the core's error for a target that is no class."""
    wide = target.to(torch.int64)
    is_wrong = counts_of(target, ignore_index) & ((wide < 0) | (wide >= classes))
    if is_wrong.any():
        index = is_wrong.nonzero()[0].tolist()
        expected = f"0 to {classes - 1}, or ignore_index {ignore_index}"
        raise ValueError(said(op, f"`{name}`{index or ''} is {target[tuple(index)].item()}, expected {expected}"))
