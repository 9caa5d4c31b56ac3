"""logsumexp: the published tables (rows along the last axis, length by length), the layouts that they leave out, peers.

The sizes are those of `eaves bench logsumexp`, so that the tables of both programs lie side by side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from eaves.bench.benchmark import DTYPES, Forward, Inputs, Mode, Operator, Provider, Request, Row, Table, normal
from eaves.bench.providers import TorchCompile


class Eaves(Provider):
    name = "eaves"

    def load(self) -> None:
        from eaves import logsumexp  # noqa: F401

    def forward(self, row: Row) -> Forward:
        from eaves import logsumexp

        axis = _axis(row)
        return lambda x: logsumexp(x, axis)


class Torch(Provider):
    name = "torch"

    def forward(self, row: Row) -> Forward:
        axis = _axis(row)
        return lambda x: torch.logsumexp(x, axis)


def _axis(row: Row) -> int:
    (axis,) = row.options.get("axes", [-1])
    return int(axis)


@dataclass(frozen=True)
class _Case:
    shape: Mapping[str, int]
    """The axes of x in their order."""

    axis: int = -1
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sizes(self) -> list[int]:
        return list(self.shape.values())

    @property
    def row_sizes(self) -> list[int]:
        sizes = self.sizes
        del sizes[self.axis]
        return sizes

    def make_inputs(self, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
        x = normal(self.sizes, dtype, device, seed).requires_grad_()
        return Inputs((x,), normal(self.row_sizes, dtype, device, seed + 1))


def _row(case: _Case, dtype_name: str, mode: Mode) -> Row:
    dtype = DTYPES[dtype_name]
    element_bytes = dtype.itemsize
    elements = math.prod(case.sizes)
    rows = math.prod(case.row_sizes)
    lse_bytes = rows * (8 if dtype == torch.float64 else 4)
    is_forward = mode == "fwd"
    return Row(
        axis_value=case.shape["n"],
        shape=case.shape,
        options=case.options,
        # Forward: x; out and the lse that the backward needs. Backward: x, grad_out, lse; grad_x.
        read_bytes=elements * element_bytes if is_forward else (elements + rows) * element_bytes + lse_bytes,
        write_bytes=rows * element_bytes + lse_bytes if is_forward else elements * element_bytes,
        gradient_bytes=0 if is_forward else elements * element_bytes,
        make_inputs=lambda device, seed: case.make_inputs(dtype, device, seed),
    )


def _forward_and_backward(title: str, dtype: str, cases: Sequence[_Case]) -> list[Table]:
    modes: tuple[Mode, ...] = ("fwd", "bwd")
    return [
        Table(
            "logsumexp",
            mode,
            f"{title}-{dtype}",
            "n",
            dtype,
            [_row(case, dtype, mode) for case in cases],
            axis_words="length of a row",
            shape_words="reduced over n",
        )
        for mode in modes
    ]


def _last_axis(batch: int, dim: int, n: int) -> _Case:
    return _Case({"batch": batch, "dim": dim, "n": n})


def _layouts(is_cpu: bool, batch: int, dim: int) -> list[_Case]:
    """Each is a way to read memory that the published tables, with their long aligned rows, do not show."""
    # A CPU moves a hundredth of what a GPU does: the same layouts at about a sixteenth of the size.
    first_n, middle_n = (8192, 512) if is_cpu else (131072, 8192)
    long_n, short_rows = (2**20, 2**16) if is_cpu else (2**24, 2**20)
    return [
        # Neighbours in memory belong to different rows.
        _Case({"n": first_n, "dim": 1024}, 0, {"axes": [0]}),
        _Case({"batch": 16, "n": middle_n, "dim": 1024}, 1, {"axes": [1]}),
        # Odd: almost no row starts on a 16-byte boundary.
        _Case({"batch": batch, "dim": dim, "n": 131071}, -1, {"axes": [-1]}),
        # Fewer rows than processors: a row has to be split.
        _Case({"batch": 8, "n": long_n}, -1, {"axes": [-1]}),
        # Rows shorter than what one block reads at a time.
        _Case({"batch": short_rows, "n": 64}, -1, {"axes": [-1]}),
    ]


def _tables(request: Request) -> list[Table]:
    is_quick = request.sweep == "quick"
    is_cpu = request.device.type == "cpu"
    batch, dim = (1, 256) if is_quick and is_cpu else (4, 1024)
    title = f"batch{batch}-dim{dim}"

    lengths = [_last_axis(batch, dim, 2**power) for power in range(10, 18)]
    tables = _forward_and_backward(title, request.dtype, lengths)
    if is_quick:
        tables += _forward_and_backward("layouts", request.dtype, _layouts(is_cpu, batch, dim))
        if not request.has_dtype:
            tables += _forward_and_backward(title, "fp32", [_last_axis(batch, dim, 32768)])
    return tables


OPERATOR = Operator("logsumexp", (Eaves(), Torch(), TorchCompile(Torch())), _tables)
