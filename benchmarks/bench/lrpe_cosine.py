"""lrpe_cosine: the published rows (activations over a sequence, and grids of one to three axes), peers, and rows that
are not published: other activations, the gradient of theta, one sequence alone, layouts.

The sizes on a GPU are the same as in `eaves bench lrpe_cosine`, so the tables of both programs can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .benchmark import DTYPES, Forward, Inputs, Mode, Operator, Provider, Request, Row, compiled, normal


def _make(function: Any, row: Row) -> Forward:
    """The rows assume the layout [B, H, N, D]."""
    keywords = {"layout": "bhnd"} | {key: value for key, value in row.options.items() if key != "grad_theta"}
    return lambda x, theta: function(x, theta, **keywords)


def formula(
    x: Tensor,
    theta: Tensor,
    *,
    grid: Sequence[int] | None = None,
    extra_tokens: int = 0,
    activation: str = "none",
    activation_dim: int | None = None,
    layout: str = "bhnd",
) -> Tensor:
    """The formula in the form of models: angles in float32, the result in the dtype of x."""
    heads_first = layout == "bhnd"
    token_axis = 2 if heads_first else 1
    features, length = x.shape[-1], x.shape[token_axis]
    sizes = [length - extra_tokens] if grid is None else list(grid)
    coordinates = torch.meshgrid(*[torch.arange(size, device=x.device) for size in sizes], indexing="ij")
    # [H, cells, E] for each axis, side by side. Left-over features have no angle.
    phi = torch.cat([theta.float()[:, None] * index.reshape(-1, 1) for index in coordinates], -1)[..., :features]
    phi = torch.nn.functional.pad(phi, (0, features - phi.shape[-1], extra_tokens, 0))
    if not heads_first:
        phi = phi.transpose(0, 1)
    if activation == "softmax":
        a = x.softmax(token_axis if activation_dim == -2 else -1)
    elif activation == "none":
        a = x
    else:
        a = {"relu": torch.relu, "sigmoid": torch.sigmoid, "silu": torch.nn.functional.silu}[activation](x)
    # Rounding before the concatenation gives the same bits with half of the traffic.
    return torch.cat([(a * phi.cos()).to(x.dtype), (a * phi.sin()).to(x.dtype)], -1)


@dataclass(frozen=True)
class _Case:
    """One call; the defaults are the published rows'."""

    n: int = 0
    """Positions, or the edge of a grid."""

    batch: int = 12
    heads: int = 12
    features: int = 128
    grid: Sequence[int] | None = None
    extra_tokens: int = 0
    activation: str = "none"
    activation_dim: int | None = None
    layout: str = "bhnd"
    grad_theta: bool = False

    @property
    def options(self) -> dict[str, Any]:
        usual = _Case()
        names = ("activation", "activation_dim", "grid", "extra_tokens", "layout", "grad_theta")
        options = {name: getattr(self, name) for name in names if getattr(self, name) != getattr(usual, name)}
        return options | ({"grid": list(self.grid)} if self.grid is not None else {})

    @property
    def positions(self) -> int:
        return self.extra_tokens + (self.n if self.grid is None else math.prod(self.grid))

    @property
    def angles_per_head(self) -> int:
        """The largest equal number of angles for each axis."""
        return self.features // len(self.grid or [0])

    def make_inputs(self, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
        tokens = [self.heads, self.positions] if self.layout == "bhnd" else [self.positions, self.heads]
        x = normal([self.batch, *tokens, self.features], dtype, device, seed).requires_grad_()
        count = self.angles_per_head
        series = 10000.0 ** (-torch.arange(count, dtype=torch.float64) / count)  # the same for each head
        theta = series.expand(self.heads, count).contiguous().to(dtype).to(device)
        grad_out = normal([self.batch, *tokens, 2 * self.features], dtype, device, seed + 1)
        return Inputs((x, theta.requires_grad_(self.grad_theta)), grad_out)


def _row(case: _Case, mode: Mode, dtype_name: str) -> Row:
    dtype = DTYPES[dtype_name]
    x_bytes = case.batch * case.heads * case.positions * case.features * dtype.itemsize
    theta_bytes = case.heads * case.angles_per_head * dtype.itemsize
    # Two numbers for each column.
    has_lse = case.activation == "softmax" and case.activation_dim == -2
    lse_bytes = has_lse * 2 * case.batch * case.heads * case.features * (8 if dtype == torch.float64 else 4)
    grad_bytes = x_bytes + case.grad_theta * theta_bytes
    needs_x = case.activation != "none" or case.grad_theta
    # Forward: x, theta; out, and the lse that the backward needs. Backward: grad_out, theta, lse, and x if the
    # activation or the gradient of theta needs it; grad_x, grad_theta. Both at once: the same, each once.
    read_bytes = {"fwd": x_bytes, "bwd": (2 + needs_x) * x_bytes + lse_bytes, "fwd+bwd": 3 * x_bytes}
    write_bytes = {"fwd": 2 * x_bytes + lse_bytes, "bwd": grad_bytes, "fwd+bwd": 2 * x_bytes + grad_bytes}
    return Row(
        *("lrpe_cosine", mode, dtype_name),
        {"batch": case.batch, "head": case.heads, "dim": case.features, "n": case.n},
        *(read_bytes[mode] + theta_bytes, write_bytes[mode], 0 if mode == "fwd" else grad_bytes),
        make_inputs=lambda device, seed: case.make_inputs(dtype, device, seed),
        options=case.options,
    )


_GPU_EDGES = ([256, 512, 1024, 2048, 4096, 8192, 16384, 32768], [16, 32, 64, 128], [4, 8, 16, 32])
"""The edges of grids of one axis, two and three."""


def _rows(request: Request) -> list[Row]:
    is_quick, dtype = request.sweep == "quick", request.dtype
    # PyTorch's formula moves 1 GB/s on a CPU, and torch.compile takes seconds for each row.
    is_small = is_quick and request.device_type == "cpu"
    usual = _Case(batch=1 if is_small else 12)
    rows: list[Row] = []

    def add(cases: Sequence[_Case], modes: Sequence[Mode] = ("fwd", "bwd"), dtype: str = dtype) -> None:
        rows.extend(_row(case, mode, dtype) for mode in modes for case in cases)

    for activation, dim in (("none", None), ("silu", None), ("softmax", -1), ("softmax", -2)):
        case = replace(usual, activation=activation, activation_dim=dim)
        add([replace(case, n=n) for n in ([512] if is_small else _GPU_EDGES[0])])
    for axes, edges in enumerate(([512], [16], [8]) if is_small else _GPU_EDGES, 1):
        for extra in (10,) if is_small else (0, 10):
            add([replace(usual, n=n, grid=[n] * axes, extra_tokens=extra) for n in edges])
    if not is_quick:
        return rows
    by_length = [replace(usual, n=n) for n in ([256] if is_small else [8192, 32768])]
    add([replace(case, activation=name) for name in ("relu", "sigmoid") for case in by_length])
    add([replace(case, activation=name, grad_theta=True) for name in ("none", "silu") for case in by_length], ["bwd"])
    # One sequence alone: no other batch entry shares its angles.
    add([replace(usual, batch=1, n=n) for n in ([1024] if is_small else [32768, 131072])])
    first = by_length[0]
    add([replace(first, layout="bnhd"), replace(first, features=96), replace(first, features=64)])
    if not request.has_dtype:
        add([first], dtype="fp32")
    return rows


def _row_of_shape(shape: Mapping[str, Any], dtype: str) -> Row:
    grid = shape.get("grid")
    n = shape["length"] if grid is None else math.prod(grid)
    case = _Case(n, shape["batch"], shape["heads"], shape["dim"], grid)
    return _row(case, "fwd+bwd", dtype)


_TORCH = Provider("torch", f"{__name__}:formula", _make)

OPERATOR = Operator(
    "lrpe_cosine",
    (Provider("eaves", "eaves:lrpe_cosine", _make), _TORCH, compiled(_TORCH)),
    _rows,
    ("batch,length,heads,dim", "batch,grid,heads,dim"),
    _row_of_shape,
)
