"""linear_cross_entropy: the published table (vocabulary by vocabulary), each direction and both, two kinds of data.

What multiplies matrices is not measured by bytes: the column `limit` is the matrix products themselves, whole, by
torch.matmul into memory that is there already, on the data of the call: the logits' for the loss, the two with the
gradient of the logits for the backward, all three for both. How fast they are depends on the data, through the power
that they draw: the gradient is that of the row.

Data: "seed" is normal inputs and weights, whose logits have a deviation of 64 (at 4096 features), so that the gradient
is 0 almost everywhere; "dense" has smaller inputs, logits with a deviation of 1.3, and a gradient everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Literal

import torch
from torch import Tensor

from eaves.bench.benchmark import DTYPES, Forward, Inputs, Mode, Operator, Provider, Request, Row, Table, normal
from eaves.bench.providers import TorchCompile

DENSE_DEVIATION = 1.3

Data = Literal["seed", "dense"]

# Of those that have a bias it is the fourth argument, where it is given.
WITHOUT_BIAS = ("liger-scaled", "cut-cross-entropy", "quack")

_COMPUTED = "the forward computes the gradients"


def _is_loss_alone(row: Row) -> bool:
    return row.gradient_bytes == 0


# ------------------------------------------------------------------------------------------------------------ providers


class Eaves(Provider):
    name = "eaves"
    algorithm: str = "auto"

    def load(self) -> None:
        _ = import_module("eaves").linear_cross_entropy

    def forward(self, row: Row) -> Forward:
        linear_cross_entropy = import_module("eaves").linear_cross_entropy
        # Of the way that computes gradients in the forward, the backward alone does nothing.
        algorithm = "memory" if row.is_backward_alone else self.algorithm

        def forward(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None) -> Tensor:
            loss: Tensor = linear_cross_entropy(x, weight, target, linear_bias=bias, algorithm=algorithm)
            return loss

        return forward


class EavesMemory(Eaves):
    name = "eaves-memory"
    algorithm = "memory"

    def lacks(self, row: Row) -> str:
        return "" if not _is_loss_alone(row) and not row.is_backward_alone else "the same as eaves"


class Torch(Provider):
    """All logits at once."""

    name = "torch"

    def forward(self, row: Row) -> Forward:
        functional = torch.nn.functional
        return lambda x, weight, target, bias=None: functional.cross_entropy(functional.linear(x, weight, bias), target)


class _AtOnce(Provider):
    """Who computes the gradients in the forward has no backward alone."""

    def lacks(self, row: Row) -> str:
        return _COMPUTED if row.is_backward_alone else ""


class TorchChunked(_AtOnce):
    """torch.nn.functional.linear_cross_entropy of PyTorch 2.13, in chunks."""

    name = "torch-chunked"

    def load(self) -> None:
        _ = torch.nn.functional.linear_cross_entropy, torch.nn.LinearCrossEntropyOptions

    def forward(self, row: Row) -> Forward:
        function: Callable[..., Tensor] = torch.nn.functional.linear_cross_entropy
        options = torch.nn.LinearCrossEntropyOptions()
        return lambda x, weight, target, bias=None: function(x, weight, target, linear_bias=bias, options=options)


class Liger(_AtOnce):
    name = "liger"
    packages = ("liger-kernel",)
    device_types = ("cuda",)

    def load(self) -> None:
        _ = import_module("liger_kernel.ops").LigerFusedLinearCrossEntropyFunction

    def forward(self, row: Row) -> Forward:
        apply = import_module("liger_kernel.ops").LigerFusedLinearCrossEntropyFunction.apply

        def forward(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None) -> Tensor:
            loss: Tensor = apply(x, weight, target, bias)[0]  # behind it: what was not asked for
            return loss

        return forward


class LigerScaled(Provider):
    """Its newer kernels (on Hopper and Blackwell with the products in them), which compute the logits again in the
    backward and give the loss of each row."""

    name = "liger-scaled"
    packages = ("liger-kernel",)
    device_types = ("cuda",)

    def load(self) -> None:
        _ = import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")

    def forward(self, row: Row) -> Forward:
        module = import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
        apply = module.LigerFusedLinearScaledCrossEntropyFunction.apply

        def forward(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
            losses = apply(x, weight, target)
            mean: Tensor = (losses[0] if isinstance(losses, tuple) else losses).mean()
            return mean

        return forward


class CutCrossEntropy(Provider):
    """As its users call it: it leaves out what it takes for negligible in the gradient (filter_eps)."""

    name = "cut-cross-entropy"
    packages = ("cut-cross-entropy",)
    device_types = ("cuda",)

    def load(self) -> None:
        _ = import_module("cut_cross_entropy").linear_cross_entropy

    def forward(self, row: Row) -> Forward:
        function: Callable[..., Tensor] = import_module("cut_cross_entropy").linear_cross_entropy
        return lambda x, weight, target: function(x, weight, target)


class Fla(_AtOnce):
    name = "fla"
    packages = ("fla-core",)
    device_types = ("cuda",)

    def load(self) -> None:
        _ = import_module("fla.modules").FusedLinearCrossEntropyLoss

    def forward(self, row: Row) -> Forward:
        module = import_module("fla.modules").FusedLinearCrossEntropyLoss()

        def forward(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None) -> Tensor:
            loss: Tensor = module(x, target, weight, bias)
            return loss

        return forward


class Quack(_AtOnce):
    name = "quack"
    packages = ("quack-kernels", "nvidia-cutlass-dsl")
    device_types = ("cuda",)

    def load(self) -> None:
        _ = import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy

    def forward(self, row: Row) -> Forward:
        function: Callable[..., Tensor] = import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy
        # Its default, 4096 rows at a time, is an error of version 0.6.5 where there are as many features.
        return lambda x, weight, target: function(
            x, weight, target, chunk_size=3072 if weight.shape[1] == 4096 else 4096
        )


# --------------------------------------------------------------------------------------------------------------- limit


def _limit(mode: Mode) -> Callable[[Inputs], Callable[[], object]]:
    """The products of a mode, whole, into memory that is there."""

    def make(inputs: Inputs) -> Callable[[], object]:
        x, weight, target = (argument.detach() for argument in inputs.arguments)
        logits = torch.matmul(x, weight.t())
        gradient = _logits_gradient(logits, target) if mode != "fwd" else logits
        grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)

        def run() -> None:
            if mode != "bwd":
                torch.matmul(x, weight.t(), out=logits)
            if mode != "fwd":
                torch.matmul(gradient, weight, out=grad_x)
                torch.matmul(gradient.t(), x, out=grad_weight)

        return run

    return make


def _logits_gradient(logits: Tensor, target: Tensor) -> Tensor:
    """That of the mean of the losses, in the dtype of the logits; some rows at a time."""
    gradient = torch.empty_like(logits)
    for first in range(0, len(logits), 256):
        rows = slice(first, first + 256)
        p = torch.softmax(logits[rows], -1, dtype=torch.promote_types(logits.dtype, torch.float32))
        p[torch.arange(len(p), device=p.device), target[rows]] -= 1
        gradient[rows] = p / len(logits)
    return gradient


# --------------------------------------------------------------------------------------------------------------- tables


@dataclass(frozen=True)
class _Case:
    batch: int
    features: int
    classes: int
    data: Data

    def make_inputs(self, dtype: torch.dtype, mode: Mode, device: torch.device, seed: int) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed + 2)
        x = normal([self.batch, self.features], dtype, device, seed)
        weight = normal([self.classes, self.features], dtype, device, seed + 1)
        if self.data == "dense":
            x *= DENSE_DEVIATION / self.features**0.5
        target = torch.randint(self.classes, (self.batch,), device=device, generator=generator)
        has_gradient = mode != "fwd"
        result_dtype = torch.promote_types(dtype, torch.float32)
        grad_out = torch.ones((), dtype=result_dtype, device=device)
        if mode == "bwd":
            grad_out = normal([], result_dtype, device, seed + 1)
        return Inputs((x.requires_grad_(has_gradient), weight.requires_grad_(has_gradient), target), grad_out)


# Peers round logits to 16 bits. Beyond 64 that is off by up to a quarter, beyond 256 by one, and a probability with it
# by up to a factor of e.
_ROUNDED_LOGITS = 0.6


def _row(case: _Case, dtype_name: str, mode: Mode) -> Row:
    dtype = DTYPES[dtype_name]
    x_bytes = case.batch * case.features * dtype.itemsize
    weight_bytes = case.classes * case.features * dtype.itemsize
    gradient_bytes = 0 if mode == "fwd" else x_bytes + weight_bytes
    loss_bytes = torch.promote_types(dtype, torch.float32).itemsize
    products = {"fwd": 1, "bwd": 2, "fwd+bwd": 3}[mode]
    return Row(
        axis_value=case.classes,
        shape={"batch": case.batch, "dim": case.features, "v": case.classes},
        options={"data": case.data},
        read_bytes=x_bytes + weight_bytes + case.batch * torch.int64.itemsize,
        write_bytes=gradient_bytes + loss_bytes,
        gradient_bytes=gradient_bytes,
        make_inputs=lambda device, seed: case.make_inputs(dtype, mode, device, seed),
        flops=2 * products * case.batch * case.features * case.classes,
        make_limit=_limit(mode),
        is_backward_alone=mode == "bwd",
        tolerance=_ROUNDED_LOGITS if dtype.itemsize == 2 and case.data == "seed" else None,
    )


def _table(mode: Mode, dtype: str, cases: Sequence[_Case]) -> Table:
    first = cases[0]
    data = "" if first.data == "seed" else f"-data_{first.data}"
    return Table(
        "linear_cross_entropy",
        mode,
        f"batch{first.batch}-dim{first.features}-{dtype}{data}",
        "v",
        dtype,
        [_row(case, dtype, mode) for case in cases],
        axis_words="number of classes",
        title_op="lce",
    )


_GPU_SHAPE = (12288, 4096)
_CPU_SHAPE = (512, 1024)


def _tables(request: Request) -> list[Table]:
    is_cpu = request.device.type == "cpu"
    batch, features = _CPU_SHAPE if is_cpu and request.sweep == "quick" else _GPU_SHAPE
    powers = (10, 12, 15) if is_cpu and request.sweep == "quick" else range(10, 18)
    modes: tuple[Mode, ...] = ("fwd", "bwd", "fwd+bwd") if request.sweep == "quick" else ("fwd+bwd",)
    kinds: tuple[Data, ...] = ("seed", "dense") if request.sweep == "quick" else ("seed",)
    dtypes = [request.dtype] + (["fp32"] if is_cpu and not request.has_dtype else [])
    return [
        _table(mode, dtype, [_Case(batch, features, 2**power, data) for power in powers])
        for dtype in dtypes
        for data in kinds
        for mode in modes
    ]


OPERATOR = Operator(
    "linear_cross_entropy",
    (
        Eaves(),
        EavesMemory(),
        Torch(),
        TorchCompile(Torch()),
        TorchChunked(),
        Liger(),
        LigerScaled(),
        CutCrossEntropy(),
        Fla(),
        Quack(),
    ),
    _tables,
)
