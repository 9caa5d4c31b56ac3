"""TRL's trainers with eaves.linear_cross_entropy and eaves.linear_kl_div as their heads.

    eaves.trl.install()           in every process that trains, before it makes a trainer or after
    eaves.trl.uninstall()         as it was
    with eaves.trl.install():     both

Three functions of TRL are replaced. SFT, DPO, KTO, GRPO and RLOO take their log-probabilities from
ChunkedLogProbFunction, DistillationTrainer its divergences from ChunkedDivergenceFunction. GKDTrainer computes its loss
in a method (hf/distillation.py). `eaves.trl.is_active()` says whether all are replaced, and `python -m eaves info`
whether this TRL is known.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eaves._calls.log_prob import tempered
from eaves._replacement import Installed, replacement_of
from eaves._torch.head import check_algorithm
from eaves.functional.linear_cross_entropy import linear_cross_entropy
from eaves.functional.linear_kl_div import linear_kl_div
from eaves.hf.distillation import gkd_loss

__all__ = ["install", "is_active", "uninstall"]

# The outputs of linear_cross_entropy by TRL's names.
_OUTPUTS = {"entropy": "entropy", "log_sum_sq_probs": "sum_sq", "mean_logits": "mean_logit", "is_top1": "argmax"}

_GKD = "trl.experimental.gkd.gkd_trainer"

replacement = replacement_of("trl")


def install(
    *, algorithm: str = "speed", workspace_bytes: int | None = None, keep_bytes: int | None = None
) -> Installed:
    """Lets TRL's trainers compute log-probabilities, entropies, divergences and their metrics with eaves.

    Log-probabilities, entropies and gradients are those of TRL's function, from the product's float32 sums; the
    gradient of the head is added up in float32. Metrics take no product of their own. Of a 16-bit head that is cast to
    float32 (cast_lm_head_to_fp32) the copy is kept until the backward.
    TRL's `chunk_size` is not read: `workspace_bytes` says how much is computed at once.

    DistillationTrainer takes four products on a GPU, three with a frozen head (LoRA); TRL's own function computes both
    logits two to three times. GKDTrainer does not hold the logits of either model. It keeps TRL's own loss if a head is
    no plain torch.nn.Linear, under DeepSpeed, FSDP of version 1, DDP with find_unused_parameters and torch.compile, and
    in an evaluation with compute_metrics, which reads the logits.

    Args:
        algorithm, keep_bytes: as in eaves.linear_cross_entropy, for log-probabilities. With "speed" a frozen head
            (LoRA) takes two products instead of three; a gradient of the entropy, which TRL's trainers do not take, two
            more. "keep" takes three where the head learns, in 4 bytes for each logit: TRL's metrics need all of a row.
        workspace_bytes: as in eaves.linear_cross_entropy and eaves.linear_kl_div.

    Returns:
        A context manager, whose end undoes it. A second install takes new options.

    Raises:
        ImportError: TRL is not installed, or cannot be imported.
        RuntimeError: it is a version that eaves does not know, or somebody else has replaced one of the functions.
        ValueError, TypeError: an option is none of eaves.linear_cross_entropy.
    """
    options = {"algorithm": algorithm, "workspace_bytes": workspace_bytes, "keep_bytes": keep_bytes}
    check_algorithm("linear_cross_entropy", **options)
    if replacement.is_known() and _GKD not in sys.modules:
        with warnings.catch_warnings():  # TRL warns users of its experimental trainers
            warnings.simplefilter("ignore")
            import_module(_GKD)
    return replacement.install(
        lambda theirs: (
            SimpleNamespace(apply=functools.partial(_apply, options)),
            SimpleNamespace(apply=functools.partial(_divergence, workspace_bytes)),
            gkd_loss(theirs[2], workspace_bytes),
        )
    )


uninstall, is_active = replacement.uninstall, replacement.is_active


# --------------------------------------------------------------------------------------------------- log-probabilities


class _Call(NamedTuple):
    """The arguments of ChunkedLogProbFunction.apply of TRL 1.16."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    targets: Tensor  # [N]
    temperature: float
    chunk_size: int
    softcap: float | None = None
    logit_scale: float = 1.0
    outputs: tuple[str, ...] = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def _apply(options: dict[str, Any], *arguments: Any) -> tuple[Tensor | None, ...]:
    """As ChunkedLogProbFunction.apply: the log-probabilities and all outputs; what `outputs` does not name is None."""
    hidden, weight, bias, targets, temperature, _, final_softcap, logit_scale, outputs = _Call(*arguments)
    _refuse_zero3(weight)
    product: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if not torch.is_autocast_enabled(hidden.device.type) and weight.dtype != hidden.dtype:
        if weight.dtype == torch.float32 and hidden.dtype != torch.float64:
            # The gradient of a float32 head is not rounded there.
            product = torch.autocast(hidden.device.type, hidden.dtype)
        else:
            weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    scale, softcap = tempered("eaves.trl", temperature, logit_scale, final_softcap)
    assert scale is not None
    names = [name for name in _OUTPUTS if name in outputs]  # TRL names log_probs too
    with product:
        out: Any = linear_cross_entropy(
            hidden, weight, targets, linear_bias=bias, reduction="none", scale=scale, softcap=softcap,
            outputs=tuple(_OUTPUTS[name] for name in names),
            grad_weight_dtype=None if hidden.dtype == torch.float64 else torch.float32, **options,
        )  # fmt: skip
    loss, *others = out if names else (out,)
    found = dict(zip(names, others))
    if "log_sum_sq_probs" in found:
        found["log_sum_sq_probs"] = found["log_sum_sq_probs"].log()
    if "is_top1" in found:
        found["is_top1"] = found["is_top1"] == targets
    entropy, log_sum_sq_probs, mean_logits, is_top1 = map(found.get, _OUTPUTS)
    return 0 - loss, entropy, log_sum_sq_probs, mean_logits, is_top1


