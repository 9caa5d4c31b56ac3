"""cross_entropy: the published tables (vocabulary by vocabulary), forward and backward in one call, options; peers.

The sizes are among those of `eaves bench cross_entropy`, so that the tables of both programs lie side by side.
A call of fwd+bwd may write the gradient over the logits, and whoever can do so does. Its upstream gradient is 1, as
where the loss is what a model is trained for; alone, a backward gets a random one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from eaves.bench.benchmark import DTYPES, Forward, Inputs, Mode, Operator, Provider, Request, Row, Table, normal
from eaves.bench.providers import TorchCompile

_GPU_BATCH = 4096
_CPU_BATCH = 256


@dataclass(frozen=True)
class _Options:
    """Of a row, in the result file too. By the names of `eaves.cross_entropy`."""

    reduction: str = "mean"
    label_smoothing: float = 0.0
    softcap: float | None = None
    z_loss: float = 0.0
    weight: bool = False
    """A weight for each class is the third argument."""

    in_place: bool = False

    @staticmethod
    def of(row: Row) -> _Options:
        return _Options(**row.options)

    def to_json(self) -> dict[str, Any]:
        """The reduction, and what is not as it is by default."""
        return {"reduction": self.reduction} | {key: value for key, value in asdict(self).items() if value}


_SMOOTHING = _Options(label_smoothing=0.1)
_ALL_OPTIONS = _Options(label_smoothing=0.1, softcap=30, z_loss=1e-4, weight=True)


def _lacking(row: Row, *names: str) -> str:
    """Those of the options named that the row has."""
    words = {"label_smoothing": "label smoothing", "softcap": "softcap", "z_loss": "z-loss", "weight": "class weights"}
    return ", ".join(f"no {words[name]}" for name in names if name in row.options)


# ------------------------------------------------------------------------------------------------------------ providers


class Eaves(Provider):
    name = "eaves"

    def load(self) -> None:
        _ = import_module("eaves").cross_entropy

    def forward(self, row: Row) -> Forward:
        cross_entropy = import_module("eaves").cross_entropy
        options = _Options.of(row)

        def forward(logits: Tensor, targets: Tensor, weight: Tensor | None = None) -> Tensor:
            loss: Tensor = cross_entropy(
                logits,
                targets,
                weight,
                reduction=options.reduction,
                label_smoothing=options.label_smoothing,
                softcap=options.softcap,
                z_loss=options.z_loss,
                inplace_backward=row.in_place,
            )
            return loss

        return forward


class Torch(Provider):
    """PyTorch's function, and around it, in float32, the formula of what it lacks."""

    name = "torch"

    def forward(self, row: Row) -> Forward:
        options = _Options.of(row)
        cross_entropy = torch.nn.functional.cross_entropy

        def plain(logits: Tensor, targets: Tensor, weight: Tensor | None = None) -> Tensor:
            return cross_entropy(
                logits, targets, weight, reduction=options.reduction, label_smoothing=options.label_smoothing
            )

        def formula(logits: Tensor, targets: Tensor, weight: Tensor | None = None) -> Tensor:
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            if options.softcap is not None:
                logits = options.softcap * torch.tanh(logits / options.softcap)
            loss = plain(logits, targets, weight)
            if options.z_loss:
                z_loss = options.z_loss * logits.logsumexp(-1).square().sum()
                divisor = targets.numel() if weight is None else weight[targets].sum()
                loss = loss + (z_loss / divisor if options.reduction == "mean" else z_loss)
            return loss

        return formula if options.softcap is not None or options.z_loss or options.weight else plain


