"""linear_cross_entropy: the published rows (vocabulary by vocabulary), each direction and both, three kinds of data,
and time against `workspace_bytes`.

The column `limit` is the matrix products (`head.py`): for the loss the product of the logits, for the backward the two
products with the gradient of the logits, for both all three.

Data: "spread" has normal inputs and weights; the logits have a deviation of 64 (at 4096 features), so the gradient is 0
almost everywhere. "dense" has smaller inputs, logits with a deviation of 1.3, and a gradient everywhere. "trained" has
logits like a language model's late in its training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .benchmark import DTYPES, Forward, Inputs, Mode, Operator, Provider, Request, Row, compiled, peer
from .head import Shape, head_row

# Providers that take no bias. The others take it as their fourth argument.
WITHOUT_BIAS = ("liger-scaled", "cut-cross-entropy", "quack")

# ------------------------------------------------------------------------------------------------------------ providers


def _eaves(algorithm: str) -> Callable[[Any, Row], Forward]:
    def make(function: Any, row: Row) -> Forward:
        # If the forward computes the gradients, a backward alone does nothing.
        is_alone = row.mode == "bwd" and algorithm != "keep"
        keywords: dict[str, Any] = {"algorithm": "recompute" if is_alone else algorithm}
        if "workspace_mib" in row.options:
            keywords["workspace_bytes"] = row.options["workspace_mib"] * 2**20
        return lambda x, weight, target, bias=None: function(x, weight, target, linear_bias=bias, **keywords)

    return make


def _torch(functional: Any, row: Row) -> Forward:
    """The formula with all logits at once."""
    return lambda x, weight, target, bias=None: functional.cross_entropy(functional.linear(x, weight, bias), target)


def _torch_chunked(options: Any, row: Row) -> Forward:
    """F.linear_cross_entropy, which PyTorch has since 2.13."""
    functional: Any = torch.nn.functional
    return lambda x, weight, target, bias=None: functional.linear_cross_entropy(
        x, weight, target, linear_bias=bias, options=options()
    )


def _liger(function: Any, row: Row) -> Forward:
    return lambda x, weight, target, bias=None: function.apply(x, weight, target, bias)[0]


def _liger_larger(function: Any, row: Row) -> Forward:
    """Liger with chunks of about eaves' default size: four times as many rows (chunk_mem_const)."""
    unused = (None, -100, 0.0, 0.0, "mean", None, False, None, False, False, False, None, None)
    return lambda x, weight, target, bias=None: function.apply(x, weight, target, bias, *unused, 4)[0]