def _refuse_zero3(weight: Tensor) -> None:
    if hasattr(weight, "ds_id"):
        raise NotImplementedError(
            "eaves.trl: this head is in pieces (DeepSpeed's ZeRO-3), and would be read again after they are released; "
            "call eaves.trl.uninstall()"
        )


# --------------------------------------------------------------------------------------------------------- divergences


class _DivergenceCall(NamedTuple):
    """The arguments of ChunkedDivergenceFunction.apply of TRL 1.16."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    teacher_hidden: Tensor  # [N, E]
    teacher_weight: Tensor  # [V, E]
    teacher_bias: Tensor | None  # [V]
    beta: float
    temperature: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    teacher_logit_scale: float = 1.0
    teacher_softcap: float | None = None


def _divergence(workspace_bytes: int | None, *arguments: Any) -> tuple[Tensor, Tensor]:
    """As ChunkedDivergenceFunction.apply: the divergence of each row and the student's entropy, without a gradient."""
    call = _DivergenceCall(*arguments)
    _refuse_zero3(call.weight)
    _refuse_zero3(call.teacher_weight)
    out = linear_kl_div(
        call.hidden, call.weight.to(call.hidden.dtype), call.teacher_hidden,
        call.teacher_weight.to(call.teacher_hidden.dtype), bias=_of_head(call.bias, call.hidden),
        teacher_bias=_of_head(call.teacher_bias, call.teacher_hidden), divergence="jsd", beta=call.beta,
        temperature=call.temperature, scale=call.logit_scale, softcap=call.softcap,
        teacher_scale=call.teacher_logit_scale, teacher_softcap=call.teacher_softcap,
        reduction="sum" if _adds_up(call.hidden) else "none", outputs=("divergence", "entropy"),
        workspace_bytes=workspace_bytes,
    )  # fmt: skip
    if not _adds_up(call.hidden):
        return out.loss, out.entropy.detach()
    rows: Tensor = _RowsOfSum.apply(out.loss, out.divergence)  # type: ignore[no-untyped-call]
    return rows, out.entropy.detach()


def _adds_up(hidden: Tensor) -> bool:
    """Whether TRL adds up the rows as they are. Without Triton it passes all rows, and masks some of the results."""
    return hidden.is_cuda


def _of_head(bias: Tensor | None, hidden: Tensor) -> Tensor | None:
    return None if bias is None else bias.to(hidden.dtype)


class _RowsOfSum(torch.autograd.Function):
    """A sum and its rows -> the rows. If all rows have the same upstream gradient, because they are added up, it is one
    of the sum, and the sum's gradients are computed already."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, rows: Tensor) -> Tensor:
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None]:
        if upstream.numel() and upstream.stride() == (0,):
            return upstream[0], None
        return None, upstream