class Liger(Provider):
    """Its forward writes the gradient over the logits: it has no forward alone, and its backward alone does nothing.

    A call waits for the device, to count the targets that are not ignored and to look for those out of range, so its
    time has some of the host's in it. With weights its z-loss is divided by the number of rows, not by their weights.
    """

    name = "liger"
    packages = ("liger-kernel",)
    device_types = ("cuda",)

    def load(self) -> None:
        _ = import_module("liger_kernel.ops").LigerCrossEntropyFunction

    def lacks(self, row: Row) -> str:
        return "" if row.in_place else "the forward overwrites the logits with the gradient"

    def forward(self, row: Row) -> Forward:
        apply = import_module("liger_kernel.ops").LigerCrossEntropyFunction.apply
        options = _Options.of(row)
        softcap = None if options.softcap is None else float(options.softcap)  # a kernel for integers would be another

        def forward(logits: Tensor, targets: Tensor, weight: Tensor | None = None) -> Tensor:
            loss: Tensor = apply(
                logits,
                targets,
                weight,
                -100,
                options.z_loss,
                options.label_smoothing,
                options.reduction,
                softcap,
            )[0]  # behind it: what was not asked for
            return loss

        return forward


class Fla(Provider):
    name = "fla"
    packages = ("fla-core",)
    device_types = ("cuda",)

    def load(self) -> None:
        _ = import_module("fla.modules").FusedCrossEntropyLoss

    def lacks(self, row: Row) -> str:
        return _lacking(row, "weight")

    def forward(self, row: Row) -> Forward:
        options = _Options.of(row)
        module: Forward = import_module("fla.modules").FusedCrossEntropyLoss(
            reduction=options.reduction,
            label_smoothing=options.label_smoothing,
            lse_square_scale=options.z_loss,
            logit_softcapping=options.softcap,
            inplace_backward=row.in_place,
        )
        return module


class Quack(Provider):
    """In place with the sum, its one kernel for both directions. That gives the gradient of a sum and of nothing else:
    for the mean another pass would have to divide it, so there it is the usual function, its backward in place."""

    name = "quack"
    packages = ("quack-kernels", "nvidia-cutlass-dsl")
    device_types = ("cuda",)

    def load(self) -> None:
        _ = import_module("quack.cross_entropy").cross_entropy

    def lacks(self, row: Row) -> str:
        return _lacking(row, "label_smoothing", "softcap", "z_loss")

    def forward(self, row: Row) -> Forward:
        quack = import_module("quack.cross_entropy")
        options = _Options.of(row)
        if row.in_place and options.reduction == "sum":
            return lambda logits, targets, weight=None: _one_kernel(quack, logits, targets, weight)

        def forward(logits: Tensor, targets: Tensor, weight: Tensor | None = None) -> Tensor:
            loss: Tensor = quack.cross_entropy(
                logits, targets, weight=weight, reduction=options.reduction, inplace_backward=row.in_place
            )
            return loss

        return forward


def _one_kernel(quack: Any, logits: Tensor, targets: Tensor, weight: Tensor | None) -> Tensor:
    loss: Tensor = _QuackForwardBackward.apply(quack, logits, targets, weight)  # type: ignore[no-untyped-call]
    return loss


class _QuackForwardBackward(torch.autograd.Function):
    """quack offers its kernel as a function of tensors; this is all that autograd needs around it. Like any user of it
    the backward takes for granted that the upstream gradient is 1."""

    @staticmethod
    def forward(ctx: Any, quack: Any, logits: Tensor, targets: Tensor, weight: Tensor | None) -> Tensor:
        losses, ctx.gradient = quack.cross_entropy_fwd(
            logits.detach(), targets, weight=weight, return_dx=True, inplace_backward=True
        )
        total: Tensor = losses.sum()
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, Tensor, None, None]:
        return None, ctx.gradient, None, None


# --------------------------------------------------------------------------------------------------------------- tables


