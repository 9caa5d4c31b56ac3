"""A call of logsumexp: its arguments and their checks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eaves._autograd.logsumexp import computed
from eaves._torch.checks import axes_of, check_bool, check_dtype, check_tensor


def logsumexp_of(x: Tensor, dim: int | Sequence[int], keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    check_tensor("logsumexp", "x", x)
    check_bool("logsumexp", "keepdim", keepdim)
    axes = axes_of("logsumexp", x, dim)
    if not x.is_floating_point():
        x = x.to(torch.float32)
    if dtype is None:
        dtype = x.dtype
    elif dtype != x.dtype and dtype != torch.float32:
        check_dtype("logsumexp", dtype, x.dtype, torch.float32)
    return computed(x, axes, keepdim, dtype)
