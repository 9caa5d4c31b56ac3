"""linear_kl_div, as distillation calls the heads of a student and a teacher twice as wide, beside the functions of its
libraries: forward KL and the Jensen-Shannon divergence with gradients in the student's hidden states and head, forward
KL alone, and the top 64 of a teacher that another process serves.

Losses are means over the rows, with the upstream gradient 1. The column `limit` is the matrix products: the student's
(`head.py`) and the teacher's one. Both have logits with a deviation of 1.3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .benchmark import DTYPES, Forward, Inputs, Mode, Operator, Provider, Request, Row, compiled, peer
from .head import Shape, head_tensors, products

_PIECE_ROWS = 256  # rows of teacher logits at once, for its top tokens

# ------------------------------------------------------------------------------------------------------------ providers


def _eaves(function: Any, row: Row) -> Forward:
    divergence = row.options["divergence"]
    if "top_k" not in row.options:
        return lambda *heads: function(*heads, divergence=divergence)
    return lambda hidden, head, tokens, log_probs: function(
        hidden, head, teacher_tokens=tokens, teacher_log_probs=log_probs, teacher_rest="class", divergence=divergence
    )


def _log_softmax(hidden: Tensor, head: Tensor) -> Tensor:
    """log softmax in float32, as trainers compute it (float64 for float64)."""
    return torch.log_softmax((hidden @ head.t()).to(torch.promote_types(hidden.dtype, torch.float32)), -1)


def _with_rest(log_probs: Tensor) -> Tensor:
    """The log-probabilities, with one more class for the tokens that are not listed."""
    rest = (1 - log_probs.exp().sum(-1, keepdim=True)).clamp(min=torch.finfo(log_probs.dtype).eps)
    return torch.cat([log_probs, rest.log()], -1)


def _mean_divergence(log_s: Tensor, log_t: Tensor, row: Row) -> Tensor:
    if row.options["divergence"] == "forward":
        return torch.nn.functional.kl_div(log_s, log_t, reduction="batchmean", log_target=True)
    log_m = ((log_t.exp() + log_s.exp()) / 2).log()
    return ((log_t.exp() * (log_t - log_m) + log_s.exp() * (log_s - log_m)) / 2).sum(-1).mean()


def _torch(module: Any, row: Row) -> Forward:
    """The formula with all logits of both at once."""

    def of_heads(hidden: Tensor, head: Tensor, teacher_hidden: Tensor, teacher_head: Tensor) -> Tensor:
        with torch.no_grad():
            log_t = _log_softmax(teacher_hidden, teacher_head)
        return _mean_divergence(_log_softmax(hidden, head), log_t, row)

    def of_top_k(hidden: Tensor, head: Tensor, tokens: Tensor, log_probs: Tensor) -> Tensor:
        log_s = _log_softmax(hidden, head).gather(1, tokens)
        return _mean_divergence(_with_rest(log_s), _with_rest(log_probs), row)

    return of_top_k if "top_k" in row.options else of_heads


def _beta(row: Row) -> float:
    """beta, which is 0 for the forward KL divergence in TRL and Liger."""
    return 0.0 if row.options["divergence"] == "forward" else 0.5


def _trl(function: Any, row: Row) -> Forward:
    """TRL's backward computes the logits again: six products."""

    def forward(hidden: Tensor, head: Tensor, teacher_hidden: Tensor, teacher_head: Tensor) -> Tensor:
        rows, _ = function.apply(hidden, head, None, teacher_hidden, teacher_head, None, _beta(row))
        mean: Tensor = rows.mean()
        return mean

    return forward


def _liger(function: Any, row: Row) -> Forward:
    """Liger's call computes the gradients, even in a forward alone."""
    return lambda *heads: function.apply(*heads, None, _beta(row))


def _no_top_k(row: Row) -> str:
    return "no top k" if "top_k" in row.options else ""


_TORCH = Provider("torch", "torch", _torch)

PROVIDERS = (
    Provider("eaves", "eaves:linear_kl_div", _eaves),
    _TORCH,
    compiled(_TORCH),
    peer("trl", "trl.kernels.chunked_divergence:ChunkedDivergenceFunction", _trl, "trl", _no_top_k),
    peer("liger", "liger_kernel.ops.fused_linear_jsd:LigerFusedLinearJSDFunction", _liger, "liger-kernel", _no_top_k),
)

# ----------------------------------------------------------------------------------------------------------------- rows


