"""lrpe_cosine: the published tables (activations over a sequence, and grids of one to three axes), and what they leave
out: other activations, the gradient of theta, one sequence alone, layouts; peers.

The sizes on a GPU are those of `eaves bench lrpe_cosine`, so that the tables of both programs lie side by side. Titles
with a grid begin with md_lrpe_cosine, as the published ones do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eaves.bench.benchmark import DTYPES, Forward, Inputs, Mode, Operator, Provider, Request, Row, Table, normal
from eaves.bench.providers import TorchCompile

# ------------------------------------------------------------------------------------------------------------ providers


def _arguments(row: Row) -> dict[str, Any]:
    """Of the public function, by name. In the tables [B, H, N, D] is what needs no words."""
    wanted = {key: value for key, value in row.options.items() if key != "grad_theta"}
    return {"layout": "bhnd"} | wanted


class Eaves(Provider):
    name = "eaves"

    def load(self) -> None:
        from eaves import lrpe_cosine  # noqa: F401

    def forward(self, row: Row) -> Forward:
        from eaves import lrpe_cosine

        arguments = _arguments(row)
        return lambda x, theta: lrpe_cosine(x, theta, **arguments)


class Torch(Provider):
    """The formula as models have it: angles in float32, the result in the dtype of x."""

    name = "torch"

    def forward(self, row: Row) -> Forward:
        return lambda x, theta: formula(x, theta, **_arguments(row))


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
    heads_first = layout == "bhnd"
    token_axis = 2 if heads_first else 1
    features, length = x.shape[-1], x.shape[token_axis]
    sizes = [length - extra_tokens] if grid is None else list(grid)
    coordinates = torch.meshgrid(*[torch.arange(size, device=x.device) for size in sizes], indexing="ij")
    # [H, cells, E] for each axis, side by side; features that are left over have no angle.
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
    # Rounded before they are put together: the same bits, and half of the traffic of float32 halves.
    return torch.cat([(a * phi.cos()).to(x.dtype), (a * phi.sin()).to(x.dtype)], -1)


# --------------------------------------------------------------------------------------------------------------- tables


@dataclass(frozen=True)
class _Case:
    """One call. What is not named is as in the published tables."""

    n: int = 0
    """Positions, or the edge of a grid."""

    batch: int = 12
    heads: int = 12
    features: int = 128
    axes: int = 0
    """Of a grid; 0 is a plain sequence."""

    extra_tokens: int = 0
    activation: str = "none"
    activation_dim: int | None = None
    layout: str = "bhnd"
    grad_theta: bool = False

    @property
    def positions(self) -> int:
        return self.extra_tokens + int(self.n ** max(self.axes, 1))

    @property
    def angles_per_head(self) -> int:
        """As many as the axes can have alike."""
        return self.features // max(self.axes, 1)

    @property
    def options(self) -> Mapping[str, Any]:
        options: dict[str, Any] = {}
        if self.activation != "none":
            options["activation"] = self.activation
        if self.activation_dim is not None:
            options["activation_dim"] = self.activation_dim
        if self.axes:
            options["grid"] = [self.n] * self.axes
        if self.extra_tokens:
            options["extra_tokens"] = self.extra_tokens
        if self.layout != "bhnd":
            options["layout"] = self.layout
        if self.grad_theta:
            options["grad_theta"] = True
        return options

    def shape(self, features: int) -> list[int]:
        tokens = [self.heads, self.positions] if self.layout == "bhnd" else [self.positions, self.heads]
        return [self.batch, *tokens, features]

    def make_inputs(self, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
        x = normal(self.shape(self.features), dtype, device, seed).requires_grad_()
        count = self.angles_per_head
        series = 10000.0 ** (-torch.arange(count, dtype=torch.float64) / count)  # the same for each head
        theta = series.expand(self.heads, count).contiguous().to(dtype).to(device)
        grad_out = normal(self.shape(2 * self.features), dtype, device, seed + 1)
        return Inputs((x, theta.requires_grad_(self.grad_theta)), grad_out)


def _row(case: _Case, dtype_name: str, mode: Mode) -> Row:
    dtype = DTYPES[dtype_name]
    x_bytes = case.batch * case.heads * case.positions * case.features * dtype.itemsize
    theta_bytes = case.heads * case.angles_per_head * dtype.itemsize
    has_lse = case.activation == "softmax" and case.activation_dim == -2
    # Two numbers for each column.
    lse_bytes = 2 * case.batch * case.heads * case.features * (8 if dtype == torch.float64 else 4) if has_lse else 0
    grad_theta_bytes = theta_bytes if case.grad_theta else 0
    needs_x = case.activation != "none" or case.grad_theta
    is_forward = mode == "fwd"
    return Row(
        axis_value=case.n,
        shape={"batch": case.batch, "head": case.heads, "dim": case.features, "n": case.n},
        options=case.options,
        # Forward: x, theta; out, and the lse that the backward needs. Backward: grad_out, x where the activation or the
        # gradient of theta needs it, theta, lse; grad_x, grad_theta.
        read_bytes=(x_bytes if is_forward else (3 if needs_x else 2) * x_bytes + lse_bytes) + theta_bytes,
        write_bytes=2 * x_bytes + lse_bytes if is_forward else x_bytes + grad_theta_bytes,
        gradient_bytes=0 if is_forward else x_bytes + grad_theta_bytes,
        make_inputs=lambda device, seed: case.make_inputs(dtype, device, seed),
    )


@dataclass(frozen=True)
class _GridTable(Table):
    """Its rows differ in their grid, which the axis tells."""

    @property
    def is_curve(self) -> bool:
        return True


def _table(mode: Mode, title: str, dtype: str, cases: Sequence[_Case]) -> Table:
    rows = [_row(case, dtype, mode) for case in cases]
    axes = cases[0].axes
    if axes:
        words = "length of a sequence" if axes == 1 else f"edge of a grid of {axes} axes"
        return _GridTable("lrpe_cosine", mode, title, "n", dtype, rows, axis_words=words, title_op="md_lrpe_cosine")
    return Table("lrpe_cosine", mode, title, "n", dtype, rows, axis_words="length of a sequence")


@dataclass(frozen=True)
class _Sizes:
    batch: int = 12
    lengths: Sequence[int] = tuple(2**power for power in range(8, 16))
    edges: Sequence[Sequence[int]] = (
        (256, 512, 1024, 2048, 4096, 8192, 16384, 32768),
        (16, 32, 64, 128),
        (4, 8, 16, 32),
    )
    """Of grids of one axis, two and three."""

    extra_tokens: Sequence[int] = (0, 10)
    lengths_of_others: Sequence[int] = (8192, 32768)
    lengths_alone: Sequence[int] = (32768, 131072)


# PyTorch's formula moves 1 GB/s on a CPU, and torch.compile takes seconds for each row.
_CPU_SIZES = _Sizes(1, (512,), ((512,), (16,), (8,)), (10,), (256,), (1024,))


def _tables(request: Request) -> list[Table]:
    is_quick = request.sweep == "quick"
    sizes = _CPU_SIZES if is_quick and request.device.type == "cpu" else _Sizes()
    like = _Case(batch=sizes.batch)
    tables: list[Table] = []

    def title_of(case: _Case) -> str:
        return f"batch{case.batch}-head{case.heads}-dim{case.features}"

    def of_lengths(case: _Case, lengths: Sequence[int]) -> list[_Case]:
        return [replace(case, n=n) for n in lengths]

    def add(title: str, dtype: str, cases: Sequence[_Case], modes: Sequence[Mode] = ("fwd", "bwd")) -> None:
        tables.extend(_table(mode, title, dtype, cases) for mode in modes)

    for words, activation, dim in (
        ("act_none", "none", None),
        ("act_silu", "silu", None),
        ("act_softmax-dim_-1", "softmax", -1),
        ("act_softmax-dim_-2", "softmax", -2),
    ):
        case = replace(like, activation=activation, activation_dim=dim)
        add(f"{title_of(like)}-{words}-{request.dtype}", request.dtype, of_lengths(case, sizes.lengths))
    for axes in (1, 2, 3):
        for extra in sizes.extra_tokens:
            case = replace(like, axes=axes, extra_tokens=extra)
            title = f"{title_of(like)}-{request.dtype}-{axes}d-l{extra}"
            add(title, request.dtype, of_lengths(case, sizes.edges[axes - 1]))
    if not is_quick:
        return tables

    by_length = [replace(like, n=n) for n in sizes.lengths_of_others]
    others = [replace(case, activation=name) for case in by_length for name in ("relu", "sigmoid")]
    add(f"{title_of(like)}-activations-{request.dtype}", request.dtype, others)
    with_theta = [replace(case, activation=name, grad_theta=True) for case in by_length for name in ("none", "silu")]
    add(f"{title_of(like)}-grad_theta-{request.dtype}", request.dtype, with_theta, ("bwd",))
    alone = replace(like, batch=1)  # no other batch entry shares its angles
    add(f"{title_of(alone)}-{request.dtype}", request.dtype, of_lengths(alone, sizes.lengths_alone))
    first = by_length[0]
    layouts = [replace(first, layout="bnhd"), replace(first, features=96), replace(first, features=64)]
    add(f"layouts-{request.dtype}", request.dtype, layouts)
    if not request.has_dtype:
        add(f"{title_of(like)}-act_none-fp32", "fp32", [first])
    return tables


OPERATOR = Operator("lrpe_cosine", (Eaves(), Torch(), TorchCompile(Torch())), _tables)
