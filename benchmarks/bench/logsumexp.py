"""logsumexp: the published rows (along the last axis, length by length), layouts that are not among them, peers.

The sizes are the same as in `eaves bench logsumexp`, so the tables of both programs can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from .benchmark import DTYPES, Forward, Inputs, Mode, Operator, Provider, Request, Row, compiled, normal

_BOTH: tuple[Mode, ...] = ("fwd", "bwd")


def _make(function: Any, row: Row) -> Forward:
    (axis,) = row.options.get("axes", [-1])
    return lambda x: function(x, axis)


def _row(shape: Mapping[str, int], mode: Mode, dtype_name: str, axis: int | None = None) -> Row:
    dtype, sizes = DTYPES[dtype_name], list(shape.values())
    rows = [*sizes]
    del rows[-1 if axis is None else axis]
    x_bytes, out_bytes = math.prod(sizes) * dtype.itemsize, math.prod(rows) * dtype.itemsize
    lse_bytes = math.prod(rows) * torch.promote_types(dtype, torch.float32).itemsize

    def make_inputs(device: torch.device, seed: int) -> Inputs:
        x = normal(sizes, dtype, device, seed).requires_grad_()
        return Inputs((x,), normal(rows, dtype, device, seed + 1))

    # Forward: x; out and the lse that the backward needs. Backward: x, grad_out, lse; grad_x. Both at once need no lse.
    read_bytes = {"fwd": x_bytes, "bwd": x_bytes + out_bytes + lse_bytes, "fwd+bwd": x_bytes + out_bytes}
    write_bytes = {"fwd": out_bytes + lse_bytes, "bwd": x_bytes, "fwd+bwd": out_bytes + x_bytes}
    return Row(
        *("logsumexp", mode, dtype_name, shape),
        *(read_bytes[mode], write_bytes[mode], 0 if mode == "fwd" else x_bytes),
        make_inputs=make_inputs,
        options={} if axis is None else {"axes": [axis]},
    )


def _rows(request: Request) -> list[Row]:
    is_quick, is_cpu, dtype = request.sweep == "quick", request.device_type == "cpu", request.dtype
    batch, dim = (1, 256) if is_quick and is_cpu else (4, 1024)
    # A CPU moves a hundredth of a GPU's bytes: the same layouts at about a sixteenth of the size.
    first_n, middle_n, long_n, short_rows = (8192, 512, 2**20, 2**16) if is_cpu else (131072, 8192, 2**24, 2**20)
    layouts: list[tuple[dict[str, int], int]] = [
        # Neighbours in memory belong to different rows.
        ({"n": first_n, "dim": 1024}, 0),
        ({"batch": 16, "n": middle_n, "dim": 1024}, 1),
        # Odd: almost no row starts on a 16-byte boundary.
        ({"batch": batch, "dim": dim, "n": 131071}, -1),
        # Fewer rows than processors: a row has to be split.
        ({"batch": 8, "n": long_n}, -1),
        # Rows shorter than one block reads at a time.
        ({"batch": short_rows, "n": 64}, -1),
    ]
    lengths = [{"batch": batch, "dim": dim, "n": 2**power} for power in range(10, 18)]
    rows = [_row(shape, mode, dtype) for mode in _BOTH for shape in lengths]
    if is_quick:
        rows += [_row(shape, mode, dtype, axis) for mode in _BOTH for shape, axis in layouts]
        if not request.has_dtype:
            rows += [_row(lengths[5], mode, "fp32") for mode in _BOTH]
    return rows


_TORCH = Provider("torch", "torch:logsumexp", _make)

OPERATOR = Operator(
    "logsumexp",
    (Provider("eaves", "eaves:logsumexp", _make), _TORCH, compiled(_TORCH)),
    _rows,
    ("rows,n",),
    lambda shape, dtype: _row({"batch": shape["rows"], "n": shape["n"]}, "fwd+bwd", dtype),
)
