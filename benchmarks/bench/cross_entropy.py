"""cross_entropy: the published rows (vocabulary by vocabulary), forward and backward in one call, options; peers.

The sizes are among those of `eaves bench cross_entropy`, so the tables of both programs can be compared.
A call of fwd+bwd may write the gradient over the logits, and every provider that can do so does. Its upstream gradient
is 1, like a loss's in training; a backward alone gets a random one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .benchmark import DTYPES, Forward, Inputs, Mode, Operator, Provider, Request, Row, compiled, normal, peer

_ALONE: tuple[Mode, ...] = ("fwd", "bwd")
_SMOOTHING = {"label_smoothing": 0.1}
_ALL_OPTIONS = {"label_smoothing": 0.1, "softcap": 30, "z_loss": 1e-4, "weight": True}
_WORDS = {"label_smoothing": "label smoothing", "softcap": "softcap", "z_loss": "z-loss", "weight": "class weights"}


def _lacking(row: Row, *names: str) -> str:
    """The row's options among these names."""
    return ", ".join(f"no {_WORDS[name]}" for name in names if name in row.options)


# ------------------------------------------------------------------------------------------------------------ providers


def _eaves(function: Any, row: Row) -> Forward:
    keywords = {key: value for key, value in row.options.items() if key not in ("weight", "in_place")}
    return lambda logits, targets, weight=None: function(
        logits, targets, weight, inplace_backward=row.in_place, **keywords
    )


def _torch(cross_entropy: Any, row: Row) -> Forward:
    """PyTorch's function, and the formula of the options that it lacks around it, in float32."""
    reduction, smoothing = row.options["reduction"], row.options.get("label_smoothing", 0.0)
    softcap, z_loss = row.options.get("softcap"), row.options.get("z_loss", 0.0)

    def plain(logits: Tensor, targets: Tensor, weight: Tensor | None = None) -> Tensor:
        loss: Tensor = cross_entropy(logits, targets, weight, reduction=reduction, label_smoothing=smoothing)
        return loss

    def formula(logits: Tensor, targets: Tensor, weight: Tensor | None = None) -> Tensor:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        loss = plain(logits, targets, weight)
        if z_loss:
            added = z_loss * logits.logsumexp(-1).square().sum()
            divisor = targets.numel() if weight is None else weight[targets].sum()
            loss = loss + (added / divisor if reduction == "mean" else added)
        return loss

    return formula if softcap is not None or z_loss or "weight" in row.options else plain


def _liger(function: Any, row: Row) -> Forward:
    """A call waits for the device, to count the targets that are not ignored and to find targets out of range, so its
    time includes some of the host's. With weights Liger's z-loss is divided by the number of rows, not by their
    weights."""
    options = row.options
    softcap = float(options["softcap"]) if "softcap" in options else None  # an integer would select another kernel
    rest = (options.get("z_loss", 0.0), options.get("label_smoothing", 0.0), options["reduction"], softcap)
    return lambda logits, targets, weight=None: function.apply(logits, targets, weight, -100, *rest)[0]


def _fla(module: Any, row: Row) -> Forward:
    loss: Forward = module(
        reduction=row.options["reduction"],
        label_smoothing=row.options.get("label_smoothing", 0.0),
        lse_square_scale=row.options.get("z_loss", 0.0),
        logit_softcapping=row.options.get("softcap"),
        inplace_backward=row.in_place,
    )
    return loss


def _quack(module: Any, row: Row) -> Forward:
    """QuACK has one kernel for both directions, in place, which gives the gradient of a sum only. A mean would need
    another pass to divide it, so rows with a mean call the usual function, with its backward in place."""
    reduction = row.options["reduction"]
    if row.in_place and reduction == "sum":
        function: Any = _QuackForwardBackward.apply
        return lambda logits, targets, weight=None: function(module, logits, targets, weight)
    return lambda logits, targets, weight=None: module.cross_entropy(
        logits, targets, weight=weight, reduction=reduction, inplace_backward=row.in_place
    )