def _liger_scaled(function: Any, row: Row) -> Forward:
    """Liger's newer kernels (on Hopper and Blackwell with the products in them), which compute the logits again in the
    backward and return the loss of each row."""

    def forward(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        losses = function.apply(x, weight, target)
        mean: Tensor = (losses[0] if isinstance(losses, tuple) else losses).mean()
        return mean

    return forward


def _cut_cross_entropy(function: Any, row: Row) -> Forward:
    """Cut Cross-Entropy with its defaults: it leaves out gradients that it considers negligible (filter_eps)."""
    return lambda x, weight, target: function(x, weight, target)


def _fla(**keywords: Any) -> Callable[[Any, Row], Forward]:
    def make(module: Any, row: Row) -> Forward:
        loss = module(**keywords)
        return lambda x, weight, target, bias=None: loss(x, target, weight, bias)

    return make


def _quack(function: Any, row: Row) -> Forward:
    # QuACK 0.6.5 fails with its default, 4096 rows at a time, if there are as many features.
    return lambda x, weight, target: function(x, weight, target, chunk_size=3072 if weight.shape[1] == 4096 else 4096)


def _bounded(row: Row) -> str:
    return "no bound of its workspace" if "workspace_mib" in row.options else ""


def _at_once(row: Row) -> str:
    """The reason that leaves out a backward alone: the provider computes the gradients in the forward."""
    return _bounded(row) or ("the forward computes the gradients" if row.mode == "bwd" else "")


def _not_both(row: Row) -> str:
    return "" if row.mode == "fwd+bwd" and not _bounded(row) else "the same as eaves"


def _not_backward(row: Row) -> str:
    return "" if row.mode == "bwd" else "the same as eaves, or three products as eaves takes"


def _tried_out(row: Row) -> str:
    """The reason that leaves a row out, unless torch.compile is nearly as fast as eaves there: trying out products
    takes half a minute for each row."""
    is_near = row.mode == "fwd+bwd" and row.shape["batch"] == 12288 and 2048 <= row.shape["v"] <= 16384
    return "" if is_near and row.options["data"] == "dense" else "measured with 12288 rows of 2048 to 16,384 classes"


_LCE = "eaves:linear_cross_entropy"
_TORCH = Provider("torch", "torch.nn:functional", _torch, lacks=_bounded)
_LIGER = "liger_kernel.ops:LigerFusedLinearCrossEntropyFunction"
_FLA = "fla.modules:FusedLinearCrossEntropyLoss"
_FLA_NOTE = """\
`fla` is called with its defaults: version 0.6 casts a chunk's rows to float32 and multiplies the head's gradient in
float32. `fla-weight-dtype`, with `accumulate_grad_in_fp32=False`, multiplies it in the weight's dtype; while its line
is missing here, it is not measured yet."""
_QUACK = "quack.linear_cross_entropy:chunked_linear_cross_entropy"
_CUT = "cut_cross_entropy:linear_cross_entropy"
_SCALED = "liger_kernel.ops.fused_linear_scaled_cross_entropy:LigerFusedLinearScaledCrossEntropyFunction"


PROVIDERS = (
    Provider("eaves", _LCE, _eaves("auto")),
    Provider("eaves-memory", _LCE, _eaves("memory"), lacks=_not_both),
    Provider("eaves-recompute", _LCE, _eaves("recompute"), lacks=_not_both),
    Provider("eaves-keep", _LCE, _eaves("keep"), lacks=_not_backward),
    _TORCH,
    compiled(_TORCH),
    # Without CUDA graphs, because the next call of the same function would write over their memory.
    replace(
        compiled(_TORCH, "torch.compile-max-autotune", mode="max-autotune-no-cudagraphs"),
        needs_gpu=True,
        lacks=_tried_out,
    ),
    Provider("torch-chunked", "torch.nn:LinearCrossEntropyOptions", _torch_chunked, lacks=_at_once),
    peer("liger", _LIGER, _liger, "liger-kernel", _at_once),
    peer("liger-larger", _LIGER, _liger_larger, "liger-kernel", _at_once),
    peer("liger-scaled", _SCALED, _liger_scaled, "liger-kernel", _bounded),
    peer("cut-cross-entropy", _CUT, _cut_cross_entropy, "cut-cross-entropy", _bounded),
    peer("fla", _FLA, _fla(), "fla-core", _at_once, _FLA_NOTE),
    peer("fla-weight-dtype", _FLA, _fla(accumulate_grad_in_fp32=False), "fla-core", _at_once),
    peer("quack", _QUACK, _quack, "quack-kernels nvidia-cutlass-dsl", _at_once),
)

# ----------------------------------------------------------------------------------------------------------------- rows


def _logits_gradient(logits: Tensor, inputs: Inputs, rows: slice) -> Tensor:
    """The gradient of the mean of the losses."""
    target = inputs.arguments[2]
    p = torch.softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
    p[torch.arange(len(p), device=p.device), target[rows]] -= 1
    return p / len(target)


# Peers round logits to 16 bits. A logit beyond 32 is then off by up to an eighth, beyond 256 by up to one, and a
# probability by up to a factor of e.
_ROUNDED_LOGITS = 0.6


def _row(batch: int, features: int, classes: int, mode: Mode, dtype: str, **options: Any) -> Row:
    shape = Shape(batch, features, classes)
    row = head_row("linear_cross_entropy", mode, dtype, shape, (), options, _logits_gradient)
    is_rounded = DTYPES[dtype].itemsize == 2 and options["data"] != "dense"
    return replace(row, tolerance=_ROUNDED_LOGITS if is_rounded else None)


# Features and classes of heads beside the published ones: GPT-2's, and three of Qwen's.
_MODELS = ((4096, 50257), (2048, 151936), (4096, 151936), (8192, 151936))


def _rows(request: Request) -> list[Row]:
    is_quick = request.sweep == "quick"
    is_cpu = is_quick and request.device_type == "cpu"
    batch, features, powers = (512, 1024, (10, 12, 15)) if is_cpu else (12288, 4096, tuple(range(10, 18)))
    few = powers if is_cpu else (12, 15, 17)  # sizes with forward and backward also measured alone
    modes: tuple[Mode, ...] = ("fwd", "bwd", "fwd+bwd") if is_quick else ("fwd+bwd",)
    dtypes = [request.dtype] + (["fp32"] if request.device_type == "cpu" and not request.has_dtype else [])
    rows = [_row(batch, features, 2**power, mode, dtype, data=data) for dtype in dtypes
            for data in (("dense", "spread") if is_quick else ("spread",)) for mode in modes
            for power in (powers if mode == "fwd+bwd" else few)]  # fmt: skip
    if is_quick:
        rows += [_row(batch, features, 2 ** powers[-1], "fwd+bwd", request.dtype, data=data, workspace_mib=bound)
                 for data in ("dense", "spread") for bound in ((1, 4, 16) if is_cpu else (64, 256, 1024))]  # fmt: skip
    if is_quick and not is_cpu:
        rows += [_row(batch, dim, classes, "fwd+bwd", request.dtype, data="dense") for dim, classes in _MODELS]
        rows += [_row(batch, features, 2**power, "fwd+bwd", request.dtype, data="trained") for power in few[1:]]
    return rows


def _row_of_shape(shape: Mapping[str, Any], dtype: str) -> Row:
    return _row(shape["rows"], shape["dim"], shape["v"], "fwd+bwd", dtype, data="dense")


OPERATOR = Operator("linear_cross_entropy", PROVIDERS, _rows, ("rows,dim,v",), _row_of_shape)