@dataclass(frozen=True)
class _Case:
    batch: int
    classes: int
    options: _Options = _Options()

    def make_inputs(self, dtype: torch.dtype, mode: Mode, device: torch.device, seed: int) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed + 1)
        arguments = [
            normal([self.batch, self.classes], dtype, device, seed).requires_grad_(),
            torch.randint(self.classes, (self.batch,), device=device, generator=generator),
        ]
        if self.options.weight:
            weights = torch.rand(self.classes, dtype=_result_dtype(dtype), device=device, generator=generator)
            arguments.append(weights + 0.5)  # as class weights are, and far from 0, which a mean would divide by
        if mode == "fwd+bwd":
            grad_out = torch.ones((), dtype=_result_dtype(dtype), device=device)
        else:
            grad_out = normal([], _result_dtype(dtype), device, seed + 1)
        return Inputs(tuple(arguments), grad_out)


def _result_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _row(case: _Case, dtype_name: str, mode: Mode) -> Row:
    dtype = DTYPES[dtype_name]
    loss_bytes = _result_dtype(dtype).itemsize
    logits_bytes = case.batch * case.classes * dtype.itemsize
    targets_bytes = case.batch * torch.int64.itemsize
    lse_bytes = case.batch * loss_bytes
    weight_bytes = case.classes * loss_bytes if case.options.weight else 0
    divisor_bytes = loss_bytes if case.options.reduction == "mean" else 0
    passed_on = lse_bytes + divisor_bytes  # from the forward to the backward; both at once need not write them
    read_bytes = logits_bytes + targets_bytes + weight_bytes
    write_bytes = {"fwd": loss_bytes + passed_on, "bwd": logits_bytes, "fwd+bwd": loss_bytes + logits_bytes}
    is_in_place = mode == "fwd+bwd"
    return Row(
        axis_value=case.classes,
        shape={"batch": case.batch, "v": case.classes},
        options=replace(case.options, in_place=is_in_place).to_json(),
        read_bytes=read_bytes + (loss_bytes + passed_on if mode == "bwd" else 0),
        write_bytes=write_bytes[mode],
        gradient_bytes=0 if mode == "fwd" else logits_bytes,
        make_inputs=lambda device, seed: case.make_inputs(dtype, mode, device, seed),
        in_place=is_in_place,
    )


def _table(mode: Mode, title: str, dtype: str, cases: Sequence[_Case]) -> Table:
    return Table(
        "cross_entropy",
        mode,
        f"{title}-in-place" if mode == "fwd+bwd" else title,
        "v",
        dtype,
        [_row(case, dtype, mode) for case in cases],
        axis_words="number of classes",
    )


def _tables(request: Request) -> list[Table]:
    is_quick = request.sweep == "quick"
    batch = _CPU_BATCH if is_quick and request.device.type == "cpu" else _GPU_BATCH
    modes: tuple[Mode, ...] = ("fwd", "bwd", "fwd+bwd") if is_quick else ("fwd", "bwd")

    def by_mode(dtype: str, title: str, cases: Sequence[_Case]) -> list[Table]:
        return [_table(mode, f"batch{batch}-{dtype}-{title}", dtype, cases) for mode in modes]

    tables = by_mode(request.dtype, "ls0.0-mean", [_Case(batch, 2**power) for power in range(10, 18)])
    if is_quick:
        # The gradient of a sum needs no divisor, which a kernel that does both directions may not know in time.
        sums = [_Case(batch, classes, _Options(reduction="sum")) for classes in (8192, 32768, 131072)]
        tables.append(_table("fwd+bwd", f"batch{batch}-{request.dtype}-ls0.0-sum", request.dtype, sums))
        tables += by_mode(
            request.dtype, "ls0.1-mean", [_Case(batch, 32768, each) for each in (_SMOOTHING, _ALL_OPTIONS)]
        )
        if not request.has_dtype:
            tables += by_mode("fp32", "ls0.0-mean", [_Case(batch, 32768)])
    return tables


OPERATOR = Operator("cross_entropy", (Eaves(), Torch(), TorchCompile(Torch()), Liger(), Fla(), Quack()), _tables)
