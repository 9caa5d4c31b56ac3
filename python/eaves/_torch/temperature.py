"""A temperature for each row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eaves._torch.checks import refuse_gradient
from eaves._torch.head import check_floating
from eaves._torch.options import RANGES, shape_of
from eaves._torch.rows import has_values


def temperature_of_rows(op: str, temperature: Tensor, rows: Sequence[int], name: str, like: Tensor) -> Tensor:
    """The temperature, expanded to the shape of the rows. Its last axes may be missing, and each axis may have size 1.
    `like` is the argument `name`, which has the rows."""
    check_floating(op, "temperature", temperature, name, like)
    refuse_gradient(op, "temperature", temperature)
    shape = [*temperature.shape, *[1] * (len(rows) - temperature.dim())]
    if len(shape) != len(rows) or any(size not in (1, whole) for size, whole in zip(shape, rows)):
        raise ValueError(
            f"{op}: temperature has shape {shape_of(temperature)}, expected {list(rows)} (one per row of {name} "
            f"{shape_of(like)}), or its first axes, each of full size or of size 1"
        )
    return temperature.view(shape).expand(rows)


def divisors_of(op: str, temperature: Tensor, passed: Tensor, is_ignored: Tensor, dtype: torch.dtype) -> Tensor:
    """The temperatures of all rows, [rows], from a temperature in the shape of the rows. An ignored row gets 1, because
    its temperature may be anything. An error names the index in `passed`, the tensor of the caller."""
    divisors = temperature.detach().reshape(-1).to(dtype).masked_fill(is_ignored, 1)
    if has_values(temperature):
        is_wrong = ~((divisors > 0) & divisors.isfinite()).view(temperature.shape)
        if is_wrong.any():
            row = is_wrong.nonzero()[0].tolist()
            index = [place if size > 1 else 0 for place, size in zip(row, passed.shape)]
            value = passed[tuple(index)].item()
            raise ValueError(f"{op}: temperature{index or ''} is {value}, expected {RANGES['scale'][2]}")
    return divisors