def _limit(row: Row) -> Callable[[Inputs], Callable[[], object]]:
    def gradient(logits: Tensor, inputs: Inputs, rows: slice) -> Tensor:
        _, _, *teacher = inputs.arguments
        if "top_k" in row.options:
            given = torch.log_softmax(logits.float(), -1).requires_grad_()
            loss = _mean_divergence(_with_rest(given.gather(1, teacher[0][rows])), _with_rest(teacher[1][rows]), row)
            (of_given,) = torch.autograd.grad(loss, given)
            found = of_given - given.detach().exp() * of_given.sum(-1, keepdim=True)
        else:
            z = logits.float().requires_grad_()
            log_t = _log_softmax(teacher[0][rows], teacher[1])
            (found,) = torch.autograd.grad(_mean_divergence(torch.log_softmax(z, -1), log_t, row), z)
        return (found * (logits.shape[0] / inputs.arguments[0].shape[0])).to(logits.dtype)

    def make(inputs: Inputs) -> Callable[[], object]:
        of_student, (_, _, *teacher) = products(row.mode, gradient)(inputs), inputs.arguments
        if "top_k" in row.options:
            return of_student
        hidden, head = teacher
        head = torch.nn.functional.pad(head, (0, 0, 0, -len(head) % (16 // head.itemsize)))
        logits = torch.matmul(hidden, head.t())

        def run() -> None:
            of_student()
            torch.matmul(hidden, head.t(), out=logits)

        return run

    return make


def _top_tokens(hidden: Tensor, head: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The teacher's likeliest classes of each row, and their log-probabilities."""
    found = [torch.topk(_log_softmax(each, head), count) for each in torch.split(hidden, _PIECE_ROWS)]
    return torch.cat([each.indices for each in found]), torch.cat([each.values for each in found])


def _row(shape: Shape, mode: Mode, dtype_name: str, **options: Any) -> Row:
    dtype, (batch, features, classes) = DTYPES[dtype_name], shape
    result_dtype, top_k = torch.promote_types(dtype, torch.float32), options.get("top_k")
    student_bytes = (batch + classes) * features * dtype.itemsize
    teacher_bytes = 2 * student_bytes
    if top_k is not None:
        teacher_bytes = batch * top_k * (torch.int64.itemsize + result_dtype.itemsize)
    gradient_bytes = 0 if mode == "fwd" else student_bytes

    def make_inputs(device: torch.device, seed: int) -> Inputs:
        hidden, head, _ = head_tensors(*shape, dtype, device, seed, is_dense=True)
        teacher = head_tensors(batch, 2 * features, classes, dtype, device, seed + 10, is_dense=True)[:2]
        if top_k is not None:
            teacher = _top_tokens(*teacher, top_k)
        for each in (hidden, head):
            each.requires_grad_(mode != "fwd")
        return Inputs((hidden, head, *teacher), torch.ones((), dtype=result_dtype, device=device))

    of_student = {"fwd": 1, "bwd": 2, "fwd+bwd": 3}[mode]
    row = Row(
        *("linear_kl_div", mode, dtype_name, {"batch": batch, "dim": features, "v": classes}),
        student_bytes + teacher_bytes,
        gradient_bytes + result_dtype.itemsize,
        gradient_bytes,
        make_inputs=make_inputs,
        options=options,
        flops=2 * batch * classes * features * (of_student + (0 if top_k else 2)),
        # Peers round logits to 16 bits.
        tolerance=0.01 if dtype.itemsize == 2 and mode == "fwd" else None,
    )
    return replace(row, make_limit=_limit(row))


KINDS: tuple[tuple[Mode, dict[str, Any]], ...] = (
    ("fwd+bwd", {"divergence": "forward"}),
    ("fwd+bwd", {"divergence": "jsd"}),
    ("fwd", {"divergence": "forward"}),
    ("fwd+bwd", {"divergence": "forward", "top_k": 64}),
)
"""Mode and options of the rows."""


def _rows(request: Request) -> list[Row]:
    """The rows; none in the sweep "published". The vocabularies on a GPU are Mistral's and Qwen's."""
    is_cpu = request.device_type == "cpu"
    batch, features, vocabularies = (256, 512, (1024, 32768)) if is_cpu else (8192, 2048, (32768, 151936))
    dtypes = [request.dtype] + (["fp32"] if is_cpu and not request.has_dtype else [])
    if request.sweep != "quick":
        return []
    return [_row(Shape(batch, features, classes), mode, dtype, **options) for mode, options in KINDS
            for dtype in dtypes for classes in vocabularies]  # fmt: skip


def _row_of_shape(shape: Mapping[str, Any], dtype: str) -> Row:
    return _row(Shape(shape["rows"], shape["dim"], shape["v"]), "fwd+bwd", dtype, divergence="forward")


OPERATOR = Operator("linear_kl_div", PROVIDERS, _rows, ("rows,dim,v",), _row_of_shape)
