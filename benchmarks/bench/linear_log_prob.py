"""linear_log_prob, as post-training calls a model's head, beside the functions of its libraries. The rows:
log-probabilities of chosen tokens with entropies, and the gradients of both in hidden states and head; the same without
gradients, for a reference model (nothing requires a gradient, as under torch.no_grad()); log-probabilities alone over a
frozen head (LoRA), with the gradient of the hidden states; and on a GPU a backward alone, with a share of rows that
have upstream gradients of 0 (groups with equal rewards).

With entropies a call returns both, [2, rows], and both have a random upstream gradient, like advantages.
The column `limit` is the matrix products (`head.py`): three, one, and two. The logits have a deviation of 1.3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .benchmark import DTYPES, Forward, Inputs, Mode, Operator, Provider, Request, Row, compiled, peer
from .head import Shape, head_row

# ------------------------------------------------------------------------------------------------------------ providers


def _has_entropy(row: Row) -> bool:
    return "entropy" in row.options


def _eaves(algorithm: str, kept: float = 1.0) -> Callable[[Any, Row], Forward]:
    """`kept` is the share of rows that fit in the keep_bytes of "keep"."""

    def make(function: Any, row: Row) -> Forward:
        options: dict[str, Any] = {"algorithm": algorithm, "skip_ignored": "zero_rows" in row.options}
        if kept != 1.0:
            options["keep_bytes"] = int(
                kept * 2 * row.shape["batch"] * (row.shape["v"] + 64)
            )  # numbers beside the logits
        if not _has_entropy(row):
            return lambda hidden, head, tokens: function(hidden, head, tokens, **options)

        def forward(hidden: Tensor, head: Tensor, tokens: Tensor) -> Tensor:
            out = function(hidden, head, tokens, outputs="entropy", **options)
            return torch.stack((out.log_prob, out.entropy))

        return forward

    return make


class _AsAFunction(torch.autograd.Function):
    """linear_log_prob_loss with a loss that has the row's upstream gradients. Here they are known only in the backward,
    which computes all three products and writes the outputs that the forward has returned."""

    @staticmethod
    def forward(ctx: Any, loss_of: Any, hidden: Tensor, head: Tensor, tokens: Tensor) -> Tensor:
        out = torch.empty(2, len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
        ctx.loss_of, ctx.out = loss_of, out
        ctx.save_for_backward(hidden, head, tokens)
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[None, Tensor, Tensor, None]:
        hidden, head, tokens = (each.detach() for each in ctx.saved_tensors)
        differentiable = [hidden.requires_grad_(), head.requires_grad_()]

        def loss(log_prob: Tensor, entropy: Tensor, rows: slice) -> Tensor:
            ctx.out[0, rows], ctx.out[1, rows] = log_prob.detach(), entropy.detach()
            return (upstream[0, rows] * log_prob + upstream[1, rows] * entropy).sum()

        with torch.enable_grad():
            total = ctx.loss_of(hidden, head, tokens, loss, entropy=True)
        grad_hidden, grad_head = torch.autograd.grad(total, differentiable)
        return None, grad_hidden, grad_head, None


def _eaves_function(function: Any, row: Row) -> Forward:
    return lambda hidden, head, tokens: _AsAFunction.apply(function, hidden, head, tokens)  # type: ignore[no-untyped-call]


def _of_logits(logits: Tensor, tokens: Tensor, has_entropy: bool) -> Tensor:
    """The formula in float32, as trainers compute it (float64 for float64)."""
    log_p = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
    log_prob = log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return torch.stack((log_prob, -(log_p.exp() * log_p).sum(-1))) if has_entropy else log_prob


def _torch(module: Any, row: Row) -> Forward:
    """The formula with all logits at once."""
    has_entropy = _has_entropy(row)
    return lambda hidden, head, tokens: _of_logits(hidden @ head.t(), tokens, has_entropy)


def _trl(function: Any, row: Row) -> Forward:
    """TRL's function as its trainers call it: 32768 tokens of the vocabulary at a time. The backward has three
    products, two with a frozen head, and rounds logits to the dtype of the hidden states."""
    outputs = ("entropy",) if _has_entropy(row) else ()

    def forward(hidden: Tensor, head: Tensor, tokens: Tensor) -> Tensor:
        log_prob, entropy, *_ = function.apply(hidden, head, None, tokens, 1.0, 32768, None, 1.0, outputs)
        return log_prob if entropy is None else torch.stack((log_prob, entropy))

    return forward


def _verl(function: Any, row: Row) -> Forward:
    """verl's function computes the entropy in every call, and in the backward the gradient of the head, even a frozen
    one."""

    def forward(hidden: Tensor, head: Tensor, tokens: Tensor) -> Tensor:
        log_prob, entropy = function(hidden, head, tokens, 1.0, "none")
        return torch.stack((log_prob, entropy)) if _has_entropy(row) else log_prob

    return forward


def _liger(module: Any, row: Row) -> Forward:
    """The private function with which Liger's chunked losses (GRPO, PPO) compute log-probabilities, called as they call
    it, but on all rows at once. It consists of torch's operators, and multiplies gradients in float32."""
    chunk = module._SELECTIVE_LOGPROB_VOCAB_CHUNK_SIZE
    function: Any = module._ChunkedSelectiveLogProbFunction.apply
    return lambda hidden, head, tokens: function(hidden, head, tokens, None, 1.0, chunk)