class _QuackForwardBackward(torch.autograd.Function):
    """quack offers its kernel as a function of tensors; this class is all that autograd needs around it. Like any user
    of the kernel, the backward assumes an upstream gradient of 1."""

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


_TORCH = Provider("torch", "torch.nn.functional:cross_entropy", _torch)

PROVIDERS = (
    Provider("eaves", "eaves:cross_entropy", _eaves),
    _TORCH,
    compiled(_TORCH),
    peer("liger", "liger_kernel.ops:LigerCrossEntropyFunction", _liger, "liger-kernel",
         lambda row: "" if row.in_place else "the forward overwrites the logits with the gradient"),
    peer("fla", "fla.modules:FusedCrossEntropyLoss", _fla, "fla-core", lambda row: _lacking(row, "weight")),
    peer("quack", "quack.cross_entropy", _quack, "quack-kernels nvidia-cutlass-dsl",
         lambda row: _lacking(row, "label_smoothing", "softcap", "z_loss")),
)  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------- rows


def _row(batch: int, classes: int, mode: Mode, dtype_name: str, **options: Any) -> Row:
    dtype = DTYPES[dtype_name]
    result_dtype = torch.promote_types(dtype, torch.float32)
    options = {"reduction": "mean"} | options | ({"in_place": True} if mode == "fwd+bwd" else {})
    logits_bytes, loss_bytes = batch * classes * dtype.itemsize, result_dtype.itemsize
    weight_bytes = classes * loss_bytes if "weight" in options else 0
    # The forward passes the lse and the divisor of a mean to the backward. Both at once need not write them.
    passed_on = batch * loss_bytes + (loss_bytes if options["reduction"] == "mean" else 0)
    read_bytes = logits_bytes + batch * torch.int64.itemsize + weight_bytes
    write_bytes = {"fwd": loss_bytes + passed_on, "bwd": logits_bytes, "fwd+bwd": loss_bytes + logits_bytes}

    def make_inputs(device: torch.device, seed: int) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed + 1)
        arguments = [
            normal([batch, classes], dtype, device, seed).requires_grad_(),
            torch.randint(classes, (batch,), device=device, generator=generator),
        ]
        if "weight" in options:
            weights = torch.rand(classes, dtype=result_dtype, device=device, generator=generator)
            arguments.append(weights + 0.5)  # like class weights, and far from 0, because a mean divides by them
        is_1 = mode == "fwd+bwd"
        one = torch.ones((), dtype=result_dtype, device=device)
        return Inputs(tuple(arguments), one if is_1 else normal([], result_dtype, device, seed + 1))

    return Row(
        *("cross_entropy", mode, dtype_name, {"batch": batch, "v": classes}),
        *(read_bytes + (loss_bytes + passed_on if mode == "bwd" else 0), write_bytes[mode]),
        0 if mode == "fwd" else logits_bytes,
        make_inputs=make_inputs,
        options=options,
    )


def _rows(request: Request) -> list[Row]:
    is_quick, dtype = request.sweep == "quick", request.dtype
    batch = 256 if is_quick and request.device_type == "cpu" else 4096
    modes: tuple[Mode, ...] = (*_ALONE, "fwd+bwd") if is_quick else _ALONE
    rows = [_row(batch, 2**power, mode, dtype) for mode in modes for power in range(10, 18)]
    if is_quick:
        # The gradient of a sum needs no divisor, which a kernel for both directions may not know in time.
        rows += [_row(batch, classes, "fwd+bwd", dtype, reduction="sum") for classes in (8192, 32768, 131072)]
        rows += [_row(batch, 32768, mode, dtype, **options) for mode in modes for options in (_SMOOTHING, _ALL_OPTIONS)]
        if not request.has_dtype:
            rows += [_row(batch, 32768, mode, "fp32") for mode in modes]
    return rows


def _row_of_shape(shape: Mapping[str, Any], dtype: str) -> Row:
    return _row(shape["rows"], shape["v"], "fwd+bwd", dtype)


OPERATOR = Operator("cross_entropy", PROVIDERS, _rows, ("rows,v",), _row_of_shape)