def _liger_scaled(function: Any, row: Row) -> Forward:
    """The operator that verl's users get from Liger, with Liger's newer kernels (on Hopper and Blackwell)."""

    def forward(hidden: Tensor, head: Tensor, tokens: Tensor) -> Tensor:
        if not _has_entropy(row):
            loss: Tensor = function.apply(hidden, head, tokens)
            return -loss
        loss, entropy = function.apply(hidden, head, tokens, 1.0, -100, 1, True)
        return torch.stack((-loss, entropy))

    return forward


def _no_entropy(row: Row) -> str:
    return "no entropy" if _has_entropy(row) else _no_zero_rows(row)


def _no_zero_rows(row: Row) -> str:
    return "multiplies all rows" if "zero_rows" in row.options else ""


def _not_frozen(row: Row) -> str:
    # Only the backward knows the factor of the rows, so both compute the logits again for the head's gradient.
    return "" if "frozen_head" in row.options else "the same as eaves"


def _not_recomputed(row: Row) -> str:
    if row.mode == "fwd":
        return "the same as eaves"
    return "eaves takes two products" if "frozen_head" in row.options else _no_zero_rows(row)


_ELP = "eaves:linear_log_prob"
_TORCH = Provider("torch", "torch", _torch, lacks=_no_zero_rows)
_SCALED = "liger_kernel.ops.fused_linear_scaled_cross_entropy:LigerFusedLinearScaledCrossEntropyFunction"

PROVIDERS = (
    Provider("eaves", _ELP, _eaves("auto")),
    Provider("eaves-recompute", _ELP, _eaves("recompute"), lacks=_not_frozen),
    Provider("eaves-keep", _ELP, _eaves("keep"), lacks=_not_recomputed),
    Provider("eaves-keep-half", _ELP, _eaves("keep", 0.5), lacks=_not_recomputed),
    Provider("eaves-function", "eaves:linear_log_prob_loss", _eaves_function, lacks=_not_recomputed),
    _TORCH,
    compiled(_TORCH),
    Provider("trl", "trl.kernels.chunked_logprob:ChunkedLogProbFunction", _trl, ("trl",), lacks=_no_zero_rows),
    peer("verl", f"{__package__}.verl_kernel:linear_cross_entropy", _verl, "verl", _no_zero_rows),
    Provider("liger", "liger_kernel.chunked_loss.fused_linear_ppo", _liger, ("liger-kernel",), lacks=_no_entropy),
    peer("liger-scaled", _SCALED, _liger_scaled, "liger-kernel", _no_zero_rows),
)

# ----------------------------------------------------------------------------------------------------------------- rows


def _logits_gradient(logits: Tensor, inputs: Inputs, rows: slice) -> Tensor:
    logits = logits.requires_grad_()
    out = _of_logits(logits, inputs.arguments[2][rows], inputs.grad_out.dim() == 2)
    (gradient,) = torch.autograd.grad(out, logits, inputs.grad_out[..., rows])
    return gradient


# Peers round logits to 16 bits, each by up to 0.016 if the largest log-probability is about 15.
_ROUNDED_LOGITS = 0.01

KINDS: tuple[tuple[Mode, dict[str, Any]], ...] = (
    ("fwd+bwd", {"entropy": True}),
    ("fwd", {"entropy": True}),
    ("fwd+bwd", {"frozen_head": True}),
)
"""Mode and options of the rows."""

_ZERO_ROWS = (0.0, 0.3, 0.6)


def _row(batch: int, features: int, classes: int, mode: Mode, dtype: str, **options: Any) -> Row:
    shape, out_shape = Shape(batch, features, classes), (2, batch) if "entropy" in options else (batch,)
    row = head_row("linear_log_prob", mode, dtype, shape, out_shape, options, _logits_gradient)
    if zero_rows := options.get("zero_rows"):
        row = replace(row, make_inputs=_with_zero_rows(row, zero_rows))
    return replace(row, tolerance=_ROUNDED_LOGITS if DTYPES[dtype].itemsize == 2 and mode == "fwd" else None)


def _with_zero_rows(row: Row, share: float) -> Callable[[torch.device, int], Inputs]:
    """The inputs with an upstream gradient of 0 in this share of the rows."""

    def make(device: torch.device, seed: int) -> Inputs:
        inputs = row.make_inputs(device, seed)
        generator = torch.Generator(device).manual_seed(seed + 4)
        is_zero = torch.rand(inputs.grad_out.shape[-1], device=device, generator=generator) < share
        return replace(inputs, grad_out=inputs.grad_out.masked_fill(is_zero, 0))

    return make


def _rows(request: Request) -> list[Row]:
    """The rows; none in the sweep "published". The vocabularies on a GPU are Mistral's and Qwen's."""
    is_cpu = request.device_type == "cpu"
    batch, features, vocabularies = (512, 1024, (1024, 32768)) if is_cpu else (8192, 4096, (32768, 151936))
    dtypes = [request.dtype] + (["fp32"] if is_cpu and not request.has_dtype else [])
    if request.sweep != "quick":
        return []
    rows = [_row(batch, features, vocabulary, mode, dtype, **options) for mode, options in KINDS for dtype in dtypes
            for vocabulary in vocabularies]  # fmt: skip
    if is_cpu:
        return rows
    return rows + [_row(batch, features, vocabularies[-1], "bwd", request.dtype, zero_rows=each) for each in _ZERO_ROWS]


def _row_of_shape(shape: Mapping[str, Any], dtype: str) -> Row:
    return _row(shape["rows"], shape["dim"], shape["v"], "fwd+bwd", dtype, entropy=True)


OPERATOR = Operator("linear_log_prob", PROVIDERS, _rows, ("rows,dim,v",), _row_of_shape)
